//! The ConfigMaps and Secrets in the volumes of this node's pods, each watched by itself: the node may read only what its own
//! pods name, so there is nothing to list. ClusterTrustBundles are selected by labels, so all are watched while a pod has some.
//! A change wakes the pods that have it.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::fmt::Debug;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use futures::TryStreamExt;
use k8s_openapi::api::authentication::v1::TokenRequest;
use k8s_openapi::api::certificates::v1beta1::ClusterTrustBundle;
use k8s_openapi::api::core::v1::{ConfigMap, PersistentVolume, PersistentVolumeClaim, Pod, Secret};
use kube::api::{ListParams, WatchEvent, WatchParams};
use kube::core::NamespaceResourceScope;
use kube::{Api, Client, Resource};
use parking_lot::Mutex;
use serde::de::DeserializeOwned;
use tokio::sync::Notify;
use tokio_util::sync::{CancellationToken, DropGuard};

use crate::objects::{ApiObjects, Objects, TrustBundles, error_message};
use crate::pods;

const FIRST_PAUSE: Duration = Duration::from_millis(50);
const LAST_PAUSE: Duration = Duration::from_secs(10);

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Kind {
    ConfigMap,
    Secret,
    /// All of them; the key has no name.
    TrustBundles,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Key {
    kind: Kind,
    namespace: String,
    name: String,
}

#[derive(Clone)]
enum Object {
    ConfigMap(Arc<ConfigMap>),
    Secret(Arc<Secret>),
    TrustBundles(TrustBundles),
}

impl Object {
    fn version(&self) -> Option<String> {
        match self {
            Object::ConfigMap(map) => map.metadata.resource_version.clone(),
            Object::Secret(secret) => secret.metadata.resource_version.clone(),
            Object::TrustBundles(bundles) => Some(bundles.version.clone()),
        }
    }
}

struct Entry {
    /// The uids of the pods that have it.
    users: HashSet<String>,
    /// As last seen by the watch, which is up to date while `live`. The inner `None`: there is no such object.
    seen: Option<Option<Object>>,
    live: bool,
    /// The version that was last handed out; `None` in it for no object.
    handed: Option<Option<String>>,
    /// Ends the watch.
    _watch: DropGuard,
}

#[derive(Default)]
struct State {
    entries: HashMap<Key, Entry>,
    /// Pods whose objects have changed.
    woken: HashSet<String>,
}

pub struct Watched {
    api: ApiObjects,
    client: Client,
    /// More are fetched when a pod is looked at.
    limit: usize,
    /// A leaf lock.
    state: Arc<Mutex<State>>,
    wake: Arc<Notify>,
    shutdown: CancellationToken,
}

impl Watched {
    pub fn new(client: Client, limit: usize, shutdown: CancellationToken) -> Self {
        Watched {
            api: ApiObjects::new(client.clone()),
            client,
            limit,
            state: Arc::default(),
            wake: Arc::default(),
            shutdown,
        }
    }

    /// Waits until objects of some pods have changed. Returns the pods' uids.
    pub async fn changed(&self) -> HashSet<String> {
        loop {
            let woken = std::mem::take(&mut self.state.lock().woken);
            if !woken.is_empty() {
                return woken;
            }
            self.wake.notified().await;
        }
    }

    fn start(&self, key: &Key) -> DropGuard {
        let stop = self.shutdown.child_token();
        let follower = Follower {
            key: key.clone(),
            state: self.state.clone(),
            wake: self.wake.clone(),
        };
        let (client, stopped) = (self.client.clone(), stop.clone());
        tokio::spawn(async move {
            let following = async {
                match follower.key.kind {
                    Kind::ConfigMap => follower.run(client, Object::ConfigMap).await,
                    Kind::Secret => follower.run(client, Object::Secret).await,
                    Kind::TrustBundles => follower.run_bundles(client).await,
                }
            };
            tokio::select! {
                () = stopped.cancelled() => {}
                () = following => {}
            }
        });
        stop.drop_guard()
    }

    /// What the watch has seen, if it is up to date.
    fn current(&self, key: &Key) -> Option<Option<Object>> {
        let mut state = self.state.lock();
        let entry = state.entries.get_mut(key).filter(|entry| entry.live)?;
        let seen = entry.seen.clone()?;
        entry.handed = Some(seen.as_ref().and_then(Object::version));
        Some(seen)
    }

    /// Notes what was fetched, so that the watch wakes nobody for the same.
    fn note(&self, key: &Key, version: Option<String>) {
        if let Some(entry) = self.state.lock().entries.get_mut(key) {
            entry.handed = Some(version);
        }
    }

    /// The API does not answer: what was last seen beats nothing.
    fn last(&self, key: &Key) -> Option<Option<Object>> {
        self.state.lock().entries.get(key)?.seen.clone()
    }
}

/// The watch of one object.
struct Follower {
    key: Key,
    state: Arc<Mutex<State>>,
    wake: Arc<Notify>,
}

impl Follower {
    async fn run<K>(&self, client: Client, wrap: fn(Arc<K>) -> Object)
    where
        K: Resource<DynamicType = (), Scope = NamespaceResourceScope>
            + Clone
            + Debug
            + DeserializeOwned
            + Send
            + 'static,
    {
        let api: Api<K> = Api::namespaced(client, &self.key.namespace);
        let mut pause = FIRST_PAUSE;
        loop {
            let mut was_live = false;
            let ended = self.follow(&api, wrap, &mut was_live).await;
            pause = self.ended(ended, was_live, pause);
            tokio::time::sleep(pause).await;
        }
    }

    async fn run_bundles(&self, client: Client) {
        let api: Api<ClusterTrustBundle> = Api::all(client);
        let mut pause = FIRST_PAUSE;
        loop {
            let mut was_live = false;
            let ended = self.follow_bundles(&api, &mut was_live).await;
            pause = self.ended(ended, was_live, pause);
            tokio::time::sleep(pause).await;
        }
    }

    /// Notes the end of a watch. Returns the pause before the next one, which grows while nothing comes of it.
    fn ended(&self, ended: Result<(), kube::Error>, was_live: bool, pause: Duration) -> Duration {
        self.set_dead();
        if let Err(error) = ended {
            tracing::debug!(
                error = error_message(&error),
                name = self.key.name,
                "a watch of an object ended"
            );
        }
        if was_live {
            FIRST_PAUSE
        } else {
            (pause * 2).min(LAST_PAUSE)
        }
    }

    async fn follow<K>(
        &self,
        api: &Api<K>,
        wrap: fn(Arc<K>) -> Object,
        was_live: &mut bool,
    ) -> Result<(), kube::Error>
    where
        K: Resource<DynamicType = ()> + Clone + Debug + DeserializeOwned + Send + 'static,
    {
        let selector = format!("metadata.name={}", self.key.name);
        let listed = api.list(&ListParams::default().fields(&selector)).await?;
        let mut version = listed.metadata.resource_version.clone().unwrap_or_default();
        let found = listed.items.into_iter().next();
        self.set(found.map(|object| wrap(Arc::new(object))));
        *was_live = true;
        loop {
            let parameters = WatchParams::default().fields(&selector);
            let mut events = std::pin::pin!(api.watch(&parameters, &version).await?);
            while let Some(event) = events.try_next().await? {
                match event {
                    WatchEvent::Added(object) | WatchEvent::Modified(object) => {
                        version = object.meta().resource_version.clone().unwrap_or_default();
                        self.set(Some(wrap(Arc::new(object))));
                    }
                    WatchEvent::Deleted(object) => {
                        version = object.meta().resource_version.clone().unwrap_or_default();
                        self.set(None);
                    }
                    WatchEvent::Bookmark(bookmark) => version = bookmark.metadata.resource_version,
                    // Too old: what was missed is listed.
                    WatchEvent::Error(_) => return Ok(()),
                }
            }
            // A server that ends watches at once is not asked without a rest.
            tokio::time::sleep(FIRST_PAUSE).await;
        }
    }

    async fn follow_bundles(
        &self,
        api: &Api<ClusterTrustBundle>,
        was_live: &mut bool,
    ) -> Result<(), kube::Error> {
        let listed = api.list(&ListParams::default()).await?;
        let mut version = listed.metadata.resource_version.clone().unwrap_or_default();
        let named = |bundle: ClusterTrustBundle| (bundle.metadata.name.clone().unwrap_or_default(), bundle);
        let mut all: BTreeMap<String, ClusterTrustBundle> = listed.items.into_iter().map(named).collect();
        let set = |all: &BTreeMap<String, ClusterTrustBundle>, version: &str| {
            let bundles = TrustBundles {
                version: version.to_owned(),
                all: Arc::new(all.values().cloned().collect()),
            };
            self.set(Some(Object::TrustBundles(bundles)));
        };
        set(&all, &version);
        *was_live = true;
        loop {
            let mut events = std::pin::pin!(api.watch(&WatchParams::default(), &version).await?);
            while let Some(event) = events.try_next().await? {
                match event {
                    WatchEvent::Added(bundle) | WatchEvent::Modified(bundle) => {
                        version = bundle.metadata.resource_version.clone().unwrap_or_default();
                        let (name, bundle) = named(bundle);
                        all.insert(name, bundle);
                        set(&all, &version);
                    }
                    WatchEvent::Deleted(bundle) => {
                        version = bundle.metadata.resource_version.clone().unwrap_or_default();
                        all.remove(&named(bundle).0);
                        set(&all, &version);
                    }
                    WatchEvent::Bookmark(bookmark) => version = bookmark.metadata.resource_version,
                    // Too old: what was missed is listed.
                    WatchEvent::Error(_) => return Ok(()),
                }
            }
            // A server that ends watches at once is not asked without a rest.
            tokio::time::sleep(FIRST_PAUSE).await;
        }
    }

    fn set(&self, object: Option<Object>) {
        let mut state = self.state.lock();
        let State { entries, woken } = &mut *state;
        let Some(entry) = entries.get_mut(&self.key) else {
            return;
        };
        let version = object.as_ref().and_then(Object::version);
        let is_news = entry.handed.as_ref().is_some_and(|handed| *handed != version);
        entry.seen = Some(object);
        entry.live = true;
        if is_news {
            woken.extend(entry.users.iter().cloned());
            drop(state);
            self.wake.notify_one();
        }
    }

    fn set_dead(&self) {
        if let Some(entry) = self.state.lock().entries.get_mut(&self.key) {
            entry.live = false;
        }
    }
}

/// The key of all ClusterTrustBundles.
fn trust_bundles() -> Key {
    Key {
        kind: Kind::TrustBundles,
        namespace: String::new(),
        name: String::new(),
    }
}

/// The objects in the volumes of a pod.
fn references(pod: &Pod) -> HashSet<Key> {
    let namespace = pods::namespace(pod);
    let mut found = HashSet::new();
    let mut has_bundles = false;
    let mut add = |kind: Kind, name: &str| {
        if !name.is_empty() {
            found.insert(Key {
                kind,
                namespace: namespace.to_owned(),
                name: name.to_owned(),
            });
        }
    };
    let used = pods::used_volumes(pod);
    let volumes = pod.spec.iter().flat_map(|spec| spec.volumes.iter().flatten());
    for volume in volumes.filter(|volume| used.contains(volume.name.as_str())) {
        if let Some(map) = &volume.config_map {
            add(Kind::ConfigMap, &map.name);
        }
        if let Some(secret) = &volume.secret {
            add(Kind::Secret, secret.secret_name.as_deref().unwrap_or_default());
        }
        let projected = volume
            .projected
            .iter()
            .flat_map(|one| one.sources.iter().flatten());
        for source in projected {
            if let Some(map) = &source.config_map {
                add(Kind::ConfigMap, &map.name);
            }
            if let Some(secret) = &source.secret {
                add(Kind::Secret, &secret.name);
            }
            has_bundles |= source.cluster_trust_bundle.is_some();
        }
    }
    if has_bundles {
        found.insert(trust_bundles());
    }
    found
}

#[async_trait]
impl Objects for Watched {
    async fn config_map(&self, namespace: &str, name: &str) -> Result<Option<Arc<ConfigMap>>, String> {
        let key = Key {
            kind: Kind::ConfigMap,
            namespace: namespace.to_owned(),
            name: name.to_owned(),
        };
        let of = |object: Option<Object>| match object {
            Some(Object::ConfigMap(map)) => Some(map),
            _ => None,
        };
        if let Some(current) = self.current(&key) {
            return Ok(of(current));
        }
        match self.api.config_map(namespace, name).await {
            Ok(found) => {
                self.note(
                    &key,
                    found
                        .as_ref()
                        .and_then(|map| map.metadata.resource_version.clone()),
                );
                Ok(found)
            }
            Err(error) => self.last(&key).map(of).ok_or(error),
        }
    }

    async fn secret(&self, namespace: &str, name: &str) -> Result<Option<Arc<Secret>>, String> {
        let key = Key {
            kind: Kind::Secret,
            namespace: namespace.to_owned(),
            name: name.to_owned(),
        };
        let of = |object: Option<Object>| match object {
            Some(Object::Secret(secret)) => Some(secret),
            _ => None,
        };
        if let Some(current) = self.current(&key) {
            return Ok(of(current));
        }
        match self.api.secret(namespace, name).await {
            Ok(found) => {
                let version = found
                    .as_ref()
                    .and_then(|one| one.metadata.resource_version.clone());
                self.note(&key, version);
                Ok(found)
            }
            Err(error) => self.last(&key).map(of).ok_or(error),
        }
    }

    async fn trust_bundles(&self) -> Result<TrustBundles, String> {
        let key = trust_bundles();
        let of = |object: Option<Object>| match object {
            Some(Object::TrustBundles(bundles)) => bundles,
            _ => TrustBundles::default(),
        };
        if let Some(current) = self.current(&key) {
            return Ok(of(current));
        }
        match self.api.trust_bundles().await {
            Ok(found) => {
                self.note(&key, Some(found.version.clone()));
                Ok(found)
            }
            Err(error) => self.last(&key).map(of).ok_or(error),
        }
    }

    async fn claim(&self, namespace: &str, name: &str) -> Result<PersistentVolumeClaim, String> {
        self.api.claim(namespace, name).await
    }

    async fn persistent_volume(&self, name: &str) -> Result<PersistentVolume, String> {
        self.api.persistent_volume(name).await
    }

    async fn token(
        &self,
        namespace: &str,
        service_account: &str,
        request: TokenRequest,
    ) -> Result<TokenRequest, String> {
        self.api.token(namespace, service_account, request).await
    }

    fn follow(&self, pod: &Pod) {
        let uid = pods::uid(pod);
        let mut state = self.state.lock();
        for key in references(pod) {
            if let Some(entry) = state.entries.get_mut(&key) {
                entry.users.insert(uid.to_owned());
            } else if state.entries.len() < self.limit {
                let entry = Entry {
                    users: HashSet::from([uid.to_owned()]),
                    seen: None,
                    live: false,
                    handed: None,
                    _watch: self.start(&key),
                };
                state.entries.insert(key, entry);
            }
        }
    }

    fn forget(&self, uid: &str) {
        self.state.lock().entries.retain(|_, entry| {
            entry.users.remove(uid);
            !entry.users.is_empty()
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn what_volumes_name_is_watched() {
        let pod: Pod = serde_json::from_value(json!({"metadata": {"namespace": "ns"}, "spec": {
            "containers": [{"name": "c", "envFrom": [{"configMapRef": {"name": "env"}}],
                "volumeMounts": [{"name": "a", "mountPath": "/a"}, {"name": "b", "mountPath": "/b"}]}],
            "volumes": [{"name": "a", "secret": {"secretName": "s"}}, {"name": "unused", "configMap": {"name": "no"}},
                {"name": "b", "projected": {"sources": [{"configMap": {"name": "ca"}}, {"secret": {"name": "s"}}]}}]}}))
        .unwrap();
        let mut found: Vec<(Kind, String)> = references(&pod)
            .into_iter()
            .map(|key| (key.kind, key.name))
            .collect();
        found.sort_by(|a, b| a.1.cmp(&b.1));
        assert_eq!(
            found,
            [(Kind::ConfigMap, "ca".to_owned()), (Kind::Secret, "s".to_owned())]
        );
    }
}
