//! NetworkPolicies.

use serde_json::json;
use skiff_meta::names;

use crate::errors::Errors;
use crate::kind::{AGE, Again, BASE, Kind, NAME, text as column};
use crate::net;
use crate::node::{Node, list};
use crate::object_meta::label_selector;
use crate::{row, strategy, walk};

pub static NETWORK_POLICY: Kind = Kind {
    group: "networking.k8s.io",
    kind: "NetworkPolicy",
    default: |_, object| {
        let Some(spec) = walk::object(object, "spec") else {
            return;
        };
        for name in ["ingress[].ports[]", "egress[].ports[]"] {
            walk::each(spec, name, &mut |port| walk::pointer(port, "protocol", "TCP"));
        }
        if list(spec, "policyTypes").is_empty() {
            let egress = !list(spec, "egress").is_empty();
            walk::put(
                spec,
                "policyTypes",
                if egress {
                    json!(["Ingress", "Egress"])
                } else {
                    json!(["Ingress"])
                },
            );
        }
    },
    prepare_create: strategy::create_generation_only,
    prepare_update: |new, old| strategy::bump_generation_if_at_all(new, old, &["spec"]),
    validate: |object| {
        let mut errors = Errors::new();
        let root = Node::root(object);
        let spec = root.field("spec");
        label_selector(&spec.field("podSelector"), &mut errors);
        for (direction, peers) in [("ingress", "from"), ("egress", "to")] {
            let rules = spec.field(direction);
            for rule in rules.items() {
                let ports = rule.field("ports");
                for port in ports.items() {
                    self::port(&port, &mut errors);
                }
                let peers = rule.field(peers);
                for peer in peers.items() {
                    self::peer(&peer, &mut errors);
                }
            }
        }
        let types = spec.field("policyTypes");
        if types.len() > 2 {
            let shown = types.value.clone();
            errors.invalid_value(&types, shown, "may not specify more than two policyTypes");
        } else {
            for kind in types.items() {
                errors.one_of(&kind, &["Ingress", "Egress"]);
            }
        }
        errors.into_vec()
    },
    validate_update: |new, _| (NETWORK_POLICY.validate)(new),
    warnings: |new, _| {
        let root = Node::root(new);
        let mut warnings = Vec::new();
        for (direction, peers) in [("spec.ingress", "from"), ("spec.egress", "to")] {
            let rules = root.field(direction);
            for rule in rules.items() {
                let peers = rule.field(peers);
                for peer in peers.items() {
                    let block = peer.field("ipBlock");
                    warnings.extend(net::cidr_warnings(&block.field("cidr")));
                    let except = block.field("except");
                    warnings.extend(except.items().flat_map(|at| net::cidr_warnings(&at)));
                }
            }
        }
        warnings
    },
    columns: &[NAME, column("Pod-Selector"), AGE],
    row: |object, now| {
        vec![
            row::name(object),
            row::selector(object, "spec.podSelector"),
            row::age(object, now),
        ]
    },
    update_again: Again::Change,
    ..BASE
};

fn port(port: &Node, errors: &mut Errors) {
    let protocol = port.field("protocol");
    errors.one_of_if_set(&protocol, &["TCP", "UDP", "SCTP"]);
    let (number, end) = (port.field("port"), port.field("endPort"));
    if number.is_set() {
        if let Some(n) = number.int() {
            errors.rule(&number, names::port_number(n));
            if let Some(last) = end.int() {
                if last < n {
                    // COMPAT: upstream shows the other number.
                    errors.invalid_value(&end, n, "must be greater than or equal to `port`");
                }
                errors.rule(&end, names::port_number(last));
            }
        } else {
            if end.is_set() {
                errors.invalid(&end, "may not be specified when `port` is non-numeric");
            }
            errors.rule(&number, names::port_name(number.str()));
        }
    } else if end.is_set() {
        errors.invalid(&end, "may not be specified when `port` is not specified");
    }
}

fn peer(peer: &Node, errors: &mut Errors) {
    let (pods, namespaces, block) = (
        peer.field("podSelector"),
        peer.field("namespaceSelector"),
        peer.field("ipBlock"),
    );
    label_selector(&pods, errors);
    label_selector(&namespaces, errors);
    if block.is_set() {
        let cidr = block.field("cidr");
        let outer = if errors.require(&cidr) {
            net::cidr(&cidr, errors)
        } else {
            None
        };
        let except = block.field("except");
        for part in except.items().filter(|_| outer.is_some()) {
            let Some((address, bits)) = net::cidr(&part, errors) else {
                continue;
            };
            let inside = outer.is_some_and(|(network, outer_bits)| {
                bits > outer_bits && net::contains((network, outer_bits), address)
            });
            if outer.is_some() && !inside {
                errors.invalid(&part, "must be a strict subset of `cidr`");
            }
        }
    }
    let selectors = pods.is_set() || namespaces.is_set();
    if !selectors && !block.is_set() {
        errors.required(peer, "must specify a peer");
    } else if selectors && block.is_set() {
        errors.forbidden(peer, "may not specify both ipBlock and another peer");
    }
}
