//! `/metrics` of a whole cluster: what dashboards read of each component is there, and strangers cannot make the
//! process grow by it.

use anyhow::{Context, Result, ensure};
use skiff_testkit::whole_path::PATIENCE;
use skiff_testkit::{Cluster, Kubectl, eventually};

const SKIFF: &str = env!("CARGO_BIN_EXE_skiff");

/// What the recording rules, alerts and dashboards of kube-prometheus read, and always has a value here.
const READ_BY_DASHBOARDS: [(&str, &[&str]); 3] = [
    (
        "kube-apiserver",
        &[
            "apiserver_request_total",
            "apiserver_request_sli_duration_seconds_bucket",
            "apiserver_client_certificate_expiration_seconds_bucket",
            "kubernetes_build_info",
            "process_resident_memory_bytes",
            "process_cpu_seconds_total",
        ],
    ),
    (
        "kube-controller-manager",
        &[
            "workqueue_adds_total",
            "workqueue_depth",
            "workqueue_queue_duration_seconds_bucket",
            "rest_client_requests_total",
            "rest_client_request_duration_seconds_bucket",
            "leader_election_master_status",
            "job_controller_job_syncs_total",
            "job_controller_job_sync_duration_seconds_bucket",
            "endpoint_slice_controller_syncs",
            "garbagecollector_controller_resources_sync_error_total",
            "kubernetes_build_info",
            "process_resident_memory_bytes",
        ],
    ),
    (
        "kube-scheduler",
        &[
            "scheduler_scheduling_attempt_duration_seconds_bucket",
            "scheduler_scheduling_algorithm_duration_seconds_bucket",
            "scheduler_pending_pods",
            "scheduler_schedule_attempts_total",
            "rest_client_requests_total",
            "rest_client_request_duration_seconds_bucket",
            "kubernetes_build_info",
            "process_resident_memory_bytes",
        ],
    ),
];

fn metrics(kubectl: &Kubectl, component: &str) -> Result<String> {
    kubectl.run(&["get", "--raw", &format!("/metrics?component={component}")])
}

fn resident_bytes(pid: u32) -> Result<u64> {
    let statm = std::fs::read_to_string(format!("/proc/{pid}/statm"))?;
    let pages = statm.split_whitespace().nth(1).context("resident pages")?;
    Ok(pages.parse::<u64>()? * 4096)
}

#[test]
fn components_show_what_dashboards_read_and_strangers_cannot_grow_it() -> Result<()> {
    let cluster = Cluster::start(SKIFF, &["--components", "api,controllers,scheduler"])?;
    let kubectl = cluster.kubectl();
    kubectl.run(&["create", "deployment", "web", "--image=nope"])?;
    kubectl.run(&["create", "job", "work", "--image=nope"])?;
    kubectl.run(&["create", "service", "clusterip", "web", "--tcp=80"])?;
    eventually("there is a value of each family", PATIENCE, || {
        for (component, families) in READ_BY_DASHBOARDS {
            let text = metrics(&kubectl, component)?;
            for family in families {
                let shown = |line: &str| {
                    line.starts_with(&format!("{family}{{")) || line.starts_with(&format!("{family} "))
                };
                ensure!(text.lines().any(shown), "{component} lacks {family}:\n{text}");
            }
        }
        Ok(())
    })?;
    eventually("no node, so both pods wait", PATIENCE, || {
        let text = metrics(&kubectl, "kube-scheduler")?;
        let wait = "scheduler_pending_pods{queue=\"unschedulable\"} 2";
        ensure!(text.lines().any(|line| line == wait), "{text}");
        Ok(())
    })?;

    // Each of these would have been a label value in thirty lines.
    let before = (
        metrics(&kubectl, "kube-apiserver")?.len(),
        resident_bytes(cluster.pid()?)?,
    );
    for number in 0..30 {
        let path = format!("/api/v1/namespaces/default/{}{number}/x", "x".repeat(50_000));
        let (code, shown) = kubectl.try_run(&["--as=stranger", "get", "--raw", &path])?;
        ensure!(code != 0 && shown.contains("orbidden"), "{shown}");
    }
    let after = (
        metrics(&kubectl, "kube-apiserver")?.len(),
        resident_bytes(cluster.pid()?)?,
    );
    ensure!(
        after.0 < before.0 + 1_000_000,
        "the text grew from {} to {}",
        before.0,
        after.0
    );
    ensure!(
        after.1 < before.1 + (128 << 20),
        "memory grew from {} to {}",
        before.1,
        after.1
    );
    Ok(())
}
