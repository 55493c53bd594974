//! What the registry asks of a resource that was defined at run time: the same questions that a built-in
//! kind answers by its record of functions (`skiff_api::kind`). Every object that passes here is in the
//! version that is served, but for what `read` gets from the store.

use async_trait::async_trait;
use bytes::Bytes;
use serde_json::Value;
use skiff_api::object_meta;
use skiff_cache::{Field, Unreadable};
use skiff_meta::{Status, field};
use skiff_schema::apply::TypeRef;
use skiff_store::KeyValue;

use crate::{Resource, WriteScope, encode, object};

/// What the rules say of a change.
#[derive(Debug, Default)]
pub struct Findings {
    pub errors: Vec<field::Error>,
    /// What was wrong before and did not change: it is let through.
    pub warnings: Vec<String>,
}

impl From<Vec<field::Error>> for Findings {
    fn from(errors: Vec<field::Error>) -> Findings {
        Findings {
            errors,
            warnings: Vec::new(),
        }
    }
}

#[async_trait]
pub trait Custom: Send + Sync {
    fn prepare_create(&self, object: &mut Value);
    fn prepare_update(&self, new: &mut Value, old: &Value);
    fn prepare_status_update(&self, new: &mut Value, old: &Value);

    /// The rules of an object beside its metadata, after what was found there.
    fn validate(&self, object: &Value, found: Vec<field::Error>) -> Vec<field::Error>;
    fn validate_update(&self, new: &Value, old: &Value) -> Findings;
    fn validate_status_update(&self, new: &Value, old: &Value) -> Findings;

    /// Field selectors beyond name and namespace.
    fn fields(&self) -> Vec<Field>;

    /// The column definitions of the Table answer.
    fn columns(&self) -> Value;
    fn row(&self, object: &Value, now: i64) -> Vec<Value>;

    /// Makes a stored value what clients read: pruned and defaulted by the schema of today.
    fn read(&self, key: &str, stored: Bytes) -> Result<Bytes, String>;

    /// Completes an object as it was just written with what a read of it would add.
    fn complete(&self, object: &mut Value);

    /// Whether another version of an object is more than another `apiVersion`.
    fn converts_elsewhere(&self) -> bool;

    /// Converts objects to a version of the group, in order. Only called where it converts elsewhere.
    async fn convert(&self, objects: Vec<Value>, api_version: &str) -> Result<Vec<Value>, Status>;

    /// Drops what the schema of a version (`group/version`) does not know.
    fn prune(&self, object: &mut Value, api_version: &str);

    /// Grows with the definition: of two caches of one storage the newer stays.
    fn revision(&self) -> i64;

    /// Warnings of a write; `old` is there on update.
    fn warnings(&self, new: &Value, old: Option<&Value>) -> Vec<String>;

    /// What a client is told who uses this version.
    fn deprecation(&self) -> Option<String>;

    /// The type of a version of the definition (`group/version`), as server-side apply sees it.
    fn apply_type(&self, api_version: &str) -> Option<TypeRef<'_>>;

    /// For those who know what is behind the trait.
    fn as_any(&self) -> &dyn std::any::Any;
}

impl Resource {
    pub fn begin_create(&self, object: &mut Value) {
        match &self.custom {
            None => self.rules.begin_create(object),
            Some(custom) => {
                object_meta::before_create(object);
                custom.prepare_create(object);
            }
        }
    }

    pub fn begin_update(&self, new: &mut Value, old: &Value) {
        match &self.custom {
            None => self.rules.begin_update(new, old),
            Some(custom) => {
                object_meta::before_update(new, old);
                custom.prepare_update(new, old);
            }
        }
    }

    pub fn begin_status_update(&self, new: &mut Value, old: &Value) {
        match &self.custom {
            None => self.rules.begin_status_update(new, old),
            Some(custom) => {
                object_meta::before_update(new, old);
                custom.prepare_status_update(new, old);
            }
        }
    }

    pub fn warnings(&self, new: &Value, old: Option<&Value>) -> Vec<String> {
        match &self.custom {
            None => (self.rules.warnings)(new, old),
            Some(custom) => custom.warnings(new, old),
        }
    }

    /// Whether a write without a resourceVersion overwrites.
    pub fn allows_unconditional_update(&self) -> bool {
        self.custom.is_none() && self.rules.allow_unconditional_update
    }

    pub fn check_create(&self, object: &Value) -> Vec<field::Error> {
        match &self.custom {
            None => self.checks.check_create(object, self.namespaced),
            Some(custom) => {
                let found = object_meta::validate(object, self.namespaced, self.rules.name_rule);
                custom.validate(object, found)
            }
        }
    }

    pub fn check_update(&self, new: &Value, old: &Value, part: &WriteScope) -> Findings {
        let Some(custom) = &self.custom else {
            let errors = match part {
                WriteScope::Main => self.checks.check_update(new, old, self.namespaced),
                WriteScope::Status => self.checks.check_status_update(new, old, self.namespaced),
                WriteScope::Other { validate, .. } => self.checks.shown(validate(new, old)),
            };
            return Findings::from(errors);
        };
        let found = object_meta::validate(new, self.namespaced, self.rules.name_rule);
        let mut found: Vec<field::Error> = object_meta::of_every_update(&found).collect();
        found.extend(object_meta::validate_update(new, old, self.namespaced));
        if !found.is_empty() {
            // COMPAT: upstream's strategy checks the metadata once more, and its complaints come twice.
            found.extend(object_meta::validate_update(new, old, self.namespaced));
        }
        let rest = match part {
            WriteScope::Status => custom.validate_status_update(new, old),
            _ => custom.validate_update(new, old),
        };
        found.extend(rest.errors);
        Findings {
            errors: found,
            warnings: rest.warnings,
        }
    }

    /// An object as the store has it, in the stored version.
    pub fn decode(&self, found: &KeyValue) -> Result<Value, Status> {
        self.read(found).map_err(|unreadable| {
            tracing::error!(%unreadable, "a stored object cannot be read");
            Status::internal(unreadable)
        })
    }

    /// The same; the error is about the stored value and about nothing else.
    pub(crate) fn read(&self, found: &KeyValue) -> Result<Value, Unreadable> {
        let decoded = if let Some(why) = skiff_store::unreadable(&found.value) {
            Err(why)
        } else {
            match &self.custom {
                None => self.codec.decode_at(&found.value, found.mod_revision),
                Some(custom) => custom
                    .read(&found.key, found.value.clone())
                    .and_then(|value| encode::decode_at(&value, found.mod_revision).map_err(|e| e.message)),
            }
        };
        decoded.map_err(|reason| Unreadable::new(found.key.clone(), found.mod_revision, &reason))
    }

    /// Brings objects that were read from the store into the served version.
    pub async fn serve(&self, mut values: Vec<Value>) -> Result<Vec<Value>, Status> {
        let Some(custom) = self.custom.as_ref().filter(|_| self.converts_elsewhere()) else {
            values.iter_mut().for_each(|value| self.from_stored(value));
            return Ok(values);
        };
        convert(custom.as_ref(), values, &self.api_version).await
    }

    /// Brings one object that was read from the store into the served version, in place.
    pub async fn serve_one(&self, value: &mut Value) -> Result<(), Status> {
        if self.custom.is_none() {
            return Ok(());
        }
        let mut served = self.serve(vec![std::mem::take(value)]).await?;
        *value = served.pop().unwrap_or_default();
        Ok(())
    }

    /// The form in which an object of the served version is stored.
    pub async fn keep(&self, object: &mut Value) -> Result<Option<Value>, Status> {
        let Some(custom) = &self.custom else {
            return Ok(None);
        };
        object::whole_numbers(object);
        if self.api_version == self.stored_api_version {
            return Ok(None);
        }
        let mut value = object.clone();
        if custom.converts_elsewhere() {
            let mut stored = custom.convert(vec![value], &self.stored_api_version).await?;
            return Ok(stored.pop());
        }
        object::put(
            &mut value,
            &["apiVersion"],
            Value::String(self.stored_api_version.clone()),
        );
        custom.prune(&mut value, &self.stored_api_version);
        Ok(Some(value))
    }

    /// What there is to answer of an object that is stored in the form `kept`: what a read of it would give. An object
    /// that another server converts is taken to come back as it went.
    pub fn answered(&self, kept: Option<&Value>, mut object: Value) -> Result<Value, Status> {
        let Some(custom) = &self.custom else {
            return Ok(object);
        };
        let (Some(kept), false) = (kept, self.converts_elsewhere()) else {
            custom.complete(&mut object);
            return Ok(object);
        };
        let bytes = Bytes::from(kept.to_string());
        let read = custom.read("", bytes).map_err(Status::internal)?;
        let mut value = encode::decode(&read)?;
        self.from_stored(&mut value);
        Ok(value)
    }
}

/// Converts those objects that are in another version.
async fn convert(custom: &dyn Custom, mut values: Vec<Value>, to: &str) -> Result<Vec<Value>, Status> {
    let version = |value: &Value| value.get("apiVersion").and_then(Value::as_str).map(str::to_owned);
    let places: Vec<usize> = (0..values.len())
        .filter(|at| version(&values[*at]).as_deref() != Some(to))
        .collect();
    if places.is_empty() {
        return Ok(values);
    }
    let foreign = places.iter().map(|at| std::mem::take(&mut values[*at])).collect();
    for (at, value) in places.into_iter().zip(custom.convert(foreign, to).await?) {
        values[at] = value;
    }
    Ok(values)
}
