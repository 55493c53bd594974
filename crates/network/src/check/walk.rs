//! The walk itself: one function a stretch of the way, in the order in which a packet goes.

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;

use k8s_openapi::api::core::v1::{Namespace, Node, Pod, Service};
use k8s_openapi::api::discovery::v1::EndpointSlice;
use k8s_openapi::api::networking::v1::NetworkPolicy;
use kube::Api;
use kube::api::ListParams;
use nlink::netlink::types::route::RouteType;
use nlink::netlink::{Connection, Route};
use serde::de::DeserializeOwned;
use skiff_client::Client;

use super::dns::{self, Answer};
use super::inside::{self, Listener};
use super::target::{ObjectName, Source, Target};
use super::{CONNECTION, CheckConfig, Error, Outcome, Step, Walk, conclude};
use crate::dns_endpoints;
use crate::policy::{self, Direction, KernelVerdict, Party, judge};
use crate::proxy::{self, KernelService, Protocol};

const SERVICE_NAME: &str = "kubernetes.io/service-name";
/// Endpoints that are looked at one by one.
const MAX_ENDPOINTS: usize = 10;

/// Walks from a pod to a target.
pub async fn walk(
    config: CheckConfig,
    client: Client,
    from: &Source,
    to: &Target,
    protocol: Protocol,
) -> Result<Walk, Error> {
    let mut walker = Walker {
        config,
        client,
        protocol,
        steps: Vec::new(),
        policies: Vec::new(),
        namespaces: BTreeMap::new(),
        netns: None,
    };
    let shown = (walker.shown("pod", &from.0), walker.shown_target(to));
    walker.go(from, to).await?;
    Ok(Walk {
        from: shown.0,
        to: shown.1,
        protocol: protocol.name(),
        verdict: conclude(&walker.steps),
        steps: walker.steps,
    })
}

struct Walker {
    config: CheckConfig,
    client: Client,
    protocol: Protocol,
    steps: Vec<Step>,
    policies: Vec<NetworkPolicy>,
    namespaces: BTreeMap<String, BTreeMap<String, String>>,
    /// The network namespace of the pod where the way begins, if it is a pod of this node.
    netns: Option<PathBuf>,
}

/// The pod where the way begins.
struct Origin {
    pod: Pod,
    address: IpAddr,
    is_here: bool,
    has_host_network: bool,
}

/// Where the way leads.
struct Endpoint {
    socket: SocketAddr,
    pod: Option<Pod>,
}

impl Walker {
    fn step(&mut self, step: &'static str, outcome: Outcome, detail: impl Into<String>) {
        self.step_to(step, None, outcome, detail);
    }

    fn step_to(
        &mut self,
        step: &'static str,
        endpoint: Option<&Endpoint>,
        outcome: Outcome,
        detail: impl Into<String>,
    ) {
        self.steps.push(Step {
            step,
            endpoint: endpoint.map(|endpoint| endpoint.socket.to_string()),
            outcome,
            detail: detail.into(),
        });
    }

    fn namespace_of(&self, object: &ObjectName) -> String {
        object
            .namespace
            .clone()
            .unwrap_or_else(|| self.config.namespace.clone())
    }

    fn shown(&self, kind: &str, object: &ObjectName) -> String {
        format!("{kind}/{}/{}", self.namespace_of(object), object.name)
    }

    fn shown_target(&self, target: &Target) -> String {
        match target {
            Target::Service(name, port) => format!("{}:{port}", self.shown("service", name)),
            Target::Pod(name, port) => format!("{}:{port}", self.shown("pod", name)),
            Target::Host(host, port) => format!("{host}:{port}"),
        }
    }

    /// Lists with a selector: nodes may list these and get none.
    async fn list<K>(
        &self,
        api: Api<K>,
        fields: Option<String>,
        labels: Option<String>,
    ) -> Result<Vec<K>, Error>
    where
        K: Clone + DeserializeOwned + std::fmt::Debug,
    {
        let mut parameters = ListParams::default();
        parameters.field_selector = fields;
        parameters.label_selector = labels;
        Ok(api.list(&parameters).await?.items)
    }

    async fn find<K>(&self, object: &ObjectName) -> Result<Option<K>, Error>
    where
        K: kube::Resource<DynamicType = (), Scope = k8s_openapi::NamespaceResourceScope>
            + Clone
            + DeserializeOwned
            + std::fmt::Debug,
    {
        let api: Api<K> = Api::namespaced(self.client.clone(), &self.namespace_of(object));
        let named = Some(format!("metadata.name={}", object.name));
        Ok(self.list(api, named, None).await?.into_iter().next())
    }

    async fn go(&mut self, from: &Source, to: &Target) -> Result<(), Error> {
        let Some(origin) = self.origin(&from.0).await? else {
            return Ok(());
        };
        self.policies = self.list(Api::all(self.client.clone()), None, None).await?;
        let namespaces: Vec<Namespace> = self.list(Api::all(self.client.clone()), None, None).await?;
        self.namespaces = namespaces
            .into_iter()
            .filter_map(|namespace| {
                Some((
                    namespace.metadata.name?,
                    namespace.metadata.labels.unwrap_or_default(),
                ))
            })
            .collect();
        let (connect_to, endpoints) = match to {
            Target::Service(name, port) => match self.service(&origin, name, port).await? {
                Some(found) => found,
                None => return Ok(()),
            },
            Target::Pod(name, port) => match self.pod(&origin, name, *port).await? {
                Some(endpoint) => (vec![endpoint.socket], vec![endpoint]),
                None => return Ok(()),
            },
            Target::Host(host, port) => {
                let addresses = match host.parse() {
                    Ok(address) => vec![address],
                    Err(_) => self.resolve(&origin, host, None).await?,
                };
                self.outside(&addresses, *port)
            }
        };
        for endpoint in &endpoints {
            self.to_endpoint(&origin, endpoint).await?;
        }
        self.connect(&origin, &connect_to).await;
        Ok(())
    }

    async fn origin(&mut self, name: &ObjectName) -> Result<Option<Origin>, Error> {
        const STEP: &str = "source";
        let Some(pod) = self.find::<Pod>(name).await? else {
            let text = format!("there is no {}", self.shown("pod", name));
            self.step(STEP, Outcome::Stops, text);
            return Ok(None);
        };
        let addresses = addresses_of(&pod);
        let phase = phase_of(&pod);
        let Some(address) = addresses.first().copied().filter(|_| phase == "Running") else {
            let text = format!("the pod is {phase} and has {} addresses", addresses.len());
            self.step(STEP, Outcome::Stops, text);
            return Ok(None);
        };
        let node = node_of(&pod);
        let is_here = node == self.config.node_name;
        let has_host_network = is_host_network(&pod);
        if is_here && !has_host_network {
            let uid = pod.metadata.uid.clone().unwrap_or_default();
            self.netns = (self.config.find_namespace)(uid).await;
        }
        let place = match is_here {
            true => "this machine".to_owned(),
            false => "another machine: what its kernel has is not seen from here".to_owned(),
        };
        self.step(
            STEP,
            Outcome::Passes,
            format!("{address} on node {node}, {place}"),
        );
        Ok(Some(Origin {
            pod,
            address,
            is_here,
            has_host_network,
        }))
    }

    /// Asks cluster DNS for a name, as the pod does, and compares with what it should say.
    async fn resolve(
        &mut self,
        origin: &Origin,
        name: &str,
        expected: Option<&[IpAddr]>,
    ) -> Result<Vec<IpAddr>, Error> {
        const STEP: &str = "dns";
        let service = ObjectName {
            namespace: Some("kube-system".to_owned()),
            name: dns_endpoints::SERVICE.to_owned(),
        };
        let servers = self.find::<Service>(&service).await?;
        let servers = servers.map(|service| cluster_ips(&service)).unwrap_or_default();
        let of_family = |address: &&IpAddr| address.is_ipv4() == origin.address.is_ipv4();
        let Some(server) = servers.iter().find(of_family).or(servers.first()).copied() else {
            self.step(STEP, Outcome::Stops, "there is no service kube-system/kube-dns");
            return Ok(Vec::new());
        };
        if self.dns_is_closed(origin, server).await? {
            return Ok(Vec::new());
        }
        let ipv4 = expected
            .and_then(|expected| expected.first())
            .is_none_or(IpAddr::is_ipv4);
        let (asked, at) = (name.to_owned(), SocketAddr::new(server, dns_endpoints::PORT));
        let answer = inside::run(self.netns.as_deref(), move || dns::ask(at, &asked, ipv4)).await;
        let who = if self.netns.is_some() {
            "the pod"
        } else {
            "this machine"
        };
        let (outcome, detail, found) = match answer {
            Err(error) => {
                let text = format!("{server} does not answer {who} about {name}: {error}");
                (Outcome::Stops, text, Vec::new())
            }
            Ok(Answer::NoSuchName) => (Outcome::Stops, format!("{server} knows no {name}"), Vec::new()),
            Ok(Answer::Failed(code)) => {
                let text = format!("{server} answers {name} with error {code}");
                (Outcome::Stops, text, Vec::new())
            }
            Ok(Answer::Addresses(found)) => {
                let shown = list(&found);
                let wrong = expected.is_some_and(|expected| !found.iter().any(|one| expected.contains(one)));
                match (found.is_empty(), wrong) {
                    (true, _) => (Outcome::Stops, format!("{name} has no address"), found),
                    (false, true) => {
                        let text = format!("{name} is {shown}, which is not the service's");
                        (Outcome::Stops, text, found)
                    }
                    (false, false) => {
                        let text = format!("{name} is {shown} ({server} asked by {who})");
                        (Outcome::Passes, text, found)
                    }
                }
            }
        };
        self.step(STEP, outcome, detail);
        Ok(found)
    }

    /// Whether policies keep the pod from cluster DNS; says so.
    async fn dns_is_closed(&mut self, origin: &Origin, server: IpAddr) -> Result<bool, Error> {
        if origin.has_host_network {
            return Ok(false);
        }
        // Pods ask the instance of their own node, at the gateway of its pods.
        let nodes: Api<Node> = Api::all(self.client.clone());
        let named = format!("metadata.name={}", node_of(&origin.pod));
        let node = self.list(nodes, Some(named), None).await?.into_iter().next();
        let cidrs = node.and_then(|node| node.spec?.pod_cidrs).unwrap_or_default();
        let gateways = cidrs
            .iter()
            .filter_map(|cidr| cidr.parse::<skiff_meta::net::Cidr>().ok()?.nth(1));
        let Some(gateway) = gateways.into_iter().find(|one| one.is_ipv4() == server.is_ipv4()) else {
            return Ok(false);
        };
        let verdict = self
            .verdict(
                Direction::Egress,
                &origin.pod,
                origin.address,
                &Party::dns(gateway),
                gateway,
                Protocol::Udp,
                53,
            )
            .await?;
        if verdict.0 == Outcome::Stops {
            self.step(
                "dns",
                Outcome::Stops,
                format!("cluster DNS is not reached: {}", verdict.1),
            );
        }
        Ok(verdict.0 == Outcome::Stops)
    }

    async fn service(
        &mut self,
        origin: &Origin,
        name: &ObjectName,
        port: &str,
    ) -> Result<Option<(Vec<SocketAddr>, Vec<Endpoint>)>, Error> {
        const STEP: &str = "service";
        let Some(service) = self.find::<Service>(name).await? else {
            let text = format!("there is no {}", self.shown("service", name));
            self.step(STEP, Outcome::Stops, text);
            return Ok(None);
        };
        let spec = service.spec.clone().unwrap_or_default();
        let namespace = self.namespace_of(name);
        let full = format!("{}.{namespace}.svc.{}", name.name, self.config.cluster_domain);
        if spec.type_.as_deref() == Some("ExternalName") {
            let outside = spec.external_name.unwrap_or_default();
            self.step(STEP, Outcome::Passes, format!("it is another name of {outside}"));
            let addresses = self.resolve(origin, &full, None).await?;
            let Ok(port) = port.parse() else {
                self.step(STEP, Outcome::Stops, format!("port {port} is not a number"));
                return Ok(None);
            };
            return Ok(Some(self.outside(&addresses, port)));
        }
        let ports = spec.ports.unwrap_or_default();
        let protocol = self.protocol;
        let same_protocol =
            |given: &Option<String>| Protocol::parse(given.as_deref().unwrap_or("TCP")) == Some(protocol);
        let found = ports.iter().find(|one| {
            same_protocol(&one.protocol)
                && (one.name.as_deref() == Some(port) || one.port.to_string() == port)
        });
        let Some(found) = found else {
            let shown: Vec<String> = ports
                .iter()
                .map(|one| format!("{}/{}", one.port, one.protocol.as_deref().unwrap_or("TCP")))
                .collect();
            let text = format!(
                "it has no port {port}/{}; it has {}",
                protocol.name(),
                shown.join(", ")
            );
            self.step(STEP, Outcome::Stops, text);
            return Ok(None);
        };
        let port_name = found.name.clone().unwrap_or_default();
        let number = u16::try_from(found.port).unwrap_or_default();
        let addresses = cluster_ips(&service);
        let of_family = |address: &&IpAddr| address.is_ipv4() == origin.address.is_ipv4();
        let address = addresses.iter().find(of_family).or(addresses.first()).copied();
        let ipv4 = address.map_or(origin.address.is_ipv4(), |address| address.is_ipv4());
        let planned = self.slices(&namespace, &name.name, &port_name, ipv4).await?;
        let Some(address) = address else {
            // A headless service is its endpoints' names.
            let expected: Vec<IpAddr> = planned.iter().map(SocketAddr::ip).collect();
            self.resolve(origin, &full, Some(&expected)).await?;
            self.step(STEP, Outcome::Passes, "it is headless: its name is its endpoints");
            return self.endpoints_of(planned).await.map(Some);
        };
        self.resolve(origin, &full, Some(&addresses)).await?;
        let at = SocketAddr::new(address, number);
        let sockets = match origin.is_here {
            false => {
                let text = format!(
                    "{at}/{} has {} endpoints, by the API",
                    protocol.name(),
                    planned.len()
                );
                let outcome = if planned.is_empty() {
                    Outcome::Stops
                } else {
                    Outcome::Unseen
                };
                self.step(STEP, outcome, text);
                planned
            }
            true => {
                let kernel = proxy::look_up(&self.config.proxy_table, address, protocol, number).await?;
                self.kernel_service(at, kernel, &planned)
            }
        };
        if sockets.is_empty() {
            return Ok(None);
        }
        let (_, endpoints) = self.endpoints_of(sockets).await?;
        Ok(Some((vec![at], endpoints)))
    }

    /// What the kernel says of a service's address and port; the endpoints that it leads to.
    fn kernel_service(
        &mut self,
        at: SocketAddr,
        kernel: KernelService,
        planned: &[SocketAddr],
    ) -> Vec<SocketAddr> {
        let table = self.config.proxy_table.clone();
        let stops = match kernel {
            KernelService::Endpoints(found) if !found.is_empty() => {
                let mut text = format!("{at} leads to {} in the kernel", list(&found));
                let missing: Vec<&SocketAddr> = planned.iter().filter(|one| !found.contains(one)).collect();
                let stale: Vec<&SocketAddr> = found.iter().filter(|one| !planned.contains(one)).collect();
                if !missing.is_empty() {
                    text += &format!("; not used, though ready: {}", list(&missing));
                }
                if !stale.is_empty() {
                    text += &format!("; not ready by the API: {}", list(&stale));
                }
                self.step("service", Outcome::Passes, text);
                return found;
            }
            KernelService::NoTable => {
                format!("the kernel has no table {table}: is the component `proxy` running?")
            }
            KernelService::Missing => format!("the kernel has no entry for {at} in table {table}"),
            KernelService::Drop => {
                format!("{at} has no endpoint on this node, and its traffic policy is Local")
            }
            KernelService::Reject | KernelService::Endpoints(_) => {
                format!(
                    "{at} is refused: the service has no ready endpoint ({} by the API)",
                    planned.len()
                )
            }
        };
        self.step("service", Outcome::Stops, stops);
        Vec::new()
    }

    /// The ready endpoints of a service port, by the API.
    async fn slices(
        &self,
        namespace: &str,
        service: &str,
        port: &str,
        ipv4: bool,
    ) -> Result<Vec<SocketAddr>, Error> {
        let api: Api<EndpointSlice> = Api::namespaced(self.client.clone(), namespace);
        let slices = self
            .list(api, None, Some(format!("{SERVICE_NAME}={service}")))
            .await?;
        let family = if ipv4 { "IPv4" } else { "IPv6" };
        let mut found = Vec::new();
        for slice in slices.iter().filter(|slice| slice.address_type == family) {
            let ports = slice.ports.iter().flatten();
            let numbers: Vec<u16> = ports
                .filter(|one| one.name.as_deref().unwrap_or_default() == port)
                .filter(|one| {
                    Protocol::parse(one.protocol.as_deref().unwrap_or("TCP")) == Some(self.protocol)
                })
                .filter_map(|one| u16::try_from(one.port?).ok())
                .collect();
            for endpoint in slice.endpoints.iter().flatten() {
                let ready = endpoint
                    .conditions
                    .as_ref()
                    .and_then(|conditions| conditions.ready);
                if !ready.unwrap_or(true) {
                    continue;
                }
                let address = endpoint
                    .addresses
                    .first()
                    .and_then(|address| address.parse().ok());
                found.extend(address.into_iter().flat_map(|address: IpAddr| {
                    numbers
                        .iter()
                        .map(move |number| SocketAddr::new(address, *number))
                }));
            }
        }
        found.sort();
        found.dedup();
        Ok(found)
    }

    /// The pods behind endpoints.
    async fn endpoints_of(
        &mut self,
        sockets: Vec<SocketAddr>,
    ) -> Result<(Vec<SocketAddr>, Vec<Endpoint>), Error> {
        if sockets.is_empty() {
            self.step("endpoint", Outcome::Stops, "there is no ready endpoint");
        }
        if sockets.len() > MAX_ENDPOINTS {
            let text = format!(
                "{} endpoints; the first {MAX_ENDPOINTS} are looked at",
                sockets.len()
            );
            self.step("endpoint", Outcome::Passes, text);
        }
        let mut endpoints = Vec::new();
        for socket in sockets.iter().copied().take(MAX_ENDPOINTS) {
            let by_address = Some(format!("status.podIP={}", socket.ip()));
            let pods: Vec<Pod> = self.list(Api::all(self.client.clone()), by_address, None).await?;
            let pod = pods
                .into_iter()
                .find(|pod| !matches!(phase_of(pod), "Succeeded" | "Failed") && !is_host_network(pod));
            endpoints.push(Endpoint { socket, pod });
        }
        Ok((sockets, endpoints))
    }

    fn outside(&mut self, addresses: &[IpAddr], port: u16) -> (Vec<SocketAddr>, Vec<Endpoint>) {
        let sockets: Vec<SocketAddr> = addresses
            .iter()
            .take(MAX_ENDPOINTS)
            .map(|address| SocketAddr::new(*address, port))
            .collect();
        let endpoints = sockets.iter().map(|socket| Endpoint {
            socket: *socket,
            pod: None,
        });
        (sockets.clone(), endpoints.collect())
    }

    async fn pod(
        &mut self,
        origin: &Origin,
        name: &ObjectName,
        port: u16,
    ) -> Result<Option<Endpoint>, Error> {
        const STEP: &str = "endpoint";
        let Some(pod) = self.find::<Pod>(name).await? else {
            let text = format!("there is no {}", self.shown("pod", name));
            self.step(STEP, Outcome::Stops, text);
            return Ok(None);
        };
        let addresses = addresses_of(&pod);
        let of_family = |address: &&IpAddr| address.is_ipv4() == origin.address.is_ipv4();
        let address = addresses.iter().find(of_family).copied();
        let Some(address) = address.filter(|_| phase_of(&pod) == "Running") else {
            let text = format!("the pod is {} and has no address of the family", phase_of(&pod));
            self.step(STEP, Outcome::Stops, text);
            return Ok(None);
        };
        Ok(Some(Endpoint {
            socket: SocketAddr::new(address, port),
            pod: Some(pod),
        }))
    }

    /// From the node of the first pod to an endpoint, and back.
    async fn to_endpoint(&mut self, origin: &Origin, endpoint: &Endpoint) -> Result<(), Error> {
        let (address, port, protocol) = (endpoint.socket.ip(), endpoint.socket.port(), self.protocol);
        let near = |pod: &Pod| node_of(pod) == self.config.node_name;
        let node = endpoint.pod.as_ref().map(|pod| node_of(pod).to_owned());
        let is_here = endpoint.pod.as_ref().is_some_and(near);
        let who = match &endpoint.pod {
            Some(pod) => format!("pod {} on node {}", key_of(pod), node_of(pod)),
            None => "not a pod of the cluster".to_owned(),
        };
        self.step_to("endpoint", Some(endpoint), Outcome::Passes, who);
        let itself = address == origin.address;
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
    async fn verdict(
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
        let judged = judge(
            &self.policies,
            &self.namespaces,
            direction,
            &own,
            peer,
            protocol,
            port,
        );
        let what = format!(
            "{} {port}/{}",
            match direction {
                Direction::Egress => "to",
                Direction::Ingress => "on",
            },
            protocol.name()
        );
        let named = match (judged.selecting.is_empty(), judged.passes()) {
            (true, _) => format!("no policy selects {}", key_of(pod)),
            (false, true) => format!("allowed by {}", judged.allowing.join(", ")),
            (false, false) => format!(
                "{} selects {} and no rule allows {peer_address} {what}",
                judged.selecting.join(", "),
                key_of(pod)
            ),
        };
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
        let kernel = policy::look_up(table, direction, address, peer_address, protocol, port).await?;
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
    async fn connect(&mut self, origin: &Origin, to: &[SocketAddr]) {
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

fn list(all: &[impl ToString]) -> String {
    let shown: Vec<String> = all.iter().take(MAX_ENDPOINTS).map(ToString::to_string).collect();
    match all.len() > shown.len() {
        true => format!("{} and {} more", shown.join(", "), all.len() - shown.len()),
        false => shown.join(", "),
    }
}

fn cluster_ips(service: &Service) -> Vec<IpAddr> {
    let spec = service.spec.as_ref();
    let all = spec.and_then(|spec| spec.cluster_ips.as_ref());
    all.into_iter()
        .flatten()
        .filter_map(|address| address.parse().ok())
        .collect()
}

fn addresses_of(pod: &Pod) -> Vec<IpAddr> {
    let all = pod.status.as_ref().and_then(|status| status.pod_ips.as_ref());
    all.into_iter()
        .flatten()
        .filter_map(|one| one.ip.parse().ok())
        .collect()
}

fn phase_of(pod: &Pod) -> &str {
    let status = pod.status.as_ref();
    status
        .and_then(|status| status.phase.as_deref())
        .unwrap_or("Unknown")
}

fn node_of(pod: &Pod) -> &str {
    let spec = pod.spec.as_ref();
    spec.and_then(|spec| spec.node_name.as_deref()).unwrap_or("-")
}

fn is_host_network(pod: &Pod) -> bool {
    pod.spec
        .as_ref()
        .and_then(|spec| spec.host_network)
        .unwrap_or(false)
}

fn key_of(pod: &Pod) -> String {
    let meta = &pod.metadata;
    format!(
        "{}/{}",
        meta.namespace.as_deref().unwrap_or_default(),
        meta.name.as_deref().unwrap_or_default()
    )
}
