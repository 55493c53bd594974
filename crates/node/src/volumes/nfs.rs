//! `nfs`: a directory of an NFS server, mounted by the host's own tools. Without them the pod is told which one is missing.

use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use async_trait::async_trait;
use k8s_openapi::api::core::v1::NFSVolumeSource;

use super::usage::Measure;
use super::volume_type::{Ready, VolumeType, Wanted};
use super::{SetUpError, Volumes, blocking, is_mount_point};

/// A server that is not there must not hold up the pod's other work for ever.
const TIMEOUT: Duration = Duration::from_secs(120);
const HELPER: &str = "mount.nfs";
/// Where the host keeps such tools, whatever the process' own path is.
const FOLDERS: [&str; 4] = ["/sbin", "/usr/sbin", "/usr/local/sbin", "/bin"];
/// The most of a tool's complaint that a user is shown.
const MAX_OUTPUT: usize = 1024;

pub(super) struct Nfs;

fn source_of(wanted: &Wanted<'_>) -> Option<NFSVolumeSource> {
    match wanted.claimed {
        Some(claimed) => claimed.spec()?.nfs.clone(),
        None => wanted.volume.nfs.clone(),
    }
}

#[async_trait]
impl VolumeType for Nfs {
    fn name(&self) -> &'static str {
        "nfs"
    }

    fn measure(&self) -> Option<Measure> {
        Some(Measure::FileSystem)
    }

    fn handles(&self, wanted: &Wanted<'_>) -> bool {
        source_of(wanted).is_some()
    }

    fn supports_mount_options(&self) -> bool {
        true
    }

    async fn set_up(&self, host: &Volumes, wanted: &Wanted<'_>) -> Result<Ready, SetUpError> {
        let source = source_of(wanted).unwrap_or_default();
        let read_only =
            source.read_only == Some(true) || wanted.claimed.is_some_and(|claimed| claimed.read_only);
        let target = host.volume_dir(wanted.uid(), self.name(), wanted.name());
        let options = wanted
            .claimed
            .map(|claimed| claimed.options.as_slice())
            .unwrap_or_default();
        let mounted = mount(&source, &target, options, read_only).await;
        mounted.map_err(|message| wanted.set_up_error(message))?;
        Ok(Ready {
            read_only,
            ..Ready::at(target)
        })
    }
}

/// The host's tool for this filesystem.
fn helper() -> Option<PathBuf> {
    let mut places = FOLDERS.iter().map(|folder| Path::new(folder).join(HELPER));
    places.find(|place| place.is_file())
}

/// `server:path`; an address of IPv6 stands in brackets.
fn device(source: &NFSVolumeSource) -> String {
    let is_v6 = source.server.contains(':') && !source.server.starts_with('[');
    match is_v6 {
        true => format!("[{}]:{}", source.server, source.path),
        false => format!("{}:{}", source.server, source.path),
    }
}

async fn mount(
    source: &NFSVolumeSource,
    target: &Path,
    options: &[String],
    read_only: bool,
) -> Result<(), String> {
    let place = target.to_path_buf();
    let mounted = blocking(move || {
        std::fs::create_dir_all(&place)?;
        is_mount_point(&place)
    });
    if mounted.await.map_err(|error| error.to_string())? {
        return Ok(());
    }
    let Some(helper) = helper() else {
        return Err(format!(
            "mount failed: this node has no {HELPER}, which mounts NFS: install nfs-common (Debian) or nfs-utils"
        ));
    };
    let mut all: Vec<&str> = options.iter().map(String::as_str).collect();
    if read_only {
        all.push("ro");
    }
    let mut command = tokio::process::Command::new(helper);
    // What begins with a dash is no option of the tool.
    let device = device(source);
    if device.starts_with('-') {
        return Err(format!("invalid NFS server {:?}", source.server));
    }
    command.arg(&device).arg(target);
    if !all.is_empty() {
        command.arg("-o").arg(all.join(","));
    }
    command.stdin(Stdio::null()).kill_on_drop(true);
    let output = match tokio::time::timeout(TIMEOUT, command.output()).await {
        Ok(output) => output.map_err(|error| format!("mount failed: {error}"))?,
        Err(_) => return Err(format!("mount failed: no answer of {device} in time")),
    };
    if output.status.success() {
        return Ok(());
    }
    let said = String::from_utf8_lossy(&output.stderr);
    let said: String = said.trim().chars().take(MAX_OUTPUT).collect();
    Err(format!("mount failed: {}\nOutput: {said}", output.status))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices() {
        let check = |server: &str, expected: &str| {
            let source = NFSVolumeSource {
                server: server.to_owned(),
                path: "/data".to_owned(),
                read_only: None,
            };
            assert_eq!(device(&source), expected);
        };
        check("files.example", "files.example:/data");
        check("fd00::1", "[fd00::1]:/data");
        check("[fd00::1]", "[fd00::1]:/data");
    }
}
