//! Graceful node shutdown: systemd-logind holds up a shutdown of the machine while pods end, those of low priority
//! first. Meanwhile the node is not ready and takes no pods. Nothing here ends the machine or this process.

mod groups;
mod logind;
mod record;

pub use groups::{NodeShutdownConfig, ShutdownPeriod};

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use k8s_openapi::api::core::v1::PodCondition;
use k8s_openapi::jiff::Timestamp;

use crate::admission::Refusal;
use crate::kubelet::Kubelet;
use crate::node_status::node_reference;
use crate::pod_state::PodState;
use crate::pods;
use crate::status::{is_terminal, whole_seconds};
use crate::status_writer;
use logind::Logind;
pub(crate) use record::Record as ShutdownRecord;
use record::Record;

/// Why the node is not ready meanwhile.
pub const NOT_READY: &str = "node is shutting down";
/// The reason and the message of a pod that ended for it.
const REASON: &str = "Terminated";
const MESSAGE: &str = "Pod was terminated in response to imminent node shutdown.";
/// The reason of events, and of pods that are refused.
const NODE_SHUTDOWN: &str = "NodeShutdown";

const FIRST_RETRY: Duration = Duration::from_secs(1);
const LAST_RETRY: Duration = Duration::from_secs(60);

/// Whether a node takes a pod that may be about to shut down.
pub fn admit(is_shutting_down: bool) -> Result<(), Refusal> {
    if is_shutting_down {
        let why = "Pod was rejected as the node is shutting down.";
        return Err(Refusal::new(NODE_SHUTDOWN, why));
    }
    Ok(())
}

impl Kubelet {
    /// Follows logind, if the configuration asks for that.
    pub async fn run_node_shutdown(self: Arc<Self>) {
        self.metrics
            .graceful_shutdown(Record::load(&self.config.data_dir).as_ref());
        if self.config.node_shutdown.periods.is_empty() {
            return;
        }
        // Outlives a connection: logind knows the lock by its descriptor.
        let mut lock: Option<OwnedFd> = None;
        let mut retry = FIRST_RETRY;
        let mut complaint = String::new();
        loop {
            let began = Instant::now();
            let followed = tokio::select! {
                () = self.shutdown.cancelled() => return,
                followed = self.follow_logind(&mut lock) => followed,
            };
            if let Err(error) = followed {
                let error = error.to_string();
                // A machine without logind has none for good; that is said once.
                if error != complaint {
                    tracing::warn!(
                        error,
                        "cannot follow shutdowns of the machine: pods would be cut off"
                    );
                    complaint = error;
                }
            }
            if began.elapsed() > LAST_RETRY {
                retry = FIRST_RETRY;
                complaint.clear();
            }
            tokio::select! {
                () = self.shutdown.cancelled() => return,
                () = tokio::time::sleep(retry) => {}
            }
            retry = (retry * 2).min(LAST_RETRY);
        }
    }

    /// Takes a lock and waits for shutdowns, until the connection ends.
    async fn follow_logind(self: &Arc<Self>, lock: &mut Option<OwnedFd>) -> Result<(), logind::Error> {
        let config = &self.config.node_shutdown;
        let mut logind = Logind::connect(&config.system_bus).await?;
        // A shutdown that begins while the lock is taken must not be missed, nor one that began before this connection.
        logind.subscribe().await?;
        let is_preparing = logind.is_preparing().await?;
        if !is_preparing {
            logind
                .allow_delay(config.total(), &config.logind_conf_dir)
                .await?;
            *lock = Some(logind.inhibit().await?);
            tracing::info!(
                seconds = config.total().as_secs(),
                "a shutdown of the machine waits for pods to end"
            );
        }
        let mut missed = Some(is_preparing);
        loop {
            let begins = match missed.take() {
                Some(state) => state,
                None => logind.next().await?,
            };
            if begins == *self.node_shutdown.borrow() {
                continue;
            }
            let message = match begins {
                true => "Shutdown manager detected shutdown event",
                false => "Shutdown manager detected shutdown cancellation",
            };
            tracing::info!("{message}");
            let node = node_reference(&self.config.node_name);
            self.recorder
                .event(&node, "Normal", NODE_SHUTDOWN, message.to_owned());
            self.node_shutdown.send_replace(begins);
            if begins {
                self.end_pods_by_priority().await;
                // The machine goes on with its shutdown.
                *lock = None;
            } else {
                *lock = Some(logind.inhibit().await?);
            }
        }
    }

    async fn end_pods_by_priority(self: &Arc<Self>) {
        let mut record = Record {
            start_time: Timestamp::now(),
            end_time: record::zero(),
        };
        self.note_shutdown(&record);
        // A pod that is being admitted is admitted now or refused.
        drop(self.admission.lock());
        let periods = &self.config.node_shutdown.periods;
        let mut groups: Vec<Vec<Arc<PodState>>> = vec![Vec::new(); periods.len()];
        for state in self.states() {
            if !state.is_terminal() {
                groups[groups::group(periods, &state.pod())].push(state);
            }
        }
        for (period, group) in periods.iter().zip(groups) {
            if group.is_empty() {
                continue;
            }
            for state in &group {
                self.end_for_shutdown(state, groups::grace(period, &state.pod()));
            }
            let ended = async {
                for state in &group {
                    state.torn_down().await;
                    status_writer::flush(state).await;
                }
            };
            // Drivers of volumes are in a later group: volumes are unmounted before their turn comes.
            if tokio::time::timeout(period.time(), ended).await.is_err() {
                tracing::warn!(
                    priority = period.priority,
                    seconds = period.shutdown_grace_period_seconds,
                    "pods did not end in the time that their priority has"
                );
            }
        }
        record.end_time = Timestamp::now();
        self.note_shutdown(&record);
    }

    fn end_for_shutdown(&self, state: &PodState, grace: i64) {
        let pod = state.pod();
        state.limit_end_grace(grace);
        if state.failed().is_some() || is_terminal(pod.status.as_ref()) {
            // It ends for another reason already.
            return;
        }
        tracing::info!(pod = %pods::full_name(&pod), grace, "the pod ends before the machine shuts down");
        state.mark_disrupted(PodCondition {
            type_: "DisruptionTarget".to_owned(),
            status: "True".to_owned(),
            reason: Some("TerminationByKubelet".to_owned()),
            message: Some(MESSAGE.to_owned()),
            last_transition_time: Some(whole_seconds(Timestamp::now())),
            observed_generation: pod.metadata.generation,
            last_probe_time: None,
        });
        state.fail(REASON, MESSAGE.to_owned());
        state.terminate.cancel();
        state.wake.notify_one();
    }

    fn note_shutdown(&self, record: &Record) {
        if let Err(error) = record.save(&self.config.data_dir) {
            tracing::warn!(%error, "cannot write down the shutdown");
        }
        self.metrics.graceful_shutdown(Some(record));
    }
}
