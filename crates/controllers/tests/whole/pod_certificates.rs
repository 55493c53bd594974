//! PodCertificateRequests are deleted when they are old, and only where the API is served.

use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::certificates::v1beta1::PodCertificateRequest;
use kube::Api;
use kube::api::{ListParams, PostParams};
use serde_json::json;
use skiff_testkit::ApiServer;

use crate::cluster::{Cluster, check};

const API: &str = "certificates.k8s.io/v1beta1/podcertificaterequests=true";

/// A request of a node for one of its pods.
fn request(name: &str) -> PodCertificateRequest {
    let key = rcgen::KeyPair::generate().unwrap();
    let mut parameters = rcgen::CertificateParams::default();
    parameters.distinguished_name = rcgen::DistinguishedName::new();
    let stub = parameters.serialize_request(&key).unwrap();
    let mut request: PodCertificateRequest = serde_json::from_value(json!({"metadata": {"name": name},
        "spec": {"signerName": "example.com/s", "podName": "p", "podUID": "1", "serviceAccountName": "sa",
            "serviceAccountUID": "2", "nodeName": "n", "nodeUID": "3", "stubPKCS10Request": ""}}))
    .unwrap();
    request.spec.stub_pkc_s10_request.0 = stub.der().to_vec();
    request
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn old_requests_are_deleted() {
    let cluster = Cluster::of(ApiServer::serving(&[API]).await.unwrap());
    let api: Api<PodCertificateRequest> = Api::namespaced(cluster.client.clone(), "default");
    for name in ["a", "b"] {
        api.create(&PostParams::default(), &request(name)).await.unwrap();
    }
    let run = |threshold: Duration| {
        cluster.run_controllers(|config| {
            config.leader_elect = false;
            config.serves_api = Arc::new(|_, _, plural| plural == "podcertificaterequests");
            config.pod_certificate_request_threshold = threshold;
            config.pod_certificate_request_sync_period = Duration::from_millis(50);
        })
    };
    let count = async || api.list(&ListParams::default()).await.unwrap().items.len();
    let stop = run(Duration::from_secs(15 * 60));
    tokio::time::sleep(Duration::from_millis(500)).await;
    assert_eq!(count().await, 2);
    stop.cancel();

    let _stop = run(Duration::from_secs(1));
    cluster
        .until_idle("no request that is old", async || {
            let found = count().await;
            check(found == 0, found)
        })
        .await;
}
