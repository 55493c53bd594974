//! Brings a stored bootstrap role or binding up to what this version wants of it, without taking away
//! what an administrator added. Pure: the server reads and writes the objects.

use serde_json::{Map, Value, json};

use crate::{Rule, missing_rules};

const AUTOUPDATE: &str = "rbac.authorization.kubernetes.io/autoupdate";

/// The object to write in place of `current`, or `None` when nothing is missing or the administrator
/// switched updates off. A binding to another role is left alone: its roleRef cannot change.
pub fn reconcile(current: &Value, wanted: &Value) -> Option<Value> {
    if current["metadata"]["annotations"][AUTOUPDATE] == "false" || current["roleRef"] != wanted["roleRef"] {
        return None;
    }
    let mut merged = current.clone();
    for field in ["labels", "annotations"] {
        add_missing_keys(&mut merged["metadata"], field, &wanted["metadata"][field]);
    }
    if wanted.get("roleRef").is_some() {
        append_missing(&mut merged, "subjects", &wanted["subjects"]);
    } else if wanted.get("aggregationRule").is_some() {
        // The rules of an aggregated role are its controller's.
        if merged.get("aggregationRule").is_none() {
            merged["aggregationRule"] = json!({});
        }
        let selectors = &wanted["aggregationRule"]["clusterRoleSelectors"];
        append_missing(&mut merged["aggregationRule"], "clusterRoleSelectors", selectors);
    } else {
        let missing = missing_rules(&rules(&current["rules"]), &rules(&wanted["rules"]));
        append_missing(
            &mut merged,
            "rules",
            &serde_json::to_value(missing).unwrap_or_default(),
        );
    }
    (merged != *current).then_some(merged)
}

fn rules(value: &Value) -> Vec<Rule> {
    serde_json::from_value(value.clone()).unwrap_or_default()
}

fn add_missing_keys(object: &mut Value, field: &str, wanted: &Value) {
    for (key, value) in wanted.as_object().into_iter().flatten() {
        if !object[field].is_object() {
            object[field] = Value::Object(Map::new());
        }
        if object[field].get(key).is_none() {
            object[field][key] = value.clone();
        }
    }
}

fn append_missing(object: &mut Value, field: &str, wanted: &Value) {
    for item in wanted.as_array().into_iter().flatten() {
        if !object[field].is_array() {
            object[field] = json!([]);
        }
        if let Some(list) = object[field].as_array_mut()
            && !list.contains(item)
        {
            list.push(item.clone());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(current: Value, wanted: Value, expected: Option<Value>) {
        assert_eq!(reconcile(&current, &wanted), expected);
    }

    #[test]
    fn what_is_missing_comes_back_and_what_was_added_stays() {
        let rule =
            |verbs: &[&str]| json!({"verbs": verbs, "apiGroups": ["x.example.com"], "resources": ["things"]});
        let role = |rules: Value| json!({"kind": "ClusterRole", "metadata": {"name": "r"}, "rules": rules});
        check(
            role(json!([rule(&["get", "delete"])])),
            role(json!([rule(&["get"])])),
            None,
        );
        check(
            role(json!([rule(&["get"])])),
            role(json!([rule(&["get", "list"])])),
            Some(role(json!([rule(&["get"]), rule(&["list"])]))),
        );
        let mut off = role(json!([]));
        off["metadata"]["annotations"] = json!({AUTOUPDATE: "false"});
        check(off, role(json!([rule(&["get"])])), None);
        let binding = |role: &str, subjects: &[&str]| json!({"metadata": {"labels": {"a": "b"}}, "roleRef": {"name": role}, "subjects": subjects});
        check(
            binding("r", &["mine"]),
            binding("r", &["yours"]),
            Some(binding("r", &["mine", "yours"])),
        );
        check(binding("s", &[]), binding("r", &["yours"]), None);
    }
}
