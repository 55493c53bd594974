//! What the node remembers of a disk, in a file of its own below `<root>/disks`: who uses it, and what was done to the machine for it.
//! It is written before anything is done, and goes when everything is undone.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use super::fc::FibreChannel;
use super::iscsi::Target;

/// Nothing that this file writes comes near.
const MAX_BYTES: u64 = 4 << 20;
/// The most that a file name may have.
const MAX_NAME: usize = 255;

/// Which disk it is, and how one gets to it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Source {
    Iscsi(Target),
    Fc(FibreChannel),
    /// A device of the node, for the PersistentVolume of this name.
    Local {
        volume: String,
        device: PathBuf,
    },
}

impl Source {
    /// The folder of its type, which is the name of upstream's plugin.
    pub fn plugin(&self) -> &'static str {
        match self {
            Source::Iscsi(_) => "iscsi",
            Source::Fc(_) => "fc",
            Source::Local { .. } => "local-volume",
        }
    }

    /// Where it is mounted, or its device would be, below `plugins/kubernetes.io`: upstream's places. It is also the disk's name here.
    pub fn place(&self, block: bool) -> String {
        let folder = match self {
            Source::Iscsi(target) => target.folder(),
            Source::Fc(disk) => disk.folder(),
            Source::Local { volume, .. } if block => volume.clone(),
            Source::Local { volume, .. } => format!("mounts/{volume}"),
        };
        let devices = if block { "volumeDevices/" } else { "" };
        format!("{}/{devices}{folder}", self.plugin())
    }

    /// What is changed by one at a time.
    pub fn lock(&self) -> String {
        match self {
            Source::Iscsi(target) => target.iqn.clone(),
            other => format!("{}/{}", other.plugin(), other.place(false)),
        }
    }

    pub fn check(&self) -> Result<(), String> {
        let place = self.place(false);
        let mut names = place.split('/');
        match names.all(|name| (1..=MAX_NAME).contains(&name.len()) && !name.starts_with('.')) {
            true => Ok(()),
            false => Err(format!(
                "{}: the names of the disk make no file name: {place:?}",
                self.plugin()
            )),
        }
    }
}

/// A session that skiff has made, or was about to make.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Made {
    pub portal: String,
    pub iface: String,
    /// The iface was made for the volume, too.
    pub own_iface: bool,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Note {
    pub source: Source,
    /// Pods have the device, not a filesystem.
    pub block: bool,
    /// The uids of pods.
    pub users: BTreeSet<String>,
    /// Of iSCSI.
    #[serde(default)]
    pub made: Vec<Made>,
    /// Of Fibre Channel: it was not there before skiff had the machine look for it.
    #[serde(default)]
    pub appeared: bool,
    /// The device that a loop device holds.
    #[serde(default)]
    pub held: Option<PathBuf>,
    /// Since which boot the three above are true.
    pub boot: String,
}

fn file_of(folder: &Path, place: &str) -> PathBuf {
    use std::fmt::Write;
    let hash = Sha256::digest(place.as_bytes());
    let name = hash.iter().fold(String::new(), |mut text, byte| {
        let _ = write!(text, "{byte:02x}");
        text
    });
    folder.join(format!("{name}.json"))
}

/// Makes the file say what the note says; without a note there is none afterwards.
pub fn store(folder: &Path, place: &str, note: Option<&Note>) -> io::Result<()> {
    let file = file_of(folder, place);
    match note {
        Some(note) => {
            skiff_fs::create_folders_durably(folder, 0o700)?;
            skiff_fs::write_durably(&file, &serde_json::to_vec(note)?, 0o600)
        }
        None => match std::fs::remove_file(&file) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
            _ => Ok(()),
        },
    }
}

/// What an earlier life of the node has noted. Of an earlier boot only the users are left.
pub fn load(folder: &Path, boot: &str) -> BTreeMap<String, Note> {
    let files = std::fs::read_dir(folder).into_iter().flatten().flatten();
    let mut notes = BTreeMap::new();
    for file in files.map(|entry| entry.path()) {
        if file.extension().is_none_or(|extension| extension != "json") {
            continue;
        }
        match read(&file) {
            Ok(mut note) => {
                if note.boot != boot {
                    note.boot = boot.to_owned();
                    note.made.clear();
                    note.appeared = false;
                    note.held = None;
                }
                notes.insert(note.source.place(note.block), note);
            }
            // It stays: what it stands for is not known.
            Err(error) => tracing::error!(file = %file.display(), %error, "cannot read the note of a disk"),
        }
    }
    notes
}

fn read(file: &Path) -> io::Result<Note> {
    use std::io::Read;
    let mut text = Vec::new();
    std::fs::File::open(file)?
        .take(MAX_BYTES)
        .read_to_end(&mut text)?;
    Ok(serde_json::from_slice(&text)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn notes_survive_and_know_the_boot() {
        let dir = tempfile::tempdir().unwrap();
        let folder = dir.path().join("disks");
        let note = Note {
            source: Source::Fc(
                FibreChannel::new(Some(&["50060e801049cfd1".to_owned()]), Some(3), None).unwrap(),
            ),
            block: true,
            users: BTreeSet::from(["u1".to_owned()]),
            made: vec![Made {
                portal: "p".to_owned(),
                iface: "i".to_owned(),
                own_iface: true,
            }],
            appeared: true,
            held: Some(PathBuf::from("/dev/sdx")),
            boot: "b1".to_owned(),
        };
        let place = note.source.place(true);
        assert_eq!(place, "fc/volumeDevices/50060e801049cfd1-lun-3");
        store(&folder, &place, Some(&note)).unwrap();
        std::fs::write(folder.join("broken.json"), "{").unwrap();
        assert_eq!(
            load(&folder, "b1"),
            BTreeMap::from([(place.clone(), note.clone())])
        );
        let later = load(&folder, "b2");
        assert_eq!(later[&place].users, note.users);
        assert!(later[&place].made.is_empty() && !later[&place].appeared && later[&place].held.is_none());
        store(&folder, &place, None).unwrap();
        store(&folder, &place, None).unwrap();
        assert!(load(&folder, "b1").is_empty());
        assert!(folder.join("broken.json").exists());
    }

    #[test]
    fn places_are_upstreams() {
        let local = Source::Local {
            volume: "pv".to_owned(),
            device: PathBuf::from("/dev/x"),
        };
        assert_eq!(local.place(false), "local-volume/mounts/pv");
        assert_eq!(local.place(true), "local-volume/volumeDevices/pv");
        local.check().unwrap();
        let ids: Vec<String> = (0..20).map(|n| format!("{n:032}")).collect();
        let long = Source::Fc(FibreChannel::new(None, None, Some(&ids)).unwrap());
        assert!(long.check().is_err());
    }
}
