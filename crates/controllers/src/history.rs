//! ControllerRevisions: the pod templates that a StatefulSet or DaemonSet had, each recorded as the patch that
//! puts it back. `kubectl rollout history` and `undo` read them.
//!
//! What a revision holds, how it is named, compared and numbered is decided here for both kinds; which revision
//! a set wants is theirs.

use std::sync::Arc;

use k8s_openapi::api::apps::v1::ControllerRevision;
use k8s_openapi::api::core::v1::PodTemplateSpec;
use kube::Api;
use kube::api::{DeleteParams, PostParams};
use serde_json::{Value, json};
use skiff_client::ErrorExt;

use crate::deployment::safe_encode;

/// The label of a pod that names its revision; a DaemonSet's revisions carry it as well.
pub(crate) const REVISION_LABEL: &str = "controller-revision-hash";
/// The label of a StatefulSet's revision with the hash of its data.
pub(crate) const HASH_LABEL: &str = "controller.kubernetes.io/hash";

/// A name of 253 bytes has room for this much before the hash.
const MAX_PREFIX: usize = 223;
/// Two collisions in a row do not happen by chance.
const MAX_COLLISIONS: usize = 32;
const CONFLICT_RETRIES: usize = 4;

#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    #[error("{0}")]
    Api(#[from] kube::Error),
    #[error("ControllerRevision {name} holds no pod template: {reason}")]
    NoTemplate { name: String, reason: String },
    #[error("admission changes the data of ControllerRevision {0}")]
    Changed(String),
    #[error("no free name for a new ControllerRevision of {0}")]
    NoName(String),
}

impl From<Error> for crate::Error {
    fn from(error: Error) -> Self {
        match error {
            Error::Api(error) => crate::Error::Api(error),
            other => crate::Error::Other(other.to_string()),
        }
    }
}

/// The data of the revision for a template: a strategic merge patch that replaces the template.
pub(crate) fn data_of(template: &PodTemplateSpec) -> Value {
    let mut template = json!(template);
    template["$patch"] = json!("replace");
    json!({"spec": {"template": template}})
}

/// The template that a revision puts back.
pub(crate) fn template_of(revision: &ControllerRevision) -> Result<PodTemplateSpec, Error> {
    let failed = |reason: String| Error::NoTemplate {
        name: revision.metadata.name.clone().unwrap_or_default(),
        reason,
    };
    let template = revision
        .data
        .as_ref()
        .and_then(|data| data.0.pointer("/spec/template"))
        .ok_or_else(|| failed("spec.template is missing".into()))?;
    let mut template = template.clone();
    if let Some(fields) = template.as_object_mut() {
        fields.remove("$patch");
    }
    serde_json::from_value(template).map_err(|error| failed(error.to_string()))
}

pub(crate) fn has_data(revision: &ControllerRevision, data: &Value) -> bool {
    revision.data.as_ref().is_some_and(|present| present.0 == *data)
}

/// True if putting the revision back gives the template of `data`, however it was written down. Revisions of
/// older versions spell out `creationTimestamp: null`, for one.
pub(crate) fn means(revision: &ControllerRevision, data: &Value) -> bool {
    has_data(revision, data) || template_of(revision).is_ok_and(|template| data_of(&template) == *data)
}

/// The hash in a revision's name: upstream's over upstream's text, so that both give one template one name. A
/// collision with another revision raises `collision_count` and so gives another hash.
pub(crate) fn hash(data: &Value, collision_count: i32) -> String {
    // Go's encoder writes these characters of strings as escapes. Keys are sorted by both.
    let mut text = data
        .to_string()
        .replace('<', "\\u003c")
        .replace('>', "\\u003e")
        .replace('&', "\\u0026")
        .replace('\u{2028}', "\\u2028")
        .replace('\u{2029}', "\\u2029");
    text.push_str(&collision_count.to_string());
    safe_encode(&fnv_1(text.as_bytes()).to_string())
}

/// FNV-1 of 32 bits. ReplicaSets are named by FNV-1a instead.
fn fnv_1(bytes: &[u8]) -> u32 {
    bytes.iter().fold(0x811c_9dc5, |hash: u32, byte| {
        hash.wrapping_mul(0x0100_0193) ^ u32::from(*byte)
    })
}

/// Names of objects are ASCII, so that any byte may be the last.
pub(crate) fn name(parent: &str, hash: &str) -> String {
    format!("{}-{hash}", parent.get(..MAX_PREFIX).unwrap_or(parent))
}

/// Oldest first.
pub(crate) fn sort(revisions: &mut [Arc<ControllerRevision>]) {
    revisions.sort_by(|left, right| {
        let created = |one: &ControllerRevision| one.metadata.creation_timestamp.as_ref().map(|time| time.0);
        left.revision
            .cmp(&right.revision)
            .then_with(|| created(left).cmp(&created(right)))
            .then_with(|| left.metadata.name.cmp(&right.metadata.name))
    });
}

/// The number after all of `revisions`.
pub(crate) fn next_number<'a>(revisions: impl IntoIterator<Item = &'a Arc<ControllerRevision>>) -> i64 {
    let highest = revisions.into_iter().map(|revision| revision.revision).max();
    highest.unwrap_or(0).max(0) + 1
}

/// Which of a set's revisions its template is.
#[derive(Debug, PartialEq)]
pub(crate) enum Current {
    Latest(Arc<ControllerRevision>),
    /// The set was rolled back to this one, which gets a new number.
    Older(Arc<ControllerRevision>),
    /// A template that the set never had.
    New,
}

/// `revisions` are sorted.
pub(crate) fn current(revisions: &[Arc<ControllerRevision>], data: &Value) -> Current {
    let Some(latest) = revisions.last() else {
        return Current::New;
    };
    if has_data(latest, data) {
        return Current::Latest(latest.clone());
    }
    match revisions.iter().rev().find(|revision| has_data(revision, data)) {
        Some(older) => Current::Older(older.clone()),
        None if means(latest, data) => Current::Latest(latest.clone()),
        None => Current::New,
    }
}

/// The oldest revisions, at most `count`, that are not in use.
pub(crate) fn oldest_unused(
    sorted: &[Arc<ControllerRevision>],
    in_use: impl Fn(&ControllerRevision) -> bool,
    count: usize,
) -> Vec<&Arc<ControllerRevision>> {
    let unused = sorted.iter().filter(|revision| !in_use(revision));
    unused.take(count).collect()
}

/// Creates the revision that `build` makes for a hash. A name that another revision has raises `collision_count`;
/// one that exists already with this data is answered.
pub(crate) async fn create(
    api: &Api<ControllerRevision>,
    data: &Value,
    collision_count: &mut i32,
    build: impl Fn(&str) -> ControllerRevision,
) -> Result<ControllerRevision, Error> {
    let mut wanted = String::new();
    for _ in 0..MAX_COLLISIONS {
        let revision = build(&hash(data, *collision_count));
        wanted = revision.metadata.name.clone().unwrap_or_default();
        match api.create(&PostParams::default(), &revision).await {
            Err(error) if error.is_already_exists() => {}
            Ok(created) if !means(&created, data) => {
                // It would never be found again, and another one made at each look.
                delete(api, &created).await?;
                return Err(Error::Changed(wanted));
            }
            created => return Ok(created?),
        }
        let present = api.get(&wanted).await?;
        if means(&present, data) {
            return Ok(present);
        }
        *collision_count = collision_count.saturating_add(1);
    }
    Err(Error::NoName(wanted))
}

/// Gives a revision another number.
pub(crate) async fn renumber(
    api: &Api<ControllerRevision>,
    revision: &ControllerRevision,
    number: i64,
) -> Result<ControllerRevision, Error> {
    let mut revision = revision.clone();
    let name = revision.metadata.name.clone().unwrap_or_default();
    let mut retries = CONFLICT_RETRIES;
    loop {
        if revision.revision == number {
            return Ok(revision);
        }
        revision.revision = number;
        match api.replace(&name, &PostParams::default(), &revision).await {
            Err(error) if error.is_conflict() && retries > 0 => {
                retries -= 1;
                revision = api.get(&name).await?;
            }
            replaced => return Ok(replaced?),
        }
    }
}

pub(crate) async fn delete(
    api: &Api<ControllerRevision>,
    revision: &ControllerRevision,
) -> Result<(), kube::Error> {
    let name = revision.metadata.name.as_deref().unwrap_or_default();
    match api.delete(name, &DeleteParams::default()).await {
        Err(error) if !error.is_not_found() => Err(error),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn template(image: &str) -> PodTemplateSpec {
        serde_json::from_value(json!({"metadata": {"labels": {"app": "web"}},
            "spec": {"containers": [{"name": "c", "image": image}]}}))
        .unwrap()
    }

    fn revision(number: i64, data: Value) -> Arc<ControllerRevision> {
        let revision =
            json!({"metadata": {"name": format!("web-{number}")}, "revision": number, "data": data});
        Arc::new(serde_json::from_value(revision).unwrap())
    }

    #[test]
    fn a_template_survives_its_revision() {
        let data = data_of(&template("i"));
        assert_eq!(data["spec"]["template"]["$patch"], "replace");
        assert_eq!(template_of(&revision(1, data)).unwrap(), template("i"));
        for bad in [Value::Null, json!({}), json!({"spec": {"template": {"spec": 7}}})] {
            assert!(template_of(&revision(1, bad.clone())).is_err(), "{bad}");
        }
    }

    #[test]
    fn hashes_are_fnv_1_of_the_text_and_the_count() {
        // The published vectors.
        assert_eq!(fnv_1(b""), 0x811c_9dc5);
        assert_eq!(fnv_1(b"a"), 0x050c_5d7e);
        assert_eq!(fnv_1(b"foobar"), 0x31f0_b262);
        let check = |data: Value, count: i32, text: &str| {
            assert_eq!(
                hash(&data, count),
                safe_encode(&fnv_1(text.as_bytes()).to_string())
            );
        };
        check(json!({"b": 2, "$a": 1}), 0, r#"{"$a":1,"b":2}0"#);
        check(json!({"a": 1}), 12, r#"{"a":1}12"#);
        check(json!({"a": "<&>"}), 0, r#"{"a":"\u003c\u0026\u003e"}0"#);
    }

    #[test]
    fn long_names_are_cut() {
        assert_eq!(name("web", "abc"), "web-abc");
        assert_eq!(name(&"x".repeat(253), "abc").len(), 227);
    }

    #[test]
    fn the_current_revision() {
        let (one, two) = (data_of(&template("1")), data_of(&template("2")));
        let check = |revisions: &[Arc<ControllerRevision>], data: &Value, expected: Current| {
            assert_eq!(current(revisions, data), expected);
        };
        check(&[], &one, Current::New);
        let all = [revision(1, one.clone()), revision(2, two.clone())];
        check(&all, &two, Current::Latest(all[1].clone()));
        check(&all, &one, Current::Older(all[0].clone()));
        check(&all, &data_of(&template("3")), Current::New);
        // An older version wrote a null where this one writes nothing.
        let mut old_text = one.clone();
        old_text["spec"]["template"]["metadata"]["creationTimestamp"] = Value::Null;
        let old = [revision(1, old_text)];
        check(&old, &one, Current::Latest(old[0].clone()));
        assert_eq!(next_number(&all), 3);
        assert_eq!(next_number(&[]), 1);
    }

    #[test]
    fn revisions_in_use_stay() {
        let all: Vec<_> = (1..=5).map(|number| revision(number, Value::Null)).collect();
        let unused = oldest_unused(&all, |revision| revision.revision == 2, 2);
        let numbers: Vec<i64> = unused.iter().map(|revision| revision.revision).collect();
        assert_eq!(numbers, [1, 3]);
    }
}
