//! A CRI runtime in memory: containers are entries in a map. An image named `exit-N` ends at once with code
//! N, `missing` is not there and cannot be pulled, everything else runs until it is stopped.

use std::collections::HashMap;
use std::path::Path;
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use parking_lot::Mutex;
use skiff_cri::v1::*;
use skiff_cri::{
    ImageService, ImageServiceServer, Request, Response, RuntimeService, RuntimeServiceServer, Status,
};
use tokio::sync::broadcast;
use tokio_stream::wrappers::BroadcastStream;
use tokio_stream::{Stream, StreamExt};
use tokio_util::sync::CancellationToken;

type Answer<T> = Result<Response<T>, Status>;
type Events<T> = std::pin::Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

#[derive(Default)]
pub struct Inner {
    pub sandboxes: HashMap<String, (PodSandboxConfig, PodSandboxStatus)>,
    /// With the sandbox's id.
    pub containers: HashMap<String, (String, ContainerConfig, ContainerStatus)>,
    pub exec_exit_code: i32,
    /// What every container uses, in bytes.
    pub memory_used: u64,
    /// Starts never come to an end, as if the runtime was killed over them.
    pub starts_hang: bool,
    /// Containers are not created, and the message is another each time.
    pub creation_fails: bool,
    /// When creations failed.
    pub failed_at: Vec<std::time::Instant>,
    /// What it says that is not so.
    pub nonsense: Option<Nonsense>,
    /// Containers that were stopped or removed, and all that were ever made.
    pub ended: Vec<String>,
    pub made: usize,
    counter: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Nonsense {
    UnknownStates,
    NoIds,
    NoStatus,
    /// Everything is another pod's.
    WrongUids,
    /// Nothing is listed, though it is there.
    EmptyLists,
    Twice,
    /// More than a message may have.
    EnormousLists,
}

impl Nonsense {
    pub const ALL: [Nonsense; 7] = [
        Nonsense::UnknownStates,
        Nonsense::NoIds,
        Nonsense::NoStatus,
        Nonsense::WrongUids,
        Nonsense::EmptyLists,
        Nonsense::Twice,
        Nonsense::EnormousLists,
    ];

    const UID: &str = "io.kubernetes.pod.uid";

    fn sandbox(self, one: &mut PodSandboxStatus) {
        match self {
            Nonsense::UnknownStates => one.state = 42,
            Nonsense::NoIds => one.id.clear(),
            Nonsense::WrongUids => {
                one.metadata.as_mut().unwrap().uid = "nobody".into();
                one.labels.insert(Self::UID.into(), "nobody".into());
            }
            _ => {}
        }
    }

    fn container(self, one: &mut ContainerStatus) {
        match self {
            Nonsense::UnknownStates => one.state = 42,
            Nonsense::NoIds => one.id.clear(),
            Nonsense::WrongUids => {
                one.labels.insert(Self::UID.into(), "nobody".into());
            }
            _ => {}
        }
    }

    fn list<T: Clone>(self, list: &mut Vec<T>, labels: fn(&mut T) -> &mut HashMap<String, String>) {
        let grow = |one| {
            labels(one).insert("filler".into(), "x".repeat(17 << 20));
        };
        match self {
            Nonsense::EmptyLists => list.clear(),
            Nonsense::Twice => list.extend_from_within(..),
            Nonsense::EnormousLists => list.first_mut().into_iter().for_each(grow),
            _ => {}
        }
    }
}

#[derive(Clone)]
pub struct FakeRuntime {
    /// Calls are answered while this is true.
    pub answers: tokio::sync::watch::Sender<bool>,
    pub inner: Arc<Mutex<Inner>>,
    events: broadcast::Sender<ContainerEventResponse>,
    log_root: Arc<Mutex<HashMap<String, String>>>,
    /// Sandboxes are made while this is true. Whoever asked may have gone meanwhile.
    pub sandboxes_open: tokio::sync::watch::Sender<bool>,
    pub sandboxes_asked: Arc<std::sync::atomic::AtomicUsize>,
}

fn now() -> i64 {
    i64::try_from(SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_nanos()).unwrap()
}

impl FakeRuntime {
    pub fn new() -> Self {
        FakeRuntime {
            answers: tokio::sync::watch::Sender::new(true),
            inner: Arc::default(),
            events: broadcast::channel(256).0,
            log_root: Arc::default(),
            sandboxes_open: tokio::sync::watch::Sender::new(true),
            sandboxes_asked: Arc::default(),
        }
    }

    pub async fn serve(&self, socket: &Path, stop: CancellationToken) {
        let listener = tokio::net::UnixListener::bind(socket).unwrap();
        let incoming = tokio_stream::wrappers::UnixListenerStream::new(listener);
        let answers = self.answers.subscribe();
        let gate = move |inner| Gate {
            inner,
            answers: answers.clone(),
        };
        let server = tonic::transport::Server::builder()
            .layer(tower::layer::layer_fn(gate))
            .add_service(RuntimeServiceServer::new(self.clone()))
            .add_service(ImageServiceServer::new(self.clone()))
            .serve_with_incoming_shutdown(incoming, stop.cancelled_owned());
        tokio::spawn(server);
    }

    fn tell(&self, inner: &Inner, sandbox: &str) {
        let status = inner.sandboxes.get(sandbox).map(|(_, s)| s.clone());
        let _ = self.events.send(ContainerEventResponse {
            pod_sandbox_status: status,
            ..Default::default()
        });
    }

    fn make_sandbox(&self, config: PodSandboxConfig) -> String {
        let mut inner = self.inner.lock();
        inner.counter += 1;
        inner.made += 1;
        let id = format!("sandbox{}", inner.counter);
        let status = PodSandboxStatus {
            id: id.clone(),
            metadata: config.metadata.clone(),
            state: PodSandboxState::SandboxReady as i32,
            created_at: now(),
            network: Some(PodSandboxNetworkStatus {
                ip: format!("10.9.0.{}", inner.counter),
                additional_ips: vec![],
            }),
            labels: config.labels.clone(),
            ..Default::default()
        };
        self.log_root
            .lock()
            .insert(id.clone(), config.log_directory.clone());
        inner.sandboxes.insert(id.clone(), (config, status));
        self.tell(&inner, &id);
        id
    }

    /// Says that something is new, though nothing is.
    pub fn poke(&self) {
        let inner = self.inner.lock();
        inner.sandboxes.keys().for_each(|id| self.tell(&inner, id));
    }

    /// Ends a container as if its process did.
    pub fn exit(&self, id: &str, code: i32) {
        let mut inner = self.inner.lock();
        let Some((sandbox, _, status)) = inner.containers.get_mut(id) else {
            return;
        };
        if status.state == ContainerState::ContainerExited as i32 {
            return;
        }
        status.state = ContainerState::ContainerExited as i32;
        status.exit_code = code;
        status.finished_at = now();
        status.reason = if code == 0 { "Completed" } else { "Error" }.to_owned();
        let sandbox = sandbox.clone();
        self.tell(&inner, &sandbox);
    }

    pub fn running(&self) -> Vec<(String, String)> {
        let inner = self.inner.lock();
        let running = |s: &ContainerStatus| s.state == ContainerState::ContainerRunning as i32;
        let mut list: Vec<_> = inner
            .containers
            .values()
            .filter(|(_, _, s)| running(s))
            .map(|(_, _, s)| (s.metadata.clone().unwrap().name, s.id.clone()))
            .collect();
        list.sort();
        list
    }
}

/// Holds calls back while the runtime hangs.
#[derive(Clone)]
struct Gate<S> {
    inner: S,
    answers: tokio::sync::watch::Receiver<bool>,
}

impl<S, R> tower::Service<R> for Gate<S>
where
    S: tower::Service<R> + Clone + Send + 'static,
    S::Future: Send,
    R: Send + 'static,
{
    type Response = S::Response;
    type Error = S::Error;
    type Future = std::pin::Pin<Box<dyn Future<Output = Result<S::Response, S::Error>> + Send>>;

    fn poll_ready(&mut self, _: &mut std::task::Context<'_>) -> std::task::Poll<Result<(), S::Error>> {
        std::task::Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: R) -> Self::Future {
        let (inner, mut answers) = (self.inner.clone(), self.answers.clone());
        Box::pin(async move {
            let _ = answers.wait_for(|answers| *answers).await;
            tower::ServiceExt::oneshot(inner, request).await
        })
    }
}

fn matches(selector: &HashMap<String, String>, labels: &HashMap<String, String>) -> bool {
    selector.iter().all(|(k, v)| labels.get(k) == Some(v))
}

/// Written out as `async_trait` would: it does not look into other macros.
macro_rules! not_here {
    ($($name:ident($request:ty) -> $response:ty;)*) => {
        $(fn $name<'life0, 'async_trait>(
            &'life0 self,
            _: Request<$request>,
        ) -> std::pin::Pin<Box<dyn Future<Output = Answer<$response>> + Send + 'async_trait>>
        where
            'life0: 'async_trait,
            Self: 'async_trait,
        {
            Box::pin(async { Err(Status::unimplemented(stringify!($name))) })
        })*
    };
}

#[tonic::async_trait]
impl RuntimeService for FakeRuntime {
    type StreamPodSandboxesStream = Events<StreamPodSandboxesResponse>;
    type StreamContainersStream = Events<StreamContainersResponse>;
    type StreamContainerStatsStream = Events<StreamContainerStatsResponse>;
    type StreamPodSandboxStatsStream = Events<StreamPodSandboxStatsResponse>;
    type StreamPodSandboxMetricsStream = Events<StreamPodSandboxMetricsResponse>;
    type GetContainerEventsStream = Events<ContainerEventResponse>;

    async fn version(&self, _: Request<VersionRequest>) -> Answer<VersionResponse> {
        Ok(Response::new(VersionResponse {
            runtime_name: "fake".into(),
            runtime_version: "1".into(),
            ..Default::default()
        }))
    }

    async fn status(&self, _: Request<StatusRequest>) -> Answer<StatusResponse> {
        let condition = |name: &str| RuntimeCondition {
            r#type: name.into(),
            status: true,
            ..Default::default()
        };
        let status = Some(RuntimeStatus {
            conditions: vec![condition("RuntimeReady"), condition("NetworkReady")],
        });
        Ok(Response::new(StatusResponse {
            status,
            ..Default::default()
        }))
    }

    async fn run_pod_sandbox(&self, request: Request<RunPodSandboxRequest>) -> Answer<RunPodSandboxResponse> {
        let config = request.into_inner().config.unwrap_or_default();
        self.sandboxes_asked
            .fetch_add(1, std::sync::atomic::Ordering::SeqCst);
        let runtime = self.clone();
        let made = tokio::spawn(async move {
            let mut open = runtime.sandboxes_open.subscribe();
            open.wait_for(|open| *open).await.unwrap();
            runtime.make_sandbox(config)
        });
        let pod_sandbox_id = made.await.unwrap();
        Ok(Response::new(RunPodSandboxResponse { pod_sandbox_id }))
    }

    async fn stop_pod_sandbox(
        &self,
        request: Request<StopPodSandboxRequest>,
    ) -> Answer<StopPodSandboxResponse> {
        let id = request.into_inner().pod_sandbox_id;
        let mut inner = self.inner.lock();
        if let Some((_, status)) = inner.sandboxes.get_mut(&id) {
            status.state = PodSandboxState::SandboxNotready as i32;
        }
        inner.ended.push(id);
        Ok(Response::new(StopPodSandboxResponse {}))
    }

    async fn remove_pod_sandbox(
        &self,
        request: Request<RemovePodSandboxRequest>,
    ) -> Answer<RemovePodSandboxResponse> {
        let id = request.into_inner().pod_sandbox_id;
        let mut inner = self.inner.lock();
        inner.sandboxes.remove(&id);
        inner.containers.retain(|_, (sandbox, _, _)| *sandbox != id);
        Ok(Response::new(RemovePodSandboxResponse {}))
    }

    async fn pod_sandbox_status(
        &self,
        request: Request<PodSandboxStatusRequest>,
    ) -> Answer<PodSandboxStatusResponse> {
        let id = request.into_inner().pod_sandbox_id;
        let inner = self.inner.lock();
        let status = inner.sandboxes.get(&id).map(|(_, s)| s.clone());
        let mut status = Some(status.ok_or_else(|| Status::not_found(id))?);
        if let Some(nonsense) = inner.nonsense {
            status.as_mut().into_iter().for_each(|one| nonsense.sandbox(one));
            status = status.filter(|_| nonsense != Nonsense::NoStatus);
        }
        Ok(Response::new(PodSandboxStatusResponse {
            status,
            ..Default::default()
        }))
    }

    async fn list_pod_sandbox(
        &self,
        request: Request<ListPodSandboxRequest>,
    ) -> Answer<ListPodSandboxResponse> {
        let selector = request
            .into_inner()
            .filter
            .map(|f| f.label_selector)
            .unwrap_or_default();
        let inner = self.inner.lock();
        let nonsense = inner.nonsense;
        let items = inner
            .sandboxes
            .values()
            .map(|(_, s)| {
                let mut s = s.clone();
                nonsense.inspect(|nonsense| nonsense.sandbox(&mut s));
                s
            })
            .filter(|s| matches(&selector, &s.labels))
            .map(|s| PodSandbox {
                id: s.id.clone(),
                metadata: s.metadata.clone(),
                state: s.state,
                created_at: s.created_at,
                labels: s.labels.clone(),
                ..Default::default()
            });
        let mut items = items.collect();
        nonsense.inspect(|nonsense| nonsense.list(&mut items, |one: &mut PodSandbox| &mut one.labels));
        Ok(Response::new(ListPodSandboxResponse { items }))
    }

    async fn create_container(
        &self,
        request: Request<CreateContainerRequest>,
    ) -> Answer<CreateContainerResponse> {
        let request = request.into_inner();
        let config = request.config.unwrap_or_default();
        let mut inner = self.inner.lock();
        inner.counter += 1;
        if inner.creation_fails {
            inner.failed_at.push(std::time::Instant::now());
            return Err(Status::internal(format!("no container{}", inner.counter)));
        }
        inner.made += 1;
        let id = format!("container{}", inner.counter);
        let log_root = self
            .log_root
            .lock()
            .get(&request.pod_sandbox_id)
            .cloned()
            .unwrap_or_default();
        let status = ContainerStatus {
            id: id.clone(),
            metadata: config.metadata.clone(),
            state: ContainerState::ContainerCreated as i32,
            created_at: now(),
            image: config.image.clone(),
            labels: config.labels.clone(),
            annotations: config.annotations.clone(),
            mounts: config.mounts.clone(),
            resources: Some(ContainerResources {
                linux: config.linux.clone().and_then(|linux| linux.resources),
                windows: None,
            }),
            log_path: format!("{log_root}/{}", config.log_path),
            ..Default::default()
        };
        inner
            .containers
            .insert(id.clone(), (request.pod_sandbox_id, config, status));
        Ok(Response::new(CreateContainerResponse { container_id: id }))
    }

    async fn start_container(
        &self,
        request: Request<StartContainerRequest>,
    ) -> Answer<StartContainerResponse> {
        let id = request.into_inner().container_id;
        if self.inner.lock().starts_hang {
            std::future::pending::<()>().await;
        }
        let exit = {
            let mut inner = self.inner.lock();
            let (sandbox, config, status) = inner
                .containers
                .get_mut(&id)
                .ok_or_else(|| Status::not_found(id.clone()))?;
            status.state = ContainerState::ContainerRunning as i32;
            status.started_at = now();
            std::fs::write(
                &status.log_path,
                "2026-01-01T00:00:00.000000000Z stdout F hello\n",
            )
            .unwrap();
            let image = config.image.clone().unwrap_or_default().user_specified_image;
            let sandbox = sandbox.clone();
            self.tell(&inner, &sandbox);
            image
                .strip_prefix("exit-")
                .map(|code| code.split(':').next().unwrap().parse::<i32>().unwrap())
        };
        if let Some(code) = exit {
            self.exit(&id, code);
        }
        Ok(Response::new(StartContainerResponse {}))
    }

    async fn stop_container(&self, request: Request<StopContainerRequest>) -> Answer<StopContainerResponse> {
        let id = request.into_inner().container_id;
        self.inner.lock().ended.push(id.clone());
        self.exit(&id, 143);
        Ok(Response::new(StopContainerResponse {}))
    }

    async fn remove_container(
        &self,
        request: Request<RemoveContainerRequest>,
    ) -> Answer<RemoveContainerResponse> {
        let id = request.into_inner().container_id;
        let mut inner = self.inner.lock();
        inner.containers.remove(&id);
        inner.ended.push(id);
        Ok(Response::new(RemoveContainerResponse {}))
    }

    async fn list_containers(
        &self,
        request: Request<ListContainersRequest>,
    ) -> Answer<ListContainersResponse> {
        let selector = request
            .into_inner()
            .filter
            .map(|f| f.label_selector)
            .unwrap_or_default();
        let inner = self.inner.lock();
        let nonsense = inner.nonsense;
        let containers = inner
            .containers
            .values()
            .map(|(sandbox, _, s)| {
                let mut s = s.clone();
                nonsense.inspect(|nonsense| nonsense.container(&mut s));
                (sandbox, s)
            })
            .filter(|(_, s)| matches(&selector, &s.labels))
            .map(|(sandbox, s)| Container {
                id: s.id.clone(),
                pod_sandbox_id: sandbox.clone(),
                metadata: s.metadata.clone(),
                state: s.state,
                created_at: s.created_at,
                labels: s.labels.clone(),
                ..Default::default()
            });
        let mut containers = containers.collect();
        nonsense.inspect(|nonsense| nonsense.list(&mut containers, |one: &mut Container| &mut one.labels));
        Ok(Response::new(ListContainersResponse { containers }))
    }

    async fn container_status(
        &self,
        request: Request<ContainerStatusRequest>,
    ) -> Answer<ContainerStatusResponse> {
        let id = request.into_inner().container_id;
        let inner = self.inner.lock();
        let status = inner.containers.get(&id).map(|(_, _, s)| s.clone());
        let mut status = Some(status.ok_or_else(|| Status::not_found(id))?);
        if let Some(nonsense) = inner.nonsense {
            status
                .as_mut()
                .into_iter()
                .for_each(|one| nonsense.container(one));
            status = status.filter(|_| nonsense != Nonsense::NoStatus);
        }
        Ok(Response::new(ContainerStatusResponse {
            status,
            ..Default::default()
        }))
    }

    async fn exec_sync(&self, _: Request<ExecSyncRequest>) -> Answer<ExecSyncResponse> {
        let exit_code = self.inner.lock().exec_exit_code;
        Ok(Response::new(ExecSyncResponse {
            exit_code,
            stdout: b"said".to_vec(),
            ..Default::default()
        }))
    }

    async fn checkpoint_container(
        &self,
        request: Request<CheckpointContainerRequest>,
    ) -> Answer<CheckpointContainerResponse> {
        std::fs::write(&request.get_ref().location, "state").unwrap();
        Ok(Response::new(CheckpointContainerResponse {}))
    }

    /// Of the calls for stats, the one that every runtime has.
    async fn list_container_stats(
        &self,
        _: Request<ListContainerStatsRequest>,
    ) -> Answer<ListContainerStatsResponse> {
        let value = |value| Some(UInt64Value { value });
        let inner = self.inner.lock();
        let stats = inner.containers.values().map(|(_, _, s)| ContainerStats {
            attributes: Some(ContainerAttributes {
                id: s.id.clone(),
                metadata: s.metadata.clone(),
                labels: s.labels.clone(),
                ..Default::default()
            }),
            cpu: Some(CpuUsage {
                timestamp: 5_000_000,
                usage_core_nano_seconds: value(2_500_000_000),
                ..Default::default()
            }),
            memory: Some(MemoryUsage {
                timestamp: 5_000_000,
                working_set_bytes: value(4096),
                ..Default::default()
            }),
            writable_layer: Some(FilesystemUsage {
                timestamp: 5_000_000,
                fs_id: Some(FilesystemIdentifier {
                    mountpoint: "/".to_owned(),
                }),
                used_bytes: value(12_288),
                inodes_used: value(3),
            }),
            ..Default::default()
        });
        Ok(Response::new(ListContainerStatsResponse {
            stats: stats.collect(),
        }))
    }

    async fn get_container_events(
        &self,
        _: Request<GetEventsRequest>,
    ) -> Answer<Self::GetContainerEventsStream> {
        let stream = BroadcastStream::new(self.events.subscribe()).filter_map(|event| event.ok().map(Ok));
        Ok(Response::new(Box::pin(stream)))
    }

    async fn update_container_resources(
        &self,
        request: Request<UpdateContainerResourcesRequest>,
    ) -> Answer<UpdateContainerResourcesResponse> {
        let request = request.into_inner();
        let mut inner = self.inner.lock();
        let (_, _, status) = inner
            .containers
            .get_mut(&request.container_id)
            .ok_or_else(|| Status::not_found("no such container"))?;
        let mut linux = request.linux.unwrap_or_default();
        // What is not named stays: an update may be of CPUs alone.
        if linux.cpu_period == 0
            && let Some(known) = status.resources.take().and_then(|known| known.linux)
        {
            let cpuset_cpus = linux.cpuset_cpus;
            linux = LinuxContainerResources { cpuset_cpus, ..known };
        }
        status.resources = Some(ContainerResources {
            linux: Some(linux),
            windows: None,
        });
        Ok(Response::new(UpdateContainerResourcesResponse {}))
    }

    async fn container_stats(&self, _: Request<ContainerStatsRequest>) -> Answer<ContainerStatsResponse> {
        let usage_bytes = Some(UInt64Value {
            value: self.inner.lock().memory_used,
        });
        let memory = Some(MemoryUsage {
            usage_bytes,
            ..Default::default()
        });
        Ok(Response::new(ContainerStatsResponse {
            stats: Some(ContainerStats {
                memory,
                ..Default::default()
            }),
        }))
    }

    not_here! {
        stream_pod_sandboxes(StreamPodSandboxesRequest) -> Self::StreamPodSandboxesStream;
        stream_containers(StreamContainersRequest) -> Self::StreamContainersStream;
        reopen_container_log(ReopenContainerLogRequest) -> ReopenContainerLogResponse;
        exec(ExecRequest) -> ExecResponse;
        attach(AttachRequest) -> AttachResponse;
        port_forward(PortForwardRequest) -> PortForwardResponse;
        stream_container_stats(StreamContainerStatsRequest) -> Self::StreamContainerStatsStream;
        pod_sandbox_stats(PodSandboxStatsRequest) -> PodSandboxStatsResponse;
        list_pod_sandbox_stats(ListPodSandboxStatsRequest) -> ListPodSandboxStatsResponse;
        stream_pod_sandbox_stats(StreamPodSandboxStatsRequest) -> Self::StreamPodSandboxStatsStream;
        update_runtime_config(UpdateRuntimeConfigRequest) -> UpdateRuntimeConfigResponse;
        list_metric_descriptors(ListMetricDescriptorsRequest) -> ListMetricDescriptorsResponse;
        list_pod_sandbox_metrics(ListPodSandboxMetricsRequest) -> ListPodSandboxMetricsResponse;
        stream_pod_sandbox_metrics(StreamPodSandboxMetricsRequest) -> Self::StreamPodSandboxMetricsStream;
        runtime_config(RuntimeConfigRequest) -> RuntimeConfigResponse;
        update_pod_sandbox_resources(UpdatePodSandboxResourcesRequest) -> UpdatePodSandboxResourcesResponse;
    }
}

#[tonic::async_trait]
impl ImageService for FakeRuntime {
    type StreamImagesStream = Events<StreamImagesResponse>;

    async fn list_images(&self, _: Request<ListImagesRequest>) -> Answer<ListImagesResponse> {
        Ok(Response::new(ListImagesResponse::default()))
    }

    async fn image_status(&self, request: Request<ImageStatusRequest>) -> Answer<ImageStatusResponse> {
        let name = request.into_inner().image.unwrap_or_default().image;
        let image = (!name.contains("missing")).then(|| Image {
            id: format!("sha256:{name}"),
            uid: name.starts_with("root").then_some(Int64Value { value: 0 }),
            size: 7,
            ..Default::default()
        });
        Ok(Response::new(ImageStatusResponse {
            image,
            ..Default::default()
        }))
    }

    async fn pull_image(&self, request: Request<PullImageRequest>) -> Answer<PullImageResponse> {
        let name = request.into_inner().image.unwrap_or_default().image;
        Err(Status::not_found(format!("no such image {name}")))
    }

    not_here! {
        stream_images(StreamImagesRequest) -> Self::StreamImagesStream;
        remove_image(RemoveImageRequest) -> RemoveImageResponse;
        image_fs_info(ImageFsInfoRequest) -> ImageFsInfoResponse;
    }
}
