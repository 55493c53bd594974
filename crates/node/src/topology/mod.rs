//! The CPU, memory and topology managers: containers of Guaranteed pods get CPUs and memory of their own, next to each other
//! and to their devices. Nothing here touches a cgroup: the runtime is told, when a container is made ([`crate::start`]) and
//! when the shared pool changes (`reconcile.rs`).
//!
//! The policies are pure functions over a [`machine::Topology`] and a state; the managers keep the state in upstream's files.

mod checkpoint;
mod cpu_manager;
mod cpu_policy;
mod cpu_set;
mod cpus;
mod hints;
mod machine;
mod memory_manager;
mod memory_policy;
mod metrics;
mod options;
mod reconcile;
mod requests;

use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use k8s_openapi::api::core::v1::{Container, Pod};
use skiff_cri::v1;
use skiff_prometheus::Registry;

use crate::admission::Refusal;
use crate::device_plugins::{self, DevicePlugins};
use cpu_manager::CpuManager;
use hints::Merger;
use machine::Topology;
use memory_manager::MemoryManager;
use metrics::ManagerMetrics;

pub use checkpoint::Block;
pub use cpu_set::CpuSet;
pub use hints::{Hint, Mask, Policy, ProviderHints, each_mask};
pub use machine::SYSTEM;
pub use metrics::register_gauges;
pub use options::{ManagerFlags, ManagersConfig, Pinning, Scope, parse_reserved_memory};
pub use requests::{at_once, containers};

/// Why the kubelet does not start.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("cannot read the topology of this machine: {0}")]
    Machine(#[from] machine::Error),
    #[error("the CPU manager: {0}")]
    CpuPolicy(#[from] cpu_policy::SetUpError),
    #[error("the CPU manager: {0}")]
    Cpu(#[from] cpu_manager::Error),
    #[error("the memory manager: {0}")]
    MemoryPolicy(#[from] memory_policy::SetUpError),
    #[error("the memory manager: {0}")]
    Memory(#[from] memory_manager::Error),
    #[error("the topology manager: unsupported on machines with more than {0} NUMA Nodes")]
    TooManyNodes(usize),
    #[error("the topology manager: the kernel shows no distances between NUMA nodes")]
    NoDistances,
}

pub struct Managers {
    pub cpus: CpuManager,
    pub memory: MemoryManager,
    policy: Policy,
    scope: Scope,
    prefer_closest: bool,
    topology: Arc<Topology>,
    metrics: ManagerMetrics,
    /// One pod after the other: what a hint promised must still be there when it is taken.
    turn: tokio::sync::Mutex<()>,
}

/// What containers of one pod had that end before others start.
#[derive(Default)]
struct Reusable {
    cpus: CpuSet,
    memory: memory_policy::Reusable,
    devices: device_plugins::Reusable,
}

impl Managers {
    /// With what an earlier kubelet assigned. `reserved_milli` of CPU and `reserved_memory` bytes are kept back from pods;
    /// `system` is where the kernel shows the machine.
    pub fn restored(
        (root, system): (&Path, &Path),
        config: &ManagersConfig,
        reserved_milli: i64,
        reserved_memory: i64,
        registry: &Registry,
    ) -> Result<Self, Error> {
        let pins = [config.cpu_policy, config.memory_policy].contains(&Pinning::Static);
        let reads = pins || config.topology_policy != Policy::None || !config.reserved_cpus.is_empty();
        let topology = match reads {
            true => Arc::new(Topology::read(system)?),
            false => Arc::default(),
        };
        let cpu_policy = || {
            cpu_policy::StaticPolicy::new(
                topology.clone(),
                config.cpu_options,
                reserved_milli,
                &config.reserved_cpus,
            )
        };
        let memory_policy = || {
            let kept = u64::try_from(reserved_memory).unwrap_or(0);
            memory_policy::StaticPolicy::new(topology.clone(), &config.reserved_memory, kept)
        };
        let cpu_policy = match config.cpu_policy {
            Pinning::Static => Some(cpu_policy()?),
            Pinning::None => {
                // The CPUs must be there, though nobody is kept off them.
                if !config.reserved_cpus.is_empty() {
                    cpu_policy()?;
                }
                None
            }
        };
        let memory_policy = match config.memory_policy {
            Pinning::Static => Some(memory_policy()?),
            Pinning::None => None,
        };
        let options = config.topology_options;
        if config.topology_policy != Policy::None {
            if topology.nodes.len() > options.max_nodes {
                return Err(Error::TooManyNodes(options.max_nodes));
            }
            let told = topology.nodes.values().all(|node| !node.distances.is_empty());
            if options.prefer_closest && !told {
                return Err(Error::NoDistances);
            }
        }
        Ok(Managers {
            cpus: CpuManager::restored(root, cpu_policy)?,
            memory: MemoryManager::restored(root, memory_policy)?,
            policy: config.topology_policy,
            scope: config.scope,
            prefer_closest: options.prefer_closest,
            topology,
            metrics: ManagerMetrics::new(registry),
            turn: tokio::sync::Mutex::default(),
        })
    }

    /// Whether a policy puts containers on certain CPUs or NUMA nodes.
    pub fn pins(&self) -> bool {
        self.cpus.is_static() || self.memory.is_static()
    }

    /// Gives the pod's containers their devices, CPUs and memory, from NUMA nodes that the policy allows. What they have
    /// already stays theirs. Without `devices` these are left alone: the pod runs, and has them.
    pub async fn admit(&self, pod: &Pod, devices: Option<&DevicePlugins>) -> Result<(), Refusal> {
        self.metrics.topology_requests.inc();
        let began = Instant::now();
        let admitted = self.allocate(pod, devices).await;
        let milliseconds = began.elapsed().as_secs_f64() * 1000.0;
        self.metrics.topology_duration.observe(milliseconds);
        if admitted.is_err() && self.policy != Policy::None {
            self.metrics.topology_errors.inc();
        }
        admitted
    }

    async fn allocate(&self, pod: &Pod, devices: Option<&DevicePlugins>) -> Result<(), Refusal> {
        if !self.pins() && self.policy == Policy::None {
            return match devices {
                Some(devices) => devices.allocate(pod).await.map_err(unexpected),
                None => Ok(()),
            };
        }
        let _turn = self.turn.lock().await;
        let mut reusable = Reusable::default();
        let of_pod = match (self.policy, self.scope) {
            (Policy::None, _) => Some(Hint::default()),
            (_, Scope::Container) => None,
            (_, Scope::Pod) => Some(
                self.merged(&[
                    devices
                        .map(|d| d.pod_hints(pod, &self.topology.node_ids()))
                        .unwrap_or_default(),
                    self.cpus.pod_hints(pod),
                    self.memory.pod_hints(pod),
                ])?,
            ),
        };
        for (container, ends_early) in containers(pod) {
            let hint = match of_pod {
                Some(hint) => hint,
                None => self.merged(&self.container_hints(pod, container, devices, &reusable))?,
            };
            if let Some(devices) = devices {
                let allocated = devices
                    .allocate_container(pod, (container, ends_early), hint.nodes, &mut reusable.devices)
                    .await;
                allocated.map_err(unexpected)?;
            }
            self.pin(pod, (container, ends_early), hint, &mut reusable)?;
        }
        Ok(())
    }

    fn pin(
        &self,
        pod: &Pod,
        container: (&Container, bool),
        hint: Hint,
        reusable: &mut Reusable,
    ) -> Result<(), Refusal> {
        let metrics = &self.metrics;
        if self.cpus.pins(pod, container.0) {
            metrics.cpu_requests.inc();
            let pinned = self.cpus.allocate(pod, container, hint.nodes, &mut reusable.cpus);
            pinned.map_err(|error| {
                metrics.cpu_errors.inc();
                cpu_refusal(&error)
            })?;
        }
        if self.memory.pins(pod) {
            metrics.memory_requests.inc();
            let pinned = self.memory.allocate(pod, container, hint, &mut reusable.memory);
            pinned.map_err(|error| {
                metrics.memory_errors.inc();
                unexpected(error)
            })?;
        }
        Ok(())
    }

    fn container_hints(
        &self,
        pod: &Pod,
        container: &Container,
        devices: Option<&DevicePlugins>,
        reusable: &Reusable,
    ) -> [ProviderHints; 3] {
        let nodes = self.topology.node_ids();
        let hints =
            |devices: &DevicePlugins| devices.container_hints(pod, container, &reusable.devices, &nodes);
        [
            devices.map(hints).unwrap_or_default(),
            self.cpus.container_hints(pod, container, &reusable.cpus),
            self.memory.container_hints(pod, container, &reusable.memory),
        ]
    }

    fn merged(&self, providers: &[ProviderHints]) -> Result<Hint, Refusal> {
        let merger = Merger {
            policy: self.policy,
            prefer_closest: self.prefer_closest,
            topology: &self.topology,
        };
        merger.merge(providers).ok_or_else(|| {
            Refusal::new(
                "TopologyAffinityError",
                "Resources cannot be allocated with Topology locality",
            )
        })
    }

    /// Puts the container on its CPUs and NUMA nodes. COMPAT: without a quota where CPUs are its own; it would only be
    /// throttled on them.
    pub fn apply(&self, uid: &str, container: &str, resources: &mut v1::LinuxContainerResources) {
        resources.cpuset_cpus = self.cpus.affinity(uid, container).to_string();
        resources.cpuset_mems = self.memory.nodes(uid, container);
        if self.cpus.exclusive(uid, container).is_some() {
            resources.cpu_quota = -1;
        }
    }

    /// The pod has ended.
    pub fn release(&self, uid: &str) {
        self.retain(|known| known != uid);
    }

    /// Gives back what all pods but those have.
    pub fn retain(&self, is_known: impl Fn(&str) -> bool) {
        self.cpus.retain(&is_known);
        self.memory.retain(&is_known);
    }

    /// Why the pod's CPU or memory cannot be resized, by the amounts that change.
    pub fn refuses_resize(&self, is_guaranteed: bool, cpu: bool, memory: bool) -> Option<String> {
        let (manager, policy) = match is_guaranteed {
            true if cpu && self.cpus.is_static() => ("CPU", "static"),
            true if memory && self.memory.is_static() => ("Memory", "Static"),
            _ => return None,
        };
        Some(format!(
            "Resize is infeasible for Guaranteed Pods alongside {manager} Manager policy {policy:?}"
        ))
    }
}

/// COMPAT: upstream's words.
fn unexpected(error: impl std::fmt::Display) -> Refusal {
    Refusal::new(
        "UnexpectedAdmissionError",
        format!("Allocate failed due to {error}, which is unexpected"),
    )
}

fn cpu_refusal(error: &cpu_manager::Error) -> Refusal {
    use cpu_policy::AllocateError::{PartOfCore, TooFewCores};
    match error {
        cpu_manager::Error::Allocate(PartOfCore { .. } | TooFewCores { .. }) => {
            Refusal::new("SMTAlignmentError", error.to_string())
        }
        _ => unexpected(error),
    }
}

#[cfg(test)]
mod tests;
