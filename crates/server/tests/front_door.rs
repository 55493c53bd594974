//! The front door from outside: requests in, answers out, on a real store.

mod support;

use serde_json::{Value, json};
use skiff_auth::UserInfo;
use support::Cluster;

const MAPS: &str = "/api/v1/namespaces/default/configmaps";

fn config_map(name: &str) -> Value {
    json!({"kind": "ConfigMap", "apiVersion": "v1", "metadata": {"name": name}, "data": {"a": "b"}})
}

#[tokio::test]
async fn create_read_update_delete() {
    let cluster = Cluster::start().await;
    let made = cluster.post(MAPS, config_map("one")).await;
    assert_eq!(made.code, 201, "{}", made.text);
    assert_eq!(made.json["kind"], "ConfigMap");
    let metadata = &made.json["metadata"];
    assert!(
        metadata["uid"].is_string()
            && metadata["creationTimestamp"].is_string()
            && metadata["resourceVersion"].is_string(),
        "{metadata}"
    );
    assert!(made.headers.contains_key("audit-id"));

    let again = cluster.post(MAPS, config_map("one")).await;
    assert_eq!(
        (again.code, again.json["message"].as_str()),
        (409, Some("configmaps \"one\" already exists"))
    );
    assert_eq!(again.json["reason"], "AlreadyExists");

    let got = cluster.get(&format!("{MAPS}/one")).await;
    assert_eq!(got.json, made.json);

    let mut changed = got.json.clone();
    changed["data"]["a"] = json!("c");
    let updated = cluster.put(&format!("{MAPS}/one"), changed.clone()).await;
    assert_eq!((updated.code, &updated.json["data"]["a"]), (200, &json!("c")));
    assert_eq!(updated.json["metadata"]["uid"], metadata["uid"]);

    let stale = cluster.put(&format!("{MAPS}/one"), changed).await;
    assert_eq!(
        (stale.code, stale.json["message"].as_str()),
        (
            409,
            Some(
                "Operation cannot be fulfilled on configmaps \"one\": the object has been modified; please apply your changes to the latest version and try again"
            )
        )
    );

    let same = cluster.put(&format!("{MAPS}/one"), updated.json.clone()).await;
    assert_eq!(
        same.json["metadata"]["resourceVersion"], updated.json["metadata"]["resourceVersion"],
        "a write that changes nothing writes nothing"
    );

    let listed = cluster.get(MAPS).await;
    assert_eq!(listed.json["kind"], "ConfigMapList");
    assert_eq!(listed.json["items"][0]["data"]["a"], "c");
    assert_eq!(listed.json["items"][0].get("kind"), None, "items have no kind");

    let gone = cluster.delete(&format!("{MAPS}/one"), json!({})).await;
    assert_eq!((gone.code, gone.json["status"].as_str()), (200, Some("Success")));
    assert_eq!(gone.json["details"]["uid"], metadata["uid"]);
    let missing = cluster.get(&format!("{MAPS}/one")).await;
    assert_eq!(
        (missing.code, missing.json["message"].as_str()),
        (404, Some("configmaps \"one\" not found"))
    );
}

#[tokio::test]
async fn patches() {
    let cluster = Cluster::start().await;
    cluster.post(MAPS, config_map("one")).await;
    let uri = format!("{MAPS}/one");
    let merged = cluster
        .patch(&uri, "merge-patch", json!({"data": {"x": "y", "a": null}}))
        .await;
    assert_eq!(
        (merged.code, &merged.json["data"]),
        (200, &json!({"x": "y"})),
        "{}",
        merged.text
    );
    let json_patched = cluster
        .patch(
            &uri,
            "json-patch",
            json!([{"op": "add", "path": "/data/z", "value": "1"}]),
        )
        .await;
    assert_eq!(
        json_patched.json["data"],
        json!({"x": "y", "z": "1"}),
        "{}",
        json_patched.text
    );
    let strategic = cluster
        .patch(
            &uri,
            "strategic-merge-patch",
            json!({"metadata": {"labels": {"l": "1"}}}),
        )
        .await;
    assert_eq!(
        strategic.json["metadata"]["labels"],
        json!({"l": "1"}),
        "{}",
        strategic.text
    );
    let apply = cluster
        .send("PATCH", &uri, "application/apply-patch+yaml", "{}")
        .await;
    assert_eq!(apply.code, 422);
    let missing = cluster
        .patch(&format!("{MAPS}/none"), "merge-patch", json!({"data": {}}))
        .await;
    assert_eq!(missing.code, 404);
    let stale = cluster
        .patch(
            &uri,
            "merge-patch",
            json!({"metadata": {"resourceVersion": "1"}, "data": {"q": "q"}}),
        )
        .await;
    assert_eq!(stale.code, 409, "{}", stale.text);
    let dry = cluster
        .patch(
            &format!("{uri}?dryRun=All"),
            "merge-patch",
            json!({"data": {"dry": "run"}}),
        )
        .await;
    assert_eq!(dry.json["data"]["dry"], "run");
    assert_eq!(cluster.get(&uri).await.json["data"].get("dry"), None);
}

#[tokio::test]
async fn writes_at_the_same_time_all_count() {
    let cluster = Cluster::start().await;
    cluster.post(MAPS, config_map("busy")).await;
    let uri = format!("{MAPS}/busy");
    let patches =
        (0..40).map(|n| cluster.patch(&uri, "merge-patch", json!({"data": {format!("k{n}"): "v"}})));
    for reply in futures::future::join_all(patches).await {
        assert_eq!(reply.code, 200, "{}", reply.text);
    }
    let data = cluster.get(&uri).await.json["data"]
        .as_object()
        .expect("data")
        .len();
    assert_eq!(data, 41, "no patch was lost");
    // Of writers that name the same version exactly one wins.
    let seen = cluster.get(&uri).await.json;
    let puts = (0..10).map(|n| {
        let mut value = seen.clone();
        value["data"]["a"] = json!(n.to_string());
        cluster.put(&uri, value)
    });
    let codes: Vec<u16> = futures::future::join_all(puts)
        .await
        .iter()
        .map(|reply| reply.code)
        .collect();
    assert_eq!(codes.iter().filter(|code| **code == 200).count(), 1, "{codes:?}");
    assert_eq!(codes.iter().filter(|code| **code == 409).count(), 9, "{codes:?}");
    let creates = (0..10).map(|_| cluster.post(MAPS, config_map("race")));
    let codes: Vec<u16> = futures::future::join_all(creates)
        .await
        .iter()
        .map(|reply| reply.code)
        .collect();
    assert_eq!(codes.iter().filter(|code| **code == 201).count(), 1, "{codes:?}");
}

#[tokio::test]
async fn names_are_generated() {
    let cluster = Cluster::start().await;
    let made = cluster
        .post(MAPS, json!({"metadata": {"generateName": "gen-"}}))
        .await;
    let name = made.json["metadata"]["name"].as_str().expect("a name");
    assert!(name.starts_with("gen-") && name.len() == 9, "{name}");
}

#[tokio::test]
async fn bad_input() {
    let cluster = Cluster::start().await;
    let deep = format!("{}{}", "[".repeat(5000), "]".repeat(5000));
    let check =
        async |method: &str, uri: &str, content_type: &str, body: String, code: u16, message: &str| {
            let reply = cluster.send(method, uri, content_type, body).await;
            assert_eq!(reply.code, code, "{method} {uri}: {}", reply.text);
            let found = if reply.json.is_object() {
                reply.json["message"].as_str().unwrap_or("")
            } else {
                &reply.text
            };
            assert!(found.contains(message), "{method} {uri}: {found}");
        };
    let json = "application/json";
    check(
        "POST",
        MAPS,
        json,
        "{".into(),
        400,
        "unexpected end of JSON input",
    )
    .await;
    check("POST", MAPS, json, deep, 400, "exceeded max depth").await;
    check(
        "POST",
        MAPS,
        json,
        " ".repeat(3 * 1024 * 1024 + 1),
        413,
        "Request entity too large: limit is 3145728",
    )
    .await;
    check("POST", MAPS, "text/plain", "k8s".into(), 415, "the body of the request was in an unknown format - accepted media types include: application/json, application/yaml, application/vnd.kubernetes.protobuf").await;
    check(
        "POST",
        MAPS,
        "application/vnd.kubernetes.protobuf",
        "k8s".into(),
        400,
        "does not appear to be a protobuf message",
    )
    .await;
    check("POST", MAPS, json, r#"{"kind":"ConfigMap","apiVersion":"v1","metadata":{"name":"x"},"data":[]}"#.into(), 400, "ConfigMap in version \"v1\" cannot be handled as a ConfigMap: json: cannot unmarshal array into Go struct field ConfigMap.data of type map[string]string").await;
    check(
        "POST",
        &format!("{MAPS}?fieldValidation=Strict"),
        json,
        r#"{"kind":"ConfigMap","apiVersion":"v1","metadata":{"name":"x"},"datas":{}}"#.into(),
        400,
        "strict decoding error: unknown field \"datas\"",
    )
    .await;
    check(
        "POST",
        &format!("{MAPS}?fieldValidation=Strict"),
        json,
        r#"{"kind":"ConfigMap","apiVersion":"v1","metadata":{"name":"x","name":"y"}}"#.into(),
        400,
        "strict decoding error: duplicate field \"metadata.name\"",
    )
    .await;
    check(
        "POST",
        MAPS,
        json,
        r#"{"kind":"Secret","apiVersion":"v1","metadata":{"name":"x"}}"#.into(),
        400,
        "cannot be handled as a ConfigMap",
    )
    .await;
    check("POST", MAPS, json, r#"{"kind":"ConfigMap","apiVersion":"v1","metadata":{"name":"Not_A_Name"}}"#.into(), 422, "ConfigMap \"Not_A_Name\" is invalid: metadata.name: Invalid value: \"Not_A_Name\": a lowercase RFC 1123 subdomain must consist of").await;
    check(
        "POST",
        MAPS,
        json,
        r#"{"kind":"ConfigMap","apiVersion":"v1","metadata":{}}"#.into(),
        422,
        "name or generateName is required",
    )
    .await;
    check(
        "POST",
        MAPS,
        json,
        r#"{"kind":"ConfigMap","apiVersion":"v1","metadata":{"name":"x","namespace":"other"}}"#.into(),
        400,
        "the namespace of the provided object does not match the namespace sent on the request",
    )
    .await;
    check(
        "PUT",
        &format!("{MAPS}/x"),
        json,
        config_map("y").to_string(),
        400,
        "the name of the object (y) does not match the name on the URL (x)",
    )
    .await;
    check(
        "POST",
        "/api/v1/namespaces/none/configmaps",
        json,
        config_map("x").to_string(),
        404,
        "namespaces \"none\" not found",
    )
    .await;
    check(
        "GET",
        "/nothing/here",
        json,
        String::new(),
        404,
        "404 page not found",
    )
    .await;
    check(
        "GET",
        "/apis/nothing/v1/things",
        json,
        String::new(),
        404,
        "404 page not found",
    )
    .await;
    check(
        "GET",
        "/api/v1/things",
        json,
        String::new(),
        404,
        "the server could not find the requested resource",
    )
    .await;
    check(
        "PUT",
        MAPS,
        json,
        String::new(),
        405,
        "the server does not allow this method on the requested resource",
    )
    .await;
    check(
        "GET",
        &format!("{MAPS}?labelSelector=a%20b"),
        json,
        String::new(),
        400,
        "unable to parse requirement",
    )
    .await;
    check(
        "GET",
        &format!("{MAPS}?fieldSelector=data.a%3Db"),
        json,
        String::new(),
        400,
        "\"data.a\" is not a known field selector: only \"metadata.name\", \"metadata.namespace\"",
    )
    .await;
    check(
        "GET",
        &format!("{MAPS}?continue=x"),
        json,
        String::new(),
        400,
        "continue",
    )
    .await;
    assert_eq!(
        cluster.get(MAPS).await.json["items"],
        json!([]),
        "nothing was changed"
    );
}

#[tokio::test]
async fn unknown_fields_warn() {
    let cluster = Cluster::start().await;
    let mut map = config_map("x");
    map["datas"] = json!({});
    let made = cluster.post(MAPS, map).await;
    assert_eq!(made.code, 201);
    assert_eq!(
        made.headers.get("warning").and_then(|v| v.to_str().ok()),
        Some("299 - \"unknown field \\\"datas\\\"\"")
    );
}

#[tokio::test]
async fn lists_select_and_page() {
    let cluster = Cluster::start().await;
    for n in 0..7 {
        let mut map = config_map(&format!("m{n}"));
        map["metadata"]["labels"] = json!({"even": (n % 2 == 0).to_string()});
        assert_eq!(cluster.post(MAPS, map).await.code, 201);
    }
    let names = |value: &Value| -> Vec<String> {
        value["items"]
            .as_array()
            .expect("items")
            .iter()
            .map(|item| item["metadata"]["name"].as_str().expect("a name").to_string())
            .collect()
    };
    assert_eq!(
        names(
            &cluster
                .get(&format!("{MAPS}?labelSelector=even%3Dtrue"))
                .await
                .json
        ),
        ["m0", "m2", "m4", "m6"]
    );
    assert_eq!(
        names(
            &cluster
                .get(&format!("{MAPS}?fieldSelector=metadata.name%3Dm3"))
                .await
                .json
        ),
        ["m3"]
    );
    let first = cluster.get(&format!("{MAPS}?limit=3")).await.json;
    assert_eq!(
        (names(&first), first["metadata"]["remainingItemCount"].as_i64()),
        (vec!["m0".into(), "m1".into(), "m2".into()], Some(4))
    );
    cluster.delete(&format!("{MAPS}/m4"), json!({})).await;
    let token = first["metadata"]["continue"].as_str().expect("a token");
    let second = cluster
        .get(&format!("{MAPS}?limit=10&continue={token}"))
        .await
        .json;
    assert_eq!(
        names(&second),
        ["m3", "m4", "m5", "m6"],
        "later pages are of the first one's moment"
    );
    assert_eq!(
        second["metadata"]["resourceVersion"],
        first["metadata"]["resourceVersion"]
    );
    let all = cluster
        .send(
            "DELETE",
            &format!("{MAPS}?labelSelector=even%3Dtrue"),
            "application/json",
            "",
        )
        .await;
    assert_eq!(all.code, 200, "{}", all.text);
    assert_eq!(names(&cluster.get(MAPS).await.json), ["m1", "m3", "m5"]);
}

#[tokio::test]
async fn watches_follow() {
    let cluster = Cluster::start().await;
    cluster.post(MAPS, config_map("a")).await;
    let mut watch = cluster.watch(&format!("{MAPS}?watch=true&sendInitialEvents=true&resourceVersionMatch=NotOlderThan&allowWatchBookmarks=true")).await;
    assert_eq!(watch.brief().await, "ADDED a");
    let bookmark = watch.next().await.expect("a bookmark");
    assert_eq!(
        bookmark["object"]["metadata"]["annotations"]["k8s.io/initial-events-end"],
        "true"
    );
    cluster
        .patch(&format!("{MAPS}/a"), "merge-patch", json!({"data": {"n": "1"}}))
        .await;
    let changed = watch.next().await.expect("an event");
    assert_eq!(
        (
            changed["type"].as_str(),
            changed["object"]["kind"].as_str(),
            changed["object"]["data"]["n"].as_str()
        ),
        (Some("MODIFIED"), Some("ConfigMap"), Some("1"))
    );
    cluster.delete(&format!("{MAPS}/a"), json!({})).await;
    let gone = watch.next().await.expect("an event");
    assert_eq!(gone["type"], "DELETED");
    let before: i64 = changed["object"]["metadata"]["resourceVersion"]
        .as_str()
        .and_then(|v| v.parse().ok())
        .expect("a version");
    let after: i64 = gone["object"]["metadata"]["resourceVersion"]
        .as_str()
        .and_then(|v| v.parse().ok())
        .expect("a version");
    assert!(after > before);
    let mut resumed = cluster
        .watch(&format!(
            "{MAPS}?watch=true&resourceVersion={before}&timeoutSeconds=1"
        ))
        .await;
    assert_eq!(resumed.brief().await, "DELETED a");
    assert_eq!(resumed.next().await, None, "the watch times out");
}

#[tokio::test]
async fn finalizers_hold() {
    let cluster = Cluster::start().await;
    let mut map = config_map("held");
    map["metadata"]["finalizers"] = json!(["example.com/hold"]);
    cluster.post(MAPS, map).await;
    let uri = format!("{MAPS}/held");
    let marked = cluster.delete(&uri, json!({})).await;
    assert_eq!(
        (marked.code, marked.json["kind"].as_str()),
        (200, Some("ConfigMap"))
    );
    assert!(marked.json["metadata"]["deletionTimestamp"].is_string());
    assert_eq!(cluster.get(&uri).await.code, 200);
    let released = cluster
        .patch(&uri, "merge-patch", json!({"metadata": {"finalizers": null}}))
        .await;
    assert_eq!(released.code, 200, "{}", released.text);
    assert_eq!(cluster.get(&uri).await.code, 404);
    for (policy, finalizer) in [("Orphan", "orphan"), ("Foreground", "foregroundDeletion")] {
        cluster.post(MAPS, config_map("owner")).await;
        let uri = format!("{MAPS}/owner");
        let marked = cluster.delete(&uri, json!({"propagationPolicy": policy})).await;
        assert_eq!(marked.json["metadata"]["finalizers"], json!([finalizer]));
        cluster
            .patch(&uri, "merge-patch", json!({"metadata": {"finalizers": null}}))
            .await;
        assert_eq!(cluster.get(&uri).await.code, 404);
    }
    cluster.post(MAPS, config_map("x")).await;
    let wrong = cluster
        .delete(&format!("{MAPS}/x"), json!({"preconditions": {"uid": "nope"}}))
        .await;
    assert_eq!(wrong.code, 409);
    assert!(
        wrong.json["message"]
            .as_str()
            .expect("a message")
            .contains("the UID in the precondition (nope) does not match the UID in record")
    );
}

#[tokio::test]
async fn the_first_objects() {
    let cluster = Cluster::start().await;
    for uri in [
        "/api/v1/namespaces/kube-system",
        "/api/v1/namespaces/default/services/kubernetes",
        "/api/v1/namespaces/default/endpoints/kubernetes",
        "/apis/discovery.k8s.io/v1/namespaces/default/endpointslices/kubernetes",
        "/apis/scheduling.k8s.io/v1/priorityclasses/system-node-critical",
        "/apis/rbac.authorization.k8s.io/v1/clusterroles/cluster-admin",
    ] {
        assert_eq!(cluster.get(uri).await.code, 200, "{uri}");
    }
    let service = cluster
        .get("/api/v1/namespaces/default/services/kubernetes")
        .await
        .json;
    assert_eq!(service["spec"]["clusterIP"], "10.96.0.1");
}

#[tokio::test]
async fn paths_that_are_no_resource() {
    let cluster = Cluster::start().await;
    assert_eq!(cluster.get("/healthz").await.text, "ok");
    assert!(
        cluster
            .get("/readyz?verbose")
            .await
            .text
            .ends_with("readyz check passed\n")
    );
    assert_eq!(cluster.get("/version").await.json["gitVersion"], "v1.36.4+skiff");
    assert_eq!(cluster.get("/api").await.json["versions"], json!(["v1"]));
    let apps = cluster.get("/apis/apps/v1").await.json;
    assert!(
        apps["resources"]
            .as_array()
            .expect("a list")
            .iter()
            .any(|r| r["name"] == "deployments/scale" && r["group"] == "autoscaling")
    );
    let accept = "application/json;g=apidiscovery.k8s.io;v=v2;as=APIGroupDiscoveryList,application/json";
    let all = cluster
        .send_as(cluster.admin(), "GET", "/apis", &[("accept", accept)], "")
        .await;
    assert_eq!(all.json["kind"], "APIGroupDiscoveryList");
    assert_eq!(
        all.headers["content-type"],
        "application/json;g=apidiscovery.k8s.io;v=v2;as=APIGroupDiscoveryList"
    );
    let etag = all.headers["etag"].to_str().expect("text").to_string();
    let same = cluster
        .send_as(
            cluster.admin(),
            "GET",
            "/apis",
            &[("accept", accept), ("if-none-match", &etag)],
            "",
        )
        .await;
    assert_eq!(same.code, 304);
    assert!(
        cluster
            .get("/metrics")
            .await
            .text
            .contains("apiserver_request_total{")
    );
    assert_eq!(cluster.get("/openid/v1/jwks").await.json["keys"][0]["kty"], "EC");
}

#[tokio::test]
async fn tables_and_metadata() {
    let cluster = Cluster::start().await;
    cluster.post(MAPS, config_map("one")).await;
    let table = cluster
        .send_as(
            cluster.admin(),
            "GET",
            MAPS,
            &[(
                "accept",
                "application/json;as=Table;v=v1;g=meta.k8s.io,application/json",
            )],
            "",
        )
        .await
        .json;
    assert_eq!(
        (
            table["kind"].as_str(),
            table["columnDefinitions"][0]["name"].as_str()
        ),
        (Some("Table"), Some("Name"))
    );
    assert_eq!(
        (&table["rows"][0]["cells"][0], &table["rows"][0]["object"]["kind"]),
        (&json!("one"), &json!("PartialObjectMetadata"))
    );
    let metadata = cluster
        .send_as(
            cluster.admin(),
            "GET",
            MAPS,
            &[(
                "accept",
                "application/json;as=PartialObjectMetadataList;v=v1;g=meta.k8s.io",
            )],
            "",
        )
        .await
        .json;
    assert_eq!(metadata["items"][0]["metadata"]["name"], "one");
    assert_eq!(metadata["items"][0].get("data"), None);
    let review = json!({"apiVersion": "authentication.k8s.io/v1", "kind": "SelfSubjectReview"}).to_string();
    let accept = "application/json;as=Table;v=v1;g=meta.k8s.io";
    for (accept, code) in [
        (accept.to_string(), 406),
        (format!("{accept},application/json"), 201),
    ] {
        let headers = [("accept", accept.as_str()), ("content-type", "application/json")];
        let path = "/apis/authentication.k8s.io/v1/selfsubjectreviews";
        let answer = cluster
            .send_as(cluster.admin(), "POST", path, &headers, review.clone())
            .await;
        assert_eq!(answer.code, code, "{accept}: reviews have no columns");
    }
    let yaml = cluster
        .send_as(
            cluster.admin(),
            "GET",
            &format!("{MAPS}/one"),
            &[("accept", "application/yaml")],
            "",
        )
        .await;
    assert!(yaml.text.contains("kind: ConfigMap"), "{}", yaml.text);
    let refused = cluster
        .send_as(
            cluster.admin(),
            "GET",
            MAPS,
            &[("accept", "application/cbor")],
            "",
        )
        .await;
    assert_eq!(
        (refused.code, refused.json["reason"].as_str()),
        (406, Some("NotAcceptable"))
    );
    let posted = cluster
        .send(
            "POST",
            MAPS,
            "application/yaml",
            "kind: ConfigMap\napiVersion: v1\nmetadata:\n  name: from-yaml\n",
        )
        .await;
    assert_eq!(posted.code, 201, "{}", posted.text);
}

#[tokio::test]
async fn who_may_do_what() {
    let cluster = Cluster::start().await;
    let nobody = || {
        cluster
            .server
            .service(UserInfo::new("jane", Vec::<String>::new()))
    };
    let refused = cluster.send_as(nobody(), "GET", MAPS, &[], "").await;
    assert_eq!(
        (refused.code, refused.json["message"].as_str()),
        (
            403,
            Some(
                "configmaps is forbidden: User \"jane\" cannot list resource \"configmaps\" in API group \"\" in the namespace \"default\""
            )
        )
    );
    let binding = json!({"metadata": {"name": "jane"}, "subjects": [{"kind": "User", "name": "jane", "apiGroup": "rbac.authorization.k8s.io"}],
        "roleRef": {"kind": "ClusterRole", "name": "view", "apiGroup": "rbac.authorization.k8s.io"}});
    let made = cluster
        .post(
            "/apis/rbac.authorization.k8s.io/v1/namespaces/default/rolebindings",
            binding,
        )
        .await;
    assert_eq!(made.code, 201, "{}", made.text);
    // The binding takes effect when the authorizer has seen it: a moment later.
    let mut code = 403;
    for _ in 0..1000 {
        code = cluster.send_as(nobody(), "GET", MAPS, &[], "").await.code;
        if code == 200 {
            break;
        }
        tokio::task::yield_now().await;
    }
    assert_eq!(code, 200);
    let review = cluster.post("/apis/authorization.k8s.io/v1/subjectaccessreviews", json!({"spec": {"user": "jane", "resourceAttributes": {"verb": "delete", "resource": "configmaps", "namespace": "default"}}})).await;
    assert_eq!(
        (review.code, &review.json["status"]["allowed"]),
        (201, &json!(false)),
        "{}",
        review.text
    );
    let own = cluster.send_as(nobody(), "POST", "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews", &[("content-type", "application/json")],
        json!({"spec": {"resourceAttributes": {"verb": "get", "resource": "configmaps", "namespace": "default"}}}).to_string()).await;
    assert_eq!(
        (own.code, &own.json["status"]["allowed"]),
        (201, &json!(true)),
        "{}",
        own.text
    );
}

#[tokio::test]
async fn nobody_grants_what_they_do_not_hold() {
    let cluster = Cluster::start().await;
    let bindings = "/apis/rbac.authorization.k8s.io/v1/namespaces/default/rolebindings";
    let binding = |name: &str, role: &str, user: &str| {
        json!({"metadata": {"name": name}, "subjects": [{"kind": "User", "name": user, "apiGroup": "rbac.authorization.k8s.io"}],
            "roleRef": {"kind": "ClusterRole", "name": role, "apiGroup": "rbac.authorization.k8s.io"}})
    };
    assert_eq!(
        cluster
            .post(bindings, binding("jane", "admin", "jane"))
            .await
            .code,
        201
    );
    let jane = || {
        cluster
            .server
            .service(UserInfo::new("jane", Vec::<String>::new()))
    };
    let json = [("content-type", "application/json")];
    let send = async |value: Value| {
        cluster
            .send_as(jane(), "POST", bindings, &json, value.to_string())
            .await
    };
    let mut view = send(binding("v", "view", "joe")).await;
    for _ in 0..1000 {
        if view.code != 403 {
            break;
        }
        tokio::task::yield_now().await;
        view = send(binding("v", "view", "joe")).await;
    }
    assert_eq!(view.code, 201, "an admin may hand out view: {}", view.text);
    let more = send(binding("more", "cluster-admin", "jane")).await;
    assert_eq!(more.code, 403, "{}", more.text);
    let message = more.json["message"].as_str().expect("a message");
    assert!(
        message.starts_with("rolebindings.rbac.authorization.k8s.io \"more\" is forbidden: user \"jane\" (groups=[\"system:authenticated\"]) is attempting to grant RBAC permissions not currently held:\n"),
        "{message}"
    );
    // Who may not grant it hears that before what else is wrong.
    let mut odd = binding("odd", "cluster-admin", "jane");
    odd["roleRef"]["apiGroup"] = json!("foo");
    let odd = send(odd).await;
    assert_eq!(odd.code, 403, "{}", odd.text);
    let mut odd = binding("odd", "cluster-admin", "jane");
    odd["roleRef"]["kind"] = json!("Foo");
    let odd = send(odd).await;
    assert_eq!(odd.code, 500, "{}", odd.text);
    assert_eq!(odd.json["message"], "unsupported role reference kind: \"Foo\"");
}

#[tokio::test]
async fn marks_of_writes() {
    let cluster = Cluster::start().await;
    let headers = [
        ("content-type", "application/json"),
        ("x-skiff-cause", "pods/default/p@3"),
    ];
    let made = cluster
        .send_as(
            cluster.admin(),
            "POST",
            MAPS,
            &headers,
            config_map("traced").to_string(),
        )
        .await;
    let marks = cluster.server.recorder().marks();
    let mark = marks.iter().find(|mark| mark.name == "traced").expect("a mark");
    assert_eq!(
        (mark.verb.as_str(), mark.code, mark.user.as_str()),
        ("create", 201, "admin")
    );
    assert_eq!(
        Some(mark.resource_version.as_str()),
        made.json["metadata"]["resourceVersion"].as_str()
    );
    assert_eq!(
        mark.cause.as_ref().map(ToString::to_string).as_deref(),
        Some("pods/default/p@3")
    );
    let stages: Vec<&str> = mark.stages.iter().map(|stage| stage.name.as_str()).collect();
    for stage in [
        "authn",
        "authz",
        "decode",
        "mutating-admission",
        "prepare",
        "validate",
        "validating-admission",
        "store",
    ] {
        assert!(stages.contains(&stage), "{stage}: {stages:?}");
    }
    assert_eq!(cluster.get("/debug/skiff/trace").await.code, 200);
}

#[tokio::test]
async fn what_every_cluster_has_is_made_again() {
    let cluster = Cluster::start().await;
    let lease = "/api/v1/namespaces/kube-node-lease";
    let deleted = cluster.delete(lease, json!({})).await;
    assert_eq!(deleted.code, 200, "{}", deleted.text);
    let gone = cluster
        .put(
            &format!("{lease}/finalize"),
            json!({"kind": "Namespace", "apiVersion": "v1", "metadata": {"name": "kube-node-lease"}, "spec": {}}),
        )
        .await;
    assert_eq!(gone.code, 200, "{}", gone.text);
    let objects = [
        "/api/v1/namespaces/default/services/kubernetes",
        "/api/v1/namespaces/default/endpoints/kubernetes",
        "/apis/discovery.k8s.io/v1/namespaces/default/endpointslices/kubernetes",
        "/api/v1/namespaces/kube-system/configmaps/extension-apiserver-authentication",
    ];
    for uri in objects {
        let deleted = cluster.delete(uri, json!({})).await;
        assert_eq!(deleted.code, 200, "{uri}: {}", deleted.text);
    }
    for uri in objects.iter().chain([&lease]) {
        assert_eq!(cluster.get(uri).await.code, 404, "{uri}");
    }
    cluster.server.repair().await.expect("repairs");
    let mut versions = Vec::new();
    for uri in objects.iter().chain([&lease]) {
        let found = cluster.get(uri).await;
        assert_eq!(found.code, 200, "{uri}: {}", found.text);
        versions.push(found.json["metadata"]["resourceVersion"].clone());
    }
    // What is there is left alone.
    cluster.server.repair().await.expect("repairs");
    for (uri, version) in objects.iter().chain([&lease]).zip(versions) {
        assert_eq!(
            cluster.get(uri).await.json["metadata"]["resourceVersion"],
            version,
            "{uri}"
        );
    }
}
