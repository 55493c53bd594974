//! Which endpoints of a service port take traffic: upstream's choice between ready endpoints and those
//! that are on their way out, for the whole cluster and for this node.

use std::collections::{BTreeMap, HashMap};
use std::net::IpAddr;
use std::sync::Arc;

use k8s_openapi::api::discovery::v1::EndpointSlice;

/// The service a slice belongs to.
const SERVICE_NAME: &str = "kubernetes.io/service-name";
/// A slice with this label, whatever its value, is for DNS alone.
const HEADLESS: &str = "service.kubernetes.io/headless";

/// The name of the service that a slice belongs to.
pub(super) fn service_of(slice: &EndpointSlice) -> Option<&str> {
    let labels = slice.metadata.labels.as_ref()?;
    labels.get(SERVICE_NAME).map(String::as_str)
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct State {
    ready: bool,
    /// Still answers although its pod is being deleted.
    serving_terminating: bool,
    local: bool,
    /// Meant for certain nodes, and for this one.
    hinted: bool,
    hinted_here: bool,
}

/// An address and port that traffic can go to.
pub type Target = (IpAddr, u16);

/// The targets of one service port, in order of address.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Targets {
    /// For traffic that may go to any node.
    pub cluster: Vec<Target>,
    /// For traffic that must stay on this node.
    pub local: Vec<Target>,
}

type SlicePort<'a> = (&'a str, &'a str, String, &'a str);

/// All endpoints by service port.
pub struct Index<'a>(HashMap<SlicePort<'a>, BTreeMap<Target, State>>);

impl<'a> Index<'a> {
    pub fn new(slices: &'a [Arc<EndpointSlice>], node: &str) -> Index<'a> {
        let mut index: HashMap<SlicePort<'a>, BTreeMap<Target, State>> = HashMap::new();
        for slice in slices {
            let labels = slice.metadata.labels.as_ref();
            let headless = labels.is_some_and(|labels| labels.contains_key(HEADLESS));
            if slice.address_type != "IPv4" || headless {
                continue;
            }
            let (Some(namespace), Some(service)) = (slice.metadata.namespace.as_deref(), service_of(slice))
            else {
                continue;
            };
            for port in slice.ports.iter().flatten() {
                let Some(number) = port
                    .port
                    .and_then(|number| u16::try_from(number).ok())
                    .filter(|n| *n > 0)
                else {
                    continue;
                };
                let name = port.name.clone().unwrap_or_default();
                let protocol = port.protocol.as_deref().unwrap_or("TCP");
                let targets = index.entry((namespace, service, name, protocol)).or_default();
                for endpoint in slice.endpoints.iter().flatten() {
                    let conditions = endpoint.conditions.as_ref();
                    let ready = conditions.and_then(|c| c.ready).unwrap_or(true);
                    let serving = conditions.and_then(|c| c.serving).unwrap_or(ready);
                    let terminating = conditions.and_then(|c| c.terminating).unwrap_or(false);
                    let nodes = endpoint
                        .hints
                        .iter()
                        .flat_map(|hints| hints.for_nodes.iter().flatten());
                    let mut nodes = nodes.map(|hint| hint.name == node).peekable();
                    let state = State {
                        ready,
                        serving_terminating: serving && terminating,
                        local: endpoint.node_name.as_deref() == Some(node),
                        hinted: nodes.peek().is_some(),
                        hinted_here: nodes.any(|here| here),
                    };
                    // The first address is the endpoint; the others are aliases nobody uses.
                    let Some(address) = endpoint
                        .addresses
                        .first()
                        .and_then(|a| a.parse::<IpAddr>().ok())
                        // The API refuses these; here they would lead into the node itself.
                        .filter(|address| !address.is_loopback() && !address.is_unspecified())
                        .filter(IpAddr::is_ipv4)
                    else {
                        continue;
                    };
                    // An endpoint in two slices, as happens while one takes over from the other: the
                    // better state counts.
                    targets
                        .entry((address, number))
                        .and_modify(|known| {
                            if !known.ready && state.ready {
                                *known = state;
                            }
                        })
                        .or_insert(state);
                }
            }
        }
        Index(index)
    }

    pub fn targets(&self, namespace: &'a str, service: &'a str, port: &str, protocol: &'a str) -> Targets {
        let Some(endpoints) = self.0.get(&(namespace, service, port.to_string(), protocol)) else {
            return Targets::default();
        };
        let pick = |among: &dyn Fn(&State) -> bool| {
            let pick = |wanted: &dyn Fn(&State) -> bool| -> Vec<Target> {
                endpoints
                    .iter()
                    .filter(|(_, s)| among(s) && wanted(s))
                    .map(|(target, _)| *target)
                    .collect()
            };
            let ready = pick(&|state| state.ready);
            if ready.is_empty() {
                pick(&|state| state.serving_terminating)
            } else {
                ready
            }
        };
        // Upstream's rule for `PreferSameNode`: if every ready endpoint is meant for certain nodes, and one for this
        // node, only those for this node are used.
        let mut ready = endpoints.values().filter(|state| state.ready).peekable();
        let prefer_here = ready.peek().is_some()
            && ready.all(|state| state.hinted)
            && endpoints.values().any(|state| state.ready && state.hinted_here);
        Targets {
            cluster: pick(&|state| !prefer_here || state.hinted_here),
            local: pick(&|state| state.local),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    #[test]
    fn ready_first_then_those_on_their_way_out() {
        fn check(endpoints: Value, cluster: &[&str], local: &[&str]) {
            let slice: EndpointSlice = serde_json::from_value(json!({
                "metadata": {"namespace": "ns", "name": "s", "labels": {SERVICE_NAME: "web"}},
                "addressType": "IPv4", "endpoints": endpoints, "ports": [{"name": "http", "port": 80, "protocol": "TCP"}],
            }))
            .unwrap();
            let slices = [Arc::new(slice)];
            let got = Index::new(&slices, "here").targets("ns", "web", "http", "TCP");
            let text = |targets: &[Target]| targets.iter().map(|(a, _)| a.to_string()).collect::<Vec<_>>();
            assert_eq!(text(&got.cluster), cluster);
            assert_eq!(text(&got.local), local);
        }
        let endpoint = |address: &str, node: &str, ready: bool, serving: bool, terminating: bool| {
            json!({"addresses": [address], "nodeName": node,
                "conditions": {"ready": ready, "serving": serving, "terminating": terminating}})
        };
        check(json!([{"addresses": ["10.0.0.1"]}]), &["10.0.0.1"], &[]);
        check(
            json!([
                endpoint("10.0.0.2", "here", true, true, false),
                endpoint("10.0.0.1", "there", false, true, true)
            ]),
            &["10.0.0.2"],
            &["10.0.0.2"],
        );
        check(
            json!([
                endpoint("10.0.0.1", "there", true, true, false),
                endpoint("10.0.0.2", "here", false, true, true)
            ]),
            &["10.0.0.1"],
            &["10.0.0.2"],
        );
        check(
            json!([endpoint("10.0.0.1", "here", false, false, true)]),
            &[],
            &[],
        );
        check(
            json!([endpoint("10.0.0.1", "here", false, true, false)]),
            &[],
            &[],
        );
        // Meant for certain nodes: only if all are, and one for this node.
        let hinted = |address: &str, node: &str, ready: bool| {
            json!({"addresses": [address], "nodeName": node, "conditions": {"ready": ready},
                "hints": {"forNodes": [{"name": node}]}})
        };
        let (here, there) = (
            hinted("10.0.0.1", "here", true),
            hinted("10.0.0.2", "there", true),
        );
        check(json!([here, there]), &["10.0.0.1"], &["10.0.0.1"]);
        let gone = hinted("10.0.0.1", "here", false);
        check(json!([gone, there]), &["10.0.0.2"], &[]);
        let plain = endpoint("10.0.0.3", "there", true, true, false);
        check(
            json!([here, there, plain]),
            &["10.0.0.1", "10.0.0.2", "10.0.0.3"],
            &["10.0.0.1"],
        );
        check(json!([there]), &["10.0.0.2"], &[]);
        check(
            json!([{"addresses": ["not an address"]}, {"addresses": []}, {"addresses": ["127.0.0.1"]}, {"addresses": ["0.0.0.0"]}]),
            &[],
            &[],
        );
    }
}
