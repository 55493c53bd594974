//! What the front door keeps from pods and from nodes: PodSecurity, the Node authorizer, NodeRestriction.

mod support;

use serde_json::{Value, json};
use skiff_auth::UserInfo;
use support::{Cluster, Reply};

async fn as_node(cluster: &Cluster, node: &str, method: &str, uri: &str, body: Value) -> Reply {
    let user = UserInfo::new(format!("system:node:{node}"), ["system:nodes"]);
    let body = if body.is_null() {
        String::new()
    } else {
        body.to_string()
    };
    let kind = if method == "PATCH" {
        "application/merge-patch+json"
    } else {
        "application/json"
    };
    let headers = [("content-type", kind)];
    cluster
        .send_as(cluster.server.service(user), method, uri, &headers, body)
        .await
}

async fn namespace(cluster: &Cluster, name: &str, labels: Value) {
    let made = cluster
        .post(
            "/api/v1/namespaces",
            json!({"metadata": {"name": name, "labels": labels}}),
        )
        .await;
    assert_eq!(made.code, 201, "{}", made.text);
    let accounts = format!("/api/v1/namespaces/{name}/serviceaccounts");
    let made = cluster
        .post(&accounts, json!({"metadata": {"name": "default"}}))
        .await;
    assert_eq!(made.code, 201, "{}", made.text);
}

fn pod(name: &str, spec: Value) -> Value {
    let mut pod = json!({"metadata": {"name": name}, "spec": {"containers": [{"name": "a", "image": "i"}]}});
    for (key, value) in spec.as_object().into_iter().flatten() {
        pod["spec"][key] = value.clone();
    }
    pod
}

#[tokio::test]
async fn a_namespace_says_what_its_pods_may_be() {
    let cluster = Cluster::start().await;
    let labels = json!({"pod-security.kubernetes.io/enforce": "baseline", "pod-security.kubernetes.io/warn": "restricted"});
    namespace(&cluster, "safe", labels).await;
    let pods = "/api/v1/namespaces/safe/pods";
    let refused = cluster.post(pods, pod("p", json!({"hostPID": true}))).await;
    assert_eq!(refused.code, 403);
    assert_eq!(
        refused.json["message"],
        "pods \"p\" is forbidden: violates PodSecurity \"baseline:latest\": host namespaces (hostPID=true)"
    );
    let warned = cluster.post(pods, pod("p", json!({}))).await;
    assert_eq!(warned.code, 201, "{}", warned.text);
    let warning = warned.headers["warning"].to_str().expect("text");
    assert!(
        warning.starts_with(
            "299 - \"would violate PodSecurity \\\"restricted:latest\\\": allowPrivilegeEscalation"
        ),
        "{warning}"
    );
    // An update that changes no image is nobody's business; one that does is.
    let uri = format!("{pods}/p");
    let labelled = cluster
        .patch(&uri, "merge-patch", json!({"metadata": {"labels": {"a": "b"}}}))
        .await;
    assert!(!labelled.headers.contains_key("warning"));
    // The plugin looks into the cache, which a list waits for.
    assert_eq!(cluster.get(pods).await.code, 200);
    let stricter = json!({"metadata": {"labels": {"pod-security.kubernetes.io/enforce": "restricted"}}});
    let changed = cluster
        .patch("/api/v1/namespaces/safe", "merge-patch", stricter)
        .await;
    let warnings: Vec<&str> = changed
        .headers
        .get_all("warning")
        .iter()
        .filter_map(|value| value.to_str().ok())
        .collect();
    assert_eq!(warnings.len(), 2, "{warnings:?}");
    assert!(warnings[1].contains("p: allowPrivilegeEscalation != false, unrestricted capabilities"));
    let unreadable = json!({"metadata": {"labels": {"pod-security.kubernetes.io/audit": "x"}}});
    let refused = cluster
        .patch("/api/v1/namespaces/safe", "merge-patch", unreadable)
        .await;
    assert_eq!(refused.code, 422, "{}", refused.text);
}

#[tokio::test]
async fn a_node_reads_what_its_pods_name_at_once_and_no_longer_than_they_live() {
    let cluster = Cluster::start().await;
    namespace(&cluster, "ns", json!({})).await;
    for name in ["mine", "theirs"] {
        let secret = json!({"metadata": {"name": name}});
        assert_eq!(
            cluster.post("/api/v1/namespaces/ns/secrets", secret).await.code,
            201
        );
    }
    let secret = |name: &str| format!("/api/v1/namespaces/ns/secrets/{name}");
    let before = as_node(&cluster, "n", "GET", &secret("mine"), Value::Null).await;
    assert_eq!(
        before.json["message"],
        "secrets \"mine\" is forbidden: User \"system:node:n\" cannot get resource \"secrets\" in API group \"\" in the namespace \"ns\": no relationship found between node 'n' and this object"
    );
    for (name, node) in [("mine", "n"), ("theirs", "o")] {
        let spec = json!({"nodeName": node, "volumes": [{"name": "s", "secret": {"secretName": name}}]});
        let made = cluster.post("/api/v1/namespaces/ns/pods", pod(name, spec)).await;
        assert_eq!(made.code, 201, "{}", made.text);
        // A kubelet sees the pod by the cache, and asks at once.
        let seen = cluster.get("/api/v1/namespaces/ns/pods").await;
        assert_eq!(seen.code, 200);
        let read = as_node(&cluster, node, "GET", &secret(name), Value::Null).await;
        assert_eq!(read.code, 200, "{}", read.text);
    }
    assert_eq!(
        as_node(&cluster, "n", "GET", &secret("theirs"), Value::Null)
            .await
            .code,
        403
    );
    let gone = cluster
        .delete(
            "/api/v1/namespaces/ns/pods/mine",
            json!({"gracePeriodSeconds": 0}),
        )
        .await;
    assert_eq!(gone.code, 200, "{}", gone.text);
    // The authorizer follows; it need not be there in the same moment.
    while as_node(&cluster, "n", "GET", &secret("mine"), Value::Null)
        .await
        .code
        != 403
    {
        tokio::task::yield_now().await;
    }
}

#[tokio::test]
async fn a_node_writes_itself_and_nobody_else() {
    let cluster = Cluster::start().await;
    let made = as_node(
        &cluster,
        "n",
        "POST",
        "/api/v1/nodes",
        json!({"metadata": {"name": "n"}}),
    )
    .await;
    assert_eq!(made.code, 201, "{}", made.text);
    let other = as_node(
        &cluster,
        "n",
        "POST",
        "/api/v1/nodes",
        json!({"metadata": {"name": "o"}}),
    )
    .await;
    assert_eq!(
        other.json["message"],
        "nodes \"o\" is forbidden: node \"n\" is not allowed to modify node \"o\""
    );
    let taint = json!({"spec": {"taints": [{"key": "k", "effect": "NoSchedule"}]}});
    let tainted = as_node(&cluster, "n", "PATCH", "/api/v1/nodes/n", taint).await;
    assert_eq!(
        tainted.json["message"],
        "nodes \"n\" is forbidden: node \"n\" is not allowed to modify taints"
    );
    assert_eq!(
        as_node(&cluster, "n", "GET", "/api/v1/pods", Value::Null)
            .await
            .code,
        403
    );
    let own = as_node(
        &cluster,
        "n",
        "GET",
        "/api/v1/pods?fieldSelector=spec.nodeName%3Dn",
        Value::Null,
    )
    .await;
    assert_eq!(own.code, 200, "{}", own.text);
}
