//! Structural schemas: the OpenAPI v3 schemas that come with custom resources at run time, prepared once
//! for pruning, defaulting and validation of many objects. The schema that is prepared here was accepted
//! before; what a definition may contain is not this module's business. No I/O, no kinds.

mod default;
pub mod formats;
mod lists;
mod meta;
mod prune;
pub mod publish;
mod validate;

use std::collections::BTreeMap;

use serde_json::Value;
use skiff_meta::regexp;

pub use default::{default, prune_nulls};
pub use lists::validate_lists;
pub use meta::{Coerced, coerce_metadata};
pub use prune::{prune, prune_value};
pub use validate::{validate, validate_update};

/// One node of a schema.
#[derive(Debug, Clone, Default)]
pub struct Structural {
    /// `object`, `array`, `string`, `integer`, `number`, `boolean`; empty where the schema says nothing.
    pub kind: String,
    pub format: String,
    /// Boxed: a node of the map has room for eleven, and most objects have fewer.
    pub properties: BTreeMap<String, Box<Structural>>,
    pub additional: Additional,
    pub items: Option<Box<Structural>>,
    pub default: Option<Value>,
    pub nullable: bool,
    pub int_or_string: bool,
    pub preserve_unknown_fields: bool,
    pub embedded_resource: bool,
    pub list_type: ListKind,
    pub list_map_keys: Vec<String>,
    pub map_type: String,
    pub required: Vec<String>,
    pub enumeration: Vec<Value>,
    pub bounds: Bounds,
    pub pattern: Option<Pattern>,
    pub unique_items: bool,
    pub all_of: Vec<Structural>,
    pub any_of: Vec<Structural>,
    pub one_of: Vec<Structural>,
    pub not: Option<Box<Structural>>,
    /// `x-kubernetes-validations`, as they were given.
    pub rules: Vec<Value>,
}

/// What an object may have besides its properties.
#[derive(Debug, Clone, Default)]
pub enum Additional {
    #[default]
    Unset,
    Allowed,
    Forbidden,
    Schema(Box<Structural>),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum ListKind {
    #[default]
    Unset,
    Atomic,
    Set,
    Map,
}

#[derive(Debug, Clone, Default)]
pub struct Bounds {
    pub maximum: Option<f64>,
    pub exclusive_maximum: bool,
    pub minimum: Option<f64>,
    pub exclusive_minimum: bool,
    pub multiple_of: Option<f64>,
    pub max_length: Option<i64>,
    pub min_length: Option<i64>,
    pub max_items: Option<i64>,
    pub min_items: Option<i64>,
    pub max_properties: Option<i64>,
    pub min_properties: Option<i64>,
}

#[derive(Debug, Clone)]
pub struct Pattern {
    pub text: String,
}

impl Pattern {
    /// Whether a text matches. Compiled when first needed: a definition may have thousands of patterns, and most of
    /// them may never be asked. Fails with the reason where it cannot be used.
    pub fn matches(&self, text: &str) -> Result<bool, String> {
        regexp::compiled(&self.text).map(|regex| regex.is_match(text))
    }
}

impl Structural {
    /// Prepares a `JSONSchemaProps` in its JSON form.
    pub fn parse(schema: &Value) -> Structural {
        let text = |key: &str| schema.get(key).and_then(Value::as_str).unwrap_or("").to_owned();
        let flag = |key: &str| schema.get(key).and_then(Value::as_bool).unwrap_or(false);
        let number = |key: &str| schema.get(key).and_then(Value::as_f64);
        let integer = |key: &str| schema.get(key).and_then(Value::as_i64);
        let list = |key: &str| {
            schema
                .get(key)
                .and_then(Value::as_array)
                .cloned()
                .unwrap_or_default()
        };
        let texts = |key: &str| -> Vec<String> {
            list(key)
                .iter()
                .filter_map(|v| v.as_str().map(str::to_owned))
                .collect()
        };
        let schemas = |key: &str| list(key).iter().map(Structural::parse).collect();
        let kind = text("type");
        Structural {
            format: formats::supported(&kind, flag("x-kubernetes-int-or-string"), &text("format")),
            properties: schema
                .get("properties")
                .and_then(Value::as_object)
                .into_iter()
                .flatten()
                .map(|(name, schema)| (name.clone(), Box::new(Structural::parse(schema))))
                .collect(),
            additional: match schema.get("additionalProperties") {
                None | Some(Value::Null) => Additional::Unset,
                Some(Value::Bool(true)) => Additional::Allowed,
                Some(Value::Bool(false)) => Additional::Forbidden,
                Some(schema) => Additional::Schema(Box::new(Structural::parse(schema))),
            },
            items: schema
                .get("items")
                .filter(|items| items.is_object())
                .map(|items| Box::new(Structural::parse(items))),
            default: schema.get("default").filter(|value| !value.is_null()).cloned(),
            nullable: flag("nullable"),
            int_or_string: flag("x-kubernetes-int-or-string"),
            preserve_unknown_fields: flag("x-kubernetes-preserve-unknown-fields"),
            embedded_resource: flag("x-kubernetes-embedded-resource"),
            list_type: match text("x-kubernetes-list-type").as_str() {
                "set" => ListKind::Set,
                "map" => ListKind::Map,
                "atomic" => ListKind::Atomic,
                _ => ListKind::Unset,
            },
            list_map_keys: texts("x-kubernetes-list-map-keys"),
            map_type: text("x-kubernetes-map-type"),
            required: texts("required"),
            enumeration: list("enum"),
            bounds: Bounds {
                maximum: number("maximum"),
                exclusive_maximum: flag("exclusiveMaximum"),
                minimum: number("minimum"),
                exclusive_minimum: flag("exclusiveMinimum"),
                multiple_of: number("multipleOf"),
                max_length: integer("maxLength"),
                min_length: integer("minLength"),
                max_items: integer("maxItems"),
                min_items: integer("minItems"),
                max_properties: integer("maxProperties"),
                min_properties: integer("minProperties"),
            },
            pattern: Some(text("pattern"))
                .filter(|text| !text.is_empty())
                .map(|text| Pattern { text }),
            unique_items: flag("uniqueItems"),
            all_of: schemas("allOf"),
            any_of: schemas("anyOf"),
            one_of: schemas("oneOf"),
            not: schema
                .get("not")
                .filter(|not| not.is_object())
                .map(|not| Box::new(Structural::parse(not))),
            rules: list("x-kubernetes-validations"),
            kind,
        }
    }

    /// The schema of a field, by a property of that name or by what all others share.
    pub fn field(&self, name: &str) -> Option<&Structural> {
        match (self.properties.get(name), &self.additional) {
            (Some(schema), _) => Some(schema),
            (None, Additional::Schema(schema)) => Some(schema),
            _ => None,
        }
    }

    /// Whether any node has a default.
    pub fn has_defaults(&self) -> bool {
        self.any(&|node| node.default.is_some())
    }

    /// Whether any node has rules.
    pub fn has_rules(&self) -> bool {
        self.any(&|node| !node.rules.is_empty())
    }

    /// Whether any node, the alternatives aside, is such.
    pub fn any(&self, such: &dyn Fn(&Structural) -> bool) -> bool {
        such(self)
            || self.properties.values().any(|node| node.any(such))
            || matches!(&self.additional, Additional::Schema(node) if node.any(such))
            || self.items.as_ref().is_some_and(|node| node.any(such))
    }
}
