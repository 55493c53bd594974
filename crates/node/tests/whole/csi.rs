//! Volumes of a storage driver: a small driver of our own behind real sockets, with real mounts where the test runs as root.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use k8s_openapi::api::core::v1::{Node, PersistentVolume, PersistentVolumeClaim, Secret};
use k8s_openapi::api::storage::v1::{CSIDriver, CSINode, VolumeAttachment};
use kube::Api;
use kube::api::{DeleteParams, Patch, PatchParams, PostParams};
use parking_lot::Mutex;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use skiff_csi::registration::registration_server::{Registration, RegistrationServer};
use skiff_csi::registration::{InfoRequest, PluginInfo, RegistrationStatus, RegistrationStatusResponse};
use skiff_csi::v1::node_server::{Node as NodeService, NodeServer};
use skiff_csi::v1::node_service_capability::{Rpc, Type, rpc};
use skiff_csi::v1::*;
use skiff_csi::{Request, Response, Status};
use tokio::task::JoinHandle;

use super::{NODE, PATIENCE, World, is_ready};

const DRIVER: &str = "test.csi";

/// What the driver was asked, in order.
type Calls = Arc<Mutex<Vec<(&'static str, Value)>>>;

struct Driver {
    socket: PathBuf,
    /// Where the volumes' files are.
    backing: PathBuf,
    calls: Calls,
    /// Does what it is asked, and says that it knows no such volume.
    forgetful: Arc<AtomicBool>,
}

struct Running {
    calls: Calls,
    forgetful: Arc<AtomicBool>,
    tasks: Vec<JoinHandle<()>>,
}

impl Drop for Running {
    fn drop(&mut self) {
        for task in &self.tasks {
            task.abort();
        }
    }
}

impl Running {
    fn all(&self, call: &str) -> Vec<Value> {
        let calls = self.calls.lock();
        let of = calls.iter().filter(|(name, _)| *name == call);
        of.map(|(_, value)| value.clone()).collect()
    }
}

fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

fn bind(from: &Path, to: &str) -> Result<(), Status> {
    std::fs::create_dir_all(from).and_then(|()| std::fs::create_dir_all(to))?;
    let parent = Path::new(to).parent().unwrap();
    let mounted = skiff_fs::mounts_below(parent)?;
    if is_root() && !mounted.contains(&parent.canonicalize()?.join(Path::new(to).file_name().unwrap())) {
        rustix::mount::mount_bind(from, to).map_err(std::io::Error::from)?;
    }
    Ok(())
}

fn unbind(path: &str) {
    let _ = rustix::mount::unmount(path, rustix::mount::UnmountFlags::empty());
    let _ = std::fs::remove_dir(path);
}

impl Driver {
    fn note(&self, call: &'static str, value: Value) {
        self.calls.lock().push((call, value));
    }

    fn remember(&self) -> Result<(), Status> {
        match self.forgetful.load(Ordering::Relaxed) {
            true => Err(Status::not_found("no such volume")),
            false => Ok(()),
        }
    }
}

fn capability_of(capability: Option<VolumeCapability>) -> Value {
    let capability = capability.unwrap_or_default();
    let mode = capability
        .access_mode
        .map(|mode| mode.mode().as_str_name().to_owned());
    match capability.access_type {
        Some(volume_capability::AccessType::Mount(mount)) => {
            json!({"mode": mode, "fsType": mount.fs_type, "flags": mount.mount_flags})
        }
        _ => json!({"mode": mode, "block": true}),
    }
}

#[tonic::async_trait]
impl NodeService for Driver {
    async fn node_stage_volume(
        &self,
        request: Request<NodeStageVolumeRequest>,
    ) -> Result<Response<NodeStageVolumeResponse>, Status> {
        let asked = request.into_inner();
        let capability = capability_of(asked.volume_capability);
        let block = capability["block"] == true;
        self.note(
            "stage",
            json!({"id": asked.volume_id, "path": asked.staging_target_path, "context": asked.publish_context,
                "secrets": asked.secrets, "capability": capability}),
        );
        if !block {
            bind(&self.backing.join(&asked.volume_id), &asked.staging_target_path)?;
        }
        Ok(Response::new(NodeStageVolumeResponse {}))
    }

    async fn node_unstage_volume(
        &self,
        request: Request<NodeUnstageVolumeRequest>,
    ) -> Result<Response<NodeUnstageVolumeResponse>, Status> {
        let asked = request.into_inner();
        self.note("unstage", json!(asked.volume_id));
        unbind(&asked.staging_target_path);
        self.remember()?;
        Ok(Response::new(NodeUnstageVolumeResponse {}))
    }

    async fn node_publish_volume(
        &self,
        request: Request<NodePublishVolumeRequest>,
    ) -> Result<Response<NodePublishVolumeResponse>, Status> {
        let asked = request.into_inner();
        let capability = capability_of(asked.volume_capability);
        let block = capability["block"] == true;
        self.note(
            "publish",
            json!({"id": asked.volume_id, "path": asked.target_path, "staging": asked.staging_target_path,
                "context": asked.publish_context, "attributes": asked.volume_context, "capability": capability}),
        );
        if block {
            std::fs::write(&asked.target_path, "a device")?;
        } else {
            bind(&self.backing.join(&asked.volume_id), &asked.target_path)?;
        }
        Ok(Response::new(NodePublishVolumeResponse {}))
    }

    async fn node_unpublish_volume(
        &self,
        request: Request<NodeUnpublishVolumeRequest>,
    ) -> Result<Response<NodeUnpublishVolumeResponse>, Status> {
        let asked = request.into_inner();
        self.note("unpublish", json!(asked.volume_id));
        unbind(&asked.target_path);
        self.remember()?;
        let _ = std::fs::remove_file(&asked.target_path);
        Ok(Response::new(NodeUnpublishVolumeResponse {}))
    }

    async fn node_get_volume_stats(
        &self,
        _: Request<NodeGetVolumeStatsRequest>,
    ) -> Result<Response<NodeGetVolumeStatsResponse>, Status> {
        Ok(Response::new(NodeGetVolumeStatsResponse {
            usage: vec![VolumeUsage {
                available: 60,
                total: 100,
                used: 40,
                unit: volume_usage::Unit::Bytes.into(),
            }],
            volume_condition: None,
        }))
    }

    async fn node_expand_volume(
        &self,
        request: Request<NodeExpandVolumeRequest>,
    ) -> Result<Response<NodeExpandVolumeResponse>, Status> {
        let asked = request.into_inner();
        let bytes = asked.capacity_range.unwrap_or_default().required_bytes;
        self.note("expand", json!({"id": asked.volume_id, "bytes": bytes}));
        Ok(Response::new(NodeExpandVolumeResponse {
            capacity_bytes: bytes,
        }))
    }

    async fn node_get_capabilities(
        &self,
        _: Request<NodeGetCapabilitiesRequest>,
    ) -> Result<Response<NodeGetCapabilitiesResponse>, Status> {
        let capabilities = [
            rpc::Type::StageUnstageVolume,
            rpc::Type::ExpandVolume,
            rpc::Type::GetVolumeStats,
        ];
        let capabilities = capabilities.map(|one| NodeServiceCapability {
            r#type: Some(Type::Rpc(Rpc { r#type: one.into() })),
        });
        Ok(Response::new(NodeGetCapabilitiesResponse {
            capabilities: capabilities.to_vec(),
        }))
    }

    async fn node_get_info(
        &self,
        _: Request<NodeGetInfoRequest>,
    ) -> Result<Response<NodeGetInfoResponse>, Status> {
        Ok(Response::new(NodeGetInfoResponse {
            node_id: "id-of-node".to_owned(),
            max_volumes_per_node: 7,
            accessible_topology: Some(Topology {
                segments: [("topology.test.csi/rack".to_owned(), "r1".to_owned())].into(),
            }),
        }))
    }
}

struct Registrar {
    endpoint: PathBuf,
}

#[tonic::async_trait]
impl Registration for Registrar {
    async fn get_info(&self, _: Request<InfoRequest>) -> Result<Response<PluginInfo>, Status> {
        Ok(Response::new(PluginInfo {
            r#type: "CSIPlugin".to_owned(),
            name: DRIVER.to_owned(),
            endpoint: self.endpoint.to_string_lossy().into_owned(),
            supported_versions: vec!["1.0.0".to_owned()],
        }))
    }

    async fn notify_registration_status(
        &self,
        _: Request<RegistrationStatus>,
    ) -> Result<Response<RegistrationStatusResponse>, Status> {
        Ok(Response::new(RegistrationStatusResponse {}))
    }
}

fn listen(path: &Path) -> tokio_stream::wrappers::UnixListenerStream {
    std::fs::create_dir_all(path.parent().unwrap()).unwrap();
    let listener = tokio::net::UnixListener::bind(path).unwrap();
    tokio_stream::wrappers::UnixListenerStream::new(listener)
}

/// A driver as users install it: its own socket, and a registrar's beside.
fn run_driver(world: &World) -> Running {
    let root = world.dir.path().join("node");
    let calls = Calls::default();
    let forgetful = Arc::new(AtomicBool::new(false));
    let driver = Driver {
        socket: root.join("plugins").join(DRIVER).join("csi.sock"),
        backing: world.dir.path().join("backing"),
        calls: calls.clone(),
        forgetful: forgetful.clone(),
    };
    let registrar = Registrar {
        endpoint: driver.socket.clone(),
    };
    let serving = tonic::transport::Server::builder();
    let sockets = (
        listen(&driver.socket),
        listen(&root.join("plugins_registry/test.csi-reg.sock")),
    );
    let node = serving
        .clone()
        .add_service(NodeServer::new(driver))
        .serve_with_incoming(sockets.0);
    let registration = serving
        .clone()
        .add_service(RegistrationServer::new(registrar))
        .serve_with_incoming(sockets.1);
    let tasks = vec![
        tokio::spawn(async move { node.await.unwrap() }),
        tokio::spawn(async move { registration.await.unwrap() }),
    ];
    Running {
        calls,
        forgetful,
        tasks,
    }
}

fn from<K: DeserializeOwned>(value: Value) -> K {
    serde_json::from_value(value).unwrap()
}

async fn until<T, F: Future<Output = Option<T>>>(what: &str, mut look: impl FnMut() -> F) -> T {
    let found = tokio::time::timeout(PATIENCE * 2, async {
        loop {
            if let Some(found) = look().await {
                return found;
            }
            tokio::time::sleep(std::time::Duration::from_millis(10)).await;
        }
    });
    found.await.unwrap_or_else(|_| panic!("never: {what}"))
}

/// A volume of the driver and a claim that is bound to it.
async fn make_claim(world: &World, name: &str, mode: &str) {
    let volumes: Api<PersistentVolume> = Api::all(world.client.clone());
    let claims: Api<PersistentVolumeClaim> = Api::namespaced(world.client.clone(), "default");
    let claim = json!({"metadata": {"name": name}, "spec": {"accessModes": ["ReadWriteOnce"], "storageClassName": "",
        "volumeMode": mode, "volumeName": format!("pv-{name}"), "resources": {"requests": {"storage": "1Gi"}}}});
    let claim = claims.create(&PostParams::default(), &from(claim)).await.unwrap();
    let uid = claim.metadata.uid.unwrap();
    let volume = json!({"metadata": {"name": format!("pv-{name}")}, "spec": {"capacity": {"storage": "1Gi"},
        "accessModes": ["ReadWriteOnce"], "storageClassName": "", "volumeMode": mode, "mountOptions": if mode == "Block" { json!([]) } else { json!(["noatime"]) },
        "claimRef": {"namespace": "default", "name": name, "uid": uid},
        "csi": {"driver": DRIVER, "volumeHandle": format!("vol-{name}"), "fsType": "ext4", "volumeAttributes": {"color": "blue"},
            "nodeStageSecretRef": {"namespace": "default", "name": "stage"}}}});
    volumes
        .create(&PostParams::default(), &from(volume))
        .await
        .unwrap();
    let status = json!({"status": {"phase": "Bound", "accessModes": ["ReadWriteOnce"], "capacity": {"storage": "1Gi"}}});
    claims
        .patch_status(name, &PatchParams::default(), &Patch::Merge(status))
        .await
        .unwrap();
}

/// What the attach/detach controller and an attacher do.
async fn attach(world: &World, name: &str) {
    let nodes: Api<Node> = Api::all(world.client.clone());
    let unique = format!("kubernetes.io/csi/{DRIVER}^vol-{name}");
    until("in use", || async {
        let node = nodes.get(NODE).await.ok()?;
        let in_use = node.status?.volumes_in_use?;
        in_use.contains(&unique).then_some(())
    })
    .await;
    let sha = Sha256::digest(format!("vol-{name}{DRIVER}{NODE}"));
    let id = sha
        .iter()
        .fold("csi-".to_owned(), |text, byte| format!("{text}{byte:02x}"));
    let attachments: Api<VolumeAttachment> = Api::all(world.client.clone());
    let attachment = json!({"metadata": {"name": id}, "spec": {"attacher": DRIVER, "nodeName": NODE,
        "source": {"persistentVolumeName": format!("pv-{name}")}}});
    attachments
        .create(&PostParams::default(), &from(attachment))
        .await
        .unwrap();
    let status = json!({"status": {"attached": true, "attachmentMetadata": {"lun": "3"}}});
    attachments
        .patch_status(&id, &PatchParams::default(), &Patch::Merge(status))
        .await
        .unwrap();
    let mut attached: Vec<Value> = nodes
        .get(NODE)
        .await
        .unwrap()
        .status
        .and_then(|status| status.volumes_attached)
        .unwrap_or_default()
        .into_iter()
        .map(|volume| json!(volume))
        .collect();
    attached.push(json!({"name": unique, "devicePath": ""}));
    let status = json!({"status": {"volumesAttached": attached}});
    nodes
        .patch_status(NODE, &PatchParams::default(), &Patch::Merge(status))
        .await
        .unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_driver_and_its_volumes() {
    let world = World::new().await;
    let life = world.start();
    let driver = run_driver(&world);
    let csi_nodes: Api<CSINode> = Api::all(world.client.clone());
    let known = until("registered", || async {
        let found = csi_nodes.get_opt(NODE).await.unwrap()?;
        found.spec.drivers.first().cloned()
    })
    .await;
    assert_eq!(
        serde_json::to_value(&known).unwrap(),
        json!({"name": DRIVER, "nodeID": "id-of-node", "topologyKeys": ["topology.test.csi/rack"], "allocatable": {"count": 7}})
    );
    let nodes: Api<Node> = Api::all(world.client.clone());
    let node = nodes.get(NODE).await.unwrap().metadata;
    assert_eq!(node.labels.unwrap()["topology.test.csi/rack"], "r1");
    assert_eq!(
        node.annotations.unwrap()["csi.volume.kubernetes.io/nodeid"],
        r#"{"test.csi":"id-of-node"}"#
    );

    let drivers: Api<CSIDriver> = Api::all(world.client.clone());
    let spec = json!({"metadata": {"name": DRIVER}, "spec": {"attachRequired": true, "podInfoOnMount": true, "fsGroupPolicy": "File",
        "volumeLifecycleModes": ["Persistent", "Ephemeral"], "tokenRequests": [{"audience": "storage"}]}});
    drivers.create(&PostParams::default(), &from(spec)).await.unwrap();
    let secrets: Api<Secret> = Api::namespaced(world.client.clone(), "default");
    let secret = json!({"metadata": {"name": "stage"}, "stringData": {"key": "sesame"}});
    secrets
        .create(&PostParams::default(), &from(secret))
        .await
        .unwrap();
    make_claim(&world, "data", "Filesystem").await;
    make_claim(&world, "raw", "Block").await;
    world
        .create("app", json!({"terminationGracePeriodSeconds": 0, "securityContext": {"fsGroup": 4321},
            "containers": [{"name": "app", "image": "app:1",
                "volumeMounts": [{"name": "data", "mountPath": "/data"}, {"name": "inline", "mountPath": "/inline"}],
                "volumeDevices": [{"name": "raw", "devicePath": "/dev/raw"}]}],
            "volumes": [{"name": "data", "persistentVolumeClaim": {"claimName": "data"}},
                {"name": "raw", "persistentVolumeClaim": {"claimName": "raw"}},
                {"name": "inline", "csi": {"driver": DRIVER, "volumeAttributes": {"size": "1"}}}]}))
        .await;
    // Nothing is staged before it is attached, and it is attached only when the node says that it needs it.
    attach(&world, "data").await;
    assert_eq!(driver.all("stage"), [] as [Value; 0]);
    attach(&world, "raw").await;
    let pod = world.until("app", "ready", is_ready).await;
    let uid = pod["metadata"]["uid"].as_str().unwrap().to_owned();
    let root = world.dir.path().join("node");

    let staged = driver.all("stage");
    let staged_of = |id: &str| staged.iter().find(|call| call["id"] == id).unwrap();
    let sha = Sha256::digest("vol-data");
    let hash = sha
        .iter()
        .fold(String::new(), |text, byte| format!("{text}{byte:02x}"));
    let global = root.join(format!("plugins/kubernetes.io/csi/{DRIVER}/{hash}"));
    let data = staged_of("vol-data");
    assert_eq!(data["path"], json!(global.join("globalmount")));
    assert_eq!(data["context"], json!({"lun": "3"}));
    assert_eq!(data["secrets"], json!({"key": "sesame"}));
    assert_eq!(
        data["capability"],
        json!({"mode": "SINGLE_NODE_WRITER", "fsType": "ext4", "flags": ["noatime"]})
    );
    assert_eq!(staged_of("vol-raw")["capability"]["block"], true);
    let published = driver.all("publish");
    let published_of = |volume: &str| {
        let mut found = published
            .iter()
            .filter(|call| call["path"].as_str().unwrap().contains(volume));
        found.next().unwrap()
    };
    let mount = root.join(format!("pods/{uid}/volumes/kubernetes.io~csi/pv-data/mount"));
    let data = published_of("/pv-data/mount");
    assert_eq!(data["path"], json!(mount));
    assert_eq!(data["staging"], json!(global.join("globalmount")));
    let attributes = &data["attributes"];
    assert_eq!(attributes["color"], "blue");
    assert_eq!(attributes["csi.storage.k8s.io/pod.name"], "app");
    assert_eq!(attributes["csi.storage.k8s.io/ephemeral"], "false");
    let tokens = attributes["csi.storage.k8s.io/serviceAccount.tokens"]
        .as_str()
        .unwrap();
    let tokens: Value = serde_json::from_str(tokens).unwrap();
    assert!(tokens["storage"]["token"].as_str().unwrap().len() > 100);
    let inline = published_of("/inline/mount");
    assert_eq!(inline["attributes"]["csi.storage.k8s.io/ephemeral"], "true");
    assert_eq!(
        (&inline["staging"], &inline["attributes"]["size"]),
        (&json!(""), &json!("1"))
    );
    let noted = std::fs::read(mount.parent().unwrap().join("vol_data.json")).unwrap();
    let noted: Value = serde_json::from_slice(&noted).unwrap();
    assert_eq!(
        (&noted["specVolID"], &noted["volumeHandle"]),
        (&json!("pv-data"), &json!("vol-data"))
    );
    let link = root.join(format!("pods/{uid}/volumeDevices/kubernetes.io~csi/pv-raw"));
    assert_eq!(std::fs::read(&link).unwrap(), b"a device");
    if is_root() {
        use std::os::unix::fs::MetadataExt;
        let backing = world.dir.path().join("backing/vol-data");
        assert_eq!(std::fs::metadata(&backing).unwrap().gid(), 4321);
        std::fs::write(mount.join("kept"), "x").unwrap();
    }
    {
        let inner = world.runtime.inner.lock();
        let (_, config, _) = inner.containers.values().next().unwrap();
        assert!(
            config
                .mounts
                .iter()
                .any(|m| m.host_path == mount.to_string_lossy())
        );
        let device = &config.devices[0];
        assert_eq!(device.host_path, link.to_string_lossy());
        assert_eq!(
            (device.container_path.as_str(), device.permissions.as_str()),
            ("/dev/raw", "mrw")
        );
    }

    let admin = world
        .pki
        .client("admin", "somebody", Some("system:masters"))
        .unwrap();
    let port = world.kubelet_port().await;
    let summary = super::stats::until_summary(&world, port, &admin, |summary| {
        let volumes = summary["pods"][0]["volume"].as_array();
        volumes.is_some_and(|all| all.iter().any(|one| one["name"] == "data"))
    })
    .await;
    let of_volumes = summary["pods"][0]["volume"].as_array().unwrap();
    let shown = of_volumes.iter().find(|volume| volume["name"] == "data").unwrap();
    assert_eq!(
        (&shown["usedBytes"], &shown["pvcRef"]["name"]),
        (&json!(40), &json!("data"))
    );
    assert!(
        of_volumes.iter().any(|volume| volume["name"] == "raw"),
        "{of_volumes:?}"
    );
    let (_, metrics) = super::get(&world, port, Some(&admin), "/metrics").await;
    let line = r#"kubelet_volume_stats_used_bytes{namespace="default",persistentvolumeclaim="data"} 40"#;
    assert!(metrics.contains(line), "{metrics}");
    let call =
        r#"method_name="/csi.v1.Node/NodePublishVolume",grpc_status_code="OK",migrated="false",le="+Inf"}"#;
    assert!(metrics.contains(call), "{metrics}");
    let operation = r#"operation_name="volume_mount",status="success",migrated="false",le="+Inf"}"#;
    assert!(metrics.contains(operation), "{metrics}");

    // The node starts again: what is mounted stays, and the driver is not asked to mount it once more.
    let before = driver.all("publish").len();
    life.end().await;
    let life = world.start();
    let volumes: Api<PersistentVolume> = Api::all(world.client.clone());
    let larger = json!({"spec": {"capacity": {"storage": "3Gi"}}});
    volumes
        .patch("pv-data", &PatchParams::default(), &Patch::Merge(larger))
        .await
        .unwrap();
    let touch = json!({"metadata": {"annotations": {"touched": "yes"}}});
    let claims: Api<PersistentVolumeClaim> = Api::namespaced(world.client.clone(), "default");
    // What a resizer notes that leaves the rest to the node.
    let progress = json!({"status": {"allocatedResources": {"storage": "3Gi"}, "allocatedResourceStatuses": {"storage": "NodeResizePending"},
        "conditions": [{"type": "FileSystemResizePending", "status": "True"}]}});
    claims
        .patch_status("data", &PatchParams::default(), &Patch::Merge(progress))
        .await
        .unwrap();
    let mut touched = 0;
    until("expanded", || {
        touched += 1;
        let mut touch = touch.clone();
        touch["metadata"]["annotations"]["touched"] = json!(touched.to_string());
        let (claims, pods) = (claims.clone(), world.pods());
        async move {
            // Anything that has the pod looked at.
            pods.patch("app", &PatchParams::default(), &Patch::Merge(touch))
                .await
                .unwrap();
            let claim = claims.get("data").await.unwrap();
            let size = claim.status?.capacity?.get("storage")?.0.clone();
            (size == "3Gi").then_some(())
        }
    })
    .await;
    assert_eq!(
        driver.all("expand")[0],
        json!({"id": "vol-data", "bytes": 3i64 << 30})
    );
    let status = claims.get("data").await.unwrap().status.unwrap();
    assert!(status.conditions.unwrap_or_default().is_empty());
    assert!(status.allocated_resource_statuses.unwrap_or_default().is_empty());
    if is_root() {
        let again = driver.all("publish");
        let of_mounts = again
            .iter()
            .skip(before)
            .filter(|call| call["capability"]["block"] != true);
        assert_eq!(of_mounts.count(), 0, "published again: {again:#?}");
    }

    // All of it goes, and what the volume holds stays.
    world
        .pods()
        .delete("app", &DeleteParams::default())
        .await
        .unwrap();
    world.until_gone("app").await;
    until("unstaged", || async {
        (driver.all("unstage").len() == 2).then_some(())
    })
    .await;
    let unpublished = driver.all("unpublish");
    assert_eq!(unpublished.len(), 3, "{unpublished:?}");
    until("not in use", || async {
        let node = nodes.get(NODE).await.ok()?;
        node.status?
            .volumes_in_use
            .is_none_or(|names| names.is_empty())
            .then_some(())
    })
    .await;
    assert!(!global.exists() && !mount.exists());
    let left = root.join("plugins/kubernetes.io/csi/volumeDevices/pv-raw");
    assert!(!left.exists());
    if is_root() {
        assert!(world.dir.path().join("backing/vol-data/kept").exists());
        assert_eq!(
            skiff_fs::mounts_below(&root.canonicalize().unwrap())
                .unwrap()
                .len(),
            0
        );
    }
    life.end().await;
}

/// A driver that is not there: the user is told, the pod starts when it comes, and it cannot end without it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_driver_that_comes_and_goes() {
    let world = World::new().await;
    let life = world.start();
    let drivers: Api<CSIDriver> = Api::all(world.client.clone());
    let spec =
        json!({"metadata": {"name": DRIVER}, "spec": {"attachRequired": false, "fsGroupPolicy": "None"}});
    drivers.create(&PostParams::default(), &from(spec)).await.unwrap();
    let secrets: Api<Secret> = Api::namespaced(world.client.clone(), "default");
    let secret = json!({"metadata": {"name": "stage"}});
    secrets
        .create(&PostParams::default(), &from(secret))
        .await
        .unwrap();
    make_claim(&world, "data", "Filesystem").await;
    let pod = json!({"terminationGracePeriodSeconds": 0,
        "containers": [{"name": "app", "image": "app:1", "volumeMounts": [{"name": "data", "mountPath": "/data"}]}],
        "volumes": [{"name": "data", "persistentVolumeClaim": {"claimName": "data"}}]});
    world.create("app", pod.clone()).await;
    world
        .until_event(
            "FailedMount",
            "MountVolume.MountDevice failed for volume \"pv-data\" : kubernetes.io/csi: attacher.MountDevice failed to \
             create newCsiDriverClient: driver name test.csi not found in the list of registered CSI drivers",
        )
        .await;
    let driver = run_driver(&world);
    let app = world.until("app", "ready", is_ready).await;
    let uid = app["metadata"]["uid"].as_str().unwrap();
    let mount = format!("node/pods/{uid}/volumes/kubernetes.io~csi/pv-data/mount");
    let mount = world.dir.path().join(mount);
    // A second pod of the same volume shares what is staged.
    world.create("second", pod).await;
    world.until("second", "ready", is_ready).await;
    assert_eq!((driver.all("stage").len(), driver.all("publish").len()), (1, 2));

    // Its socket goes: it is taken out of the CSINode, and a pod waits for its volume to be unpublished.
    let registration = world.dir.path().join("node/plugins_registry/test.csi-reg.sock");
    std::fs::remove_file(&registration).unwrap();
    let csi_nodes: Api<CSINode> = Api::all(world.client.clone());
    until("taken out", || async {
        let found = csi_nodes.get(NODE).await.unwrap();
        found.spec.drivers.is_empty().then_some(())
    })
    .await;
    world
        .pods()
        .delete("app", &DeleteParams::default())
        .await
        .unwrap();
    until("ended", || async {
        (world.runtime.running().len() == 1).then_some(())
    })
    .await;
    assert!(mount.exists(), "removed without the driver");
    let registrar = Registrar {
        endpoint: world
            .dir
            .path()
            .join("node/plugins")
            .join(DRIVER)
            .join("csi.sock"),
    };
    let again = tonic::transport::Server::builder()
        .add_service(RegistrationServer::new(registrar))
        .serve_with_incoming(listen(&registration));
    let again = tokio::spawn(async move { again.await.unwrap() });
    until("unpublished", || async { (!mount.exists()).then_some(()) }).await;
    assert_eq!(driver.all("unpublish").len(), 1);
    assert_eq!(driver.all("unstage"), [] as [Value; 0], "the other pod has it");
    world
        .pods()
        .delete("second", &DeleteParams::default())
        .await
        .unwrap();
    world.until_gone("second").await;
    until("unstaged", || async {
        (driver.all("unstage").len() == 1).then_some(())
    })
    .await;
    again.abort();
    life.end().await;
}

/// A driver that let go of a volume, and whose answer was lost: it does not know the volume any more, and nothing waits for it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_volume_that_its_driver_forgot() {
    let world = World::new().await;
    let life = world.start();
    let drivers: Api<CSIDriver> = Api::all(world.client.clone());
    let spec = json!({"metadata": {"name": DRIVER}, "spec": {"attachRequired": false, "fsGroupPolicy": "None",
        "volumeLifecycleModes": ["Persistent", "Ephemeral"]}});
    drivers.create(&PostParams::default(), &from(spec)).await.unwrap();
    let secrets: Api<Secret> = Api::namespaced(world.client.clone(), "default");
    let secret = json!({"metadata": {"name": "stage"}});
    secrets
        .create(&PostParams::default(), &from(secret))
        .await
        .unwrap();
    make_claim(&world, "data", "Filesystem").await;
    make_claim(&world, "raw", "Block").await;
    let driver = run_driver(&world);
    let pod = json!({"terminationGracePeriodSeconds": 0,
        "containers": [{"name": "app", "image": "app:1",
            "volumeMounts": [{"name": "data", "mountPath": "/data"}, {"name": "inline", "mountPath": "/inline"}],
            "volumeDevices": [{"name": "raw", "devicePath": "/dev/raw"}]}],
        "volumes": [{"name": "data", "persistentVolumeClaim": {"claimName": "data"}},
            {"name": "raw", "persistentVolumeClaim": {"claimName": "raw"}}, {"name": "inline", "csi": {"driver": DRIVER}}]});
    world.create("app", pod).await;
    world.until("app", "ready", is_ready).await;
    driver.forgetful.store(true, Ordering::Relaxed);
    world
        .pods()
        .delete("app", &DeleteParams::default())
        .await
        .unwrap();
    world.until_gone("app").await;
    let noted = world.dir.path().join("node/plugins/kubernetes.io/csi");
    until("no notes are left", || async {
        let left = |path: PathBuf| std::fs::read_dir(path).map_or(0, Iterator::count);
        let devices = noted.join("volumeDevices");
        let left = left(noted.join(DRIVER)) + left(devices.join("staging")) + left(devices.join("publish"));
        (left == 0 && !devices.join("pv-raw").exists()).then_some(())
    })
    .await;
    life.end().await;
}
