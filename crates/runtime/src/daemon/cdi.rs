//! The Container Device Interface: what a device that is named by `vendor/class=name` adds to a container, from the files that
//! vendors put into `/etc/cdi` and `/var/run/cdi`. It reads those files and nothing else.
//!
//! Hooks, network devices and Intel RDT are refused by name: this runtime has none of them.

use std::collections::{BTreeMap, BTreeSet};
use std::io::Read;
use std::path::{Path, PathBuf};

use serde::Deserialize;

const VERSIONS: [&str; 10] = [
    "0.1.0", "0.2.0", "0.3.0", "0.4.0", "0.5.0", "0.6.0", "0.7.0", "0.8.0", "1.0.0", "1.1.0",
];
const MAX_FILE: u64 = 4 << 20;
const MAX_FILES: usize = 1024;

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct Spec {
    cdi_version: String,
    kind: String,
    #[serde(default)]
    #[allow(dead_code, reason = "a field of the format that says nothing to a runtime")]
    annotations: BTreeMap<String, String>,
    devices: Vec<Device>,
    #[serde(default)]
    container_edits: Edits,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct Device {
    name: String,
    #[serde(default)]
    #[allow(dead_code, reason = "a field of the format that says nothing to a runtime")]
    annotations: BTreeMap<String, String>,
    container_edits: Edits,
}

/// What is added to a container.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct Edits {
    pub env: Vec<String>,
    pub device_nodes: Vec<DeviceNode>,
    net_devices: Vec<serde_json::Value>,
    hooks: Vec<serde_json::Value>,
    pub mounts: Vec<Mount>,
    intel_rdt: Option<serde_json::Value>,
    #[serde(rename = "additionalGids")]
    pub additional_gids: Vec<u32>,
}

#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct DeviceNode {
    pub path: String,
    #[serde(default)]
    pub host_path: String,
    #[serde(default, rename = "type")]
    pub kind: String,
    #[serde(default)]
    pub major: u32,
    #[serde(default)]
    pub minor: u32,
    pub file_mode: Option<u32>,
    #[serde(default)]
    pub permissions: String,
    pub uid: Option<u32>,
    pub gid: Option<u32>,
}

#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Mount {
    pub host_path: String,
    pub container_path: String,
    #[serde(default)]
    pub options: Vec<String>,
    #[serde(default, rename = "type")]
    pub kind: String,
}

impl Edits {
    fn append(&mut self, other: &Edits) {
        self.env.extend(other.env.iter().cloned());
        self.device_nodes.extend(other.device_nodes.iter().cloned());
        self.mounts.extend(other.mounts.iter().cloned());
        self.additional_gids.extend(&other.additional_gids);
    }

    /// What this runtime cannot do.
    fn unsupported(&self) -> Option<&'static str> {
        if !self.hooks.is_empty() {
            Some("hooks")
        } else if !self.net_devices.is_empty() {
            Some("netDevices")
        } else if self.intel_rdt.is_some() {
            Some("intelRdt")
        } else {
            None
        }
    }
}

/// Reads a spec, or says why it is none. The error goes to the log: it is not the pod's fault.
fn read(path: &Path) -> Result<Spec, String> {
    let flags = rustix::fs::OFlags::RDONLY | rustix::fs::OFlags::NONBLOCK | rustix::fs::OFlags::CLOEXEC;
    let opened =
        rustix::fs::open(path, flags, rustix::fs::Mode::empty()).map_err(|error| error.to_string())?;
    let file = std::fs::File::from(opened);
    let metadata = file.metadata().map_err(|error| error.to_string())?;
    if !metadata.is_file() || metadata.len() > MAX_FILE {
        return Err("it is not a small file".to_owned());
    }
    let mut text = String::new();
    file.take(MAX_FILE)
        .read_to_string(&mut text)
        .map_err(|error| error.to_string())?;
    let is_json = path.extension().is_some_and(|extension| extension == "json");
    let spec: Spec = if is_json {
        serde_json::from_str(&text).map_err(|error| error.to_string())?
    } else {
        serde_saphyr::from_str(&text).map_err(|error| error.to_string())?
    };
    if !VERSIONS.contains(&spec.cdi_version.trim_start_matches('v')) {
        return Err(format!("invalid version {:?}", spec.cdi_version));
    }
    if !{ spec.kind.split_once('/') }.is_some_and(|(vendor, class)| !vendor.is_empty() && !class.is_empty()) {
        return Err(format!("invalid kind {:?}", spec.kind));
    }
    Ok(spec)
}

/// All specs, each with the rank of its folder.
fn specs(folders: &[PathBuf]) -> Vec<(usize, Spec)> {
    let mut found = Vec::new();
    for (rank, folder) in folders.iter().enumerate() {
        let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
        let mut paths: Vec<PathBuf> = entries
            .map(|entry| entry.path())
            .filter(|path| path.extension().is_some_and(|one| one == "json" || one == "yaml"))
            .take(MAX_FILES)
            .collect();
        paths.sort();
        for path in paths {
            match read(&path) {
                Ok(spec) => found.push((rank, spec)),
                Err(error) => tracing::warn!(path = %path.display(), error, "failed to load the CDI spec"),
            }
        }
    }
    found
}

/// What the devices add to a container, in the order in which they are named. The error is for the pod's event.
pub fn edits(folders: &[PathBuf], names: &[&str]) -> Result<Edits, String> {
    let mut edits = Edits::default();
    if names.is_empty() {
        return Ok(edits);
    }
    let specs = specs(folders);
    let mut used = BTreeSet::new();
    let mut unresolved = Vec::new();
    for name in names {
        let of = |spec: &Spec, device: &Device| format!("{}={}", spec.kind, device.name) == **name;
        let mut best: Vec<(usize, usize, &Device)> = Vec::new();
        for (place, (rank, spec)) in specs.iter().enumerate() {
            for device in spec.devices.iter().filter(|device| of(spec, device)) {
                if best.first().is_some_and(|(known, ..)| known < rank) {
                    best.clear();
                }
                best.push((*rank, place, device));
            }
        }
        // COMPAT: a device that two specs of one folder define is none.
        let [(_, place, device)] = best.as_slice() else {
            unresolved.push(*name);
            continue;
        };
        let spec = &specs[*place].1;
        for one in [&spec.container_edits, &device.container_edits] {
            if let Some(what) = one.unsupported() {
                return Err(format!(
                    "CDI device injection failed: {what} of CDI device {name} are not supported by this runtime"
                ));
            }
        }
        if used.insert(*place) {
            edits.append(&spec.container_edits);
        }
        edits.append(&device.container_edits);
    }
    if unresolved.is_empty() {
        Ok(edits)
    } else {
        Err(format!(
            "CDI device injection failed: unresolvable CDI devices {}",
            unresolved.join(", ")
        ))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GPU: &str = r#"{"cdiVersion": "0.5.0", "kind": "vendor.com/gpu", "containerEdits": {"env": ["ALL=1"]},
        "devices": [{"name": "one", "containerEdits": {"env": ["ONE=1"], "deviceNodes": [{"path": "/dev/gpu", "hostPath": "/dev/null"}],
            "mounts": [{"hostPath": "/tmp", "containerPath": "/gpu", "options": ["ro", "rbind"]}]}},
            {"name": "two", "containerEdits": {"env": ["TWO=1"]}},
            {"name": "hooked", "containerEdits": {"hooks": [{"hookName": "createContainer", "path": "/bin/x"}]}}]}"#;

    #[test]
    fn devices_are_found_in_the_specs() {
        let folder = tempfile::tempdir().unwrap();
        let (etc, run) = (folder.path().join("etc"), folder.path().join("run"));
        for one in [&etc, &run] {
            std::fs::create_dir(one).unwrap();
        }
        std::fs::write(etc.join("gpu.json"), GPU).unwrap();
        std::fs::write(etc.join("bad.json"), "{").unwrap();
        std::fs::write(
            etc.join("old.json"),
            r#"{"cdiVersion": "9.0.0", "kind": "vendor.com/x", "devices": []}"#,
        )
        .unwrap();
        std::fs::write(
            run.join("nic.yaml"),
            "cdiVersion: 0.7.0\nkind: vendor.com/nic\ndevices:\n- name: \"0\"\n  containerEdits:\n    additionalGids: [44]\n    env: [NIC=run]\n",
        )
        .unwrap();
        let folders = [etc.clone(), run.clone()];
        let env = |names: &[&str]| edits(&folders, names).map(|edits| edits.env.join(" "));
        assert_eq!(env(&[]).as_deref(), Ok(""));
        // What the spec adds for all of its devices is added once.
        assert_eq!(
            env(&["vendor.com/gpu=two", "vendor.com/gpu=one"]).as_deref(),
            Ok("ALL=1 TWO=1 ONE=1")
        );
        let nic = edits(&folders, &["vendor.com/nic=0"]).unwrap();
        assert_eq!(
            (nic.env, nic.additional_gids),
            (vec!["NIC=run".to_owned()], vec![44])
        );
        let missing = env(&["vendor.com/gpu=none", "vendor.com/gpu=one", "other"]).unwrap_err();
        assert_eq!(
            missing,
            "CDI device injection failed: unresolvable CDI devices vendor.com/gpu=none, other"
        );
        let hooked = env(&["vendor.com/gpu=hooked"]).unwrap_err();
        assert!(
            hooked.contains("hooks of CDI device vendor.com/gpu=hooked are not supported"),
            "{hooked}"
        );
        // A file of the second folder wins over one of the first; two of one folder are a conflict.
        std::fs::write(run.join("gpu.json"), GPU.replace("ALL=1", "ALL=2")).unwrap();
        assert_eq!(env(&["vendor.com/gpu=two"]).as_deref(), Ok("ALL=2 TWO=1"));
        std::fs::write(run.join("gpu2.json"), GPU).unwrap();
        assert!(env(&["vendor.com/gpu=two"]).is_err());
    }
}
