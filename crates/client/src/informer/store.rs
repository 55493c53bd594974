//! The local copy of one kind: objects by namespace and name, and the indexes over them.
//!
//! An object in Rust's form takes several times the memory of its JSON, and the JSON that a watch in this process
//! brings is the server's own copy. So only the objects that changed last are kept decoded; of the others there is
//! the JSON, which is decoded by whoever asks for one.
//!
//! It knows nothing of lists and watches, and calls nobody but the index functions.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;

use bytes::Bytes;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::Resource;

use crate::Key;

/// An object as it is kept.
pub(super) enum Kept<K> {
    Decoded(Arc<K>),
    Raw(Bytes),
}

impl<K> Clone for Kept<K> {
    fn clone(&self) -> Self {
        match self {
            Kept::Decoded(object) => Kept::Decoded(object.clone()),
            Kept::Raw(raw) => Kept::Raw(raw.clone()),
        }
    }
}

/// What an object was before it changed.
pub(super) struct Before<K> {
    pub(super) kept: Kept<K>,
    pub(super) identity: Identity,
}

/// Digests of an object's uid and version: they tell whether it is the same one without decoding it.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) struct Identity {
    uid: u64,
    version: u64,
}

fn digest(text: Option<&str>) -> u64 {
    let mut hasher = DefaultHasher::new();
    text.hash(&mut hasher);
    hasher.finish()
}

impl Identity {
    pub(super) fn of(meta: &ObjectMeta) -> Self {
        Identity {
            uid: digest(meta.uid.as_deref()),
            version: digest(meta.resource_version.as_deref()),
        }
    }

    pub(super) fn has_uid(self, uid: &str) -> bool {
        self.uid == digest(Some(uid))
    }

    pub(super) fn is_same_object(self, other: Self) -> bool {
        self.uid == other.uid
    }
}

/// The labels of an object. Most objects of a kind share theirs with others.
type Labels = BTreeMap<String, String>;

pub(super) struct Slot<K> {
    decoded: Option<Arc<K>>,
    /// `None`: it stays decoded.
    raw: Option<Bytes>,
    /// Its place in `Store::recent`, while it is decoded and has a raw form.
    stamp: u64,
    /// What the indexes gave for it, by their number.
    values: Box<[(usize, Arc<str>)]>,
    /// One memory with all objects that have the same labels, so that they can be selected without decoding.
    labels: Option<Arc<Labels>>,
    pub(super) identity: Identity,
}

impl<K> Slot<K> {
    pub(super) fn kept(&self) -> Option<Kept<K>> {
        match (&self.decoded, &self.raw) {
            (Some(object), _) => Some(Kept::Decoded(object.clone())),
            (None, Some(raw)) => Some(Kept::Raw(raw.clone())),
            (None, None) => None,
        }
    }
}

/// Namespace and name.
pub(super) type Place = (Arc<str>, Arc<str>);

/// One object of the copy, and where it is.
pub(super) type Entry<'a, K> = (&'a Arc<str>, &'a Arc<str>, &'a Slot<K>);

struct Index<K> {
    name: &'static str,
    values: fn(&K) -> Vec<String>,
    places: HashMap<Arc<str>, BTreeSet<Place>>,
}

pub(super) struct Store<K> {
    objects: BTreeMap<Arc<str>, BTreeMap<Arc<str>, Slot<K>>>,
    indexes: Vec<Index<K>>,
    /// The objects that are decoded and need not be, by age.
    recent: BTreeMap<u64, Place>,
    next_stamp: u64,
    /// How many objects are kept decoded.
    decoded: usize,
    /// Every set of labels that some object has.
    labels: HashSet<Arc<Labels>>,
}

impl<K: Resource> Store<K> {
    pub(super) fn new(decoded: usize) -> Self {
        Store {
            objects: BTreeMap::new(),
            indexes: Vec::new(),
            recent: BTreeMap::new(),
            next_stamp: 0,
            decoded,
            labels: HashSet::new(),
        }
    }

    /// The shared form of an object's labels.
    fn share_labels(&mut self, labels: Option<&Labels>) -> Option<Arc<Labels>> {
        let labels = labels.filter(|labels| !labels.is_empty())?;
        if let Some(known) = self.labels.get(labels) {
            return Some(known.clone());
        }
        let shared = Arc::new(labels.clone());
        self.labels.insert(shared.clone());
        Some(shared)
    }

    /// Puts the object in and answers what was there before. With a raw form it may be kept in that form alone.
    pub(super) fn insert(&mut self, object: &Arc<K>, raw: Option<Bytes>) -> Option<Before<K>> {
        let meta = object.meta();
        let (namespace, name) = (
            meta.namespace.as_deref().unwrap_or_default(),
            meta.name.as_deref().unwrap_or_default(),
        );
        let before = self.take(namespace, name);
        let (place, old) = match before {
            Some((place, slot)) => {
                let identity = slot.identity;
                (place, slot.kept().map(|kept| Before { kept, identity }))
            }
            None => {
                let namespace = match self.objects.get_key_value(namespace) {
                    Some((known, _)) => known.clone(),
                    None => namespace.into(),
                };
                ((namespace, name.into()), None)
            }
        };
        let mut values = Vec::new();
        for (nth, index) in self.indexes.iter_mut().enumerate() {
            for value in (index.values)(object) {
                values.push((nth, index.insert(&value, &place)));
            }
        }
        let labels = self.share_labels(meta.labels.as_ref());
        let stamp = self.next_stamp;
        self.next_stamp += 1;
        if raw.is_some() {
            self.recent.insert(stamp, place.clone());
        }
        let slot = Slot {
            decoded: Some(object.clone()),
            raw,
            stamp,
            values: values.into_boxed_slice(),
            labels,
            identity: Identity::of(object.meta()),
        };
        self.objects.entry(place.0).or_default().insert(place.1, slot);
        while self.recent.len() > self.decoded {
            let Some((_, place)) = self.recent.pop_first() else {
                break;
            };
            if let Some(slot) = self
                .objects
                .get_mut(&place.0)
                .and_then(|names| names.get_mut(&place.1))
            {
                slot.decoded = None;
            }
        }
        old
    }

    /// Takes an object out of everything but leaves its namespace.
    fn take(&mut self, namespace: &str, name: &str) -> Option<(Place, Slot<K>)> {
        let (known, _) = self.objects.get_key_value(namespace)?;
        let known = known.clone();
        let (name, mut slot) = self.objects.get_mut(namespace)?.remove_entry(name)?;
        let place = (known, name);
        // The last one but the set itself.
        if let Some(labels) = slot.labels.take()
            && Arc::strong_count(&labels) == 2
        {
            self.labels.remove(&labels);
        }
        self.recent.remove(&slot.stamp);
        for (nth, value) in &slot.values {
            self.indexes[*nth].remove(value, &place);
        }
        Some((place, slot))
    }

    pub(super) fn remove(&mut self, key: &Key) -> Option<Kept<K>> {
        let (place, slot) = self.take(&key.namespace, &key.name)?;
        if self.objects.get(&place.0).is_some_and(BTreeMap::is_empty) {
            self.objects.remove(&place.0);
        }
        slot.kept()
    }

    pub(super) fn get(&self, namespace: &str, name: &str) -> Option<Kept<K>> {
        self.objects.get(namespace)?.get(name)?.kept()
    }

    pub(super) fn entry(&self, namespace: &str, name: &str) -> Option<Entry<'_, K>> {
        let (namespace, names) = self.objects.get_key_value(namespace)?;
        let (name, slot) = names.get_key_value(name)?;
        Some((namespace, name, slot))
    }

    pub(super) fn entries(&self) -> impl Iterator<Item = Entry<'_, K>> {
        let all = self.objects.iter();
        all.flat_map(|(namespace, names)| names.iter().map(move |(name, slot)| (namespace, name, slot)))
    }

    pub(super) fn entries_of_namespace(&self, namespace: &str) -> impl Iterator<Item = Entry<'_, K>> {
        let all = self.objects.get_key_value(namespace).into_iter();
        all.flat_map(|(namespace, names)| names.iter().map(move |(name, slot)| (namespace, name, slot)))
    }

    /// The objects for which an index gave `value`.
    pub(super) fn entries_of_index(&self, name: &str, value: &str) -> impl Iterator<Item = Entry<'_, K>> {
        let places = self.index(name).and_then(|index| index.places.get(value));
        let places = places.into_iter().flatten();
        places.filter_map(|(namespace, name)| self.entry(namespace, name))
    }

    pub(super) fn list(&self) -> Vec<Kept<K>> {
        self.entries().filter_map(|(.., slot)| slot.kept()).collect()
    }

    pub(super) fn list_namespaced(&self, namespace: &str) -> Vec<Kept<K>> {
        let all = self.entries_of_namespace(namespace);
        all.filter_map(|(.., slot)| slot.kept()).collect()
    }

    pub(super) fn len(&self) -> usize {
        self.objects.values().map(BTreeMap::len).sum()
    }

    pub(super) fn keys(&self) -> BTreeSet<Key> {
        self.objects
            .iter()
            .flat_map(|(namespace, names)| names.keys().map(|name| Key::new(&**namespace, &**name)))
            .collect()
    }

    /// Adds an index, unless the name is taken. What is kept raw is read by `thaw`.
    pub(super) fn add_index(
        &mut self,
        name: &'static str,
        values: fn(&K) -> Vec<String>,
        thaw: impl Fn(Kept<K>) -> Option<Arc<K>>,
    ) {
        if self.indexes.iter().any(|index| index.name == name) {
            return;
        }
        let mut index = Index {
            name,
            values,
            places: HashMap::new(),
        };
        let nth = self.indexes.len();
        for (namespace, names) in &mut self.objects {
            for (name, slot) in names {
                let Some(object) = slot.kept().and_then(&thaw) else {
                    continue;
                };
                let place = (namespace.clone(), name.clone());
                let mut all = std::mem::take(&mut slot.values).into_vec();
                all.extend(
                    values(&object)
                        .iter()
                        .map(|value| (nth, index.insert(value, &place))),
                );
                slot.values = all.into_boxed_slice();
            }
        }
        self.indexes.push(index);
    }

    fn index(&self, name: &str) -> Option<&Index<K>> {
        self.indexes.iter().find(|index| index.name == name)
    }

    pub(super) fn by_index(&self, name: &str, value: &str) -> Vec<Kept<K>> {
        let all = self.entries_of_index(name, value);
        all.filter_map(|(.., slot)| slot.kept()).collect()
    }

    /// The values that an index has objects for.
    pub(super) fn index_values(&self, name: &str) -> Vec<String> {
        let index = self.index(name);
        let values = index.into_iter().flat_map(|index| index.places.keys());
        values.map(|value| value.to_string()).collect()
    }
}

/// Picks objects by their labels: a set of labels that many share is looked at once.
pub(super) fn labelled<'a, K: 'a>(
    entries: impl Iterator<Item = Entry<'a, K>>,
    wanted: impl Fn(Option<&Labels>) -> bool,
) -> impl Iterator<Item = Entry<'a, K>> {
    let mut known: HashMap<Option<*const Labels>, bool> = HashMap::new();
    entries.filter(move |(.., slot)| {
        let labels = slot.labels.as_ref();
        *known
            .entry(labels.map(Arc::as_ptr))
            .or_insert_with(|| wanted(labels.map(|labels| &**labels)))
    })
}

impl<K> Index<K> {
    /// Answers the shared form of the value.
    fn insert(&mut self, value: &str, place: &Place) -> Arc<str> {
        let value: Arc<str> = match self.places.get_key_value(value) {
            Some((known, _)) => known.clone(),
            None => value.into(),
        };
        let places = self.places.entry(value.clone()).or_default();
        places.insert(place.clone());
        value
    }

    fn remove(&mut self, value: &str, place: &Place) {
        if let Some(places) = self.places.get_mut(value) {
            places.remove(place);
            if places.is_empty() {
                self.places.remove(value);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use k8s_openapi::api::core::v1::ConfigMap;
    use serde_json::json;

    fn object(name: &str, version: u32) -> (Arc<ConfigMap>, Bytes) {
        let value = json!({"metadata": {"namespace": "ns", "name": name, "resourceVersion": version.to_string(),
            "labels": {"even": version.is_multiple_of(2).to_string()}}});
        let raw = Bytes::from(value.to_string());
        (Arc::new(serde_json::from_value(value).unwrap()), raw)
    }

    fn by_even(object: &ConfigMap) -> Vec<String> {
        object
            .metadata
            .labels
            .iter()
            .flatten()
            .map(|(_, value)| value.clone())
            .collect()
    }

    fn thaw(kept: Kept<ConfigMap>) -> Option<Arc<ConfigMap>> {
        Some(match kept {
            Kept::Decoded(object) => object,
            Kept::Raw(raw) => Arc::new(serde_json::from_slice(&raw).unwrap()),
        })
    }

    /// `a@1`, in brackets if it is kept raw.
    fn show(kept: &Kept<ConfigMap>) -> String {
        let object = thaw(kept.clone()).unwrap();
        let meta = &object.metadata;
        let text = format!(
            "{}@{}",
            meta.name.as_deref().unwrap_or_default(),
            meta.resource_version.as_deref().unwrap_or_default()
        );
        match kept {
            Kept::Decoded(_) => text,
            Kept::Raw(_) => format!("[{text}]"),
        }
    }

    fn all(kept: &[Kept<ConfigMap>]) -> String {
        kept.iter().map(show).collect::<Vec<_>>().join(" ")
    }

    #[test]
    fn only_what_changed_last_is_kept_decoded() {
        let mut store = Store::<ConfigMap>::new(2);
        let put = |store: &mut Store<ConfigMap>, name: &str, version: u32| {
            let (object, raw) = object(name, version);
            let before = store.insert(&object, Some(raw));
            before.map(|before| show(&before.kept))
        };
        for (version, name) in (1..).zip(["a", "b", "c"]) {
            assert_eq!(put(&mut store, name, version), None);
        }
        assert_eq!(all(&store.list()), "[a@1] b@2 c@3");
        assert_eq!(put(&mut store, "c", 4).as_deref(), Some("c@3"));
        assert_eq!(
            all(&store.list()),
            "[a@1] b@2 c@4",
            "a change takes no second place"
        );
        assert_eq!(put(&mut store, "a", 5).as_deref(), Some("[a@1]"));
        assert_eq!(all(&store.list()), "a@5 [b@2] c@4");
        // What has no raw form stays.
        let (listed, _) = object("d", 6);
        store.insert(&listed, None);
        put(&mut store, "e", 7);
        assert_eq!(all(&store.list()), "a@5 [b@2] [c@4] d@6 e@7");
        let gone = store.remove(&Key::new("ns", "e"));
        assert_eq!(gone.as_ref().map(show).as_deref(), Some("e@7"));
        assert_eq!(store.recent.len(), 1);
        assert!(store.remove(&Key::new("ns", "e")).is_none());
        for name in ["a", "b", "c", "d"] {
            store.remove(&Key::new("ns", name));
        }
        assert!(store.objects.is_empty() && store.recent.is_empty());
    }

    #[test]
    fn labels_are_shared_and_looked_at_once() {
        let mut store = Store::<ConfigMap>::new(1);
        for (version, name) in (1..).zip(["a", "b", "c", "d"]) {
            let (object, raw) = object(name, version);
            store.insert(&object, Some(raw));
        }
        assert_eq!(store.labels.len(), 2);
        let looks = std::cell::Cell::new(0);
        let even = |labels: Option<&Labels>| {
            looks.set(looks.get() + 1);
            labels.is_some_and(|labels| labels["even"] == "true")
        };
        let found = labelled(store.entries_of_namespace("ns"), even);
        let names: Vec<&str> = found.map(|(_, name, _)| &**name).collect();
        assert_eq!((names, looks.get()), (vec!["b", "d"], 2));
        for name in ["a", "b", "c"] {
            store.remove(&Key::new("ns", name));
        }
        assert_eq!(store.labels.len(), 1, "labels that nobody has are not kept");
        let (object, raw) = object("d", 5);
        store.insert(&object, Some(raw));
        assert_eq!(store.labels.len(), 1);
    }

    #[test]
    fn raw_and_shared_are_one_memory() {
        let mut store = Store::<ConfigMap>::new(0);
        let (object, raw) = object("a", 1);
        store.insert(&object, Some(raw.clone()));
        let Some(Kept::Raw(kept)) = store.get("ns", "a") else {
            panic!("nothing is to be kept decoded");
        };
        assert_eq!(kept.as_ptr(), raw.as_ptr());
    }

    #[test]
    fn indexes_follow_whatever_the_form() {
        let mut store = Store::<ConfigMap>::new(1);
        for (version, name) in (1..).zip(["a", "b"]) {
            let (object, raw) = object(name, version);
            store.insert(&object, Some(raw));
        }
        store.add_index("even", by_even, thaw);
        store.add_index("even", |_| vec!["other".to_owned()], thaw);
        let check = |store: &Store<ConfigMap>, even: &str, odd: &str| {
            assert_eq!(all(&store.by_index("even", "true")), even);
            assert_eq!(all(&store.by_index("even", "false")), odd);
        };
        check(&store, "b@2", "[a@1]");
        let (object, raw) = object("a", 4);
        store.insert(&object, Some(raw));
        check(&store, "a@4 [b@2]", "");
        assert_eq!(store.index_values("even"), ["true"]);
        store.remove(&Key::new("ns", "b"));
        check(&store, "a@4", "");
        assert!(store.by_index("none", "true").is_empty());
    }
}
