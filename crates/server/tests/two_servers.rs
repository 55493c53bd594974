//! Two API servers over one store, and a third one that is killed: no address or port is given out twice, whatever is cut
//! off, and nothing is left behind after a repair.

#![allow(clippy::unwrap_used)]

#[path = "../../store/tests/suite/cluster.rs"]
mod etcd;
mod support;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use http::Request;
use http_body_util::Full;
use jiff::{SignedDuration, Timestamp};
use serde_json::{Value, json};
use skiff_store::{
    Embedded, Error, Expect, KeyValue, Op, Outcome, RangeResult, Store, Transacted, Watch, Write,
};
use support::Cluster;
use tower::ServiceExt;

const SERVICES: &str = "/api/v1/namespaces/default/services";
const IP_ADDRESSES: &str = "/apis/networking.k8s.io/v1/ipaddresses";
const PORTS: std::ops::RangeInclusive<u16> = 30000..=30249;

async fn start(store: Arc<dyn Store>) -> Arc<Cluster> {
    let cluster = Cluster::adjusted_on(store, |config, _, _| {
        config.service_cidr = "10.96.0.0/23,fd00:10:96::/112".to_owned();
        config.node_ports = PORTS;
    });
    Arc::new(cluster.await)
}

/// A store that is gone after so many writes: what is asked of it then never happens.
struct Mortal {
    inner: Arc<dyn Store>,
    writes_left: AtomicI64,
}

impl Mortal {
    fn live(&self) -> skiff_store::Result<()> {
        match self.writes_left.load(Ordering::Relaxed) {
            0.. => Ok(()),
            _ => Err(Error::Unavailable("the process is dead".to_owned())),
        }
    }

    fn spend(&self) -> skiff_store::Result<()> {
        self.writes_left.fetch_sub(1, Ordering::Relaxed);
        self.live()
    }
}

#[async_trait]
impl Store for Mortal {
    async fn get(&self, key: &str) -> skiff_store::Result<(Option<KeyValue>, i64)> {
        self.live()?;
        self.inner.get(key).await
    }

    async fn range(
        &self,
        prefix: &str,
        start_after: Option<&str>,
        limit: usize,
        at: Option<i64>,
    ) -> skiff_store::Result<RangeResult> {
        self.live()?;
        self.inner.range(prefix, start_after, limit, at).await
    }

    async fn write(
        &self,
        key: &str,
        expect: Expect,
        op: Op,
        lease_seconds: Option<i64>,
    ) -> skiff_store::Result<Outcome> {
        self.spend()?;
        self.inner.write(key, expect, op, lease_seconds).await
    }

    async fn transact(&self, writes: Vec<Write>) -> skiff_store::Result<Transacted> {
        self.spend()?;
        self.inner.transact(writes).await
    }

    async fn watch(&self, prefix: &str, from: i64) -> skiff_store::Result<Watch> {
        self.live()?;
        self.inner.watch(prefix, from).await
    }

    async fn compact(&self, revision: i64) -> skiff_store::Result<()> {
        self.inner.compact(revision).await
    }

    fn compacted(&self) -> i64 {
        self.inner.compacted()
    }

    async fn revision(&self) -> skiff_store::Result<i64> {
        self.live()?;
        self.inner.revision().await
    }

    async fn health(&self) -> skiff_store::Result<()> {
        self.live()?;
        self.inner.health().await
    }

    async fn is_stale(&self, key: &str) -> skiff_store::Result<bool> {
        self.inner.is_stale(key).await
    }

    async fn size(&self) -> skiff_store::Result<u64> {
        self.inner.size().await
    }
}

/// One request that may be cut: by the server after the timeout that it is told, or because the client goes away.
async fn cut(cluster: &Cluster, method: &str, uri: String, kind: &str, body: Value) {
    let after = Duration::from_micros(rand::random_range(0..8000));
    let (uri, gives_up) = match rand::random_range(0..4) {
        0 | 1 => (uri, None),
        2 => (format!("{uri}?timeout={}us", after.as_micros()), None),
        _ => (uri, Some(after)),
    };
    let request = Request::builder()
        .method(method)
        .uri(uri)
        .header("content-type", kind)
        .body(Full::new(Bytes::from(body.to_string())))
        .unwrap();
    let answer = cluster.admin().oneshot(request);
    match gives_up {
        Some(after) => drop(tokio::time::timeout(after, answer).await),
        None => drop(answer.await),
    }
}

fn random_spec() -> Value {
    let ports = json!([{"port": 80}]);
    let policy = ["SingleStack", "PreferDualStack"][rand::random_range(0..2)];
    match rand::random_range(0..6) {
        0 | 1 => json!({"ports": ports, "ipFamilyPolicy": policy}),
        2 | 3 => json!({"ports": ports, "ipFamilyPolicy": policy, "type": "NodePort"}),
        4 => {
            let address = format!("10.96.0.{}", rand::random_range(2..30));
            json!({"ports": ports, "clusterIP": address})
        }
        _ => json!({"ports": ports, "type": "LoadBalancer", "externalTrafficPolicy": "Local"}),
    }
}

fn random_change() -> Value {
    match rand::random_range(0..4) {
        0 => {
            json!({"spec": {"type": "ClusterIP", "externalTrafficPolicy": null, "healthCheckNodePort": null}})
        }
        1 => json!({"spec": {"type": "NodePort"}}),
        2 => json!({"spec": {"ipFamilyPolicy": "SingleStack"}}),
        _ => json!({"spec": {"ipFamilyPolicy": "PreferDualStack"}}),
    }
}

async fn storm(servers: &[Arc<Cluster>], clients: usize, requests: usize) {
    let mut tasks = tokio::task::JoinSet::new();
    for server in servers {
        for _ in 0..clients {
            let server = server.clone();
            tasks.spawn(async move {
                for _ in 0..requests {
                    let name = format!("s{}", rand::random_range(0..120));
                    let one = format!("{SERVICES}/{name}");
                    let merge = "application/merge-patch+json";
                    let (method, uri, content, body) = match rand::random_range(0..9) {
                        0..=4 => {
                            let service = json!({"metadata": {"name": name}, "spec": random_spec()});
                            ("POST", SERVICES.to_owned(), "application/json", service)
                        }
                        5 | 6 => ("PATCH", one, merge, random_change()),
                        _ => ("DELETE", one, "application/json", json!({})),
                    };
                    cut(&server, method, uri, content, body).await;
                }
            });
        }
    }
    tasks.join_all().await;
}

/// What services hold: addresses and ports, each of one service.
async fn held(cluster: &Cluster) -> (BTreeSet<String>, BTreeSet<u16>) {
    let listed = cluster.get("/api/v1/services").await.json;
    let (mut addresses, mut ports) = (BTreeMap::new(), BTreeMap::new());
    for service in listed["items"].as_array().unwrap() {
        let name = service["metadata"]["name"].as_str().unwrap().to_owned();
        for address in service["spec"]["clusterIPs"].as_array().unwrap() {
            let address = address.as_str().unwrap().to_owned();
            let other = addresses.insert(address.clone(), name.clone());
            assert_eq!(other, None, "{name} has the same cluster IP {address}");
        }
        let listed = service["spec"]["ports"].as_array().unwrap().iter();
        let node = listed.filter_map(|port| port["nodePort"].as_u64());
        for port in node.chain(service["spec"]["healthCheckNodePort"].as_u64()) {
            let other = ports.insert(port as u16, name.clone());
            assert_eq!(other, None, "{name} has the same node port {port}");
        }
    }
    (addresses.into_keys().collect(), ports.into_keys().collect())
}

/// What the store says is allocated.
async fn allocated(cluster: &Cluster) -> (BTreeSet<String>, BTreeSet<u16>) {
    let listed = cluster.get(IP_ADDRESSES).await.json;
    let names = listed["items"].as_array().unwrap().iter();
    let addresses = names
        .map(|item| item["metadata"]["name"].as_str().unwrap().to_owned())
        .collect();
    // The last field of the record is the number whose bits are the ports.
    let (found, _) = cluster
        .store
        .get("/registry/ranges/servicenodeports")
        .await
        .unwrap();
    let value = found.unwrap().value;
    let text = format!("{}-{}", PORTS.start(), PORTS.end());
    let at = value.windows(text.len()).position(|part| part == text.as_bytes());
    let data = &value[at.unwrap() + text.len()..];
    let size = usize::from(data[1]);
    assert!(data[0] == 0x1a && size < 128);
    let mut ports = BTreeSet::new();
    for (nth, byte) in data[2..2 + size].iter().rev().enumerate() {
        let bits = (0..8).filter(|bit| byte & (1 << bit) != 0);
        ports.extend(bits.map(|bit| PORTS.start() + (nth * 8 + bit) as u16));
    }
    (addresses, ports)
}

async fn quiet(cluster: &Cluster) {
    loop {
        let before = cluster.store.revision().await.unwrap();
        tokio::time::sleep(Duration::from_millis(500)).await;
        if cluster.store.revision().await.unwrap() == before {
            return;
        }
    }
}

async fn weather(stores: [Arc<dyn Store>; 3], clients: usize, requests: usize) {
    let [one, two, three] = stores;
    let mortal = Arc::new(Mortal {
        inner: three,
        writes_left: AtomicI64::new(i64::MAX),
    });
    // At the same moment: each makes what every cluster has.
    let (one, two, three) = tokio::join!(start(one), start(two), start(mortal.clone()));
    let lifetime = (clients * requests / 4) as i64;
    mortal.writes_left.store(lifetime, Ordering::Relaxed);
    storm(&[one.clone(), two.clone(), three], clients, requests).await;
    assert!(mortal.live().is_err(), "it was to die in the middle");
    quiet(&one).await;
    let seen = held(&one).await;
    assert!(seen.0.len() > 20 && seen.1.len() > 5, "{seen:?}");
    let (addresses, ports) = allocated(&one).await;
    // What the dead server left, and nothing that a service has.
    assert!(
        addresses.is_superset(&seen.0),
        "{addresses:?} lacks some of {seen:?}"
    );
    assert_eq!(ports, seen.1, "ports are written with their service");
    let leaked = addresses.len() - seen.0.len();
    // Both at once, as ever.
    let now = Timestamp::now();
    let (first, second) = tokio::join!(
        one.server.repair_allocations(now),
        two.server.repair_allocations(now)
    );
    first.unwrap();
    second.unwrap();
    let left = allocated(&one).await;
    assert!(
        left.0.is_superset(&seen.0) && left.1 == seen.1,
        "{left:?} for {seen:?}"
    );
    let later = now + SignedDuration::from_secs(61);
    let (first, second) = tokio::join!(
        one.server.repair_allocations(later),
        two.server.repair_allocations(later)
    );
    first.unwrap();
    second.unwrap();
    assert_eq!(held(&two).await, seen);
    assert_eq!(
        allocated(&two).await,
        seen,
        "{leaked} were left by the dead server"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn servers_over_one_embedded_store() {
    let dir = tempfile::tempdir().unwrap();
    let store: Arc<dyn Store> = Arc::new(Embedded::open(dir.path().join("store")).unwrap());
    weather([store.clone(), store.clone(), store], 16, 100).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn servers_over_one_etcd() {
    let members = etcd::Cluster::new(1, None);
    let stores = tokio::join!(members.open(), members.open(), members.open());
    weather(
        [Arc::new(stores.0), Arc::new(stores.1), Arc::new(stores.2)],
        12,
        60,
    )
    .await;
}

/// Services that want all ports there are: each gets one, until there are none.
#[tokio::test(flavor = "multi_thread")]
async fn the_last_port_is_given_once() {
    let dir = tempfile::tempdir().unwrap();
    let store: Arc<dyn Store> = Arc::new(Embedded::open(dir.path().join("store")).unwrap());
    let (one, two) = tokio::join!(start(store.clone()), start(store.clone()));
    let mut tasks = tokio::task::JoinSet::new();
    for n in 0..300 {
        let server = if n % 2 == 0 { one.clone() } else { two.clone() };
        tasks.spawn(async move {
            let spec = json!({"type": "NodePort", "ports": [{"port": 80}]});
            let service = json!({"metadata": {"name": format!("s{n}")}, "spec": spec});
            let reply = server.post(SERVICES, service).await;
            if reply.code != 201 {
                let why = "failed to allocate a nodePort: range is full";
                assert!(reply.text.contains(why), "{}", reply.text);
            }
            reply.code == 201
        });
    }
    let made = tasks.join_all().await.into_iter().filter(|made| *made).count();
    assert_eq!(made, PORTS.len());
    assert_eq!(held(&one).await, allocated(&two).await);
}

fn address_of(name: &str, service: &str) -> Value {
    json!({"apiVersion": "networking.k8s.io/v1", "kind": "IPAddress",
        "metadata": {"name": name, "labels": {"ipaddress.kubernetes.io/ip-family": "IPv4",
            "ipaddress.kubernetes.io/managed-by": "ipallocator.k8s.io"}},
        "spec": {"parentRef": {"resource": "services", "namespace": "default", "name": service}}})
}

async fn code(cluster: &Cluster, name: &str) -> u16 {
    cluster.get(&format!("{IP_ADDRESSES}/{name}")).await.code
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_wrong_is_repaired() {
    let dir = tempfile::tempdir().unwrap();
    let store: Arc<dyn Store> = Arc::new(Embedded::open(dir.path().join("store")).unwrap());
    let one = start(store.clone()).await;
    let young = "10.96.0.40";
    let made = one.post(IP_ADDRESSES, address_of(young, "to-come")).await;
    assert_eq!(made.code, 201, "{}", made.text);
    // Somebody else's own.
    let mut foreign = address_of("10.96.0.41", "none");
    foreign["metadata"]["labels"] = json!({});
    assert_eq!(one.post(IP_ADDRESSES, foreign).await.code, 201);
    // A server that starts does not take it for a leak.
    let two = start(store).await;
    let now = Timestamp::now();
    two.server.repair_allocations(now).await.unwrap();
    assert_eq!(code(&one, young).await, 200);
    let service = json!({"metadata": {"name": "a"}, "spec": {"clusterIP": young, "ports": [{"port": 80}]}});
    let refused = one.post(SERVICES, service).await;
    assert!(
        refused.text.contains("provided IP is already allocated"),
        "{}",
        refused.text
    );
    let later = now + SignedDuration::from_secs(61);
    two.server.repair_allocations(later).await.unwrap();
    assert_eq!(
        (code(&one, young).await, code(&one, "10.96.0.41").await),
        (404, 200)
    );
    // One that a user deletes comes back.
    let service =
        json!({"metadata": {"name": "a"}, "spec": {"clusterIP": "10.96.0.9", "ports": [{"port": 80}]}});
    assert_eq!(one.post(SERVICES, service).await.code, 201);
    let gone = one.delete(&format!("{IP_ADDRESSES}/10.96.0.9"), json!({})).await;
    assert_eq!(gone.code, 200, "{}", gone.text);
    let back = async {
        while code(&one, "10.96.0.9").await != 200 {
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(30), back).await.unwrap();
    let events = one.get("/api/v1/namespaces/default/events").await.text;
    assert!(events.contains("ClusterIPNotAllocated"), "{events}");
    // It goes with its service, and stays gone.
    assert_eq!(one.delete(&format!("{SERVICES}/a"), json!({})).await.code, 200);
    tokio::time::sleep(Duration::from_millis(300)).await;
    assert_eq!(code(&one, "10.96.0.9").await, 404);
}
