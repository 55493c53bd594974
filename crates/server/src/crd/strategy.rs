//! A version of a custom resource, as the verbs ask for it. Its objects are in the served version from the start of a
//! write to its end.

use std::borrow::Cow;

use async_trait::async_trait;
use bytes::Bytes;
use serde_json::Value;
use skiff_api::kind::Graceful;
use skiff_api::{apiextensions, object_meta};
use skiff_meta::{GroupResource, Status, field};
use skiff_registry::body::{Patched, Sent, patch_type};
use skiff_registry::{
    Field, Findings, Resource, Route, Strategy, Unrouted, Wire, WriteScope, encode, object,
};
use skiff_schema::LeftOut;
use skiff_schema::apply::{TypeRef, Versions};
use skiff_schema::patch::PatchType;
use skiff_schema::structural::publish::Published;

use super::{CustomVersion, columns, decode, scale};

const WIRE: Wire = Wire {
    typed: false,
    typed_items: true,
    full_names: true,
    post_to_name: true,
    null_rows: false,
};

const PATCHES: &str = "the body of the request was in an unknown format - accepted media types include: application/json-patch+json, application/merge-patch+json, application/apply-patch+yaml";

impl CustomVersion {
    fn is_stored(&self) -> bool {
        self.api_version == self.stored_api_version
    }

    /// What is wrong with the metadata of every object.
    fn check_metadata(&self, object: &Value) -> Vec<field::Error> {
        object_meta::validate(object, self.definition.namespaced, object_meta::dns_subdomain)
    }
}

impl Versions for CustomVersion {
    fn type_of(&self, version: &str) -> Option<TypeRef<'_>> {
        let name = version.strip_prefix(&self.definition.group)?.strip_prefix('/')?;
        Some(self.definition.version(name)?.apply().as_type())
    }

    fn convert<'v>(&self, object: &'v Value, version: &str) -> Option<Cow<'v, Value>> {
        if object.get("apiVersion").and_then(Value::as_str).unwrap_or("") == version {
            return Some(Cow::Borrowed(object));
        }
        // No webhook is asked here: what it would change of a field's name is not followed.
        self.type_of(version)?;
        let mut converted = object.clone();
        object::put(&mut converted, &["apiVersion"], version.into());
        Some(Cow::Owned(converted))
    }
}

#[async_trait]
impl Strategy for CustomVersion {
    fn wire(&self) -> &'static Wire {
        &WIRE
    }

    fn check_route(&self, resource: &Resource, route: &Route<'_>) -> Result<(), Unrouted> {
        let routed = match (resource.namespaced, route.namespace.is_empty()) {
            (false, false) => false,
            (true, true) => matches!(route.verb, "list" | "watch"),
            _ => true,
        };
        if !routed {
            return Err(Unrouted::NoPath);
        }
        let verbs: &[&str] = match route.subresource {
            "" => &resource.facts.verbs,
            name => match resource.facts.subresource(name) {
                Some(subresource) => &subresource.verbs,
                None => return Err(Status::not_found(&resource.group_resource, route.name).into()),
            },
        };
        if !verbs.contains(&route.verb) {
            return Err(Status::method_not_supported(&resource.group_resource, route.verb).into());
        }
        Ok(())
    }

    fn deprecation(&self) -> Option<&str> {
        self.version().deprecation.as_deref()
    }

    fn decode(&self, sent: &Sent<'_>) -> Result<Value, Status> {
        decode::object(self, sent)
    }

    fn patch_type(&self, media_type: &str) -> Result<PatchType, Status> {
        match patch_type(media_type) {
            // Fewer sorts than built-in kinds take; the refusal says which.
            Err(_) | Ok(PatchType::StrategicMerge) => Err(Status::unsupported_media_type(PATCHES)),
            kind => kind,
        }
    }

    fn patched(&self, patched: Patched<'_>) -> Result<Value, Status> {
        decode::patched(self, patched)
    }

    fn applied(&self, _config: &Value, object: Value) -> Result<Value, Status> {
        decode::applied(self, object)
    }

    fn default(&self, object: &mut Value) {
        skiff_schema::structural::default(object, self.schema());
    }

    async fn shown(&self, object: &Value) -> Result<Value, Status> {
        self.converted(object.clone(), &self.api_version).await
    }

    async fn taken_back(&self, mut object: Value, current: Option<&Value>) -> Result<Value, Status> {
        decode::reshape(self, &mut object).map_err(Status::internal)?;
        let api_version = current.map_or("", |current| object::at_str(current, &["apiVersion"]));
        self.converted(object, api_version).await
    }

    fn check_mutated(&self, _object: &Value) -> Result<(), Status> {
        Ok(())
    }

    fn check_new(&self, name: &str) -> Result<(), Status> {
        if !self.definition.terminating {
            return Ok(());
        }
        let (group, plural) = (&self.definition.group, &self.definition.names.plural);
        Err(Status::forbidden(
            &GroupResource::new(group.as_str(), plural.as_str()),
            name,
            "create not allowed while custom resource definition is terminating",
        ))
    }

    fn tracked(&self, _object: &Value) -> Option<Value> {
        None
    }

    fn reset_fields(&self, subresource: &str) -> &'static [&'static [&'static str]] {
        match subresource {
            "status" => &[&["metadata"], &["spec"]],
            "" if self.version().status => &[&["status"]],
            _ => &[],
        }
    }

    fn part(&self, _subresource: &str) -> Option<WriteScope> {
        None
    }

    fn keeps_requester(&self) -> bool {
        false
    }

    fn begin_create(&self, object: &mut Value) {
        object_meta::before_create(object);
        self.prepare_create(object);
    }

    fn begin_update(&self, new: &mut Value, old: &Value) {
        object_meta::before_update(new, old);
        self.prepare_update(new, old);
    }

    fn begin_status_update(&self, new: &mut Value, old: &Value) {
        object_meta::before_update(new, old);
        self.prepare_status_update(new, old);
    }

    fn check_create(&self, object: &Value) -> Vec<field::Error> {
        self.validate(object, self.check_metadata(object))
    }

    fn check_update(&self, new: &Value, old: &Value, part: &WriteScope) -> Findings {
        let namespaced = self.definition.namespaced;
        let found = self.check_metadata(new);
        let mut found: Vec<field::Error> = object_meta::of_every_update(&found).collect();
        found.extend(object_meta::validate_update(new, old, namespaced));
        if !found.is_empty() {
            // COMPAT: upstream's strategy checks the metadata once more, and its complaints come twice.
            found.extend(object_meta::validate_update(new, old, namespaced));
        }
        let rest = match part {
            WriteScope::Status => self.validate_status_update(new, old),
            _ => self.validate_update(new, old),
        };
        found.extend(rest.errors);
        Findings {
            errors: found,
            warnings: rest.warnings,
        }
    }

    fn warnings(&self, new: &Value, old: Option<&Value>) -> Vec<String> {
        apiextensions::finalizers::warnings(new, old)
    }

    fn allows_create_on_update(&self) -> bool {
        false
    }

    fn allows_unconditional_update(&self) -> bool {
        false
    }

    fn graceful(&self, _object: &Value, _requested: Option<i64>) -> Graceful {
        Graceful::Immediate
    }

    fn normalise(&self, _object: &mut Value) {}

    fn normalise_sent(&self, _object: &mut Value) -> Vec<LeftOut> {
        Vec::new()
    }

    fn normalise_served(&self, _object: &mut Value) {}

    fn never_written(&self, _object: &mut Value) {}

    fn to_stored(&self, _object: &mut Value) {}

    fn to_served(&self, object: &mut Value) {
        if self.is_stored() || self.converts_elsewhere() {
            return;
        }
        self.prune(object, &self.api_version);
        object::put(object, &["apiVersion"], self.api_version.as_str().into());
    }

    fn served<'v>(&self, object: &'v Value) -> Cow<'v, Value> {
        Cow::Borrowed(object)
    }

    fn presented<'v>(&self, object: &'v Value) -> Cow<'v, Value> {
        Cow::Borrowed(object)
    }

    fn converts_elsewhere(&self) -> bool {
        self.webhook.is_some()
    }

    async fn serve(&self, mut objects: Vec<Value>) -> Result<Vec<Value>, Status> {
        let Some(webhook) = &self.webhook else {
            objects.iter_mut().for_each(|object| self.to_served(object));
            return Ok(objects);
        };
        // Only those that are in another version.
        let own = Some(self.api_version.as_str());
        let places: Vec<usize> = (0..objects.len())
            .filter(|at| objects[*at].get("apiVersion").and_then(Value::as_str) != own)
            .collect();
        if places.is_empty() {
            return Ok(objects);
        }
        let foreign = places
            .iter()
            .map(|at| std::mem::take(&mut objects[*at]))
            .collect();
        let converted = self.ask_webhook(webhook, foreign, &self.api_version).await?;
        for (at, object) in places.into_iter().zip(converted) {
            objects[at] = object;
        }
        Ok(objects)
    }

    async fn serve_one(&self, object: &mut Value) -> Result<(), Status> {
        let mut served = self.serve(vec![std::mem::take(object)]).await?;
        *object = served.pop().unwrap_or_default();
        Ok(())
    }

    async fn keep(&self, object: &mut Value) -> Result<Option<Value>, Status> {
        object::whole_numbers(object);
        if self.is_stored() {
            return Ok(None);
        }
        let mut value = object.clone();
        if let Some(webhook) = &self.webhook {
            let stored = self.ask_webhook(webhook, vec![value], &self.stored_api_version);
            return Ok(stored.await?.pop());
        }
        object::put(
            &mut value,
            &["apiVersion"],
            self.stored_api_version.as_str().into(),
        );
        self.prune(&mut value, &self.stored_api_version);
        Ok(Some(value))
    }

    /// An object that another server converts is taken to come back as it went.
    fn answered(&self, kept: Option<&Value>, mut object: Value) -> Result<Value, Status> {
        let (Some(kept), false) = (kept, self.converts_elsewhere()) else {
            self.complete(&mut object);
            return Ok(object);
        };
        let bytes = Bytes::from(kept.to_string());
        let read = self.read("", bytes, 0).map_err(Status::internal)?;
        let mut value = encode::decode(&read)?;
        self.to_served(&mut value);
        Ok(value)
    }

    /// Pruned and defaulted by the schema of today.
    fn read(&self, _key: &str, stored: Bytes, _revision: i64) -> Result<Bytes, String> {
        let before: Value = serde_json::from_slice(&stored).map_err(|error| error.to_string())?;
        let mut value = before.clone();
        self.refresh(&mut value)?;
        if !self.converts_elsewhere() {
            object::put(
                &mut value,
                &["apiVersion"],
                self.stored_api_version.as_str().into(),
            );
        }
        if value == before {
            return Ok(stored);
        }
        serde_json::to_vec(&value)
            .map(Bytes::from)
            .map_err(|error| error.to_string())
    }

    fn read_value(&self, key: &str, stored: Bytes, revision: i64) -> Result<Value, String> {
        let bytes = self.read(key, stored, revision)?;
        encode::decode_at(&bytes, revision).map_err(|error| error.message)
    }

    fn revision(&self) -> i64 {
        self.revision
    }

    fn cache_fields(&self) -> Vec<Field> {
        // One cache serves all versions: it knows the fields of each.
        let mut all: Vec<Field> = Vec::new();
        for version in &self.definition.versions {
            for name in &version.selectable {
                if all.iter().all(|field| field.name != *name) {
                    all.push(Field::new(name.clone()));
                }
            }
        }
        all
    }

    fn selectable(&self) -> Vec<&str> {
        self.version().selectable.iter().map(String::as_str).collect()
    }

    fn stored_field(&self, _name: &str) -> Option<&'static str> {
        None
    }

    fn selects_namespace(&self) -> bool {
        true
    }

    fn unknown_field(&self, label: &str) -> String {
        format!("field label not supported: {label}")
    }

    fn list_kind(&self) -> Cow<'_, str> {
        Cow::Borrowed(&self.definition.names.list_kind)
    }

    fn go_type(&self) -> Cow<'_, str> {
        Cow::Borrowed("*unstructured.Unstructured")
    }

    fn columns(&self) -> Value {
        columns::definitions(&self.version().columns)
    }

    /// The columns read the served version.
    fn row(&self, object: &Value, now: i64) -> Vec<Value> {
        let columns = &self.version().columns;
        if self.is_stored() || self.converts_elsewhere() {
            return columns::row(columns, object, now);
        }
        let mut served = object.clone();
        self.to_served(&mut served);
        columns::row(columns, &served, now)
    }

    fn has_status_table(&self) -> bool {
        true
    }

    fn published(&self) -> Option<Published<'_>> {
        let (definition, version) = (&self.definition, self.version());
        Some(Published {
            group: &definition.group,
            version: &version.name,
            plural: &definition.names.plural,
            kind: &definition.names.kind,
            list_kind: &definition.names.list_kind,
            namespaced: definition.namespaced,
            status: version.status,
            scale: version.scale.is_some(),
            selectable: &version.selectable,
            schema: &version.published,
        })
    }

    fn scale(&self, object: &Value) -> Result<Value, Status> {
        scale::of(self, object)
    }

    fn put_scale(&self, object: &Value, scale: &Value) -> Result<Value, Status> {
        scale::apply(self, object, scale)
    }

    fn replicas(&self) -> Vec<&str> {
        let scale = self.version().scale.as_ref();
        scale::keys(scale.map_or("spec.replicas", |scale| scale.spec_replicas.as_str()))
    }

    fn scale_columns(&self) -> Value {
        scale::columns(self)
    }
}
