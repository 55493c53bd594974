//! A PodGroup is not deleted while pods belong to it: admission gives it a finalizer, and here it is taken away once all of
//! its pods have ended.

use std::sync::Arc;

use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::scheduling::v1alpha2::PodGroup;
use kube::api::{ListParams, PostParams};
use kube::{Api, Client, ResourceExt};
use skiff_client::{Action, Change, ErrorExt, Informer, Key, Reconcile};

use crate::{Context, Error};

const FINALIZER: &str = "scheduling.k8s.io/podgroup-protection";
const BY_GROUP: &str = "pod-group-protection/group";

/// Whether the group is being deleted and waits for the finalizer to go.
fn waits(group: &PodGroup) -> bool {
    let mut finalizers = group.metadata.finalizers.iter().flatten();
    group.metadata.deletion_timestamp.is_some() && finalizers.any(|found| found == FINALIZER)
}

fn has_ended(pod: &Pod) -> bool {
    let phase = pod.status.as_ref().and_then(|status| status.phase.as_deref());
    matches!(phase, Some("Succeeded" | "Failed"))
}

/// The group that the pod belongs to.
fn group_of(pod: &Pod) -> Option<Key> {
    let group = pod.spec.as_ref()?.scheduling_group.as_ref()?;
    let name = group.pod_group_name.clone()?;
    Some(Key::new(pod.namespace().unwrap_or_default(), name))
}

/// The group that the pod keeps from being deleted.
fn kept_by(pod: &Pod) -> Vec<String> {
    let group = group_of(pod).filter(|_| !has_ended(pod));
    group.iter().map(ToString::to_string).collect()
}

/// The groups that a pod may have left.
fn left_by(change: &Change<Pod>) -> Vec<Key> {
    match change {
        Change::Deleted { last } => group_of(last).into_iter().collect(),
        Change::Applied { new, .. } if has_ended(new) => group_of(new).into_iter().collect(),
        // A pod that was deleted and made anew between two looks.
        Change::Applied { old: Some(old), new } if old.metadata.uid != new.metadata.uid => {
            group_of(old).into_iter().collect()
        }
        Change::Applied { .. } => Vec::new(),
    }
}

fn woken_if_waiting(change: &Change<PodGroup>) -> Option<Key> {
    let Change::Applied { new, .. } = change else {
        return None;
    };
    waits(new).then(|| Key::of(&**new))
}

struct Groups {
    client: Client,
    groups: Informer<PodGroup>,
    pods: Informer<Pod>,
}

pub(crate) async fn run(context: Context) {
    let reconciler = Arc::new(Groups {
        client: context.client.clone(),
        groups: context.informers.informer(),
        pods: context.informers.informer(),
    });
    reconciler.pods.add_index(BY_GROUP, kept_by);
    context
        .controller("podgroupprotection", reconciler)
        .workers(1)
        .watches(|r| &r.groups, |_, change| woken_if_waiting(change))
        .watches(|r| &r.pods, |_, change| left_by(change))
        .run()
        .await;
}

impl Reconcile for Groups {
    type Key = Key;
    type Error = Error;

    async fn reconcile(&self, key: Key) -> Result<Action, Error> {
        let Some(group) = self.groups.get(&key.namespace, &key.name) else {
            return Ok(Action::Done);
        };
        if !waits(&group) || !self.pods.by_index(BY_GROUP, &key.to_string()).is_empty() {
            return Ok(Action::Done);
        }
        // A pod may have come that the copy does not show yet.
        let live: Api<Pod> = Api::namespaced(self.client.clone(), &key.namespace);
        let live = live.list(&ListParams::default()).await?;
        if live
            .items
            .iter()
            .any(|pod| kept_by(pod).contains(&key.to_string()))
        {
            return Ok(Action::Done);
        }
        let mut wanted = (*group).clone();
        wanted.finalizers_mut().retain(|found| found != FINALIZER);
        let api: Api<PodGroup> = Api::namespaced(self.client.clone(), &key.namespace);
        match api.replace(&key.name, &PostParams::default(), &wanted).await {
            Ok(_) => Ok(Action::Done),
            Err(error) if error.is_not_found() => Ok(Action::Done),
            Err(error) => Err(error.into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn pod(uid: &str, group: &str, phase: &str) -> Arc<Pod> {
        let pod = json!({"metadata": {"name": "p", "namespace": "ns", "uid": uid},
            "spec": {"containers": [], "schedulingGroup": {"podGroupName": group}},
            "status": {"phase": phase}});
        Arc::new(serde_json::from_value(pod).unwrap())
    }

    #[test]
    fn pods_keep_their_group_until_they_end() {
        assert_eq!(kept_by(&pod("a", "g", "Running")), ["ns/g"]);
        assert!(kept_by(&pod("a", "g", "Failed")).is_empty());
        let key = || vec![Key::new("ns", "g")];
        let applied = |old: Option<Arc<Pod>>, new: Arc<Pod>| {
            let old = old.map(Into::into);
            left_by(&Change::Applied { old, new })
        };
        assert_eq!(applied(None, pod("a", "g", "Pending")), []);
        assert_eq!(applied(None, pod("a", "g", "Succeeded")), key());
        assert_eq!(
            applied(Some(pod("a", "g", "Running")), pod("b", "h", "Running")),
            key()
        );
        let last = pod("a", "g", "Running");
        assert_eq!(left_by(&Change::Deleted { last }), key());
    }
}
