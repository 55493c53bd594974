//! Carries a preemption out, beside the cycles: victims get their condition, are deleted and told why.

use crate::pod::PodInfo;
use futures::future::join_all;
use k8s_openapi::api::core::v1::{ObjectReference, Pod};
use kube::api::{Api, DeleteParams, Patch, PatchParams, Preconditions};
use parking_lot::Mutex;
use serde_json::json;
use skiff_client::{Client, ErrorExt, EventRecorder};
use std::collections::HashSet;
use std::sync::Arc;

/// Pods whose victims are being deleted.
#[derive(Default)]
pub(crate) struct Preempting(Mutex<HashSet<Arc<str>>>);

impl Preempting {
    pub(crate) fn contains(&self, uid: &str) -> bool {
        self.0.lock().contains(uid)
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.0.lock().is_empty()
    }

    pub(crate) fn begin(self: &Arc<Self>, pod: &PodInfo) -> Running {
        self.0.lock().insert(Arc::clone(&pod.uid));
        Running {
            preempting: Arc::clone(self),
            uid: Arc::clone(&pod.uid),
        }
    }
}

/// A preemption under way; its end, be it by a panic, lets the pod be tried again.
pub(crate) struct Running {
    preempting: Arc<Preempting>,
    uid: Arc<str>,
}

impl Drop for Running {
    fn drop(&mut self) {
        self.preempting.0.lock().remove(&self.uid);
    }
}

/// The reference that an event about the pod carries.
pub(crate) fn reference(pod: &PodInfo) -> ObjectReference {
    ObjectReference {
        api_version: Some("v1".to_owned()),
        kind: Some("Pod".to_owned()),
        name: Some(pod.key.name.clone()),
        namespace: Some(pod.key.namespace.clone()),
        uid: Some(pod.uid.to_string()),
        resource_version: Some(pod.version.clone()),
        field_path: None,
    }
}

/// Deletes the victims. An error of one does not keep the others from going.
pub(crate) async fn preempt(
    client: &Client,
    recorder: &EventRecorder,
    pod: &PodInfo,
    node: &str,
    victims: &[Arc<PodInfo>],
) -> Result<(), kube::Error> {
    let going = victims.iter().filter(|victim| !victim.deleting);
    let results = join_all(going.map(|victim| preempt_one(client, recorder, pod, node, victim))).await;
    results.into_iter().collect()
}

async fn preempt_one(
    client: &Client,
    recorder: &EventRecorder,
    pod: &PodInfo,
    node: &str,
    victim: &PodInfo,
) -> Result<(), kube::Error> {
    let api: Api<Pod> = Api::namespaced(client.clone(), &victim.key.namespace);
    let now = skiff_meta::time::format_seconds(k8s_openapi::jiff::Timestamp::now());
    let message = format!(
        "{}: preempting to accommodate a higher priority pod",
        pod.shape.scheduler_name
    );
    let condition = json!({
        "type": "DisruptionTarget", "status": "True", "reason": "PreemptionByScheduler", "message": message,
        "lastTransitionTime": now, "observedGeneration": victim.generation,
    });
    let patch = json!({"metadata": {"uid": victim.uid}, "status": {"conditions": [condition]}});
    let gone = |error: &kube::Error| error.is_not_found() || error.is_conflict();
    match api
        .patch_status(
            &victim.key.name,
            &PatchParams::default(),
            &Patch::Strategic(patch),
        )
        .await
    {
        Err(error) if gone(&error) => return Ok(()),
        other => other?,
    };
    let parameters = DeleteParams {
        preconditions: Some(Preconditions {
            uid: Some(victim.uid.to_string()),
            resource_version: None,
        }),
        ..DeleteParams::default()
    };
    match api.delete(&victim.key.name, &parameters).await {
        Err(error) if gone(&error) => return Ok(()),
        other => other?,
    };
    let message = format!("Preempted by pod {} on node {node}", pod.uid);
    recorder.event(&reference(victim), "Normal", "Preempted", message);
    Ok(())
}
