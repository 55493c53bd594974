//! One probe of one container: when to try, and when enough tries agree.

use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use k8s_openapi::api::core::v1::{Container, Probe};
use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;

use super::http::{HttpTarget, container_port, dial};
use super::{Outcome, ProbeKind, grpc, http};
use crate::durations::go_duration;
use crate::expansion::expand;
use crate::images::describe;
use crate::kubelet::Kubelet;
use crate::observed::{ContainerState, ObservedContainer};
use crate::pod_state::PodState;
use crate::pods;

/// A probe that could not be made at all is tried this often before the worker waits for the next period.
const TRIES: usize = 3;
/// So long after its start a container is forgiven that it does not listen yet.
const LISTEN_PATIENCE: Duration = Duration::from_secs(1);
const MAX_OUTPUT: usize = 10 * 1024;

pub struct ProbeWorker {
    kubelet: Arc<Kubelet>,
    state: Arc<PodState>,
    container: Container,
    kind: ProbeKind,
    probe: Probe,
    /// The container this worker has last seen, and how its tries went.
    seen: Option<String>,
    next: Instant,
    /// When that container was probed for the first time, in microseconds since the Unix epoch.
    first_try_us: Option<i64>,
    streak: Streak,
    on_hold: bool,
}

/// How often in a row the same result came.
#[derive(Default, Debug, PartialEq, Eq)]
struct Streak {
    last: Option<bool>,
    count: i32,
}

impl Streak {
    /// Returns whether the result has come often enough to count.
    fn add(&mut self, result: bool, success_threshold: i32, failure_threshold: i32) -> bool {
        if self.last == Some(result) {
            self.count += 1;
        } else {
            self.last = Some(result);
            self.count = 1;
        }
        self.count
            >= if result {
                success_threshold
            } else {
                failure_threshold
            }
    }
}

/// What the worker does next.
enum Step {
    /// Wait until something about the pod changes.
    Wait,
    WaitUntil(Instant),
    Probe(Box<ObservedContainer>),
    Stop,
}

fn positive(value: Option<i32>, default: i32) -> i32 {
    value.filter(|v| *v > 0).unwrap_or(default)
}

fn seconds(value: Option<i32>, default: i32) -> Duration {
    Duration::from_secs(u64::try_from(positive(value, default)).unwrap_or(1))
}

fn age(started_at_nanos: i64) -> Duration {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let started = Duration::from_nanos(u64::try_from(started_at_nanos).unwrap_or(0));
    now.saturating_sub(started)
}

impl ProbeWorker {
    pub fn new(
        kubelet: Arc<Kubelet>,
        state: Arc<PodState>,
        container: Container,
        kind: ProbeKind,
        probe: Probe,
    ) -> Self {
        ProbeWorker {
            kubelet,
            state,
            container,
            kind,
            probe,
            seen: None,
            next: Instant::now(),
            first_try_us: None,
            streak: Streak::default(),
            on_hold: false,
        }
    }

    pub async fn run(mut self, wake: Arc<Notify>, stop: CancellationToken) {
        loop {
            let step = self.step();
            let work = async {
                match step {
                    Step::Wait => wake.notified().await,
                    Step::WaitUntil(at) => {
                        let _ = tokio::time::timeout_at(at.into(), wake.notified()).await;
                    }
                    Step::Probe(observed) => self.attempt(&observed).await,
                    Step::Stop => stop.cancel(),
                }
            };
            tokio::select! {
                () = stop.cancelled() => break,
                () = work => {}
            }
        }
        if let Some(id) = &self.seen {
            self.kubelet.probes.clear(self.kind, id);
        }
        let pod = self.state.pod();
        self.kubelet
            .metrics
            .forget_probe(&pod, &self.container.name, self.kind);
    }

    fn step(&mut self) -> Step {
        let observed = self.state.observed();
        let Some(current) = observed.container(&self.container.name) else {
            return Step::Wait;
        };
        if self.seen.as_deref() != Some(&current.id) {
            self.meet(current);
        }
        if self.on_hold {
            return Step::Wait;
        }
        if current.state != ContainerState::Running {
            if current.state == ContainerState::Exited {
                self.kubelet.probes.set(self.kind, &current.id, false);
            }
            return Step::Wait;
        }
        let deleted = self.state.pod().metadata.deletion_timestamp.is_some();
        if deleted && self.kind != ProbeKind::Readiness {
            // A quiet end: nothing is restarted any more.
            self.kubelet.probes.set(self.kind, &current.id, true);
            return Step::Stop;
        }
        let started = self.kubelet.probes.result(ProbeKind::Startup, &current.id) == Some(true);
        let waits = match self.kind {
            ProbeKind::Startup => started,
            // The others begin when the container has come up.
            _ => self.container.startup_probe.is_some() && !started,
        };
        if waits {
            return Step::Wait;
        }
        let now = Instant::now();
        let delay =
            Duration::from_secs(u64::try_from(self.probe.initial_delay_seconds.unwrap_or(0)).unwrap_or(0));
        if let Some(remaining) = delay
            .checked_sub(age(current.started_at))
            .filter(|d| !d.is_zero())
        {
            return Step::WaitUntil(now + remaining);
        }
        if now < self.next {
            return Step::WaitUntil(self.next);
        }
        Step::Probe(Box::new(current.clone()))
    }

    /// A container this worker has not seen before.
    fn meet(&mut self, container: &ObservedContainer) {
        let probes = &self.kubelet.probes;
        if let Some(old) = self.seen.replace(container.id.clone()) {
            probes.clear(self.kind, &old);
        }
        self.streak = Streak::default();
        self.on_hold = false;
        self.first_try_us = None;
        self.next = Instant::now();
        if age(container.started_at) > self.kubelet.started.elapsed() && container.started_at > 0 {
            // It ran before this kubelet did. What was said of it stands until its probe says otherwise, and
            // the probes of all such containers must not fire at once.
            let spread = seconds(self.probe.period_seconds, 10).mul_f64(rand::random::<f64>());
            self.next += spread;
            let was_started = self
                .state
                .status()
                .container_statuses
                .iter()
                .flatten()
                .any(|s| s.name == container.name && s.started == Some(true));
            if self.kind == ProbeKind::Startup && was_started {
                probes.set(self.kind, &container.id, true);
            }
            return;
        }
        match self.kind {
            ProbeKind::Readiness => {
                probes.set(self.kind, &container.id, false);
            }
            ProbeKind::Liveness => {
                probes.set(self.kind, &container.id, true);
            }
            ProbeKind::Startup => {}
        }
    }

    async fn attempt(&mut self, observed: &ObservedContainer) {
        let started_at = Instant::now();
        let mark = skiff_trace::now_us();
        self.first_try_us.get_or_insert(mark);
        self.next = started_at + seconds(self.probe.period_seconds, 10);
        let mut outcome = Outcome::Error(String::new());
        for _ in 0..TRIES {
            outcome = self.probe_once(observed).await;
            if !matches!(outcome, Outcome::Error(_)) {
                break;
            }
        }
        let pod = self.state.pod();
        let name = self.kind.as_str();
        let told = match &outcome {
            Outcome::Success | Outcome::Warning(_) => "successful",
            Outcome::Failure(_) => "failed",
            Outcome::Error(_) => "unknown",
        };
        self.kubelet
            .metrics
            .probed(&pod, &self.container.name, self.kind, told);
        let event = |type_: &str, reason: &str, message: String| {
            self.kubelet.recorder.event(
                &pods::container_reference(&pod, &self.container.name),
                type_,
                reason,
                message,
            );
        };
        let result = match outcome {
            Outcome::Success => true,
            Outcome::Warning(output) => {
                event(
                    "Warning",
                    "ProbeWarning",
                    format!("{name} probe warning: {output}"),
                );
                true
            }
            Outcome::Failure(output) => {
                event("Warning", "Unhealthy", format!("{name} probe failed: {output}"));
                false
            }
            Outcome::Error(error) => {
                event(
                    "Warning",
                    "Unhealthy",
                    format!("{name} probe errored and resulted in unknown state: {error}"),
                );
                return;
            }
        };
        let enough = self.streak.add(
            result,
            positive(self.probe.success_threshold, 1),
            positive(self.probe.failure_threshold, 3),
        );
        if !enough {
            return;
        }
        // The container may have been replaced while the probe ran.
        if self
            .state
            .observed()
            .container(&self.container.name)
            .is_none_or(|c| c.id != observed.id)
        {
            return;
        }
        let news = self.kubelet.probes.set(self.kind, &observed.id, result);
        if self.kind == ProbeKind::Startup || (self.kind == ProbeKind::Liveness && !result) {
            // Nothing more to learn until there is a new container.
            self.on_hold = true;
            self.streak = Streak::default();
        }
        if news {
            let waits = self.waits(observed, mark);
            self.kubelet.probe_result_changed(&self.state, self.kind, &waits);
        }
    }

    /// What the time between the start of the container and this result was spent on.
    fn waits(&self, observed: &ObservedContainer, last_try_us: i64) -> Vec<(String, i64)> {
        let name = self.kind.as_str().to_lowercase();
        let mut waits = Vec::new();
        let delay = self.probe.initial_delay_seconds.unwrap_or(0);
        if delay > 0 {
            let waiting = format!("waiting for {name} (initialDelaySeconds {delay})");
            waits.push((waiting, observed.started_at / 1000));
        }
        if let Some(first_try_us) = self.first_try_us.filter(|first| *first < last_try_us) {
            let period = positive(self.probe.period_seconds, 10);
            let waiting = format!("waiting for {name} (failed tries, periodSeconds {period})");
            waits.push((waiting, first_try_us));
        }
        waits.push((name, last_try_us));
        waits
    }

    async fn probe_once(&self, observed: &ObservedContainer) -> Outcome {
        let probe = &self.probe;
        let timeout = seconds(probe.timeout_seconds, 1);
        let young = age(observed.started_at) < LISTEN_PATIENCE && self.kind != ProbeKind::Liveness;
        let patience = young.then(|| Instant::now() + LISTEN_PATIENCE);
        let status = self.state.status();
        let pod_ip = status.pod_ip.as_deref().unwrap_or_default();
        if let Some(exec) = &probe.exec {
            let env = self.container.env.as_deref().unwrap_or_default();
            // Only what is written in the spec: the container's real environment is not known here.
            let lookup = |name: &str| {
                env.iter()
                    .rev()
                    .find(|v| v.name == name)
                    .and_then(|v| v.value.clone())
            };
            let command: Vec<String> = exec
                .command
                .iter()
                .flatten()
                .map(|word| expand(word, &lookup))
                .collect();
            return self.exec(observed, command, timeout).await;
        }
        if let Some(action) = &probe.http_get {
            return match HttpTarget::new(action, &self.container, pod_ip, "kube-probe") {
                Ok(target) => http::probe(&target, timeout, patience).await,
                Err(error) => Outcome::Error(error),
            };
        }
        if let Some(action) = &probe.tcp_socket {
            let host = action.host.as_deref().filter(|h| !h.is_empty()).unwrap_or(pod_ip);
            return match container_port(&action.port, &self.container) {
                Ok(port) => match dial(host, port, Instant::now() + timeout, patience).await {
                    Ok(_) => Outcome::Success,
                    Err(error) => Outcome::Failure(error),
                },
                Err(error) => Outcome::Error(error),
            };
        }
        if let Some(action) = &probe.grpc {
            let port = u16::try_from(action.port).unwrap_or(0);
            return grpc::probe(
                pod_ip,
                port,
                action.service.as_deref().unwrap_or_default(),
                timeout,
                patience,
            )
            .await;
        }
        Outcome::Error(format!(
            "missing probe handler for {}:{}",
            pods::full_name(&self.state.pod()),
            self.container.name
        ))
    }

    async fn exec(&self, observed: &ObservedContainer, command: Vec<String>, timeout: Duration) -> Outcome {
        let shown = command.join(" ");
        let limit = i64::try_from(timeout.as_secs()).unwrap_or(1).max(1);
        match self.kubelet.runtime.exec_sync(&observed.id, command, limit).await {
            Ok(response) if response.exit_code == 0 => Outcome::Success,
            Ok(response) => {
                let mut output = response.stdout;
                output.extend(response.stderr);
                output.truncate(MAX_OUTPUT);
                Outcome::Failure(String::from_utf8_lossy(&output).into_owned())
            }
            Err(status) if status.code() == skiff_cri::Code::DeadlineExceeded => Outcome::Failure(format!(
                "command timed out: {shown:?} timed out after {}",
                go_duration(timeout)
            )),
            Err(status) => Outcome::Error(describe(&status)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn thresholds() {
        let mut streak = Streak::default();
        assert!(!streak.add(false, 1, 3));
        assert!(!streak.add(false, 1, 3));
        assert!(streak.add(false, 1, 3));
        assert!(streak.add(true, 1, 3));
        assert!(!streak.add(false, 1, 3));
        let mut streak = Streak::default();
        assert!(!streak.add(true, 2, 3));
        assert!(streak.add(true, 2, 3));
    }

    #[test]
    fn defaults() {
        assert_eq!(seconds(None, 10), Duration::from_secs(10));
        assert_eq!(seconds(Some(0), 1), Duration::from_secs(1));
        assert_eq!(positive(Some(5), 3), 5);
    }
}
