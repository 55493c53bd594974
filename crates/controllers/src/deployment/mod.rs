//! The Deployment controller: one ReplicaSet a pod template, and a rollout that moves pods from the old
//! ones to the new one as the strategy allows.
//!
//! It writes ReplicaSets and its own status, never pods.

mod plan;
mod revision;
mod scaling;
mod status;
#[cfg(test)]
mod tests;

use std::sync::Arc;

use jiff::Timestamp;
use k8s_openapi::api::apps::v1::{Deployment, ReplicaSet};
use k8s_openapi::api::core::v1::Pod;
use kube::Api;
use kube::api::{DeleteParams, Patch, PatchParams, PostParams};
use parking_lot::Mutex;
use skiff_client::{
    Action, COMPLETE, Cause, Change, ErrorExt, Informer, Key, WorkQueue, cause_of, note, reference,
    run_workers, stage,
};

use crate::ownership::{self, BY_CONTROLLER, Claim};
use crate::{
    Context, Error, Written, error_message, is_namespace_terminating, pods, selector, wait_for_copy,
};
use plan::{Observed, Plan, Write};

/// So many deployments are remembered; then all are forgotten.
const MAX_COMPLAINED: usize = 4096;

struct Controller {
    context: Context,
    deployments: Informer<Deployment>,
    sets: Informer<ReplicaSet>,
    pods: Informer<Pod>,
    queue: Arc<WorkQueue>,
    /// ReplicaSets that we wrote, and Deployments.
    written: Written,
    written_own: Written,
    /// Serves only to say once, not at each look, that a selector takes everything.
    complained: Mutex<std::collections::HashSet<String>>,
}

pub(crate) async fn run(context: Context) {
    let controller = Arc::new(Controller {
        deployments: context.informers.informer(),
        sets: context.informers.informer(),
        pods: context.informers.informer(),
        queue: context.queue("deployment"),
        written: Default::default(),
        written_own: Default::default(),
        complained: Default::default(),
        context: context.clone(),
    });
    controller.sets.add_index(BY_CONTROLLER, ownership::by_controller);
    controller.pods.add_index(BY_CONTROLLER, ownership::by_controller);
    let queue = controller.queue.clone();
    controller
        .deployments
        .subscribe(move |change: &Change<Deployment>| {
            let object = change.object();
            queue.add(Key::of(&**object), Some(cause_of(&**object)));
        });
    let watcher = controller.clone();
    controller
        .sets
        .subscribe(move |change| watcher.set_changed(change));
    let watcher = controller.clone();
    controller
        .pods
        .subscribe(move |change| watcher.pod_changed(change));
    controller.deployments.synced().await;
    controller.sets.synced().await;
    controller.pods.synced().await;
    let queue = controller.queue.clone();
    run_workers(context.name, 5, queue, context.shutdown.clone(), move |key| {
        let controller = controller.clone();
        async move { controller.reconcile(key).await }
    })
    .await;
}

impl Controller {
    fn owner_of(&self, set: &ReplicaSet) -> Option<Key> {
        let owner = ownership::controller_of(&set.metadata)?;
        let ours = owner.kind == "Deployment" && owner.api_version == "apps/v1";
        ours.then(|| {
            Key::new(
                set.metadata.namespace.clone().unwrap_or_default(),
                owner.name.clone(),
            )
        })
    }

    fn set_changed(&self, change: &Change<ReplicaSet>) {
        let set = change.object();
        let cause = Some(cause_of(&**set));
        if let Change::Deleted { last } = change {
            self.written.forget(&Key::of(&**last));
        }
        if let Change::Applied { old: Some(old), .. } = change
            && let Some(before) = self.owner_of(old)
            && self.owner_of(set).as_ref() != Some(&before)
        {
            self.queue.add(before, cause.clone());
        }
        match self.owner_of(set) {
            Some(owner) => self.queue.add(owner, cause),
            None if ownership::controller_of(&set.metadata).is_none() => self.wake_adopters(set, cause),
            None => {}
        }
    }

    fn wake_adopters(&self, set: &ReplicaSet, cause: Option<Cause>) {
        for deployment in self
            .deployments
            .list_namespaced(set.metadata.namespace.as_deref().unwrap_or_default())
        {
            let selected = deployment.spec.as_ref().is_some_and(|spec| {
                !selector::is_empty(&spec.selector)
                    && selector::matches(&spec.selector, set.metadata.labels.as_ref())
            });
            if selected {
                self.queue.add(Key::of(&*deployment), cause.clone());
            }
        }
    }

    /// Only a Recreate rollout waits for pods to be gone; everything else shows in the ReplicaSets.
    fn pod_changed(&self, change: &Change<Pod>) {
        let pod = change.object();
        let gone = matches!(change, Change::Deleted { .. }) || pods::is_terminal(pod);
        if !gone {
            return;
        }
        let namespace = pod.metadata.namespace.as_deref().unwrap_or_default();
        let owner = ownership::controller_of(&pod.metadata).filter(|owner| owner.kind == "ReplicaSet");
        let set = owner.and_then(|owner| self.sets.get(namespace, &owner.name));
        let Some(key) = set.and_then(|set| self.owner_of(&set)) else {
            return;
        };
        let deployment = self.deployments.get(&key.namespace, &key.name);
        if deployment.is_some_and(|deployment| !scaling::is_rolling(&deployment)) {
            self.queue.add(key, Some(cause_of(&**pod)));
        }
    }

    async fn reconcile(&self, key: Key) -> Result<Action, Error> {
        let Some(deployment) = self.deployments.get(&key.namespace, &key.name) else {
            self.written_own.forget(&key);
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
        if !self
            .written_own
            .is_seen(&key, deployment.metadata.resource_version.as_deref())
        {
            return wait_for_copy();
        }
        let sets = self.claim(&deployment).await?;
        // A copy that lacks our own last write would plan that write again.
        for set in &sets {
            if !self
                .written
                .is_seen(&Key::of(&**set), set.metadata.resource_version.as_deref())
            {
                return wait_for_copy();
            }
        }
        let observed = Observed {
            sets_with_pods: self.sets_with_pods(&sets),
            sets: sets.iter().map(|set| (**set).clone()).collect(),
            deployment: (*deployment).clone(),
            now: Timestamp::now(),
        };
        let plan = plan::plan(observed);
        stage("write", self.write(&key, &deployment, plan)).await
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

    async fn claim(&self, deployment: &Deployment) -> Result<Vec<Arc<ReplicaSet>>, Error> {
        let meta = &deployment.metadata;
        let namespace = meta.namespace.as_deref().unwrap_or_default();
        let api: Api<ReplicaSet> = Api::namespaced(self.context.client.clone(), namespace);
        let mut claimed = Vec::new();
        for set in ownership::candidates(&self.sets, meta) {
            let selected = deployment
                .spec
                .as_ref()
                .is_some_and(|spec| selector::matches(&spec.selector, set.metadata.labels.as_ref()));
            let (patch, adopting) = match ownership::claim(&set.metadata, meta, selected) {
                Claim::Mine => {
                    claimed.push(set);
                    continue;
                }
                Claim::Foreign => continue,
                Claim::Adopt => {
                    let live: Api<Deployment> = Api::namespaced(self.context.client.clone(), namespace);
                    let live = live.get_opt(meta.name.as_deref().unwrap_or_default()).await?;
                    let alive = live.is_some_and(|live| {
                        live.metadata.uid == meta.uid && live.metadata.deletion_timestamp.is_none()
                    });
                    if !alive {
                        continue;
                    }
                    let owner = ownership::controller_reference(deployment);
                    (ownership::adopt_patch(&owner, &set.metadata), true)
                }
                Claim::Release => (ownership::release_patch(meta, &set.metadata), false),
            };
            let name = set.metadata.name.as_deref().unwrap_or_default();
            match api
                .patch(name, &PatchParams::default(), &Patch::Strategic(patch))
                .await
            {
                Ok(patched) if adopting => claimed.push(Arc::new(patched)),
                Ok(_) => {}
                Err(error) if error.is_not_found() => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok(claimed)
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
                    let updated = api.replace(name, &PostParams::default(), set).await?;
                    self.written
                        .note(&Key::of(&updated), updated.metadata.resource_version.as_deref());
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

    /// Makes the new ReplicaSet; false if there is nothing more to do now.
    async fn create(
        &self,
        api: &Api<ReplicaSet>,
        deployment: &Deployment,
        set: &ReplicaSet,
    ) -> Result<bool, Error> {
        let name = set.metadata.name.as_deref().unwrap_or_default();
        let key = Key::of(deployment);
        match api.create(&PostParams::default(), set).await {
            Ok(created) => {
                self.written
                    .note(&Key::of(&created), created.metadata.resource_version.as_deref());
                Ok(true)
            }
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
        let mut live = match api
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
            live = api.replace(&key.name, &PostParams::default(), &annotated).await?;
        }
        self.written_own
            .note(key, live.metadata.resource_version.as_deref());
        Ok(())
    }
}
