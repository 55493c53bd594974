//! Startup, liveness and readiness probes: one task a probe, and a table of what each container's probes
//! last said. A worker only probes; what follows from a result is the pod worker's business.

pub mod grpc;
pub mod http;
mod worker;

use std::collections::HashMap;
use std::sync::Arc;

use k8s_openapi::api::core::v1::{Container, Pod, Probe};
use parking_lot::{Mutex, RwLock};
use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;

use crate::kubelet::Kubelet;
use crate::plan::ProbeVerdicts;
use crate::pod_state::PodState;
use crate::pods;
use crate::resources::is_sidecar;
use crate::status::Readiness;

#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum ProbeKind {
    Startup,
    Liveness,
    Readiness,
}

impl ProbeKind {
    /// As messages name it.
    pub fn as_str(self) -> &'static str {
        match self {
            ProbeKind::Startup => "Startup",
            ProbeKind::Liveness => "Liveness",
            ProbeKind::Readiness => "Readiness",
        }
    }

    fn of(self, container: &Container) -> Option<&Probe> {
        match self {
            ProbeKind::Startup => container.startup_probe.as_ref(),
            ProbeKind::Liveness => container.liveness_probe.as_ref(),
            ProbeKind::Readiness => container.readiness_probe.as_ref(),
        }
    }
}

/// What one attempt came to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    Success,
    Warning(String),
    Failure(String),
    /// The probe itself could not be made; it counts for nothing.
    Error(String),
}

struct Worker {
    wake: Arc<Notify>,
    stop: CancellationToken,
}

type WorkerKey = (String, String, ProbeKind);

#[derive(Default)]
pub struct Probes {
    /// By kind and container id. A leaf lock.
    results: RwLock<HashMap<(ProbeKind, String), bool>>,
    /// By pod uid, container name and kind. A leaf lock.
    workers: Mutex<HashMap<WorkerKey, Worker>>,
}

impl Probes {
    pub fn result(&self, kind: ProbeKind, container_id: &str) -> Option<bool> {
        self.results.read().get(&(kind, container_id.to_owned())).copied()
    }

    /// Returns whether that was news.
    fn set(&self, kind: ProbeKind, container_id: &str, result: bool) -> bool {
        self.results
            .write()
            .insert((kind, container_id.to_owned()), result)
            != Some(result)
    }

    fn clear(&self, kind: ProbeKind, container_id: &str) {
        self.results.write().remove(&(kind, container_id.to_owned()));
    }

    /// Starts the workers that the pod's probes need and that do not run yet.
    pub fn add_pod(&self, kubelet: &Arc<Kubelet>, state: &Arc<PodState>, pod: &Pod) {
        let Some(spec) = &pod.spec else { return };
        let sidecars = spec.init_containers.iter().flatten().filter(|c| is_sidecar(c));
        for container in spec.containers.iter().chain(sidecars) {
            for kind in [ProbeKind::Startup, ProbeKind::Liveness, ProbeKind::Readiness] {
                let Some(probe) = kind.of(container) else { continue };
                let key = (pods::uid(pod).to_owned(), container.name.clone(), kind);
                let mut workers = self.workers.lock();
                if workers.contains_key(&key) {
                    continue;
                }
                let worker = Worker {
                    wake: Arc::new(Notify::new()),
                    stop: kubelet.shutdown.child_token(),
                };
                let (kubelet, state, container, probe) =
                    (kubelet.clone(), state.clone(), container.clone(), probe.clone());
                let (wake, stop) = (worker.wake.clone(), worker.stop.clone());
                tokio::spawn(skiff_supervise::finished("probe", move || {
                    let (kubelet, state) = (kubelet.clone(), state.clone());
                    let task =
                        worker::ProbeWorker::new(kubelet, state, container.clone(), kind, probe.clone());
                    task.run(wake.clone(), stop.clone())
                }));
                workers.insert(key, worker);
            }
        }
    }

    /// Something about the pod's containers changed; a worker may have a new one to look at.
    pub fn wake_pod(&self, uid: &str) {
        for ((pod, _, _), worker) in self.workers.lock().iter() {
            if pod == uid {
                worker.wake.notify_one();
            }
        }
    }

    /// Liveness and startup no longer matter once the pod is told to end; readiness still takes it out of
    /// endpoints.
    pub fn stop_liveness_and_startup(&self, uid: &str) {
        self.workers.lock().retain(|(pod, _, kind), worker| {
            let stop = pod == uid && *kind != ProbeKind::Readiness;
            if stop {
                worker.stop.cancel();
            }
            !stop
        });
    }

    pub fn remove_pod(&self, uid: &str) {
        self.workers.lock().retain(|(pod, _, _), worker| {
            if pod == uid {
                worker.stop.cancel();
            }
            pod != uid
        });
    }
}

impl ProbeVerdicts for Probes {
    fn startup(&self, container_id: &str) -> Option<bool> {
        self.result(ProbeKind::Startup, container_id)
    }
    fn liveness(&self, container_id: &str) -> Option<bool> {
        self.result(ProbeKind::Liveness, container_id)
    }
}

impl Readiness for Probes {
    fn startup(&self, container_id: &str) -> Option<bool> {
        self.result(ProbeKind::Startup, container_id)
    }
    fn readiness(&self, container_id: &str) -> Option<bool> {
        self.result(ProbeKind::Readiness, container_id)
    }
}
