//! The disruption controller: keeps the status of PodDisruptionBudgets, by which the eviction subresource decides,
//! and takes back DisruptionTarget conditions of pods that were not deleted after all.
//!
//! How many pods are expected is what their controllers are scaled to, read from the scale subresource where the
//! controller is not one of the built-in workloads.

mod plan;

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::api::apps::v1::{Deployment, ReplicaSet, StatefulSet};
use k8s_openapi::api::core::v1::{Pod, ReplicationController};
use k8s_openapi::api::policy::v1::{PodDisruptionBudget, PodDisruptionBudgetStatus};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference;
use kube::api::PostParams;
use kube::{Api, ResourceExt};
use skiff_client::{Action, Change, ErrorExt, Informer, Key, Reconcile, reference};

use crate::ownership::controller_of;
use crate::scale::{ScaleError, ScaleTarget, parse_group_version};
use crate::{Context, Error, error_message, seconds_until, selector};

struct Budgets {
    context: Context,
    budgets: Informer<PodDisruptionBudget>,
    pods: Informer<Pod>,
    replication_controllers: Informer<ReplicationController>,
    replica_sets: Informer<ReplicaSet>,
    deployments: Informer<Deployment>,
    stateful_sets: Informer<StatefulSet>,
}

struct StaleTargets {
    context: Context,
    pods: Informer<Pod>,
}

pub(crate) async fn run(context: Context) {
    let budgets = Arc::new(Budgets {
        budgets: context.informers.informer(),
        pods: context.informers.informer(),
        replication_controllers: context.informers.informer(),
        replica_sets: context.informers.informer(),
        deployments: context.informers.informer(),
        stateful_sets: context.informers.informer(),
        context: context.clone(),
    });
    let budgets = context
        .controller("disruption", budgets)
        .owns(|r| &r.budgets)
        .watches(|r| &r.pods, Budgets::woken_by_pod)
        .reads(|r| &r.replication_controllers)
        .reads(|r| &r.replica_sets)
        .reads(|r| &r.deployments)
        .reads(|r| &r.stateful_sets)
        .run();
    let targets = Arc::new(StaleTargets {
        pods: context.informers.informer(),
        context: context.clone(),
    });
    let targets = context
        .controller("stale_pod_disruption", targets)
        .watches(
            |r| &r.pods,
            |_, change| {
                let stale = matches!(change, Change::Applied { new, .. } if plan::stale_at(new).is_some());
                stale.then(|| Key::of(&**change.object()))
            },
        )
        .run();
    futures::join!(budgets, targets);
}

impl Reconcile for StaleTargets {
    type Key = Key;
    type Error = Error;

    async fn reconcile(&self, key: Key) -> Result<Action, Error> {
        let Some(pod) = self.pods.get(&key.namespace, &key.name) else {
            return Ok(Action::Done);
        };
        let now = Timestamp::now();
        let Some(at) = plan::stale_at(&pod) else {
            return Ok(Action::Done);
        };
        if at > now {
            return Ok(Action::RequeueAfter(seconds_until(at, now)));
        }
        let api: Api<Pod> = Api::namespaced(self.context.client.clone(), &key.namespace);
        let reset = plan::without_target(&pod, now);
        match api
            .replace_status(&key.name, &PostParams::default(), &reset)
            .await
        {
            Err(error) if !error.is_not_found() => Err(error.into()),
            _ => Ok(Action::Done),
        }
    }
}

impl Reconcile for Budgets {
    type Key = Key;
    type Error = Error;

    async fn reconcile(&self, key: Key) -> Result<Action, Error> {
        let Some(budget) = self.budgets.get(&key.namespace, &key.name) else {
            return Ok(Action::Done);
        };
        match self.sync(&budget).await {
            Ok(action) => Ok(action),
            // It was written meanwhile: its event is on the way, and so is the next try.
            Err(Error::Api(error)) if error.is_conflict() => Err(error.into()),
            Err(Error::Api(error)) if error.is_not_found() => Ok(Action::Done),
            Err(error) => {
                let why = match &error {
                    Error::Api(error) => error_message(error),
                    other => other.to_string(),
                };
                if let Some(status) = plan::failed(&budget, &why, Timestamp::now()) {
                    self.write(&budget, status).await?;
                }
                Ok(Action::Done)
            }
        }
    }
}

impl Budgets {
    /// The budgets that select the pod, with the labels it has or had.
    fn woken_by_pod(&self, change: &Change<Pod>) -> Vec<Key> {
        let pod = change.object();
        let budgets = self
            .budgets
            .list_namespaced(pod.metadata.namespace.as_deref().unwrap_or_default());
        let selecting = |pod: &Pod| {
            let selecting = budgets.iter().filter(|budget| selects(budget, pod));
            selecting.map(|budget| Key::of(&**budget)).collect::<Vec<Key>>()
        };
        let mut keys = selecting(pod);
        if let [first, _, ..] = keys.as_slice() {
            let message = format!(
                "Pod {:?}/{:?} matches multiple PodDisruptionBudgets.  Chose {:?} arbitrarily.",
                pod.namespace().unwrap_or_default(),
                pod.name_any(),
                first.name
            );
            let about = reference(&**pod);
            self.context
                .events
                .event(&about, "Warning", "MultiplePodDisruptionBudgets", message);
        }
        if let Change::Applied { old: Some(old), new } = change
            && old.metadata.labels != new.metadata.labels
        {
            keys.extend(selecting(old));
        }
        keys
    }

    async fn sync(&self, budget: &PodDisruptionBudget) -> Result<Action, Error> {
        let namespace = budget.metadata.namespace.as_deref().unwrap_or_default();
        let wanted = budget.spec.as_ref().and_then(|spec| spec.selector.as_ref());
        let pods = match wanted {
            Some(wanted) => self
                .pods
                .list_labelled(namespace, |labels| selector::matches(wanted, labels)),
            None => Vec::new(),
        };
        let about = reference(budget);
        let events = &self.context.events;
        if pods.is_empty() {
            events.event(&about, "Normal", "NoPods", "No matching pods found".into());
        }
        let counted = self.count(budget, &pods).await;
        let (expected, unmanaged) = counted.inspect_err(|error| {
            let message = format!("Failed to calculate the number of expected pods: {error}");
            events.event(&about, "Warning", "CalculateExpectedPodCountFailed", message);
        })?;
        if !unmanaged.is_empty() {
            let selector = selector::go_text(wanted);
            let message = format!(
                "Pods selected by this PodDisruptionBudget (selector: {selector}) were found to be unmanaged. As a result, the status of the PDB cannot be calculated correctly, which may result in undefined behavior. To account for these pods please set \".spec.minAvailable\" field of the PDB to an integer value."
            );
            events.event(&about, "Warning", "UnmanagedPods", message);
        }
        let now = Timestamp::now();
        let disrupted = plan::disrupted(budget, &pods, now);
        for name in &disrupted.not_deleted {
            // COMPAT: upstream names the namespace twice.
            let message =
                format!("Pod was expected by PDB {namespace}/{namespace} to be deleted but it wasn't");
            if let Some(pod) = self.pods.get(namespace, name) {
                events.event(&reference(&*pod), "Warning", "NotDeleted", message);
            }
        }
        if let Some(status) = plan::status(budget, &pods, expected, &disrupted, now) {
            self.write(budget, status).await?;
        }
        Ok(disrupted.recheck_at.map_or(Action::Done, |at| {
            Action::RequeueAfter(seconds_until(at, now) + Duration::from_millis(10))
        }))
    }

    async fn write(
        &self,
        budget: &PodDisruptionBudget,
        status: PodDisruptionBudgetStatus,
    ) -> Result<(), kube::Error> {
        let namespace = budget.metadata.namespace.as_deref().unwrap_or_default();
        let api: Api<PodDisruptionBudget> = Api::namespaced(self.context.client.clone(), namespace);
        let mut updated = budget.clone();
        updated.status = Some(status);
        let name = budget.name_any();
        api.replace_status(&name, &PostParams::default(), &updated)
            .await?;
        Ok(())
    }

    /// The expected and the desired number of pods, and the names of pods without a controller.
    async fn count(
        &self,
        budget: &PodDisruptionBudget,
        pods: &[Arc<Pod>],
    ) -> Result<((i32, i32), Vec<String>), Error> {
        let (scale, unmanaged) = if plan::needs_scale(budget) {
            self.scale(pods).await?
        } else {
            (0, Vec::new())
        };
        let expected = plan::expected(budget, pods.len(), scale).map_err(Error::Other)?;
        Ok((expected, unmanaged))
    }

    /// The sum of what the pods' controllers are scaled to.
    async fn scale(&self, pods: &[Arc<Pod>]) -> Result<(i32, Vec<String>), Error> {
        let mut scales: HashMap<String, i32> = HashMap::new();
        let mut unmanaged = Vec::new();
        for pod in pods {
            let Some(owner) = controller_of(&pod.metadata) else {
                unmanaged.push(pod.name_any());
                continue;
            };
            if scales.contains_key(&owner.uid) {
                continue;
            }
            let namespace = pod.metadata.namespace.as_deref().unwrap_or_default();
            let found = match self.workload_scale(owner, namespace)? {
                Some(found) => Some(found),
                None => self.any_scale(owner, namespace).await?,
            };
            let (uid, scale) = found
                .ok_or_else(|| Error::Other(format!("found no controllers for pod {:?}", pod.name_any())))?;
            scales.insert(uid, scale);
        }
        let sum = scales
            .values()
            .fold(0i32, |sum, scale| sum.saturating_add(*scale));
        Ok((sum, unmanaged))
    }

    /// From the copies of the built-in workloads. A ReplicaSet of a Deployment counts as that Deployment.
    fn workload_scale(
        &self,
        owner: &OwnerReference,
        namespace: &str,
    ) -> Result<Option<(String, i32)>, Error> {
        let (group, _) = parse_group_version(&owner.api_version).map_err(other)?;
        let scale = |replicas: Option<i32>| Some((owner.uid.clone(), replicas.unwrap_or(1)));
        let is_it = |uid: &Option<String>| uid.as_deref() == Some(owner.uid.as_str());
        match (group, owner.kind.as_str()) {
            ("", "ReplicationController") => {
                let found = self.replication_controllers.get(namespace, &owner.name);
                let found = found.filter(|found| is_it(&found.metadata.uid));
                Ok(found.and_then(|found| scale(found.spec.as_ref().and_then(|spec| spec.replicas))))
            }
            ("apps", "StatefulSet") => {
                let found = self.stateful_sets.get(namespace, &owner.name);
                let found = found.filter(|found| is_it(&found.metadata.uid));
                Ok(found.and_then(|found| scale(found.spec.as_ref().and_then(|spec| spec.replicas))))
            }
            ("apps" | "extensions", "ReplicaSet") => {
                let found = self.replica_sets.get(namespace, &owner.name);
                let Some(set) = found.filter(|found| is_it(&found.metadata.uid)) else {
                    return Ok(None);
                };
                let Some(above) = controller_of(&set.metadata).filter(|above| above.kind == "Deployment")
                else {
                    return Ok(scale(set.spec.as_ref().and_then(|spec| spec.replicas)));
                };
                let (group, _) = parse_group_version(&above.api_version).map_err(other)?;
                if !["apps", "extensions"].contains(&group) {
                    return Ok(None);
                }
                let found = self.deployments.get(namespace, &above.name);
                let found = found.filter(|found| found.metadata.uid.as_deref() == Some(above.uid.as_str()));
                Ok(found.map(|found| {
                    let replicas = found.spec.as_ref().and_then(|spec| spec.replicas);
                    (above.uid.clone(), replicas.unwrap_or(1))
                }))
            }
            _ => Ok(None),
        }
    }

    /// From the scale subresource of any kind.
    async fn any_scale(
        &self,
        owner: &OwnerReference,
        namespace: &str,
    ) -> Result<Option<(String, i32)>, Error> {
        let client = &self.context.client;
        let target = ScaleTarget::find(client, &owner.api_version, &owner.kind).await;
        let target = target.map_err(other)?;
        match target.get(client, namespace, &owner.name).await {
            Ok(scale) if scale.metadata.uid.as_deref() == Some(owner.uid.as_str()) => {
                let replicas = scale.spec.and_then(|spec| spec.replicas).unwrap_or(0);
                Ok(Some((owner.uid.clone(), replicas)))
            }
            Ok(_) => Ok(None),
            // Either the object is gone, or its kind cannot be scaled.
            Err(error) if error.is_not_found() => {
                if target.has_scale(client).await.map_err(other)? {
                    Ok(None)
                } else {
                    Err(other(ScaleError::NoScale(target.group_resource())))
                }
            }
            Err(error) => Err(other(error)),
        }
    }
}

fn other(error: ScaleError) -> Error {
    Error::Other(error.to_string())
}

fn selects(budget: &PodDisruptionBudget, pod: &Pod) -> bool {
    let selector = budget.spec.as_ref().and_then(|spec| spec.selector.as_ref());
    selector.is_some_and(|selector| selector::matches(selector, pod.metadata.labels.as_ref()))
}
