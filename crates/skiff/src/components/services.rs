//! What makes services work: the proxy, cluster DNS, the Metrics API behind the API server, and the way in from outside.

use super::{Access, Machine, Prepared, component_metrics};
use crate::cli::Component;
use crate::cluster::Cluster;
use anyhow::{Result, bail};
use futures::FutureExt;
use skiff_metrics::{MetricsApi, MetricsConfig};
use skiff_server::LocalApi;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;
use tokio_util::sync::CancellationToken;

/// Of machines that have only one cluster.
const KUBELET_PORT: u16 = 10250;

/// kube-proxy's ports.
const HEALTHZ_PORT: u16 = 10256;
const METRICS_PORT: u16 = 10249;

pub(super) async fn prepare_proxy(machine: &Machine) -> Result<Prepared> {
    let mut config = machine.cluster.proxy_config(&machine.node_name)?;
    config
        .node_port_addresses
        .clone_from(&machine.args.nodeport_addresses);
    let metrics = super::component_metrics();
    let of_proxy = skiff_network::proxy::Metrics::new(metrics.registry.clone());
    let file = machine.cluster.run_dir().join(PROXY_FILE);
    let run = move |client, stop: CancellationToken| {
        let (config, metrics) = (config.clone(), of_proxy.clone());
        let (shown, file) = (of_proxy.clone(), file.clone());
        async move {
            // It ends with this run.
            let ends = stop.child_token();
            let _end = ends.clone().drop_guard();
            skiff_supervise::keep("proxy-status", &ends, move || {
                write_summary(shown.clone(), file.clone())
            });
            let ended = skiff_network::proxy::run(config, client, metrics, stop).await;
            ended.map_err(|e| e.to_string())
        }
        .boxed()
    };
    Ok(Prepared::new(run).measured(metrics))
}

/// Where `skiff status` reads what the proxy has in the kernel.
pub const PROXY_FILE: &str = "proxy.json";
const SUMMARY_PERIOD: Duration = Duration::from_secs(1);

/// Writes the file when something has changed.
async fn write_summary(metrics: Arc<skiff_network::proxy::Metrics>, file: PathBuf) {
    let mut written = None;
    loop {
        let summary = metrics.summary();
        if written.as_ref() != Some(&summary) {
            let bytes = serde_json::to_vec(&summary).unwrap_or_default();
            if let Err(error) = skiff_fs::write_atomically(&file, &bytes, 0o600) {
                tracing::debug!(%error, "cannot write the proxy's summary");
            }
            written = Some(summary);
        }
        tokio::time::sleep(SUMMARY_PERIOD).await;
    }
}

pub(super) async fn prepare_dns(machine: &Machine) -> Result<Prepared> {
    let cluster = &machine.cluster;
    let gateway = cluster.pod_gateway()?;
    let metrics = component_metrics();
    let config = skiff_dns::DnsConfig {
        listen: match machine.runs(Component::Node) {
            true => skiff_dns::Listen::Gateways {
                node: machine.node_name.clone(),
            },
            false => skiff_dns::Listen::On(vec![SocketAddr::new(gateway, 53)]),
        },
        pods: cluster.pod_cidrs()?,
        domain: machine.args.cluster_domain.clone(),
        resolv_conf: PathBuf::from("/etc/resolv.conf"),
        own: vec![gateway, cluster.service_ip(10)?],
        node_name: machine.node_name.clone(),
        metrics: Arc::new(skiff_dns::Metrics::new(&metrics.registry)),
    };
    let prepared = Prepared::new(move |client, stop| {
        let config = config.clone();
        async move {
            let ended = skiff_dns::run(config, client, stop).await;
            ended.map_err(|e| e.to_string())
        }
        .boxed()
    });
    Ok(prepared.measured(metrics))
}

/// The EndpointSlices of cluster DNS, one of every node that runs it.
pub(super) async fn prepare_dns_endpoints(_: &Machine) -> Result<Prepared> {
    Ok(Prepared::new(|client, stop| {
        async move {
            let ended = skiff_network::dns_endpoints::run(client, stop).await;
            ended.map_err(|e| e.to_string())
        }
        .boxed()
    }))
}

/// The Metrics API: behind the API server like an aggregated one, and a client of it like any component.
pub(super) async fn prepare_metrics(machine: &Machine) -> Result<Prepared> {
    let Access::Here(server) = machine.access()? else {
        bail!("the Metrics API is served by the API server");
    };
    let ca = machine.control_plane()?.certificates.current_ca.subscribe();
    let api = MetricsApi::default();
    let handler = api.clone();
    let local = LocalApi::new(move |request| {
        let api = handler.clone();
        async move { api.answer(&request.into_parts().0) }
    });
    server
        .serve_locally(skiff_metrics::GROUP, skiff_metrics::VERSION, local)
        .await?;
    Ok(Prepared::new(move |client, stop| {
        let (api, ca) = (api.clone(), ca.clone());
        async move {
            skiff_metrics::run(MetricsConfig { client, ca }, api, stop).await;
            Ok(())
        }
        .boxed()
    }))
}

/// The ingress proxy. A port that another program has does not fail the start: it is said, and tried again.
pub(super) async fn prepare_ingress(machine: &Machine) -> Result<Prepared> {
    let (args, cluster) = (&machine.args.ingress, &machine.cluster);
    let (http_port, https_port) = (args.http_port(cluster), args.https_port(cluster));
    let supervisor = machine.supervisor.clone();
    if http_port.is_none() && https_port.is_none() && !args.gateway_api {
        cluster.close_listening_sockets();
        return Ok(Prepared::alone(move |stop| {
            let supervisor = supervisor.clone();
            async move {
                let why = "no port; see --ingress-http-port and --ingress-https-port";
                supervisor.set("ingress", "off", why);
                stop.cancelled().await;
                Ok(())
            }
            .boxed()
        }));
    }
    let metrics = component_metrics();
    let config = skiff_ingress::IngressConfig {
        http_port,
        https_port,
        node_name: machine.node_name.clone(),
        instance: machine.server_id.clone(),
        address: machine.node_address,
        services: skiff_meta::net::parse_list(&cluster.service_cidr)?,
        host_ports: vec![cluster.bind.port()],
        access_log: args.ingress_access_log,
        gateway_addresses: args.gateway_addresses.clone(),
        metrics: metrics.clone(),
        sockets: Arc::new(skiff_sockets::Sockets::open(&cluster.listening_sockets())),
        report: Arc::new(move |problem| match problem.is_empty() {
            true => supervisor.set("ingress", "running", ""),
            false => supervisor.set("ingress", "waiting", problem),
        }),
        on_park: Arc::new(crate::memory::tidy),
    };
    let prepared = Prepared::new(move |client, stop| {
        let config = config.clone();
        async move {
            let ended = skiff_ingress::run(config, client, stop).await;
            ended.map_err(|e| e.to_string())
        }
        .boxed()
    });
    Ok(prepared.measured(metrics))
}

/// Gives Services of type LoadBalancer addresses of the pool or of the nodes. What the machines need themselves is not for
/// Services.
pub(super) async fn prepare_load_balancer(machine: &Machine) -> Result<Prepared> {
    let (args, cluster) = (&machine.args.ingress, &machine.cluster);
    let (http, https) = match machine.runs(Component::Ingress) {
        true => (args.http_port(cluster), args.https_port(cluster)),
        false => (None, None),
    };
    let reserved: skiff_network::load_balancer::Reserved = [
        (Some(22), "the machine's own remote access"),
        (Some(cluster.bind.port()), "the API server"),
        (Some(KUBELET_PORT), "the kubelet"),
        (Some(cluster.kubelet_port), "the kubelet"),
        (http, "the ingress proxy"),
        (https, "the ingress proxy"),
    ]
    .into_iter()
    .filter_map(|(port, owner)| Some((("TCP".to_owned(), port?), owner)))
    .collect();
    let pool = machine.args.load_balancer_pool.clone();
    check_pool(&pool, cluster, machine.node_address)?;
    let config = skiff_network::load_balancer::BalancerConfig {
        reserved,
        pool,
        identity: machine.lease_holder(),
    };
    Ok(Prepared::new(move |client, stop| {
        let config = config.clone();
        async move {
            skiff_network::load_balancer::run(config, client, stop).await;
            Ok(())
        }
        .boxed()
    }))
}

/// Addresses that are something else's would break it.
fn check_pool(
    pool: &[skiff_network::load_balancer::Range],
    cluster: &Cluster,
    node_address: std::net::IpAddr,
) -> Result<()> {
    for range in pool {
        let first = range.first();
        let link_local = matches!(first, std::net::IpAddr::V6(first) if first.is_unicast_link_local());
        if first.is_loopback() || first.is_multicast() || first.is_unspecified() || link_local {
            bail!("--load-balancer-pool {range} is not for hosts");
        }
        let pods = cluster
            .pod_cidrs()?
            .into_iter()
            .map(|network| ("--cluster-cidr", network));
        let services = cluster.service_cidrs()?.into_iter();
        let services = services.map(|network| ("--service-cluster-ip-range", network));
        for (flag, network) in pods.chain(services) {
            if range.overlaps(network) {
                bail!("--load-balancer-pool {range} overlaps {flag} {network}; choose other addresses");
            }
        }
        if range.contains(node_address) {
            // No Service gets it, so that a pool may be all of the nodes' network.
            tracing::info!(%range, %node_address, "the pool contains this node's own address; no Service gets that");
        }
    }
    Ok(())
}

/// Announces addresses of the pool on this node's link, if Services have some.
pub(super) async fn prepare_announcer(machine: &Machine) -> Result<Prepared> {
    if !machine.runs(Component::Node) {
        return Ok(Prepared::idle());
    }
    let config = machine.cluster.announce_config(&machine.node_name);
    Ok(Prepared::new(move |client, stop| {
        let config = config.clone();
        async move {
            let ended = skiff_network::announce::run(config, client, stop).await;
            ended.map_err(|e| e.to_string())
        }
        .boxed()
    }))
}

impl Cluster {
    pub fn announce_config(&self, node_name: &str) -> skiff_network::announce::AnnounceConfig {
        let bridge = self.bridge();
        skiff_network::announce::AnnounceConfig {
            node_name: node_name.to_owned(),
            state_dir: self.data_dir.join("cni"),
            skipped_devices: vec![format!("{bridge}-vxlan"), format!("{bridge}-wg"), bridge],
        }
    }

    pub fn proxy_config(&self, node_name: &str) -> Result<skiff_network::proxy::ProxyConfig> {
        Ok(skiff_network::proxy::ProxyConfig {
            table: self.nft_table(),
            node_name: node_name.to_owned(),
            pod_cidrs: self.pod_cidrs()?,
            service_cidrs: self.service_cidrs()?,
            host_ports: vec![self.bind.port(), self.kubelet_port],
            bridge: Some(self.bridge()),
            node_port_addresses: Vec::new(),
            // Ports of the machine: the cluster of the default name has them.
            healthz: (self.slot == 0).then_some(SocketAddr::from(([0, 0, 0, 0], HEALTHZ_PORT))),
            metrics: (self.slot == 0).then_some(SocketAddr::from(([127, 0, 0, 1], METRICS_PORT))),
        })
    }
}
