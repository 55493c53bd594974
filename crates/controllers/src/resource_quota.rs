//! ResourceQuota: keeps a quota's status, what is limited and how much of it is used. Admission charges for what is
//! created; this controller counts anew when something goes, when the quota itself changes, and now and then.
//!
//! It does not count because a status changed: a charge is written before its object exists, and counting in between
//! would take it back.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::{PersistentVolumeClaim, Pod, ResourceQuota, Service};
use kube::Client;
use parking_lot::Mutex;
use serde_json::{Value, json};
use skiff_api::core::quota_usage::{Amounts, amounts, concerned, counted_by, in_scope, usage};
use skiff_client::{Action, Change, ErrorExt, Informer, Key, PartialObject, Reconcile, WorkQueue};
use skiff_meta::quantity::Quantity;
use tokio_util::sync::CancellationToken;

use crate::discovery::{Discovery, Served};
use crate::volume_protection::classes_of_claim;
use crate::{Context, Error, pods};

/// Objects that go together are counted together.
const GATHER: Duration = Duration::from_millis(50);

/// A group and a resource.
type Counted = (String, String);

struct Watched {
    stop: CancellationToken,
    _informer: Informer<PartialObject>,
}

struct Quotas {
    client: Client,
    context: Context,
    pods: Informer<Pod>,
    services: Informer<Service>,
    claims: Informer<PersistentVolumeClaim>,
    replenish: Replenish,
    /// What is watched only because a quota counts it, by group and resource.
    watched: Mutex<BTreeMap<Counted, Watched>>,
}

/// Brings the quotas to the queue that count what was freed.
#[derive(Clone)]
struct Replenish {
    quotas: Informer<ResourceQuota>,
    queue: Arc<WorkQueue>,
}

impl Replenish {
    /// Something of this sort went: the quotas that count it are counted anew.
    fn freed(&self, namespace: Option<&str>, group: &str, resource: &str) {
        for quota in self.quotas.list_namespaced(namespace.unwrap_or_default()) {
            let hard = quota.spec.as_ref().and_then(|spec| spec.hard.as_ref());
            let counts = |entry: &String| counted_by(entry) == Some((group, resource));
            if hard.is_some_and(|hard| hard.keys().any(counts)) {
                self.queue.add_after(Key::of(&*quota), GATHER, None);
            }
        }
    }
}

pub(crate) async fn run(context: Context) {
    let queue = context.queue("resourcequota_primary");
    let reconciler = Arc::new(Quotas {
        client: context.client.clone(),
        pods: context.informers.informer(),
        services: context.informers.informer(),
        claims: context.informers.informer(),
        replenish: Replenish {
            quotas: context.informers.informer(),
            queue: queue.clone(),
        },
        watched: Mutex::default(),
        context: context.clone(),
    });
    context
        .controller_over(queue, reconciler)
        .workers(context.workers())
        .watches(|r| &r.replenish.quotas, Quotas::woken_by_quota)
        .watches(|r| &r.pods, Quotas::woken_by_pod)
        .watches(|r| &r.services, Quotas::woken_by_service)
        .watches(|r| &r.claims, Quotas::woken_by_claim)
        .every(context.config.resource_quota_sync_period, |r| {
            let quotas = r.replenish.quotas.list();
            quotas.iter().map(|quota| Key::of(&**quota)).collect()
        })
        .run()
        .await;
}

/// Whether a pod that changed counts for less, or for other quotas, than before.
fn counts_differently(old: &Pod, new: &Pod) -> bool {
    let terminating = |pod: &Pod| {
        let spec = pod.spec.as_ref();
        spec.is_some_and(|spec| spec.active_deadline_seconds.is_some_and(|seconds| seconds >= 0))
    };
    // Resources are resized in place.
    let resources = |pod: &Pod| -> Vec<_> {
        let status = pod.status.iter();
        let statuses = status.flat_map(|status| {
            let containers = status.container_statuses.iter().flatten();
            containers.chain(status.init_container_statuses.iter().flatten())
        });
        statuses
            .map(|status| (status.name.clone(), status.resources.clone()))
            .collect()
    };
    let resized = || {
        let now = resources(new);
        let changed =
            |(name, before): &(String, _)| now.iter().any(|(other, now)| other == name && now != before);
        resources(old).iter().any(changed)
    };
    (pods::is_terminal(new) && !pods::is_terminal(old)) || terminating(old) != terminating(new) || resized()
}

/// Whether the status speaks of the limits that the quota has.
fn is_current(quota: &ResourceQuota) -> bool {
    let hard = quota
        .spec
        .as_ref()
        .and_then(|spec| spec.hard.clone())
        .unwrap_or_default();
    let status = quota.status.clone().unwrap_or_default();
    let used = status.used.unwrap_or_default();
    status.hard.unwrap_or_default() == hard && used.keys().eq(hard.keys())
}

impl Quotas {
    fn woken_by_quota(&self, change: &Change<ResourceQuota>) -> Option<Key> {
        let quota = change.object();
        match change {
            Change::Applied { old, .. } if old.is_some() && is_current(quota) => return None,
            Change::Applied { .. } => {}
            // A quota counts as an object too.
            Change::Deleted { .. } => {
                self.replenish
                    .freed(quota.metadata.namespace.as_deref(), "", "resourcequotas");
            }
        }
        Some(Key::of(&**quota))
    }

    fn woken_by_pod(&self, change: &Change<Pod>) -> Option<Key> {
        let frees = match change {
            Change::Applied { old: Some(old), new } => counts_differently(old, new),
            Change::Applied { old: None, .. } => false,
            Change::Deleted { .. } => true,
        };
        if frees {
            self.replenish
                .freed(change.object().metadata.namespace.as_deref(), "", "pods");
        }
        None
    }

    fn woken_by_claim(&self, change: &Change<PersistentVolumeClaim>) -> Option<Key> {
        let allocated = |claim: &PersistentVolumeClaim| {
            let status = claim.status.as_ref()?;
            status.allocated_resources.as_ref()?.get("storage").cloned()
        };
        let frees = match change {
            Change::Applied { old: Some(old), new } => {
                allocated(old) != allocated(new) || classes_of_claim(old) != classes_of_claim(new)
            }
            Change::Applied { old: None, .. } => false,
            Change::Deleted { .. } => true,
        };
        if frees {
            let namespace = change.object().metadata.namespace.as_deref();
            self.replenish.freed(namespace, "", "persistentvolumeclaims");
        }
        None
    }

    fn woken_by_service(&self, change: &Change<Service>) -> Option<Key> {
        let kind = |service: &Service| service.spec.as_ref().and_then(|spec| spec.type_.clone());
        let frees = match change {
            Change::Applied { old, new } => old.as_ref().is_some_and(|old| kind(old) != kind(new)),
            Change::Deleted { .. } => true,
        };
        if frees {
            self.replenish
                .freed(change.object().metadata.namespace.as_deref(), "", "services");
        }
        None
    }
}

impl Reconcile for Quotas {
    type Key = Key;
    type Error = Error;

    async fn reconcile(&self, key: Key) -> Result<Action, Error> {
        let path = format!("/api/v1/namespaces/{}/resourcequotas", key.namespace);
        let Some(quota) = self.replenish.quotas.get(&key.namespace, &key.name) else {
            self.watch_what_counts(None);
            return Ok(Action::Done);
        };
        let mut quota = serde_json::to_value(&*quota).map_err(|error| Error::Other(error.to_string()))?;
        let hard = amounts(&quota["spec"]["hard"]);
        let discovery = match needs_discovery(&hard) {
            true => Discovery::read(&self.client).await?,
            false => Discovery::default(),
        };
        self.watch_what_counts(Some(&discovery));
        let (used, failure) = self.count(&quota, &key.namespace, &hard, &discovery).await;
        let counted = failure.map_or(Ok(Action::Done), Err);
        let used: Value = used
            .iter()
            .map(|(entry, amount)| (entry.clone(), json!(amount.to_string())))
            .collect();
        let status = json!({"hard": quota["spec"]["hard"].clone(), "used": used});
        if amounts(&quota["status"]["hard"]) == hard
            && amounts(&quota["status"]["used"]) == amounts(&status["used"])
        {
            return counted;
        }
        quota["status"] = status;
        quota["apiVersion"] = json!("v1");
        quota["kind"] = json!("ResourceQuota");
        let body = serde_json::to_vec(&quota).map_err(|error| Error::Other(error.to_string()))?;
        let request = http::Request::put(format!("{path}/{}/status", key.name))
            .header("content-type", "application/json")
            .body(body)
            .map_err(|error| Error::Other(error.to_string()))?;
        match self.client.request::<Value>(request).await {
            Ok(_) => Ok(Action::Done),
            Err(error) if error.is_not_found() => Ok(Action::Done),
            Err(error) => Err(error.into()),
        }
    }
}

impl Quotas {
    /// What is used of each limit, from a live list of each resource that counts.
    async fn count(
        &self,
        quota: &Value,
        namespace: &str,
        hard: &Amounts,
        discovery: &Discovery,
    ) -> (Amounts, Option<Error>) {
        let mut used: Amounts = hard
            .keys()
            .map(|entry| (entry.clone(), Quantity::from_units(0)))
            .collect();
        let before = amounts(&quota["status"]["used"]);
        let mut failure = None;
        for (group, resource) in counted(hard) {
            let Some(base) = collection(&group, &resource, namespace, discovery) else {
                continue;
            };
            let entries = concerned(&group, &resource, hard);
            let list = match self.list(&group, &resource, base).await {
                Ok(list) => list,
                Err(error) => {
                    let known = before.iter().filter(|(entry, _)| entries.contains(*entry));
                    used.extend(known.map(|(entry, amount)| (entry.clone(), *amount)));
                    failure = Some(error);
                    continue;
                }
            };
            for object in list["items"].as_array().into_iter().flatten() {
                if !in_scope(quota, &resource, object) {
                    continue;
                }
                for (entry, amount) in usage(&group, &resource, object) {
                    if entries.contains(&entry)
                        && let Some(sum) = used.get_mut(&entry)
                    {
                        *sum = sum.plus(&amount);
                    }
                }
            }
        }
        (used, failure)
    }

    async fn list(&self, group: &str, resource: &str, path: String) -> Result<Value, Error> {
        let whole = group.is_empty() && is_looked_into(resource);
        let accept = if whole {
            "application/json"
        } else {
            "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1"
        };
        let request = http::Request::get(path)
            .header("accept", accept)
            .body(Vec::new())
            .map_err(|error| Error::Other(error.to_string()))?;
        Ok(self.client.request(request).await?)
    }

    /// Watches the deletions of what some quota counts, and of nothing else. Pods, services and claims are watched anyway.
    fn watch_what_counts(&self, discovery: Option<&Discovery>) {
        let mut wanted = BTreeSet::new();
        for quota in self.replenish.quotas.list() {
            let hard = quota.spec.as_ref().and_then(|spec| spec.hard.as_ref());
            let entries = hard.into_iter().flat_map(BTreeMap::keys);
            wanted.extend(entries.filter_map(|entry| counted_by(entry)).map(owned));
        }
        for seen in ["pods", "services", "persistentvolumeclaims", "resourcequotas"] {
            wanted.remove(&owned(("", seen)));
        }
        let mut watched = self.watched.lock();
        watched.retain(|counted, one| {
            let keep = wanted.contains(counted);
            if !keep {
                one.stop.cancel();
            }
            keep
        });
        for counted in wanted {
            if watched.contains_key(&counted) {
                continue;
            }
            let Some(resource) = discovery.and_then(|discovery| served(discovery, &counted)) else {
                continue;
            };
            let stop = CancellationToken::new();
            let (replenish, (group, plural)) = (self.replenish.clone(), counted.clone());
            let follow = move |change: &Change<PartialObject>| {
                if !matches!(change, Change::Applied { .. }) {
                    replenish.freed(change.object().metadata.namespace.as_deref(), &group, &plural);
                }
            };
            let informer = self
                .context
                .informers
                .metadata(&resource.resource, stop.clone(), follow);
            let one = Watched {
                stop,
                _informer: informer,
            };
            watched.insert(counted, one);
        }
    }
}

fn owned((group, resource): (&str, &str)) -> Counted {
    (group.to_owned(), resource.to_owned())
}

fn counted(hard: &Amounts) -> BTreeSet<Counted> {
    hard.keys()
        .filter_map(|entry| counted_by(entry))
        .map(owned)
        .collect()
}

/// The kinds whose objects count for more than one.
fn is_looked_into(resource: &str) -> bool {
    matches!(resource, "pods" | "services" | "persistentvolumeclaims")
}

fn needs_discovery(hard: &Amounts) -> bool {
    let known = ["pods", "services", "persistentvolumeclaims", "resourcequotas"];
    counted(hard)
        .iter()
        .any(|(group, resource)| !group.is_empty() || !known.contains(&resource.as_str()))
}

fn served<'a>(discovery: &'a Discovery, (group, resource): &Counted) -> Option<&'a Served> {
    discovery.served.iter().find(|served| {
        served.resource.group == *group && served.resource.plural == *resource && served.namespaced
    })
}

/// The path of a resource's objects in the namespace; `None` if the server has no such resource.
fn collection(group: &str, resource: &str, namespace: &str, discovery: &Discovery) -> Option<String> {
    if group.is_empty() {
        return Some(format!("/api/v1/namespaces/{namespace}/{resource}"));
    }
    let served = served(discovery, &owned((group, resource)))?;
    let version = &served.resource.version;
    Some(format!(
        "/apis/{group}/{version}/namespaces/{namespace}/{resource}"
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn which_changes_of_a_pod_count() {
        let pod = |phase: &str, deadline: Value, cpu: &str| -> Pod {
            serde_json::from_value(json!({"spec": {"containers": [], "activeDeadlineSeconds": deadline},
                "status": {"phase": phase, "containerStatuses": [{"name": "c", "image": "i", "imageID": "", "ready": true,
                    "restartCount": 0, "resources": {"requests": {"cpu": cpu}}}]}}))
            .unwrap()
        };
        let plain = pod("Running", json!(null), "1");
        let check =
            |new: Pod, expected: bool| assert_eq!(counts_differently(&plain, &new), expected, "{new:?}");
        check(plain.clone(), false);
        check(pod("Pending", json!(null), "1"), false);
        check(pod("Succeeded", json!(null), "1"), true);
        check(pod("Running", json!(5), "1"), true);
        check(pod("Running", json!(null), "2"), true);
    }

    #[test]
    fn a_status_is_current_or_not() {
        let check = |quota: Value, expected: bool| {
            let parsed: ResourceQuota = serde_json::from_value(quota.clone()).unwrap();
            assert_eq!(is_current(&parsed), expected, "{quota}");
        };
        check(json!({"spec": {"hard": {"pods": "1"}}}), false);
        check(
            json!({"spec": {"hard": {"pods": "1"}}, "status": {"hard": {"pods": "1"}, "used": {"pods": "0"}}}),
            true,
        );
        // A charge alone is nothing to count for; another limit is.
        check(
            json!({"spec": {"hard": {"pods": "1"}}, "status": {"hard": {"pods": "1"}, "used": {"pods": "1"}}}),
            true,
        );
        check(
            json!({"spec": {"hard": {"pods": "1"}}, "status": {"hard": {"pods": "2"}, "used": {"pods": "1"}}}),
            false,
        );
    }
}
