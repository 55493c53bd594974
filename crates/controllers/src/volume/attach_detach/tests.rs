//! The plans of the attach/detach controller.

use super::plan::{Detach, Note, Plan, plan};
use super::*;
use k8s_openapi::api::core::v1::ObjectReference;
use serde_json::{Value, json};
use std::time::Duration;

fn at(second: i64) -> Timestamp {
    Timestamp::from_second(second).unwrap()
}

fn pod(namespace: &str, name: &str) -> ObjectReference {
    ObjectReference {
        namespace: Some(namespace.into()),
        name: Some(name.into()),
        ..Default::default()
    }
}

fn wanted(shared: bool) -> Wanted {
    Wanted {
        unique: "kubernetes.io/csi/d^h".into(),
        attachment: "csi-1".into(),
        driver: "d".into(),
        volume: "v".into(),
        shared,
        pods: vec![pod("ns", "p")],
    }
}

fn node(status: Value, taints: Value) -> Node {
    serde_json::from_value(json!({"metadata": {"name": "n"}, "spec": {"taints": taints}, "status": status}))
        .unwrap()
}

fn present(metadata: Value, status: Value) -> Vec<Present> {
    let mut attachment = json!({"metadata": metadata, "status": status,
        "spec": {"attacher": "d", "nodeName": "n", "source": {"persistentVolumeName": "v"}}});
    attachment["metadata"]["name"] = json!("csi-1");
    vec![Present {
        attachment: Arc::new(serde_json::from_value(attachment).unwrap()),
        unique: Some("kubernetes.io/csi/d^h".into()),
    }]
}

fn planned(node: &Node, wanted: Vec<Wanted>, present: Vec<Present>, since: &[(&str, i64)]) -> Plan {
    let since = since
        .iter()
        .map(|(name, second)| ((*name).to_owned(), at(*second)));
    plan(
        Observed {
            node_name: "n",
            node: Some(node),
            wanted,
            present,
            elsewhere: BTreeMap::new(),
            unneeded_since: &since.collect(),
        },
        at(1000),
    )
}

fn note(type_: &'static str, reason: &'static str, message: &str) -> Note {
    Note {
        pod: pod("ns", "p"),
        type_,
        reason,
        message: message.into(),
    }
}

const IN_USE: &str = "kubernetes.io/csi/d^h";

#[test]
fn a_volume_is_attached_and_reported() {
    let bare = node(json!({}), json!([]));
    let made = planned(&bare, vec![wanted(false)], Vec::new(), &[]);
    assert_eq!(
        serde_json::to_value(&made.attach).unwrap(),
        json!([{"apiVersion": "storage.k8s.io/v1", "kind": "VolumeAttachment", "metadata": {"name": "csi-1"},
            "spec": {"attacher": "d", "nodeName": "n", "source": {"persistentVolumeName": "v"}}}])
    );
    assert_eq!((made.attached, made.notes), (None, Vec::new()));
    let waiting = planned(
        &bare,
        vec![wanted(false)],
        present(json!({}), json!({"attached": false})),
        &[],
    );
    assert_eq!(waiting, Plan::default());
    let attached = present(json!({}), json!({"attached": true}));
    let reported = planned(&bare, vec![wanted(false)], attached.clone(), &[]);
    assert_eq!(
        serde_json::to_value(&reported.attached).unwrap(),
        json!([{"name": IN_USE, "devicePath": ""}])
    );
    assert_eq!(
        reported.notes,
        [note(
            "Normal",
            "SuccessfulAttachVolume",
            "AttachVolume.Attach succeeded for volume \"v\" "
        )]
    );
    let known = node(
        json!({"volumesAttached": [{"name": IN_USE, "devicePath": ""}]}),
        json!([]),
    );
    assert_eq!(
        planned(&known, vec![wanted(false)], attached, &[]),
        Plan::default()
    );
    let failed = present(
        json!({}),
        json!({"attached": false, "attachError": {"message": "no quota"}}),
    );
    assert_eq!(
        planned(&bare, vec![wanted(false)], failed, &[]).notes,
        [note(
            "Warning",
            "FailedAttachVolume",
            "AttachVolume.Attach failed for volume \"v\" : no quota"
        )]
    );
    // One that is going is not attached again before it is gone.
    let going = present(
        json!({"deletionTimestamp": "2026-01-01T00:00:00Z"}),
        json!({"attached": true}),
    );
    assert_eq!(planned(&bare, vec![wanted(false)], going, &[]), Plan::default());
}

#[test]
fn a_volume_for_one_node_waits_for_the_other() {
    let bare = node(json!({}), json!([]));
    let check = |shared: bool, users: Vec<ObjectReference>, expected: Option<&str>| {
        let planned = plan(
            Observed {
                node_name: "n",
                node: Some(&bare),
                wanted: vec![wanted(shared)],
                present: Vec::new(),
                elsewhere: BTreeMap::from([(IN_USE.to_owned(), users)]),
                unneeded_since: &BTreeMap::new(),
            },
            at(0),
        );
        assert_eq!(planned.attach.is_empty(), expected.is_some());
        let messages: Vec<&str> = planned.notes.iter().map(|note| note.message.as_str()).collect();
        assert_eq!(messages, expected.into_iter().collect::<Vec<_>>());
    };
    check(true, vec![pod("ns", "q")], None);
    check(
        false,
        Vec::new(),
        Some(
            "Waiting for detach for volume \"v\" Volume is already exclusively attached to one node, waiting on detach before it can be attached to another node",
        ),
    );
    check(
        false,
        vec![pod("ns", "q"), pod("ns", "r")],
        Some("Multi-Attach error for volume \"v\" Volume is already used by pod(s) q, r"),
    );
    check(
        false,
        vec![pod("ns", "q"), pod("other", "r")],
        Some(
            "Multi-Attach error for volume \"v\" Volume is already used by pod(s) q and 1 pod(s) in different namespaces",
        ),
    );
    check(
        false,
        vec![pod("other", "r")],
        Some(
            "Multi-Attach error for volume \"v\" Volume is already used by 1 pod(s) in different namespaces",
        ),
    );
}

#[test]
fn what_no_pod_needs_is_detached_when_the_node_lets_go() {
    let attached = || present(json!({}), json!({"attached": true}));
    let reported = json!([{"name": IN_USE, "devicePath": ""}]);
    let status = |ready: &str, in_use: bool| {
        json!({"volumesAttached": reported, "volumesInUse": if in_use { vec![IN_USE] } else { Vec::new() },
            "conditions": [{"type": "Ready", "status": ready}]})
    };
    let detach = |forced: bool| {
        vec![Detach {
            attachment: "csi-1".into(),
            unique: Some(IN_USE.into()),
            forced,
        }]
    };
    // Told to the node first: the list is empty in the same plan.
    let free = planned(
        &node(status("True", false), json!([])),
        Vec::new(),
        attached(),
        &[],
    );
    assert_eq!((free.detach, free.attached), (detach(false), Some(Vec::new())));
    let used = planned(
        &node(status("True", true), json!([])),
        Vec::new(),
        attached(),
        &[("csi-1", 1)],
    );
    assert_eq!((used.detach, used.attached, used.again), (Vec::new(), None, None));
    let unready = node(status("False", true), json!([]));
    let waiting = planned(&unready, Vec::new(), attached(), &[("csi-1", 900)]);
    assert_eq!(waiting.again, Some(Duration::from_secs(260)));
    assert_eq!(
        waiting.unneeded_since,
        BTreeMap::from([("csi-1".to_owned(), at(900))])
    );
    let expired = planned(&unready, Vec::new(), attached(), &[("csi-1", 640)]);
    assert_eq!(expired.detach, detach(true));
    let out = json!([{"key": "node.kubernetes.io/out-of-service", "effect": "NoExecute"}]);
    let out = planned(&node(status("False", true), out), Vec::new(), attached(), &[]);
    assert_eq!(out.detach, detach(true));
    let gone = plan(
        Observed {
            node_name: "n",
            node: None,
            wanted: Vec::new(),
            present: attached(),
            elsewhere: BTreeMap::new(),
            unneeded_since: &BTreeMap::new(),
        },
        at(0),
    );
    assert_eq!((gone.detach, gone.attached), (detach(true), None));
}

#[test]
fn attachments_have_upstreams_names() {
    assert_eq!(
        attachment_name("h", "d", "n"),
        format!("csi-{:x}", Sha256::digest(b"hdn"))
    );
    assert_eq!(attachment_name("h", "d", "n").len(), 68);
}
