//! From bytes to a checked value. Syntax and type errors are upstream's to the letter, because clients
//! see them; what is merely not strict (unknown and duplicate fields) comes back as data, and the server
//! decides by `fieldValidation`. The size of a body is the server's to limit.

mod check;
mod json;
mod node;
mod object;
mod specials;
mod strict;
mod yaml;
mod yaml_words;

use serde_json::Value;

pub use json::parse as parse_json;
pub use node::Node;
pub use object::{
    DecodedObject, decode_object, decode_protobuf_object, not_handled_message, strict_decoding_message,
    summary, type_meta,
};
pub use specials::canonical_quantity;

pub(crate) use check::{json_schema_props, zero};
pub(crate) use json::MAX_DEPTH;
pub(crate) use node::number;
pub(crate) use specials::{civil, days_from_civil};
pub(crate) use strict::duplicates_below;

use crate::types::{Schema, TypeId};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Format {
    Json,
    Yaml,
}

/// A body that cannot be decoded. The text is upstream's, ready for a message.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum DecodeError {
    /// Not JSON or YAML at all.
    #[error("{0}")]
    Syntax(String),
    /// A value of the wrong type, or one that its type refuses.
    #[error("{0}")]
    Type(String),
}

/// A document without a type.
#[derive(Debug)]
pub struct Decoded {
    pub value: Value,
    /// Findings such as `duplicate field "spec.a"`, in document order.
    pub duplicate_fields: Vec<String>,
}

/// A value that fits its type.
#[derive(Debug)]
pub struct Checked {
    /// Without unknown fields and nulls, special types in canonical form.
    pub value: Value,
    /// Findings such as `unknown field "spec.foo"`, in document order.
    pub strict_errors: Vec<String>,
}

/// A parsed document that still knows its order.
#[derive(Debug)]
pub struct Document {
    pub node: Node,
    /// YAML readers find duplicates earlier, and say it in their own words.
    yaml_duplicates: Option<String>,
}

impl Document {
    pub fn parse(bytes: &[u8], format: Format) -> Result<Document, DecodeError> {
        match format {
            Format::Json => {
                let node = json::parse(bytes).map_err(DecodeError::Syntax)?;
                Ok(Document {
                    node,
                    yaml_duplicates: None,
                })
            }
            Format::Yaml => {
                let yaml = yaml::parse(bytes).map_err(DecodeError::Syntax)?;
                Ok(Document {
                    node: yaml.node,
                    yaml_duplicates: yaml.duplicates,
                })
            }
        }
    }

    /// Checks against a type of the table.
    pub fn check(self, schema: &Schema, id: TypeId) -> Result<Checked, DecodeError> {
        let (value, found) = check::Checker::new(schema)
            .run(id, self.node)
            .map_err(DecodeError::Type)?;
        let strict_errors = self.yaml_duplicates.into_iter().chain(found).collect();
        Ok(Checked { value, strict_errors })
    }

    /// Without a type, and with what the YAML reader said about duplicates apart.
    pub fn untyped_with(self, duplicates: impl FnOnce(Option<String>)) -> Value {
        duplicates(self.yaml_duplicates);
        self.node.into_value()
    }

    /// Without a type, as custom resources and patches are decoded.
    pub fn untyped(self) -> Decoded {
        let mut strict = strict::Strict::default();
        strict.untyped(&self.node);
        let duplicate_fields = self
            .yaml_duplicates
            .into_iter()
            .chain(strict.into_errors())
            .collect();
        Decoded {
            value: self.node.into_value(),
            duplicate_fields,
        }
    }
}

pub fn from_json(bytes: &[u8]) -> Result<Decoded, DecodeError> {
    Ok(Document::parse(bytes, Format::Json)?.untyped())
}

pub fn from_yaml(bytes: &[u8]) -> Result<Decoded, DecodeError> {
    Ok(Document::parse(bytes, Format::Yaml)?.untyped())
}

/// Checks a value that is already parsed, such as the outcome of a patch.
pub fn check(schema: &Schema, id: TypeId, value: Value) -> Result<Checked, DecodeError> {
    Document {
        node: Node::from(value),
        yaml_duplicates: None,
    }
    .check(schema, id)
}

/// How many arrays and objects are around the innermost value.
pub(crate) fn depth(value: &Value) -> usize {
    let below = match value {
        Value::Array(values) => values.iter().map(depth).max(),
        Value::Object(map) => map.values().map(depth).max(),
        _ => return 0,
    };
    1 + below.unwrap_or(0)
}

/// A float as Go's JSON encoder writes it.
pub(crate) fn go_float(value: f64) -> String {
    let magnitude = value.abs();
    if magnitude != 0.0 && !(1e-6..1e21).contains(&magnitude) {
        let text = format!("{value:e}");
        return match text.split_once('e') {
            Some((mantissa, exponent)) if !exponent.starts_with('-') => format!("{mantissa}e+{exponent}"),
            _ => text,
        };
    }
    format!("{value}")
}

/// A string in double quotes with Go's escapes.
pub(crate) fn go_quote(text: &str) -> String {
    let mut out = String::with_capacity(text.len() + 2);
    out.push('"');
    for c in text.chars() {
        match c {
            '"' => out.push_str("\\\""),
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            '\x07' => out.push_str("\\a"),
            '\x08' => out.push_str("\\b"),
            '\x0b' => out.push_str("\\v"),
            '\x0c' => out.push_str("\\f"),
            c if (c as u32) < 0x20 || c == '\x7f' => out.push_str(&format!("\\x{:02x}", c as u32)),
            c => out.push(c),
        }
    }
    out.push('"');
    out
}
