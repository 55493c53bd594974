//! Requests that are cut at random moments, by `?timeout=` and by clients that go away. Whatever was handed to the
//! store is finished and accounted for: no two services share an address or a port, none is lost, no delete stays
//! half done, and no quota counts less than there is.

#![allow(clippy::unwrap_used)]

#[path = "../../store/tests/suite/cluster.rs"]
mod etcd;
mod support;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use http::Request;
use http_body_util::Full;
use serde_json::{Value, json};
use skiff_store::{
    Embedded, Error, Expect, KeyValue, Op, Outcome, RangeResult, Store, Transacted, Watch, Write,
};
use support::{Cluster, Reply};
use tower::ServiceExt;

const SERVICES: &str = "/api/v1/namespaces/default/services";
const PODS: &str = "/api/v1/namespaces/default/pods";
const MAPS: &str = "/api/v1/namespaces/default/configmaps";
const QUOTAS: &str = "/api/v1/namespaces/default/resourcequotas";
/// Few, so that what is given back is soon taken again.
const PORTS: usize = 60;
const ADDRESSES: usize = 126;

async fn start(store: Arc<dyn Store>) -> Arc<Cluster> {
    let cluster = Cluster::adjusted_on(store, |config, _, _| {
        config.service_cidr = "10.96.0.0/25".to_owned();
        config.node_ports = 30000..=30059;
    });
    Arc::new(cluster.await)
}

fn service(name: &str, kind: &str) -> Value {
    json!({"metadata": {"name": name}, "spec": {"type": kind, "ports": [{"port": 80}]}})
}

/// One request that may be cut: by the server after the timeout that it is told, or because the client goes away.
async fn cut(cluster: &Cluster, method: &str, uri: String, kind: &str, body: Value) {
    let after = Duration::from_micros(rand::random_range(0..5000));
    let (uri, gives_up) = match rand::random_range(0..3) {
        0 => (uri, None),
        1 => (format!("{uri}?timeout={}us", after.as_micros()), None),
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

async fn storm(cluster: &Arc<Cluster>, clients: usize, requests: usize) {
    let mut tasks = tokio::task::JoinSet::new();
    for client in 0..clients {
        let cluster = cluster.clone();
        tasks.spawn(async move {
            for n in 0..requests {
                let name = format!("s{}", rand::random_range(0..50));
                let one = format!("{SERVICES}/{name}");
                let merge = "application/merge-patch+json";
                let kind = ["ClusterIP", "NodePort"][rand::random_range(0..2)];
                let (method, uri, content, body) = match rand::random_range(0..9) {
                    0..=3 => (
                        "POST",
                        SERVICES.to_owned(),
                        "application/json",
                        service(&name, kind),
                    ),
                    4 => ("PATCH", one, merge, json!({"spec": {"type": kind}})),
                    5 | 6 => ("DELETE", one, "application/json", json!({})),
                    7 => {
                        let name = format!("p{}", rand::random_range(0..10));
                        let spec = json!({"containers": [{"name": "c", "image": "i"}]});
                        let pod = json!({"metadata": {"name": name}, "spec": spec});
                        match rand::random_range(0..2) {
                            0 => ("POST", PODS.to_owned(), "application/json", pod),
                            _ => ("DELETE", format!("{PODS}/{name}"), "application/json", json!({})),
                        }
                    }
                    _ => {
                        let map = json!({"metadata": {"name": format!("m{client}-{n}")}});
                        ("POST", MAPS.to_owned(), "application/json", map)
                    }
                };
                cut(&cluster, method, uri, content, body).await;
            }
        });
    }
    tasks.join_all().await;
}

/// The services by what they hold.
async fn held(cluster: &Cluster) -> (BTreeMap<String, String>, BTreeMap<i64, String>) {
    let listed = cluster.get("/api/v1/services").await.json;
    let (mut addresses, mut ports) = (BTreeMap::new(), BTreeMap::new());
    for service in listed["items"].as_array().unwrap() {
        let name = service["metadata"]["name"].as_str().unwrap();
        let address = service["spec"]["clusterIP"].as_str().unwrap();
        let other = addresses.insert(address.to_owned(), name.to_owned());
        assert_eq!(other, None, "{name} has the same cluster IP {address}");
        for port in service["spec"]["ports"].as_array().unwrap() {
            if let Some(node) = port["nodePort"].as_i64() {
                let other = ports.insert(node, name.to_owned());
                assert_eq!(other, None, "{name} has the same node port {node}");
            }
        }
    }
    (addresses, ports)
}

async fn fill(cluster: &Cluster, kind: &str) -> Reply {
    for n in 0.. {
        let reply = cluster
            .post(
                SERVICES,
                service(&format!("fill-{kind}-{n}").to_lowercase(), kind),
            )
            .await;
        if reply.code != 201 {
            return reply;
        }
    }
    unreachable!()
}

async fn check(cluster: &Cluster) {
    // What was cut is still under way for a moment; a write of our own comes after it.
    let settled = async {
        loop {
            let before = cluster.store.revision().await.unwrap();
            tokio::time::sleep(Duration::from_millis(300)).await;
            let listed = cluster.get("/apis/networking.k8s.io/v1/ipaddresses").await.json;
            let shown = listed["items"].as_array().unwrap().iter();
            let shown: BTreeSet<String> = shown
                .map(|item| item["metadata"]["name"].as_str().unwrap().to_owned())
                .collect();
            let (addresses, _) = held(cluster).await;
            let same = shown.iter().eq(addresses.keys().collect::<BTreeSet<_>>());
            if same && cluster.store.revision().await.unwrap() == before {
                return;
            }
        }
    };
    let settled = tokio::time::timeout(Duration::from_secs(60), settled).await;
    settled.expect("the IPAddress objects are those of the services");
    for pod in cluster.get(PODS).await.json["items"].as_array().unwrap() {
        let deleted = &pod["metadata"]["deletionTimestamp"];
        assert!(deleted.is_null(), "a delete was left half done: {pod}");
    }
    let maps = cluster.get(MAPS).await.json["items"].as_array().unwrap().len() as u64;
    let quota = cluster.get(&format!("{QUOTAS}/maps")).await.json;
    let used: u64 = quota["status"]["used"]["configmaps"]
        .as_str()
        .unwrap()
        .parse()
        .unwrap();
    assert!(used >= maps, "{used} of {maps} are counted");
    assert!(maps > 0);

    // Nothing is lost either: what no service holds can be had.
    let full = fill(cluster, "NodePort").await;
    assert!(
        full.text.contains("failed to allocate a nodePort: range is full"),
        "{}",
        full.text
    );
    assert_eq!(held(cluster).await.1.len(), PORTS);
    let full = fill(cluster, "ClusterIP").await;
    assert!(
        full.text.contains("failed to allocate a serviceIP"),
        "{}",
        full.text
    );
    assert_eq!(held(cluster).await.0.len(), ADDRESSES);
}

async fn weather(store: Arc<dyn Store>, requests: usize) {
    let cluster = start(store).await;
    let quota = json!({"metadata": {"name": "maps"}, "spec": {"hard": {"configmaps": "1000000"}}});
    let made = cluster.post(QUOTAS, quota).await;
    assert_eq!(made.code, 201, "{}", made.text);
    let status = json!({"status": {"hard": {"configmaps": "1000000"}, "used": {"configmaps": "0"}}});
    let uri = format!("{QUOTAS}/maps/status");
    assert_eq!(cluster.patch(&uri, "merge-patch", status).await.code, 200);
    storm(&cluster, 24, requests).await;
    check(&cluster).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_embedded_store_accounts_for_cut_requests() {
    let dir = tempfile::tempdir().unwrap();
    weather(Arc::new(Embedded::open(dir.path().join("store")).unwrap()), 150).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn etcd_accounts_for_cut_requests() {
    let members = etcd::Cluster::new(1, None);
    weather(Arc::new(members.open().await), 80).await;
}

/// A store that loses the answers of some writes of services, before or after it carries them out.
struct Lossy {
    inner: Embedded,
    on: AtomicBool,
    lost: AtomicUsize,
}

#[async_trait]
impl Store for Lossy {
    async fn get(&self, key: &str) -> skiff_store::Result<(Option<KeyValue>, i64)> {
        self.inner.get(key).await
    }

    async fn range(
        &self,
        prefix: &str,
        start_after: Option<&str>,
        limit: usize,
        at: Option<i64>,
    ) -> skiff_store::Result<RangeResult> {
        self.inner.range(prefix, start_after, limit, at).await
    }

    async fn write(
        &self,
        key: &str,
        expect: Expect,
        op: Op,
        lease_seconds: Option<i64>,
    ) -> skiff_store::Result<Outcome> {
        self.inner.write(key, expect, op, lease_seconds).await
    }

    async fn transact(&self, writes: Vec<Write>) -> skiff_store::Result<Transacted> {
        let of_service = |write: &Write| write.key.starts_with("/registry/services/specs/");
        let lossy = self.on.load(Ordering::Relaxed) && writes.iter().any(of_service);
        let lose = |when| {
            self.lost.fetch_add(1, Ordering::Relaxed);
            Err(Error::Unavailable(format!("lost {when}")))
        };
        if lossy && rand::random_range(0..4) == 0 {
            return lose("before it was carried out");
        }
        let outcome = self.inner.transact(writes).await?;
        if lossy && rand::random_range(0..4) == 0 {
            return lose("after it was carried out");
        }
        Ok(outcome)
    }

    async fn watch(&self, prefix: &str, from: i64) -> skiff_store::Result<Watch> {
        self.inner.watch(prefix, from).await
    }

    async fn compact(&self, revision: i64) -> skiff_store::Result<()> {
        self.inner.compact(revision).await
    }

    fn compacted(&self) -> i64 {
        self.inner.compacted()
    }

    async fn revision(&self) -> skiff_store::Result<i64> {
        self.inner.revision().await
    }

    async fn health(&self) -> skiff_store::Result<()> {
        self.inner.health().await
    }

    async fn is_stale(&self, key: &str) -> skiff_store::Result<bool> {
        self.inner.is_stale(key).await
    }

    async fn size(&self) -> skiff_store::Result<u64> {
        self.inner.size().await
    }
}

/// What a write of unknown outcome took is not given to others.
#[tokio::test(flavor = "multi_thread")]
async fn an_unknown_outcome_keeps_what_it_took() {
    let dir = tempfile::tempdir().unwrap();
    let store = Arc::new(Lossy {
        inner: Embedded::open(dir.path().join("store")).unwrap(),
        on: AtomicBool::new(false),
        lost: AtomicUsize::new(0),
    });
    let cluster = start(store.clone()).await;
    store.on.store(true, Ordering::Relaxed);
    for n in 0..40 {
        cluster
            .post(SERVICES, service(&format!("s{n}"), "NodePort"))
            .await;
        if n % 2 == 1 {
            cluster.delete(&format!("{SERVICES}/s{}", n - 1), json!({})).await;
        }
    }
    store.on.store(false, Ordering::Relaxed);
    assert!(store.lost.load(Ordering::Relaxed) > 5);
    let full = fill(&cluster, "NodePort").await;
    assert!(full.text.contains("range is full"), "{}", full.text);
    held(&cluster).await;
}

/// A client whose write was carried out without an answer is not told that somebody else's was first.
#[tokio::test(flavor = "multi_thread")]
async fn an_unknown_outcome_is_no_conflict() {
    let dir = tempfile::tempdir().unwrap();
    let store = Arc::new(Lossy {
        inner: Embedded::open(dir.path().join("store")).unwrap(),
        on: AtomicBool::new(false),
        lost: AtomicUsize::new(0),
    });
    let cluster = start(store.clone()).await;
    assert_eq!(
        cluster.post(SERVICES, service("one", "ClusterIP")).await.code,
        201
    );
    let uri = format!("{SERVICES}/one");
    let mut codes = BTreeMap::new();
    for n in 0..60 {
        store.on.store(false, Ordering::Relaxed);
        let mut one = cluster.get(&uri).await.json;
        store.on.store(true, Ordering::Relaxed);
        one["metadata"]["labels"] = json!({"n": n.to_string()});
        let code = cluster.put(&uri, one).await.code;
        *codes.entry(code).or_insert(0) += 1;
    }
    assert!(store.lost.load(Ordering::Relaxed) > 5);
    assert!(codes.keys().all(|code| [200, 503].contains(code)), "{codes:?}");
    assert!(codes[&200] > 0, "{codes:?}");
}
