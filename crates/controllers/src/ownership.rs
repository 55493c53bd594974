//! Controller references: who controls an object, and the claims by which a controller adopts matching
//! orphans and releases what no longer matches.

use std::fmt::Debug;
use std::sync::Arc;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, OwnerReference};
use kube::api::{DeleteParams, Patch, PatchParams, Preconditions};
use kube::core::{NamespaceResourceScope, Status};
use kube::{Api, Resource};
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use skiff_client::{Change, ErrorExt, Informer, Key, Parts};

use crate::selector::Labels;

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
enum Claim {
    Mine,
    /// Controlled by nobody and matching.
    Adopt,
    /// Mine, but it no longer matches.
    Release,
    Foreign,
}

/// What an owner may do with an object. An owner that is being deleted takes and gives nothing.
fn claim(object: &ObjectMeta, owner: &ObjectMeta, matches: bool) -> Claim {
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
fn adopt_patch(reference: &OwnerReference, object: &ObjectMeta, finalizers: &[&str]) -> Value {
    let mut patch = json!({"metadata": {"ownerReferences": [reference], "uid": object.uid}});
    if !finalizers.is_empty() {
        patch["metadata"]["finalizers"] = json!(finalizers);
    }
    patch
}

fn release_patch(owner: &ObjectMeta, object: &ObjectMeta) -> Value {
    json!({"metadata": {"ownerReferences": [{"$patch": "delete", "uid": owner.uid}], "uid": object.uid}})
}

/// The objects out of `candidates` that `owner` controls, after it has adopted the orphans that it selects and
/// `may_adopt` lets it, and has released what it no longer selects.
pub(crate) async fn claim_all<O, K>(
    client: &kube::Client,
    owner: &O,
    candidates: Vec<Arc<K>>,
    selects: impl Fn(&K) -> bool,
    may_adopt: impl Fn(&K) -> bool,
) -> Result<Vec<Arc<K>>, kube::Error>
where
    O: Owner,
    K: Resource<DynamicType = (), Scope = NamespaceResourceScope> + Clone + DeserializeOwned + Debug,
{
    claim_with_finalizers(client, owner, candidates, selects, may_adopt, &[]).await
}

/// As [`claim_all`]; what is adopted gets the finalizers with its owner.
pub(crate) async fn claim_with_finalizers<O, K>(
    client: &kube::Client,
    owner: &O,
    candidates: Vec<Arc<K>>,
    selects: impl Fn(&K) -> bool,
    may_adopt: impl Fn(&K) -> bool,
    finalizers: &[&str],
) -> Result<Vec<Arc<K>>, kube::Error>
where
    O: Owner,
    K: Resource<DynamicType = (), Scope = NamespaceResourceScope> + Clone + DeserializeOwned + Debug,
{
    let namespace = owner.meta().namespace.as_deref().unwrap_or_default();
    let api: Api<K> = Api::namespaced(client.clone(), namespace);
    let mut claimed = Vec::new();
    let mut alive = None;
    for object in candidates {
        let patch = match claim(object.meta(), owner.meta(), selects(&object)) {
            Claim::Mine => {
                claimed.push(object);
                continue;
            }
            Claim::Foreign => continue,
            Claim::Adopt if !may_adopt(&object) => continue,
            Claim::Adopt => {
                // The copy may not show yet that the owner is being deleted.
                if alive.is_none() {
                    alive = Some(is_alive(client, owner).await?);
                }
                if alive == Some(false) {
                    continue;
                }
                adopt_patch(&controller_reference(owner), object.meta(), finalizers)
            }
            Claim::Release => release_patch(owner.meta(), object.meta()),
        };
        let adopting = controller_of(object.meta()).is_none();
        let name = object.meta().name.as_deref().unwrap_or_default();
        let patched = api
            .patch(name, &PatchParams::default(), &Patch::Strategic(patch))
            .await;
        match patched {
            Ok(patched) if adopting => {
                let controller = controller_of(patched.meta());
                if controller.is_none_or(|found| Some(&found.uid) != owner.meta().uid.as_ref()) {
                    let name = patched.meta().name.as_deref().unwrap_or_default();
                    let message = format!("cannot adopt {name:?}: admission changed its owner references");
                    return Err(changed(&message));
                }
                claimed.push(Arc::new(patched));
            }
            Ok(_) => {}
            Err(error) if error.is_not_found() => {}
            // It was replaced by another of its name, or changed hands.
            Err(kube::Error::Api(status)) if status.is_invalid() || status.is_conflict() => {}
            Err(error) => return Err(error),
        }
    }
    Ok(claimed)
}

/// A kind that controls others: what can be read back from the API to see whether it still lives.
pub(crate) trait Owner:
    Resource<DynamicType = (), Scope = NamespaceResourceScope> + Clone + DeserializeOwned + Debug
{
}

impl<O> Owner for O where
    O: Resource<DynamicType = (), Scope = NamespaceResourceScope> + Clone + DeserializeOwned + Debug
{
}

/// Asks the API, not a copy, whether the owner is there and not being deleted.
pub(crate) async fn is_alive<O: Owner>(client: &kube::Client, owner: &O) -> Result<bool, kube::Error> {
    let meta = owner.meta();
    let namespace = meta.namespace.as_deref().unwrap_or_default();
    let api: Api<O> = Api::namespaced(client.clone(), namespace);
    let live = api.get_opt(meta.name.as_deref().unwrap_or_default()).await?;
    Ok(live.is_some_and(|live| live.meta().uid == meta.uid && live.meta().deletion_timestamp.is_none()))
}

/// The key of the `O` that controls an object, whether or not it exists.
pub(crate) fn controlled_by<O: Resource<DynamicType = ()>>(object: &ObjectMeta) -> Option<Key> {
    let owner = controller_of(object)?;
    let ours = owner.kind == O::kind(&()) && owner.api_version == O::api_version(&());
    ours.then(|| Key::new(object.namespace.clone().unwrap_or_default(), owner.name.clone()))
}

/// Whom the change of an object that an `O` may control concerns: its controller, and the one before if that
/// changed. An object without a controller concerns whoever `adopters` names, if its labels or owners changed.
pub(crate) fn owners_of_change<O, K>(change: &Change<K>, adopters: impl Fn(&K) -> Vec<Key>) -> Vec<Key>
where
    O: Resource<DynamicType = ()>,
    K: Resource,
{
    let new = change.object();
    let after = controlled_by::<O>(new.meta());
    let mut keys: Vec<Key> = after.iter().cloned().collect();
    if let Change::Applied { old: Some(old), .. } = change {
        let before = controlled_by::<O>(old.meta());
        keys.extend(before.filter(|before| after.as_ref() != Some(before)));
    }
    if let Change::Applied { old, new } = change
        && controller_of(new.meta()).is_none()
        && old.as_ref().is_none_or(|old| {
            old.meta().labels != new.meta().labels
                || old.meta().owner_references != new.meta().owner_references
        })
    {
        keys.extend(adopters(new));
    }
    keys
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

fn orphans_of(owner: &ObjectMeta) -> String {
    format!("orphans/{}", owner.namespace.as_deref().unwrap_or_default())
}

/// The objects that `owner` controls or might adopt by their labels, from the index [`BY_CONTROLLER`].
pub(crate) fn candidates<K: Resource + 'static>(
    informer: &Informer<K>,
    owner: &ObjectMeta,
    selects: impl Fn(Option<&Labels>) -> bool,
) -> Vec<Arc<K>> {
    let mut found = informer.by_index(BY_CONTROLLER, owner.uid.as_deref().unwrap_or_default());
    found.extend(informer.by_index_labelled(BY_CONTROLLER, &orphans_of(owner), selects));
    found
}

/// As [`claim_all`] over the index [`BY_CONTROLLER`], for who needs only a part of what it controls: an object is decoded
/// only if it is to be adopted or released.
pub(crate) async fn claim_parts<O, K, V>(
    client: &kube::Client,
    owner: &O,
    informer: &Informer<K>,
    parts: &Parts<K, V>,
    selects: impl Fn(Option<&Labels>) -> bool,
    may_adopt: impl Fn(&K) -> bool,
) -> Result<Vec<Arc<V>>, kube::Error>
where
    O: Owner,
    K: Resource<DynamicType = (), Scope = NamespaceResourceScope>
        + Clone
        + DeserializeOwned
        + Debug
        + 'static,
    V: Send + Sync + 'static,
{
    let uid = owner.meta().uid.as_deref().unwrap_or_default();
    let mut claimed = parts.by_index_labelled(BY_CONTROLLER, uid, &selects);
    let mut others = informer.by_index_labelled(BY_CONTROLLER, uid, |labels| !selects(labels));
    others.extend(informer.by_index_labelled(BY_CONTROLLER, &orphans_of(owner.meta()), &selects));
    let selects = |object: &K| selects(object.meta().labels.as_ref());
    let adopted = claim_all(client, owner, others, selects, may_adopt).await?;
    claimed.extend(adopted.iter().map(|object| Arc::new(parts.make(object))));
    Ok(claimed)
}

/// Checks that what was created will be found again as the owner's. Admission may have changed what that depends on, and
/// then another one would be created at each look, without end: it is deleted instead, and the failure brings the next
/// try with back-off.
pub(crate) async fn check_created<O, K>(
    api: &Api<K>,
    owner: &O,
    created: K,
    selected: bool,
) -> Result<K, kube::Error>
where
    O: Owner,
    K: Resource<DynamicType = ()> + Clone + DeserializeOwned + Debug,
{
    let controller = controller_of(created.meta());
    let controlled = controller.is_some_and(|found| Some(&found.uid) == owner.meta().uid.as_ref());
    if controlled && selected {
        return Ok(created);
    }
    let name = created.meta().name.clone().unwrap_or_default();
    // Only what was just created: somebody may have replaced it under the same name.
    let same = Preconditions {
        uid: created.meta().uid.clone(),
        ..Default::default()
    };
    match api
        .delete(&name, &DeleteParams::default().preconditions(same))
        .await
    {
        Err(error) if !error.is_not_found() && !error.is_conflict() => return Err(error),
        _ => {}
    }
    let what = if controlled {
        "labels or template"
    } else {
        "owner references"
    };
    Err(changed(&format!(
        "{} {name:?} was deleted again: admission changed its {what}, so that it no longer belongs to {} {:?}",
        K::kind(&()),
        O::kind(&()),
        owner.meta().name.as_deref().unwrap_or_default()
    )))
}

/// What the server stored is not what was written.
fn changed(message: &str) -> kube::Error {
    kube::Error::Api(Status::failure(message, "Invalid").with_code(422).boxed())
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
