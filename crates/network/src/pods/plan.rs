//! From Nodes to devices, routes and rules, as a pure function.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use skiff_cni::mac_of;
use skiff_meta::net::Cidr;

use super::firewall::Rules;
use super::links::{Reach, Underlay};
use super::peers::{Peer, Peers};
use super::wireguard::{Announced, WireGuardPeer, WireGuardPlan};
use super::{Error, Mode, PodNetworkConfig, VXLAN_PORT};

/// What VXLAN puts in front of a packet: an Ethernet header (14), its own (8), UDP (8), and IPv4 (20) or IPv6 (40).
const VXLAN_OVERHEAD: (u32, u32) = (50, 70);
/// What WireGuard adds: its header and authentication tag (32), UDP (8), and IPv4 (20) or IPv6 (40).
const WIREGUARD_OVERHEAD: (u32, u32) = (60, 80);
/// IPv6 has no smaller links.
const LEAST_MTU: u32 = 1280;

/// Everything that should be in the kernel.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Plan {
    /// Of this node, in the order of its networks.
    pub(super) cidrs: Vec<Cidr>,
    pub(super) gateways: Vec<IpAddr>,
    /// The pods' MTU; the kernel's default if nothing is known of the link.
    pub(super) mtu: Option<u32>,
    pub(super) vxlan: Option<VxlanPlan>,
    pub(super) wireguard: Option<WireGuardPlan>,
    pub(super) routes: BTreeMap<Cidr, Via>,
    pub(super) firewall: Rules,
    /// What keeps pods of which node from being reached.
    pub(super) warnings: Vec<String>,
}

/// Which way packets to a network go.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Via {
    Direct {
        gateway: IpAddr,
        device: u32,
    },
    /// Through the device to other nodes; VXLAN has a neighbour there, WireGuard has none.
    Tunnel {
        gateway: Option<IpAddr>,
    },
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct VxlanPlan {
    pub(super) vni: u32,
    pub(super) local: IpAddr,
    pub(super) mac: [u8; 6],
    pub(super) mtu: Option<u32>,
    /// The device has the gateways' addresses: what the node itself sends comes from one of them.
    pub(super) gateways: Vec<IpAddr>,
    pub(super) peers: Vec<VxlanPeer>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct VxlanPeer {
    pub(super) mac: [u8; 6],
    pub(super) remote: IpAddr,
    /// The other node's gateways, which packets for its pods are sent to.
    pub(super) gateways: Vec<IpAddr>,
}

pub(super) fn plan(
    config: &PodNetworkConfig,
    peers: &Peers,
    own: &Peer,
    underlay: &Underlay,
    reach: &BTreeMap<IpAddr, Reach>,
) -> Result<Plan, Error> {
    let strange = own
        .cidrs
        .iter()
        .find(|cidr| !config.cluster_cidrs.iter().any(|cluster| cluster.covers(**cidr)));
    if let Some(strange) = strange {
        return Err(Error::Config(format!(
            "the Node's pod network {strange} is not in the cluster's ({})",
            config
                .cluster_cidrs
                .iter()
                .map(Cidr::to_string)
                .collect::<Vec<_>>()
                .join(", ")
        )));
    }
    let gateways: Vec<IpAddr> = own.cidrs.iter().filter_map(|cidr| cidr.nth(1)).collect();
    let Some(first_gateway) = gateways.first().copied() else {
        return Err(Error::Config(
            "the Node's pod networks have no room for a gateway".into(),
        ));
    };
    let mut planner = Planner {
        config,
        reach,
        outer_ipv4: own.addresses.first().is_none_or(IpAddr::is_ipv4),
        taken: own.cidrs.clone(),
        routes: BTreeMap::new(),
        vxlan: Vec::new(),
        wireguard: Vec::new(),
        warnings: Vec::new(),
    };
    let others = peers.others(&config.node_name);
    for peer in &others {
        planner.peer(peer);
    }
    let mtu = config
        .mtu
        .or_else(|| pod_mtu(config.mode, planner.outer_ipv4, underlay));
    let local = own.addresses.first().copied();
    let node_addresses: BTreeSet<IpAddr> = others
        .iter()
        .flat_map(|peer| peer.addresses.iter().copied())
        .chain(own.addresses.iter().copied())
        .filter(|address| !config.cluster_cidrs.iter().any(|cidr| cidr.contains(*address)))
        .collect();
    let elsewhere = others.iter().any(|peer| {
        peer.addresses
            .iter()
            .any(|address| reach.get(address) != Some(&Reach::Local))
    });
    let tunnels = matches!(config.mode, Mode::Auto | Mode::Vxlan) && elsewhere;
    let vxlan = local.filter(|_| tunnels).map(|local| VxlanPlan {
        vni: config.vni(),
        local,
        mac: mac_of(first_gateway),
        mtu,
        gateways: gateways.clone(),
        peers: planner.vxlan,
    });
    let wireguard = (config.mode == Mode::WireGuard).then(|| WireGuardPlan {
        port: config.wireguard_port,
        mtu,
        gateways: gateways.clone(),
        peers: planner.wireguard,
    });
    let firewall = Rules {
        bridge: config.bridge.clone(),
        tunnels: vec![config.vxlan(), config.wireguard()],
        own: own.cidrs.clone(),
        cluster: config.cluster_cidrs.clone(),
        nodes: node_addresses,
        vni: config.vni(),
        vxlan_port: VXLAN_PORT,
        wireguard_port: config.wireguard_port,
    };
    Ok(Plan {
        cidrs: own.cidrs.clone(),
        gateways,
        mtu,
        vxlan,
        wireguard,
        routes: planner.routes,
        firewall,
        warnings: planner.warnings,
    })
}

/// What fits into a packet of the link between nodes. A node's first peer behind a router must find pods whose packets
/// fit through the tunnel, so that whoever may tunnel leaves room for it from the start.
fn pod_mtu(mode: Mode, outer_ipv4: bool, underlay: &Underlay) -> Option<u32> {
    let link = underlay.mtu?;
    let (overhead_ipv4, overhead_ipv6) = match mode {
        Mode::Direct => (0, 0),
        Mode::Auto | Mode::Vxlan => VXLAN_OVERHEAD,
        Mode::WireGuard => WIREGUARD_OVERHEAD,
    };
    let overhead = if outer_ipv4 { overhead_ipv4 } else { overhead_ipv6 };
    // Loopback-like links are far larger than what pods' own devices take.
    Some(link.saturating_sub(overhead).clamp(LEAST_MTU, 65535))
}

struct Planner<'a> {
    config: &'a PodNetworkConfig,
    reach: &'a BTreeMap<IpAddr, Reach>,
    /// The family of the packets that carry others.
    outer_ipv4: bool,
    taken: Vec<Cidr>,
    routes: BTreeMap<Cidr, Via>,
    vxlan: Vec<VxlanPeer>,
    wireguard: Vec<WireGuardPeer>,
    warnings: Vec<String>,
}

impl Planner<'_> {
    fn reach(&self, address: Option<IpAddr>) -> Reach {
        address
            .and_then(|address| self.reach.get(&address))
            .copied()
            .unwrap_or(Reach::Nowhere)
    }

    fn peer(&mut self, peer: &Peer) {
        let cidrs = self.cidrs_of(peer);
        let outer = peer.address(self.outer_ipv4);
        // Another node on this very machine: its pods are behind another bridge, which has its route.
        if cidrs.is_empty() || self.reach(outer) == Reach::Local {
            return;
        }
        let mut tunnelled = Vec::new();
        for cidr in cidrs {
            let inner = peer.address(cidr.is_ipv4());
            match (self.config.mode, self.reach(inner), inner) {
                (Mode::Auto | Mode::Direct, Reach::OnLink(device), Some(gateway)) => {
                    self.routes.insert(cidr, Via::Direct { gateway, device });
                }
                (Mode::Direct, ..) => self.warnings.push(format!(
                    "no route to pods of node {}: its address is not on a link of this machine, and --pod-network direct allows no tunnel",
                    peer.name
                )),
                _ => tunnelled.push(cidr),
            }
        }
        if tunnelled.is_empty() {
            return;
        }
        let Some(remote) = outer.filter(|_| self.reach(outer) != Reach::Nowhere) else {
            self.warnings.push(format!(
                "no route to pods of node {}: this machine cannot reach an {} address of it",
                peer.name,
                if self.outer_ipv4 { "IPv4" } else { "IPv6" }
            ));
            return;
        };
        match self.config.mode {
            Mode::WireGuard => self.through_wireguard(peer, remote, tunnelled),
            _ => self.through_vxlan(peer, remote, &tunnelled),
        }
    }

    /// The networks of a node that it may have: in the cluster's, and nobody else's.
    fn cidrs_of(&mut self, peer: &Peer) -> Vec<Cidr> {
        let mut cidrs = Vec::new();
        for cidr in &peer.cidrs {
            let inside = self
                .config
                .cluster_cidrs
                .iter()
                .any(|cluster| cluster.covers(*cidr));
            if !inside || self.taken.iter().any(|taken| taken.overlaps(*cidr)) {
                let why = if inside {
                    "another node has it"
                } else {
                    "it is not in the cluster's"
                };
                self.warnings.push(format!(
                    "no route to pod network {cidr} of node {}: {why}",
                    peer.name
                ));
                continue;
            }
            self.taken.push(*cidr);
            cidrs.push(*cidr);
        }
        cidrs
    }

    fn through_vxlan(&mut self, peer: &Peer, remote: IpAddr, cidrs: &[Cidr]) {
        // The other node makes its device's address of its first network, whichever way that one goes.
        let Some(first) = peer.cidrs.first().and_then(|cidr| cidr.nth(1)) else {
            return;
        };
        let gateways: Vec<IpAddr> = cidrs.iter().filter_map(|cidr| cidr.nth(1)).collect();
        for (cidr, gateway) in cidrs.iter().zip(&gateways) {
            let gateway = Some(*gateway);
            self.routes.insert(*cidr, Via::Tunnel { gateway });
        }
        self.vxlan.push(VxlanPeer {
            mac: mac_of(first),
            remote,
            gateways,
        });
    }

    fn through_wireguard(&mut self, peer: &Peer, remote: IpAddr, cidrs: Vec<Cidr>) {
        let Some(announced) = Announced::of(peer) else {
            self.warnings.push(format!(
                "no route to pods of node {}: it has not announced its WireGuard key (does it run with --pod-network wireguard?)",
                peer.name
            ));
            return;
        };
        for cidr in &cidrs {
            self.routes.insert(*cidr, Via::Tunnel { gateway: None });
        }
        self.wireguard.push(WireGuardPeer {
            key: announced.key,
            endpoint: (remote, announced.port).into(),
            networks: cidrs,
        });
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    pub(in crate::pods) fn config(cidrs: &[&str], mode: Mode) -> PodNetworkConfig {
        PodNetworkConfig {
            node_name: "a".into(),
            cluster_cidrs: cidrs.iter().map(|cidr| cidr.parse().unwrap()).collect(),
            network: "skiff-test".into(),
            bridge: "skiff0".into(),
            table: "skiff-test-pods".into(),
            cni_conf_dir: "/nowhere".into(),
            published: None,
            addresses_dir: "/nowhere".into(),
            state_dir: "/nowhere".into(),
            mode,
            mtu: None,
            wireguard_port: 51820,
            connection_limit: None,
            dns: false,
            policy_socket: None,
        }
    }

    fn peer(name: &str, created: i64, cidrs: &[&str], addresses: &[&str]) -> Peer {
        Peer {
            name: name.into(),
            created,
            cidrs: cidrs.iter().map(|cidr| cidr.parse().unwrap()).collect(),
            addresses: addresses.iter().map(|address| address.parse().unwrap()).collect(),
            annotations: BTreeMap::new(),
        }
    }

    fn planned(mode: Mode, own: &Peer, others: &[Peer], reach: &[(&str, Reach)]) -> Plan {
        let peers: Peers = others.iter().chain([own]).cloned().collect();
        let reach = reach
            .iter()
            .map(|(address, reach)| (address.parse().unwrap(), *reach))
            .collect();
        let config = config(&["10.244.0.0/16", "fd00:10::/48"], mode);
        plan(&config, &peers, own, &Underlay { mtu: Some(1500) }, &reach).unwrap()
    }

    fn routes(plan: &Plan) -> Vec<String> {
        let route = |(cidr, via): (&Cidr, &Via)| match via {
            Via::Direct { gateway, device } => format!("{cidr} via {gateway} dev {device}"),
            Via::Tunnel {
                gateway: Some(gateway),
            } => format!("{cidr} tunnel {gateway}"),
            Via::Tunnel { gateway: None } => format!("{cidr} tunnel"),
        };
        plan.routes.iter().map(route).collect()
    }

    #[test]
    fn on_one_link_by_routes_and_behind_a_router_by_a_tunnel() {
        let own = peer(
            "a",
            1,
            &["10.244.0.0/24", "fd00:10::/64"],
            &["192.0.2.1", "2001:db8::1"],
        );
        let near = peer("b", 2, &["10.244.1.0/24", "fd00:10:0:1::/64"], &["192.0.2.2"]);
        let far = peer("c", 3, &["10.244.2.0/24", "fd00:10:0:2::/64"], &["198.51.100.3"]);
        let others = [near, far];
        let reach = [("192.0.2.2", Reach::OnLink(7)), ("198.51.100.3", Reach::Routed)];
        let auto = planned(Mode::Auto, &own, &others, &reach);
        // The near node has no IPv6 address: its IPv6 pods are behind the tunnel.
        assert_eq!(
            routes(&auto),
            [
                "10.244.1.0/24 via 192.0.2.2 dev 7",
                "10.244.2.0/24 tunnel 10.244.2.1",
                "fd00:10:0:1::/64 tunnel fd00:10:0:1::1",
                "fd00:10:0:2::/64 tunnel fd00:10:0:2::1",
            ]
        );
        let vxlan = auto.vxlan.unwrap();
        assert_eq!(vxlan.mac, [0x0a, 0x58, 10, 244, 0, 1]);
        assert_eq!(vxlan.peers[0].gateways.len(), 1);
        assert_eq!(vxlan.peers[1].mac, [0x0a, 0x58, 10, 244, 2, 1]);
        assert_eq!(auto.mtu, Some(1450));
        assert_eq!(auto.warnings, [] as [&str; 0]);

        let direct = planned(Mode::Direct, &own, &others, &reach);
        assert_eq!(routes(&direct), ["10.244.1.0/24 via 192.0.2.2 dev 7"]);
        assert_eq!((direct.mtu, direct.vxlan), (Some(1500), None));
        assert_eq!(direct.warnings.len(), 3, "{:?}", direct.warnings);

        let vxlan = planned(Mode::Vxlan, &own, &others, &reach);
        assert!(routes(&vxlan).iter().all(|route| route.contains("tunnel")));
        assert_eq!(vxlan.vxlan.unwrap().peers.len(), 2);
    }

    #[test]
    fn the_mtu_leaves_room_for_what_carries_it() {
        for (mode, address, expected) in [
            (Mode::Auto, "192.0.2.1", 1450),
            (Mode::Auto, "2001:db8::1", 1430),
            (Mode::Vxlan, "192.0.2.1", 1450),
            (Mode::WireGuard, "192.0.2.1", 1440),
            (Mode::WireGuard, "2001:db8::1", 1420),
            (Mode::Direct, "2001:db8::1", 1500),
        ] {
            let own = peer("a", 1, &["10.244.0.0/24"], &[address]);
            assert_eq!(
                planned(mode, &own, &[], &[]).mtu,
                Some(expected),
                "{mode:?} {address}"
            );
        }
    }

    #[test]
    fn alone_there_is_no_tunnel() {
        let own = peer("a", 1, &["10.244.0.0/24"], &["192.0.2.1"]);
        assert_eq!(planned(Mode::Auto, &own, &[], &[]).vxlan, None);
        // Nor with another node of the same machine.
        let twin = peer("b", 1, &["10.244.1.0/24"], &["192.0.2.1"]);
        let both = planned(Mode::Auto, &own, &[twin], &[("192.0.2.1", Reach::Local)]);
        assert_eq!((both.vxlan, both.routes.len()), (None, 0));
    }

    #[test]
    fn a_node_takes_no_others_network() {
        let own = peer("a", 1, &["10.244.0.0/24"], &["192.0.2.1"]);
        let honest = peer("z", 2, &["10.244.1.0/24"], &["192.0.2.2"]);
        let thieves = [
            peer("b", 3, &["10.244.1.0/25"], &["192.0.2.3"]),
            peer("c", 4, &["10.244.0.0/16"], &["192.0.2.4"]),
            peer("d", 5, &["0.0.0.0/0"], &["192.0.2.5"]),
            peer("e", 6, &["10.244.0.0/24"], &["192.0.2.6"]),
        ];
        let reach: Vec<(String, Reach)> = (2..7)
            .map(|n| (format!("192.0.2.{n}"), Reach::OnLink(1)))
            .collect();
        let reach: Vec<(&str, Reach)> = reach.iter().map(|(a, r)| (a.as_str(), *r)).collect();
        let others: Vec<Peer> = thieves.into_iter().chain([honest]).collect();
        let plan = planned(Mode::Auto, &own, &others, &reach);
        assert_eq!(routes(&plan), ["10.244.1.0/24 via 192.0.2.2 dev 1"]);
        assert_eq!(plan.warnings.len(), 4, "{:?}", plan.warnings);
        let config = config(&["10.244.0.0/16"], Mode::Auto);
        let lost = peer("a", 1, &["10.9.0.0/24"], &["192.0.2.1"]);
        let underlay = Underlay { mtu: None };
        assert!(super::plan(&config, &Peers::default(), &lost, &underlay, &BTreeMap::new()).is_err());
    }
}
