//! What pods take of disks. `/stats/summary` and `/metrics` show what the last look found, so a request never walks a disk or
//! waits for a storage driver. The looks happen in the background, one walk at a time, and a pod whose files take long to
//! walk is looked at so seldom that its walks are a small share of the time. Eviction, which needs to know now, walks by the
//! same code.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::{Duration, Instant};

use k8s_openapi::api::core::v1::Pod;
use parking_lot::Mutex;
use skiff_fs::{DiskUsage, disk_usage};
use tokio::sync::Semaphore;

use crate::kubelet::Kubelet;
use crate::pod_state::PodState;
use crate::pods;
use crate::runtime::pod_log_dir;
use crate::volumes::{FileVolume, FsUsage};

/// How often pods without numbers are looked for.
const NEW_PODS: Duration = Duration::from_secs(2);
/// The walks of a pod take at most one part of this many of the time.
const WALK_SHARE: u32 = 50;

/// What the files of a pod take of the node's disk.
#[derive(Clone, Debug, Default)]
pub struct PodFiles {
    pub volumes: Vec<(FileVolume, DiskUsage)>,
    /// By container.
    pub logs: BTreeMap<String, DiskUsage>,
    /// Logs that belong to no container, and the pod's hosts file.
    pub rest: DiskUsage,
}

impl PodFiles {
    /// The volumes that count as ephemeral storage.
    pub fn ephemeral_volumes(&self) -> impl Iterator<Item = (&str, DiskUsage)> {
        let local = self.volumes.iter().filter(|(volume, _)| volume.is_ephemeral);
        local.map(|(volume, usage)| (volume.name.as_str(), *usage))
    }
}

/// How full one volume of a pod is.
#[derive(Clone, Debug)]
pub struct VolumeUsage {
    pub name: String,
    pub claim: Option<String>,
    pub usage: FsUsage,
}

/// What the last look at a pod found.
#[derive(Clone, Debug, Default)]
pub struct PodDisk {
    pub files: PodFiles,
    /// Unix nanoseconds.
    pub time: i64,
    pub volumes: Vec<VolumeUsage>,
}

#[derive(Default)]
struct Entry {
    found: Option<Arc<PodDisk>>,
    /// `None`: at once.
    due: Option<Instant>,
    is_measured: bool,
}

pub struct DiskStats {
    /// By uid. A leaf lock.
    pods: Mutex<HashMap<String, Entry>>,
    walk: Semaphore,
}

impl Default for DiskStats {
    fn default() -> Self {
        DiskStats {
            pods: Mutex::default(),
            walk: Semaphore::new(1),
        }
    }
}

impl DiskStats {
    pub fn of(&self, uid: &str) -> Option<Arc<PodDisk>> {
        self.pods.lock().get(uid)?.found.clone()
    }

    /// Forgets pods that are gone, and takes those whose time has come.
    fn take_due(&self, states: Vec<Arc<PodState>>, now: Instant) -> Vec<Arc<PodState>> {
        let mut entries = self.pods.lock();
        let known: HashMap<&str, ()> = states.iter().map(|state| (state.uid.as_str(), ())).collect();
        entries.retain(|uid, entry| entry.is_measured || known.contains_key(uid.as_str()));
        let mut due = Vec::new();
        for state in states {
            let entry = entries.entry(state.uid.clone()).or_default();
            if !entry.is_measured && entry.due.is_none_or(|due| due <= now) {
                entry.is_measured = true;
                due.push(state);
            }
        }
        due
    }

    fn store(&self, uid: &str, found: PodDisk) {
        if let Some(entry) = self.pods.lock().get_mut(uid) {
            entry.found = Some(Arc::new(found));
        }
    }

    fn done(&self, uid: &str, next: Instant) {
        if let Some(entry) = self.pods.lock().get_mut(uid) {
            entry.is_measured = false;
            entry.due = Some(next);
        }
    }
}

impl Kubelet {
    pub async fn run_disk_stats(self: Arc<Self>) {
        let period = self.config.volume_stats_agg_period;
        // COMPAT: upstream measures no volumes then.
        if period.is_zero() {
            return;
        }
        loop {
            let running = self.states().into_iter().filter(|state| {
                !state.is_deleted() && !state.is_terminal() && state.observed().is_anything_running()
            });
            for state in self.disk_stats.take_due(running.collect(), Instant::now()) {
                let kubelet = self.clone();
                tokio::spawn(async move {
                    let cost = kubelet.measure_disk(&state).await;
                    let pause = period.max(cost * WALK_SHARE);
                    kubelet.disk_stats.done(&state.uid, Instant::now() + pause);
                });
            }
            tokio::select! {
                () = self.shutdown.cancelled() => return,
                () = tokio::time::sleep(NEW_PODS.min(period)) => {}
            }
        }
    }

    /// Measures and stores; how long the walk took.
    async fn measure_disk(self: &Arc<Self>, state: &PodState) -> Duration {
        let pod = state.pod();
        let (kubelet, walked) = (self.clone(), pod.clone());
        let Ok(turn) = self.disk_stats.walk.acquire().await else {
            return Duration::ZERO;
        };
        let began = Instant::now();
        let work = tokio::task::spawn_blocking(move || {
            let files = kubelet.walk_pod_files(&walked, |_| true);
            let volumes = files.volumes.iter().filter_map(|(volume, usage)| {
                Some(VolumeUsage {
                    name: volume.name.clone(),
                    claim: None,
                    usage: FsUsage::of(&volume.path)?.using(*usage),
                })
            });
            let volumes = volumes.collect();
            PodDisk {
                files,
                time: crate::server::now_nanos(),
                volumes,
            }
        });
        let found = work.await;
        let cost = began.elapsed();
        drop(turn);
        let Ok(mut found) = found else {
            tracing::warn!(uid = state.uid, "cannot measure the volumes of a pod");
            return cost;
        };
        // What follows waits for others: file systems over the network and drivers. The numbers of the last look stay meanwhile.
        let own: Vec<String> = found.volumes.iter().map(|volume| volume.name.clone()).collect();
        if let Some(before) = self.disk_stats.of(&state.uid) {
            let others = before.volumes.iter().filter(|volume| !own.contains(&volume.name));
            let shown = PodDisk {
                volumes: found.volumes.iter().chain(others).cloned().collect(),
                ..found.clone()
            };
            self.disk_stats.store(&state.uid, shown);
        } else {
            self.disk_stats.store(&state.uid, found.clone());
        }
        found.volumes.extend(self.volumes.driver_stats(&pod).await);
        for volume in self.volumes.file_system_volumes(&pod) {
            // One that hangs keeps one thread, because this pod is not measured again before it answers.
            let asked = tokio::task::spawn_blocking(move || FsUsage::of(&volume.path));
            if let Ok(Some(usage)) = asked.await {
                found.volumes.push(VolumeUsage {
                    name: volume.name,
                    claim: volume.claim,
                    usage,
                });
            }
        }
        self.disk_stats.store(&state.uid, found);
        cost
    }

    /// Walks the pod's logs and those of its volumes that `wanted` says. Blocking.
    pub(crate) fn walk_pod_files(&self, pod: &Pod, wanted: impl Fn(&FileVolume) -> bool) -> PodFiles {
        let uid = pods::uid(pod);
        let logs = pod_log_dir(&self.config.log_dir, pods::namespace(pod), pods::name(pod), uid);
        let mut rest = files_in(&logs);
        rest += disk_usage(&self.volumes.pod_dir(uid).join("etc-hosts"));
        let containers = pods::all_container_names(pod);
        let volumes = self.volumes.file_volumes(pod).into_iter().filter(wanted);
        PodFiles {
            volumes: volumes
                .map(|volume| {
                    let usage = disk_usage(&volume.path);
                    (volume, usage)
                })
                .collect(),
            logs: containers
                .map(|name| (name.to_owned(), files_in(&logs.join(name))))
                .collect(),
            rest,
        }
    }
}

/// The files of one directory, as upstream counts logs: not the directory itself.
fn files_in(directory: &std::path::Path) -> DiskUsage {
    let mut total = DiskUsage::default();
    for entry in std::fs::read_dir(directory).into_iter().flatten().flatten() {
        if entry.file_type().is_ok_and(|kind| !kind.is_dir()) {
            total += disk_usage(&entry.path());
        }
    }
    total
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn logs_are_files() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(files_in(&dir.path().join("none")), DiskUsage::default());
        std::fs::create_dir(dir.path().join("container")).unwrap();
        std::fs::write(dir.path().join("0.log"), vec![b'x'; 100_000]).unwrap();
        let found = files_in(dir.path());
        assert_eq!(found.inodes, 1);
        assert!((100_000..200_000).contains(&found.bytes), "{found:?}");
    }
}
