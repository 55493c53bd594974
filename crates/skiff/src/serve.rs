//! The server process: one cluster's lock, log, signals and life span. What it runs is in `wiring`.

use crate::agent::AgentState;
use crate::cli::{self, Component, ServerArgs};
use crate::cluster::Cluster;
use crate::progress::Reporter;
use crate::server_state::ServerState;
use crate::supervise::Supervisor;
use crate::wiring::Wiring;
use crate::{daemon, log, memory, preflight};
use anyhow::{Context, Result, bail};
use skiff_controllers::ControllerSelection;
use std::fs;
use std::os::unix::fs::DirBuilderExt;
use std::sync::Arc;
use std::time::Duration;
use tokio::signal::unix::{SignalKind, signal};
use tokio_util::sync::CancellationToken;

/// After SIGTERM, components get this long to end.
const PATIENCE: Duration = Duration::from_secs(10);
/// The component that an agent is about.
const NODE: &str = "node";
/// How long a start may take before it is called failed.
const START_PATIENCE: Duration = Duration::from_secs(60);

pub fn main(args: &ServerArgs) -> Result<()> {
    if std::env::var_os(daemon::BACKGROUND).is_some() {
        // A session of its own: Ctrl-C in the terminal of `skiff up` is not for us.
        rustix::process::setsid().context("cannot leave the terminal's session")?;
    }
    skiff_sockets::inherit();
    // The allocator asks for huge pages; for many small objects they only round memory up. Shims turn this back on
    // for containers.
    let _ = rustix::thread::disable_transparent_huge_pages(true);
    skiff_runtime::raise_open_files();
    log_to_stderr(args);
    let reporter = Arc::new(Reporter::new(args.report_progress));
    memory::prepare();
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .on_thread_park(memory::tidy)
        .build()?;
    let result = runtime.block_on(run(args, &reporter));
    if let Err(error) = &result {
        reporter.failed(&format!("{error:#}"));
    }
    // Tasks that hang on a disk or a socket must not keep the process.
    runtime.shutdown_timeout(Duration::from_secs(2));
    result
}

fn log_to_stderr(args: &ServerArgs) {
    // What `skiff up` made, and nobody else writes to.
    let in_background = std::env::var_os(daemon::BACKGROUND).is_some();
    let cluster = Cluster::find(&args.cluster.name).ok().flatten();
    let file = cluster
        .filter(|_| in_background)
        .map(|cluster| cluster.log_file());
    let filter = tracing_subscriber::EnvFilter::try_from_env("SKIFF_LOG")
        .unwrap_or_else(|_| tracing_subscriber::EnvFilter::new("info"));
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(log::Log::new(file))
        .with_ansi(false)
        .init();
}

async fn run(args: &ServerArgs, reporter: &Arc<Reporter>) -> Result<()> {
    preflight::check_root()?;
    let cluster = Cluster::find_or_make(&args.cluster.name, &args.wishes())?;
    cli::refuse_server_flags(&cluster, std::env::args_os())?;
    if !cluster.agent && !args.components.contains(&Component::Api) {
        bail!(
            "without an API server this machine needs one elsewhere: run the line that `skiff token create` prints there, or add `api` to --components"
        );
    }
    let controllers = ControllerSelection::parse(&args.controllers)?;
    args.apis.check(&controllers)?;
    if !args.load_balancer_pool.is_empty() && !args.components.contains(&Component::LoadBalancer) {
        bail!("--load-balancer-pool needs `load-balancer` in --components");
    }
    let args = &match (cluster.agent, ServerState::joined(&cluster)?) {
        (true, _) => agent_args(args, &AgentState::read(&cluster)?)?,
        (false, Some(joined)) => joined.complete(args)?,
        (false, None) => args.clone(),
    };
    let Some(mut lock) = cluster.lock()? else {
        bail!(
            "cluster {:?} is already running (pid {})",
            cluster.name,
            cluster.running()?.unwrap_or(0)
        );
    };
    // Over the old one and then cut: on a full disk there is no room for another block.
    let pid = std::process::id().to_string();
    std::io::Write::write_all(&mut lock, pid.as_bytes())?;
    lock.set_len(pid.len() as u64)?;
    cluster.remember_runtime(args.node.container_runtime_endpoint.as_deref())?;
    cluster.take_kubelet_root(args.node.root_dir.as_deref())?;

    let mut ends = (signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?);
    let ended = async {
        tokio::select! {
            _ = ends.0.recv() => "SIGTERM",
            _ = ends.1.recv() => "SIGINT",
        }
    };
    tokio::pin!(ended);
    let run_dir = cluster.run_dir();
    fs::DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(&run_dir)?;
    if !args.components.contains(&Component::Ingress) {
        cluster.close_listening_sockets();
    }
    let supervisor = Supervisor::new(run_dir.join("components.json"), CancellationToken::new());
    let wiring = Wiring {
        args: Arc::new(args.clone()),
        cluster: cluster.clone(),
        reporter: reporter.clone(),
        supervisor: supervisor.clone(),
    };
    let mut ended_early = false;
    let started = tokio::select! {
        started = tokio::time::timeout(START_PATIENCE, wiring.start()) => match started {
            Ok(started) => started,
            Err(_) => {
                let why = reporter.waited_for().map(|why| format!(" ({why})")).unwrap_or_default();
                let (seconds, log) = (START_PATIENCE.as_secs(), cluster.log_file());
                Err(anyhow::anyhow!("the node is not Ready after {seconds} s{why}; see {}", log.display()))
            }
        },
        signal = &mut ended => {
            ended_early = true;
            Err(anyhow::anyhow!("ended by {signal} during the start"))
        }
    };
    // Pods of an agent run on while its cluster cannot be reached, and it finds the cluster again by itself.
    let goes_on = cluster.agent && supervisor.is_running(NODE);
    if let Err(error) = &started
        && goes_on
        && !ended_early
    {
        tracing::error!(error = format!("{error:#}"), "not ready; going on");
        reporter.failed(&format!("{error:#}\nThe agent goes on trying."));
    }
    if started.is_ok() || (goes_on && !ended_early) {
        reporter.ready();
        let stop = supervisor.shutdown.clone();
        skiff_supervise::keep("memory", &supervisor.shutdown, move || {
            memory::keep_small(stop.clone())
        });
        tracing::info!(signal = ended.await, "shutting down");
    }
    supervisor.stop(PATIENCE).await;
    if goes_on && !ended_early { Ok(()) } else { started }
}

/// The flags of an agent: those of `skiff join`, and what its cluster said.
fn agent_args(args: &ServerArgs, state: &AgentState) -> Result<ServerArgs> {
    Ok(ServerArgs {
        components: vec![
            Component::Node,
            Component::Proxy,
            Component::Dns,
            Component::LoadBalancer,
        ],
        cluster_domain: state.cluster_domain.clone(),
        pod_network: cli::pod_network(&state.pod_network).map_err(anyhow::Error::msg)?,
        node: state.node.clone(),
        ..args.clone()
    })
}
