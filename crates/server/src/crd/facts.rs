//! The row that a custom resource would have in the fact tables. Rows are kept for the life of the
//! process, as built-in ones are, once for each distinct content: a definition that comes and goes, or
//! whose schema changes, costs nothing the second time.

use std::collections::HashMap;
use std::sync::LazyLock;

use base64::Engine;
use parking_lot::Mutex;
use sha2::{Digest, Sha256};
use skiff_api::facts::{self, Resource, Storage, Subresource};

use super::definition::{Definition, Version};

/// What all rows together may take: rows of thousands of definitions, not of a client that makes and deletes them
/// for ever.
const MAX_BYTES: usize = 16 << 20;

/// Leaf lock: held for a look-up and an insert.
static ROWS: LazyLock<Mutex<Rows>> = LazyLock::new(Mutex::default);

#[derive(Default)]
struct Rows {
    by_content: HashMap<String, &'static Resource>,
    bytes: usize,
}

const VERBS: [&str; 8] = [
    "delete",
    "deletecollection",
    "get",
    "list",
    "patch",
    "create",
    "update",
    "watch",
];
/// What a row takes besides its names.
const ROW: usize = 1024;
const SUBRESOURCE_VERBS: [&str; 3] = ["get", "patch", "update"];

fn leak(text: &str) -> &'static str {
    Box::leak(text.to_owned().into_boxed_str())
}

/// There is no room for another row.
#[derive(Debug, thiserror::Error)]
#[error("the names of custom resources take {} MiB since the server started", MAX_BYTES >> 20)]
pub struct NoRoom;

/// The row of a version.
pub fn row(definition: &Definition, version: &Version) -> Result<Option<&'static Resource>, NoRoom> {
    row_of(&ROWS, definition, version)
}

fn row_of(
    rows: &Mutex<Rows>,
    definition: &Definition,
    version: &Version,
) -> Result<Option<&'static Resource>, NoRoom> {
    let names = &definition.names;
    let key = format!(
        "{}/{} {names:?} {} {} {:?} {}",
        definition.group,
        version.name,
        definition.namespaced,
        version.status,
        version.scale.is_some(),
        definition.stored
    );
    let mut rows = rows.lock();
    if let Some(row) = rows.by_content.get(&key) {
        return Ok(Some(row));
    }
    // The key holds every name once, and so does the row, with its tables.
    let bytes = rows.bytes + 2 * key.len() + ROW;
    if bytes > MAX_BYTES {
        return Err(NoRoom);
    }
    let Some(row) = make(definition, version) else {
        return Ok(None);
    };
    let row: &'static Resource = Box::leak(Box::new(row));
    rows.bytes = bytes;
    rows.by_content.insert(key, row);
    Ok(Some(row))
}

fn make(definition: &Definition, version: &Version) -> Option<Resource> {
    let schema = facts::schema();
    // What the tables know of a custom object is its metadata.
    let type_id = schema.by_gvk("meta.k8s.io", "v1", "PartialObjectMetadata")?;
    let names = &definition.names;
    let (group, kind) = (leak(&definition.group), leak(&names.kind));
    let own = leak(&version.name);
    let mut subresources = Vec::new();
    if version.status {
        subresources.push(Subresource {
            name: "status",
            group,
            version: own,
            kind,
            verbs: SUBRESOURCE_VERBS.into(),
            type_id,
        });
    }
    if version.scale.is_some() {
        subresources.push(Subresource {
            name: "scale",
            group: "autoscaling",
            version: "v1",
            kind: "Scale",
            verbs: SUBRESOURCE_VERBS.into(),
            type_id: schema.by_gvk("autoscaling", "v1", "Scale")?,
        });
    }
    let hash = Sha256::digest(format!(
        "{}/{}/{}",
        definition.group, definition.stored, names.kind
    ));
    let hash = base64::engine::general_purpose::STANDARD.encode(&hash[..8]);
    Some(Resource {
        group,
        version: own,
        plural: leak(&names.plural),
        singular: leak(&names.singular),
        kind,
        on_by_default: true,
        namespaced: definition.namespaced,
        returns_deleted_object: false,
        verbs: VERBS.into(),
        short_names: names.short_names.iter().map(|name| leak(name)).collect(),
        categories: names.categories.iter().map(|name| leak(name)).collect(),
        storage: Some(Storage {
            key: leak(&format!("{}/{}", definition.group, names.plural)),
            group,
            version: leak(&definition.stored),
            version_hash: leak(&hash),
        }),
        subresources: subresources.into(),
        type_id,
        list_type_id: None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn definitions_that_come_and_go_end_at_a_budget() {
        let rows = Mutex::default();
        let long = "x".repeat(100_000);
        let definition = |number: u32| {
            Definition::read(&json!({
                "spec": {"group": "example.com", "scope": "Namespaced",
                    "versions": [{"name": "v1", "served": true, "storage": true}]},
                "status": {"acceptedNames": {"plural": format!("things{number}"), "kind": "Thing", "categories": [long]}},
            }))
        };
        let row = |number: u32| {
            let definition = definition(number);
            row_of(&rows, &definition, &definition.versions[0])
        };
        let made = (0..10_000).take_while(|number| row(*number).is_ok()).count();
        assert!((50..200).contains(&made), "{made}");
        assert!(matches!(row(0), Ok(Some(_))), "the same again costs nothing");
        assert!(row(10_001).is_err());
    }
}
