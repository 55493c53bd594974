//! The versions that managed fields may speak of.

use std::borrow::Cow;

use serde_json::Value;
use skiff_api::facts;
use skiff_meta::GroupVersion;
use skiff_schema::TypeId;
use skiff_schema::apply::{TypeRef, Versions};

use crate::{Resource, Resources};

/// The versions in which one stored resource is served.
pub struct ServedVersions<'a> {
    pub resources: &'a Resources,
    pub resource: &'a Resource,
}

impl ServedVersions<'_> {
    /// A built-in resource in another version.
    fn at(&self, api_version: &str) -> Option<&Resource> {
        if api_version == self.resource.api_version {
            return Some(self.resource);
        }
        let version = GroupVersion::parse(api_version).ok()?;
        // COMPAT: a manager who wrote the object in another group is forgotten.
        if version.group != self.resource.facts.group {
            return None;
        }
        let found = self
            .resources
            .get(&version.group, &version.version, &self.resource.plural)?;
        (found.prefix == self.resource.prefix).then_some(found)
    }
}

impl Versions for ServedVersions<'_> {
    fn type_of(&self, version: &str) -> Option<TypeRef<'_>> {
        match &self.resource.custom {
            Some(custom) => custom.apply_type(version),
            None => self.at(version).map(Resource::apply_type),
        }
    }

    fn convert<'v>(&self, object: &'v Value, version: &str) -> Option<Cow<'v, Value>> {
        let from = object.get("apiVersion").and_then(Value::as_str).unwrap_or("");
        if from == version {
            return Some(Cow::Borrowed(object));
        }
        if let Some(custom) = &self.resource.custom {
            // No webhook is asked here: what it would change of a field's name is not followed.
            custom.apply_type(version)?;
            let mut converted = object.clone();
            crate::object::put(
                &mut converted,
                &["apiVersion"],
                Value::String(version.to_string()),
            );
            return Some(Cow::Owned(converted));
        }
        let (from, to) = (self.at(from)?, self.at(version)?);
        let mut converted = object.clone();
        from.to_stored(&mut converted);
        to.from_stored(&mut converted);
        to.normalise_served(&mut converted);
        Some(Cow::Owned(converted))
    }
}

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
