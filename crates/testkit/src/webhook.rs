//! An admission webhook: a real HTTPS server with a certificate of the cluster's authority, that answers each review with
//! the JSON patch that a test chooses.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use base64::Engine;
use bytes::Bytes;
use http::Response;
use http_body_util::{BodyExt, Full};
use hyper_util::rt::TokioIo;
use k8s_openapi::api::admissionregistration::v1::MutatingWebhookConfiguration;
use k8s_openapi::api::core::v1::ConfigMap;
use kube::api::PostParams;
use kube::{Api, Client};
use serde_json::{Value, json};
use tokio::net::{TcpListener, TcpStream};
use tokio_rustls::TlsAcceptor;

use crate::ApiServer;

/// The path of the webhook by which a test sees that its configuration is in use.
const READY: &str = "/ready";
const READY_NAME: &str = "webhook-is-ready";
const PATIENCE: Duration = Duration::from_secs(60);

/// The operations of a JSON patch for the request of a review; none leave the object alone.
type Answer = dyn Fn(&Value) -> Vec<Value> + Send + Sync;

/// Ends with its value.
pub struct Webhook {
    port: u16,
    ca: String,
    reviews: Arc<AtomicUsize>,
    ready: Arc<AtomicUsize>,
    task: tokio::task::JoinHandle<()>,
}

impl Drop for Webhook {
    fn drop(&mut self) {
        self.task.abort();
    }
}

fn base64(bytes: impl AsRef<[u8]>) -> String {
    base64::engine::general_purpose::STANDARD.encode(bytes)
}

impl Webhook {
    pub async fn start(
        server: &ApiServer,
        answer: impl Fn(&Value) -> Vec<Value> + Send + Sync + 'static,
    ) -> Result<Webhook> {
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let port = listener.local_addr()?.port();
        let identity = server
            .pki
            .serving("webhook", "webhook", &["localhost".to_owned()])?;
        let tls = skiff_pki::server_config(&identity, None)?;
        let acceptor = TlsAcceptor::from(Arc::new(tls));
        let (reviews, ready) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
        let answer: Arc<Answer> = Arc::new(answer);
        let counts = (reviews.clone(), ready.clone());
        let task = tokio::spawn(async move {
            // Connections end with the server.
            let mut connections = tokio::task::JoinSet::new();
            while let Ok((stream, _)) = listener.accept().await {
                connections.spawn(serve(stream, acceptor.clone(), counts.clone(), answer.clone()));
                while connections.try_join_next().is_some() {}
            }
        });
        Ok(Webhook {
            port,
            ca: base64(server.pki.ca_certificate()),
            reviews,
            ready,
            task,
        })
    }

    /// How often it was asked.
    pub fn reviews(&self) -> usize {
        self.reviews.load(Ordering::SeqCst)
    }

    fn hook(&self, path: &str, rules: &Value) -> Value {
        json!({"name": format!("{}.example.com", path.trim_matches('/')), "rules": rules, "sideEffects": "None",
            "clientConfig": {"url": format!("https://localhost:{}{path}", self.port), "caBundle": self.ca},
            "admissionReviewVersions": ["v1"]})
    }

    /// Has the webhook asked about these operations (`CREATE`, `UPDATE`) on resources, and waits until it is.
    pub async fn register(
        &self,
        admin: &Client,
        group: &str,
        resources: &[&str],
        operations: &[&str],
    ) -> Result<()> {
        let rules = json!([{"operations": operations, "apiGroups": [group], "apiVersions": ["*"],
            "resources": resources}]);
        let mut ready = self.hook(
            READY,
            &json!([{"operations": ["CREATE"], "apiGroups": [""], "apiVersions": ["v1"], "resources": ["configmaps"]}]),
        );
        let expression = format!("request.?name.orValue('') == '{READY_NAME}'");
        ready["matchConditions"] = json!([{"name": "marker", "expression": expression}]);
        let configuration = json!({"metadata": {"name": "testkit"},
            "webhooks": [self.hook("/review", &rules), ready]});
        let configuration: MutatingWebhookConfiguration = serde_json::from_value(configuration)?;
        let all: Api<MutatingWebhookConfiguration> = Api::all(admin.clone());
        all.create(&PostParams::default(), &configuration).await?;
        let maps: Api<ConfigMap> = Api::namespaced(admin.clone(), "default");
        let marker: ConfigMap = serde_json::from_value(json!({"metadata": {"name": READY_NAME}}))?;
        let dry_run = PostParams {
            dry_run: true,
            ..PostParams::default()
        };
        let asked = async {
            while self.ready.load(Ordering::SeqCst) == 0 {
                let _ = maps.create(&dry_run, &marker).await;
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        };
        if tokio::time::timeout(PATIENCE, asked).await.is_err() {
            bail!("the webhook was never asked");
        }
        Ok(())
    }
}

async fn serve(
    stream: TcpStream,
    acceptor: TlsAcceptor,
    (reviews, ready): (Arc<AtomicUsize>, Arc<AtomicUsize>),
    answer: Arc<Answer>,
) {
    let Ok(stream) = acceptor.accept(stream).await else {
        return;
    };
    let service = hyper::service::service_fn(move |request: http::Request<hyper::body::Incoming>| {
        let (reviews, ready, answer) = (reviews.clone(), ready.clone(), answer.clone());
        async move {
            let is_ready = request.uri().path() == READY;
            let count = if is_ready { &ready } else { &reviews };
            count.fetch_add(1, Ordering::SeqCst);
            let body = request.into_body().collect().await?.to_bytes();
            let review: Value = serde_json::from_slice(&body).context("the review is not JSON")?;
            let operations = if is_ready {
                Vec::new()
            } else {
                answer(&review["request"])
            };
            let mut response = json!({"uid": review["request"]["uid"], "allowed": true});
            if !operations.is_empty() {
                response["patchType"] = json!("JSONPatch");
                response["patch"] = json!(base64(json!(operations).to_string()));
            }
            let answer =
                json!({"apiVersion": review["apiVersion"], "kind": "AdmissionReview", "response": response});
            anyhow::Ok(Response::new(Full::new(Bytes::from(answer.to_string()))))
        }
    });
    let connection = hyper::server::conn::http1::Builder::new();
    let _ = connection.serve_connection(TokioIo::new(stream), service).await;
}
