//! Notices that the store was replaced under the server: emptied, or restored from a backup. The caches start over by
//! themselves; here is made again what a server makes at its start. It is not ready meanwhile.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use parking_lot::Mutex;
use skiff_meta::Status;

use super::{endpoints, rbac_source, repair};
use crate::flow;
use crate::server::Inner;

const INTERVAL: Duration = Duration::from_secs(2);
const RETRY: Duration = Duration::from_millis(500);

/// What is seen of the store.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Seen {
    revision: i64,
    /// See [`skiff_registry::Registry::adopted_at`].
    adopted: Option<i64>,
}

pub async fn start(inner: &Arc<Inner>) -> Result<(), Status> {
    // What a run that failed has not restored yet is restored by the next.
    let seen = Arc::new(Mutex::new(look(inner).await?));
    let own = inner.clone();
    skiff_supervise::keep("store-history", &inner.shutdown, move || {
        let (inner, seen) = (own.clone(), seen.clone());
        async move { run(&inner, &seen).await }
    });
    Ok(())
}

async fn look(inner: &Inner) -> Result<Seen, Status> {
    let revision = inner.registry.store().revision().await;
    Ok(Seen {
        revision: revision.map_err(skiff_registry::store_error)?,
        adopted: inner.registry.adopted_at().await?,
    })
}

async fn run(inner: &Arc<Inner>, seen: &Mutex<Seen>) {
    loop {
        tokio::time::sleep(INTERVAL).await;
        // A store that is away for a while is not another one.
        let Ok(now) = look(inner).await else { continue };
        let before = *seen.lock();
        if now.adopted != before.adopted || now.revision < before.revision {
            tracing::error!(
                ?before,
                ?now,
                "the store was replaced: making the bootstrap objects again"
            );
            inner.ready.store(false, Ordering::Release);
            while let Err(status) = restore(inner).await {
                tracing::warn!(%status, "cannot restore the bootstrap objects");
                tokio::time::sleep(RETRY).await;
            }
            let Ok(restored) = look(inner).await else { continue };
            *seen.lock() = restored;
            inner.ready.store(true, Ordering::Release);
        } else {
            *seen.lock() = now;
        }
    }
}

/// What a server does at its start, but for what goes on by itself.
async fn restore(inner: &Arc<Inner>) -> Result<(), Status> {
    inner.registry.note_foreign_values().await?;
    inner.registry.repair_node_ports().await?;
    inner.registry.bootstrap(inner.advertise).await?;
    rbac_source::ensure(inner).await?;
    repair::publish(inner).await?;
    endpoints::publish(inner).await?;
    flow::ensure(inner).await
}
