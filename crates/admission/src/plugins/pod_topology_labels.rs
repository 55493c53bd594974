//! PodTopologyLabels: a pod takes over zone and region of the node that it is bound to.

use async_trait::async_trait;
use serde_json::Value;
use skiff_api::walk;
use skiff_meta::Status;

use crate::{Attributes, Lister, Operation, Plugin};

const PREFIX: &str = "topology.kubernetes.io/";
const LABELS: [&str; 2] = ["topology.kubernetes.io/zone", "topology.kubernetes.io/region"];

pub struct PodTopologyLabels;

/// The node that a pod or a binding names.
fn node<'a>(a: &'a Attributes<'_>) -> &'a str {
    match a.subresource {
        "binding" if a.text("target.kind") == "Node" => a.text("target.name"),
        "" => a.text("spec.nodeName"),
        _ => "",
    }
}

#[async_trait]
impl Plugin for PodTopologyLabels {
    fn name(&self) -> &'static str {
        "PodTopologyLabels"
    }

    fn handles(&self, operation: Operation) -> bool {
        operation == Operation::Create
    }

    fn concerns(&self, a: &Attributes<'_>) -> bool {
        a.group.is_empty() && a.resource == "pods" && !node(a).is_empty()
    }

    async fn admit(&self, a: &mut Attributes<'_>, lister: &dyn Lister) -> Result<(), Status> {
        let Some(labels) = lister.labels("", "nodes", node(a), PREFIX).await? else {
            return Ok(());
        };
        let wanted = labels
            .into_iter()
            .filter(|(key, _)| LABELS.contains(&key.as_str()));
        let Some(object) = a.object.as_deref_mut() else {
            return Ok(());
        };
        for (key, value) in wanted {
            walk::made(object, "metadata.labels", &mut |labels| {
                labels[key.as_str()] = Value::from(value.as_str());
            });
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plugins::fake::{Objects, create};
    use serde_json::json;

    #[tokio::test]
    async fn zone_and_region_come_from_the_node() {
        let lister = Objects(vec![(
            "nodes",
            json!({"metadata": {"name": "n", "labels": {"topology.kubernetes.io/zone": "z", "topology.kubernetes.io/x": "y", "a": "b"}}}),
        )]);
        let mut binding = json!({"target": {"kind": "Node", "name": "n"}, "metadata": {"name": "p"}});
        let mut a = create("", "pods", "Binding", &mut binding);
        a.subresource = "binding";
        assert!(PodTopologyLabels.concerns(&a));
        PodTopologyLabels.admit(&mut a, &lister).await.unwrap();
        assert_eq!(
            binding["metadata"]["labels"],
            json!({"topology.kubernetes.io/zone": "z"})
        );
        let mut pod = json!({"spec": {}});
        assert!(!PodTopologyLabels.concerns(&create("", "pods", "Pod", &mut pod)));
    }

    #[tokio::test]
    async fn a_pod_that_is_made_on_a_node_has_them_too() {
        let labels = json!({"topology.kubernetes.io/region": "r"});
        let lister = Objects(vec![(
            "nodes",
            json!({"metadata": {"name": "n", "labels": labels}}),
        )]);
        let mut pod = json!({"metadata": {"labels": {"a": "b"}}, "spec": {"nodeName": "n"}});
        let mut a = create("", "pods", "Pod", &mut pod);
        assert!(PodTopologyLabels.concerns(&a));
        PodTopologyLabels.admit(&mut a, &lister).await.unwrap();
        assert_eq!(
            pod["metadata"]["labels"],
            json!({"a": "b", "topology.kubernetes.io/region": "r"})
        );
        let mut elsewhere = json!({"target": {"kind": "Other", "name": "n"}});
        let mut a = create("", "pods", "Binding", &mut elsewhere);
        a.subresource = "binding";
        assert!(!PodTopologyLabels.concerns(&a));
    }
}
