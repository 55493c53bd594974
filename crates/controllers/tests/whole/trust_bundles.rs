//! The certificate of the API server is published as a ClusterTrustBundle, once, and only where the API is served.

use std::sync::Arc;

use k8s_openapi::api::certificates::v1beta1::ClusterTrustBundle;
use kube::api::{DeleteParams, ListParams, Patch, PatchParams, PostParams};
use kube::{Api, ResourceExt};
use serde_json::json;
use skiff_testkit::ApiServer;

use crate::cluster::{Cluster, check};

const API: &str = "certificates.k8s.io/v1beta1/clustertrustbundles=true";
const SIGNER: &str = "kubernetes.io/kube-apiserver-serving";

/// The certificate of an authority that nobody knows yet.
fn authority() -> String {
    let dir = tempfile::tempdir().unwrap();
    let pki = skiff_pki::Pki::open(dir.path()).unwrap();
    pki.ca_certificate().to_owned()
}

fn bundle(name: &str, signer: &str, pem: &str) -> ClusterTrustBundle {
    let object = json!({"metadata": {"name": name}, "spec": {"signerName": signer, "trustBundle": pem}});
    serde_json::from_value(object).unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_serving_authority_is_published() {
    let cluster = Cluster::of(ApiServer::serving(&[API]).await.unwrap());
    let api: Api<ClusterTrustBundle> = Api::all(cluster.client.clone());
    let older = bundle("kubernetes.io:kube-apiserver-serving:old", SIGNER, &authority());
    api.create(&PostParams::default(), &older).await.unwrap();
    let other = bundle("other", "", &authority());
    api.create(&PostParams::default(), &other).await.unwrap();

    let root = authority();
    let run = |root: &str| {
        let root = root.to_owned();
        cluster.run_controllers(|config| {
            config.root_ca_pem = root;
            config.leader_elect = false;
            config.serves_api = Arc::new(|_, _, plural| plural == "clustertrustbundles");
        })
    };
    // Waits until the signer has one bundle, with this content. Returns its name.
    let published = async |root: &str| {
        let of_signer = ListParams::default().fields(&format!("spec.signerName={SIGNER}"));
        cluster
            .until_idle("one bundle of the signer", async || {
                let found = api.list(&of_signer).await.unwrap().items;
                let names: Vec<String> = found.iter().map(ResourceExt::name_any).collect();
                let is_good = matches!(found.as_slice(), [one] if one.spec.trust_bundle == root);
                check(is_good, names)
            })
            .await;
        api.list(&of_signer).await.unwrap().items[0].name_any()
    };
    let stop = run(&root);
    let name = published(&root).await;
    assert!(
        name.starts_with("kubernetes.io:kube-apiserver-serving:") && name != older.name_any(),
        "{name}"
    );
    // What someone changes or removes is put back.
    let change = Patch::Merge(json!({"spec": {"trustBundle": authority()}}));
    api.patch(&name, &PatchParams::default(), &change).await.unwrap();
    assert_eq!(published(&root).await, name);
    api.delete(&name, &DeleteParams::default()).await.unwrap();
    assert_eq!(published(&root).await, name);
    stop.cancel();

    let renewed = authority();
    let _stop = run(&renewed);
    assert_ne!(published(&renewed).await, name);
    assert!(api.get_opt("other").await.unwrap().is_some());
}
