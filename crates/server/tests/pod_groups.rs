//! Workloads and PodGroups: off unless `--runtime-config` asks for them, and then with upstream's admission, rules and tables.

#![allow(clippy::unwrap_used)]

mod support;

use std::sync::Arc;

use serde_json::{Value, json};
use skiff_api::facts::RuntimeConfig;
use skiff_store::Embedded;
use support::{Cluster, Reply};

const API: &str = "/apis/scheduling.k8s.io/v1alpha2";
const GROUPS: &str = "/apis/scheduling.k8s.io/v1alpha2/namespaces/default/podgroups";
const WORKLOADS: &str = "/apis/scheduling.k8s.io/v1alpha2/namespaces/default/workloads";
const PODS: &str = "/api/v1/namespaces/default/pods";
const ROLE: &str =
    "/apis/rbac.authorization.k8s.io/v1/clusterroles/system:controller:podgroup-protection-controller";

async fn start(store: &Arc<Embedded>, pairs: &[&str]) -> Cluster {
    let runtime_config = RuntimeConfig::parse(pairs).unwrap();
    let cluster = Cluster::adjusted_on(store.clone(), |config, _, _| {
        config.runtime_config = runtime_config
    })
    .await;
    let account = json!({"metadata": {"name": "default"}});
    let accounts = "/api/v1/namespaces/default/serviceaccounts";
    for _ in 0..600 {
        if matches!(cluster.post(accounts, account.clone()).await.code, 201 | 409) {
            return cluster;
        }
        tokio::time::sleep(std::time::Duration::from_millis(20)).await;
    }
    panic!("no namespace");
}

fn pod(name: &str, group: Value) -> Value {
    json!({"metadata": {"name": name},
        "spec": {"containers": [{"name": "c", "image": "i"}], "schedulingGroup": group}})
}

fn refused(reply: &Reply, code: u16, words: &str) {
    let message = reply.json["message"].as_str().unwrap_or_default();
    assert!(
        reply.code == code && message.contains(words),
        "{} {message}",
        reply.code
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn pods_forget_their_group_where_groups_are_not_served() {
    let folder = tempfile::tempdir().unwrap();
    let store = Arc::new(Embedded::open(folder.path().join("store")).unwrap());
    let grouped = || json!({"podGroupName": "g"});
    let cluster = start(&store, &[]).await;
    assert_eq!(cluster.get(API).await.code, 404);
    assert_eq!(cluster.get(ROLE).await.code, 404);
    let made = cluster.post(PODS, pod("off", grouped())).await;
    assert_eq!(made.code, 201, "{}", made.text);
    assert_eq!(made.json["spec"].get("schedulingGroup"), None);
    drop(cluster);

    let cluster = start(&store, &["api/alpha=true"]).await;
    assert_eq!(cluster.get(API).await.code, 200);
    assert_eq!(cluster.get(ROLE).await.code, 200);
    let service = "/apis/apiregistration.k8s.io/v1/apiservices/v1alpha2.scheduling.k8s.io";
    let service = cluster.get(service).await.json;
    assert_eq!(
        (
            &service["spec"]["groupPriorityMinimum"],
            &service["spec"]["versionPriority"]
        ),
        (&json!(16_600), &json!(2))
    );
    let made = cluster.post(PODS, pod("on", grouped())).await;
    assert_eq!(made.json["spec"]["schedulingGroup"], grouped(), "{}", made.text);
    refused(
        &cluster
            .post(PODS, pod("bad", json!({"podGroupName": "A_b"})))
            .await,
        422,
        "spec.schedulingGroup.podGroupName: Invalid value: \"A_b\": a lowercase RFC 1123 subdomain must",
    );
    refused(
        &cluster.post(PODS, pod("none", json!({}))).await,
        422,
        "spec.schedulingGroup.podGroupName: Invalid value: null: must specify one of: `podGroupName`",
    );
    let other = json!({"spec": {"schedulingGroup": {"podGroupName": "h"}}});
    refused(
        &cluster.patch(&format!("{PODS}/on"), "merge-patch", other).await,
        422,
        "pod updates may not change fields other than",
    );
    drop(cluster);

    // Where it is off again, a pod keeps what it has.
    let cluster = start(&store, &[]).await;
    let label = json!({"metadata": {"labels": {"a": "b"}}});
    let kept = cluster.patch(&format!("{PODS}/on"), "merge-patch", label).await;
    assert_eq!(kept.json["spec"]["schedulingGroup"], grouped(), "{}", kept.text);
}

#[tokio::test(flavor = "multi_thread")]
async fn groups_are_made_from_templates() {
    let folder = tempfile::tempdir().unwrap();
    let store = Arc::new(Embedded::open(folder.path().join("store")).unwrap());
    let cluster = start(&store, &["scheduling.k8s.io/v1alpha2=true"]).await;
    let policy = json!({"gang": {"minCount": 2}});
    let workload = json!({"metadata": {"name": "w"}, "spec": {
        "controllerRef": {"apiGroup": "batch", "kind": "Job", "name": "j"},
        "podGroupTemplates": [{"name": "t", "schedulingPolicy": policy, "priority": 3},
            {"name": "u", "schedulingPolicy": {"basic": {}}}]}});
    let made = cluster.post(WORKLOADS, workload).await;
    assert_eq!(made.code, 201, "{}", made.text);
    assert_eq!(made.json["spec"]["podGroupTemplates"][0].get("priority"), None);
    assert_eq!(
        made.json["spec"]["podGroupTemplates"][1]["schedulingPolicy"],
        json!({"basic": {}})
    );

    let group = |name: &str, template: &str| {
        let reference = json!({"workload": {"workloadName": "w", "podGroupTemplateName": template}});
        json!({"metadata": {"name": name}, "status": {"conditions": []},
            "spec": {"podGroupTemplateRef": reference, "schedulingPolicy": policy, "disruptionMode": "PodGroup"}})
    };
    refused(
        &cluster.post(GROUPS, group("g", "x")).await,
        403,
        "podgroups.scheduling.k8s.io \"g\" is forbidden: PodGroup rejected: PodGroupTemplate \"x\" not found in Workload \"w\"",
    );
    let made = cluster.post(GROUPS, group("g", "t")).await;
    assert_eq!(made.code, 201, "{}", made.text);
    let finalizers = json!(["scheduling.k8s.io/podgroup-protection"]);
    assert_eq!(made.json["metadata"]["finalizers"], finalizers);
    assert_eq!(made.json["spec"]["disruptionMode"], "Pod");
    let alone = json!({"metadata": {"name": "alone"}, "spec": {"schedulingPolicy": {"basic": {}}}});
    let alone = cluster.post(GROUPS, alone).await;
    assert_eq!(alone.json["spec"]["podGroupTemplateRef"], Value::Null);
    assert_eq!(
        alone.json["spec"]["schedulingPolicy"],
        json!({"basic": {}}),
        "{}",
        alone.text
    );
    let one = format!("{GROUPS}/g");
    let other = json!({"spec": {"schedulingPolicy": {"gang": {"minCount": 3}}}});
    refused(
        &cluster.patch(&one, "merge-patch", other).await,
        422,
        "spec.schedulingPolicy: Invalid value: null: field is immutable",
    );

    let condition = json!({"type": "PodGroupScheduled", "status": "True", "reason": "Scheduled", "message": "",
        "lastTransitionTime": "2026-01-01T00:00:00Z"});
    let status = json!({"status": {"conditions": [condition]}, "metadata": {"labels": {"a": "b"}}});
    let written = cluster
        .patch(&format!("{one}/status"), "strategic-merge-patch", status)
        .await;
    assert_eq!(
        written.json["status"]["conditions"][0], condition,
        "{}",
        written.text
    );
    assert_eq!(written.json["metadata"].get("labels"), None);
    // What is read from the store is what was written.
    let read = cluster.get(&one).await.json;
    assert_eq!(read, written.json);
    let unchanged = cluster.put(&one, read.clone()).await;
    assert_eq!(unchanged.json, read, "{}", unchanged.text);

    let accept = "application/json;as=Table;v=v1;g=meta.k8s.io";
    let table = async |uri: &str| {
        let reply = cluster
            .send_as(cluster.admin(), "GET", uri, &[("accept", accept)], "")
            .await;
        reply.json
    };
    let groups = table(GROUPS).await;
    let cells = |row: usize| groups["rows"][row]["cells"].as_array().unwrap()[..4].to_vec();
    assert_eq!(
        (cells(0), cells(1)),
        (
            vec![json!("alone"), json!("Basic"), json!("<none>"), json!("Pending")],
            vec![json!("g"), json!("Gang"), json!("w"), json!("Scheduled")]
        )
    );
    let described = |column: usize| {
        let text = groups["columnDefinitions"][column]["description"]
            .as_str()
            .unwrap();
        text.split(' ').next().unwrap().to_owned()
    };
    assert_eq!(
        [0, 1, 2, 3, 4].map(described),
        ["Name", "SchedulingPolicy", "Name", "Status", "CreationTimestamp"]
    );
    assert_eq!(table(WORKLOADS).await["rows"][0]["cells"][0], "w");
    let protobuf = "application/vnd.kubernetes.protobuf";
    let binary = cluster
        .send_as(cluster.admin(), "GET", &one, &[("accept", protobuf)], "")
        .await;
    assert!(binary.code == 200 && binary.bytes.starts_with(b"k8s\0"));
}
