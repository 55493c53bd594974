//! The rules of one version of a custom resource: what create and update keep, what is checked, how a stored object
//! is completed and converted.

use std::sync::Arc;

use serde_json::Value;
use skiff_api::{apiextensions, facts};
use skiff_meta::Status;
use skiff_meta::field::{self, Path};
use skiff_registry::{Findings, object};
use skiff_schema::structural::{self, Structural};

use super::convert;
use super::definition::{Definition, Version};

pub struct CustomVersion {
    pub definition: Arc<Definition>,
    /// The place of the version in the definition.
    at: usize,
    pub webhook: Option<Arc<convert::Webhook>>,
    /// The version of the definition that this was made from.
    pub revision: i64,
    /// `group/version`, as this version is served.
    pub api_version: String,
    /// As its objects are stored.
    pub stored_api_version: String,
}

impl CustomVersion {
    pub fn new(
        definition: Arc<Definition>,
        at: usize,
        webhook: Option<Arc<convert::Webhook>>,
        revision: i64,
    ) -> CustomVersion {
        let api_version = |version: &str| format!("{}/{version}", definition.group);
        CustomVersion {
            api_version: api_version(&definition.versions[at].name),
            stored_api_version: api_version(&definition.stored),
            definition,
            at,
            webhook,
            revision,
        }
    }

    pub fn version(&self) -> &Version {
        &self.definition.versions[self.at]
    }

    pub fn schema(&self) -> &Structural {
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
        let api_version = &self.api_version;
        let given = object::at_str(object, &["apiVersion"]);
        if given != api_version.as_str() {
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

    pub fn prepare_create(&self, object: &mut Value) {
        if self.version().status
            && let Some(map) = object.as_object_mut()
        {
            map.remove("status");
        }
        object::set(object, "generation", 1);
    }

    pub fn prepare_update(&self, new: &mut Value, old: &Value) {
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

    pub fn prepare_status_update(&self, new: &mut Value, old: &Value) {
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

    /// The rules of an object beside its metadata, after what was found there.
    pub fn validate(&self, object: &Value, found: Vec<field::Error>) -> Vec<field::Error> {
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

    pub fn validate_update(&self, new: &Value, old: &Value) -> Findings {
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

    pub fn validate_status_update(&self, new: &Value, old: &Value) -> Findings {
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

    /// Completes an object as it was just written with what a read of it would add.
    pub fn complete(&self, object: &mut Value) {
        // The rest had its defaults before it was written; only a status is taken away after that.
        let schema = self.schema();
        let status = schema.properties.get("status");
        if object.get("status").is_none() && status.is_some_and(|status| status.default.is_some()) {
            structural::default(object, schema);
        }
    }

    /// Drops what the schema of a version (`group/version`) does not know.
    pub fn prune(&self, object: &mut Value, api_version: &str) {
        if let Some(version) = self.definition.by_api_version(api_version) {
            structural::prune(object, version.schema(), false);
        }
    }

    /// Asks the webhook for objects in a version of the group, in order.
    pub async fn ask_webhook(
        &self,
        webhook: &convert::Webhook,
        objects: Vec<Value>,
        api_version: &str,
    ) -> Result<Vec<Value>, Status> {
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

    /// An object on its way through a write in another version of the group.
    pub async fn converted(&self, mut object: Value, api_version: &str) -> Result<Value, Status> {
        if object::at_str(&object, &["apiVersion"]) == api_version {
            return Ok(object);
        }
        match &self.webhook {
            Some(webhook) => {
                let mut all = self.ask_webhook(webhook, vec![object], api_version).await?;
                Ok(all.pop().unwrap_or_default())
            }
            None => {
                object::put(&mut object, &["apiVersion"], api_version.into());
                Ok(object)
            }
        }
    }

    /// Prunes and defaults an object of any version by the schema of that version.
    pub fn refresh(&self, value: &mut Value) -> Result<(), String> {
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
