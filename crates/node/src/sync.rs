//! One sync of a pod that should run: volumes, sandbox, containers, in upstream's order. `plan.rs` decides
//! what to do; this file does it, and says when to sync again.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;
use std::time::Instant;

use k8s_openapi::api::core::v1::{Container, Pod, Secret};
use skiff_cri::v1;

use crate::field_ref::NodeFacts;
use crate::images::describe;
use crate::kill::Target;
use crate::kubelet::Kubelet;
use crate::marks::stage;
use crate::observed::{self, ObservedPod};
use crate::plan::{KillReason, PodActions, plan};
use crate::pod_state::PodState;
use crate::pods;
use crate::resources::is_sidecar;
use crate::restart_all::{self, Reset};
use crate::sandbox_config::sandbox_config;
use crate::start::{StartContext, StartError};
use crate::status::{WaitingReason, condition};
use crate::volumes::{MountedVolumes, event_messages};

/// The outcome of a sync.
#[derive(Debug, PartialEq, Eq)]
pub enum Pass {
    /// The pod is as its spec says; sync again when something changes.
    Settled,
    /// Try again after this long, or earlier if something changes.
    Retry(Duration),
    /// Something failed; try again with growing pauses.
    Failed,
    /// The pod has run to its end.
    Finished,
}

impl Pass {
    /// A part failed that is tried again.
    fn and_failed(self) -> Pass {
        match self {
            Pass::Settled => Pass::Failed,
            other => other,
        }
    }

    /// The sooner of two.
    fn and_retry(self, after: Option<Duration>) -> Pass {
        match (self, after) {
            (Pass::Retry(a), Some(b)) => Pass::Retry(a.min(b)),
            (Pass::Settled | Pass::Failed, Some(b)) => Pass::Retry(b),
            (Pass::Settled, None) => Pass::Failed,
            (other, _) => other,
        }
    }
}

impl Kubelet {
    /// Brings the pod closer to its spec. May be dropped at any point: what changes the runtime or the disk runs to its
    /// end, and the next pass waits for that, looks at the runtime and goes on from there.
    pub async fn sync_pod(self: &Arc<Self>, state: &Arc<PodState>) -> Pass {
        let pod = state.allocated_pod();
        if let Err(status) = self.observe(state).await {
            let error = describe(&status);
            tracing::warn!(pod = %pods::full_name(&pod), error, "the runtime reports no status for the pod sandbox");
            let message = format!("error determining status: {error}");
            self.recorder
                .event(&pods::reference(&pod), "Warning", "FailedSync", message);
            return Pass::Failed;
        }
        let observed = state.observed();
        let record = state.resize.lock().record.clone();
        let restart_all = self.restarts_all(state, &pod);
        let actions = plan(&pod, &observed, &self.probes, record.as_ref(), restart_all);
        self.settle_resize(state, &pod, &observed);
        self.probes.add_pod(self, state, &pod);
        self.refresh_status(state);
        if actions.kill_pod && !actions.create_sandbox {
            return Pass::Finished;
        }
        if !pods::is_host_network(&pod) && !self.wait_for_network(&pod).await {
            return Pass::Failed;
        }
        let facts = self.node_facts(observed.ips());
        let prepared = {
            let (kubelet, pod) = (self.clone(), pod.clone());
            state.change(async move { kubelet.prepare(&pod, &facts).await })
        };
        let mounted = match stage("volumes", prepared).await {
            Ok(mounted) => mounted,
            Err(errors) => {
                for error in errors {
                    self.recorder
                        .event(&pods::reference(&pod), "Warning", "FailedMount", error);
                }
                return Pass::Failed;
            }
        };
        if !needs_runtime(&actions) && !self.pod_cgroup_differs(&pod) {
            return Pass::Settled;
        }
        let pass = Box::pin(self.act(state, &pod, &observed, actions, &mounted)).await;
        if self.observe(state).await.is_ok() {
            self.settle_resize(state, &pod, &state.observed());
            self.refresh_status(state);
            self.probes.wake_pod(&state.uid);
        }
        pass
    }

    /// Whether all containers of the pod are to be restarted, by the condition that says so: it stays until they are
    /// removed, whatever becomes of the container that asked for it.
    fn restarts_all(&self, state: &PodState, pod: &Pod) -> bool {
        if !pod.spec.as_ref().is_some_and(restart_all::is_possible) {
            return false;
        }
        self.refresh_status(state);
        let status = state.status();
        condition(&status, restart_all::CONDITION).is_some_and(|condition| condition.status == "True")
    }

    /// Removes a container, for all to start again. Its log stays.
    async fn reset_container(&self, pod: &Pod, pod_ip: &str, reset: &Reset) -> Result<(), String> {
        if reset.kill {
            let target = Target {
                id: &reset.id,
                name: &reset.name,
                message: "killing",
                reason: KillReason::Other,
            };
            self.kill_container(pod, pod_ip, &target, Some(0), async {})
                .await?;
        }
        let removed = self.runtime.remove_container(&reset.id).await;
        removed.map_err(|status| describe(&status))
    }

    /// Cgroup, directories and volumes. Safe to repeat, which keeps volumes up to date.
    async fn prepare(&self, pod: &Pod, facts: &NodeFacts) -> Result<MountedVolumes, Vec<String>> {
        let began = Instant::now();
        match self.cgroups.create_pod(pod) {
            Ok(true) => self.metrics.actions.cgroup_changed("create", began.elapsed()),
            Ok(false) => {}
            Err(error) => return Err(vec![format!("error: failed to create the pod's cgroup: {error}")]),
        }
        self.volumes
            .set_up(pod, facts)
            .await
            .map_err(|errors| event_messages(&errors))
    }

    async fn act(
        self: &Arc<Self>,
        state: &Arc<PodState>,
        pod: &Arc<Pod>,
        observed: &ObservedPod,
        actions: PodActions,
        mounted: &MountedVolumes,
    ) -> Pass {
        state.set_in_runtime();
        let pod_ip = observed.ips().first().cloned().unwrap_or_default();
        if actions.kill_pod {
            if !actions.sandbox_id.is_empty() {
                let message = "Pod sandbox changed, it will be killed and re-created.".to_owned();
                self.recorder
                    .event(&pods::reference(pod), "Normal", "SandboxChanged", message);
            }
            if let Err(error) = self.kill_pod(pod, observed, None).await {
                tracing::warn!(pod = %pods::full_name(pod), error, "cannot stop the remaining containers of the pod");
                return Pass::Failed;
            }
        }
        for kill in &actions.containers_to_kill {
            let target = Target {
                id: &kill.id,
                name: &kill.name,
                message: &kill.message,
                reason: kill.reason,
            };
            if let Err(error) = self.kill_container(pod, &pod_ip, &target, None, async {}).await {
                tracing::warn!(pod = %pods::full_name(pod), error, "cannot kill the container");
                return Pass::Failed;
            }
        }
        for reset in &actions.containers_to_reset {
            if let Err(error) = self.reset_container(pod, &pod_ip, reset).await {
                tracing::warn!(pod = %pods::full_name(pod), container = reset.name, error, "cannot remove the container");
                return Pass::Failed;
            }
        }
        if !actions.containers_to_reset.is_empty() && !actions.create_sandbox {
            return Pass::Retry(Duration::ZERO);
        }
        let user_namespace = self.user_namespace(pod).await;
        let config = match user_namespace.and_then(|user_namespace| {
            sandbox_config(
                pod,
                actions.attempt,
                &self.config,
                &self.host_dns(),
                self.cgroups.pod_path(pod),
                user_namespace,
            )
        }) {
            Ok((config, warnings)) => {
                for (reason, warning) in warnings {
                    self.recorder
                        .event(&pods::reference(pod), "Warning", reason, warning);
                }
                config
            }
            Err(error) => {
                self.recorder.event(
                    &pods::reference(pod),
                    "Warning",
                    "FailedCreatePodSandBox",
                    format!("Failed to create pod sandbox: {error}"),
                );
                return Pass::Failed;
            }
        };
        let (sandbox_id, pod_ips) = if actions.create_sandbox {
            match stage("sandbox", Box::pin(self.create_sandbox(state, pod, &config))).await {
                Ok(made) => made,
                Err(()) => return Pass::Failed,
            }
        } else {
            (actions.sandbox_id.clone(), observed.ips().to_vec())
        };
        let pod_ips = if pods::is_host_network(pod) {
            self.config.host_ips()
        } else {
            pod_ips
        };
        let mut resized = true;
        if (!actions.updates.is_empty() || self.pod_cgroup_differs(pod))
            && let Err(failed) = Box::pin(self.resize_pod(state, pod, &sandbox_id, &actions.updates)).await
        {
            self.tell_resize_failed(state, pod, &failed);
            resized = false;
        }
        let pull_secrets = self.pull_secrets(pod).await;
        let image_volumes = if starts_anything(&actions) {
            let ensured = self.images.ensure_volumes(pod, &pull_secrets, &config);
            stage("image volumes", ensured).await
        } else {
            HashMap::new()
        };
        let observed = state.observed();
        let facts = self.node_facts(&pod_ips);
        let context = StartContext {
            state,
            pod,
            observed: &observed,
            sandbox_id: &sandbox_id,
            sandbox_config: &config,
            pod_ips: &pod_ips,
            mounted,
            pull_secrets: &pull_secrets,
            image_volumes: &image_volumes,
            facts: &facts,
        };
        let pass = self.start_containers(state, &context, &actions).await;
        if resized { pass } else { pass.and_failed() }
    }

    async fn create_sandbox(
        self: &Arc<Self>,
        state: &Arc<PodState>,
        pod: &Pod,
        config: &v1::PodSandboxConfig,
    ) -> Result<(String, Vec<String>), ()> {
        let event = |reason: &str, message: String| {
            self.recorder
                .event(&pods::reference(pod), "Warning", reason, message)
        };
        // Without its devices the pod must not run.
        let prepare = {
            let (kubelet, pod) = (self.clone(), pod.clone());
            async move { kubelet.dra.prepare(&pod).await }
        };
        if let Err(error) = state.change(prepare).await {
            event(
                "FailedPrepareDynamicResources",
                format!("Failed to prepare dynamic resources: {error}"),
            );
            return Err(());
        }
        let handler = match self.runtime_handler(pod).await {
            Ok(handler) => handler,
            Err(error) => {
                event(
                    "FailedCreatePodSandBox",
                    format!("Failed to create pod sandbox: {error}"),
                );
                return Err(());
            }
        };
        if let Err(error) = std::fs::create_dir_all(&config.log_directory) {
            event(
                "FailedCreatePodSandBox",
                format!(
                    "Failed to create log directory for pod {:?}: {error}",
                    pods::full_name(pod)
                ),
            );
            return Err(());
        }
        let (runtime, wanted) = (self.runtime.clone(), config.clone());
        let id = state
            .change(async move { runtime.run_sandbox(wanted, handler).await })
            .await
            .map_err(|status| {
                // The pod's own end cancels calls; that is no failure to tell of.
                if !state.is_deleted() {
                    event(
                        "FailedCreatePodSandBox",
                        format!("Failed to create pod sandbox: {}", describe(&status)),
                    );
                }
            })?;
        match self.runtime.sandbox_status(id.clone(), pods::uid(pod)).await {
            Ok(Some(status)) => {
                let sandbox = observed::sandbox_from_cri(status);
                let ips = sandbox.ips.clone();
                let mut seen = (*state.observed()).clone();
                seen.sandboxes.retain(|s| s.id != sandbox.id);
                for old in &mut seen.sandboxes {
                    old.ready = false;
                }
                seen.sandboxes.insert(0, sandbox);
                state.set_observed(seen);
                self.refresh_status(state);
                Ok((id, ips))
            }
            Ok(None) => {
                event(
                    "FailedPodSandBoxStatus",
                    "Unable to get pod sandbox status: it is gone".to_owned(),
                );
                Err(())
            }
            Err(status) => {
                event(
                    "FailedPodSandBoxStatus",
                    format!("Unable to get pod sandbox status: {}", describe(&status)),
                );
                Err(())
            }
        }
    }

    /// In order, one after the other: a postStart hook may be there to hold up the next container.
    async fn start_containers(
        self: &Arc<Self>,
        state: &Arc<PodState>,
        context: &StartContext<'_>,
        actions: &PodActions,
    ) -> Pass {
        let Some(spec) = &context.pod.spec else {
            return Pass::Settled;
        };
        let mut pass = Pass::Settled;
        let ephemeral = spec.ephemeral_containers.as_deref().unwrap_or_default();
        for index in &actions.ephemeral_containers_to_start {
            let container = pods::ephemeral_as_container(&ephemeral[*index]);
            let target = ephemeral[*index].target_container_name.as_deref();
            let result = Box::pin(self.start_container(context, &container, target)).await;
            pass = self.note_start(state, &container, result, pass);
        }
        let init = spec.init_containers.as_deref().unwrap_or_default();
        for index in &actions.init_containers_to_start {
            let container = &init[*index];
            let result = Box::pin(self.start_container(context, container, None)).await;
            let failed = result.is_err();
            pass = self.note_start(state, container, result, pass);
            if failed && !is_sidecar(container) {
                return pass;
            }
        }
        for index in &actions.containers_to_start {
            let container = &spec.containers[*index];
            let result = Box::pin(self.start_container(context, container, None)).await;
            pass = self.note_start(state, container, result, pass);
        }
        pass
    }

    fn note_start(
        self: &Arc<Self>,
        state: &Arc<PodState>,
        container: &Container,
        result: Result<(), StartError>,
        pass: Pass,
    ) -> Pass {
        match result {
            Ok(()) => {
                state.set_reason(&container.name, None);
                pass
            }
            Err(StartError {
                reason,
                message,
                retry_after,
            }) => {
                state.set_reason(
                    &container.name,
                    Some(WaitingReason {
                        reason: reason.to_owned(),
                        message,
                    }),
                );
                self.refresh_status(state);
                pass.and_retry(retry_after)
            }
        }
    }

    /// Those of the pod's pull secrets that exist; a missing one is told of, but an image may be public.
    async fn pull_secrets(&self, pod: &Pod) -> Vec<Arc<Secret>> {
        let mut secrets = Vec::new();
        let mut missing = Vec::new();
        for reference in pod
            .spec
            .iter()
            .flat_map(|s| s.image_pull_secrets.iter().flatten())
            .filter(|r| !r.name.is_empty())
        {
            match self.objects.secret(pods::namespace(pod), &reference.name).await {
                Ok(Some(secret)) => secrets.push(secret),
                _ => missing.push(reference.name.clone()),
            }
        }
        if !missing.is_empty() {
            let message = format!(
                "Unable to retrieve some image pull secrets ({}); attempting to pull the image may not succeed.",
                missing.join(", ")
            );
            self.recorder.event(
                &pods::reference(pod),
                "Warning",
                "FailedToRetrieveImagePullSecret",
                message,
            );
        }
        secrets
    }
}

fn starts_anything(actions: &PodActions) -> bool {
    !actions.init_containers_to_start.is_empty()
        || !actions.containers_to_start.is_empty()
        || !actions.ephemeral_containers_to_start.is_empty()
}

fn needs_runtime(actions: &PodActions) -> bool {
    actions.kill_pod
        || actions.create_sandbox
        || !actions.containers_to_kill.is_empty()
        || !actions.containers_to_reset.is_empty()
        || starts_anything(actions)
        || !actions.updates.is_empty()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn passes_add_up_to_the_soonest() {
        let seconds = Duration::from_secs;
        assert_eq!(Pass::Settled.and_retry(Some(seconds(5))), Pass::Retry(seconds(5)));
        assert_eq!(
            Pass::Retry(seconds(9)).and_retry(Some(seconds(5))),
            Pass::Retry(seconds(5))
        );
        assert_eq!(Pass::Settled.and_retry(None), Pass::Failed);
        assert_eq!(Pass::Failed.and_retry(Some(seconds(5))), Pass::Retry(seconds(5)));
        assert_eq!(Pass::Retry(seconds(5)).and_retry(None), Pass::Retry(seconds(5)));
    }
}
