//! What makes services work: the proxy, cluster DNS, and the Metrics API behind the API server.

use super::{Access, Machine, Prepared};
use crate::cluster::Cluster;
use anyhow::{Result, bail};
use futures::FutureExt;
use skiff_metrics::{MetricsApi, MetricsConfig};
use skiff_server::LocalApi;
use std::net::SocketAddr;

pub(super) async fn prepare_proxy(machine: &Machine) -> Result<Prepared> {
    let cluster = &machine.cluster;
    let own = match &machine.control_plane {
        Some(_) => Some(cluster.node_pod_cidr()?),
        None => None,
    };
    let config = cluster.proxy_config(&machine.node_name, own.as_deref())?;
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
    let gateway = cluster.pod_gateway()?;
    let own = [gateway, cluster.service_ip(10).unwrap_or(gateway)];
    let resolv_conf = std::fs::read_to_string("/etc/resolv.conf").unwrap_or_default();
    let config = skiff_dns::DnsConfig {
        bind: SocketAddr::new(gateway, 53),
        pods: cluster.pod_cidr.parse()?,
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
    /// `own` is this node's part of the pod network, if it is known.
    pub fn proxy_config(
        &self,
        node_name: &str,
        own: Option<&str>,
    ) -> Result<skiff_network::proxy::ProxyConfig> {
        let network = |text: &str| text.parse().map_err(anyhow::Error::msg);
        Ok(skiff_network::proxy::ProxyConfig {
            table: self.nft_table(),
            node_name: node_name.to_owned(),
            pod_cidr: Some(network(&self.pod_cidr)?),
            service_cidr: Some(network(&self.service_cidr)?),
            masquerade_from: own.map(network).transpose()?,
            host_ports: vec![self.bind.port(), self.kubelet_port],
            bridge: Some(self.bridge()),
        })
    }
}
