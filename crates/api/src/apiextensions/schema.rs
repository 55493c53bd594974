//! The rules of a definition's schema that are not about being structural: what OpenAPI constructs are
//! supported, how list and map types fit together, what rules look like, whether defaults are valid.

use serde_json::Value;
use skiff_meta::field::{Error, Path};
use skiff_schema::structural::{self as run, Structural};

use super::structural;

/// How many complaints about the keys of one list are told.
const MOST_ABOUT_KEYS: usize = 64;
const TYPES: [&str; 6] = ["array", "boolean", "integer", "number", "object", "string"];
const REASONS: [&str; 4] = [
    "FieldValueDuplicate",
    "FieldValueForbidden",
    "FieldValueInvalid",
    "FieldValueRequired",
];

/// Go's names of what may stand at the root beside a status subresource.
const AT_ROOT: &str = "[Description Type Format Title Maximum ExclusiveMaximum Minimum ExclusiveMinimum MaxLength MinLength Pattern MaxItems MinItems UniqueItems MultipleOf Required Items Properties ExternalDocs Example XPreserveUnknownFields XValidations]";
const ROOT_KEYS: [&str; 22] = [
    "description",
    "type",
    "format",
    "title",
    "maximum",
    "exclusiveMaximum",
    "minimum",
    "exclusiveMinimum",
    "maxLength",
    "minLength",
    "pattern",
    "maxItems",
    "minItems",
    "uniqueItems",
    "multipleOf",
    "required",
    "items",
    "properties",
    "externalDocs",
    "example",
    "x-kubernetes-preserve-unknown-fields",
    "x-kubernetes-validations",
];

fn text<'a>(schema: &'a Value, key: &str) -> &'a str {
    schema.get(key).and_then(Value::as_str).unwrap_or("")
}

fn flag(schema: &Value, key: &str) -> bool {
    schema.get(key).and_then(Value::as_bool).unwrap_or(false)
}

fn set<'a>(schema: &'a Value, key: &str) -> Option<&'a Value> {
    schema.get(key).filter(|value| !value.is_null())
}

fn all<'a>(schema: &'a Value, key: &str) -> &'a [Value] {
    schema
        .get(key)
        .and_then(Value::as_array)
        .map_or(&[], Vec::as_slice)
}

/// How much the stored definition lets pass.
#[derive(Clone, Copy, Default)]
pub struct Stored {
    /// The same schema is stored already.
    pub unchanged: bool,
}

/// Checks the schema of a version, or the one that all versions share.
pub fn validate(schema: &Value, path: &Path, status: bool, stored: Stored) -> Vec<Error> {
    let mut errors = Vec::new();
    if status {
        at_root(schema, path, &mut errors);
    }
    if flag(schema, "nullable") {
        errors.push(Error::forbidden(
            &path.child("nullable"),
            "nullable cannot be true at the root",
        ));
    }
    // What has no structural form is told about below, and nothing else of it is looked at.
    let without_form = structural::without_form(schema);
    let mut clean = without_form.is_none();
    if clean {
        let found = structural::validate(schema, path);
        clean = found.is_empty();
        errors.extend(found);
    }
    if clean {
        let found = defaults(schema, path);
        clean = found.is_empty();
        errors.extend(found);
    }
    let mut about_schema = Vec::new();
    node(schema, path, &SchemaPosition::root(), &mut about_schema);
    clean &= about_schema.is_empty();
    errors.extend(about_schema);
    if let Some(keyword) = without_form
        && errors.is_empty()
    {
        // COMPAT: of these, upstream's other checks know all but one.
        errors.push(Error::invalid(path, "", structural::unsupported(keyword)));
    }
    if clean && has_rules(schema) {
        errors.extend(skiff_cel::rules::check_rules(
            &skiff_cel::Schema::parse(schema),
            path,
            stored.unchanged,
        ));
    }
    errors
}

fn has_rules(schema: &Value) -> bool {
    Structural::parse(schema).has_rules()
}

fn at_root(schema: &Value, path: &Path, errors: &mut Vec<Error>) {
    let kind = text(schema, "type");
    if !kind.is_empty() && kind != "object" {
        errors.push(Error::invalid(
            &path.child("type"),
            kind,
            "only \"object\" is allowed as the type at the root of the schema if the status subresource is enabled",
        ));
        return;
    }
    let keys = schema.as_object().into_iter().flatten();
    let zero = |value: &Value| match value {
        Value::Null | Value::Bool(false) => true,
        Value::String(text) => text.is_empty(),
        _ => false,
    };
    for (key, value) in keys {
        if !zero(value) && !ROOT_KEYS.contains(&key.as_str()) {
            let message = format!(
                "only {AT_ROOT} fields are allowed at the root of the schema if the status subresource is enabled"
            );
            errors.push(Error::invalid(path, schema.clone(), message));
            return;
        }
    }
}

/// Where a node is, for what depends on it.
#[derive(Clone)]
struct SchemaPosition {
    root: bool,
    /// Why there may be no default here.
    no_defaults: Option<String>,
    in_metadata: bool,
}

impl SchemaPosition {
    fn root() -> SchemaPosition {
        SchemaPosition {
            root: true,
            no_defaults: None,
            in_metadata: false,
        }
    }

    fn below(&self) -> SchemaPosition {
        SchemaPosition {
            root: false,
            ..self.clone()
        }
    }
}

fn node(schema: &Value, path: &Path, place: &SchemaPosition, errors: &mut Vec<Error>) {
    standard(schema, path, place, errors);
    if flag(schema, "uniqueItems") {
        errors.push(Error::forbidden(
            &path.child("uniqueItems"),
            "uniqueItems cannot be set to true since the runtime complexity becomes quadratic",
        ));
    }
    let properties = schema.get("properties").and_then(Value::as_object);
    if let Some(additional) = set(schema, "additionalProperties") {
        if properties.is_some_and(|all| !all.is_empty()) && additional != &Value::Bool(true) {
            errors.push(Error::forbidden(
                &path.child("additionalProperties"),
                "additionalProperties and properties are mutual exclusive",
            ));
        }
        if additional.is_object() {
            let mut below = place.below();
            if place.in_metadata {
                below.no_defaults =
                    Some("inside additionalProperties applying to object metadata".to_owned());
            }
            node(additional, &path.child("additionalProperties"), &below, errors);
        }
    }
    for (name, property) in properties.into_iter().flatten() {
        let mut below = place.below();
        let holds_metadata = place.root || flag(schema, "x-kubernetes-embedded-resource");
        if holds_metadata && matches!(name.as_str(), "metadata" | "kind" | "apiVersion") {
            below.in_metadata = true;
            if place.root {
                below.no_defaults = Some(format!("in top-level {name}"));
            }
        }
        node(property, &path.child("properties").key(name), &below, errors);
    }
    if let Some(not) = set(schema, "not") {
        node(not, &path.child("not"), &place.below(), errors);
    }
    for key in ["allOf", "oneOf", "anyOf"] {
        for (index, part) in all(schema, key).iter().enumerate() {
            node(part, &path.child(key).index(index), &place.below(), errors);
        }
    }
    if let Some(items) = set(schema, "items").filter(|items| items.is_object()) {
        node(items, &path.child("items"), &place.below(), errors);
    }
    extensions(schema, path, errors);
    rules(schema, path, errors);
}

/// What OpenAPI has and definitions do not.
fn standard(schema: &Value, path: &Path, place: &SchemaPosition, errors: &mut Vec<Error>) {
    let kind = text(schema, "type");
    if !kind.is_empty() && !TYPES.contains(&kind) {
        errors.push(Error::not_supported(&path.child("type"), kind, &TYPES));
    }
    if set(schema, "default").is_some()
        && let Some(reason) = &place.no_defaults
    {
        errors.push(Error::forbidden(
            &path.child("default"),
            format!("must not be set {reason}"),
        ));
    }
    let mut forbid = |key: &str, message: &str| errors.push(Error::forbidden(&path.child(key), message));
    if !text(schema, "id").is_empty() {
        forbid("id", "id is not supported");
    }
    for key in [
        "additionalItems",
        "patternProperties",
        "definitions",
        "dependencies",
        "$ref",
    ] {
        if set(schema, key).is_some_and(|value| {
            value
                .as_object()
                .is_none_or(|map| !map.is_empty() || key == "dependencies")
        }) {
            forbid(key, &format!("{key} is not supported"));
        }
    }
    if kind == "null" {
        forbid(
            "type",
            "type cannot be set to null, use nullable as an alternative",
        );
    }
    if set(schema, "items").is_some_and(Value::is_array) {
        forbid("items", "items must be a schema object and not an array");
    }
    if place.in_metadata && flag(schema, "x-kubernetes-embedded-resource") {
        forbid(
            "x-kubernetes-embedded-resource",
            "must not be used inside of resource meta",
        );
    }
}

/// List and map types.
fn extensions(schema: &Value, path: &Path, errors: &mut Vec<Error>) {
    let kind = text(schema, "type");
    if schema.get("x-kubernetes-preserve-unknown-fields") == Some(&Value::Bool(false)) {
        errors.push(Error::invalid(
            &path.child("x-kubernetes-preserve-unknown-fields"),
            false,
            "must be true or undefined",
        ));
    }
    let must_be = |wanted: &str, key: &str| {
        let message = format!("must be {wanted} if {key} is specified");
        if kind.is_empty() {
            Error::required(&path.child("type"), message)
        } else {
            Error::invalid(&path.child("type"), kind, message)
        }
    };
    if let Some(map_type) = set(schema, "x-kubernetes-map-type").and_then(Value::as_str) {
        if kind != "object" {
            errors.push(must_be("object", "x-kubernetes-map-type"));
        }
        if !matches!(map_type, "atomic" | "granular") {
            errors.push(Error::not_supported(
                &path.child("x-kubernetes-map-type"),
                map_type,
                &["atomic", "granular"],
            ));
        }
    }
    let list_type = set(schema, "x-kubernetes-list-type").and_then(Value::as_str);
    let keys = all(schema, "x-kubernetes-list-map-keys");
    let items = set(schema, "items").filter(|items| items.is_object());
    if let Some(list_type) = list_type {
        if kind != "array" {
            errors.push(must_be("array", "x-kubernetes-list-type"));
        } else if let Some(items) = items.filter(|_| list_type == "set") {
            let message = "must be atomic as item of a list with x-kubernetes-list-type=set";
            let at = path.child("items");
            let inner = text(items, "x-kubernetes-list-type");
            match text(items, "type") {
                "array" if !matches!(inner, "" | "atomic") => {
                    errors.push(Error::invalid(
                        &at.child("x-kubernetes-list-type"),
                        inner,
                        message,
                    ));
                }
                "object" if text(items, "x-kubernetes-map-type") != "atomic" => {
                    // COMPAT: upstream shows the list type here, which is nothing.
                    errors.push(Error::invalid(
                        &at.child("x-kubernetes-map-type"),
                        Value::Null,
                        message,
                    ));
                }
                _ => {}
            }
        }
        if !matches!(list_type, "atomic" | "set" | "map") {
            errors.push(Error::not_supported(
                &path.child("x-kubernetes-list-type"),
                list_type,
                &["atomic", "set", "map"],
            ));
        }
    }
    if !keys.is_empty() && list_type != Some("map") {
        let message = "must be map if x-kubernetes-list-map-keys is non-empty";
        let at = path.child("x-kubernetes-list-type");
        errors.push(match list_type {
            None => Error::required(&at, message),
            Some(other) => Error::invalid(&at, other, message),
        });
    }
    if list_type == Some("map") {
        map_list(schema, keys, items, path, errors);
    }
    if let (Some(items), Some(list_type @ ("set" | "map"))) = (items, list_type) {
        if flag(items, "nullable") {
            errors.push(Error::forbidden(
                &path.child("items").child("nullable"),
                format!("cannot be nullable when x-kubernetes-list-type is {list_type}"),
            ));
        }
        if list_type == "map" {
            map_list_keys(keys, items, path, errors);
        }
    }
}

fn map_list(schema: &Value, keys: &[Value], items: Option<&Value>, path: &Path, errors: &mut Vec<Error>) {
    if keys.is_empty() {
        errors.push(Error::required(
            &path.child("x-kubernetes-list-map-keys"),
            "must not be empty if x-kubernetes-list-type is map",
        ));
    }
    let Some(items) = items else {
        if set(schema, "items").is_none() {
            errors.push(Error::required(
                &path.child("items"),
                "must have a schema if x-kubernetes-list-type is map",
            ));
        }
        return;
    };
    let kind = text(items, "type");
    if kind != "object" {
        errors.push(Error::invalid(
            &path.child("items").child("type"),
            kind,
            "must be object if parent array's x-kubernetes-list-type is map",
        ));
        return;
    }
    let mut seen = std::collections::BTreeSet::new();
    // Each complaint shows all keys: a few of them say enough about thousands.
    let most = errors.len() + MOST_ABOUT_KEYS;
    for key in keys {
        if errors.len() > most {
            return;
        }
        let name = key.as_str().unwrap_or("");
        match items.get("properties").and_then(|all| all.get(name)) {
            Some(property) if matches!(text(property, "type"), "array" | "object") => {
                errors.push(Error::invalid(
                    &path.child("items").child("properties").key(name).child("type"),
                    kind,
                    "must be a scalar type if parent array's x-kubernetes-list-type is map",
                ))
            }
            Some(_) => {}
            None => errors.push(Error::invalid(
                &path.child("x-kubernetes-list-map-keys"),
                Value::Array(keys.to_vec()),
                "entries must all be names of item properties",
            )),
        }
        if !seen.insert(name) {
            errors.push(Error::invalid(
                &path.child("x-kubernetes-list-map-keys"),
                Value::Array(keys.to_vec()),
                "must not contain duplicate entries",
            ));
        }
    }
}

fn map_list_keys(keys: &[Value], items: &Value, path: &Path, errors: &mut Vec<Error>) {
    let required = all(items, "required");
    for key in keys {
        let name = key.as_str().unwrap_or("");
        let Some(property) = items.get("properties").and_then(|all| all.get(name)) else {
            continue;
        };
        let at = path.child("items").child("properties").key(name);
        if !required.contains(key) && set(property, "default").is_none() {
            errors.push(Error::required(
                &at.child("default"),
                "this property is in x-kubernetes-list-map-keys, so it must have a default or be a required property",
            ));
        }
        if flag(property, "nullable") {
            errors.push(Error::forbidden(
                &at.child("nullable"),
                "this property is in x-kubernetes-list-map-keys, so it cannot be nullable",
            ));
        }
    }
}

/// The form of rules; what they say is CEL's business.
fn rules(schema: &Value, path: &Path, errors: &mut Vec<Error>) {
    let mut form = None;
    for (index, rule) in all(schema, "x-kubernetes-validations").iter().enumerate() {
        let at = path.child("x-kubernetes-validations").index(index);
        let (expression, message) = (text(rule, "rule"), text(rule, "message"));
        let lines = |text: &str| text.contains(['\n', '\r']);
        if expression.trim().is_empty() {
            errors.push(Error::required(&at.child("rule"), "rule is not specified"));
        } else if !message.is_empty() && message.trim().is_empty() {
            errors.push(Error::invalid(
                &at.child("message"),
                message,
                "must be non-empty if specified",
            ));
        } else if lines(message.trim()) {
            errors.push(Error::invalid(
                &at.child("message"),
                message,
                "must not contain line breaks",
            ));
        } else if lines(expression.trim()) && message.trim().is_empty() {
            errors.push(Error::required(
                &at.child("message"),
                "message must be specified if rule contains line breaks",
            ));
        }
        let of_message = text(rule, "messageExpression");
        if !of_message.is_empty() && of_message.trim().is_empty() {
            errors.push(Error::required(
                &at.child("messageExpression"),
                "messageExpression must be non-empty if specified",
            ));
        }
        if let Some(reason) = set(rule, "reason").and_then(Value::as_str)
            && !REASONS.contains(&reason)
        {
            errors.push(Error::not_supported(&at.child("reason"), reason, &REASONS));
        }
        let field = text(rule, "fieldPath");
        if field.is_empty() {
            continue;
        }
        if field.trim().is_empty() {
            errors.push(Error::invalid(
                &at.child("fieldPath"),
                field,
                "must be non-empty if specified",
            ));
        }
        if lines(field) {
            errors.push(Error::invalid(
                &at.child("fieldPath"),
                field,
                "must not contain line breaks",
            ));
        }
        // Read once, however many rules there are. What has no structural form has no paths that could be wrong.
        let form = form.get_or_insert_with(|| {
            structural::without_form(schema)
                .is_none()
                .then(|| Structural::parse(schema))
        });
        if form
            .as_ref()
            .is_some_and(|form| field_schema(field, form).is_none())
        {
            errors.push(Error::invalid(
                &at.child("fieldPath"),
                field,
                "must be a valid path",
            ));
        }
    }
}

/// The schema at a path such as `.a.b['c']`, if the path is one.
pub fn field_schema<'a>(path: &str, schema: &'a Structural) -> Option<&'a Structural> {
    let mut here = schema;
    let mut rest = path.trim();
    if rest.is_empty() {
        return None;
    }
    while !rest.is_empty() {
        let name;
        if let Some(quoted) = rest.strip_prefix("['") {
            let end = quoted.find("']")?;
            (name, rest) = (&quoted[..end], &quoted[end + 2..]);
        } else {
            let plain = rest.strip_prefix('.')?;
            let end = plain.find(['.', '[']).unwrap_or(plain.len());
            (name, rest) = (&plain[..end], &plain[end..]);
        }
        here = here.field(name)?;
    }
    Some(here)
}

/// Defaults must be what the schema allows.
fn defaults(schema: &Value, path: &Path) -> Vec<Error> {
    let mut errors = Vec::new();
    let mut parsed = Structural::parse(schema);
    // The object as a whole says what it is, as those within others do.
    parsed.embedded_resource = true;
    default_of(schema, &parsed, path, true, &mut errors);
    errors
}

/// `given` is the schema as it was given, for its rules.
fn default_of(given: &Value, schema: &Structural, path: &Path, is_root: bool, errors: &mut Vec<Error>) {
    if let Some(default) = &schema.default {
        let at = path.child("default");
        let mut pruned = default.clone();
        let unknown = if schema.embedded_resource || pruned.is_object() || pruned.is_array() {
            run::prune_value(&mut pruned, schema)
        } else {
            Vec::new()
        };
        if !unknown.is_empty() {
            errors.push(Error::invalid(
                &at,
                default.clone(),
                "must not have unknown fields",
            ));
        }
        let mut found = super::embedded::validate_at(&at, default, schema);
        if found.is_empty() {
            found = run::validate(default, schema, &at);
        }
        if found.is_empty() {
            found = broken_rules(given, default, is_root || schema.embedded_resource, &at);
        }
        errors.extend(found);
    }
    let below = |key: &str| given.get(key).unwrap_or(&Value::Null);
    if let Some(items) = &schema.items {
        default_of(below("items"), items, &path.child("items"), false, errors);
    }
    for (name, property) in &schema.properties {
        let given = below("properties").get(name).unwrap_or(&Value::Null);
        default_of(
            given,
            property,
            &path.child("properties").key(name),
            false,
            errors,
        );
    }
}

/// A default must pass the rules of its schema, both where it was there before and where it is new.
fn broken_rules(given: &Value, default: &Value, is_resource_root: bool, at: &Path) -> Vec<Error> {
    let schema = skiff_cel::Schema::parse(given);
    let Some(rules) = skiff_cel::rules::Validator::of_part(&schema, is_resource_root) else {
        return Vec::new();
    };
    let check = |old: Option<&Value>| {
        let mut budget = skiff_cel::rules::Budget::default();
        rules.validate(at, default, old, &mut budget).errors
    };
    match check(Some(default)) {
        found if found.is_empty() => check(None),
        found => found,
    }
}

/// The formats in a definition's schemas that have no effect, sorted.
pub fn unrecognized_formats(definition: &Value) -> Vec<String> {
    let mut found = std::collections::BTreeSet::new();
    for version in crate::node::list(definition, "spec.versions") {
        formats(crate::node::at(version, "schema.openAPIV3Schema"), &mut found);
    }
    found.into_iter().collect()
}

fn formats(schema: &Value, found: &mut std::collections::BTreeSet<String>) {
    let format = text(schema, "format");
    let int_or_string = flag(schema, "x-kubernetes-int-or-string");
    if !format.is_empty() && !run::formats::recognized(text(schema, "type"), int_or_string, format) {
        found.insert(format.to_owned());
    }
    let properties = schema.get("properties").and_then(Value::as_object);
    for property in properties.into_iter().flat_map(|all| all.values()) {
        formats(property, found);
    }
    for key in ["items", "additionalProperties", "not"] {
        if let Some(below) = set(schema, key).filter(|below| below.is_object()) {
            formats(below, found);
        }
    }
    for key in ["allOf", "anyOf", "oneOf"] {
        all(schema, key).iter().for_each(|part| formats(part, found));
    }
}
