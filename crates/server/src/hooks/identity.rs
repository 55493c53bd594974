//! The Lease by which this API server says that it is there, renewed for as long as it runs. Leases of servers that have
//! not renewed theirs for its whole duration are deleted, by whichever server comes to it first.

use std::sync::Arc;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use skiff_meta::{Status, time};
use skiff_registry::object;

use crate::hooks::loopback::Loopback;
use crate::server::Inner;

const RENEW: Duration = Duration::from_secs(10);
/// How often the leases of others are looked at, and how long they last without being renewed.
const COLLECT: Duration = Duration::from_secs(600);
const DURATION_SECONDS: i64 = 3600;
const LEASES: &str = "/apis/coordination.k8s.io/v1/namespaces/kube-system/leases";
const SELECTED: &str = "labelSelector=apiserver.kubernetes.io/identity%3Dkube-apiserver";
/// Which server the Lease is of: two of them may have one host name.
const INSTANCE: &str = "skiff.io/instance";
const VERSION: &str = "skiff.io/version";

pub fn start(inner: &Arc<Inner>) {
    let host = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    let identity = Arc::new(Identity {
        host: host.trim().to_string(),
        process: uuid::Uuid::new_v4().to_string(),
    });
    let own = inner.clone();
    skiff_supervise::keep("identity-lease", &inner.shutdown, move || {
        run(own.clone(), identity.clone())
    });
}

/// What the Lease says of this server beside its address.
struct Identity {
    host: String,
    /// Another one at every start.
    process: String,
}

async fn run(inner: Arc<Inner>, identity: Arc<Identity>) {
    let loopback = Loopback::new(&inner);
    let mut collected: Option<Instant> = None;
    loop {
        if let Err(status) = renew(&loopback, &inner, &identity).await {
            tracing::warn!(%status, "the lease of the API server cannot be renewed");
        }
        if collected.is_none_or(|at| at.elapsed() >= COLLECT) {
            collected = Some(Instant::now());
            if let Err(status) = collect(&loopback, &inner).await {
                tracing::warn!(%status, "the leases of API servers that are gone cannot be deleted");
            }
        }
        tokio::time::sleep(RENEW).await;
    }
}

/// The same on every start on this host. `instance` is empty in upstream's name.
fn name_of(host: &str, instance: &str) -> String {
    const ALPHABET: &[u8; 32] = b"abcdefghijklmnopqrstuvwxyz234567";
    let mut hashed = Vec::new();
    let instance = (!instance.is_empty()).then_some(instance);
    for text in [host, "kube-apiserver"].into_iter().chain(instance) {
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

/// Renews the Lease of upstream's name, or, if another server of this host name has it, one of this server's own.
async fn renew(loopback: &Loopback, inner: &Inner, identity: &Identity) -> Result<(), Status> {
    let now = inner.registry.now();
    for instance in ["", &inner.instance] {
        let name = name_of(&identity.host, instance);
        let (mut taken, path) = (false, format!("{LEASES}/{name}"));
        let set = |lease: Value| {
            let owner = object::at_str(&lease, &["metadata", "annotations", INSTANCE]);
            taken = !owner.is_empty() && owner != inner.instance && !is_over(&lease, now);
            Ok((!taken).then(|| renewed(lease, inner, identity, &name, now)))
        };
        match loopback.update(&path, "", set).await {
            Err(status) if status.code == 404 => {
                let lease = json!({"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": {"name": name}});
                let lease = renewed(lease, inner, identity, &name, now);
                return loopback.ensure(LEASES, &lease).await;
            }
            Ok(_) if taken && !inner.instance.is_empty() => {}
            result => return result.map(drop),
        }
    }
    Ok(())
}

fn renewed(mut lease: Value, inner: &Inner, identity: &Identity, name: &str, now: jiff::Timestamp) -> Value {
    let metadata = &mut lease["metadata"];
    metadata["labels"]["apiserver.kubernetes.io/identity"] = json!("kube-apiserver");
    metadata["labels"]["kubernetes.io/hostname"] = json!(identity.host);
    metadata["annotations"]["kubernetes.io/peer-advertise-address"] = json!(inner.server_address);
    metadata["annotations"][VERSION] = json!(inner.version.git_version);
    if !inner.instance.is_empty() {
        metadata["annotations"][INSTANCE] = json!(inner.instance);
    }
    lease["spec"] = json!({
        "holderIdentity": format!("{name}_{}", identity.process),
        "leaseDurationSeconds": DURATION_SECONDS,
        "renewTime": now.strftime("%Y-%m-%dT%H:%M:%S.%6fZ").to_string(),
    });
    lease
}

/// Whether a Lease has not been renewed for its whole duration.
fn is_over(lease: &Value, now: jiff::Timestamp) -> bool {
    let renewed = time::parse(object::at_str(lease, &["spec", "renewTime"]));
    let duration = object::at(lease, &["spec", "leaseDurationSeconds"]).and_then(Value::as_i64);
    renewed.is_none_or(|at| at.as_second() + duration.unwrap_or(DURATION_SECONDS) < now.as_second())
}

async fn collect(loopback: &Loopback, inner: &Inner) -> Result<(), Status> {
    let listed = loopback.get(&format!("{LEASES}?{SELECTED}")).await?;
    let leases = listed.as_ref().and_then(|list| list["items"].as_array());
    for lease in leases.into_iter().flatten() {
        if is_over(lease, inner.registry.now()) {
            let path = format!("{LEASES}/{}", object::name(lease));
            loopback.delete(&path, object::uid(lease)).await?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn upstreams_name_of_a_host() {
        // As a kube-apiserver on a host of this name calls itself.
        assert_eq!(name_of("vm", ""), "apiserver-wlv32tlttr4jl3gtroqexyxapa");
        assert_ne!(name_of("vm", "1"), name_of("vm", "2"));
    }

    #[test]
    fn a_lease_is_over_after_its_duration() {
        let now: jiff::Timestamp = "2026-01-02T03:04:05Z".parse().unwrap();
        let lease = |renewed: &str| json!({"spec": {"renewTime": renewed, "leaseDurationSeconds": 60}});
        assert!(!is_over(&lease("2026-01-02T03:03:06.000000Z"), now));
        assert!(is_over(&lease("2026-01-02T03:03:04.000000Z"), now));
        assert!(is_over(&json!({}), now));
    }
}
