//! The published OpenAPI documents, made from the tables: version 2 as JSON and in the binary form that
//! older clients ask for, and version 3 a group version at a time. The words come from a [`Describe`].

mod definitions;
mod enums;
mod gnostic;
mod gnostic_v3;
mod operations;
mod render;
mod words;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::OnceLock;

use serde_json::{Value, json};

use crate::types::{Schema, TypeId};
use enums::Enums;

/// A resource to publish.
#[derive(Debug, Clone)]
pub struct Resource<'a> {
    pub group: &'a str,
    pub version: &'a str,
    pub plural: &'a str,
    pub kind: &'a str,
    pub namespaced: bool,
    pub returns_deleted_object: bool,
    pub verbs: &'a [&'a str],
    pub type_id: TypeId,
    pub list_type_id: Option<TypeId>,
    pub subresources: Vec<Subresource<'a>>,
}

#[derive(Debug, Clone)]
pub struct Subresource<'a> {
    pub name: &'a str,
    pub group: &'a str,
    pub version: &'a str,
    pub kind: &'a str,
    pub verbs: &'a [&'a str],
    pub type_id: TypeId,
}

/// Says what types and fields are for.
pub trait Describe {
    /// By a type's OpenAPI name.
    fn of_type(&self, name: &str) -> Option<String>;
    fn of_field(&self, name: &str, field: &str) -> Option<&str>;
}

/// A rendered document.
#[derive(Debug)]
pub struct Document {
    pub bytes: Vec<u8>,
    /// In quotes, ready for the header.
    pub etag: String,
}

/// A version 2 document in the binary form that older clients ask for.
pub fn v2_protobuf(document: &Value) -> Vec<u8> {
    gnostic::document(document)
}

/// A version 3 document in binary form.
pub fn v3_protobuf(document: &Value) -> Vec<u8> {
    gnostic_v3::document(document)
}

/// What the documents are made of.
pub struct OpenApi<'a> {
    schema: &'a Schema,
    resources: Vec<Resource<'a>>,
    /// The server's version, as `info` shows it.
    version: &'a str,
    /// Names the contents: documents of equal fingerprints are equal. It saves rendering every document
    /// to tell their hashes.
    fingerprint: String,
    enums: Enums,
    /// Loads the descriptions for one rendering: they are large, and documents are rendered once.
    describe: fn() -> Box<dyn Describe>,
    v2_json: OnceLock<Document>,
    v2_protobuf: OnceLock<Document>,
    v3: BTreeMap<String, OnceLock<Document>>,
}

impl<'a> OpenApi<'a> {
    pub fn new(
        schema: &'a Schema,
        resources: Vec<Resource<'a>>,
        version: &'a str,
        fingerprint: String,
        enums: &str,
        describe: fn() -> Box<dyn Describe>,
    ) -> OpenApi<'a> {
        let mut v3: BTreeMap<String, OnceLock<Document>> = BTreeMap::new();
        for root in [
            ".well-known/openid-configuration",
            "api",
            "apis",
            "openid/v1/jwks",
            "version",
        ] {
            v3.insert(root.to_string(), OnceLock::new());
        }
        for resource in &resources {
            v3.entry(operations::root(resource.group, resource.version)[1..].to_string())
                .or_default();
            if !resource.group.is_empty() {
                v3.entry(format!("apis/{}", resource.group)).or_default();
            }
        }
        OpenApi {
            schema,
            resources,
            version,
            fingerprint,
            enums: Enums::parse(enums),
            describe,
            v2_json: OnceLock::new(),
            v2_protobuf: OnceLock::new(),
            v3,
        }
    }

    /// `/openapi/v2` as JSON. Built on first use.
    pub fn v2_json(&self) -> &Document {
        self.v2_json.get_or_init(|| Document {
            bytes: serde_json::to_vec(&self.v2()).unwrap_or_default(),
            etag: self.etag("v2"),
        })
    }

    /// `/openapi/v2` as `application/com.github.proto-openapi.spec.v2@v1.0+protobuf`.
    pub fn v2_protobuf(&self) -> &Document {
        self.v2_protobuf.get_or_init(|| Document {
            bytes: gnostic::document(&self.v2()),
            etag: self.etag("v2.pb"),
        })
    }

    /// `/openapi/v3`: where each document is.
    pub fn v3_root(&self) -> Value {
        let paths: serde_json::Map<String, Value> = self
            .v3
            .keys()
            .map(|path| {
                let url = format!("/openapi/v3/{path}?hash={}", self.hash(path));
                (path.clone(), json!({ "serverRelativeURL": url }))
            })
            .collect();
        json!({ "paths": paths })
    }

    /// `/openapi/v3/{path}`, for a path of the root such as `apis/apps/v1`. Built on first use.
    pub fn v3_group_version(&self, path: &str) -> Option<&Document> {
        let slot = self.v3.get(path)?;
        Some(slot.get_or_init(|| Document {
            bytes: serde_json::to_vec(&self.v3_document(path)).unwrap_or_default(),
            etag: self.etag(path),
        }))
    }

    /// The hash by which the root names the document of a path.
    pub fn hash(&self, path: &str) -> String {
        // FNV-1a, eight times over with different starts: as long as upstream's, it names contents and guards nothing.
        let names = [self.fingerprint.as_str(), path, self.version].map(str::as_bytes);
        (0..8_u64)
            .map(|start| {
                let hash = names.concat().iter().fold(
                    0xcbf2_9ce4_8422_2325_u64.rotate_left(start as u32 * 8) ^ start,
                    |hash, byte| (hash ^ u64::from(*byte)).wrapping_mul(0x0000_0100_0000_01b3),
                );
                format!("{hash:016X}")
            })
            .collect()
    }

    fn etag(&self, path: &str) -> String {
        format!("\"{}\"", self.hash(path))
    }

    fn v2(&self) -> Value {
        let paths = operations::paths(self.schema, &self.resources);
        let words = (self.describe)();
        // What no path leads to belongs to resources that are not served.
        let mut wanted: BTreeSet<String> = BTreeSet::new();
        for reference in paths.iter().flat_map(operations::Path::references) {
            self.reach(&reference, &mut wanted);
        }
        let definitions = wanted
            .into_iter()
            .filter_map(|name| {
                let definition = match self.schema.by_name(&name) {
                    Some(id) => definitions::v2(self.schema, id, &self.enums, &*words),
                    None => {
                        let special = definitions::special_v2(definitions::special_named(&name)?);
                        definitions::described(special, &name, &*words)
                    }
                };
                Some((name, definition))
            })
            .collect();
        render::v2(&paths, definitions, self.version, &*words)
    }

    fn v3_document(&self, path: &str) -> Value {
        let prefix = format!("/{path}/");
        let mut paths = operations::paths(self.schema, &self.resources);
        // The document of a group has the group's own path only, that of a group version all below it.
        let whole = path.starts_with("api/") || path.matches('/').count() == 2;
        paths.retain(|path| {
            if whole {
                path.path.starts_with(&prefix)
            } else {
                path.path == prefix
            }
        });
        let (group, version) = match path.split('/').collect::<Vec<_>>()[..] {
            ["apis", group, version] => (group, version),
            _ => ("", "v1"),
        };
        let mut wanted: BTreeSet<String> = BTreeSet::new();
        for reference in paths.iter().flat_map(operations::Path::references) {
            self.reach(&reference, &mut wanted);
        }
        let words = (self.describe)();
        let schemas = wanted
            .into_iter()
            .filter_map(|name| {
                let schema = match self.schema.by_name(&name) {
                    Some(id) => definitions::v3(self.schema, id, group, version, &self.enums, &*words),
                    None => {
                        let special = definitions::special_v3(definitions::special_named(&name)?);
                        definitions::described(special, &name, &*words)
                    }
                };
                Some((name, schema))
            })
            .collect();
        render::v3(&paths, schemas, self.version, &*words)
    }

    fn reach(&self, name: &str, wanted: &mut BTreeSet<String>) {
        if wanted.insert(name.to_string())
            && let Some(id) = self.schema.by_name(name)
        {
            for reference in definitions::references(self.schema, id) {
                self.reach(&reference, wanted);
            }
        }
    }
}
