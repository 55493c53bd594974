//! The type of a custom resource, read once from the `openAPIV3Schema` of its version. What it preserves without
//! a schema is owned by what the values are.

use serde_json::Value;

use super::types::{Kind, TypeRef};
use crate::types::{ListType, Name, Schema, TypeId};

#[derive(Debug, Clone)]
pub struct Definition {
    pub(super) form: Form,
    /// Sorted by name.
    pub(super) fields: Vec<(String, Definition)>,
    /// The type of what is not a field.
    pub(super) element: Option<Box<Definition>>,
    /// What is not a field may stand here and is owned by what it is.
    pub(super) open: bool,
    pub(super) atomic: bool,
    pub(super) items: Option<Box<Definition>>,
    pub(super) list_type: ListType,
    pub(super) keys: Vec<Name>,
    pub(super) default: Option<Value>,
    /// The metadata of an object, from the built-in tables.
    built_in: Option<(&'static Schema, TypeId)>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Form {
    Scalar(Kind),
    List,
    Map,
    Any,
}

impl Definition {
    fn new(form: Form) -> Definition {
        Definition {
            form,
            fields: Vec::new(),
            element: None,
            open: false,
            atomic: false,
            items: None,
            list_type: ListType::Unset,
            keys: Vec::new(),
            default: None,
            built_in: None,
        }
    }

    /// The type of a custom resource. `metadata` is the built-in ObjectMeta. Without a schema everything is
    /// deduced.
    pub fn of_custom_resource(schema: Option<&Value>, metadata: (&'static Schema, TypeId)) -> Definition {
        let mut root = match schema {
            Some(schema) => Definition::read(schema, false, metadata),
            None => {
                let mut root = Definition::new(Form::Map);
                root.open = true;
                root
            }
        };
        root.add_type_meta(metadata);
        root
    }

    pub fn as_type(&self) -> TypeRef<'_> {
        match self.built_in {
            Some((schema, id)) => TypeRef::Object(schema, id),
            None => TypeRef::Custom(self),
        }
    }

    fn add_type_meta(&mut self, metadata: (&'static Schema, TypeId)) {
        for name in ["apiVersion", "kind"] {
            self.put(name, Definition::new(Form::Scalar(Kind::String)));
        }
        let mut built_in = Definition::new(Form::Map);
        built_in.built_in = Some(metadata);
        self.put("metadata", built_in);
    }

    fn put(&mut self, name: &str, definition: Definition) {
        match self
            .fields
            .binary_search_by(|(field, _)| field.as_str().cmp(name))
        {
            Ok(at) => self.fields[at].1 = definition,
            Err(at) => self.fields.insert(at, (name.to_string(), definition)),
        }
    }

    fn read(schema: &Value, preserve: bool, metadata: (&'static Schema, TypeId)) -> Definition {
        let text = |key: &str| schema.get(key).and_then(Value::as_str).unwrap_or("");
        let flag = |key: &str| schema.get(key).and_then(Value::as_bool).unwrap_or(false);
        let preserve = preserve || flag("x-kubernetes-preserve-unknown-fields");
        let form = match text("type") {
            _ if flag("x-kubernetes-int-or-string") => Form::Any,
            "object" => Form::Map,
            "array" => Form::List,
            "boolean" => Form::Scalar(Kind::Boolean),
            "integer" | "number" => Form::Scalar(Kind::Numeric),
            "string" if matches!(text("format"), "" | "byte") => Form::Scalar(Kind::String),
            "string" => Form::Scalar(Kind::Untyped),
            _ => Form::Any,
        };
        let mut out = Definition::new(form);
        out.default = schema.get("default").filter(|value| !value.is_null()).cloned();
        if matches!(form, Form::Map | Form::Any) {
            out.read_map(schema, preserve, metadata);
            if flag("x-kubernetes-embedded-resource") {
                out.add_type_meta(metadata);
            }
        }
        if matches!(form, Form::List | Form::Any) {
            out.items = schema
                .get("items")
                .map(|items| Box::new(Definition::read(items, preserve, metadata)));
            out.list_type = match text("x-kubernetes-list-type") {
                "set" => ListType::Set,
                "map" => ListType::Map,
                _ => ListType::Atomic,
            };
            let keys = schema.get("x-kubernetes-list-map-keys").and_then(Value::as_array);
            out.keys = keys
                .into_iter()
                .flatten()
                .filter_map(|key| key.as_str().map(|key| Name::Owned(key.to_string())))
                .collect();
        }
        out
    }

    fn read_map(&mut self, schema: &Value, preserve: bool, metadata: (&'static Schema, TypeId)) {
        let properties = schema.get("properties").and_then(Value::as_object);
        // The map is sorted by name.
        self.fields = properties
            .into_iter()
            .flatten()
            .map(|(name, member)| (name.clone(), Definition::read(member, preserve, metadata)))
            .collect();
        match schema.get("additionalProperties") {
            Some(of @ Value::Object(_)) => {
                self.element = Some(Box::new(Definition::read(of, preserve, metadata)));
            }
            Some(allowed) => self.open = allowed.as_bool().unwrap_or(false),
            None => self.open = preserve || self.fields.is_empty(),
        }
        let map_type = schema.get("x-kubernetes-map-type").and_then(Value::as_str);
        self.atomic = map_type == Some("atomic");
    }
}
