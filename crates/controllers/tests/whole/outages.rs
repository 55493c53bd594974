//! Outages under load: the API answers with errors for seconds, the store goes away and comes back, watches are cut. What
//! is declared is reached afterwards, nothing is doubled, and meanwhile the controllers back off instead of asking as fast
//! as they can.

use std::time::Duration;

use k8s_openapi::api::apps::v1::{Deployment, ReplicaSet};
use k8s_openapi::api::batch::v1::Job;
use k8s_openapi::api::core::v1::Pod;
use serde_json::{Value, json};
use skiff_controllers::ControllersConfig;
use skiff_testkit::{ApiServer, StoreSwitch};

use crate::cluster::{Cluster, check};
use crate::door::Asked;

const DEPLOYMENTS: usize = 20;
const REPLICAS: i32 = 3;
const OUTAGE: Duration = Duration::from_secs(4);

fn template(label: &str, restart: &str) -> Value {
    json!({"metadata": {"labels": {"app": label}},
        "spec": {"restartPolicy": restart, "containers": [{"name": "c", "image": "i"}]}})
}

/// Nobody renews the lease of the test's node.
fn patient(config: &mut ControllersConfig) {
    config.node_monitor_grace_period = Duration::from_secs(3600);
}

/// Work of all sorts, so that every queue has something that fails.
async fn declare(cluster: &Cluster, round: usize) {
    for n in 0..DEPLOYMENTS {
        let name = format!("r{round}-{n}");
        cluster
            .create::<Deployment>(json!({"metadata": {"name": name}, "spec": {"replicas": REPLICAS,
                "selector": {"matchLabels": {"app": name}}, "template": template(&name, "Always")}}))
            .await;
    }
    let name = format!("j{round}");
    cluster
        .create::<Job>(
            json!({"metadata": {"name": name}, "spec": {"completions": 4, "parallelism": 2,
            "backoffLimit": 0, "template": template(&name, "Never")}}),
        )
        .await;
}

async fn reached(cluster: &Cluster) -> Result<(), String> {
    for pod in cluster.list::<Pod>().await {
        let labels = pod.metadata.labels.clone().unwrap_or_default();
        let phase = pod.status.as_ref().and_then(|status| status.phase.as_deref());
        if labels.contains_key("batch.kubernetes.io/job-name") && phase == Some("Running") {
            let name = pod.metadata.name.unwrap_or_default();
            cluster
                .set_pod_status(&name, json!({"phase": "Succeeded", "conditions": []}))
                .await;
        }
    }
    let deployments = cluster.list::<Deployment>().await;
    for deployment in &deployments {
        let status = deployment.status.clone().unwrap_or_default();
        check(
            status.available_replicas == Some(REPLICAS) && status.replicas == Some(REPLICAS),
            (&deployment.metadata.name, status),
        )?;
    }
    for job in cluster.list::<Job>().await {
        let status = job.status.clone().unwrap_or_default();
        check(status.succeeded == Some(4), (job.metadata.name, status))?;
    }
    let sets = cluster.list::<ReplicaSet>().await.len();
    check(sets == deployments.len(), ("one ReplicaSet each", sets))?;
    let pods = cluster.list::<Pod>().await;
    let of_sets = pods.iter().filter(|pod| {
        let mut owners = pod.metadata.owner_references.iter().flatten();
        owners.any(|owner| owner.kind == "ReplicaSet")
    });
    let count = of_sets.count();
    check(count == deployments.len() * REPLICAS as usize, ("pods", count))
}

/// How often one thing may be asked for in an outage: after 20 ms, 40 ms, … lists and watches, of which some paths have
/// two, and after 5 ms, 10 ms, … what a reconcile begins with; each doubled until four seconds are over.
const MOST_TRIES: usize = 24;

fn assert_backed_off(cluster: &Cluster, what: &str) {
    // Leases have a period of their own. Keys that create in one collection ask for the same path.
    let one = |asked: &Asked| {
        asked.method != "POST" && !asked.path.contains("/leases/") && !asked.is_about_events()
    };
    let most = cluster.door.most_of_one(one);
    assert!(most.0 <= MOST_TRIES, "{what}: {most:?} {:?}", cluster.door.most());
    let created = |asked: &Asked| asked.method == "POST" && !asked.is_about_events();
    let most = cluster.door.most_of_one(created);
    assert!(most.0 <= DEPLOYMENTS * MOST_TRIES, "{what}: {most:?}");
    let all = cluster.door.count_of(|_| true);
    assert!(all > 50, "{what}: the outage was noticed: {all}");
    cluster.door.clear();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn errors_of_the_server_are_waited_out() {
    let cluster = Cluster::start_idle().await;
    cluster.run_controllers(patient);
    cluster.furnished().await;
    let mut round = 0;
    for code in [500, 503, 429, 410] {
        declare(&cluster, round).await;
        // In the middle of the work.
        tokio::time::sleep(Duration::from_millis(30)).await;
        cluster.door.fail(code);
        cluster.door.clear();
        tokio::time::sleep(OUTAGE).await;
        assert_backed_off(&cluster, &format!("answers {code}"));
        cluster.door.heal();
        cluster
            .until(&format!("after {code}"), async || reached(&cluster).await)
            .await;
        round += 1;
    }
    for _ in 0..5 {
        declare(&cluster, round).await;
        cluster.door.cut();
        tokio::time::sleep(Duration::from_millis(20)).await;
        cluster.door.cut();
        round += 1;
    }
    cluster
        .until("after cuts", async || reached(&cluster).await)
        .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_store_that_goes_away_and_returns_is_waited_out() {
    let switch = StoreSwitch::default();
    let server = ApiServer::over(|store| switch.over(store)).await.unwrap();
    let cluster = Cluster::of(server);
    cluster.add_node("n").await;
    cluster.run_controllers(patient);
    cluster.furnished().await;
    for round in 0..2 {
        declare(&cluster, round).await;
        tokio::time::sleep(Duration::from_millis(30)).await;
        switch.off();
        cluster.door.cut();
        cluster.door.clear();
        tokio::time::sleep(OUTAGE).await;
        assert_backed_off(&cluster, "no store");
        switch.on();
        cluster
            .until("after the outage", async || reached(&cluster).await)
            .await;
    }
}

/// Who cannot renew its lease stops, and takes up the work when it leads again.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_outage_longer_than_the_lease_ends_the_leader() {
    let cluster = Cluster::start_idle().await;
    let mut manager = cluster.start_manager("m0");
    cluster.furnished().await;
    declare(&cluster, 0).await;
    cluster.door.fail(503);
    // The renew deadline is ten seconds.
    tokio::time::sleep(Duration::from_secs(12)).await;
    cluster.door.clear();
    tokio::time::sleep(Duration::from_secs(4)).await;
    let others = cluster
        .door
        .count_of(|asked| !asked.path.contains("/leases/") && !asked.is_about_events());
    assert_eq!(
        others,
        0,
        "who does not lead does nothing: {:?}",
        cluster.door.most()
    );
    let lease = cluster.door.count_of(|asked| asked.path.contains("/leases/"));
    assert!((1..=4).contains(&lease), "{lease} looks at the lease");
    cluster.door.heal();
    cluster
        .until("after the outage", async || reached(&cluster).await)
        .await;
    manager.kill().await;
}
