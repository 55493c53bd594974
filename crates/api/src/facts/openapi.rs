//! The OpenAPI documents of the built-in kinds, rendered when first asked for.

use std::collections::BTreeMap;
use std::sync::{LazyLock, Mutex, PoisonError};

use skiff_descriptions::Descriptions;
use skiff_schema::openapi::{Describe, OpenApi, Resource, Subresource};

use super::RuntimeConfig;

/// Changes when the rendering does, so that clients do not keep documents of an older skiff.
const RENDERING: &str = "4";

/// The lists of values that upstream publishes for string properties.
const ENUMS: &str = include_str!("../../data/enums.txt");

/// The version that the fact tables are of.
pub const KUBERNETES_VERSION: &str = "v1.36.4";

/// COMPAT: `info` shows the version that upstream emulates, which has no patch.
const EMULATED: &str = "1.36";

static OPENAPI: LazyLock<OpenApi<'static>> = LazyLock::new(|| made(&RuntimeConfig::default()));

/// The documents of servers that serve more. Few processes have more than one such server.
static OTHERS: Mutex<BTreeMap<RuntimeConfig, &'static OpenApi<'static>>> = Mutex::new(BTreeMap::new());

fn made(config: &RuntimeConfig) -> OpenApi<'static> {
    let served = super::resources()
        .iter()
        .filter(|resource| config.serves(resource));
    let resources: Vec<Resource> = served.map(published).collect();
    let tables = [super::TYPES, super::RESOURCES_TEXT];
    // The tables name the contents; their length and a sum over them tell them apart.
    let sum = tables
        .iter()
        .flat_map(|table| table.bytes())
        .fold(0_u64, |sum, byte| {
            sum.wrapping_mul(31).wrapping_add(u64::from(byte))
        });
    let fingerprint = format!("{RENDERING}-{sum:x}-{}", resources.len());
    OpenApi::new(super::schema(), resources, EMULATED, fingerprint, ENUMS, || {
        Box::new(Words(Descriptions::load()))
    })
}

struct Words(Descriptions);

impl Describe for Words {
    fn of_type(&self, name: &str) -> Option<String> {
        self.0.of_type(name)
    }

    fn of_field(&self, name: &str, field: &str) -> Option<&str> {
        self.0.of_field(name, field)
    }
}

/// The documents of what is served by default.
pub fn openapi() -> &'static OpenApi<'static> {
    &OPENAPI
}

/// The documents of what a server serves.
pub fn openapi_of(config: &RuntimeConfig) -> &'static OpenApi<'static> {
    if config.is_default() {
        return openapi();
    }
    let mut others = OTHERS.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(found) = others.get(config) {
        return found;
    }
    let made: &'static OpenApi<'static> = Box::leak(Box::new(made(config)));
    others.insert(config.clone(), made);
    made
}

fn published(resource: &'static super::Resource) -> Resource<'static> {
    Resource {
        group: resource.group,
        version: resource.version,
        plural: resource.plural,
        kind: resource.kind,
        namespaced: resource.namespaced,
        returns_deleted_object: resource.returns_deleted_object,
        verbs: &resource.verbs,
        type_id: resource.type_id,
        list_type_id: resource.list_type_id,
        subresources: resource
            .subresources
            .iter()
            .map(|sub| Subresource {
                name: sub.name,
                group: sub.group,
                version: sub.version,
                kind: sub.kind,
                verbs: &sub.verbs,
                type_id: sub.type_id,
            })
            .collect(),
    }
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use serde_json::Value;

    use super::*;

    fn upstream_data() -> Option<PathBuf> {
        let root = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../..");
        let folder =
            std::env::var_os("SKIFF_UPSTREAM_DATA").map_or(root.join("../shared/kubernetes"), PathBuf::from);
        let found = folder.is_dir().then_some(folder);
        if found.is_none() {
            eprintln!("skipped: no upstream data");
        }
        found
    }

    fn without_descriptions(value: &mut Value) {
        match value {
            Value::Object(map) => {
                // A property may be called description; its value is an object then.
                // The stored documents were made without lists of values.
                map.retain(|key, value| {
                    (key != "description" || value.is_object()) && !(key == "enum" && value.is_array())
                });
                map.values_mut().for_each(without_descriptions);
                // Upstream wraps a reference only to give it a description.
                if map.len() == 1
                    && let Some(reference) = map.get("allOf").and_then(|all| all.get(0)?.get("$ref")).cloned()
                {
                    *map = serde_json::Map::from_iter([("$ref".to_string(), reference)]);
                }
            }
            Value::Array(values) => values.iter_mut().for_each(without_descriptions),
            _ => {}
        }
    }

    fn load(path: PathBuf) -> Value {
        let text = std::fs::read_to_string(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
        let mut value = serde_json::from_str(&text).expect("json");
        without_descriptions(&mut value);
        value
    }

    fn ours(bytes: &[u8]) -> Value {
        let mut value = serde_json::from_slice(bytes).expect("json");
        without_descriptions(&mut value);
        value
    }

    /// Everything that can be served.
    fn all() -> &'static OpenApi<'static> {
        openapi_of(&RuntimeConfig::parse(&["api/all=true"]).expect("a configuration"))
    }

    #[test]
    fn definitions_are_upstreams() {
        let Some(folder) = upstream_data() else { return };
        let theirs = load(folder.join("openapi-spec/swagger.json"));
        let ours = ours(&all().v2_json().bytes);
        for (name, definition) in ours["definitions"].as_object().expect("an object") {
            assert_eq!(definition, &theirs["definitions"][name], "{name}");
        }
    }

    #[test]
    fn what_is_off_is_not_described() {
        let text = |documents: &OpenApi| String::from_utf8(documents.v2_json().bytes.clone()).expect("text");
        let (by_default, all) = (text(openapi()), text(all()));
        let value: Value = serde_json::from_str(&by_default).expect("json");
        let definitions = value["definitions"].as_object().expect("an object");
        assert!(
            definitions
                .keys()
                .all(|name| !name.contains("beta") && !name.contains("alpha"))
        );
        assert!(!by_default.contains("/apis/storagemigration.k8s.io/"));
        assert!(all.contains("/apis/storagemigration.k8s.io/v1beta1/storageversionmigrations/{name}/status"));
        assert!(
            openapi()
                .v3_group_version("apis/storagemigration.k8s.io/v1beta1")
                .is_none()
        );
    }

    /// `(path, method) -> (operation id, action, group version kind)`.
    fn operations(document: &Value) -> BTreeMap<(String, String), (Value, Value, Value)> {
        let mut out = BTreeMap::new();
        for (path, item) in document["paths"].as_object().expect("an object") {
            for (method, operation) in item.as_object().expect("an object") {
                if method != "parameters" {
                    let facts = [
                        "operationId",
                        "x-kubernetes-action",
                        "x-kubernetes-group-version-kind",
                    ];
                    let [id, action, gvk] = facts.map(|key| operation[key].clone());
                    out.insert((path.clone(), method.clone()), (id, action, gvk));
                }
            }
        }
        out
    }

    #[test]
    fn operations_are_upstreams() {
        let Some(folder) = upstream_data() else { return };
        let theirs = operations(&load(folder.join("openapi-spec/swagger.json")));
        let ours = operations(&ours(&all().v2_json().bytes));
        for (key, operation) in &ours {
            assert_eq!(Some(operation), theirs.get(key), "{key:?}");
        }
        for key in theirs.keys() {
            let off = key.0.contains("alpha") || key.0.contains("beta");
            let group_off = key.0.contains("internal.apiserver.k8s.io");
            let other = ["/logs/", "/openid/", "/.well-known/"]
                .iter()
                .any(|prefix| key.0.starts_with(prefix));
            assert!(
                off || group_off || other || ours.contains_key(key),
                "missing {key:?}"
            );
        }
    }

    #[test]
    fn version_3_is_upstreams() {
        let Some(folder) = upstream_data() else { return };
        let root = all().v3_root();
        for path in root["paths"].as_object().expect("an object").keys() {
            let document = all().v3_group_version(path).expect("a document");
            let ours = ours(&document.bytes);
            let theirs = load(folder.join(format!(
                "openapi-spec/v3/{}_openapi.json",
                path.replace('/', "__")
            )));
            let empty = serde_json::Map::new();
            let schemas = |document: &Value| {
                document["components"]["schemas"]
                    .as_object()
                    .unwrap_or(&empty)
                    .clone()
            };
            for (name, schema) in schemas(&ours) {
                assert_eq!(schema, theirs["components"]["schemas"][&name], "{path}: {name}");
            }
            assert_eq!(schemas(&ours).len(), schemas(&theirs).len(), "{path}");
            let paths = |document: &Value| -> Vec<String> {
                let all = document["paths"].as_object().unwrap_or(&empty).keys();
                all.cloned().collect()
            };
            assert_eq!(paths(&ours), paths(&theirs), "{path}");
        }
    }

    /// All texts by where they stand.
    fn descriptions(at: &str, value: &Value, out: &mut BTreeMap<String, String>) {
        if let Some(text) = value["description"].as_str() {
            out.insert(at.to_string(), text.to_string());
        }
        for (key, value) in value.as_object().into_iter().flatten() {
            descriptions(&format!("{at}/{key}"), value, out);
        }
    }

    /// Lists, patches and parameters have words of our own; all others are the same as upstream's.
    #[test]
    fn descriptions_are_upstreams() {
        let Some(folder) = upstream_data() else { return };
        let text = std::fs::read_to_string(folder.join("openapi-spec/swagger.json")).expect("a file");
        let theirs: Value = serde_json::from_str(&text).expect("json");
        let ours: Value = serde_json::from_slice(&all().v2_json().bytes).expect("json");
        let mut differ = Vec::new();
        for part in ["definitions", "paths"] {
            for (name, value) in ours[part].as_object().expect("an object") {
                let [mut a, mut b] = [BTreeMap::new(), BTreeMap::new()];
                descriptions(name, value, &mut a);
                descriptions(name, &theirs[part][name], &mut b);
                for (at, text) in &b {
                    if !name.ends_with("List")
                        && !name.ends_with(".Patch")
                        && !at.contains("/parameters")
                        && a.get(at) != Some(text)
                    {
                        differ.push(format!("{at}\n  ours   {:?}\n  theirs {text:?}", a.get(at)));
                    }
                }
            }
        }
        assert!(
            differ.is_empty(),
            "{} differ:\n{}",
            differ.len(),
            differ.join("\n")
        );
    }

    #[test]
    fn the_binary_form_is_a_message() {
        let bytes = &openapi().v2_protobuf().bytes;
        // The first field is the string "2.0".
        assert_eq!(&bytes[..5], b"\x0a\x032.0");
        assert!(bytes.len() > 100_000);
    }
}
