//! The local copy of one kind: objects by namespace and name, and the indexes over them.
//!
//! It knows nothing of lists and watches, and calls nobody but the index functions.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;

use kube::Resource;

use crate::Key;

struct Index<K> {
    values: fn(&K) -> Vec<String>,
    keys: HashMap<String, BTreeSet<Key>>,
}

impl<K: Resource> Index<K> {
    fn insert(&mut self, key: &Key, object: &K) {
        for value in (self.values)(object) {
            self.keys.entry(value).or_default().insert(key.clone());
        }
    }

    fn remove(&mut self, key: &Key, object: &K) {
        for value in (self.values)(object) {
            if let Some(keys) = self.keys.get_mut(&value) {
                keys.remove(key);
                if keys.is_empty() {
                    self.keys.remove(&value);
                }
            }
        }
    }
}

pub(super) struct Store<K> {
    objects: BTreeMap<String, BTreeMap<String, Arc<K>>>,
    indexes: HashMap<&'static str, Index<K>>,
}

impl<K> Default for Store<K> {
    fn default() -> Self {
        Store {
            objects: BTreeMap::new(),
            indexes: HashMap::new(),
        }
    }
}

impl<K: Resource> Store<K> {
    /// Puts the object in and answers what was there before.
    pub(super) fn insert(&mut self, object: Arc<K>) -> Option<Arc<K>> {
        let key = Key::of(&*object);
        let names = self.objects.entry(key.namespace.clone()).or_default();
        let old = names.insert(key.name.clone(), object.clone());
        for index in self.indexes.values_mut() {
            if let Some(old) = &old {
                index.remove(&key, old);
            }
            index.insert(&key, &object);
        }
        old
    }

    pub(super) fn remove(&mut self, key: &Key) -> Option<Arc<K>> {
        let names = self.objects.get_mut(&key.namespace)?;
        let old = names.remove(&key.name)?;
        if names.is_empty() {
            self.objects.remove(&key.namespace);
        }
        for index in self.indexes.values_mut() {
            index.remove(key, &old);
        }
        Some(old)
    }

    pub(super) fn get(&self, namespace: &str, name: &str) -> Option<Arc<K>> {
        self.objects.get(namespace)?.get(name).cloned()
    }

    pub(super) fn list(&self) -> Vec<Arc<K>> {
        self.objects
            .values()
            .flat_map(|names| names.values().cloned())
            .collect()
    }

    pub(super) fn list_namespaced(&self, namespace: &str) -> Vec<Arc<K>> {
        self.objects
            .get(namespace)
            .map(|names| names.values().cloned().collect())
            .unwrap_or_default()
    }

    pub(super) fn len(&self) -> usize {
        self.objects.values().map(BTreeMap::len).sum()
    }

    pub(super) fn keys(&self) -> BTreeSet<Key> {
        self.objects
            .iter()
            .flat_map(|(namespace, names)| names.keys().map(|name| Key::new(namespace.clone(), name.clone())))
            .collect()
    }

    pub(super) fn add_index(&mut self, name: &'static str, values: fn(&K) -> Vec<String>) {
        if self.indexes.contains_key(name) {
            return;
        }
        let mut index = Index {
            values,
            keys: HashMap::new(),
        };
        for object in self.objects.values().flat_map(BTreeMap::values) {
            index.insert(&Key::of(&**object), object);
        }
        self.indexes.insert(name, index);
    }

    pub(super) fn by_index(&self, name: &str, value: &str) -> Vec<Arc<K>> {
        let keys = self.indexes.get(name).and_then(|index| index.keys.get(value));
        keys.into_iter()
            .flatten()
            .filter_map(|key| self.get(&key.namespace, &key.name))
            .collect()
    }
}
