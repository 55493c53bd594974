//! Two schedulers on one API server that are killed, cut off from their lease and started again at random moments under
//! load. Every pod that fits is bound, none twice; no node, port, volume or device is given away twice; who does not hold
//! the lease binds nothing, and the other one takes over.
//!
//! `SKIFF_RESTARTS` sets how often one is killed (`make restarts` does it 100 times); `SKIFF_SEED` repeats the choices of
//! a run.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim, Pod};
use k8s_openapi::api::resource::v1::{DeviceClass, ResourceClaim, ResourceSlice};
use k8s_openapi::api::storage::v1::StorageClass;
use kube::api::PostParams;
use kube::{Api, Resource, ResourceExt};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use crate::cluster::{Cluster, PATIENCE, Process, SLOTS, check, condition, configuration, node_of, pod};
use crate::wire::{Fault, Hits};

const NODES: usize = 4;
const LEASE: &str = "kube-scheduler";
const LEASE_SECONDS: u64 = 6;
const ELECTION: &str = "leaderElection: {leaseDuration: 6s, renewDeadline: 3s, retryPeriod: 300ms}\n\
    podMaxBackoffSeconds: 2\n";

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
    let text = std::env::var(name).ok();
    text.and_then(|text| text.parse().ok()).unwrap_or(default)
}

pub async fn create_global<K>(cluster: &Cluster, object: Value)
where
    K: Resource<DynamicType = ()> + Clone + std::fmt::Debug + Serialize + DeserializeOwned,
    K: Resource<Scope = k8s_openapi::ClusterResourceScope>,
{
    let object: K = serde_json::from_value(object).unwrap();
    let api: Api<K> = Api::all(cluster.client.clone());
    api.create(&PostParams::default(), &object).await.unwrap();
}

/// Nodes, and on each of them two volumes and two devices.
async fn furnish(cluster: &Cluster) {
    let class = json!({"metadata": {"name": "late"}, "provisioner": "kubernetes.io/no-provisioner",
        "volumeBindingMode": "WaitForFirstConsumer"});
    create_global::<StorageClass>(cluster, class).await;
    create_global::<DeviceClass>(cluster, json!({"metadata": {"name": "gpu"}, "spec": {}})).await;
    for n in 0..NODES {
        let name = format!("n{n}");
        cluster.add_node(&name).await;
        for v in 0..2 {
            let terms = json!([{"matchExpressions": [{"key": "kubernetes.io/hostname", "operator": "In", "values": [name]}]}]);
            let volume = json!({"metadata": {"name": format!("v{n}-{v}")}, "spec": {"storageClassName": "late",
                "capacity": {"storage": "1Gi"}, "accessModes": ["ReadWriteOnce"], "local": {"path": "/x"},
                "persistentVolumeReclaimPolicy": "Retain", "nodeAffinity": {"required": {"nodeSelectorTerms": terms}}}});
            create_global::<PersistentVolume>(cluster, volume).await;
        }
        let slice = json!({"metadata": {"name": name}, "spec": {"driver": "d.example.com", "nodeName": name,
            "pool": {"name": name, "generation": 1, "resourceSliceCount": 1},
            "devices": [{"name": "gpu0"}, {"name": "gpu1"}]}});
        create_global::<ResourceSlice>(cluster, slice).await;
    }
}

/// The kinds of pods that are made, and how many of each there may be. A pod's name starts with its kind.
const KINDS: [(&str, usize); 5] = [
    ("plain", 3 * NODES),
    ("port", NODES),
    ("apart", NODES),
    ("claim", 2 * NODES),
    ("device", 2 * NODES),
];

async fn create_pod(cluster: &Cluster, kind: &str, number: usize) {
    let name = format!("{kind}-{number}");
    let more = match kind {
        "port" => json!({"ports": [{"containerPort": 80, "hostPort": 8080}]}),
        "apart" => {
            let term = json!({"topologyKey": "kubernetes.io/hostname", "labelSelector": {"matchLabels": {"kind": "apart"}}});
            json!({"affinity": {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [term]}}})
        }
        "claim" => {
            cluster
                .create::<PersistentVolumeClaim>(
                    json!({"metadata": {"name": name}, "spec": {"storageClassName": "late",
                    "accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}}}),
                )
                .await;
            json!({"volumes": [{"name": "v", "persistentVolumeClaim": {"claimName": name}}]})
        }
        "device" => {
            let request = json!({"name": "r", "exactly": {"deviceClassName": "gpu"}});
            cluster
                .create::<ResourceClaim>(
                    json!({"metadata": {"name": name}, "spec": {"devices": {"requests": [request]}}}),
                )
                .await;
            json!({"resourceClaims": [{"name": "gpu", "resourceClaimName": name}]})
        }
        _ => json!({}),
    };
    cluster.create::<Pod>(pod(&name, more)).await;
}

async fn holder(cluster: &Cluster) -> Option<String> {
    let leases: Api<Lease> = Api::namespaced(cluster.client.clone(), "kube-system");
    leases.get_opt(LEASE).await.unwrap()?.spec?.holder_identity
}

/// Waits until this one leads; how long that took.
async fn until_leads(cluster: &Cluster, identity: &str) -> Duration {
    let began = Instant::now();
    cluster
        .until(&format!("{identity} takes over"), async || {
            let holder = holder(cluster).await;
            check(holder.as_deref() == Some(identity), holder)
        })
        .await;
    began.elapsed()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nothing_is_given_away_twice_when_schedulers_are_killed() {
    let kills = from_environment("SKIFF_RESTARTS", 8) as usize;
    let seed = from_environment("SKIFF_SEED", 20_260_101);
    println!("seed {seed}, {kills} kills");
    let mut choices = Choices(seed);
    let cluster = Cluster::start().await;
    furnish(&cluster).await;
    let config = configuration(ELECTION);
    let start = |n: usize| cluster.start_scheduler(&format!("s{n}"), true, &config);
    let mut schedulers: Vec<Process> = (0..2).map(start).collect();
    let (mut made, mut alive): (HashMap<&str, usize>, Vec<String>) = Default::default();
    let mut known = HashMap::new();
    let mut longest = Duration::ZERO;
    for kill in 0..kills {
        for _ in 0..1 + choices.next(4) {
            let (kind, limit) = KINDS[choices.next(KINDS.len() as u64) as usize];
            let count = made.entry(kind).or_default();
            // The special ones stay; plain ones come and go.
            if kind == "plain" || *count < limit {
                create_pod(&cluster, kind, *count).await;
                if kind == "plain" {
                    alive.push(format!("plain-{count}"));
                }
                *count += 1;
            }
        }
        while alive.len() > KINDS[0].1 {
            let name = alive.swap_remove(choices.next(alive.len() as u64) as usize);
            cluster.delete_pod(&name).await;
        }
        tokio::time::sleep(Duration::from_millis(choices.next(120))).await;
        let victim = choices.next(2) as usize;
        match kill % 8 {
            // Cut off from its lease alone it could go on; it must not.
            3 => {
                let Some(leader) = holder(&cluster).await else {
                    continue;
                };
                let leader = usize::from(leader == "s1");
                schedulers[leader].wire.fail(Fault::Code(503), Hits::Leases);
                create_pod(&cluster, "plain", 1_000_000 + kill).await;
                alive.push(format!("plain-{}", 1_000_000 + kill));
                longest = longest.max(until_leads(&cluster, &format!("s{}", 1 - leader)).await);
                schedulers[leader].wire.heal();
            }
            // Down for longer than a lease lasts.
            6 => {
                schedulers[victim].kill().await;
                longest = longest.max(until_leads(&cluster, &format!("s{}", 1 - victim)).await);
                schedulers[victim] = start(victim);
            }
            // The same identity comes back and takes its own lease over at once.
            _ => {
                schedulers[victim].kill().await;
                schedulers[victim] = start(victim);
            }
        }
        cluster.check_consistency(&mut known).await;
    }
    println!("the longest time until the other one led: {longest:?}");
    // Claims may be tied to a node that plain pods have filled meanwhile.
    for pod in cluster.pods().await {
        if pod.name_any().starts_with("plain") {
            cluster.delete_pod(&pod.name_any()).await;
        }
    }
    cluster
        .until_bound("what has claims, ports and affinity", |_| true)
        .await;
    cluster.check_consistency(&mut known).await;
    // Now every slot: so many fit, and no more.
    let free = NODES * SLOTS - cluster.pods().await.len();
    for n in 0..free + 3 {
        create_pod(&cluster, "plain", 2_000_000 + n).await;
    }
    cluster
        .until("the cluster is full", async || {
            let pods = cluster.pods().await;
            let waiting: Vec<&Pod> = pods.iter().filter(|pod| node_of(pod).is_none()).collect();
            let told = waiting
                .iter()
                .all(|pod| condition(pod).starts_with("0/4 nodes are available"));
            check(waiting.len() == 3 && told, waiting.len())
        })
        .await;
    cluster.check_consistency(&mut known).await;
    // A slow machine makes everything later, but never by this much.
    let allowed = Duration::from_secs(LEASE_SECONDS) + PATIENCE / 2;
    assert!(longest < allowed, "{longest:?}");
    for mut scheduler in schedulers {
        scheduler.kill().await;
    }
}
