//! Taints and tolerations.

use k8s_openapi::api::core::v1::{Taint, Toleration};

/// True if the toleration tolerates the taint. An empty effect or key matches every one.
///
/// COMPAT: the operators `Lt` and `Gt` belong to the feature gate TaintTolerationComparisonOperators, which v1.36 has
/// off by default. A toleration that has one matches nothing, as upstream does without the gate.
pub fn tolerates(toleration: &Toleration, taint: &Taint) -> bool {
    let effect = toleration.effect.as_deref().unwrap_or_default();
    if !effect.is_empty() && effect != taint.effect {
        return false;
    }
    let key = toleration.key.as_deref().unwrap_or_default();
    if !key.is_empty() && key != taint.key {
        return false;
    }
    match toleration.operator.as_deref().unwrap_or_default() {
        "Exists" => true,
        "" | "Equal" => {
            toleration.value.as_deref().unwrap_or_default() == taint.value.as_deref().unwrap_or_default()
        }
        _ => false,
    }
}

/// True if one of the tolerations tolerates the taint.
pub fn any_tolerates(tolerations: &[Toleration], taint: &Taint) -> bool {
    tolerations.iter().any(|toleration| tolerates(toleration, taint))
}

/// The first taint that `counts` and that none of the tolerations tolerates.
pub fn find_untolerated<'a>(
    taints: &'a [Taint],
    tolerations: &[Toleration],
    counts: impl Fn(&Taint) -> bool,
) -> Option<&'a Taint> {
    taints
        .iter()
        .find(|taint| counts(taint) && !any_tolerates(tolerations, taint))
}

/// Taints that keep a pod from being placed on the node.
pub fn forbids_scheduling(taint: &Taint) -> bool {
    matches!(taint.effect.as_str(), "NoSchedule" | "NoExecute")
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    #[test]
    fn tolerations_match_as_upstream() {
        let check = |toleration: Value, expected: bool| {
            let taint: Taint =
                serde_json::from_value(json!({"key": "k", "value": "7", "effect": "NoSchedule"})).unwrap();
            let parsed: Toleration = serde_json::from_value(toleration.clone()).unwrap();
            assert_eq!(tolerates(&parsed, &taint), expected, "{toleration}");
        };
        check(
            json!({"key": "k", "operator": "Equal", "value": "7", "effect": "NoSchedule"}),
            true,
        );
        check(json!({"key": "k", "value": "7"}), true);
        check(json!({"key": "k", "operator": "", "value": "7"}), true);
        check(json!({"key": "k", "value": "other"}), false);
        check(json!({"key": "other", "value": "7"}), false);
        check(json!({"key": "k", "operator": "Exists"}), true);
        check(json!({"operator": "Exists"}), true);
        check(
            json!({"key": "k", "operator": "Exists", "effect": "NoExecute"}),
            false,
        );
        check(json!({"key": "k", "operator": "Lt", "value": "9"}), false);
        check(json!({"key": "k", "operator": "Gt", "value": "1"}), false);
    }

    #[test]
    fn the_first_untolerated_taint_that_counts() {
        let taints: Vec<Taint> = serde_json::from_value(json!([
            {"key": "soft", "effect": "PreferNoSchedule"}, {"key": "a", "effect": "NoSchedule"}, {"key": "b", "effect": "NoExecute"}]))
        .unwrap();
        let check = |tolerations: Value, expected: Option<&str>| {
            let tolerations: Vec<Toleration> = serde_json::from_value(tolerations).unwrap();
            let found = find_untolerated(&taints, &tolerations, forbids_scheduling);
            assert_eq!(found.map(|taint| taint.key.as_str()), expected);
        };
        check(json!([]), Some("a"));
        check(json!([{"key": "a", "operator": "Exists"}]), Some("b"));
        check(json!([{"operator": "Exists"}]), None);
    }
}
