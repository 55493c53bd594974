//! Server-side apply and managed fields from outside. What is expected here is what upstream answers.

mod support;

use serde_json::{Value, json};
use support::{Cluster, Reply};

const MAPS: &str = "/api/v1/namespaces/default/configmaps";
const DEPLOYMENTS: &str = "/apis/apps/v1/namespaces/default/deployments";

async fn apply(cluster: &Cluster, uri: &str, config: &Value) -> Reply {
    cluster
        .send("PATCH", uri, "application/apply-patch+yaml", config.to_string())
        .await
}

fn map(name: &str, data: Value) -> Value {
    json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name}, "data": data})
}

/// One line a manager: who, how, through what, and which fields.
fn owners(reply: &Reply) -> Vec<String> {
    let entries = reply.json["metadata"]["managedFields"].as_array();
    let text = |entry: &Value, key: &str| entry[key].as_str().unwrap_or("").to_string();
    entries
        .into_iter()
        .flatten()
        .map(|entry| {
            assert_eq!(entry["fieldsType"], "FieldsV1");
            format!(
                "{} {}{} {}",
                text(entry, "manager"),
                text(entry, "operation"),
                text(entry, "subresource"),
                entry["fieldsV1"]
            )
        })
        .collect()
}

#[tokio::test]
async fn fields_change_hands() {
    let cluster = Cluster::start().await;
    let uri = |query: &str| format!("{MAPS}/a?{query}");
    let made = cluster
        .post(
            &format!("{MAPS}?fieldManager=poster"),
            map("a", json!({"k": "v", "x": "y"})),
        )
        .await;
    assert_eq!(
        owners(&made),
        [r#"poster Update {"f:data":{".":{},"f:k":{},"f:x":{}}}"#]
    );
    // Who applies what is there owns it too, and the object gets a new version for that once.
    let shared = apply(&cluster, &uri("fieldManager=m1"), &map("a", json!({"k": "v"}))).await;
    assert_eq!(shared.code, 200, "{}", shared.text);
    assert_eq!(
        owners(&shared),
        [
            r#"m1 Apply {"f:data":{"f:k":{}}}"#,
            r#"poster Update {"f:data":{".":{},"f:k":{},"f:x":{}}}"#
        ]
    );
    let again = apply(&cluster, &uri("fieldManager=m1"), &map("a", json!({"k": "v"}))).await;
    assert_eq!(again.text, shared.text);
    let conflict = apply(&cluster, &uri("fieldManager=m2"), &map("a", json!({"k": "w"}))).await;
    assert_eq!(conflict.code, 409);
    assert_eq!(
        conflict.json["message"],
        "Apply failed with 2 conflicts: conflicts with \"m1\":\n- .data.k\nconflicts with \"poster\" using v1:\n- .data.k"
    );
    assert_eq!(
        conflict.json["details"]["causes"][0],
        json!({"reason": "FieldManagerConflict", "message": "conflict with \"m1\"", "field": ".data.k"})
    );
    let forced = apply(
        &cluster,
        &uri("fieldManager=m2&force=true"),
        &map("a", json!({"k": "w"})),
    )
    .await;
    assert_eq!(
        owners(&forced),
        [
            r#"m2 Apply {"f:data":{"f:k":{}}}"#,
            r#"poster Update {"f:data":{".":{},"f:x":{}}}"#
        ]
    );
    // What an applier no longer mentions goes, when nobody else owns it.
    let dropped = apply(&cluster, &uri("fieldManager=m2"), &map("a", json!({}))).await;
    assert_eq!(dropped.json["data"], json!({"x": "y"}));
    // An update takes what it changes.
    let updated = cluster
        .patch(
            &uri("fieldManager=up"),
            "merge-patch",
            json!({"data": {"x": "z"}}),
        )
        .await;
    assert!(
        owners(&updated).contains(&r#"up Update {"f:data":{"f:x":{}}}"#.to_string()),
        "{:?}",
        owners(&updated)
    );
}

#[tokio::test]
async fn an_applied_object_is_made_and_taken_back() {
    let cluster = Cluster::start().await;
    let uri = format!("{MAPS}/new?fieldManager=m");
    let mut config = map("new", json!({"a": "1"}));
    config["metadata"]["annotations"] = json!({"x": "y"});
    let made = apply(&cluster, &uri, &config).await;
    assert_eq!(made.code, 201, "{}", made.text);
    let bare = json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "new"}});
    let emptied = apply(&cluster, &uri, &bare).await;
    assert_eq!(emptied.code, 200, "{}", emptied.text);
    assert!(emptied.json.get("data").is_none() && emptied.json["metadata"].get("annotations").is_none());
    assert!(owners(&emptied).is_empty());
}

#[tokio::test]
async fn managed_fields_in_a_request() {
    let cluster = Cluster::start().await;
    let uri = format!("{MAPS}/a");
    cluster.post(MAPS, map("a", json!({"k": "v"}))).await;
    let patch = |managed: Value| {
        cluster.patch(
            &uri,
            "merge-patch",
            json!({"metadata": {"managedFields": managed}}),
        )
    };
    // To leave them out, or to get them wrong, changes nothing.
    let before = owners(&cluster.get(&uri).await);
    assert_eq!(before, [r#"unknown Update {"f:data":{".":{},"f:k":{}}}"#]);
    for ignored in [json!(null), json!([{"manager": "m", "operation": "Foo"}])] {
        assert_eq!(owners(&patch(ignored).await), before);
    }
    // An empty list ends the tracking, until the first apply.
    assert!(owners(&patch(json!([])).await).is_empty());
    assert!(
        owners(
            &cluster
                .patch(&uri, "merge-patch", json!({"data": {"n": "1"}}))
                .await
        )
        .is_empty()
    );
    let first = apply(
        &cluster,
        &format!("{uri}?fieldManager=m"),
        &map("a", json!({"z": "1"})),
    )
    .await;
    assert_eq!(
        owners(&first),
        [
            r#"m Apply {"f:data":{"f:z":{}}}"#,
            r#"before-first-apply Update {"f:data":{".":{},"f:k":{},"f:n":{}}}"#
        ]
    );
    for at in 0..12 {
        let data = json!({"data": {format!("c{at:02}"): "x"}});
        cluster
            .patch(&format!("{uri}?fieldManager=u{at:02}"), "merge-patch", data)
            .await;
    }
    let capped = owners(&cluster.get(&uri).await);
    assert_eq!(capped.iter().filter(|line| line.contains(" Update")).count(), 10);
    assert!(
        capped
            .iter()
            .any(|line| line.starts_with("ancient-changes Update")),
        "{capped:?}"
    );
}

#[tokio::test]
async fn refusals() {
    let cluster = Cluster::start().await;
    let uri = format!("{MAPS}/a");
    apply(
        &cluster,
        &format!("{uri}?fieldManager=m"),
        &map("a", json!({"k": "v"})),
    )
    .await;
    let check = async |query: &str, config: Value, code: u16, message: &str| {
        let reply = apply(&cluster, &format!("{uri}?{query}"), &config).await;
        assert_eq!(
            (reply.code, reply.json["message"].as_str().unwrap_or("")),
            (code, message),
            "{config}"
        );
    };
    let by = "fieldManager=m";
    check(
        "",
        map("a", json!({})),
        422,
        "PatchOptions.meta.k8s.io \"\" is invalid: fieldManager: Required value: is required for apply patch",
    )
    .await;
    check(by, json!([]), 400, "error decoding YAML: error unmarshaling JSON: while decoding JSON: json: cannot unmarshal array into Go value of type map[string]interface {}").await;
    check(
        by,
        json!({"apiVersion": "v1", "kind": "Secret"}),
        400,
        "invalid object type: /v1, Kind=Secret",
    )
    .await;
    check(
        by,
        map("b", json!({})),
        400,
        "the name of the object (b) does not match the name on the URL (a)",
    )
    .await;
    let failed = "failed to create typed patch object (/a; /v1, Kind=ConfigMap): ";
    let mut config = map("a", json!({}));
    config["metadata"]["managedFields"] = json!([]);
    check(by, config, 400, "metadata.managedFields must be nil").await;
    let mut config = map("a", json!({}));
    config["foo"] = json!(1);
    check(
        by,
        config,
        500,
        &format!("{failed}.foo: field not declared in schema"),
    )
    .await;
    check(
        by,
        map("a", json!({"x": 1})),
        500,
        &format!("{failed}.data.x: expected string, got &value.valueUnstructured{{Value:1}}"),
    )
    .await;
    check(
        by,
        map("a", json!(["x"])),
        500,
        &format!("{failed}.data: expected map, got &{{[x]}}"),
    )
    .await;
    let mut config = map("a", json!({}));
    config["metadata"]["finalizers"] = json!(["a.io/x", "a.io/x"]);
    check(
        by,
        config,
        500,
        &format!("{failed}.metadata.finalizers: duplicate entries for key [=\"a.io/x\"]"),
    )
    .await;
    let mut config = map("a", json!({"k": "w"}));
    config["metadata"]["resourceVersion"] = json!("1");
    check(by, config, 409, "Operation cannot be fulfilled on configmaps \"a\": the object has been modified; please apply your changes to the latest version and try again").await;
    let forced = cluster
        .patch(&format!("{uri}?force=true"), "merge-patch", json!({}))
        .await;
    assert_eq!(
        forced.json["message"],
        "PatchOptions.meta.k8s.io \"\" is invalid: force: Forbidden: may not be specified for non-apply patch"
    );
}

fn deployment() -> Value {
    json!({"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "d"},
        "spec": {"replicas": 2, "selector": {"matchLabels": {"app": "d"}}, "template": {
            "metadata": {"labels": {"app": "d"}},
            "spec": {"containers": [{"name": "c", "image": "i:1", "ports": [{"containerPort": 80}]}]}}}})
}

#[tokio::test]
async fn lists_are_owned_by_their_keys() {
    let cluster = Cluster::start().await;
    let uri = |query: &str| format!("{DEPLOYMENTS}/d?{query}");
    let made = apply(&cluster, &uri("fieldManager=m1"), &deployment()).await;
    assert_eq!(made.code, 201, "{}", made.text);
    assert_eq!(
        owners(&made),
        [
            r#"m1 Apply {"f:spec":{"f:replicas":{},"f:selector":{},"f:template":{"f:metadata":{"f:labels":{"f:app":{}}},"f:spec":{"f:containers":{"k:{\"name\":\"c\"}":{".":{},"f:image":{},"f:name":{},"f:ports":{"k:{\"containerPort\":80,\"protocol\":\"TCP\"}":{".":{},"f:containerPort":{}}}}}}}}}"#
        ]
    );
    let container = |fields: Value| {
        let mut item = json!({"name": "c"});
        item.as_object_mut()
            .unwrap()
            .extend(fields.as_object().unwrap().clone());
        json!({"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "d"},
            "spec": {"template": {"spec": {"containers": [item]}}}})
    };
    // The key that is left out is the default.
    let ports =
        json!({"ports": [{"containerPort": 80, "protocol": "TCP", "name": "http"}, {"containerPort": 81}]});
    let shared = apply(&cluster, &uri("fieldManager=m2"), &container(ports)).await;
    let list = &shared.json["spec"]["template"]["spec"]["containers"][0]["ports"];
    assert_eq!(
        list[0],
        json!({"containerPort": 80, "name": "http", "protocol": "TCP"})
    );
    assert_eq!(list.as_array().map(Vec::len), Some(2));
    let left = apply(&cluster, &uri("fieldManager=m2"), &container(json!({}))).await;
    assert_eq!(
        left.json["spec"]["template"]["spec"]["containers"][0]["ports"],
        json!([{"containerPort": 80, "protocol": "TCP"}])
    );
    let twice = json!({"ports": [{"containerPort": 80}, {"containerPort": 80, "protocol": "TCP"}]});
    let refused = apply(&cluster, &uri("fieldManager=m2"), &container(twice)).await;
    assert_eq!(
        refused.json["message"],
        "failed to create typed patch object (/d; apps/v1, Kind=Deployment): .spec.template.spec.containers[name=\"c\"].ports: duplicate entries for key [containerPort=80,protocol=\"TCP\"]"
    );
    let conflict = apply(
        &cluster,
        &uri("fieldManager=m3"),
        &container(json!({"image": "i:2"})),
    )
    .await;
    assert_eq!(
        conflict.json["message"],
        "Apply failed with 1 conflict: conflict with \"m1\": .spec.template.spec.containers[name=\"c\"].image"
    );
}

#[tokio::test]
async fn subresources_have_managers_of_their_own() {
    let cluster = Cluster::start().await;
    let uri = |path: &str| format!("{DEPLOYMENTS}/d{path}");
    apply(&cluster, &uri("?fieldManager=m1"), &deployment()).await;
    let scaled = cluster
        .patch(
            &uri("/scale?fieldManager=scaler"),
            "merge-patch",
            json!({"spec": {"replicas": 3}}),
        )
        .await;
    assert_eq!(scaled.code, 200, "{}", scaled.text);
    assert!(scaled.json["metadata"].get("managedFields").is_none());
    let found = cluster.get(&uri("")).await;
    assert!(owners(&found).contains(&r#"scaler Updatescale {"f:spec":{"f:replicas":{}}}"#.to_string()));
    let conflict = apply(&cluster, &uri("?fieldManager=m1"), &deployment()).await;
    assert_eq!(
        conflict.json["message"],
        "Apply failed with 1 conflict: conflict with \"scaler\" with subresource \"scale\" using apps/v1: .spec.replicas"
    );
    let scale = json!({"apiVersion": "autoscaling/v1", "kind": "Scale", "metadata": {"name": "d"}, "spec": {"replicas": 5}});
    let conflict = apply(&cluster, &uri("/scale?fieldManager=sa"), &scale).await;
    assert_eq!(conflict.code, 409, "{}", conflict.text);
    let forced = apply(&cluster, &uri("/scale?fieldManager=sa&force=true"), &scale).await;
    assert_eq!(forced.json["spec"]["replicas"], 5);
    let found = cluster.get(&uri("")).await;
    assert!(owners(&found).contains(&r#"sa Applyscale {"f:spec":{"f:replicas":{}}}"#.to_string()));
    // A status writer owns nothing of the spec, whatever it says.
    let status = json!({"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "d"},
        "spec": {"replicas": 9}, "status": {"replicas": 1}});
    let written = apply(&cluster, &uri("/status?fieldManager=st"), &status).await;
    assert_eq!(written.code, 200, "{}", written.text);
    assert!(owners(&written).contains(&r#"st Applystatus {"f:status":{"f:replicas":{}}}"#.to_string()));
    assert_eq!(written.json["spec"]["replicas"], 5);
    let missing = apply(
        &cluster,
        &format!("{DEPLOYMENTS}/none/status?fieldManager=st"),
        &json!({"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "none"}}),
    )
    .await;
    assert_eq!(missing.code, 404);
}

#[tokio::test]
async fn kubectl_moves_from_client_to_server() {
    let cluster = Cluster::start().await;
    const LAST: &str = "kubectl.kubernetes.io/last-applied-configuration";
    let mut first = deployment();
    let text = format!("{first}\n");
    first["metadata"]["annotations"] = json!({LAST: text});
    cluster
        .post(
            &format!("{DEPLOYMENTS}?fieldManager=kubectl-client-side-apply"),
            first,
        )
        .await;
    let mut second = deployment();
    second["spec"]["template"]["spec"]["containers"][0]["image"] = json!("i:2");
    let other = apply(&cluster, &format!("{DEPLOYMENTS}/d?fieldManager=other"), &second).await;
    assert_eq!(other.code, 409);
    let moved = apply(
        &cluster,
        &format!("{DEPLOYMENTS}/d?fieldManager=kubectl"),
        &second,
    )
    .await;
    assert_eq!(moved.code, 200, "{}", moved.text);
    let kept = moved.json["metadata"]["annotations"][LAST]
        .as_str()
        .expect("kept");
    let kept: Value = serde_json::from_str(kept).expect("JSON");
    assert_eq!(kept, second);
}

#[tokio::test]
async fn versions_of_one_kind_share_their_owners() {
    let cluster = Cluster::start().await;
    let uri =
        |version: &str| format!("/apis/autoscaling/{version}/namespaces/default/horizontalpodautoscalers/h");
    let target = json!({"kind": "Deployment", "name": "d", "apiVersion": "apps/v1"});
    let config = |version: &str, most: i64| {
        json!({"apiVersion": format!("autoscaling/{version}"), "kind": "HorizontalPodAutoscaler",
            "metadata": {"name": "h"}, "spec": {"maxReplicas": most, "scaleTargetRef": target}})
    };
    let made = apply(
        &cluster,
        &format!("{}?fieldManager=m1", uri("v1")),
        &config("v1", 5),
    )
    .await;
    assert_eq!(made.code, 201, "{}", made.text);
    let conflict = apply(
        &cluster,
        &format!("{}?fieldManager=m2", uri("v2")),
        &config("v2", 6),
    )
    .await;
    assert_eq!(
        conflict.json["message"],
        "Apply failed with 1 conflict: conflict with \"m1\": .spec.maxReplicas"
    );
}

#[tokio::test]
async fn a_list_that_is_left_empty_is_set() {
    let cluster = Cluster::start().await;
    let roles = "/apis/rbac.authorization.k8s.io/v1/clusterroles";
    let role = |name: &str| json!({"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRole", "metadata": {"name": name}});
    let mut empty = role("empty");
    empty["rules"] = json!([]);
    let made = cluster.post(roles, empty).await;
    assert_eq!(
        made.json["metadata"]["managedFields"][0]["fieldsV1"],
        json!({"f:rules": {}}),
        "{}",
        made.text
    );
    let unset = cluster.post(roles, role("unset")).await;
    assert_eq!(
        unset.json["metadata"].get("managedFields"),
        None,
        "{}",
        unset.text
    );
}
