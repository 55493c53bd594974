//! Hostile images, and containers that must not start.

use crate::environment::{Environment, Pod, container_config, layer, oci_files, write_archive};
use skiff_cri::v1 as cri;
use std::path::Path;
use tar::EntryType;

/// What the kubelet asks to mask and to protect in every container that is not privileged.
pub const MASKED: &[&str] = &[
    "/proc/asound",
    "/proc/acpi",
    "/proc/interrupts",
    "/proc/kcore",
    "/proc/keys",
    "/proc/latency_stats",
    "/proc/timer_list",
    "/proc/timer_stats",
    "/proc/sched_debug",
    "/proc/scsi",
    "/sys/firmware",
    "/sys/devices/virtual/powercap",
];
pub const READONLY: &[&str] = &[
    "/proc/bus",
    "/proc/fs",
    "/proc/irq",
    "/proc/sys",
    "/proc/sysrq-trigger",
];

/// An entry of an image: a path, what it is, and its content or the link's target.
pub type Entry<'a> = (&'a str, EntryType, &'a str);

/// busybox with further entries on top, as a tar. Names are written raw: libraries refuse some of them.
pub fn layer_with(entries: &[Entry<'_>]) -> Vec<u8> {
    let mut plain = layer();
    // The end of an archive is two empty blocks.
    plain.truncate(plain.len() - 1024);
    let mut builder = tar::Builder::new(plain);
    for (path, kind, content) in entries {
        let mut header = tar::Header::new_gnu();
        header.set_entry_type(*kind);
        header.set_mode(0o755);
        header.set_uid(0);
        header.set_gid(0);
        header.set_mtime(1);
        header.as_old_mut().name[..path.len()].copy_from_slice(path.as_bytes());
        let body = match kind {
            EntryType::Regular => content.as_bytes(),
            EntryType::Char | EntryType::Block => {
                let (major, minor) = content.split_once(':').expect("major:minor");
                header
                    .set_device_major(major.parse().expect("major"))
                    .expect("major");
                header
                    .set_device_minor(minor.parse().expect("minor"))
                    .expect("minor");
                b""
            }
            _ => {
                header.as_old_mut().linkname[..content.len()].copy_from_slice(content.as_bytes());
                b""
            }
        };
        header.set_size(body.len() as u64);
        header.set_cksum();
        builder.append(&header, body).expect("append");
    }
    builder.into_inner().expect("tar")
}

/// Imports an image and returns its name.
pub fn image(environment: &Environment, name: &str, entries: &[Entry<'_>]) -> String {
    let name = format!("example.com/{name}:1");
    let plain = layer_with(entries);
    let archive = environment.path("hostile.tar");
    write_archive(&archive, &oci_files(&name, &plain, plain.clone()));
    let images = environment.runtime.as_ref().expect("started").images();
    images
        .import(&archive, &skiff_runtime::image::silent())
        .expect("import");
    name
}

/// A container as the kubelet would ask for it by default: masks, and no seccomp filter.
pub fn container(name: &str, image: &str, script: &str) -> cri::ContainerConfig {
    let mut config = container_config(name, script);
    if !image.is_empty() {
        config.image = Some(cri::ImageSpec {
            image: image.into(),
            ..Default::default()
        });
    }
    let security = crate::environment::security(&mut config);
    security.masked_paths = MASKED.iter().map(|path| path.to_string()).collect();
    security.readonly_paths = READONLY.iter().map(|path| path.to_string()).collect();
    security.seccomp = Some(cri::SecurityProfile {
        profile_type: cri::security_profile::ProfileType::Unconfined as i32,
        localhost_ref: String::new(),
    });
    config
}

pub fn volume(at: &str, source: &Path) -> cri::Mount {
    cri::Mount {
        container_path: at.into(),
        host_path: source.to_string_lossy().into_owned(),
        ..Default::default()
    }
}

/// A directory of the host to be a volume.
pub fn directory(environment: &Environment, name: &str) -> std::path::PathBuf {
    let path = environment.path(name);
    std::fs::create_dir_all(&path).expect("directory");
    path
}

/// The container must not start, for a reason that says `expected`.
pub async fn refused(pod: &mut Pod, config: cri::ContainerConfig, expected: &str) {
    let name = config.metadata.as_ref().expect("metadata").name.clone();
    let error = match pod.create(config).await {
        Err(error) => error,
        Ok(container_id) => pod
            .client
            .start_container(cri::StartContainerRequest { container_id })
            .await
            .expect_err(&name),
    };
    assert!(error.message().contains(expected), "{name}: {}", error.message());
}
