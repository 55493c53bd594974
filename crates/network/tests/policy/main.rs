//! Network policies for real: two machines, each a network namespace with the pod network, the policies, the real
//! plugin and pods of both address families, over a real API server. Connections are opened and must do what a plain
//! model of policies says, for policies that were written by hand and for random ones.
#![allow(
    clippy::unwrap_used,
    reason = "a test with a main of its own is not seen as a test"
)]

#[path = "../nodes/hosts.rs"]
#[allow(dead_code, reason = "another test uses the rest")]
mod hosts;
mod model;
mod play;

use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use hosts::eventually;
use model::{NAMESPACE_KEYS, POD_KEYS, Random};
use play::{Play, connects, echo, hold, is_closed};
use serde_json::json;

/// The first node's address in its pods' network.
const GATEWAY: &str = "10.244.0.1";
/// Random rounds, within this time: a slow machine plays fewer.
const ROUNDS: usize = 25;
const ROUNDS_TIME: Duration = Duration::from_secs(60);

fn main() {
    if let Some(code) = skiff_cni::plugin_main() {
        std::process::exit(code);
    }
    if !rustix::process::geteuid().is_root() {
        println!("policy: skipped, it needs root");
        return;
    }
    let mut play = Play::start();
    // Same node, same namespace; same node, other namespace; other node, both.
    for (node, namespace, name) in [
        (0, "red", "web"),
        (0, "red", "client"),
        (0, "blue", "client"),
        (1, "red", "far"),
        (1, "blue", "far"),
    ] {
        play.add_pod(node, namespace, name, json!({"app": name}));
    }
    play.check("without policies");
    if let Some(count) = std::env::var("POLICIES")
        .ok()
        .and_then(|count| count.parse().ok())
    {
        measure(&mut play, count);
        play.end();
        std::process::exit(0);
    }
    for port in [53, 10250] {
        echo(&play.machines[0].host.path, GATEWAY.parse().unwrap(), port);
    }

    written_by_hand(&mut play);
    the_node_and_its_services(&mut play);
    before_the_first_packet(&mut play);
    changes_leave_no_gap(&mut play, "NetworkPolicies", |play, turn| {
        let forms = network_policy_forms(play);
        play.policy("red", "turns", forms[turn % 2].clone());
    });
    random(&mut play, false);
    tiers(&mut play);
    changes_leave_no_gap(&mut play, "ClusterNetworkPolicies", |play, turn| {
        for (name, priority, spec) in cluster_policy_forms(turn) {
            play.cluster_policy(name, "Admin", priority, spec);
        }
    });
    random(&mut play, true);
    definitions_go(&mut play);
    if std::fs::exists("/proc/sys/net/bridge/bridge-nf-call-iptables").unwrap_or(false) {
        // A kernel with br_netfilter sees packets at the bridge first, and may pass them from port to port.
        for machine in &play.machines {
            machine.host.sysctl("bridge/bridge-nf-call-iptables", "1");
            machine.host.sysctl("bridge/bridge-nf-call-ip6tables", "1");
        }
        written_by_hand(&mut play);
        the_node_and_its_services(&mut play);
        println!("policy: the same with br_netfilter");
    }
    play.end();
    println!("policy: ok");
    // Threads of the namespaces wait for work for ever.
    std::process::exit(0);
}

/// `POLICIES=1000 cargo test -p skiff-network --test policy`: what so many policies over so many pods cost the first packet of a
/// connection, and how long a change takes.
fn measure(play: &mut Play, count: u32) {
    const CONNECTIONS: usize = 500;
    let (to, from) = (
        play.address("red", "web", 0),
        play.pod("red", "client").host.path.clone(),
    );
    let connect = |what: &str| {
        let from = from.clone();
        let mut took: Vec<Duration> = hosts::inside(&from, move || {
            let one = || {
                let start = Instant::now();
                std::net::TcpStream::connect_timeout(&(to, 8080).into(), Duration::from_secs(5)).unwrap();
                start.elapsed()
            };
            (0..CONNECTIONS).map(|_| one()).collect()
        });
        took.sort();
        let (median, last) = (took[CONNECTIONS / 2], took[CONNECTIONS * 99 / 100]);
        println!("policy: {what}: a connection takes {median:?}, 99 of 100 less than {last:?}");
    };
    connect("no policy");
    let web = json!({"matchLabels": {"app": "web"}});
    let allow = json!({"podSelector": web, "ingress": [{"from": [{"podSelector": {"matchLabels": {"app": "client"}}}]}]});
    play.policy("red", "one", allow);
    play.settle();
    connect("one policy");
    play.crowd("red", count);
    for number in 0..count {
        let from = json!([{"podSelector": {"matchLabels": {"app": format!("crowd-{number}")}}}]);
        let ports = json!([{"port": 1000 + number % 1000}]);
        let spec = json!({"podSelector": web, "ingress": [{"from": from, "ports": ports}]});
        play.policy("red", &format!("crowd-{number}"), spec);
    }
    let start = Instant::now();
    play.settle();
    println!(
        "policy: {count} policies and pods have settled {:?} after the last was written",
        start.elapsed()
    );
    connect(&format!("{count} policies, {count} pods"));
    for change in 0..3 {
        let start = Instant::now();
        let spec = json!({"podSelector": web, "ingress": [{"ports": [{"port": 7000 + change}]}]});
        play.policy("red", "change", spec);
        play.settle();
        println!(
            "policy: one more change is in force {:?} later, as `nft list` shows",
            start.elapsed()
        );
    }
}

fn written_by_hand(play: &mut Play) {
    let (web, client) = (
        play.address("red", "web", 0),
        play.pod("red", "client").host.path.clone(),
    );
    let held = hold(&client, web, 8080);
    assert!(held.answers());
    play.policy(
        "red",
        "deny",
        json!({"podSelector": {"matchLabels": {"app": "web"}}, "policyTypes": ["Ingress"]}),
    );
    play.check("nobody reaches web");
    assert!(held.answers(), "what is open stays open");
    play.policy(
        "red",
        "deny-out",
        json!({"podSelector": {}, "policyTypes": ["Egress"]}),
    );
    play.check("nobody of red gets out");
    play.policy(
        "red",
        "out",
        json!({"podSelector": {}, "policyTypes": ["Egress"], "egress": [
            {"to": [{"namespaceSelector": {"matchLabels": {"team": "blue"}}}], "ports": [{"port": "web"}]}]}),
    );
    play.policy(
        "red",
        "allow",
        json!({"podSelector": {"matchLabels": {"app": "web"}}, "ingress": [
            {"from": [{"namespaceSelector": {}, "podSelector": {"matchLabels": {"app": "far"}}}], "ports": [{"port": 8080, "endPort": 8081}]},
            {"from": [{"ipBlock": {"cidr": "10.244.0.0/24"}}, {"ipBlock": {"cidr": "fd00:10::/64"}}], "ports": [{"protocol": "UDP"}]}]}),
    );
    play.check("some do");
    play.label_pod("blue", "client", json!({"app": "far"}));
    play.check("after a change of a pod's labels");
    play.label_namespace("blue", json!({"team": "green"}));
    play.check("after a change of a namespace's labels");
    play.label_namespace("blue", json!({"team": "blue"}));
    play.label_pod("blue", "client", json!({"app": "client"}));
    play.clear();
    play.check("without policies again");
    println!("policy: policies written by hand");
}

/// A node reaches its pods whatever policies say; pods reach it and services as policies say, by the endpoint's port.
fn the_node_and_its_services(play: &mut Play) {
    let (web, v6) = (play.address("red", "web", 0), play.address("red", "web", 1));
    let client = play.pod("red", "client").host.path.clone();
    let own = play.pod("red", "web").host.path.clone();
    let node = play.machines[0].host.path.clone();
    let gateway: IpAddr = GATEWAY.parse().unwrap();
    let machine = &play.machines[0].host;
    machine.command("nft", "add table ip services");
    for chain in [
        "pre { type nat hook prerouting priority -100; }",
        "post { type nat hook postrouting priority 100; }",
    ] {
        machine.command("nft", &format!("add chain ip services {chain}"));
    }
    machine.command(
        "nft",
        &format!("add rule ip services pre ip daddr 10.96.0.7 tcp dport 80 dnat to {web}:8080"),
    );
    machine.command(
        "nft",
        &format!("add rule ip services post ip saddr {web} ip daddr {web} masquerade"),
    );
    let service: IpAddr = "10.96.0.7".parse().unwrap();
    assert!(connects(&client, service, 80) && connects(&own, service, 80));

    play.policy(
        "red",
        "deny",
        json!({"podSelector": {}, "policyTypes": ["Ingress", "Egress"]}),
    );
    play.settle();
    for address in [web, v6] {
        assert!(connects(&node, address, 8080), "the kubelet's probes");
    }
    assert!(is_closed(&client, service, 80));
    assert!(
        connects(&own, service, 80),
        "a pod reaches itself, by way of a service too"
    );
    assert!(is_closed(&client, gateway, 53) && is_closed(&client, gateway, 10250));

    play.policy(
        "red",
        "in",
        json!({"podSelector": {}, "ingress": [{"from": [{"podSelector": {"matchLabels": {"app": "client"}}}], "ports": [{"port": 8080}]}]}),
    );
    let to = |port: u16| json!([{"to": [{"podSelector": {}}], "ports": [{"port": port}]}]);
    play.policy(
        "red",
        "out",
        json!({"podSelector": {}, "policyTypes": ["Egress"], "egress": to(80)}),
    );
    play.settle();
    assert!(
        is_closed(&client, service, 80),
        "80 is the service's port, not the pod's"
    );
    play.policy(
        "red",
        "out",
        json!({"podSelector": {}, "policyTypes": ["Egress"], "egress": to(8080)}),
    );
    play.settle();
    assert!(connects(&client, service, 80));
    assert!(is_closed(&client, gateway, 53));
    play.policy(
        "red",
        "dns",
        json!({"podSelector": {}, "policyTypes": ["Egress"], "egress": [{"to": [{
            "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "kube-system"}},
            "podSelector": {"matchLabels": {"k8s-app": "kube-dns"}}}]}]}),
    );
    play.settle();
    assert!(connects(&client, gateway, 53), "cluster DNS");
    assert!(is_closed(&client, gateway, 10250), "nothing else of the node");
    play.clear();
    play.machines[0].host.command("nft", "delete table ip services");
    println!("policy: the node, services and DNS");
}

/// A pod has its policies before it has a network.
fn before_the_first_packet(play: &mut Play) {
    play.policy(
        "red",
        "deny",
        json!({"podSelector": {"matchLabels": {"app": "late"}}, "policyTypes": ["Ingress", "Egress"]}),
    );
    play.settle();
    let client = play.pod("red", "client").host.path.clone();
    let web = play.address("red", "web", 0);
    for number in 0..3 {
        let name = format!("late-{number}");
        let start = Instant::now();
        play.add_pod(0, "red", &name, json!({"app": "late"}));
        let attached = start.elapsed();
        let pod = play.pod("red", &name).host.path.clone();
        let address = play.address("red", &name, 0);
        assert!(is_closed(&pod, web, 8080) && is_closed(&client, address, 8080));
        println!("policy: a new pod after {attached:?}, closed from the first packet");
    }
    // Nobody's address is closed: a sandbox that belongs to no pod gets no traffic, and does start.
    let stray = play.stray(0);
    assert!(is_closed(&stray.host.path, web, 8080));
    play.machines[0].delete(stray);
    // While skiff is away no pod starts, and the rules stay.
    play.stop_policy(0);
    assert!(is_closed(&client, play.address("red", "late-0", 0), 8080));
    assert!(connects(&client, web, 8080));
    play.start_policy(0);
    for number in 0..3 {
        play.remove_pod("red", &format!("late-{number}"));
    }
    play.clear();
    println!("policy: pods are closed from the start");
}

/// Policies of administrators, from the moment at which their kinds are installed.
fn tiers(play: &mut Play) {
    play.settle();
    assert!(!play.has_classes(0) && !play.has_classes(1));
    play.define(true);
    play.check("with kinds and without policies");
    let team = |name: &str| json!({"namespaces": {"matchLabels": {"team": name}}});
    let app = |name: &str| json!({"pods": {"podSelector": {"matchLabels": {"app": name}}}});
    play.cluster_policy(
        "guard",
        "Admin",
        20,
        json!({"subject": team("red"),
            "ingress": [
                {"action": "Pass", "from": [app("far")], "protocols": [{"tcp": {"destinationPort": {"number": 8081}}}]},
                {"action": "Accept", "from": [app("far")], "protocols": [{"destinationNamedPort": "web"}]},
                {"action": "Deny", "from": [team("blue")]}],
            "egress": [
                {"action": "Accept", "to": [{"nodes": {"matchLabels": {"app": "b"}}}], "protocols": [{"tcp": {"destinationPort": {"range": {"start": 8080, "end": 8081}}}}]},
                {"action": "Deny", "to": [{"nodes": {}}]}]}),
    );
    play.check("an Admin policy");
    play.policy(
        "red",
        "deny",
        json!({"podSelector": {}, "policyTypes": ["Ingress", "Egress"]}),
    );
    play.check("above NetworkPolicies");
    play.tier_policy(json!({"apiVersion": "policy.networking.k8s.io/v1alpha1", "kind": "AdminNetworkPolicy",
        "metadata": {"name": "first"}, "spec": {"priority": 1, "subject": team("red"), "ingress": [
            {"action": "Allow", "from": [team("blue")], "ports": [{"portNumber": {"protocol": "UDP", "port": 8080}}, {"namedPort": "alt"}]}]}}));
    play.check("a lower priority comes first");
    play.tier_policy(
        json!({"apiVersion": "policy.networking.k8s.io/v1alpha1", "kind": "BaselineAdminNetworkPolicy",
        "metadata": {"name": "default"}, "spec": {"subject": {"namespaces": {}},
            "egress": [{"action": "Deny", "to": [{"networks": ["10.244.0.0/24", "fd00:10::/64"]}]}],
            "ingress": [{"action": "Deny", "from": [team("blue")]}]}}),
    );
    play.check("a baseline, for who has no NetworkPolicy");
    play.stop_policy(0);
    let client = play.pod("blue", "client").host.path.clone();
    assert!(
        is_closed(&client, play.address("red", "web", 0), 8080),
        "the rules stay"
    );
    play.start_policy(0);
    play.check("after a restart");
    play.label_namespace("blue", json!({"team": "green"}));
    play.label_pod("red", "client", json!({"app": "far"}));
    play.check("after changes of labels");
    play.label_namespace("blue", json!({"team": "blue"}));
    play.label_pod("red", "client", json!({"app": "client"}));
    play.clear();

    // A new pod has them from its first packet.
    play.cluster_policy(
        "late",
        "Baseline",
        1,
        json!({"subject": app("late"), "ingress": [{"action": "Deny", "from": [{"namespaces": {}}]}]}),
    );
    play.settle();
    play.add_pod(0, "red", "late", json!({"app": "late"}));
    let client = play.pod("red", "client").host.path.clone();
    assert!(is_closed(&client, play.address("red", "late", 0), 8080));
    play.remove_pod("red", "late");
    play.clear();

    // A rule that cannot be enforced fails closed.
    play.cluster_policy(
        "closed",
        "Admin",
        1,
        json!({"subject": team("red"), "egress": [
        {"action": "Accept", "to": [{"domainNames": ["example.com"]}]}]}),
    );
    play.settle();
    let web = play.address("red", "web", 0);
    assert!(
        connects(&client, web, 8080),
        "no name is known, so nothing is accepted, and nothing denied"
    );
    play.cluster_policy(
        "closed",
        "Admin",
        1,
        json!({"subject": team("red"), "egress": [
        {"action": "Deny", "to": [{"domainNames": ["example.com"]}]}]}),
    );
    play.settle();
    assert!(
        is_closed(&client, web, 8080),
        "what is denied by a name that is not known is everything"
    );
    play.clear();
    itself(play);
    println!("policy: policies of administrators");
}

/// A pod that reaches itself by a service is subject to administrators' policies, and not to NetworkPolicies.
fn itself(play: &mut Play) {
    let web = play.address("red", "web", 0);
    let own = play.pod("red", "web").host.path.clone();
    let machine = &play.machines[0].host;
    machine.command("nft", "add table ip services");
    for chain in [
        "pre { type nat hook prerouting priority -100; }",
        "post { type nat hook postrouting priority 100; }",
    ] {
        machine.command("nft", &format!("add chain ip services {chain}"));
    }
    machine.command(
        "nft",
        &format!("add rule ip services pre ip daddr 10.96.0.7 tcp dport 80 dnat to {web}:8080"),
    );
    machine.command(
        "nft",
        &format!("add rule ip services post ip saddr {web} ip daddr {web} masquerade"),
    );
    let service: IpAddr = "10.96.0.7".parse().unwrap();
    play.policy(
        "red",
        "deny",
        json!({"podSelector": {}, "policyTypes": ["Ingress", "Egress"]}),
    );
    play.settle();
    assert!(connects(&own, service, 80));
    let all = json!([{"action": "Deny", "from": [{"namespaces": {}}]}]);
    play.cluster_policy(
        "itself",
        "Admin",
        1,
        json!({"subject": {"namespaces": {}}, "ingress": all}),
    );
    play.settle();
    assert!(is_closed(&own, service, 80));
    assert!(connects(&own, web, 8080), "this one never leaves the pod");
    play.clear();
    play.machines[0].host.command("nft", "delete table ip services");
}

/// Kinds that are no longer served, or no longer there, leave nothing behind.
fn definitions_go(play: &mut Play) {
    let deny =
        json!({"subject": {"namespaces": {}}, "ingress": [{"action": "Deny", "from": [{"namespaces": {}}]}]});
    play.cluster_policy("deny", "Admin", 1, deny);
    play.check("before the kinds go");
    let (client, web) = (
        play.pod("red", "client").host.path.clone(),
        play.address("red", "web", 0),
    );
    play.serve_cluster_policies(false);
    eventually("what is not served to be open", || {
        (!is_closed(&client, web, 8080)).then_some(())
    });
    play.serve_cluster_policies(true);
    eventually("what is served again to be closed", || {
        is_closed(&client, web, 8080).then_some(())
    });
    play.define(false);
    eventually("the classes to go", || {
        (!play.has_classes(0) && !play.has_classes(1)).then_some(())
    });
    play.check("without the kinds");
    play.define(true);
    play.check("with the kinds again");
    let deny =
        json!({"subject": {"namespaces": {}}, "ingress": [{"action": "Deny", "from": [{"namespaces": {}}]}]});
    play.cluster_policy("deny", "Admin", 1, deny);
    play.check("and a policy");
    play.define(false);
    play.check("without the kinds at the end");
    println!("policy: kinds come and go");
}

/// The same in two ways: red's client reaches web, and nobody else does.
fn network_policy_forms(play: &Play) -> [serde_json::Value; 2] {
    let client = play.address("red", "client", 0);
    let web = json!({"matchLabels": {"app": "web"}});
    let by_label = json!([{"podSelector": {"matchLabels": {"app": "client"}}}]);
    let by_address = json!([{"ipBlock": {"cidr": format!("{client}/32")}}]);
    [by_address, by_label].map(|from| json!({"podSelector": web, "ingress": [{"from": from}]}))
}

/// The same in two ways, by two policies that change places. They are written in this order, and say the same also when
/// one of them is written.
fn cluster_policy_forms(turn: usize) -> [(&'static str, u32, serde_json::Value); 2] {
    let web = json!({"pods": {"podSelector": {"matchLabels": {"app": "web"}}}});
    let client = json!({"pods": {"namespaceSelector": {"matchLabels": {"team": "red"}}, "podSelector": {"matchLabels": {"app": "client"}}}});
    let team = |name: &str| json!({"namespaces": {"matchLabels": {"team": name}}});
    let accept = json!({"subject": web, "ingress": [{"action": "Accept", "from": [client]}]});
    match turn % 2 {
        0 => [
            ("accept", 1, accept),
            (
                "deny",
                2,
                json!({"subject": web, "ingress": [{"action": "Deny", "from": [{"namespaces": {}}]}]}),
            ),
        ],
        _ => [
            (
                "deny",
                2,
                json!({"subject": web, "ingress": [{"action": "Deny", "from": [team("blue")]}]}),
            ),
            ("accept", 3, accept),
        ],
    }
}

/// Two policies that say the same in other ways take turns, and the component is killed and started again. Meanwhile
/// what is allowed always passes, and what is not never does.
fn changes_leave_no_gap(play: &mut Play, kind: &str, write: fn(&mut Play, usize)) {
    let web = play.address("red", "web", 0);
    write(play, 1);
    play.settle();
    let stop = Arc::new(AtomicBool::new(false));
    let (opened, failed, leaked) = (
        Arc::new(AtomicUsize::new(0)),
        Arc::new(AtomicUsize::new(0)),
        Arc::new(AtomicUsize::new(0)),
    );
    let allowed = play.pod("red", "client").host.path.clone();
    let denied = play.pod("blue", "client").host.path.clone();
    let (stopped, count, failures) = (stop.clone(), opened.clone(), failed.clone());
    let good = std::thread::spawn(move || {
        hosts::inside(&allowed, move || {
            while !stopped.load(Ordering::Relaxed) {
                // A packet that a gap drops comes again after a second.
                let start = Instant::now();
                let connected =
                    std::net::TcpStream::connect_timeout(&(web, 8080).into(), Duration::from_secs(5));
                match connected.is_ok() && start.elapsed() < Duration::from_millis(900) {
                    true => count.fetch_add(1, Ordering::Relaxed),
                    false => failures.fetch_add(1, Ordering::Relaxed),
                };
                std::thread::sleep(Duration::from_millis(1));
            }
        });
    });
    let (stopped, leaks) = (stop.clone(), leaked.clone());
    let bad = std::thread::spawn(move || {
        hosts::inside(&denied, move || {
            while !stopped.load(Ordering::Relaxed) {
                let connected =
                    std::net::TcpStream::connect_timeout(&(web, 8080).into(), Duration::from_millis(5));
                if connected.is_ok() {
                    leaks.fetch_add(1, Ordering::Relaxed);
                }
            }
        });
    });
    for turn in 0..20 {
        write(play, turn);
        play.settle();
        if turn % 5 == 4 {
            play.stop_policy(0);
            play.start_policy(0);
        }
    }
    stop.store(true, Ordering::Relaxed);
    good.join().unwrap();
    bad.join().unwrap();
    let counts = [opened, failed, leaked].map(|count| count.load(Ordering::Relaxed));
    println!(
        "policy: during 20 changes of {kind} and 4 restarts {} connections, {} failed, {} leaked",
        counts[0], counts[1], counts[2]
    );
    assert!(counts[0] > 50 && counts[2] == 0, "{counts:?}");
    // On a loaded machine a connection may take a second for other reasons; a gap would fail dozens.
    assert!(counts[1] <= 2, "{counts:?}");
    others_hands(play);
    play.clear();
}

/// Whoever changes the host's rules does not open pods for long, whatever it is that goes: the components notice.
fn others_hands(play: &mut Play) {
    // A component that has just started may still be about to replace the table of the former one.
    play.settle();
    let table = play.tables[0].clone();
    let host = &play.machines[0].host;
    let first = |map: &str| {
        let listed = host.command("nft", &format!("list map inet {table} {map}"));
        let (_, elements) = listed.split_once("elements = {").unwrap();
        let one = elements.split([',', ':', '}']).next().unwrap();
        one.trim().to_owned()
    };
    let isolated = first("ingress-ipv4");
    for change in [
        "flush ruleset".to_owned(),
        format!("delete table inet {table}"),
        host.deletion_of_last_rule(&format!("inet {table} forward-ingress")),
        format!("insert rule inet {table} forward-egress accept"),
        format!("chain inet {table} forward-egress {{ policy drop; }}"),
        format!("flush chain inet {table} ingress"),
        format!("delete element inet {table} ingress-ipv4 {{ {isolated} }}"),
        format!("flush map inet {table} egress-ipv4"),
        format!("add element inet {table} own-ipv4 {{ 192.0.2.7 . 192.0.2.7 }}"),
        format!("table inet {table} {{ flags dormant; }}"),
    ] {
        // A rule's number is another one after each of them.
        let change = match change.starts_with("delete rule") {
            true => host.deletion_of_last_rule(&format!("inet {table} forward-ingress")),
            false => change,
        };
        host.restores(&change);
    }
    host.leaves_in_place(&[&format!("inet {table}")]);
    play.check("after others changed the rules");
}

fn random(play: &mut Play, with_tiers: bool) {
    let mut random = Random::new(7);
    let start = Instant::now();
    let mut played = 0;
    while played < ROUNDS && start.elapsed() < ROUNDS_TIME {
        play.forget_policies();
        for number in 0..=random.below(if with_tiers { 2 } else { 4 }) {
            let namespace = random.pick(&["red", "blue"]);
            let object = random.policy(namespace, &format!("random-{number}"), &play::BLOCKS);
            play.policy(namespace, &format!("random-{number}"), object["spec"].clone());
        }
        for number in 0..if with_tiers { 1 + random.below(4) } else { 0 } {
            let object = random.tier_policy(&format!("random-{number}"), &play::BLOCKS);
            play.tier_policy(object);
        }
        let labels = json!(random.labels(&POD_KEYS));
        match random.below(3) {
            0 => play.label_pod("red", "client", labels),
            1 => play.label_pod("blue", "far", labels),
            _ => {
                let labels = json!(random.labels(&NAMESPACE_KEYS));
                play.label_namespace(random.pick(&["red", "blue"]), labels);
            }
        }
        play.check(&format!("random round {played}"));
        played += 1;
    }
    assert!(played >= 5, "only {played} rounds in {ROUNDS_TIME:?}");
    println!(
        "policy: {played} random rounds in {:?}, tiers: {with_tiers}",
        start.elapsed()
    );
    play.label_pod("red", "client", json!({"app": "client"}));
    play.label_pod("blue", "far", json!({"app": "far"}));
    for namespace in ["red", "blue"] {
        play.label_namespace(namespace, json!({"team": namespace}));
    }
    play.clear();
}
