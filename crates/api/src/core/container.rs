//! Rules of the containers of a pod spec: names, ports, environment, mounts, probes, life cycle.

use std::collections::BTreeSet;

use serde_json::Value;
use skiff_meta::{names, quantity::Quantity};

use super::{resources, security};
use crate::errors::Errors;
use crate::node::{Node, list, text};
use crate::object_meta;

const RELAXED_ENV: &str =
    "a valid environment variable name must consist only of printable ASCII characters other than '='";
const HANDLERS: [&str; 5] = ["exec", "httpGet", "tcpSocket", "grpc", "sleep"];
const NOT_FOR_INIT: &str = "may not be set for init containers without restartPolicy=Always";
const NOT_FOR_EPHEMERAL: &str = "cannot be set for an Ephemeral Container";

/// What the containers' rules need to know of the pod around them.
pub struct Pod<'a> {
    pub spec: &'a Node<'a, 'a>,
    /// Names of the volumes that are themselves valid, with their sources.
    pub volumes: Vec<(&'a str, &'a Value)>,
    pub claims: Vec<&'a str>,
}

impl Pod<'_> {
    fn grace_period(&self) -> Option<i64> {
        self.spec.field("terminationGracePeriodSeconds").int()
    }

    fn host_users(&self) -> bool {
        self.spec.value.get("hostUsers").and_then(Value::as_bool).unwrap_or(true)
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
    let mut seen: BTreeSet<&str> = list(pod.spec.value, "containers").iter().map(|c| text(c, "name")).collect();
    for container in containers.items() {
        common(&container, pod, errors);
        let always = container.field("restartPolicy").str() == "Always";
        restart_policy(&container, errors);
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
                    errors.invalid(&restart, "must not be set to 'RestartContainer' for non-sidecar initContainers");
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
        for name in
            ["ports", "livenessProbe", "readinessProbe", "startupProbe", "lifecycle", "resizePolicy", "restartPolicy"]
        {
            let at = container.field(name);
            if at.is_set() && !(at.value.is_array() && at.is_empty()) {
                errors.forbidden(&at, NOT_FOR_EPHEMERAL);
            }
        }
        let resources = container.field("resources");
        if !crate::node::is_empty(resources.value) {
            errors.forbidden(&resources, NOT_FOR_EPHEMERAL);
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
    errors.required_one_of(&container.field("terminationMessagePolicy"), &["File", "FallbackToLogsOnError"]);
    ports(&container.field("ports"), errors);
    env(&container.field("env"), errors);
    env_from(&container.field("envFrom"), errors);
    volume_mounts(container, pod, errors);
    volume_devices(container, pod, errors);
    errors.required_one_of(&container.field("imagePullPolicy"), &["Always", "IfNotPresent", "Never"]);
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
        let Some(number) = host_port.int().filter(|n| *n != 0) else { continue };
        let this = format!("{}/{}/{number}", port.field("protocol").str(), port.field("hostIP").str());
        if !seen.insert(this.clone()) {
            errors.duplicate_value(&host_port, this);
        }
    }
}

fn env_name(text: &str) -> Vec<String> {
    if text.chars().any(|c| !(' '..='~').contains(&c) || c == '=') { vec![RELAXED_ENV.to_owned()] } else { Vec::new() }
}

fn env(env: &Node, errors: &mut Errors) {
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
                "metadata.name", "metadata.namespace", "metadata.uid", "spec.nodeName", "spec.serviceAccountName",
                "status.hostIP", "status.hostIPs", "status.podIP", "status.podIPs",
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
        0 => "must specify one of: `fieldRef`, `resourceFieldRef`, `configMapKeyRef`, `secretKeyRef` or `fileKeyRef`",
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
            "metadata.annotations" => errors.rule(reference, names::qualified_name(&subscript.to_lowercase())),
            "metadata.labels" => errors.rule(reference, names::qualified_name(subscript)),
            _ => errors.invalid(
                &path,
                format!("error converting fieldPath: field label does not support subscript: {text}"),
            ),
        }
    } else if !convertible(text) {
        errors.invalid(&path, format!("error converting fieldPath: field label not supported: {text}"));
    } else if !supported.contains(&text) {
        errors.not_supported(&path, supported);
    }
}

fn convertible(path: &str) -> bool {
    matches!(
        path,
        "metadata.annotations" | "metadata.labels" | "metadata.name" | "metadata.namespace" | "metadata.uid"
            | "spec.nodeName" | "spec.restartPolicy" | "spec.serviceAccountName" | "spec.schedulerName"
            | "status.phase" | "status.hostIP" | "status.hostIPs" | "status.podIP" | "status.podIPs" | "spec.host"
    )
}

pub fn resource_field_ref(reference: &Node, volume: bool, errors: &mut Errors) {
    let resource = reference.field("resource");
    let name = resource.str();
    let huge = name.starts_with("limits.hugepages-") || name.starts_with("requests.hugepages-");
    if volume && reference.field("containerName").str().is_empty() {
        errors.required(&reference.field("containerName"), "");
    } else if name.is_empty() {
        errors.required(&resource, "");
    } else if !huge {
        errors.one_of(
            &resource,
            &[
                "limits.cpu", "limits.ephemeral-storage", "limits.memory", "requests.cpu",
                "requests.ephemeral-storage", "requests.memory",
            ],
        );
    }
    let divisor = reference.field("divisor");
    let Some(amount) = divisor.value.as_str().and_then(|t| Quantity::parse(t).ok()).filter(|q| !q.is_zero()) else {
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
            &["1", "1k", "1M", "1G", "1T", "1P", "1E", "1Ki", "1Mi", "1Gi", "1Ti", "1Pi", "1Ei"],
            "1, 1k, 1M, 1G, 1T, 1P, 1E, 1Ki, 1Mi, 1Gi, 1Ti, 1Pi, 1Ei",
            what,
        )
    };
    if !allowed.contains(&amount.as_str()) {
        let detail = format!("only divisor's values {shown} are supported with the {what} resource");
        errors.invalid_value(&divisor, name, detail);
    }
}

fn env_from(sources: &Node, errors: &mut Errors) {
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
            _ => errors.invalid_value(sources, "", "may not have more than one field specified at a time"),
        }
    }
}

pub fn no_backsteps(path: &Node, errors: &mut Errors) {
    if path.str().split('/').any(|part| part == "..") {
        errors.invalid(path, "must not contain '..'");
    }
}

pub fn descending_path(path: &Node, errors: &mut Errors) {
    if path.str().starts_with('/') {
        errors.invalid(path, "must be a relative path");
    }
    no_backsteps(path, errors);
}

pub fn local_path(path: &Node, errors: &mut Errors) {
    descending_path(path, errors);
    if path.str().starts_with("..") && !path.str().starts_with("../") {
        errors.invalid(path, "must not start with '..'");
    }
}

fn volume_mounts(container: &Node, pod: &Pod, errors: &mut Errors) {
    let mounts = container.field("volumeMounts");
    let devices = list(container.value, "volumeDevices");
    let mut points = BTreeSet::new();
    for mount in mounts.items() {
        let (name, path) = (mount.field("name"), mount.field("mountPath"));
        errors.require(&name);
        if !pod.volumes.iter().any(|(volume, _)| *volume == name.str()) {
            errors.not_found(&name);
        }
        errors.require(&path);
        if !points.insert(path.str()) {
            errors.invalid(&path, "must be unique");
        }
        if devices.iter().any(|d| text(d, "name") == name.str()) {
            errors.invalid(&name, "must not already exist in volumeDevices");
        }
        if devices.iter().any(|d| text(d, "devicePath") == path.str()) {
            errors.invalid(&path, "must not already exist as a path in volumeDevices");
        }
        // COMPAT: upstream names these fields without the index of the mount.
        let (sub_path, expression) = (mount.field("subPath"), mount.field("subPathExpr"));
        if !sub_path.str().is_empty() {
            descending_path(&mounts.field("subPath").with(sub_path.value), errors);
        }
        if !expression.str().is_empty() {
            if !sub_path.str().is_empty() {
                errors.invalid(&expression, "subPathExpr and subPath are mutually exclusive");
            }
            descending_path(&mounts.field("subPathExpr").with(expression.value), errors);
        }
        let propagation = mount.field("mountPropagation");
        if propagation.is_set() {
            let at = mounts.field("mountPropagation");
            let at = at.with(propagation.value);
            errors.one_of(&at, &["Bidirectional", "HostToContainer", "None"]);
            let privileged = container.field("securityContext.privileged").bool();
            if propagation.str() == "Bidirectional" && !privileged {
                errors
                    .forbidden(&at, "Bidirectional mount propagation is available only to privileged containers");
            }
        }
        let recursive = mount.field("recursiveReadOnly");
        if recursive.is_set() {
            let at = mounts.field("recursiveReadOnly");
            let at = at.with(recursive.value);
            errors.one_of(&at, &["Disabled", "Enabled", "IfPossible"]);
            if ["Enabled", "IfPossible"].contains(&recursive.str()) {
                if !mount.field("readOnly").bool() {
                    errors.forbidden(&at, "may only be specified when readOnly is true");
                }
                if !["", "None"].contains(&propagation.str()) {
                    errors.forbidden(&at, "may only be specified when mountPropagation is None or not specified");
                }
            }
        }
    }
}

fn volume_devices(container: &Node, pod: &Pod, errors: &mut Errors) {
    let devices = container.field("volumeDevices");
    let mounts = list(container.value, "volumeMounts");
    let (mut names, mut paths) = (BTreeSet::new(), BTreeSet::new());
    for device in devices.items() {
        let (name, path) = (device.field("name"), device.field("devicePath"));
        errors.require(&name);
        if !name.str().is_empty() && !names.insert(name.str()) {
            errors.invalid(&name, "must be unique");
        }
        match pod.volumes.iter().find(|(volume, _)| *volume == name.str()) {
            None => errors.not_found(&name),
            Some((_, source)) => {
                if source.get("persistentVolumeClaim").is_none() && source.get("ephemeral").is_none() {
                    errors.invalid(
                        &name,
                        "can only use volume source type of PersistentVolumeClaim or Ephemeral for block mode",
                    );
                }
            }
        }
        errors.require(&path);
        if paths.contains(path.str()) {
            errors.invalid(&path, "must be unique");
        }
        if path.str().split('/').any(|part| part == "..") {
            errors.invalid(&path, "can not contain backsteps ('..')");
        } else {
            paths.insert(path.str());
        }
        if mounts.iter().any(|m| text(m, "name") == name.str()) {
            errors.invalid(&name, "must not already exist in volumeMounts");
        }
        if mounts.iter().any(|m| text(m, "mountPath") == path.str()) {
            errors.invalid(&path, "must not already exist as a path in volumeMounts");
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
        errors.required_one_of(&policies.with(restart.value), &["NotRequired", "RestartContainer"]);
        if never && restart.str() != "NotRequired" {
            errors
                .invalid_value(policies, restart.str(), "must be 'NotRequired' when pod `restartPolicy` is 'Never'");
        }
    }
}

fn restart_policy(container: &Node, errors: &mut Errors) {
    let (policy, rules) = (container.field("restartPolicy"), container.field("restartPolicyRules"));
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

fn lifecycle(container: &Node, pod: &Pod, errors: &mut Errors) {
    let lifecycle = container.field("lifecycle");
    for name in ["postStart", "preStop"] {
        let at = lifecycle.field(name);
        if at.is_set() {
            handler(&at, pod, errors);
        }
    }
    let signal = lifecycle.field("stopSignal");
    if signal.is_set() {
        match pod.spec.field("os.name").str() {
            "" => errors.forbidden(&signal, "may not be set for containers with empty `spec.os.name`"),
            "windows" => errors.one_of(&signal, &["SIGKILL", "SIGTERM"]),
            _ => {
                if !signal.str().starts_with("SIG") {
                    errors.not_supported(&signal, &["SIGHUP", "SIGINT", "SIGKILL", "SIGQUIT", "SIGTERM", "SIGUSR1", "SIGUSR2"]);
                }
            }
        }
    }
}

fn probes(container: &Node, pod: &Pod, errors: &mut Errors) {
    for name in ["livenessProbe", "readinessProbe", "startupProbe"] {
        let probe = container.field(name);
        if !probe.is_set() {
            continue;
        }
        handler(&probe, pod, errors);
        for field in ["initialDelaySeconds", "timeoutSeconds", "periodSeconds", "successThreshold", "failureThreshold"] {
            errors.non_negative(&probe.field(field));
        }
        let grace = probe.field("terminationGracePeriodSeconds");
        if grace.int().is_some_and(|n| n <= 0) {
            errors.invalid(&grace, "must be greater than 0");
        }
        if name == "readinessProbe" {
            if grace.is_set() {
                errors.invalid(&grace, "must not be set for readinessProbes");
            }
        } else {
            let success = probe.field("successThreshold");
            if success.int().unwrap_or(0) != 1 {
                errors.invalid_value(&success, success.int().unwrap_or(0), "must be 1");
            }
        }
    }
}

fn handler(at: &Node, pod: &Pod, errors: &mut Errors) {
    let mut found = false;
    for name in HANDLERS {
        let action = at.field(name);
        if !action.is_set() {
            continue;
        }
        if found {
            errors.forbidden(&action, "may not specify more than 1 handler type");
            continue;
        }
        found = true;
        match name {
            "exec" => drop(errors.require(&action.field("command"))),
            "httpGet" => {
                errors.require(&action.field("path"));
                port(&action.field("port"), errors);
                errors.one_of(&action.field("scheme"), &["HTTP", "HTTPS"]);
                let headers = action.field("httpHeaders");
                for header in headers.items() {
                    let name = header.field("name");
                    if name.is_empty() || !name.str().bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-') {
                        let rule = "a valid HTTP header must consist of alphanumeric characters or '-'";
                        let detail = names::regex_error(rule, "[-A-Za-z0-9]+", &["X-Header-Name"]);
                        errors.invalid_value(&headers, name.str(), detail);
                    }
                }
            }
            "sleep" => {
                let seconds = action.field("seconds").int().unwrap_or(0);
                if let Some(grace) = pod.grace_period()
                    && (seconds < 0 || seconds > grace)
                {
                    let detail =
                        format!("must be non-negative and less than terminationGracePeriodSeconds ({grace})");
                    errors.invalid_value(&action, seconds, detail);
                }
            }
            _ => port(&action.field("port"), errors),
        }
    }
    if !found {
        errors.required(at, "must specify a handler type");
    }
}

/// A port by number or by name.
pub fn port(port: &Node, errors: &mut Errors) {
    match port.value {
        Value::String(name) => errors.rule(port, names::port_name(name)),
        _ => {
            let number = port.int().unwrap_or(0);
            for complaint in names::port_number(number) {
                errors.invalid_value(port, number, complaint);
            }
        }
    }
}
