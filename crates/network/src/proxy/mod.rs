//! The service proxy: services and endpoints come from the API, and the node's packets go where they
//! say. `index` keeps what the API has and plans each service by itself, `table` brings the elements that have
//! changed into the kernel, and the loop here brings the two together.

mod compare;
mod conntrack;
mod elements;
mod endpoints;
mod frame;
mod health;
mod inbox;
mod index;
mod limits;
mod lookup;
mod marks;
mod metrics;
mod objects;
mod plan;
mod sets;
mod table;

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::{Node, Service};
use parking_lot::Mutex;
use skiff_client::{Change, Client, EventRecorder, InformerFactory};
use tokio::time::{Instant, MissedTickBehavior};
use tokio_util::sync::CancellationToken;

use conntrack::Stale;
pub use conntrack::forget_stale_flows;
use health::{Health, HealthPorts};
use inbox::Inbox;
pub use index::{Delta, Index, Networks};
pub use lookup::{KernelService, look_up};
use marks::Marks;
pub use metrics::{Metrics, Summary};
pub use objects::{Protocol, ProxySlice, ServiceFacts};
use skiff_meta::net::Cidr;
pub use table::Table;
pub(crate) use table::string_attribute;

use crate::nft::Watch;

/// How often everything is compared if any nftables rules of the machine have changed, and not only what others are
/// announced to have changed.
const CHECK_PERIOD: Duration = Duration::from_secs(60);

/// The first change is brought into the kernel at once; the next ones wait for this many times as long as that took, so
/// that under load they come together and most of the time is left to others.
const PAUSE_FACTOR: u32 = 3;
const MAX_PAUSE: Duration = Duration::from_millis(250);

const MAX_RETRY: Duration = Duration::from_secs(10);

const ZONE_LABEL: &str = "topology.kubernetes.io/zone";

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("netlink: {0}")]
    Netlink(#[from] nlink::Error),
    #[error("table name {0:?}: letters, digits, '-' and '_' only")]
    TableName(String),
    #[error("{path}: {source}")]
    Sysctl {
        path: String,
        #[source]
        source: std::io::Error,
    },
}

#[derive(Debug, Clone)]
pub struct ProxyConfig {
    /// The nftables table; one a cluster and node, in each address family.
    pub table: String,
    pub node_name: String,
    /// The pod addresses of the whole cluster, at most one network of each family: who is inside.
    pub pod_cidrs: Vec<Cidr>,
    /// The addresses of services. Their families are those that are served.
    pub service_cidrs: Vec<Cidr>,
    /// TCP ports of this machine that no service may take: the API server's and the kubelet's.
    pub host_ports: Vec<u16>,
    /// The pods' bridge; node ports answer on 127.0.0.1 too when it is known.
    pub bridge: Option<String>,
    /// The addresses that node ports answer on; all of the machine's if empty.
    pub node_port_addresses: Vec<Cidr>,
    /// Where `/healthz` and `/livez` are served.
    pub healthz: Option<SocketAddr>,
    /// Where `/metrics` is served.
    pub metrics: Option<SocketAddr>,
}

impl ProxyConfig {
    pub fn networks(&self) -> Networks {
        Networks {
            pods: self.pod_cidrs.clone(),
            services: self.service_cidrs.clone(),
        }
    }

    fn validate(&self) -> Result<(), Error> {
        let ok = !self.table.is_empty()
            && self.table.len() <= 64
            && self
                .table
                .chars()
                .all(|c| c.is_ascii_alphanumeric() || c == '-' || c == '_');
        if ok {
            Ok(())
        } else {
            Err(Error::TableName(self.table.clone()))
        }
    }
}

/// Runs until `shutdown`. The rules stay when it returns, so that services work while skiff restarts.
pub async fn run(
    config: ProxyConfig,
    client: Client,
    metrics: Arc<Metrics>,
    shutdown: CancellationToken,
) -> Result<(), Error> {
    config.validate()?;
    // Subscriptions and servers end with this run.
    let ended = shutdown.child_token();
    let _end = ended.clone().drop_guard();
    let families = config.networks().families();
    let told = Arc::new(Told {
        inbox: Inbox::default(),
        together: Mutex::default(),
        marks: Marks::default(),
        health: Health::new(&families, metrics.clone()),
        metrics: metrics.clone(),
        families,
    });
    if let Some(address) = config.healthz {
        let health = told.health.clone();
        skiff_supervise::keep("proxy-healthz", &ended, move || {
            health::serve_health(address, health.clone())
        });
    }
    if let Some(address) = config.metrics {
        let (metrics, health) = (metrics.clone(), told.health.clone());
        skiff_supervise::keep("proxy-metrics", &ended, move || {
            health::serve_metrics(address, metrics.clone(), health.clone())
        });
    }
    let factory = InformerFactory::new(client.clone(), ended.clone());
    tokio::select! {
        // Half the truth would take services away that are only not read yet.
        () = follow(&factory, &config.node_name, &told) => {}
        () = shutdown.cancelled() => return Ok(()),
    }
    let stale = Stale::default();
    let proxy = Proxy::open(config, client, told, ended)?;
    tokio::select! {
        ended = proxy.run(&stale) => ended,
        () = stale.run(|ipv4, count, took| metrics.forgot(ipv4, count, took)) => Ok(()),
        () = shutdown.cancelled() => Ok(()),
    }
}

/// What informers tell of.
struct Told {
    inbox: Inbox,
    /// Held while a change is put into both, and while both are read: the mark of a change belongs to the round that
    /// brings it into the kernel, because a round that brings nothing reports nothing. Taken before the inbox' lock.
    together: Mutex<()>,
    marks: Marks,
    health: Arc<Health>,
    metrics: Arc<Metrics>,
    families: Vec<bool>,
}

impl Told {
    fn queued(&self, of_endpoints: bool) {
        self.health.queued();
        self.metrics.queued(&self.families, of_endpoints);
    }
}

/// Has all told that rules depend on, and returns when everything has been told.
async fn follow(factory: &InformerFactory, node: &str, told: &Arc<Told>) {
    let services = factory.informer::<Service>();
    let to = told.clone();
    services.subscribe(move |change| {
        let service = change.object();
        let _together = to.together.lock();
        to.marks.noticed(&**service, service.metadata.name.clone());
        to.queued(false);
        let facts = present(change).map(ServiceFacts::of);
        to.inbox.service(&service.metadata, facts);
    });
    let slices = factory.partial::<ProxySlice>(None, None);
    let to = told.clone();
    slices.subscribe(move |change| {
        let slice = change.object();
        let _together = to.together.lock();
        to.marks.noticed(&**slice, slice.service().map(str::to_owned));
        to.queued(true);
        if let Change::Applied { old: Some(old), .. } = change
            && old.service() != slice.service()
        {
            to.inbox.slice(old, None);
        }
        to.inbox.slice(slice, present(change).map(|_| slice.clone()));
    });
    let this_node = format!("metadata.name={node}");
    let nodes = factory.filtered::<Node>(None, Some(&this_node));
    let to = told.clone();
    nodes.subscribe(move |change| {
        let node = present(change);
        to.health.node(node);
        let labels = node.and_then(|node| node.metadata.labels.as_ref());
        let zone = labels.and_then(|labels| labels.get(ZONE_LABEL));
        to.inbox.zone(zone.cloned().unwrap_or_default());
    });
    tokio::join!(services.synced(), slices.synced(), nodes.synced());
}

/// The object of a change, unless it is gone.
fn present<K>(change: &Change<K>) -> Option<&K> {
    match change {
        Change::Applied { new, .. } => Some(new),
        Change::Deleted { .. } => None,
    }
}

struct Proxy {
    config: ProxyConfig,
    client: Client,
    recorder: EventRecorder,
    told: Arc<Told>,
    health_ports: HealthPorts,
    index: Index,
    table: Table,
}

impl Proxy {
    fn open(
        config: ProxyConfig,
        client: Client,
        told: Arc<Told>,
        ended: CancellationToken,
    ) -> Result<Proxy, Error> {
        let recorder = EventRecorder::new(client.clone(), "kube-proxy", &config.node_name);
        Ok(Proxy {
            health_ports: HealthPorts::new(
                told.health.clone(),
                recorder.clone(),
                &config.node_name,
                &config.node_port_addresses,
                ended,
            ),
            recorder,
            table: Table::open(&config, &told.families)?,
            index: Index::new(&config.node_name, config.networks()),
            config,
            client,
            told,
        })
    }

    async fn run(mut self, stale: &Stale) -> Result<(), Error> {
        let mut watch = Watch::open(self.table.names())?;
        let mut check = tokio::time::interval_at(Instant::now() + CHECK_PERIOD, CHECK_PERIOD);
        check.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut retry = Duration::ZERO;
        let mut first = true;
        let mut not_before = Instant::now();
        loop {
            tokio::time::sleep_until(not_before).await;
            let start = Instant::now();
            match self.sync(stale, &mut watch).await {
                Ok(()) => {
                    retry = Duration::ZERO;
                    // The kernel has these limits once there are rules that need connection tracking.
                    if std::mem::take(&mut first) {
                        limits::raise();
                    }
                }
                Err(error) => {
                    self.told.metrics.failed(&self.told.families);
                    retry = (retry * 2).clamp(Duration::from_millis(100), MAX_RETRY);
                    tracing::error!(%error, again_in = ?retry, "cannot apply the services' rules");
                }
            }
            not_before = Instant::now() + (start.elapsed() * PAUSE_FACTOR).min(MAX_PAUSE);
            loop {
                let lost = tokio::select! {
                    () = self.told.inbox.changed.notified() => break,
                    () = tokio::time::sleep(retry), if !retry.is_zero() => break,
                    () = watch.changed() => self.table.compare(&watch.take(), self.index.wanted()).await,
                    _ = check.tick() => {
                        self.table.check_beside(self.index.wanted(), Some(&mut watch)).await
                    }
                };
                match lost {
                    Ok(false) => {}
                    Ok(true) => break,
                    Err(error) => {
                        tracing::warn!(%error, "cannot look at the service proxy's tables; loading them again");
                        self.table.doubt();
                        break;
                    }
                }
            }
        }
    }

    /// Brings what has changed into the kernel.
    async fn sync(&mut self, stale: &Stale, watch: &mut Watch) -> Result<(), Error> {
        let start = Instant::now();
        let told = self.told.clone();
        told.metrics.begin();
        let (round, news) = {
            let _together = told.together.lock();
            (told.marks.begin(), told.inbox.empty_into(&mut self.index))
        };
        let mut delta = self.index.compile();
        let compiled = start.elapsed();
        for (service, message) in std::mem::take(&mut delta.refusals) {
            self.recorder
                .event(&service, "Warning", "ExternalIPRefused", message);
        }
        // A port that is given up may be what another service has now.
        delta.health.sort_by_key(|(_, port)| port.is_some());
        for (service, port) in std::mem::take(&mut delta.health) {
            self.health_ports.set(&service, port);
        }
        let (removed, added, loads) = (delta.removed.len(), delta.added.len(), !self.table.stands());
        if let Err(error) = self.table.apply(&delta, self.index.wanted()).await {
            told.marks.put_back(round);
            return Err(error);
        }
        if loads {
            self.table.prime(watch).await;
        }
        if let Some(bridge) = &self.config.bridge {
            // After the rule that keeps pods away from the node's loopback services.
            allow_local_source(bridge)?;
        }
        stale.add(std::mem::take(&mut delta.flows));
        told.health.updated();
        if news.revision > 0 {
            told.metrics.revision(news.revision);
        }
        for (ipv4, changed_at) in news.changed_at {
            told.metrics.programmed(ipv4, changed_at);
        }
        if removed + added > 0 || loads {
            told.metrics
                .delay(round.delay().unwrap_or_else(|| start.elapsed()));
            round.report(&self.client);
            told.metrics.synced(&told.families, loads, start.elapsed());
            let elements = self.index.wanted().len();
            told.metrics
                .counts(self.index.counts(), self.table.rule_count(), elements);
            let planned = delta.planned;
            tracing::debug!(planned, removed, added, loads, ?compiled, total = ?start.elapsed(), "services applied");
        }
        Ok(())
    }
}

/// Lets packets from 127.0.0.1 leave by the bridge once they are translated. The bridge may not exist
/// yet; then the next round does it.
fn allow_local_source(bridge: &str) -> Result<(), Error> {
    let path = format!("/proc/sys/net/ipv4/conf/{bridge}/route_localnet");
    match std::fs::read_to_string(&path) {
        Ok(value) if value.trim() == "0" => {
            std::fs::write(&path, "1").map_err(|source| Error::Sysctl { path, source })
        }
        _ => Ok(()),
    }
}

/// Removes the tables and with them all rules. Not having them is fine.
pub async fn remove(config: &ProxyConfig) -> Result<(), Error> {
    config.validate()?;
    Table::open(config, &[])?.remove().await
}
