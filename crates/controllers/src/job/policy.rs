//! The policies of a Job's spec: what a pod's failure means, and when enough indexes have succeeded. No I/O.

use k8s_openapi::api::batch::v1::{
    Job, PodFailurePolicyOnExitCodesRequirement, PodFailurePolicyOnPodConditionsPattern, SuccessPolicy,
};
use k8s_openapi::api::core::v1::{ContainerStatus, Pod, PodStatus};

use super::indexes::Indexes;

/// What the pod failure policy says of a failed pod.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// No rule matched, or one with the action Count.
    Count,
    Ignore,
    FailIndex,
    /// With the message of the condition.
    FailJob(String),
}

pub(crate) fn verdict(job: &Job, pod: &Pod) -> Verdict {
    match matching_rule(job, pod) {
        Some(("Ignore", _)) => Verdict::Ignore,
        Some(("FailIndex", _)) => Verdict::FailIndex,
        Some(("FailJob", message)) => Verdict::FailJob(message),
        _ => Verdict::Count,
    }
}

/// The action of the rule that the pod's failure matches.
pub(crate) fn action(job: &Job, pod: &Pod) -> Option<String> {
    matching_rule(job, pod).map(|(action, _)| action.to_owned())
}

/// The first rule that matches decides: its action, and what it matched.
fn matching_rule<'a>(job: &'a Job, pod: &Pod) -> Option<(&'a str, String)> {
    let policy = job.spec.as_ref()?.pod_failure_policy.as_ref()?;
    let status = pod.status.as_ref()?;
    let name = || {
        let namespace = pod.metadata.namespace.as_deref().unwrap_or_default();
        format!("{namespace}/{}", pod.metadata.name.as_deref().unwrap_or_default())
    };
    for (index, rule) in policy.rules.iter().enumerate() {
        let action = rule.action.as_str();
        let matched = if let Some(requirement) = &rule.on_exit_codes {
            matching_container(status, requirement).map(|(container, code)| {
                let pod = name();
                format!("Container {container} for pod {pod} failed with exit code {code} matching {action} rule at index {index}")
            })
        } else {
            let patterns = rule.on_pod_conditions.as_deref().unwrap_or_default();
            matching_condition(status, patterns).map(|condition| {
                format!(
                    "Pod {} has condition {condition} matching {action} rule at index {index}",
                    name()
                )
            })
        };
        // The API server refuses other actions.
        if let Some(message) = matched
            && ["Ignore", "FailIndex", "Count", "FailJob"].contains(&action)
        {
            return Some((action, message));
        }
    }
    None
}

/// The name and the exit code of a container that ended as the rule says. Success matches no rule.
fn matching_container<'a>(
    status: &'a PodStatus,
    requirement: &PodFailurePolicyOnExitCodesRequirement,
) -> Option<(&'a str, i32)> {
    let lists = [&status.container_statuses, &status.init_container_statuses];
    lists
        .into_iter()
        .flatten()
        .flatten()
        .find_map(|container: &ContainerStatus| {
            let code = container.state.as_ref()?.terminated.as_ref()?.exit_code;
            let named = requirement
                .container_name
                .as_ref()
                .is_none_or(|name| *name == container.name);
            let listed = requirement.values.contains(&code);
            let matches = match requirement.operator.as_str() {
                "In" => listed,
                "NotIn" => !listed,
                _ => false,
            };
            (named && code != 0 && matches).then_some((container.name.as_str(), code))
        })
}

fn matching_condition<'a>(
    status: &'a PodStatus,
    patterns: &[PodFailurePolicyOnPodConditionsPattern],
) -> Option<&'a str> {
    let mut conditions = status.conditions.iter().flatten();
    let found = conditions.find(|condition| {
        patterns.iter().any(|pattern| {
            pattern.type_ == condition.type_
                && pattern.status.as_deref().unwrap_or("True") == condition.status
        })
    })?;
    Some(&found.type_)
}

/// The message of the SuccessCriteriaMet condition if a rule is met.
pub(crate) fn success(
    policy: Option<&SuccessPolicy>,
    completions: i32,
    succeeded: &Indexes,
) -> Option<String> {
    if succeeded.is_empty() {
        return None;
    }
    let met = policy?
        .rules
        .iter()
        .position(|rule| match &rule.succeeded_indexes {
            Some(required) => {
                let required = Indexes::parse(required, completions);
                let both = required.overlap(succeeded);
                !required.is_empty()
                    && (both == required.total() || rule.succeeded_count.is_some_and(|count| both >= count))
            }
            None => rule
                .succeeded_count
                .is_some_and(|count| succeeded.total() >= count),
        })?;
    Some(format!("Matched rules at index {met}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    #[test]
    fn pod_failures() {
        let check = |rules: Value, status: Value, expected: Verdict| {
            let job: Job = serde_json::from_value(json!({"spec": {"template": {},
                "podFailurePolicy": {"rules": rules}}}))
            .unwrap();
            let pod: Pod = serde_json::from_value(
                json!({"metadata": {"namespace": "ns", "name": "p"}, "status": status}),
            )
            .unwrap();
            assert_eq!(verdict(&job, &pod), expected, "{rules} {status}");
        };
        let exits = |operator: &str, values: &[i32], container: Value, action: &str| {
            json!([{"action": action, "onExitCodes":
                {"operator": operator, "values": values, "containerName": container}}])
        };
        let ended = |code: i32| {
            json!({"containerStatuses": [
                {"name": "other", "image": "", "imageID": "", "ready": false, "restartCount": 0, "state": {"running": {}}},
                {"name": "main", "image": "", "imageID": "", "ready": false, "restartCount": 0,
                    "state": {"terminated": {"exitCode": code}}}]})
        };
        let message = "Container main for pod ns/p failed with exit code 3 matching FailJob rule at index 0";
        let fail = Verdict::FailJob(message.to_owned());
        check(
            exits("In", &[2, 3], Value::Null, "FailJob"),
            ended(3),
            fail.clone(),
        );
        check(exits("In", &[2, 3], json!("main"), "FailJob"), ended(3), fail);
        check(
            exits("In", &[2, 3], json!("other"), "FailJob"),
            ended(3),
            Verdict::Count,
        );
        check(
            exits("In", &[2], Value::Null, "FailJob"),
            ended(3),
            Verdict::Count,
        );
        check(
            exits("NotIn", &[2], Value::Null, "Ignore"),
            ended(3),
            Verdict::Ignore,
        );
        check(
            exits("NotIn", &[3], Value::Null, "Ignore"),
            ended(3),
            Verdict::Count,
        );
        // A container that succeeded matches nothing.
        check(
            exits("NotIn", &[3], Value::Null, "Ignore"),
            ended(0),
            Verdict::Count,
        );
        check(
            exits("In", &[3], Value::Null, "FailIndex"),
            ended(3),
            Verdict::FailIndex,
        );
        let disrupted = json!({"conditions": [{"type": "DisruptionTarget", "status": "True"}]});
        let on_condition = |action: &str, status: Value| json!([{"action": action, "onPodConditions": [{"type": "DisruptionTarget", "status": status}]}]);
        check(
            on_condition("Ignore", json!("True")),
            disrupted.clone(),
            Verdict::Ignore,
        );
        check(
            on_condition("Ignore", Value::Null),
            disrupted.clone(),
            Verdict::Ignore,
        );
        check(
            on_condition("Ignore", json!("False")),
            disrupted.clone(),
            Verdict::Count,
        );
        let message = "Pod ns/p has condition DisruptionTarget matching FailJob rule at index 0";
        check(
            on_condition("FailJob", json!("True")),
            disrupted.clone(),
            Verdict::FailJob(message.to_owned()),
        );
        // The first match decides, whatever follows.
        let mut rules = on_condition("Count", json!("True"));
        rules
            .as_array_mut()
            .unwrap()
            .extend(on_condition("Ignore", json!("True")).as_array().unwrap().clone());
        check(rules, disrupted, Verdict::Count);
    }

    #[test]
    fn successes() {
        let check = |rules: Value, succeeded: &str, expected: Option<&str>| {
            let policy: SuccessPolicy = serde_json::from_value(json!({"rules": rules})).unwrap();
            let got = success(Some(&policy), 10, &Indexes::parse(succeeded, 10));
            assert_eq!(got.as_deref(), expected, "{rules} {succeeded}");
        };
        check(json!([{"succeededCount": 2}]), "1", None);
        check(
            json!([{"succeededCount": 2}]),
            "1,5",
            Some("Matched rules at index 0"),
        );
        check(json!([{"succeededIndexes": "0-2"}]), "0,1,3-9", None);
        check(
            json!([{"succeededIndexes": "0-2"}]),
            "0-3",
            Some("Matched rules at index 0"),
        );
        check(
            json!([{"succeededIndexes": "0-2", "succeededCount": 1}]),
            "3-9",
            None,
        );
        let second = json!([{"succeededIndexes": "9"}, {"succeededIndexes": "0-2", "succeededCount": 2}]);
        check(second.clone(), "1,2", Some("Matched rules at index 1"));
        check(second, "", None);
    }
}
