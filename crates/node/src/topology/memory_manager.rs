//! The memory manager: which NUMA nodes containers have their memory from. What it assigns is on disk before a container is
//! made with it, and stays the container's until its pod has ended.

use std::path::{Path, PathBuf};

use k8s_openapi::api::core::v1::{Container, Pod};
use parking_lot::Mutex;

use super::checkpoint::{self, Block, MemoryCheckpoint};
use super::hints::{Hint, ProviderHints};
use super::memory_policy::{AllocateError, Reusable, State, StateError, StaticPolicy};
use super::requests::{containers, is_pinned};
use crate::pods;

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error(transparent)]
    Checkpoint(#[from] checkpoint::Error),
    #[error("{why}; invalid state, please drain node and remove policy state file {path:?}")]
    State { path: PathBuf, why: StateError },
    #[error(transparent)]
    Allocate(#[from] AllocateError),
}

pub struct MemoryManager {
    root: PathBuf,
    /// `None`: the kernel decides.
    policy: Option<StaticPolicy>,
    /// A leaf lock.
    state: Mutex<State>,
}

impl MemoryManager {
    /// With what an earlier kubelet assigned.
    pub fn restored(root: &Path, policy: Option<StaticPolicy>) -> Result<Self, Error> {
        let manager = MemoryManager {
            root: root.to_owned(),
            policy,
            state: Mutex::default(),
        };
        let loaded = checkpoint::load::<MemoryCheckpoint>(root, manager.policy_name())?;
        let is_new = loaded.is_none();
        let loaded = loaded.unwrap_or_default();
        let mut state = State {
            machine: loaded.machine_state,
            entries: loaded.entries,
        };
        let before = state.clone();
        if let Some(policy) = &manager.policy {
            policy.check(&mut state).map_err(|why| Error::State {
                path: root.join(<MemoryCheckpoint as checkpoint::Checkpoint>::FILE),
                why,
            })?;
        }
        if is_new || before != state {
            manager.save(&state)?;
        }
        *manager.state.lock() = state;
        Ok(manager)
    }

    fn policy_name(&self) -> &'static str {
        match self.policy {
            Some(_) => "Static",
            None => "None",
        }
    }

    fn save(&self, state: &State) -> Result<(), checkpoint::Error> {
        let (machine, entries) = (state.machine.clone(), state.entries.clone());
        let checkpoint = MemoryCheckpoint::new(self.policy_name(), machine, entries);
        checkpoint::save(&self.root, checkpoint)
    }

    pub fn is_static(&self) -> bool {
        self.policy.is_some()
    }

    /// Whether containers of the pod are to have memory of certain nodes.
    pub fn pins(&self, pod: &Pod) -> bool {
        self.is_static() && is_pinned(pod)
    }

    /// Gives the container its memory. What it has already it keeps.
    pub fn allocate(
        &self,
        pod: &Pod,
        container: (&Container, bool),
        hint: Hint,
        reusable: &mut Reusable,
    ) -> Result<(), Error> {
        let Some(policy) = &self.policy else { return Ok(()) };
        let mut state = self.state.lock();
        let mut next = state.clone();
        policy.allocate(&mut next, pod, container, hint, reusable)?;
        if next != *state {
            self.save(&next)?;
            *state = next;
        }
        Ok(())
    }

    pub fn container_hints(&self, pod: &Pod, container: &Container, reusable: &Reusable) -> ProviderHints {
        let hints =
            |policy: &StaticPolicy| policy.container_hints(&self.state.lock(), pod, container, reusable);
        self.policy.as_ref().map(hints).unwrap_or_default()
    }

    pub fn pod_hints(&self, pod: &Pod) -> ProviderHints {
        let hints = |policy: &StaticPolicy| policy.pod_hints(&self.state.lock(), pod);
        self.policy.as_ref().map(hints).unwrap_or_default()
    }

    /// Writes the change down. If that fails, the next kubelet makes it.
    fn change(&self, change: impl FnOnce(&mut State)) {
        let mut state = self.state.lock();
        let mut next = state.clone();
        change(&mut next);
        if next == *state {
            return;
        }
        if let Err(error) = self.save(&next) {
            tracing::warn!(%error, "cannot write that memory is free");
        }
        *state = next;
    }

    /// The container was made: init containers before it have ended, and what they did not lend is free.
    pub fn container_made(&self, pod: &Pod, container: &str) {
        // Ephemeral ones come at any time.
        let is_ephemeral = containers(pod).all(|(known, _)| known.name != container);
        if !self.pins(pod) || is_ephemeral {
            return;
        }
        self.change(|state| {
            let earlier = containers(pod).take_while(|(earlier, _)| earlier.name != container);
            for (earlier, _) in earlier.filter(|(_, ends_early)| *ends_early) {
                state.release(pods::uid(pod), &earlier.name);
            }
        });
    }

    /// Frees the memory of all pods but those.
    pub fn retain(&self, is_known: impl Fn(&str) -> bool) {
        self.change(|state| {
            let gone = state.entries.iter().filter(|(uid, _)| !is_known(uid));
            let gone: Vec<(String, String)> = gone
                .flat_map(|(uid, of_pod)| of_pod.keys().map(|name| (uid.clone(), name.clone())))
                .collect();
            for (uid, container) in gone {
                state.release(&uid, &container);
            }
        });
    }

    /// The memory of a container.
    pub fn blocks(&self, uid: &str, container: &str) -> Vec<Block> {
        let state = self.state.lock();
        state.of(uid, container).cloned().unwrap_or_default()
    }

    /// The NUMA nodes of a container in the kernel's notation; empty for all.
    pub fn nodes(&self, uid: &str, container: &str) -> String {
        let blocks = self.blocks(uid, container);
        let nodes = blocks
            .iter()
            .flat_map(|block| block.numa_affinity.iter().copied());
        let nodes: std::collections::BTreeSet<u32> = nodes.collect();
        let nodes: Vec<String> = nodes.iter().map(u32::to_string).collect();
        nodes.join(",")
    }

    /// What containers can have on each NUMA node.
    pub fn allocatable(&self) -> Vec<Block> {
        let state = self.state.lock();
        self.policy
            .as_ref()
            .map(|policy| policy.allocatable(&state))
            .unwrap_or_default()
    }
}
