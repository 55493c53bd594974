//! `certificatesigningrequests/approval` and the same kind's status: who may write which condition. The
//! approver adds Approved or Denied, once and for all; the signer adds the certificate or Failed.

use serde_json::{Value, json};
use skiff_meta::field;

use super::CERTIFICATE_SIGNING_REQUEST;
use crate::node::{at, list, text};
use crate::walk;

const DECISIONS: [&str; 2] = ["Approved", "Denied"];

fn conditions(request: &Value) -> &[Value] {
    list(request, "status.conditions")
}

fn of_type<'a>(request: &'a Value, wanted: &str) -> Vec<&'a Value> {
    conditions(request)
        .iter()
        .filter(|condition| condition["type"] == wanted)
        .collect()
}

/// The approver writes conditions and nothing else.
pub(super) fn prepare_approval(new: &mut Value, old: &Value) {
    let given = at(new, "status.conditions").clone();
    for field in ["spec", "status"] {
        match old.get(field) {
            Some(value) => new[field] = value.clone(),
            None => new[field] = json!({}),
        }
    }
    let given = if given.is_null() { json!([]) } else { given };
    if let Some(status) = walk::object(new, "status") {
        walk::put(status, "conditions", given);
    }
}

/// The signer leaves decisions as they are.
pub(super) fn prepare_status(new: &mut Value, old: &Value) {
    if let Some(spec) = old.get("spec") {
        new["spec"] = spec.clone();
    }
    for decision in DECISIONS {
        let before: Vec<Value> = of_type(old, decision).into_iter().cloned().collect();
        if before.len() != of_type(new, decision).len() {
            continue;
        }
        let list = new
            .get_mut("status")
            .and_then(|status| status.get_mut("conditions"))
            .and_then(Value::as_array_mut);
        let same = list
            .into_iter()
            .flatten()
            .filter(|condition| condition["type"] == decision);
        for (condition, before) in same.zip(before) {
            *condition = before;
        }
    }
}

pub(super) fn validate_approval(new: &Value, old: &Value) -> Vec<field::Error> {
    let mut errors = validate(new, old);
    if at(new, "status.certificate") != at(old, "status.certificate") {
        let path = field::Path::new("status.certificate");
        errors.push(field::Error::forbidden(
            &path,
            "updates may not set certificate content",
        ));
    }
    errors
}

pub(super) fn validate_status(new: &Value, old: &Value) -> Vec<field::Error> {
    let mut errors = validate(new, old);
    let path = field::Path::new("status.conditions");
    for decision in DECISIONS {
        let (now, before) = (of_type(new, decision), of_type(old, decision));
        if now.len() > before.len() {
            let detail = format!("updates may not add a condition of type \"{decision}\"");
            errors.push(field::Error::forbidden(&path, detail));
        } else if now.len() == before.len() && now != before {
            let detail = format!("updates may not modify a condition of type \"{decision}\"");
            errors.push(field::Error::forbidden(&path, detail));
        }
    }
    let before = text(old, "status.certificate");
    let now = text(new, "status.certificate");
    if now != before {
        let path = field::Path::new("status.certificate");
        if !before.is_empty() {
            errors.push(field::Error::forbidden(
                &path,
                "updates may not modify existing certificate content",
            ));
        } else if !holds_certificate(now) {
            errors.push(field::Error::invalid(
                &path,
                "<certificate data>",
                "must contain at least one CERTIFICATE PEM block",
            ));
        }
    }
    errors
}

fn holds_certificate(base64: &str) -> bool {
    let bytes = crate::core::config::decode(base64);
    let text = String::from_utf8_lossy(&bytes);
    text.contains("-----BEGIN CERTIFICATE-----") && text.contains("-----END CERTIFICATE-----")
}

/// What both may not do.
fn validate(new: &Value, old: &Value) -> Vec<field::Error> {
    let mut errors = CERTIFICATE_SIGNING_REQUEST.check_status_update(new, old, false);
    let path = field::Path::new("status.conditions");
    let mut seen = std::collections::BTreeSet::new();
    for (index, condition) in conditions(new).iter().enumerate() {
        let at = path.index(index);
        let decided = ["Approved", "Denied", "Failed"]
            .iter()
            .any(|t| condition["type"] == *t);
        let allowed: &[&str] = if decided {
            &["True"]
        } else {
            &["False", "True", "Unknown"]
        };
        if condition["type"].as_str().unwrap_or("").is_empty() {
            errors.push(field::Error::required(&at.child("type"), ""));
        }
        match condition["status"].as_str().unwrap_or("") {
            "" => errors.push(field::Error::required(&at.child("status"), "")),
            status if !allowed.contains(&status) => {
                errors.push(field::Error::not_supported(&at.child("status"), status, allowed));
            }
            _ => {}
        }
        let kind = condition["type"].as_str().unwrap_or("");
        let other = |decision: &str| seen.contains(decision);
        if (condition["type"] == "Approved" && other("Denied"))
            || (condition["type"] == "Denied" && other("Approved"))
        {
            errors.push(field::Error::invalid(
                &path,
                condition["type"].clone(),
                "Approved and Denied conditions are mutually exclusive",
            ));
        }
        if !seen.insert(kind) {
            errors.push(field::Error::duplicate(
                &at.child("type"),
                condition["type"].clone(),
            ));
        }
    }
    for kept in ["Approved", "Denied", "Failed"] {
        if of_type(new, kept).len() < of_type(old, kept).len() {
            let detail = format!("updates may not remove a condition of type \"{kept}\"");
            errors.push(field::Error::forbidden(&path, detail));
        }
    }
    errors
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request(kinds: &[&str]) -> Value {
        let list: Vec<Value> = kinds
            .iter()
            .map(|kind| json!({"type": kind, "status": "True"}))
            .collect();
        json!({"metadata": {"name": "r", "resourceVersion": "1"}, "spec": {"signerName": "a/b"},
            "status": {"conditions": list}})
    }

    fn check(found: Vec<field::Error>, expected: &[&str]) {
        let found: Vec<String> = found.iter().map(ToString::to_string).collect();
        assert_eq!(found, expected);
    }

    #[test]
    fn decisions_are_the_approvers_and_stay() {
        check(validate_approval(&request(&["Approved"]), &request(&[])), &[]);
        check(
            validate_status(&request(&["Approved"]), &request(&[])),
            &["status.conditions: Forbidden: updates may not add a condition of type \"Approved\""],
        );
        check(
            validate_approval(&request(&[]), &request(&["Denied"])),
            &["status.conditions: Forbidden: updates may not remove a condition of type \"Denied\""],
        );
        check(
            validate_approval(&request(&["Approved", "Denied"]), &request(&["Approved"])),
            &[
                "status.conditions: Invalid value: \"Denied\": Approved and Denied conditions are mutually exclusive",
            ],
        );
        let mut signed = request(&["Approved"]);
        signed["status"]["certificate"] = json!("bm90IGEgY2VydA==");
        check(
            validate_status(&signed, &request(&["Approved"])),
            &[
                "status.certificate: Invalid value: \"<certificate data>\": must contain at least one CERTIFICATE PEM block",
            ],
        );
    }

    #[test]
    fn the_approver_writes_conditions_only() {
        let mut new = request(&["Approved"]);
        new["spec"] = json!({"signerName": "changed/by-hand"});
        prepare_approval(&mut new, &request(&[]));
        assert_eq!(new, request(&["Approved"]));
    }
}
