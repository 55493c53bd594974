//! CRI's runtime calls: each hands on to the module that does it.

use super::Daemon;
use super::stats::metric_descriptors;
use futures::{Stream, StreamExt};
use skiff_cri::v1 as cri;
use std::pin::Pin;
use std::sync::Arc;
use tonic::{Request, Response, Status};

/// Items in one message of a streamed list.
pub(super) const STREAM_CHUNK: usize = 100;

type Answer<T> = Result<Response<T>, Status>;
type Streamed<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send + 'static>>;

fn ok<T>(message: T) -> Answer<T> {
    Ok(Response::new(message))
}

fn streamed<T: Clone + Send + 'static, M: Send + 'static>(
    items: Vec<T>,
    message: fn(Vec<T>) -> M,
) -> Answer<Streamed<M>> {
    let parts: Vec<_> = items
        .chunks(STREAM_CHUNK)
        .map(|part| Ok(message(part.to_vec())))
        .collect();
    Ok(Response::new(Box::pin(futures::stream::iter(parts))))
}

/// Runs what reads many files where it stops nobody.
async fn blocking<T: Send + 'static>(
    daemon: &Daemon,
    work: impl FnOnce(&Daemon) -> T + Send + 'static,
) -> Result<T, Status> {
    let daemon = daemon.this();
    tokio::task::spawn_blocking(move || work(&daemon))
        .await
        .map_err(|error| Status::internal(error.to_string()))
}

#[tonic::async_trait]
impl skiff_cri::RuntimeService for Daemon {
    async fn version(&self, _: Request<cri::VersionRequest>) -> Answer<cri::VersionResponse> {
        ok(cri::VersionResponse {
            version: "0.1.0".into(),
            runtime_name: "skiff".into(),
            runtime_version: env!("CARGO_PKG_VERSION").into(),
            runtime_api_version: "v1".into(),
        })
    }

    async fn run_pod_sandbox(
        &self,
        request: Request<cri::RunPodSandboxRequest>,
    ) -> Answer<cri::RunPodSandboxResponse> {
        let request = request.into_inner();
        let config = request
            .config
            .ok_or_else(|| Status::invalid_argument("config is required"))?;
        // A client that goes away in the middle must not leave half a pod: the work runs to its end.
        let daemon = self.this();
        let pod_sandbox_id =
            finish(async move { daemon.run_sandbox(config, &request.runtime_handler).await }).await?;
        ok(cri::RunPodSandboxResponse { pod_sandbox_id })
    }

    async fn stop_pod_sandbox(
        &self,
        request: Request<cri::StopPodSandboxRequest>,
    ) -> Answer<cri::StopPodSandboxResponse> {
        let (daemon, id) = (self.this(), request.into_inner().pod_sandbox_id);
        finish(async move { daemon.stop_sandbox(&id).await }).await?;
        ok(cri::StopPodSandboxResponse {})
    }

    async fn remove_pod_sandbox(
        &self,
        request: Request<cri::RemovePodSandboxRequest>,
    ) -> Answer<cri::RemovePodSandboxResponse> {
        let (daemon, id) = (self.this(), request.into_inner().pod_sandbox_id);
        finish(async move { daemon.remove_sandbox(&id).await }).await?;
        ok(cri::RemovePodSandboxResponse {})
    }

    async fn pod_sandbox_status(
        &self,
        request: Request<cri::PodSandboxStatusRequest>,
    ) -> Answer<cri::PodSandboxStatusResponse> {
        let request = request.into_inner();
        let sandbox = self.sandbox(&request.pod_sandbox_id)?;
        let status = self.sandbox_status(&sandbox);
        let containers = self.containers_of(&status.id);
        let mut info = std::collections::HashMap::new();
        if request.verbose {
            let netns = self.netns_path(&sandbox.get());
            let text = serde_json::json!({"netns": netns, "cgroupParent": sandbox.get().cgroup_parent});
            info.insert("info".to_owned(), text.to_string());
        }
        ok(cri::PodSandboxStatusResponse {
            status: Some(status),
            info,
            containers_statuses: containers
                .iter()
                .map(|container| self.container_status(container))
                .collect(),
            timestamp: super::record::now_nanos(),
        })
    }

    async fn list_pod_sandbox(
        &self,
        request: Request<cri::ListPodSandboxRequest>,
    ) -> Answer<cri::ListPodSandboxResponse> {
        ok(cri::ListPodSandboxResponse {
            items: self.list_sandboxes(request.into_inner().filter),
        })
    }

    type StreamPodSandboxesStream = Streamed<cri::StreamPodSandboxesResponse>;

    async fn stream_pod_sandboxes(
        &self,
        request: Request<cri::StreamPodSandboxesRequest>,
    ) -> Answer<Self::StreamPodSandboxesStream> {
        let items = self.list_sandboxes(request.into_inner().filter);
        streamed(items, |pod_sandboxes| cri::StreamPodSandboxesResponse {
            pod_sandboxes,
        })
    }

    async fn create_container(
        &self,
        request: Request<cri::CreateContainerRequest>,
    ) -> Answer<cri::CreateContainerResponse> {
        let request = request.into_inner();
        let config = request
            .config
            .ok_or_else(|| Status::invalid_argument("config is required"))?;
        let daemon = self.this();
        let container_id =
            finish(async move { daemon.create_container(&request.pod_sandbox_id, config).await }).await?;
        ok(cri::CreateContainerResponse { container_id })
    }

    async fn start_container(
        &self,
        request: Request<cri::StartContainerRequest>,
    ) -> Answer<cri::StartContainerResponse> {
        let (daemon, id) = (self.this(), request.into_inner().container_id);
        finish(async move { daemon.start_container(&id).await }).await?;
        ok(cri::StartContainerResponse {})
    }

    async fn stop_container(
        &self,
        request: Request<cri::StopContainerRequest>,
    ) -> Answer<cri::StopContainerResponse> {
        let request = request.into_inner();
        self.stop_container(&request.container_id, request.timeout)
            .await?;
        ok(cri::StopContainerResponse {})
    }

    async fn remove_container(
        &self,
        request: Request<cri::RemoveContainerRequest>,
    ) -> Answer<cri::RemoveContainerResponse> {
        let (daemon, id) = (self.this(), request.into_inner().container_id);
        finish(async move { daemon.remove_container(&id).await }).await?;
        ok(cri::RemoveContainerResponse {})
    }

    async fn list_containers(
        &self,
        request: Request<cri::ListContainersRequest>,
    ) -> Answer<cri::ListContainersResponse> {
        ok(cri::ListContainersResponse {
            containers: self.list_containers(request.into_inner().filter),
        })
    }

    type StreamContainersStream = Streamed<cri::StreamContainersResponse>;

    async fn stream_containers(
        &self,
        request: Request<cri::StreamContainersRequest>,
    ) -> Answer<Self::StreamContainersStream> {
        let items = self.list_containers(request.into_inner().filter);
        streamed(items, |containers| cri::StreamContainersResponse { containers })
    }

    async fn container_status(
        &self,
        request: Request<cri::ContainerStatusRequest>,
    ) -> Answer<cri::ContainerStatusResponse> {
        let request = request.into_inner();
        let container = self.container(&request.container_id)?;
        let mut info = std::collections::HashMap::new();
        if request.verbose {
            let text = serde_json::json!({"pid": container.current().pid, "cgroup": container.get().cgroup});
            info.insert("info".to_owned(), text.to_string());
        }
        ok(cri::ContainerStatusResponse {
            status: Some(self.container_status(&container)),
            info,
        })
    }

    async fn update_container_resources(
        &self,
        request: Request<cri::UpdateContainerResourcesRequest>,
    ) -> Answer<cri::UpdateContainerResourcesResponse> {
        self.update_resources(request.into_inner()).await?;
        ok(cri::UpdateContainerResourcesResponse {})
    }

    async fn reopen_container_log(
        &self,
        request: Request<cri::ReopenContainerLogRequest>,
    ) -> Answer<cri::ReopenContainerLogResponse> {
        let container = self.container(&request.into_inner().container_id)?;
        if !container.is_running() {
            return Err(Status::failed_precondition("container is not running"));
        }
        let record = container.get();
        let shim = self.sandbox(&record.sandbox_id)?.shim();
        shim.reopen_log(&record.id)
            .await
            .map_err(|error| Status::internal(error.to_string()))?;
        ok(cri::ReopenContainerLogResponse {})
    }

    async fn exec_sync(&self, request: Request<cri::ExecSyncRequest>) -> Answer<cri::ExecSyncResponse> {
        ok(self.exec_sync(request.into_inner()).await?)
    }

    async fn exec(&self, request: Request<cri::ExecRequest>) -> Answer<cri::ExecResponse> {
        let request = request.into_inner();
        let container = self.container(&request.container_id)?;
        if !container.is_running() {
            return Err(Status::failed_precondition("container is not running"));
        }
        let url = self.streams.exec_url(request)?;
        ok(cri::ExecResponse { url })
    }

    async fn attach(&self, request: Request<cri::AttachRequest>) -> Answer<cri::AttachResponse> {
        let request = request.into_inner();
        let container = self.container(&request.container_id)?;
        if !container.is_running() {
            return Err(Status::failed_precondition("container is not running"));
        }
        let url = self.streams.attach_url(request)?;
        ok(cri::AttachResponse { url })
    }

    async fn port_forward(
        &self,
        request: Request<cri::PortForwardRequest>,
    ) -> Answer<cri::PortForwardResponse> {
        let request = request.into_inner();
        let sandbox = self.sandbox(&request.pod_sandbox_id)?;
        if !sandbox.get().ready {
            return Err(Status::failed_precondition("sandbox is not ready"));
        }
        let url = self.streams.port_forward_url(request);
        ok(cri::PortForwardResponse { url })
    }

    async fn container_stats(
        &self,
        request: Request<cri::ContainerStatsRequest>,
    ) -> Answer<cri::ContainerStatsResponse> {
        let container = self.container(&request.into_inner().container_id)?;
        let stats = blocking(self, move |daemon| daemon.container_stats(&container)).await?;
        ok(cri::ContainerStatsResponse { stats: Some(stats) })
    }

    async fn list_container_stats(
        &self,
        request: Request<cri::ListContainerStatsRequest>,
    ) -> Answer<cri::ListContainerStatsResponse> {
        let filter = request.into_inner().filter;
        let stats = blocking(self, move |daemon| daemon.list_container_stats(filter)).await?;
        ok(cri::ListContainerStatsResponse { stats })
    }

    type StreamContainerStatsStream = Streamed<cri::StreamContainerStatsResponse>;

    async fn stream_container_stats(
        &self,
        request: Request<cri::StreamContainerStatsRequest>,
    ) -> Answer<Self::StreamContainerStatsStream> {
        let filter = request.into_inner().filter;
        let items = blocking(self, move |daemon| daemon.list_container_stats(filter)).await?;
        streamed(items, |container_stats| cri::StreamContainerStatsResponse {
            container_stats,
        })
    }

    async fn pod_sandbox_stats(
        &self,
        request: Request<cri::PodSandboxStatsRequest>,
    ) -> Answer<cri::PodSandboxStatsResponse> {
        let sandbox = self.sandbox(&request.into_inner().pod_sandbox_id)?;
        let stats = blocking(self, move |daemon| daemon.sandbox_stats(&sandbox)).await?;
        ok(cri::PodSandboxStatsResponse { stats: Some(stats) })
    }

    async fn list_pod_sandbox_stats(
        &self,
        request: Request<cri::ListPodSandboxStatsRequest>,
    ) -> Answer<cri::ListPodSandboxStatsResponse> {
        let filter = request.into_inner().filter;
        let stats = blocking(self, move |daemon| daemon.list_sandbox_stats(filter)).await?;
        ok(cri::ListPodSandboxStatsResponse { stats })
    }

    type StreamPodSandboxStatsStream = Streamed<cri::StreamPodSandboxStatsResponse>;

    async fn stream_pod_sandbox_stats(
        &self,
        request: Request<cri::StreamPodSandboxStatsRequest>,
    ) -> Answer<Self::StreamPodSandboxStatsStream> {
        let filter = request.into_inner().filter;
        let items = blocking(self, move |daemon| daemon.list_sandbox_stats(filter)).await?;
        streamed(items, |pod_sandbox_stats| cri::StreamPodSandboxStatsResponse {
            pod_sandbox_stats,
        })
    }

    async fn update_runtime_config(
        &self,
        _: Request<cri::UpdateRuntimeConfigRequest>,
    ) -> Answer<cri::UpdateRuntimeConfigResponse> {
        // The pod network's range comes from the CNI configuration; like containerd with a configuration
        // in place, the kubelet's word changes nothing.
        ok(cri::UpdateRuntimeConfigResponse {})
    }

    async fn status(&self, request: Request<cri::StatusRequest>) -> Answer<cri::StatusResponse> {
        let network = skiff_cni::Network::load(&self.config.cni_conf_dir);
        let condition = |kind: &str, problem: Option<String>| cri::RuntimeCondition {
            r#type: kind.into(),
            status: problem.is_none(),
            reason: if problem.is_some() {
                format!("{}NotReady", kind.trim_end_matches("Ready"))
            } else {
                String::new()
            },
            message: problem.unwrap_or_default(),
        };
        let network_problem = network
            .err()
            .map(|error| format!("Network plugin returns error: cni plugin not initialized: {error}"));
        let mut network_condition = condition("NetworkReady", network_problem);
        if !network_condition.status {
            network_condition.reason = "NetworkPluginNotReady".into();
        }
        let mut info = std::collections::HashMap::new();
        if request.into_inner().verbose {
            info.insert(
                "config".to_owned(),
                serde_json::json!({"root": self.config.root}).to_string(),
            );
        }
        ok(cri::StatusResponse {
            status: Some(cri::RuntimeStatus {
                conditions: vec![condition("RuntimeReady", None), network_condition],
            }),
            info,
            runtime_handlers: vec![cri::RuntimeHandler {
                name: String::new(),
                features: Some(cri::RuntimeHandlerFeatures {
                    recursive_read_only_mounts: true,
                    user_namespaces: self.no_user_namespaces().await.is_none(),
                }),
            }],
            features: Some(cri::RuntimeFeatures {
                supplemental_groups_policy: true,
                ..Default::default()
            }),
        })
    }

    async fn checkpoint_container(
        &self,
        request: Request<cri::CheckpointContainerRequest>,
    ) -> Answer<cri::CheckpointContainerResponse> {
        let (daemon, request) = (self.this(), request.into_inner());
        finish(async move { daemon.checkpoint_container(request).await }).await?;
        ok(cri::CheckpointContainerResponse {})
    }

    type GetContainerEventsStream = Streamed<cri::ContainerEventResponse>;

    async fn get_container_events(
        &self,
        _: Request<cri::GetEventsRequest>,
    ) -> Answer<Self::GetContainerEventsStream> {
        let events = tokio_stream::wrappers::BroadcastStream::new(self.events.subscribe());
        let events = events
            .map(|event| event.map_err(|_| Status::data_loss("events were lost: the reader is too slow")));
        let shutdown = self.shutdown.clone().cancelled_owned();
        Ok(Response::new(Box::pin(events.take_until(shutdown))))
    }

    async fn list_metric_descriptors(
        &self,
        _: Request<cri::ListMetricDescriptorsRequest>,
    ) -> Answer<cri::ListMetricDescriptorsResponse> {
        ok(cri::ListMetricDescriptorsResponse {
            descriptors: metric_descriptors(),
        })
    }

    async fn list_pod_sandbox_metrics(
        &self,
        _: Request<cri::ListPodSandboxMetricsRequest>,
    ) -> Answer<cri::ListPodSandboxMetricsResponse> {
        let pod_metrics = blocking(self, Daemon::sandbox_metrics).await?;
        ok(cri::ListPodSandboxMetricsResponse { pod_metrics })
    }

    type StreamPodSandboxMetricsStream = Streamed<cri::StreamPodSandboxMetricsResponse>;

    async fn stream_pod_sandbox_metrics(
        &self,
        _: Request<cri::StreamPodSandboxMetricsRequest>,
    ) -> Answer<Self::StreamPodSandboxMetricsStream> {
        let items = blocking(self, Daemon::sandbox_metrics).await?;
        streamed(items, |pod_sandbox_metrics| {
            cri::StreamPodSandboxMetricsResponse { pod_sandbox_metrics }
        })
    }

    async fn runtime_config(
        &self,
        _: Request<cri::RuntimeConfigRequest>,
    ) -> Answer<cri::RuntimeConfigResponse> {
        ok(cri::RuntimeConfigResponse {
            linux: Some(cri::LinuxRuntimeConfiguration {
                cgroup_driver: cri::CgroupDriver::Cgroupfs as i32,
            }),
        })
    }

    async fn update_pod_sandbox_resources(
        &self,
        request: Request<cri::UpdatePodSandboxResourcesRequest>,
    ) -> Answer<cri::UpdatePodSandboxResourcesResponse> {
        // COMPAT: the pod's cgroup is the kubelet's; the call informs runtimes that keep sizes of their own.
        self.sandbox(&request.into_inner().pod_sandbox_id)?;
        ok(cri::UpdatePodSandboxResourcesResponse {})
    }
}

/// Runs to the end also when the caller is gone. A panic ends the call, not the process.
async fn finish<T: Send + 'static>(
    work: impl Future<Output = Result<T, Status>> + Send + 'static,
) -> Result<T, Status> {
    tokio::spawn(work)
        .await
        .map_err(|error| Status::internal(format!("the runtime failed: {error}")))?
}

impl Daemon {
    fn this(&self) -> Arc<Daemon> {
        self.itself
            .upgrade()
            .expect("a call is served by the Arc that holds the daemon")
    }
}
