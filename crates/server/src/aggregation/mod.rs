//! Aggregated API servers: group versions that another server serves. An APIService with a service names it; this
//! folder finds out whether it can be reached, passes requests on with the user's identity, and merges its
//! discovery and OpenAPI into ours. An APIService without a service is either of a server in this process
//! (`serve_locally`), which is treated alike but for its availability, or this server's own and of no interest here.

mod availability;
mod discovery;
mod fetch;
mod openapi;
mod proxy;
mod remote;
pub mod resolve;

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use arc_swap::{ArcSwap, ArcSwapOption};
use parking_lot::Mutex;
use serde_json::Value;
use skiff_meta::Status;
use skiff_pki::LiveIdentity;
use skiff_registry::{EventKind, ReadAt, encode, object};
use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;

use crate::hooks::follow::{Follower, follow};
use crate::proxy::LocalApi;
use crate::server::Inner;

pub use discovery::{Group, Groups};
pub use proxy::proxy;
pub use remote::Remote;

const GROUP: &str = "apiregistration.k8s.io";
const SERVICE_NAME: &str = "kubernetes.io/service-name";

/// Without news, an extension API server is looked at this often.
const RESYNC: Duration = Duration::from_secs(30);
const FIRST_RETRY: Duration = Duration::from_millis(50);

/// All group versions that are served elsewhere.
pub struct Aggregator {
    /// What we show to extension API servers. None: they are reached, but cannot tell that it is us.
    identity: Option<Arc<LiveIdentity>>,
    /// By group and version. Read on every request, so it is swapped, not locked.
    remotes: ArcSwap<HashMap<(String, String), Arc<Remote>>>,
    /// The servers of this process, by group and version. Leaf lock.
    locals: Mutex<HashMap<(String, String), LocalApi>>,
    /// The tasks that look after one APIService each, by name. Leaf lock: never held over an await.
    attended: Mutex<HashMap<String, Attended>>,
    /// The last version 2 OpenAPI document that was asked for.
    merged: ArcSwapOption<openapi::Merged>,
}

struct Attended {
    wake: Arc<Notify>,
    stop: CancellationToken,
    namespace: String,
    service: String,
}

impl Aggregator {
    pub fn new(identity: Option<Arc<LiveIdentity>>) -> Aggregator {
        Aggregator {
            identity,
            remotes: ArcSwap::default(),
            locals: Mutex::default(),
            attended: Mutex::default(),
            merged: ArcSwapOption::default(),
        }
    }

    /// The server of a group version, if it is not this one.
    pub fn find(&self, group: &str, version: &str) -> Option<Arc<Remote>> {
        let remotes = self.remotes.load();
        if remotes.is_empty() {
            return None;
        }
        remotes.get(&(group.to_string(), version.to_string())).cloned()
    }

    /// The server that a path belongs to.
    pub fn find_path(&self, path: &str) -> Option<Arc<Remote>> {
        if self.remotes.load().is_empty() {
            return None;
        }
        let mut parts = path.trim_matches('/').split('/');
        match (parts.next(), parts.next(), parts.next()) {
            (Some("apis"), Some(group), Some(version)) => self.find(group, version),
            (Some("api"), Some(version), _) => self.find("", version),
            _ => None,
        }
    }

    pub fn remotes(&self) -> Vec<Arc<Remote>> {
        self.remotes.load().values().cloned().collect()
    }

    fn read(&self, object: &Value, known: Option<Arc<Remote>>) -> Option<Remote> {
        let key = (
            object::at_str(object, &["spec", "group"]),
            object::at_str(object, &["spec", "version"]),
        );
        let local = self
            .locals
            .lock()
            .get(&(key.0.to_string(), key.1.to_string()))
            .cloned();
        Remote::read(object, &self.identity, local, known)
    }

    fn put(&self, remote: Remote) {
        let key = (remote.group.clone(), remote.version.clone());
        let remote = Arc::new(remote);
        self.remotes.rcu(|remotes| {
            let mut remotes = HashMap::clone(remotes);
            remotes.insert(key.clone(), remote.clone());
            remotes
        });
    }

    fn take(&self, name: &str) {
        self.remotes.rcu(|remotes| {
            let mut remotes = HashMap::clone(remotes);
            remotes.retain(|_, remote| remote.name != name);
            remotes
        });
        if let Some(attended) = self.attended.lock().remove(name) {
            attended.stop.cancel();
        }
    }

    /// Something about a service changed: whoever depends on it looks again.
    fn service_changed(&self, namespace: &str, service: &str) {
        for attended in self.attended.lock().values() {
            if attended.namespace == namespace && attended.service == service {
                attended.wake.notify_one();
            }
        }
    }
}

/// Follows APIServices, and the services behind them, for as long as the server runs.
pub fn start(inner: &Arc<Inner>) {
    let Some(resource) = inner.registry.resources.get(GROUP, "v1", "apiservices").cloned() else {
        return;
    };
    let (own, follower) = (inner.clone(), Follower::new(inner, resource));
    let mut services_followed = false;
    follow(&inner.shutdown, "apiservices", follower, move |event| {
        let inner = &own;
        let name = event.entry.head.name.to_string();
        let value = match event.kind {
            EventKind::Deleted => None,
            _ => encode::decode(&event.entry.bytes).ok(),
        };
        let known = inner.aggregator.find_named(&name);
        let remote = value.and_then(|value| inner.aggregator.read(&value, known));
        let Some(remote) = remote else {
            inner.aggregator.take(&name);
            inner.metrics.forget_api_service(&name);
            return;
        };
        if !services_followed && remote.local.is_none() {
            services_followed = true;
            follow_services(inner);
        }
        attend(inner, remote);
    });
}

/// Lets a server of this process serve a group version for as long as its APIService names no service.
pub async fn serve_locally(
    inner: &Arc<Inner>,
    group: &str,
    version: &str,
    api: LocalApi,
) -> Result<(), Status> {
    let key = (group.to_string(), version.to_string());
    inner.aggregator.locals.lock().insert(key, api);
    let Some(resource) = inner.registry.resources.get(GROUP, "v1", "apiservices").cloned() else {
        return Ok(());
    };
    // The APIService of an earlier start may have been seen before. It may change while it is read: whatever the
    // follower has applied by then is in the second reading.
    let name = format!("{version}.{group}");
    let mut seen = None;
    loop {
        let object = inner.registry.get(&resource, "", &name, ReadAt::Any).await?;
        let Some(object) = object else { return Ok(()) };
        let present = object::at_str(&object, &["metadata", "resourceVersion"]).to_string();
        if seen.as_ref() == Some(&present) {
            return Ok(());
        }
        seen = Some(present);
        let known = inner.aggregator.find_named(&name);
        if let Some(remote) = inner.aggregator.read(&object, known) {
            attend(inner, remote);
        }
    }
}

/// Lets an APIService take effect and makes sure that somebody looks after it.
fn attend(inner: &Arc<Inner>, remote: Remote) {
    let (name, namespace, service) = (
        remote.name.clone(),
        remote.namespace.clone(),
        remote.service.clone(),
    );
    let same_spec = inner
        .aggregator
        .find_named(&name)
        .is_some_and(|known| known.same_server(&remote));
    inner.aggregator.put(remote);
    let mut attended = inner.aggregator.attended.lock();
    if let Some(present) = attended.get_mut(&name) {
        (present.namespace, present.service) = (namespace, service);
        // Our own write of the status comes back as an event too.
        if !same_spec {
            present.wake.notify_one();
        }
        return;
    }
    let (wake, stop) = (Arc::new(Notify::new()), inner.shutdown.child_token());
    attended.insert(
        name.clone(),
        Attended {
            wake: wake.clone(),
            stop: stop.clone(),
            namespace,
            service,
        },
    );
    drop(attended);
    let inner = inner.clone();
    skiff_supervise::keep("apiservice-availability", &stop, move || {
        let (inner, name, wake) = (inner.clone(), name.clone(), wake.clone());
        async move { look_after(&inner, &name, &wake).await }
    });
}

/// Checks one extension API server again and again, and fetches its documents while it is there.
async fn look_after(inner: &Arc<Inner>, name: &str, wake: &Notify) {
    let mut failures = 0;
    loop {
        let Some(remote) = inner.aggregator.find_named(name) else {
            // It was just removed, and with it this task.
            wake.notified().await;
            continue;
        };
        let reached = availability::check(inner, &remote).await;
        // The documents are fetched through the same door that requests take.
        let documents = discovery::refresh(&remote, inner).await;
        openapi::refresh(&remote, inner).await;
        let wait = if reached && documents {
            failures = 0;
            RESYNC
        } else {
            failures += 1;
            FIRST_RETRY
                .saturating_mul(1 << (failures - 1).min(16))
                .min(RESYNC)
        };
        tokio::select! {
            () = wake.notified() => {}
            () = tokio::time::sleep(wait) => {}
        }
    }
}

impl Aggregator {
    fn find_named(&self, name: &str) -> Option<Arc<Remote>> {
        let remotes = self.remotes.load();
        remotes.values().find(|remote| remote.name == name).cloned()
    }
}

fn follow_services(inner: &Arc<Inner>) {
    for (group, plural) in [("", "services"), ("discovery.k8s.io", "endpointslices")] {
        let Some(resource) = inner.registry.resources.get(group, "v1", plural).cloned() else {
            continue;
        };
        let (own, follower) = (inner.clone(), Follower::new(inner, resource));
        follow(&inner.shutdown, "apiservice-endpoints", follower, move |event| {
            let head = &event.entry.head;
            let service = head.label(SERVICE_NAME).unwrap_or(&head.name);
            own.aggregator.service_changed(&head.namespace, service);
        });
    }
}
