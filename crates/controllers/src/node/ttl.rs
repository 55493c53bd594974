//! The TTL controller: tells kubelets by an annotation of their nodes for how long they may keep Secrets and ConfigMaps
//! without asking again; the larger the cluster, the longer.

use std::sync::Arc;

use k8s_openapi::api::core::v1::Node;
use kube::Api;
use kube::api::{Patch, PatchParams};
use parking_lot::Mutex;
use serde_json::json;
use skiff_client::{Action, ErrorExt, Informer, Key, Reconcile};

use crate::{Context, Error};

const ANNOTATION: &str = "node.alpha.kubernetes.io/ttl";

/// The least and the most nodes, and the seconds. They overlap, so that a node more or less changes nothing twice.
const STEPS: [(usize, usize, u32); 5] = [
    (0, 100, 0),
    (90, 500, 15),
    (450, 1000, 30),
    (900, 2000, 60),
    (1800, usize::MAX, 300),
];

/// The step of a cluster of this many nodes, coming from another one.
fn step(mut from: usize, nodes: usize) -> usize {
    while nodes > STEPS[from].1 {
        from += 1;
    }
    while nodes < STEPS[from].0 {
        from -= 1;
    }
    from
}

fn is_told(node: &Node, seconds: u32) -> bool {
    let annotations = node.metadata.annotations.as_ref();
    let told = annotations.and_then(|all| all.get(ANNOTATION));
    told.and_then(|told| told.parse().ok()) == Some(seconds)
}

struct Ttl {
    context: Context,
    nodes: Informer<Node>,
    /// Leaf lock.
    step: Mutex<usize>,
}

pub(crate) async fn run(context: Context) {
    let reconciler = Arc::new(Ttl {
        nodes: context.informers.informer(),
        step: Mutex::default(),
        context: context.clone(),
    });
    context
        .controller("ttlcontroller", reconciler)
        .workers(5)
        .owns(|r| &r.nodes)
        .run()
        .await;
}

impl Reconcile for Ttl {
    type Key = Key;
    type Error = Error;

    async fn reconcile(&self, key: Key) -> Result<Action, Error> {
        let seconds = {
            let mut current = self.step.lock();
            *current = step(*current, self.nodes.len());
            STEPS[*current].2
        };
        let node = self.nodes.get("", &key.name);
        if node.is_none_or(|node| is_told(&node, seconds)) {
            return Ok(Action::Done);
        }
        let api: Api<Node> = Api::all(self.context.client.clone());
        let patch = json!({"metadata": {"annotations": {ANNOTATION: seconds.to_string()}}});
        match api
            .patch(&key.name, &PatchParams::default(), &Patch::Strategic(patch))
            .await
        {
            Err(error) if !error.is_not_found() => Err(error.into()),
            _ => Ok(Action::Done),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_overlap() {
        let check = |from: usize, nodes: usize, seconds: u32| {
            assert_eq!(STEPS[step(from, nodes)].2, seconds, "{nodes} nodes");
        };
        check(0, 0, 0);
        check(0, 100, 0);
        check(0, 101, 15);
        check(1, 90, 15);
        check(1, 89, 0);
        check(0, 5000, 300);
        check(4, 1800, 300);
        check(4, 10, 0);
    }

    #[test]
    fn only_numbers_count() {
        let check = |annotations: serde_json::Value, expected: bool| {
            let node = json!({"metadata": {"name": "n", "annotations": annotations}});
            assert_eq!(is_told(&serde_json::from_value(node).unwrap(), 15), expected);
        };
        check(json!({}), false);
        check(json!({ANNOTATION: "15"}), true);
        check(json!({ANNOTATION: "0"}), false);
        check(json!({ANNOTATION: "x"}), false);
    }
}
