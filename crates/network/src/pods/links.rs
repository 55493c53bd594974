//! Devices, neighbours and routes to other nodes in the kernel. What is there is read first, so that a start after a
//! kill finds its own work again, changes only what differs, and removes what nobody wants any more.

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use nlink::netlink::addr::{Ipv4Address, Ipv6Address};
use nlink::netlink::fdb::FdbEntryBuilder;
use nlink::netlink::link::VxlanLink;
use nlink::netlink::messages::{LinkMessage, RouteMessage};
use nlink::netlink::neigh::Neighbor;
use nlink::netlink::route::{Ipv4Route, Ipv6Route};
use nlink::netlink::types::route::{RouteProtocol, RouteScope, RouteType};
use nlink::netlink::{Connection, Route};
use skiff_meta::net::Cidr;

use super::peers::{Peer, Peers};
use super::plan::{Via, VxlanPlan};
use super::{Error, PodNetworkConfig, VXLAN_PORT};

/// Marks our routes; nobody else's number (`/etc/iproute2/rt_protos`).
const PROTOCOL: RouteProtocol = RouteProtocol::Other(83);
const MAIN_TABLE: u32 = 254;

/// What is known of the link that others reach this node by.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Underlay {
    pub(super) mtu: Option<u32>,
}

/// How an address of another node is reached.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Reach {
    /// It is this machine's own.
    Local,
    /// On the link of this device, without a router between.
    OnLink(u32),
    Routed,
    Nowhere,
}

/// Lookups of addresses, kept until the next comparison with the kernel.
#[derive(Debug, Default)]
pub(super) struct ReachCache(BTreeMap<IpAddr, Reach>);

impl ReachCache {
    pub(super) fn clear(&mut self) {
        self.0.clear();
    }

    pub(super) async fn look_up(
        &mut self,
        links: &Links,
        peers: &Peers,
        own: &Peer,
    ) -> Result<BTreeMap<IpAddr, Reach>, Error> {
        let others = peers.others(&own.name);
        let wanted: BTreeSet<IpAddr> = others
            .iter()
            .flat_map(|peer| peer.addresses.iter().copied())
            .collect();
        self.0.retain(|address, _| wanted.contains(address));
        if wanted.iter().any(|address| !self.0.contains_key(address)) {
            let ours = links.own_devices().await?;
            for address in wanted {
                if let Entry::Vacant(unknown) = self.0.entry(address) {
                    unknown.insert(links.reach(address, &ours).await?);
                }
            }
        }
        Ok(self.0.clone())
    }
}

pub(super) struct Links {
    pub(super) route: Connection<Route>,
    /// Names of the devices of the pod network: nothing outside of it is reached by them.
    devices: Vec<String>,
}

impl Links {
    pub(super) fn open(config: &PodNetworkConfig) -> Result<Links, Error> {
        Ok(Links {
            route: Connection::<Route>::new().map_err(Error::netlink("open netlink"))?,
            devices: vec![config.bridge.clone(), config.vxlan(), config.wireguard()],
        })
    }

    async fn own_devices(&self) -> Result<BTreeSet<u32>, Error> {
        let links = self.route.get_links().await;
        let links = links.map_err(Error::netlink("list devices"))?;
        let is_ours = |link: &&LinkMessage| self.devices.iter().any(|name| link.name() == Some(name));
        Ok(links.iter().filter(is_ours).map(LinkMessage::ifindex).collect())
    }

    /// Looks at all devices: asking for one that is not there is an error that the library logs.
    pub(super) async fn find(&self, name: &str) -> Result<Option<LinkMessage>, Error> {
        let links = self.route.get_links().await;
        let links = links.map_err(Error::netlink(format!("look for {name}")))?;
        Ok(links.into_iter().find(|link| link.name() == Some(name)))
    }

    /// The link with the node's own address. A node without one, such as a machine without a network, has none.
    pub(super) async fn underlay(&self, own: &Peer) -> Result<Underlay, Error> {
        let Some(address) = own.addresses.first() else {
            return Ok(Underlay { mtu: None });
        };
        let addresses = self.route.get_addresses().await;
        let addresses = addresses.map_err(Error::netlink("list addresses"))?;
        let ours = self.own_devices().await?;
        let index = addresses
            .iter()
            .find(|message| message.primary_address() == Some(address) && !ours.contains(&message.ifindex()))
            .map(|message| message.ifindex());
        let Some(index) = index else {
            return Ok(Underlay { mtu: None });
        };
        let link = self.route.get_link_by_index(index).await;
        let link = link.map_err(Error::netlink("look at the node's link"))?;
        Ok(Underlay {
            mtu: link.and_then(|link| link.mtu()),
        })
    }

    async fn reach(&self, address: IpAddr, ours: &BTreeSet<u32>) -> Result<Reach, Error> {
        if address.is_loopback() || address.is_unspecified() || address.is_multicast() {
            return Ok(Reach::Nowhere);
        }
        let route = match self.route.lookup_route(address).await {
            Ok(route) => route,
            Err(error) => {
                tracing::debug!(%address, %error, "no route");
                return Ok(Reach::Nowhere);
            }
        };
        Ok(match (route.route_type(), route.oif()) {
            (RouteType::Local, _) => Reach::Local,
            (RouteType::Unicast, Some(device)) if !ours.contains(&device) => {
                if route.gateway().is_some() || route.via().is_some() {
                    Reach::Routed
                } else {
                    Reach::OnLink(device)
                }
            }
            _ => Reach::Nowhere,
        })
    }

    /// Makes the VXLAN device with its peers, or completes the one that is there; answers its index.
    pub(super) async fn vxlan(&self, name: &str, plan: &VxlanPlan) -> Result<u32, Error> {
        let mut link = self.find(name).await?;
        if link.as_ref().is_some_and(|link| !is_as_planned(link, plan)) {
            // What makes it another device cannot be changed.
            self.remove_device(name).await?;
            link = None;
        }
        if link.is_none() {
            let mut device = VxlanLink::new(name, plan.vni)
                .port(VXLAN_PORT)
                .address(plan.mac)
                .learning(false);
            device = match plan.local {
                IpAddr::V4(local) => device.local(local),
                IpAddr::V6(local) => device.local6(local),
            };
            if let Some(mtu) = plan.mtu {
                device = device.mtu(mtu);
            }
            match self.route.add_link(device).await {
                Err(error) if error.is_not_supported() => {
                    return Err(Error::Unsupported(format!(
                        "cannot reach nodes behind a router: this kernel has no VXLAN (CONFIG_VXLAN): {error}"
                    )));
                }
                added => added.map_err(Error::netlink(format!("add {name} (VXLAN {})", plan.vni)))?,
            }
            link = self.find(name).await?;
        }
        let link = link.ok_or_else(|| Error::Unsupported(format!("{name} vanished")))?;
        let index = link.ifindex();
        self.set_up(&link, name, plan.mtu, &plan.gateways).await?;
        self.vxlan_peers(index, plan).await?;
        Ok(index)
    }

    /// MTU, addresses and settings of a device to other nodes; then up.
    pub(super) async fn set_up(
        &self,
        link: &LinkMessage,
        name: &str,
        mtu: Option<u32>,
        gateways: &[IpAddr],
    ) -> Result<(), Error> {
        let index = link.ifindex();
        if let Some(mtu) = mtu.filter(|mtu| link.mtu() != Some(*mtu)) {
            let set = self.route.set_link_mtu_by_index(index, mtu).await;
            set.map_err(Error::netlink(format!("set the MTU of {name}")))?;
        }
        let has_ipv6 = gateways.iter().any(IpAddr::is_ipv6);
        // Packets may come by the tunnel while answers take a direct route; who may send what is the firewall's rule.
        set_sysctl(&format!("ipv4/conf/{name}/rp_filter"), "2")?;
        set_sysctl(&format!("ipv4/conf/{name}/accept_redirects"), "0")?;
        set_sysctl(&format!("ipv4/conf/{name}/send_redirects"), "0")?;
        if std::path::Path::new("/proc/sys/net/ipv6").exists() {
            for (setting, value) in [
                ("accept_ra", "0"),
                ("accept_redirects", "0"),
                ("addr_gen_mode", "1"),
                ("disable_ipv6", if has_ipv6 { "0" } else { "1" }),
            ] {
                set_sysctl(&format!("ipv6/conf/{name}/{setting}"), value)?;
            }
        }
        let given = |error| Error::netlink(format!("give {name} its address"))(error);
        for gateway in gateways {
            match *gateway {
                IpAddr::V4(gateway) => {
                    let address = Ipv4Address::with_index(index, gateway, 32);
                    self.route.replace_address(address).await.map_err(given)?;
                }
                IpAddr::V6(gateway) => {
                    let address = Ipv6Address::with_index(index, gateway, 128).nodad();
                    self.route.replace_address(address).await.map_err(given)?;
                }
            }
        }
        let present = self.route.get_addresses_by_index(index).await;
        for message in present.map_err(Error::netlink(format!("list the addresses of {name}")))? {
            let Some(address) = message.primary_address().copied() else {
                continue;
            };
            if !gateways.contains(&address) {
                let removed = self
                    .route
                    .del_address_by_index(index, address, message.prefix_len())
                    .await;
                removed.map_err(Error::netlink(format!("remove a former address of {name}")))?;
            }
        }
        let up = self.route.set_link_up_by_index(index).await;
        up.map_err(Error::netlink(format!("bring {name} up")))
    }

    /// Whom frames for which hardware address are sent to, and whose hardware address a gateway has.
    async fn vxlan_peers(&self, index: u32, plan: &VxlanPlan) -> Result<(), Error> {
        let wanted: BTreeMap<[u8; 6], IpAddr> =
            plan.peers.iter().map(|peer| (peer.mac, peer.remote)).collect();
        let mut present = BTreeMap::new();
        let entries = self.route.get_fdb_by_index(index).await;
        for entry in entries.map_err(Error::netlink("list the forwarding entries"))? {
            let Some(remote) = entry.dst() else { continue };
            if wanted.get(&entry.mac()) == Some(&remote) {
                present.insert(entry.mac(), remote);
                continue;
            }
            let stale = FdbEntryBuilder::new(entry.mac())
                .ifindex(index)
                .dst(remote)
                .self_();
            match self.route.del_fdb_entry(stale).await {
                Err(error) if !error.is_not_found() => {
                    return Err(Error::netlink("remove a forwarding entry")(error));
                }
                _ => {}
            }
        }
        for (mac, remote) in wanted.into_iter().filter(|(mac, _)| !present.contains_key(mac)) {
            let entry = FdbEntryBuilder::new(mac)
                .ifindex(index)
                .dst(remote)
                .self_()
                .permanent();
            let added = self.route.replace_fdb(entry).await;
            added.map_err(Error::netlink(format!("add the forwarding entry of {remote}")))?;
        }

        let wanted: BTreeMap<IpAddr, [u8; 6]> = plan
            .peers
            .iter()
            .flat_map(|peer| peer.gateways.iter().map(|gateway| (*gateway, peer.mac)))
            .collect();
        let mut present = BTreeSet::new();
        let neighbours = self.route.get_neighbors_by_index(index).await;
        for neighbour in neighbours.map_err(Error::netlink("list neighbours"))? {
            let Some(address) = neighbour.destination().copied() else {
                continue;
            };
            let right = wanted.get(&address).map(|mac| mac.as_slice()) == neighbour.lladdr();
            if neighbour.is_permanent() && wanted.contains_key(&address) && right {
                present.insert(address);
            } else if neighbour.is_permanent() && !wanted.contains_key(&address) {
                let stale = Neighbor::with_index(index, address);
                let removed = self.route.del_neighbor_if_exists(stale).await;
                removed.map_err(Error::netlink("remove a neighbour"))?;
            }
        }
        for (address, mac) in wanted
            .into_iter()
            .filter(|(address, _)| !present.contains(address))
        {
            let neighbour = Neighbor::with_index(index, address).lladdr(mac).permanent();
            let added = self.route.replace_neighbor(neighbour).await;
            added.map_err(Error::netlink(format!("add the neighbour {address}")))?;
        }
        Ok(())
    }

    /// Makes the routes to other nodes' networks those that are wanted. Routes through a tunnel that could not be made
    /// stay as they are.
    pub(super) async fn routes(
        &self,
        cluster: &[Cidr],
        wanted: &BTreeMap<Cidr, Via>,
        tunnel: Option<u32>,
    ) -> Result<(), Error> {
        let mut present = BTreeSet::new();
        for (cidr, route) in self.own_routes(cluster).await? {
            let way = (route.gateway().copied(), route.oif());
            match wanted.get(&cidr) {
                Some(via) if way == way_of(*via, tunnel) => {
                    present.insert(cidr);
                }
                // The kernel takes no gateway of a tunnel that lies in a network of another device.
                Some(Via::Tunnel {
                    gateway: Some(IpAddr::V6(_)),
                }) => self.delete_route(cidr, &route).await?,
                // Replaced below, without a moment in which there is none.
                Some(_) => {}
                None => self.delete_route(cidr, &route).await?,
            }
        }
        for (cidr, via) in wanted.iter().filter(|(cidr, _)| !present.contains(*cidr)) {
            let (gateway, Some(device)) = way_of(*via, tunnel) else {
                continue;
            };
            self.replace_route(*cidr, gateway, device).await?;
        }
        Ok(())
    }

    async fn replace_route(&self, cidr: Cidr, gateway: Option<IpAddr>, device: u32) -> Result<(), Error> {
        let replaced = match cidr.address() {
            IpAddr::V4(address) => {
                let mut route = Ipv4Route::from_addr(address, cidr.prefix())
                    .dev_index(device)
                    .protocol(PROTOCOL);
                match gateway {
                    Some(IpAddr::V4(gateway)) => route = route.gateway(gateway).onlink(),
                    _ => route = route.scope(RouteScope::Link),
                }
                self.route.replace_route(route).await
            }
            IpAddr::V6(address) => {
                let mut route = Ipv6Route::from_addr(address, cidr.prefix())
                    .dev_index(device)
                    .protocol(PROTOCOL);
                if let Some(IpAddr::V6(gateway)) = gateway {
                    route = route.gateway(gateway).onlink();
                }
                self.route.replace_route(route).await
            }
        };
        replaced.map_err(Error::netlink(format!("add the route to {cidr}")))
    }

    async fn delete_route(&self, cidr: Cidr, route: &RouteMessage) -> Result<(), Error> {
        let deleted = match cidr.address() {
            IpAddr::V4(address) => {
                let mut stale = Ipv4Route::from_addr(address, cidr.prefix()).protocol(PROTOCOL);
                if let Some(device) = route.oif() {
                    stale = stale.dev_index(device);
                }
                stale = match route.gateway() {
                    Some(IpAddr::V4(gateway)) => stale.gateway(*gateway),
                    _ => stale.scope(RouteScope::Link),
                };
                self.route.del_route_if_exists(stale).await
            }
            IpAddr::V6(address) => {
                let mut stale = Ipv6Route::from_addr(address, cidr.prefix()).protocol(PROTOCOL);
                if let Some(device) = route.oif() {
                    stale = stale.dev_index(device);
                }
                if let Some(IpAddr::V6(gateway)) = route.gateway() {
                    stale = stale.gateway(*gateway);
                }
                self.route.del_route_if_exists(stale).await
            }
        };
        deleted
            .map(drop)
            .map_err(Error::netlink(format!("remove the route to {cidr}")))
    }

    /// Our routes, of this cluster: other clusters of the machine have other networks.
    async fn own_routes(&self, cluster: &[Cidr]) -> Result<Vec<(Cidr, RouteMessage)>, Error> {
        let routes = self.route.get_routes_for_table(MAIN_TABLE).await;
        let routes = routes.map_err(Error::netlink("list routes"))?;
        Ok(routes
            .into_iter()
            .filter(|route| route.protocol() == PROTOCOL)
            .filter_map(|route| Some((Cidr::new(*route.destination()?, route.dst_len())?, route)))
            .filter(|(cidr, _)| cluster.iter().any(|cluster| cluster.covers(*cidr)))
            .collect())
    }

    pub(super) async fn remove_routes(&self, cluster: &[Cidr]) -> Result<(), Error> {
        for (cidr, route) in self.own_routes(cluster).await? {
            self.delete_route(cidr, &route).await?;
        }
        Ok(())
    }

    pub(super) async fn remove_device(&self, name: &str) -> Result<(), Error> {
        if self.find(name).await?.is_none() {
            return Ok(());
        }
        let removed = self.route.del_link_if_exists(name).await;
        removed
            .map(drop)
            .map_err(Error::netlink(format!("remove {name}")))
    }
}

fn way_of(via: Via, tunnel: Option<u32>) -> (Option<IpAddr>, Option<u32>) {
    match via {
        Via::Direct { gateway, device } => (Some(gateway), Some(device)),
        Via::Tunnel { gateway } => (gateway, tunnel),
    }
}

const IFLA_VXLAN_ID: u16 = 1;
const IFLA_VXLAN_LOCAL: u16 = 4;
const IFLA_VXLAN_LEARNING: u16 = 7;
const IFLA_VXLAN_PORT: u16 = 15;
const IFLA_VXLAN_LOCAL6: u16 = 17;

/// Whether a device is the VXLAN device that we would make.
fn is_as_planned(link: &LinkMessage, plan: &VxlanPlan) -> bool {
    let Some(data) = link
        .link_info()
        .filter(|_| link.kind() == Some("vxlan"))
        .and_then(|info| info.data())
    else {
        return false;
    };
    let attributes = attributes(data);
    let is = |kind: u16, value: &[u8]| attributes.get(&kind).is_some_and(|found| *found == value);
    let local = match plan.local {
        IpAddr::V4(local) => is(IFLA_VXLAN_LOCAL, &local.octets()),
        IpAddr::V6(local) => is(IFLA_VXLAN_LOCAL6, &local.octets()),
    };
    local
        && is(IFLA_VXLAN_ID, &plan.vni.to_ne_bytes())
        && is(IFLA_VXLAN_PORT, &VXLAN_PORT.to_be_bytes())
        && is(IFLA_VXLAN_LEARNING, &[0])
        && link.address() == Some(&plan.mac)
}

/// Netlink attributes by type.
fn attributes(mut data: &[u8]) -> BTreeMap<u16, &[u8]> {
    let mut found = BTreeMap::new();
    while let [l0, l1, k0, k1, ..] = *data {
        let length = usize::from(u16::from_ne_bytes([l0, l1]));
        let Some(value) = data.get(4..length) else { break };
        found.insert(u16::from_ne_bytes([k0, k1]) & 0x3fff, value);
        data = data.get(length.next_multiple_of(4)..).unwrap_or_default();
    }
    found
}

/// Sets a setting below `net`.
fn set_sysctl(name: &str, value: &str) -> Result<(), Error> {
    let path = format!("/proc/sys/net/{name}");
    if std::fs::read_to_string(&path).is_ok_and(|current| current.trim() == value) {
        return Ok(());
    }
    std::fs::write(&path, value).map_err(Error::io(path))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn attributes_of_a_device() {
        let data = [
            8, 0, 1, 0, 9, 0, 0, 0, 5, 0, 7, 0, 0, 0, 0, 0, 6, 0, 15, 0, 0x21, 0x18, 0, 0,
        ];
        let found = attributes(&data);
        assert_eq!(found[&IFLA_VXLAN_ID], 9u32.to_ne_bytes());
        assert_eq!(found[&IFLA_VXLAN_LEARNING], [0]);
        assert_eq!(found[&IFLA_VXLAN_PORT], VXLAN_PORT.to_be_bytes());
        for broken in [&data[..3], &[0, 0, 1, 0], &[200, 0, 1, 0, 1]] {
            assert!(attributes(broken).is_empty());
        }
    }
}
