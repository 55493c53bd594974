//! The group `certificates.k8s.io`: CertificateSigningRequests, ClusterTrustBundles in `trust_bundle.rs` and
//! PodCertificateRequests in `pod_request.rs`. Who asks (`spec.username`, `uid`, `groups`, `extra` of a
//! CertificateSigningRequest) is written by the registry from the request, never by the client.

mod approval;
mod keys;
pub mod pem;
mod pod_request;
mod rules;
mod trust_bundle;

pub use pod_request::{POD_CERTIFICATE_REQUEST, begins_now};
pub(crate) use pod_request::{SHORTEST_SECONDS, longest_seconds, user_annotations};
pub(crate) use rules::{pem_type, signer_name};
pub use trust_bundle::CLUSTER_TRUST_BUNDLE;
pub(crate) use trust_bundle::{name_rule as trust_bundle_name, signer_of_name};

use serde_json::json;
use skiff_meta::time;

use crate::errors::Errors;
use crate::kind::{AGE, Again, BASE, Kind, NAME, Part, text as column, unsupported_field};
use crate::node::{at, list, text};
use crate::{row, strategy, walk};

pub static CERTIFICATE_SIGNING_REQUEST: Kind = Kind {
    group: "certificates.k8s.io",
    kind: "CertificateSigningRequest",
    name_rule: crate::object_meta::path_segment,
    prepare_create: strategy::create_without_status,
    prepare_update: |new, old| {
        strategy::update_keep_status(new, old);
        walk::copy(new, old, "spec");
    },
    validate: |object| {
        let mut errors = Errors::new();
        rules::request(object, None, &mut errors);
        errors.into_vec()
    },
    validate_update: rules::update,
    selectable: |object| vec![("spec.signerName", text(object, "spec.signerName").to_owned())],
    columns: &[
        NAME,
        AGE,
        column("SignerName"),
        column("Requestor"),
        column("RequestedDuration"),
        column("Condition"),
    ],
    row: |object, now| {
        let has = |kind: &str| {
            list(object, "status.conditions")
                .iter()
                .any(|c| text(c, "type") == kind)
        };
        let mut status = if has("Denied") {
            "Denied"
        } else if has("Approved") {
            "Approved"
        } else {
            "Pending"
        }
        .to_owned();
        if has("Failed") {
            status.push_str(",Failed");
        }
        if !text(object, "status.certificate").is_empty() {
            status.push_str(",Issued");
        }
        let duration = at(object, "spec.expirationSeconds")
            .as_i64()
            .map(time::human_duration)
            .unwrap_or_default();
        vec![
            row::name(object),
            row::age(object, now),
            row::or_none(text(object, "spec.signerName")),
            json!(text(object, "spec.username")),
            row::or_none(&duration),
            json!(status),
        ]
    },
    has_status: true,
    status_again: Again::ObjectFirst,
    update_again: Again::ObjectFirst,
    reset_fields: &[
        ("", &[&["spec"], &["status"]]),
        ("status", &[&["spec"], &["status", "conditions"]]),
        ("approval", &[&["spec"], &["status", "certificate"]]),
    ],
    parts: &[
        Part {
            name: "approval",
            prepare: approval::prepare_approval,
            validate: approval::validate_approval,
        },
        Part {
            name: "status",
            prepare: approval::prepare_status,
            validate: approval::validate_status,
        },
    ],
    keeps_requester: true,
    unknown_field: unsupported_field,
    ..BASE
};
