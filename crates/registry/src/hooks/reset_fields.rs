//! Which fields a write through a resource or subresource cannot change, whatever it says. Its manager never
//! owns them.

use skiff_schema::apply::Set;

use crate::Resource;

/// The fields that `subresource` (empty for the resource itself) resets.
pub fn reset_fields(resource: &Resource, subresource: &str) -> Set {
    let has_status = resource.facts.subresource("status").is_some();
    let paths: &[&[&str]] = match (resource.facts.group, resource.facts.plural, subresource) {
        ("certificates.k8s.io", "certificatesigningrequests", "") => &[&["spec"], &["status"]],
        ("certificates.k8s.io", "certificatesigningrequests", "status") => {
            &[&["spec"], &["status", "conditions"]]
        }
        ("certificates.k8s.io", "certificatesigningrequests", "approval") => {
            &[&["spec"], &["status", "certificate"]]
        }
        ("certificates.k8s.io", "podcertificaterequests", "") => &[],
        (_, _, "status") if resource.custom.is_some() => &[&["metadata"], &["spec"]],
        (_, _, "") if has_status => &[&["status"]],
        ("", "namespaces", "finalize") => &[&["status"]],
        ("", "pods", "status") => &[
            &["spec"],
            &["metadata", "deletionTimestamp"],
            &["metadata", "ownerReferences"],
        ],
        ("apps", "deployments", "status") => &[&["spec"], &["metadata", "labels"]],
        (
            "admissionregistration.k8s.io"
            | "apiregistration.k8s.io"
            | "flowcontrol.apiserver.k8s.io"
            | "internal.apiserver.k8s.io"
            | "resource.k8s.io"
            | "scheduling.k8s.io"
            | "storage.k8s.io"
            | "storagemigration.k8s.io",
            _,
            "status",
        )
        | ("networking.k8s.io", "servicecidrs", "status") => &[&["metadata"], &["spec"]],
        (_, _, "status") => &[&["spec"]],
        _ => &[],
    };
    Set::of_fields(paths)
}
