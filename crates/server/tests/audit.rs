//! The audit log: what is recorded of a request, and that a log which cannot be written stops nobody.

mod support;

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use serde_json::{Value, json};
use skiff_auth::UserInfo;
use skiff_server::{AuditConfig, AuditMode, AuditPolicy, AuditWebhookOptions};
use support::peer::{Answers, Peer, kubeconfig};
use support::{Audited, Cluster, audit_config};

const RULES: &str = "
- {level: None, users: [quiet]}
- {level: RequestResponse, omitManagedFields: true, resources: [{group: '', resources: [configmaps]}]}
- {level: Request, omitStages: [RequestReceived], resources: [{group: '', resources: [namespaces, pods]}]}
- {level: Request, resources: [{group: apps}]}
- {level: Metadata}
";

#[tokio::test]
async fn a_write_is_recorded_twice_and_with_its_objects() {
    let audited = Audited::start(RULES).await;
    let made = audited
        .cluster
        .post(
            "/api/v1/namespaces/default/configmaps?dryRun=All",
            json!({"metadata": {"name": "c"}, "data": {"a": "b"}}),
        )
        .await;
    assert_eq!(made.code, 201, "{}", made.text);
    let events = audited.events();
    let stages: Vec<&Value> = events.iter().map(|event| &event["stage"]).collect();
    assert_eq!(stages, ["RequestReceived", "ResponseComplete"]);
    let (first, last) = (&events[0], &events[1]);
    assert_eq!(first["auditID"], made.headers["audit-id"].to_str().expect("text"));
    assert_eq!(
        first["objectRef"],
        json!({"resource": "configmaps", "namespace": "default", "apiVersion": "v1"})
    );
    assert!(first.get("requestObject").is_none());
    assert_eq!(last["kind"], "Event");
    assert_eq!(last["level"], "RequestResponse");
    assert_eq!(last["verb"], "create");
    assert_eq!(
        last["requestURI"],
        "/api/v1/namespaces/default/configmaps?dryRun=All"
    );
    assert_eq!(last["user"]["username"], "admin");
    assert_eq!(last["objectRef"]["name"], "c");
    assert_eq!(last["responseStatus"], json!({"metadata": {}, "code": 201}));
    assert_eq!(last["requestObject"]["data"], json!({"a": "b"}));
    assert_eq!(
        last["responseObject"]["metadata"]["uid"],
        made.json["metadata"]["uid"]
    );
    assert!(last["responseObject"]["metadata"].get("managedFields").is_none());
    assert_eq!(
        last["annotations"],
        json!({"authorization.k8s.io/decision": "allow", "authorization.k8s.io/reason": ""})
    );
}

/// The loops of the server are clients like any other.
#[tokio::test]
async fn what_the_server_writes_for_itself_is_recorded() {
    let audited = Audited::start(RULES).await;
    let found = tokio::time::timeout(Duration::from_secs(20), async {
        loop {
            let written = audited.all_events().into_iter().find(|event| {
                event["user"]["username"] == "system:apiserver"
                    && event["objectRef"]["resource"] == "leases"
                    && event["verb"] == "create"
                    && event["stage"] == "ResponseComplete"
            });
            match written {
                Some(event) => return event,
                None => tokio::time::sleep(Duration::from_millis(20)).await,
            }
        }
    });
    let event = found.await.expect("the lease of the server is written");
    assert_eq!(event["responseStatus"]["code"], 201);
    assert_eq!(event["userAgent"], "kube-apiserver");
}

#[tokio::test]
async fn refusals_say_why_and_who_was_impersonated() {
    let audited = Audited::start(RULES).await;
    let cluster = &audited.cluster;
    let headers = [("impersonate-user", "joe")];
    let refused = cluster
        .send_as(cluster.admin(), "GET", "/api/v1/secrets", &headers, "")
        .await;
    assert_eq!(refused.code, 403);
    let events = audited.events();
    let last = events.last().expect("an event");
    assert_eq!(last["level"], "Metadata");
    assert_eq!(last["impersonatedUser"]["username"], "joe");
    assert_eq!(last["user"]["username"], "admin");
    assert_eq!(last["responseStatus"]["code"], 403);
    assert_eq!(last["responseStatus"]["status"], "Failure");
    assert_eq!(last["responseStatus"]["message"], refused.json["message"]);
    assert_eq!(last["annotations"]["authorization.k8s.io/decision"], "forbid");
    let known = events.len();
    let quiet = cluster.server.service(UserInfo::new("quiet", ["system:masters"]));
    cluster.send_as(quiet, "GET", "/api/v1/secrets", &[], "").await;
    assert_eq!(audited.events().len(), known);
}

#[tokio::test]
async fn plugins_annotate_and_stages_are_left_out() {
    let audited = Audited::start(RULES).await;
    let cluster = &audited.cluster;
    let labels = json!({"pod-security.kubernetes.io/audit": "baseline"});
    cluster
        .post(
            "/api/v1/namespaces",
            json!({"metadata": {"name": "ns", "labels": labels}}),
        )
        .await;
    cluster
        .post(
            "/api/v1/namespaces/ns/serviceaccounts",
            json!({"metadata": {"name": "default"}}),
        )
        .await;
    let pod = json!({"metadata": {"name": "p"}, "spec": {"hostPID": true, "containers": [{"name": "a", "image": "i"}]}});
    let made = cluster.post("/api/v1/namespaces/ns/pods", pod).await;
    assert_eq!(made.code, 201, "{}", made.text);
    let events = audited.events();
    let of_pods: Vec<&Value> = events
        .iter()
        .filter(|event| event["objectRef"]["resource"] == "pods")
        .collect();
    assert_eq!(of_pods.len(), 1, "{of_pods:?}");
    assert_eq!(of_pods[0]["level"], "Request");
    assert!(of_pods[0].get("responseObject").is_none());
    let annotations = &of_pods[0]["annotations"];
    assert_eq!(
        annotations["pod-security.kubernetes.io/enforce-policy"],
        "privileged:latest"
    );
    assert_eq!(
        annotations["pod-security.kubernetes.io/audit-violations"],
        "would violate PodSecurity \"baseline:latest\": host namespaces (hostPID=true)"
    );
}

#[tokio::test]
async fn a_watch_is_recorded_when_it_starts_and_when_it_ends() {
    let audited = Audited::start(RULES).await;
    let stages = || -> Vec<String> {
        let events = audited.events();
        let watches = events.iter().filter(|event| event["verb"] == "watch");
        watches
            .map(|event| event["stage"].as_str().unwrap_or("").to_owned())
            .collect()
    };
    let frames = audited
        .cluster
        .watch("/api/v1/namespaces/default/configmaps?watch=true")
        .await;
    assert_eq!(stages(), ["RequestReceived", "ResponseStarted"]);
    drop(frames);
    while stages().len() < 3 {
        tokio::task::yield_now().await;
    }
    assert_eq!(stages()[2], "ResponseComplete");
}

#[tokio::test]
async fn a_full_disk_stops_requests_only_if_that_is_wanted() {
    for (mode, code) in [(AuditMode::Blocking, 200), (AuditMode::BlockingStrict, 500)] {
        // Writing to this device fails as on a full disk.
        let cluster = Cluster::audited(audit_config(Path::new("/dev/full"), RULES, mode)).await;
        let reply = cluster.get("/api/v1/namespaces/default/configmaps").await;
        assert_eq!(reply.code, code, "{}", reply.text);
    }
}

#[tokio::test]
async fn what_was_asked_is_recorded_also_where_it_is_no_object_of_the_kind() {
    let audited = Audited::start(RULES).await;
    let cluster = &audited.cluster;
    let deployments = "/apis/apps/v1/namespaces/default/deployments";
    let template =
        json!({"metadata": {"labels": {"a": "b"}}, "spec": {"containers": [{"name": "c", "image": "i"}]}});
    let made = cluster
        .post(
            deployments,
            json!({"metadata": {"name": "d"}, "spec": {"selector": {"matchLabels": {"a": "b"}}, "template": template}}),
        )
        .await;
    assert_eq!(made.code, 201, "{}", made.text);
    let scale = format!("{deployments}/d/scale");
    let body = json!({"kind": "Scale", "apiVersion": "autoscaling/v1", "metadata": {"name": "d", "namespace": "default"}, "spec": {"replicas": 2}});
    let scaled = cluster.put(&scale, body.clone()).await;
    assert_eq!(scaled.code, 200, "{}", scaled.text);
    // As upstream's types write it.
    let mut expected = body;
    expected["status"] = json!({"replicas": 0});
    assert_eq!(audited.event_of(&scaled)["requestObject"], expected);
    let patch = json!({"spec": {"replicas": 3}});
    let scaled = cluster.patch(&scale, "merge-patch", patch.clone()).await;
    assert_eq!(audited.event_of(&scaled)["requestObject"], patch);
    let apply = json!({"kind": "Scale", "apiVersion": "autoscaling/v1", "metadata": {"name": "d"}, "spec": {"replicas": 3}});
    let uri = format!("{scale}?fieldManager=x&force=true");
    let scaled = cluster
        .send("PATCH", &uri, "application/apply-patch+yaml", apply.to_string())
        .await;
    assert_eq!(scaled.code, 200, "{}", scaled.text);
    assert_eq!(audited.event_of(&scaled)["requestObject"], apply);

    let options = json!({"kind": "DeleteOptions", "apiVersion": "apps/v1", "gracePeriodSeconds": 0});
    let gone = cluster.delete(&format!("{deployments}/d"), options).await;
    assert_eq!(gone.code, 200, "{}", gone.text);
    let event = audited.event_of(&gone);
    assert_eq!(
        event["requestObject"],
        json!({"kind": "DeleteOptions", "apiVersion": "meta.k8s.io/__internal", "gracePeriodSeconds": 0})
    );
    assert_eq!(event["responseStatus"]["details"]["name"], "d");
}

#[tokio::test]
async fn a_token_is_recorded_by_its_id_and_an_impersonation_by_its_verb() {
    let audited = Audited::start(RULES).await;
    let cluster = &audited.cluster;
    cluster
        .post(
            "/api/v1/namespaces/default/serviceaccounts",
            json!({"metadata": {"name": "robot"}}),
        )
        .await;
    let token = "/api/v1/namespaces/default/serviceaccounts/robot/token";
    let issued = cluster.post(token, json!({"spec": {}})).await;
    assert_eq!(issued.code, 201, "{}", issued.text);
    let event = audited.event_of(&issued);
    let id = event["annotations"]["authentication.kubernetes.io/issued-credential-id"].as_str();
    assert!(
        id.is_some_and(|id| id.len() == 40 && id.starts_with("JTI=")),
        "{event}"
    );

    let roles = "/apis/rbac.authorization.k8s.io/v1/clusterroles";
    let rules = json!([
        {"apiGroups": ["authentication.k8s.io"], "resources": ["users"], "verbs": ["impersonate:user-info"]},
        {"apiGroups": [""], "resources": ["secrets"], "verbs": ["impersonate-on:user-info:list", "list"]}]);
    cluster
        .post(roles, json!({"metadata": {"name": "r"}, "rules": rules}))
        .await;
    let subject = |name: &str| json!({"kind": "User", "name": name, "apiGroup": "rbac.authorization.k8s.io"});
    cluster
        .post(
            "/apis/rbac.authorization.k8s.io/v1/clusterrolebindings",
            json!({"metadata": {"name": "r"}, "roleRef": {"kind": "ClusterRole", "name": "r", "apiGroup": "rbac.authorization.k8s.io"},
                "subjects": [subject("real"), subject("joe")]}),
        )
        .await;
    // The binding takes effect a moment after it was made.
    let began = std::time::Instant::now();
    let listed = loop {
        let real = cluster.server.service(UserInfo::new("real", ["g"]));
        let headers = [("impersonate-user", "joe")];
        let listed = cluster
            .send_as(real, "GET", "/api/v1/secrets", &headers, "")
            .await;
        if listed.code == 200 {
            break listed;
        }
        assert!(
            began.elapsed() < std::time::Duration::from_secs(60),
            "{}",
            listed.text
        );
        tokio::task::yield_now().await;
    };
    let event = audited.event_of(&listed);
    assert_eq!(event["user"]["username"], "real");
    assert_eq!(event["impersonatedUser"]["username"], "joe");
    assert_eq!(
        event["authenticationMetadata"],
        json!({"impersonationConstraint": "impersonate:user-info"})
    );
}

#[tokio::test]
async fn what_mode_batch_holds_is_there_after_the_end() {
    let audited = Audited::in_mode(RULES, AuditMode::Batch).await;
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0")
        .await
        .expect("a port");
    let last = audited.cluster.get("/api/v1/namespaces/default/configmaps").await;
    audited.cluster.shutdown.cancel();
    let shutdown = audited.cluster.shutdown.clone();
    audited.cluster.server.serve(listener, shutdown).await;
    assert_eq!(audited.event_of(&last)["stage"], "ResponseComplete");
}

#[tokio::test]
async fn who_is_not_recognised_and_what_is_not_there_is_recorded_with_the_answer() {
    let audited = Audited::start("- {level: RequestResponse}").await;
    let cluster = &audited.cluster;
    let log = cluster.get("/api/v1/namespaces/default/pods/none/log").await;
    assert_eq!(log.code, 404);
    let event = audited.event_of(&log);
    assert_eq!(event["responseObject"], log.json);
    assert_eq!(event["responseStatus"]["code"], 404);

    let pod = json!({"metadata": {"name": "p"}, "spec": {"containers": [{"name": "c", "image": "i"}]}});
    let made = cluster
        .post("/api/v1/namespaces/default/pods?dryRun=All", pod)
        .await;
    let asked = &audited.event_of(&made)["requestObject"];
    assert_eq!(asked["spec"]["containers"][0]["resources"], json!({}), "{asked}");
    assert_eq!(asked["status"], json!({}));
}

/// A plugin with a fault.
struct Faulty;

#[async_trait::async_trait]
impl skiff_admission::Plugin for Faulty {
    fn name(&self) -> &'static str {
        "Faulty"
    }

    fn handles(&self, _: skiff_admission::Operation) -> bool {
        true
    }

    async fn admit(
        &self,
        attributes: &mut skiff_admission::Attributes<'_>,
        _: &dyn skiff_admission::Lister,
    ) -> Result<(), skiff_meta::Status> {
        assert_ne!(attributes.resource, "configmaps", "a fault");
        Ok(())
    }
}

#[tokio::test]
async fn a_panic_is_recorded_as_the_end() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("audit.log");
    let config = audit_config(&path, RULES, AuditMode::BlockingStrict);
    let chain = skiff_admission::Chain::new(vec![Box::new(Faulty)]);
    let cluster = Cluster::audited_with(config, chain).await;
    let body = json!({"metadata": {"name": "c"}});
    let made = cluster.post("/api/v1/namespaces/default/configmaps", body).await;
    assert_eq!(made.code, 500, "{}", made.text);
    let log = std::fs::read_to_string(&path).expect("a log");
    let id = made.headers["audit-id"].to_str().expect("text");
    let events = log
        .lines()
        .map(|line| serde_json::from_str::<Value>(line).expect("JSON"));
    let last = { events }
        .rfind(|event| event["auditID"] == id)
        .expect("an event");
    assert_eq!(last["stage"], "Panic");
    assert_eq!(last["responseStatus"]["code"], 500);
    let message = last["responseStatus"]["message"].as_str().unwrap_or("");
    assert!(message.starts_with("APIServer panic'd: "), "{message}");
}

/// A cluster whose requests are told to a peer, in a mode.
async fn told(mode: AuditMode, max_size: usize, answers: Answers) -> (Cluster, Peer) {
    let (listener, port) = Peer::reserve();
    let cluster = Cluster::adjusted(|config, folder, pki| {
        let file = kubeconfig(folder, "collector", &format!("https://localhost:{port}/audit"), pki);
        let policy = "apiVersion: audit.k8s.io/v1\nkind: Policy\nrules: [{level: Metadata, users: [admin], omitStages: [RequestReceived]}]";
        config.audit = Some(AuditConfig {
            policy: AuditPolicy::parse(policy).expect("a policy"),
            log: None,
            webhook: Some(AuditWebhookOptions {
                file,
                mode,
                initial_backoff: Duration::from_millis(1),
                buffer_size: 4,
                max_size,
                max_wait: Duration::from_secs(600),
                throttle: None,
            }),
        });
    })
    .await;
    let peer = Peer::start(listener, &cluster.pki, answers);
    (cluster, peer)
}

#[tokio::test]
async fn events_are_told_to_a_server() {
    let good: Answers = Arc::new(|_, _| Some((200, "{}".to_owned())));
    let (cluster, peer) = told(AuditMode::BlockingStrict, 1, good.clone()).await;
    let reply = cluster.get("/version").await;
    let (path, list) = peer.seen().remove(0);
    assert_eq!(path, "/audit?timeout=30s");
    assert_eq!(
        (&list["kind"], &list["apiVersion"]),
        (&json!("EventList"), &json!("audit.k8s.io/v1"))
    );
    let id = reply.headers["audit-id"].to_str().expect("text");
    assert_eq!(
        (&list["items"][0]["auditID"], &list["items"][0]["requestURI"]),
        (&json!(id), &json!("/version"))
    );
    // Gathered: the third request fills the list.
    let (cluster, peer) = told(AuditMode::Batch, 3, good).await;
    for _ in 0..3 {
        assert!(peer.seen().is_empty());
        cluster.get("/version").await;
    }
    while peer.seen().is_empty() {
        tokio::task::yield_now().await;
    }
    assert_eq!(peer.seen()[0].1["items"].as_array().map(Vec::len), Some(3));
}

#[tokio::test]
async fn a_server_that_takes_no_events_costs_events_only() {
    let bad: Answers = Arc::new(|_, _| Some((400, "{}".to_owned())));
    let (cluster, peer) = told(AuditMode::Blocking, 1, bad.clone()).await;
    assert_eq!(cluster.get("/version").await.code, 200);
    assert_eq!(peer.seen().len(), 5, "it is tried again");
    // Nothing is ever answered: requests go on, and what does not fit is lost.
    let (cluster, _peer) = told(AuditMode::Batch, 1, Arc::new(|_, _| None)).await;
    for _ in 0..100 {
        assert_eq!(cluster.get("/version").await.code, 200);
    }
    let metrics = cluster.get("/metrics").await.text;
    let lost = metrics
        .lines()
        .find(|line| line.starts_with("apiserver_audit_error_total"));
    assert!(lost.is_some_and(|line| !line.ends_with(" 0")), "{lost:?}");
}
