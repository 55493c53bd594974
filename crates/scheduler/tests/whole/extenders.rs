//! Extenders over real HTTP: they filter, score, have a say in preemption, and bind.

use std::convert::Infallible;
use std::sync::Arc;

use bytes::Bytes;
use futures::future::BoxFuture;
use http::{Request, Response};
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper_util::rt::TokioIo;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::scheduling::v1::PriorityClass;
use kube::Api;
use kube::api::PostParams;
use parking_lot::Mutex;
use serde_json::{Value, json};

use crate::cluster::{Cluster, Process, check, condition, configuration, node_of, pod};

type Answer = Arc<dyn Fn(String, Value) -> BoxFuture<'static, (u16, Value)> + Send + Sync>;

/// An extender. What it was asked is kept: verb and arguments.
struct Extender {
    address: String,
    seen: Arc<Mutex<Vec<(String, Value)>>>,
    task: tokio::task::JoinHandle<()>,
}

impl Drop for Extender {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Extender {
    async fn start(tls: Option<rustls::ServerConfig>, answer: Answer) -> Extender {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let seen: Arc<Mutex<Vec<(String, Value)>>> = Arc::default();
        let (log, tls) = (
            Arc::clone(&seen),
            tls.map(|tls| tokio_rustls::TlsAcceptor::from(Arc::new(tls))),
        );
        let task = tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let (log, answer, tls) = (Arc::clone(&log), Arc::clone(&answer), tls.clone());
                tokio::spawn(async move {
                    match tls {
                        Some(tls) => {
                            if let Ok(stream) = tls.accept(stream).await {
                                converse(TokioIo::new(stream), log, answer).await;
                            }
                        }
                        None => converse(TokioIo::new(stream), log, answer).await,
                    }
                });
            }
        });
        Extender { address, seen, task }
    }

    async fn plain(answer: impl Fn(&str, &Value) -> (u16, Value) + Send + Sync + 'static) -> Extender {
        let answer: Answer = Arc::new(move |verb, arguments| {
            let answer = answer(&verb, &arguments);
            Box::pin(async move { answer })
        });
        Extender::start(None, answer).await
    }

    fn asked(&self, verb: &str) -> Vec<Value> {
        let seen = self.seen.lock();
        let seen = seen.iter().filter(|(one, _)| one == verb);
        seen.map(|(_, arguments)| arguments.clone()).collect()
    }
}

async fn converse<S>(stream: TokioIo<S>, log: Arc<Mutex<Vec<(String, Value)>>>, answer: Answer)
where
    S: tokio::io::AsyncRead + tokio::io::AsyncWrite + Unpin + Send + 'static,
{
    let service = hyper::service::service_fn(move |request: Request<Incoming>| {
        let (log, answer) = (Arc::clone(&log), Arc::clone(&answer));
        async move {
            let verb = request.uri().path().rsplit('/').next().unwrap().to_owned();
            let body = request.into_body().collect().await.unwrap().to_bytes();
            let arguments: Value = serde_json::from_slice(&body).unwrap();
            log.lock().push((verb.clone(), arguments.clone()));
            let (code, document) = answer(verb, arguments).await;
            let body = Full::new(Bytes::from(document.to_string()));
            Ok::<_, Infallible>(Response::builder().status(code).body(body).unwrap())
        }
    });
    let _ = hyper::server::conn::http1::Builder::new()
        .serve_connection(stream, service)
        .await;
}

async fn with_nodes(count: usize) -> Cluster {
    let cluster = Cluster::start().await;
    for n in 0..count {
        cluster.add_node(&format!("n{n}")).await;
    }
    cluster
}

/// A scheduler alone, with these extenders.
fn scheduler(cluster: &Cluster, extenders: &str) -> Process {
    let text = format!("podMaxBackoffSeconds: 1\nextenders:\n{extenders}");
    cluster.start_scheduler("s", false, &configuration(&text))
}

async fn until_condition(cluster: &Cluster, name: &str, wanted: &str) {
    cluster
        .until(wanted, async || {
            let pod = cluster.api::<Pod>().get(name).await.unwrap();
            let message = condition(&pod);
            check(message.contains(wanted), message)
        })
        .await;
}

async fn node(cluster: &Cluster, name: &str) -> Option<String> {
    node_of(&cluster.api::<Pod>().get(name).await.unwrap())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_extender_filters_scores_and_binds_the_pods_it_manages() {
    let cluster = with_nodes(3).await;
    let pods = cluster.api::<Pod>();
    let answer: Answer = Arc::new(move |verb, arguments| {
        let pods = pods.clone();
        Box::pin(async move {
            let answer = match verb.as_str() {
                "filter" => {
                    // In lower case, as extenders in other languages write it.
                    json!({"nodenames": ["n1", "n2"], "failedNodes": {"n0": "not this one"}})
                }
                "prioritize" => json!([{"Host": "n1", "Score": 3}, {"Host": "n2", "Score": 10}]),
                _ => {
                    let binding = json!({"apiVersion": "v1", "kind": "Binding",
                        "metadata": {"name": arguments["PodName"], "uid": arguments["PodUID"]},
                        "target": {"kind": "Node", "name": arguments["Node"]}});
                    let name = arguments["PodName"].as_str().unwrap();
                    let bound: Result<Value, _> = pods
                        .create_subresource("binding", name, &PostParams::default(), &binding)
                        .await;
                    bound.unwrap();
                    json!({})
                }
            };
            (200, answer)
        })
    });
    let extender = Extender::start(None, answer).await;
    let text = format!(
        "- {{urlPrefix: 'http://{}/x/', filterVerb: filter, prioritizeVerb: prioritize, weight: 5, bindVerb: bind, \
         nodeCacheCapable: true, managedResources: [{{name: example.com/foo, ignoredByScheduler: true}}]}}\n",
        extender.address
    );
    let mut scheduler = scheduler(&cluster, &text);
    // No node has the resource: only the extender counts it. More pods than the class cache lets pass at first.
    for n in 0..5 {
        let mut managed = pod(&format!("m-{n}"), json!({}));
        let resources = json!({"requests": {"example.com/foo": "1"}, "limits": {"example.com/foo": "1"}});
        managed["spec"]["containers"][0]["resources"] = resources;
        cluster.create::<Pod>(managed).await;
        cluster.create::<Pod>(pod(&format!("other-{n}"), json!({}))).await;
    }
    cluster.until_bound("all pods", |_| true).await;
    for n in 0..5 {
        assert_eq!(node(&cluster, &format!("m-{n}")).await.as_deref(), Some("n2"));
    }
    for verb in ["filter", "prioritize", "bind"] {
        assert_eq!(
            extender.asked(verb).len(),
            5,
            "{verb}: each managed pod, and no other"
        );
    }
    let filter = &extender.asked("filter")[0];
    assert!(filter["Nodes"].is_null() && filter["NodeNames"].as_array().unwrap().len() == 3);
    assert!(
        filter["Pod"]["metadata"]["name"]
            .as_str()
            .unwrap()
            .starts_with("m-")
    );
    assert_eq!(extender.asked("prioritize")[0]["NodeNames"], json!(["n1", "n2"]));
    assert_eq!(extender.asked("bind")[0]["PodNamespace"], "default");
    scheduler.kill().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_an_extender_refuses_or_fails_at_is_told_in_upstreams_words() {
    let cluster = with_nodes(2).await;
    let extender = Extender::plain(|verb, arguments| {
        let name = arguments["Pod"]["metadata"]["name"].as_str().unwrap_or_default();
        match name {
            "stranger" => (
                200,
                json!({"Nodes": {"items": [{"metadata": {"name": "elsewhere"}}]}}),
            ),
            "error" => (200, json!({"Error": "out of order"})),
            "broken" => (500, json!({})),
            "nowhere" => (
                200,
                json!({"Nodes": {"items": []}, "FailedNodes": {"n0": "too small"},
                    "FailedAndUnresolvableNodes": {"n1": "too old"}}),
            ),
            _ => {
                assert_eq!(verb, "filter");
                (200, json!({"Nodes": arguments["Nodes"], "FailedNodes": {}}))
            }
        }
    })
    .await;
    let url = format!("http://{}", extender.address);
    let text = format!(
        "- {{urlPrefix: '{url}', filterVerb: filter}}\n- {{urlPrefix: 'http://127.0.0.1:1', filterVerb: f, ignorable: true}}\n"
    );
    let mut first = scheduler(&cluster, &text);
    for name in ["stranger", "error", "broken", "nowhere", "good"] {
        cluster.create::<Pod>(pod(name, json!({}))).await;
    }
    cluster
        .until_bound("the good one, past the ignorable one", |name| name == "good")
        .await;
    let of_good = extender
        .asked("filter")
        .into_iter()
        .find(|one| one["Pod"]["metadata"]["name"] == "good")
        .unwrap();
    assert!(of_good["NodeNames"].is_null());
    let nodes = of_good["Nodes"]["items"].as_array().unwrap();
    assert_eq!(nodes.len(), 2);
    assert!(
        nodes[0]["status"]["allocatable"]["cpu"].is_string(),
        "whole objects"
    );
    let stranger = format!(
        "extender {url:?} claims a filtered node \"elsewhere\" which is not found in the input node list"
    );
    until_condition(&cluster, "stranger", &stranger).await;
    until_condition(&cluster, "error", "out of order").await;
    until_condition(
        &cluster,
        "broken",
        &format!("failed filter with extender at URL {url}/filter, code 500"),
    )
    .await;
    until_condition(
        &cluster,
        "nowhere",
        "0/2 nodes are available: 1 too old, 1 too small.",
    )
    .await;
    first.kill().await;
    // One that nobody answers for, and that must not be ignored.
    for name in ["stranger", "error", "broken", "nowhere", "good"] {
        cluster.delete_pod(name).await;
    }
    let mut second = scheduler(&cluster, "- {urlPrefix: 'http://127.0.0.1:1', filterVerb: f}\n");
    cluster.create::<Pod>(pod("p", json!({}))).await;
    let refused = "Post \"http://127.0.0.1:1/f\": dial tcp 127.0.0.1:1: connect: connection refused";
    until_condition(&cluster, "p", refused).await;
    second.kill().await;
    // One that takes too long.
    let slow: Answer = Arc::new(|_, _| Box::pin(std::future::pending()));
    let slow = Extender::start(None, slow).await;
    let text = format!(
        "- {{urlPrefix: 'http://{}', filterVerb: f, httpTimeout: 50ms}}\n",
        slow.address
    );
    let mut third = scheduler(&cluster, &text);
    until_condition(
        &cluster,
        "p",
        "context deadline exceeded (Client.Timeout exceeded while awaiting headers)",
    )
    .await;
    third.kill().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tls_is_verified_by_the_authority_that_was_given() {
    let cluster = with_nodes(1).await;
    let dir = tempfile::tempdir().unwrap();
    let authority = |name: &str| skiff_pki::Pki::open(&dir.path().join(name)).unwrap();
    let (own, other) = (authority("own"), authority("other"));
    let identity = own
        .serving("extender", "extender", &["extender.test".to_owned()])
        .unwrap();
    let pass: Answer = Arc::new(|_, arguments| {
        let names = arguments["NodeNames"].clone();
        Box::pin(async move { (200, json!({ "NodeNames": names })) })
    });
    let extender = Extender::start(Some(skiff_pki::server_config(&identity, None).unwrap()), pass).await;
    let ca = |pki: &skiff_pki::Pki, name: &str| {
        let file = dir.path().join(name);
        std::fs::write(&file, pki.ca_certificate()).unwrap();
        file.display().to_string()
    };
    let with = |ca: String, server_name: &str| {
        format!(
            "- {{urlPrefix: 'https://{}', filterVerb: f, nodeCacheCapable: true, enableHTTPS: true, \
             tlsConfig: {{caFile: '{ca}', serverName: '{server_name}'}}}}\n",
            extender.address
        )
    };
    cluster.create::<Pod>(pod("p", json!({}))).await;
    let mut wrong = scheduler(&cluster, &with(ca(&other, "other.crt"), "extender.test"));
    until_condition(&cluster, "p", "tls: failed to verify certificate: x509: ").await;
    wrong.kill().await;
    let mut wrong = scheduler(&cluster, &with(ca(&own, "own.crt"), "another.test"));
    until_condition(&cluster, "p", "certificate is not valid for another.test").await;
    wrong.kill().await;
    assert_eq!(node(&cluster, "p").await, None);
    let mut right = scheduler(&cluster, &with(ca(&own, "own.crt"), "extender.test"));
    cluster.until_bound("the pod", |_| true).await;
    right.kill().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_extender_has_a_say_in_who_is_preempted() {
    let cluster = with_nodes(2).await;
    for (name, value) in [("low", 1), ("high", 1000)] {
        let class: PriorityClass =
            serde_json::from_value(json!({"metadata": {"name": name}, "value": value})).unwrap();
        let classes: Api<PriorityClass> = Api::all(cluster.client.clone());
        classes.create(&PostParams::default(), &class).await.unwrap();
    }
    let big = |name: &str, class: &str| {
        let mut pod = pod(
            name,
            json!({"priorityClassName": class, "terminationGracePeriodSeconds": 0}),
        );
        pod["spec"]["containers"][0]["resources"]["requests"]["cpu"] = json!("3");
        pod
    };
    let extender = Extender::plain(|_, arguments| {
        // Only n1 may be made free.
        let victims = arguments["NodeNameToMetaVictims"]["n1"].clone();
        (200, json!({"NodeNameToMetaVictims": {"n1": victims}}))
    })
    .await;
    let text = format!(
        "- {{urlPrefix: 'http://{}', preemptVerb: preempt, nodeCacheCapable: true}}\n",
        extender.address
    );
    let mut scheduler = scheduler(&cluster, &text);
    cluster.create::<Pod>(big("low-0", "low")).await;
    cluster.create::<Pod>(big("low-1", "low")).await;
    cluster.until_bound("the low ones", |_| true).await;
    let on_n1 = async || {
        let pods = cluster.pods().await;
        pods.into_iter()
            .find(|pod| node_of(pod).as_deref() == Some("n1"))
            .unwrap()
    };
    let victim = on_n1().await;
    cluster.create::<Pod>(big("high", "high")).await;
    cluster
        .until("the high one is bound", async || {
            // Without a kubelet nobody ends a pod that is bound.
            for pod in cluster.pods().await {
                if pod.metadata.deletion_timestamp.is_some() {
                    cluster.delete_pod(pod.metadata.name.as_deref().unwrap()).await;
                }
            }
            let node = node(&cluster, "high").await;
            check(node.as_deref() == Some("n1"), node)
        })
        .await;
    let left = cluster.pods().await;
    assert_eq!(left.len(), 2, "one victim");
    assert!(
        left.iter().all(|pod| pod.metadata.uid != victim.metadata.uid),
        "the one on n1"
    );
    let asked = extender.asked("preempt");
    let victims = &asked[0]["NodeNameToMetaVictims"];
    assert!(victims["n0"]["Pods"][0]["UID"].is_string() && victims["n1"]["NumPDBViolations"] == 0);
    scheduler.kill().await;
}
