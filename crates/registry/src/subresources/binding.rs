//! Binding a pod to a node: the one write by which a scheduler decides.

use serde_json::{Value, json};
use skiff_meta::{GroupResource, Status, field};

use crate::object;

/// Checks a Binding and names the node it binds to.
pub fn target(binding: &Value) -> Result<String, Status> {
    let kind = object::at_str(binding, &["target", "kind"]);
    let name = object::at_str(binding, &["target", "name"]);
    let error = if !kind.is_empty() && kind != "Node" {
        field::Error::not_supported(&field::Path::new("target.kind"), kind, &["Node", "<empty>"])
    } else if name.is_empty() {
        field::Error::required(&field::Path::new("target.name"), "")
    } else {
        return Ok(name.to_string());
    };
    // COMPAT: upstream returns the bare validation error here, which its answer writer makes a 500.
    Err(Status::failure(500, "", error.to_string()))
}

/// The pod as bound to `node`. `now` is a timestamp.
pub fn bind(pod: &Value, binding: &Value, node: &str, now: &str) -> Result<Value, Status> {
    let name = object::name(pod);
    let refuse = |why: String| {
        Err(Status::conflict(
            &GroupResource::new("", "pods/binding"),
            name,
            why,
        ))
    };
    let precondition = |field: &str| object::text(binding, field);
    if !precondition("uid").is_empty() && precondition("uid") != object::uid(pod) {
        let why = format!(
            "StorageError: invalid object, Code: 4, Key: /registry/pods/{}/{name}, ResourceVersion: 0, AdditionalErrorMsg: Precondition failed: UID in precondition: {}, UID in object meta: {}",
            object::namespace(pod),
            precondition("uid"),
            object::uid(pod)
        );
        return Err(Status::conflict(&GroupResource::new("", "pods"), name, why));
    }
    if object::deleting(pod) {
        return refuse(format!(
            "pod {name} is being deleted, cannot be assigned to a host"
        ));
    }
    let bound = object::at_str(pod, &["spec", "nodeName"]);
    if !bound.is_empty() {
        return refuse(format!(
            "pod {name} is already assigned to node {}",
            field::quote(bound)
        ));
    }
    let gated = object::at(pod, &["spec", "schedulingGates"])
        .and_then(Value::as_array)
        .is_some_and(|gates| !gates.is_empty());
    if gated {
        return refuse(format!("pod {name} has non-empty .spec.schedulingGates"));
    }
    let mut pod = pod.clone();
    object::put(&mut pod, &["spec", "nodeName"], json!(node));
    for map in ["annotations", "labels"] {
        for (key, value) in object::metadata(binding, map)
            .and_then(Value::as_object)
            .into_iter()
            .flatten()
        {
            object::put(&mut pod, &["metadata", map, key], value.clone());
        }
    }
    set_scheduled(&mut pod, now);
    if let Some(status) = pod.get_mut("status").and_then(Value::as_object_mut) {
        status.remove("nominatedNodeName");
    }
    Ok(pod)
}

fn set_scheduled(pod: &mut Value, now: &str) {
    let mut conditions = object::at(pod, &["status", "conditions"])
        .and_then(Value::as_array)
        .cloned()
        .unwrap_or_default();
    let condition =
        json!({"type": "PodScheduled", "status": "True", "lastProbeTime": null, "lastTransitionTime": now});
    match conditions
        .iter_mut()
        .find(|condition| condition["type"] == "PodScheduled")
    {
        Some(old) if old["status"] == "True" => {}
        Some(old) => *old = condition,
        None => conditions.push(condition),
    }
    object::put(pod, &["status", "conditions"], Value::Array(conditions));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pod_is_bound_once() {
        let pod = json!({"metadata": {"name": "p", "uid": "u"}, "spec": {}, "status": {"conditions": [{"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}]}});
        let binding = json!({"target": {"kind": "Node", "name": "n"}});
        let node = target(&binding).expect("a node");
        let bound = bind(&pod, &binding, &node, "2026-01-01T00:00:00Z").expect("binds");
        assert_eq!(bound["spec"]["nodeName"], "n");
        assert_eq!(bound["status"]["conditions"][0]["status"], "True");
        let check = |pod: &Value, binding: &Value, expected: &str| {
            assert_eq!(
                bind(pod, binding, "n", "").expect_err("refused").message,
                expected
            );
        };
        check(
            &bound,
            &binding,
            "Operation cannot be fulfilled on pods/binding \"p\": pod p is already assigned to node \"n\"",
        );
        check(
            &json!({"metadata": {"name": "p", "deletionTimestamp": "x"}}),
            &binding,
            "Operation cannot be fulfilled on pods/binding \"p\": pod p is being deleted, cannot be assigned to a host",
        );
        assert_eq!(
            target(&json!({"target": {}})).expect_err("refused").message,
            "target.name: Required value"
        );
    }
}
