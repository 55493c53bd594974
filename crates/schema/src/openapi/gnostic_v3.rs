//! The binary form of an OpenAPI 3 document (`openapi.v3.Document` of gnostic), written from its JSON.
//! Only what our documents and those of custom resources contain is known here.

use serde_json::Value;

use super::gnostic::{Message, wrapped};

impl Message {
    fn number(&mut self, number: u32, value: &Value) {
        if let Some(value) = value.as_f64().filter(|value| *value != 0.0) {
            self.varint(u64::from(number) << 3 | 1);
            self.bytes.extend_from_slice(&value.to_le_bytes());
        }
    }

    fn integer(&mut self, number: u32, value: &Value) {
        if let Some(value) = value.as_i64().filter(|value| *value != 0) {
            self.varint(u64::from(number) << 3);
            self.varint(value as u64);
        }
    }

    /// A member that is an object or is not there.
    fn part(&mut self, number: u32, value: &Value, write: impl Fn(&Value) -> Message) {
        if value.is_object() {
            self.message(number, &write(value));
        }
    }

    fn parts(&mut self, number: u32, value: &Value, write: impl Fn(&Value) -> Message) {
        for item in value.as_array().into_iter().flatten() {
            self.message(number, &write(item));
        }
    }
}

pub(super) fn document(v3: &Value) -> Vec<u8> {
    let mut out = Message::default();
    out.text(1, &v3["openapi"]);
    let mut info = Message::default();
    info.text(1, &v3["info"]["title"]);
    info.text(2, &v3["info"]["description"]);
    info.text(6, &v3["info"]["version"]);
    out.message(2, &info);
    let mut paths = Message::default();
    paths.named(1, &v3["paths"], path_item);
    out.message(4, &paths);
    out.part(5, &v3["components"], components);
    out.parts(6, &v3["security"], requirement);
    out.bytes
}

fn components(value: &Value) -> Message {
    let mut out = Message::default();
    let all = |value: &Value, write: fn(&Value) -> Message| {
        let mut map = Message::default();
        map.named(1, value, |value| or_reference(value, write));
        map
    };
    out.part(1, &value["schemas"], |value| all(value, schema));
    out.part(2, &value["responses"], |value| all(value, response));
    out.part(3, &value["parameters"], |value| all(value, parameter));
    out.part(5, &value["requestBodies"], |value| all(value, request_body));
    out.part(7, &value["securitySchemes"], |value| all(value, security_scheme));
    out
}

fn requirement(value: &Value) -> Message {
    let mut out = Message::default();
    out.named(1, value, |scopes| {
        let mut list = Message::default();
        list.texts(1, scopes);
        list
    });
    out
}

fn security_scheme(value: &Value) -> Message {
    let mut out = Message::default();
    out.text(1, &value["type"]);
    out.text(2, &value["description"]);
    out.text(3, &value["name"]);
    out.text(4, &value["in"]);
    out.text(5, &value["scheme"]);
    out.extensions(9, value);
    out
}

/// `oneof { value = 1; reference = 2 }`.
fn or_reference(value: &Value, write: impl Fn(&Value) -> Message) -> Message {
    if !value["$ref"].is_string() {
        return wrapped(1, write(value));
    }
    let mut reference = Message::default();
    reference.text(1, &value["$ref"]);
    reference.text(2, &value["summary"]);
    reference.text(3, &value["description"]);
    wrapped(2, reference)
}

fn path_item(item: &Value) -> Message {
    let mut out = Message::default();
    let methods = [
        "get", "put", "post", "delete", "options", "head", "patch", "trace",
    ];
    for (number, method) in (4..).zip(methods) {
        out.part(number, &item[method], operation);
    }
    out.parts(13, &item["parameters"], |value| or_reference(value, parameter));
    out.extensions(14, item);
    out
}

fn operation(value: &Value) -> Message {
    let mut out = Message::default();
    out.texts(1, &value["tags"]);
    out.text(2, &value["summary"]);
    out.text(3, &value["description"]);
    out.text(5, &value["operationId"]);
    out.parts(6, &value["parameters"], |value| or_reference(value, parameter));
    out.part(7, &value["requestBody"], |value| {
        or_reference(value, request_body)
    });
    out.part(8, &value["responses"], |responses| {
        let mut message = Message::default();
        let mut coded = responses.clone();
        let default = coded.as_object_mut().and_then(|map| map.remove("default"));
        if let Some(default) = default {
            message.message(1, &or_reference(&default, response));
        }
        message.named(2, &coded, |value| or_reference(value, response));
        message
    });
    out.flag(10, &value["deprecated"]);
    out.parts(11, &value["security"], requirement);
    out.extensions(13, value);
    out
}

fn parameter(value: &Value) -> Message {
    let mut out = Message::default();
    out.text(1, &value["name"]);
    out.text(2, &value["in"]);
    out.text(3, &value["description"]);
    out.flag(4, &value["required"]);
    out.flag(5, &value["deprecated"]);
    out.flag(6, &value["allowEmptyValue"]);
    out.part(10, &value["schema"], |value| or_reference(value, schema));
    out.part(13, &value["content"], content);
    out.extensions(14, value);
    out
}

fn request_body(value: &Value) -> Message {
    let mut out = Message::default();
    out.text(1, &value["description"]);
    out.part(2, &value["content"], content);
    out.flag(3, &value["required"]);
    out.extensions(4, value);
    out
}

fn response(value: &Value) -> Message {
    let mut out = Message::default();
    out.text(1, &value["description"]);
    out.part(3, &value["content"], content);
    out.extensions(5, value);
    out
}

fn content(value: &Value) -> Message {
    let mut out = Message::default();
    out.named(1, value, |media| {
        let mut message = Message::default();
        message.part(1, &media["schema"], |value| or_reference(value, schema));
        message
    });
    out
}

fn schema(value: &Value) -> Message {
    let mut out = Message::default();
    let sub = |value: &Value| or_reference(value, schema);
    out.flag(1, &value["nullable"]);
    out.part(6, &value["externalDocs"], |docs| {
        let mut message = Message::default();
        message.text(1, &docs["description"]);
        message.text(2, &docs["url"]);
        message
    });
    any(&mut out, 7, &value["example"]);
    out.text(9, &value["title"]);
    out.number(10, &value["multipleOf"]);
    out.number(11, &value["maximum"]);
    out.flag(12, &value["exclusiveMaximum"]);
    out.number(13, &value["minimum"]);
    out.flag(14, &value["exclusiveMinimum"]);
    out.integer(15, &value["maxLength"]);
    out.integer(16, &value["minLength"]);
    out.text(17, &value["pattern"]);
    out.integer(18, &value["maxItems"]);
    out.integer(19, &value["minItems"]);
    out.flag(20, &value["uniqueItems"]);
    out.integer(21, &value["maxProperties"]);
    out.integer(22, &value["minProperties"]);
    out.texts(23, &value["required"]);
    for allowed in value["enum"].as_array().into_iter().flatten() {
        any(&mut out, 24, allowed);
    }
    out.text(25, &value["type"]);
    out.parts(26, &value["allOf"], sub);
    out.parts(27, &value["oneOf"], sub);
    out.parts(28, &value["anyOf"], sub);
    out.part(29, &value["not"], schema);
    out.part(30, &value["items"], |value| wrapped(1, sub(value)));
    out.part(31, &value["properties"], |value| {
        let mut message = Message::default();
        message.named(1, value, sub);
        message
    });
    match &value["additionalProperties"] {
        Value::Bool(allowed) => {
            let mut message = Message::default();
            message.varint(2 << 3);
            message.varint(u64::from(*allowed));
            out.message(32, &message);
        }
        other => out.part(32, other, |value| wrapped(1, sub(value))),
    }
    default(&mut out, &value["default"]);
    out.text(34, &value["description"]);
    out.text(35, &value["format"]);
    out.extensions(36, value);
    out
}

fn any(out: &mut Message, number: u32, value: &Value) {
    if !value.is_null() {
        let mut any = Message::default();
        any.blob(2, value.to_string().as_bytes());
        out.message(number, &any);
    }
}

/// COMPAT: the message knows scalars only; of any other default there is an empty one.
fn default(out: &mut Message, value: &Value) {
    let mut message = Message::default();
    match value {
        Value::Null => return,
        Value::Number(number) => {
            message.varint(1 << 3 | 1);
            let number = number.as_f64().unwrap_or(0.0);
            message.bytes.extend_from_slice(&number.to_le_bytes());
        }
        Value::Bool(flag) => {
            message.varint(2 << 3);
            message.varint(u64::from(*flag));
        }
        Value::String(_) => message.text(3, value),
        _ => {}
    }
    out.message(33, &message);
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_document_in_binary_form() {
        let bytes = document(
            &json!({"openapi": "3.0.0", "info": {"title": "K", "version": "1"}, "paths": {},
            "components": {"schemas": {"A": {"type": "string", "default": "", "x-k": true},
                "B": {"allOf": [{"$ref": "#/A"}], "minimum": 1, "maxItems": 3}}}}),
        );
        let expected: &[&[u8]] = &[
            b"\x0a\x053.0.0",
            b"\x12\x06\x0a\x01K\x32\x011",
            b"\x22\x00",
            b"\x2a\x48\x0a\x46",
            // A
            b"\x0a\x25\x0a\x01A\x12\x20\x0a\x1e\xca\x01\x06string\x8a\x02\x02\x1a\x00\xa2\x02\x0d\x0a\x03x-k\x12\x06\x12\x04true",
            // B
            b"\x0a\x1d\x0a\x01B\x12\x18\x0a\x16\x69\x00\x00\x00\x00\x00\x00\xf0\x3f\x90\x01\x03\xd2\x01\x07\x12\x05\x0a\x03#/A".as_slice(),
        ];
        let expected = expected.concat();
        assert_eq!(
            bytes.iter().map(|b| format!("{b:02x}")).collect::<String>(),
            expected.iter().map(|b| format!("{b:02x}")).collect::<String>()
        );
    }
}
