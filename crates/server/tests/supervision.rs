//! Every loop of the server is made to panic; each comes back, has missed nothing, and is counted.

#![allow(clippy::unwrap_used)]

mod support;

use std::time::Duration;

use serde_json::{Value, json};
use skiff_auth::UserInfo;
use support::Cluster;

const RBAC: &str = "/apis/rbac.authorization.k8s.io/v1";
const MAPS: &str = "/api/v1/namespaces/default/configmaps";

/// Waits for what the server does by itself.
async fn eventually(what: &str, mut check: impl AsyncFnMut() -> bool) {
    let wait = async {
        while !check().await {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    let waited = tokio::time::timeout(Duration::from_secs(60), wait).await;
    assert!(waited.is_ok(), "{what} does not happen");
}

async fn code(cluster: &Cluster, user: &str) -> u16 {
    let service = cluster.server.service(UserInfo::new(user, [] as [&str; 0]));
    cluster.send_as(service, "GET", MAPS, &[], "").await.code
}

fn binding(user: &str) -> Value {
    json!({"metadata": {"name": user}, "subjects": [{"kind": "User", "name": user, "apiGroup": "rbac.authorization.k8s.io"}],
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "view"}})
}

/// All tasks that run now panic; answers when all run again.
async fn panic_everywhere() -> usize {
    let before = skiff_supervise::tasks();
    let running: Vec<&'static str> = before.keys().copied().collect();
    for name in &running {
        skiff_supervise::panic_in(name);
    }
    eventually("the restart of all tasks", async || {
        let now = skiff_supervise::tasks();
        running.iter().all(|name| {
            let (before, now) = (&before[name], &now[name]);
            now.failures >= before.failures + before.running as u64 && now.running == before.running
        })
    })
    .await;
    running.len()
}

#[tokio::test(flavor = "multi_thread")]
async fn loops_that_panic_come_back() {
    let cluster = Cluster::start().await;
    let bindings = format!("{RBAC}/clusterrolebindings");
    assert_eq!(cluster.post(&bindings, binding("old")).await.code, 201);
    eventually("old is let in", async || code(&cluster, "old").await == 200).await;
    let remote = json!({"metadata": {"name": "v1.remote.example"}, "spec": {"group": "remote.example", "version": "v1",
        "groupPriorityMinimum": 1, "versionPriority": 1, "insecureSkipTLSVerify": true,
        "service": {"name": "none", "namespace": "default"}}});
    let services = "/apis/apiregistration.k8s.io/v1/apiservices";
    assert_eq!(cluster.post(services, remote).await.code, 201);
    let unavailable = async |cluster: &Cluster| {
        let found = cluster.get(&format!("{services}/v1.remote.example")).await.json;
        found["status"]["conditions"][0]["reason"].clone()
    };
    eventually("the APIService is looked after", async || {
        unavailable(&cluster).await == "ServiceNotFound"
    })
    .await;

    let tasks = panic_everywhere().await;
    assert!(tasks >= 10, "{:?}", skiff_supervise::tasks().keys());

    // RBAC: what is new and what is gone.
    assert_eq!(cluster.post(&bindings, binding("new")).await.code, 201);
    assert_eq!(
        cluster.delete(&format!("{bindings}/old"), json!({})).await.code,
        200
    );
    eventually("new is let in", async || code(&cluster, "new").await == 200).await;
    eventually("old is locked out", async || code(&cluster, "old").await == 403).await;

    // Definitions.
    let definition = json!({"metadata": {"name": "boats.example.com"}, "spec": {"group": "example.com", "scope": "Namespaced",
        "names": {"plural": "boats", "singular": "boat", "kind": "Boat", "listKind": "BoatList"},
        "versions": [{"name": "v1", "served": true, "storage": true,
            "schema": {"openAPIV3Schema": {"type": "object"}}}]}});
    let definitions = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions";
    assert_eq!(cluster.post(definitions, definition).await.code, 201);
    let boats = "/apis/example.com/v1/namespaces/default/boats";
    eventually("boats are served", async || cluster.get(boats).await.code == 200).await;

    // Policies.
    let admission = "/apis/admissionregistration.k8s.io/v1";
    let policy = json!({"metadata": {"name": "no"}, "spec": {"failurePolicy": "Fail",
        "matchConstraints": {"resourceRules": [{"apiGroups": [""], "apiVersions": ["v1"], "operations": ["CREATE"], "resources": ["configmaps"]}]},
        "validations": [{"expression": "object.metadata.name != 'no'", "message": "no"}]}});
    let bound =
        json!({"metadata": {"name": "no"}, "spec": {"policyName": "no", "validationActions": ["Deny"]}});
    let made = cluster
        .post(&format!("{admission}/validatingadmissionpolicies"), policy)
        .await;
    assert_eq!(made.code, 201, "{}", made.text);
    let made = cluster
        .post(&format!("{admission}/validatingadmissionpolicybindings"), bound)
        .await;
    assert_eq!(made.code, 201, "{}", made.text);
    eventually("the policy takes effect", async || {
        let dry = format!("{MAPS}?dryRun=All");
        cluster.post(&dry, json!({"metadata": {"name": "no"}})).await.code == 422
    })
    .await;

    // Addresses, and what the objects of priority and fairness come back by.
    let service = json!({"metadata": {"name": "s"}, "spec": {"ports": [{"port": 80}]}});
    let made = cluster
        .post("/api/v1/namespaces/default/services", service)
        .await
        .json;
    let address = made["spec"]["clusterIP"].as_str().unwrap().to_owned();
    let object = format!("/apis/networking.k8s.io/v1/ipaddresses/{address}");
    eventually("the IPAddress is written", async || {
        cluster.get(&object).await.code == 200
    })
    .await;
    let exempt = "/apis/flowcontrol.apiserver.k8s.io/v1/flowschemas/exempt";
    let before = cluster.get(exempt).await.json["metadata"]["uid"].clone();
    assert_eq!(cluster.delete(exempt, json!({})).await.code, 200);
    eventually("exempt comes back", async || {
        let now = cluster.get(exempt).await;
        now.code == 200 && now.json["metadata"]["uid"] != before
    })
    .await;

    // The service that the APIService names is there now.
    let none = json!({"metadata": {"name": "none"}, "spec": {"ports": [{"port": 443}]}});
    cluster.post("/api/v1/namespaces/default/services", none).await;
    eventually("the APIService is looked at again", async || {
        unavailable(&cluster).await != "ServiceNotFound"
    })
    .await;

    let metrics = cluster.get("/metrics").await.text;
    for task in [
        "rbac",
        "custom-resource-definitions",
        "bootstrap-repair",
        "apiservice-availability",
    ] {
        let line = format!("skiff_task_failures_total{{task=\"{task}\"}} ");
        let count = metrics.lines().find_map(|found| found.strip_prefix(&line));
        assert!(count.is_some_and(|count| count != "0"), "{task}: {count:?}");
    }
}
