//! Jobs and CronJobs over the real server. The tests play the kubelet: they end pods.

use std::collections::HashMap;
use std::time::Duration;

use k8s_openapi::api::batch::v1::{CronJob, Job, JobStatus};
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::jiff::Timestamp;
use kube::ResourceExt;
use kube::api::{DeleteParams, Patch, PatchParams};
use serde_json::{Value, json};

use crate::cluster::{Cluster, check};

const TRACKING: &str = "batch.kubernetes.io/job-tracking";
const INDEX: &str = "batch.kubernetes.io/job-completion-index";

fn job(name: &str, spec: Value) -> Value {
    let template = json!({"spec": {"restartPolicy": "Never", "containers": [{"name": "c", "image": "i"}]}});
    let mut whole = json!({"template": template});
    whole
        .as_object_mut()
        .unwrap()
        .extend(spec.as_object().unwrap().clone());
    json!({"metadata": {"name": name}, "spec": whole})
}

/// The status of a pod whose container has exited. It ended long ago, so that nobody waits because of it.
fn exited(code: i32) -> Value {
    let phase = if code == 0 { "Succeeded" } else { "Failed" };
    let ended =
        json!({"exitCode": code, "startedAt": "2026-01-01T00:00:00Z", "finishedAt": "2026-01-01T00:00:00Z"});
    json!({"phase": phase, "containerStatuses": [{"name": "c", "image": "i", "imageID": "", "ready": false,
        "restartCount": 0, "started": false, "state": {"terminated": ended}}]})
}

fn phase(pod: &Pod) -> &str {
    pod.status
        .as_ref()
        .and_then(|status| status.phase.as_deref())
        .unwrap_or_default()
}

fn unfinished(pod: &Pod) -> bool {
    !matches!(phase(pod), "Succeeded" | "Failed") && pod.metadata.deletion_timestamp.is_none()
}

/// Succeeded, failed and active pods.
fn counts(status: &JobStatus) -> (i32, i32, i32) {
    let [succeeded, failed, active] =
        [status.succeeded, status.failed, status.active].map(Option::unwrap_or_default);
    (succeeded, failed, active)
}

fn conditions(status: &JobStatus) -> Vec<(String, String)> {
    let all = status
        .conditions
        .iter()
        .flatten()
        .filter(|condition| condition.status == "True");
    all.map(|condition| {
        (
            condition.type_.clone(),
            condition.reason.clone().unwrap_or_default(),
        )
    })
    .collect()
}

impl Cluster {
    async fn job_status(&self, name: &str) -> JobStatus {
        let job = self.api::<Job>().get(name).await.unwrap();
        job.status.unwrap_or_default()
    }

    /// Ends each pod that runs with the code that `code` gives it.
    async fn end_pods(&self, mut code: impl FnMut(&Pod) -> i32) {
        for pod in self.list::<Pod>().await.into_iter().filter(unfinished) {
            let code = code(&pod);
            self.set_pod_status(&pod.name_any(), exited(code)).await;
        }
    }

    async fn until_finished(&self, name: &str, expected: &[(&str, &str)]) -> JobStatus {
        self.until_idle(name, async || {
            let status = self.job_status(name).await;
            let seen = conditions(&status);
            let seen: Vec<(&str, &str)> = seen
                .iter()
                .map(|(type_, reason)| (type_.as_str(), reason.as_str()))
                .collect();
            check(seen == expected, &status)
        })
        .await;
        self.job_status(name).await
    }
}

const COMPLETED: &[(&str, &str)] = &[
    ("SuccessCriteriaMet", "CompletionsReached"),
    ("Complete", "CompletionsReached"),
];

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_indexed_job_completes() {
    let cluster = Cluster::start().await;
    let spec = json!({"completionMode": "Indexed", "completions": 5, "parallelism": 2});
    cluster.create::<Job>(job("work", spec)).await;
    let seen = std::sync::Mutex::new(HashMap::<String, String>::new());
    cluster
        .until_idle("complete", async || {
            let pods = cluster.list::<Pod>().await;
            let running = pods.iter().filter(|pod| unfinished(pod)).count();
            assert!(running <= 2, "{running} pods");
            for pod in &pods {
                let index = pod.annotations()[INDEX].clone();
                assert_eq!(pod.labels()[INDEX], index);
                let hostname = pod.spec.as_ref().and_then(|spec| spec.hostname.clone());
                assert_eq!(hostname, Some(format!("work-{index}")));
                assert!(pod.name_any().starts_with(&format!("work-{index}-")));
                seen.lock().unwrap().insert(pod.name_any(), index);
            }
            cluster.end_pods(|_| 0).await;
            let status = cluster.job_status("work").await;
            check(conditions(&status).len() == 2, &status)
        })
        .await;
    let status = cluster.until_finished("work", COMPLETED).await;
    assert_eq!(status.completed_indexes.as_deref(), Some("0-4"));
    assert_eq!(counts(&status), (5, 0, 0));
    assert!(status.completion_time >= status.start_time);
    assert_eq!(seen.lock().unwrap().len(), 5, "one pod for each index");
    let left = cluster.list::<Pod>().await;
    assert!(left.iter().all(|pod| pod.finalizers().is_empty()), "{left:?}");
    cluster.until_event("Completed", "Job completed").await;
    for line in [
        r#"job_controller_jobs_finished_total{completion_mode="Indexed",reason="CompletionsReached",result="succeeded"} 1"#,
        r#"job_controller_job_pods_finished_total{completion_mode="Indexed",result="succeeded"} 5"#,
    ] {
        cluster.until_measured(line).await;
    }
    let text = cluster.metrics.registry.text();
    let created =
        r#"job_controller_job_syncs_total{action="pods_created",completion_mode="Indexed",result="success"}"#;
    assert!(text.contains(created), "{text}");
    cluster
        .until_event("SuccessfulCreate", "Created pod: work-4-")
        .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_pod_failure_policy_decides() {
    let cluster = Cluster::start().await;
    let rules = json!([
        {"action": "FailJob", "onExitCodes": {"operator": "In", "values": [42], "containerName": "c"}},
        {"action": "Ignore", "onExitCodes": {"operator": "In", "values": [7]}}]);
    let spec =
        json!({"completions": 4, "parallelism": 2, "backoffLimit": 0, "podFailurePolicy": {"rules": rules}});
    cluster.create::<Job>(job("fragile", spec)).await;
    let two_run = async || {
        let pods = cluster.list::<Pod>().await;
        check(pods.iter().filter(|pod| unfinished(pod)).count() == 2, pods.len())
    };
    cluster.until("two run", two_run).await;
    // Ignored: the back-off limit of none is not exceeded, and they are replaced.
    cluster.end_pods(|_| 7).await;
    cluster.until("replaced", two_run).await;
    assert_eq!(counts(&cluster.job_status("fragile").await).1, 0);
    let victim = cluster
        .list::<Pod>()
        .await
        .into_iter()
        .find(unfinished)
        .unwrap()
        .name_any();
    cluster.set_pod_status(&victim, exited(42)).await;
    let failed = [
        ("FailureTarget", "PodFailurePolicy"),
        ("Failed", "PodFailurePolicy"),
    ];
    cluster
        .until("failed", async || {
            let status = cluster.job_status("fragile").await;
            check(conditions(&status).len() == 2, &status)
        })
        .await;
    let status = cluster.until_finished("fragile", &failed).await;
    assert_eq!(counts(&status), (0, 2, 0));
    let message = format!(
        "Container c for pod default/{victim} failed with exit code 42 matching FailJob rule at index 0"
    );
    cluster.until_event("PodFailurePolicy", &message).await;
    for line in [
        r#"job_controller_pod_failures_handled_by_failure_policy_total{action="Ignore"} 2"#,
        r#"job_controller_pod_failures_handled_by_failure_policy_total{action="FailJob"} 1"#,
        r#"job_controller_job_pods_finished_total{completion_mode="NonIndexed",result="failed"} 2"#,
        r#"job_controller_jobs_finished_total{completion_mode="NonIndexed",reason="PodFailurePolicy",result="failed"} 1"#,
    ] {
        cluster.until_measured(line).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_job_is_suspended_and_resumed() {
    let cluster = Cluster::start().await;
    cluster
        .create::<Job>(job("pause", json!({"completions": 3, "parallelism": 3})))
        .await;
    let state = async |active: i32, suspended: bool| {
        let status = cluster.job_status("pause").await;
        let seen = conditions(&status).iter().any(|(type_, _)| type_ == "Suspended");
        let good = status.active.unwrap_or(0) == active
            && seen == suspended
            && status.start_time.is_some() != suspended;
        check(good, &status)
    };
    cluster.until("runs", async || state(3, false).await).await;
    cluster
        .until("ready", async || {
            let status = cluster.job_status("pause").await;
            check(status.ready == Some(3), &status)
        })
        .await;
    cluster
        .patch::<Job>("pause", json!({"spec": {"suspend": true}}))
        .await;
    cluster.until("suspended", async || state(0, true).await).await;
    cluster
        .until("pods gone", async || {
            check(cluster.list::<Pod>().await.is_empty(), ())
        })
        .await;
    cluster.until_event("Suspended", "Job suspended").await;
    cluster
        .patch::<Job>("pause", json!({"spec": {"suspend": false}}))
        .await;
    cluster.until("resumed", async || state(3, false).await).await;
    cluster.until_event("Resumed", "Job resumed").await;
    cluster.end_pods(|_| 0).await;
    let status = cluster.until_finished("pause", COMPLETED).await;
    // The pods of before the suspension do not count.
    assert_eq!(counts(&status), (3, 0, 0));
}

/// Controllers that are killed wherever they are: what the status says is what the pods say.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn restarts_count_no_pod_twice() {
    let cluster = Cluster::without_controllers().await;
    cluster.add_node("n").await;
    // Pods are refused until their namespace has its service account.
    let account = json!({"metadata": {"name": "default"}});
    cluster
        .create::<k8s_openapi::api::core::v1::ServiceAccount>(account)
        .await;
    let spec = json!({"completions": 100, "parallelism": 10, "backoffLimit": 1000});
    cluster.create::<Job>(job("counted", spec)).await;
    // About every fourth pod fails.
    let code = |pod: &Pod| i32::from(pod.uid().unwrap().as_str() < "4");
    let state = async || {
        cluster.end_pods(code).await;
        let status = cluster.job_status("counted").await;
        check(conditions(&status).len() == 2, &status)
    };
    let mut killed = 0;
    while state().await.is_err() && killed < 12 {
        let mut manager = cluster.start_manager("test");
        let end = tokio::time::Instant::now() + Duration::from_millis(100 + 37 * killed);
        while tokio::time::Instant::now() < end {
            let _ = state().await;
        }
        manager.kill().await;
        killed += 1;
    }
    cluster.run_controllers(|_| {});
    cluster.until_idle("complete", state).await;
    let status = cluster.until_finished("counted", COMPLETED).await;
    let pods = cluster.list::<Pod>().await;
    let ended = |wanted: &str| pods.iter().filter(|pod| phase(pod) == wanted).count() as i32;
    assert_eq!(
        counts(&status),
        (ended("Succeeded"), ended("Failed"), 0),
        "{killed} restarts"
    );
    assert!(ended("Succeeded") >= 100 && ended("Failed") > 0, "{status:?}");
    assert!(pods.iter().all(|pod| pod.finalizers().is_empty()));
}

/// The finalizers of pods whose Job is gone do not keep them alive.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_deleted_job_leaves_nothing_behind() {
    let cluster = Cluster::start().await;
    cluster
        .create::<Job>(job("short", json!({"completions": 3, "parallelism": 3})))
        .await;
    cluster
        .until("runs", async || {
            let status = cluster.job_status("short").await;
            check(status.ready == Some(3), &status)
        })
        .await;
    cluster
        .api::<Job>()
        .delete("short", &DeleteParams::background())
        .await
        .unwrap();
    cluster
        .until("gone", async || {
            let pods = cluster.list::<Pod>().await;
            check(pods.is_empty(), &pods)
        })
        .await;
    // Orphaned pods live on, without the finalizer.
    cluster
        .create::<Job>(job("orphaned", json!({"completions": 2, "parallelism": 2})))
        .await;
    cluster
        .until("runs", async || {
            let status = cluster.job_status("orphaned").await;
            check(status.ready == Some(2), &status)
        })
        .await;
    cluster
        .api::<Job>()
        .delete("orphaned", &DeleteParams::orphan())
        .await
        .unwrap();
    cluster
        .until("orphans", async || {
            let pods = cluster.list::<Pod>().await;
            let free = pods.iter().all(|pod| {
                pod.owner_references().is_empty() && !pod.finalizers().contains(&TRACKING.to_owned())
            });
            check(pods.len() == 2 && free, &pods)
        })
        .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_job_is_deleted_after_its_ttl() {
    let cluster = Cluster::start().await;
    cluster
        .create::<Job>(job("brief", json!({"ttlSecondsAfterFinished": 1})))
        .await;
    cluster.create::<Job>(job("kept", json!({}))).await;
    cluster
        .until_idle("both are over", async || {
            cluster.end_pods(|_| 0).await;
            let kept = conditions(&cluster.job_status("kept").await);
            let brief = cluster.api::<Job>().get_opt("brief").await.unwrap();
            check(kept.len() == 2 && brief.is_none(), (kept, brief))
        })
        .await;
    let pods = cluster.list::<Pod>().await;
    assert!(
        pods.iter().all(|pod| pod.name_any().starts_with("kept-")),
        "{pods:?}"
    );
    cluster
        .until_measured("ttl_after_finished_controller_job_deletion_duration_seconds_count 1")
        .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_cron_job_starts_a_job() {
    let cluster = Cluster::start().await;
    let template = json!({"metadata": {"labels": {"from": "cron"}}, "spec": job("x", json!({}))["spec"]});
    let cron = json!({"metadata": {"name": "tick"}, "spec": {"schedule": "* * * * *", "concurrencyPolicy": "Forbid",
        "jobTemplate": template}});
    cluster.create::<CronJob>(cron).await;
    // As if it had last run a while ago: the start of this minute is due.
    let past = Timestamp::from_second(Timestamp::now().as_second() - 600)
        .unwrap()
        .to_string();
    let patch = Patch::Merge(json!({"status": {"lastScheduleTime": past}}));
    cluster
        .api::<CronJob>()
        .patch_status("tick", &PatchParams::default(), &patch)
        .await
        .unwrap();
    let active = async || {
        let status = cluster
            .api::<CronJob>()
            .get("tick")
            .await
            .unwrap()
            .status
            .unwrap_or_default();
        (status.active.clone().unwrap_or_default(), status)
    };
    cluster
        .until_idle("started", async || {
            let (active, status) = active().await;
            check(active.len() == 1, &status)
        })
        .await;
    let (started, status) = active().await;
    let scheduled = status.last_schedule_time.unwrap().0;
    let name = format!("tick-{}", scheduled.as_second() / 60);
    assert_eq!(started[0].name.as_deref(), Some(name.as_str()));
    let made = cluster.api::<Job>().get(&name).await.unwrap();
    assert_eq!(made.labels()["from"], "cron");
    assert_eq!(
        made.annotations()["batch.kubernetes.io/cronjob-scheduled-timestamp"],
        scheduled.to_string()
    );
    assert_eq!(made.owner_references()[0].name, "tick");
    // The minute may have ended meanwhile.
    let text = cluster.metrics.registry.text();
    let skew = "cronjob_controller_job_creation_skew_duration_seconds_count ";
    let count = text.lines().find_map(|line| line.strip_prefix(skew));
    assert!(count.is_some_and(|count| count != "0"), "{text}");
    cluster
        .until_event("SuccessfulCreate", &format!("Created job {name}"))
        .await;
    cluster
        .until_idle("noted", async || {
            cluster.end_pods(|_| 0).await;
            let (active, status) = active().await;
            let noted = active
                .iter()
                .all(|job| job.name.as_deref() != Some(name.as_str()));
            check(noted && status.last_successful_time.is_some(), &status)
        })
        .await;
    cluster
        .until_event(
            "SawCompletedJob",
            &format!("Saw completed job: {name}, condition: Complete"),
        )
        .await;
}
