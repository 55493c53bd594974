//! Request bodies in Kubernetes' protobuf form, read by the type tables into the same JSON value that a
//! JSON body gives. `kubectl create` and client-go's typed clients send these. Answers are not written
//! in this form yet: such clients accept JSON too.

use base64::Engine;
use serde_json::{Map, Value, json};
use skiff_schema::types::Field;
use skiff_schema::{Scalar, Schema, Shape, Special, TypeId};

pub const MEDIA_TYPE: &str = "application/vnd.kubernetes.protobuf";
const MAGIC: &[u8] = b"k8s\0";
const MAX_DEPTH: usize = 100;

/// What every body is wrapped in.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Envelope<'a> {
    pub api_version: String,
    pub kind: String,
    pub raw: &'a [u8],
}

/// The reason why a body cannot be read.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum ProtobufError {
    #[error("provided data does not appear to be a protobuf message, expected prefix {MAGIC:?}")]
    NoMagic,
    #[error("unexpected EOF")]
    Truncated,
    #[error("proto: illegal wireType {0}")]
    WireType(u64),
    #[error("proto: message nests too deep")]
    TooDeep,
    #[error("proto: wrong wireType = {wire} for field {field}")]
    Mismatch { wire: u64, field: String },
    #[error("proto: field {0} cannot be read in this form")]
    NotBuilt(String),
    #[error("proto: {0}")]
    Value(String),
}

type Result<T> = std::result::Result<T, ProtobufError>;

pub fn envelope(body: &[u8]) -> Result<Envelope<'_>> {
    let body = body.strip_prefix(MAGIC).ok_or(ProtobufError::NoMagic)?;
    let mut found = Envelope::default();
    for field in fields(body) {
        match field? {
            (1, Wire::Bytes(type_meta)) => {
                for field in fields(type_meta) {
                    match field? {
                        (1, Wire::Bytes(text)) => found.api_version = utf8(text)?,
                        (2, Wire::Bytes(text)) => found.kind = utf8(text)?,
                        _ => {}
                    }
                }
            }
            (2, Wire::Bytes(raw)) => found.raw = raw,
            _ => {}
        }
    }
    Ok(found)
}

/// Reads a message of type `id`. Unknown fields are skipped, as in every protobuf reader.
pub fn decode(schema: &Schema, id: TypeId, message: &[u8]) -> Result<Value> {
    let mut out = Map::new();
    Reader { schema }.message(id, &mut Vec::new(), message, &mut out, 0)?;
    Ok(Value::Object(out))
}

#[derive(Clone, Copy)]
enum Wire<'a> {
    Varint(u64),
    Fixed64(u64),
    Fixed32(u32),
    Bytes(&'a [u8]),
}

impl Wire<'_> {
    fn number(self) -> u64 {
        match self {
            Wire::Varint(_) => 0,
            Wire::Fixed64(_) => 1,
            Wire::Bytes(_) => 2,
            Wire::Fixed32(_) => 5,
        }
    }
}

fn varint(bytes: &mut &[u8]) -> Result<u64> {
    let mut value = 0u64;
    for shift in (0..64).step_by(7) {
        let (byte, rest) = bytes.split_first().ok_or(ProtobufError::Truncated)?;
        *bytes = rest;
        value |= u64::from(byte & 0x7f) << shift;
        if byte & 0x80 == 0 {
            return Ok(value);
        }
    }
    Err(ProtobufError::Value("integer overflow".to_string()))
}

fn take<'a>(bytes: &mut &'a [u8], length: u64) -> Result<&'a [u8]> {
    let length = usize::try_from(length).map_err(|_| ProtobufError::Truncated)?;
    let (taken, rest) = bytes.split_at_checked(length).ok_or(ProtobufError::Truncated)?;
    *bytes = rest;
    Ok(taken)
}

/// The fields of a message in order.
fn fields(mut bytes: &[u8]) -> impl Iterator<Item = Result<(u32, Wire<'_>)>> {
    let mut failed = false;
    std::iter::from_fn(move || {
        if bytes.is_empty() || failed {
            return None;
        }
        let next = next_field(&mut bytes);
        failed = next.is_err();
        Some(next)
    })
}

fn next_field<'a>(bytes: &mut &'a [u8]) -> Result<(u32, Wire<'a>)> {
    let tag = varint(bytes)?;
    let number = u32::try_from(tag >> 3).map_err(|_| ProtobufError::Value("illegal tag".to_string()))?;
    if number == 0 {
        return Err(ProtobufError::Value("illegal tag 0".to_string()));
    }
    let wire = match tag & 7 {
        0 => Wire::Varint(varint(bytes)?),
        1 => Wire::Fixed64(u64::from_le_bytes(array(take(bytes, 8)?))),
        2 => {
            let length = varint(bytes)?;
            Wire::Bytes(take(bytes, length)?)
        }
        5 => Wire::Fixed32(u32::from_le_bytes(array(take(bytes, 4)?))),
        other => return Err(ProtobufError::WireType(other)),
    };
    Ok((number, wire))
}

fn array<const N: usize>(bytes: &[u8]) -> [u8; N] {
    let mut out = [0; N];
    out.copy_from_slice(bytes);
    out
}

fn utf8(bytes: &[u8]) -> Result<String> {
    String::from_utf8(bytes.to_vec())
        .map_err(|_| ProtobufError::Value("string field contains invalid UTF-8".to_string()))
}

struct Reader<'s> {
    schema: &'s Schema,
}

impl Reader<'_> {
    /// Reads the fields of one message. `path` are the numbers of the messages that Go inlines: their
    /// fields belong to the same JSON object.
    fn message(
        &self,
        id: TypeId,
        path: &mut Vec<u32>,
        bytes: &[u8],
        out: &mut Map<String, Value>,
        depth: usize,
    ) -> Result<()> {
        if depth > MAX_DEPTH {
            return Err(ProtobufError::TooDeep);
        }
        let known = &self.schema.get(id).fields;
        for field in fields(bytes) {
            let (number, wire) = field?;
            path.push(number);
            let exact = known.iter().find(|field| is_at(field, path));
            if let Some(field) = exact {
                path.pop();
                self.field(field, wire, out, depth)?;
                continue;
            }
            if let (true, Wire::Bytes(inner)) = (known.iter().any(|field| is_below(field, path)), wire) {
                self.message(id, path, inner, out, depth + 1)?;
            }
            path.pop();
        }
        Ok(())
    }

    fn field(&self, field: &Field, wire: Wire<'_>, out: &mut Map<String, Value>, depth: usize) -> Result<()> {
        let name = field.name.as_ref();
        match &field.shape {
            Shape::List(list) if list.wrapped => {
                let mut values = Vec::new();
                for item in fields(self.bytes(name, wire)?) {
                    if let (1, wire) = item? {
                        values.push(self.value(name, &list.of, wire, depth)?);
                    }
                }
                out.insert(name.to_string(), Value::Array(values));
            }
            Shape::List(list) => {
                let slot = out.entry(name).or_insert_with(|| json!([]));
                let Some(values) = slot.as_array_mut() else {
                    return Ok(());
                };
                match (&list.of, wire) {
                    (
                        Shape::Scalar(Scalar::Bool | Scalar::Int | Scalar::Int32 | Scalar::Int64, _),
                        Wire::Bytes(mut packed),
                    ) => {
                        while !packed.is_empty() {
                            let number = varint(&mut packed)?;
                            values.push(self.value(name, &list.of, Wire::Varint(number), depth)?);
                        }
                    }
                    _ => values.push(self.value(name, &list.of, wire, depth)?),
                }
            }
            Shape::Map(map) => {
                let (mut key, mut value) = (String::new(), None);
                for item in fields(self.bytes(name, wire)?) {
                    match item? {
                        (1, Wire::Bytes(text)) => key = utf8(text)?,
                        (2, wire) => value = Some(self.value(name, &map.of, wire, depth)?),
                        _ => {}
                    }
                }
                let value = value.unwrap_or_else(|| zero(&map.of));
                let slot = out.entry(name).or_insert_with(|| json!({}));
                if let Some(entries) = slot.as_object_mut() {
                    entries.insert(key, value);
                }
            }
            shape => {
                let value = self.value(name, shape, wire, depth)?;
                // Go writes every field that is no pointer; the JSON form leaves zero values out.
                let zero = matches!(&value, Value::Null)
                    || (!field.pointer && field.omitempty && value == zero(shape));
                if !zero {
                    out.insert(name.to_string(), value);
                }
            }
        }
        Ok(())
    }

    fn bytes<'b>(&self, name: &str, wire: Wire<'b>) -> Result<&'b [u8]> {
        match wire {
            Wire::Bytes(bytes) => Ok(bytes),
            other => Err(ProtobufError::Mismatch {
                wire: other.number(),
                field: name.to_string(),
            }),
        }
    }

    fn value(&self, name: &str, shape: &Shape, wire: Wire<'_>, depth: usize) -> Result<Value> {
        let mismatch = || ProtobufError::Mismatch {
            wire: wire.number(),
            field: name.to_string(),
        };
        Ok(match (shape, wire) {
            (Shape::Scalar(Scalar::Bool, _), Wire::Varint(number)) => json!(number != 0),
            // Negative numbers of either width are sign-extended to 64 bits on the wire.
            (Shape::Scalar(Scalar::Int32, _), Wire::Varint(number)) => json!(number as i32),
            (Shape::Scalar(Scalar::Int64 | Scalar::Int, _), Wire::Varint(number)) => json!(number as i64),
            (Shape::Scalar(Scalar::Float64, _), Wire::Fixed64(bits)) => json!(f64::from_bits(bits)),
            (Shape::Scalar(Scalar::Float64, _), Wire::Fixed32(bits)) => {
                json!(f64::from(f32::from_bits(bits)))
            }
            (Shape::Scalar(Scalar::String, _), Wire::Bytes(text)) => Value::String(utf8(text)?),
            (Shape::Scalar(Scalar::Bytes, _), Wire::Bytes(bytes)) => {
                Value::String(base64::engine::general_purpose::STANDARD.encode(bytes))
            }
            (Shape::Struct(id), Wire::Bytes(bytes)) => {
                let mut out = Map::new();
                self.message(*id, &mut Vec::new(), bytes, &mut out, depth + 1)?;
                Value::Object(out)
            }
            (Shape::Special(special), Wire::Bytes(bytes)) => special_value(name, *special, bytes)?,
            // A list or map inside a list or map has no protobuf form of its own.
            (Shape::List(_) | Shape::Map(_), _) => return Err(ProtobufError::NotBuilt(name.to_string())),
            _ => return Err(mismatch()),
        })
    }
}

/// Whether a field is what the numbers of `path` lead to.
fn is_at(field: &Field, path: &[u32]) -> bool {
    let Some((last, before)) = path.split_last() else {
        return false;
    };
    field.number != 0 && field.number == *last && embedding(field) == before
}

/// Whether a field is inside of the inlined message that `path` leads to.
fn is_below(field: &Field, path: &[u32]) -> bool {
    field.number != 0 && embedding(field).starts_with(path)
}

fn embedding(field: &Field) -> &[u32] {
    field.embed().map_or(&[], |embed| &embed.numbers)
}

fn zero(shape: &Shape) -> Value {
    match shape {
        Shape::Scalar(Scalar::Bool, _) => json!(false),
        Shape::Scalar(Scalar::Int | Scalar::Int32 | Scalar::Int64, _) => json!(0),
        Shape::Scalar(Scalar::Float64, _) => json!(0.0),
        Shape::Scalar(Scalar::String | Scalar::Bytes, _) => json!(""),
        Shape::Special(Special::Quantity) => json!("0"),
        Shape::Special(_) => Value::Null,
        Shape::Struct(_) | Shape::Map(_) => json!({}),
        Shape::List(_) => json!([]),
    }
}

fn special_value(name: &str, special: Special, bytes: &[u8]) -> Result<Value> {
    let (mut numbers, mut texts): ([i64; 4], [&[u8]; 4]) = ([0; 4], [&[]; 4]);
    let mut any = false;
    for field in fields(bytes) {
        any = true;
        match field? {
            (number @ 1..=3, Wire::Varint(value)) => numbers[number as usize] = value as i64,
            (number @ 1..=3, Wire::Bytes(value)) => texts[number as usize] = value,
            _ => {}
        }
    }
    Ok(match special {
        Special::Time | Special::MicroTime => {
            if !any {
                return Ok(Value::Null);
            }
            let nanos = i32::try_from(numbers[2]).unwrap_or(0);
            let at = jiff::Timestamp::new(numbers[1], nanos)
                .map_err(|error| ProtobufError::Value(error.to_string()))?;
            json!(match special {
                Special::Time => skiff_meta::time::format_seconds(at),
                _ => skiff_meta::time::format_micros(at),
            })
        }
        Special::Duration => json!(go_duration(numbers[1])),
        Special::Quantity => {
            let text = utf8(texts[1])?;
            json!(if text.is_empty() { "0".to_string() } else { text })
        }
        Special::IntOrString if numbers[1] == 0 => json!(numbers[2] as i32),
        Special::IntOrString => Value::String(utf8(texts[3])?),
        Special::RawExtension | Special::FieldsV1 | Special::Json => {
            if texts[1].is_empty() {
                return Ok(Value::Null);
            }
            serde_json::from_slice(texts[1]).map_err(|error| ProtobufError::Value(error.to_string()))?
        }
        Special::JsonSchemaPropsOrArray
        | Special::JsonSchemaPropsOrBool
        | Special::JsonSchemaPropsOrStringArray
        | Special::Any => return Err(ProtobufError::NotBuilt(name.to_string())),
    })
}

/// A duration as Go prints it: `1h2m3.5s`.
fn go_duration(nanos: i64) -> String {
    if nanos == 0 {
        return "0s".to_string();
    }
    let sign = if nanos < 0 { "-" } else { "" };
    let total = nanos.unsigned_abs();
    if total < 1_000_000_000 {
        let (value, unit) = match total {
            t if t < 1_000 => (t as f64, "ns"),
            t if t < 1_000_000 => (t as f64 / 1e3, "µs"),
            t => (t as f64 / 1e6, "ms"),
        };
        return format!("{sign}{value}{unit}");
    }
    let seconds = (total % 60_000_000_000) as f64 / 1e9;
    let minutes = total / 60_000_000_000;
    match (minutes / 60, minutes % 60) {
        (0, 0) => format!("{sign}{seconds}s"),
        (0, minutes) => format!("{sign}{minutes}m{seconds}s"),
        (hours, minutes) => format!("{sign}{hours}h{minutes}m{seconds}s"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use skiff_api::facts;

    /// Writes one length-delimited field.
    fn nested(number: u8, inner: &[u8]) -> Vec<u8> {
        let mut out = vec![number << 3 | 2, inner.len() as u8];
        out.extend_from_slice(inner);
        out
    }

    #[test]
    fn a_config_map() {
        let metadata = nested(1, &[nested(1, b"x"), nested(8, &[])].concat());
        let data = nested(2, &[nested(1, b"a"), nested(2, b"b")].concat());
        let type_meta = nested(1, &[nested(1, b"v1"), nested(2, b"ConfigMap")].concat());
        let body = [MAGIC.to_vec(), type_meta, nested(2, &[metadata, data].concat())].concat();
        let envelope = envelope(&body).expect("an envelope");
        assert_eq!(
            (envelope.api_version.as_str(), envelope.kind.as_str()),
            ("v1", "ConfigMap")
        );
        let id = facts::schema().by_gvk("", "v1", "ConfigMap").expect("a type");
        let value = decode(facts::schema(), id, envelope.raw).expect("a value");
        assert_eq!(value, json!({"metadata": {"name": "x"}, "data": {"a": "b"}}));
    }

    #[test]
    fn durations_print_as_go_does() {
        for (nanos, text) in [
            (0, "0s"),
            (1_500_000_000, "1.5s"),
            (3_600_000_000_000, "1h0m0s"),
            (90_000_000_000, "1m30s"),
            (1_500_000, "1.5ms"),
        ] {
            assert_eq!(go_duration(nanos), text);
        }
    }

    #[test]
    fn garbage_never_panics() {
        let id = facts::schema().by_gvk("", "v1", "Pod").expect("a type");
        for seed in 0..2000u32 {
            let bytes: Vec<u8> = (0..seed % 64)
                .map(|n| (seed.wrapping_mul(2_654_435_761).rotate_left(n) >> 7) as u8)
                .collect();
            let _ = decode(facts::schema(), id, &bytes);
            let _ = envelope(&[MAGIC, &bytes].concat());
        }
    }

    /// Upstream's own samples, where they are at hand: the protobuf form must read as the JSON form.
    #[test]
    fn upstreams_samples() {
        let root = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../shared/kubernetes");
        let root = std::env::var_os("SKIFF_UPSTREAM_DATA").map_or(root, Into::into);
        let Ok(listing) = std::fs::read_dir(root.join("testdata/HEAD")) else {
            eprintln!("skipped: no upstream data at {}", root.display());
            return;
        };
        let (mut compared, mut wrong) = (0, Vec::new());
        for path in listing
            .flatten()
            .map(|entry| entry.path())
            .filter(|path| path.extension().is_some_and(|e| e == "pb"))
        {
            let body = std::fs::read(&path).expect("a file");
            let text = std::fs::read(path.with_extension("json")).expect("a file");
            let Ok(envelope) = envelope(&body) else { continue };
            let (group, version) = envelope
                .api_version
                .rsplit_once('/')
                .unwrap_or(("", &envelope.api_version));
            let Some(id) = facts::schema().by_gvk(group, version, &envelope.kind) else {
                continue;
            };
            let decoded = match decode(facts::schema(), id, envelope.raw) {
                Err(ProtobufError::NotBuilt(_)) => continue,
                other => other.expect("decodes"),
            };
            let expected: Value = serde_json::from_slice(&text).expect("JSON");
            let check = |value: Value| {
                skiff_schema::decode::check(facts::schema(), id, value).map(|checked| checked.value)
            };
            let (mut ours, mut theirs) = (check(decoded).expect("fits"), check(expected).expect("fits"));
            for value in [&mut ours, &mut theirs] {
                value
                    .as_object_mut()
                    .expect("an object")
                    .retain(|key, _| key != "kind" && key != "apiVersion");
                skiff_schema::normalise(facts::schema(), id, value);
            }
            compared += 1;
            if ours != theirs {
                wrong.push(path.file_name().expect("a name").to_string_lossy().into_owned());
            }
        }
        assert!(
            wrong.is_empty(),
            "{} of {compared} differ: {wrong:?}",
            wrong.len()
        );
        assert!(compared > 50, "{compared}");
    }
}
