//! How the zones of the cluster are doing, and how fast nodes may get NoExecute taints: a whole zone that falls silent
//! is more likely a broken network than broken nodes, and if all zones do, nothing is evicted at all.
//!
//! Kept by node events, so that no decision takes a look at all nodes.

use std::collections::HashMap;
use std::time::Duration;

use k8s_openapi::api::core::v1::Node;
use tokio::time::Instant;

use crate::node::condition;

const REGION: &str = "topology.kubernetes.io/region";
const ZONE: &str = "topology.kubernetes.io/zone";
const OLD_REGION: &str = "failure-domain.beta.kubernetes.io/region";
const OLD_ZONE: &str = "failure-domain.beta.kubernetes.io/zone";
/// Nodes with this label do not count for the health of their zone.
const EXCLUDED: &str = "node.kubernetes.io/exclude-disruption";

/// Upstream's flags `--node-eviction-rate` and so on.
#[derive(Clone, Copy, Debug)]
pub struct EvictionRates {
    /// Nodes per second in a healthy zone.
    pub primary: f64,
    /// In an unhealthy zone of a large cluster; small ones stop.
    pub secondary: f64,
    pub large_cluster_threshold: usize,
    /// A zone is unhealthy if this part of its nodes is not ready, and at least three are.
    pub unhealthy_zone_threshold: f64,
}

/// The region and the zone of a node.
pub(super) type ZoneKey = (String, String);

pub(super) fn zone_of(node: &Node) -> ZoneKey {
    let label = |new: &str, old: &str| {
        let labels = node.metadata.labels.as_ref();
        let value = labels.and_then(|labels| labels.get(new).or_else(|| labels.get(old)));
        value.cloned().unwrap_or_default()
    };
    (label(REGION, OLD_REGION), label(ZONE, OLD_ZONE))
}

/// A zone as metrics name it. COMPAT: upstream's separator.
pub(super) fn label((region, zone): &ZoneKey) -> String {
    if region.is_empty() && zone.is_empty() {
        return String::new();
    }
    format!("{region}:\0:{zone}")
}

/// The nodes of a zone that count for its health.
pub(super) struct ZoneCount {
    pub(super) nodes: usize,
    pub(super) not_ready: usize,
}

impl ZoneCount {
    /// How many percent are ready. A zone without nodes is healthy.
    pub(super) fn health(&self) -> f64 {
        let ready = self.nodes - self.not_ready;
        if self.nodes == 0 {
            return 100.0;
        }
        100.0 * ready as f64 / self.nodes as f64
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ZoneState {
    Normal,
    PartialDisruption,
    FullDisruption,
}

#[derive(Debug, Default)]
struct Zone {
    ready: usize,
    not_ready: usize,
    last_taint: Option<Instant>,
}

impl Zone {
    fn len(&self) -> usize {
        self.ready + self.not_ready
    }

    fn state(&self, rates: &EvictionRates) -> ZoneState {
        let part = self.not_ready as f64 / self.len().max(1) as f64;
        if self.ready == 0 && self.not_ready > 0 {
            ZoneState::FullDisruption
        } else if self.not_ready > 2 && part >= rates.unhealthy_zone_threshold {
            ZoneState::PartialDisruption
        } else {
            ZoneState::Normal
        }
    }

    fn rate(&self, rates: &EvictionRates) -> f64 {
        match self.state(rates) {
            ZoneState::PartialDisruption if self.len() <= rates.large_cluster_threshold => 0.0,
            ZoneState::PartialDisruption => rates.secondary,
            // Only this zone: the others tell that the control plane is not the one that is cut off.
            ZoneState::Normal | ZoneState::FullDisruption => rates.primary,
        }
    }
}

/// What counts of a node.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Member {
    zone: ZoneKey,
    ready: bool,
    excluded: bool,
}

pub(super) struct Zones {
    rates: EvictionRates,
    zones: HashMap<ZoneKey, Zone>,
    members: HashMap<String, Member>,
}

impl Zones {
    pub(super) fn new(rates: EvictionRates) -> Self {
        Zones {
            rates,
            zones: HashMap::new(),
            members: HashMap::new(),
        }
    }

    pub(super) fn set(&mut self, node: &Node) {
        let name = node.metadata.name.clone().unwrap_or_default();
        let labels = node.metadata.labels.as_ref();
        let member = Member {
            zone: zone_of(node),
            ready: condition(node, "Ready").is_some_and(|ready| ready.status == "True"),
            excluded: labels.is_some_and(|labels| labels.contains_key(EXCLUDED)),
        };
        if self.members.get(&name) == Some(&member) {
            return;
        }
        self.remove(&name);
        let zone = self.zones.entry(member.zone.clone()).or_default();
        if !member.excluded {
            *zone.count(member.ready) += 1;
        }
        self.members.insert(name, member);
    }

    pub(super) fn remove(&mut self, name: &str) {
        let Some(member) = self.members.remove(name) else {
            return;
        };
        if let Some(zone) = self.zones.get_mut(&member.zone)
            && !member.excluded
        {
            *zone.count(member.ready) -= 1;
        }
        // A zone that has lost its nodes is forgotten, but for the time of its last taint while that matters.
        self.zones
            .retain(|_, zone| zone.len() > 0 || zone.last_taint.is_some());
    }

    /// True if no zone has a ready node: then it is us who are cut off.
    pub(super) fn all_disrupted(&self) -> bool {
        let mut zones = self.zones.values().filter(|zone| zone.len() > 0).peekable();
        zones.peek().is_some() && zones.all(|zone| zone.state(&self.rates) == ZoneState::FullDisruption)
    }

    /// All zones, under their names in metrics.
    pub(super) fn counts(&self) -> Vec<(String, ZoneCount)> {
        let count = |zone: &Zone| ZoneCount {
            nodes: zone.len(),
            not_ready: zone.not_ready,
        };
        self.zones
            .iter()
            .map(|(key, zone)| (label(key), count(zone)))
            .collect()
    }

    /// `None` if the node is not known.
    pub(super) fn is_ready(&self, name: &str) -> Option<bool> {
        self.members.get(name).map(|member| member.ready)
    }

    pub(super) fn names(&self) -> Vec<String> {
        self.members.keys().cloned().collect()
    }

    /// Whether a node of this zone may get a NoExecute taint now; otherwise how long to wait before asking again, or
    /// `None` if that depends on other nodes.
    pub(super) fn may_taint(&mut self, zone: &ZoneKey, now: Instant) -> Result<(), Option<Duration>> {
        let rates = self.rates;
        let zone = self.zones.entry(zone.clone()).or_default();
        let rate = zone.rate(&rates);
        if rate <= 0.0 {
            return Err(None);
        }
        let interval = Duration::try_from_secs_f64(1.0 / rate).unwrap_or(Duration::MAX);
        let next = zone.last_taint.map(|last| last + interval);
        match next.filter(|next| *next > now) {
            Some(next) => Err(Some(next - now)),
            None => {
                zone.last_taint = Some(now);
                Ok(())
            }
        }
    }
}

impl Zone {
    fn count(&mut self, ready: bool) -> &mut usize {
        if ready {
            &mut self.ready
        } else {
            &mut self.not_ready
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    const RATES: EvictionRates = EvictionRates {
        primary: 0.1,
        secondary: 0.01,
        large_cluster_threshold: 50,
        unhealthy_zone_threshold: 0.55,
    };

    fn node(name: &str, zone: &str, ready: bool) -> Node {
        let status = if ready { "True" } else { "Unknown" };
        serde_json::from_value(json!({"metadata": {"name": name, "labels": {ZONE: zone}},
            "status": {"conditions": [{"type": "Ready", "status": status}]}}))
        .unwrap()
    }

    fn key(zone: &str) -> ZoneKey {
        (String::new(), zone.to_owned())
    }

    /// A zone `a` with so many nodes, and a healthy zone `b`.
    fn zones(ready: usize, not_ready: usize) -> Zones {
        let mut zones = Zones::new(RATES);
        for number in 0..ready + not_ready {
            zones.set(&node(&format!("a{number}"), "a", number < ready));
        }
        zones.set(&node("b", "b", true));
        zones
    }

    #[test]
    fn rates_follow_the_health_of_a_zone() {
        let check = |ready: usize, not_ready: usize, state: ZoneState, rate: f64| {
            let zones = zones(ready, not_ready);
            let zone = &zones.zones[&key("a")];
            assert_eq!(
                (zone.state(&RATES), zone.rate(&RATES)),
                (state, rate),
                "{ready} {not_ready}"
            );
        };
        check(3, 1, ZoneState::Normal, 0.1);
        check(1, 2, ZoneState::Normal, 0.1);
        check(2, 3, ZoneState::PartialDisruption, 0.0);
        check(20, 40, ZoneState::PartialDisruption, 0.01);
        check(22, 28, ZoneState::PartialDisruption, 0.0);
        check(0, 1, ZoneState::FullDisruption, 0.1);
    }

    #[tokio::test(start_paused = true)]
    async fn taints_are_spread_over_time() {
        let mut zones = zones(3, 2);
        let now = Instant::now();
        assert_eq!(zones.may_taint(&key("a"), now), Ok(()));
        let soon = now + Duration::from_secs(4);
        assert_eq!(
            zones.may_taint(&key("a"), soon),
            Err(Some(Duration::from_secs(6)))
        );
        assert_eq!(
            zones.may_taint(&key("b"), soon),
            Ok(()),
            "each zone has its own rate"
        );
        assert_eq!(zones.may_taint(&key("a"), now + Duration::from_secs(10)), Ok(()));
        for number in 0..2 {
            zones.set(&node(&format!("a{number}"), "a", false));
        }
        assert_eq!(
            zones.may_taint(&key("a"), now + Duration::from_secs(60)),
            Err(None)
        );
    }

    #[test]
    fn all_zones_count_but_not_excluded_nodes() {
        let mut zones = zones(1, 1);
        assert!(!zones.all_disrupted());
        zones.set(&node("a0", "a", false));
        assert!(!zones.all_disrupted(), "the other zone is fine");
        zones.set(&node("b", "b", false));
        assert!(zones.all_disrupted());
        let mut excluded = node("c", "c", true);
        excluded
            .metadata
            .labels
            .as_mut()
            .unwrap()
            .insert(EXCLUDED.into(), String::new());
        zones.set(&excluded);
        assert!(zones.all_disrupted());
        // A node that moves is counted where it is now.
        zones.set(&node("a0", "b", true));
        assert!(!zones.all_disrupted());
        for name in zones.names() {
            zones.remove(&name);
        }
        assert!(zones.zones.is_empty() && !zones.all_disrupted());
    }
}
