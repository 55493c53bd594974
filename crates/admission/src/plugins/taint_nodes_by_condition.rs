//! TaintNodesByCondition: a new node starts out tainted as not ready, so that nothing is scheduled to it
//! before its first heartbeat.

use async_trait::async_trait;
use serde_json::{Value, json};
use skiff_api::node::{list, text};
use skiff_api::walk;
use skiff_meta::Status;

use crate::{Attributes, Lister, Operation, Plugin};

const NOT_READY: &str = "node.kubernetes.io/not-ready";

pub struct TaintNodesByCondition;

#[async_trait]
impl Plugin for TaintNodesByCondition {
    fn name(&self) -> &'static str {
        "TaintNodesByCondition"
    }

    fn handles(&self, operation: Operation) -> bool {
        operation == Operation::Create
    }

    async fn admit(&self, a: &mut Attributes<'_>, _: &dyn Lister) -> Result<(), Status> {
        if !a.is("", "nodes") {
            return Ok(());
        }
        let Some(spec) = a.object.as_deref_mut().and_then(|o| walk::object(o, "spec")) else {
            return Ok(());
        };
        let known = |t: &Value| text(t, "key") == NOT_READY && text(t, "effect") == "NoSchedule";
        if !list(spec, "taints").iter().any(known) {
            let mut taints = list(spec, "taints").to_vec();
            taints.push(json!({"key": NOT_READY, "effect": "NoSchedule"}));
            walk::put(spec, "taints", Value::Array(taints));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plugins::fake::{Objects, create};
    async fn check(taints: Value, expected: Value) {
        let mut node = json!({"spec": {"taints": taints}});
        TaintNodesByCondition
            .admit(&mut create("", "nodes", "Node", &mut node), &Objects::default())
            .await
            .unwrap();
        assert_eq!(node["spec"]["taints"], expected);
    }

    #[tokio::test]
    async fn a_node_is_born_not_ready() {
        let not_ready = json!({"key": NOT_READY, "effect": "NoSchedule"});
        check(json!([]), json!([not_ready])).await;
        check(json!([not_ready]), json!([not_ready])).await;
        let other = json!({"key": NOT_READY, "effect": "NoExecute"});
        check(json!([other]), json!([other, not_ready])).await;
    }
}
