//! What annotations of a pod mean to the API server: profiles of AppArmor and seccomp from before they were fields,
//! mirror pods, and what the deletion of a pod costs. Templates obey the same rules.

use serde_json::{Value, json};
use skiff_meta::field;

use super::mounts::descending_path;
use crate::errors::Errors;
use crate::node::{Node, at, list, same, text};
use crate::walk;

const MIRROR: &str = "kubernetes.io/config.mirror";
const DELETION_COST: &str = "controller.kubernetes.io/pod-deletion-cost";
const APP_ARMOR: &str = "container.apparmor.security.beta.kubernetes.io/";
const SECCOMP_POD: &str = "seccomp.security.alpha.kubernetes.io/pod";
const SECCOMP: &str = "container.seccomp.security.alpha.kubernetes.io/";
const UNCONFINED: &str = "unconfined";
const RUNTIME_DEFAULT: &str = "runtime/default";
const DOCKER_DEFAULT: &str = "docker/default";
const LOCALHOST: &str = "localhost/";

/// In the order in which upstream visits them.
const CONTAINERS: [&str; 3] = ["initContainers", "containers", "ephemeralContainers"];

/// The rules of the annotations at this node. A cost that was wrong before may stay so.
pub fn validate(annotations: &Node, spec: &Value, old: Option<&Value>, errors: &mut Errors) {
    let mirror = annotations.key(MIRROR);
    if mirror.is_set() && text(spec, "nodeName").is_empty() {
        errors.invalid(&mirror, "must set spec.nodeName if mirror pod annotation is set");
    }
    let cost = annotations.key(DELETION_COST);
    if is_bad_cost(annotations.value) && !old.is_some_and(is_bad_cost) {
        errors.invalid(&cost, "must be a 32bit integer");
    }
    let pod = annotations.key(SECCOMP_POD);
    if pod.is_set() {
        seccomp_profile(annotations, SECCOMP_POD, pod.str(), errors);
    }
    for (key, profile) in annotations.entries() {
        if key.starts_with(SECCOMP) {
            seccomp_profile(annotations, key, profile.str(), errors);
        }
    }
    for (key, profile) in annotations.entries() {
        let Some(name) = key.strip_prefix(APP_ARMOR) else {
            continue;
        };
        let known = CONTAINERS
            .iter()
            .flat_map(|containers| list(spec, containers))
            .any(|container| text(container, "name") == name);
        if !known {
            errors.invalid_value(&profile, name, "container not found");
        }
        let shown = profile.str();
        if !matches!(shown, "" | RUNTIME_DEFAULT | UNCONFINED) && !shown.starts_with(LOCALHOST) {
            let detail = format!("invalid AppArmor profile name: {}", field::quote(shown));
            errors.invalid(&profile, detail);
        }
    }
}

/// The rules of a change of these annotations, and once more those of every pod.
pub fn validate_update(annotations: &Node, spec: &Value, old: &Value, errors: &mut Errors) {
    let entries = |value: &Value| value.as_object().cloned().unwrap_or_default();
    for (key, before) in &entries(old) {
        if annotations.value.get(key) == Some(before) {
            continue;
        }
        let at = annotations.key(key);
        if key.starts_with(APP_ARMOR) {
            errors.forbidden(&at, "may not remove or update AppArmor annotations");
        }
        if key == MIRROR {
            errors.forbidden(&at, "may not remove or update mirror pod annotation");
        }
    }
    for (key, at) in annotations.entries() {
        if old.get(key).is_some() {
            continue;
        }
        if key.starts_with(APP_ARMOR) {
            errors.forbidden(&at, "may not add AppArmor annotations");
        }
        if key == MIRROR {
            errors.forbidden(&at, "may not add mirror pod annotation");
        }
    }
    validate(annotations, spec, Some(old), errors);
}

fn is_bad_cost(annotations: &Value) -> bool {
    annotations
        .get(DELETION_COST)
        .and_then(Value::as_str)
        .is_some_and(|text| {
            let plain =
                !text.starts_with('+') && (text == "0" || !text.trim_start_matches('-').starts_with('0'));
            !plain || text.parse::<i32>().is_err()
        })
}

fn seccomp_profile(annotations: &Node, key: &str, profile: &str, errors: &mut Errors) {
    // COMPAT: the key stands in the path like a field.
    let at = annotations.field(key);
    if [RUNTIME_DEFAULT, DOCKER_DEFAULT, UNCONFINED].contains(&profile) {
        return;
    }
    match profile.strip_prefix(LOCALHOST) {
        Some(path) => descending_path(&at.with(&json!(path)), errors),
        None => errors.invalid_value(&at, profile, "must be a valid seccomp profile"),
    }
}

/// Where an annotation and a field both name a profile, it must be the same.
pub fn agree(annotations: &Value, spec: &Node, errors: &mut Errors) {
    let given = |key: &str| annotations.get(key).and_then(Value::as_str);
    let context = spec.field("securityContext");
    let whole = context.field("seccompProfile");
    if let Some(annotation) = given(SECCOMP_POD) {
        matches(&whole, whole.value, annotation, "seccomp", errors);
    }
    for name in CONTAINERS {
        let containers = spec.field(name);
        for container in containers.items() {
            let own = container.field("securityContext");
            let profile = own.field("seccompProfile");
            if let Some(annotation) = given(&format!("{SECCOMP}{}", container.field("name").str())) {
                matches(&profile, profile.value, annotation, "seccomp", errors);
            }
        }
    }
    if spec.field("os.name").str() == "windows" {
        return;
    }
    for name in CONTAINERS {
        let containers = spec.field(name);
        for container in containers.items() {
            let own = container.field("securityContext");
            let profile = own.field("appArmorProfile");
            let effective = if profile.is_set() {
                profile.value
            } else {
                at(context.value, "appArmorProfile")
            };
            if let Some(annotation) = given(&format!("{APP_ARMOR}{}", container.field("name").str())) {
                matches(&profile, effective, annotation, "apparmor", errors);
            }
        }
    }
}

fn matches(at: &Node, profile: &Value, annotation: &str, what: &str, errors: &mut Errors) {
    let agrees = match text(profile, "type") {
        "Unconfined" => annotation == UNCONFINED,
        "RuntimeDefault" => {
            annotation == RUNTIME_DEFAULT || (what == "seccomp" && annotation == DOCKER_DEFAULT)
        }
        "Localhost" => match annotation.strip_prefix(LOCALHOST) {
            None => false,
            Some(path) => {
                if profile.get("localhostProfile").and_then(Value::as_str) != Some(path) {
                    let detail = format!("{what} profile in annotation and field must match");
                    errors.forbidden(&at.field("localhostProfile"), detail);
                }
                true
            }
        },
        _ => true,
    };
    if !agrees {
        let detail = format!("{what} type in annotation and field must match");
        errors.forbidden(&at.field("type"), detail);
    }
}

/// The AppArmor profile that an annotation stands for.
fn app_armor_profile(annotation: &str) -> Option<Value> {
    match annotation {
        UNCONFINED => Some(json!({ "type": "Unconfined" })),
        RUNTIME_DEFAULT => Some(json!({ "type": "RuntimeDefault" })),
        _ => annotation
            .strip_prefix(LOCALHOST)
            .filter(|path| !path.is_empty())
            .map(|path| json!({ "type": "Localhost", "localhostProfile": path })),
    }
}

/// Puts the AppArmor annotations of a new pod into its fields. Gives what the client is told about them.
pub fn take_over(pod: &mut Value) -> Vec<String> {
    let mut warnings = Vec::new();
    if text(pod, "spec.os.name") == "windows" {
        return warnings;
    }
    let annotated = |annotations: &Value| {
        annotations
            .as_object()
            .is_some_and(|all| all.keys().any(|key| key.starts_with(APP_ARMOR)))
    };
    if !annotated(at(pod, "metadata.annotations")) {
        return warnings;
    }
    let annotations = at(pod, "metadata.annotations").clone();
    let whole = at(pod, "spec.securityContext.appArmorProfile").clone();
    for name in CONTAINERS {
        walk::each(pod, &format!("spec.{name}[]"), &mut |container| {
            let key = format!("{APP_ARMOR}{}", text(container, "name"));
            let Some(annotation) = annotations.get(&key).and_then(Value::as_str) else {
                return;
            };
            if !at(container, "securityContext.appArmorProfile").is_null() {
                return;
            }
            let profile = app_armor_profile(annotation).filter(|profile| {
                let path = text(profile, "localhostProfile");
                path.trim() == path && path.len() <= 4095
            });
            if let Some(profile) = profile {
                if same(&profile, &whole) {
                    return;
                }
                if let Some(context) = walk::object(container, "securityContext") {
                    walk::put(context, "appArmorProfile", profile);
                }
            }
            warnings.push(deprecated("metadata.annotations", &key));
        });
    }
    warnings
}

fn deprecated(annotations: &str, key: &str) -> String {
    format!("{annotations}[{key}]: deprecated since v1.30; use the \"appArmorProfile\" field instead")
}

/// Of the annotation of seccomp for the whole pod.
pub fn pod_warnings(pod: &Node, warnings: &mut Vec<String>) {
    let annotations = pod.field("metadata.annotations");
    let annotation = annotations.key(SECCOMP_POD);
    if annotation.is_set() && !pod.field("spec.securityContext.seccompProfile").is_set() {
        warnings.push(non_functional(&annotation));
    }
}

/// Of the annotations for one container. Those of AppArmor on a pod were taken over before.
pub fn container_warnings(pod: &Node, container: &Node, is_template: bool, warnings: &mut Vec<String>) {
    let annotations = pod.field("metadata.annotations");
    let name = container.field("name").str();
    let key = format!("{SECCOMP}{name}");
    let annotation = annotations.key(&key);
    if annotation.is_set() && !container.field("securityContext.seccompProfile").is_set() {
        warnings.push(non_functional(&annotation));
    }
    let key = format!("{APP_ARMOR}{name}");
    let annotation = annotations.key(&key);
    if !is_template || !annotation.is_set() || container.field("securityContext.appArmorProfile").is_set() {
        return;
    }
    let whole = pod.field("spec.securityContext.appArmorProfile");
    let same_as_pod = app_armor_profile(annotation.str()).is_some_and(|profile| same(&profile, whole.value));
    if !whole.is_set() || !same_as_pod {
        warnings.push(deprecated(&annotations.path(), &key));
    }
}

fn non_functional(annotation: &Node) -> String {
    format!(
        "{}: non-functional in v1.27+; use the \"seccompProfile\" field instead",
        annotation.path()
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pod(annotations: Value, context: Value) -> Value {
        json!({
            "metadata": {"annotations": annotations},
            "spec": {"securityContext": context, "containers": [{"name": "c"}, {"name": "d"}]},
        })
    }

    fn found(check: impl Fn(&Node, &mut Errors), pod: &Value) -> Vec<String> {
        let mut errors = Errors::new();
        check(&Node::root(pod), &mut errors);
        errors.into_vec().iter().map(ToString::to_string).collect()
    }

    #[test]
    fn profiles_move_to_fields() {
        let check = |annotation: &str, whole: Value, profile: Value, warns: bool| {
            let key = format!("{APP_ARMOR}d");
            let mut pod = pod(json!({key: annotation}), json!({ "appArmorProfile": whole }));
            let warnings = take_over(&mut pod);
            let expected: &[&str] = &[
                "metadata.annotations[container.apparmor.security.beta.kubernetes.io/d]: deprecated since v1.30; use the \"appArmorProfile\" field instead",
            ];
            assert_eq!(warnings, if warns { expected } else { &[] }, "{annotation}");
            assert_eq!(
                *at(&pod["spec"]["containers"][1], "securityContext.appArmorProfile"),
                profile,
                "{annotation}"
            );
            assert_eq!(pod["spec"]["containers"][0], json!({"name": "c"}));
        };
        let default = json!({"type": "RuntimeDefault"});
        check("runtime/default", Value::Null, default.clone(), true);
        check("runtime/default", default.clone(), Value::Null, false);
        check("unconfined", default, json!({"type": "Unconfined"}), true);
        check(
            "localhost/p",
            Value::Null,
            json!({"type": "Localhost", "localhostProfile": "p"}),
            true,
        );
        check("localhost/", Value::Null, Value::Null, true);
        check("", Value::Null, Value::Null, true);
    }

    #[test]
    fn annotations_are_looked_at() {
        let check = |annotations: Value, expected: &[&str]| {
            let pod = pod(annotations, json!({}));
            let rules = |root: &Node, errors: &mut Errors| {
                validate(&root.field("metadata.annotations"), &pod["spec"], None, errors);
            };
            assert_eq!(found(rules, &pod), expected);
        };
        check(
            json!({"container.apparmor.security.beta.kubernetes.io/x": "y"}),
            &[
                "metadata.annotations[container.apparmor.security.beta.kubernetes.io/x]: Invalid value: \"x\": container not found",
                "metadata.annotations[container.apparmor.security.beta.kubernetes.io/x]: Invalid value: \"y\": invalid AppArmor profile name: \"y\"",
            ],
        );
        check(
            json!({"seccomp.security.alpha.kubernetes.io/pod": "localhost//x"}),
            &[
                "metadata.annotations.seccomp.security.alpha.kubernetes.io/pod: Invalid value: \"/x\": must be a relative path",
            ],
        );
        check(
            json!({"container.seccomp.security.alpha.kubernetes.io/c": "docker/default"}),
            &[],
        );
    }

    #[test]
    fn fields_agree_with_annotations() {
        let check = |annotations: Value, context: Value, expected: &[&str]| {
            let pod = pod(annotations, context);
            let rules = |root: &Node, errors: &mut Errors| {
                agree(at(&pod, "metadata.annotations"), &root.field("spec"), errors);
            };
            assert_eq!(found(rules, &pod), expected);
        };
        check(
            json!({"seccomp.security.alpha.kubernetes.io/pod": "unconfined",
                   "container.apparmor.security.beta.kubernetes.io/d": "localhost/a"}),
            json!({"seccompProfile": {"type": "RuntimeDefault"},
                   "appArmorProfile": {"type": "Localhost", "localhostProfile": "b"}}),
            &[
                "spec.securityContext.seccompProfile.type: Forbidden: seccomp type in annotation and field must match",
                "spec.containers[1].securityContext.appArmorProfile.localhostProfile: Forbidden: apparmor profile in annotation and field must match",
            ],
        );
        check(
            json!({"seccomp.security.alpha.kubernetes.io/pod": "docker/default"}),
            json!({"seccompProfile": {"type": "RuntimeDefault"}}),
            &[],
        );
    }
}
