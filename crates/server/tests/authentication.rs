//! Who the server knows besides certificates and service accounts: bootstrap tokens, and the tokens that a webhook of
//! somebody else knows. All words are those of a real kube-apiserver.

mod support;

use std::sync::Arc;
use std::time::Duration;

use base64::Engine;
use serde_json::{Value, json};
use skiff_auth::{TokenFile, TokenWebhook};
use support::peer::{Peer, kubeconfig};
use support::{Audited, Cluster, Https};

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

#[tokio::test]
async fn the_use_of_a_legacy_token_is_counted_recorded_and_warned_about() {
    let audited = Audited::start("- {level: Metadata}").await;
    let cluster = &audited.cluster;
    let https = Https::open(cluster).await;
    let accounts = "/api/v1/namespaces/default/serviceaccounts";
    let account = cluster
        .post(accounts, json!({"metadata": {"name": "robot"}}))
        .await;
    assert_eq!(account.code, 201, "{}", account.text);
    let (private, public) = cluster.pki.service_account_keys().expect("a key");
    let issuer =
        skiff_auth::TokenIssuer::new(&private, &public, ISSUER.into(), Vec::new()).expect("an issuer");
    let subject = "system:serviceaccount:default:robot";
    let claims = json!({"iss": "kubernetes/serviceaccount", "sub": subject,
        "kubernetes.io/serviceaccount/namespace": "default",
        "kubernetes.io/serviceaccount/secret.name": "robot-token",
        "kubernetes.io/serviceaccount/service-account.name": "robot",
        "kubernetes.io/serviceaccount/service-account.uid": account.json["metadata"]["uid"]});
    let token = issuer.sign(&claims).expect("a token");
    let secrets = "/api/v1/namespaces/default/secrets";
    let secret = json!({"metadata": {"name": "robot-token", "annotations": {"kubernetes.io/service-account.name": "robot"}},
        "type": "kubernetes.io/service-account-token", "stringData": {"token": token}});
    assert_eq!(cluster.post(secrets, secret).await.code, 201);
    // What was written is seen a moment later.
    let until = async |code: u16, key: &str, value: &str| {
        for _ in 0..200 {
            let reply = https.who(cluster, &token).await;
            let told = audited.event_of(&reply)["annotations"].clone();
            if told[format!("authentication.k8s.io/{key}")] == value {
                assert_eq!(reply.code, code, "{}", reply.text);
                assert_eq!(told["authentication.k8s.io/legacy-token"], subject);
                let warnings = reply.headers.get_all("warning").iter();
                return warnings
                    .filter_map(|text| text.to_str().ok().map(str::to_owned))
                    .collect();
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        panic!("never {key}: {value}")
    };
    let warnings: Vec<String> = until(201, "legacy-token-manual-secret", "robot-token").await;
    assert_eq!(warnings, [""; 0]);
    let merge = async |path: String, value: Value| {
        let patched = cluster.patch(&path, "merge-patch", value).await;
        assert_eq!(patched.code, 200, "{}", patched.text);
    };
    let listed = json!({"secrets": [{"name": "robot-token"}]});
    merge(format!("{accounts}/robot"), listed).await;
    let warnings: Vec<String> = until(201, "legacy-token-autogenerated-secret", "robot-token").await;
    assert_eq!(
        warnings,
        [
            "299 - \"Use tokens from the TokenRequest API or manually created secret-based tokens instead of auto-generated secret-based tokens.\""
        ]
    );
    let labels = json!({"metadata": {"labels": {"kubernetes.io/legacy-token-invalid-since": "2026-01-01"}}});
    merge(format!("{secrets}/robot-token"), labels).await;
    let _: Vec<String> = until(401, "legacy-token-invalidated", "robot-token/default").await;
    let metrics = cluster.get("/metrics").await.text;
    for name in [
        "legacy_tokens_total",
        "legacy_manual_token_uses_total",
        "legacy_auto_token_uses_total",
        "invalid_legacy_auto_token_uses_total",
    ] {
        let line = metrics
            .lines()
            .find(|line| line.starts_with(&format!("serviceaccount_{name} ")));
        let count = line.and_then(|line| line.rsplit(' ').next()?.parse::<f64>().ok());
        assert!(count.is_some_and(|count| count >= 1.0), "{name}: {line:?}");
    }
    https.end().await;
}
