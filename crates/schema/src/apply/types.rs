//! What may stand at a place of an object, as server-side apply sees it: a scalar, a list or a map, and how
//! the parts of lists and maps are owned. A view of the type tables or of a custom [`Definition`], made on the
//! way and never kept.

use serde_json::Value;

use super::custom::{Definition, Form};
use super::element::PathElement;
use crate::types::{Field, ListType, MapType, Name, Scalar, Schema, Shape, Special, Type, TypeId};

/// The type of one place.
#[derive(Debug, Clone, Copy)]
pub enum TypeRef<'a> {
    /// A struct of a table.
    Object(&'a Schema, TypeId),
    /// A shape of a table; the field says how it is owned.
    Shape(&'a Schema, &'a Shape, Option<&'a Field>),
    Custom(&'a Definition),
    /// Anything: maps field by field, lists as a whole.
    Deduced,
    /// Anything, owned as a whole.
    Untyped,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    Numeric,
    String,
    Boolean,
    /// Any scalar.
    Untyped,
}

#[derive(Debug, Clone, Copy)]
pub(super) enum Atom<'a> {
    Scalar(Kind),
    List(List<'a>),
    Map(MapOf<'a>),
}

#[derive(Debug, Clone, Copy)]
pub(super) struct List<'a> {
    pub element: TypeRef<'a>,
    pub relation: Relation<'a>,
}

#[derive(Debug, Clone, Copy)]
pub(super) enum Relation<'a> {
    Atomic,
    Set,
    Keyed(&'a [Name]),
    /// By strategic merge's key, where a type says no more.
    KeyedBy(&'a str),
}

#[derive(Debug, Clone, Copy)]
pub(super) struct MapOf<'a> {
    pub atomic: bool,
    fields: Fields<'a>,
    /// The type of what is not a field; `None` where only fields may stand.
    pub element: Option<TypeRef<'a>>,
}

#[derive(Debug, Clone, Copy)]
enum Fields<'a> {
    None,
    Table(&'a Schema, &'a Type),
    Custom(&'a [(String, Definition)]),
}

impl<'a> MapOf<'a> {
    pub fn field(&self, name: &str) -> Option<TypeRef<'a>> {
        match self.fields {
            Fields::None => None,
            Fields::Table(schema, of) => {
                let field = of.field(name)?;
                Some(TypeRef::Shape(schema, &field.shape, Some(field)))
            }
            Fields::Custom(fields) => {
                let at = fields
                    .binary_search_by(|(field, _)| field.as_str().cmp(name))
                    .ok()?;
                Some(fields[at].1.as_type())
            }
        }
    }

    /// The type of the value under a key.
    pub fn at(&self, name: &str) -> Option<TypeRef<'a>> {
        self.field(name).or(self.element)
    }

    /// No field is known, and anything may stand here.
    pub fn is_deduced(&self) -> bool {
        matches!(self.fields, Fields::None) && matches!(self.element, Some(TypeRef::Deduced))
    }

    /// The published default of a field, by which a list's key may be left out.
    fn default(&self, name: &str) -> Option<Value> {
        match self.fields {
            Fields::None => None,
            Fields::Table(_, of) => table_default(of.field(name)?),
            Fields::Custom(fields) => {
                let at = fields
                    .binary_search_by(|(field, _)| field.as_str().cmp(name))
                    .ok()?;
                fields[at].1.default.clone()
            }
        }
    }
}

/// Upstream publishes the zero of a field that Go always prints as its default.
fn table_default(field: &Field) -> Option<Value> {
    if let Some(text) = field.default() {
        return serde_json::from_str(text).ok();
    }
    match field.shape {
        Shape::Scalar(scalar, _) if !field.pointer && !field.omitempty => Some(match scalar {
            Scalar::Bool => Value::Bool(false),
            Scalar::Int32 | Scalar::Int64 | Scalar::Int | Scalar::Float64 => Value::from(0),
            Scalar::String => Value::String(String::new()),
            Scalar::Bytes => return None,
        }),
        _ => None,
    }
}

impl<'a> List<'a> {
    fn keys(&self) -> Vec<&'a str> {
        match self.relation {
            Relation::Keyed(names) => names.iter().map(AsRef::as_ref).collect(),
            Relation::KeyedBy(name) => vec![name],
            Relation::Atomic | Relation::Set => Vec::new(),
        }
    }

    pub fn is_atomic(&self) -> bool {
        matches!(self.relation, Relation::Atomic)
    }

    /// The element by which a list's item is known.
    pub fn element_of(&self, item: &Value) -> Result<PathElement, String> {
        match self.relation {
            Relation::Atomic => Err("invalid indexing of non-associative list".to_string()),
            Relation::Set => match item {
                Value::Object(_) => {
                    Err("associative list without keys has an element that's a map type".to_string())
                }
                Value::Array(_) => Err("not supported: associative list with lists as elements".to_string()),
                Value::Null => {
                    Err("associative list without keys has an element that's an explicit null".to_string())
                }
                value => Ok(PathElement::Value(value.clone())),
            },
            Relation::Keyed(_) | Relation::KeyedBy(_) => self.keyed(item),
        }
    }

    fn keyed(&self, item: &Value) -> Result<PathElement, String> {
        let map = match item {
            Value::Object(map) => map,
            Value::Null => return Err("associative list with keys may not have a null element".to_string()),
            _ => return Err("associative list with keys may not have non-map elements".to_string()),
        };
        let keys = self.keys();
        let mut found = Vec::with_capacity(keys.len());
        for name in &keys {
            if let Some(value) = map.get(*name) {
                found.push((name.to_string(), value.clone()));
            } else if let Atom::Map(of) = self.element.atom(Some(item))
                && let Some(default) = of.default(name)
            {
                found.push((name.to_string(), default));
            }
        }
        if found.is_empty() {
            let names: Vec<String> = keys.iter().map(|name| crate::decode::go_quote(name)).collect();
            return Err(format!(
                "associative list with keys has an element that omits all key fields [{}] (and doesn't have default values for any key fields)",
                names.join(" ")
            ));
        }
        found.sort_by(|a, b| a.0.cmp(&b.0));
        Ok(PathElement::Key(found))
    }
}

impl<'a> TypeRef<'a> {
    /// What a value is here. Where several are allowed the value decides; without one a map comes first.
    pub(super) fn atom(self, value: Option<&Value>) -> Atom<'a> {
        match self {
            TypeRef::Object(schema, id) => table_struct(schema, id, MapType::Unset),
            TypeRef::Shape(schema, shape, field) => table_shape(schema, shape, field, value),
            TypeRef::Custom(definition) => custom(definition, value),
            TypeRef::Deduced => any(value, false),
            TypeRef::Untyped => any(value, true),
        }
    }

    /// The type below a step of a path, where the type has one.
    pub fn below(self, element: &PathElement) -> Option<TypeRef<'a>> {
        match (self.atom(None), element) {
            (Atom::Map(map), PathElement::Field(name)) => map.at(name),
            (Atom::List(list), _) => Some(list.element),
            _ => None,
        }
    }
}

fn table_struct(schema: &Schema, id: TypeId, map_type: MapType) -> Atom<'_> {
    let of = schema.get(id);
    let atomic = match map_type {
        MapType::Unset => of.atomic,
        MapType::Atomic => true,
        MapType::Granular => false,
    };
    if of.fields.is_empty() {
        return Atom::Map(MapOf {
            atomic,
            fields: Fields::None,
            element: Some(TypeRef::Deduced),
        });
    }
    Atom::Map(MapOf {
        atomic,
        fields: Fields::Table(schema, of),
        element: None,
    })
}

fn table_shape<'a>(
    schema: &'a Schema,
    shape: &'a Shape,
    field: Option<&'a Field>,
    value: Option<&Value>,
) -> Atom<'a> {
    let map_type = field.map_or(MapType::Unset, |field| field.map_type);
    match shape {
        Shape::Scalar(scalar, _) => Atom::Scalar(match scalar {
            Scalar::Bool => Kind::Boolean,
            Scalar::String | Scalar::Bytes => Kind::String,
            Scalar::Int32 | Scalar::Int64 | Scalar::Int | Scalar::Float64 => Kind::Numeric,
        }),
        Shape::Special(special) => match special {
            Special::Time | Special::MicroTime | Special::Quantity => Atom::Scalar(Kind::Untyped),
            Special::Duration => Atom::Scalar(Kind::String),
            Special::RawExtension => any(value, true),
            Special::FieldsV1 => deduced_map(),
            Special::IntOrString
            | Special::Json
            | Special::JsonSchemaPropsOrArray
            | Special::JsonSchemaPropsOrBool
            | Special::JsonSchemaPropsOrStringArray
            | Special::Any => any(value, false),
        },
        Shape::Struct(id) => table_struct(schema, *id, map_type),
        Shape::List(list) => Atom::List(List {
            element: TypeRef::Shape(schema, &list.of, None),
            relation: field.map_or(Relation::Atomic, list_relation),
        }),
        Shape::Map(map) => Atom::Map(MapOf {
            atomic: map_type == MapType::Atomic,
            fields: Fields::None,
            element: Some(TypeRef::Shape(schema, &map.of, None)),
        }),
    }
}

fn list_relation(field: &Field) -> Relation<'_> {
    match field.list_type {
        ListType::Atomic => Relation::Atomic,
        ListType::Set => Relation::Set,
        ListType::Map => Relation::Keyed(field.list_map_keys()),
        ListType::Unset if field.patch_merge => match field.merge_key() {
            Some(key) => Relation::KeyedBy(key),
            None => Relation::Set,
        },
        ListType::Unset => Relation::Atomic,
    }
}

fn deduced_map<'a>() -> Atom<'a> {
    Atom::Map(MapOf {
        atomic: false,
        fields: Fields::None,
        element: Some(TypeRef::Deduced),
    })
}

fn any<'a>(value: Option<&Value>, atomic: bool) -> Atom<'a> {
    match value {
        Some(Value::Array(_)) => Atom::List(List {
            element: TypeRef::Untyped,
            relation: Relation::Atomic,
        }),
        Some(Value::String(_) | Value::Number(_) | Value::Bool(_)) => Atom::Scalar(Kind::Untyped),
        _ if atomic => Atom::Map(MapOf {
            atomic,
            fields: Fields::None,
            element: Some(TypeRef::Untyped),
        }),
        _ => deduced_map(),
    }
}

fn custom<'a>(definition: &'a Definition, value: Option<&Value>) -> Atom<'a> {
    let map = || {
        Atom::Map(MapOf {
            atomic: definition.atomic,
            fields: if definition.fields.is_empty() {
                Fields::None
            } else {
                Fields::Custom(&definition.fields)
            },
            element: match (&definition.element, definition.open) {
                (Some(element), _) => Some(element.as_type()),
                (None, true) => Some(TypeRef::Deduced),
                (None, false) => None,
            },
        })
    };
    let list = || {
        Atom::List(List {
            element: definition
                .items
                .as_deref()
                .map_or(TypeRef::Untyped, Definition::as_type),
            relation: match definition.list_type {
                ListType::Set => Relation::Set,
                ListType::Map => Relation::Keyed(&definition.keys),
                ListType::Atomic | ListType::Unset => Relation::Atomic,
            },
        })
    };
    match definition.form {
        Form::Scalar(kind) => Atom::Scalar(kind),
        Form::List => list(),
        Form::Map => map(),
        Form::Any => match value {
            Some(Value::Array(_)) => list(),
            Some(Value::String(_) | Value::Number(_) | Value::Bool(_)) => Atom::Scalar(Kind::Untyped),
            _ => map(),
        },
    }
}
