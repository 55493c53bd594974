//! Evicts pods that use more local disk than their limits allow, as upstream's eviction manager does whether or not the
//! node is short of disk: the size limits of emptyDir volumes, and the limits on ephemeral storage of containers and
//! of the whole pod. Limits of volumes in memory are the kernel's business.

use std::collections::BTreeMap;
use std::sync::Arc;

use k8s_openapi::api::core::v1::{Container, Pod};
use skiff_cri::v1;

use crate::kubelet::Kubelet;
use crate::observed::labels;
use crate::pod_state::PodState;
use crate::pods;
use crate::resources::{limit, value};

/// The reason of a pod that was ended for what it used.
pub const REASON: &str = "Evicted";
/// Such a pod is not given the time it asked for: it would go on using.
pub const GRACE: i64 = 1;

const RESOURCE: &str = "ephemeral-storage";

/// What a pod uses of the node's disk, in bytes.
#[derive(Debug, Default)]
pub(crate) struct Usage {
    /// Volumes that count as ephemeral storage, by name; those in memory are not measured.
    volumes: BTreeMap<String, u64>,
    /// Writable layer and logs, by the name of the container.
    pub(crate) containers: BTreeMap<String, u64>,
    /// What belongs to no container and no volume.
    rest: u64,
    /// Of volumes and logs.
    pub(crate) inodes: u64,
}

impl Usage {
    pub(crate) fn total(&self) -> u64 {
        // What cannot be measured counts as more than any limit.
        let named = self.volumes.values().chain(self.containers.values());
        named.fold(self.rest, |sum, used| sum.saturating_add(*used))
    }
}

/// The emptyDir volumes on the disk, with their limits.
fn empty_dirs(pod: &Pod) -> impl Iterator<Item = (&str, Option<(u64, &str)>)> {
    let volumes = pod.spec.iter().flat_map(|spec| spec.volumes.iter().flatten());
    volumes.filter_map(|volume| {
        let source = volume.empty_dir.as_ref()?;
        let on_disk = source.medium.as_deref().unwrap_or_default().is_empty();
        let limit = source.size_limit.as_ref().and_then(|limit| {
            let bytes = u64::try_from(value(limit)).ok().filter(|bytes| *bytes > 0)?;
            Some((bytes, limit.0.as_str()))
        });
        on_disk.then_some((volume.name.as_str(), limit))
    })
}

fn containers(pod: &Pod) -> impl Iterator<Item = &Container> {
    pod.spec.iter().flat_map(|spec| &spec.containers)
}

fn storage_limit(pod: &Pod) -> i64 {
    let spec = pod.spec.as_ref();
    spec.map_or(0, |spec| {
        skiff_pods::requests::spec_limits(spec).ephemeral_storage
    })
}

/// Whether the pod has a limit on ephemeral storage, of a container or of its own.
fn limits_storage(pod: &Pod) -> bool {
    storage_limit(pod) > 0
}

/// Why the pod is evicted, if it is: the signal by its name in metrics, and the message.
// COMPAT: upstream's order and messages; they end in a blank.
fn over_limit(pod: &Pod, usage: &Usage) -> Option<(&'static str, String)> {
    for (name, limit) in empty_dirs(pod) {
        if let Some((limit, written)) = limit
            && usage.volumes.get(name).is_some_and(|used| *used > limit)
        {
            let message = format!("Usage of EmptyDir volume {name:?} exceeds the limit {written:?}. ");
            return Some(("emptydirfs.limit", message));
        }
    }
    let total = storage_limit(pod);
    if u64::try_from(total).is_ok_and(|total| total > 0 && usage.total() > total) {
        let message = format!(
            "Pod ephemeral local storage usage exceeds the total limit of containers {}. ",
            in_binary_units(total)
        );
        return Some(("ephemeralpodfs.limit", message));
    }
    for container in containers(pod) {
        let Some(written) = limit(container.resources.as_ref(), RESOURCE) else {
            continue;
        };
        let used = usage.containers.get(&container.name).copied().unwrap_or(0);
        if u64::try_from(value(written)).is_ok_and(|limit| limit > 0 && used > limit) {
            let message = format!(
                "Container {} exceeded its local ephemeral storage limit {:?}. ",
                container.name, written.0
            );
            return Some(("ephemeralcontainerfs.limit", message));
        }
    }
    None
}

/// As upstream prints a sum of limits: `5Mi`, or the number itself where no unit divides it.
fn in_binary_units(bytes: i64) -> String {
    let units = ["", "Ki", "Mi", "Gi", "Ti", "Pi", "Ei"];
    let mut number = bytes;
    let mut unit = 0;
    while number != 0 && number % 1024 == 0 && unit + 1 < units.len() {
        number /= 1024;
        unit += 1;
    }
    format!("{number}{}", units[unit])
}

impl Kubelet {
    pub async fn evict_over_limits(self: &Arc<Self>) {
        let states: Vec<Arc<PodState>> = self
            .states()
            .into_iter()
            .filter(|state| !(state.is_deleted() || state.failed().is_some() || state.is_terminal()))
            .collect();
        // Writable layers are measured by the runtime, all at once; only where somebody has a limit on them.
        let mut stats = Vec::new();
        if states.iter().any(|state| limits_storage(&state.pod())) {
            match self.runtime.container_stats().await {
                Ok(measured) => stats = measured,
                Err(error) => tracing::warn!(%error, "cannot measure the writable layers of containers"),
            }
        }
        for state in states {
            let pod = state.pod();
            let limited = limits_storage(&pod);
            if !limited && !empty_dirs(&pod).any(|(_, limit)| limit.is_some()) {
                continue;
            }
            let layers = if limited {
                writable_layers(&stats, &state.uid)
            } else {
                BTreeMap::new()
            };
            let kubelet = self.clone();
            let measured = tokio::task::spawn_blocking(move || {
                let usage = kubelet.measure(&pod, layers);
                over_limit(&pod, &usage)
            });
            let Ok(Some((signal, message))) = measured.await else {
                continue;
            };
            self.metrics.actions.evicted(signal);
            self.recorder
                .event(&pods::reference(&state.pod()), "Warning", REASON, message.clone());
            state.limit_end_grace(GRACE);
            state.fail(REASON, message);
            state.terminate.cancel();
            state.wake.notify_one();
        }
    }

    /// `layers` are the writable layers of containers; logs and volumes are added here. Blocking.
    pub(crate) fn measure(&self, pod: &Pod, layers: BTreeMap<String, u64>) -> Usage {
        let files = self.walk_pod_files(pod, |volume| volume.is_ephemeral);
        let mut usage = Usage {
            volumes: BTreeMap::new(),
            containers: layers,
            rest: files.rest.bytes,
            inodes: files.rest.inodes,
        };
        for (name, used) in files.ephemeral_volumes() {
            usage.volumes.insert(name.to_owned(), used.bytes);
            usage.inodes = usage.inodes.saturating_add(used.inodes);
        }
        let main: Vec<&str> = containers(pod).map(|one| one.name.as_str()).collect();
        for (name, used) in files.logs {
            // Of other containers those count that run: the runtime has told what they wrote.
            if main.contains(&name.as_str()) || usage.containers.contains_key(&name) {
                let written = usage.containers.entry(name).or_default();
                *written = written.saturating_add(used.bytes);
                usage.inodes = usage.inodes.saturating_add(used.inodes);
            }
        }
        usage
    }
}

/// What the pod's containers have written, all instances of one name together.
fn writable_layers(stats: &[v1::ContainerStats], uid: &str) -> BTreeMap<String, u64> {
    let mut layers = BTreeMap::new();
    for one in stats {
        let Some(attributes) = &one.attributes else {
            continue;
        };
        if attributes.labels.get(labels::POD_UID).map(String::as_str) != Some(uid) {
            continue;
        }
        let Some(name) = attributes.labels.get(labels::CONTAINER_NAME) else {
            continue;
        };
        let used = one
            .writable_layer
            .as_ref()
            .and_then(|layer| layer.used_bytes.as_ref());
        let written: &mut u64 = layers.entry(name.clone()).or_default();
        *written = written.saturating_add(used.map_or(0, |used| used.value));
    }
    layers
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn check(spec: Value, empty_dirs: &[(&str, u64)], containers: &[(&str, u64)], expected: Option<&str>) {
        let pod: Pod = serde_json::from_value(json!({ "spec": spec })).unwrap();
        let owned = |list: &[(&str, u64)]| {
            list.iter()
                .map(|(name, used)| ((*name).to_owned(), *used))
                .collect()
        };
        let usage = Usage {
            volumes: owned(empty_dirs),
            containers: owned(containers),
            ..Usage::default()
        };
        let found = over_limit(&pod, &usage).map(|(_, message)| message);
        assert_eq!(found.as_deref(), expected, "{spec}");
    }

    #[test]
    fn what_cannot_be_measured_is_more_than_any_limit() {
        let unmeasurable = u64::MAX >> 1;
        let resources = json!({"limits": {"ephemeral-storage": "1Mi"}});
        let volumes = json!([{"name": "a", "emptyDir": {}}, {"name": "b", "emptyDir": {}}]);
        check(
            json!({"containers": [{"name": "c", "resources": resources}], "volumes": volumes}),
            &[("a", unmeasurable), ("b", unmeasurable)],
            &[("c", 8192)],
            Some("Pod ephemeral local storage usage exceeds the total limit of containers 1Mi. "),
        );
    }

    #[test]
    fn limits_of_volumes() {
        let volumes =
            |source: Value| json!({"containers": [], "volumes": [{"name": "a", "emptyDir": source}]});
        let over = Some("Usage of EmptyDir volume \"a\" exceeds the limit \"1Mi\". ");
        check(
            volumes(json!({"sizeLimit": "1Mi"})),
            &[("a", (1 << 20) + 1)],
            &[],
            over,
        );
        check(volumes(json!({"sizeLimit": "1Mi"})), &[("a", 1 << 20)], &[], None);
        check(
            volumes(json!({"sizeLimit": "1Mi", "medium": "Memory"})),
            &[("a", 2 << 20)],
            &[],
            None,
        );
        check(volumes(json!({})), &[("a", 2 << 20)], &[], None);
        check(volumes(json!({"sizeLimit": "0"})), &[("a", 2 << 20)], &[], None);
    }

    #[test]
    fn limits_of_containers_and_of_the_pod() {
        let container = |name: &str, limit: Option<&str>| {
            let limits = limit.map(|limit| json!({"ephemeral-storage": limit}));
            json!({"name": name, "resources": {"limits": limits.unwrap_or(json!({}))}})
        };
        let one =
            json!({"containers": [container("a", Some("5Mi"))], "volumes": [{"name": "v", "emptyDir": {}}]});
        let pod = Some("Pod ephemeral local storage usage exceeds the total limit of containers 5Mi. ");
        check(one.clone(), &[], &[("a", 5 << 20)], None);
        check(one.clone(), &[], &[("a", (5 << 20) + 1)], pod);
        check(one, &[("v", 1)], &[("a", 5 << 20)], pod);
        let two = json!({"containers": [container("a", Some("5Mi")), container("b", Some("7Mi"))]});
        let first = Some("Container a exceeded its local ephemeral storage limit \"5Mi\". ");
        check(two, &[], &[("a", 6 << 20), ("b", 0)], first);
        let none = json!({"containers": [container("a", None)]});
        check(none, &[], &[("a", 1 << 40)], None);
        assert_eq!(in_binary_units(1500), "1500");
        assert_eq!(in_binary_units(3 << 30), "3Gi");
    }

    #[test]
    fn layers_of_a_pod_are_told_apart() {
        let of = |uid: &str, name: &str, used: u64| v1::ContainerStats {
            attributes: Some(v1::ContainerAttributes {
                labels: [
                    (labels::POD_UID.to_owned(), uid.to_owned()),
                    (labels::CONTAINER_NAME.to_owned(), name.to_owned()),
                ]
                .into(),
                ..Default::default()
            }),
            writable_layer: Some(v1::FilesystemUsage {
                used_bytes: Some(v1::UInt64Value { value: used }),
                ..Default::default()
            }),
            ..Default::default()
        };
        let stats = [
            of("p", "a", 3),
            of("p", "a", 4),
            of("p", "b", 5),
            of("q", "a", 100),
        ];
        let layers = writable_layers(&stats, "p");
        assert_eq!(layers, [("a".to_owned(), 7), ("b".to_owned(), 5)].into());
    }
}
