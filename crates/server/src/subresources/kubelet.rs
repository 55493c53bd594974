//! The way to a node's kubelet: its address from the Node object, a TLS connection with the API server's
//! own client certificate, checked against the cluster's CA.

use std::sync::Arc;
use std::time::Duration;

use rustls::pki_types::ServerName;
use serde_json::Value;
use skiff_meta::Status;
use skiff_registry::{ReadAt, object};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;

use crate::server::Inner;

const DEFAULT_PORT: u64 = 10250;
const CONNECT_LIMIT: Duration = Duration::from_secs(30);

/// How to speak to kubelets.
#[derive(Clone)]
pub struct KubeletClient {
    pub tls: Arc<rustls::ClientConfig>,
}

/// Where a kubelet listens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KubeletAddress {
    pub host: String,
    pub port: u16,
}

impl KubeletAddress {
    /// Whether a client that names this port of the node means its kubelet.
    ///
    /// COMPAT: clients take the default for granted, the official suite among them. A node that listens elsewhere
    /// shares its machine with other clusters, and what then is at the default port is another cluster's.
    pub fn is_meant_by(&self, port: &str) -> bool {
        port.is_empty() || port == self.port.to_string() || port == DEFAULT_PORT.to_string()
    }

    pub fn authority(&self) -> String {
        if self.host.contains(':') {
            format!("[{}]:{}", self.host, self.port)
        } else {
            format!("{}:{}", self.host, self.port)
        }
    }
}

/// Finds the kubelet of a node.
pub async fn address_of(inner: &Arc<Inner>, node: &str) -> Result<KubeletAddress, Status> {
    let resource = inner
        .registry
        .resources
        .get("", "v1", "nodes")
        .ok_or_else(|| Status::internal("no resource nodes"))?;
    let found = inner.registry.get(resource, "", node, ReadAt::Any).await?;
    let found = found.ok_or_else(|| Status::not_found(&resource.group_resource, node))?;
    read_address(&found)
        .ok_or_else(|| Status::internal(format_args!("no preferred addresses found; known addresses: []")))
}

/// Upstream's default order: host name first when it is all there is, addresses before names here,
/// because nodes need not be in any DNS.
fn read_address(node: &Value) -> Option<KubeletAddress> {
    let addresses = object::at(node, &["status", "addresses"]).and_then(Value::as_array)?;
    let of_type = |wanted: &str| {
        let found = addresses.iter().find(|address| address["type"] == wanted)?;
        found["address"]
            .as_str()
            .filter(|text| !text.is_empty())
            .map(str::to_string)
    };
    let host = [
        "InternalIP",
        "ExternalIP",
        "InternalDNS",
        "ExternalDNS",
        "Hostname",
    ]
    .into_iter()
    .find_map(of_type)?;
    let port =
        object::at(node, &["status", "daemonEndpoints", "kubeletEndpoint", "Port"]).and_then(Value::as_u64);
    let port = u16::try_from(port.filter(|port| *port != 0).unwrap_or(DEFAULT_PORT)).ok()?;
    Some(KubeletAddress { host, port })
}

impl KubeletClient {
    pub async fn connect(&self, address: &KubeletAddress) -> std::io::Result<TlsStream<TcpStream>> {
        let name = ServerName::try_from(address.host.clone()).map_err(std::io::Error::other)?;
        let dial = async {
            let stream = TcpStream::connect((address.host.as_str(), address.port)).await?;
            stream.set_nodelay(true)?;
            TlsConnector::from(self.tls.clone()).connect(name, stream).await
        };
        // Logs and exec may take as long as they like, but not to begin: a node that is gone answers nothing.
        let dialled = tokio::time::timeout(CONNECT_LIMIT, dial).await;
        dialled.unwrap_or_else(|_| Err(std::io::Error::new(std::io::ErrorKind::TimedOut, "i/o timeout")))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn addresses() {
        let node = json!({"status": {"addresses": [{"type": "Hostname", "address": "n"}, {"type": "InternalIP", "address": "10.0.0.1"}],
            "daemonEndpoints": {"kubeletEndpoint": {"Port": 7000}}}});
        assert_eq!(
            read_address(&node).map(|a| a.authority()),
            Some("10.0.0.1:7000".to_string())
        );
        let node = json!({"status": {"addresses": [{"type": "InternalIP", "address": "fd00::1"}]}});
        assert_eq!(
            read_address(&node).map(|a| a.authority()),
            Some("[fd00::1]:10250".to_string())
        );
        assert_eq!(read_address(&json!({})), None);
    }

    #[test]
    fn ports_of_the_kubelet() {
        let address = KubeletAddress {
            host: "10.0.0.1".to_string(),
            port: 7000,
        };
        for (port, expected) in [("", true), ("7000", true), ("10250", true), ("9100", false)] {
            assert_eq!(address.is_meant_by(port), expected, "{port}");
        }
    }
}
