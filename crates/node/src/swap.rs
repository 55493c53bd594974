//! Swap: whether the machine has it on, and what containers get of it. It writes no limit: what it decides is a part of a
//! container's resources, which the runtime applies.

use std::io;
use std::path::Path;

use k8s_openapi::api::core::v1::{Container, Pod};
use skiff_cri::v1;

use crate::kubelet::Kubelet;
use crate::node_status::node_reference;
use crate::preemption::is_critical;
use crate::resources::{QosClass, limit_value, qos_class, request, value};

/// The file of cgroup v2 that limits swap by itself.
const V2_LIMIT: &str = "memory.swap.max";
/// That of v1 limits memory and swap together.
const V1_LIMIT: &str = "memory.memsw.limit_in_bytes";

/// Why a resize is infeasible.
pub const NOT_RESIZABLE: &str = "In-place resize of containers with swap is not supported.";
const VOLUMES_MAY_SWAP: &str = "The tmpfs noswap option is not supported. Memory-backed volumes (e.g. secrets, emptyDirs, etc.) \
     might be swapped to disk and should no longer be considered secure.";
const NOT_COUNTED: &str = "Swap is on and the kernel does not count it by cgroup, so containers may swap without a limit. Turn swap \
     off (swapoff -a), or turn the counting on (kernel parameter swapaccount=1).";

/// `memorySwap.swapBehavior`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum SwapBehavior {
    #[default]
    NoSwap,
    LimitedSwap,
}

impl SwapBehavior {
    pub fn parse(text: &str) -> Option<Self> {
        match text {
            "" | "NoSwap" => Some(SwapBehavior::NoSwap),
            "LimitedSwap" => Some(SwapBehavior::LimitedSwap),
            _ => None,
        }
    }

    pub fn as_str(self) -> &'static str {
        match self {
            SwapBehavior::NoSwap => "NoSwap",
            SwapBehavior::LimitedSwap => "LimitedSwap",
        }
    }
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SwapConfig {
    /// The node does not start while swap is on.
    pub fail_on: bool,
    pub behavior: SwapBehavior,
}

/// How the kernel counts the swap of a cgroup.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SwapAccounting {
    None,
    V1,
    V2,
}

impl SwapAccounting {
    pub fn v1(memory: &Path) -> Self {
        if memory.join(V1_LIMIT).exists() {
            SwapAccounting::V1
        } else {
            SwapAccounting::None
        }
    }

    /// The root of the hierarchy has no such file: this asks a cgroup below it.
    pub fn v2(cgroup: &Path) -> Self {
        if cgroup.join(V2_LIMIT).exists() {
            SwapAccounting::V2
        } else {
            SwapAccounting::None
        }
    }
}

/// Whether the machine has swap on.
pub fn is_on() -> io::Result<bool> {
    match std::fs::read_to_string("/proc/swaps") {
        Ok(swaps) => Ok(lists_swap(&swaps)),
        // A kernel without swap.
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
        Err(error) => Err(error),
    }
}

/// The first line is a heading.
fn lists_swap(swaps: &str) -> bool {
    swaps.trim().lines().count() > 1
}

/// Whether a tmpfs can be kept out of swap.
fn tmpfs_has_noswap() -> bool {
    use rustix::mount::{FsOpenFlags, fsconfig_set_flag, fsopen};
    fsopen("tmpfs", FsOpenFlags::FSOPEN_CLOEXEC)
        .and_then(|tmpfs| fsconfig_set_flag(&tmpfs, "noswap"))
        .is_ok()
}

impl Kubelet {
    /// Says what the node cannot keep out of the swap that the machine has on.
    pub fn tell_of_swap(&self) {
        let node = node_reference(&self.config.node_name);
        tracing::info!(behavior = self.config.swap.behavior.as_str(), accounting = ?self.swap.accounting, "swap is on");
        let tell = |reason: &str, message: &str| {
            tracing::warn!("{message}");
            self.recorder.event(&node, "Warning", reason, message.to_owned());
        };
        if !tmpfs_has_noswap() {
            tell("PossibleMemoryBackedVolumesOnDisk", VOLUMES_MAY_SWAP);
        }
        if self.swap.accounting == SwapAccounting::None {
            tell("SwapNotLimited", NOT_COUNTED);
        }
    }
}

/// What this node lets containers have of swap.
#[derive(Clone, Copy, Debug)]
pub struct SwapControl {
    pub accounting: SwapAccounting,
    pub behavior: SwapBehavior,
    /// Bytes that the machine has.
    pub memory: i64,
    pub capacity: i64,
}

impl SwapControl {
    /// What is so for the container, whatever is configured. COMPAT: a container of a Burstable pod that asks for less
    /// memory than its limit; others have none.
    pub fn behavior_of(&self, pod: &Pod, container: &Container) -> SwapBehavior {
        let resources = container.resources.as_ref();
        let requested = request(resources, "memory").map_or(0, value);
        let swaps = self.behavior == SwapBehavior::LimitedSwap
            && self.accounting == SwapAccounting::V2
            && qos_class(pod) == QosClass::Burstable
            && requested != limit_value(resources, "memory")
            && !is_critical(pod);
        if swaps {
            SwapBehavior::LimitedSwap
        } else {
            SwapBehavior::NoSwap
        }
    }

    /// Bytes of swap.
    fn limit(&self, pod: &Pod, container: &Container) -> i64 {
        if self.behavior_of(pod, container) == SwapBehavior::NoSwap {
            return 0;
        }
        let requested = request(container.resources.as_ref(), "memory").map_or(0, value);
        if self.memory <= 0 || requested > self.memory {
            return 0;
        }
        // COMPAT: upstream reckons in floating point.
        (requested as f64 / self.memory as f64 * self.capacity as f64) as i64
    }

    /// Adds the limit to what the container gets. COMPAT: on v1 a container without a limit of memory has none of swap.
    pub fn apply(&self, pod: &Pod, container: &Container, resources: &mut v1::LinuxContainerResources) {
        match self.accounting {
            SwapAccounting::None => {}
            SwapAccounting::V1 => resources.memory_swap_limit_in_bytes = resources.memory_limit_in_bytes,
            SwapAccounting::V2 => {
                let limit = self.limit(pod, container).to_string();
                resources.unified.insert(V2_LIMIT.to_owned(), limit);
            }
        }
    }

    /// Whether a resize would change the swap of a running container.
    pub fn refuses_resize(&self, wanted: &Pod, allocated: &Pod) -> bool {
        let Some(spec) = &wanted.spec else { return false };
        let mut containers = spec
            .containers
            .iter()
            .chain(spec.init_containers.iter().flatten());
        containers.any(|new| {
            let Some(old) = crate::pods::container(allocated, &new.name) else {
                return false;
            };
            let requested =
                |container: &Container| request(container.resources.as_ref(), "memory").map_or(0, value);
            let policies = old.resize_policy.iter().flatten();
            let restarts = policies
                .filter(|policy| policy.resource_name == "memory")
                .any(|policy| policy.restart_policy == "RestartContainer");
            let swaps = self.behavior_of(wanted, new) != SwapBehavior::NoSwap
                || self.behavior_of(allocated, &old) != SwapBehavior::NoSwap;
            requested(new) != requested(&old) && !restarts && swaps
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn pod(resources: Value, more: Value) -> Pod {
        let mut spec = json!({"containers": [{"name": "c", "resources": resources}, {"name": "other"}]});
        for (name, value) in more.as_object().unwrap() {
            spec[name] = value.clone();
        }
        serde_json::from_value(json!({"metadata": {"name": "p"}, "spec": spec})).unwrap()
    }

    fn control(accounting: SwapAccounting, behavior: SwapBehavior) -> SwapControl {
        SwapControl {
            accounting,
            behavior,
            memory: 8 << 30,
            capacity: 4 << 30,
        }
    }

    /// What the runtime is told: the limit of v2, and that of v1.
    fn told(control: &SwapControl, pod: &Pod) -> (Option<String>, i64) {
        let container = &pod.spec.as_ref().unwrap().containers[0];
        let mut resources = v1::LinuxContainerResources {
            memory_limit_in_bytes: limit_value(container.resources.as_ref(), "memory"),
            ..Default::default()
        };
        control.apply(pod, container, &mut resources);
        let v2 = resources.unified.get(V2_LIMIT).cloned();
        (v2, resources.memory_swap_limit_in_bytes)
    }

    #[test]
    fn what_is_on() {
        let heading = "Filename\tType\tSize\tUsed\tPriority\n";
        assert!(!lists_swap(heading) && !lists_swap(""));
        assert!(lists_swap(&format!(
            "{heading}/dev/dm-1 partition 16760828 0 -2\n"
        )));
    }

    #[test]
    fn no_swap_by_default() {
        let burstable = pod(
            json!({"requests": {"memory": "1Gi"}, "limits": {"memory": "2Gi"}}),
            json!({}),
        );
        let best_effort = pod(json!({}), json!({}));
        let check = |accounting, pod: &Pod, expected: (Option<&str>, i64)| {
            let (v2, v1) = told(&control(accounting, SwapBehavior::default()), pod);
            assert_eq!((v2.as_deref(), v1), expected, "{accounting:?}");
        };
        check(SwapAccounting::V2, &burstable, (Some("0"), 0));
        check(SwapAccounting::V2, &best_effort, (Some("0"), 0));
        check(SwapAccounting::V1, &burstable, (None, 2 << 30));
        check(SwapAccounting::V1, &best_effort, (None, 0));
        check(SwapAccounting::None, &burstable, (None, 0));
    }

    #[test]
    fn limited_swap_is_for_burstable_pods() {
        let check = |resources: Value, more: Value, expected: i64| {
            let control = control(SwapAccounting::V2, SwapBehavior::LimitedSwap);
            let (v2, _) = told(&control, &pod(resources, more));
            assert_eq!(v2, Some(expected.to_string()));
        };
        let part = json!({"requests": {"memory": "1Gi"}});
        // An eighth of the memory, and so of the swap.
        check(part.clone(), json!({}), 512 << 20);
        check(
            json!({"requests": {"memory": "1Gi"}, "limits": {"memory": "1Gi"}}),
            json!({}),
            0,
        );
        check(json!({"requests": {"cpu": "1"}}), json!({}), 0);
        check(json!({}), json!({}), 0);
        check(part.clone(), json!({"priority": 2_000_000_000}), 0);
        check(json!({"requests": {"memory": "9Gi"}}), json!({}), 0);
        let v1 = control(SwapAccounting::V1, SwapBehavior::LimitedSwap);
        assert_eq!(told(&v1, &pod(part, json!({}))), (None, 0));
    }

    #[test]
    fn what_swaps_is_not_resized() {
        let of = |memory: &str, policy: Value| {
            let mut pod = pod(json!({"requests": {"memory": memory}}), json!({}));
            pod.spec.as_mut().unwrap().containers[0].resize_policy = serde_json::from_value(policy).unwrap();
            pod
        };
        let restart = json!([{"resourceName": "memory", "restartPolicy": "RestartContainer"}]);
        let control = |behavior| control(SwapAccounting::V2, behavior);
        let limited = control(SwapBehavior::LimitedSwap);
        assert!(limited.refuses_resize(&of("2Gi", Value::Null), &of("1Gi", Value::Null)));
        assert!(!limited.refuses_resize(&of("1Gi", Value::Null), &of("1Gi", Value::Null)));
        assert!(!limited.refuses_resize(&of("2Gi", restart.clone()), &of("1Gi", restart)));
        let none = control(SwapBehavior::NoSwap);
        assert!(!none.refuses_resize(&of("2Gi", Value::Null), &of("1Gi", Value::Null)));
    }
}
