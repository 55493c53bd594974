//! An API server that refuses, forgets or is not there for a while: the scheduler asks again, ever more seldom, and is back
//! when the server is.

use std::collections::HashMap;
use std::time::Duration;

use k8s_openapi::api::core::v1::Pod;
use serde_json::json;

use crate::cluster::{Cluster, check, condition, configuration, pod};
use crate::wire::{Fault, Hits};

/// How long each of them lasts.
const OUTAGE: Duration = Duration::from_secs(3);
/// Seventeen kinds are followed, each asked for about nine times in three seconds by a back-off that doubles from 20 ms; of
/// each pod a binding, its report and its event are written a few times. One loop without back-off makes tens of
/// thousands.
const MOST_REQUESTS: usize = 600;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn errors_of_the_server_are_survived_without_a_hot_loop() {
    let cluster = Cluster::start().await;
    for name in ["n0", "n1", "n2", "n3", "n4", "n5", "n6", "n7", "n8"] {
        cluster.add_node(name).await;
    }
    let config = configuration("podMaxBackoffSeconds: 2\n");
    let mut scheduler = cluster.start_scheduler("s", true, &config);
    cluster.create::<Pod>(pod("first", json!({}))).await;
    cluster.until_bound("the first pod", |_| true).await;
    let mut known = HashMap::new();
    let faults = [
        (Fault::Code(500), Hits::Writes),
        (Fault::Code(409), Hits::Writes),
        (Fault::Code(429), Hits::All),
        (Fault::Code(503), Hits::All),
        (Fault::Code(410), Hits::All),
        (Fault::Broken, Hits::All),
    ];
    for (round, (fault, hits)) in faults.into_iter().enumerate() {
        let before = scheduler.wire.requests();
        scheduler.wire.fail(fault, hits);
        for n in 0..8 {
            cluster
                .create::<Pod>(pod(&format!("fits{round}-{n}"), json!({})))
                .await;
        }
        let huge = json!({"nodeSelector": {"there": "none"}});
        cluster.create::<Pod>(pod(&format!("huge{round}"), huge)).await;
        tokio::time::sleep(OUTAGE).await;
        let asked = scheduler.wire.requests() - before;
        println!("{fault:?} of {hits:?}: {asked} requests in {OUTAGE:?}");
        assert!(
            asked > 0 && asked < MOST_REQUESTS,
            "{fault:?} of {hits:?}: {asked} requests"
        );
        scheduler.wire.heal();
        cluster
            .until_bound(&format!("after {fault:?} of {hits:?}"), |name| {
                name.starts_with("fits")
            })
            .await;
        // Also what could not be written about a pod that fits nowhere is written in the end, and not by its
        // five-minute retry.
        cluster
            .until("the condition", async || {
                let pods = cluster.pods().await;
                let huge = pods
                    .iter()
                    .find(|pod| pod.metadata.name.as_deref() == Some(&format!("huge{round}")));
                let message = huge.map(condition).unwrap_or_default();
                check(message.starts_with("0/9 nodes are available"), message)
            })
            .await;
        cluster.check_consistency(&mut known).await;
    }
    scheduler.kill().await;
}
