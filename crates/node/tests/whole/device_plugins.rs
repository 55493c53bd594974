//! A device plugin beside the node: it registers, its devices are given to pods and kept over restarts, and it goes and comes.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::Node;
use kube::Api;
use kube::api::DeleteParams;
use parking_lot::Mutex;
use serde_json::{Value, json};
use skiff_cri::v1::ContainerConfig;
use skiff_devices::deviceplugin::device_plugin_server::{DevicePlugin, DevicePluginServer};
use skiff_devices::deviceplugin::registration_client::RegistrationClient;
use skiff_devices::deviceplugin::*;
use skiff_devices::podresources::pod_resources_lister_client::PodResourcesListerClient;
use skiff_devices::podresources::{AllocatableResourcesRequest, ListPodResourcesRequest};
use skiff_devices::{Request, Response, Status};
use tokio::sync::watch;
use tokio_stream::wrappers::WatchStream;
use tokio_stream::{Stream, StreamExt};
use tokio_util::sync::CancellationToken;

use crate::{NODE, PATIENCE, World, is_ready};

const RESOURCE: &str = "example.com/widget";

type Devices = std::pin::Pin<Box<dyn Stream<Item = Result<ListAndWatchResponse, Status>> + Send>>;

/// Serves devices by id with their health.
#[derive(Clone)]
struct Plugin {
    devices: watch::Sender<Vec<(&'static str, &'static str)>>,
    calls: Arc<Mutex<Vec<String>>>,
    stop: CancellationToken,
}

#[tonic::async_trait]
impl DevicePlugin for Plugin {
    type ListAndWatchStream = Devices;

    async fn get_device_plugin_options(
        &self,
        _: Request<Empty>,
    ) -> Result<Response<DevicePluginOptions>, Status> {
        Ok(Response::new(DevicePluginOptions {
            pre_start_required: true,
            get_preferred_allocation_available: true,
        }))
    }

    async fn list_and_watch(&self, _: Request<Empty>) -> Result<Response<Devices>, Status> {
        let told = WatchStream::new(self.devices.subscribe()).map(|devices| {
            let devices = devices.into_iter().map(|(id, health)| Device {
                id: id.to_owned(),
                health: health.to_owned(),
                topology: Some(TopologyInfo {
                    nodes: vec![NumaNode { id: 0 }],
                }),
            });
            Ok(ListAndWatchResponse {
                devices: devices.collect(),
            })
        });
        let told = futures::StreamExt::take_until(told, self.stop.clone().cancelled_owned());
        Ok(Response::new(Box::pin(told)))
    }

    async fn get_preferred_allocation(
        &self,
        request: Request<PreferredAllocationRequest>,
    ) -> Result<Response<PreferredAllocationResponse>, Status> {
        let asked = request.into_inner().container_requests.remove(0);
        // The last ones first.
        let size = usize::try_from(asked.allocation_size).unwrap();
        let chosen = asked.available_device_i_ds.into_iter().rev().take(size);
        let container_responses = vec![ContainerPreferredAllocationResponse {
            device_i_ds: chosen.collect(),
        }];
        Ok(Response::new(PreferredAllocationResponse { container_responses }))
    }

    async fn allocate(
        &self,
        request: Request<AllocateRequest>,
    ) -> Result<Response<AllocateResponse>, Status> {
        let ids = request
            .into_inner()
            .container_requests
            .remove(0)
            .devices_ids
            .join(",");
        self.calls.lock().push(format!("allocate {ids}"));
        let answer = ContainerAllocateResponse {
            envs: [("WIDGETS".to_owned(), ids)].into(),
            mounts: vec![Mount {
                container_path: "/widgets".into(),
                host_path: "/tmp".into(),
                read_only: true,
            }],
            devices: vec![DeviceSpec {
                container_path: "/dev/widget".into(),
                host_path: "/dev/null".into(),
                permissions: "rw".into(),
            }],
            annotations: [("widget".to_owned(), "yes".to_owned())].into(),
            cdi_devices: vec![CdiDevice {
                name: "example.com/widget=w".into(),
            }],
        };
        Ok(Response::new(AllocateResponse {
            container_responses: vec![answer],
        }))
    }

    async fn pre_start_container(
        &self,
        request: Request<PreStartContainerRequest>,
    ) -> Result<Response<PreStartContainerResponse>, Status> {
        let ids = request.into_inner().devices_ids.join(",");
        self.calls.lock().push(format!("pre-start {ids}"));
        Ok(Response::new(PreStartContainerResponse {}))
    }
}

impl Plugin {
    fn new(devices: &[(&'static str, &'static str)]) -> Plugin {
        Plugin {
            devices: watch::Sender::new(devices.to_vec()),
            calls: Arc::default(),
            stop: CancellationToken::new(),
        }
    }

    fn serve(&self, socket: &Path) {
        let listener = tokio::net::UnixListener::bind(socket).unwrap();
        let incoming = tokio_stream::wrappers::UnixListenerStream::new(listener);
        let service = DevicePluginServer::new(self.clone());
        let stop = self.stop.clone();
        tokio::spawn(async move {
            let served = tonic::transport::Server::builder()
                .add_service(service)
                .serve_with_incoming(incoming);
            tokio::select! {
                () = stop.cancelled() => {}
                served = served => served.unwrap(),
            }
        });
    }

    /// As plugins do: serves, and registers once the kubelet's socket is there.
    async fn start(&self, world: &World, name: &str) -> Result<(), Status> {
        let folder = folder(world);
        let kubelet = folder.join("kubelet.sock");
        let deadline = tokio::time::Instant::now() + PATIENCE;
        loop {
            let connected = tokio::net::UnixStream::connect(&kubelet).await;
            if connected.is_ok() || tokio::time::Instant::now() > deadline {
                break;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        self.serve(&folder.join(name));
        register(&kubelet, name, RESOURCE, "v1beta1").await
    }
}

async fn register(kubelet: &Path, name: &str, resource: &str, version: &str) -> Result<(), Status> {
    let mut client = RegistrationClient::new(skiff_devices::channel(kubelet));
    let request = RegisterRequest {
        version: version.to_owned(),
        endpoint: name.to_owned(),
        resource_name: resource.to_owned(),
        options: None,
    };
    client.register(request).await.map(|_| ())
}

fn folder(world: &World) -> PathBuf {
    world.dir.path().join("node/device-plugins")
}

fn asking(amount: &str) -> Value {
    let amounts = json!({RESOURCE: amount});
    json!({"restartPolicy": "Never", "containers": [{"name": "app", "image": "app:1", "resources": {"requests": amounts, "limits": amounts}}]})
}

/// Waits until the node shows so many devices: capacity and allocatable.
async fn until_shown(world: &World, capacity: &str, allocatable: &str) {
    let nodes: Api<Node> = Api::all(world.client.clone());
    let mut last = Value::Null;
    let shown = tokio::time::timeout(PATIENCE, async {
        loop {
            if let Some(node) = nodes.get_opt(NODE).await.unwrap() {
                let status = serde_json::to_value(node.status).unwrap();
                last = json!([status["capacity"][RESOURCE], status["allocatable"][RESOURCE]]);
                if last == json!([capacity, allocatable]) {
                    return;
                }
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    });
    if shown.await.is_err() {
        panic!("the node never showed {capacity} and {allocatable} but {last}");
    }
}

fn config_of(world: &World, pod: &str) -> Option<ContainerConfig> {
    let inner = world.runtime.inner.lock();
    let mut configs = inner.containers.values().map(|(_, config, _)| config);
    let of_pod = |config: &&ContainerConfig| {
        config
            .labels
            .get("io.kubernetes.pod.name")
            .is_some_and(|name| name == pod)
    };
    configs.find(of_pod).cloned()
}

fn widgets(world: &World, pod: &str) -> String {
    let config = config_of(world, pod).unwrap();
    let env = config.envs.iter().find(|env| env.key == "WIDGETS").unwrap();
    String::from_utf8(env.value.to_vec()).unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn devices_of_a_plugin_are_given_to_pods() {
    let world = World::new().await;
    let life = world.start();
    let plugin = Plugin::new(&[
        ("w1", "Healthy"),
        ("w2", "Healthy"),
        ("w3", "Healthy"),
        ("w4", "Unhealthy"),
    ]);
    plugin.start(&world, "widget.sock").await.unwrap();
    until_shown(&world, "4", "3").await;

    world.create("first", asking("2")).await;
    world.until("first", "ready", is_ready).await;
    let admin = world
        .pki
        .client("admin", "somebody", Some("system:masters"))
        .unwrap();
    let port = world.kubelet_port().await;
    let (_, metrics) = crate::get(&world, port, Some(&admin), "/metrics").await;
    for line in [
        "kubelet_device_plugin_registration_total{resource_name=\"",
        "kubelet_device_plugin_alloc_duration_seconds_count{resource_name=\"",
        "kubelet_pod_in_progress_resizes 0",
    ] {
        assert!(metrics.contains(line), "{line} is not in\n{metrics}");
    }
    let config = config_of(&world, "first").unwrap();
    assert_eq!(widgets(&world, "first"), "w2,w3", "the plugin's preference");
    let mount = config
        .mounts
        .iter()
        .find(|mount| mount.container_path == "/widgets")
        .unwrap();
    assert!(mount.readonly && mount.host_path == "/tmp");
    assert_eq!(config.devices[0].container_path, "/dev/widget");
    assert_eq!(
        (
            config.devices[0].host_path.as_str(),
            config.devices[0].permissions.as_str()
        ),
        ("/dev/null", "rw")
    );
    assert_eq!(config.annotations.get("widget").map(String::as_str), Some("yes"));
    assert_eq!(config.cdi_devices[0].name, "example.com/widget=w");
    assert_eq!(*plugin.calls.lock(), ["allocate w2,w3", "pre-start w2,w3"]);

    // Who monitors devices learns of them.
    let socket = world.dir.path().join("node/pod-resources/kubelet.sock");
    let mut lister = PodResourcesListerClient::new(skiff_devices::channel(&socket));
    let told = lister
        .list(ListPodResourcesRequest {})
        .await
        .unwrap()
        .into_inner()
        .pod_resources;
    assert_eq!((told.len(), told[0].name.as_str()), (1, "first"));
    let held = &told[0].containers[0].devices[0];
    assert_eq!(
        (held.resource_name.as_str(), held.device_ids.join(",")),
        (RESOURCE, "w2,w3".to_owned())
    );
    assert_eq!(held.topology.as_ref().unwrap().nodes[0].id, 0);
    let all = lister
        .get_allocatable_resources(AllocatableResourcesRequest {})
        .await
        .unwrap()
        .into_inner();
    assert_eq!(all.devices[0].device_ids, ["w1", "w2", "w3"]);
    let first = world.until("first", "shown with its devices", |pod| {
        !pod["status"]["containerStatuses"][0]["allocatedResourcesStatus"].is_null()
    });
    let statuses = first.await["status"]["containerStatuses"][0]["allocatedResourcesStatus"].clone();
    let device = |id: &str| json!({"resourceID": id, "health": "Healthy"});
    assert_eq!(
        statuses,
        json!([{"name": RESOURCE, "resources": [device("w2"), device("w3")]}])
    );

    // More than are left.
    world.create("second", asking("2")).await;
    let refused = world
        .until("second", "refused", |pod| pod["status"]["phase"] == "Failed")
        .await;
    assert_eq!(refused["status"]["reason"], format!("OutOf{RESOURCE}"));

    // A new kubelet knows what the pod has. Until the plugin is back there is nothing for others.
    life.end().await;
    plugin.stop.cancel();
    let life = world.start();
    until_shown(&world, "0", "0").await;
    let plugin = Plugin::new(&[("w1", "Healthy"), ("w2", "Healthy"), ("w3", "Healthy")]);
    plugin.start(&world, "widget.sock").await.unwrap();
    until_shown(&world, "3", "3").await;
    world.create("third", asking("1")).await;
    world.until("third", "ready", is_ready).await;
    assert_eq!(
        widgets(&world, "third"),
        "w1",
        "what the first pod has stays its own"
    );

    // Hot-plug; then the devices of a pod that is gone are free.
    plugin
        .devices
        .send_modify(|devices| devices.push(("w5", "Healthy")));
    until_shown(&world, "4", "4").await;
    world
        .pods()
        .delete("first", &DeleteParams::default())
        .await
        .unwrap();
    world.until_gone("first").await;
    world.create("fourth", asking("3")).await;
    world.until("fourth", "ready", is_ready).await;
    assert_eq!(widgets(&world, "fourth"), "w2,w3,w5");

    // A plugin that is gone leaves no healthy devices, and a pod that got past the scheduler is refused.
    plugin.stop.cancel();
    until_shown(&world, "4", "0").await;
    // Another one comes in its place.
    let plugin = Plugin::new(&[("w9", "Healthy")]);
    plugin.start(&world, "other.sock").await.unwrap();
    until_shown(&world, "1", "1").await;
    life.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pod_whose_devices_cannot_be_allocated_is_refused() {
    let world = World::new().await;
    let life = world.start();
    let plugin = Plugin::new(&[("w1", "Healthy"), ("w2", "Healthy")]);
    plugin.start(&world, "widget.sock").await.unwrap();
    until_shown(&world, "2", "2").await;
    let kubelet = folder(&world).join("kubelet.sock");
    let wrong = async |name: &str, resource: &str, version: &str| {
        let status = register(&kubelet, name, resource, version).await.unwrap_err();
        status.message().to_owned()
    };
    assert!(
        wrong("widget.sock", RESOURCE, "v1alpha")
            .await
            .contains("is not supported by kubelet")
    );
    assert!(
        wrong("widget.sock", "widget", "v1beta1")
            .await
            .contains("the ResourceName \"widget\" is invalid")
    );
    assert!(
        wrong("../widget.sock", "example.com/other", "v1beta1")
            .await
            .contains("bad socketPath")
    );

    // The first keeps both busy; the node's allocatable still counts two, as if the next pod had come in the same moment.
    world.create("first", asking("1")).await;
    world.until("first", "ready", is_ready).await;
    let held = widgets(&world, "first");
    // The device that is left falls ill, and another one is told of that the pod has not asked about yet.
    let left = if held == "w1" {
        ("w2", "Unhealthy")
    } else {
        ("w1", "Unhealthy")
    };
    plugin
        .devices
        .send_replace(vec![(if held == "w1" { "w1" } else { "w2" }, "Healthy"), left]);
    until_shown(&world, "2", "1").await;
    let init = json!({RESOURCE: "1"});
    let mut spec = asking("1");
    spec["initContainers"] =
        json!([{"name": "prepare", "image": "exit-0:1", "resources": {"requests": init, "limits": init}}]);
    world
        .pods()
        .delete("first", &DeleteParams::default())
        .await
        .unwrap();
    world.until_gone("first").await;
    // Init containers lend their devices to those that come after them.
    world.create("lends", spec).await;
    world.until("lends", "ready", is_ready).await;
    assert_eq!(widgets(&world, "lends"), held);
    world.create("late", asking("1")).await;
    let refused = world
        .until("late", "refused", |pod| pod["status"]["phase"] == "Failed")
        .await;
    assert_eq!(refused["status"]["reason"], format!("OutOf{RESOURCE}"));
    life.end().await;
}
