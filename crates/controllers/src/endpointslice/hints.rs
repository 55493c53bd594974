//! Topology hints: for which zones and nodes an endpoint is meant. By `spec.trafficDistribution` each endpoint is for
//! where it is; by the annotation `service.kubernetes.io/topology-mode: Auto` endpoints are shared out among the zones
//! by their CPUs. No I/O.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use k8s_openapi::api::core::v1::{Node, Service};
use k8s_openapi::api::discovery::v1::{Endpoint, EndpointHints, EndpointSlice, ForNode, ForZone};
use skiff_meta::quantity::Quantity;

use super::plan::ZONE;
use crate::node::condition;

const TOPOLOGY_MODE: &str = "service.kubernetes.io/topology-mode";
/// COMPAT: where both annotations are, the older one counts.
const OLD_TOPOLOGY_MODE: &str = "service.kubernetes.io/topology-aware-hints";
/// By how much an endpoint may have more to do than its share.
const OVERLOAD: f64 = 0.2;

/// How the hints of a Service are made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Mode {
    None,
    Auto,
    SameZone,
    SameNode,
}

pub(super) fn mode(service: &Service) -> Mode {
    let annotations = service.metadata.annotations.as_ref();
    let value = |name: &str| annotations.and_then(|annotations| annotations.get(name));
    let wanted = value(OLD_TOPOLOGY_MODE).or_else(|| value(TOPOLOGY_MODE));
    if wanted.is_some_and(|wanted| wanted == "Auto" || wanted == "auto") {
        return Mode::Auto;
    }
    let spec = service.spec.as_ref();
    match spec.and_then(|spec| spec.traffic_distribution.as_deref()) {
        Some("PreferClose" | "PreferSameZone") => Mode::SameZone,
        Some("PreferSameNode") => Mode::SameNode,
        _ => Mode::None,
    }
}

/// How many endpoints are meant for a zone.
pub(super) type ZoneCounts = BTreeMap<String, usize>;

/// The part of the cluster's CPUs that each zone has.
pub(super) type ZoneRatios = BTreeMap<String, f64>;

/// The CPUs of all nodes, kept by their events.
#[derive(Default)]
pub(super) struct Capacity {
    nodes: HashMap<String, NodeCapacity>,
    /// `None`: to be computed anew.
    ratios: Option<Option<Arc<ZoneRatios>>>,
}

#[derive(Clone, Debug, PartialEq)]
struct NodeCapacity {
    zone: String,
    milli_cpus: i64,
}

impl Capacity {
    /// `node` is `None` if it is gone. True if something changed.
    pub(super) fn set(&mut self, name: &str, node: Option<&Node>) -> bool {
        let capacity = node.filter(|node| counts(node)).map(|node| {
            let labels = node.metadata.labels.as_ref();
            let allocatable = node
                .status
                .as_ref()
                .and_then(|status| status.allocatable.as_ref());
            let cpu = allocatable.and_then(|allocatable| allocatable.get("cpu"));
            let cpu = cpu.and_then(|cpu| Quantity::parse(&cpu.0).ok());
            NodeCapacity {
                zone: labels
                    .and_then(|labels| labels.get(ZONE))
                    .cloned()
                    .unwrap_or_default(),
                milli_cpus: cpu.map_or(0, |cpu| cpu.milli_value()),
            }
        });
        if self.nodes.get(name) == capacity.as_ref() {
            return false;
        }
        match capacity {
            Some(capacity) => self.nodes.insert(name.to_owned(), capacity),
            None => self.nodes.remove(name),
        };
        self.ratios = None;
        true
    }

    /// `None` if a node does not say its zone or its CPUs, or if there are not two zones.
    pub(super) fn ratios(&mut self) -> Option<Arc<ZoneRatios>> {
        let nodes = &self.nodes;
        self.ratios
            .get_or_insert_with(|| ratios(nodes).map(Arc::new))
            .clone()
    }
}

/// Nodes of the control plane, and those that are not ready, have no endpoints to offer.
fn counts(node: &Node) -> bool {
    let labels = node.metadata.labels.as_ref();
    let excluded = [
        "node-role.kubernetes.io/control-plane",
        "node-role.kubernetes.io/master",
    ];
    let is_excluded = labels.is_some_and(|labels| excluded.iter().any(|label| labels.contains_key(*label)));
    !is_excluded && condition(node, "Ready").is_some_and(|ready| ready.status == "True")
}

fn ratios(nodes: &HashMap<String, NodeCapacity>) -> Option<ZoneRatios> {
    let mut by_zone: BTreeMap<String, i64> = BTreeMap::new();
    for node in nodes.values() {
        if node.zone.is_empty() || node.milli_cpus <= 0 {
            return None;
        }
        let sum = by_zone.entry(node.zone.clone()).or_default();
        *sum = sum.saturating_add(node.milli_cpus);
    }
    let total: f64 = by_zone.values().map(|milli| *milli as f64).sum();
    let ratio = |(zone, milli): (String, i64)| (zone, milli as f64 / total);
    (by_zone.len() >= 2).then(|| by_zone.into_iter().map(ratio).collect())
}

/// True if a zone has fewer endpoints than its CPUs ask for.
pub(super) fn is_overloaded(counts: &ZoneCounts, ratios: Option<&ZoneRatios>) -> bool {
    if counts.is_empty() {
        return false;
    }
    let Some(ratios) = ratios else { return true };
    let total: usize = counts.values().sum();
    ratios.iter().any(|(zone, ratio)| {
        let least = (total as f64 * ratio / (1.0 + OVERLOAD)).ceil();
        counts.get(zone).is_none_or(|count| (*count as f64) < least)
    })
}

/// The slices of one address family of a Service, by what is to become of them.
#[derive(Debug, Default)]
pub(super) struct Slices {
    pub create: Vec<EndpointSlice>,
    pub update: Vec<EndpointSlice>,
    pub unchanged: Vec<EndpointSlice>,
}

impl Slices {
    fn all(&self) -> impl Iterator<Item = &EndpointSlice> {
        self.create.iter().chain(&self.update).chain(&self.unchanged)
    }

    /// Every slice in which `repair` changes something is written.
    fn repair(&mut self, repair: impl Fn(&mut Endpoint)) {
        for slice in self.create.iter_mut().chain(&mut self.update) {
            slice.endpoints.iter_mut().flatten().for_each(&repair);
        }
        for mut slice in std::mem::take(&mut self.unchanged) {
            let before = slice.endpoints.clone();
            slice.endpoints.iter_mut().flatten().for_each(&repair);
            if slice.endpoints == before {
                self.unchanged.push(slice);
            } else {
                self.update.push(slice);
            }
        }
    }
}

fn is_ready(endpoint: &Endpoint) -> bool {
    endpoint
        .conditions
        .as_ref()
        .and_then(|conditions| conditions.ready)
        == Some(true)
}

fn for_zone(zone: &str) -> EndpointHints {
    EndpointHints {
        for_zones: Some(vec![ForZone {
            name: zone.to_owned(),
        }]),
        for_nodes: None,
    }
}

/// Reason and message of an event about the Service; `true` for a warning.
pub(super) type HintEvent = (bool, &'static str, String);

/// Sets the hints. The answer says how many endpoints are meant for each zone, if the zones' CPUs decide that.
pub(super) fn set(
    mode: Mode,
    slices: &mut Slices,
    ratios: Option<&ZoneRatios>,
    address_type: &str,
    had_hints: bool,
    events: &mut Vec<HintEvent>,
) -> Option<ZoneCounts> {
    let disabled = |message: String| {
        let message = format!("{message}, addressType: {address_type}");
        (true, "TopologyAwareHintsDisabled", message)
    };
    if mode == Mode::Auto {
        match share_out(slices, ratios) {
            Ok(counts) => {
                if !had_hints {
                    let message =
                        format!("Topology Aware Hints has been enabled, addressType: {address_type}");
                    events.push((false, "TopologyAwareHintsEnabled", message));
                }
                return Some(counts);
            }
            Err(message) => events.push(disabled(message)),
        }
    } else if had_hints {
        events.push(disabled("Topology Aware Hints has been disabled".into()));
    }
    slices.repair(|endpoint| match mode {
        Mode::None | Mode::Auto => endpoint.hints = None,
        // COMPAT: an endpoint that is not ready keeps what it has.
        Mode::SameZone | Mode::SameNode if !is_ready(endpoint) => {}
        Mode::SameZone | Mode::SameNode => {
            let zone = endpoint.zone.clone();
            let node = endpoint.node_name.clone().filter(|_| mode == Mode::SameNode);
            let hints = EndpointHints {
                for_zones: zone.map(|name| vec![ForZone { name }]),
                for_nodes: node.map(|name| vec![ForNode { name }]),
            };
            endpoint.hints = (hints != EndpointHints::default()).then_some(hints);
        }
    });
    None
}

#[derive(Debug, PartialEq)]
struct Share {
    most: usize,
    desired: f64,
}

/// How many endpoints each zone should have; the reason if that is not possible without overload.
fn shares(ratios: Option<&ZoneRatios>, endpoints: usize) -> Result<BTreeMap<String, Share>, String> {
    let Some(ratios) = ratios else {
        return Err(
            "Insufficient Node information: allocatable CPU or zone not specified on one or more nodes"
                .into(),
        );
    };
    let counts = format!("({endpoints} endpoints, {} zones)", ratios.len());
    if ratios.len() > endpoints {
        return Err(format!("Insufficient number of endpoints {counts}"));
    }
    let least = |ratio: &f64| (ratio * endpoints as f64 / (1.0 + OVERLOAD)).ceil() as usize;
    let total_least: usize = ratios.values().map(least).sum();
    let Some(spare) = endpoints.checked_sub(total_least) else {
        return Err(format!(
            "Unable to allocate minimum required endpoints to each zone without exceeding overload threshold {counts}"
        ));
    };
    let share = |(zone, ratio): (&String, &f64)| {
        let share = Share {
            most: least(ratio) + spare,
            desired: (ratio * endpoints as f64).max(least(ratio) as f64),
        };
        (zone.clone(), share)
    };
    Ok(ratios.iter().map(share).collect())
}

/// Shares the endpoints out among the zones. Slices whose hints are still good are left alone.
fn share_out(slices: &mut Slices, ratios: Option<&ZoneRatios>) -> Result<ZoneCounts, String> {
    let ready = slices
        .all()
        .flat_map(|slice| slice.endpoints.iter().flatten())
        .filter(|endpoint| is_ready(endpoint));
    let shares = shares(ratios, ready.count())?;
    let mut counts = ZoneCounts::new();
    for slice in std::mem::take(&mut slices.unchanged) {
        match good_hints(&slice, &counts, &shares) {
            Some(hints) => {
                hints
                    .into_iter()
                    .for_each(|(zone, count)| *counts.entry(zone).or_default() += count);
                slices.unchanged.push(slice);
            }
            None => slices.update.push(slice),
        }
    }
    // To begin with, each is for the zone where it is.
    for endpoint in written_endpoints(slices) {
        endpoint.hints = None;
        if !is_ready(endpoint) {
            continue;
        }
        let Some(zone) = endpoint.zone.clone().filter(|zone| !zone.is_empty()) else {
            return Err("One or more endpoints do not have a zone specified".into());
        };
        endpoint.hints = Some(for_zone(&zone));
        *counts.entry(zone).or_default() += 1;
    }
    let (mut giving, mut receiving) = exchange(&shares, &counts);
    for endpoint in written_endpoints(slices).filter(|endpoint| is_ready(endpoint)) {
        let Some(from) = endpoint.zone.clone() else {
            continue;
        };
        let Some(left) = giving.get_mut(&from).filter(|left| **left > 0) else {
            continue;
        };
        let Some((to, wanted)) = receiving.iter_mut().find(|(_, wanted)| **wanted > 0) else {
            break;
        };
        *left -= 1;
        *wanted -= 1;
        endpoint.hints = Some(for_zone(to));
        *counts.entry(to.clone()).or_default() += 1;
        if let Some(count) = counts.get_mut(&from) {
            *count -= 1;
        }
    }
    if counts.is_empty() {
        return Err("No hints allocated for zones".into());
    }
    Ok(counts)
}

fn written_endpoints(slices: &mut Slices) -> impl Iterator<Item = &mut Endpoint> {
    let written = slices.create.iter_mut().chain(&mut slices.update);
    written.flat_map(|slice| slice.endpoints.iter_mut().flatten())
}

/// The hints of a slice by zone; `None` if they have to be made anew, because an endpoint has none, a zone wants none,
/// or one would have too many.
fn good_hints(
    slice: &EndpointSlice,
    counts: &ZoneCounts,
    shares: &BTreeMap<String, Share>,
) -> Option<ZoneCounts> {
    let mut hints = ZoneCounts::new();
    for endpoint in slice
        .endpoints
        .iter()
        .flatten()
        .filter(|endpoint| is_ready(endpoint))
    {
        let zones = endpoint
            .hints
            .as_ref()?
            .for_zones
            .as_ref()
            .filter(|zones| !zones.is_empty())?;
        for zone in zones {
            *hints.entry(zone.name.clone()).or_default() += 1;
        }
    }
    let fits = |(zone, count): (&String, &usize)| {
        let before = counts.get(zone).copied().unwrap_or_default();
        shares.get(zone).is_some_and(|share| before + count <= share.most)
    };
    hints.iter().all(fits).then_some(hints)
}

/// How many endpoints zones give to others, and how many they get.
fn exchange(shares: &BTreeMap<String, Share>, counts: &ZoneCounts) -> (ZoneCounts, ZoneCounts) {
    let mut surplus: BTreeMap<&str, f64> = shares
        .iter()
        .map(|(zone, share)| {
            let count = counts.get(zone).copied().unwrap_or_default();
            (zone.as_str(), count as f64 - share.desired)
        })
        .collect();
    let (mut giving, mut receiving) = (ZoneCounts::new(), ZoneCounts::new());
    loop {
        let most = surplus.iter().max_by(|left, right| left.1.total_cmp(right.1));
        let least = surplus.iter().min_by(|left, right| left.1.total_cmp(right.1));
        let (Some((from, give)), Some((to, take))) = (most, least) else {
            break;
        };
        let (from, to, give, take) = (*from, *to, *give, -*take);
        if (give < 1.0 && take < 1.0) || give < 0.5 || take < 0.5 {
            break;
        }
        *giving.entry(from.to_owned()).or_default() += 1;
        *receiving.entry(to.to_owned()).or_default() += 1;
        for (zone, change) in [(from, -1.0), (to, 1.0)] {
            if let Some(surplus) = surplus.get_mut(zone) {
                *surplus += change;
            }
        }
    }
    (giving, receiving)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn node(name: &str, zone: &str, cpu: &str) -> Node {
        serde_json::from_value(
            json!({"metadata": {"name": name, "labels": {ZONE: zone}}, "status": {
            "allocatable": {"cpu": cpu}, "conditions": [{"type": "Ready", "status": "True"}]}}),
        )
        .unwrap()
    }

    fn capacity(cpus: &[(&str, &str)]) -> Capacity {
        let mut capacity = Capacity::default();
        for (number, (zone, cpu)) in cpus.iter().enumerate() {
            let name = format!("n{number}");
            assert!(capacity.set(&name, Some(&node(&name, zone, cpu))));
        }
        capacity
    }

    /// A slice with one endpoint for each zone that is named; `-` before it: not ready.
    fn slice(zones: &str) -> EndpointSlice {
        let endpoints: Vec<Value> = zones
            .split_whitespace()
            .map(|zone| {
                let name = zone.trim_start_matches('-');
                json!({"addresses": ["10.0.0.1"], "zone": name, "nodeName": format!("node-{name}"),
                    "conditions": {"ready": name == zone}})
            })
            .collect();
        serde_json::from_value(json!({"addressType": "IPv4", "endpoints": endpoints})).unwrap()
    }

    /// For whom each endpoint is.
    fn hints(slices: &[EndpointSlice]) -> String {
        let text = |endpoint: &Endpoint| match &endpoint.hints {
            None => "-".to_owned(),
            Some(hints) => {
                let zones = hints.for_zones.iter().flatten().map(|zone| zone.name.clone());
                let nodes = hints.for_nodes.iter().flatten().map(|node| node.name.clone());
                zones.chain(nodes).collect::<Vec<_>>().join("+")
            }
        };
        let all = slices.iter().flat_map(|slice| slice.endpoints.iter().flatten());
        all.map(text).collect::<Vec<_>>().join(" ")
    }

    #[test]
    fn modes() {
        let check = |annotations: Value, distribution: Value, expected: Mode| {
            let service = json!({"metadata": {"annotations": annotations}, "spec": {"trafficDistribution": distribution}});
            let service: Service = serde_json::from_value(service).unwrap();
            assert_eq!(mode(&service), expected, "{annotations} {distribution}");
        };
        check(json!(null), json!(null), Mode::None);
        check(json!(null), json!("PreferClose"), Mode::SameZone);
        check(json!(null), json!("PreferSameZone"), Mode::SameZone);
        check(json!(null), json!("PreferSameNode"), Mode::SameNode);
        check(
            json!({TOPOLOGY_MODE: "Auto"}),
            json!("PreferSameNode"),
            Mode::Auto,
        );
        check(json!({OLD_TOPOLOGY_MODE: "auto"}), json!(null), Mode::Auto);
        check(
            json!({OLD_TOPOLOGY_MODE: "Disabled", TOPOLOGY_MODE: "Auto"}),
            json!(null),
            Mode::None,
        );
    }

    #[test]
    fn each_is_for_where_it_is() {
        let check = |mode: Mode, expected: &str| {
            let mut slices = Slices {
                create: vec![slice("a -a b")],
                ..Default::default()
            };
            assert_eq!(set(mode, &mut slices, None, "IPv4", false, &mut Vec::new()), None);
            assert_eq!(hints(&slices.create), expected, "{mode:?}");
            // The second time there is nothing to do.
            let mut again = Slices {
                unchanged: slices.create,
                ..Default::default()
            };
            set(mode, &mut again, None, "IPv4", false, &mut Vec::new());
            assert!(again.update.is_empty());
            set(Mode::None, &mut again, None, "IPv4", false, &mut Vec::new());
            assert_eq!(hints(&again.update).matches('a').count(), 0, "{mode:?}");
        };
        check(Mode::None, "- - -");
        check(Mode::SameZone, "a - b");
        check(Mode::SameNode, "a+node-a - b+node-b");
    }

    #[test]
    fn zones_share_by_their_cpus() {
        let check = |cpus: &[(&str, &str)], zones: &str, expected: Result<&str, &str>| {
            let ratios = capacity(cpus).ratios();
            let mut slices = Slices {
                create: vec![slice(zones)],
                ..Default::default()
            };
            let mut events = Vec::new();
            let counts = set(
                Mode::Auto,
                &mut slices,
                ratios.as_deref(),
                "IPv4",
                false,
                &mut events,
            );
            match expected {
                Ok(expected) => {
                    assert_eq!(hints(&slices.create), expected, "{events:?}");
                    let counts = counts.unwrap();
                    assert!(!is_overloaded(&counts, ratios.as_deref()), "{counts:?}");
                    assert_eq!(events[0].1, "TopologyAwareHintsEnabled");
                }
                Err(expected) => {
                    assert_eq!(counts, None);
                    let event = (
                        true,
                        "TopologyAwareHintsDisabled",
                        format!("{expected}, addressType: IPv4"),
                    );
                    assert_eq!(events, [event]);
                }
            }
        };
        let even = [("a", "1"), ("b", "1")];
        check(&even, "a b", Ok("a b"));
        check(&even, "a a a b", Ok("b a a b"));
        check(&even, "a a", Ok("b a"));
        check(&[("a", "3"), ("b", "1")], "a a b b", Ok("a a a b"));
        check(&even, "a -a b", Ok("a - b"));
        check(
            &even,
            "a -b",
            Err("Insufficient number of endpoints (1 endpoints, 2 zones)"),
        );
        check(
            &[("a", "1"), ("b", "9")],
            "a b b",
            Err(
                "Unable to allocate minimum required endpoints to each zone without exceeding overload threshold (3 endpoints, 2 zones)",
            ),
        );
        let unknown =
            "Insufficient Node information: allocatable CPU or zone not specified on one or more nodes";
        check(&[("a", "1")], "a a", Err(unknown));
        check(&[("a", "1"), ("b", "1"), ("", "1")], "a b", Err(unknown));
        check(&[("a", "1"), ("b", "1"), ("b", "0")], "a b", Err(unknown));
    }

    #[test]
    fn good_hints_stay() {
        let ratios = capacity(&[("a", "1"), ("b", "1")]).ratios();
        let mut slices = Slices {
            create: vec![slice("a b"), slice("a b")],
            ..Default::default()
        };
        let ratios = ratios.as_deref();
        set(Mode::Auto, &mut slices, ratios, "IPv4", false, &mut Vec::new());
        let mut slices = Slices {
            unchanged: slices.create,
            ..Default::default()
        };
        let mut events = Vec::new();
        let counts = set(Mode::Auto, &mut slices, ratios, "IPv4", true, &mut events).unwrap();
        assert!(slices.update.is_empty() && events.is_empty());
        assert_eq!(counts, ZoneCounts::from([("a".into(), 2), ("b".into(), 2)]));
        // All CPUs move to one zone: the Service is looked at again, and its hints change.
        let moved = capacity(&[("a", "1"), ("b", "5")]).ratios();
        assert!(is_overloaded(&counts, moved.as_deref()) && is_overloaded(&counts, None));
    }
}
