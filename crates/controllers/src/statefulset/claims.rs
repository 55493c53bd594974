//! Who owns the claims of a StatefulSet's pods: what persistentVolumeClaimRetentionPolicy asks for, written as
//! owner references that the garbage collector follows. No I/O.

use k8s_openapi::api::core::v1::{PersistentVolumeClaim, Pod};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference;

use super::set::{Set, name_of};
use crate::ownership::controller_reference;

fn uid_of(pod: &Pod) -> &str {
    pod.metadata.uid.as_deref().unwrap_or_default()
}

fn references(claim: &PersistentVolumeClaim) -> &[OwnerReference] {
    claim.metadata.owner_references.as_deref().unwrap_or_default()
}

fn names_set(reference: &OwnerReference, set: &Set<'_>) -> bool {
    reference.api_version == "apps/v1" && reference.kind == "StatefulSet" && reference.name == set.name()
}

fn names_pod(reference: &OwnerReference, pod: &str) -> bool {
    reference.api_version == "v1" && reference.kind == "Pod" && reference.name == pod
}

/// True if the claim belongs to an earlier pod of this name: it goes with that one, so that a new pod must wait.
pub(super) fn is_of_earlier_pod(claim: &PersistentVolumeClaim, pod: &Pod) -> bool {
    let named = references(claim).iter().find(|one| names_pod(one, name_of(pod)));
    named.is_some_and(|reference| reference.uid != uid_of(pod))
}

fn is_of_earlier_set(claim: &PersistentVolumeClaim, set: &Set<'_>) -> bool {
    let named = references(claim).iter().find(|one| names_set(one, set));
    named.is_some_and(|reference| reference.uid != set.uid())
}

/// True if somebody else controls the claim, so that the retention policy cannot hold for it.
pub(super) fn has_other_controller(claim: &PersistentVolumeClaim, set: &Set<'_>, pod: &Pod) -> bool {
    if !set.deletes_claims_when_deleted() && !set.deletes_claims_when_scaled() {
        // Whoever controls a claim that is retained is welcome to.
        return false;
    }
    references(claim).iter().any(|reference| {
        if names_set(reference, set) {
            reference.uid != set.uid()
        } else if names_pod(reference, name_of(pod)) {
            reference.uid != uid_of(pod)
        } else {
            reference.controller == Some(true)
        }
    })
}

/// The owner references that the claim of a pod must get; `None` if it has the right ones.
pub(super) fn new_owners(
    claim: &PersistentVolumeClaim,
    set: &Set<'_>,
    pod: &Pod,
) -> Option<Vec<OwnerReference>> {
    // What an earlier set or pod left behind is the garbage collector's.
    if is_of_earlier_set(claim, set) || is_of_earlier_pod(claim, pod) {
        return None;
    }
    let present = references(claim);
    let owned_by = |uid: &str| present.iter().any(|reference| reference.uid == uid);
    let (by_set, by_pod) = (owned_by(set.uid()), owned_by(uid_of(pod)));
    let others = || {
        let others = present
            .iter()
            .filter(|reference| !names_set(reference, set) && !names_pod(reference, name_of(pod)));
        others.cloned().collect::<Vec<_>>()
    };
    if has_other_controller(claim, set, pod) {
        return (by_set || by_pod).then(others);
    }
    let scaled_down = !set.wants(pod);
    // A pod that is scaled away takes its claim with it; until then the set does when it is deleted.
    let wants_pod = set.deletes_claims_when_scaled() && scaled_down;
    let wants_set = set.deletes_claims_when_deleted() && !wants_pod;
    let ours = |reference: &&OwnerReference| reference.uid == set.uid() || reference.uid == uid_of(pod);
    let as_controller = present
        .iter()
        .filter(ours)
        .all(|reference| reference.controller == Some(true));
    if (by_set, by_pod) == (wants_set, wants_pod) && as_controller {
        return None;
    }
    let mut owners = others();
    if wants_pod {
        owners.push(controller_reference(pod));
    }
    if wants_set {
        owners.push(controller_reference(set.object));
    }
    Some(owners)
}

#[cfg(test)]
mod tests {
    use super::*;
    use k8s_openapi::api::apps::v1::StatefulSet;
    use serde_json::{Value, json};

    fn set(when_deleted: &str, when_scaled: &str) -> StatefulSet {
        serde_json::from_value(
            json!({"metadata": {"name": "web", "namespace": "d", "uid": "set"}, "spec": {
            "replicas": 1, "selector": {}, "template": {}, "persistentVolumeClaimRetentionPolicy":
                {"whenDeleted": when_deleted, "whenScaled": when_scaled}}}),
        )
        .unwrap()
    }

    fn pod(ordinal: i64) -> Pod {
        let name = format!("web-{ordinal}");
        serde_json::from_value(json!({"metadata": {"name": name, "uid": "pod"}})).unwrap()
    }

    fn by_set(uid: &str, controller: bool) -> Value {
        json!({"apiVersion": "apps/v1", "kind": "StatefulSet", "name": "web", "uid": uid, "controller": controller})
    }

    fn by_pod(ordinal: i64, uid: &str) -> Value {
        json!({"apiVersion": "v1", "kind": "Pod", "name": format!("web-{ordinal}"), "uid": uid, "controller": true})
    }

    fn by_other(controller: bool) -> Value {
        json!({"apiVersion": "v1", "kind": "ConfigMap", "name": "x", "uid": "other", "controller": controller})
    }

    #[test]
    fn owners_follow_the_policy() {
        // The pod of ordinal 0 is wanted, that of ordinal 1 is scaled away.
        let check = |policy: (&str, &str), ordinal: i64, present: Vec<Value>, expected: Option<Vec<&str>>| {
            let object = set(policy.0, policy.1);
            let claim: PersistentVolumeClaim =
                serde_json::from_value(json!({"metadata": {"name": "data", "ownerReferences": present}}))
                    .unwrap();
            let got = new_owners(&claim, &Set::new(&object).unwrap(), &pod(ordinal));
            let uids = got.map(|owners| owners.into_iter().map(|one| one.uid).collect::<Vec<_>>());
            let expected = expected.map(|uids| uids.into_iter().map(str::to_owned).collect::<Vec<_>>());
            assert_eq!(uids, expected, "{policy:?} {ordinal} {present:?}");
        };
        let (retain, both) = (("Retain", "Retain"), ("Delete", "Delete"));
        let (deleted, scaled) = (("Delete", "Retain"), ("Retain", "Delete"));
        let ours = || vec![by_set("set", true)];
        check(retain, 0, vec![], None);
        check(retain, 0, ours(), Some(vec![]));
        check(
            retain,
            1,
            vec![by_other(false), by_pod(1, "pod")],
            Some(vec!["other"]),
        );
        check(retain, 0, vec![by_other(true)], None);
        check(deleted, 0, vec![], Some(vec!["set"]));
        check(deleted, 0, ours(), None);
        check(deleted, 1, ours(), None);
        check(deleted, 0, vec![by_set("set", false)], Some(vec!["set"]));
        check(scaled, 0, vec![], None);
        check(scaled, 0, ours(), Some(vec![]));
        check(scaled, 1, vec![], Some(vec!["pod"]));
        check(scaled, 1, vec![by_pod(1, "pod")], None);
        check(both, 0, vec![], Some(vec!["set"]));
        check(both, 0, ours(), None);
        check(both, 1, ours(), Some(vec!["pod"]));
        check(
            both,
            1,
            vec![by_other(false), by_set("set", true)],
            Some(vec!["other", "pod"]),
        );
        // Nothing is taken from an earlier set or pod, nor from another controller.
        check(both, 0, vec![by_set("earlier", true)], None);
        check(both, 0, vec![by_pod(0, "earlier")], None);
        check(both, 0, vec![by_other(true)], None);
        check(
            both,
            0,
            vec![by_other(true), by_set("set", true)],
            Some(vec!["other"]),
        );
    }
}
