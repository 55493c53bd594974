//! What pods of one cluster have on this machine: processes, sockets, mounts, namespaces, interfaces, addresses, rules
//! of the firewall, cgroups, folders, volumes, images, leases and logs. Two listings tell what a test left behind.

use anyhow::{Context, Result};
use std::collections::BTreeSet;
use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Folders below the data directory in which every entry belongs to one pod, sandbox, container, address, volume or image.
const FOLDERS: [&str; 13] = [
    "runtime/containers",
    "runtime/sandboxes",
    "runtime/images/blobs/sha256",
    "runtime/images/layers",
    "runtime/images/leases",
    "runtime/images/tmp",
    "runtime/cni/results",
    "kubelet/image_manager/pulling",
    "kubelet/pods",
    "volumes",
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
    for (family, table) in [
        ("ip", format!("skiff-{name}")),
        ("inet", format!("skiff-{name}-policy")),
        ("inet", format!("skiff-{name}-pods")),
        ("netdev", format!("skiff{}", record["slot"])),
    ] {
        firewall(family, &table, &pod_networks(&data), &mut found)?;
    }
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

/// The first three numbers of the cluster's IPv4 pod networks.
fn pod_networks(data: &Path) -> Vec<String> {
    let read = std::fs::read(data.join("cni/conf/10-skiff.conflist"));
    let conf: serde_json::Value = serde_json::from_slice(&read.unwrap_or_default()).unwrap_or_default();
    let subnets = conf["plugins"][0]["subnets"].as_array().into_iter().flatten();
    subnets
        .filter_map(|subnet| Some(subnet.as_str()?.rsplit_once('.')?.0.to_owned()))
        .collect()
}

/// The pods' addresses in a table, and the chains of their interfaces.
fn firewall(family: &str, table: &str, networks: &[String], found: &mut BTreeSet<String>) -> Result<()> {
    let listed = Command::new("nft")
        .args(["list", "table", family, table])
        .output()
        .context("nft: install Debian's nftables")?;
    let listed = String::from_utf8_lossy(&listed.stdout);
    for line in listed.lines() {
        if let Some(chain) = line.trim().strip_prefix("chain veth") {
            found.insert(format!("chain veth{} in {table}", chain.trim_end_matches(" {")));
        }
        for word in line.split(|c: char| c.is_whitespace() || ",:{}".contains(c)) {
            let Some((network, number)) = word.rsplit_once('.') else {
                continue;
            };
            let is_pod =
                networks.iter().any(|known| known == network) && !matches!(number, "0" | "1" | "255");
            if is_pod && word.parse::<Ipv4Addr>().is_ok() {
                found.insert(format!("address {word} in {table}"));
            }
        }
    }
    Ok(())
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
            let processes = std::fs::read_to_string(path.join("cgroup.procs")).unwrap_or_default();
            let place = path.display();
            found.extend(processes.lines().map(|pid| format!("process {pid} in {place}")));
            cgroups(&path, found);
        }
    }
}
