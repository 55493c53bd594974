//! The claims that were prepared on this node, for which pods, and the devices that drivers gave for them: on disk before a
//! driver is asked, so that whatever it did is undone. Pure but for reading and writing the file.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::Path;

use k8s_openapi::api::resource::v1::ResourceClaim;
use serde::{Deserialize, Serialize};
use skiff_devices::dra;

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Device {
    pub pool: String,
    pub device: String,
    pub requests: Vec<String>,
    pub cdi: Vec<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub share: Option<String>,
}

impl From<dra::Device> for Device {
    fn from(device: dra::Device) -> Self {
        Device {
            pool: device.pool_name,
            device: device.device_name,
            requests: device.request_names,
            cdi: device.cdi_device_ids,
            share: device.share_id,
        }
    }
}

impl Device {
    /// Whether it serves the request; an empty one is all of the claim.
    pub fn serves(&self, request: &str) -> bool {
        let serves = |own: &String| own == request || request.split('/').next() == Some(own);
        request.is_empty() || self.requests.is_empty() || self.requests.iter().any(serves)
    }
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Claim {
    pub uid: String,
    pub namespace: String,
    pub name: String,
    /// The uids of the pods that use it.
    pub pods: BTreeSet<String>,
    /// By driver.
    pub devices: BTreeMap<String, Vec<Device>>,
    /// All drivers have answered. A new process asks them again.
    #[serde(skip)]
    pub prepared: bool,
}

impl Claim {
    pub fn new(claim: &ResourceClaim) -> Result<Self, String> {
        let metadata = &claim.metadata;
        let name = metadata.name.clone().unwrap_or_default();
        let allocation = claim
            .status
            .as_ref()
            .and_then(|status| status.allocation.as_ref());
        let allocation = allocation.ok_or_else(|| format!("ResourceClaim {name}: not allocated"))?;
        let results = allocation
            .devices
            .iter()
            .flat_map(|devices| devices.results.iter().flatten());
        Ok(Claim {
            uid: metadata.uid.clone().unwrap_or_default(),
            namespace: metadata.namespace.clone().unwrap_or_default(),
            name,
            devices: results
                .map(|result| (result.driver.clone(), Vec::new()))
                .collect(),
            ..Claim::default()
        })
    }

    pub fn key(&self) -> String {
        key(&self.namespace, &self.name)
    }

    pub fn to_wire(&self) -> dra::Claim {
        dra::Claim {
            namespace: self.namespace.clone(),
            uid: self.uid.clone(),
            name: self.name.clone(),
        }
    }

    /// The CDI names of what serves the request.
    pub fn cdi(&self, request: &str) -> Vec<String> {
        let devices = self.devices.values().flatten();
        devices
            .filter(|device| device.serves(request))
            .flat_map(|device| device.cdi.iter().cloned())
            .collect()
    }
}

pub fn key(namespace: &str, name: &str) -> String {
    format!("{namespace}/{name}")
}

/// By namespace and name.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Record {
    pub claims: BTreeMap<String, Claim>,
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
}
