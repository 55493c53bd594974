//! Types as OpenAPI schemas.

use serde_json::{Map, Value, json};

use super::Describe;
use super::enums::Enums;
use crate::types::{Field, ListType, MapType, Scalar, Schema, Shape, Special, TypeId};

const META: &str = "io.k8s.apimachinery.pkg.apis.meta.v1";

#[derive(Clone, Copy, PartialEq)]
enum Version {
    V2,
    V3,
}

/// The special types by their OpenAPI names. `Patch` is a body that the type table does not need.
const SPECIALS: &[(&str, Published)] = &[
    ("io.k8s.apimachinery.pkg.apis.meta.v1.Time", Published::DateTime),
    (
        "io.k8s.apimachinery.pkg.apis.meta.v1.MicroTime",
        Published::DateTime,
    ),
    ("io.k8s.apimachinery.pkg.apis.meta.v1.FieldsV1", Published::Object),
    ("io.k8s.apimachinery.pkg.apis.meta.v1.Patch", Published::Object),
    ("io.k8s.apimachinery.pkg.runtime.RawExtension", Published::Object),
    (
        "io.k8s.apimachinery.pkg.api.resource.Quantity",
        Published::Quantity,
    ),
    (
        "io.k8s.apimachinery.pkg.util.intstr.IntOrString",
        Published::IntOrString,
    ),
    (
        "io.k8s.apiextensions-apiserver.pkg.apis.apiextensions.v1.JSON",
        Published::Anything,
    ),
    (
        "io.k8s.apiextensions-apiserver.pkg.apis.apiextensions.v1.JSONSchemaPropsOrArray",
        Published::Anything,
    ),
    (
        "io.k8s.apiextensions-apiserver.pkg.apis.apiextensions.v1.JSONSchemaPropsOrBool",
        Published::Anything,
    ),
    (
        "io.k8s.apiextensions-apiserver.pkg.apis.apiextensions.v1.JSONSchemaPropsOrStringArray",
        Published::Anything,
    ),
];

#[derive(Debug, Clone, Copy)]
pub(super) enum Published {
    DateTime,
    Object,
    Quantity,
    IntOrString,
    Anything,
}

pub(super) fn special_named(name: &str) -> Option<Published> {
    SPECIALS
        .iter()
        .find(|(special, _)| *special == name)
        .map(|(_, published)| *published)
}

pub(super) fn special_v2(published: Published) -> Value {
    match published {
        Published::DateTime => json!({"type": "string", "format": "date-time"}),
        Published::Object => json!({"type": "object"}),
        Published::Quantity => json!({"type": "string"}),
        Published::IntOrString => json!({"type": "string", "format": "int-or-string"}),
        Published::Anything => json!({}),
    }
}

pub(super) fn special_v3(published: Published) -> Value {
    match published {
        Published::Quantity => json!({"oneOf": [{"type": "string"}, {"type": "number"}]}),
        Published::IntOrString => {
            json!({"format": "int-or-string", "oneOf": [{"type": "integer"}, {"type": "string"}]})
        }
        other => special_v2(other),
    }
}

fn special_name(special: Special) -> Option<&'static str> {
    let last = match special {
        Special::Time => ".Time",
        Special::MicroTime => ".MicroTime",
        Special::FieldsV1 => ".FieldsV1",
        Special::Quantity => ".Quantity",
        Special::IntOrString => ".IntOrString",
        Special::RawExtension => ".RawExtension",
        Special::Json => ".JSON",
        Special::JsonSchemaPropsOrArray => ".JSONSchemaPropsOrArray",
        Special::JsonSchemaPropsOrBool => ".JSONSchemaPropsOrBool",
        Special::JsonSchemaPropsOrStringArray => ".JSONSchemaPropsOrStringArray",
        Special::Duration | Special::Any => return None,
    };
    SPECIALS
        .iter()
        .map(|(name, _)| *name)
        .find(|name| name.ends_with(last))
}

/// A definition with its type's description.
pub(super) fn described(mut definition: Value, name: &str, words: &dyn Describe) -> Value {
    if let Some(text) = words.of_type(name) {
        definition["description"] = text.into();
    }
    definition
}

pub(super) fn v2(schema: &Schema, id: TypeId, enums: &Enums, words: &dyn Describe) -> Value {
    definition(schema, id, Version::V2, &|_, _| true, enums, words)
}

/// As the document of one group version has it, which names no other group's kinds.
pub(super) fn v3(
    schema: &Schema,
    id: TypeId,
    group: &str,
    version: &str,
    enums: &Enums,
    words: &dyn Describe,
) -> Value {
    let several = schema.get(id).group_versions.len() > 1;
    let shown = |g: &str, v: &str| !several || (g == group && v == version) || (g.is_empty() && v == "v1");
    definition(schema, id, Version::V3, &shown, enums, words)
}

/// The names that a type refers to.
pub(super) fn references(schema: &Schema, id: TypeId) -> Vec<String> {
    fn of(schema: &Schema, shape: &Shape, out: &mut Vec<String>) {
        match shape {
            Shape::Scalar(..) => {}
            Shape::Special(special) => out.extend(special_name(*special).map(String::from)),
            Shape::Struct(id) => out.push(schema.get(*id).name.to_string()),
            Shape::List(list) => of(schema, &list.of, out),
            Shape::Map(map) => of(schema, &map.of, out),
        }
    }
    let mut out = Vec::new();
    for field in &schema.get(id).fields {
        of(schema, &field.shape, &mut out);
    }
    out
}

fn definition(
    schema: &Schema,
    id: TypeId,
    version: Version,
    shown: &dyn Fn(&str, &str) -> bool,
    enums: &Enums,
    words: &dyn Describe,
) -> Value {
    let t = schema.get(id);
    let mut out = Map::new();
    out.insert("type".into(), "object".into());
    let required: Vec<&str> = t
        .fields
        .iter()
        .filter(|f| f.required)
        .map(|f| f.name.as_ref())
        .collect();
    if !required.is_empty() {
        out.insert("required".into(), required.into());
    }
    if !t.fields.is_empty() {
        let mut properties: Map<String, Value> = t
            .fields
            .iter()
            .map(|field| {
                let mut property = property(schema, &t.name, field, version);
                if let Some(text) = words.of_field(&t.name, &field.name) {
                    property.insert("description".into(), text.into());
                }
                (field.name.to_string(), Value::Object(property))
            })
            .collect();
        enums.add(&t.name, &mut properties);
        out.insert("properties".into(), Value::Object(properties));
    }
    if !t.group_versions.is_empty() {
        let kinds = t
            .group_versions
            .iter()
            .filter(|(group, v)| shown(group, v))
            .map(|(group, v)| json!({"group": group, "version": v, "kind": t.short_name()}))
            .collect();
        out.insert("x-kubernetes-group-version-kind".into(), Value::Array(kinds));
    }
    if t.atomic {
        out.insert("x-kubernetes-map-type".into(), "atomic".into());
    }
    if let Some(unions) = &t.unions {
        out.insert(
            "x-kubernetes-unions".into(),
            serde_json::from_str(unions).unwrap_or_default(),
        );
    }
    described(Value::Object(out), &t.name, words)
}

/// Whether upstream describes a property. A described reference is wrapped.
fn is_described(type_name: &str, field: &str) -> bool {
    let short = type_name.rsplit('.').next().unwrap_or(type_name);
    match short {
        "JSONSchemaProps" => field == "default",
        "IngressRule" => field != "http",
        _ => true,
    }
}

fn property(schema: &Schema, type_name: &str, field: &Field, version: Version) -> Map<String, Value> {
    let mut out = match shape(schema, &field.shape, version) {
        Value::Object(map) => map,
        _ => Map::new(),
    };
    if version == Version::V3 {
        let default = match field.default() {
            Some(text) => serde_json::from_str(text).ok(),
            None if field.pointer => None,
            None => implied_default(&field.shape, field.omitempty),
        };
        // A reference with something beside it is wrapped.
        if (default.is_some() || is_described(type_name, &field.name))
            && let Some(reference) = out.remove("$ref")
        {
            out.insert("allOf".into(), json!([{ "$ref": reference }]));
        }
        if let Some(default) = default {
            out.insert("default".into(), default);
        }
    }
    match field.list_type {
        ListType::Unset => {}
        ListType::Atomic => drop(out.insert("x-kubernetes-list-type".into(), "atomic".into())),
        ListType::Set => drop(out.insert("x-kubernetes-list-type".into(), "set".into())),
        ListType::Map => {
            out.insert("x-kubernetes-list-type".into(), "map".into());
            let keys: Vec<&str> = field.list_map_keys().iter().map(AsRef::as_ref).collect();
            out.insert("x-kubernetes-list-map-keys".into(), keys.into());
        }
    }
    match field.map_type {
        MapType::Unset => {}
        MapType::Atomic => drop(out.insert("x-kubernetes-map-type".into(), "atomic".into())),
        MapType::Granular => drop(out.insert("x-kubernetes-map-type".into(), "granular".into())),
    }
    let strategies = [
        (field.patch_merge, "merge"),
        (field.patch_replace, "replace"),
        (field.patch_retain_keys, "retainKeys"),
    ];
    let strategies: Vec<&str> = strategies
        .iter()
        .filter(|(on, _)| *on)
        .map(|(_, name)| *name)
        .collect();
    if !strategies.is_empty() {
        out.insert("x-kubernetes-patch-strategy".into(), strategies.join(",").into());
    }
    if let Some(key) = field.merge_key() {
        out.insert("x-kubernetes-patch-merge-key".into(), key.into());
    }
    out
}

/// What upstream's generator publishes for what is not a pointer.
fn implied_default(shape: &Shape, omitempty: bool) -> Option<Value> {
    match shape {
        Shape::Struct(_) => Some(json!({})),
        _ if omitempty => None,
        Shape::Scalar(Scalar::Bytes, _) => None,
        Shape::Scalar(scalar, _) => Some(match scalar {
            Scalar::Bool => false.into(),
            Scalar::String => "".into(),
            _ => 0.into(),
        }),
        _ => None,
    }
}

fn shape(schema: &Schema, of: &Shape, version: Version) -> Value {
    let reference = |name: &str| match version {
        Version::V2 => json!({"$ref": format!("#/definitions/{name}")}),
        Version::V3 => json!({"$ref": format!("#/components/schemas/{name}")}),
    };
    match of {
        Shape::Scalar(scalar, _) => match scalar {
            Scalar::Bool => json!({"type": "boolean"}),
            Scalar::Int32 | Scalar::Int => json!({"type": "integer", "format": "int32"}),
            Scalar::Int64 => json!({"type": "integer", "format": "int64"}),
            Scalar::Float64 => json!({"type": "number", "format": "double"}),
            Scalar::String => json!({"type": "string"}),
            Scalar::Bytes => json!({"type": "string", "format": "byte"}),
        },
        Shape::Special(Special::Any) => json!({"type": "object"}),
        Shape::Special(special) => match special_name(*special) {
            Some(name) => reference(name),
            None => json!({"type": "string"}),
        },
        Shape::Struct(id) => reference(&schema.get(*id).name),
        Shape::List(list) => json!({"type": "array", "items": element(schema, &list.of, version)}),
        Shape::Map(map) => {
            json!({"type": "object", "additionalProperties": element(schema, &map.of, version)})
        }
    }
}

fn element(schema: &Schema, of: &Shape, version: Version) -> Value {
    let mut out = shape(schema, of, version);
    if version == Version::V3
        && let (Some(default), Some(map)) = (implied_default(of, false), out.as_object_mut())
    {
        if let Some(reference) = map.remove("$ref") {
            map.insert("allOf".into(), json!([{ "$ref": reference }]));
        }
        map.insert("default".into(), default);
    }
    out
}

pub(super) fn meta(name: &str) -> String {
    format!("{META}.{name}")
}
