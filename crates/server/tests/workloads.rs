//! Kinds with habits of their own, from outside: pods, services, namespaces, scales, tokens, events.

mod support;

use serde_json::{Value, json};
use support::Cluster;

const PODS: &str = "/api/v1/namespaces/default/pods";
const SERVICES: &str = "/api/v1/namespaces/default/services";

async fn service_account(cluster: &Cluster) {
    let made = cluster
        .post(
            "/api/v1/namespaces/default/serviceaccounts",
            json!({"metadata": {"name": "default"}}),
        )
        .await;
    assert_eq!(made.code, 201, "{}", made.text);
}

fn pod(name: &str) -> Value {
    json!({"kind": "Pod", "apiVersion": "v1", "metadata": {"name": name, "labels": {"app": "web"}},
        "spec": {"containers": [{"name": "c", "image": "web"}]}})
}

#[tokio::test]
async fn pods_are_bound_once_and_deleted_gracefully() {
    let cluster = Cluster::start().await;
    service_account(&cluster).await;
    let made = cluster.post(PODS, pod("p")).await;
    assert_eq!(made.code, 201, "{}", made.text);
    assert_eq!(made.json["status"]["phase"], "Pending");
    assert_eq!(made.json["spec"]["serviceAccountName"], "default");

    let mut watch = cluster
        .watch(&format!("{PODS}?watch=true&fieldSelector=spec.nodeName%3Dn1"))
        .await;
    let binding = json!({"metadata": {"name": "p"}, "target": {"kind": "Node", "name": "n1"}});
    let bound = cluster.post(&format!("{PODS}/p/binding"), binding.clone()).await;
    assert_eq!(
        (bound.code, bound.json["status"].as_str()),
        (201, Some("Success")),
        "{}",
        bound.text
    );
    assert_eq!(
        watch.brief().await,
        "ADDED p",
        "a pod that starts to match is added"
    );
    let again = cluster.post(&format!("{PODS}/p/binding"), binding).await;
    assert_eq!(
        (again.code, again.json["message"].as_str()),
        (
            409,
            Some(
                "Operation cannot be fulfilled on pods/binding \"p\": pod p is already assigned to node \"n1\""
            )
        )
    );
    let got = cluster.get(&format!("{PODS}/p")).await.json;
    assert_eq!(got["spec"]["nodeName"], "n1");
    assert!(
        got["status"]["conditions"]
            .as_array()
            .expect("conditions")
            .iter()
            .any(|c| c["type"] == "PodScheduled" && c["status"] == "True")
    );

    let status = cluster
        .patch(
            &format!("{PODS}/p/status"),
            "merge-patch",
            json!({"status": {"phase": "Running"}, "metadata": {"labels": {"x": "y"}}}),
        )
        .await;
    assert_eq!(
        (status.code, &status.json["status"]["phase"]),
        (200, &json!("Running")),
        "{}",
        status.text
    );

    let marked = cluster.delete(&format!("{PODS}/p"), json!({})).await;
    assert_eq!(
        (
            marked.code,
            &marked.json["metadata"]["deletionGracePeriodSeconds"]
        ),
        (200, &json!(30)),
        "{}",
        marked.text
    );
    assert_eq!(cluster.get(&format!("{PODS}/p")).await.code, 200);
    let gone = cluster
        .delete(&format!("{PODS}/p"), json!({"gracePeriodSeconds": 0}))
        .await;
    assert_eq!(
        (gone.code, gone.json["kind"].as_str()),
        (200, Some("Pod")),
        "{}",
        gone.text
    );
    assert_eq!(cluster.get(&format!("{PODS}/p")).await.code, 404);
    // An unscheduled pod goes at once.
    cluster.post(PODS, pod("q")).await;
    cluster.delete(&format!("{PODS}/q"), json!({})).await;
    assert_eq!(cluster.get(&format!("{PODS}/q")).await.code, 404);
}

#[tokio::test]
async fn evictions_ask_the_budget() {
    let cluster = Cluster::start().await;
    service_account(&cluster).await;
    cluster.post(PODS, pod("p")).await;
    cluster
        .patch(
            &format!("{PODS}/p/status"),
            "merge-patch",
            json!({"status": {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]}}),
        )
        .await;
    let budgets = "/apis/policy/v1/namespaces/default/poddisruptionbudgets";
    let made = cluster.post(budgets, json!({"metadata": {"name": "b"}, "spec": {"minAvailable": 1, "selector": {"matchLabels": {"app": "web"}}}})).await;
    assert_eq!(made.code, 201, "{}", made.text);
    let set = async |allowed: i64| {
        let status = json!({"status": {"observedGeneration": 1, "disruptionsAllowed": allowed, "currentHealthy": 1, "desiredHealthy": 1, "expectedPods": 1}});
        let reply = cluster
            .patch(&format!("{budgets}/b/status"), "merge-patch", status)
            .await;
        assert_eq!(reply.code, 200, "{}", reply.text);
    };
    set(0).await;
    let eviction = json!({"metadata": {"name": "p"}});
    let refused = cluster
        .post(&format!("{PODS}/p/eviction"), eviction.clone())
        .await;
    assert_eq!(
        (refused.code, refused.json["message"].as_str()),
        (
            429,
            Some("Cannot evict pod as it would violate the pod's disruption budget.")
        ),
        "{}",
        refused.text
    );
    set(1).await;
    let mut watch = cluster
        .watch(&format!("{PODS}?watch=true&fieldSelector=metadata.name=p"))
        .await;
    let evicted = cluster.post(&format!("{PODS}/p/eviction"), eviction).await;
    assert_eq!(evicted.code, 201, "{}", evicted.text);
    assert_eq!(cluster.get(&format!("{PODS}/p")).await.code, 404);
    assert_eq!(
        cluster.get(&format!("{budgets}/b")).await.json["status"]["disruptionsAllowed"],
        0
    );
    // Its owner can tell that it did not fail.
    let last = loop {
        let event = watch.next().await.expect("an event");
        if event["type"] == "DELETED" {
            break event["object"].clone();
        }
    };
    let conditions = last["status"]["conditions"].as_array().expect("conditions");
    let target = conditions.iter().find(|c| c["type"] == "DisruptionTarget");
    let target = target.expect("the condition DisruptionTarget");
    assert_eq!(
        (&target["status"], &target["reason"], &target["message"]),
        (
            &json!("True"),
            &json!("EvictionByEvictionAPI"),
            &json!("Eviction API: evicting")
        )
    );
    assert!(conditions.iter().any(|c| c["type"] == "Ready"), "{conditions:?}");
    // A dry run marks nothing, and preconditions are looked at before.
    cluster.post(PODS, pod("q")).await;
    for (options, code) in [
        (json!({"dryRun": ["All"]}), 201),
        (json!({"preconditions": {"uid": "other"}}), 409),
    ] {
        let eviction = json!({"metadata": {"name": "q"}, "deleteOptions": options});
        let answer = cluster.post(&format!("{PODS}/q/eviction"), eviction).await;
        assert_eq!(answer.code, code, "{}", answer.text);
        let kept = cluster.get(&format!("{PODS}/q")).await;
        assert!(!kept.text.contains("DisruptionTarget"), "{}", kept.text);
    }
}

#[tokio::test]
async fn deployments_have_defaults_status_and_scale() {
    let cluster = Cluster::start().await;
    let uri = "/apis/apps/v1/namespaces/default/deployments";
    let deployment = json!({"metadata": {"name": "web"}, "spec": {"selector": {"matchLabels": {"app": "web"}},
        "template": {"metadata": {"labels": {"app": "web"}}, "spec": {"containers": [{"name": "c", "image": "web"}]}}}});
    let made = cluster.post(uri, deployment.clone()).await;
    assert_eq!(made.code, 201, "{}", made.text);
    assert_eq!(
        (
            &made.json["spec"]["replicas"],
            &made.json["metadata"]["generation"]
        ),
        (&json!(1), &json!(1))
    );
    assert_eq!(made.json["spec"]["strategy"]["type"], "RollingUpdate");
    let scale = cluster.get(&format!("{uri}/web/scale")).await.json;
    assert_eq!(
        (
            scale["kind"].as_str(),
            &scale["spec"]["replicas"],
            scale["status"]["selector"].as_str()
        ),
        (Some("Scale"), &json!(1), Some("app=web"))
    );
    let scaled = cluster
        .patch(
            &format!("{uri}/web/scale"),
            "merge-patch",
            json!({"spec": {"replicas": 3}}),
        )
        .await;
    assert_eq!(
        (scaled.code, &scaled.json["spec"]["replicas"]),
        (200, &json!(3)),
        "{}",
        scaled.text
    );
    let got = cluster.get(&format!("{uri}/web")).await.json;
    assert_eq!(
        (&got["spec"]["replicas"], &got["metadata"]["generation"]),
        (&json!(3), &json!(2))
    );
    let mut put = cluster.get(&format!("{uri}/web/scale")).await.json;
    put["spec"]["replicas"] = json!(2);
    assert_eq!(
        cluster.put(&format!("{uri}/web/scale"), put.clone()).await.code,
        200
    );
    assert_eq!(
        cluster.put(&format!("{uri}/web/scale"), put).await.code,
        409,
        "the second has a stale version"
    );
    let mut status = cluster.get(&format!("{uri}/web")).await.json;
    status["status"]["replicas"] = json!(2);
    status["spec"]["replicas"] = json!(9);
    let written = cluster.put(&format!("{uri}/web/status"), status).await;
    assert_eq!(
        (
            written.code,
            &written.json["spec"]["replicas"],
            &written.json["status"]["replicas"]
        ),
        (200, &json!(2), &json!(2)),
        "{}",
        written.text
    );
    let bad = json!({"metadata": {"name": "bad"}, "spec": {"selector": {"matchLabels": {"app": "x"}}, "template": deployment["spec"]["template"]}});
    let refused = cluster.post(uri, bad).await;
    assert_eq!(refused.code, 422, "{}", refused.text);
    assert!(
        refused.json["message"]
            .as_str()
            .expect("a message")
            .contains("`selector` does not match template `labels`"),
        "{}",
        refused.text
    );
    let strategic = cluster
        .patch(
            &format!("{uri}/web"),
            "strategic-merge-patch",
            json!({"spec": {"template": {"spec": {"containers": [{"name": "c", "image": "web:2"}]}}}}),
        )
        .await;
    assert_eq!(
        strategic.json["spec"]["template"]["spec"]["containers"][0]["image"], "web:2",
        "{}",
        strategic.text
    );
    assert_eq!(
        strategic.json["spec"]["template"]["spec"]["containers"]
            .as_array()
            .map(Vec::len),
        Some(1)
    );
}

#[tokio::test]
async fn services_get_addresses_and_ports() {
    let cluster = Cluster::start().await;
    let service = |name: &str, extra: Value| {
        let mut value = json!({"metadata": {"name": name}, "spec": {"ports": [{"port": 80}], "selector": {"app": "web"}}});
        for (key, field) in extra.as_object().expect("a map") {
            value["spec"][key] = field.clone();
        }
        value
    };
    let made = cluster
        .post(SERVICES, service("web", json!({"type": "NodePort"})))
        .await;
    assert_eq!(made.code, 201, "{}", made.text);
    let spec = &made.json["spec"];
    assert!(
        spec["clusterIP"]
            .as_str()
            .expect("an address")
            .starts_with("10.96.")
    );
    assert_eq!(
        (
            &spec["clusterIPs"][0],
            &spec["ipFamilies"],
            &spec["ipFamilyPolicy"]
        ),
        (&spec["clusterIP"], &json!(["IPv4"]), &json!("SingleStack"))
    );
    assert!((30000..=32767).contains(&spec["ports"][0]["nodePort"].as_i64().expect("a port")));
    let taken = cluster
        .post(SERVICES, service("two", json!({"clusterIP": spec["clusterIP"]})))
        .await;
    assert_eq!(taken.code, 422, "{}", taken.text);
    assert!(
        taken.json["message"]
            .as_str()
            .expect("a message")
            .contains("provided IP is already allocated")
    );
    // kubectl apply without the allocated fields keeps them.
    let kept = cluster
        .patch(
            &format!("{SERVICES}/web"),
            "merge-patch",
            json!({"metadata": {"labels": {"a": "b"}}}),
        )
        .await;
    assert_eq!(kept.json["spec"]["clusterIP"], spec["clusterIP"]);
    assert_eq!(
        cluster.delete(&format!("{SERVICES}/web"), json!({})).await.code,
        200
    );
    let again = cluster
        .post(SERVICES, service("two", json!({"clusterIP": spec["clusterIP"]})))
        .await;
    assert_eq!(again.code, 201, "{}", again.text);
    let headless = cluster
        .post(SERVICES, service("headless", json!({"clusterIP": "None"})))
        .await;
    assert_eq!(
        (headless.code, &headless.json["spec"]["clusterIPs"]),
        (201, &json!(["None"])),
        "{}",
        headless.text
    );
    // Many at once: no address is given twice.
    let made = futures::future::join_all(
        (0..40).map(|n| cluster.post(SERVICES, service(&format!("s{n}"), json!({})))),
    )
    .await;
    let mut addresses: Vec<&str> = made
        .iter()
        .map(|reply| reply.json["spec"]["clusterIP"].as_str().expect("an address"))
        .collect();
    addresses.sort_unstable();
    addresses.dedup();
    assert_eq!(addresses.len(), 40);
}

#[tokio::test]
async fn namespaces_end_when_finalized() {
    let cluster = Cluster::start().await;
    let made = cluster
        .post("/api/v1/namespaces", json!({"metadata": {"name": "team"}}))
        .await;
    assert_eq!(made.code, 201, "{}", made.text);
    assert_eq!(
        (&made.json["spec"]["finalizers"], &made.json["status"]["phase"]),
        (&json!(["kubernetes"]), &json!("Active"))
    );
    assert_eq!(
        made.json["metadata"]["labels"]["kubernetes.io/metadata.name"],
        "team"
    );
    let marked = cluster.delete("/api/v1/namespaces/team", json!({})).await;
    assert_eq!(
        (marked.code, &marked.json["status"]["phase"]),
        (200, &json!("Terminating")),
        "{}",
        marked.text
    );
    let refused = cluster
        .post(
            "/api/v1/namespaces/team/configmaps",
            json!({"metadata": {"name": "late"}}),
        )
        .await;
    assert_eq!(refused.code, 403, "{}", refused.text);
    assert!(
        refused.json["message"]
            .as_str()
            .expect("a message")
            .contains("because it is being terminated"),
        "{}",
        refused.text
    );
    let mut last = cluster.get("/api/v1/namespaces/team").await.json;
    last["spec"]["finalizers"] = json!([]);
    let done = cluster.put("/api/v1/namespaces/team/finalize", last).await;
    assert_eq!(done.code, 200, "{}", done.text);
    assert_eq!(cluster.get("/api/v1/namespaces/team").await.code, 404);
    let kept = cluster.delete("/api/v1/namespaces/kube-system", json!({})).await;
    assert_eq!(kept.code, 403, "{}", kept.text);
}

#[tokio::test]
async fn tokens_are_issued_and_reviewed() {
    let cluster = Cluster::start().await;
    service_account(&cluster).await;
    let uri = "/api/v1/namespaces/default/serviceaccounts/default/token";
    let made = cluster
        .post(uri, json!({"spec": {"expirationSeconds": 600}}))
        .await;
    assert_eq!(made.code, 201, "{}", made.text);
    let token = made.json["status"]["token"].as_str().expect("a token");
    let review = cluster
        .post(
            "/apis/authentication.k8s.io/v1/tokenreviews",
            json!({"spec": {"token": token}}),
        )
        .await;
    assert_eq!(
        (
            &review.json["status"]["authenticated"],
            &review.json["status"]["user"]["username"]
        ),
        (&json!(true), &json!("system:serviceaccount:default:default")),
        "{}",
        review.text
    );
    let short = cluster
        .post(uri, json!({"spec": {"expirationSeconds": 10}}))
        .await;
    assert_eq!(short.code, 422);
    assert!(
        short.json["message"]
            .as_str()
            .expect("a message")
            .contains("may not specify a duration less than 10 minutes")
    );
    let missing = cluster
        .post(
            "/api/v1/namespaces/default/serviceaccounts/none/token",
            json!({"spec": {}}),
        )
        .await;
    assert_eq!(missing.code, 404, "{}", missing.text);
}

#[tokio::test]
async fn events_are_one_in_two_groups() {
    let cluster = Cluster::start().await;
    let event = json!({"metadata": {"name": "e"}, "involvedObject": {"kind": "Pod", "namespace": "default", "name": "p"}, "reason": "Started", "message": "m", "type": "Normal", "source": {"component": "kubelet"}});
    let made = cluster.post("/api/v1/namespaces/default/events", event).await;
    assert_eq!(made.code, 201, "{}", made.text);
    let other = cluster
        .get("/apis/events.k8s.io/v1/namespaces/default/events/e")
        .await
        .json;
    assert_eq!(
        (
            other["apiVersion"].as_str(),
            other["note"].as_str(),
            other["regarding"]["name"].as_str()
        ),
        (Some("events.k8s.io/v1"), Some("m"), Some("p"))
    );
    let listed = cluster.get("/api/v1/namespaces/default/events?fieldSelector=involvedObject.name%3Dp%2CinvolvedObject.kind%3DPod").await.json;
    assert_eq!(listed["items"].as_array().map(Vec::len), Some(1));
    let listed = cluster
        .get("/apis/events.k8s.io/v1/namespaces/default/events?fieldSelector=regarding.name%3Dq")
        .await
        .json;
    assert_eq!(listed["items"], json!([]));
}
