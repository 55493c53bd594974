//! Informers: a local copy of every object of a kind, kept fresh by one list and one watch, with
//! indexes and subscribers.
//!
//! An informer only reads. Its copy may lag behind the server, never run ahead of it, and what it hands
//! out is shared: clone before changing.

mod reflector;
mod store;

use std::any::{Any, TypeId};
use std::collections::HashMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::core::{ApiResource, DynamicObject, PartialObjectMeta};
use kube::{Client, Resource};
use parking_lot::{Mutex, RwLock};
use serde::de::DeserializeOwned;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use reflector::{Reflector, Source};
use store::Store;

use crate::Key;

/// An object of any kind with nothing but its metadata, and of that no labels and no annotations.
pub type PartialObject = PartialObjectMeta<DynamicObject>;

/// One step of an object's life as an informer saw it.
pub enum Change<K> {
    Applied { old: Option<Arc<K>>, new: Arc<K> },
    Deleted { last: Arc<K> },
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

type Handler<K> = Box<dyn Fn(&Change<K>) + Send + Sync>;

pub(crate) struct Shared<K> {
    /// Lock order: `handlers` before `store`. Whoever changes the store holds `handlers` meanwhile, so
    /// that a new subscriber sees each change exactly once: in the replay or after it.
    handlers: Mutex<Vec<Handler<K>>>,
    store: RwLock<Store<K>>,
    synced: watch::Sender<bool>,
    transform: fn(&mut ObjectMeta),
}

impl<K: Resource> Shared<K> {
    fn prepare(&self, mut object: K) -> Arc<K> {
        (self.transform)(object.meta_mut());
        Arc::new(object)
    }

    fn apply(&self, object: K) {
        let handlers = self.handlers.lock();
        let new = self.prepare(object);
        let old = self.store.write().insert(new.clone());
        dispatch_applied(&handlers, old, new);
    }

    /// An object whose last state cannot be read is gone all the same.
    fn delete_unread(&self, key: &Key) {
        let handlers = self.handlers.lock();
        let removed = self.store.write().remove(key);
        if let Some(last) = removed {
            dispatch(&handlers, &Change::Deleted { last });
        }
    }

    fn delete(&self, object: K) {
        let handlers = self.handlers.lock();
        let last = self.prepare(object);
        // An object that was never in the copy was already reported as gone.
        if self.store.write().remove(&Key::of(&*last)).is_some() {
            dispatch(&handlers, &Change::Deleted { last });
        }
    }

    /// Takes a whole list as the new truth. What it lacks has been deleted while nobody was watching.
    fn replace(&self, objects: Vec<K>) {
        let handlers = self.handlers.lock();
        let mut gone = self.store.read().keys();
        for object in objects {
            let new = self.prepare(object);
            gone.remove(&Key::of(&*new));
            let old = self.store.write().insert(new.clone());
            let unchanged = old
                .as_ref()
                .is_some_and(|old| old.meta().resource_version == new.meta().resource_version);
            if !unchanged {
                dispatch_applied(&handlers, old, new);
            }
        }
        for key in gone {
            let removed = self.store.write().remove(&key);
            if let Some(last) = removed {
                dispatch(&handlers, &Change::Deleted { last });
            }
        }
        self.synced.send_replace(true);
    }
}

/// A list can show an object that was deleted and made again under its name since the last look. It is another
/// object: subscribers hear of both lives.
fn dispatch_applied<K: Resource>(handlers: &[Handler<K>], old: Option<Arc<K>>, new: Arc<K>) {
    let old = match old {
        Some(last) if last.meta().uid != new.meta().uid => {
            dispatch(handlers, &Change::Deleted { last });
            None
        }
        old => old,
    };
    dispatch(handlers, &Change::Applied { old, new });
}

fn dispatch<K>(handlers: &[Handler<K>], change: &Change<K>) {
    for handler in handlers {
        call(handler, change);
    }
}

/// A subscriber that panics loses one change, and takes nobody down with it.
fn call<K>(handler: &Handler<K>, change: &Change<K>) {
    if let Err(panic) = catch_unwind(AssertUnwindSafe(|| handler(change))) {
        let message = crate::workers::panic_message(&*panic);
        tracing::error!(message, "an informer's subscriber panicked");
    }
}

/// A shared local copy of all objects of one kind (and selector).
pub struct Informer<K> {
    shared: Arc<Shared<K>>,
}

impl<K> Clone for Informer<K> {
    fn clone(&self) -> Self {
        Informer {
            shared: self.shared.clone(),
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

    pub fn has_synced(&self) -> bool {
        *self.shared.synced.borrow()
    }

    /// `namespace` is empty for cluster-scoped kinds.
    pub fn get(&self, namespace: &str, name: &str) -> Option<Arc<K>> {
        self.shared.store.read().get(namespace, name)
    }

    pub fn list(&self) -> Vec<Arc<K>> {
        self.shared.store.read().list()
    }

    pub fn list_namespaced(&self, namespace: &str) -> Vec<Arc<K>> {
        self.shared.store.read().list_namespaced(namespace)
    }

    pub fn len(&self) -> usize {
        self.shared.store.read().len()
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Adds an index over what is and what will be in the copy. A name that is taken is left as it is.
    pub fn add_index(&self, name: &'static str, values: fn(&K) -> Vec<String>) {
        self.shared.store.write().add_index(name, values);
    }

    /// The objects for which the index `name` gave `value`; none if there is no such index.
    pub fn by_index(&self, name: &str, value: &str) -> Vec<Arc<K>> {
        self.shared.store.read().by_index(name, value)
    }

    /// Calls `handler` for each present object and then for each change, in order, from the informer's
    /// task. The handler must not block and must not subscribe to the same informer.
    pub fn subscribe(&self, handler: impl Fn(&Change<K>) + Send + Sync + 'static) {
        let mut handlers = self.shared.handlers.lock();
        let handler: Handler<K> = Box::new(handler);
        let present = self.shared.store.read().list();
        for new in present {
            call(&handler, &Change::Applied { old: None, new });
        }
        handlers.push(handler);
    }
}

/// Keeps what an update needs. The server takes an update without managed fields as one that leaves them
/// alone, so a copy without them can be written back.
fn without_managed_fields(meta: &mut ObjectMeta) {
    meta.managed_fields = None;
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
    informers: Arc<Mutex<SharedInformers>>,
}

impl InformerFactory {
    pub fn new(client: Client, shutdown: CancellationToken) -> Self {
        InformerFactory {
            client,
            shutdown,
            informers: Arc::default(),
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

    /// All objects of the kind in one namespace.
    pub fn namespaced<K>(&self, namespace: &str, label_selector: Option<&str>) -> Informer<K>
    where
        K: Resource<DynamicType = ()> + DeserializeOwned + Send + Sync + 'static,
    {
        let source = Source::new(K::url_path(&(), Some(namespace)), label_selector, None);
        self.get_or_start(source, without_managed_fields, self.shutdown.clone())
    }

    /// Only the metadata of any kind, known at run time. Not shared, because kinds come and go:
    /// `stop` ends it.
    pub fn metadata(&self, resource: &ApiResource, stop: CancellationToken) -> Informer<PartialObject> {
        let url = <DynamicObject as Resource>::url_path(resource, None);
        let source = Source::new(url, None, None).metadata_only();
        let informer = self.start(source, graph_only, stop.clone());
        let (shutdown, done) = (self.shutdown.clone(), stop);
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
            return present.clone();
        }
        let informer = self.start(source, transform, stop);
        informers.insert(key, Box::new(informer.clone()));
        informer
    }

    fn start<K>(&self, source: Source, transform: fn(&mut ObjectMeta), stop: CancellationToken) -> Informer<K>
    where
        K: Resource + DeserializeOwned + Send + Sync + 'static,
    {
        let shared = Arc::new(Shared {
            handlers: Mutex::new(Vec::new()),
            store: RwLock::new(Store::default()),
            synced: watch::Sender::new(false),
            transform,
        });
        let reflector = Reflector::new(self.client.clone(), source, shared.clone());
        tokio::spawn(async move {
            tokio::select! {
                _ = stop.cancelled() => {}
                _ = reflector.run() => {}
            }
        });
        Informer { shared }
    }
}

#[cfg(test)]
mod tests;
