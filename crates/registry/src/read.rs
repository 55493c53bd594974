//! Get, list and watch: everything is answered by the watch cache of the resource, which is started at
//! first use.

use std::sync::Arc;

use serde_json::Value;
use skiff_cache::{
    Cache, Config, Entry, ListOptions, ListResult, NAMED_UNREADABLE, ReadAt, WatchOptions, Watcher,
};
use skiff_meta::status::{Cause, Details};
use skiff_meta::{GroupResource, Status};

use crate::{Registry, Resource, encode};

/// A read that the cache could not answer, as a client sees it.
pub fn cache_error(error: skiff_cache::Error) -> Status {
    use skiff_cache::Error;
    let message = error.to_string();
    match error {
        Error::TooOld { .. } | Error::Expired | Error::ExpiredContinue { .. } => Status::expired(message),
        Error::TooLarge { requested, current } => Status::resource_version_too_large(requested, current),
        Error::InvalidContinue(_) => Status::bad_request(format!("invalid continue token: {message}")),
        Error::NotReady => Status::too_many_requests(message, 1),
        Error::Malformed(_) | Error::Unreadable(_) | Error::UnreadableItems(_) => Status::internal(message),
        Error::Store(error) => crate::errors::store(error),
    }
}

/// The same of a list: objects that cannot be read are named, so that they can be deleted.
pub fn list_error(resource: &GroupResource, error: skiff_cache::Error) -> Status {
    let skiff_cache::Error::UnreadableItems(items) = error else {
        return cache_error(error);
    };
    let mut causes: Vec<Cause> = items
        .iter()
        .take(NAMED_UNREADABLE)
        .map(|item| Cause {
            reason: "UnexpectedServerResponse".to_owned(),
            message: item.to_string(),
            field: item.key.to_string(),
        })
        .collect();
    if items.len() > NAMED_UNREADABLE {
        causes.push(Cause {
            reason: "FieldValueTooMany".to_owned(),
            message: "too many errors, the list is truncated".to_owned(),
            ..Cause::default()
        });
    }
    let details = Details {
        name: "list".to_owned(),
        group: resource.group.clone(),
        kind: resource.resource.clone(),
        causes,
        ..Details::default()
    };
    let message = format!("failed to read one or more {resource} from the storage");
    Status {
        details: Some(Box::new(details)),
        ..Status::failure(500, "StorageReadError", message)
    }
}

impl Registry {
    /// The cache of a resource's storage; several served versions share one.
    pub fn cache(&self, resource: &Resource) -> Arc<Cache> {
        let revision = resource.strategy.revision();
        let mut caches = self.caches.lock();
        if let Some((since, cache)) = caches.get(&resource.prefix)
            && *since >= revision
        {
            return cache.clone();
        }
        let strategy = resource.strategy.clone();
        let mut config = Config::new(
            resource.prefix.clone(),
            resource.stored_api_version.clone(),
            resource.kind.clone(),
        )
        .fields(strategy.cache_fields());
        config.decode = Some(Arc::new(
            move |key, revision, value| match skiff_store::unreadable(&value) {
                Some(why) => Err(why),
                None => strategy.read(key, value, revision),
            },
        ));
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

    /// Lets go of the caches of these prefixes: values that could not be read when they were cached may be readable
    /// now. Watches end, and the next reader starts another cache.
    pub fn restart_caches(&self, prefixes: &[String]) {
        let mut caches = self.caches.lock();
        let dropped: Vec<_> = prefixes
            .iter()
            .filter_map(|prefix| caches.remove(prefix))
            .collect();
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
        let listed = self.cache(resource).list(options).await;
        listed.map_err(|error| list_error(&resource.group_resource, error))
    }

    /// What of a resource can be read. For the server itself, which has to start although an object is damaged; a
    /// missing object is not an absent one ([`Registry::is_unreadable`]).
    pub async fn list_readable(&self, resource: &Resource) -> Result<ListResult, Status> {
        let options = ListOptions {
            skip_unreadable: true,
            ..ListOptions::default()
        };
        self.list(resource, options).await
    }

    /// How many objects cannot be read, by the prefix that they are stored under; those of resources that somebody read.
    pub fn unreadable(&self) -> Vec<(String, usize)> {
        let caches: Vec<(String, Arc<Cache>)> = {
            let caches = self.caches.lock();
            let all = caches
                .iter()
                .map(|(prefix, (_, cache))| (prefix.clone(), cache.clone()));
            all.collect()
        };
        let counted = caches
            .into_iter()
            .map(|(prefix, cache)| (prefix, cache.unreadable()));
        counted.filter(|(_, count)| *count > 0).collect()
    }

    /// Whether there is an object that cannot be read under this key, as far as the cache knows.
    pub fn is_unreadable(&self, resource: &Resource, key: &str) -> bool {
        self.cache(resource).is_unreadable(key)
    }

    pub async fn watch(&self, resource: &Resource, options: WatchOptions) -> Result<Watcher, Status> {
        let watcher = self.cache(resource).watch(options).await;
        watcher.map_err(|error| list_error(&resource.group_resource, error))
    }
}
