//! The two doors: HTTPS with client certificates and tokens, and `kube::Client` in process.

mod support;

use std::sync::Arc;

use http::Request;
use http_body_util::{BodyExt, Full};
use hyper_util::rt::{TokioExecutor, TokioIo};
use k8s_openapi::api::core::v1::ConfigMap;
use kube::api::{Api, ListParams, Patch, PatchParams, PostParams, WatchEvent, WatchParams};
use serde_json::{Value, json};
use support::{Cluster, Https};
use tokio::net::TcpListener;

#[tokio::test]
async fn a_kube_client_in_process() {
    let cluster = Cluster::start().await;
    let client = kube::Client::new(cluster.admin(), "default");
    assert_eq!(client.apiserver_version().await.expect("a version").minor, "36");
    let maps: Api<ConfigMap> = Api::default_namespaced(client);
    let map: ConfigMap =
        serde_json::from_value(json!({"metadata": {"name": "one"}, "data": {"a": "b"}})).expect("a map");
    let made = maps.create(&PostParams::default(), &map).await.expect("creates");
    assert_eq!(
        maps.list(&ListParams::default())
            .await
            .expect("lists")
            .items
            .len(),
        1
    );
    let version = made.metadata.resource_version.expect("a version");
    let mut events = Box::pin(
        maps.watch(&WatchParams::default(), &version)
            .await
            .expect("watches"),
    );
    maps.patch(
        "one",
        &PatchParams::default(),
        &Patch::Merge(json!({"data": {"c": "d"}})),
    )
    .await
    .expect("patches");
    match futures::TryStreamExt::try_next(&mut events)
        .await
        .expect("an event")
    {
        Some(WatchEvent::Modified(map)) => assert_eq!(map.data.expect("data")["c"], "d"),
        other => panic!("{other:?}"),
    }
    let error = maps.get("none").await.expect_err("is not there");
    assert!(matches!(error, kube::Error::Api(status) if status.code == 404));
}

async fn request(
    cluster: &Cluster,
    https: &Https,
    user: Option<&str>,
    http2: bool,
    path: &str,
    token: Option<&str>,
) -> (u16, Value) {
    let identity = user.map(|user| cluster.pki.client(user, user, None).expect("a certificate"));
    let protocol = if http2 { "h2" } else { "http/1.1" };
    let stream = https.connect(cluster, identity.as_ref(), protocol).await;
    let mut builder = Request::builder().uri(if http2 {
        format!("https://localhost{path}")
    } else {
        path.to_string()
    });
    if !http2 {
        builder = builder.header("host", "localhost");
    }
    if let Some(token) = token {
        builder = builder.header("authorization", format!("Bearer {token}"));
    }
    let request = builder.body(Full::<bytes::Bytes>::default()).expect("a request");
    let response = if http2 {
        let (mut sender, driver) =
            hyper::client::conn::http2::handshake(TokioExecutor::new(), TokioIo::new(stream))
                .await
                .expect("HTTP/2");
        tokio::spawn(driver);
        sender.send_request(request).await.expect("answers")
    } else {
        let (mut sender, driver) = hyper::client::conn::http1::handshake(TokioIo::new(stream))
            .await
            .expect("HTTP/1.1");
        tokio::spawn(driver);
        sender.send_request(request).await.expect("answers")
    };
    let code = response.status().as_u16();
    let bytes = response.into_body().collect().await.expect("a body").to_bytes();
    (code, serde_json::from_slice(&bytes).unwrap_or(Value::Null))
}

#[tokio::test]
async fn https_with_certificates_and_tokens() {
    let cluster = Cluster::start().await;
    let https = Https::open(&cluster).await;
    let path = "/api/v1/namespaces/default/configmaps";
    for http2 in [false, true] {
        let (code, value) = request(&cluster, &https, None, http2, path, None).await;
        assert_eq!(code, 403);
        assert!(
            value["message"]
                .as_str()
                .expect("a message")
                .contains("User \"system:anonymous\" cannot list"),
            "{value}"
        );
        let (code, value) = request(
            &cluster,
            &https,
            Some("system:kube-scheduler"),
            http2,
            "/api/v1/nodes",
            None,
        )
        .await;
        assert_eq!(code, 200, "{value}");
        let (code, value) = request(&cluster, &https, None, http2, path, Some("nonsense")).await;
        assert_eq!((code, value["message"].as_str()), (401, Some("Unauthorized")));
    }
    cluster
        .post(
            "/api/v1/namespaces/kube-system/serviceaccounts",
            json!({"metadata": {"name": "namespace-controller"}}),
        )
        .await;
    let made = cluster
        .post(
            "/api/v1/namespaces/kube-system/serviceaccounts/namespace-controller/token",
            json!({"spec": {}}),
        )
        .await;
    let token = made.json["status"]["token"].as_str().expect("a token");
    let (code, value) = request(&cluster, &https, None, true, "/api/v1/namespaces", Some(token)).await;
    assert_eq!(code, 200, "{value}");
    https.end().await;
}

/// A kubelet that knows one log and echoes what comes over an upgraded connection.
async fn fake_kubelet(cluster: &Cluster) -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let port = listener.local_addr().expect("an address").port();
    let identity = cluster
        .pki
        .serving("kubelet", "system:node:n", &["127.0.0.1".to_string()])
        .expect("a certificate");
    let tls = skiff_pki::server_config(&identity, Some(cluster.pki.ca_certificate())).expect("TLS");
    let acceptor = tokio_rustls::TlsAcceptor::from(Arc::new(tls));
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            let acceptor = acceptor.clone();
            tokio::spawn(async move {
                let stream = acceptor.accept(stream).await.expect("TLS");
                assert!(
                    stream.get_ref().1.peer_certificates().is_some(),
                    "the API server shows who it is"
                );
                let service =
                    hyper::service::service_fn(|mut request: Request<hyper::body::Incoming>| async move {
                        let path = request.uri().to_string();
                        if !request.headers().contains_key("upgrade") {
                            return Ok::<_, std::convert::Infallible>(http::Response::new(Full::<
                                bytes::Bytes,
                            >::from(
                                path
                            )));
                        }
                        tokio::spawn(async move {
                            let upgraded = hyper::upgrade::on(&mut request).await.expect("upgrades");
                            let (mut read, mut write) = tokio::io::split(TokioIo::new(upgraded));
                            tokio::io::copy(&mut read, &mut write).await.expect("echoes");
                        });
                        let mut response = http::Response::new(Full::default());
                        *response.status_mut() = http::StatusCode::SWITCHING_PROTOCOLS;
                        response
                            .headers_mut()
                            .insert("connection", "Upgrade".parse().expect("a value"));
                        response
                            .headers_mut()
                            .insert("upgrade", "SPDY/3.1".parse().expect("a value"));
                        Ok(response)
                    });
                let connection = hyper::server::conn::http1::Builder::new()
                    .serve_connection(TokioIo::new(stream), service);
                let _ = connection.with_upgrades().await;
            });
        }
    });
    port
}

#[tokio::test]
async fn logs_and_exec_reach_the_kubelet() {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    let cluster = Cluster::start().await;
    let port = fake_kubelet(&cluster).await;
    let node = cluster
        .post("/api/v1/nodes", json!({"metadata": {"name": "n"}}))
        .await;
    assert_eq!(node.code, 201, "{}", node.text);
    let status = json!({"status": {"addresses": [{"type": "InternalIP", "address": "127.0.0.1"}], "daemonEndpoints": {"kubeletEndpoint": {"Port": port}}}});
    assert_eq!(
        cluster
            .patch("/api/v1/nodes/n/status", "merge-patch", status)
            .await
            .code,
        200
    );
    cluster
        .post(
            "/api/v1/namespaces/default/serviceaccounts",
            json!({"metadata": {"name": "default"}}),
        )
        .await;
    let pods = "/api/v1/namespaces/default/pods";
    let made = cluster
        .post(
            pods,
            json!({"metadata": {"name": "p"}, "spec": {"containers": [{"name": "c", "image": "i"}]}}),
        )
        .await;
    assert_eq!(made.code, 201, "{}", made.text);
    assert_eq!(
        cluster.get(&format!("{pods}/p/log")).await.text,
        "",
        "no node, no log"
    );
    cluster
        .post(
            &format!("{pods}/p/binding"),
            json!({"metadata": {"name": "p"}, "target": {"name": "n"}}),
        )
        .await;
    let log = cluster
        .get(&format!("{pods}/p/log?tailLines=3&timestamps=true"))
        .await;
    assert_eq!(
        (log.code, log.text.as_str()),
        (200, "/containerLogs/default/p/c?timestamps=true&tailLines=3")
    );
    // What only means something on this machine is not for clients: the address of this node is loopback.
    let proxied = cluster.get("/api/v1/nodes/n/proxy/healthz?x=1").await;
    assert_eq!(
        (proxied.code, proxied.json["message"].as_str()),
        (400, Some("address not allowed"))
    );

    for address in ["::ffff:127.0.0.1", "::127.0.0.1", "0.0.0.0", "localhost"] {
        let kind = if address == "localhost" {
            "InternalDNS"
        } else {
            "InternalIP"
        };
        let status = json!({"status": {"addresses": [{"type": kind, "address": address}]}});
        let patched = cluster
            .patch("/api/v1/nodes/n/status", "merge-patch", status)
            .await;
        assert_eq!(patched.code, 200, "{}", patched.text);
        let mut uris = vec![format!("/api/v1/nodes/n:{port}/proxy/healthz")];
        if kind == "InternalIP" {
            let status = json!({"status": {"podIP": address, "podIPs": [{"ip": address}]}});
            let patched = cluster
                .patch(&format!("{pods}/p/status"), "merge-patch", status)
                .await;
            let mapped = address.starts_with("::ffff:");
            assert_eq!(patched.code, if mapped { 422 } else { 200 }, "{}", patched.text);
            if !mapped {
                uris.push(format!("{pods}/p:{port}/proxy/healthz"));
                uris.push(format!("{pods}/https:p:{port}/proxy/healthz"));
            }
        }
        for uri in uris {
            let proxied = cluster.get(&uri).await;
            assert_eq!(
                (proxied.code, proxied.json["message"].as_str()),
                (400, Some("address not allowed")),
                "{address}: {uri}"
            );
        }
        // Endpoints that lead there are not accepted in the first place.
        let endpoints = json!({"metadata": {"name": "p"}, "subsets": [{"addresses": [{"ip": address}], "ports": [{"port": 80}]}]});
        let made = cluster
            .post("/api/v1/namespaces/default/endpoints", endpoints)
            .await;
        let expected = if address == "::127.0.0.1" { 201 } else { 422 };
        assert_eq!(made.code, expected, "{address}: {}", made.text);
    }
    let loopback = json!({"status": {"addresses": [{"type": "InternalIP", "address": "127.0.0.1"}]}});
    cluster
        .patch("/api/v1/nodes/n/status", "merge-patch", loopback)
        .await;

    let https = Https::open(&cluster).await;
    let identity = cluster
        .pki
        .client("admin", "admin", Some("system:masters"))
        .expect("a certificate");
    let stream = https.connect(&cluster, Some(&identity), "http/1.1").await;
    let (mut sender, driver) = hyper::client::conn::http1::handshake(TokioIo::new(stream))
        .await
        .expect("HTTP/1.1");
    tokio::spawn(driver.with_upgrades());
    let request = Request::builder()
        .method("POST")
        .uri(format!("{pods}/p/exec?command=ls&command=-l&stdout=true"))
        .header("host", "localhost")
        .header("connection", "Upgrade")
        .header("upgrade", "SPDY/3.1")
        .body(Full::<bytes::Bytes>::default())
        .expect("a request");
    let response = sender.send_request(request).await.expect("answers");
    assert_eq!(response.status(), 101);
    let mut upgraded = TokioIo::new(hyper::upgrade::on(response).await.expect("upgrades"));
    upgraded.write_all(b"over and back").await.expect("writes");
    let mut echo = [0; 13];
    upgraded.read_exact(&mut echo).await.expect("reads");
    assert_eq!(&echo, b"over and back");
    drop(upgraded);
    https.end().await;
}
