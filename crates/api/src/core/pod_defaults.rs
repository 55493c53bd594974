//! Defaults of a pod spec wherever it stands: in pods and in every template.

use std::collections::BTreeMap;

use serde_json::{Map, Value, json};
use skiff_meta::quantity::Quantity;

use crate::node::{at, text};
use crate::walk::{self, each};

const CONTAINERS: [&str; 3] = ["containers", "initContainers", "ephemeralContainers"];
const PROBES: [&str; 3] = ["livenessProbe", "readinessProbe", "startupProbe"];

/// Defaults of a pod spec that templates share with pods.
pub fn pod_spec(spec: &mut Value) {
    walk::string(spec, "dnsPolicy", "ClusterFirst");
    walk::string(spec, "restartPolicy", "Always");
    walk::pointer(spec, "securityContext", json!({}));
    walk::pointer(spec, "terminationGracePeriodSeconds", 30);
    walk::string(spec, "schedulerName", "default-scheduler");
    sync_service_account(spec);
    each(spec, "volumes[]", &mut volume);
    for name in CONTAINERS {
        if let Some(Value::Array(list)) = spec.get_mut(name) {
            list.iter_mut().for_each(container);
        }
    }
    each(spec, "overhead", &mut resource_list);
    each(spec, "resources", &mut resources);
}

/// COMPAT: `serviceAccount` is the old name of `serviceAccountName`; upstream writes both.
pub fn sync_service_account(spec: &mut Value) {
    let name = match text(spec, "serviceAccountName") {
        "" => text(spec, "serviceAccount"),
        name => name,
    };
    if !name.is_empty() {
        let name = Value::from(name);
        walk::put(spec, "serviceAccountName", name.clone());
        walk::put(spec, "serviceAccount", name);
    }
}

/// Defaults that only pods get, not templates.
pub fn pod_only(spec: &mut Value) {
    for name in ["containers", "initContainers"] {
        each(spec, &format!("{name}[].resources"), &mut requests_from_limits);
    }
    pod_level_resources(spec);
    walk::pointer(spec, "enableServiceLinks", true);
    if at(spec, "hostNetwork").as_bool() == Some(true) {
        for name in ["containers", "initContainers"] {
            each(spec, &format!("{name}[].ports[]"), &mut |port| {
                let container_port = at(port, "containerPort").as_i64().unwrap_or(0);
                if container_port != 0 {
                    walk::number(port, "hostPort", container_port);
                }
            });
        }
    }
}

fn requests_from_limits(resources: &mut Value) {
    let Some(limits) = at(resources, "limits").as_object().cloned() else {
        return;
    };
    if limits.is_empty() {
        return;
    }
    if let Some(requests) = walk::object(resources, "requests") {
        for (name, quantity) in limits {
            walk::pointer(requests, &name, quantity);
        }
    }
}

pub(super) fn container(container: &mut Value) {
    let policy = if is_latest(text(container, "image")) {
        "Always"
    } else {
        "IfNotPresent"
    };
    walk::string(container, "imagePullPolicy", policy);
    walk::string(container, "terminationMessagePath", "/dev/termination-log");
    walk::string(container, "terminationMessagePolicy", "File");
    each(container, "ports[]", &mut |port| {
        walk::string(port, "protocol", "TCP")
    });
    each(container, "env[].valueFrom.fieldRef", &mut field_ref);
    each(container, "env[].valueFrom.fileKeyRef", &mut |file| {
        walk::pointer(file, "optional", false)
    });
    each(container, "resources", &mut resources);
    for name in PROBES {
        each(container, name, &mut probe);
    }
    each(container, "lifecycle.postStart.httpGet", &mut http_get);
    each(container, "lifecycle.preStop.httpGet", &mut http_get);
}

fn probe(probe: &mut Value) {
    walk::number(probe, "timeoutSeconds", 1);
    walk::number(probe, "periodSeconds", 10);
    walk::number(probe, "successThreshold", 1);
    walk::number(probe, "failureThreshold", 3);
    each(probe, "httpGet", &mut http_get);
    each(probe, "grpc", &mut |grpc| walk::pointer(grpc, "service", ""));
}

fn http_get(action: &mut Value) {
    walk::string(action, "path", "/");
    walk::string(action, "scheme", "HTTP");
}

fn field_ref(reference: &mut Value) {
    walk::string(reference, "apiVersion", "v1");
}

pub(super) fn resources(resources: &mut Value) {
    each(resources, "limits", &mut resource_list);
    each(resources, "requests", &mut resource_list);
}

/// Amounts finer than a thousandth are rounded up.
pub fn resource_list(list: &mut Value) {
    for value in list.as_object_mut().into_iter().flat_map(Map::values_mut) {
        let Some(text) = value.as_str() else { continue };
        if !text.contains(['n', 'u', '.', 'e', '-']) {
            continue;
        }
        if let Ok(quantity) = Quantity::parse(text) {
            let rounded = Quantity::from_millis(quantity.milli_value());
            if rounded != quantity {
                *value = Value::from(rounded.to_string());
            }
        }
    }
}

fn volume(volume: &mut Value) {
    let Some(map) = volume.as_object_mut() else { return };
    if !map.iter().any(|(k, v)| k != "name" && !v.is_null()) {
        map.insert("emptyDir".to_owned(), json!({}));
        return;
    }
    each(volume, "image", &mut |image| {
        let policy = if is_latest(text(image, "reference")) {
            "Always"
        } else {
            "IfNotPresent"
        };
        walk::string(image, "pullPolicy", policy);
    });
    each(volume, "hostPath", &mut |source| {
        walk::pointer(source, "type", "")
    });
    for name in ["secret", "configMap", "downwardAPI", "projected"] {
        each(volume, name, &mut |source| {
            walk::pointer(source, "defaultMode", 0o644)
        });
    }
    each(volume, "downwardAPI.items[].fieldRef", &mut field_ref);
    each(
        volume,
        "projected.sources[].downwardAPI.items[].fieldRef",
        &mut field_ref,
    );
    each(volume, "projected.sources[].serviceAccountToken", &mut |token| {
        walk::pointer(token, "expirationSeconds", 3600);
    });
    old_volume_sources(volume);
    each(volume, "ephemeral.volumeClaimTemplate", &mut |template| {
        walk::made(template, "spec", &mut claim_spec);
    });
}

/// Defaults of the in-tree storage systems, the same in pods and persistent volumes.
pub fn old_volume_sources(source: &mut Value) {
    each(source, "iscsi", &mut |iscsi| {
        walk::string(iscsi, "iscsiInterface", "default")
    });
    each(source, "rbd", &mut |rbd| {
        walk::string(rbd, "pool", "rbd");
        walk::string(rbd, "user", "admin");
        walk::string(rbd, "keyring", "/etc/ceph/keyring");
    });
    each(source, "azureDisk", &mut |disk| {
        walk::pointer(disk, "cachingMode", "ReadWrite");
        walk::pointer(disk, "fsType", "ext4");
        walk::pointer(disk, "readOnly", false);
        walk::pointer(disk, "kind", "Shared");
    });
    each(source, "scaleIO", &mut |scale| {
        walk::string(scale, "storageMode", "ThinProvisioned");
        walk::string(scale, "fsType", "xfs");
    });
}

/// Defaults of a claim spec, in claims and in templates.
pub fn claim_spec(spec: &mut Value) {
    walk::pointer(spec, "volumeMode", "Filesystem");
    each(spec, "resources", &mut resources);
}

/// Whether an image reference means the newest: tag `latest`, or neither tag nor digest.
pub fn is_latest(image: &str) -> bool {
    let (name, digest) = image.split_once('@').map_or((image, false), |(n, _)| (n, true));
    let last = name.rsplit('/').next().unwrap_or(name);
    let (name, tag) = match last.split_once(':') {
        Some((_, tag)) => (&name[..name.len() - tag.len() - 1], Some(tag)),
        None => (name, None),
    };
    // What is no image reference has no tag.
    is_image_name(name) && tag.map_or(!digest, |tag| tag == "latest")
}

/// The grammar of image names: perhaps a registry, and a path in lower case.
fn is_image_name(name: &str) -> bool {
    let path = match name.split_once('/') {
        Some((first, rest))
            if first.contains(['.', ':']) || first == "localhost" || first.contains(char::is_uppercase) =>
        {
            let (host, port) = first.split_once(':').map_or((first, None), |(h, p)| (h, Some(p)));
            let label = |label: &str| {
                let edge = |b: Option<&u8>| b.is_some_and(u8::is_ascii_alphanumeric);
                edge(label.as_bytes().first())
                    && edge(label.as_bytes().last())
                    && label.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-')
            };
            let good = first.starts_with('[')
                || host.split('.').all(label)
                    && port.is_none_or(|port| !port.is_empty() && port.bytes().all(|b| b.is_ascii_digit()));
            if !good {
                return false;
            }
            rest
        }
        _ => name,
    };
    // A name without a folder is one of the library.
    let folder = if path.len() == name.len() && !path.contains('/') {
        "library/".len()
    } else {
        0
    };
    if folder + path.len() > 255 {
        return false;
    }
    let hash = name.len() == 64 && name.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'));
    let component = |part: &str| {
        // Letters and digits, with one of these between them: `.`, `_`, `__` or any number of `-`.
        let word = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit();
        let mut rest = part.as_bytes();
        loop {
            let letters = rest.iter().take_while(|b| word(**b)).count();
            if letters == 0 {
                return false;
            }
            rest = &rest[letters..];
            let between = rest.iter().take_while(|b| !word(**b)).count();
            match &rest[..between] {
                [] => return rest.is_empty(),
                b"." | b"_" | b"__" => {}
                dashes if dashes.iter().all(|b| *b == b'-') => {}
                _ => return false,
            }
            rest = &rest[between..];
        }
    };
    !hash && path.split('/').all(component)
}

/// Pod-level requests follow from the containers' requests and the pod-level limits.
fn pod_level_resources(spec: &mut Value) {
    let resources = at(spec, "resources");
    let has = |name| at(resources, name).as_object().is_some_and(|m| !m.is_empty());
    if !has("limits") && !has("requests") {
        return;
    }
    let supported = |name: &str| name == "cpu" || name == "memory" || name.starts_with("hugepages-");
    let huge: Vec<(String, Value)> = aggregate(spec, "limits")
        .into_iter()
        .filter(|(k, _)| k.starts_with("hugepages-") && at(resources, "requests").get(k).is_none())
        .map(|(k, q)| (k, Value::from(q.to_string())))
        .collect();
    let requested = aggregate(spec, "requests");
    let Some(resources) = spec.get_mut("resources") else {
        return;
    };
    if !huge.is_empty()
        && let Some(limits) = walk::object(resources, "limits")
    {
        huge.into_iter().for_each(|(k, v)| walk::pointer(limits, &k, v));
    }
    let Some(limits) = at(resources, "limits")
        .as_object()
        .filter(|m| !m.is_empty())
        .cloned()
    else {
        return;
    };
    let mut defaults: Vec<(String, Value)> = requested
        .into_iter()
        .filter(|(k, _)| supported(k) && !k.starts_with("hugepages-"))
        .map(|(k, q)| (k, Value::from(q.to_string())))
        .collect();
    defaults.extend(limits.into_iter().filter(|(k, _)| supported(k)));
    if !defaults.is_empty()
        && let Some(requests) = walk::object(resources, "requests")
    {
        defaults
            .into_iter()
            .for_each(|(k, v)| walk::pointer(requests, &k, v));
    }
}

/// What all containers need together (`which` is `requests` or `limits`): the sum of those that run side by side, or the largest start-up step.
pub fn aggregate(spec: &Value, which: &str) -> BTreeMap<String, Quantity> {
    let amounts = |container: &Value| -> Vec<(String, Quantity)> {
        at(container, "resources")
            .get(which)
            .and_then(Value::as_object)
            .map_or_else(Vec::new, |m| {
                m.iter()
                    .filter_map(|(k, v)| Some((k.clone(), Quantity::parse(v.as_str()?).ok()?)))
                    .collect()
            })
    };
    let mut total = BTreeMap::<String, Quantity>::new();
    for container in crate::node::list(spec, "containers") {
        for (name, amount) in amounts(container) {
            total
                .entry(name)
                .and_modify(|q| *q = q.plus(&amount))
                .or_insert(amount);
        }
    }
    let mut sidecars = BTreeMap::<String, Quantity>::new();
    let mut steps = Vec::new();
    for container in crate::node::list(spec, "initContainers") {
        let restartable = text(container, "restartPolicy") == "Always";
        for (name, amount) in amounts(container) {
            if restartable {
                total
                    .entry(name.clone())
                    .and_modify(|q| *q = q.plus(&amount))
                    .or_insert(amount);
                sidecars
                    .entry(name)
                    .and_modify(|q| *q = q.plus(&amount))
                    .or_insert(amount);
            } else {
                let step = sidecars.get(&name).map_or(amount, |s| s.plus(&amount));
                steps.push((name, step));
            }
        }
    }
    for (name, step) in steps {
        total
            .entry(name)
            .and_modify(|q| *q = (*q).max(step))
            .or_insert(step);
    }
    total
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_pull_policy_follows_the_tag() {
        for (image, latest) in [
            ("nginx", true),
            ("nginx:latest", true),
            ("nginx:1.27", false),
            ("localhost:5000/nginx", true),
            ("localhost:5000/nginx:1", false),
            ("nginx@sha256:abc", false),
            ("", false),
        ] {
            assert_eq!(is_latest(image), latest, "{image}");
        }
    }

    #[test]
    fn a_small_pod_spec() {
        let mut spec = json!({
            "containers": [{"name": "a", "image": "nginx", "ports": [{"containerPort": 80}],
                "readinessProbe": {"httpGet": {"port": 80}}, "resources": {"limits": {"cpu": "0.0001"}}}],
            "volumes": [{"name": "v"}, {"name": "c", "configMap": {"name": "c"}}, {"name": "h", "hostPath": {"path": "/"}}]
        });
        pod_spec(&mut spec);
        pod_only(&mut spec);
        assert_eq!(
            spec,
            json!({
                "containers": [{"name": "a", "image": "nginx", "imagePullPolicy": "Always",
                    "ports": [{"containerPort": 80, "protocol": "TCP"}],
                    "readinessProbe": {"httpGet": {"port": 80, "path": "/", "scheme": "HTTP"}, "timeoutSeconds": 1,
                        "periodSeconds": 10, "successThreshold": 1, "failureThreshold": 3},
                    "resources": {"limits": {"cpu": "1m"}, "requests": {"cpu": "1m"}},
                    "terminationMessagePath": "/dev/termination-log", "terminationMessagePolicy": "File"}],
                "volumes": [{"name": "v", "emptyDir": {}}, {"name": "c", "configMap": {"name": "c", "defaultMode": 420}},
                    {"name": "h", "hostPath": {"path": "/", "type": ""}}],
                "dnsPolicy": "ClusterFirst", "restartPolicy": "Always", "schedulerName": "default-scheduler",
                "securityContext": {}, "terminationGracePeriodSeconds": 30, "enableServiceLinks": true
            })
        );
    }
}
