//! The CPU manager: which CPUs containers run on. What it assigns is on disk before a container is made with it, and stays
//! the pod's until the pod has ended.

use std::path::{Path, PathBuf};

use k8s_openapi::api::core::v1::{Container, Pod};
use parking_lot::Mutex;
use tokio::sync::Notify;

use super::checkpoint::{self, CpuCheckpoint};
use super::cpu_policy::{AllocateError, State, StateError, StaticPolicy};
use super::cpu_set::CpuSet;
use super::hints::{Mask, ProviderHints};
use super::requests::exclusive_cpus;

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error(transparent)]
    Checkpoint(#[from] checkpoint::Error),
    #[error("{why}; invalid state, please drain node and remove policy state file {path:?}")]
    State { path: PathBuf, why: Box<StateError> },
    #[error(transparent)]
    Allocate(#[from] AllocateError),
}

pub struct CpuManager {
    root: PathBuf,
    /// `None`: all containers run on all CPUs.
    policy: Option<StaticPolicy>,
    /// A leaf lock.
    state: Mutex<State>,
    /// The shared pool has become smaller or larger.
    pub pool_changed: Notify,
}

impl CpuManager {
    /// With what an earlier kubelet assigned.
    pub fn restored(root: &Path, policy: Option<StaticPolicy>) -> Result<Self, Error> {
        let manager = CpuManager {
            root: root.to_owned(),
            policy,
            state: Mutex::default(),
            pool_changed: Notify::new(),
        };
        let loaded = checkpoint::load::<CpuCheckpoint>(root, manager.policy_name())?;
        let mut state = State::default();
        if let Some(loaded) = &loaded {
            let (pool, entries) = loaded.sets().map_err(|why| checkpoint::Error::Restore {
                manager: <CpuCheckpoint as checkpoint::Checkpoint>::MANAGER,
                path: manager.file(),
                why: Box::new(why),
            })?;
            state = State { pool, entries };
        }
        let before = state.clone();
        if let Some(policy) = &manager.policy {
            policy.check(&mut state).map_err(|why| Error::State {
                path: manager.file(),
                why: Box::new(why),
            })?;
        }
        if loaded.is_none() || before != state {
            manager.save(&state)?;
        }
        *manager.state.lock() = state;
        Ok(manager)
    }

    fn file(&self) -> PathBuf {
        self.root.join(<CpuCheckpoint as checkpoint::Checkpoint>::FILE)
    }

    fn policy_name(&self) -> &'static str {
        match self.policy {
            Some(_) => "static",
            None => "none",
        }
    }

    fn save(&self, state: &State) -> Result<(), checkpoint::Error> {
        let checkpoint = CpuCheckpoint::new(self.policy_name(), &state.pool, &state.entries);
        checkpoint::save(&self.root, checkpoint)
    }

    pub fn is_static(&self) -> bool {
        self.policy.is_some()
    }

    /// Whether the container is to have CPUs of its own.
    pub fn pins(&self, pod: &Pod, container: &Container) -> bool {
        self.is_static() && exclusive_cpus(pod, container) > 0
    }

    /// Gives the container its CPUs. What it has already it keeps.
    pub fn allocate(
        &self,
        pod: &Pod,
        container: (&Container, bool),
        nodes: Option<Mask>,
        reusable: &mut CpuSet,
    ) -> Result<(), Error> {
        let Some(policy) = &self.policy else { return Ok(()) };
        let mut state = self.state.lock();
        let mut next = state.clone();
        policy.allocate(&mut next, pod, container, nodes, reusable)?;
        if next != *state {
            self.save(&next)?;
            *state = next;
            self.pool_changed.notify_one();
        }
        Ok(())
    }

    pub fn container_hints(&self, pod: &Pod, container: &Container, reusable: &CpuSet) -> ProviderHints {
        let hints =
            |policy: &StaticPolicy| policy.container_hints(&self.state.lock(), pod, container, reusable);
        self.policy.as_ref().map(hints).unwrap_or_default()
    }

    pub fn pod_hints(&self, pod: &Pod) -> ProviderHints {
        let hints = |policy: &StaticPolicy| policy.pod_hints(&self.state.lock(), pod);
        self.policy.as_ref().map(hints).unwrap_or_default()
    }

    /// Gives back the CPUs of all pods but those.
    pub fn retain(&self, is_known: impl Fn(&str) -> bool) {
        let mut state = self.state.lock();
        let gone: Vec<String> = { state.entries.keys() }
            .filter(|uid| !is_known(uid))
            .cloned()
            .collect();
        if gone.is_empty() {
            return;
        }
        let mut next = state.clone();
        for uid in &gone {
            next.release(uid);
        }
        // If that is not written, they are given back by the next kubelet.
        if let Err(error) = self.save(&next) {
            tracing::warn!(%error, "cannot write that CPUs are free");
        }
        *state = next;
        self.pool_changed.notify_one();
    }

    /// The CPUs that only this container has.
    pub fn exclusive(&self, uid: &str, container: &str) -> Option<CpuSet> {
        self.state.lock().of(uid, container).cloned()
    }

    /// Whether a container of the pod has CPUs of its own.
    pub fn has_exclusive(&self, uid: &str) -> bool {
        self.state.lock().entries.contains_key(uid)
    }

    /// The CPUs that the container runs on: its own or the shared pool. Empty: all.
    pub fn affinity(&self, uid: &str, container: &str) -> CpuSet {
        let state = self.state.lock();
        match state.of(uid, container) {
            Some(own) => own.clone(),
            None => state.pool.clone(),
        }
    }

    /// CPUs that containers can have for themselves.
    pub fn allocatable(&self) -> CpuSet {
        self.policy
            .as_ref()
            .map(StaticPolicy::allocatable)
            .unwrap_or_default()
    }

    /// For metrics: what is left in the shared pool, and how many CPUs are exclusive on each NUMA node.
    pub fn counts(&self) -> Option<(usize, Vec<(u32, usize)>)> {
        let policy = self.policy.as_ref()?;
        let state = self.state.lock();
        Some((policy.available(&state).len(), policy.by_node(&state.exclusive())))
    }
}
