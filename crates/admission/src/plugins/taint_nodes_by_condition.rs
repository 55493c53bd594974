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
