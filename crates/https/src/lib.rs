//! The one client for calls that the server makes to others' servers: webhooks, key sets of identity providers, audit
//! collectors. It posts or gets one document over TLS, keeps a few connections, and is bounded in time, in size and in
//! the number of calls. What went wrong is told in upstream's words, because users look for them. It knows no
//! Kubernetes object and no service of the cluster.

mod answer;
mod client;
mod kubeconfig;
mod retry;

pub use answer::Answer;
pub use client::{Call, CallTarget, Client, Failure};
pub use kubeconfig::{BadKubeconfig, Endpoint};
pub use retry::Backoff;

use std::sync::Arc;

/// Where systems keep the certificates that they trust.
const SYSTEM_BUNDLES: [&str; 2] = [
    "/etc/ssl/certs/ca-certificates.crt",
    "/etc/pki/tls/certs/ca-bundle.crt",
];

/// Trusts the authorities of this PEM, or what the machine trusts if there is none.
pub fn trusting(ca: Option<&str>) -> Result<Arc<rustls::ClientConfig>, String> {
    trusting_as(ca, None)
}

/// The same, showing a certificate of its own.
pub fn trusting_as(
    ca: Option<&str>,
    identity: Option<&skiff_pki::Identity>,
) -> Result<Arc<rustls::ClientConfig>, String> {
    let system;
    let pem = match ca {
        Some(pem) => pem,
        None => {
            let found = SYSTEM_BUNDLES
                .iter()
                .find_map(|path| std::fs::read_to_string(path).ok());
            system = found
                .ok_or("tls: failed to verify certificate: x509: certificate signed by unknown authority")?;
            &system
        }
    };
    let config = skiff_pki::pinning_client_config(pem, identity);
    config.map(Arc::new).map_err(|error| error.to_string())
}
