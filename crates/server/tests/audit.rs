//! The audit log: what is recorded of a request, and that a log which cannot be written stops nobody.

mod support;

use std::path::{Path, PathBuf};

use serde_json::{Value, json};
use skiff_auth::UserInfo;
use skiff_server::{AuditConfig, AuditMode, AuditPolicy, LogOptions};
use support::Cluster;

const POLICY: &str = "
apiVersion: audit.k8s.io/v1
kind: Policy
rules:
- {level: None, users: [quiet]}
- {level: RequestResponse, omitManagedFields: true, resources: [{group: '', resources: [configmaps]}]}
- {level: Request, omitStages: [RequestReceived], resources: [{group: '', resources: [namespaces, pods]}]}
- {level: Metadata}
";

fn config(path: &Path, mode: AuditMode) -> AuditConfig {
    AuditConfig {
        policy: AuditPolicy::parse(POLICY).expect("a policy"),
        log: LogOptions {
            path: path.to_owned(),
            max_size_megabytes: 0,
            max_backups: 0,
            max_age_days: 0,
            compress: false,
            mode,
        },
    }
}

struct Audited {
    cluster: Cluster,
    path: PathBuf,
    _folder: tempfile::TempDir,
}

impl Audited {
    async fn start() -> Audited {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("audit.log");
        let cluster = Cluster::audited(config(&path, AuditMode::Blocking)).await;
        Audited {
            cluster,
            path,
            _folder: folder,
        }
    }

    /// The events of what users do.
    fn events(&self) -> Vec<Value> {
        let text = std::fs::read_to_string(&self.path).expect("a log");
        text.lines()
            .map(|line| serde_json::from_str(line).expect("JSON"))
            .collect()
    }
}

#[tokio::test]
async fn a_write_is_recorded_twice_and_with_its_objects() {
    let audited = Audited::start().await;
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

#[tokio::test]
async fn refusals_say_why_and_who_was_impersonated() {
    let audited = Audited::start().await;
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
    let audited = Audited::start().await;
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
    let audited = Audited::start().await;
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
        let cluster = Cluster::audited(config(Path::new("/dev/full"), mode)).await;
        let reply = cluster.get("/api/v1/namespaces/default/configmaps").await;
        assert_eq!(reply.code, code, "{}", reply.text);
    }
}
