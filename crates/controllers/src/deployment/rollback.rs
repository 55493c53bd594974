//! The deprecated way back to an older revision: an annotation of the Deployment names it. No I/O.

use k8s_openapi::api::apps::v1::{Deployment, ReplicaSet};

use super::revision::{self, HASH_LABEL, ROLLBACK_TO};

/// What a rollback comes to: the Deployment without the annotation, and an event about it.
#[derive(Debug, PartialEq)]
pub(super) struct Rollback {
    pub deployment: Deployment,
    pub is_warning: bool,
    pub reason: &'static str,
    pub message: String,
}

/// `None` if no rollback is asked for, or not by a number.
pub(super) fn plan(deployment: &Deployment, sets: &[ReplicaSet]) -> Option<Rollback> {
    let annotations = deployment.metadata.annotations.as_ref()?;
    let mut wanted: i64 = annotations.get(ROLLBACK_TO)?.parse().ok()?;
    let mut updated = deployment.clone();
    if let Some(annotations) = &mut updated.metadata.annotations {
        annotations.remove(ROLLBACK_TO);
    }
    let done = |deployment: Deployment, is_warning: bool, reason: &'static str, message: String| Rollback {
        deployment,
        is_warning,
        reason,
        message,
    };
    const NOT_FOUND: &str = "DeploymentRollbackRevisionNotFound";
    if wanted == 0 {
        let mut revisions: Vec<i64> = sets.iter().map(revision::revision_of).collect();
        revisions.sort_unstable();
        wanted = revisions.iter().rev().nth(1).copied().unwrap_or(0);
        if wanted == 0 {
            let message = "Unable to find last revision.".to_owned();
            return Some(done(updated, true, NOT_FOUND, message));
        }
    }
    let name = deployment.metadata.name.clone().unwrap_or_default();
    let set = sets.iter().find(|set| revision::revision_of(set) == wanted);
    let template = set.and_then(|set| set.spec.as_ref()?.template.clone());
    let (Some(set), Some(mut template), Some(spec)) = (set, template, &mut updated.spec) else {
        let message = "Unable to find the revision to rollback to.".to_owned();
        return Some(done(updated, true, NOT_FOUND, message));
    };
    if revision::same_template(&spec.template, &template) {
        let message =
            format!("The rollback revision contains the same template as current deployment \"{name}\"");
        return Some(done(
            updated,
            true,
            "DeploymentRollbackTemplateUnchanged",
            message,
        ));
    }
    if let Some(labels) = template.metadata.as_mut().and_then(|meta| meta.labels.as_mut()) {
        labels.remove(HASH_LABEL);
    }
    spec.template = template;
    // The annotations that came with the old template come back with it.
    let annotations = updated.metadata.annotations.get_or_insert_default();
    annotations.retain(|annotation, _| !revision::is_copied(annotation));
    let old = set.metadata.annotations.iter().flatten();
    let copied = old.filter(|(annotation, _)| revision::is_copied(annotation));
    annotations.extend(copied.map(|(annotation, value)| (annotation.clone(), value.clone())));
    let message = format!("Rolled back deployment \"{name}\" to revision {wanted}");
    Some(done(updated, false, "DeploymentRollback", message))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn an_annotation_brings_a_revision_back() {
        let template = |image: &str, hash: &str| json!({"metadata": {"labels": {"app": "a", HASH_LABEL: hash}}, "spec": {"containers": [{"name": "c", "image": image}]}});
        let set = |number: i64, image: &str| -> ReplicaSet {
            serde_json::from_value(
                json!({"metadata": {"annotations": {revision::REVISION: number.to_string(), "cause": image}},
                "spec": {"selector": {}, "template": template(image, "h")}}),
            )
            .unwrap()
        };
        let sets = [set(1, "v1"), set(3, "v3"), set(2, "v2")];
        let check = |to: &str, sets: &[ReplicaSet], expected: Option<(&str, &str, &str)>| {
            let deployment: Deployment = serde_json::from_value(json!({
                "metadata": {"name": "d", "annotations": {ROLLBACK_TO: to, "cause": "v3", revision::REVISION: "3"}},
                "spec": {"selector": {}, "template": {"metadata": {"labels": {"app": "a"}},
                    "spec": {"containers": [{"name": "c", "image": "v3"}]}}}}))
            .unwrap();
            let got = plan(&deployment, sets).map(|rollback| {
                let annotations = rollback.deployment.metadata.annotations.unwrap();
                assert!(!annotations.contains_key(ROLLBACK_TO));
                assert_eq!(annotations[revision::REVISION], "3");
                let template = rollback.deployment.spec.unwrap().template;
                assert!(
                    !template
                        .metadata
                        .unwrap()
                        .labels
                        .unwrap()
                        .contains_key(HASH_LABEL)
                );
                let image = template.spec.unwrap().containers[0].image.clone().unwrap();
                assert_eq!(annotations["cause"], image);
                (image, rollback.reason, rollback.message)
            });
            let expected =
                expected.map(|(image, reason, message)| (image.to_owned(), reason, message.to_owned()));
            assert_eq!(got, expected, "{to}");
        };
        check("", &sets, None);
        check("two", &sets, None);
        let to = |number: i64| format!("Rolled back deployment \"d\" to revision {number}");
        check("1", &sets, Some(("v1", "DeploymentRollback", &to(1))));
        check("0", &sets, Some(("v2", "DeploymentRollback", &to(2))));
        let not_found = "DeploymentRollbackRevisionNotFound";
        check(
            "7",
            &sets,
            Some(("v3", not_found, "Unable to find the revision to rollback to.")),
        );
        check(
            "0",
            &sets[1..2],
            Some(("v3", not_found, "Unable to find last revision.")),
        );
        let same = "The rollback revision contains the same template as current deployment \"d\"";
        check(
            "3",
            &sets,
            Some(("v3", "DeploymentRollbackTemplateUnchanged", same)),
        );
    }
}
