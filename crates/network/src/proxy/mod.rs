//! The service proxy: services and endpoints come from the API, and the node's packets go where they
//! say. `plan` is pure, `apply` talks to the kernel, and the loop here brings the two together.

mod apply;
mod endpoints;
mod external;
mod marks;
mod plan;
mod ruleset;

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::Service;
use k8s_openapi::api::discovery::v1::EndpointSlice;
use skiff_client::{Client, EventRecorder, InformerFactory};
use tokio::sync::Notify;
use tokio::time::MissedTickBehavior;
use tokio_util::sync::CancellationToken;

pub use apply::Table;
pub(crate) use apply::string_attribute;
use marks::Marks;
pub use plan::plan;
use plan::plan_with_refusals;
pub(crate) use ruleset::Protocol;
pub use ruleset::Ruleset;
use skiff_meta::net::Cidr;

/// How often the kernel's table is compared with ours.
const VERIFY_PERIOD: Duration = Duration::from_secs(30);

/// Changes that come together are applied together.
const SETTLE: Duration = Duration::from_millis(2);

const MAX_RETRY: Duration = Duration::from_secs(10);

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
    /// The nftables table; one a cluster and node.
    pub table: String,
    pub node_name: String,
    /// The pod addresses of the whole cluster, at most one network of each family: who is inside.
    pub pod_cidrs: Vec<Cidr>,
    /// The addresses of services.
    pub service_cidrs: Vec<Cidr>,
    /// TCP ports of this machine that no service may take: the API server's and the kubelet's.
    pub host_ports: Vec<u16>,
    /// The pods' bridge; node ports answer on 127.0.0.1 too when it is known.
    pub bridge: Option<String>,
}

impl ProxyConfig {
    /// The table has IPv4 rules; those of IPv6 will be a table of their own.
    fn pods(&self) -> Option<Cidr> {
        self.pod_cidrs.iter().copied().find(|cidr| cidr.is_ipv4())
    }

    fn services(&self) -> Option<Cidr> {
        self.service_cidrs.iter().copied().find(|cidr| cidr.is_ipv4())
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
pub async fn run(config: ProxyConfig, client: Client, shutdown: CancellationToken) -> Result<(), Error> {
    config.validate()?;
    let mut table = Table::open(&config.table)?;
    let recorder = EventRecorder::new(client.clone(), "kube-proxy", &config.node_name);
    let factory = InformerFactory::new(client.clone(), shutdown.clone());
    let services = factory.informer::<Service>();
    let slices = factory.informer::<EndpointSlice>();
    let changed = Arc::new(Notify::new());
    let marks = Arc::new(Marks::default());
    let (on_service, on_slice) = (changed.clone(), changed.clone());
    let (service_marks, slice_marks) = (marks.clone(), marks.clone());
    services.subscribe(move |change| {
        let service = change.object();
        service_marks.noticed(&**service, service.metadata.name.clone());
        on_service.notify_one();
    });
    slices.subscribe(move |change| {
        let slice = change.object();
        slice_marks.noticed(&**slice, endpoints::service_of(slice).map(str::to_owned));
        on_slice.notify_one();
    });
    tokio::select! {
        // Half the truth would take services away that are only not read yet.
        () = async { tokio::join!(services.synced(), slices.synced()); } => {}
        () = shutdown.cancelled() => return Ok(()),
    }
    let mut verify = tokio::time::interval(VERIFY_PERIOD);
    verify.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut retry = Duration::ZERO;
    let mut told = HashSet::new();
    loop {
        let start = std::time::Instant::now();
        let round = marks.begin();
        let (wanted, refusals) = plan_with_refusals(&config, &services.list(), &slices.list());
        let planned = start.elapsed();
        let mut refused = HashSet::new();
        for refusal in refusals {
            let what = (refusal.service.uid.clone(), refusal.message);
            if !told.contains(&what) {
                recorder.event(&refusal.service, "Warning", "ExternalIPRefused", what.1.clone());
            }
            refused.insert(what);
        }
        told = refused;
        match sync(&mut table, &config, &wanted).await {
            Ok(programmed) => {
                retry = Duration::ZERO;
                if programmed {
                    round.report(&client);
                }
                tracing::debug!(?planned, total = ?start.elapsed(), chains = wanted.chains.len(), "services applied");
            }
            Err(error) => {
                marks.put_back(round);
                retry = (retry * 2).clamp(Duration::from_millis(100), MAX_RETRY);
                tracing::error!(%error, again_in = ?retry, "cannot apply the services' rules");
            }
        }
        tokio::select! {
            () = shutdown.cancelled() => return Ok(()),
            () = changed.notified() => tokio::time::sleep(SETTLE).await,
            () = tokio::time::sleep(retry), if !retry.is_zero() => {}
            _ = verify.tick() => {
                if let Err(error) = table.verify().await {
                    tracing::warn!(%error, "cannot look at the service proxy's table");
                }
            }
        }
    }
}

/// Whether the kernel's rules had to be changed.
async fn sync(table: &mut Table, config: &ProxyConfig, wanted: &Ruleset) -> Result<bool, Error> {
    let programmed = table.apply(wanted).await?;
    if let Some(bridge) = &config.bridge {
        // After the rule that keeps pods away from the node's loopback services.
        allow_local_source(bridge)?;
    }
    Ok(programmed)
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

/// Removes the table and with it all rules. Not having it is fine.
pub async fn remove(config: &ProxyConfig) -> Result<(), Error> {
    config.validate()?;
    Table::open(&config.table)?.remove().await
}
