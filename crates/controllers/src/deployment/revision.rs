//! Names, hashes, revisions and annotations of a Deployment's ReplicaSets. No I/O.

use k8s_openapi::api::apps::v1::{Deployment, ReplicaSet};
use k8s_openapi::api::core::v1::PodTemplateSpec;

pub(super) const HASH_LABEL: &str = "pod-template-hash";
pub(super) const REVISION: &str = "deployment.kubernetes.io/revision";
pub(super) const REVISION_HISTORY: &str = "deployment.kubernetes.io/revision-history";
pub(super) const DESIRED_REPLICAS: &str = "deployment.kubernetes.io/desired-replicas";
pub(super) const MAX_REPLICAS: &str = "deployment.kubernetes.io/max-replicas";

pub(super) const ROLLBACK_TO: &str = "deprecated.deployment.rollback.to";

/// Annotations of a Deployment that its ReplicaSets do not inherit.
const NOT_COPIED: &[&str] = &[
    "kubectl.kubernetes.io/last-applied-configuration",
    REVISION,
    REVISION_HISTORY,
    DESIRED_REPLICAS,
    MAX_REPLICAS,
    ROLLBACK_TO,
];

pub(super) fn is_copied(annotation: &str) -> bool {
    !NOT_COPIED.contains(&annotation)
}

/// The history of revisions must not fill up the annotations.
const MAX_HISTORY_LENGTH: usize = 2000;

/// The hash in a ReplicaSet's name. A collision with a foreign ReplicaSet raises `collision_count` and so
/// gives another hash.
pub(super) fn template_hash(template: &PodTemplateSpec, collision_count: Option<i32>) -> String {
    let mut hash: u32 = 0x811c_9dc5;
    let mut add = |bytes: &[u8]| {
        for byte in bytes {
            hash = (hash ^ u32::from(*byte)).wrapping_mul(0x0100_0193);
        }
    };
    // Maps of typed objects are sorted, so equal templates have equal texts.
    add(serde_json::to_string(template).unwrap_or_default().as_bytes());
    if let Some(count) = collision_count {
        add(&count.to_le_bytes());
    }
    safe_encode(&hash.to_string())
}

/// Letters without vowels and digits without lookalikes: no hash spells a word.
pub(crate) fn safe_encode(text: &str) -> String {
    const ALPHABET: &[u8] = b"bcdfghjklmnpqrstvwxz2456789";
    text.bytes()
        .map(|byte| char::from(ALPHABET[usize::from(byte) % ALPHABET.len()]))
        .collect()
}

/// True if a ReplicaSet was made for this template, whatever its hash.
pub(super) fn same_template(left: &PodTemplateSpec, right: &PodTemplateSpec) -> bool {
    let normal = |template: &PodTemplateSpec| {
        let mut template = template.clone();
        let meta = template.metadata.get_or_insert_default();
        if let Some(labels) = &mut meta.labels {
            labels.remove(HASH_LABEL);
            if labels.is_empty() {
                meta.labels = None;
            }
        }
        if meta
            .annotations
            .as_ref()
            .is_some_and(|annotations| annotations.is_empty())
        {
            meta.annotations = None;
        }
        meta.creation_timestamp = None;
        template
    };
    normal(left) == normal(right)
}

pub(super) fn annotation<'a>(set: &'a ReplicaSet, key: &str) -> Option<&'a str> {
    set.metadata.annotations.as_ref()?.get(key).map(String::as_str)
}

pub(super) fn annotation_number(set: &ReplicaSet, key: &str) -> Option<i32> {
    annotation(set, key)?.parse().ok()
}

pub(super) fn revision_of(set: &ReplicaSet) -> i64 {
    annotation(set, REVISION)
        .and_then(|text| text.parse().ok())
        .unwrap_or(0)
}

pub(super) fn max_revision<'a>(sets: impl IntoIterator<Item = &'a ReplicaSet>) -> i64 {
    sets.into_iter().map(revision_of).max().unwrap_or(0)
}

/// Gives the newest ReplicaSet its revision and the Deployment's annotations; true if anything changed.
pub(super) fn annotate_new(deployment: &Deployment, set: &mut ReplicaSet, revision: i64) -> bool {
    let mut changed = false;
    let annotations = set.metadata.annotations.get_or_insert_default();
    for (key, value) in deployment.metadata.annotations.iter().flatten() {
        if is_copied(key) && annotations.get(key) != Some(value) {
            annotations.insert(key.clone(), value.clone());
            changed = true;
        }
    }
    let before = annotations.get(REVISION).cloned();
    let old_number: i64 = before.as_deref().and_then(|text| text.parse().ok()).unwrap_or(0);
    // Older sets may have been cleaned up since; a revision never goes back.
    if old_number < revision {
        annotations.insert(REVISION.into(), revision.to_string());
        changed = true;
        // A set that had a revision and gets a new one is being rolled back to: remember the old one.
        if let Some(before) = before {
            let history = annotations.get(REVISION_HISTORY).cloned().unwrap_or_default();
            let mut all: Vec<&str> = history.split(',').filter(|one| !one.is_empty()).collect();
            all.push(&before);
            while all.len() > 1 && all.iter().map(|one| one.len() + 1).sum::<usize>() > MAX_HISTORY_LENGTH {
                all.remove(0);
            }
            let joined = all.join(",");
            annotations.insert(REVISION_HISTORY.into(), joined);
        }
    }
    changed
}

/// Records what the Deployment wants in total, for later proportional scaling; true if anything changed.
pub(super) fn annotate_replicas(set: &mut ReplicaSet, desired: i32, max: i32) -> bool {
    let annotations = set.metadata.annotations.get_or_insert_default();
    let mut changed = false;
    for (key, value) in [(DESIRED_REPLICAS, desired), (MAX_REPLICAS, max)] {
        let value = value.to_string();
        if annotations.get(key) != Some(&value) {
            annotations.insert(key.into(), value);
            changed = true;
        }
    }
    changed
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn template(image: &str) -> PodTemplateSpec {
        serde_json::from_value(json!({"metadata": {"labels": {"app": "web"}},
            "spec": {"containers": [{"name": "c", "image": image}]}}))
        .unwrap()
    }

    #[test]
    fn hashes_differ_by_template_and_by_collision() {
        let one = template_hash(&template("a"), None);
        assert_eq!(one, template_hash(&template("a"), None));
        assert_ne!(one, template_hash(&template("b"), None));
        assert_ne!(one, template_hash(&template("a"), Some(1)));
        assert!(
            one.bytes()
                .all(|byte| b"bcdfghjklmnpqrstvwxz2456789".contains(&byte))
        );
        let mut labelled = template("a");
        labelled
            .metadata
            .get_or_insert_default()
            .labels
            .get_or_insert_default()
            .insert(HASH_LABEL.into(), one);
        assert!(same_template(&template("a"), &labelled));
        assert!(!same_template(&template("b"), &labelled));
    }

    #[test]
    fn a_rollback_keeps_the_old_revision_in_the_history() {
        let deployment: Deployment = serde_json::from_value(json!({"metadata": {"annotations": {
            "note": "x", "kubectl.kubernetes.io/last-applied-configuration": "{}", REVISION: "9"}}}))
        .unwrap();
        let mut set = ReplicaSet::default();
        assert!(annotate_new(&deployment, &mut set, 1));
        assert!(!annotate_new(&deployment, &mut set, 1));
        assert!(annotate_new(&deployment, &mut set, 3));
        assert!(annotate_new(&deployment, &mut set, 5));
        let annotations = set.metadata.annotations.unwrap();
        let expected = [(REVISION, "5"), (REVISION_HISTORY, "1,3"), ("note", "x")];
        assert_eq!(
            annotations,
            expected.map(|(k, v)| (k.to_owned(), v.to_owned())).into()
        );
    }
}
