//! Get, list and watch: everything is answered by the watch cache of the resource, which is started at
//! first use.

use std::sync::Arc;

use serde_json::Value;
use skiff_cache::{Cache, Config, Entry, ListOptions, ListResult, ReadAt, WatchOptions, Watcher};
use skiff_meta::Status;

use crate::{Registry, Resource, encode, hooks};

/// A read that the cache could not answer, as a client sees it.
pub fn cache_error(error: skiff_cache::Error) -> Status {
    use skiff_cache::Error;
    let message = error.to_string();
    match error {
        Error::TooOld { .. } | Error::Expired | Error::ExpiredContinue { .. } => Status::expired(message),
        Error::TooLarge { requested, current } => Status::resource_version_too_large(requested, current),
        Error::InvalidContinue(_) => Status::bad_request(format!("invalid continue token: {message}")),
        Error::NotReady => Status::too_many_requests(message, 1),
        Error::Malformed(_) => Status::internal(message),
        Error::Store(error) => crate::errors::store(error),
    }
}

impl Registry {
    /// The cache of a resource's storage; several served versions share one.
    pub fn cache(&self, resource: &Resource) -> Arc<Cache> {
        let revision = resource.custom.as_ref().map_or(0, |custom| custom.revision());
        let mut caches = self.caches.lock();
        if let Some((since, cache)) = caches.get(&resource.prefix)
            && *since >= revision
        {
            return cache.clone();
        }
        let codec = resource.codec.clone();
        let mut config = Config::new(
            resource.prefix.clone(),
            resource.stored_api_version.clone(),
            resource.kind.clone(),
        );
        match resource.custom.clone() {
            None => {
                config = config.fields(hooks::cache_fields(resource));
                config.decode = Some(Arc::new(move |_, revision, value| codec.to_json(value, revision)));
            }
            Some(custom) => {
                config = config.fields(custom.fields());
                config.decode = Some(Arc::new(move |key, _, bytes| custom.read(key, bytes)));
            }
        }
        let cache = Cache::start(self.store.clone(), config);
        caches.insert(resource.prefix.clone(), (revision, cache.clone()));
        cache
    }

    /// Lets go of the cache of a resource whose definition changed since: its watches end, and the next
    /// reader starts another.
    pub fn drop_older_cache(&self, prefix: &str, revision: i64) {
        let mut caches = self.caches.lock();
        let older = caches.get(prefix).is_some_and(|(since, _)| *since < revision);
        let dropped = if older { caches.remove(prefix) } else { None };
        drop(caches);
        drop(dropped);
    }

    pub async fn get_entry(
        &self,
        resource: &Resource,
        namespace: &str,
        name: &str,
        at: ReadAt,
    ) -> Result<Option<Arc<Entry>>, Status> {
        if !resource.is_stored() {
            return Ok(None);
        }
        let key = resource.key(namespace, name);
        self.cache(resource).get(&key, at).await.map_err(cache_error)
    }

    /// What the cache holds now; good enough as the start of a compare-and-swap.
    pub(crate) async fn cached(&self, resource: &Resource, key: &str) -> Result<Option<Arc<Entry>>, Status> {
        self.cache(resource)
            .get(key, ReadAt::Any)
            .await
            .map_err(cache_error)
    }

    /// One object, decoded, in the stored version.
    pub async fn get(
        &self,
        resource: &Resource,
        namespace: &str,
        name: &str,
        at: ReadAt,
    ) -> Result<Option<Value>, Status> {
        match self.get_entry(resource, namespace, name, at).await? {
            Some(entry) => encode::decode(&entry.bytes).map(Some),
            None => Ok(None),
        }
    }

    pub async fn list(&self, resource: &Resource, options: ListOptions) -> Result<ListResult, Status> {
        self.cache(resource).list(options).await.map_err(cache_error)
    }

    pub async fn watch(&self, resource: &Resource, options: WatchOptions) -> Result<Watcher, Status> {
        self.cache(resource).watch(options).await.map_err(cache_error)
    }
}
