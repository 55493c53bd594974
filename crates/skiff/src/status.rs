//! `skiff status`: components, memory and nodes.

use crate::cli::{Output, StatusArgs};
use crate::cluster::Cluster;
use crate::daemon::existing;
use crate::supervise::ComponentState;
use anyhow::Result;
use k8s_openapi::api::core::v1::Node;
use kube::api::{Api, ListParams};
use serde::Serialize;
use std::collections::BTreeMap;
use std::fs;
use std::path::PathBuf;
use std::time::Duration;

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Report {
    name: String,
    state: &'static str,
    pid: Option<u32>,
    version: &'static str,
    endpoint: String,
    kubeconfig: PathBuf,
    data_dir: PathBuf,
    components: Vec<ComponentReport>,
    processes: Vec<Process>,
    memory_bytes: u64,
    nodes: Vec<NodeReport>,
    #[serde(skip_serializing_if = "Option::is_none")]
    nodes_error: Option<String>,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct ComponentReport {
    name: String,
    #[serde(flatten)]
    state: ComponentState,
    /// Components share one process: this is the memory of that process, not a share of it.
    process_memory_bytes: u64,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Process {
    pid: u32,
    /// `skiff`, or `shim` for the keeper of a pod.
    role: &'static str,
    memory_bytes: u64,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct NodeReport {
    name: String,
    ready: bool,
    version: String,
    addresses: Vec<String>,
}

pub async fn show(args: &StatusArgs) -> Result<()> {
    let cluster = existing(&args.cluster)?;
    let report = collect(&cluster).await?;
    match args.output {
        Some(Output::Json) => println!("{}", serde_json::to_string_pretty(&report)?),
        None => print(&report),
    }
    if report.pid.is_none() {
        // As `systemctl status` does for a unit that is not running.
        std::process::exit(3);
    }
    Ok(())
}

async fn collect(cluster: &Cluster) -> Result<Report> {
    let pid = cluster.running()?;
    let mut processes: Vec<Process> = Vec::new();
    if let Some(pid) = pid {
        processes.push(Process {
            pid,
            role: "skiff",
            memory_bytes: resident(pid),
        });
    }
    let run_dir = cluster.run_dir();
    let shims = shim_pids(&cluster.cgroup()).into_iter();
    processes.extend(shims.map(|pid| Process {
        pid,
        role: "shim",
        memory_bytes: resident(pid),
    }));
    let own = processes
        .iter()
        .find(|p| p.role == "skiff")
        .map_or(0, |p| p.memory_bytes);
    let states: BTreeMap<String, ComponentState> = fs::read(run_dir.join("components.json"))
        .ok()
        .and_then(|bytes| serde_json::from_slice(&bytes).ok())
        .unwrap_or_default();
    let components = states.into_iter().map(|(name, mut state)| {
        if pid.is_none() {
            "stopped".clone_into(&mut state.state);
        }
        ComponentReport {
            name,
            state,
            process_memory_bytes: own,
        }
    });
    let (nodes, nodes_error) = if pid.is_some() {
        match nodes(cluster).await {
            Ok(nodes) => (nodes, None),
            Err(error) => (vec![], Some(format!("{error:#}"))),
        }
    } else {
        (vec![], None)
    };
    Ok(Report {
        name: cluster.name.clone(),
        state: if pid.is_some() { "running" } else { "stopped" },
        pid,
        version: crate::VERSION,
        endpoint: cluster.endpoint(),
        kubeconfig: cluster.kubeconfig(),
        data_dir: cluster.data_dir.clone(),
        components: components.collect(),
        memory_bytes: processes.iter().map(|p| p.memory_bytes).sum(),
        processes,
        nodes,
        nodes_error,
    })
}

async fn nodes(cluster: &Cluster) -> Result<Vec<NodeReport>> {
    let client = skiff_client::remote(&cluster.kubeconfig(), None).await?;
    let api: Api<Node> = Api::all(client);
    let list = tokio::time::timeout(Duration::from_secs(5), api.list(&ListParams::default())).await??;
    Ok(list.items.into_iter().map(node).collect())
}

fn node(node: Node) -> NodeReport {
    let status = node.status.unwrap_or_default();
    NodeReport {
        name: node.metadata.name.unwrap_or_default(),
        ready: status
            .conditions
            .iter()
            .flatten()
            .any(|c| c.type_ == "Ready" && c.status == "True"),
        version: status.node_info.map(|i| i.kubelet_version).unwrap_or_default(),
        addresses: status
            .addresses
            .into_iter()
            .flatten()
            .map(|a| a.address)
            .collect(),
    }
}

/// The keepers of pods: the processes of the runtime's own cgroup, in whichever hierarchy is there.
fn shim_pids(cgroup: &str) -> Vec<u32> {
    let places = [
        "/sys/fs/cgroup",
        "/sys/fs/cgroup/pids",
        "/sys/fs/cgroup/memory",
        "/sys/fs/cgroup/cpu",
    ];
    let procs = places
        .iter()
        .find_map(|place| fs::read_to_string(format!("{place}/{cgroup}/shims/cgroup.procs")).ok());
    let mut pids: Vec<u32> = procs
        .unwrap_or_default()
        .lines()
        .filter_map(|l| l.parse().ok())
        .collect();
    pids.sort_unstable();
    pids
}

/// Resident memory of a process, shared pages of the binary included.
fn resident(pid: u32) -> u64 {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let line = status.lines().find_map(|l| l.strip_prefix("VmRSS:"));
    line.and_then(|l| l.trim().trim_end_matches(" kB").parse::<u64>().ok())
        .unwrap_or(0)
        * 1024
}

fn print(report: &Report) {
    let pid = report.pid.map(|p| format!(" (pid {p})")).unwrap_or_default();
    println!("Cluster {:?} is {}{pid}", report.name, report.state);
    println!("  version      {}", report.version);
    println!("  API server   {}", report.endpoint);
    println!("  kubeconfig   {}", report.kubeconfig.display());
    println!("  data         {}", report.data_dir.display());
    let shims = report.processes.iter().filter(|p| p.role == "shim").count();
    println!(
        "  memory       {} in one process and {shims} pod shims",
        mebibytes(report.memory_bytes)
    );
    println!("\nComponents");
    for component in &report.components {
        println!(
            "  {:<12} {} {}",
            component.name, component.state.state, component.state.message
        );
    }
    println!("\nNodes");
    for node in &report.nodes {
        let ready = if node.ready { "Ready" } else { "NotReady" };
        println!(
            "  {:<20} {ready:<9} {} {}",
            node.name,
            node.version,
            node.addresses.join(", ")
        );
    }
    if let Some(error) = &report.nodes_error {
        println!("  cannot be listed: {error}");
    }
}

#[expect(clippy::cast_precision_loss, reason = "for display")]
fn mebibytes(bytes: u64) -> String {
    format!("{:.1} MiB", bytes as f64 / f64::from(1 << 20))
}
