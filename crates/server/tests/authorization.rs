//! Who says what is allowed: the order of the authorizers, and webhooks of somebody else. All words are those of a real
//! kube-apiserver.

mod support;

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use serde_json::{Value, json};
use skiff_auth::{AuthorizationConfiguration, AuthorizationWebhook, Mode, OnError, UserInfo, WebhookOptions};
use skiff_pki::Pki;
use support::peer::{Peer, kubeconfig};
use support::{Cluster, Reply};

const MAPS: &str = "/api/v1/namespaces/default/configmaps";

fn webhook(folder: &Path, pki: &Pki, port: u16, on_error: OnError) -> Mode {
    let file = kubeconfig(
        folder,
        "webhook",
        &format!("https://localhost:{port}/authorize"),
        pki,
    );
    let options = WebhookOptions {
        version: "v1".to_owned(),
        timeout: Duration::from_secs(30),
        authorized_ttl: Duration::from_secs(600),
        unauthorized_ttl: Duration::from_secs(600),
        on_error,
    };
    Mode::Webhook(Arc::new(
        AuthorizationWebhook::load(&file, options).expect("a file"),
    ))
}

/// How the webhook of the tests answers: the user says it.
fn answers(_: &str, review: &Value) -> Option<(u16, String)> {
    let status = match review["spec"]["user"].as_str().expect("a user") {
        "hang" => return None,
        "code-403" => return Some((403, "{}".to_owned())),
        "allow" | "allow-too" => json!({"allowed": true, "reason": "of course"}),
        "deny" => json!({"allowed": false, "denied": true, "reason": "never ever"}),
        "both" => json!({"allowed": true, "denied": true}),
        "impersonator" => {
            let asked = &review["spec"]["resourceAttributes"];
            json!({"allowed": asked["verb"] == "impersonate" && asked["name"] == "allow"})
        }
        _ => json!({"allowed": false, "reason": "not that I knew"}),
    };
    let review =
        json!({"apiVersion": "authorization.k8s.io/v1", "kind": "SubjectAccessReview", "status": status});
    Some((200, review.to_string()))
}

async fn cluster(modes: impl FnOnce(Mode) -> Vec<Mode>, on_error: OnError) -> (Cluster, Peer) {
    let (listener, port) = Peer::reserve();
    let cluster = Cluster::adjusted(|config, folder, pki| {
        config.authorization = modes(webhook(folder, pki, port, on_error));
    })
    .await;
    let peer = Peer::start(listener, &cluster.pki, Arc::new(answers));
    (cluster, peer)
}

async fn get_as(cluster: &Cluster, user: &str, uri: &str) -> Reply {
    let service = cluster.server.service(UserInfo::new(user, ["devs"]));
    cluster.send_as(service, "GET", uri, &[], "").await
}

#[tokio::test]
async fn a_webhook_decides() {
    let (cluster, peer) = cluster(
        |webhook| vec![Mode::Node, Mode::Rbac, webhook],
        OnError::NoOpinion,
    )
    .await;
    let uri = format!("{MAPS}?labelSelector=a%3Db,!c&fieldSelector=metadata.name!%3Dx");
    assert_eq!(get_as(&cluster, "allow", &uri).await.code, 200);
    let (path, review) = peer.seen().remove(0);
    assert_eq!(path, "/authorize?timeout=30s");
    assert_eq!(
        review["spec"],
        json!({"user": "allow", "groups": ["devs", "system:authenticated"], "resourceAttributes": {
            "namespace": "default", "verb": "list", "version": "v1", "resource": "configmaps",
            "fieldSelector": {"requirements": [{"key": "metadata.name", "operator": "NotIn", "values": ["x"]}]},
            "labelSelector": {"requirements": [
                {"key": "a", "operator": "In", "values": ["b"]}, {"key": "c", "operator": "DoesNotExist"}]},
        }})
    );
    let refused = |user: &str, why: &str| {
        format!(
            "configmaps is forbidden: User \"{user}\" cannot list resource \"configmaps\" in API group \"\" in the namespace \"default\": {why}"
        )
    };
    for (user, code, calls, message) in [
        ("allow", 200, 1, Value::Null),
        ("allow", 200, 0, Value::Null),
        ("deny", 403, 1, json!(refused("deny", "never ever"))),
        ("deny", 403, 0, json!(refused("deny", "never ever"))),
        ("other", 403, 1, json!(refused("other", "not that I knew"))),
    ] {
        let before = peer.seen().len();
        let reply = get_as(&cluster, user, MAPS).await;
        assert_eq!((reply.code, peer.seen().len() - before), (code, calls), "{user}");
        assert_eq!(reply.json["message"], message, "{user}");
    }
    // What RBAC allows is not asked for, nor what masters do.
    let before = peer.seen().len();
    assert_eq!(get_as(&cluster, "deny", "/version").await.code, 200);
    assert_eq!(cluster.get(MAPS).await.code, 200);
    assert_eq!(peer.seen().len(), before);
    let failed = get_as(&cluster, "code-403", MAPS).await;
    assert_eq!(
        (failed.code, failed.text.as_str()),
        (
            500,
            "Internal Server Error: \"/api/v1/namespaces/default/configmaps\": unknown\n"
        )
    );
    let both = get_as(&cluster, "both", MAPS).await;
    assert_eq!(
        (both.code, both.text.as_str()),
        (
            500,
            "Internal Server Error: \"/api/v1/namespaces/default/configmaps\": webhook subject access review returned both allow and deny response\n"
        )
    );
    assert_eq!(get_as(&cluster, "allow-too", "/metrics").await.code, 200);
    let last = peer.seen().pop().expect("a review").1;
    assert_eq!(
        last["spec"]["nonResourceAttributes"],
        json!({"path": "/metrics", "verb": "get"})
    );
}

#[tokio::test]
async fn reviews_ask_the_webhook_too() {
    let (cluster, _peer) = cluster(|webhook| vec![Mode::Rbac, webhook], OnError::NoOpinion).await;
    let review = async |user: &str| {
        let spec = json!({"user": user, "resourceAttributes": {"verb": "get", "resource": "pods", "namespace": "x"}});
        let review =
            json!({"apiVersion": "authorization.k8s.io/v1", "kind": "SubjectAccessReview", "spec": spec});
        let reply = cluster
            .post("/apis/authorization.k8s.io/v1/subjectaccessreviews", review)
            .await;
        reply.json["status"].clone()
    };
    assert_eq!(
        review("allow").await,
        json!({"allowed": true, "reason": "of course"})
    );
    assert_eq!(
        review("deny").await,
        json!({"allowed": false, "denied": true, "reason": "never ever"})
    );
    assert_eq!(
        review("code-403").await,
        json!({"allowed": false, "evaluationError": "unknown"})
    );
    // Impersonation: each part of it is asked for.
    let service = || cluster.server.service(UserInfo::new("impersonator", ["devs"]));
    let as_allowed = [("impersonate-user", "allow")];
    assert_eq!(
        cluster
            .send_as(service(), "GET", MAPS, &as_allowed, "")
            .await
            .code,
        200
    );
    let as_other = [("impersonate-user", "other")];
    assert_eq!(
        cluster.send_as(service(), "GET", MAPS, &as_other, "").await.code,
        403
    );
}

#[tokio::test]
async fn the_order_decides() {
    // A webhook that denies before RBAC is asked, and one that cannot be asked but must be.
    let (cluster, _peer) = cluster(|webhook| vec![webhook, Mode::AlwaysAllow], OnError::Deny).await;
    assert_eq!(get_as(&cluster, "deny", "/version").await.code, 403);
    assert_eq!(get_as(&cluster, "other", "/version").await.code, 200);
    assert_eq!(get_as(&cluster, "code-403", "/version").await.code, 500);
    assert_eq!(cluster.get("/version").await.code, 200);
    // A change may leave out a webhook, but who else is asked stays as it was at the start.
    let change = |modes: Vec<Mode>| cluster.server.change_authorization(modes);
    assert!(change(vec![Mode::AlwaysDeny]).is_err());
    assert_eq!(get_as(&cluster, "other", "/version").await.code, 200);
    assert!(change(vec![Mode::AlwaysAllow]).is_ok());
    assert_eq!(get_as(&cluster, "deny", "/version").await.code, 200);
    let (cluster, _peer) = self::cluster(|_| vec![Mode::AlwaysDeny], OnError::Deny).await;
    let reply = get_as(&cluster, "other", "/version").await;
    assert_eq!(
        reply.json["message"],
        "forbidden: User \"other\" cannot get path \"/version\": Everything is forbidden."
    );
}

#[tokio::test]
async fn a_webhook_that_hangs_holds_nobody_else_up() {
    let (cluster, peer) = cluster(|webhook| vec![Mode::Rbac, webhook], OnError::NoOpinion).await;
    let others = async {
        while peer.seen().is_empty() {
            tokio::task::yield_now().await;
        }
        assert_eq!(get_as(&cluster, "allow", MAPS).await.code, 200);
    };
    tokio::select! {
        _ = get_as(&cluster, "hang", MAPS) => panic!("the webhook never answers"),
        () = others => {}
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn who_cannot_wait_asks_too() {
    let (cluster, _peer) = cluster(|webhook| vec![Mode::Rbac, webhook], OnError::NoOpinion).await;
    // The expression of a policy asks for its user.
    let policies = "/apis/admissionregistration.k8s.io/v1/validatingadmissionpolicies";
    let policy = json!({"metadata": {"name": "p"}, "spec": {
        "matchConstraints": {"resourceRules": [{"apiGroups": [""], "apiVersions": ["v1"], "operations": ["CREATE"], "resources": ["configmaps"]}]},
        "validations": [{"expression": "authorizer.group('').resource('secrets').namespace('default').check('get').allowed()"}]}});
    assert_eq!(cluster.post(policies, policy).await.code, 201);
    let bindings = "/apis/admissionregistration.k8s.io/v1/validatingadmissionpolicybindings";
    let binding =
        json!({"metadata": {"name": "b"}, "spec": {"policyName": "p", "validationActions": ["Deny"]}});
    assert_eq!(cluster.post(bindings, binding).await.code, 201);
    let made = async |user: &str, name: &str| {
        let service = cluster.server.service(UserInfo::new(user, ["devs"]));
        let map = json!({"metadata": {"name": name}}).to_string();
        let headers = [("content-type", "application/json")];
        cluster.send_as(service, "POST", MAPS, &headers, map).await.code
    };
    // The policy is in force when a user who may not is refused; service accounts' cluster roles do not matter here.
    let role = json!({"metadata": {"name": "maps"}, "rules": [{"apiGroups": [""], "resources": ["configmaps"], "verbs": ["create"]}]});
    assert_eq!(
        cluster
            .post("/apis/rbac.authorization.k8s.io/v1/clusterroles", role)
            .await
            .code,
        201
    );
    let binding = json!({"metadata": {"name": "maps"}, "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "maps"},
        "subjects": [{"kind": "Group", "apiGroup": "rbac.authorization.k8s.io", "name": "devs"}]});
    let bound = cluster
        .post("/apis/rbac.authorization.k8s.io/v1/clusterrolebindings", binding)
        .await;
    assert_eq!(bound.code, 201, "{}", bound.text);
    let mut tries = 0;
    while made("deny", &format!("denied-{tries}")).await != 422 {
        tries += 1;
        assert!(tries < 10_000, "the policy is never in force");
        tokio::task::yield_now().await;
    }
    assert_eq!(made("allow", "allowed").await, 201);
}

#[tokio::test]
async fn a_file_may_name_several_webhooks_with_conditions() {
    let (listener, port) = Peer::reserve();
    let cluster = Cluster::adjusted(|config, folder, pki| {
        let kubeconfig = kubeconfig(folder, "webhook", &format!("https://localhost:{port}/"), pki);
        let webhook = |name: &str, condition: &str| {
            json!({"type": "Webhook", "name": name, "webhook": {"timeout": "30s", "subjectAccessReviewVersion": "v1",
                "matchConditionSubjectAccessReviewVersion": "v1", "failurePolicy": "NoOpinion",
                "connectionInfo": {"type": "KubeConfigFile", "kubeConfigFile": kubeconfig},
                "matchConditions": [{"expression": condition}]}})
        };
        let file = folder.join("authorization.json");
        let configuration = json!({"apiVersion": "apiserver.config.k8s.io/v1", "kind": "AuthorizationConfiguration", "authorizers": [
            webhook("of-paths", "has(request.nonResourceAttributes)"),
            {"type": "RBAC", "name": "rbac"},
            webhook("of-resources", "has(request.resourceAttributes) && request.resourceAttributes.namespace == 'default'"),
        ]});
        std::fs::write(&file, configuration.to_string()).expect("a file");
        config.authorization = AuthorizationConfiguration::load(&file, None).expect("a configuration");
    })
    .await;
    let peer = Peer::start(listener, &cluster.pki, Arc::new(answers));
    for (user, uri, code, calls) in [
        ("deny", "/version", 403, 1),
        ("allow", MAPS, 200, 1),
        ("allow", "/api/v1/namespaces/other/configmaps", 403, 0),
        ("allow", "/metrics", 200, 1),
    ] {
        let before = peer.seen().len();
        let reply = get_as(&cluster, user, uri).await;
        assert_eq!(
            (reply.code, peer.seen().len() - before),
            (code, calls),
            "{user} {uri}"
        );
    }
}
