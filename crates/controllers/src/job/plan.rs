//! What a Job needs now: how its pods count, whether it is over, and which pods are made or removed. No I/O.
//!
//! [`Sync::new`] looks at the Job and its pods, [`Sync::manage`] says what to do with them, and [`Sync::settle`] takes
//! the outcome into the status. Counting what has finished is in `tracking`.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::api::batch::v1::{Job, JobCondition, JobSpec, JobStatus};
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;

use super::backoff::{Backoff, finished_at, remaining_of_index};
use super::facts;
use super::indexes::Indexes;
use super::policy::{self, Verdict};
use crate::pods;

/// At most this many pods are made or removed in one go.
const BURST: usize = 500;

pub(crate) struct Sync<'a> {
    pub(crate) job: &'a Job,
    pub(crate) spec: &'a JobSpec,
    pub(crate) pods: Vec<Arc<Pod>>,
    pub(crate) active: Vec<Arc<Pod>>,
    /// The status as it will be written.
    pub(crate) status: JobStatus,
    /// Pods that have succeeded, counted in the status or not; of an Indexed Job, indexes.
    pub(crate) succeeded: i32,
    /// The indexes that the status had counted before.
    pub(crate) counted_indexes: Indexes,
    pub(crate) succeeded_indexes: Indexes,
    /// Only with a back-off limit per index.
    pub(crate) failed_indexes: Option<Indexes>,
    /// The failed pods that stay until they are replaced, because they carry their index's failure count.
    pub(crate) awaiting_replacement: HashMap<i32, Arc<Pod>>,
    pub(crate) backoff: Backoff,
    /// Why the Job is over: SuccessCriteriaMet, FailureTarget, or Failed if FailureTarget stands already.
    pub(crate) finished: Option<JobCondition>,
    /// Whole seconds: it is compared with and written as times of the API.
    pub(crate) now: Timestamp,
}

/// What to do with a Job's pods.
#[derive(Debug, PartialEq)]
pub(crate) enum Manage {
    Nothing,
    /// The Job is over: these pods are deleted, and count.
    End(Vec<Arc<Pod>>),
    /// These pods are too many: they are deleted and never count.
    Remove(Vec<Arc<Pod>>),
    /// One pod each, with the index it shall have.
    Create(Vec<Option<i32>>),
}

/// What became of it.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Outcome {
    pub(crate) removed: i32,
    pub(crate) removed_ready: i32,
    pub(crate) created: i32,
}

/// Type, reason and message.
pub(crate) type Event = (&'static str, String, String);

fn count(number: usize) -> i32 {
    i32::try_from(number).unwrap_or(i32::MAX)
}

impl<'a> Sync<'a> {
    pub(crate) fn new(
        job: &'a Job,
        spec: &'a JobSpec,
        mut pods: Vec<Arc<Pod>>,
        before: Backoff,
        now: Timestamp,
    ) -> Sync<'a> {
        if facts::is_indexed(spec) {
            pods.sort_by_key(|pod| facts::index_of(pod));
        }
        let mut sync = Sync {
            job,
            spec,
            active: pods.iter().filter(|pod| pods::is_active(pod)).cloned().collect(),
            pods,
            status: job.status.clone().unwrap_or_default(),
            succeeded: 0,
            counted_indexes: Indexes::default(),
            succeeded_indexes: Indexes::default(),
            failed_indexes: None,
            awaiting_replacement: HashMap::new(),
            backoff: before,
            finished: None,
            now,
        };
        sync.evaluate();
        sync
    }

    fn completions(&self) -> i32 {
        self.spec.completions.unwrap_or(0)
    }

    /// The index of a pod, if the Job has such an index.
    pub(crate) fn valid_index(&self, pod: &Pod) -> Option<i32> {
        facts::index_of(pod).filter(|index| *index < self.completions())
    }

    /// True if the pod has an index that the Job has, or needs none.
    fn belongs(&self, pod: &Pod) -> bool {
        !facts::is_indexed(self.spec) || self.valid_index(pod).is_some()
    }

    fn evaluate(&mut self) {
        let uncounted = self.status.uncounted_terminated_pods.clone().unwrap_or_default();
        let uncounted_succeeded = uncounted.succeeded.unwrap_or_default();
        let uncounted_failed = uncounted.failed.unwrap_or_default();
        let fresh = |listed: &[String], test: &dyn Fn(&Pod) -> bool| -> Vec<Arc<Pod>> {
            let listed: HashSet<&str> = listed.iter().map(String::as_str).collect();
            let new = |pod: &&Arc<Pod>| {
                facts::is_tracked(pod) && !listed.contains(facts::uid(pod)) && self.belongs(pod) && test(pod)
            };
            self.pods.iter().filter(new).cloned().collect()
        };
        let new_succeeded = fresh(&uncounted_succeeded, &facts::succeeded);
        let new_failed = fresh(&uncounted_failed, &|pod| facts::failed(pod, self.spec));
        let counted = new_failed
            .iter()
            .filter(|pod| policy::verdict(self.job, pod) != Verdict::Ignore)
            .count();
        let failed = self.status.failed.unwrap_or(0) + count(counted) + count(uncounted_failed.len());
        self.succeeded = self.status.succeeded.unwrap_or(0)
            + count(new_succeeded.len())
            + count(uncounted_succeeded.len());
        self.backoff = self.backoff.after(&new_succeeded, &new_failed);
        if self.status.start_time.is_none() && !facts::is_suspended(self.spec) {
            self.status.start_time = Some(Time(self.now));
        }
        self.finished = self.end_decided_before().or_else(|| self.failure(failed));
        if facts::is_indexed(self.spec) {
            self.evaluate_indexes();
        }
    }

    /// The end that an earlier sync has decided on, or that the pod failure policy demands.
    fn end_decided_before(&self) -> Option<JobCondition> {
        if facts::is_true(&self.status, "SuccessCriteriaMet") {
            return facts::condition(&self.status, "SuccessCriteriaMet").cloned();
        }
        if facts::is_true(&self.status, "FailureTarget") {
            let target = facts::condition(&self.status, "FailureTarget")?;
            return Some(self.after_target("Failed", target));
        }
        self.spec.pod_failure_policy.as_ref()?;
        let failed = self.pods.iter().filter(|pod| facts::failed(pod, self.spec));
        let message = failed
            .map(|pod| policy::verdict(self.job, pod))
            .find_map(|verdict| match verdict {
                Verdict::FailJob(message) => Some(message),
                _ => None,
            })?;
        Some(self.failure_target("PodFailurePolicy", &message))
    }

    fn failure(&self, failed: i32) -> Option<JobCondition> {
        let limit = self.spec.backoff_limit.unwrap_or(6);
        if failed > limit || self.restarted_too_often(limit) {
            let message = "Job has reached the specified backoff limit";
            return Some(self.failure_target("BackoffLimitExceeded", message));
        }
        if self.until_deadline() == Some(Duration::ZERO) {
            let message = "Job was active longer than specified deadline";
            return Some(self.failure_target("DeadlineExceeded", message));
        }
        None
    }

    fn failure_target(&self, reason: &str, message: &str) -> JobCondition {
        facts::new_condition("FailureTarget", "True", reason, message, self.now)
    }

    /// The terminal condition for an interim one.
    pub(crate) fn after_target(&self, type_: &str, target: &JobCondition) -> JobCondition {
        let text = |text: &Option<String>| text.clone().unwrap_or_default();
        facts::new_condition(
            type_,
            "True",
            &text(&target.reason),
            &text(&target.message),
            self.now,
        )
    }

    /// Containers that restart in place count against the limit as well.
    fn restarted_too_often(&self, limit: i32) -> bool {
        let policy = self
            .spec
            .template
            .spec
            .as_ref()
            .and_then(|spec| spec.restart_policy.as_deref());
        if policy != Some("OnFailure") {
            return false;
        }
        let running = self
            .pods
            .iter()
            .filter(|pod| matches!(pods::phase(pod), "Running" | "Pending"));
        let restarts: i64 = running
            .filter_map(|pod| pod.status.as_ref())
            .flat_map(|status| [&status.init_container_statuses, &status.container_statuses])
            .flatten()
            .flatten()
            .map(|status| i64::from(status.restart_count))
            .sum();
        restarts >= i64::from(limit.max(1))
    }

    /// The time left until `activeDeadlineSeconds` are over.
    fn until_deadline(&self) -> Option<Duration> {
        let seconds = self.spec.active_deadline_seconds?;
        let start = self.status.start_time.as_ref()?;
        if facts::is_suspended(self.spec) {
            return None;
        }
        let elapsed = self.now.duration_since(start.0).as_secs();
        Some(Duration::from_secs(
            u64::try_from(seconds.saturating_sub(elapsed)).unwrap_or(0),
        ))
    }

    fn evaluate_indexes(&mut self) {
        let completions = self.completions();
        let completed = self.status.completed_indexes.as_deref().unwrap_or_default();
        self.counted_indexes = Indexes::parse(completed, completions);
        let tracked = |pod: &&Arc<Pod>| facts::is_tracked(pod);
        let succeeded = self
            .pods
            .iter()
            .filter(tracked)
            .filter(|pod| facts::succeeded(pod));
        self.succeeded_indexes = self
            .counted_indexes
            .with(succeeded.filter_map(|pod| self.valid_index(pod)));
        self.succeeded = self.succeeded_indexes.total();
        if let Some(limit) = self.spec.backoff_limit_per_index {
            let before = Indexes::parse(
                self.status.failed_indexes.as_deref().unwrap_or_default(),
                completions,
            );
            let failed = self
                .pods
                .iter()
                .filter(tracked)
                .filter(|pod| self.fails_index(pod, limit));
            let failed = before.with(failed.filter_map(|pod| self.valid_index(pod)));
            let (lost, done) = (failed.total(), failed.total() + self.succeeded);
            if self.finished.is_none() {
                if self.spec.max_failed_indexes.is_some_and(|most| lost > most) {
                    let message = "Job has exceeded the specified maximal number of failed indexes";
                    self.finished = Some(self.failure_target("MaxFailedIndexesExceeded", message));
                } else if lost > 0 && done >= completions {
                    self.finished = Some(self.failure_target("FailedIndexes", "Job has failed indexes"));
                }
            }
            self.awaiting_replacement = self.find_awaiting_replacement(&failed);
            self.failed_indexes = Some(failed);
        }
        if self.finished.is_none()
            && let Some(message) = policy::success(
                self.spec.success_policy.as_ref(),
                completions,
                &self.succeeded_indexes,
            )
        {
            let met = facts::new_condition("SuccessCriteriaMet", "True", "SuccessPolicy", &message, self.now);
            self.finished = Some(met);
        }
    }

    fn fails_index(&self, pod: &Pod, limit: i32) -> bool {
        facts::failed(pod, self.spec)
            && match policy::verdict(self.job, pod) {
                Verdict::FailIndex => true,
                Verdict::Ignore => false,
                Verdict::Count | Verdict::FailJob(_) => facts::failures(pod, facts::INDEX_FAILURES) >= limit,
            }
    }

    fn find_awaiting_replacement(&self, failed_indexes: &Indexes) -> HashMap<i32, Arc<Pod>> {
        let mut waiting: HashMap<i32, Arc<Pod>> = HashMap::new();
        let active = Indexes::default().with(self.active.iter().filter_map(|pod| facts::index_of(pod)));
        for pod in self
            .pods
            .iter()
            .filter(|pod| facts::is_tracked(pod) && facts::failed(pod, self.spec))
        {
            let Some(index) = self.valid_index(pod) else {
                continue;
            };
            if self.succeeded_indexes.contains(index)
                || failed_indexes.contains(index)
                || active.contains(index)
            {
                continue;
            }
            let newest = waiting.get(&index).is_none_or(|other| {
                facts::absolute_failures(other) <= facts::absolute_failures(pod)
                    && finished_at(pod) >= finished_at(other)
            });
            if newest {
                waiting.insert(index, pod.clone());
            }
        }
        waiting
    }

    /// What to do with the pods now, and when to look again even if nothing changes.
    pub(crate) fn manage(&self) -> (Manage, Option<Duration>) {
        if self.finished.is_some() {
            return (Manage::End(self.active.clone()), None);
        }
        let deadline = self.until_deadline();
        if self.job.metadata.deletion_timestamp.is_some() {
            return (Manage::Nothing, None);
        }
        let (manage, wait) = self.manage_active();
        (manage, deadline.into_iter().chain(wait).min())
    }

    fn manage_active(&self) -> (Manage, Option<Duration>) {
        if facts::is_suspended(self.spec) {
            let all = self.surplus(self.active.len());
            return (remove(all), None);
        }
        let active = count(self.active.len());
        let parallelism = self.spec.parallelism.unwrap_or(1);
        let wanted = match self.spec.completions {
            // One success is enough; then whatever still runs may end.
            None if self.succeeded > 0 => active,
            None => parallelism,
            Some(completions) => (completions - self.succeeded).min(parallelism).max(0),
        };
        let mut surplus = self.surplus(usize::try_from(active - wanted).unwrap_or(0));
        surplus.truncate(BURST);
        if !surplus.is_empty() {
            return (Manage::Remove(surplus), None);
        }
        let terminating = if facts::replaces_only_failed(self.spec) {
            self.terminating()
        } else {
            0
        };
        let missing = usize::try_from(wanted - terminating - active)
            .unwrap_or(0)
            .min(BURST);
        if missing == 0 {
            return (Manage::Nothing, None);
        }
        let per_index = self.spec.backoff_limit_per_index.is_some();
        let wait = if per_index {
            Duration::ZERO
        } else {
            self.backoff.remaining(self.now)
        };
        if !wait.is_zero() {
            return (Manage::Nothing, Some(wait));
        }
        if !facts::is_indexed(self.spec) {
            return (Manage::Create(vec![None; missing]), None);
        }
        let mut due = Vec::new();
        let mut wait: Option<Duration> = None;
        for index in self.pending_indexes(missing) {
            let failed = self.awaiting_replacement.get(&index);
            let left = failed.map_or(Duration::ZERO, |pod| remaining_of_index(pod, self.now));
            if left.is_zero() {
                due.push(Some(index));
            } else {
                wait = Some(wait.map_or(left, |least| least.min(left)));
            }
        }
        let manage = if due.is_empty() {
            Manage::Nothing
        } else {
            Manage::Create(due)
        };
        (manage, wait)
    }

    fn terminating(&self) -> i32 {
        count(self.pods.iter().filter(|pod| pods::is_terminating(pod)).count())
    }

    fn pending_indexes(&self, missing: usize) -> Vec<i32> {
        let indexes = |test: fn(&Pod) -> bool| {
            let pods = self.pods.iter().filter(move |pod| test(pod));
            pods.filter_map(|pod| facts::index_of(pod))
        };
        let mut taken = self.succeeded_indexes.with(indexes(pods::is_active));
        if facts::replaces_only_failed(self.spec) {
            taken = taken.with(indexes(pods::is_terminating));
        }
        if let Some(failed) = &self.failed_indexes {
            taken = taken.merge(failed);
        }
        taken.first_missing(missing, self.completions())
    }

    /// The active pods that must go: at least `least`, and of an Indexed Job all that share an index or have none.
    fn surplus(&self, least: usize) -> Vec<Arc<Pod>> {
        let mut ordered = self.active.clone();
        ordered.sort_by(|left, right| facts::removal_order(left, right));
        let (mut gone, mut left) = (Vec::new(), Vec::new());
        if facts::is_indexed(self.spec) {
            // Of several pods with one index the last in order stays.
            let mut keeper: HashMap<i32, &str> = HashMap::new();
            for pod in &ordered {
                if let Some(index) = self.valid_index(pod) {
                    keeper.insert(index, facts::uid(pod));
                }
            }
            let keepers: HashSet<&str> = keeper.into_values().collect();
            for pod in &ordered {
                let list = if keepers.contains(facts::uid(pod)) {
                    &mut left
                } else {
                    &mut gone
                };
                list.push(pod.clone());
            }
        } else {
            left = ordered;
        }
        let more = least.saturating_sub(gone.len());
        gone.extend(left.into_iter().take(more));
        gone
    }

    /// Takes what was done with the pods into the status, and decides whether all completions are there.
    pub(crate) fn settle(&mut self, outcome: Outcome) -> Option<Event> {
        let ready = self.active.iter().filter(|pod| pods::is_ready(pod)).count();
        let before = count(self.active.len());
        let active = before - outcome.removed + outcome.created;
        self.status.active = Some(active);
        self.status.ready = Some((count(ready) - outcome.removed_ready).clamp(0, active.max(0)));
        self.status.terminating = Some(self.terminating() + outcome.removed);
        if self.finished.is_some() {
            // Not over yet: a pod could not be deleted.
            if outcome.removed != before {
                self.finished = None;
            }
            return None;
        }
        let complete = match self.spec.completions {
            None => self.succeeded > 0 && active == 0,
            Some(completions) => self.succeeded >= completions && active == 0,
        };
        if complete {
            let message = "Reached expected number of succeeded pods";
            let met = facts::new_condition(
                "SuccessCriteriaMet",
                "True",
                "CompletionsReached",
                message,
                self.now,
            );
            self.finished = Some(met);
            return None;
        }
        if self.job.metadata.deletion_timestamp.is_some() {
            return None;
        }
        self.settle_suspension()
    }

    fn settle_suspension(&mut self) -> Option<Event> {
        let suspended = facts::is_suspended(self.spec);
        let (status, reason, message) = if suspended {
            ("True", "JobSuspended", "Job suspended")
        } else {
            ("False", "JobResumed", "Job resumed")
        };
        let condition = facts::new_condition("Suspended", status, reason, message, self.now);
        if !facts::set_condition(&mut self.status, condition) {
            return None;
        }
        // `activeDeadlineSeconds` count from the resumption.
        self.status.start_time = (!suspended).then_some(Time(self.now));
        let reason = if suspended { "Suspended" } else { "Resumed" };
        Some(("Normal", reason.to_owned(), message.to_owned()))
    }
}

fn remove(pods: Vec<Arc<Pod>>) -> Manage {
    if pods.is_empty() {
        Manage::Nothing
    } else {
        Manage::Remove(pods)
    }
}
