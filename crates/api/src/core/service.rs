//! Services. Addresses and ports are allocated by the registry, between `default` and `begin_create`;
//! this file keeps `clusterIP` and `clusterIPs` in step and drops what a change of type leaves behind.

use std::collections::BTreeSet;

use serde_json::{Value, json};

use super::service_rules::{load_balancer_status, service, validate_update};
use crate::errors::Errors;
use crate::kind::{AGE, Again, BASE, Kind, NAME, text as column, wide};
use crate::node::{Node, at, list, number, text};
use crate::row::{self, or_none};
use crate::{object_meta, strategy, walk};

pub static SERVICE: Kind = Kind {
    kind: "Service",
    default,
    prepare_create: |object| {
        strategy::create_without_status(object);
        normalize_cluster_ips(object, None);
        drop_type_dependent_fields(object, None);
    },
    prepare_update: |new, old| {
        strategy::update_keep_status(new, old);
        patch_allocated_values(new, old);
        normalize_cluster_ips(new, Some(old));
        drop_type_dependent_fields(new, Some(old));
    },
    validate: |object| {
        let mut errors = Errors::new();
        service(&Node::root(object), &mut errors);
        errors.into_vec()
    },
    validate_update,
    validate_status_update: |new, _| {
        let mut errors = Errors::new();
        let root = Node::root(new);
        load_balancer_status(&root.field("status.loadBalancer"), &mut errors);
        errors.into_vec()
    },
    selectable: |object| {
        vec![
            ("spec.clusterIP", text(object, "spec.clusterIP").to_owned()),
            ("spec.type", text(object, "spec.type").to_owned()),
        ]
    },
    columns: &[
        NAME,
        column("Type"),
        column("Cluster-IP"),
        column("External-IP"),
        column("Port(s)"),
        AGE,
        wide("Selector"),
    ],
    row: service_row,
    has_status: true,
    warnings: |new, _| {
        let mut warnings = Vec::new();
        if at(new, "metadata.annotations")
            .get("service.kubernetes.io/topology-aware-hints")
            .is_some()
        {
            warnings.push("annotation service.kubernetes.io/topology-aware-hints is deprecated, please use service.kubernetes.io/topology-mode instead".to_owned());
        }
        let external = !list(new, "spec.externalIPs").is_empty();
        if is_headless(new) {
            let ignored = |field: &str| format!("{field} is ignored for headless services");
            if !text(new, "spec.loadBalancerIP").is_empty() {
                warnings.push(ignored("spec.loadBalancerIP"));
            }
            if external {
                warnings.push(ignored("spec.externalIPs"));
            }
            if text(new, "spec.sessionAffinity") != "None" {
                warnings.push(ignored("spec.SessionAffinity"));
            }
        } else if external && text(new, "spec.type") != "ExternalName" {
            warnings.push(
                "spec.externalIPs is deprecated and may no longer be implemented in some clusters".to_owned(),
            );
        }
        let external_name = text(new, "spec.type") == "ExternalName";
        if external_name && external {
            warnings.push("spec.externalIPs is ignored when spec.type is \"ExternalName\"".to_owned());
        }
        if !external_name && !text(new, "spec.externalName").is_empty() {
            warnings.push("spec.externalName is ignored when spec.type is not \"ExternalName\"".to_owned());
        }
        if text(new, "spec.trafficDistribution") == "PreferClose" {
            warnings.push(
                "spec.trafficDistribution: \"PreferClose\" is deprecated; use \"PreferSameZone\"".to_owned(),
            );
        }
        warnings
    },
    name_rule: object_meta::dns_label,
    allow_create_on_update: true,
    update_again: Again::Change,
    ..BASE
};

fn default(_: &str, object: &mut Value) {
    let Some(spec) = walk::object(object, "spec") else {
        return;
    };
    walk::string(spec, "sessionAffinity", "None");
    match text(spec, "sessionAffinity") {
        "None" => walk::remove(spec, "sessionAffinityConfig"),
        "ClientIP" if at(spec, "sessionAffinityConfig.clientIP.timeoutSeconds").is_null() => {
            walk::put(
                spec,
                "sessionAffinityConfig",
                json!({"clientIP": {"timeoutSeconds": 10800}}),
            );
        }
        _ => {}
    }
    walk::string(spec, "type", "ClusterIP");
    walk::each(spec, "ports[]", &mut |port| {
        walk::string(port, "protocol", "TCP");
        let target = at(port, "targetPort");
        if target.is_null() || target.as_i64() == Some(0) || target.as_str() == Some("") {
            walk::put(port, "targetPort", json!(number(port, "port")));
        }
    });
    if externally_accessible(spec) {
        walk::string(spec, "externalTrafficPolicy", "Cluster");
    }
    let kind = text(spec, "type").to_owned();
    if ["NodePort", "LoadBalancer", "ClusterIP"].contains(&kind.as_str()) {
        walk::pointer(spec, "internalTrafficPolicy", "Cluster");
    }
    if kind == "LoadBalancer" {
        walk::pointer(spec, "allocateLoadBalancerNodePorts", true);
        walk::each(object, "status.loadBalancer.ingress[]", &mut |ingress| {
            if !text(ingress, "ip").is_empty() {
                walk::pointer(ingress, "ipMode", "VIP");
            }
        });
    }
}

pub(super) fn externally_accessible(spec: &Value) -> bool {
    match text(spec, "type") {
        "LoadBalancer" | "NodePort" => true,
        "ClusterIP" => !list(spec, "externalIPs").is_empty(),
        _ => false,
    }
}

/// Whether kube-proxy serves a health check on a port of its own for this service.
pub fn needs_health_check(service: &Value) -> bool {
    text(service, "spec.type") == "LoadBalancer" && text(service, "spec.externalTrafficPolicy") == "Local"
}

/// Whether a service has no address of its own.
pub fn is_headless(service: &Value) -> bool {
    matches!(list(service, "spec.clusterIPs"), [only] if only.as_str() == Some("None"))
}

/// Keeps the single and the plural field in step, whichever of them the client wrote.
pub fn normalize_cluster_ips(new: &mut Value, old: Option<&Value>) {
    let Some(spec) = new.get_mut("spec") else { return };
    let single = text(spec, "clusterIP").to_owned();
    let plural = list(spec, "clusterIPs").to_vec();
    let Some(old) = old else {
        // COMPAT: on create the singular field wins only when the plural one is missing.
        if !single.is_empty() && plural.is_empty() {
            walk::put(spec, "clusterIPs", json!([single]));
        }
        return;
    };
    let single_changed = single != text(old, "spec.clusterIP");
    let plural_changed = plural != list(old, "spec.clusterIPs");
    if single_changed && !plural_changed {
        let replaced = if single.is_empty() {
            Value::Null
        } else {
            json!([single])
        };
        walk::put(spec, "clusterIPs", replaced);
    } else if !single_changed && plural_changed && plural.is_empty() && single.is_empty() {
        walk::remove(spec, "clusterIPs");
    }
}

/// An update that leaves out what was allocated keeps it.
pub fn patch_allocated_values(new: &mut Value, old: &Value) {
    let needs_cluster_ip = |kind: &str| ["ClusterIP", "NodePort", "LoadBalancer"].contains(&kind);
    let needs_node_port = |service: &Value| match text(service, "spec.type") {
        "NodePort" => true,
        "LoadBalancer" => at(service, "spec.allocateLoadBalancerNodePorts").as_bool() != Some(false),
        _ => false,
    };
    let (both_ip, both_port) = (
        needs_cluster_ip(text(new, "spec.type")) && needs_cluster_ip(text(old, "spec.type")),
        needs_node_port(new) && needs_node_port(old),
    );
    let both_health = needs_health_check(new) && needs_health_check(old);
    let Some(spec) = new.get_mut("spec") else { return };
    if both_ip {
        if text(spec, "clusterIP").is_empty() {
            walk::copy(spec, at(old, "spec"), "clusterIP");
        }
        if list(spec, "clusterIPs").is_empty() && text(spec, "clusterIP") == text(old, "spec.clusterIP") {
            walk::copy(spec, at(old, "spec"), "clusterIPs");
        }
    }
    if both_port {
        let before = list(old, "spec.ports");
        let used: BTreeSet<(String, i64)> = list(spec, "ports")
            .iter()
            .map(|p| (text(p, "protocol").to_owned(), number(p, "nodePort")))
            .filter(|(_, n)| *n != 0)
            .collect();
        walk::each(spec, "ports[]", &mut |port| {
            if number(port, "nodePort") != 0 {
                return;
            }
            let same = |p: &&Value| {
                text(p, "protocol") == text(port, "protocol") && number(p, "port") == number(port, "port")
            };
            if let Some(node_port) = before
                .iter()
                .find(same)
                .map(|p| number(p, "nodePort"))
                .filter(|n| *n != 0)
                && !used.contains(&(text(port, "protocol").to_owned(), node_port))
            {
                walk::put(port, "nodePort", node_port.into());
            }
        });
    }
    if both_health && number(spec, "healthCheckNodePort") == 0 {
        walk::copy(spec, at(old, "spec"), "healthCheckNodePort");
    }
}

/// What an earlier type needed and the new one does not, unless the client changed it too.
pub fn drop_type_dependent_fields(new: &mut Value, old: Option<&Value>) {
    let Some(old) = old else { return };
    let kind_of = |v: &Value| text(v, "spec.type").to_owned();
    let (before, now) = (kind_of(old), kind_of(new));
    let health = (needs_health_check(old), needs_health_check(new));
    let external = (
        externally_accessible(at(old, "spec")),
        externally_accessible(at(new, "spec")),
    );
    let Some(spec) = new.get_mut("spec") else { return };
    let unchanged = |spec: &Value, name: &str| crate::node::same(at(spec, name), at(at(old, "spec"), name));
    let has_ip = |kind: &str| ["ClusterIP", "NodePort", "LoadBalancer"].contains(&kind);
    if has_ip(&before) && !has_ip(&now) && unchanged(spec, "clusterIPs") {
        for name in [
            "clusterIP",
            "clusterIPs",
            "ipFamilies",
            "ipFamilyPolicy",
            "internalTrafficPolicy",
        ] {
            walk::remove(spec, name);
        }
    }
    let has_ports = |kind: &str| ["NodePort", "LoadBalancer"].contains(&kind);
    if has_ports(&before) && !has_ports(&now) {
        let ports = list(old, "spec.ports").to_vec();
        walk::each(spec, "ports[]", &mut |port| {
            let kept = ports
                .iter()
                .any(|p| number(p, "nodePort") != 0 && number(p, "nodePort") == number(port, "nodePort"));
            if kept {
                walk::remove(port, "nodePort");
            }
        });
    }
    if health.0 && !health.1 && unchanged(spec, "healthCheckNodePort") {
        walk::remove(spec, "healthCheckNodePort");
    }
    if before == "LoadBalancer" && now != "LoadBalancer" {
        for name in ["allocateLoadBalancerNodePorts", "loadBalancerClass"] {
            if unchanged(spec, name) {
                walk::remove(spec, name);
            }
        }
    }
    if external.0 && !external.1 && unchanged(spec, "externalTrafficPolicy") {
        walk::remove(spec, "externalTrafficPolicy");
    }
}

fn external_ip(service: &Value) -> String {
    let external: Vec<&str> = list(service, "spec.externalIPs")
        .iter()
        .filter_map(Value::as_str)
        .collect();
    match text(service, "spec.type") {
        "LoadBalancer" => {
            let mut all: Vec<&str> = list(service, "status.loadBalancer.ingress")
                .iter()
                .map(|i| {
                    if text(i, "ip").is_empty() {
                        text(i, "hostname")
                    } else {
                        text(i, "ip")
                    }
                })
                .collect();
            all.extend(&external);
            if all.is_empty() {
                "<pending>".to_owned()
            } else {
                all.join(",")
            }
        }
        "ExternalName" => text(service, "spec.externalName").to_owned(),
        "ClusterIP" | "NodePort" => {
            if external.is_empty() {
                row::NONE.to_owned()
            } else {
                external.join(",")
            }
        }
        _ => row::UNKNOWN.to_owned(),
    }
}

fn service_row(service: &Value, now: i64) -> Vec<Value> {
    let ports: Vec<String> = list(service, "spec.ports")
        .iter()
        .map(|p| match number(p, "nodePort") {
            0 => format!("{}/{}", number(p, "port"), text(p, "protocol")),
            node => format!("{}:{node}/{}", number(p, "port"), text(p, "protocol")),
        })
        .collect();
    vec![
        row::name(service),
        json!(text(service, "spec.type")),
        or_none(
            list(service, "spec.clusterIPs")
                .first()
                .and_then(Value::as_str)
                .unwrap_or(""),
        ),
        or_none(&external_ip(service)),
        or_none(&ports.join(",")),
        row::age(service, now),
        row::label_map(service, "spec.selector"),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn service(spec: Value) -> Value {
        let mut service =
            json!({"metadata": {"name": "s", "namespace": "d", "resourceVersion": "1"}, "spec": spec});
        (SERVICE.default)("v1", &mut service);
        SERVICE.begin_create(&mut service);
        service
    }

    fn check(spec: Value, expected: &[&str]) {
        let found: Vec<String> = SERVICE
            .check_create(&service(spec), true)
            .iter()
            .map(ToString::to_string)
            .collect();
        assert_eq!(found, expected);
    }

    #[test]
    fn defaults() {
        assert_eq!(
            service(json!({"ports": [{"port": 80}]}))["spec"],
            json!({"ports": [{"port": 80, "protocol": "TCP", "targetPort": 80}], "type": "ClusterIP",
                "sessionAffinity": "None", "internalTrafficPolicy": "Cluster"})
        );
    }

    #[test]
    fn rules() {
        check(json!({"ports": [{"port": 80}], "clusterIP": "10.0.0.1"}), &[]);
        check(json!({"clusterIP": "None"}), &[]);
        check(json!({}), &["spec.ports: Required value"]);
        check(
            json!({"ports": [{"port": 0}]}),
            &[
                "spec.ports[0].port: Invalid value: 0: must be between 1 and 65535, inclusive",
                "spec.ports[0].targetPort: Invalid value: 0: must be between 1 and 65535, inclusive",
            ],
        );
        check(
            json!({"ports": [{"port": 80}], "type": "x"}),
            &[
                "spec.type: Unsupported value: \"x\": supported values: \"ClusterIP\", \"ExternalName\", \"LoadBalancer\", \"NodePort\"",
            ],
        );
        check(
            json!({"ports": [{"port": 80}, {"port": 81}]}),
            &[
                "spec.ports[0].name: Required value",
                "spec.ports[1].name: Required value",
            ],
        );
        check(
            json!({"type": "ExternalName"}),
            &["spec.externalName: Required value"],
        );
    }

    #[test]
    fn an_update_keeps_what_was_allocated() {
        let old = service(
            json!({"type": "NodePort", "clusterIP": "10.0.0.1", "ports": [{"port": 80, "nodePort": 30000}]}),
        );
        let mut new = service(json!({"type": "NodePort", "ports": [{"port": 80}]}));
        SERVICE.begin_update(&mut new, &old);
        assert_eq!(new["spec"]["clusterIPs"], json!(["10.0.0.1"]));
        assert_eq!(new["spec"]["ports"][0]["nodePort"], 30000);
        assert_eq!(SERVICE.check_update(&new, &old, true), vec![]);
        let mut other =
            service(json!({"type": "NodePort", "clusterIP": "10.0.0.2", "ports": [{"port": 80}]}));
        SERVICE.begin_update(&mut other, &old);
        let found: Vec<String> = SERVICE
            .check_update(&other, &old, true)
            .iter()
            .map(ToString::to_string)
            .collect();
        assert_eq!(
            found,
            ["spec.clusterIPs: Invalid value: [\"10.0.0.2\"]: may not change once set"]
        );
    }

    #[test]
    fn a_change_of_type_drops_its_fields() {
        let old = service(
            json!({"type": "NodePort", "clusterIP": "10.0.0.1", "ports": [{"port": 80, "nodePort": 30000}]}),
        );
        let mut new = old.clone();
        new["spec"]["type"] = json!("ClusterIP");
        SERVICE.begin_update(&mut new, &old);
        assert_eq!(new["spec"]["ports"][0].get("nodePort"), None);
        assert_eq!(new["spec"].get("externalTrafficPolicy"), None);
        assert_eq!(SERVICE.check_update(&new, &old, true), vec![]);
    }
}
