//! Services. Addresses and ports are allocated by the registry, after `default` and before `begin_update`;
//! this file keeps `clusterIP` and `clusterIPs` in step and drops what a change of type leaves behind.

use std::collections::BTreeSet;

use serde_json::{Value, json};

use skiff_meta::field;

use super::service_rules::{cluster_ip_fields, load_balancer_status, service, validate_update};
use crate::errors::Errors;
use crate::kind::{AGE, Again, BASE, Kind, NAME, text as column, unsupported_field, wide};
use crate::net;
use crate::node::{Node, at, list, number, text};
use crate::row::{self, or_none};
use crate::{object_meta, strategy, walk};

pub static SERVICE: Kind = Kind {
    kind: "Service",
    default,
    prepare_create: |object| {
        strategy::create_without_status(object);
        default_on_read(object);
    },
    prepare_update: |new, old| {
        strategy::update_keep_status(new, old);
        drop_type_dependent_fields(new, old);
        default_on_read(new);
    },
    validate: |object| {
        let mut errors = Errors::new();
        service(&Node::root(object), None, &mut errors);
        errors.into_vec()
    },
    validate_update,
    validate_status_update: |new, old| {
        let mut errors = Errors::new();
        let root = Node::root(new);
        let status = root.field("status.loadBalancer");
        if text(new, "spec.type") != "LoadBalancer" && !status.field("ingress").is_empty() {
            let detail = "may only be used when `spec.type` is 'LoadBalancer'";
            errors.forbidden(&status.field("ingress"), detail);
        } else {
            load_balancer_status(&status, list(old, "status.loadBalancer.ingress"), &mut errors);
        }
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
        let root = Node::root(new);
        let addresses = |name: &str| -> Vec<String> {
            let addresses = root.field(name);
            addresses.items().filter_map(|at| net::ip_warning(&at)).collect()
        };
        if !text(new, "spec.clusterIP").is_empty() && !is_headless(new) {
            warnings.extend(addresses("spec.clusterIPs"));
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
        }
        warnings.extend(addresses("spec.externalIPs"));
        if !is_headless(new) && external && text(new, "spec.type") != "ExternalName" {
            warnings.push(
                "spec.externalIPs is deprecated and may no longer be implemented in some clusters".to_owned(),
            );
        }
        warnings.extend(net::ip_warning(&root.field("spec.loadBalancerIP")));
        let ranges = root.field("spec.loadBalancerSourceRanges");
        warnings.extend(ranges.items().flat_map(|at| net::cidr_warnings(&at)));
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
    unknown_field: unsupported_field,
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

/// What the addresses of a service and its families may be, for the registry that allocates them.
pub fn cluster_ip_errors(service: &Value, old: Option<&Value>) -> Vec<field::Error> {
    let mut errors = Errors::new();
    let root = Node::root(service);
    if text(service, "spec.type") != "ExternalName" {
        cluster_ip_fields(&root.field("spec"), is_headless(service), old, &mut errors);
    }
    errors.into_vec()
}

fn same_cluster_ips(old: &Value, new: &Value) -> bool {
    text(old, "spec.clusterIP") == text(new, "spec.clusterIP")
        && list(old, "spec.clusterIPs") == list(new, "spec.clusterIPs")
}

/// Keeps the single and the plural field in step, whichever of them the client wrote.
pub fn normalize_cluster_ips(new: &mut Value, old: Option<&Value>) {
    let Some(old) = old else {
        let Some(spec) = new.get_mut("spec") else { return };
        let single = text(spec, "clusterIP").to_owned();
        // COMPAT: on create the singular field fills the plural one, never the other way round.
        if !single.is_empty() && list(spec, "clusterIPs").is_empty() {
            walk::put(spec, "clusterIPs", json!([single]));
        }
        return;
    };
    let (before, now) = (
        text(old, "spec.clusterIP"),
        text(new, "spec.clusterIP").to_owned(),
    );
    let cleared = list(new, "spec.clusterIPs").is_empty() && !list(old, "spec.clusterIPs").is_empty();
    let same = same_cluster_ips_plural(old, new);
    let Some(spec) = new.get_mut("spec") else { return };
    if cleared && before == now {
        walk::copy(spec, at(old, "spec"), "clusterIPs");
    }
    if before != now && same {
        if now.is_empty() {
            walk::remove(spec, "clusterIPs");
        } else {
            walk::put(spec, "clusterIPs", json!([now]));
        }
    }
}

fn same_cluster_ips_plural(old: &Value, new: &Value) -> bool {
    list(old, "spec.clusterIPs") == list(new, "spec.clusterIPs")
}

fn needs_cluster_ip(service: &Value) -> bool {
    text(service, "spec.type") != "ExternalName"
}

fn needs_node_port(service: &Value) -> bool {
    match text(service, "spec.type") {
        "NodePort" => true,
        "LoadBalancer" => at(service, "spec.allocateLoadBalancerNodePorts").as_bool() != Some(false),
        _ => false,
    }
}

fn node_ports(service: &Value) -> BTreeSet<i64> {
    let ports = list(service, "spec.ports").iter();
    ports.map(|p| number(p, "nodePort")).filter(|n| *n != 0).collect()
}

/// An update that leaves out what was allocated keeps it.
pub fn patch_allocated_values(new: &mut Value, old: &Value) {
    let both = |needs: fn(&Value) -> bool, new: &Value| needs(new) && needs(old);
    let (ip, port, health) = (
        both(needs_cluster_ip, new),
        both(needs_node_port, new),
        both(needs_health_check, new),
    );
    let used: BTreeSet<i64> = node_ports(new).intersection(&node_ports(old)).copied().collect();
    let Some(spec) = new.get_mut("spec") else { return };
    if ip {
        if text(spec, "clusterIP").is_empty() {
            walk::copy(spec, at(old, "spec"), "clusterIP");
        }
        if list(spec, "clusterIPs").is_empty() {
            walk::copy(spec, at(old, "spec"), "clusterIPs");
        }
    }
    if port {
        let before = list(old, "spec.ports");
        walk::each(spec, "ports[]", &mut |port| {
            if number(port, "nodePort") != 0 {
                return;
            }
            let named = before.iter().rfind(|p| text(p, "name") == text(port, "name"));
            let node_port = named.map_or(0, |p| number(p, "nodePort"));
            if node_port != 0 && !used.contains(&node_port) {
                walk::put(port, "nodePort", node_port.into());
            }
        });
    }
    if health && number(spec, "healthCheckNodePort") == 0 {
        walk::copy(spec, at(old, "spec"), "healthCheckNodePort");
    }
}

/// COMPAT: upstream hides this on every read of a service that has no use for it; nonsense is left to validation.
fn default_on_read(service: &mut Value) {
    if text(service, "spec.type") == "ExternalName"
        && ["Cluster", "Local"].contains(&text(service, "spec.internalTrafficPolicy"))
        && let Some(spec) = service.get_mut("spec")
    {
        walk::remove(spec, "internalTrafficPolicy");
    }
}

/// What an earlier type needed and the new one does not, unless the client changed it too.
fn drop_type_dependent_fields(new: &mut Value, old: &Value) {
    let gone = |needs: fn(&Value) -> bool, new: &Value| needs(old) && !needs(new);
    let balanced: fn(&Value) -> bool = |service| text(service, "spec.type") == "LoadBalancer";
    let accessible: fn(&Value) -> bool = |service| externally_accessible(at(service, "spec"));
    let ip = gone(needs_cluster_ip, new);
    let same_ips = same_cluster_ips(old, new);
    let ports = gone(needs_node_port, new) && node_ports(old).is_superset(&node_ports(new));
    let (health, balancer, external) = (
        gone(needs_health_check, new),
        gone(balanced, new),
        gone(accessible, new),
    );
    if !balanced(new)
        && let Some(status) = new.get_mut("status")
    {
        walk::put(status, "loadBalancer", json!({}));
    }
    let Some(spec) = new.get_mut("spec") else { return };
    let mut drop = |condition: bool, name: &str| {
        if condition && crate::node::same(at(spec, name), at(at(old, "spec"), name)) {
            walk::remove(spec, name);
        }
    };
    drop(ip, "ipFamilies");
    drop(ip, "ipFamilyPolicy");
    drop(ip && same_ips, "clusterIP");
    drop(ip && same_ips, "clusterIPs");
    drop(health, "healthCheckNodePort");
    drop(balancer, "allocateLoadBalancerNodePorts");
    drop(balancer, "loadBalancerClass");
    drop(external, "externalTrafficPolicy");
    if ports {
        walk::each(spec, "ports[]", &mut |port| walk::remove(port, "nodePort"));
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
        normalize_cluster_ips(&mut service, None);
        SERVICE.begin_create(&mut service);
        service
    }

    /// What the registry does with an update before it allocates, and the strategy after it.
    fn update(new: &mut Value, old: &Value) {
        patch_allocated_values(new, old);
        normalize_cluster_ips(new, Some(old));
        SERVICE.begin_update(new, old);
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
        update(&mut new, &old);
        assert_eq!(new["spec"]["clusterIPs"], json!(["10.0.0.1"]));
        assert_eq!(new["spec"]["ports"][0]["nodePort"], 30000);
        assert_eq!(SERVICE.check_update(&new, &old, true), vec![]);
        let mut other =
            service(json!({"type": "NodePort", "clusterIP": "10.0.0.2", "ports": [{"port": 80}]}));
        update(&mut other, &old);
        let found: Vec<String> = SERVICE
            .check_update(&other, &old, true)
            .iter()
            .map(ToString::to_string)
            .collect();
        assert_eq!(
            found,
            ["spec.clusterIPs[0]: Invalid value: [\"10.0.0.2\"]: may not change once set"]
        );
    }

    #[test]
    fn a_change_of_type_drops_its_fields() {
        let old = service(
            json!({"type": "NodePort", "clusterIP": "10.0.0.1", "ports": [{"port": 80, "nodePort": 30000}]}),
        );
        let mut new = old.clone();
        new["spec"]["type"] = json!("ClusterIP");
        update(&mut new, &old);
        assert_eq!(new["spec"]["ports"][0].get("nodePort"), None);
        assert_eq!(new["spec"].get("externalTrafficPolicy"), None);
        assert_eq!(SERVICE.check_update(&new, &old, true), vec![]);
    }
}
