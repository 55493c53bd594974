//! Images that are pulled from a registry on loopback while skiff is killed, used, and removed again. What a pull brought is
//! whole, and one that was cut off leaves nothing.

use crate::scene::{Activity, Scene, ensure_no_restart, is_ready};
use anyhow::{Context, Result, bail, ensure};
use kube::api::DeleteParams;
use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use skiff_testkit::{Random, Registry, ballast_archive};
use std::path::Path;
use std::process::Command;
use std::sync::Arc;

/// Large ones; there is a small one more.
const IMAGES: u64 = 2;
/// Enough for a pull to last some tenths of a second.
const SIZE: usize = 24 << 20;

#[derive(Clone)]
pub(crate) struct Image {
    reference: String,
    /// Of its file `/ballast`.
    sum: String,
}

/// Pushes the images, the small one last.
pub(crate) fn prepare(registry: &Registry, dir: &Path, seed: u64) -> Result<Vec<Image>> {
    let one = |number: u64| {
        let size = if number < IMAGES { SIZE } else { 8 };
        let ballast = noise(seed.wrapping_add(number), size);
        let archive = ballast_archive(dir, &ballast)?;
        let reference = registry.push(&archive, &format!("churn/ballast:{number}"))?;
        let sum = Sha256::digest(&ballast);
        let sum = sum.iter().map(|byte| format!("{byte:02x}")).collect();
        Ok(Image { reference, sum })
    };
    (0..=IMAGES).map(one).collect()
}

/// Bytes that do not become smaller when they are packed.
fn noise(seed: u64, size: usize) -> Vec<u8> {
    let mut state = seed.wrapping_mul(2).wrapping_add(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state.to_le_bytes()
    };
    (0..size / 8).flat_map(|_| next()).collect()
}

/// Pulls, uses and removes images until told to stop, each pod with a name of its own after `name`; how many pods.
pub(crate) async fn work(
    scene: Arc<Scene>,
    name: String,
    skiff: &'static str,
    images: Vec<Image>,
    mut random: Random,
) -> Result<usize> {
    for number in 0.. {
        if scene.is_over() {
            return Ok(number);
        }
        let image = &images[usize::try_from(random.below(IMAGES))?];
        let name = format!("{name}-{number}");
        one_pod(&scene, &name, image, &mut random)
            .await
            .with_context(|| format!("pod {name}"))?;
        let (cluster, reference) = (scene.name.clone(), image.reference.clone());
        tokio::task::spawn_blocking(move || remove(skiff, &cluster, &reference)).await??;
    }
    bail!("there are no more numbers")
}

async fn one_pod(scene: &Arc<Scene>, name: &str, image: &Image, random: &mut Random) -> Result<()> {
    let pull = scene.during(Activity::ImagePull);
    let uid = scene.create(pod(name, image)).await?;
    if random.one_in(4) {
        // In the middle of the pull.
        tokio::time::sleep(random.millis(0, 800)).await;
    } else {
        let is_well = |pod: Option<&_>| {
            let pod = pod.context("it is gone, which nobody asked for")?;
            // What the image brought is not what was pushed.
            ensure_no_restart(pod)?;
            Ok(is_ready(pod))
        };
        scene.wait(name, "ready", is_well).await?;
    }
    drop(pull);
    scene
        .delete(name, &DeleteParams::default().grace_period(1))
        .await?;
    scene.wait_gone(name, &uid).await
}

fn pod(name: &str, image: &Image) -> Value {
    let script = format!(
        "trap 'exit 0' TERM; busybox sha256sum /ballast | grep -q {} || exit 7; echo >/checked; \
         while true; do sleep 0.1; done",
        image.sum
    );
    let probe = json!({"exec": {"command": ["cat", "/checked"]}, "periodSeconds": 1, "timeoutSeconds": 20});
    json!({"metadata": {"name": name}, "spec": {"containers": [{"name": "c", "image": image.reference,
        "imagePullPolicy": "IfNotPresent", "command": ["sh", "-c", script], "readinessProbe": probe}]}})
}

/// Removes an image from the node, whether skiff runs or not.
fn remove(skiff: &str, cluster: &str, reference: &str) -> Result<()> {
    match skiff_image(skiff, cluster, &["rm", reference]) {
        Err(error) if error.to_string().contains("there is no image") => Ok(()),
        removed => removed,
    }
}

/// Removes those that a pull has brought whose pod was deleted meanwhile, and the layers that a pull which was cut off has
/// left for its next try: they go when any image is removed.
pub(crate) fn remove_all(skiff: &str, cluster: &str, images: &[Image]) -> Result<()> {
    let small = images.last().context("an image")?;
    skiff_image(skiff, cluster, &["pull", &small.reference])?;
    images
        .iter()
        .try_for_each(|image| remove(skiff, cluster, &image.reference))
}

fn skiff_image(skiff: &str, cluster: &str, args: &[&str]) -> Result<()> {
    let mut command = Command::new(skiff);
    let output = command.arg("image").args(args).args(["--name", cluster]).output();
    let output = output.context("skiff image")?;
    ensure!(
        output.status.success(),
        "skiff image {args:?}: {}",
        String::from_utf8_lossy(&output.stderr)
    );
    Ok(())
}
