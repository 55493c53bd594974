//! Two controller managers on one API server that are killed and started again at random moments under load. What is
//! declared is reached, no pod is doubled, no Job counts a pod twice, no claim has two volumes, and no CronJob runs a minute
//! twice.
//!
//! `SKIFF_RESTARTS` sets how often one is killed (`make restarts` does it 100 times); `SKIFF_SEED` repeats the choices of
//! a run.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use k8s_openapi::api::apps::v1::{Deployment, ReplicaSet, StatefulSet};
use k8s_openapi::api::batch::v1::{CronJob, Job};
use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim, Pod};
use k8s_openapi::jiff::Timestamp;
use kube::api::{Patch, PatchParams, PostParams};
use kube::{Api, ResourceExt};
use serde_json::{Value, json};

use crate::cluster::{Cluster, Manager, check};

const DEPLOYMENTS: usize = 4;
const JOBS: usize = 4;
const COMPLETIONS: i32 = 12;
/// One starts its pods in order, one all at once.
const STATEFUL_SETS: [(&str, &str); 2] = [("s0", "OrderedReady"), ("s1", "Parallel")];
const MOST_ORDINALS: usize = 5;
/// One is made with each of the first kills.
const CRON_JOBS: u64 = 8;

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

fn owner(object: &impl ResourceExt) -> String {
    let owners = object.owner_references().iter();
    owners.map(|owner| owner.name.clone()).collect()
}

/// Sets with a claim for each pod, and a volume for each claim that there may be.
async fn create_stateful_sets(cluster: &Cluster) {
    let volumes: Api<PersistentVolume> = Api::all(cluster.client.clone());
    for n in 0..STATEFUL_SETS.len() * MOST_ORDINALS {
        let volume = json!({"metadata": {"name": format!("v{n}")}, "spec": {"hostPath": {"path": "/x"},
            "capacity": {"storage": "1Gi"}, "accessModes": ["ReadWriteOnce"]}});
        let volume = serde_json::from_value(volume).unwrap();
        volumes.create(&PostParams::default(), &volume).await.unwrap();
    }
    let claim = json!({"metadata": {"name": "data"}, "spec": {"storageClassName": "",
        "accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}}});
    for (name, policy) in STATEFUL_SETS {
        cluster
            .create::<StatefulSet>(json!({"metadata": {"name": name}, "spec": {"replicas": 2,
                "serviceName": name, "podManagementPolicy": policy, "volumeClaimTemplates": [claim],
                "selector": {"matchLabels": {"app": name}}, "template": template(name, "Always")}}))
            .await;
    }
}

/// A CronJob that is due at once, as if it had last run a while ago.
async fn create_cron_job(cluster: &Cluster, name: &str) {
    let spec = json!({"template": template(name, "Never")});
    cluster
        .create::<CronJob>(json!({"metadata": {"name": name},
            "spec": {"schedule": "* * * * *", "jobTemplate": {"spec": spec}}}))
        .await;
    let past = Timestamp::from_second(Timestamp::now().as_second() - 600).unwrap();
    let patch = Patch::Merge(json!({"status": {"lastScheduleTime": past.to_string()}}));
    let crons = cluster.api::<CronJob>();
    crons
        .patch_status(name, &PatchParams::default(), &patch)
        .await
        .unwrap();
}

/// All that was ever seen of what must be there once.
#[derive(Default)]
struct Seen {
    /// Pods of a Job that succeeded, by Job.
    succeeded: BTreeMap<String, BTreeSet<String>>,
    /// Jobs, by CronJob and the time that they are for.
    runs: BTreeMap<(String, String), BTreeSet<String>>,
    /// Volumes, by claim, as the claims and as the volumes say it.
    volumes: BTreeMap<String, BTreeSet<String>>,
    claims: BTreeMap<String, BTreeSet<String>>,
}

impl Seen {
    async fn look(&mut self, cluster: &Cluster) {
        for pod in cluster.list::<Pod>().await {
            let phase = pod.status.as_ref().and_then(|status| status.phase.as_deref());
            if phase == Some("Succeeded") {
                let uid = pod.uid().unwrap_or_default();
                self.succeeded.entry(owner(&pod)).or_default().insert(uid);
            }
        }
        for job in cluster.list::<Job>().await {
            if let Some(time) = job
                .annotations()
                .get("batch.kubernetes.io/cronjob-scheduled-timestamp")
            {
                let run = (owner(&job), time.clone());
                self.runs
                    .entry(run)
                    .or_default()
                    .insert(job.uid().unwrap_or_default());
            }
        }
        for claim in cluster.list::<PersistentVolumeClaim>().await {
            if let Some(volume) = claim.spec.as_ref().and_then(|spec| spec.volume_name.clone()) {
                let uid = claim.uid().unwrap_or_default();
                self.volumes.entry(uid).or_default().insert(volume);
            }
        }
        let volumes: Api<PersistentVolume> = Api::all(cluster.client.clone());
        for volume in volumes.list(&Default::default()).await.unwrap().items {
            let claim = volume
                .spec
                .as_ref()
                .and_then(|spec| spec.claim_ref.as_ref()?.uid.clone());
            if let Some(claim) = claim {
                self.claims.entry(volume.name_any()).or_default().insert(claim);
            }
        }
    }

    fn nothing_is_doubled(&self) {
        for (run, jobs) in &self.runs {
            assert_eq!(jobs.len(), 1, "{run:?} has several Jobs");
        }
        for (claim, volumes) in &self.volumes {
            assert_eq!(volumes.len(), 1, "{claim} was bound to several: {volumes:?}");
        }
        for (volume, claims) in &self.claims {
            assert_eq!(claims.len(), 1, "{volume} was taken by several claims");
        }
        let taken: Vec<&String> = self.claims.values().flatten().collect();
        let different: BTreeSet<&&String> = taken.iter().collect();
        assert_eq!(taken.len(), different.len(), "a claim took several volumes");
    }
}

/// The names of the pods of a StatefulSet.
fn pods_of(set: &str, pods: &[Pod]) -> BTreeSet<String> {
    let own = pods.iter().filter(|pod| owner(*pod) == set);
    own.map(ResourceExt::name_any).collect()
}

fn ordinals(set: &str, replicas: usize) -> BTreeSet<String> {
    (0..replicas).map(|ordinal| format!("{set}-{ordinal}")).collect()
}

/// Whether every claim has its volume, and every volume that is taken has its claim.
async fn claims_are_bound(cluster: &Cluster) -> Result<(), String> {
    let volumes: Api<PersistentVolume> = Api::all(cluster.client.clone());
    let volumes = volumes.list(&Default::default()).await.unwrap().items;
    let mut taken: BTreeMap<String, String> = BTreeMap::new();
    for volume in &volumes {
        let claim = volume
            .spec
            .as_ref()
            .and_then(|spec| spec.claim_ref.as_ref()?.name.clone());
        if let Some(claim) = claim {
            taken.insert(volume.name_any(), claim);
        }
    }
    let mut bound: BTreeMap<String, String> = BTreeMap::new();
    for claim in cluster.list::<PersistentVolumeClaim>().await {
        let phase = claim.status.as_ref().and_then(|status| status.phase.clone());
        check(phase.as_deref() == Some("Bound"), (claim.name_any(), phase))?;
        let volume = claim.spec.as_ref().and_then(|spec| spec.volume_name.clone());
        bound.insert(volume.unwrap_or_default(), claim.name_any());
    }
    check(taken == bound, (taken, bound))
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
    create_stateful_sets(&cluster).await;
    let mut ordinals_wanted: BTreeMap<&str, usize> = STATEFUL_SETS.map(|(name, _)| (name, 2)).into();
    let mut seen = Seen::default();
    for kill in 0..kills {
        let pause = Duration::from_millis(choices.next(150));
        let until = tokio::time::Instant::now() + pause;
        while tokio::time::Instant::now() < until {
            play_kubelet(&cluster).await;
            seen.look(&cluster).await;
        }
        if kill < CRON_JOBS {
            create_cron_job(&cluster, &format!("c{kill}")).await;
        }
        let (set, _) = STATEFUL_SETS[choices.next(2) as usize];
        let replicas = choices.next(1 + MOST_ORDINALS as u64) as usize;
        cluster
            .patch::<StatefulSet>(set, json!({"spec": {"replicas": replicas}}))
            .await;
        ordinals_wanted.insert(set, replicas);
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
        for pod in alive.filter(|pod| owner(*pod).starts_with('d')) {
            *counts.entry(owner(pod)).or_default() += 1;
        }
        // 11 replicas are the most that was ever asked for.
        assert!(
            counts.values().all(|count| *count <= 11),
            "kill {kill}: {counts:?}"
        );
        for (set, _) in STATEFUL_SETS {
            let own = pods_of(set, &pods);
            let possible = ordinals(set, MOST_ORDINALS);
            assert!(own.is_subset(&possible), "kill {kill}: {own:?}");
        }
        seen.nothing_is_doubled();
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
                    .filter(|pod| own.contains(&owner(*pod).as_str()))
                    .count();
                check(
                    own.len() == 1 && count == *replicas as usize,
                    (name, &own, count, replicas),
                )?;
            }
            for (set, replicas) in &ordinals_wanted {
                let own = pods_of(set, &pods);
                check(own == ordinals(set, *replicas), (set, own))?;
            }
            claims_are_bound(&cluster).await?;
            for n in 0..kills.min(CRON_JOBS) {
                let name = format!("c{n}");
                let jobs = cluster.list::<Job>().await;
                check(jobs.iter().any(|job| owner(job) == name), &name)?;
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
    seen.look(&cluster).await;
    seen.nothing_is_doubled();
    for job in cluster.list::<Job>().await {
        let completions = if owner(&job).is_empty() { COMPLETIONS } else { 1 };
        let (name, status) = (job.name_any(), job.status.unwrap_or_default());
        if status.completion_time.is_none() && completions == 1 {
            continue; // of a minute that has just begun
        }
        assert_eq!(status.succeeded, Some(completions), "{name} counts each pod once");
        assert_eq!(status.failed, None, "{name}");
        let pods = seen.succeeded.get(&name).map_or(0, BTreeSet::len);
        assert_eq!(pods, completions as usize, "{name}: pods that succeeded");
        let uncounted = status.uncounted_terminated_pods.unwrap_or_default();
        assert!(uncounted.succeeded.is_none_or(|list| list.is_empty()), "{name}");
    }
}
