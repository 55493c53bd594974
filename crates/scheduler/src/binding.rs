//! What follows a cycle, in a task of the pod's own: waiting for Permit, PreBind, Bind and PostBind, or the report of why
//! the pod fits nowhere and the preemption that may help it.

use crate::cycle::Diagnosis;
use crate::events::ClusterEvent;
use crate::framework::{CycleState, Points, Profile, Rejection};
use crate::metrics::AttemptResult;
use crate::pod::PodInfo;
use crate::preempt::{Running, preempt, reference};
use crate::queue::Queued;
use crate::run::{Scheduler, rejected};
use k8s_openapi::api::core::v1::Pod;
use kube::api::{Api, Patch, PatchParams};
use parking_lot::Mutex;
use serde_json::{Value, json};
use skiff_client::{ErrorExt, EventRecorder};
use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::oneshot;

/// Upstream's limit of an event's message.
const MAX_NOTE: usize = 1024;

/// COMPAT: how often, and after which first pause, upstream tries to write a pod's status. In all it is less than the
/// shortest back-off of a pod: a report of an older try must not come after that of a newer one.
const STATUS_TRIES: u32 = 4;
const FIRST_STATUS_PAUSE: Duration = Duration::from_millis(10);

type Answer = oneshot::Sender<Result<(), Rejection>>;

/// Pods that a Permit plugin lets wait, with the way to tell them.
#[derive(Default)]
pub(crate) struct WaitingPods(Mutex<HashMap<Arc<str>, Answer>>);

impl WaitingPods {
    /// Lets the pod go on, or turns it away; false if it does not wait.
    pub(crate) fn answer(&self, uid: &str, answer: Result<(), Rejection>) -> bool {
        let waiting = self.0.lock().remove(uid);
        waiting.is_some_and(|sender| sender.send(answer).is_ok())
    }

    async fn wait(&self, uid: &Arc<str>, at_most: Duration) -> Result<(), Rejection> {
        let (sender, answer) = oneshot::channel();
        self.0.lock().insert(Arc::clone(uid), sender);
        let answered = tokio::time::timeout(at_most, answer).await;
        self.0.lock().remove(uid);
        match answered {
            Ok(Ok(answer)) => answer,
            _ => Err(Rejection::unschedulable(format!(
                "rejected due to timeout after waiting {at_most:?} at permit"
            ))),
        }
    }
}

struct BindFailure {
    rejection: Rejection,
    /// The plugin's number in the profile.
    number: usize,
    /// Nobody is left to be told.
    pod_is_gone: bool,
}

/// A binding under way. Unless it is done, its end, be it by a panic, gives the room back and lets the pod be tried again.
struct Binding<'a> {
    scheduler: &'a Scheduler,
    pod: &'a PodInfo,
    done: bool,
}

impl Binding<'_> {
    fn undo(&mut self) {
        self.done = true;
        let freed = self.scheduler.core.lock().cache.forget_assumed(&self.pod.uid);
        if let Some(freed) = freed {
            self.scheduler.queue.on_event(ClusterEvent::PodRemoved(freed));
        }
    }
}

impl Drop for Binding<'_> {
    fn drop(&mut self) {
        if !self.done {
            self.undo();
            self.scheduler.queue.back_off(&self.pod.uid);
        }
    }
}

impl Scheduler {
    fn recorder(&self, profile: &Profile) -> Option<&EventRecorder> {
        self.recorders.get(&profile.scheduler_name)
    }

    pub(crate) async fn bind(
        self: &Arc<Self>,
        profile: &Arc<Profile>,
        queued: Queued,
        node: &str,
        state: &CycleState,
        wait: Option<Duration>,
        started: Instant,
    ) {
        let pod = Arc::clone(&queued.pod);
        let mut binding = Binding {
            scheduler: self,
            pod: &pod,
            done: false,
        };
        let Err(failure) = self.bind_steps(profile, &pod, node, state, wait).await else {
            binding.done = true;
            self.core.lock().cache.binding_written(&pod.uid, Instant::now());
            self.metrics
                .attempt(&profile.scheduler_name, AttemptResult::Scheduled, started);
            self.metrics.scheduled(&queued);
            return;
        };
        let message = failure.rejection.message();
        tracing::warn!(pod = %pod.key, node, why = message, "binding failed");
        for (_, enabled) in profile.at(Points::RESERVE) {
            enabled.plugin.unreserve(state, &pod, node);
        }
        let diagnosis = rejected(&failure.rejection, failure.number);
        // The room is given back before the pod is parked: what it frees must not wake the pod itself.
        binding.undo();
        let running = self.failed(profile, &pod, &diagnosis, started);
        drop(binding);
        if !failure.pod_is_gone {
            self.report_failure(profile, &pod, diagnosis, running).await;
        }
    }

    async fn bind_steps(
        &self,
        profile: &Profile,
        pod: &Arc<PodInfo>,
        node: &str,
        state: &CycleState,
        wait: Option<Duration>,
    ) -> Result<(), BindFailure> {
        let failure = |rejection: Rejection, number: usize| BindFailure {
            rejection,
            number,
            pod_is_gone: false,
        };
        let mut plugins = profile.at(Points::PRE_BIND);
        if wait.is_some() || plugins.any(|(_, enabled)| enabled.plugin.pre_bind_waits(state, pod, node)) {
            // COMPAT: NominatedNodeNameForExpectation: others see where the pod is going while it waits.
            self.patch_status(pod, json!({"nominatedNodeName": node})).await;
        }
        if let Some(at_most) = wait {
            let allowed = self.waiting.wait(&pod.uid, at_most).await;
            allowed.map_err(|rejection| {
                let number = profile.number(rejection.plugin).unwrap_or(0);
                failure(rejection, number)
            })?;
        }
        for (number, enabled) in profile.at(Points::PRE_BIND) {
            let done = enabled.plugin.pre_bind(state, pod, node).await;
            done.map_err(|mut rejection| {
                let text = format!(
                    "running PreBind plugin {:?}: {}",
                    enabled.plugin.name(),
                    rejection.message()
                );
                rejection.reasons = vec![text.into()];
                failure(rejection, number)
            })?;
        }
        let mut bound = self
            .bind_by_extender(pod, node)
            .await
            .map_err(|error| failure(Rejection::error(format!("binding rejected: {error}")), 0))?;
        for (number, enabled) in profile.at(Points::BIND) {
            if bound {
                break;
            }
            let Some(result) = enabled.plugin.bind(state, pod, node).await else {
                continue;
            };
            result.map_err(|error| BindFailure {
                rejection: Rejection::error(format!(
                    "binding rejected: running Bind plugin {:?}: {error}",
                    enabled.plugin.name()
                )),
                number,
                pod_is_gone: error.is_not_found(),
            })?;
            bound = true;
        }
        if !bound {
            return Err(failure(Rejection::error("no plugin binds"), 0));
        }
        if let Some(recorder) = self.recorder(profile) {
            let message = format!("Successfully assigned {} to {node}", pod.key);
            recorder.event(&reference(pod), "Normal", "Scheduled", message);
        }
        for (_, enabled) in profile.at(Points::POST_BIND) {
            enabled.plugin.post_bind(state, pod, node);
        }
        Ok(())
    }

    /// Notes a failed try: the pod waits, and is nominated if room is being made for it.
    pub(crate) fn failed(
        &self,
        profile: &Profile,
        pod: &Arc<PodInfo>,
        diagnosis: &Diagnosis,
        started: Instant,
    ) -> Option<Running> {
        let result = if diagnosis.is_error {
            AttemptResult::Error
        } else {
            AttemptResult::Unschedulable
        };
        self.metrics.attempt(&profile.scheduler_name, result, started);
        let found = &diagnosis.post_filter;
        let going = found.victims.iter().any(|victim| !victim.deleting);
        let running = going.then(|| self.preempting.begin(pod));
        if let Some(node) = &found.nominate {
            self.core.lock().cache.nominate(pod, node);
        }
        // Parked first: what happens while the report is written must find it parked.
        if diagnosis.is_error {
            self.queue.back_off(&pod.uid);
        } else {
            self.queue.park(&pod.uid, diagnosis.rejected_by);
        }
        running
    }

    /// Makes room if there is a way, and says why the pod waits: as an event, and as its condition.
    pub(crate) async fn report_failure(
        self: &Arc<Self>,
        profile: &Arc<Profile>,
        pod: &Arc<PodInfo>,
        diagnosis: Diagnosis,
        running: Option<Running>,
    ) {
        let report = self.report(profile, pod, &diagnosis);
        let Some(running) = running else {
            report.await;
            return;
        };
        let node = diagnosis.post_filter.nominate.clone().unwrap_or_default();
        let victims = &diagnosis.post_filter.victims;
        self.metrics.preemption(victims.len());
        self.clear_lower_nominations(pod, &node).await;
        let made_room = match self.recorder(profile) {
            Some(recorder) => preempt(&self.client, recorder, pod, &node, victims).await,
            None => Ok(()),
        };
        drop(running);
        match made_room {
            Ok(()) => self.queue.release(&pod.uid),
            Err(error) => {
                tracing::warn!(pod = %pod.key, node, %error, "preemption failed");
                self.queue.retry(&pod.uid);
            }
        }
        report.await;
    }

    /// Pods of lower priority that counted on the node must look for another one.
    async fn clear_lower_nominations(&self, pod: &PodInfo, node: &str) {
        let lower: Vec<Arc<PodInfo>> = {
            let core = self.core.lock();
            let nominated = core.cache.nominated_on(node).iter();
            nominated
                .filter(|one| one.priority() < pod.priority())
                .cloned()
                .collect()
        };
        for one in lower {
            self.core.lock().cache.forget_nomination(&one.uid);
            self.patch_status(&one, json!({"nominatedNodeName": null})).await;
        }
    }

    async fn report(&self, profile: &Profile, pod: &PodInfo, diagnosis: &Diagnosis) {
        let reason = if diagnosis.is_error {
            "SchedulerError"
        } else {
            "Unschedulable"
        };
        let message = &diagnosis.message;
        if let Some(recorder) = self.recorder(profile) {
            let mut note = message.clone();
            if note.len() > MAX_NOTE {
                note.truncate(note.floor_char_boundary(MAX_NOTE - 4));
                note.push_str(" ...");
            }
            recorder.event(&reference(pod), "Warning", "FailedScheduling", note);
        }
        let mut status = json!({});
        if let Some(node) = &diagnosis.post_filter.nominate
            && *node != pod.nominated
        {
            status["nominatedNodeName"] = if node.is_empty() { Value::Null } else { json!(node) };
        }
        let known = pod
            .scheduled_condition
            .as_deref()
            .filter(|known| known.status == "False");
        let same = known.is_some_and(|known| {
            known.reason.as_deref() == Some(reason) && known.message.as_deref() == Some(message)
        });
        if !same {
            let since = known.and_then(|known| known.last_transition_time.as_ref());
            let since = since.map_or_else(k8s_openapi::jiff::Timestamp::now, |time| time.0);
            status["conditions"] = json!([{
                "type": "PodScheduled", "status": "False", "reason": reason, "message": message,
                "lastTransitionTime": skiff_meta::time::format_seconds(since),
                "observedGeneration": pod.generation,
            }]);
        }
        if status.as_object().is_some_and(|fields| !fields.is_empty()) {
            self.patch_status(pod, status).await;
        }
    }

    /// A status that cannot be written, be it after some tries, is written with the next try of the pod, which then comes
    /// soon.
    async fn patch_status(&self, pod: &PodInfo, status: Value) {
        let patch = json!({"metadata": {"uid": pod.uid}, "status": status});
        let api: Api<Pod> = Api::namespaced(self.client.clone(), &pod.key.namespace);
        let mut pause = FIRST_STATUS_PAUSE;
        for attempt in 1..=STATUS_TRIES {
            let written = api
                .patch_status(&pod.key.name, &PatchParams::default(), &Patch::Strategic(&patch))
                .await;
            let Err(error) = written else { return };
            tracing::debug!(pod = %pod.key, %error, "cannot write the pod's status");
            if !may_pass(&error) {
                return;
            }
            if attempt < STATUS_TRIES {
                tokio::time::sleep(pause.mul_f64(rand::random_range(1.0..1.1))).await;
                pause *= 5;
            }
        }
        self.queue.retry(&pod.uid);
    }
}

/// True if the server, or the way to it, may do better the next time.
pub(crate) fn may_pass(error: &kube::Error) -> bool {
    match error {
        kube::Error::Api(status) => matches!(status.code, 409 | 429) || status.code >= 500,
        _ => true,
    }
}
