//! What pods of one cluster have on this machine: processes, sockets, mounts, namespaces, interfaces, addresses,
//! cgroups, folders, leases and logs. Two listings tell what a test left behind.

use anyhow::{Context, Result};
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

/// Folders below the data directory in which every entry belongs to one pod, sandbox, container or address.
const FOLDERS: [&str; 8] = [
    "runtime/containers",
    "runtime/sandboxes",
    "runtime/images/leases",
    "runtime/cni/results",
    "kubelet/pods",
    "logs",
    "cni/addresses/skiff-NAME",
    "cni/addresses/skiff-NAME/owners",
];

/// Files of the address allocator itself.
const BOOKKEEPING: [&str; 3] = ["/lock", "/owners", "/last_reserved_ip.0"];

/// Everything that pods of the cluster have, one line each.
pub fn belongings(name: &str) -> Result<BTreeSet<String>> {
    let data = crate::Cluster::data_dir(name);
    let run = Path::new("/run/skiff").join(name);
    let mut found = BTreeSet::new();
    for folder in FOLDERS {
        list(&data.join(folder.replace("NAME", name)), "file", &mut found);
    }
    found.retain(|file| !BOOKKEEPING.iter().any(|name| file.ends_with(name)));
    for folder in ["shim", "ns"] {
        list(&run.join(folder), "file", &mut found);
    }
    let mounts = std::fs::read_to_string("/proc/self/mountinfo")?;
    for point in mounts.lines().filter_map(|line| line.split(' ').nth(4)) {
        if Path::new(point).starts_with(&data) || Path::new(point).starts_with(&run) {
            found.insert(format!("mount {point}"));
        }
    }
    for process in shims(name)? {
        found.insert(format!("shim {process}"));
    }
    let record = std::fs::read(format!("/var/lib/skiff/clusters/{name}.json"))?;
    let record: serde_json::Value = serde_json::from_slice(&record)?;
    let ports = format!("/sys/class/net/skiff{}/brif", record["slot"]);
    list(Path::new(&ports), "interface", &mut found);
    for mount in cgroup_mounts(&mounts) {
        cgroups(&mount.join(format!("skiff-{name}")), &mut found);
    }
    Ok(found)
}

/// The pids of the cluster's shims.
pub fn shims(name: &str) -> Result<Vec<i32>> {
    let socket = format!("/run/skiff/{name}/shim/");
    let mut found = Vec::new();
    for entry in std::fs::read_dir("/proc").context("/proc")? {
        let entry = entry?;
        let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse().ok()) else {
            continue;
        };
        let cmdline = std::fs::read(entry.path().join("cmdline")).unwrap_or_default();
        let cmdline = String::from_utf8_lossy(&cmdline);
        if cmdline.contains("internal-shim") && cmdline.contains(&socket) {
            found.push(pid);
        }
    }
    Ok(found)
}

fn list(folder: &Path, kind: &str, found: &mut BTreeSet<String>) {
    for entry in std::fs::read_dir(folder).into_iter().flatten().flatten() {
        found.insert(format!("{kind} {}", entry.path().display()));
    }
}

/// Every hierarchy, also the named ones that have no controller.
fn cgroup_mounts(mountinfo: &str) -> Vec<PathBuf> {
    mountinfo
        .lines()
        .filter(|line| line.contains(" - cgroup"))
        .filter_map(|line| line.split(' ').nth(4))
        .map(PathBuf::from)
        .collect()
}

/// The cgroups of pods, and the processes in all cgroups of the cluster.
fn cgroups(directory: &Path, found: &mut BTreeSet<String>) {
    for entry in std::fs::read_dir(directory).into_iter().flatten().flatten() {
        if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            let path = entry.path();
            if path
                .components()
                .any(|part| part.as_os_str().to_string_lossy().starts_with("pod"))
            {
                found.insert(format!("cgroup {}", path.display()));
            }
            let processes = std::fs::read_to_string(entry.path().join("cgroup.procs")).unwrap_or_default();
            found.extend(processes.lines().map(|pid| format!("process {pid}")));
            cgroups(&entry.path(), found);
        }
    }
}
