//! Certificates in the volumes of a running pod: asked for in the node's name, written as one, renewed, and refused.

use std::path::PathBuf;
use std::time::Duration;

use k8s_openapi::api::certificates::v1beta1::PodCertificateRequest;
use kube::Api;
use kube::api::{DeleteParams, ListParams, Patch, PatchParams};
use serde_json::{Value, json};
use skiff_testkit::PodSigner;

use super::{NODE, PATIENCE, World, is_ready};

const API: &str = "certificates.k8s.io/v1beta1/podcertificaterequests=true";
const SIGNER: &str = "example.com/s";

fn requests(world: &World) -> Api<PodCertificateRequest> {
    Api::namespaced(world.client.clone(), "default")
}

/// Waits until a request is there that nobody has answered.
async fn until_asked(world: &World) -> Value {
    let asked = tokio::time::timeout(PATIENCE, async {
        loop {
            let all = requests(world).list(&ListParams::default()).await.unwrap().items;
            let open = all.into_iter().find(|request| {
                let status = request.status.as_ref();
                status.is_none_or(|status| status.conditions.iter().flatten().count() == 0)
            });
            if let Some(open) = open {
                return serde_json::to_value(open).unwrap();
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    });
    asked.await.expect("nobody asks for a certificate")
}

async fn answer(world: &World, request: &Value, status: Value) {
    let name = request["metadata"]["name"].as_str().unwrap();
    let patch = Patch::Merge(json!({ "status": status }));
    let api = requests(world);
    api.patch_status(name, &PatchParams::default(), &patch)
        .await
        .unwrap();
}

fn source(paths: Value) -> Value {
    let mut source = paths;
    source["signerName"] = json!(SIGNER);
    source["keyType"] = json!("ECDSAP256");
    json!({ "podCertificate": source })
}

fn spec(sources: &Value) -> Value {
    json!({"terminationGracePeriodSeconds": 0,
        "containers": [{"name": "app", "image": "app:1", "volumeMounts": [{"name": "tls", "mountPath": "/tls"}]}],
        "volumes": [{"name": "tls", "projected": {"sources": sources}}]})
}

fn volume(world: &World, pod: &Value) -> PathBuf {
    let uid = pod["metadata"]["uid"].as_str().unwrap();
    let volume = format!("node/pods/{uid}/volumes/kubernetes.io~projected/tls");
    world.dir.path().join(volume)
}

async fn until_file(path: &std::path::Path, holds: impl Fn(&str) -> bool) -> String {
    let seen = tokio::time::timeout(PATIENCE, async {
        loop {
            if let Ok(text) = std::fs::read_to_string(path)
                && holds(&text)
            {
                return text;
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    });
    let last = std::fs::read_to_string(path);
    seen.await
        .unwrap_or_else(|_| panic!("{}: {last:?}", path.display()))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pod_gets_its_certificate() {
    let world = World::serving(&[API]).await;
    let life = world.start();
    let sources = json!([
        source(json!({"credentialBundlePath": "bundle.pem", "keyPath": "key.pem", "certificateChainPath": "chain.pem",
            "userAnnotations": {"example.com/for": "tests"}})),
        {"downwardAPI": {"items": [{"path": "name", "fieldRef": {"fieldPath": "metadata.name"}}]}}]);
    world.create("app", spec(&sources)).await;
    let asked = until_asked(&world).await;
    let wanted = &asked["spec"];
    let pod = serde_json::to_value(world.pods().get("app").await.unwrap()).unwrap();
    assert_eq!(wanted["podUID"], pod["metadata"]["uid"]);
    assert_eq!(
        (&wanted["podName"], &wanted["nodeName"]),
        (&json!("app"), &json!(NODE))
    );
    assert_eq!(wanted["serviceAccountName"], "default");
    assert_eq!(wanted["maxExpirationSeconds"], 86_400);
    assert_eq!(wanted["unverifiedUserAnnotations"]["example.com/for"], "tests");
    let owner = &asked["metadata"]["ownerReferences"][0];
    assert_eq!(
        (&owner["kind"], &owner["uid"]),
        (&json!("Pod"), &pod["metadata"]["uid"])
    );
    world
        .until_event("FailedMount", "credential bundle is not issued yet")
        .await;

    let signer = PodSigner::new().unwrap();
    let status = signer.issued(&asked, Duration::from_secs(1800)).unwrap();
    answer(&world, &asked, status.clone()).await;
    let pod = world.until("app", "ready", is_ready).await;
    let volume = volume(&world, &pod);
    let read = |name: &str| std::fs::read_to_string(volume.join(name)).unwrap();
    let chain = status["certificateChain"].as_str().unwrap().replace("\r\n", "\n");
    assert_eq!(read("chain.pem"), chain);
    assert_eq!(read("bundle.pem"), read("key.pem") + &chain);
    assert!(read("key.pem").starts_with("-----BEGIN PRIVATE KEY-----\n"));
    assert_eq!(read("name"), "app");

    // A node that was restarted does not know the key: it asks for another certificate.
    let first = read("key.pem");
    life.end().await;
    let life = world.start();
    let asked = until_asked(&world).await;
    assert_eq!(read("key.pem"), first);
    answer(
        &world,
        &asked,
        signer.issued(&asked, Duration::from_secs(1800)).unwrap(),
    )
    .await;
    let key = until_file(&volume.join("key.pem"), |key| key != first).await;
    assert_eq!(read("bundle.pem"), key + &read("chain.pem"));
    world
        .pods()
        .delete("app", &DeleteParams::default())
        .await
        .unwrap();
    world.until_gone("app").await;
    // Without a grace period the object goes first.
    let removed = tokio::time::timeout(PATIENCE, async {
        while volume.exists() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    });
    assert!(removed.await.is_ok(), "{} is still there", volume.display());
    life.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_signer_may_refuse() {
    let world = World::serving(&[API]).await;
    let life = world.start();
    let sources = json!([source(json!({"credentialBundlePath": "bundle.pem"}))]);
    for (kind, verb, told) in [
        ("Denied", "permanently denied", "was denied"),
        ("Failed", "permanently failed", "failed"),
    ] {
        let name = kind.to_lowercase();
        world.create(&name, spec(&sources)).await;
        let asked = until_asked(&world).await;
        let request = asked["metadata"]["name"].as_str().unwrap().to_owned();
        answer(&world, &asked, PodSigner::refused(kind, "Because", "of it")).await;
        world
            .until_event(
                kind,
                &format!(
                    "PodCertificateRequest default/{request} {told}, reason=\"Because\", message=\"of it\""
                ),
            )
            .await;
        world
            .until_event(
                "FailedMount",
                &format!("PodCertificateRequest was {verb}: reason=\"Because\" message=\"of it\""),
            )
            .await;
    }
    life.end().await;
}

/// Where the API is not served, the source is dropped. The pod does not start without what it asked for, and an event says why.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn certificates_that_are_not_served_are_reported() {
    let world = World::new().await;
    let life = world.start();
    let sources = json!([source(json!({"credentialBundlePath": "bundle.pem"}))]);
    world.create("app", spec(&sources)).await;
    world
        .until_event("FailedMount", "a source of the projected volume is empty")
        .await;
    life.end().await;
}
