//! The subresource `pods/resize`: cpu and memory of a running pod. Everything else of the write is dropped,
//! and what cannot be resized is refused.

use serde_json::{Value, json};
use skiff_meta::field;

use super::{pod, qos};
use crate::errors::Errors;
use crate::node::{Node, at, list, same, text};
use crate::{object_meta, strategy, walk};

const ONLY: &str = "only cpu and memory resources are mutable";

/// Keeps all of the pod but resources and resize policies.
pub fn prepare(new: &mut Value, old: &Value) {
    // Containers that come, go or change places are left for the rules to refuse.
    if ["containers", "initContainers"]
        .iter()
        .any(|name| list(at(new, "spec"), name).len() != list(at(old, "spec"), name).len())
    {
        return;
    }
    let mut spec = at(old, "spec").clone();
    walk::copy(&mut spec, at(new, "spec"), "resources");
    for name in ["containers", "initContainers"] {
        merge(&mut spec, new, name);
    }
    walk::put(new, "spec", spec);
    strategy::status_only_keep_metadata(new, &with_spec_of(old, new));
    walk::copy(new, old, "status");
    if let (Some(metadata), Some(before)) = (new.get_mut("metadata"), old.get("metadata")) {
        walk::copy(metadata, before, "generation");
    }
    strategy::bump_generation_if(new, old, &["spec"]);
}

/// The old pod with the new spec, to take everything else from.
fn with_spec_of(old: &Value, new: &Value) -> Value {
    let mut out = old.clone();
    walk::copy(&mut out, new, "spec");
    out
}

fn merge(spec: &mut Value, new: &Value, name: &str) {
    let wanted = list(at(new, "spec"), name);
    let named = list(spec, name)
        .iter()
        .zip(wanted)
        .all(|(a, b)| text(a, "name") == text(b, "name"));
    if !named {
        walk::put(spec, name, json!(wanted));
        return;
    }
    if let Some(Value::Array(containers)) = spec.get_mut(name) {
        for (container, wanted) in containers.iter_mut().zip(wanted) {
            walk::copy(container, wanted, "resources");
            walk::copy(container, wanted, "resizePolicy");
        }
    }
}

/// What may be resized, and to what.
pub fn validate(new: &Value, old: &Value) -> Vec<field::Error> {
    let root = Node::root(new);
    let mut errors = Errors::new();
    errors.extend(object_meta::validate(new, true, object_meta::dns_subdomain));
    errors.extend(object_meta::validate_update(new, old, true));
    pod::metadata_and_spec(&root, Some(old), &mut errors);
    let only = |detail: &str| {
        let mut errors = Errors::new();
        errors.forbidden(&root, detail);
        errors.into_vec()
    };
    let annotations = at(old, "metadata.annotations");
    if annotations.get("kubernetes.io/config.mirror").is_some() {
        return only("static pods cannot be resized");
    }
    if text(old, "spec.os.name") == "windows" {
        return only("windows pods cannot be resized");
    }
    let spec = root.field("spec");
    let class = match text(old, "status.qosClass") {
        "" => qos::class(old),
        class => class,
    };
    if class != qos::class(new) {
        errors.invalid_value(
            &spec,
            text(new, "status.qosClass"),
            "Pod QOS Class may not change as a result of resizing",
        );
    }
    if !node_supports(old) {
        errors.forbidden(&spec, "Pod running on node without support for resize");
    }
    let before = at(old, "spec");
    let mut after = at(new, "spec").clone();
    pod_level(&spec, before, &mut after, &mut errors);
    let ordered = in_order(&spec, before, &mut errors);
    if !ordered {
        return errors.into_vec();
    }
    for name in ["initContainers", "containers"] {
        let containers = spec.field(name);
        for (container, before) in containers.items().zip(list(before, name)) {
            for part in ["requests", "limits"] {
                let resources = container.field("resources");
                let amounts = resources.field(part);
                if removed(amounts.value, at(at(before, "resources"), part)) {
                    errors.forbidden(&amounts, format!("resource {part} cannot be removed"));
                }
            }
        }
    }
    containers_only_resized(&spec, before, &mut after, &mut errors);
    if errors.is_empty() && !same(&after, before) {
        errors.forbidden(&spec, ONLY);
    }
    errors.into_vec()
}

/// A kubelet that can resize reports what its containers have.
fn node_supports(pod: &Value) -> bool {
    list(pod, "status.containerStatuses")
        .iter()
        .find(|status| !at(status, "state.running").is_null())
        .is_none_or(|status| !at(status, "resources").is_null())
}

fn removed(new: &Value, old: &Value) -> bool {
    old.as_object()
        .into_iter()
        .flatten()
        .any(|(name, _)| new.get(name).is_none())
}

/// `amounts` as if cpu and memory had not changed.
fn without_changes(amounts: &Value, old: &Value) -> Value {
    let mut out = match amounts {
        Value::Object(_) => amounts.clone(),
        _ => json!({}),
    };
    for name in ["cpu", "memory"] {
        walk::copy(&mut out, old, name);
    }
    out
}

fn pod_level(spec: &Node, before: &Value, after: &mut Value, errors: &mut Errors) {
    let set = |spec: &Value| {
        ["requests", "limits"].iter().any(|part| {
            at(at(spec, "resources"), part)
                .as_object()
                .is_some_and(|m| !m.is_empty())
        })
    };
    if !set(before) && !set(spec.value) {
        return;
    }
    let (resources, old) = (spec.field("resources"), at(before, "resources"));
    if !old.is_null() && !resources.is_set() {
        errors.forbidden(&resources, "pod-level resources cannot be removed");
        return;
    }
    for part in ["requests", "limits"] {
        if removed(resources.field(part).value, at(old, part)) {
            errors.forbidden(
                &resources.field(part),
                format!("pod-level resource {part} cannot be removed"),
            );
        }
    }
    if let Some(resources) = after.get_mut("resources") {
        for part in ["requests", "limits"] {
            let kept = without_changes(at(resources, part), at(old, part));
            walk::put(resources, part, kept);
        }
    }
    if !same(at(after, "resources"), old) {
        errors.forbidden(spec, "only cpu and memory resources are mutable at pod-level");
    }
}

fn in_order(spec: &Node, before: &Value, errors: &mut Errors) -> bool {
    let mut ordered = true;
    for name in ["containers", "initContainers"] {
        let containers = spec.field(name);
        let old = list(before, name);
        if containers.len() != old.len() {
            errors.forbidden(
                &containers,
                format!("{name} may not be added or removed on resize"),
            );
            ordered = false;
            continue;
        }
        for (container, old) in containers.items().zip(old) {
            if container.field("name").str() != text(old, "name") {
                errors.forbidden(
                    &container.field("name"),
                    format!("{name} may not be renamed or reordered on resize"),
                );
                ordered = false;
            }
        }
    }
    ordered
}

fn containers_only_resized(spec: &Node, before: &Value, after: &mut Value, errors: &mut Errors) {
    for name in ["containers", "initContainers"] {
        let Some(Value::Array(containers)) = after.get_mut(name) else {
            continue;
        };
        for (i, (container, old)) in containers.iter_mut().zip(list(before, name)).enumerate() {
            let modified = !same(container, old);
            let resources = at(container, "resources").clone();
            let old_resources = at(old, "resources");
            let kept = json!({
                "limits": without_changes(at(&resources, "limits"), at(old_resources, "limits")),
                "requests": without_changes(at(&resources, "requests"), at(old_resources, "requests")),
            });
            walk::put(container, "resources", kept);
            let more = !same(container, old);
            if name == "containers" {
                if more {
                    errors.forbidden(spec, ONLY);
                }
                continue;
            }
            let containers = spec.field(name);
            if more {
                errors.forbidden(
                    &containers.index(i),
                    "only cpu and memory resources for init or sidecar containers are mutable",
                );
            }
            let once = modified && text(container, "restartPolicy") != "Always";
            for _ in list(container, "resizePolicy")
                .iter()
                .filter(|policy| once && text(policy, "restartPolicy") == "RestartContainer")
            {
                errors.forbidden(
                    &containers.index(i),
                    "non-sidecar init containers with a resize policy of RestartContainer cannot be resized",
                );
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn running(resources: Value) -> Value {
        let mut pod = json!({
            "metadata": {"name": "p", "namespace": "n", "resourceVersion": "1", "generation": 1},
            "spec": {"containers": [{"name": "c", "image": "i", "resources": resources}]},
        });
        (pod::POD.default)("v1", &mut pod);
        let class = qos::class(&pod);
        walk::put(&mut pod, "status", json!({ "qosClass": class }));
        pod
    }

    fn check(old: Value, new: Value, expected: &[&str]) {
        let (old, mut new) = (running(old), running(new));
        prepare(&mut new, &old);
        let found: Vec<String> = validate(&new, &old).iter().map(ToString::to_string).collect();
        assert_eq!(found, expected, "{new}");
    }

    #[test]
    fn only_cpu_and_memory_change_and_nothing_goes() {
        let some = json!({"requests": {"cpu": "1", "memory": "1Gi"}});
        check(
            some.clone(),
            json!({"requests": {"cpu": "2", "memory": "1Gi"}}),
            &[],
        );
        check(
            some.clone(),
            json!({"requests": {"cpu": "2"}}),
            &["spec.containers[0].resources.requests: Forbidden: resource requests cannot be removed"],
        );
        check(
            some.clone(),
            json!({}),
            &[
                "spec: Invalid value: \"Burstable\": Pod QOS Class may not change as a result of resizing",
                "spec.containers[0].resources.requests: Forbidden: resource requests cannot be removed",
            ],
        );
        check(
            some,
            json!({"requests": {"cpu": "1", "memory": "1Gi", "ephemeral-storage": "1Gi"}}),
            &["spec: Forbidden: only cpu and memory resources are mutable"],
        );
    }

    #[test]
    fn other_changes_are_dropped_and_the_generation_moves() {
        let old = running(json!({"requests": {"cpu": "1"}}));
        let mut new = running(json!({"requests": {"cpu": "2"}}));
        walk::each(&mut new, "spec.containers[]", &mut |c| {
            walk::put(c, "image", json!("other"))
        });
        walk::each(&mut new, "metadata", &mut |m| {
            walk::put(m, "labels", json!({"a": "b"}))
        });
        prepare(&mut new, &old);
        assert_eq!(text(&list(&new, "spec.containers")[0], "image"), "i");
        assert!(at(&new, "metadata.labels").is_null());
        assert_eq!(at(&new, "metadata.generation"), &json!(2));
    }
}
