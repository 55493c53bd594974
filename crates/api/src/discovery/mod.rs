//! The group `discovery.k8s.io`: EndpointSlices.

use std::collections::BTreeSet;

use serde_json::{Value, json};
use skiff_meta::names;

use crate::core::endpoints::endpoint_ip;
use crate::errors::Errors;
use crate::kind::{AGE, Again, BASE, Kind, NAME, text as column};
use crate::net;
use crate::node::{Node, at, list, same, text};
use crate::{row, strategy, walk};

const ENDPOINTS_MAX: usize = 1000;
const ADDRESSES_MAX: usize = 100;
const HINTS_MAX: usize = 8;
const PORTS_MAX: usize = 20_000;

pub static ENDPOINT_SLICE: Kind = Kind {
    group: "discovery.k8s.io",
    kind: "EndpointSlice",
    default: |_, object| {
        walk::each(object, "ports[]", &mut |port| {
            walk::pointer(port, "name", "");
            walk::pointer(port, "protocol", "TCP");
        });
    },
    prepare_create: |object| {
        strategy::create_generation_only(object);
        drop_topology(object);
    },
    prepare_update: |new, old| {
        strategy::bump_generation_if(
            new,
            old,
            &["addressType", "endpoints", "ports", "metadata.labels"],
        );
        // COMPAT: a change of it counts as one before it is dropped.
        if !same(at(new, "endpoints"), at(old, "endpoints")) {
            drop_topology(new);
        }
    },
    validate: |object| {
        let mut errors = Errors::new();
        let root = Node::root(object);
        let kind = root.field("addressType");
        errors.required_one_of(&kind, &["FQDN", "IPv4", "IPv6"]);
        ports(&root.field("ports"), &mut errors);
        endpoints(&root.field("endpoints"), kind.str(), &mut errors);
        errors.into_vec()
    },
    validate_update: |new, old| {
        let mut errors = Errors::new();
        let root = Node::root(new);
        let kind = root.field("addressType");
        errors.required_one_of(&kind, &["FQDN", "IPv4", "IPv6"]);
        ports(&root.field("ports"), &mut errors);
        // What did not change is not looked at again.
        if !same(at(new, "endpoints"), at(old, "endpoints")) {
            endpoints(&root.field("endpoints"), kind.str(), &mut errors);
        }
        errors.immutable(&root.field("addressType"), at(old, "addressType"));
        errors.into_vec()
    },
    warnings: |new, old| {
        let kind = text(new, "addressType");
        let mut warnings = Vec::new();
        if kind == "FQDN" && old.is_none() {
            warnings.push("spec.addressType: FQDN endpoints are deprecated".to_owned());
        }
        // What the control plane writes itself is in order.
        let labels = at(new, "metadata.labels");
        let manager = labels.get("endpointslice.kubernetes.io/managed-by");
        let own = [
            "endpointslice-controller.k8s.io",
            "endpointslicemirroring-controller.k8s.io",
        ];
        if !manager
            .and_then(Value::as_str)
            .is_some_and(|manager| own.contains(&manager))
        {
            let root = Node::root(new);
            let endpoints = root.field("endpoints");
            for endpoint in endpoints.items() {
                let addresses = endpoint.field("addresses");
                warnings.extend(addresses.items().filter_map(|at| net::ip_warning(&at)));
            }
        }
        warnings
    },
    columns: &[
        NAME,
        column("AddressType"),
        column("Ports"),
        column("Endpoints"),
        AGE,
    ],
    row: |object, now| {
        let ports = list(object, "ports")
            .iter()
            .map(|p| match at(p, "port").as_i64() {
                Some(number) => number.to_string(),
                None if at(p, "name").is_string() => text(p, "name").to_owned(),
                None => "*".to_owned(),
            });
        let addresses = list(object, "endpoints")
            .iter()
            .flat_map(|e| list(e, "addresses"))
            .filter_map(Value::as_str)
            .map(str::to_owned);
        vec![
            row::name(object),
            json!(text(object, "addressType")),
            json!(first_three(ports.collect())),
            json!(first_three(addresses.collect())),
            row::age(object, now),
        ]
    },
    update_again: Again::Object,
    ..BASE
};

/// Nothing is kept of what the older version called topology.
fn drop_topology(slice: &mut Value) {
    walk::each(slice, "endpoints[]", &mut |endpoint| {
        walk::remove(endpoint, "deprecatedTopology");
    });
}

fn first_three(all: Vec<String>) -> String {
    match all.len() {
        0 => "<unset>".to_owned(),
        1..=3 => all.join(","),
        n => format!("{} + {} more...", all[..3].join(","), n - 3),
    }
}

fn endpoints(endpoints: &Node, kind: &str, errors: &mut Errors) {
    if endpoints.len() > ENDPOINTS_MAX {
        return errors.too_many(endpoints, ENDPOINTS_MAX);
    }
    for endpoint in endpoints.items() {
        let addresses = endpoint.field("addresses");
        if addresses.is_empty() {
            errors.required(&addresses, "must contain at least 1 address");
        } else if addresses.len() > ADDRESSES_MAX {
            errors.too_many(&addresses, ADDRESSES_MAX);
        }
        for address in addresses.items() {
            match kind {
                "IPv4" | "IPv6" => {
                    if let Some(ip) = net::ip(&address, errors) {
                        if ip.is_ipv4() != (kind == "IPv4") {
                            let shown = addresses.with(address.value);
                            errors.invalid(&shown, format!("must be an {kind} address"));
                        }
                        endpoint_ip(&address, errors);
                    }
                }
                "FQDN" => fully_qualified_domain(&address, errors),
                _ => {}
            }
        }
        let node = endpoint.field("nodeName");
        if node.is_set() {
            errors.rule(&node, names::dns1123_subdomain(node.str()));
        }
        let topology = endpoint.field("deprecatedTopology");
        crate::object_meta::labels(&topology, errors);
        let host = endpoint.field("hostname");
        if host.is_set() {
            errors.rule(&host, names::dns1123_label(host.str()));
        }
        hints(&endpoint.field("hints"), errors);
    }
}

fn fully_qualified_domain(address: &Node, errors: &mut Errors) {
    let name = address.str();
    if !errors.require(address) {
        return;
    }
    let name = name.strip_suffix('.').unwrap_or(name);
    let complaints = names::dns1123_subdomain(name);
    if !complaints.is_empty() {
        errors.invalid_value(address, name, complaints.join(","));
    } else if name.split('.').count() < 2 {
        errors.invalid_value(
            address,
            name,
            "should be a domain with at least two segments separated by dots",
        );
    }
}

/// Which zones and nodes should use an endpoint.
fn hints(hints: &Node, errors: &mut Errors) {
    let zones = hints.field("forZones");
    if zones.len() > HINTS_MAX {
        errors.too_many(&zones, HINTS_MAX);
        return;
    }
    let mut seen = BTreeSet::new();
    for zone in zones.items() {
        let name = zone.field("name");
        if !seen.insert(name.str()) {
            errors.duplicate(&name);
        }
        errors.rule(&name, names::label_value(name.str()));
    }
    let nodes = hints.field("forNodes");
    if nodes.len() > HINTS_MAX {
        errors.too_many(&nodes, HINTS_MAX);
        return;
    }
    let mut seen = BTreeSet::new();
    for node in nodes.items() {
        let name = node.field("name");
        if !seen.insert(name.str()) {
            errors.duplicate(&name);
        }
        errors.rule(&name, names::dns1123_subdomain(name.str()));
    }
}

fn ports(ports: &Node, errors: &mut Errors) {
    if ports.len() > PORTS_MAX {
        return errors.too_many(ports, PORTS_MAX);
    }
    let mut seen = BTreeSet::new();
    for port in ports.items() {
        let name = port.field("name");
        if !name.is_empty() {
            errors.rule(&name, names::dns1123_label(name.str()));
        }
        if !seen.insert(name.str()) {
            errors.duplicate(&name);
        }
        let protocol = port.field("protocol");
        if protocol.is_set() {
            errors.one_of(&protocol, &["SCTP", "TCP", "UDP"]);
        } else {
            errors.required(&protocol, "");
        }
        let app = port.field("appProtocol");
        if app.is_set() {
            errors.rule(&app, names::qualified_name(app.str()));
        }
    }
}
