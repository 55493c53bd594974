//! Protobuf at the front door and in the store: answers in every form, requests, watches, and data that
//! upstream's API server wrote.

mod support;

use base64::Engine as _;
use bytes::Bytes;
use http::Request;
use http_body_util::{BodyExt, Full};
use serde_json::{Value, json};
use skiff_api::facts;
use skiff_schema::protobuf::{self, Header, MAGIC};
use support::{Cluster, Reply};
use tower::ServiceExt;

const PB: &str = "application/vnd.kubernetes.protobuf";
const MAPS: &str = "/api/v1/namespaces/default/configmaps";

/// What an enveloped object reads as, with its kind.
fn opened(bytes: &[u8]) -> Value {
    let envelope = protobuf::envelope(bytes).expect("an envelope");
    let (group, version) = envelope
        .api_version
        .split_once('/')
        .unwrap_or(("", envelope.api_version));
    let schema = facts::schema();
    let id = schema
        .by_gvk(group, version, envelope.kind)
        .or_else(|| schema.by_name(&format!("io.k8s.apimachinery.pkg.apis.meta.v1.{}", envelope.kind)))
        .unwrap_or_else(|| panic!("a type for {} {}", envelope.api_version, envelope.kind));
    let mut value = protobuf::decode(schema, id, envelope.raw).expect("decodes");
    value["kind"] = envelope.kind.into();
    if !envelope.api_version.is_empty() {
        value["apiVersion"] = envelope.api_version.into();
    }
    value
}

fn enveloped(value: &Value) -> Vec<u8> {
    let (api_version, kind) = (
        value["apiVersion"].as_str().expect("a version"),
        value["kind"].as_str().expect("a kind"),
    );
    let (group, version) = api_version.split_once('/').unwrap_or(("", api_version));
    let id = facts::schema().by_gvk(group, version, kind).expect("a type");
    let header = Header {
        api_version,
        kind,
        unversioned: false,
    };
    protobuf::encode(facts::schema(), id, header, value).expect("encodes")
}

impl Cluster {
    async fn pb(&self, method: &str, uri: &str, body: impl Into<Bytes>) -> Reply {
        let headers = [("accept", PB), ("content-type", PB)];
        self.send_as(self.admin(), method, uri, &headers, body).await
    }

    async fn accept(&self, uri: &str, accept: &str) -> Reply {
        self.send_as(self.admin(), "GET", uri, &[("accept", accept)], "")
            .await
    }
}

fn content_type(reply: &Reply) -> &str {
    reply.headers["content-type"].to_str().expect("text")
}

fn sample(name: &str) -> Value {
    json!({"kind": "ConfigMap", "apiVersion": "v1", "metadata": {"name": name}, "data": {"a": "é\n\u{1}"}})
}

#[tokio::test]
async fn every_verb_speaks_it() {
    let cluster = Cluster::start().await;
    let made = cluster.pb("POST", MAPS, enveloped(&sample("one"))).await;
    assert_eq!((made.code, content_type(&made)), (201, PB), "{}", made.text);
    assert_eq!(opened(&made.bytes)["data"], sample("one")["data"]);
    let uri = format!("{MAPS}/one");

    // The same object in both forms.
    let json = cluster.get(&uri).await.json;
    let got = cluster.accept(&uri, PB).await;
    assert_eq!((got.code, opened(&got.bytes)), (200, json.clone()));

    let mut changed = json.clone();
    changed["data"]["b"] = "2".into();
    let put = cluster.pb("PUT", &uri, enveloped(&changed)).await;
    assert_eq!(opened(&put.bytes)["data"]["b"], "2");
    let headers = [("accept", PB), ("content-type", "application/merge-patch+json")];
    let patched = cluster
        .send_as(cluster.admin(), "PATCH", &uri, &headers, r#"{"data":{"b":"3"}}"#)
        .await;
    assert_eq!(opened(&patched.bytes)["data"]["b"], "3");

    // Lists, whole and in pages, as the JSON says it.
    cluster.pb("POST", MAPS, enveloped(&sample("two"))).await;
    for query in ["", "?limit=1"] {
        let json = cluster.get(&format!("{MAPS}{query}")).await.json;
        let list = opened(&cluster.accept(&format!("{MAPS}{query}"), PB).await.bytes);
        assert_eq!((&list["kind"], &list["items"]), (&json["kind"], &json["items"]));
        assert_eq!(
            list["metadata"]["resourceVersion"],
            json["metadata"]["resourceVersion"]
        );
        assert_eq!(list["metadata"].get("continue").is_some(), !query.is_empty());
    }
    let empty = "/apis/apps/v1/namespaces/default/deployments";
    let list = opened(&cluster.accept(empty, PB).await.bytes);
    assert_eq!(
        (&list["kind"], &list["items"]),
        (&json!("DeploymentList"), &Value::Null)
    );

    // Deletion with options in protobuf, and a Status.
    let options = enveloped(&json!({"kind": "DeleteOptions", "apiVersion": "v1",
        "preconditions": {"uid": "another"}}));
    let refused = cluster.pb("DELETE", &uri, options).await;
    let status = opened(&refused.bytes);
    assert_eq!((refused.code, &status["reason"]), (409, &json!("Conflict")));
    let gone = cluster.pb("DELETE", &uri, "").await;
    assert_eq!(opened(&gone.bytes)["status"], "Success");
    let missing = cluster.accept(&uri, PB).await;
    assert_eq!(
        opened(&missing.bytes),
        json!({"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure", "code": 404,
            "message": "configmaps \"one\" not found", "reason": "NotFound",
            "details": {"name": "one", "kind": "configmaps"}})
    );
}

#[tokio::test]
async fn other_forms() {
    let cluster = Cluster::start().await;
    let ns = "/api/v1/namespaces/default";
    let check = async |uri: &str, accept: &str, code: u16, kind: &str| {
        let reply = cluster.accept(uri, accept).await;
        assert_eq!(reply.code, code, "{uri}: {}", reply.text);
        assert!(
            content_type(&reply).starts_with(PB),
            "{uri}: {}",
            content_type(&reply)
        );
        let value = opened(&reply.bytes);
        assert_eq!(value["kind"], kind, "{uri}");
        value
    };
    let metadata = format!("{PB};as=PartialObjectMetadata;v=v1;g=meta.k8s.io");
    let one = check(ns, &metadata, 200, "PartialObjectMetadata").await;
    assert_eq!(
        (&one["apiVersion"], one.get("spec")),
        (&json!("meta.k8s.io/v1"), None)
    );
    let lists = format!("{PB};as=PartialObjectMetadataList;v=v1;g=meta.k8s.io");
    let list = check("/api/v1/namespaces", &lists, 200, "PartialObjectMetadataList").await;
    assert_eq!(list["items"][0]["metadata"]["name"], "default");
    for (uri, kind) in [
        ("/api", "APIVersions"),
        ("/apis", "APIGroupList"),
        ("/apis/apps", "APIGroup"),
        ("/apis/apps/v1", "APIResourceList"),
    ] {
        check(uri, PB, 200, kind).await;
    }
    check("/version", PB, 406, "Status").await;
    let aggregated = format!("{PB};g=apidiscovery.k8s.io;v=v2;as=APIGroupDiscoveryList");
    for uri in ["/api", "/apis"] {
        check(uri, &aggregated, 200, "APIGroupDiscoveryList").await;
    }
    let deployments = "/apis/apps/v1/namespaces/default/deployments";
    let deployment = json!({"kind": "Deployment", "apiVersion": "apps/v1", "metadata": {"name": "d"},
        "spec": {"replicas": 2, "selector": {"matchLabels": {"a": "b"}}, "template": {
            "metadata": {"labels": {"a": "b"}}, "spec": {"containers": [{"name": "c", "image": "i"}]}}}});
    let made = cluster.pb("POST", deployments, enveloped(&deployment)).await;
    assert_eq!(made.code, 201, "{}", made.text);
    let scale = check(&format!("{deployments}/d/scale"), PB, 200, "Scale").await;
    assert_eq!(scale["spec"]["replicas"], 2);
    let review = json!({"kind": "SelfSubjectAccessReview", "apiVersion": "authorization.k8s.io/v1",
        "spec": {"resourceAttributes": {"verb": "get", "resource": "pods"}}});
    let uri = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews";
    let reviewed = cluster.pb("POST", uri, enveloped(&review)).await;
    assert_eq!(opened(&reviewed.bytes)["status"]["allowed"], true);

    // Served in one version, stored in another.
    let scaler = json!({"kind": "HorizontalPodAutoscaler", "apiVersion": "autoscaling/v1", "metadata": {"name": "h"},
        "spec": {"scaleTargetRef": {"apiVersion": "apps/v1", "kind": "Deployment", "name": "d"}, "maxReplicas": 3,
            "targetCPUUtilizationPercentage": 80}});
    let scalers = "/apis/autoscaling/v1/namespaces/default/horizontalpodautoscalers";
    let made = cluster.pb("POST", scalers, enveloped(&scaler)).await;
    assert_eq!(made.code, 201, "{}", made.text);
    for uri in [scalers.to_string(), scalers.replace("v1/", "v2/")] {
        let json = cluster.get(&format!("{uri}/h")).await.json;
        assert_eq!(opened(&cluster.accept(&format!("{uri}/h"), PB).await.bytes), json);
        let list = opened(&cluster.accept(&uri, PB).await.bytes);
        assert_eq!(list["items"], cluster.get(&uri).await.json["items"]);
    }

    // Errors are in it for those who want objects, not for those who want metadata.
    let missing = cluster.accept("/api/v1/namespaces/x", &metadata).await;
    assert_eq!((missing.code, &missing.json["reason"]), (404, &json!("NotFound")));

    // A table has no such form.
    let only = "only the following media types are accepted: application/json, application/yaml, application/vnd.kubernetes.protobuf";
    let table = cluster
        .accept(ns, &format!("{PB};as=Table;v=v1;g=meta.k8s.io"))
        .await;
    assert_eq!((table.code, table.json["message"].as_str()), (406, Some(only)));
}

#[tokio::test]
async fn bad_bodies() {
    let cluster = Cluster::start().await;
    let check = async |body: &[u8], expected: &str| {
        let headers = [("content-type", PB)];
        let reply = cluster
            .send_as(cluster.admin(), "POST", MAPS, &headers, body.to_vec())
            .await;
        assert_eq!(
            (reply.code, reply.json["message"].as_str()),
            (400, Some(expected))
        );
    };
    let unrecognized = "the object provided is unrecognized (must be of type ConfigMap)";
    check(b"k8s", &format!("{unrecognized}: provided data does not appear to be a protobuf message, expected prefix [107 56 115 0] (6b3873)")).await;
    check(b"", &format!("{unrecognized}: empty data (<empty>)")).await;
    check(b"k8s\0", &format!("{unrecognized}: empty body (6b387300)")).await;
    check(
        b"k8s\0\x12\x03\x0a\x05x",
        "ConfigMap in version \"v1\" cannot be handled as a ConfigMap: unexpected EOF",
    )
    .await;
    check(
        b"k8s\0\x0a\x09\x0a\x02v1\x12\x03Pod\x12\x00",
        "Pod in version \"v1\" cannot be handled as a ConfigMap: converting (v1.Pod) to (core.ConfigMap): unknown conversion",
    )
    .await;
    check(
        b"k8s\0\x0a\x15\x0a\x07apps/v1\x12\x0aDeployment\x12\x00",
        "Deployment in version \"v1\" cannot be handled as a ConfigMap: converting (v1.Deployment) to (core.ConfigMap): unknown conversion",
    )
    .await;
}

/// Reads frames: four bytes of length, then a WatchEvent around an enveloped object.
async fn events(cluster: &Cluster, uri: &str, accept: &str) -> Vec<(String, Value)> {
    let request = Request::builder()
        .uri(uri)
        .header("accept", accept)
        .body(Full::<Bytes>::default())
        .expect("a request");
    let answer = cluster.admin().oneshot(request).await.expect("answers");
    assert_eq!(answer.status(), 200);
    assert_eq!(
        answer.headers()["content-type"],
        "application/vnd.kubernetes.protobuf;stream=watch"
    );
    let bytes = answer.into_body().collect().await.expect("a body").to_bytes();
    let mut rest = &bytes[..];
    let mut found = Vec::new();
    let id = facts::schema().by_gvk("", "v1", "WatchEvent").expect("a type");
    while let Some((length, after)) = rest.split_first_chunk::<4>() {
        let (frame, after) = after.split_at(u32::from_be_bytes(*length) as usize);
        rest = after;
        // The object is raw: it is no JSON, so the event is taken apart by hand.
        let at = frame
            .windows(4)
            .position(|window| window == MAGIC)
            .expect("an object");
        assert!(protobuf::decode(facts::schema(), id, frame).is_err());
        let kind = String::from_utf8_lossy(&frame[2..2 + frame[1] as usize]).into_owned();
        found.push((kind, opened(&frame[at..])));
    }
    assert!(rest.is_empty());
    found
}

#[tokio::test]
async fn watches() {
    let cluster = Cluster::start().await;
    let uri = "/api/v1/namespaces/watched/configmaps";
    let namespace = json!({"metadata": {"name": "watched"}});
    assert_eq!(cluster.post("/api/v1/namespaces", namespace).await.code, 201);
    cluster.post(uri, sample("one")).await;
    let changed = cluster
        .patch(&format!("{uri}/one"), "merge-patch", json!({"data": {"b": "2"}}))
        .await;
    cluster.post(uri, sample("two")).await;
    cluster.delete(&format!("{uri}/one"), json!({})).await;
    let version = &changed.json["metadata"]["resourceVersion"];
    let after: i64 = version.as_str().expect("text").parse().expect("a number");
    let query = format!("{uri}?watch=1&timeoutSeconds=1&resourceVersion={}", after - 1);
    for accept in [PB, "application/vnd.kubernetes.protobuf;stream=watch"] {
        let found = events(&cluster, &query, accept).await;
        let brief: Vec<_> = found
            .iter()
            .map(|(kind, object)| format!("{kind} {}", object["metadata"]["name"].as_str().unwrap_or("")))
            .collect();
        assert_eq!(brief, ["MODIFIED one", "ADDED two", "DELETED one"]);
        assert_eq!(found[0].1, changed.json);
    }
    let metadata = format!("{PB};as=PartialObjectMetadata;v=v1;g=meta.k8s.io");
    let found = events(&cluster, &query, &metadata).await;
    assert_eq!(found[0].1["kind"], "PartialObjectMetadata");
    let initial = format!(
        "{uri}?watch=1&timeoutSeconds=1&sendInitialEvents=true&allowWatchBookmarks=true&resourceVersionMatch=NotOlderThan"
    );
    let found = events(&cluster, &initial, PB).await;
    assert_eq!((found[0].0.as_str(), found[1].0.as_str()), ("ADDED", "BOOKMARK"));
    assert_eq!(
        found[1].1["metadata"]["annotations"],
        json!({"k8s.io/initial-events-end": "true"})
    );
    let refused = cluster.accept(&query, "application/yaml").await;
    assert_eq!(refused.code, 406);
}

/// The objects of upstream's store: path, key, value, answer.
fn registry() -> Vec<(&'static str, &'static str, Bytes, Value)> {
    let lines: Vec<&str> = include_str!("data/registry.txt")
        .lines()
        .filter(|line| !line.starts_with('#'))
        .collect();
    let base64 = base64::engine::general_purpose::STANDARD;
    lines
        .chunks_exact(4)
        .map(|four| {
            let value = base64.decode(four[2]).expect("base64");
            let answer = serde_json::from_str(four[3]).expect("JSON");
            (four[0], four[1], Bytes::from(value), answer)
        })
        .collect()
}

/// A store that kube-apiserver wrote is served as kube-apiserver serves it.
#[tokio::test]
async fn a_store_of_upstream() {
    let registry = registry();
    assert!(registry.len() > 50);
    let values = registry.iter().map(|(_, key, value, _)| (*key, value.clone()));
    let cluster = Cluster::over(values).await;
    let unversioned = |mut value: Value| {
        let metadata = value["metadata"].as_object_mut().expect("metadata");
        assert!(metadata.remove("resourceVersion").is_some());
        value
    };
    let mut wrong = Vec::new();
    for (path, key, value, expected) in &registry {
        let expected = unversioned(expected.clone());
        let got = cluster.get(path).await;
        assert_eq!(got.code, 200, "{path}: {}", got.text);
        if unversioned(got.json.clone()) != expected {
            wrong.push(format!("{path}: {} and not {expected}", got.json));
        }
        let pb = cluster.accept(path, PB).await;
        assert_eq!(opened(&pb.bytes), got.json, "{path}");
        // What is not changed is not written again.
        let (stored, _) = cluster.store.get(key).await.expect("a read");
        assert_eq!(stored.expect("a value").value, value);
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));

    // And what is changed is written in upstream's form.
    let namespace = json!({"metadata": {"name": "golden"}});
    assert_eq!(cluster.post("/api/v1/namespaces", namespace).await.code, 201);
    let uri = "/api/v1/namespaces/golden/configmaps/one";
    let patched = cluster
        .patch(uri, "merge-patch", json!({"data": {"x": "y"}}))
        .await;
    assert_eq!(patched.code, 200, "{}", patched.text);
    let (stored, _) = cluster
        .store
        .get("/registry/configmaps/golden/one")
        .await
        .expect("a read");
    assert_eq!(opened(&stored.expect("a value").value), unversioned(patched.json));
}

/// A folder of an older skiff, which kept JSON.
#[tokio::test]
async fn a_store_of_json() {
    let old = r#"{"kind":"ConfigMap","apiVersion":"v1","data":{"a":"b"},"metadata":{"creationTimestamp":"2026-01-01T00:00:00Z","name":"old","namespace":"default","uid":"u"}}"#;
    let key = "/registry/configmaps/default/old";
    let cluster = Cluster::over([(key, Bytes::from_static(old.as_bytes()))]).await;
    let uri = format!("{MAPS}/old");
    assert_eq!(cluster.get(&uri).await.json["data"], json!({"a": "b"}));
    let patched = cluster
        .patch(&uri, "merge-patch", json!({"data": {"a": "c"}}))
        .await;
    assert_eq!(patched.code, 200, "{}", patched.text);
    let (stored, _) = cluster.store.get(key).await.expect("a read");
    assert!(stored.expect("a value").value.starts_with(MAGIC));
    assert_eq!(cluster.get(&uri).await.json["data"], json!({"a": "c"}));
    // Kinds of upstream's extension servers stay JSON.
    let definition = json!({"kind": "CustomResourceDefinition", "apiVersion": "apiextensions.k8s.io/v1",
        "metadata": {"name": "things.example.com"}, "spec": {"group": "example.com", "scope": "Namespaced",
            "names": {"plural": "things", "singular": "thing", "kind": "Thing", "listKind": "ThingList"},
            "versions": [{"name": "v1", "served": true, "storage": true,
                "schema": {"openAPIV3Schema": {"type": "object"}}}]}});
    let uri = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions";
    let made = cluster.post(uri, definition).await;
    assert_eq!(made.code, 201, "{}", made.text);
    let key = "/registry/apiextensions.k8s.io/customresourcedefinitions/things.example.com";
    let (stored, _) = cluster.store.get(key).await.expect("a read");
    assert!(stored.expect("a value").value.starts_with(b"{"));
}
