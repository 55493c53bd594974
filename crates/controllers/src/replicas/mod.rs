//! The ReplicaSet controller, and the ReplicationController one with the same core: keeps as many pods as
//! the spec says, adopts matching orphans, releases what no longer matches.

mod plan;
mod pod;
mod workload;

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use futures::future::join_all;
use jiff::Timestamp;
use k8s_openapi::api::apps::v1::ReplicaSet;
use k8s_openapi::api::core::v1::{Pod, ReplicationController};
use kube::Api;
use kube::api::{DeleteParams, PostParams};
use skiff_client::{
    Action, COMPLETE, Change, ErrorExt, Informer, Key, Parts, Reconcile, note, reference, stage,
};

use crate::ownership::{self, BY_CONTROLLER};
use crate::selector::{Labels, matches_map};
use crate::{Context, Error, error_message, is_namespace_terminating, pods, seconds_until};
use plan::{Failure, Plan};
pub(crate) use plan::{batches, new_pod};
use pod::ReplicaPod;
pub(crate) use workload::Workload;

pub(crate) async fn run_replica_sets(context: Context) {
    run::<ReplicaSet>(context).await;
}

pub(crate) async fn run_replication_controllers(context: Context) {
    run::<ReplicationController>(context).await;
}

struct Replicas<W> {
    context: Context,
    workloads: Informer<W>,
    pods: Informer<Pod>,
    replicas: Parts<Pod, ReplicaPod>,
}

async fn run<W: Workload>(context: Context) {
    let pods = context.informers.informer::<Pod>();
    let reconciler = Arc::new(Replicas {
        workloads: context.informers.informer::<W>(),
        replicas: pods.parts(ReplicaPod::of),
        pods,
        context: context.clone(),
    });
    reconciler.pods.add_index(BY_CONTROLLER, ownership::by_controller);
    context
        .controller(W::QUEUE, reconciler)
        .workers(context.workers())
        .owns(|r| &r.workloads)
        .watches(|r| &r.pods, Replicas::woken_by_pod)
        .run()
        .await;
}

impl<W: Workload> Reconcile for Replicas<W> {
    type Key = Key;
    type Error = Error;

    async fn reconcile(&self, key: Key) -> Result<Action, Error> {
        let Some(workload) = self.workloads.get(&key.namespace, &key.name) else {
            return Ok(Action::Done);
        };
        let controlled = self.claim(&workload).await?;
        let now = Timestamp::now();
        let active: Vec<Arc<ReplicaPod>> = controlled.iter().filter(|pod| pod.is_active()).cloned().collect();
        let mut failure = None;
        if workload.meta().deletion_timestamp.is_none() {
            // Only who has to choose asks for them.
            let has_surplus = active.len() > usize::try_from(workload.replicas()).unwrap_or(0);
            let related = match has_surplus {
                true => self.related(&workload),
                false => Vec::new(),
            };
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
}

impl<W: Workload> Replicas<W> {
    fn woken_by_pod(&self, change: &Change<Pod>) -> Vec<Key> {
        ownership::owners_of_change::<W, Pod>(change, |pod| {
            let namespace = pod.metadata.namespace.as_deref().unwrap_or_default();
            let workloads = self.workloads.list_namespaced(namespace);
            let adopters = workloads
                .iter()
                .filter(|workload| workload.selects(pod.metadata.labels.as_ref()));
            adopters.map(|workload| Key::of(&**workload)).collect()
        })
    }

    /// The pods that the workload controls, after adopting and releasing.
    async fn claim(&self, workload: &W) -> Result<Vec<Arc<ReplicaPod>>, Error> {
        let selects = |labels: Option<&Labels>| workload.selects(labels);
        let may_adopt = |pod: &Pod| !pods::is_terminal(pod);
        let client = &self.context.client;
        Ok(ownership::claim_parts(client, workload, &self.pods, &self.replicas, selects, may_adopt).await?)
    }

    /// How many of these have all labels of the template and are active. Of these alone: the informer may know newer pods
    /// by now, and a status with more labelled pods than pods is refused.
    fn fully_labeled(&self, workload: &W, controlled: &[Arc<ReplicaPod>]) -> i32 {
        let active = controlled.iter().filter(|pod| pod.is_active());
        let active: HashSet<&str> = active.map(|pod| pod.name.as_str()).collect();
        let template = workload
            .template()
            .and_then(|template| template.metadata.as_ref());
        let wanted = template.and_then(|meta| meta.labels.clone()).unwrap_or_default();
        let uid = workload.meta().uid.as_deref().unwrap_or_default();
        let labelled = self.replicas.by_index_labelled(BY_CONTROLLER, uid, |labels| {
            workload.selects(labels) && matches_map(&wanted, labels)
        });
        let counted = labelled.iter().filter(|pod| active.contains(pod.name.as_str()));
        i32::try_from(counted.count()).unwrap_or(i32::MAX)
    }

    fn related(&self, workload: &W) -> Vec<Arc<ReplicaPod>> {
        let owners = workload.related(&self.workloads);
        let owned = owners
            .iter()
            .flat_map(|uid| self.replicas.by_index(BY_CONTROLLER, uid));
        owned.filter(|pod| pod.is_active()).collect()
    }

    async fn create(&self, key: &Key, workload: &W, count: usize) -> Option<Failure> {
        let Some(template) = workload.template() else {
            return Some(("FailedCreate", "the workload has no pod template".into()));
        };
        let owner = ownership::controller_reference(workload);
        let pod = plan::new_pod(template, &owner, &key.namespace);
        let api: Api<Pod> = Api::namespaced(self.context.client.clone(), &key.namespace);
        let about = reference(workload);
        let mut failure = None;
        for batch in plan::batches(count) {
            let params = PostParams::default();
            let create = async || {
                let created = api.create(&params, &pod).await?;
                let selected = workload.selects(created.metadata.labels.as_ref());
                ownership::check_created(&api, workload, created, selected).await
            };
            let outcomes = join_all((0..batch).map(|_| create())).await;
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
        failure
    }

    async fn delete(&self, key: &Key, workload: &W, surplus: Vec<Arc<ReplicaPod>>) -> Option<Failure> {
        let api: Api<Pod> = Api::namespaced(self.context.client.clone(), &key.namespace);
        let about = reference(workload);
        let params = DeleteParams::default();
        let names: Vec<&str> = surplus.iter().map(|pod| pod.name.as_str()).collect();
        let outcomes = join_all(names.iter().map(|name| api.delete(name, &params))).await;
        let mut failure = None;
        for (name, outcome) in names.iter().zip(outcomes) {
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
        controlled: &[Arc<ReplicaPod>],
        failure: Option<&Failure>,
        now: Timestamp,
    ) -> Result<(), Error> {
        let mut status = plan::new_status(
            workload,
            controlled,
            self.fully_labeled(workload, controlled),
            failure,
            now,
        );
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
            Ok(_) => Ok(()),
            Err(error) if error.is_not_found() => Ok(()),
            Err(error) if error.is_conflict() => {
                // Only the spec moved, most often: the counts are still the newest we know.
                let live = api.get_opt(name).await?;
                let Some(mut live) = live.filter(|live| live.meta().uid == meta.uid) else {
                    return Ok(());
                };
                live.set_status(status);
                api.replace_status(name, &PostParams::default(), &live).await?;
                Ok(())
            }
            Err(error) => Err(error.into()),
        }
    }
}
