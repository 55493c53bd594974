//! Sends a pod's status to the API as soon as it changes, newest first: a status that was overtaken is never
//! written. One task a pod.

use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::{Pod, PodStatus};
use kube::Api;
use kube::api::{Patch, PatchParams};
use skiff_client::ErrorExt;
use tokio_util::sync::CancellationToken;

use crate::kubelet::Kubelet;
use crate::marks;
use crate::pod_state::PodState;
use crate::pods;
use crate::status::status_patch;

const FIRST_RETRY: Duration = Duration::from_millis(100);
const LAST_RETRY: Duration = Duration::from_secs(10);

enum Sent {
    Written(Box<Pod>),
    Nothing,
    /// The pod is not there any more, or another one of its name is.
    Gone,
}

pub async fn run(kubelet: Arc<Kubelet>, state: Arc<PodState>, stop: CancellationToken) {
    let mut dirty = state.dirty.subscribe();
    // What the API answered last; newer than what the informer shows until that has caught up.
    let mut answered: Option<Pod> = None;
    let mut retry = FIRST_RETRY;
    let mut written = 0;
    loop {
        let generation = *dirty.borrow_and_update();
        if generation > written {
            let Some(pod) = state.api_pod() else {
                // Nobody to write to; when there is a mirror, this is told again.
                written = generation;
                state.written.send_replace(written);
                continue;
            };
            let base = newer(answered.as_ref(), &pod);
            let status = state.status();
            let send = send(&kubelet, &pod, &base, &status);
            let result = match state.work() {
                Some(work) => marks::scope(work, send).await,
                None => send.await,
            };
            match result {
                Ok(Sent::Gone) if state.is_static() => {
                    // There will be another mirror.
                    written = generation;
                    state.written.send_replace(written);
                }
                Ok(Sent::Gone) => {
                    state.written.send_replace(u64::MAX);
                    return;
                }
                Ok(sent) => {
                    if let Sent::Written(pod) = sent {
                        kubelet.metrics.count_ends(&base, &status);
                        if !is_running(&base) && is_running(&status) {
                            kubelet.metrics.pod_started(state.since.elapsed());
                        }
                        answered = Some(*pod);
                    }
                    written = generation;
                    retry = FIRST_RETRY;
                    state.written.send_replace(written);
                }
                Err(error) => {
                    tracing::warn!(pod = %pods::full_name(&pod), %error, "cannot write the status of a pod; trying again");
                    tokio::select! {
                        () = stop.cancelled() => return,
                        () = tokio::time::sleep(retry) => {}
                    }
                    retry = (retry * 2).min(LAST_RETRY);
                }
            }
            continue;
        }
        tokio::select! {
            () = stop.cancelled() => return,
            changed = dirty.changed() => if changed.is_err() { return },
        }
    }
}

/// The status the API has, as far as is known here.
fn newer(answered: Option<&Pod>, informed: &Pod) -> PodStatus {
    let version = |pod: &Pod| {
        pod.metadata
            .resource_version
            .as_deref()
            .and_then(|v| v.parse::<u64>().ok())
            .unwrap_or(0)
    };
    let pod = match answered {
        Some(answered)
            if answered.metadata.uid == informed.metadata.uid && version(answered) > version(informed) =>
        {
            answered
        }
        _ => informed,
    };
    pod.status.clone().unwrap_or_default()
}

async fn send(
    kubelet: &Kubelet,
    pod: &Pod,
    base: &PodStatus,
    status: &PodStatus,
) -> Result<Sent, kube::Error> {
    let Some(patch) = status_patch(pods::uid(pod), base, status) else {
        return Ok(Sent::Nothing);
    };
    if !is_ready(base) && is_ready(status) {
        marks::complete();
    }
    let api: Api<Pod> = Api::namespaced(kubelet.client.clone(), pods::namespace(pod));
    match api
        .patch_status(pods::name(pod), &PatchParams::default(), &Patch::Strategic(patch))
        .await
    {
        Ok(pod) => Ok(Sent::Written(Box::new(pod))),
        // The patch names the uid, so a conflict means another pod of the same name.
        Err(error) if error.is_not_found() || error.is_conflict() => Ok(Sent::Gone),
        Err(error) => Err(error),
    }
}

fn is_running(status: &PodStatus) -> bool {
    status.phase.as_deref() == Some("Running")
}

fn is_ready(status: &PodStatus) -> bool {
    let mut conditions = status.conditions.iter().flatten();
    conditions.any(|condition| condition.type_ == "Ready" && condition.status == "True")
}

/// Waits until what was last made is written, or there is nobody to write to.
pub async fn flush(state: &PodState) {
    let target = *state.dirty.borrow();
    let mut written = state.written.subscribe();
    let _ = written.wait_for(|written| *written >= target).await;
}
