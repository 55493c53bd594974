//! A pod's status, made of its spec, what the runtime says, what probes say and what was reported before.
//! Pure; `status_writer.rs` sends it.

mod conditions;
mod containers;
mod diff;
mod phase;

use std::collections::HashMap;

use k8s_openapi::api::core::v1::{HostIP, Pod, PodCondition, PodIP, PodStatus};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use k8s_openapi::jiff::Timestamp;

use crate::cgroups::PodConfig;
use crate::observed::{ContainerState, ObservedPod};
use crate::resize::{Resize, pod_resources};
use crate::resources::{is_sidecar, qos_class};

pub use containers::container_by_name;
pub use diff::{status_patch, statuses_equal};

/// Why a container that should run does not: what its last start ended in.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WaitingReason {
    pub reason: String,
    pub message: String,
}

/// Probes' say in readiness, by container id.
pub trait Readiness {
    /// `None`: the container has no startup probe result yet.
    fn startup(&self, container_id: &str) -> Option<bool>;
    fn readiness(&self, container_id: &str) -> Option<bool>;
}

/// How the message of a pod begins that the node did not take.
pub const REJECTED: &str = "Pod was rejected: ";

/// Everything a status is made of.
pub struct StatusInput<'a> {
    /// With the resources that were allocated to it.
    pub pod: &'a Pod,
    pub resize: &'a Resize,
    /// Whether the node has looked at what this version of the pod asks for.
    pub is_considered: bool,
    /// The pod's own cgroup, where it has one.
    pub pod_config: Option<&'a PodConfig>,
    /// The last status made by this kubelet, else the API's.
    pub previous: &'a PodStatus,
    pub observed: &'a ObservedPod,
    pub runtime_name: &'a str,
    pub reasons: &'a HashMap<String, WaitingReason>,
    pub readiness: &'a dyn Readiness,
    pub host_ips: &'a [String],
    /// The pod will run nothing any more: containers are not going to be restarted.
    pub terminal: bool,
    /// An end that the kubelet decided (deadline, refusal): phase Failed with reason and message.
    pub failed: Option<&'a WaitingReason>,
    pub now: Timestamp,
}

impl StatusInput<'_> {
    /// A version of the pod is observed when what it asks for is allocated or known to wait.
    fn observed_generation(&self) -> Option<i64> {
        let own = self.pod.metadata.generation.filter(|g| *g > 0);
        if self.is_considered {
            own
        } else {
            self.previous.observed_generation.or(own)
        }
    }
}

pub fn generate(input: &StatusInput<'_>) -> PodStatus {
    let pod = input.pod;
    let Some(spec) = &pod.spec else {
        return input.previous.clone();
    };
    let api_status = pod.status.clone().unwrap_or_default();
    let mut status = PodStatus {
        qos_class: Some(qos_class(pod).as_str().to_owned()),
        observed_generation: input.observed_generation(),
        nominated_node_name: api_status.nominated_node_name.clone(),
        resource_claim_statuses: api_status.resource_claim_statuses.clone(),
        extended_resource_claim_status: api_status.extended_resource_claim_status.clone(),
        resize: api_status.resize.clone(),
        start_time: input
            .previous
            .start_time
            .clone()
            .or(api_status.start_time.clone())
            .or(Some(whole_seconds(input.now))),
        ..Default::default()
    };
    let pod_ips: Vec<String> = match input.observed.ips() {
        // An address is kept while the sandbox is gone, so that what has ended can still be told apart.
        [] => input
            .previous
            .pod_ips
            .iter()
            .flatten()
            .map(|ip| ip.ip.clone())
            .collect(),
        ips => ips.to_vec(),
    };
    status.pod_ips =
        (!pod_ips.is_empty()).then(|| pod_ips.iter().map(|ip| PodIP { ip: ip.clone() }).collect());
    status.pod_ip = pod_ips.first().cloned();

    // COMPAT: a rejected pod has no containers to tell of, and clients show the pod's own reason.
    let is_rejected = |message: Option<&String>| message.is_some_and(|m| m.starts_with(REJECTED));
    if !is_rejected(input.failed.map(|failed| &failed.message)) && !is_rejected(api_status.message.as_ref()) {
        containers::fill(input, spec, &mut status);
    }

    let has_started = spec.containers.iter().any(|c| {
        input
            .observed
            .container(&c.name)
            .is_some_and(|o| matches!(o.state, ContainerState::Running | ContainerState::Exited))
    });
    let mut phase = phase::phase(pod, &status, input.terminal, has_started).to_owned();
    let terminal_phase = |p: Option<&str>| matches!(p, Some("Failed" | "Succeeded"));
    if !terminal_phase(Some(&phase)) {
        // A pod does not come back from its end.
        for earlier in [input.previous.phase.as_deref(), api_status.phase.as_deref()] {
            if let Some(earlier) = earlier.filter(|p| terminal_phase(Some(p))) {
                phase = earlier.to_owned();
                break;
            }
        }
    }
    if Some(phase.as_str()) == input.previous.phase.as_deref() {
        let or = |a: &Option<String>, b: &Option<String>| {
            a.clone().filter(|v| !v.is_empty()).or_else(|| b.clone())
        };
        status.reason = or(&input.previous.reason, &api_status.reason);
        status.message = or(&input.previous.message, &api_status.message);
    }
    if let Some(failed) = input.failed {
        phase = "Failed".to_owned();
        status.reason = Some(failed.reason.clone());
        status.message = Some(failed.message.clone());
    }
    if terminal_phase(api_status.phase.as_deref()) {
        phase = api_status.phase.clone().unwrap_or(phase);
    }
    let mut deferred_phase = None;
    if terminal_phase(Some(&phase))
        && !terminal_phase(api_status.phase.as_deref())
        && input.observed.running().next().is_some()
    {
        // The end is announced only when nothing runs any more; readiness goes at once.
        deferred_phase = Some(
            input
                .previous
                .phase
                .clone()
                .or(api_status.phase.clone())
                .unwrap_or_else(|| "Running".to_owned()),
        );
    }
    containers::apply_probes(input, spec, &mut status);
    status.conditions = Some(conditions::conditions(input, spec, &status, &phase));
    if deferred_phase.is_some() {
        status.reason = input.previous.reason.clone();
        status.message = input.previous.message.clone();
    }
    status.phase = deferred_phase.or(Some(phase));
    let (allocated, resources) = pod_resources(pod, input.pod_config);
    status.allocated_resources = (!allocated.is_empty()).then_some(allocated);
    status.resources = Some(resources);
    status.host_ip = input.host_ips.first().cloned();
    status.host_ips = (!input.host_ips.is_empty()).then(|| {
        input
            .host_ips
            .iter()
            .map(|ip| HostIP { ip: ip.clone() })
            .collect()
    });
    if spec.host_network == Some(true) {
        status.pod_ip = status.pod_ip.or_else(|| status.host_ip.clone());
        if status.pod_ips.is_none() {
            status.pod_ips = Some(input.host_ips.iter().map(|ip| PodIP { ip: ip.clone() }).collect());
        }
    }
    status
}

/// Times go over the wire in whole seconds; made so here, a status equals the one read back.
pub fn whole_seconds(at: Timestamp) -> Time {
    Time(Timestamp::from_second(at.as_second()).unwrap_or(at))
}

pub fn condition<'a>(status: &'a PodStatus, type_: &str) -> Option<&'a PodCondition> {
    status.conditions.iter().flatten().find(|c| c.type_ == type_)
}

pub fn is_terminal(status: Option<&PodStatus>) -> bool {
    matches!(
        status.and_then(|s| s.phase.as_deref()),
        Some("Failed" | "Succeeded")
    )
}

fn sidecars_of(
    spec: &k8s_openapi::api::core::v1::PodSpec,
) -> impl Iterator<Item = &k8s_openapi::api::core::v1::Container> {
    spec.init_containers.iter().flatten().filter(|c| is_sidecar(c))
}

#[cfg(test)]
mod tests;
