//! Volumes of a pod over a scripted API, on a temporary disk without mounts.

use super::*;
use async_trait::async_trait;
use k8s_openapi::api::authentication::v1::TokenRequest;
use k8s_openapi::api::core::v1::{ConfigMap, PersistentVolume, PersistentVolumeClaim, Secret};
use parking_lot::Mutex;
use serde_json::json;
use std::sync::atomic::{AtomicUsize, Ordering};

#[derive(Default)]
struct Scripted {
    value: Mutex<String>,
    tokens: AtomicUsize,
}

#[async_trait]
impl Objects for Scripted {
    async fn config_map(&self, _: &str, name: &str) -> Result<Option<Arc<ConfigMap>>, String> {
        let map = json!({"data": {"key": *self.value.lock()}});
        Ok((name == "cm").then(|| Arc::new(serde_json::from_value(map).unwrap())))
    }
    async fn secret(&self, _: &str, name: &str) -> Result<Option<Arc<Secret>>, String> {
        Ok((name == "sec")
            .then(|| Arc::new(serde_json::from_value(json!({"data": {"pw": "c2VjcmV0"}})).unwrap())))
    }
    async fn trust_bundles(&self) -> Result<crate::objects::TrustBundles, String> {
        Ok(Default::default())
    }
    async fn claim(&self, _: &str, name: &str) -> Result<PersistentVolumeClaim, String> {
        Err(format!("persistentvolumeclaims \"{name}\" not found"))
    }
    async fn persistent_volume(&self, name: &str) -> Result<PersistentVolume, String> {
        Err(format!("persistentvolumes \"{name}\" not found"))
    }
    async fn token(&self, _: &str, _: &str, request: TokenRequest) -> Result<TokenRequest, String> {
        let count = self.tokens.fetch_add(1, Ordering::SeqCst);
        assert!(request.spec.as_ref().unwrap().bound_object_ref.is_some());
        let status =
            json!({"token": format!("token-{count}"), "expirationTimestamp": "2999-01-01T00:00:00Z"});
        Ok(TokenRequest {
            status: Some(serde_json::from_value(status).unwrap()),
            ..request
        })
    }
}

fn volumes(dir: &Path, objects: Arc<Scripted>) -> Volumes {
    Volumes {
        memory_backed: false,
        ..Volumes::new(dir, objects)
    }
}

fn pod(volumes: serde_json::Value) -> Pod {
    let names = volumes.as_array().unwrap().iter().map(|volume| &volume["name"]);
    let mounts: Vec<_> = names
        .map(|name| json!({"name": name, "mountPath": "/x"}))
        .collect();
    serde_json::from_value(
        json!({"metadata": {"name": "p", "namespace": "ns", "uid": "u1", "labels": {"app": "web"}},
        "spec": {"containers": [{"name": "c", "volumeMounts": mounts}], "volumes": volumes}}),
    )
    .unwrap()
}

#[tokio::test]
async fn files_are_written_and_kept_up_to_date() {
    let dir = tempfile::tempdir().unwrap();
    let objects = Arc::new(Scripted::default());
    *objects.value.lock() = "one".into();
    let volumes = volumes(dir.path(), objects.clone());
    let pod = pod(json!([
        {"name": "c", "configMap": {"name": "cm"}},
        {"name": "s", "secret": {"secretName": "sec", "defaultMode": 256}},
        {"name": "d", "downwardAPI": {"items": [{"path": "labels", "fieldRef": {"fieldPath": "metadata.labels"}}]}},
        {"name": "e", "emptyDir": {}},
        {"name": "p", "projected": {"sources": [
            {"serviceAccountToken": {"path": "token"}}, {"configMap": {"name": "cm", "items": [{"key": "key", "path": "ca.crt"}]}}]}}]));
    let mounted = volumes.set_up(&pod, &NodeFacts::default()).await.unwrap();
    let read = |volume: &str, file: &str| std::fs::read_to_string(mounted[volume].path.join(file)).unwrap();
    assert_eq!(read("c", "key"), "one");
    assert_eq!(read("s", "pw"), "secret");
    assert_eq!(read("d", "labels"), "app=\"web\"");
    assert_eq!(
        (read("p", "token"), read("p", "ca.crt")),
        ("token-0".into(), "one".into())
    );
    assert!(
        mounted["e"]
            .path
            .ends_with("pods/u1/volumes/kubernetes.io~empty-dir/e")
    );
    assert!(mounted["c"].read_only && !mounted["e"].read_only);

    *objects.value.lock() = "two".into();
    volumes.set_up(&pod, &NodeFacts::default()).await.unwrap();
    assert_eq!(
        (read("c", "key"), read("p", "ca.crt"), read("p", "token")),
        ("two".into(), "two".into(), "token-0".into())
    );

    volumes.tear_down("u1").await.unwrap();
    volumes.remove_pod_dir("u1").await.unwrap();
    assert!(volumes.pods_on_disk().is_empty());
}

#[tokio::test]
async fn what_is_missing_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let volumes = volumes(dir.path(), Arc::new(Scripted::default()));
    let check = async |volume: serde_json::Value, expected: &str| {
        let errors = volumes
            .set_up(&pod(json!([volume])), &NodeFacts::default())
            .await
            .unwrap_err();
        assert_eq!(event_messages(&errors), [expected]);
    };
    check(
        json!({"name": "v", "configMap": {"name": "no"}}),
        "MountVolume.SetUp failed for volume \"v\" : configmap \"no\" not found",
    )
    .await;
    check(
        json!({"name": "v", "secret": {"secretName": "no"}}),
        "MountVolume.SetUp failed for volume \"v\" : secret \"no\" not found",
    )
    .await;
    check(
        json!({"name": "v", "glusterfs": {"endpoints": "s", "path": "/"}}),
        "MountVolume.SetUp failed for volume \"v\" : glusterfs volumes are not supported by this node",
    )
    .await;
    check(json!({"name": "v", "persistentVolumeClaim": {"claimName": "c"}}),
        "Unable to attach or mount volumes: unmounted volumes=[v], unattached volumes=[], failed to process volumes=[v]: \
         error processing PVC ns/c: failed to fetch PVC from API server: persistentvolumeclaims \"c\" not found").await;
    check(json!({"name": "v", "projected": {"sources": [{"secret": {"name": "no"}}, {"configMap": {"name": "no"}}]}}),
        "MountVolume.SetUp failed for volume \"v\" : [secret \"no\" not found, configmap \"no\" not found]").await;
    assert!(
        volumes
            .set_up(
                &pod(json!([{"name": "v", "configMap": {"name": "no", "optional": true}}])),
                &NodeFacts::default()
            )
            .await
            .is_ok()
    );
}

/// A data directory that is reached through a link: the mounts of a pod are found and taken down all the same, and
/// what they led to is not touched.
#[tokio::test]
async fn removal_spares_what_was_mounted() {
    if !rustix::process::geteuid().is_root() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let (real, link, host) = (
        dir.path().join("real"),
        dir.path().join("link"),
        dir.path().join("host"),
    );
    std::fs::create_dir_all(host.join("part")).unwrap();
    std::fs::write(host.join("part/precious"), "x").unwrap();
    std::fs::create_dir(&real).unwrap();
    std::os::unix::fs::symlink(&real, &link).unwrap();
    let volumes = Volumes::new(&link, Arc::new(Scripted::default()));
    let bound = volumes.sub_path_dir("u1", "v", "c", 0);
    sub_path::bind(&host, "part", &bound).unwrap();
    assert!(bound.join("precious").exists());
    let torn_down = volumes.tear_down("u1").await;
    let removed = volumes.remove_pod_dir("u1").await;
    let precious = host.join("part/precious").exists();
    skiff_fs::unmount_below(dir.path()).unwrap();
    torn_down.unwrap();
    removed.unwrap();
    assert!(precious, "the host's file was removed through the mount");
    assert!(!real.join("pods/u1").exists());
}

/// A pipe would hold whoever opens it until somebody writes.
#[tokio::test]
async fn files_of_a_pod_are_not_opened_when_it_ends() {
    use rustix::fs::{CWD, FileType, Mode, OFlags, mknodat, open};
    use std::sync::atomic::{AtomicBool, Ordering};
    let dir = tempfile::tempdir().unwrap();
    let volumes = volumes(dir.path(), Arc::new(Scripted::default()));
    let pod = pod(json!([{"name": "e", "emptyDir": {}}]));
    let mounted = volumes.set_up(&pod, &NodeFacts::default()).await.unwrap();
    let pipe = mounted["e"].path.join("vol_data.json");
    mknodat(CWD, &pipe, FileType::Fifo, Mode::RWXU, 0).unwrap();
    let is_over = Arc::new(AtomicBool::new(false));
    let over = is_over.clone();
    // It can be opened when there is a reader, who is then set free.
    let watch = std::thread::spawn(move || {
        while !over.load(Ordering::SeqCst) {
            if open(&pipe, OFlags::WRONLY | OFlags::NONBLOCK, Mode::empty()).is_ok() {
                return true;
            }
            std::thread::yield_now();
        }
        false
    });
    volumes.tear_down("u1").await.unwrap();
    is_over.store(true, Ordering::SeqCst);
    assert!(!watch.join().unwrap(), "a pod's file was opened");
}

/// What a container did to the modes of its files is not undone by the next look at the pod.
#[tokio::test]
async fn an_empty_dir_is_given_to_its_group_once() {
    use std::os::unix::fs::{MetadataExt, PermissionsExt};
    let dir = tempfile::tempdir().unwrap();
    let volumes = volumes(dir.path(), Arc::new(Scripted::default()));
    let mut pod = pod(json!([{"name": "e", "emptyDir": {}}]));
    let group = i64::from(std::fs::metadata(dir.path()).unwrap().gid());
    pod.spec.as_mut().unwrap().security_context =
        Some(serde_json::from_value(json!({"fsGroup": group})).unwrap());
    let mode = |path: &Path| std::fs::metadata(path).unwrap().permissions().mode() & 0o7777;
    let mounted = volumes.set_up(&pod, &NodeFacts::default()).await.unwrap();
    let path = &mounted["e"].path;
    assert_eq!(mode(path), 0o2777);
    let file = path.join("f");
    std::fs::write(&file, "x").unwrap();
    std::fs::set_permissions(&file, std::fs::Permissions::from_mode(0o600)).unwrap();
    volumes.set_up(&pod, &NodeFacts::default()).await.unwrap();
    assert_eq!(mode(&file), 0o600);
    volumes.tear_down("u1").await.unwrap();
    volumes.set_up(&pod, &NodeFacts::default()).await.unwrap();
    assert_eq!(mode(path), 0o2777, "a new volume of the same name is new");
}
