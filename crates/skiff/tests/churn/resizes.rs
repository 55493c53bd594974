//! A pod that is resized in place all the time: what the API, the node's own record and the kernel say of it must agree
//! whenever nobody changes it, and none of its containers may be restarted.

use crate::residents::LABEL;
use crate::scene::{Activity, QUIET_PATIENCE, Scene, insist};
use anyhow::{Context, Result, ensure};
use k8s_openapi::api::core::v1::Pod;
use kube::api::{Patch, PatchParams};
use serde_json::{Value, json};
use skiff_testkit::{BUSYBOX, Cluster, Random, eventually, expect_eq};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use tokio::runtime::Runtime;

pub(crate) const NAME: &str = "resized";
const CONTAINERS: [&str; 2] = ["one", "two"];

/// Limits of so many hundredths of a CPU and MiB, with requests of half of them.
fn resources(cpu: u64, memory: u64) -> Value {
    json!({"requests": {"cpu": format!("{}m", cpu * 10), "memory": format!("{memory}Mi")},
        "limits": {"cpu": format!("{}m", cpu * 20), "memory": format!("{}Mi", memory * 2)}})
}

pub(crate) fn pod() -> Value {
    let containers = CONTAINERS.map(
        |name| json!({"name": name, "image": BUSYBOX, "command": ["sleep", "100000"], "resources": resources(3, 16)}),
    );
    json!({"metadata": {"name": NAME, "labels": {LABEL: "yes"}},
        "spec": {"terminationGracePeriodSeconds": 0, "containers": containers}})
}

/// Resizes until told to stop, sometimes before the last resize is through; how often.
pub(crate) async fn work(scene: Arc<Scene>, mut random: Random) -> Result<usize> {
    let (pods, parameters) = (scene.pods(), PatchParams::default());
    let mut done = 0;
    while !scene.is_over() {
        let mut wanted = || resources(1 + random.below(8), 16 + random.below(48));
        let containers = CONTAINERS.map(|name| json!({"name": name, "resources": wanted()}));
        let patch = Patch::Strategic(json!({"spec": {"containers": containers}}));
        let resize = scene.during(Activity::Resize);
        insist("the resize", || {
            pods.patch_subresource("resize", NAME, &parameters, &patch)
        })
        .await?;
        done += 1;
        if random.one_in(3) {
            tokio::time::sleep(random.millis(0, 200)).await;
        } else {
            scene
                .wait(NAME, "resized", |pod| {
                    Ok(agrees(pod.context("it is gone")?).is_ok())
                })
                .await?;
        }
        drop(resize);
        tokio::time::sleep(random.millis(0, 400)).await;
    }
    Ok(done)
}

/// The status shows what the spec asks for, as allocated and as in effect.
fn agrees(pod: &Pod) -> Result<()> {
    let pod = serde_json::to_value(pod)?;
    let (spec, status) = (&pod["spec"], &pod["status"]);
    let conditions = status["conditions"].as_array().context("conditions")?;
    let resizing = conditions.iter().find(|one| {
        one["type"]
            .as_str()
            .is_some_and(|name| name.starts_with("PodResize"))
    });
    ensure!(resizing.is_none(), "{resizing:?}");
    expect_eq(&status["observedGeneration"], &pod["metadata"]["generation"])?;
    for container in spec["containers"].as_array().context("containers")? {
        let one = status_of(status, container)?;
        expect_eq(&one["resources"], &container["resources"])?;
        expect_eq(&one["allocatedResources"], &container["resources"]["requests"])?;
    }
    Ok(())
}

fn status_of<'a>(status: &'a Value, container: &Value) -> Result<&'a Value> {
    let mut statuses = status["containerStatuses"].as_array().into_iter().flatten();
    statuses
        .find(|one| one["name"] == container["name"])
        .context("no status of the container")
}

/// Nobody resizes any more: API, record and kernel agree.
pub(crate) fn check(runtime: &Runtime, scene: &Scene) -> Result<()> {
    eventually("the resize is through everywhere", QUIET_PATIENCE, || {
        let pod = runtime.block_on(scene.pods().get(NAME))?;
        agrees(&pod)?;
        let pod = serde_json::to_value(pod)?;
        let uid = pod["metadata"]["uid"].as_str().context("a uid")?;
        let folder = Cluster::data_dir(&scene.name).join("kubelet/pods").join(uid);
        let record: Value = serde_json::from_slice(&std::fs::read(folder.join("resources.json"))?)?;
        let mut sum = Limits::default();
        for container in pod["spec"]["containers"].as_array().context("containers")? {
            let name = container["name"].as_str().context("a name")?;
            expect_eq(&record["allocated"]["containers"][name], &container["resources"])?;
            let id = status_of(&pod["status"], container)?["containerID"].as_str();
            let id = id.and_then(|id| id.split_once("://")).context("an id")?.1;
            let expected = Limits::of(&container["resources"]["limits"])?;
            expect_eq(Limits::in_force(&scene.name, id)?, expected)?;
            sum.memory += expected.memory;
            sum.cpu += expected.cpu;
        }
        expect_eq(Limits::in_force(&scene.name, &format!("pod{uid}"))?, sum)
    })
}

/// Bytes, and microseconds of CPU in a tenth of a second.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Limits {
    memory: u64,
    cpu: u64,
}

impl Limits {
    /// As [`resources`] writes them.
    fn of(limits: &Value) -> Result<Self> {
        let number = |name: &str, unit: &str| -> Result<u64> {
            let text = limits[name].as_str().context("a limit")?;
            Ok(text
                .strip_suffix(unit)
                .with_context(|| text.to_owned())?
                .parse()?)
        };
        Ok(Limits {
            memory: number("memory", "Mi")? << 20,
            cpu: number("cpu", "m")? * 100,
        })
    }

    /// What the kernel holds the cgroup of this name to.
    fn in_force(cluster: &str, group: &str) -> Result<Self> {
        let find = |controller: &str| {
            let root = Path::new("/sys/fs/cgroup").join(controller);
            find_folder(&root.join(format!("skiff-{cluster}")), group)
        };
        if let (Some(memory), Some(cpu)) = (find("memory"), find("cpu")) {
            return Ok(Limits {
                memory: read(&memory.join("memory.limit_in_bytes"))?.parse()?,
                cpu: read(&cpu.join("cpu.cfs_quota_us"))?.parse()?,
            });
        }
        let group = find("").with_context(|| format!("there is no cgroup {group}"))?;
        let quota = read(&group.join("cpu.max"))?;
        Ok(Limits {
            memory: read(&group.join("memory.max"))?.parse()?,
            cpu: quota.split(' ').next().unwrap_or_default().parse()?,
        })
    }
}

fn read(file: &Path) -> Result<String> {
    let text = std::fs::read_to_string(file).with_context(|| file.display().to_string())?;
    Ok(text.trim().to_owned())
}

fn find_folder(below: &Path, name: &str) -> Option<PathBuf> {
    let entries = std::fs::read_dir(below).ok()?.flatten();
    let mut folders = entries.filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()));
    folders.find_map(|entry| match entry.file_name().to_str() == Some(name) {
        true => Some(entry.path()),
        false => find_folder(&entry.path(), name),
    })
}
