//! The Deployment controller: one ReplicaSet a pod template, and a rollout that moves pods from the old
//! ones to the new one as the strategy allows.
//!
//! It writes ReplicaSets and its own status, never pods.

mod plan;
mod revision;
mod rollback;
mod scaling;
mod status;
#[cfg(test)]
mod tests;

use std::sync::Arc;

use jiff::Timestamp;
use k8s_openapi::api::apps::v1::{Deployment, ReplicaSet};
use k8s_openapi::api::core::v1::Pod;
use kube::Api;
use kube::api::{DeleteParams, PostParams};
use parking_lot::Mutex;
use skiff_client::{Action, COMPLETE, Change, ErrorExt, Informer, Key, Reconcile, note, reference, stage};

use crate::ownership::{self, BY_CONTROLLER};
use crate::{Context, Error, error_message, is_namespace_terminating, pods, selector};
use plan::{Observed, Plan, Write};
pub(crate) use revision::safe_encode;
use rollback::Rollback;
pub(crate) use scaling::scaled;

/// So many deployments are remembered; then all are forgotten.
const MAX_COMPLAINED: usize = 4096;

struct Deployments {
    context: Context,
    deployments: Informer<Deployment>,
    sets: Informer<ReplicaSet>,
    pods: Informer<Pod>,
    /// Serves only to say once, not at each look, that a selector takes everything.
    complained: Mutex<std::collections::HashSet<String>>,
}

pub(crate) async fn run(context: Context) {
    let reconciler = Arc::new(Deployments {
        deployments: context.informers.informer(),
        sets: context.informers.informer(),
        pods: context.informers.informer(),
        complained: Default::default(),
        context: context.clone(),
    });
    reconciler.sets.add_index(BY_CONTROLLER, ownership::by_controller);
    reconciler.pods.add_index(BY_CONTROLLER, ownership::by_controller);
    context
        .controller("deployment", reconciler)
        .workers(context.workers())
        .owns(|r| &r.deployments)
        .watches(|r| &r.sets, Deployments::woken_by_set)
        .watches(|r| &r.pods, Deployments::woken_by_pod)
        .run()
        .await;
}

impl Reconcile for Deployments {
    type Key = Key;
    type Error = Error;

    async fn reconcile(&self, key: Key) -> Result<Action, Error> {
        let Some(deployment) = self.deployments.get(&key.namespace, &key.name) else {
            return Ok(Action::Done);
        };
        if deployment
            .spec
            .as_ref()
            .is_none_or(|spec| selector::is_empty(&spec.selector))
        {
            self.complain(&deployment);
            return Ok(Action::Done);
        }
        let selected = |labels: Option<&selector::Labels>| selects(&deployment, labels);
        let candidates = ownership::candidates(&self.sets, &deployment.metadata, selected);
        let selects = |set: &ReplicaSet| selected(set.metadata.labels.as_ref());
        let client = &self.context.client;
        let sets = ownership::claim_all(client, &*deployment, candidates, selects, |_| true).await?;
        // A rolling update counts by the ReplicaSets alone.
        let sets_with_pods = match scaling::is_rolling(&deployment) {
            true => Vec::new(),
            false => self.sets_with_pods(&sets),
        };
        let sets: Vec<ReplicaSet> = sets.iter().map(|set| (**set).clone()).collect();
        let paused = deployment.spec.as_ref().and_then(|spec| spec.paused) == Some(true);
        if deployment.metadata.deletion_timestamp.is_none()
            && !paused
            && let Some(rollback) = rollback::plan(&deployment, &sets)
        {
            return self.roll_back(&key, rollback).await;
        }
        let observed = Observed {
            sets_with_pods,
            sets,
            deployment: (*deployment).clone(),
            now: Timestamp::now(),
        };
        let plan = plan::plan(observed);
        stage("write", self.write(&key, &deployment, plan)).await
    }
}

fn selects(deployment: &Deployment, labels: Option<&selector::Labels>) -> bool {
    deployment
        .spec
        .as_ref()
        .is_some_and(|spec| !selector::is_empty(&spec.selector) && selector::matches(&spec.selector, labels))
}

fn template_of(set: &ReplicaSet) -> Option<&k8s_openapi::api::core::v1::PodTemplateSpec> {
    set.spec.as_ref().and_then(|spec| spec.template.as_ref())
}

/// True if the set has the template that was asked for. One that admission changed is not found again by its template,
/// and would be made anew at each look.
fn has_template_of(set: &ReplicaSet, wanted: &ReplicaSet) -> bool {
    let pair = template_of(set).zip(template_of(wanted));
    pair.is_some_and(|(left, right)| revision::same_template(left, right))
}

impl Deployments {
    fn woken_by_set(&self, change: &Change<ReplicaSet>) -> Vec<Key> {
        ownership::owners_of_change::<Deployment, ReplicaSet>(change, |set| {
            let namespace = set.metadata.namespace.as_deref().unwrap_or_default();
            let deployments = self.deployments.list_namespaced(namespace);
            let adopters = deployments
                .iter()
                .filter(|deployment| selects(deployment, set.metadata.labels.as_ref()));
            adopters.map(|deployment| Key::of(&**deployment)).collect()
        })
    }

    /// Only a Recreate rollout waits for pods to be gone; everything else shows in the ReplicaSets.
    fn woken_by_pod(&self, change: &Change<Pod>) -> Option<Key> {
        let pod = change.object();
        if matches!(change, Change::Applied { .. }) && !pods::is_terminal(pod) {
            return None;
        }
        let set = ownership::controlled_by::<ReplicaSet>(&pod.metadata)?;
        let set = self.sets.get(&set.namespace, &set.name)?;
        let key = ownership::controlled_by::<Deployment>(&set.metadata)?;
        let deployment = self.deployments.get(&key.namespace, &key.name)?;
        (!scaling::is_rolling(&deployment)).then_some(key)
    }

    fn complain(&self, deployment: &Deployment) {
        let uid = deployment.metadata.uid.clone().unwrap_or_default();
        let mut complained = self.complained.lock();
        if complained.len() >= MAX_COMPLAINED {
            complained.clear();
        }
        let first = complained.insert(uid);
        drop(complained);
        if first {
            let message = "This deployment is selecting all pods. A non-empty selector is required.";
            self.context
                .events
                .event(&reference(deployment), "Warning", "SelectingAll", message.into());
        }
    }

    fn sets_with_pods(&self, sets: &[Arc<ReplicaSet>]) -> Vec<String> {
        let uids = sets.iter().filter_map(|set| set.metadata.uid.clone());
        uids.filter(|uid| {
            self.pods
                .by_index(BY_CONTROLLER, uid)
                .iter()
                .any(|pod| !pods::is_terminal(pod))
        })
        .collect()
    }

    async fn write(&self, key: &Key, deployment: &Deployment, plan: Plan) -> Result<Action, Error> {
        let api: Api<ReplicaSet> = Api::namespaced(self.context.client.clone(), &key.namespace);
        let about = reference(deployment);
        for write in &plan.writes {
            match write {
                Write::Create(set) => {
                    if !self.create(&api, deployment, set).await? {
                        return Ok(Action::Done);
                    }
                }
                Write::Update(set) => {
                    let name = set.metadata.name.as_deref().unwrap_or_default();
                    let replaced = api.replace(name, &PostParams::default(), set).await?;
                    if !has_template_of(&replaced, set) {
                        let message = format!("admission changes the template of replica set \"{name}\"");
                        return Err(Error::Other(message));
                    }
                }
                Write::Delete(name) => match api.delete(name, &DeleteParams::default()).await {
                    Ok(_) => {}
                    Err(error) if error.is_not_found() => {}
                    Err(error) => return Err(error.into()),
                },
            }
        }
        for scaled in &plan.events {
            let direction = if scaled.to > scaled.from { "up" } else { "down" };
            let message = format!(
                "Scaled {direction} replica set {} from {} to {}",
                scaled.name, scaled.from, scaled.to
            );
            self.context
                .events
                .event(&about, "Normal", "ScalingReplicaSet", message);
        }
        if let Some(updated) = plan.deployment {
            self.write_status(key, *updated).await?;
        }
        Ok(plan.look_again.map_or(Action::Done, Action::RequeueAfter))
    }

    /// Writes the Deployment as it was; its change wakes us again.
    async fn roll_back(&self, key: &Key, rollback: Rollback) -> Result<Action, Error> {
        let api: Api<Deployment> = Api::namespaced(self.context.client.clone(), &key.namespace);
        api.replace(&key.name, &PostParams::default(), &rollback.deployment)
            .await?;
        let kind = if rollback.is_warning { "Warning" } else { "Normal" };
        let about = reference(&rollback.deployment);
        self.context
            .events
            .event(&about, kind, rollback.reason, rollback.message);
        Ok(Action::Done)
    }

    /// Makes the new ReplicaSet; false if there is nothing more to do now.
    async fn create(
        &self,
        api: &Api<ReplicaSet>,
        deployment: &Deployment,
        set: &ReplicaSet,
    ) -> Result<bool, Error> {
        let name = set.metadata.name.as_deref().unwrap_or_default();
        let key = Key::of(deployment);
        let created = match api.create(&PostParams::default(), set).await {
            Ok(created) => {
                let belongs =
                    has_template_of(&created, set) && selects(deployment, created.metadata.labels.as_ref());
                ownership::check_created(api, deployment, created, belongs).await
            }
            Err(error) => Err(error),
        };
        match created {
            Ok(_) => Ok(true),
            Err(error) if error.is_already_exists() => {
                let Some(live) = api.get_opt(name).await? else {
                    return Err(error.into());
                };
                let ours = ownership::controller_of(&live.metadata)
                    .is_some_and(|owner| Some(&owner.uid) == deployment.metadata.uid.as_ref());
                let template = live.spec.as_ref().and_then(|spec| spec.template.as_ref());
                let wanted = deployment.spec.as_ref().map(|spec| &spec.template);
                let same = template
                    .zip(wanted)
                    .is_some_and(|(a, b)| revision::same_template(a, b));
                if ours && same {
                    // Made by us before; the copy has yet to show it.
                    return Ok(false);
                }
                let mut bumped = deployment.clone();
                let status = bumped.status.get_or_insert_default();
                status.collision_count = Some(status.collision_count.unwrap_or(0) + 1);
                let deployments: Api<Deployment> =
                    Api::namespaced(self.context.client.clone(), &key.namespace);
                deployments
                    .replace_status(&key.name, &PostParams::default(), &bumped)
                    .await?;
                // The changed status wakes us again.
                Ok(false)
            }
            Err(error) if is_namespace_terminating(&error) => Ok(false),
            Err(error) => {
                let message = format!(
                    "Failed to create new replica set \"{name}\": {}",
                    error_message(&error)
                );
                if status::progress_deadline(deployment).is_some() {
                    let mut failed = deployment.clone();
                    let condition = status::new_condition(
                        "Progressing",
                        "False",
                        "ReplicaSetCreateError",
                        message.clone(),
                        Timestamp::now(),
                    );
                    status::set_condition(failed.status.get_or_insert_default(), condition);
                    if failed.status != deployment.status {
                        self.write_status(&key, failed).await?;
                    }
                }
                self.context.events.event(
                    &reference(deployment),
                    "Warning",
                    "ReplicaSetCreateError",
                    message,
                );
                Err(error.into())
            }
        }
    }

    async fn write_status(&self, key: &Key, updated: Deployment) -> Result<(), Error> {
        let api: Api<Deployment> = Api::namespaced(self.context.client.clone(), &key.namespace);
        let revision = |deployment: &Deployment| {
            deployment
                .metadata
                .annotations
                .as_ref()
                .and_then(|all| all.get(revision::REVISION))
                .cloned()
        };
        let wanted = revision(&updated);
        if updated
            .status
            .as_ref()
            .is_some_and(|status| status::is_complete(&updated, status))
        {
            note(COMPLETE);
        }
        let live = match api
            .replace_status(&key.name, &PostParams::default(), &updated)
            .await
        {
            Ok(live) => live,
            Err(error) if error.is_not_found() => return Ok(()),
            Err(error) => return Err(error.into()),
        };
        // The revision travels with the status where the server lets annotations pass there.
        if wanted.is_some() && revision(&live) != wanted {
            let mut annotated = live.clone();
            annotated
                .metadata
                .annotations
                .get_or_insert_default()
                .insert(revision::REVISION.into(), wanted.unwrap_or_default());
            api.replace(&key.name, &PostParams::default(), &annotated).await?;
        }
        Ok(())
    }
}
