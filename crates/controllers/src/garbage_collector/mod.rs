//! The garbage collector: deletes what its owners have left behind, in the background or in the foreground,
//! and orphans dependents where that was asked for.
//!
//! The graph only says where to look. Before anything is deleted, the object and each of its owners are
//! read from the server: a graph that lags must never cost an object.

mod graph;

use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, OwnerReference};
use kube::Api;
use kube::api::{DeleteParams, Patch, PatchParams, Preconditions, PropagationPolicy};
use kube::core::DynamicObject;
use parking_lot::{Mutex, RwLock};
use serde_json::json;
use skiff_client::{Action, Cause, Change, ErrorExt, Informer, PartialObject, Reconcile, WorkQueue};
use skiff_prometheus::Counter;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::discovery::{Discovery, Served};
use crate::metrics::resource_sync_errors;
use crate::{Context, Error};
use graph::{FOREGROUND, Graph, ORPHAN, Object, Uid, Work};

const RESYNC: Duration = Duration::from_secs(30);
const MAX_ABSENT: usize = 1000;
/// An owner that exists but that no informer has shown yet is asked for again after this long.
const UNSEEN_OWNER: Duration = Duration::from_secs(5);

/// Events come in thousands and own nothing.
fn is_ignored(served: &Served) -> bool {
    served.resource.plural == "events" && matches!(served.resource.group.as_str(), "" | "events.k8s.io")
}

struct Monitor {
    served: Served,
    informer: Informer<PartialObject>,
    stop: CancellationToken,
}

struct Collector {
    context: Context,
    graph: Mutex<Graph>,
    discovery: RwLock<Arc<Discovery>>,
    queue: Arc<WorkQueue<Work>>,
    /// Owners that the server did not know. A uid never comes back.
    absent: Mutex<HashSet<AbsentOwner>>,
}

/// Where an owner was looked for. All of it counts: a reference with the uid of a living object and a wrong
/// name or kind finds nothing, and must not make that object absent to those who name it rightly.
#[derive(PartialEq, Eq, Hash)]
struct AbsentOwner {
    namespace: String,
    api_version: String,
    kind: String,
    name: String,
    uid: Uid,
}

pub(crate) async fn run(context: Context) {
    let collector = Arc::new(Collector {
        graph: Mutex::default(),
        discovery: RwLock::default(),
        queue: context.queue("garbage_collector_attempt_to_delete"),
        absent: Mutex::default(),
        context: context.clone(),
    });
    let monitors = Arc::new(Monitors {
        collector: collector.clone(),
        monitors: Mutex::default(),
        in_sync: watch::Sender::new(false),
        errors: resource_sync_errors(context.metrics()),
    });
    let mut in_sync = monitors.in_sync.subscribe();
    let follow = context
        .controller("garbage_collector_monitors", monitors)
        .every(RESYNC, |_| vec![SyncMonitors])
        .run();
    let collect = context
        .controller_over(collector.queue.clone(), collector)
        .workers(context.workers())
        // A graph that lacks dependents would let owners go before them.
        .starts_after(async move {
            let _ = in_sync.wait_for(|in_sync| *in_sync).await;
        })
        .run();
    tokio::join!(follow, collect);
}

/// Sees to it that every deletable resource has a monitor that feeds the graph.
struct Monitors {
    collector: Arc<Collector>,
    monitors: Mutex<BTreeMap<String, Monitor>>,
    /// True once the first lists are in.
    in_sync: watch::Sender<bool>,
    errors: Arc<Counter>,
}

/// The one item of the queue of [`Monitors`].
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct SyncMonitors;

impl Reconcile for Monitors {
    type Key = SyncMonitors;
    type Error = Error;

    /// The first read fails while the server's own roles are being made; then it is soon tried again.
    async fn reconcile(&self, _: SyncMonitors) -> Result<Action, Error> {
        let synced = self.sync().await;
        if synced.is_err() {
            self.errors.inc();
        }
        synced
    }
}

impl Monitors {
    async fn sync(&self) -> Result<Action, Error> {
        let discovery = Discovery::read(&self.collector.context.client).await?;
        if discovery.served.is_empty() {
            return Err(Error::Other("the server serves no resource".into()));
        }
        self.follow(discovery);
        if !*self.in_sync.borrow() {
            let informers: Vec<Informer<PartialObject>> = {
                let monitors = self.monitors.lock();
                monitors
                    .values()
                    .map(|monitor| monitor.informer.clone())
                    .collect()
            };
            let first_lists = futures::future::join_all(informers.iter().map(Informer::synced));
            let _not_all_in_time = tokio::time::timeout(RESYNC, first_lists).await;
            self.in_sync.send_replace(true);
        }
        Ok(Action::Done)
    }
}

impl Reconcile for Collector {
    type Key = Work;
    type Error = Error;

    async fn reconcile(&self, work: Work) -> Result<Action, Error> {
        match work {
            Work::Delete(uid) => self.attempt_to_delete(&uid).await,
            Work::Orphan(uid) => self.attempt_to_orphan(&uid).await,
        }
    }
}

impl Monitors {
    /// Starts and stops monitors.
    fn follow(&self, discovery: Discovery) {
        let wanted: BTreeMap<String, &Served> = discovery
            .served
            .iter()
            .filter(|served| {
                ["delete", "list", "watch"].iter().all(|verb| served.can(verb)) && !is_ignored(served)
            })
            .map(|served| (served.group_resource(), served))
            .collect();
        let complete = discovery.failures.is_empty();
        let mut monitors = self.monitors.lock();
        monitors.retain(|name, monitor| {
            let same = wanted
                .get(name)
                .is_some_and(|served| served.resource == monitor.served.resource);
            // A group that could not be asked is not a group that is gone.
            if same || (!complete && !wanted.contains_key(name)) {
                return true;
            }
            monitor.stop.cancel();
            for object in monitor.informer.list() {
                self.collector.gone(&object, None);
            }
            false
        });
        for (name, served) in wanted {
            monitors
                .entry(name)
                .or_insert_with(|| self.monitor(served.clone()));
        }
        drop(monitors);
        *self.collector.discovery.write() = Arc::new(discovery);
    }

    fn monitor(&self, served: Served) -> Monitor {
        let stop = CancellationToken::new();
        let collector = self.collector.clone();
        let (resource, name) = (served.resource.clone(), served.group_resource());
        let cause_of = move |object: &PartialObject| {
            let text = |text: &Option<String>| text.clone().unwrap_or_default();
            Some(Cause {
                resource: name.clone(),
                namespace: text(&object.metadata.namespace),
                name: text(&object.metadata.name),
                version: text(&object.metadata.resource_version),
            })
        };
        let follow = move |change: &Change<PartialObject>| match change {
            Change::Applied { new, .. } => {
                let cause = cause_of(new);
                let object = Object::new(&new.metadata, &resource.api_version, &resource.kind);
                let work = collector.graph.lock().apply(object);
                collector.enqueue(work, cause);
            }
            Change::Deleted { last } => collector.gone(last, cause_of(last)),
        };
        let informers = &self.collector.context.informers;
        let informer = informers.metadata(&served.resource, stop.clone(), follow);
        Monitor {
            served,
            informer,
            stop,
        }
    }
}

impl Collector {
    fn gone(&self, object: &PartialObject, cause: Option<Cause>) {
        let uid = object.metadata.uid.as_deref().unwrap_or_default();
        let work = self.graph.lock().remove(uid);
        self.enqueue(work, cause);
    }

    fn enqueue(&self, work: Vec<Work>, cause: Option<Cause>) {
        for one in work {
            self.queue.add(one, cause.clone());
        }
    }

    fn served(&self, api_version: &str, kind: &str) -> Result<Served, Error> {
        let discovery = self.discovery.read().clone();
        let found = discovery.find(api_version, kind).cloned();
        found.ok_or_else(|| Error::Other(format!("no resource is known for {kind} of {api_version}")))
    }

    fn api(&self, served: &Served, namespace: &str) -> Api<DynamicObject> {
        let client = self.context.client.clone();
        if served.namespaced {
            Api::namespaced_with(client, namespace, &served.resource)
        } else {
            Api::all_with(client, &served.resource)
        }
    }

    async fn live(&self, object: &Object) -> Result<Option<(Api<DynamicObject>, ObjectMeta)>, Error> {
        let served = self.served(&object.api_version, &object.kind)?;
        let api = self.api(&served, &object.namespace);
        let found = api.get_metadata_opt(&object.name).await?;
        let same = found.filter(|found| found.metadata.uid.as_deref() == Some(object.uid.as_str()));
        Ok(same.map(|found| (api, found.metadata)))
    }

    async fn attempt_to_delete(&self, uid: &str) -> Result<Action, Error> {
        let Some(object) = self.graph.lock().get(uid).cloned() else {
            return Ok(Action::Done);
        };
        if object.deleting && !object.deletes_dependents() {
            return Ok(Action::Done);
        }
        // If it is gone, its informer will say so.
        let Some((api, meta)) = self.live(&object).await? else {
            return Ok(Action::Done);
        };
        let live = Object::new(&meta, &object.api_version, &object.kind);
        if live.deletes_dependents() {
            return self.finish_foreground(&api, &object, &meta).await;
        }
        if live.deleting || live.owners.is_empty() {
            return Ok(Action::Done);
        }
        let verdicts = match self.judge_owners(&live).await? {
            Some(verdicts) => verdicts,
            None => return Ok(Action::Done),
        };
        let unseen = verdicts.unseen;
        let (has_no_dependents, closes_circle) = {
            let graph = self.graph.lock();
            let has_none = graph.dependents(uid).next().is_none();
            (has_none, closes_circle(&live, graph.dependents(uid)))
        };
        match verdict(&live, &verdicts, has_no_dependents) {
            Verdict::Keep => {}
            Verdict::Delete(PropagationPolicy::Foreground) if closes_circle => {
                let unblocked: Vec<OwnerReference> = live
                    .owners
                    .iter()
                    .map(|owner| OwnerReference {
                        block_owner_deletion: Some(false),
                        ..owner.clone()
                    })
                    .collect();
                set_owners(&api, &meta, &unblocked.iter().collect::<Vec<_>>()).await?;
                // With its new version it is looked at once more, and deleted.
                return Ok(Action::RequeueAfter(Duration::ZERO));
            }
            Verdict::Detach(uids) => {
                let uids: HashSet<&Uid> = uids.iter().collect();
                let owners = live.owners.iter();
                let kept: Vec<&OwnerReference> = owners.filter(|owner| !uids.contains(&owner.uid)).collect();
                set_owners(&api, &meta, &kept).await?;
            }
            Verdict::Delete(policy) => {
                let conditions = Preconditions {
                    uid: meta.uid.clone(),
                    // Someone may be adopting it right now.
                    resource_version: meta.resource_version.clone(),
                };
                let mut params = DeleteParams::default().preconditions(conditions);
                params.propagation_policy = Some(policy);
                match api.delete(&object.name, &params).await {
                    Ok(_) => {}
                    Err(error) if error.is_not_found() => {}
                    Err(error) => return Err(error.into()),
                }
            }
        }
        Ok(if unseen {
            Action::RequeueAfter(UNSEEN_OWNER)
        } else {
            Action::Done
        })
    }

    /// `None` if the references make no sense, so that nothing may be done.
    async fn judge_owners(&self, object: &Object) -> Result<Option<Verdicts>, Error> {
        let mut verdicts = Verdicts::default();
        for owner in &object.owners {
            let served = self.served(&owner.api_version, &owner.kind)?;
            if served.namespaced && object.namespace.is_empty() {
                let about = k8s_openapi::api::core::v1::ObjectReference {
                    api_version: Some(object.api_version.clone()),
                    kind: Some(object.kind.clone()),
                    name: Some(object.name.clone()),
                    uid: Some(object.uid.clone()),
                    ..Default::default()
                };
                let message = format!(
                    "ownerRef [{}/{}, namespace: , name: {}, uid: {}] does not exist in namespace \"\"",
                    owner.api_version, owner.kind, owner.name, owner.uid
                );
                self.context
                    .events
                    .event(&about, "Warning", "OwnerRefInvalidNamespace", message);
                return Ok(None);
            }
            let namespace = if served.namespaced {
                object.namespace.clone()
            } else {
                String::new()
            };
            let key = AbsentOwner {
                namespace: namespace.clone(),
                api_version: owner.api_version.clone(),
                kind: owner.kind.clone(),
                name: owner.name.clone(),
                uid: owner.uid.clone(),
            };
            if self.absent.lock().contains(&key) {
                verdicts.dangling.push(owner.uid.clone());
                continue;
            }
            let found = self
                .api(&served, &namespace)
                .get_metadata_opt(&owner.name)
                .await?;
            match found.filter(|found| found.metadata.uid.as_deref() == Some(owner.uid.as_str())) {
                None => {
                    let mut absent = self.absent.lock();
                    if absent.len() >= MAX_ABSENT {
                        absent.clear();
                    }
                    absent.insert(key);
                    verdicts.dangling.push(owner.uid.clone());
                }
                Some(found) => {
                    let owner_object = Object::new(&found.metadata, &owner.api_version, &owner.kind);
                    if owner_object.deletes_dependents() {
                        verdicts.waiting.push(owner.uid.clone());
                    } else {
                        verdicts.solid.push(owner.uid.clone());
                    }
                    verdicts.unseen |= self.graph.lock().get(&owner.uid).is_none();
                }
            }
        }
        Ok(Some(verdicts))
    }

    /// Lets an object go whose blocking dependents are gone, or sees to it that they go.
    async fn finish_foreground(
        &self,
        api: &Api<DynamicObject>,
        object: &Object,
        meta: &ObjectMeta,
    ) -> Result<Action, Error> {
        let (is_blocked, staying) = {
            let graph = self.graph.lock();
            let staying = graph
                .blocking(&object.uid)
                .filter(|dependent| !dependent.deleting);
            let staying: Vec<Uid> = staying.map(|dependent| dependent.uid.clone()).collect();
            (graph.blocking(&object.uid).next().is_some(), staying)
        };
        if !is_blocked {
            remove_finalizer(api, meta, FOREGROUND).await?;
            return Ok(Action::Done);
        }
        for dependent in staying {
            self.queue.add(Work::Delete(dependent), None);
        }
        Ok(Action::Done)
    }

    async fn attempt_to_orphan(&self, uid: &str) -> Result<Action, Error> {
        let (owner, dependents) = {
            let graph = self.graph.lock();
            let dependents: Vec<Object> = graph.dependents(uid).cloned().collect();
            (graph.get(uid).cloned(), dependents)
        };
        let Some(owner) = owner else {
            return Ok(Action::Done);
        };
        for dependent in dependents {
            let Some((api, meta)) = self.live(&dependent).await? else {
                continue;
            };
            let all = meta.owner_references.clone().unwrap_or_default();
            let kept: Vec<&OwnerReference> = all.iter().filter(|one| one.uid != uid).collect();
            if kept.len() != all.len() {
                set_owners(&api, &meta, &kept).await?;
            }
        }
        if let Some((api, meta)) = self.live(&owner).await? {
            remove_finalizer(&api, &meta, ORPHAN).await?;
        }
        Ok(Action::Done)
    }
}

/// An object's owners, sorted by what the server says of them.
#[derive(Debug, Default)]
struct Verdicts {
    solid: Vec<Uid>,
    dangling: Vec<Uid>,
    /// Being deleted in the foreground: they wait for this object.
    waiting: Vec<Uid>,
    /// One of them exists but is not in the graph yet, so its end might go unnoticed.
    unseen: bool,
}

#[derive(Debug, PartialEq)]
enum Verdict {
    Keep,
    /// Another owner keeps it: only these references go.
    Detach(Vec<Uid>),
    Delete(PropagationPolicy),
}

fn verdict(object: &Object, owners: &Verdicts, has_no_dependents: bool) -> Verdict {
    if !owners.solid.is_empty() {
        let gone: Vec<Uid> = owners.dangling.iter().chain(&owners.waiting).cloned().collect();
        return if gone.is_empty() {
            Verdict::Keep
        } else {
            Verdict::Detach(gone)
        };
    }
    if owners.dangling.is_empty() && owners.waiting.is_empty() {
        return Verdict::Keep;
    }
    if !owners.waiting.is_empty() && !has_no_dependents {
        // Its owner waits for it, so it waits for its own.
        return Verdict::Delete(PropagationPolicy::Foreground);
    }
    Verdict::Delete(if object.orphan {
        PropagationPolicy::Orphan
    } else if object.foreground {
        PropagationPolicy::Foreground
    } else {
        PropagationPolicy::Background
    })
}

/// Objects that own each other in a ring and wait for their dependents would wait for ever. One that is about
/// to join them while a dependent of its own waits already stops blocking its owners.
fn closes_circle<'a>(object: &Object, mut dependents: impl Iterator<Item = &'a Object>) -> bool {
    let blocks = object
        .owners
        .iter()
        .any(|owner| owner.block_owner_deletion == Some(true));
    blocks && dependents.any(Object::deletes_dependents)
}

async fn set_owners(
    api: &Api<DynamicObject>,
    meta: &ObjectMeta,
    owners: &[&OwnerReference],
) -> Result<(), Error> {
    let owners = (!owners.is_empty()).then_some(owners);
    let patch = json!({"metadata": {
        "uid": meta.uid, "resourceVersion": meta.resource_version, "ownerReferences": owners}});
    patch_metadata(api, meta, patch).await
}

async fn remove_finalizer(api: &Api<DynamicObject>, meta: &ObjectMeta, finalizer: &str) -> Result<(), Error> {
    let all = meta.finalizers.clone().unwrap_or_default();
    let kept: Vec<&String> = all.iter().filter(|one| *one != finalizer).collect();
    if kept.len() == all.len() {
        return Ok(());
    }
    let kept = (!kept.is_empty()).then_some(kept);
    let patch = json!({"metadata": {
        "uid": meta.uid, "resourceVersion": meta.resource_version, "finalizers": kept}});
    patch_metadata(api, meta, patch).await
}

/// JSON merge patches work on every kind, and the version in them keeps them from undoing others' changes.
async fn patch_metadata(
    api: &Api<DynamicObject>,
    meta: &ObjectMeta,
    patch: serde_json::Value,
) -> Result<(), Error> {
    let name = meta.name.as_deref().unwrap_or_default();
    match api
        .patch(name, &PatchParams::default(), &Patch::Merge(patch))
        .await
    {
        Ok(_) => Ok(()),
        Err(error) if error.is_not_found() => Ok(()),
        Err(error) => Err(error.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn verdicts() {
        let object = |finalizers: &[&str]| {
            let meta = serde_json::from_value(json!({"uid": "o", "finalizers": finalizers})).unwrap();
            Object::new(&meta, "v1", "K")
        };
        let check = |solid: &[&str],
                     dangling: &[&str],
                     waiting: &[&str],
                     leaf: bool,
                     finalizer: &[&str],
                     expected: Verdict| {
            let own = |list: &[&str]| list.iter().map(|one| (*one).to_owned()).collect();
            let verdicts = Verdicts {
                solid: own(solid),
                dangling: own(dangling),
                waiting: own(waiting),
                unseen: false,
            };
            assert_eq!(
                verdict(&object(finalizer), &verdicts, leaf),
                expected,
                "{verdicts:?}"
            );
        };
        let background = || Verdict::Delete(PropagationPolicy::Background);
        let foreground = || Verdict::Delete(PropagationPolicy::Foreground);
        check(&["a"], &[], &[], true, &[], Verdict::Keep);
        check(
            &["a"],
            &["b"],
            &["c"],
            true,
            &[],
            Verdict::Detach(vec!["b".into(), "c".into()]),
        );
        check(&[], &["b"], &[], true, &[], background());
        check(&[], &["b"], &[], false, &[], background());
        check(&[], &[], &["c"], true, &[], background());
        check(&[], &[], &["c"], false, &[], foreground());
        check(&[], &["b"], &[], false, &[FOREGROUND], foreground());
        check(
            &[],
            &["b"],
            &[],
            false,
            &[ORPHAN],
            Verdict::Delete(PropagationPolicy::Orphan),
        );
    }
}
