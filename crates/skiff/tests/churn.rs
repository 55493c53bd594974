//! Pods come and go faster than they can start while skiff, shims, containers and pause processes are killed. Then no
//! acknowledged write is lost, no container that nobody touched was restarted, and nothing of a deleted pod is left.
//!
//! `make churn` runs it for MINUTES with a SEED; without them it takes seconds and any seed, which it prints.

use anyhow::{Context, Result, bail, ensure};
use futures::future::join_all;
use k8s_openapi::api::core::v1::{ConfigMap, Pod};
use kube::api::{DeleteParams, EvictParams, ListParams, Patch, PatchParams, PostParams};
use kube::{Api, Client};
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use serde_json::json;
use skiff_client::ErrorExt;
use skiff_testkit::{
    BUSYBOX, Cluster, PAUSE, Random, belongings, busybox_archive, eventually, expect_eq, pause_archive, shims,
};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

const SKIFF: &str = env!("CARGO_BIN_EXE_skiff");
const WORKERS: u64 = 4;
const SHORT: Duration = Duration::from_secs(20);
/// Pods that stay until the end; more would not fit on the node.
const MAX_KEPT: usize = 20;

#[derive(Default)]
struct Counts {
    created: AtomicUsize,
    patched: AtomicUsize,
    deleted: AtomicUsize,
    evicted: AtomicUsize,
    kept: AtomicUsize,
}

/// What the API acknowledged.
#[derive(Default)]
struct Acknowledged {
    config_maps: Vec<String>,
    /// Pods that were made and that nobody asked to delete.
    kept: Vec<String>,
    /// Pods whose deletion was accepted.
    deleted: Vec<String>,
}

fn setting(name: &str) -> Result<Option<u64>> {
    match std::env::var(name) {
        Ok(text) if !text.is_empty() => Ok(Some(text.parse().with_context(|| name.to_owned())?)),
        _ => Ok(None),
    }
}

#[test]
fn nothing_is_lost_and_nothing_is_left() -> Result<()> {
    let seed = match setting("SKIFF_CHURN_SEED")? {
        Some(seed) => seed,
        None => std::time::UNIX_EPOCH.elapsed()?.as_nanos() as u64 % 1_000_000,
    };
    let duration = setting("SKIFF_CHURN_SECONDS")?.map_or(SHORT, Duration::from_secs);
    println!("churn of {duration:?}, SKIFF_CHURN_SEED={seed}");
    let runtime = tokio::runtime::Runtime::new()?;
    let dir = tempfile::tempdir()?;
    let cluster = Cluster::start(SKIFF, &[])?;
    cluster.import(&busybox_archive(dir.path())?)?;
    cluster.import(&pause_archive(dir.path())?)?;
    let client = runtime.block_on(skiff_client::remote(cluster.kubeconfig(), None))?;
    let before = belongings(cluster.name())?;

    let pods: Api<Pod> = Api::default_namespaced(client.clone());
    let bystanders = runtime.block_on(start_bystanders(&pods))?;
    let protected = shims(cluster.name())?;
    ensure!(protected.len() == 2, "{protected:?}");

    let counts = Arc::new(Counts::default());
    let stop = Arc::new(AtomicBool::new(false));
    let workers: Vec<_> = (0..WORKERS)
        .map(|worker| {
            let random = Random(seed.wrapping_mul(31).wrapping_add(worker));
            runtime.spawn(work(worker, client.clone(), random, stop.clone(), counts.clone()))
        })
        .collect();
    let kills = disturb(&cluster, &protected, Random(seed), duration)?;
    stop.store(true, Ordering::Relaxed);
    let mut acknowledged = Acknowledged::default();
    for result in runtime.block_on(join_all(workers)) {
        let one = result?;
        acknowledged.config_maps.extend(one.config_maps);
        acknowledged.kept.extend(one.kept);
        acknowledged.deleted.extend(one.deleted);
    }
    println!(
        "{} pods, {} image patches, {} deletes, {} evictions; killed: {kills:?}",
        counts.created.load(Ordering::Relaxed),
        counts.patched.load(Ordering::Relaxed),
        counts.deleted.load(Ordering::Relaxed),
        counts.evicted.load(Ordering::Relaxed),
    );
    let memory = |when: &str| -> Result<()> {
        let status = std::fs::read_to_string(format!("/proc/{}/status", cluster.pid()?))?;
        let anonymous = status.lines().find(|line| line.starts_with("RssAnon"));
        println!("{when}: {}", anonymous.unwrap_or_default());
        Ok(())
    };
    memory("after the churn")?;
    runtime.block_on(nothing_lost(&client, &acknowledged))?;
    expect_eq(runtime.block_on(identities(&pods))?, bystanders)?;

    let began = Instant::now();
    let mut last = String::new();
    let all = DeleteParams::default();
    runtime.block_on(pods.delete_collection(&all, &ListParams::default()))?;
    let left = eventually("nothing is left of any pod", Duration::from_secs(60), || {
        let list = runtime.block_on(pods.list(&ListParams::default()))?;
        let mut left: Vec<String> = list.items.iter().map(describe).collect();
        left.extend(belongings(cluster.name())?.difference(&before).cloned());
        if let Some(one) = left.first() {
            last = one.clone();
        }
        ensure!(left.is_empty(), "{} left:\n{}", left.len(), left.join("\n"));
        Ok(())
    });
    println!("clean after {:?}; the last to go: {last}", began.elapsed());
    memory("in the end")?;
    left
}

fn describe(pod: &Pod) -> String {
    let status = serde_json::to_string(&pod.status).unwrap_or_default();
    let name = pod.metadata.name.as_deref().unwrap_or_default();
    format!(
        "pod {name} {} {status}",
        pod.metadata.uid.as_deref().unwrap_or_default()
    )
}

/// Two pods that nobody touches: one with a pid namespace of its own and one that shares it.
async fn start_bystanders(pods: &Api<Pod>) -> Result<BTreeMap<String, (String, i32)>> {
    for shared in [false, true] {
        let pod = json!({"metadata": {"name": format!("bystander-{shared}"), "labels": {"bystander": "yes"}},
            "spec": {"shareProcessNamespace": shared, "terminationGracePeriodSeconds": 0,
            "containers": [{"name": "c", "image": BUSYBOX, "command": ["sleep", "100000"]}]}});
        pods.create(&PostParams::default(), &serde_json::from_value(pod)?)
            .await?;
    }
    for _ in 0..600 {
        let found = identities(pods).await?;
        if found.len() == 2 {
            return Ok(found);
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    bail!("the bystanders do not start")
}

/// Container ids and restart counts of the running bystanders.
async fn identities(pods: &Api<Pod>) -> Result<BTreeMap<String, (String, i32)>> {
    let list = pods.list(&ListParams::default().labels("bystander")).await?;
    let one = |pod: Pod| {
        let status = pod.status?.container_statuses?.into_iter().next()?;
        status.state?.running?;
        Some((pod.metadata.name?, (status.container_id?, status.restart_count)))
    };
    Ok(list.items.into_iter().filter_map(one).collect())
}

/// Makes and deletes pods until told to stop. A request that fails may or may not have been done.
async fn work(
    worker: u64,
    client: Client,
    mut random: Random,
    stop: Arc<AtomicBool>,
    counts: Arc<Counts>,
) -> Acknowledged {
    let pods: Api<Pod> = Api::default_namespaced(client.clone());
    let maps: Api<ConfigMap> = Api::default_namespaced(client);
    let mut acknowledged = Acknowledged::default();
    for number in 0.. {
        if stop.load(Ordering::Relaxed) {
            break;
        }
        let name = format!("w{worker}-{number}");
        let map: ConfigMap =
            serde_json::from_value(json!({"metadata": {"name": name}})).expect("a config map");
        if maps.create(&PostParams::default(), &map).await.is_ok() {
            acknowledged.config_maps.push(name.clone());
        }
        let pod = random_pod(&name, &mut random);
        if pods.create(&PostParams::default(), &pod).await.is_err() {
            tokio::time::sleep(Duration::from_millis(100)).await;
            // It may have been made all the same; then it must be possible to delete it.
            let _ = pods.delete(&name, &DeleteParams::default().grace_period(0)).await;
            continue;
        }
        counts.created.fetch_add(1, Ordering::Relaxed);
        let pause = match random.below(4) {
            0 | 1 => random.millis(10, 30),
            2 => random.millis(30, 500),
            _ => random.millis(500, 3000),
        };
        tokio::time::sleep(pause).await;
        if random.one_in(3) {
            let image = json!({"spec": {"containers": [{"name": "c", "image": PAUSE}]}});
            if pods
                .patch(&name, &PatchParams::default(), &Patch::Strategic(image))
                .await
                .is_ok()
            {
                counts.patched.fetch_add(1, Ordering::Relaxed);
            }
            tokio::time::sleep(random.millis(10, 40)).await;
        }
        if random.one_in(12) && counts.kept.fetch_add(1, Ordering::Relaxed) < MAX_KEPT {
            acknowledged.kept.push(name);
            continue;
        }
        let accepted = if random.one_in(5) {
            let evicted = pods.evict(&name, &EvictParams::default()).await;
            evicted.map(|_| counts.evicted.fetch_add(1, Ordering::Relaxed))
        } else {
            let parameters = match random.below(3) {
                0 => DeleteParams::default(),
                1 => DeleteParams::default().grace_period(0),
                _ => DeleteParams::default().grace_period(1),
            };
            let deleted = pods.delete(&name, &parameters).await;
            deleted.map(|_| counts.deleted.fetch_add(1, Ordering::Relaxed))
        };
        match accepted {
            Ok(_) => acknowledged.deleted.push(name),
            Err(_) => tokio::time::sleep(Duration::from_millis(100)).await,
        }
    }
    acknowledged
}

fn random_pod(name: &str, random: &mut Random) -> Pod {
    let script = match random.below(4) {
        0 => "sleep 100000",
        1 => "trap 'exit 0' TERM; while true; do echo tick; sleep 0.1; done",
        2 => "sleep 1",
        _ => "sleep 0.05; exit 3",
    };
    let container = |name: &str, script: &str| {
        json!({"name": name, "image": BUSYBOX, "command": ["sh", "-c", script],
            "volumeMounts": [{"name": "v", "mountPath": "/v"}]})
    };
    let mut containers = vec![container("c", script)];
    if random.one_in(3) {
        containers.push(container("d", "sleep 100000"));
    }
    let medium = if random.one_in(2) { "Memory" } else { "" };
    let mut spec = json!({
        "shareProcessNamespace": random.one_in(2),
        "terminationGracePeriodSeconds": random.below(3),
        "restartPolicy": if random.one_in(4) { "Never" } else { "Always" },
        "volumes": [{"name": "v", "emptyDir": {"medium": medium}}],
        "containers": containers,
    });
    if random.one_in(4) {
        spec["initContainers"] = json!([container("i", "true")]);
    }
    serde_json::from_value(json!({"metadata": {"name": name}, "spec": spec})).expect("a pod")
}

/// Kills something every now and then until the time is over; what was killed how often.
fn disturb(
    cluster: &Cluster,
    protected: &[i32],
    mut random: Random,
    duration: Duration,
) -> Result<BTreeMap<&'static str, usize>> {
    let began = Instant::now();
    let mut killed = BTreeMap::new();
    let mut count = |what| *killed.entry(what).or_insert(0) += 1;
    let mut turn = random.below(4);
    while began.elapsed() < duration {
        std::thread::sleep(random.millis(200, 900));
        turn += 1;
        if turn.is_multiple_of(8) {
            let pid = i32::try_from(cluster.pid()?)?;
            ensure!(kill(pid, |_| true), "skiff is not running");
            count("skiff");
            std::thread::sleep(random.millis(0, 300));
            cluster.up()?;
            continue;
        }
        let shims: Vec<i32> = shims(cluster.name())?
            .into_iter()
            .filter(|pid| !protected.contains(pid))
            .collect();
        if shims.is_empty() {
            continue;
        }
        let shim = shims[random.below(shims.len() as u64) as usize];
        if turn.is_multiple_of(3) {
            if kill(shim, |pid| cmdline(pid).contains("internal-shim")) {
                count("shim");
            }
            continue;
        }
        // Children of a shim are containers, execs, pause processes, and helpers that are about to become one.
        let children = children(shim);
        if !children.is_empty() {
            let child = children[random.below(children.len() as u64) as usize];
            let helper = cmdline(child).contains("internal-init");
            if kill(child, |pid| parent(pid) == Some(shim)) {
                count(if helper {
                    "pause process or helper"
                } else {
                    "container"
                });
            }
        }
    }
    Ok(killed)
}

/// SIGKILL to a process that still is who it was.
fn kill(pid: i32, is_it: impl Fn(i32) -> bool) -> bool {
    let Some(handle) = Pid::from_raw(pid).and_then(|pid| pidfd_open(pid, PidfdFlags::empty()).ok()) else {
        return false;
    };
    is_it(pid) && pidfd_send_signal(&handle, Signal::KILL).is_ok()
}

fn cmdline(pid: i32) -> String {
    String::from_utf8_lossy(&std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default()).into_owned()
}

fn parent(pid: i32) -> Option<i32> {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("PPid:"))?;
    line.trim().parse().ok()
}

fn children(pid: i32) -> Vec<i32> {
    std::fs::read_to_string(format!("/proc/{pid}/task/{pid}/children"))
        .unwrap_or_default()
        .split_whitespace()
        .filter_map(|pid| pid.parse().ok())
        .collect()
}

async fn nothing_lost(client: &Client, acknowledged: &Acknowledged) -> Result<()> {
    let pods: Api<Pod> = Api::default_namespaced(client.clone());
    let maps: Api<ConfigMap> = Api::default_namespaced(client.clone());
    let everything = ListParams::default();
    let maps = maps.list(&everything).await?.items;
    let maps: BTreeSet<String> = maps.into_iter().filter_map(|map| map.metadata.name).collect();
    for name in &acknowledged.config_maps {
        ensure!(
            maps.contains(name),
            "config map {name} was acknowledged and is gone"
        );
    }
    for name in &acknowledged.kept {
        let pod = pods.get(name).await.with_context(|| format!("pod {name}"))?;
        ensure!(
            pod.metadata.deletion_timestamp.is_none(),
            "pod {name} is being deleted, which nobody asked for"
        );
    }
    for name in &acknowledged.deleted {
        match pods.get(name).await {
            Err(error) if error.is_not_found() => {}
            Err(error) => return Err(error.into()),
            Ok(pod) => ensure!(
                pod.metadata.deletion_timestamp.is_some(),
                "pod {name} lives on, but its deletion was acknowledged"
            ),
        }
    }
    Ok(())
}
