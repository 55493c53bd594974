//! PodGroupProtection: a PodGroup gets a finalizer, so that it outlives its pods.

use async_trait::async_trait;
use serde_json::{Value, json};
use skiff_api::node::list;
use skiff_api::walk;
use skiff_meta::Status;

use crate::{Attributes, Lister, Operation, Plugin};

const FINALIZER: &str = "scheduling.k8s.io/podgroup-protection";

pub struct PodGroupProtection;

#[async_trait]
impl Plugin for PodGroupProtection {
    fn name(&self) -> &'static str {
        "PodGroupProtection"
    }

    fn handles(&self, operation: Operation) -> bool {
        operation == Operation::Create
    }

    async fn admit(&self, a: &mut Attributes<'_>, _: &dyn Lister) -> Result<(), Status> {
        if !a.is("scheduling.k8s.io", "podgroups") {
            return Ok(());
        }
        let Some(metadata) = a.object.as_deref_mut().and_then(|o| walk::object(o, "metadata")) else {
            return Ok(());
        };
        let mut finalizers = list(metadata, "finalizers").to_vec();
        if !finalizers.contains(&json!(FINALIZER)) {
            finalizers.push(json!(FINALIZER));
            walk::put(metadata, "finalizers", Value::Array(finalizers));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plugins::fake::{Objects, create};

    #[tokio::test]
    async fn a_group_gets_the_finalizer_once() {
        for (resource, given, expected) in [
            ("podgroups", json!([]), json!([FINALIZER])),
            ("podgroups", json!(["mine"]), json!(["mine", FINALIZER])),
            ("podgroups", json!([FINALIZER]), json!([FINALIZER])),
            ("workloads", json!([]), json!([])),
        ] {
            let mut object = json!({"metadata": {"finalizers": given}});
            let mut a = create("scheduling.k8s.io", resource, "", &mut object);
            PodGroupProtection
                .admit(&mut a, &Objects::default())
                .await
                .unwrap();
            assert_eq!(object["metadata"]["finalizers"], expected);
        }
    }
}
