//! Work by the clock: pods the API does not know are ended, what they left is removed, old containers go, logs are
//! rotated, disk limits are looked after.

use std::collections::HashSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use crate::images::describe;
use crate::kubelet::Kubelet;
use crate::observed::ObservedPod;

const ORPHAN_PERIOD: Duration = Duration::from_secs(10);
const LIMIT_PERIOD: Duration = Duration::from_secs(10);
/// How often containers that have ended are looked at. Upstream's.
const CONTAINER_GC_PERIOD: Duration = Duration::from_secs(60);
/// Resizes that wait are tried again when room becomes free; this is for what was missed.
const RESIZE_PERIOD: Duration = Duration::from_secs(60);
/// A pod nobody knows gets little time.
const ORPHAN_GRACE: i64 = 1;

impl Kubelet {
    pub async fn run_housekeeping(self: Arc<Self>) {
        // Before all pods are known, everything would look like an orphan.
        let mut is_listed = false;
        let mut listed = std::pin::pin!(async {
            self.static_pods.read().await;
            self.pods.synced().await;
        });
        let mut orphans = tokio::time::interval(ORPHAN_PERIOD);
        let mut logs = tokio::time::interval(self.config.container_log_monitor_interval);
        let mut limits = tokio::time::interval(LIMIT_PERIOD);
        let mut resizes = tokio::time::interval(RESIZE_PERIOD);
        let mut containers = tokio::time::interval(CONTAINER_GC_PERIOD);
        // Measuring a large volume may take longer than that.
        limits.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                () = self.shutdown.cancelled() => return,
                () = &mut listed, if !is_listed => {
                    is_listed = true;
                    self.pods_listed.store(true, std::sync::atomic::Ordering::SeqCst);
                    self.retry_resizes();
                    orphans.reset_immediately();
                }
                _ = orphans.tick(), if is_listed => self.remove_orphans().await,
                _ = logs.tick() => self.rotate_logs().await,
                _ = limits.tick() => self.evict_over_limits().await,
                _ = containers.tick(), if is_listed => self.collect_containers(false).await,
                _ = resizes.tick() => self.retry_waiting_resizes(),
            }
        }
    }

    async fn remove_orphans(&self) {
        self.device_plugins.retain(|uid| self.is_known(uid));
        self.managers.retain(|uid| self.is_known(uid));
        for uid in self.dra.pods() {
            if !self.is_known(&uid)
                && let Err(error) = self.dra.unprepare(&uid).await
            {
                tracing::info!(uid, error, "cannot give back the devices of a pod that is gone");
            }
        }
        // The order matters: what is listed first cannot belong to a pod that comes later.
        let Ok(outlines) = self.runtime.outlines().await else {
            return;
        };
        let on_disk = self.volumes.pods_on_disk();
        let in_cgroups = self.cgroups.pods();
        let in_logs = logs_by_pod(&self.config.log_dir);
        let states = self.states();
        let taken: HashSet<String> = { states.iter() }
            .flat_map(|state| ids(&state.observed()))
            .collect();
        for (uid, outline) in &outlines {
            if self.is_known(uid) {
                continue;
            }
            let mut listed = outline.sandboxes.iter().chain(&outline.containers);
            if let Some((id, _)) = listed.find(|(id, _)| taken.contains(id)) {
                tracing::warn!(
                    uid,
                    id,
                    "the runtime lists what belongs to another pod; it is left alone"
                );
                continue;
            }
            tracing::info!(
                uid,
                pod = outline.name,
                namespace = outline.namespace,
                "ending a pod that the API does not know"
            );
            if let Err(error) = self.end_orphan(uid, &outline.namespace, &outline.name).await {
                tracing::warn!(uid, error, "cannot kill an orphaned pod");
            }
        }
        for uid in on_disk.into_iter().chain(in_cgroups) {
            if outlines.contains_key(&uid) || self.is_known(&uid) {
                continue;
            }
            if let Err(error) = self.remove_traces(&uid, "", "").await {
                tracing::warn!(uid, error, "cannot remove what a pod left behind");
            }
        }
        for (uid, logs) in in_logs {
            if outlines.contains_key(&uid) || self.is_known(&uid) {
                continue;
            }
            if let Err(error) = skiff_fs::remove_tree(&logs) {
                tracing::warn!(%error, logs = %logs.display(), "cannot remove the logs that a pod left behind");
            }
        }
    }

    async fn end_orphan(&self, uid: &str, namespace: &str, name: &str) -> Result<(), String> {
        let observed = self.runtime.observe(uid).await.map_err(|s| describe(&s))?;
        let stops = observed
            .running()
            .map(|container| self.runtime.stop_container(&container.id, ORPHAN_GRACE));
        for result in futures::future::join_all(stops).await {
            result.map_err(|s| describe(&s))?;
        }
        self.remove_traces(uid, namespace, name).await
    }
}

/// Of the sandboxes and containers of a pod.
fn ids(observed: &ObservedPod) -> Vec<String> {
    let containers = observed.containers.iter().map(|one| one.id.clone());
    let sandboxes = observed.sandboxes.iter().map(|one| one.id.clone());
    containers.chain(sandboxes).collect()
}

/// The log directories, each with the uid of its pod: the last part of its name.
fn logs_by_pod(log_dir: &Path) -> Vec<(String, PathBuf)> {
    let directories = std::fs::read_dir(log_dir).into_iter().flatten().flatten();
    directories
        .filter_map(|entry| {
            let name = entry.file_name().into_string().ok()?;
            let mut parts = name.rsplitn(3, '_');
            let uid = parts.next().filter(|uid| !uid.is_empty())?.to_owned();
            // Another's file is left alone.
            parts.nth(1).map(|_namespace| (uid, entry.path()))
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn logs_belong_to_pods() {
        let dir = tempfile::tempdir().unwrap();
        for name in ["default_web-1_u1", "lost+found", "a_b", "x_y_"] {
            std::fs::create_dir(dir.path().join(name)).unwrap();
        }
        let found = logs_by_pod(dir.path());
        assert_eq!(found, [("u1".to_owned(), dir.path().join("default_web-1_u1"))]);
    }
}
