//! Counting finished pods exactly once. A finished pod is first named in `status.uncountedTerminatedPods`, then loses
//! its finalizer, and then is counted and no longer named; whoever is interrupted in between goes on from there. An
//! index that has succeeded needs no name: it is in the status once. No I/O.

use std::collections::HashSet;
use std::sync::Arc;

use k8s_openapi::api::batch::v1::{JobCondition, JobStatus};
use k8s_openapi::api::core::v1::Pod;

use super::facts;
use super::plan::{Event, Sync};
use super::policy::{self, Verdict};

/// At most this many pods are named in a status at a time.
const MAX_UNCOUNTED: usize = 500;

/// The finalizers to remove once the status is written.
pub(crate) struct Release {
    pub(crate) pods: Vec<Arc<Pod>>,
    /// The uids of all pods that have the finalizer now.
    pub(crate) tracked: HashSet<String>,
    /// Pods were left for the next time: the Job is not over before they are counted.
    pub(crate) more: bool,
    /// The actions of the rules that newly failed pods matched.
    pub(crate) handled: Vec<String>,
}

impl Sync<'_> {
    /// Names what has finished in the status, with the interim condition if the Job is over, and says which
    /// finalizers go next. Afterwards [`Sync::finished`] is the terminal condition.
    pub(crate) fn track(&mut self) -> Release {
        let uncounted = self.status.uncounted_terminated_pods.get_or_insert_default();
        let named_succeeded: HashSet<String> = uncounted.succeeded.iter().flatten().cloned().collect();
        let named_failed: HashSet<String> = uncounted.failed.iter().flatten().cloned().collect();
        let tracked: HashSet<String> = self
            .pods
            .iter()
            .filter(|pod| facts::is_tracked(pod))
            .map(|pod| facts::uid(pod).to_owned())
            .collect();
        count_released(&mut self.status, &tracked);
        let indexed = facts::is_indexed(self.spec);
        let ends_in_failure = self
            .finished
            .as_ref()
            .is_some_and(|end| end.type_ != "SuccessCriteriaMet");
        let mut release = Release {
            pods: Vec::new(),
            tracked,
            more: false,
            handled: Vec::new(),
        };
        let (mut succeeded, mut failed, mut new_indexes) = (Vec::new(), Vec::new(), 0);
        let listed = {
            let uncounted = self.status.uncounted_terminated_pods.as_ref();
            let length = |list: Option<&Vec<String>>| list.map_or(0, Vec::len);
            length(uncounted.and_then(|uncounted| uncounted.succeeded.as_ref()))
                + length(uncounted.and_then(|uncounted| uncounted.failed.as_ref()))
        };
        for pod in self.pods.iter().filter(|pod| facts::is_tracked(pod)) {
            let considered_failed = facts::failed(pod, self.spec);
            if !self.may_release(pod, considered_failed) {
                continue;
            }
            release.pods.push(pod.clone());
            let uid = facts::uid(pod);
            if facts::succeeded(pod) && !named_failed.contains(uid) {
                if indexed {
                    let index = self.valid_index(pod);
                    new_indexes +=
                        usize::from(index.is_some_and(|index| !self.counted_indexes.contains(index)));
                } else if !named_succeeded.contains(uid) {
                    succeeded.push(uid.to_owned());
                }
            } else if considered_failed || ends_in_failure {
                // Once the Job has failed, every pod that did not succeed has failed with it.
                let belongs = !indexed || self.valid_index(pod).is_some();
                if belongs && !named_failed.contains(uid) {
                    release.handled.extend(policy::action(self.job, pod));
                    if policy::verdict(self.job, pod) != Verdict::Ignore {
                        failed.push(uid.to_owned());
                    }
                }
            }
            if listed + new_indexes + succeeded.len() + failed.len() >= MAX_UNCOUNTED {
                release.more = true;
                break;
            }
        }
        let uncounted = self.status.uncounted_terminated_pods.get_or_insert_default();
        uncounted.succeeded.get_or_insert_default().append(&mut succeeded);
        uncounted.failed.get_or_insert_default().append(&mut failed);
        if indexed {
            self.status.succeeded = Some(self.succeeded_indexes.total());
            let completed = self.succeeded_indexes.to_string();
            self.status.completed_indexes = (!completed.is_empty()).then_some(completed);
            self.status.failed_indexes = self.failed_indexes.as_ref().map(ToString::to_string);
        }
        self.finished = self.finished.take().map(|end| self.announce(end));
        release
    }

    /// Puts the interim condition into the status; answers the terminal one.
    fn announce(&mut self, end: JobCondition) -> JobCondition {
        let terminal = match end.type_.as_str() {
            "FailureTarget" => "Failed",
            "SuccessCriteriaMet" => "Complete",
            _ => return end,
        };
        let condition = self.after_target(terminal, &end);
        if !facts::is_true(&self.status, &end.type_) {
            facts::set_condition(&mut self.status, end);
        }
        condition
    }

    fn may_release(&self, pod: &Pod, considered_failed: bool) -> bool {
        let job_ends = self.job.metadata.deletion_timestamp.is_some() || self.finished.is_some();
        if job_ends || facts::succeeded(pod) {
            return true;
        }
        let waits = facts::index_of(pod)
            .and_then(|index| self.awaiting_replacement.get(&index))
            .is_some_and(|waiting| facts::uid(waiting) == facts::uid(pod));
        considered_failed && !waits
    }

    /// Ends the Job in its status, unless pods are still to be counted or to end.
    pub(crate) fn finish(&mut self) -> bool {
        let Some(end) = self.finished.clone() else {
            return false;
        };
        let uncounted = self.status.uncounted_terminated_pods.as_ref();
        let left = uncounted.is_some_and(|uncounted| {
            let lists = [&uncounted.succeeded, &uncounted.failed];
            lists.into_iter().flatten().any(|list| !list.is_empty())
        });
        if left || self.status.terminating.unwrap_or(0) > 0 {
            return false;
        }
        if end.type_ == "Complete" {
            self.status.completion_time = end.last_transition_time.clone();
        }
        facts::set_condition(&mut self.status, end);
        true
    }

    /// What is told of a Job that has ended.
    pub(crate) fn last_events(&self) -> Vec<Event> {
        let Some(end) = &self.finished else {
            return Vec::new();
        };
        if end.type_ != "Complete" {
            let text = |text: &Option<String>| text.clone().unwrap_or_default();
            return vec![("Warning", text(&end.reason), text(&end.message))];
        }
        let mut events = Vec::new();
        if self
            .spec
            .completions
            .is_some_and(|wanted| self.status.succeeded.unwrap_or(0) > wanted)
        {
            let message = "Too many succeeded pods running after completion count reached";
            events.push(("Warning", "TooManySucceededPods".to_owned(), message.to_owned()));
        }
        events.push(("Normal", "Completed".to_owned(), "Job completed".to_owned()));
        events
    }
}

/// Counts the pods that are named but no longer have the finalizer. True if there were any.
pub(crate) fn count_released(status: &mut JobStatus, tracked: &HashSet<String>) -> bool {
    let Some(uncounted) = &mut status.uncounted_terminated_pods else {
        return false;
    };
    let mut changed = false;
    let lists = [
        (&mut uncounted.succeeded, &mut status.succeeded),
        (&mut uncounted.failed, &mut status.failed),
    ];
    for (list, counter) in lists {
        let Some(list) = list else { continue };
        let before = list.len();
        list.retain(|uid| tracked.contains(uid));
        let released = i32::try_from(before - list.len()).unwrap_or(i32::MAX);
        if released > 0 {
            *counter = Some(counter.unwrap_or(0).saturating_add(released));
            changed = true;
        }
    }
    changed
}

/// The status with one form for what means the same, so that only real changes are written.
pub(crate) fn normal(status: &JobStatus) -> JobStatus {
    let mut status = status.clone();
    for counter in [&mut status.active, &mut status.succeeded, &mut status.failed] {
        *counter = counter.filter(|count| *count != 0);
    }
    status.completed_indexes = status.completed_indexes.filter(|text| !text.is_empty());
    status.conditions = status.conditions.filter(|list| !list.is_empty());
    if let Some(uncounted) = &mut status.uncounted_terminated_pods {
        let empty = |list: &Option<Vec<String>>| list.as_ref().is_none_or(Vec::is_empty);
        if empty(&uncounted.succeeded) {
            uncounted.succeeded = None;
        }
        if empty(&uncounted.failed) {
            uncounted.failed = None;
        }
        if uncounted.succeeded.is_none() && uncounted.failed.is_none() {
            status.uncounted_terminated_pods = None;
        }
    }
    status
}
