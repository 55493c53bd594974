//! Who the server knows besides certificates and service accounts: bootstrap tokens, and the tokens that a webhook of
//! somebody else knows. All words are those of a real kube-apiserver.

mod support;

use std::sync::Arc;
use std::time::Duration;

use base64::Engine;
use serde_json::{Value, json};
use skiff_auth::{TokenFile, TokenWebhook};
use support::peer::{Peer, kubeconfig};
use support::{Cluster, Https};

const REVIEWS: &str = "/apis/authentication.k8s.io/v1/tokenreviews";
const SECRETS: &str = "/api/v1/namespaces/kube-system/secrets";
const ISSUER: &str = "https://kubernetes.default.svc.cluster.local";

async fn reviewed(cluster: &Cluster, token: &str, audiences: &[&str]) -> Value {
    let spec = json!({"token": token, "audiences": audiences});
    let kind = json!({"apiVersion": "authentication.k8s.io/v1", "kind": "TokenReview", "spec": spec});
    let reply = cluster.post(REVIEWS, kind).await;
    assert_eq!(reply.code, 201, "{}", reply.text);
    reply.json["status"].clone()
}

fn bootstrap_token(data: Value) -> Value {
    let mut secret = json!({"metadata": {"name": "bootstrap-token-abcdef"}, "type": "bootstrap.kubernetes.io/token",
        "stringData": {"token-id": "abcdef", "token-secret": "0123456789abcdef", "usage-bootstrap-authentication": "true"}});
    for (key, value) in data.as_object().into_iter().flatten() {
        secret["stringData"][key] = value.clone();
    }
    secret
}

#[tokio::test]
async fn bootstrap_tokens_let_machines_in() {
    let cluster = Cluster::start().await;
    let https = Https::open(&cluster).await;
    let token = "abcdef.0123456789abcdef";
    assert_eq!(https.who(&cluster, token).await.code, 401, "before it is made");
    let secret =
        bootstrap_token(json!({"auth-extra-groups": "system:bootstrappers:kubeadm:default-node-token"}));
    assert_eq!(cluster.post(SECRETS, secret).await.code, 201);
    // A list waits for the cache, which tokens are looked up in.
    assert_eq!(cluster.get(SECRETS).await.code, 200);
    let who = https.who(&cluster, token).await;
    assert_eq!(who.code, 201, "{}", who.text);
    assert_eq!(
        who.json["status"]["userInfo"],
        json!({"username": "system:bootstrap:abcdef", "groups": ["system:bootstrappers",
            "system:bootstrappers:kubeadm:default-node-token", "system:authenticated"]})
    );
    let wrong = https.who(&cluster, "abcdef.0123456789abcdee").await;
    assert_eq!(
        (wrong.code, &wrong.json["message"]),
        (401, &json!("Unauthorized"))
    );
    assert_eq!(reviewed(&cluster, token, &[]).await["audiences"], json!([ISSUER]));
    assert_eq!(
        reviewed(&cluster, token, &["other"]).await,
        json!({"user": {}, "error": "invalid bearer token"})
    );
    let uri = format!("{SECRETS}/bootstrap-token-abcdef");
    let expired = base64::engine::general_purpose::STANDARD.encode("2020-01-01T00:00:00Z");
    let changed = cluster
        .patch(&uri, "merge-patch", json!({"data": {"expiration": expired}}))
        .await;
    assert_eq!(changed.code, 200, "{}", changed.text);
    assert_eq!(cluster.get(SECRETS).await.code, 200);
    assert_eq!(https.who(&cluster, token).await.code, 401, "expired");
    https.end().await;
}

#[tokio::test]
async fn tokens_of_a_file() {
    let cluster = Cluster::adjusted(|config, folder, _| {
        let file = folder.join("tokens.csv");
        std::fs::write(&file, "sesame,jane,u1,\"devs,ops\"\n").unwrap();
        config.authentication.token_file = Some(TokenFile::load(&file).unwrap());
    })
    .await;
    let https = Https::open(&cluster).await;
    let who = https.who(&cluster, "sesame").await;
    assert_eq!(
        who.json["status"]["userInfo"],
        json!({"username": "jane", "uid": "u1", "groups": ["devs", "ops", "system:authenticated"]})
    );
    assert_eq!(https.who(&cluster, "sesam").await.code, 401);
}

#[tokio::test]
async fn bootstrap_tokens_can_be_turned_off() {
    let cluster = Cluster::adjusted(|config, _, _| config.authentication.bootstrap_tokens = false).await;
    assert_eq!(cluster.post(SECRETS, bootstrap_token(json!({}))).await.code, 201);
    assert_eq!(cluster.get(SECRETS).await.code, 200);
    let https = Https::open(&cluster).await;
    assert_eq!(https.who(&cluster, "abcdef.0123456789abcdef").await.code, 401);
    https.end().await;
}

/// How the webhook of the tests answers: the token says it.
fn answers(_: &str, review: &Value) -> Option<(u16, String)> {
    let user = json!({"username": "jane", "uid": "7", "groups": ["devs"], "extra": {"example.com/team": ["a", "b"]}});
    let status = match review["spec"]["token"].as_str().expect("a token") {
        "hang" => return None,
        "code-403" => return Some((403, "{}".to_owned())),
        "no-json" => return Some((200, "hello".to_owned())),
        "good" => json!({"authenticated": true, "user": user}),
        "for-api" => json!({"authenticated": true, "user": user, "audiences": [ISSUER, "x"]}),
        "for-other" => json!({"authenticated": true, "user": user, "audiences": ["other"]}),
        "unauthenticated" => {
            json!({"authenticated": true, "user": {"username": "x", "groups": ["system:unauthenticated"]}})
        }
        "error" => json!({"authenticated": false, "error": "no such luck"}),
        _ => json!({"authenticated": false}),
    };
    let review = json!({"apiVersion": "authentication.k8s.io/v1", "kind": "TokenReview", "status": status});
    Some((200, review.to_string()))
}

#[tokio::test]
async fn a_webhook_knows_tokens() {
    let (listener, port) = Peer::reserve();
    let cluster = Cluster::adjusted(|config, folder, pki| {
        let url = format!("https://localhost:{port}/authenticate");
        let file = kubeconfig(folder, "webhook", &url, pki);
        let ttl = Duration::from_secs(600);
        config.authentication.webhook = Some(TokenWebhook::load(&file, "v1", ttl).expect("a file"));
    })
    .await;
    let peer = Peer::start(listener, &cluster.pki, Arc::new(answers));
    let https = Https::open(&cluster).await;
    let who = https.who(&cluster, "good").await;
    assert_eq!(
        who.json["status"]["userInfo"],
        json!({"username": "jane", "uid": "7", "groups": ["devs", "system:authenticated"],
            "extra": {"example.com/team": ["a", "b"]}})
    );
    let (path, review) = peer.seen().remove(0);
    assert_eq!(path, "/authenticate?timeout=30s");
    assert_eq!(review["apiVersion"], "authentication.k8s.io/v1");
    assert_eq!(review["spec"], json!({"token": "good", "audiences": [ISSUER]}));
    // What it said is kept, what it did not know as well; what went wrong is not.
    for (token, code, calls) in [
        ("good", 201, 0),
        ("bad", 401, 1),
        ("bad", 401, 0),
        ("error", 401, 1),
        ("error", 401, 1),
        ("code-403", 401, 1),
        ("for-api", 201, 1),
        ("for-other", 401, 1),
    ] {
        let before = peer.seen().len();
        assert_eq!(https.who(&cluster, token).await.code, code, "{token}");
        assert_eq!(peer.seen().len() - before, calls, "{token}");
    }
    let check = async |token: &str, audiences: &[&str], expected: Value| {
        assert_eq!(reviewed(&cluster, token, audiences).await, expected, "{token}");
    };
    let user = json!({"username": "jane", "uid": "7", "groups": ["devs", "system:authenticated"],
        "extra": {"example.com/team": ["a", "b"]}});
    check(
        "for-other",
        &["other"],
        json!({"authenticated": true, "user": user, "audiences": ["other"]}),
    )
    .await;
    check("bad", &[], json!({"user": {}, "error": "invalid bearer token"})).await;
    check(
        "error",
        &[],
        json!({"user": {}, "error": "[invalid bearer token, no such luck]"}),
    )
    .await;
    let forbidden = "[invalid bearer token, unknown]";
    check("code-403", &[], json!({"user": {}, "error": forbidden})).await;
    let who = https.who(&cluster, "unauthenticated").await;
    // Nobody lets such a user ask.
    assert_eq!(who.code, 403, "{}", who.text);
    https.end().await;
}

#[tokio::test]
async fn a_webhook_that_hangs_holds_nobody_else_up() {
    let (listener, port) = Peer::reserve();
    let cluster = Cluster::adjusted(|config, folder, pki| {
        let file = kubeconfig(folder, "webhook", &format!("https://localhost:{port}/"), pki);
        config.authentication.webhook =
            Some(TokenWebhook::load(&file, "v1", Duration::ZERO).expect("a file"));
    })
    .await;
    let peer = Peer::start(listener, &cluster.pki, Arc::new(answers));
    let https = Https::open(&cluster).await;
    // Three requests of one token are one call.
    let waiting = futures::future::join_all((0..3).map(|_| https.who(&cluster, "hang")));
    let others = async {
        while peer.seen().is_empty() {
            tokio::task::yield_now().await;
        }
        assert_eq!(https.who(&cluster, "good").await.code, 201);
        assert_eq!(https.ask(&cluster, "", "GET", "/version", "").await.code, 200);
    };
    tokio::select! {
        _ = waiting => panic!("the webhook never answers"),
        () = others => {}
    }
    let hanging = peer
        .seen()
        .iter()
        .filter(|(_, review)| review["spec"]["token"] == "hang")
        .count();
    assert_eq!(hanging, 1);
    https.end().await;
}

#[tokio::test]
async fn a_webhook_that_is_not_there_is_no_way_in() {
    let (listener, port) = Peer::reserve();
    let cluster = Cluster::adjusted(|config, folder, pki| {
        let file = kubeconfig(folder, "webhook", &format!("https://localhost:{port}/"), pki);
        config.authentication.webhook =
            Some(TokenWebhook::load(&file, "v1", Duration::ZERO).expect("a file"));
    })
    .await;
    drop(listener);
    let https = Https::open(&cluster).await;
    let who = https.who(&cluster, "good").await;
    assert_eq!((who.code, &who.json["message"]), (401, &json!("Unauthorized")));
    let status = reviewed(&cluster, "good", &[]).await;
    let why = status["error"].as_str().expect("a text");
    assert!(
        why.starts_with(&format!(
            "[invalid bearer token, Post \"https://localhost:{port}/?timeout=30s\": dial tcp"
        )),
        "{why}"
    );
    https.end().await;
}
