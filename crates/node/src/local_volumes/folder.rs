//! The directories of a node's volumes.

use std::io;
use std::path::{Path, PathBuf};

use super::{Offer, is_name};

#[derive(Clone, Debug)]
pub(crate) struct Folder {
    /// The volumes' directories are made in here.
    pub root: PathBuf,
    /// The kubelet's directory of pods: a volume that is mounted below it is not removed.
    pub pods: PathBuf,
}

#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Removal {
    /// Also if it was not there.
    Done,
    /// A pod has it: it may be on its way out.
    Mounted,
    /// Only an empty one was to be removed.
    Kept,
}

impl Folder {
    pub fn offer(&self) -> io::Result<Offer> {
        // The directory may not be there before the first volume; its parent is.
        let disk = std::iter::successors(Some(self.root.as_path()), |path| path.parent())
            .find_map(|path| rustix::fs::statvfs(path).ok());
        let names = match std::fs::read_dir(&self.root) {
            Ok(entries) => entries
                .map(|entry| Ok(entry?.file_name().into_string().ok()))
                .collect::<io::Result<Vec<_>>>()?,
            Err(error) if error.kind() == io::ErrorKind::NotFound => Vec::new(),
            Err(error) => return Err(error),
        };
        Ok(Offer {
            root: self.root.clone(),
            disk_size: disk.map_or(0, |disk| disk.f_blocks.saturating_mul(disk.f_frsize)),
            names: names.into_iter().flatten().collect(),
        })
    }

    fn directory(&self, name: &str) -> io::Result<PathBuf> {
        match is_name(name) {
            true => Ok(self.root.join(name)),
            false => Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                "not a name of a volume",
            )),
        }
    }

    /// Makes a volume's directory, for all users: which of them a pod runs as is not known. The directory around it is
    /// for root alone, so only what is mounted from there is open.
    pub fn make(&self, name: &str) -> io::Result<()> {
        use std::os::unix::fs::PermissionsExt;
        let directory = self.directory(name)?;
        skiff_fs::create_folders_durably(&self.root, 0o700)?;
        match std::fs::create_dir(&directory) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
            _ => {}
        }
        std::fs::set_permissions(&directory, std::fs::Permissions::from_mode(0o777))?;
        skiff_fs::sync_folder(&self.root)
    }

    /// Removes a volume's directory with its files.
    pub fn remove(&self, name: &str) -> io::Result<Removal> {
        let directory = self.directory(name)?;
        let at = Path::new("kubernetes.io~local-volume").join(name);
        let mounts = skiff_fs::mounts_below(&self.pods)?;
        if mounts.iter().any(|mount| mount.ends_with(&at)) {
            return Ok(Removal::Mounted);
        }
        skiff_fs::remove_tree(&directory)?;
        Ok(Removal::Done)
    }

    /// Removes a volume's directory if nothing is in it.
    pub fn remove_empty(&self, name: &str) -> io::Result<Removal> {
        match std::fs::remove_dir(self.directory(name)?) {
            Err(error) if error.kind() == io::ErrorKind::DirectoryNotEmpty => Ok(Removal::Kept),
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
            _ => Ok(Removal::Done),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn directories_are_open_inside_of_a_closed_one() {
        let dir = tempfile::tempdir().unwrap();
        let folder = Folder {
            root: dir.path().join("volumes"),
            pods: dir.path().join("pods"),
        };
        assert_eq!(folder.offer().unwrap().names, Vec::<String>::new());
        folder.make("pvc-1").unwrap();
        let volume = folder.root.join("pvc-1");
        std::fs::write(volume.join("kept"), "x").unwrap();
        folder.make("pvc-1").unwrap();
        let mode = |path: &Path| std::fs::metadata(path).unwrap().permissions().mode() & 0o7777;
        assert_eq!((mode(&folder.root), mode(&volume)), (0o700, 0o777));
        assert!(volume.join("kept").exists());
        let offer = folder.offer().unwrap();
        assert_eq!(offer.names, ["pvc-1"]);
        assert!(offer.disk_size > 0);

        assert_eq!(folder.remove_empty("pvc-1").unwrap(), Removal::Kept);
        assert!(volume.join("kept").exists());
        for name in ["", ".", "..", "../pods", "a/b", ".hidden"] {
            assert!(folder.make(name).is_err(), "{name}");
            assert!(folder.remove(name).is_err(), "{name}");
            assert!(folder.remove_empty(name).is_err(), "{name}");
        }
    }

    #[test]
    fn what_is_gone_is_removed() {
        let dir = tempfile::tempdir().unwrap();
        let folder = Folder {
            root: dir.path().join("volumes"),
            pods: dir.path().join("pods"),
        };
        std::fs::create_dir(&folder.pods).unwrap();
        folder.make("pvc-1").unwrap();
        std::fs::write(folder.root.join("pvc-1/file"), "x").unwrap();
        for _ in 0..2 {
            assert_eq!(folder.remove("pvc-1").unwrap(), Removal::Done);
            assert_eq!(folder.remove_empty("pvc-1").unwrap(), Removal::Done);
        }
        assert_eq!(folder.offer().unwrap().names, Vec::<String>::new());
    }
}
