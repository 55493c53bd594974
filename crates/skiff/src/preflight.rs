//! What must hold before anything starts. Each failure is a sentence that says what to do.

use crate::cluster::Cluster;
use anyhow::{Result, bail};
use std::fs;
use std::net::TcpListener;
use std::path::Path;

pub fn check_root() -> Result<()> {
    if !rustix::process::geteuid().is_root() {
        bail!("skiff needs root for containers and networks; run it with sudo");
    }
    Ok(())
}

/// Ports and kernel features. `runs_pods`: whether this machine is to be a node.
pub fn check(cluster: &Cluster, runs_pods: bool) -> Result<()> {
    check_root()?;
    check_port(cluster)?;
    if runs_pods { check_node() } else { Ok(()) }
}

/// What a machine needs to run pods.
pub fn check_node() -> Result<()> {
    check_kernel(
        &fs::read_to_string("/proc/filesystems").unwrap_or_default(),
        Path::new("/proc/self/ns"),
    )?;
    check_cgroups(&fs::read_to_string("/proc/self/mounts").unwrap_or_default())
}

fn check_port(cluster: &Cluster) -> Result<()> {
    match TcpListener::bind(cluster.bind) {
        Err(e) if e.kind() == std::io::ErrorKind::AddrInUse => bail!(
            "port {} is taken by another program; stop that, or choose another address with --bind IP:PORT",
            cluster.bind.port()
        ),
        Err(e) if e.kind() == std::io::ErrorKind::AddrNotAvailable => {
            bail!(
                "this machine does not have the address {}; choose another with --bind IP:PORT",
                cluster.bind.ip()
            )
        }
        Err(e) => bail!("cannot listen on {}: {e}", cluster.bind),
        Ok(_) => Ok(()),
    }
}

fn check_kernel(filesystems: &str, namespaces: &Path) -> Result<()> {
    let has_overlay = filesystems
        .lines()
        .any(|l| l.split_whitespace().last() == Some("overlay"));
    if !has_overlay && !module_loads("overlay") {
        bail!("the kernel has no overlay filesystem, which images need; load it with `modprobe overlay`");
    }
    for (namespace, what) in [
        ("net", "network"),
        ("pid", "process"),
        ("mnt", "mount"),
        ("uts", "host name"),
        ("ipc", "IPC"),
    ] {
        if !namespaces.join(namespace).exists() {
            bail!(
                "the kernel has no {what} namespaces, which containers need; use a kernel with CONFIG_NAMESPACES and CONFIG_{}_NS",
                namespace.to_uppercase()
            );
        }
    }
    Ok(())
}

fn check_cgroups(mounts: &str) -> Result<()> {
    let mounted = |kind: &str| mounts.lines().any(|l| l.split_whitespace().nth(2) == Some(kind));
    if !mounted("cgroup") && !mounted("cgroup2") {
        bail!(
            "no cgroups are mounted, which containers need; mount them with `mount -t cgroup2 none /sys/fs/cgroup`"
        );
    }
    Ok(())
}

/// The kernel loads a filesystem's module when one asks for it by name.
fn module_loads(name: &str) -> bool {
    std::process::Command::new("modprobe")
        .arg(name)
        .status()
        .is_ok_and(|s| s.success())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn missing_cgroups_are_explained() {
        assert!(check_cgroups("cgroup2 /sys/fs/cgroup cgroup2 rw 0 0\n").is_ok());
        assert!(check_cgroups("cpu /sys/fs/cgroup/cpu cgroup rw,cpu 0 0\n").is_ok());
        let error = check_cgroups("tmpfs /tmp tmpfs rw 0 0\n")
            .unwrap_err()
            .to_string();
        assert!(error.contains("mount them with"), "{error}");
    }

    #[test]
    fn missing_namespaces_are_explained() {
        let empty = tempfile::tempdir().unwrap();
        let error = check_kernel("nodev\toverlay\n", empty.path())
            .unwrap_err()
            .to_string();
        assert!(error.contains("CONFIG_NET_NS"), "{error}");
    }
}
