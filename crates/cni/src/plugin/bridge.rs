//! The devices of `skiff-bridge`: one bridge a cluster and node, a veth pair a sandbox.
//!
//! A sandbox gets its addresses as a /32 and a /128 with the gateway as its only neighbour, so that all traffic
//! between pods passes the host's network layer. On a plain bridge, the answer of a service's endpoint
//! to a client on the same bridge would take the short way past connection tracking, and the client
//! would refuse an answer from an address it never spoke to.
//!
//! Ports are in hairpin mode and not isolated: a kernel with br_netfilter translates a service's address
//! already at the bridge, and then passes the frame from port to port, or back out of the same one. What keeps
//! sandboxes apart is `guard`: a frame that does not carry its sender's own addresses never reaches the bridge.
//!
//! Hardware addresses follow from IP addresses, so that a neighbour entry never outlives its truth:
//! who gets an address later has the same hardware address, and the gateway's does not change with the
//! ports of the bridge. For the same reason the bridge need not learn them: each port has one static entry, and
//! frames for others are not flooded to it. IPv6 has no neighbour discovery here at all: sandbox and host have
//! permanent entries of each other.

use std::fs::File;
use std::net::{IpAddr, Ipv4Addr};
use std::os::fd::AsFd;
use std::path::Path;

use nlink::netlink::InterfaceRef;
use nlink::netlink::addr::{Ipv4Address, Ipv6Address};
use nlink::netlink::fdb::FdbEntryBuilder;
use nlink::netlink::link::{BridgeLink, BridgePortConfig, LinkCreateExt, VethLink};
use nlink::netlink::messages::AddressMessage;
use nlink::netlink::neigh::Neighbor;
use nlink::netlink::route::{Ipv4Route, Ipv6Route};
use nlink::netlink::{Connection, Route};

use super::guard::Guard;
use super::subnet::Subnets;
use super::{BridgeConf, ipam};
use crate::result::CniError;
use crate::{Error, Result};

type PluginResult<T> = std::result::Result<T, CniError>;

fn failed(what: impl std::fmt::Display) -> impl FnOnce(nlink::Error) -> CniError {
    move |error| CniError::new(CniError::INTERNAL, format!("{what}: {error}"))
}

/// Makes the bridge with the gateways' addresses, or completes one that is there, with the guards of all its
/// ports: those of sandboxes that outlived the process that made them, too.
pub async fn ensure_bridge(conf: &BridgeConf) -> Result<()> {
    let invalid = |error: CniError| Error::Invalid(error.to_string());
    let subnets = conf.validate().map_err(invalid)?;
    let host = Connection::<Route>::new()?;
    ensure(&host, conf, &subnets).await.map_err(invalid)?;
    let restored = restore_ports(&host, conf, &subnets, false);
    restored.await.map(drop).map_err(invalid)
}

/// Restores the guards of ports that are up without theirs, as after a flush of rules. Returns how many there were.
pub async fn restore_guards(conf: &BridgeConf) -> Result<usize> {
    let invalid = |error: CniError| Error::Invalid(error.to_string());
    let subnets = conf.validate().map_err(invalid)?;
    let host = Connection::<Route>::new()?;
    restore_ports(&host, conf, &subnets, true).await.map_err(invalid)
}

/// Removes the bridge and its guards; the host ends of sandboxes that still use it stay. Not having it is fine.
pub async fn remove_bridge(bridge: &str) -> Result<()> {
    Connection::<Route>::new()?.del_link_if_exists(bridge).await?;
    Guard::open(bridge)?.remove_table().await?;
    Ok(())
}

/// Sets up the ports of all sandboxes that hold an address, or only those that are `unguarded`: up without the guard that they
/// should have. One that is not up is just being attached.
async fn restore_ports(
    host: &Connection<Route>,
    conf: &BridgeConf,
    subnets: &Subnets,
    unguarded: bool,
) -> PluginResult<usize> {
    let guard = Guard::open(&conf.bridge).map_err(failed("open netlink"))?;
    let guards = guard.standing().await.map_err(failed("list the guards"))?;
    let mut restored = 0;
    for held in ipam::Addresses::new(conf, subnets.clone()).held()? {
        let host_ifname = host_ifname(&conf.name, &held.container_id, &held.ifname);
        let is_guarded = guards.protect(&host_ifname, &held.addresses, subnets);
        if unguarded && is_guarded {
            continue;
        }
        let up = is_up(host, &host_ifname).await?;
        if up.is_none() || (unguarded && up == Some(false)) {
            continue;
        }
        // A guard that stands is left alone: who watches nftables rules would have to look what has changed.
        let set_up = async {
            if !is_guarded {
                protect(conf, subnets, &host_ifname, &held.addresses).await?;
            }
            set_up_port(host, conf, &host_ifname, &held.addresses).await
        };
        match set_up.await {
            Ok(()) => restored += 1,
            // Its sandbox may be gone by now.
            Err(error) if is_up(host, &host_ifname).await?.is_some() => return Err(error),
            Err(_) => {}
        }
    }
    Ok(restored)
}

/// `None` if there is no such device.
async fn is_up(host: &Connection<Route>, ifname: &str) -> PluginResult<Option<bool>> {
    let link = host.get_link_by_name(ifname).await;
    let link = link.map_err(failed(format_args!("look for {ifname}")))?;
    Ok(link.map(|link| link.is_up()))
}

async fn ensure(host: &Connection<Route>, conf: &BridgeConf, subnets: &Subnets) -> PluginResult<u32> {
    let find = || async {
        host.get_link_by_name(conf.bridge.as_str())
            .await
            .map_err(failed("look for the bridge"))
    };
    let mac = mac_of(subnets.first_gateway());
    let mut link = find().await?;
    if link.is_none() {
        let mut bridge = BridgeLink::new(&conf.bridge).address(mac);
        if let Some(mtu) = conf.mtu {
            bridge = bridge.mtu(mtu);
        }
        match host.add_link(bridge).await {
            Err(error) if !error.is_already_exists() => return Err(failed("add the bridge")(error)),
            _ => {}
        }
        link = find().await?;
    }
    let link =
        link.ok_or_else(|| CniError::new(CniError::INTERNAL, format!("bridge {} vanished", conf.bridge)))?;
    if link.kind() != Some("bridge") {
        return Err(CniError::new(
            CniError::INVALID_CONFIG,
            format!("{} already exists and is not a bridge", conf.bridge),
        ));
    }
    let index = link.ifindex();
    // The node may have got other networks since, or another way to its peers.
    if link.address() != Some(&mac) {
        host.set_link_address_by_index(index, mac)
            .await
            .map_err(failed("give the bridge its hardware address"))?;
    }
    if let Some(mtu) = conf.mtu.filter(|mtu| link.mtu() != Some(*mtu)) {
        host.set_link_mtu_by_index(index, mtu)
            .await
            .map_err(failed("set the bridge's MTU"))?;
    }
    set_up_ipv6(&conf.bridge, subnets.has_ipv6())?;
    give_gateways(host, index, subnets).await?;
    if subnets.has_ipv4() {
        set_sysctl("ipv4/ip_forward", "1")?;
    }
    if subnets.has_ipv6() {
        forward_ipv6(&conf.bridge)?;
    }
    // Pods are each other's neighbours by design only through us; nobody should tell them or us otherwise.
    for (name, value) in [
        ("send_redirects", "0"),
        ("accept_redirects", "0"),
        ("accept_source_route", "0"),
        ("rp_filter", "1"),
    ] {
        set_sysctl(&format!("ipv4/conf/{}/{name}", conf.bridge), value)?;
    }
    Guard::open(&conf.bridge)
        .map_err(failed("open netlink"))?
        .ensure_table()
        .await
        .map_err(failed(
            "make the pods' guard (the kernel needs nftables with the netdev family, CONFIG_NF_TABLES_NETDEV)",
        ))?;
    // Up comes last: a bridge that is up is complete, which is all that ADD looks at.
    host.set_link_up_by_index(index)
        .await
        .map_err(failed("bring the bridge up"))?;
    Ok(index)
}

/// The gateways' addresses, and none of a network that the node no longer has.
async fn give_gateways(host: &Connection<Route>, index: u32, subnets: &Subnets) -> PluginResult<()> {
    let give = failed("give the bridge its address");
    for subnet in subnets.iter() {
        let given = match subnet.gateway() {
            IpAddr::V4(gateway) => {
                let address = Ipv4Address::with_index(index, gateway, subnet.prefix());
                host.replace_address(address).await
            }
            // A bridge without ports has no carrier, and detection of duplicates would never end.
            IpAddr::V6(gateway) => {
                let address = Ipv6Address::with_index(index, gateway, subnet.prefix()).nodad();
                host.replace_address(address).await
            }
        };
        if let Err(error) = given {
            return Err(give(error));
        }
    }
    let present = host
        .get_addresses_by_index(index)
        .await
        .map_err(failed("list the bridge's addresses"))?;
    for message in present {
        let Some(address) = message.primary_address().copied() else {
            continue;
        };
        let wanted = subnets
            .iter()
            .any(|subnet| subnet.gateway() == address && subnet.prefix() == message.prefix_len());
        let link_local = matches!(address, IpAddr::V6(v6) if v6.is_unicast_link_local());
        if !wanted && !link_local {
            host.del_address_by_index(index, address, message.prefix_len())
                .await
                .map_err(failed("remove a former address of the bridge"))?;
        }
    }
    Ok(())
}

pub(super) async fn attach(
    conf: &BridgeConf,
    subnets: &Subnets,
    netns: &Path,
    ifname: &str,
    host_ifname: &str,
    addresses: &[IpAddr],
) -> PluginResult<()> {
    let host = Connection::<Route>::new().map_err(failed("open netlink"))?;
    let namespace = open_namespace(netns)?;
    let bridge = match host
        .get_link_by_name(conf.bridge.as_str())
        .await
        .map_err(failed("look for the bridge"))?
    {
        Some(link) if link.is_up() && link.kind() == Some("bridge") => link.ifindex(),
        _ => ensure(&host, conf, subnets).await?,
    };
    let pair = || {
        let mut pair = VethLink::new(host_ifname, ifname)
            .peer_netns_fd(&namespace)
            .peer_address(mac_of_pod(addresses));
        if let Some(mtu) = conf.mtu {
            pair = pair.mtu(mtu);
        }
        // Down until its guard stands: the sandbox has no moment in which it may send what it likes.
        pair.master(InterfaceRef::Index(bridge))
    };
    match host.add_link(pair()).await {
        Err(error) if error.is_already_exists() => {
            // Left by an ADD that was cut off, unless the sandbox has the interface for another reason.
            host.del_link_if_exists(host_ifname)
                .await
                .map_err(failed("remove an old interface"))?;
            host.add_link(pair())
                .await
                .map_err(failed(format_args!("add {ifname} to the sandbox")))?;
        }
        added => added.map_err(failed(format_args!("add {ifname} to the sandbox")))?,
    }
    let configured = async {
        protect(conf, subnets, host_ifname, addresses).await?;
        set_up_port(&host, conf, host_ifname, addresses).await?;
        configure(conf, subnets, namespace, ifname, addresses).await
    }
    .await;
    if configured.is_err() {
        // Back in the host's namespace or not, this connection still belongs to it.
        let _ = host.del_link_if_exists(host_ifname).await;
    }
    configured
}

async fn protect(
    conf: &BridgeConf,
    subnets: &Subnets,
    host_ifname: &str,
    addresses: &[IpAddr],
) -> PluginResult<()> {
    Guard::open(&conf.bridge)
        .map_err(failed("open netlink"))?
        .protect(host_ifname, addresses, subnets)
        .await
        .map_err(failed(format_args!("guard {host_ifname}")))
}

/// The host end of a sandbox, which is guarded: it is up afterwards.
async fn set_up_port(
    host: &Connection<Route>,
    conf: &BridgeConf,
    host_ifname: &str,
    addresses: &[IpAddr],
) -> PluginResult<()> {
    let port = BridgePortConfig::new()
        .hairpin(true)
        .learning(false)
        .unicast_flood(false)
        .mcast_flood(false);
    host.set_bridge_port(host_ifname, port)
        .await
        .map_err(failed("configure the bridge port"))?;
    let mac = mac_of_pod(addresses);
    host.replace_fdb(FdbEntryBuilder::new(mac).dev(host_ifname).static_())
        .await
        .map_err(failed("tell the bridge the sandbox's hardware address"))?;
    for address in addresses.iter().filter(|address| address.is_ipv6()) {
        let neighbour = Neighbor::new(&conf.bridge, *address).lladdr(mac).permanent();
        host.replace_neighbor(neighbour)
            .await
            .map_err(failed(format_args!("enter the neighbour {address}")))?;
    }
    // The port itself has no addresses.
    set_up_ipv6(host_ifname, false)?;
    host.set_link_up(host_ifname)
        .await
        .map_err(failed(format_args!("bring {host_ifname} up")))
}

async fn configure(
    conf: &BridgeConf,
    subnets: &Subnets,
    namespace: File,
    ifname: &str,
    addresses: &[IpAddr],
) -> PluginResult<()> {
    enter(&namespace)?;
    let sandbox = Connection::<Route>::new().map_err(failed("open netlink in the sandbox"))?;
    let link = sandbox
        .get_link_by_name(ifname)
        .await
        .map_err(failed("look into the sandbox"))?
        .ok_or_else(|| CniError::new(CniError::INTERNAL, format!("{ifname} did not reach the sandbox")))?;
    let index = link.ifindex();
    // A pair made by the kernel's default may differ from its bridge.
    if let Some(mtu) = conf.mtu.filter(|mtu| link.mtu() != Some(*mtu)) {
        sandbox
            .set_link_mtu_by_index(index, mtu)
            .await
            .map_err(failed("set the sandbox's MTU"))?;
    }
    // The loopback device has index 1 in every namespace.
    sandbox
        .set_link_up_by_index(1)
        .await
        .map_err(failed("bring loopback up"))?;
    // The host forwards between pods over one bridge and may tell them of a shorter way; there is none.
    set_sysctl("ipv4/conf/all/accept_redirects", "0")?;
    set_sysctl(&format!("ipv4/conf/{ifname}/accept_redirects"), "0")?;
    set_up_ipv6(ifname, addresses.iter().any(IpAddr::is_ipv6))?;
    let give = |error| failed(format_args!("give {ifname} its address"))(error);
    for address in addresses {
        match *address {
            IpAddr::V4(address) => {
                let address = Ipv4Address::with_index(index, address, 32);
                sandbox.add_address(address).await.map_err(give)?;
            }
            // Nobody else can have it, and a process may bind to it at once.
            IpAddr::V6(address) => {
                let address = Ipv6Address::with_index(index, address, 128).nodad();
                sandbox.add_address(address).await.map_err(give)?;
            }
        }
    }
    sandbox
        .set_link_up_by_index(index)
        .await
        .map_err(failed(format_args!("bring {ifname} up")))?;
    let route = |error| failed("add the default route")(error);
    for address in addresses {
        match subnets.gateway_of(*address) {
            Some(IpAddr::V4(gateway)) => {
                let default = Ipv4Route::default_route().gateway(gateway).dev_index(index);
                sandbox.add_route(default.onlink()).await.map_err(route)?;
            }
            Some(IpAddr::V6(gateway)) => {
                let neighbour =
                    Neighbor::with_index_v6(index, gateway).lladdr(mac_of(subnets.first_gateway()));
                sandbox
                    .replace_neighbor(neighbour.permanent())
                    .await
                    .map_err(failed("enter the gateway as a neighbour"))?;
                let default = Ipv6Route::default_route().gateway(gateway).dev_index(index);
                sandbox.add_route(default.onlink()).await.map_err(route)?;
            }
            None => {}
        }
    }
    Ok(())
}

/// Removes the pair by its host end. The sandbox may be gone, and the pair with it.
pub(super) async fn detach(conf: &BridgeConf, host_ifname: &str, addresses: &[IpAddr]) -> PluginResult<()> {
    let host = Connection::<Route>::new().map_err(failed("open netlink"))?;
    host.del_link_if_exists(host_ifname)
        .await
        .map_err(failed(format_args!("remove {host_ifname}")))?;
    if addresses.iter().any(IpAddr::is_ipv6) && is_up(&host, &conf.bridge).await?.is_some() {
        for address in addresses.iter().filter(|address| address.is_ipv6()) {
            host.del_neighbor_if_exists(Neighbor::new(&conf.bridge, *address))
                .await
                .map_err(failed(format_args!("remove the neighbour {address}")))?;
        }
    }
    Guard::open(&conf.bridge)
        .map_err(failed("open netlink"))?
        .forget(host_ifname)
        .await
        .map_err(failed(format_args!("remove the guard of {host_ifname}")))
}

pub(super) async fn check(
    conf: &BridgeConf,
    netns: &Path,
    ifname: &str,
    host_ifname: &str,
    wanted: &[IpAddr],
) -> PluginResult<()> {
    let wrong = |what: String| Err(CniError::new(CniError::INTERNAL, what));
    let host = Connection::<Route>::new().map_err(failed("open netlink"))?;
    let bridge = host
        .get_link_by_name(conf.bridge.as_str())
        .await
        .map_err(failed("look for the bridge"))?;
    let Some(bridge) = bridge else {
        return wrong(format!("bridge {} is missing", conf.bridge));
    };
    match host
        .get_link_by_name(host_ifname)
        .await
        .map_err(failed("look for the host end"))?
    {
        Some(link) if link.master() == Some(bridge.ifindex()) => {}
        Some(_) => return wrong(format!("{host_ifname} is not attached to {}", conf.bridge)),
        None => return wrong(format!("{host_ifname} is missing")),
    }
    let guard = Guard::open(&conf.bridge).map_err(failed("open netlink"))?;
    let guards = guard.standing().await.map_err(failed("list the guards"))?;
    if !guards.protect(host_ifname, wanted, &conf.validate()?) {
        return wrong(format!("{host_ifname} has no guard, or not the right one"));
    }
    enter(&open_namespace(netns)?)?;
    let sandbox = Connection::<Route>::new().map_err(failed("open netlink in the sandbox"))?;
    let link = sandbox
        .get_link_by_name(ifname)
        .await
        .map_err(failed("look into the sandbox"))?;
    let Some(link) = link.filter(|link| link.is_up()) else {
        return wrong(format!("{ifname} is missing or down"));
    };
    let addresses = sandbox
        .get_addresses_by_index(link.ifindex())
        .await
        .map_err(failed("look into the sandbox"))?;
    for wanted in wanted {
        let has = |a: &AddressMessage| a.local() == Some(wanted) || a.address() == Some(wanted);
        if !addresses.iter().any(has) {
            return wrong(format!("{ifname} has lost its address {wanted}"));
        }
    }
    Ok(())
}

fn open_namespace(netns: &Path) -> PluginResult<File> {
    File::open(netns).map_err(|error| {
        CniError::new(
            CniError::UNKNOWN_CONTAINER,
            format!("failed to open netns {}: {error}", netns.display()),
        )
    })
}

/// Moves this process, which has one thread, into the sandbox's network.
fn enter(namespace: &File) -> PluginResult<()> {
    rustix::thread::move_into_link_name_space(
        namespace.as_fd(),
        Some(rustix::thread::LinkNameSpaceType::Network),
    )
    .map_err(|error| {
        CniError::new(
            CniError::INTERNAL,
            format!("enter the sandbox's network: {error}"),
        )
    })
}

/// Whether an interface takes part in IPv6. If so, with the addresses that it is given alone: not one that it makes
/// up itself, nor others from whoever advertises a router.
fn set_up_ipv6(ifname: &str, on: bool) -> PluginResult<()> {
    if !Path::new("/proc/sys/net/ipv6").exists() {
        if on {
            let why = "the pod network has IPv6, but this kernel has not (ipv6.disable=1?)";
            return Err(CniError::new(CniError::INTERNAL, why));
        }
        return Ok(());
    }
    for (name, value) in [
        ("accept_ra", "0"),
        ("accept_redirects", "0"),
        // No link-local address.
        ("addr_gen_mode", "1"),
        ("disable_ipv6", if on { "0" } else { "1" }),
    ] {
        set_sysctl(&format!("ipv6/conf/{ifname}/{name}"), value)?;
    }
    Ok(())
}

/// Makes this machine forward IPv6. A machine that does so no longer listens to routers, unless told to: those of its
/// interfaces that do keep doing so, or it would lose its own way out.
fn forward_ipv6(bridge: &str) -> PluginResult<()> {
    if std::fs::read_to_string("/proc/sys/net/ipv6/conf/all/forwarding").is_ok_and(|on| on.trim() == "1") {
        return Ok(());
    }
    for entry in std::fs::read_dir("/proc/sys/net/ipv6/conf")
        .into_iter()
        .flatten()
        .flatten()
    {
        let name = entry.file_name().to_string_lossy().into_owned();
        let listens = || std::fs::read_to_string(entry.path().join("accept_ra"));
        if !["all", "default", "lo", bridge].contains(&name.as_str())
            && listens().is_ok_and(|value| value.trim() == "1")
        {
            set_sysctl(&format!("ipv6/conf/{name}/accept_ra"), "2")?;
        }
    }
    set_sysctl("ipv6/conf/all/forwarding", "1")
}

/// Sets a setting below `net`.
fn set_sysctl(name: &str, value: &str) -> PluginResult<()> {
    let path = format!("/proc/sys/net/{name}");
    // Setting a value that is there already can have effects (ip_forward resets others).
    if std::fs::read_to_string(&path).is_ok_and(|current| current.trim() == value) {
        return Ok(());
    }
    std::fs::write(&path, value)
        .map_err(|error| CniError::new(CniError::IO_FAILURE, format!("{path}: {error}")))
}

/// The same for the same sandbox, so that DEL finds it without being told.
pub(super) fn host_ifname(network: &str, container_id: &str, ifname: &str) -> String {
    // FNV-1a: spread is all that matters, and names are ours alone.
    let mut hash: u64 = 0xcbf2_9ce4_8422_2325;
    for part in [network, container_id, ifname] {
        for byte in part.bytes().chain([0]) {
            hash = (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
        }
    }
    format!("veth{:011x}", hash >> 20)
}

/// The hardware address that follows from an IP address: of IPv6 the last bytes, which differ within a node.
pub fn mac_of(address: IpAddr) -> [u8; 6] {
    let [a, b, c, d] = match address {
        IpAddr::V4(address) => address.octets(),
        IpAddr::V6(address) => (address.to_bits() as u32).to_be_bytes(),
    };
    // Locally administered, unicast.
    [0x0a, 0x58, a, b, c, d]
}

/// A sandbox has one hardware address, whatever addresses it has.
pub(super) fn mac_of_pod(addresses: &[IpAddr]) -> [u8; 6] {
    mac_of(
        addresses
            .first()
            .copied()
            .unwrap_or(IpAddr::V4(Ipv4Addr::UNSPECIFIED)),
    )
}

pub(super) fn format_mac(mac: [u8; 6]) -> String {
    mac.map(|byte| format!("{byte:02x}")).join(":")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_fit_and_differ() {
        let one = host_ifname("net", "abc", "eth0");
        assert_eq!(one.len(), 15);
        assert_eq!(one, host_ifname("net", "abc", "eth0"));
        assert_ne!(one, host_ifname("net", "abce", "th0"));
        assert_eq!(
            format_mac(mac_of("10.244.0.5".parse().unwrap())),
            "0a:58:0a:f4:00:05"
        );
        assert_eq!(
            format_mac(mac_of("fd00::1:5".parse().unwrap())),
            "0a:58:00:01:00:05"
        );
    }
}
