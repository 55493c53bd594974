//! The strategic merge patch from the status the API has to the one made here. Conditions and addresses
//! are lists merged by key, so what others wrote meanwhile stays.

use k8s_openapi::api::core::v1::PodStatus;
use serde_json::{Map, Value, json};

fn as_map(status: &PodStatus) -> Map<String, Value> {
    match serde_json::to_value(status) {
        Ok(mut value) => {
            prune(&mut value);
            match value {
                Value::Object(map) => map,
                _ => Map::new(),
            }
        }
        Err(_) => Map::new(),
    }
}

/// Takes out what says nothing. The API shows some empty objects (`lastState: {}`) that nobody wrote; they
/// must not look like a difference, or a settled pod would be written again and again. A container's state is a
/// union: of a container that was created and not started, `waiting: {}` is all there is to say.
fn prune(value: &mut Value) {
    let is_state = |name: &str| matches!(name, "waiting" | "running" | "terminated");
    match value {
        Value::Object(map) => {
            map.values_mut().for_each(prune);
            map.retain(|name, value| {
                !value.is_null() && (is_state(name) || value.as_object().is_none_or(|m| !m.is_empty()))
            });
        }
        Value::Array(list) => list.iter_mut().for_each(prune),
        _ => {}
    }
}

pub fn statuses_equal(a: &PodStatus, b: &PodStatus) -> bool {
    as_map(a) == as_map(b)
}

/// `None` when there is nothing to write.
pub fn status_patch(uid: &str, old: &PodStatus, new: &PodStatus) -> Option<Value> {
    let (old, new) = (as_map(old), as_map(new));
    let mut patch = Map::new();
    for (field, value) in &new {
        let before = old.get(field);
        if before == Some(value) {
            continue;
        }
        let change = match field.as_str() {
            "conditions" => match changed_conditions(before, value) {
                Some(change) => change,
                None => continue,
            },
            // Lists merged by address: an old address must go.
            "podIPs" | "hostIPs" if before.is_some() => {
                let mut list = value.as_array().cloned().unwrap_or_default();
                list.push(json!({"$patch": "replace"}));
                Value::Array(list)
            }
            _ => value.clone(),
        };
        patch.insert(field.clone(), change);
    }
    for field in old.keys().filter(|field| !new.contains_key(*field)) {
        patch.insert(field.clone(), Value::Null);
    }
    if patch.is_empty() {
        return None;
    }
    Some(json!({"metadata": {"uid": uid}, "status": patch}))
}

fn changed_conditions(before: Option<&Value>, after: &Value) -> Option<Value> {
    let empty = Vec::new();
    let before = before.and_then(Value::as_array).unwrap_or(&empty);
    let mut changed = Vec::new();
    for condition in after.as_array().unwrap_or(&empty) {
        let old = before.iter().find(|c| c["type"] == condition["type"]);
        if old == Some(condition) {
            continue;
        }
        let mut change = condition.clone();
        if let (Some(Value::Object(old)), Value::Object(change)) = (old, &mut change) {
            for key in old.keys() {
                if !change.contains_key(key) {
                    change.insert(key.clone(), Value::Null);
                }
            }
        }
        changed.push(change);
    }
    // A resize that waits or is under way has a condition, and none when that is over.
    for gone in before.iter().map(|condition| &condition["type"]) {
        let stays = after
            .as_array()
            .is_some_and(|list| list.iter().any(|c| c["type"] == *gone));
        if !stays && (gone == "PodResizePending" || gone == "PodResizeInProgress") {
            changed.push(json!({"$patch": "delete", "type": gone}));
        }
    }
    (!changed.is_empty()).then_some(Value::Array(changed))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(old: Value, new: Value, expected: Option<Value>) {
        let read = |v: Value| -> PodStatus { serde_json::from_value(v).unwrap() };
        let patch = status_patch("u", &read(old), &read(new));
        assert_eq!(patch.map(|p| p["status"].clone()), expected);
    }

    #[test]
    fn patches() {
        check(json!({"phase": "Running"}), json!({"phase": "Running"}), None);
        let container = |extra: Value| {
            let mut status =
                json!({"name": "c", "image": "i", "imageID": "", "ready": true, "restartCount": 0});
            status
                .as_object_mut()
                .unwrap()
                .extend(extra.as_object().unwrap().clone());
            json!({"containerStatuses": [status]})
        };
        check(container(json!({"lastState": {}})), container(json!({})), None);
        check(container(json!({})), container(json!({"resources": {}})), None);
        check(
            container(json!({"state": {"waiting": {"reason": "PodInitializing"}}})),
            container(json!({"state": {"waiting": {}}})),
            Some(container(json!({"state": {"waiting": {}}}))),
        );
        check(
            json!({"phase": "Pending", "reason": "x"}),
            json!({"phase": "Running"}),
            Some(json!({"phase": "Running", "reason": null})),
        );
        check(
            json!({"conditions": [{"type": "Ready", "status": "False", "reason": "r"}, {"type": "Other", "status": "True"}]}),
            json!({"conditions": [{"type": "Ready", "status": "True"}, {"type": "Other", "status": "True"}]}),
            Some(json!({"conditions": [{"type": "Ready", "status": "True", "reason": null}]})),
        );
        check(
            json!({}),
            json!({"podIPs": [{"ip": "1.1.1.1"}]}),
            Some(json!({"podIPs": [{"ip": "1.1.1.1"}]})),
        );
        check(
            json!({"podIPs": [{"ip": "1.1.1.1"}]}),
            json!({"podIPs": [{"ip": "1.1.1.2"}]}),
            Some(json!({"podIPs": [{"ip": "1.1.1.2"}, {"$patch": "replace"}]})),
        );
    }
}
