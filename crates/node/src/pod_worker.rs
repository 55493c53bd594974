//! The pod worker: one task per pod. It syncs the pod while it should run, terminates it when it should not,
//! cleans up, and then lets the API server delete the object.

use std::sync::Arc;
use std::time::{Duration, Instant};

use futures::FutureExt;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::jiff::Timestamp;
use kube::Api;
use kube::api::{DeleteParams, Preconditions};
use skiff_client::ErrorExt;

use crate::container_gc::{self, Candidate, ContainerGcPolicy};
use crate::kubelet::Kubelet;
use crate::marks;
use crate::pod_state::PodState;
use crate::pods;
use crate::runtime::pod_log_dir;
use crate::status::{REJECTED, is_terminal};
use crate::status_writer;
use crate::sync::Pass;

/// How often a pod is synced without a change: its volumes follow their sources at this interval.
const RESYNC: Duration = Duration::from_secs(60);
const FIRST_RETRY: Duration = Duration::from_millis(500);
const LAST_RETRY: Duration = Duration::from_secs(10);

/// Where the worker is in the life of its pod.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Stage {
    Living,
    Ending,
    /// Nothing runs any more and nothing is mounted; the object may still be there.
    Ended,
}

impl Stage {
    /// As the kubelet's metrics call it.
    fn as_str(self) -> &'static str {
        match self {
            Stage::Living => "sync",
            Stage::Ending => "terminating",
            Stage::Ended => "terminated",
        }
    }
}

enum Next {
    Wait(Duration),
    /// As `Wait`, after a failure: the status that tells of it does not cut the pause short.
    BackOff(Duration),
    Again,
    Done,
}

pub struct PodWorker {
    kubelet: Arc<Kubelet>,
    state: Arc<PodState>,
    stage: Stage,
    retry: Duration,
}

impl PodWorker {
    pub fn new(kubelet: Arc<Kubelet>, state: Arc<PodState>) -> Self {
        PodWorker {
            kubelet,
            state,
            stage: Stage::Living,
            retry: FIRST_RETRY,
        }
    }

    pub async fn run(mut self) {
        let writer_stop = self.kubelet.shutdown.child_token();
        let (kubelet, state, stop) = (self.kubelet.clone(), self.state.clone(), writer_stop.clone());
        let writer = tokio::spawn(skiff_supervise::finished("pod-status", move || {
            status_writer::run(kubelet.clone(), state.clone(), stop.clone())
        }));
        loop {
            let work = marks::work_of(&self.state.pod());
            let (began, stage) = (Instant::now(), self.stage);
            let shutdown = self.kubelet.shutdown.clone();
            // Boxed: these futures are large, and each layer around them would hold another copy on the stack.
            let pass = std::panic::AssertUnwindSafe(marks::scope(work, Box::pin(self.pass()))).catch_unwind();
            let next = tokio::select! {
                // The pod stays as it is; the next sync goes on from there.
                () = shutdown.cancelled() => break,
                next = pass => next.unwrap_or_else(|_| {
                    tracing::error!(uid = self.state.uid, "syncing the pod panicked");
                    Next::Wait(LAST_RETRY)
                }),
            };
            self.kubelet.metrics.pod_pass(stage.as_str(), began.elapsed());
            match next {
                Next::Again => {}
                Next::Done => break,
                Next::Wait(pause) => {
                    tokio::select! {
                        () = shutdown.cancelled() => break,
                        () = self.state.wake.notified() => {}
                        () = self.state.status_seen.notified() => {}
                        () = tokio::time::sleep(pause) => {}
                    }
                }
                Next::BackOff(pause) => {
                    tokio::select! {
                        () = shutdown.cancelled() => break,
                        () = self.state.wake.notified() => {}
                        () = tokio::time::sleep(pause) => {}
                    }
                }
            }
        }
        writer_stop.cancel();
        let _ = writer.await;
    }

    async fn pass(&mut self) -> Next {
        if self.stage == Stage::Living && self.shall_end() {
            self.stage = Stage::Ending;
        }
        match self.stage {
            Stage::Living => self.live().await,
            Stage::Ending => self.end().await,
            Stage::Ended => self.confirm().await,
        }
    }

    fn shall_end(&self) -> bool {
        let pod = self.state.pod();
        self.state.is_deleted() || self.state.failed().is_some() || is_terminal(pod.status.as_ref())
    }

    async fn live(&mut self) -> Next {
        let pod = self.state.pod();
        let deadline = deadline_in(&pod, &self.state);
        if deadline == Some(Duration::ZERO) {
            let message = "Pod was active on the node longer than the specified deadline".to_owned();
            self.kubelet.recorder.event(
                &pods::reference(&pod),
                "Normal",
                "DeadlineExceeded",
                message.clone(),
            );
            self.state.fail("DeadlineExceeded", message);
            return Next::Again;
        }
        if !self.state.is_admitted() {
            // A pod with running containers was admitted before this kubelet restarted.
            let admitted = match self.state.may_be_in_runtime() {
                true => self.kubelet.admit_again(&self.state).await,
                false => self.kubelet.admit(&self.state).await,
            };
            if let Err(refusal) = admitted {
                self.kubelet.recorder.event(
                    &pods::reference(&pod),
                    "Warning",
                    &refusal.reason,
                    refusal.message.clone(),
                );
                self.state
                    .fail(&refusal.reason, format!("{REJECTED}{}", refusal.message));
                return Next::Again;
            }
            self.kubelet.record_allocation(&self.state);
            self.state.set_admitted();
        }
        let terminate = self.state.terminate.clone();
        let pass = tokio::select! {
            () = terminate.cancelled() => return Next::Again,
            pass = Box::pin(self.kubelet.sync_pod(&self.state)) => pass,
        };
        let until_deadline = |pause: Duration| deadline.map_or(pause, |deadline| pause.min(deadline));
        match pass {
            Pass::Finished => {
                self.stage = Stage::Ending;
                Next::Again
            }
            Pass::Settled => {
                self.retry = FIRST_RETRY;
                self.kubelet.prune_containers(&self.state).await;
                // Not all pods of a node in the same second.
                Next::Wait(until_deadline(RESYNC.mul_f64(0.9 + 0.2 * rand::random::<f64>())))
            }
            Pass::Retry(after) => {
                self.kubelet.prune_containers(&self.state).await;
                Next::BackOff(until_deadline(after))
            }
            Pass::Failed => Next::BackOff(until_deadline(self.retry())),
        }
    }

    async fn end(&mut self) -> Next {
        let kubelet = &self.kubelet;
        let state = &self.state;
        kubelet.probes.stop_liveness_and_startup(&state.uid);
        // A cancelled sync may still be creating something.
        state.changes_done().await;
        if kubelet.observe(state).await.is_err() {
            return Next::Wait(self.retry());
        }
        // Not ready before the first signal: no new traffic for a pod that terminates.
        kubelet.refresh_status(state);
        let pod = state.pod();
        let observed = state.observed();
        // Also sandboxes that are not ready: their tear-down may have been cut off, and stopping twice is fine.
        if observed.is_anything_running() || !observed.sandboxes.is_empty() {
            let grace = pods::grace_period(&pod);
            let limit = state.end_grace();
            let grace_override = match limit {
                // Who deletes the pod may give it less.
                Some(limit) if state.is_deleted() => Some(limit.min(grace)),
                Some(limit) => Some(limit),
                None => state.is_gone().then_some(grace),
            };
            let killed = tokio::select! {
                killed = Box::pin(kubelet.kill_pod(&pod, &observed, grace_override)) => killed,
                () = state.grace_shortened(grace, limit) => return Next::Again,
            };
            if let Err(error) = killed {
                let message = format!("error killing pod: {error}");
                kubelet
                    .recorder
                    .event(&pods::reference(&pod), "Warning", "FailedKillPod", message);
                return Next::Wait(self.retry());
            }
            match kubelet.observe(state).await {
                Ok(()) if !state.observed().is_anything_running() => {}
                _ => return Next::Wait(self.retry()),
            }
        }
        kubelet.probes.remove_pod(&state.uid);
        // Whoever sees that the pod has ended finds what it had.
        kubelet.device_plugins.release(&state.uid);
        kubelet.managers.release(&state.uid);
        state.set_terminal();
        kubelet.refresh_status(state);
        kubelet.retry_waiting_resizes();
        if let Err(error) = kubelet.dra.unprepare(&state.uid).await {
            tracing::warn!(pod = %pods::full_name(&pod), error, "cannot give back the devices of the pod");
            return Next::Wait(self.retry());
        }
        if let Err(error) = kubelet.volumes.tear_down(&state.uid).await {
            tracing::warn!(pod = %pods::full_name(&pod), %error, "cannot unmount the volumes of the pod");
            return Next::Wait(self.retry());
        }
        let began = Instant::now();
        if let Err(error) = kubelet.cgroups.remove_pod(&state.uid) {
            // Processes that were just killed may linger for a moment.
            tracing::debug!(pod = %pods::full_name(&pod), %error, "the cgroup of a pod is still in use");
            return Next::Wait(Duration::from_millis(20).max(self.retry() / 25));
        }
        kubelet.metrics.actions.cgroup_changed("destroy", began.elapsed());
        self.retry = FIRST_RETRY;
        self.stage = Stage::Ended;
        self.state.set_torn_down();
        Next::Again
    }

    /// The object is deleted only when no process, mount or network of the pod is left.
    async fn confirm(&mut self) -> Next {
        let state = &self.state;
        if !state.is_deleted() {
            self.kubelet.refresh_status(state);
            // Its logs stay readable until it is deleted.
            return Next::Wait(RESYNC * 60);
        }
        let pod = state.pod();
        if !state.is_gone() {
            status_writer::flush(state).await;
            let api: Api<Pod> = Api::namespaced(self.kubelet.client.clone(), pods::namespace(&pod));
            let parameters = DeleteParams {
                grace_period_seconds: Some(0),
                preconditions: Some(Preconditions {
                    uid: pod.metadata.uid.clone(),
                    resource_version: None,
                }),
                ..Default::default()
            };
            match api.delete(pods::name(&pod), &parameters).await {
                Ok(_) => {}
                Err(error) if error.is_not_found() || error.is_conflict() => {}
                Err(error) => {
                    tracing::warn!(pod = %pods::full_name(&pod), %error, "cannot confirm the end of a pod; trying again");
                    return Next::Wait(self.retry());
                }
            }
        }
        if let Err(error) = self
            .kubelet
            .remove_traces(&state.uid, pods::namespace(&pod), pods::name(&pod))
            .await
        {
            tracing::warn!(pod = %pods::full_name(&pod), error, "cannot remove what is left of a pod");
            return Next::Wait(self.retry());
        }
        self.kubelet.forget_pod(&state.uid);
        Next::Done
    }

    fn retry(&mut self) -> Duration {
        let pause = self.retry;
        self.retry = (self.retry * 2).min(LAST_RETRY);
        pause
    }
}

/// How long the pod may still run by its active deadline.
fn deadline_in(pod: &Pod, state: &PodState) -> Option<Duration> {
    let allowed = pod.spec.as_ref()?.active_deadline_seconds?;
    let started = state.status().start_time.clone()?;
    let left = started.0.as_second() + allowed - Timestamp::now().as_second();
    Some(Duration::from_secs(u64::try_from(left).unwrap_or(0)))
}

impl Kubelet {
    /// Removes containers, sandboxes, logs and directories of a pod that has ended.
    pub async fn remove_traces(&self, uid: &str, namespace: &str, name: &str) -> Result<(), String> {
        let describe = |status: skiff_cri::Status| crate::images::describe(&status);
        let observed = self.runtime.observe(uid).await.map_err(describe)?;
        for sandbox in &observed.sandboxes {
            self.runtime.stop_sandbox(&sandbox.id).await.map_err(describe)?;
        }
        for container in &observed.containers {
            self.runtime
                .remove_container(&container.id)
                .await
                .map_err(describe)?;
        }
        for sandbox in &observed.sandboxes {
            self.runtime.remove_sandbox(&sandbox.id).await.map_err(describe)?;
        }
        self.volumes.tear_down(uid).await.map_err(|e| e.to_string())?;
        self.volumes
            .remove_pod_dir(uid)
            .await
            .map_err(|e| e.to_string())?;
        self.user_namespaces.release(uid);
        if !name.is_empty() {
            let logs = pod_log_dir(&self.config.log_dir, namespace, name, uid);
            skiff_fs::remove_tree(&logs).map_err(|e| e.to_string())?;
        }
        self.cgroups.remove_pod(uid).map_err(|e| e.to_string())
    }

    /// Removes old instances of the pod's containers that nobody needs.
    pub async fn prune_containers(&self, state: &PodState) {
        let observed = state.observed();
        let candidate = Candidate {
            observed: observed.clone(),
            is_ended: false,
        };
        // How many the whole node may have is looked at by the clock.
        let policy = ContainerGcPolicy {
            max_containers: -1,
            ..self.config.container_gc
        };
        let chosen = container_gc::choose(&policy, &[candidate], false, Timestamp::now());
        for container in observed.containers.iter().filter(|one| chosen.contains(&one.id)) {
            self.remove_dead_container(&container.id, &container.log_path)
                .await;
        }
        // An old sandbox takes its containers along, so it stays while one of them is still of use.
        let in_use = |id: &str| observed.containers.iter().any(|c| c.sandbox_id == id);
        for sandbox in observed
            .sandboxes
            .iter()
            .skip(1)
            .filter(|s| !s.ready && !in_use(&s.id))
        {
            if let Err(status) = self.runtime.remove_sandbox(&sandbox.id).await {
                tracing::debug!(
                    error = crate::images::describe(&status),
                    "cannot remove an old sandbox"
                );
            }
        }
    }
}
