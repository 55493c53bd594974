//! Feeds the Node authorizer: which pods, volumes, attachments, slices and requests for certificates there are, as the cache
//! tells it.

use std::sync::Arc;

use skiff_auth::node::{Sort, node_name};
use skiff_meta::Status;
use skiff_meta::selector::FieldSelector;
use skiff_registry::{Entry, EventKind, ListOptions, ReadAt, encode};

use super::follow::{Follower, follow};
use crate::chain::Exchange;
use crate::server::Inner;

const RESOURCES: [(&str, &str); 5] = [
    ("", "pods"),
    ("", "persistentvolumes"),
    ("storage.k8s.io", "volumeattachments"),
    ("resource.k8s.io", "resourceslices"),
    ("certificates.k8s.io", "podcertificaterequests"),
];

/// What a pod names may change in these parts only; where they are absent the pod need not be read again.
const CHANGING: [&[u8]; 3] = [
    b"\"ephemeralContainers\"",
    b"\"resourceClaimStatuses\"",
    b"\"extendedResourceClaimStatus\"",
];

/// Follows those that are served for as long as the server runs, once all that is there is known.
pub async fn start(inner: &Arc<Inner>) -> Result<(), Status> {
    for (group, plural) in RESOURCES {
        let Some(resource) = inner.registry.resources.preferred(group, plural).cloned() else {
            continue;
        };
        let listed = inner.registry.list_readable(&resource).await?;
        for entry in &listed.items {
            apply(inner, plural, EventKind::Added, entry);
        }
        let follower = Follower::after(inner, resource, &listed);
        let own = inner.clone();
        follow(&inner.shutdown, "node-graph", follower, move |event| {
            apply(&own, plural, event.kind, &event.entry);
        });
    }
    Ok(())
}

fn apply(inner: &Inner, plural: &str, kind: EventKind, entry: &Entry) {
    let (graph, head) = (&inner.authorizer.nodes, &entry.head);
    let gone = kind == EventKind::Deleted;
    if plural == "pods" {
        if gone {
            graph.remove_pod(&head.namespace, &head.name);
            return;
        }
        let node = head.field("spec.nodeName").unwrap_or("");
        let known = node.is_empty() || graph.has_pod(&head.namespace, &head.name, &head.uid, node);
        let changing = || CHANGING.iter().any(|part| contains(&entry.bytes, part));
        if known && !changing() {
            return;
        }
    }
    let object = match encode::decode(&entry.bytes) {
        Ok(object) => object,
        Err(status) => {
            tracing::error!(%status, plural, name = %head.name, "an object of a node cannot be read");
            return;
        }
    };
    let node = object.pointer("/spec/nodeName").and_then(|name| name.as_str());
    let node = node.filter(|_| !gone).unwrap_or("");
    match plural {
        "pods" => graph.add_pod(&object),
        "persistentvolumes" if gone => graph.remove_volume(&head.name),
        "persistentvolumes" => graph.add_volume(&object),
        "volumeattachments" => graph.set_node(Sort::VolumeAttachment, "", &head.name, node),
        "podcertificaterequests" => {
            graph.set_node(Sort::PodCertificateRequest, &head.namespace, &head.name, node);
        }
        _ => graph.set_node(Sort::ResourceSlice, "", &head.name, node),
    }
}

fn contains(bytes: &[u8], part: &[u8]) -> bool {
    memchr::memmem::find(bytes, part).is_some()
}

/// Reads the pods of the node that asks, in the namespace that it asks about: whether it is worth to
/// ask again. A kubelet sees a pod by the same cache as we do, and may ask for its secrets before we have looked.
pub async fn refresh(inner: &Inner, exchange: &Exchange) -> bool {
    let info = &exchange.info;
    let Some(node) = node_name(&exchange.user).filter(|node| !node.is_empty()) else {
        return false;
    };
    if info.namespace.is_empty() || info.name.is_empty() {
        return false;
    }
    let Some(pods) = inner.registry.resources.get("", "v1", "pods").cloned() else {
        return false;
    };
    let Ok(fields) = FieldSelector::parse(&format!("spec.nodeName={node}")) else {
        return false;
    };
    let options = ListOptions {
        namespace: Some(info.namespace.clone()),
        fields,
        at: ReadAt::Any,
        ..ListOptions::default()
    };
    let Ok(listed) = inner.registry.list(&pods, options).await else {
        return false;
    };
    let graph = &inner.authorizer.nodes;
    for entry in &listed.items {
        let head = &entry.head;
        if !graph.has_pod(&head.namespace, &head.name, &head.uid, node) {
            apply(inner, "pods", EventKind::Added, entry);
        }
    }
    // Also where there was nothing to add: it may have been added since the question was asked.
    true
}
