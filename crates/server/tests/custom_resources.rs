//! Custom resources from their definition to their end. Messages and shapes are those that kube-apiserver
//! v1.36.4 gave to the same requests.

mod support;

use std::convert::Infallible;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use base64::Engine;
use bytes::Bytes;
use http_body_util::{BodyExt, Full};
use serde_json::{Value, json};
use support::{Cluster, Reply};

const DEFINITIONS: &str = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions";
const FOOS: &str = "/apis/example.com/v1/namespaces/default/foos";

fn definition() -> Value {
    json!({"apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition",
        "metadata": {"name": "foos.example.com"},
        "spec": {"group": "example.com", "scope": "Namespaced",
            "names": {"plural": "foos", "kind": "Foo", "shortNames": ["f"], "categories": ["all"]},
            "versions": [
                {"name": "v1", "served": true, "storage": true,
                    "subresources": {"status": {}, "scale": {"specReplicasPath": ".spec.a", "statusReplicasPath": ".status.x"}},
                    "additionalPrinterColumns": [{"name": "A", "type": "integer", "jsonPath": ".spec.a"}],
                    "selectableFields": [{"jsonPath": ".spec.s"}],
                    "schema": {"openAPIV3Schema": {"type": "object", "properties": {
                        "spec": {"type": "object", "properties": {
                            "a": {"type": "integer", "maximum": 5}, "s": {"type": "string", "default": "dd"}}},
                        "status": {"type": "object", "properties": {"x": {"type": "integer"}}}}}}},
                {"name": "v1beta1", "served": true, "storage": false, "deprecated": true,
                    "schema": {"openAPIV3Schema": {"type": "object", "x-kubernetes-preserve-unknown-fields": true}}}]}})
}

fn foo(name: &str, spec: Value) -> Value {
    json!({"apiVersion": "example.com/v1", "kind": "Foo", "metadata": {"name": name}, "spec": spec})
}

/// Makes a definition and waits until it is established.
async fn define(cluster: &Cluster, definition: Value) -> Value {
    let name = definition["metadata"]["name"]
        .as_str()
        .expect("a name")
        .to_owned();
    let made = cluster.post(DEFINITIONS, definition).await;
    assert_eq!(made.code, 201, "{}", made.text);
    let established = until(cluster, &name, "Established", "True").await;
    let entries = established["metadata"]["managedFields"].as_array();
    let status = entries.and_then(|all| all.iter().find(|entry| entry["subresource"] == "status"));
    let status = status.expect("somebody owns the status");
    assert_eq!(
        (&status["manager"], &status["operation"]),
        (&json!("kube-apiserver"), &json!("Update"))
    );
    established
}

async fn until(cluster: &Cluster, name: &str, kind: &str, status: &str) -> Value {
    let mut watch = cluster
        .watch(&format!(
            "{DEFINITIONS}?watch=true&fieldSelector=metadata.name={name}"
        ))
        .await;
    loop {
        let event = watch.next().await.expect("an event");
        let conditions = event["object"]["status"]["conditions"]
            .as_array()
            .cloned()
            .unwrap_or_default();
        if conditions
            .iter()
            .any(|c| c["type"] == kind && c["status"] == status)
        {
            return event["object"].clone();
        }
    }
}

fn message(reply: &Reply, code: u16, expected: &str) {
    assert_eq!(
        (reply.code, reply.json["message"].as_str().unwrap_or("")),
        (code, expected)
    );
}

fn warnings(reply: &Reply) -> Vec<String> {
    let all = reply.headers.get_all("warning").iter();
    all.map(|value| value.to_str().expect("text").to_owned())
        .collect()
}

#[tokio::test]
async fn from_definition_to_objects() {
    let cluster = Cluster::start().await;
    let made = define(&cluster, definition()).await;
    assert_eq!(made["status"]["storedVersions"], json!(["v1"]));
    assert_eq!(
        made["status"]["acceptedNames"],
        json!({"plural": "foos", "singular": "foo", "shortNames": ["f"], "kind": "Foo", "listKind": "FooList", "categories": ["all"]})
    );

    let group = cluster.get("/apis/example.com").await.json;
    assert_eq!(group["preferredVersion"]["version"], "v1");
    assert_eq!(group["versions"][1]["version"], "v1beta1");
    let resources = cluster.get("/apis/example.com/v1").await.json;
    assert_eq!(
        resources["resources"],
        json!([
            {"name": "foos", "singularName": "foo", "namespaced": true, "kind": "Foo", "shortNames": ["f"], "categories": ["all"],
                "verbs": ["delete", "deletecollection", "get", "list", "patch", "create", "update", "watch"],
                "storageVersionHash": "4XyhoHMtUhg="},
            {"name": "foos/status", "singularName": "", "namespaced": true, "kind": "Foo", "verbs": ["get", "patch", "update"]},
            {"name": "foos/scale", "singularName": "", "namespaced": true, "group": "autoscaling", "version": "v1", "kind": "Scale",
                "verbs": ["get", "patch", "update"]}])
    );
    let aggregated = cluster
        .send_as(
            cluster.admin(),
            "GET",
            "/apis",
            &[(
                "accept",
                "application/json;g=apidiscovery.k8s.io;v=v2;as=APIGroupDiscoveryList",
            )],
            "",
        )
        .await
        .json;
    let last = aggregated["items"]
        .as_array()
        .expect("items")
        .last()
        .expect("one")
        .clone();
    assert_eq!(last["metadata"]["name"], "example.com");
    assert_eq!(last["versions"][0]["resources"][0]["resource"], "foos");
    assert_eq!(
        last["versions"][0]["resources"][0]["responseKind"],
        json!({"group": "example.com", "version": "v1", "kind": "Foo"})
    );

    // Pruned, defaulted, with a warning.
    let mut watch = cluster.watch(&format!("{FOOS}?watch=true")).await;
    let mut wild = foo("b", json!({"a": 2, "zz": 1}));
    wild["status"] = json!({"x": 1});
    let created = cluster.post(FOOS, wild).await;
    assert_eq!(created.code, 201, "{}", created.text);
    assert_eq!(created.json["spec"], json!({"a": 2, "s": "dd"}));
    assert_eq!(created.json["metadata"]["generation"], 1);
    assert!(created.json.get("status").is_none());
    assert_eq!(warnings(&created), ["299 - \"unknown field \\\"spec.zz\\\"\""]);
    assert_eq!(watch.brief().await, "ADDED b");

    let strict = cluster
        .send(
            "POST",
            &format!("{FOOS}?fieldValidation=Strict"),
            "application/json",
            r#"{"apiVersion":"example.com/v1","kind":"Foo","metadata":{"name":"c","unknown":1},"spec":{"a":1,"zz":1,"a":2},"extra":1}"#,
        )
        .await;
    message(
        &strict,
        400,
        "Foo in version \"v1\" cannot be handled as a Foo: strict decoding error: duplicate field \"spec.a\", unknown field \"metadata.unknown\", unknown field \"extra\", unknown field \"spec.zz\"",
    );
    let refused = cluster.post(FOOS, foo("c", json!({"a": 9}))).await;
    message(
        &refused,
        422,
        "Foo.example.com \"c\" is invalid: spec.a: Invalid value: 9: spec.a in body should be less than or equal to 5",
    );
    let other = cluster
        .post(
            FOOS,
            json!({"apiVersion": "example.com/v1", "kind": "Bar", "metadata": {"name": "a"}}),
        )
        .await;
    message(
        &other,
        422,
        "Bar.example.com \"a\" is invalid: kind: Invalid value: \"Bar\": must be Foo",
    );

    // Lists, tables, selectors.
    let list = cluster.get(FOOS).await.json;
    assert_eq!(
        (&list["kind"], &list["metadata"]["continue"]),
        (&json!("FooList"), &json!(""))
    );
    assert_eq!(list["items"][0]["kind"], "Foo");
    let table = cluster
        .send_as(
            cluster.admin(),
            "GET",
            FOOS,
            &[("accept", "application/json;as=Table;v=v1;g=meta.k8s.io")],
            "",
        )
        .await
        .json;
    assert_eq!(table["rows"][0]["cells"], json!(["b", 2]));
    assert_eq!(table["columnDefinitions"][1]["name"], "A");
    let selected = cluster
        .get(&format!("{FOOS}?fieldSelector=spec.s%3Ddd"))
        .await
        .json;
    assert_eq!(selected["items"].as_array().map(Vec::len), Some(1));
    let none = cluster
        .get(&format!("{FOOS}?fieldSelector=spec.s%3Dother"))
        .await
        .json;
    assert_eq!(none["items"].as_array().map(Vec::len), Some(0));
    message(
        &cluster.get(&format!("{FOOS}?fieldSelector=spec.a%3D1")).await,
        400,
        "field label not supported: spec.a",
    );

    // Another version of the same object.
    let older = cluster
        .get("/apis/example.com/v1beta1/namespaces/default/foos/b")
        .await;
    assert_eq!(older.json["apiVersion"], "example.com/v1beta1");
    assert_eq!(
        warnings(&older),
        ["299 - \"example.com/v1beta1 Foo is deprecated; use example.com/v1 Foo\""]
    );

    // Patches, status, scale.
    let patched = cluster
        .patch(&format!("{FOOS}/b"), "merge-patch", json!({"spec": {"a": 3}}))
        .await;
    assert_eq!(
        (
            &patched.json["spec"]["a"],
            &patched.json["metadata"]["generation"]
        ),
        (&json!(3), &json!(2))
    );
    assert_eq!(watch.brief().await, "MODIFIED b");
    let status = cluster
        .patch(
            &format!("{FOOS}/b/status"),
            "merge-patch",
            json!({"status": {"x": 2}, "spec": {"a": 5}, "metadata": {"labels": {"q": "r"}}}),
        )
        .await;
    assert_eq!(status.json["spec"]["a"], 3);
    assert_eq!(
        (
            &status.json["status"]["x"],
            &status.json["metadata"]["generation"]
        ),
        (&json!(2), &json!(2))
    );
    assert!(status.json["metadata"].get("labels").is_none());
    let scale = cluster.get(&format!("{FOOS}/b/scale")).await.json;
    assert_eq!(
        (&scale["spec"]["replicas"], &scale["status"]["replicas"]),
        (&json!(3), &json!(2))
    );
    let scaled = cluster
        .patch(
            &format!("{FOOS}/b/scale"),
            "merge-patch",
            json!({"spec": {"replicas": 5}}),
        )
        .await;
    assert_eq!(scaled.json["spec"]["replicas"], 5);
    message(
        &cluster
            .patch(
                &format!("{FOOS}/b/scale"),
                "merge-patch",
                json!({"spec": {"replicas": -5}}),
            )
            .await,
        422,
        "Foo.example.com \"b\" is invalid: .spec.a: Invalid value: -5: should be a non-negative integer",
    );
    message(
        &cluster
            .patch(&format!("{FOOS}/b"), "strategic-merge-patch", json!({}))
            .await,
        415,
        "the body of the request was in an unknown format - accepted media types include: application/json-patch+json, application/merge-patch+json, application/apply-patch+yaml",
    );
    assert_eq!(
        cluster.post("/apis/example.com/v1/foos", json!({})).await.code,
        404
    );

    // The schema changes while objects are there: what was wrong before may stay, and watches end.
    let mut changed = cluster.get(&format!("{DEFINITIONS}/foos.example.com")).await.json;
    changed["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]["properties"] = json!({"a": {"type": "integer", "maximum": 4}, "s": {"type": "string"}, "n": {"type": "string", "default": "new"}});
    let updated = cluster
        .put(&format!("{DEFINITIONS}/foos.example.com"), changed)
        .await;
    assert_eq!(updated.code, 200, "{}", updated.text);
    while watch.next().await.is_some() {}
    let read = cluster.get(&format!("{FOOS}/b")).await.json;
    assert_eq!(read["spec"], json!({"a": 5, "s": "dd", "n": "new"}));
    let kept = cluster
        .patch(&format!("{FOOS}/b"), "merge-patch", json!({"spec": {"s": "x"}}))
        .await;
    assert_eq!((kept.code, &kept.json["spec"]["a"]), (200, &json!(5)));
    let worse = cluster
        .patch(&format!("{FOOS}/b"), "merge-patch", json!({"spec": {"a": 6}}))
        .await;
    assert_eq!(worse.code, 422);
}

#[tokio::test]
async fn the_end_of_a_definition() {
    let cluster = Cluster::start().await;
    define(&cluster, definition()).await;
    let mut held = foo("held", json!({}));
    held["metadata"]["finalizers"] = json!(["example.com/hold"]);
    assert_eq!(cluster.post(FOOS, held).await.code, 201);
    assert_eq!(cluster.post(FOOS, foo("free", json!({}))).await.code, 201);
    let mut watch = cluster.watch(&format!("{FOOS}?watch=true")).await;
    let deleted = cluster
        .delete(&format!("{DEFINITIONS}/foos.example.com"), json!({}))
        .await;
    assert_eq!(deleted.code, 200);
    assert_eq!(
        deleted.json["metadata"]["finalizers"],
        json!(["customresourcecleanup.apiextensions.k8s.io"])
    );
    until(&cluster, "foos.example.com", "Terminating", "True").await;
    // One goes, the other is held by its finalizer.
    let mut seen = Vec::new();
    while !seen.contains(&"DELETED free".to_owned()) || !seen.contains(&"MODIFIED held".to_owned()) {
        seen.push(watch.brief().await);
    }
    message(
        &cluster.post(FOOS, foo("late", json!({}))).await,
        403,
        "foos.example.com \"late\" is forbidden: create not allowed while custom resource definition is terminating",
    );
    let mut definitions = cluster
        .watch(&format!(
            "{DEFINITIONS}?watch=true&fieldSelector=metadata.name=foos.example.com"
        ))
        .await;
    let freed = cluster
        .patch(
            &format!("{FOOS}/held"),
            "merge-patch",
            json!({"metadata": {"finalizers": null}}),
        )
        .await;
    assert_eq!(freed.code, 200);
    loop {
        let event = definitions.next().await.expect("an event");
        if event["type"] == "DELETED" {
            break;
        }
    }
    while watch.next().await.is_some() {}
    assert_eq!(cluster.get(FOOS).await.code, 404);
    assert_eq!(cluster.get("/apis/example.com").await.code, 404);
}

#[tokio::test]
async fn definitions_are_checked() {
    let cluster = Cluster::start().await;
    let check = async |change: &dyn Fn(&mut Value), expected: &str| {
        let mut definition = definition();
        definition["spec"]["versions"]
            .as_array_mut()
            .expect("a list")
            .truncate(1);
        change(&mut definition);
        let reply = cluster
            .post(&format!("{DEFINITIONS}?dryRun=All"), definition)
            .await;
        message(
            &reply,
            422,
            &format!(
                "CustomResourceDefinition.apiextensions.k8s.io \"foos.example.com\" is invalid: {expected}"
            ),
        );
    };
    let schema = |definition: &mut Value, schema: Value| {
        definition["spec"]["versions"][0]["schema"]["openAPIV3Schema"] = schema;
    };
    check(
        &|d| d["spec"]["scope"] = json!("Nowhere"),
        "spec.scope: Unsupported value: \"Nowhere\": supported values: \"Cluster\", \"Namespaced\"",
    )
    .await;
    check(
        &|d| {
            let bare = json!({"type": "object", "properties": {"spec": {"properties": {"s": {"type": "string"}}}, "status": {"type": "object"}}});
            schema(d, bare);
        },
        "spec.validation.openAPIV3Schema.properties[spec].type: Required value: must not be empty for specified object fields",
    )
    .await;
    check(
        &|d| {
            let list = json!({"type": "object", "properties": {"spec": {"type": "object", "properties": {"s": {"type": "string"},
                "l": {"type": "array"}}}}});
            schema(d, list);
        },
        "spec.validation.openAPIV3Schema.properties[spec].properties[l].items: Required value: must be specified",
    )
    .await;
    check(
        &|d| d["spec"]["versions"][0]["subresources"]["scale"]["specReplicasPath"] = json!(".status.x"),
        "spec.subresources.scale.specReplicasPath: Invalid value: \".status.x\": should be a json path under .spec",
    )
    .await;
}

#[tokio::test]
async fn documents_tell_of_custom_resources() {
    let cluster = Cluster::start().await;
    let before = cluster.get("/openapi/v2").await;
    define(&cluster, definition()).await;
    let after = cluster.get("/openapi/v2").await;
    assert_ne!(before.headers["etag"], after.headers["etag"]);
    let own = &after.json["definitions"]["com.example.v1.Foo"];
    assert_eq!(
        own["properties"]["spec"]["properties"]["a"],
        json!({"type": "integer", "maximum": 5})
    );
    assert_eq!(
        own["x-kubernetes-group-version-kind"],
        json!([{"group": "example.com", "kind": "Foo", "version": "v1"}])
    );
    assert_eq!(
        after.json["definitions"]["com.example.v1beta1.Foo"]["type"],
        "object"
    );
    let path = &after.json["paths"]["/apis/example.com/v1/namespaces/{namespace}/foos/{name}"];
    assert_eq!(path["get"]["operationId"], "readExampleComV1NamespacedFoo");
    let root = cluster.get("/openapi/v3").await.json;
    let url = root["paths"]["apis/example.com/v1"]["serverRelativeURL"]
        .as_str()
        .expect("a URL")
        .to_owned();
    let document = cluster.get(&url).await;
    assert_eq!(document.code, 200);
    let schemas = &document.json["components"]["schemas"];
    assert_eq!(
        schemas["com.example.v1.Foo"]["properties"]["spec"]["properties"]["s"]["default"],
        "dd"
    );
    assert!(
        schemas
            .get("io.k8s.apimachinery.pkg.apis.meta.v1.ObjectMeta")
            .is_some()
    );
    assert_eq!(
        document.json["paths"]["/apis/example.com/v1/foos"]["get"]["operationId"],
        "listExampleComV1FooForAllNamespaces"
    );
}

#[tokio::test]
async fn names_that_are_taken_wait() {
    let cluster = Cluster::start().await;
    define(&cluster, definition()).await;
    let second = json!({"apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition",
        "metadata": {"name": "others.example.com"},
        "spec": {"group": "example.com", "scope": "Cluster",
            "names": {"plural": "others", "singular": "foo", "kind": "Other"},
            "versions": [{"name": "v1", "served": true, "storage": true,
                "schema": {"openAPIV3Schema": {"type": "object"}}}]}});
    assert_eq!(cluster.post(DEFINITIONS, second).await.code, 201);
    let refused = until(&cluster, "others.example.com", "NamesAccepted", "False").await;
    let condition = &refused["status"]["conditions"][0];
    assert_eq!(
        (&condition["reason"], &condition["message"]),
        (&json!("SingularConflict"), &json!("\"foo\" is already in use"))
    );
    assert_eq!(cluster.get("/apis/example.com/v1/others").await.code, 404);
    cluster
        .delete(&format!("{DEFINITIONS}/foos.example.com"), json!({}))
        .await;
    until(&cluster, "others.example.com", "Established", "True").await;
    assert_eq!(cluster.get("/apis/example.com/v1/others").await.code, 200);
}

/// A conversion webhook: `v1` has `spec.hostPort`, `v2` has `spec.host` and `spec.port`.
struct Hook {
    port: u16,
    calls: Arc<AtomicUsize>,
    broken: Arc<AtomicBool>,
}

async fn hook(cluster: &Cluster) -> Hook {
    let names = ["localhost".to_owned(), "127.0.0.1".to_owned()];
    let identity = cluster
        .pki
        .serving("hook", "hook", &names)
        .expect("a certificate");
    let tls = Arc::new(skiff_pki::server_config(&identity, None).expect("TLS"));
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0")
        .await
        .expect("a port");
    let port = listener.local_addr().expect("an address").port();
    let (calls, broken) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicBool::new(false)));
    let hook = Hook {
        port,
        calls: calls.clone(),
        broken: broken.clone(),
    };
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            let acceptor = tokio_rustls::TlsAcceptor::from(tls.clone());
            let (calls, broken) = (calls.clone(), broken.clone());
            tokio::spawn(async move {
                let Ok(stream) = acceptor.accept(stream).await else {
                    return;
                };
                let serve =
                    hyper::service::service_fn(move |request: http::Request<hyper::body::Incoming>| {
                        calls.fetch_add(1, Ordering::Relaxed);
                        let broken = broken.load(Ordering::Relaxed);
                        async move {
                            let body = request.into_body().collect().await.expect("a body").to_bytes();
                            let review: Value = serde_json::from_slice(&body).expect("JSON");
                            Ok::<_, Infallible>(http::Response::new(Full::new(Bytes::from(
                                convert(&review, broken).to_string(),
                            ))))
                        }
                    });
                let stream = hyper_util::rt::TokioIo::new(stream);
                let _ = hyper::server::conn::http1::Builder::new()
                    .serve_connection(stream, serve)
                    .await;
            });
        }
    });
    hook
}

fn convert(review: &Value, broken: bool) -> Value {
    let wanted = review["request"]["desiredAPIVersion"]
        .as_str()
        .expect("a version");
    let objects = review["request"]["objects"].as_array().expect("objects").iter().map(|object| {
        let mut object = object.clone();
        object["apiVersion"] = json!(wanted);
        let spec = object["spec"].clone();
        object["spec"] = if wanted.ends_with("/v2") {
            let (host, port) = spec["hostPort"].as_str().and_then(|text| text.split_once(':')).unwrap_or(("", ""));
            json!({"host": host, "port": port})
        } else {
            json!({"hostPort": format!("{}:{}", spec["host"].as_str().unwrap_or(""), spec["port"].as_str().unwrap_or(""))})
        };
        object
    });
    let converted: Vec<Value> = objects.collect();
    let result = if broken {
        json!({"status": "Failed", "message": "not today"})
    } else {
        json!({"status": "Success"})
    };
    json!({"kind": "ConversionReview", "apiVersion": review["apiVersion"],
        "response": {"uid": review["request"]["uid"], "convertedObjects": converted, "result": result}})
}

/// A definition of two versions, between which a webhook converts, with fields to select by in both.
fn selectable_ends(cluster: &Cluster, port: u16) -> Value {
    let version = |name: &str, storage: bool, fields: &[&str]| {
        let properties: serde_json::Map<String, Value> = fields
            .iter()
            .map(|field| ((*field).to_owned(), json!({"type": "string"})))
            .collect();
        let selectable: Vec<Value> = fields
            .iter()
            .map(|field| json!({"jsonPath": format!(".spec.{field}")}))
            .collect();
        json!({"name": name, "served": true, "storage": storage, "selectableFields": selectable,
            "schema": {"openAPIV3Schema": {"type": "object",
                "properties": {"spec": {"type": "object", "properties": properties}}}}})
    };
    let ca = base64::engine::general_purpose::STANDARD.encode(cluster.pki.ca_certificate());
    json!({"apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition",
        "metadata": {"name": "ends.sel.example.com"},
        "spec": {"group": "sel.example.com", "scope": "Cluster", "names": {"plural": "ends", "kind": "End"},
            "versions": [version("v1", true, &["hostPort"]), version("v2", false, &["host", "port"])],
            "conversion": {"strategy": "Webhook", "webhook": {"conversionReviewVersions": ["v1"],
                "clientConfig": {"url": format!("https://127.0.0.1:{port}/convert"), "caBundle": ca}}}}})
}

#[tokio::test]
async fn fields_are_selected_after_conversion() {
    let cluster = Cluster::start().await;
    let hook = hook(&cluster).await;
    define(&cluster, selectable_ends(&cluster, hook.port)).await;
    let (old, new) = ("/apis/sel.example.com/v1/ends", "/apis/sel.example.com/v2/ends");
    let mut watch = cluster
        .watch(&format!("{new}?watch=true&fieldSelector=spec.host%3Dx"))
        .await;
    for (name, host, port) in [("a", "x", "1"), ("b", "y", "1"), ("c", "x", "2"), ("d", "x", "1")] {
        let end = json!({"apiVersion": "sel.example.com/v2", "kind": "End", "metadata": {"name": name},
            "spec": {"host": host, "port": port}});
        let made = cluster.post(new, end).await;
        assert_eq!(made.code, 201, "{}", made.text);
    }
    let names = |list: &Value| -> Vec<String> {
        let items = list["items"].as_array().expect("a list");
        items
            .iter()
            .map(|item| item["metadata"]["name"].as_str().unwrap_or("").to_owned())
            .collect()
    };
    let check = async |uri: String, expected: &[&str]| {
        let list = cluster.get(&uri).await;
        assert_eq!(list.code, 200, "{}", list.text);
        assert_eq!(names(&list.json), expected, "{uri}");
        list.json
    };
    check(format!("{new}?fieldSelector=spec.host%3Dx"), &["a", "c", "d"]).await;
    check(
        format!("{new}?fieldSelector=spec.host%3Dx,spec.port%3D1"),
        &["a", "d"],
    )
    .await;
    check(format!("{new}?fieldSelector=spec.host!%3Dx"), &["b"]).await;
    check(format!("{old}?fieldSelector=spec.hostPort%3Dx:2"), &["c"]).await;
    // Pages are full, and the token goes on where the page ended.
    let page = check(format!("{new}?fieldSelector=spec.host%3Dx&limit=2"), &["a", "c"]).await;
    let token = page["metadata"]["continue"].as_str().expect("a token").to_owned();
    let rest = format!("{new}?fieldSelector=spec.host%3Dx&limit=2&continue={token}");
    let rest = check(rest, &["d"]).await;
    assert_eq!(rest["metadata"]["continue"], "");

    for expected in ["ADDED a", "ADDED c", "ADDED d"] {
        assert_eq!(watch.brief().await, expected);
    }
    let left = cluster
        .patch(&format!("{new}/c"), "merge-patch", json!({"spec": {"host": "z"}}))
        .await;
    assert_eq!(left.code, 200, "{}", left.text);
    let gone = watch.next().await.expect("an event");
    assert_eq!(
        (&gone["type"], &gone["object"]["spec"]["host"]),
        (&json!("DELETED"), &json!("x"))
    );
    assert_eq!(
        gone["object"]["metadata"]["resourceVersion"],
        left.json["metadata"]["resourceVersion"]
    );
    let deleted = cluster
        .delete(
            &format!("{new}?fieldSelector=spec.host%3Dx,spec.port%3D1"),
            json!({}),
        )
        .await;
    assert_eq!(names(&deleted.json), ["a", "d"], "{}", deleted.text);
    let mut gone = [watch.brief().await, watch.brief().await];
    gone.sort();
    assert_eq!(gone, ["DELETED a", "DELETED d"]);
    check(new.to_owned(), &["b", "c"]).await;
}

#[tokio::test]
async fn a_version_shows_what_its_schema_knows() {
    let cluster = Cluster::start().await;
    let version = |name: &str, storage: bool, fields: Value| {
        json!({"name": name, "served": true, "storage": storage, "schema": {"openAPIV3Schema": {"type": "object",
            "properties": {"spec": {"type": "object", "properties": fields}}}}})
    };
    let text = json!({"type": "string"});
    let definition = json!({"apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition",
        "metadata": {"name": "vs.ver.example.com"},
        "spec": {"group": "ver.example.com", "scope": "Cluster", "names": {"plural": "vs", "kind": "V"}, "versions": [
            version("v1", true, json!({"a": text, "b": text, "d": {"type": "string", "default": "x"}})),
            version("v2", false, json!({"a": text, "c": text}))]}});
    define(&cluster, definition).await;
    let (stored, other) = ("/apis/ver.example.com/v1/vs", "/apis/ver.example.com/v2/vs");
    let v = |version: &str, name: &str, spec: Value| json!({"apiVersion": format!("ver.example.com/{version}"), "kind": "V", "metadata": {"name": name}, "spec": spec});
    let made = cluster
        .post(stored, v("v1", "m", json!({"a": "1", "b": "2"})))
        .await;
    assert_eq!(
        made.json["spec"],
        json!({"a": "1", "b": "2", "d": "x"}),
        "{}",
        made.text
    );
    let seen = cluster.get(&format!("{other}/m")).await.json;
    assert_eq!(seen["spec"], json!({"a": "1"}), "{seen}");
    assert_eq!(
        cluster.get(other).await.json["items"][0]["spec"],
        json!({"a": "1"})
    );
    let mut watch = cluster.watch(&format!("{other}?watch=true")).await;
    assert_eq!(
        watch.next().await.expect("an event")["object"]["spec"],
        json!({"a": "1"})
    );
    let dry = format!("{other}/m?dryRun=All");
    let tried = cluster
        .patch(&dry, "merge-patch", json!({"spec": {"a": "2", "c": "3"}}))
        .await;
    assert_eq!(tried.json["spec"], json!({"a": "2"}), "{}", tried.text);
    // What the stored version does not know is not kept, and the answer says so.
    let made = cluster
        .post(other, v("v2", "n", json!({"a": "1", "c": "3"})))
        .await;
    assert_eq!(made.json["spec"], json!({"a": "1"}), "{}", made.text);
    assert_eq!(
        cluster.get(&format!("{stored}/n")).await.json["spec"],
        json!({"a": "1", "d": "x"})
    );
    let refused = cluster
        .patch(&format!("{stored}/n"), "merge-patch", json!({"apiVersion": "v1"}))
        .await;
    message(
        &refused,
        422,
        "V \"n\" is invalid: apiVersion: Invalid value: \"v1\": must be ver.example.com/v1",
    );
}

#[tokio::test]
async fn what_was_wrong_before_is_a_warning() {
    let cluster = Cluster::start().await;
    let rule = json!([{"rule": "self.size() < 3", "message": "too long"}]);
    let schema = |rules: Value| {
        json!({"openAPIV3Schema": {"type": "object", "properties": {"spec": {"type": "object", "properties": {
            "a": {"type": "string", "maxLength": 9, "x-kubernetes-validations": rules}, "b": {"type": "string"}}}}}})
    };
    let mut wanted = json!({"apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition",
        "metadata": {"name": "rats.ex.example.com"},
        "spec": {"group": "ex.example.com", "scope": "Cluster", "names": {"plural": "rats", "kind": "Rat"},
            "versions": [{"name": "v1", "served": true, "storage": true, "schema": schema(json!([]))}]}});
    define(&cluster, wanted.clone()).await;
    let rats = "/apis/ex.example.com/v1/rats";
    let rat = json!({"apiVersion": "ex.example.com/v1", "kind": "Rat", "metadata": {"name": "r"}, "spec": {"a": "long"}});
    assert_eq!(cluster.post(rats, rat).await.code, 201);
    let one = format!("{DEFINITIONS}/rats.ex.example.com");
    wanted["spec"]["versions"][0]["schema"] = schema(rule);
    wanted["metadata"] = cluster.get(&one).await.json["metadata"].clone();
    assert_eq!(cluster.put(&one, wanted).await.code, 200);
    // The new rules come into force soon after the write.
    loop {
        let tried = cluster
            .patch(
                &format!("{rats}/r?dryRun=All"),
                "merge-patch",
                json!({"spec": {"a": "lasting"}}),
            )
            .await;
        if tried.code == 422 {
            message(
                &tried,
                422,
                "Rat.ex.example.com \"r\" is invalid: spec.a: Invalid value: \"lasting\": too long",
            );
            break;
        }
        tokio::task::yield_now().await;
    }
    let kept = cluster
        .patch(
            &format!("{rats}/r"),
            "merge-patch",
            json!({"spec": {"b": "other"}}),
        )
        .await;
    assert_eq!(kept.code, 200, "{}", kept.text);
    assert_eq!(
        kept.headers["warning"],
        "299 - \"spec.a: Invalid value: \\\"long\\\": too long\""
    );
}

#[tokio::test]
async fn webhooks_convert() {
    let cluster = Cluster::start().await;
    let hook = hook(&cluster).await;
    let version = |name: &str, storage: bool, fields: &[&str]| {
        let properties: serde_json::Map<String, Value> = fields
            .iter()
            .map(|field| ((*field).to_owned(), json!({"type": "string"})))
            .collect();
        json!({"name": name, "served": true, "storage": storage, "schema": {"openAPIV3Schema": {"type": "object",
            "properties": {"spec": {"type": "object", "properties": properties}}}}})
    };
    let ca = base64::engine::general_purpose::STANDARD.encode(cluster.pki.ca_certificate());
    let mut definition = json!({"apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition",
        "metadata": {"name": "ends.conv.example.com"},
        "spec": {"group": "conv.example.com", "scope": "Cluster", "names": {"plural": "ends", "kind": "End"},
            "versions": [version("v1", true, &["hostPort"]), version("v2", false, &["host", "port"])],
            "conversion": {"strategy": "Webhook", "webhook": {"conversionReviewVersions": ["v1"],
                "clientConfig": {"url": format!("https://127.0.0.1:{}/convert", hook.port), "caBundle": ca}}}}});
    define(&cluster, definition.clone()).await;
    let (old, new) = ("/apis/conv.example.com/v1/ends", "/apis/conv.example.com/v2/ends");
    let end = |version: &str, name: &str, spec: Value| json!({"apiVersion": format!("conv.example.com/{version}"), "kind": "End", "metadata": {"name": name}, "spec": spec});
    let made = cluster
        .post(old, end("v1", "a", json!({"hostPort": "x:1"})))
        .await;
    assert_eq!(made.code, 201, "{}", made.text);
    assert_eq!(
        hook.calls.load(Ordering::Relaxed),
        0,
        "what is stored as it is served is not converted"
    );
    let made = cluster
        .post(new, end("v2", "b", json!({"host": "y", "port": "2"})))
        .await;
    assert_eq!(
        (made.code, &made.json["spec"]),
        (201, &json!({"host": "y", "port": "2"})),
        "{}",
        made.text
    );
    assert_eq!(
        cluster.get(&format!("{old}/b")).await.json["spec"],
        json!({"hostPort": "y:2"})
    );
    assert_eq!(
        cluster.get(&format!("{new}/a")).await.json["spec"],
        json!({"host": "x", "port": "1"})
    );
    let list = cluster.get(new).await.json;
    assert_eq!(list["items"][0]["spec"], json!({"host": "x", "port": "1"}));
    assert_eq!(list["items"][1]["apiVersion"], "conv.example.com/v2");
    let mut watch = cluster.watch(&format!("{new}?watch=true")).await;
    assert_eq!(
        watch.next().await.expect("an event")["object"]["spec"],
        json!({"host": "x", "port": "1"})
    );
    let patched = cluster
        .patch(&format!("{new}/a"), "merge-patch", json!({"spec": {"port": "9"}}))
        .await;
    assert_eq!(
        patched.json["spec"],
        json!({"host": "x", "port": "9"}),
        "{}",
        patched.text
    );
    assert_eq!(
        cluster.get(&format!("{old}/a")).await.json["spec"],
        json!({"hostPort": "x:9"})
    );

    // Objects stay stored as they were when the storage version moves on.
    let current = cluster
        .get(&format!("{DEFINITIONS}/ends.conv.example.com"))
        .await
        .json;
    definition["metadata"] = current["metadata"].clone();
    definition["spec"]["versions"][0]["storage"] = json!(false);
    definition["spec"]["versions"][1]["storage"] = json!(true);
    let moved = cluster
        .put(&format!("{DEFINITIONS}/ends.conv.example.com"), definition)
        .await;
    assert_eq!(
        moved.json["status"]["storedVersions"],
        json!(["v1", "v2"]),
        "{}",
        moved.text
    );
    while watch.next().await.is_some() {}
    assert_eq!(
        cluster.get(&format!("{new}/a")).await.json["spec"],
        json!({"host": "x", "port": "9"})
    );
    assert_eq!(
        cluster.get(&format!("{old}/a")).await.json["spec"],
        json!({"hostPort": "x:9"})
    );
    let made = cluster
        .post(new, end("v2", "c", json!({"host": "z", "port": "3"})))
        .await;
    assert_eq!(made.code, 201, "{}", made.text);
    let list = cluster.get(old).await.json;
    assert_eq!(list["items"][2]["spec"], json!({"hostPort": "z:3"}));

    hook.broken.store(true, Ordering::Relaxed);
    assert_eq!(
        cluster.delete(&format!("{old}/c"), json!({})).await.code,
        500,
        "what cannot be shown is not deleted"
    );
    message(
        &cluster.get(&format!("{old}/c")).await,
        500,
        "conversion webhook for conv.example.com/v2, Kind=End failed: not today",
    );
    assert_eq!(cluster.get(&format!("{new}/c")).await.code, 200);
}

#[tokio::test]
async fn rules_are_kept() {
    let cluster = Cluster::start().await;
    let mut definition = definition();
    definition["spec"]["versions"]
        .as_array_mut()
        .expect("a list")
        .truncate(1);
    definition["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"] = json!({"type": "object",
        "x-kubernetes-validations": [{"rule": "self.a <= self.b", "message": "a over b"}],
        "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}, "s": {"type": "string"},
            "im": {"type": "string", "x-kubernetes-validations": [{"rule": "self == oldSelf", "message": "im is immutable"}]}}});
    let mut bad = definition.clone();
    bad["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]["x-kubernetes-validations"] =
        json!([{"rule": "self.nope > 1"}]);
    let refused = cluster.post(DEFINITIONS, bad).await;
    assert_eq!(refused.code, 422);
    assert!(
        refused.text.contains("undefined field 'nope'"),
        "{}",
        refused.text
    );
    define(&cluster, definition).await;
    message(
        &cluster.post(FOOS, foo("x", json!({"a": 3, "b": 2}))).await,
        422,
        "Foo.example.com \"x\" is invalid: spec: Invalid value: a over b",
    );
    message(
        &cluster.post(FOOS, foo("x", json!({"a": "s", "b": 2}))).await,
        422,
        "Foo.example.com \"x\" is invalid: [spec.a: Invalid value: \"string\": spec.a in body must be of type integer: \"string\", .spec.a: Invalid value: 0: .spec.a accessor error: s is of the type string, expected int64, <nil>: Invalid value: null: some validation rules were not checked because the object was invalid; correct the existing errors to complete validation]",
    );
    assert_eq!(
        cluster
            .post(FOOS, foo("x", json!({"a": 1, "b": 2, "im": "q"})))
            .await
            .code,
        201
    );
    let changed = cluster
        .patch(&format!("{FOOS}/x"), "merge-patch", json!({"spec": {"im": "z"}}))
        .await;
    message(
        &changed,
        422,
        "Foo.example.com \"x\" is invalid: spec.im: Invalid value: \"z\": im is immutable",
    );
}

/// A status is taken from what is created, and has its defaults in the answer all the same.
#[tokio::test]
async fn a_new_object_answers_with_the_defaults_of_its_status() {
    let cluster = Cluster::start().await;
    let mut asked = definition();
    asked["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["status"]["default"] =
        json!({"x": 7});
    define(&cluster, asked).await;
    let foos = "/apis/example.com/v1/namespaces/default/foos";
    let foo = json!({"apiVersion": "example.com/v1", "kind": "Foo", "metadata": {"name": "one"}, "status": {"x": 1}});
    for path in [format!("{foos}?dryRun=All"), foos.to_owned()] {
        let made = cluster.post(&path, foo.clone()).await;
        assert_eq!(
            (made.code, &made.json["status"]),
            (201, &json!({"x": 7})),
            "{path}"
        );
    }
    let read = cluster.get(&format!("{foos}/one")).await.json;
    assert_eq!(read["status"], json!({"x": 7}));
}

/// A number without a fraction is an integer once it is stored, and a null that is applied is refused.
#[tokio::test]
async fn numbers_and_nulls() {
    let cluster = Cluster::start().await;
    let mut asked = definition();
    asked["spec"]["versions"][0]["subresources"] = json!({});
    define(&cluster, asked).await;
    let created = cluster.post(FOOS, foo("one", json!({"a": 2.0}))).await;
    assert_eq!(
        (created.code, created.json["spec"]["a"].to_string()),
        (201, "2".to_owned())
    );
    let read = cluster.get(&format!("{FOOS}/one")).await;
    assert_eq!(read.json["spec"]["a"].to_string(), "2");

    let uri = format!("{FOOS}/one?fieldManager=test&force=true");
    let apply = |spec: Value| {
        let body = foo("one", spec).to_string();
        cluster.send("PATCH", &uri, "application/apply-patch+yaml", body)
    };
    let applied = apply(json!({"a": 2.0})).await;
    assert_eq!(
        (applied.code, &applied.json["metadata"]["generation"]),
        (200, &json!(1))
    );
    message(
        &apply(json!({"a": null})).await,
        422,
        "Foo.example.com \"one\" is invalid: spec.a: Invalid value: \"null\": spec.a in body must be of type integer: \"null\"",
    );
    message(
        &cluster.post(FOOS, foo("two", json!({"a": 1e7}))).await,
        422,
        "Foo.example.com \"two\" is invalid: spec.a: Invalid value: 1e+07: spec.a in body should be less than or equal to 5",
    );
}
