//! Room for critical pods: which pods are ended so that the node can take one that must run. The choice is pure.

use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::{Pod, PodCondition};
use k8s_openapi::jiff::Timestamp;
use skiff_pods::requests::pod_requests;

use crate::admission::Refusal;
use crate::kubelet::Kubelet;
use crate::pod_state::PodState;
use crate::pods;
use crate::resources::{QosClass, qos_class};
use crate::static_pods::{is_mirror, is_static};
use crate::status::whole_seconds;

/// The reason of a pod that was ended for a critical one.
pub const REASON: &str = "Preempting";
const MESSAGE: &str = "Preempted in order to admit critical pod";
/// From here on a priority is the system's own.
pub(crate) const SYSTEM_CRITICAL: i32 = 2_000_000_000;
/// How often it is looked whether those that make room have ended.
const POLL: Duration = Duration::from_millis(20);

/// A resource and how much of it is missing.
pub type Missing = (String, i64);

pub fn is_critical(pod: &Pod) -> bool {
    let priority = pod.spec.as_ref().and_then(|spec| spec.priority);
    is_static(pod) || is_mirror(pod) || priority.is_some_and(|priority| priority >= SYSTEM_CRITICAL)
}

fn makes_room_for(critical: &Pod, pod: &Pod) -> bool {
    let priority = |pod: &Pod| pod.spec.as_ref().and_then(|spec| spec.priority);
    if is_critical(critical) && !is_critical(pod) {
        return true;
    }
    priority(critical)
        .zip(priority(pod))
        .is_some_and(|(critical, other)| critical > other)
}

fn request(pod: &Pod, resource: &str) -> i64 {
    match resource {
        "pods" => 1,
        _ => pod_requests(pod).get(resource),
    }
}

/// What is still missing when these are gone.
fn without(missing: &[Missing], gone: &[&Arc<Pod>]) -> Vec<Missing> {
    let left = missing.iter().map(|(name, amount)| {
        let freed: i64 = gone.iter().map(|pod| request(pod, name)).sum();
        (name.clone(), amount.saturating_sub(freed))
    });
    left.filter(|(_, amount)| *amount > 0).collect()
}

/// How far the pod is from filling the gap, each resource counting alike.
fn distance(missing: &[Missing], pod: &Pod) -> f64 {
    let parts = missing.iter().map(|(name, amount)| {
        let left = (amount - request(pod, name)).max(0) as f64 / *amount as f64;
        left * left
    });
    parts.sum()
}

/// Those of the list that fill the gap, the nearest first. `None` if all of them do not.
fn nearest<'a>(list: &[&'a Arc<Pod>], missing: Vec<Missing>) -> Option<Vec<&'a Arc<Pod>>> {
    let (mut left, mut missing, mut chosen) = (list.to_vec(), missing, Vec::new());
    while !missing.is_empty() {
        let by_size = |pod: &Arc<Pod>| (request(pod, "memory"), request(pod, "cpu"));
        let (index, _) = left.iter().enumerate().min_by(|(_, a), (_, b)| {
            let order = distance(&missing, a).total_cmp(&distance(&missing, b));
            order.then_with(|| by_size(a).cmp(&by_size(b)))
        })?;
        let pod = left.swap_remove(index);
        missing = without(&missing, &[pod]);
        chosen.push(pod);
    }
    Some(chosen)
}

/// The pods to end: as few guaranteed ones as can be, then as few burstable ones, then the rest.
fn victims(critical: &Pod, others: &[Arc<Pod>], missing: &[Missing]) -> Result<Vec<Arc<Pod>>, String> {
    let of_class = |class: QosClass| -> Vec<&Arc<Pod>> {
        let all = others.iter().filter(|pod| makes_room_for(critical, pod));
        all.filter(|pod| qos_class(pod) == class).collect()
    };
    let best_effort = of_class(QosClass::BestEffort);
    let burstable = of_class(QosClass::Burstable);
    let guaranteed = of_class(QosClass::Guaranteed);
    let everybody = [best_effort.clone(), burstable.clone(), guaranteed.clone()].concat();
    let never = without(missing, &everybody);
    let complaint = |missing: &[Missing]| {
        let list: String = missing
            .iter()
            .map(|(name, amount)| format!("(res: {name}, q: {amount}), "))
            .collect();
        format!("no set of running pods found to reclaim resources: [{list}]")
    };
    if !never.is_empty() {
        return Err(complaint(&never));
    }
    let choose = |list: &[&'_ Arc<Pod>], gone: Vec<&Arc<Pod>>| {
        let left = without(missing, &gone);
        nearest(list, left.clone())
            .map(|chosen| chosen.into_iter().cloned().collect::<Vec<_>>())
            .ok_or_else(|| complaint(&left))
    };
    let guaranteed = choose(&guaranteed, [best_effort.clone(), burstable.clone()].concat())?;
    let gone = [best_effort.clone(), guaranteed.iter().collect()].concat();
    let burstable = choose(&burstable, gone)?;
    let gone = [burstable.iter().collect::<Vec<_>>(), guaranteed.iter().collect()].concat();
    let best_effort = choose(&best_effort, gone)?;
    Ok([best_effort, burstable, guaranteed].concat())
}

impl Kubelet {
    /// Ends other pods so that a critical one fits, and waits until they have ended.
    pub async fn make_room(&self, state: &PodState, missing: &[Missing]) -> Result<(), Refusal> {
        let critical = state.allocated_pod();
        let others: Vec<Arc<PodState>> = self
            .states()
            .into_iter()
            .filter(|other| other.uid != state.uid && other.is_admitted() && !other.is_terminal())
            .collect();
        let their_pods: Vec<Arc<Pod>> = others.iter().map(|other| other.allocated_pod()).collect();
        let chosen = victims(&critical, &their_pods, missing).map_err(|why| {
            Refusal::new(
                "UnexpectedAdmissionError",
                format!(
                    "Unexpected error while attempting to recover from admission failure: preemption: error finding a set of pods to preempt: {why}"
                ),
            )
        })?;
        let uids: Vec<&str> = chosen.iter().map(|pod| pods::uid(pod)).collect();
        let ending: Vec<&Arc<PodState>> = others
            .iter()
            .filter(|other| uids.contains(&other.uid.as_str()))
            .collect();
        for other in &ending {
            let pod = other.pod();
            self.recorder
                .event(&pods::reference(&pod), "Warning", REASON, MESSAGE.to_owned());
            other.mark_disrupted(PodCondition {
                type_: "DisruptionTarget".to_owned(),
                status: "True".to_owned(),
                reason: Some("TerminationByKubelet".to_owned()),
                message: Some("Pod was preempted by Kubelet to accommodate a critical pod.".to_owned()),
                last_transition_time: Some(whole_seconds(Timestamp::now())),
                observed_generation: pod.metadata.generation,
                last_probe_time: None,
            });
            let short_of = missing.first().map_or("", |(resource, _)| resource);
            self.metrics.actions.preempted(short_of);
            other.fail(REASON, MESSAGE.to_owned());
            other.terminate.cancel();
            other.wake.notify_one();
        }
        while ending.iter().any(|other| !other.is_terminal()) && !state.terminate.is_cancelled() {
            tokio::time::sleep(POLL).await;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn pod(name: &str, cpu: &str, guaranteed: bool, priority: i32) -> Arc<Pod> {
        let resources = match (cpu, guaranteed) {
            ("", _) => json!({}),
            (cpu, true) => {
                json!({"requests": {"cpu": cpu, "memory": "1Mi"}, "limits": {"cpu": cpu, "memory": "1Mi"}})
            }
            (cpu, false) => json!({"requests": {"cpu": cpu}}),
        };
        let pod = json!({"metadata": {"name": name}, "spec": {"priority": priority,
            "containers": [{"name": "c", "resources": resources}]}});
        Arc::new(serde_json::from_value(pod).unwrap())
    }

    #[test]
    fn who_makes_room() {
        let critical = pod("critical", "1", false, SYSTEM_CRITICAL);
        assert!(is_critical(&critical));
        let others = [
            pod("idle", "", false, 0),
            pod("small", "100m", false, 0),
            pod("large", "1", false, 0),
            pod("sure", "500m", true, 0),
            pod("as critical", "1", false, SYSTEM_CRITICAL),
        ];
        let check = |missing: &[(&str, i64)], expected: Result<&[&str], &str>| {
            let missing: Vec<Missing> = missing.iter().map(|(n, q)| ((*n).to_owned(), *q)).collect();
            let found = victims(&critical, &others, &missing).map(|list| {
                list.iter()
                    .map(|pod| pods::name(pod).to_owned())
                    .collect::<Vec<_>>()
            });
            match (found, expected) {
                (Ok(found), Ok(expected)) => assert_eq!(found, expected),
                (Err(why), Err(expected)) => assert!(why.ends_with(expected), "{why}"),
                other => panic!("{other:?}"),
            }
        };
        check(&[("cpu", 50)], Ok(&["small"]));
        check(&[("cpu", 900)], Ok(&["large"]));
        check(&[("cpu", 1050)], Ok(&["large", "small"]));
        check(&[("cpu", 1200)], Ok(&["large", "sure"]));
        check(&[("pods", 1)], Ok(&["idle"]));
        check(&[("cpu", 1700)], Err("[(res: cpu, q: 100), ]"));
    }
}
