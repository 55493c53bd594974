//! One pass over an encoded object: its head, and where its `resourceVersion` goes. The object itself
//! stays bytes.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use serde::Deserialize;
use serde::de::{DeserializeSeed, Deserializer, IgnoredAny, MapAccess, Visitor};
use serde_json::value::RawValue;

use crate::entry::Head;
use crate::fields::{Capture, FieldSet, Found, Interner, Node};
use crate::{Error, Result};

/// What the pass found.
pub struct Scanned {
    pub head: Head,
    pub splice: Splice,
    /// Where the metadata is.
    pub metadata: Range<usize>,
}

/// Where the `resourceVersion` goes: `bytes[start..end]` gives way to `before`, the quoted number and
/// `after`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Splice {
    pub start: usize,
    pub end: usize,
    pub before: &'static str,
    pub after: &'static str,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Meta<'a> {
    #[serde(borrow)]
    name: Option<Text<'a>>,
    #[serde(borrow)]
    namespace: Option<Text<'a>>,
    #[serde(borrow)]
    uid: Option<Text<'a>>,
    #[serde(borrow)]
    labels: Option<BTreeMap<Text<'a>, Option<Text<'a>>>>,
    deletion_timestamp: Option<IgnoredAny>,
    #[serde(borrow, default, deserialize_with = "present")]
    resource_version: Option<&'a RawValue>,
}

/// Also a null is there and must be replaced.
fn present<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<&'de RawValue>, D::Error> {
    <&RawValue>::deserialize(deserializer).map(Some)
}

/// A string that is copied only when it has escapes.
#[derive(Deserialize, PartialEq, Eq, PartialOrd, Ord)]
struct Text<'a>(#[serde(borrow)] Cow<'a, str>);

fn text<'a>(text: &'a Option<Text<'_>>) -> &'a str {
    text.as_ref().map_or("", |text| &text.0)
}

pub fn scan(bytes: &[u8], fields: &Arc<FieldSet>, interner: &mut Interner) -> Result<Scanned> {
    let mut found: Found = vec![None; fields.fields.len()];
    let meta = top_level(bytes, fields.root(), &mut found)?;
    let parsed: Meta = serde_json::from_str(meta.get()).map_err(malformed)?;
    let labels = match &parsed.labels {
        Some(labels) => {
            let value = |value: &Option<Text>| value.as_ref().map_or("", |value| &value.0).to_owned();
            labels
                .iter()
                .map(|(k, v)| (interner.get(&k.0), interner.get(&value(v))))
                .collect()
        }
        None => Box::default(),
    };
    let values = found
        .into_iter()
        .zip(&fields.fields)
        .map(|(found, field)| interner.get(found.as_ref().map_or(&field.default, |(_, text)| text)))
        .collect();
    let head = Head {
        namespace: interner.get(text(&parsed.namespace)),
        name: text(&parsed.name).into(),
        uid: text(&parsed.uid).into(),
        labels,
        deleting: parsed.deletion_timestamp.is_some(),
        values,
        fields: fields.clone(),
    };
    let start = offset(bytes, meta.get());
    Ok(Scanned {
        head,
        splice: splice(bytes, meta.get(), &parsed),
        metadata: start..start + meta.get().len(),
    })
}

/// The place of the `resourceVersion` alone.
pub fn locate(bytes: &[u8]) -> Result<Splice> {
    let meta = top_level(bytes, &Node::default(), &mut Vec::new())?;
    let parsed: Meta = serde_json::from_str(meta.get()).map_err(malformed)?;
    Ok(splice(bytes, meta.get(), &parsed))
}

fn malformed(error: impl fmt::Display) -> Error {
    Error::Malformed(error.to_string())
}

/// Where `part`, which borrows from `bytes`, is in it.
fn offset(bytes: &[u8], part: &str) -> usize {
    part.as_ptr() as usize - bytes.as_ptr() as usize
}

fn splice(bytes: &[u8], meta: &str, parsed: &Meta) -> Splice {
    if let Some(present) = parsed.resource_version {
        let start = offset(bytes, present.get());
        return Splice {
            start,
            end: start + present.get().len(),
            before: "",
            after: "",
        };
    }
    let start = offset(bytes, meta) + 1;
    let empty = meta[1..].trim_start().starts_with('}');
    let after = if empty { "" } else { "," };
    Splice {
        start,
        end: start,
        before: "\"resourceVersion\":",
        after,
    }
}

fn top_level<'a>(bytes: &'a [u8], root: &Node, found: &mut Found) -> Result<&'a RawValue> {
    let mut deserializer = serde_json::Deserializer::from_slice(bytes);
    let meta = Top { root, found }
        .deserialize(&mut deserializer)
        .map_err(malformed)?;
    deserializer.end().map_err(malformed)?;
    match meta {
        Some(meta) if meta.get().starts_with('{') => Ok(meta),
        _ => Err(Error::Malformed("no metadata".to_owned())),
    }
}

struct Top<'f> {
    root: &'f Node,
    found: &'f mut Found,
}

impl<'de> DeserializeSeed<'de> for Top<'_> {
    type Value = Option<&'de RawValue>;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Self::Value, D::Error> {
        deserializer.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for Top<'_> {
    type Value = Option<&'de RawValue>;

    fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str("an object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        let mut meta = None;
        while let Some(key) = map.next_key_seed(TopKey(self.root))? {
            match key {
                Key::Metadata => meta = Some(map.next_value::<&'de RawValue>()?),
                Key::Leads(node) => map.next_value_seed(Capture {
                    node,
                    found: self.found,
                })?,
                Key::Other => map.next_value::<IgnoredAny>().map(drop)?,
            }
        }
        Ok(meta)
    }
}

enum Key<'a> {
    Metadata,
    Leads(&'a Node),
    Other,
}

struct TopKey<'a>(&'a Node);

impl<'de, 'a> DeserializeSeed<'de> for TopKey<'a> {
    type Value = Key<'a>;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Self::Value, D::Error> {
        deserializer.deserialize_str(self)
    }
}

impl<'de, 'a> Visitor<'de> for TopKey<'a> {
    type Value = Key<'a>;

    fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str("a key")
    }

    fn visit_str<E>(self, key: &str) -> Result<Self::Value, E> {
        Ok(match (key, self.0.child(key)) {
            ("metadata", _) => Key::Metadata,
            (_, Some(node)) => Key::Leads(node),
            (_, None) => Key::Other,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Field;
    use crate::entry::splice_resource_version;

    #[test]
    fn the_version_goes_into_metadata_and_nowhere_else() {
        let check = |input: &str, expected: &str| {
            let spliced = splice_resource_version(input.as_bytes(), 42);
            let spliced = spliced.map(|bytes| String::from_utf8(bytes.to_vec()).unwrap());
            assert_eq!(
                spliced.unwrap_or_else(|error| error.to_string()),
                expected,
                "{input}"
            );
        };
        check(
            r#"{"a":1,"metadata":{"name":"x"}}"#,
            r#"{"a":1,"metadata":{"resourceVersion":"42","name":"x"}}"#,
        );
        check(r#"{"metadata":{}}"#, r#"{"metadata":{"resourceVersion":"42"}}"#);
        check(
            r#"{"metadata": { } }"#,
            r#"{"metadata": {"resourceVersion":"42" } }"#,
        );
        check(
            r#"{"metadata":{"name":"x","resourceVersion":"7777"},"z":0}"#,
            r#"{"metadata":{"name":"x","resourceVersion":"42"},"z":0}"#,
        );
        // Only the object's own metadata counts, and escapes in it do not confuse.
        check(
            r#"{"data":{"metadata":{"resourceVersion":"1"}},"metadata":{"name":"\"}{","annotations":{"resourceVersion":"5"}}}"#,
            r#"{"data":{"metadata":{"resourceVersion":"1"}},"metadata":{"resourceVersion":"42","name":"\"}{","annotations":{"resourceVersion":"5"}}}"#,
        );
        check(r#"{"kind":"Pod"}"#, "stored object cannot be read: no metadata");
        check(
            r#"{"metadata":null}"#,
            "stored object cannot be read: no metadata",
        );
        check(
            "",
            "stored object cannot be read: EOF while parsing a value at line 1 column 0",
        );
        check(
            r#"{"metadata":{}} x"#,
            "stored object cannot be read: trailing characters at line 1 column 17",
        );
    }

    /// Whatever the object, putting the version in is the same as decoding it and setting the field.
    #[test]
    fn splicing_equals_decoding() {
        use serde_json::Value;
        const KEYS: [&str; 8] = [
            "metadata",
            "resourceVersion",
            "spec",
            "a\"b",
            "é\u{1f600}",
            "",
            "labels",
            "\\",
        ];
        fn value(draw: &mut impl FnMut(usize) -> usize, depth: usize) -> Value {
            match draw(if depth == 0 { 4 } else { 6 }) {
                0 => Value::Null,
                1 => Value::Bool(draw(2) == 0),
                2 => Value::from(draw(1000) as f64 / 8.0),
                3 => Value::from(KEYS[draw(KEYS.len())]),
                4 => (0..draw(4)).map(|_| value(draw, depth - 1)).collect(),
                _ => object(draw, depth - 1),
            }
        }
        fn object(draw: &mut impl FnMut(usize) -> usize, depth: usize) -> Value {
            let count = draw(5);
            let pairs = (0..count).map(|_| (KEYS[draw(KEYS.len())].to_owned(), value(draw, depth)));
            Value::Object(pairs.collect())
        }
        let mut seed = 1_u64;
        let mut draw = move |below: usize| {
            seed = seed
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            (seed >> 33) as usize % below
        };
        for round in 0..2000 {
            let mut input = object(&mut draw, 4);
            let mut metadata = object(&mut draw, 3);
            metadata["labels"] = serde_json::json!({"k": KEYS[draw(KEYS.len())]});
            input["metadata"] = metadata;
            let text = match round % 2 {
                0 => serde_json::to_vec(&input).unwrap(),
                _ => serde_json::to_vec_pretty(&input).unwrap(),
            };
            let spliced = splice_resource_version(&text, 123_456).unwrap();
            input["metadata"]["resourceVersion"] = "123456".into();
            assert_eq!(serde_json::from_slice::<Value>(&spliced).unwrap(), input);
        }
    }

    #[test]
    fn the_head() {
        let fields = Arc::new(FieldSet::new(vec![
            Field::new("spec.nodeName").indexed(),
            Field::new("spec.unschedulable").default("false"),
            Field::new("status.successful")
                .or(".status.succeeded")
                .default("0"),
            Field::new("source")
                .or("source.component")
                .or("reportingComponent"),
        ]));
        let check = |input: &str, expected: [&str; 4]| {
            let head = scan(input.as_bytes(), &fields, &mut Interner::default())
                .unwrap()
                .head;
            let names = [
                "spec.nodeName",
                "spec.unschedulable",
                "status.successful",
                "source",
            ];
            assert_eq!(names.map(|name| head.field(name).unwrap()), expected, "{input}");
        };
        check(r#"{"metadata":{}}"#, ["", "false", "0", ""]);
        check(
            r#"{"spec":{"nodeName":"n\"1","unschedulable":true,"x":[{"nodeName":"no"}]},"metadata":{},
                "status":{"succeeded":3},"reportingComponent":"r","source":{"component":"c"}}"#,
            ["n\"1", "true", "3", "c"],
        );
        check(
            r#"{"spec":null,"status":[1],"metadata":{},"reportingComponent":"r"}"#,
            ["", "false", "0", "r"],
        );

        let head = r#"{"metadata":{"labels":{"b":"2","a":"\u0031"},"name":"n","namespace":"ns","uid":"u",
            "deletionTimestamp":"2026-01-01T00:00:00Z"}}"#;
        let head = scan(head.as_bytes(), &fields, &mut Interner::default())
            .unwrap()
            .head;
        assert_eq!(
            (&*head.name, &*head.namespace, &*head.uid, head.deleting),
            ("n", "ns", "u", true)
        );
        assert_eq!(
            (head.label("a"), head.label("b"), head.label("c")),
            (Some("1"), Some("2"), None)
        );
        assert_eq!(
            (head.field("metadata.name"), head.field("metadata.namespace")),
            (Some("n"), Some("ns"))
        );
        assert_eq!(head.field("spec.other"), None);
    }
}
