//! The group `apiextensions.k8s.io`: the defaults, strategy and rules of CustomResourceDefinitions, and what
//! is common to the objects that they define.

mod conversion;
mod convert;
pub mod embedded;
pub mod finalizers;
mod parts;
mod schema;
mod spec;
mod structural;

use serde_json::{Value, json};

use crate::kind::{BASE, Converter, Kind};
use crate::node::{at, list, text};
use crate::{strategy, walk};

pub static CUSTOM_RESOURCE_DEFINITION: Kind = Kind {
    group: "apiextensions.k8s.io",
    kind: "CustomResourceDefinition",
    default: |_, object| {
        let Some(spec) = walk::object(object, "spec") else {
            return;
        };
        if let Some(names) = walk::object(spec, "names") {
            let kind = text(names, "kind").to_owned();
            if !kind.is_empty() {
                walk::string(names, "singular", &kind.to_lowercase());
                walk::string(names, "listKind", &format!("{kind}List"));
            }
        }
        walk::pointer(spec, "conversion", json!({"strategy": "None"}));
        walk::each(spec, "conversion.webhook.clientConfig.service", &mut |service| {
            walk::pointer(service, "port", 443);
        });
        let stored = storage_version(list(spec, "versions"));
        if let (Some(stored), Some(status)) = (stored, walk::object(object, "status"))
            && list(status, "storedVersions").is_empty()
        {
            walk::put(status, "storedVersions", Value::Array(vec![stored]));
        }
    },
    prepare_create: |object| {
        strategy::set_generation(object, 1);
        // The status of a definition that was taken from elsewhere says nothing of this one.
        let stored = storage_version(list(object, "spec.versions"));
        let stored = stored.map_or(Value::Null, |stored| Value::Array(vec![stored]));
        walk::put(
            object,
            "status",
            json!({"storedVersions": stored, "conditions": [], "acceptedNames": {"plural": "", "kind": ""}}),
        );
    },
    prepare_update: |new, old| {
        strategy::update_spec(new, old);
        let stored = storage_version(list(new, "spec.versions"));
        let mut versions = list(new, "status.storedVersions").to_vec();
        if let (Some(stored), Some(status)) = (stored, walk::object(new, "status"))
            && !versions.contains(&stored)
        {
            versions.push(stored);
            walk::put(status, "storedVersions", Value::Array(versions));
        }
    },
    validate: spec::validate,
    validate_update: spec::validate_update,
    validate_status_update: spec::validate_status_update,
    has_status: true,
    warnings: |new, old| {
        let known = old.map(schema::unrecognized_formats).unwrap_or_default();
        let mut found = schema::unrecognized_formats(new);
        found.retain(|format| !known.contains(format));
        found
            .iter()
            .map(|format| format!("unrecognized format {}", skiff_meta::field::quote(format)))
            .collect()
    },
    allow_unconditional_update: false,
    qualified_finalizers: false,
    // Never served; read from stores of upstream.
    converters: &[Converter {
        version: "v1beta1",
        to_stored: convert::to_v1,
        from_stored: |_| {},
    }],
    // COMPAT: upstream's extension server keeps its kind as JSON.
    stored_as_json: true,
    own_delete: true,
    // COMPAT: upstream forgot it.
    status_table: false,
    ..BASE
};

/// The name of the version that objects are stored in.
fn storage_version(versions: &[Value]) -> Option<Value> {
    let stored = versions
        .iter()
        .find(|version| at(version, "storage").as_bool() == Some(true))?;
    Some(at(stored, "name").clone())
}

#[cfg(test)]
mod tests;
