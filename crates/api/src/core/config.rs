//! ConfigMaps and Secrets: keys, sizes, types, immutability.

use serde_json::{Value, json};
use skiff_meta::{field, names};
use skiff_schema::decode::{Node as Json, parse_json};

use crate::errors::Errors;
use crate::kind::{AGE, BASE, Kind, NAME, text as column, unsupported_field};
use crate::node::{Node, at, text};
use crate::{row, walk};

const SIZE_MAX: usize = 1024 * 1024;
const FROZEN: &str = "field is immutable when `immutable` is set";

pub static CONFIG_MAP: Kind = Kind {
    kind: "ConfigMap",
    validate: |object| {
        let mut errors = Errors::new();
        let root = Node::root(object);
        let (data, binary) = (root.field("data"), root.field("binaryData"));
        let mut size = 0;
        for (key, value) in data.entries() {
            keys(key, &value, &mut errors);
            if binary.value.get(key).is_some() {
                errors.invalid_value(&value, key, "duplicate of key present in binaryData");
            }
            size += value.len();
        }
        for (key, value) in binary.entries() {
            keys(key, &value, &mut errors);
            size += decoded_len(value.str());
        }
        if size > SIZE_MAX {
            // COMPAT: upstream's path is an empty name.
            errors.too_long(&root.field(""), SIZE_MAX);
        }
        errors.into_vec()
    },
    validate_update: |new, old| {
        let mut errors = Errors::new();
        frozen(new, old, &["data", "binaryData"], &mut errors);
        errors.extend((CONFIG_MAP.validate)(new));
        errors.into_vec()
    },
    columns: &[NAME, column("Data"), AGE],
    row: |object, now| {
        let count = |name| at(object, name).as_object().map_or(0, serde_json::Map::len);
        vec![
            row::name(object),
            json!(count("data") + count("binaryData")),
            row::age(object, now),
        ]
    },
    ..BASE
};

pub static SECRET: Kind = Kind {
    kind: "Secret",
    default: |_, object| {
        walk::string(object, "type", "Opaque");
        merge_string_data(object);
    },
    validate: secret,
    warnings: |new, _| tls_warning(new).into_iter().collect(),
    validate_update: |new, old| {
        let mut errors = Errors::new();
        let root = Node::root(new);
        let kind = root.field("type");
        if kind.str() != text(old, "type") {
            errors.invalid(&kind, crate::errors::IMMUTABLE);
        }
        frozen(new, old, &["data"], &mut errors);
        errors.extend(secret(new));
        errors.into_vec()
    },
    selectable: |object| vec![("type", text(object, "type").to_owned())],
    columns: &[NAME, column("Type"), column("Data"), AGE],
    row: |object, now| {
        let count = at(object, "data").as_object().map_or(0, serde_json::Map::len);
        vec![
            row::name(object),
            json!(text(object, "type")),
            json!(count),
            row::age(object, now),
        ]
    },
    unknown_field: unsupported_field,
    ..BASE
};

fn keys(key: &str, at: &Node, errors: &mut Errors) {
    for complaint in names::config_map_key(key) {
        errors.invalid_value(at, key, complaint);
    }
}

/// What is wrong with the PEM of a key pair. Whether the two belong together is not looked at.
fn tls_warning(secret: &Value) -> Option<String> {
    if text(secret, "type") != "kubernetes.io/tls" {
        return None;
    }
    let part = |key: &str, what: &str, right: fn(&str) -> bool, wanted: &str| {
        let encoded = at(secret, "data").get(key).and_then(Value::as_str).unwrap_or("");
        let bytes = decode(encoded);
        let pem = String::from_utf8_lossy(&bytes);
        // Only a block with an end is one.
        let blocks: Vec<&str> = pem
            .lines()
            .filter_map(|line| line.trim_end().strip_prefix("-----BEGIN ")?.strip_suffix("-----"))
            .filter(|kind| pem.contains(&format!("-----END {kind}-----")))
            .collect();
        match blocks[..] {
            [] => Some(format!("tls: failed to find any PEM data in {what} input")),
            _ if blocks.iter().any(|kind| right(kind)) => None,
            _ => Some(format!(
                "tls: failed to find {wanted} in {what} input after skipping PEM blocks of the following types: [{}]",
                blocks.join(" ")
            )),
        }
    };
    let certificate = |kind: &str| kind == "CERTIFICATE";
    let key = |kind: &str| kind == "PRIVATE KEY" || kind.ends_with(" PRIVATE KEY");
    part("tls.crt", "certificate", certificate, "\"CERTIFICATE\" PEM block").or_else(|| {
        part(
            "tls.key",
            "key",
            key,
            "PEM block with type ending in \"PRIVATE KEY\"",
        )
    })
}

/// Bytes behind a base64 text, which has been checked by now.
fn decoded_len(text: &str) -> usize {
    let padding = text.bytes().rev().take_while(|b| *b == b'=').count();
    (text.len() / 4 * 3).saturating_sub(padding)
}

fn frozen(new: &Value, old: &Value, fields: &[&'static str], errors: &mut Errors) {
    if at(old, "immutable").as_bool() != Some(true) {
        return;
    }
    let root = Node::root(new);
    let flag = root.field("immutable");
    if !flag.bool() {
        errors.forbidden(&flag, FROZEN);
    }
    for name in fields {
        // COMPAT: upstream tells an empty map from none here.
        if at(new, name) != at(old, name) {
            errors.forbidden(&root.field(name), FROZEN);
        }
    }
}

/// `stringData` is for writing only: it goes into `data`, encoded.
fn merge_string_data(object: &mut Value) {
    let Some(map) = object.as_object_mut() else { return };
    let Some(Value::Object(plain)) = map.remove("stringData") else {
        return;
    };
    let Some(data) = walk::object(object, "data") else {
        return;
    };
    for (key, value) in plain {
        walk::put(data, &key, json!(encode(value.as_str().unwrap_or("").as_bytes())));
    }
}

/// Standard base64 with padding.
fn encode(bytes: &[u8]) -> String {
    const ALPHABET: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut out = String::with_capacity(bytes.len().div_ceil(3) * 4);
    for chunk in bytes.chunks(3) {
        let n = chunk.iter().fold(0u32, |n, b| n << 8 | u32::from(*b)) << (8 * (3 - chunk.len()));
        for i in 0..4 {
            out.push(if i <= chunk.len() {
                ALPHABET[(n >> (18 - 6 * i)) as usize & 63] as char
            } else {
                '='
            });
        }
    }
    out
}

/// The bytes behind standard base64; what is no digit is skipped.
pub fn decode(text: &str) -> Vec<u8> {
    let digit = |b: u8| match b {
        b'A'..=b'Z' => Some(b - b'A'),
        b'a'..=b'z' => Some(b - b'a' + 26),
        b'0'..=b'9' => Some(b - b'0' + 52),
        b'+' => Some(62),
        b'/' => Some(63),
        _ => None,
    };
    let digits: Vec<u8> = text.bytes().filter_map(digit).collect();
    let mut out = Vec::with_capacity(digits.len() * 3 / 4);
    for chunk in digits.chunks(4) {
        let n = chunk.iter().fold(0u32, |n, d| n << 6 | u32::from(*d)) << (6 * (4 - chunk.len()));
        out.extend(&n.to_be_bytes()[1..][..chunk.len() - 1]);
    }
    out
}

fn secret(object: &Value) -> Vec<field::Error> {
    let mut errors = Errors::new();
    let root = Node::root(object);
    let data = root.field("data");
    let mut size = 0;
    for (key, value) in data.entries() {
        keys(key, &value, &mut errors);
        size += decoded_len(value.str());
    }
    if size > SIZE_MAX {
        errors.too_long(&data, SIZE_MAX);
    }
    let need = |errors: &mut Errors, key: &'static str| {
        let at = data.key(key);
        if !at.is_set() {
            errors.required(&at, "");
        }
        at.is_set()
    };
    match root.field("type").str() {
        "kubernetes.io/service-account-token" => {
            let annotations = root.field("metadata.annotations");
            let name = annotations.key("kubernetes.io/service-account.name");
            if name.is_empty() {
                errors.required(&name, "");
            }
        }
        "kubernetes.io/dockercfg" => docker_config(&data, ".dockercfg", &mut errors),
        "kubernetes.io/dockerconfigjson" => docker_config(&data, ".dockerconfigjson", &mut errors),
        "kubernetes.io/basic-auth" if !data.key("username").is_set() && !data.key("password").is_set() => {
            need(&mut errors, "username");
            need(&mut errors, "password");
        }
        "kubernetes.io/ssh-auth" => {
            let key = data.key("ssh-privatekey");
            if key.is_empty() {
                errors.required(&key, "");
            }
        }
        "kubernetes.io/tls" => {
            need(&mut errors, "tls.crt");
            need(&mut errors, "tls.key");
        }
        _ => {}
    }
    errors.into_vec()
}

fn docker_config(data: &Node, key: &'static str, errors: &mut Errors) {
    let at = data.key(key);
    if !at.is_set() {
        return errors.required(&at, "");
    }
    let found = match parse_json(&decode(at.str())) {
        Err(complaint) => return errors.invalid_value(&at, "<secret contents redacted>", complaint),
        Ok(Json::Object(_) | Json::Null) => return,
        Ok(Json::Array(_)) => "array",
        Ok(Json::Bool(_)) => "bool",
        Ok(Json::Number(_)) => "number",
        Ok(Json::String(_)) => "string",
    };
    let detail = format!("json: cannot unmarshal {found} into Go value of type map[string]interface {{}}");
    errors.invalid_value(&at, "<secret contents redacted>", detail);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn string_data_is_encoded() {
        let mut secret = json!({"stringData": {"a": "x", "b": "hello"}, "data": {"a": "old"}});
        merge_string_data(&mut secret);
        assert_eq!(secret, json!({"data": {"a": "eA==", "b": "aGVsbG8="}}));
        for text in ["", "a", "ab", "abc", "abcd"] {
            assert_eq!(decode(&encode(text.as_bytes())), text.as_bytes());
            assert_eq!(decoded_len(&encode(text.as_bytes())), text.len());
        }
    }

    #[test]
    fn an_immutable_config_map_stays() {
        let old = json!({"metadata": {"name": "c", "namespace": "d", "resourceVersion": "1"}, "immutable": true, "data": {"a": "1"}});
        let mut new = old.clone();
        new["data"]["a"] = json!("2");
        let found: Vec<String> = CONFIG_MAP
            .check_update(&new, &old, true)
            .iter()
            .map(ToString::to_string)
            .collect();
        assert_eq!(
            found,
            ["data: Forbidden: field is immutable when `immutable` is set"]
        );
        let bad = json!({"metadata": {"name": "c", "namespace": "d"}, "data": {"a b": "1"}});
        let found: Vec<String> = CONFIG_MAP
            .check_create(&bad, true)
            .iter()
            .map(ToString::to_string)
            .collect();
        assert!(
            found[0].starts_with("data[a b]: Invalid value: \"a b\": a valid config key must consist of"),
            "{found:?}"
        );
    }
}
