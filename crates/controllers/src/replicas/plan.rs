//! What a workload must do to have the number of pods it wants, and the status it must show. No I/O.

use std::collections::HashMap;
use std::sync::Arc;

use jiff::Timestamp;
use k8s_openapi::api::core::v1::{Pod, PodTemplateSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{OwnerReference, Time};

use super::pod::{ReplicaPod, deletion_order};
use super::workload::{Condition, Status, Workload};

/// At most this many pods are made or removed in one go.
const BURST: usize = 500;

#[derive(Debug, PartialEq)]
pub(crate) enum Plan {
    Nothing,
    Create(usize),
    Delete(Vec<Arc<ReplicaPod>>),
}

/// `related` are the active pods of all workloads that share a parent with this one.
pub(crate) fn plan(
    replicas: i32,
    active: &[Arc<ReplicaPod>],
    related: &[Arc<ReplicaPod>],
    now: Timestamp,
) -> Plan {
    let wanted = usize::try_from(replicas).unwrap_or(0);
    if active.len() < wanted {
        return Plan::Create((wanted - active.len()).min(BURST));
    }
    let surplus = (active.len() - wanted).min(BURST);
    if surplus == 0 {
        return Plan::Nothing;
    }
    let mut on_node: HashMap<&str, usize> = HashMap::new();
    for pod in related {
        *on_node.entry(&pod.node).or_default() += 1;
    }
    let rank = |pod: &ReplicaPod| on_node.get(pod.node.as_str()).copied().unwrap_or(0);
    let mut ranked = active.to_vec();
    ranked.sort_by(|left, right| deletion_order((left, rank(left)), (right, rank(right)), now));
    ranked.truncate(surplus);
    Plan::Delete(ranked)
}

/// The batches of a slow start: after a failure nothing more is tried, so a quota that is used up costs few
/// requests.
pub(crate) fn batches(mut count: usize) -> Vec<usize> {
    let mut sizes = Vec::new();
    let mut size = 1;
    while count > 0 {
        let batch = size.min(count);
        sizes.push(batch);
        count -= batch;
        size *= 2;
    }
    sizes
}

/// A pod as the template wants it, controlled by the owner.
pub(crate) fn new_pod(template: &PodTemplateSpec, owner: &OwnerReference, namespace: &str) -> Pod {
    let wanted = template.metadata.clone().unwrap_or_default();
    let mut pod = Pod {
        spec: template.spec.clone(),
        ..Default::default()
    };
    pod.metadata.namespace = Some(namespace.to_owned());
    pod.metadata.generate_name = Some(format!("{}-", owner.name));
    pod.metadata.labels = wanted.labels;
    pod.metadata.annotations = wanted.annotations;
    pod.metadata.finalizers = wanted.finalizers;
    pod.metadata.owner_references = Some(vec![owner.clone()]);
    pod
}

/// What went wrong while managing pods: the reason and the message of the ReplicaFailure condition.
pub(crate) type Failure = (&'static str, String);

/// The status after looking at all that the workload controls. `fully_labeled` are the active pods that have all labels
/// of the template.
pub(crate) fn new_status<W: Workload>(
    workload: &W,
    controlled: &[Arc<ReplicaPod>],
    fully_labeled: i32,
    failure: Option<&Failure>,
    now: Timestamp,
) -> Status {
    let mut status = workload.status();
    let active: Vec<&Arc<ReplicaPod>> = controlled.iter().filter(|pod| pod.is_active()).collect();
    let count = |test: &dyn Fn(&ReplicaPod) -> bool| active.iter().filter(|pod| test(pod)).count() as i32;
    let available = |pod: &ReplicaPod| pod.available_at(workload.min_ready_seconds());
    status.replicas = active.len() as i32;
    status.fully_labeled = fully_labeled;
    status.ready = count(&|pod| pod.is_ready);
    status.available = count(&|pod| available(pod).is_some_and(|at| at <= now));
    status.terminating = Some(controlled.iter().filter(|pod| pod.is_terminating()).count() as i32);
    status.observed_generation = workload.meta().generation.unwrap_or(0);
    let failed_before = status
        .conditions
        .iter()
        .any(|condition| condition.type_ == "ReplicaFailure");
    match failure {
        Some((reason, message)) if !failed_before => status.conditions.push(Condition {
            type_: "ReplicaFailure".into(),
            status: "True".into(),
            reason: Some((*reason).to_owned()),
            message: Some(message.clone()),
            last_transition_time: Some(Time(now)),
        }),
        Some(_) => {}
        None => status
            .conditions
            .retain(|condition| condition.type_ != "ReplicaFailure"),
    }
    status
}

/// When the next ready pod becomes available by the mere passing of time.
pub(crate) fn next_availability(
    active: &[Arc<ReplicaPod>],
    min_ready_seconds: i32,
    now: Timestamp,
) -> Option<Timestamp> {
    active
        .iter()
        .filter_map(|pod| pod.available_at(min_ready_seconds))
        .filter(|at| *at > now)
        .min()
}

#[cfg(test)]
mod tests {
    use super::*;
    use k8s_openapi::api::apps::v1::ReplicaSet;
    use serde_json::json;

    fn now() -> Timestamp {
        "2026-01-01T01:00:00Z".parse().unwrap()
    }

    fn pod(name: &str, ready: bool, deleting: bool) -> Arc<ReplicaPod> {
        let status = if ready { "True" } else { "False" };
        let deleted = if deleting {
            json!("2026-01-01T00:00:00Z")
        } else {
            json!(null)
        };
        Arc::new(ReplicaPod::of(
            &serde_json::from_value(json!({
                "metadata": {"name": name, "uid": name, "labels": {"app": "web"}, "deletionTimestamp": deleted},
                "spec": {"nodeName": "n", "containers": []},
                "status": {"phase": "Running", "conditions": [
                    {"type": "Ready", "status": status, "lastTransitionTime": "2026-01-01T00:59:50Z"}]}}))
            .unwrap(),
        ))
    }

    #[test]
    fn makes_what_is_missing_and_removes_what_is_too_much() {
        let check = |replicas: i32, pods: &[Arc<ReplicaPod>], expected: &str| {
            let got = match plan(replicas, pods, pods, now()) {
                Plan::Nothing => "nothing".to_owned(),
                Plan::Create(count) => format!("create {count}"),
                Plan::Delete(pods) => {
                    let names: Vec<&str> = pods.iter().map(|pod| pod.name.as_str()).collect();
                    format!("delete {}", names.join(" "))
                }
            };
            assert_eq!(got, expected);
        };
        check(0, &[], "nothing");
        check(3, &[], "create 3");
        check(2000, &[], "create 500");
        check(1, &[pod("a", true, false)], "nothing");
        check(1, &[pod("a", true, false), pod("b", false, false)], "delete b");
        check(0, &[pod("a", true, false), pod("b", false, false)], "delete b a");
        check(-1, &[pod("a", true, false)], "delete a");
    }

    #[test]
    fn slow_start() {
        assert_eq!(batches(0), Vec::<usize>::new());
        assert_eq!(batches(1), vec![1]);
        assert_eq!(batches(10), vec![1, 2, 4, 3]);
    }

    #[test]
    fn status_counts() {
        let set: ReplicaSet = serde_json::from_value(json!({
            "metadata": {"name": "web", "generation": 4},
            "spec": {"replicas": 3, "minReadySeconds": 30, "selector": {"matchLabels": {"app": "web"}},
                "template": {"metadata": {"labels": {"app": "web", "extra": "1"}}}},
            "status": {"replicas": 0, "conditions": [{"type": "ReplicaFailure", "status": "True"}]}}))
        .unwrap();
        let pods = [
            pod("a", true, false),
            pod("b", false, false),
            pod("c", true, true),
        ];
        let status = new_status(&set, &pods, 1, None, now());
        assert_eq!(
            (
                status.replicas,
                status.fully_labeled,
                status.ready,
                status.available,
                status.terminating
            ),
            (2, 1, 1, 0, Some(1))
        );
        assert_eq!(status.observed_generation, 4);
        assert!(status.conditions.is_empty());
        let at = next_availability(&pods[..1], 30, now()).unwrap();
        assert_eq!(at.to_string(), "2026-01-01T01:00:20Z");
        let failed = new_status(&set, &pods, 1, Some(&("FailedCreate", "no quota".into())), now());
        assert_eq!(failed.conditions.len(), 1);
    }
}
