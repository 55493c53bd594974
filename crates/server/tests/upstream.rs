//! Small things that clients can tell: what kube-apiserver v1.36.4 answered to the same requests.

mod support;

use serde_json::{Value, json};
use support::Cluster;

const DEFAULT: &str = "/api/v1/namespaces/default";

fn workload(name: &str) -> Value {
    json!({"metadata": {"name": name}, "spec": {"selector": {"matchLabels": {"a": "b"}},
        "template": {"metadata": {"labels": {"a": "b"}}, "spec": {"containers": [{"name": "c", "image": "i"}]}}}})
}

#[tokio::test]
async fn metadata_alone_has_no_annotation_of_the_served_version() {
    let cluster = Cluster::start().await;
    let sets = "/apis/apps/v1/namespaces/default/daemonsets";
    let made = cluster.post(sets, workload("d")).await;
    let annotation = &made.json["metadata"]["annotations"]["deprecated.daemonset.template.generation"];
    assert_eq!(annotation, "1", "{}", made.text);
    let check = async |uri: &str, kind: &str, at: &str| {
        let accept = format!("application/json;as={kind};v=v1;g=meta.k8s.io");
        let headers = [("accept", accept.as_str())];
        let reply = cluster.send_as(cluster.admin(), "GET", uri, &headers, "").await;
        let metadata = reply.json.pointer(at).unwrap_or_else(|| panic!("{}", reply.text));
        assert_eq!(metadata["name"], "d");
        assert_eq!(metadata.get("annotations"), None, "{uri}");
    };
    check(sets, "PartialObjectMetadataList", "/items/0/metadata").await;
    check(&format!("{sets}/d"), "PartialObjectMetadata", "/metadata").await;
    check(sets, "Table", "/rows/0/object/metadata").await;
    let watch = format!("{sets}?watch=true&resourceVersion=0&timeoutSeconds=1");
    check(&watch, "PartialObjectMetadata", "/object/metadata").await;
}

#[tokio::test]
async fn labels_that_a_job_takes_over_are_owned() {
    let cluster = Cluster::start().await;
    let template = json!({"metadata": {"labels": {"x": "y"}},
        "spec": {"restartPolicy": "Never", "containers": [{"name": "c", "image": "i"}]}});
    let jobs = "/apis/batch/v1/namespaces/default/jobs";
    let job = json!({"metadata": {"name": "j"}, "spec": {"template": template}});
    let made = cluster.post(jobs, job).await;
    let owned = &made.json["metadata"]["managedFields"][0]["fieldsV1"]["f:metadata"];
    assert_eq!(owned, &json!({"f:labels": {".": {}, "f:x": {}}}), "{}", made.text);
    assert_eq!(made.json["metadata"]["labels"]["job-name"], "j");
    // Labels of its own are not mixed with those of the pods.
    let job = json!({"metadata": {"name": "k", "labels": {"x": "y"}}, "spec": {"template": template}});
    let made = cluster.post(jobs, job).await;
    assert_eq!(
        made.json["metadata"]["labels"],
        json!({"x": "y"}),
        "{}",
        made.text
    );
}

#[tokio::test]
async fn an_old_autoscaler_keeps_the_owner_of_its_metrics() {
    let cluster = Cluster::start().await;
    let all = "/apis/autoscaling/v1/namespaces/default/horizontalpodautoscalers";
    let one = format!("{all}/h");
    let spec = json!({"maxReplicas": 3, "scaleTargetRef": {"kind": "Deployment", "name": "d", "apiVersion": "apps/v1"}});
    cluster
        .post(all, json!({"metadata": {"name": "h"}, "spec": spec}))
        .await;
    let status = json!({"status": {"currentReplicas": 1, "desiredReplicas": 2, "currentCPUUtilizationPercentage": 40}});
    let reported = cluster
        .patch(&format!("{one}/status"), "merge-patch", status)
        .await;
    assert_eq!(reported.code, 200, "{}", reported.text);
    let mut object = reported.json;
    object["spec"]["maxReplicas"] = json!(5);
    if let Some(map) = object.as_object_mut() {
        map.remove("status");
    }
    let written = cluster.put(&one, object).await;
    let entries = written.json["metadata"]["managedFields"]
        .as_array()
        .expect("owners");
    let status = entries
        .iter()
        .find(|entry| entry["subresource"] == "status")
        .expect("an owner");
    let annotation = "f:autoscaling.alpha.kubernetes.io/current-metrics";
    assert_eq!(
        status["fieldsV1"]["f:metadata"]["f:annotations"][annotation],
        json!({}),
        "{}",
        written.text
    );
    assert_eq!(written.json["status"]["currentCPUUtilizationPercentage"], 40);
}

#[tokio::test]
async fn two_controllers_are_shown_in_the_order_of_their_fields() {
    let cluster = Cluster::start().await;
    let owner = |name: &str| json!({"uid": "u", "name": name, "kind": "ConfigMap", "controller": true, "apiVersion": "v1"});
    let map = json!({"metadata": {"name": "m", "ownerReferences": [owner("a"), owner("b")]}});
    let refused = cluster.post(&format!("{DEFAULT}/configmaps"), map).await;
    let shown = |name: &str| {
        format!(
            "{{\"apiVersion\":\"v1\",\"kind\":\"ConfigMap\",\"name\":\"{name}\",\"uid\":\"u\",\"controller\":true}}"
        )
    };
    assert_eq!(
        refused.json["message"],
        format!(
            "ConfigMap \"m\" is invalid: metadata.ownerReferences: Invalid value: [{},{}]: Only one reference can have Controller set to true. Found \"true\" in references for ConfigMap/a and ConfigMap/b",
            shown("a"),
            shown("b")
        )
    );
}

#[tokio::test]
async fn openapi_in_binary_form() {
    let cluster = Cluster::start().await;
    let check = async |accept: &str, code: u16, content_type: Option<&str>| {
        let headers = [("accept", accept)];
        let uri = "/openapi/v3/apis/apps/v1";
        let reply = cluster.send_as(cluster.admin(), "GET", uri, &headers, "").await;
        assert_eq!(reply.code, code, "{accept}");
        let found = reply
            .headers
            .get("content-type")
            .map(|value| value.to_str().expect("text"));
        assert_eq!(found, content_type);
        reply
    };
    let binary = "application/com.github.proto-openapi.spec.v3.v1.0+protobuf";
    for name in [
        binary,
        "application/com.github.proto-openapi.spec.v3@v1.0+protobuf",
    ] {
        let reply = check(name, 200, Some(binary)).await;
        assert!(reply.bytes.starts_with(b"\x0a\x053.0.0\x12"));
    }
    check("application/json", 200, Some("application/json")).await;
    let refused = check("text/html", 406, None).await;
    assert_eq!(refused.text, "");
}

#[tokio::test]
async fn a_definition_waits_for_its_objects_only() {
    let cluster = Cluster::start().await;
    let all = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions";
    let definition = json!({"metadata": {"name": "as.ex.com"}, "spec": {"group": "ex.com", "scope": "Cluster",
        "names": {"plural": "as", "kind": "A"}, "versions": [{"name": "v1", "served": true, "storage": true,
            "schema": {"openAPIV3Schema": {"type": "object"}}}]}});
    assert_eq!(cluster.post(all, definition).await.code, 201);
    let deleted = cluster
        .delete(
            &format!("{all}/as.ex.com"),
            json!({"propagationPolicy": "Foreground"}),
        )
        .await;
    assert_eq!(
        deleted.json["metadata"]["finalizers"],
        json!(["customresourcecleanup.apiextensions.k8s.io"]),
        "{}",
        deleted.text
    );
}

#[tokio::test]
async fn a_patched_scale_must_be_one() {
    let cluster = Cluster::start().await;
    let all = "/apis/apps/v1/namespaces/default/deployments";
    assert_eq!(cluster.post(all, workload("d")).await.code, 201);
    let check = async |query: &str, patch: Value, expected: &str| {
        let uri = format!("{all}/d/scale{query}");
        let reply = cluster.patch(&uri, "merge-patch", patch).await;
        assert_eq!(reply.code, 422, "{}", reply.text);
        let message = reply.json["message"].as_str().expect("a message");
        assert!(
            message.starts_with(" \"\" is invalid: patch: Invalid value: \"{"),
            "{message}"
        );
        assert!(message.ends_with(expected), "{message}");
    };
    let wrong = "json: cannot unmarshal string into Go struct field ScaleSpec.spec.replicas of type int32";
    check("", json!({"spec": {"replicas": "x"}}), wrong).await;
    let unknown = "no kind \"Foo\" is registered for version \"autoscaling/v1\" in scheme \"pkg/runtime/scheme.go:111\"";
    check("", json!({"kind": "Foo"}), unknown).await;
    let strict = "strict decoding error: unknown field \"spec.foo\"";
    check("?fieldValidation=Strict", json!({"spec": {"foo": 1}}), strict).await;
}

#[tokio::test]
async fn addresses_of_a_pod_agree() {
    let cluster = Cluster::start().await;
    cluster
        .post(
            &format!("{DEFAULT}/serviceaccounts"),
            json!({"metadata": {"name": "default"}}),
        )
        .await;
    let pod = json!({"metadata": {"name": "p"}, "spec": {"containers": [{"name": "c", "image": "i"}]}});
    let made = cluster.post(&format!("{DEFAULT}/pods"), pod).await;
    assert_eq!(made.code, 201, "{}", made.text);
    let check = async |status: Value, expected: Result<[Value; 2], &str>| {
        let reply = cluster
            .patch(
                &format!("{DEFAULT}/pods/p/status"),
                "merge-patch",
                json!({"status": status}),
            )
            .await;
        match expected {
            Ok([alone, list]) => {
                assert_eq!(
                    (&reply.json["status"]["podIP"], &reply.json["status"]["podIPs"]),
                    (&alone, &list),
                    "{}",
                    reply.text
                );
            }
            Err(message) => assert_eq!(reply.json["message"], format!("Pod \"p\" is invalid: {message}")),
        }
    };
    check(
        json!({"podIP": "1.2.3.4"}),
        Ok([json!("1.2.3.4"), json!([{"ip": "1.2.3.4"}])]),
    )
    .await;
    let other = json!({"podIPs": [{"ip": "1.2.3.5"}, {"ip": "::1"}]});
    check(other, Ok([json!("1.2.3.4"), json!([{"ip": "1.2.3.4"}])])).await;
    let both = json!({"podIP": null, "podIPs": [{"ip": "7.7.7.7"}]});
    check(both, Ok([json!("7.7.7.7"), json!([{"ip": "7.7.7.7"}])])).await;
    let bad = "status.podIPs[0]: Invalid value: \"bad\": must be a valid IP address, (e.g. 10.9.8.7 or 2001:db8::ffff)";
    check(json!({"podIP": "bad"}), Err(bad)).await;
    let unequal = "status.hostIPs[0].ip: Invalid value: \"1.2.3.9\": must be equal to `hostIP`";
    check(
        json!({"hostIP": "1.2.3.4", "hostIPs": [{"ip": "1.2.3.9"}]}),
        Err(unequal),
    )
    .await;
    let unnamed = json!({"conditions": [{"type": "a b", "status": "True"}]});
    let why = "status.conditions[0].Type: Invalid value: \"a b\": name part must consist of alphanumeric characters, '-', '_' or '.', and must start and end with an alphanumeric character (e.g. 'MyName',  or 'my.name',  or '123-abc', regex used for validation is '([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9]')";
    check(unnamed, Err(why)).await;
    check(
        json!({"podIP": null, "podIPs": null}),
        Ok([Value::Null, Value::Null]),
    )
    .await;
}

#[tokio::test]
async fn finalize_may_change_all_but_the_status() {
    let cluster = Cluster::start().await;
    cluster
        .post("/api/v1/namespaces", json!({"metadata": {"name": "n"}}))
        .await;
    let mut namespace = cluster.get("/api/v1/namespaces/n").await.json;
    namespace["metadata"]["labels"]["l"] = json!("x");
    namespace["spec"]["finalizers"] = json!(["kubernetes", "a.b/c"]);
    namespace["status"]["phase"] = json!("Terminating");
    let written = cluster.put("/api/v1/namespaces/n/finalize", namespace).await;
    assert_eq!(written.json["metadata"]["labels"]["l"], "x", "{}", written.text);
    assert_eq!(written.json["spec"]["finalizers"], json!(["kubernetes", "a.b/c"]));
    assert_eq!(written.json["status"]["phase"], "Active");
}

#[tokio::test]
async fn reviews_say_who_asked_what() {
    let cluster = Cluster::start().await;
    let reviews = "/apis/authorization.k8s.io/v1/subjectaccessreviews?fieldManager=m";
    let spec = json!({"user": "b", "resourceAttributes": {"verb": "get", "resource": "pods"}});
    let review = cluster.post(reviews, json!({"spec": spec})).await;
    let entry = &review.json["metadata"]["managedFields"][0];
    assert_eq!(
        (review.code, &entry["manager"]),
        (201, &json!("m")),
        "{}",
        review.text
    );
    assert_eq!(
        entry["fieldsV1"],
        json!({"f:spec": {"f:resourceAttributes": {".": {}, "f:resource": {}, "f:verb": {}}, "f:user": {}}})
    );
    let named = cluster
        .post(reviews, json!({"metadata": {"name": "n"}, "spec": spec}))
        .await;
    let message = named.json["message"].as_str().expect("a message");
    assert!(message.starts_with(".authorization.k8s.io \"\" is invalid: metadata: Invalid value: {\"name\":\"n\",\"managedFields\":[{\"manager\":\"m\",\"operation\":\"Update\","), "{message}");
    assert!(message.ends_with("}]}: must be empty"), "{message}");
    let rules = cluster
        .post(
            "/apis/authorization.k8s.io/v1/selfsubjectrulesreviews",
            json!({"spec": {"namespace": "default"}}),
        )
        .await;
    assert_eq!(rules.json["metadata"], json!({}), "{}", rules.text);
}

#[tokio::test]
async fn tokens_are_asked_for_in_the_name_of_their_account() {
    let cluster = Cluster::start().await;
    let account = cluster
        .post(
            &format!("{DEFAULT}/serviceaccounts"),
            json!({"metadata": {"name": "s"}}),
        )
        .await;
    let uid = account.json["metadata"]["uid"]
        .as_str()
        .expect("a uid")
        .to_owned();
    let token = format!("{DEFAULT}/serviceaccounts/s/token?fieldManager=m");
    let given = cluster
        .post(&token, json!({"spec": {"audiences": ["a", "b"]}}))
        .await;
    let metadata = &given.json["metadata"];
    assert_eq!(
        (given.code, &metadata["uid"]),
        (201, &json!(uid)),
        "{}",
        given.text
    );
    assert_eq!(metadata["managedFields"][0]["subresource"], "token");
    assert_eq!(
        metadata["managedFields"][0]["fieldsV1"],
        json!({"f:spec": {"f:audiences": {}, "f:expirationSeconds": {}}})
    );
    let check = async |body: Value, code: u16, expected: &str| {
        let refused = cluster.post(&token, body).await;
        assert_eq!(
            (refused.code, refused.json["message"].as_str().unwrap_or("")),
            (code, expected)
        );
    };
    let other = "TokenRequest.authentication.k8s.io \"s\" is invalid: metadata.name: Invalid value: \"x\": must match the service account name if specified";
    check(json!({"metadata": {"name": "x"}}), 422, other).await;
    let other = format!(
        "Operation cannot be fulfilled on TokenRequest.authentication.k8s.io \"s\": the UID in the token request (u) does not match the UID of the service account ({uid})"
    );
    check(json!({"metadata": {"uid": "u"}}), 409, &other).await;
    let other = "the namespace of the provided object does not match the namespace sent on the request";
    check(json!({"metadata": {"namespace": "x"}}), 400, other).await;

    // A review tells which of the asked audiences the token is for.
    let review = json!({"spec": {"token": given.json["status"]["token"], "audiences": ["c", "b"]}});
    let answer = cluster
        .post("/apis/authentication.k8s.io/v1/tokenreviews", review)
        .await;
    assert_eq!(
        answer.json["status"]["audiences"],
        json!(["b"]),
        "{}",
        answer.text
    );
}

#[tokio::test]
async fn who_takes_no_form_of_a_status_can_read_it() {
    let cluster = Cluster::start().await;
    let headers = [
        ("accept", "text/html"),
        ("impersonate-user", "bob"),
        ("impersonate-group", "system:unauthenticated"),
    ];
    let refused = cluster
        .send_as(cluster.admin(), "GET", "/api/v1/pods", &headers, "")
        .await;
    assert_eq!(refused.code, 403);
    assert!(
        refused.text.starts_with("{\n  \"") && refused.text.ends_with('}'),
        "{}",
        refused.text
    );
    let user = json!({"kind": "SelfSubjectReview", "apiVersion": "authentication.k8s.io/v1"}).to_string();
    let uri = "/apis/authentication.k8s.io/v1/selfsubjectreviews";
    let refused = cluster
        .send_as(cluster.admin(), "POST", uri, &headers[1..], user)
        .await;
    assert_eq!(
        refused.code, 403,
        "who is unauthenticated is not in the group of all others: {}",
        refused.text
    );
}

#[tokio::test]
async fn evictions_bindings_and_logs_are_checked() {
    let cluster = Cluster::start().await;
    cluster
        .post(
            &format!("{DEFAULT}/serviceaccounts"),
            json!({"metadata": {"name": "default"}}),
        )
        .await;
    let pods = format!("{DEFAULT}/pods");
    for name in ["p", "q"] {
        let pod = json!({"metadata": {"name": name}, "spec": {"containers": [{"name": "c", "image": "i"}]}});
        assert_eq!(cluster.post(&pods, pod).await.code, 201);
    }
    let refused = cluster
        .post(
            &format!("{pods}/p/eviction"),
            json!({"kind": "Eviction", "apiVersion": "policy/v1"}),
        )
        .await;
    assert_eq!(
        (refused.code, &refused.json["message"]),
        (400, &json!("name in URL does not match name in Eviction object"))
    );
    let older = json!({"kind": "Eviction", "apiVersion": "policy/v1beta1", "metadata": {"name": "p"}});
    assert_eq!(cluster.post(&format!("{pods}/p/eviction"), older).await.code, 201);
    let binding = json!({"metadata": {"name": "x"}, "target": {"kind": "Node", "name": "n"}});
    let refused = cluster.post(&format!("{pods}/q/binding"), binding).await;
    assert_eq!(
        refused.json["message"],
        "name in URL does not match name in Binding object"
    );
    let log = cluster.get(&format!("{pods}/q/log?stream=Foo")).await;
    assert_eq!(
        log.json["message"],
        "PodLogOptions \"q\" is invalid: stream: Forbidden: may not be specified"
    );
    let log = cluster.get(&format!("{pods}/q/log?sinceTime=x")).await;
    assert_eq!(
        log.json["message"],
        "parsing time \"x\" as \"2006-01-02T15:04:05Z07:00\": cannot parse \"x\" as \"2006\""
    );
    let labelled = json!({"metadata": {"labels": {"x": "y"}}});
    let kept = cluster
        .patch(&format!("{pods}/q/ephemeralcontainers"), "merge-patch", labelled)
        .await;
    assert_eq!(
        (kept.code, kept.json["metadata"].get("labels")),
        (200, None),
        "{}",
        kept.text
    );
}

#[tokio::test]
async fn options_in_the_query_of_a_delete() {
    let cluster = Cluster::start().await;
    let maps = format!("{DEFAULT}/configmaps");
    cluster.post(&maps, json!({"metadata": {"name": "m"}})).await;
    let stale = cluster
        .send(
            "DELETE",
            &format!("{maps}/m?resourceVersion=abc"),
            "application/json",
            "",
        )
        .await;
    assert_eq!(stale.code, 409, "{}", stale.text);
    let empty = cluster
        .post(&format!("{maps}?dryRun="), json!({"metadata": {"name": "n"}}))
        .await;
    assert_eq!(
        empty.json["message"],
        "CreateOptions.meta.k8s.io \"\" is invalid: dryRun: Unsupported value: [\"\"]: supported values: \"All\""
    );
    let other = cluster
        .delete(&format!("{maps}/m"), json!({"kind": "Foo", "apiVersion": "v1"}))
        .await;
    assert_eq!(
        other.json["message"],
        "no kind \"Foo\" is registered for version \"v1\" in scheme \"pkg/runtime/scheme.go:111\""
    );
    let other = cluster
        .delete(
            &format!("{maps}/m"),
            json!({"kind": "Status", "apiVersion": "v1"}),
        )
        .await;
    assert_eq!(
        other.json["message"],
        "converting (v1.Status) to (v1.DeleteOptions): unknown conversion"
    );
    let token = cluster.get(&format!("{maps}?continue=x")).await;
    assert_eq!(
        token.json["message"],
        "invalid continue token: continue key is not valid: illegal base64 data at input byte 0"
    );
}
