//! One served version of a built-in kind: from the version that is stored, and back.

use serde_json::Value;
use skiff_api::facts;
use skiff_api::kind::{Converter, kind};
use skiff_schema::TypeId;

use crate::object;

pub(super) struct ServedVersion {
    pub(super) api_version: String,
    pub(super) type_id: TypeId,
    stored_api_version: String,
    /// Where the shape differs, and not only the name of the version.
    converter: Option<&'static Converter>,
}

impl ServedVersion {
    pub(super) fn new(facts: &facts::Resource, stored_api_version: &str) -> ServedVersion {
        ServedVersion {
            api_version: facts.api_version(),
            type_id: facts.type_id,
            stored_api_version: stored_api_version.to_owned(),
            converter: kind(facts.group, facts.kind).converter(facts.version),
        }
    }

    /// Whether it is the stored version.
    pub(super) fn is_stored(&self) -> bool {
        self.api_version == self.stored_api_version
    }

    pub(super) fn to_stored(&self, object: &mut Value) {
        if self.is_stored() {
            return;
        }
        if let Some(converter) = &self.converter {
            (converter.to_stored)(object);
        }
        object::put(object, &["apiVersion"], self.stored_api_version.as_str().into());
    }

    pub(super) fn to_served(&self, object: &mut Value) {
        if self.is_stored() {
            return;
        }
        if let Some(converter) = &self.converter {
            (converter.from_stored)(object);
            // The versions differ in what Go prints of a field that nobody set.
            self.normalise(object);
        }
        object::put(object, &["apiVersion"], self.api_version.as_str().into());
    }

    /// Gives an object the shape in which upstream would answer it.
    pub(super) fn normalise(&self, object: &mut Value) {
        skiff_schema::normalise(facts::schema(), self.type_id, object);
    }
}
