//! The way from the node of the first pod to an endpoint, and back: policies, routes, who listens, and the connection itself.

use std::net::{IpAddr, SocketAddr};

use k8s_openapi::api::core::v1::{Node, Pod};
use kube::Api;
use nlink::netlink::types::route::RouteType;
use nlink::netlink::{Connection, Route};

use super::inside::{self, Listener};
use super::objects::{is_host_network, key_of, node_of};
use super::walk::{Endpoint, Origin, Walker};
use super::{CONNECTION, Error, Outcome};
use crate::policy::{self, Direction, Judgement, KernelVerdict, Packet, Party};
use crate::proxy::Protocol;

impl Walker {
    /// From the node of the first pod to an endpoint, and back.
    /// `is_direct`: the pod connects to the endpoint's own address, and not by way of a service.
    pub(super) async fn follow(
        &mut self,
        origin: &Origin,
        endpoint: &Endpoint,
        is_direct: bool,
    ) -> Result<(), Error> {
        let (address, port, protocol) = (endpoint.socket.ip(), endpoint.socket.port(), self.protocol);
        let near = |pod: &Pod| node_of(pod) == self.config.node_name;
        let node = endpoint.pod.as_ref().map(|pod| node_of(pod).to_owned());
        let is_here = endpoint.pod.as_ref().is_some_and(near);
        let who = match &endpoint.pod {
            Some(pod) => format!("pod {} on node {}", key_of(pod), node_of(pod)),
            None => "not a pod of the cluster".to_owned(),
        };
        self.step_to("endpoint", Some(endpoint), Outcome::Passes, who);
        // That never leaves the pod.
        let itself = address == origin.address && is_direct;
        let peer = match &endpoint.pod {
            Some(pod) => Party::pod(pod, address),
            None => Party::stranger(address),
        };
        if !itself && !origin.has_host_network {
            let (outcome, text) = self
                .verdict(
                    Direction::Egress,
                    &origin.pod,
                    origin.address,
                    &peer,
                    address,
                    protocol,
                    port,
                )
                .await?;
            self.step_to("egress policy", Some(endpoint), outcome, text);
        }
        self.route("route", origin, endpoint, address).await?;
        if let Some(node) = node.as_ref().filter(|node| **node != node_of(&origin.pod))
            && !self.is_ready(node).await?
        {
            let text = format!("node {node} is not ready");
            self.step_to("node", Some(endpoint), Outcome::Stops, text);
        }
        if let Some(pod) = endpoint.pod.as_ref().filter(|_| !itself) {
            // The node reaches its own pods whatever policies say.
            let from_own_node = origin.has_host_network && node_of(pod) == node_of(&origin.pod);
            if from_own_node {
                let text = "a node reaches its own pods";
                self.step_to("ingress policy", Some(endpoint), Outcome::Passes, text);
            } else {
                let source = Party::pod(&origin.pod, origin.address);
                let (outcome, text) = self
                    .verdict(
                        Direction::Ingress,
                        pod,
                        address,
                        &source,
                        origin.address,
                        protocol,
                        port,
                    )
                    .await?;
                self.step_to("ingress policy", Some(endpoint), outcome, text);
            }
        }
        if is_here {
            self.listener(endpoint).await;
        }
        self.route("reply", origin, endpoint, origin.address).await
    }

    async fn is_ready(&self, name: &str) -> Result<bool, Error> {
        let nodes: Api<Node> = Api::all(self.client.clone());
        let found = self
            .list(nodes, Some(format!("metadata.name={name}")), None)
            .await?;
        let status = found.into_iter().next().and_then(|node| node.status);
        let conditions = status.and_then(|status| status.conditions).unwrap_or_default();
        Ok(conditions
            .iter()
            .any(|one| one.type_ == "Ready" && one.status == "True"))
    }

    /// What policies say: the kernel's word for a pod of this node, and the names by the API.
    #[expect(clippy::too_many_arguments, reason = "a connection has two ends")]
    pub(super) async fn verdict(
        &self,
        direction: Direction,
        pod: &Pod,
        address: IpAddr,
        peer: &Party,
        peer_address: IpAddr,
        protocol: Protocol,
        port: u16,
    ) -> Result<(Outcome, String), Error> {
        if is_host_network(pod) {
            return Ok((
                Outcome::Passes,
                "pods with hostNetwork are not subject to policies".to_owned(),
            ));
        }
        let own = Party::pod(pod, address);
        let judged = self.rules.judge(direction, &own, peer, protocol, port);
        let what = format!(
            "{} {port}/{}",
            match direction {
                Direction::Egress => "to",
                Direction::Ingress => "on",
            },
            protocol.name()
        );
        let named = named(&judged, &key_of(pod), &format!("{peer_address} {what}"));
        let by_api = if judged.passes() {
            Outcome::Passes
        } else {
            Outcome::Stops
        };
        if node_of(pod) != self.config.node_name {
            return Ok((
                by_api,
                format!("{named} (by the API: it is enforced on node {})", node_of(pod)),
            ));
        }
        let table = &self.config.policy_table;
        let packet = Packet {
            direction,
            pod: address,
            peer: peer_address,
            protocol,
            port,
        };
        let kernel = policy::look_up(table, packet).await?;
        let (outcome, said) = match &kernel {
            KernelVerdict::NoTable => {
                let text =
                    format!("the kernel has no table {table}: policies are not enforced by skiff here");
                return Ok((Outcome::Passes, text));
            }
            KernelVerdict::UnknownPod => {
                let text = format!(
                    "the kernel knows no pod with {address}, so nothing passes: is the component `policy` running?"
                );
                return Ok((Outcome::Stops, text));
            }
            KernelVerdict::Open => (Outcome::Passes, "open".to_owned()),
            KernelVerdict::Allowed(chain) => (Outcome::Passes, format!("chain {chain} accepts")),
            KernelVerdict::Denied(chain) => (Outcome::Stops, format!("chain {chain} drops")),
        };
        if outcome == by_api {
            return Ok((outcome, format!("{named} (kernel: {said})")));
        }
        Ok((
            outcome,
            format!("kernel: {said}; but by the API: {named}. The rules are not up to date"),
        ))
    }

    /// The route from the first pod's node to an address.
    async fn route(
        &mut self,
        step: &'static str,
        origin: &Origin,
        endpoint: &Endpoint,
        to: IpAddr,
    ) -> Result<(), Error> {
        if !origin.is_here {
            let text = format!("routes of node {} are not seen from here", node_of(&origin.pod));
            self.step_to(step, Some(endpoint), Outcome::Unseen, text);
            return Ok(());
        }
        let connection = Connection::<Route>::new()?;
        let (outcome, text) = match connection.lookup_route(to).await {
            Err(error) => (Outcome::Stops, format!("no route to {to}: {error}")),
            Ok(route) => {
                let device = match route.oif() {
                    Some(index) => connection.interface_name(index).await?.unwrap_or_default(),
                    None => String::new(),
                };
                let via = route
                    .gateway()
                    .map(|gateway| format!(" via {gateway}"))
                    .unwrap_or_default();
                match route.route_type() {
                    RouteType::Unicast => (Outcome::Passes, format!("{to} by {device}{via}")),
                    RouteType::Local => (Outcome::Passes, format!("{to} is this machine")),
                    other => (Outcome::Stops, format!("{to} is {other:?}")),
                }
            }
        };
        self.step_to(step, Some(endpoint), outcome, text);
        Ok(())
    }

    /// Whether something in the pod listens.
    async fn listener(&mut self, endpoint: &Endpoint) {
        const STEP: &str = "listener";
        let Some(pod) = &endpoint.pod else { return };
        let (protocol, port) = (self.protocol, endpoint.socket.port());
        let uid = pod.metadata.uid.clone().unwrap_or_default();
        let Some(netns) = (self.config.find_namespace)(uid).await else {
            let text = "the pod's network namespace is not found";
            self.step_to(STEP, Some(endpoint), Outcome::Unseen, text);
            return;
        };
        let found = inside::run(Some(&netns), move || inside::listener(protocol, port)).await;
        let name = protocol.name();
        let (outcome, text) = match found {
            Ok(Some(Listener::Reachable)) => (Outcome::Passes, format!("something listens on {port}/{name}")),
            Ok(Some(Listener::Loopback)) => (
                Outcome::Stops,
                format!("what listens on {port}/{name} does so on the loopback address only"),
            ),
            Ok(Some(Listener::Nobody)) => (
                Outcome::Stops,
                format!("nothing listens on {port}/{name} in the pod"),
            ),
            Ok(None) => (Outcome::Unseen, format!("who listens on {name} is not looked at")),
            Err(error) => (Outcome::Unseen, error.to_string()),
        };
        self.step_to(STEP, Some(endpoint), outcome, text);
    }

    /// What really happens.
    pub(super) async fn connect(&mut self, origin: &Origin, to: &[SocketAddr]) {
        let of_family = |to: &&SocketAddr| to.is_ipv4() == origin.address.is_ipv4();
        let Some(to) = to.iter().find(of_family).copied() else {
            return;
        };
        if self.netns.is_none() || self.protocol != Protocol::Tcp {
            return;
        }
        let tried = inside::run(self.netns.as_deref(), move || inside::connect(to)).await;
        match tried {
            Ok(()) => self.step(CONNECTION, Outcome::Passes, format!("the pod connects to {to}")),
            Err(error) => self.step(
                CONNECTION,
                Outcome::Stops,
                format!("the pod does not connect to {to}: {error}"),
            ),
        }
    }
}

/// Who says what, in words.
fn named(judged: &Judgement, pod: &str, connection: &str) -> String {
    if let Some(verdict) = &judged.tier {
        let does = if verdict.accepts { "accepts" } else { "denies" };
        let tier = verdict.tier.name();
        return format!("{} ({tier} tier) {does} {connection}", verdict.rule);
    }
    match (judged.selecting.is_empty(), judged.allowing.is_empty()) {
        (true, _) => format!("no policy selects {pod}"),
        (false, false) => format!("allowed by {}", judged.allowing.join(", ")),
        (false, true) if judged.is_itself => "a pod reaches itself".to_owned(),
        (false, true) => format!(
            "{} selects {pod} and no rule allows {connection}",
            judged.selecting.join(", ")
        ),
    }
}
