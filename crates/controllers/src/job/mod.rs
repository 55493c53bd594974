//! The Job controller: runs pods until enough of them have succeeded, or too many have failed.
//!
//! Every pod carries a finalizer until it is counted in the Job's status (see `tracking`), so none is counted twice
//! or lost. What is left of that finalizer when a Job is gone is removed by `orphans`.

mod backoff;
mod facts;
mod indexes;
mod orphans;
mod plan;
mod policy;
mod template;
#[cfg(test)]
mod tests;
mod tracking;

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures::future::join_all;
use jiff::Timestamp;
use k8s_openapi::api::batch::v1::{Job, JobSpec, JobStatus};
use k8s_openapi::api::core::v1::Pod;
use kube::api::{DeleteParams, ListParams, Patch, PatchParams, PostParams};
use kube::core::Selector;
use kube::{Api, ResourceExt};
use parking_lot::Mutex;
use serde_json::json;
use skiff_client::{
    Action, COMPLETE, Change, ErrorExt, Informer, Key, Reconcile, WorkQueue, cause_of, note, reference, stage,
};

use crate::metrics::JobMetrics;
use crate::ownership::{self, BY_CONTROLLER};
use crate::replicas::batches;
use crate::{Context, Error, error_message, is_namespace_terminating, pods, selector};
use backoff::Backoff;
pub(crate) use facts::finished;
use plan::{Event, Manage, Outcome, Sync};

/// A Job that waits is looked at this often at least: no delay is longer than a clock can hold.
const MAX_WAIT: Duration = Duration::from_secs(24 * 3600);
/// A Job of more pods than this is not looked at for each of their changes, but once for all within a second.
const MANY_PODS: usize = 100;
const BATCH_PERIOD: Duration = Duration::from_secs(1);
/// Requests to the API server at a time.
const PARALLEL: usize = 100;

/// What is remembered of a Job that is not over.
#[derive(Clone)]
struct Memory {
    uid: String,
    pods: usize,
    backoff: Backoff,
    /// The status as this process wrote it last. Another one is somebody else's, such as of a leader before.
    status: JobStatus,
    /// Pods that somebody else has counted, though the copy may not show yet that their finalizer is gone.
    released: HashSet<String>,
}

struct Jobs {
    context: Context,
    jobs: Informer<Job>,
    pods: Informer<Pod>,
    queue: Arc<WorkQueue<Key>>,
    memory: Mutex<HashMap<Key, Memory>>,
    metrics: JobMetrics,
}

pub(crate) async fn run(context: Context) {
    let queue = context.queue("job");
    let reconciler = Arc::new(Jobs {
        queue: queue.clone(),
        jobs: context.informers.informer(),
        pods: context.informers.informer(),
        memory: Mutex::default(),
        metrics: JobMetrics::new(context.metrics()),
        context: context.clone(),
    });
    reconciler.pods.add_index(BY_CONTROLLER, ownership::by_controller);
    let jobs = context
        .controller_over(queue, reconciler)
        .workers(context.workers())
        .watches(|r| &r.jobs, Jobs::woken_by_job)
        .watches(|r| &r.pods, Jobs::woken_by_pod)
        .run();
    tokio::join!(jobs, orphans::run(context.clone()));
}

impl Reconcile for Jobs {
    type Key = Key;
    type Error = Error;

    async fn reconcile(&self, key: Key) -> Result<Action, Error> {
        let job = self.jobs.get(&key.namespace, &key.name);
        let job = job.filter(|job| finished(job).is_none() && !facts::is_managed_elsewhere(job));
        let Some(job) = job else {
            self.memory.lock().remove(&key);
            return Ok(Action::Done);
        };
        let Some(spec) = &job.spec else {
            return Ok(Action::Done);
        };
        if !matches!(
            spec.completion_mode.as_deref(),
            None | Some("NonIndexed" | "Indexed")
        ) {
            let message = "Skipped Job sync because completion mode is unknown";
            self.tell(
                &job,
                [("Warning", "UnknownCompletionMode".to_owned(), message.to_owned())],
            );
            return Ok(Action::Done);
        }
        let started = Instant::now();
        let mut action = "reconciling";
        let synced = self.sync(&key, &job, spec, &mut action).await;
        let mode = facts::completion_mode(spec);
        self.metrics
            .synced(action, mode, synced.is_ok(), started.elapsed());
        synced
    }
}

impl Jobs {
    /// `action` becomes what the metrics call the sync, once it is known.
    async fn sync(
        &self,
        key: &Key,
        job: &Job,
        spec: &JobSpec,
        action: &mut &'static str,
    ) -> Result<Action, Error> {
        let pods = self.claim(job, spec).await?;
        let (memory, pods) = self.recall(key, job, spec, pods).await?;
        let now = Timestamp::from_second(Timestamp::now().as_second()).unwrap_or_default();
        let mut sync = Sync::new(job, spec, pods, memory.backoff, now);
        let (manage, wait) = sync.manage();
        *action = match &manage {
            Manage::Create(_) => "pods_created",
            Manage::Remove(_) => "pods_deleted",
            Manage::Nothing if job.metadata.deletion_timestamp.is_none() => "tracking",
            Manage::Nothing | Manage::End(_) => "reconciling",
        };
        let (outcome, failure) = stage("manage pods", self.manage(&sync, manage)).await;
        let event = sync.settle(outcome);
        self.write(key, sync, event).await?;
        if let Some(error) = failure {
            return Err(error.into());
        }
        Ok(wait.map_or(Action::Done, |wait| Action::RequeueAfter(wait.min(MAX_WAIT))))
    }

    fn woken_by_job(&self, change: &Change<Job>) -> Vec<Key> {
        let keys = vec![Key::of(&**change.object())];
        match change {
            Change::Applied { old: Some(old), new } if old.metadata.generation == new.metadata.generation => {
                self.batched(&**new, keys)
            }
            _ => keys,
        }
    }

    /// The keys to look at now; Jobs of many pods are looked at a little later.
    fn batched<K: kube::Resource<DynamicType = ()>>(&self, object: &K, mut keys: Vec<Key>) -> Vec<Key> {
        keys.retain(|key| {
            let many = self
                .memory
                .lock()
                .get(key)
                .is_some_and(|memory| memory.pods > MANY_PODS);
            if many {
                self.queue
                    .add_after(key.clone(), BATCH_PERIOD, Some(cause_of(object)));
            }
            !many
        });
        keys
    }

    fn woken_by_pod(&self, change: &Change<Pod>) -> Vec<Key> {
        let keys = ownership::owners_of_change::<Job, Pod>(change, |pod| {
            let namespace = pod.metadata.namespace.as_deref().unwrap_or_default();
            let jobs = self.jobs.list_namespaced(namespace);
            let adopters = jobs.iter().filter(|job| {
                job.spec
                    .as_ref()
                    .is_some_and(|spec| selects(spec, pod.metadata.labels.as_ref()))
            });
            adopters.map(|job| Key::of(&**job)).collect()
        });
        self.batched(&**change.object(), keys)
    }

    /// The pods that the Job controls, after adopting and releasing. Adopted ones get the finalizer.
    async fn claim(&self, job: &Job, spec: &JobSpec) -> Result<Vec<Arc<Pod>>, Error> {
        let candidates = ownership::candidates(&self.pods, &job.metadata, |labels| selects(spec, labels));
        let client = &self.context.client;
        let claim = ownership::claim_with_finalizers(
            client,
            job,
            candidates,
            |pod| selects(spec, pod.metadata.labels.as_ref()),
            |_| true,
            &[facts::TRACKING],
        );
        Ok(claim.await?)
    }

    /// What is remembered of the Job, and its pods without the finalizers that are known to be gone.
    ///
    /// The copies show what this process has written (see the reconcile runtime). If somebody else wrote the status,
    /// the copy of the pods may be older than it, and a pod that is counted there would be counted again. Therefore
    /// the API is asked which pods have lost their finalizer.
    async fn recall(
        &self,
        key: &Key,
        job: &Job,
        spec: &JobSpec,
        pods: Vec<Arc<Pod>>,
    ) -> Result<(Memory, Vec<Arc<Pod>>), Error> {
        let uid = job.uid().unwrap_or_default();
        let status = tracking::normal(&job.status.clone().unwrap_or_default());
        let known = self
            .memory
            .lock()
            .get(key)
            .filter(|memory| memory.uid == uid)
            .cloned();
        let mut memory = match known {
            Some(memory) if memory.status == status => memory,
            known => Memory {
                backoff: known.map_or_else(|| counted_before(&pods), |memory| memory.backoff),
                released: self.released(job, spec, &pods).await?,
                status,
                pods: 0,
                uid,
            },
        };
        memory.pods = pods.len();
        let shown = |uid: &String| {
            pods.iter()
                .any(|pod| facts::uid(pod) == uid && facts::is_tracked(pod))
        };
        if !memory.released.is_empty() {
            memory.released.retain(shown);
        }
        self.memory.lock().insert(key.clone(), memory.clone());
        if memory.released.is_empty() {
            return Ok((memory, pods));
        }
        let untrack = |pod: Arc<Pod>| {
            if !memory.released.contains(facts::uid(&pod)) {
                return pod;
            }
            let mut pod = (*pod).clone();
            pod.finalizers_mut()
                .retain(|finalizer| finalizer != facts::TRACKING);
            Arc::new(pod)
        };
        let pods = pods.into_iter().map(untrack).collect();
        Ok((memory, pods))
    }

    /// The pods that have the finalizer in the copy but not in the API.
    async fn released(&self, job: &Job, spec: &JobSpec, pods: &[Arc<Pod>]) -> Result<HashSet<String>, Error> {
        let counters = job
            .status
            .as_ref()
            .map_or((None, None), |status| (status.succeeded, status.failed));
        if counters.0.unwrap_or(0) == 0 && counters.1.unwrap_or(0) == 0 {
            return Ok(HashSet::new());
        }
        let selector = spec.selector.clone().unwrap_or_default();
        let selector = Selector::try_from(selector).map_err(|error| Error::Other(error.to_string()))?;
        let api = self.pod_api(job);
        let live = api
            .list_metadata(&ListParams::default().labels_from(&selector))
            .await?;
        let tracked: HashSet<&str> = live
            .items
            .iter()
            .filter(|pod| {
                pod.metadata
                    .finalizers
                    .iter()
                    .flatten()
                    .any(|finalizer| finalizer == facts::TRACKING)
            })
            .filter_map(|pod| pod.metadata.uid.as_deref())
            .collect();
        let gone = pods
            .iter()
            .filter(|pod| facts::is_tracked(pod) && !tracked.contains(facts::uid(pod)));
        Ok(gone.map(|pod| facts::uid(pod).to_owned()).collect())
    }

    fn pod_api(&self, job: &Job) -> Api<Pod> {
        Api::namespaced(self.context.client.clone(), &job.namespace().unwrap_or_default())
    }

    fn tell(&self, job: &Job, events: impl IntoIterator<Item = Event>) {
        let about = reference(job);
        for (type_, reason, message) in events {
            self.context.events.event(&about, type_, &reason, message);
        }
    }

    /// Makes and removes pods. An error does not undo what has been done.
    async fn manage(&self, sync: &Sync<'_>, manage: Manage) -> (Outcome, Option<kube::Error>) {
        match manage {
            Manage::Nothing => (Outcome::default(), None),
            Manage::End(pods) => self.delete(sync.job, &pods, false).await,
            Manage::Remove(pods) => self.delete(sync.job, &pods, true).await,
            Manage::Create(indexes) => self.create(sync, indexes).await,
        }
    }

    /// A pod whose finalizer goes first is not counted.
    async fn delete(&self, job: &Job, pods: &[Arc<Pod>], uncounted: bool) -> (Outcome, Option<kube::Error>) {
        let api = self.pod_api(job);
        let (mut outcome, mut failure) = (Outcome::default(), None);
        let delete = async |pod: &Pod| {
            if uncounted {
                match untrack(&api, pod).await {
                    Err(error) if !error.is_not_found() => return Err(error),
                    _ => {}
                }
            }
            let name = pod.name_any();
            api.delete(&name, &DeleteParams::default()).await.map(|_| ())
        };
        for some in pods.chunks(PARALLEL) {
            let outcomes = join_all(some.iter().map(|pod| delete(pod))).await;
            for (pod, result) in some.iter().zip(outcomes) {
                match result {
                    Err(error) if !error.is_not_found() => {
                        let message = format!("Error deleting: {}", error_message(&error));
                        self.tell(job, [("Warning", "FailedDelete".to_owned(), message)]);
                        failure.get_or_insert(error);
                        continue;
                    }
                    Err(_) => {}
                    Ok(()) => {
                        let message = format!("Deleted pod: {}", pod.name_any());
                        self.tell(job, [("Normal", "SuccessfulDelete".to_owned(), message)]);
                    }
                }
                outcome.removed += 1;
                outcome.removed_ready += i32::from(pods::is_ready(pod));
            }
        }
        (outcome, failure)
    }

    async fn create(&self, sync: &Sync<'_>, indexes: Vec<Option<i32>>) -> (Outcome, Option<kube::Error>) {
        let (job, api) = (sync.job, self.pod_api(sync.job));
        let owner = ownership::controller_reference(job);
        let (mut outcome, mut failure) = (Outcome::default(), None);
        let mut rest = &indexes[..];
        for size in batches(indexes.len()) {
            let (batch, after) = rest.split_at(size.min(rest.len()));
            rest = after;
            let create = async |index: Option<i32>| {
                let replaced = index.and_then(|index| sync.awaiting_replacement.get(&index));
                let pod = template::job_pod(job, sync.spec, &owner, index, replaced.map(|pod| &**pod));
                let created = api.create(&PostParams::default(), &pod).await?;
                let selected = selects(sync.spec, created.metadata.labels.as_ref());
                ownership::check_created(&api, job, created, selected).await
            };
            for result in join_all(batch.iter().map(|index| create(*index))).await {
                match result {
                    Ok(pod) => {
                        outcome.created += 1;
                        let message = format!("Created pod: {}", pod.name_any());
                        self.tell(job, [("Normal", "SuccessfulCreate".to_owned(), message)]);
                    }
                    Err(error) if is_namespace_terminating(&error) => {}
                    Err(error) => {
                        let message = format!("Error creating: {}", error_message(&error));
                        self.tell(job, [("Warning", "FailedCreate".to_owned(), message)]);
                        failure.get_or_insert(error);
                    }
                }
            }
            if failure.is_some() {
                break;
            }
        }
        (outcome, failure)
    }

    /// Names what has finished, removes its finalizers, counts it, and ends the Job if it is over.
    async fn write(&self, key: &Key, mut sync: Sync<'_>, event: Option<Event>) -> Result<(), Error> {
        let mut written = sync.job.clone();
        let mut release = sync.track();
        self.write_status(key, &mut written, &sync.status).await?;
        for action in &release.handled {
            self.metrics.failure_handled(action);
        }
        if let Some(memory) = self.memory.lock().get_mut(key) {
            memory.backoff = sync.backoff;
        }
        self.tell(sync.job, event);
        let failure = stage(
            "remove finalizers",
            self.untrack_all(sync.job, &release.pods, &mut release.tracked),
        )
        .await;
        tracking::count_released(&mut sync.status, &release.tracked);
        if let Some(error) = failure {
            self.write_status(key, &mut written, &sync.status).await?;
            return Err(error.into());
        }
        let over = !release.more && sync.finish();
        if over {
            note(COMPLETE);
        }
        self.write_status(key, &mut written, &sync.status).await?;
        if over {
            self.tell(sync.job, sync.last_events());
            if let Some(end) = &sync.finished {
                let (mode, reason) = (facts::completion_mode(sync.spec), end.reason.as_deref());
                self.metrics
                    .finished(mode, end.type_ == "Complete", reason.unwrap_or_default());
            }
        }
        Ok(())
    }

    /// A conflict is an error: counts may only follow from the newest status.
    async fn write_status(&self, key: &Key, job: &mut Job, status: &JobStatus) -> Result<(), Error> {
        let present = job.status.clone().unwrap_or_default();
        if job.status.is_some() && tracking::normal(&present) == tracking::normal(status) {
            return Ok(());
        }
        let mut wanted = tracking::normal(status);
        // COMPAT: upstream's controller always writes this, if only as `{}`.
        wanted.uncounted_terminated_pods.get_or_insert_default();
        job.status = Some(wanted);
        let api: Api<Job> =
            Api::namespaced(self.context.client.clone(), &job.namespace().unwrap_or_default());
        *job = api
            .replace_status(&job.name_any(), &PostParams::default(), job)
            .await?;
        let more =
            |count: fn(&JobStatus) -> Option<i32>| count(status).unwrap_or(0) - count(&present).unwrap_or(0);
        let mode = job.spec.as_ref().map_or("NonIndexed", facts::completion_mode);
        let (succeeded, failed) = (more(|status| status.succeeded), more(|status| status.failed));
        self.metrics.pods_finished(mode, succeeded, failed);
        if let Some(memory) = self.memory.lock().get_mut(key) {
            memory.status = tracking::normal(&job.status.clone().unwrap_or_default());
        }
        Ok(())
    }

    /// Takes the uids of the pods that lost their finalizer out of `tracked`.
    async fn untrack_all(
        &self,
        job: &Job,
        pods: &[Arc<Pod>],
        tracked: &mut HashSet<String>,
    ) -> Option<kube::Error> {
        let api = self.pod_api(job);
        let mut failure = None;
        for some in pods.chunks(PARALLEL) {
            let outcomes = join_all(some.iter().map(|pod| untrack(&api, pod))).await;
            for (pod, result) in some.iter().zip(outcomes) {
                match result {
                    Err(error) if !error.is_not_found() => {
                        failure.get_or_insert(error);
                    }
                    _ => {
                        tracked.remove(facts::uid(pod));
                    }
                }
            }
        }
        failure
    }
}

fn selects(spec: &JobSpec, labels: Option<&selector::Labels>) -> bool {
    let wanted = spec.selector.as_ref();
    wanted.is_some_and(|wanted| selector::matches(wanted, labels))
}

/// The back-off by the finished pods that are counted already: a restart does not forget them.
fn counted_before(pods: &[Arc<Pod>]) -> Backoff {
    let counted = |phase: &'static str| -> Vec<Arc<Pod>> {
        let finished = pods.iter().filter(|pod| {
            pods::phase(pod) == phase && !facts::is_tracked(pod) && pod.metadata.deletion_timestamp.is_none()
        });
        finished.cloned().collect()
    };
    Backoff::default().after(&counted("Succeeded"), &counted("Failed"))
}

/// Removes the finalizer, as long as it is there.
async fn untrack(api: &Api<Pod>, pod: &Pod) -> Result<(), kube::Error> {
    if !facts::is_tracked(pod) {
        return Ok(());
    }
    let patch = json!({"metadata": {"$deleteFromPrimitiveList/finalizers": [facts::TRACKING]}});
    let params = PatchParams::default();
    api.patch_metadata(&pod.name_any(), &params, &Patch::Strategic(patch))
        .await
        .map(|_| ())
}
