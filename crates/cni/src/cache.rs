//! What ADD leaves on disk for DEL, CHECK and GC: the result and the configuration that made it. The
//! configuration is kept because the file in the configuration directory may change while pods live.

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::{Attachment, Error, Network, Result};

#[derive(Serialize, Deserialize)]
pub(crate) struct Cached {
    kind: String,
    #[serde(rename = "containerId")]
    pub container_id: String,
    #[serde(rename = "ifName")]
    pub ifname: String,
    #[serde(rename = "networkName")]
    pub network_name: String,
    config: Value,
    pub result: Value,
}

/// Tells our files from another writer's in the same directory.
const KIND: &str = "skiffCniCacheV1";

impl Cached {
    pub fn network(&self) -> Option<Network> {
        Network::from_value(self.config.clone()).ok()
    }
}

fn results_dir(cache_dir: &Path) -> PathBuf {
    cache_dir.join("results")
}

fn file(network: &str, attachment: &Attachment) -> PathBuf {
    results_dir(&attachment.cache_dir).join(format!(
        "{network}-{}-{}",
        attachment.container_id, attachment.ifname
    ))
}

pub(crate) fn store(network: &Network, attachment: &Attachment, result: &Value) -> Result<()> {
    let cached = Cached {
        kind: KIND.into(),
        container_id: attachment.container_id.clone(),
        ifname: attachment.ifname.clone(),
        network_name: network.name.clone(),
        config: network.to_value(),
        result: result.clone(),
    };
    let path = file(&network.name, attachment);
    let dir = results_dir(&attachment.cache_dir);
    let bytes = serde_json::to_vec(&cached).map_err(|error| Error::Invalid(error.to_string()))?;
    let write = || {
        std::fs::create_dir_all(&dir)?;
        // Through a rename, so that a crash leaves no half a file. A name of its own: a network's name may
        // have a dot in it, and an extension would take the rest, the sandbox, off.
        let mut temporary = path.clone().into_os_string();
        temporary.push(".tmp");
        std::fs::write(&temporary, &bytes)?;
        std::fs::rename(&temporary, &path)
    };
    write().map_err(Error::io(format!("write {}", path.display())))
}

/// A missing or unreadable entry is no entry: DEL must work without it.
pub(crate) fn load(network: &str, attachment: &Attachment) -> Option<Cached> {
    let bytes = std::fs::read(file(network, attachment)).ok()?;
    serde_json::from_slice::<Cached>(&bytes)
        .ok()
        .filter(|cached| cached.kind == KIND)
}

pub(crate) fn remove(network: &str, attachment: &Attachment) {
    // Only the cache: DEL has already succeeded, and a left-over entry is collected by GC.
    let _ = std::fs::remove_file(file(network, attachment));
}

pub(crate) fn list(network: &str, cache_dir: &Path) -> Vec<Cached> {
    let Ok(entries) = std::fs::read_dir(results_dir(cache_dir)) else {
        return Vec::new();
    };
    entries
        .filter_map(|entry| serde_json::from_slice::<Cached>(&std::fs::read(entry.ok()?.path()).ok()?).ok())
        .filter(|cached| cached.kind == KIND && cached.network_name == network)
        .collect()
}
