//! Two controller managers on one API server that are killed and started again at random moments under load. What is
//! declared is reached, no pod is doubled and no Job counts a pod twice.
//!
//! `SKIFF_RESTARTS` sets how often one is killed (`make restarts` does it 100 times); `SKIFF_SEED` repeats the choices of
//! a run.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use k8s_openapi::api::apps::v1::{Deployment, ReplicaSet};
use k8s_openapi::api::batch::v1::Job;
use k8s_openapi::api::core::v1::Pod;
use serde_json::{Value, json};

use crate::cluster::{Cluster, Manager, check};

const DEPLOYMENTS: usize = 4;
const JOBS: usize = 4;
const COMPLETIONS: i32 = 12;

/// A small generator, so that a run can be repeated.
struct Choices(u64);

impl Choices {
    fn next(&mut self, below: u64) -> u64 {
        self.0 = self
            .0
            .wrapping_mul(6364136223846793005)
            .wrapping_add(1442695040888963407);
        (self.0 >> 33) % below
    }
}

fn from_environment(name: &str, default: u64) -> u64 {
    std::env::var(name)
        .ok()
        .and_then(|text| text.parse().ok())
        .unwrap_or(default)
}

fn template(label: &str, restart: &str) -> Value {
    json!({"metadata": {"labels": {"app": label}},
        "spec": {"restartPolicy": restart, "containers": [{"name": "c", "image": "i"}]}})
}

/// Pods of Jobs complete instead of running on.
async fn play_kubelet(cluster: &Cluster) {
    cluster.run_pods().await;
    for pod in cluster.list::<Pod>().await {
        let labels = pod.metadata.labels.clone().unwrap_or_default();
        let phase = pod.status.as_ref().and_then(|status| status.phase.as_deref());
        if labels.contains_key("batch.kubernetes.io/job-name") && phase == Some("Running") {
            let name = pod.metadata.name.unwrap_or_default();
            let done = json!({"phase": "Succeeded", "conditions": []});
            cluster.set_pod_status(&name, done).await;
        }
    }
}

fn owner(pod: &Pod) -> String {
    let owners = pod.metadata.owner_references.iter().flatten();
    owners.map(|owner| owner.name.clone()).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nothing_is_doubled_or_lost_when_managers_are_killed() {
    let kills = from_environment("SKIFF_RESTARTS", 12);
    let seed = from_environment("SKIFF_SEED", 20_260_101);
    println!("seed {seed}, {kills} kills");
    let mut choices = Choices(seed);
    let cluster = Cluster::start_idle().await;
    let mut managers: Vec<Manager> = (0..2).map(|n| cluster.start_manager(&format!("m{n}"))).collect();
    cluster.furnished().await;
    let mut wanted: BTreeMap<String, i32> = BTreeMap::new();
    for n in 0..DEPLOYMENTS {
        let name = format!("d{n}");
        cluster
            .create::<Deployment>(json!({"metadata": {"name": name}, "spec": {"replicas": 5,
                "selector": {"matchLabels": {"app": name}}, "template": template(&name, "Always")}}))
            .await;
        wanted.insert(name, 5);
    }
    for n in 0..JOBS {
        let name = format!("j{n}");
        cluster
            .create::<Job>(
                json!({"metadata": {"name": name}, "spec": {"completions": COMPLETIONS,
                "parallelism": 3, "backoffLimit": 0, "template": template(&name, "Never")}}),
            )
            .await;
    }
    // Every pod of a Job that was ever seen to succeed, by Job.
    let mut succeeded: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    let mut look = async |cluster: &Cluster| {
        for pod in cluster.list::<Pod>().await {
            let phase = pod.status.as_ref().and_then(|status| status.phase.as_deref());
            if phase == Some("Succeeded") {
                let uid = pod.metadata.uid.clone().unwrap_or_default();
                succeeded.entry(owner(&pod)).or_default().insert(uid);
            }
        }
    };
    for kill in 0..kills {
        let pause = Duration::from_millis(choices.next(150));
        let until = tokio::time::Instant::now() + pause;
        while tokio::time::Instant::now() < until {
            play_kubelet(&cluster).await;
            look(&cluster).await;
        }
        let name = format!("d{}", choices.next(DEPLOYMENTS as u64));
        let replicas = choices.next(12) as i32;
        cluster
            .patch::<Deployment>(&name, json!({"spec": {"replicas": replicas}}))
            .await;
        wanted.insert(name, replicas);
        let victim = choices.next(2) as usize;
        managers[victim].kill().await;
        // The same identity comes back and takes its own lease over at once.
        managers[victim] = cluster.start_manager(&format!("m{victim}"));
        let pods = cluster.list::<Pod>().await;
        let alive = pods
            .iter()
            .filter(|pod| pod.metadata.deletion_timestamp.is_none());
        let mut counts: BTreeMap<String, usize> = BTreeMap::new();
        for pod in alive.filter(|pod| owner(pod).starts_with('d')) {
            *counts.entry(owner(pod)).or_default() += 1;
        }
        // 11 replicas are the most that was ever asked for.
        assert!(
            counts.values().all(|count| *count <= 11),
            "kill {kill}: {counts:?}"
        );
    }
    cluster
        .until("all is as declared", async || {
            play_kubelet(&cluster).await;
            let sets = cluster.list::<ReplicaSet>().await;
            let pods = cluster.list::<Pod>().await;
            for (name, replicas) in &wanted {
                let own = sets.iter().filter(|set| {
                    let mut owners = set.metadata.owner_references.iter().flatten();
                    owners.any(|owner| owner.name == *name)
                });
                let own: Vec<&str> = own.filter_map(|set| set.metadata.name.as_deref()).collect();
                let count = pods
                    .iter()
                    .filter(|pod| own.contains(&owner(pod).as_str()))
                    .count();
                check(
                    own.len() == 1 && count == *replicas as usize,
                    (name, &own, count, replicas),
                )?;
            }
            for job in cluster.list::<Job>().await {
                let status = job.status.clone().unwrap_or_default();
                let complete = status
                    .conditions
                    .iter()
                    .flatten()
                    .any(|c| c.type_ == "Complete" && c.status == "True");
                check(complete, (job.metadata.name, status))?;
            }
            Ok(())
        })
        .await;
    look(&cluster).await;
    for job in cluster.list::<Job>().await {
        let (name, status) = (
            job.metadata.name.unwrap_or_default(),
            job.status.unwrap_or_default(),
        );
        assert_eq!(status.succeeded, Some(COMPLETIONS), "{name} counts each pod once");
        assert_eq!(status.failed, None, "{name}");
        let pods = succeeded.get(&name).map_or(0, BTreeSet::len);
        assert_eq!(pods, COMPLETIONS as usize, "{name}: pods that succeeded");
        let uncounted = status.uncounted_terminated_pods.unwrap_or_default();
        assert!(uncounted.succeeded.is_none_or(|list| list.is_empty()), "{name}");
    }
}
