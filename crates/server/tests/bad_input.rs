//! What nobody should send: bombs, depth, floods. Each ends in a clear answer, and the server goes on.

mod support;

use bytes::Bytes;
use http::Request;
use http_body_util::Full;
use hyper_util::rt::{TokioExecutor, TokioIo};
use serde_json::{Value, json};
use support::{Cluster, Https, Reply};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

const MAPS: &str = "/api/v1/namespaces/default/configmaps";
const DEFINITIONS: &str = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions";

async fn with_map() -> Cluster {
    let cluster = Cluster::start().await;
    let reply = cluster
        .post(
            MAPS,
            json!({"metadata": {"name": "c", "labels": {"app": "v7"}}, "data": {"a": "1"}}),
        )
        .await;
    assert_eq!(reply.code, 201, "{}", reply.text);
    cluster
}

/// A refusal, and a server that still answers.
async fn refused(cluster: &Cluster, reply: Reply, code: u16, message: &str) {
    let shown: String = reply.text.chars().take(300).collect();
    assert_eq!(reply.code, code, "{shown}");
    let found = reply.json["message"].as_str().unwrap_or("");
    assert!(found.contains(message), "{shown}");
    assert_eq!(
        cluster.get(&format!("{MAPS}/c")).await.json["data"],
        json!({"a": "1"})
    );
}

fn nested(open: &str, close: &str, depth: usize) -> String {
    format!("{}{}", open.repeat(depth), close.repeat(depth))
}

#[tokio::test]
async fn bombs_in_yaml() {
    let cluster = with_map().await;
    let mut doubling = "a0: &a0 [x,x,x,x,x,x,x,x,x,x]\n".to_owned();
    for level in 1..12 {
        let last = vec![format!("*a{}", level - 1); 10].join(",");
        doubling.push_str(&format!("a{level}: &a{level} [{last}]\n"));
    }
    let long = format!(
        "a: &a {}\nb: [{}]\n",
        "x".repeat(1 << 20),
        vec!["*a"; 500_000].join(",")
    );
    let anchors: String = (0..80).map(|at| format!("[&a{at} ")).collect();
    let wide = vec!["x"; 100_000].join(",");
    let anchors = format!("b: {anchors}[{wide}]{}\nc: *a0\n", "]".repeat(80));
    for bomb in [doubling, long, anchors] {
        let wrapped = format!("apiVersion: v1\nkind: ConfigMap\nmetadata: {{name: c}}\n{bomb}");
        let reply = cluster
            .send("POST", MAPS, "application/yaml", wrapped.clone())
            .await;
        refused(&cluster, reply, 400, "document contains excessive aliasing").await;
        let uri = format!("{MAPS}/c?fieldManager=m");
        let reply = cluster
            .send("PATCH", &uri, "application/apply-patch+yaml", wrapped)
            .await;
        refused(&cluster, reply, 400, "document contains excessive aliasing").await;
    }
    let keys: String = (0..200_000).map(|at| format!("k{at}: 1, ")).collect();
    let merge = format!("apiVersion: v1\nkind: ConfigMap\nx: {{<<: {{{keys}}}}}\n");
    let reply = cluster.send("POST", MAPS, "application/yaml", merge).await;
    refused(&cluster, reply, 422, "name or generateName is required").await;
}

#[tokio::test]
async fn depth_in_every_format() {
    let cluster = with_map().await;
    let deep = nested("[", "]", 100_000);
    let reply = cluster.send("POST", MAPS, "application/json", deep.clone()).await;
    refused(&cluster, reply, 400, "exceeded max depth").await;
    for yaml in [
        deep,
        "- ".repeat(100_000),
        "? ".repeat(100_000),
        nested("{a: ", "}", 100_000),
    ] {
        let reply = cluster.send("POST", MAPS, "application/yaml", yaml).await;
        refused(&cluster, reply, 400, "").await;
    }
    let one = format!("{MAPS}/c");
    let objects = nested("{\"a\":", "}", 50_000).replace(":}", ":1}");
    for kind in ["merge-patch", "strategic-merge-patch"] {
        let content_type = format!("application/{kind}+json");
        let reply = cluster.send("PATCH", &one, &content_type, objects.clone()).await;
        refused(&cluster, reply, 400, "exceeded max depth").await;
    }
    let operation = format!(r#"[{{"op":"add","path":"/data","value":{objects}}}]"#);
    let reply = cluster
        .send("PATCH", &one, "application/json-patch+json", operation)
        .await;
    refused(&cluster, reply, 400, "exceeded max depth").await;
    // A schema within a schema (`not`, field 18), each message inside the next.
    let mut message: Vec<u8> = Vec::new();
    for _ in 0..3000 {
        let mut outer = vec![0x92, 0x01];
        varint(&mut outer, message.len());
        outer.extend_from_slice(&message);
        message = outer;
    }
    for field in [[0x0a], [0x1a], [0x3a], [0x12]] {
        let mut outer = field.to_vec();
        varint(&mut outer, message.len());
        outer.extend_from_slice(&message);
        message = outer;
    }
    let mut body =
        b"k8s\0\x0a\x33\x0a\x17apiextensions.k8s.io/v1\x12\x18CustomResourceDefinition\x12".to_vec();
    varint(&mut body, message.len());
    body.extend_from_slice(&message);
    let reply = cluster
        .send("POST", DEFINITIONS, "application/vnd.kubernetes.protobuf", body)
        .await;
    assert!((400..500).contains(&reply.code), "{}", reply.text);
    refused(&cluster, reply, 400, "").await;
}

fn varint(out: &mut Vec<u8>, mut value: usize) {
    while value >= 0x80 {
        out.push(value as u8 | 0x80);
        value >>= 7;
    }
    out.push(value as u8);
}

/// What is accepted can be read and changed again, as deep as it may be.
#[tokio::test]
async fn the_deepest_object_lives_on() {
    let cluster = with_map().await;
    let definition = json!({
        "metadata": {"name": "things.example.com"},
        "spec": {"group": "example.com", "scope": "Namespaced", "names": {"plural": "things", "kind": "Thing"},
            "versions": [{"name": "v1", "served": true, "storage": true, "schema": {"openAPIV3Schema":
                {"type": "object", "x-kubernetes-preserve-unknown-fields": true}}}]},
    });
    assert_eq!(cluster.post(DEFINITIONS, definition).await.code, 201);
    let things = "/apis/example.com/v1/namespaces/default/things";
    while cluster.get(things).await.code != 200 {
        tokio::task::yield_now().await;
    }
    let deepest = (1..200).rev().find(|depth| {
        let object = format!(
            r#"{{"apiVersion":"example.com/v1","kind":"Thing","metadata":{{"name":"t"}},"x":{}}}"#,
            nested("{\"a\":", "}", *depth).replace(":}", ":1}")
        );
        skiff_schema::decode::from_json(object.as_bytes()).is_ok()
    });
    let depth = deepest.expect("some depth");
    let object = format!(
        r#"{{"apiVersion":"example.com/v1","kind":"Thing","metadata":{{"name":"t"}},"x":{}}}"#,
        nested("{\"a\":", "}", depth).replace(":}", ":1}")
    );
    let reply = cluster.send("POST", things, "application/json", object).await;
    assert_eq!(reply.code, 201, "{}", reply.text);
    let one = format!("{things}/t");
    let reply = cluster
        .patch(&one, "merge-patch", json!({"metadata": {"labels": {"a": "b"}}}))
        .await;
    assert_eq!(reply.code, 200, "{depth}: {}", reply.text);
    let listed = cluster.get(things).await;
    assert_eq!(listed.json["items"][0]["metadata"]["labels"]["a"], "b", "{depth}");
    assert_eq!(cluster.delete(&one, json!({})).await.code, 200);
}

#[tokio::test]
async fn patches_without_end() {
    let cluster = with_map().await;
    let one = format!("{MAPS}/c");
    let operations = |count: usize| {
        Value::Array(vec![
            json!({"op": "test", "path": "/data/a", "value": "1"});
            count
        ])
    };
    let reply = cluster.patch(&one, "json-patch", operations(10_000)).await;
    assert_eq!(reply.code, 200, "{}", reply.text);
    let reply = cluster.patch(&one, "json-patch", operations(10_001)).await;
    let message = "The allowed maximum operations in a JSON patch is 10000, got 10001";
    refused(&cluster, reply, 413, message).await;
    // COMPAT: upstream keeps the reason to itself.
    let rejected = "the server rejected our request due to an error in our request";
    let doubling = vec![json!({"op": "copy", "from": "/metadata", "path": "/metadata/x"}); 5000];
    let reply = cluster.patch(&one, "json-patch", Value::Array(doubling)).await;
    refused(&cluster, reply, 422, rejected).await;
    let deepening: Vec<Value> = (0..18)
        .map(|n| json!({"op": "copy", "from": "/data", "path": format!("/data{}", "/data".repeat(1 << n))}))
        .collect();
    let reply = cluster.patch(&one, "json-patch", Value::Array(deepening)).await;
    refused(&cluster, reply, 422, rejected).await;
    let wide: serde_json::Map<String, Value> = (0..100_000).map(|n| (format!("k{n}"), Value::Null)).collect();
    let reply = cluster.patch(&one, "merge-patch", json!({"data": wide})).await;
    assert_eq!(reply.code, 200, "{}", reply.text);
    let references: Vec<Value> = (0..30_000)
        .map(|n| json!({"apiVersion": "v1", "kind": "K", "name": "n", "uid": n.to_string()}))
        .collect();
    let reply = cluster
        .patch(
            &one,
            "merge-patch",
            json!({"metadata": {"ownerReferences": references}, "data": {"b": 1}}),
        )
        .await;
    refused(&cluster, reply, 422, "cannot unmarshal number").await;
    // Each complaint shows the whole list.
    let owners: Vec<Value> = (0..20_000)
        .map(|n| json!({"apiVersion": "v1", "kind": "K", "name": "n", "uid": n.to_string(), "controller": true}))
        .collect();
    let reply = cluster
        .patch(
            &one,
            "merge-patch",
            json!({"metadata": {"ownerReferences": owners}}),
        )
        .await;
    assert!(reply.text.len() < 64 << 20, "{}", reply.text.len());
    refused(
        &cluster,
        reply,
        422,
        "Only one reference can have Controller set to true",
    )
    .await;
    let labels: serde_json::Map<String, Value> =
        (0..60_000).map(|n| (format!("-{n}-"), json!("-"))).collect();
    let reply = cluster
        .patch(&one, "merge-patch", json!({"metadata": {"labels": labels}}))
        .await;
    refused(
        &cluster,
        reply,
        422,
        "name part must consist of alphanumeric characters",
    )
    .await;
}

#[tokio::test]
async fn selectors_of_great_length() {
    let cluster = with_map().await;
    // The longest address that the HTTP library takes is 64 KiB.
    let values: Vec<String> = (0..9_000).map(|n| format!("v{n}")).collect();
    let select = |text: String| {
        format!(
            "{MAPS}?labelSelector={}",
            text.replace(' ', "%20").replace('!', "%21")
        )
    };
    let listed = cluster
        .get(&select(format!("app in ({})", values.join(","))))
        .await;
    assert_eq!(
        (listed.code, listed.json["items"].as_array().map(Vec::len)),
        (200, Some(1))
    );
    let listed = cluster
        .get(&select(format!("app notin ({})", values.join(","))))
        .await;
    assert_eq!(
        (listed.code, listed.json["items"].as_array().map(Vec::len)),
        (200, Some(0))
    );
    let terms: Vec<String> = (0..7_000).map(|n| format!("!k{n}")).collect();
    let listed = cluster.get(&select(terms.join(","))).await;
    assert_eq!(
        (listed.code, listed.json["items"].as_array().map(Vec::len)),
        (200, Some(1))
    );
    let reply = cluster.get(&select("(".repeat(60_000))).await;
    refused(
        &cluster,
        reply,
        400,
        "found '(', expected: !, identifier, or 'end of string'",
    )
    .await;
    let reply = cluster
        .get(&format!("{MAPS}?fieldSelector={}", "a%3Db,".repeat(10_000)))
        .await;
    refused(&cluster, reply, 400, "").await;
    let reply = cluster
        .get(&format!("{MAPS}?continue={}", "A".repeat(60_000)))
        .await;
    refused(&cluster, reply, 400, "continue key is not valid").await;
    let forever = i64::MAX;
    for query in [
        format!("limit={forever}"),
        format!("timeoutSeconds={forever}"),
        "resourceVersion=0&resourceVersionMatch=NotOlderThan&limit=1".to_owned(),
    ] {
        assert_eq!(cluster.get(&format!("{MAPS}?{query}")).await.code, 200, "{query}");
    }
    let mut watch = cluster
        .watch(&format!(
            "{MAPS}?watch=1&allowWatchBookmarks=1&timeoutSeconds={forever}"
        ))
        .await;
    assert_eq!(watch.brief().await, "ADDED c");
}

#[tokio::test]
async fn managed_fields_without_end() {
    let cluster = with_map().await;
    let one = format!("{MAPS}/c");
    let fields: serde_json::Map<String, Value> =
        (0..20_000).map(|n| (format!("f:k{n}"), json!({}))).collect();
    let entry = |n: usize, operation: &str| {
        json!({"manager": format!("m{n}"), "operation": operation, "apiVersion": "v1",
            "time": "2024-01-01T00:00:00Z", "fieldsType": "FieldsV1", "fieldsV1": {"f:data": {"f:a": {}}}})
    };
    let mut large = entry(0, "Apply");
    large["fieldsV1"] = json!({"f:data": fields});
    let deep = nested("{\"f:a\":", "}", 80).replace(":}", ":{}}");
    let mut nested = entry(1, "Update");
    nested["fieldsV1"] = serde_json::from_str(&deep).expect("JSON");
    let many: Vec<Value> = (0..5_000)
        .map(|n| entry(n, if n % 2 == 0 { "Apply" } else { "Update" }))
        .collect();
    for claimed in [json!([large]), json!([nested]), Value::Array(many)] {
        let mut object = cluster.get(&one).await.json;
        object["metadata"]["managedFields"] = claimed;
        object["data"]["b"] = json!("2");
        let reply = cluster.put(&one, object).await;
        assert_eq!(reply.code, 200, "{}", reply.text);
        let applied =
            json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "c"}, "data": {"b": "3"}});
        let uri = format!("{one}?fieldManager=n&force=true");
        let reply = cluster
            .send("PATCH", &uri, "application/apply-patch+yaml", applied.to_string())
            .await;
        assert_eq!(reply.code, 200, "{}", reply.text);
        assert_eq!(reply.json["data"]["b"], "3");
        // Upstream's limit of updaters holds whatever was claimed.
        let entries = reply.json["metadata"]["managedFields"]
            .as_array()
            .cloned()
            .unwrap_or_default();
        let updaters = entries
            .iter()
            .filter(|entry| entry["operation"] == "Update")
            .count();
        assert!(updaters <= 11, "{updaters}");
        let emptied = json!({"metadata": {"managedFields": [{}]}, "data": {"b": null}});
        assert_eq!(cluster.patch(&one, "merge-patch", emptied).await.code, 200);
    }
}

#[tokio::test]
async fn schemas_that_would_never_end() {
    let cluster = with_map().await;
    let check = async |schema: Value, message: &str| {
        let definition = json!({
            "metadata": {"name": "things.example.com"},
            "spec": {"group": "example.com", "scope": "Namespaced", "names": {"plural": "things", "kind": "Thing"},
                "versions": [{"name": "v1", "served": true, "storage": true, "schema": {"openAPIV3Schema":
                    {"type": "object", "properties": {"spec": schema}}}}]},
        });
        let reply = cluster.post(DEFINITIONS, definition).await;
        refused(&cluster, reply, 422, message).await;
    };
    check(
        json!({"type": "string", "pattern": "(a{1000}){1000}"}),
        "invalid repeat count: `{1000}`",
    )
    .await;
    check(
        json!({"type": "string", "maxLength": 10, "x-kubernetes-validations":
            [{"rule": "self.matches('((((a{100}){100}){100}){100}){100}')"}]}),
        "",
    )
    .await;
    check(
        json!({"type": "array", "items": {"type": "string"}, "x-kubernetes-validations":
            [{"rule": "self.all(a, self.all(b, self.all(c, a + b == c)))"}]}),
        "estimated rule cost exceeds budget by factor of",
    )
    .await;
    let brackets = nested("(", ")", 20_000).replace("()", "(true)");
    check(
        json!({"type": "boolean", "x-kubernetes-validations": [{"rule": brackets}]}),
        "",
    )
    .await;
}

/// What HTTP/1.1 answers to these bytes, as far as it comes.
async fn raw(https: &Https, cluster: &Cluster, bytes: &[u8]) -> String {
    let mut stream = https.connect(cluster, None, "http/1.1").await;
    // The server may hang up before it has all.
    let _ = stream.write_all(bytes).await;
    let mut answer = vec![0; 4096];
    let count = stream.read(&mut answer).await.unwrap_or(0);
    String::from_utf8_lossy(&answer[..count]).into_owned()
}

async fn is_well(https: &Https, cluster: &Cluster) {
    let answer = raw(
        https,
        cluster,
        b"GET /livez HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n",
    )
    .await;
    assert!(answer.starts_with("HTTP/1.1 200 OK"), "{answer}");
}

#[tokio::test]
async fn floods_of_headers_and_of_streams() {
    let cluster = with_map().await;
    let https = Https::open(&cluster).await;
    let many: String = (0..5000).map(|n| format!("x-{n}: y\r\n")).collect();
    let answer = raw(
        &https,
        &cluster,
        format!("GET /livez HTTP/1.1\r\nhost: localhost\r\n{many}\r\n").as_bytes(),
    )
    .await;
    assert!(answer.starts_with("HTTP/1.1 431"), "{answer}");
    let long = format!(
        "GET /livez HTTP/1.1\r\nhost: localhost\r\nx: {}\r\n\r\n",
        "y".repeat(2 << 20)
    );
    let answer = raw(&https, &cluster, long.as_bytes()).await;
    assert!(
        answer.is_empty() || answer.starts_with("HTTP/1.1 431"),
        "{answer}"
    );
    is_well(&https, &cluster).await;

    // A selector of a few thousand names fits; more headers than that do not.
    let handshake = async || {
        let stream = https.connect(&cluster, None, "h2").await;
        let (sender, driver) =
            hyper::client::conn::http2::handshake(TokioExecutor::new(), TokioIo::new(stream))
                .await
                .expect("HTTP/2");
        tokio::spawn(driver);
        sender
    };
    let get = |path: &str| {
        let uri = format!("https://localhost{path}");
        Request::get(uri)
            .body(Full::<Bytes>::default())
            .expect("a request")
    };
    let mut sender = handshake().await;
    let path = format!("/livez?labelSelector={}", "a".repeat(40_000));
    let answer = sender.send_request(get(&path)).await.expect("answers");
    assert_eq!(answer.status(), 200);
    let mut request = get("/livez");
    for n in 0..5000 {
        let name = http::HeaderName::try_from(format!("x-{n}")).expect("a name");
        request
            .headers_mut()
            .insert(name, "y".repeat(100).parse().expect("a value"));
    }
    // Whatever the answer is, it is no answer to all of that.
    let answer = sender.send_request(request).await;
    assert!(
        answer.as_ref().map_or(true, |answer| answer.status() == 431),
        "{answer:?}"
    );

    // Requests that are taken back at once: the connection is, at some point, no longer served.
    let mut sender = handshake().await;
    let mut ended = false;
    for _ in 0..50_000 {
        let asked = sender.send_request(get("/version"));
        tokio::select! {
            biased;
            answer = asked => if answer.is_err() {
                ended = true;
                break;
            },
            () = tokio::task::yield_now() => {}
        }
        if sender.is_closed() {
            ended = true;
            break;
        }
    }
    println!("the connection was ended: {ended}");
    is_well(&https, &cluster).await;
    https.end().await;
}
