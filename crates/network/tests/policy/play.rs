//! The stage of the test: machines, pods that answer, policies in the API, and what the model says of them.

use std::io::{Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::path::Path;
use std::sync::atomic::{AtomicU16, Ordering};
use std::time::Duration;

use serde_json::{Value, json};
use skiff_cni::PodArgs;
use skiff_network::pods;
use skiff_network::policy::{self, PolicyConfig};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio_util::sync::CancellationToken;

use crate::hosts::{ApiServer, Host, Machine, Pod, TIER_KINDS, eventually, inside};
use crate::model::{ModelPod, Side, World};

/// Blocks of random policies, each with an exception.
pub(crate) const BLOCKS: [(&str, &str); 5] = [
    ("10.244.0.0/24", "10.244.0.4/32"),
    ("10.244.0.0/16", "10.244.1.0/24"),
    ("0.0.0.0/0", "10.244.0.0/24"),
    ("fd00:10::/64", "fd00:10::4/128"),
    ("::/0", "fd00:10:0:1::/64"),
];
const PORTS: [u16; 2] = [8080, 8081];
/// How long something takes at most that must happen, and how long is waited for what must not.
const PATIENCE: Duration = Duration::from_secs(10);
const SHORT: Duration = Duration::from_millis(300);
/// The namespace of the pods that show how far the components have read.
const MARKERS: &str = "markers";
/// Marks are ports from these on: of NetworkPolicies, and of each kind of administrators' policies.
const MARK: u16 = 20000;
const TIER_MARKS: [u16; 3] = [30000, 40000, 50000];

pub(crate) struct Play {
    api: ApiServer,
    pub(crate) machines: Vec<Machine>,
    pub(crate) tables: Vec<String>,
    running: Vec<Option<tokio::task::AbortHandle>>,
    world: World,
    pods: Vec<Pod>,
    markers: Vec<Pod>,
    marks: u16,
    /// The kinds of administrators' policies are installed.
    is_defined: bool,
}

impl Play {
    pub(crate) fn start() -> Play {
        let api = ApiServer::start();
        let (one, two) = (Host::new(), Host::new());
        one.cable("eth0", &two, "eth0");
        for (host, number) in [(&one, 1), (&two, 2)] {
            host.ip(&format!("addr add 192.0.2.{number}/24 dev eth0"));
            host.ip(&format!("addr add 2001:db8::{number}/64 dev eth0 nodad"));
        }
        one.ip("route add default via 192.0.2.2");
        let mut machines = Vec::new();
        for (name, host, number) in [("a", one, 1), ("b", two, 2)] {
            let mut machine = Machine::new(name, host, &api);
            machine.config.policy_socket = Some(machine.dir.path().join("policy.sock"));
            api.add_node(
                name,
                &[&format!("192.0.2.{number}"), &format!("2001:db8::{number}")],
            );
            // Both have one label, and one each.
            let labels = json!({"app": name, "tier": "a"});
            let path = format!("/api/v1/nodes/{name}");
            request(&api, "PATCH", &path, &json!({"metadata": {"labels": labels}}));
            machine.start();
            machines.push(machine);
        }
        let mut play = Play {
            api,
            tables: vec!["skiff-test-policy".into(); machines.len()],
            running: machines.iter().map(|_| None).collect(),
            machines,
            world: World::default(),
            pods: Vec::new(),
            markers: Vec::new(),
            marks: 0,
            is_defined: false,
        };
        for (machine, number) in play.machines.iter().zip(1..) {
            let addresses = vec![
                IpAddr::from([192, 0, 2, number]),
                format!("2001:db8::{number}").parse().unwrap(),
            ];
            serve(&machine.host, &addresses);
            let labels =
                [("app", machine.name), ("tier", "a")].map(|(key, value)| (key.into(), value.into()));
            play.world.nodes.push((labels.into(), addresses));
        }
        for (namespace, labels) in [
            ("red", json!({"team": "red"})),
            ("blue", json!({"team": "blue"})),
            ("kube-system", json!({})),
            (MARKERS, json!({})),
        ] {
            play.namespace(namespace, labels);
        }
        for node in 0..play.machines.len() {
            play.start_policy(node);
            let known = play.create_pod(node, MARKERS, &format!("marker-{node}"), &json!({}));
            let pod = play.attach(node, &known);
            play.report(&known, &pod);
            play.markers.push(pod);
        }
        play
    }

    fn request(&self, method: &str, path: &str, body: &Value) -> Value {
        request(&self.api, method, path, body)
    }

    /// Installs the definitions of administrators' policies, or removes them and all policies with them.
    pub(crate) fn define(&mut self, present: bool) {
        const DEFINITIONS: &str = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions";
        for (kind, plural, version) in TIER_KINDS {
            let name = format!("{plural}.policy.networking.k8s.io");
            if !present {
                self.request("DELETE", &format!("{DEFINITIONS}/{name}"), &json!({}));
                continue;
            }
            let schema =
                json!({"openAPIV3Schema": {"type": "object", "x-kubernetes-preserve-unknown-fields": true}});
            let versions = json!([{"name": version, "served": true, "storage": true, "schema": schema, "subresources": {"status": {}}}]);
            let definition = json!({"apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition", "metadata": {"name": name,
                "annotations": {"api-approved.kubernetes.io": "https://github.com/kubernetes-sigs/network-policy-api/pull/30"}},
                "spec": {"group": "policy.networking.k8s.io", "scope": "Cluster", "versions": versions,
                    "names": {"kind": kind, "plural": plural, "singular": kind.to_lowercase(), "listKind": format!("{kind}List")}}});
            self.request("POST", DEFINITIONS, &definition);
            eventually("the definition to be established", || {
                let object = self.request("GET", &format!("{DEFINITIONS}/{name}"), &Value::Null);
                let conditions = object["status"]["conditions"]
                    .as_array()
                    .cloned()
                    .unwrap_or_default();
                conditions
                    .iter()
                    .any(|one| one["type"] == "Established" && one["status"] == "True")
                    .then_some(())
            });
        }
        if !present {
            self.world.tiers.clear();
        }
        self.is_defined = present;
    }

    /// Stops or goes on to serve ClusterNetworkPolicies, which stay. They are in force while they are served.
    pub(crate) fn serve_cluster_policies(&mut self, served: bool) {
        let path = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions/clusternetworkpolicies.policy.networking.k8s.io";
        let mut versions = self.request("GET", path, &Value::Null)["spec"]["versions"].clone();
        versions[0]["served"] = json!(served);
        self.request("PATCH", path, &json!({"spec": {"versions": versions}}));
    }

    /// Whether any pod of a node has a class.
    pub(crate) fn has_classes(&self, node: usize) -> bool {
        let listed = format!("list table inet {}", self.tables[node]);
        self.machines[node]
            .host
            .command("nft", &listed)
            .contains("-class-")
    }

    /// Makes a policy of an administrator, or changes the one of that name.
    pub(crate) fn tier_policy(&mut self, object: Value) {
        self.apply(&tier_path(&object), &object);
        let is_other = |present: &Value| {
            ["kind", "metadata"]
                .iter()
                .any(|part| present[*part] != object[*part])
        };
        self.world.tiers.retain(is_other);
        self.world.tiers.push(object);
    }

    /// A ClusterNetworkPolicy.
    pub(crate) fn cluster_policy(&mut self, name: &str, tier: &str, priority: u32, spec: Value) {
        let mut spec = spec;
        spec["tier"] = json!(tier);
        spec["priority"] = json!(priority);
        self.tier_policy(
            json!({"apiVersion": "policy.networking.k8s.io/v1alpha2", "kind": "ClusterNetworkPolicy",
            "metadata": {"name": name}, "spec": spec}),
        );
    }

    fn namespace(&mut self, name: &str, labels: Value) {
        if name != "kube-system" {
            let object = json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}});
            self.request("POST", "/api/v1/namespaces", &object);
        }
        if name != MARKERS {
            self.world.namespaces.insert(name.to_owned(), Default::default());
        }
        let account = json!({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "default"}});
        self.request(
            "POST",
            &format!("/api/v1/namespaces/{name}/serviceaccounts"),
            &account,
        );
        self.label_namespace(name, labels);
    }

    /// Gives a namespace these labels, besides its name.
    pub(crate) fn label_namespace(&mut self, name: &str, labels: Value) {
        let mut patch = json!({"team": null, "env": null});
        merge(&mut patch, &labels);
        let path = format!("/api/v1/namespaces/{name}");
        let object = self.request("PATCH", &path, &json!({"metadata": {"labels": patch}}));
        if let Some(known) = self.world.namespaces.get_mut(name) {
            *known = serde_json::from_value(object["metadata"]["labels"].clone()).unwrap();
        }
    }

    pub(crate) fn start_policy(&mut self, node: usize) {
        let machine = &self.machines[node];
        let config = PolicyConfig {
            node_name: machine.name.into(),
            bridge: machine.config.bridge.clone(),
            table: self.tables[node].clone(),
            socket: machine.config.policy_socket.clone().unwrap(),
        };
        let client = machine.client.clone();
        let handle = machine.host.run(async move {
            let task = tokio::spawn(async move {
                let ended = policy::run(config, client, CancellationToken::new()).await;
                panic!("the policies ended: {ended:?}");
            });
            task.abort_handle()
        });
        self.running[node] = Some(handle);
    }

    /// Ends the component at whatever it is doing.
    pub(crate) fn stop_policy(&mut self, node: usize) {
        self.running[node].take().unwrap().abort();
        self.machines[node]
            .host
            .run(async { tokio::task::yield_now().await });
    }

    fn create_pod(&self, node: usize, namespace: &str, name: &str, labels: &Value) -> ModelPod {
        let mut pod = ModelPod {
            namespace: namespace.into(),
            name: name.into(),
            uid: String::new(),
            node: self.machines[node].name.into(),
            labels: serde_json::from_value(labels.clone()).unwrap(),
            addresses: Vec::new(),
            ports: vec![
                ("web".into(), "TCP".into(), PORTS[0]),
                ("alt".into(), "UDP".into(), PORTS[1]),
            ],
        };
        let mut object = pod.object();
        object.as_object_mut().unwrap().remove("status");
        object["metadata"].as_object_mut().unwrap().remove("uid");
        let made = self.request("POST", &format!("/api/v1/namespaces/{namespace}/pods"), &object);
        pod.uid = made["metadata"]["uid"].as_str().unwrap().to_owned();
        pod
    }

    fn attach(&mut self, node: usize, pod: &ModelPod) -> Pod {
        self.machines[node].pod_of(PodArgs {
            namespace: pod.namespace.clone(),
            name: pod.name.clone(),
            uid: pod.uid.clone(),
        })
    }

    /// Makes a pod as the kubelet does: its network first, its status later.
    pub(crate) fn add_pod(&mut self, node: usize, namespace: &str, name: &str, labels: Value) {
        let mut known = self.create_pod(node, namespace, name, &labels);
        let pod = self.attach(node, &known);
        known.addresses.clone_from(&pod.addresses);
        serve(&pod.host, &pod.addresses);
        self.report(&known, &pod);
        self.world.pods.push(known);
        self.pods.push(pod);
    }

    /// Pods of the second node that exist by their objects alone, for a crowd that policies name.
    pub(crate) fn crowd(&self, namespace: &str, count: u32) {
        for number in 0..count {
            let known = self.create_pod(
                1,
                namespace,
                &format!("crowd-{number}"),
                &json!({"app": format!("crowd-{number}")}),
            );
            let address =
                std::net::Ipv4Addr::from(u32::from(std::net::Ipv4Addr::new(10, 244, 128, 0)) + number);
            let status =
                json!({"status": {"phase": "Running", "podIP": address, "podIPs": [{"ip": address}]}});
            let path = format!("/api/v1/namespaces/{namespace}/pods/{}/status", known.name);
            self.request("PATCH", &path, &status);
        }
    }

    /// Says in a pod's status what addresses it has.
    fn report(&self, known: &ModelPod, pod: &Pod) {
        let ips: Vec<Value> = pod
            .addresses
            .iter()
            .map(|address| json!({"ip": address}))
            .collect();
        let status = json!({"status": {"phase": "Running", "podIP": pod.addresses[0], "podIPs": ips}});
        let path = format!(
            "/api/v1/namespaces/{}/pods/{}/status",
            known.namespace, known.name
        );
        self.request("PATCH", &path, &status);
    }

    pub(crate) fn remove_pod(&mut self, namespace: &str, name: &str) {
        let index = self.index(namespace, name);
        let (known, pod) = (self.world.pods.remove(index), self.pods.remove(index));
        let path = format!("/api/v1/namespaces/{namespace}/pods/{name}");
        self.request("DELETE", &path, &json!({"gracePeriodSeconds": 0}));
        let node = self
            .machines
            .iter()
            .position(|machine| machine.name == known.node)
            .unwrap();
        self.machines[node].delete(pod);
    }

    /// A sandbox of a pod that does not exist.
    pub(crate) fn stray(&mut self, node: usize) -> Pod {
        self.machines[node].pod_of(PodArgs {
            namespace: "red".into(),
            name: "nobody".into(),
            uid: "nothing".into(),
        })
    }

    fn index(&self, namespace: &str, name: &str) -> usize {
        let mut pods = self.world.pods.iter();
        pods.position(|pod| pod.namespace == namespace && pod.name == name)
            .unwrap()
    }

    pub(crate) fn pod(&self, namespace: &str, name: &str) -> &Pod {
        &self.pods[self.index(namespace, name)]
    }

    pub(crate) fn address(&self, namespace: &str, name: &str, family: usize) -> IpAddr {
        self.pod(namespace, name).addresses[family]
    }

    pub(crate) fn label_pod(&mut self, namespace: &str, name: &str, labels: Value) {
        let mut patch = json!({"app": null, "tier": null});
        merge(&mut patch, &labels);
        let path = format!("/api/v1/namespaces/{namespace}/pods/{name}");
        self.request("PATCH", &path, &json!({"metadata": {"labels": patch}}));
        let index = self.index(namespace, name);
        self.world.pods[index].labels = serde_json::from_value(labels).unwrap();
    }

    /// Makes a policy, or changes the one of that name.
    pub(crate) fn policy(&mut self, namespace: &str, name: &str, spec: Value) {
        let object = json!({"apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy",
            "metadata": {"namespace": namespace, "name": name}, "spec": spec});
        self.write_policy(&object);
        let meta = object["metadata"].clone();
        self.world.policies.retain(|present| present["metadata"] != meta);
        self.world.policies.push(object);
    }

    fn write_policy(&self, object: &Value) {
        let meta = &object["metadata"];
        let (namespace, name) = (
            meta["namespace"].as_str().unwrap(),
            meta["name"].as_str().unwrap(),
        );
        let path = format!("/apis/networking.k8s.io/v1/namespaces/{namespace}/networkpolicies/{name}");
        self.apply(&path, object);
    }

    fn apply(&self, path: &str, object: &Value) {
        let request = http::Request::patch(format!("{path}?fieldManager=test&force=true"))
            .header("content-type", "application/apply-patch+yaml")
            .body(serde_json::to_vec(object).unwrap())
            .unwrap();
        let written = self
            .api
            .runtime
            .block_on(self.api.client.request::<Value>(request));
        written.unwrap_or_else(|error| panic!("{error}\n{object:#}"));
    }

    /// Deletes all policies, and does not wait for it.
    pub(crate) fn forget_policies(&mut self) {
        for policy in std::mem::take(&mut self.world.policies) {
            let meta = &policy["metadata"];
            let (namespace, name) = (
                meta["namespace"].as_str().unwrap(),
                meta["name"].as_str().unwrap(),
            );
            let path = format!("/apis/networking.k8s.io/v1/namespaces/{namespace}/networkpolicies/{name}");
            self.request("DELETE", &path, &json!({}));
        }
        for policy in std::mem::take(&mut self.world.tiers) {
            self.request("DELETE", &tier_path(&policy), &json!({}));
        }
    }

    pub(crate) fn clear(&mut self) {
        self.forget_policies();
        self.settle();
    }

    /// Waits until all that was written is in force everywhere: the components follow each kind in order, so that a mark
    /// on an object of each kind that was written last tells of all before.
    pub(crate) fn settle(&mut self) {
        self.marks += 1;
        let mark = self.marks.to_string();
        let labels = json!({"metadata": {"labels": {"mark": mark}}});
        self.request("PATCH", &format!("/api/v1/namespaces/{MARKERS}"), &labels);
        for node in 0..self.machines.len() {
            self.request(
                "PATCH",
                &format!("/api/v1/namespaces/{MARKERS}/pods/marker-{node}"),
                &labels,
            );
        }
        let marked = json!({"matchLabels": {"mark": mark}});
        let mut ports = vec![MARK + self.marks];
        self.write_policy(&json!({"apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy",
            "metadata": {"namespace": MARKERS, "name": "mark"},
            "spec": {"podSelector": {}, "ingress": [
                {"from": [{"namespaceSelector": marked, "podSelector": marked}], "ports": [{"port": ports[0]}]}]}}));
        let kinds = TIER_KINDS.iter().zip(TIER_MARKS).filter(|_| self.is_defined);
        for ((kind, _, version), first) in kinds {
            // A range: of single ports in one map, nft shows the first and the last as a range.
            let port = first + self.marks;
            let mut rule = json!({"action": "Deny", "to": [{"networks": ["203.0.113.1/32"]}]});
            match *version {
                "v1alpha1" => {
                    rule["ports"] =
                        json!([{"portRange": {"protocol": "TCP", "start": port, "end": port + 1}}])
                }
                _ => {
                    rule["protocols"] =
                        json!([{"tcp": {"destinationPort": {"range": {"start": port, "end": port + 1}}}}])
                }
            }
            let subject = json!({"namespaces": {"matchLabels": {"kubernetes.io/metadata.name": MARKERS}}});
            let object = json!({"apiVersion": format!("policy.networking.k8s.io/{version}"), "kind": kind,
                "metadata": {"name": "mark"}, "spec": {"tier": "Admin", "priority": 0, "subject": subject, "egress": [rule]}});
            self.apply(&tier_path(&object), &object);
            ports.push(port);
        }
        for (machine, table) in self.machines.iter().zip(&self.tables) {
            eventually(&format!("the policies of {} to settle", machine.name), || {
                // The table is not there all the time: some tests delete it.
                if !machine
                    .host
                    .command("nft", "list tables")
                    .contains(table.as_str())
                {
                    return None;
                }
                let listed = machine.host.command("nft", &format!("list table inet {table}"));
                let is_marked = |port: &u16| listed.contains(&format!(". {port}"));
                ports.iter().all(is_marked).then_some(())
            });
        }
    }

    /// Waits for what was written, and opens connections of every pod to every pod.
    pub(crate) fn check(&mut self, when: &str) {
        self.settle();
        let world = &self.world;
        std::thread::scope(|scope| {
            let checks: Vec<_> = self
                .pods
                .iter()
                .zip(&world.pods)
                .map(|(pod, known)| scope.spawn(move || check_from(world, pod, known)))
                .collect();
            for check in checks {
                let wrong = check.join().unwrap();
                assert!(wrong.is_empty(), "{when}: {wrong:#?}\n{world:#?}");
            }
        });
    }

    /// Ends everything and looks that nothing is left.
    pub(crate) fn end(mut self) {
        for node in 0..self.machines.len() {
            self.stop_policy(node);
            let machine = &mut self.machines[node];
            machine.kill();
            let config = machine.config.clone();
            let policies = PolicyConfig {
                node_name: machine.name.into(),
                bridge: config.bridge.clone(),
                table: self.tables[node].clone(),
                socket: config.policy_socket.clone().unwrap(),
            };
            machine.host.run(async move {
                policy::remove(&policies).await.unwrap();
                policy::remove(&policies).await.unwrap();
                pods::remove(&config).await.unwrap();
            });
            assert_eq!(machine.host.command("nft", "list tables"), "");
        }
    }
}

fn request(api: &ApiServer, method: &str, path: &str, body: &Value) -> Value {
    let kind = match method {
        "PATCH" => "application/merge-patch+json",
        _ => "application/json",
    };
    let body = match method {
        "GET" => Vec::new(),
        _ => serde_json::to_vec(body).unwrap(),
    };
    let request = http::Request::builder()
        .method(method)
        .uri(path)
        .header("content-type", kind)
        .body(body)
        .unwrap();
    let answer = api.runtime.block_on(api.client.request::<Value>(request));
    answer.unwrap_or_else(|error| panic!("{method} {path}: {error}"))
}

fn tier_path(object: &Value) -> String {
    let (kind, name) = (&object["kind"], object["metadata"]["name"].as_str().unwrap());
    let known = TIER_KINDS.iter().find(|(known, ..)| kind == known);
    let (_, plural, version) = known.unwrap();
    format!("/apis/policy.networking.k8s.io/{version}/{plural}/{name}")
}

fn merge(into: &mut Value, labels: &Value) {
    for (key, value) in labels.as_object().into_iter().flatten() {
        into[key] = value.clone();
    }
}

/// Opens connections of one pod to all pods, itself as well, and to all nodes. Returns those that did not do what the model says.
fn check_from(world: &World, pod: &Pod, known: &ModelPod) -> Vec<String> {
    let mut probes = Vec::new();
    let pods = world.pods.iter().map(|other| (&other.addresses, Some(other)));
    let nodes = world.nodes.iter().map(|(_, addresses)| (addresses, None));
    for (addresses, other) in pods.chain(nodes) {
        for (family, to) in addresses.iter().enumerate() {
            for (protocol, port) in ["TCP", "UDP"]
                .into_iter()
                .flat_map(|protocol| PORTS.map(|port| (protocol, port)))
            {
                let from = Side {
                    address: known.addresses[family],
                    pod: Some(known),
                };
                let target = Side {
                    address: *to,
                    pod: other,
                };
                let expected = world.allows(from, target, protocol, port);
                probes.push((SocketAddr::new(*to, port), protocol, expected));
            }
        }
    }
    let name = format!("{}/{}", known.namespace, known.name);
    pod.host.run(async move {
        let outcomes = probes.iter().map(|(to, protocol, expected)| async move {
            let patience = if *expected { PATIENCE } else { SHORT };
            match *protocol {
                "TCP" => tcp(*to, patience).await,
                _ => udp(*to, patience).await,
            }
        });
        let outcomes = futures::future::join_all(outcomes).await;
        let wrong = probes
            .iter()
            .zip(outcomes)
            .filter(|((.., expected), got)| expected != got);
        wrong
            .map(|((to, protocol, expected), _)| {
                let should = if *expected { "should" } else { "should not" };
                format!("{name} {should} reach {to} by {protocol}")
            })
            .collect()
    })
}

async fn tcp(to: SocketAddr, patience: Duration) -> bool {
    let connected = tokio::time::timeout(patience, tokio::net::TcpStream::connect(to)).await;
    connected.is_ok_and(|connected| connected.is_ok())
}

/// Every exchange has a port of its own: with one that was used before, it would belong to a flow that is open.
static NEXT_PORT: AtomicU16 = AtomicU16::new(10000);

async fn udp(to: SocketAddr, patience: Duration) -> bool {
    let any = match to.is_ipv4() {
        true => IpAddr::from([0; 4]),
        false => IpAddr::from([0; 16]),
    };
    let port = NEXT_PORT.fetch_add(1, Ordering::Relaxed);
    let socket = tokio::net::UdpSocket::bind((any, port)).await.unwrap();
    socket.connect(to).await.unwrap();
    let exchange = async {
        let mut buffer = [0; 16];
        loop {
            let _ = socket.send(b"?").await;
            let answer = socket.recv(&mut buffer);
            if let Ok(Ok(_)) = tokio::time::timeout(Duration::from_millis(500), answer).await {
                return;
            }
        }
    };
    tokio::time::timeout(patience, exchange).await.is_ok()
}

/// Has a pod or a node answer on all ports that are tried.
fn serve(host: &Host, addresses: &[IpAddr]) {
    let addresses: Vec<SocketAddr> = addresses
        .iter()
        .flat_map(|address| PORTS.map(|port| SocketAddr::new(*address, port)))
        .collect();
    host.run(async move {
        for address in addresses {
            let listener = tokio::net::TcpListener::bind(address).await.unwrap();
            tokio::spawn(async move {
                while let Ok((mut stream, _)) = listener.accept().await {
                    tokio::spawn(async move {
                        let mut buffer = [0; 64];
                        while let Ok(length @ 1..) = stream.read(&mut buffer).await {
                            if stream.write_all(&buffer[..length]).await.is_err() {
                                return;
                            }
                        }
                    });
                }
            });
            let socket = tokio::net::UdpSocket::bind(address).await.unwrap();
            tokio::spawn(async move {
                let mut buffer = [0; 64];
                while let Ok((length, peer)) = socket.recv_from(&mut buffer).await {
                    let _ = socket.send_to(&buffer[..length], peer).await;
                }
            });
        }
    });
}

/// Answers on one port of a namespace, from a thread.
pub(crate) fn echo(path: &Path, address: IpAddr, port: u16) {
    inside(path, move || {
        let listener = TcpListener::bind((address, port)).unwrap();
        std::thread::spawn(move || while listener.accept().is_ok() {});
    });
}

/// Whether a connection can be opened.
pub(crate) fn connects(path: &Path, to: IpAddr, port: u16) -> bool {
    opens(path, to, port, PATIENCE)
}

/// Whether no connection can be opened.
pub(crate) fn is_closed(path: &Path, to: IpAddr, port: u16) -> bool {
    !opens(path, to, port, SHORT)
}

fn opens(path: &Path, to: IpAddr, port: u16, patience: Duration) -> bool {
    inside(path, move || {
        TcpStream::connect_timeout(&(to, port).into(), patience).is_ok()
    })
}

/// A connection that stays open.
pub(crate) struct Held(TcpStream);

pub(crate) fn hold(path: &Path, to: IpAddr, port: u16) -> Held {
    Held(inside(path, move || {
        TcpStream::connect_timeout(&(to, port).into(), PATIENCE).unwrap()
    }))
}

impl Held {
    pub(crate) fn answers(&self) -> bool {
        let mut stream = &self.0;
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        let mut answer = [0];
        stream.write_all(b"e").is_ok() && stream.read_exact(&mut answer).is_ok()
    }
}
