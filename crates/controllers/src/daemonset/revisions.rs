//! The history of a DaemonSet: finds or records the revision of its present template, and deletes old ones.

use std::sync::Arc;

use k8s_openapi::api::apps::v1::{ControllerRevision, DaemonSet, DaemonSetSpec};
use k8s_openapi::apimachinery::pkg::runtime::RawExtension;
use kube::Api;
use kube::api::{Patch, PatchParams, PostParams};
use serde_json::{Value, json};
use skiff_client::{ErrorExt, stage};

use super::DaemonSets;
use super::daemon::Daemon;
use crate::history::{self, REVISION_LABEL};
use crate::{Error, ownership, selector};

pub(super) struct History {
    /// What pods of the present template carry as [`REVISION_LABEL`].
    pub(super) hash: String,
    pub(super) collision_count: i32,
    /// The revisions of other templates, oldest first.
    old: Vec<Arc<ControllerRevision>>,
}

fn hash_of(revision: &ControllerRevision) -> Option<&String> {
    revision.metadata.labels.as_ref()?.get(REVISION_LABEL)
}

impl DaemonSets {
    fn revisions_api(&self, set: &DaemonSet) -> Api<ControllerRevision> {
        let namespace = set.metadata.namespace.as_deref().unwrap_or_default();
        Api::namespaced(self.context.client.clone(), namespace)
    }

    pub(super) async fn construct_history(
        &self,
        set: &DaemonSet,
        spec: &DaemonSetSpec,
        pods: &[Arc<Daemon>],
    ) -> Result<History, Error> {
        let api = self.revisions_api(set);
        let data = history::data_of(&spec.template);
        let (mut current, old) = self.claim_revisions(set, spec, &data).await?;
        let mut collision_count = set
            .status
            .as_ref()
            .and_then(|status| status.collision_count)
            .unwrap_or(0);
        let number = history::next_number(&old);
        let current = match current.pop() {
            Some(newest) => {
                self.remove_duplicates(set, &newest, &current, pods).await?;
                if newest.revision < number {
                    Arc::new(history::renumber(&api, &newest, number).await?)
                } else {
                    newest
                }
            }
            None => {
                let build = |hash: &str| new_revision(set, spec, hash, &data, number);
                let created = history::create(&api, &data, &mut collision_count, build);
                Arc::new(stage("create revision", created).await?)
            }
        };
        Ok(History {
            hash: hash_of(&current).cloned().unwrap_or_default(),
            collision_count,
            old,
        })
    }

    /// The set's revisions, those of its present template and the others, each oldest first.
    async fn claim_revisions(
        &self,
        set: &DaemonSet,
        spec: &DaemonSetSpec,
        data: &Value,
    ) -> Result<(Vec<Arc<ControllerRevision>>, Vec<Arc<ControllerRevision>>), Error> {
        let selects = |labels: Option<&selector::Labels>| selector::matches(&spec.selector, labels);
        let candidates = ownership::candidates(&self.revisions, &set.metadata, selects);
        let selects = |one: &ControllerRevision| selects(one.metadata.labels.as_ref());
        let client = &self.context.client;
        let mut all = ownership::claim_all(client, set, candidates, selects, |_| true).await?;
        let api = self.revisions_api(set);
        for revision in &mut all {
            if hash_of(revision).is_none() {
                // The name is unique, which is all that is asked of the label.
                let name = revision.metadata.name.clone().unwrap_or_default();
                let mut labelled = ControllerRevision::clone(revision);
                let labels = labelled.metadata.labels.get_or_insert_default();
                labels.insert(REVISION_LABEL.into(), name.clone());
                *revision = Arc::new(api.replace(&name, &PostParams::default(), &labelled).await?);
            }
        }
        history::sort(&mut all);
        let (mut current, mut old): (Vec<_>, Vec<_>) = all
            .into_iter()
            .partition(|revision| history::has_data(revision, data));
        if current.is_empty() && old.last().is_some_and(|latest| history::means(latest, data)) {
            current.extend(old.pop());
        }
        Ok((current, old))
    }

    /// Deletes other revisions of the same template; pods move to the one that stays.
    async fn remove_duplicates(
        &self,
        set: &DaemonSet,
        kept: &ControllerRevision,
        others: &[Arc<ControllerRevision>],
        pods: &[Arc<Daemon>],
    ) -> Result<(), Error> {
        if others.is_empty() {
            return Ok(());
        }
        let pods_api = self.pods_api(set);
        for pod in pods {
            // A pod of another template keeps its label: it still has to be updated.
            let label = pod.revision.as_ref();
            let duplicated = label.is_some() && others.iter().any(|one| hash_of(one) == label);
            if duplicated {
                let patch = json!({"metadata": {"labels": {REVISION_LABEL: hash_of(kept)}}});
                let patched = pods_api
                    .patch(&pod.name, &PatchParams::default(), &Patch::Merge(patch))
                    .await;
                match patched {
                    Err(error) if !error.is_not_found() => return Err(error.into()),
                    _ => {}
                }
            }
        }
        let api = self.revisions_api(set);
        for other in others {
            history::delete(&api, other).await?;
        }
        Ok(())
    }

    /// Deletes the oldest revisions beyond the limit that no pod has.
    pub(super) async fn clean_history(
        &self,
        set: &DaemonSet,
        spec: &DaemonSetSpec,
        pods: &[Arc<Daemon>],
        history: &History,
    ) -> Result<(), Error> {
        let limit = usize::try_from(spec.revision_history_limit.unwrap_or(10)).unwrap_or(0);
        let excess = history.old.len().saturating_sub(limit);
        let in_use = |revision: &ControllerRevision| {
            let hash = hash_of(revision);
            hash.is_some() && pods.iter().any(|pod| pod.revision.as_ref() == hash)
        };
        let api = self.revisions_api(set);
        for revision in history::oldest_unused(&history.old, in_use, excess) {
            history::delete(&api, revision).await?;
        }
        Ok(())
    }
}

fn new_revision(
    set: &DaemonSet,
    spec: &DaemonSetSpec,
    hash: &str,
    data: &Value,
    number: i64,
) -> ControllerRevision {
    let template = spec.template.metadata.as_ref();
    let mut labels = template.and_then(|meta| meta.labels.clone()).unwrap_or_default();
    labels.insert(REVISION_LABEL.into(), hash.to_owned());
    let mut revision = ControllerRevision {
        data: Some(RawExtension(data.clone())),
        revision: number,
        ..Default::default()
    };
    let meta = &mut revision.metadata;
    meta.name = Some(history::name(
        set.metadata.name.as_deref().unwrap_or_default(),
        hash,
    ));
    meta.namespace = set.metadata.namespace.clone();
    meta.labels = Some(labels);
    meta.annotations = set.metadata.annotations.clone();
    meta.owner_references = Some(vec![ownership::controller_reference(set)]);
    revision
}
