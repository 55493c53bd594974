//! ValidatingAdmissionPolicy through the front door: bound, parametrised, refusing, warning.

mod support;

use std::time::{Duration, Instant};

use serde_json::{Value, json};
use support::{Audited, Cluster, Reply};

const POLICIES: &str = "/apis/admissionregistration.k8s.io/v1/validatingadmissionpolicies";
const BINDINGS: &str = "/apis/admissionregistration.k8s.io/v1/validatingadmissionpolicybindings";
const CONFIG_MAPS: &str = "/api/v1/namespaces/default/configmaps";

fn policy(name: &str, resource: &str, more: Value) -> Value {
    let mut spec = json!({"matchConstraints": {"resourceRules": [
        {"operations": ["CREATE", "UPDATE"], "apiGroups": ["*"], "apiVersions": ["*"], "resources": [resource]}]}});
    for (key, value) in more.as_object().expect("an object") {
        spec[key] = value.clone();
    }
    json!({"apiVersion": "admissionregistration.k8s.io/v1", "kind": "ValidatingAdmissionPolicy", "metadata": {"name": name}, "spec": spec})
}

fn binding(name: &str, policy: &str, more: Value) -> Value {
    let mut spec = json!({"policyName": policy, "validationActions": ["Deny"]});
    for (key, value) in more.as_object().expect("an object") {
        spec[key] = value.clone();
    }
    json!({"apiVersion": "admissionregistration.k8s.io/v1", "kind": "ValidatingAdmissionPolicyBinding", "metadata": {"name": name}, "spec": spec})
}

async fn make(cluster: &Cluster, uri: &str, value: Value) {
    let made = cluster.post(uri, value).await;
    assert_eq!(made.code, 201, "{}", made.text);
}

/// Tries a create without doing it until the answer is the expected one: policies take effect a moment later.
async fn until(cluster: &Cluster, uri: &str, value: Value, content: impl Fn(&Reply) -> bool) -> Reply {
    let began = Instant::now();
    loop {
        let reply = cluster.post(&format!("{uri}?dryRun=All"), value.clone()).await;
        if content(&reply) {
            return reply;
        }
        assert!(began.elapsed() < Duration::from_secs(60), "{}", reply.text);
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

fn config_map(name: &str, size: &str) -> Value {
    json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name}, "data": {"size": size}})
}

#[tokio::test]
async fn policies_refuse_and_warn() {
    let cluster = Cluster::start().await;
    let rules = json!({
        "variables": [{"name": "size", "expression": "object.metadata.name.startsWith('limit') ? 0 : int(object.data.size)"}],
        "matchConditions": [{"name": "not-the-roots", "expression": "!object.metadata.name.startsWith('kube-')"}],
        "validations": [
            {"expression": "variables.size < 10", "messageExpression": "'size ' + string(variables.size) + ' in ' + namespaceObject.metadata.name", "reason": "Forbidden"},
            {"expression": "authorizer.group('').resource('configmaps').namespace('default').check('create').allowed()"}]});
    make(&cluster, POLICIES, policy("sizes", "configmaps", rules)).await;
    make(&cluster, BINDINGS, binding("sizes-here", "sizes", json!({}))).await;
    let refused = until(&cluster, CONFIG_MAPS, config_map("a", "12"), |reply| {
        reply.code != 201
    })
    .await;
    let message = "configmaps \"a\" is forbidden: ValidatingAdmissionPolicy 'sizes' with binding 'sizes-here' denied request: size 12 in default";
    assert_eq!(
        (refused.code, refused.json["message"].as_str()),
        (403, Some(message))
    );
    assert_eq!(
        refused.json["details"]["causes"][0]["message"],
        &message["configmaps \"a\" is forbidden: ".len()..]
    );
    // Also where the store would refuse it: it comes after admission.
    let mut versioned = config_map("a", "12");
    versioned["metadata"]["resourceVersion"] = json!("5");
    let refused = cluster.post(CONFIG_MAPS, versioned).await;
    assert_eq!(refused.json["message"], message);
    assert_eq!(cluster.post(CONFIG_MAPS, config_map("a", "3")).await.code, 201);
    // An update is held to the same, and an error of an expression refuses.
    let grown = cluster
        .patch(
            &format!("{CONFIG_MAPS}/a"),
            "merge-patch",
            json!({"data": {"size": "11"}}),
        )
        .await;
    assert_eq!(grown.code, 403, "{}", grown.text);
    let odd = cluster.post(CONFIG_MAPS, config_map("b", "many")).await;
    assert_eq!(
        (odd.code, odd.json["reason"].as_str()),
        (422, Some("Invalid")),
        "{}",
        odd.text
    );
    assert!(
        odd.text
            .contains("composited variable \\\"size\\\" fails to evaluate"),
        "{}",
        odd.text
    );

    // A binding for a few namespaces, that only warns.
    make(
        &cluster,
        POLICIES,
        policy(
            "nothing",
            "secrets",
            json!({"validations": [{"expression": "false", "message": "no secrets"}]}),
        ),
    )
    .await;
    let warns = json!({"validationActions": ["Warn"], "matchResources": {"namespaceSelector": {"matchLabels": {"open": "yes"}}}});
    make(&cluster, BINDINGS, binding("warns", "nothing", warns)).await;
    let space = json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "open", "labels": {"open": "yes"}}});
    make(&cluster, "/api/v1/namespaces", space).await;
    let secret = json!({"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "s"}});
    let warned = until(
        &cluster,
        "/api/v1/namespaces/open/secrets",
        secret.clone(),
        |reply| reply.headers.contains_key("warning"),
    )
    .await;
    assert_eq!(warned.code, 201);
    assert_eq!(
        warned.headers["warning"],
        "299 - \"Validation failed for ValidatingAdmissionPolicy 'nothing' with binding 'warns': no secrets\""
    );
    let quiet = cluster.post("/api/v1/namespaces/default/secrets", secret).await;
    assert!(
        quiet.code == 201 && !quiet.headers.contains_key("warning"),
        "{}",
        quiet.text
    );

    // Gone is gone.
    assert_eq!(
        cluster
            .delete(&format!("{BINDINGS}/sizes-here"), json!({}))
            .await
            .code,
        200
    );
    until(&cluster, CONFIG_MAPS, config_map("c", "12"), |reply| {
        reply.code == 201
    })
    .await;
}

#[tokio::test]
async fn policies_have_parameters() {
    let cluster = Cluster::start().await;
    let rules = json!({"paramKind": {"apiVersion": "v1", "kind": "ConfigMap"},
        "validations": [{"expression": "params != null && object.spec.replicas <= int(params.data.size)", "message": "too many"}]});
    make(&cluster, POLICIES, policy("replicas", "deployments", rules)).await;
    make(
        &cluster,
        BINDINGS,
        binding(
            "by-name",
            "replicas",
            json!({"paramRef": {"name": "limit", "parameterNotFoundAction": "Deny"}}),
        ),
    )
    .await;
    let deployments = "/apis/apps/v1/namespaces/default/deployments";
    let deployment = |replicas: i64| {
        json!({"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "d"}, "spec": {"replicas": replicas, "selector": {"matchLabels": {"a": "b"}},
            "template": {"metadata": {"labels": {"a": "b"}}, "spec": {"containers": [{"name": "c", "image": "c"}]}}}})
    };
    let missing = until(&cluster, deployments, deployment(1), |reply| reply.code != 201).await;
    let why = "ValidatingAdmissionPolicy 'replicas' with binding 'by-name' denied request: failed to configure binding: no params found for policy binding with `Deny` parameterNotFoundAction";
    assert_eq!(
        missing.json["message"],
        format!("deployments.apps \"d\" is forbidden: {why}")
    );
    make(&cluster, CONFIG_MAPS, config_map("limit", "2")).await;
    until(&cluster, deployments, deployment(2), |reply| reply.code == 201).await;
    let many = cluster.post(deployments, deployment(3)).await;
    assert_eq!(many.code, 422, "{}", many.text);
    assert!(many.text.contains("too many"), "{}", many.text);
    // The scale is another subresource, which the rules do not name.
    make(&cluster, deployments, deployment(2)).await;
    let scaled = cluster
        .patch(
            &format!("{deployments}/d/scale"),
            "merge-patch",
            json!({"spec": {"replicas": 9}}),
        )
        .await;
    assert_eq!(scaled.code, 200, "{}", scaled.text);
}

#[tokio::test]
async fn policies_change_objects() {
    let cluster = Cluster::start().await;
    let policies = "/apis/admissionregistration.k8s.io/v1/mutatingadmissionpolicies";
    let bindings = "/apis/admissionregistration.k8s.io/v1/mutatingadmissionpolicybindings";
    let policy = |name: &str, selector: &str, mutations: Value| {
        json!({"apiVersion": "admissionregistration.k8s.io/v1", "kind": "MutatingAdmissionPolicy", "metadata": {"name": name}, "spec": {
            "matchConstraints": {"objectSelector": {"matchLabels": {"mutate": selector}}, "resourceRules": [
                {"operations": ["CREATE"], "apiGroups": ["*"], "apiVersions": ["*"], "resources": ["deployments", "configmaps"]}]},
            "variables": [{"name": "side", "expression": "'side-' + object.metadata.name"}],
            "failurePolicy": "Fail", "reinvocationPolicy": "Never", "mutations": mutations}})
    };
    let bound = |name: &str| json!({"apiVersion": "admissionregistration.k8s.io/v1", "kind": "MutatingAdmissionPolicyBinding", "metadata": {"name": name}, "spec": {"policyName": name}});
    let configuration =
        |text: &str| json!({"patchType": "ApplyConfiguration", "applyConfiguration": {"expression": text}});
    let patches = |text: &str| json!({"patchType": "JSONPatch", "jsonPatch": {"expression": text}});
    let container = "Object{metadata: Object.metadata{labels: Object.metadata.labels{seen: 'yes'}}, spec: Object.spec{template: Object.spec.template{spec: Object.spec.template.spec{
        containers: [Object.spec.template.spec.containers{name: variables.side, image: 'side'}]}}}}";
    let operations = "[JSONPatch{op: 'test', path: '/data/size', value: '1'}, JSONPatch{op: 'add', path: '/metadata/annotations/' + jsonpatch.escapeKey('example.com/a'), value: object.metadata.name}]";
    let atomic = "Object{spec: Object.spec{selector: Object.spec.selector{matchLabels: Object.spec.selector.matchLabels{x: 'y'}}}}";
    for (name, selector, mutations) in [
        (
            "sidecar",
            "sidecar",
            json!([
                configuration(container),
                configuration("Object{spec: Object.spec{replicas: object.spec.replicas + 1}}")
            ]),
        ),
        ("operations", "operations", json!([patches(operations)])),
        ("atomic", "atomic", json!([configuration(atomic)])),
    ] {
        make(&cluster, policies, policy(name, selector, mutations)).await;
        make(&cluster, bindings, bound(name)).await;
    }
    let deployment = |mutate: &str| {
        json!({"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "d", "labels": {"mutate": mutate}}, "spec": {"selector": {"matchLabels": {"a": "b"}},
            "template": {"metadata": {"labels": {"a": "b"}}, "spec": {"containers": [{"name": "c", "image": "c"}]}}}})
    };
    let deployments = "/apis/apps/v1/namespaces/default/deployments";
    let changed = until(&cluster, deployments, deployment("sidecar"), |reply| {
        reply.json["metadata"]["labels"]["seen"] == "yes"
    })
    .await;
    let containers = changed.json["spec"]["template"]["spec"]["containers"].clone();
    assert_eq!(
        (&containers[0]["name"], &containers[1]["name"]),
        (&json!("c"), &json!("side-d"))
    );
    assert_eq!(containers[1]["imagePullPolicy"], "Always", "{}", changed.text);
    assert_eq!(changed.json["spec"]["replicas"], 2);

    let map = |size: &str| json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "m", "labels": {"mutate": "operations"}, "annotations": {"own": "1"}}, "data": {"size": size}});
    let patched = until(&cluster, CONFIG_MAPS, map("1"), |reply| {
        reply.json["metadata"]["annotations"]["example.com/a"] == "m"
    })
    .await;
    assert_eq!(patched.code, 201);
    // A test that fails leaves the object alone.
    let other = cluster.post(&format!("{CONFIG_MAPS}?dryRun=All"), map("2")).await;
    assert_eq!(
        other.json["metadata"]["annotations"],
        json!({"own": "1"}),
        "{}",
        other.text
    );

    // A mutation that fails is no reason to leave out the next; a field that nobody knows is a mistake in any case.
    let add = |path: &str, value: &str| {
        patches(&format!(
            "[JSONPatch{{op: 'add', path: '{path}', value: {value}}}]"
        ))
    };
    let tolerant = |name: &str, mutations: Value| {
        let mut policy = policy(name, name, mutations);
        policy["spec"]["failurePolicy"] = json!("Ignore");
        policy
    };
    let failing = json!([add("/data/x", "object.data.nope"), add("/data/ok", "'y'")]);
    let unknown = json!([add("/foo", "'y'")]);
    for (name, mutations) in [("failing", failing), ("unknown", unknown)] {
        make(&cluster, policies, tolerant(name, mutations)).await;
        make(&cluster, bindings, bound(name)).await;
    }
    let map = |mutate: &str| json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "n", "labels": {"mutate": mutate}}, "data": {"a": "1"}});
    let failed = until(&cluster, CONFIG_MAPS, map("failing"), |reply| {
        reply.json["data"]["ok"] == "y"
    })
    .await;
    assert_eq!(failed.json["data"], json!({"a": "1", "ok": "y"}));
    let mistaken = until(&cluster, CONFIG_MAPS, map("unknown"), |reply| reply.code != 201).await;
    assert_eq!(mistaken.code, 500);
    assert_eq!(
        mistaken.json["message"],
        "Internal error occurred: strict decoding error: unknown field \"foo\""
    );

    let refused = until(&cluster, deployments, deployment("atomic"), |reply| {
        reply.code != 201
    })
    .await;
    let why = "policy 'atomic' with binding 'atomic' denied request: error applying patch: invalid ApplyConfiguration: may not mutate atomic arrays, maps or structs: .spec.selector";
    assert_eq!((refused.code, refused.json["message"].as_str()), (403, Some(why)));
}

#[tokio::test]
async fn the_audit_log_knows_what_policies_found() {
    let audited = Audited::start("- {level: Metadata}").await;
    let cluster = &audited.cluster;
    let rules = json!({
        "validations": [
            {"expression": "object.metadata.name != 'odd'", "message": "odd it is"},
            {"expression": "object.metadata.name != 'bad'"}],
        "auditAnnotations": [
            {"key": "who", "valueExpression": "'name ' + object.metadata.name"},
            {"key": "none", "valueExpression": "null"}]});
    make(cluster, POLICIES, policy("p", "configmaps", rules)).await;
    let more = json!({"validationActions": ["Audit", "Warn"]});
    make(cluster, BINDINGS, binding("b", "p", more)).await;
    let check = async |name: &str, failure: Value| {
        let reply = until(cluster, CONFIG_MAPS, config_map(name, "1"), |reply| {
            let annotations = &audited.event_of(reply)["annotations"];
            annotations.get("p/who").is_some()
        })
        .await;
        assert_eq!(reply.code, 201, "{}", reply.text);
        let mut expected = json!({
            "authorization.k8s.io/decision": "allow",
            "authorization.k8s.io/reason": "",
            "p/who": format!("name {name}"),
        });
        if !failure.is_null() {
            expected["validation.policy.admission.k8s.io/validation_failure"] = failure;
        }
        assert_eq!(audited.event_of(&reply)["annotations"], expected);
    };
    check("even", Value::Null).await;
    let tail = "\"validationActions\":[\"Audit\",\"Warn\"]}]";
    check(
        "odd",
        json!(format!(
            "[{{\"message\":\"odd it is\",\"policy\":\"p\",\"binding\":\"b\",\"expressionIndex\":0,{tail}"
        )),
    )
    .await;
    check(
        "bad",
        json!(format!("[{{\"message\":\"failed expression: object.metadata.name != 'bad'\",\"policy\":\"p\",\"binding\":\"b\",\"expressionIndex\":1,{tail}")),
    )
    .await;
}

#[tokio::test]
async fn policies_are_for_names_and_not_for_what_is_excluded() {
    let cluster = Cluster::start().await;
    let rule = |more: Value| {
        let mut rule = json!({"operations": ["CREATE"], "apiGroups": [""], "apiVersions": ["v1"], "resources": ["configmaps"]});
        for (key, value) in more.as_object().expect("an object") {
            rule[key] = value.clone();
        }
        rule
    };
    let constraints = json!({
        "resourceRules": [rule(json!({"resourceNames": ["one", "two"]}))],
        "excludeResourceRules": [rule(json!({"resourceNames": ["two"]}))]});
    let spec =
        json!({"matchConstraints": constraints, "validations": [{"expression": "false", "message": "no"}]});
    make(&cluster, POLICIES, policy("p", "configmaps", spec)).await;
    make(&cluster, BINDINGS, binding("b", "p", json!({}))).await;
    until(&cluster, CONFIG_MAPS, config_map("one", "1"), |reply| {
        reply.code == 422
    })
    .await;
    for name in ["two", "three"] {
        let made = cluster.post(CONFIG_MAPS, config_map(name, "1")).await;
        assert_eq!(made.code, 201, "{}", made.text);
    }
    // What configures admission is exempt from it: a mistake can be undone.
    let all = json!({"matchConstraints": {"resourceRules": [
        {"operations": ["*"], "apiGroups": ["*"], "apiVersions": ["*"], "resources": ["*"]}]}, "validations": [{"expression": "false"}]});
    make(&cluster, POLICIES, policy("all", "*", all)).await;
    make(&cluster, BINDINGS, binding("all", "all", json!({}))).await;
    until(&cluster, CONFIG_MAPS, config_map("four", "1"), |reply| {
        reply.code == 422
    })
    .await;
    let gone = cluster.delete(&format!("{BINDINGS}/all"), json!({})).await;
    assert_eq!(gone.code, 200, "{}", gone.text);
}
