//! ClusterTrustBundles: off by default, and where `--runtime-config` asks for them they are upstream's: who may write and read
//! them, and pods that project them.

#![allow(clippy::unwrap_used)]

mod support;

use std::sync::Arc;

use serde_json::{Value, json};
use skiff_api::facts::RuntimeConfig;
use skiff_auth::UserInfo;
use skiff_store::Embedded;
use support::{Cluster, Reply};

const API: &str = "certificates.k8s.io/v1beta1/clustertrustbundles=true";
const BUNDLES: &str = "/apis/certificates.k8s.io/v1beta1/clustertrustbundles";
const RBAC: &str = "/apis/rbac.authorization.k8s.io/v1";
const SIGNER: &str = "example.com/roots";

async fn start(store: &Arc<Embedded>, pairs: &[&str]) -> Cluster {
    let runtime_config = RuntimeConfig::parse(pairs).unwrap();
    Cluster::adjusted_on(store.clone(), |config, _, _| {
        config.runtime_config = runtime_config
    })
    .await
}

fn store(folder: &tempfile::TempDir) -> Arc<Embedded> {
    Arc::new(Embedded::open(folder.path().join("store")).unwrap())
}

/// The certificate of an authority that nobody knows yet.
fn authority() -> String {
    let folder = tempfile::tempdir().unwrap();
    let pki = skiff_pki::Pki::open(folder.path()).unwrap();
    pki.ca_certificate().to_owned()
}

fn bundle(name: &str, signer: &str, pem: &str) -> Value {
    json!({"metadata": {"name": name}, "spec": {"signerName": signer, "trustBundle": pem}})
}

async fn post_as(cluster: &Cluster, user: &UserInfo, uri: &str, value: &Value) -> Reply {
    let json = [("content-type", "application/json")];
    let client = cluster.server.service(user.clone());
    cluster
        .send_as(client, "POST", uri, &json, value.to_string())
        .await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_signer_needs_someone_who_may_attest() {
    let folder = tempfile::tempdir().unwrap();
    let cluster = start(&store(&folder), &[API]).await;
    let rules =
        json!([{"apiGroups": ["certificates.k8s.io"], "resources": ["clustertrustbundles"], "verbs": ["*"]}]);
    let role = json!({"metadata": {"name": "writer"}, "rules": rules});
    assert_eq!(
        cluster.post(&format!("{RBAC}/clusterroles"), role).await.code,
        201
    );
    let binding = json!({"metadata": {"name": "writer"}, "subjects": [{"kind": "User", "name": "jane"}],
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "writer"}});
    let made = cluster
        .post(&format!("{RBAC}/clusterrolebindings"), binding)
        .await;
    assert_eq!(made.code, 201, "{}", made.text);
    let jane = UserInfo::new("jane", ["system:authenticated"]);

    // The authorizer hears of the binding in its own time.
    let of_nobody = bundle("of-nobody", "", &authority());
    for _ in 0..600 {
        let made = post_as(&cluster, &jane, BUNDLES, &of_nobody).await;
        if made.code == 201 {
            break;
        }
        assert_eq!(made.code, 403, "{}", made.text);
        tokio::time::sleep(std::time::Duration::from_millis(20)).await;
    }
    assert_eq!(cluster.get(&format!("{BUNDLES}/of-nobody")).await.code, 200);
    let of_signer = bundle("example.com:roots:a", SIGNER, &authority());
    let refused = post_as(&cluster, &jane, BUNDLES, &of_signer).await;
    assert_eq!(refused.code, 403);
    assert_eq!(
        refused.json["message"],
        "clustertrustbundles.certificates.k8s.io \"example.com:roots:a\" is forbidden: user not permitted to attest for signerName \"example.com/roots\""
    );
    let rules = json!({"rules": [{"apiGroups": ["certificates.k8s.io"], "resources": ["clustertrustbundles"], "verbs": ["*"]},
        {"apiGroups": ["certificates.k8s.io"], "resources": ["signers"], "resourceNames": [SIGNER], "verbs": ["attest"]}]});
    let role = format!("{RBAC}/clusterroles/writer");
    assert_eq!(cluster.patch(&role, "merge-patch", rules).await.code, 200);
    for _ in 0..600 {
        if post_as(&cluster, &jane, BUNDLES, &of_signer).await.code == 201 {
            break;
        }
        tokio::time::sleep(std::time::Duration::from_millis(20)).await;
    }

    let names = |list: &Value| -> Vec<String> {
        let items = list["items"].as_array().unwrap().iter();
        items
            .map(|item| item["metadata"]["name"].as_str().unwrap().to_owned())
            .collect()
    };
    let of_signer = cluster
        .get(&format!(
            "{BUNDLES}?fieldSelector=spec.signerName%3Dexample.com%2Froots"
        ))
        .await;
    assert_eq!(names(&of_signer.json), ["example.com:roots:a"]);
    let refused = cluster
        .get(&format!("{BUNDLES}?fieldSelector=spec.other%3Dx"))
        .await;
    assert_eq!(refused.code, 400);
    let accept = "application/json;as=Table;v=v1;g=meta.k8s.io";
    let table = cluster
        .send_as(cluster.admin(), "GET", BUNDLES, &[("accept", accept)], "")
        .await
        .json;
    assert_eq!(table["rows"][0]["cells"], json!(["example.com:roots:a", SIGNER]));
    assert_eq!(table["rows"][1]["cells"], json!(["of-nobody", "<none>"]));
    let protobuf = [("accept", "application/vnd.kubernetes.protobuf")];
    let one = format!("{BUNDLES}/of-nobody");
    let binary = cluster.send_as(cluster.admin(), "GET", &one, &protobuf, "").await;
    assert!(binary.bytes.starts_with(b"k8s\0"));
}

#[tokio::test(flavor = "multi_thread")]
async fn bundles_follow_upstreams_rules() {
    let folder = tempfile::tempdir().unwrap();
    let cluster = start(&store(&folder), &[API]).await;
    let refused = cluster.post(BUNDLES, bundle("a", SIGNER, "no certificate")).await;
    assert_eq!(refused.code, 422);
    let message = refused.json["message"].as_str().unwrap();
    for part in [
        "metadata.name: Invalid value: \"a\": ClusterTrustBundle for signerName example.com/roots must be named with prefix example.com:roots:",
        "spec.trustBundle: Invalid value: \"<value omitted>\": at least one trust anchor must be provided",
    ] {
        assert!(message.contains(part), "{message}");
    }
    let made = cluster
        .post(BUNDLES, bundle("example.com:roots:a", SIGNER, &authority()))
        .await;
    assert_eq!(made.code, 201, "{}", made.text);
    let one = format!("{BUNDLES}/example.com:roots:a");
    let other = json!({"spec": {"signerName": "example.com/others"}});
    let refused = cluster.patch(&one, "merge-patch", other).await;
    assert_eq!(refused.code, 422);
    assert!(refused.text.contains("field is immutable"), "{}", refused.text);
    let renewed = json!({"spec": {"trustBundle": authority()}});
    assert_eq!(cluster.patch(&one, "merge-patch", renewed).await.code, 200);
    let mut unconditional = made.json.clone();
    let metadata = unconditional["metadata"].as_object_mut().unwrap();
    metadata.remove("resourceVersion");
    assert_eq!(cluster.put(&one, unconditional).await.code, 422);
}

#[tokio::test(flavor = "multi_thread")]
async fn nodes_and_service_accounts_read_them() {
    let folder = tempfile::tempdir().unwrap();
    let store = store(&folder);
    let readers = [
        UserInfo::new("system:node:n", ["system:nodes", "system:authenticated"]),
        UserInfo::service_account("default", "default"),
    ];
    for (pairs, expected) in [(&[][..], [403, 403]), (&[API][..], [200, 200])] {
        let cluster = start(&store, pairs).await;
        for (reader, code) in readers.iter().zip(expected) {
            let mut found = 0;
            for _ in 0..600 {
                let client = cluster.server.service(reader.clone());
                found = cluster.send_as(client, "GET", BUNDLES, &[], "").await.code;
                if found == code {
                    break;
                }
                tokio::time::sleep(std::time::Duration::from_millis(20)).await;
            }
            assert_eq!(found, code, "{pairs:?} {reader:?}");
            let own = bundle("mine", "", &authority());
            assert_eq!(post_as(&cluster, reader, BUNDLES, &own).await.code, 403);
        }
    }
}

/// A pod's source is kept where the API is served; where it is not, it is dropped, unless the object had it before.
#[tokio::test(flavor = "multi_thread")]
async fn a_projection_needs_the_api() {
    const TEMPLATES: &str = "/api/v1/namespaces/default/podtemplates";
    let folder = tempfile::tempdir().unwrap();
    let store = store(&folder);
    let source = json!({"clusterTrustBundle": {"name": "roots", "path": "roots.pem"}});
    let template = |name: &str, source: &Value| {
        json!({"metadata": {"name": name}, "template": {"spec": {
            "containers": [{"name": "c", "image": "i"}],
            "volumes": [{"name": "v", "projected": {"sources": [source]}}]}}})
    };
    let sources =
        |reply: &Reply| reply.json["template"]["spec"]["volumes"][0]["projected"]["sources"][0].clone();
    let cluster = start(&store, &[]).await;
    let made = cluster.post(TEMPLATES, template("off", &source)).await;
    assert_eq!((made.code, sources(&made)), (201, json!({})), "{}", made.text);
    drop(cluster);

    let cluster = start(&store, &[API]).await;
    let made = cluster.post(TEMPLATES, template("on", &source)).await;
    assert_eq!(
        (made.code, sources(&made)),
        (201, source.clone()),
        "{}",
        made.text
    );
    for (sent, complaint) in [
        (
            json!({"path": "p"}),
            "clusterTrustBundle: Required value: either name or signerName must be specified",
        ),
        (
            json!({"name": "a", "signerName": SIGNER, "path": "p"}),
            "only one of name and signerName may be used",
        ),
        (
            json!({"name": "a:b c", "path": "p"}),
            "name: Invalid value: \"a:b c\": not a valid clustertrustbundlename: ",
        ),
        (
            json!({"name": "a", "labelSelector": {}, "path": "p"}),
            "labelSelector must be unset if name is specified",
        ),
        (
            json!({"signerName": "x", "path": "p"}),
            "must be a fully qualified domain and path",
        ),
        (
            json!({"name": "a", "path": ""}),
            "clusterTrustBundle.path: Required value",
        ),
        (json!({"name": "a", "path": "../p"}), "must not contain '..'"),
    ] {
        let refused = cluster
            .post(TEMPLATES, template("bad", &json!({"clusterTrustBundle": sent})))
            .await;
        assert_eq!(refused.code, 422, "{sent}");
        let message = refused.json["message"].as_str().unwrap();
        assert!(message.contains(complaint), "{sent}: {message}");
    }
    drop(cluster);

    let cluster = start(&store, &[]).await;
    let labels = json!({"metadata": {"labels": {"a": "b"}}});
    let kept = cluster
        .patch(&format!("{TEMPLATES}/on"), "merge-patch", labels)
        .await;
    assert_eq!((kept.code, sources(&kept)), (200, source), "{}", kept.text);
}
