//! `hostPath`: a path of the node, checked against the type the pod asks for. Its owner and modes are not the pod's to
//! change, and nothing of it is ever removed.

use std::fs::{self, Metadata};
use std::io;
use std::os::unix::fs::{FileTypeExt, PermissionsExt};
use std::path::{Path, PathBuf};

use async_trait::async_trait;
use k8s_openapi::api::core::v1::HostPathVolumeSource;

use super::volume_type::{Ready, VolumeType, Wanted};
use super::{SetUpError, Volumes, blocking};

pub(super) struct HostPath;

fn source_of(wanted: &Wanted<'_>) -> Option<HostPathVolumeSource> {
    match wanted.claimed {
        Some(claimed) => claimed.spec()?.host_path.clone(),
        None => wanted.volume.host_path.clone(),
    }
}

#[async_trait]
impl VolumeType for HostPath {
    fn name(&self) -> &'static str {
        "host-path"
    }

    fn handles(&self, wanted: &Wanted<'_>) -> bool {
        source_of(wanted).is_some()
    }

    async fn set_up(&self, _: &Volumes, wanted: &Wanted<'_>) -> Result<Ready, SetUpError> {
        let source = source_of(wanted).unwrap_or_default();
        let path = blocking(move || check(&source)).await;
        Ok(Ready::at(path.map_err(|error| wanted.set_up_error(error))?))
    }
}

fn check(source: &HostPathVolumeSource) -> Result<PathBuf, String> {
    let path = Path::new(&source.path);
    if path.components().any(|c| c == std::path::Component::ParentDir) {
        return Err(format!(
            "invalid HostPath `{}`: must not contain '..'",
            source.path
        ));
    }
    let metadata = match fs::metadata(path) {
        Ok(metadata) => Some(metadata),
        Err(e) if e.kind() == io::ErrorKind::NotFound => None,
        Err(e) => return Err(e.to_string()),
    };
    let fail = |what: &str| {
        Err(format!(
            "hostPath type check failed: {} is not a {what}",
            source.path
        ))
    };
    let is = |check: fn(&Metadata) -> bool| metadata.as_ref().is_some_and(check);
    match source.type_.as_deref().unwrap_or_default() {
        "" => {}
        "DirectoryOrCreate" => {
            if metadata.is_none() {
                fs::create_dir_all(path)
                    .and_then(|()| fs::set_permissions(path, fs::Permissions::from_mode(0o755)))
                    .map_err(|e| e.to_string())?;
            } else if !is(Metadata::is_dir) {
                return fail("directory");
            }
        }
        "Directory" if !is(Metadata::is_dir) => return fail("directory"),
        "FileOrCreate" => {
            if metadata.is_none() {
                fs::write(path, b"")
                    .and_then(|()| fs::set_permissions(path, fs::Permissions::from_mode(0o644)))
                    .map_err(|e| e.to_string())?;
            } else if !is(Metadata::is_file) {
                return fail("file");
            }
        }
        "File" if !is(Metadata::is_file) => return fail("file"),
        "Socket" if !is(|m| m.file_type().is_socket()) => return fail("socket file"),
        "CharDevice" if !is(|m| m.file_type().is_char_device()) => return fail("character device"),
        "BlockDevice" if !is(|m| m.file_type().is_block_device()) => return fail("block device"),
        "Directory" | "File" | "Socket" | "CharDevice" | "BlockDevice" => {}
        other => return Err(format!("{other} is an invalid volume type")),
    }
    Ok(path.to_path_buf())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn types() {
        let dir = tempfile::tempdir().unwrap();
        let check = |name: &str, type_: &str, expected: Result<(), &str>| {
            let path = dir.path().join(name).to_string_lossy().into_owned();
            let source = HostPathVolumeSource {
                path: path.clone(),
                type_: Some(type_.to_owned()),
            };
            let expected =
                expected.map_err(|what| format!("hostPath type check failed: {path} is not a {what}"));
            assert_eq!(check(&source).map(|_| ()), expected, "{name} {type_}");
        };
        check("none", "", Ok(()));
        check("none", "Directory", Err("directory"));
        check("made/deep", "DirectoryOrCreate", Ok(()));
        check("made/deep", "Directory", Ok(()));
        check("made/deep", "File", Err("file"));
        check("f", "FileOrCreate", Ok(()));
        check("f", "File", Ok(()));
        check("f", "Socket", Err("socket file"));
        check("f", "CharDevice", Err("character device"));
        check("f", "BlockDevice", Err("block device"));
        let source = |path: &str| HostPathVolumeSource {
            path: path.into(),
            type_: None,
        };
        assert!(super::check(&source("/a/../b")).is_err());
    }
}
