//! Pods of PodGroups: gangs are bound as a whole or not at all.

use std::collections::HashMap;
use std::time::Duration;

use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::scheduling::v1::PriorityClass;
use k8s_openapi::api::scheduling::v1alpha2::PodGroup;
use kube::api::{DeleteParams, ListParams, PostParams};
use kube::{Api, ResourceExt};
use serde_json::{Value, json};

use crate::cluster::{Cluster, Process, SLOTS, check, condition, configuration, node_of, pod};

const SERVED: &[&str] = &["scheduling.k8s.io/v1alpha2=true"];

async fn start() -> (Cluster, Process) {
    let cluster = Cluster::serving(SERVED).await;
    let config = configuration("podInitialBackoffSeconds: 1\npodMaxBackoffSeconds: 1\n");
    let scheduler = cluster.start_scheduler("s", false, &config);
    (cluster, scheduler)
}

fn member(name: &str, group: &str, more: Value) -> Value {
    let mut spec = more;
    spec["schedulingGroup"] = json!({"podGroupName": group});
    pod(name, spec)
}

impl Cluster {
    async fn add_gang(&self, name: &str, min_count: usize) {
        let policy = json!({"gang": {"minCount": min_count}});
        let group = json!({"metadata": {"name": name}, "spec": {"schedulingPolicy": policy}});
        self.create::<PodGroup>(group).await;
    }

    async fn add_members(&self, group: &str, count: usize) {
        for number in 0..count {
            let name = format!("{group}-{number}");
            self.create::<Pod>(member(&name, group, json!({}))).await;
        }
    }

    /// How many of the pods whose names begin so have a node.
    async fn bound(&self, prefix: &str) -> usize {
        let pods = self.pods().await;
        let bound = pods.iter().filter(|pod| node_of(pod).is_some());
        bound.filter(|pod| pod.name_any().starts_with(prefix)).count()
    }

    async fn until_condition(&self, group: &str, status: &str, message: &str) {
        self.until(&format!("{group} {status}"), async || {
            let group = self.api::<PodGroup>().get(group).await.unwrap();
            let conditions = group
                .status
                .and_then(|status| status.conditions)
                .unwrap_or_default();
            let found = conditions.iter().find(|one| one.type_ == "PodGroupScheduled");
            let right = found.is_some_and(|one| one.status == status && one.message == message);
            check(right, conditions)
        })
        .await;
    }

    /// Waits until a scheduler that has had something else to do has done it.
    async fn until_busy_scheduler_is_done(&self, name: &str) {
        self.create::<Pod>(pod(name, json!({}))).await;
        self.until_bound(name, |other| other == name).await;
        tokio::time::sleep(Duration::from_millis(1500)).await;
    }
}

const UNSCHEDULABLE: &str = "pod group is unschedulable";

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_gang_waits_for_its_group_and_its_pods() {
    let (cluster, mut scheduler) = start().await;
    cluster.add_node("a").await;
    cluster.add_node("b").await;
    cluster.add_members("g", 9).await;
    cluster.until_busy_scheduler_is_done("other").await;
    assert_eq!(cluster.bound("g-").await, 0, "there is no group");
    cluster.add_gang("g", 10).await;
    cluster.until_busy_scheduler_is_done("another").await;
    assert_eq!(cluster.bound("g-").await, 0, "one pod is missing");
    cluster.create::<Pod>(member("g-9", "g", json!({}))).await;
    cluster.until_bound("the gang", |_| true).await;
    cluster.until_condition("g", "True", "").await;
    // Pods that come later need nobody else, also if the scheduler has never seen the others wait, and sees one of the new
    // pods before these.
    scheduler.kill().await;
    cluster.create::<Pod>(member("before", "g", json!({}))).await;
    let config = configuration("");
    let _scheduler = cluster.start_scheduler("t", false, &config);
    cluster.until_bound("the pod that came first", |_| true).await;
    cluster.create::<Pod>(member("g-late", "g", json!({}))).await;
    cluster.until_bound("the late pod", |_| true).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_gang_that_does_not_fit_binds_nothing_until_it_does() {
    let (cluster, _scheduler) = start().await;
    cluster.add_node("a").await;
    let size = SLOTS + 2;
    cluster.add_gang("g", size).await;
    cluster.add_members("g", size).await;
    cluster.until_condition("g", "False", UNSCHEDULABLE).await;
    cluster
        .until("the reasons", async || {
            let pods = cluster.pods().await;
            let reasons: Vec<String> = pods.iter().map(condition).collect();
            let of = |text: &str| reasons.iter().filter(|reason| reason.starts_with(text)).count();
            let waiting = "pod group is unschedulable, waiting for minCount pods from a gang to be scheduled";
            check(
                of(waiting) == SLOTS && of("0/1 nodes are available: 1 Insufficient cpu") == 2,
                reasons,
            )
        })
        .await;
    // Nothing of its room is held meanwhile.
    cluster.until_busy_scheduler_is_done("other").await;
    assert_eq!(cluster.bound("g-").await, 0);
    // One pod less than the gang needs.
    cluster.delete_pod("g-0").await;
    cluster.add_node("b").await;
    cluster.until_busy_scheduler_is_done("another").await;
    assert_eq!(cluster.bound("g-").await, 0, "one pod was deleted");
    cluster.create::<Pod>(member("g-new", "g", json!({}))).await;
    cluster.until_bound("the gang", |_| true).await;
    cluster.until_condition("g", "True", "").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_gang_that_does_not_fit_is_bound_when_a_node_is_added() {
    let (cluster, _scheduler) = start().await;
    cluster.add_node("a").await;
    // More pods than it needs: those that find no room wait by themselves.
    cluster.add_gang("g", SLOTS + 2).await;
    cluster.add_members("g", 2 * SLOTS + 1).await;
    cluster.until_condition("g", "False", UNSCHEDULABLE).await;
    assert_eq!(cluster.bound("g-").await, 0);
    cluster.add_node("b").await;
    cluster.until_condition("g", "True", "").await;
    cluster
        .until("all that have room", async || {
            let bound = cluster.bound("g-").await;
            check(bound == 2 * SLOTS, bound)
        })
        .await;
    cluster.add_node("c").await;
    cluster.until_bound("the last one", |_| true).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn of_two_gangs_that_compete_one_is_bound() {
    let (cluster, _scheduler) = start().await;
    let size = SLOTS - 2;
    cluster.add_gang("g", size).await;
    cluster.add_gang("h", size).await;
    for number in 0..size {
        for group in ["g", "h"] {
            let name = format!("{group}-{number}");
            cluster.create::<Pod>(member(&name, group, json!({}))).await;
        }
    }
    cluster.add_node("a").await;
    cluster
        .until("one gang", async || {
            let bound = (cluster.bound("g-").await, cluster.bound("h-").await);
            check(bound.0 == size || bound.1 == size, bound)
        })
        .await;
    tokio::time::sleep(Duration::from_millis(1500)).await;
    let (winner, loser) = match (cluster.bound("g-").await, cluster.bound("h-").await) {
        (_, 0) => ("g", "h"),
        (0, _) => ("h", "g"),
        both => panic!("{both:?}"),
    };
    cluster.until_condition(winner, "True", "").await;
    cluster.until_condition(loser, "False", UNSCHEDULABLE).await;
    for number in 0..size {
        cluster.delete_pod(&format!("{winner}-{number}")).await;
    }
    cluster.until_bound("the other gang", |_| true).await;
    cluster.until_condition(loser, "True", "").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pods_of_a_basic_group_are_bound_one_by_one() {
    let (cluster, _scheduler) = start().await;
    cluster.add_node("a").await;
    cluster.add_members("g", SLOTS + 1).await;
    cluster.until_busy_scheduler_is_done("other").await;
    assert_eq!(cluster.bound("g-").await, 0, "there is no group");
    let group = json!({"metadata": {"name": "g"}, "spec": {"schedulingPolicy": {"basic": {}}}});
    cluster.create::<PodGroup>(group).await;
    cluster
        .until("all that have room", async || {
            let bound = cluster.bound("g-").await;
            check(bound == SLOTS - 1, bound)
        })
        .await;
    cluster.until_condition("g", "True", "").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_gang_preempts_only_if_that_makes_it_fit() {
    let (cluster, _scheduler) = start().await;
    let classes: Api<PriorityClass> = Api::all(cluster.client.clone());
    let class = json!({"metadata": {"name": "high"}, "value": 1000});
    let class: PriorityClass = serde_json::from_value(class).unwrap();
    classes.create(&PostParams::default(), &class).await.unwrap();
    cluster.add_node("a").await;
    for number in 0..SLOTS {
        cluster
            .create::<Pod>(pod(&format!("low-{number}"), json!({})))
            .await;
    }
    cluster.until_bound("the pods of low priority", |_| true).await;
    let high = |name: String, group: &str| member(&name, group, json!({"priorityClassName": "high"}));
    cluster.add_gang("big", SLOTS + 1).await;
    for number in 0..=SLOTS {
        cluster.create::<Pod>(high(format!("big-{number}"), "big")).await;
    }
    cluster.until_condition("big", "False", UNSCHEDULABLE).await;
    tokio::time::sleep(Duration::from_millis(1500)).await;
    let victims = async || {
        let pods = cluster.pods().await;
        let going = pods
            .iter()
            .filter(|pod| pod.metadata.deletion_timestamp.is_some());
        going.map(ResourceExt::name_any).collect::<Vec<_>>()
    };
    assert!(victims().await.is_empty(), "it would not fit anyway");
    let all = ListParams::default().labels("kind=big");
    let now = DeleteParams::default().grace_period(0);
    cluster.api::<Pod>().delete_collection(&now, &all).await.unwrap();
    cluster.add_gang("small", 3).await;
    for number in 0..3 {
        cluster
            .create::<Pod>(high(format!("small-{number}"), "small"))
            .await;
    }
    cluster
        .until("the victims", async || {
            let victims = victims().await;
            check(victims.len() == 3, victims)
        })
        .await;
    let waiting = "pod group is unschedulable, pod group is waiting for preemption to complete";
    cluster.until_condition("small", "False", waiting).await;
    assert_eq!(cluster.bound("small-").await, 0);
    // There is no kubelet to end them. Nobody else takes the room of those that went first.
    for name in victims().await {
        cluster.delete_pod(&name).await;
        let number = name.strip_prefix("low-").unwrap();
        cluster
            .create::<Pod>(pod(&format!("later-{number}"), json!({})))
            .await;
        tokio::time::sleep(Duration::from_millis(300)).await;
    }
    cluster
        .until_bound("the gang", |name| name.starts_with("small"))
        .await;
    cluster.until_condition("small", "True", "").await;
    assert_eq!(cluster.bound("low-").await, SLOTS - 3, "nobody else was evicted");
    assert_eq!(cluster.bound("later-").await, 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn gangs_survive_a_scheduler_that_is_killed() {
    let (cluster, mut scheduler) = start().await;
    for node in ["a", "b", "c"] {
        cluster.add_node(node).await;
    }
    let mut known = HashMap::new();
    for round in 0..4 {
        let gang = format!("g{round}");
        cluster.add_gang(&gang, 5).await;
        cluster.add_members(&gang, 5).await;
        tokio::time::sleep(Duration::from_millis(7 * round)).await;
        scheduler.kill().await;
        scheduler = cluster.start_scheduler("s", false, &configuration("podMaxBackoffSeconds: 1\n"));
        cluster.check_consistency(&mut known).await;
    }
    cluster.until_bound("all gangs", |_| true).await;
    cluster.check_consistency(&mut known).await;
}
