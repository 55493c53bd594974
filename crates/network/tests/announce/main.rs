//! Addresses of the load balancer's pool for real: three machines, a client and a backend on one link, each a network
//! namespace; the machines run the service proxy and announce addresses, over a real API server. Machines die, come back,
//! stop being ready, and the client must reach the Service all the same, by exactly one of them.
#![allow(
    clippy::unwrap_used,
    reason = "a test with a main of its own is not seen as a test"
)]

#[path = "../nodes/hosts.rs"]
#[allow(dead_code, reason = "another test uses the rest")]
mod hosts;

use std::net::{IpAddr, TcpListener, TcpStream};
use std::time::{Duration, Instant};

use hosts::{ApiServer, Host, ask, eventually, inside, serve};
use k8s_openapi::api::core::v1::{Node, Service};
use kube::Api;
use kube::api::{Patch, PatchParams};
use serde_json::{Value, json};
use skiff_network::announce::AnnounceConfig;
use skiff_network::load_balancer::BalancerConfig;
use skiff_network::proxy::{Metrics, ProxyConfig};
use skiff_network::{announce, load_balancer, proxy};
use tokio_util::sync::CancellationToken;

const BACKEND_PORT: u16 = 8080;
/// A port that the machines need themselves, and a Service has on its own address.
const HOST_PORT: u16 = 6443;
const POOL: [&str; 2] = ["192.0.2.200-192.0.2.205", "2001:db8:1::200-2001:db8:1::205"];

fn main() {
    if !rustix::process::geteuid().is_root() {
        println!("announce: skipped, it needs root");
        return;
    }
    let mut link = Link::new();
    link.service("web", "Cluster", &[("80", None), ("admin", Some(HOST_PORT))]);
    let [v4, v6] = link.addresses("web");
    for address in [v4, v6] {
        link.is_served(address, 80);
        link.is_served(address, HOST_PORT);
    }
    println!("announce: {v4} and {v6} are reached from the link");

    only_the_service_is_there(&link, v4);
    a_machine_dies(&mut link, v4);
    a_machine_dies(&mut link, v6);
    skiff_is_killed(&mut link, v4);
    a_node_is_not_ready(&link, v4);
    local_traffic(&link);
    nobody_announces_what_is_gone(&link, &[v4, v6]);
    println!("announce: ok");
}

/// A machine of the cluster.
struct Machine {
    name: &'static str,
    host: Host,
    state: tempfile::TempDir,
    tasks: Vec<tokio::task::AbortHandle>,
    alive: bool,
}

struct Link {
    api: ApiServer,
    switch: Host,
    client: Host,
    _backend: Host,
    machines: Vec<Machine>,
}

impl Link {
    fn new() -> Link {
        let api = ApiServer::start();
        let switch = Host::new();
        switch.ip("link add lan type bridge");
        switch.ip("link set lan up");
        let connect = |port: &str, number: u8| {
            let host = Host::new();
            host.cable("eth0", &switch, port);
            switch.ip(&format!("link set dev {port} master lan"));
            host.ip(&format!("addr add 192.0.2.{number}/24 dev eth0"));
            host.ip(&format!("addr add 2001:db8:1::{number}/64 dev eth0 nodad"));
            host
        };
        let client = connect("client", 100);
        let backend = connect("backend", 80);
        for address in ["192.0.2.80", "2001:db8:1::80"] {
            serve(&backend.path, address.parse().unwrap(), BACKEND_PORT);
        }
        let mut machines = Vec::new();
        for (name, number) in [("a", 1), ("b", 2), ("c", 3)] {
            let host = connect(name, number);
            host.sysctl("ipv4/ip_forward", "1");
            host.sysctl("ipv6/conf/all/forwarding", "1");
            api.add_node(
                name,
                &[&format!("192.0.2.{number}"), &format!("2001:db8:1::{number}")],
            );
            machines.push(Machine {
                name,
                host,
                state: tempfile::tempdir().unwrap(),
                tasks: Vec::new(),
                alive: true,
            });
        }
        let config = BalancerConfig {
            pool: POOL.map(|range| range.parse().unwrap()).to_vec(),
            identity: "test".into(),
            ..Default::default()
        };
        let running = load_balancer::run(config, api.client.clone(), CancellationToken::new());
        api.runtime.spawn(running);
        let mut link = Link {
            api,
            switch,
            client,
            _backend: backend,
            machines,
        };
        for number in 0..3 {
            link.set_ready(link.machines[number].name, "True");
            link.start(number);
        }
        link
    }

    /// What skiff runs there.
    fn start(&mut self, number: usize) {
        let machine = &mut self.machines[number];
        let admin = skiff_auth::UserInfo::new("admin", ["system:masters", "system:authenticated"]);
        let service = self.api.server.service(admin);
        let announced = AnnounceConfig {
            node_name: machine.name.into(),
            state_dir: machine.state.path().into(),
            skipped_devices: Vec::new(),
        };
        let proxied = ProxyConfig {
            table: "skiff-test".into(),
            node_name: machine.name.into(),
            pod_cidrs: hosts::CLUSTER.iter().map(|cidr| cidr.parse().unwrap()).collect(),
            service_cidrs: ["10.96.0.0/16", "fd00:96::/112"]
                .map(|cidr| cidr.parse().unwrap())
                .to_vec(),
            host_ports: vec![HOST_PORT],
            bridge: None,
            node_port_addresses: Vec::new(),
            healthz: None,
            metrics: None,
        };
        machine.tasks = machine.host.run(async move {
            let client = skiff_client::in_process(service, "default");
            let metrics = Metrics::new(std::sync::Arc::default());
            let (one, two) = (client.clone(), client);
            let proxied = tokio::spawn(async move {
                let ended = proxy::run(proxied, one, metrics, CancellationToken::new()).await;
                panic!("the proxy ended: {ended:?}");
            });
            let announced = tokio::spawn(async move {
                let ended = announce::run(announced, two, CancellationToken::new()).await;
                panic!("the announcer ended: {ended:?}");
            });
            vec![proxied.abort_handle(), announced.abort_handle()]
        });
    }

    fn kill_skiff(&mut self, number: usize) {
        let machine = &mut self.machines[number];
        for task in machine.tasks.drain(..) {
            task.abort();
        }
        machine.host.run(async { tokio::task::yield_now().await });
    }

    fn plug(&self, number: usize, state: &str) {
        self.switch
            .ip(&format!("link set dev {} {state}", self.machines[number].name));
    }

    fn set_ready(&self, name: &str, status: &str) {
        let condition = json!({"type": "Ready", "status": status, "reason": "Test", "message": "",
            "lastHeartbeatTime": "2026-01-01T00:00:00Z", "lastTransitionTime": "2026-01-01T00:00:00Z"});
        let patch = json!({"status": {"conditions": [condition]}});
        let nodes: Api<Node> = self.api.nodes();
        let patched = async move {
            nodes
                .patch_status(name, &PatchParams::default(), &Patch::Merge(patch))
                .await
        };
        self.api.runtime.block_on(patched).unwrap();
    }

    fn write(&self, method: &str, path: &str, object: &Value) {
        let request = http::Request::builder()
            .method(method)
            .uri(path)
            .header(
                "content-type",
                if method == "PATCH" {
                    "application/merge-patch+json"
                } else {
                    "application/json"
                },
            )
            .body(serde_json::to_vec(object).unwrap())
            .unwrap();
        let written = self.api.client.request::<Value>(request);
        self.api.runtime.block_on(written).unwrap();
    }

    /// A Service of both families with the backend as its endpoint, which is told to be on node `b`. Ports are their names
    /// and numbers, where the name is not a number itself.
    fn service(&self, name: &str, policy: &str, ports: &[(&str, Option<u16>)]) {
        let number = |(name, port): &(&str, Option<u16>)| port.unwrap_or_else(|| name.parse().unwrap());
        let shown: Vec<Value> = ports
            .iter()
            .map(|port| json!({"name": format!("p{}", port.0), "port": number(port)}))
            .collect();
        let service = json!({"apiVersion": "v1", "kind": "Service", "metadata": {"name": name}, "spec": {
            "type": "LoadBalancer", "ports": shown, "externalTrafficPolicy": policy,
            "ipFamilyPolicy": "RequireDualStack", "ipFamilies": ["IPv4", "IPv6"]}});
        self.write("POST", "/api/v1/namespaces/default/services", &service);
        let ports: Vec<Value> = ports
            .iter()
            .map(|port| json!({"name": format!("p{}", port.0), "port": BACKEND_PORT, "protocol": "TCP"}))
            .collect();
        for (family, address) in [("IPv4", "192.0.2.80"), ("IPv6", "2001:db8:1::80")] {
            let slice = json!({"apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice",
                "metadata": {"name": format!("{name}-{}", family.to_lowercase()),
                    "labels": {"kubernetes.io/service-name": name}},
                "addressType": family, "ports": ports,
                "endpoints": [{"addresses": [address], "nodeName": "b", "conditions": {"ready": true}}]});
            let path = "/apis/discovery.k8s.io/v1/namespaces/default/endpointslices";
            self.write("POST", path, &slice);
        }
    }

    /// What the load balancer gave it.
    fn addresses(&self, name: &str) -> [IpAddr; 2] {
        eventually("addresses of the pool", || {
            let services: Api<Service> = Api::namespaced(self.api.client.clone(), "default");
            let service = self.api.runtime.block_on(services.get(name)).unwrap();
            let ingress = service.status?.load_balancer?.ingress?;
            let addresses: Vec<IpAddr> = ingress
                .iter()
                .filter_map(|entry| entry.ip.as_deref()?.parse().ok())
                .collect();
            <[IpAddr; 2]>::try_from(addresses).ok()
        })
    }

    /// The machines whose kernel answers for the address.
    fn holders(&self, address: IpAddr) -> Vec<usize> {
        let text = format!(" {address}/");
        let numbers = 0..self.machines.len();
        numbers
            .filter(|number| {
                let machine = &self.machines[*number];
                machine.alive && machine.host.ip("-o addr show dev eth0").contains(&text)
            })
            .collect()
    }

    fn holder(&self, address: IpAddr) -> usize {
        eventually("one machine that answers", || match self.holders(address)[..] {
            [one] => Some(one),
            _ => None,
        })
    }

    /// The client reaches the Service by way of the machine that answers for the address.
    fn is_served(&self, address: IpAddr, port: u16) {
        eventually(
            "the Service answers the client, by the machine that has the address",
            || {
                let seen = ask(&self.client.path, address, port).ok()?;
                let number = u16::try_from(self.holder(address)).unwrap() + 1;
                let expected = match address {
                    IpAddr::V4(_) => IpAddr::from([192, 0, 2, number as u8]),
                    IpAddr::V6(_) => IpAddr::from([0x2001, 0xdb8, 1, 0, 0, 0, 0, number]),
                };
                (seen == expected).then_some(())
            },
        );
    }
}

/// What else listens on the machine is not reached by the address.
fn only_the_service_is_there(link: &Link, address: IpAddr) {
    let holder = link.holder(address);
    let own = IpAddr::from([192, 0, 2, holder as u8 + 1]);
    let _listener = inside(&link.machines[holder].host.path, || {
        TcpListener::bind(("0.0.0.0", 22)).unwrap()
    });
    let connect = |to: IpAddr, port: u16| {
        inside(&link.client.path, move || {
            TcpStream::connect_timeout(&(to, port).into(), Duration::from_secs(5)).map(drop)
        })
    };
    connect(own, 22).unwrap();
    let refused = connect(address, 22).unwrap_err();
    assert_eq!(refused.kind(), std::io::ErrorKind::ConnectionRefused, "{refused}");
}

/// The machine vanishes from the link, and comes back later with what it had.
fn a_machine_dies(link: &mut Link, address: IpAddr) {
    let holder = link.holder(address);
    link.is_served(address, 80);
    link.machines[holder].alive = false;
    let died = Instant::now();
    link.plug(holder, "down");
    eventually("another machine answers the client", || {
        inside(&link.client.path, move || {
            TcpStream::connect_timeout(&(address, 80).into(), Duration::from_millis(100)).ok()
        })
    });
    let took = died.elapsed();
    assert_ne!(link.holder(address), holder);
    link.is_served(address, 80);
    println!("announce: {address} moved in {} ms", took.as_millis());
    // It still thinks that the address is its own.
    link.plug(holder, "up");
    link.machines[holder].alive = true;
    link.holder(address);
    link.is_served(address, 80);
}

/// The kernel goes on answering, and the next start finds what it had.
fn skiff_is_killed(link: &mut Link, address: IpAddr) {
    let holder = link.holder(address);
    link.kill_skiff(holder);
    // Longer than others wait.
    let start = Instant::now();
    while start.elapsed() < Duration::from_secs(3) {
        ask(&link.client.path, address, 80).unwrap();
        assert_eq!(link.holders(address), [holder]);
    }
    link.start(holder);
    while start.elapsed() < Duration::from_secs(5) {
        ask(&link.client.path, address, 80).unwrap();
        assert_eq!(link.holders(address), [holder]);
    }
}

fn a_node_is_not_ready(link: &Link, address: IpAddr) {
    let holder = link.holder(address);
    let name = link.machines[holder].name;
    link.set_ready(name, "Unknown");
    eventually("a ready node takes over", || {
        (link.holder(address) != holder).then_some(())
    });
    link.is_served(address, 80);
    link.set_ready(name, "True");
}

/// With `externalTrafficPolicy: Local`, the node with the endpoint announces.
fn local_traffic(link: &Link) {
    link.service("local", "Local", &[("80", None)]);
    let addresses = link.addresses("local");
    for address in addresses {
        assert_eq!(link.machines[link.holder(address)].name, "b");
    }
    for (family, address) in [("ipv4", "192.0.2.80"), ("ipv6", "2001:db8:1::80")] {
        let path = format!("/apis/discovery.k8s.io/v1/namespaces/default/endpointslices/local-{family}");
        let patch =
            json!({"endpoints": [{"addresses": [address], "nodeName": "c", "conditions": {"ready": true}}]});
        link.write("PATCH", &path, &patch);
    }
    for address in addresses {
        eventually("it follows the endpoint", || {
            (link.machines[link.holder(address)].name == "c").then_some(())
        });
    }
    link.write(
        "DELETE",
        "/api/v1/namespaces/default/services/local",
        &Value::Null,
    );
    nobody_announces_what_is_gone_of(link, &addresses);
}

fn nobody_announces_what_is_gone(link: &Link, addresses: &[IpAddr]) {
    link.write("DELETE", "/api/v1/namespaces/default/services/web", &Value::Null);
    nobody_announces_what_is_gone_of(link, addresses);
}

fn nobody_announces_what_is_gone_of(link: &Link, addresses: &[IpAddr]) {
    for address in addresses {
        eventually("nobody has the address", || {
            link.holders(*address).is_empty().then_some(())
        });
    }
}
