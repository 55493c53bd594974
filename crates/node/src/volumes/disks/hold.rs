//! Holds the device of a block volume by a loop device, as upstream does: as long as it is held, the kernel gives its name and number to no
//! other disk. Containers get the device itself.

use std::path::{Path, PathBuf};

use super::host::{Host, ToolError, names_in, read_small};
use crate::volumes::blocking;

/// The loop devices that stand on something, and on what.
fn loops(host: &Host) -> Vec<(PathBuf, PathBuf)> {
    let folder = host.sys.join("block");
    let mut found = Vec::new();
    for name in names_in(&folder) {
        if !name.starts_with("loop") {
            continue;
        }
        if let Some(backing) = read_small(&folder.join(&name).join("loop/backing_file")) {
            let backing = backing.strip_suffix("(deleted)").unwrap_or(&backing).trim();
            found.push((host.dev.join(name), PathBuf::from(backing)));
        }
    }
    found
}

/// The loop device that stands on this one.
fn loop_on(host: &Host, device: &Path) -> Option<PathBuf> {
    let mut loops = loops(host).into_iter();
    let (held_by, _) = loops.find(|(_, backing)| backing.as_path() == device)?;
    Some(held_by)
}

/// Whether a loop device stands on this one, or on a partition of it.
pub fn is_held(host: &Host, device: &Path) -> bool {
    let device = resolved(device);
    let is_part = |backing: &Path| {
        let (Some(disk), Some(part)) = (device.file_name(), backing.file_name()) else {
            return false;
        };
        let shown = host.sys.join("block").join(disk).join(part);
        backing.parent() == device.parent() && shown.join("partition").exists()
    };
    let mut loops = loops(host).into_iter();
    loops.any(|(_, backing)| backing == device || is_part(&backing))
}

/// The kernel's table has the path that links lead to.
fn resolved(device: &Path) -> PathBuf {
    device.canonicalize().unwrap_or_else(|_| device.to_path_buf())
}

/// Safe to repeat, when one says so: the first time a loop device that is there is somebody else's, and may go with him. On a machine without
/// loop devices nothing holds the device.
pub async fn take(host: &Host, device: &Path, again: bool) -> Result<(), String> {
    let device = &resolved(device);
    let control = host.dev.join("loop-control");
    if again && loop_on(host, device).is_some() {
        return Ok(());
    }
    if !control.exists() {
        tracing::debug!(device = %device.display(), "no loop devices here: a block volume is not held");
        return Ok(());
    }
    let output = match host.run("losetup", &["-f", &device.to_string_lossy()]).await {
        Err(error @ ToolError::Missing { .. }) => {
            tracing::warn!(device = %device.display(), %error, "a block volume is not held");
            return Ok(());
        }
        output => output.map_err(|error| error.to_string())?,
    };
    match output.succeeded() {
        true => Ok(()),
        false => Err(format!(
            "makeLoopDevice failed for path {}: {}",
            device.display(),
            output.failure()
        )),
    }
}

/// Lets go once. Of several that hold a device, it does not matter whose loop device goes.
pub async fn let_go(host: &Host, device: &Path) -> Result<(), String> {
    match loop_on(host, &resolved(device)) {
        Some(held_by) => remove(host, held_by).await,
        None => Ok(()),
    }
}

/// Lets go of all that is below a folder. Safe to repeat.
pub async fn let_go_below(host: &Host, folder: &Path) -> Result<(), String> {
    let folder = resolved(folder);
    for (held_by, backing) in loops(host) {
        if backing.starts_with(&folder) {
            remove(host, held_by).await?;
        }
    }
    Ok(())
}

async fn remove(host: &Host, held_by: PathBuf) -> Result<(), String> {
    let output = host.run("losetup", &["-d", &held_by.to_string_lossy()]).await;
    let output = output.map_err(|error| error.to_string())?;
    let gone = held_by.clone();
    if output.succeeded() || !blocking(move || gone.exists()).await {
        return Ok(());
    }
    Err(format!(
        "removeLoopDevice failed for path {}: {}",
        held_by.display(),
        output.failure()
    ))
}
