//! Which old value belongs to a new one, and whether they are the same: transition rules and ratcheting rest on it.

use std::cell::OnceCell;
use std::collections::HashMap;
use std::rc::Rc;

use serde_json::{Map as JsonMap, Value as Json};

use crate::schema::Schema;

/// The keys that tell the elements of a list apart.
#[derive(Debug, PartialEq, Eq, Hash)]
pub(super) struct ListKey(Vec<String>);

/// The key of an element, if it has all of its parts and they are scalars.
pub(super) fn list_key(item: &Json, keys: &[String]) -> Option<ListKey> {
    let object = item.as_object()?;
    let part = |key: &String| match object.get(key)? {
        value @ (Json::Bool(_) | Json::Number(_) | Json::String(_)) => Some(value.to_string()),
        _ => None,
    };
    keys.iter().map(part).collect::<Option<Vec<_>>>().map(ListKey)
}

/// The elements of a list of type map, by key; the first of several with the same key counts.
pub(super) fn by_key<'a>(schema: &Schema, items: &'a [Json]) -> Option<HashMap<ListKey, &'a Json>> {
    let is_map_list = schema.kind == "array" && schema.list_type.as_deref() == Some("map");
    if !is_map_list || schema.list_map_keys.is_empty() {
        return None;
    }
    let mut keyed = HashMap::new();
    for item in items {
        if let Some(key) = list_key(item, &schema.list_map_keys) {
            keyed.entry(key).or_insert(item);
        }
    }
    Some(keyed)
}

/// A value with the one it replaces. Whether they are equal is found out when asked, once.
#[derive(Debug)]
pub(super) struct Pair<'a> {
    new: &'a Json,
    old: &'a Json,
    schema: &'a Schema,
    equal: OnceCell<bool>,
    keyed: OnceCell<Option<HashMap<ListKey, &'a Json>>>,
}

impl<'a> Pair<'a> {
    fn new(new: &'a Json, old: &'a Json, schema: &'a Schema) -> Rc<Self> {
        Rc::new(Self {
            new,
            old,
            schema,
            equal: OnceCell::new(),
            keyed: OnceCell::new(),
        })
    }

    fn key(&self, name: &str) -> Option<Rc<Self>> {
        let (new, old) = (self.new.as_object()?.get(name)?, self.old.as_object()?.get(name)?);
        let schema = match self.schema.property(name) {
            Some(schema) => schema,
            None => self.schema.additional_schema()?,
        };
        Some(Self::new(new, old, schema))
    }

    /// The element at a position of the new list, with the old element that has the same keys.
    fn index(&self, index: usize) -> Option<Rc<Self>> {
        let (new, old) = (self.new.as_array()?, self.old.as_array()?);
        let items = self.schema.items.as_ref()?;
        let keyed = self.keyed.get_or_init(|| by_key(self.schema, old)).as_ref()?;
        let item = new.get(index)?;
        let before = keyed.get(&list_key(item, &self.schema.list_map_keys)?)?;
        Some(Self::new(item, before, items))
    }

    fn is_equal(&self) -> bool {
        *self.equal.get_or_init(|| match (self.new, self.old) {
            (Json::Array(new), Json::Array(old)) => {
                if new.len() != old.len() {
                    return false;
                }
                let keyed = self.keyed.get_or_init(|| by_key(self.schema, old));
                if keyed.is_none() || self.schema.items.is_none() {
                    return new == old;
                }
                (0..new.len()).all(|index| self.index(index).is_some_and(|pair| pair.is_equal()))
            }
            (Json::Object(new), Json::Object(old)) => self.objects_equal(new, old),
            (new, old) => new == old,
        })
    }

    /// Fields that the schema does not describe make objects differ.
    fn objects_equal(&self, new: &JsonMap<String, Json>, old: &JsonMap<String, Json>) -> bool {
        new.len() == old.len()
            && new
                .keys()
                .all(|name| self.key(name).is_some_and(|pair| pair.is_equal()))
    }
}

/// Where validation is in the old object, if it has a counterpart there.
#[derive(Debug, Clone, Default)]
pub(super) struct Correlation<'a> {
    current: Option<Rc<Pair<'a>>>,
    /// The nearest value above that has a counterpart.
    parent: Option<Rc<Pair<'a>>>,
}

impl<'a> Correlation<'a> {
    pub fn root(new: &'a Json, old: Option<&'a Json>, schema: &'a Schema) -> Self {
        Self {
            current: old.map(|old| Pair::new(new, old, schema)),
            parent: None,
        }
    }

    /// Whether findings here were there before: the value, or one that holds it, did not change.
    pub fn is_unchanged(&self) -> bool {
        match (&self.current, &self.parent) {
            (Some(pair), _) | (None, Some(pair)) => pair.is_equal(),
            (None, None) => false,
        }
    }

    pub fn key(&self, name: &str) -> Self {
        let Some(current) = &self.current else {
            return self.clone();
        };
        // Both versions were converted to the same type, so a change of these cannot be seen.
        if self.parent.is_none() && matches!(name, "apiVersion" | "kind") {
            return Self::default();
        }
        Self {
            current: current.key(name),
            parent: Some(current.clone()),
        }
    }

    pub fn index(&self, index: usize) -> Self {
        let Some(current) = &self.current else {
            return self.clone();
        };
        Self {
            current: current.index(index),
            parent: Some(current.clone()),
        }
    }

    /// Inside `allOf` only what holds the value counts.
    pub fn all_of(&self) -> Self {
        Self {
            current: None,
            parent: self.parent.clone(),
        }
    }
}
