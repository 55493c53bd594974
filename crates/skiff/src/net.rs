//! `skiff net check`: the way of a packet, and what stops it. The walk is `skiff_network::check`; here are its flags, how it
//! is shown, and where the pods of this machine are found.

use crate::agent::{AgentKeys, AgentState};
use crate::cli::{NetArgs, NetCommand, Output};
use crate::cluster::Cluster;
use crate::daemon::{client, existing};
use crate::preflight;
use crate::server_state::ServerState;
use anyhow::{Context, Result};
use futures::FutureExt;
use skiff_cri::RuntimeServiceClient;
use skiff_cri::v1::{ListPodSandboxRequest, PodSandboxFilter, PodSandboxState, PodSandboxStatusRequest};
use skiff_network::check::{CheckConfig, FindNamespace, Outcome, Verdict, Walk, walk};
use std::collections::HashMap;
use std::path::PathBuf;

/// Exit codes beside 0 and 1: that is the answer, not a failure of the command.
const STOPPED: i32 = 3;
const PARTLY: i32 = 4;

/// The label by which a kubelet finds a pod's sandbox.
const POD_UID: &str = "io.kubernetes.pod.uid";

pub async fn run(args: &NetArgs) -> Result<()> {
    let NetCommand::Check {
        from,
        to,
        namespace,
        protocol,
        output,
    } = &args.command;
    preflight::check_root()?;
    let cluster = existing(&args.cluster)?;
    let (node_name, cluster_domain, client) = match cluster.agent {
        true => {
            let state = AgentState::read(&cluster)?;
            let client = AgentKeys::open(&cluster, &state)?.remote.client("skiff-net");
            (state.node.node_name()?, state.cluster_domain, client)
        }
        false => {
            let state = ServerState::find(&cluster)?.context("the cluster was never started")?;
            let name = state.node_name.clone().unwrap_or_default();
            (name, state.settings.cluster_domain, client(&cluster).await?)
        }
    };
    let config = CheckConfig {
        node_name,
        namespace: namespace.clone(),
        proxy_table: cluster.nft_table(),
        policy_table: cluster.policy_config("").table,
        cluster_domain,
        find_namespace: find_namespace(&cluster)?,
    };
    let walked = walk(config, client, from, to, (*protocol).into()).await?;
    match output {
        Some(Output::Json) => say!("{}", serde_json::to_string_pretty(&walked)?),
        None => print(&walked),
    }
    match walked.verdict {
        Verdict::Passes => Ok(()),
        Verdict::Stopped => std::process::exit(STOPPED),
        Verdict::Partly => std::process::exit(PARTLY),
    }
}

fn print(walk: &Walk) {
    say!("{} -> {} ({})", walk.from, walk.to, walk.protocol);
    let mut endpoint = None;
    for step in &walk.steps {
        if step.endpoint != endpoint {
            endpoint.clone_from(&step.endpoint);
            if let Some(endpoint) = &endpoint {
                say!("  {endpoint}");
            }
        }
        let sign = match step.outcome {
            Outcome::Passes => "ok",
            Outcome::Stops => "STOP",
            Outcome::Unseen => "?",
        };
        let indent = if endpoint.is_some() { "    " } else { "  " };
        let width = 20 - indent.len();
        say!("{indent}{sign:<4} {:<width$} {}", step.step, step.detail);
    }
    let stops = walk.steps.iter().filter(|step| step.outcome == Outcome::Stops);
    match walk.verdict {
        Verdict::Passes => say!("Nothing stops it."),
        Verdict::Partly => say!("Some endpoints are not reached."),
        Verdict::Stopped => {
            if let Some(first) = stops.into_iter().next() {
                say!("Stopped by the {}: {}", first.step, first.detail);
            }
        }
    }
}

/// Asks the container runtime for the network namespaces of pods.
fn find_namespace(cluster: &Cluster) -> Result<FindNamespace> {
    let endpoint = match cluster.remembered_runtime() {
        Some(endpoint) => endpoint,
        None => format!("unix://{}", cluster.runtime_config()?.socket().display()),
    };
    Ok(Box::new(move |uid| {
        let endpoint = endpoint.clone();
        async move { namespace_of(&endpoint, uid).await.ok().flatten() }.boxed()
    }))
}

async fn namespace_of(endpoint: &str, uid: String) -> Result<Option<PathBuf>> {
    let mut client = RuntimeServiceClient::new(skiff_cri::connect(endpoint).await?);
    let filter = PodSandboxFilter {
        label_selector: HashMap::from([(POD_UID.to_owned(), uid)]),
        ..Default::default()
    };
    let request = ListPodSandboxRequest { filter: Some(filter) };
    let listed = client.list_pod_sandbox(request).await?.into_inner();
    let ready = PodSandboxState::SandboxReady as i32;
    let Some(sandbox) = listed.items.into_iter().find(|sandbox| sandbox.state == ready) else {
        return Ok(None);
    };
    let request = PodSandboxStatusRequest {
        pod_sandbox_id: sandbox.id,
        verbose: true,
    };
    let status = client.pod_sandbox_status(request).await?.into_inner();
    let info: serde_json::Value = serde_json::from_str(status.info.get("info").context("no details")?)?;
    // Ours says where it is; containerd has the process of the sandbox.
    let path = info["netns"].as_str().map(PathBuf::from);
    let of_process = info["pid"].as_u64().filter(|pid| *pid > 0);
    Ok(path.or_else(|| of_process.map(|pid| format!("/proc/{pid}/ns/net").into())))
}
