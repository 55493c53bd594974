//! The flags of the ingress proxy.

use crate::cluster::{Cluster, DEFAULT_NAME};
use clap::Args;

const HTTP: u16 = 80;
const HTTPS: u16 = 443;

#[derive(Debug, Clone, Default, Args)]
pub struct IngressArgs {
    /// Port of Ingresses without TLS; 0: none [default: 80, and none for clusters of other names than skiff]
    #[arg(long, value_name = "PORT")]
    pub ingress_http_port: Option<u16>,
    /// Port of Ingresses with TLS; 0: none [default: 443, and none for clusters of other names than skiff]
    #[arg(long, value_name = "PORT")]
    pub ingress_https_port: Option<u16>,
    /// Write a line of the log for every request to an Ingress
    #[arg(long)]
    pub ingress_access_log: bool,
    /// Install the definitions of Gateway API, where there are none, and the GatewayClass skiff
    #[arg(long)]
    pub gateway_api: bool,
    /// Addresses of this machine to give to one Gateway each; without them Gateways share the nodes' addresses
    #[arg(long, value_name = "LIST", value_delimiter = ',')]
    pub gateway_addresses: Vec<std::net::IpAddr>,
}

impl IngressArgs {
    pub fn http_port(&self, cluster: &Cluster) -> Option<u16> {
        port(self.ingress_http_port, cluster, HTTP)
    }

    pub fn https_port(&self, cluster: &Cluster) -> Option<u16> {
        port(self.ingress_https_port, cluster, HTTPS)
    }
}

/// Clusters side by side cannot all have the well-known ports: without a flag, the default cluster has them.
fn port(flag: Option<u16>, cluster: &Cluster, default: u16) -> Option<u16> {
    let default = if cluster.name == DEFAULT_NAME { default } else { 0 };
    Some(flag.unwrap_or(default)).filter(|port| *port != 0)
}
