//! Objects whose stored value cannot be read: what clients are told, that nothing counts as deleted, that the server
//! starts all the same, and the way out.

#![allow(clippy::unwrap_used)]

mod support;

use bytes::Bytes;
use serde_json::{Value, json};
use skiff_auth::UserInfo;
use skiff_store::{Expect, Op};
use support::{Audited, Cluster};

const MAPS: &str = "/api/v1/namespaces/default/configmaps";
const OPTION: &str = "ignoreStoreReadErrorWithClusterBreakingPotential";

fn map(name: &str) -> Value {
    json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name, "finalizers": ["example.com/held"]}})
}

async fn spoil(cluster: &Cluster, key: &str) {
    let op = Op::Put(Bytes::from_static(b"garbage"));
    cluster.store.write(key, Expect::Any, op, None).await.unwrap();
}

#[tokio::test]
async fn reads_fail_and_say_which_object() {
    let cluster = Cluster::start().await;
    for name in ["a", "b"] {
        assert_eq!(cluster.post(MAPS, map(name)).await.code, 201);
    }
    let version = cluster.get(MAPS).await.json["metadata"]["resourceVersion"].clone();
    let mut watch = cluster
        .watch(&format!(
            "{MAPS}?watch=1&resourceVersion={}",
            version.as_str().unwrap()
        ))
        .await;
    spoil(&cluster, "/registry/configmaps/default/a").await;

    let got = cluster.get(&format!("{MAPS}/a")).await;
    assert_eq!((got.code, &got.json["reason"]), (500, &json!("InternalError")));
    let message = got.json["message"].as_str().unwrap();
    assert!(
        message.starts_with("Internal error occurred: StorageError: corrupt object, Code: 7, Key: /registry/configmaps/default/a, "),
        "{message}"
    );
    for uri in [
        MAPS,
        "/api/v1/configmaps",
        &format!("{MAPS}?labelSelector=x%3Dy"),
        &format!("{MAPS}?watch=1"),
    ] {
        let listed = cluster.get(uri).await;
        assert_eq!(
            (listed.code, &listed.json["reason"]),
            (500, &json!("StorageReadError")),
            "{uri}"
        );
        assert_eq!(
            listed.json["message"],
            "failed to read one or more configmaps from the storage"
        );
        let cause = &listed.json["details"]["causes"][0];
        assert_eq!(cause["field"], "/registry/configmaps/default/a");
        assert_eq!(cause["reason"], "UnexpectedServerResponse");
    }
    for (method, body) in [
        ("PUT", map("a").to_string()),
        ("PATCH", "{}".to_owned()),
        ("DELETE", String::new()),
    ] {
        let kind = if method == "PATCH" {
            "application/merge-patch+json"
        } else {
            "application/json"
        };
        let refused = cluster.send(method, &format!("{MAPS}/a"), kind, body).await;
        assert_eq!(
            (refused.code, &refused.json["reason"]),
            (500, &json!("InternalError")),
            "{method}"
        );
    }
    assert_eq!(cluster.post(MAPS, map("a")).await.code, 409);
    let metrics = cluster.get("/metrics").await.text;
    let counted = "skiff_unreadable_objects{prefix=\"/registry/configmaps/\"} 1\n";
    assert!(metrics.contains(counted), "{metrics}");
    assert_eq!(cluster.delete(MAPS, json!({})).await.code, 500);
    // The other object goes on, and no event told of the first.
    let patch = json!({"data": {"x": "y"}});
    assert_eq!(
        cluster
            .patch(&format!("{MAPS}/b"), "merge-patch", patch)
            .await
            .code,
        200
    );
    assert_eq!(watch.brief().await, "MODIFIED b");
}

#[tokio::test]
async fn who_may_deletes_what_cannot_be_read() {
    let audited = Audited::start("- level: Metadata\n").await;
    let cluster = &audited.cluster;
    assert_eq!(cluster.post(MAPS, map("a")).await.code, 201);
    let uri = format!("{MAPS}/a");
    let readable = cluster.delete(&uri, json!({OPTION: true})).await;
    assert_eq!(readable.code, 422);
    assert_eq!(
        readable.json["message"],
        format!(
            "configmaps \"a\" is invalid: {OPTION}: Invalid value: true: is exclusively used to delete corrupt object(s), try again by removing this option"
        )
    );
    spoil(cluster, "/registry/configmaps/default/a").await;

    let rules = json!([{"apiGroups": [""], "resources": ["configmaps"], "verbs": ["get", "delete"]}]);
    let role = json!({"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRole", "metadata": {"name": "r"}, "rules": rules});
    let binding = json!({"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRoleBinding", "metadata": {"name": "r"},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "r"},
        "subjects": [{"apiGroup": "rbac.authorization.k8s.io", "kind": "User", "name": "croc"}]});
    let rbac = "/apis/rbac.authorization.k8s.io/v1";
    assert_eq!(
        cluster.post(&format!("{rbac}/clusterroles"), role).await.code,
        201
    );
    assert_eq!(
        cluster
            .post(&format!("{rbac}/clusterrolebindings"), binding)
            .await
            .code,
        201
    );
    let croc = || {
        cluster
            .server
            .service(UserInfo::new("croc", ["system:authenticated"]))
    };
    let unsafely = format!("{uri}?{OPTION}=true");
    // The authorizer follows its roles.
    let until_allowed = async |uri: &str| {
        let mut reply = cluster.send_as(croc(), "DELETE", uri, &[], "").await;
        for _ in 0..500 {
            if reply.code != 403 {
                break;
            }
            tokio::time::sleep(std::time::Duration::from_millis(20)).await;
            reply = cluster.send_as(croc(), "DELETE", uri, &[], "").await;
        }
        reply
    };
    let plain = until_allowed(&uri).await;
    assert_eq!(
        (plain.code, &plain.json["reason"]),
        (500, &json!("InternalError"))
    );
    let refused = cluster.send_as(croc(), "DELETE", &unsafely, &[], "").await;
    assert_eq!(refused.code, 403);
    let message = refused.json["message"].as_str().unwrap();
    assert!(
        message.starts_with("configmaps \"a\" is forbidden: not permitted to do \"unsafe-delete-ignore-read-errors\", reason: "),
        "{message}"
    );
    let collection = cluster.delete(MAPS, json!({OPTION: true})).await;
    assert_eq!(
        (collection.code, collection.json["message"].as_str().unwrap()),
        (
            422,
            &*format!(
                "DeleteOptions.meta.k8s.io \"\" is invalid: {OPTION}: Invalid value: true: is not allowed with DELETECOLLECTION, try again after removing the option"
            )
        )
    );
    let mixed = cluster
        .delete(&uri, json!({OPTION: true, "gracePeriodSeconds": 0}))
        .await;
    assert_eq!(mixed.code, 422);

    let verbs =
        json!([{"op": "add", "path": "/rules/0/verbs/-", "value": "unsafe-delete-ignore-read-errors"}]);
    let granted = cluster
        .patch(&format!("{rbac}/clusterroles/r"), "json-patch", verbs)
        .await;
    assert_eq!(granted.code, 200);
    let gone = until_allowed(&unsafely).await;
    assert_eq!(
        (gone.code, &gone.json["status"]),
        (200, &json!("Success")),
        "{}",
        gone.text
    );
    let annotations = &audited.event_of(&gone)["annotations"];
    assert_eq!(
        annotations["apiserver.k8s.io/unsafe-delete-ignore-read-error"],
        ""
    );
    assert_eq!(cluster.get(&uri).await.code, 404);
    assert_eq!(cluster.get(MAPS).await.code, 200);
    assert_eq!(cluster.post(MAPS, map("a")).await.code, 201);
}

#[tokio::test]
async fn the_server_starts_although_any_of_its_own_objects_is_damaged() {
    let names = Cluster::start().await;
    let all = names.store.range("/registry/", None, 0, None).await.unwrap();
    drop(names);
    // One of each resource that the server reads for itself.
    let mut seen = std::collections::BTreeSet::new();
    let mut keys: Vec<String> = Vec::new();
    for item in &all.items {
        let resource = item.key.split('/').take(4).collect::<Vec<_>>();
        let resource = resource[..resource.len() - 1].join("/");
        // The lease of a server is its own to write again.
        if !resource.contains("masterleases") && seen.insert(resource) {
            keys.push(item.key.to_string());
        }
    }
    keys.extend(
        [
            "/registry/services/specs/default/kubernetes",
            "/registry/apiextensions.k8s.io/customresourcedefinitions/x.example.com",
            "/registry/validatingwebhookconfigurations/x",
            "/registry/validatingadmissionpolicies/x",
            "/registry/pods/default/x",
            "/registry/secrets/kube-system/x",
            "/registry/resourcequotas/default/x",
        ]
        .map(str::to_owned),
    );
    assert!(keys.len() > 12, "{keys:?}");
    let garbage = keys
        .iter()
        .map(|key| (&*key.clone().leak(), Bytes::from_static(b"garbage")));
    let cluster = Cluster::over(garbage).await;
    for key in &keys {
        let found = cluster.store.get(key).await.unwrap().0.unwrap();
        assert_eq!(found.value, "garbage", "{key}");
    }
    let node = json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": "n"}});
    assert_eq!(cluster.post("/api/v1/nodes", node).await.code, 201);
    let unsafely = format!("/api/v1/namespaces/default/pods/x?{OPTION}=true");
    assert_eq!(cluster.get("/api/v1/pods").await.code, 500);
    assert_eq!(
        cluster
            .send("DELETE", &unsafely, "application/json", "")
            .await
            .code,
        200
    );
    assert_eq!(cluster.get("/api/v1/pods").await.code, 200);
}
