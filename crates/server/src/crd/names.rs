//! Names of definitions: which are free, which conditions follow from that, and the order of versions.

use std::cmp::Ordering;

use serde_json::{Value, json};
use skiff_registry::object;

/// Versions as Kubernetes ranks them: `v2` over `v1` over `v1beta1` over `v1alpha1` over all other words.
pub fn version_order(a: &str, b: &str) -> Ordering {
    match (rank(a), rank(b)) {
        (Some(a), Some(b)) => a.cmp(&b),
        (Some(_), None) => Ordering::Greater,
        (None, Some(_)) => Ordering::Less,
        (None, None) => b.cmp(a),
    }
}

fn rank(version: &str) -> Option<(u8, u64, u64)> {
    let rest = version.strip_prefix('v')?;
    let digits = |text: &str| {
        (!text.is_empty() && text.bytes().all(|b| b.is_ascii_digit())).then(|| text.parse().ok())?
    };
    for (word, stability) in [("alpha", 0), ("beta", 1)] {
        if let Some((major, minor)) = rest.split_once(word) {
            return Some((stability, digits(major)?, digits(minor)?));
        }
    }
    Some((2, digits(rest)?, 0))
}

pub fn find<'a>(definition: &'a Value, kind: &str) -> Option<&'a Value> {
    object::at(definition, &["status", "conditions"])?
        .as_array()?
        .iter()
        .find(|condition| condition["type"] == kind)
}

/// Sets a condition; the time moves only when the status does.
pub fn set(definition: &mut Value, kind: &str, status: &str, reason: &str, message: &str, now: &str) {
    let mut condition = json!({"type": kind, "status": status, "lastTransitionTime": now,
        "reason": reason, "message": message});
    let mut all = object::at(definition, &["status", "conditions"])
        .and_then(Value::as_array)
        .cloned()
        .unwrap_or_default();
    match all.iter_mut().find(|known| known["type"] == kind) {
        None => all.push(condition),
        Some(known) => {
            if known["status"] == status
                && let Some(since) = known.get("lastTransitionTime")
            {
                condition["lastTransitionTime"] = since.clone();
            }
            *known = condition;
        }
    }
    object::put(definition, &["status", "conditions"], Value::Array(all));
}

/// Names that other definitions of the group hold.
#[derive(Debug, Default)]
pub struct Taken {
    /// Plural, singular and short names.
    pub resources: Vec<String>,
    /// Kinds and list kinds.
    pub kinds: Vec<String>,
}

/// Settles the names of a definition: accepts what is free, and says in a condition what is not.
/// Returns whether all names are accepted.
pub fn settle(definition: &mut Value, taken: &Taken, now: &str) -> bool {
    let wanted = object::at(definition, &["spec", "names"])
        .cloned()
        .unwrap_or_default();
    let mut accepted = object::at(definition, &["status", "acceptedNames"])
        .cloned()
        .unwrap_or_else(|| json!({"plural": "", "kind": ""}));
    let conflict = |name: &str, taken: &[String]| taken.iter().any(|known| known == name);
    // The last complaint is the one that is told.
    let mut complaint: Option<(&str, String)> = None;
    for (field, list) in [("plural", &taken.resources), ("singular", &taken.resources)] {
        let name = object::at_str(&wanted, &[field]).to_owned();
        if conflict(&name, list) {
            let reason = if field == "plural" {
                "PluralConflict"
            } else {
                "SingularConflict"
            };
            complaint = Some((
                reason,
                format!("{} is already in use", skiff_meta::field::quote(&name)),
            ));
        } else {
            accepted[field] = json!(name);
        }
    }
    let short: Vec<String> = object::at(&wanted, &["shortNames"])
        .and_then(Value::as_array)
        .into_iter()
        .flatten()
        .filter_map(|name| name.as_str().map(str::to_owned))
        .collect();
    let in_use: Vec<String> = short
        .iter()
        .filter(|name| conflict(name, &taken.resources))
        .map(|name| format!("{} is already in use", skiff_meta::field::quote(name)))
        .collect();
    if in_use.is_empty() {
        put_list(&mut accepted, "shortNames", &short);
    } else {
        let text = match in_use.as_slice() {
            [one] => one.clone(),
            many => format!("[{}]", many.join(", ")),
        };
        complaint = Some(("ShortNamesConflict", text));
    }
    for (field, reason) in [("kind", "KindConflict"), ("listKind", "ListKindConflict")] {
        let name = object::at_str(&wanted, &[field]).to_owned();
        if conflict(&name, &taken.kinds) {
            complaint = Some((
                reason,
                format!("{} is already in use", skiff_meta::field::quote(&name)),
            ));
        } else {
            accepted[field] = json!(name);
        }
    }
    let categories: Vec<String> = object::at(&wanted, &["categories"])
        .and_then(Value::as_array)
        .into_iter()
        .flatten()
        .filter_map(|name| name.as_str().map(str::to_owned))
        .collect();
    put_list(&mut accepted, "categories", &categories);
    object::put(definition, &["status", "acceptedNames"], accepted);
    match complaint {
        Some((reason, message)) => {
            set(definition, "NamesAccepted", "False", reason, &message, now);
            if find(definition, "Established").is_none() {
                set(
                    definition,
                    "Established",
                    "False",
                    "NotAccepted",
                    "not all names are accepted",
                    now,
                );
            }
            false
        }
        None => {
            set(
                definition,
                "NamesAccepted",
                "True",
                "NoConflicts",
                "no conflicts found",
                now,
            );
            true
        }
    }
}

fn put_list(accepted: &mut Value, field: &str, names: &[String]) {
    if let Some(map) = accepted.as_object_mut() {
        if names.is_empty() {
            map.remove(field);
        } else {
            map.insert(field.to_owned(), json!(names));
        }
    }
}

/// The condition of definitions in groups that belong to Kubernetes.
pub fn approval(definition: &mut Value, now: &str) {
    let group = object::at_str(definition, &["spec", "group"]).to_owned();
    if !(group == "k8s.io"
        || group == "kubernetes.io"
        || group.ends_with(".k8s.io")
        || group.ends_with(".kubernetes.io"))
    {
        return;
    }
    const KIND: &str = "KubernetesAPIApprovalPolicyConformant";
    const ANNOTATION: &str = "api-approved.kubernetes.io";
    let value = object::at_str(definition, &["metadata", "annotations", ANNOTATION]).to_owned();
    let (status, reason, message) = if value.is_empty() {
        ("False", "MissingAnnotation", "protected groups must have approval annotation \"api-approved.kubernetes.io\", see https://github.com/kubernetes/enhancements/pull/1111".to_owned())
    } else if value.starts_with("unapproved") {
        (
            "False",
            "UnapprovedAPI",
            format!("not approved: {}", skiff_meta::field::quote(&value)),
        )
    } else if value.starts_with("https://") || value.starts_with("http://") {
        ("True", "ApprovedAnnotation", format!("approved in {value}"))
    } else {
        ("False", "InvalidAnnotation", "protected groups must have approval annotation \"api-approved.kubernetes.io\" with either a URL or a reason starting with \"unapproved\", see https://github.com/kubernetes/enhancements/pull/1111".to_owned())
    };
    set(definition, KIND, status, reason, &message, now);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_ranked() {
        let mut versions = ["v1", "foo", "v2alpha1", "v10", "v2", "v1beta2", "bar", "v1beta10"];
        versions.sort_by(|a, b| version_order(b, a));
        assert_eq!(
            versions,
            ["v10", "v2", "v1", "v1beta10", "v1beta2", "v2alpha1", "bar", "foo"]
        );
    }

    #[test]
    fn names_that_are_free_are_accepted() {
        let mut definition = json!({"metadata": {"generation": 1}, "spec": {"names": {"plural": "foos", "singular": "foo", "kind": "Foo",
            "listKind": "FooList", "shortNames": ["f"]}}});
        assert!(settle(&mut definition, &Taken::default(), "t"));
        assert_eq!(
            definition["status"],
            json!({"acceptedNames": {"plural": "foos", "singular": "foo", "kind": "Foo", "listKind": "FooList", "shortNames": ["f"]},
                "conditions": [{"type": "NamesAccepted", "status": "True", "lastTransitionTime": "t", "reason": "NoConflicts",
                    "message": "no conflicts found"}]})
        );
        let taken = Taken {
            resources: vec!["f".into(), "foo".into()],
            kinds: vec![],
        };
        let mut other = json!({"spec": definition["spec"]});
        assert!(!settle(&mut other, &taken, "t"));
        assert_eq!(other["status"]["conditions"][0]["reason"], "ShortNamesConflict");
        assert_eq!(other["status"]["conditions"][1]["reason"], "NotAccepted");
        assert_eq!(
            other["status"]["acceptedNames"],
            json!({"plural": "foos", "kind": "Foo", "listKind": "FooList"})
        );
    }
}
