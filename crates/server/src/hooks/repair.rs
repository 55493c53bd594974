//! Makes again, while the server runs, what a user may delete but a cluster cannot do without: the namespaces of the
//! system, the `kubernetes` service, and what extension API servers check certificates against. Nothing is written while
//! all of it is there.

use std::sync::Arc;
use std::time::Duration;

use skiff_meta::Status;

use crate::server::Inner;

/// As often as upstream looks after the endpoints of `kubernetes`.
const INTERVAL: Duration = Duration::from_secs(10);

pub fn start(inner: &Arc<Inner>) {
    let inner = inner.clone();
    tokio::spawn(async move {
        loop {
            tokio::select! {
                () = tokio::time::sleep(INTERVAL) => {}
                () = inner.shutdown.cancelled() => return,
            }
            if let Err(status) = repair(&inner).await {
                tracing::warn!(%status, "what every cluster has cannot be made again");
            }
        }
    });
}

pub async fn repair(inner: &Inner) -> Result<(), Status> {
    inner.registry.repair(inner.advertise).await?;
    publish(inner).await
}

/// Says in the cluster which authorities client certificates are checked against.
pub async fn publish(inner: &Inner) -> Result<(), Status> {
    let Some((client_ca, front_proxy_ca)) = &inner.published else {
        return Ok(());
    };
    let registry = &inner.registry;
    registry
        .publish_authorities(client_ca, front_proxy_ca.as_deref())
        .await
}
