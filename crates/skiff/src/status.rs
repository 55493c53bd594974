//! `skiff status`: components, memory, pods and nodes of a cluster. `skiff list`: the clusters of this machine.

use crate::agent::{AgentKeys, AgentState};
use crate::cli::{ListArgs, Output, StatusArgs};
use crate::cluster::Cluster;
use crate::components;
use crate::daemon::{client, existing};
use crate::supervise::{ComponentState, TASKS_FILE, TaskState};
use anyhow::{Context, Result};
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::{Node, Pod};
use kube::ResourceExt;
use kube::api::{Api, ListParams};
use serde::Serialize;
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::PathBuf;
use std::time::Duration;

/// The kernel counts times of processes in this many ticks a second, on x86-64 always.
const USER_HZ: u64 = 100;
/// How long `skiff status` waits for the API server.
const API_TIMEOUT: Duration = Duration::from_secs(5);

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
    log_file: PathBuf,
    #[serde(skip_serializing_if = "Option::is_none")]
    uptime_seconds: Option<u64>,
    components: Vec<ComponentReport>,
    /// The tasks inside of components that failed since the start, by name.
    tasks: BTreeMap<String, TaskState>,
    processes: Vec<Process>,
    memory_bytes: u64,
    /// The API servers: on an agent those that it knows, on a server those that renew their leases.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    servers: Vec<ServerReport>,
    /// What the service proxy of this machine has in the kernel.
    #[serde(skip_serializing_if = "Option::is_none")]
    proxy: Option<skiff_network::proxy::Summary>,
    nodes: Vec<NodeReport>,
    /// How many pods there are of each phase.
    pods: BTreeMap<String, usize>,
    /// Why nodes and pods are not known.
    #[serde(skip_serializing_if = "Option::is_none")]
    api_error: Option<String>,
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
struct ServerReport {
    url: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    reachable: Option<bool>,
    /// Why it is not.
    #[serde(skip_serializing_if = "String::is_empty")]
    message: String,
    #[serde(flatten)]
    lease: Option<LeaseReport>,
}

/// What a server says of itself in its lease.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct LeaseReport {
    hostname: String,
    version: String,
    /// Since it was last renewed.
    lease_age_seconds: u64,
}

/// The leases of API servers in `kube-system`, and their annotation that tells whose each is.
pub const SERVER_LEASES: &str = "apiserver.kubernetes.io/identity=kube-apiserver";
pub const INSTANCE: &str = "skiff.io/instance";
/// A server that has not renewed its lease for so long is not there: three attempts.
const SILENT_SECONDS: u64 = 30;

/// What a server says of the cluster.
#[derive(Default)]
struct Answer {
    servers: Vec<ServerReport>,
    nodes: Vec<NodeReport>,
    pods: BTreeMap<String, usize>,
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
        Some(Output::Json) => say!("{}", serde_json::to_string_pretty(&report)?),
        None => print(&report, cluster.agent),
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
    let mut states: Vec<(String, ComponentState)> = states.into_iter().collect();
    states.sort_by_key(|(name, _)| components::place(name));
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
    let tasks = fs::read(run_dir.join(TASKS_FILE)).ok().filter(|_| pid.is_some());
    let tasks = tasks.and_then(|bytes| serde_json::from_slice(&bytes).ok());
    let proxy = fs::read(run_dir.join(components::PROXY_FILE))
        .ok()
        .filter(|_| pid.is_some());
    let proxy = proxy.and_then(|bytes| serde_json::from_slice(&bytes).ok());
    let (mut answer, api_error) = match pid {
        None => Default::default(),
        Some(_) => match ask(cluster).await {
            Ok(answer) => (answer, None),
            Err(error) => (Answer::default(), Some(format!("{error:#}"))),
        },
    };
    if cluster.agent {
        answer.servers = servers(cluster).await?;
    }
    Ok(Report {
        name: cluster.name.clone(),
        state: if pid.is_some() { "running" } else { "stopped" },
        pid,
        version: crate::VERSION,
        endpoint: endpoint(cluster),
        kubeconfig: cluster.kubeconfig(),
        data_dir: cluster.data_dir.clone(),
        log_file: cluster.log_file(),
        uptime_seconds: pid.and_then(uptime),
        components: components.collect(),
        tasks: tasks.unwrap_or_default(),
        memory_bytes: processes.iter().map(|p| p.memory_bytes).sum(),
        processes,
        servers: answer.servers,
        proxy,
        nodes: answer.nodes,
        pods: answer.pods,
        api_error,
    })
}

/// Where the API is, for a server or an agent.
fn endpoint(cluster: &Cluster) -> String {
    match cluster.agent {
        true => AgentState::read(cluster).map_or_else(|_| "-".to_owned(), |state| state.servers.join(", ")),
        false => cluster.endpoint(),
    }
}

/// Whether an agent's API servers can be reached, each by itself.
async fn servers(cluster: &Cluster) -> Result<Vec<ServerReport>> {
    let state = AgentState::read(cluster)?;
    let mut reports = Vec::new();
    for server in &state.servers {
        let one = AgentState {
            servers: vec![server.clone()],
            ..state.clone()
        };
        let checked = async {
            let keys = AgentKeys::open(cluster, &one)?;
            let checking = tokio::time::timeout(API_TIMEOUT, keys.remote.check()).await;
            checking.context("no answer")?.context("it cannot be reached")
        };
        let message = checked.await.err().map(|error| format!("{error:#}"));
        reports.push(ServerReport {
            url: server.clone(),
            reachable: Some(message.is_none()),
            message: message.unwrap_or_default(),
            lease: None,
        });
    }
    Ok(reports)
}

/// The servers, the nodes, and how many pods there are of each phase. An agent sees its own node and pods.
async fn ask(cluster: &Cluster) -> Result<Answer> {
    let (mut of_nodes, mut of_pods) = (ListParams::default(), ListParams::default());
    let client = match cluster.agent {
        true => {
            let state = AgentState::read(cluster)?;
            let name = state.node.node_name()?;
            of_nodes = of_nodes.fields(&format!("metadata.name={name}"));
            of_pods = of_pods.fields(&format!("spec.nodeName={name}"));
            AgentKeys::open(cluster, &state)?.remote.client("skiff-status")
        }
        false => client(cluster).await?,
    };
    let leases = Api::<Lease>::namespaced(client.clone(), "kube-system");
    let leases = async {
        // No business of a node's.
        if cluster.agent {
            return Ok(Vec::new());
        }
        let listed = leases.list(&ListParams::default().labels(SERVER_LEASES)).await?;
        kube::Result::Ok(listed.items)
    };
    let (nodes, pods) = (Api::<Node>::all(client.clone()), Api::<Pod>::all(client));
    let all = futures::future::try_join3(nodes.list(&of_nodes), pods.list(&of_pods), leases);
    let (nodes, pods, leases) = tokio::time::timeout(API_TIMEOUT, all)
        .await
        .context("the API server does not answer")??;
    let mut phases = BTreeMap::new();
    for pod in pods {
        let phase = pod.status.and_then(|status| status.phase);
        *phases
            .entry(phase.unwrap_or_else(|| "Unknown".into()))
            .or_default() += 1;
    }
    let now = jiff::Timestamp::now();
    Ok(Answer {
        servers: leases.iter().map(|lease| server(lease, now)).collect(),
        nodes: nodes.items.into_iter().map(node).collect(),
        pods: phases,
    })
}

fn server(lease: &Lease, now: jiff::Timestamp) -> ServerReport {
    let annotation = |name: &str| lease.annotations().get(name).cloned().unwrap_or_default();
    let renewed = lease.spec.as_ref().and_then(|spec| spec.renew_time.as_ref());
    let age = renewed.map_or(i64::MAX, |at| now.as_second() - at.0.as_second());
    let age = u64::try_from(age).unwrap_or_default();
    let message = match age {
        ..SILENT_SECONDS => String::new(),
        age => format!("silent for {}", duration(age)),
    };
    ServerReport {
        url: format!("https://{}", annotation("kubernetes.io/peer-advertise-address")),
        reachable: None,
        message,
        lease: Some(LeaseReport {
            hostname: lease
                .labels()
                .get("kubernetes.io/hostname")
                .cloned()
                .unwrap_or_default(),
            version: annotation("skiff.io/version"),
            lease_age_seconds: age,
        }),
    }
}

/// What to do while servers of several versions run, which an upgrade makes for a while.
fn version_note(servers: &[ServerReport]) -> Option<String> {
    let leases = servers.iter().filter_map(|server| server.lease.as_ref());
    let living = leases.filter(|lease| lease.lease_age_seconds < SILENT_SECONDS);
    let versions: BTreeSet<&str> = living.map(|lease| lease.version.as_str()).collect();
    (versions.len() > 1).then(|| {
        let versions: Vec<&str> = versions.into_iter().collect();
        format!(
            "servers of several versions run ({}): upgrade the others before the nodes",
            versions.join(", ")
        )
    })
}

/// How long a process has been running, in seconds.
fn uptime(pid: u32) -> Option<u64> {
    let since_boot = fs::read_to_string("/proc/uptime").ok()?;
    let since_boot: f64 = since_boot.split_whitespace().next()?.parse().ok()?;
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name may hold anything; fields are counted after it.
    let started: u64 = stat
        .rsplit_once(')')?
        .1
        .split_whitespace()
        .nth(19)?
        .parse()
        .ok()?;
    Some((since_boot as u64).saturating_sub(started / USER_HZ))
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

fn print(report: &Report, agent: bool) {
    let pid = report.pid.map(|p| format!(" (pid {p})")).unwrap_or_default();
    say!("Cluster {:?} is {}{pid}", report.name, report.state);
    say!("  version      {}", report.version);
    say!("  API server   {}", report.endpoint);
    if !agent {
        say!("  kubeconfig   {}", report.kubeconfig.display());
    }
    say!("  data         {}", report.data_dir.display());
    say!("  log          {}", report.log_file.display());
    if let Some(seconds) = report.uptime_seconds {
        say!("  uptime       {}", duration(seconds));
    }
    let shims = report.processes.iter().filter(|p| p.role == "shim").count();
    say!(
        "  memory       {} in one process and {shims} pod shims",
        mebibytes(report.memory_bytes)
    );
    say!("\nComponents");
    for component in &report.components {
        say!(
            "  {:<13} {} {}",
            component.name,
            component.state.state,
            component.state.message
        );
    }
    if !report.tasks.is_empty() {
        say!("\nTasks that failed and were started again");
        for (name, task) in &report.tasks {
            let state = if task.waiting > 0 { "restarting" } else { "running" };
            let times = if task.failures == 1 { "failure" } else { "failures" };
            say!(
                "  {name:<28} {state}, {} {times}, the last: {}",
                task.failures,
                task.last_failure
            );
        }
    }
    if report.pid.is_some() && report.api_error.is_none() {
        let phases = report
            .pods
            .iter()
            .map(|(phase, count)| format!("{count} {phase}"));
        let phases: Vec<String> = phases.collect();
        say!(
            "\nPods           {}",
            if phases.is_empty() {
                "none".into()
            } else {
                phases.join(", ")
            }
        );
    }
    if let Some(proxy) = &report.proxy {
        let failed = match proxy.failures {
            0 => String::new(),
            count => format!("; {count} changes failed at first"),
        };
        say!(
            "Services       {} with {} endpoints in the kernel ({} rules, {} elements), programmed to revision {}, the last change within {:.1} ms{failed}",
            proxy.services,
            proxy.endpoints,
            proxy.rules,
            proxy.elements,
            proxy.programmed_revision,
            proxy.last_delay_ms
        );
    }
    if !report.servers.is_empty() {
        say!("\nServers");
        for server in &report.servers {
            let state = match (&server.lease, server.reachable) {
                (Some(lease), _) => {
                    let age = duration(lease.lease_age_seconds);
                    format!("{:<20} {} lease renewed {age} ago", lease.hostname, lease.version)
                }
                (None, Some(true)) => "reachable".to_owned(),
                (None, _) => "not reachable:".to_owned(),
            };
            say!("  {:<28} {state} {}", server.url, server.message);
        }
        if let Some(note) = version_note(&report.servers) {
            say!("  {note}");
        }
    }
    say!("\nNodes");
    for node in &report.nodes {
        let ready = if node.ready { "Ready" } else { "NotReady" };
        say!(
            "  {:<20} {ready:<9} {} {}",
            node.name,
            node.version,
            node.addresses.join(", ")
        );
    }
    if let Some(error) = &report.api_error {
        say!("  cannot be listed: {error}");
    }
}

/// The two largest units, as `3d4h`.
fn duration(seconds: u64) -> String {
    let units = [("d", 86_400), ("h", 3600), ("m", 60), ("s", 1)];
    let mut left = seconds;
    let mut parts = Vec::new();
    for (unit, size) in units {
        if left >= size || (unit == "s" && parts.is_empty()) {
            parts.push(format!("{}{unit}", left / size));
            left %= size;
        }
    }
    parts.truncate(2);
    parts.concat()
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct ListEntry {
    name: String,
    state: &'static str,
    pid: Option<u32>,
    endpoint: String,
    data_dir: PathBuf,
}

pub fn list(args: &ListArgs) -> Result<()> {
    let mut entries = Vec::new();
    for cluster in Cluster::all()? {
        let pid = cluster.running()?;
        entries.push(ListEntry {
            state: if pid.is_some() { "running" } else { "stopped" },
            pid,
            endpoint: endpoint(&cluster),
            name: cluster.name,
            data_dir: cluster.data_dir,
        });
    }
    if args.output == Some(Output::Json) {
        say!("{}", serde_json::to_string_pretty(&entries)?);
        return Ok(());
    }
    let width = entries
        .iter()
        .map(|entry| entry.name.len())
        .max()
        .unwrap_or(0)
        .max(4);
    say!(
        "{:<width$}  {:<8} {:<8} {:<28} DATA",
        "NAME",
        "STATE",
        "PID",
        "API SERVER"
    );
    for entry in entries {
        let pid = entry.pid.map_or_else(|| "-".to_owned(), |pid| pid.to_string());
        say!(
            "{:<width$}  {:<8} {pid:<8} {:<28} {}",
            entry.name,
            entry.state,
            entry.endpoint,
            entry.data_dir.display()
        );
    }
    Ok(())
}

#[expect(clippy::cast_precision_loss, reason = "for display")]
fn mebibytes(bytes: u64) -> String {
    format!("{:.1} MiB", bytes as f64 / f64::from(1 << 20))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn several_versions_are_told() {
        let server = |version: &str, age| ServerReport {
            url: String::new(),
            reachable: None,
            message: String::new(),
            lease: Some(LeaseReport {
                hostname: "one".to_owned(),
                version: version.to_owned(),
                lease_age_seconds: age,
            }),
        };
        let check = |servers: &[ServerReport], expected: Option<&str>| {
            let found = version_note(servers);
            assert_eq!(found.is_some(), expected.is_some(), "{found:?}");
            assert!(found.unwrap_or_default().contains(expected.unwrap_or_default()));
        };
        check(&[server("a", 1)], None);
        check(&[server("a", 1), server("a", 2)], None);
        check(&[server("a", 1), server("b", 2)], Some("(a, b)"));
        // One that is gone may have been of any.
        check(&[server("a", 1), server("b", 3600)], None);
    }

    #[test]
    fn durations_are_short() {
        for (seconds, text) in [
            (0, "0s"),
            (59, "59s"),
            (61, "1m1s"),
            (3600, "1h"),
            (90_061, "1d1h"),
            (86_405, "1d5s"),
        ] {
            assert_eq!(duration(seconds), text);
        }
        assert!(uptime(std::process::id()).is_some());
    }
}
