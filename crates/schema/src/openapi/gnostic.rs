//! The binary form of an OpenAPI 2 document (`openapi.v2.Document` of gnostic), written from its JSON.
//! Only what our documents contain is known here.

use serde_json::Value;

/// A protobuf message in the making.
#[derive(Default)]
pub(super) struct Message {
    pub(super) bytes: Vec<u8>,
}

impl Message {
    pub(super) fn varint(&mut self, mut value: u64) {
        while value >= 0x80 {
            self.bytes.push(value as u8 | 0x80);
            value >>= 7;
        }
        self.bytes.push(value as u8);
    }

    pub(super) fn blob(&mut self, number: u32, bytes: &[u8]) {
        self.varint(u64::from(number) << 3 | 2);
        self.varint(bytes.len() as u64);
        self.bytes.extend_from_slice(bytes);
    }

    pub(super) fn message(&mut self, number: u32, message: &Message) {
        self.blob(number, &message.bytes);
    }

    pub(super) fn text(&mut self, number: u32, value: &Value) {
        if let Some(text) = value.as_str() {
            self.blob(number, text.as_bytes());
        }
    }

    pub(super) fn texts(&mut self, number: u32, value: &Value) {
        for text in value.as_array().into_iter().flatten() {
            self.text(number, text);
        }
    }

    pub(super) fn flag(&mut self, number: u32, value: &Value) {
        if value == &Value::Bool(true) {
            self.varint(u64::from(number) << 3);
            self.varint(1);
        }
    }

    /// Named values: `repeated { name = 1; value = 2 }`.
    pub(super) fn named(&mut self, number: u32, value: &Value, write: impl Fn(&Value) -> Message) {
        for (name, value) in value.as_object().into_iter().flatten() {
            let mut entry = Message::default();
            entry.blob(1, name.as_bytes());
            entry.message(2, &write(value));
            self.message(number, &entry);
        }
    }

    /// `x-…` keys as YAML text, of which JSON is a part.
    pub(super) fn extensions(&mut self, number: u32, value: &Value) {
        for (name, value) in value.as_object().into_iter().flatten() {
            if name.starts_with("x-") {
                let mut any = Message::default();
                any.blob(2, value.to_string().as_bytes());
                let mut entry = Message::default();
                entry.blob(1, name.as_bytes());
                entry.message(2, &any);
                self.message(number, &entry);
            }
        }
    }
}

pub(super) fn wrapped(number: u32, inner: Message) -> Message {
    let mut outer = Message::default();
    outer.message(number, &inner);
    outer
}

pub(super) fn document(v2: &Value) -> Vec<u8> {
    let mut out = Message::default();
    out.text(1, &v2["swagger"]);
    let mut info = Message::default();
    info.text(1, &v2["info"]["title"]);
    info.text(2, &v2["info"]["version"]);
    out.message(2, &info);
    let mut paths = Message::default();
    paths.named(2, &v2["paths"], path_item);
    out.message(8, &paths);
    let mut definitions = Message::default();
    definitions.named(1, &v2["definitions"], schema);
    out.message(9, &definitions);
    let mut named = Message::default();
    named.named(1, &v2["parameters"], parameter);
    out.message(10, &named);
    for requirement in v2["security"].as_array().into_iter().flatten() {
        let mut message = Message::default();
        message.named(1, requirement, |scopes| {
            let mut list = Message::default();
            list.texts(1, scopes);
            list
        });
        out.message(12, &message);
    }
    let mut security = Message::default();
    security.named(1, &v2["securityDefinitions"], |definition| {
        let mut key = Message::default();
        key.text(1, &definition["type"]);
        key.text(2, &definition["name"]);
        key.text(3, &definition["in"]);
        key.text(4, &definition["description"]);
        wrapped(2, key)
    });
    out.message(13, &security);
    out.bytes
}

fn path_item(item: &Value) -> Message {
    let mut out = Message::default();
    let methods = [
        ("get", 2),
        ("put", 3),
        ("post", 4),
        ("delete", 5),
        ("options", 6),
        ("head", 7),
        ("patch", 8),
    ];
    for (method, number) in methods {
        if item[method].is_object() {
            out.message(number, &operation(&item[method]));
        }
    }
    parameters(&mut out, 9, &item["parameters"]);
    out.extensions(10, item);
    out
}

fn operation(value: &Value) -> Message {
    let mut out = Message::default();
    out.texts(1, &value["tags"]);
    out.text(5, &value["operationId"]);
    out.texts(6, &value["produces"]);
    out.texts(7, &value["consumes"]);
    parameters(&mut out, 8, &value["parameters"]);
    let mut responses = Message::default();
    responses.named(1, &value["responses"], |response| {
        let mut message = Message::default();
        message.text(1, &response["description"]);
        if response["schema"].is_object() {
            message.message(2, &wrapped(1, schema(&response["schema"])));
        }
        wrapped(1, message)
    });
    out.message(9, &responses);
    out.texts(10, &value["schemes"]);
    out.extensions(13, value);
    out
}

fn parameters(out: &mut Message, number: u32, list: &Value) {
    for item in list.as_array().into_iter().flatten() {
        let message = if item["$ref"].is_string() {
            let mut reference = Message::default();
            reference.text(1, &item["$ref"]);
            wrapped(2, reference)
        } else {
            wrapped(1, parameter(item))
        };
        out.message(number, &message);
    }
}

fn parameter(parameter: &Value) -> Message {
    let mut message = Message::default();
    let in_query = u32::from(parameter["in"] == "query");
    if parameter["in"] == "body" {
        message.text(2, &parameter["name"]);
        message.text(3, &parameter["in"]);
        message.flag(4, &parameter["required"]);
        message.message(5, &schema(&parameter["schema"]));
        return wrapped(1, message);
    }
    message.flag(1, &parameter["required"]);
    message.text(2, &parameter["in"]);
    message.text(4, &parameter["name"]);
    // A query parameter has one field more before its type.
    message.text(5 + in_query, &parameter["type"]);
    message.flag(19 + in_query, &parameter["uniqueItems"]);
    wrapped(2, wrapped(4 - in_query, message))
}

fn schema(value: &Value) -> Message {
    let mut out = Message::default();
    out.text(1, &value["$ref"]);
    out.text(2, &value["format"]);
    out.text(4, &value["description"]);
    out.texts(19, &value["required"]);
    for allowed in value["enum"].as_array().into_iter().flatten() {
        let mut any = Message::default();
        any.blob(2, allowed.to_string().as_bytes());
        out.message(20, &any);
    }
    if value["additionalProperties"].is_object() {
        out.message(21, &wrapped(1, schema(&value["additionalProperties"])));
    }
    if value["type"].is_string() {
        let mut kind = Message::default();
        kind.text(1, &value["type"]);
        out.message(22, &kind);
    }
    if value["items"].is_object() {
        out.message(23, &wrapped(1, schema(&value["items"])));
    }
    if value["properties"].is_object() {
        let mut properties = Message::default();
        properties.named(1, &value["properties"], schema);
        out.message(25, &properties);
    }
    out.extensions(31, value);
    out
}
