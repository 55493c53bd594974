//! The rules of what a version has beside its schema: subresources, printer columns, selectable fields.

use std::collections::BTreeSet;

use serde_json::Value;
use skiff_meta::field::{Error, Path};
use skiff_schema::structural::Structural;

use super::{schema, structural};
use crate::node::{at, text};

const COLUMN_TYPES: [&str; 5] = ["boolean", "date", "integer", "number", "string"];
const COLUMN_FORMATS: [&str; 8] = [
    "byte",
    "date",
    "date-time",
    "double",
    "float",
    "int32",
    "int64",
    "password",
];
const MAX_SELECTABLE: usize = 8;

fn simple_path(path: &Path, given: &str, errors: &mut Vec<Error>) -> bool {
    if given.starts_with('.') {
        return true;
    }
    let message = "must be a simple json path starting with .";
    errors.push(Error::invalid(path, given, message));
    false
}

pub fn subresources(value: &Value, path: &Path, errors: &mut Vec<Error>) {
    let scale = at(value, "scale");
    if scale.is_null() {
        return;
    }
    for (key, below, required) in [
        ("specReplicasPath", &[".spec."][..], true),
        ("statusReplicasPath", &[".status."][..], true),
        ("labelSelectorPath", &[".spec.", ".status."][..], false),
    ] {
        let given = text(scale, key);
        let path = path.child(&format!("scale.{key}"));
        if given.is_empty() {
            if required {
                errors.push(Error::required(&path, ""));
            }
        } else if simple_path(&path, given, errors) && !below.iter().any(|prefix| given.starts_with(prefix)) {
            let message = match below {
                [_] => format!("should be a json path under {}", below[0].trim_end_matches('.')),
                _ => "should be a json path under either .spec or .status".to_owned(),
            };
            errors.push(Error::invalid(&path, given, message));
        }
    }
}

pub fn columns(value: &Value, path: &Path, errors: &mut Vec<Error>) {
    for (index, column) in value.as_array().into_iter().flatten().enumerate() {
        let path = path.index(index);
        if text(column, "name").is_empty() {
            errors.push(Error::required(&path.child("name"), ""));
        }
        let (kind, types) = (
            text(column, "type"),
            format!("must be one of {}", COLUMN_TYPES.join(",")),
        );
        if kind.is_empty() {
            errors.push(Error::required(&path.child("type"), types));
        } else if !COLUMN_TYPES.contains(&kind) {
            errors.push(Error::invalid(&path.child("type"), kind, types));
        }
        let format = text(column, "format");
        if !format.is_empty() && !COLUMN_FORMATS.contains(&format) {
            let message = format!("must be one of {}", COLUMN_FORMATS.join(","));
            errors.push(Error::invalid(&path.child("format"), format, message));
        }
        let given = text(column, "jsonPath");
        if given.is_empty() {
            errors.push(Error::required(&path.child("JSONPath"), ""));
        } else {
            simple_path(&path.child("JSONPath"), given, errors);
        }
    }
}

/// `absent` is what is said where there is no schema.
pub fn selectable(value: &Value, schema: &Value, absent: &str, path: &Path, errors: &mut Vec<Error>) {
    let fields = value.as_array().map_or(&[][..], Vec::as_slice);
    if fields.is_empty() {
        return;
    }
    if schema.is_null() {
        errors.push(Error::invalid(path, "", absent));
        return;
    }
    // Without a structural form, no path leads anywhere.
    let form = match structural::without_form(schema) {
        None => Structural::parse(schema),
        Some(keyword) => {
            let above = path.as_str().trim_end_matches("selectableFields");
            let at = Path::new(&format!("{above}schema.openAPIV3Schema"));
            errors.push(Error::invalid(&at, "", structural::unsupported(keyword)));
            Structural::default()
        }
    };
    let mut seen = BTreeSet::new();
    for (index, field) in fields.iter().enumerate() {
        let given = text(field, "jsonPath");
        let path = path.index(index).child("jsonPath");
        if given.is_empty() {
            errors.push(Error::required(&path, ""));
            continue;
        }
        if let Some((before, _)) = given.split_once('[')
            && (before.is_empty() || schema::field_schema(before, &form).is_some())
        {
            let message = "is an invalid path: array notation is not allowed";
            errors.push(Error::invalid(&path, given, message));
            continue;
        }
        let found = schema::field_schema(given, &form);
        let in_metadata = given.starts_with(".metadata.") || given == ".metadata";
        let Some(found) = found else {
            let message = match given.trim_start().starts_with(['.', '[']) {
                true => "is an invalid path: does not refer to a valid field".to_owned(),
                false => {
                    let step = given.split(['.', '[']).next().unwrap_or(given);
                    format!("is an invalid path: expected [ or . but got: {step}")
                }
            };
            errors.push(Error::invalid(&path, given, message));
            continue;
        };
        if in_metadata {
            errors.push(Error::invalid(
                &path,
                given,
                "must not point to fields in metadata",
            ));
        }
        if !matches!(found.kind.as_str(), "string" | "boolean" | "integer") {
            errors.push(Error::invalid(
                &path,
                given,
                "must point to a field of type string, boolean or integer. Enum string fields and strings with formats are allowed.",
            ));
        }
        if !seen.insert(given) {
            errors.push(Error::duplicate(&path, given));
        }
    }
    if seen.len() > MAX_SELECTABLE {
        errors.push(Error::too_many(path, seen.len(), MAX_SELECTABLE));
    }
}
