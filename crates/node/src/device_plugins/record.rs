//! Which devices containers have, and what their plugins want for them: on disk before a container that has them is made.
//! Pure but for reading and writing the file.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::Path;

use serde::{Deserialize, Serialize};
use skiff_devices::deviceplugin::ContainerAllocateResponse;

/// A device node of the host in a container.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct DeviceNode {
    pub container_path: String,
    pub host_path: String,
    pub permissions: String,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct HostMount {
    pub container_path: String,
    pub host_path: String,
    pub read_only: bool,
}

/// The devices of one resource that a container has, and what comes with them.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Allocation {
    pub devices: BTreeSet<String>,
    /// The NUMA nodes of each device, as the plugin told them when it was allocated.
    pub numa: BTreeMap<String, Vec<i64>>,
    pub env: BTreeMap<String, String>,
    pub mounts: Vec<HostMount>,
    pub nodes: Vec<DeviceNode>,
    pub annotations: BTreeMap<String, String>,
    pub cdi: Vec<String>,
}

impl Allocation {
    pub fn new(
        devices: BTreeSet<String>,
        numa: BTreeMap<String, Vec<i64>>,
        answer: ContainerAllocateResponse,
    ) -> Self {
        Allocation {
            devices,
            numa,
            env: answer.envs.into_iter().collect(),
            mounts: { answer.mounts.into_iter() }
                .map(|mount| HostMount {
                    container_path: mount.container_path,
                    host_path: mount.host_path,
                    read_only: mount.read_only,
                })
                .collect(),
            nodes: { answer.devices.into_iter() }
                .map(|node| DeviceNode {
                    container_path: node.container_path,
                    host_path: node.host_path,
                    permissions: node.permissions,
                })
                .collect(),
            annotations: answer.annotations.into_iter().collect(),
            cdi: answer.cdi_devices.into_iter().map(|device| device.name).collect(),
        }
    }
}

/// By resource.
pub type OfContainer = BTreeMap<String, Allocation>;

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Record {
    /// By pod's uid and container.
    pub pods: BTreeMap<String, BTreeMap<String, OfContainer>>,
    /// Resources that had a plugin. Until it registers again they have no devices.
    pub resources: BTreeSet<String>,
}

impl Record {
    pub fn load(path: &Path) -> io::Result<Self> {
        match std::fs::read(path) {
            Ok(bytes) => serde_json::from_slice(&bytes).map_err(io::Error::from),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Record::default()),
            Err(error) => Err(error),
        }
    }

    pub fn save(&self, path: &Path) -> io::Result<()> {
        skiff_fs::write_durably(path, &serde_json::to_vec(self)?, 0o600)
    }

    pub fn of_container(&self, uid: &str, container: &str) -> Option<&OfContainer> {
        self.pods.get(uid)?.get(container)
    }

    /// The devices of a resource that containers have.
    pub fn in_use(&self, resource: &str) -> BTreeSet<String> {
        let containers = self.pods.values().flat_map(BTreeMap::values);
        let allocations = containers.filter_map(|container| container.get(resource));
        allocations.flat_map(|one| one.devices.iter().cloned()).collect()
    }
}
