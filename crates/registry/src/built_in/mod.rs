//! The strategy of a built-in kind: the type tables and the kind's record of functions (`skiff_api::kind`), in one
//! served version.

mod route;
mod version;

use std::borrow::Cow;
use std::sync::Arc;

use async_trait::async_trait;
use bytes::Bytes;
use serde_json::{Value, json};
use skiff_api::core::pod_gates::Features;
use skiff_api::facts;
use skiff_api::kind::{Graceful, Kind};
use skiff_cache::Field;
use skiff_meta::{GroupVersionKind, Status, field};
use skiff_schema::apply::{TypeRef, Versions};
use skiff_schema::patch::PatchType;
use skiff_schema::structural::publish::Published;
use skiff_schema::{LeftOut, TypeId, decode};

use version::ServedVersion;

use crate::body::{self, Patched, Sent};
use crate::strategy::{Findings, Route, Strategy, Unrouted, Wire};
use crate::subresources::scale;
use crate::{Codec, Resource, WriteScope, object};

const WIRE: Wire = Wire {
    typed: true,
    typed_items: false,
    full_names: false,
    post_to_name: false,
    null_rows: false,
};

/// COMPAT: upstream's plainest table of nothing has no rows, all others an empty list of them.
const PLAIN_WIRE: Wire = Wire {
    null_rows: true,
    ..WIRE
};

pub struct BuiltIn {
    facts: &'static facts::Resource,
    /// The rules of the stored version.
    rules: &'static Kind,
    /// The rules of the group that is asked, which differ for events: what is checked, and what is special to it.
    served: &'static Kind,
    /// The type that objects are stored in.
    stored_type: TypeId,
    codec: Arc<Codec>,
    /// What is on in this server of what is off by default.
    features: Features,
    wire: &'static Wire,
    own: ServedVersion,
    /// The other versions of the group in which the same objects are served.
    others: Vec<ServedVersion>,
}

impl BuiltIn {
    pub fn new(
        facts: &'static facts::Resource,
        (stored_group, stored_api_version): (&str, &str),
        stored_type: TypeId,
        codec: Arc<Codec>,
        features: Features,
    ) -> BuiltIn {
        let key = |row: &facts::Resource| row.storage.as_ref().map(|storage| storage.key);
        // COMPAT: a manager who wrote the object in another group is forgotten.
        let others = facts::resources().iter().filter(|other| {
            other.group == facts.group
                && other.plural == facts.plural
                && other.version != facts.version
                && key(other) == key(facts)
        });
        let rules = skiff_api::kind::kind(stored_group, facts.kind);
        let plain = rules.columns.iter().any(|column| column.name == "Created At");
        BuiltIn {
            facts,
            rules,
            wire: if plain { &PLAIN_WIRE } else { &WIRE },
            served: skiff_api::kind::kind(facts.group, facts.kind),
            stored_type,
            codec,
            features,
            own: ServedVersion::new(facts, stored_api_version),
            others: others
                .map(|other| ServedVersion::new(other, stored_api_version))
                .collect(),
        }
    }

    fn version(&self, api_version: &str) -> Option<&ServedVersion> {
        if api_version == self.own.api_version {
            return Some(&self.own);
        }
        self.others.iter().find(|other| other.api_version == api_version)
    }

    fn gvk(&self) -> GroupVersionKind {
        GroupVersionKind::new(self.facts.group, self.facts.version, self.facts.kind)
    }

    fn default_and_convert(&self, object: &mut Value) {
        self.default(object);
        self.own.to_stored(object);
    }

    /// Says of a document that was checked what it is.
    fn put_type(&self, object: &mut Value) {
        object::put(object, &["kind"], self.facts.kind.into());
        object::put(object, &["apiVersion"], self.own.api_version.as_str().into());
    }
}

impl Versions for BuiltIn {
    fn type_of(&self, version: &str) -> Option<TypeRef<'_>> {
        let version = self.version(version)?;
        Some(TypeRef::Object(facts::schema(), version.type_id))
    }

    fn convert<'v>(&self, object: &'v Value, version: &str) -> Option<Cow<'v, Value>> {
        let from = object.get("apiVersion").and_then(Value::as_str).unwrap_or("");
        if from == version {
            return Some(Cow::Borrowed(object));
        }
        let (from, to) = (self.version(from)?, self.version(version)?);
        let mut converted = object.clone();
        from.to_stored(&mut converted);
        to.to_served(&mut converted);
        to.normalise(&mut converted);
        Some(Cow::Owned(converted))
    }
}

#[async_trait]
impl Strategy for BuiltIn {
    fn wire(&self) -> &'static Wire {
        self.wire
    }

    fn check_route(&self, _resource: &Resource, route: &Route<'_>) -> Result<(), Unrouted> {
        Ok(route::check(self.facts, route)?)
    }

    fn deprecation(&self) -> Option<&str> {
        self.served.deprecation
    }

    fn decode(&self, sent: &Sent<'_>) -> Result<Value, Status> {
        let mut value = body::typed(sent, &self.gvk())?;
        self.default_and_convert(&mut value);
        Ok(value)
    }

    fn patch_type(&self, media_type: &str) -> Result<PatchType, Status> {
        body::patch_type(media_type)
    }

    fn patched(&self, patched: Patched<'_>) -> Result<Value, Status> {
        if !patched.strategic {
            let value = &patched.value;
            body::check_kind(&self.gvk(), value).map_err(patched.refuse)?;
            if object::at_str(value, &["apiVersion"]).is_empty()
                && !object::at_str(value, &["kind"]).is_empty()
            {
                return without_version(patched);
            }
        }
        let mut value = body::patched_type(self.facts.type_id, patched)?;
        self.put_type(&mut value);
        self.default_and_convert(&mut value);
        Ok(value)
    }

    fn applied(&self, config: &Value, object: Value) -> Result<Value, Status> {
        let checked = decode::check(facts::schema(), self.facts.type_id, object);
        let mut value = checked
            .map_err(|error| {
                let facts = self.facts;
                let kind = format!("{}/{}, Kind={}", facts.group, facts.version, facts.kind);
                let error = body::restore_error(&error.to_string());
                Status::failure(
                    500,
                    "",
                    format!(
                        "failed to convert new object ({}/{}; {kind}) to proper version: unable to convert unstructured object to {kind}: {error}",
                        object::namespace(config),
                        object::name(config),
                    ),
                )
            })?
            .value;
        self.put_type(&mut value);
        self.default_and_convert(&mut value);
        Ok(value)
    }

    fn default(&self, object: &mut Value) {
        (self.rules.default)(self.facts.version, object);
    }

    async fn shown(&self, object: &Value) -> Result<Value, Status> {
        Ok(self.presented(object).into_owned())
    }

    async fn taken_back(&self, object: Value, _current: Option<&Value>) -> Result<Value, Status> {
        let (api_version, kind) = (
            object::at_str(&object, &["apiVersion"]),
            object::at_str(&object, &["kind"]),
        );
        if api_version != self.own.api_version || kind != self.facts.kind {
            return Err(Status::internal(format_args!(
                "{api_version}, Kind={kind} is not {}, Kind={}",
                self.own.api_version, self.facts.kind
            )));
        }
        let checked = decode::check(facts::schema(), self.facts.type_id, object);
        let mut value = checked.map_err(Status::internal)?.value;
        self.default_and_convert(&mut value);
        Ok(value)
    }

    fn check_mutated(&self, object: &Value) -> Result<(), Status> {
        let checked = decode::check(facts::schema(), self.facts.type_id, object.clone());
        match checked.map(|checked| checked.strict_errors) {
            Ok(strict) if !strict.is_empty() => {
                Err(Status::internal(decode::strict_decoding_message(&strict)))
            }
            _ => Ok(()),
        }
    }

    fn check_new(&self, _name: &str) -> Result<(), Status> {
        Ok(())
    }

    fn tracked(&self, object: &Value) -> Option<Value> {
        (self.rules.tracked)(object)
    }

    fn reset_fields(&self, subresource: &str) -> &'static [&'static [&'static str]] {
        self.served.resets(subresource)
    }

    fn part(&self, subresource: &str) -> Option<WriteScope> {
        let part = self.served.parts.iter().find(|part| part.name == subresource)?;
        Some(WriteScope::Other {
            prepare: part.prepare,
            validate: part.validate,
        })
    }

    fn keeps_requester(&self) -> bool {
        self.served.keeps_requester
    }

    fn has_status_table(&self) -> bool {
        self.served.status_table
    }

    fn begin_create(&self, object: &mut Value) {
        self.rules.begin_create_with(object, self.features);
    }

    fn begin_update(&self, new: &mut Value, old: &Value) {
        self.rules.begin_update_with(new, old, self.features);
    }

    fn begin_status_update(&self, new: &mut Value, old: &Value) {
        self.rules.begin_status_update(new, old);
    }

    fn check_create(&self, object: &Value) -> Vec<field::Error> {
        self.served.check_create(object, self.facts.namespaced)
    }

    fn check_update(&self, new: &Value, old: &Value, part: &WriteScope) -> Findings {
        let namespaced = self.facts.namespaced;
        Findings::from(match part {
            WriteScope::Main => self.served.check_update(new, old, namespaced),
            WriteScope::Status => self.served.check_status_update(new, old, namespaced),
            WriteScope::Other { validate, .. } => self.served.shown(validate(new, old)),
        })
    }

    fn warnings(&self, new: &Value, old: Option<&Value>) -> Vec<String> {
        (self.rules.warnings)(new, old)
    }

    fn allows_create_on_update(&self) -> bool {
        self.rules.allow_create_on_update
    }

    fn allows_unconditional_update(&self) -> bool {
        self.rules.allow_unconditional_update
    }

    fn graceful(&self, object: &Value, requested: Option<i64>) -> Graceful {
        (self.rules.graceful)(object, requested)
    }

    fn normalise(&self, object: &mut Value) {
        skiff_schema::normalise(facts::schema(), self.stored_type, object);
    }

    fn normalise_sent(&self, object: &mut Value) -> Vec<LeftOut> {
        skiff_schema::normalise_sent(facts::schema(), self.stored_type, object)
    }

    fn normalise_served(&self, object: &mut Value) {
        self.own.normalise(object);
    }

    fn never_written(&self, object: &mut Value) {
        (self.served.never_written)(object);
    }

    fn to_stored(&self, object: &mut Value) {
        self.own.to_stored(object);
    }

    fn to_served(&self, object: &mut Value) {
        self.own.to_served(object);
    }

    fn served<'v>(&self, object: &'v Value) -> Cow<'v, Value> {
        if self.own.is_stored() {
            return Cow::Borrowed(object);
        }
        self.presented(object)
    }

    fn presented<'v>(&self, object: &'v Value) -> Cow<'v, Value> {
        let mut served = object.clone();
        self.own.to_served(&mut served);
        self.own.normalise(&mut served);
        Cow::Owned(served)
    }

    fn converts_elsewhere(&self) -> bool {
        false
    }

    async fn serve(&self, objects: Vec<Value>) -> Result<Vec<Value>, Status> {
        Ok(objects)
    }

    async fn serve_one(&self, _object: &mut Value) -> Result<(), Status> {
        Ok(())
    }

    async fn keep(&self, _object: &mut Value) -> Result<Option<Value>, Status> {
        Ok(None)
    }

    fn answered(&self, _kept: Option<&Value>, object: Value) -> Result<Value, Status> {
        Ok(object)
    }

    fn read(&self, _key: &str, value: Bytes, revision: i64) -> Result<Bytes, String> {
        self.codec.to_json(value, revision)
    }

    fn read_value(&self, _key: &str, value: Bytes, revision: i64) -> Result<Value, String> {
        self.codec.decode_at(&value, revision)
    }

    fn revision(&self) -> i64 {
        0
    }

    fn cache_fields(&self) -> Vec<Field> {
        let fields = (self.rules.selectable)(&json!({})).into_iter();
        let fields = fields.map(|(name, default)| {
            let mut field = Field::new(name).default(default);
            if let Some((_, paths)) = self.rules.field_paths.iter().find(|(of, _)| *of == name) {
                field.paths = paths.iter().map(|path| (*path).into()).collect();
            }
            match self.rules.indexed_fields.contains(&name) {
                true => field.indexed(),
                false => field,
            }
        });
        fields.collect()
    }

    fn selectable(&self) -> Vec<&str> {
        let all = (self.rules.selectable)(&json!({})).into_iter();
        all.map(|(name, _)| name)
            .filter(|name| !self.served.hidden_fields.contains(name))
            .collect()
    }

    fn stored_field(&self, name: &str) -> Option<&'static str> {
        let mut fields = self.served.stored_fields.iter();
        fields
            .find(|(served, _)| *served == name)
            .map(|(_, stored)| *stored)
    }

    fn selects_namespace(&self) -> bool {
        !self.served.hidden_fields.contains(&"metadata.namespace")
    }

    fn unknown_field(&self, label: &str) -> String {
        (self.served.unknown_field)(self.facts.version, label)
    }

    fn list_kind(&self) -> Cow<'_, str> {
        Cow::Owned(format!("{}List", self.facts.kind))
    }

    fn go_type(&self) -> Cow<'_, str> {
        // The group's first word and the kind.
        let group = match self.facts.group {
            "" | "events.k8s.io" => "core",
            group => group.split('.').next().unwrap_or(group),
        };
        Cow::Owned(format!("*{group}.{}", self.facts.kind))
    }

    fn columns(&self) -> Value {
        let columns = self.rules.columns.iter().map(|column| {
            json!({"name": column.name, "type": column.kind, "format": column.format,
                "description": skiff_api::column_description(self.rules.kind, column.name), "priority": column.priority})
        });
        Value::Array(columns.collect())
    }

    fn row(&self, object: &Value, now: i64) -> Vec<Value> {
        (self.rules.row)(object, now)
    }

    fn published(&self) -> Option<Published<'_>> {
        None
    }

    fn scale(&self, object: &Value) -> Result<Value, Status> {
        Ok(scale::scale_of(object))
    }

    fn put_scale(&self, object: &Value, scale: &Value) -> Result<Value, Status> {
        scale::apply_scale(object, scale)
    }

    fn replicas(&self) -> Vec<&str> {
        vec!["spec", "replicas"]
    }

    fn scale_columns(&self) -> Value {
        scale::columns()
    }
}

/// COMPAT: a document without a version is read as upstream's internal type, which knows none of its fields by these
/// names: not even the object's name is found.
fn without_version(patched: Patched<'_>) -> Result<Value, Status> {
    let mut found = patched.strict;
    let fields = patched
        .value
        .as_object()
        .into_iter()
        .flat_map(|object| object.keys());
    found.extend(
        fields
            .filter(|key| !matches!(key.as_str(), "kind" | "apiVersion"))
            .map(|key| format!("unknown field {}", field::quote(key))),
    );
    body::report_strict(patched.context, patched.validation, &found, |message| {
        (patched.refuse)(message.to_string())
    })?;
    Ok(Value::Null)
}
