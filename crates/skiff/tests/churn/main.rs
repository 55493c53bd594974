//! Pods come and go faster than they can start while skiff, shims, containers and pause processes are killed. Then no
//! acknowledged write is lost, no container that nobody touched was restarted, no volume's data is touched, resized pods
//! have what their status says, and nothing of a deleted pod is left.
//!
//! `make churn` runs it for MINUTES with a SEED, and for a hundred kills of skiff at least; without them it takes seconds
//! and any seed, which it prints.

mod crowd;
mod images;
mod kills;
mod residents;
mod resizes;
mod scene;
mod tenants;
mod updates;

use anyhow::{Context, Result, ensure};
use crowd::Acknowledged;
use images::Image;
use kills::Plan;
use kube::api::{DeleteParams, ListParams};
use residents::Residents;
use scene::{ACTIVITIES, QUIET_PATIENCE, Scene, Tally, describe};
use skiff_testkit::{Cluster, Random, Registry, belongings, busybox_archive, eventually, pause_archive};
use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tenants::Tenant;
use tokio::runtime::Runtime;

const SKIFF: &str = env!("CARGO_BIN_EXE_skiff");
const WORKERS: u64 = 3;
const TENANTS: u64 = 2;
const SHORT: Plan = Plan {
    duration: Duration::from_secs(15),
    skiff_kills: 3,
};
/// The long form: so many times kills and a look at everything.
const ROUNDS: usize = 10;
const MIN_KILLS: usize = 100;
/// In the long form, of every activity so many are interrupted by a kill of skiff.
const MIN_INTERRUPTED: usize = 5;

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
    let long = setting("SKIFF_CHURN_SECONDS")?.map(Duration::from_secs);
    let (rounds, plan) = match long {
        Some(duration) => {
            let (duration, skiff_kills) = (duration / ROUNDS as u32, MIN_KILLS / ROUNDS);
            (
                ROUNDS,
                Plan {
                    duration,
                    skiff_kills,
                },
            )
        }
        None => (1, SHORT),
    };
    println!("churn of {rounds} × {:?}, SKIFF_CHURN_SEED={seed}", plan.duration);
    let mut churn = Churn::start(seed)?;
    let mut killed = Tally::new();
    for round in 0..rounds {
        let began = Instant::now();
        for (what, number) in churn.round(round, plan)? {
            *killed.entry(what).or_insert(0) += number;
        }
        println!("round {round} took {:?}", began.elapsed());
    }
    let interrupted = churn.scene.interrupted();
    println!(
        "{} kills of skiff, in which was under way: {interrupted:?}; killed: {killed:?}",
        kills::of_skiff(&killed)
    );
    if long.is_some() {
        ensure!(kills::of_skiff(&killed) >= MIN_KILLS);
        for activity in ACTIVITIES {
            let number = interrupted.get(&activity).copied().unwrap_or(0);
            ensure!(number >= MIN_INTERRUPTED, "only {number} kills met {activity:?}");
        }
    }
    churn.end()
}

struct Churn {
    seed: u64,
    /// Before the other parts: dropped first.
    runtime: Runtime,
    cluster: Cluster,
    _registry: Registry,
    scene: Arc<Scene>,
    images: Vec<Image>,
    /// What was on the machine before the first pod.
    empty: BTreeSet<String>,
    residents: Residents,
    /// What is on the machine with the residents alone.
    settled: BTreeSet<String>,
    tenants: Vec<Tenant>,
    /// The newest version of what changes.
    version: u64,
    random: Random,
}

impl Churn {
    fn start(seed: u64) -> Result<Self> {
        let runtime = Runtime::new()?;
        let dir = tempfile::tempdir()?;
        let registry = Registry::start()?;
        let images = images::prepare(&registry, dir.path(), seed)?;
        // A disk that others have filled is no reason to remove images.
        let cluster = Cluster::start(SKIFF, &["--image-gc-high-threshold", "100"])?;
        cluster.import(&busybox_archive(dir.path())?)?;
        cluster.import(&pause_archive(dir.path())?)?;
        let client = runtime.block_on(skiff_client::remote(cluster.kubeconfig(), None))?;
        let empty = belongings(cluster.name())?;
        let nodes = cluster.kubectl().json(&["get", "nodes"])?;
        let features = &nodes["items"][0]["status"]["runtimeHandlers"][0]["features"];
        let has_user_namespaces = features["userNamespaces"] == true;
        if !has_user_namespaces {
            println!("the node has no user namespaces: no pods with hostUsers: false");
        }
        let scene = Arc::new(Scene::new(cluster.name(), client, has_user_namespaces));
        let (residents, tenants) = runtime.block_on(async {
            updates::create(&scene).await?;
            let residents = Residents::start(&scene, vec![resizes::pod()]).await?;
            let mut tenants = Vec::new();
            for number in 0..TENANTS {
                tenants.push(Tenant::new(&scene, format!("tenant-{number}")).await?);
            }
            anyhow::Ok((residents, tenants))
        })?;
        let settled = belongings(cluster.name())?;
        Ok(Churn {
            seed,
            runtime,
            cluster,
            _registry: registry,
            scene,
            images,
            empty,
            residents,
            settled,
            tenants,
            version: 0,
            random: Random(seed),
        })
    }

    /// Everybody works while things are killed; then all is looked at. What was killed.
    fn round(&mut self, round: usize, plan: Plan) -> Result<Tally<&'static str>> {
        self.scene.set_over(false);
        let mut number = 0;
        let mut random = || {
            number += 1;
            Random(
                self.seed
                    .wrapping_mul(31)
                    .wrapping_add(round as u64 * 1000 + number),
            )
        };
        let (runtime, scene) = (&self.runtime, &self.scene);
        let crowd: Vec<_> = (0..WORKERS)
            .map(|worker| runtime.spawn(crowd::work(scene.clone(), format!("w{worker}-{round}"), random())))
            .collect();
        let tenants: Vec<_> = std::mem::take(&mut self.tenants)
            .into_iter()
            .map(|tenant| runtime.spawn(tenant.work(scene.clone(), random())))
            .collect();
        let update = runtime.spawn(updates::work(scene.clone(), self.version, random()));
        let resize = runtime.spawn(resizes::work(scene.clone(), random()));
        let name = format!("pull-{round}");
        let pull = images::work(scene.clone(), name, SKIFF, self.images.clone(), random());
        let pull = runtime.spawn(pull);

        let killed = kills::disturb(&self.cluster, scene, &mut self.random, plan);
        // Nobody goes on by himself if that failed.
        scene.set_over(true);
        let killed = killed?;
        let mut acknowledged = Acknowledged::default();
        let mut tenancies = 0;
        let (mut resizes, mut pulls) = (0, 0);
        runtime.block_on(async {
            for worker in crowd {
                acknowledged.extend(worker.await?);
            }
            for tenant in tenants {
                let tenant = tenant.await??;
                tenancies += tenant.pods();
                self.tenants.push(tenant);
            }
            self.version = update.await??;
            resizes = resize.await??;
            pulls = pull.await??;
            anyhow::Ok(())
        })?;
        println!(
            "{} pods, {} image patches, {} deletes, {} evictions; {resizes} resizes, {pulls} pulls, {} versions, \
             {tenancies} tenants so far; killed: {killed:?}",
            acknowledged.created,
            acknowledged.patched,
            acknowledged.deleted(),
            acknowledged.evicted,
            self.version,
        );
        self.check(&acknowledged)?;
        Ok(killed)
    }

    fn check(&mut self, acknowledged: &Acknowledged) -> Result<()> {
        let (runtime, scene) = (&self.runtime, &self.scene);
        self.memory("after the churn")?;
        runtime.block_on(crowd::nothing_lost(scene, acknowledged))?;
        runtime.block_on(updates::nothing_lost(scene, self.version))?;
        self.residents
            .check(runtime, scene, &self.cluster, self.version)?;
        resizes::check(runtime, scene)?;
        for tenant in &self.tenants {
            tenant.check(runtime, scene)?;
        }
        let crowd = ListParams::default().labels(crowd::LABEL);
        runtime.block_on(scene.pods().delete_collection(&DeleteParams::default(), &crowd))?;
        let volumes = self.tenants.len();
        self.wait_clean(&self.settled, volumes, |pod| {
            !self.residents.uids.contains_key(pod)
        })
    }

    /// Waits until there is nothing more than there was, but for so many new volumes, and no pod that is not wanted.
    fn wait_clean(
        &self,
        before: &BTreeSet<String>,
        volumes: usize,
        is_unwanted: impl Fn(&str) -> bool,
    ) -> Result<()> {
        let (began, mut last) = (Instant::now(), String::new());
        let is_process = |line: &&String| self.residents.is_process(line);
        let left = eventually("nothing is left of any pod", QUIET_PATIENCE, || {
            // A pull goes on when its pod is deleted.
            images::remove_all(SKIFF, &self.scene.name, &self.images)?;
            let list = self
                .runtime
                .block_on(self.scene.pods().list(&ListParams::default()))?;
            let pods = list.items.iter();
            let pods = pods.filter(|pod| is_unwanted(pod.metadata.name.as_deref().unwrap_or_default()));
            let mut left: Vec<String> = pods.map(describe).collect();
            let found = belongings(&self.scene.name)?;
            let mut new: Vec<&String> = found
                .difference(before)
                .filter(|line| !is_process(line))
                .collect();
            let is_volume = |line: &&String| line.contains("/volumes/pvc-") && line.starts_with("file ");
            let mut new_volumes: Vec<&String> = new.extract_if(.., |line| is_volume(line)).collect();
            if new_volumes.len() > volumes {
                new.append(&mut new_volumes);
            }
            left.extend(new.into_iter().cloned());
            let gone = before
                .difference(&found)
                .filter(|line| !line.starts_with("process "));
            left.extend(gone.map(|line| format!("gone, which should be there: {line}")));
            if let Some(one) = left.first() {
                last = one.chars().take(150).collect();
            }
            ensure!(left.is_empty(), "{} left:\n{}", left.len(), left.join("\n"));
            Ok(())
        });
        println!("clean after {:?}; the last to go: {last}", began.elapsed());
        left.or_else(|error| {
            let objects = self.cluster.kubectl().run(&["get", "pv,pvc,pods"])?;
            Err(error.context(objects))
        })
    }

    fn end(self) -> Result<()> {
        let pods = self.scene.pods();
        let all = DeleteParams::default();
        self.runtime
            .block_on(pods.delete_collection(&all, &ListParams::default()))?;
        let volumes = Cluster::data_dir(&self.scene.name).join("volumes");
        tenants::remove_claims(&self.runtime, &self.scene, &volumes)?;
        let left = self.wait_clean(&self.empty, 0, |_| true);
        self.memory("in the end")?;
        left
    }

    fn memory(&self, when: &str) -> Result<()> {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.cluster.pid()?))?;
        let anonymous = status.lines().find(|line| line.starts_with("RssAnon"));
        println!("{when}: {}", anonymous.unwrap_or_default());
        Ok(())
    }
}
