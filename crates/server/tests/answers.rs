//! Requests and what kube-apiserver v1.36.4 answered to them, a row each: the code, and how the body begins (a
//! `Status` by its message).

mod support;

use serde_json::{Value, json};
use support::Cluster;

const MAPS: &str = "/api/v1/namespaces/default/configmaps";
const ROUTED: &str = "the server could not find the requested resource";
const METHOD: &str = "the server does not allow this method on the requested resource";
const NO_PAGE: &str = "404 page not found\n";

async fn check(cluster: &Cluster, method: &str, uri: &str, body: &str, code: u16, words: &str) {
    let kind = match (method, body.as_bytes().first()) {
        ("PATCH", Some(b'[')) => "application/json-patch+json",
        ("PATCH", _) => "application/merge-patch+json",
        (_, Some(b'{')) => "application/json",
        _ => "application/yaml",
    };
    let reply = cluster.send(method, uri, kind, body.to_string()).await;
    let said = match reply.json.get("message").and_then(Value::as_str) {
        Some(message) => message.to_string(),
        None => reply.text.clone(),
    };
    assert_eq!(reply.code, code, "{method} {uri} {body}: {}", reply.text);
    assert!(
        said.starts_with(words),
        "{method} {uri} {body}: {said:?} instead of {words:?}"
    );
}

#[tokio::test]
async fn paths_and_methods() {
    let cluster = Cluster::start().await;
    let watch = "Internal Server Error: \"/api/v1/watch\": failed to create RequestInfo: unable to determine kind and namespace from url, /api/v1/watch\n";
    for (method, uri, code, words) in [
        (
            "POST",
            "/",
            200,
            "{\n  \"paths\": [\n    \"/.well-known/openid-configuration\",",
        ),
        (
            "GET",
            "/version/",
            200,
            "{\n  \"major\": \"1\",\n  \"minor\": \"36\",",
        ),
        ("PUT", "/version", 405, METHOD),
        ("GET", "/version/foo", 404, ROUTED),
        ("POST", "/api/v2", 404, ROUTED),
        ("GET", "/api/v2", 404, ROUTED),
        ("PUT", "/apis/foo/v1", 404, NO_PAGE),
        ("DELETE", "/apis//v1", 404, NO_PAGE),
        ("POST", "/.well-known/openid-configuration", 405, METHOD),
        ("GET", "/.well-known/openid-configuration/", 200, "{"),
        ("POST", "/openid/v1/jwks", 405, METHOD),
        ("GET", "/openapi/v3/", 404, ""),
        ("GET", "/debug/pprof/foo", 404, "Unknown profile\n"),
        ("POST", "/debug/flags/v", 406, "unsupported http method\n"),
        (
            "GET",
            "/debug/flags/foo",
            200,
            "<html>\n<head>\n<title>/debug/flags/</title>",
        ),
        ("GET", "/debug/foo", 404, NO_PAGE),
        ("DELETE", "/api/v1/namespaces/kube-node-lease?dryRun=All", 200, ""),
        (
            "GET",
            "/apis/events.k8s.io/v1/events?fieldSelector=involvedObject.kind%3DPod",
            400,
            "field label not supported: involvedObject.kind",
        ),
        (
            "GET",
            "/apis/events.k8s.io/v1/events?fieldSelector=regarding.kind%3DPod",
            200,
            "{\"kind\":\"EventList\"",
        ),
        (
            "GET",
            "/apis/resource.k8s.io/v1/resourceslices?fieldSelector=metadata.namespace%3Da",
            400,
            "field label not supported for resource.k8s.io/v1, Kind=ResourceSlice: metadata.namespace",
        ),
        ("GET", "/healthz?exclude=foo&verbose", 200, "[+]ping ok\n"),
        ("GET", "/api/v1/watch", 500, watch),
        ("GET", "/api/v1/watch/pods/x", 404, ROUTED),
        ("POST", "/api/v1/watch/pods", 405, METHOD),
        ("GET", "/api/v1/proxy/nodes/x", 404, ROUTED),
        ("GET", "/api/v1/bindings", 404, ROUTED),
        (
            "POST",
            "/apis/authorization.k8s.io/v1/localsubjectaccessreviews",
            404,
            ROUTED,
        ),
        (
            "GET",
            &format!("{MAPS}/a%25b"),
            400,
            "Name parameter invalid: \"a%b\": may not contain '%'",
        ),
        (
            "DELETE",
            &format!("{MAPS}/%2e%2e"),
            400,
            "Name parameter invalid: \"..\": may not be '..'",
        ),
        (
            "GET",
            &format!("{MAPS}?limit="),
            400,
            "strconv.ParseInt: parsing \"\": invalid syntax",
        ),
        (
            "GET",
            &format!("{MAPS}?labelSelector=%zz&a;b=c"),
            200,
            "{\"kind\":\"ConfigMapList\"",
        ),
        (
            "GET",
            &format!("{MAPS}?labelSelector=k%3Cx"),
            400,
            "unable to parse requirement: values[0]: Invalid value: \"x\": for 'Gt', 'Lt' operators, the value must be an integer",
        ),
        (
            "GET",
            &format!("{MAPS}?fieldSelector=a%3Db%3Dc"),
            400,
            "invalid field selector: unescaped character in value: 61",
        ),
    ] {
        check(&cluster, method, uri, "", code, words).await;
    }
    let refused = cluster.get("/foo/bar").await;
    assert_eq!(refused.text, NO_PAGE);
    let missing = cluster.get(&format!("{MAPS}/none")).await;
    assert_eq!(
        missing.text,
        "{\"kind\":\"Status\",\"apiVersion\":\"v1\",\"metadata\":{},\"status\":\"Failure\",\"message\":\"configmaps \\\"none\\\" not found\",\"reason\":\"NotFound\",\"details\":{\"name\":\"none\",\"kind\":\"configmaps\"},\"code\":404}\n"
    );
}

#[tokio::test]
async fn bodies_that_do_not_fit() {
    let cluster = Cluster::start().await;
    let made = cluster
        .post(
            MAPS,
            json!({"metadata": {"name": "m"}, "data": {"b": "<1>", "a": "2"}}),
        )
        .await;
    assert_eq!(made.code, 201, "{}", made.text);
    let one = format!("{MAPS}/m");
    let dry = format!("{one}?dryRun=All");
    let uid = "11111111-2222-3333-4444-555555555555";
    for (method, uri, body, code, words) in [
        (
            "PUT",
            &one,
            r#"{"metadata":{"name":"m","namespace":"zz"}}"#,
            400,
            "the namespace of the provided object does not match the namespace sent on the request",
        ),
        (
            "PUT",
            &one,
            r#"{"kind":"Foo","apiVersion":"v1","metadata":{"name":"m"}}"#,
            400,
            "Foo in version \"v1\" cannot be handled as a ConfigMap: no kind \"Foo\" is registered for version \"v1\" in scheme \"pkg/runtime/scheme.go:111\"",
        ),
        (
            "PUT",
            &dry,
            &format!(r#"{{"metadata":{{"name":"m","uid":"{uid}"}}}}"#),
            409,
            "Operation cannot be fulfilled on configmaps \"m\": StorageError: invalid object, Code: 4, Key: /configmaps/default/m,",
        ),
        (
            "PUT",
            &one,
            &format!(r#"{{"metadata":{{"name":"m","uid":"{uid}"}}}}"#),
            409,
            "Operation cannot be fulfilled on configmaps \"m\": StorageError: invalid object, Code: 4, Key: /registry/configmaps/default/m,",
        ),
        (
            "POST",
            &format!("{MAPS}?dryRun=All"),
            r#"{"metadata":{"name":"n","resourceVersion":"5"}}"#,
            201,
            "",
        ),
        (
            "POST",
            &MAPS.to_string(),
            r#"{"metadata":{"name":"n","resourceVersion":"5"}}"#,
            500,
            "resourceVersion should not be set on objects to be created",
        ),
    ] {
        check(&cluster, method, uri, body, code, words).await;
    }
    let twice = "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: twice}\nkind: ConfigMap\n";
    let warned = cluster
        .send("POST", &format!("{MAPS}?dryRun=All"), "application/yaml", twice)
        .await;
    assert_eq!(
        warned.headers["warning"],
        "299 - \"line 4: key \\\"kind\\\" already set in map\""
    );
    // What a patch touches is shown sorted, all else as it is declared.
    let broken = cluster
        .patch(&dry, "merge-patch", json!({"data": {"b": 1}}))
        .await;
    let version = made.json["metadata"]["resourceVersion"]
        .as_str()
        .unwrap_or_default();
    let uid = made.json["metadata"]["uid"].as_str().unwrap_or_default();
    let opening = format!(
        r#" "" is invalid: patch: Invalid value: "{{\"apiVersion\":\"v1\",\"data\":{{\"a\":\"2\",\"b\":1}},\"kind\":\"ConfigMap\",\"metadata\":{{\"name\":\"m\",\"namespace\":\"default\",\"uid\":\"{uid}\",\"resourceVersion\":\"{version}\",\"creationTimestamp\":"#
    );
    let message = broken.json["message"].as_str().unwrap_or_default();
    assert!(message.starts_with(&opening), "{message}\n{opening}");
}

#[tokio::test]
async fn options_of_subresources() {
    let cluster = Cluster::start().await;
    let pod = "/api/v1/namespaces/default/pods/none";
    let lines =
        "PodLogOptions \"none\" is invalid: tailLines: Invalid value: -1: must be greater than or equal to 0";
    let time = "parsing time \"2020\" as \"2006-01-02T15:04:05Z07:00\": cannot parse \"\" as \"-\"";
    let foo = "Namespace \"default\" is invalid: spec.finalizers[0]: Invalid value: \"foo\": name is neither a standard finalizer name nor is it fully qualified";
    let number = "strconv.ParseInt: parsing \"x\": invalid syntax";
    let syntax = "cannot convert to []int32: strconv.ParseUint: parsing \"x\": invalid syntax";
    let range = "cannot convert to []int32: strconv.ParseUint: parsing \"70000\": value out of range";
    for (method, uri, body, code, words) in [
        ("GET", &format!("{pod}/log?tailLines=x"), "", 400, number),
        ("GET", &format!("{pod}/log?tailLines=-1"), "", 422, lines),
        ("GET", &format!("{pod}/log?sinceTime=2020"), "", 400, time),
        ("GET", &format!("{pod}/log"), "", 404, "pods \"none\" not found"),
        ("POST", &format!("{pod}/portforward?ports=x"), "", 400, syntax),
        ("GET", &format!("{pod}/portforward?ports=70000"), "", 400, range),
        ("GET", &format!("{pod}/portforward?ports=80,x"), "", 400, syntax),
        (
            "GET",
            &format!("{pod}/portforward?ports=80,81"),
            "",
            404,
            "pods \"none\" not found",
        ),
        (
            "PUT",
            &"/api/v1/namespaces/default/finalize".to_string(),
            r#"{"metadata":{"name":"default"},"spec":{"finalizers":["foo"]}}"#,
            422,
            foo,
        ),
    ] {
        check(&cluster, method, uri, body, code, words).await;
    }
}

#[tokio::test]
async fn fields_are_in_the_order_of_what_they_say() {
    let cluster = Cluster::start().await;
    let port = |port: u32| json!({"containerPort": port, "protocol": "TCP"});
    let pod = json!({"metadata": {"name": "p"}, "spec": {"containers": [
        {"name": "c", "image": "i", "ports": [port(443), port(80), port(9)]}]}});
    let pods = "/api/v1/namespaces/default/pods";
    cluster
        .post(
            "/api/v1/namespaces/default/serviceaccounts",
            json!({"metadata": {"name": "default"}}),
        )
        .await;
    let made = cluster.post(pods, pod).await;
    assert_eq!(made.code, 201, "{}", made.text);
    let read = cluster.get(&format!("{pods}/p")).await;
    let listed = cluster.get(pods).await;
    for text in [made.text, read.text, listed.text] {
        let at = |port: u32| text.find(&format!("k:{{\\\"containerPort\\\":{port},"));
        assert!(at(9).is_some() && at(9) < at(80) && at(80) < at(443), "{text}");
    }
}

#[tokio::test]
async fn documents_that_clients_keep() {
    let cluster = Cluster::start().await;
    let path = "/openapi/v3/apis/batch/v1";
    let whole = cluster.get(path).await;
    let tag = whole.headers["etag"].to_str().expect("text").to_owned();
    assert_eq!(tag.len(), 130, "{tag}");
    assert!(whole.headers.contains_key("last-modified"));
    let ask = async |name: &str, value: &str| {
        cluster
            .send_as(cluster.admin(), "GET", path, &[(name, value)], "")
            .await
    };
    let part = ask("range", "bytes=0-3").await;
    assert_eq!(
        (part.code, part.text.as_str()),
        (206, &whole.text[..4]),
        "{:?}",
        part.headers
    );
    assert_eq!(
        part.headers["content-range"].to_str().ok(),
        Some(format!("bytes 0-3/{}", whole.text.len()).as_str())
    );
    assert_eq!(ask("if-none-match", &tag).await.code, 304);
    let later = ask("if-modified-since", "Mon, 16 Nov 2099 10:37:56 GMT").await;
    assert_eq!(later.code, 304);
    assert_eq!(ask("range", "bytes=99999999-").await.code, 416);
    let moved = cluster.get(&format!("{path}?hash=X")).await;
    assert_eq!(
        (moved.code, moved.headers["etag"].to_str().ok()),
        (301, Some(tag.as_str()))
    );
    assert!(
        cluster
            .get("/metrics")
            .await
            .headers
            .contains_key("process-start-time-unix")
    );
    // The newer discovery is chosen wherever it stands, but not under a path that ends in a slash.
    let newer = "application/json,application/json;g=apidiscovery.k8s.io;v=v2;as=APIGroupDiscoveryList";
    for (path, kind) in [("/api", "APIGroupDiscoveryList"), ("/apis/", "APIGroupList")] {
        let found = cluster
            .send_as(cluster.admin(), "GET", path, &[("accept", newer)], "")
            .await;
        let opening = format!("{{\"kind\":\"{kind}\",");
        assert!(found.text.starts_with(&opening), "{path}: {}", found.text);
    }
}

#[tokio::test]
async fn bookmarks_are_whole_objects() {
    let cluster = Cluster::start().await;
    let watch =
        "watch=true&sendInitialEvents=true&resourceVersionMatch=NotOlderThan&allowWatchBookmarks=true";
    for (path, field) in [
        (
            "apps/v1/deployments",
            r#""spec":{"replicas":0,"selector":null,"strategy":{},"template":{"metadata":{},"spec":{"containers":null}}}"#,
        ),
        (
            "apps/v1/daemonsets",
            r#""deprecated.daemonset.template.generation":"0""#,
        ),
        ("scheduling.k8s.io/v1/priorityclasses", r#""value":0"#),
        ("coordination.k8s.io/v1/leases", r#""spec":{}"#),
    ] {
        let mut events = cluster.watch(&format!("/apis/{path}?{watch}")).await;
        let last = loop {
            let event = events.next().await.expect("an event");
            if event["type"] == "BOOKMARK" {
                break event.to_string();
            }
        };
        let end = r#""k8s.io/initial-events-end":"true""#;
        assert!(last.contains(field) && last.contains(end), "{path}: {last}");
    }
}

#[tokio::test]
async fn patches_of_a_scale() {
    let cluster = Cluster::start().await;
    let sets = "/apis/apps/v1/namespaces/default/replicasets";
    let template =
        json!({"metadata": {"labels": {"a": "b"}}, "spec": {"containers": [{"name": "c", "image": "i"}]}});
    let set = json!({"metadata": {"name": "w"},
        "spec": {"replicas": 2, "selector": {"matchLabels": {"a": "b"}}, "template": template}});
    let made = cluster.post(sets, set).await;
    assert_eq!(made.code, 201, "{}", made.text);
    let uri = format!("{sets}/w/scale?dryRun=All");
    let broken = cluster
        .patch(&uri, "merge-patch", json!({"spec": {"replicas": "a"}}))
        .await;
    let message = broken.json["message"].as_str().unwrap_or_default();
    assert!(
        message.contains(r#"\"managedFields\":[{\"manager\":"#)
            && message.contains(r#"\"fieldsV1\":{\"f:spec\":{\"f:replicas\":{}}}"#),
        "{message}"
    );
    let uid = "11111111-2222-3333-4444-555555555555";
    let other = cluster
        .patch(&uri, "merge-patch", json!({"metadata": {"uid": uid}}))
        .await;
    let message = other.json["message"].as_str().unwrap_or_default();
    let opening = format!(
        "Operation cannot be fulfilled on replicasets/scale.apps \"w\": Precondition failed: UID in precondition: {uid},"
    );
    assert!(message.starts_with(&opening), "{message}");
}

#[tokio::test]
async fn metadata_is_complained_about_once() {
    let cluster = Cluster::start().await;
    let made = cluster.post(MAPS, json!({"metadata": {"name": "m"}})).await;
    assert_eq!(made.code, 201, "{}", made.text);
    let bad = cluster
        .patch(
            &format!("{MAPS}/m"),
            "merge-patch",
            json!({"metadata": {"generateName": "A"}}),
        )
        .await;
    let causes = bad.json["details"]["causes"].as_array().map(Vec::len);
    assert_eq!((bad.code, causes), (422, Some(1)), "{}", bad.text);
    for body in ["[]", "\"x\""] {
        let refused = cluster
            .send("DELETE", &format!("{MAPS}/m"), "application/json", body)
            .await;
        let message = refused.json["message"].as_str().unwrap_or_default();
        assert!(
            refused.code == 400
                && message.starts_with("couldn't get version/kind; json parse error: json: cannot unmarshal"),
            "{message}"
        );
    }
}

#[tokio::test]
async fn a_dry_run_sees_what_was_written() {
    use skiff_store::{Expect, Op, Outcome, Store};
    let dir = tempfile::tempdir().expect("a folder");
    let store = std::sync::Arc::new(skiff_store::Embedded::open(dir.path().join("store")).expect("a store"));
    let cluster = Cluster::on(store.clone()).await;
    let made = cluster.post(MAPS, json!({"metadata": {"name": "m"}})).await;
    assert_eq!(made.code, 201, "{}", made.text);
    let mut revision: i64 = made.json["metadata"]["resourceVersion"]
        .as_str()
        .and_then(|version| version.parse().ok())
        .expect("a version");
    let metadata = made.json["metadata"].clone();
    // Behind the server's back, so that its cache has no chance to know before it is asked.
    for n in 0..100 {
        let object = json!({"kind": "ConfigMap", "apiVersion": "v1", "metadata": metadata, "data": {"n": n.to_string()}});
        let put = Op::Put(object.to_string().into());
        let key = "/registry/configmaps/default/m";
        let expect = Expect::Revision(revision);
        match store.write(key, expect, put, None).await.expect("a write") {
            Outcome::Done { revision: new, .. } => revision = new,
            other => panic!("{other:?}"),
        }
        let uri = format!("{MAPS}/m?dryRun=All");
        let seen = cluster
            .patch(&uri, "merge-patch", json!({"data": {"x": "y"}}))
            .await;
        assert_eq!(seen.json["data"]["n"], n.to_string(), "{}", seen.text);
    }
}

#[tokio::test]
async fn the_status_of_a_service_may_come_first() {
    let cluster = Cluster::start().await;
    let service = json!({"metadata": {"name": "s"}, "spec": {"ports": [{"port": 80}]}});
    let uri = "/api/v1/namespaces/default/services/s/status";
    let put = cluster.put(uri, service).await;
    assert_eq!(put.code, 201, "{}", put.text);
}

#[tokio::test]
async fn what_is_empty_or_unreadable() {
    let cluster = Cluster::start().await;
    let accept = "application/json;as=PartialObjectMetadataList;v=v1;g=meta.k8s.io";
    let pods = "/api/v1/namespaces/default/pods";
    let none = cluster
        .send_as(cluster.admin(), "GET", pods, &[("accept", accept)], "")
        .await;
    assert!(none.text.ends_with(",\"items\":null}\n"), "{}", none.text);
    let binding = cluster.post(&format!("{pods}/p/binding"), json!({})).await;
    assert_eq!(
        binding.json["message"],
        "name in URL does not match name in Binding object"
    );
    let lease = json!({"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": {"name": "l"},
        "spec": {"renewTime": 1}});
    let uri = "/apis/coordination.k8s.io/v1/namespaces/default/leases/l?fieldManager=m";
    let refused = cluster
        .send("PATCH", uri, "application/apply-patch+yaml", lease.to_string())
        .await;
    let message = refused.json["message"].as_str().unwrap_or_default();
    assert!(
        message.ends_with("Kind=Lease: json: cannot unmarshal number into Go value of type string"),
        "{message}"
    );
}

#[tokio::test]
async fn requests_that_leave_something_out() {
    let cluster = Cluster::start().await;
    let made = cluster.post(MAPS, json!({"metadata": {"name": "m"}})).await;
    assert_eq!(made.code, 201, "{}", made.text);
    let (namespace, name) = ("Namespace parameter required.", "name must be provided");
    let pods = "/api/v1/namespaces/default/pods";
    let deployment = "/apis/apps/v1/namespaces/default/deployments/d";
    for (method, uri, body, code, words) in [
        (
            "GET",
            "/api/v1/namespaces//configmaps",
            "",
            200,
            "{\"kind\":\"ConfigMapList\"",
        ),
        ("GET", "/api/v1/namespaces//configmaps/m", "", 400, namespace),
        ("DELETE", "/api/v1/namespaces//configmaps/m", "", 400, namespace),
        ("DELETE", "/api/v1/namespaces//configmaps", "", 400, namespace),
        ("GET", &format!("{pods}//log"), "", 400, name),
        ("PUT", &format!("{pods}//status"), "{}", 400, name),
        ("DELETE", &format!("{pods}//status"), "", 405, METHOD),
        ("GET", "/api/v1/nodes//status", "", 400, name),
        ("DELETE", "/metrics", "", 200, "metrics reset\n"),
        (
            "GET",
            &format!("{MAPS}?resourceVersion=x&continue=x"),
            "",
            400,
            "invalid continue token: continue key is not valid: illegal base64 data at input byte 0",
        ),
        (
            "PATCH",
            &format!("{MAPS}/m"),
            r#"{"apiVersion":null}"#,
            400,
            "the name of the object (m based on URL) was undeterminable: name must be provided",
        ),
        (
            "PATCH",
            &format!("{MAPS}/m"),
            r#"{"data":{"a":1e400}}"#,
            400,
            "error decoding patch: json: cannot unmarshal number 1e400 into Go value of type float64",
        ),
        (
            "PUT",
            &format!("{deployment}/scale"),
            r#"{"apiVersion":"apps/v1beta1","kind":"Scale","metadata":{"name":"d"}}"#,
            400,
            "the API version in the data (apps/v1beta1) does not match the expected API version (autoscaling/v1)",
        ),
        (
            "POST",
            MAPS,
            r#"{"apiVersion":"v1","kind":"Secret","metadata":{"name":"x"},"data":{"a":"one"}}"#,
            400,
            "Secret in version \"v1\" cannot be handled as a ConfigMap: illegal base64 data at input byte 0",
        ),
        (
            "POST",
            "/apis/apiregistration.k8s.io/v1/apiservices",
            r#"{"apiVersion":"v1","kind":"ConfigMap","metadata":{"name":"x"}}"#,
            400,
            "ConfigMap in version \"v1\" cannot be handled as a APIService: no kind \"ConfigMap\" is registered for version \"v1\" in scheme",
        ),
        (
            "POST",
            "/api/v1/namespaces/default/events",
            r#"{"metadata":{"name":".."},"involvedObject":{"namespace":"default"}}"#,
            422,
            "Event \"..\" is invalid: metadata.name: Invalid value: \"..\": may not be '..'",
        ),
        (
            "POST",
            "/apis/events.k8s.io/v1/namespaces/default/events",
            r#"{"regarding":{"namespace":"other"}}"#,
            422,
            "Event \"\" is invalid: [involvedObject.namespace: Invalid value: \"other\": does not match event.namespace, metadata.name: Required value: name or generateName is required, eventTime: Required value",
        ),
        (
            "POST",
            "/apis/batch/v1/namespaces/default/jobs",
            r#"{"metadata":{"name":"a.-"},"spec":{"template":{"spec":{"restartPolicy":"Never","containers":[{"name":"c","image":"i"}]}}}}"#,
            422,
            "Job.batch \"a.-\" is invalid: [metadata.name: Invalid value: \"a.-\": a lowercase RFC 1123 subdomain must consist of lower case alphanumeric characters, '-' or '.', and must start and end with an alphanumeric character (e.g. 'example.com', regex used for validation is '[a-z0-9]([-a-z0-9]*[a-z0-9])?(\\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*'), spec.template.labels: ",
        ),
    ] {
        check(&cluster, method, uri, body, code, words).await;
    }
    for (uri, body, words) in [
        (
            "/apis/networking.k8s.io/v1/namespaces/default/ingresses",
            r#"{"metadata":{"name":"i"},"spec":{"rules":[]}}"#,
            "Ingress.networking.k8s.io \"i\" is invalid: spec: Invalid value: []: either `defaultBackend` or `rules` must be specified",
        ),
        (
            "/apis/batch/v1/namespaces/default/jobs",
            r#"{"metadata":{"name":"j"},"spec":{"template":{"metadata":{"labels":{"job-name":"k"}},"spec":{"restartPolicy":"Never","containers":[{"name":"c","image":"i"}]}}}}"#,
            "Job.batch \"j\" is invalid: spec.template.metadata.labels[job-name]: Invalid value: {\"batch.kubernetes.io/controller-uid\":",
        ),
        (
            "/apis/apiregistration.k8s.io/v1/apiservices",
            r#"{"metadata":{"name":"v1.x.y","generateName":"z-"},"spec":{"group":"x.y","version":"v1","groupPriorityMinimum":1,"versionPriority":1}}"#,
            "APIService.apiregistration.k8s.io \"v1.x.y\" is invalid: metadata.generateName: Invalid value: \"z-\": must be `spec.version+\".\"+spec.group`: \"v1.x.y\"",
        ),
        (
            "/apis/apiextensions.k8s.io/v1/customresourcedefinitions",
            r#"{"metadata":{"name":"as.x.y"},"spec":{"group":"x.y","scope":"Namespaced","names":{"plural":"as","singular":"a","kind":"A","listKind":"AList"},"versions":[{"served":true,"storage":true,"schema":{"openAPIV3Schema":{"type":"object"}}}]}}"#,
            "CustomResourceDefinition.apiextensions.k8s.io \"as.x.y\" is invalid: spec.versions[0].name: Invalid value: \"\": a DNS-1035 label must",
        ),
    ] {
        check(&cluster, "POST", uri, body, 422, words).await;
    }
    let template = json!({"metadata": {"labels": {"a": "b", "c": "!"}}, "spec": {"containers": [{"name": "c", "image": "i"}]}});
    let set = json!({"metadata": {"name": "s"}, "spec": {"selector": {"matchLabels": {"a": "b"}}, "template": template}});
    let refused = cluster
        .post("/apis/apps/v1/namespaces/default/statefulsets", set)
        .await;
    let causes = refused.json["details"]["causes"].as_array().map_or(0, Vec::len);
    assert_eq!((refused.code, causes), (422, 2), "{}", refused.text);
    let service = |name: &str| json!({"metadata": {"name": name}, "spec": {"clusterIP": "10.96.7.7", "ports": [{"port": 80}]}});
    let services = "/api/v1/namespaces/default/services";
    let made = cluster.post(services, service("a")).await;
    assert_eq!(made.code, 201, "{}", made.text);
    // A dry run does not ask who has an address, and must not give it back either.
    let tried = cluster
        .post(&format!("{services}?dryRun=All"), service("b"))
        .await;
    assert_eq!(tried.code, 201, "{}", tried.text);
    let second = cluster.post(services, service("b")).await;
    assert_eq!(second.code, 422, "{}", second.text);
    let controller = |field: &str| {
        let template = json!({"metadata": {"labels": {"a": "b"}}, "spec": {"containers": [{"name": "c", "image": "i"}]}});
        json!({"metadata": {field: "x".repeat(254)}, "spec": {"template": template}})
    };
    let uri = "/api/v1/namespaces/default/replicationcontrollers?dryRun=All";
    let named = cluster.post(uri, controller("name")).await;
    let message = named.json["message"].as_str().unwrap_or_default();
    assert!(message.ends_with(": must be no more than 253 bytes"), "{message}");
    let generated = cluster.post(uri, controller("generateName")).await;
    assert_eq!(generated.code, 201, "{}", generated.text);
    let class = json!({"metadata": {"generateName": "x".repeat(254)}});
    let classes = "/apis/resource.k8s.io/v1/deviceclasses?dryRun=All";
    let generated = cluster.post(classes, class).await;
    assert_eq!(generated.code, 201, "{}", generated.text);
    let endpoints = "/api/v1/namespaces/default/endpoints";
    for (accept, warned) in [("application/json", true), ("application/cbor", false)] {
        let reply = cluster
            .send_as(cluster.admin(), "GET", endpoints, &[("accept", accept)], "")
            .await;
        assert_eq!(
            reply.headers.contains_key("warning"),
            warned,
            "{accept}: {}",
            reply.text
        );
    }
    let verbose = cluster
        .get("/healthz?verbose&exclude=z&exclude=y&exclude=z")
        .await;
    let warning = "warn: some health checks cannot be excluded: no matches for \"y\",\"z\"\n";
    assert!(verbose.text.contains(warning), "{}", verbose.text);
}

#[tokio::test]
async fn what_an_update_makes_keeps_more_than_what_a_post_makes() {
    let cluster = Cluster::start().await;
    let leases = "/apis/coordination.k8s.io/v1/namespaces/default/leases";
    let lease = |field: &str, value: Value| json!({"metadata": {"name": "l", field: value}});
    let at = json!("2020-01-02T03:04:05Z");
    let posted = cluster
        .post(
            &format!("{leases}?dryRun=All"),
            lease("deletionTimestamp", at.clone()),
        )
        .await;
    assert_eq!(
        posted.json["metadata"]["deletionTimestamp"],
        Value::Null,
        "{}",
        posted.text
    );
    let uri = format!("{leases}/l?dryRun=All");
    let put = cluster.put(&uri, lease("deletionTimestamp", at.clone())).await;
    assert_eq!(
        (put.code, &put.json["metadata"]["deletionTimestamp"]),
        (201, &at),
        "{}",
        put.text
    );
    let put = cluster.put(&uri, lease("selfLink", json!("x"))).await;
    assert_eq!(put.json["metadata"]["selfLink"], "x", "{}", put.text);
    let put = cluster.put(&uri, lease("resourceVersion", json!("abc"))).await;
    assert_eq!(
        (put.code, &put.json["message"]),
        (500, &json!("strconv.ParseUint: parsing \"abc\": invalid syntax"))
    );
    let put = cluster.put(&uri, lease("uid", json!("u"))).await;
    let told = "Operation cannot be fulfilled on leases.coordination.k8s.io \"l\": StorageError: invalid object, Code: 4, Key: /leases/default/l, ResourceVersion: 0, AdditionalErrorMsg: Precondition failed: UID in precondition: u, UID in object meta: ";
    assert_eq!((put.code, &put.json["message"]), (409, &json!(told)));
}

#[tokio::test]
async fn finalizers_of_a_delete() {
    let cluster = Cluster::start().await;
    let made = cluster
        .post("/api/v1/namespaces", json!({"metadata": {"name": "n"}}))
        .await;
    assert_eq!(made.code, 201, "{}", made.text);
    let uri = "/api/v1/namespaces/n";
    // A namespace without orphans waits for what is in it; who comes later decides nothing.
    for options in [
        json!({"orphanDependents": false}),
        json!({"propagationPolicy": "Orphan"}),
        json!({}),
    ] {
        let gone = cluster.delete(uri, options).await;
        let finalizers = &gone.json["metadata"]["finalizers"];
        assert_eq!(finalizers, &json!(["foregroundDeletion"]), "{}", gone.text);
    }
    let classes = "/apis/storage.k8s.io/v1/storageclasses";
    let metadata = json!({"name": "c", "finalizers": ["foregroundDeletion"]});
    let made = cluster
        .post(classes, json!({"metadata": metadata, "provisioner": "x.y/z"}))
        .await;
    assert_eq!(made.code, 201, "{}", made.text);
    let gone = cluster
        .delete(
            &format!("{classes}/c"),
            json!({"propagationPolicy": "Background"}),
        )
        .await;
    assert_eq!(
        gone.json["metadata"]["finalizers"],
        json!(["foregroundDeletion"]),
        "{}",
        gone.text
    );
    assert_eq!(cluster.get(&format!("{classes}/c")).await.code, 404);
}
