//! DefaultTolerationSeconds: a pod stays five minutes on a node that is not ready or cannot be reached.

use async_trait::async_trait;
use serde_json::{Value, json};
use skiff_api::node::{list, text};
use skiff_api::walk;
use skiff_meta::Status;

use crate::{Attributes, Lister, Operation, Plugin};

const SECONDS: i64 = 300;

pub struct DefaultTolerationSeconds;

#[async_trait]
impl Plugin for DefaultTolerationSeconds {
    fn name(&self) -> &'static str {
        "DefaultTolerationSeconds"
    }

    fn handles(&self, operation: Operation) -> bool {
        matches!(operation, Operation::Create | Operation::Update)
    }

    async fn admit(&self, a: &mut Attributes<'_>, _: &dyn Lister) -> Result<(), Status> {
        if !a.is("", "pods") {
            return Ok(());
        }
        let Some(spec) = a.object.as_deref_mut().and_then(|o| walk::object(o, "spec")) else {
            return Ok(());
        };
        let mut tolerations = list(spec, "tolerations").to_vec();
        let given = tolerations.len();
        for key in ["node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable"] {
            let covers = |t: &Value| {
                ["", key].contains(&text(t, "key")) && ["", "NoExecute"].contains(&text(t, "effect"))
            };
            if !tolerations[..given].iter().any(covers) {
                tolerations.push(
                    json!({"key": key, "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": SECONDS}),
                );
            }
        }
        if tolerations.len() > given {
            walk::put(spec, "tolerations", Value::Array(tolerations));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plugins::fake::{Objects, create};

    #[tokio::test]
    async fn both_are_added_unless_tolerated() {
        let mut pod =
            json!({"spec": {"tolerations": [{"key": "node.kubernetes.io/not-ready", "operator": "Exists"}]}});
        DefaultTolerationSeconds
            .admit(&mut create("", "pods", "Pod", &mut pod), &Objects::default())
            .await
            .unwrap();
        assert_eq!(
            pod["spec"]["tolerations"],
            json!([{"key": "node.kubernetes.io/not-ready", "operator": "Exists"},
                {"key": "node.kubernetes.io/unreachable", "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 300}])
        );
    }

    #[tokio::test]
    async fn another_effect_does_not_tolerate_it() {
        let mut pod = json!({"spec": {"tolerations": [{"operator": "Exists", "effect": "NoSchedule"}]}});
        DefaultTolerationSeconds
            .admit(&mut create("", "pods", "Pod", &mut pod), &Objects::default())
            .await
            .unwrap();
        assert_eq!(list(&pod, "spec.tolerations").len(), 3);
        let mut pod = json!({"spec": {"tolerations": [{"operator": "Exists", "effect": "NoExecute"}]}});
        DefaultTolerationSeconds
            .admit(&mut create("", "pods", "Pod", &mut pod), &Objects::default())
            .await
            .unwrap();
        assert_eq!(list(&pod, "spec.tolerations").len(), 1);
    }
}
