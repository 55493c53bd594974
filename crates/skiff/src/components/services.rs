//! What makes services work: the proxy, cluster DNS, and the Metrics API behind the API server.

use super::{Access, Machine, Prepared};
use crate::cli::Component;
use crate::cluster::Cluster;
use anyhow::{Result, bail};
use futures::FutureExt;
use skiff_metrics::{MetricsApi, MetricsConfig};
use skiff_server::LocalApi;
use std::net::SocketAddr;

pub(super) async fn prepare_proxy(machine: &Machine) -> Result<Prepared> {
    let config = machine.cluster.proxy_config(&machine.node_name)?;
    Ok(Prepared::new(move |client, stop| {
        let config = config.clone();
        async move {
            let ended = skiff_network::proxy::run(config, client, stop).await;
            ended.map_err(|e| e.to_string())
        }
        .boxed()
    }))
}

pub(super) async fn prepare_dns(machine: &Machine) -> Result<Prepared> {
    let cluster = &machine.cluster;
    let own = [cluster.pod_gateway()?, cluster.service_ip(10)?];
    let resolv_conf = std::fs::read_to_string("/etc/resolv.conf").unwrap_or_default();
    let config = skiff_dns::DnsConfig {
        listen: match machine.runs(Component::Node) {
            true => skiff_dns::Listen::Gateways {
                node: machine.node_name.clone(),
            },
            false => skiff_dns::Listen::On(vec![SocketAddr::new(own[0], 53)]),
        },
        pods: cluster.pod_cidrs()?,
        domain: machine.args.cluster_domain.clone(),
        resolvers: skiff_dns::host_resolvers(&resolv_conf, &own),
    };
    Ok(Prepared::new(move |client, stop| {
        let config = config.clone();
        async move {
            let ended = skiff_dns::run(config, client, stop).await;
            ended.map_err(|e| e.to_string())
        }
        .boxed()
    }))
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

impl Cluster {
    pub fn proxy_config(&self, node_name: &str) -> Result<skiff_network::proxy::ProxyConfig> {
        Ok(skiff_network::proxy::ProxyConfig {
            table: self.nft_table(),
            node_name: node_name.to_owned(),
            pod_cidrs: self.pod_cidrs()?,
            service_cidrs: vec![self.service_cidr.parse()?],
            host_ports: vec![self.bind.port(), self.kubelet_port],
            bridge: Some(self.bridge()),
        })
    }
}
