//! Plans of the binder: claims, volumes, matching and the writes of a binding.

use super::*;
use serde_json::{Value, json};

fn merged(mut base: Value, extra: Value) -> Value {
    for (key, value) in extra.as_object().unwrap() {
        base[key] = value.clone();
    }
    base
}

fn claim_value(metadata: Value, spec: Value, phase: &str) -> Value {
    json!({
        "metadata": merged(json!({"name": "c", "namespace": "ns", "uid": "cu", "resourceVersion": "3"}), metadata),
        "spec": merged(json!({"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "5Gi"}}}), spec),
        "status": {"phase": phase},
    })
}

fn claim(metadata: Value, spec: Value) -> PersistentVolumeClaim {
    serde_json::from_value(claim_value(metadata, spec, "Pending")).unwrap()
}

fn volume(name: &str, spec: Value) -> Arc<PersistentVolume> {
    volume_with(name, json!({}), spec, "Available")
}

fn volume_with(name: &str, metadata: Value, spec: Value, phase: &str) -> Arc<PersistentVolume> {
    let volume = json!({
        "metadata": merged(json!({"name": name, "resourceVersion": "4"}), metadata),
        "spec": merged(json!({"accessModes": ["ReadWriteOnce"], "capacity": {"storage": "5Gi"}, "persistentVolumeReclaimPolicy": "Retain"}), spec),
        "status": {"phase": phase},
    });
    Arc::new(serde_json::from_value(volume).unwrap())
}

fn class(name: &str, extra: Value) -> StorageClass {
    let class = merged(
        json!({"metadata": {"name": name}, "provisioner": "example.com/p", "volumeBindingMode": "Immediate"}),
        extra,
    );
    serde_json::from_value(class).unwrap()
}

#[derive(Default)]
struct Around {
    volumes: Vec<Arc<PersistentVolume>>,
    class: Option<StorageClass>,
    default_class: Option<StorageClass>,
    pods: Vec<Arc<Pod>>,
}

fn plan(claim: &PersistentVolumeClaim, around: Around) -> claim::Plan {
    let name = volume_name(claim);
    let named = around.volumes.iter().find(|volume| volume.name_any() == name);
    claim::plan(claim::Observed {
        claim,
        named: named.cloned(),
        candidates: around.volumes.clone(),
        class: around.class.as_ref(),
        default_class: around.default_class.as_ref(),
        pods: around.pods,
    })
}

#[test]
fn the_best_volume_is_found() {
    let gib = |size: u32| json!({"capacity": {"storage": format!("{size}Gi")}});
    let check = |spec: Value, volumes: &[Arc<PersistentVolume>], delayed: bool, expected: Option<&str>| {
        let found = matching::find(&claim(json!({}), spec), volumes, delayed);
        assert_eq!(found.map(|volume| volume.name_any()).as_deref(), expected);
    };
    let sizes = [
        volume("small", gib(1)),
        volume("large", gib(50)),
        volume("fits", gib(6)),
    ];
    check(json!({}), &sizes, false, Some("fits"));
    check(json!({}), &sizes, true, None);
    check(json!({"storageClassName": "fast"}), &sizes, false, None);
    check(json!({"accessModes": ["ReadWriteMany"]}), &sizes, false, None);
    check(json!({"volumeMode": "Block"}), &sizes, false, None);
    check(json!({"volumeAttributesClassName": "gold"}), &sizes, false, None);
    check(
        json!({"selector": {"matchLabels": {"a": "b"}}}),
        &sizes,
        false,
        None,
    );
    let labelled = [volume_with(
        "labelled",
        json!({"labels": {"a": "b"}}),
        json!({}),
        "Available",
    )];
    check(
        json!({"selector": {"matchLabels": {"a": "b"}}}),
        &labelled,
        false,
        Some("labelled"),
    );
    // One that offers no more than what is asked for comes first, whatever its size.
    let modes = [
        volume("both", json!({"accessModes": ["ReadWriteOnce", "ReadWriteMany"]})),
        volume("only", gib(40)),
    ];
    check(json!({}), &modes, false, Some("only"));
    check(
        json!({"accessModes": ["ReadWriteMany"]}),
        &modes,
        false,
        Some("both"),
    );
    // Reserved for this claim: taken at once, and in every phase. For another: never.
    let reserved = |name: &str, uid: &str| json!({"claimRef": {"name": name, "namespace": "ns", "uid": uid}, "capacity": {"storage": "90Gi"}});
    let prebound = [volume("free", gib(5)), volume("mine", reserved("c", ""))];
    check(json!({}), &prebound, false, Some("mine"));
    check(json!({}), &prebound, true, Some("mine"));
    check(json!({}), &[volume("theirs", reserved("d", ""))], false, None);
    check(
        json!({}),
        &[volume("old", reserved("c", "other-uid"))],
        false,
        None,
    );
    let unfit = [
        volume_with("released", json!({}), json!({}), "Released"),
        volume_with(
            "going",
            json!({"deletionTimestamp": "2026-01-01T00:00:00Z"}),
            json!({}),
            "Available",
        ),
    ];
    check(json!({}), &unfit, false, None);
}

#[test]
fn claims_without_a_volume_are_told_why() {
    let check = |spec: Value, metadata: Value, around: Around, expected: claim::Plan| {
        assert_eq!(plan(&claim(metadata, spec), around), expected);
    };
    let wait = |note: Note| claim::Plan::Wait(Some(note));
    check(
        json!({}),
        json!({}),
        Around::default(),
        wait(normal(
            "FailedBinding",
            "no persistent volumes available for this claim and no storage class is set",
        )),
    );
    let default_class = || Some(class("standard", json!({})));
    let with_default = || Around {
        default_class: default_class(),
        ..Default::default()
    };
    check(
        json!({}),
        json!({}),
        with_default(),
        claim::Plan::AssignClass("standard".into()),
    );
    // An empty class is a class: none.
    check(
        json!({"storageClassName": ""}),
        json!({}),
        with_default(),
        wait(normal(
            "FailedBinding",
            "no persistent volumes available for this claim and no storage class is set",
        )),
    );
    check(
        json!({"storageClassName": "x"}),
        json!({}),
        Around::default(),
        claim::Plan::CannotProvision(warning(
            "ProvisioningFailed",
            "storageclass.storage.k8s.io \"x\" not found",
        )),
    );
    let of_class = |extra: Value| Around {
        class: Some(class("x", extra)),
        ..Default::default()
    };
    let provisioner = |name: &str| claim::Plan::Provision {
        provisioner: name.to_owned(),
    };
    let named = json!({"storageClassName": "x"});
    check(
        named.clone(),
        json!({}),
        of_class(json!({})),
        provisioner("example.com/p"),
    );
    check(
        named.clone(),
        json!({}),
        of_class(json!({"provisioner": "kubernetes.io/gce-pd"})),
        provisioner("pd.csi.storage.gke.io"),
    );
    check(
        named.clone(),
        json!({}),
        of_class(json!({"provisioner": "kubernetes.io/no-provisioner"})),
        claim::Plan::CannotProvision(warning(
            "ProvisioningFailed",
            "no volume plugin matched name: kubernetes.io/no-provisioner",
        )),
    );
    let delayed = |pods: &[(&str, &str, &str)]| {
        Around {
        pods: pods
            .iter()
            .map(|(name, node, phase)| {
                let pod = json!({"metadata": {"name": name}, "spec": {"containers": [], "nodeName": node}, "status": {"phase": phase}});
                Arc::new(serde_json::from_value(pod).unwrap())
            })
            .collect(),
        ..of_class(json!({"volumeBindingMode": "WaitForFirstConsumer"}))
    }
    };
    check(
        named.clone(),
        json!({}),
        delayed(&[("placed", "n", "Running"), ("over", "", "Failed")]),
        wait(normal(
            "WaitForFirstConsumer",
            "waiting for first consumer to be created before binding",
        )),
    );
    check(
        named.clone(),
        json!({}),
        delayed(&[("p", "", "Pending")]),
        wait(normal("WaitForPodScheduled", "waiting for pod p to be scheduled")),
    );
    check(
        named.clone(),
        json!({}),
        delayed(&[("q", "", "Pending"), ("p", "", "Pending")]),
        wait(normal(
            "WaitForPodScheduled",
            "waiting for pods p,q to be scheduled",
        )),
    );
    check(
        named,
        json!({"annotations": {"volume.kubernetes.io/selected-node": "n"}}),
        delayed(&[]),
        provisioner("example.com/p"),
    );
}

#[test]
fn claims_that_name_a_volume() {
    let named = || claim(json!({}), json!({"volumeName": "v"}));
    let with = |volume: Arc<PersistentVolume>| Around {
        volumes: vec![volume],
        ..Default::default()
    };
    assert_eq!(plan(&named(), Around::default()), claim::Plan::Wait(None));
    let free = volume("v", json!({}));
    assert_eq!(plan(&named(), with(free.clone())), claim::Plan::Bind(free));
    let check_mismatch = |spec: Value, why: &str| {
        let note = warning(
            "VolumeMismatch",
            format!("Cannot bind to requested volume \"v\": {why}"),
        );
        assert_eq!(
            plan(&named(), with(volume("v", spec))),
            claim::Plan::Wait(Some(note))
        );
    };
    check_mismatch(
        json!({"capacity": {"storage": "1Gi"}}),
        "requested PV is too small",
    );
    check_mismatch(
        json!({"storageClassName": "x"}),
        "storageClassName does not match",
    );
    check_mismatch(
        json!({"volumeAttributesClassName": "x"}),
        "volumeAttributesClassName does not match",
    );
    check_mismatch(json!({"volumeMode": "Block"}), "incompatible volumeMode");
    check_mismatch(
        json!({"accessModes": ["ReadOnlyMany"]}),
        "incompatible accessMode",
    );
    let taken = || {
        volume(
            "v",
            json!({"claimRef": {"name": "d", "namespace": "ns", "uid": "du"}}),
        )
    };
    let note = || {
        warning(
            "FailedBinding",
            "volume \"v\" already bound to a different claim.",
        )
    };
    assert_eq!(plan(&named(), with(taken())), claim::Plan::Wait(Some(note())));
    let by_controller = claim(
        json!({"annotations": {"pv.kubernetes.io/bound-by-controller": "yes"}}),
        json!({"volumeName": "v"}),
    );
    assert_eq!(
        plan(&by_controller, with(taken())),
        claim::Plan::Misbound(
            note(),
            "invalid binding of claim \"ns/c\" to volume \"v\": volume already claimed by \"ns/d\"".into()
        )
    );
}

#[test]
fn bound_claims_stay_bound_or_are_lost() {
    let bound = |name: &str| {
        claim(
            json!({"annotations": {"pv.kubernetes.io/bind-completed": "yes"}}),
            json!({"volumeName": name}),
        )
    };
    let with = |spec: Value| Around {
        volumes: vec![volume("v", spec)],
        ..Default::default()
    };
    let lost = |reason: &'static str, message: &str| claim::Plan::Lost(warning(reason, message));
    assert_eq!(
        plan(&bound(""), Around::default()),
        lost(
            "ClaimLost",
            "Bound claim has lost reference to PersistentVolume. Data on the volume is lost!"
        )
    );
    assert_eq!(
        plan(&bound("v"), Around::default()),
        lost(
            "ClaimLost",
            "Bound claim has lost its PersistentVolume. Data on the volume is lost!"
        )
    );
    assert_eq!(
        plan(
            &bound("v"),
            with(json!({"claimRef": {"name": "c", "namespace": "ns", "uid": "other"}}))
        ),
        lost(
            "ClaimMisbound",
            "Two claims are bound to the same volume, this one is bound incorrectly"
        )
    );
    for reference in [json!(null), json!({"name": "c", "namespace": "ns", "uid": "cu"})] {
        let planned = plan(&bound("v"), with(json!({"claimRef": reference})));
        assert!(matches!(planned, claim::Plan::Bind(_)), "{planned:?}");
    }
}

#[test]
fn a_binding_is_written_in_four_steps_and_only_once() {
    let free = volume("v", json!({}));
    let wanted = claim(json!({}), json!({}));
    let reserved = steps::volume_to_claim(&free, &wanted).unwrap();
    assert_eq!(
        serde_json::to_value(claim_ref(&reserved)).unwrap(),
        json!({"apiVersion": "v1", "kind": "PersistentVolumeClaim", "name": "c", "namespace": "ns", "uid": "cu", "resourceVersion": "3"})
    );
    assert!(has_annotation(
        &reserved.metadata,
        super::super::BOUND_BY_CONTROLLER
    ));
    assert_eq!(steps::volume_to_claim(&reserved, &wanted), None);
    let in_phase = steps::in_phase(&reserved, "Bound", "").unwrap();
    assert_eq!(steps::in_phase(&in_phase, "Bound", ""), None);
    let bound = steps::claim_to_volume(&wanted, &in_phase).unwrap();
    assert_eq!(volume_name(&bound), "v");
    for name in [BIND_COMPLETED, super::super::BOUND_BY_CONTROLLER] {
        assert!(has_annotation(&bound.metadata, name), "{name}");
    }
    assert_eq!(steps::claim_to_volume(&bound, &in_phase), None);
    let done = steps::claim_status(&bound, "Bound", Some(&in_phase)).unwrap();
    assert_eq!(
        serde_json::to_value(&done.status).unwrap(),
        json!({"phase": "Bound", "accessModes": ["ReadWriteOnce"], "capacity": {"storage": "5Gi"}})
    );
    assert_eq!(steps::claim_status(&done, "Bound", Some(&in_phase)), None);
    // Lost: nothing of the volume is left.
    let lost = steps::claim_status(&done, "Lost", None).unwrap();
    assert_eq!(
        serde_json::to_value(&lost.status).unwrap(),
        json!({"phase": "Lost"})
    );
}

#[test]
fn reservations_of_users_outlive_the_binding() {
    let prebound = volume("v", json!({"claimRef": {"name": "c", "namespace": "ns"}}));
    let wanted = claim(json!({}), json!({"volumeName": "v"}));
    let reserved = steps::volume_to_claim(&prebound, &wanted).unwrap();
    assert!(!has_annotation(
        &reserved.metadata,
        super::super::BOUND_BY_CONTROLLER
    ));
    let bound = steps::claim_to_volume(&wanted, &reserved).unwrap();
    assert!(!has_annotation(
        &bound.metadata,
        super::super::BOUND_BY_CONTROLLER
    ));
    let free = steps::unbound(&reserved);
    assert_eq!(
        claim_ref(&free).map(|r| (r.name.as_deref(), r.uid.as_deref())),
        Some((Some("c"), None))
    );
    let by_controller = steps::volume_to_claim(&volume("v", json!({})), &wanted).unwrap();
    let free = steps::unbound(&by_controller);
    assert_eq!(claim_ref(&free), None);
    assert!(!has_annotation(&free.metadata, super::super::BOUND_BY_CONTROLLER));
}

#[test]
fn volumes_follow_their_claims() {
    let bound_to = |uid: &str| json!({"claimRef": {"name": "c", "namespace": "ns", "uid": uid}});
    let check =
        |volume: Arc<PersistentVolume>, claim: Option<&PersistentVolumeClaim>, expected: volume::Plan| {
            assert_eq!(volume::plan(&volume, claim), expected);
        };
    check(volume("v", json!({})), None, volume::Plan::Phase("Available"));
    check(volume("v", bound_to("")), None, volume::Plan::Phase("Available"));
    let named = |name: &str| claim(json!({}), json!({"volumeName": name}));
    check(
        volume("v", bound_to("cu")),
        Some(&named("v")),
        volume::Plan::Phase("Bound"),
    );
    check(
        volume("v", bound_to("cu")),
        Some(&claim(json!({}), json!({}))),
        volume::Plan::Nothing,
    );
    check(
        volume("v", bound_to("cu")),
        Some(&named("w")),
        volume::Plan::Unbind,
    );
    for (phase, released) in [("Bound", true), ("Released", false), ("Failed", false)] {
        check(
            volume_with("v", json!({}), bound_to("cu"), phase),
            None,
            volume::Plan::Reclaim { released },
        );
    }
    let provisioned = volume_with(
        "v",
        json!({"annotations": {"pv.kubernetes.io/provisioned-by": "x.io/p"}}),
        merged(bound_to("cu"), json!({"persistentVolumeReclaimPolicy": "Delete"})),
        "Bound",
    );
    check(
        provisioned,
        Some(&named("w")),
        volume::Plan::Reclaim { released: true },
    );
    let block = volume("v", merged(bound_to("cu"), json!({"volumeMode": "Block"})));
    check(
        block,
        Some(&claim(json!({}), json!({}))),
        volume::Plan::Mismatch(
            warning(
                "VolumeMismatch",
                "Cannot bind PersistentVolume to requested PersistentVolumeClaim \"c\" due to incompatible volumeMode.",
            ),
            warning(
                "VolumeMismatch",
                "Cannot bind PersistentVolume \"v\" to requested PersistentVolumeClaim due to incompatible volumeMode.",
            ),
        ),
    );
}

#[test]
fn released_volumes_are_reclaimed_by_policy() {
    let check = |metadata: Value, spec: Value, users: &[String], expected: volume::Reclaim| {
        assert_eq!(
            volume::reclaim(&volume_with("v", metadata, spec, "Released"), users),
            expected
        );
    };
    let policy = |policy: &str| json!({"persistentVolumeReclaimPolicy": policy});
    let fail = |reason: &'static str, message: &str| volume::Reclaim::Fail(warning(reason, message));
    check(json!({}), policy("Retain"), &[], volume::Reclaim::Leave);
    check(
        json!({}),
        policy("Recycle"),
        &[],
        fail("VolumeFailedRecycle", "No recycler plugin found for the volume!"),
    );
    check(
        json!({}),
        policy("Recycle"),
        &["ns/a".to_owned(), "ns/b".to_owned()],
        volume::Reclaim::InUse(normal("VolumeFailedRecycle", "Volume is used by pods: ns/a,ns/b")),
    );
    check(
        json!({}),
        policy("Delete"),
        &[],
        fail(
            "VolumeFailedDelete",
            "error getting deleter volume plugin for volume \"v\": no deletable volume plugin matched",
        ),
    );
    let by = |name: &str| json!({"annotations": {"pv.kubernetes.io/provisioned-by": name}});
    check(
        by("skiff.io/local"),
        policy("Delete"),
        &[],
        volume::Reclaim::Leave,
    );
    check(
        by("kubernetes.io/rbd"),
        policy("Delete"),
        &[],
        fail(
            "VolumeFailedDelete",
            "no volume plugin matched name: kubernetes.io/rbd",
        ),
    );
    check(
        json!({}),
        merged(
            policy("Delete"),
            json!({"csi": {"driver": "d", "volumeHandle": "h"}}),
        ),
        &[],
        volume::Reclaim::Leave,
    );
    check(
        json!({}),
        policy("Forget"),
        &[],
        fail(
            "VolumeUnknownReclaimPolicy",
            "Volume has unrecognized PersistentVolumeReclaimPolicy",
        ),
    );
}

#[test]
fn the_default_class_is_the_newest() {
    let of = |name: &str, created: &str, default: &str| {
        class(
            name,
            json!({"metadata": {"name": name, "creationTimestamp": created,
                "annotations": {"storageclass.kubernetes.io/is-default-class": default}}}),
        )
    };
    let classes = [
        of("b", "2026-01-01T00:00:00Z", "true"),
        of("c", "2026-02-01T00:00:00Z", "true"),
        of("a", "2026-02-01T00:00:00Z", "true"),
        of("d", "2026-03-01T00:00:00Z", "false"),
    ];
    assert_eq!(
        default_class(&classes).map(|class| class.name_any()).as_deref(),
        Some("a")
    );
    assert!(default_class(&classes[3..]).is_none());
}
