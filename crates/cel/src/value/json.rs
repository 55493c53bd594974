//! JSON to values: with a schema, which tells integers from doubles and strings from times, or without one. And back.

use base64::Engine as _;
use serde_json::Value as Json;

use super::{Eval, List, ListKind, Map, Str, Value};
use crate::error::EvalError;
use crate::meter::spend;
use crate::schema::Schema;
use crate::time::Timestamp;

/// The word that messages use for the type of JSON data.
fn go_name(json: &Json) -> &'static str {
    match json {
        Json::Null => "<nil>",
        Json::Bool(_) => "bool",
        Json::Number(number) if number.is_i64() => "int64",
        Json::Number(_) => "float64",
        Json::String(_) => "string",
        Json::Array(_) => "[]interface {}",
        Json::Object(_) => "map[string]interface {}",
    }
}

fn invalid(message: &str) -> EvalError {
    EvalError::new(format!("invalid data, {message}"))
}

impl<'a> Value<'a> {
    /// The value of data that a schema describes; what does not fit the schema is an error when it is reached.
    pub fn from_json(json: &'a Json, schema: &'a Schema) -> Result<Self, EvalError> {
        Self::typed(json, schema)
    }

    pub(crate) fn typed(json: &'a Json, schema: &'a Schema) -> Eval<Self> {
        if json.is_null() {
            if schema.nullable {
                return Ok(Self::Null);
            }
            return Err(invalid("got null for schema with nullable=false"));
        }
        if schema.int_or_string {
            return match json {
                Json::String(text) => Ok(Self::String(Str::Borrowed(text))),
                Json::Number(number) if number.is_i64() => Ok(Self::Int(number.as_i64().unwrap_or_default())),
                _ => Err(invalid(
                    "expected XIntOrString value to be either a string or integer",
                )),
            };
        }
        let expected = |kind: &str| invalid(&format!("expected {kind}, got {}", go_name(json)));
        match schema.kind.as_str() {
            "object" => match json {
                Json::Object(object) => {
                    let schema = if schema.embedded_resource {
                        schema.as_resource()
                    } else {
                        schema
                    };
                    Ok(Self::Map(Map::json(object, schema)))
                }
                _ => Err(invalid("expected a map for the provided schema with type=object")),
            },
            "array" => Self::array(json, schema),
            "string" => match json {
                Json::String(text) => Self::text(text, &schema.format),
                _ => Err(expected("string")),
            },
            "number" => match json {
                Json::Number(number) => Ok(Self::Double(number.as_f64().unwrap_or(f64::NAN))),
                _ => Err(expected("float")),
            },
            "integer" => match json.as_i64() {
                Some(value) => Ok(Self::Int(value)),
                None => Err(expected("int")),
            },
            "boolean" => match json {
                Json::Bool(value) => Ok(Self::Bool(*value)),
                _ => Err(expected("bool")),
            },
            _ if schema.preserve_unknown_fields => Ok(Self::Preserved(json)),
            other => Err(EvalError::new(format!(
                "invalid type, expected object, array, number, integer, boolean or string, or no type with \
                 x-kubernetes-int-or-string or x-kubernetes-preserve-unknown-fields is true, got {other}"
            ))),
        }
    }

    fn array(json: &'a Json, schema: &'a Schema) -> Eval<Self> {
        let Json::Array(items) = json else {
            return Err(invalid(
                "expected an array for the provided schema with type=array",
            ));
        };
        if schema.items.is_none() {
            return Err(EvalError::new(
                "invalid array type, expected Items with a non-empty Schema",
            ));
        }
        let kind = match schema.list_type.as_deref() {
            None | Some("" | "atomic") => ListKind::Atomic,
            Some("set") => ListKind::Set,
            Some("map") => ListKind::Map(&schema.list_map_keys),
            Some(other) => {
                return Err(EvalError::new(format!(
                    "invalid x-kubernetes-list-type, expected 'map', 'set' or 'atomic' but got {other}"
                )));
            }
        };
        Ok(Self::List(List::json(items, schema, kind)))
    }

    fn text(text: &'a str, format: &str) -> Eval<Self> {
        match format {
            "duration" => skiff_meta::duration::parse_openapi(text)
                .map(Self::Duration)
                .map_err(|error| EvalError::new(format!("Invalid duration {text}: {error}"))),
            "date" => Timestamp::parse_date(text)
                .map(Self::Timestamp)
                .map_err(|error| EvalError::new(format!("Invalid date formatted string {text}: {error}"))),
            "date-time" => Timestamp::parse_lenient(text)
                .map(Self::Timestamp)
                .map_err(|error| {
                    EvalError::new(format!("Invalid date-time formatted string {text}: {error}"))
                }),
            "byte" => {
                spend(text.len() / 32)?;
                let decoded = base64::engine::general_purpose::STANDARD.decode(text);
                decoded
                    .map(|bytes| Self::Bytes(bytes.into()))
                    .map_err(|error| EvalError::new(format!("Invalid byte formatted string {text}: {error}")))
            }
            _ => Ok(Self::String(Str::Borrowed(text))),
        }
    }

    /// The value of data without a schema, as admission policies see objects.
    pub fn plain(json: &'a Json) -> Self {
        match json {
            Json::Null => Self::Null,
            Json::Bool(value) => Self::Bool(*value),
            Json::Number(number) => match number.as_i64() {
                Some(value) => Self::Int(value),
                None => Self::Double(number.as_f64().unwrap_or(f64::NAN)),
            },
            Json::String(text) => Self::String(Str::Borrowed(text)),
            Json::Array(items) => Self::List(List::plain(items)),
            Json::Object(object) => Self::Map(Map::plain(object)),
        }
    }

    /// The value as JSON, for what expressions make: patches. A value of another library has no such form.
    pub fn to_json(&self) -> Result<Json, EvalError> {
        Ok(match self {
            Self::Null | Self::Optional(None) => Json::Null,
            Self::Bool(value) => Json::Bool(*value),
            Self::Int(value) => Json::from(*value),
            Self::Uint(value) => Json::from(*value),
            Self::Double(value) => Json::from(*value),
            Self::String(text) => Json::from(&**text),
            Self::Bytes(bytes) => Json::from(base64::engine::general_purpose::STANDARD.encode(bytes)),
            Self::Duration(_) | Self::Timestamp(_) => Json::from(self.to_text()?),
            Self::Optional(Some(value)) => value.to_json()?,
            Self::Preserved(json) => (*json).clone(),
            Self::List(list) => {
                let mut items = Vec::with_capacity(list.len());
                for item in list.iter() {
                    items.push(item?.to_json()?);
                }
                Json::Array(items)
            }
            Self::Map(map) => {
                let mut object = serde_json::Map::new();
                for key in map.keys() {
                    let value = map.find(&key)?.unwrap_or(Value::Null);
                    object.insert(key.to_text()?, value.to_json()?);
                }
                Json::Object(object)
            }
            other => {
                return Err(EvalError::new(format!(
                    "a value of type {} has no JSON form",
                    other.type_name()
                )));
            }
        })
    }
}
