//! Whether the node can give a pod what a resize asks for. Resizes that wait are tried again, in the order of their
//! worth, whenever room may have become free.

use std::cmp::Reverse;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::jiff::Timestamp;
use skiff_pods::requests::{pod_requests, spec_requests};

use super::{Amounts, Condition, DEFERRED, INFEASIBLE, Record, event_message, generation};
use crate::action_metrics::Infeasible;
use crate::admission::Refusal;
use crate::kubelet::Kubelet;
use crate::pod_state::PodState;
use crate::pods;
use crate::resources::{QosClass, qos_class};
use crate::status::is_terminal;
use crate::swap;
use crate::topology::containers;

/// What is considered first: what does not grow, then by priority, class, and how long it has waited.
type Worth = (bool, Reverse<i32>, bool, Timestamp);

fn worth(wanted: &Pod, allocated: &Pod, since: Option<Timestamp>) -> Worth {
    let requests = |pod: &Pod| pod.spec.as_ref().map(spec_requests).unwrap_or_default();
    let (new, old) = (requests(wanted), requests(allocated));
    let grows = new.milli_cpu > old.milli_cpu || new.memory > old.memory;
    let priority = wanted.spec.as_ref().and_then(|spec| spec.priority).unwrap_or(0);
    let guaranteed = qos_class(wanted) == QosClass::Guaranteed;
    (
        grows,
        Reverse(priority),
        !guaranteed,
        since.unwrap_or(Timestamp::MAX),
    )
}

/// Whether a change of a pod's object may make room for others.
pub(super) fn makes_room(before: &Pod, after: &Pod) -> bool {
    let (old, new) = (pod_requests(before), pod_requests(after));
    new.milli_cpu < old.milli_cpu
        || new.memory < old.memory
        || (is_terminal(after.status.as_ref()) && !is_terminal(before.status.as_ref()))
}

/// Whether a container asks for other CPU or other memory than it was given.
fn changes(wanted: &Pod, allocated: &Pod) -> (bool, bool) {
    let amounts = |pod: &Pod| -> Vec<Amounts> {
        let all = containers(pod);
        all.map(|(container, _)| Amounts::of(container.resources.as_ref()))
            .collect()
    };
    let (new, old) = (amounts(wanted), amounts(allocated));
    let mut both = new.iter().zip(&old);
    let cpu = both.clone().any(|(new, old)| new.with_memory(*old) != *old);
    (cpu, both.any(|(new, old)| new.with_cpu(*old) != *old))
}

impl Kubelet {
    /// The pod was taken: what it asks for is allocated, unless a record says what was before.
    pub fn record_allocation(&self, state: &PodState) {
        let mut resize = state.resize.lock();
        if resize.record.is_some() {
            return;
        }
        let record = Record::new(&state.pod());
        self.save_record(&state.uid, &record);
        resize.record = Some(record);
    }

    pub(super) fn save_record(&self, uid: &str, record: &Record) {
        if let Err(error) = record.save(&self.volumes.pod_dir(uid)) {
            tracing::warn!(uid, %error, "cannot record the resources of a pod");
        }
    }

    /// A newer version of a pod has come.
    pub fn consider_resize(&self, before: &Pod, after: &Pod) {
        let asks = generation(before) != generation(after);
        if asks || (self.resizes_wait.load(Ordering::SeqCst) && makes_room(before, after)) {
            self.retry_resizes();
        }
    }

    /// Room may have become free.
    pub fn retry_waiting_resizes(&self) {
        if self.resizes_wait.load(Ordering::SeqCst) {
            self.retry_resizes();
        }
    }

    /// Looks at every pod that asks for something else than it was given.
    pub fn retry_resizes(&self) {
        // Before all pods are known, the room that they take is not.
        if !self.pods_listed.load(Ordering::SeqCst) {
            return;
        }
        let mut changed = Vec::new();
        {
            let _turn = self.admission.lock();
            let mut waiting: Vec<(Worth, Arc<PodState>)> = Vec::new();
            for state in self.states() {
                if state.is_deleted() || state.failed().is_some() || state.is_terminal() {
                    continue;
                }
                let pod = state.pod();
                let mut resize = state.resize.lock();
                if !resize.is_wanted(&pod) {
                    // It was, and was taken back.
                    if resize.record.is_some() && resize.pending.take().is_some() {
                        changed.push(state.clone());
                    }
                } else if !resize.is_infeasible(&pod) {
                    let since = resize.pending.as_ref().map(|condition| condition.since);
                    drop(resize);
                    waiting.push((worth(&pod, &state.allocated_pod(), since), state));
                }
            }
            waiting.sort_by_key(|(worth, _)| *worth);
            let mut still_waits = false;
            for (_, state) in waiting {
                if self.try_resize(&state) {
                    changed.push(state.clone());
                }
                still_waits |= state.resize.lock().is_wanted(&state.pod());
            }
            self.resizes_wait.store(still_waits, Ordering::SeqCst);
        }
        for state in changed {
            self.refresh_status(&state);
            state.wake.notify_one();
        }
    }

    /// Returns whether there is something to show or to do.
    fn try_resize(&self, state: &PodState) -> bool {
        let pod = state.pod();
        let generation = generation(&pod);
        let (cpu, memory) = changes(&pod, &state.allocated_pod());
        let is_guaranteed = qos_class(&pod) == QosClass::Guaranteed;
        let is_swapped = self.swap.refuses_resize(&pod, &state.allocated_pod());
        let refused = match is_swapped {
            true => Some(swap::NOT_RESIZABLE.to_owned()),
            false => self.managers.refuses_resize(is_guaranteed, cpu, memory),
        };
        let (reason, admitted) = match refused {
            Some(message) => (INFEASIBLE, Err(Refusal::new(INFEASIBLE, message))),
            None => {
                let node = self.node.list();
                let admitted = self.admit_beside_others(state, &pod, node.first().map(Arc::as_ref));
                (DEFERRED, admitted)
            }
        };
        let event = |type_: &str, reason: &str, message: String| {
            self.recorder
                .event(&pods::reference(&pod), type_, reason, message);
        };
        let mut resize = state.resize.lock();
        let (Some(mut record), Some(spec)) = (resize.record.clone(), pod.spec.as_ref()) else {
            return false;
        };
        match admitted {
            Ok(()) => {
                record.allocated = super::Assigned::of(spec);
                self.save_record(&state.uid, &record);
                resize.record = Some(record);
                resize.pending = None;
                // An error of the resize before is none of this one.
                resize.in_progress = None;
                resize.begin(generation, None);
                event(
                    "Normal",
                    "ResizeStarted",
                    event_message("Pod resize started", &pod, generation, ""),
                );
                true
            }
            Err(refusal) => {
                let before = resize.pending.take();
                let is_known = |condition: &&Condition| {
                    condition.generation == generation && condition.reason.as_deref() == Some(reason)
                };
                let known = before.as_ref().filter(is_known);
                resize.pending = Some(Condition {
                    reason: Some(reason.to_owned()),
                    message: Some(refusal.message.clone()),
                    generation,
                    since: known.map_or_else(Timestamp::now, |condition| condition.since),
                });
                if known.is_none() {
                    if reason == INFEASIBLE {
                        let policy = self.managers.refuses_resize(is_guaranteed, cpu, false);
                        self.metrics.actions.resize_infeasible(match policy {
                            _ if is_swapped => Infeasible::Swap,
                            Some(_) => Infeasible::CpuManager,
                            None => Infeasible::MemoryManager,
                        });
                    }
                    let told = format!("Pod resize {}", refusal.reason);
                    event(
                        "Warning",
                        &format!("Resize{reason}"),
                        event_message(&told, &pod, generation, &refusal.message),
                    );
                }
                before != resize.pending
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn what_changes() {
        let pod = |cpu: &str, memory: &str| -> Pod {
            serde_json::from_value(json!({"spec": {"containers": [{"name": "a"},
                {"name": "b", "resources": {"limits": {"cpu": cpu, "memory": memory}}}]}}))
            .unwrap()
        };
        let old = pod("1", "1Gi");
        assert_eq!(changes(&pod("1000m", "1024Mi"), &old), (false, false));
        assert_eq!(changes(&pod("2", "1Gi"), &old), (true, false));
        assert_eq!(changes(&pod("1", "2Gi"), &old), (false, true));
    }

    #[test]
    fn what_is_considered_first() {
        let pod = |cpu: &str, priority: i32, guaranteed: bool| -> Pod {
            let resources = if guaranteed {
                json!({"requests": {"cpu": cpu, "memory": "1Mi"}, "limits": {"cpu": cpu, "memory": "1Mi"}})
            } else {
                json!({"requests": {"cpu": cpu}})
            };
            serde_json::from_value(json!({"spec": {"priority": priority, "containers": [
                {"name": "c", "resources": resources}]}}))
            .unwrap()
        };
        let at = |second| Timestamp::from_second(second).ok();
        let small = pod("1", 0, false);
        let mut all = [
            ("shrinks", worth(&pod("500m", 0, false), &small, None)),
            ("important", worth(&pod("2", 9, false), &small, None)),
            ("guaranteed", worth(&pod("2", 0, true), &pod("1", 0, true), at(9))),
            ("waits long", worth(&pod("2", 0, false), &small, at(1))),
            ("waits", worth(&pod("2", 0, false), &small, at(2))),
            ("new", worth(&pod("2", 0, false), &small, None)),
        ];
        let expected: Vec<&str> = all.iter().map(|(name, _)| *name).collect();
        all.reverse();
        all.sort_by_key(|(_, worth)| *worth);
        let found: Vec<&str> = all.iter().map(|(name, _)| *name).collect();
        assert_eq!(found, expected);
    }
}
