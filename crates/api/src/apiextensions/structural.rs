//! What makes a schema structural: every field has a type, alternatives only restrict, metadata is left
//! to the server.

use serde_json::{Map, Value, json};
use skiff_meta::field::{Error, Path};

/// How deep a node is.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Level {
    Root,
    Item,
    Field,
}

fn text<'a>(schema: &'a Value, key: &str) -> &'a str {
    schema.get(key).and_then(Value::as_str).unwrap_or("")
}

fn flag(schema: &Value, key: &str) -> bool {
    schema.get(key).and_then(Value::as_bool).unwrap_or(false)
}

fn properties(schema: &Value) -> impl Iterator<Item = (&String, &Value)> {
    schema
        .get("properties")
        .and_then(Value::as_object)
        .into_iter()
        .flatten()
}

fn all<'a>(schema: &'a Value, key: &str) -> &'a [Value] {
    schema
        .get(key)
        .and_then(Value::as_array)
        .map_or(&[], Vec::as_slice)
}

/// A keyword, at any depth, for which a structural schema has no place: such a schema has no structural form.
pub fn without_form(schema: &Value) -> Option<&'static str> {
    const NOWHERE: [&str; 7] = [
        "id",
        "$schema",
        "$ref",
        "patternProperties",
        "dependencies",
        "additionalItems",
        "definitions",
    ];
    const KEEP: &str = "x-kubernetes-preserve-unknown-fields";
    let given = |key: &str| match schema.get(key) {
        None | Some(Value::Null) => false,
        Some(Value::String(text)) => !text.is_empty(),
        Some(Value::Object(map)) => !map.is_empty() || key == "additionalItems",
        Some(_) => true,
    };
    if schema.get(KEEP) == Some(&Value::Bool(false)) {
        return Some(KEEP);
    }
    if let Some(key) = NOWHERE.into_iter().find(|key| given(key)) {
        return Some(key);
    }
    if schema.get("items").is_some_and(Value::is_array) {
        return Some("items");
    }
    let single = ["items", "additionalProperties", "not"]
        .into_iter()
        .filter_map(|key| schema.get(key))
        .filter(|inner| inner.is_object());
    let listed = ["allOf", "anyOf", "oneOf"]
        .into_iter()
        .flat_map(|key| all(schema, key));
    single
        .chain(listed)
        .chain(properties(schema).map(|(_, property)| property))
        .find_map(without_form)
}

/// What is said of a keyword that stands in the way of a structural form.
pub fn unsupported(keyword: &str) -> String {
    match keyword {
        "$schema" => "OpenAPIV3Schema 'schema' is not supported".to_owned(),
        "items" => "OpenAPIV3Schema 'items' must be a schema, but is an array".to_owned(),
        "x-kubernetes-preserve-unknown-fields" => {
            format!("internal error: '{keyword}' must be true or undefined")
        }
        keyword => format!("OpenAPIV3Schema '{keyword}' is not supported"),
    }
}

/// All findings, sorted as upstream sorts them.
pub fn validate(schema: &Value, path: &Path) -> Vec<Error> {
    let mut errors = Vec::new();
    invariants(schema, Level::Root, path, &mut errors);
    completeness(schema, path, &mut errors);
    errors.sort_by_key(Error::to_string);
    errors
}

fn invariants(schema: &Value, level: Level, path: &Path, errors: &mut Vec<Error>) {
    let kind = text(schema, "type");
    let items = schema.get("items").filter(|items| items.is_object());
    if kind == "array" && schema.get("items").is_none() {
        errors.push(Error::required(&path.child("items"), "must be specified"));
    }
    if let Some(items) = items {
        invariants(items, Level::Item, &path.child("items"), errors);
    }
    for (name, property) in properties(schema) {
        invariants(
            property,
            Level::Field,
            &path.child("properties").key(name),
            errors,
        );
    }
    let additional = schema
        .get("additionalProperties")
        .filter(|value| !value.is_null());
    if let Some(additional) = additional {
        if level == Level::Root {
            errors.push(Error::forbidden(
                &path.child("additionalProperties"),
                "must not be used at the root",
            ));
        }
        if additional.is_object() {
            invariants(
                additional,
                Level::Field,
                &path.child("additionalProperties"),
                errors,
            );
        }
    }
    let (int_or_string, preserve, embedded) = (
        flag(schema, "x-kubernetes-int-or-string"),
        flag(schema, "x-kubernetes-preserve-unknown-fields"),
        flag(schema, "x-kubernetes-embedded-resource"),
    );
    if int_or_string {
        for (set, key) in [
            (preserve, "x-kubernetes-preserve-unknown-fields"),
            (embedded, "x-kubernetes-embedded-resource"),
        ] {
            if set {
                let message = "must be false if x-kubernetes-int-or-string is true";
                errors.push(Error::invalid(&path.child(key), true, message));
            }
        }
    }
    let pair = json!([{"type": "integer"}, {"type": "string"}]);
    let skip_any = schema.get("anyOf") == Some(&pair);
    let skip_all = all(schema, "allOf")
        .first()
        .is_some_and(|first| first.get("anyOf") == Some(&pair));
    values(schema, skip_any, skip_all, path, errors);
    if embedded && kind != "object" {
        let message = "must be object if x-kubernetes-embedded-resource is true";
        errors.push(if kind.is_empty() {
            Error::required(&path.child("type"), message)
        } else {
            Error::invalid(&path.child("type"), kind, message)
        });
    } else if kind.is_empty() && !int_or_string && !preserve && schema.get("$ref").is_none() {
        errors.push(Error::required(
            &path.child("type"),
            match level {
                Level::Root => "must not be empty at the root",
                Level::Item => "must not be empty for specified array items",
                Level::Field => "must not be empty for specified object fields",
            },
        ));
    }
    if embedded && additional.is_some() {
        errors.push(Error::forbidden(
            &path.child("additionalProperties"),
            "must not be used if x-kubernetes-embedded-resource is set",
        ));
    }
    if level == Level::Root && !kind.is_empty() && kind != "object" {
        errors.push(Error::invalid(
            &path.child("type"),
            kind,
            "must be object at the root",
        ));
    }
    let own = |name: &str| schema.get("properties").and_then(|all| all.get(name));
    let checked = level == Level::Root || embedded;
    for name in ["kind", "apiVersion"] {
        if let Some(property) = own(name).filter(|_| checked)
            && text(property, "type") != "string"
        {
            let at = path.child("properties").key(name).child("type");
            errors.push(Error::invalid(&at, text(property, "type"), "must be string"));
        }
    }
    if let Some(metadata) = own("metadata") {
        let at = path.child("properties").key("metadata");
        if checked && text(metadata, "type") != "object" {
            errors.push(Error::invalid(
                &at.child("type"),
                text(metadata, "type"),
                "must be object",
            ));
        }
        if level == Level::Root && !only_names(metadata) {
            errors.push(Error::forbidden(
                &at,
                "must not specify anything other than name and generateName, but metadata is implicitly specified",
            ));
        }
    }
    if embedded && !preserve && properties(schema).next().is_none() {
        errors.push(Error::required(
            &path.child("properties"),
            "must not be empty if x-kubernetes-embedded-resource is true without x-kubernetes-preserve-unknown-fields",
        ));
    }
}

/// Whether the schema of metadata only restricts the names.
fn only_names(metadata: &Value) -> bool {
    let empty = Map::new();
    let map = metadata.as_object().unwrap_or(&empty);
    let named = properties(metadata).all(|(name, _)| matches!(name.as_str(), "name" | "generateName"));
    named
        && map
            .keys()
            .all(|key| matches!(key.as_str(), "type" | "properties" | "default"))
}

/// The rules for values: alternatives, and the pattern.
fn values(schema: &Value, skip_any: bool, skip_all: bool, path: &Path, errors: &mut Vec<Error>) {
    if !skip_any {
        for (index, part) in all(schema, "anyOf").iter().enumerate() {
            nested(part, false, &path.child("anyOf").index(index), errors);
        }
    }
    for (index, part) in all(schema, "allOf").iter().enumerate() {
        nested(
            part,
            skip_all && index == 0,
            &path.child("allOf").index(index),
            errors,
        );
    }
    for (index, part) in all(schema, "oneOf").iter().enumerate() {
        nested(part, false, &path.child("oneOf").index(index), errors);
    }
    if let Some(not) = schema.get("not").filter(|not| not.is_object()) {
        nested(not, false, &path.child("not"), errors);
    }
    let pattern = text(schema, "pattern");
    if !pattern.is_empty()
        && let Err(why) = skiff_meta::regexp::check(pattern)
    {
        errors.push(Error::invalid(
            &path.child("pattern"),
            pattern,
            format!("must be a valid regular expression, but isn't: {why}"),
        ));
    }
}

/// A schema inside an alternative may not say what its outer schema must say.
fn nested(schema: &Value, skip_any: bool, path: &Path, errors: &mut Vec<Error>) {
    values(schema, skip_any, false, path, errors);
    if let Some(items) = schema.get("items").filter(|items| items.is_object()) {
        nested(items, false, &path.child("items"), errors);
    }
    for (name, property) in properties(schema) {
        nested(property, false, &path.child("properties").key(name), errors);
    }
    let mut forbid = |key: &str, message: &str| errors.push(Error::forbidden(&path.child(key), message));
    if !text(schema, "type").is_empty() {
        forbid("type", "must be empty to be structural");
    }
    if schema.get("additionalProperties").is_some_and(Value::is_object) {
        forbid("additionalProperties", "must be undefined to be structural");
    }
    if schema.get("default").is_some_and(|value| !value.is_null()) {
        forbid("default", "must be undefined to be structural");
    }
    for key in ["title", "description"] {
        if !text(schema, key).is_empty() {
            forbid(key, "must be empty to be structural");
        }
    }
    for key in [
        "nullable",
        "x-kubernetes-preserve-unknown-fields",
        "x-kubernetes-embedded-resource",
        "x-kubernetes-int-or-string",
    ] {
        if flag(schema, key) {
            forbid(key, "must be false to be structural");
        }
    }
    if !all(schema, "x-kubernetes-list-map-keys").is_empty() {
        forbid("x-kubernetes-list-map-keys", "must be empty to be structural");
    }
    for key in ["x-kubernetes-list-type", "x-kubernetes-map-type"] {
        if schema.get(key).is_some_and(|value| !value.is_null()) {
            forbid(key, "must be undefined to be structural");
        }
    }
    if !all(schema, "x-kubernetes-validations").is_empty() {
        forbid("x-kubernetes-validations", "must be empty to be structural");
    }
    if schema
        .get("properties")
        .and_then(|all| all.get("metadata"))
        .is_some()
    {
        errors.push(Error::forbidden(
            &path.child("properties").key("metadata"),
            "must not be specified in a nested context",
        ));
    }
}

/// What an alternative at the root restricts must be specified outside of it.
fn completeness(schema: &Value, path: &Path, errors: &mut Vec<Error>) {
    for key in ["anyOf", "allOf", "oneOf"] {
        for (index, part) in all(schema, key).iter().enumerate() {
            specified(part, schema, path, &path.child(key).index(index), errors);
        }
    }
    if let Some(not) = schema.get("not").filter(|not| not.is_object()) {
        specified(not, schema, path, &path.child("not"), errors);
    }
}

fn specified(part: &Value, outer: &Value, outer_path: &Path, path: &Path, errors: &mut Vec<Error>) {
    for key in ["anyOf", "allOf", "oneOf"] {
        for (index, inner) in all(part, key).iter().enumerate() {
            specified(inner, outer, outer_path, &path.child(key).index(index), errors);
        }
    }
    if let Some(not) = part.get("not").filter(|not| not.is_object()) {
        specified(not, outer, outer_path, &path.child("not"), errors);
    }
    if let Some(items) = part.get("items").filter(|items| items.is_object()) {
        match outer.get("items").filter(|items| items.is_object()) {
            None => errors.push(Error::required(
                &outer_path.child("items"),
                format!("because it is defined in {}", path.child("items")),
            )),
            Some(outer) => specified(
                items,
                outer,
                &outer_path.child("items"),
                &path.child("items"),
                errors,
            ),
        }
    }
    for (name, property) in properties(part) {
        let (at, outer_at) = (
            path.child("properties").key(name),
            outer_path.child("properties").key(name),
        );
        let own = outer.get("properties").and_then(|all| all.get(name));
        match own {
            Some(own) => specified(property, own, &outer_at, &at, errors),
            None => errors.push(Error::required(
                &outer_at,
                format!("because it is defined in {at}"),
            )),
        }
    }
}
