//! The rules of a pod spec wherever it stands. The order of checks is upstream's, since clients see
//! the errors in that order.

use std::collections::BTreeSet;

use serde_json::Value;
use skiff_meta::names;

use super::container::{self, Pod};
use super::{env, pod_annotations, resources, scheduling, security, volume, windows};
use crate::errors::Errors;
use crate::net;
use crate::node::{Node, list, text};
use crate::object_meta;

/// Checks the spec at this node. `is_pod` is false for templates, which are checked less strictly. What the `old`
/// spec already has of a feature that is off stays valid.
pub fn validate(spec: &Node, old: Option<&Value>, is_pod: bool, errors: &mut Errors) {
    let grace = spec.field("terminationGracePeriodSeconds");
    if !grace.is_set() {
        errors.required(&grace, "");
    }
    let volumes = volume::volumes(spec, errors);
    let claims = list(spec.value, "resourceClaims")
        .iter()
        .map(|c| text(c, "name"))
        .collect();
    resource_claims(spec, errors);
    let pod = Pod {
        spec,
        volumes,
        claims,
    };
    container::containers(&pod, errors);
    container::init_containers(&pod, errors);
    container::ephemeral_containers(&pod, errors);
    let pod_resources = spec.field("resources");
    if pod_resources.is_set() && spec.field("os.name").str() == "windows" {
        errors.forbidden(&pod_resources, "may not be set for a windows pod");
    } else if pod_resources.is_set() {
        resources::pod_resources(&pod_resources, &pod.claims, errors);
        resources::pod_resources_suffice(spec, errors);
    }
    if spec.field("hostNetwork").bool() {
        host_network(spec, is_pod, errors);
    }
    errors.required_one_of(&spec.field("restartPolicy"), &["Always", "OnFailure", "Never"]);
    errors.required_one_of(
        &spec.field("dnsPolicy"),
        &["ClusterFirstWithHostNet", "ClusterFirst", "Default", "None"],
    );
    scheduling::node_selector_map(&spec.field("nodeSelector"), errors);
    security::pod(spec, old, errors);
    scheduling::affinity(&spec.field("affinity"), errors);
    dns_config(spec, errors);
    gates(spec, errors);
    scheduling::topology_spread(&spec.field("topologySpreadConstraints"), errors);
    windows::host_process(spec, errors);
    security::host_users(spec, errors);
    security::host_name(spec, errors);
    named_references(spec, errors);
    windows::operating_system(spec, errors);
    scheduling_group(spec, errors);
    env::file_volumes(spec, errors);
}

/// The group of pods that this one is scheduled with.
fn scheduling_group(spec: &Node, errors: &mut Errors) {
    let group = spec.field("schedulingGroup");
    if !group.is_set() {
        return;
    }
    let name = group.field("podGroupName");
    if name.is_set() {
        errors.rule(&name, object_meta::dns_subdomain(name.str(), false));
    } else {
        errors.invalid_value(&name, Value::Null, "must specify one of: `podGroupName`");
    }
}

fn named_references(spec: &Node, errors: &mut Errors) {
    for name in ["serviceAccountName", "nodeName"] {
        let at = spec.field(name);
        if !at.str().is_empty() {
            errors.rule(&at, object_meta::dns_subdomain(at.str(), false));
        }
    }
    let deadline = spec.field("activeDeadlineSeconds");
    if deadline
        .int()
        .is_some_and(|n| !(1..=i64::from(i32::MAX)).contains(&n))
    {
        errors.invalid(&deadline, "must be between 1 and 2147483647, inclusive");
    }
    for name in ["hostname", "subdomain"] {
        let at = spec.field(name);
        if !at.str().is_empty() {
            errors.rule(&at, names::dns1123_label(at.str()));
        }
    }
    scheduling::tolerations(&spec.field("tolerations"), errors);
    let aliases = spec.field("hostAliases");
    for alias in aliases.items() {
        net::ip(&alias.field("ip"), errors);
        let hostnames = alias.field("hostnames");
        for name in hostnames.items() {
            errors.rule(&name, names::dns1123_subdomain(name.str()));
        }
    }
    for name in ["priorityClassName", "runtimeClassName"] {
        let at = spec.field(name);
        if !at.str().is_empty() || (name == "runtimeClassName" && at.is_set()) {
            errors.rule(&at, object_meta::dns_subdomain(at.str(), false));
        }
    }
    let policy = spec.field("preemptionPolicy");
    if policy.is_set() {
        errors.required_one_of(&policy, &["PreemptLowerPriority", "Never"]);
    }
    let overhead = spec.field("overhead");
    resources::overhead(&overhead, overhead.value, errors);
}

fn resource_claims(spec: &Node, errors: &mut Errors) {
    let claims = spec.field("resourceClaims");
    let mut seen = BTreeSet::new();
    for claim in claims.items() {
        let name = claim.field("name");
        if errors.require(&name) {
            if seen.contains(name.str()) {
                errors.duplicate(&name);
            } else {
                errors.rule(&name, names::dns1123_label(name.str()));
                seen.insert(name.str());
            }
        }
        let (direct, template) = (
            claim.field("resourceClaimName"),
            claim.field("resourceClaimTemplateName"),
        );
        match (direct.is_set(), template.is_set()) {
            (true, true) => errors.invalid(
                &claim,
                "at most one of `resourceClaimName` or `resourceClaimTemplateName` may be specified",
            ),
            (false, false) => errors.invalid(
                &claim,
                "must specify one of: `resourceClaimName`, `resourceClaimTemplateName`",
            ),
            _ => {}
        }
        for at in [direct, template] {
            if at.is_set() {
                errors.rule(&at, names::dns1123_subdomain(at.str()));
            }
        }
    }
}

fn host_network(spec: &Node, is_pod: bool, errors: &mut Errors) {
    let containers = spec.field("containers");
    for container in containers.items() {
        let ports = container.field("ports");
        for port in ports.items() {
            let host = port.field("hostPort").int().unwrap_or(0);
            if (is_pod || host != 0) && host != port.field("containerPort").int().unwrap_or(0) {
                errors.invalid_value(
                    &port.field("hostPort"),
                    host,
                    "must match `containerPort` when `hostNetwork` is true",
                );
            }
        }
    }
}

fn dns_config(spec: &Node, errors: &mut Errors) {
    let config = spec.field("dnsConfig");
    let servers = config.field("nameservers");
    if spec.field("dnsPolicy").str() == "None" {
        if !config.is_set() {
            return errors.required(&config, "must provide `dnsConfig` when `dnsPolicy` is None");
        }
        if servers.is_empty() {
            return errors.required(
                &servers,
                "must provide at least one DNS nameserver when `dnsPolicy` is None",
            );
        }
    }
    if servers.len() > 3 {
        errors.invalid(&servers, "must not have more than 3 nameservers");
    }
    for server in servers.items() {
        net::ip(&server, errors);
    }
    let searches = config.field("searches");
    if searches.len() > 32 {
        errors.invalid(&searches, "must not have more than 32 search paths");
    }
    let length: usize = searches.items().map(|s| s.len() + 1).sum();
    if length.saturating_sub(1) > 2048 {
        errors.invalid(
            &searches,
            "must not have more than 2048 characters (including spaces) in the search list",
        );
    }
    for search in searches.items() {
        let domain = search.str().strip_suffix('.').unwrap_or(search.str());
        // Underscores are allowed in search domains and nowhere else.
        if search.str() != "." && !names::dns1123_subdomain(&domain.replace('_', "a")).is_empty() {
            let rule = "a lowercase RFC 1123 subdomain must consist of lower case alphanumeric characters, '_', '-' or '.', and must start and end with an alphanumeric character";
            let label = "_?[a-z0-9]([-_a-z0-9]*[a-z0-9])?";
            errors.invalid_value(
                &search,
                domain,
                names::regex_error(rule, &format!("{label}(\\.{label})*"), &["example.com"]),
            );
        }
    }
    let options = config.field("options");
    for option in options.items() {
        if option.field("name").str().is_empty() {
            errors.required(&option, "must not be empty");
        }
    }
}

fn gates(spec: &Node, errors: &mut Errors) {
    let readiness = spec.field("readinessGates");
    for gate in readiness.items() {
        let kind = gate.field("conditionType");
        errors.rule(&kind, names::qualified_name(kind.str()));
    }
    let scheduling = spec.field("schedulingGates");
    let mut seen = BTreeSet::new();
    for gate in scheduling.items() {
        let name = gate.field("name").str().to_owned();
        for complaint in names::qualified_name(&name) {
            errors.invalid_value(&gate, name.as_str(), complaint);
        }
        if seen.contains(&name) {
            errors.duplicate_value(&gate, name.as_str());
        }
        seen.insert(name);
    }
}

/// A template of pods: labels, annotations and spec.
pub fn template(template: &Node, errors: &mut Errors) {
    template_metadata(template, errors);
    let given = template.field("metadata.annotations");
    let spec = template.field("spec");
    validate(&spec, None, false, errors);
    pod_annotations::agree(given.value, &spec, errors);
    let ephemeral = template.field("spec.ephemeralContainers");
    if !ephemeral.is_empty() {
        errors.forbidden(&ephemeral, "ephemeral containers not allowed in pod template");
    }
}

/// The labels and annotations of a template.
pub fn template_metadata(template: &Node, errors: &mut Errors) {
    // COMPAT: upstream leaves `metadata` out of these two paths.
    let (labels, annotations) = (template.field("labels"), template.field("annotations"));
    object_meta::labels(&labels.with(template.field("metadata.labels").value), errors);
    let given = annotations.with(template.field("metadata.annotations").value);
    object_meta::annotations(&given, errors);
    pod_annotations::validate(&given, template.field("spec").value, None, errors);
}

/// A selector that is wrong in itself is refused once more, with these words, and the template is not looked at.
pub fn usable_selector(selector: &Node, detail: &str, errors: &mut Errors) -> bool {
    let bad = object_meta::selector_is_bad(selector.value);
    if bad {
        errors.invalid(selector, detail);
    }
    !bad
}

/// A template that must be chosen by the selector of what owns it.
pub fn selected_template(at: &Node, selector: &Value, errors: &mut Errors) {
    let matches = skiff_meta::selector::LabelSelector::from_value(selector)
        .is_ok_and(|s| s.is_empty() || s.matches_value(at.field("metadata.labels").value));
    if !matches {
        let labels = at.field("metadata.labels");
        let shown = labels.value.clone();
        errors.invalid_value(&labels, shown, "`selector` does not match template `labels`");
    }
    template(at, errors);
}

/// The only restart policy that makes sense under a controller that replaces pods.
pub fn always_restart(template: &Node, kind: &str, errors: &mut Errors) {
    let policy = template.field("spec.restartPolicy");
    errors.one_of(&policy, &["Always"]);
    let deadline = template.field("spec.activeDeadlineSeconds");
    if deadline.is_set() {
        errors.forbidden(
            &deadline,
            format!("activeDeadlineSeconds in {kind} is not Supported"),
        );
    }
}
