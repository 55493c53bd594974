//! Controller references: who controls an object, and the claims by which a controller adopts matching
//! orphans and releases what no longer matches.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, OwnerReference};
use kube::Resource;
use serde_json::{Value, json};

pub(crate) fn controller_of(meta: &ObjectMeta) -> Option<&OwnerReference> {
    meta.owner_references
        .as_ref()?
        .iter()
        .find(|reference| reference.controller == Some(true))
}

/// The reference that makes `owner` the controller of what carries it.
pub(crate) fn controller_reference<K: Resource<DynamicType = ()>>(owner: &K) -> OwnerReference {
    OwnerReference {
        api_version: K::api_version(&()).into_owned(),
        kind: K::kind(&()).into_owned(),
        name: owner.meta().name.clone().unwrap_or_default(),
        uid: owner.meta().uid.clone().unwrap_or_default(),
        controller: Some(true),
        block_owner_deletion: Some(true),
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Claim {
    Mine,
    /// Controlled by nobody and matching.
    Adopt,
    /// Mine, but it no longer matches.
    Release,
    Foreign,
}

/// What an owner may do with an object. An owner that is being deleted takes and gives nothing.
pub(crate) fn claim(object: &ObjectMeta, owner: &ObjectMeta, matches: bool) -> Claim {
    let owner_ends = owner.deletion_timestamp.is_some();
    match controller_of(object) {
        Some(reference) if owner.uid.as_deref() == Some(reference.uid.as_str()) => {
            if matches {
                Claim::Mine
            } else if owner_ends {
                Claim::Foreign
            } else {
                Claim::Release
            }
        }
        Some(_) => Claim::Foreign,
        None if matches && !owner_ends && object.deletion_timestamp.is_none() => Claim::Adopt,
        None => Claim::Foreign,
    }
}

/// A strategic merge patch; the uid makes it fail on another object of the same name.
pub(crate) fn adopt_patch(reference: &OwnerReference, object: &ObjectMeta) -> Value {
    json!({"metadata": {"ownerReferences": [reference], "uid": object.uid}})
}

pub(crate) fn release_patch(owner: &ObjectMeta, object: &ObjectMeta) -> Value {
    json!({"metadata": {"ownerReferences": [{"$patch": "delete", "uid": owner.uid}], "uid": object.uid}})
}

/// Index values: objects by the uid of their controller, orphans by their namespace.
pub(crate) fn by_controller<K: Resource>(object: &K) -> Vec<String> {
    match controller_of(object.meta()) {
        Some(reference) => vec![reference.uid.clone()],
        None => vec![format!(
            "orphans/{}",
            object.meta().namespace.as_deref().unwrap_or_default()
        )],
    }
}

pub(crate) const BY_CONTROLLER: &str = "controller";

/// The objects that `owner` controls or might adopt, from the index [`BY_CONTROLLER`].
pub(crate) fn candidates<K: Resource + 'static>(
    informer: &skiff_client::Informer<K>,
    owner: &ObjectMeta,
) -> Vec<std::sync::Arc<K>> {
    let mut found = informer.by_index(BY_CONTROLLER, owner.uid.as_deref().unwrap_or_default());
    let orphans = format!("orphans/{}", owner.namespace.as_deref().unwrap_or_default());
    found.extend(informer.by_index(BY_CONTROLLER, &orphans));
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn claims() {
        let owner = |deleting: bool| -> ObjectMeta {
            let deleted = if deleting {
                json!("2026-01-01T00:00:00Z")
            } else {
                Value::Null
            };
            serde_json::from_value(json!({"uid": "me", "deletionTimestamp": deleted})).unwrap()
        };
        let object = |uid: Option<&str>, deleting: bool| -> ObjectMeta {
            let references: Vec<Value> = uid
                .map(|uid| json!({"apiVersion": "v1", "kind": "K", "name": "n", "uid": uid, "controller": true}))
                .into_iter()
                .collect();
            let deleted = if deleting {
                json!("2026-01-01T00:00:00Z")
            } else {
                Value::Null
            };
            serde_json::from_value(json!({"ownerReferences": references, "deletionTimestamp": deleted}))
                .unwrap()
        };
        let check = |object: ObjectMeta, owner: ObjectMeta, matches: bool, expected: Claim| {
            assert_eq!(claim(&object, &owner, matches), expected, "{object:?} {matches}");
        };
        check(object(Some("me"), false), owner(false), true, Claim::Mine);
        check(object(Some("me"), false), owner(false), false, Claim::Release);
        check(object(Some("me"), false), owner(true), false, Claim::Foreign);
        check(object(Some("other"), false), owner(false), true, Claim::Foreign);
        check(object(None, false), owner(false), true, Claim::Adopt);
        check(object(None, true), owner(false), true, Claim::Foreign);
        check(object(None, false), owner(true), true, Claim::Foreign);
        check(object(None, false), owner(false), false, Claim::Foreign);
    }
}
