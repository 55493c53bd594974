//! Pods that need a feature of the kubelet go only to nodes that declare it.

use crate::cache::Cache;
use crate::events::ClusterEvent;
use crate::framework::{CycleState, Plugin, PreFilter, Rejection, Scope, Verdict};
use crate::node::NodeInfo;
use crate::pod::PodInfo;
use k8s_openapi::api::core::v1::Pod;

pub(crate) struct NodeDeclaredFeatures;

/// The features that the pod's node must declare, by upstream's names.
pub(crate) fn required(pod: &Pod) -> Vec<&'static str> {
    let Some(spec) = &pod.spec else { return Vec::new() };
    let mut features = Vec::new();
    let mut containers = spec
        .containers
        .iter()
        .chain(spec.init_containers.iter().flatten());
    if containers.any(|container| {
        let mut rules = container.restart_policy_rules.iter().flatten();
        rules.any(|rule| rule.action == "RestartAllContainers")
    }) {
        features.push("RestartAllContainersOnContainerExits");
    }
    if spec.host_network == Some(true) && spec.host_users == Some(false) {
        features.push("UserNamespacesHostNetworkSupport");
    }
    features
}

impl Plugin for NodeDeclaredFeatures {
    fn name(&self) -> &'static str {
        "NodeDeclaredFeatures"
    }

    fn hint(&self, _pod: &PodInfo, event: &ClusterEvent) -> bool {
        match event {
            ClusterEvent::NodeAdded(_) => true,
            ClusterEvent::NodeUpdated { old, new } => old.features != new.features,
            ClusterEvent::OwnPodUpdated { old, new } => old.shape.features != new.shape.features,
            _ => false,
        }
    }

    fn pre_filter(
        &self,
        _state: &mut CycleState,
        pod: &PodInfo,
        _cache: &Cache,
    ) -> Result<PreFilter, Rejection> {
        if pod.shape.features.is_empty() {
            return Ok(PreFilter::Skip);
        }
        Ok(PreFilter::AllNodes)
    }

    fn filter(&self, _state: &CycleState, pod: &PodInfo, node: &NodeInfo) -> Verdict {
        let declared = |wanted: &&str| node.meta.features.iter().any(|one| one == wanted);
        if pod.shape.features.iter().all(declared) {
            return Ok(());
        }
        Err(Rejection::unresolvable(
            "node(s) didn't match Pod's required features",
        ))
    }

    fn scope(&self, _pod: &PodInfo) -> Scope {
        Scope::Local
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixtures::{node_meta, pod};
    use serde_json::json;
    use std::sync::Arc;

    #[test]
    fn the_node_must_declare_what_the_pod_needs() {
        let needy = pod("p", json!({"hostNetwork": true, "hostUsers": false}));
        let node = |features: serde_json::Value| NodeInfo {
            meta: Arc::new(node_meta(
                "a",
                json!({}),
                json!({}),
                json!({"declaredFeatures": features}),
            )),
            ..NodeInfo::default()
        };
        let (plugin, state) = (NodeDeclaredFeatures, CycleState::default());
        let fits = |pod: &PodInfo, features| plugin.filter(&state, pod, &node(features)).is_ok();
        assert!(!fits(&needy, json!([])));
        assert!(fits(&needy, json!(["UserNamespacesHostNetworkSupport"])));
        assert!(fits(&pod("q", json!({"hostNetwork": true})), json!([])));
    }
}
