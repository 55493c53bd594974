//! Pods of several nodes for real: two machines on one link, a third behind a router, each a network namespace with
//! the component, the real plugin and pods of both address families, over a real API server.
#![allow(
    clippy::unwrap_used,
    reason = "a test with a main of its own is not seen as a test"
)]

mod hosts;

use std::io::{Read, Write};
use std::net::{IpAddr, TcpStream, UdpSocket};
use std::os::fd::AsRawFd;
use std::time::{Duration, Instant};

use hosts::{ApiServer, Host, Machine, Pod, Received, ask, eventually, inside, serve};
use serde_json::Value;
use skiff_network::pods;

const PORT: u16 = 8080;
/// A link's 1500 bytes without what VXLAN needs.
const MTU: usize = 1450;
/// What a pod of the first machine may have; the second one has no limit.
const CONNECTIONS: u32 = 300;
const IPV4: usize = 0;
const IPV6: usize = 1;

fn main() {
    if let Some(code) = skiff_cni::plugin_main() {
        std::process::exit(code);
    }
    if !rustix::process::geteuid().is_root() {
        println!("nodes: skipped, it needs root");
        return;
    }
    let api = ApiServer::start();
    let router = Host::new();
    router.sysctl("ipv4/ip_forward", "1");
    router.sysctl("ipv6/conf/all/forwarding", "1");
    router.ip("link add lan type bridge");
    router.ip("link set lan up");
    address(&router, "lan", &["192.0.2.254/24", "2001:db8:1::fe/64"]);

    let near = |name: &'static str, number: u8| {
        let host = Host::new();
        host.cable("eth0", &router, name);
        router.ip(&format!("link set dev {name} master lan"));
        address(
            &host,
            "eth0",
            &[
                &format!("192.0.2.{number}/24"),
                &format!("2001:db8:1::{number}/64"),
            ],
        );
        way_out(&host, "192.0.2.254", "2001:db8:1::fe");
        Machine::new(name, host, &api)
    };
    let mut a = near("a", 1);
    let mut b = near("b", 2);
    let host = Host::new();
    host.cable("eth0", &router, "c");
    address(&router, "c", &["198.51.100.254/24", "2001:db8:2::fe/64"]);
    address(&host, "eth0", &["198.51.100.1/24", "2001:db8:2::1/64"]);
    way_out(&host, "198.51.100.254", "2001:db8:2::fe");
    let mut c = Machine::new("c", host, &api);

    a.config.connection_limit = Some(CONNECTIONS);
    b.config.connection_limit = Some(0);
    // Nothing is there before the Node says which networks are its own.
    a.start();
    assert!(!a.is_ready());
    let cidrs = api.add_node("a", &["192.0.2.1", "2001:db8:1::1"]);
    assert_eq!(cidrs, ["10.244.0.0/24", "fd00:10::/64"]);
    let (one, two) = (a.pod(), a.pod());
    assert_eq!(
        one.addresses,
        [
            "10.244.0.2".parse::<IpAddr>().unwrap(),
            "fd00:10::2".parse().unwrap()
        ]
    );
    assert!(
        !a.host.ip("-o link").contains("vxlan"),
        "alone, it needs no tunnel"
    );

    api.add_node("b", &["192.0.2.2", "2001:db8:1::2"]);
    api.add_node("c", &["198.51.100.1", "2001:db8:2::1"]);
    b.start();
    c.start();
    let (near_pod, far_pod) = (b.pod(), c.pod());
    println!("nodes: three machines with pods");

    let all = [&one, &two, &near_pod, &far_pod];
    let received: Vec<Vec<Received>> = all
        .iter()
        .map(|pod| {
            pod.addresses
                .iter()
                .map(|address| serve(&pod.host.path, *address, PORT))
                .collect()
        })
        .collect();
    // Everybody reaches everybody by both families, and is seen under its own address.
    for from in all {
        for to in all {
            for family in [IPV4, IPV6] {
                let seen = reach(from, to.addresses[family]);
                assert_eq!(seen, from.addresses[family], "to {}", to.addresses[family]);
            }
        }
    }
    let routes = a.routes();
    for expected in [
        "10.244.1.0/24 via 192.0.2.2 dev eth0",
        "fd00:10:0:1::/64 via 2001:db8:1::2 dev eth0",
        "10.244.2.0/24 via 10.244.2.1 dev skiff0-vxlan",
        "fd00:10:0:2::/64 via fd00:10:0:2::1 dev skiff0-vxlan",
    ] {
        assert!(routes.contains(expected), "{expected}:\n{routes}");
    }
    // The machines themselves reach pods of others, and DNS is told to be there.
    for family in [IPV4, IPV6] {
        let to = far_pod.addresses[family];
        let seen = eventually("the far pod from a machine", || ask(&a.host.path, to, PORT).ok());
        assert_eq!(
            seen,
            [
                "10.244.0.1".parse::<IpAddr>().unwrap(),
                "fd00:10::1".parse().unwrap()
            ][family]
        );
        assert!(ask(&a.host.path, near_pod.addresses[family], PORT).is_ok());
    }
    let node = eventually("the annotation of DNS", || {
        let annotations = api.node("a")?.metadata.annotations?;
        annotations.get(pods::DNS_ANNOTATION).cloned()
    });
    assert_eq!(node, "10.244.0.1,fd00:10::1");
    println!("nodes: all pods reach each other, under their own addresses");

    leaves_the_cluster_under_the_nodes_address(&router, &one);
    whole_packets_pass(&one, &near_pod, &received[2]);
    whole_packets_pass(&one, &far_pod, &received[3]);
    println!("nodes: packets of the whole MTU pass");

    let vni = vni_of(&c.host);
    macro_rules! forgery {
        () => {
            Forgery {
                a: &a,
                b: &b,
                c: &c,
                router: &router,
                one: &one,
                two: &two,
                far: &far_pod,
                received: &received,
                vni,
            }
        };
    }
    assert_eq!(forgery!().arrived(), Vec::<&str>::new());
    one_pod_does_not_take_all_connections(&a.host, &b.host, [&one, &two, &near_pod]);
    others_hands(&a.host);
    // It is the rules that keep them out: without them, this test sees the packets.
    for machine in [&mut a, &mut b, &mut c] {
        machine.kill();
        machine.host.command("nft", "delete table inet skiff-test-pods");
    }
    assert_eq!(forgery!().arrived(), FORGED.to_vec());
    println!("nodes: forged packets are dropped");
    a.start();
    eventually("the rules of a", || {
        let tables = a.host.command("nft", "list tables");
        tables.contains("skiff-test-pods").then_some(())
    });

    survives_a_kill(&api, &mut a, &mut c, &one, &far_pod);
    // A killed component leaves its network to the pods: c's was never restarted after the table was deleted.
    c.start();
    eventually("the rules of c", || {
        c.host
            .command("nft", "list tables")
            .contains("skiff-test-pods")
            .then_some(())
    });
    let arrived = forgery!().arrived();
    assert!(arrived.is_empty(), "after a restart: {arrived:?}");

    // A node that leaves takes its routes, neighbours and forwarding entries with it.
    api.delete_node("c");
    eventually("the far node's routes to go", || {
        a.routes().is_empty().then_some(())
    });
    assert!(!a.host.ip("-o link").contains("vxlan"), "alone again");

    // A node's annotation is its own business, but its network must be the cluster's.
    api.annotate("a", "unrelated", Value::from("x"));
    for pod in [one, two] {
        a.delete(pod);
    }
    b.delete(near_pod);
    c.delete(far_pod);
    for machine in [&mut a, &mut c] {
        machine.kill();
    }
    for machine in [&a, &b, &c] {
        let config = machine.config.clone();
        machine.host.run(async move {
            pods::remove(&config).await.unwrap();
            pods::remove(&config).await.unwrap();
        });
        let links = machine.host.ip("-o link");
        assert_eq!(links.lines().count(), 2, "lo and eth0:\n{links}");
        assert_eq!(machine.routes(), "");
        assert_eq!(machine.host.command("nft", "list tables"), "");
    }
    retries_while_rules_change(&api);
    println!("nodes: ok");
    // Threads of the namespaces wait for work for ever.
    std::process::exit(0);
}

/// What failed is tried again soon, also while others change rules all the time.
fn retries_while_rules_change(api: &ApiServer) {
    const SOON: Duration = Duration::from_secs(10);
    api.delete_node("a");
    let mut machine = Machine::new("d", Host::new(), api);
    // A file in the place of a folder: the last step fails.
    let folder = machine.config.cni_conf_dir.clone();
    std::fs::write(&folder, "").unwrap();
    machine.start();
    api.add_node("d", &["192.0.2.77", "2001:db8:1::77"]);
    eventually("the rules of d", || {
        let tables = machine.host.command("nft", "list tables");
        tables.contains("skiff-test-pods").then_some(())
    });
    // The pause between two attempts grows to more than that between two changes.
    std::thread::sleep(Duration::from_secs(2));
    std::fs::remove_file(&folder).unwrap();
    let start = Instant::now();
    while !machine.is_ready() {
        assert!(start.elapsed() < SOON, "not ready within {SOON:?}");
        machine.host.command("nft", "add table netdev skiff0");
        machine.host.command("nft", "delete table netdev skiff0");
        std::thread::sleep(Duration::from_millis(20));
    }
    println!("nodes: tried again after {:?}", start.elapsed());
    machine.kill();
}

fn address(host: &Host, device: &str, addresses: &[&str]) {
    for address in addresses {
        let nodad = if address.contains(':') { "nodad" } else { "" };
        host.ip(&format!("addr add {address} dev {device} {nodad}"));
    }
}

fn way_out(host: &Host, ipv4: &str, ipv6: &str) {
    // Strict checks of sources would hide what the rules do.
    host.sysctl("ipv4/conf/all/rp_filter", "0");
    host.sysctl("ipv4/conf/eth0/rp_filter", "0");
    host.ip(&format!("route add default via {ipv4}"));
    host.ip(&format!("-6 route add default via {ipv6}"));
}

fn reach(from: &Pod, to: IpAddr) -> IpAddr {
    eventually(&format!("{} to {to}", from.addresses[0]), || {
        ask(&from.host.path, to, PORT).ok()
    })
}

/// A pod that opens connections without end gets no further than its limit, and the others do not notice.
fn one_pod_does_not_take_all_connections(a: &Host, b: &Host, [one, two, near]: [&Pod; 3]) {
    const FLOWS: u16 = 2000;
    let tracked = |host: &Host| -> u32 {
        let count = "/proc/sys/net/netfilter/nf_conntrack_count";
        let count = host.run(async move { std::fs::read_to_string(count).unwrap() });
        count.trim().parse().unwrap()
    };
    let flood = |from: &Pod, to: IpAddr| {
        inside(&from.host.path, move || {
            let any: IpAddr = if to.is_ipv4() {
                [0; 4].into()
            } else {
                [0u16; 8].into()
            };
            let socket = UdpSocket::bind((any, 0)).unwrap();
            for port in 0..FLOWS {
                // The other end has no such port and says so.
                let _ = socket.send_to(b"flood", (to, 20000 + port));
            }
        });
    };
    let opens = |from: &Pod, to: IpAddr| {
        inside(&from.host.path, move || {
            TcpStream::connect_timeout(&(to, PORT).into(), Duration::from_millis(500)).is_ok()
        })
    };
    for host in [a, b] {
        host.sysctl("netfilter/nf_conntrack_udp_timeout", "3");
    }
    for family in [IPV4, IPV6] {
        let (before, target) = (tracked(a), near.addresses[family]);
        assert!(opens(one, target));
        flood(one, target);
        let flooded = tracked(a) - before;
        assert!(!opens(one, target), "the limit is reached");
        assert!(opens(two, target) && opens(two, one.addresses[family]));
        assert!(
            flooded <= CONNECTIONS + 50,
            "{flooded} connections of {before} before"
        );
        let counter = a.command("nft", "list counter inet skiff-test-connections refused");
        assert!(!counter.contains("packets 0 "), "{counter}");
        println!("nodes: a flood of {FLOWS} flows had {flooded} tracked");
        eventually("connections after the flood", || opens(one, target).then_some(()));
        // Without a limit the flood takes what it can get.
        let before = tracked(b);
        flood(near, two.addresses[family]);
        let flooded = tracked(b) - before;
        assert!(flooded > 3 * CONNECTIONS, "{flooded}");
    }
}

/// Whatever somebody else does to the rules, they are as they were soon.
fn others_hands(host: &Host) {
    let pods = "inet skiff-test-pods";
    let tables = host.command("nft", "list tables");
    for table in [pods, "netdev skiff0", "ip skiff-test-hostports"] {
        assert!(tables.contains(&format!("table {table}")), "{tables}");
    }
    let listed = host.command("nft", "list table netdev skiff0");
    let (_, guard) = listed.split_once("chain ").unwrap();
    let guard = format!("netdev skiff0 {}", guard.split_whitespace().next().unwrap());
    for change in [
        "flush ruleset".to_owned(),
        format!("delete table {pods}"),
        "delete table inet skiff-test-connections".to_owned(),
        "flush chain inet skiff-test-connections limit-connections".to_owned(),
        format!("flush chain {pods} sources"),
        format!("delete element {pods} nodes-ipv4 {{ 192.0.2.2 }}"),
        format!("add element {pods} nodes-ipv6 {{ 2001:db8::666 }}"),
        format!("insert rule {pods} sources accept"),
        format!("delete chain {guard}"),
        format!("insert rule {guard} accept"),
        "flush table netdev skiff0".to_owned(),
        "flush chain ip skiff-test-hostports ports".to_owned(),
        "delete table ip skiff-test-hostports".to_owned(),
    ] {
        host.restores(&change);
    }
    for chain in [
        &format!("{pods} sources"),
        &guard,
        "ip skiff-test-hostports postrouting",
    ] {
        host.restores(&host.deletion_of_last_rule(chain));
    }
    // All at once, again and again: each time they come back.
    for _ in 0..3 {
        host.restores("flush ruleset");
    }
    host.leaves_in_place(&[pods, "inet skiff-test-connections"]);
}

/// Outside of the cluster, a pod is seen under its node's address.
fn leaves_the_cluster_under_the_nodes_address(router: &Host, pod: &Pod) {
    for (server, expected) in [("192.0.2.254", "192.0.2.1"), ("2001:db8:1::fe", "2001:db8:1::1")] {
        let server: IpAddr = server.parse().unwrap();
        serve(&router.path, server, PORT);
        assert_eq!(reach(pod, server), expected.parse::<IpAddr>().unwrap());
    }
}

/// Datagrams that fill a pod's MTU arrive in one piece; larger ones do not fit already at the sender.
fn whole_packets_pass(from: &Pod, to: &Pod, received: &[Received]) {
    for (family, headers) in [(IPV4, 28), (IPV6, 48)] {
        let (target, received) = (to.addresses[family], received[family].clone());
        let send = move |length: usize| {
            let any: IpAddr = if family == IPV4 {
                [0; 4].into()
            } else {
                [0u16; 8].into()
            };
            let socket = UdpSocket::bind((any, 0)).unwrap();
            let (level, option) = match family {
                IPV4 => (libc::IPPROTO_IP, libc::IP_MTU_DISCOVER),
                _ => (libc::IPPROTO_IPV6, libc::IPV6_MTU_DISCOVER),
            };
            let value: libc::c_int = libc::IP_PMTUDISC_DO;
            // SAFETY: the option is a live integer of the size that is passed.
            let set = unsafe {
                let size = size_of::<libc::c_int>() as u32;
                libc::setsockopt(socket.as_raw_fd(), level, option, (&raw const value).cast(), size)
            };
            assert_eq!(set, 0);
            socket.send_to(&vec![b'm'; length], (target, PORT))
        };
        let whole = MTU - headers;
        let path = from.host.path.clone();
        eventually("a whole packet", || {
            inside(&path, move || send(whole)).unwrap();
            let found = received
                .lock()
                .unwrap()
                .iter()
                .any(|(bytes, _)| bytes.len() == whole);
            found.then_some(())
        });
        let error = inside(&path, move || send(whole + 1)).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::EMSGSIZE));
    }
}

fn vni_of(host: &Host) -> u32 {
    let shown = host.ip("-d -o link show skiff0-vxlan");
    let mut words = shown.split_whitespace().skip_while(|word| *word != "vxlan");
    words.nth(2).unwrap().parse().unwrap()
}

struct Forgery<'a> {
    a: &'a Machine,
    b: &'a Machine,
    c: &'a Machine,
    router: &'a Host,
    one: &'a Pod,
    two: &'a Pod,
    far: &'a Pod,
    received: &'a [Vec<Received>],
    vni: u32,
}

const FORGED: [&str; 6] = [
    "a pod's address by the link",
    "a pod's address by the tunnel",
    "a pod's IPv6 address by the tunnel",
    "a stranger's address by the tunnel",
    "a pod that encapsulates",
    "a stranger that encapsulates",
];

impl Forgery<'_> {
    /// Sends forged packets, and answers which of them reached a pod.
    fn arrived(&self) -> Vec<&'static str> {
        for received in self.received.iter().flatten() {
            received.lock().unwrap().clear();
        }
        let (one, two, far) = (&self.one.addresses, &self.two.addresses, &self.far.addresses);
        // Machines b and c send under the address of a pod of a.
        send_as(&self.b.host, one[IPV4], two[IPV4], FORGED[0]);
        send_as(&self.c.host, one[IPV4], two[IPV4], FORGED[1]);
        send_as(&self.c.host, one[IPV6], two[IPV6], FORGED[2]);
        send_as(&self.c.host, "203.0.113.9".parse().unwrap(), two[IPV4], FORGED[3]);
        // A pod of a wraps a packet of somebody else for a pod of c.
        let elsewhere = "10.244.1.9".parse().unwrap();
        let to_far = encapsulated(self.vni, far[IPV4], elsewhere, FORGED[4]);
        send_raw(&self.one.host, "198.51.100.1", to_far);
        // So does a machine that is no node.
        let to_two = encapsulated(self.vni, two[IPV4], elsewhere, FORGED[5]);
        send_raw(self.router, "192.0.2.1", to_two);
        // What is honest arrives after them, on the same ways.
        for (from, path) in [
            (self.b.host.path.clone(), two),
            (self.far.host.path.clone(), two),
            (self.one.host.path.clone(), far),
            (self.b.host.path.clone(), far),
        ] {
            let targets = path.clone();
            inside(&from, move || {
                for target in targets {
                    let any: IpAddr = if target.is_ipv4() {
                        [0; 4].into()
                    } else {
                        [0u16; 8].into()
                    };
                    let socket = UdpSocket::bind((any, 0)).unwrap();
                    socket.send_to(b"honest", (target, PORT)).unwrap();
                }
            });
        }
        let (at_two, at_far) = (&self.received[1], &self.received[3]);
        // Once b is no node any more, what it sends through the tunnel is not taken.
        for (received, least) in at_two.iter().map(|r| (r, 2)).chain(at_far.iter().map(|r| (r, 1))) {
            eventually("the honest packets", || {
                let honest = received
                    .lock()
                    .unwrap()
                    .iter()
                    .filter(|(bytes, _)| bytes == b"honest")
                    .count();
                (honest >= least).then_some(())
            });
        }
        // The router's packet has no honest one behind it.
        std::thread::sleep(Duration::from_millis(300));
        let arrived = |name: &&str| {
            let is = |(bytes, _): &(Vec<u8>, IpAddr)| bytes.starts_with(name.as_bytes());
            self.received
                .iter()
                .flatten()
                .any(|received| received.lock().unwrap().iter().any(is))
        };
        let _ = self.a.name;
        FORGED.into_iter().filter(arrived).collect()
    }
}

/// Sends from an address that the machine gives itself.
fn send_as(host: &Host, source: IpAddr, target: IpAddr, text: &'static str) {
    // An IPv6 address that is still looked for elsewhere cannot be used.
    let (prefix, at_once) = if source.is_ipv4() {
        (32, "")
    } else {
        (128, " nodad")
    };
    host.ip(&format!("addr add {source}/{prefix} dev lo{at_once}"));
    inside(&host.path, move || {
        let socket = UdpSocket::bind((source, 0)).unwrap();
        socket.send_to(text.as_bytes(), (target, PORT)).unwrap();
    });
    host.ip(&format!("addr del {source}/{prefix} dev lo"));
}

fn send_raw(host: &Host, to: &str, packet: Vec<u8>) {
    let to: IpAddr = to.parse().unwrap();
    inside(&host.path, move || {
        let socket = UdpSocket::bind("0.0.0.0:0").unwrap();
        socket.send_to(&packet, (to, pods::VXLAN_PORT)).unwrap();
    });
}

/// A VXLAN packet with a datagram inside, as the device of the target's node takes it.
fn encapsulated(vni: u32, target: IpAddr, source: IpAddr, text: &str) -> Vec<u8> {
    let (IpAddr::V4(target), IpAddr::V4(source)) = (target, source) else {
        panic!("IPv4 only");
    };
    let mut gateway = target.octets();
    gateway[3] = 1;
    let mut packet = vec![0x08, 0, 0, 0];
    packet.extend(&vni.to_be_bytes()[1..]);
    packet.push(0);
    packet.extend([&[0x0a, 0x58][..], &gateway, &[2, 0, 0, 0, 0, 0x42, 0x08, 0]].concat());
    let length = 28 + text.len() as u16;
    let mut ip = vec![0x45, 0];
    ip.extend(length.to_be_bytes());
    ip.extend([0, 0, 0, 0, 64, 17, 0, 0]);
    ip.extend(source.octets());
    ip.extend(target.octets());
    let sum: u32 = ip
        .chunks(2)
        .map(|pair| u32::from(u16::from_be_bytes([pair[0], pair[1]])))
        .sum();
    let checksum = !((sum & 0xffff) + (sum >> 16)) as u16;
    ip[10..12].copy_from_slice(&checksum.to_be_bytes());
    packet.extend(ip);
    packet.extend(
        [
            PORT.to_be_bytes(),
            PORT.to_be_bytes(),
            (length - 20).to_be_bytes(),
            [0, 0],
        ]
        .concat(),
    );
    packet.extend(text.as_bytes());
    packet
}

/// Connections go on while the component is dead and when it starts again, and it finds out what happened meanwhile.
fn survives_a_kill(api: &ApiServer, a: &mut Machine, c: &mut Machine, one: &Pod, far: &Pod) {
    let target = far.addresses[IPV4];
    let mut stream = inside(&one.host.path, move || {
        TcpStream::connect((target, PORT)).unwrap()
    });
    stream.set_read_timeout(Some(hosts::PATIENCE)).unwrap();
    stream.write_all(b"e").unwrap();
    let mut talk = |text: &[u8]| {
        stream.write_all(text).unwrap();
        let mut back = vec![0; text.len()];
        stream.read_exact(&mut back).unwrap();
        assert_eq!(back, text);
    };
    talk(b"before");
    let device = |machine: &Machine| {
        machine
            .host
            .ip("-o link show skiff0-vxlan")
            .split(':')
            .next()
            .unwrap()
            .to_owned()
    };
    let (before, other) = (device(a), device(c));
    a.kill();
    talk(b"while it is dead");
    api.delete_node("b");
    a.start();
    eventually("the former node's routes to go", || {
        (!a.routes().contains("10.244.1.0")).then_some(())
    });
    talk(b"after its restart");
    assert!(a.routes().contains("10.244.2.0/24"), "{}", a.routes());
    assert!(!a.routes().contains("fd00:10:0:1::"), "{}", a.routes());
    assert_eq!(
        (device(a), device(c)),
        (before, other),
        "the devices are the same"
    );
    assert!(a.host.command("nft", "list tables").contains("skiff-test-pods"));
    println!("nodes: a connection survived the kill and restart of the component");
}
