//! Two plugins about pods that are on a node already. NodeDeclaredFeatureValidator: a change that needs a feature of the
//! node is refused where the node has not declared it. PodResizeValidator: a pod does not grow beyond its node.

use async_trait::async_trait;
use serde_json::Value;
use skiff_api::core::quota_usage::usage;
use skiff_api::core::resources::quantity;
use skiff_api::node::{at, list, number, same, text};
use skiff_meta::Status;
use skiff_meta::quantity::Quantity;
use skiff_meta::status::Cause;

use crate::{Attributes, Lister, Operation, Plugin};

pub struct NodeDeclaredFeatureValidator;
pub struct PodResizeValidator;

/// Whether a bound pod gets another spec.
fn changes_bound_pod(a: &Attributes<'_>) -> bool {
    let generation = |pod: &Value| number(pod, "metadata.generation");
    match (a.object.as_deref(), a.old_object) {
        (Some(new), Some(old)) => {
            !text(new, "spec.nodeName").is_empty() && generation(new) != generation(old)
        }
        _ => false,
    }
}

async fn node_of(a: &Attributes<'_>, lister: &dyn Lister) -> Result<Value, Status> {
    let name = a.text("spec.nodeName");
    let node = lister.get("", "nodes", "", name).await?;
    node.ok_or_else(|| a.forbidden(format_args!("node {} not found", skiff_meta::field::quote(name))))
}

/// The features that an update needs, in the order of their names.
fn needed(new: &Value, old: &Value) -> Vec<&'static str> {
    let mut needed = Vec::new();
    if !same(at(new, "spec.resources"), at(old, "spec.resources")) {
        needed.push("InPlacePodLevelResourcesVerticalScaling");
    }
    let resized = list(old, "spec.initContainers")
        .iter()
        .zip(list(new, "spec.initContainers"))
        .filter(|(old, _)| text(old, "restartPolicy") != "Always")
        .any(|(old, new)| !same(at(old, "resources"), at(new, "resources")));
    if resized {
        needed.push("InPlacePodVerticalScalingInitContainers");
    }
    needed
}

#[async_trait]
impl Plugin for NodeDeclaredFeatureValidator {
    fn name(&self) -> &'static str {
        "NodeDeclaredFeatureValidator"
    }

    fn handles(&self, operation: Operation) -> bool {
        operation == Operation::Update
    }

    fn concerns(&self, a: &Attributes<'_>) -> bool {
        a.group.is_empty()
            && a.resource == "pods"
            && matches!(a.subresource, "" | "resize")
            && changes_bound_pod(a)
    }

    async fn validate(&self, a: &Attributes<'_>, lister: &dyn Lister) -> Result<(), Status> {
        let (Some(new), Some(old)) = (a.object.as_deref(), a.old_object) else {
            return Ok(());
        };
        let needed = needed(new, old);
        if needed.is_empty() {
            return Ok(());
        }
        let node = node_of(a, lister).await?;
        let declared = list(&node, "status.declaredFeatures");
        let missing: Vec<&str> = needed
            .into_iter()
            .filter(|feature| !declared.iter().any(|known| known == feature))
            .collect();
        if missing.is_empty() {
            return Ok(());
        }
        Err(a.forbidden(format_args!(
            "pod update requires features {} which are not available on node {}",
            missing.join(", "),
            skiff_meta::field::quote(text(&node, "metadata.name"))
        )))
    }
}

#[async_trait]
impl Plugin for PodResizeValidator {
    fn name(&self) -> &'static str {
        "PodResizeValidator"
    }

    fn handles(&self, operation: Operation) -> bool {
        operation == Operation::Update
    }

    fn concerns(&self, a: &Attributes<'_>) -> bool {
        a.group.is_empty() && a.resource == "pods" && a.subresource == "resize" && changes_bound_pod(a)
    }

    async fn validate(&self, a: &Attributes<'_>, lister: &dyn Lister) -> Result<(), Status> {
        let Some(pod) = a.object.as_deref() else {
            return Ok(());
        };
        let node = node_of(a, lister).await?;
        let refused = |why: String, reason: &str| {
            let mut status = a.forbidden(why);
            status.details.get_or_insert_default().causes.push(Cause {
                reason: reason.to_owned(),
                ..Cause::default()
            });
            Err(status)
        };
        let system = at(&node, "metadata.labels")
            .get("kubernetes.io/os")
            .and_then(Value::as_str);
        if let Some(system) = system.filter(|system| *system != "linux") {
            let (node, system) = (
                skiff_meta::field::quote(text(&node, "metadata.name")),
                skiff_meta::field::quote(system),
            );
            let why = format!("pod resize is only supported on linux nodes, node {node} is {system}");
            return refused(why, "UnsupportedPlatform");
        }
        match beyond(pod, &node) {
            None => Ok(()),
            Some(why) => refused(why, "NodeCapacity"),
        }
    }
}

/// What a pod asks for that its node as a whole does not have.
fn beyond(pod: &Value, node: &Value) -> Option<String> {
    let mut asked = pod.clone();
    // A pod that has ended is counted like any other here.
    if let Some(object) = asked.as_object_mut() {
        object.remove("status");
    }
    let asked = usage("", "pods", &asked);
    let both = |name: &str| {
        let allocatable =
            quantity(at(node, &format!("status.allocatable.{name}"))).unwrap_or(Quantity::from_units(0));
        let requested = asked.get(name).copied().unwrap_or(Quantity::from_units(0));
        (requested > allocatable).then_some((requested, allocatable))
    };
    let mut found = Vec::new();
    if let Some((requested, allocatable)) = both("cpu") {
        let (requested, allocatable) = (requested.milli_value(), allocatable.milli_value());
        found.push(format!("cpu, requested: {requested}, allocatable: {allocatable}"));
    }
    if let Some((requested, allocatable)) = both("memory") {
        let (requested, allocatable) = (requested.value(), allocatable.value());
        found.push(format!(
            "memory, requested: {requested}, allocatable: {allocatable}"
        ));
    }
    let found = found.join("; ");
    (!found.is_empty()).then(|| format!("node didn't have enough allocatable resources: {found}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plugins::fake::{Objects, create};
    use serde_json::json;

    fn pod(generation: i64, cpu: &str, init: &str) -> Value {
        json!({"metadata": {"name": "p", "generation": generation}, "spec": {"nodeName": "n",
            "initContainers": [{"name": "i", "resources": {"requests": {"cpu": init}}}],
            "containers": [{"name": "c", "resources": {"requests": {"cpu": cpu}}}]}})
    }

    async fn check(plugin: &dyn Plugin, system: &str, mut new: Value, expected: Option<&str>) {
        let lister = Objects(vec![(
            "nodes",
            json!({"metadata": {"name": "n", "labels": {"kubernetes.io/os": system}},
                "status": {"allocatable": {"cpu": "2", "memory": "1Gi"}}}),
        )]);
        let old = pod(1, "1", "1");
        let mut a = create("", "pods", "Pod", &mut new);
        (a.old_object, a.subresource, a.name) = (Some(&old), "resize", "p");
        let result = if plugin.concerns(&a) {
            plugin.validate(&a, &lister).await
        } else {
            Ok(())
        };
        let expected = expected.map(|why| format!("pods \"p\" is forbidden: {why}"));
        assert_eq!(result.err().map(|s| s.message), expected);
    }

    #[tokio::test]
    async fn a_pod_grows_within_its_node() {
        let plugin = &PodResizeValidator;
        check(plugin, "linux", pod(2, "2", "1"), None).await;
        check(plugin, "linux", pod(1, "3", "1"), None).await;
        let why = "node didn't have enough allocatable resources: cpu, requested: 2500, allocatable: 2000";
        check(plugin, "linux", pod(2, "2500m", "1"), Some(why)).await;
        let why = "pod resize is only supported on linux nodes, node \"n\" is \"windows\"";
        check(plugin, "windows", pod(2, "2", "1"), Some(why)).await;
    }

    #[tokio::test]
    async fn a_change_needs_the_features_of_the_node() {
        let plugin = &NodeDeclaredFeatureValidator;
        check(plugin, "linux", pod(2, "2", "1"), None).await;
        let why = "pod update requires features InPlacePodVerticalScalingInitContainers which are not available on node \"n\"";
        check(plugin, "linux", pod(2, "2", "2"), Some(why)).await;
    }
}
