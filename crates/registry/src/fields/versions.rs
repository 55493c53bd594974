//! The version that managed fields of a kind with one version may speak of; resources answer by their strategy.

use std::borrow::Cow;

use serde_json::Value;
use skiff_api::facts;
use skiff_schema::TypeId;
use skiff_schema::apply::{TypeRef, Versions};

/// A kind with one version, from the built-in tables.
pub struct OneVersion<'a> {
    pub api_version: &'a str,
    pub id: TypeId,
}

impl Versions for OneVersion<'_> {
    fn type_of(&self, version: &str) -> Option<TypeRef<'_>> {
        (version == self.api_version).then(|| TypeRef::Object(facts::schema(), self.id))
    }

    fn convert<'v>(&self, object: &'v Value, version: &str) -> Option<Cow<'v, Value>> {
        (version == self.api_version).then_some(Cow::Borrowed(object))
    }
}
