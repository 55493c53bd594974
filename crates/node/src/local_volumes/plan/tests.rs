//! The plans of the provisioner.

use super::*;
use serde_json::{Value, json};

fn class(extra: Value) -> StorageClass {
    let mut class = json!({"metadata": {"name": "local"}, "provisioner": PROVISIONER,
        "volumeBindingMode": "WaitForFirstConsumer", "reclaimPolicy": "Delete"});
    merge(&mut class, extra);
    serde_json::from_value(class).unwrap()
}

fn merge(target: &mut Value, extra: Value) {
    target
        .as_object_mut()
        .unwrap()
        .extend(extra.as_object().unwrap().clone());
}

fn claim(node: Option<&str>, spec: Value) -> PersistentVolumeClaim {
    let mut annotations = json!({STORAGE_PROVISIONER: PROVISIONER});
    if let Some(node) = node {
        annotations[SELECTED_NODE] = json!(node);
    }
    let mut whole = json!({"accessModes": ["ReadWriteOnce"], "storageClassName": "local", "resources": {"requests": {"storage": "1Gi"}}});
    merge(&mut whole, spec);
    serde_json::from_value(json!({"metadata": {"name": "c", "namespace": "ns", "uid": "u", "resourceVersion": "7", "annotations": annotations}, "spec": whole}))
        .unwrap()
}

fn node(name: &str, zone: &str) -> Node {
    serde_json::from_value(json!({
        "metadata": {"name": name, "labels": {HOST_NAME: format!("host-{name}"), "zone": zone}},
        "status": {"conditions": [{"type": "Ready", "status": "True"}], "nodeInfo": {
            "architecture": "", "bootID": "", "containerRuntimeVersion": "", "kernelVersion": "", "kubeProxyVersion": "",
            "machineID": "", "operatingSystem": "", "osImage": "", "systemUUID": "", "kubeletVersion": "v1.36.4+skiff0.1.0"}},
    }))
    .unwrap()
}

fn with_place<T>(work: impl FnOnce(&Place<'_>) -> T) -> T {
    let offer = Offer {
        root: "/data/volumes".into(),
        disk_size: 10 << 30,
        names: Vec::new(),
    };
    work(&Place::new(&node("n", "a"), &offer))
}

fn plan(claim: &PersistentVolumeClaim, class: &StorageClass) -> ClaimPlan {
    with_place(|place| plan_claim(claim, class, place))
}

#[test]
fn a_claim_gets_a_directory_of_its_node() {
    let ClaimPlan::Provision(volume) = plan(&claim(Some("n"), json!({})), &class(json!({}))) else {
        panic!("not provisioned");
    };
    assert_eq!(
        serde_json::to_value(&volume).unwrap(),
        json!({"apiVersion": "v1", "kind": "PersistentVolume",
        "metadata": {"name": "pvc-u", "annotations": {PROVISIONED_BY: "skiff.io/local"}, "finalizers": [FINALIZER]},
        "spec": {
            "accessModes": ["ReadWriteOnce"], "capacity": {"storage": "1Gi"}, "storageClassName": "local",
            "claimRef": {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "namespace": "ns", "name": "c", "uid": "u", "resourceVersion": "7"},
            "local": {"path": "/data/volumes/pvc-u"}, "persistentVolumeReclaimPolicy": "Delete", "volumeMode": "Filesystem",
            "nodeAffinity": {"required": {"nodeSelectorTerms": [{"matchExpressions": [{"key": HOST_NAME, "operator": "In", "values": ["host-n"]}]}]}},
        }})
    );
    let ClaimPlan::Provision(kept) = plan(
        &claim(Some("n"), json!({})),
        &class(json!({"reclaimPolicy": "Retain"})),
    ) else {
        panic!("not provisioned");
    };
    assert_eq!(kept.metadata.finalizers, None);
}

#[test]
fn only_open_claims_of_own_classes_are_served() {
    let own = class(json!({}));
    assert!(serves(&own, &claim(None, json!({}))));
    assert!(!serves(&own, &claim(None, json!({"volumeName": "other"}))));
    assert!(!serves(
        &class(json!({"provisioner": "else.io/x"})),
        &claim(None, json!({}))
    ));
    let mut deleted = claim(None, json!({}));
    deleted.metadata.deletion_timestamp = serde_json::from_value(json!("2026-01-01T00:00:00Z")).unwrap();
    assert!(!serves(&own, &deleted));
}

#[test]
fn the_scheduler_chooses_the_node_unless_the_class_does_not_wait() {
    let chosen = |claim: &PersistentVolumeClaim, class: &StorageClass, nodes: &[Node]| {
        let nodes = nodes.iter().cloned().map(Arc::new).collect();
        wanted_node(claim, class, || nodes)
    };
    let nodes = [node("n", "a"), node("m", "b")];
    assert_eq!(chosen(&claim(None, json!({})), &class(json!({})), &nodes), None);
    let selected = claim(Some("gone"), json!({}));
    assert_eq!(
        chosen(&selected, &class(json!({})), &nodes).as_deref(),
        Some("gone")
    );

    let immediate =
        |terms: Value| class(json!({"volumeBindingMode": "Immediate", "allowedTopologies": terms}));
    let zone = |zone: &str| json!([{"matchLabelExpressions": [{"key": "zone", "values": [zone]}]}]);
    let open = claim(None, json!({}));
    for (terms, expected) in [(zone("a"), Some("n")), (zone("b"), Some("m")), (zone("c"), None)] {
        assert_eq!(chosen(&open, &immediate(terms), &nodes).as_deref(), expected);
    }
    assert!(chosen(&open, &immediate(json!(null)), &nodes).is_some());
    // Not one that is closed, does not answer, or has another kubelet.
    let changed = |pointer: &str, value: Value| {
        let mut node = serde_json::to_value(&nodes[0]).unwrap();
        node["spec"] = json!({"unschedulable": false});
        *node.pointer_mut(pointer).unwrap() = value;
        serde_json::from_value::<Node>(node).unwrap()
    };
    for other in [
        changed("/spec/unschedulable", json!(true)),
        changed("/status/conditions/0/status", json!("Unknown")),
        changed("/status/nodeInfo/kubeletVersion", json!("v1.36.4")),
    ] {
        assert_eq!(chosen(&open, &immediate(json!(null)), &[other]), None);
    }
    let ClaimPlan::TakeNode(taken) = plan(&open, &immediate(json!(null))) else {
        panic!("not taken");
    };
    assert_eq!(annotation(&taken.metadata, SELECTED_NODE), Some("n"));
}

#[test]
fn what_a_directory_cannot_be_is_refused() {
    let check = |spec: Value, extra: Value, expected: &str| {
        let ClaimPlan::Refuse { message, reschedule } = plan(&claim(Some("n"), spec), &class(extra)) else {
            panic!("not refused: {expected}");
        };
        let expected = format!("failed to provision volume with StorageClass \"local\": {expected}");
        assert_eq!((message, reschedule), (expected, None));
    };
    check(
        json!({"volumeMode": "Block"}),
        json!({}),
        "skiff.io/local does not support block volume provisioning",
    );
    check(
        json!({"accessModes": ["ReadWriteOnce", "ReadWriteMany"]}),
        json!({}),
        "the access mode ReadWriteMany is not supported: a volume of this class is on one node; use ReadWriteOnce or ReadWriteOncePod",
    );
    check(
        json!({"selector": {}}),
        json!({}),
        "claim.spec.selector is not supported",
    );
    check(
        json!({"dataSource": {"kind": "PersistentVolumeClaim", "name": "x"}}),
        json!({}),
        "a volume cannot be filled from a data source",
    );
    check(
        json!({"volumeAttributesClassName": "gold"}),
        json!({}),
        "the VolumeAttributesClass \"gold\" is not supported",
    );
    check(
        json!({}),
        json!({"parameters": {"path": "/x"}}),
        "the parameter \"path\" is not known",
    );
    let large = claim(Some("n"), json!({"resources": {"requests": {"storage": "11Gi"}}}));
    let ClaimPlan::Refuse { message, reschedule } = plan(&large, &class(json!({}))) else {
        panic!("not refused");
    };
    assert_eq!(
        message,
        "failed to provision volume with StorageClass \"local\": 11811160064 bytes are requested, but the disk of node n has 10737418240"
    );
    assert_eq!(annotation(&reschedule.unwrap().metadata, SELECTED_NODE), None);
}

#[test]
fn only_own_volumes_that_are_released_are_removed() {
    let ClaimPlan::Provision(made) = plan(&claim(Some("n"), json!({})), &class(json!({}))) else {
        panic!("not provisioned");
    };
    let made = serde_json::to_value(&made).unwrap();
    let check = |pointer: &str, value: Value, phase: &str, expected: bool| {
        let mut volume = made.clone();
        if !pointer.is_empty() {
            *volume.pointer_mut(pointer).unwrap() = value;
        }
        volume["status"] = json!({"phase": phase});
        let volume: PersistentVolume = serde_json::from_value(volume).unwrap();
        let removed = matches!(plan_volume(&volume), VolumePlan::Remove { .. })
            && with_place(|place| is_own(&volume, place));
        assert_eq!(removed, expected, "{pointer} {phase}");
    };
    check("", json!(null), "Released", true);
    check("", json!(null), "Failed", true);
    check("", json!(null), "Bound", false);
    check("/spec/local/path", json!("/data"), "Released", false);
    check("/spec/local/path", json!("/data/volumes/../x"), "Released", false);
    check(
        "/spec/persistentVolumeReclaimPolicy",
        json!("Retain"),
        "Released",
        false,
    );
    check("/metadata/annotations", json!({}), "Released", false);
    check("/metadata/name", json!("other"), "Released", false);
    let hosts = "/spec/nodeAffinity/required/nodeSelectorTerms/0/matchExpressions/0/values";
    check(hosts, json!(["host-m"]), "Released", false);
    check(hosts, json!(["host-n", "host-m"]), "Released", false);
}

#[test]
fn the_finalizer_follows_the_policy() {
    let ClaimPlan::Provision(mut volume) = plan(&claim(Some("n"), json!({})), &class(json!({}))) else {
        panic!("not provisioned");
    };
    assert_eq!(plan_volume(&volume), VolumePlan::Nothing);
    volume.spec.as_mut().unwrap().persistent_volume_reclaim_policy = Some("Retain".into());
    let VolumePlan::SetFinalizer(kept) = plan_volume(&volume) else {
        panic!("finalizer stays");
    };
    assert_eq!(kept.metadata.finalizers, Some(Vec::new()));
    let mut back = kept;
    back.spec.as_mut().unwrap().persistent_volume_reclaim_policy = Some("Delete".into());
    let VolumePlan::SetFinalizer(back) = plan_volume(&back) else {
        panic!("finalizer is not set");
    };
    assert_eq!(back.metadata.finalizers, Some(vec![FINALIZER.to_owned()]));
}
