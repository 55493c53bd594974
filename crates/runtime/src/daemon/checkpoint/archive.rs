//! The archive of a checkpoint, in the form that CRI-O and containerd write: CRIU's images in `checkpoint/`, beside them what the
//! container was. It has the container's memory in it, so it is for root alone; and it has its name only when it is complete.

use super::super::record::{ContainerRecord, SandboxRecord};
use super::{DUMP_LOG, diff};
use crate::init::spec::{InitSpec, MountKind};
use rustix::fs::{AtFlags, CWD, Mode, OFlags, openat};
use serde_json::{Value, json};
use std::ffi::OsString;
use std::fs::File;
use std::io::{self, Seek, Write};
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::Path;
use std::time::Instant;
use tar::{Builder, EntryType, Header};

const STATS: &str = "stats-dump";
/// CRIU's images, the archive, and the layer of changed files that goes into it, may each take one part of this many of what the disk has free.
pub(super) const DISK_SHARE: u64 = 4;

/// Where the archive goes: a folder that is held open, and a name in it.
pub(super) struct Destination {
    folder: OwnedFd,
    name: OsString,
}

/// What `config.dump` and `spec.dump` say.
pub(super) struct Summary {
    config: Value,
    spec: Value,
}

impl Destination {
    pub(super) fn open(location: &Path) -> io::Result<Destination> {
        let invalid = |why: &'static str| io::Error::new(io::ErrorKind::InvalidInput, why);
        let (Some(folder), Some(name)) = (location.parent(), location.file_name()) else {
            return Err(invalid("the location must name a file"));
        };
        if !location.is_absolute() {
            return Err(invalid("the location must be an absolute path"));
        }
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let folder = openat(CWD, folder, flags, Mode::empty())?;
        match rustix::fs::statat(&folder, name, AtFlags::SYMLINK_NOFOLLOW) {
            Err(rustix::io::Errno::NOENT) => {}
            Ok(_) => return Err(io::ErrorKind::AlreadyExists.into()),
            Err(error) => return Err(error.into()),
        }
        Ok(Destination {
            folder,
            name: name.to_owned(),
        })
    }

    /// Writes a file without a name: if this process ends, the file goes.
    pub(super) fn write(
        &self,
        images: &Path,
        work: &Path,
        upper: &Path,
        summary: &Summary,
        deadline: Instant,
    ) -> io::Result<File> {
        let mut archive = Builder::new(io::BufWriter::new(self.nameless(deadline)?));
        let mut folder = header(0);
        folder.set_entry_type(EntryType::Directory);
        folder.set_mode(0o700);
        archive.append_data(&mut folder, "checkpoint/", io::empty())?;
        for entry in std::fs::read_dir(images)? {
            let entry = entry?;
            let name = Path::new("checkpoint").join(entry.file_name());
            append_file(&mut archive, &name, &mut File::open(entry.path())?)?;
        }
        for (name, value) in [("config.dump", &summary.config), ("spec.dump", &summary.spec)] {
            let text = serde_json::to_vec_pretty(value)?;
            archive.append_data(&mut header(text.len() as u64), name, text.as_slice())?;
        }
        for (folder, name) in [(work, DUMP_LOG), (work, STATS), (images, STATS)] {
            match File::open(folder.join(name)) {
                Ok(mut file) => append_file(&mut archive, Path::new(name), &mut file)?,
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                Err(error) => return Err(error),
            }
        }
        let mut changes = self.nameless(deadline)?;
        {
            let mut buffered = io::BufWriter::new(&mut changes);
            diff::write_layer(upper, &mut buffered)?;
            buffered.flush()?;
        }
        changes.file.rewind()?;
        append_file(&mut archive, Path::new("rootfs-diff.tar"), &mut changes.file)?;
        let buffered = archive.into_inner()?;
        let file = buffered
            .into_inner()
            .map_err(io::IntoInnerError::into_error)?
            .file;
        file.sync_all()?;
        Ok(file)
    }

    fn nameless(&self, deadline: Instant) -> io::Result<Limited> {
        let flags = OFlags::RDWR | OFlags::TMPFILE | OFlags::CLOEXEC;
        let file = openat(&self.folder, ".", flags, Mode::from_raw_mode(0o600))?;
        let free = rustix::fs::fstatvfs(&file)?;
        Ok(Limited {
            file: File::from(file),
            deadline,
            left: free.f_bavail.saturating_mul(free.f_frsize) / DISK_SHARE,
        })
    }

    /// Gives the file its name. One that is there is not replaced: somebody was told of it.
    pub(super) fn publish(&self, file: &File) -> io::Result<()> {
        let path = format!("/proc/self/fd/{}", file.as_raw_fd());
        rustix::fs::linkat(CWD, path, &self.folder, &self.name, AtFlags::SYMLINK_FOLLOW)?;
        Ok(rustix::fs::fsync(&self.folder)?)
    }
}

fn header(size: u64) -> Header {
    let mut header = Header::new_gnu();
    header.set_mode(0o600);
    header.set_mtime(u64::try_from(jiff::Timestamp::now().as_second()).unwrap_or(0));
    header.set_size(size);
    header
}

fn append_file(archive: &mut Builder<impl Write>, name: &Path, file: &mut File) -> io::Result<()> {
    let size = file.metadata()?.len();
    archive.append_data(&mut header(size), name, io::Read::take(file, size))
}

/// A file that can be written until a time, and up to a size: a container may have files that are larger than the disk,
/// because most of them are holes.
struct Limited {
    file: File,
    deadline: Instant,
    left: u64,
}

impl Write for Limited {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if Instant::now() > self.deadline {
            return Err(io::ErrorKind::TimedOut.into());
        }
        let too_large = || {
            let why = "the container's files take too much of the disk's free space";
            io::Error::new(io::ErrorKind::StorageFull, why)
        };
        let left = self.left.checked_sub(bytes.len() as u64).ok_or_else(too_large)?;
        let written = self.file.write(bytes)?;
        self.left = left.saturating_add((bytes.len() - written) as u64);
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.flush()
    }
}

impl Summary {
    pub(super) fn new(record: &ContainerRecord, spec: &InitSpec, sandbox: SandboxRecord) -> Summary {
        let config = &record.config.0;
        let name = config.metadata.clone().unwrap_or_default().name;
        let image = config.image.clone().unwrap_or_default();
        let image = if image.user_specified_image.is_empty() {
            image.image
        } else {
            image.user_specified_image
        };
        let pod = sandbox.config.0.metadata.unwrap_or_default();
        let mut annotations = config.annotations.clone();
        // COMPAT: containerd's, by which tools find the pod.
        for (key, value) in [
            ("container-type", "container"),
            ("container-name", &name),
            ("image-name", &image),
            ("sandbox-id", &record.sandbox_id),
            ("sandbox-name", &pod.name),
            ("sandbox-namespace", &pod.namespace),
            ("sandbox-uid", &pod.uid),
        ] {
            annotations.insert(format!("io.kubernetes.cri.{key}"), value.to_owned());
        }
        let mounts: Vec<Value> = spec.mounts.iter().map(mount).collect();
        Summary {
            config: json!({
                "id": record.id, "name": name, "rootfsImage": image, "rootfsImageRef": record.image_id,
                "rootfsImageName": record.image_ref, "runtime": "skiff",
                "createdTime": time(record.created_at),
                "checkpointedTime": time(super::super::record::now_nanos()),
                "restoredTime": "0001-01-01T00:00:00Z", "restored": false,
            }),
            spec: json!({
                "ociVersion": "1.0.2",
                "hostname": sandbox.hostname,
                "root": {"path": "rootfs", "readonly": spec.rootfs.readonly},
                "process": {
                    "args": spec.process.args, "env": spec.process.env, "cwd": spec.process.cwd,
                    "terminal": spec.process.terminal, "noNewPrivileges": spec.process.no_new_privileges,
                },
                "mounts": mounts,
                "annotations": annotations,
                "linux": {"maskedPaths": spec.masked_paths, "readonlyPaths": spec.readonly_paths},
            }),
        }
    }
}

fn mount(mount: &crate::init::spec::Mount) -> Value {
    let (kind, source) = match &mount.kind {
        MountKind::Filesystem { fstype, .. } => (fstype.clone(), fstype.clone()),
        MountKind::Bind { source, .. } => ("bind".into(), source.to_string_lossy().into_owned()),
        MountKind::Image(_) => ("bind".into(), "image".into()),
        MountKind::Cgroup => ("cgroup".into(), "cgroup".into()),
    };
    let options: Vec<&str> = [
        (mount.readonly, "ro"),
        (mount.nosuid, "nosuid"),
        (mount.nodev, "nodev"),
        (mount.noexec, "noexec"),
    ]
    .iter()
    .filter(|(on, _)| *on)
    .map(|(_, option)| *option)
    .collect();
    json!({"destination": mount.target, "type": kind, "source": source, "options": options})
}

fn time(nanoseconds: i64) -> String {
    jiff::Timestamp::from_nanosecond(nanoseconds.into())
        .unwrap_or_default()
        .to_string()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn a_file_of_holes_does_not_fill_the_disk() {
        let upper = tempfile::tempdir().expect("a directory");
        let sparse = File::create(upper.path().join("sparse")).expect("a file");
        sparse.set_len(1 << 40).expect("holes");
        let mut layer = Limited {
            file: tempfile::tempfile().expect("a file"),
            deadline: Instant::now() + Duration::from_secs(60),
            left: 1 << 20,
        };
        let error = diff::write_layer(upper.path(), &mut layer).expect_err("too large");
        assert_eq!(error.kind(), io::ErrorKind::StorageFull, "{error}");
        assert!(layer.file.metadata().expect("a size").len() <= 1 << 20);
    }
}
