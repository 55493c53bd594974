//! Dynamic admission: webhooks and policies that users configure by objects. The configurations are followed through
//! the watch cache and kept compiled; a request that nothing is configured for costs two loads of a pointer.
//!
//! ```text
//! matching    which requests a webhook or policy is for
//! request     the request, its objects in the version that is wanted
//! review      the AdmissionReview, out and back
//! webhooks    the two plugins that call webhooks
//! policy      ValidatingAdmissionPolicy, compiled       mutation  MutatingAdmissionPolicy, compiled
//! policies    the plugins that ask them                binding   what binds a policy, and its parameters
//! access      `authorizer` in expressions
//! ```

mod access;
mod binding;
mod matching;
mod mutating;
mod mutation;
mod policies;
mod policy;
mod request;
mod review;
mod webhooks;

use std::collections::BTreeMap;
use std::sync::Arc;

use arc_swap::ArcSwap;
use serde_json::Value;
use skiff_admission::{Attributes, Chain};
use skiff_auth::Authorizer;
use skiff_meta::Status;
use skiff_registry::{EventKind, Registry, encode, object};

use crate::hooks::follow::{self, Follower};
use crate::server::Inner;

pub use binding::param_resource;

pub const GROUP: &str = "admissionregistration.k8s.io";
/// The plugin that comes after all of these: what is refused shall not be charged.
const LAST: &str = "ResourceQuota";

/// Compiled configurations, in the order of their names. Read on every write, so they are swapped, not locked.
pub struct Configured<T>(ArcSwap<Vec<Arc<T>>>);

impl<T> Default for Configured<T> {
    fn default() -> Self {
        Configured(ArcSwap::default())
    }
}

impl<T> Configured<T> {
    pub fn load(&self) -> Arc<Vec<Arc<T>>> {
        self.0.load_full()
    }
}

/// What is configured.
pub struct Dynamic {
    pub registry: Arc<Registry>,
    pub authorizer: Arc<Authorizer>,
    pub mutating_webhooks: Configured<webhooks::Hook>,
    pub validating_webhooks: Configured<webhooks::Hook>,
    pub mutating_policies: Configured<mutation::Policy>,
    pub mutating_bindings: Configured<binding::Binding>,
    pub validating_policies: Configured<policy::Policy>,
    pub validating_bindings: Configured<binding::Binding>,
}

impl Dynamic {
    /// Puts the plugins where upstream has them.
    pub fn new(registry: Arc<Registry>, authorizer: Arc<Authorizer>, chain: &mut Chain) -> Arc<Dynamic> {
        let dynamic = Arc::new(Dynamic {
            registry,
            authorizer,
            mutating_webhooks: Configured::default(),
            validating_webhooks: Configured::default(),
            mutating_policies: Configured::default(),
            mutating_bindings: Configured::default(),
            validating_policies: Configured::default(),
            validating_bindings: Configured::default(),
        });
        chain.insert_before(LAST, Box::new(mutating::Mutating(dynamic.clone())));
        chain.insert_before(LAST, Box::new(webhooks::Mutating(dynamic.clone())));
        chain.insert_before(LAST, Box::new(policies::Validating(dynamic.clone())));
        chain.insert_before(LAST, Box::new(webhooks::Validating(dynamic.clone())));
        dynamic
    }
}

/// Configurations are not themselves subject to what is configured: a mistake in one could never be undone.
fn exempt(attributes: &Attributes<'_>) -> bool {
    attributes.kind_group == GROUP
}

/// Lets everything that is configured take effect, then follows what changes.
pub async fn start(inner: &Arc<Inner>) -> Result<(), Status> {
    let hooks = webhooks::Hook::read_all;
    follow(inner, "mutatingwebhookconfigurations", hooks, |d| {
        &d.mutating_webhooks
    })
    .await?;
    follow(inner, "validatingwebhookconfigurations", hooks, |d| {
        &d.validating_webhooks
    })
    .await?;
    let policies = |_: &Dynamic, value: &Value| vec![Arc::new(policy::Policy::read(value))];
    follow(inner, "validatingadmissionpolicies", policies, |d| {
        &d.validating_policies
    })
    .await?;
    let bindings = |_: &Dynamic, value: &Value| vec![Arc::new(binding::Binding::read(value))];
    follow(inner, "validatingadmissionpolicybindings", bindings, |d| {
        &d.validating_bindings
    })
    .await?;
    let mutations = |_: &Dynamic, value: &Value| vec![Arc::new(mutation::Policy::read(value))];
    follow(inner, "mutatingadmissionpolicies", mutations, |d| {
        &d.mutating_policies
    })
    .await?;
    follow(inner, "mutatingadmissionpolicybindings", bindings, |d| {
        &d.mutating_bindings
    })
    .await
}

/// Keeps what `read` makes of each object of a resource, by name, and publishes all of it on every change.
async fn follow<T: Send + Sync + 'static>(
    inner: &Arc<Inner>,
    plural: &str,
    read: fn(&Dynamic, &Value) -> Vec<Arc<T>>,
    place: fn(&Dynamic) -> &Configured<T>,
) -> Result<(), Status> {
    let Some(resource) = inner.registry.resources.preferred(GROUP, plural).cloned() else {
        return Ok(());
    };
    let dynamic = inner.dynamic.clone();
    let mut all: BTreeMap<String, Vec<Arc<T>>> = BTreeMap::new();
    let publish = move |dynamic: &Dynamic, all: &BTreeMap<String, Vec<Arc<T>>>| {
        let flat = all.values().flatten().cloned().collect();
        place(dynamic).0.store(Arc::new(flat));
    };
    let listed = inner.registry.list_readable(&resource).await?;
    for entry in &listed.items {
        let value = encode::decode(&entry.bytes)?;
        all.insert(object::name(&value).to_owned(), read(&dynamic, &value));
    }
    publish(&dynamic, &all);
    let follower = Follower::after(inner, resource, &listed);
    follow::follow(
        &inner.shutdown,
        "admission-configuration",
        follower,
        move |event| {
            let name = event.entry.head.name.to_string();
            match event.kind {
                EventKind::Deleted => {
                    all.remove(&name);
                }
                _ => match encode::decode(&event.entry.bytes) {
                    Ok(value) => {
                        all.insert(name, read(&dynamic, &value));
                    }
                    Err(status) => {
                        tracing::error!(%status, name, "a configuration of admission cannot be read");
                        return;
                    }
                },
            }
            publish(&dynamic, &all);
        },
    );
    Ok(())
}
