//! Objects that Kubernetes v1.36.4 refuses, each with the message it gives: `refused.ndjson` has a line a kind, with
//! the object that updates start from.

use serde_json::Value;
use skiff_api::{facts, kind};
use skiff_meta::{GroupVersionKind, Status, gvk::GroupKind};
use skiff_schema::decode;

const CASES: &str = include_str!("refused.ndjson");

/// An object as it comes through the door: decoded and with its defaults.
fn received(object: &Value) -> (Value, &'static kind::Kind, bool) {
    let text = |name: &str| object[name].as_str().expect("typed").to_owned();
    let (api_version, name) = (text("apiVersion"), text("kind"));
    let (group, version) = api_version.split_once('/').unwrap_or(("", &api_version));
    let gvk = GroupVersionKind::new(group, version, &name);
    let bytes = serde_json::to_vec(object).expect("JSON");
    let decoded =
        decode::decode_object(facts::schema(), &bytes, decode::Format::Json, &gvk).expect("decodes");
    let resource = facts::resource_of_kind(group, version, &name).expect("served");
    let mut value = decoded.checked.value;
    let rules = kind::kind(group, &name);
    (rules.default)(version, &mut value);
    (value, rules, resource.namespaced)
}

fn message(case: &Value, stored: &Value) -> String {
    let (mut new, rules, namespaced) = received(&case["object"]);
    let metadata = new["metadata"].as_object_mut().expect("metadata");
    if namespaced {
        metadata.entry("namespace").or_insert("kp".into());
    }
    let errors = match case["op"].as_str() {
        Some("create") => {
            metadata.insert("uid".into(), "u".into());
            metadata.insert("creationTimestamp".into(), "2020-01-01T00:00:00Z".into());
            rules.begin_create(&mut new);
            rules.check_create(&new, namespaced)
        }
        Some("update") => {
            rules.begin_update(&mut new, stored);
            rules.check_update(&new, stored, namespaced)
        }
        _ => {
            rules.begin_status_update(&mut new, stored);
            rules.check_status_update(&new, stored, namespaced)
        }
    };
    let name = new["metadata"]["name"].as_str().unwrap_or("").to_owned();
    Status::invalid(&GroupKind::new(rules.group, rules.kind), &name, &errors).message
}

#[test]
fn messages_are_upstreams() {
    let mut wrong = Vec::new();
    for line in CASES.lines() {
        let kind: Value = serde_json::from_str(line).expect("JSON");
        for case in kind["cases"].as_array().expect("a list") {
            let (found, expected) = (
                message(case, &kind["stored"]),
                case["message"].as_str().expect("text"),
            );
            if found != expected {
                wrong.push(format!(
                    "{} of {}\nwant {expected}\ngot  {found}",
                    case["op"], case["object"]["kind"]
                ));
            }
        }
    }
    assert!(
        wrong.is_empty(),
        "{} differ:\n{}",
        wrong.len(),
        wrong.join("\n\n")
    );
}
