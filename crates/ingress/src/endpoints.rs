//! The addresses behind a port of a Service, by its EndpointSlices, as far as a proxy may dial them: whoever can write an
//! EndpointSlice could otherwise make it reach what only the machine itself can.

use std::collections::HashSet;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use k8s_openapi::api::discovery::v1::{Endpoint, EndpointSlice};
use skiff_meta::net::Cidr;

/// Where the proxy never goes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AddressPolicy {
    /// Addresses of Services, that of the API server among them.
    pub services: Vec<Cidr>,
    /// Addresses of the nodes.
    pub nodes: HashSet<IpAddr>,
    /// Ports of nodes that are the cluster's own: API server, kubelet, and the proxy itself.
    pub host_ports: Vec<u16>,
}

impl AddressPolicy {
    pub fn allows(&self, address: SocketAddr) -> bool {
        let ip = address.ip().to_canonical();
        let special = match ip {
            IpAddr::V4(v4) => {
                v4.is_loopback()
                    || v4.is_link_local()
                    || v4.is_multicast()
                    || v4.is_broadcast()
                    || v4.octets()[0] == 0
            }
            IpAddr::V6(v6) => {
                v6.is_loopback() || v6.is_unspecified() || v6.is_unicast_link_local() || v6.is_multicast()
            }
        };
        let own = self.nodes.contains(&ip) && self.host_ports.contains(&address.port());
        address.port() != 0 && !special && !own && !self.services.iter().any(|cidr| cidr.contains(ip))
    }
}

/// The endpoints that are ready, or if there are none those that still serve while they end; and one of those that may
/// not be dialled, if there are some. `port` is the name of the Service's port.
pub fn addresses(
    slices: &[Arc<EndpointSlice>],
    port: &str,
    policy: &AddressPolicy,
) -> (Vec<SocketAddr>, Option<SocketAddr>) {
    let (mut ready, mut ending, mut refused) = (Vec::new(), Vec::new(), None);
    for slice in slices.iter().filter(|slice| slice.address_type != "FQDN") {
        let ports = slice.ports.iter().flatten();
        let numbers = ports
            .filter(|found| found.name.as_deref().unwrap_or_default() == port)
            .filter(|found| found.protocol.as_deref().is_none_or(|protocol| protocol == "TCP"))
            .filter_map(|found| found.port.and_then(|number| u16::try_from(number).ok()));
        for number in numbers {
            for endpoint in slice.endpoints.iter().flatten() {
                let list = match state(endpoint) {
                    State::Ready => &mut ready,
                    State::Ending => &mut ending,
                    State::Down => continue,
                };
                // All addresses of one endpoint are the same pod.
                let ip = endpoint
                    .addresses
                    .first()
                    .and_then(|text| text.parse::<IpAddr>().ok());
                let Some(ip) = ip else { continue };
                let address = SocketAddr::new(ip, number);
                if policy.allows(address) {
                    list.push(address);
                } else {
                    refused = refused.or(Some(address));
                }
            }
        }
    }
    let mut chosen = if ready.is_empty() { ending } else { ready };
    chosen.sort_unstable();
    chosen.dedup();
    (chosen, refused)
}

enum State {
    Ready,
    Ending,
    Down,
}

fn state(endpoint: &Endpoint) -> State {
    let conditions = endpoint.conditions.clone().unwrap_or_default();
    let ready = conditions.ready.unwrap_or(true);
    let ending = conditions.terminating.unwrap_or(false);
    match (ready, conditions.serving.unwrap_or(ready)) {
        (true, _) => State::Ready,
        (false, true) if ending => State::Ending,
        _ => State::Down,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn slice(endpoints: Value) -> Arc<EndpointSlice> {
        let object = json!({"addressType": "IPv4", "metadata": {"name": "s"}, "endpoints": endpoints,
            "ports": [{"name": "http", "port": 8080, "protocol": "TCP"}, {"name": "http", "port": 53, "protocol": "UDP"},
                {"name": "other", "port": 9090}]});
        Arc::new(serde_json::from_value(object).expect("a slice"))
    }

    fn endpoint(address: &str, ready: bool, serving: bool, terminating: bool) -> Value {
        json!({"addresses": [address], "conditions": {"ready": ready, "serving": serving, "terminating": terminating}})
    }

    #[test]
    fn ready_endpoints_come_before_those_that_end() {
        let ending = endpoint("10.0.0.2", false, true, true);
        let down = endpoint("10.0.0.3", false, false, true);
        let starting = endpoint("10.0.0.4", false, true, false);
        let ready = json!({"addresses": ["10.0.0.1"]});
        let policy = AddressPolicy::default();
        let found = |endpoints: Value| {
            let (addresses, _) = addresses(&[slice(endpoints)], "http", &policy);
            addresses.iter().map(ToString::to_string).collect::<Vec<_>>()
        };
        assert_eq!(found(json!([ready, ending, down, starting])), ["10.0.0.1:8080"]);
        assert_eq!(found(json!([ending, down, starting])), ["10.0.0.2:8080"]);
        assert!(found(json!([down])).is_empty());
        let (none, _) = addresses(&[slice(json!([ready]))], "nothing", &policy);
        assert!(none.is_empty());
    }

    #[test]
    fn the_machine_and_the_cluster_itself_are_never_dialled() {
        let policy = AddressPolicy {
            services: vec!["10.96.0.0/12".parse().expect("a network")],
            nodes: ["192.0.2.1".parse().expect("an address")].into(),
            host_ports: vec![6443, 10250],
        };
        for (address, allowed) in [
            ("10.0.0.1:80", true),
            ("[fd00::1]:80", true),
            ("192.0.2.1:8080", true),
            ("192.0.2.1:6443", false),
            ("192.0.2.1:10250", false),
            ("[::ffff:192.0.2.1]:10250", false),
            ("10.96.0.1:443", false),
            ("127.0.0.1:80", false),
            ("[::1]:80", false),
            ("[::ffff:127.0.0.1]:80", false),
            ("169.254.169.254:80", false),
            ("[fe80::1]:80", false),
            ("0.0.0.0:80", false),
            ("0.1.2.3:80", false),
            ("224.0.0.1:80", false),
            ("[::]:80", false),
            ("10.0.0.1:0", false),
        ] {
            let parsed: SocketAddr = address.parse().expect("an address");
            assert_eq!(policy.allows(parsed), allowed, "{address}");
        }
        let (chosen, refused) = addresses(
            &[slice(
                json!([{"addresses": ["169.254.169.254"]}, {"addresses": ["10.0.0.1"]}]),
            )],
            "http",
            &policy,
        );
        assert_eq!((chosen.len(), refused.is_some()), (1, true));
    }
}
