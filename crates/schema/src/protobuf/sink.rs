//! Where the decoder writes to: JSON bytes, or a parsed value.

use serde::de::{Deserialize, Deserializer, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Value};

use super::{ProtobufError, Result};
use crate::decode::go_float;

pub(super) trait Sink {
    fn open_object(&mut self);
    fn close_object(&mut self);
    fn open_array(&mut self);
    fn close_array(&mut self);
    /// The name of a field, which needs no escapes.
    fn key(&mut self, name: &str);
    /// The key of a map.
    fn map_key(&mut self, key: &str);
    fn string(&mut self, text: &str);
    /// A string that needs no escapes.
    fn plain(&mut self, text: &str);
    fn integer(&mut self, value: i64);
    fn float(&mut self, value: f64) -> Result<()>;
    fn bool(&mut self, value: bool);
    fn null(&mut self);
    /// JSON of unknown origin.
    fn json(&mut self, raw: &[u8]) -> Result<()>;
}

/// JSON without spaces.
pub(super) struct Text {
    pub out: Vec<u8>,
}

impl Text {
    /// A comma is due unless something was just opened: no value ends in one of these bytes.
    fn separate(&mut self) {
        if !matches!(self.out.last(), None | Some(b'{' | b'[' | b':')) {
            self.out.push(b',');
        }
    }

    fn quoted(&mut self, text: &str) {
        self.out.push(b'"');
        let bytes = text.as_bytes();
        let mut done = 0;
        for (at, byte) in bytes.iter().enumerate() {
            if *byte >= 0x20 && *byte != b'"' && *byte != b'\\' {
                continue;
            }
            self.out.extend_from_slice(&bytes[done..at]);
            done = at + 1;
            match byte {
                b'"' => self.out.extend_from_slice(b"\\\""),
                b'\\' => self.out.extend_from_slice(b"\\\\"),
                b'\n' => self.out.extend_from_slice(b"\\n"),
                b'\r' => self.out.extend_from_slice(b"\\r"),
                b'\t' => self.out.extend_from_slice(b"\\t"),
                0x08 => self.out.extend_from_slice(b"\\b"),
                0x0c => self.out.extend_from_slice(b"\\f"),
                other => self.out.extend_from_slice(format!("\\u{other:04x}").as_bytes()),
            }
        }
        self.out.extend_from_slice(&bytes[done..]);
        self.out.push(b'"');
    }
}

impl Sink for Text {
    fn open_object(&mut self) {
        self.separate();
        self.out.push(b'{');
    }

    fn close_object(&mut self) {
        self.out.push(b'}');
    }

    fn open_array(&mut self) {
        self.separate();
        self.out.push(b'[');
    }

    fn close_array(&mut self) {
        self.out.push(b']');
    }

    fn key(&mut self, name: &str) {
        self.plain(name);
        self.out.push(b':');
    }

    fn map_key(&mut self, key: &str) {
        self.string(key);
        self.out.push(b':');
    }

    fn string(&mut self, text: &str) {
        self.separate();
        self.quoted(text);
    }

    fn plain(&mut self, text: &str) {
        self.separate();
        self.out.push(b'"');
        self.out.extend_from_slice(text.as_bytes());
        self.out.push(b'"');
    }

    fn integer(&mut self, value: i64) {
        self.separate();
        if let 0..=9 = value {
            self.out.push(b'0' + value as u8);
            return;
        }
        let (mut digits, mut at, mut rest) = ([0u8; 20], 20, value.unsigned_abs());
        while rest > 0 {
            at -= 1;
            digits[at] = b'0' + (rest % 10) as u8;
            rest /= 10;
        }
        if value < 0 {
            at -= 1;
            digits[at] = b'-';
        }
        self.out.extend_from_slice(&digits[at..]);
    }

    fn float(&mut self, value: f64) -> Result<()> {
        if !value.is_finite() {
            return Err(ProtobufError::Value(format!("json: unsupported value: {value}")));
        }
        self.separate();
        self.out.extend_from_slice(go_float(value).as_bytes());
        Ok(())
    }

    fn bool(&mut self, value: bool) {
        self.separate();
        self.out
            .extend_from_slice(if value { &b"true"[..] } else { &b"false"[..] });
    }

    fn null(&mut self) {
        self.separate();
        self.out.extend_from_slice(b"null");
    }

    fn json(&mut self, raw: &[u8]) -> Result<()> {
        // COMPAT: Go's JSON readers replace what is not UTF-8.
        let raw = String::from_utf8_lossy(raw);
        serde_json::from_str::<Readable>(&raw).map_err(not_json)?;
        let raw = raw.as_bytes();
        self.separate();
        if !raw
            .iter()
            .any(|byte| matches!(byte, b' ' | b'\n' | b'\r' | b'\t'))
        {
            self.out.extend_from_slice(raw);
            return Ok(());
        }
        let (mut inside, mut escaped) = (false, false);
        for byte in raw {
            if inside {
                inside = escaped || *byte != b'"';
                escaped = !escaped && *byte == b'\\';
            } else if matches!(byte, b' ' | b'\n' | b'\r' | b'\t') {
                continue;
            } else {
                inside = *byte == b'"';
            }
            self.out.push(*byte);
        }
        Ok(())
    }
}

fn not_json(error: serde_json::Error) -> ProtobufError {
    ProtobufError::Value(error.to_string())
}

/// JSON that can be read to its last escape and number. Serde's `IgnoredAny` looks at neither.
struct Readable;

impl<'de> Deserialize<'de> for Readable {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Readable, D::Error> {
        deserializer.deserialize_any(Readable)
    }
}

impl<'de> Visitor<'de> for Readable {
    type Value = Readable;

    fn expecting(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        f.write_str("JSON")
    }

    fn visit_bool<E>(self, _: bool) -> std::result::Result<Readable, E> {
        Ok(Readable)
    }

    fn visit_i64<E>(self, _: i64) -> std::result::Result<Readable, E> {
        Ok(Readable)
    }

    fn visit_u64<E>(self, _: u64) -> std::result::Result<Readable, E> {
        Ok(Readable)
    }

    fn visit_f64<E>(self, _: f64) -> std::result::Result<Readable, E> {
        Ok(Readable)
    }

    fn visit_str<E>(self, _: &str) -> std::result::Result<Readable, E> {
        Ok(Readable)
    }

    fn visit_unit<E>(self) -> std::result::Result<Readable, E> {
        Ok(Readable)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> std::result::Result<Readable, A::Error> {
        while seq.next_element::<Readable>()?.is_some() {}
        Ok(Readable)
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> std::result::Result<Readable, A::Error> {
        while map.next_entry::<Readable, Readable>()?.is_some() {}
        Ok(Readable)
    }
}

/// A parsed value.
#[derive(Default)]
pub(super) struct Tree {
    open: Vec<Open>,
    key: String,
    pub done: Value,
}

enum Open {
    /// The key under which the object will be put, and what it holds.
    Object(String, Map<String, Value>),
    Array(String, Vec<Value>),
}

impl Tree {
    fn put(&mut self, value: Value) {
        match self.open.last_mut() {
            Some(Open::Object(_, map)) => drop(map.insert(std::mem::take(&mut self.key), value)),
            Some(Open::Array(_, values)) => values.push(value),
            None => self.done = value,
        }
    }
}

impl Sink for Tree {
    fn open_object(&mut self) {
        let key = std::mem::take(&mut self.key);
        self.open.push(Open::Object(key, Map::new()));
    }

    fn close_object(&mut self) {
        if let Some(Open::Object(key, map)) = self.open.pop() {
            self.key = key;
            self.put(Value::Object(map));
        }
    }

    fn open_array(&mut self) {
        let key = std::mem::take(&mut self.key);
        self.open.push(Open::Array(key, Vec::new()));
    }

    fn close_array(&mut self) {
        if let Some(Open::Array(key, values)) = self.open.pop() {
            self.key = key;
            self.put(Value::Array(values));
        }
    }

    fn key(&mut self, name: &str) {
        name.clone_into(&mut self.key);
    }

    fn map_key(&mut self, key: &str) {
        key.clone_into(&mut self.key);
    }

    fn string(&mut self, text: &str) {
        self.put(Value::from(text));
    }

    fn plain(&mut self, text: &str) {
        self.put(Value::from(text));
    }

    fn integer(&mut self, value: i64) {
        self.put(Value::from(value));
    }

    fn float(&mut self, value: f64) -> Result<()> {
        // A whole number reads from JSON as an integer, so it is one here.
        let value = match crate::decode::number(&go_float(value)) {
            Some(number) => Value::Number(number),
            None => {
                return Err(ProtobufError::Value(format!("json: unsupported value: {value}")));
            }
        };
        self.put(value);
        Ok(())
    }

    fn bool(&mut self, value: bool) {
        self.put(Value::Bool(value));
    }

    fn null(&mut self) {
        self.put(Value::Null);
    }

    fn json(&mut self, raw: &[u8]) -> Result<()> {
        let value = serde_json::from_str(&String::from_utf8_lossy(raw)).map_err(not_json)?;
        self.put(value);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_is_as_serde_writes_it() {
        let all: String = (0..0x250u32).filter_map(char::from_u32).collect();
        let mut sink = Text { out: Vec::new() };
        sink.string(&all);
        assert_eq!(sink.out, serde_json::to_vec(&all).expect("encodes"));
        for value in [0, 9, 10, -1, i64::MAX, i64::MIN] {
            let mut sink = Text { out: Vec::new() };
            sink.integer(value);
            assert_eq!(sink.out, value.to_string().into_bytes());
        }
    }

    #[test]
    fn foreign_json_is_checked_and_compacted() {
        let check = |raw: &str, expected: Option<&str>| {
            let mut sink = Text { out: Vec::new() };
            let got = sink.json(raw.as_bytes()).is_ok().then_some(sink.out);
            assert_eq!(got.as_deref(), expected.map(str::as_bytes), "{raw}");
        };
        check(r#"{"a":1}"#, Some(r#"{"a":1}"#));
        check("{ \"a b\\\" \" :\n[1 ,2]}", Some(r#"{"a b\" ":[1,2]}"#));
        check("{", None);
        check("k8s\0", None);
        check(r#""\ud800""#, None);
        check("1e999", None);
        check(r#""\u00e9""#, Some(r#""\u00e9""#));
        let mut sink = Text { out: Vec::new() };
        sink.json(b"\"\xff\"").expect("text");
        assert_eq!(sink.out, "\"\u{fffd}\"".as_bytes());
    }
}
