//! Rules of certificate signing requests. That the request is well signed is for those who sign to find out;
//! here it only has to be one.

use std::collections::BTreeSet;

use serde_json::Value;
use skiff_meta::{field, names};

use crate::core::config::decode;
use crate::errors::Errors;
use crate::internal;
use crate::node::{Node, at, list, same, text};

const USAGES: [&str; 23] = [
    "any",
    "cert sign",
    "client auth",
    "code signing",
    "content commitment",
    "crl sign",
    "data encipherment",
    "decipher only",
    "digital signature",
    "email protection",
    "encipher only",
    "ipsec end system",
    "ipsec tunnel",
    "ipsec user",
    "key agreement",
    "key encipherment",
    "microsoft sgc",
    "netscape sgc",
    "ocsp signing",
    "s/mime",
    "server auth",
    "signing",
    "timestamping",
];

/// Only the approval subresource may say yes or no, and nothing that was said is unsaid.
const VERDICTS: [&str; 2] = ["Approved", "Denied"];

pub(crate) fn pem_type(bytes: &[u8]) -> Option<String> {
    let text = String::from_utf8_lossy(bytes);
    let start = text.find("-----BEGIN ")? + "-----BEGIN ".len();
    let length = text[start..].find("-----")?;
    let kind = &text[start..start + length];
    text.contains(&format!("-----END {kind}-----"))
        .then(|| kind.to_owned())
}

/// The whole object; `old` is there on update, and what was wrong in it may stay.
pub fn request(object: &Value, old: Option<&Value>, errors: &mut Errors) {
    let root = Node::root(object);
    let spec = root.field("spec");
    let request = spec.field("request");
    if pem_type(&decode(request.str())).as_deref() != Some("CERTIFICATE REQUEST") {
        let shown = if request.is_set() {
            request.value.clone()
        } else {
            Value::Null
        };
        errors.push(
            field::ErrorType::Invalid,
            &request,
            Some(shown),
            "PEM block type must be CERTIFICATE REQUEST",
        );
    }
    let usages = spec.field("usages");
    if usages.is_empty() {
        errors.required(&usages, "");
    }
    if old.is_none() {
        for usage in usages.items() {
            errors.one_of(&usage, &USAGES);
        }
        let mut seen = BTreeSet::new();
        for usage in usages.items() {
            if !seen.insert(usage.str()) {
                errors.duplicate(&usage);
            }
        }
    }
    let signer = spec.field("signerName");
    if old.is_none() && signer.str() == "kubernetes.io/legacy-unknown" {
        errors.invalid(
            &signer,
            "the legacy signerName is not allowed via this API version",
        );
    } else {
        signer_name(&signer, errors);
    }
    let seconds = spec.field("expirationSeconds");
    if seconds.int().is_some_and(|n| n < 600) {
        errors.invalid(
            &seconds,
            "may not specify a duration less than 600 seconds (10 minutes)",
        );
    }
    conditions(&root.field("status.conditions"), errors);
}

/// The rule for the name of a signer.
pub(crate) fn signer_name(signer: &Node, errors: &mut Errors) {
    if signer.is_empty() {
        errors.required(signer, "");
        return;
    }
    let segments: Vec<&str> = signer.str().split('/').collect();
    let [domain, path] = segments[..] else {
        errors.invalid(
            signer,
            "must be a fully qualified domain and path of the form 'example.com/signer-name'",
        );
        return;
    };
    if domain.len() > 253 {
        errors.too_long(signer, 253);
    }
    first_bad_label(signer, domain, names::dns1123_label, errors);
    if domain.split('.').count() < 2 {
        errors.invalid_value(
            signer,
            domain,
            "should be a domain with at least two segments separated by dots",
        );
    }
    first_bad_label(signer, path, names::dns1123_subdomain, errors);
    // A name of the path, a dot and a label must fit.
    if path.len() > 253 - 63 - 1 {
        errors.too_long(signer, 253 - 63 - 1);
    }
}

/// Complains about the first bad part only: the others would say the same.
fn first_bad_label(signer: &Node, segment: &str, rule: fn(&str) -> Vec<String>, errors: &mut Errors) {
    for label in segment.split('.') {
        let complaints = rule(label);
        if complaints.is_empty() {
            continue;
        }
        for complaint in complaints {
            let detail = format!("validating label {}: {complaint}", field::quote(label));
            errors.invalid_value(signer, segment, detail);
        }
        return;
    }
}

fn conditions(conditions: &Node, errors: &mut Errors) {
    let mut seen = BTreeSet::new();
    let (mut approved, mut denied) = (false, false);
    for condition in conditions.items() {
        let (kind, status) = (condition.field("type"), condition.field("status"));
        if kind.is_empty() {
            errors.required(&kind, "");
        }
        let allowed: &[&str] = if ["Approved", "Denied", "Failed"].contains(&kind.str()) {
            &["True"]
        } else {
            &["False", "True", "Unknown"]
        };
        errors.required_one_of(&status, allowed);
        let clash = (kind.str() == "Approved" && denied) || (kind.str() == "Denied" && approved);
        approved |= kind.str() == "Approved";
        denied |= kind.str() == "Denied";
        if clash {
            errors.invalid_value(
                conditions,
                kind.str(),
                "Approved and Denied conditions are mutually exclusive",
            );
        }
        if !seen.insert(kind.str()) {
            errors.duplicate(&kind);
        }
    }
}

fn find<'a>(object: &'a Value, kind: &str) -> Vec<&'a Value> {
    list(object, "status.conditions")
        .iter()
        .filter(|condition| text(condition, "type") == kind)
        .collect()
}

/// A change of the request itself; approval and status have rules of their own beside their subresources.
pub fn update(new: &Value, old: &Value) -> Vec<field::Error> {
    let mut errors = Errors::new();
    request(new, Some(old), &mut errors);
    let root = Node::root(new);
    let at_conditions = root.field("status.conditions");
    for kind in ["Approved", "Denied", "Failed"] {
        if find(new, kind).len() < find(old, kind).len() {
            errors.forbidden(
                &at_conditions,
                format!("updates may not remove a condition of type \"{kind}\""),
            );
        }
    }
    for kind in VERDICTS {
        let (after, before) = (find(new, kind), find(old, kind));
        if after.len() > before.len() {
            errors.forbidden(
                &at_conditions,
                format!("updates may not add a condition of type \"{kind}\""),
            );
        } else if after.len() == before.len() && !after.iter().zip(&before).all(|(a, b)| same(a, b)) {
            let copied = |found: &[&Value]| found.iter().map(|c| (*c).clone()).collect::<Vec<Value>>();
            let difference = internal::difference_of_lists(
                "certificates.CertificateSigningRequestCondition",
                &copied(&before),
                &copied(&after),
            );
            errors.forbidden(
                &at_conditions,
                format!("updates may not modify a condition of type \"{kind}\"\n{difference}"),
            );
        }
    }
    let (after, before) = (at(new, "status.certificate"), at(old, "status.certificate"));
    if !same(after, before) {
        let certificate = root.field("status.certificate");
        errors.forbidden(&certificate, "updates may not set certificate content");
    }
    errors.into_vec()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn check(spec: Value, expected: &[&str]) {
        let object = json!({ "spec": spec });
        let mut errors = Errors::new();
        request(&object, None, &mut errors);
        let found: Vec<String> = errors.into_vec().iter().map(ToString::to_string).collect();
        assert_eq!(found, expected, "{object}");
    }

    #[test]
    fn requests() {
        // A block of the right type and nothing in it.
        let pem = "LS0tLS1CRUdJTiBDRVJUSUZJQ0FURSBSRVFVRVNULS0tLS0KLS0tLS1FTkQgQ0VSVElGSUNBVEUgUkVRVUVTVC0tLS0tCg==";
        check(
            json!({"request": pem, "signerName": "example.com/s", "usages": ["client auth"]}),
            &[],
        );
        check(
            json!({"request": "e30=", "signerName": "example.com", "usages": []}),
            &[
                "spec.request: Invalid value: \"e30=\": PEM block type must be CERTIFICATE REQUEST",
                "spec.usages: Required value",
                "spec.signerName: Invalid value: \"example.com\": must be a fully qualified domain and path of the form 'example.com/signer-name'",
            ],
        );
        check(
            json!({"request": pem, "signerName": "example.com/s", "usages": ["signing", "signing"], "expirationSeconds": 5}),
            &[
                "spec.usages[1]: Duplicate value: \"signing\"",
                "spec.expirationSeconds: Invalid value: 5: may not specify a duration less than 600 seconds (10 minutes)",
            ],
        );
    }

    #[test]
    fn verdicts_stay() {
        let with = |conditions: Value| json!({"spec": {}, "status": {"conditions": conditions}});
        let approved = json!({"type": "Approved", "status": "True"});
        let errors = update(&with(json!([])), &with(json!([approved])));
        assert!(
            errors
                .iter()
                .any(|e| e.detail == "updates may not remove a condition of type \"Approved\"")
        );
        let errors = update(&with(json!([approved])), &with(json!([])));
        assert!(
            errors
                .iter()
                .any(|e| e.detail == "updates may not add a condition of type \"Approved\"")
        );
    }

    #[test]
    fn a_sort_of_condition_comes_once() {
        let failed = json!({"type": "Failed", "status": "True"});
        let object = json!({"status": {"conditions": [failed, failed]}});
        let mut errors = Errors::new();
        let root = Node::root(&object);
        conditions(&root.field("status.conditions"), &mut errors);
        let found: Vec<String> = errors.into_vec().iter().map(ToString::to_string).collect();
        assert_eq!(found, ["status.conditions[1].type: Duplicate value: \"Failed\""]);
    }
}
