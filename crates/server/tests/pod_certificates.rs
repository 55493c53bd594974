//! PodCertificateRequests: off by default, and where `--runtime-config` asks for them they are upstream's: who may ask, read and
//! sign, and pods that project certificates.

#![allow(clippy::unwrap_used)]

mod support;

use std::sync::Arc;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde_json::{Value, json};
use skiff_api::facts::RuntimeConfig;
use skiff_auth::UserInfo;
use skiff_store::Embedded;
use support::{Cluster, Reply};

const API: &str = "certificates.k8s.io/v1beta1/podcertificaterequests=true";
const ALL: &str = "/apis/certificates.k8s.io/v1beta1/podcertificaterequests";
const REQUESTS: &str = "/apis/certificates.k8s.io/v1beta1/namespaces/default/podcertificaterequests";
const RBAC: &str = "/apis/rbac.authorization.k8s.io/v1";
const SIGNER: &str = "example.com/s";

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

async fn send_as(cluster: &Cluster, user: &UserInfo, method: &str, uri: &str, value: &Value) -> Reply {
    let kind = match method {
        "PATCH" => "application/merge-patch+json",
        _ => "application/json",
    };
    let client = cluster.server.service(user.clone());
    let headers = [("content-type", kind)];
    cluster
        .send_as(client, method, uri, &headers, value.to_string())
        .await
}

fn stub(key: &rcgen::KeyPair) -> String {
    let mut parameters = rcgen::CertificateParams::default();
    parameters.distinguished_name = rcgen::DistinguishedName::new();
    STANDARD.encode(parameters.serialize_request(key).unwrap().der())
}

/// The status that issues a certificate for two hours, which begins so many minutes ago.
fn issued(key: &rcgen::KeyPair, minutes_ago: i64) -> Value {
    let begin = jiff::Timestamp::now().as_second() - minutes_ago * 60;
    let date = |second: i64| {
        let span = std::time::Duration::from_secs(second.try_into().unwrap());
        rcgen::date_time_ymd(1970, 1, 1) + span
    };
    let text = |second: i64| jiff::Timestamp::from_second(second).unwrap().to_string();
    let mut parameters = rcgen::CertificateParams::default();
    parameters.not_before = date(begin);
    parameters.not_after = date(begin + 7200);
    let authority = rcgen::KeyPair::generate().unwrap();
    let issuer = rcgen::Issuer::new(rcgen::CertificateParams::default(), authority);
    json!({"status": {"conditions": [condition("Issued")], "notBefore": text(begin), "notAfter": text(begin + 7200),
        "beginRefreshAt": text(begin + 3600), "certificateChain": parameters.signed_by(key, &issuer).unwrap().pem()}})
}

fn condition(kind: &str) -> Value {
    json!({"type": kind, "status": "True", "reason": "Because", "message": "of it", "lastTransitionTime": "2026-01-01T00:00:00Z"})
}

fn node(name: &str) -> UserInfo {
    UserInfo::new(
        format!("system:node:{name}"),
        ["system:nodes", "system:authenticated"],
    )
}

fn uid(reply: &Reply) -> String {
    assert_eq!(reply.code, 201, "{}", reply.text);
    reply.json["metadata"]["uid"].as_str().unwrap().to_owned()
}

/// A pod `p` on node `a`, and a request for it. Node `b` is there, too.
async fn request_of_a_pod(cluster: &Cluster, key: &rcgen::KeyPair) -> Value {
    let node_uid = uid(&cluster
        .post("/api/v1/nodes", json!({"metadata": {"name": "a"}}))
        .await);
    uid(&cluster
        .post("/api/v1/nodes", json!({"metadata": {"name": "b"}}))
        .await);
    let accounts = "/api/v1/namespaces/default/serviceaccounts";
    let account_uid = uid(&cluster.post(accounts, json!({"metadata": {"name": "sa"}})).await);
    let pod = json!({"metadata": {"name": "p"}, "spec": {"nodeName": "a", "serviceAccountName": "sa",
        "automountServiceAccountToken": false, "containers": [{"name": "c", "image": "i"}]}});
    let pod_uid = uid(&cluster.post("/api/v1/namespaces/default/pods", pod).await);
    json!({"metadata": {"generateName": "req-"}, "spec": {"signerName": SIGNER, "podName": "p", "podUID": pod_uid,
        "serviceAccountName": "sa", "serviceAccountUID": account_uid, "nodeName": "a", "nodeUID": node_uid,
        "stubPKCS10Request": stub(key)}})
}

#[tokio::test(flavor = "multi_thread")]
async fn nodes_ask_for_their_own_pods() {
    let folder = tempfile::tempdir().unwrap();
    let cluster = start(&store(&folder), &[API]).await;
    let key = rcgen::KeyPair::generate().unwrap();
    let request = request_of_a_pod(&cluster, &key).await;
    let (a, b) = (node("a"), node("b"));

    let refused = send_as(&cluster, &b, "POST", REQUESTS, &request).await;
    assert_eq!(refused.code, 403, "{}", refused.text);
    assert!(
        refused.text.contains("which is not the requesting node"),
        "{}",
        refused.text
    );
    let mut other = request.clone();
    other["spec"]["podUID"] = json!("another");
    let refused = send_as(&cluster, &a, "POST", REQUESTS, &other).await;
    assert_eq!(refused.code, 500, "{}", refused.text);
    assert!(refused.text.contains("contains pod UID"), "{}", refused.text);

    let made = send_as(&cluster, &a, "POST", REQUESTS, &request).await;
    assert_eq!(made.code, 201, "{}", made.text);
    assert_eq!(made.json["spec"]["maxExpirationSeconds"], 86_400);
    assert_eq!(made.json["spec"]["pkixPublicKey"], Value::Null);
    let name = made.json["metadata"]["name"].as_str().unwrap();
    let one = format!("{REQUESTS}/{name}");
    // The authorizer hears of the request in its own time.
    for _ in 0..600 {
        if send_as(&cluster, &a, "GET", &one, &Value::Null).await.code == 200 {
            break;
        }
        tokio::time::sleep(std::time::Duration::from_millis(20)).await;
    }
    let mine = format!("{ALL}?fieldSelector=spec.nodeName%3Da");
    for (user, verb, uri, code) in [
        (&a, "GET", one.as_str(), 200),
        (&b, "GET", &one, 403),
        (&a, "GET", &mine, 200),
        (&b, "GET", &mine, 403),
        (&a, "GET", ALL, 403),
        (&a, "DELETE", &one, 403),
    ] {
        let reply = send_as(&cluster, user, verb, uri, &Value::Null).await;
        assert_eq!(reply.code, code, "{} {verb} {uri}: {}", user.name, reply.text);
    }
    let denied = json!({"status": {"conditions": [condition("Denied")]}});
    let refused = send_as(&cluster, &a, "PATCH", &format!("{one}/status"), &denied).await;
    assert_eq!(refused.code, 403);

    let accept = "application/json;as=Table;v=v1;g=meta.k8s.io";
    let table = cluster
        .send_as(cluster.admin(), "GET", REQUESTS, &[("accept", accept)], "")
        .await
        .json;
    assert_eq!(table["columnDefinitions"][6]["priority"], 0);
    let cells = json!([name, "p", "sa", "a", SIGNER, "Pending", "<none>"]);
    assert_eq!(table["rows"][0]["cells"], cells);
    for (selector, code) in [("spec.podName%3Dp", 200), ("spec.other%3Dx", 400)] {
        let found = cluster.get(&format!("{ALL}?fieldSelector={selector}")).await;
        assert_eq!(found.code, code, "{selector}");
    }
    let protobuf = [("accept", "application/vnd.kubernetes.protobuf")];
    let binary = cluster.send_as(cluster.admin(), "GET", &one, &protobuf, "").await;
    assert!(binary.bytes.starts_with(b"k8s\0"));
}

#[tokio::test(flavor = "multi_thread")]
async fn signers_sign_for_their_names() {
    let folder = tempfile::tempdir().unwrap();
    let cluster = start(&store(&folder), &[API]).await;
    let key = rcgen::KeyPair::generate().unwrap();
    let request = request_of_a_pod(&cluster, &key).await;
    let made = cluster.post(REQUESTS, request).await;
    assert_eq!(made.code, 201, "{}", made.text);
    let one = format!("{REQUESTS}/{}", made.json["metadata"]["name"].as_str().unwrap());
    let status = format!("{one}/status");
    let rules = |signer: &str| {
        json!([{"apiGroups": ["certificates.k8s.io"], "resources": ["podcertificaterequests/status"], "verbs": ["patch"]},
            {"apiGroups": ["certificates.k8s.io"], "resources": ["signers"], "resourceNames": [signer], "verbs": ["sign"]}])
    };
    let role = json!({"metadata": {"name": "signer"}, "rules": rules("example.com/others")});
    let made = cluster.post(&format!("{RBAC}/clusterroles"), role).await;
    assert_eq!(made.code, 201, "{}", made.text);
    let binding = json!({"metadata": {"name": "signer"}, "subjects": [{"kind": "User", "name": "jane"}],
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "signer"}});
    let made = cluster
        .post(&format!("{RBAC}/clusterrolebindings"), binding)
        .await;
    assert_eq!(made.code, 201, "{}", made.text);
    let jane = UserInfo::new("jane", ["system:authenticated"]);
    let words = json!({"status": {"conditions": [condition("Issued")], "certificateChain": "words"}});
    let denied = json!({"status": {"conditions": [condition("Denied")]}});
    // The authorizer hears of the role in its own time.
    let as_jane = async |value: &Value, until: &[u16]| {
        for _ in 0..600 {
            let reply = send_as(&cluster, &jane, "PATCH", &status, value).await;
            if until.contains(&reply.code) {
                return reply;
            }
            tokio::time::sleep(std::time::Duration::from_millis(20)).await;
        }
        panic!("never {until:?}");
    };
    let refused = as_jane(&denied, &[422]).await;
    assert!(
        refused.json["message"].as_str().unwrap().ends_with(
            "spec.signerName: Forbidden: User \"jane\" is not permitted to \"sign\" for signer \"example.com/s\""
        ),
        "{}",
        refused.text
    );
    // What is wrong with a status is said first.
    let refused = as_jane(&words, &[422]).await;
    assert!(
        refused
            .text
            .contains("issued certificate chain must contain at least one certificate"),
        "{}",
        refused.text
    );
    // A write that changes nothing asks for no right.
    assert_eq!(as_jane(&json!({"status": {}}), &[200]).await.code, 200);
    let role = format!("{RBAC}/clusterroles/signer");
    let wider = json!({"rules": rules("example.com/*")});
    assert_eq!(cluster.patch(&role, "merge-patch", wider).await.code, 200);
    // The clock is the server's.
    let refused = as_jane(&issued(&key, 60), &[422]).await;
    assert!(
        refused
            .text
            .contains("must be set to within 5 minutes of kube-apiserver's current time"),
        "{}",
        refused.text
    );
    let done = as_jane(&issued(&key, 1), &[200]).await;
    assert_eq!(done.json["status"]["conditions"][0]["type"], "Issued");
    let refused = cluster
        .patch(
            &status,
            "merge-patch",
            json!({"status": {"conditions": [condition("Failed")]}}),
        )
        .await;
    assert_eq!(refused.code, 422);
    assert!(
        refused
            .text
            .contains("immutable after PodCertificateRequest is issued, denied, or failed"),
        "{}",
        refused.text
    );
    let refused = cluster
        .patch(
            &one,
            "merge-patch",
            json!({"spec": {"signerName": "example.com/t"}}),
        )
        .await;
    assert_eq!(refused.code, 422);
    assert!(refused.text.contains("field is immutable"), "{}", refused.text);
}

/// A pod's source is kept where the API is served; where it is not, it is dropped, unless the object had it before.
#[tokio::test(flavor = "multi_thread")]
async fn a_projection_needs_the_api() {
    const TEMPLATES: &str = "/api/v1/namespaces/default/podtemplates";
    let folder = tempfile::tempdir().unwrap();
    let store = store(&folder);
    let source = |change: Value| {
        let mut source =
            json!({"signerName": SIGNER, "keyType": "ED25519", "credentialBundlePath": "bundle.pem"});
        for (key, value) in change.as_object().unwrap() {
            source[key] = value.clone();
        }
        json!({ "podCertificate": source })
    };
    let template = |name: &str, source: &Value| {
        json!({"metadata": {"name": name}, "template": {"spec": {
            "containers": [{"name": "c", "image": "i"}],
            "volumes": [{"name": "v", "projected": {"sources": [source]}}]}}})
    };
    let sources =
        |reply: &Reply| reply.json["template"]["spec"]["volumes"][0]["projected"]["sources"][0].clone();
    let good = source(json!({}));
    // The other resource of the group version does not bring it.
    for pairs in [&[][..], &["certificates.k8s.io/v1beta1/clustertrustbundles=true"]] {
        let cluster = start(&store, pairs).await;
        let made = cluster
            .post(&format!("{TEMPLATES}?dryRun=All"), template("off", &good))
            .await;
        assert_eq!((made.code, sources(&made)), (201, json!({})), "{}", made.text);
        assert_eq!(cluster.get(ALL).await.code, 404);
    }

    let cluster = start(&store, &[API]).await;
    let made = cluster.post(TEMPLATES, template("on", &good)).await;
    assert_eq!((made.code, sources(&made)), (201, good.clone()), "{}", made.text);
    for (change, complaint) in [
        (
            json!({"signerName": "x"}),
            "must be a fully qualified domain and path",
        ),
        (
            json!({"keyType": "RSA2048"}),
            "keyType: Unsupported value: \"RSA2048\": supported values: \"RSA3072\", \"RSA4096\", \"ECDSAP256\", \"ECDSAP384\", \"ECDSAP521\", \"ED25519\"",
        ),
        (
            json!({"maxExpirationSeconds": 3599}),
            "if provided, maxExpirationSeconds must be >= 3600",
        ),
        (
            json!({"maxExpirationSeconds": 7_862_401}),
            "if provided, maxExpirationSeconds must be <= 7862400",
        ),
        (
            json!({"signerName": "kubernetes.io/s", "maxExpirationSeconds": 86_401}),
            "if provided, maxExpirationSeconds must be <= 86400",
        ),
        (
            json!({"credentialBundlePath": null}),
            "specify at least one of credentialBundlePath, keyPath, and certificateChainPath",
        ),
        (json!({"keyPath": "../p"}), "must not contain '..'"),
        (json!({"keyPath": "bundle.pem"}), "conflicting duplicate paths"),
        (
            json!({"userAnnotations": {"a": "b"}}),
            "must be a domain-prefixed key",
        ),
    ] {
        let refused = cluster
            .post(TEMPLATES, template("bad", &source(change.clone())))
            .await;
        assert_eq!(refused.code, 422, "{change}: {}", refused.text);
        let message = refused.json["message"].as_str().unwrap();
        assert!(message.contains(complaint), "{change}: {message}");
    }
    drop(cluster);

    let cluster = start(&store, &[]).await;
    let labels = json!({"metadata": {"labels": {"a": "b"}}});
    let kept = cluster
        .patch(&format!("{TEMPLATES}/on"), "merge-patch", labels)
        .await;
    assert_eq!((kept.code, sources(&kept)), (200, good), "{}", kept.text);
}
