//! Which endpoints of a service port take traffic: upstream's choice between ready endpoints and those
//! that are on their way out, for the whole cluster and for this node.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::Arc;

use super::objects::{Protocol, ProxySlice, SliceEndpoint};

/// An address and port that traffic can go to.
pub type Target = (IpAddr, u16);

/// Who chooses.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Place {
    pub node: String,
    /// Empty if the node has none.
    pub zone: String,
}

/// The targets of one service port, in order of address.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Targets {
    /// For traffic that may go to any node.
    pub cluster: Vec<Target>,
    /// For traffic that must stay on this node.
    pub local: Vec<Target>,
    /// Those that still answer, whatever new traffic is told: flows to them go on.
    pub serving: Vec<Target>,
    /// Whether any node has an endpoint.
    pub any: bool,
    /// Those on this node that take traffic from load balancers.
    pub local_ready: Vec<IpAddr>,
    /// Addresses of this node among `cluster` and `local`: who has one may reach itself by the service.
    pub own: Vec<IpAddr>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct State {
    ready: bool,
    serving: bool,
    terminating: bool,
    local: bool,
    /// Meant for certain nodes or zones, and for this one.
    node: (bool, bool),
    zone: (bool, bool),
}

impl State {
    fn of(endpoint: &SliceEndpoint, place: &Place) -> State {
        State {
            ready: endpoint.ready(),
            serving: endpoint.serving(),
            terminating: endpoint.terminating(),
            local: endpoint.node_name.as_deref() == Some(place.node.as_str()),
            node: endpoint.for_node(&place.node),
            zone: endpoint.for_zone(&place.zone),
        }
    }

    fn on_its_way_out(&self) -> bool {
        !self.ready && self.serving && self.terminating
    }
}

/// What new traffic is limited to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Preference {
    Anywhere,
    SameNode,
    SameZone,
}

/// If every ready endpoint is meant for certain nodes, and one for this node, only those for this node are used; else
/// the same with zones.
fn preference(endpoints: &BTreeMap<Target, State>) -> Preference {
    let ready = || endpoints.values().filter(|state| state.ready);
    let applies = |hint: fn(&State) -> (bool, bool)| {
        ready().all(|state| hint(state).0) && ready().any(|state| hint(state).1)
    };
    if applies(|state| state.node) {
        Preference::SameNode
    } else if applies(|state| state.zone) {
        Preference::SameZone
    } else {
        Preference::Anywhere
    }
}

/// The targets of one port of a service in one address family.
pub fn targets<'a>(
    slices: impl Iterator<Item = &'a Arc<ProxySlice>>,
    ipv4: bool,
    name: &str,
    protocol: Protocol,
    place: &Place,
) -> Targets {
    let mut endpoints: BTreeMap<Target, State> = BTreeMap::new();
    for slice in slices.filter(|slice| slice.is_ipv4() == ipv4) {
        for number in slice.ports.iter().filter_map(|port| port.number(name, protocol)) {
            for endpoint in &slice.endpoints {
                let Some(address) = endpoint.address.filter(|address| address.is_ipv4() == ipv4) else {
                    continue;
                };
                let state = State::of(endpoint, place);
                // An endpoint in two slices, as happens while one takes over from the other: the
                // better state counts.
                endpoints
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
    let pick = |wanted: &dyn Fn(&State) -> bool| -> Vec<Target> {
        let wanted = endpoints.iter().filter(|(_, state)| wanted(state));
        wanted.map(|(target, _)| *target).collect()
    };
    let preference = preference(&endpoints);
    let preferred = |state: &State| match preference {
        Preference::Anywhere => true,
        Preference::SameNode => state.node.1,
        Preference::SameZone => state.zone.1,
    };
    let or_ending = |ready: Vec<Target>, among: &dyn Fn(&State) -> bool| match ready.is_empty() {
        true => pick(&|state| state.on_its_way_out() && among(state)),
        false => ready,
    };
    let cluster = or_ending(pick(&|state| state.ready && preferred(state)), &|_| true);
    let local_ready = pick(&|state| state.ready && state.local);
    let local = or_ending(local_ready.clone(), &|state| state.local);
    let used = cluster.iter().chain(&local);
    let mut own: Vec<IpAddr> = used
        .filter(|target| endpoints.get(*target).is_some_and(|state| state.local))
        .map(|target| target.0)
        .collect();
    own.sort();
    own.dedup();
    Targets {
        any: endpoints
            .values()
            .any(|state| state.ready || state.on_its_way_out()),
        serving: pick(&|state| state.serving),
        local_ready: local_ready.into_iter().map(|target| target.0).collect(),
        cluster,
        local,
        own,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    #[test]
    fn upstreams_choice() {
        fn check(endpoints: Value, cluster: &[&str], local: &[&str]) {
            let slice: ProxySlice = serde_json::from_value(json!({
                "metadata": {"namespace": "ns", "name": "s"},
                "addressType": "IPv4", "endpoints": endpoints, "ports": [{"name": "http", "port": 80, "protocol": "TCP"}],
            }))
            .unwrap();
            let place = Place {
                node: "here".into(),
                zone: "a".into(),
            };
            let slices = [Arc::new(slice)];
            let got = targets(slices.iter(), true, "http", Protocol::Tcp, &place);
            let text = |targets: &[Target]| targets.iter().map(|(a, _)| a.to_string()).collect::<Vec<_>>();
            assert_eq!(text(&got.cluster), cluster);
            assert_eq!(text(&got.local), local);
            assert_eq!(got.any, !cluster.is_empty() || !local.is_empty());
            for (name, protocol, ipv4) in [
                ("other", Protocol::Tcp, true),
                ("http", Protocol::Udp, true),
                ("http", Protocol::Tcp, false),
            ] {
                let none = targets(slices.iter(), ipv4, name, protocol, &place);
                assert_eq!(none, Targets::default());
            }
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
        // The same with zones, which count where node hints do not.
        let zoned = |address: &str, nodes: Value, zone: &str| {
            json!({"addresses": [address], "nodeName": "there",
                "hints": {"forNodes": nodes, "forZones": [{"name": zone}]}})
        };
        let (same, other) = (
            zoned("10.0.0.1", Value::Null, "a"),
            zoned("10.0.0.2", Value::Null, "b"),
        );
        check(json!([same, other]), &["10.0.0.1"], &[]);
        check(json!([other]), &["10.0.0.2"], &[]);
        check(
            json!([same, other, plain]),
            &["10.0.0.1", "10.0.0.2", "10.0.0.3"],
            &[],
        );
        let elsewhere = zoned("10.0.0.4", json!([{"name": "there"}]), "a");
        check(json!([elsewhere, other]), &["10.0.0.4"], &[]);
        check(
            json!([{"addresses": ["not an address"]}, {"addresses": []}, {"addresses": null},
                {"addresses": ["127.0.0.1"]}, {"addresses": ["0.0.0.0"]}]),
            &[],
            &[],
        );
    }
}
