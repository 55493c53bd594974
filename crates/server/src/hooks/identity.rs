//! The Lease by which this API server says that it is there, renewed for as long as it runs.

use std::sync::Arc;
use std::time::Duration;

use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use skiff_meta::Status;

use crate::hooks::loopback::Loopback;
use crate::server::Inner;

const RENEW: Duration = Duration::from_secs(10);
const LEASES: &str = "/apis/coordination.k8s.io/v1/namespaces/kube-system/leases";

pub fn start(inner: &Arc<Inner>) {
    let host = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    let host = host.trim().to_string();
    let name = name_of(&host);
    let holder = format!("{name}_{}", uuid::Uuid::new_v4());
    let own = inner.clone();
    skiff_supervise::keep("identity-lease", &inner.shutdown, move || {
        let (inner, host, name, holder) = (own.clone(), host.clone(), name.clone(), holder.clone());
        let loopback = Loopback::new(&inner);
        async move {
            loop {
                if let Err(status) = renew(&loopback, &inner, &host, &name, &holder).await {
                    tracing::warn!(%status, "the lease of the API server cannot be renewed");
                }
                tokio::time::sleep(RENEW).await;
            }
        }
    });
}

/// The same on every start on this host.
fn name_of(host: &str) -> String {
    const ALPHABET: &[u8; 32] = b"abcdefghijklmnopqrstuvwxyz234567";
    let mut hashed = Vec::new();
    for text in [host, "kube-apiserver"] {
        hashed.extend_from_slice(&(text.len() as u16).to_be_bytes());
        hashed.extend_from_slice(text.as_bytes());
    }
    let digest = Sha256::digest(&hashed);
    let mut name = String::from("apiserver-");
    let (mut bits, mut held) = (0_u32, 0_u32);
    for byte in &digest[..16] {
        bits = (bits << 8) | u32::from(*byte);
        held += 8;
        while held >= 5 {
            held -= 5;
            name.push(ALPHABET[(bits >> held) as usize & 31] as char);
        }
    }
    if held > 0 {
        name.push(ALPHABET[(bits << (5 - held)) as usize & 31] as char);
    }
    name
}

async fn renew(
    loopback: &Loopback,
    inner: &Inner,
    host: &str,
    name: &str,
    holder: &str,
) -> Result<(), Status> {
    let now = inner
        .registry
        .now()
        .strftime("%Y-%m-%dT%H:%M:%S.%6fZ")
        .to_string();
    let set = |mut lease: Value| {
        lease["metadata"]["labels"]["apiserver.kubernetes.io/identity"] = json!("kube-apiserver");
        lease["metadata"]["labels"]["kubernetes.io/hostname"] = json!(host);
        lease["metadata"]["annotations"]["kubernetes.io/peer-advertise-address"] =
            json!(inner.server_address);
        lease["spec"] = json!({"holderIdentity": holder, "leaseDurationSeconds": 3600, "renewTime": now});
        lease
    };
    let path = format!("{LEASES}/{name}");
    match loopback.update(&path, "", |lease| Ok(Some(set(lease)))).await {
        Err(status) if status.code == 404 => {
            let lease =
                json!({"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": {"name": name}});
            loopback.ensure(LEASES, &set(lease)).await
        }
        result => result.map(drop),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn upstreams_name_of_a_host() {
        // As a kube-apiserver on a host of this name calls itself.
        assert_eq!(name_of("vm"), "apiserver-wlv32tlttr4jl3gtroqexyxapa");
    }
}
