//! What informers have told and the loop has not read yet. Of each object only the newest state is kept.

use std::collections::HashMap;
use std::sync::Arc;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use parking_lot::Mutex;
use skiff_client::Key;
use tokio::sync::Notify;

use super::index::Index;
use super::objects::{ProxySlice, ServiceFacts};

#[derive(Default)]
pub(super) struct Inbox {
    /// A leaf lock.
    told: Mutex<Told>,
    pub(super) changed: Notify,
}

#[derive(Default)]
struct Told {
    services: HashMap<Key, Option<ServiceFacts>>,
    /// By service and name of the slice.
    slices: HashMap<(Key, String), Option<Arc<ProxySlice>>>,
    zone: Option<String>,
    /// What the metrics tell of it.
    news: News,
}

/// What is new, for the metrics.
#[derive(Default)]
pub(super) struct News {
    /// The newest version of an object.
    pub(super) revision: u64,
    /// The family of slices (true for IPv4), and when they changed. At most [`MAX_TIMES`].
    pub(super) changed_at: Vec<(bool, f64)>,
}

const MAX_TIMES: usize = 1000;

impl News {
    fn note(&mut self, meta: &ObjectMeta) {
        let version = meta
            .resource_version
            .as_deref()
            .and_then(|version| version.parse().ok());
        self.revision = self.revision.max(version.unwrap_or(0));
    }
}

impl Inbox {
    /// `None` if the service is gone.
    pub(super) fn service(&self, meta: &ObjectMeta, facts: Option<ServiceFacts>) {
        let name = |name: &Option<String>| name.clone().unwrap_or_default();
        let key = Key::new(name(&meta.namespace), name(&meta.name));
        let mut told = self.told.lock();
        told.news.note(meta);
        told.services.insert(key, facts);
        drop(told);
        self.changed.notify_one();
    }

    /// The slice's new state; `None` if it is gone, or no longer its service's.
    pub(super) fn slice(&self, slice: &ProxySlice, now: Option<Arc<ProxySlice>>) {
        let Some(service) = slice.service() else { return };
        let meta = &slice.metadata;
        let service = Key::new(meta.namespace.clone().unwrap_or_default(), service);
        let name = meta.name.clone().unwrap_or_default();
        let mut told = self.told.lock();
        told.news.note(meta);
        if let Some(time) = now.as_ref().and_then(|now| now.changed_at)
            && told.news.changed_at.len() < MAX_TIMES
        {
            told.news.changed_at.push((slice.is_ipv4(), time));
        }
        told.slices.insert((service, name), now);
        drop(told);
        self.changed.notify_one();
    }

    pub(super) fn zone(&self, zone: String) {
        self.told.lock().zone = Some(zone);
        self.changed.notify_one();
    }

    /// Tells the index.
    pub(super) fn empty_into(&self, index: &mut Index) -> News {
        let told = std::mem::take(&mut *self.told.lock());
        for (key, facts) in told.services {
            index.set_service(&key, facts);
        }
        for ((service, name), slice) in told.slices {
            index.set_slice(&service, &name, slice);
        }
        if let Some(zone) = told.zone {
            index.set_zone(&zone);
        }
        told.news
    }
}
