//! The components of a machine, as data: one row each in [`COMPONENTS`], with its name, its identity and what it needs.
//!
//! A component gets its configuration and a client of the API, and nothing of another component. The client is an
//! in-process one where the API server runs in the same process, and a remote one on an agent.

mod api;
mod control;
mod foreign_runtime;
mod network;
mod node;
mod services;

pub use api::{ControlPlane, advertise_address, check_etcd};
pub use services::PROXY_FILE;

use crate::VERSION;
use crate::agent::AgentKeys;
use crate::cli::{Component, ServerArgs};
use crate::cluster::Cluster;
use crate::progress::Reporter;
use crate::supervise::Supervisor;
use anyhow::{Context, Result};
use futures::FutureExt;
use futures::future::BoxFuture;
use kube::Client;
use rustls::server::ResolvesServerCert;
use skiff_auth::UserInfo;
use skiff_client::{ComponentMetrics, Remote};
use skiff_runtime::ImageStore;
use skiff_server::Server;
use std::net::IpAddr;
use std::sync::{Arc, OnceLock};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

/// Who a component is to the API. On an agent all are the node: its certificate is the only one that the machine has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Identity {
    /// It is no client of the API.
    None,
    /// `system:node:NAME` in `system:nodes`.
    Node,
    User(&'static str),
    /// Of `kube-system`.
    ServiceAccount(&'static str),
}

impl Identity {
    pub fn user(self, node_name: &str) -> Option<UserInfo> {
        match self {
            Identity::None => None,
            Identity::Node => Some(UserInfo::new(
                format!("system:node:{node_name}"),
                ["system:nodes"],
            )),
            Identity::User(name) => Some(UserInfo::new(name, [] as [&str; 0])),
            Identity::ServiceAccount(name) => Some(UserInfo::service_account("kube-system", name)),
        }
    }
}

/// What a component needs besides its configuration and a client.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Needs {
    /// It runs on every machine.
    Nothing,
    /// The API server in the same process: for the cluster's keys, for an identity that no agent has, or because
    /// the API server serves for it.
    ApiServer,
    /// An API server elsewhere.
    Agent,
}

/// One component.
pub struct Spec {
    /// As `skiff status` shows it.
    pub name: &'static str,
    /// The entry of `--components` that it belongs to.
    pub part: Component,
    pub identity: Identity,
    /// Its user agent, which is also the manager of the fields that it writes.
    pub agent: &'static str,
    pub needs: Needs,
    /// Checks the configuration and makes what runs. What fails here fails the start.
    prepare: for<'m> fn(&'m Machine) -> BoxFuture<'m, Result<Prepared>>,
}

/// What the supervisor runs, again if it ends.
pub enum Run {
    Alone(Box<dyn FnMut(CancellationToken) -> Running + Send>),
    WithClient(Box<dyn FnMut(Client, CancellationToken) -> Running + Send>),
}

type Running = BoxFuture<'static, Result<(), String>>;

pub struct Prepared {
    run: Run,
    /// Its metrics, if it has some: its requests are counted there, and the API server shows them.
    metrics: Option<Arc<ComponentMetrics>>,
}

impl Prepared {
    fn new(run: impl FnMut(Client, CancellationToken) -> Running + Send + 'static) -> Self {
        Prepared {
            run: Run::WithClient(Box::new(run)),
            metrics: None,
        }
    }

    fn alone(run: impl FnMut(CancellationToken) -> Running + Send + 'static) -> Self {
        Prepared {
            run: Run::Alone(Box::new(run)),
            metrics: None,
        }
    }

    /// For a part that something else on the machine does.
    fn idle() -> Self {
        Prepared::alone(|stop| {
            async move {
                stop.cancelled().await;
                Ok(())
            }
            .boxed()
        })
    }

    fn measured(mut self, metrics: Arc<ComponentMetrics>) -> Self {
        self.metrics = Some(metrics);
        self
    }
}

macro_rules! component {
    ($name:literal, $part:ident, $identity:expr, $agent:literal, $needs:ident, $prepare:path) => {
        Spec {
            name: $name,
            part: Component::$part,
            identity: $identity,
            agent: $agent,
            needs: Needs::$needs,
            prepare: |machine| $prepare(machine).boxed(),
        }
    };
}

/// Every component, in the order in which they are started. Adding one is a row here.
pub const COMPONENTS: &[Spec] = &[
    component!(
        "network",
        Node,
        Identity::Node,
        "skiff-network",
        Nothing,
        network::prepare
    ),
    component!(
        "policy",
        Node,
        Identity::Node,
        "skiff-policy",
        Nothing,
        network::prepare_policy
    ),
    component!(
        "runtime",
        Node,
        Identity::None,
        "",
        Nothing,
        node::prepare_runtime
    ),
    component!("api", Api, Identity::None, "", Nothing, api::prepare),
    component!(
        "controllers",
        Controllers,
        Identity::User(skiff_controllers::MANAGER),
        "kube-controller-manager",
        ApiServer,
        control::prepare_controllers
    ),
    component!(
        "scheduler",
        Scheduler,
        Identity::User("system:kube-scheduler"),
        "kube-scheduler",
        ApiServer,
        control::prepare_scheduler
    ),
    component!(
        "proxy",
        Proxy,
        Identity::User("system:kube-proxy"),
        "kube-proxy",
        Nothing,
        services::prepare_proxy
    ),
    component!("node", Node, Identity::Node, "kubelet", Nothing, node::prepare),
    component!(
        "certificates",
        Node,
        Identity::Node,
        "skiff-certificates",
        Agent,
        node::prepare_certificates
    ),
    component!(
        "servers",
        Node,
        Identity::Node,
        "skiff-servers",
        Agent,
        node::prepare_servers
    ),
    component!(
        "local-volumes",
        Api,
        Identity::ServiceAccount(crate::addons::LOCAL_VOLUMES),
        "local-volumes",
        ApiServer,
        control::prepare_local_volumes
    ),
    component!(
        "policy-status",
        Api,
        Identity::ServiceAccount(crate::addons::POLICY_STATUS),
        "skiff-policy-status",
        ApiServer,
        network::prepare_policy_status
    ),
    component!(
        "dns-endpoints",
        Dns,
        Identity::ServiceAccount(crate::addons::DNS_ENDPOINTS),
        "cluster-dns-controller",
        ApiServer,
        services::prepare_dns_endpoints
    ),
    component!(
        "dns",
        Dns,
        Identity::ServiceAccount("coredns"),
        "coredns",
        Nothing,
        services::prepare_dns
    ),
    component!(
        "metrics",
        Metrics,
        Identity::ServiceAccount(skiff_metrics::SERVICE_ACCOUNT),
        "skiff-metrics",
        ApiServer,
        services::prepare_metrics
    ),
    component!(
        "ingress",
        Ingress,
        Identity::ServiceAccount(crate::addons::INGRESS),
        "skiff-ingress",
        ApiServer,
        services::prepare_ingress
    ),
    component!(
        "load-balancer",
        LoadBalancer,
        Identity::ServiceAccount(crate::addons::LOAD_BALANCER),
        "skiff-load-balancer",
        ApiServer,
        services::prepare_load_balancer
    ),
    component!(
        "announcer",
        LoadBalancer,
        Identity::ServiceAccount(crate::addons::LOAD_BALANCER),
        "skiff-announcer",
        Nothing,
        services::prepare_announcer
    ),
];

/// The place of a component in the table; those that are not in it come last.
pub fn place(name: &str) -> usize {
    let found = COMPONENTS.iter().position(|spec| spec.name == name);
    found.unwrap_or(COMPONENTS.len())
}

/// How components reach the API.
#[derive(Clone)]
pub enum Access {
    Here(Server),
    /// As the node, over the network.
    There(Remote),
}

impl Access {
    pub fn client(
        &self,
        user: UserInfo,
        agent: &'static str,
        metrics: Option<Arc<ComponentMetrics>>,
    ) -> Client {
        match (self, metrics) {
            (Access::Here(server), Some(metrics)) => {
                skiff_client::in_process_measured(server.service(user), "default", agent, metrics)
            }
            (Access::Here(server), None) => {
                skiff_client::in_process_as(server.service(user), "default", agent)
            }
            (Access::There(remote), _) => remote.client(agent),
        }
    }
}

/// What the kubelet shows and trusts.
pub struct NodeKeys {
    pub serving: Arc<dyn ResolvesServerCert>,
    /// PEM of the cluster's authority.
    pub ca: String,
}

/// A machine that is being started: what components are configured from.
pub struct Machine {
    pub args: Arc<ServerArgs>,
    pub cluster: Cluster,
    pub reporter: Arc<Reporter>,
    pub supervisor: Arc<Supervisor>,
    pub node_name: String,
    /// What tells this server from the others of its cluster; empty on an agent.
    pub server_id: String,
    /// Where this machine is reached as a node.
    pub node_address: IpAddr,
    pub node_keys: NodeKeys,
    /// What only a machine with an API server has.
    pub control_plane: Option<ControlPlane>,
    /// What only an agent has.
    pub agent: Option<Arc<AgentKeys>>,
    /// Set by the API server's start, or from the beginning on an agent.
    pub access: OnceLock<Access>,
    /// Set by the runtime's start.
    pub runtime_endpoint: OnceLock<String>,
    /// The embedded runtime's images; `Some(None)` if there are none, `None` until that is known.
    pub images: watch::Sender<Option<Option<Arc<ImageStore>>>>,
}

impl Machine {
    pub fn runs(&self, part: Component) -> bool {
        self.args.components.contains(&part)
    }

    fn control_plane(&self) -> Result<&ControlPlane> {
        self.control_plane
            .as_ref()
            .context("this component needs an API server in the same process")
    }

    pub fn access(&self) -> Result<&Access> {
        self.access.get().context("the API server is not started")
    }

    /// Who holds a leader's lease. The same after a restart, so that a killed skiff gets its leases back at once, and
    /// no other server's, even if that has the same host name.
    fn lease_holder(&self) -> String {
        format!("{}_{}", self.node_name, self.server_id)
    }

    /// The rows of the table that this machine runs.
    fn components(&self) -> impl Iterator<Item = &'static Spec> {
        COMPONENTS.iter().filter(|spec| {
            let served = match spec.needs {
                Needs::Nothing => true,
                Needs::ApiServer => self.control_plane.is_some(),
                Needs::Agent => self.agent.is_some(),
            };
            self.runs(spec.part) && served
        })
    }

    /// Starts the components in the order of the table.
    pub async fn start(&self) -> Result<()> {
        // What is prepared before there is an API runs from then on.
        let mut waiting = Vec::new();
        for spec in self.components() {
            let prepared = (spec.prepare)(self)
                .await
                .with_context(|| format!("cannot start {}", spec.name))?;
            waiting.push((spec, prepared));
            if self.access.get().is_some() {
                for (spec, prepared) in waiting.drain(..) {
                    self.supervise(spec, prepared)?;
                }
            }
        }
        // Whoever waits for images learns that there will be none.
        self.images.send_modify(|images| {
            images.get_or_insert(None);
        });
        Ok(())
    }

    fn supervise(&self, spec: &'static Spec, prepared: Prepared) -> Result<()> {
        match (prepared.run, spec.identity.user(&self.node_name)) {
            (Run::WithClient(mut run), Some(user)) => {
                let access = self.access()?;
                if let (Access::Here(server), Some(metrics)) = (access, &prepared.metrics) {
                    server.show_metrics(spec.agent, metrics.registry.clone());
                }
                let client = access.client(user, spec.agent, prepared.metrics);
                self.supervisor
                    .run(spec.name, move |stop| run(client.clone(), stop));
            }
            (Run::Alone(run), _) => self.supervisor.run(spec.name, run),
            (Run::WithClient(_), None) => anyhow::bail!("{} has no identity", spec.name),
        }
        Ok(())
    }
}

/// Counts what a component does and asks.
fn component_metrics() -> Arc<ComponentMetrics> {
    ComponentMetrics::new(VERSION)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn every_row_is_sound() {
        let names: BTreeSet<&str> = COMPONENTS.iter().map(|spec| spec.name).collect();
        assert_eq!(names.len(), COMPONENTS.len(), "two rows have one name");
        for part in Component::ALL {
            assert!(
                COMPONENTS.iter().any(|spec| spec.part == part),
                "--components {part} starts nothing"
            );
        }
        for spec in COMPONENTS {
            assert_eq!(
                spec.agent.is_empty(),
                spec.identity == Identity::None,
                "{}: clients say who they are",
                spec.name
            );
        }
    }

    #[test]
    fn identities_are_upstreams() {
        let user = |name: &str| {
            let spec = COMPONENTS.iter().find(|spec| spec.name == name).unwrap();
            spec.identity.user("n1").map(|user| (user.name, user.groups))
        };
        let node = user("node").unwrap();
        assert_eq!(node.0, "system:node:n1");
        assert!(node.1.contains(&"system:nodes".to_owned()), "{node:?}");
        assert_eq!(user("scheduler").unwrap().0, "system:kube-scheduler");
        assert_eq!(
            user("dns").unwrap().0,
            "system:serviceaccount:kube-system:coredns"
        );
        assert_eq!(user("runtime"), None);
    }

    #[test]
    fn components_are_shown_in_the_order_of_the_table() {
        let mut names = vec!["zzz", "scheduler", "api", "network"];
        names.sort_by_key(|name| place(name));
        assert_eq!(names, ["network", "api", "scheduler", "zzz"]);
    }
}
