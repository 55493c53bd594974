//! Removes containers that have ended: old instances beyond what is kept for `kubectl logs --previous`, and when the disk
//! runs short, everything of pods that have ended. Statuses stay: they are the API's. The choice is pure.

use std::collections::{HashMap, HashSet};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::jiff::Timestamp;

use crate::images::describe;
use crate::kubelet::Kubelet;
use crate::observed::{ContainerState, ObservedPod};
use crate::pod_state::PodState;
use crate::status::is_terminal;

/// How many containers that have ended are kept. Upstream's flags, with its defaults.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ContainerGcPolicy {
    /// One that was made more recently is kept.
    pub min_age: Duration,
    /// Older instances of one container; negative: all.
    pub max_per_container: i32,
    /// Of the whole node; negative: as many as there are.
    pub max_containers: i32,
}

impl Default for ContainerGcPolicy {
    fn default() -> Self {
        ContainerGcPolicy {
            min_age: Duration::ZERO,
            max_per_container: 1,
            max_containers: -1,
        }
    }
}

/// What is looked at: a pod, and whether it has ended for good.
pub(crate) struct Candidate {
    pub(crate) observed: Arc<ObservedPod>,
    pub(crate) is_ended: bool,
}

/// When a container was made, and its id if it may go.
type Kept<'a> = (i64, Option<&'a str>);

/// The ids of the containers to remove. `everything`: nothing of pods that have ended is kept. The newest instance of a
/// container in a pod that lives is always kept: by it the pod knows what to do next.
pub(crate) fn choose(
    policy: &ContainerGcPolicy,
    pods: &[Candidate],
    everything: bool,
    now: Timestamp,
) -> HashSet<String> {
    let min_age = i64::try_from(policy.min_age.as_nanos()).unwrap_or(i64::MAX);
    let oldest_kept = i64::try_from(now.as_nanosecond())
        .unwrap_or(i64::MAX)
        .saturating_sub(min_age);
    let mut chosen = HashSet::new();
    // What has ended and stays for now, by pod and name of the container.
    let mut kept: HashMap<(usize, &str), Vec<Kept<'_>>> = HashMap::new();
    for (place, pod) in pods.iter().enumerate() {
        let mut older: HashMap<&str, i32> = HashMap::new();
        for container in &pod.observed.containers {
            let instances = older.entry(&container.name).or_insert(-1);
            *instances += 1;
            if container.state == ContainerState::Running {
                continue;
            }
            let is_old_enough = container.created_at <= oldest_kept;
            let is_newest = *instances == 0;
            let beyond = policy.max_per_container >= 0 && *instances > policy.max_per_container;
            let may_go =
                is_old_enough && (pod.is_ended || !is_newest) && container.state == ContainerState::Exited;
            if may_go && (beyond || (everything && pod.is_ended)) {
                chosen.insert(container.id.clone());
            } else {
                let unit = kept.entry((place, &container.name)).or_default();
                unit.push((container.created_at, may_go.then_some(container.id.as_str())));
            }
        }
    }
    let Ok(most) = usize::try_from(policy.max_containers) else {
        return chosen;
    };
    let count: usize = kept.values().map(Vec::len).sum();
    if count <= most {
        return chosen;
    }
    // The same number of each container first, then the oldest.
    let share = (most / kept.len().max(1)).max(1);
    let mut left = count;
    for unit in kept.values_mut() {
        unit.sort_by_key(|(made, _)| std::cmp::Reverse(*made));
        for (_, id) in unit.iter().skip(share) {
            if let Some(id) = id {
                chosen.insert((*id).to_owned());
                left -= 1;
            }
        }
    }
    let mut rest: Vec<(i64, &str)> = kept
        .values()
        .flatten()
        .filter_map(|(made, id)| Some((*made, (*id)?)))
        .filter(|(_, id)| !chosen.contains(*id))
        .collect();
    rest.sort_unstable();
    for (_, id) in rest.into_iter().take(left.saturating_sub(most)) {
        chosen.insert(id.to_owned());
    }
    chosen
}

/// Whether another life of the node would know without the pod's containers that it must not run again: by its status in the
/// API, which says nothing of that for static pods.
fn is_reported(state: &PodState) -> bool {
    state.is_deleted() || (!state.is_static() && is_terminal(state.pod().status.as_ref()))
}

impl Kubelet {
    /// Removes the containers that the policy does not keep; `everything`: the disk is short.
    pub async fn collect_containers(&self, everything: bool) {
        let states = self.states();
        let candidates: Vec<Candidate> = states
            .iter()
            .map(|state| Candidate {
                observed: state.observed(),
                is_ended: state.is_torn_down() && is_reported(state),
            })
            .collect();
        let policy = &self.config.container_gc;
        let chosen = choose(policy, &candidates, everything, Timestamp::now());
        for (state, pod) in states.iter().zip(&candidates) {
            let of_pod = pod.observed.containers.iter();
            let mut has_changed = false;
            for container in of_pod.filter(|container| chosen.contains(&container.id)) {
                has_changed |= self
                    .remove_dead_container(&container.id, &container.log_path)
                    .await;
            }
            if everything && pod.is_ended {
                has_changed |= self.remove_dead_sandboxes(state).await;
            }
            if has_changed && self.observe(state).await.is_ok() {
                self.refresh_status(state);
            }
        }
    }

    /// Removes a container that has ended, with its logs; whether it is gone.
    pub(crate) async fn remove_dead_container(&self, id: &str, log_path: &str) -> bool {
        if let Err(status) = self.runtime.remove_container(id).await {
            tracing::debug!(error = describe(&status), "cannot remove an old container");
            return false;
        }
        remove_logs(Path::new(log_path));
        true
    }

    /// The sandboxes of a pod that has ended, as far as they hold no containers.
    async fn remove_dead_sandboxes(&self, state: &PodState) -> bool {
        if self.observe(state).await.is_err() {
            return false;
        }
        let observed = state.observed();
        let is_empty = |id: &str| !observed.containers.iter().any(|one| one.sandbox_id == id);
        let mut has_changed = false;
        for sandbox in observed
            .sandboxes
            .iter()
            .filter(|one| !one.ready && is_empty(&one.id))
        {
            match self.runtime.remove_sandbox(&sandbox.id).await {
                Ok(()) => has_changed = true,
                Err(status) => tracing::debug!(error = describe(&status), "cannot remove an old sandbox"),
            }
        }
        has_changed
    }
}

/// The log of one instance, and what was rotated away of it.
fn remove_logs(path: &Path) {
    let (Some(folder), Some(name)) = (path.parent(), path.file_name().and_then(|name| name.to_str())) else {
        return;
    };
    let rotated = format!("{name}.");
    for entry in std::fs::read_dir(folder).into_iter().flatten().flatten() {
        let is_of_it = |other: &str| other == name || other.starts_with(&rotated);
        if entry.file_name().to_str().is_some_and(is_of_it) {
            let _ = std::fs::remove_file(entry.path());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::observed::ObservedContainer;

    fn container(name: &str, made: i64, state: ContainerState) -> ObservedContainer {
        ObservedContainer {
            id: format!("{name}{made}"),
            name: name.to_owned(),
            state,
            created_at: made * 1_000_000_000,
            ..Default::default()
        }
    }

    #[test]
    fn an_end_that_only_the_containers_tell_is_kept() {
        let check = |metadata: serde_json::Value, phase: &str, expected: bool| {
            let pod = serde_json::json!({"metadata": metadata, "status": {"phase": phase}});
            let state = PodState::new(
                Arc::new(serde_json::from_value(pod).unwrap()),
                true,
                Default::default(),
            );
            assert_eq!(is_reported(&state), expected, "{metadata} {phase}");
        };
        let none = || serde_json::json!({});
        check(none(), "Running", false);
        check(none(), "Succeeded", true);
        check(none(), "Failed", true);
        let deleted = serde_json::json!({"deletionTimestamp": "2026-01-01T00:00:00Z"});
        check(deleted, "Running", true);
        let from_file = serde_json::json!({"annotations": {"kubernetes.io/config.source": "file"}});
        check(from_file, "Succeeded", false);
    }

    fn pod(containers: &[(&str, i64, bool)], is_ended: bool) -> Candidate {
        let of = |(name, made, runs): &(&str, i64, bool)| {
            let state = if *runs {
                ContainerState::Running
            } else {
                ContainerState::Exited
            };
            container(name, *made, state)
        };
        let mut observed = ObservedPod {
            containers: containers.iter().map(of).collect(),
            ..Default::default()
        };
        observed.sort();
        Candidate {
            observed: Arc::new(observed),
            is_ended,
        }
    }

    fn check(policy: ContainerGcPolicy, pods: &[Candidate], everything: bool, expected: &[&str]) {
        let now = Timestamp::from_second(1000).unwrap();
        let mut chosen: Vec<String> = choose(&policy, pods, everything, now).into_iter().collect();
        chosen.sort();
        assert_eq!(chosen, expected, "{policy:?} {everything}");
    }

    #[test]
    fn what_goes() {
        let living = || {
            pod(
                &[("a", 1, false), ("a", 2, false), ("a", 3, true), ("b", 1, false)],
                false,
            )
        };
        let ended = || pod(&[("c", 1, false), ("c", 2, false), ("c", 3, false)], true);
        let usual = ContainerGcPolicy::default();
        let both = || [living(), ended()];
        check(usual, &both(), false, &["a1", "c1"]);
        // The disk is short: nothing of the pod that has ended stays.
        check(usual, &both(), true, &["a1", "c1", "c2", "c3"]);
        let none = ContainerGcPolicy {
            max_per_container: 0,
            ..usual
        };
        check(none, &both(), false, &["a1", "a2", "c1", "c2"]);
        let all = ContainerGcPolicy {
            max_per_container: -1,
            ..usual
        };
        check(all, &both(), false, &[]);
        let old = ContainerGcPolicy {
            min_age: Duration::from_secs(999),
            ..none
        };
        check(old, &both(), true, &["a1", "c1"]);
    }

    #[test]
    fn the_whole_node_has_a_limit() {
        let pods = || {
            [
                pod(&[("a", 1, false), ("a", 5, false), ("a", 9, true)], false),
                pod(&[("c", 2, false), ("c", 3, false)], true),
                pod(&[("d", 4, false)], true),
            ]
        };
        let limit = |max_containers: i32| ContainerGcPolicy {
            max_per_container: -1,
            max_containers,
            ..ContainerGcPolicy::default()
        };
        check(limit(5), &pods(), false, &[]);
        check(limit(3), &pods(), false, &["a1", "c2"]);
        check(limit(2), &pods(), false, &["a1", "c2", "c3"]);
        check(limit(0), &pods(), false, &["a1", "a5", "c2", "c3", "d4"]);
        // What lives keeps its newest, also if that has ended.
        check(
            limit(0),
            &[pod(&[("e", 1, false), ("e", 2, false)], false)],
            false,
            &["e1"],
        );
    }

    #[test]
    fn logs_go_with_what_was_rotated() {
        let dir = tempfile::tempdir().unwrap();
        for name in [
            "0.log",
            "0.log.20260101-000000",
            "0.log.20260101-000000.gz",
            "1.log",
            "10.log",
        ] {
            std::fs::write(dir.path().join(name), "").unwrap();
        }
        remove_logs(&dir.path().join("0.log"));
        let mut left: Vec<_> = std::fs::read_dir(dir.path())
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        left.sort();
        assert_eq!(left, ["1.log", "10.log"]);
        remove_logs(Path::new(""));
    }
}
