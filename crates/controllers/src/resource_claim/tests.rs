//! The plans of the resource claim controller.

use super::plan::*;
use super::*;
use serde_json::Value;

fn pod(statuses: Value) -> Pod {
    serde_json::from_value(json!({
        "metadata": {"name": "p", "namespace": "ns", "uid": "pu"},
        "spec": {"containers": [], "nodeName": "n", "resourceClaims": [
            {"name": "own", "resourceClaimTemplateName": "t"}, {"name": "shared", "resourceClaimName": "user"}]},
        "status": {"resourceClaimStatuses": statuses},
    }))
    .unwrap()
}

fn claim(metadata: Value, status: Value) -> ResourceClaim {
    let mut metadata = metadata;
    metadata["name"] = json!("c");
    metadata["namespace"] = json!("ns");
    serde_json::from_value(json!({"metadata": metadata, "spec": {}, "status": status})).unwrap()
}

fn consumer(name: &str, uid: &str) -> Value {
    json!({"resource": "pods", "name": name, "uid": uid})
}

#[test]
fn entries_are_named_by_users_or_by_the_status() {
    let check = |statuses: Value, expected: [Named<'_>; 2]| {
        let pod = pod(statuses);
        let named: Vec<Named<'_>> = entries(&pod).map(|entry| name(&pod, entry)).collect();
        assert_eq!(named, expected);
    };
    check(json!([]), [Named::NotMadeYet, Named::ByUser("user")]);
    check(
        json!([{"name": "own", "resourceClaimName": "p-own-x"}]),
        [Named::Made("p-own-x"), Named::ByUser("user")],
    );
    check(
        json!([{"name": "own"}]),
        [Named::NotNeeded, Named::ByUser("user")],
    );
}

#[test]
fn claims_are_made_from_templates() {
    let template: ResourceClaimTemplate = serde_json::from_value(json!({
        "metadata": {"name": "t"},
        "spec": {"metadata": {"labels": {"l": "1"}, "annotations": {"a": "2"}},
            "spec": {"devices": {"requests": [{"name": "r", "exactly": {"deviceClassName": "gpu"}}]}}},
    }))
    .unwrap();
    let pod = pod(json!([]));
    let entry = entries(&pod).next().unwrap();
    assert_eq!(
        serde_json::to_value(claim_from(&pod, entry, &template)).unwrap(),
        json!({"apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaim",
            "metadata": {"generateName": "p-own-", "namespace": "ns", "labels": {"l": "1"},
                "annotations": {"a": "2", "resource.kubernetes.io/pod-claim-name": "own"},
                "ownerReferences": [{"apiVersion": "v1", "kind": "Pod", "name": "p", "uid": "pu", "controller": true}]},
            "spec": {"devices": {"requests": [{"name": "r", "exactly": {"deviceClassName": "gpu"}}]}}})
    );
    let mut long = pod.clone();
    long.metadata.name = Some("p".repeat(100));
    let made = claim_from(&long, entry, &template)
        .metadata
        .generate_name
        .unwrap();
    assert!(made.len() <= 58 && made.starts_with("ppp"), "{made}");
}

#[test]
fn the_last_consumer_frees_the_claim() {
    let allocated = json!({"allocation": {}, "reservedFor": [consumer("p", "pu"), consumer("q", "qu"), {"resource": "things", "apiGroup": "x.io", "name": "t", "uid": "tu"}]});
    let protected = json!({"finalizers": [FINALIZER, "other"]});
    let used = claim(protected.clone(), allocated);
    let left = remaining(&used, |consumer| consumer.uid == "pu");
    assert_eq!(left.len(), 2);
    let released = release(&used, left);
    let status = released.status.unwrap().status.unwrap();
    assert!(status.allocation.is_some() && status.reserved_for.unwrap().len() == 2);
    assert!(!released.remove_finalizer);

    let last = claim(
        protected.clone(),
        json!({"allocation": {}, "reservedFor": [consumer("p", "pu")]}),
    );
    let released = release(&last, Vec::new());
    assert!(released.status.unwrap().status.unwrap().allocation.is_none());
    assert!(released.remove_finalizer);

    // Unused all the time: stays allocated until it is deleted.
    let idle = claim(protected.clone(), json!({"allocation": {}}));
    assert_eq!(release(&idle, Vec::new()), Release::default());
    let mut metadata = protected;
    metadata["deletionTimestamp"] = json!("2026-01-01T00:00:00Z");
    let going = release(&claim(metadata, json!({"allocation": {}})), Vec::new());
    assert!(going.status.unwrap().status.unwrap().allocation.is_none() && going.remove_finalizer);
}

#[test]
fn pods_past_the_scheduler_get_their_reservation() {
    let pod = pod(json!([]));
    assert_eq!(reserve(&claim(json!({}), json!({})), &pod), None);
    let reserved_already = json!({"allocation": {}, "reservedFor": [consumer("p", "pu")]});
    assert_eq!(reserve(&claim(json!({}), reserved_already), &pod), None);
    let wanted = reserve(&claim(json!({}), json!({"allocation": {}})), &pod).unwrap();
    assert_eq!(
        serde_json::to_value(reserved(&wanted)).unwrap(),
        json!([consumer("p", "pu")])
    );
}

#[test]
fn pods_that_are_done() {
    let check = |spec: Value, metadata: Value, phase: &str, expected: bool| {
        let pod: Pod =
            serde_json::from_value(json!({"metadata": metadata, "spec": spec, "status": {"phase": phase}}))
                .unwrap();
        assert_eq!(is_done(&pod), expected);
    };
    let placed = || json!({"containers": [], "nodeName": "n"});
    let deleted = || json!({"deletionTimestamp": "2026-01-01T00:00:00Z"});
    check(placed(), json!({}), "Running", false);
    check(placed(), json!({}), "Failed", true);
    check(placed(), deleted(), "Running", false);
    check(json!({"containers": []}), deleted(), "Pending", true);
    check(json!({"containers": []}), json!({}), "Pending", false);
}
