//! What others ask the proxy by HTTP: `/healthz` and `/livez` of the proxy itself, its `/metrics`, and the health-check
//! node ports where load balancers ask whether this node has endpoints of a service.

use std::collections::HashMap;
use std::convert::Infallible;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use http::{Request, Response, StatusCode, header};
use hyper::body::Incoming;
use hyper_util::rt::TokioIo;
use k8s_openapi::api::core::v1::{Node, ObjectReference};
use k8s_openapi::jiff::Timestamp;
use parking_lot::Mutex;
use serde_json::{Value, json};
use skiff_client::{EventRecorder, Key};
use skiff_meta::net::Cidr;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;
use tokio_util::sync::CancellationToken;

use super::metrics::{Metrics, family_name};

/// A change that is not in the kernel after this time makes the proxy unhealthy.
const HEALTH_TIMEOUT: Duration = Duration::from_secs(60);
/// Of one port; who comes beyond it waits.
const MAX_CONNECTIONS: usize = 64;
/// For a request and its answer; each has a connection of its own.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(10);
const BIND_AGAIN: Duration = Duration::from_secs(5);

/// The autoscaler's mark on a node that will be deleted.
const TO_BE_DELETED: &str = "ToBeDeletedByClusterAutoscaler";

/// How the proxy is.
pub(super) struct Health {
    families: Vec<bool>,
    metrics: Arc<Metrics>,
    /// A leaf lock.
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// Since when a change waits for the kernel.
    queued: Option<Instant>,
    updated: Option<Timestamp>,
    /// Whether load balancers may use the node; `None` if there is no such Node.
    node: Option<bool>,
}

impl Health {
    pub(super) fn new(families: &[bool], metrics: Arc<Metrics>) -> Arc<Health> {
        Arc::new(Health {
            families: families.to_vec(),
            metrics,
            state: Mutex::default(),
        })
    }

    pub(super) fn queued(&self) {
        self.state.lock().queued.get_or_insert_with(Instant::now);
    }

    pub(super) fn updated(&self) {
        let mut state = self.state.lock();
        state.queued = None;
        state.updated = Some(Timestamp::now());
    }

    pub(super) fn node(&self, node: Option<&Node>) {
        self.state.lock().node = node.map(|node| {
            let taints = node.spec.iter().flat_map(|spec| spec.taints.iter().flatten());
            let leaves = node.metadata.deletion_timestamp.is_some();
            !leaves && !taints.into_iter().any(|taint| taint.key == TO_BE_DELETED)
        });
    }

    fn is_healthy(&self) -> bool {
        let queued = self.state.lock().queued;
        queued.is_none_or(|since| since.elapsed() < HEALTH_TIMEOUT)
    }

    /// The answer of `/healthz`, or of `/livez`, which does not look at the node.
    fn answer(&self, live: bool) -> (StatusCode, Value) {
        let healthy = self.is_healthy();
        let (updated, eligible) = {
            let state = self.state.lock();
            (state.updated, state.node.unwrap_or(false))
        };
        let good = healthy && (live || eligible);
        let now = Timestamp::now();
        let since = |time: Option<Timestamp>| time.unwrap_or(Timestamp::UNIX_EPOCH).to_string();
        let status: serde_json::Map<String, Value> = match updated {
            Some(_) => self
                .families
                .iter()
                .map(|ipv4| {
                    let state = json!({"lastUpdated": since(updated), "healthy": healthy});
                    (family_name(*ipv4).to_owned(), state)
                })
                .collect(),
            None => serde_json::Map::new(),
        };
        // COMPAT: who is healthy has always just been updated.
        let last = if good { now.to_string() } else { since(updated) };
        let mut body = json!({"lastUpdated": last, "currentTime": now.to_string(), "healthy": healthy});
        if !live {
            body["nodeEligible"] = eligible.into();
        }
        if !status.is_empty() {
            body["status"] = Value::Object(status);
        }
        let code = if good {
            StatusCode::OK
        } else {
            StatusCode::SERVICE_UNAVAILABLE
        };
        self.metrics.answered(live, code.as_u16());
        (code, body)
    }
}

type Answer = Response<String>;

fn response(code: StatusCode, content: &'static str, body: String) -> Answer {
    let mut response = Response::new(body);
    *response.status_mut() = code;
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, header::HeaderValue::from_static(content));
    headers.insert(
        header::X_CONTENT_TYPE_OPTIONS,
        header::HeaderValue::from_static("nosniff"),
    );
    response
}

fn not_found() -> Answer {
    let body = "404 page not found\n".to_owned();
    response(StatusCode::NOT_FOUND, "text/plain; charset=utf-8", body)
}

/// Serves `/healthz` and `/livez` until it is dropped.
pub(super) async fn serve_health(address: SocketAddr, health: Arc<Health>) {
    let answer = move |path: &str| match path {
        "/healthz" | "/livez" => {
            let (code, body) = health.answer(path == "/livez");
            response(code, "application/json", body.to_string())
        }
        _ => not_found(),
    };
    serve(address, &[], Arc::new(answer), |error| {
        tracing::warn!(%error, %address, "cannot serve the proxy's health");
    })
    .await;
}

/// Serves `/metrics` until it is dropped.
pub(super) async fn serve_metrics(address: SocketAddr, metrics: Arc<Metrics>, health: Arc<Health>) {
    let answer = move |path: &str| match path {
        "/metrics" => {
            let text = metrics.registry.text();
            response(StatusCode::OK, "text/plain; version=0.0.4; charset=utf-8", text)
        }
        "/proxyMode" => response(StatusCode::OK, "text/plain; charset=utf-8", "nftables".to_owned()),
        "/healthz" => {
            let (code, body) = match health.is_healthy() {
                true => (StatusCode::OK, "ok"),
                false => (StatusCode::SERVICE_UNAVAILABLE, "rules are late"),
            };
            response(code, "text/plain; charset=utf-8", body.to_owned())
        }
        _ => not_found(),
    };
    serve(address, &[], Arc::new(answer), |error| {
        tracing::warn!(%error, %address, "cannot serve the proxy's metrics");
    })
    .await;
}

/// The health-check node ports.
pub(super) struct HealthPorts {
    health: Arc<Health>,
    recorder: EventRecorder,
    node: String,
    /// Where they are served, if not on all addresses.
    addresses: Vec<Cidr>,
    shutdown: CancellationToken,
    open: HashMap<Key, OpenPort>,
}

struct OpenPort {
    number: u16,
    endpoints: Arc<AtomicUsize>,
    _end: tokio_util::sync::DropGuard,
}

impl HealthPorts {
    pub(super) fn new(
        health: Arc<Health>,
        recorder: EventRecorder,
        node: &str,
        addresses: &[Cidr],
        shutdown: CancellationToken,
    ) -> HealthPorts {
        HealthPorts {
            health,
            recorder,
            node: node.to_owned(),
            addresses: addresses.to_vec(),
            shutdown,
            open: HashMap::new(),
        }
    }

    /// Tells of a service's port and its endpoints on this node; `None` if it has no port.
    pub(super) fn set(&mut self, service: &Key, wanted: Option<(u16, usize)>) {
        let Some((number, count)) = wanted else {
            self.open.remove(service);
            return;
        };
        if let Some(open) = self.open.get(service).filter(|open| open.number == number) {
            open.endpoints.store(count, Ordering::Relaxed);
            return;
        }
        // The old one first: its port may be the new one of another service.
        self.open.remove(service);
        let endpoints = Arc::new(AtomicUsize::new(count));
        let end = self.shutdown.child_token();
        self.serve(service.clone(), number, endpoints.clone(), &end);
        let open = OpenPort {
            number,
            endpoints,
            _end: end.drop_guard(),
        };
        self.open.insert(service.clone(), open);
    }

    fn serve(&self, service: Key, number: u16, endpoints: Arc<AtomicUsize>, end: &CancellationToken) {
        let any = match self.health.families.contains(&false) {
            true => IpAddr::V6(Ipv6Addr::UNSPECIFIED),
            false => IpAddr::V4(Ipv4Addr::UNSPECIFIED),
        };
        let address = SocketAddr::new(any, number);
        let (health, addresses) = (self.health.clone(), self.addresses.clone());
        let (recorder, node) = (self.recorder.clone(), self.node.clone());
        let _ = skiff_supervise::keep("proxy-health-port", end, move || {
            let (health, endpoints, addresses) = (health.clone(), endpoints.clone(), addresses.clone());
            let (key, service) = (service.clone(), service.clone());
            let answer =
                move |_: &str| service_answer(&key, endpoints.load(Ordering::Relaxed), health.is_healthy());
            let (recorder, node) = (recorder.clone(), node.clone());
            async move {
                let failed = |error: &std::io::Error| {
                    let text = format!(
                        "node {node} failed to start healthcheck {:?} on port {number}: {error}",
                        service.to_string()
                    );
                    tracing::warn!("{text}");
                    recorder.event(
                        &reference(&service),
                        "Warning",
                        "FailedToStartServiceHealthcheck",
                        text,
                    );
                };
                serve(address, &addresses, Arc::new(answer), failed).await;
            }
        });
    }
}

fn reference(service: &Key) -> ObjectReference {
    ObjectReference {
        api_version: Some("v1".to_owned()),
        kind: Some("Service".to_owned()),
        namespace: Some(service.namespace.clone()),
        name: Some(service.name.clone()),
        ..ObjectReference::default()
    }
}

/// COMPAT: load balancers read the status and the weight; people read the body, which is upstream's.
fn service_answer(service: &Key, endpoints: usize, healthy: bool) -> Answer {
    let code = match endpoints > 0 && healthy {
        true => StatusCode::OK,
        false => StatusCode::SERVICE_UNAVAILABLE,
    };
    let body = format!(
        "{{\n\t\"service\": {{\n\t\t\"namespace\": {:?},\n\t\t\"name\": {:?}\n\t}},\n\t\"localEndpoints\": {endpoints},\n\t\"serviceProxyHealthy\": {healthy}\n}}",
        service.namespace, service.name
    );
    let mut response = response(code, "application/json", body);
    let weight = header::HeaderValue::from(endpoints);
    response
        .headers_mut()
        .insert("X-Load-Balancing-Endpoint-Weight", weight);
    response
}

/// Answers on an address until it is dropped. While the address cannot be had it tries again, and says so once.
async fn serve(
    address: SocketAddr,
    only: &[Cidr],
    answer: Arc<dyn Fn(&str) -> Answer + Send + Sync>,
    failed: impl Fn(&std::io::Error),
) {
    let mut told = false;
    let listener = loop {
        match TcpListener::bind(address).await {
            Ok(listener) => break listener,
            Err(error) => {
                if !told {
                    failed(&error);
                    told = true;
                }
                tokio::time::sleep(BIND_AGAIN).await;
            }
        }
    };
    let room = Arc::new(Semaphore::new(MAX_CONNECTIONS));
    let mut connections = tokio::task::JoinSet::new();
    loop {
        while connections.try_join_next().is_some() {}
        let Ok(permit) = room.clone().acquire_owned().await else {
            return;
        };
        let stream = match listener.accept().await {
            Ok((stream, _)) if is_wanted(&stream, only) => stream,
            Ok(_) => continue,
            Err(error) => {
                tracing::debug!(%error, %address, "cannot accept a connection");
                tokio::time::sleep(Duration::from_millis(100)).await;
                continue;
            }
        };
        let answer = answer.clone();
        connections.spawn(async move {
            let service = hyper::service::service_fn(move |request: Request<Incoming>| {
                let response = answer(request.uri().path());
                async move { Ok::<_, Infallible>(response) }
            });
            let serving = hyper::server::conn::http1::Builder::new()
                .keep_alive(false)
                .serve_connection(TokioIo::new(stream), service);
            let _ = tokio::time::timeout(REQUEST_TIMEOUT, serving).await;
            drop(permit);
        });
    }
}

/// Whether the connection came to one of these addresses, if only they are served.
fn is_wanted(stream: &TcpStream, only: &[Cidr]) -> bool {
    let Ok(local) = stream.local_addr() else {
        return false;
    };
    let address = local.ip().to_canonical();
    only.is_empty() || only.iter().any(|network| network.contains(address))
}

#[cfg(test)]
mod tests {
    use super::*;
    use skiff_prometheus::Registry;

    #[test]
    fn load_balancers_are_told_of_endpoints() {
        let key = Key::new("ns", "web");
        for (endpoints, healthy, code) in [(2, true, 200), (0, true, 503), (2, false, 503)] {
            let answer = service_answer(&key, endpoints, healthy);
            assert_eq!(answer.status().as_u16(), code);
            let weight = &answer.headers()["X-Load-Balancing-Endpoint-Weight"];
            assert_eq!(weight.to_str().unwrap(), endpoints.to_string());
            let body: Value = serde_json::from_str(answer.body()).unwrap();
            assert_eq!(
                body,
                json!({"service": {"namespace": "ns", "name": "web"}, "localEndpoints": endpoints,
                    "serviceProxyHealthy": healthy})
            );
        }
    }

    #[test]
    fn who_is_healthy() {
        let health = Health::new(&[true], Metrics::new(Registry::new()));
        let check = |live: bool, code: u16, eligible: Value| {
            let (got, body) = health.answer(live);
            assert_eq!((got.as_u16(), &body["nodeEligible"]), (code, &eligible), "{body}");
        };
        check(true, 200, Value::Null);
        check(false, 503, false.into());
        let mut node = Node::default();
        health.node(Some(&node));
        check(false, 200, true.into());
        health.updated();
        assert_eq!(health.answer(false).1["status"]["IPv4"]["healthy"], true);
        node.spec =
            serde_json::from_value(json!({"taints": [{"key": TO_BE_DELETED, "effect": "NoSchedule"}]}))
                .unwrap();
        health.node(Some(&node));
        check(false, 503, false.into());
        check(true, 200, Value::Null);
        // A change that is late.
        health.state.lock().queued = Instant::now().checked_sub(HEALTH_TIMEOUT);
        check(true, 503, Value::Null);
    }
}
