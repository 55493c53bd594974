//! Informers: a local copy of every object of a kind, kept fresh by one list and one watch, with
//! indexes and subscribers.
//!
//! An informer only reads. Its copy may lag behind the server, never run ahead of it, and what it hands
//! out is shared: clone before changing. Of a kind with many objects most are kept as JSON and decoded when
//! they are asked for (see `store`), so ask for what is needed: by name, by index or by label.

mod decode;
mod parts;
mod reflector;
mod store;

pub use parts::Parts;

use std::any::{Any, TypeId};
use std::collections::{BTreeMap, HashMap};
use std::ops::Deref;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, OnceLock};

use bytes::Bytes;
use futures::future::BoxFuture;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::core::{ApiResource, DynamicObject, PartialObjectMeta};
use kube::{Client, Resource};
use parking_lot::{Mutex, RwLock};
use serde::de::DeserializeOwned;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use reflector::{Reflector, Source};
use skiff_prometheus::Counter;
use store::{Before, Identity, Kept, Store, labelled};

use crate::Key;
use crate::controller::Follow;
use crate::metrics::ComponentMetrics;
use crate::writes::{Effect, Write};

/// How many objects of a kind are kept decoded: more than a node runs pods.
const DECODED: usize = 512;

/// An object of any kind with nothing but its metadata, and of that no labels and no annotations. Of what was before
/// a change, and of what a list shows, there are only the name, the uid and the version.
pub type PartialObject = PartialObjectMeta<DynamicObject>;

/// One step of an object's life as an informer saw it.
pub enum Change<K> {
    Applied { old: Option<Old<K>>, new: Arc<K> },
    Deleted { last: Arc<K> },
}

/// An object as it was before a change. It is decoded when it is looked at, and once for all subscribers.
pub struct Old<K> {
    kept: Kept<K>,
    form: Form<K>,
    decodes: Option<Arc<Counter>>,
    decoded: OnceLock<Arc<K>>,
}

impl<K: Resource> Deref for Old<K> {
    type Target = K;

    fn deref(&self) -> &K {
        self.decoded.get_or_init(|| match &self.kept {
            Kept::Decoded(object) => object.clone(),
            Kept::Raw(raw) => match self.form.decode(raw, self.decodes.as_deref()) {
                Ok(object) => object,
                // Nothing is kept that could not be decoded when it came.
                Err(error) => unreachable!("an object cannot be decoded a second time: {error}"),
            },
        })
    }
}

impl<K: DeserializeOwned> From<Arc<K>> for Old<K> {
    fn from(object: Arc<K>) -> Self {
        Old {
            kept: Kept::Decoded(object),
            form: Form {
                decode: decode::decode,
                transform: |_| {},
                identity_only: false,
                is_part: false,
            },
            decodes: None,
            decoded: OnceLock::new(),
        }
    }
}

impl<K> Change<K> {
    /// The newest known state of the object.
    pub fn object(&self) -> &Arc<K> {
        match self {
            Change::Applied { new, .. } => new,
            Change::Deleted { last } => last,
        }
    }
}

/// A subscriber, until its scope ends.
struct Handler<K> {
    scope: CancellationToken,
    call: Call<K>,
}

type Call<K> = Box<dyn Fn(&Change<K>) + Send + Sync>;

pub(crate) struct Shared<K> {
    /// Lock order: `handlers` before `store`. Whoever changes the store holds `handlers` meanwhile, so
    /// that a new subscriber sees each change exactly once: in the replay or after it.
    handlers: Mutex<Vec<Handler<K>>>,
    store: RwLock<Store<K>>,
    synced: watch::Sender<bool>,
    /// The revision up to which the copy shows everything. Raised after the subscribers were called.
    progress: watch::Sender<u64>,
    /// Resource and group; `None` if a selector leaves objects out, because then no event tells of a write
    /// to one of those.
    complete: Option<String>,
    form: Form<K>,
    /// How often an object was decoded, where that is measured.
    decodes: Option<Arc<Counter>>,
}

/// What an informer makes of the JSON it gets.
pub(crate) struct Form<K> {
    decode: fn(&[u8]) -> serde_json::Result<K>,
    transform: fn(&mut ObjectMeta),
    /// Who it is, is all that is kept.
    identity_only: bool,
    /// `K` is small, and the JSON not worth keeping.
    is_part: bool,
}

impl<K> Clone for Form<K> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<K> Copy for Form<K> {}

impl<K: Resource> Form<K> {
    fn decode(&self, raw: &[u8], decodes: Option<&Counter>) -> serde_json::Result<Arc<K>> {
        if let Some(decodes) = decodes {
            decodes.inc();
        }
        let mut object = (self.decode)(raw)?;
        (self.transform)(object.meta_mut());
        Ok(Arc::new(object))
    }
}

/// One object of a list. Of a long one most are not decoded a moment longer than it takes to look at them.
pub(crate) struct Listed<K> {
    key: Key,
    kept: Kept<K>,
}

impl<K: Resource> Shared<K> {
    fn decode(&self, raw: &[u8]) -> serde_json::Result<Arc<K>> {
        self.form.decode(raw, self.decodes.as_deref())
    }

    /// What is kept was decoded before, so this gives an object.
    fn thaw(&self, kept: Kept<K>) -> Option<Arc<K>> {
        match kept {
            Kept::Decoded(object) => Some(object),
            Kept::Raw(raw) => self.decode(&raw).ok(),
        }
    }

    fn thaw_all(&self, kept: Vec<Kept<K>>) -> Vec<Arc<K>> {
        kept.into_iter().filter_map(|kept| self.thaw(kept)).collect()
    }

    /// Everything up to `version` is in the copy.
    fn reached(&self, version: &str) {
        let Ok(version) = version.parse() else { return };
        // A new list may be older than what was watched before; whoever waits has to see it pass again.
        self.progress.send_replace(version);
    }

    /// `raw` is the object's JSON. It may be part of a larger memory, if that lives as long anyway.
    fn apply(&self, new: Arc<K>, raw: Bytes) {
        let handlers = self.handlers.lock();
        let raw = match (self.form.identity_only, self.form.is_part) {
            (true, _) => Some(identity(new.meta())),
            (_, true) => None,
            _ => Some(raw),
        };
        let before = self.store.write().insert(&new, raw);
        self.dispatch_applied(&handlers, before, new);
    }

    /// A list can show an object that was deleted and made again under its name since the last look. It is another
    /// object: subscribers hear of both lives.
    fn dispatch_applied(&self, handlers: &[Handler<K>], before: Option<Before<K>>, new: Arc<K>) {
        let mut old = None;
        if let Some(before) = before {
            if before.identity.is_same_object(Identity::of(new.meta())) {
                old = Some(Old {
                    kept: before.kept,
                    form: self.form,
                    decodes: self.decodes.clone(),
                    decoded: OnceLock::new(),
                });
            } else if let Some(last) = self.thaw(before.kept) {
                dispatch(handlers, &Change::Deleted { last });
            }
        }
        dispatch(handlers, &Change::Applied { old, new });
    }

    /// An object whose last state cannot be read is gone all the same.
    fn delete_unread(&self, key: &Key) {
        let handlers = self.handlers.lock();
        let removed = self.store.write().remove(key);
        if let Some(last) = removed.and_then(|last| self.thaw(last)) {
            dispatch(&handlers, &Change::Deleted { last });
        }
    }

    fn delete(&self, last: Arc<K>) {
        let handlers = self.handlers.lock();
        // An object that was never in the copy was already reported as gone.
        let removed = self.store.write().remove(&Key::of(&*last));
        if removed.is_some() {
            dispatch(&handlers, &Change::Deleted { last });
        }
    }

    /// The `nth` object of a list, of which `raw` is a part.
    fn listed(&self, nth: usize, raw: &[u8]) -> serde_json::Result<Listed<K>> {
        let object = self.decode(raw)?;
        let key = Key::of(&*object);
        let kept = if self.form.identity_only || self.form.is_part || nth < DECODED {
            Kept::Decoded(object)
        } else {
            Kept::Raw(Bytes::copy_from_slice(raw))
        };
        Ok(Listed { key, kept })
    }

    /// Takes a whole list as the new truth. What it lacks has been deleted while nobody was watching; what was in it and
    /// could not be decoded (`undecoded`) stays as it was last known.
    fn replace(&self, objects: Vec<Listed<K>>, undecoded: &[Key]) {
        let handlers = self.handlers.lock();
        let mut gone = self.store.read().keys();
        for key in undecoded {
            gone.remove(key);
        }
        for Listed { key, kept } in objects {
            let raw = match &kept {
                Kept::Raw(raw) => Some(raw.clone()),
                Kept::Decoded(_) => None,
            };
            let Some(new) = self.thaw(kept) else { continue };
            gone.remove(&key);
            let raw = raw.or_else(|| self.form.identity_only.then(|| identity(new.meta())));
            let before = self.store.write().insert(&new, raw);
            let identity = Identity::of(new.meta());
            if before.as_ref().is_none_or(|before| before.identity != identity) {
                self.dispatch_applied(&handlers, before, new);
            }
        }
        for key in gone {
            let removed = self.store.write().remove(&key);
            if let Some(last) = removed.and_then(|last| self.thaw(last)) {
                dispatch(&handlers, &Change::Deleted { last });
            }
        }
        self.synced.send_replace(true);
    }
}

/// Who an object is and in which version, as the JSON of an object.
fn identity(meta: &ObjectMeta) -> Bytes {
    let meta = ObjectMeta {
        namespace: meta.namespace.clone(),
        name: meta.name.clone(),
        uid: meta.uid.clone(),
        resource_version: meta.resource_version.clone(),
        ..ObjectMeta::default()
    };
    Bytes::from(serde_json::json!({ "metadata": meta }).to_string())
}

fn dispatch<K>(handlers: &[Handler<K>], change: &Change<K>) {
    for handler in handlers {
        call(handler, change);
    }
}

/// A subscriber that panics loses one change, and takes nobody down with it.
fn call<K>(handler: &Handler<K>, change: &Change<K>) {
    if handler.scope.is_cancelled() {
        return;
    }
    if let Err(panic) = catch_unwind(AssertUnwindSafe(|| (handler.call)(change))) {
        let message = skiff_supervise::panic_text(&*panic);
        tracing::error!(message, "an informer's subscriber panicked");
        skiff_supervise::failed("informer", &format!("a subscriber panicked: {message}"));
    }
}

/// A shared local copy of all objects of one kind (and selector).
pub struct Informer<K> {
    shared: Arc<Shared<K>>,
    /// How long subscribers get changes.
    scope: CancellationToken,
}

impl<K> Clone for Informer<K> {
    fn clone(&self) -> Self {
        Informer {
            shared: self.shared.clone(),
            scope: self.scope.clone(),
        }
    }
}

impl<K: Resource + 'static> Informer<K> {
    /// Waits until the first list is in.
    pub async fn synced(&self) {
        let mut synced = self.shared.synced.subscribe();
        // The sender lives in `shared`, so this ends only by a sync.
        let _ = synced.wait_for(|synced| *synced).await;
    }

    /// Whether there is such an object. It is not decoded for that.
    pub fn contains(&self, namespace: &str, name: &str) -> bool {
        self.shared.store.read().entry(namespace, name).is_some()
    }

    /// `namespace` is empty for cluster-scoped kinds.
    pub fn get(&self, namespace: &str, name: &str) -> Option<Arc<K>> {
        let kept = self.shared.store.read().get(namespace, name)?;
        self.shared.thaw(kept)
    }

    pub fn list(&self) -> Vec<Arc<K>> {
        let kept = self.shared.store.read().list();
        self.shared.thaw_all(kept)
    }

    pub fn list_namespaced(&self, namespace: &str) -> Vec<Arc<K>> {
        let kept = self.shared.store.read().list_namespaced(namespace);
        self.shared.thaw_all(kept)
    }

    /// The objects of a namespace whose labels are `wanted`. The others are not decoded for it.
    pub fn list_labelled(
        &self,
        namespace: &str,
        wanted: impl Fn(Option<&BTreeMap<String, String>>) -> bool,
    ) -> Vec<Arc<K>> {
        let kept = {
            let store = self.shared.store.read();
            let found = labelled(store.entries_of_namespace(namespace), wanted);
            found.filter_map(|(.., slot)| slot.kept()).collect()
        };
        self.shared.thaw_all(kept)
    }

    /// What [`Informer::by_index`] answers, as far as its labels are `wanted`. The others are not decoded for it.
    pub fn by_index_labelled(
        &self,
        name: &str,
        value: &str,
        wanted: impl Fn(Option<&BTreeMap<String, String>>) -> bool,
    ) -> Vec<Arc<K>> {
        let kept = {
            let store = self.shared.store.read();
            let found = labelled(store.entries_of_index(name, value), wanted);
            found.filter_map(|(.., slot)| slot.kept()).collect()
        };
        self.shared.thaw_all(kept)
    }

    pub fn len(&self) -> usize {
        self.shared.store.read().len()
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// What `make` takes of each object, decoded once for as long as the object does not change.
    pub fn parts<V: Send + Sync + 'static>(&self, make: fn(&K) -> V) -> Parts<K, V> {
        Parts::new(self, make)
    }

    /// Adds an index over what is and what will be in the copy. A name that is taken is left as it is.
    pub fn add_index(&self, name: &'static str, values: fn(&K) -> Vec<String>) {
        let thaw = |kept| self.shared.thaw(kept);
        self.shared.store.write().add_index(name, values, thaw);
    }

    /// The objects for which the index `name` gave `value`; none if there is no such index.
    pub fn by_index(&self, name: &str, value: &str) -> Vec<Arc<K>> {
        let kept = self.shared.store.read().by_index(name, value);
        self.shared.thaw_all(kept)
    }

    /// All that the index `name` gave for any object, each once.
    pub fn index_values(&self, name: &str) -> Vec<String> {
        self.shared.store.read().index_values(name)
    }

    /// As [`Informer::subscribe`], but what is there already is passed over: nothing is decoded for it.
    fn subscribe_to_changes(&self, handler: impl Fn(&Change<K>) + Send + Sync + 'static) {
        self.shared.handlers.lock().push(Handler {
            scope: self.scope.clone(),
            call: Box::new(handler),
        });
    }

    /// Calls `handler` for each present object and then for each change, in order, from the informer's
    /// task. The handler must not block and must not subscribe to the same informer.
    pub fn subscribe(&self, handler: impl Fn(&Change<K>) + Send + Sync + 'static) {
        let mut handlers = self.shared.handlers.lock();
        handlers.retain(|handler| !handler.scope.is_cancelled());
        let handler = Handler {
            scope: self.scope.clone(),
            call: Box::new(handler),
        };
        let present = self.shared.store.read().list();
        for new in present.into_iter().filter_map(|kept| self.shared.thaw(kept)) {
            call(&handler, &Change::Applied { old: None, new });
        }
        handlers.push(handler);
    }
}

impl<K: Resource + Send + Sync + 'static> Follow for Informer<K> {
    fn synced(&self) -> BoxFuture<'_, ()> {
        Box::pin(Informer::synced(self))
    }

    fn shows(&self, write: &Write) -> bool {
        if self.shared.complete.as_ref() != Some(&write.resource) {
            return true;
        }
        match &write.effect {
            Effect::Revision(revision) => *self.shared.progress.borrow() >= *revision,
            Effect::Gone { key, uid } => {
                let store = self.shared.store.read();
                let present = store.entry(&key.namespace, &key.name);
                present.is_none_or(|(.., slot)| !slot.identity.has_uid(uid))
            }
        }
    }

    fn progress(&self) -> watch::Receiver<u64> {
        self.shared.progress.subscribe()
    }
}

/// Keeps what an update needs. The server takes an update without managed fields as one that leaves them
/// alone, so a copy without them can be written back.
fn without_managed_fields(meta: &mut ObjectMeta) {
    meta.managed_fields = None;
}

fn names_and_labels(meta: &mut ObjectMeta) {
    let all = std::mem::take(meta);
    *meta = ObjectMeta {
        namespace: all.namespace,
        name: all.name,
        uid: all.uid,
        resource_version: all.resource_version,
        labels: all.labels,
        creation_timestamp: all.creation_timestamp,
        deletion_timestamp: all.deletion_timestamp,
        deletion_grace_period_seconds: all.deletion_grace_period_seconds,
        ..ObjectMeta::default()
    };
}

fn graph_only(meta: &mut ObjectMeta) {
    meta.managed_fields = None;
    meta.annotations = None;
    meta.labels = None;
}

type SharedInformers = HashMap<(TypeId, String), Box<dyn Any + Send + Sync>>;

/// One a component: whoever asks for the same kind and selector shares one list and watch.
#[derive(Clone)]
pub struct InformerFactory {
    client: Client,
    shutdown: CancellationToken,
    /// How long the informers serve whoever got them from here; shared ones live until the shutdown.
    scope: CancellationToken,
    informers: Arc<Mutex<SharedInformers>>,
    metrics: Option<Arc<ComponentMetrics>>,
}

impl InformerFactory {
    pub fn new(client: Client, shutdown: CancellationToken) -> Self {
        InformerFactory {
            client,
            scope: shutdown.clone(),
            shutdown,
            informers: Arc::default(),
            metrics: None,
        }
    }

    /// Counts how often objects are decoded, by resource. Informers of metadata are not counted: their kinds are
    /// the users'.
    pub fn measured(self, metrics: Arc<ComponentMetrics>) -> Self {
        InformerFactory {
            metrics: Some(metrics),
            ..self
        }
    }

    /// The same informers for a user that may end before them: subscriptions, and informers that are not shared, end
    /// with `scope`.
    pub fn scoped(&self, scope: CancellationToken) -> Self {
        InformerFactory {
            scope,
            ..self.clone()
        }
    }

    /// All objects of the kind, of all namespaces.
    pub fn informer<K>(&self) -> Informer<K>
    where
        K: Resource<DynamicType = ()> + DeserializeOwned + Send + Sync + 'static,
    {
        self.filtered(None, None)
    }

    pub fn filtered<K>(&self, label_selector: Option<&str>, field_selector: Option<&str>) -> Informer<K>
    where
        K: Resource<DynamicType = ()> + DeserializeOwned + Send + Sync + 'static,
    {
        let source = Source::new(K::url_path(&(), None), label_selector, field_selector);
        self.get_or_start(source, without_managed_fields, self.shutdown.clone())
    }

    /// As [`InformerFactory::filtered`] for a `K` that is itself only a part of its kind: objects are kept as `K`, and their
    /// JSON is not. For who is not in the server's process, where informers share the server's JSON, and watches many.
    /// Of the metadata there are names, labels, the version and what tells of a deletion.
    pub fn partial<K>(&self, label_selector: Option<&str>, field_selector: Option<&str>) -> Informer<K>
    where
        K: Resource<DynamicType = ()> + DeserializeOwned + Send + Sync + 'static,
    {
        let source = Source::new(K::url_path(&(), None), label_selector, field_selector).partial();
        self.get_or_start(source, names_and_labels, self.shutdown.clone())
    }

    /// All objects of the kind in one namespace.
    pub fn namespaced<K>(&self, namespace: &str, label_selector: Option<&str>) -> Informer<K>
    where
        K: Resource<DynamicType = ()> + DeserializeOwned + Send + Sync + 'static,
    {
        let source = Source::new(K::url_path(&(), Some(namespace)), label_selector, None);
        self.get_or_start(source, without_managed_fields, self.shutdown.clone())
    }

    /// The one object of a name, whether it exists or not. A role that names the object is enough to read it.
    pub fn named<K>(&self, namespace: &str, name: &str) -> Informer<K>
    where
        K: Resource<DynamicType = ()> + DeserializeOwned + Send + Sync + 'static,
    {
        let this = format!("metadata.name={name}");
        let source = Source::new(K::url_path(&(), Some(namespace)), None, Some(&this));
        self.get_or_start(source, without_managed_fields, self.shutdown.clone())
    }

    /// Only the metadata of any kind, known at run time. Not shared, because kinds come and go:
    /// `stop` ends it. `handler` sees every object; who subscribes later is shown what is kept.
    pub fn metadata(
        &self,
        resource: &ApiResource,
        stop: CancellationToken,
        handler: impl Fn(&Change<PartialObject>) + Send + Sync + 'static,
    ) -> Informer<PartialObject> {
        let url = <DynamicObject as Resource>::url_path(resource, None);
        let source = Source::new(url, None, None).metadata_only();
        let handler = Handler {
            scope: self.scope.clone(),
            call: Box::new(handler) as _,
        };
        let informer = self.start(source, graph_only, stop.clone(), vec![handler]);
        let (shutdown, done) = (self.scope.clone(), stop);
        tokio::spawn(async move {
            tokio::select! {
                _ = shutdown.cancelled() => done.cancel(),
                _ = done.cancelled() => {}
            }
        });
        informer
    }

    fn get_or_start<K>(
        &self,
        source: Source,
        transform: fn(&mut ObjectMeta),
        stop: CancellationToken,
    ) -> Informer<K>
    where
        K: Resource + DeserializeOwned + Send + Sync + 'static,
    {
        let mut informers = self.informers.lock();
        let key = (TypeId::of::<K>(), source.identity());
        if let Some(present) = informers
            .get(&key)
            .and_then(|any| any.downcast_ref::<Informer<K>>())
        {
            return Informer {
                shared: present.shared.clone(),
                scope: self.scope.clone(),
            };
        }
        let informer = self.start(source, transform, stop, Vec::new());
        informers.insert(key, Box::new(informer.clone()));
        informer
    }

    fn start<K>(
        &self,
        source: Source,
        transform: fn(&mut ObjectMeta),
        stop: CancellationToken,
        handlers: Vec<Handler<K>>,
    ) -> Informer<K>
    where
        K: Resource + DeserializeOwned + Send + Sync + 'static,
    {
        let (identity_only, is_part) = (source.is_metadata_only(), source.is_partial());
        let measured = self.metrics.as_ref().filter(|_| !identity_only);
        let decodes = measured.map(|metrics| metrics.decodes(&source.resource()));
        let shared = Arc::new(Shared {
            handlers: Mutex::new(handlers),
            store: RwLock::new(Store::new(if identity_only { 0 } else { DECODED })),
            synced: watch::Sender::new(false),
            progress: watch::Sender::new(0),
            complete: source.complete_resource(),
            form: Form {
                decode: decode::decode,
                transform,
                identity_only,
                is_part,
            },
            decodes,
        });
        let reflector = Arc::new(Reflector::new(self.client.clone(), source, shared.clone()));
        skiff_supervise::keep("informer", &stop, move || {
            let reflector = reflector.clone();
            async move { reflector.run().await }
        });
        Informer {
            shared,
            scope: self.scope.clone(),
        }
    }
}

#[cfg(test)]
mod tests;
