//! A hostile sandbox: root with raw sockets in its own namespace, which sends what is not its to send. Whatever
//! it forges must reach neither the bridge nor another sandbox nor the host.

use std::collections::BTreeSet;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, UdpSocket};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::time::{Duration, Instant};

use nlink::netlink::nftables::Family;
use nlink::netlink::{Connection, Nftables, Route};
use skiff_cni::{BridgeConf, mac_of};

use crate::sandbox::Sandbox;

const PATIENCE: Duration = Duration::from_secs(10);
const PORT: u16 = 4789;
const MARK_LENGTH: usize = 64;
const BROADCAST: [u8; 6] = [0xff; 6];
const STRANGER: [u8; 6] = [0x02, 0, 0, 0, 0, 0x42];
/// A bridge does not forward frames to this group (LLDP's) but hands them to the host.
const LINK_LOCAL_GROUP: [u8; 6] = [0x01, 0x80, 0xc2, 0, 0, 0x0e];
const GATEWAY: Ipv4Addr = Ipv4Addr::new(10, 244, 7, 1);

const GATEWAY_V6: Ipv6Addr = Ipv6Addr::new(0xfd00, 7, 0, 0, 0, 0, 0, 1);

/// What frames are made of: the hardware and IP addresses of the attacker, its victim and the gateway.
#[derive(Clone)]
struct Cast {
    own: Vec<IpAddr>,
    victim: Vec<IpAddr>,
    gateway: [u8; 6],
}

/// Sends forged frames from the first sandbox, and looks at who gets them.
pub(crate) async fn is_prevented(bridge: &BridgeConf, sandboxes: &[Sandbox; 2], ips: [&[IpAddr]; 2]) {
    let cast = Cast {
        own: ips[0].to_vec(),
        victim: ips[1].to_vec(),
        gateway: mac_of(bridge.subnets[0].nth(1).unwrap()),
    };
    let dual = bridge.subnets.iter().any(|network| network.is_ipv6());
    let none = BTreeSet::new();
    assert_eq!(arrived(sandboxes, &cast), none);
    // An interface has no IPv6 address that it was not given.
    let with_ipv6 = std::fs::read_to_string("/proc/thread-self/net/if_inet6").unwrap();
    let given = with_ipv6.lines().filter(|line| line.contains("skiff0"));
    assert_eq!(given.count(), usize::from(dual), "{with_ipv6}");
    assert!(
        !with_ipv6.contains("veth") && !with_ipv6.contains("fe80"),
        "{with_ipv6}"
    );
    for (interface, setting, value) in [
        ("ipv4/conf/skiff0", "accept_redirects", "0"),
        ("ipv4/conf/skiff0", "accept_source_route", "0"),
        ("ipv4/conf/skiff0", "rp_filter", "1"),
        ("ipv6/conf/skiff0", "accept_ra", "0"),
        ("ipv6/conf/skiff0", "disable_ipv6", if dual { "0" } else { "1" }),
    ] {
        let found = std::fs::read_to_string(format!("/proc/sys/net/{interface}/{setting}")).unwrap();
        assert_eq!(found.trim(), value, "{interface}/{setting}");
    }

    // The guards and nothing else keep the frames out, so this test sees them without: it is not blind.
    flush().await;
    let everything: BTreeSet<String> = forged(&cast).into_iter().map(|(name, _)| name).collect();
    let unguarded = arrived(sandboxes, &cast);
    let missing: Vec<&String> = everything.difference(&unguarded).collect();
    assert!(missing.is_empty(), "never seen, guarded or not: {missing:?}");

    forget_neighbours("skiff0").await;
    sandboxes[1].run(|| {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        runtime.unwrap().block_on(forget_neighbours("eth0"));
    });

    // They come back, for the sandboxes of before too: while skiff runs, and when it starts.
    assert_eq!(skiff_cni::restore_guards(bridge).await.unwrap(), 2);
    assert_eq!(skiff_cni::restore_guards(bridge).await.unwrap(), 0);
    assert_eq!(arrived(sandboxes, &cast), none);
    // A guard that lacks a rule, has one more, lets pass what no rule accepts, or sleeps is none either.
    for (change, expected) in [
        ("flush chain netdev skiff0 PORT", 1),
        ("insert rule netdev skiff0 PORT accept", 1),
        ("chain netdev skiff0 PORT { policy accept; }", 1),
        ("table netdev skiff0 { flags dormant; }", 2),
        ("delete chain netdev skiff0 PORT", 1),
    ] {
        let port = Connection::<Nftables>::new().unwrap();
        let port = port.list_chains_in("skiff0", Family::Netdev).await.unwrap()[0]
            .name
            .clone();
        let change = change.replace("PORT", &port);
        let done = std::process::Command::new("nft").arg(&change).status();
        if !done.is_ok_and(|status| status.success()) {
            println!("bridge: nft {change} is not to be had, skipped");
            continue;
        }
        assert_eq!(
            skiff_cni::restore_guards(bridge).await.unwrap(),
            expected,
            "{change}"
        );
        assert_eq!(skiff_cni::restore_guards(bridge).await.unwrap(), 0, "{change}");
    }
    assert_eq!(arrived(sandboxes, &cast), none);
    flush().await;
    skiff_cni::ensure_bridge(bridge).await.unwrap();
    assert_eq!(arrived(sandboxes, &cast), none);
}

pub(crate) async fn tables() -> Vec<String> {
    let nftables = Connection::<Nftables>::new().unwrap();
    let tables = nftables.list_tables_in(Family::Netdev).await.unwrap();
    tables.into_iter().map(|table| table.name).collect()
}

async fn flush() {
    let nftables = Connection::<Nftables>::new().unwrap();
    nftables.flush_ruleset().await.unwrap();
    assert!(tables().await.is_empty());
}

/// Undoes what the forged frames did to who is thought to be where.
async fn forget_neighbours(interface: &str) {
    let route = Connection::<Route>::new().unwrap();
    route.flush_neighbors(interface).await.unwrap();
}

/// The names of the forged frames that got anywhere: to the bridge, to the other sandbox, to a host's socket.
fn arrived(sandboxes: &[Sandbox; 2], cast: &Cast) -> BTreeSet<String> {
    let [attacker, other] = sandboxes;
    let at_bridge = Sniffer::open("skiff0");
    let at_victim = other.run(|| Sniffer::open("eth0"));
    let at_host = UdpSocket::bind(("0.0.0.0", PORT)).unwrap();
    at_host.set_nonblocking(true).unwrap();
    let frames = forged(cast);
    let count = frames.len();
    let (own, victim) = (cast.own[0], cast.victim[0]);
    let (own_mac, gateway_mac) = (mac_of(own), cast.gateway);
    attacker.run(move || {
        let wire = Sniffer::open("eth0");
        for (name, frame) in frames {
            wire.send(&marked(frame, &name));
        }
        // What is not forged passes, and ends the wait: it was sent last.
        let honest = match (own, victim) {
            (IpAddr::V4(own), IpAddr::V4(victim)) => udp(gateway_mac, own_mac, own, victim, PORT),
            (IpAddr::V6(own), IpAddr::V6(victim)) => udp6(gateway_mac, own_mac, own, victim),
            mixed => panic!("{mixed:?}"),
        };
        wire.send(&marked(honest, "honest"));
    });
    let (mut seen, mut honest) = (BTreeSet::new(), [false; 2]);
    let deadline = Instant::now() + PATIENCE;
    // An attack that succeeds may keep honest packets from arriving: then all forged ones have.
    while honest != [true; 2] && seen.len() < count {
        assert!(
            Instant::now() < deadline,
            "honest packets arrived {honest:?}, forged: {seen:?}"
        );
        for (sniffer, honest) in [&at_bridge, &at_victim].into_iter().zip(&mut honest) {
            while let Some(frame) = sniffer.receive() {
                match mark(&frame) {
                    Some(name) if name == "honest" => *honest = true,
                    name => seen.extend(name),
                }
            }
        }
        let mut buffer = [0; 2048];
        while let Ok((length, _)) = at_host.recv_from(&mut buffer) {
            seen.extend(mark(&buffer[..length]));
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    seen
}

fn marked(mut frame: Vec<u8>, name: &str) -> Vec<u8> {
    let length = frame.len() + MARK_LENGTH;
    frame.extend(format!("<<{name}>>").bytes());
    frame.resize(length, 0);
    frame
}

fn mark(frame: &[u8]) -> Option<String> {
    let find = |what: &[u8]| frame.windows(2).position(|window| window == what);
    let (start, end) = (find(b"<<")? + 2, find(b">>")?);
    Some(String::from_utf8_lossy(frame.get(start..end)?).into_owned())
}

/// Frames that the attacker may not send, by name. The names end up in the frames.
fn forged(cast: &Cast) -> Vec<(String, Vec<u8>)> {
    let (own_mac, victim_mac, gateway_mac) = (mac_of(cast.own[0]), mac_of(cast.victim[0]), cast.gateway);
    let mut frames = Vec::new();
    // Those of a family that the sandboxes have no address of are forged from addresses that they might have.
    let v4 = |addresses: &[IpAddr], or: u8| {
        let found = addresses.iter().find_map(|ip| match ip {
            IpAddr::V4(ip) => Some(*ip),
            IpAddr::V6(_) => None,
        });
        found.unwrap_or(Ipv4Addr::new(10, 244, 7, or))
    };
    let v6 = |addresses: &[IpAddr], or: u16| {
        let found = addresses.iter().find_map(|ip| match ip {
            IpAddr::V6(ip) => Some(*ip),
            IpAddr::V4(_) => None,
        });
        found.unwrap_or(Ipv6Addr::new(0xfd00, 7, 0, 0, 0, 0, 0, or))
    };
    frames.extend(forged_v4(
        [own_mac, victim_mac, gateway_mac],
        v4(&cast.own, 2),
        v4(&cast.victim, 3),
    ));
    frames.extend(forged_v6(
        [own_mac, victim_mac, gateway_mac],
        v6(&cast.own, 2),
        v6(&cast.victim, 3),
    ));
    if cast.own.iter().all(IpAddr::is_ipv6) {
        // The host hands it to its own sockets, and has no IPv4 address here.
        frames.retain(|(name, _)| *name != "ip: to a group that bridges keep");
        let plain = udp(gateway_mac, own_mac, v4(&[], 2), GATEWAY, PORT);
        frames.push(("ip: a family that it has not", plain));
    }
    if cast.own.iter().all(IpAddr::is_ipv4) {
        let plain = udp6(gateway_mac, own_mac, v6(&[], 2), GATEWAY_V6);
        frames.push(("ipv6: a family that it has not", plain));
    }
    frames
        .into_iter()
        .map(|(name, frame)| (name.to_string(), frame))
        .collect()
}

fn forged_v6(
    [own_mac, victim_mac, gateway_mac]: [[u8; 6]; 3],
    own: Ipv6Addr,
    victim: Ipv6Addr,
) -> Vec<(&'static str, Vec<u8>)> {
    let outside = Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 0x66);
    let all_nodes = [0x33, 0x33, 0, 0, 0, 1];
    let group = Ipv6Addr::new(0xff02, 0, 0, 0, 0, 0, 0, 1);
    // A neighbour advertisement with the override flag: the target is at this hardware address.
    let advertise = |target: Ipv6Addr, mac: [u8; 6]| {
        [
            &[136, 0, 0, 0, 0x20, 0, 0, 0][..],
            &target.octets(),
            &[2, 1],
            &mac,
        ]
        .concat()
    };
    let solicit = |target: Ipv6Addr| {
        [
            &[135, 0, 0, 0, 0, 0, 0, 0][..],
            &target.octets(),
            &[1, 1],
            &own_mac,
        ]
        .concat()
    };
    vec![
        ("ipv6: a router", {
            let link_local = Ipv6Addr::new(0xfe80, 0, 0, 0, 0, 0, 0, 0x42);
            let icmp = [134, 0, 0, 0, 64, 0, 7, 8, 0, 0, 0, 0, 0, 0, 0, 0];
            icmp6(all_nodes, own_mac, link_local, group, &icmp, false)
        }),
        (
            "ipv6: from the victim",
            udp6(gateway_mac, own_mac, victim, GATEWAY_V6),
        ),
        (
            "ipv6: from the gateway",
            udp6(gateway_mac, own_mac, GATEWAY_V6, victim),
        ),
        ("ipv6: from outside", udp6(gateway_mac, own_mac, outside, victim)),
        ("ipv6: past the host", udp6(victim_mac, own_mac, own, victim)),
        (
            "ipv6: from a stranger's hardware address",
            udp6(gateway_mac, STRANGER, own, victim),
        ),
        ("ipv6: to all", udp6(all_nodes, own_mac, own, group)),
        (
            "ndp: the victim is me",
            icmp6(
                gateway_mac,
                own_mac,
                own,
                GATEWAY_V6,
                &advertise(victim, own_mac),
                false,
            ),
        ),
        (
            "ndp: the victim is me, behind an extension header",
            icmp6(
                gateway_mac,
                own_mac,
                own,
                GATEWAY_V6,
                &advertise(victim, own_mac),
                true,
            ),
        ),
        (
            "ndp: the gateway is me, to all",
            icmp6(
                all_nodes,
                own_mac,
                own,
                group,
                &advertise(GATEWAY_V6, own_mac),
                false,
            ),
        ),
        (
            "ndp: who is the victim",
            icmp6(gateway_mac, own_mac, own, victim, &solicit(victim), false),
        ),
        ("ndp: a redirect", {
            let redirect = [&[137, 0, 0, 0, 0, 0, 0, 0][..], &own.octets(), &outside.octets()].concat();
            icmp6(gateway_mac, own_mac, own, GATEWAY_V6, &redirect, false)
        }),
    ]
}

fn forged_v4(
    [own_mac, victim_mac, gateway_mac]: [[u8; 6]; 3],
    own: Ipv4Addr,
    victim: Ipv4Addr,
) -> Vec<(&'static str, Vec<u8>)> {
    let outside = Ipv4Addr::new(192, 0, 2, 66);
    let mut frames = vec![
        (
            "arp: the gateway is me, to the victim",
            arp(victim_mac, own_mac, 2, own_mac, GATEWAY, victim),
        ),
        (
            "arp: the gateway is me, to all",
            arp(BROADCAST, own_mac, 2, own_mac, GATEWAY, GATEWAY),
        ),
        (
            "arp: the gateway asks",
            arp(BROADCAST, own_mac, 1, own_mac, GATEWAY, victim),
        ),
        (
            "arp: the victim is me, to the host",
            arp(gateway_mac, own_mac, 2, own_mac, victim, GATEWAY),
        ),
        (
            "arp: the victim is me, asking",
            arp(BROADCAST, own_mac, 1, own_mac, victim, GATEWAY),
        ),
        (
            "arp: my address is at the victim's",
            arp(gateway_mac, own_mac, 2, victim_mac, own, GATEWAY),
        ),
        (
            "arp: from the victim's hardware address",
            arp(gateway_mac, victim_mac, 2, own_mac, own, GATEWAY),
        ),
        (
            "arp: who is the victim",
            arp(BROADCAST, own_mac, 1, own_mac, own, victim),
        ),
        (
            "ip: from the victim",
            udp(gateway_mac, own_mac, victim, GATEWAY, PORT),
        ),
        (
            "ip: from the gateway",
            udp(gateway_mac, own_mac, GATEWAY, victim, PORT),
        ),
        (
            "ip: from outside",
            udp(gateway_mac, own_mac, outside, victim, PORT),
        ),
        (
            "ip: from loopback",
            udp(gateway_mac, own_mac, Ipv4Addr::LOCALHOST, GATEWAY, PORT),
        ),
        (
            "ip: from nobody",
            udp(gateway_mac, own_mac, Ipv4Addr::UNSPECIFIED, GATEWAY, PORT),
        ),
        (
            "ip: to loopback",
            udp(gateway_mac, own_mac, own, Ipv4Addr::LOCALHOST, PORT),
        ),
        ("ip: past the host", udp(victim_mac, own_mac, own, victim, PORT)),
        (
            "dhcp: an offer",
            udp(BROADCAST, own_mac, own, Ipv4Addr::BROADCAST, 68),
        ),
        (
            "ip: from a stranger's hardware address",
            udp(gateway_mac, STRANGER, own, GATEWAY, PORT),
        ),
        (
            "ip: to a group that bridges keep",
            udp(LINK_LOCAL_GROUP, own_mac, own, GATEWAY, PORT),
        ),
    ];
    let mut tagged = udp(gateway_mac, own_mac, own, GATEWAY, PORT);
    tagged.splice(12..12, [0x81, 0x00, 0x00, 0x05]);
    frames.push(("vlan: tagged", tagged));
    frames
}

fn arp(
    to: [u8; 6],
    from: [u8; 6],
    operation: u8,
    sender: [u8; 6],
    sender_ip: Ipv4Addr,
    target_ip: Ipv4Addr,
) -> Vec<u8> {
    let header: &[u8] = &[8, 6, 0, 1, 8, 0, 6, 4, 0, operation];
    [
        &to[..],
        &from,
        header,
        &sender,
        &sender_ip.octets(),
        &BROADCAST,
        &target_ip.octets(),
    ]
    .concat()
}

/// The head of a datagram without a UDP checksum, which is optional; its payload is the mark.
fn udp(to: [u8; 6], from: [u8; 6], source: Ipv4Addr, destination: Ipv4Addr, port: u16) -> Vec<u8> {
    let mut ip = vec![0x45, 0];
    ip.extend((20 + 8 + MARK_LENGTH as u16).to_be_bytes());
    ip.extend([0, 0, 0, 0, 64, 17, 0, 0]);
    ip.extend(source.octets());
    ip.extend(destination.octets());
    let sum: u32 = ip
        .chunks(2)
        .map(|pair| u32::from(u16::from_be_bytes([pair[0], pair[1]])))
        .sum();
    let checksum = !((sum & 0xffff) + (sum >> 16)) as u16;
    ip[10..12].copy_from_slice(&checksum.to_be_bytes());
    let ports = [PORT.to_be_bytes(), port.to_be_bytes()].concat();
    let length = (8 + MARK_LENGTH as u16).to_be_bytes();
    [&to[..], &from, &[8, 0], &ip, &ports, &length, &[0, 0]].concat()
}

/// The head of an IPv6 packet, its payload's length counting the mark.
fn ipv6(
    to: [u8; 6],
    from: [u8; 6],
    source: Ipv6Addr,
    destination: Ipv6Addr,
    protocol: u8,
    payload: &[u8],
) -> Vec<u8> {
    let length = (payload.len() + MARK_LENGTH) as u16;
    let mut head = vec![0x60, 0, 0, 0];
    head.extend(length.to_be_bytes());
    head.extend([protocol, 255]);
    head.extend(source.octets());
    head.extend(destination.octets());
    [&to[..], &from, &[0x86, 0xdd], &head, payload].concat()
}

/// The checksum is missing: raw sockets take the packet before anybody looks at it.
fn udp6(to: [u8; 6], from: [u8; 6], source: Ipv6Addr, destination: Ipv6Addr) -> Vec<u8> {
    let length = (8 + MARK_LENGTH as u16).to_be_bytes();
    let head = [&PORT.to_be_bytes()[..], &PORT.to_be_bytes(), &length, &[0, 0]].concat();
    ipv6(to, from, source, destination, 17, &head)
}

/// The checksum is wrong; nobody may get so far as to look at it.
fn icmp6(
    to: [u8; 6],
    from: [u8; 6],
    source: Ipv6Addr,
    destination: Ipv6Addr,
    message: &[u8],
    hidden: bool,
) -> Vec<u8> {
    if !hidden {
        return ipv6(to, from, source, destination, 58, message);
    }
    // Destination options: the next header, a length of 0, and padding.
    let options = [58, 0, 1, 4, 0, 0, 0, 0];
    ipv6(
        to,
        from,
        source,
        destination,
        60,
        &[&options[..], message].concat(),
    )
}

/// A raw socket on an interface of the namespace it is opened in.
struct Sniffer(OwnedFd);

impl Sniffer {
    fn open(interface: &str) -> Sniffer {
        let protocol = (libc::ETH_P_ALL as u16).to_be();
        let name = std::ffi::CString::new(interface).unwrap();
        // SAFETY: plain system calls; the address is a live local of the size that is passed.
        unsafe {
            let fd = libc::socket(
                libc::AF_PACKET,
                libc::SOCK_RAW | libc::SOCK_NONBLOCK | libc::SOCK_CLOEXEC,
                i32::from(protocol),
            );
            assert!(fd >= 0, "{}", std::io::Error::last_os_error());
            let socket = OwnedFd::from_raw_fd(fd);
            let mut address: libc::sockaddr_ll = std::mem::zeroed();
            address.sll_family = libc::AF_PACKET as u16;
            address.sll_protocol = protocol;
            address.sll_ifindex = libc::if_nametoindex(name.as_ptr()) as i32;
            let length = size_of::<libc::sockaddr_ll>() as u32;
            let bound = libc::bind(fd, (&raw const address).cast(), length);
            assert_eq!(bound, 0, "{}", std::io::Error::last_os_error());
            Sniffer(socket)
        }
    }

    fn send(&self, frame: &[u8]) {
        // SAFETY: the buffer is live and of the length that is passed.
        let sent = unsafe { libc::send(self.0.as_raw_fd(), frame.as_ptr().cast(), frame.len(), 0) };
        assert_eq!(sent, frame.len() as isize, "{}", std::io::Error::last_os_error());
    }

    fn receive(&self) -> Option<Vec<u8>> {
        let mut buffer = vec![0; 2048];
        // SAFETY: the buffer is live and of the length that is passed.
        let length = unsafe { libc::recv(self.0.as_raw_fd(), buffer.as_mut_ptr().cast(), buffer.len(), 0) };
        buffer.truncate(usize::try_from(length).ok()?);
        Some(buffer)
    }
}
