//! The declared type of a schema: what the checker may select from a value, and how large it can be.

use std::collections::BTreeMap;
use std::sync::Arc;

use serde_json::Value as Json;

use crate::escape::escape;
use crate::limits::MAX_REQUEST_SIZE;
use crate::schema::Schema;
use crate::types::Type;

/// A type with the sizes that cost estimates need.
#[derive(Debug, Clone)]
pub struct DeclType {
    pub cel: Type,
    /// Fields by escaped name, for objects only.
    pub fields: Option<BTreeMap<String, Arc<DeclType>>>,
    pub key: Option<Arc<DeclType>>,
    pub element: Option<Arc<DeclType>>,
    /// The most elements, entries or characters a value can have; zero for what has no size.
    pub max_elements: i64,
    /// The fewest bytes that a value takes in JSON.
    pub min_serialized_size: i64,
    /// Whether every name that is selected is taken for that of an entry when sizes are looked for.
    pub any_name: bool,
}

const MAX_DURATION: i64 = 32;
const MAX_DATE_TIME: i64 = 32;
const DATE: i64 = 12;
const MIN_DATE_TIME: i64 = 21;
const MIN_DURATION: i64 = 3;

impl DeclType {
    pub(crate) fn simple(cel: Type, min_serialized_size: i64, max_elements: i64) -> Self {
        Self {
            cel,
            fields: None,
            key: None,
            element: None,
            max_elements,
            min_serialized_size,
            any_name: false,
        }
    }

    /// The type of a schema, or `None` where CEL cannot see the value: no type, or a list or map of such.
    /// Object types are named by their path from `name`.
    pub fn of(schema: &Schema, is_resource_root: bool, name: &str) -> Option<Self> {
        if schema.int_or_string {
            let longest = schema.max_length.map_or(MAX_REQUEST_SIZE - 2, characters);
            return Some(Self::simple(Type::Dyn, 1, longest));
        }
        let schema = if is_resource_root {
            schema.as_resource()
        } else {
            schema
        };
        match schema.kind.as_str() {
            "array" => {
                let items = schema.items.as_ref()?;
                let element = Self::of(items, items.embedded_resource, &format!("{name}.@idx"))?;
                let open = (MAX_REQUEST_SIZE - 2) / (element.min_serialized_size + 1);
                let most = schema.max_items.map_or(open, |most| most.max(0));
                Some(Self {
                    element: Some(Arc::new(element.clone())),
                    ..Self::simple(Type::list(element.cel), 2, most)
                })
            }
            "object" => match schema.additional_schema() {
                Some(values) => {
                    let value = Self::of(values, values.embedded_resource, &format!("{name}.@elem"))?;
                    let open = (MAX_REQUEST_SIZE - 2) / (value.min_serialized_size + 6);
                    let most = schema.max_properties.map_or(open, |most| most.max(0));
                    Some(Self {
                        key: Some(Arc::new(Self::simple(Type::String, 2, 0))),
                        element: Some(Arc::new(value.clone())),
                        ..Self::simple(Type::map(Type::String, value.cel), 2, most)
                    })
                }
                None => Some(Self::object(schema, name)),
            },
            "string" => Some(Self::string(schema)),
            "boolean" => Some(Self::simple(Type::Bool, 4, 0)),
            "number" => Some(Self::simple(Type::Double, 1, 0)),
            "integer" => Some(Self::simple(Type::Int, 1, 0)),
            _ => None,
        }
    }

    fn object(schema: &Schema, name: &str) -> Self {
        let mut fields = BTreeMap::new();
        let mut size = 2;
        for (property, child) in schema.properties.iter().flatten() {
            let escaped = escape(property);
            let path = format!("{name}.{}", escaped.as_deref().unwrap_or_default());
            let Some(field) = Self::of(child, child.embedded_resource, &path) else {
                continue;
            };
            // Defaults are filled in by the server, so only what a client must send counts.
            if schema.required.contains(property) && !child.has_default {
                size += property.len() as i64 + field.min_serialized_size + 4;
            }
            if let Some(escaped) = escaped {
                fields.insert(escaped.into_owned(), Arc::new(field));
            }
        }
        Self {
            fields: Some(fields),
            ..Self::simple(Type::Struct(name.into()), size, 0)
        }
    }

    fn string(schema: &Schema) -> Self {
        let open = MAX_REQUEST_SIZE - 2;
        match schema.format.as_str() {
            "byte" => Self::simple(Type::Bytes, 2, schema.max_length.map_or(open, |most| most.max(0))),
            "duration" => Self::simple(Type::Duration, MIN_DURATION, MAX_DURATION),
            "date" => Self::simple(Type::Timestamp, DATE, DATE),
            "date-time" => Self::simple(Type::Timestamp, MIN_DATE_TIME, MAX_DATE_TIME),
            _ => {
                let longest_choice = || {
                    let choices = schema.enumeration.iter().filter_map(Json::as_str);
                    choices.map(|choice| choice.len() as i64).max().unwrap_or(0)
                };
                let most = match schema.max_length {
                    Some(length) => characters(length),
                    None if schema.enumeration.is_empty() => open,
                    None => longest_choice(),
                };
                Self::simple(Type::String, 2, most)
            }
        }
    }

    pub(crate) fn field(&self, name: &str) -> Option<&Arc<DeclType>> {
        self.fields.as_ref()?.get(name)
    }
}

/// `maxLength` counts code points, sizes here are bytes.
fn characters(length: i64) -> i64 {
    length.max(0).saturating_mul(4)
}
