//! Makes again, while the server runs, what a user may delete but a cluster cannot do without: the namespaces of the
//! system, the `kubernetes` service, and what extension API servers check certificates against. Nothing is written while
//! all of it is there. Also brings the record of node ports in line with the services.

use std::sync::Arc;
use std::time::{Duration, Instant};

use skiff_meta::Status;

use super::allocation_events::{About, report};
use crate::server::Inner;

/// As often as upstream looks after the endpoints of `kubernetes`.
const INTERVAL: Duration = Duration::from_secs(10);
/// As often as upstream compares the allocated node ports with the services.
const ALLOCATION_INTERVAL: Duration = Duration::from_secs(180);

pub fn start(inner: &Arc<Inner>) {
    let own = inner.clone();
    skiff_supervise::keep("bootstrap-repair", &inner.shutdown, move || run(own.clone()));
}

async fn run(inner: Arc<Inner>) {
    let mut compared = Instant::now();
    loop {
        tokio::time::sleep(INTERVAL).await;
        if let Err(status) = repair(&inner).await {
            tracing::warn!(%status, "cannot restore the bootstrap objects");
        }
        if compared.elapsed() >= ALLOCATION_INTERVAL {
            compared = Instant::now();
            if let Err(status) = repair_node_ports(&inner).await {
                tracing::warn!(%status, "cannot compare the allocated node ports with the services");
            }
        }
    }
}

pub async fn repair_node_ports(inner: &Arc<Inner>) -> Result<(), Status> {
    for found in inner.registry.repair_node_ports().await? {
        let about = About::service(&found.namespace, &found.name, &found.uid);
        report(inner, about, found.reason, "PortAllocation", &found.message).await;
    }
    Ok(())
}

pub async fn repair(inner: &Inner) -> Result<(), Status> {
    inner.registry.repair(inner.advertise).await?;
    publish(inner).await
}

/// Says in the cluster which authorities client certificates are checked against.
pub async fn publish(inner: &Inner) -> Result<(), Status> {
    let published = inner.published.lock().clone();
    let Some((client_ca, front_proxy_ca)) = published else {
        return Ok(());
    };
    let registry = &inner.registry;
    registry
        .publish_authorities(&client_ca, front_proxy_ca.as_deref())
        .await
}
