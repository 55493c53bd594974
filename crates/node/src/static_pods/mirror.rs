//! Mirror pods: what the API shows of static pods. One is made for each as soon as the node is registered, made again
//! when somebody deletes it, and removed when its static pod has ended.

use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference;
use k8s_openapi::jiff::Timestamp;
use kube::Api;
use kube::api::{DeleteParams, PostParams, Preconditions};
use skiff_client::ErrorExt;

use super::annotations::{HASH, MIRROR};
use super::{is_mirror, same_name};
use crate::kubelet::Kubelet;
use crate::objects::error_message;
use crate::pod_state::PodState;
use crate::pods;

/// After a failure, and to find what was missed.
const RETRY: Duration = Duration::from_secs(2);
const RESYNC: Duration = Duration::from_secs(60);

/// A mirror that the informer does not show for so long is gone.
const UNSEEN: i64 = 10;

fn age(mirror: &Pod) -> i64 {
    let made = mirror.metadata.creation_timestamp.as_ref();
    made.map_or(i64::MAX, |made| Timestamp::now().as_second() - made.0.as_second())
}

/// Upstream's comparison: a mirror of another version of the manifest is none.
fn mirrors(mirror: &Pod, pod: &Pod) -> bool {
    let annotation = |pod: &Pod, name: &str| {
        let all = pod.metadata.annotations.as_ref();
        all.and_then(|all| all.get(name).cloned())
    };
    same_name(mirror, pod) && annotation(mirror, MIRROR) == annotation(pod, HASH)
}

/// The mirror of a pod, on behalf of the node of this uid.
fn mirror_of(pod: &Pod, node_name: &str, node_uid: &str) -> Pod {
    let mut mirror = pod.clone();
    let all = mirror.metadata.annotations.get_or_insert_default();
    let hash = all.get(HASH).cloned().unwrap_or_default();
    all.insert(MIRROR.to_owned(), hash);
    mirror.metadata.uid = None;
    mirror.metadata.owner_references = Some(vec![OwnerReference {
        api_version: "v1".to_owned(),
        kind: "Node".to_owned(),
        name: node_name.to_owned(),
        uid: node_uid.to_owned(),
        controller: Some(true),
        block_owner_deletion: None,
    }]);
    mirror
}

impl Kubelet {
    /// The API has a mirror, or another version of it.
    pub(crate) fn mirror_applied(&self, mirror: &Arc<Pod>) {
        if let Some(state) = self.static_state(mirror) {
            state.set_mirror(Some(mirror.clone()));
        }
        self.static_pods.changed.notify_one();
    }

    pub(crate) fn mirror_gone(&self, last: &Arc<Pod>) {
        let is_last = |mirror: Arc<Pod>| mirror.metadata.uid == last.metadata.uid;
        if let Some(state) = self
            .static_state(last)
            .filter(|state| state.mirror().is_some_and(is_last))
        {
            state.set_mirror(None);
        }
        self.static_pods.changed.notify_one();
    }

    fn static_state(&self, mirror: &Pod) -> Option<Arc<PodState>> {
        let mut states = self.states().into_iter();
        states.find(|state| state.is_static() && same_name(&state.pod(), mirror))
    }

    /// Makes and removes mirrors; returns when to look again at the latest.
    pub(super) async fn reconcile_mirrors(&self) -> Duration {
        let mut pause = RESYNC;
        for state in self.states() {
            if !state.is_static() || state.is_gone() {
                continue;
            }
            if let Err(error) = self.reconcile_mirror(&state).await {
                let pod = pods::full_name(&state.pod());
                tracing::warn!(pod, error, "cannot mirror a static pod in the API; trying again");
                pause = RETRY;
            }
        }
        if !self.static_pods.are_read() {
            return pause;
        }
        // A static pod that is ending is shown until it has ended.
        for mirror in self.pods.list().into_iter().filter(|pod| is_mirror(pod)) {
            if self.static_state(&mirror).is_none()
                && let Err(error) = self.delete_mirror(&mirror).await
            {
                let pod = pods::full_name(&mirror);
                tracing::warn!(
                    pod,
                    error,
                    "cannot remove the mirror of a static pod; trying again"
                );
                pause = RETRY;
            }
        }
        pause
    }

    async fn reconcile_mirror(&self, state: &PodState) -> Result<(), String> {
        let pod = state.pod();
        let known = self.pods.get(pods::namespace(&pod), pods::name(&pod));
        if let Some(mirror) = known.filter(|known| is_mirror(known)) {
            if mirror.metadata.deletion_timestamp.is_none() && mirrors(&mirror, &pod) {
                if state
                    .mirror()
                    .is_none_or(|known| known.metadata.uid != mirror.metadata.uid)
                {
                    state.set_mirror(Some(mirror));
                }
                return Ok(());
            }
            self.delete_mirror(&mirror).await?;
            state.set_mirror(None);
        } else if state.mirror().is_some() {
            // Made a moment ago, and the informer does not show it yet; or gone since.
            if state.mirror().is_some_and(|mirror| age(&mirror) < UNSEEN) {
                return Ok(());
            }
            state.set_mirror(None);
        }
        let Some(node) = self.node.list().into_iter().next() else {
            // It is registered soon, and then this is called again.
            return Ok(());
        };
        let uid = node.metadata.uid.clone().unwrap_or_default();
        let mirror = mirror_of(&pod, &self.config.node_name, &uid);
        let api: Api<Pod> = Api::namespaced(self.client.clone(), pods::namespace(&pod));
        match api.create(&PostParams::default(), &mirror).await {
            Ok(made) => {
                tracing::info!(pod = pods::full_name(&pod), "made a mirror pod of a static pod");
                state.set_mirror(Some(Arc::new(made)));
                Ok(())
            }
            Err(error) => Err(error_message(&error)),
        }
    }

    async fn delete_mirror(&self, mirror: &Pod) -> Result<(), String> {
        let api: Api<Pod> = Api::namespaced(self.client.clone(), pods::namespace(mirror));
        let parameters = DeleteParams {
            grace_period_seconds: Some(0),
            preconditions: Some(Preconditions {
                uid: mirror.metadata.uid.clone(),
                resource_version: None,
            }),
            ..Default::default()
        };
        match api.delete(pods::name(mirror), &parameters).await {
            Ok(_) => Ok(()),
            Err(error) if error.is_not_found() || error.is_conflict() => Ok(()),
            Err(error) => Err(error_message(&error)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn mirrors_of_a_pod() {
        let pod: Pod = serde_json::from_value(json!({"metadata": {"name": "web-n", "namespace": "default",
            "uid": "h1", "annotations": {"kubernetes.io/config.hash": "h1", "kubernetes.io/config.source": "file"}}}))
        .unwrap();
        let mirror = mirror_of(&pod, "n", "u");
        assert_eq!(mirror.metadata.uid, None);
        assert!(is_mirror(&mirror) && mirrors(&mirror, &pod));
        let owner = &mirror.metadata.owner_references.as_ref().unwrap()[0];
        assert_eq!((owner.kind.as_str(), owner.uid.as_str()), ("Node", "u"));
        let mut other = pod.clone();
        other
            .metadata
            .annotations
            .as_mut()
            .unwrap()
            .insert(HASH.to_owned(), "h2".to_owned());
        assert!(!mirrors(&mirror, &other));
    }
}
