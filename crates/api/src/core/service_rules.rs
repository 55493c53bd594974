//! The rules of services: ports, addresses, load balancers, traffic policies.

use std::collections::BTreeSet;

use serde_json::{Value, json};
use skiff_meta::{field, names};

use super::endpoints::endpoint_ip;
use super::probe::port as port_or_name;
use super::service::{externally_accessible, is_headless, needs_health_check};
use crate::errors::Errors;
use crate::node::{Node, at, list, number, text};
use crate::{net, object_meta};

const RANGES: &str = "service.beta.kubernetes.io/load-balancer-source-ranges";

pub(super) fn service(root: &Node, old: Option<&Value>, errors: &mut Errors) {
    let annotations = root.field("metadata.annotations");
    let mode = annotations.key("service.kubernetes.io/topology-mode");
    const HINTS: &str = "service.kubernetes.io/topology-aware-hints";
    let hints = annotations.key(HINTS);
    if mode.is_set() && hints.is_set() && mode.value != hints.value {
        let detail = format!("must match annotations[{HINTS}] when both are specified");
        errors.invalid(&mode, detail);
    }
    let spec = root.field("spec");
    let (kind, headless) = (spec.field("type"), is_headless(root.value));
    let ports = spec.field("ports");
    if ports.is_empty() && !headless && kind.str() != "ExternalName" {
        errors.required(&ports, "");
    }
    let cluster_ips = spec.field("clusterIPs");
    match kind.str() {
        "LoadBalancer" | "NodePort" if headless => errors.invalid(
            &cluster_ips.index(0),
            format!("may not be set to 'None' for {} services", kind.str()),
        ),
        "ExternalName" => external_name(&spec, errors),
        _ => {}
    }
    let mut seen = BTreeSet::new();
    for port in ports.items() {
        service_port(&port, ports.len() > 1, &mut seen, errors);
    }
    object_meta::labels(&spec.field("selector"), errors);
    errors.required_one_of(&spec.field("sessionAffinity"), &["ClientIP", "None"]);
    session_affinity(&spec, errors);
    if kind.str() != "ExternalName" {
        cluster_ip_fields(&spec, headless, old, errors);
    }
    let external_ips = spec.field("externalIPs");
    let known = addresses(old, "spec.externalIPs");
    for ip in external_ips.items() {
        if net::ip_unless_known(&ip, &known, errors) {
            endpoint_ip(&ip, errors);
        }
    }
    errors.required_one_of(&kind, &["ClusterIP", "ExternalName", "LoadBalancer", "NodePort"]);
    port_collisions(&ports, kind.str(), errors);
    load_balancer_fields(root, &spec, old, errors);
    traffic_policies(root, &spec, errors);
}

fn external_name(spec: &Node, errors: &mut Errors) {
    for name in ["clusterIPs", "ipFamilies"] {
        let at = spec.field(name);
        if !at.is_empty() {
            errors.forbidden(&at, "may not be set for ExternalName services");
        }
    }
    let policy = spec.field("ipFamilyPolicy");
    if policy.is_set() {
        errors.forbidden(&policy, "may not be set for ExternalName services");
    }
    let name = spec.field("externalName");
    let cname = name.str().strip_suffix('.').unwrap_or(name.str());
    if cname.is_empty() {
        errors.required(&name, "");
    } else {
        for complaint in names::dns1123_subdomain(cname) {
            errors.invalid_value(&name, cname, complaint);
        }
    }
}

fn session_affinity(spec: &Node, errors: &mut Errors) {
    let config = spec.field("sessionAffinityConfig");
    match spec.field("sessionAffinity").str() {
        "ClientIP" => {
            let client = config.field("clientIP");
            let timeout = client.field("timeoutSeconds");
            for at in [&config, &client, &timeout] {
                if !at.is_set() {
                    return errors.required(at, "when session affinity type is ClientIP");
                }
            }
            if timeout.int().is_none_or(|n| n <= 0 || n > 86_400) {
                errors.invalid(&timeout, "must be greater than 0 and less than 86400");
            }
        }
        "None" if config.is_set() => {
            errors.forbidden(&config, "must not be set when session affinity is None");
        }
        _ => {}
    }
}

/// The addresses that the old service had already.
fn addresses<'v>(old: Option<&'v Value>, name: &str) -> BTreeSet<&'v str> {
    let listed = old.map_or(&[][..], |old| list(old, name));
    listed.iter().filter_map(Value::as_str).collect()
}

pub(super) fn cluster_ip_fields(spec: &Node, headless: bool, old: Option<&Value>, errors: &mut Errors) {
    let known = addresses(old, "spec.clusterIPs");
    let (single, plural) = (spec.field("clusterIP"), spec.field("clusterIPs"));
    let first = plural.value.get(0).and_then(Value::as_str);
    if single.is_empty() {
        if !plural.is_empty() {
            errors.invalid(&plural, "must be empty when `clusterIP` is not specified");
        }
    } else if plural.is_empty() {
        errors.required(&plural, "");
    } else if first != Some(single.str()) {
        errors.invalid(&plural, "first value must match `clusterIP`");
    }
    let families = spec.field("ipFamilies");
    let mut seen = BTreeSet::new();
    for family in families.items() {
        errors.one_of(&family, &["IPv4", "IPv6"]);
        if !seen.insert(family.str().to_owned()) {
            errors.duplicate(&family);
        }
    }
    errors.one_of_if_set(
        &spec.field("ipFamilyPolicy"),
        &["PreferDualStack", "RequireDualStack", "SingleStack"],
    );
    let mut bad = false;
    let mut addresses = Vec::new();
    for (i, ip) in plural.items().enumerate() {
        if i == 0 && ip.str() == "None" {
            if plural.len() > 1 {
                bad = true;
                errors.invalid(&plural, "'None' must be the first and only value");
            }
            continue;
        }
        if net::ip_unless_known(&ip, &known, errors) {
            addresses.extend(ip.str().parse::<std::net::IpAddr>());
        } else {
            bad = true;
        }
    }
    if plural.len() > 2 {
        errors.invalid(&plural, "may only hold up to 2 values");
    }
    if bad {
        return;
    }
    if plural.len() > 1 && !(addresses.iter().any(|a| a.is_ipv4()) && addresses.iter().any(|a| a.is_ipv6())) {
        errors.invalid(&plural, "may specify no more than one IP for each IP family");
    }
    if headless {
        return;
    }
    for (i, (address, family)) in addresses.iter().zip(families.items()).enumerate() {
        let right = match family.str() {
            "IPv4" => address.is_ipv4(),
            "IPv6" => address.is_ipv6(),
            _ => true,
        };
        if !right {
            let detail = format!(
                "expected an {} value as indicated by `ipFamilies[{i}]`",
                family.str()
            );
            errors.invalid(&plural.index(i), detail);
        }
    }
}

fn port_collisions(ports: &Node, kind: &str, errors: &mut Errors) {
    if kind == "ClusterIP" {
        for port in ports.items() {
            let node_port = port.field("nodePort");
            if node_port.int().unwrap_or(0) != 0 {
                errors.forbidden(&node_port, "may not be used when `type` is 'ClusterIP'");
            }
        }
    }
    let mut seen = BTreeSet::new();
    for port in ports.items() {
        let node_port = port.field("nodePort");
        let number = node_port.int().unwrap_or(0);
        if number != 0 && !seen.insert((port.field("protocol").str().to_owned(), number)) {
            errors.duplicate(&node_port);
        }
    }
    let mut seen = BTreeSet::new();
    for port in ports.items() {
        let (protocol, number) = (
            port.field("protocol").str(),
            port.field("port").int().unwrap_or(0),
        );
        if !seen.insert((protocol.to_owned(), number)) {
            // COMPAT: upstream shows nothing else of it.
            let shown = json!({"protocol": protocol, "port": number});
            errors.duplicate_value(&port, shown);
        }
    }
}

fn load_balancer_fields(root: &Node, spec: &Node, old: Option<&Value>, errors: &mut Errors) {
    const ONLY: &str = "may only be used when `type` is 'LoadBalancer'";
    let balanced = spec.field("type").str() == "LoadBalancer";
    let ranges = spec.field("loadBalancerSourceRanges");
    if !ranges.is_empty() {
        // COMPAT: upstream's path has a capital letter.
        let at = spec.field("LoadBalancerSourceRanges");
        let at = at.with(ranges.value);
        if !balanced {
            errors.forbidden(&at, ONLY);
        }
        let known: BTreeSet<&str> = old
            .map_or(&[][..], |old| list(old, "spec.loadBalancerSourceRanges"))
            .iter()
            .map(|range| range.as_str().unwrap_or("").trim())
            .collect();
        for range in at.items() {
            let trimmed = json!(range.str().trim());
            if !known.contains(range.str().trim()) {
                net::cidr(&range.with(&trimmed), errors);
            }
        }
    } else {
        let annotations = root.field("metadata.annotations");
        let annotation = annotations.key(RANGES);
        if annotation.is_set() {
            if !balanced {
                errors.forbidden(&annotation, ONLY);
            }
            let known = old.map_or("", |old| {
                at(old, "metadata.annotations")
                    .get(RANGES)
                    .map_or("", |v| v.as_str().unwrap_or(""))
            });
            if !annotation.str().trim().is_empty() && known != annotation.str() {
                for part in annotation.str().trim().split(',') {
                    let value = json!(part.trim());
                    net::cidr(&annotation.with(&value), errors);
                }
            }
        }
    }
    let allocate = spec.field("allocateLoadBalancerNodePorts");
    if allocate.is_set() && !balanced {
        errors.forbidden(&allocate, ONLY);
    }
    if balanced && !allocate.is_set() {
        errors.required(&root.field("allocateLoadBalancerNodePorts"), "");
    }
    load_balancer_class(spec, errors);
}

fn load_balancer_class(spec: &Node, errors: &mut Errors) {
    let class = spec.field("loadBalancerClass");
    if !class.is_set() {
        return;
    }
    if spec.field("type").str() == "LoadBalancer" {
        errors.rule(&class, names::qualified_name(class.str()));
    } else {
        errors.forbidden(&class, "may only be used when `type` is 'LoadBalancer'");
    }
}

fn traffic_policies(root: &Node, spec: &Node, errors: &mut Errors) {
    let external = spec.field("externalTrafficPolicy");
    if externally_accessible(spec.value) {
        errors.required_one_of(&external, &["Cluster", "Local"]);
    } else if !external.is_empty() {
        errors.invalid(&external, "may only be set for externally-accessible services");
    }
    let health = spec.field("healthCheckNodePort");
    let port = health.int().unwrap_or(0);
    if needs_health_check(root.value) {
        if port == 0 {
            errors.required(&health, "");
        } else {
            errors.rule(&health, names::port_number(port));
        }
    } else if port != 0 {
        errors.invalid(
            &health,
            "may only be set when `type` is 'LoadBalancer' and `externalTrafficPolicy` is 'Local'",
        );
    }
    let internal = spec.field("internalTrafficPolicy");
    if !internal.is_set() && ["NodePort", "LoadBalancer", "ClusterIP"].contains(&spec.field("type").str()) {
        errors.required(&internal, "");
    }
    errors.one_of_if_set(&internal, &["Cluster", "Local"]);
    errors.one_of_if_set(
        &spec.field("trafficDistribution"),
        &["PreferClose", "PreferSameZone", "PreferSameNode"],
    );
}

pub(super) fn validate_update(new: &Value, old: &Value) -> Vec<field::Error> {
    let mut errors = Errors::new();
    let root = Node::root(new);
    let spec = root.field("spec");
    let kinds = (text(old, "spec.type"), spec.field("type").str());
    if kinds.0 != "ExternalName" && kinds.1 != "ExternalName" {
        cluster_ips_update(&spec, new, old, &mut errors);
        ip_families_update(&spec, new, old, &mut errors);
    }
    let class = spec.field("loadBalancerClass");
    if kinds == ("LoadBalancer", "LoadBalancer") && class.value != at(old, "spec.loadBalancerClass") {
        let shown = class.value.clone();
        errors.invalid_value(&class, shown, "may not change once set");
    }
    load_balancer_class(&spec, &mut errors);
    if needs_health_check(old)
        && needs_health_check(new)
        && number(old, "spec.healthCheckNodePort") != number(new, "spec.healthCheckNodePort")
    {
        errors.forbidden(&spec.field("healthCheckNodePort"), crate::errors::IMMUTABLE);
    }
    service(&root, Some(old), &mut errors);
    errors.into_vec()
}

/// The first address never changes; the second comes and goes with the policy.
fn cluster_ips_update(spec: &Node, new: &Value, old: &Value, errors: &mut Errors) {
    if is_headless(old) && is_headless(new) {
        return;
    }
    const CHANGED: &str = "may not change once set";
    let ips = spec.field("clusterIPs");
    let (before, after) = (list(old, "spec.clusterIPs"), list(new, "spec.clusterIPs"));
    let shown = || json!(after);
    if before.len() == after.len() {
        for (i, (b, a)) in before.iter().zip(after).enumerate() {
            if a != b {
                errors.invalid_value(&ips.index(i), shown(), CHANGED);
            }
        }
        return;
    }
    if after.is_empty() {
        errors.invalid_value(&ips.index(0), Value::Null, "primary clusterIP can not be unset");
    } else if !before.is_empty() && before.first() != after.first() {
        errors.invalid_value(&ips.index(0), shown(), CHANGED);
    }
    released(spec, before, after, "clusterIP", errors);
}

/// A second address or family goes only when one is asked for.
fn released(spec: &Node, before: &[Value], after: &[Value], what: &str, errors: &mut Errors) {
    let policy = spec.field("ipFamilyPolicy");
    if before.len() > after.len() && after.len() == 1 && policy.str() != "SingleStack" {
        let detail = format!("must be set to 'SingleStack' when releasing the secondary {what}");
        let shown = policy.value.clone();
        errors.invalid_value(&policy, shown, detail);
    }
}

fn ip_families_update(spec: &Node, new: &Value, old: &Value, errors: &mut Errors) {
    if is_headless(old) || is_headless(new) {
        return;
    }
    const CHANGED: &str = "may not change once set";
    let families = spec.field("ipFamilies");
    let first = families.index(0);
    let (before, after) = (list(old, "spec.ipFamilies"), list(new, "spec.ipFamilies"));
    if before.len() == after.len() {
        for (b, a) in before.iter().zip(after) {
            if a != b {
                errors.invalid_value(&first, json!(after), CHANGED);
            }
        }
        return;
    }
    // COMPAT: upstream looks at and shows the addresses here.
    let ips = list(new, "spec.clusterIPs");
    if before.len() > after.len() && ips.is_empty() {
        errors.invalid_value(&first, json!(after), "primary ipFamily can not be unset");
    }
    if !before.is_empty() && !after.is_empty() && before.first() != after.first() {
        errors.invalid_value(&first, json!(ips), CHANGED);
    }
    released(spec, before, after, "ipFamily", errors);
}

/// Ingress points of a load balancer; addresses of `old` ones may stay as they are.
pub(super) fn load_balancer_status(status: &Node, old: &[Value], errors: &mut Errors) {
    let ingress = status.field("ingress");
    for point in ingress.items() {
        let ip = point.field("ip");
        if !ip.is_empty() && !old.iter().any(|point| text(point, "ip") == ip.str()) {
            net::ip(&ip, errors);
        }
        let mode = point.field("ipMode");
        if !ip.is_empty() && !mode.is_set() {
            errors.required(&mode, "must be specified when `ip` is set");
        } else if ip.is_empty() && mode.is_set() {
            errors.forbidden(&mode, "may not be specified when `ip` is not set");
        } else {
            errors.one_of_if_set(&mode, &["Proxy", "VIP"]);
        }
        let host = point.field("hostname");
        if !host.is_empty() {
            errors.rule(&host, names::dns1123_subdomain(host.str()));
            if crate::net::sloppy_ip(host.str()).is_some() {
                errors.invalid(&host, "must be a DNS name, not an IP address");
            }
        }
    }
}

fn service_port<'v>(port: &Node<'_, 'v>, need_name: bool, seen: &mut BTreeSet<&'v str>, errors: &mut Errors) {
    let name = port.field("name").str();
    if name.is_empty() {
        if need_name {
            errors.required(&port.field("name"), "");
        }
    } else {
        errors.rule(&port.field("name"), names::dns1123_label(name));
        if !seen.insert(name) {
            errors.duplicate(&port.field("name"));
        }
    }
    let number = port.field("port").int().unwrap_or(0);
    for complaint in names::port_number(number) {
        errors.invalid_value(&port.field("port"), number, complaint);
    }
    errors.required_one_of(&port.field("protocol"), &["SCTP", "TCP", "UDP"]);
    port_or_name(&port.field("targetPort"), errors);
    let app = port.field("appProtocol");
    if app.is_set() {
        errors.rule(&app, names::qualified_name(app.str()));
    }
}
