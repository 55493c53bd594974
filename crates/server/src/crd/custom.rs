//! The rules of one version of a custom resource: what create and update keep, what is checked, what can
//! be selected by, how a stored object is read.

use std::sync::Arc;

use async_trait::async_trait;
use bytes::Bytes;
use serde_json::Value;
use skiff_api::{apiextensions, facts};
use skiff_meta::Status;
use skiff_meta::field::{self, Path};
use skiff_registry::{Custom, Field, Findings, object};
use skiff_schema::apply::TypeRef;
use skiff_schema::structural::{self, Structural};

use super::definition::{Definition, Version};
use super::{columns, convert};

pub struct CustomVersion {
    pub definition: Arc<Definition>,
    /// The place of the version in the definition.
    at: usize,
    webhook: Option<Arc<convert::Webhook>>,
    /// The version of the definition that this was made from.
    revision: i64,
}

impl CustomVersion {
    pub fn new(
        definition: Arc<Definition>,
        at: usize,
        webhook: Option<Arc<convert::Webhook>>,
        revision: i64,
    ) -> CustomVersion {
        CustomVersion {
            definition,
            at,
            webhook,
            revision,
        }
    }

    pub fn version(&self) -> &Version {
        &self.definition.versions[self.at]
    }

    fn schema(&self) -> &Structural {
        self.version().schema()
    }

    /// What the kind and version of an object must be.
    fn check_type(&self, object: &Value) -> Vec<field::Error> {
        let mut errors = Vec::new();
        let kind = object::at_str(object, &["kind"]);
        if kind != self.definition.names.kind {
            let message = format!("must be {}", self.definition.names.kind);
            errors.push(field::Error::invalid(&Path::new("kind"), kind, message));
        }
        let api_version = format!("{}/{}", self.definition.group, self.version().name);
        let given = object::at_str(object, &["apiVersion"]);
        if given != api_version {
            let message = format!("must be {api_version}");
            errors.push(field::Error::invalid(&Path::new("apiVersion"), given, message));
        }
        errors
    }

    fn check_scale(&self, object: &Value, parts: &[Section]) -> Vec<field::Error> {
        let Some(scale) = &self.version().scale else {
            return Vec::new();
        };
        let mut errors = Vec::new();
        for part in parts {
            let path = match part {
                Section::Spec => &scale.spec_replicas,
                Section::Status => &scale.status_replicas,
            };
            let at = Path::new(path);
            let value = match super::scale::find(object, path) {
                Ok(None) => continue,
                Ok(Some(value)) => value,
                Err(other) => {
                    let why = format!(
                        "{path} accessor error: {} is of the type {}, expected map[string]interface{{}}",
                        super::scale::go_value(other),
                        super::scale::go_type(other)
                    );
                    errors.push(field::Error::invalid(&at, 0, why));
                    continue;
                }
            };
            match value.as_i64() {
                None => errors.push(field::Error::invalid(
                    &at,
                    0,
                    format!(
                        "{path} accessor error: {} is of the type {}, expected int64",
                        super::scale::go_value(value),
                        super::scale::go_type(value)
                    ),
                )),
                Some(n) if n < 0 => {
                    errors.push(field::Error::invalid(&at, n, "should be a non-negative integer"))
                }
                Some(n) if n > i64::from(i32::MAX) => errors.push(field::Error::invalid(
                    &at,
                    n,
                    format!("should be less than or equal to {}", i32::MAX),
                )),
                Some(_) => {}
            }
        }
        errors
    }

    /// What is not about single values of the schema.
    fn check_rest(&self, object: &Value, old: Option<&Value>, found: &mut Findings) {
        let errors = &mut found.errors;
        let schema = self.schema();
        errors.extend(apiextensions::embedded::validate(object, schema));
        if old.is_none_or(|old| structural::validate_lists(old, schema).is_empty()) {
            errors.extend(structural::validate_lists(object, schema));
        }
        let Some(rules) = self.version().rules() else {
            return;
        };
        // Rules may count on values being of their type.
        let blocking = |error: &field::Error| {
            use field::ErrorType::{NotSupported, Required, TooLong, TooMany, TypeInvalid};
            matches!(
                error.kind,
                NotSupported | Required | TooLong | TooMany | TypeInvalid
            )
        };
        if errors.iter().any(blocking) {
            errors.push(field::Error::invalid(
                &Path::root(),
                Value::Null,
                "some validation rules were not checked because the object was invalid; correct the existing errors to complete validation",
            ));
            return;
        }
        let mut budget = skiff_cel::rules::Budget::default();
        let outcome = rules.validate(&Path::root(), object, old, &mut budget);
        errors.extend(outcome.errors);
        found.warnings.extend(outcome.warnings);
    }

    /// Prunes and defaults an object of any version by the schema of that version.
    fn refresh(&self, value: &mut Value) -> Result<(), String> {
        let api_version = object::at_str(value, &["apiVersion"]).to_owned();
        let Some(version) = self.definition.by_api_version(&api_version) else {
            return Ok(());
        };
        let schema = version.schema();
        structural::prune(value, schema, false);
        structural::prune_nulls(value, schema);
        structural::coerce_metadata(facts::schema(), value, schema, true)?;
        if object::generation(value) == 0 {
            object::set(value, "generation", 1);
        }
        structural::default(value, schema);
        Ok(())
    }
}

enum Section {
    Spec,
    Status,
}

/// Whether a change is one of more than metadata.
fn differs_beside_metadata(new: &Value, old: &Value) -> bool {
    let rest = |value: &Value| -> Vec<(String, Value)> {
        let map = value.as_object().into_iter().flatten();
        map.filter(|(key, _)| *key != "metadata")
            .map(|(key, value)| (key.clone(), value.clone()))
            .collect()
    };
    rest(new) != rest(old)
}

#[async_trait]
impl Custom for CustomVersion {
    fn prepare_create(&self, object: &mut Value) {
        if self.version().status
            && let Some(map) = object.as_object_mut()
        {
            map.remove("status");
        }
        object::set(object, "generation", 1);
    }

    fn prepare_update(&self, new: &mut Value, old: &Value) {
        if self.version().status
            && let Some(map) = new.as_object_mut()
        {
            match old.get("status") {
                Some(status) => drop(map.insert("status".to_owned(), status.clone())),
                None => drop(map.remove("status")),
            }
        }
        if differs_beside_metadata(new, old) {
            object::set(new, "generation", object::generation(old) + 1);
        }
    }

    fn prepare_status_update(&self, new: &mut Value, old: &Value) {
        let (status, managed) = (
            new.get("status").cloned(),
            object::metadata(new, "managedFields").cloned(),
        );
        *new = old.clone();
        match (status, new.as_object_mut()) {
            (Some(status), Some(map)) => drop(map.insert("status".to_owned(), status)),
            (None, Some(map)) => drop(map.remove("status")),
            _ => {}
        }
        object::set(new, "managedFields", managed.unwrap_or(Value::Null));
    }

    fn validate(&self, object: &Value, found: Vec<field::Error>) -> Vec<field::Error> {
        let mut errors = found;
        let wrong = self.check_type(object);
        if !wrong.is_empty() {
            errors.extend(wrong);
            return errors;
        }
        errors.extend(structural::validate(object, self.schema(), &Path::root()));
        errors.extend(self.check_scale(object, &[Section::Spec, Section::Status]));
        let mut found = Findings::from(errors);
        self.check_rest(object, None, &mut found);
        found.errors
    }

    fn validate_update(&self, new: &Value, old: &Value) -> Findings {
        let mut errors = self.check_type(new);
        if !errors.is_empty() {
            return Findings::from(errors);
        }
        errors.extend(structural::validate_update(
            new,
            Some(old),
            self.schema(),
            &Path::root(),
        ));
        errors.extend(self.check_scale(new, &[Section::Spec, Section::Status]));
        let mut found = Findings::from(errors);
        self.check_rest(new, Some(old), &mut found);
        found
    }

    fn validate_status_update(&self, new: &Value, old: &Value) -> Findings {
        let mut errors = self.check_type(new);
        if !errors.is_empty() {
            return Findings::from(errors);
        }
        if let (Some(status), Some(schema)) = (new.get("status"), self.schema().properties.get("status")) {
            errors.extend(structural::validate_update(
                status,
                old.get("status"),
                schema,
                &Path::new("status"),
            ));
        }
        errors.extend(self.check_scale(new, &[Section::Status]));
        let mut found = Findings::from(errors);
        self.check_rest(new, Some(old), &mut found);
        found
    }

    fn fields(&self) -> Vec<Field> {
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

    fn columns(&self) -> Value {
        columns::definitions(&self.version().columns)
    }

    fn row(&self, object: &Value, now: i64) -> Vec<Value> {
        columns::row(&self.version().columns, object, now)
    }

    fn read(&self, _key: &str, stored: Bytes) -> Result<Bytes, String> {
        let before: Value = serde_json::from_slice(&stored).map_err(|error| error.to_string())?;
        let mut value = before.clone();
        self.refresh(&mut value)?;
        if !self.converts_elsewhere() {
            let api_version = format!("{}/{}", self.definition.group, self.definition.stored);
            object::put(&mut value, &["apiVersion"], Value::String(api_version));
        }
        if value == before {
            return Ok(stored);
        }
        serde_json::to_vec(&value)
            .map(Bytes::from)
            .map_err(|error| error.to_string())
    }

    fn complete(&self, object: &mut Value) {
        // The rest had its defaults before it was written; only a status is taken away after that.
        let schema = self.schema();
        let status = schema.properties.get("status");
        if object.get("status").is_none() && status.is_some_and(|status| status.default.is_some()) {
            structural::default(object, schema);
        }
    }

    fn converts_elsewhere(&self) -> bool {
        self.webhook.is_some()
    }

    async fn convert(&self, objects: Vec<Value>, api_version: &str) -> Result<Vec<Value>, Status> {
        let Some(webhook) = &self.webhook else {
            return Ok(objects);
        };
        let mut converted = webhook.convert(&self.definition, objects, api_version).await?;
        for value in &mut converted {
            let Some(version) = self.definition.by_api_version(api_version) else {
                continue;
            };
            structural::prune(value, version.schema(), false);
            structural::prune_nulls(value, version.schema());
        }
        Ok(converted)
    }

    fn prune(&self, object: &mut Value, api_version: &str) {
        if let Some(version) = self.definition.by_api_version(api_version) {
            structural::prune(object, version.schema(), false);
        }
    }

    fn revision(&self) -> i64 {
        self.revision
    }

    fn warnings(&self, new: &Value, old: Option<&Value>) -> Vec<String> {
        apiextensions::finalizers::warnings(new, old)
    }

    fn deprecation(&self) -> Option<String> {
        self.version().deprecation.clone()
    }

    fn apply_type(&self, api_version: &str) -> Option<TypeRef<'_>> {
        let name = api_version
            .strip_prefix(&self.definition.group)?
            .strip_prefix('/')?;
        Some(self.definition.version(name)?.apply().as_type())
    }

    fn as_any(&self) -> &dyn std::any::Any {
        self
    }
}
