//! Brings it together: informers wake the compiler, what it makes is swapped in, and the doors are open while there is
//! something to serve.

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
use skiff_sockets::Sockets;
use tokio::sync::{Notify, watch};
use tokio_rustls::TlsAcceptor;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::backend::Backends;
use crate::compile::{CertificateCache, Compiled, Compiler, Objects};
use crate::compile_backends::refresh;
use crate::doors::{Doors, Failures};
use crate::endpoints::AddressPolicy;
use crate::features::resolve::FeatureCache;
use crate::forward::Proxy;
use crate::gateway::certificates::ConfigCache;
use crate::gateway::listeners::Ports;
use crate::gateway::plan::{Planned, Planner, Snapshot};
use crate::gateway::watch::Watch;
use crate::metrics::Metrics;
use crate::status::{self, Served};
use crate::table::RouteTable;
use crate::tls::{Resolver, TlsError};
use crate::workers::Workers;

const SERVICE_NAME: &str = "kubernetes.io/service-name";
const SERVICE_INDEX: &str = "service";
/// How long the first table waits for the objects of Gateway API.
const GATEWAY_PATIENCE: Duration = Duration::from_secs(10);
/// Changes that come together are compiled together.
const SETTLE: Duration = Duration::from_millis(10);

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("{0}")]
    Tls(#[from] TlsError),
    #[error("cannot start a thread: {0}")]
    Threads(#[from] std::io::Error),
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
    /// Addresses of the machines that are given to one Gateway each.
    pub gateway_addresses: Vec<IpAddr>,
    pub metrics: Arc<ComponentMetrics>,
    /// The listening sockets.
    pub sockets: Arc<Sockets>,
    /// Hears why a port cannot be had; an empty text: all is well.
    pub report: Arc<dyn Fn(&str) + Send + Sync>,
    /// Called by a thread that has nothing to do.
    pub on_park: Arc<dyn Fn() + Send + Sync>,
}

/// The informers, as the compiler reads them.
struct Watched {
    ingresses: Informer<Ingress>,
    classes: Informer<IngressClass>,
    services: Informer<Service>,
    slices: Informer<EndpointSlice>,
    secrets: Informer<Secret>,
    /// Of type `Opaque`: users, and authorities of backends.
    opaque: Informer<Secret>,
    /// Secrets that the last table asked for, whether they are there or not.
    asked: Arc<Mutex<HashSet<Key>>>,
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

    fn any_secret(&self, namespace: &str, name: &str) -> Option<Arc<Secret>> {
        // Before it is read: a change that comes then is not missed.
        self.asked.lock().insert(Key::new(namespace, name));
        self.secret(namespace, name)
            .or_else(|| self.opaque.get(namespace, name))
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
        gateways: Default::default(),
        metrics: Metrics::new(&config.metrics.registry),
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
        opaque: factory.filtered(None, Some("type=Opaque")),
        asked: Arc::default(),
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
    let (noted, news, asked) = (changes.clone(), changed.clone(), watched.asked.clone());
    watched.opaque.subscribe(move |change| {
        let meta = &change.object().metadata;
        let (namespace, name) = (meta.namespace.as_deref(), meta.name.as_deref());
        let key = Key::new(namespace.unwrap_or_default(), name.unwrap_or_default());
        if asked.lock().contains(&key) {
            noted.lock().all = true;
            news.notify_one();
        }
    });
    let (noted, news) = (changes.clone(), changed.clone());
    watched.slices.subscribe(move |change| {
        noted.lock().endpoints.extend(service_of(change.object()));
        news.notify_one();
    });
    // Nodes report themselves all the time; the loop looks whether their addresses are others.
    let news = changed.clone();
    watched.nodes.subscribe(move |_| news.notify_one());
    let (noted, news) = (changes.clone(), changed.clone());
    let noted: Arc<dyn Fn() + Send + Sync> = Arc::new(move || {
        noted.lock().all = true;
        news.notify_one();
    });
    let mut watch = Watch::new(client.clone(), &factory, &stop, noted.clone());
    let synced = async {
        tokio::join!(
            watched.ingresses.synced(),
            watched.classes.synced(),
            watched.services.synced(),
            watched.slices.synced(),
            watched.secrets.synced(),
            watched.opaque.synced(),
            watched.nodes.synced(),
            watch.synced(),
        )
    };
    tokio::select! {
        _ = synced => {}
        () = stop.cancelled() => return Ok(()),
    }
    // The first table decides which of the kept sockets stay open, so it needs the Gateways too.
    let gateways = async {
        while watch.snapshot().is_none() {
            changed.notified().await;
        }
    };
    tokio::select! {
        known = tokio::time::timeout(GATEWAY_PATIENCE, gateways) => if known.is_err() {
            tracing::warn!("the objects of Gateway API cannot be read yet: their ports are opened when they are");
        },
        () = stop.cancelled() => return Ok(()),
    }
    let (served, to_report) = watch::channel(Served::default());
    let (ports, wanted) = watch::channel(BTreeSet::new());
    let nodes = watched.nodes.clone();
    let failures = Failures::default();
    let mut keeper = Keeper {
        policy: policy(&config, &watched.nodes, &BTreeSet::new()),
        watch,
        snapshot: Snapshot::default(),
        configs: ConfigCache::default(),
        gateway_ports: BTreeSet::new(),
        ports,
        failures: failures.clone(),
        config: config.clone(),
        watched,
        proxy: proxy.clone(),
        resolver,
        backends: Backends::default(),
        cache: CertificateCache::default(),
        features: FeatureCache::default(),
        served,
    };
    keeper.compile();
    let sockets = config.sockets.clone();
    skiff_supervise::keep("ingress sockets", &stop, move || {
        let sockets = sockets.clone();
        async move { sockets.watch_holder().await }
    });
    let workers = Arc::new(Workers::start(config.on_park.clone())?);
    let doors = Doors::new(config.clone(), proxy.clone(), tls, failures, noted, workers);
    let doors = doors.keep(wanted, &stop);
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

fn policy(config: &IngressConfig, nodes: &Informer<Node>, gateways: &BTreeSet<u16>) -> AddressPolicy {
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
        .chain(gateways.iter().copied())
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
    features: FeatureCache,
    served: watch::Sender<Served>,
    watch: Watch,
    /// The last that was whole.
    snapshot: Snapshot,
    configs: ConfigCache,
    /// Ports of the machine that Gateways have.
    gateway_ports: BTreeSet<u16>,
    ports: watch::Sender<BTreeSet<u16>>,
    failures: Failures,
}

impl Keeper {
    async fn keep(&mut self, changes: &Mutex<Changes>, changed: &Notify) {
        loop {
            changed.notified().await;
            tokio::time::sleep(SETTLE).await;
            let policy = policy(&self.config, &self.watched.nodes, &self.gateway_ports);
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
        self.watched.asked.lock().clear();
        let compiler = Compiler {
            objects: &self.watched,
            policy: &self.policy,
            backends: &mut self.backends,
            cache: &mut self.cache,
            features: &mut self.features,
            now: Instant::now(),
        };
        let Compiled {
            table,
            certificates,
            ingresses,
        } = compiler.run();
        let Planned {
            table: gateways,
            ports,
            reports,
        } = self.plan();
        if ports != self.gateway_ports {
            // No backend may be the proxy itself.
            self.gateway_ports.clone_from(&ports);
            self.policy = policy(&self.config, &self.watched.nodes, &self.gateway_ports);
            return self.compile();
        }
        self.cache.forget_unused();
        self.features.forget_unused();
        self.configs.forget_unused();
        let problems = ingresses
            .iter()
            .filter(|(_, problems)| !problems.is_empty())
            .count();
        let metrics = &self.proxy.metrics;
        metrics.set_objects(table.len() + gateways.len(), certificates.len(), problems);
        self.resolver.certificates.store(Arc::new(certificates));
        let old: Arc<RouteTable> = self.proxy.table.swap(Arc::new(table));
        // Requests that are on their way may still hold it; what it alone names goes with the next table.
        drop(old);
        self.proxy.gateways.store(Arc::new(gateways));
        self.backends.keep_used();
        let of_ingresses = [self.config.http_port, self.config.https_port];
        let of_ingresses = of_ingresses
            .into_iter()
            .flatten()
            .filter(|_| !ingresses.is_empty());
        let wanted: BTreeSet<u16> = of_ingresses.chain(ports).collect();
        self.ports
            .send_if_modified(|ports| std::mem::replace(ports, wanted.clone()) != wanted);
        self.served.send_replace(Served {
            ingresses,
            gateways: reports,
        });
    }

    /// What Gateway API asks for. While some kind is not yet known, the last that was.
    fn plan(&mut self) -> Planned {
        if let Some(snapshot) = self.watch.snapshot() {
            self.snapshot = snapshot;
        }
        let own = [self.config.http_port, self.config.https_port];
        let ours = |port: &u16| own.contains(&Some(*port)) || self.gateway_ports.contains(port);
        let fixed = self.config.host_ports.iter();
        let reserved = self.policy.host_ports.iter().filter(|port| !ours(port));
        let ports = Ports {
            http: self.config.http_port,
            https: self.config.https_port,
            reserved: reserved.chain(fixed).copied().collect(),
            failed: self.failures.all(),
        };
        let planner = Planner {
            objects: &self.watched,
            snapshot: &self.snapshot,
            policy: &self.policy,
            ports: &ports,
            pool: &self.config.gateway_addresses,
            backends: &mut self.backends,
            certificates: &mut self.cache,
            configs: &mut self.configs,
            now: Instant::now(),
        };
        planner.run()
    }
}
