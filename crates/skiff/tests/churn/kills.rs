//! Kills: of skiff, of shims, of what shims have started. Those of skiff are aimed at what is under way, some at a start of
//! skiff that is not through.

use crate::scene::{ACTIVITIES, Scene, Tally};
use anyhow::{Result, bail, ensure};
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use skiff_testkit::{Cluster, Random, shims};
use std::time::{Duration, Instant};

pub(crate) const SKIFF_KILLS: &str = "skiff";
pub(crate) const START_KILLS: &str = "skiff while it starts";

/// How long to kill, and how often at least.
#[derive(Clone, Copy)]
pub(crate) struct Plan {
    pub duration: Duration,
    pub skiff_kills: usize,
}

impl Plan {
    /// By then there is something wrong.
    fn limit(&self) -> Duration {
        self.duration * 3 + Duration::from_secs(20) * u32::try_from(self.skiff_kills).unwrap_or(u32::MAX)
    }
}

/// How often skiff was killed.
pub(crate) fn of_skiff(killed: &Tally<&'static str>) -> usize {
    let of = |what| killed.get(what).copied().unwrap_or(0);
    of(SKIFF_KILLS) + of(START_KILLS)
}

/// Kills something every now and then until the plan is done; skiff runs in the end. What was killed how often.
pub(crate) fn disturb(
    cluster: &Cluster,
    scene: &Scene,
    random: &mut Random,
    plan: Plan,
) -> Result<Tally<&'static str>> {
    let began = Instant::now();
    let mut killed = Tally::new();
    while began.elapsed() < plan.duration || of_skiff(&killed) < plan.skiff_kills {
        if began.elapsed() > plan.limit() {
            bail!("after {:?} only this was killed: {killed:?}", plan.limit());
        }
        std::thread::sleep(random.millis(100, 700));
        match random.below(6) {
            0 | 1 => kill_skiff(cluster, scene, random, &mut killed)?,
            2 => {
                if let Some(shim) = victim(scene, random)?
                    && kill(shim, |pid| cmdline(pid).contains("internal-shim"))
                {
                    count(&mut killed, "shim");
                }
            }
            _ => kill_child(scene, random, &mut killed)?,
        }
    }
    Ok(killed)
}

fn count(killed: &mut Tally<&'static str>, what: &'static str) {
    *killed.entry(what).or_insert(0) += 1;
}

/// Kills skiff in the middle of something, at times once more before it is up, and starts it.
fn kill_skiff(
    cluster: &Cluster,
    scene: &Scene,
    random: &mut Random,
    killed: &mut Tally<&'static str>,
) -> Result<()> {
    let aim = ACTIVITIES[usize::try_from(random.below(ACTIVITIES.len() as u64))?];
    for _ in 0..20 {
        if scene.is_under_way(aim) {
            break;
        }
        std::thread::sleep(Duration::from_millis(50));
    }
    std::thread::sleep(random.millis(0, 200));
    let pid = i32::try_from(cluster.pid()?)?;
    ensure!(
        kill(pid, |pid| is_server(pid, scene)),
        "skiff has ended by itself"
    );
    scene.note_kill();
    count(killed, SKIFF_KILLS);
    std::thread::sleep(random.millis(0, 300));
    if random.one_in(4) {
        let pause = random.millis(0, 900);
        let is_killed = std::thread::scope(|scope| -> Result<bool> {
            let start = scope.spawn(|| cluster.up());
            std::thread::sleep(pause);
            let is_killed = cluster
                .pid()
                .is_ok_and(|pid| kill(pid.cast_signed(), |pid| is_server(pid, scene)));
            match start.join() {
                // Its failure is what the kill was for.
                Ok(Err(error)) if !is_killed => Err(error),
                Ok(_) => Ok(is_killed),
                Err(_) => bail!("the start panicked"),
            }
        })?;
        if is_killed {
            scene.note_kill();
            count(killed, START_KILLS);
        }
    }
    cluster.up()?;
    Ok(())
}

fn is_server(pid: i32, scene: &Scene) -> bool {
    let cmdline = cmdline(pid);
    cmdline.contains("\0server\0") && cmdline.contains(&scene.name)
}

/// Children of a shim are containers, execs, pause processes, and helpers that are about to become one.
fn kill_child(scene: &Scene, random: &mut Random, killed: &mut Tally<&'static str>) -> Result<()> {
    let Some(shim) = victim(scene, random)? else {
        return Ok(());
    };
    let children = children(shim);
    if children.is_empty() {
        return Ok(());
    }
    let child = children[usize::try_from(random.below(children.len() as u64))?];
    let is_helper = cmdline(child).contains("internal-init");
    if kill(child, |pid| parent(pid) == Some(shim)) {
        count(
            killed,
            if is_helper {
                "pause process or helper"
            } else {
                "container"
            },
        );
    }
    Ok(())
}

/// A shim that may be killed.
fn victim(scene: &Scene, random: &mut Random) -> Result<Option<i32>> {
    let mut shims = shims(&scene.name)?;
    shims.retain(|shim| pod_of(&scene.name, *shim).is_some_and(|uid| scene.may_be_killed(&uid)));
    Ok(match shims.len() {
        0 => None,
        length => Some(shims[usize::try_from(random.below(length as u64))?]),
    })
}

/// The uid of a shim's pod, by what the runtime has noted of its sandbox.
fn pod_of(cluster: &str, shim: i32) -> Option<String> {
    let cmdline = cmdline(shim);
    let socket = cmdline.split('\0').nth(2)?;
    let prefix = socket.rsplit('/').next()?.strip_suffix(".sock")?.to_owned();
    let sandboxes = Cluster::data_dir(cluster).join("runtime/sandboxes");
    let mut entries = std::fs::read_dir(sandboxes).ok()?.flatten();
    let sandbox = entries.find(|entry| entry.file_name().to_string_lossy().starts_with(&prefix))?;
    let record = std::fs::read(sandbox.path().join("record.json")).ok()?;
    let record: serde_json::Value = serde_json::from_slice(&record).ok()?;
    let (_, uid) = record["cgroup_parent"].as_str()?.rsplit_once("/pod")?;
    Some(uid.to_owned())
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
