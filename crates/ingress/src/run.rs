//! Brings it together: informers wake the compiler, what it makes is swapped in, and the doors are open while there is an
//! Ingress to serve.

use std::collections::{BTreeSet, HashSet};
use std::net::IpAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use k8s_openapi::api::core::v1::{Node, Secret, Service};
use k8s_openapi::api::discovery::v1::EndpointSlice;
use k8s_openapi::api::networking::v1::{Ingress, IngressClass};
use kube::Resource;
use parking_lot::Mutex;
use skiff_client::{Client, ComponentMetrics, Informer, InformerFactory, Key};
use skiff_meta::net::Cidr;
use tokio::sync::{Notify, watch};
use tokio_rustls::TlsAcceptor;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::backend::Backends;
use crate::compile::{CertificateCache, Compiled, Compiler, Objects, refresh};
use crate::connections::{ConnectionLimits, Connections};
use crate::endpoints::AddressPolicy;
use crate::forward::Proxy;
use crate::listen::{self, Door};
use crate::metrics::Metrics;
use crate::status::{self, Served};
use crate::table::RouteTable;
use crate::tls::{Resolver, TlsError};

const SERVICE_NAME: &str = "kubernetes.io/service-name";
const SERVICE_INDEX: &str = "service";
/// Changes that come together are compiled together.
const SETTLE: Duration = Duration::from_millis(10);
/// How often a port that another program has is tried again.
const BIND_AGAIN: Duration = Duration::from_secs(5);
/// What is under way when the process ends may take this long.
const DRAIN: Duration = Duration::from_secs(5);

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("{0}")]
    Tls(#[from] TlsError),
}

#[derive(Clone)]
pub struct IngressConfig {
    /// `None`: no such door.
    pub http_port: Option<u16>,
    pub https_port: Option<u16>,
    pub node_name: String,
    /// Tells this instance from those of other servers.
    pub instance: String,
    /// Where this machine is reached, if it has no Node.
    pub address: IpAddr,
    /// The networks of the Services.
    pub services: Vec<Cidr>,
    /// Ports of the nodes that no backend may have, beside the kubelets': the API server's.
    pub host_ports: Vec<u16>,
    pub access_log: bool,
    pub metrics: Arc<ComponentMetrics>,
    /// Hears why a port cannot be had; an empty text: all is well.
    pub report: Arc<dyn Fn(&str) + Send + Sync>,
}

/// The informers, as the compiler reads them.
struct Watched {
    ingresses: Informer<Ingress>,
    classes: Informer<IngressClass>,
    services: Informer<Service>,
    slices: Informer<EndpointSlice>,
    secrets: Informer<Secret>,
    nodes: Informer<Node>,
}

impl Objects for Watched {
    fn ingresses(&self) -> Vec<Arc<Ingress>> {
        self.ingresses.list()
    }

    fn classes(&self) -> Vec<Arc<IngressClass>> {
        self.classes.list()
    }

    fn service(&self, namespace: &str, name: &str) -> Option<Arc<Service>> {
        self.services.get(namespace, name)
    }

    fn slices(&self, namespace: &str, service: &str) -> Vec<Arc<EndpointSlice>> {
        self.slices
            .by_index(SERVICE_INDEX, &format!("{namespace}/{service}"))
    }

    fn secret(&self, namespace: &str, name: &str) -> Option<Arc<Secret>> {
        self.secrets.get(namespace, name)
    }
}

/// What changed since the last table.
#[derive(Default)]
struct Changes {
    all: bool,
    /// Of these Services only the endpoints.
    endpoints: BTreeSet<Key>,
}

/// Runs until `stop`.
pub async fn run(config: IngressConfig, client: Client, stop: CancellationToken) -> Result<(), Error> {
    let resolver = Resolver::new()?;
    let tls = TlsAcceptor::from(resolver.server_config()?);
    let proxy = Arc::new(Proxy {
        table: Default::default(),
        metrics: Metrics::new(&config.metrics.registry),
        upstream: Default::default(),
        https_port: config.https_port,
        access_log: config.access_log,
        tunnels: TaskTracker::new(),
        abort: CancellationToken::new(),
    });
    // Also when this run ends by a failure.
    let _abort = proxy.abort.clone().drop_guard();
    let factory = InformerFactory::new(client.clone(), stop.clone()).measured(config.metrics.clone());
    let watched = Watched {
        ingresses: factory.informer(),
        classes: factory.informer(),
        services: factory.informer(),
        slices: factory.informer(),
        secrets: factory.filtered(None, Some("type=kubernetes.io/tls")),
        nodes: factory.informer(),
    };
    watched.slices.add_index(SERVICE_INDEX, |slice| {
        service_of(slice).map(|key| key.to_string()).into_iter().collect()
    });
    let (changes, changed): (Arc<Mutex<Changes>>, Arc<Notify>) = Default::default();
    note_all(&watched.ingresses, &changes, &changed);
    note_all(&watched.classes, &changes, &changed);
    note_all(&watched.services, &changes, &changed);
    note_all(&watched.secrets, &changes, &changed);
    let (noted, news) = (changes.clone(), changed.clone());
    watched.slices.subscribe(move |change| {
        noted.lock().endpoints.extend(service_of(change.object()));
        news.notify_one();
    });
    // Nodes report themselves all the time; the loop looks whether their addresses are others.
    let news = changed.clone();
    watched.nodes.subscribe(move |_| news.notify_one());
    let synced = async {
        tokio::join!(
            watched.ingresses.synced(),
            watched.classes.synced(),
            watched.services.synced(),
            watched.slices.synced(),
            watched.secrets.synced(),
            watched.nodes.synced(),
        )
    };
    tokio::select! {
        _ = synced => {}
        () = stop.cancelled() => return Ok(()),
    }
    let (served, to_report) = watch::channel(Served::default());
    let nodes = watched.nodes.clone();
    let mut keeper = Keeper {
        policy: policy(&config, &watched.nodes),
        config: config.clone(),
        watched,
        proxy: proxy.clone(),
        resolver,
        backends: Backends::default(),
        cache: CertificateCache::default(),
        served,
    };
    keeper.compile();
    let doors = open(&config, &proxy, tls, &to_report, &stop);
    let reporting = status::run(&config, client, nodes, factory, to_report.clone(), &stop);
    tokio::select! {
        () = keeper.keep(&changes, &changed) => {}
        () = reporting => {}
        () = doors => {}
    }
    Ok(())
}

fn note_all<K>(informer: &Informer<K>, changes: &Arc<Mutex<Changes>>, changed: &Arc<Notify>)
where
    K: Resource + 'static,
{
    let (changes, changed) = (changes.clone(), changed.clone());
    informer.subscribe(move |_| {
        changes.lock().all = true;
        changed.notify_one();
    });
}

fn service_of(slice: &EndpointSlice) -> Option<Key> {
    let name = slice.metadata.labels.as_ref()?.get(SERVICE_NAME)?;
    Some(Key::new(slice.metadata.namespace.clone()?, name))
}

/// All addresses of a node, as text that can be read.
pub fn node_addresses(node: &Node) -> impl Iterator<Item = (&str, IpAddr)> {
    let status = node.status.iter();
    let addresses = status.flat_map(|status| status.addresses.iter().flatten());
    addresses.filter_map(|address| Some((address.type_.as_str(), address.address.parse().ok()?)))
}

fn kubelet_port(node: &Node) -> Option<u16> {
    let endpoints = node.status.as_ref()?.daemon_endpoints.as_ref()?;
    u16::try_from(endpoints.kubelet_endpoint.as_ref()?.port).ok()
}

fn policy(config: &IngressConfig, nodes: &Informer<Node>) -> AddressPolicy {
    let nodes = nodes.list();
    let kubelets: BTreeSet<u16> = nodes.iter().filter_map(|node| kubelet_port(node)).collect();
    let of_nodes = nodes.iter().flat_map(|node| node_addresses(node));
    let nodes: HashSet<IpAddr> = of_nodes
        .map(|(_, address)| address)
        .chain([config.address])
        .collect();
    let own = config
        .http_port
        .into_iter()
        .chain(config.https_port)
        .chain(kubelets);
    AddressPolicy {
        services: config.services.clone(),
        nodes,
        host_ports: config.host_ports.iter().copied().chain(own).collect(),
    }
}

/// Keeps the table up to date.
struct Keeper {
    config: IngressConfig,
    watched: Watched,
    proxy: Arc<Proxy>,
    resolver: Arc<Resolver>,
    policy: AddressPolicy,
    backends: Backends,
    cache: CertificateCache,
    served: watch::Sender<Served>,
}

impl Keeper {
    async fn keep(&mut self, changes: &Mutex<Changes>, changed: &Notify) {
        loop {
            changed.notified().await;
            tokio::time::sleep(SETTLE).await;
            let policy = policy(&self.config, &self.watched.nodes);
            let moved = policy != self.policy;
            self.policy = policy;
            let noted = std::mem::take(&mut *changes.lock());
            if noted.all || moved {
                self.compile();
                continue;
            }
            for Key { namespace, name } in noted.endpoints {
                let slices = self.watched.slices(&namespace, &name);
                let (backends, policy) = (&mut self.backends, &self.policy);
                refresh(backends, &namespace, &name, &slices, policy, Instant::now());
            }
        }
    }

    fn compile(&mut self) {
        let compiler = Compiler {
            objects: &self.watched,
            policy: &self.policy,
            backends: &mut self.backends,
            cache: &mut self.cache,
            now: Instant::now(),
        };
        let Compiled {
            table,
            certificates,
            ingresses,
        } = compiler.run();
        let problems = ingresses
            .iter()
            .filter(|(_, problems)| !problems.is_empty())
            .count();
        let metrics = &self.proxy.metrics;
        metrics.set_objects(table.len(), certificates.len(), problems);
        self.resolver.certificates.store(Arc::new(certificates));
        let old: Arc<RouteTable> = self.proxy.table.swap(Arc::new(table));
        // Requests that are on their way may still hold it; what it alone names goes with the next table.
        drop(old);
        self.backends.keep_used();
        self.served.send_replace(Served(ingresses));
    }
}

/// Keeps both doors open while there is something to serve: until then the ports are left to others, such as pods in the
/// host's network. At the end, requests that are on their way may finish.
async fn open(
    config: &IngressConfig,
    proxy: &Arc<Proxy>,
    tls: TlsAcceptor,
    served: &watch::Receiver<Served>,
    stop: &CancellationToken,
) {
    let connections = Connections::new(ConnectionLimits::default());
    let tasks = TaskTracker::new();
    let problems: Mutex<[String; 2]> = Mutex::default();
    let door = |place: usize, port: Option<u16>, tls: Option<TlsAcceptor>| {
        let (connections, tasks, problems) = (connections.clone(), tasks.clone(), &problems);
        let mut served = served.clone();
        async move {
            let Some(port) = port else {
                return stop.cancelled().await;
            };
            let say = |text: String| {
                let mut problems = problems.lock();
                problems[place] = text;
                let all: Vec<&str> = problems
                    .iter()
                    .map(String::as_str)
                    .filter(|text| !text.is_empty())
                    .collect();
                (config.report)(&all.join("; "));
            };
            let mut failed = false;
            loop {
                tokio::select! {
                    some = served.wait_for(|served| !served.0.is_empty()) => if some.is_err() { return },
                    () = stop.cancelled() => return,
                }
                let listener = match listen::bind(port) {
                    Ok(listener) => listener,
                    Err(error) => {
                        if !std::mem::replace(&mut failed, true) {
                            tracing::warn!(port, %error, "cannot listen for ingress; trying again");
                        }
                        say(format!("cannot listen on port {port}: {error}"));
                        tokio::select! {
                            () = tokio::time::sleep(BIND_AGAIN) => continue,
                            () = stop.cancelled() => return,
                        }
                    }
                };
                failed = false;
                say(String::new());
                tracing::info!(port, tls = tls.is_some(), "listening for ingress");
                let door = Door {
                    proxy: proxy.clone(),
                    connections: connections.clone(),
                    listener,
                    tls: tls.clone(),
                    tasks: tasks.clone(),
                };
                let closed = stop.child_token();
                let none_left = async {
                    let _ = served.wait_for(|served| served.0.is_empty()).await;
                    closed.cancel();
                    std::future::pending::<()>().await;
                };
                tokio::select! {
                    () = door.serve(closed.clone()) => {}
                    () = none_left => {}
                }
                if stop.is_cancelled() {
                    return;
                }
                tracing::info!(port, "no Ingress is left: the port is given back");
            }
        }
    };
    tokio::join!(
        door(0, config.http_port, None),
        door(1, config.https_port, Some(tls)),
    );
    tasks.close();
    proxy.tunnels.close();
    let drained = async { tokio::join!(tasks.wait(), proxy.tunnels.wait()) };
    if tokio::time::timeout(DRAIN, drained).await.is_err() {
        tracing::info!(open = connections.len(), "some connections did not end in time");
    }
}
