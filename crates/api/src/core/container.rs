//! Rules of the containers of a pod spec: names, ports, restarts, and what the files beside this one check.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::Value;
use skiff_meta::names;

use super::env::{env, env_from};
use super::mounts::{volume_devices, volume_mounts};
use super::probe::{lifecycle, probes};
use super::{resources, security};
use crate::errors::Errors;
use crate::node::{Node, list, text};
const NOT_FOR_INIT: &str = "may not be set for init containers without restartPolicy=Always";
const NOT_FOR_EPHEMERAL: &str = "cannot be set for an Ephemeral Container";

/// What the containers' rules need to know of the pod around them.
pub struct Pod<'a> {
    pub spec: &'a Node<'a, 'a>,
    /// Names of the volumes that are themselves valid, with their sources.
    pub volumes: BTreeMap<&'a str, &'a Value>,
    pub claims: BTreeSet<&'a str>,
}

impl Pod<'_> {
    pub(super) fn grace_period(&self) -> Option<i64> {
        self.spec.field("terminationGracePeriodSeconds").int()
    }

    fn host_users(&self) -> bool {
        self.spec
            .value
            .get("hostUsers")
            .and_then(Value::as_bool)
            .unwrap_or(true)
    }
}

pub fn containers(pod: &Pod, errors: &mut Errors) {
    let containers = pod.spec.field("containers");
    if containers.is_empty() {
        errors.required(&containers, "");
        return;
    }
    let mut seen = BTreeSet::new();
    for container in containers.items() {
        common(&container, pod, errors);
        let name = container.field("name");
        if !seen.insert(name.str()) {
            errors.duplicate(&name);
        }
        lifecycle(&container, pod, errors);
        probes(&container, pod, errors);
        restart_policy(&container, errors);
    }
    let mut ports = BTreeSet::new();
    for container in containers.items() {
        host_ports(&container, &mut ports, errors);
    }
}

pub fn init_containers(pod: &Pod, errors: &mut Errors) {
    let containers = pod.spec.field("initContainers");
    let mut seen: BTreeSet<&str> = list(pod.spec.value, "containers")
        .iter()
        .map(|c| text(c, "name"))
        .collect();
    for container in containers.items() {
        common(&container, pod, errors);
        let always = container.field("restartPolicy").str() == "Always";
        if container.field("restartPolicy").is_set() {
            restart_policy(&container, errors);
        } else if !container.field("restartPolicyRules").is_empty() {
            errors.required(
                &container.field("restartPolicy"),
                "must specify restartPolicy when restart rules are used",
            );
        }
        let name = container.field("name");
        if !name.str().is_empty() && !seen.insert(name.str()) {
            errors.duplicate(&name);
        }
        host_ports(&container, &mut BTreeSet::new(), errors);
        if always {
            lifecycle(&container, pod, errors);
            probes(&container, pod, errors);
        } else {
            for name in ["lifecycle", "livenessProbe", "readinessProbe", "startupProbe"] {
                let at = container.field(name);
                if at.is_set() {
                    errors.forbidden(&at, NOT_FOR_INIT);
                }
            }
            let policies = container.field("resizePolicy");
            for policy in policies.items() {
                let restart = policy.field("restartPolicy");
                if restart.str() == "RestartContainer" {
                    errors.invalid(
                        &restart,
                        "must not be set to 'RestartContainer' for non-sidecar initContainers",
                    );
                }
            }
        }
    }
}

pub fn ephemeral_containers(pod: &Pod, errors: &mut Errors) {
    let containers = pod.spec.field("ephemeralContainers");
    let others: BTreeSet<&str> = ["containers", "initContainers"]
        .iter()
        .flat_map(|n| list(pod.spec.value, n))
        .map(|c| text(c, "name"))
        .collect();
    let mut seen = others.clone();
    for container in containers.items() {
        common(&container, pod, errors);
        image_without_blanks(&container, errors);
        let name = container.field("name");
        if !seen.insert(name.str()) {
            errors.duplicate(&name);
        }
        let target = container.field("targetContainerName");
        if !target.str().is_empty() && !others.contains(target.str()) {
            errors.not_found(&target);
        }
        for name in [
            "ports",
            "resources",
            "resizePolicy",
            "restartPolicy",
            "restartPolicyRules",
            "livenessProbe",
            "readinessProbe",
            "startupProbe",
            "lifecycle",
        ] {
            let at = container.field(name);
            // What is no pointer to upstream is there only when something is in it.
            if at.is_set() && (name != "resources" || !crate::node::is_empty(at.value)) {
                errors.forbidden(&at, NOT_FOR_EPHEMERAL);
            }
        }
        let mounts = container.field("volumeMounts");
        for mount in mounts.items() {
            for name in ["subPath", "subPathExpr"] {
                let at = mount.field(name);
                if !at.str().is_empty() {
                    errors.forbidden(&at, NOT_FOR_EPHEMERAL);
                }
            }
        }
    }
}

/// COMPAT: only pods are held to this, templates are not.
pub fn image_without_blanks(container: &Node, errors: &mut Errors) {
    let image = container.field("image");
    if image.str().trim() != image.str() {
        errors.invalid(&image, "must not have leading or trailing whitespace");
    }
}

fn common(container: &Node, pod: &Pod, errors: &mut Errors) {
    let name = container.field("name");
    if errors.require(&name) {
        errors.rule(&name, names::dns1123_label(name.str()));
    }
    errors.require(&container.field("image"));
    errors.required_one_of(
        &container.field("terminationMessagePolicy"),
        &["File", "FallbackToLogsOnError"],
    );
    ports(&container.field("ports"), errors);
    env(&container.field("env"), errors);
    env_from(&container.field("envFrom"), errors);
    volume_mounts(container, pod, errors);
    volume_devices(container, pod, errors);
    errors.required_one_of(
        &container.field("imagePullPolicy"),
        &["Always", "IfNotPresent", "Never"],
    );
    resources::container_resources(&container.field("resources"), &pod.claims, errors);
    resize_policy(&container.field("resizePolicy"), pod, errors);
    security::container(&container.field("securityContext"), pod.host_users(), errors);
}

fn ports(ports: &Node, errors: &mut Errors) {
    let mut seen = BTreeSet::new();
    for port in ports.items() {
        let name = port.field("name");
        if !name.str().is_empty() {
            let complaints = names::port_name(name.str());
            if complaints.is_empty() && !seen.insert(name.str()) {
                errors.duplicate(&name);
            }
            errors.rule(&name, complaints);
        }
        let container_port = port.field("containerPort");
        match container_port.int().unwrap_or(0) {
            0 => errors.required(&container_port, ""),
            number => errors.rule(&container_port, names::port_number(number)),
        }
        let host_port = port.field("hostPort");
        if let Some(number) = host_port.int().filter(|n| *n != 0) {
            errors.rule(&host_port, names::port_number(number));
        }
        errors.required_one_of(&port.field("protocol"), &["SCTP", "TCP", "UDP"]);
    }
}

fn host_ports(container: &Node, seen: &mut BTreeSet<String>, errors: &mut Errors) {
    let ports = container.field("ports");
    for port in ports.items() {
        let host_port = port.field("hostPort");
        let Some(number) = host_port.int().filter(|n| *n != 0) else {
            continue;
        };
        let this = format!(
            "{}/{}/{number}",
            port.field("protocol").str(),
            port.field("hostIP").str()
        );
        if !seen.insert(this.clone()) {
            errors.duplicate_value(&host_port, this);
        }
    }
}

fn resize_policy(policies: &Node, pod: &Pod, errors: &mut Errors) {
    let never = pod.spec.field("restartPolicy").str() == "Never";
    let mut seen = BTreeSet::new();
    for policy in policies.items() {
        let (name, restart) = (policy.field("resourceName"), policy.field("restartPolicy"));
        if !seen.insert(name.str()) {
            errors.duplicate_value(&policy, name.str());
        }
        // COMPAT: the path is that of the list.
        errors.required_one_of(&policies.with(name.value), &["cpu", "memory"]);
        errors.required_one_of(
            &policies.with(restart.value),
            &["NotRequired", "RestartContainer"],
        );
        if never && restart.str() != "NotRequired" {
            errors.invalid_value(
                policies,
                restart.str(),
                "must be 'NotRequired' when pod `restartPolicy` is 'Never'",
            );
        }
    }
}

fn restart_policy(container: &Node, errors: &mut Errors) {
    let (policy, rules) = (
        container.field("restartPolicy"),
        container.field("restartPolicyRules"),
    );
    if policy.is_set() {
        errors.one_of(&policy, &["Always", "Never", "OnFailure"]);
    } else if !rules.is_empty() {
        errors.required(&policy, "must specify restartPolicy when restart rules are used");
    }
    if rules.len() > 20 {
        errors.too_many(&rules, 20);
    }
    for rule in rules.items() {
        errors.one_of(&rule.field("action"), &["Restart", "RestartAllContainers"]);
        let codes = rule.field("exitCodes");
        if codes.is_set() {
            errors.one_of(&codes.field("operator"), &["In", "NotIn"]);
            let values = codes.field("values");
            if values.len() > 255 {
                errors.too_many(&values, 255);
            }
        } else {
            errors.required(&codes, "must be specified");
        }
    }
}
