//! The OpenAPI documents that custom resources have a part in, made when first asked for and kept until
//! the resources change.

use std::collections::BTreeMap;
use std::sync::{Arc, OnceLock};

use arc_swap::ArcSwapOption;
use serde_json::{Value, json};
use skiff_api::facts;
use skiff_registry::{Customs, Resources};
use skiff_schema::openapi::{Document, OpenApi, v2_protobuf};
use skiff_schema::structural::publish::{self, Published};

use crate::openapi::etag;

/// The documents of the custom resources that there are.
#[derive(Default)]
pub struct Documents {
    current: ArcSwapOption<Made>,
}

pub struct Made {
    customs: Arc<Customs>,
    /// The documents of the built-in kinds.
    built_in: &'static OpenApi<'static>,
    v2_json: OnceLock<Document>,
    v2_protobuf: OnceLock<Document>,
    /// By path: `apis/example.com/v1`.
    v3: BTreeMap<String, OnceLock<Document>>,
}

impl Documents {
    /// The documents of now; `None` while there are no custom resources.
    pub fn of(&self, resources: &Resources, built_in: &'static OpenApi<'static>) -> Option<Arc<Made>> {
        let customs = resources.customs();
        if customs.all.is_empty() {
            return None;
        }
        if let Some(made) = self.current.load_full()
            && Arc::ptr_eq(&made.customs, &customs)
        {
            return Some(made);
        }
        let paths = customs.all.iter().map(|r| format!("apis/{}", r.api_version));
        let made = Arc::new(Made {
            v2_json: OnceLock::new(),
            v2_protobuf: OnceLock::new(),
            v3: paths.map(|path| (path, OnceLock::new())).collect(),
            customs,
            built_in,
        });
        self.current.store(Some(made.clone()));
        Some(made)
    }
}

/// The group versions in which a built-in type is a kind.
fn kinds(name: &str) -> Vec<Value> {
    let schema = facts::schema();
    let Some(id) = schema.by_name(name) else {
        return Vec::new();
    };
    let of = schema.get(id);
    let kind = of.short_name();
    let all = of.group_versions.iter();
    all.map(|(group, version)| json!({"group": group, "kind": kind, "version": version}))
        .collect()
}

fn document(bytes: Vec<u8>) -> Document {
    Document {
        etag: etag(&bytes),
        bytes,
    }
}

impl Made {
    fn published(&self, path: Option<&str>) -> Vec<Published<'_>> {
        let wanted = |r: &&Arc<skiff_registry::Resource>| {
            path.is_none_or(|path| path == format!("apis/{}", r.api_version))
        };
        self.customs
            .all
            .iter()
            .filter(wanted)
            .filter_map(|resource| resource.strategy.published())
            .collect()
    }

    fn v2(&self) -> Value {
        let mut value = serde_json::from_slice(&self.built_in.v2_json().bytes).unwrap_or_default();
        publish::add_to_v2(&self.published(None), &mut value);
        value
    }

    pub fn v2_json(&self) -> &Document {
        self.v2_json
            .get_or_init(|| document(self.v2().to_string().into_bytes()))
    }

    pub fn v2_protobuf(&self) -> &Document {
        self.v2_protobuf.get_or_init(|| document(v2_protobuf(&self.v2())))
    }

    pub fn v3(&self, path: &str) -> Option<&Document> {
        let slot = self.v3.get(path)?;
        Some(slot.get_or_init(|| {
            let model = self.built_in.v3_group_version("apis/apps/v1");
            let model = model.and_then(|model| serde_json::from_slice(&model.bytes).ok());
            let value = publish::v3(&self.published(Some(path)), &model.unwrap_or_default(), &kinds);
            document(value.to_string().into_bytes())
        }))
    }

    /// Adds the documents to the root of version 3.
    pub fn add_to_root(&self, root: &mut Value) {
        for path in self.v3.keys() {
            if let Some(found) = self.v3(path) {
                let hash = found.etag.trim_matches('"');
                root["paths"][path] = json!({"serverRelativeURL": format!("/openapi/v3/{path}?hash={hash}")});
            }
        }
    }
}
