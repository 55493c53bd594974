//! Parts of the objects of an informer: a component says what it needs of a kind, and gets that without decoding an
//! object again each time it looks.
//!
//! A part is made when an object is first asked for. From then on the events of the informer keep it fresh, with the
//! object that they decoded anyway. What nobody asks for costs nothing; what was asked for costs its part until the
//! object is gone, so a part should be small.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use kube::Resource;
use parking_lot::Mutex;

use super::store::{Entry, Identity, Kept, Place, labelled};
use super::{Change, Informer};

struct Part<V> {
    identity: Identity,
    value: Arc<V>,
}

/// By namespace and name.
struct Cache<V>(HashMap<Arc<str>, HashMap<Arc<str>, Part<V>>>);

impl<V> Cache<V> {
    fn get(&self, namespace: &str, name: &str) -> Option<&Part<V>> {
        self.0.get(namespace)?.get(name)
    }

    fn remove(&mut self, namespace: &str, name: &str) {
        if let Some(names) = self.0.get_mut(namespace) {
            names.remove(name);
            if names.is_empty() {
                self.0.remove(namespace);
            }
        }
    }
}

/// A part `V` of each object `K` that was asked for.
pub struct Parts<K, V> {
    informer: Informer<K>,
    make: fn(&K) -> V,
    /// Lock order: the informer's store before this.
    cache: Arc<Mutex<Cache<V>>>,
}

/// An object whose part is not there yet, and its place among those asked for.
struct Missing<K> {
    nth: usize,
    place: Place,
    identity: Identity,
    kept: Kept<K>,
}

impl<K, V> Parts<K, V>
where
    K: Resource + 'static,
    V: Send + Sync + 'static,
{
    pub(super) fn new(informer: &Informer<K>, make: fn(&K) -> V) -> Self {
        let cache = Arc::new(Mutex::new(Cache(HashMap::new())));
        let followed = cache.clone();
        informer.subscribe_to_changes(move |change| follow(&followed, change, make));
        Parts {
            informer: informer.clone(),
            make,
            cache,
        }
    }

    pub fn get(&self, namespace: &str, name: &str) -> Option<Arc<V>> {
        let found = self.collect(|store| store.entry(namespace, name).into_iter().collect());
        found.into_iter().next()
    }

    pub fn list(&self) -> Vec<Arc<V>> {
        self.collect(|store| store.entries().collect())
    }

    /// The objects for which the informer's index `name` gave `value`.
    pub fn by_index(&self, name: &str, value: &str) -> Vec<Arc<V>> {
        self.collect(|store| store.entries_of_index(name, value).collect())
    }

    /// Of those, the ones whose labels are `wanted`.
    pub fn by_index_labelled(
        &self,
        name: &str,
        value: &str,
        wanted: impl Fn(Option<&BTreeMap<String, String>>) -> bool,
    ) -> Vec<Arc<V>> {
        self.collect(|store| labelled(store.entries_of_index(name, value), wanted).collect())
    }

    /// The part of an object that is at hand.
    pub fn make(&self, object: &K) -> V {
        (self.make)(object)
    }

    /// The objects of a namespace whose labels are `wanted`.
    pub fn list_labelled(
        &self,
        namespace: &str,
        wanted: impl Fn(Option<&BTreeMap<String, String>>) -> bool,
    ) -> Vec<Arc<V>> {
        self.collect(|store| labelled(store.entries_of_namespace(namespace), wanted).collect())
    }

    /// How many parts are kept.
    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        self.cache.lock().0.values().map(HashMap::len).sum()
    }

    fn collect(&self, choose: impl FnOnce(&super::Store<K>) -> Vec<Entry<'_, K>>) -> Vec<Arc<V>> {
        let mut found: Vec<Option<Arc<V>>> = Vec::new();
        let mut missing: Vec<Missing<K>> = Vec::new();
        {
            let store = self.informer.shared.store.read();
            let cache = self.cache.lock();
            for (namespace, name, slot) in choose(&store) {
                let known = cache.get(namespace, name);
                match known.filter(|part| part.identity == slot.identity) {
                    Some(part) => found.push(Some(part.value.clone())),
                    None => {
                        missing.extend(slot.kept().map(|kept| Missing {
                            nth: found.len(),
                            place: (namespace.clone(), name.clone()),
                            identity: slot.identity,
                            kept,
                        }));
                        found.push(None);
                    }
                }
            }
        }
        // Without a lock: this is where objects are decoded.
        let mut made = Vec::with_capacity(missing.len());
        for Missing {
            nth,
            place,
            identity,
            kept,
        } in missing
        {
            if let Some(object) = self.informer.shared.thaw(kept) {
                let value = Arc::new((self.make)(&object));
                found[nth] = Some(value.clone());
                made.push((place, Part { identity, value }));
            }
        }
        self.keep(made);
        found.into_iter().flatten().collect()
    }

    /// Keeps what was made, unless the object has changed or gone meanwhile: then nobody would ever correct it.
    fn keep(&self, made: Vec<(Place, Part<V>)>) {
        if made.is_empty() {
            return;
        }
        let store = self.informer.shared.store.read();
        let mut cache = self.cache.lock();
        for ((namespace, name), part) in made {
            let present = store.entry(&namespace, &name);
            if present.is_some_and(|(.., slot)| slot.identity == part.identity) {
                cache.0.entry(namespace).or_default().insert(name, part);
            }
        }
    }
}

/// Brings a part that was asked for up to date.
fn follow<K: Resource, V>(cache: &Mutex<Cache<V>>, change: &Change<K>, make: fn(&K) -> V) {
    let meta = change.object().meta();
    let (namespace, name) = (
        meta.namespace.as_deref().unwrap_or_default(),
        meta.name.as_deref().unwrap_or_default(),
    );
    match change {
        Change::Deleted { .. } => cache.lock().remove(namespace, name),
        Change::Applied { new, .. } => {
            if cache.lock().get(namespace, name).is_none() {
                return;
            }
            let part = Part {
                identity: Identity::of(meta),
                value: Arc::new(make(new)),
            };
            let mut cache = cache.lock();
            let known = cache.0.get_mut(namespace).and_then(|names| names.get_mut(name));
            if let Some(known) = known {
                *known = part;
            }
        }
    }
}
