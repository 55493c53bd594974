//! Type tables: what the fields of every type are, how their lists merge, how Go and protobuf see
//! them. Built-in tables borrow from static text; tables of custom resources own their names.

mod build;
mod table;

use std::borrow::Cow;
use std::collections::HashMap;
use std::sync::OnceLock;

pub use build::Builder;
pub use table::TableError;

use crate::protobuf::layout::Layouts;

pub type Name = Cow<'static, str>;

/// The index of a type in its [`Schema`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct TypeId(pub(crate) u32);

#[derive(Debug, Default)]
pub struct Schema {
    types: Vec<Type>,
    by_name: HashMap<Name, TypeId>,
    by_kind: HashMap<Name, Vec<TypeId>>,
    /// Made when protobuf is first spoken.
    layouts: OnceLock<Layouts>,
}

/// A struct type. Fields keep the order of their declaration.
#[derive(Debug, Default)]
pub struct Type {
    /// As in OpenAPI: `io.k8s.api.apps.v1.Deployment`.
    pub name: Name,
    /// The Go package name, for error messages: `v1`.
    pub package: Name,
    pub fields: Box<[Field]>,
    /// The group versions in which this type is a kind: `(group, version)`.
    pub group_versions: Box<[(Name, Name)]>,
    /// Changed only as a whole by server-side apply.
    pub atomic: bool,
    /// Not published in OpenAPI.
    pub hidden: bool,
    /// The text of `x-kubernetes-unions`.
    pub unions: Option<Name>,
}

#[derive(Debug)]
pub struct Field {
    pub name: Name,
    pub shape: Shape,
    /// The protobuf number, 0 for none. For an inlined field it counts inside [`Embed`].
    pub number: u32,
    /// A Go pointer: absent and zero differ.
    pub pointer: bool,
    pub required: bool,
    pub omitempty: bool,
    pub omitzero: bool,
    pub list_type: ListType,
    pub map_type: MapType,
    pub patch_merge: bool,
    pub patch_replace: bool,
    pub patch_retain_keys: bool,
    pub(crate) rare: Option<Box<Rare>>,
}

/// What few fields have, kept out of the way to keep the table small.
#[derive(Debug, Default, Clone)]
pub(crate) struct Rare {
    pub list_map_keys: Box<[Name]>,
    pub merge_key: Option<Name>,
    /// JSON text.
    pub default: Option<Name>,
    pub embed: Option<Embed>,
}

/// The Go struct that a field is inlined from (joined by dots where inlining nests), and the protobuf
/// numbers on the way to it. A number of 0 means that protobuf does not know the field.
#[derive(Debug, Clone)]
pub struct Embed {
    pub go_name: Name,
    pub numbers: Box<[u32]>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ListType {
    Unset,
    Atomic,
    Set,
    Map,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MapType {
    Unset,
    Atomic,
    Granular,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Scalar {
    Bool,
    Int32,
    Int64,
    /// Go's `int`.
    Int,
    Float64,
    String,
    Bytes,
}

/// Types with an encoding of their own.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Special {
    Time,
    MicroTime,
    Duration,
    Quantity,
    IntOrString,
    RawExtension,
    FieldsV1,
    /// Any JSON value, kept as it is.
    Json,
    JsonSchemaPropsOrArray,
    JsonSchemaPropsOrBool,
    JsonSchemaPropsOrStringArray,
    /// Go's empty interface.
    Any,
}

#[derive(Debug, Clone)]
pub enum Shape {
    /// The name is Go's, where it is not the plain one: `v1.PodPhase`.
    Scalar(Scalar, Option<Name>),
    Special(Special),
    Struct(TypeId),
    List(Box<List>),
    Map(Box<Map>),
}

#[derive(Debug, Clone)]
pub struct List {
    pub of: Shape,
    pub go_name: Option<Name>,
    /// Protobuf wraps the list in a message with the field `items = 1`.
    pub wrapped: bool,
}

#[derive(Debug, Clone)]
pub struct Map {
    pub of: Shape,
    pub key: Option<Name>,
    pub go_name: Option<Name>,
}

impl Schema {
    /// Reads the text of a table, see `types/table.rs` for the grammar.
    pub fn parse(text: &'static str) -> Result<Schema, TableError> {
        table::parse(text)
    }

    pub fn get(&self, id: TypeId) -> &Type {
        &self.types[id.0 as usize]
    }

    pub(crate) fn layouts(&self) -> &Layouts {
        self.layouts.get_or_init(|| Layouts::new(self))
    }

    pub fn types(&self) -> impl Iterator<Item = (TypeId, &Type)> {
        self.types
            .iter()
            .enumerate()
            .map(|(index, t)| (TypeId(index as u32), t))
    }

    /// By OpenAPI name.
    pub fn by_name(&self, name: &str) -> Option<TypeId> {
        self.by_name.get(name).copied()
    }

    pub fn by_gvk(&self, group: &str, version: &str, kind: &str) -> Option<TypeId> {
        self.by_kind
            .get(kind)?
            .iter()
            .copied()
            .find(|id| self.get(*id).is_in(group, version))
    }

    /// Go's name for a shape, as it stands in decoding errors: `[]v1.Container`.
    pub fn go_type(&self, shape: &Shape) -> String {
        match shape {
            Shape::Scalar(_, Some(name)) => name.to_string(),
            Shape::Scalar(scalar, None) => match scalar {
                Scalar::Bool => "bool",
                Scalar::Int32 => "int32",
                Scalar::Int64 => "int64",
                Scalar::Int => "int",
                Scalar::Float64 => "float64",
                Scalar::String => "string",
                Scalar::Bytes => "[]uint8",
            }
            .to_string(),
            Shape::Special(special) => match special {
                Special::Time => "v1.Time",
                Special::MicroTime => "v1.MicroTime",
                Special::Duration => "v1.Duration",
                Special::Quantity => "resource.Quantity",
                Special::IntOrString => "intstr.IntOrString",
                Special::RawExtension => "runtime.RawExtension",
                Special::FieldsV1 => "v1.FieldsV1",
                Special::Json => "v1.JSON",
                Special::JsonSchemaPropsOrArray => "v1.JSONSchemaPropsOrArray",
                Special::JsonSchemaPropsOrBool => "v1.JSONSchemaPropsOrBool",
                Special::JsonSchemaPropsOrStringArray => "v1.JSONSchemaPropsOrStringArray",
                Special::Any => "interface {}",
            }
            .to_string(),
            Shape::Struct(id) => self.get(*id).go_type(),
            Shape::List(list) => match &list.go_name {
                Some(name) => name.to_string(),
                None => format!("[]{}", self.go_type(&list.of)),
            },
            Shape::Map(map) => match &map.go_name {
                Some(name) => name.to_string(),
                None => format!(
                    "map[{}]{}",
                    map.key.as_deref().unwrap_or("string"),
                    self.go_type(&map.of)
                ),
            },
        }
    }
}

impl Type {
    pub fn field(&self, name: &str) -> Option<&Field> {
        self.fields.iter().find(|field| field.name == name)
    }

    pub fn is_in(&self, group: &str, version: &str) -> bool {
        self.group_versions
            .iter()
            .any(|(g, v)| g == group && v == version)
    }

    /// The last part of the name: `Deployment`.
    pub fn short_name(&self) -> &str {
        self.name.rsplit('.').next().unwrap_or(&self.name)
    }

    pub fn go_type(&self) -> String {
        format!("{}.{}", self.package, self.short_name())
    }
}

impl Field {
    pub fn new(name: impl Into<Name>, shape: Shape) -> Field {
        Field {
            name: name.into(),
            shape,
            number: 0,
            pointer: false,
            required: false,
            omitempty: false,
            omitzero: false,
            list_type: ListType::Unset,
            map_type: MapType::Unset,
            patch_merge: false,
            patch_replace: false,
            patch_retain_keys: false,
            rare: None,
        }
    }

    pub(crate) fn rare_mut(&mut self) -> &mut Rare {
        self.rare.get_or_insert_default()
    }

    pub fn list_map_keys(&self) -> &[Name] {
        self.rare.as_ref().map_or(&[], |rare| &rare.list_map_keys)
    }

    /// The key by which strategic merge pairs the elements of this list.
    pub fn merge_key(&self) -> Option<&str> {
        self.rare.as_ref()?.merge_key.as_deref()
    }

    /// The published default as JSON text. Upstream's server applies defaults in code, not from here.
    pub fn default(&self) -> Option<&str> {
        self.rare.as_ref()?.default.as_deref()
    }

    pub fn embed(&self) -> Option<&Embed> {
        self.rare.as_ref()?.embed.as_ref()
    }
}
