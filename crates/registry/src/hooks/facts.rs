//! How each resource is kept, where that is not the rule (for ever, deleted with its dependents, and
//! the delete answered by a Status). Where it is kept stands in the fact tables.

use crate::resource::Orphan;

/// Events are kept for an hour, as upstream's `--event-ttl` has it.
const EVENT_TTL_SECONDS: i64 = 3600;

/// The storage of one resource.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StorageFacts {
    pub ttl_seconds: Option<i64>,
    pub orphan: Orphan,
    /// A delete that removes at once answers with the object.
    pub returns_deleted: bool,
}

const USUAL: StorageFacts =
    StorageFacts { ttl_seconds: None, orphan: Orphan::Never, returns_deleted: false };

pub fn storage_facts(group: &str, plural: &str) -> StorageFacts {
    match (group, plural) {
        ("", "replicationcontrollers") => StorageFacts { orphan: Orphan::ByDefault, ..USUAL },
        ("" | "events.k8s.io", "events") => {
            StorageFacts { ttl_seconds: Some(EVENT_TTL_SECONDS), orphan: Orphan::Unsupported, ..USUAL }
        }
        ("batch", "jobs") => StorageFacts { orphan: Orphan::ByDefault, ..USUAL },
        (
            "",
            "namespaces" | "persistentvolumes" | "persistentvolumeclaims" | "pods" | "podtemplates" | "resourcequotas"
            | "serviceaccounts" | "services",
        )
        | ("resource.k8s.io", _)
        | (
            "storage.k8s.io",
            "csidrivers" | "csinodes" | "storageclasses" | "volumeattachments" | "volumeattributesclasses",
        ) => StorageFacts { returns_deleted: true, ..USUAL },
        _ => USUAL,
    }
}
