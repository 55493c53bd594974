//! A DRA driver beside the node: it registers, prepares the devices of a pod's claims, and is asked to undo it, also by a
//! kubelet that came later.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::resource::v1::{ResourceClaim, ResourceSlice};
use kube::Api;
use kube::api::{DeleteParams, Patch, PatchParams, PostParams};
use parking_lot::Mutex;
use serde_json::{Value, json};
use skiff_csi::registration::registration_server::{Registration, RegistrationServer};
use skiff_csi::registration::{InfoRequest, PluginInfo, RegistrationStatus, RegistrationStatusResponse};
use skiff_devices::dra::dra_plugin_server::{DraPlugin, DraPluginServer};
use skiff_devices::dra::*;
use skiff_devices::dra_health::dra_resource_health_server::{DraResourceHealth, DraResourceHealthServer};
use skiff_devices::dra_health::{
    DeviceHealth, DeviceIdentifier, NodeWatchResourcesRequest, NodeWatchResourcesResponse,
};
use skiff_devices::podresources::GetPodResourcesRequest;
use skiff_devices::podresources::pod_resources_lister_client::PodResourcesListerClient;
use skiff_devices::{Request, Response, Status};
use tokio::sync::watch;
use tokio_stream::wrappers::WatchStream;
use tokio_stream::{Stream, StreamExt};

use crate::{NODE, PATIENCE, World, is_ready};

const DRIVER: &str = "d.example.com";

#[derive(Clone)]
struct Driver {
    endpoint: String,
    calls: Arc<Mutex<Vec<String>>>,
    /// As in the protocol: 1 is healthy, 2 is not.
    health: watch::Sender<i32>,
}

#[tonic::async_trait]
impl Registration for Driver {
    async fn get_info(&self, _: Request<InfoRequest>) -> Result<Response<PluginInfo>, Status> {
        Ok(Response::new(PluginInfo {
            r#type: "DRAPlugin".to_owned(),
            name: DRIVER.to_owned(),
            endpoint: self.endpoint.clone(),
            supported_versions: vec!["v1.DRAPlugin".to_owned(), "v1beta1.DRAPlugin".to_owned()],
        }))
    }

    async fn notify_registration_status(
        &self,
        request: Request<RegistrationStatus>,
    ) -> Result<Response<RegistrationStatusResponse>, Status> {
        let told = request.into_inner();
        assert!(told.plugin_registered, "{}", told.error);
        Ok(Response::new(RegistrationStatusResponse {}))
    }
}

#[tonic::async_trait]
impl DraPlugin for Driver {
    async fn node_prepare_resources(
        &self,
        request: Request<NodePrepareResourcesRequest>,
    ) -> Result<Response<NodePrepareResourcesResponse>, Status> {
        let claims = request.into_inner().claims.into_iter();
        let claims = claims.map(|claim| {
            self.calls
                .lock()
                .push(format!("prepare {}/{}", claim.namespace, claim.name));
            let device = |number: u32, request: &str| Device {
                request_names: vec![request.to_owned()],
                pool_name: "pool".to_owned(),
                device_name: format!("gpu{number}"),
                cdi_device_ids: vec![format!("{DRIVER}/gpu={number}")],
                share_id: None,
            };
            let answer = NodePrepareResourceResponse {
                devices: vec![device(0, "first"), device(1, "second")],
                error: String::new(),
            };
            (claim.uid, answer)
        });
        Ok(Response::new(NodePrepareResourcesResponse {
            claims: claims.collect(),
        }))
    }

    async fn node_unprepare_resources(
        &self,
        request: Request<NodeUnprepareResourcesRequest>,
    ) -> Result<Response<NodeUnprepareResourcesResponse>, Status> {
        let claims = request.into_inner().claims.into_iter();
        let claims = claims.map(|claim| {
            self.calls
                .lock()
                .push(format!("unprepare {}/{}", claim.namespace, claim.name));
            (claim.uid, NodeUnprepareResourceResponse::default())
        });
        Ok(Response::new(NodeUnprepareResourcesResponse {
            claims: claims.collect(),
        }))
    }
}

#[tonic::async_trait]
impl DraResourceHealth for Driver {
    type NodeWatchResourcesStream =
        std::pin::Pin<Box<dyn Stream<Item = Result<NodeWatchResourcesResponse, Status>> + Send>>;

    async fn node_watch_resources(
        &self,
        _: Request<NodeWatchResourcesRequest>,
    ) -> Result<Response<Self::NodeWatchResourcesStream>, Status> {
        let told = WatchStream::new(self.health.subscribe()).map(|health| {
            let device = DeviceIdentifier {
                pool_name: "pool".to_owned(),
                device_name: "gpu1".to_owned(),
            };
            let one = DeviceHealth {
                device: Some(device),
                health,
                health_check_timeout_seconds: 600,
                message: "as told".to_owned(),
                ..DeviceHealth::default()
            };
            Ok(NodeWatchResourcesResponse { devices: vec![one] })
        });
        Ok(Response::new(Box::pin(told)))
    }
}

fn listen(socket: &Path) -> tokio_stream::wrappers::UnixListenerStream {
    let listener = tokio::net::UnixListener::bind(socket).unwrap();
    tokio_stream::wrappers::UnixListenerStream::new(listener)
}

impl Driver {
    async fn start(world: &World) -> Driver {
        let node = world.dir.path().join("node");
        let (plugins, registry) = (node.join("plugins").join(DRIVER), node.join("plugins_registry"));
        std::fs::create_dir_all(&plugins).unwrap();
        std::fs::create_dir_all(&registry).unwrap();
        let endpoint = plugins.join("dra.sock");
        let driver = Driver {
            endpoint: endpoint.display().to_string(),
            calls: Arc::default(),
            health: watch::Sender::new(1),
        };
        let service = tonic::transport::Server::builder()
            .add_service(DraPluginServer::new(driver.clone()))
            .add_service(DraResourceHealthServer::new(driver.clone()))
            .serve_with_incoming(listen(&endpoint));
        let registration = tonic::transport::Server::builder()
            .add_service(RegistrationServer::new(driver.clone()))
            .serve_with_incoming(listen(&registry.join(format!("{DRIVER}-reg.sock"))));
        tokio::spawn(async move { tokio::try_join!(service, registration).unwrap() });
        driver
    }
}

async fn create_claim(world: &World, name: &str) -> Api<ResourceClaim> {
    let claims: Api<ResourceClaim> = Api::namespaced(world.client.clone(), "default");
    let request = |name: &str| json!({"name": name, "exactly": {"deviceClassName": "gpu"}});
    let claim = json!({"metadata": {"name": name}, "spec": {"devices": {"requests": [request("first"), request("second")]}}});
    let claim = serde_json::from_value(claim).unwrap();
    claims.create(&PostParams::default(), &claim).await.unwrap();
    claims
}

/// Plays the scheduler.
async fn reserve(world: &World, claims: &Api<ResourceClaim>, name: &str, pod: &str) {
    let uid = world.pods().get(pod).await.unwrap().metadata.uid.unwrap();
    let result = |request: &str, device: &str| json!({"request": request, "driver": DRIVER, "pool": "pool", "device": device});
    let status = json!({"status": {
        "allocation": {"devices": {"results": [result("first", "gpu0"), result("second", "gpu1")]}},
        "reservedFor": [{"resource": "pods", "name": pod, "uid": uid}]}});
    claims
        .patch_status(name, &PatchParams::default(), &Patch::Merge(status))
        .await
        .unwrap();
}

fn cdi(world: &World, container: &str) -> Vec<String> {
    let inner = world.runtime.inner.lock();
    let mut configs = inner.containers.values().map(|(_, config, _)| config);
    let config = configs
        .find(|config| config.metadata.as_ref().unwrap().name == container)
        .unwrap();
    config
        .cdi_devices
        .iter()
        .map(|device| device.name.clone())
        .collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_driver_prepares_the_devices_of_a_pod() {
    let world = World::new().await;
    // What a driver offered before it went away.
    let slices: Api<ResourceSlice> = Api::all(world.client.clone());
    let slice = json!({"metadata": {"name": "left"}, "spec": {"driver": DRIVER, "nodeName": NODE,
        "pool": {"name": "pool", "generation": 1, "resourceSliceCount": 1}, "devices": [{"name": "gpu0"}]}});
    let slice: ResourceSlice = serde_json::from_value(slice).unwrap();
    slices.create(&PostParams::default(), &slice).await.unwrap();
    let life = world.start();
    tokio::time::timeout(PATIENCE, async {
        while slices.get_opt("left").await.unwrap().is_some() {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    })
    .await
    .expect("nobody deleted the slices of a driver that is not here");

    let claims = create_claim(&world, "gpus").await;
    let using =
        |name: &str, claim: Value| json!({"name": name, "image": "app:1", "resources": {"claims": [claim]}});
    world
        .create(
            "pod",
            json!({"resourceClaims": [{"name": "gpu", "resourceClaimName": "gpus"}], "containers": [
                using("all", json!({"name": "gpu"})), using("one", json!({"name": "gpu", "request": "second"})),
                {"name": "none", "image": "app:1"}]}),
        )
        .await;
    world
        .until_event(
            "FailedPrepareDynamicResources",
            "is not allowed to use ResourceClaim gpus",
        )
        .await;
    reserve(&world, &claims, "gpus", "pod").await;
    let missing = "Failed to prepare dynamic resources: prepare dynamic resources: DRA driver d.example.com is not registered";
    world.until_event("FailedPrepareDynamicResources", missing).await;
    let driver = Driver::start(&world).await;
    world.until("pod", "ready", is_ready).await;
    assert_eq!(*driver.calls.lock(), ["prepare default/gpus"]);
    assert_eq!(cdi(&world, "all"), ["d.example.com/gpu=0", "d.example.com/gpu=1"]);
    assert_eq!(cdi(&world, "one"), ["d.example.com/gpu=1"]);
    assert!(cdi(&world, "none").is_empty());

    // The driver tells how its devices are.
    let health = |word: &'static str| {
        move |pod: &Value| {
            let statuses = pod["status"]["containerStatuses"]
                .as_array()
                .cloned()
                .unwrap_or_default();
            let one = statuses.iter().find(|status| status["name"] == "one");
            let status = one
                .map(|one| one["allocatedResourcesStatus"][0].clone())
                .unwrap_or_default();
            status["name"] == "claim:gpu/second"
                && status["resources"][0]
                    == json!({"resourceID": "d.example.com/gpu=1", "health": word, "message": "as told"})
        }
    };
    world
        .until("pod", "shown with a healthy device", health("Healthy"))
        .await;
    driver.health.send_replace(2);
    world
        .until(
            "pod",
            "shown with a device that is not healthy",
            health("Unhealthy"),
        )
        .await;

    // Who monitors devices learns of them.
    let socket = world.dir.path().join("node/pod-resources/kubelet.sock");
    let mut lister = PodResourcesListerClient::new(skiff_devices::channel(&socket));
    let request = |name: &str| GetPodResourcesRequest {
        pod_name: name.to_owned(),
        pod_namespace: "default".to_owned(),
    };
    let told = lister
        .get(request("pod"))
        .await
        .unwrap()
        .into_inner()
        .pod_resources
        .unwrap();
    let one = told
        .containers
        .iter()
        .find(|container| container.name == "one")
        .unwrap();
    assert_eq!(one.dynamic_resources[0].claim_name, "gpus");
    let device = &one.dynamic_resources[0].claim_resources[0];
    assert_eq!(
        (device.driver_name.as_str(), device.device_name.as_str()),
        (DRIVER, "gpu1")
    );
    assert!(
        lister
            .get(request("other"))
            .await
            .unwrap_err()
            .message()
            .contains("not found")
    );

    // Another kubelet gives back what this one prepared, as soon as the driver is back.
    life.end().await;
    let life = world.start();
    world
        .pods()
        .delete("pod", &DeleteParams::default())
        .await
        .unwrap();
    world.until_gone("pod").await;
    assert_eq!(
        *driver.calls.lock(),
        ["prepare default/gpus", "unprepare default/gpus"]
    );
    life.end().await;
}
