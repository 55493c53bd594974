//! The ReplicaSet controller, and the ReplicationController one with the same core: keeps as many pods as
//! the spec says, adopts matching orphans, releases what no longer matches.
//!
//! It never acts on a copy that does not show its own last creations and deletions yet.

mod plan;
mod workload;

use std::sync::Arc;
use std::time::Duration;

use futures::future::join_all;
use jiff::Timestamp;
use k8s_openapi::api::apps::v1::ReplicaSet;
use k8s_openapi::api::core::v1::{Pod, ReplicationController};
use kube::Api;
use kube::api::{DeleteParams, Patch, PatchParams, PostParams};
use skiff_client::{
    Action, COMPLETE, Cause, Change, ErrorExt, Informer, Key, WorkQueue, cause_of, note, reference,
    run_workers, stage,
};

use crate::expectations::Expectations;
use crate::ownership::{self, BY_CONTROLLER, Claim};
use crate::{
    Context, Error, Written, error_message, is_namespace_terminating, pods, seconds_until, wait_for_copy,
};
use plan::{Failure, Plan};
pub(crate) use workload::Workload;

pub(crate) async fn run_replica_sets(context: Context) {
    run::<ReplicaSet>(context).await;
}

pub(crate) async fn run_replication_controllers(context: Context) {
    run::<ReplicationController>(context).await;
}

struct Controller<W> {
    context: Context,
    workloads: Informer<W>,
    pods: Informer<Pod>,
    expectations: Expectations,
    written: Written,
    queue: Arc<WorkQueue>,
}

async fn run<W: Workload>(context: Context) {
    let controller = Arc::new(Controller {
        workloads: context.informers.informer::<W>(),
        pods: context.informers.informer::<Pod>(),
        expectations: Expectations::default(),
        written: Written::default(),
        queue: context.queue(W::QUEUE),
        context: context.clone(),
    });
    controller.pods.add_index(BY_CONTROLLER, ownership::by_controller);
    let watcher = controller.clone();
    controller.workloads.subscribe(move |change: &Change<W>| {
        let object = change.object();
        let key = Key::of(&**object);
        if matches!(change, Change::Deleted { .. }) {
            // One that comes back under the name expects nothing of what this one asked for.
            watcher.expectations.forget(&key);
        }
        watcher.queue.add(key, Some(cause_of(&**object)));
    });
    let watcher = controller.clone();
    controller
        .pods
        .subscribe(move |change| watcher.pod_changed(change));
    controller.workloads.synced().await;
    controller.pods.synced().await;
    let queue = controller.queue.clone();
    run_workers(context.name, 5, queue, context.shutdown.clone(), move |key| {
        let controller = controller.clone();
        async move { controller.reconcile(key).await }
    })
    .await;
}

impl<W: Workload> Controller<W> {
    /// The workload that controls the pod. The uid tells it from an earlier one of its name, whose pods must
    /// not be taken for those that this one waits for.
    fn owner_of(&self, pod: &Pod) -> Option<Key> {
        let owner = ownership::controller_of(&pod.metadata)?;
        if owner.kind != W::kind(&()) || owner.api_version != W::api_version(&()) {
            return None;
        }
        let namespace = pod.metadata.namespace.as_deref().unwrap_or_default();
        let workload = self.workloads.get(namespace, &owner.name)?;
        (workload.meta().uid.as_ref() == Some(&owner.uid)).then(|| Key::of(&*workload))
    }

    fn pod_changed(&self, change: &Change<Pod>) {
        let pod = change.object();
        let cause = Some(cause_of(&**pod));
        let uid = pod.metadata.uid.as_deref().unwrap_or_default();
        if let Change::Applied { old: Some(old), new } = change {
            let (before, after) = (self.owner_of(old), self.owner_of(new));
            if before != after
                && let Some(before) = before
            {
                self.queue.add(before, cause.clone());
            }
        }
        let Some(owner) = self.owner_of(pod) else {
            return self.orphan_changed(change, cause);
        };
        // Graceful deletion begins long before the object goes; for counting, the pod is gone now.
        let ends = matches!(change, Change::Deleted { .. }) || pod.metadata.deletion_timestamp.is_some();
        if ends {
            self.expectations.deletion_observed(&owner, uid);
        } else if matches!(change, Change::Applied { old: None, .. }) {
            self.expectations.creation_observed(&owner);
        }
        self.queue.add(owner, cause);
    }

    /// Wakes whoever might adopt a pod that nobody controls.
    fn orphan_changed(&self, change: &Change<Pod>, cause: Option<Cause>) {
        let Change::Applied { old, new } = change else {
            return;
        };
        let unchanged = old.as_ref().is_some_and(|old| {
            old.metadata.labels == new.metadata.labels
                && old.metadata.owner_references == new.metadata.owner_references
        });
        if unchanged || ownership::controller_of(&new.metadata).is_some() {
            return;
        }
        for workload in self
            .workloads
            .list_namespaced(new.metadata.namespace.as_deref().unwrap_or_default())
        {
            if workload.selects(new.metadata.labels.as_ref()) {
                self.queue.add(Key::of(&*workload), cause.clone());
            }
        }
    }

    async fn reconcile(&self, key: Key) -> Result<Action, Error> {
        let Some(workload) = self.workloads.get(&key.namespace, &key.name) else {
            self.expectations.forget(&key);
            self.written.forget(&key);
            return Ok(Action::Done);
        };
        if !self
            .written
            .is_seen(&key, workload.meta().resource_version.as_deref())
        {
            return wait_for_copy();
        }
        // Asked before the pods are read: what arrives in between only makes the copy fresher.
        let trusted = self.expectations.satisfied(&key);
        let controlled = self.claim(&workload).await?;
        let now = Timestamp::now();
        let active: Vec<Arc<Pod>> = controlled
            .iter()
            .filter(|pod| pods::is_active(pod))
            .cloned()
            .collect();
        let mut failure = None;
        if trusted && workload.meta().deletion_timestamp.is_none() {
            let related = self.related(&workload);
            failure = match plan::plan(workload.replicas(), &active, &related, now) {
                Plan::Nothing => None,
                Plan::Create(count) => stage("create pods", self.create(&key, &workload, count)).await,
                Plan::Delete(surplus) => stage("delete pods", self.delete(&key, &workload, surplus)).await,
            };
        }
        self.write_status(&workload, &controlled, failure.as_ref(), now)
            .await?;
        if let Some((_, message)) = failure {
            return Err(Error::Other(message));
        }
        let next = plan::next_availability(&active, workload.min_ready_seconds(), now);
        Ok(next.map_or(Action::Done, |at| {
            // A little later, so that the clock has surely passed the moment.
            Action::RequeueAfter(seconds_until(at, now) + Duration::from_millis(10))
        }))
    }

    /// The pods that the workload controls, after adopting and releasing.
    async fn claim(&self, workload: &W) -> Result<Vec<Arc<Pod>>, Error> {
        let namespace = workload.meta().namespace.as_deref().unwrap_or_default();
        let api: Api<Pod> = Api::namespaced(self.context.client.clone(), namespace);
        let mut claimed = Vec::new();
        let mut alive = None;
        for pod in ownership::candidates(&self.pods, workload.meta()) {
            let selected = workload.selects(pod.metadata.labels.as_ref());
            let name = pod.metadata.name.as_deref().unwrap_or_default();
            let patch = match ownership::claim(&pod.metadata, workload.meta(), selected) {
                Claim::Mine => {
                    claimed.push(pod.clone());
                    continue;
                }
                Claim::Foreign => continue,
                Claim::Adopt if pods::is_terminal(&pod) => continue,
                Claim::Adopt => {
                    // The copy may not show yet that the owner is being deleted.
                    if alive.is_none() {
                        alive = Some(self.is_alive(workload).await?);
                    }
                    if alive == Some(false) {
                        continue;
                    }
                    let owner = ownership::controller_reference(workload);
                    ownership::adopt_patch(&owner, &pod.metadata)
                }
                Claim::Release => ownership::release_patch(workload.meta(), &pod.metadata),
            };
            let adopting = ownership::controller_of(&pod.metadata).is_none();
            match api
                .patch(name, &PatchParams::default(), &Patch::Strategic(patch))
                .await
            {
                Ok(_) if adopting => claimed.push(pod),
                Ok(_) => {}
                Err(error) if error.is_not_found() => {}
                // The pod was replaced by another of its name, or changed hands.
                Err(kube::Error::Api(status)) if status.is_invalid() || status.is_conflict() => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok(claimed)
    }

    async fn is_alive(&self, workload: &W) -> Result<bool, Error> {
        let meta = workload.meta();
        let api: Api<W> = Api::namespaced(
            self.context.client.clone(),
            meta.namespace.as_deref().unwrap_or_default(),
        );
        let live = api.get_opt(meta.name.as_deref().unwrap_or_default()).await?;
        Ok(live.is_some_and(|live| live.meta().uid == meta.uid && live.meta().deletion_timestamp.is_none()))
    }

    fn related(&self, workload: &W) -> Vec<Arc<Pod>> {
        let owners = workload.related(&self.workloads);
        let owned = owners
            .iter()
            .flat_map(|uid| self.pods.by_index(BY_CONTROLLER, uid));
        owned.filter(|pod| pods::is_active(pod)).collect()
    }

    async fn create(&self, key: &Key, workload: &W, count: usize) -> Option<Failure> {
        let Some(template) = workload.template() else {
            return Some(("FailedCreate", "the workload has no pod template".into()));
        };
        let owner = ownership::controller_reference(workload);
        let pod = plan::new_pod(template, &owner, &key.namespace);
        let api: Api<Pod> = Api::namespaced(self.context.client.clone(), &key.namespace);
        let about = reference(workload);
        self.expectations.expect_creations(key, count);
        let mut left = count;
        let mut failure = None;
        for batch in plan::batches(count) {
            let params = PostParams::default();
            let outcomes = join_all((0..batch).map(|_| api.create(&params, &pod))).await;
            left -= batch;
            for outcome in outcomes {
                match outcome {
                    Ok(created) => {
                        let name = created.metadata.name.unwrap_or_default();
                        self.context.events.event(
                            &about,
                            "Normal",
                            "SuccessfulCreate",
                            format!("Created pod: {name}"),
                        );
                    }
                    Err(error) => {
                        self.expectations.creation_observed(key);
                        if is_namespace_terminating(&error) {
                            continue;
                        }
                        let message = error_message(&error);
                        self.context.events.event(
                            &about,
                            "Warning",
                            "FailedCreate",
                            format!("Error creating: {message}"),
                        );
                        failure.get_or_insert(("FailedCreate", message));
                    }
                }
            }
            if failure.is_some() {
                break;
            }
        }
        for _ in 0..left {
            self.expectations.creation_observed(key);
        }
        failure
    }

    async fn delete(&self, key: &Key, workload: &W, surplus: Vec<Arc<Pod>>) -> Option<Failure> {
        let api: Api<Pod> = Api::namespaced(self.context.client.clone(), &key.namespace);
        let about = reference(workload);
        let uid_of = |pod: &Pod| pod.metadata.uid.clone().unwrap_or_default();
        self.expectations
            .expect_deletions(key, surplus.iter().map(|pod| uid_of(pod)));
        let params = DeleteParams::default();
        let names: Vec<&str> = surplus
            .iter()
            .map(|pod| pod.metadata.name.as_deref().unwrap_or_default())
            .collect();
        let outcomes = join_all(names.iter().map(|name| api.delete(name, &params))).await;
        let mut failure = None;
        for ((pod, name), outcome) in surplus.iter().zip(names).zip(outcomes) {
            match outcome {
                Ok(_) => {
                    self.context.events.event(
                        &about,
                        "Normal",
                        "SuccessfulDelete",
                        format!("Deleted pod: {name}"),
                    );
                }
                Err(error) => {
                    self.expectations.deletion_observed(key, &uid_of(pod));
                    if !error.is_not_found() {
                        let message = error_message(&error);
                        self.context.events.event(
                            &about,
                            "Warning",
                            "FailedDelete",
                            format!("Error deleting: {message}"),
                        );
                        failure.get_or_insert(("FailedDelete", message));
                    }
                }
            }
        }
        failure
    }

    async fn write_status(
        &self,
        workload: &W,
        controlled: &[Arc<Pod>],
        failure: Option<&Failure>,
        now: Timestamp,
    ) -> Result<(), Error> {
        let mut status = plan::new_status(workload, controlled, failure, now);
        let present = workload.status();
        if W::kind(&()) != "ReplicaSet" {
            status.terminating = None;
        }
        if status == present {
            return Ok(());
        }
        let meta = workload.meta();
        let name = meta.name.as_deref().unwrap_or_default();
        let api: Api<W> = Api::namespaced(
            self.context.client.clone(),
            meta.namespace.as_deref().unwrap_or_default(),
        );
        let wanted = workload.replicas();
        if (status.replicas, status.available) == (wanted, wanted) {
            note(COMPLETE);
        }
        let mut updated = workload.clone();
        updated.set_status(status.clone());
        match api.replace_status(name, &PostParams::default(), &updated).await {
            Ok(live) => {
                self.written
                    .note(&Key::of(workload), live.meta().resource_version.as_deref());
                Ok(())
            }
            Err(error) if error.is_not_found() => Ok(()),
            Err(error) if error.is_conflict() => {
                // Only the spec moved, most often: the counts are still the newest we know.
                let live = api.get_opt(name).await?;
                let Some(mut live) = live.filter(|live| live.meta().uid == meta.uid) else {
                    return Ok(());
                };
                live.set_status(status);
                let live = api.replace_status(name, &PostParams::default(), &live).await?;
                self.written
                    .note(&Key::of(workload), live.meta().resource_version.as_deref());
                Ok(())
            }
            Err(error) => Err(error.into()),
        }
    }
}
