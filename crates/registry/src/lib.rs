//! The registry: create, get, list, watch, update, patch and delete over any kind. It holds the only
//! writing hand on the store; what clients may do, and how requests look, is the server's business.
//! Kinds are named only in `hooks` and `subresources`.

pub mod body;
mod built_in;
mod codec;
mod commit;
mod context;
mod create;
mod delete;
pub mod encode;
mod errors;
pub mod fields;
pub mod hooks;
pub mod object;
mod read;
mod resource;
mod strategy;
pub mod subresources;
mod update;

use std::collections::HashMap;
use std::ops::RangeInclusive;
use std::sync::Arc;

use parking_lot::Mutex;
use skiff_api::facts;
use skiff_cache::Cache;
use skiff_meta::Status;
pub use skiff_store::{Expect, Op, Store, together};
use skiff_store::{KeyValue, Outcome};

pub use codec::Codec;
pub use context::{Context, Gate, Open, StageGuard, StageTime, now_us};
pub use create::{dedup_owner_references, ensure_namespace, generate_name};
pub use delete::{DeleteOptions, Deleted, Propagation};
pub use errors::{expired, is_already_exists, is_not_found, store as store_error};
pub use hooks::cidr::{BadCidr, Cidr};
pub use read::{cache_error, list_error};
pub use resource::{Customs, Resource, Resources};
pub use skiff_cache::{
    Entry, Error as CacheError, EventKind, Field, ListOptions, ListResult, ReadAt, WatchEvent, WatchFrom,
    WatchOptions, Watcher, bookmark_frame, check_continue, postpone,
};
pub use strategy::{Findings, Route, Strategy, Unrouted, Wire};
pub use update::{Transform, Updated, Write, WriteScope};

use hooks::services::{Finding, PortRepair, Services};

/// Where the store says which release writes to it; the revision of that is since when. Not below the prefix of objects.
const RELEASE_KEY: &str = "/skiff/release";

/// What the registry is told at start.
pub struct RegistryConfig {
    pub store: Arc<dyn Store>,
    /// One range a family; the first is the default family.
    pub service_cidrs: Vec<Cidr>,
    pub node_ports: RangeInclusive<u16>,
    /// Which built-in resources are served.
    pub runtime_config: facts::RuntimeConfig,
}

pub struct Registry {
    pub(crate) store: Arc<dyn Store>,
    pub(crate) commits: commit::Commits,
    pub resources: Resources,
    /// By storage prefix, started at first use, with the revision of the definition that it was started
    /// for. Leaf lock: never held over an await.
    caches: Mutex<HashMap<String, (i64, Arc<Cache>)>>,
    pub services: Arc<Services>,
    /// Held over a pass.
    port_repair: tokio::sync::Mutex<PortRepair>,
}

impl Registry {
    /// Opens the registry: sees to it that there is a record of the node ports that services hold.
    pub async fn start(config: RegistryConfig) -> Result<Arc<Registry>, Status> {
        let services = Arc::new(Services::new(&config.service_cidrs, config.node_ports.clone()));
        let resources = Resources::new(&config.runtime_config, |facts| hooks::hook_of(facts, &services));
        let registry = Arc::new(Registry {
            commits: commit::Commits::new(config.store.clone()),
            store: config.store,
            resources,
            caches: Mutex::new(HashMap::new()),
            services,
            port_repair: tokio::sync::Mutex::default(),
        });
        registry.note_foreign_values().await?;
        registry.repair_node_ports().await?;
        Ok(registry)
    }

    /// The revision at which this release first wrote to the store; none if the store has no trace of it.
    pub async fn adopted_at(&self) -> Result<Option<i64>, Status> {
        Ok(self
            .read_stored(RELEASE_KEY)
            .await?
            .map(|found| found.mod_revision))
    }

    /// Objects that were there before this release first wrote to the store get their defaults when they are read,
    /// as upstream has it. Reading what this release wrote costs nothing more.
    pub async fn note_foreign_values(&self) -> Result<(), Status> {
        let release = bytes::Bytes::from_static(facts::KUBERNETES_VERSION.as_bytes());
        let (mut found, _) = self.store.get(RELEASE_KEY).await.map_err(errors::store)?;
        let since = loop {
            let expect = match &found {
                Some(found) if found.value == release => break found.mod_revision,
                Some(found) => Expect::Revision(found.mod_revision),
                None => Expect::Absent,
            };
            let write = self
                .store
                .write(RELEASE_KEY, expect, Op::Put(release.clone()), None);
            match write.await.map_err(errors::store)? {
                Outcome::Done { revision, .. } => break revision,
                // Another server that starts now.
                Outcome::Conflict { current, .. } => found = current,
            }
        };
        for resource in self.resources.all() {
            resource.codec.complete_up_to(since);
        }
        Ok(())
    }

    /// Brings the record of node ports in line with the services; what is wrong with services.
    pub async fn repair_node_ports(&self) -> Result<Vec<Finding>, Status> {
        self.port_repair.lock().await.pass(self).await
    }

    pub fn store(&self) -> &Arc<dyn Store> {
        &self.store
    }

    pub fn now(&self) -> jiff::Timestamp {
        jiff::Timestamp::now()
    }

    pub(crate) fn now_text(&self) -> String {
        skiff_meta::time::format_seconds(self.now())
    }

    /// The store's own state of a key.
    pub(crate) async fn read_stored(&self, key: &str) -> Result<Option<KeyValue>, Status> {
        let (found, _) = self.store.get(key).await.map_err(errors::store)?;
        Ok(found)
    }
}
