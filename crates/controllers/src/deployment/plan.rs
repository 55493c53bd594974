//! The plan of a Deployment: from the Deployment and its ReplicaSets to the writes that bring the rollout
//! one step further, and the status to show after them. No I/O, no clock.

use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::api::apps::v1::{Deployment, DeploymentStatus, ReplicaSet, ReplicaSetSpec};

use super::revision::{self, HASH_LABEL, REVISION};
use super::scaling::{self, available, replicas, total, wanted};
use super::status::{self, new_condition, set_condition};
use crate::ownership::controller_reference;

pub(crate) struct Observed {
    pub deployment: Deployment,
    /// All ReplicaSets that the Deployment controls.
    pub sets: Vec<ReplicaSet>,
    /// The uids of the ReplicaSets that still have pods which are not finished.
    pub sets_with_pods: Vec<String>,
    pub now: Timestamp,
}

#[derive(Debug, PartialEq)]
pub(crate) enum Write {
    Create(Box<ReplicaSet>),
    Update(Box<ReplicaSet>),
    Delete(String),
}

/// A change of size, for the event that tells of it.
#[derive(Debug, PartialEq)]
pub(crate) struct Scaled {
    pub name: String,
    pub from: i32,
    pub to: i32,
}

#[derive(Debug, Default)]
pub(crate) struct Plan {
    pub writes: Vec<Write>,
    pub events: Vec<Scaled>,
    /// The Deployment with its new status and revision, if they changed.
    pub deployment: Option<Box<Deployment>>,
    pub look_again: Option<Duration>,
}

/// A ReplicaSet in the making: what is there, and what of it has changed.
struct Set {
    set: ReplicaSet,
    change: Change,
    /// The size before the plan.
    before: i32,
}

#[derive(PartialEq)]
enum Change {
    None,
    New,
    Changed,
}

impl Set {
    fn present(set: ReplicaSet) -> Self {
        Set {
            before: replicas(&set),
            set,
            change: Change::None,
        }
    }

    fn size(&self) -> i32 {
        replicas(&self.set)
    }

    fn touch(&mut self) {
        if self.change == Change::None {
            self.change = Change::Changed;
        }
    }
}

struct Rollout {
    deployment: Deployment,
    new: Option<Set>,
    /// Oldest first.
    old: Vec<Set>,
    deletions: Vec<String>,
    now: Timestamp,
}

pub(crate) fn plan(observed: Observed) -> Plan {
    let before = observed.deployment.clone();
    let sets_with_pods = observed.sets_with_pods.clone();
    let mut rollout = Rollout::new(observed);
    let deployment = &rollout.deployment;
    let paused = deployment
        .spec
        .as_ref()
        .and_then(|spec| spec.paused)
        .unwrap_or(false);
    let status = if deployment.metadata.deletion_timestamp.is_some() {
        rollout.adopt_new_set(false);
        rollout.counts()
    } else {
        rollout.note_pause(paused);
        if paused || rollout.is_scaling() {
            rollout.adopt_new_set(false);
            rollout.scale();
            if paused {
                rollout.clean_up();
            }
            rollout.counts()
        } else if scaling::is_rolling(&rollout.deployment) {
            rollout.roll();
            rollout.status()
        } else {
            rollout.recreate(&sets_with_pods);
            rollout.status()
        }
    };
    rollout.finish(before, status)
}

impl Rollout {
    fn new(observed: Observed) -> Self {
        let mut sets = observed.sets;
        let age = |set: &ReplicaSet| {
            (
                set.metadata.creation_timestamp.as_ref().map(|time| time.0),
                set.metadata.name.clone(),
            )
        };
        sets.sort_by_key(age);
        let template = observed
            .deployment
            .spec
            .as_ref()
            .map(|spec| spec.template.clone())
            .unwrap_or_default();
        let is_new = |set: &ReplicaSet| {
            let own = set.spec.as_ref().and_then(|spec| spec.template.as_ref());
            own.is_some_and(|own| revision::same_template(own, &template))
        };
        // If several match, the oldest is taken, so that the choice stays the same.
        let new = sets
            .iter()
            .position(is_new)
            .map(|index| Set::present(sets.remove(index)));
        Rollout {
            deployment: observed.deployment,
            new,
            old: sets.into_iter().map(Set::present).collect(),
            deletions: Vec::new(),
            now: observed.now,
        }
    }

    fn all(&self) -> Vec<&ReplicaSet> {
        self.old.iter().chain(&self.new).map(|set| &set.set).collect()
    }

    fn counts(&self) -> DeploymentStatus {
        status::counts(
            &self.deployment,
            self.new.as_ref().map(|set| &set.set),
            &self.all(),
            self.now,
        )
    }

    fn status(&self) -> DeploymentStatus {
        status::of_rollout(
            &self.deployment,
            self.new.as_ref().map(|set| &set.set),
            &self.all(),
            self.now,
        )
    }

    fn status_mut(&mut self) -> &mut DeploymentStatus {
        self.deployment.status.get_or_insert_default()
    }

    /// A pause stops the clock of the deadline; its end starts it again.
    fn note_pause(&mut self, paused: bool) {
        if status::progress_deadline(&self.deployment).is_none() {
            return;
        }
        let now = self.now;
        let reason = {
            let current = status::condition(self.status_mut(), "Progressing");
            current.and_then(|current| current.reason.clone())
        };
        if reason.as_deref() == Some(status::TIMED_OUT) {
            return;
        }
        let was_paused = reason.as_deref() == Some(status::PAUSED);
        let news = match (paused, was_paused) {
            (true, false) => (status::PAUSED, "Deployment is paused"),
            (false, true) => (status::RESUMED, "Deployment is resumed"),
            _ => return,
        };
        let condition = new_condition("Progressing", "Unknown", news.0, news.1.into(), now);
        set_condition(self.status_mut(), condition);
    }

    /// True if the number of replicas was changed since a set last heard of it.
    fn is_scaling(&self) -> bool {
        self.all().into_iter().filter(|set| replicas(set) > 0).any(|set| {
            revision::annotation_number(set, revision::DESIRED_REPLICAS)
                .is_some_and(|desired| desired != wanted(&self.deployment))
        })
    }

    /// Brings the new set's revision and annotations up to date, and makes the set if there is none.
    fn adopt_new_set(&mut self, create: bool) {
        let next = revision::max_revision(self.old.iter().map(|set| &set.set)) + 1;
        let min_ready = self
            .deployment
            .spec
            .as_ref()
            .and_then(|spec| spec.min_ready_seconds);
        let has_deadline = status::progress_deadline(&self.deployment).is_some();
        let now = self.now;
        let news = if let Some(new) = &mut self.new {
            if revision::annotate_new(&self.deployment, &mut new.set, next) {
                new.touch();
            }
            if let Some(spec) = &mut new.set.spec
                && spec.min_ready_seconds.unwrap_or(0) != min_ready.unwrap_or(0)
            {
                spec.min_ready_seconds = min_ready;
                new.touch();
            }
            let name = new.set.metadata.name.clone().unwrap_or_default();
            // A set that was there before anyone asked for progress.
            let unknown =
                status::condition(self.deployment.status.get_or_insert_default(), "Progressing").is_none();
            unknown.then(|| ("FoundNewReplicaSet", format!("Found new replica set \"{name}\"")))
        } else if create {
            let set = self.make_new_set(next);
            let name = set.metadata.name.clone().unwrap_or_default();
            self.new = Some(Set {
                set,
                change: Change::New,
                before: 0,
            });
            Some((
                "NewReplicaSetCreated",
                format!("Created new replica set \"{name}\""),
            ))
        } else {
            None
        };
        if let Some((reason, message)) = news.filter(|_| has_deadline) {
            set_condition(
                self.status_mut(),
                new_condition("Progressing", "True", reason, message, now),
            );
        }
        if let Some(new) = &self.new {
            let revision = revision::revision_of(&new.set).to_string();
            self.deployment
                .metadata
                .annotations
                .get_or_insert_default()
                .insert(REVISION.into(), revision);
        }
    }

    fn make_new_set(&self, next_revision: i64) -> ReplicaSet {
        let deployment = &self.deployment;
        let spec = deployment.spec.clone().unwrap_or_default();
        let collisions = deployment
            .status
            .as_ref()
            .and_then(|status| status.collision_count);
        let hash = revision::template_hash(&spec.template, collisions);
        let mut template = spec.template.clone();
        let labels = template
            .metadata
            .get_or_insert_default()
            .labels
            .get_or_insert_default();
        labels.insert(HASH_LABEL.into(), hash.clone());
        let labels = labels.clone();
        let mut selector = spec.selector.clone();
        selector
            .match_labels
            .get_or_insert_default()
            .insert(HASH_LABEL.into(), hash.clone());
        let mut set = ReplicaSet::default();
        let name = deployment.metadata.name.as_deref().unwrap_or_default();
        set.metadata.name = Some(format!("{name}-{hash}"));
        set.metadata.namespace = deployment.metadata.namespace.clone();
        set.metadata.labels = Some(labels);
        set.metadata.owner_references = Some(vec![controller_reference(deployment)]);
        let others = total(self.old.iter().map(|set| &set.set));
        set.spec = Some(ReplicaSetSpec {
            replicas: Some(scaling::new_set_size(deployment, others, 0)),
            min_ready_seconds: spec.min_ready_seconds,
            selector,
            template: Some(template),
        });
        revision::annotate_new(deployment, &mut set, next_revision);
        let desired = wanted(deployment);
        revision::annotate_replicas(&mut set, desired, desired + scaling::max_surge(deployment));
        set
    }

    /// Gives a set a new size.
    fn resize(deployment: &Deployment, set: &mut Set, size: i32) {
        let desired = wanted(deployment);
        let annotated =
            revision::annotate_replicas(&mut set.set, desired, desired + scaling::max_surge(deployment));
        let resized = set.size() != size;
        if resized && let Some(spec) = &mut set.set.spec {
            spec.replicas = Some(size);
        }
        if annotated || resized {
            set.touch();
        }
    }

    fn roll(&mut self) {
        self.adopt_new_set(true);
        if self.reconcile_new() || self.reconcile_old() {
            return;
        }
        if self.was_complete() {
            self.clean_up();
        }
    }

    /// True if the new set got another size.
    fn reconcile_new(&mut self) -> bool {
        let all = total(self.all());
        let wanted = wanted(&self.deployment);
        let Some(new) = &mut self.new else { return false };
        let size = new.size();
        let next = if size > wanted {
            wanted
        } else {
            scaling::new_set_size(&self.deployment, all, size)
        };
        if next == size {
            return false;
        }
        Self::resize(&self.deployment, new, next);
        true
    }

    /// Takes pods away from old sets as far as enough others are available; true if any were taken.
    fn reconcile_old(&mut self) -> bool {
        if total(self.old.iter().map(|set| &set.set)) == 0 {
            return false;
        }
        let min_available = wanted(&self.deployment) - scaling::max_unavailable(&self.deployment);
        let new_unavailable = self
            .new
            .as_ref()
            .map_or(0, |set| set.size() - available(&set.set));
        let limit = total(self.all()) - min_available - new_unavailable;
        if limit <= 0 {
            return false;
        }
        // Pods that serve nobody go first: otherwise a broken old set would block the rollout for good.
        let mut cleaned = 0;
        for set in &mut self.old {
            let unhealthy = set.size() - available(&set.set);
            let count = unhealthy.min(limit - cleaned);
            if count > 0 {
                let size = set.size() - count;
                Self::resize(&self.deployment, set, size);
                cleaned += count;
            }
        }
        let all_available: i32 = self.all().into_iter().map(available).sum();
        let mut spare = all_available - min_available;
        let mut scaled = 0;
        for set in &mut self.old {
            let count = set.size().min(spare);
            if count > 0 {
                let size = set.size() - count;
                Self::resize(&self.deployment, set, size);
                spare -= count;
                scaled += count;
            }
        }
        cleaned + scaled > 0
    }

    fn recreate(&mut self, sets_with_pods: &[String]) {
        self.adopt_new_set(false);
        let mut scaled_down = false;
        for set in self.old.iter_mut().filter(|set| set.size() > 0) {
            Self::resize(&self.deployment, set, 0);
            scaled_down = true;
        }
        let has_pods = |set: &Set| {
            set.set
                .metadata
                .uid
                .as_ref()
                .is_some_and(|uid| sets_with_pods.contains(uid))
        };
        // Nothing new may start while something old still runs.
        if scaled_down || self.old.iter().any(has_pods) {
            return;
        }
        if self.new.is_none() {
            self.adopt_new_set(true);
        }
        let wanted = wanted(&self.deployment);
        if let Some(new) = self.new.as_mut().filter(|new| new.size() != wanted) {
            Self::resize(&self.deployment, new, wanted);
        }
        if self.was_complete() {
            self.clean_up();
        }
    }

    /// Spreads a changed number of replicas over the sets that have pods.
    fn scale(&mut self) {
        let wanted = wanted(&self.deployment);
        let active = self
            .old
            .iter()
            .chain(&self.new)
            .filter(|set| set.size() > 0)
            .count();
        if active <= 1 {
            // The only active set, or the newest one.
            let old_active = self.old.iter().position(|set| set.size() > 0);
            let target = match (old_active, &mut self.new) {
                (Some(index), _) => Some(&mut self.old[index]),
                (None, Some(new)) => Some(new),
                (None, None) => self.old.last_mut(),
            };
            // One that has the right size already, perhaps by hand, must still learn the number: as long as its
            // annotation differs, every look takes the Deployment for one that is being scaled.
            if let Some(set) = target {
                Self::resize(&self.deployment, set, wanted);
            }
            return;
        }
        if self.is_saturated() {
            for set in self.old.iter_mut().filter(|set| set.size() > 0) {
                Self::resize(&self.deployment, set, 0);
            }
            return;
        }
        if scaling::is_rolling(&self.deployment) {
            self.scale_proportionally();
        }
    }

    fn is_saturated(&self) -> bool {
        let wanted = wanted(&self.deployment);
        self.new.as_ref().is_some_and(|new| {
            let desired = revision::annotation_number(&new.set, revision::DESIRED_REPLICAS);
            new.size() == wanted && desired == Some(wanted) && available(&new.set) == wanted
        })
    }

    fn scale_proportionally(&mut self) {
        let wanted = wanted(&self.deployment);
        let whole = total(self.all());
        let allowed = if wanted > 0 {
            wanted + scaling::max_surge(&self.deployment)
        } else {
            0
        };
        let to_add = allowed - whole;
        // By age, oldest first, as `old` is; `new` is the youngest.
        let mut active: Vec<(usize, &mut Set)> = self
            .old
            .iter_mut()
            .chain(&mut self.new)
            .filter(|set| set.size() > 0)
            .enumerate()
            .collect();
        // The largest takes the rounding; among equals the newer one when growing, the older when shrinking.
        active.sort_by(|(left_age, left), (right_age, right)| {
            let age = if to_add > 0 {
                right_age.cmp(left_age)
            } else {
                left_age.cmp(right_age)
            };
            right.size().cmp(&left.size()).then(age)
        });
        let mut added = 0;
        let mut sizes = Vec::new();
        for (_, set) in &active {
            let share = scaling::proportion(&set.set, &self.deployment, to_add, added);
            sizes.push(set.size() + share);
            added += share;
        }
        if let Some(first) = sizes.first_mut() {
            *first = (*first + to_add - added).max(0);
        }
        for ((_, set), size) in active.into_iter().zip(sizes) {
            Self::resize(&self.deployment, set, size);
        }
    }

    fn was_complete(&self) -> bool {
        let status = self.deployment.status.clone().unwrap_or_default();
        status::is_complete(&self.deployment, &status)
    }

    /// Removes the oldest empty sets beyond the history's limit.
    fn clean_up(&mut self) {
        let limit = self
            .deployment
            .spec
            .as_ref()
            .and_then(|spec| spec.revision_history_limit);
        let Some(limit) = limit.filter(|limit| *limit != i32::MAX) else {
            return;
        };
        let mut alive: Vec<&Set> = self
            .old
            .iter()
            .filter(|set| set.set.metadata.deletion_timestamp.is_none())
            .collect();
        let surplus = alive.len().saturating_sub(usize::try_from(limit).unwrap_or(0));
        alive.sort_by_key(|set| revision::revision_of(&set.set));
        for set in alive.into_iter().take(surplus) {
            let status = set.set.status.clone().unwrap_or_default();
            let settled = status.observed_generation >= set.set.metadata.generation;
            if status.replicas == 0 && set.size() == 0 && settled {
                self.deletions
                    .push(set.set.metadata.name.clone().unwrap_or_default());
            }
        }
    }

    fn finish(self, before: Deployment, status: DeploymentStatus) -> Plan {
        let mut plan = Plan::default();
        let mut deployment = self.deployment;
        for set in self.new.into_iter().chain(self.old) {
            let size = set.size();
            if set.change != Change::None && size != set.before {
                let name = set.set.metadata.name.clone().unwrap_or_default();
                plan.events.push(Scaled {
                    name,
                    from: set.before,
                    to: size,
                });
            }
            match set.change {
                Change::None => {}
                Change::New => plan.writes.push(Write::Create(Box::new(set.set))),
                Change::Changed => plan.writes.push(Write::Update(Box::new(set.set))),
            }
        }
        plan.writes.extend(self.deletions.into_iter().map(Write::Delete));
        let due = status::deadline_check(&deployment, &status);
        plan.look_again = due.map(|due| crate::seconds_until(due, self.now).max(Duration::from_secs(1)));
        deployment.status = Some(status);
        let changed = deployment.status != before.status
            || deployment.metadata.annotations != before.metadata.annotations;
        plan.deployment = changed.then(|| Box::new(deployment));
        plan
    }
}
