//! What is on the disk about volumes of drivers, where upstream's kubelet keeps it: paths, `vol_data.json`, and what of it is
//! found after a restart.

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

pub const FILE: &str = "vol_data.json";
/// The file is ours, but a disk may lie.
const MAX_BYTES: u64 = 1 << 16;

/// A volume of a driver.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Key {
    pub driver: String,
    pub handle: String,
}

impl Key {
    /// As the attach/detach controller and the Node's status name it.
    pub fn unique_name(&self) -> String {
        format!("kubernetes.io/csi/{}^{}", self.driver, self.handle)
    }

    pub fn attachment(&self, node: &str) -> String {
        format!("csi-{}", hash(&[&self.handle, &self.driver, node]))
    }
}

/// `vol_data.json`: enough to take the volume down.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Data {
    #[serde(rename = "specVolID", skip_serializing_if = "String::is_empty")]
    pub spec_vol_id: String,
    pub volume_handle: String,
    pub driver_name: String,
    #[serde(skip_serializing_if = "String::is_empty")]
    pub node_name: String,
    #[serde(rename = "attachmentID", skip_serializing_if = "String::is_empty")]
    pub attachment_id: String,
    #[serde(skip_serializing_if = "String::is_empty")]
    pub volume_lifecycle_mode: String,
}

impl Data {
    pub fn key(&self) -> Key {
        Key {
            driver: self.driver_name.clone(),
            handle: self.volume_handle.clone(),
        }
    }

    pub fn save(&self, directory: &Path) -> io::Result<()> {
        let text = serde_json::to_vec(self)?;
        skiff_fs::write_atomically(&directory.join(FILE), &text, 0o644)
    }

    /// `None` if there is none, or nothing to be read from it.
    pub fn load(directory: &Path) -> io::Result<Option<Data>> {
        use std::io::Read;
        let file = match std::fs::File::open(directory.join(FILE)) {
            Ok(file) => file,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(error),
        };
        let mut text = Vec::new();
        file.take(MAX_BYTES).read_to_end(&mut text)?;
        let data: Option<Data> = serde_json::from_slice(&text).ok();
        Ok(data.filter(|data| !data.driver_name.is_empty() && !data.volume_handle.is_empty()))
    }
}

pub fn hash(parts: &[&str]) -> String {
    use std::fmt::Write;
    let mut sha = Sha256::new();
    for part in parts {
        sha.update(part.as_bytes());
    }
    sha.finalize().iter().fold(String::new(), |mut text, byte| {
        let _ = write!(text, "{byte:02x}");
        text
    })
}

/// Where a volume is staged.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Stage {
    /// `…/csi/<driver>/<hash>`.
    Filesystem(PathBuf),
    /// The name of the PersistentVolume.
    Block(String),
}

/// The kubelet's root, and what is where below it.
#[derive(Clone, Debug)]
pub struct Layout {
    pub root: PathBuf,
}

impl Layout {
    fn plugin(&self) -> PathBuf {
        self.root.join("plugins/kubernetes.io/csi")
    }

    /// The directory with `globalmount` and the data of a staged filesystem.
    pub fn global(&self, key: &Key) -> PathBuf {
        self.plugin().join(&key.driver).join(hash(&[&key.handle]))
    }

    fn devices(&self) -> PathBuf {
        self.plugin().join("volumeDevices")
    }

    pub fn device_folder(&self, name: &str) -> PathBuf {
        self.devices().join(name)
    }

    pub fn device_data(&self, name: &str) -> PathBuf {
        self.device_folder(name).join("data")
    }

    pub fn device_staging(&self, name: &str) -> PathBuf {
        self.devices().join("staging").join(name)
    }

    pub fn device_publish(&self, name: &str, uid: &str) -> PathBuf {
        self.devices().join("publish").join(name).join(uid)
    }

    /// All volumes that are staged, or were about to be.
    pub fn staged(&self) -> Vec<(Key, Stage)> {
        let mut found = Vec::new();
        for driver in folders(&self.plugin()).filter(|driver| !driver.ends_with("volumeDevices")) {
            for volume in folders(&driver) {
                if let Ok(Some(data)) = Data::load(&volume) {
                    found.push((data.key(), Stage::Filesystem(volume)));
                }
            }
        }
        for volume in folders(&self.devices()) {
            let name = volume
                .file_name()
                .and_then(|name| name.to_str())
                .map(str::to_owned);
            if let (Ok(Some(data)), Some(name)) = (Data::load(&volume.join("data")), name) {
                found.push((data.key(), Stage::Block(name)));
            }
        }
        found
    }

    /// Which pods have which volumes, by uid.
    pub fn of_pods(&self) -> BTreeMap<String, Vec<Key>> {
        let mut found: BTreeMap<String, Vec<Key>> = BTreeMap::new();
        for pod in folders(&self.root.join("pods")) {
            let Some(uid) = pod.file_name().and_then(|name| name.to_str()) else {
                continue;
            };
            let mounted = folders(&pod.join("volumes/kubernetes.io~csi"))
                .filter_map(|volume| Data::load(&volume).ok().flatten());
            let devices = entries(&pod.join("volumeDevices/kubernetes.io~csi"))
                .filter_map(|link| link.file_name()?.to_str().map(|name| self.device_data(name)))
                .filter_map(|data| Data::load(&data).ok().flatten());
            let keys: Vec<Key> = mounted.chain(devices).map(|data| data.key()).collect();
            if !keys.is_empty() {
                found.insert(uid.to_owned(), keys);
            }
        }
        found
    }
}

fn entries(directory: &Path) -> impl Iterator<Item = PathBuf> + use<> {
    let read = std::fs::read_dir(directory).into_iter().flatten().flatten();
    read.map(|entry| entry.path())
}

fn folders(directory: &Path) -> impl Iterator<Item = PathBuf> + use<> {
    let read = std::fs::read_dir(directory).into_iter().flatten().flatten();
    read.filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()))
        .map(|entry| entry.path())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What upstream's kubelet wrote must be found, and the other way round.
    #[test]
    fn the_layout_is_upstreams() {
        let dir = tempfile::tempdir().unwrap();
        let layout = Layout {
            root: dir.path().to_path_buf(),
        };
        let key = Key {
            driver: "hostpath.csi.k8s.io".to_owned(),
            handle: "vol-1".to_owned(),
        };
        assert_eq!(key.unique_name(), "kubernetes.io/csi/hostpath.csi.k8s.io^vol-1");
        // printf 'vol-1hostpath.csi.k8s.ionode' | sha256sum
        assert_eq!(
            key.attachment("node"),
            "csi-7e7d75765aeb00ae79cbfb4279c54b0e1b63fb3a4c83636745d589939822e93d"
        );
        let global = layout.global(&key);
        // printf vol-1 | sha256sum
        assert!(global.ends_with(
            "plugins/kubernetes.io/csi/hostpath.csi.k8s.io/d2e8363faaac7ae76def3b14091d8eb5755f6b92e9531627aeec833a8731cc49"
        ));
        let write = |directory: &Path, text: &str| {
            std::fs::create_dir_all(directory).unwrap();
            std::fs::write(directory.join(FILE), text).unwrap();
        };
        write(
            &global,
            r#"{"driverName":"hostpath.csi.k8s.io","volumeHandle":"vol-1"}"#,
        );
        let text = r#"{"attachmentID":"csi-x","driverName":"d","nodeName":"n","specVolID":"pv","volumeHandle":"h","volumeLifecycleMode":"Persistent","seLinuxMountContext":""}"#;
        let pod = dir.path().join("pods/u1/volumes/kubernetes.io~csi/pv");
        write(&pod, text);
        write(&layout.device_data("raw"), text);
        write(&dir.path().join("pods/u2/volumes/kubernetes.io~csi/bad"), "{");
        let mut staged = layout.staged();
        staged.sort_by(|a, b| a.0.cmp(&b.0));
        let other = Key {
            driver: "d".to_owned(),
            handle: "h".to_owned(),
        };
        assert_eq!(
            staged,
            [
                (other.clone(), Stage::Block("raw".to_owned())),
                (key, Stage::Filesystem(global))
            ]
        );
        assert_eq!(layout.of_pods(), BTreeMap::from([("u1".to_owned(), vec![other])]));
        let loaded = Data::load(&pod).unwrap().unwrap();
        loaded.save(&pod).unwrap();
        assert_eq!(Data::load(&pod).unwrap().unwrap(), loaded);
        assert_eq!(loaded.attachment_id, "csi-x");
    }
}
