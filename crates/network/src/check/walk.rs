//! The walk itself: one function a stretch of the way, in the order in which a packet goes.

use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;

use k8s_openapi::api::core::v1::{Namespace, Pod, Service};
use k8s_openapi::api::discovery::v1::EndpointSlice;
use kube::Api;
use kube::api::ListParams;
use serde::de::DeserializeOwned;
use skiff_client::Client;

use super::objects::{MAX_ENDPOINTS, addresses_of, cluster_ips, is_host_network, list, node_of, phase_of};
use super::target::{ObjectName, Source, Target};
use super::{CheckConfig, Error, Outcome, Step, Walk, conclude};
use crate::policy::{Rulebook, list_tier_policies};
use crate::proxy::{self, KernelService, Protocol};

const SERVICE_NAME: &str = "kubernetes.io/service-name";

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
        rules: Rulebook::default(),
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

pub(super) struct Walker {
    pub(super) config: CheckConfig,
    pub(super) client: Client,
    pub(super) protocol: Protocol,
    pub(super) steps: Vec<Step>,
    pub(super) rules: Rulebook,
    /// The network namespace of the pod where the way begins, if it is a pod of this node.
    pub(super) netns: Option<PathBuf>,
}

/// The pod where the way begins.
pub(super) struct Origin {
    pub(super) pod: Pod,
    pub(super) address: IpAddr,
    pub(super) is_here: bool,
    pub(super) has_host_network: bool,
}

/// Where the way leads.
pub(super) struct Endpoint {
    pub(super) socket: SocketAddr,
    pub(super) pod: Option<Pod>,
}

impl Walker {
    pub(super) fn step(&mut self, step: &'static str, outcome: Outcome, detail: impl Into<String>) {
        self.step_to(step, None, outcome, detail);
    }

    pub(super) fn step_to(
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
    pub(super) async fn list<K>(
        &self,
        api: Api<K>,
        fields: Option<String>,
        labels: Option<String>,
    ) -> Result<Vec<K>, Error>
    where
        K: Clone + DeserializeOwned + std::fmt::Debug,
    {
        let parameters = ListParams {
            field_selector: fields,
            label_selector: labels,
            ..ListParams::default()
        };
        Ok(api.list(&parameters).await?.items)
    }

    pub(super) async fn find<K>(&self, object: &ObjectName) -> Result<Option<K>, Error>
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
        self.rules.policies = self.list(Api::all(self.client.clone()), None, None).await?;
        match list_tier_policies(&self.client).await {
            Ok(tiers) => self.rules.tiers = tiers,
            Err(kube::Error::Api(status)) if status.code == 403 => {
                let text =
                    format!("ClusterNetworkPolicies and AdminNetworkPolicies may not be read: {status}");
                self.step("policies", Outcome::Unseen, text);
            }
            Err(error) => return Err(error.into()),
        }
        if !self.rules.tiers.is_empty() {
            self.rules.nodes = self.list(Api::all(self.client.clone()), None, None).await?;
        }
        let namespaces: Vec<Namespace> = self.list(Api::all(self.client.clone()), None, None).await?;
        self.rules.namespaces = namespaces
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
            let is_direct = connect_to.contains(&endpoint.socket);
            self.follow(&origin, endpoint, is_direct).await?;
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
}
