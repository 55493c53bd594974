//! Maps: an object of the data, with or without a schema, or entries that an expression made.

use std::borrow::Cow;
use std::collections::HashMap;
use std::sync::Arc;

use serde_json::{Map as JsonMap, Value as Json};

use super::{Eval, Str, Value};
use crate::error::EvalError;
use crate::escape::{escape, unescape};
use crate::schema::Schema;

/// A key of a map: numbers are equal across their types.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) enum Key {
    Bool(bool),
    Number(i128),
    String(Arc<str>),
}

impl Key {
    /// The key that a value is, or `None` where a value cannot be one.
    pub(crate) fn of(value: &Value<'_>) -> Option<Self> {
        Some(match value {
            Value::Bool(value) => Self::Bool(*value),
            Value::Int(value) => Self::Number(i128::from(*value)),
            Value::Uint(value) => Self::Number(i128::from(*value)),
            Value::Double(value) if value.fract() == 0.0 && value.abs() < 2e19 => {
                Self::Number(*value as i128)
            }
            Value::String(text) => Self::String((&**text).into()),
            _ => return None,
        })
    }
}

/// A map value.
#[derive(Debug, Clone)]
pub struct Map<'a>(Repr<'a>);

#[derive(Debug, Clone)]
enum Repr<'a> {
    Owned(Arc<Built<'a>>),
    Json {
        object: &'a JsonMap<String, Json>,
        schema: &'a Schema,
    },
    /// Data without a schema.
    Plain(&'a JsonMap<String, Json>),
}

/// Entries in the order in which they were made, and where each key is.
#[derive(Debug, Clone, Default)]
struct Built<'a> {
    entries: Vec<(Value<'a>, Value<'a>)>,
    index: HashMap<Key, usize>,
}

impl<'a> Map<'a> {
    pub(crate) fn empty() -> Self {
        Self(Repr::Owned(Arc::default()))
    }

    pub(crate) fn json(object: &'a JsonMap<String, Json>, schema: &'a Schema) -> Self {
        Self(Repr::Json { object, schema })
    }

    pub(crate) fn plain(object: &'a JsonMap<String, Json>) -> Self {
        Self(Repr::Plain(object))
    }

    pub fn len(&self) -> usize {
        match &self.0 {
            Repr::Owned(built) => built.entries.len(),
            Repr::Json { object, .. } | Repr::Plain(object) => object.len(),
        }
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    pub(crate) fn is_built(&self) -> bool {
        !matches!(self.0, Repr::Json { .. })
    }

    pub(super) fn raw(&self) -> Option<(&'a JsonMap<String, Json>, &'a Schema)> {
        match &self.0 {
            Repr::Json { object, schema } => Some((object, schema)),
            _ => None,
        }
    }

    /// Sets an entry of a map that nobody else holds. `false` if the key was there.
    pub(crate) fn insert(&mut self, key: Value<'a>, value: Value<'a>) -> Eval<bool> {
        let Some(position) = Key::of(&key) else {
            return Err(EvalError::new(format!(
                "unsupported key type: {}",
                key.type_name()
            )));
        };
        let Repr::Owned(built) = &mut self.0 else {
            return Err(EvalError::no_such_overload());
        };
        let built = Arc::make_mut(built);
        if let Some(at) = built.index.get(&position) {
            built.entries[*at] = (key, value);
            return Ok(false);
        }
        built.index.insert(position, built.entries.len());
        built.entries.push((key, value));
        Ok(true)
    }

    pub(crate) fn remove(&mut self, key: &Value<'a>) {
        if let (Repr::Owned(built), Some(key)) = (&mut self.0, Key::of(key))
            && built.index.contains_key(&key)
        {
            let entries = std::mem::take(&mut Arc::make_mut(built).entries);
            *built = Arc::default();
            for (other, value) in entries {
                if Key::of(&other).as_ref() != Some(&key) {
                    // Keys that were in a map are keys.
                    let _ = self.insert(other, value);
                }
            }
        }
    }

    /// A copy that can be added to, whatever the map is made of.
    pub(crate) fn to_built(&self) -> Eval<Self> {
        if let Repr::Owned(_) = self.0 {
            return Ok(self.clone());
        }
        let mut copy = Self::empty();
        for key in self.keys() {
            if let Some(value) = self.find(&key)? {
                copy.insert(key, value)?;
            }
        }
        Ok(copy)
    }

    /// The value of a key, `None` where there is none.
    pub(crate) fn find(&self, key: &Value<'_>) -> Eval<Option<Value<'a>>> {
        match &self.0 {
            Repr::Owned(built) => {
                let position = Key::of(key).and_then(|key| built.index.get(&key));
                Ok(position.map(|at| built.entries[*at].1.clone()))
            }
            Repr::Json { schema, .. } => {
                let Some(name) = key.as_str() else {
                    return Err(EvalError::no_such_overload());
                };
                if schema.properties.is_some() {
                    return match unescape(name) {
                        Some(name) => self.property(&name),
                        None => Ok(None),
                    };
                }
                self.property(name)
            }
            Repr::Plain(object) => Ok(key.as_str().and_then(|name| object.get(name)).map(Value::plain)),
        }
    }

    /// The value of a property by its name in the data.
    pub(crate) fn property(&self, name: &str) -> Eval<Option<Value<'a>>> {
        let Repr::Json { object, schema } = &self.0 else {
            return self.find(&Value::string(name));
        };
        let Some(value) = object.get(name) else {
            return Ok(None);
        };
        // In an object, null is the same as absent.
        if schema.properties.is_some() && value.is_null() {
            return Ok(None);
        }
        match property_schema(schema, name) {
            Some(schema) => Value::typed(value, schema).map(Some),
            None => Ok(None),
        }
    }

    /// The keys, as expressions write them.
    pub(crate) fn keys(&self) -> Vec<Value<'a>> {
        self.iter_keys().collect()
    }

    /// The same one by one, for loops that may end early.
    pub(crate) fn iter_keys(&self) -> Box<dyn Iterator<Item = Value<'a>> + '_> {
        match &self.0 {
            Repr::Owned(built) => Box::new(built.entries.iter().map(|(key, _)| key.clone())),
            Repr::Plain(object) => Box::new(object.keys().map(|key| Value::String(Str::Borrowed(key)))),
            Repr::Json { object, schema } => {
                let known = object.keys().filter(|key| property_schema(schema, key).is_some());
                Box::new(known.map(|key| match escape(key) {
                    Some(Cow::Owned(escaped)) if schema.properties.is_some() => Value::string(escaped),
                    _ => Value::String(Str::Borrowed(key)),
                }))
            }
        }
    }
}

/// The schema for a property: declared, or that of additional properties.
pub(super) fn property_schema<'a>(schema: &'a Schema, name: &str) -> Option<&'a Schema> {
    match &schema.properties {
        Some(properties) => properties.get(name).map(|schema| &**schema),
        None if schema.embedded_resource => None,
        None => schema.additional_schema().map(|schema| &**schema),
    }
}
