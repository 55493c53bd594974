//! Plans of a StatefulSet over made-up pods and claims.

use super::plan::*;
use super::set::{Set, name_of};
use jiff::Timestamp;
use k8s_openapi::api::apps::v1::{StatefulSet, StatefulSetStatus};
use k8s_openapi::api::core::v1::{PersistentVolumeClaim, Pod};
use serde_json::{Value, json};
use std::sync::Arc;

/// A pod `web-ORDINAL` in one of these states: `ready`, `fresh` (ready since a second), `unready`, `pending`,
/// `failed`, `succeeded`; with `-` in front it is being deleted as well.
fn pod(ordinal: i64, revision: &str, state: &str) -> Arc<Pod> {
    let name = format!("web-{ordinal}");
    let (deleting, state) = match state.strip_prefix('-') {
        Some(state) => (true, state),
        None => (false, state),
    };
    let (phase, ready, since) = match state {
        "ready" => ("Running", "True", "2026-01-01T00:00:00Z"),
        "fresh" => ("Running", "True", "2026-01-01T00:59:59Z"),
        "unready" => ("Running", "False", "2026-01-01T00:00:00Z"),
        "pending" => ("Pending", "False", "2026-01-01T00:00:00Z"),
        "failed" => ("Failed", "False", "2026-01-01T00:00:00Z"),
        "succeeded" => ("Succeeded", "False", "2026-01-01T00:00:00Z"),
        other => panic!("{other}"),
    };
    let deleted = if deleting {
        json!("2026-01-01T00:00:00Z")
    } else {
        Value::Null
    };
    let pod = json!({
        "metadata": {"name": name, "namespace": "d", "uid": name, "deletionTimestamp": deleted, "labels": {
            "app": "web", "controller-revision-hash": revision, "statefulset.kubernetes.io/pod-name": name}},
        "spec": {"containers": []},
        "status": {"phase": phase, "conditions": [{"type": "Ready", "status": ready, "lastTransitionTime": since}]}});
    Arc::new(serde_json::from_value(pod).unwrap())
}

fn set(spec: Value) -> StatefulSet {
    let mut whole = json!({"metadata": {"name": "web", "namespace": "d", "uid": "u", "generation": 4},
        "spec": {"replicas": 3, "selector": {"matchLabels": {"app": "web"}},
            "updateStrategy": {"type": "RollingUpdate", "rollingUpdate": {"partition": 0}},
            "template": {"metadata": {"labels": {"app": "web"}}, "spec": {"containers": []}}}});
    let fields = whole["spec"].as_object_mut().unwrap();
    fields.extend(spec.as_object().unwrap().clone());
    serde_json::from_value(whole).unwrap()
}

fn planned_with(object: &StatefulSet, pods: &[Arc<Pod>], claims: &[PersistentVolumeClaim]) -> Plan {
    let set = Set::new(object).unwrap();
    plan(&Observed {
        set,
        pods,
        current: Revision {
            name: "old",
            template: &set.spec.template,
        },
        update: Revision {
            name: "new",
            template: &set.spec.template,
        },
        collision_count: 0,
        claim: &|name| {
            let found = claims
                .iter()
                .find(|claim| claim.metadata.name.as_deref() == Some(name));
            found.cloned().map(Arc::new)
        },
        now: "2026-01-01T01:00:00Z".parse::<Timestamp>().unwrap(),
    })
}

/// `+web-0@old` is a creation, `-web-0` a deletion, `~web-0` an update, `!web-0` a deletion by an update, `c` and
/// `o` are about claims.
fn shown(plan: &Plan) -> String {
    let steps = plan.stages.iter().flatten().flatten().map(|step| match step {
        Step::Create(pod) => format!("+{}@{}", name_of(pod), super::set::revision_of(pod)),
        Step::Delete(pod) => format!("-{}", name_of(pod)),
        Step::Claims(pod) => format!("c{}", name_of(pod)),
        Step::Repair(pod) => format!("~{}", name_of(pod)),
        Step::Owners(pod) => format!("o{}", name_of(pod)),
    });
    let outdated = plan.outdated.iter().map(|pod| format!("!{}", name_of(pod)));
    steps.chain(outdated).collect::<Vec<_>>().join(" ")
}

#[test]
fn pods_come_and_go() {
    let check = |spec: Value, pods: &[(i64, &str, &str)], expected: &str| {
        let pods: Vec<_> = pods
            .iter()
            .map(|(o, revision, state)| pod(*o, revision, state))
            .collect();
        assert_eq!(
            shown(&planned_with(&set(spec.clone()), &pods, &[])),
            expected,
            "{spec}"
        );
    };
    let parallel = |more: Value| {
        let mut spec = json!({"podManagementPolicy": "Parallel"});
        spec.as_object_mut()
            .unwrap()
            .extend(more.as_object().unwrap().clone());
        spec
    };
    // One after the other, each when its predecessor is ready and available.
    check(json!({}), &[], "+web-0@new");
    check(json!({}), &[(0, "new", "pending")], "");
    check(json!({}), &[(0, "new", "unready")], "");
    check(json!({}), &[(0, "new", "ready")], "+web-1@new");
    check(json!({"minReadySeconds": 60}), &[(0, "new", "fresh")], "");
    check(
        json!({}),
        &[(0, "new", "ready"), (2, "new", "ready")],
        "+web-1@new",
    );
    check(json!({"ordinals": {"start": 5}}), &[], "+web-5@new");
    // What lies outside of the ordinals goes when all that are wanted are there.
    check(
        json!({"ordinals": {"start": 1}, "replicas": 1}),
        &[(0, "new", "ready")],
        "+web-1@new",
    );
    check(
        json!({"ordinals": {"start": 1}, "replicas": 1}),
        &[(0, "new", "ready"), (1, "new", "ready")],
        "-web-0",
    );
    // Ended pods are replaced, whatever they say.
    check(json!({}), &[(0, "new", "failed")], "-web-0");
    check(
        json!({}),
        &[(0, "new", "succeeded"), (1, "new", "failed")],
        "-web-0",
    );
    check(json!({}), &[(0, "new", "-failed")], "");
    check(
        parallel(json!({})),
        &[(0, "new", "failed"), (1, "new", "failed")],
        "-web-0 -web-1 +web-2@new",
    );
    // Scaling down: the highest first, each when the one before is gone.
    let ready = |count: i64| (0..count).map(|o| (o, "new", "ready")).collect::<Vec<_>>();
    check(json!({"replicas": 1}), &ready(4), "-web-3");
    let mut four = ready(4);
    four[3].2 = "-ready";
    check(json!({"replicas": 1}), &four, "");
    four[3].2 = "unready";
    check(json!({"replicas": 1}), &four, "-web-3");
    // A lower one is unhealthy: nothing goes before it is well.
    four[2].2 = "unready";
    check(json!({"replicas": 1}), &four, "");
    four[3].2 = "ready";
    check(json!({"replicas": 1}), &four, "-web-3");
    check(parallel(json!({"replicas": 1})), &four, "-web-3 -web-2 -web-1");
    check(json!({"replicas": 0}), &[(0, "new", "unready")], "-web-0");
    // An unhealthy pod that is wanted holds up the scaling down.
    check(
        json!({"replicas": 1}),
        &[(0, "new", "unready"), (1, "new", "ready")],
        "",
    );
    check(
        parallel(json!({"replicas": 1})),
        &[(0, "new", "unready"), (1, "new", "ready")],
        "-web-1",
    );
    // In parallel nothing waits.
    check(
        parallel(json!({})),
        &[(1, "new", "pending")],
        "+web-0@new +web-2@new",
    );
    check(
        parallel(json!({"replicas": 2})),
        &[(0, "new", "-ready"), (1, "new", "pending")],
        "",
    );
}

#[test]
fn updates_go_down_from_the_highest_ordinal() {
    let strategy =
        |rolling: Value| json!({"updateStrategy": {"type": "RollingUpdate", "rollingUpdate": rolling}});
    let check = |spec: Value, states: &[(&str, &str)], expected: &str| {
        let pods: Vec<_> = (0..)
            .zip(states)
            .map(|(o, (revision, state))| pod(o, revision, state))
            .collect();
        assert_eq!(
            shown(&planned_with(&set(spec.clone()), &pods, &[])),
            expected,
            "{spec} {states:?}"
        );
    };
    let (old, new) = (("old", "ready"), ("new", "ready"));
    check(json!({}), &[old, old, old], "!web-2");
    check(json!({}), &[old, old, new], "!web-1");
    check(json!({}), &[old, old, ("new", "unready")], "");
    check(json!({}), &[old, old], "+web-2@new");
    check(json!({}), &[new, new, new], "");
    check(
        json!({"updateStrategy": {"type": "OnDelete"}}),
        &[old, old, old],
        "",
    );
    check(
        json!({"updateStrategy": {"type": "OnDelete"}}),
        &[old, old],
        "+web-2@new",
    );
    check(strategy(json!({"partition": 2})), &[old, old, new], "");
    check(strategy(json!({"partition": 2})), &[old, old, old], "!web-2");
    check(strategy(json!({"partition": 9})), &[old, old, old], "");
    // A pod below the partition comes back as it was.
    check(strategy(json!({"partition": 2})), &[old], "+web-1@old");
    // As upstream: a broken pod holds up an ordered update, even one that would mend it.
    check(json!({}), &[old, ("old", "unready"), old], "");
    let parallel = json!({"podManagementPolicy": "Parallel"});
    check(parallel.clone(), &[old, ("old", "unready"), new], "!web-1");
    check(parallel, &[old, ("old", "-ready"), new], "");
    // The field that the gate MaxUnavailableStatefulSet adds.
    check(
        strategy(json!({"maxUnavailable": 2})),
        &[old, old, old],
        "!web-2 !web-1",
    );
    check(
        strategy(json!({"maxUnavailable": "67%"})),
        &[old, old, old],
        "!web-2 !web-1",
    );
    check(
        strategy(json!({"maxUnavailable": "1%"})),
        &[old, old, old],
        "!web-2",
    );
    check(
        strategy(json!({"maxUnavailable": 2, "partition": 2})),
        &[old, old, old],
        "!web-2",
    );
}

/// The ordinals of a set may be billions: what is looked at is what exists.
#[test]
fn a_huge_set_is_made_in_bursts() {
    let object = set(json!({"replicas": i32::MAX, "podManagementPolicy": "Parallel"}));
    let plan = planned_with(&object, &[pod(0, "new", "ready")], &[]);
    assert_eq!(plan.stages[0].len(), 500);
    assert!(plan.outdated.is_empty());
    let object = set(json!({"replicas": i32::MAX}));
    assert_eq!(shown(&planned_with(&object, &[], &[])), "+web-0@new");
}

#[test]
fn claims_are_made_and_owned() {
    let claim = |ordinal: i64, owners: Value| -> PersistentVolumeClaim {
        serde_json::from_value(
            json!({"metadata": {"name": format!("data-web-{ordinal}"), "ownerReferences": owners}}),
        )
        .unwrap()
    };
    let check = |policy: (&str, &str),
                 state: &str,
                 replicas: i32,
                 claims: &[PersistentVolumeClaim],
                 expected: &str| {
        let object = set(
            json!({"replicas": replicas, "volumeClaimTemplates": [{"metadata": {"name": "data"}}],
            "persistentVolumeClaimRetentionPolicy": {"whenDeleted": policy.0, "whenScaled": policy.1}}),
        );
        let mut pods = Vec::new();
        if !state.is_empty() {
            let mut one = (*pod(0, "new", state)).clone();
            Set::new(&object).unwrap().put_storage(&mut one, 0);
            pods.push(Arc::new(one));
        }
        assert_eq!(
            shown(&planned_with(&object, &pods, claims)),
            expected,
            "{policy:?} {state}"
        );
    };
    let (retain, delete) = (("Retain", "Retain"), ("Delete", "Delete"));
    let of_set = json!([{"apiVersion": "apps/v1", "kind": "StatefulSet", "name": "web", "uid": "u", "controller": true}]);
    let of_pod = |uid: &str| json!([{"apiVersion": "v1", "kind": "Pod", "name": "web-0", "uid": uid, "controller": true}]);
    check(retain, "", 1, &[], "+web-0@new");
    check(retain, "pending", 1, &[], "cweb-0");
    check(retain, "pending", 1, &[claim(0, json!([]))], "");
    check(delete, "pending", 1, &[claim(0, json!([]))], "cweb-0");
    check(delete, "ready", 1, &[claim(0, json!([]))], "~web-0");
    check(delete, "ready", 1, &[claim(0, of_set.clone())], "");
    check(retain, "ready", 1, &[claim(0, of_set.clone())], "~web-0");
    check(delete, "ready", 0, &[claim(0, of_set)], "oweb-0 -web-0");
    check(delete, "ready", 0, &[claim(0, of_pod("web-0"))], "-web-0");
    // The claim of the pod before must go before a new pod comes.
    check(delete, "", 1, &[claim(0, of_pod("earlier"))], "");
    check(retain, "", 1, &[claim(0, of_pod("earlier"))], "+web-0@new");
}

#[test]
fn a_pod_without_its_labels_gets_them_back() {
    let mut bare = (*pod(0, "new", "ready")).clone();
    bare.metadata
        .labels
        .as_mut()
        .unwrap()
        .remove("statefulset.kubernetes.io/pod-name");
    let plan = planned_with(&set(json!({"replicas": 1})), &[Arc::new(bare)], &[]);
    assert_eq!(shown(&plan), "~web-0");
}

#[test]
fn the_status_counts() {
    let object = set(json!({"minReadySeconds": 60}));
    let pods = [
        pod(0, "old", "ready"),
        pod(1, "new", "fresh"),
        pod(2, "new", "-ready"),
        pod(3, "old", "pending"),
    ];
    let status = planned_with(&object, &pods, &[]).status;
    assert_eq!(
        json!(status),
        json!({"observedGeneration": 4, "replicas": 4, "readyReplicas": 3, "availableReplicas": 2,
            "currentReplicas": 2, "updatedReplicas": 1, "currentRevision": "old", "updateRevision": "new",
            "collisionCount": 0})
    );
    assert!(is_news(&status, &StatefulSetStatus::default()));
    assert!(!is_news(&status, &status));

    let all_new: Vec<_> = (0..3).map(|ordinal| pod(ordinal, "new", "ready")).collect();
    let mut status = planned_with(&object, &all_new, &[]).status;
    complete_update(&Set::new(&object).unwrap(), &mut status);
    assert_eq!(
        (status.current_revision.as_deref(), status.current_replicas),
        (Some("new"), Some(3))
    );
    let object = set(json!({"updateStrategy": {"type": "OnDelete"}}));
    let mut status = planned_with(&object, &all_new, &[]).status;
    complete_update(&Set::new(&object).unwrap(), &mut status);
    assert_eq!(status.current_revision.as_deref(), Some("old"));
}

#[test]
fn a_set_that_is_deleted_does_nothing() {
    let mut object = set(json!({}));
    object.metadata.deletion_timestamp = serde_json::from_value(json!("2026-01-01T00:00:00Z")).unwrap();
    let plan = planned_with(&object, &[pod(7, "old", "failed")], &[]);
    assert_eq!((shown(&plan).as_str(), plan.status.replicas), ("", 1));
}
