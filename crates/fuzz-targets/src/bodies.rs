//! Bodies of requests in each format, and what the rules of their kind make of them.

use serde_json::Value;
use skiff_schema::decode::{self, DecodedObject, Document, Format};
use skiff_schema::{TypeId, normalise, protobuf};

use crate::input::{self, schema};

/// What aliases may make of a body, as a multiple of what they may add and of the body itself.
const MOST_OF_A_YAML_BODY: usize = 40 << 20;

pub fn json(data: &[u8]) {
    let (line, body) = input::line(data);
    let kind = input::kind(line);
    if let Ok(decoded) = decode::decode_object(schema(), body, Format::Json, &kind.gvk) {
        check(decoded);
    }
}

pub fn yaml(data: &[u8]) {
    let (line, body) = input::line(data);
    let kind = input::kind(line);
    if let Ok(untyped) = decode::from_yaml(body) {
        let text = serde_json::to_vec(&untyped.value).expect("a value is JSON");
        assert!(
            text.len() <= MOST_OF_A_YAML_BODY,
            "a body of {} became {}",
            body.len(),
            text.len()
        );
        let again = decode::from_json(&text).expect("what was read from YAML is JSON");
        assert_eq!(again.value, untyped.value);
    }
    if let Ok(decoded) = decode::decode_object(schema(), body, Format::Yaml, &kind.gvk) {
        check(decoded);
    }
}

pub fn protobuf(data: &[u8]) {
    let (line, body) = input::line(data);
    let kind = input::kind(line);
    if let Ok(envelope) = protobuf::envelope(body) {
        // The answer is in words whatever the body says it is.
        let _ = decode::decode_protobuf_object(schema(), body, &kind.gvk);
        message(kind.id, envelope.raw);
    }
    message(kind.id, body);
}

fn message(id: TypeId, raw: &[u8]) {
    let decoded = protobuf::decode(schema(), id, raw);
    let transcoded = protobuf::decode_json(schema(), id, "{", raw);
    assert_eq!(
        decoded.as_ref().err(),
        transcoded.as_ref().err(),
        "both ways of reading agree"
    );
    let (Ok(value), Ok(text)) = (decoded, transcoded) else {
        return;
    };
    let parsed: Value = serde_json::from_slice(&text).expect("a message reads as JSON");
    assert_eq!(parsed, value);
    protobuf_round_trip(id, &value);
}

/// An object that fits its type is written and read without loss, by both ways of writing.
fn protobuf_round_trip(id: TypeId, value: &Value) {
    let text = serde_json::to_vec(value).expect("a value is JSON");
    let written = protobuf::encode_message(schema(), id, value);
    // Only the order of a manager's fields may differ: a text has one of its own.
    let of_text = protobuf::encode_json_message(schema(), id, &text);
    let read = |raw: &Vec<u8>| protobuf::decode(schema(), id, raw);
    assert_eq!(
        written.as_ref().map(read),
        of_text.as_ref().map(read),
        "both ways of writing agree"
    );
    let Ok(written) = written else {
        return;
    };
    let read = protobuf::decode(schema(), id, &written).expect("what was written can be read");
    let again = protobuf::encode_message(schema(), id, &read).expect("what was read can be written");
    assert_eq!(again, written);
    assert_eq!(protobuf::decode(schema(), id, &again).as_ref(), Ok(&read));
}

fn check(decoded: DecodedObject) {
    let gvk = decoded.gvk;
    let Some(id) = schema().by_gvk(&gvk.group, &gvk.version, &gvk.kind) else {
        return;
    };
    let value = decoded.checked.value;
    let text = serde_json::to_vec(&value).expect("a value is JSON");
    let again = Document::parse(&text, Format::Json)
        .and_then(|document| document.check(schema(), id))
        .expect("what was decoded decodes");
    assert_eq!(again.value, value, "decoding twice changes nothing");
    assert!(again.strict_errors.is_empty(), "{:?}", again.strict_errors);
    let mut normal = value.clone();
    normalise(schema(), id, &mut normal);
    let mut twice = normal.clone();
    normalise(schema(), id, &mut twice);
    assert_eq!(twice, normal, "normalising twice changes nothing");
    protobuf_round_trip(id, &normal);
    let line = format!("{} {}", gvk.api_version(), gvk.kind);
    if let Some(resource) = &input::kind(line.as_bytes()).resource {
        rules(resource, value);
    }
}

/// The way of a create and of an update through the rules of the kind.
fn rules(resource: &skiff_registry::Resource, mut value: Value) {
    let rules = skiff_api::kind::kind(&resource.group_kind.group, &resource.kind);
    let namespaced = resource.namespaced;
    value["kind"] = resource.kind.as_str().into();
    value["apiVersion"] = resource.api_version.as_str().into();
    (rules.default)(resource.facts.version, &mut value);
    let once = value.clone();
    (rules.default)(resource.facts.version, &mut value);
    assert_eq!(value, once, "defaulting twice changes nothing");
    resource.to_stored(&mut value);
    let served = resource.served(&value).into_owned();
    let mut stored = served.clone();
    resource.to_stored(&mut stored);
    assert_eq!(
        resource.served(&stored).as_ref(),
        &served,
        "conversion there and back"
    );
    let mut created = value.clone();
    rules.begin_create(&mut created);
    let _ = rules.check_create(&created, namespaced);
    for (new, old) in [(&value, &created), (&created, &value)] {
        let mut new = new.clone();
        let mut status = new.clone();
        rules.begin_update(&mut new, old);
        let _ = rules.check_update(&new, old, namespaced);
        let _ = (rules.warnings)(&new, Some(old));
        rules.begin_status_update(&mut status, old);
        let _ = rules.check_status_update(&status, old, namespaced);
    }
    let _ = (rules.warnings)(&created, None);
    // COMPAT: a row may have a cell more than there are columns.
    let _ = (rules.row)(&value, 1_700_000_000);
    let _ = (rules.selectable)(&value);
    let _ = (rules.graceful)(&value, None);
    let _ = (rules.graceful)(&value, Some(i64::MAX));
    let mut shape = created;
    normalise(schema(), resource.stored_type, &mut shape);
    if let Ok(bytes) = resource.codec.encode(&shape) {
        resource
            .codec
            .decode(&bytes)
            .expect("what was stored can be read");
        resource
            .codec
            .to_json(bytes, 1)
            .expect("what was stored can be cached");
    }
}
