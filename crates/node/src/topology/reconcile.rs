//! Keeps running containers on their CPUs: when the shared pool becomes smaller or larger, those that run on it move.

use std::collections::HashMap;
use std::sync::Arc;

use skiff_cri::v1;
use tokio::time::MissedTickBehavior;

use super::CpuSet;
use crate::images::describe;
use crate::kubelet::Kubelet;

/// The CPUs that running containers were last put on, by container id.
type Applied = HashMap<String, CpuSet>;

impl Kubelet {
    pub async fn run_cpu_reconcile(self: Arc<Self>) {
        if !self.managers.cpus.is_static() {
            return;
        }
        let mut applied = Applied::new();
        let mut period = tokio::time::interval(self.config.managers.reconcile_period);
        period.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                () = self.shutdown.cancelled() => return,
                () = self.managers.cpus.pool_changed.notified() => {}
                _ = period.tick() => {}
            }
            applied = self.reconcile_cpus(&applied).await;
        }
    }

    async fn reconcile_cpus(&self, before: &Applied) -> Applied {
        let mut applied = Applied::new();
        for state in self.states() {
            // Until then it may have no CPUs in the state, though it runs on some of its own.
            if !state.is_admitted() || state.is_terminal() {
                continue;
            }
            for container in state.observed().running() {
                let cpus = self.managers.cpus.affinity(&state.uid, &container.name);
                // COMPAT: a shared pool without any CPU keeps nobody off the others'.
                if cpus.is_empty() {
                    continue;
                }
                if before.get(&container.id) != Some(&cpus) {
                    let resources = v1::LinuxContainerResources {
                        cpuset_cpus: cpus.to_string(),
                        ..Default::default()
                    };
                    let updated = self.runtime.update_container_resources(&container.id, resources);
                    if let Err(status) = updated.await {
                        let error = describe(&status);
                        tracing::warn!(
                            uid = state.uid,
                            container = container.name,
                            error,
                            "cannot set the CPUs of a container; trying again"
                        );
                        continue;
                    }
                }
                applied.insert(container.id.clone(), cpus);
            }
        }
        applied
    }
}
