//! ClusterTrustBundles in the volumes of a running pod: what is selected is one file, and a change is seen.

use std::path::Path;

use k8s_openapi::api::certificates::v1beta1::ClusterTrustBundle;
use k8s_openapi::api::core::v1::Event;
use kube::Api;
use kube::api::{DeleteParams, ListParams, Patch, PatchParams, PostParams};
use serde_json::{Value, json};

use super::{PATIENCE, World, is_ready};

const API: &str = "certificates.k8s.io/v1beta1/clustertrustbundles=true";

/// The certificate of an authority that nobody knows yet.
fn authority() -> String {
    let dir = tempfile::tempdir().unwrap();
    let pki = skiff_pki::Pki::open(dir.path()).unwrap();
    pki.ca_certificate().trim().replace("\r\n", "\n") + "\n"
}

fn bundle(name: &str, signer: &str, pem: &str) -> ClusterTrustBundle {
    serde_json::from_value(json!({"metadata": {"name": name, "labels": {"tier": "live"}},
        "spec": {"signerName": signer, "trustBundle": pem}}))
    .unwrap()
}

/// Waits until a file holds these certificates, in any order.
async fn until_file(path: &Path, expected: &[&str]) {
    let mut expected: Vec<String> = expected.iter().map(|pem| (*pem).to_owned()).collect();
    expected.sort_unstable();
    let holds = || {
        let text = std::fs::read_to_string(path).ok()?;
        let blocks = text.split_inclusive("-----END CERTIFICATE-----\n");
        let mut blocks: Vec<String> = blocks.map(str::to_owned).collect();
        blocks.sort_unstable();
        (blocks == expected).then_some(())
    };
    let seen = tokio::time::timeout(PATIENCE, async {
        while holds().is_none() {
            tokio::time::sleep(std::time::Duration::from_millis(5)).await;
        }
    });
    let found = std::fs::read_to_string(path);
    assert!(seen.await.is_ok(), "{}: {found:?}", path.display());
}

fn spec(sources: &Value) -> Value {
    json!({"terminationGracePeriodSeconds": 0,
        "containers": [{"name": "app", "image": "app:1", "volumeMounts": [{"name": "roots", "mountPath": "/roots"}]}],
        "volumes": [{"name": "roots", "projected": {"sources": sources}}]})
}

async fn until_event(world: &World, text: &str) {
    let events: Api<Event> = Api::namespaced(world.client.clone(), "default");
    let told = tokio::time::timeout(PATIENCE, async {
        loop {
            let all = events.list(&ListParams::default()).await.unwrap().items;
            let has = |event: &Event| {
                event.reason.as_deref() == Some("FailedMount")
                    && event
                        .message
                        .as_deref()
                        .is_some_and(|message| message.contains(text))
            };
            if all.iter().any(has) {
                return;
            }
            tokio::time::sleep(std::time::Duration::from_millis(20)).await;
        }
    });
    assert!(told.await.is_ok(), "no event says {text}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_running_pod_sees_its_bundles() {
    let world = World::serving(&[API]).await;
    let life = world.start();
    let api: Api<ClusterTrustBundle> = Api::all(world.client.clone());
    let (a, b, c) = (authority(), authority(), authority());
    let make = async |object: ClusterTrustBundle| {
        api.create(&PostParams::default(), &object).await.unwrap();
    };
    make(bundle("x.io:s:1", "x.io/s", &format!("{a}{b}"))).await;
    let live = json!({"matchLabels": {"tier": "live"}});
    let sources = json!([
        {"clusterTrustBundle": {"name": "plain", "path": "plain.pem"}},
        {"clusterTrustBundle": {"signerName": "x.io/s", "labelSelector": live, "path": "signer.pem"}},
        {"clusterTrustBundle": {"name": "later", "path": "later.pem", "optional": true}}]);
    world.create("app", spec(&sources)).await;
    until_event(
        &world,
        "while getting ClusterTrustBundle: clustertrustbundle.certificates.k8s.io \"plain\" not found",
    )
    .await;
    make(bundle("plain", "", &a)).await;
    let pod = world.until("app", "ready", is_ready).await;
    let uid = pod["metadata"]["uid"].as_str().unwrap();
    let volume = world
        .dir
        .path()
        .join(format!("node/pods/{uid}/volumes/kubernetes.io~projected/roots"));
    until_file(&volume.join("plain.pem"), &[&a]).await;
    until_file(&volume.join("signer.pem"), &[&a, &b]).await;
    until_file(&volume.join("later.pem"), &[]).await;

    let change = |pem: &str| Patch::Merge(json!({"spec": {"trustBundle": pem}}));
    api.patch("plain", &PatchParams::default(), &change(&c))
        .await
        .unwrap();
    until_file(&volume.join("plain.pem"), &[&c]).await;
    make(bundle("x.io:s:2", "x.io/s", &format!("{b}{c}"))).await;
    until_file(&volume.join("signer.pem"), &[&a, &b, &c]).await;
    api.delete("x.io:s:1", &DeleteParams::default()).await.unwrap();
    until_file(&volume.join("signer.pem"), &[&b, &c]).await;
    make(bundle("later", "", &b)).await;
    until_file(&volume.join("later.pem"), &[&b]).await;

    // A node that was restarted watches again.
    life.end().await;
    let life = world.start();
    api.patch("plain", &PatchParams::default(), &change(&a))
        .await
        .unwrap();
    until_file(&volume.join("plain.pem"), &[&a]).await;
    life.end().await;
}

/// Where the API is not served, the source is dropped. The pod does not start without what it asked for, and an event says why.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn bundles_that_are_not_served_are_reported() {
    let world = World::new().await;
    let life = world.start();
    let sources = json!([{"clusterTrustBundle": {"name": "plain", "path": "plain.pem"}}]);
    world.create("app", spec(&sources)).await;
    until_event(&world, "a source of the projected volume is empty").await;
    life.end().await;
}
