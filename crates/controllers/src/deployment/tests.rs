//! The Deployment plan, against a world in which ReplicaSets obey at once or pods become ready one by one.

use super::plan::{Observed, Plan, Write, plan};
use super::*;
use serde_json::{Value, json};

struct World {
    deployment: Deployment,
    sets: Vec<ReplicaSet>,
    clock: i64,
}

impl World {
    fn new(strategy: Value, replicas: i32) -> Self {
        let deployment = serde_json::from_value(json!({
            "metadata": {"name": "web", "namespace": "default", "uid": "d", "generation": 1},
            "spec": {"replicas": replicas, "revisionHistoryLimit": 2, "progressDeadlineSeconds": 600,
                "selector": {"matchLabels": {"app": "web"}}, "strategy": strategy,
                "template": {"metadata": {"labels": {"app": "web"}},
                    "spec": {"containers": [{"name": "c", "image": "v1"}]}}}}))
        .unwrap();
        World {
            deployment,
            sets: Vec::new(),
            clock: 1_000_000,
        }
    }

    fn rolling(surge: Value, unavailable: Value, replicas: i32) -> Self {
        let rolling = json!({"maxSurge": surge, "maxUnavailable": unavailable});
        World::new(
            json!({"type": "RollingUpdate", "rollingUpdate": rolling}),
            replicas,
        )
    }

    fn set_image(&mut self, image: &str) {
        let spec = self.deployment.spec.as_mut().unwrap();
        spec.template.spec.as_mut().unwrap().containers[0].image = Some(image.into());
        *self.deployment.metadata.generation.as_mut().unwrap() += 1;
    }

    fn set_replicas(&mut self, replicas: i32) {
        self.deployment.spec.as_mut().unwrap().replicas = Some(replicas);
        *self.deployment.metadata.generation.as_mut().unwrap() += 1;
    }

    fn step(&mut self) -> Plan {
        self.clock += 1;
        let now = Timestamp::from_second(self.clock).unwrap();
        let with_pods = self
            .sets
            .iter()
            .filter(|set| set.status.as_ref().is_some_and(|s| s.replicas > 0));
        let plan = plan(Observed {
            deployment: self.deployment.clone(),
            sets_with_pods: with_pods.filter_map(|set| set.metadata.uid.clone()).collect(),
            sets: self.sets.clone(),
            now,
        });
        for write in &plan.writes {
            match write {
                Write::Create(set) => {
                    let mut set = (**set).clone();
                    set.metadata.uid = set.metadata.name.clone();
                    set.metadata.creation_timestamp =
                        Some(k8s_openapi::apimachinery::pkg::apis::meta::v1::Time(now));
                    self.sets.push(set);
                }
                Write::Update(set) => {
                    let place = self
                        .sets
                        .iter_mut()
                        .find(|one| one.metadata.name == set.metadata.name);
                    *place.unwrap() = (**set).clone();
                }
                Write::Delete(name) => self.sets.retain(|set| set.metadata.name.as_ref() != Some(name)),
            }
        }
        if let Some(deployment) = &plan.deployment {
            self.deployment = (**deployment).clone();
        }
        plan
    }

    /// Lets each ReplicaSet make what it wants; at most `ready` more pods become available in all.
    fn obey(&mut self, mut ready: i32) {
        for set in &mut self.sets {
            let wanted = scaling::replicas(set);
            let status = set.status.get_or_insert_default();
            status.replicas = wanted;
            let up = status.available_replicas.unwrap_or(0);
            let more = (wanted - up).clamp(0, ready);
            ready -= more;
            status.available_replicas = Some((up + more).min(wanted));
            status.ready_replicas = status.available_replicas;
        }
    }

    fn settle(&mut self) {
        for _ in 0..200 {
            self.obey(1);
            let plan = self.step();
            if plan.writes.is_empty() && plan.deployment.is_none() {
                return;
            }
        }
        panic!("the rollout does not end");
    }

    /// Sizes by revision, as `1:3 2:0`.
    fn sizes(&self) -> String {
        let mut all: Vec<(i64, i32)> = self
            .sets
            .iter()
            .map(|set| (revision::revision_of(set), scaling::replicas(set)))
            .collect();
        all.sort_unstable();
        all.iter()
            .map(|(revision, size)| format!("{revision}:{size}"))
            .collect::<Vec<_>>()
            .join(" ")
    }

    fn condition(&self, type_: &str) -> String {
        let condition = status::condition(self.deployment.status.as_ref().unwrap(), type_).unwrap();
        format!(
            "{} {}",
            condition.status,
            condition.reason.clone().unwrap_or_default()
        )
    }

    fn revision(&self) -> &str {
        &self.deployment.metadata.annotations.as_ref().unwrap()[revision::REVISION]
    }
}

#[test]
fn the_first_rollout_makes_one_set() {
    let mut world = World::rolling(json!("25%"), json!("25%"), 3);
    let plan = world.step();
    let [Write::Create(set)] = plan.writes.as_slice() else {
        panic!("{plan:?}")
    };
    let name = set.metadata.name.clone().unwrap();
    let hash = name.strip_prefix("web-").unwrap();
    let spec = set.spec.as_ref().unwrap();
    assert_eq!(spec.replicas, Some(3));
    assert_eq!(
        spec.selector.match_labels.as_ref().unwrap()["pod-template-hash"],
        hash
    );
    assert_eq!(set.metadata.labels.as_ref().unwrap()["pod-template-hash"], hash);
    let annotations = set.metadata.annotations.as_ref().unwrap();
    assert_eq!(annotations["deployment.kubernetes.io/desired-replicas"], "3");
    assert_eq!(annotations["deployment.kubernetes.io/max-replicas"], "4");
    assert_eq!(plan.events, vec![plan::Scaled { name, from: 0, to: 3 }]);
    assert_eq!(world.revision(), "1");
    assert_eq!(world.condition("Progressing"), "True NewReplicaSetCreated");
    assert_eq!(world.condition("Available"), "False MinimumReplicasUnavailable");
    world.settle();
    assert_eq!(world.condition("Progressing"), "True NewReplicaSetAvailable");
    assert_eq!(world.condition("Available"), "True MinimumReplicasAvailable");
    let status = world.deployment.status.as_ref().unwrap();
    assert_eq!(
        (
            status.replicas,
            status.updated_replicas,
            status.available_replicas
        ),
        (Some(3), Some(3), Some(3))
    );
    assert_eq!(
        (status.unavailable_replicas, status.observed_generation),
        (None, Some(1))
    );
}

#[test]
fn a_rolling_update_stays_within_its_bounds() {
    for (surge, unavailable, replicas) in [(1, 0, 3), (0, 1, 3), (2, 1, 10), (10, 10, 4)] {
        let mut world = World::rolling(json!(surge), json!(unavailable), replicas);
        world.settle();
        world.set_image("v2");
        for _ in 0..200 {
            let plan = world.step();
            let total: i32 = world.sets.iter().map(scaling::replicas).sum();
            assert!(total <= replicas + surge, "surge {}", world.sizes());
            let available: i32 = world
                .sets
                .iter()
                .map(|set| scaling::available(set).min(scaling::replicas(set)))
                .sum();
            assert!(available >= replicas - unavailable, "available {}", world.sizes());
            world.obey(1);
            if plan.writes.is_empty() && plan.deployment.is_none() {
                break;
            }
        }
        world.settle();
        assert_eq!(world.sizes(), format!("1:0 2:{replicas}"));
        assert_eq!(world.revision(), "2");
    }
}

#[test]
fn a_rollback_reuses_the_old_set() {
    let mut world = World::rolling(json!(1), json!(0), 2);
    world.settle();
    world.set_image("v2");
    world.settle();
    world.set_image("v1");
    world.settle();
    assert_eq!(world.sizes(), "2:0 3:2");
    assert_eq!(world.revision(), "3");
    assert_eq!(world.sets.len(), 2);
}

#[test]
fn old_sets_beyond_the_history_are_removed() {
    let mut world = World::rolling(json!(1), json!(0), 1);
    for image in ["v1", "v2", "v3", "v4", "v5"] {
        world.set_image(image);
        world.settle();
    }
    assert_eq!(world.sizes(), "3:0 4:0 5:1");
}

#[test]
fn recreate_waits_for_the_old_pods_to_go() {
    let mut world = World::new(json!({"type": "Recreate"}), 2);
    world.settle();
    world.set_image("v2");
    world.step();
    assert_eq!(world.sizes(), "1:0");
    // The pods are still there.
    world.step();
    assert_eq!(world.sizes(), "1:0");
    world.obey(5);
    world.step();
    assert_eq!(world.sizes(), "1:0 2:2");
    world.settle();
    assert_eq!(world.condition("Progressing"), "True NewReplicaSetAvailable");
}

#[test]
fn scaling_a_stuck_rollout_is_proportional() {
    let mut world = World::rolling(json!(3), json!(2), 10);
    world.settle();
    world.set_image("broken");
    for _ in 0..5 {
        world.step();
        world.obey(0);
    }
    assert_eq!(world.sizes(), "1:8 2:5");
    world.set_replicas(20);
    world.step();
    assert_eq!(world.sizes(), "1:14 2:9");
    world.set_replicas(5);
    world.step();
    world.obey(0);
    assert_eq!(scaling::total(&world.sets), 8);
}

#[test]
fn a_paused_deployment_scales_but_does_not_roll() {
    let mut world = World::rolling(json!(1), json!(0), 2);
    world.settle();
    world.deployment.spec.as_mut().unwrap().paused = Some(true);
    world.set_image("v2");
    world.step();
    assert_eq!(world.condition("Progressing"), "Unknown DeploymentPaused");
    world.set_replicas(4);
    world.step();
    assert_eq!(world.sizes(), "1:4");
    world.deployment.spec.as_mut().unwrap().paused = Some(false);
    world.step();
    world.settle();
    assert_eq!(world.sizes(), "1:0 2:4");
}

#[test]
fn a_rollout_without_progress_times_out() {
    let mut world = World::rolling(json!(1), json!(0), 2);
    world.step();
    world.obey(0);
    let plan = world.step();
    let wait = plan.look_again.unwrap().as_secs();
    assert!((595..=602).contains(&wait), "{wait}");
    world.clock += 700;
    let plan = world.step();
    assert_eq!(world.condition("Progressing"), "False ProgressDeadlineExceeded");
    assert_eq!(plan.look_again, None);
    // Late is better than never.
    world.settle();
    assert_eq!(world.condition("Progressing"), "True NewReplicaSetAvailable");
}

#[test]
fn a_deployment_that_is_deleted_only_reports() {
    let mut world = World::rolling(json!(1), json!(0), 2);
    world.settle();
    world.set_image("v2");
    world.deployment.metadata.deletion_timestamp = Some(
        k8s_openapi::apimachinery::pkg::apis::meta::v1::Time(Timestamp::from_second(5).unwrap()),
    );
    assert!(world.step().writes.is_empty());
}

#[test]
fn a_set_scaled_by_hand_to_the_wanted_size_does_not_stop_rollouts() {
    let mut world = World::rolling(json!(1), json!(0), 3);
    world.settle();
    world.sets[0].spec.as_mut().unwrap().replicas = Some(5);
    world.set_replicas(5);
    world.settle();
    world.set_image("v2");
    world.settle();
    assert_eq!(world.sizes(), "1:0 2:5");
}
