//! How each resource is kept, where that is not the rule (for ever, and deleted with its dependents). Where it is kept stands in the fact tables.

use crate::resource::Orphan;

/// Events are kept for an hour, as upstream's `--event-ttl` has it.
const EVENT_TTL_SECONDS: i64 = 3600;

/// The storage of one resource.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StorageFacts {
    pub ttl_seconds: Option<i64>,
    pub orphan: Orphan,
}

const USUAL: StorageFacts = StorageFacts {
    ttl_seconds: None,
    orphan: Orphan::Never,
};

pub fn storage_facts(group: &str, plural: &str) -> StorageFacts {
    match (group, plural) {
        ("", "replicationcontrollers") => StorageFacts {
            orphan: Orphan::ByDefault,
            ..USUAL
        },
        ("" | "events.k8s.io", "events") => StorageFacts {
            ttl_seconds: Some(EVENT_TTL_SECONDS),
            orphan: Orphan::Unsupported,
        },
        ("batch", "jobs") => StorageFacts {
            orphan: Orphan::ByDefault,
            ..USUAL
        },
        _ => USUAL,
    }
}
