//! What was allocated to a pod and what is in effect, in memory and in `<pods>/<uid>/resources.json`. Pure but for
//! reading and writing that file.

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};

use k8s_openapi::api::core::v1::{Container, Pod, PodSpec, ResourceRequirements};
use serde::{Deserialize, Serialize};
use skiff_meta::quantity::Quantity;

use crate::resources::{ResourceList, limit_milli, limit_value, milli_value, request, value};

const FILE: &str = "resources.json";

/// CPU in thousandths and memory in bytes, the resources that can be resized. Zero is not set.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Amounts {
    pub cpu_request: i64,
    pub cpu_limit: i64,
    pub memory_request: i64,
    pub memory_limit: i64,
}

impl Amounts {
    pub fn of(resources: Option<&ResourceRequirements>) -> Self {
        Amounts {
            cpu_request: request(resources, "cpu").map_or(0, milli_value),
            cpu_limit: limit_milli(resources, "cpu"),
            memory_request: request(resources, "memory").map_or(0, value),
            memory_limit: limit_value(resources, "memory"),
        }
    }

    /// A container's own, with the pod's limits where it has none: those bound it too.
    pub fn of_container(pod: &Pod, container: &Container) -> Self {
        let of_pod = Self::of(pod.spec.as_ref().and_then(|spec| spec.resources.as_ref()));
        let own = Self::of(container.resources.as_ref());
        let or = |own: i64, of_pod: i64| if own > 0 { own } else { of_pod };
        Amounts {
            cpu_limit: or(own.cpu_limit, of_pod.cpu_limit),
            memory_limit: or(own.memory_limit, of_pod.memory_limit),
            ..own
        }
    }

    /// These, with the memory of others.
    pub fn with_memory(self, other: Self) -> Self {
        Amounts {
            memory_request: other.memory_request,
            memory_limit: other.memory_limit,
            ..self
        }
    }

    /// These, with the CPU of others.
    pub fn with_cpu(self, other: Self) -> Self {
        Amounts {
            cpu_request: other.cpu_request,
            cpu_limit: other.cpu_limit,
            ..self
        }
    }
}

/// The resources of a pod and its containers that the node has promised.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Assigned {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pod: Option<ResourceRequirements>,
    #[serde(default)]
    pub containers: BTreeMap<String, ResourceRequirements>,
}

fn resizable(spec: &PodSpec) -> impl Iterator<Item = &Container> {
    spec.containers
        .iter()
        .chain(spec.init_containers.iter().flatten())
}

fn same_list(a: Option<&ResourceList>, b: Option<&ResourceList>) -> bool {
    let empty = ResourceList::new();
    let (a, b) = (a.unwrap_or(&empty), b.unwrap_or(&empty));
    let parse = |text: &str| Quantity::parse(text).ok();
    a.len() == b.len()
        && a.iter().all(|(name, amount)| {
            b.get(name)
                .is_some_and(|other| amount == other || parse(&amount.0) == parse(&other.0))
        })
}

/// By value: `1` is `1000m`, and nothing is no different from an empty list.
fn same(a: Option<&ResourceRequirements>, b: Option<&ResourceRequirements>) -> bool {
    let requests = |r: Option<&ResourceRequirements>| r.and_then(|r| r.requests.clone());
    let limits = |r: Option<&ResourceRequirements>| r.and_then(|r| r.limits.clone());
    same_list(requests(a).as_ref(), requests(b).as_ref()) && same_list(limits(a).as_ref(), limits(b).as_ref())
}

impl Assigned {
    pub fn of(spec: &PodSpec) -> Self {
        Assigned {
            pod: spec.resources.clone(),
            containers: resizable(spec)
                .map(|container| {
                    (
                        container.name.clone(),
                        container.resources.clone().unwrap_or_default(),
                    )
                })
                .collect(),
        }
    }

    /// Whether this is what the spec asks for.
    pub fn is_of(&self, spec: &PodSpec) -> bool {
        same(self.pod.as_ref(), spec.resources.as_ref())
            && resizable(spec).all(|container| match self.containers.get(&container.name) {
                Some(own) => same(Some(own), container.resources.as_ref()),
                None => true,
            })
    }

    /// The pod with these resources instead of those it asks for.
    pub fn applied(&self, pod: &Pod) -> Pod {
        let mut pod = pod.clone();
        if let Some(spec) = &mut pod.spec {
            spec.resources.clone_from(&self.pod);
            let containers = spec.containers.iter_mut();
            for container in containers.chain(spec.init_containers.iter_mut().flatten()) {
                if let Some(own) = self.containers.get(&container.name) {
                    container.resources = Some(own.clone());
                }
            }
        }
        pod
    }
}

/// What is known of one pod.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Record {
    pub allocated: Assigned,
    /// In effect, by container. Limits of the pod are included where the container has none.
    pub actuated: BTreeMap<String, Amounts>,
    /// In effect of the pod-level resources.
    #[serde(default)]
    pub actuated_pod: Amounts,
}

impl Record {
    /// Of a pod that is taken as it is.
    pub fn new(pod: &Pod) -> Self {
        let Some(spec) = &pod.spec else {
            return Self::default();
        };
        Record {
            allocated: Assigned::of(spec),
            actuated: resizable(spec)
                .map(|container| (container.name.clone(), Amounts::of_container(pod, container)))
                .collect(),
            actuated_pod: Amounts::of(spec.resources.as_ref()),
        }
    }

    fn file(pod_dir: &Path) -> PathBuf {
        pod_dir.join(FILE)
    }

    /// `None` if there is none, or none that can be read: the pod then has what it asks for, as before its first resize.
    pub fn load(pod_dir: &Path) -> Option<Self> {
        let file = Self::file(pod_dir);
        let bytes = std::fs::read(&file).ok()?;
        match serde_json::from_slice(&bytes) {
            Ok(record) => Some(record),
            Err(error) => {
                tracing::warn!(%error, file = %file.display(), "cannot read the resources allocated to a pod");
                None
            }
        }
    }

    /// Need not survive a power cut: neither does any container.
    pub fn save(&self, pod_dir: &Path) -> io::Result<()> {
        std::fs::create_dir_all(pod_dir)?;
        let bytes = serde_json::to_vec(self).map_err(io::Error::other)?;
        skiff_fs::write_atomically(&Self::file(pod_dir), &bytes, 0o600)
    }
}
