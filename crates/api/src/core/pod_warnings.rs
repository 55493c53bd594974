//! What a client is told about a pod spec that is valid but probably not meant so.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::Value;
use skiff_meta::field::quote;

use super::resources::quantity;
use super::{pod_annotations, volume_warnings};
use crate::net;
use crate::node::{Node, at, same};

const NO_SELECTOR: &str = "a null labelSelector results in matching no pod";
const OLD_VOLUMES: [(&str, &str); 9] = [
    (
        "photonPersistentDisk",
        "deprecated in v1.11, non-functional in v1.16+",
    ),
    (
        "gitRepo",
        "deprecated in v1.11, and disabled by default in v1.33+",
    ),
    ("scaleIO", "deprecated in v1.16, non-functional in v1.22+"),
    ("flocker", "deprecated in v1.22, non-functional in v1.25+"),
    ("storageos", "deprecated in v1.22, non-functional in v1.25+"),
    ("quobyte", "deprecated in v1.22, non-functional in v1.25+"),
    ("glusterfs", "deprecated in v1.25, non-functional in v1.26+"),
    ("cephfs", "deprecated in v1.28, non-functional in v1.31+"),
    ("rbd", "deprecated in v1.28, non-functional in v1.31+"),
];
const OLD_LABELS: [(&str, &str); 5] = [
    (
        "beta.kubernetes.io/arch",
        "deprecated since v1.14; use \"kubernetes.io/arch\" instead",
    ),
    (
        "beta.kubernetes.io/os",
        "deprecated since v1.14; use \"kubernetes.io/os\" instead",
    ),
    (
        "failure-domain.beta.kubernetes.io/region",
        "deprecated since v1.17; use \"topology.kubernetes.io/region\" instead",
    ),
    (
        "failure-domain.beta.kubernetes.io/zone",
        "deprecated since v1.17; use \"topology.kubernetes.io/zone\" instead",
    ),
    (
        "beta.kubernetes.io/instance-type",
        "deprecated since v1.17; use \"node.kubernetes.io/instance-type\" instead",
    ),
];
const OLD_ANNOTATIONS: [(&str, &str); 3] = [
    (
        "scheduler.alpha.kubernetes.io/critical-pod",
        "non-functional in v1.16+; use the \"priorityClassName\" field instead",
    ),
    (
        "security.alpha.kubernetes.io/sysctls",
        "non-functional in v1.11+; use the \"sysctls\" field instead",
    ),
    (
        "security.alpha.kubernetes.io/unsafe-sysctls",
        "non-functional in v1.11+; use the \"sysctls\" field instead",
    ),
];

/// Warnings of the template at `path` of a workload; on update only if the template changed.
pub fn template(new: &Value, old: Option<&Value>, path: &'static str) -> Vec<String> {
    let kept = |old, path| same(at(new, path), at(old, path));
    // Whatever else of the workload changed counts too.
    if old.is_some_and(|old| kept(old, "metadata.generation") && kept(old, path)) {
        return Vec::new();
    }
    let root = Node::root(new);
    pod(&root.field(path))
}

/// Warnings of a template where only a change of itself is looked at.
pub fn changed_template(new: &Value, old: Option<&Value>, path: &'static str) -> Vec<String> {
    if old.is_some_and(|old| same(at(new, path), at(old, path))) {
        return Vec::new();
    }
    let root = Node::root(new);
    pod(&root.field(path))
}

/// Warnings of a pod or a template, which have `metadata` and `spec`.
pub fn pod(pod: &Node) -> Vec<String> {
    let mut warnings = Vec::new();
    let spec = pod.field("spec");
    placement(&spec, &mut warnings);
    let annotations = pod.field("metadata.annotations");
    for (key, says) in OLD_ANNOTATIONS {
        let annotation = annotations.key(key);
        if annotation.is_set() {
            warnings.push(format!("{}: {says}", annotation.path()));
        }
    }
    let volumes = spec.field("volumes");
    for volume in volumes.items() {
        for (name, says) in OLD_VOLUMES {
            let source = volume.field(name);
            if source.is_set() {
                // COMPAT: one of them is spelled as upstream's inner type.
                let path = source.path().replace(".storageos", ".storageOS");
                warnings.push(format!("{path}: {says}"));
            }
        }
    }
    for volume in volumes.items() {
        let claim = volume.field("ephemeral.volumeClaimTemplate.spec");
        super::claim::fractions(claim.value, &claim.path(), &mut warnings);
    }
    volume_warnings::overlaps(crate::node::list(spec.value, "volumes"), &mut warnings);
    duplicates(&spec, &mut warnings);
    let overhead = spec.field("overhead");
    whole_bytes(&overhead, &["memory", "ephemeral-storage"], &mut warnings);
    pod_annotations::pod_warnings(pod, &mut warnings);
    containers(pod, &spec, &mut warnings);
    let grace = spec.field("terminationGracePeriodSeconds");
    if grace.int().is_some_and(|n| n < 0) {
        warnings.push(format!(
            "{}: must be >= 0; negative values are invalid and will be treated as 1",
            grace.path()
        ));
    }
    pod_affinity(&spec, &mut warnings);
    let servers = spec.field("dnsConfig.nameservers");
    warnings.extend(servers.items().filter_map(|at| net::ip_warning(&at)));
    let aliases = spec.field("hostAliases");
    warnings.extend(
        aliases
            .items()
            .filter_map(|alias| net::ip_warning(&alias.field("ip"))),
    );
    warnings
}

fn old_label(key: &str) -> Option<&'static str> {
    OLD_LABELS
        .iter()
        .find(|(label, _)| *label == key)
        .map(|(_, says)| *says)
}

fn placement(spec: &Node, warnings: &mut Vec<String>) {
    let selector = spec.field("nodeSelector");
    for (key, entry) in selector.entries() {
        warnings.extend(old_label(key).map(|says| format!("{}: {says}", entry.path())));
    }
    let constraints = spec.field("topologySpreadConstraints");
    for constraint in constraints.items() {
        let key = constraint.field("topologyKey");
        warnings.extend(old_label(key.str()).map(|says| format!("{}: {} is {says}", key.path(), key.str())));
        let selector = constraint.field("labelSelector");
        if !selector.is_set() {
            warnings.push(format!("{}: {NO_SELECTOR}", selector.path()));
        }
    }
}

fn duplicates(spec: &Node, warnings: &mut Vec<String>) {
    for (list, field) in [("hostAliases", "ip"), ("imagePullSecrets", "name")] {
        let items = spec.field(list);
        let mut seen = BTreeSet::new();
        for item in items.items() {
            let value = item.field(field);
            if !seen.insert(value.str()) {
                warnings.push(format!(
                    "{}: duplicate {field} {}",
                    value.path(),
                    quote(value.str())
                ));
            }
        }
    }
    let secrets = spec.field("imagePullSecrets");
    for secret in secrets.items() {
        let name = secret.field("name");
        if name.is_empty() {
            warnings.push(format!("{}: invalid empty name \"\"", name.path()));
        }
    }
}

fn containers(pod: &Node, spec: &Node, warnings: &mut Vec<String>) {
    let mut ports: BTreeMap<String, Vec<(String, String, i64)>> = BTreeMap::new();
    let mut named: BTreeMap<String, String> = BTreeMap::new();
    let (mut port_warnings, mut name_warnings) = (Vec::new(), Vec::new());
    let is_template = !pod.path().is_empty();
    for list in ["initContainers", "containers", "ephemeralContainers"] {
        let containers = spec.field(list);
        for container in containers.items() {
            pod_annotations::container_warnings(pod, &container, is_template, warnings);
            fractions(&container, warnings);
            environment(&container, warnings);
            let own = container.field("ports");
            for port in own.items() {
                let (path, name) = (port.path(), port.field("name").str());
                let (ip, host) = (
                    port.field("hostIP").str().to_owned(),
                    port.field("hostPort").int().unwrap_or(0),
                );
                let number = port.field("containerPort").int().unwrap_or(0);
                if !ip.is_empty() && host == 0 {
                    port_warnings.push(format!(
                        "{path}: hostIP set without hostPort: {{Name:{name} HostPort:0 ContainerPort:{number} Protocol:{} HostIP:{ip}}}",
                        port.field("protocol").str()
                    ));
                }
                let others = ports
                    .entry(format!("{number}/{}", port.field("protocol").str()))
                    .or_default();
                for (other, other_ip, other_host) in others.iter() {
                    if ip == *other_ip && host == *other_host {
                        port_warnings.push(format!("{path}: duplicate port definition with {other}"));
                    } else if host == 0 || *other_host == 0 {
                        port_warnings.push(format!("{path}: overlapping port definition with {other}"));
                    } else if host == *other_host && ip.is_empty() != other_ip.is_empty() {
                        port_warnings.push(format!(
                            "{path}: dangerously ambiguous port definition with {other}"
                        ));
                    }
                }
                others.push((path.clone(), ip, host));
                if name.is_empty() {
                    continue;
                }
                if let Some(other) = named.get(name) {
                    name_warnings.push(format!(
                        "{path}: duplicate port name {} with {other}, services and probes that select ports by name will use {other}",
                        quote(name)
                    ));
                } else {
                    named.insert(name.to_owned(), path);
                }
            }
        }
    }
    warnings.extend(port_warnings);
    warnings.extend(name_warnings);
}

fn fractions(container: &Node, warnings: &mut Vec<String>) {
    for resource in ["memory", "ephemeral-storage"] {
        for which in ["resources.limits", "resources.requests"] {
            whole_bytes(&container.field(which), &[resource], warnings);
        }
    }
}

fn whole_bytes(amounts: &Node, resources: &[&str], warnings: &mut Vec<String>) {
    for resource in resources {
        let amount = amounts.key(resource);
        if let Some(value) = quantity(amount.value).filter(|q| q.milli_value() % 1000 != 0) {
            let shown = quote(&value.to_string());
            warnings.push(format!(
                "{}: fractional byte value {shown} is invalid, must be an integer",
                amount.path()
            ));
        }
    }
}

fn environment(container: &Node, warnings: &mut Vec<String>) {
    let env = container.field("env");
    let mut seen = BTreeSet::new();
    for variable in env.items() {
        let (name, value) = (variable.field("name").str(), variable.field("value").str());
        if !seen.insert(name) {
            // A value that builds on the earlier one is meant.
            let reference = format!("$({name})");
            let builds_on = value != reference && value.contains(&reference);
            if variable.field("valueFrom").is_set() || !builds_on {
                warnings.push(format!(
                    "{}: hides previous definition of {}, which may be dropped when using apply",
                    variable.path(),
                    quote(name)
                ));
            }
        }
    }
}

fn pod_affinity(spec: &Node, warnings: &mut Vec<String>) {
    for kind in ["affinity.podAffinity", "affinity.podAntiAffinity"] {
        let affinity = spec.field(kind);
        let required = affinity.field("requiredDuringSchedulingIgnoredDuringExecution");
        for term in required.items() {
            let selector = term.field("labelSelector");
            if !selector.is_set() {
                warnings.push(format!("{}: {NO_SELECTOR}", selector.path()));
            }
        }
        let preferred = affinity.field("preferredDuringSchedulingIgnoredDuringExecution");
        for term in preferred.items() {
            let selector = term.field("podAffinityTerm.labelSelector");
            if !selector.is_set() {
                warnings.push(format!("{}: {NO_SELECTOR}", selector.path()));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn things_probably_not_meant() {
        let object = json!({"spec": {"template": {"spec": {
            "nodeSelector": {"beta.kubernetes.io/os": "linux"},
            "terminationGracePeriodSeconds": -1,
            "containers": [{"name": "c", "env": [{"name": "A", "value": "1"}, {"name": "A", "value": "2"}],
                "ports": [{"containerPort": 80, "protocol": "TCP"}, {"containerPort": 80, "protocol": "TCP"}],
                "resources": {"limits": {"memory": "100m"}}}]
        }}}});
        assert_eq!(
            template(&object, None, "spec.template"),
            [
                "spec.template.spec.nodeSelector[beta.kubernetes.io/os]: deprecated since v1.14; use \"kubernetes.io/os\" instead",
                "spec.template.spec.containers[0].resources.limits[memory]: fractional byte value \"100m\" is invalid, must be an integer",
                "spec.template.spec.containers[0].env[1]: hides previous definition of \"A\", which may be dropped when using apply",
                "spec.template.spec.containers[0].ports[1]: duplicate port definition with spec.template.spec.containers[0].ports[0]",
                "spec.template.spec.terminationGracePeriodSeconds: must be >= 0; negative values are invalid and will be treated as 1",
            ]
        );
        assert!(template(&object, Some(&object), "spec.template").is_empty());
    }
}
