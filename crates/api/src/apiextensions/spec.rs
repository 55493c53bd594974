//! The rules of a CustomResourceDefinition. Upstream checks its internal form, in which what all versions
//! share stands at the top: messages name fields as they are there.

use std::collections::BTreeSet;

use serde_json::{Value, json};
use skiff_meta::field::{Error, ErrorType, Path};
use skiff_meta::names;
use skiff_schema::structural::Structural;

use super::conversion::conversion;
use super::parts::{columns, selectable, subresources};
use super::schema::{self, Stored};
use crate::node::{at, list, text};

/// What all versions have alike, if they do.
fn shared<'a>(versions: &'a [Value], key: &str) -> Option<&'a Value> {
    let first = at(versions.first()?, key);
    let alike = !first.is_null() && versions.iter().all(|version| at(version, key) == first);
    (alike && first.as_array().is_none_or(|list| !list.is_empty())).then_some(first)
}

fn established(object: &Value) -> bool {
    list(object, "status.conditions")
        .iter()
        .any(|c| text(c, "type") == "Established" && text(c, "status") == "True")
}

/// All findings of a create.
pub fn validate(object: &Value) -> Vec<Error> {
    let mut errors = Vec::new();
    let wanted = format!(
        "{}.{}",
        text(object, "spec.names.plural"),
        text(object, "spec.group")
    );
    let name = text(object, "metadata.name");
    if !name.is_empty() && name != wanted {
        let path = Path::new("metadata.name");
        errors.push(Error::invalid(
            &path,
            name,
            "must be spec.names.plural+\".\"+spec.group",
        ));
    }
    spec(object, None, &mut errors);
    rest(object, None, &mut errors);
    errors
}

pub fn validate_update(new: &Value, old: &Value) -> Vec<Error> {
    let mut errors = Vec::new();
    spec(new, Some(old), &mut errors);
    let mut immutable = |field: &str| {
        if at(new, field) != at(old, field) {
            errors.push(Error::invalid(
                &Path::new(field),
                at(new, field).clone(),
                crate::errors::IMMUTABLE,
            ));
        }
    };
    if established(old) {
        immutable("spec.scope");
        immutable("spec.names.kind");
    }
    immutable("spec.group");
    immutable("spec.names.plural");
    rest(new, Some(old), &mut errors);
    errors
}

/// What is checked of the status, and of the whole.
fn rest(object: &Value, old: Option<&Value>, errors: &mut Vec<Error>) {
    check_names(
        at(object, "status.acceptedNames"),
        &Path::new("status.acceptedNames"),
        errors,
    );
    stored_versions(object, errors);
    approval(object, old, errors);
    if at(object, "spec.preserveUnknownFields").as_bool() == Some(true)
        && old.is_none_or(|old| at(old, "spec.preserveUnknownFields").as_bool() != Some(true))
    {
        errors.push(Error::invalid(
            &Path::new("spec.preserveUnknownFields"),
            true,
            "cannot set to true, set x-kubernetes-preserve-unknown-fields to true in spec.versions[*].schema instead",
        ));
    }
}

pub fn validate_status_update(new: &Value, _: &Value) -> Vec<Error> {
    let mut errors = Vec::new();
    check_names(
        at(new, "status.acceptedNames"),
        &Path::new("status.acceptedNames"),
        &mut errors,
    );
    errors
}

fn spec(object: &Value, old: Option<&Value>, errors: &mut Vec<Error>) {
    let path = Path::new("spec");
    let spec = at(object, "spec");
    let versions = list(spec, "versions");
    let group = text(spec, "group");
    if group.is_empty() {
        errors.push(Error::required(&path.child("group"), ""));
    } else {
        let complaints = names::dns1123_subdomain(group);
        if !complaints.is_empty() {
            errors.push(Error::invalid(&path.child("group"), group, complaints.join(",")));
        } else if !group.contains('.') {
            let message = "should be a domain with at least one dot";
            errors.push(Error::invalid(&path.child("group"), group, message));
        }
    }
    one_of(
        &path.child("scope"),
        text(spec, "scope"),
        &["Cluster", "Namespaced"],
        errors,
    );
    let schema_of = |version: &Value| !at(version, "schema.openAPIV3Schema").is_null();
    for (index, version) in versions.iter().enumerate() {
        if !schema_of(version) {
            let at = path
                .child("versions")
                .index(index)
                .child("schema")
                .child("openAPIV3Schema");
            errors.push(Error::required(&at, ""));
        }
    }
    if at(spec, "preserveUnknownFields").as_bool() == Some(true)
        && versions
            .iter()
            .any(|v| Structural::parse(at(v, "schema.openAPIV3Schema")).has_defaults())
    {
        errors.push(Error::invalid(
            &path.child("preserveUnknownFields"),
            true,
            "must be false in order to use defaults in the schema",
        ));
    }
    let alike = [
        shared(versions, "schema"),
        shared(versions, "subresources"),
        shared(versions, "additionalPrinterColumns"),
        shared(versions, "selectableFields"),
    ];
    let (mut seen, mut unique) = (BTreeSet::new(), true);
    for (index, version) in versions.iter().enumerate() {
        let at_version = path.child("versions").index(index);
        let name = text(version, "name");
        unique &= seen.insert(name);
        let complaints = names::dns1035_label(name);
        if !complaints.is_empty() {
            errors.push(Error::invalid(
                &at_version.child("name"),
                name,
                complaints.join(","),
            ));
        }
        deprecation(version, &at_version, errors);
        let own = |index: usize, key: &str| {
            if alike[index].is_none() {
                at(version, key)
            } else {
                &Value::Null
            }
        };
        let status = !at(version, "subresources.status").is_null();
        let schema = own(0, "schema");
        if !schema.is_null() {
            schema_part(
                schema,
                &at_version.child("schema"),
                status,
                old,
                Some(name),
                errors,
            );
        }
        subresources(own(1, "subresources"), &at_version.child("subresources"), errors);
        columns(
            own(2, "additionalPrinterColumns"),
            &at_version.child("additionalPrinterColumns"),
            errors,
        );
        selectable(
            own(3, "selectableFields"),
            at(version, "schema.openAPIV3Schema"),
            // COMPAT: it means the opposite.
            "may only be set when `version.schema.openAPIV3Schema` is not included",
            &at_version.child("selectableFields"),
            errors,
        );
    }
    if !unique {
        let message = "must contain unique version names";
        errors.push(shown_versions(
            &path.child("versions"),
            at(spec, "versions"),
            message,
        ));
    }
    if versions
        .iter()
        .filter(|v| at(v, "storage").as_bool() == Some(true))
        .count()
        != 1
    {
        let message = "must have exactly one version marked as storage version";
        errors.push(shown_versions(
            &path.child("versions"),
            at(spec, "versions"),
            message,
        ));
    }
    // COMPAT: upstream's internal form names the first version once more.
    if let Some(first) = versions
        .first()
        .map(|version| text(version, "name"))
        .filter(|name| !name.is_empty())
    {
        let complaints = names::dns1035_label(first);
        if !complaints.is_empty() {
            errors.push(Error::invalid(
                &path.child("version"),
                first,
                complaints.join(","),
            ));
        }
    }
    for key in ["plural", "singular", "kind", "listKind"] {
        if text(at(spec, "names"), key).is_empty() {
            errors.push(Error::required(&path.child("names").child(key), ""));
        }
    }
    check_names(at(spec, "names"), &path.child("names"), errors);
    if let Some(schema) = alike[0] {
        let status = versions.iter().any(|v| !at(v, "subresources.status").is_null());
        let first = versions.first().map(|version| text(version, "name"));
        schema_part(schema, &path.child("validation"), status, old, first, errors);
    }
    subresources(
        alike[1].unwrap_or(&Value::Null),
        &path.child("subresources"),
        errors,
    );
    columns(
        alike[2].unwrap_or(&Value::Null),
        &path.child("additionalPrinterColumns"),
        errors,
    );
    if let (Some(fields), Some(first)) = (alike[3], versions.first()) {
        selectable(
            fields,
            at(first, "schema.openAPIV3Schema"),
            "may only be set when validations.schema is included",
            &path.child("selectableFields"),
            errors,
        );
    }
    // Until a definition is served, what it trusts may be anything.
    let served = old.filter(|old| established(old));
    conversion(spec, served, &path.child("conversion"), errors);
}

fn schema_part(
    schema: &Value,
    path: &Path,
    status: bool,
    old: Option<&Value>,
    version: Option<&str>,
    errors: &mut Vec<Error>,
) {
    let own = at(schema, "openAPIV3Schema");
    if own.is_null() {
        return;
    }
    let before = old.and_then(|old| {
        list(old, "spec.versions")
            .iter()
            .find(|v| Some(text(v, "name")) == version)
            .map(|v| at(v, "schema.openAPIV3Schema"))
    });
    let stored = Stored {
        unchanged: before == Some(own),
    };
    errors.extend(schema::validate(
        own,
        &path.child("openAPIV3Schema"),
        status,
        stored,
    ));
}

pub fn one_of(path: &Path, value: &str, accepted: &[&str], errors: &mut Vec<Error>) {
    if value.is_empty() {
        errors.push(Error::required(path, ""));
    } else if !accepted.contains(&value) {
        errors.push(Error::not_supported(path, value, accepted));
    }
}

fn deprecation(version: &Value, path: &Path, errors: &mut Vec<Error>) {
    let Some(warning) = at(version, "deprecationWarning").as_str() else {
        return;
    };
    let path = path.child("deprecationWarning");
    let mut complain = |message: String| errors.push(Error::invalid(&path, warning, message));
    if at(version, "deprecated").as_bool() != Some(true) {
        complain("can only be set for deprecated versions".to_owned());
        return;
    }
    if warning.len() > 256 {
        complain("must be <= 256 characters long".to_owned());
    }
    if warning.is_empty() {
        complain("must not be an empty string".to_owned());
    }
    if let Some((place, _)) = warning.char_indices().find(|(_, c)| c.is_control()) {
        complain(format!(
            "must only contain printable UTF-8 characters; non-printable character found at index {place}"
        ));
    }
}

fn check_names(value: &Value, path: &Path, errors: &mut Vec<Error>) {
    for key in ["plural", "singular"] {
        let name = text(value, key);
        let complaints = names::dns1035_label(name);
        if !name.is_empty() && !complaints.is_empty() {
            errors.push(Error::invalid(&path.child(key), name, complaints.join(",")));
        }
    }
    for key in ["kind", "listKind"] {
        let name = text(value, key);
        let complaints = names::dns1035_label(&name.to_lowercase());
        if !name.is_empty() && !complaints.is_empty() {
            let message = format!(
                "may have mixed case, but should otherwise match: {}",
                complaints.join(",")
            );
            errors.push(Error::invalid(&path.child(key), name, message));
        }
    }
    let each = |key: &str, errors: &mut Vec<Error>| {
        for (index, name) in list(value, key).iter().enumerate() {
            let name = name.as_str().unwrap_or("");
            let complaints = names::dns1035_label(name);
            if !complaints.is_empty() {
                errors.push(Error::invalid(
                    &path.child(key).index(index),
                    name,
                    complaints.join(","),
                ));
            }
        }
    };
    each("shortNames", errors);
    if !text(value, "kind").is_empty() && text(value, "kind") == text(value, "listKind") {
        let message = "kind and listKind may not be the same";
        errors.push(Error::invalid(
            &path.child("listKind"),
            text(value, "listKind"),
            message,
        ));
    }
    each("categories", errors);
}

fn stored_versions(object: &Value, errors: &mut Vec<Error>) {
    let path = Path::new("status.storedVersions");
    let stored = list(object, "status.storedVersions");
    let versions = list(object, "spec.versions");
    if stored.is_empty() {
        errors.push(Error::invalid(
            &path,
            Value::Null,
            "must have at least one stored version",
        ));
        return;
    }
    // COMPAT: upstream finds each stored version once, whoever else has its name.
    let mut left: Vec<&str> = stored.iter().map(|name| name.as_str().unwrap_or("")).collect();
    for version in versions {
        let name = text(version, "name");
        let known = left.contains(&name);
        left.retain(|other| *other != name);
        if at(version, "storage").as_bool() == Some(true) && !known {
            let message = format!("must have the storage version {name}");
            errors.push(Error::invalid(&path, json!(stored), message));
        }
    }
    for (index, name) in stored.iter().enumerate() {
        let shown = name.as_str().unwrap_or("");
        if !versions.iter().any(|version| text(version, "name") == shown) {
            errors.push(Error::invalid(
                &path.index(index),
                shown,
                format!(
                    "missing from spec.versions; {shown} was previously a storage version, and must remain in spec.versions until a storage migration ensures no data remains persisted in {shown} and removes {shown} from status.storedVersions"
                ),
            ));
        }
    }
}

/// Groups of Kubernetes itself want to know who approved them.
fn approval(object: &Value, old: Option<&Value>, errors: &mut Vec<Error>) {
    let group = text(object, "spec.group");
    let ours = |domain: &str| group == domain || group.ends_with(&format!(".{domain}"));
    if !ours("k8s.io") && !ours("kubernetes.io") {
        return;
    }
    const KEY: &str = "api-approved.kubernetes.io";
    let value_of = |object: &Value| {
        let annotations = at(object, "metadata.annotations");
        annotations
            .get(KEY)
            .and_then(Value::as_str)
            .unwrap_or("")
            .to_owned()
    };
    let value = value_of(object);
    let accepted = |value: &str| {
        value.starts_with("unapproved") || value.starts_with("https://") || value.starts_with("http://")
    };
    // What is stored without approval may stay so.
    if accepted(&value) || old.is_some_and(|old| value_of(old) == value) {
        return;
    }
    let path = Path::new("metadata.annotations").key(KEY);
    errors.push(if value.is_empty() {
        Error::required(&path, "protected groups must have approval annotation \"api-approved.kubernetes.io\", see https://github.com/kubernetes/enhancements/pull/1111")
    } else {
        Error::invalid(&path, value, "protected groups must have approval annotation \"api-approved.kubernetes.io\" with either a URL or a reason starting with \"unapproved\", see https://github.com/kubernetes/enhancements/pull/1111")
    });
}

/// COMPAT: a complaint about all versions shows them as upstream's own type has them, where what is the same in all
/// stands outside of them. Where they differ they are shown as they were given.
fn shown_versions(path: &Path, given: &Value, message: &str) -> Error {
    let Some(versions) = given.as_array() else {
        return Error::invalid(path, Value::Null, message);
    };
    let parts = [
        "schema",
        "subresources",
        "additionalPrinterColumns",
        "selectableFields",
    ];
    let differ = parts.iter().any(|part| {
        let set = versions.iter().any(|version| !at(version, part).is_null());
        set && shared(versions, part).is_none()
    });
    if differ {
        return Error::invalid(path, given.clone(), message);
    }
    let flag = |version: &Value, name: &str| at(version, name).as_bool().unwrap_or(false);
    let shown: Vec<String> = versions
        .iter()
        .map(|version| {
            format!(
                "{{\"Name\":{},\"Served\":{},\"Storage\":{},\"Deprecated\":{},\"DeprecationWarning\":{},\"Schema\":null,\"Subresources\":null,\"AdditionalPrinterColumns\":null,\"SelectableFields\":null}}",
                json!(text(version, "name")),
                flag(version, "served"),
                flag(version, "storage"),
                flag(version, "deprecated"),
                at(version, "deprecationWarning"),
            )
        })
        .collect();
    Error {
        kind: ErrorType::Invalid,
        path: path.to_string(),
        value: Some(Value::Null),
        shown: Some(format!("[{}]", shown.join(","))),
        detail: message.to_owned(),
    }
}
