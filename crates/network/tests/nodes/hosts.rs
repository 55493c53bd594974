//! Network namespaces that stand for machines and pods, and a real API server that knows them as Nodes.

use std::future::Future;
use std::net::{IpAddr, TcpListener, TcpStream, UdpSocket};
use std::path::PathBuf;
use std::pin::Pin;
use std::sync::{Arc, Mutex, mpsc};
use std::time::{Duration, Instant};

use k8s_openapi::api::core::v1::Node;
use kube::api::{Patch, PatchParams, PostParams};
use kube::{Api, Client};
use rustix::thread::{LinkNameSpaceType, UnshareFlags, move_into_link_name_space};
use serde_json::{Value, json};
use skiff_auth::UserInfo;
use skiff_cni::{Attachment, Network, PodArgs};
use skiff_network::pods::{self, Mode, PodNetworkConfig};
use tokio_util::sync::CancellationToken;

/// How long rules that somebody else has changed may be gone: that they are restored within a second is for quiet machines.
const RESTORE_PATIENCE: Duration = Duration::from_secs(5);
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);
/// Kinds of policies of administrators: name, plural and version.
pub(crate) const TIER_KINDS: [(&str, &str, &str); 3] = [
    ("ClusterNetworkPolicy", "clusternetworkpolicies", "v1alpha2"),
    ("AdminNetworkPolicy", "adminnetworkpolicies", "v1alpha1"),
    (
        "BaselineAdminNetworkPolicy",
        "baselineadminnetworkpolicies",
        "v1alpha1",
    ),
];
pub(crate) const CLUSTER: [&str; 2] = ["10.244.0.0/16", "fd00:10::/48"];

fn unshare_network() {
    // SAFETY: only the network namespace changes; no memory or descriptors are unshared.
    unsafe { rustix::thread::unshare_unsafe(UnshareFlags::NEWNET) }.unwrap();
}

fn namespace_path() -> PathBuf {
    let (pid, tid) = (rustix::process::getpid(), rustix::thread::gettid());
    format!(
        "/proc/{}/task/{}/ns/net",
        pid.as_raw_nonzero(),
        tid.as_raw_nonzero()
    )
    .into()
}

/// Waits until `found` finds something.
pub(crate) fn eventually<T>(what: &str, mut found: impl FnMut() -> Option<T>) -> T {
    let deadline = Instant::now() + PATIENCE;
    loop {
        if let Some(found) = found() {
            return found;
        }
        assert!(Instant::now() < deadline, "{what}: not within {PATIENCE:?}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// The words that one of both has more often.
fn difference(a: &[String], b: &[String]) -> Vec<(String, usize, usize)> {
    let count = |words: &[String], word: &String| words.iter().filter(|one| *one == word).count();
    let all: std::collections::BTreeSet<&String> = a.iter().chain(b).collect();
    let counts = all
        .into_iter()
        .map(|word| (word.clone(), count(a, word), count(b, word)));
    counts.filter(|(_, before, after)| before != after).collect()
}

type Work = Pin<Box<dyn Future<Output = ()> + Send>>;

/// A machine: a namespace with a thread, on which everything of it runs.
pub(crate) struct Host {
    pub(crate) path: PathBuf,
    work: tokio::sync::mpsc::UnboundedSender<Work>,
}

impl Host {
    pub(crate) fn new() -> Host {
        let (work, mut queue) = tokio::sync::mpsc::unbounded_channel::<Work>();
        let (tell, told) = mpsc::channel();
        std::thread::spawn(move || {
            unshare_network();
            tell.send(namespace_path()).unwrap();
            let runtime = tokio::runtime::Builder::new_current_thread()
                .enable_all()
                .build()
                .unwrap();
            runtime.block_on(async move {
                while let Some(work) = queue.recv().await {
                    work.await;
                }
            });
        });
        let host = Host {
            path: told.recv().unwrap(),
            work,
        };
        host.ip("link set lo up");
        host
    }

    pub(crate) fn run<T: Send + 'static>(&self, work: impl Future<Output = T> + Send + 'static) -> T {
        let (tell, told) = mpsc::channel();
        let work = async move { tell.send(work.await).unwrap() };
        self.work.send(Box::pin(work)).ok().unwrap();
        told.recv().unwrap()
    }

    /// Runs a command of iproute2 or nft on this machine and answers what it printed.
    pub(crate) fn command(&self, program: &'static str, args: &str) -> String {
        let args: Vec<String> = args.split_whitespace().map(str::to_owned).collect();
        let shown = format!("{program} {}", args.join(" "));
        let done = self.run(async move { std::process::Command::new(program).args(args).output().unwrap() });
        let (out, err) = (
            String::from_utf8_lossy(&done.stdout),
            String::from_utf8_lossy(&done.stderr),
        );
        assert!(done.status.success(), "{shown}: {err}");
        out.into_owned()
    }

    pub(crate) fn ip(&self, args: &str) -> String {
        self.command("ip", args)
    }

    /// All rules of the machine and the elements of their sets, in no particular order; but for what the kernel counts.
    pub(crate) fn rules(&self) -> Vec<String> {
        let listed = self.command("nft", "-s list ruleset");
        let mut words = Vec::new();
        for table in listed.split("\ntable ") {
            let mut parts = table.split("elements = {");
            let mut text = parts.next().unwrap_or_default().to_owned();
            let counts = table.contains("-connections {");
            for part in parts {
                text += match part.split_once("}\n") {
                    Some((_, rest)) if counts => rest,
                    _ => part,
                };
            }
            words.extend(
                text.split(|c: char| c.is_whitespace() || c == ',')
                    .map(str::to_owned),
            );
        }
        words.retain(|word| !word.is_empty());
        words.sort();
        words
    }

    /// Somebody else changes rules, by a command of nft: waits until those who run here have restored them.
    pub(crate) fn restores(&self, change: &str) {
        let before = self.rules();
        let start = Instant::now();
        self.command("nft", change);
        while self.rules() != before {
            assert!(
                start.elapsed() < RESTORE_PATIENCE,
                "nft {change}: not restored within {RESTORE_PATIENCE:?}: {:?}\n{}",
                difference(&before, &self.rules()),
                self.command("nft", "-s list ruleset")
            );
            std::thread::sleep(Duration::from_millis(5));
        }
        println!("restored {:?} after: nft {change}", start.elapsed());
    }

    /// Somebody else makes a table, as large as another cluster's: more than can be announced. Ours stay what they are; a new one
    /// would have another number.
    pub(crate) fn leaves_in_place(&self, tables: &[&str]) {
        let numbers = || -> Vec<String> {
            let listed = tables
                .iter()
                .map(|table| self.command("nft", &format!("-a -t list table {table}")));
            listed
                .map(|text| text.lines().next().unwrap().to_owned())
                .collect()
        };
        let before = numbers();
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("large");
        std::fs::write(&file, large_table()).unwrap();
        self.command("nft", &format!("-f {}", file.display()));
        std::thread::sleep(Duration::from_secs(2));
        assert_eq!(numbers(), before);
        self.command("nft", "delete table inet large");
    }

    /// The command that deletes the last rule of a chain.
    pub(crate) fn deletion_of_last_rule(&self, chain: &str) -> String {
        let listed = self.command("nft", &format!("-a list chain {chain}"));
        let mut rules = listed
            .lines()
            .filter(|line| !line.contains('{') && line.contains("# handle "));
        let (_, handle) = rules.next_back().unwrap().rsplit_once(' ').unwrap();
        format!("delete rule {chain} handle {handle}")
    }

    /// A cable from this machine's `device` to `port` of another one.
    pub(crate) fn cable(&self, device: &str, other: &Host, port: &str) {
        let tid: Vec<String> = other
            .path
            .to_str()
            .unwrap()
            .split('/')
            .map(str::to_owned)
            .collect();
        // iproute2 takes a process; a thread's number will do.
        self.ip(&format!(
            "link add {device} type veth peer name {port} netns {}",
            tid[4]
        ));
        self.ip(&format!("link set dev {device} up"));
        other.ip(&format!("link set dev {port} up"));
    }

    pub(crate) fn sysctl(&self, name: &str, value: &str) {
        let (path, value) = (format!("/proc/sys/net/{name}"), value.to_owned());
        self.run(async move { std::fs::write(path, value).unwrap() });
    }
}

/// For `nft -f`: elements whose announcements do not fit into what waits to be read.
fn large_table() -> String {
    let addresses = (0..40_000u32).map(|number| std::net::Ipv4Addr::from(number << 8).to_string());
    let addresses: Vec<String> = addresses.collect();
    let elements = addresses.join(", ");
    format!("table inet large {{\nset many {{\ntype ipv4_addr\nelements = {{ {elements} }}\n}}\n}}\n")
}

/// Runs `job` in a thread in the namespace.
pub(crate) fn inside<T: Send + 'static>(
    path: &std::path::Path,
    job: impl FnOnce() -> T + Send + 'static,
) -> T {
    let namespace = std::fs::File::open(path).unwrap();
    let thread = std::thread::spawn(move || {
        let kind = Some(LinkNameSpaceType::Network);
        move_into_link_name_space(std::os::fd::AsFd::as_fd(&namespace), kind).unwrap();
        job()
    });
    thread.join().unwrap()
}

/// What a node's pod network runs with, and the run that is under way.
pub(crate) struct Machine {
    pub(crate) name: &'static str,
    pub(crate) host: Host,
    pub(crate) config: PodNetworkConfig,
    pub(crate) client: Client,
    running: Option<tokio::task::AbortHandle>,
    pub(crate) dir: tempfile::TempDir,
    pods: u32,
}

impl Machine {
    pub(crate) fn new(name: &'static str, host: Host, api: &ApiServer) -> Machine {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path();
        std::fs::create_dir(path.join("bin")).unwrap();
        let exe = std::env::current_exe().unwrap();
        std::os::unix::fs::symlink(exe, path.join("bin/skiff-bridge")).unwrap();
        let config = PodNetworkConfig {
            node_name: name.into(),
            cluster_cidrs: CLUSTER.iter().map(|cidr| cidr.parse().unwrap()).collect(),
            network: "skiff-test".into(),
            bridge: "skiff0".into(),
            table: "skiff-test-pods".into(),
            cni_conf_dir: path.join("conf"),
            published: None,
            addresses_dir: path.join("addresses"),
            state_dir: path.join("state"),
            mode: Mode::Auto,
            mtu: None,
            wireguard_port: 51820,
            connection_limit: None,
            dns: true,
            policy_socket: None,
        };
        let user = UserInfo::new(
            format!("system:node:{name}"),
            ["system:nodes", "system:authenticated"],
        );
        let service = api.server.service(user);
        let client = host.run(async move { skiff_client::in_process(service, "default") });
        Machine {
            name,
            host,
            config,
            client,
            running: None,
            dir,
            pods: 0,
        }
    }

    /// Starts the component, as its supervisor does.
    pub(crate) fn start(&mut self) {
        let (config, client) = (self.config.clone(), self.client.clone());
        let handle = self.host.run(async move {
            let task = tokio::spawn(async move {
                let ended = pods::run(config, client, CancellationToken::new()).await;
                panic!("the pod network ended: {ended:?}");
            });
            task.abort_handle()
        });
        self.running = Some(handle);
    }

    /// Ends the component at whatever it is doing.
    pub(crate) fn kill(&mut self) {
        self.running.take().unwrap().abort();
        self.host.run(async { tokio::task::yield_now().await });
    }

    pub(crate) fn is_ready(&self) -> bool {
        self.config.cni_conf_dir.join("10-skiff.conflist").exists()
    }

    fn attachment(&self, number: u32, netns: PathBuf, pod: PodArgs) -> Attachment {
        Attachment {
            bin_dirs: vec![self.dir.path().join("bin")],
            cache_dir: self.dir.path().join("cache"),
            container_id: format!("{}{number}", self.name),
            netns: Some(netns),
            ifname: "eth0".into(),
            pod,
            runtime_config: serde_json::from_value(json!({"portMappings": [
                {"hostPort": 40000 + number, "containerPort": 8080, "protocol": "tcp"}]}))
            .unwrap(),
        }
    }

    /// Has the real plugin attach a pod.
    pub(crate) fn pod(&mut self) -> Pod {
        let pod = PodArgs {
            namespace: "default".into(),
            name: format!("pod{}", self.pods + 1),
            uid: "u".into(),
        };
        self.pod_of(pod)
    }

    /// Has the real plugin attach this pod.
    pub(crate) fn pod_of(&mut self, pod: PodArgs) -> Pod {
        eventually("the CNI configuration", || self.is_ready().then_some(()));
        self.pods += 1;
        let path = Host::new();
        let attachment = self.attachment(self.pods, path.path.clone(), pod);
        let conf_dir = self.config.cni_conf_dir.clone();
        let added = attachment.clone();
        let addresses = self.host.run(async move {
            let network = Network::load(&conf_dir).unwrap();
            network.add(&added).await.unwrap().pod_ips()
        });
        Pod {
            host: path,
            attachment,
            addresses,
        }
    }

    pub(crate) fn delete(&self, pod: Pod) {
        let conf_dir = self.config.cni_conf_dir.clone();
        self.host.run(async move {
            let network = Network::load(&conf_dir).unwrap();
            network.del(&pod.attachment).await.unwrap();
        });
    }

    /// The routes of the pod network, both families.
    pub(crate) fn routes(&self) -> String {
        self.host.ip("-4 route show proto 83") + &self.host.ip("-6 route show proto 83")
    }
}

pub(crate) struct Pod {
    pub(crate) host: Host,
    attachment: Attachment,
    /// IPv4, IPv6.
    pub(crate) addresses: Vec<IpAddr>,
}

/// What arrived by UDP, and from where.
pub(crate) type Received = Arc<Mutex<Vec<(Vec<u8>, IpAddr)>>>;

/// Answers TCP connections with the client's address, echoes what comes after a first `e`, and notes UDP packets.
pub(crate) fn serve(path: &std::path::Path, address: IpAddr, port: u16) -> Received {
    let received: Received = Arc::default();
    let noted = received.clone();
    inside(path, move || {
        let listener = TcpListener::bind((address, port)).unwrap();
        std::thread::spawn(move || {
            while let Ok((stream, peer)) = listener.accept() {
                std::thread::spawn(move || answer(stream, peer.ip()));
            }
        });
        let socket = UdpSocket::bind((address, port)).unwrap();
        std::thread::spawn(move || {
            let mut buffer = vec![0; 1 << 16];
            while let Ok((length, peer)) = socket.recv_from(&mut buffer) {
                noted.lock().unwrap().push((buffer[..length].to_vec(), peer.ip()));
            }
        });
    });
    received
}

fn answer(mut stream: TcpStream, peer: IpAddr) {
    use std::io::{Read, Write};
    let mut first = [0];
    if stream.read_exact(&mut first).is_err() {
        return;
    }
    if first != *b"e" {
        let _ = stream.write_all(peer.to_string().as_bytes());
        return;
    }
    let mut buffer = [0; 4096];
    while let Ok(length @ 1..) = stream.read(&mut buffer) {
        if stream.write_all(&buffer[..length]).is_err() {
            return;
        }
    }
}

/// Asks a server whom it sees.
pub(crate) fn ask(path: &std::path::Path, to: IpAddr, port: u16) -> std::io::Result<IpAddr> {
    use std::io::{Read, Write};
    inside(path, move || {
        let mut stream = TcpStream::connect_timeout(&(to, port).into(), Duration::from_secs(2))?;
        stream.set_read_timeout(Some(Duration::from_secs(5)))?;
        stream.write_all(b"?")?;
        let mut text = String::new();
        stream.read_to_string(&mut text)?;
        text.parse().map_err(std::io::Error::other)
    })
}

/// The API server, with the controller that gives nodes their networks.
pub(crate) struct ApiServer {
    pub(crate) client: Client,
    pub(crate) server: skiff_server::Server,
    pub(crate) runtime: tokio::runtime::Runtime,
    _dir: tempfile::TempDir,
}

impl ApiServer {
    pub(crate) fn start() -> ApiServer {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(2)
            .enable_all()
            .build()
            .unwrap();
        let dir = tempfile::tempdir().unwrap();
        let server = runtime.block_on(server(dir.path()));
        let _entered = runtime.enter();
        let admin = UserInfo::new("admin", ["system:masters", "system:authenticated"]);
        let client = skiff_client::in_process(server.service(admin), "default");
        drop(_entered);
        let api = ApiServer {
            client,
            server,
            runtime,
            _dir: dir,
        };
        api.allow_nodes();
        let server = api.server.clone();
        let client_for = Arc::new(move |name: &str| {
            let user = if name == skiff_controllers::MANAGER {
                UserInfo::new(name, ["system:authenticated"])
            } else {
                UserInfo::service_account("kube-system", name)
            };
            skiff_client::in_process(server.service(user), "default")
        });
        let mut config = skiff_controllers::ControllersConfig::new(client_for, "PEM".into(), "test".into());
        config.cluster_cidrs = CLUSTER.map(str::to_owned).to_vec();
        config.controllers =
            skiff_controllers::ControllerSelection::parse(&["node-ipam-controller"]).unwrap();
        api.runtime
            .spawn(skiff_controllers::run(config, CancellationToken::new()));
        api
    }

    /// The role that skiff gives nodes.
    fn allow_nodes(&self) {
        let name = "skiff:pod-network";
        let (group, version) = ("rbac.authorization.k8s.io", "rbac.authorization.k8s.io/v1");
        let role = json!({"apiVersion": version, "kind": "ClusterRole", "metadata": {"name": name}, "rules": [
            {"apiGroups": [""], "resources": ["nodes", "pods", "namespaces"], "verbs": ["get", "list", "watch"]},
            {"apiGroups": ["networking.k8s.io"], "resources": ["networkpolicies"], "verbs": ["get", "list", "watch"]},
            {"apiGroups": ["policy.networking.k8s.io"], "resources": ["*"], "verbs": ["list", "watch"]},
            {"apiGroups": ["apiextensions.k8s.io"], "resources": ["customresourcedefinitions"], "verbs": ["list", "watch"],
                "resourceNames": TIER_KINDS.map(|(_, plural, _)| format!("{plural}.policy.networking.k8s.io"))}]});
        let binding = json!({"apiVersion": version, "kind": "ClusterRoleBinding", "metadata": {"name": name},
            "roleRef": {"apiGroup": group, "kind": "ClusterRole", "name": name},
            "subjects": [{"apiGroup": group, "kind": "Group", "name": "system:nodes"}]});
        for (path, object) in [("clusterroles", role), ("clusterrolebindings", binding)] {
            let request = http::Request::post(format!("/apis/rbac.authorization.k8s.io/v1/{path}"))
                .header("content-type", "application/json")
                .body(serde_json::to_vec(&object).unwrap())
                .unwrap();
            self.runtime
                .block_on(self.client.request::<Value>(request))
                .unwrap();
        }
    }

    pub(crate) fn nodes(&self) -> Api<Node> {
        Api::all(self.client.clone())
    }

    /// Registers a node and waits for its networks.
    pub(crate) fn add_node(&self, name: &str, addresses: &[&str]) -> Vec<String> {
        let addresses: Vec<Value> = addresses
            .iter()
            .map(|address| json!({"type": "InternalIP", "address": address}))
            .collect();
        let node = json!({"metadata": {"name": name}, "status": {"addresses": addresses}});
        let node: Node = serde_json::from_value(node).unwrap();
        self.runtime
            .block_on(self.nodes().create(&PostParams::default(), &node))
            .unwrap();
        eventually("networks of the node", || self.node(name)?.spec?.pod_cidrs)
    }

    pub(crate) fn node(&self, name: &str) -> Option<Node> {
        self.runtime.block_on(self.nodes().get_opt(name)).unwrap()
    }

    pub(crate) fn annotate(&self, name: &str, annotation: &str, value: Value) {
        let patch = json!({"metadata": {"annotations": {annotation: value}}});
        let nodes = self.nodes();
        let patched = async move {
            nodes
                .patch(name, &PatchParams::default(), &Patch::Merge(patch))
                .await
        };
        self.runtime.block_on(patched).unwrap();
    }

    pub(crate) fn delete_node(&self, name: &str) {
        self.runtime
            .block_on(self.nodes().delete(name, &Default::default()))
            .unwrap();
    }
}

async fn server(dir: &std::path::Path) -> skiff_server::Server {
    let store = skiff_store::Embedded::open(dir.join("store")).unwrap();
    let pki = skiff_pki::Pki::open(&dir.join("pki")).unwrap();
    let (private_key, public_key) = pki.service_account_keys().unwrap();
    let identity = pki
        .serving("apiserver", "kube-apiserver", &["localhost".to_owned()])
        .unwrap();
    skiff_server::Server::start(skiff_server::ServerConfig {
        store: Arc::new(store),
        service_cidr: "10.96.0.0/16,fd00:96::/112".into(),
        node_ports: 30000..=32767,
        runtime_config: Default::default(),
        advertise_address: "192.0.2.100".parse().unwrap(),
        advertise_port: 6443,
        tls: Arc::new(skiff_pki::asking_server_config(&identity, &[]).unwrap()),
        client_certificates: None,
        service_account: Some(skiff_server::ServiceAccountKey {
            private_key,
            public_key,
            issuer: "https://kubernetes.default.svc.cluster.local".into(),
            audiences: Vec::new(),
        }),
        authentication: Default::default(),
        authorization: vec![skiff_auth::Mode::Node, skiff_auth::Mode::Rbac],
        admission: skiff_admission::Chain::recommended(),
        kubelet: None,
        recorder: Arc::default(),
        audit: None,
        instance: String::new(),
        kms_health: None,
        version: Default::default(),
        shutdown: CancellationToken::new(),
    })
    .await
    .unwrap()
}
