//! An extension API server behind the front door: found, checked, proxied to, and merged into discovery.

mod support;

use std::sync::Arc;
use std::time::{Duration, Instant};

use base64::Engine;
use bytes::Bytes;
use http::{Request, Response};
use http_body_util::Full;
use hyper_util::rt::TokioIo;
use serde_json::{Value, json};
use skiff_auth::UserInfo;
use support::Cluster;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;
use x509_parser::prelude::{FromDer, X509Certificate};

const GROUP: &str = "wardle.example.com";
const API_SERVICE: &str = "/apis/apiregistration.k8s.io/v1/apiservices";

/// Answers discovery, and tells of every other request who it came from.
fn answer(request: &Request<hyper::body::Incoming>, proxy: &str) -> Response<Full<Bytes>> {
    let (mut content_type, mut code) = ("application/json", 200);
    let kind = json!({"group": GROUP, "version": "v1", "kind": "Flunder"});
    let body = match request.uri().path() {
        "/apis" => {
            content_type = "application/json;g=apidiscovery.k8s.io;v=v2;as=APIGroupDiscoveryList";
            json!({"kind": "APIGroupDiscoveryList", "items": [{"metadata": {"name": GROUP}, "versions": [
                {"version": "v1", "resources": [{"resource": "flunders", "responseKind": kind, "scope": "Namespaced", "verbs": ["get"]}]}]}]})
        }
        "/apis/wardle.example.com/v1" => {
            json!({"kind": "APIResourceList", "groupVersion": "wardle.example.com/v1", "resources": []})
        }
        "/openapi/v3" => {
            json!({"paths": {"apis/wardle.example.com/v1": {"serverRelativeURL": "/openapi/v3/apis/wardle.example.com/v1?hash=A"}}})
        }
        "/openapi/v2" => {
            json!({"swagger": "2.0", "paths": {"/apis/wardle.example.com/v1/flunders": {"get": {"responses": {"200": {"description": "OK"}}}}, "/apis/other/v1/x": {}},
                "definitions": {"com.example.Flunder": {"type": "object"}}})
        }
        "/apis/wardle.example.com/v1/connect" => {
            let upgrade = Response::builder().status(101);
            let upgrade = upgrade.header("connection", "Upgrade").header("upgrade", "echo");
            return upgrade.body(Full::default()).expect("a response");
        }
        "/apis/wardle.example.com/v1/odd" => {
            let odd = Response::builder()
                .status(418)
                .header("content-type", "text/x-odd");
            let odd = odd
                .header("x-odd", "a")
                .header("x-odd", "b")
                .header("warning", "299 - \"w\"");
            let body = Bytes::from_static(b"{\"not\": json\xff\0");
            return odd.body(Full::new(body)).expect("a response");
        }
        "/apis/wardle.example.com/v1/elsewhere" => {
            code = 302;
            json!({})
        }
        path => {
            let all = |name: &str| -> Vec<String> {
                let values = request.headers().get_all(name).iter();
                values
                    .map(|value| value.to_str().unwrap_or("").to_string())
                    .collect()
            };
            json!({"path": path, "query": request.uri().query(), "proxy": proxy, "user": all("x-remote-user"),
                "groups": all("x-remote-group"), "extra": all("x-remote-extra-reason"), "uid": all("x-remote-uid"),
                "authorization": all("authorization")})
        }
    };
    let mut builder = Response::builder()
        .status(code)
        .header("content-type", content_type);
    if code == 302 {
        builder = builder.header("location", "https://example.com/");
    }
    builder
        .body(Full::new(body.to_string().into()))
        .expect("a response")
}

async fn extension_server(cluster: &Cluster) -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let port = listener.local_addr().expect("an address").port();
    let names = ["api.default.svc".to_string()];
    let identity = cluster
        .pki
        .serving("extension", "extension", &names)
        .expect("a certificate");
    let proxies = cluster.pki.front_proxy().expect("a front proxy").ca;
    let tls = skiff_pki::server_config(&identity, Some(&proxies)).expect("TLS");
    let acceptor = tokio_rustls::TlsAcceptor::from(Arc::new(tls));
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            let acceptor = acceptor.clone();
            tokio::spawn(async move {
                let Ok(stream) = acceptor.accept(stream).await else {
                    return;
                };
                let shown = stream
                    .get_ref()
                    .1
                    .peer_certificates()
                    .and_then(|list| list.first().cloned());
                let proxy = shown.map_or(String::new(), |leaf| {
                    let (_, certificate) = X509Certificate::from_der(&leaf).expect("a certificate");
                    let name = certificate.subject().iter_common_name().next();
                    name.and_then(|name| name.as_str().ok()).unwrap_or("").to_string()
                });
                let service = hyper::service::service_fn(move |mut request| {
                    let answer = answer(&request, &proxy);
                    if answer.status() == 101 {
                        tokio::spawn(async move {
                            let upgraded = hyper::upgrade::on(&mut request).await.expect("upgrades");
                            let (mut from, mut to) = tokio::io::split(TokioIo::new(upgraded));
                            let _ = tokio::io::copy(&mut from, &mut to).await;
                        });
                    }
                    async move { Ok::<_, std::convert::Infallible>(answer) }
                });
                let _ = hyper::server::conn::http1::Builder::new()
                    .serve_connection(TokioIo::new(stream), service)
                    .with_upgrades()
                    .await;
            });
        }
    });
    port
}

/// Waits until a reader is content; what it waits for is done by tasks of the server.
async fn until(cluster: &Cluster, uri: &str, mut content: impl FnMut(&Value) -> bool) -> Value {
    let began = Instant::now();
    loop {
        let reply = cluster.get(uri).await;
        if content(&reply.json) {
            return reply.json;
        }
        assert!(began.elapsed() < Duration::from_secs(60), "{uri}: {}", reply.text);
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

fn condition(object: &Value) -> (String, String) {
    let condition = &object["status"]["conditions"][0];
    let text = |field: &str| condition[field].as_str().unwrap_or("").to_string();
    (text("status"), text("reason"))
}

/// Waits until the metrics show a line, or no longer show it.
async fn metrics_show(cluster: &Cluster, line: &str, shown: bool) {
    let began = Instant::now();
    loop {
        let text = cluster.get("/metrics").await.text;
        if text.lines().any(|present| present == line) == shown {
            return;
        }
        assert!(began.elapsed() < Duration::from_secs(60), "{line}:\n{text}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

#[tokio::test]
async fn an_extension_api_server() {
    let cluster = Cluster::start().await;
    let port = extension_server(&cluster).await;
    let ca = base64::engine::general_purpose::STANDARD.encode(cluster.pki.ca_certificate());
    let made = cluster
        .post(
            API_SERVICE,
            json!({"apiVersion": "apiregistration.k8s.io/v1", "kind": "APIService", "metadata": {"name": "v1.wardle.example.com"},
                "spec": {"group": GROUP, "version": "v1", "groupPriorityMinimum": 2000, "versionPriority": 200, "caBundle": ca,
                    "service": {"namespace": "default", "name": "api", "port": port}}}),
        )
        .await;
    assert_eq!(made.code, 201, "{}", made.text);
    let own = format!("{API_SERVICE}/v1.wardle.example.com");
    let found = until(&cluster, &own, |object| condition(object).1 == "ServiceNotFound").await;
    let message = &found["status"]["conditions"][0]["message"];
    assert_eq!(message, "service/api in \"default\" is not present");
    let unavailable = "aggregator_unavailable_apiservice{name=\"v1.wardle.example.com\"}";
    metrics_show(&cluster, &format!("{unavailable} 1"), true).await;
    let flunders = "/apis/wardle.example.com/v1/namespaces/default/flunders";
    let reply = cluster.get(flunders).await;
    assert_eq!((reply.code, reply.text.as_str()), (503, "service unavailable\n"));
    let stale = cluster.discovery("/apis").await;
    assert_eq!(version_of(&stale)["freshness"], "Stale");

    // The endpoints of a service may not be loopback addresses; the name of one may.
    let service = json!({"apiVersion": "v1", "kind": "Service", "metadata": {"name": "api"},
        "spec": {"type": "ExternalName", "externalName": "localhost"}});
    let made = cluster.post("/api/v1/namespaces/default/services", service).await;
    assert_eq!(made.code, 201, "{}", made.text);
    until(&cluster, &own, |object| {
        condition(object) == ("True".to_string(), "Passed".to_string())
    })
    .await;
    until(&cluster, flunders, |answer| answer["path"] == flunders).await;
    metrics_show(&cluster, &format!("{unavailable} 0"), true).await;

    let mut jane = UserInfo::new("jane", ["devs", "system:masters"]);
    jane.uid = "u-1".to_string();
    jane.extra
        .insert("reason".to_string(), vec!["because".to_string()]);
    let headers = [("authorization", "Bearer secret"), ("x-remote-group", "forged")];
    let uri = format!("{flunders}?limit=5");
    let reply = cluster
        .send_as(cluster.server.service(jane), "GET", &uri, &headers, "")
        .await;
    assert_eq!(
        reply.json,
        json!({"path": flunders, "query": "limit=5", "proxy": "front-proxy-client", "user": ["jane"],
            "groups": ["devs", "system:masters", "system:authenticated"], "extra": ["because"], "uid": ["u-1"],
            "authorization": []})
    );
    let reply = cluster.get("/apis/wardle.example.com/v1/elsewhere").await;
    assert_eq!(reply.code, 502, "a redirect is not followed, and not passed on");

    // What it answers is passed on as it is.
    let reply = cluster.get("/apis/wardle.example.com/v1/odd").await;
    assert_eq!(reply.code, 418, "{}", reply.text);
    let all = |name: &str| -> Vec<&str> {
        let values = reply.headers.get_all(name).iter();
        values.filter_map(|value| value.to_str().ok()).collect()
    };
    assert_eq!(
        (all("content-type"), all("x-odd"), all("warning")),
        (vec!["text/x-odd"], vec!["a", "b"], vec!["299 - \"w\""])
    );
    assert_eq!(&reply.bytes[..], b"{\"not\": json\xff\0");

    let groups = cluster.get("/apis").await.json;
    let names: Vec<&str> = groups["groups"]
        .as_array()
        .expect("groups")
        .iter()
        .filter_map(|group| group["name"].as_str())
        .collect();
    assert_eq!(names.first(), Some(&"apiregistration.k8s.io"));
    assert_eq!(names.last(), Some(&GROUP));
    assert_eq!(
        cluster.get("/apis/wardle.example.com").await.json["preferredVersion"]["version"],
        "v1"
    );
    let merged = cluster.discovery("/apis").await;
    let version = version_of(&merged);
    assert_eq!(
        (&version["freshness"], &version["resources"][0]["resource"]),
        (&json!("Current"), &json!("flunders"))
    );
    let url = "/openapi/v3/apis/wardle.example.com/v1?hash=A";
    until(&cluster, "/openapi/v3", |index| {
        index["paths"]["apis/wardle.example.com/v1"]["serverRelativeURL"] == url
    })
    .await;

    let both = |document: &Value| {
        let paths = document["paths"].as_object().expect("paths");
        paths.contains_key("/apis/wardle.example.com/v1/flunders") && paths.contains_key("/api/v1/pods")
    };
    let merged = until(&cluster, "/openapi/v2", both).await;
    assert_eq!(
        merged["definitions"]["com.example.Flunder"],
        json!({"type": "object"})
    );
    assert!(
        merged["paths"].get("/apis/other/v1/x").is_none(),
        "only its own group version"
    );

    // An upgrade leaves HTTP on both sides.
    let admin = cluster
        .pki
        .client("admin", "admin", Some("system:masters"))
        .expect("a certificate");
    let https = Https(support::Https::open(&cluster).await);
    let headers = [("connection", "Upgrade"), ("upgrade", "echo")];
    let response = https
        .send(&cluster, &admin, "/apis/wardle.example.com/v1/connect", &headers)
        .await;
    assert_eq!(response.status(), 101);
    let mut upgraded = TokioIo::new(hyper::upgrade::on(response).await.expect("upgrades"));
    upgraded.write_all(b"over and back").await.expect("writes");
    let mut echo = [0; 13];
    upgraded.read_exact(&mut echo).await.expect("reads");
    assert_eq!(&echo, b"over and back");
    drop(upgraded);
    https.0.end().await;

    let service = "/api/v1/namespaces/default/services/api";
    let gone = cluster.send("DELETE", service, "application/json", "").await;
    assert_eq!(gone.code, 200, "{}", gone.text);
    let lost = "aggregator_unavailable_apiservice_total{name=\"v1.wardle.example.com\",reason=\"ServiceNotFound\"} 1";
    metrics_show(&cluster, lost, true).await;
    let gone = cluster.send("DELETE", &own, "application/json", "").await;
    assert_eq!(gone.code, 200, "{}", gone.text);
    until(&cluster, flunders, |answer| answer["path"] != flunders).await;
    metrics_show(&cluster, &format!("{unavailable} 1"), false).await;
}

/// Requests through the other door, with a connection each.
struct Https(support::Https);

impl Https {
    async fn send(
        &self,
        cluster: &Cluster,
        identity: &skiff_pki::Identity,
        path: &str,
        headers: &[(&str, &str)],
    ) -> Response<hyper::body::Incoming> {
        let stream = self.0.connect(cluster, Some(identity), "http/1.1").await;
        let (mut sender, driver) = hyper::client::conn::http1::handshake(TokioIo::new(stream))
            .await
            .expect("HTTP/1.1");
        tokio::spawn(driver.with_upgrades());
        let mut request = Request::builder().uri(path).header("host", "localhost");
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        let request = request.body(Full::<Bytes>::default()).expect("a request");
        sender.send_request(request).await.expect("answers")
    }

    async fn user(
        &self,
        cluster: &Cluster,
        identity: &skiff_pki::Identity,
        headers: &[(&str, &str)],
    ) -> String {
        // Nobody but administrators may read it: the refusal names the user.
        let response = self.send(cluster, identity, "/api/v1/secrets", headers).await;
        let code = response.status().as_u16();
        let bytes = http_body_util::BodyExt::collect(response.into_body())
            .await
            .expect("a body")
            .to_bytes();
        let value: Value = serde_json::from_slice(&bytes).unwrap_or_default();
        let message = value["message"].as_str().unwrap_or("");
        let user = message.split('"').nth(1).unwrap_or("");
        format!("{code} {user}").trim().to_string()
    }
}

#[tokio::test]
async fn whose_word_counts() {
    let cluster = Cluster::start().await;
    let https = Https(support::Https::open(&cluster).await);
    let proxy = cluster.pki.front_proxy().expect("a front proxy").identity;
    let jane = [("x-remote-user", "jane")];
    assert_eq!(https.user(&cluster, &proxy, &jane).await, "403 jane");
    let master = [("x-remote-user", "jane"), ("x-remote-group", "system:masters")];
    assert_eq!(https.user(&cluster, &proxy, &master).await, "200");
    assert_eq!(
        https.user(&cluster, &proxy, &[]).await,
        "401",
        "it is nobody itself"
    );
    let bob = cluster.pki.client("bob", "bob", None).expect("a certificate");
    assert_eq!(
        https.user(&cluster, &bob, &jane).await,
        "403 bob",
        "others speak for themselves"
    );
    let elsewhere = tempfile::tempdir().expect("a folder");
    let other = skiff_pki::Pki::open(elsewhere.path()).expect("keys");
    let stranger = other
        .client("admin", "admin", Some("system:masters"))
        .expect("a certificate");
    assert_eq!(https.user(&cluster, &stranger, &[]).await, "401");
    https.0.end().await;
}

fn version_of(document: &Value) -> Value {
    let groups = document["items"].as_array().expect("items");
    let group = groups
        .iter()
        .find(|group| group["metadata"]["name"] == GROUP)
        .expect("the group");
    group["versions"][0].clone()
}

#[tokio::test]
async fn what_every_cluster_has() {
    let cluster = Cluster::start().await;
    let map = "/api/v1/namespaces/kube-system/configmaps/extension-apiserver-authentication";
    let data = cluster.get(map).await.json["data"].clone();
    assert_eq!(data["client-ca-file"], cluster.pki.ca_certificate());
    assert_eq!(data["requestheader-allowed-names"], "[\"front-proxy-client\"]");
    let address = cluster
        .get("/apis/networking.k8s.io/v1/ipaddresses/10.96.0.1")
        .await
        .json;
    let parent = &address["spec"]["parentRef"];
    assert_eq!(
        (&parent["name"], &parent["resource"]),
        (&json!("kubernetes"), &json!("services"))
    );
    let schema = cluster
        .get("/apis/flowcontrol.apiserver.k8s.io/v1/flowschemas/exempt")
        .await;
    assert_eq!(
        schema.headers["x-kubernetes-pf-flowschema-uid"],
        schema.json["metadata"]["uid"].as_str().expect("a uid")
    );
    assert_eq!(schema.json["status"]["conditions"][0]["reason"], "Found");

    // A service's address is an object for as long as the service has it.
    let service =
        json!({"metadata": {"name": "web"}, "spec": {"clusterIP": "10.96.0.77", "ports": [{"port": 80}]}});
    let made = cluster.post("/api/v1/namespaces/default/services", service).await;
    assert_eq!(made.code, 201, "{}", made.text);
    let uri = "/apis/networking.k8s.io/v1/ipaddresses/10.96.0.77";
    until(&cluster, uri, |address| {
        address["spec"]["parentRef"]["name"] == "web"
    })
    .await;
    cluster
        .send(
            "DELETE",
            "/api/v1/namespaces/default/services/web",
            "application/json",
            "",
        )
        .await;
    until(&cluster, uri, |address| address["code"] == 404).await;

    // Mandatory objects come back, and a schema without its level says so.
    let level = "/apis/flowcontrol.apiserver.k8s.io/v1/prioritylevelconfigurations/workload-low";
    let before = cluster.get(level).await.json["metadata"]["uid"].clone();
    cluster.send("DELETE", level, "application/json", "").await;
    until(&cluster, level, |level| {
        level["metadata"]["uid"].is_string() && level["metadata"]["uid"] != before
    })
    .await;
    let schemas = "/apis/flowcontrol.apiserver.k8s.io/v1/flowschemas";
    let lonely =
        json!({"metadata": {"name": "lonely"}, "spec": {"priorityLevelConfiguration": {"name": "nowhere"}}});
    cluster.post(schemas, lonely).await;
    let dangling = |schema: &Value| schema["status"]["conditions"][0]["reason"] == "NotFound";
    until(&cluster, &format!("{schemas}/lonely"), dangling).await;
}
