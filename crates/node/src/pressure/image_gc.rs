//! Which images are removed: when the disk with the images is fuller than it should be, those that no container has used
//! for the longest time, until it is not.

use std::collections::{HashMap, HashSet};
use std::io;
use std::path::PathBuf;
use std::time::Duration;

use k8s_openapi::jiff::Timestamp;
use serde::{Deserialize, Serialize};
use skiff_cri::v1;

use super::thresholds::Observation;
use crate::image_name;
use crate::images::describe;
use crate::kubelet::Kubelet;
use crate::node_status::node_reference;

/// In percent of the disk: above the first images are removed, down to the second.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ImageLimits {
    pub high: u8,
    pub low: u8,
    /// A younger one is kept: somebody may be about to use it.
    pub least_age: Duration,
    /// One that was not used for this long is removed in any case.
    pub most_age: Option<Duration>,
}

impl Default for ImageLimits {
    /// Upstream's.
    fn default() -> Self {
        ImageLimits {
            high: 85,
            low: 80,
            least_age: Duration::from_secs(120),
            most_age: None,
        }
    }
}

/// When an image was first seen and last used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Seen {
    first: Timestamp,
    used: Timestamp,
}

/// What is known of images, also by earlier lives of this node.
#[derive(Debug, Default)]
pub struct ImageHistory {
    seen: HashMap<String, Seen>,
    /// `None`: it is not kept.
    file: Option<PathBuf>,
}

impl ImageHistory {
    pub fn restored(file: PathBuf) -> Self {
        let read = std::fs::read(&file).and_then(|bytes| Ok(serde_json::from_slice(&bytes)?));
        let seen = match read {
            Ok(seen) => seen,
            Err(error) if error.kind() == io::ErrorKind::NotFound => HashMap::new(),
            Err(error) => {
                tracing::warn!(%error, file = %file.display(), "cannot read when images were last used");
                HashMap::new()
            }
        };
        ImageHistory {
            seen,
            file: Some(file),
        }
    }

    fn save(&self) {
        let Some(file) = &self.file else { return };
        let saved = serde_json::to_vec(&self.seen)
            .map_err(io::Error::from)
            .and_then(|bytes| skiff_fs::write_atomically(file, &bytes, 0o644));
        if let Err(error) = saved {
            tracing::warn!(%error, file = %file.display(), "cannot keep when images were last used");
        }
    }

    /// Takes note of the images that there are, and of those that are in use.
    fn note(&mut self, images: &[v1::Image], used: &HashSet<String>, now: Timestamp) {
        self.seen
            .retain(|id, _| images.iter().any(|image| image.id == *id));
        for image in images {
            let seen = self.seen.entry(image.id.clone()).or_insert(Seen {
                first: now,
                used: now,
            });
            if used.contains(&image.id) {
                seen.used = now;
            }
        }
    }

    /// The images that may go, the longest unused first.
    fn unused<'a>(
        &self,
        images: &'a [v1::Image],
        used: &HashSet<String>,
        least_age: Duration,
        now: Timestamp,
    ) -> Vec<(&'a v1::Image, Duration)> {
        let mut unused: Vec<(&v1::Image, Seen)> = images
            .iter()
            .filter(|image| !image.pinned && !used.contains(&image.id))
            .filter_map(|image| Some((image, *self.seen.get(&image.id)?)))
            .filter(|(_, seen)| between(seen.first, now) >= least_age)
            .collect();
        unused.sort_by_key(|(_, seen)| (seen.used, seen.first));
        let idle = |seen: Seen| between(seen.used, now);
        unused
            .into_iter()
            .map(|(image, seen)| (image, idle(seen)))
            .collect()
    }
}

/// Nothing where the clock was set back.
fn between(earlier: Timestamp, later: Timestamp) -> Duration {
    Duration::try_from(later.duration_since(earlier)).unwrap_or_default()
}

/// How many bytes must go so that the disk is as full as it may be.
fn excess(disk: Observation, limits: &ImageLimits) -> i64 {
    if disk.capacity <= 0 || limits.high >= 100 {
        return 0;
    }
    let percent = |share: u8| disk.capacity / 100 * i64::from(share);
    let used = disk.capacity - disk.available.clamp(0, disk.capacity);
    if used < percent(limits.high) {
        return 0;
    }
    (used - percent(limits.low)).max(0)
}

impl Kubelet {
    /// Removes images by the clock: what the disk asks for, and what is too old. Not the latter right after a start: a
    /// machine that was off for long is about to start its pods.
    pub(super) async fn collect_images(&self, disk: Option<Observation>, is_first: bool) {
        let limits = self.config.image_limits;
        let wanted = disk.map_or(0, |disk| excess(disk, &limits));
        let Ok(unused) = self.unused_images(limits.least_age).await else {
            return;
        };
        let mut freed = 0;
        for (image, idle) in unused {
            let too_old = !is_first && limits.most_age.is_some_and(|most| idle > most);
            if freed >= wanted && !too_old {
                continue;
            }
            freed += self.remove_image(&image).await;
        }
        if freed < wanted {
            let message = format!(
                "Failed to garbage collect required amount of images. Attempted to free {wanted} bytes, but only found {freed} bytes eligible to free."
            );
            let node = node_reference(&self.config.node_name);
            self.recorder
                .event(&node, "Warning", "FreeDiskSpaceFailed", message);
        }
    }

    /// Removes all images that nobody uses: the node is short of disk.
    pub(super) async fn remove_unused_images(&self) {
        let Ok(unused) = self.unused_images(self.config.image_limits.least_age).await else {
            return;
        };
        for (image, _) in unused {
            self.remove_image(&image).await;
        }
    }

    async fn unused_images(&self, least_age: Duration) -> Result<Vec<(v1::Image, Duration)>, ()> {
        let failed = |status: skiff_cri::Status| {
            tracing::warn!(error = describe(&status), "cannot look for unused images");
        };
        let images = self.runtime.images().await.map_err(failed)?;
        let mut used = self.runtime.used_images().await.map_err(failed)?;
        used.extend(self.images_of_volumes(&images));
        self.images
            .records
            .keep_only(&images.iter().map(|image| image.id.clone()).collect());
        let now = Timestamp::now();
        let mut history = self.image_history.lock();
        history.note(&images, &used, now);
        history.save();
        let unused = history.unused(&images, &used, least_age, now);
        Ok(unused
            .into_iter()
            .map(|(image, idle)| (image.clone(), idle))
            .collect())
    }

    /// Images that pods have as volumes: no container runs them.
    fn images_of_volumes(&self, images: &[v1::Image]) -> Vec<String> {
        let mut names: HashSet<String> = HashSet::new();
        for state in self.states() {
            let pod = state.pod();
            let volumes = pod.spec.iter().flat_map(|spec| spec.volumes.iter().flatten());
            let sources = volumes.filter_map(|volume| volume.image.as_ref()?.reference.clone());
            names.extend(sources.filter_map(|name| image_name::with_default_tag(&name).ok()));
        }
        let is_named = |image: &&v1::Image| {
            let mut own = image
                .repo_tags
                .iter()
                .chain(&image.repo_digests)
                .chain([&image.id]);
            own.any(|name| names.contains(name))
        };
        images
            .iter()
            .filter(is_named)
            .map(|image| image.id.clone())
            .collect()
    }

    /// The bytes that this freed.
    async fn remove_image(&self, image: &v1::Image) -> i64 {
        let name = image.repo_tags.first().unwrap_or(&image.id);
        match self.runtime.remove_image(&image.id).await {
            Ok(()) => {
                tracing::info!(
                    image = name,
                    bytes = image.size,
                    "removed an image that nobody uses"
                );
                i64::try_from(image.size).unwrap_or(i64::MAX)
            }
            Err(status) => {
                tracing::warn!(image = name, error = describe(&status), "cannot remove an image");
                0
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn image(id: &str) -> v1::Image {
        v1::Image {
            id: id.to_owned(),
            ..Default::default()
        }
    }

    #[test]
    fn the_longest_unused_goes_first() {
        let pinned = v1::Image {
            pinned: true,
            ..image("pinned")
        };
        let images = [image("a"), image("b"), image("c"), pinned];
        let used = |ids: &[&str]| -> HashSet<String> { ids.iter().map(|id| (*id).to_owned()).collect() };
        let start = Timestamp::from_second(1_000_000).unwrap();
        let after = |seconds: u64| start + Duration::from_secs(seconds);
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("image_history");
        let mut history = ImageHistory::restored(file.clone());
        history.note(&images[..2], &used(&["a", "b"]), start);
        history.note(&images, &used(&["b"]), after(100));
        // Another life knows the same.
        history.save();
        let mut history = ImageHistory::restored(file.clone());
        history.note(&images, &used(&["c"]), after(200));
        let unused = |used: &HashSet<String>, at: u64| -> Vec<String> {
            let unused = history.unused(&images, used, Duration::from_secs(120), after(at));
            unused.into_iter().map(|(image, _)| image.id.clone()).collect()
        };
        assert_eq!(unused(&used(&["c"]), 210), ["a", "b"]);
        assert_eq!(unused(&used(&[]), 210), ["a", "b"], "c is too young");
        assert_eq!(unused(&used(&[]), 220), ["a", "b", "c"]);
        assert_eq!(unused(&used(&["a", "b", "c"]), 220), Vec::<String>::new());
        history.note(&images[..1], &used(&[]), after(300));
        assert_eq!(history.seen.len(), 1, "what is gone is forgotten");
        assert_eq!(between(after(9), start), Duration::ZERO);
        std::fs::write(&file, "{").unwrap();
        assert!(ImageHistory::restored(file).seen.is_empty());
    }

    #[test]
    fn only_a_full_disk_asks_for_room() {
        let limits = ImageLimits::default();
        let disk = |available: i64| Observation {
            available,
            capacity: 1000,
        };
        assert_eq!(excess(disk(151), &limits), 0);
        assert_eq!(excess(disk(150), &limits), 50);
        assert_eq!(excess(disk(0), &limits), 200);
        assert_eq!(
            excess(
                Observation {
                    available: 0,
                    capacity: 0
                },
                &limits
            ),
            0
        );
    }
}
