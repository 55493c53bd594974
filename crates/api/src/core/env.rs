//! Rules of a container's environment, and of references to fields of the pod and its resources.

use skiff_meta::{names, quantity::Quantity};

use super::mounts::no_backsteps;
use crate::errors::Errors;
use crate::node::{Node, at, by_text, list};
use crate::object_meta;

const RELAXED_ENV: &str =
    "a valid environment variable name must consist only of printable ASCII characters other than '='";

fn env_name(text: &str) -> Vec<String> {
    if text.chars().any(|c| !(' '..='~').contains(&c) || c == '=') {
        vec![RELAXED_ENV.to_owned()]
    } else {
        Vec::new()
    }
}

pub(super) fn env(env: &Node, errors: &mut Errors) {
    for variable in env.items() {
        let name = variable.field("name");
        if errors.require(&name) {
            errors.rule(&name, env_name(name.str()));
        }
        let from = variable.field("valueFrom");
        if from.is_set() {
            value_from(&from, !variable.field("value").is_empty(), errors);
        }
    }
}

fn value_from(from: &Node, has_value: bool, errors: &mut Errors) {
    let mut sources = 0;
    let field = from.field("fieldRef");
    if field.is_set() {
        sources += 1;
        field_ref(
            &field,
            &[
                "metadata.name",
                "metadata.namespace",
                "metadata.uid",
                "spec.nodeName",
                "spec.serviceAccountName",
                "status.hostIP",
                "status.hostIPs",
                "status.podIP",
                "status.podIPs",
            ],
            errors,
        );
    }
    let resource = from.field("resourceFieldRef");
    if resource.is_set() {
        sources += 1;
        resource_field_ref(&resource, false, errors);
    }
    for name in ["configMapKeyRef", "secretKeyRef"] {
        let reference = from.field(name);
        if reference.is_set() {
            sources += 1;
            let name = reference.field("name");
            errors.rule(&name, object_meta::dns_subdomain(name.str(), false));
            let key = reference.field("key");
            if errors.require(&key) {
                errors.rule(&key, names::config_map_key(key.str()));
            }
        }
    }
    let file = from.field("fileKeyRef");
    if file.is_set() {
        sources += 1;
        let key = file.field("key");
        if errors.require(&key) {
            errors.rule(&key, env_name(key.str()));
        }
        let volume = file.field("volumeName");
        if errors.require(&volume) {
            errors.rule(&volume, names::dns1123_label(volume.str()));
        }
        let path = file.field("path");
        if errors.require(&path) {
            no_backsteps(&path, errors);
        }
    }
    let complaint = match sources {
        0 => {
            "must specify one of: `fieldRef`, `resourceFieldRef`, `configMapKeyRef`, `secretKeyRef` or `fileKeyRef`"
        }
        _ if has_value => "may not be specified when `value` is not empty",
        1 => return,
        _ => "may not have more than one field specified at a time",
    };
    errors.invalid_value(from, "", complaint);
}

/// A reference to a field of the pod; `metadata.labels['x']` and annotations may be subscripted.
pub fn field_ref(reference: &Node, supported: &[&str], errors: &mut Errors) {
    if !errors.require(&reference.field("apiVersion")) {
        return;
    }
    let path = reference.field("fieldPath");
    if !errors.require(&path) {
        return;
    }
    let text = path.str();
    if let Some((head, rest)) = text.split_once("['")
        && let Some(subscript) = rest.strip_suffix("']")
    {
        match head {
            "metadata.annotations" => {
                errors.rule(reference, names::qualified_name(&subscript.to_lowercase()))
            }
            "metadata.labels" => errors.rule(reference, names::qualified_name(subscript)),
            _ => errors.invalid(
                &path,
                format!("error converting fieldPath: field label does not support subscript: {text}"),
            ),
        }
    } else if reference.field("apiVersion").str() != "v1" {
        let version = reference.field("apiVersion").str();
        let detail = format!("error converting fieldPath: unsupported pod version: {version}");
        errors.invalid(&path, detail);
    } else if !convertible(text) {
        errors.invalid(
            &path,
            format!("error converting fieldPath: field label not supported: {text}"),
        );
    } else if !supported.contains(&text) {
        errors.not_supported(&path, supported);
    }
}

fn convertible(path: &str) -> bool {
    matches!(
        path,
        "metadata.annotations"
            | "metadata.labels"
            | "metadata.name"
            | "metadata.namespace"
            | "metadata.uid"
            | "spec.nodeName"
            | "spec.restartPolicy"
            | "spec.serviceAccountName"
            | "spec.schedulerName"
            | "status.phase"
            | "status.hostIP"
            | "status.hostIPs"
            | "status.podIP"
            | "status.podIPs"
            | "spec.host"
    )
}

const RESOURCES: [&str; 6] = [
    "limits.cpu",
    "limits.ephemeral-storage",
    "limits.memory",
    "requests.cpu",
    "requests.ephemeral-storage",
    "requests.memory",
];

pub fn resource_field_ref(reference: &Node, volume: bool, errors: &mut Errors) {
    let resource = reference.field("resource");
    let name = resource.str();
    let huge = name.starts_with("limits.hugepages-") || name.starts_with("requests.hugepages-");
    if volume && reference.field("containerName").str().is_empty() {
        errors.required(&reference.field("containerName"), "");
    } else if name.is_empty() {
        errors.required(&resource, "");
    } else if !huge && !RESOURCES.contains(&name) {
        errors.not_supported(&resource, &RESOURCES);
        return;
    }
    let divisor = reference.field("divisor");
    let Some(amount) = divisor
        .value
        .as_str()
        .and_then(|t| Quantity::parse(t).ok())
        .filter(|q| !q.is_zero())
    else {
        return;
    };
    let amount = amount.to_string();
    let (allowed, shown, what): (&[&str], &str, &str) = if name.ends_with(".cpu") {
        (&["1m", "1"], "1m and 1", "cpu")
    } else {
        let what = if name.ends_with(".memory") {
            "memory"
        } else if name.ends_with(".ephemeral-storage") {
            "local ephemeral storage"
        } else {
            "hugepages"
        };
        (
            &[
                "1", "1k", "1M", "1G", "1T", "1P", "1E", "1Ki", "1Mi", "1Gi", "1Ti", "1Pi", "1Ei",
            ],
            "1, 1k, 1M, 1G, 1T, 1P, 1E, 1Ki, 1Mi, 1Gi, 1Ti, 1Pi, 1Ei",
            what,
        )
    };
    if !allowed.contains(&amount.as_str()) {
        let detail = format!("only divisor's values {shown} are supported with the {what} resource");
        errors.invalid_value(&divisor, name, detail);
    }
}

/// Variables that are read from a file need a volume that a container can write to.
pub(super) fn file_volumes(spec: &Node, errors: &mut Errors) {
    let volumes = by_text(list(spec.value, "volumes"), "name");
    for name in ["initContainers", "containers", "ephemeralContainers"] {
        let containers = spec.field(name);
        for container in containers.items() {
            let variables = container.field("env");
            for variable in variables.items() {
                let file = variable.field("valueFrom.fileKeyRef");
                if !file.is_set() {
                    continue;
                }
                let volume = file.field("volumeName");
                match volumes.get(volume.str()) {
                    None => errors.not_found(&volume),
                    Some(found) if at(found, "emptyDir").is_null() => {
                        errors.invalid(&volume, "referenced volume must be of type emptyDir");
                    }
                    Some(_) => {}
                }
            }
        }
    }
}

pub(super) fn env_from(sources: &Node, errors: &mut Errors) {
    for source in sources.items() {
        let prefix = source.field("prefix");
        if !prefix.str().is_empty() {
            errors.rule(&prefix, env_name(prefix.str()));
        }
        let mut count = 0;
        for name in ["configMapRef", "secretRef"] {
            let reference = source.field(name);
            if reference.is_set() {
                count += 1;
                let name = reference.field("name");
                if errors.require(&name) {
                    errors.rule(&name, object_meta::dns_subdomain(name.str(), true));
                }
            }
        }
        // COMPAT: the path is that of the list.
        match count {
            0 => errors.invalid_value(sources, "", "must specify one of: `configMapRef` or `secretRef`"),
            1 => {}
            _ => errors.invalid_value(
                sources,
                "",
                "may not have more than one field specified at a time",
            ),
        }
    }
}
