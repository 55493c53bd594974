//! Simulated nodes over a real API server: pods run, complete, fail and go; removal leaves nothing.

#![allow(
    clippy::unwrap_used,
    reason = "everything here is a test, though not every function is marked as one"
)]

use std::time::Duration;

use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::{Node, Pod};
use kube::Api;
use kube::api::{DeleteParams, ListParams, PostParams};
use serde_json::{Value, json};
use skiff_sim::{Profile, SimConfig};
use skiff_testkit::ApiServer;

async fn until(what: &str, done: impl AsyncFn() -> bool) {
    let waited = tokio::time::timeout(Duration::from_secs(30), async {
        while !done().await {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    });
    waited.await.unwrap_or_else(|_| panic!("never: {what}"));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pods_of_simulated_nodes_live_as_the_profile_says() {
    let server = ApiServer::start().await.unwrap();
    server.create_service_account().await.unwrap();
    let (client, stop) = (server.admin(), server.stop.clone());
    let profile = "
nodes: [{count: 3, zones: [a, b]}]
pods:
- labels: {does: complete}
  succeedAfter: 10ms
- labels: {does: fail}
  failAfter: 10ms
  exitCode: 3
";
    let (told, ready) = tokio::sync::oneshot::channel();
    let config = SimConfig::new(Profile::parse(profile).unwrap());
    let created = move |count| told.send(count).unwrap();
    let interrupt = stop.child_token();
    let running = tokio::spawn(skiff_sim::run(config, client.clone(), interrupt.clone(), created));
    assert_eq!(ready.await.unwrap(), 3);
    let nodes: Api<Node> = Api::all(client.clone());
    let node = serde_json::to_value(nodes.get("sim-1").await.unwrap()).unwrap();
    assert_eq!(node["metadata"]["labels"]["topology.kubernetes.io/zone"], "b");
    assert_eq!(node["status"]["allocatable"]["pods"], "110");

    let pods: Api<Pod> = Api::namespaced(client.clone(), "default");
    let create = async |name: &str, does: &str, node: &str| {
        let pod = json!({"metadata": {"name": name, "labels": {"does": does}}, "spec": {"nodeName": node,
            "automountServiceAccountToken": false, "containers": [{"name": "c", "image": "i"}]}});
        let pod: Pod = serde_json::from_value(pod).unwrap();
        pods.create(&PostParams::default(), &pod).await.unwrap();
    };
    let status = async |name: &str| -> Value {
        let pod = pods.get(name).await.unwrap();
        serde_json::to_value(pod.status).unwrap()
    };
    create("runs", "run", "sim-0").await;
    create("completes", "complete", "sim-1").await;
    create("fails", "fail", "sim-2").await;
    create("elsewhere", "run", "real").await;
    until("running", async || status("runs").await["phase"] == "Running").await;
    until("complete", async || {
        status("completes").await["phase"] == "Succeeded"
    })
    .await;
    until("failed", async || status("fails").await["phase"] == "Failed").await;
    let failed = status("fails").await;
    assert_eq!(
        failed["containerStatuses"][0]["state"]["terminated"]["exitCode"],
        3
    );
    let ready = status("runs").await;
    let conditions = ready["conditions"].as_array().unwrap();
    assert!(
        conditions
            .iter()
            .any(|c| c["type"] == "Ready" && c["status"] == "True"),
        "{ready}"
    );
    assert!(ready["podIP"].as_str().unwrap().starts_with("100.64."), "{ready}");
    assert_eq!(
        status("elsewhere").await["phase"],
        "Pending",
        "not a simulated node's"
    );

    pods.delete("runs", &DeleteParams::default()).await.unwrap();
    until("gone", async || pods.get_opt("runs").await.unwrap().is_none()).await;

    interrupt.cancel();
    running.await.unwrap().unwrap();
    assert_eq!(skiff_sim::remove(&client).await.unwrap(), 3);
    assert!(nodes.list(&ListParams::default()).await.unwrap().items.is_empty());
    let leases: Api<Lease> = Api::namespaced(client.clone(), "kube-node-lease");
    assert!(
        leases
            .list(&ListParams::default())
            .await
            .unwrap()
            .items
            .is_empty()
    );
    let left: Vec<_> = pods.list(&ListParams::default()).await.unwrap().items;
    let left: Vec<_> = left
        .iter()
        .filter_map(|pod| pod.metadata.name.as_deref())
        .collect();
    assert_eq!(left, ["elsewhere"]);
}
