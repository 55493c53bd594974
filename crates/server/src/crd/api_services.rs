//! The APIServices of custom groups: one a group version, local, made and removed with the resources. And the removal of
//! those that an earlier start made for built-in group versions that are no longer asked for.

use std::collections::BTreeSet;
use std::sync::Arc;

use serde_json::json;
use skiff_meta::Status;
use skiff_registry::object;

use crate::hooks::loopback::Loopback;
use crate::server::Inner;

const API_SERVICES: &str = "/apis/apiregistration.k8s.io/v1/apiservices";

const AUTOMANAGED: &str = "kube-aggregator.kubernetes.io/automanaged";

/// What was told so far.
#[derive(Default)]
pub struct ApiServices {
    known: BTreeSet<(&'static str, &'static str)>,
}

impl ApiServices {
    /// Makes the APIServices be those of the served group versions.
    pub async fn sync(&mut self, inner: &Arc<Inner>) {
        let customs = inner.registry.resources.customs();
        let builtin = |group: &str, version: &str| inner.registry.resources.has_group_version(group, version);
        let mut served: Vec<(&'static str, &'static str)> = customs
            .all
            .iter()
            .map(|resource| (resource.facts.group, resource.facts.version))
            .collect();
        // Resources come in the order of their groups, so most repetitions stand side by side.
        served.dedup();
        let wanted: BTreeSet<(&'static str, &'static str)> = served
            .into_iter()
            .filter(|(group, version)| !builtin(group, version))
            .collect();
        if wanted == self.known {
            return;
        }
        for (group, version) in &wanted {
            if !self.known.contains(&(*group, *version))
                && let Err(status) = create(inner, group, version).await
            {
                tracing::warn!(%status, group, version, "cannot make an APIService");
            }
        }
        for (group, version) in &self.known {
            if !wanted.contains(&(*group, *version))
                && let Err(status) = remove(inner, group, version).await
            {
                tracing::warn!(%status, group, version, "cannot remove an APIService");
            }
        }
        self.known = wanted;
    }
}

/// Removes the APIServices of built-in group versions that this server does not serve. Those with another mark are
/// someone else's.
pub async fn remove_unserved(inner: &Arc<Inner>) {
    let resources = &inner.registry.resources;
    let unserved: BTreeSet<(&str, &str)> = skiff_api::facts::resources()
        .iter()
        .map(|facts| (facts.group, facts.version))
        .filter(|(group, version)| !resources.has_group_version(group, version))
        .collect();
    for (group, version) in unserved {
        let loopback = Loopback::new(inner);
        let path = format!("{API_SERVICES}/{version}.{group}");
        let removed = async {
            match loopback.get(&path).await? {
                Some(present)
                    if object::at_str(&present, &["metadata", "labels", AUTOMANAGED]) == "onstart" =>
                {
                    loopback.delete(&path, object::uid(&present)).await
                }
                _ => Ok(()),
            }
        };
        if let Err(status) = removed.await {
            tracing::warn!(%status, group, version, "cannot remove an APIService");
        }
    }
}

async fn create(inner: &Arc<Inner>, group: &str, version: &str) -> Result<(), Status> {
    let object = json!({"kind": "APIService", "apiVersion": "apiregistration.k8s.io/v1",
        "metadata": {"name": format!("{version}.{group}"),
            "labels": {"kube-aggregator.kubernetes.io/automanaged": "true"}},
        "spec": {"group": group, "version": version, "groupPriorityMinimum": 1000, "versionPriority": 100}});
    Loopback::new(inner).ensure(API_SERVICES, &object).await
}

async fn remove(inner: &Arc<Inner>, group: &str, version: &str) -> Result<(), Status> {
    let loopback = Loopback::new(inner);
    let path = format!("{API_SERVICES}/{version}.{group}");
    match loopback.get(&path).await? {
        Some(present) => loopback.delete(&path, object::uid(&present)).await,
        None => Ok(()),
    }
}
