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

/// Leaf lock: held for a look-up and an insert.
static ROWS: LazyLock<Mutex<HashMap<String, &'static Resource>>> = LazyLock::new(Mutex::default);

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
const SUBRESOURCE_VERBS: [&str; 3] = ["get", "patch", "update"];

fn leak(text: &str) -> &'static str {
    Box::leak(text.to_owned().into_boxed_str())
}

pub fn row(definition: &Definition, version: &Version) -> Option<&'static Resource> {
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
    let mut rows = ROWS.lock();
    if let Some(row) = rows.get(&key) {
        return Some(row);
    }
    let row: &'static Resource = Box::leak(Box::new(make(definition, version)?));
    rows.insert(key, row);
    Some(row)
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
