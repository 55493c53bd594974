//! Brings cgroups to what was allocated: the pod's own grows before its containers and shrinks after them, containers
//! that shrink come before those that grow, and no memory limit is set below what is in use.

use std::sync::Arc;

use k8s_openapi::api::core::v1::Pod;
use skiff_cri::v1;

use super::record::Amounts;
use super::update::{ContainerUpdate, Updates, is_in_progress};
use super::{event_message, generation};
use crate::cgroups::{Part, PodConfig};
use crate::images::describe;
use crate::kubelet::Kubelet;
use crate::observed::ObservedPod;
use crate::pod_state::PodState;
use crate::pods;
use crate::resources::{QUOTA_PERIOD, milli_cpu_to_quota, milli_cpu_to_shares, oom_score_adj};

/// Why a resize does not get on; it is tried again.
#[derive(Debug, thiserror::Error)]
pub enum ResizeFailed {
    #[error("cannot decrease memory limits: {0}")]
    InUse(String),
    #[error("failed to set the cgroup of the pod: {0}")]
    PodCgroup(#[from] std::io::Error),
    #[error("failed to notify runtime for UpdatePodSandboxResources; resize rejected: {0}")]
    Sandbox(String),
    #[error("failed to update the resources of container {name:?}: {why}")]
    Container { name: String, why: String },
}

/// Several complaints as one.
fn joined(mut complaints: Vec<String>) -> String {
    match complaints.len() {
        1 => complaints.remove(0),
        _ => format!("[{}]", complaints.join(", ")),
    }
}

/// No limit is the largest one.
fn bound(limit: Option<i64>) -> i64 {
    limit.unwrap_or(i64::MAX)
}

impl Kubelet {
    /// Shows a resize as begun or as done. `pod` is as allocated.
    pub fn settle_resize(&self, state: &PodState, pod: &Pod, observed: &ObservedPod) {
        let mut resize = state.resize.lock();
        let Some(record) = &resize.record else { return };
        let in_progress = is_in_progress(pod, observed, record)
            || (resize.in_progress.is_some() && self.pod_cgroup_differs(pod));
        if in_progress {
            resize.begin(generation(pod), None);
        } else if let Some(done) = resize.in_progress.take() {
            let message = event_message("Pod resize completed", pod, done.generation, "");
            self.recorder
                .event(&pods::reference(pod), "Normal", "ResizeCompleted", message);
        }
    }

    /// Whether the pod's own cgroup has something else than the pod was allocated.
    pub fn pod_cgroup_differs(&self, pod: &Pod) -> bool {
        match self.cgroups.pod_config(pod) {
            Ok(config) => config.is_some_and(|config| config.differs()),
            // It is made before anything is put into it.
            Err(_) => false,
        }
    }

    /// Says of a resize that it does not get on.
    pub fn tell_resize_failed(&self, state: &PodState, pod: &Pod, failed: &ResizeFailed) {
        tracing::warn!(pod = %pods::full_name(pod), error = %failed, "cannot resize the pod");
        let mut resize = state.resize.lock();
        let message = failed.to_string();
        if resize.begin(generation(pod), Some(message.clone())) {
            let of = resize
                .in_progress
                .as_ref()
                .map_or(0, |condition| condition.generation);
            let message = event_message("Pod resize error", pod, of, &message);
            self.recorder
                .event(&pods::reference(pod), "Warning", "ResizeError", message);
        }
    }

    /// Does what is left to do. Everything in it may be repeated.
    pub async fn resize_pod(
        self: &Arc<Self>,
        state: &Arc<PodState>,
        pod: &Pod,
        sandbox_id: &str,
        updates: &Updates,
    ) -> Result<(), ResizeFailed> {
        let config = self.cgroups.pod_config(pod)?;
        self.check_memory_in_use(pod, config.as_ref(), &updates.memory)
            .await?;
        let (current, wanted) = match config {
            Some(PodConfig { current, wanted }) => (Some(current), Some(wanted)),
            None => (None, None),
        };
        // What is not asked for stays as it is.
        let limits = |pick: fn(&crate::resources::CgroupResources) -> Option<i64>| {
            let current = bound(current.as_ref().and_then(pick));
            let wanted = wanted.as_ref().and_then(pick).unwrap_or(current);
            (current, wanted)
        };
        let memory = limits(|config| config.memory_limit);
        let quota = limits(|config| config.cpu_quota);
        let shares = limits(|config| Some(config.cpu_shares));
        let set = |part: Part| self.set_pod_cgroup(pod, sandbox_id, part);

        if memory.1 > memory.0 {
            set(Part::Memory).await?;
        }
        for update in &updates.memory {
            let amounts = update.current.with_memory(update.wanted);
            self.update_container(state, pod, update, amounts).await?;
        }
        if memory.1 < memory.0 {
            set(Part::Memory).await?;
        }
        self.note_actuated(state, |record| {
            let of_pod = Amounts::of(record.allocated.pod.as_ref());
            record.actuated_pod = record.actuated_pod.with_memory(of_pod);
        });

        if quota.1 > quota.0 {
            set(Part::Quota).await?;
        }
        if shares.1 > shares.0 {
            set(Part::Shares).await?;
        }
        for update in &updates.cpu {
            // The memory is what was just set.
            let amounts = update.wanted;
            self.update_container(state, pod, update, amounts).await?;
        }
        if shares.1 < shares.0 {
            set(Part::Shares).await?;
        }
        if quota.1 < quota.0 {
            set(Part::Quota).await?;
        }
        self.note_actuated(state, |record| {
            let of_pod = Amounts::of(record.allocated.pod.as_ref());
            record.actuated_pod = record.actuated_pod.with_cpu(of_pod);
        });
        Ok(())
    }

    /// A container with these amounts has been made.
    pub fn note_container_made(&self, state: &PodState, name: &str, amounts: Amounts) {
        self.note_actuated(state, |record| {
            record.actuated.insert(name.to_owned(), amounts);
        });
    }

    fn note_actuated(&self, state: &PodState, change: impl FnOnce(&mut super::Record)) {
        let mut resize = state.resize.lock();
        let Some(record) = &mut resize.record else { return };
        let before = record.clone();
        change(record);
        if *record != before {
            self.save_record(&state.uid, record);
        }
    }

    async fn set_pod_cgroup(&self, pod: &Pod, sandbox_id: &str, part: Part) -> Result<(), ResizeFailed> {
        let wanted = self.cgroups.pod_resources(pod);
        let resources = v1::LinuxContainerResources {
            cpu_period: QUOTA_PERIOD,
            cpu_quota: wanted.cpu_quota.unwrap_or(0),
            cpu_shares: wanted.cpu_shares,
            memory_limit_in_bytes: wanted.memory_limit.unwrap_or(0),
            ..Default::default()
        };
        if !sandbox_id.is_empty() {
            match self.runtime.update_sandbox_resources(sandbox_id, resources).await {
                Ok(()) => {}
                // COMPAT: older runtimes do not need to know.
                Err(status) if status.code() == skiff_cri::Code::Unimplemented => {}
                Err(status) => return Err(ResizeFailed::Sandbox(describe(&status))),
            }
        }
        let began = std::time::Instant::now();
        self.cgroups.set_pod(pod, part)?;
        self.metrics.actions.cgroup_changed("update", began.elapsed());
        Ok(())
    }

    async fn update_container(
        self: &Arc<Self>,
        state: &Arc<PodState>,
        pod: &Pod,
        update: &ContainerUpdate,
        amounts: Amounts,
    ) -> Result<(), ResizeFailed> {
        let container = pods::container(pod, &update.name);
        let oom_score_adj =
            { container.as_ref() }.map_or(0, |container| oom_score_adj(pod, container, self.machine.memory));
        let has_quota = self.config.cpu_cfs_quota;
        let mut resources = v1::LinuxContainerResources {
            cpu_period: if has_quota { QUOTA_PERIOD } else { 0 },
            cpu_quota: if has_quota {
                milli_cpu_to_quota(amounts.cpu_limit)
            } else {
                0
            },
            cpu_shares: milli_cpu_to_shares(amounts.cpu_request),
            memory_limit_in_bytes: amounts.memory_limit,
            oom_score_adj,
            ..Default::default()
        };
        if let Some(container) = &container {
            self.swap.apply(pod, container, &mut resources);
        }
        self.managers.apply(&state.uid, &update.name, &mut resources);
        let (kubelet, of) = (self.clone(), state.clone());
        let (id, name) = (update.id.clone(), update.name.clone());
        // To its end: what the runtime has done must be recorded.
        let done = state.change(async move {
            kubelet.runtime.update_container_resources(&id, resources).await?;
            kubelet.note_container_made(&of, &name, amounts);
            Ok::<(), skiff_cri::Status>(())
        });
        done.await.map_err(|status| ResizeFailed::Container {
            name: update.name.clone(),
            why: describe(&status),
        })
    }

    /// A limit below what is in use would have the kernel kill: the resize waits until less is used.
    async fn check_memory_in_use(
        &self,
        pod: &Pod,
        config: Option<&PodConfig>,
        updates: &[ContainerUpdate],
    ) -> Result<(), ResizeFailed> {
        let mut complaints = Vec::new();
        let shrunk = config
            .and_then(|config| Some((config.wanted.memory_limit?, bound(config.current.memory_limit))))
            .filter(|(wanted, current)| wanted < current);
        if let Some((wanted, _)) = shrunk {
            match self.cgroups.pod_memory(pod) {
                Ok(used) if used >= wanted => complaints.push(format!(
                    "attempting to set pod memory limit ({wanted}) below current usage ({used})"
                )),
                Ok(_) => {}
                Err(_) => complaints.push("missing pod memory usage".to_owned()),
            }
        }
        for update in updates {
            let (wanted, current) = (update.wanted.memory_limit, update.current.memory_limit);
            if wanted == 0 || (current != 0 && wanted >= current) {
                continue;
            }
            match self.runtime.container_memory(&update.id).await {
                Ok(Some(used)) if used >= wanted => complaints.push(format!(
                    "attempting to set container {:?} memory limit ({wanted}) below current usage ({used})",
                    update.name
                )),
                Ok(Some(_)) => {}
                _ => complaints.push(format!("missing container {:?} memory usage", update.name)),
            }
        }
        if complaints.is_empty() {
            Ok(())
        } else {
            Err(ResizeFailed::InUse(joined(complaints)))
        }
    }
}
