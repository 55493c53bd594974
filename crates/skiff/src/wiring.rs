//! From flags to a machine: who it is, where it is reached and which keys it has. What it runs is the table of
//! `components`.

use crate::agent::{AgentKeys, AgentState};
use crate::certificates::Certificates;
use crate::cli::{Component, ServerArgs};
use crate::cluster::{Cluster, host_address};
use crate::components::{Access, ControlPlane, Identity, Machine, NodeKeys, advertise_address};
use crate::join::is_ready;
use crate::progress::{NODE_READY, Reporter};
use crate::server_state::ServerState;
use crate::supervise::Supervisor;
use crate::{image, preflight};
use anyhow::{Context, Result, bail};
use k8s_openapi::api::core::v1::Node;
use k8s_openapi::jiff::Timestamp;
use kube::Client;
use kube::api::Api;
use skiff_client::ServerAddress;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};
use tokio::sync::watch;

/// How often the Node is read until it is Ready.
const POLL: Duration = Duration::from_millis(10);

pub struct Wiring {
    pub args: Arc<ServerArgs>,
    pub cluster: Cluster,
    pub reporter: Arc<Reporter>,
    pub supervisor: Arc<Supervisor>,
}

impl Wiring {
    /// Starts what the flags ask for; returns when the node, if there is one, is Ready.
    pub async fn start(self) -> Result<()> {
        let machine = match self.cluster.agent {
            true => self.agent().await?,
            false => self.server().await?,
        };
        // The demo image is made beside the rest: nothing waits for it but the end of the start.
        tokio::try_join!(start(&machine), pack_demo(&machine)).map(|_| ())
    }

    /// A machine with an API server.
    async fn server(self) -> Result<Machine> {
        let (args, cluster) = (&*self.args, &self.cluster);
        let node_name = args.node.node_name()?;
        args.node.check()?;
        let gateway = cluster.pod_gateway()?;
        check_mask(cluster, args.node_cidr_mask_size)?;
        let advertise = advertise_address(args, cluster, gateway);
        let address = args.node.node_ip.or(args.advertise_address);
        let node_address = address.or_else(host_address).unwrap_or(gateway);
        self.reporter
            .step("checks", async {
                preflight::check(cluster, args.components.contains(&Component::Node))
            })
            .await?;
        let certificates = self
            .reporter
            .step("certificates", async {
                let node = (node_name.as_str(), node_address);
                let endpoint = args.control_plane_endpoint.as_ref().map(ServerAddress::host);
                Certificates::open(cluster, &args.cluster_domain, advertise, endpoint, node).map(Arc::new)
            })
            .await?;
        let state = ServerState::of(args, cluster, advertise, &node_name)?;
        Ok(Machine {
            node_keys: NodeKeys {
                serving: certificates.kubelet.clone(),
                ca: certificates.ca.clone(),
            },
            control_plane: Some(ControlPlane {
                certificates,
                advertise,
                state,
            }),
            agent: None,
            server_id: self.cluster.server_id()?,
            node_name,
            node_address,
            access: OnceLock::new(),
            runtime_endpoint: OnceLock::new(),
            images: watch::Sender::new(None),
            args: self.args,
            cluster: self.cluster,
            reporter: self.reporter,
            supervisor: self.supervisor,
        })
    }

    /// A machine whose API server is elsewhere.
    async fn agent(self) -> Result<Machine> {
        let state = AgentState::read(&self.cluster)?;
        self.reporter
            .step("checks", async { preflight::check_node() })
            .await?;
        let keys = Arc::new(AgentKeys::open(&self.cluster, &state)?);
        let access = OnceLock::new();
        let _ = access.set(Access::There(keys.remote.clone()));
        Ok(Machine {
            node_keys: NodeKeys {
                serving: keys.serving.clone(),
                ca: keys.ca.clone(),
            },
            node_name: state.node.node_name()?,
            node_address: state.node_address()?,
            server_id: String::new(),
            control_plane: None,
            agent: Some(keys),
            access,
            runtime_endpoint: OnceLock::new(),
            images: watch::Sender::new(None),
            args: self.args,
            cluster: self.cluster,
            reporter: self.reporter,
            supervisor: self.supervisor,
        })
    }
}

async fn start(machine: &Machine) -> Result<()> {
    let began = Timestamp::now();
    machine.start().await?;
    if !machine.runs(Component::Node) {
        return Ok(());
    }
    // As the node itself, which reads its own Node everywhere.
    let node = Identity::Node.user(&machine.node_name).context("no identity")?;
    let client = machine.access()?.client(node, "skiff", None);
    machine
        .reporter
        .step(NODE_READY, node_ready(client, machine, began))
        .await?;
    match &machine.agent {
        // Logs and exec work from here on.
        Some(keys) => {
            let served = async {
                keys.serving_certificate().await;
                anyhow::Ok(())
            };
            machine.reporter.step("serving certificate", served).await
        }
        None => Ok(()),
    }
}

/// Each node takes a part of the pod network, and there must be room for one.
fn check_mask(cluster: &Cluster, mask: u8) -> Result<()> {
    let pods = cluster.pod_cidrs()?;
    if let Some(network) = pods
        .into_iter()
        .find(|network| network.is_ipv4() && network.prefix() > mask)
    {
        bail!(
            "--node-cidr-mask-size {mask} is larger than the whole pod network {network}; choose at least {}",
            network.prefix()
        );
    }
    Ok(())
}

/// Makes the demo image of this binary, unless it is there. A cluster works without it: on a full disk it must start.
async fn pack_demo(machine: &Machine) -> Result<()> {
    let mut images = machine.images.subscribe();
    let known = images.wait_for(Option::is_some).await?;
    let Some(images) = known.clone().flatten() else {
        return Ok(());
    };
    drop(known);
    let exe = std::env::current_exe()?;
    let packing = async {
        let packing = move || images.add_binary_image(image::DEMO, &exe, &image::demo());
        if let Err(error) = tokio::task::spawn_blocking(packing).await? {
            tracing::warn!(%error, "the demo image cannot be made");
        }
        anyhow::Ok(())
    };
    machine.reporter.step("demo image", packing).await
}

/// What the node itself says.
fn why_not_ready(node: &Node) -> Option<String> {
    let conditions = node.status.as_ref()?.conditions.as_ref()?;
    let ready = conditions.iter().find(|one| one.type_ == "Ready")?;
    ready.message.clone().filter(|_| ready.status != "True")
}

/// How long a node may be not Ready before it is said why.
const UNUSUAL: Duration = Duration::from_secs(3);

/// Whether it was the node of this process that was heard: what an earlier one left in the conditions does not count.
fn is_heard_since(node: &Node, began: Timestamp) -> bool {
    let conditions = node.status.as_ref().and_then(|status| status.conditions.as_ref());
    let ready = conditions.and_then(|all| all.iter().find(|one| one.type_ == "Ready"));
    // In whole seconds.
    let heard = ready.and_then(|one| one.last_heartbeat_time.as_ref());
    heard.is_some_and(|heard| heard.0.as_second() >= began.as_second())
}

async fn node_ready(client: Client, machine: &Machine, since: Timestamp) -> Result<()> {
    let nodes: Api<Node> = Api::all(client);
    let began = Instant::now();
    let (name, mut failure) = (Component::Node.to_string(), None);
    loop {
        // What goes wrong on the way there may go right the next time; the start has its time limit.
        let node = nodes.get_opt(&machine.node_name).await.ok().flatten();
        let node = node.filter(|node| is_heard_since(node, since));
        if node.as_ref().is_some_and(is_ready) {
            return Ok(());
        }
        // It runs for a moment between its failures.
        failure = machine.supervisor.failure(&name).or(failure);
        if let Some(why) = failure.clone().or_else(|| node.as_ref().and_then(why_not_ready))
            && began.elapsed() > UNUSUAL
        {
            machine.reporter.waiting(&why);
        }
        tokio::time::sleep(POLL).await;
    }
}
