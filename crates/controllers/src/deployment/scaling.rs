//! The arithmetic of a rollout: how many pods each ReplicaSet should have. No I/O.

use k8s_openapi::api::apps::v1::{Deployment, ReplicaSet};
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;

use super::revision::{MAX_REPLICAS, annotation_number};

pub(super) fn wanted(deployment: &Deployment) -> i32 {
    deployment
        .spec
        .as_ref()
        .and_then(|spec| spec.replicas)
        .unwrap_or(1)
}

pub(super) fn replicas(set: &ReplicaSet) -> i32 {
    set.spec.as_ref().and_then(|spec| spec.replicas).unwrap_or(1)
}

pub(super) fn available(set: &ReplicaSet) -> i32 {
    set.status
        .as_ref()
        .and_then(|status| status.available_replicas)
        .unwrap_or(0)
}

pub(super) fn total<'a>(sets: impl IntoIterator<Item = &'a ReplicaSet>) -> i32 {
    sets.into_iter().map(replicas).sum()
}

pub(super) fn is_rolling(deployment: &Deployment) -> bool {
    let strategy = deployment.spec.as_ref().and_then(|spec| spec.strategy.as_ref());
    strategy
        .and_then(|strategy| strategy.type_.as_deref())
        .unwrap_or("RollingUpdate")
        == "RollingUpdate"
}

/// A number, or a percentage of `total`.
pub(crate) fn scaled(value: Option<&IntOrString>, total: i32, round_up: bool) -> i32 {
    match value {
        None => 0,
        Some(IntOrString::Int(number)) => *number,
        Some(IntOrString::String(text)) => {
            let percent: i64 = text.trim_end_matches('%').parse().unwrap_or(0);
            let hundredfold = percent * i64::from(total);
            let whole = if round_up {
                (hundredfold + 99).div_euclid(100)
            } else {
                hundredfold.div_euclid(100)
            };
            i32::try_from(whole).unwrap_or(i32::MAX)
        }
    }
}

/// maxSurge and maxUnavailable as numbers. Both zero would never get anywhere, so then one pod may be
/// missing.
fn bounds(deployment: &Deployment) -> (i32, i32) {
    let strategy = deployment.spec.as_ref().and_then(|spec| spec.strategy.as_ref());
    let rolling = strategy.and_then(|strategy| strategy.rolling_update.as_ref());
    let total = wanted(deployment);
    let surge = scaled(
        rolling.and_then(|rolling| rolling.max_surge.as_ref()),
        total,
        true,
    );
    let unavailable = scaled(
        rolling.and_then(|rolling| rolling.max_unavailable.as_ref()),
        total,
        false,
    );
    if surge == 0 && unavailable == 0 {
        (0, 1)
    } else {
        (surge, unavailable)
    }
}

pub(super) fn max_surge(deployment: &Deployment) -> i32 {
    if is_rolling(deployment) {
        bounds(deployment).0
    } else {
        0
    }
}

pub(super) fn max_unavailable(deployment: &Deployment) -> i32 {
    if !is_rolling(deployment) || wanted(deployment) == 0 {
        return 0;
    }
    bounds(deployment).1.min(wanted(deployment))
}

/// How large the new ReplicaSet may be now, `all` including it.
pub(super) fn new_set_size(deployment: &Deployment, all_replicas: i32, new_replicas: i32) -> i32 {
    let wanted = wanted(deployment);
    if !is_rolling(deployment) {
        return wanted;
    }
    let limit = wanted.saturating_add(max_surge(deployment));
    if all_replicas >= limit {
        return new_replicas;
    }
    new_replicas + (limit - all_replicas).min(wanted - new_replicas)
}

/// How many of `to_add` (negative: to remove) fall to this set by its share of the whole.
pub(super) fn proportion(set: &ReplicaSet, deployment: &Deployment, to_add: i32, added: i32) -> i32 {
    if replicas(set) == 0 || to_add == 0 || to_add == added {
        return 0;
    }
    let fraction = fraction(set, deployment);
    let allowed = to_add - added;
    if to_add > 0 {
        fraction.min(allowed)
    } else {
        fraction.max(allowed)
    }
}

fn fraction(set: &ReplicaSet, deployment: &Deployment) -> i32 {
    let size = replicas(set);
    let wanted = wanted(deployment);
    if wanted == 0 {
        return -size;
    }
    let max_now = wanted.saturating_add(max_surge(deployment));
    let status_replicas = deployment
        .status
        .as_ref()
        .and_then(|status| status.replicas)
        .unwrap_or(0);
    // A set without the annotation predates it; the Deployment's status tells the old whole.
    let max_before = annotation_number(set, MAX_REPLICAS)
        .filter(|max| *max > 0)
        .unwrap_or(status_replicas);
    if max_before == 0 {
        return 0;
    }
    let scaled = f64::from(size) * f64::from(max_now) / f64::from(max_before);
    scaled.round() as i32 - size
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn deployment(replicas: i32, surge: serde_json::Value, unavailable: serde_json::Value) -> Deployment {
        serde_json::from_value(
            json!({"spec": {"replicas": replicas, "selector": {}, "template": {},
            "strategy": {"type": "RollingUpdate",
                "rollingUpdate": {"maxSurge": surge, "maxUnavailable": unavailable}}}}),
        )
        .unwrap()
    }

    #[test]
    fn percentages_round_so_that_a_rollout_can_move() {
        let check = |replicas, surge, unavailable, expected: (i32, i32)| {
            let deployment = deployment(replicas, surge, unavailable);
            assert_eq!(
                (max_surge(&deployment), max_unavailable(&deployment)),
                expected,
                "{replicas}"
            );
        };
        check(3, json!("25%"), json!("25%"), (1, 0));
        check(10, json!("25%"), json!("25%"), (3, 2));
        check(10, json!(0), json!("5%"), (0, 1));
        check(4, json!("100%"), json!(9), (4, 4));
        check(0, json!("25%"), json!("25%"), (0, 0));
        check(1, json!(0), json!(0), (0, 1));
    }

    #[test]
    fn the_new_set_grows_within_the_surge() {
        let check = |all, new, expected| {
            let deployment = deployment(10, json!(2), json!(0));
            assert_eq!(new_set_size(&deployment, all, new), expected, "{all} {new}");
        };
        check(0, 0, 10);
        check(10, 0, 2);
        check(12, 2, 2);
        check(11, 5, 6);
        check(5, 5, 10);
    }

    #[test]
    fn shares_follow_the_size_of_a_set() {
        let set = |size: i32| -> ReplicaSet {
            serde_json::from_value(json!({"metadata": {"annotations": {MAX_REPLICAS: "13"}},
                "spec": {"replicas": size, "selector": {}}}))
            .unwrap()
        };
        // From 10 to 20 with a surge of 3: 8 + 5 pods become 14 + 9.
        let deployment = deployment(20, json!(3), json!(0));
        assert_eq!(proportion(&set(8), &deployment, 10, 0), 6);
        assert_eq!(proportion(&set(5), &deployment, 10, 6), 4);
        assert_eq!(proportion(&set(0), &deployment, 10, 0), 0);
    }
}
