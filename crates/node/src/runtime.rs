//! The container runtime over CRI: the calls the node makes, in its own words. It keeps no state of pods;
//! whoever wants to know asks again.

mod pods;

use std::collections::HashSet;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use skiff_cri::v1;
use skiff_cri::{Channel, Code, ImageServiceClient, RuntimeServiceClient, Status};

use crate::metrics::Metrics;
pub use pods::{PodOutline, changed};

#[derive(Clone)]
pub struct Runtime {
    runtime: RuntimeServiceClient<Channel>,
    images: ImageServiceClient<Channel>,
    metrics: Arc<Metrics>,
    /// Of a call that should be quick; pulls and stops have their own time.
    timeout: Duration,
}

pub type Result<T> = std::result::Result<T, Status>;

/// Something that is already gone is as good as stopped or removed.
fn ignore_missing(result: Result<()>) -> Result<()> {
    match result {
        Err(status) if status.code() == Code::NotFound => Ok(()),
        other => other,
    }
}

impl Runtime {
    /// A call that ends after `limit` at the latest, and is counted.
    async fn within<T>(
        &self,
        operation: &'static str,
        limit: Duration,
        call: impl Future<Output = Result<skiff_cri::Response<T>>>,
    ) -> Result<T> {
        let began = Instant::now();
        let result = match tokio::time::timeout(limit, call).await {
            Ok(result) => result.map(skiff_cri::Response::into_inner),
            Err(_) => Err(Status::deadline_exceeded(
                "the container runtime did not answer in time",
            )),
        };
        self.metrics
            .operation(operation, began.elapsed(), result.is_err());
        result
    }

    /// Does not wait for the runtime to listen: the first call connects.
    pub async fn connect(
        endpoint: &str,
        metrics: Arc<Metrics>,
        timeout: Duration,
    ) -> std::result::Result<Self, skiff_cri::ConnectError> {
        let channel = skiff_cri::connect_lazy(endpoint).await?;
        Ok(Runtime {
            runtime: skiff_cri::runtime_client(channel.clone()),
            images: skiff_cri::image_client(channel),
            metrics,
            timeout,
        })
    }

    pub async fn version(&self) -> Result<v1::VersionResponse> {
        self.within(
            "version",
            self.timeout,
            self.runtime.clone().version(v1::VersionRequest {
                version: "0.1.0".to_owned(),
            }),
        )
        .await
    }

    pub async fn status(&self, limit: Duration) -> Result<v1::StatusResponse> {
        self.within(
            "status",
            limit.min(self.timeout),
            self.runtime.clone().status(v1::StatusRequest { verbose: false }),
        )
        .await
    }

    pub async fn set_pod_cidr(&self, pod_cidr: &str) -> Result<()> {
        let network_config = Some(v1::NetworkConfig {
            pod_cidr: pod_cidr.to_owned(),
        });
        let request = v1::UpdateRuntimeConfigRequest {
            runtime_config: Some(v1::RuntimeConfig { network_config }),
        };
        self.within(
            "update_runtime_config",
            self.timeout,
            self.runtime.clone().update_runtime_config(request),
        )
        .await
        .map(|_| ())
    }

    /// The runtime's own events; an error says that it has none, or that the stream could not be opened.
    pub async fn events(&self) -> Result<tonic::Streaming<v1::ContainerEventResponse>> {
        self.runtime
            .clone()
            .get_container_events(v1::GetEventsRequest {})
            .await
            .map(|r| r.into_inner())
    }

    pub async fn run_sandbox(&self, config: v1::PodSandboxConfig, runtime_handler: String) -> Result<String> {
        // A sandbox waits for CNI plugins, which may be slow.
        let request = v1::RunPodSandboxRequest {
            config: Some(config),
            runtime_handler,
        };
        self.within(
            "run_podsandbox",
            self.timeout * 2,
            self.runtime.clone().run_pod_sandbox(request),
        )
        .await
        .map(|r| r.pod_sandbox_id)
    }

    pub async fn stop_sandbox(&self, id: &str) -> Result<()> {
        let request = v1::StopPodSandboxRequest {
            pod_sandbox_id: id.to_owned(),
        };
        ignore_missing(
            self.within(
                "stop_podsandbox",
                self.timeout,
                self.runtime.clone().stop_pod_sandbox(request),
            )
            .await
            .map(|_| ()),
        )
    }

    pub async fn remove_sandbox(&self, id: &str) -> Result<()> {
        let request = v1::RemovePodSandboxRequest {
            pod_sandbox_id: id.to_owned(),
        };
        ignore_missing(
            self.within(
                "remove_podsandbox",
                self.timeout,
                self.runtime.clone().remove_pod_sandbox(request),
            )
            .await
            .map(|_| ()),
        )
    }

    pub async fn create_container(
        &self,
        sandbox: &str,
        config: v1::ContainerConfig,
        sandbox_config: v1::PodSandboxConfig,
    ) -> Result<String> {
        let request = v1::CreateContainerRequest {
            pod_sandbox_id: sandbox.to_owned(),
            config: Some(config),
            sandbox_config: Some(sandbox_config),
        };
        self.within(
            "create_container",
            self.timeout,
            self.runtime.clone().create_container(request),
        )
        .await
        .map(|r| r.container_id)
    }

    pub async fn start_container(&self, id: &str) -> Result<()> {
        let request = v1::StartContainerRequest {
            container_id: id.to_owned(),
        };
        self.within(
            "start_container",
            self.timeout,
            self.runtime.clone().start_container(request),
        )
        .await
        .map(|_| ())
    }

    /// Signals the container and, after the grace period, kills it. Returns when it has ended.
    pub async fn stop_container(&self, id: &str, grace_seconds: i64) -> Result<()> {
        let request = v1::StopContainerRequest {
            container_id: id.to_owned(),
            timeout: grace_seconds,
        };
        let limit = self.timeout + Duration::from_secs(u64::try_from(grace_seconds).unwrap_or(0));
        ignore_missing(
            self.within(
                "stop_container",
                limit,
                self.runtime.clone().stop_container(request),
            )
            .await
            .map(|_| ()),
        )
    }

    pub async fn remove_container(&self, id: &str) -> Result<()> {
        let request = v1::RemoveContainerRequest {
            container_id: id.to_owned(),
        };
        ignore_missing(
            self.within(
                "remove_container",
                self.timeout,
                self.runtime.clone().remove_container(request),
            )
            .await
            .map(|_| ()),
        )
    }

    pub async fn update_container_resources(
        &self,
        id: &str,
        resources: v1::LinuxContainerResources,
    ) -> Result<()> {
        let request = v1::UpdateContainerResourcesRequest {
            container_id: id.to_owned(),
            linux: Some(resources),
            ..Default::default()
        };
        self.within(
            "update_container_resources",
            self.timeout,
            self.runtime.clone().update_container_resources(request),
        )
        .await
        .map(|_| ())
    }

    pub async fn update_sandbox_resources(
        &self,
        id: &str,
        resources: v1::LinuxContainerResources,
    ) -> Result<()> {
        let request = v1::UpdatePodSandboxResourcesRequest {
            pod_sandbox_id: id.to_owned(),
            overhead: None,
            resources: Some(resources),
        };
        self.within(
            "update_podsandbox_resources",
            self.timeout,
            self.runtime.clone().update_pod_sandbox_resources(request),
        )
        .await
        .map(|_| ())
    }

    /// The memory that a container uses, in bytes. `None` if the runtime does not tell.
    pub async fn container_memory(&self, id: &str) -> Result<Option<i64>> {
        let request = v1::ContainerStatsRequest {
            container_id: id.to_owned(),
        };
        let response = self
            .within(
                "container_stats",
                self.timeout,
                self.runtime.clone().container_stats(request),
            )
            .await?;
        let memory = response.stats.and_then(|stats| stats.memory);
        let used = memory.and_then(|memory| memory.usage_bytes.or(memory.working_set_bytes));
        Ok(used.map(|used| i64::try_from(used.value).unwrap_or(i64::MAX)))
    }

    pub async fn reopen_log(&self, id: &str) -> Result<()> {
        let request = v1::ReopenContainerLogRequest {
            container_id: id.to_owned(),
        };
        self.within(
            "reopen_container_log",
            self.timeout,
            self.runtime.clone().reopen_container_log(request),
        )
        .await
        .map(|_| ())
    }

    /// Runs a command to its end. A timeout of zero is none.
    pub async fn exec_sync(
        &self,
        id: &str,
        command: Vec<String>,
        timeout_seconds: i64,
    ) -> Result<v1::ExecSyncResponse> {
        let request = v1::ExecSyncRequest {
            container_id: id.to_owned(),
            cmd: command,
            timeout: timeout_seconds,
        };
        let call = self.runtime.clone();
        let mut call = call;
        if timeout_seconds == 0 {
            return call.exec_sync(request).await.map(|r| r.into_inner());
        }
        let limit = self.timeout + Duration::from_secs(timeout_seconds.unsigned_abs());
        let answer = tokio::time::timeout(limit, call.exec_sync(request));
        // Not a deadline that was exceeded: a runtime that gives no answer says nothing of the command.
        let call = async {
            let silent = |_| {
                Err(Status::unavailable(
                    "the container runtime did not answer in time",
                ))
            };
            answer.await.unwrap_or_else(silent)
        };
        self.within("exec_sync", limit * 2, call).await
    }

    /// Writes the state of a container into a file.
    pub async fn checkpoint(&self, id: &str, file: &str, timeout: i64, patience: Duration) -> Result<()> {
        let request = v1::CheckpointContainerRequest {
            container_id: id.to_owned(),
            location: file.to_owned(),
            timeout,
        };
        let mut call = self.runtime.clone();
        self.within(
            "checkpoint_container",
            self.timeout + patience,
            call.checkpoint_container(request),
        )
        .await
        .map(|_| ())
    }

    pub async fn exec_url(&self, request: v1::ExecRequest) -> Result<String> {
        self.within("exec", self.timeout, self.runtime.clone().exec(request))
            .await
            .map(|r| r.url)
    }

    pub async fn attach_url(&self, request: v1::AttachRequest) -> Result<String> {
        self.within("attach", self.timeout, self.runtime.clone().attach(request))
            .await
            .map(|r| r.url)
    }

    pub async fn port_forward_url(&self, sandbox: &str, ports: Vec<i32>) -> Result<String> {
        let request = v1::PortForwardRequest {
            pod_sandbox_id: sandbox.to_owned(),
            port: ports,
        };
        self.within(
            "port_forward",
            self.timeout,
            self.runtime.clone().port_forward(request),
        )
        .await
        .map(|r| r.url)
    }

    /// What pods use, with their containers.
    pub async fn sandbox_stats(&self) -> Result<Vec<v1::PodSandboxStats>> {
        let request = v1::ListPodSandboxStatsRequest { filter: None };
        self.within(
            "list_podsandbox_stats",
            self.timeout,
            self.runtime.clone().list_pod_sandbox_stats(request),
        )
        .await
        .map(|r| r.stats)
    }

    pub async fn container_stats(&self) -> Result<Vec<v1::ContainerStats>> {
        let request = v1::ListContainerStatsRequest { filter: None };
        self.within(
            "list_container_stats",
            self.timeout,
            self.runtime.clone().list_container_stats(request),
        )
        .await
        .map(|r| r.stats)
    }

    pub async fn images(&self) -> Result<Vec<v1::Image>> {
        let request = v1::ListImagesRequest { filter: None };
        self.within(
            "list_images",
            self.timeout,
            self.images.clone().list_images(request),
        )
        .await
        .map(|r| r.images)
    }

    /// The ids of images that containers have, running or not.
    pub async fn used_images(&self) -> Result<HashSet<String>> {
        let request = v1::ListContainersRequest { filter: None };
        let containers = self
            .within(
                "list_containers",
                self.timeout,
                self.runtime.clone().list_containers(request),
            )
            .await?
            .containers;
        let ids = containers
            .into_iter()
            .flat_map(|one| [one.image_id, one.image_ref]);
        Ok(ids.filter(|id| !id.is_empty()).collect())
    }

    pub async fn remove_image(&self, id: &str) -> Result<()> {
        let image = Some(v1::ImageSpec {
            image: id.to_owned(),
            ..Default::default()
        });
        let request = v1::RemoveImageRequest { image };
        self.within(
            "remove_image",
            self.timeout,
            self.images.clone().remove_image(request),
        )
        .await
        .map(|_| ())
    }

    /// Where images are kept, if the runtime says so.
    pub async fn image_folder(&self) -> Result<Option<std::path::PathBuf>> {
        let info = self.image_filesystems().await?;
        let first = info.image_filesystems.into_iter().next();
        Ok(first.and_then(|one| one.fs_id).map(|id| id.mountpoint.into()))
    }

    /// The filesystems with images and with containers.
    pub async fn image_filesystems(&self) -> Result<v1::ImageFsInfoResponse> {
        let request = v1::ImageFsInfoRequest {};
        let mut call = self.images.clone();
        self.within("image_fs_info", self.timeout, call.image_fs_info(request))
            .await
    }

    /// `None` if the image is not here.
    pub async fn image_status(&self, image: &str) -> Result<Option<v1::Image>> {
        let image = Some(v1::ImageSpec {
            image: image.to_owned(),
            ..Default::default()
        });
        let request = v1::ImageStatusRequest {
            image,
            verbose: false,
        };
        match self
            .within(
                "image_status",
                self.timeout,
                self.images.clone().image_status(request),
            )
            .await
        {
            Ok(response) => Ok(response.image),
            Err(status) if status.code() == Code::NotFound => Ok(None),
            Err(status) => Err(status),
        }
    }

    pub async fn pull_image(
        &self,
        image: &str,
        auth: Option<v1::AuthConfig>,
        sandbox_config: Option<v1::PodSandboxConfig>,
    ) -> Result<String> {
        let image = Some(v1::ImageSpec {
            image: image.to_owned(),
            user_specified_image: image.to_owned(),
            ..Default::default()
        });
        // No limit: a large image over a thin line takes what it takes, and the pod's end cancels it.
        let request = v1::PullImageRequest {
            image,
            auth,
            sandbox_config,
        };
        self.images
            .clone()
            .pull_image(request)
            .await
            .map(|r| r.into_inner().image_ref)
    }
}

/// Where the log of a container lies, below the pod's log directory.
pub fn log_path(container: &str, attempt: i32) -> String {
    format!("{container}/{attempt}.log")
}

/// The pod's log directory below `log_dir`.
pub fn pod_log_dir(log_dir: &Path, namespace: &str, name: &str, uid: &str) -> std::path::PathBuf {
    log_dir.join(format!("{namespace}_{name}_{uid}"))
}
