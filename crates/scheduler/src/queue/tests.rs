//! The queue by itself, with a plugin that sorts, gates and hints.

use super::*;
use crate::fixtures::{info, object, pod};
use crate::framework::{Enabled, Plugin, Rejection, Scope, Verdict};
use serde_json::json;
use std::collections::HashSet;
use tokio::time::timeout;

/// Sorts, cares for removed pods of the name "hope" and for its own changes, and holds back what is called "gated".
struct Fake;

impl Plugin for Fake {
    fn name(&self) -> &'static str {
        "Fake"
    }
    fn queue_sort(&self, pod: &PodInfo) -> Option<i64> {
        Some(-i64::from(pod.priority()))
    }
    fn hint(&self, _pod: &PodInfo, event: &ClusterEvent) -> bool {
        match event {
            ClusterEvent::PodRemoved(pod) => &*pod.uid == "hope",
            event => event.own().is_some(),
        }
    }
    fn pre_enqueue(&self, pod: &PodInfo) -> Verdict {
        if pod.shape.gates.is_empty() {
            return Ok(());
        }
        Err(Rejection::unresolvable("gated"))
    }
    fn scope(&self, _pod: &PodInfo) -> Scope {
        Scope::None
    }
}

fn queue() -> SchedulingQueue {
    let profile = Profile {
        scheduler_name: crate::config::DEFAULT_SCHEDULER.to_owned(),
        plugins: vec![Enabled {
            plugin: Arc::new(Fake),
            weight: 1,
            points: Points::ALL,
        }],
        percentage_of_nodes_to_score: 0,
    };
    let profiles = HashMap::from([(profile.scheduler_name.clone(), Arc::new(profile))]);
    SchedulingQueue::new(Arc::new(profiles), Backoff::default())
}

fn add(queue: &SchedulingQueue, name: &str, priority: i32) {
    queue.add(pod(name, json!({"priority": priority})));
}

async fn next(queue: &SchedulingQueue) -> String {
    queue.next().await.unwrap().pod.uid.to_string()
}

async fn quiet(queue: &SchedulingQueue) -> bool {
    timeout(Duration::from_secs(60), queue.next()).await.is_err()
}

fn removed(name: &str) -> ClusterEvent {
    ClusterEvent::PodRemoved(pod(name, json!({})))
}

#[tokio::test(start_paused = true)]
async fn priority_then_order_of_arrival() {
    let queue = queue();
    add(&queue, "first", 0);
    add(&queue, "second", 0);
    add(&queue, "urgent", 5);
    assert_eq!(
        [next(&queue).await, next(&queue).await, next(&queue).await],
        ["urgent", "first", "second"]
    );
}

#[tokio::test(start_paused = true)]
async fn a_parked_pod_waits_for_an_event_that_matters() {
    let queue = queue();
    for name in ["p", "q"] {
        add(&queue, name, 0);
        next(&queue).await;
        queue.park(name, 1);
    }
    assert_eq!(queue.inner.lock().waiting.len(), 1, "equal pods wait together");
    queue.on_event(removed("other"));
    assert!(quiet(&queue).await, "an event nobody cares about wakes nobody");
    queue.on_event(removed("hope"));
    let woken = HashSet::from([next(&queue).await, next(&queue).await]);
    assert_eq!(woken, HashSet::from(["p".to_owned(), "q".to_owned()]));
}

#[tokio::test(start_paused = true)]
async fn an_event_during_the_try_is_not_lost_and_one_that_does_not_matter_is() {
    let queue = queue();
    for (event, woken) in [("hope", true), ("other", false)] {
        add(&queue, "p", 0);
        next(&queue).await;
        queue.on_event(removed(event));
        queue.park("p", 1);
        assert_eq!(!quiet(&queue).await, woken, "{event}");
        queue.remove("p");
    }
    let inner = queue.inner.lock();
    assert!(inner.events.is_empty() && inner.in_flight.is_empty());
}

#[tokio::test(start_paused = true)]
async fn a_pod_whose_victims_go_waits_for_them_and_its_own_room_does_not_wake_it() {
    let queue = queue();
    add(&queue, "hope", 0);
    next(&queue).await;
    queue.on_event(removed("hope"));
    queue.park("hope", 1);
    assert!(quiet(&queue).await, "its own binding failed");
    queue.retry("hope");
    assert_eq!(next(&queue).await, "hope");
    // Held back meanwhile: an event that helps is remembered until it is let go.
    let gated = |gate: bool| {
        let gates = if gate { json!([{"name": "g"}]) } else { json!([]) };
        pod("hope", json!({"schedulingGates": gates}))
    };
    queue.add(gated(true));
    queue.park("hope", 1);
    assert_eq!(queue.pending().gated, 1);
    queue.release("hope");
    assert_eq!(queue.pending().gated, 1, "still held back");
    queue.add(gated(false));
    assert_eq!(next(&queue).await, "hope");
}

#[tokio::test(start_paused = true)]
async fn a_pod_that_nothing_wakes_is_tried_again_after_five_minutes() {
    let queue = queue();
    add(&queue, "p", 0);
    next(&queue).await;
    queue.park("p", 1);
    assert!(timeout(Duration::from_secs(299), queue.next()).await.is_err());
    assert!(timeout(Duration::from_secs(2), queue.next()).await.is_ok());
}

#[tokio::test(start_paused = true)]
async fn a_removed_pod_does_not_come_back() {
    let queue = queue();
    add(&queue, "p", 0);
    next(&queue).await;
    queue.remove("p");
    queue.back_off("p");
    assert!(quiet(&queue).await);
}

#[tokio::test(start_paused = true)]
async fn back_off_grows_and_an_idle_scheduler_does_not_wait_for_it() {
    let queue = queue();
    add(&queue, "p", 0);
    for seconds in [1, 2, 4, 8, 10, 10] {
        next(&queue).await;
        let began = Instant::now();
        queue.back_off("p");
        let inner = queue.inner.lock();
        let State::Backoff { until, error: true } = inner.entries["p"].state else {
            panic!()
        };
        let (least, waits) = (Duration::from_secs(seconds), until - began);
        assert!(least <= waits && waits < least.mul_f64(1.25), "{waits:?}");
    }
    next(&queue).await;
    queue.on_event(removed("hope"));
    queue.park("p", 1);
    assert_eq!(queue.pending().backoff, 1);
    assert!(
        timeout(Duration::from_millis(1), queue.next()).await.is_ok(),
        "nothing else to do"
    );
}

#[tokio::test(start_paused = true)]
async fn its_own_condition_does_not_wake_a_pod_but_a_new_spec_does() {
    let queue = queue();
    let with = |spec: serde_json::Value, status: &str| {
        let mut pod = object("p", json!({}), spec);
        pod.status = serde_json::from_value(json!({"message": status})).unwrap();
        info(&pod)
    };
    queue.add(with(json!({}), ""));
    next(&queue).await;
    // While it is being tried, and while it waits.
    queue.add(with(json!({}), "tried"));
    queue.park("p", 1);
    queue.add(with(json!({}), "waiting"));
    assert!(quiet(&queue).await, "a changed status wakes nobody");
    queue.add(with(json!({"tolerations": [{"operator": "Exists"}]}), ""));
    assert_eq!(next(&queue).await, "p");
    queue.add(with(json!({"priority": 3}), ""));
    queue.park("p", 1);
    let again = timeout(Duration::from_secs(5), queue.next()).await;
    assert_eq!(
        again.unwrap().unwrap().attempts,
        3,
        "a spec that changed during the try"
    );
}

#[tokio::test(start_paused = true)]
async fn gates_hold_a_pod_back() {
    let queue = queue();
    queue.add(pod("p", json!({"schedulingGates": [{"name": "g"}]})));
    assert!(quiet(&queue).await);
    assert_eq!(queue.pending().gated, 1);
    queue.add(pod("p", json!({})));
    assert_eq!(next(&queue).await, "p");
}

#[tokio::test(start_paused = true)]
async fn a_pod_that_failed_stands_behind_those_that_came_meanwhile() {
    let queue = queue();
    add(&queue, "old", 0);
    next(&queue).await;
    add(&queue, "new", 0);
    queue.back_off("old");
    tokio::time::advance(Duration::from_secs(2)).await;
    add(&queue, "newer", 0);
    assert_eq!(
        [next(&queue).await, next(&queue).await, next(&queue).await],
        ["new", "old", "newer"]
    );
    let inner = queue.inner.lock();
    assert_eq!(
        (inner.active.len(), inner.timers.len(), inner.entries.len()),
        (0, 0, 3)
    );
}

#[tokio::test(start_paused = true)]
async fn the_pods_of_a_group_are_taken_together() {
    let queue = queue();
    let member = |name: &str, group: &str, more: serde_json::Value| {
        let mut spec = more;
        spec["schedulingGroup"] = json!({"podGroupName": group});
        queue.add(pod(name, spec));
    };
    for (name, priority) in [("waits", 4), ("backs-off", 3), ("in-flight", 2)] {
        member(name, "g", json!({"priority": priority}));
        next(&queue).await;
    }
    queue.park("waits", 1);
    queue.back_off("backs-off");
    member("first", "g", json!({}));
    member("gated", "g", json!({"schedulingGates": [{"name": "a"}]}));
    member("other", "h", json!({}));
    add(&queue, "alone", 0);
    let key = Key::new("default", "g");
    let mut taken = queue.take_group(&key);
    taken.sort_by_key(Queued::group_order);
    let names: Vec<&str> = taken.iter().map(|one| &*one.pod.uid).collect();
    assert_eq!(names, ["waits", "backs-off", "first"]);
    let attempts: Vec<u32> = taken.iter().map(|one| one.attempts).collect();
    assert_eq!(attempts, [2, 2, 1]);
    assert!(queue.take_group(&key).is_empty(), "they are being tried");
    assert_eq!(
        (next(&queue).await, next(&queue).await),
        ("other".into(), "alone".into())
    );
    for uid in ["waits", "backs-off", "first", "in-flight", "gated"] {
        queue.remove(uid);
    }
    assert!(
        queue
            .inner
            .lock()
            .pod_groups
            .keys()
            .all(|group| group.name == "h")
    );
}
