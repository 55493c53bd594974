//! Where the pods of a DaemonSet belong, and the pods themselves: their tolerations and the node they are for.
//! No I/O.

use k8s_openapi::api::apps::v1::{DaemonSet, DaemonSetSpec};
use k8s_openapi::api::core::v1::{
    Node, NodeSelector, NodeSelectorRequirement, NodeSelectorTerm, Pod, PodSpec, Toleration,
};
use skiff_pods::{affinity, taints};

use super::daemon::Daemon;
use crate::history::REVISION_LABEL;
use crate::ownership::controller_reference;
use crate::{pods, replicas};

pub(super) const TEMPLATE_GENERATION_LABEL: &str = "pod-template-generation";
const TEMPLATE_GENERATION: &str = "deprecated.daemonset.template.generation";

/// What a DaemonSet's pods tolerate besides what their template says: a node in trouble keeps its daemons.
fn own_tolerations(host_network: bool) -> Vec<(&'static str, &'static str)> {
    let mut all = vec![
        ("node.kubernetes.io/not-ready", "NoExecute"),
        ("node.kubernetes.io/unreachable", "NoExecute"),
        ("node.kubernetes.io/disk-pressure", "NoSchedule"),
        ("node.kubernetes.io/memory-pressure", "NoSchedule"),
        ("node.kubernetes.io/pid-pressure", "NoSchedule"),
        ("node.kubernetes.io/unschedulable", "NoSchedule"),
    ];
    if host_network {
        all.push(("node.kubernetes.io/network-unavailable", "NoSchedule"));
    }
    all
}

/// Adds them; one that the template limits in time is replaced.
fn add_tolerations(spec: &mut PodSpec) {
    let host_network = spec.host_network == Some(true);
    let tolerations = spec.tolerations.get_or_insert_default();
    for (key, effect) in own_tolerations(host_network) {
        let own = Toleration {
            key: Some(key.into()),
            operator: Some("Exists".into()),
            effect: Some(effect.into()),
            ..Default::default()
        };
        let empty = |value: &Option<String>| value.as_deref().unwrap_or_default().is_empty();
        let same = |present: &Toleration| {
            present.key == own.key
                && present.operator == own.operator
                && present.effect == own.effect
                && empty(&present.value)
        };
        let mut found = false;
        for present in tolerations.iter_mut().filter(|present| same(present)) {
            *present = own.clone();
            found = true;
        }
        if !found {
            tolerations.push(own);
        }
    }
}

/// What a DaemonSet does about one node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Placement {
    /// A pod must be there.
    Run,
    /// A pod that is there may stay, but none is started.
    Keep,
    /// A pod that is there must go.
    Leave,
}

impl Placement {
    pub(super) fn runs(self) -> bool {
        self == Placement::Run
    }
}

/// The pod spec of a DaemonSet with its own tolerations.
pub(super) struct DaemonPod {
    spec: PodSpec,
}

impl DaemonPod {
    pub(super) fn new(set: &DaemonSetSpec) -> Self {
        let mut spec = set.template.spec.clone().unwrap_or_default();
        add_tolerations(&mut spec);
        DaemonPod { spec }
    }

    pub(super) fn placement(&self, node: &Node) -> Placement {
        let wanted = self.spec.node_name.as_deref().unwrap_or_default();
        let fits_name = wanted.is_empty() || Some(wanted) == node.metadata.name.as_deref();
        if !fits_name || !affinity::required_affinity_matches(&self.spec, node) {
            return Placement::Leave;
        }
        let present = node.spec.as_ref().and_then(|spec| spec.taints.as_deref());
        let present = present.unwrap_or_default();
        let tolerations = self.spec.tolerations.as_deref().unwrap_or_default();
        if taints::find_untolerated(present, tolerations, taints::forbids_scheduling).is_none() {
            return Placement::Run;
        }
        let evicts = |taint: &_| -> bool { is_no_execute(taint) };
        match taints::find_untolerated(present, tolerations, evicts) {
            None => Placement::Keep,
            Some(_) => Placement::Leave,
        }
    }
}

fn is_no_execute(taint: &k8s_openapi::api::core::v1::Taint) -> bool {
    taint.effect == "NoExecute"
}

/// The generation of the template that the API server keeps in an annotation.
fn template_generation(set: &DaemonSet) -> Option<i64> {
    let annotations = set.metadata.annotations.as_ref()?;
    annotations.get(TEMPLATE_GENERATION)?.parse().ok()
}

/// A pod for one node. The scheduler binds it there by its affinity.
pub(super) fn new_pod(set: &DaemonSet, spec: &DaemonSetSpec, node: &str, hash: &str) -> Pod {
    let owner = controller_reference(set);
    let namespace = set.metadata.namespace.as_deref().unwrap_or_default();
    let mut pod = replicas::new_pod(&spec.template, &owner, namespace);
    let labels = pod.metadata.labels.get_or_insert_default();
    if let Some(generation) = template_generation(set) {
        labels.insert(TEMPLATE_GENERATION_LABEL.into(), generation.to_string());
    }
    labels.insert(REVISION_LABEL.into(), hash.to_owned());
    let spec = pod.spec.get_or_insert_default();
    add_tolerations(spec);
    // What the template requires of nodes was checked already.
    let affinity = spec.affinity.get_or_insert_default();
    affinity
        .node_affinity
        .get_or_insert_default()
        .required_during_scheduling_ignored_during_execution = Some(NodeSelector {
        node_selector_terms: vec![NodeSelectorTerm {
            match_fields: Some(vec![NodeSelectorRequirement {
                key: "metadata.name".into(),
                operator: "In".into(),
                values: Some(vec![node.to_owned()]),
            }]),
            match_expressions: None,
        }],
    });
    pod
}

/// The node that a pod runs on or waits for.
pub(super) fn target_node(pod: &Pod) -> Option<&str> {
    let node = pods::node_name(pod);
    if !node.is_empty() {
        return Some(node);
    }
    let terms = &affinity::required(pod.spec.as_ref()?)?.node_selector_terms;
    let mut fields = terms.iter().flat_map(|term| term.match_fields.iter().flatten());
    let field = fields.find(|field| field.key == "metadata.name" && field.operator == "In")?;
    match field.values.as_deref() {
        Some([node]) => Some(node),
        _ => None,
    }
}

/// True if the pod has the set's present template.
pub(super) fn is_updated(set: &DaemonSet, pod: &Daemon, hash: &str) -> bool {
    let generation = template_generation(set).map(|generation| generation.to_string());
    pod.revision.as_deref() == Some(hash) || (generation.is_some() && pod.template_generation == generation)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn set(spec: Value) -> DaemonSet {
        serde_json::from_value(json!({
            "metadata": {"name": "agent", "namespace": "d", "uid": "u",
                "annotations": {"deprecated.daemonset.template.generation": "3"}},
            "spec": {"selector": {}, "template": {"metadata": {"labels": {"app": "agent"}}, "spec": spec}}}))
        .unwrap()
    }

    #[test]
    fn nodes_are_chosen_by_name_affinity_and_taints() {
        let check = |spec: Value, taints: Value, expected: Placement| {
            let node: Node = serde_json::from_value(json!({
                "metadata": {"name": "a", "labels": {"disk": "ssd"}}, "spec": {"taints": taints}}))
            .unwrap();
            let set = set(spec.clone());
            let placement = DaemonPod::new(set.spec.as_ref().unwrap()).placement(&node);
            assert_eq!(placement, expected, "{spec} {taints}");
        };
        let none = || json!([]);
        check(json!({"containers": []}), none(), Placement::Run);
        check(json!({"containers": [], "nodeName": "a"}), none(), Placement::Run);
        check(
            json!({"containers": [], "nodeName": "b"}),
            none(),
            Placement::Leave,
        );
        check(
            json!({"containers": [], "nodeSelector": {"disk": "ssd"}}),
            none(),
            Placement::Run,
        );
        check(
            json!({"containers": [], "nodeSelector": {"disk": "hdd"}}),
            none(),
            Placement::Leave,
        );
        let taint = |key: &str, effect: &str| json!([{"key": key, "effect": effect}]);
        check(
            json!({"containers": []}),
            taint("x", "PreferNoSchedule"),
            Placement::Run,
        );
        check(
            json!({"containers": []}),
            taint("x", "NoSchedule"),
            Placement::Keep,
        );
        check(
            json!({"containers": []}),
            taint("x", "NoExecute"),
            Placement::Leave,
        );
        check(
            json!({"containers": [], "tolerations": [{"key": "x", "operator": "Exists"}]}),
            taint("x", "NoExecute"),
            Placement::Run,
        );
        for (key, effect) in own_tolerations(false) {
            check(json!({"containers": []}), taint(key, effect), Placement::Run);
        }
        let network = taint("node.kubernetes.io/network-unavailable", "NoSchedule");
        check(json!({"containers": []}), network.clone(), Placement::Keep);
        check(
            json!({"containers": [], "hostNetwork": true}),
            network,
            Placement::Run,
        );
        check(
            json!({"containers": []}),
            taint("node.kubernetes.io/not-ready", "NoSchedule"),
            Placement::Keep,
        );
    }

    #[test]
    fn a_pod_is_made_for_its_node() {
        let set = set(json!({"containers": [],
            "tolerations": [{"key": "node.kubernetes.io/not-ready", "operator": "Exists", "effect": "NoExecute",
                "tolerationSeconds": 5}, {"key": "x", "operator": "Exists"}],
            "affinity": {"podAntiAffinity": {}, "nodeAffinity": {
                "preferredDuringSchedulingIgnoredDuringExecution": [],
                "requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [
                    {"matchExpressions": [{"key": "disk", "operator": "Exists"}]}]}}}}));
        let made = new_pod(&set, set.spec.as_ref().unwrap(), "n1", "abc");
        assert_eq!(target_node(&made), Some("n1"));
        assert!(is_updated(&set, &Daemon::of(&made), "abc"));
        assert!(is_updated(&set, &Daemon::of(&made), "other"), "by the generation");
        let pod = json!(made);
        assert_eq!(
            pod["metadata"]["labels"],
            json!({"app": "agent", "controller-revision-hash": "abc", "pod-template-generation": "3"})
        );
        assert_eq!(pod["metadata"]["generateName"], "agent-");
        let affinity = &pod["spec"]["affinity"];
        assert_eq!(
            affinity["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"],
            json!([{"matchFields": [{"key": "metadata.name", "operator": "In", "values": ["n1"]}]}])
        );
        assert!(affinity["podAntiAffinity"].is_object());
        let tolerations = pod["spec"]["tolerations"].as_array().unwrap();
        assert_eq!(tolerations.len(), 7);
        assert_eq!(
            tolerations[0],
            json!({"key": "node.kubernetes.io/not-ready", "operator": "Exists", "effect": "NoExecute"})
        );
        let waits: Pod = serde_json::from_value(json!({"spec": {"containers": []}})).unwrap();
        assert_eq!(target_node(&waits), None);
    }
}
