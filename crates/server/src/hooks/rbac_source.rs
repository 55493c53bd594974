//! Feeds the authorizer: the bootstrap roles at start, then every change of an RBAC object as the cache
//! tells it. Also looks up the objects that tokens are bound to.

use std::sync::Arc;

use async_trait::async_trait;
use serde_json::Value;
use skiff_auth::{Authorizer, Lookup};
use skiff_meta::Status;
use skiff_registry::{EventKind, ReadAt, Registry, Resource, WatchFrom, WatchOptions, encode, object};
use tokio_util::sync::CancellationToken;

use crate::server::Inner;

const GROUP: &str = "rbac.authorization.k8s.io";
const RESOURCES: [&str; 4] = ["clusterroles", "clusterrolebindings", "roles", "rolebindings"];

/// Makes the missing bootstrap objects, adds what present ones lack, and lets every stored one take effect
/// before the first request.
pub async fn bootstrap(inner: &Arc<Inner>) -> Result<(), Status> {
    let mut objects = skiff_auth::bootstrap_objects();
    skiff_auth::fill_aggregated(&mut objects);
    inner.authorizer.rbac.update(objects.iter().map(Ok));
    let writes = objects
        .into_iter()
        .map(|object| inner.registry.ensure_merged(object, skiff_auth::reconcile));
    for result in futures::future::join_all(writes).await {
        match result {
            // The authorizer has it already; only reading it through the API would miss it.
            Err(status) if status.code == 422 => tracing::error!(%status, "a bootstrap role is refused"),
            result => result?,
        }
    }
    for plural in RESOURCES {
        let Some(resource) = inner.registry.resources.get(GROUP, "v1", plural).cloned() else {
            continue;
        };
        let listed = inner
            .registry
            .list(&resource, skiff_registry::ListOptions::default())
            .await?;
        let present: Result<Vec<Value>, Status> = listed
            .items
            .iter()
            .map(|entry| encode::decode(&entry.bytes))
            .collect();
        inner.authorizer.rbac.update(present?.iter().map(Ok));
        let (registry, authorizer, shutdown) = (
            inner.registry.clone(),
            inner.authorizer.clone(),
            inner.shutdown.clone(),
        );
        tokio::spawn(follow(registry, authorizer, resource, listed.revision, shutdown));
    }
    Ok(())
}

/// Follows one of the four resources for as long as the server runs.
async fn follow(
    registry: Arc<Registry>,
    authorizer: Arc<Authorizer>,
    resource: Arc<Resource>,
    mut revision: i64,
    shutdown: CancellationToken,
) {
    while !shutdown.is_cancelled() {
        let options = WatchOptions {
            from: WatchFrom::After(revision),
            ..WatchOptions::default()
        };
        let mut watcher = match registry.watch(&resource, options).await {
            Ok(watcher) => watcher,
            Err(status) => {
                tracing::warn!(%status, resource = resource.plural, "cannot follow RBAC objects");
                if status.code == 410 {
                    let state = WatchOptions {
                        from: WatchFrom::State(ReadAt::Latest),
                        ..WatchOptions::default()
                    };
                    match registry.watch(&resource, state).await {
                        Ok(watcher) => watcher,
                        Err(_) => continue,
                    }
                } else {
                    tokio::time::sleep(std::time::Duration::from_millis(100)).await;
                    continue;
                }
            }
        };
        loop {
            let event = tokio::select! {
                event = watcher.next() => event,
                () = shutdown.cancelled() => return,
            };
            let Some(event) = event else { break };
            revision = event.revision;
            let Some(entry) = &event.entry else { continue };
            let Ok(value) = encode::decode(&entry.bytes) else {
                continue;
            };
            if event.kind == EventKind::Deleted {
                let gone = (
                    resource.kind.as_str(),
                    object::namespace(&value),
                    object::name(&value),
                );
                authorizer.rbac.update([Err(gone)]);
            } else {
                authorizer.rbac.update([Ok(&value)]);
            }
        }
    }
}

/// The live objects that tokens are bound to.
pub struct UidLookup(pub Arc<Registry>);

#[async_trait]
impl Lookup for UidLookup {
    async fn uid(&self, resource: &str, namespace: &str, name: &str) -> Option<String> {
        let resource = self.0.resources.get("", "v1", resource)?.clone();
        // A token is often used the moment its objects were made: the cache may be a breath behind.
        for at in [ReadAt::Any, ReadAt::Latest] {
            if let Ok(Some(entry)) = self.0.get_entry(&resource, namespace, name, at).await {
                return (!entry.head.deleting || resource.plural == "pods")
                    .then(|| entry.head.uid.to_string());
            }
        }
        None
    }
}
