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
    let run = move |client, stop| {
        let (config, metrics) = (config.clone(), of_proxy.clone());
        async move {
            let ended = skiff_network::proxy::run(config, client, metrics, stop).await;
            ended.map_err(|e| e.to_string())
        }
        .boxed()
    };
    Ok(Prepared::new(run).measured(metrics))
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
    if http_port.is_none() && https_port.is_none() {
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
        metrics: metrics.clone(),
        report: Arc::new(move |problem| match problem.is_empty() {
            true => supervisor.set("ingress", "running", ""),
            false => supervisor.set("ingress", "waiting", problem),
        }),
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

/// Gives Services of type LoadBalancer the nodes' addresses. What the machines need themselves is not for Services.
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
    Ok(Prepared::new(move |client, stop| {
        let reserved = reserved.clone();
        async move {
            skiff_network::load_balancer::run(reserved, client, stop).await;
            Ok(())
        }
        .boxed()
    }))
}

impl Cluster {
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
