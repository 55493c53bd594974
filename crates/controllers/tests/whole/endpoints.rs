//! EndpointSlices and Endpoints over the real server: hints, trigger times, and the mirroring of Endpoints that are
//! written by hand.

use k8s_openapi::api::core::v1::{Endpoints, Pod, Service};
use k8s_openapi::api::discovery::v1::{Endpoint, EndpointSlice};
use serde_json::json;

use crate::cluster::{Cluster, check};

const TRIGGER_TIME: &str = "endpoints.kubernetes.io/last-change-trigger-time";

async fn slices_of(cluster: &Cluster, service: &str) -> Vec<EndpointSlice> {
    let mut slices = cluster.list::<EndpointSlice>().await;
    slices.retain(|slice| {
        let labels = slice.metadata.labels.as_ref();
        labels
            .and_then(|labels| labels.get("kubernetes.io/service-name"))
            .map(String::as_str)
            == Some(service)
    });
    slices
}

fn endpoints_of(slices: &[EndpointSlice]) -> Vec<Endpoint> {
    let all = slices.iter().flat_map(|slice| slice.endpoints.iter().flatten());
    all.cloned().collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn endpoints_say_where_they_are_for_and_what_they_follow() {
    let cluster = Cluster::start().await;
    let service = json!({"metadata": {"name": "web"}, "spec": {"selector": {"app": "web"},
        "trafficDistribution": "PreferSameNode", "ports": [{"port": 80}]}});
    cluster.create::<Service>(service).await;
    let pod = json!({"metadata": {"name": "p", "labels": {"app": "web"}}, "spec": {
        "containers": [{"name": "c", "image": "i"}]}});
    cluster.create::<Pod>(pod).await;
    cluster
        .until("a hint for the node", async || {
            let slices = slices_of(&cluster, "web").await;
            let endpoints = endpoints_of(&slices);
            let nodes: Vec<String> = endpoints
                .iter()
                .flat_map(|endpoint| endpoint.hints.clone().and_then(|hints| hints.for_nodes))
                .flatten()
                .map(|node| node.name)
                .collect();
            let told = slices.iter().any(|slice| {
                let annotations = slice.metadata.annotations.as_ref();
                annotations.is_some_and(|annotations| annotations.contains_key(TRIGGER_TIME))
            });
            let old = cluster.api::<Endpoints>().get_opt("web").await.unwrap();
            let addresses = old
                .as_ref()
                .and_then(|old| old.subsets.as_ref())
                .map_or(0, Vec::len);
            check(nodes == ["n"] && told && addresses == 1, (slices, old))
        })
        .await;
    // Without the preference the hint goes, and the pod stays in the same slice.
    let before = slices_of(&cluster, "web").await;
    cluster
        .patch::<Service>("web", json!({"spec": {"trafficDistribution": null}}))
        .await;
    cluster
        .until("no hint", async || {
            let slices = slices_of(&cluster, "web").await;
            let endpoints = endpoints_of(&slices);
            let none = endpoints.iter().all(|endpoint| endpoint.hints.is_none());
            check(none && endpoints.len() == 1, slices)
        })
        .await;
    let after = slices_of(&cluster, "web").await;
    assert_eq!(before[0].metadata.uid, after[0].metadata.uid);
    // One slice was created, and the last update took the hint away.
    cluster
        .until_measured(r#"endpoint_slice_controller_changes{operation="create"} 1"#)
        .await;
    let text = cluster.metrics.registry.text();
    assert!(
        text.contains(r#"endpoint_slice_controller_changes{operation="update"}"#),
        "{text}"
    );
    assert!(
        text.contains(r#"endpoint_slice_controller_syncs{result="success"}"#),
        "{text}"
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn endpoints_by_hand_are_mirrored() {
    let cluster = Cluster::start().await;
    let service = json!({"metadata": {"name": "db"}, "spec": {"ports": [{"port": 5432}]}});
    cluster.create::<Service>(service).await;
    let endpoints = json!({"metadata": {"name": "db", "annotations": {"note": "by hand"}}, "subsets": [
        {"addresses": [{"ip": "192.0.2.1"}], "ports": [{"port": 5432}]},
        {"addresses": [{"ip": "192.0.2.2"}], "ports": [{"port": 5432}]}]});
    cluster.create::<Endpoints>(endpoints).await;
    cluster
        .until("one slice for both", async || {
            let slices = slices_of(&cluster, "db").await;
            let annotated = slices.iter().all(|slice| {
                let annotations = slice.metadata.annotations.as_ref();
                annotations
                    .is_some_and(|annotations| annotations.get("note").is_some_and(|note| note == "by hand"))
            });
            let count = endpoints_of(&slices).len();
            check(slices.len() == 1 && count == 2 && annotated, slices)
        })
        .await;
    cluster
        .patch::<Service>("db", json!({"spec": {"selector": {"app": "db"}}}))
        .await;
    cluster
        .until("no mirror", async || {
            let slices = slices_of(&cluster, "db").await;
            let mirrored = slices.iter().filter(|slice| {
                let owners = slice.metadata.owner_references.iter().flatten();
                owners.into_iter().any(|owner| owner.kind == "Endpoints")
            });
            check(mirrored.count() == 0, slices)
        })
        .await;
}
