//! What is mounted into a container: its volumes, /etc/hosts and the file for its last words. Makes those
//! files; the runtime does the mounting.

use std::collections::HashMap;
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use k8s_openapi::api::core::v1::{Container, Pod, VolumeMount};
use skiff_cri::v1;

use crate::hosts;
use crate::images::ImageVolume;
use crate::pods;
use crate::volumes::{MountedVolumes, Volumes, sub_path};

const ETC_HOSTS: &str = "/etc/hosts";

pub struct MountInputs<'a> {
    pub pod: &'a Pod,
    pub container: &'a Container,
    pub volumes: &'a Volumes,
    pub mounted: &'a MountedVolumes,
    /// By the name of the volume.
    pub image_volumes: &'a HashMap<String, ImageVolume>,
    pub env: &'a [(String, String)],
    pub pod_ips: &'a [String],
    pub cluster_domain: &'a str,
}

/// The error is a sentence for the user: it becomes CreateContainerConfigError.
pub fn container_mounts(inputs: &MountInputs<'_>) -> Result<Vec<v1::Mount>, String> {
    let MountInputs {
        pod,
        container,
        volumes,
        mounted,
        image_volumes,
        env,
        pod_ips,
        cluster_domain,
    } = *inputs;
    let mut mounts = Vec::new();
    let requested = container.volume_mounts.as_deref().unwrap_or_default();
    for (index, mount) in requested.iter().enumerate() {
        let volume = mounted.get(&mount.name).ok_or_else(|| {
            format!(
                "cannot find volume {:?} to mount into container {:?}",
                mount.name, container.name
            )
        })?;
        let mut host_path = volume.path.clone();
        let sub_path = sub_path::requested(mount, env)?;
        let image = image_volumes.get(&mount.name);
        if let (Some(path), None) = (&sub_path, image) {
            let target = volumes.sub_path_dir(pods::uid(pod), &mount.name, &container.name, index);
            host_path = sub_path::bind(&volume.path, path, &target).map_err(|error| {
                // What the host looks like inside is not for the user to learn.
                tracing::warn!(%error, volume = mount.name, container = container.name, "cannot prepare a sub-path");
                format!("failed to prepare subPath for volumeMount {:?} of container {:?}", mount.name, container.name)
            })?;
        }
        let container_path = if mount.mount_path.starts_with('/') {
            mount.mount_path.clone()
        } else {
            format!("/{}", mount.mount_path)
        };
        mounts.push(v1::Mount {
            container_path,
            host_path: host_path.to_string_lossy().into_owned(),
            readonly: mount.read_only == Some(true) || volume.read_only,
            propagation: propagation(mount)? as i32,
            recursive_read_only: mount.read_only == Some(true)
                && mount.recursive_read_only.as_deref() == Some("Enabled"),
            image: image.map(|image| v1::ImageSpec {
                image: image.id.clone(),
                user_specified_image: image.reference.clone(),
                ..Default::default()
            }),
            image_sub_path: image.and(sub_path).unwrap_or_default(),
            ..Default::default()
        });
    }
    let has_own_hosts = requested.iter().any(|m| m.mount_path == ETC_HOSTS);
    if !has_own_hosts && (!pod_ips.is_empty() || pods::is_host_network(pod)) {
        let path = volumes.pod_dir(pods::uid(pod)).join("etc-hosts");
        write_hosts(pod, &path, pod_ips, cluster_domain)
            .map_err(|e| format!("cannot write the hosts file: {e}"))?;
        mounts.push(v1::Mount {
            container_path: ETC_HOSTS.to_owned(),
            host_path: path.to_string_lossy().into_owned(),
            // Read-only only where it is the host's business.
            readonly: false,
            ..Default::default()
        });
    }
    if let Some(path) = container
        .termination_message_path
        .as_deref()
        .filter(|p| !p.is_empty())
    {
        let host_path = termination_log(&volumes.pod_dir(pods::uid(pod)), &container.name)
            .map_err(|e| format!("cannot make the termination-log file: {e}"))?;
        mounts.push(v1::Mount {
            container_path: path.to_owned(),
            host_path,
            ..Default::default()
        });
    }
    Ok(mounts)
}

/// The block volumes of a container, as devices.
pub fn container_devices(container: &Container, mounted: &MountedVolumes) -> Result<Vec<v1::Device>, String> {
    let devices = container.volume_devices.iter().flatten();
    devices
        .map(|device| {
            let volume = mounted.get(&device.name).ok_or_else(|| {
                format!(
                    "cannot find volume {:?} to pass into container {:?}",
                    device.name, container.name
                )
            })?;
            let permissions = if volume.read_only { "r" } else { "mrw" };
            Ok(v1::Device {
                container_path: device.device_path.clone(),
                host_path: volume.path.to_string_lossy().into_owned(),
                permissions: permissions.to_owned(),
            })
        })
        .collect()
}

fn propagation(mount: &VolumeMount) -> Result<v1::MountPropagation, String> {
    match mount.mount_propagation.as_deref() {
        None | Some("None") => Ok(v1::MountPropagation::PropagationPrivate),
        Some("HostToContainer") => Ok(v1::MountPropagation::PropagationHostToContainer),
        Some("Bidirectional") => Ok(v1::MountPropagation::PropagationBidirectional),
        Some(other) => Err(format!("invalid MountPropagation mode: {other:?}")),
    }
}

fn write_hosts(pod: &Pod, path: &Path, pod_ips: &[String], cluster_domain: &str) -> io::Result<()> {
    let aliases = pod
        .spec
        .as_ref()
        .and_then(|s| s.host_aliases.as_deref())
        .unwrap_or_default();
    let content = if pods::is_host_network(pod) {
        hosts::host_network(&std::fs::read_to_string(ETC_HOSTS)?, aliases)
    } else {
        let (hostname, domain) = hosts::hostname_and_domain(pod, cluster_domain);
        hosts::managed(pod_ips, &hostname, &domain, aliases)
    };
    if let Some(parent) = path.parent() {
        std::fs::create_dir_all(parent)?;
    }
    std::fs::write(path, content)?;
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o644))
}

/// A new file each time, so that an old message is not taken for a new one.
fn termination_log(pod_dir: &Path, container: &str) -> io::Result<String> {
    let directory = pod_dir.join("containers").join(container);
    std::fs::create_dir_all(&directory)?;
    let path = directory.join(format!("{:08x}", rand::random::<u32>()));
    std::fs::write(&path, b"")?;
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o666))?;
    Ok(path.to_string_lossy().into_owned())
}
