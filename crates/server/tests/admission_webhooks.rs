//! Admission webhooks of a real HTTPS server behind the front door: who is asked, what they see, what they change,
//! and what happens when they cannot be asked.

mod support;

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use base64::Engine;
use bytes::Bytes;
use http::Response;
use http_body_util::{BodyExt, Full};
use hyper_util::rt::TokioIo;
use serde_json::{Value, json};
use support::{Audited, Cluster};
use tokio::net::TcpListener;

const MUTATING: &str = "/apis/admissionregistration.k8s.io/v1/mutatingwebhookconfigurations";
const VALIDATING: &str = "/apis/admissionregistration.k8s.io/v1/validatingwebhookconfigurations";
const CONFIG_MAPS: &str = "/api/v1/namespaces/default/configmaps";

/// A server whose path says how it answers, and the reviews that it was sent.
struct Webhooks {
    port: u16,
    ca: String,
    seen: Arc<Mutex<Vec<(String, Value)>>>,
}

fn base64(bytes: impl AsRef<[u8]>) -> String {
    base64::engine::general_purpose::STANDARD.encode(bytes)
}

/// How a path answers a request.
fn response(path: &str, request: &Value) -> Value {
    let patch = |operations: Value| json!({"allowed": true, "patchType": "JSONPatch", "patch": base64(operations.to_string())});
    let count = |key: &str| request["object"]["data"][key].as_str().map_or(0, str::len);
    let more = |key: &str| {
        patch(json!([{"op": "add", "path": format!("/data/{key}"), "value": "x".repeat(count(key) + 1)}]))
    };
    match path {
        "/first" => more("first"),
        "/second" => more("second"),
        "/warn" => json!({"allowed": true, "warnings": ["mind the gap"]}),
        "/merge" => json!({"allowed": true, "patchType": "MergePatch", "patch": base64("{\"data\": {}}")}),
        "/merge-list" => {
            json!({"allowed": true, "patchType": "MergePatch", "patch": base64("[{\"op\": \"remove\", \"path\": \"/data\"}]")})
        }
        "/note" => json!({"allowed": true, "auditAnnotations": {"seen": "yes", "x/y": "no", "": "no"}}),
        "/same" => {
            let mut same = patch(json!([{"op": "replace", "path": "/data/own", "value": "1"}]));
            same["auditAnnotations"] = json!({"left": "alone"});
            same
        }
        "/deny" => {
            json!({"allowed": false, "status": {"message": "no such luck", "reason": "Invalid", "code": 422}})
        }
        "/deny-delete" if request["operation"] == "DELETE" => {
            json!({"allowed": false, "status": {"message": "it stays"}})
        }
        "/sidecar" => patch(
            json!([{"op": "add", "path": "/spec/containers/-", "value": {"name": "side", "image": "side"}}]),
        ),
        "/sidecar-once" if request["object"]["spec"]["containers"][1].is_null() => patch(
            json!([{"op": "add", "path": "/spec/containers/-", "value": {"name": "side", "image": "side"}}]),
        ),
        "/annotate" => patch(json!([{"op": "add", "path": "/metadata/annotations", "value": {"a": "b"}}])),
        "/spec" => patch(
            json!([{"op": "add", "path": "/spec/unknown", "value": 1}, {"op": "add", "path": "/spec/size", "value": 3}]),
        ),
        "/replicas" => patch(json!([{"op": "replace", "path": "/spec/replicas", "value": 5}])),
        _ => json!({"allowed": true}),
    }
}

/// What is no review at all.
fn no_review(path: &str, review: &Value) -> Option<Response<Full<Bytes>>> {
    let uid = &review["request"]["uid"];
    let (code, body) = match path {
        "/code-500" => (500, "boom".to_owned()),
        "/code-404" => (404, "nothing".to_owned()),
        "/again" => (307, "/code-403".to_owned()),
        "/beside" => (308, "code-403".to_owned()),
        "/around" => (307, "/around".to_owned()),
        "/nowhere" => (307, String::new()),
        // The one who comes here by GET is refused, too.
        "/moved" => (301, "/code-403".to_owned()),
        "/code-403" => (403, format!("not for {}", review["kind"])),
        "/empty" => (200, String::new()),
        "/other" => (
            200,
            json!({"apiVersion": "admission.k8s.io/v1", "kind": "Other"}).to_string(),
        ),
        "/bare" => (
            200,
            json!({"response": {"uid": uid, "allowed": true}}).to_string(),
        ),
        _ => return None,
    };
    let answer = Response::builder()
        .status(code)
        .header("content-type", "text/plain")
        .header("location", if code / 100 == 3 { &body } else { "" });
    Some(answer.body(Full::new(Bytes::from(body))).expect("an answer"))
}

impl Webhooks {
    async fn start(cluster: &Cluster) -> Webhooks {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let port = listener.local_addr().expect("an address").port();
        let identity = cluster
            .pki
            .serving("webhook", "webhook", &["localhost".to_string()])
            .expect("a certificate");
        let tls = skiff_pki::server_config(&identity, None).expect("TLS");
        let acceptor = tokio_rustls::TlsAcceptor::from(Arc::new(tls));
        let seen: Arc<Mutex<Vec<(String, Value)>>> = Arc::default();
        let all = seen.clone();
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let (acceptor, all) = (acceptor.clone(), all.clone());
                tokio::spawn(async move {
                    let Ok(stream) = acceptor.accept(stream).await else {
                        return;
                    };
                    let service = hyper::service::service_fn(
                        move |request: http::Request<hyper::body::Incoming>| {
                            let all = all.clone();
                            async move {
                                let path = request.uri().path().to_owned();
                                let method = request.method().clone();
                                assert_eq!(request.headers()["user-agent"], "kube-apiserver-admission");
                                let body = request.into_body().collect().await.expect("a body").to_bytes();
                                let review: Value = match method {
                                    http::Method::GET => Value::Null,
                                    _ => serde_json::from_slice(&body).expect("JSON"),
                                };
                                if path == "/hang" {
                                    std::future::pending::<()>().await;
                                }
                                if let Some(answer) = no_review(&path, &review) {
                                    return Ok(answer);
                                }
                                let mut response = response(&path, &review["request"]);
                                response["uid"] = review["request"]["uid"].clone();
                                let answer = json!({"apiVersion": review["apiVersion"], "kind": "AdmissionReview", "response": response});
                                all.lock().expect("a lock").push((path, review));
                                Ok::<Response<Full<Bytes>>, std::convert::Infallible>(Response::new(
                                    Full::new(Bytes::from(answer.to_string())),
                                ))
                            }
                        },
                    );
                    let _ = hyper::server::conn::http1::Builder::new()
                        .serve_connection(TokioIo::new(stream), service)
                        .await;
                });
            }
        });
        Webhooks {
            port,
            ca: base64(cluster.pki.ca_certificate()),
            seen,
        }
    }

    /// A webhook at a path for all writes of a resource, with `more` set on top.
    fn hook(&self, path: &str, group: &str, resources: &str, more: Value) -> Value {
        let mut hook = json!({"name": format!("{}.example.com", path.trim_matches('/')),
            "clientConfig": {"url": format!("https://localhost:{}{path}", self.port), "caBundle": self.ca},
            "rules": [{"operations": ["*"], "apiGroups": [group], "apiVersions": ["*"], "resources": [resources]}],
            "sideEffects": "None", "admissionReviewVersions": ["v1"]});
        for (key, value) in more.as_object().expect("an object") {
            hook[key] = value.clone();
        }
        hook
    }

    /// Configures webhooks, and waits until they are asked.
    async fn configure(&self, cluster: &Cluster, uri: &str, name: &str, mut hooks: Vec<Value>) {
        let ready = format!("/ready-{name}");
        hooks.push(self.hook(
            &ready,
            "",
            "configmaps",
            json!({"matchConditions": [
            {"name": "marker", "expression": "request.?name.orValue('') == 'marker'"}]}),
        ));
        let kind = if uri == MUTATING { "Mutating" } else { "Validating" };
        let made = cluster
            .post(uri, json!({"apiVersion": "admissionregistration.k8s.io/v1", "kind": format!("{kind}WebhookConfiguration"),
                "metadata": {"name": name}, "webhooks": hooks}))
            .await;
        assert_eq!(made.code, 201, "{}", made.text);
        let began = Instant::now();
        loop {
            let _ = cluster
                .post(
                    &format!("{CONFIG_MAPS}?dryRun=All"),
                    config_map("marker", json!({})),
                )
                .await;
            if self.paths().contains(&ready) {
                break;
            }
            assert!(began.elapsed() < Duration::from_secs(60), "never asked");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        self.seen.lock().expect("a lock").clear();
    }

    fn paths(&self) -> Vec<String> {
        let seen = self.seen.lock().expect("a lock");
        seen.iter().map(|(path, _)| path.clone()).collect()
    }

    fn last(&self) -> Value {
        let seen = self.seen.lock().expect("a lock");
        seen.last().expect("a review").1["request"].clone()
    }
}

fn config_map(name: &str, labels: Value) -> Value {
    json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name, "labels": labels}, "data": {"own": "1"}})
}

#[tokio::test]
async fn mutating_webhooks_build_on_one_another() {
    let cluster = Cluster::start().await;
    let webhooks = Webhooks::start(&cluster).await;
    let selected =
        json!({"objectSelector": {"matchLabels": {"mutate": "yes"}}, "reinvocationPolicy": "IfNeeded"});
    let hooks = vec![
        webhooks.hook("/first", "", "configmaps", selected.clone()),
        webhooks.hook(
            "/second",
            "",
            "configmaps",
            json!({"objectSelector": {"matchLabels": {"mutate": "yes"}}}),
        ),
        webhooks.hook(
            "/sidecar",
            "",
            "pods",
            json!({"rules": [
            {"operations": ["CREATE"], "apiGroups": [""], "apiVersions": ["v1"], "resources": ["pods"]}]}),
        ),
        webhooks.hook("/replicas", "apps", "deployments/scale", json!({})),
    ];
    webhooks.configure(&cluster, MUTATING, "a", hooks).await;

    // The first is asked again because the second changed the object; the second is content with one time.
    let made = cluster
        .post(CONFIG_MAPS, config_map("a", json!({"mutate": "yes"})))
        .await;
    assert_eq!(
        made.json["data"],
        json!({"own": "1", "first": "xx", "second": "x"}),
        "{}",
        made.text
    );
    assert_eq!(webhooks.paths(), ["/first", "/second", "/first"]);
    let request = &webhooks.seen.lock().expect("a lock")[0].1["request"].clone();
    assert_eq!(request["operation"], "CREATE");
    assert_eq!(
        request["kind"],
        json!({"group": "", "version": "v1", "kind": "ConfigMap"})
    );
    assert_eq!(
        request["requestResource"],
        json!({"group": "", "version": "v1", "resource": "configmaps"})
    );
    assert_eq!(
        (request["name"].as_str(), request["namespace"].as_str()),
        (Some("a"), Some("default"))
    );
    assert_eq!(request["userInfo"]["username"], "admin");
    assert_eq!(request["options"]["kind"], "CreateOptions");
    assert_eq!(
        (&request["oldObject"], &request["dryRun"]),
        (&Value::Null, &json!(false))
    );
    assert_eq!(request["object"]["data"], json!({"own": "1"}));

    let unselected = cluster.post(CONFIG_MAPS, config_map("b", json!({}))).await;
    assert_eq!(unselected.json["data"], json!({"own": "1"}));

    let patched = cluster
        .patch(
            &format!("{CONFIG_MAPS}/a"),
            "merge-patch",
            json!({"data": {"own": "2"}}),
        )
        .await;
    assert_eq!(patched.json["data"]["first"], "xxxx", "{}", patched.text);
    assert_eq!(webhooks.last()["operation"], "UPDATE");
    assert_eq!(webhooks.last()["options"]["kind"], "UpdateOptions");
    assert_eq!(webhooks.last()["oldObject"]["data"]["own"], "1");

    // What a webhook adds is defaulted, and the built-in plugins see it.
    let pod = json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "p"}, "spec": {"containers": [{"name": "c", "image": "c"}]}});
    let account = json!({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "default"}});
    cluster
        .post("/api/v1/namespaces/default/serviceaccounts", account)
        .await;
    let made = cluster.post("/api/v1/namespaces/default/pods", pod).await;
    assert_eq!(made.code, 201, "{}", made.text);
    let side = &made.json["spec"]["containers"][1];
    assert_eq!(
        (&side["name"], &side["imagePullPolicy"]),
        (&json!("side"), &json!("Always"))
    );
    assert_eq!(
        side["volumeMounts"][0]["mountPath"],
        "/var/run/secrets/kubernetes.io/serviceaccount"
    );

    let deployment = json!({"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "d"}, "spec": {"selector": {"matchLabels": {"a": "b"}},
        "template": {"metadata": {"labels": {"a": "b"}}, "spec": {"containers": [{"name": "c", "image": "c"}]}}}});
    let deployments = "/apis/apps/v1/namespaces/default/deployments";
    assert_eq!(cluster.post(deployments, deployment).await.code, 201);
    let scaled = cluster
        .patch(
            &format!("{deployments}/d/scale"),
            "merge-patch",
            json!({"spec": {"replicas": 2}}),
        )
        .await;
    assert_eq!(scaled.json["spec"]["replicas"], 5, "{}", scaled.text);
    assert_eq!(
        webhooks.last()["kind"],
        json!({"group": "autoscaling", "version": "v1", "kind": "Scale"})
    );
    assert_eq!(webhooks.last()["subResource"], "scale");
    assert_eq!(webhooks.last()["object"]["spec"]["replicas"], 2);

    // Configurations are nobody's business but the user's.
    let all = webhooks.hook("/deny", "*", "*/*", json!({}));
    webhooks.configure(&cluster, VALIDATING, "all", vec![all]).await;
    let gone = cluster.delete(&format!("{VALIDATING}/all"), json!({})).await;
    assert_eq!(gone.code, 200, "{}", gone.text);
}

#[tokio::test]
async fn validating_webhooks_refuse() {
    let cluster = Cluster::start().await;
    let webhooks = Webhooks::start(&cluster).await;
    let only = |name: &str| json!({"objectSelector": {"matchLabels": {"to": name}}});
    let with = |name: &str, key: &str, value: Value| {
        let mut more = only(name);
        more[key] = value;
        more
    };
    // Nobody listens on a port that was closed.
    let closed = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let dead = closed.local_addr().expect("an address").port();
    drop(closed);
    let dead_client = json!({"url": format!("https://localhost:{dead}/"), "caBundle": webhooks.ca});
    let mut fails = webhooks.hook(
        "/fails",
        "",
        "configmaps",
        with("fails", "clientConfig", dead_client.clone()),
    );
    fails["matchPolicy"] = json!("Exact");
    let mut ignored = webhooks.hook(
        "/ignored",
        "",
        "configmaps",
        with("ignored", "clientConfig", dead_client),
    );
    ignored["failurePolicy"] = json!("Ignore");
    let mut conditional = webhooks.hook("/deny", "", "configmaps", only("some"));
    conditional["name"] = json!("conditional.example.com");
    conditional["matchConditions"] = json!([{"name": "not-mine", "expression": "object.data.own != '1'"},
        {"name": "allowed", "expression": "authorizer.group('').resource('secrets').check('get').allowed()"}]);
    let hooks = vec![
        webhooks.hook("/deny", "", "configmaps", only("deny")),
        webhooks.hook("/warn", "", "configmaps", only("warn")),
        webhooks.hook(
            "/hang",
            "",
            "configmaps",
            with("hang", "timeoutSeconds", json!(1)),
        ),
        webhooks.hook(
            "/effects",
            "",
            "configmaps",
            with("effects", "sideEffects", json!("Unknown")),
        ),
        webhooks.hook(
            "/old",
            "",
            "configmaps",
            with("old", "admissionReviewVersions", json!(["v0", "v1"])),
        ),
        webhooks.hook("/deny-delete", "", "configmaps", only("keep")),
        webhooks.hook(
            "/space",
            "",
            "configmaps",
            json!({"namespaceSelector": {"matchLabels": {"watched": "yes"}}}),
        ),
        webhooks.hook("/first", "", "configmaps", only("patches")),
        conditional,
        fails,
        ignored,
    ];
    // The versions of side effects that v1 takes are few.
    let refused = cluster
        .post(
            VALIDATING,
            json!({"apiVersion": "admissionregistration.k8s.io/v1", "kind": "ValidatingWebhookConfiguration",
            "metadata": {"name": "bad"}, "webhooks": [hooks[3]]}),
        )
        .await;
    assert_eq!(refused.code, 422, "{}", refused.text);
    let hooks = hooks
        .into_iter()
        .filter(|hook| hook["sideEffects"] == "None")
        .collect();
    webhooks.configure(&cluster, VALIDATING, "v", hooks).await;

    let check = async |to: &str, code: u16, message: &str| {
        let reply = cluster
            .post(CONFIG_MAPS, config_map(&format!("to-{to}"), json!({"to": to})))
            .await;
        let found = reply.json["message"].as_str().unwrap_or("");
        assert_eq!((reply.code, found), (code, message), "{to}");
        reply
    };
    let denied = check(
        "deny",
        422,
        "admission webhook \"deny.example.com\" denied the request: no such luck",
    )
    .await;
    assert_eq!(denied.json["reason"], "Invalid");
    let warned = check("warn", 201, "").await;
    assert_eq!(warned.headers["warning"], "299 - \"mind the gap\"");
    check("ignored", 201, "").await;
    check("some", 201, "").await;
    check("old", 201, "").await;
    let port = webhooks.port;
    check("hang", 500, &format!(
        "Internal error occurred: failed calling webhook \"hang.example.com\": failed to call webhook: Post \"https://localhost:{port}/hang?timeout=1s\": context deadline exceeded")).await;
    check("fails", 500, &format!(
        "Internal error occurred: failed calling webhook \"fails.example.com\": failed to call webhook: Post \"https://localhost:{dead}/?timeout=10s\": dial tcp localhost:{dead}: connect: connection refused")).await;
    check("patches", 500, "Internal error occurred: failed calling webhook \"first.example.com\": received invalid webhook response: validating webhook may not return response.patch").await;

    let kept = config_map("keep", json!({"to": "keep"}));
    assert_eq!(cluster.post(CONFIG_MAPS, kept).await.code, 201);
    let stays = cluster.delete(&format!("{CONFIG_MAPS}/keep"), json!({})).await;
    assert_eq!(
        (stays.code, stays.json["message"].as_str()),
        (
            400,
            Some("admission webhook \"deny-delete.example.com\" denied the request: it stays")
        )
    );
    let request = webhooks.last();
    assert_eq!(
        (&request["object"], &request["oldObject"]["metadata"]["name"]),
        (&Value::Null, &json!("keep"))
    );
    assert_eq!(request["options"]["kind"], "DeleteOptions");

    webhooks.seen.lock().expect("a lock").clear();
    let changed = cluster
        .patch(
            &format!("{CONFIG_MAPS}/to-some"),
            "merge-patch",
            json!({"data": {"own": "2"}}),
        )
        .await;
    assert_eq!(changed.code, 422, "{}", changed.text);
    // What the cache held was what the store has: a refusal is not asked for twice, nor is a write of nothing.
    assert_eq!(webhooks.paths(), ["/deny"]);
    webhooks.seen.lock().expect("a lock").clear();
    let same = config_map("to-warn", json!({"to": "warn"}));
    assert_eq!(
        cluster.put(&format!("{CONFIG_MAPS}/to-warn"), same).await.code,
        200
    );
    assert_eq!(webhooks.paths(), ["/warn"]);

    // The objects of a collection go unnamed.
    let none = cluster
        .delete(&format!("{CONFIG_MAPS}?labelSelector=to%3Dkeep"), json!({}))
        .await;
    assert_eq!(none.code, 400, "{}", none.text);
    let request = webhooks.last();
    assert_eq!(
        (request.get("name"), &request["oldObject"]["metadata"]["name"]),
        (None, &json!("keep"))
    );

    webhooks.seen.lock().expect("a lock").clear();
    let namespace = json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "watched", "labels": {"watched": "yes"}}});
    assert_eq!(cluster.post("/api/v1/namespaces", namespace).await.code, 201);
    let made = cluster
        .post(
            "/api/v1/namespaces/watched/configmaps?dryRun=All",
            config_map("x", json!({})),
        )
        .await;
    assert_eq!(made.code, 201, "{}", made.text);
    assert_eq!(webhooks.paths(), ["/space"]);
    assert_eq!(webhooks.last()["dryRun"], true);
}

#[tokio::test]
async fn answers_that_are_none() {
    let cluster = Cluster::start().await;
    let webhooks = Webhooks::start(&cluster).await;
    let only = |name: &str| json!({"objectSelector": {"matchLabels": {"to": name}}});
    let paths = ["/code-500", "/code-404", "/empty", "/other", "/bare", "//again/"];
    let paths: Vec<&str> = paths
        .into_iter()
        .chain(["/beside", "/around", "/nowhere", "/moved"])
        .collect();
    let hooks = paths
        .into_iter()
        .map(|path| webhooks.hook(path, "", "configmaps", only(path.trim_matches('/'))));
    webhooks
        .configure(&cluster, VALIDATING, "bad", hooks.collect())
        .await;
    let check = async |to: &str, message: &str| {
        let reply = cluster
            .post(CONFIG_MAPS, config_map(&format!("to-{to}"), json!({"to": to})))
            .await;
        let expected =
            format!("Internal error occurred: failed calling webhook \"{to}.example.com\": {message}");
        assert_eq!(
            (reply.code, reply.json["message"].as_str()),
            (500, Some(expected.as_str()))
        );
    };
    check(
        "code-500",
        "failed to call webhook: an error on the server (\"boom\") has prevented the request from succeeding",
    )
    .await;
    check(
        "code-404",
        "failed to call webhook: the server could not find the requested resource",
    )
    .await;
    // Redirects are followed.
    let posted = "failed to call webhook: not for \"AdmissionReview\"";
    check("again", posted).await;
    check("beside", posted).await;
    check("moved", "failed to call webhook: not for null").await;
    check(
        "around",
        "failed to call webhook: Post \"/around\": stopped after 10 redirects",
    )
    .await;
    check(
        "nowhere",
        "failed to call webhook: the server responded with the status code 307 but did not return more information",
    )
    .await;
    check(
        "empty",
        "failed to call webhook: 0-length response with status code: 200 and content type: text/plain",
    )
    .await;
    check("other", "failed to call webhook: no kind \"Other\" is registered for version \"admission.k8s.io/v1\" in scheme \"pkg/runtime/scheme.go:111\"").await;
    check("bare", "received invalid webhook response: expected webhook response of admission.k8s.io/v1, Kind=AdmissionReview, got /, Kind=").await;

    // A namespace is in itself.
    let see = webhooks.hook("/see", "", "namespaces", json!({}));
    webhooks.configure(&cluster, VALIDATING, "see", vec![see]).await;
    let namespace = json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "own"}});
    assert_eq!(cluster.post("/api/v1/namespaces", namespace).await.code, 201);
    assert_eq!(webhooks.last()["namespace"], "own");
}

#[tokio::test]
async fn objects_are_shown_in_the_version_of_the_rule() {
    let cluster = Cluster::start().await;
    let webhooks = Webhooks::start(&cluster).await;
    let definition = json!({"apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition", "metadata": {"name": "boats.example.com"},
        "spec": {"group": "example.com", "scope": "Namespaced", "names": {"plural": "boats", "kind": "Boat", "listKind": "BoatList", "singular": "boat"},
            "versions": [
                {"name": "v1", "served": true, "storage": true, "schema": {"openAPIV3Schema": {"type": "object", "properties": {"spec": {"type": "object", "properties": {
                    "size": {"type": "integer"}, "sails": {"type": "integer", "default": 2}}}}}}},
                {"name": "v2", "served": true, "storage": false, "schema": {"openAPIV3Schema": {"type": "object", "properties": {"spec": {"type": "object", "properties": {
                    "size": {"type": "integer"}, "sails": {"type": "integer", "default": 2}}}}}}}]}});
    let made = cluster
        .post(
            "/apis/apiextensions.k8s.io/v1/customresourcedefinitions",
            definition,
        )
        .await;
    assert_eq!(made.code, 201, "{}", made.text);
    let boats = "/apis/example.com/v2/namespaces/default/boats";
    let began = Instant::now();
    while cluster.get(boats).await.code != 200 {
        assert!(began.elapsed() < Duration::from_secs(60), "never served");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    let rule = |group: &str, version: &str, resource: &str| json!({"rules": [{"operations": ["CREATE"], "apiGroups": [group], "apiVersions": [version], "resources": [resource]}]});
    let mut exact = rule("autoscaling", "v1", "horizontalpodautoscalers");
    exact["matchPolicy"] = json!("Exact");
    let hooks = vec![
        webhooks.hook(
            "/hpa",
            "",
            "",
            rule("autoscaling", "v1", "horizontalpodautoscalers"),
        ),
        webhooks.hook("/exact", "", "", exact),
        webhooks.hook("/spec", "", "", rule("example.com", "v1", "boats")),
    ];
    webhooks.configure(&cluster, MUTATING, "versions", hooks).await;

    let scaler = json!({"apiVersion": "autoscaling/v2", "kind": "HorizontalPodAutoscaler", "metadata": {"name": "h"}, "spec": {"maxReplicas": 3,
        "scaleTargetRef": {"apiVersion": "apps/v1", "kind": "Deployment", "name": "d"},
        "metrics": [{"type": "Resource", "resource": {"name": "cpu", "target": {"type": "Utilization", "averageUtilization": 70}}}]}});
    let made = cluster
        .post(
            "/apis/autoscaling/v2/namespaces/default/horizontalpodautoscalers",
            scaler,
        )
        .await;
    assert_eq!(made.code, 201, "{}", made.text);
    assert_eq!(webhooks.paths(), ["/hpa"]);
    let request = webhooks.last();
    assert_eq!(request["kind"]["version"], "v1");
    assert_eq!(request["requestKind"]["version"], "v2");
    assert_eq!(request["object"]["apiVersion"], "autoscaling/v1");
    assert_eq!(request["object"]["spec"]["targetCPUUtilizationPercentage"], 70);

    let boat = json!({"apiVersion": "example.com/v2", "kind": "Boat", "metadata": {"name": "b"}, "spec": {}});
    let made = cluster.post(boats, boat).await;
    assert_eq!(webhooks.last()["object"]["apiVersion"], "example.com/v1");
    // What the webhook set and the schema does not know is gone again.
    assert_eq!(made.json["apiVersion"], "example.com/v2", "{}", made.text);
    assert_eq!(made.json["spec"], json!({"size": 3, "sails": 2}));
    let boat = json!({"apiVersion": "example.com/v1", "kind": "Boat", "metadata": {"name": "c"}, "spec": {}});
    let made = cluster
        .post("/apis/example.com/v1/namespaces/default/boats", boat)
        .await;
    assert_eq!(made.json["spec"], json!({"size": 3, "sails": 2}), "{}", made.text);
}

#[tokio::test]
async fn webhooks_are_asked_again_when_plugins_changed_what_they_left() {
    let cluster = Cluster::start().await;
    let webhooks = Webhooks::start(&cluster).await;
    let hook = |path: &str, policy: &str| {
        let asked = json!({"objectSelector": {"matchLabels": {"ask": path.trim_matches('/'), "policy": policy}},
            "reinvocationPolicy": policy});
        let mut hook = webhooks.hook(path, "", "pods", asked);
        hook["name"] = json!(format!("{}-{}.example.com", &path[1..], policy.to_lowercase()));
        hook
    };
    let hooks = vec![
        hook("/sidecar-once", "IfNeeded"),
        hook("/sidecar-once", "Never"),
        hook("/annotate", "IfNeeded"),
    ];
    webhooks.configure(&cluster, MUTATING, "a", hooks).await;
    let account = json!({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "default"}});
    cluster
        .post("/api/v1/namespaces/default/serviceaccounts", account)
        .await;
    let make = async |name: &str, path: &str, policy: &str| {
        webhooks.seen.lock().expect("a lock").clear();
        let pod = json!({"apiVersion": "v1", "kind": "Pod",
            "metadata": {"name": name, "labels": {"ask": path, "policy": policy}},
            "spec": {"containers": [{"name": "c", "image": "c"}]}});
        let made = cluster.post("/api/v1/namespaces/default/pods", pod).await;
        assert_eq!(made.code, 201, "{}", made.text);
        assert!(made.json["spec"]["containers"][0]["volumeMounts"][0].is_object());
        webhooks.paths()
    };
    // The container that came has its token mounted only after that.
    assert_eq!(
        make("a", "sidecar-once", "IfNeeded").await,
        ["/sidecar-once", "/sidecar-once"]
    );
    let side = &webhooks.last()["object"]["spec"]["containers"][1];
    assert!(side["volumeMounts"][0].is_object(), "{side}");
    assert_eq!(make("b", "sidecar-once", "Never").await, ["/sidecar-once"]);
    // No plugin minds an annotation.
    assert_eq!(make("c", "annotate", "IfNeeded").await, ["/annotate"]);
}

#[tokio::test]
async fn the_audit_log_knows_what_webhooks_did() {
    let rules = "\
- {level: Request, userGroups: [closely], resources: [{group: '', resources: [configmaps]}]}
- {level: Metadata}";
    let audited = Audited::start(rules).await;
    let cluster = &audited.cluster;
    let webhooks = Webhooks::start(cluster).await;
    let labelled = json!({"objectSelector": {"matchLabels": {"ask": "yes"}}, "failurePolicy": "Ignore"});
    let mut again = labelled.clone();
    again["reinvocationPolicy"] = json!("IfNeeded");
    let hook = |path: &str, more: &Value| webhooks.hook(path, "", "configmaps", more.clone());
    let mutating = vec![
        hook("/first", &again),
        hook("/same", &labelled),
        hook("/code-500", &labelled),
        hook("/second", &labelled),
    ];
    webhooks.configure(cluster, MUTATING, "m", mutating).await;
    let validating = vec![hook("/note", &labelled), hook("/code-404", &labelled)];
    webhooks.configure(cluster, VALIDATING, "v", validating).await;

    let done = |name: &str, mutated: bool| {
        json!(format!(
            "{{\"configuration\":\"m\",\"webhook\":\"{name}.example.com\",\"mutated\":{mutated}}}"
        ))
    };
    let patch = |name: &str, op: &str, path: &str, value: &str| {
        json!(format!(
            "{{\"configuration\":\"m\",\"webhook\":\"{name}.example.com\",\"patch\":[{{\"op\":\"{op}\",\"path\":\"/data/{path}\",\"value\":\"{value}\"}}],\"patchType\":\"JSONPatch\"}}"
        ))
    };
    let mut expected = json!({
        "authorization.k8s.io/decision": "allow",
        "authorization.k8s.io/reason": "",
        "mutation.webhook.admission.k8s.io/round_0_index_0": done("first", true),
        "mutation.webhook.admission.k8s.io/round_0_index_1": done("same", false),
        "mutation.webhook.admission.k8s.io/round_0_index_2": done("code-500", false),
        "mutation.webhook.admission.k8s.io/round_0_index_3": done("second", true),
        "mutation.webhook.admission.k8s.io/round_1_index_0": done("first", true),
        "same.example.com/left": "alone",
        "failed-open.mutation.webhook.admission.k8s.io/round_0_index_2": "code-500.example.com",
        "note.example.com/seen": "yes",
        "failed-open.validating.webhook.admission.k8s.io/round_0_index_1": "code-404.example.com",
    });
    let make = async |name: &str, group: &str| {
        let user = skiff_auth::UserInfo::new("admin", ["system:masters", group]);
        let headers = [("content-type", "application/json")];
        let body = config_map(name, json!({"ask": "yes"})).to_string();
        let made = cluster
            .send_as(cluster.server.service(user), "POST", CONFIG_MAPS, &headers, body)
            .await;
        assert_eq!(made.code, 201, "{}", made.text);
        audited.event_of(&made)["annotations"].clone()
    };
    assert_eq!(make("a", "from-afar").await, expected);
    // What was written is told only where what is written is.
    expected["patch.webhook.admission.k8s.io/round_0_index_0"] = patch("first", "add", "first", "x");
    expected["patch.webhook.admission.k8s.io/round_0_index_1"] = patch("same", "replace", "own", "1");
    expected["patch.webhook.admission.k8s.io/round_0_index_3"] = patch("second", "add", "second", "x");
    expected["patch.webhook.admission.k8s.io/round_1_index_0"] = patch("first", "add", "first", "xx");
    assert_eq!(make("b", "closely").await, expected);
}

#[tokio::test]
async fn scopes_conditions_and_patches_are_looked_at() {
    let cluster = Cluster::start().await;
    let webhooks = Webhooks::start(&cluster).await;
    let deny = |name: &str, resource: &str, more: Value| {
        let mut hook = webhooks.hook(
            "/deny",
            "",
            resource,
            json!({"objectSelector": {"matchLabels": {"to": name}}}),
        );
        hook["name"] = json!(format!("{name}.example.com"));
        for (key, value) in more.as_object().expect("an object") {
            hook[key] = value.clone();
        }
        hook
    };
    let scoped = |resource: &str, scope: &str| json!({"rules": [{"operations": ["CREATE"], "apiGroups": [""], "apiVersions": ["v1"], "resources": [resource], "scope": scope}]});
    let broken = json!([{"name": "broken", "expression": "object.data.absent == 'x'"}]);
    let hooks = vec![
        deny("in-cluster", "configmaps", scoped("configmaps", "Cluster")),
        deny("in-namespace", "configmaps", scoped("configmaps", "Namespaced")),
        deny("space-in-cluster", "namespaces", scoped("namespaces", "Cluster")),
        deny(
            "space-in-namespace",
            "namespaces",
            scoped("namespaces", "Namespaced"),
        ),
        deny("broken", "configmaps", json!({"matchConditions": broken})),
        deny(
            "broken-ignored",
            "configmaps",
            json!({"matchConditions": broken, "failurePolicy": "Ignore"}),
        ),
    ];
    webhooks.configure(&cluster, VALIDATING, "v", hooks).await;
    let mutating = ["/merge", "/merge-list"].map(|path| {
        let to = json!({"objectSelector": {"matchLabels": {"to": path.trim_matches('/')}}});
        webhooks.hook(path, "", "configmaps", to)
    });
    webhooks
        .configure(&cluster, MUTATING, "m", mutating.to_vec())
        .await;
    let check = async |to: &str, code: u16, part: &str| {
        let (uri, object) = if to.starts_with("space") {
            let metadata = json!({"name": to, "labels": {"to": to}});
            ("/api/v1/namespaces", json!({"metadata": metadata}))
        } else {
            (CONFIG_MAPS, config_map(to, json!({"to": to})))
        };
        let reply = cluster.post(uri, object).await;
        assert_eq!(reply.code, code, "{to}: {}", reply.text);
        let message = reply.json["message"].as_str().unwrap_or("");
        assert!(message.contains(part), "{to}: {message}");
    };
    check("in-cluster", 201, "").await;
    check("in-namespace", 422, "no such luck").await;
    check("space-in-cluster", 422, "no such luck").await;
    check("space-in-namespace", 201, "").await;
    check("broken", 403, "no such key: absent").await;
    check("broken-ignored", 201, "").await;
    check("merge", 500, "received undecodable patch in webhook response").await;
    check("merge-list", 500, "unsupported patch type \"MergePatch\"").await;
}
