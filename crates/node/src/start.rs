//! Starting one container: image, configuration, create, start, postStart, with upstream's events and the
//! reasons users see in `kubectl get pods`.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use k8s_openapi::api::core::v1::{Container, Pod, Secret};
use skiff_cri::v1;

use crate::container_config::{ContainerInputs, container_config, user_namespace_of};
use crate::device_plugins::RunOptions;
use crate::durations::go_duration;
use crate::env;
use crate::env_file;
use crate::field_ref::NodeFacts;
use crate::hooks;
use crate::images::{ImageError, ImageVolume};
use crate::kill::Target;
use crate::kubelet::Kubelet;
use crate::marks::{self, stage};
use crate::mounts::{MountInputs, container_devices, container_mounts};
use crate::observed::{ContainerState, ObservedContainer, ObservedPod, container_hash};
use crate::plan::KillReason;
use crate::pod_state::PodState;
use crate::pods::{self, ContainerType};
use crate::resize::Amounts;
use crate::runtime::pod_log_dir;
use crate::security::{Seccomp, verify_run_as_non_root};
use crate::static_pods::is_static;
use crate::volumes::MountedVolumes;

/// Everything that all containers of one sync share.
pub struct StartContext<'a> {
    pub state: &'a PodState,
    pub pod: &'a Pod,
    pub observed: &'a ObservedPod,
    pub sandbox_id: &'a str,
    pub sandbox_config: &'a v1::PodSandboxConfig,
    pub pod_ips: &'a [String],
    pub mounted: &'a MountedVolumes,
    pub pull_secrets: &'a [Arc<Secret>],
    /// By the name of the volume.
    pub image_volumes: &'a HashMap<String, Result<ImageVolume, ImageError>>,
    pub facts: &'a NodeFacts,
}

/// Why a container does not run; goes into its status.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StartError {
    pub reason: &'static str,
    pub message: String,
    pub retry_after: Option<Duration>,
}

fn error(reason: &'static str, message: String) -> StartError {
    StartError {
        reason,
        message,
        retry_after: None,
    }
}

impl Kubelet {
    /// `target` is the container whose processes an ephemeral container joins.
    pub async fn start_container(
        &self,
        context: &StartContext<'_>,
        container: &Container,
        target: Option<&str>,
    ) -> Result<(), StartError> {
        let StartContext { pod, observed, .. } = *context;
        let reference = pods::container_reference(pod, &container.name);
        let event = |type_: &str, reason: &str, message: String| {
            self.recorder.event(&reference, type_, reason, message)
        };
        self.check_crash_backoff(pod, container, observed)?;

        let ensured = stage(
            "pull",
            self.images
                .ensure(pod, container, context.pull_secrets, context.sandbox_config),
        )
        .await;
        let image = ensured.map_err(|failed| {
            event("Warning", "Failed", format!("Error: {}", failed.reason));
            StartError {
                reason: failed.reason,
                message: failed.message,
                retry_after: failed.retry_after,
            }
        })?;

        let image_volumes = image_volumes_of(container, context.image_volumes).map_err(|failed| {
            event("Warning", "Failed", format!("Error: {}", failed.reason));
            StartError {
                reason: failed.reason,
                message: failed.message,
                retry_after: failed.retry_after,
            }
        })?;

        let created = stage(&format!("create {}", container.name), async {
            let config_error = |message: String| {
                event("Warning", "Failed", format!("Error: {message}"));
                error("CreateContainerConfigError", message)
            };
            let restart_count = self.next_restart_count(pod, container, observed);
            let target_container_id = match target.filter(|t| !t.is_empty()) {
                Some(name) => match observed.container(name) {
                    Some(found) => Some(found.id.clone()),
                    None => return Err(config_error(format!("unable to find target container {name}"))),
                },
                None => None,
            };
            verify_run_as_non_root(pod, container, image.uid, &image.username).map_err(config_error)?;
            let env = self
                .environment(pod, container, context.mounted, context.facts)
                .await
                .map_err(config_error)?;
            let mut devices = self
                .device_plugins
                .options(pod, container)
                .await
                .map_err(config_error)?;
            let prepared = self.dra.cdi_devices(pod, container).map_err(config_error)?;
            devices.cdi.extend(prepared);
            let mounts = container_mounts(&MountInputs {
                pod,
                container,
                volumes: &self.volumes,
                mounted: context.mounted,
                image_volumes: &image_volumes,
                env: &env,
                pod_ips: context.pod_ips,
                cluster_domain: &self.config.cluster_domain,
            })
            .map_err(config_error)?;
            let log_dir = pod_log_dir(
                &self.config.log_dir,
                pods::namespace(pod),
                pods::name(pod),
                pods::uid(pod),
            )
            .join(&container.name);
            std::fs::create_dir_all(&log_dir).map_err(|e| {
                config_error(format!(
                    "create container log directory for container {} failed: {e}",
                    container.name
                ))
            })?;
            let mut config = container_config(ContainerInputs {
                pod,
                container,
                restart_count,
                image: &image,
                env: &env,
                mounts,
                memory_capacity: self.machine.memory,
                swap: &self.swap,
                page_sizes: &self.machine.page_sizes(),
                cpu_cfs_quota: self.config.cpu_cfs_quota,
                seccomp: Seccomp {
                    root: &self.config.data_dir.join("seccomp").to_string_lossy(),
                    is_default: self.config.seccomp_default,
                },
                target_container_id,
                user_namespace: user_namespace_of(context.sandbox_config),
            });
            if let Some(resources) = { config.linux.as_mut() }.and_then(|linux| linux.resources.as_mut()) {
                self.managers.apply(pods::uid(pod), &container.name, resources);
            }
            add_devices(&mut config, devices);
            let block_devices = container_devices(container, context.mounted).map_err(config_error)?;
            config.devices.extend(block_devices);
            let runtime = self.runtime.clone();
            let (sandbox, sandbox_config) = (context.sandbox_id.to_owned(), context.sandbox_config.clone());
            let abandoned = never_started(container, observed).map(|last| last.id.clone());
            let create = async move {
                // Its name is taken until it is removed.
                if let Some(abandoned) = abandoned {
                    runtime.remove_container(&abandoned).await?;
                }
                runtime.create_container(&sandbox, config, sandbox_config).await
            };
            let amounts = Amounts::of_container(pod, container);
            let id = context.state.change(create).await.map_err(|status| {
                event("Warning", "Failed", format!("Error: {}", status.message()));
                error("CreateContainerError", status.message().to_owned())
            })?;
            self.note_container_made(context.state, &container.name, amounts);
            self.managers.memory.container_made(pod, &container.name);
            event("Normal", "Created", "Container created".to_owned());
            Ok(id)
        })
        .await;
        let id = created?;

        let start = {
            let (runtime, id) = (self.runtime.clone(), id.clone());
            async move { runtime.start_container(&id).await }
        };
        stage(&format!("start {}", container.name), context.state.change(start))
            .await
            .map_err(|status| {
                // An id in the message would make every event a new one.
                let message = status.message().replace(&id, &container.name);
                event("Warning", "Failed", format!("Error: {message}"));
                error("RunContainerError", status.message().to_owned())
            })?;
        event("Normal", "Started", "Container started".to_owned());
        self.metrics
            .container_started(ContainerType::of(pod, &container.name));

        if let Some(hook) = container.lifecycle.as_ref().and_then(|l| l.post_start.as_ref()) {
            let pod_ip = context.pod_ips.first().map(String::as_str).unwrap_or_default();
            if let Err(message) = hooks::run(&self.runtime, pod, container, &id, pod_ip, hook).await {
                event(
                    "Warning",
                    "FailedPostStartHook",
                    "PostStartHook failed".to_owned(),
                );
                let target = Target {
                    id: &id,
                    name: &container.name,
                    message: "FailedPostStartHook",
                    reason: KillReason::Other,
                };
                if let Err(error) = self.kill_container(pod, pod_ip, &target, None, async {}).await {
                    tracing::warn!(error, "cannot kill the container after its postStart hook failed");
                }
                return Err(error("PostStartHookError", message));
            }
        }
        Ok(())
    }

    /// A container that keeps failing is started ever more slowly.
    fn check_crash_backoff(
        &self,
        pod: &Pod,
        container: &Container,
        observed: &ObservedPod,
    ) -> Result<(), StartError> {
        // The last one that ended: one that was just killed for its probe still counts as running here, and
        // the one before it tells how soon that happens again.
        let exited = |c: &&ObservedContainer| c.name == container.name && c.state == ContainerState::Exited;
        let Some(ended) = observed.containers.iter().find(exited) else {
            return Ok(());
        };
        let hash = container_hash(&container.name, container.image.as_deref().unwrap_or_default());
        let key = format!("{}_{}_{hash:x}", pods::uid(pod), container.name);
        let now = Instant::now();
        let finished = instant_of(ended.finished_at, now);
        let mut backoff = self.crash_backoff.lock();
        if let Some(remaining) = backoff.remaining_since_event(&key, finished, now) {
            let full_name = pods::full_name(pod);
            let delay = go_duration(backoff.get(&key));
            drop(backoff);
            self.recorder.event(
                &pods::container_reference(pod, &container.name),
                "Warning",
                "BackOff",
                format!(
                    "Back-off restarting failed container {} in pod {full_name}",
                    container.name
                ),
            );
            let message = format!(
                "back-off {delay} restarting failed container={} pod={full_name}",
                container.name
            );
            return Err(StartError {
                reason: "CrashLoopBackOff",
                message,
                retry_after: Some(remaining),
            });
        }
        let delay = backoff.get(&key);
        if !delay.is_zero() {
            let name = format!(
                "back-off {} before restarting {}",
                go_duration(delay),
                container.name
            );
            marks::waited(&name, now.saturating_duration_since(finished));
        }
        backoff.collect(now);
        backoff.next(&key, finished, now);
        Ok(())
    }

    /// One more than the last instance had; without one, the log files tell how many there were before a
    /// runtime forgot them. An instance that never ran is not counted: it is made again.
    fn next_restart_count(&self, pod: &Pod, container: &Container, observed: &ObservedPod) -> i32 {
        if let Some(last) = never_started(container, observed) {
            return last.restart_count;
        }
        if let Some(last) = observed.container(&container.name) {
            return last.restart_count + 1;
        }
        let directory = pod_log_dir(
            &self.config.log_dir,
            pods::namespace(pod),
            pods::name(pod),
            pods::uid(pod),
        )
        .join(&container.name);
        restart_count_by_logs(&directory)
    }

    async fn environment(
        &self,
        pod: &Pod,
        container: &Container,
        mounted: &MountedVolumes,
        facts: &NodeFacts,
    ) -> Result<Vec<(String, String)>, String> {
        let namespace = pods::namespace(pod);
        let (config_maps, secrets) = env::references(container);
        let mut sources = env::Sources::default();
        for name in config_maps {
            if let Some(map) = self.objects.config_map(namespace, &name).await? {
                sources.config_maps.insert(name, map);
            }
        }
        for name in secrets {
            if let Some(secret) = self.objects.secret(namespace, &name).await? {
                sources.secrets.insert(name, secret);
            }
        }
        for variable in container.env.iter().flatten() {
            let from = variable.value_from.as_ref();
            let Some(key) = from.and_then(|from| from.file_key_ref.as_ref()) else {
                continue;
            };
            let volume = mounted.get(&key.volume_name).ok_or_else(|| {
                format!(
                    "cannot find the volume {:?} referenced by FileKeyRef",
                    key.volume_name
                )
            })?;
            if let Some(value) = env_file::read(&volume.path, &key.path, &key.key)? {
                sources.from_files.insert(variable.name.clone(), value);
            }
        }
        // A pod must not miss the API's address because it came before the list of services.
        // A static pod cannot wait for the API: it may be what the API runs in.
        if !is_static(pod) {
            self.services.synced().await;
        }
        let links = pod
            .spec
            .as_ref()
            .and_then(|s| s.enable_service_links)
            .unwrap_or(true);
        let mut services = self.services.list_namespaced(namespace);
        if namespace != "default" {
            services.extend(self.services.get("default", "kubernetes"));
        }
        let service_env = env::service_environment(&services, namespace, links);
        env::environment(pod, container, &sources, &service_env, facts).map_err(|e| e.to_string())
    }
}

/// What plugins want for the devices of the container. What the pod says itself stays.
fn add_devices(config: &mut v1::ContainerConfig, devices: RunOptions) {
    for (key, value) in devices.env {
        if !config.envs.iter().any(|known| known.key == key) {
            let value = value.into();
            config.envs.push(v1::KeyValue { key, value });
        }
    }
    config
        .mounts
        .extend(devices.mounts.into_iter().map(|mount| v1::Mount {
            container_path: mount.container_path,
            host_path: mount.host_path,
            readonly: mount.read_only,
            ..Default::default()
        }));
    config
        .devices
        .extend(devices.nodes.into_iter().map(|node| v1::Device {
            container_path: node.container_path,
            host_path: node.host_path,
            permissions: node.permissions,
        }));
    for (key, value) in devices.annotations {
        config.annotations.entry(key).or_insert(value);
    }
    let names = devices.cdi.into_iter();
    config
        .cdi_devices
        .extend(names.map(|name| v1::CdiDevice { name }));
}

/// The images that the container mounts, or why one of them is not here.
fn image_volumes_of(
    container: &Container,
    all: &HashMap<String, Result<ImageVolume, ImageError>>,
) -> Result<HashMap<String, ImageVolume>, ImageError> {
    let names = container.volume_mounts.iter().flatten().map(|mount| &mount.name);
    names
        .filter_map(|name| Some((name, all.get(name)?)))
        .map(|(name, result)| Ok((name.clone(), result.clone()?)))
        .collect()
}

/// The newest instance of a container if it was made but never started: whoever made it was killed before.
fn never_started<'a>(container: &Container, observed: &'a ObservedPod) -> Option<&'a ObservedContainer> {
    observed
        .container(&container.name)
        .filter(|last| last.state == ContainerState::Created)
}

/// A time of the runtime on this process's clock.
fn instant_of(unix_nanos: i64, now: Instant) -> Instant {
    let unix_now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let ago = unix_now.saturating_sub(Duration::from_nanos(u64::try_from(unix_nanos).unwrap_or(0)));
    now.checked_sub(ago).unwrap_or(now)
}

fn restart_count_by_logs(directory: &std::path::Path) -> i32 {
    let files = std::fs::read_dir(directory)
        .into_iter()
        .flatten()
        .filter_map(|e| e.ok()?.file_name().into_string().ok());
    files
        .filter_map(|name| {
            name.split_once(".log")
                .and_then(|(number, _)| number.parse::<i32>().ok())
        })
        .map(|number| number + 1)
        .max()
        .unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn restart_counts_by_logs() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(restart_count_by_logs(&dir.path().join("none")), 0);
        for name in ["0.log", "3.log.20260101-000000", "x.log", "readme"] {
            std::fs::write(dir.path().join(name), "").unwrap();
        }
        assert_eq!(restart_count_by_logs(dir.path()), 4);
    }
}
