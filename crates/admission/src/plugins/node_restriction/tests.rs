//! A kubelet's writes, one a row.

use std::collections::BTreeMap;

use super::*;
use crate::User;
use crate::plugins::fake::{Objects, create};
use serde_json::json;

fn objects() -> Objects {
    Objects(vec![
        ("nodes", json!({"metadata": {"name": "n", "uid": "u"}})),
        (
            "pods",
            json!({"metadata": {"namespace": "ns", "name": "mine", "uid": "m"}, "spec": {"nodeName": "n",
                "volumes": [{"projected": {"sources": [{"serviceAccountToken": {"audience": "vault"}}]}}]}}),
        ),
        (
            "pods",
            json!({"metadata": {"namespace": "ns", "name": "theirs", "uid": "t"}, "spec": {"nodeName": "o"}}),
        ),
        (
            "pods",
            json!({"metadata": {"namespace": "ns", "name": "served", "uid": "s"},
                "spec": {"nodeName": "n", "serviceAccountName": "sa"}}),
        ),
        (
            "pods",
            json!({"metadata": {"namespace": "ns", "name": "mirror", "uid": "i", "annotations": {"kubernetes.io/config.mirror": "x"}},
                "spec": {"nodeName": "n"}}),
        ),
        (
            "serviceaccounts",
            json!({"metadata": {"namespace": "ns", "name": "sa", "uid": "a"}}),
        ),
    ])
}

struct Write {
    operation: Operation,
    /// `group/resource:subresource`
    what: &'static str,
    name: &'static str,
    new: Value,
    old: Value,
}

async fn check(write: Write, expected: Option<&str>) {
    let user = User {
        name: "system:node:n".to_owned(),
        uid: String::new(),
        groups: vec!["system:nodes".to_owned()],
        extra: BTreeMap::new(),
    };
    let (path, subresource) = write.what.split_once(':').unwrap_or((write.what, ""));
    let (group, resource) = path.split_once('/').unwrap_or(("", path));
    let mut new = write.new;
    let mut a = create(group, resource, "", &mut new);
    (a.user, a.operation, a.name, a.subresource) = (&user, write.operation, write.name, subresource);
    if write.operation != Operation::Create {
        a.old_object = Some(&write.old);
    }
    if write.operation == Operation::Delete {
        a.object = None;
    }
    if resource == "leases" {
        a.namespace = "kube-node-lease";
    }
    assert!(NodeRestriction.concerns(&a));
    let result = NodeRestriction.admit(&mut a, &objects()).await;
    let said = result.err().map(|status| status.message);
    let said = said
        .as_deref()
        .map(|said| said.split_once(" is forbidden: ").map_or(said, |(_, why)| why));
    assert_eq!(said, expected, "{} {}", write.what, write.name);
}

async fn created(what: &'static str, new: Value, expected: Option<&str>) {
    let name = if what == "nodes" { "n" } else { "" };
    let write = Write {
        operation: Operation::Create,
        what,
        name,
        new,
        old: Value::Null,
    };
    check(write, expected).await;
}

async fn updated(what: &'static str, name: &'static str, new: Value, old: Value, expected: Option<&str>) {
    let write = Write {
        operation: Operation::Update,
        what,
        name,
        new,
        old,
    };
    check(write, expected).await;
}

#[tokio::test]
async fn others_are_not_restricted() {
    let mut pod = json!({});
    assert!(!NodeRestriction.concerns(&create("", "pods", "Pod", &mut pod)));
}

#[tokio::test]
async fn a_node_makes_only_mirrors_of_its_own() {
    let mirror = |change: Value| {
        let mut pod = json!({"metadata": {"annotations": {"kubernetes.io/config.mirror": "x"},
            "ownerReferences": [{"apiVersion": "v1", "kind": "Node", "name": "n", "uid": "u", "controller": true}]},
            "spec": {"nodeName": "n"}});
        for (key, value) in change.as_object().unwrap() {
            pod["spec"][key] = value.clone();
        }
        pod
    };
    created("pods", mirror(json!({})), None).await;
    created(
        "pods",
        json!({"spec": {"nodeName": "n"}}),
        Some("pod does not have \"kubernetes.io/config.mirror\" annotation, node \"n\" can only create mirror pods"),
    )
    .await;
    created(
        "pods",
        mirror(json!({"nodeName": "o"})),
        Some("node \"n\" can only create pods with spec.nodeName set to itself"),
    )
    .await;
    created(
        "pods",
        mirror(json!({"serviceAccountName": "x"})),
        Some("node \"n\" can not create pods that reference serviceaccounts"),
    )
    .await;
    created(
        "pods",
        mirror(json!({"volumes": [{"name": "h", "hostPath": {}}, {"name": "v", "projected": {"sources": [{"serviceAccountToken": {}}]}}]})),
        Some("node \"n\" can not create pods that reference serviceaccounts (via projected volumes)"),
    )
    .await;
    let mut owned = mirror(json!({}));
    owned["metadata"]["ownerReferences"][0]["uid"] = json!("other");
    created("pods", owned, Some("node n UID mismatch: expected other got u")).await;
    for (owners, why) in [
        (
            json!([]),
            "node \"n\" can only create pods with an owner reference set to itself",
        ),
        (
            json!([{}, {}]),
            "node \"n\" can only create pods with a single owner reference set to itself",
        ),
        (
            json!([{"apiVersion": "v1", "kind": "Node", "name": "o", "uid": "u", "controller": true}]),
            "node \"n\" can only create pods with an owner reference set to itself",
        ),
        (
            json!([{"apiVersion": "v1", "kind": "Node", "name": "n", "uid": "u"}]),
            "node \"n\" can only create pods with a controller owner reference set to itself",
        ),
        (
            json!([{"apiVersion": "v1", "kind": "Node", "name": "n", "uid": "u", "controller": true, "blockOwnerDeletion": true}]),
            "node \"n\" must not set blockOwnerDeletion on an owner reference",
        ),
    ] {
        let mut owned = mirror(json!({}));
        owned["metadata"]["ownerReferences"] = owners;
        created("pods", owned, Some(why)).await;
    }
    for (spec, what) in [
        (json!({"imagePullSecrets": [{"name": "s"}]}), "secrets"),
        (
            json!({"volumes": [{"name": "v", "configMap": {"name": "c"}}]}),
            "configmaps",
        ),
        (json!({"resourceClaims": [{"name": "r"}]}), "resourceclaims"),
        (
            json!({"volumes": [{"name": "v", "persistentVolumeClaim": {"claimName": "c"}}]}),
            "persistentvolumeclaims",
        ),
        (
            json!({"volumes": [{"name": "v", "csi": {"driver": "d"}}]}),
            "csidrivers (via CSI volumes)",
        ),
        (
            json!({"volumes": [{"name": "v", "projected": {"sources": [{"clusterTrustBundle": {}}]}}]}),
            "clustertrustbundles",
        ),
    ] {
        let why = format!("node \"n\" can not create pods that reference {what}");
        created("pods", mirror(spec), Some(&why)).await;
    }
    created(
        "pods",
        mirror(json!({"volumes": [{"name": "v"}]})),
        Some("error checking mirror pod for API references: unknown volume type for volume  \"v\""),
    )
    .await;
}

#[tokio::test]
async fn a_node_ends_and_reports_its_own_pods() {
    for (name, expected) in [
        ("mine", None),
        (
            "theirs",
            Some("node \"n\" can only delete pods with spec.nodeName set to itself"),
        ),
        ("none", Some("pod \"none\" not found")),
    ] {
        let write = Write {
            operation: Operation::Delete,
            what: "pods",
            name,
            new: Value::Null,
            old: Value::Null,
        };
        check(write, expected).await;
    }
    let mine = || json!({"spec": {"nodeName": "n"}});
    updated("pods:status", "mine", mine(), mine(), None).await;
    updated(
        "pods:status",
        "theirs",
        mine(),
        json!({"spec": {"nodeName": "o"}}),
        Some("node \"n\" can only update pod status for pods with spec.nodeName set to itself"),
    )
    .await;
    updated(
        "pods:status",
        "mine",
        json!({"metadata": {"labels": {"a": "b"}}, "spec": {"nodeName": "n"}}),
        mine(),
        Some("node \"n\" cannot update labels through pod status"),
    )
    .await;
    updated(
        "pods:status",
        "mine",
        json!({"spec": {"nodeName": "n"}, "status": {"resourceClaimStatuses": [{"name": "r"}]}}),
        mine(),
        Some("node \"n\" cannot update resource claim statues"),
    )
    .await;
    updated(
        "pods:status",
        "mine",
        json!({"spec": {"nodeName": "n"}, "status": {"extendedResourceClaimStatus": {"resourceClaimName": "r"}}}),
        mine(),
        Some("node \"n\" cannot update extended resource claim status"),
    )
    .await;
    updated(
        "pods",
        "mine",
        mine(),
        mine(),
        Some("unexpected operation \"UPDATE\", node \"n\" can only create and delete mirror pods"),
    )
    .await;
    updated(
        "pods:resize",
        "mine",
        mine(),
        mine(),
        Some("unexpected pod subresource \"resize\", only 'status' and 'eviction' are allowed"),
    )
    .await;
}

#[tokio::test]
async fn a_node_does_not_choose_what_steers_workloads() {
    let labelled = |labels: Value| json!({"metadata": {"labels": labels}});
    created(
        "nodes",
        labelled(json!({"kubernetes.io/hostname": "n", "a": "b", "x.node.kubernetes.io/y": ""})),
        None,
    )
    .await;
    created(
        "nodes",
        labelled(json!({"node-restriction.kubernetes.io/x": "", "foo.k8s.io/y": ""})),
        Some("node \"n\" is not allowed to set the following labels: foo.k8s.io/y, node-restriction.kubernetes.io/x"),
    )
    .await;
    let role = || labelled(json!({"node-role.kubernetes.io/x": ""}));
    updated("nodes:status", "n", role(), role(), None).await;
    updated(
        "nodes",
        "n",
        labelled(json!({})),
        role(),
        Some("is not allowed to modify labels: node-role.kubernetes.io/x"),
    )
    .await;
    updated(
        "nodes",
        "n",
        json!({"spec": {"taints": [{"key": "k"}]}}),
        json!({}),
        Some("node \"n\" is not allowed to modify taints"),
    )
    .await;
    updated(
        "nodes",
        "n",
        json!({"metadata": {"ownerReferences": [{"kind": "ConfigMap"}]}}),
        json!({}),
        Some("node \"n\" is not allowed to modify ownerReferences"),
    )
    .await;
    let source = |name: &str| json!({"spec": {"configSource": {"configMap": {"name": name}}}});
    updated(
        "nodes",
        "n",
        source("a"),
        source("b"),
        Some("node \"n\" is not allowed to update configSource to a new non-nil configSource"),
    )
    .await;
    updated("nodes", "n", source("a"), source("a"), None).await;
    updated("nodes", "n", json!({}), source("a"), None).await;
    updated(
        "nodes:status",
        "o",
        json!({}),
        json!({}),
        Some("node \"n\" is not allowed to modify node \"o\""),
    )
    .await;
}

#[tokio::test]
async fn tokens_are_for_pods_of_the_node() {
    let ask = |name: &str, uid: &str, audiences: Value| json!({"spec": {"audiences": audiences, "boundObjectRef": {"apiVersion": "v1", "kind": "Pod", "name": name, "uid": uid}}});
    created("serviceaccounts:token", ask("mine", "m", json!(["vault"])), None).await;
    created(
        "serviceaccounts:token",
        json!({"spec": {}}),
        Some("node requested token not bound to a pod"),
    )
    .await;
    created(
        "serviceaccounts:token",
        ask("theirs", "t", json!([])),
        Some("node requested token bound to a pod scheduled on a different node"),
    )
    .await;
    created(
        "serviceaccounts:token",
        ask("mine", "m", json!(["x"])),
        Some("audience \"x\" not found in pod spec volume, system:node:n is not authorized to request tokens for this audience"),
    )
    .await;
}

#[tokio::test]
async fn leases_and_the_like_have_the_nodes_name() {
    created(
        "coordination.k8s.io/leases",
        json!({"metadata": {"name": "n"}}),
        None,
    )
    .await;
    let user = User {
        name: "system:node:n".to_owned(),
        groups: vec!["system:nodes".to_owned()],
        ..User::default()
    };
    let mut lease = json!({"metadata": {"name": "n"}});
    let mut elsewhere = create("coordination.k8s.io", "leases", "Lease", &mut lease);
    elsewhere.user = &user;
    let refused = NodeRestriction.admit(&mut elsewhere, &objects()).await;
    assert_eq!(
        refused.unwrap_err().message,
        "leases.coordination.k8s.io \"n\" is forbidden: can only access leases in the \"kube-node-lease\" system namespace"
    );
    created(
        "coordination.k8s.io/leases",
        json!({"metadata": {"name": "o"}}),
        Some("can only access node lease with the same name as the requesting node"),
    )
    .await;
    updated(
        "storage.k8s.io/csinodes",
        "o",
        json!({}),
        json!({}),
        Some("can only access CSINode with the same name as the requesting node"),
    )
    .await;
    created(
        "resource.k8s.io/resourceslices",
        json!({"spec": {"nodeName": "o"}}),
        Some("can only create ResourceSlice with the same NodeName as the requesting node"),
    )
    .await;
    let claim = |phase: &str, size: &str| json!({"status": {"phase": phase, "capacity": {"storage": size}}});
    updated(
        "persistentvolumeclaims:status",
        "c",
        claim("Bound", "2"),
        claim("Bound", "1"),
        None,
    )
    .await;
    updated(
        "persistentvolumeclaims:status",
        "c",
        claim("Lost", "1"),
        claim("Bound", "1"),
        Some("node \"n\" is not allowed to update fields other than status.quantity and status.conditions"),
    )
    .await;
}

#[tokio::test]
async fn a_node_asks_for_certificates_of_its_own_pods() {
    const REQUESTS: &str = "certificates.k8s.io/podcertificaterequests";
    let request = |change: Value| {
        let mut request = json!({"spec": {"podName": "served", "podUID": "s", "serviceAccountName": "sa",
            "serviceAccountUID": "a", "nodeName": "n", "nodeUID": "u"}});
        for (key, value) in change.as_object().unwrap() {
            request["spec"][key] = value.clone();
        }
        request
    };
    created(REQUESTS, request(json!({})), None).await;
    for (change, why) in [
        (
            json!({"nodeName": "o"}),
            "PodCertificateRequest.Spec.NodeName=\"o\", which is not the requesting node \"n\"",
        ),
        (
            json!({"nodeUID": "x"}),
            "PodCertificateRequest for pod \"ns/served\" names node UID \"x\", inconsistent with the running node (\"u\")",
        ),
        (
            json!({"podName": "none"}),
            "while retrieving pod \"ns/none\" named in the PodCertificateRequest: pod \"none\" not found",
        ),
        (
            json!({"podUID": "x"}),
            "PodCertificateRequest for pod \"ns/served\" contains pod UID (\"x\") which differs from running pod \"s\"",
        ),
        (
            json!({"podName": "theirs", "podUID": "t"}),
            "pod \"ns/theirs\" is not running on node \"n\" named in the PodCertificateRequest",
        ),
        (
            json!({"podName": "mirror", "podUID": "i"}),
            "pod \"ns/mirror\" is a mirror pod",
        ),
        (
            json!({"serviceAccountName": "other"}),
            "PodCertificateRequest for pod \"ns/served\" contains serviceAccountName (\"other\") that differs from running pod (\"sa\")",
        ),
        (
            json!({"serviceAccountUID": "x"}),
            "PodCertificateRequest for pod \"ns/served\" names service account UID \"x\", which differs from the running service account (\"a\")",
        ),
    ] {
        created(REQUESTS, request(change), Some(why)).await;
    }
    let unchanged = request(json!({}));
    updated(
        REQUESTS,
        "req-1",
        unchanged.clone(),
        unchanged.clone(),
        Some("unexpected operation UPDATE"),
    )
    .await;
    updated(
        "certificates.k8s.io/podcertificaterequests:status",
        "req-1",
        unchanged.clone(),
        unchanged,
        Some("unexpected operation UPDATE"),
    )
    .await;
}
