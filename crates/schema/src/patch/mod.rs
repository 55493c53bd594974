//! The three patches of the API over JSON values: JSON patch, JSON merge patch, strategic merge patch.
//! Errors carry upstream's text and say which status fits; the outcome still needs a type check.

mod json;
mod merge;
mod order;
mod show;
mod strategic;

use serde_json::Value;

use crate::decode::{Document, Format, Node};

pub use json::{MAX_JSON_PATCH_OPERATIONS, json_patch};
pub use merge::merge_patch;
pub use show::show_patched;
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
        });
    }
    if matches!(document.node, Node::Null) && patch_type == PatchType::StrategicMerge {
        return Ok(DecodedPatch {
            value: Value::Object(serde_json::Map::new()),
            strict_errors: Vec::new(),
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
    })
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
