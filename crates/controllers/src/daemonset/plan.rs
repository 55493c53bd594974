//! Which pods a DaemonSet must create and delete now, and the status it must show. No I/O.

use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::api::apps::v1::{DaemonSet, DaemonSetSpec, DaemonSetStatus, RollingUpdateDaemonSet};
use k8s_openapi::api::core::v1::Node;

use super::daemon::{Daemon, sort_oldest_first};
use super::placement::{DaemonPod, Placement, is_updated};
use crate::deployment::scaled;

/// At most this many pods are created, and this many deleted, in one go.
const BURST: usize = 250;

/// What a plan is made from.
pub(super) struct Observed<'a> {
    pub(super) set: &'a DaemonSet,
    pub(super) spec: &'a DaemonSetSpec,
    /// Every node, and what the set does about it.
    pub(super) nodes: Vec<(&'a str, Placement)>,
    /// The pods that are on or for each node. Pods that ended and are being deleted are not among them.
    pub(super) pods: BTreeMap<&'a str, Vec<&'a Arc<Daemon>>>,
    /// The hash of the present template.
    pub(super) hash: &'a str,
    pub(super) now: Timestamp,
}

/// A pod that ended and that the set replaces.
#[derive(Debug, PartialEq)]
pub(super) struct Ended {
    pub(super) pod: String,
    pub(super) node: String,
    pub(super) failed: bool,
}

#[derive(Debug, Default, PartialEq)]
pub(super) struct Plan {
    /// Nodes that get a pod.
    pub(super) create: Vec<String>,
    /// Names of pods.
    pub(super) delete: Vec<String>,
    /// Those of `delete` that get an event of their own.
    pub(super) ended: Vec<Ended>,
    /// When the earliest of the failed pods that wait may go.
    pub(super) wait: Option<Duration>,
}

impl Plan {
    pub(super) fn is_empty(&self) -> bool {
        self.create.is_empty() && self.delete.is_empty()
    }

    fn limited(mut self) -> Plan {
        self.create.truncate(BURST);
        self.delete.truncate(BURST);
        let kept: HashSet<&String> = self.delete.iter().collect();
        self.ended.retain(|ended| kept.contains(&ended.pod));
        self
    }
}

/// One of the pods of a node, if there is such a one.
type OnNode<'a> = Option<&'a Arc<Daemon>>;

fn name_of(pod: &Daemon) -> String {
    pod.name.clone()
}

impl<'a> Observed<'a> {
    pub(super) fn new(
        set: &'a DaemonSet,
        spec: &'a DaemonSetSpec,
        nodes: &'a [Arc<Node>],
        pods: &'a [Arc<Daemon>],
        hash: &'a str,
        now: Timestamp,
    ) -> Self {
        let daemon = DaemonPod::new(spec);
        let nodes = nodes
            .iter()
            .map(|node| {
                (
                    node.metadata.name.as_deref().unwrap_or_default(),
                    daemon.placement(node),
                )
            })
            .collect();
        let mut by_node: BTreeMap<&str, Vec<&Arc<Daemon>>> = BTreeMap::new();
        for pod in pods {
            if pod.failed.is_some() && pod.is_deleting {
                continue;
            }
            if let Some(node) = pod.node.as_deref() {
                by_node.entry(node).or_default().push(pod);
            }
        }
        Observed {
            set,
            spec,
            nodes,
            pods: by_node,
            hash,
            now,
        }
    }

    fn is_available(&self, pod: &Daemon) -> bool {
        let at = pod.available_at(self.spec.min_ready_seconds.unwrap_or(0));
        at.is_some_and(|at| at <= self.now)
    }

    fn rolling(&self) -> Option<&'a RollingUpdateDaemonSet> {
        let strategy = self.spec.update_strategy.as_ref()?;
        let is_rolling = strategy.type_.as_deref().unwrap_or("RollingUpdate") == "RollingUpdate";
        strategy.rolling_update.as_ref().filter(|_| is_rolling)
    }

    fn surge(&self, nodes: i32) -> usize {
        let surge = self.rolling().and_then(|rolling| rolling.max_surge.as_ref());
        usize::try_from(scaled(surge, nodes, true)).unwrap_or(0)
    }

    /// One pod on every node that should have one, and none where none should be. `remaining` says how long a failed
    /// pod of a node must still stay.
    pub(super) fn manage(&self, remaining: impl Fn(&str) -> Option<Duration>) -> Plan {
        let mut plan = Plan::default();
        let allows_surge = self.surge(1) > 0;
        for (node, placement) in &self.nodes {
            let present = self.pods.get(node).map(Vec::as_slice).unwrap_or_default();
            match placement {
                Placement::Run if present.is_empty() => plan.create.push((*node).to_owned()),
                Placement::Leave => {
                    let staying = present.iter().filter(|pod| !pod.is_deleting);
                    plan.delete.extend(staying.map(|pod| name_of(pod)));
                }
                Placement::Run | Placement::Keep => {
                    let (mut running, waits) = self.replace_ended(node, present, &remaining, &mut plan);
                    if allows_surge {
                        // While a failed pod waits for its deletion, another one would fail as well.
                        if running.is_empty() && placement.runs() && !waits {
                            plan.create.push((*node).to_owned());
                        }
                        plan.delete.extend(self.surplus_of_surge(&mut running));
                    } else {
                        sort_oldest_first(&mut running);
                        plan.delete.extend(running.iter().skip(1).map(|pod| name_of(pod)));
                    }
                }
            }
        }
        plan.delete.extend(self.waiting_for_gone_nodes());
        plan.limited()
    }

    /// The pods of a node that have not ended and are not being deleted; those that ended are deleted. True if one
    /// must wait for that.
    fn replace_ended(
        &self,
        node: &str,
        present: &[&'a Arc<Daemon>],
        remaining: &impl Fn(&str) -> Option<Duration>,
        plan: &mut Plan,
    ) -> (Vec<&'a Arc<Daemon>>, bool) {
        let (mut running, mut waits) = (Vec::new(), false);
        for pod in present.iter().filter(|pod| !pod.is_deleting) {
            let Some(failed) = pod.failed else {
                running.push(*pod);
                continue;
            };
            if failed && let Some(wait) = remaining(node) {
                plan.wait = Some(plan.wait.map_or(wait, |before| before.min(wait)));
                waits = true;
                continue;
            }
            plan.delete.push(name_of(pod));
            plan.ended.push(Ended {
                pod: name_of(pod),
                node: node.to_owned(),
                failed,
            });
        }
        (running, waits)
    }

    /// With surge, an old pod may stay beside a new one while the old one is ready and the new one is not
    /// available yet.
    fn surplus_of_surge(&self, running: &mut [&Arc<Daemon>]) -> Vec<String> {
        let mut surplus = Vec::new();
        if running.len() <= 1 {
            return surplus;
        }
        sort_oldest_first(running);
        let (mut new, mut old) = (None, None);
        for pod in running.iter() {
            let has_hash = pod.revision.as_deref() == Some(self.hash);
            let place = if has_hash { &mut new } else { &mut old };
            match place {
                None => *place = Some(*pod),
                Some(_) => surplus.push(name_of(pod)),
            }
        }
        if let (Some(new), Some(old)) = (new, old)
            && (!old.is_ready || self.is_available(new))
        {
            surplus.push(name_of(old));
        }
        surplus
    }

    /// Pods for nodes that are gone and that no scheduler will ever bind; the pod garbage collector leaves them.
    fn waiting_for_gone_nodes(&self) -> Vec<String> {
        let there: HashSet<&str> = self.nodes.iter().map(|(name, _)| *name).collect();
        let gone = self.pods.iter().filter(|(node, _)| !there.contains(*node));
        let waiting = gone.flat_map(|(_, pods)| pods.iter().filter(|pod| !pod.is_bound));
        waiting
            .filter(|pod| !pod.is_deleting)
            .map(|pod| name_of(pod))
            .collect()
    }

    /// The pods that a rolling update replaces now. Only for a set in which `manage` has nothing to do.
    pub(super) fn roll(&self) -> Plan {
        let Some(rolling) = self.rolling() else {
            return Plan::default();
        };
        let desired = self
            .nodes
            .iter()
            .filter(|(_, placement)| placement.runs())
            .count();
        let total = i32::try_from(desired).unwrap_or(i32::MAX);
        let max_surge = self.surge(total);
        let max_unavailable = scaled(rolling.max_unavailable.as_ref(), total, true);
        let mut max_unavailable = usize::try_from(max_unavailable).unwrap_or(0);
        if max_surge == 0 && max_unavailable == 0 {
            // Such an update would never end.
            max_unavailable = 1;
        }
        let mut nodes = self.pods.clone();
        for (node, placement) in &self.nodes {
            if placement.runs() {
                nodes.entry(node).or_default();
            }
        }
        let plan = if max_surge == 0 {
            self.roll_by_deleting(&nodes, max_unavailable)
        } else {
            self.roll_by_surging(&nodes, max_surge, desired)
        };
        plan.limited()
    }

    /// The pod with the present template and the one with an older; `None` if there are several of either.
    fn new_and_old<'b>(&self, pods: &[&'b Arc<Daemon>]) -> Option<(OnNode<'b>, OnNode<'b>)> {
        let (mut new, mut old) = (None, None);
        for pod in pods.iter().filter(|pod| !pod.is_deleting) {
            let place = if is_updated(self.set, pod, self.hash) {
                &mut new
            } else {
                &mut old
            };
            if place.replace(*pod).is_some() {
                return None;
            }
        }
        Some((new, old))
    }

    fn roll_by_deleting(&self, nodes: &BTreeMap<&str, Vec<&Arc<Daemon>>>, max_unavailable: usize) -> Plan {
        let mut unavailable = 0;
        let mut plan = Plan::default();
        let mut candidates = Vec::new();
        for pods in nodes.values() {
            match self.new_and_old(pods) {
                // `manage` cleans up here first.
                None | Some((None, None) | (Some(_), Some(_))) => unavailable += 1,
                Some((Some(new), None)) => unavailable += usize::from(!self.is_available(new)),
                Some((None, Some(old))) if !self.is_available(old) => {
                    // Nothing is lost by replacing it.
                    plan.delete.push(name_of(old));
                    unavailable += 1;
                }
                Some((None, Some(old))) => candidates.push(name_of(old)),
            }
        }
        candidates.truncate(max_unavailable.saturating_sub(unavailable));
        plan.delete.extend(candidates);
        plan
    }

    fn roll_by_surging(
        &self,
        nodes: &BTreeMap<&str, Vec<&Arc<Daemon>>>,
        max_surge: usize,
        desired: usize,
    ) -> Plan {
        let runs: HashSet<&str> = self
            .nodes
            .iter()
            .filter(|(_, placement)| placement.runs())
            .map(|(node, _)| *node)
            .collect();
        let (mut surging, mut available) = (0, 0);
        let mut plan = Plan::default();
        let (mut candidates, mut on_left_nodes) = (Vec::new(), Vec::new());
        for (node, pods) in nodes {
            let Some((new, old)) = self.new_and_old(pods) else {
                surging += 1;
                continue;
            };
            available += usize::from(old.or(new).is_some_and(|pod| self.is_available(pod)));
            match (new, old) {
                (_, None) => {}
                (None, Some(old)) => match (self.is_available(old), runs.contains(node)) {
                    (false, false) => plan.delete.push(name_of(old)),
                    (false, true) => plan.create.push((*node).to_owned()),
                    (true, false) => on_left_nodes.push(name_of(old)),
                    (true, true) => candidates.push((*node).to_owned()),
                },
                (Some(new), Some(old)) if self.is_available(new) => plan.delete.push(name_of(old)),
                (Some(_), Some(_)) => surging += 1,
            }
        }
        // Whoever surges counts on every pod: those on nodes that are left go only when others took over.
        on_left_nodes.truncate(available.saturating_sub(desired));
        plan.delete.extend(on_left_nodes);
        candidates.truncate(max_surge.saturating_sub(surging));
        plan.create.extend(candidates);
        plan
    }

    pub(super) fn status(&self, collision_count: Option<i32>) -> DaemonSetStatus {
        let before = self.set.status.clone().unwrap_or_default();
        let (mut desired, mut current, mut misscheduled) = (0, 0, 0);
        let (mut ready, mut updated, mut available) = (0, 0, 0);
        for (node, placement) in &self.nodes {
            let mut pods = self.pods.get(node).cloned().unwrap_or_default();
            sort_oldest_first(&mut pods);
            let oldest = pods.first();
            if !placement.runs() {
                misscheduled += i32::from(oldest.is_some());
                continue;
            }
            desired += 1;
            let Some(pod) = oldest else { continue };
            current += 1;
            ready += i32::from(pod.is_ready);
            available += i32::from(self.is_available(pod));
            updated += i32::from(is_updated(self.set, pod, self.hash));
        }
        let nonzero = |count: i32| (count != 0).then_some(count);
        DaemonSetStatus {
            desired_number_scheduled: desired,
            current_number_scheduled: current,
            number_misscheduled: misscheduled,
            number_ready: ready,
            updated_number_scheduled: nonzero(updated),
            number_available: nonzero(available),
            number_unavailable: nonzero(desired - available),
            observed_generation: self.set.metadata.generation,
            collision_count,
            conditions: before.conditions,
        }
    }

    /// When the next ready pod becomes available by the mere passing of time.
    pub(super) fn next_availability(&self) -> Option<Timestamp> {
        let min_ready_seconds = self.spec.min_ready_seconds.unwrap_or(0);
        let all = self.pods.values().flatten();
        all.filter_map(|pod| pod.available_at(min_ready_seconds))
            .filter(|at| *at > self.now)
            .min()
    }
}
