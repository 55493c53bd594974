//! Feeds the authorizer: the bootstrap roles at start, then every change of an RBAC object as the cache
//! tells it. Also looks up the objects that tokens are bound to.

use std::sync::Arc;

use async_trait::async_trait;
use serde_json::Value;
use skiff_auth::{Authorizer, Lookup};
use skiff_meta::{Status, time};
use skiff_registry::{EventKind, ReadAt, Registry, Resource, encode, object};

use super::follow::{Event, Follower, follow};
use crate::server::Inner;

const GROUP: &str = "rbac.authorization.k8s.io";
const RESOURCES: [&str; 4] = ["clusterroles", "clusterrolebindings", "roles", "rolebindings"];

/// Makes the missing bootstrap objects, and adds what present ones lack.
pub async fn ensure(inner: &Arc<Inner>) -> Result<(), Status> {
    let resources = &inner.registry.resources;
    let serves = |group: &str, version: &str, plural: &str| resources.get(group, version, plural).is_some();
    let mut objects = skiff_auth::bootstrap_objects(serves);
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
    Ok(())
}

/// Lets every stored object take effect, and follows them.
pub async fn start(inner: &Arc<Inner>) -> Result<(), Status> {
    for plural in RESOURCES {
        let Some(resource) = inner.registry.resources.get(GROUP, "v1", plural).cloned() else {
            continue;
        };
        // A role that cannot be read gives nobody anything.
        let listed = inner.registry.list_readable(&resource).await?;
        let present: Result<Vec<Value>, Status> = listed
            .items
            .iter()
            .map(|entry| encode::decode(&entry.bytes))
            .collect();
        inner.authorizer.rbac.update(present?.iter().map(Ok));
        let follower = Follower::after(inner, resource.clone(), &listed);
        let authorizer = inner.authorizer.clone();
        follow(&inner.shutdown, "rbac", follower, move |event| {
            apply(&authorizer, &resource, &event);
        });
    }
    Ok(())
}

/// One change of an object of the four resources.
fn apply(authorizer: &Authorizer, resource: &Resource, event: &Event) {
    let Ok(value) = encode::decode(&event.entry.bytes) else {
        return;
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

/// The live objects that tokens are bound to.
/// A token is good for a little longer than what it is bound to.
const LEEWAY_SECONDS: i64 = 60;

/// Whether an object should have been gone for longer than that.
fn long_gone(bytes: &[u8]) -> bool {
    let deleted = encode::decode(bytes).ok().and_then(|object| {
        let text = object::at_str(&object, &["metadata", "deletionTimestamp"]).to_owned();
        time::parse(&text)
    });
    deleted.is_none_or(|at| at.as_second() + LEEWAY_SECONDS < jiff::Timestamp::now().as_second())
}

pub struct UidLookup(pub Arc<Registry>);

#[async_trait]
impl Lookup for UidLookup {
    async fn uid(&self, resource: &str, namespace: &str, name: &str) -> Option<String> {
        let resource = self.0.resources.get("", "v1", resource)?.clone();
        // A token is often used the moment its objects were made: the cache may be a breath behind.
        for at in [ReadAt::Any, ReadAt::Latest] {
            if let Ok(Some(entry)) = self.0.get_entry(&resource, namespace, name, at).await {
                return (!entry.head.deleting || !long_gone(&entry.bytes))
                    .then(|| entry.head.uid.to_string());
            }
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_being_deleted_is_gone_after_a_minute() {
        let at = |seconds: i64| {
            let time = jiff::Timestamp::from_second(jiff::Timestamp::now().as_second() + seconds).unwrap();
            let text = time::format_seconds(time);
            serde_json::json!({"metadata": {"deletionTimestamp": text}}).to_string()
        };
        assert!(!long_gone(at(30).as_bytes()));
        assert!(!long_gone(at(-30).as_bytes()));
        assert!(long_gone(at(-90).as_bytes()));
        assert!(long_gone(b"{}"));
    }
}
