//! The three patches of the API over JSON values: JSON patch, JSON merge patch, strategic merge patch.
//! Errors carry upstream's text and say which status fits; the outcome still needs a type check.

mod integers;
mod json;
mod merge;
mod order;
mod show;
mod spelled;
mod strategic;

use serde_json::Value;

use crate::decode::{Document, Format, Node, number};

pub use integers::{brings_odd_numbers, convert_integers};
pub use json::{MAX_JSON_PATCH_OPERATIONS, json_patch};
pub use merge::merge_patch;
pub use show::show_patched;
pub use spelled::Spelled;
pub use strategic::strategic_merge;

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum PatchError {
    /// 400
    #[error("{0}")]
    BadRequest(String),
    /// 413
    #[error("{0}")]
    TooLarge(String),
    /// 422, as upstream's generic response to it
    #[error("{0}")]
    Unprocessable(String),
    /// 500: upstream does not foresee these, and answers with the bare text
    #[error("{0}")]
    Internal(String),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PatchType {
    Json,
    Merge,
    StrategicMerge,
}

#[derive(Debug)]
pub struct DecodedPatch {
    pub value: Value,
    /// Findings for `fieldValidation`, to go before those of the patched object.
    pub strict_errors: Vec<String>,
    /// Numbers that were written otherwise than we would write them.
    pub spelled: Spelled,
}

/// Reads the body of a patch. `strict` is `fieldValidation` Strict or Warn, which reads more closely.
pub fn decode_patch(patch_type: PatchType, body: &[u8], strict: bool) -> Result<DecodedPatch, PatchError> {
    let prefix = if strict && patch_type != PatchType::StrategicMerge {
        "error decoding patch: "
    } else {
        ""
    };
    let refuse = |text: String| PatchError::BadRequest(format!("{prefix}{text}"));
    let document = Document::parse(body, Format::Json).map_err(|error| refuse(error.to_string()))?;
    if (strict || patch_type == PatchType::StrategicMerge)
        && let Some(number) = out_of_range(&document.node)
    {
        let text = format!("json: cannot unmarshal number {number} into Go value of type float64");
        return Err(refuse(text));
    }
    let spelled = Spelled::of(&document.node);
    let found = match &document.node {
        Node::Null => "null",
        Node::Bool(_) => "bool",
        Node::Number(_) => "number",
        Node::String(_) => "string",
        Node::Array(_) => "array",
        Node::Object(_) => "object",
    };
    let mismatch = |go_type: &str| {
        refuse(format!(
            "json: cannot unmarshal {found} into Go value of type {go_type}"
        ))
    };
    if patch_type == PatchType::Json {
        if matches!(document.node, Node::Null) {
            return Ok(DecodedPatch {
                value: Value::Array(Vec::new()),
                strict_errors: Vec::new(),
                spelled,
            });
        }
        if !matches!(document.node, Node::Array(_)) {
            return Err(mismatch(if strict {
                "[]handlers.jsonPatchOp"
            } else {
                "jsonpatch.Patch"
            }));
        }
        let strict_errors = if strict {
            json::strict_errors(&document.node).map_err(refuse)?
        } else {
            Vec::new()
        };
        return Ok(DecodedPatch {
            value: document.node.into_value(),
            strict_errors,
            spelled,
        });
    }
    if matches!(document.node, Node::Null) && patch_type == PatchType::StrategicMerge {
        return Ok(DecodedPatch {
            value: Value::Object(serde_json::Map::new()),
            strict_errors: Vec::new(),
            spelled,
        });
    }
    if !matches!(document.node, Node::Object(_)) {
        return Err(match (&document.node, patch_type) {
            (Node::Null, PatchType::Merge) => PatchError::BadRequest("Invalid JSON Patch".to_string()),
            _ => mismatch("map[string]interface {}"),
        });
    }
    let decoded = document.untyped();
    Ok(DecodedPatch {
        value: decoded.value,
        strict_errors: if strict {
            decoded.duplicate_fields
        } else {
            Vec::new()
        },
        spelled,
    })
}

/// The first number that not even a 64-bit float holds.
fn out_of_range(node: &Node) -> Option<&str> {
    match node {
        Node::Number(text) => number(text).is_none().then_some(text),
        Node::Array(nodes) => nodes.iter().find_map(out_of_range),
        Node::Object(entries) => entries.iter().find_map(|(_, node)| out_of_range(node)),
        _ => None,
    }
}

/// A value as Go's `%v` prints it, which upstream's messages quote.
pub fn go_print(value: &Value) -> String {
    match value {
        Value::Null => "<nil>".to_string(),
        Value::Bool(b) => b.to_string(),
        Value::Number(n) => n.to_string(),
        Value::String(text) => text.clone(),
        Value::Array(values) => format!("[{}]", values.iter().map(go_print).collect::<Vec<_>>().join(" ")),
        Value::Object(map) => {
            let entries: Vec<String> = map
                .iter()
                .map(|(key, value)| format!("{key}:{}", go_print(value)))
                .collect();
            format!("map[{}]", entries.join(" "))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_beyond_any_float_are_refused() {
        let check = |kind: PatchType, strict: bool, patch: &str, expected: &str| {
            let got = decode_patch(kind, patch.as_bytes(), strict);
            let got = got.map_or_else(|error| error.to_string(), |_| String::new());
            assert_eq!(got, expected, "{patch}");
        };
        let text = "json: cannot unmarshal number 1e400 into Go value of type float64";
        let patch = r#"{"a":{"b":[1e400]}}"#;
        check(
            PatchType::Merge,
            true,
            patch,
            &format!("error decoding patch: {text}"),
        );
        check(PatchType::Merge, false, patch, "");
        check(PatchType::StrategicMerge, false, patch, text);
        check(PatchType::Merge, true, r#"{"a":1e300}"#, "");
    }
}
