//! How each resource is kept, where that is not the rule (for ever, and deleted with its dependents). Where it is kept stands in the fact tables.

use crate::resource::Orphan;

/// Events are kept for an hour, as upstream's `--event-ttl` has it.
const EVENT_TTL_SECONDS: i64 = 3600;

/// The storage of one resource.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StorageFacts {
    pub ttl_seconds: Option<i64>,
    pub orphan: Orphan,
    pub own_delete: bool,
    /// Kept as JSON, though it has a protobuf form.
    pub json: bool,
    pub orphan_warning: Option<&'static str>,
    /// An annotation that belongs to the served version: whoever asks for metadata alone does not see it.
    pub served_annotation: Option<&'static str>,
}

const USUAL: StorageFacts = StorageFacts {
    ttl_seconds: None,
    orphan: Orphan::Never,
    own_delete: false,
    json: false,
    orphan_warning: None,
    served_annotation: None,
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
            ..USUAL
        },
        ("", "namespaces") => StorageFacts {
            own_delete: true,
            ..USUAL
        },
        // COMPAT: upstream's extension server and aggregator keep their kinds as JSON.
        ("apiextensions.k8s.io", "customresourcedefinitions") => StorageFacts {
            own_delete: true,
            json: true,
            ..USUAL
        },
        ("apiregistration.k8s.io", _) => StorageFacts { json: true, ..USUAL },
        ("apps", "daemonsets") => StorageFacts {
            served_annotation: Some("deprecated.daemonset.template.generation"),
            ..USUAL
        },
        ("batch", "jobs") => StorageFacts {
            orphan: Orphan::ByDefault,
            orphan_warning: Some(
                "child pods are preserved by default when jobs are deleted; set propagationPolicy=Background to remove them or set propagationPolicy=Orphan to suppress this warning",
            ),
            ..USUAL
        },
        _ => USUAL,
    }
}
