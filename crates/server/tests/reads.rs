//! Lists, pages and watches, as a real kube-apiserver v1.36.4 was seen to answer them.

#![allow(clippy::unwrap_used)]

mod support;

use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use serde_json::{Value, json};
use support::Cluster;

const MAPS: &str = "/api/v1/namespaces/default/configmaps";

async fn cluster() -> Cluster {
    let cluster = Cluster::start().await;
    for name in ["a", "b", "c"] {
        let labels = json!({"even": if name == "b" { "true" } else { "false" }});
        let map =
            json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name, "labels": labels}});
        assert_eq!(cluster.post(MAPS, map).await.code, 201);
    }
    cluster
}

fn names(list: &Value) -> Vec<&str> {
    let items = list["items"].as_array().unwrap();
    items
        .iter()
        .map(|item| item["metadata"]["name"].as_str().unwrap())
        .collect()
}

fn token(start: &str, revision: &str) -> String {
    URL_SAFE_NO_PAD.encode(format!(
        r#"{{"v":"meta.k8s.io/v1","rv":{revision},"start":"{start}\u0000"}}"#
    ))
}

#[tokio::test]
async fn pages_continue_after_a_key() {
    let cluster = cluster().await;
    let first = cluster.get(&format!("{MAPS}?limit=1")).await.json;
    assert_eq!(names(&first), ["a"]);
    assert_eq!(first["metadata"]["remainingItemCount"], 2);
    let version = first["metadata"]["resourceVersion"].as_str().unwrap();
    let given = first["metadata"]["continue"].as_str().unwrap();
    assert_eq!(given, token("/a", version));
    for given in [token("/a", version), token("a", version), token("/a", "-1")] {
        let rest = cluster
            .get(&format!("{MAPS}?limit=5&continue={given}"))
            .await
            .json;
        assert_eq!(names(&rest), ["b", "c"]);
    }
    // What is wrong with the token is said before what is wrong with the version beside it.
    let refused = cluster
        .get(&format!("{MAPS}?continue=!&resourceVersion={version}"))
        .await;
    assert_eq!(refused.code, 400);
    assert_eq!(
        refused.json["message"],
        "invalid continue token: continue key is not valid: illegal base64 data at input byte 0"
    );
    let refused = cluster
        .get(&format!("{MAPS}?continue={given}&resourceVersion={version}"))
        .await;
    assert_eq!(
        refused.json["message"],
        "specifying resource version is not allowed when using continue"
    );
    let selected = cluster
        .get(&format!("{MAPS}?labelSelector=even%3Dfalse&limit=1"))
        .await
        .json;
    assert_eq!(names(&selected), ["a"]);
    assert_eq!(selected["metadata"].get("remainingItemCount"), None);
}

#[tokio::test]
async fn a_watch_from_nowhere_has_initial_events() {
    let cluster = cluster().await;
    let selected = "labelSelector=even%3Dtrue&watch=true";
    for from in ["", "&resourceVersion=0"] {
        let mut watch = cluster
            .watch(&format!("{MAPS}?{selected}&allowWatchBookmarks=true{from}"))
            .await;
        assert_eq!(watch.brief().await, "ADDED b");
        let end = watch.next().await.expect("a bookmark");
        assert_eq!(
            end["object"]["metadata"]["annotations"]["k8s.io/initial-events-end"],
            "true"
        );
    }
    // Not so one that says where it starts, and a watch of a second is too short for a bookmark.
    let version = cluster.get(MAPS).await.json["metadata"]["resourceVersion"].clone();
    let version = version.as_str().unwrap();
    let uri =
        format!("{MAPS}?{selected}&allowWatchBookmarks=true&timeoutSeconds=1&resourceVersion={version}");
    assert_eq!(cluster.watch(&uri).await.next().await, None);
    assert_eq!(
        cluster
            .watch(&format!("{MAPS}?{selected}&timeoutSeconds=-1"))
            .await
            .next()
            .await,
        None,
        "its time was up before it began"
    );
    let uri = format!("{MAPS}?{selected}&timeoutSeconds=9223372036854775807");
    assert_eq!(cluster.watch(&uri).await.brief().await, "ADDED b");
}

#[tokio::test]
async fn a_version_from_the_future_is_told_in_the_stream() {
    let cluster = cluster().await;
    let initial = "watch=true&sendInitialEvents=true&resourceVersionMatch=NotOlderThan";
    let mut watch = cluster
        .watch(&format!("{MAPS}?{initial}&resourceVersion=1000000"))
        .await;
    let error = watch.next().await.expect("an event");
    assert_eq!(
        (&error["type"], &error["object"]["code"]),
        (&json!("ERROR"), &json!(504))
    );
    assert_eq!(watch.next().await, None);
    let list = cluster.get(&format!("{MAPS}?resourceVersion=1000000")).await;
    assert_eq!(list.code, 504);
    assert_eq!(
        list.json["details"]["causes"][0]["reason"],
        "ResourceVersionTooLarge"
    );
}

#[tokio::test]
async fn other_forms() {
    let cluster = cluster().await;
    let ask = async |accept: &str, uri: &str| {
        let accept = format!("application/json;as={accept};g=meta.k8s.io;v=v1");
        cluster
            .send_as(cluster.admin(), "GET", uri, &[("accept", &accept)], "")
            .await
    };
    let list = ask("PartialObjectMetadataList", MAPS).await;
    assert_eq!(list.json["kind"], "PartialObjectMetadataList");
    assert_eq!(names(&list.json), ["a", "b", "c"]);
    for item in list.json["items"].as_array().unwrap() {
        assert_eq!(item["kind"], "PartialObjectMetadata");
        assert!(item["metadata"]["resourceVersion"].is_string() && item["metadata"]["uid"].is_string());
    }
    let watch = format!("{MAPS}?watch=true&timeoutSeconds=1");
    let events = ask("PartialObjectMetadata", &watch).await;
    let kinds = events.text.matches("\"kind\":\"PartialObjectMetadata\"").count();
    assert_eq!(kinds, 3, "{}", events.text);
    // An event is no list; upstream ends such a watch at the first one.
    assert_eq!(ask("PartialObjectMetadataList", &watch).await.text, "");
    for uri in [MAPS.to_owned(), format!("{MAPS}/a"), watch] {
        let sign = if uri.contains('?') { '&' } else { '?' };
        let refused = ask("Table", &format!("{uri}{sign}includeObject=All")).await;
        assert_eq!(refused.code, 400, "{uri}");
        assert_eq!(
            refused.json["message"],
            "Unable to convert to Table as requested: includeObject: Invalid value: \"All\": must be 'Metadata', 'Object', 'None', or empty"
        );
        assert!(refused.text.starts_with("{\n") && !refused.text.ends_with('\n'));
    }
}

#[tokio::test]
async fn many_are_deleted_at_once() {
    let cluster = Cluster::start().await;
    for n in 0..300 {
        let map = json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": format!("m{n}"), "labels": {"n": "x"}}});
        assert_eq!(cluster.post(MAPS, map).await.code, 201);
    }
    let uri = format!("{MAPS}?labelSelector=n%3Dx");
    let deleted = cluster.send("DELETE", &uri, "application/json", "").await;
    assert_eq!((deleted.code, names(&deleted.json).len()), (200, 300));
    assert!(names(&cluster.get(&uri).await.json).is_empty());
}

/// An older server left out what it did not know; this one's defaults take its place, as upstream has it.
#[tokio::test]
async fn what_an_older_server_wrote_gets_its_defaults() {
    let old = r#"{"kind":"Deployment","apiVersion":"apps/v1","metadata":{"name":"d","namespace":"default","uid":"u",
        "creationTimestamp":"2024-01-01T00:00:00Z"},"spec":{"selector":{"matchLabels":{"a":"b"}},"template":{"metadata":
        {"labels":{"a":"b"}},"spec":{"containers":[{"name":"c","image":"i"}]}},"strategy":{}},"status":{}}"#;
    let cluster = Cluster::over([("/registry/deployments/default/d", old.into())]).await;
    let all = "/apis/apps/v1/namespaces/default/deployments";
    let one = format!("{all}/d");
    let listed = cluster.get(all).await.json["items"][0].clone();
    let got = cluster.get(&one).await.json;
    for found in [&listed, &got] {
        assert_eq!(found["spec"]["progressDeadlineSeconds"], 600, "{found}");
        assert_eq!(found["spec"]["strategy"]["type"], "RollingUpdate");
        assert_eq!(
            found["spec"]["template"]["spec"]["containers"][0]["imagePullPolicy"],
            "Always"
        );
        assert_eq!(
            found["metadata"]["resourceVersion"],
            got["metadata"]["resourceVersion"]
        );
    }
    // It takes part in writes like any other.
    let patched = cluster
        .patch(&one, "merge-patch", json!({"metadata": {"labels": {"x": "y"}}}))
        .await;
    assert_eq!(patched.code, 200, "{}", patched.text);
    assert_eq!(patched.json["spec"], got["spec"]);
    assert_eq!(
        patched.json["metadata"]["generation"],
        got["metadata"]["generation"]
    );
}
