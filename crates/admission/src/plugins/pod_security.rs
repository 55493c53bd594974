//! PodSecurity: the labels of a namespace say which of the Pod Security Standards its pods are held to. Pods are refused;
//! what makes pods is only warned about. See [`crate::pod_security`] for the rules themselves.

use std::collections::{BTreeMap, HashSet};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use serde_json::Value;
use skiff_api::node::{at, list, text};
use skiff_meta::{GroupKind, Status};

use crate::pod_security::{
    Configuration, LABEL_PREFIX, Level, LevelVersion, Pod, Policy, details, reasons, violations,
};
use crate::{Attributes, Lister, Operation, Plugin};

/// How many pods of a namespace are looked at when its level changes, and for how long.
const PODS_MAX: usize = 3000;
const PODS_TIME: Duration = Duration::from_secs(1);
/// So many pods are looked at before others get a turn.
const PODS_A_TURN: usize = 100;

/// Subresources of pods that do not carry a pod with a new spec.
const IGNORED: [&str; 8] = [
    "exec",
    "attach",
    "binding",
    "eviction",
    "log",
    "portforward",
    "proxy",
    "status",
];

#[derive(Default)]
pub struct PodSecurity {
    configuration: Configuration,
}

impl PodSecurity {
    pub fn new(configuration: Configuration) -> PodSecurity {
        PodSecurity { configuration }
    }
}

/// What a request is about.
enum Subject {
    Namespace,
    Pod,
    /// What makes pods, and where it keeps their template.
    Controller(&'static str),
}

fn subject(a: &Attributes<'_>) -> Option<Subject> {
    if !a.subresource.is_empty() {
        let pod = a.group.is_empty() && a.resource == "pods" && !IGNORED.contains(&a.subresource);
        return pod.then_some(Subject::Pod);
    }
    match (a.group, a.resource) {
        ("", "namespaces") => Some(Subject::Namespace),
        ("", "pods") => Some(Subject::Pod),
        ("", "podtemplates") => Some(Subject::Controller("template")),
        ("", "replicationcontrollers")
        | ("apps", "replicasets" | "deployments" | "statefulsets" | "daemonsets")
        | ("batch", "jobs") => Some(Subject::Controller("spec.template")),
        ("batch", "cronjobs") => Some(Subject::Controller("spec.jobTemplate.spec.template")),
        _ => None,
    }
}

#[async_trait]
impl Plugin for PodSecurity {
    fn name(&self) -> &'static str {
        "PodSecurity"
    }

    fn handles(&self, operation: Operation) -> bool {
        matches!(operation, Operation::Create | Operation::Update)
    }

    fn concerns(&self, a: &Attributes<'_>) -> bool {
        subject(a).is_some()
    }

    async fn validate(&self, a: &Attributes<'_>, lister: &dyn Lister) -> Result<(), Status> {
        let (Some(subject), Some(object)) = (subject(a), a.object.as_deref()) else {
            return Ok(());
        };
        let configuration = &self.configuration;
        if matches!(subject, Subject::Namespace) {
            return namespace(configuration, a, object, lister).await;
        }
        if configuration.exempts_namespace(a.namespace) {
            annotate(a, "exempt", || "namespace".to_owned());
            return Ok(());
        }
        if configuration.exempts_user(&a.user.name) {
            annotate(a, "exempt", || "user".to_owned());
            return Ok(());
        }
        let Some(labels) = lister.labels("", "namespaces", a.namespace, LABEL_PREFIX).await? else {
            return no_namespace(a, &subject);
        };
        let (policy, errors) = Policy::of_labels(configuration.defaults, |key| {
            let label = labels.iter().find(|(known, _)| known == key);
            label.map(|(_, value)| value.as_str())
        });
        let relaxed = match subject {
            Subject::Controller(_) => [policy.warn, policy.audit]
                .iter()
                .all(|mode| mode.level == Level::Privileged),
            _ => policy.fully_privileged(),
        };
        if relaxed && errors.is_empty() {
            if matches!(subject, Subject::Pod) {
                annotate(a, "enforce-policy", || "privileged:latest".to_owned());
            }
            return Ok(());
        }
        let (whole, enforce) = match subject {
            Subject::Controller(path) => match at(object, path) {
                Value::Null => return Ok(()),
                template => (template, false),
            },
            _ => (object, true),
        };
        let pod = Pod::of(whole);
        if enforce
            && let Some(old) = a.old_object
            && !is_significant(object, old)
        {
            return Ok(());
        }
        if configuration.exempts_runtime_class(text(whole, "spec.runtimeClassName")) {
            annotate(a, "exempt", || "runtimeClass".to_owned());
            return Ok(());
        }
        if !errors.is_empty() {
            annotate(a, "error", || {
                let all: Vec<String> = errors.iter().map(ToString::to_string).collect();
                let all = match all.as_slice() {
                    [one] => one.clone(),
                    all => format!("[{}]", all.join(", ")),
                };
                format!("Failed to parse policy: {all}")
            });
        }
        evaluate(a, &policy, pod, enforce)
    }
}

/// A pod without a namespace is refused; about what makes pods there is nothing to warn of.
fn no_namespace(a: &Attributes<'_>, subject: &Subject) -> Result<(), Status> {
    let quoted = skiff_meta::field::quote(a.namespace);
    let why = format!("failed to lookup namespace {quoted}");
    let not_found = format!("namespaces {quoted} not found");
    if matches!(subject, Subject::Pod) {
        annotate(a, "error", || {
            format!("Internal error occurred: {why}: {not_found}")
        });
        return Err(Status::internal(why));
    }
    annotate(a, "error", || format!("{why}: {not_found}"));
    Ok(())
}

fn annotate(a: &Attributes<'_>, key: &str, value: impl FnOnce() -> String) {
    if a.recorder.audited() {
        a.recorder.annotate(&format!("{LABEL_PREFIX}{key}"), value());
    }
}

fn evaluate(a: &Attributes<'_>, policy: &Policy, pod: Pod<'_>, enforce: bool) -> Result<(), Status> {
    let found = |mode: LevelVersion| {
        let found = violations(mode, pod);
        (!found.is_empty()).then(|| format!("violate PodSecurity \"{mode}\": {}", details(&found)))
    };
    let mut refusal = None;
    if enforce {
        annotate(a, "enforce-policy", || policy.enforce.to_string());
        let enforced = violations(policy.enforce, pod);
        if !enforced.is_empty() {
            let why = format!(
                "violates PodSecurity \"{}\": {}",
                policy.enforce,
                details(&enforced)
            );
            refusal = Some(Status::forbidden(&a.group_resource(), a.name, why));
        }
    }
    if a.recorder.audited()
        && let Some(violated) = found(policy.audit)
    {
        annotate(a, "audit-violations", || format!("would {violated}"));
    }
    if let Some(refusal) = refusal {
        return Err(refusal);
    }
    if let Some(violated) = found(policy.warn) {
        a.recorder.warn(format!("would {violated}"));
    }
    Ok(())
}

/// Whether an update changes what is looked at: of a pod that is there, images and new containers.
fn is_significant(new: &Value, old: &Value) -> bool {
    let same_images = |field: &str| {
        let (new, old) = (list(new, field), list(old, field));
        new.len() == old.len()
            && new
                .iter()
                .zip(old)
                .all(|(new, old)| text(new, "image") == text(old, "image"))
    };
    let ephemeral_is_known = |container: &Value| {
        let known = list(old, "spec.ephemeralContainers")
            .iter()
            .find(|known| text(known, "name") == text(container, "name"));
        known.is_some_and(|known| text(known, "image") == text(container, "image"))
    };
    !same_images("spec.containers")
        || !same_images("spec.initContainers")
        || !list(new, "spec.ephemeralContainers")
            .iter()
            .all(ephemeral_is_known)
}

fn policy_of(defaults: Policy, namespace: &Value) -> (Policy, Vec<skiff_meta::field::Error>) {
    let labels = at(namespace, "metadata.labels");
    Policy::of_labels(defaults, |key| labels.get(key).and_then(Value::as_str))
}

/// The labels of a namespace must be readable, and pods that are there already are warned about.
async fn namespace(
    configuration: &Configuration,
    a: &Attributes<'_>,
    object: &Value,
    lister: &dyn Lister,
) -> Result<(), Status> {
    let defaults = configuration.defaults;
    let (policy, errors) = policy_of(defaults, object);
    let old = a.old_object.map(|old| policy_of(defaults, old));
    let unchanged = old.as_ref().is_some_and(|(_, before)| *before == errors);
    if !errors.is_empty() && !unchanged {
        return Err(Status::invalid(
            &GroupKind::new(a.kind_group, a.kind),
            a.name,
            &errors,
        ));
    }
    let exempt = configuration.exempts_namespace(a.name);
    let Some((old, _)) = old else {
        if exempt && let Some(warning) = ignored(defaults, &policy, a.name, object) {
            a.recorder.warn(warning);
        }
        return Ok(());
    };
    let (new, old) = (policy.enforce, old.enforce);
    let no_stricter = new.version == old.version && new.level <= old.level;
    if new == old || new.level == Level::Privileged || no_stricter {
        return Ok(());
    }
    if exempt {
        if let Some(warning) = ignored(defaults, &policy, a.name, object) {
            a.recorder.warn(warning);
        }
        return Ok(());
    }
    for warning in existing_pods(configuration, a.name, new, lister).await {
        a.recorder.warn(warning);
    }
    Ok(())
}

/// The labels of a namespace that is not looked at have no effect.
fn ignored(defaults: Policy, policy: &Policy, name: &str, namespace: &Value) -> Option<String> {
    if policy.fully_privileged() || *policy == defaults {
        return None;
    }
    let labels = at(namespace, "metadata.labels");
    let modes = [
        ("enforce", policy.enforce),
        ("audit", policy.audit),
        ("warn", policy.warn),
    ];
    let told: Vec<String> = modes
        .iter()
        .filter(|(mode, set)| {
            let labelled = |suffix: &str| labels.get(format!("{LABEL_PREFIX}{mode}{suffix}")).is_some();
            set.level != Level::Privileged && (labelled("") || labelled("-version"))
        })
        .map(|(mode, set)| format!("{mode}={set}"))
        .collect();
    let (name, told) = (skiff_meta::field::quote(name), told.join(", "));
    Some(format!(
        "namespace {name} is exempt from Pod Security, and the policy ({told}) will be ignored"
    ))
}

/// What a new level would have to say about the pods of a namespace.
async fn existing_pods(
    configuration: &Configuration,
    namespace: &str,
    level: LevelVersion,
    lister: &dyn Lister,
) -> Vec<String> {
    let began = Instant::now();
    let Ok(pods) = lister.list("", "pods", namespace).await else {
        return vec!["failed to list pods while checking new PodSecurity enforce level".to_owned()];
    };
    let total = pods.len();
    let mut checked = 0;
    // What is violated, by how many pods, and the first of them.
    let mut found: BTreeMap<String, (usize, &str)> = BTreeMap::new();
    for pod in one_of_each_controller_first(&pods).into_iter().take(PODS_MAX) {
        let exempt = configuration.exempts_runtime_class(text(pod, "spec.runtimeClassName"));
        let violated = if exempt {
            Vec::new()
        } else {
            violations(level, Pod::of(pod))
        };
        if !violated.is_empty() {
            let name = text(pod, "metadata.name");
            let (count, first) = found.entry(reasons(&violated)).or_insert((0, name));
            *count += 1;
            *first = name.min(first);
        }
        checked += 1;
        if checked % PODS_A_TURN == 0 {
            tokio::task::yield_now().await;
        }
        if began.elapsed() > PODS_TIME {
            break;
        }
    }
    let mut warnings = Vec::new();
    if checked < total {
        warnings.push(format!(
            "new PodSecurity enforce level only checked against the first {checked} of {total} existing pods"
        ));
    }
    if !found.is_empty() {
        let quoted = skiff_meta::field::quote(namespace);
        warnings.push(format!(
            "existing pods in namespace {quoted} violate the new PodSecurity enforce level \"{level}\""
        ));
    }
    let mut of_pods: Vec<String> = found
        .into_iter()
        .map(|(violated, (count, first))| match count - 1 {
            0 => format!("{first}: {violated}"),
            1 => format!("{first} (and 1 other pod): {violated}"),
            others => format!("{first} (and {others} other pods): {violated}"),
        })
        .collect();
    of_pods.sort();
    warnings.extend(of_pods);
    warnings
}

/// Pods of one controller are alike: others first, in case time runs out.
fn one_of_each_controller_first(pods: &[Value]) -> Vec<&Value> {
    let mut seen = HashSet::new();
    let (mut first, mut alike) = (Vec::new(), Vec::new());
    for pod in pods {
        let controller = list(pod, "metadata.ownerReferences")
            .iter()
            .find(|owner| at(owner, "controller") == true);
        match controller {
            Some(owner) if !seen.insert(text(owner, "uid")) => alike.push(pod),
            _ => first.push(pod),
        }
    }
    first.append(&mut alike);
    first
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::AdmissionRecorder;
    use crate::plugins::fake::{Objects, create};
    use parking_lot::Mutex;
    use serde_json::json;

    #[derive(Default)]
    struct CollectingRecorder(Mutex<Vec<String>>);

    impl AdmissionRecorder for CollectingRecorder {
        fn warn(&self, text: String) {
            self.0.lock().push(text);
        }

        fn audited(&self) -> bool {
            true
        }

        fn annotate(&self, key: &str, value: String) {
            let key = key.strip_prefix(LABEL_PREFIX).unwrap_or("?");
            self.0.lock().push(format!("{key}: {value}"));
        }
    }

    fn namespace(labels: Value) -> (&'static str, Value) {
        (
            "namespaces",
            json!({"metadata": {"name": "ns", "labels": labels}}),
        )
    }

    fn pod(name: &str, host_network: bool) -> Value {
        json!({"metadata": {"name": name}, "spec": {"hostNetwork": host_network, "containers": [{"name": "c", "image": "i"}]}})
    }

    async fn check(
        labels: Value,
        about: (&str, &str, &str),
        mut object: Value,
        expected: Result<&[&str], &str>,
    ) {
        let lister = Objects(vec![namespace(labels.clone())]);
        let heard = CollectingRecorder::default();
        let mut a = create(about.0, about.1, about.2, &mut object);
        (a.recorder, a.name) = (&heard, "n");
        let result = PodSecurity::default().validate(&a, &lister).await;
        let heard = heard.0.into_inner();
        match expected {
            Ok(expected) => {
                assert_eq!(result.err().map(|s| s.message), None, "{labels}");
                assert_eq!(heard, expected, "{labels}");
            }
            Err(expected) => assert_eq!(result.err().map(|s| s.message).as_deref(), Some(expected)),
        }
    }

    #[tokio::test]
    async fn pods_are_refused_and_what_makes_them_is_warned_about() {
        let pods = ("", "pods", "Pod");
        let enforce = json!({"pod-security.kubernetes.io/enforce": "baseline"});
        check(
            json!({}),
            pods,
            pod("n", true),
            Ok(&["enforce-policy: privileged:latest"]),
        )
        .await;
        check(
            enforce.clone(),
            pods,
            pod("n", true),
            Err("pods \"n\" is forbidden: violates PodSecurity \"baseline:latest\": host namespaces (hostNetwork=true)"),
        )
        .await;
        check(
            enforce.clone(),
            pods,
            pod("n", false),
            Ok(&["enforce-policy: baseline:latest"]),
        )
        .await;
        let warning = "would violate PodSecurity \"baseline:latest\": host namespaces (hostNetwork=true)";
        let deployment = json!({"spec": {"template": pod("", true)}});
        check(
            enforce,
            ("apps", "deployments", "Deployment"),
            deployment.clone(),
            Ok(&[warning]),
        )
        .await;
        let audit = json!({"pod-security.kubernetes.io/audit": "baseline"});
        let told = format!("audit-violations: {warning}");
        check(
            audit,
            ("apps", "deployments", "Deployment"),
            deployment,
            Ok(&[&told]),
        )
        .await;
        let unreadable = json!({"pod-security.kubernetes.io/warn": "x"});
        check(
            unreadable,
            pods,
            pod("n", true),
            Ok(&[
                "error: Failed to parse policy: metadata.labels[pod-security.kubernetes.io/warn]: Invalid value: \"x\": must be one of privileged, baseline, restricted",
                "enforce-policy: privileged:latest",
            ]),
        )
        .await;
    }

    #[tokio::test]
    async fn a_stricter_level_warns_about_the_pods_that_are_there() {
        let owned = |name: &str| {
            let mut pod = pod(name, true);
            pod["metadata"]["ownerReferences"] = json!([{"controller": true, "uid": "u"}]);
            pod["metadata"]["namespace"] = json!("ns");
            pod
        };
        let lister = Objects(vec![
            ("pods", owned("b")),
            ("pods", owned("a")),
            ("pods", owned("c")),
        ]);
        let heard = CollectingRecorder::default();
        let (_, old) = namespace(json!({}));
        let (_, mut new) = namespace(json!({"pod-security.kubernetes.io/enforce": "baseline"}));
        let mut a = create("", "namespaces", "Namespace", &mut new);
        (a.recorder, a.name, a.old_object, a.operation) = (&heard, "ns", Some(&old), Operation::Update);
        assert!(PodSecurity::default().validate(&a, &lister).await.is_ok());
        assert_eq!(
            heard.0.into_inner(),
            [
                "existing pods in namespace \"ns\" violate the new PodSecurity enforce level \"baseline:latest\"",
                "a (and 2 other pods): host namespaces",
            ]
        );
    }

    #[tokio::test]
    async fn labels_must_be_readable_when_they_change() {
        let labels = json!({"pod-security.kubernetes.io/enforce": "x"});
        let (_, old) = namespace(labels.clone());
        let (_, mut new) = namespace(labels);
        let mut a = create("", "namespaces", "Namespace", &mut new);
        a.name = "ns";
        let error = PodSecurity::default()
            .validate(&a, &Objects::default())
            .await
            .unwrap_err();
        assert_eq!(
            error.message,
            "Namespace \"ns\" is invalid: metadata.labels[pod-security.kubernetes.io/enforce]: Invalid value: \"x\": must be one of privileged, baseline, restricted"
        );
        a.old_object = Some(&old);
        assert!(
            PodSecurity::default()
                .validate(&a, &Objects::default())
                .await
                .is_ok()
        );
    }

    #[test]
    fn updates_that_change_no_image_pass() {
        let old = pod("a", true);
        let mut new = old.clone();
        new["metadata"]["labels"] = json!({"a": "b"});
        assert!(!is_significant(&new, &old));
        new["spec"]["ephemeralContainers"] = json!([{"name": "d", "image": "i"}]);
        assert!(is_significant(&new, &old));
        assert!(!is_significant(&new, &new));
        let mut other = old.clone();
        other["spec"]["containers"][0]["image"] = json!("j");
        assert!(is_significant(&other, &old));
    }

    #[test]
    fn images_and_new_containers_are_looked_at_again() {
        let pod = |spec: Value| json!({ "spec": spec });
        let one = |image: &str| json!([{"name": "c", "image": image}]);
        let check = |new: Value, old: Value, expected: bool| {
            assert_eq!(is_significant(&pod(new.clone()), &pod(old)), expected, "{new}");
        };
        for field in ["containers", "initContainers"] {
            check(json!({field: one("a")}), json!({field: one("a")}), false);
            check(json!({field: one("b")}), json!({field: one("a")}), true);
            check(json!({field: one("a")}), json!({}), true);
        }
        check(json!({"hostPID": true}), json!({}), false);
        let late = "ephemeralContainers";
        check(json!({late: one("a")}), json!({late: one("a")}), false);
        check(json!({late: one("b")}), json!({late: one("a")}), true);
        check(json!({late: one("a")}), json!({}), true);
        check(json!({}), json!({late: one("a")}), false);
    }
}
