//! The pods that a Job makes. No I/O.

use k8s_openapi::api::batch::v1::{Job, JobSpec};
use k8s_openapi::api::core::v1::{Container, EnvVar, EnvVarSource, ObjectFieldSelector, Pod};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference;

use super::facts::{self, INDEX, INDEX_FAILURES, INDEX_IGNORED_FAILURES, TRACKING};
use super::policy::{self, Verdict};
use crate::replicas::new_pod;

const INDEX_VARIABLE: &str = "JOB_COMPLETION_INDEX";

/// The longest prefix to which the API server adds five characters.
const MAX_PREFIX: usize = 58;

/// A pod with this index, if any; `replaced` is the failed pod that had the index before.
pub(crate) fn job_pod(
    job: &Job,
    spec: &JobSpec,
    owner: &OwnerReference,
    index: Option<i32>,
    replaced: Option<&Pod>,
) -> Pod {
    let namespace = job.metadata.namespace.as_deref().unwrap_or_default();
    let mut pod = new_pod(&spec.template, owner, namespace);
    let finalizers = pod.metadata.finalizers.get_or_insert_default();
    if !finalizers.iter().any(|finalizer| finalizer == TRACKING) {
        finalizers.push(TRACKING.to_owned());
    }
    if let Some(index) = index {
        add_index(&mut pod, &owner.name, index);
        if spec.backoff_limit_per_index.is_some() {
            add_failures(&mut pod, job, replaced);
        }
    }
    pod
}

fn add_index(pod: &mut Pod, job: &str, index: i32) {
    let text = index.to_string();
    let metadata = &mut pod.metadata;
    metadata
        .annotations
        .get_or_insert_default()
        .insert(INDEX.to_owned(), text.clone());
    metadata
        .labels
        .get_or_insert_default()
        .insert(INDEX.to_owned(), text);
    metadata.generate_name = Some(prefix(job, index));
    let Some(spec) = &mut pod.spec else { return };
    spec.hostname = Some(format!("{job}-{index}"));
    let init = spec.init_containers.iter_mut().flatten();
    init.chain(&mut spec.containers).for_each(add_variable);
}

fn prefix(job: &str, index: i32) -> String {
    let suffix = format!("-{index}-");
    let room = job.floor_char_boundary(MAX_PREFIX.saturating_sub(suffix.len()));
    format!("{}{suffix}", &job[..room])
}

fn add_variable(container: &mut Container) {
    let variables = container.env.get_or_insert_default();
    if variables.iter().any(|variable| variable.name == INDEX_VARIABLE) {
        return;
    }
    let field = ObjectFieldSelector {
        field_path: format!("metadata.labels['{INDEX}']"),
        ..Default::default()
    };
    variables.push(EnvVar {
        name: INDEX_VARIABLE.to_owned(),
        value_from: Some(EnvVarSource {
            field_ref: Some(field),
            ..Default::default()
        }),
        ..Default::default()
    });
}

/// A replacement carries how often its index has failed so far.
fn add_failures(pod: &mut Pod, job: &Job, replaced: Option<&Pod>) {
    let (mut failures, mut ignored) = (0, 0);
    if let Some(replaced) = replaced {
        failures = facts::failures(replaced, INDEX_FAILURES);
        ignored = facts::failures(replaced, INDEX_IGNORED_FAILURES);
        if policy::verdict(job, replaced) == Verdict::Ignore {
            ignored = ignored.saturating_add(1);
        } else {
            failures = failures.saturating_add(1);
        }
    }
    let annotations = pod.metadata.annotations.get_or_insert_default();
    annotations.insert(INDEX_FAILURES.to_owned(), failures.to_string());
    if ignored > 0 {
        annotations.insert(INDEX_IGNORED_FAILURES.to_owned(), ignored.to_string());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ownership::controller_reference;
    use serde_json::{Value, json};

    #[test]
    fn an_indexed_pod() {
        let job: Job = serde_json::from_value(json!({"metadata": {"name": "work", "namespace": "ns", "uid": "u"},
            "spec": {"completionMode": "Indexed", "backoffLimitPerIndex": 2,
                "podFailurePolicy": {"rules": [{"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget"}]}]},
                "template": {"metadata": {"labels": {"app": "w"}}, "spec": {
                    "initContainers": [{"name": "i", "env": [{"name": "JOB_COMPLETION_INDEX", "value": "mine"}]}],
                    "containers": [{"name": "c"}]}}}}))
        .unwrap();
        let failed = |disrupted: bool| -> Pod {
            let conditions = if disrupted {
                json!([{"type": "DisruptionTarget", "status": "True"}])
            } else {
                json!([])
            };
            serde_json::from_value(json!({"metadata": {"annotations": {
                "batch.kubernetes.io/job-index-failure-count": "1",
                "batch.kubernetes.io/job-index-ignored-failure-count": "4"}}, "status": {"conditions": conditions}}))
            .unwrap()
        };
        let make = |replaced: Option<&Pod>| {
            let spec = job.spec.as_ref().unwrap();
            let pod = job_pod(&job, spec, &controller_reference(&job), Some(3), replaced);
            serde_json::to_value(pod).unwrap()
        };
        let pod = make(None);
        assert_eq!(pod["metadata"]["generateName"], "work-3-");
        assert_eq!(pod["metadata"]["finalizers"], json!([TRACKING]));
        assert_eq!(pod["metadata"]["labels"], json!({"app": "w", INDEX: "3"}));
        assert_eq!(pod["metadata"]["ownerReferences"][0]["uid"], "u");
        assert_eq!(pod["spec"]["hostname"], "work-3");
        assert_eq!(pod["spec"]["initContainers"][0]["env"][0]["value"], "mine");
        let variable = &pod["spec"]["containers"][0]["env"][0];
        assert_eq!(
            variable["valueFrom"]["fieldRef"]["fieldPath"],
            format!("metadata.labels['{INDEX}']")
        );
        let annotations = |pod: &Value| pod["metadata"]["annotations"].clone();
        assert_eq!(annotations(&pod), json!({INDEX: "3", INDEX_FAILURES: "0"}));
        let again = make(Some(&failed(false)));
        assert_eq!(
            annotations(&again),
            json!({INDEX: "3", INDEX_FAILURES: "2", INDEX_IGNORED_FAILURES: "4"})
        );
        let disrupted = make(Some(&failed(true)));
        assert_eq!(
            annotations(&disrupted),
            json!({INDEX: "3", INDEX_FAILURES: "1", INDEX_IGNORED_FAILURES: "5"})
        );
    }

    #[test]
    fn long_names_keep_their_index() {
        assert_eq!(prefix("j", 7), "j-7-");
        let long = prefix(&"x".repeat(63), 12345);
        assert_eq!((long.len(), long.ends_with("x-12345-")), (58, true));
    }
}
