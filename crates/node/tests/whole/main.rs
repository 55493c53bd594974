//! The node over a real API server and a runtime in memory: pods start, fail, end and are found again.

#![allow(
    clippy::unwrap_used,
    reason = "everything here is a test, though not every function is marked as one"
)]

mod csi;
mod debug;
mod device_plugins;
mod dra;
mod ends;
mod managers;
mod objects;
mod pod_certificates;
mod pressure;
mod resize;
mod restart_all;
mod runtime;
mod runtime_faults;
mod shutdown;
mod static_pods;
mod stats;
mod trust_bundles;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::{Event, Node, Pod, ServiceAccount};
use k8s_openapi::api::rbac::v1::ClusterRoleBinding;
use kube::api::{DeleteParams, ListParams, PostParams};
use kube::{Api, Client};
use runtime::FakeRuntime;
use serde_json::{Value, json};
use skiff_node::NodeConfig;
use tokio_util::sync::CancellationToken;
use tower::ServiceExt;

const NODE: &str = "node-a";
const PATIENCE: Duration = Duration::from_secs(20);

struct World {
    dir: tempfile::TempDir,
    client: Client,
    node_client: Client,
    runtime: FakeRuntime,
    pki: skiff_pki::Pki,
    stop: CancellationToken,
    /// Off: the node does not reach the API.
    api_reachable: Arc<AtomicBool>,
}

impl Drop for World {
    fn drop(&mut self) {
        self.stop.cancel();
    }
}

/// One life of the kubelet; the runtime and the API outlive it.
struct Life {
    stop: CancellationToken,
    task: tokio::task::JoinHandle<Result<(), skiff_node::Error>>,
}

impl Life {
    async fn end(self) {
        self.stop.cancel();
        self.task.await.unwrap().unwrap();
    }
}

impl World {
    async fn new() -> World {
        World::serving(&[]).await
    }

    /// With APIs that are off by default, in the words of `--runtime-config`.
    async fn serving(runtime_config: &[&str]) -> World {
        let dir = tempfile::tempdir().unwrap();
        let store = skiff_store::Embedded::open(dir.path().join("store")).unwrap();
        let pki = skiff_pki::Pki::open(&dir.path().join("pki")).unwrap();
        let (private_key, public_key) = pki.service_account_keys().unwrap();
        let identity = pki
            .serving("apiserver", "kube-apiserver", &["localhost".to_owned()])
            .unwrap();
        let tls = Arc::new(skiff_pki::asking_server_config(&identity, &[]).unwrap());
        let stop = CancellationToken::new();
        let server = skiff_server::Server::start(skiff_server::ServerConfig {
            store: Arc::new(store),
            service_cidr: "10.96.0.0/16".into(),
            node_ports: 30000..=32767,
            runtime_config: skiff_api::facts::RuntimeConfig::parse(runtime_config).unwrap(),
            advertise_address: "192.0.2.1".parse().unwrap(),
            advertise_port: 6443,
            tls,
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
            shutdown: stop.clone(),
        })
        .await
        .unwrap();
        let client_of = |user: &str, group: &str| {
            let user = skiff_auth::UserInfo::new(user, [group, "system:authenticated"]);
            skiff_client::in_process(server.service(user), "default")
        };
        let client = client_of("admin", "system:masters");
        let api_reachable = Arc::new(AtomicBool::new(true));
        let node_client = {
            let user = format!("system:node:{NODE}");
            let user = skiff_auth::UserInfo::new(&user, ["system:nodes", "system:authenticated"]);
            let (service, reachable) = (server.service(user), api_reachable.clone());
            let gated = tower::service_fn(move |request| {
                let (service, reachable) = (service.clone(), reachable.load(Ordering::SeqCst));
                async move {
                    if !reachable {
                        return Err(tower::BoxError::from("connection refused"));
                    }
                    service.oneshot(request).await.map_err(tower::BoxError::from)
                }
            });
            skiff_client::in_process(gated, "default")
        };
        let runtime = FakeRuntime::new();
        runtime.serve(&dir.path().join("cri.sock"), stop.clone()).await;
        let world = World {
            dir,
            client,
            node_client,
            runtime,
            pki,
            stop,
            api_reachable,
        };
        // Controllers would make it; admission wants it.
        let account = serde_json::from_value(json!({"metadata": {"name": "default"}})).unwrap();
        let accounts: Api<ServiceAccount> = Api::namespaced(world.client.clone(), "default");
        accounts.create(&PostParams::default(), &account).await.unwrap();
        // The wiring would make it.
        world
            .grant(
                "system:kubelet-api-admin",
                json!({"kind": "User", "name": "kube-apiserver-kubelet-client"}),
            )
            .await;
        world
    }

    /// Binds a cluster role to a subject.
    async fn grant(&self, role: &str, subject: Value) {
        let name = format!("{role}:{}", subject["name"].as_str().unwrap());
        let group = "rbac.authorization.k8s.io";
        let mut subject = subject;
        if subject["kind"] == "User" {
            subject["apiGroup"] = json!(group);
        }
        let binding = json!({"metadata": {"name": name}, "subjects": [subject],
            "roleRef": {"apiGroup": group, "kind": "ClusterRole", "name": role}});
        let bindings: Api<ClusterRoleBinding> = Api::all(self.client.clone());
        let binding = serde_json::from_value(binding).unwrap();
        bindings.create(&PostParams::default(), &binding).await.unwrap();
    }

    async fn kubelet_port(&self) -> u16 {
        let nodes: Api<Node> = Api::all(self.client.clone());
        let node = serde_json::to_value(nodes.get(NODE).await.unwrap()).unwrap();
        let port = &node["status"]["daemonEndpoints"]["kubeletEndpoint"]["Port"];
        u16::try_from(port.as_u64().unwrap()).unwrap()
    }

    fn start(&self) -> Life {
        self.start_with(|_| {})
    }

    fn start_with(&self, change: impl FnOnce(&mut NodeConfig)) -> Life {
        let identity = self
            .pki
            .serving(
                "kubelet",
                &format!("system:node:{NODE}"),
                &["127.0.0.1".to_owned()],
            )
            .unwrap();
        let endpoint = format!("unix://{}", self.dir.path().join("cri.sock").display());
        let mut config = NodeConfig::new(NODE, self.dir.path().join("node"), endpoint);
        config.node_ips = vec!["192.0.2.7".parse().unwrap()];
        config.server_bind = "127.0.0.1:0".parse().unwrap();
        config.tls_cert_pem = identity.certificate.clone().into_bytes();
        config.tls_key_pem = identity.key.clone().into_bytes();
        config.client_ca_pem = self.pki.ca_certificate().as_bytes().to_vec();
        config.cgroups_per_qos = false;
        change(&mut config);
        let stop = self.stop.child_token();
        let task = tokio::spawn(skiff_node::run(config, self.node_client.clone(), stop.clone()));
        Life { stop, task }
    }

    fn pods(&self) -> Api<Pod> {
        Api::namespaced(self.client.clone(), "default")
    }

    async fn create(&self, name: &str, spec: Value) {
        let mut spec = spec;
        spec["nodeName"] = json!(NODE);
        spec["automountServiceAccountToken"] = json!(false);
        let pod = serde_json::from_value(json!({"metadata": {"name": name}, "spec": spec})).unwrap();
        self.pods().create(&PostParams::default(), &pod).await.unwrap();
    }

    /// Waits until the pod satisfies `wanted`.
    async fn until(&self, name: &str, what: &str, wanted: impl Fn(&Value) -> bool) -> Value {
        let mut last = Value::Null;
        let found = tokio::time::timeout(PATIENCE, async {
            loop {
                if let Some(pod) = self.pods().get_opt(name).await.unwrap() {
                    let pod = serde_json::to_value(pod).unwrap();
                    if wanted(&pod) {
                        return pod;
                    }
                    last = pod;
                }
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        })
        .await;
        found.unwrap_or_else(|_| panic!("{name} was never {what}: {:#}", last["status"]))
    }

    async fn until_gone(&self, name: &str) {
        let gone = tokio::time::timeout(PATIENCE, async {
            while self.pods().get_opt(name).await.unwrap().is_some() {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        });
        gone.await.unwrap_or_else(|_| panic!("{name} was never gone"));
    }

    async fn until_event(&self, reason: &str, message: &str) {
        let api: Api<Event> = Api::all(self.client.clone());
        let mut seen = Vec::new();
        let found = tokio::time::timeout(PATIENCE, async {
            loop {
                let events = api.list(&ListParams::default()).await.unwrap().items;
                seen = events
                    .into_iter()
                    .map(|e| (e.reason.unwrap_or_default(), e.message.unwrap_or_default()))
                    .collect();
                if seen.iter().any(|(r, m)| r == reason && m.contains(message)) {
                    return;
                }
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        });
        if found.await.is_err() {
            panic!("no event {reason}: {message} among {seen:#?}");
        }
    }
}

fn condition<'a>(pod: &'a Value, type_: &str) -> &'a str {
    let list = pod["status"]["conditions"]
        .as_array()
        .map(Vec::as_slice)
        .unwrap_or_default();
    list.iter()
        .find(|c| c["type"] == type_)
        .and_then(|c| c["status"].as_str())
        .unwrap_or("none")
}

fn is_ready(pod: &Value) -> bool {
    pod["status"]["phase"] == "Running" && condition(pod, "Ready") == "True"
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_and_its_pods() {
    let world = World::new().await;
    let life = world.start();
    let nodes: Api<Node> = Api::all(world.client.clone());
    tokio::time::timeout(PATIENCE, async {
        loop {
            let node = nodes.get_opt(NODE).await.unwrap();
            let ready = node.as_ref().and_then(|n| {
                n.status
                    .as_ref()?
                    .conditions
                    .as_ref()?
                    .iter()
                    .find(|c| c.type_ == "Ready")
                    .cloned()
            });
            if ready.is_some_and(|c| c.status == "True") {
                let node = serde_json::to_value(node.unwrap()).unwrap();
                assert_eq!(node["status"]["nodeInfo"]["containerRuntimeVersion"], "fake://1");
                assert_ne!(node["status"]["daemonEndpoints"]["kubeletEndpoint"]["Port"], 0);
                break;
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    })
    .await
    .unwrap();

    // The heartbeat goes with the node.
    let leases: Api<Lease> = Api::namespaced(world.client.clone(), "kube-node-lease");
    let lease = tokio::time::timeout(PATIENCE, async {
        loop {
            if let Some(lease) = leases.get_opt(NODE).await.unwrap() {
                return lease;
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    });
    let owners = lease.await.unwrap().metadata.owner_references.unwrap_or_default();
    let uid = nodes.get(NODE).await.unwrap().metadata.uid.unwrap();
    assert_eq!(owners.len(), 1);
    assert_eq!((owners[0].kind.as_str(), &owners[0].uid), ("Node", &uid));

    // A pod with an init container, a volume and an environment.
    world.create("web", json!({
        "initContainers": [{"name": "prepare", "image": "exit-0:1"}],
        "containers": [{"name": "app", "image": "app:1", "env": [{"name": "IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}],
            "volumeMounts": [{"name": "scratch", "mountPath": "/scratch"}]}],
        "volumes": [{"name": "scratch", "emptyDir": {}}]})).await;
    let pod = world.until("web", "ready", is_ready).await;
    assert!(pod["status"]["podIP"].as_str().unwrap().starts_with("10.9.0."));
    assert_eq!(pod["status"]["hostIP"], "192.0.2.7");
    assert_eq!(
        pod["status"]["initContainerStatuses"][0]["state"]["terminated"]["exitCode"],
        0
    );
    assert_eq!(condition(&pod, "Initialized"), "True");
    assert_eq!(condition(&pod, "PodReadyToStartContainers"), "True");
    world
        .until_event("Pulled", "Container image \"app:1\" already present on machine")
        .await;
    world.until_event("Created", "Container created").await;
    world.until_event("Started", "Container started").await;
    {
        let inner = world.runtime.inner.lock();
        let (_, config, _) = inner
            .containers
            .values()
            .find(|(_, c, _)| c.metadata.as_ref().unwrap().name == "app")
            .unwrap();
        let env = |name: &str| {
            config
                .envs
                .iter()
                .find(|e| e.key == name)
                .map(|e| e.value.clone())
        };
        assert_eq!(
            env("IP").unwrap(),
            pod["status"]["podIP"].as_str().unwrap().as_bytes()
        );
        assert!(env("KUBERNETES_SERVICE_HOST").is_some());
        assert!(config.mounts.iter().any(|m| m.container_path == "/scratch"));
        assert!(config.mounts.iter().any(|m| m.container_path == "/etc/hosts"));
    }

    // A restart of the kubelet leaves everything alone.
    let before = world.runtime.running();
    life.end().await;
    let life = world.start();
    world
        .create(
            "second",
            json!({"containers": [{"name": "app", "image": "app:1"}]}),
        )
        .await;
    world.until("second", "ready", is_ready).await;
    let after = world.runtime.running();
    assert!(
        before.iter().all(|one| after.contains(one)),
        "{before:?} {after:?}"
    );

    // What exits is started again, at first at once and then more slowly.
    let app = after.iter().find(|one| before.contains(one)).unwrap().1.clone();
    world.runtime.exit(&app, 3);
    let pod = world
        .until("web", "restarted", |p| {
            p["status"]["containerStatuses"][0]["restartCount"] == 1 && is_ready(p)
        })
        .await;
    assert_eq!(
        pod["status"]["containerStatuses"][0]["lastState"]["terminated"]["exitCode"],
        3
    );

    // An end with a grace period, confirmed only when nothing is left.
    world
        .pods()
        .delete("web", &DeleteParams::default())
        .await
        .unwrap();
    world.until_gone("web").await;
    world.until_event("Killing", "Stopping container app").await;
    world
        .pods()
        .delete("second", &DeleteParams::default())
        .await
        .unwrap();
    world.until_gone("second").await;
    assert!(world.runtime.running().is_empty());
    tokio::time::timeout(PATIENCE, async {
        while !world.runtime.inner.lock().sandboxes.is_empty() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    })
    .await
    .unwrap();
    life.end().await;
}

/// Each failure is another status, and none of them is a reason to try again sooner.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_container_that_cannot_be_created_is_tried_ever_more_slowly() {
    let world = World::new().await;
    world.runtime.inner.lock().creation_fails = true;
    let life = world.start();
    world
        .create(
            "uncreated",
            json!({"containers": [{"name": "c", "image": "app:1"}]}),
        )
        .await;
    let failures = async || {
        loop {
            let failed_at = world.runtime.inner.lock().failed_at.clone();
            if failed_at.len() >= 4 {
                return failed_at;
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    };
    let failed_at = tokio::time::timeout(PATIENCE, failures()).await.unwrap();
    let pauses: Vec<Duration> = failed_at.windows(2).map(|two| two[1] - two[0]).collect();
    // The first pass is followed by another one, because of the sandbox that it made.
    assert!(
        pauses[1..].iter().sum::<Duration>() >= Duration::from_secs(1),
        "{pauses:?}"
    );
    let waiting = |p: &Value| p["status"]["containerStatuses"][0]["state"]["waiting"].clone();
    let tells = |p: &Value| waiting(p)["reason"] == "CreateContainerError";
    world.until("uncreated", "told", tells).await;
    world.runtime.inner.lock().creation_fails = false;
    world
        .until("uncreated", "running", |p| p["status"]["phase"] == "Running")
        .await;
    life.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pods_that_fail_say_why() {
    let world = World::new().await;
    let life = world.start();
    world
        .create(
            "crash",
            json!({"containers": [{"name": "c", "image": "exit-1:1"}]}),
        )
        .await;
    world
        .create(
            "absent",
            json!({"containers": [{"name": "c", "image": "missing:1"}]}),
        )
        .await;
    world
        .create(
            "job",
            json!({"restartPolicy": "Never", "containers": [{"name": "c", "image": "exit-0:1"}]}),
        )
        .await;
    world
        .create(
            "failed",
            json!({"restartPolicy": "Never", "containers": [{"name": "c", "image": "exit-7:1"}]}),
        )
        .await;
    world.create("unmounted", json!({"containers": [{"name": "c", "image": "app:1", "volumeMounts": [{"name": "v", "mountPath": "/v"}]}],
        "volumes": [{"name": "v", "configMap": {"name": "nowhere"}}]})).await;
    world
        .create(
            "bad-name",
            json!({"containers": [{"name": "c", "image": "UPPER:1"}]}),
        )
        .await;

    let waiting =
        |p: &Value, reason: &str| p["status"]["containerStatuses"][0]["state"]["waiting"]["reason"] == reason;
    let crash = world
        .until("crash", "in back-off", |p| waiting(p, "CrashLoopBackOff"))
        .await;
    let message = crash["status"]["containerStatuses"][0]["state"]["waiting"]["message"]
        .as_str()
        .unwrap();
    assert!(
        message.starts_with("back-off 10s restarting failed container=c pod=crash_default("),
        "{message}"
    );
    assert_eq!(crash["status"]["phase"], "Running");
    world
        .until_event(
            "BackOff",
            "Back-off restarting failed container c in pod crash_default(",
        )
        .await;
    world
        .until("absent", "without an image", |p| {
            waiting(p, "ErrImagePull") || waiting(p, "ImagePullBackOff")
        })
        .await;
    world
        .until_event(
            "Failed",
            "Failed to pull image \"missing:1\": rpc error: code = NotFound desc = no such image missing:1",
        )
        .await;
    world
        .until("job", "done", |p| {
            p["status"]["phase"] == "Succeeded" && condition(p, "Ready") == "False"
        })
        .await;
    let failed = world
        .until("failed", "failed", |p| p["status"]["phase"] == "Failed")
        .await;
    assert_eq!(
        failed["status"]["containerStatuses"][0]["state"]["terminated"]["exitCode"],
        7
    );
    world
        .until_event(
            "FailedMount",
            "MountVolume.SetUp failed for volume \"v\" : configmap \"nowhere\" not found",
        )
        .await;
    world
        .until("bad-name", "refused", |p| waiting(p, "InvalidImageName"))
        .await;
    for name in ["crash", "absent", "job", "failed", "unmounted", "bad-name"] {
        world.pods().delete(name, &DeleteParams::default()).await.unwrap();
    }
    for name in ["crash", "absent", "job", "failed", "unmounted", "bad-name"] {
        world.until_gone(name).await;
    }
    life.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn readiness_follows_the_probe() {
    let world = World::new().await;
    world.runtime.inner.lock().exec_exit_code = 1;
    let life = world.start();
    world
        .create(
            "probed",
            json!({"containers": [{"name": "c", "image": "app:1",
        "readinessProbe": {"exec": {"command": ["check"]}, "periodSeconds": 1, "failureThreshold": 1}}]}),
        )
        .await;
    let pod = world
        .until("probed", "running", |p| p["status"]["phase"] == "Running")
        .await;
    assert_eq!(condition(&pod, "Ready"), "False");
    world
        .until_event("Unhealthy", "Readiness probe failed: said")
        .await;
    world.runtime.inner.lock().exec_exit_code = 0;
    world.until("probed", "ready", is_ready).await;
    world.runtime.inner.lock().exec_exit_code = 1;
    world
        .until("probed", "unready again", |p| condition(p, "Ready") == "False")
        .await;
    life.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pods_nobody_knows_are_ended() {
    let world = World::new().await;
    let life = world.start();
    world
        .create("orphan", json!({"containers": [{"name": "c", "image": "app:1"}]}))
        .await;
    world.until("orphan", "ready", is_ready).await;
    life.end().await;
    // While nobody looks, the object goes.
    let now = DeleteParams {
        grace_period_seconds: Some(0),
        ..Default::default()
    };
    world.pods().delete("orphan", &now).await.unwrap();
    assert_eq!(world.runtime.running().len(), 1);
    let life = world.start();
    tokio::time::timeout(PATIENCE, async {
        while !world.runtime.inner.lock().sandboxes.is_empty() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    })
    .await
    .unwrap();
    assert!(world.runtime.running().is_empty());
    life.end().await;
}

/// One GET to the kubelet's server, as the client that `identity` says.
async fn get(world: &World, port: u16, identity: Option<&skiff_pki::Identity>, path: &str) -> (u16, String) {
    get_with(world, port, identity, None, path).await
}

async fn get_with(
    world: &World,
    port: u16,
    identity: Option<&skiff_pki::Identity>,
    token: Option<&str>,
    path: &str,
) -> (u16, String) {
    send(world, port, identity, token, ("GET", path)).await
}

async fn send(
    world: &World,
    port: u16,
    identity: Option<&skiff_pki::Identity>,
    token: Option<&str>,
    (method, path): (&str, &str),
) -> (u16, String) {
    use http_body_util::BodyExt;
    let config = skiff_pki::client_config(world.pki.ca_certificate(), identity).unwrap();
    let stream = tokio::net::TcpStream::connect(("127.0.0.1", port)).await.unwrap();
    let name = rustls::pki_types::ServerName::try_from("127.0.0.1").unwrap();
    let stream = tokio_rustls::TlsConnector::from(Arc::new(config))
        .connect(name, stream)
        .await
        .unwrap();
    let io = hyper_util::rt::TokioIo::new(stream);
    let (mut sender, connection) = hyper::client::conn::http1::handshake(io).await.unwrap();
    tokio::spawn(connection);
    let mut request = http::Request::builder()
        .method(method)
        .uri(path)
        .header("host", "x");
    if let Some(token) = token {
        request = request.header("authorization", format!("Bearer {token}"));
    }
    let request = request
        .body(http_body_util::Empty::<bytes::Bytes>::new())
        .unwrap();
    let response = sender.send_request(request).await.unwrap();
    let code = response.status().as_u16();
    let body = response.into_body().collect().await.unwrap().to_bytes();
    (code, String::from_utf8(body.to_vec()).unwrap())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_server_knows_its_clients() {
    let world = World::new().await;
    let life = world.start();
    world
        .create("talker", json!({"containers": [{"name": "c", "image": "app:1"}]}))
        .await;
    world.until("talker", "ready", is_ready).await;
    let port = world.kubelet_port().await;
    let path = "/containerLogs/default/talker/c?timestamps=true";
    assert_eq!(
        get(&world, port, None, path).await,
        (401, "Unauthorized".to_owned())
    );
    let stranger = world.pki.client("stranger", "somebody", None).unwrap();
    assert_eq!(get(&world, port, Some(&stranger), path).await.0, 403);
    let api_server = world
        .pki
        .client("api", "kube-apiserver-kubelet-client", None)
        .unwrap();
    let logs = get(&world, port, Some(&api_server), path).await;
    assert_eq!(logs, (200, "2026-01-01T00:00:00.000000000Z hello\n".to_owned()));
    let missing = get(
        &world,
        port,
        Some(&api_server),
        "/containerLogs/default/talker/nobody",
    )
    .await;
    assert_eq!(
        missing,
        (
            404,
            "container \"nobody\" not found in pod \"talker\"\n".to_owned()
        )
    );
    let none = get(
        &world,
        port,
        Some(&api_server),
        "/containerLogs/default/talker/c?previous=true",
    )
    .await;
    assert_eq!(
        none,
        (
            400,
            "previous terminated container \"c\" in pod \"talker\" not found".to_owned()
        )
    );
    assert_eq!(
        get(&world, port, Some(&api_server), "/healthz").await,
        (200, "ok".to_owned())
    );
    let (code, list) = get(&world, port, Some(&api_server), "/runningpods/").await;
    let list: Value = serde_json::from_str(&list).unwrap();
    assert_eq!((code, &list["kind"]), (200, &json!("PodList")));
    let pod = &list["items"][0];
    assert_eq!(
        (&pod["metadata"]["name"], &pod["spec"]["containers"][0]["name"]),
        (&json!("talker"), &json!("c"))
    );
    let (code, logs) = get(&world, port, Some(&api_server), "/logs/").await;
    assert!(code == 200 && logs.contains("<pre>"), "{code} {logs}");
    assert_eq!(get(&world, port, Some(&api_server), "/logs").await.0, 301);
    assert_eq!(get(&world, port, Some(&stranger), "/logs/").await.0, 403);
    let outside = "/logs/..%2F..%2Fetc%2Fpasswd";
    assert_eq!(get(&world, port, Some(&api_server), outside).await.0, 404);
    life.end().await;
}

/// Tokens are reviewed, and what their owners may do is asked, by the node's own identity and the real RBAC.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn service_accounts_read_what_they_may() {
    let world = World::new().await;
    let life = world.start();
    world
        .create("busy", json!({"containers": [{"name": "c", "image": "app:1"}]}))
        .await;
    world.until("busy", "ready", is_ready).await;
    let port = world.kubelet_port().await;
    let accounts: Api<ServiceAccount> = Api::namespaced(world.client.clone(), "default");
    let token = accounts
        .create_token_request("default", &PostParams::default(), &Default::default())
        .await
        .unwrap();
    let token = token.status.unwrap().token.unwrap();
    let read = async |token: &str, path: &str| get_with(&world, port, None, Some(token), path).await;
    assert_eq!(
        read("no.such.token", "/metrics/resource").await,
        (401, "Unauthorized".to_owned())
    );
    let user = "system:serviceaccount:default:default";
    let forbidden = |subresources: &str| {
        let text =
            format!("Forbidden (user={user}, verb=get, resource=nodes, subresource(s)=[{subresources}])\n");
        (403, text)
    };
    assert_eq!(read(&token, "/stats/summary").await, forbidden("stats"));
    let account = json!({"kind": "ServiceAccount", "name": "default", "namespace": "default"});
    world.grant("system:monitoring", account).await;
    let (code, page) = read(&token, "/metrics/resource").await;
    assert_eq!(code, 200, "{page}");
    for sample in [
        "container_cpu_usage_seconds_total{container=\"c\",namespace=\"default\",pod=\"busy\"} 2.5 5\n",
        "pod_memory_working_set_bytes{namespace=\"default\",pod=\"busy\"} 4096 5\n",
        "container_start_time_seconds{container=\"c\",namespace=\"default\",pod=\"busy\"} ",
        "resource_scrape_error 0\n",
    ] {
        assert!(page.contains(sample), "{sample} is not in\n{page}");
    }
    assert_eq!(read(&token, "/pods").await, forbidden("pods proxy"));
    assert_eq!(read(&token, "/exec/default/busy/c").await, forbidden("proxy"));
    let admin = world
        .pki
        .client("admin", "somebody", Some("system:masters"))
        .unwrap();
    let (code, summary) = get(&world, port, Some(&admin), "/stats/summary").await;
    let summary: Value = serde_json::from_str(&summary).unwrap();
    let container = &summary["pods"][0]["containers"][0];
    assert_eq!(
        (code, &container["memory"]["workingSetBytes"]),
        (200, &json!(4096))
    );
    life.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pod_that_does_not_fit_is_refused() {
    let world = World::new().await;
    let life = world.start();
    world.create("huge", json!({"containers": [{"name": "c", "image": "app:1", "resources": {"requests": {"cpu": "1000000"}}}]})).await;
    let pod = world
        .until("huge", "refused", |p| p["status"]["phase"] == "Failed")
        .await;
    assert_eq!(pod["status"]["reason"], "OutOfcpu");
    let message = pod["status"]["message"].as_str().unwrap();
    assert!(
        message.starts_with("Pod was rejected: Node didn't have enough resource: cpu, requested: 1000000000"),
        "{message}"
    );
    assert!(world.runtime.running().is_empty());
    life.end().await;
}

/// What admission allows a pod because of a field must be true on the node, or the pod does not run.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pod_that_cannot_be_confined_is_refused() {
    let world = World::new().await;
    let life = world.start();
    let container = json!([{"name": "app", "image": "app:1"}]);
    let refused = [
        (
            "sysctl",
            json!({"securityContext": {"sysctls": [{"name": "kernel.msgmax", "value": "1"}]}}),
            "SysctlForbidden",
            "forbidden sysctl: \"kernel.msgmax\" not allowlisted",
        ),
        (
            "apparmor",
            json!({"securityContext": {"appArmorProfile": {"type": "RuntimeDefault"}}}),
            "AppArmor",
            "Cannot enforce AppArmor: AppArmor is not enabled on the host",
        ),
    ];
    let has_app_armor = std::path::Path::new("/sys/kernel/security/apparmor").exists();
    for (name, spec, reason, message) in refused {
        if reason == "AppArmor" && has_app_armor {
            continue;
        }
        let mut spec = spec;
        spec["containers"] = container.clone();
        world.create(name, spec).await;
        let failed = |pod: &Value| pod["status"]["phase"] == "Failed";
        let pod = world.until(name, "refused", failed).await;
        assert_eq!(pod["status"]["reason"], reason);
        assert_eq!(pod["status"]["message"], format!("Pod was rejected: {message}"));
        assert_eq!(pod["status"]["containerStatuses"], Value::Null);
        world.until_event(reason, message).await;
    }
    let spec = json!({"hostUsers": false, "containers": [
        {"name": "app", "image": "app:1", "securityContext": {"procMount": "Unmasked"}}]});
    world.create("own-users", spec).await;
    let message = "Failed to create pod sandbox: can't set `spec.hostUsers: false`, runtime does not support user namespaces";
    world.until_event("FailedCreatePodSandBox", message).await;
    let pod = world.pods().get("own-users").await.unwrap();
    assert_eq!(pod.status.unwrap().phase.as_deref(), Some("Pending"));
    assert!(world.runtime.running().is_empty());
    life.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pod_for_another_node_is_refused() {
    let world = World::new().await;
    let life = world.start();
    let nodes: Api<Node> = Api::all(world.client.clone());
    let registered = async {
        while nodes.get_opt(NODE).await.unwrap().is_none() {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    tokio::time::timeout(PATIENCE, registered).await.unwrap();
    let containers = json!([{"name": "c", "image": "app:1"}]);
    world
        .create(
            "elsewhere",
            json!({"nodeSelector": {"disk": "ssd"}, "containers": containers}),
        )
        .await;
    let pod = world
        .until("elsewhere", "refused", |p| p["status"]["phase"] == "Failed")
        .await;
    assert_eq!(pod["status"]["reason"], "NodeAffinity");
    assert_eq!(
        pod["status"]["message"],
        "Pod was rejected: Predicate NodeAffinity failed: node(s) didn't match Pod's node affinity/selector"
    );
    // The API's labels count, even if they came a moment ago.
    let labels = kube::api::Patch::Merge(json!({"metadata": {"labels": {"disk": "ssd"}}}));
    nodes.patch(NODE, &Default::default(), &labels).await.unwrap();
    world
        .create(
            "here",
            json!({"nodeSelector": {"disk": "ssd"}, "containers": containers}),
        )
        .await;
    world.until("here", "running", is_ready).await;
    life.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_root_image_is_refused_where_root_is() {
    let world = World::new().await;
    let life = world.start();
    world
        .create(
            "rooted",
            json!({"securityContext": {"runAsNonRoot": true}, "containers": [{"name": "c", "image": "root:1"}]}),
        )
        .await;
    let pod = world
        .until("rooted", "refused", |p| {
            p["status"]["containerStatuses"][0]["state"]["waiting"]["reason"] == "CreateContainerConfigError"
        })
        .await;
    let message = pod["status"]["containerStatuses"][0]["state"]["waiting"]["message"]
        .as_str()
        .unwrap();
    assert!(
        message.starts_with("container has runAsNonRoot and image will run as root (pod: \"rooted_default("),
        "{message}"
    );
    assert!(world.runtime.running().is_empty());
    // A user that the pod names is enough.
    world
        .create(
            "named",
            json!({"securityContext": {"runAsNonRoot": true, "runAsUser": 1000},
                "containers": [{"name": "c", "image": "root:1"}]}),
        )
        .await;
    world.until("named", "running", is_ready).await;
    life.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_container_that_keeps_failing_its_probe_waits_ever_longer() {
    let world = World::new().await;
    world.runtime.inner.lock().exec_exit_code = 1;
    let life = world.start();
    world
        .create(
            "sick",
            json!({"terminationGracePeriodSeconds": 1, "containers": [{"name": "c", "image": "app:1",
                "livenessProbe": {"exec": {"command": ["check"]}, "periodSeconds": 1, "failureThreshold": 1}}]}),
        )
        .await;
    let pod = world
        .until("sick", "in back-off", |p| {
            p["status"]["containerStatuses"][0]["state"]["waiting"]["reason"] == "CrashLoopBackOff"
        })
        .await;
    let status = &pod["status"]["containerStatuses"][0];
    assert!(status["restartCount"].as_i64().unwrap() >= 1, "{status}");
    let message = status["state"]["waiting"]["message"].as_str().unwrap();
    assert!(
        message.starts_with("back-off 10s restarting failed container=c pod=sick_default("),
        "{message}"
    );
    world
        .until_event("Killing", "Container c failed liveness probe, will be restarted")
        .await;
    life.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pod_that_fills_its_volume_is_evicted() {
    let world = World::new().await;
    let life = world.start();
    world
        .create(
            "greedy",
            json!({"containers": [{"name": "c", "image": "app:1", "volumeMounts": [{"name": "v", "mountPath": "/v"}]}],
                "volumes": [{"name": "v", "emptyDir": {"sizeLimit": "64Ki"}}]}),
        )
        .await;
    let pod = world.until("greedy", "running", is_ready).await;
    let volume = world
        .dir
        .path()
        .join("node/pods")
        .join(pod["metadata"]["uid"].as_str().unwrap())
        .join("volumes/kubernetes.io~empty-dir/v");
    std::fs::write(volume.join("f"), vec![1; 128 * 1024]).unwrap();
    let pod = world
        .until("greedy", "evicted", |p| p["status"]["phase"] == "Failed")
        .await;
    assert_eq!(pod["status"]["reason"], "Evicted");
    let message = "Usage of EmptyDir volume \"v\" exceeds the limit \"64Ki\". ";
    assert_eq!(pod["status"]["message"], message);
    world.until_event("Evicted", message.trim_end()).await;
    assert!(world.runtime.running().is_empty());
    life.end().await;
}
