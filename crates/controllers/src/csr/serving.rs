//! The approver of kubelets' serving certificates. Upstream has none: it leaves them to the administrator, because a
//! certificate for the wrong name lets a node pretend to be another server.
//!
//! A node says itself which addresses it has, so that they are in its status proves little. Therefore a request is
//! approved only if the node asks for itself, for its own name and for addresses of its status, and none of them is
//! what somebody else is reached by: another node, the API server, a service or a pod. Everything else is left
//! undecided, for the administrator (`kubectl certificate approve`).

use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::certificates::v1::CertificateSigningRequest;
use k8s_openapi::api::core::v1::{ConfigMap, Node};
use k8s_openapi::api::discovery::v1::EndpointSlice;
use skiff_client::{Action, Change, Informer, Key, Reconcile};

use super::approve::{approve, is_decided};
use super::request::{Request, check_kubelet_serving};
use crate::{Context, Error};

const SIGNER: &str = "kubernetes.io/kubelet-serving";
const NODE_PREFIX: &str = "system:node:";
const MESSAGE: &str = "Auto approving kubelet serving certificate for the node's own name and addresses.";
/// What another node or an API server has may change, too.
const AGAIN: Duration = Duration::from_secs(1);

/// What no node may have a certificate for.
#[derive(Debug, Default)]
struct Reserved {
    /// Addresses and names of API servers.
    hosts: Vec<String>,
    /// The networks of services and pods.
    networks: Vec<(IpAddr, u8)>,
}

impl Reserved {
    fn refuses_address(&self, address: IpAddr) -> Option<&'static str> {
        let address = address.to_canonical();
        let host = |host: &String| host.parse().is_ok_and(|known: IpAddr| known == address);
        let own = match address {
            IpAddr::V4(ip) => {
                ip.is_loopback() || ip.is_unspecified() || ip.is_broadcast() || ip.is_link_local()
            }
            IpAddr::V6(ip) => ip.is_loopback() || ip.is_unspecified() || ip.is_unicast_link_local(),
        };
        if own || address.is_multicast() {
            Some("is not the address of one machine")
        } else if self.hosts.iter().any(host) {
            Some("is an address of the API server")
        } else if self
            .networks
            .iter()
            .any(|network| skiff_api::net::contains(*network, address))
        {
            Some("is in a network of services or pods")
        } else {
            None
        }
    }

    fn refuses_name(&self, name: &str) -> Option<&'static str> {
        let first = name.split('.').next().unwrap_or_default();
        if ["localhost", "kubernetes"].contains(&first) || name.ends_with(".localhost") {
            Some("is a name of the API server")
        } else if name.ends_with(".svc") || name.contains(".svc.") {
            Some("is the name of a service")
        } else if self.hosts.iter().any(|host| host.eq_ignore_ascii_case(name)) {
            Some("is a name of the API server")
        } else {
            None
        }
    }
}

fn addresses(node: &Node) -> impl Iterator<Item = (&str, &str)> {
    let addresses = node
        .status
        .iter()
        .flat_map(|status| status.addresses.iter().flatten());
    addresses.map(|one| (one.type_.as_str(), one.address.as_str()))
}

fn name_of(node: &Node) -> &str {
    node.metadata.name.as_deref().unwrap_or_default()
}

/// Why a request of the node is not approved.
fn check(request: &Request, node: &Node, nodes: &[Arc<Node>], reserved: &Reserved) -> Result<(), String> {
    let name = name_of(node);
    let others = || nodes.iter().filter(|other| name_of(other) != name);
    for dns in &request.dns_names {
        if dns != name {
            return Err(format!("{dns:?} is not the name of the node"));
        }
        if let Some(why) = reserved.refuses_name(dns) {
            return Err(format!("{dns:?} {why}"));
        }
        if let Some(other) = others().find(|other| addresses(other).any(|(_, theirs)| theirs == dns)) {
            return Err(format!("{dns:?} is a name of node {:?}", name_of(other)));
        }
    }
    for address in &request.addresses {
        let is = |(type_, text): (&str, &str)| {
            ["InternalIP", "ExternalIP"].contains(&type_)
                && text.parse().is_ok_and(|ip: IpAddr| ip == *address)
        };
        if let Some(why) = reserved.refuses_address(*address) {
            return Err(format!("{address} {why}"));
        }
        if let Some(other) = others().find(|other| addresses(other).any(is)) {
            return Err(format!("{address} is an address of node {:?}", name_of(other)));
        }
        if !addresses(node).any(is) {
            return Err(format!("{address} is not an address of the node"));
        }
    }
    Ok(())
}

/// The node that asks for itself; `None` if the request is somebody else's business.
fn requester<'a>(object: &'a CertificateSigningRequest, request: &Request) -> Option<&'a str> {
    let user = object.spec.username.as_deref()?;
    let name = user.strip_prefix(NODE_PREFIX).filter(|name| !name.is_empty())?;
    let groups = object.spec.groups.as_deref().unwrap_or_default();
    let usages = object.spec.usages.as_deref().unwrap_or_default();
    let is_node = groups.iter().any(|group| group == "system:nodes");
    (is_node && request.common_name() == user && check_kubelet_serving(request, usages).is_ok())
        .then_some(name)
}

struct ServingApprover {
    context: Context,
    requests: Informer<CertificateSigningRequest>,
    nodes: Informer<Node>,
    /// The API servers' endpoints.
    slices: Informer<EndpointSlice>,
    /// Where machines are told to find the API server.
    maps: Informer<ConfigMap>,
}

pub(crate) async fn run(context: Context) {
    let reconciler = Arc::new(ServingApprover {
        requests: context.informers.informer(),
        nodes: context.informers.informer(),
        slices: context
            .informers
            .filtered(Some("kubernetes.io/service-name=kubernetes"), None),
        maps: context
            .informers
            .filtered(None, Some("metadata.name=cluster-info")),
        context: context.clone(),
    });
    context
        .controller("kubelet_serving_certificate", reconciler)
        .owns(|r| &r.requests)
        .watches(|r| &r.nodes, ServingApprover::woken_by_node)
        .reads(|r| &r.slices)
        .reads(|r| &r.maps)
        .run()
        .await;
}

impl ServingApprover {
    /// A node that reports other addresses: its requests that wait.
    fn woken_by_node(&self, change: &Change<Node>) -> Vec<Key> {
        let Change::Applied { old, new } = change else {
            return Vec::new();
        };
        let before = old.as_deref();
        if before.is_some_and(|old| addresses(old).eq(addresses(new))) {
            return Vec::new();
        }
        let user = format!("{NODE_PREFIX}{}", name_of(new));
        let requests = self.requests.list();
        let waiting = requests.iter().filter(|object| {
            let its = object.spec.username.as_deref() == Some(&user) && object.spec.signer_name == SIGNER;
            its && !is_decided(object)
        });
        waiting.map(|object| Key::of(&**object)).collect()
    }

    fn reserved(&self) -> Reserved {
        let config = &self.context.config;
        let networks = config.service_cidrs.iter().chain(&config.cluster_cidrs);
        let slices = self.slices.list();
        let endpoints = slices
            .iter()
            .filter(|slice| slice.metadata.namespace.as_deref() == Some("default"))
            .flat_map(|slice| slice.endpoints.iter().flatten());
        let mut hosts: Vec<String> = endpoints
            .flat_map(|endpoint| endpoint.addresses.clone())
            .collect();
        let map = self.maps.get("kube-public", "cluster-info");
        let kubeconfig = map.and_then(|map| map.data.as_ref()?.get("kubeconfig").cloned());
        hosts.extend(kubeconfig.as_deref().into_iter().flat_map(server_hosts));
        Reserved {
            hosts,
            networks: networks
                .filter_map(|text| {
                    let (address, bits) = text.split_once('/')?;
                    Some((address.parse().ok()?, bits.parse().ok()?))
                })
                .collect(),
        }
    }
}

/// The hosts of the servers that a kubeconfig names.
pub(crate) fn server_hosts(kubeconfig: &str) -> Vec<String> {
    let urls = kubeconfig.lines().filter_map(|line| {
        let (_, url) = line.trim_start_matches(['-', ' ']).split_once("server:")?;
        url.trim().trim_matches(['"', '\'']).strip_prefix("https://")
    });
    urls.map(|url| {
        let authority = url.split('/').next().unwrap_or_default();
        let host = match authority.strip_prefix('[').and_then(|rest| rest.split_once(']')) {
            Some((host, _)) => host,
            None => authority.rsplit_once(':').map_or(authority, |(host, _)| host),
        };
        host.to_owned()
    })
    .collect()
}

impl Reconcile for ServingApprover {
    type Key = Key;
    type Error = Error;

    async fn reconcile(&self, key: Key) -> Result<Action, Error> {
        let Some(object) = self.requests.get("", &key.name) else {
            return Ok(Action::Done);
        };
        if is_decided(&object) || object.spec.signer_name != SIGNER {
            return Ok(Action::Done);
        }
        let Ok(request) = Request::parse(&object.spec.request.0) else {
            return Ok(Action::Done);
        };
        let Some(name) = requester(&object, &request) else {
            return Ok(Action::Done);
        };
        let Some(node) = self.nodes.get("", name) else {
            return Ok(Action::RequeueAfter(AGAIN));
        };
        match check(&request, &node, &self.nodes.list(), &self.reserved()) {
            Ok(()) => approve(&self.context, &object, MESSAGE).await,
            Err(why) => {
                tracing::warn!(
                    request = key.name,
                    node = name,
                    why,
                    "a serving certificate is left to the administrator"
                );
                Ok(Action::RequeueAfter(AGAIN * 10))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn node(name: &str, addresses: &[(&str, &str)]) -> Arc<Node> {
        let addresses: Vec<_> = addresses
            .iter()
            .map(|(type_, address)| json!({"type": type_, "address": address}))
            .collect();
        let node = json!({"metadata": {"name": name}, "status": {"addresses": addresses}});
        Arc::new(serde_json::from_value(node).unwrap())
    }

    fn request(node: &str, names: &[&str], addresses: &[&str]) -> Request {
        Request {
            subject: vec![(10, "system:nodes".into()), (3, format!("system:node:{node}"))],
            dns_names: names.iter().map(|name| (*name).to_owned()).collect(),
            addresses: addresses.iter().map(|address| address.parse().unwrap()).collect(),
            ..Request::default()
        }
    }

    /// What a node may have, and every way that it could become somebody else.
    #[test]
    fn only_the_nodes_own_names_and_addresses() {
        let reserved = Reserved {
            hosts: vec!["192.0.2.1".into(), "api.example".into()],
            networks: vec![
                ("10.96.0.0".parse().unwrap(), 12),
                ("10.244.0.0".parse().unwrap(), 16),
            ],
        };
        let own = |name: &str, address: &str| node(name, &[("InternalIP", address), ("Hostname", name)]);
        let other = own("b", "192.0.2.3");
        let try_as = |name: &str, address: &str, names: &[&str], addresses: &[&str]| {
            let me = own(name, address);
            check(
                &request(name, names, addresses),
                &me,
                &[me.clone(), other.clone()],
                &reserved,
            )
        };
        assert_eq!(try_as("a", "192.0.2.2", &["a"], &["192.0.2.2"]), Ok(()));
        assert_eq!(try_as("a", "192.0.2.2", &[], &["192.0.2.2"]), Ok(()));
        for (name, address, names, addresses, why) in [
            (
                "a",
                "192.0.2.2",
                &["b"][..],
                &[][..],
                "is not the name of the node",
            ),
            (
                "a",
                "192.0.2.2",
                &["api.example"],
                &[],
                "is not the name of the node",
            ),
            (
                "a",
                "192.0.2.2",
                &[],
                &["192.0.2.9"],
                "is not an address of the node",
            ),
            // The node claims it in its status.
            (
                "a",
                "192.0.2.3",
                &[],
                &["192.0.2.3"],
                "is an address of node \"b\"",
            ),
            (
                "a",
                "192.0.2.1",
                &[],
                &["192.0.2.1"],
                "is an address of the API server",
            ),
            (
                "a",
                "10.96.0.1",
                &[],
                &["10.96.0.1"],
                "is in a network of services or pods",
            ),
            (
                "a",
                "10.244.3.1",
                &[],
                &["10.244.3.1"],
                "is in a network of services or pods",
            ),
            (
                "a",
                "127.0.0.1",
                &[],
                &["127.0.0.1"],
                "is not the address of one machine",
            ),
            (
                "a",
                "::ffff:192.0.2.1",
                &[],
                &["::ffff:192.0.2.1"],
                "is an address of the API server",
            ),
            // The node was registered under a name that is somebody's.
            (
                "kubernetes",
                "192.0.2.2",
                &["kubernetes"],
                &[],
                "is a name of the API server",
            ),
            (
                "kubernetes.default.svc",
                "192.0.2.2",
                &["kubernetes.default.svc"],
                &[],
                "is a name of the API server",
            ),
            (
                "localhost",
                "192.0.2.2",
                &["localhost"],
                &[],
                "is a name of the API server",
            ),
            (
                "api.example",
                "192.0.2.2",
                &["api.example"],
                &[],
                "is a name of the API server",
            ),
            (
                "hook.ns.svc",
                "192.0.2.2",
                &["hook.ns.svc"],
                &[],
                "is the name of a service",
            ),
        ] {
            let refused = try_as(name, address, names, addresses).unwrap_err();
            assert!(refused.contains(why), "{name} {names:?} {addresses:?}: {refused}");
        }
    }

    #[test]
    fn only_nodes_that_ask_for_themselves() {
        let check = |user: &str, groups: &[&str], node: &str, usages: &[&str], expected: Option<&str>| {
            let object: CertificateSigningRequest = serde_json::from_value(json!({"metadata": {"name": "r"},
                "spec": {"request": "", "signerName": SIGNER, "username": user, "groups": groups, "usages": usages}}))
            .unwrap();
            assert_eq!(
                requester(&object, &request(node, &["n"], &[])),
                expected,
                "{user} {groups:?} {node}"
            );
        };
        let usages = ["digital signature", "server auth"];
        check("system:node:a", &["system:nodes"], "a", &usages, Some("a"));
        check("system:node:a", &["system:nodes"], "b", &usages, None);
        check("system:node:a", &["others"], "a", &usages, None);
        check(
            "system:bootstrap:abcdef",
            &["system:bootstrappers"],
            "a",
            &usages,
            None,
        );
        check("system:node:", &["system:nodes"], "", &usages, None);
        check(
            "system:node:a",
            &["system:nodes"],
            "a",
            &["digital signature", "client auth"],
            None,
        );
    }

    #[test]
    fn servers_of_a_kubeconfig() {
        let text = "clusters:\n- cluster:\n    server: https://192.0.2.1:6443\n- cluster:\n    server: \"https://[fd00::1]:6443/\"\n- cluster: \n    server: https://api.example\n";
        assert_eq!(server_hosts(text), ["192.0.2.1", "fd00::1", "api.example"]);
    }
}
