//! What a StatefulSet must do next with its pods and their claims, and the status it must show. No I/O.

use std::collections::BTreeMap;
use std::sync::Arc;

use jiff::Timestamp;
use k8s_openapi::api::apps::v1::StatefulSetStatus;
use k8s_openapi::api::core::v1::{PersistentVolumeClaim, Pod, PodTemplateSpec};

use super::claims;
use super::set::{Set, ordinal_of, revision_of};
use crate::deployment::scaled;
use crate::pods;

/// At most this many pods are created in one go, however many are missing.
const BURST: usize = 500;

/// The revision of a template, by name.
#[derive(Clone, Copy)]
pub(super) struct Revision<'a> {
    pub(super) name: &'a str,
    pub(super) template: &'a PodTemplateSpec,
}

/// What a plan is made from.
pub(super) struct Observed<'a> {
    pub(super) set: Set<'a>,
    /// All pods that the set controls.
    pub(super) pods: &'a [Arc<Pod>],
    pub(super) current: Revision<'a>,
    pub(super) update: Revision<'a>,
    pub(super) collision_count: i32,
    /// A claim of the set's namespace by its name.
    pub(super) claim: &'a dyn Fn(&str) -> Option<Arc<PersistentVolumeClaim>>,
    pub(super) now: Timestamp,
}

#[derive(Debug, PartialEq)]
pub(super) enum Step {
    /// Creates the claims that are missing, then the pod.
    Create(Box<Pod>),
    Delete(Arc<Pod>),
    /// Creates the missing claims of a pod that waits for them, and sets their owners.
    Claims(Arc<Pod>),
    /// Puts identity, volumes and the owners of claims back.
    Repair(Arc<Pod>),
    /// Sets the owners of the claims of a pod that is scaled away.
    Owners(Arc<Pod>),
}

#[derive(Debug, Default, PartialEq)]
pub(super) struct Plan {
    /// Stages come one after the other; each item is what happens to one pod, in order. The first failure ends
    /// the plan.
    pub(super) stages: Vec<Vec<Vec<Step>>>,
    /// The items of a stage need not wait for each other.
    pub(super) parallel: bool,
    /// Pods that an update replaces, when all stages are done.
    pub(super) outdated: Vec<Arc<Pod>>,
    pub(super) status: StatefulSetStatus,
}

pub(super) fn plan(seen: &Observed<'_>) -> Plan {
    let set = seen.set;
    let mut plan = Plan {
        status: new_status(seen),
        parallel: set.is_parallel(),
        ..Default::default()
    };
    if set.is_deleting() {
        return plan;
    }
    let mut present = BTreeMap::new();
    let mut condemned = Vec::new();
    for pod in seen.pods {
        match ordinal_of(pod) {
            Some(ordinal) if set.ordinals().contains(&ordinal) => {
                present.insert(ordinal, pod);
            }
            Some(ordinal) => condemned.push((ordinal, pod)),
            // A number that no ordinal can be.
            None => {}
        }
    }
    condemned.sort_by_key(|(ordinal, _)| std::cmp::Reverse(*ordinal));
    let condemned: Vec<&Arc<Pod>> = condemned.into_iter().map(|(_, pod)| pod).collect();

    let (replicas, blocked) = seen.replicas(&present);
    plan.stages.push(replicas);
    if blocked {
        return plan;
    }
    let owners = condemned.iter().filter(|pod| !seen.claims_have_owners(pod));
    plan.stages
        .push(owners.map(|pod| vec![Step::Owners(Arc::clone(pod))]).collect());
    let (surplus, blocked) = seen.surplus(&condemned);
    plan.stages.push(surplus);
    if !blocked && set.is_rolling() {
        plan.outdated = seen.outdated(&present);
    }
    plan
}

impl Observed<'_> {
    /// What the pods that the set wants need. True if, one at a time, nothing more may happen now.
    fn replicas(&self, present: &BTreeMap<i64, &Arc<Pod>>) -> (Vec<Vec<Step>>, bool) {
        let ordered = !self.set.is_parallel();
        let mut items = Vec::new();
        let mut missing = 0;
        for ordinal in self.set.ordinals() {
            let (steps, stop) = match present.get(&ordinal) {
                Some(pod) => self.replica(pod),
                None => {
                    missing += 1;
                    if missing > BURST {
                        break;
                    }
                    (self.create(ordinal), true)
                }
            };
            if !steps.is_empty() {
                items.push(steps);
            }
            if stop && ordered {
                return (items, true);
            }
        }
        (items, false)
    }

    /// What a pod that is there needs. True if its successors must wait for it.
    fn replica(&self, pod: &Arc<Pod>) -> (Vec<Step>, bool) {
        let deleting = pod.metadata.deletion_timestamp.is_some();
        // Also one that succeeded: an evicted pod may have ended so.
        if pods::is_terminal(pod) {
            let delete = (!deleting).then(|| Step::Delete(pod.clone()));
            return (delete.into_iter().collect(), true);
        }
        let mut steps = Vec::new();
        if pods::phase(pod) == "Pending" && self.has_claims_to_make(pod) {
            steps.push(Step::Claims(pod.clone()));
        }
        if !self.set.is_parallel() && (deleting || !is_running_and_ready(pod) || !self.is_available(pod)) {
            return (steps, true);
        }
        let set = &self.set;
        if !set.has_identity(pod) || !set.has_storage(pod) || !self.claims_have_owners(pod) {
            steps.push(Step::Repair(pod.clone()));
        }
        (steps, false)
    }

    fn create(&self, ordinal: i64) -> Vec<Step> {
        let set = &self.set;
        let rolling = set.rolling();
        let before_update = match rolling {
            Some(_) => ordinal < set.partition(),
            None if set.is_rolling() => {
                let status = set.object.status.as_ref();
                let current = status.and_then(|status| status.current_replicas).unwrap_or(0);
                ordinal < set.ordinals().start + i64::from(current)
            }
            None => false,
        };
        let revision = if before_update { self.current } else { self.update };
        let pod = set.new_pod(revision.template, revision.name, ordinal);
        let names = set
            .claim_templates()
            .iter()
            .map(|template| set.claim_name(template, ordinal));
        let is_stale = set.deletes_claims_when_scaled()
            && names
                .filter_map(|name| (self.claim)(&name))
                .any(|claim| claims::is_of_earlier_pod(&claim, &pod));
        if is_stale {
            // The claim goes with the earlier pod; its deletion brings the set back here.
            return Vec::new();
        }
        vec![Step::Create(Box::new(pod))]
    }

    /// The pods beyond the wanted ones that go now. True if, one at a time, nothing more may happen now.
    fn surplus(&self, condemned: &[&Arc<Pod>]) -> (Vec<Vec<Step>>, bool) {
        let first_unavailable = condemned.iter().rev().find(|pod| self.is_unavailable(pod));
        let mut items = Vec::new();
        for pod in condemned {
            let deleting = pod.metadata.deletion_timestamp.is_some();
            if self.set.is_parallel() {
                if !deleting {
                    items.push(vec![Step::Delete(Arc::clone(pod))]);
                }
                continue;
            }
            let is_first = first_unavailable.is_some_and(|first| Arc::ptr_eq(first, pod));
            let healthy = is_running_and_ready(pod) && self.is_available(pod);
            if !deleting && (healthy || is_first) {
                items.push(vec![Step::Delete(Arc::clone(pod))]);
            }
            return (items, true);
        }
        (items, false)
    }

    /// The pods that an update deletes now, so that they come back with the new template.
    fn outdated(&self, present: &BTreeMap<i64, &Arc<Pod>>) -> Vec<Arc<Pod>> {
        let set = &self.set;
        let max_unavailable = set.rolling().and_then(|rolling| rolling.max_unavailable.as_ref());
        let is_outdated =
            |pod: &Pod| revision_of(pod) != self.update.name && pod.metadata.deletion_timestamp.is_none();
        // COMPAT: without the gate MaxUnavailableStatefulSet, which v1.36 has off, the API server drops the field
        // and the update goes down one by one from the highest ordinal.
        let Some(max_unavailable) = max_unavailable else {
            for ordinal in (set.partition()..set.ordinals().end).rev() {
                let Some(pod) = present.get(&ordinal) else { break };
                if is_outdated(pod) {
                    return vec![Arc::clone(pod)];
                }
                if self.is_unavailable(pod) {
                    break;
                }
            }
            return Vec::new();
        };
        let allowed = scaled(Some(max_unavailable), set.replicas(), false).max(1);
        let available = present.values().filter(|pod| !self.is_unavailable(pod)).count();
        let unavailable = i64::from(set.replicas()) - available as i64;
        let room = usize::try_from(i64::from(allowed) - unavailable).unwrap_or(0);
        let from_the_top = present.range(set.partition()..).rev().map(|(_, pod)| *pod);
        let outdated = from_the_top.filter(|pod| is_outdated(pod));
        outdated.take(room).cloned().collect()
    }

    fn is_available(&self, pod: &Pod) -> bool {
        pods::is_available(pod, self.set.min_ready_seconds(), self.now)
    }

    fn is_unavailable(&self, pod: &Pod) -> bool {
        !self.is_available(pod) || pod.metadata.deletion_timestamp.is_some()
    }

    fn claims_of<'b>(&'b self, pod: &Pod) -> impl Iterator<Item = Option<Arc<PersistentVolumeClaim>>> + 'b {
        let ordinal = ordinal_of(pod);
        let templates = self.set.claim_templates().iter();
        templates.filter_map(move |template| Some((self.claim)(&self.set.claim_name(template, ordinal?))))
    }

    /// Missing claims have no wrong owners.
    fn claims_have_owners(&self, pod: &Pod) -> bool {
        self.claims_of(pod)
            .flatten()
            .all(|claim| claims::new_owners(&claim, &self.set, pod).is_none())
    }

    fn has_claims_to_make(&self, pod: &Pod) -> bool {
        let is_wrong = |claim: Option<Arc<PersistentVolumeClaim>>| {
            claim.is_none_or(|claim| {
                claim.metadata.deletion_timestamp.is_some()
                    || claims::new_owners(&claim, &self.set, pod).is_some()
            })
        };
        self.claims_of(pod).any(is_wrong)
    }
}

fn is_running_and_ready(pod: &Pod) -> bool {
    pods::phase(pod) == "Running" && pods::is_ready(pod)
}

fn nonzero(count: i32) -> Option<i32> {
    (count != 0).then_some(count)
}

/// The status after looking at the set's pods.
///
/// COMPAT: it has no conditions, as upstream's controller knows none and keeps none.
fn new_status(seen: &Observed<'_>) -> StatefulSetStatus {
    let created = || seen.pods.iter().filter(|pod| !pods::phase(pod).is_empty());
    let count = |test: &dyn Fn(&Pod) -> bool| created().filter(|pod| test(pod)).count() as i32;
    let of_revision =
        |name: &str| count(&|pod| pod.metadata.deletion_timestamp.is_none() && revision_of(pod) == name);
    StatefulSetStatus {
        observed_generation: seen.set.object.metadata.generation,
        replicas: count(&|_| true),
        ready_replicas: nonzero(count(&is_running_and_ready)),
        available_replicas: Some(count(&|pod| is_running_and_ready(pod) && seen.is_available(pod))),
        current_replicas: nonzero(of_revision(seen.current.name)),
        updated_replicas: nonzero(of_revision(seen.update.name)),
        current_revision: Some(seen.current.name.to_owned()),
        update_revision: Some(seen.update.name.to_owned()),
        collision_count: Some(seen.collision_count),
        conditions: None,
    }
}

/// When every pod has the new template, that becomes the current one.
pub(super) fn complete_update(set: &Set<'_>, status: &mut StatefulSetStatus) {
    let wanted = set.replicas();
    let (updated, ready) = (status.updated_replicas, status.ready_replicas);
    if set.is_rolling()
        && updated.unwrap_or(0) == wanted
        && ready.unwrap_or(0) == wanted
        && status.replicas == wanted
    {
        status.current_replicas = updated;
        status.current_revision = status.update_revision.clone();
    }
}

/// True if the new status says something that the present one does not.
pub(super) fn is_news(new: &StatefulSetStatus, present: &StatefulSetStatus) -> bool {
    let comparable = |status: &StatefulSetStatus| StatefulSetStatus {
        ready_replicas: status.ready_replicas.and_then(nonzero),
        available_replicas: status.available_replicas.and_then(nonzero),
        current_replicas: status.current_replicas.and_then(nonzero),
        updated_replicas: status.updated_replicas.and_then(nonzero),
        current_revision: Some(status.current_revision.clone().unwrap_or_default()),
        update_revision: Some(status.update_revision.clone().unwrap_or_default()),
        collision_count: None,
        conditions: None,
        observed_generation: None,
        replicas: status.replicas,
    };
    new.observed_generation.unwrap_or(0) > present.observed_generation.unwrap_or(0)
        || comparable(new) != comparable(present)
}
