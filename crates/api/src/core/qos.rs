//! The quality of service class of a pod, from its requests and limits.

use std::collections::BTreeMap;

use serde_json::Value;
use skiff_meta::quantity::Quantity;

use super::resources::quantity;
use crate::node::{at, list};

const COMPUTE: [&str; 2] = ["cpu", "memory"];

fn add(total: &mut BTreeMap<&'static str, Quantity>, amounts: &Value) -> usize {
    let mut found = 0;
    for name in COMPUTE {
        let Some(amount) = amounts.get(name).and_then(quantity) else {
            continue;
        };
        if !amount.is_zero() && !amount.is_negative() {
            found += 1;
            total
                .entry(name)
                .and_modify(|q| *q = q.plus(&amount))
                .or_insert(amount);
        }
    }
    found
}

/// `Guaranteed`, `Burstable` or `BestEffort`.
pub fn class(pod: &Value) -> &'static str {
    let (mut requests, mut limits) = (BTreeMap::new(), BTreeMap::new());
    let mut guaranteed = true;
    let pod_level = at(pod, "spec.resources");
    if pod_level.is_null() {
        for container in list(pod, "spec.containers")
            .iter()
            .chain(list(pod, "spec.initContainers"))
        {
            add(&mut requests, at(container, "resources.requests"));
            guaranteed &= add(&mut limits, at(container, "resources.limits")) == COMPUTE.len();
        }
    } else {
        add(&mut requests, at(pod_level, "requests"));
        if at(pod_level, "limits").as_object().is_some_and(|m| !m.is_empty()) {
            guaranteed &= add(&mut limits, at(pod_level, "limits")) == COMPUTE.len();
        }
    }
    if requests.is_empty() && limits.is_empty() {
        return "BestEffort";
    }
    if guaranteed && requests.len() == limits.len() && requests.iter().all(|(k, v)| limits.get(k) == Some(v))
    {
        "Guaranteed"
    } else {
        "Burstable"
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn classes() {
        let pod = |resources: Value| json!({"spec": {"containers": [{"resources": resources}]}});
        assert_eq!(class(&pod(json!({}))), "BestEffort");
        assert_eq!(class(&pod(json!({"requests": {"cpu": "1"}}))), "Burstable");
        let both = json!({"cpu": "1", "memory": "1Gi"});
        assert_eq!(
            class(&pod(json!({"requests": both, "limits": both}))),
            "Guaranteed"
        );
        assert_eq!(
            class(&pod(json!({"requests": {"cpu": "1"}, "limits": both}))),
            "Burstable"
        );
    }
}
