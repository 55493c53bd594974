//! The downward API: what a pod may learn of itself through `fieldRef` and `resourceFieldRef`. Pure.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use k8s_openapi::api::core::v1::{Container, Pod, ResourceFieldSelector};

use crate::resources::{limit, milli_value, request, value};

/// What the node knows that the pod object may not say yet.
#[derive(Clone, Debug, Default)]
pub struct NodeFacts {
    pub host_ips: Vec<String>,
    pub pod_ips: Vec<String>,
    pub allocatable_cpu_milli: i64,
    pub allocatable_memory: i64,
    pub allocatable_ephemeral_storage: i64,
    /// The node's labels; `None` until the Node object is known.
    pub labels: Option<BTreeMap<String, String>>,
}

#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum FieldError {
    #[error("unsupported fieldPath: {0}")]
    Unsupported(String),
    #[error("container {0} not found")]
    NoContainer(String),
    #[error("unsupported container resource: {0}")]
    UnsupportedResource(String),
}

/// The value of a field of the pod as text.
pub fn field_value(pod: &Pod, path: &str, facts: &NodeFacts) -> Result<String, FieldError> {
    let meta = &pod.metadata;
    let spec = pod.spec.as_ref();
    if let Some((map, key)) = subscript(path) {
        let found = match map {
            "metadata.annotations" => meta.annotations.as_ref(),
            "metadata.labels" => meta.labels.as_ref(),
            _ => return Err(FieldError::Unsupported(path.to_owned())),
        };
        return Ok(found.and_then(|m| m.get(key)).cloned().unwrap_or_default());
    }
    Ok(match path {
        "metadata.name" => meta.name.clone().unwrap_or_default(),
        "metadata.namespace" => meta.namespace.clone().unwrap_or_default(),
        "metadata.uid" => meta.uid.clone().unwrap_or_default(),
        "metadata.labels" => format_map(meta.labels.as_ref()),
        "metadata.annotations" => format_map(meta.annotations.as_ref()),
        "spec.nodeName" => spec.and_then(|s| s.node_name.clone()).unwrap_or_default(),
        "spec.serviceAccountName" => spec
            .and_then(|s| s.service_account_name.clone())
            .unwrap_or_default(),
        "status.hostIP" => facts.host_ips.first().cloned().unwrap_or_default(),
        "status.hostIPs" => facts.host_ips.join(","),
        "status.podIP" => facts.pod_ips.first().cloned().unwrap_or_default(),
        "status.podIPs" => facts.pod_ips.join(","),
        _ => return Err(FieldError::Unsupported(path.to_owned())),
    })
}

/// `metadata.labels['key']` in its two parts.
fn subscript(path: &str) -> Option<(&str, &str)> {
    let inner = path.strip_suffix("']")?;
    inner.split_once("['")
}

/// One `key="value"` a line, sorted, quoted as Go's `%q` does it.
fn format_map(map: Option<&BTreeMap<String, String>>) -> String {
    let mut lines: Vec<String> = map
        .into_iter()
        .flatten()
        .map(|(k, v)| format!("{k}={}", go_quote(v)))
        .collect();
    lines.sort();
    lines.join("\n")
}

/// A string as Go's `%q` writes it; clients parse this file.
pub fn go_quote(text: &str) -> String {
    let mut out = String::with_capacity(text.len() + 2);
    out.push('"');
    for c in text.chars() {
        match c {
            '"' => out.push_str("\\\""),
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            '\u{7}' => out.push_str("\\a"),
            '\u{8}' => out.push_str("\\b"),
            '\u{c}' => out.push_str("\\f"),
            '\u{b}' => out.push_str("\\v"),
            c if (c as u32) < 0x20 || c as u32 == 0x7f => {
                let _ = write!(out, "\\x{:02x}", c as u32);
            }
            c => out.push(c),
        }
    }
    out.push('"');
    out
}

/// The value of a container's resource, divided by the divisor and rounded up. A limit that is not set is
/// what the node could give.
pub fn resource_value(
    pod: &Pod,
    selector: &ResourceFieldSelector,
    container: Option<&Container>,
    facts: &NodeFacts,
) -> Result<String, FieldError> {
    let name = selector.container_name.as_deref().filter(|n| !n.is_empty());
    let named =
        name.map(|name| find_container(pod, name).ok_or_else(|| FieldError::NoContainer(name.to_owned())));
    let container = match named {
        Some(found) => found?,
        None => container.ok_or_else(|| FieldError::NoContainer(String::new()))?,
    };
    let resources = container.resources.as_ref();
    let divisor = selector
        .divisor
        .as_ref()
        .map(|d| i128::from(milli_value(d)))
        .filter(|d| *d > 0)
        .unwrap_or(1000);
    let (kind, resource) = selector.resource.split_once('.').unwrap_or(("", ""));
    let allocatable = match resource {
        "cpu" => i128::from(facts.allocatable_cpu_milli),
        "memory" => i128::from(facts.allocatable_memory) * 1000,
        "ephemeral-storage" => i128::from(facts.allocatable_ephemeral_storage) * 1000,
        r if r.starts_with("hugepages-") => 0,
        _ => return Err(FieldError::UnsupportedResource(selector.resource.clone())),
    };
    let quantity = match kind {
        "limits" => limit(resources, resource),
        "requests" => request(resources, resource),
        _ => return Err(FieldError::UnsupportedResource(selector.resource.clone())),
    };
    let milli = match (quantity, kind) {
        (Some(q), _) if resource == "cpu" => i128::from(milli_value(q)),
        (Some(q), _) => i128::from(value(q)) * 1000,
        (None, "limits") => allocatable,
        // A request that is not set is the limit if there is one, else nothing.
        (None, _) => 0,
    };
    Ok((milli / divisor + i128::from(milli % divisor > 0)).to_string())
}

pub fn find_container<'a>(pod: &'a Pod, name: &str) -> Option<&'a Container> {
    let spec = pod.spec.as_ref()?;
    spec.containers
        .iter()
        .chain(spec.init_containers.iter().flatten())
        .find(|c| c.name == name)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn pod() -> Pod {
        serde_json::from_value(json!({
            "metadata": {"name": "p", "namespace": "ns", "uid": "u",
                "labels": {"b": "2", "a": "1"}, "annotations": {"n": "x\"y\nz"}},
            "spec": {"nodeName": "n1", "serviceAccountName": "sa", "containers": [
                {"name": "c", "resources": {"limits": {"cpu": "1500m"}, "requests": {"memory": "33Mi"}}}]}}))
        .unwrap()
    }

    #[test]
    fn fields() {
        let facts = NodeFacts {
            host_ips: vec!["10.0.0.1".into()],
            pod_ips: vec!["10.1.0.2".into(), "fd00::2".into()],
            ..Default::default()
        };
        let check = |path: &str, expected: &str| {
            assert_eq!(field_value(&pod(), path, &facts).as_deref(), Ok(expected))
        };
        check("metadata.name", "p");
        check("metadata.labels", "a=\"1\"\nb=\"2\"");
        check("metadata.labels['b']", "2");
        check("metadata.annotations", "n=\"x\\\"y\\nz\"");
        check("metadata.annotations['none']", "");
        check("status.hostIP", "10.0.0.1");
        check("status.podIPs", "10.1.0.2,fd00::2");
        check("spec.serviceAccountName", "sa");
        assert!(field_value(&pod(), "spec.restartPolicy", &facts).is_err());
    }

    #[test]
    fn resources() {
        let facts = NodeFacts {
            allocatable_memory: 8 << 30,
            ..Default::default()
        };
        let check = |resource: &str, divisor: &str, expected: &str| {
            let selector = serde_json::from_value(
                json!({"containerName": "c", "resource": resource, "divisor": divisor}),
            )
            .unwrap();
            assert_eq!(
                resource_value(&pod(), &selector, None, &facts).as_deref(),
                Ok(expected),
                "{resource}"
            );
        };
        check("limits.cpu", "0", "2");
        check("limits.cpu", "1m", "1500");
        check("requests.memory", "1Mi", "33");
        check("requests.memory", "1", "34603008");
        check("limits.memory", "1Gi", "8");
        check("requests.cpu", "1", "0");
    }
}
