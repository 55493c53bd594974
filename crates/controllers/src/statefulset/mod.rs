//! The StatefulSet controller: pods with a name, a place in an order and claims of their own.
//!
//! `plan` decides, `control` writes pods and claims. The claims' owners make the garbage collector remove them;
//! the controller deletes none.

mod claims;
mod control;
mod plan;
mod set;
#[cfg(test)]
mod tests;

use std::sync::Arc;
use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::api::apps::v1::{ControllerRevision, StatefulSet, StatefulSetStatus};
use k8s_openapi::api::core::v1::{PersistentVolumeClaim, Pod};
use k8s_openapi::apimachinery::pkg::runtime::RawExtension;
use kube::Api;
use kube::api::PostParams;
use skiff_client::{Action, COMPLETE, Change, ErrorExt, Informer, Key, Reconcile, note, stage};

use crate::history::{self, Current};
use crate::ownership::{self, BY_CONTROLLER};
use crate::{Context, Error, pods, seconds_until, selector};
use plan::{Observed, Revision};
use set::{Set, name_of, parse_name, revision_of};

struct StatefulSets {
    context: Context,
    sets: Informer<StatefulSet>,
    pods: Informer<Pod>,
    claims: Informer<PersistentVolumeClaim>,
    revisions: Informer<ControllerRevision>,
}

pub(crate) async fn run(context: Context) {
    let reconciler = Arc::new(StatefulSets {
        sets: context.informers.informer(),
        pods: context.informers.informer(),
        claims: context.informers.informer(),
        revisions: context.informers.informer(),
        context: context.clone(),
    });
    reconciler.pods.add_index(BY_CONTROLLER, ownership::by_controller);
    reconciler
        .revisions
        .add_index(BY_CONTROLLER, ownership::by_controller);
    context
        .controller("statefulset", reconciler)
        .workers(context.workers())
        .owns(|r| &r.sets)
        .watches(|r| &r.pods, StatefulSets::woken_by_pod)
        .watches(|r| &r.claims, |_, change| woken_by_claim(change))
        .reads(|r| &r.revisions)
        .run()
        .await;
}

/// A claim that is gone may have been all that a pod waited for.
fn woken_by_claim(change: &Change<PersistentVolumeClaim>) -> Vec<Key> {
    let Change::Deleted { last } = change else {
        return Vec::new();
    };
    let namespace = last.metadata.namespace.as_deref().unwrap_or_default();
    let owners = last.metadata.owner_references.iter().flatten();
    let sets = owners.filter_map(|owner| match (owner.api_version.as_str(), owner.kind.as_str()) {
        ("apps/v1", "StatefulSet") => Some(owner.name.as_str()),
        ("v1", "Pod") => parse_name(&owner.name).map(|(set, _)| set),
        _ => None,
    });
    sets.map(|set| Key::new(namespace, set)).collect()
}

/// The two templates between which a set moves.
struct Revisions {
    current: Arc<ControllerRevision>,
    update: Arc<ControllerRevision>,
    collision_count: i32,
    /// All that the set has, oldest first.
    all: Vec<Arc<ControllerRevision>>,
}

impl Reconcile for StatefulSets {
    type Key = Key;
    type Error = Error;

    async fn reconcile(&self, key: Key) -> Result<Action, Error> {
        let Some(object) = self.sets.get(&key.namespace, &key.name) else {
            return Ok(Action::Done);
        };
        let Some(set) = Set::new(&object) else {
            return Ok(Action::Done);
        };
        let mut all = self.claim_revisions(&set).await?;
        let pods = self.claim_pods(&set).await?;
        history::sort(&mut all);
        let Some(revisions) = self.revisions(&set, all).await? else {
            return Ok(Action::Done);
        };
        let outcome = self.update(&set, &pods, &revisions).await;
        let truncated = self.truncate_history(&set, &pods, &revisions).await;
        let now = outcome?;
        truncated?;
        let next = next_availability(&set, &pods, now);
        Ok(next.map_or(Action::Done, |at| {
            // A little later, so that the clock has surely passed the moment.
            Action::RequeueAfter(seconds_until(at, now) + Duration::from_millis(10))
        }))
    }
}

/// When the next ready pod becomes available by the mere passing of time.
fn next_availability(set: &Set<'_>, pods: &[Arc<Pod>], now: Timestamp) -> Option<Timestamp> {
    let available = pods
        .iter()
        .filter_map(|pod| pods::available_at(pod, set.min_ready_seconds()));
    available.filter(|at| *at > now).min()
}

impl StatefulSets {
    fn woken_by_pod(&self, change: &Change<Pod>) -> Vec<Key> {
        ownership::owners_of_change::<StatefulSet, Pod>(change, |pod| {
            let namespace = pod.metadata.namespace.as_deref().unwrap_or_default();
            // The name says which set might adopt it.
            let parent = parse_name(name_of(pod)).map(|(parent, _)| parent);
            let set = parent.and_then(|parent| self.sets.get(namespace, parent));
            let adopter = set.filter(|set| {
                let spec = set.spec.as_ref();
                spec.is_some_and(|spec| selector::matches(&spec.selector, pod.metadata.labels.as_ref()))
            });
            adopter.map(|set| Key::of(&*set)).into_iter().collect()
        })
    }

    async fn claim_pods(&self, set: &Set<'_>) -> Result<Vec<Arc<Pod>>, Error> {
        let selected = |labels: Option<&selector::Labels>| selector::matches(&set.spec.selector, labels);
        let candidates = ownership::candidates(&self.pods, &set.object.metadata, selected);
        let selects = |pod: &Pod| {
            parse_name(name_of(pod)).is_some_and(|(parent, _)| parent == set.name())
                && selector::matches(&set.spec.selector, pod.metadata.labels.as_ref())
        };
        let client = &self.context.client;
        Ok(ownership::claim_all(client, set.object, candidates, selects, |_| true).await?)
    }

    /// The revisions of the set, after adopting those that nobody controls. None is released.
    async fn claim_revisions(&self, set: &Set<'_>) -> Result<Vec<Arc<ControllerRevision>>, Error> {
        let selected = |labels: Option<&selector::Labels>| selector::matches(&set.spec.selector, labels);
        let mut candidates = ownership::candidates(&self.revisions, &set.object.metadata, selected);
        candidates
            .retain(|revision| selector::matches(&set.spec.selector, revision.metadata.labels.as_ref()));
        let client = &self.context.client;
        Ok(ownership::claim_all(client, set.object, candidates, |_| true, |_| true).await?)
    }

    fn revisions_api(&self, set: &Set<'_>) -> Api<ControllerRevision> {
        Api::namespaced(self.context.client.clone(), set.namespace())
    }

    /// Finds the current and the update revision; a new template is recorded first. `None` if the set is being
    /// deleted and its history is gone.
    async fn revisions(
        &self,
        set: &Set<'_>,
        all: Vec<Arc<ControllerRevision>>,
    ) -> Result<Option<Revisions>, Error> {
        let api = self.revisions_api(set);
        let data = history::data_of(&set.spec.template);
        let status = set.object.status.as_ref();
        let mut collision_count = status.and_then(|status| status.collision_count).unwrap_or(0);
        let update = match history::current(&all, &data) {
            Current::Latest(latest) => latest,
            // The garbage collector takes the history down with the set; nothing is recorded any more.
            Current::Older(older) if set.is_deleting() => older,
            Current::New if set.is_deleting() => return Ok(None),
            Current::Older(older) => {
                Arc::new(history::renumber(&api, &older, history::next_number(&all)).await?)
            }
            Current::New => {
                let build = |hash: &str| new_revision(set, hash, &data, history::next_number(&all));
                let created = history::create(&api, &data, &mut collision_count, build);
                Arc::new(stage("create revision", created).await?)
            }
        };
        let named = status.and_then(|status| status.current_revision.as_deref());
        let current = all
            .iter()
            .find(|revision| revision.metadata.name.as_deref() == named)
            .cloned()
            .unwrap_or_else(|| update.clone());
        Ok(Some(Revisions {
            current,
            update,
            collision_count,
            all,
        }))
    }

    /// Does what the plan says and writes the status, also after a failure. Answers the time that the plan was
    /// made for.
    async fn update(
        &self,
        set: &Set<'_>,
        pods: &[Arc<Pod>],
        revisions: &Revisions,
    ) -> Result<Timestamp, Error> {
        let now = Timestamp::now();
        let current_template = history::template_of(&revisions.current)?;
        let name = |revision: &ControllerRevision| revision.metadata.name.clone().unwrap_or_default();
        let (current, update) = (name(&revisions.current), name(&revisions.update));
        let mut plan = plan::plan(&Observed {
            set: *set,
            pods,
            current: Revision {
                name: &current,
                template: &current_template,
            },
            update: Revision {
                name: &update,
                template: &set.spec.template,
            },
            collision_count: revisions.collision_count,
            claim: &|name| self.claims.get(set.namespace(), name),
            now,
        });
        let done = self.carry_out(set, &mut plan).await;
        plan::complete_update(set, &mut plan.status);
        let written = self.write_status(set, plan.status).await;
        done?;
        written?;
        Ok(now)
    }

    async fn write_status(&self, set: &Set<'_>, status: StatefulSetStatus) -> Result<(), Error> {
        let present = set.object.status.clone().unwrap_or_default();
        if !plan::is_news(&status, &present) {
            return Ok(());
        }
        let wanted = set.replicas();
        if (
            status.replicas,
            status.updated_replicas,
            status.available_replicas,
        ) == (wanted, Some(wanted), Some(wanted))
        {
            note(COMPLETE);
        }
        let api: Api<StatefulSet> = Api::namespaced(self.context.client.clone(), set.namespace());
        let mut updated = set.object.clone();
        updated.status = Some(status.clone());
        match api
            .replace_status(set.name(), &PostParams::default(), &updated)
            .await
        {
            Ok(_) => Ok(()),
            Err(error) if error.is_not_found() => Ok(()),
            Err(error) if error.is_conflict() => {
                // Only the spec moved, most often: the counts are still the newest we know.
                let live = api.get_opt(set.name()).await?;
                let Some(mut live) = live.filter(|live| live.metadata.uid == set.object.metadata.uid) else {
                    return Ok(());
                };
                live.status = Some(status);
                api.replace_status(set.name(), &PostParams::default(), &live)
                    .await?;
                Ok(())
            }
            Err(error) => Err(error.into()),
        }
    }

    /// Deletes the oldest revisions beyond the limit that no pod has.
    async fn truncate_history(
        &self,
        set: &Set<'_>,
        pods: &[Arc<Pod>],
        revisions: &Revisions,
    ) -> Result<(), Error> {
        // A negative limit keeps all.
        let Ok(limit) = usize::try_from(set.spec.revision_history_limit.unwrap_or(10)) else {
            return Ok(());
        };
        let in_use = |revision: &ControllerRevision| {
            let name = &revision.metadata.name;
            *name == revisions.current.metadata.name
                || *name == revisions.update.metadata.name
                || pods.iter().any(|pod| name.as_deref() == Some(revision_of(pod)))
        };
        let unused = revisions.all.iter().filter(|revision| !in_use(revision)).count();
        let api = self.revisions_api(set);
        for revision in history::oldest_unused(&revisions.all, in_use, unused.saturating_sub(limit)) {
            history::delete(&api, revision).await?;
        }
        Ok(())
    }
}

fn new_revision(set: &Set<'_>, hash: &str, data: &serde_json::Value, number: i64) -> ControllerRevision {
    let template = set.spec.template.metadata.as_ref();
    let mut labels = template.and_then(|meta| meta.labels.clone()).unwrap_or_default();
    labels.insert(history::HASH_LABEL.into(), hash.to_owned());
    let mut revision = ControllerRevision {
        data: Some(RawExtension(data.clone())),
        revision: number,
        ..Default::default()
    };
    let meta = &mut revision.metadata;
    meta.name = Some(history::name(set.name(), hash));
    meta.namespace = Some(set.namespace().to_owned());
    meta.labels = Some(labels);
    meta.annotations = set.object.metadata.annotations.clone();
    meta.owner_references = Some(vec![ownership::controller_reference(set.object)]);
    revision
}
