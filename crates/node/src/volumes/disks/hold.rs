//! Holds the device of a block volume by a loop device, as upstream does: as long as it is held, the kernel gives its name and number to no
//! other disk. Containers get the device itself.

use std::path::{Path, PathBuf};

use super::host::{Host, ToolError, names_in, read_small};
use crate::volumes::blocking;

/// The loop device that stands on this one.
fn loop_on(host: &Host, device: &Path) -> Option<PathBuf> {
    let folder = host.sys.join("block");
    let mut names = names_in(&folder).into_iter();
    let name = names.find(|name| {
        let backing = name
            .starts_with("loop")
            .then(|| read_small(&folder.join(name).join("loop/backing_file")));
        let Some(Some(backing)) = backing else {
            return false;
        };
        let backing = backing.strip_suffix("(deleted)").unwrap_or(&backing).trim();
        Path::new(backing) == device
    })?;
    Some(host.dev.join(name))
}

/// The kernel's table has the path that links lead to.
fn resolved(device: &Path) -> PathBuf {
    device.canonicalize().unwrap_or_else(|_| device.to_path_buf())
}

/// Safe to repeat. On a machine without loop devices nothing holds the device.
pub async fn take(host: &Host, device: &Path) -> Result<(), String> {
    let device = &resolved(device);
    let control = host.dev.join("loop-control");
    if loop_on(host, device).is_some() {
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

/// Safe to repeat.
pub async fn let_go(host: &Host, device: &Path) -> Result<(), String> {
    let device = &resolved(device);
    let Some(held_by) = loop_on(host, device) else {
        return Ok(());
    };
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
