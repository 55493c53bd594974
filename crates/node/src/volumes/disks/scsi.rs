//! Disks as the kernel shows them in `/sys`: scans for new ones, finds the multipath device above a path, and removes what is no
//! longer used. Blocking, where it is not a tool that is run.

use std::io;
use std::path::{Path, PathBuf};

use rustix::fs::{Mode, OFlags, open};
use rustix::io::Errno;

use super::hold;
use super::host::{Host, names_in, read_small};
use crate::volumes::blocking;

fn name_of(device: &Path) -> Option<&str> {
    device.file_name()?.to_str()
}

/// The multipath device that a disk is a path of, or the device itself if it is one.
pub fn multipath_of(host: &Host, link: &Path) -> Option<PathBuf> {
    let device = host.resolve(link)?;
    let disk = name_of(&device)?;
    if disk.starts_with("dm-") {
        return Some(device);
    }
    let blocks = host.sys.join("block");
    let mut above = names_in(&blocks).into_iter();
    let above = above.find(|name| {
        name.starts_with("dm-")
            && blocks
                .join(name)
                .join("slaves")
                .join(disk)
                .symlink_metadata()
                .is_ok()
            && is_multipath(&blocks.join(name))
    })?;
    Some(device.with_file_name(above))
}

/// Any other device above a disk, a logical volume for instance, is a user of it.
fn is_multipath(block: &Path) -> bool {
    read_small(&block.join("dm/uuid")).is_none_or(|uuid| uuid.starts_with("mpath-"))
}

/// The disks that a multipath device consists of.
pub fn paths_of(host: &Host, multipath: &Path) -> Vec<PathBuf> {
    let Some(name) = name_of(multipath) else {
        return Vec::new();
    };
    let paths = names_in(&host.sys.join("block").join(name).join("slaves"));
    paths
        .into_iter()
        .map(|path| multipath.with_file_name(path))
        .collect()
}

/// Writes to a file of the kernel, which must be there.
fn write_kernel(path: &Path, text: &str) -> io::Result<()> {
    use std::io::Write;
    std::fs::OpenOptions::new()
        .write(true)
        .open(path)?
        .write_all(text.as_bytes())
}

/// Looks for one LUN only: others of the same host might be somebody else's, and would never be removed.
pub fn scan_lun(host: &Host, number: u32, lun: u32) -> io::Result<()> {
    let file = host.sys.join(format!("class/scsi_host/host{number}/scan"));
    // Channel and target are always 0 for iSCSI.
    write_kernel(&file, &format!("0 0 {lun}"))
        .map_err(|error| io::Error::new(error.kind(), format!("{}: {error}", file.display())))
}

/// Looks for new disks at all hosts.
pub fn scan_all(host: &Host) {
    let folder = host.sys.join("class/scsi_host");
    for name in names_in(&folder) {
        if let Err(error) = write_kernel(&folder.join(&name).join("scan"), "- - -") {
            tracing::debug!(host = name, %error, "cannot scan a SCSI host");
        }
    }
}

/// Whether somebody has a disk for himself: a mount, in whatever namespace, or a device above it.
fn is_in_use(device: &Path) -> io::Result<bool> {
    match open(
        device,
        OFlags::RDONLY | OFlags::EXCL | OFlags::CLOEXEC | OFlags::NONBLOCK,
        Mode::empty(),
    ) {
        Ok(_) => Ok(false),
        Err(Errno::BUSY) => Ok(true),
        // It went by itself.
        Err(Errno::NOENT | Errno::NXIO | Errno::NODEV) => Ok(false),
        Err(error) => Err(error.into()),
    }
}

/// The first of the disks, or of the multipath devices above them, that somebody has.
pub async fn first_in_use(host: &Host, disks: &[PathBuf]) -> Result<Option<PathBuf>, String> {
    // A disk below a multipath device is that one's; what counts is who has the latter.
    let top = |disk: &PathBuf| multipath_of(host, disk).unwrap_or_else(|| disk.clone());
    let mut tops: Vec<PathBuf> = disks.iter().map(top).collect();
    tops.sort();
    tops.dedup();
    // A pod that has the device does not have it for itself.
    let mut all = disks.iter().chain(&tops);
    if let Some(held) = all.find(|device| hold::is_held(host, device)) {
        return Ok(Some(held.clone()));
    }
    blocking(move || {
        for top in tops {
            if is_in_use(&top).map_err(|error| format!("{}: {error}", top.display()))? {
                return Ok(Some(top));
            }
        }
        Ok(None)
    })
    .await
}

/// Takes disks from the kernel, and the multipath devices above them first.
pub async fn remove(host: &Host, disks: Vec<PathBuf>) -> Result<(), String> {
    if let Some(device) = first_in_use(host, &disks).await? {
        return Err(format!("device {} is still in use", device.display()));
    }
    let mut above: Vec<PathBuf> = disks.iter().filter_map(|disk| multipath_of(host, disk)).collect();
    above.sort();
    above.dedup();
    for device in &above {
        let text = device.to_string_lossy();
        let flushed = host.run("multipath", &["-f", &text]).await;
        let flushed = flushed.map_err(|error| error.to_string())?;
        if !flushed.succeeded() {
            return Err(format!(
                "failed to flush multipath device {text}: {}",
                flushed.failure()
            ));
        }
    }
    for disk in disks {
        // Best effort, as upstream: what was mounted is written already.
        let text = disk.to_string_lossy().into_owned();
        if let Err(error) = host.run("blockdev", &["--flushbufs", &text]).await {
            tracing::debug!(disk = text, %error, "cannot flush a disk");
        }
        let Some(name) = name_of(&disk) else { continue };
        let file = host.sys.join("block").join(name).join("device/delete");
        let deleted = blocking(move || write_kernel(&file, "1")).await;
        match deleted {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                return Err(format!("failed to delete block device {text}: {error}"));
            }
            _ => {}
        }
    }
    Ok(())
}
