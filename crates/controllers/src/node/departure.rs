//! Departure: deletes the Node of a machine that said it leaves (`skiff leave`).
//!
//! A node may not delete its own Node, as upstream: it could register again without the taints that an administrator
//! gave it. So the machine marks its Node, and the Node is deleted here if nothing on it is an administrator's to keep:
//! otherwise it stays until somebody deletes it by hand.

use std::sync::Arc;

use k8s_openapi::api::core::v1::Node;
use kube::Api;
use kube::api::{DeleteParams, Preconditions};
use skiff_client::{Action, ErrorExt, Informer, Key, Reconcile};

use crate::{Context, Error};

/// The mark; its value says nothing.
pub const LEAVING: &str = "skiff.io/leaving";
/// Taints that controllers set and take away.
const OWN_TAINTS: &str = "node.kubernetes.io/";
/// Labels that no node may set on itself.
const RESTRICTED: &str = "node-restriction.kubernetes.io/";

/// Whether the Node may go without an administrator.
fn may_go(node: &Node) -> bool {
    let spec = node.spec.clone().unwrap_or_default();
    let annotations = node.metadata.annotations.iter().flatten();
    let labels = node.metadata.labels.iter().flatten();
    annotations.into_iter().any(|(key, _)| key == LEAVING)
        && spec.unschedulable == Some(true)
        && spec
            .taints
            .iter()
            .flatten()
            .all(|taint| taint.key.starts_with(OWN_TAINTS))
        && !labels.into_iter().any(|(key, _)| key.starts_with(RESTRICTED))
        && node.metadata.deletion_timestamp.is_none()
}

struct Departure {
    context: Context,
    nodes: Informer<Node>,
}

pub(crate) async fn run(context: Context) {
    let reconciler = Arc::new(Departure {
        nodes: context.informers.informer(),
        context: context.clone(),
    });
    context
        .controller("node_departure", reconciler)
        .watches(
            |r| &r.nodes,
            |_, change| may_go(change.object()).then(|| Key::of(&**change.object())),
        )
        .run()
        .await;
}

impl Reconcile for Departure {
    type Key = Key;
    type Error = Error;

    async fn reconcile(&self, key: Key) -> Result<Action, Error> {
        let Some(node) = self.nodes.get("", &key.name).filter(|node| may_go(node)) else {
            return Ok(Action::Done);
        };
        let api: Api<Node> = Api::all(self.context.client.clone());
        // What was decided about this version: a taint that comes in between keeps the Node.
        let preconditions = Preconditions {
            uid: node.metadata.uid.clone(),
            resource_version: node.metadata.resource_version.clone(),
        };
        match api
            .delete(&key.name, &DeleteParams::default().preconditions(preconditions))
            .await
        {
            Ok(_) => Ok(Action::Done),
            Err(error) if error.is_conflict() || error.is_not_found() => Ok(Action::Done),
            Err(error) => Err(error.into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    #[test]
    fn who_may_go() {
        let check = |metadata: Value, spec: Value, expected: bool| {
            let node: Node = serde_json::from_value(json!({"metadata": metadata, "spec": spec})).unwrap();
            assert_eq!(may_go(&node), expected, "{node:?}");
        };
        let leaving = json!({"name": "n", "annotations": {LEAVING: ""}});
        let cordoned = json!({"unschedulable": true});
        check(leaving.clone(), cordoned.clone(), true);
        check(json!({"name": "n"}), cordoned.clone(), false);
        check(leaving.clone(), json!({}), false);
        let taint =
            |key: &str| json!({"unschedulable": true, "taints": [{"key": key, "effect": "NoSchedule"}]});
        check(leaving.clone(), taint("node.kubernetes.io/unschedulable"), true);
        check(leaving.clone(), taint("quarantine"), false);
        let labelled = json!({"name": "n", "annotations": {LEAVING: ""}, "labels": {"node-restriction.kubernetes.io/x": ""}});
        check(labelled, cordoned, false);
    }
}
