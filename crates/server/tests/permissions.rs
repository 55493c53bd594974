//! Requests that need more than the permission which their method stands for.

mod support;

use serde_json::{Value, json};
use skiff_auth::UserInfo;
use support::{Cluster, Reply};

const POD: &str = "/api/v1/namespaces/default/pods/p";
const REGISTRATION: &str = "/apis/admissionregistration.k8s.io/v1";

/// Lets a user do this, everywhere. Comes back when the authorizer knows.
async fn grant(cluster: &Cluster, user: &str, rules: Value, probe: (&str, &str)) {
    let rbac = "/apis/rbac.authorization.k8s.io/v1";
    let name = format!("{user}-{}", probe.0.to_lowercase());
    let role = json!({"metadata": {"name": name}, "rules": rules});
    let made = cluster.post(&format!("{rbac}/clusterroles"), role).await;
    assert_eq!(made.code, 201, "{}", made.text);
    let binding = json!({"metadata": {"name": name},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": name},
        "subjects": [{"apiGroup": "rbac.authorization.k8s.io", "kind": "User", "name": user}]});
    let made = cluster
        .post(&format!("{rbac}/clusterrolebindings"), binding)
        .await;
    assert_eq!(made.code, 201, "{}", made.text);
    let (verb, resource) = probe;
    let (group, resource) = resource.split_once('/').unwrap_or(("", resource));
    let (resource, subresource) = resource.split_once(':').unwrap_or((resource, ""));
    let review = json!({"spec": {"user": user, "resourceAttributes":
        {"verb": verb, "group": group, "resource": resource, "subresource": subresource}}});
    loop {
        let uri = "/apis/authorization.k8s.io/v1/subjectaccessreviews";
        if cluster.post(uri, review.clone()).await.json["status"]["allowed"] == true {
            return;
        }
        tokio::time::sleep(std::time::Duration::from_millis(5)).await;
    }
}

async fn send(cluster: &Cluster, user: &str, method: &str, uri: &str, body: Value) -> Reply {
    let service = cluster
        .server
        .service(UserInfo::new(user, ["system:authenticated"]));
    let headers = [
        ("content-type", "application/json"),
        ("connection", "Upgrade"),
        ("upgrade", "websocket"),
        ("sec-websocket-version", "13"),
        ("sec-websocket-key", "dGhlIHNhbXBsZSBub25jZQ=="),
        ("sec-websocket-protocol", "v5.channel.k8s.io"),
    ];
    let headers = if method == "GET" {
        &headers[..]
    } else {
        &headers[..1]
    };
    let body = if body.is_null() {
        String::new()
    } else {
        body.to_string()
    };
    cluster.send_as(service, method, uri, headers, body).await
}

#[tokio::test]
async fn streams_over_websockets_need_create() {
    let cluster = Cluster::start().await;
    let subresources = json!(["pods/exec", "pods/attach", "pods/portforward"]);
    for (user, verb) in [("reader", "get"), ("creator", "create")] {
        let rules = json!([{"apiGroups": [""], "resources": subresources, "verbs": [verb]}]);
        grant(&cluster, user, rules, (verb, "pods:exec")).await;
    }
    let both = json!([{"apiGroups": [""], "resources": subresources, "verbs": ["get", "create"]}]);
    grant(&cluster, "both", both, ("create", "pods:exec")).await;
    for stream in [
        "exec?command=ls&stdout=true",
        "attach?stdout=true",
        "portforward?ports=80",
    ] {
        let uri = format!("{POD}/{stream}");
        let refused = send(&cluster, "reader", "GET", &uri, Value::Null).await;
        assert_eq!(refused.code, 403, "{stream}: {}", refused.text);
        assert_eq!(refused.json["message"], "pods \"p\" is forbidden: ", "{stream}");
        // Past the authorizer: there is no such pod.
        let allowed = send(&cluster, "both", "GET", &uri, Value::Null).await;
        assert_eq!(allowed.code, 404, "{stream}: {}", allowed.text);
        let posted = send(&cluster, "creator", "POST", &uri, Value::Null).await;
        assert_eq!(posted.code, 404, "{stream}: {}", posted.text);
        // The verb of the method is still needed.
        let refused = send(&cluster, "creator", "GET", &uri, Value::Null).await;
        assert_eq!(refused.code, 403, "{stream}: {}", refused.text);
    }
}

#[tokio::test]
async fn a_put_that_creates_needs_create() {
    let cluster = Cluster::start().await;
    let rules = |verbs: Value| json!([{"apiGroups": ["coordination.k8s.io"], "resources": ["leases"], "verbs": verbs}]);
    let probe = ("update", "coordination.k8s.io/leases");
    grant(&cluster, "updater", rules(json!(["update"])), probe).await;
    let uri = "/apis/coordination.k8s.io/v1/namespaces/default/leases/l";
    let lease = json!({"metadata": {"name": "l"}, "spec": {"holderIdentity": "a"}});
    let refused = send(&cluster, "updater", "PUT", uri, lease.clone()).await;
    assert_eq!(refused.code, 403, "{}", refused.text);
    assert_eq!(
        refused.json["message"],
        "leases.coordination.k8s.io \"l\" is forbidden: User \"updater\" cannot create resource \"leases\" in API group \"coordination.k8s.io\" in the namespace \"default\""
    );
    assert_eq!(cluster.get(uri).await.code, 404);
    let made = cluster.put(uri, lease).await;
    assert_eq!(made.code, 201, "{}", made.text);
    let updated = send(&cluster, "updater", "PUT", uri, made.json).await;
    assert_eq!(updated.code, 200, "{}", updated.text);
}

#[tokio::test]
async fn parameters_of_policies_must_be_readable_to_their_author() {
    let cluster = Cluster::start().await;
    let all = json!([{"apiGroups": ["admissionregistration.k8s.io"], "resources": ["*"], "verbs": ["*"]}]);
    grant(
        &cluster,
        "author",
        all,
        (
            "create",
            "admissionregistration.k8s.io/validatingadmissionpolicies",
        ),
    )
    .await;
    let policies = format!("{REGISTRATION}/validatingadmissionpolicies");
    let bindings = format!("{REGISTRATION}/validatingadmissionpolicybindings");
    let policy = |name: &str, kind: Value| {
        json!({"metadata": {"name": name}, "spec": {"paramKind": kind,
            "matchConstraints": {"resourceRules": [{"apiGroups": [""], "apiVersions": ["v1"], "resources": ["pods"], "operations": ["CREATE"]}]},
            "validations": [{"expression": "true"}]}})
    };
    let secrets = json!({"apiVersion": "v1", "kind": "Secret"});
    let refused = send(
        &cluster,
        "author",
        "POST",
        &policies,
        policy("p", secrets.clone()),
    )
    .await;
    assert_eq!(refused.code, 422, "{}", refused.text);
    assert_eq!(
        refused.json["message"],
        "ValidatingAdmissionPolicy.admissionregistration.k8s.io \"p\" is invalid: spec.paramKind: Forbidden: user &{author  [system:authenticated] map[]} must have \"get\" permission on all objects of the referenced paramKind (kind=Secret, apiVersion=v1)"
    );
    let made = send(&cluster, "author", "POST", &policies, policy("none", Value::Null)).await;
    assert_eq!(made.code, 201, "{}", made.text);
    assert_eq!(cluster.post(&policies, policy("p", secrets)).await.code, 201);
    let binding = |reference: Value| json!({"metadata": {"name": "b"}, "spec": {"policyName": "p", "paramRef": reference, "validationActions": ["Deny"]}});
    let reference = json!({"name": "s", "namespace": "default", "parameterNotFoundAction": "Deny"});
    let refused = send(&cluster, "author", "POST", &bindings, binding(reference.clone())).await;
    assert_eq!(refused.code, 422, "{}", refused.text);
    let message = refused.json["message"].as_str().unwrap_or_default();
    assert!(
        message.ends_with("spec.paramRef: Forbidden: user &{author  [system:authenticated] map[]} does not have \"get\" permission on the object referenced by paramRef"),
        "{message}"
    );
    let rules = json!([{"apiGroups": [""], "resources": ["secrets"], "verbs": ["get"]}]);
    grant(&cluster, "author", rules, ("get", "secrets")).await;
    let made = send(&cluster, "author", "POST", &bindings, binding(reference)).await;
    assert_eq!(made.code, 201, "{}", made.text);
}

#[tokio::test]
async fn an_allocation_needs_more_than_the_status() {
    let cluster = Cluster::start().await;
    let claims = "/apis/resource.k8s.io/v1/namespaces/default/resourceclaims";
    let claim = json!({"metadata": {"name": "c"}, "spec": {"devices": {"requests":
        [{"name": "r", "exactly": {"deviceClassName": "d", "allocationMode": "ExactCount", "count": 1}}]}}});
    let made = cluster.post(claims, claim).await;
    assert_eq!(made.code, 201, "{}", made.text);
    let rule = |resource: &str, verb: &str| json!([{"apiGroups": ["resource.k8s.io"], "resources": [resource], "verbs": [verb]}]);
    let status = "resourceclaims/status";
    let probe = ("update", "resource.k8s.io/resourceclaims:status");
    grant(&cluster, "writer", rule(status, "update"), probe).await;
    let uri = format!("{claims}/c/status");
    let mut allocated = made.json;
    allocated["status"] = json!({"allocation": {"devices": {"results":
        [{"request": "r", "driver": "gpu.example.com", "pool": "p", "device": "d"}]}}});
    let refused = send(&cluster, "writer", "PUT", &uri, allocated.clone()).await;
    assert_eq!(refused.code, 422, "{}", refused.text);
    assert_eq!(
        refused.json["message"],
        "ResourceClaim.resource.k8s.io \"c\" is invalid: status.allocation: Forbidden: changing status.allocation or status.reservedFor requires resource=\"resourceclaims/binding\", verb=\"update\" permission: resourceclaims.resource.k8s.io is forbidden: User \"writer\" cannot update resource \"resourceclaims/binding\" in API group \"resource.k8s.io\" at the cluster scope"
    );
    let binding = json!([{"apiGroups": ["resource.k8s.io"], "resources": ["resourceclaims/binding", status], "verbs": ["update"]}]);
    let probe = ("update", "resource.k8s.io/resourceclaims:binding");
    grant(&cluster, "binder", binding, probe).await;
    let made = send(&cluster, "binder", "PUT", &uri, allocated).await;
    assert_eq!(made.code, 200, "{}", made.text);
    let mut told = made.json;
    told["status"]["devices"] = json!([{"driver": "gpu.example.com", "pool": "p", "device": "d"}]);
    let refused = send(&cluster, "binder", "PUT", &uri, told.clone()).await;
    assert_eq!(refused.code, 422, "{}", refused.text);
    let message = refused.json["message"].as_str().unwrap_or_default();
    assert!(message.contains("status.devices: Forbidden: changing status.devices requires resource=\"resourceclaims/driver\", verb=\"[arbitrary-node:update]\" permission:"), "{message}");
    let driver = json!([{"apiGroups": ["resource.k8s.io"], "resources": ["resourceclaims/driver"],
        "resourceNames": ["gpu.example.com"], "verbs": ["arbitrary-node:update"]},
        {"apiGroups": ["resource.k8s.io"], "resources": [status], "verbs": ["update"]}]);
    let probe = ("update", "resource.k8s.io/resourceclaims:status");
    grant(&cluster, "driver", driver, probe).await;
    let done = send(&cluster, "driver", "PUT", &uri, told).await;
    assert_eq!(done.code, 200, "{}", done.text);
}
