//! The two doors: HTTPS with client certificates and tokens, and `kube::Client` in process.

mod support;

use std::sync::Arc;

use http::Request;
use http_body_util::{BodyExt, Full};
use hyper_util::rt::{TokioExecutor, TokioIo};
use k8s_openapi::api::core::v1::ConfigMap;
use kube::api::{Api, ListParams, Patch, PatchParams, PostParams, WatchEvent, WatchParams};
use rustls::pki_types::ServerName;
use serde_json::{Value, json};
use support::Cluster;
use tokio::net::{TcpListener, TcpStream};
use tokio_rustls::TlsConnector;
use tokio_util::sync::CancellationToken;

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

struct Https {
    address: std::net::SocketAddr,
    shutdown: CancellationToken,
    serving: tokio::task::JoinHandle<()>,
}

async fn listen(cluster: &Cluster) -> Https {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let address = listener.local_addr().expect("an address");
    let (server, shutdown) = (cluster.server.clone(), CancellationToken::new());
    let token = shutdown.clone();
    let serving = tokio::spawn(async move { server.serve(listener, token).await });
    Https {
        address,
        shutdown,
        serving,
    }
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
    let mut tls = skiff_pki::client_config(cluster.pki.ca_certificate(), identity.as_ref()).expect("TLS");
    tls.alpn_protocols = vec![if http2 {
        b"h2".to_vec()
    } else {
        b"http/1.1".to_vec()
    }];
    let stream = TcpStream::connect(https.address).await.expect("connects");
    let name = ServerName::try_from("localhost").expect("a name");
    let stream = TlsConnector::from(Arc::new(tls))
        .connect(name, stream)
        .await
        .expect("TLS");
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
    let https = listen(&cluster).await;
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
    https.shutdown.cancel();
    https.serving.await.expect("ends");
}
