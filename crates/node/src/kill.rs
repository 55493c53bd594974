//! Ending containers: preStop hook, signal, grace, and the order in which sidecars follow the others.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use futures::future::join_all;
use k8s_openapi::api::core::v1::{Container, Pod};
use tokio::sync::watch;

use crate::hooks;
use crate::kubelet::Kubelet;
use crate::observed::{ContainerState, ObservedPod};
use crate::plan::KillReason;
use crate::pods;
use crate::resources::is_sidecar;

/// Even a container that is given no time gets this much, so that a clean exit is not cut off needlessly.
const MINIMUM_GRACE: i64 = 2;

/// One container to end.
pub struct Target<'a> {
    pub id: &'a str,
    pub name: &'a str,
    /// Empty: the usual words.
    pub message: &'a str,
    pub reason: KillReason,
}

fn grace_for(pod: &Pod, container: Option<&Container>, reason: KillReason) -> i64 {
    if let Some(grace) = pod.metadata.deletion_grace_period_seconds {
        return grace;
    }
    let probe = match reason {
        KillReason::StartupProbe => container.and_then(|c| c.startup_probe.as_ref()),
        KillReason::LivenessProbe => container.and_then(|c| c.liveness_probe.as_ref()),
        KillReason::Other => None,
    };
    probe
        .and_then(|p| p.termination_grace_period_seconds)
        .unwrap_or_else(|| pods::grace_period(pod))
}

impl Kubelet {
    /// Ends one container. `turn` is waited for after the hook, while there is time.
    pub async fn kill_container(
        &self,
        pod: &Pod,
        pod_ip: &str,
        target: &Target<'_>,
        grace_override: Option<i64>,
        turn: impl Future<Output = ()>,
    ) -> Result<(), String> {
        let container = pods::container(pod, target.name);
        let reference = pods::container_reference(pod, target.name);
        let message = if target.message.is_empty() {
            format!("Stopping container {}", target.name)
        } else {
            target.message.to_owned()
        };
        self.recorder.event(&reference, "Normal", "Killing", message);
        let mut grace = grace_override.unwrap_or_else(|| grace_for(pod, container.as_ref(), target.reason));
        let begun = Instant::now();
        let hook = container
            .as_ref()
            .and_then(|c| c.lifecycle.as_ref())
            .and_then(|l| l.pre_stop.as_ref());
        if let (Some(hook), Some(container)) = (hook, container.as_ref())
            && grace > 0
        {
            let run = hooks::run(&self.runtime, pod, container, target.id, pod_ip, hook);
            match tokio::time::timeout(whole(grace), run).await {
                Ok(Ok(())) => {}
                // What a hook says may be a secret, so the event does not repeat it.
                Ok(Err(error)) => {
                    tracing::warn!(pod = %pods::full_name(pod), container = target.name, error, "preStop hook failed");
                    self.recorder.event(
                        &reference,
                        "Warning",
                        "FailedPreStopHook",
                        "PreStopHook failed".to_owned(),
                    );
                }
                Err(_) => {
                    tracing::warn!(pod = %pods::full_name(pod), container = target.name, "preStop hook did not end in time")
                }
            }
        }
        let left = whole(grace).saturating_sub(begun.elapsed());
        let _ = tokio::time::timeout(left, turn).await;
        grace -= i64::try_from(begun.elapsed().as_secs()).unwrap_or(grace);
        self.runtime
            .stop_container(target.id, grace.max(MINIMUM_GRACE))
            .await
            .map_err(|status| {
                format!(
                    "cannot stop container {}: {}",
                    target.name,
                    crate::images::describe(&status)
                )
            })
    }

    /// Ends everything that runs of a pod, then its sandboxes. Returns when all of it has ended.
    pub async fn kill_pod(
        &self,
        pod: &Pod,
        observed: &ObservedPod,
        grace_override: Option<i64>,
    ) -> Result<(), String> {
        let pod_ip = observed.ips().first().cloned().unwrap_or_default();
        let ended: HashMap<&str, watch::Sender<bool>> = observed
            .containers
            .iter()
            .filter(|c| may_run(c.state))
            .map(|c| (c.name.as_str(), watch::Sender::new(false)))
            .collect();
        let running = observed.containers.iter().filter(|c| may_run(c.state));
        let kills = running.map(|container| {
            let (ended, pod_ip) = (&ended, &pod_ip);
            async move {
                let before: Vec<watch::Receiver<bool>> = ends_before(pod, &container.name)
                    .iter()
                    .filter_map(|name| ended.get(name.as_str()))
                    .map(watch::Sender::subscribe)
                    .collect();
                let turn = async {
                    for mut other in before {
                        let _ = other.wait_for(|ended| *ended).await;
                    }
                };
                let target = Target {
                    id: &container.id,
                    name: &container.name,
                    message: "",
                    reason: KillReason::Other,
                };
                let result = self
                    .kill_container(pod, pod_ip, &target, grace_override, turn)
                    .await;
                if let Some(ended) = ended.get(container.name.as_str()) {
                    ended.send_replace(true);
                }
                result
            }
        });
        let mut errors: Vec<String> = join_all(kills)
            .await
            .into_iter()
            .filter_map(Result::err)
            .collect();
        for sandbox in &observed.sandboxes {
            if let Err(status) = self.runtime.stop_sandbox(&sandbox.id).await {
                errors.push(format!(
                    "cannot stop the sandbox: {}",
                    crate::images::describe(&status)
                ));
            }
        }
        if errors.is_empty() {
            Ok(())
        } else {
            Err(errors.join("; "))
        }
    }
}

fn may_run(state: ContainerState) -> bool {
    matches!(state, ContainerState::Running | ContainerState::Unknown)
}

fn whole(seconds: i64) -> Duration {
    Duration::from_secs(u64::try_from(seconds).unwrap_or(0))
}

/// The containers that must have ended before this one is signalled: a sidecar outlives the containers it
/// serves, and sidecars end in the reverse of the order they started in.
fn ends_before(pod: &Pod, name: &str) -> Vec<String> {
    let Some(spec) = &pod.spec else { return Vec::new() };
    let init = spec.init_containers.as_deref().unwrap_or_default();
    match init.iter().position(|c| c.name == name && is_sidecar(c)) {
        Some(index) => {
            let later = init[index + 1..].iter().filter(|c| is_sidecar(c));
            spec.containers
                .iter()
                .chain(later)
                .map(|c| c.name.clone())
                .collect()
        }
        None => Vec::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn sidecars_end_last_and_in_reverse() {
        let pod: Pod = serde_json::from_value(json!({"spec": {
            "initContainers": [{"name": "s1", "restartPolicy": "Always"}, {"name": "i"}, {"name": "s2", "restartPolicy": "Always"}],
            "containers": [{"name": "a"}, {"name": "b"}]}})).unwrap();
        assert!(ends_before(&pod, "a").is_empty());
        assert_eq!(ends_before(&pod, "s2"), ["a", "b"]);
        assert_eq!(ends_before(&pod, "s1"), ["a", "b", "s2"]);
    }

    #[test]
    fn grace_periods() {
        let pod: Pod = serde_json::from_value(
            json!({"spec": {"terminationGracePeriodSeconds": 20, "containers": [
            {"name": "a", "livenessProbe": {"terminationGracePeriodSeconds": 3}}]}}),
        )
        .unwrap();
        let container = &pod.spec.as_ref().unwrap().containers[0];
        assert_eq!(grace_for(&pod, Some(container), KillReason::Other), 20);
        assert_eq!(grace_for(&pod, Some(container), KillReason::LivenessProbe), 3);
        let mut deleted = pod.clone();
        deleted.metadata.deletion_grace_period_seconds = Some(1);
        assert_eq!(grace_for(&deleted, Some(container), KillReason::LivenessProbe), 1);
    }
}
