//! `pods/resize`: the resources of containers change while the pod runs, and nothing else does.

use serde_json::{Map, Value, json};
use skiff_meta::field;

use super::{pod, qos};
use crate::errors::Errors;
use crate::node::{Node, at, list, same, text};
use crate::{strategy, walk};

const LISTS: [&str; 2] = ["containers", "initContainers"];
const RESIZABLE: [&str; 2] = ["cpu", "memory"];

/// Takes the resources and resize policies of the new pod, and the rest of the old one. Containers that are not the
/// same ones are left for validation to refuse.
pub fn prepare(new: &mut Value, old: &Value) {
    let names = |pod: &Value, which: &str| -> Vec<String> {
        let containers = list(at(pod, "spec"), which).iter();
        containers
            .map(|container| text(container, "name").to_owned())
            .collect()
    };
    if LISTS
        .iter()
        .all(|which| names(new, which).len() == names(old, which).len())
    {
        let wanted = at(new, "spec").clone();
        strategy::keep_all_but(new, old, &["metadata", "apiVersion", "kind"]);
        strategy::status_only_keep_metadata(new, old);
        if let Some(spec) = walk::object(new, "spec") {
            for which in LISTS {
                let wanted = list(&wanted, which);
                let reordered = list(spec, which)
                    .iter()
                    .zip(wanted)
                    .any(|(old, new)| text(old, "name") != text(new, "name"));
                if reordered {
                    walk::put(spec, which, Value::Array(wanted.to_vec()));
                    continue;
                }
                let mut next = wanted.iter();
                walk::each(spec, &format!("{which}[]"), &mut |container| {
                    if let Some(wanted) = next.next() {
                        walk::copy(container, wanted, "resources");
                        walk::copy(container, wanted, "resizePolicy");
                    }
                });
            }
            walk::copy(spec, &wanted, "resources");
        }
    }
    strategy::bump_generation_if(new, old, &["spec"]);
}

pub fn validate(new: &Value, old: &Value) -> Vec<field::Error> {
    let mut errors = Errors::new();
    let root = Node::root(new);
    pod::metadata_and_spec(&root, &mut errors);
    let spec = root.field("spec");
    let nowhere = Node::root(new);
    if at(old, "metadata.annotations")
        .get("kubernetes.io/config.mirror")
        .is_some()
    {
        let mut errors = Errors::new();
        errors.forbidden(&nowhere, "static pods cannot be resized");
        return errors.into_vec();
    }
    if text(old, "spec.os.name") == "windows" {
        let mut errors = Errors::new();
        errors.forbidden(&nowhere, "windows pods cannot be resized");
        return errors.into_vec();
    }
    let class = match text(old, "status.qosClass") {
        "" => qos::class(old),
        class => class,
    };
    if class != qos::class(new) {
        let shown = json!(text(new, "status.qosClass"));
        errors.invalid_value(
            &spec,
            shown,
            "Pod QOS Class may not change as a result of resizing",
        );
    }
    if !node_can_resize(old) {
        errors.forbidden(&spec, "Pod running on node without support for resize");
    }
    if !same_containers(&root, old, &mut errors) {
        return errors.into_vec();
    }
    for which in LISTS {
        for (index, (old, new)) in list(at(old, "spec"), which)
            .iter()
            .zip(list(at(new, "spec"), which))
            .enumerate()
        {
            let containers = spec.field(which);
            let container = containers.index(index);
            let restartable = which == "containers" || text(old, "restartPolicy") == "Always";
            if restartable {
                removed(&container, old, new, &mut errors);
            }
            if !restartable && !same(new, old) {
                errors.forbidden(&spec, "resources for non-sidecar init containers are immutable");
            } else if !same(&with_old_amounts(new, old), old) {
                match which {
                    "containers" => errors.forbidden(&spec, "only cpu and memory resources are mutable"),
                    _ => errors.forbidden(
                        &container,
                        "only cpu and memory resources for init or sidecar containers are mutable",
                    ),
                }
            }
        }
    }
    errors.into_vec()
}

/// A node that resizes says of running containers what they have. Without running ones nobody knows.
fn node_can_resize(pod: &Value) -> bool {
    list(pod, "status.containerStatuses")
        .iter()
        .find(|status| !at(status, "state.running").is_null())
        .is_none_or(|status| !at(status, "resources").is_null())
}

fn same_containers(root: &Node, old: &Value, errors: &mut Errors) -> bool {
    let mut all_same = true;
    let spec = root.field("spec");
    for which in LISTS {
        let containers = spec.field(which);
        let (before, now) = (list(at(old, "spec"), which), list(spec.value, which));
        if before.len() != now.len() {
            all_same = false;
            errors.forbidden(
                &containers,
                format!("{which} may not be added or removed on resize"),
            );
            continue;
        }
        for (index, (before, now)) in before.iter().zip(now).enumerate() {
            if text(before, "name") != text(now, "name") {
                all_same = false;
                let container = containers.index(index);
                let name = container.field("name");
                errors.forbidden(
                    &name,
                    format!("{which} may not be renamed or reordered on resize"),
                );
            }
        }
    }
    all_same
}

/// What a container has asked for, it asks for more or less of, not for nothing of.
fn removed(container: &Node, old: &Value, new: &Value, errors: &mut Errors) {
    let resources = container.field("resources");
    for kind in ["requests", "limits"] {
        let had = at(at(old, "resources"), kind).as_object();
        let has = at(at(new, "resources"), kind).as_object();
        let lost = had
            .into_iter()
            .flat_map(Map::keys)
            .any(|name| !has.is_some_and(|has| has.contains_key(name)));
        if lost {
            errors.forbidden(
                &resources.field(kind),
                format!("resource {kind} cannot be removed"),
            );
        }
    }
}

/// The new container with the old amounts of what may change.
fn with_old_amounts(new: &Value, old: &Value) -> Value {
    let mut next = new.clone();
    walk::copy(&mut next, old, "resizePolicy");
    for kind in ["limits", "requests"] {
        let mut amounts = at(at(new, "resources"), kind)
            .as_object()
            .cloned()
            .unwrap_or_default();
        let before = at(at(old, "resources"), kind);
        for name in RESIZABLE {
            amounts.remove(name);
            if let Some(amount) = before.get(name) {
                amounts.insert(name.to_owned(), amount.clone());
            }
        }
        if let Some(resources) = walk::object(&mut next, "resources") {
            if amounts.is_empty() {
                walk::remove(resources, kind);
            } else {
                walk::put(resources, kind, Value::Object(amounts));
            }
        }
    }
    next
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pod(requests: Value) -> Value {
        json!({"metadata": {"name": "p", "namespace": "a", "generation": 1}, "status": {"phase": "Running"},
            "spec": {"restartPolicy": "Always", "dnsPolicy": "ClusterFirst", "terminationGracePeriodSeconds": 30,
                "containers": [{"name": "c", "image": "i", "imagePullPolicy": "Always", "terminationMessagePolicy": "File",
                    "resources": {"requests": requests}}]}})
    }

    fn check(old: &Value, new: &Value, expected: &str) {
        let mut new = new.clone();
        prepare(&mut new, old);
        let found: Vec<String> = validate(&new, old).iter().map(ToString::to_string).collect();
        assert_eq!(found.join("; "), expected, "{new}");
    }

    #[test]
    fn only_amounts_change() {
        let old = pod(json!({"cpu": "1", "memory": "1", "ephemeral-storage": "1"}));
        check(
            &old,
            &pod(json!({"cpu": "2", "memory": "1", "ephemeral-storage": "1"})),
            "",
        );
        let mut more = pod(json!({"cpu": "2", "memory": "1", "ephemeral-storage": "1"}));
        more["spec"]["containers"][0]["image"] = json!("other");
        more["status"]["phase"] = json!("Failed");
        let mut prepared = more.clone();
        prepare(&mut prepared, &old);
        assert_eq!(
            prepared["spec"]["containers"][0]["image"], "i",
            "the rest is not taken"
        );
        assert_eq!(prepared["metadata"]["generation"], 2);
        assert_eq!(prepared["status"]["phase"], "Running");
        check(
            &old,
            &pod(json!({"memory": "1", "ephemeral-storage": "1"})),
            "spec.containers[0].resources.requests: Forbidden: resource requests cannot be removed",
        );
        check(
            &pod(json!({"cpu": "1"})),
            &pod(json!({})),
            "spec: Invalid value: \"\": Pod QOS Class may not change as a result of resizing; \
             spec.containers[0].resources.requests: Forbidden: resource requests cannot be removed",
        );
        let mut renamed = old.clone();
        renamed["spec"]["containers"][0]["name"] = json!("d");
        check(
            &old,
            &renamed,
            "spec.containers[0].name: Forbidden: containers may not be renamed or reordered on resize",
        );
        let mut running = old.clone();
        running["status"]["containerStatuses"] = json!([{"name": "c", "state": {"running": {}}}]);
        check(
            &running,
            &pod(json!({"cpu": "2", "memory": "1", "ephemeral-storage": "1"})),
            "spec: Forbidden: Pod running on node without support for resize",
        );
    }
}
