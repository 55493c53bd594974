//! Claims of a pod over a scripted API. Tests that mount need root and do nothing without.

use super::super::event_messages;
use super::*;
use async_trait::async_trait;
use k8s_openapi::api::authentication::v1::TokenRequest;
use k8s_openapi::api::core::v1::{ConfigMap, Secret};
use serde_json::{Value, json};
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::Arc;

use crate::objects::Objects;

#[derive(Default)]
struct Scripted {
    claims: HashMap<String, Value>,
    volumes: HashMap<String, Value>,
}

#[async_trait]
impl Objects for Scripted {
    async fn config_map(&self, _: &str, _: &str) -> Result<Option<Arc<ConfigMap>>, String> {
        Ok(None)
    }
    async fn secret(&self, _: &str, _: &str) -> Result<Option<Arc<Secret>>, String> {
        Ok(None)
    }
    async fn trust_bundles(&self) -> Result<crate::objects::TrustBundles, String> {
        Ok(Default::default())
    }
    async fn claim(&self, _: &str, name: &str) -> Result<PersistentVolumeClaim, String> {
        let found = self.claims.get(name).cloned();
        let found = found.ok_or_else(|| format!("persistentvolumeclaims {name:?} not found"))?;
        Ok(serde_json::from_value(found).unwrap())
    }
    async fn persistent_volume(&self, name: &str) -> Result<PersistentVolume, String> {
        let found = self.volumes.get(name).cloned();
        let found = found.ok_or_else(|| format!("persistentvolumes {name:?} not found"))?;
        Ok(serde_json::from_value(found).unwrap())
    }
    async fn token(&self, _: &str, _: &str, _: TokenRequest) -> Result<TokenRequest, String> {
        Err("no tokens".to_owned())
    }
}

fn claim(volume: &str) -> Value {
    json!({"metadata": {"name": "c", "namespace": "ns", "uid": "claim-uid"}, "spec": {"volumeName": volume}, "status": {"phase": "Bound"}})
}

fn volume(source: Value) -> Value {
    let mut spec = json!({"claimRef": {"name": "c", "namespace": "ns", "uid": "claim-uid"}, "accessModes": ["ReadWriteOnce"]});
    spec.as_object_mut()
        .unwrap()
        .extend(source.as_object().unwrap().clone());
    json!({"metadata": {"name": "pv"}, "spec": spec})
}

fn world(dir: &Path, claim: Value, volume: Value) -> Volumes {
    let objects = Scripted {
        claims: HashMap::from([("c".to_owned(), claim.clone()), ("p-v".to_owned(), claim)]),
        volumes: HashMap::from([("pv".to_owned(), volume)]),
    };
    std::fs::create_dir_all(dir.join("pods")).unwrap();
    Volumes::new(dir, Arc::new(objects))
}

fn pod_of(uid: &str, source: Value, extra: Value) -> Pod {
    let mut volume = json!({"name": "v"});
    volume
        .as_object_mut()
        .unwrap()
        .extend(source.as_object().unwrap().clone());
    let mut spec = json!({"containers": [{"name": "c", "volumeMounts": [{"name": "v", "mountPath": "/x"}]}], "volumes": [volume]});
    spec.as_object_mut()
        .unwrap()
        .extend(extra.as_object().unwrap().clone());
    serde_json::from_value(json!({"metadata": {"name": "p", "namespace": "ns", "uid": uid}, "spec": spec}))
        .unwrap()
}

fn claiming() -> Value {
    json!({"persistentVolumeClaim": {"claimName": "c"}})
}

fn facts() -> NodeFacts {
    NodeFacts {
        labels: Some([("kubernetes.io/hostname".to_owned(), "here".to_owned())].into()),
        ..NodeFacts::default()
    }
}

fn affinity(host: &str) -> Value {
    json!({"required": {"nodeSelectorTerms": [{"matchExpressions": [{"key": "kubernetes.io/hostname", "operator": "In", "values": [host]}]}]}})
}

#[tokio::test]
async fn what_cannot_be_mounted_is_told() {
    let dir = tempfile::tempdir().unwrap();
    let host_path = |extra: Value| {
        let mut source = json!({"hostPath": {"path": "/"}});
        source
            .as_object_mut()
            .unwrap()
            .extend(extra.as_object().unwrap().clone());
        volume(source)
    };
    let check = async |pod: Pod, claim: Value, volume: Value, expected: &str| {
        let errors = world(dir.path(), claim, volume)
            .set_up(&pod, &facts())
            .await
            .unwrap_err();
        assert_eq!(event_messages(&errors), [expected]);
    };
    let unprocessed = |why: &str| {
        format!(
            "Unable to attach or mount volumes: unmounted volumes=[v], unattached volumes=[], failed to process volumes=[v]: {why}"
        )
    };
    let pod = || pod_of("u1", claiming(), json!({}));
    let with = |mut value: Value, pointer: &str, new: Value| {
        *value.pointer_mut(pointer).unwrap() = new;
        value
    };
    let processing = |why: &str| unprocessed(&format!("error processing PVC ns/c: {why}"));
    check(
        pod(),
        with(claim("pv"), "/status/phase", json!("Pending")),
        host_path(json!({})),
        &processing("PVC is not bound"),
    )
    .await;
    check(
        pod(),
        claim(""),
        host_path(json!({})),
        &processing("PVC has empty pvc.Spec.VolumeName"),
    )
    .await;
    let mut deleted = claim("pv");
    deleted["metadata"]["deletionTimestamp"] = json!("2026-01-01T00:00:00Z");
    check(
        pod(),
        deleted.clone(),
        host_path(json!({})),
        &processing("PVC is being deleted"),
    )
    .await;
    check(
        pod(),
        claim("other"),
        host_path(json!({})),
        &processing("failed to fetch PV other from API server: persistentvolumes \"other\" not found"),
    )
    .await;
    check(
        pod(),
        claim("pv"),
        host_path(json!({"claimRef": null})),
        &processing(
            "found PV object pv but it has a nil pv.Spec.ClaimRef indicating it is not yet bound to the claim",
        ),
    )
    .await;
    check(
        pod(),
        claim("pv"),
        host_path(json!({"claimRef": {"uid": "x"}})),
        &processing(
            "found PV object pv but its pv.Spec.ClaimRef.UID x does not point to claim.UID claim-uid",
        ),
    )
    .await;
    check(
        pod(),
        claim("pv"),
        host_path(json!({"volumeMode": "Block"})),
        &unprocessed("volume v has volumeMode Block, but is specified in volumeMounts"),
    )
    .await;
    check(
        pod(),
        claim("pv"),
        volume(json!({"glusterfs": {"endpoints": "s", "path": "/"}})),
        &unprocessed("failed to get Plugin from volumeSpec for volume \"pv\" err=no volume plugin matched"),
    )
    .await;
    check(
        pod(),
        claim("pv"),
        host_path(json!({"nodeAffinity": affinity("there")})),
        "MountVolume.NodeAffinity check failed for volume \"pv\" : no matching NodeSelectorTerms",
    )
    .await;
    check(
        pod(),
        claim("pv"),
        host_path(json!({"mountOptions": ["ro"]})),
        "MountVolume.MountOptionSupport check failed for volume \"pv\" : mount options are not supported for this volume type",
    )
    .await;
    check(
        pod(),
        claim("pv"),
        volume(json!({"local": {"path": "/nowhere/at/all"}})),
        "MountVolume.NewMounter initialization failed for volume \"pv\" : path \"/nowhere/at/all\" does not exist",
    )
    .await;
    let device =
        json!({"containers": [{"name": "c", "volumeDevices": [{"name": "v", "devicePath": "/dev/x"}]}]});
    check(
        pod_of("u1", claiming(), device.clone()),
        claim("pv"),
        host_path(json!({"volumeMode": "Block"})),
        "MapVolume.FindMapperPluginBySpec failed for volume \"pv\" : no volume plugin matched: block volumes are not supported for this volume type",
    )
    .await;
    check(
        pod_of("u1", claiming(), device),
        claim("pv"),
        host_path(json!({})),
        &unprocessed("volume v has volumeMode Filesystem, but is specified in volumeDevices"),
    )
    .await;
    check(
        pod_of("u1", json!({"ephemeral": {}}), json!({})),
        claim("pv"),
        host_path(json!({})),
        &unprocessed("PVC ns/p-v was not created for pod ns/p (pod is not owner)"),
    )
    .await;
}

#[tokio::test]
async fn host_path_claims_are_used_in_place() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().to_string_lossy().into_owned();
    let source = json!({"hostPath": {"path": path}, "nodeAffinity": affinity("here"), "accessModes": ["ReadWriteOncePod"]});
    let mut owned = claim("pv");
    owned["metadata"]["ownerReferences"] =
        json!([{"apiVersion": "v1", "kind": "Pod", "name": "p", "uid": "u1", "controller": true}]);
    let volumes = world(dir.path(), owned, volume(source));
    let ephemeral = pod_of("u1", json!({"ephemeral": {}}), json!({}));
    let mounted = volumes.set_up(&ephemeral, &facts()).await.unwrap();
    assert_eq!(mounted["v"].path, dir.path());
    assert!(!mounted["v"].read_only);
    // The volume is for one pod: another one waits until the first is gone.
    let read_only = json!({"persistentVolumeClaim": {"claimName": "c", "readOnly": true}});
    let other = pod_of("u2", read_only, json!({}));
    let errors = volumes.set_up(&other, &facts()).await.unwrap_err();
    assert_eq!(
        event_messages(&errors),
        [format!(
            "MountVolume.SetUp failed for volume \"pv\" : {FOR_ONE_POD}"
        )]
    );
    volumes.tear_down("u1").await.unwrap();
    let mounted = volumes.set_up(&other, &facts()).await.unwrap();
    assert!(mounted["v"].read_only);
    // A volume that no container uses is not looked at.
    let unused = pod_of("u3", claiming(), json!({"containers": [{"name": "c"}]}));
    assert!(volumes.set_up(&unused, &facts()).await.unwrap().is_empty());
}

#[tokio::test]
async fn local_claims_are_bound_and_survive_the_pod() {
    if !rustix::process::geteuid().is_root() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let data = dir.path().join("data");
    std::fs::create_dir(&data).unwrap();
    std::fs::write(data.join("kept"), "x").unwrap();
    let source = json!({"local": {"path": data.to_string_lossy()}, "nodeAffinity": affinity("here"), "mountOptions": ["nosuid"]});
    let volumes = world(dir.path(), claim("pv"), volume(source.clone()));
    let group = json!({"securityContext": {"fsGroup": 4321}});
    let pod = pod_of("u1", claiming(), group.clone());
    let result = volumes.set_up(&pod, &facts()).await;
    let path = dir.path().join("pods/u1/volumes/kubernetes.io~local-volume/pv");
    let bound = std::fs::read_to_string(path.join("kept"));
    let owner = std::fs::metadata(data.join("kept")).unwrap().gid();
    let mounts = std::fs::read_to_string("/proc/self/mountinfo").unwrap();
    let resolved = path.canonicalize().unwrap_or_default();
    let nosuid = mounts
        .lines()
        .any(|line| line.contains(&*resolved.to_string_lossy()) && line.contains("nosuid"));
    // Another life of the kubelet finds the mount and makes no second one; a read-only user of it cannot write.
    let again = world(dir.path(), claim("pv"), volume(source));
    let repeated = again.set_up(&pod, &facts()).await;
    let count = skiff_fs::mounts_below(dir.path()).unwrap().len();
    let read_only = json!({"persistentVolumeClaim": {"claimName": "c", "readOnly": true}});
    let second = again.set_up(&pod_of("u2", read_only, group), &facts()).await;
    let write = std::fs::write(second.as_ref().unwrap()["v"].path.join("new"), "x");
    let torn_down = (again.tear_down("u1").await, again.tear_down("u2").await);
    skiff_fs::unmount_below(dir.path()).unwrap();
    assert_eq!(result.unwrap()["v"].path, path);
    assert_eq!(repeated.unwrap()["v"].path, path);
    assert_eq!((bound.unwrap().as_str(), owner, count), ("x", 4321, 1));
    assert!(nosuid, "{mounts}");
    assert!(second.unwrap()["v"].read_only);
    assert_eq!(write.unwrap_err().kind(), std::io::ErrorKind::ReadOnlyFilesystem);
    torn_down.0.unwrap();
    torn_down.1.unwrap();
    assert!(!path.exists());
    assert!(
        data.join("kept").exists(),
        "the data was removed through the mount"
    );
}
