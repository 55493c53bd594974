//! How many services a second can be created, one after the other and by many clients at once, on the embedded store.
//! A measurement: `cargo test -p skiff-server --test service_rate -- --ignored --nocapture`.

mod support;

use std::sync::Arc;
use std::time::Instant;

use serde_json::json;
use support::Cluster;

const SERVICES: &str = "/api/v1/namespaces/default/services";

async fn create(cluster: &Arc<Cluster>, kind: &'static str, clients: usize, each: usize) {
    let began = Instant::now();
    let mut tasks = tokio::task::JoinSet::new();
    for client in 0..clients {
        let cluster = cluster.clone();
        tasks.spawn(async move {
            for n in 0..each {
                let name = format!("{}-{clients}-{client}-{n}", kind.to_lowercase());
                let spec = json!({"type": kind, "ports": [{"port": 80}]});
                let service = json!({"metadata": {"name": name}, "spec": spec});
                let reply = cluster.post(SERVICES, service).await;
                assert_eq!(reply.code, 201, "{}", reply.text);
            }
        });
    }
    tasks.join_all().await;
    let rate = (clients * each) as f64 / began.elapsed().as_secs_f64();
    println!("{kind}, {clients} clients: {rate:.0}/s");
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "a measurement"]
async fn creates_a_second() {
    let cluster = Arc::new(Cluster::start().await);
    // To warm up.
    create(&cluster, "ClusterIP", 2, 50).await;
    create(&cluster, "ClusterIP", 1, 400).await;
    create(&cluster, "NodePort", 1, 400).await;
    create(&cluster, "ClusterIP", 32, 50).await;
    create(&cluster, "NodePort", 32, 50).await;
}
