//! What of a job's template may change after its creation, and what a client is told about a job spec.

use serde_json::Value;
use skiff_meta::names;

use crate::core::pod_warnings;
use crate::errors::Errors;
use crate::node::{Node, at, list, number, text};
use crate::walk;

const COMPLETIONS_SOFT_LIMIT: i64 = 100_000;
const PARALLELISM_SOFT_LIMIT: i64 = 10_000;

/// The template of a job may not change, but for where its pods run and what they get while the job is suspended.
pub fn template(spec: &Node, old: &Value, errors: &mut Errors) {
    let (template, mut before) = (spec.field("template"), at(old, "spec.template").clone());
    let started = !at(old, "status.startTime").is_null();
    let resting = list(old, "status.conditions")
        .iter()
        .any(|c| text(c, "type") == "Suspended" && text(c, "status") == "True");
    let mutable = at(old, "spec.suspend").as_bool() == Some(true)
        && (!started || resting)
        && number(old, "status.active") == 0;
    if !mutable {
        errors.immutable_as("core.PodTemplateSpec", &template, &before);
        return;
    }
    let pod = template.field("spec");
    let Some(before) = walk::object(&mut before, "spec") else {
        return;
    };
    node_affinity_from(before, pod.value);
    for name in ["nodeSelector", "tolerations", "schedulingGates"] {
        walk::copy(before, pod.value, name);
    }
    for name in ["containers", "initContainers"] {
        let now = list(pod.value, name);
        let Some(Value::Array(containers)) = before.get_mut(name) else {
            continue;
        };
        if containers.len() != now.len() {
            continue;
        }
        for (container, now) in containers.iter_mut().zip(now) {
            if text(container, "name") == text(now, "name") {
                walk::copy(container, now, "resources");
            }
        }
    }
    errors.immutable_as("core.PodSpec", &pod, before);
}

/// Gives a pod spec the node affinity of another, with the rest of its affinity as it is.
fn node_affinity_from(before: &mut Value, now: &Value) {
    const OTHERS: [&str; 2] = ["podAffinity", "podAntiAffinity"];
    let (wanted, had) = (at(now, "affinity"), at(before, "affinity"));
    if wanted.is_null() && OTHERS.iter().all(|name| at(had, name).is_null()) {
        walk::remove(before, "affinity");
    } else if let Some(affinity) = walk::object(before, "affinity") {
        walk::copy(affinity, wanted, "nodeAffinity");
    }
}

/// What a client is told about a job, or a cron job with its job spec at this path.
pub fn warnings(new: &Value, old: Option<&Value>, path: &str, template: &'static str) -> Vec<String> {
    let mut warnings = Vec::new();
    let complaints = names::dns1123_label(text(new, "metadata.name"));
    if old.is_none() && !complaints.is_empty() {
        warnings.push(format!(
            "metadata.name: this is used in Pod names and hostnames, which can result in surprising behavior; a DNS label is recommended: [{}]",
            complaints.join(" ")
        ));
    }
    let generation = |object: &Value| number(object, "metadata.generation");
    if old.is_some_and(|old| generation(old) == generation(new)) {
        return warnings;
    }
    let spec = at(new, path);
    if text(spec, "completionMode") == "Indexed"
        && number(spec, "completions") > COMPLETIONS_SOFT_LIMIT
        && number(spec, "parallelism") > PARALLELISM_SOFT_LIMIT
    {
        warnings.push(format!("{path}: In Indexed Jobs with a number of completions higher than 10^5 and a parallelism higher than 10^4, Kubernetes might not be able to track completedIndexes when a big number of indexes fail"));
    }
    warnings.extend(pod_warnings::template(new, old, template));
    warnings
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn job(spec: Value) -> Value {
        json!({
            "spec": {"suspend": true, "template": {"metadata": {"labels": {"a": "b"}}, "spec": spec}},
            "status": {},
        })
    }

    fn found(new: &Value, old: &Value) -> Vec<String> {
        let mut errors = Errors::new();
        template(&Node::root(new).field("spec"), old, &mut errors);
        let errors = errors.into_vec();
        errors
            .iter()
            .map(|error| format!("{}: {}", error.path, error.detail))
            .collect()
    }

    #[test]
    fn a_suspended_job_may_change_where_it_runs_and_what_it_gets() {
        let spec = json!({"containers": [{"name": "c", "image": "i"}],
            "affinity": {"nodeAffinity": {}, "podAffinity": {}}});
        let old = job(spec.clone());
        let check = |pointer: &str, value: Value, expected: &[&str]| {
            let mut spec = spec.clone();
            *spec.pointer_mut(pointer).expect("there") = value;
            assert_eq!(found(&job(spec), &old), expected, "{pointer}");
        };
        let refused: &[&str] = &["spec.template.spec: field is immutable"];
        check(
            "/containers/0",
            json!({"name": "c", "image": "i", "resources": {"limits": {"cpu": "1"}}}),
            &[],
        );
        check("/containers/0/image", json!("other"), refused);
        check("/affinity/nodeAffinity", Value::Null, &[]);
        check("/affinity/podAffinity", Value::Null, refused);
        check("/affinity", Value::Null, refused);
        let mut labelled = old.clone();
        labelled["spec"]["template"]["metadata"]["labels"] = json!({"c": "d"});
        assert!(found(&labelled, &old).is_empty());
        let mut running = old.clone();
        running["status"]["active"] = json!(1);
        assert_eq!(found(&labelled, &running), ["spec.template: field is immutable"]);
    }

    #[test]
    fn large_indexed_jobs_are_warned_of() {
        let job = json!({"metadata": {"name": "a.b"}, "spec": {"completionMode": "Indexed", "completions": 100_001,
            "parallelism": 10_001, "template": {"spec": {"containers": []}}}});
        let found = warnings(&job, None, "spec", "spec.template");
        assert_eq!(found.len(), 2, "{found:?}");
        assert!(warnings(&job, Some(&job), "spec", "spec.template").is_empty());
    }
}
