//! APIs that are off by default: nothing shows them until `--runtime-config` asks for them, and then they are upstream's.

#![allow(clippy::unwrap_used)]

mod support;

use std::sync::Arc;

use serde_json::{Value, json};
use skiff_api::facts::RuntimeConfig;
use skiff_store::Embedded;
use support::Cluster;

const API: &str = "/apis/storagemigration.k8s.io/v1beta1";
const MIGRATIONS: &str = "/apis/storagemigration.k8s.io/v1beta1/storageversionmigrations";
const SERVICE: &str = "/apis/apiregistration.k8s.io/v1/apiservices/v1beta1.storagemigration.k8s.io";
const ROLE: &str =
    "/apis/rbac.authorization.k8s.io/v1/clusterroles/system:controller:storage-version-migrator-controller";

async fn start(store: &Arc<Embedded>, pairs: &[&str]) -> Cluster {
    let runtime_config = RuntimeConfig::parse(pairs).unwrap();
    Cluster::adjusted_on(store.clone(), |config, _, _| {
        config.runtime_config = runtime_config
    })
    .await
}

fn migration(name: &str, group: &str, resource: &str) -> Value {
    json!({"metadata": {"name": name}, "spec": {"resource": {"group": group, "resource": resource}}})
}

/// Every place where clients learn what is served.
async fn shown(cluster: &Cluster) -> [bool; 6] {
    let has = |text: &str| text.contains("storagemigration.k8s.io");
    [
        cluster.get(API).await.code == 200,
        cluster.get(MIGRATIONS).await.code == 200,
        has(&cluster.get("/apis").await.text),
        has(&cluster.discovery("/apis").await.to_string()),
        has(&cluster.get("/openapi/v3").await.text),
        cluster.get("/openapi/v2").await.json["paths"]
            .get(format!("{MIGRATIONS}/"))
            .is_some()
            || cluster.get("/openapi/v2").await.json["paths"]
                .get(MIGRATIONS)
                .is_some(),
    ]
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_off_is_not_shown() {
    let folder = tempfile::tempdir().unwrap();
    let store = Arc::new(Embedded::open(folder.path().join("store")).unwrap());
    let cluster = start(&store, &[]).await;
    assert_eq!(shown(&cluster).await, [false; 6]);
    assert_eq!(cluster.get(SERVICE).await.code, 404);
    assert_eq!(cluster.get(ROLE).await.code, 404);
    drop(cluster);

    let cluster = start(&store, &["storagemigration.k8s.io/v1beta1=true"]).await;
    assert_eq!(shown(&cluster).await, [true; 6]);
    let service = cluster.get(SERVICE).await.json;
    assert_eq!(service["spec"]["groupPriorityMinimum"], 15_800, "{service}");
    assert_eq!(service["spec"]["versionPriority"], 9);
    assert_eq!(cluster.get(ROLE).await.code, 200);
    let made = cluster.post(MIGRATIONS, migration("m", "", "secrets")).await;
    assert_eq!(made.code, 201, "{}", made.text);
    drop(cluster);

    // Without the flag the API goes, and its objects stay in the store.
    let cluster = start(&store, &[]).await;
    assert_eq!(shown(&cluster).await, [false; 6]);
    assert_eq!(cluster.get(SERVICE).await.code, 404);
    drop(cluster);
    let cluster = start(&store, &["api/beta=true"]).await;
    let kept = cluster.get(&format!("{MIGRATIONS}/m")).await;
    assert_eq!(
        kept.json["spec"]["resource"]["resource"], "secrets",
        "{}",
        kept.text
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn migrations_follow_upstreams_rules() {
    let folder = tempfile::tempdir().unwrap();
    let store = Arc::new(Embedded::open(folder.path().join("store")).unwrap());
    let cluster = start(&store, &["storagemigration.k8s.io/v1beta1=true"]).await;
    let mut sent = migration("m", "apps", "deployments");
    sent["status"] = json!({"resourceVersion": "7"});
    let made = cluster.post(MIGRATIONS, sent).await.json;
    assert_eq!(made["status"], json!({}), "a create writes no status: {made}");
    let one = format!("{MIGRATIONS}/m");

    let refused = cluster.post(MIGRATIONS, migration("n", "", "")).await;
    assert_eq!(refused.code, 422);
    let message = refused.json["message"].as_str().unwrap();
    assert!(
        message.contains("spec.resource.resource: Required value: resource is required to be set"),
        "{message}"
    );
    let other = json!({"spec": {"resource": {"resource": "replicasets"}}});
    let refused = cluster.patch(&one, "merge-patch", other).await;
    assert_eq!(refused.code, 422);
    let message = refused.json["message"].as_str().unwrap();
    assert!(
        message.contains("spec: Invalid value:") && message.contains("field is immutable"),
        "{message}"
    );

    let status = json!({"status": {"resourceVersion": "7"}, "metadata": {"labels": {"a": "b"}}});
    let written = cluster
        .patch(&format!("{one}/status"), "merge-patch", status)
        .await
        .json;
    assert_eq!(written["status"]["resourceVersion"], "7", "{written}");
    assert_eq!(written["metadata"].get("labels"), None);
    let other = json!({"status": {"resourceVersion": "8"}});
    let refused = cluster
        .patch(&format!("{one}/status"), "merge-patch", other)
        .await;
    assert_eq!(refused.code, 422, "{}", refused.text);

    let mut unconditional = written.clone();
    unconditional["metadata"]
        .as_object_mut()
        .unwrap()
        .remove("resourceVersion");
    assert_eq!(cluster.put(&one, unconditional).await.code, 422);

    let accept = "application/json;as=Table;v=v1;g=meta.k8s.io";
    let table = cluster
        .send_as(cluster.admin(), "GET", MIGRATIONS, &[("accept", accept)], "")
        .await
        .json;
    assert_eq!(
        table["rows"][0]["cells"],
        json!(["m", "deployments.apps", "Unknown"])
    );
    assert_eq!(
        table["columnDefinitions"][1]["description"],
        "GroupResource to migrate"
    );
    let protobuf = "application/vnd.kubernetes.protobuf";
    let binary = cluster
        .send_as(cluster.admin(), "GET", &one, &[("accept", protobuf)], "")
        .await;
    assert_eq!(binary.code, 200);
    assert!(binary.bytes.starts_with(b"k8s\0"));
}

/// An update that changes nothing else writes an object anew that is stored in another version.
#[tokio::test(flavor = "multi_thread")]
async fn another_stored_version_is_written_anew() {
    let cluster = Cluster::start().await;
    let version = |name: &str, storage: bool| {
        json!({"name": name, "served": true, "storage": storage, "schema": {"openAPIV3Schema": {"type": "object",
            "x-kubernetes-preserve-unknown-fields": true}}})
    };
    let definition = json!({"apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition",
        "metadata": {"name": "gadgets.example.com"},
        "spec": {"group": "example.com", "scope": "Cluster", "names": {"plural": "gadgets", "kind": "Gadget"},
            "versions": [version("v1", true), version("v2", false)]}});
    let definitions = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions";
    assert_eq!(cluster.post(definitions, definition).await.code, 201);
    let gadgets = "/apis/example.com/v1/gadgets";
    let until = async |uri: &str, done: &dyn Fn(&support::Reply) -> bool| {
        for _ in 0..600 {
            let reply = cluster.get(uri).await;
            if done(&reply) {
                return reply;
            }
            tokio::time::sleep(std::time::Duration::from_millis(20)).await;
        }
        panic!("{uri}: {}", cluster.get(uri).await.text);
    };
    until(gadgets, &|reply| reply.code == 200).await;
    let gadget =
        json!({"apiVersion": "example.com/v1", "kind": "Gadget", "metadata": {"name": "g"}, "word": "x"});
    let made = cluster.post(gadgets, gadget).await;
    assert_eq!(made.code, 201, "{}", made.text);
    let stored = async || {
        let found = cluster
            .store
            .get("/registry/example.com/gadgets/g")
            .await
            .unwrap()
            .0
            .unwrap();
        let object: Value = serde_json::from_slice(&found.value).unwrap();
        object["apiVersion"].as_str().unwrap().to_owned()
    };
    let one = "/apis/example.com/v1/gadgets/g";
    let before = cluster.get(one).await.json;
    assert_eq!(
        cluster.put(one, before.clone()).await.json,
        before,
        "nothing to write"
    );

    let changed = json!({"spec": {"versions": [version("v1", false), version("v2", true)]}});
    let changed = cluster
        .patch(
            &format!("{definitions}/gadgets.example.com"),
            "merge-patch",
            changed,
        )
        .await;
    assert_eq!(changed.code, 200, "{}", changed.text);
    // The server takes a definition over in its own time.
    let version = &before["metadata"]["resourceVersion"];
    assert_eq!(stored().await, "example.com/v1");
    for _ in 0..600 {
        let written = cluster.put(one, cluster.get(one).await.json).await;
        assert_eq!(written.code, 200, "{}", written.text);
        if written.json["metadata"]["resourceVersion"] != *version {
            break;
        }
        tokio::time::sleep(std::time::Duration::from_millis(20)).await;
    }
    assert_eq!(stored().await, "example.com/v2");
    let after = cluster.get(one).await.json;
    assert_eq!(
        cluster.put(one, after.clone()).await.json,
        after,
        "nothing to write any more"
    );
    assert_eq!(after["word"], "x");
}
