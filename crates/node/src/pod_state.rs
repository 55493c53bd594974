//! What the node holds of one pod: the object, what the runtime last showed, and the status made of both.
//! Shared by the pod's worker, its probes, its status writer and the server.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use k8s_openapi::api::core::v1::{Pod, PodStatus};
use parking_lot::{Mutex, RwLock};
use skiff_trace::Work;
use tokio::sync::{Notify, watch};
use tokio_util::sync::CancellationToken;

use crate::observed::ObservedPod;
use crate::pods;
use crate::resize::Resize;
use crate::static_pods::is_static;
use crate::status::WaitingReason;

pub struct PodState {
    pub uid: String,
    /// Of a manifest on this machine, not of the API.
    is_static: bool,
    /// What the API shows of a static pod, if it does. A leaf lock.
    mirror: Mutex<Option<Arc<Pod>>>,
    /// When this kubelet first saw the pod.
    pub since: Instant,
    /// The newest version seen.
    pod: watch::Sender<Arc<Pod>>,
    observed: RwLock<Arc<ObservedPod>>,
    /// The last status made. Held while the next one is made, so that two makers cannot cross; before
    /// `reasons` and `failed` in lock order.
    pub(crate) status: Mutex<Arc<PodStatus>>,
    /// What was allocated to the pod. A leaf lock.
    pub(crate) resize: Mutex<Resize>,
    /// Why containers wait, by name.
    reasons: Mutex<HashMap<String, WaitingReason>>,
    /// An end the kubelet decided.
    failed: Mutex<Option<WaitingReason>>,
    /// How long it has to end, where the kubelet decides that.
    end_grace: watch::Sender<Option<i64>>,
    /// Nothing runs any more, and nothing is mounted.
    torn_down: watch::Sender<bool>,
    /// Nothing of this pod will be started any more.
    terminal: AtomicBool,
    /// The node has taken the pod: what it asks for counts.
    admitted: AtomicBool,
    /// The API has no such pod any more.
    gone: AtomicBool,
    /// The runtime may have something of this pod; if not, there is no need to ask.
    in_runtime: AtomicBool,
    /// Held by what changes the runtime or the disk on the pod's behalf, to its end. The pod's end waits for it: it
    /// must not take away what something is just being made in.
    changes: Arc<tokio::sync::Mutex<()>>,
    /// Ends whatever the worker does for a pod that shall live.
    pub terminate: CancellationToken,
    /// Wakes the worker.
    pub wake: Notify,
    /// As `wake`, when nothing but the status was written, as far as it is the node's own.
    pub(crate) status_seen: Notify,
    /// Counts statuses made; the writer follows.
    pub(crate) dirty: watch::Sender<u64>,
    /// Counts statuses written; `u64::MAX` when there is nobody to write to any more.
    pub(crate) written: watch::Sender<u64>,
    work: RwLock<Option<Arc<Work>>>,
}

/// Whether all that changed is the status, as far as the node itself writes it. A failure whose message is another each time
/// would otherwise make the worker try again at once, for ever.
fn differs_by_own_status(old: &Pod, new: &Pod) -> bool {
    const OWN: [&str; 7] = [
        "AllContainersRestarting",
        "ContainersReady",
        "Initialized",
        "PodReadyToStartContainers",
        "PodResizeInProgress",
        "PodResizePending",
        "Ready",
    ];
    let of_others = |pod: &Pod| {
        let conditions = pod
            .status
            .iter()
            .flat_map(|status| status.conditions.iter().flatten());
        let others = conditions.filter(|one| !OWN.contains(&one.type_.as_str()));
        let phase = pod.status.as_ref().and_then(|status| status.phase.clone());
        (others.cloned().collect::<Vec<_>>(), phase)
    };
    let written = |pod: &Pod| {
        let mut metadata = pod.metadata.clone();
        metadata.managed_fields = None;
        metadata.resource_version = None;
        metadata
    };
    old.metadata.resource_version != new.metadata.resource_version
        && old.spec == new.spec
        && of_others(old) == of_others(new)
        && written(old) == written(new)
}

impl PodState {
    pub fn new(pod: Arc<Pod>, in_runtime: bool, resize: Resize) -> Arc<Self> {
        let status = pod.status.clone().unwrap_or_default();
        let state = PodState {
            uid: pods::uid(&pod).to_owned(),
            is_static: is_static(&pod),
            mirror: Mutex::default(),
            since: Instant::now(),
            observed: RwLock::default(),
            status: Mutex::new(Arc::new(status)),
            resize: Mutex::new(resize),
            reasons: Mutex::default(),
            failed: Mutex::default(),
            end_grace: watch::Sender::new(None),
            torn_down: watch::Sender::new(false),
            terminal: AtomicBool::new(false),
            admitted: AtomicBool::new(false),
            gone: AtomicBool::new(false),
            in_runtime: AtomicBool::new(in_runtime),
            changes: Arc::default(),
            terminate: CancellationToken::new(),
            wake: Notify::new(),
            status_seen: Notify::new(),
            dirty: watch::Sender::new(0),
            written: watch::Sender::new(0),
            work: RwLock::default(),
            pod: watch::Sender::new(pod.clone()),
        };
        state.update(pod);
        Arc::new(state)
    }

    pub fn is_static(&self) -> bool {
        self.is_static
    }

    pub fn mirror(&self) -> Option<Arc<Pod>> {
        self.mirror.lock().clone()
    }

    /// The status is written to the mirror, if there is one.
    pub fn set_mirror(&self, mirror: Option<Arc<Pod>>) {
        *self.mirror.lock() = mirror;
        self.dirty.send_modify(|generation| *generation += 1);
    }

    /// The pod as the API has it: its mirror, if the pod itself is static.
    pub fn api_pod(&self) -> Option<Arc<Pod>> {
        if self.is_static {
            self.mirror()
        } else {
            Some(self.pod())
        }
    }

    pub fn pod(&self) -> Arc<Pod> {
        self.pod.borrow().clone()
    }

    /// The pod with the resources that were allocated to it, which may not be those that it asks for by now.
    pub fn allocated_pod(&self) -> Arc<Pod> {
        let pod = self.pod();
        let resize = self.resize.lock();
        match &resize.record {
            Some(record) if resize.is_wanted(&pod) => Arc::new(record.allocated.applied(&pod)),
            _ => pod,
        }
    }

    pub fn update(&self, pod: Arc<Pod>) {
        if pod.metadata.deletion_timestamp.is_some() {
            self.terminate.cancel();
        }
        let old = self.pod.send_replace(pod.clone());
        match differs_by_own_status(&old, &pod) {
            true => self.status_seen.notify_one(),
            false => self.wake.notify_one(),
        }
    }

    /// The API has forgotten the pod; `last` is how it last looked.
    pub fn set_gone(&self, last: Arc<Pod>) {
        self.gone.store(true, Ordering::SeqCst);
        self.terminate.cancel();
        self.update(last);
        self.wake.notify_one();
    }

    pub fn is_gone(&self) -> bool {
        self.gone.load(Ordering::SeqCst)
    }

    pub fn is_deleted(&self) -> bool {
        self.is_gone() || self.pod.borrow().metadata.deletion_timestamp.is_some()
    }

    /// Waits until the pod is given less time to end: by the API than `grace`, or by the kubelet than `limit`.
    pub async fn grace_shortened(&self, grace: i64, limit: Option<i64>) {
        let (mut versions, mut limits) = (self.pod.subscribe(), self.end_grace.subscribe());
        let is_less = |now: &Option<i64>| now.is_some_and(|now| limit.is_none_or(|limit| now < limit));
        let shortened = tokio::select! {
            result = versions.wait_for(|pod| pods::grace_period(pod) < grace) => result.is_ok(),
            result = limits.wait_for(is_less) => result.is_ok(),
        };
        if !shortened {
            std::future::pending().await
        }
    }

    pub fn observed(&self) -> Arc<ObservedPod> {
        self.observed.read().clone()
    }

    /// Returns whether that was news.
    pub fn set_observed(&self, observed: ObservedPod) -> bool {
        let mut current = self.observed.write();
        let news = **current != observed;
        if news {
            *current = Arc::new(observed);
        }
        news
    }

    pub fn status(&self) -> Arc<PodStatus> {
        self.status.lock().clone()
    }

    pub fn reasons(&self) -> HashMap<String, WaitingReason> {
        self.reasons.lock().clone()
    }

    pub fn set_reason(&self, container: &str, reason: Option<WaitingReason>) {
        let mut reasons = self.reasons.lock();
        match reason {
            Some(reason) => {
                reasons.insert(container.to_owned(), reason);
            }
            None => {
                reasons.remove(container);
            }
        }
    }

    pub fn failed(&self) -> Option<WaitingReason> {
        self.failed.lock().clone()
    }

    pub fn fail(&self, reason: &str, message: String) {
        *self.failed.lock() = Some(WaitingReason {
            reason: reason.to_owned(),
            message,
        });
    }

    pub fn end_grace(&self) -> Option<i64> {
        *self.end_grace.borrow()
    }

    /// Gives the pod so long to end, or less if that was said before.
    pub fn limit_end_grace(&self, seconds: i64) {
        self.end_grace
            .send_modify(|grace| *grace = Some(grace.map_or(seconds, |grace| grace.min(seconds))));
    }

    pub fn set_torn_down(&self) {
        self.torn_down.send_replace(true);
    }

    pub fn is_torn_down(&self) -> bool {
        *self.torn_down.borrow()
    }

    /// Waits until nothing of the pod runs and nothing is mounted.
    pub async fn torn_down(&self) {
        let _ = self.torn_down.subscribe().wait_for(|done| *done).await;
    }

    /// Says in the status that the node ends the pod for another's sake.
    pub fn mark_disrupted(&self, condition: k8s_openapi::api::core::v1::PodCondition) {
        let mut status = self.status.lock();
        let mut marked = (**status).clone();
        let conditions = marked.conditions.get_or_insert_default();
        conditions.retain(|known| known.type_ != condition.type_);
        conditions.push(condition);
        *status = Arc::new(marked);
    }

    pub fn is_terminal(&self) -> bool {
        self.terminal.load(Ordering::SeqCst)
    }

    pub fn set_terminal(&self) {
        self.terminal.store(true, Ordering::SeqCst);
    }

    pub fn is_admitted(&self) -> bool {
        self.admitted.load(Ordering::SeqCst)
    }

    pub fn set_admitted(&self) {
        self.admitted.store(true, Ordering::SeqCst);
    }

    pub fn may_be_in_runtime(&self) -> bool {
        self.in_runtime.load(Ordering::SeqCst)
    }

    pub fn set_in_runtime(&self) {
        self.in_runtime.store(true, Ordering::SeqCst);
    }

    /// Runs `change` to its end, also when the pass that wants it is dropped: the runtime would go on with it anyway,
    /// unseen.
    pub async fn change<T: Send + 'static>(&self, change: impl Future<Output = T> + Send + 'static) -> T {
        let held = self.changes.clone().lock_owned().await;
        let task = tokio::spawn(async move {
            let result = change.await;
            drop(held);
            result
        });
        match task.await.map_err(tokio::task::JoinError::try_into_panic) {
            Ok(result) => result,
            Err(Ok(panic)) => std::panic::resume_unwind(panic),
            // The process ends.
            Err(Err(_)) => std::future::pending().await,
        }
    }

    /// Waits for a change whose pass was dropped.
    pub async fn changes_done(&self) {
        drop(self.changes.lock().await);
    }

    pub fn work(&self) -> Option<Arc<Work>> {
        self.work.read().clone()
    }

    /// The next status write is on behalf of this work. Stages of work whose write was overtaken go along.
    pub fn write_for(&self, work: Arc<Work>) {
        let mut current = self.work.write();
        if let Some(earlier) = current.take().filter(|earlier| !Arc::ptr_eq(earlier, &work)) {
            let unwritten = *self.written.borrow() < *self.dirty.borrow();
            for stage in if unwritten {
                earlier.take_stages()
            } else {
                Vec::new()
            } {
                work.push(&stage.name, stage.start_us, stage.dur_us);
            }
        }
        *current = Some(work);
    }
}
