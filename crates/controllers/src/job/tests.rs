//! Tests of the plans of Jobs, and of counting when a sync is interrupted.

use std::collections::HashSet;
use std::sync::Arc;

use jiff::Timestamp;
use k8s_openapi::api::batch::v1::{Job, JobStatus};
use k8s_openapi::api::core::v1::Pod;
use serde_json::{Value, json};

use super::backoff::Backoff;
use super::facts::{self, INDEX, INDEX_FAILURES, TRACKING};
use super::plan::{Manage, Outcome, Sync};
use super::tracking::{self, count_released};

fn now() -> Timestamp {
    "2026-01-01T01:00:00Z".parse().unwrap()
}

fn job(spec: Value, status: Value) -> Job {
    let mut whole = json!({"template": {"spec": {"containers": [], "restartPolicy": "Never"}}, "parallelism": 2,
        "completions": 2, "backoffLimit": 6, "completionMode": "NonIndexed"});
    whole
        .as_object_mut()
        .unwrap()
        .extend(spec.as_object().unwrap().clone());
    serde_json::from_value(
        json!({"metadata": {"name": "j", "namespace": "ns", "uid": "j"}, "spec": whole, "status": status}),
    )
    .unwrap()
}

/// `name:phase` and then words: an index, `fN` failures of its index before, `exit=N`, `gone` for one that is being
/// deleted, `free` for one without the finalizer, `ready`, `old` for one that ended long ago, `restarts=N`, `evicted`.
fn pod(text: &str) -> Arc<Pod> {
    let (name, rest) = text.split_once(':').unwrap();
    let mut words = rest.split(' ');
    let phase = words.next().unwrap();
    let mut pod = json!({"metadata": {"name": name, "namespace": "ns", "uid": name, "finalizers": [TRACKING], "annotations": {},
            "creationTimestamp": "2026-01-01T00:00:00Z"},
        "spec": {"containers": [], "nodeName": "n"}, "status": {"phase": phase, "conditions": []}});
    let mut exit = 1;
    let mut ended = "2026-01-01T01:00:00Z";
    let mut restarts = 0;
    for word in words {
        if let Ok(index) = word.parse::<i32>() {
            pod["metadata"]["annotations"][INDEX] = json!(index.to_string());
        } else if let Some(count) = word.strip_prefix('f').and_then(|count| count.parse::<i32>().ok()) {
            pod["metadata"]["annotations"][INDEX_FAILURES] = json!(count.to_string());
        } else if let Some(code) = word.strip_prefix("exit=") {
            exit = code.parse().unwrap();
        } else if let Some(count) = word.strip_prefix("restarts=") {
            restarts = count.parse().unwrap();
        } else {
            match word {
                "gone" => pod["metadata"]["deletionTimestamp"] = json!("2026-01-01T01:00:00Z"),
                "free" => pod["metadata"]["finalizers"] = json!([]),
                "old" => ended = "2026-01-01T00:00:00Z",
                "ready" => pod["status"]["conditions"] = json!([{"type": "Ready", "status": "True"}]),
                "evicted" => {
                    pod["status"]["conditions"] = json!([{"type": "DisruptionTarget", "status": "True"}])
                }
                _ => panic!("{word}"),
            }
        }
    }
    let state = match phase {
        "Succeeded" => json!({"terminated": {"exitCode": 0, "finishedAt": ended}}),
        "Failed" => json!({"terminated": {"exitCode": exit, "finishedAt": ended}}),
        _ => json!({}),
    };
    pod["status"]["containerStatuses"] = json!([{"name": "c", "image": "", "imageID": "", "ready": false,
        "restartCount": restarts, "state": state}]);
    Arc::new(serde_json::from_value(pod).unwrap())
}

fn pods(list: &[&str]) -> Vec<Arc<Pod>> {
    list.iter().map(|text| pod(text)).collect()
}

fn names(pods: &[Arc<Pod>]) -> String {
    let names: Vec<&str> = pods.iter().map(|pod| facts::uid(pod)).collect();
    names.join(" ")
}

fn shown(sync: &Sync<'_>) -> String {
    let (manage, wait) = sync.manage();
    let mut text = match manage {
        Manage::Nothing => "nothing".to_owned(),
        Manage::End(pods) => {
            let end = sync.finished.as_ref().unwrap();
            format!(
                "{} {}: end [{}]",
                end.type_,
                end.reason.as_deref().unwrap_or_default(),
                names(&pods)
            )
        }
        Manage::Remove(pods) => format!("remove {}", names(&pods)),
        Manage::Create(indexes) => match indexes.iter().copied().collect::<Option<Vec<i32>>>() {
            Some(indexes) => format!("create {indexes:?}"),
            None => format!("create {}", indexes.len()),
        },
    };
    if let Some(wait) = wait {
        text += &format!(", look in {}", wait.as_secs());
    }
    text
}

#[track_caller]
fn check(spec: Value, status: Value, list: &[&str], expected: &str) {
    let job = job(spec, status);
    let sync = Sync::new(
        &job,
        job.spec.as_ref().unwrap(),
        pods(list),
        Backoff::default(),
        now(),
    );
    assert_eq!(shown(&sync), expected, "{list:?}");
}

#[test]
fn as_many_pods_as_are_wanted() {
    let of = |parallelism: i32, completions: Value| json!({"parallelism": parallelism, "completions": completions});
    let none = || json!({});
    check(none(), none(), &[], "create 2");
    check(of(2, json!(5)), none(), &["a:Running"], "create 1");
    check(of(2, json!(5)), none(), &["a:Running", "b:Pending"], "nothing");
    check(of(3, json!(5)), json!({"succeeded": 4}), &[], "create 1");
    check(
        of(3, json!(5)),
        json!({"succeeded": 3}),
        &["a:Succeeded", "b:Running"],
        "nothing",
    );
    check(of(2000, json!(2000)), none(), &[], "create 500");
    // One that is being deleted is replaced at once, unless the Job wants to know how it ends.
    check(
        none(),
        none(),
        &["a:Running gone old", "b:Running"],
        "nothing, look in 10",
    );
    check(
        json!({"podReplacementPolicy": "Failed"}),
        none(),
        &["a:Running gone", "b:Running"],
        "nothing",
    );
    // A work queue: after the first success nothing new starts.
    check(of(3, Value::Null), none(), &["a:Running"], "create 2");
    check(
        of(3, Value::Null),
        none(),
        &["a:Running", "b:Succeeded"],
        "nothing",
    );
    // Too many: those with the least behind them go.
    check(
        of(1, json!(5)),
        none(),
        &["a:Running ready", "b:Running", "c:Pending"],
        "remove c b",
    );
    check(
        json!({"suspend": true}),
        none(),
        &["a:Running", "b:Pending"],
        "remove b a",
    );
    check(
        json!({"suspend": true, "activeDeadlineSeconds": 5}),
        none(),
        &[],
        "nothing",
    );
    check(of(0, json!(5)), none(), &[], "nothing");
}

#[test]
fn indexes_are_filled_from_the_lowest() {
    let indexed = |parallelism: i32, completions: i32| json!({"completionMode": "Indexed", "parallelism": parallelism, "completions": completions});
    check(indexed(3, 5), json!({}), &[], "create [0, 1, 2]");
    check(
        indexed(3, 5),
        json!({"completedIndexes": "0,2", "succeeded": 2}),
        &["a:Running 1"],
        "create [3, 4]",
    );
    check(
        indexed(2, 5),
        json!({}),
        &["a:Succeeded 0", "b:Running 1"],
        "create [2]",
    );
    // Two of one index, one without, and one that the Job no longer has.
    check(
        indexed(4, 4),
        json!({}),
        &[
            "a:Running 0 ready",
            "b:Pending 0",
            "c:Running",
            "d:Running 9",
            "e:Running 1",
        ],
        "remove b c d",
    );
    // Scaled down: indexes that are out of range do not count any more.
    check(
        indexed(2, 2),
        json!({"completedIndexes": "1-4", "succeeded": 4}),
        &[],
        "create [0]",
    );
    let failed_only = json!({"completionMode": "Indexed", "parallelism": 3, "completions": 3, "podReplacementPolicy": "Failed"});
    check(
        failed_only,
        json!({}),
        &["a:Running 0 gone", "b:Running 2"],
        "create [1]",
    );
}

#[test]
fn failures_delay_and_end_a_job() {
    let none = || json!({});
    check(none(), none(), &["a:Failed"], "nothing, look in 10");
    check(none(), none(), &["a:Failed", "b:Failed"], "nothing, look in 20");
    check(none(), none(), &["a:Failed old"], "create 2");
    check(none(), none(), &["a:Failed", "b:Succeeded"], "create 1");
    let limit = |limit: i32| json!({"backoffLimit": limit});
    check(
        limit(1),
        none(),
        &["a:Failed", "b:Running"],
        "nothing, look in 10",
    );
    check(
        limit(0),
        none(),
        &["a:Failed", "b:Running"],
        "FailureTarget BackoffLimitExceeded: end [b]",
    );
    check(
        limit(2),
        json!({"failed": 2}),
        &["a:Failed"],
        "FailureTarget BackoffLimitExceeded: end []",
    );
    // What is named as uncounted counts once, though the pod is still there.
    let named = json!({"uncountedTerminatedPods": {"failed": ["a"]}});
    check(limit(1), named.clone(), &["a:Failed old"], "create 2");
    check(
        limit(0),
        named,
        &["a:Failed old"],
        "FailureTarget BackoffLimitExceeded: end []",
    );
    let restarting = |limit: i32| json!({"backoffLimit": limit, "template": {"spec": {"containers": [], "restartPolicy": "OnFailure"}}});
    check(
        restarting(3),
        none(),
        &["a:Running restarts=1", "b:Running restarts=1"],
        "nothing",
    );
    check(
        restarting(2),
        none(),
        &["a:Running restarts=1", "b:Running restarts=1"],
        "FailureTarget BackoffLimitExceeded: end [a b]",
    );
    check(restarting(0), none(), &["a:Running", "b:Running"], "nothing");
    let deadline = |seconds: i64| json!({"activeDeadlineSeconds": seconds});
    let started = || json!({"startTime": "2026-01-01T00:59:00Z"});
    check(
        deadline(90),
        started(),
        &["a:Running", "b:Running"],
        "nothing, look in 30",
    );
    check(
        deadline(60),
        started(),
        &["a:Running"],
        "FailureTarget DeadlineExceeded: end [a]",
    );
    check(deadline(60), none(), &[], "create 2, look in 60");
    // What was decided stands, whatever the pods say now.
    let target =
        json!({"conditions": [{"type": "FailureTarget", "status": "True", "reason": "DeadlineExceeded"}]});
    check(none(), target, &["a:Running"], "Failed DeadlineExceeded: end [a]");
    let met =
        json!({"conditions": [{"type": "SuccessCriteriaMet", "status": "True", "reason": "SuccessPolicy"}]});
    check(
        limit(0),
        met,
        &["a:Failed", "b:Running"],
        "SuccessCriteriaMet SuccessPolicy: end [b]",
    );
}

#[test]
fn policies() {
    let rule = |action: &str| {
        json!({"rules": [{"action": action, "onExitCodes": {"operator": "In", "values": [42]}},
        {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}]})
    };
    let with = |action: &str| json!({"backoffLimit": 0, "podFailurePolicy": rule(action)});
    check(
        with("FailJob"),
        json!({}),
        &["a:Failed exit=42", "b:Running"],
        "FailureTarget PodFailurePolicy: end [b]",
    );
    check(
        with("FailJob"),
        json!({}),
        &["a:Failed exit=1"],
        "FailureTarget BackoffLimitExceeded: end []",
    );
    check(with("Ignore"), json!({}), &["a:Failed exit=42 old"], "create 2");
    check(
        with("Count"),
        json!({}),
        &["a:Failed exit=42"],
        "FailureTarget BackoffLimitExceeded: end []",
    );
    check(with("FailJob"), json!({}), &["a:Failed evicted old"], "create 2");
    // One that is being deleted has not failed yet.
    check(
        with("FailJob"),
        json!({}),
        &["a:Running gone", "b:Running"],
        "nothing",
    );
    let per_index = |limit: i32, most: Value| {
        json!({"completionMode": "Indexed", "parallelism": 3, "completions": 3, "backoffLimit": 1000,
            "backoffLimitPerIndex": limit, "maxFailedIndexes": most})
    };
    check(
        per_index(1, Value::Null),
        json!({}),
        &["a:Failed 0 old", "b:Running 1"],
        "create [0, 2]",
    );
    check(
        per_index(1, Value::Null),
        json!({}),
        &["a:Failed 0", "b:Running 1"],
        "create [2], look in 10",
    );
    check(
        per_index(3, Value::Null),
        json!({}),
        &["a:Failed 0 f2", "b:Running 1", "c:Running 2"],
        "nothing, look in 40",
    );
    check(
        per_index(1, Value::Null),
        json!({}),
        &["a:Failed 0 f1", "b:Running 1"],
        "create [2]",
    );
    check(
        per_index(0, json!(1)),
        json!({"failedIndexes": "1"}),
        &["a:Failed 0"],
        "FailureTarget MaxFailedIndexesExceeded: end []",
    );
    check(
        per_index(0, Value::Null),
        json!({"failedIndexes": "1", "completedIndexes": "2"}),
        &["a:Failed 0"],
        "FailureTarget FailedIndexes: end []",
    );
    let mut fail_index = per_index(5, Value::Null);
    fail_index["podFailurePolicy"] = rule("FailIndex");
    check(
        fail_index,
        json!({}),
        &["a:Failed 0 exit=42", "b:Running 1", "c:Running 2"],
        "nothing",
    );
    let success = json!({"completionMode": "Indexed", "parallelism": 3, "completions": 3,
        "successPolicy": {"rules": [{"succeededIndexes": "1"}]}});
    check(
        success.clone(),
        json!({}),
        &["a:Running 0", "b:Succeeded 1"],
        "SuccessCriteriaMet SuccessPolicy: end [a]",
    );
    check(
        success,
        json!({}),
        &["a:Succeeded 0", "b:Running 1", "c:Running 2"],
        "nothing",
    );
}

/// A Job and its pods as the API has them.
struct World {
    job: Job,
    pods: Vec<Arc<Pod>>,
}

impl World {
    fn status(&self) -> &JobStatus {
        self.job.status.as_ref().unwrap()
    }

    /// One sync that does what the controller does, and is interrupted before its step number `interrupted`.
    fn sync(&mut self, interrupted: usize) {
        let mut steps = 0..interrupted;
        let job = self.job.clone();
        let mut sync = Sync::new(
            &job,
            job.spec.as_ref().unwrap(),
            self.pods.clone(),
            Backoff::default(),
            now(),
        );
        let outcome = match sync.manage().0 {
            Manage::End(active) => {
                if steps.next().is_none() {
                    return;
                }
                // Without a kubelet: they are gone as soon as their finalizer is.
                for pod in &mut self.pods {
                    if active.iter().any(|gone| facts::uid(gone) == facts::uid(pod)) {
                        let mut deleted = (**pod).clone();
                        deleted.status.as_mut().unwrap().phase = Some("Failed".into());
                        *pod = Arc::new(deleted);
                    }
                }
                Outcome {
                    removed: active.len() as i32,
                    ..Default::default()
                }
            }
            _ => Outcome::default(),
        };
        sync.settle(outcome);
        sync.status.terminating = Some(0);
        let mut release = sync.track();
        if steps.next().is_none() {
            return;
        }
        self.job.status = Some(sync.status.clone());
        for released in &release.pods {
            if steps.next().is_none() {
                return;
            }
            for pod in self
                .pods
                .iter_mut()
                .filter(|pod| facts::uid(pod) == facts::uid(released))
            {
                let mut free = (**pod).clone();
                free.metadata.finalizers = None;
                *pod = Arc::new(free);
            }
            release.tracked.remove(facts::uid(released));
        }
        count_released(&mut sync.status, &release.tracked);
        if !release.more {
            sync.finish();
        }
        if steps.next().is_none() {
            return;
        }
        self.job.status = Some(sync.status);
    }
}

/// However often a sync is interrupted, and wherever, each pod is counted once.
#[test]
fn nothing_is_counted_twice() {
    for seed in 0..300_usize {
        let mut world = World {
            job: job(
                json!({"completions": 20, "parallelism": 9, "backoffLimit": 5}),
                json!({}),
            ),
            pods: Vec::new(),
        };
        let (mut succeeded, mut failed) = (0, 0);
        let mut random = seed * 7919 + 1;
        let mut next = |below: usize| {
            random = random
                .wrapping_mul(6364136223846793005)
                .wrapping_add(1442695040888963407);
            (random >> 33) % below
        };
        for round in 0..8 {
            for number in 0..next(3) {
                world.pods.push(pod(&format!("s{round}.{number}:Succeeded")));
                succeeded += 1;
            }
            if round % 2 == 0 && failed < 5 {
                world.pods.push(pod(&format!("f{round}:Failed")));
                failed += 1;
            }
            world.sync(next(12));
        }
        world.sync(usize::MAX);
        world.sync(usize::MAX);
        let status = world.status();
        assert_eq!(
            (status.succeeded.unwrap_or(0), status.failed.unwrap_or(0)),
            (succeeded, failed),
            "seed {seed}"
        );
        let none =
            Some(tracking::normal(status)).is_some_and(|status| status.uncounted_terminated_pods.is_none());
        assert!(
            none && world.pods.iter().all(|pod| !facts::is_tracked(pod)),
            "seed {seed}"
        );
    }
}

fn condition_types(status: &JobStatus) -> Vec<&str> {
    status
        .conditions
        .iter()
        .flatten()
        .map(|condition| condition.type_.as_str())
        .collect()
}

/// The interim condition is written before any finalizer goes, the terminal one after all have gone.
#[test]
fn the_end_of_a_job() {
    let run = |spec: Value, list: &[&str], steps: usize| {
        let mut world = World {
            job: job(spec, json!({})),
            pods: pods(list),
        };
        world.sync(steps);
        world
    };
    let done = run(json!({}), &["a:Succeeded", "b:Succeeded"], 1);
    assert_eq!(condition_types(done.status()), ["SuccessCriteriaMet"]);
    let named = done.status().uncounted_terminated_pods.as_ref().unwrap();
    assert_eq!(named.succeeded.as_ref().unwrap(), &["a", "b"]);
    assert_eq!(done.status().completion_time, None);
    let done = run(json!({}), &["a:Succeeded", "b:Succeeded"], usize::MAX);
    assert_eq!(condition_types(done.status()), ["SuccessCriteriaMet", "Complete"]);
    assert_eq!(done.status().succeeded, Some(2));
    assert!(done.status().completion_time.is_some());
    // With a failed Job every pod has failed, but not with one that met its success policy.
    let lost = run(json!({"backoffLimit": 0}), &["a:Failed", "b:Running"], usize::MAX);
    assert_eq!(condition_types(lost.status()), ["FailureTarget", "Failed"]);
    assert_eq!((lost.status().failed, lost.status().active), (Some(2), Some(0)));
    let indexed = json!({"completionMode": "Indexed", "successPolicy": {"rules": [{"succeededCount": 1}]}});
    let met = run(indexed, &["a:Succeeded 0", "b:Running 1"], usize::MAX);
    assert_eq!(condition_types(met.status()), ["SuccessCriteriaMet", "Complete"]);
    assert_eq!(
        (met.status().succeeded, met.status().failed.unwrap_or(0)),
        (Some(1), 0)
    );
    assert_eq!(met.status().completed_indexes.as_deref(), Some("0"));
}

/// A status names at most 500 pods at a time, and the Job is not over before the rest is counted.
#[test]
fn many_pods_are_counted_in_turns() {
    let list: Vec<Arc<Pod>> = (0..1200)
        .map(|number| pod(&format!("p{number}:Succeeded")))
        .collect();
    let mut world = World {
        job: job(json!({"completions": 1200, "parallelism": 1200}), json!({})),
        pods: list,
    };
    for (succeeded, over) in [(500, false), (1000, false), (1200, true)] {
        world.sync(usize::MAX);
        assert_eq!(world.status().succeeded, Some(succeeded));
        assert_eq!(facts::is_true(world.status(), "Complete"), over, "{succeeded}");
    }
}

#[test]
fn pods_that_end_with_their_job_are_waited_for() {
    let lost = job(json!({"backoffLimit": 0}), json!({}));
    let mut sync = Sync::new(
        &lost,
        lost.spec.as_ref().unwrap(),
        pods(&["a:Failed", "b:Running ready"]),
        Backoff::default(),
        now(),
    );
    sync.settle(Outcome {
        removed: 1,
        removed_ready: 1,
        created: 0,
    });
    assert_eq!(
        (sync.status.active, sync.status.ready, sync.status.terminating),
        (Some(0), Some(0), Some(1))
    );
    let release = sync.track();
    assert_eq!(names(&release.pods), "a b");
    count_released(&mut sync.status, &HashSet::new());
    assert_eq!(sync.status.failed, Some(2));
    assert!(!sync.finish(), "b is still terminating");
    // A pod that could not be deleted: nothing is decided yet.
    let mut sync = Sync::new(
        &lost,
        lost.spec.as_ref().unwrap(),
        pods(&["a:Failed", "b:Running"]),
        Backoff::default(),
        now(),
    );
    sync.settle(Outcome::default());
    assert_eq!(sync.finished, None);
}

#[test]
fn suspension() {
    let settle = |suspend: bool, status: Value| {
        let job = job(json!({"suspend": suspend}), status);
        let mut sync = Sync::new(
            &job,
            job.spec.as_ref().unwrap(),
            Vec::new(),
            Backoff::default(),
            now(),
        );
        let event = sync.settle(Outcome::default());
        let start = sync.status.start_time.as_ref().map(|time| time.0.to_string());
        let suspended = facts::condition(&sync.status, "Suspended").map(|condition| condition.status.clone());
        (event.map(|event| event.1), start, suspended)
    };
    let text = |text: &str| Some(text.to_owned());
    let now = now().to_string();
    let started = json!({"startTime": "2026-01-01T00:00:00Z"});
    assert_eq!(settle(false, json!({})), (None, text(&now), None));
    assert_eq!(settle(true, json!({})), (text("Suspended"), None, text("True")));
    assert_eq!(settle(true, started), (text("Suspended"), None, text("True")));
    let suspended = json!({"conditions": [{"type": "Suspended", "status": "True", "reason": "JobSuspended", "message": "Job suspended"}]});
    assert_eq!(settle(true, suspended.clone()), (None, None, text("True")));
    assert_eq!(
        settle(false, suspended),
        (text("Resumed"), text(&now), text("False"))
    );
}

/// A failed pod keeps its finalizer until its index has a replacement, which carries the count on.
#[test]
fn the_count_of_an_index_is_not_lost() {
    let job = job(
        json!({"completionMode": "Indexed", "backoffLimitPerIndex": 3}),
        json!({}),
    );
    let release = |list: &[&str]| {
        let mut sync = Sync::new(
            &job,
            job.spec.as_ref().unwrap(),
            pods(list),
            Backoff::default(),
            now(),
        );
        sync.settle(Outcome::default());
        names(&sync.track().pods)
    };
    assert_eq!(release(&["a:Failed 0", "c:Running 1"]), "");
    assert_eq!(release(&["a:Failed 0", "b:Failed 0 f1", "c:Running 1"]), "a");
    assert_eq!(release(&["a:Failed 0", "b:Running 0 f1", "c:Running 1"]), "a");
    assert_eq!(release(&["a:Failed 0 f3", "c:Running 1"]), "a");
}
