//! Endpoints, the older list of a service's addresses.

use serde_json::{Value, json};
use skiff_meta::names;

use crate::errors::Errors;
use crate::kind::{AGE, BASE, Kind, NAME, text as column};
use crate::node::{Node, at, list, number, same, text};
use crate::{net, row, walk};

pub static ENDPOINTS: Kind = Kind {
    kind: "Endpoints",
    default: |_, object| {
        walk::each(object, "subsets[].ports[]", &mut |port| {
            walk::string(port, "protocol", "TCP")
        })
    },
    validate: |object| {
        let mut errors = Errors::new();
        subsets(&Node::root(object).field("subsets"), &mut errors);
        errors.into_vec()
    },
    validate_update: |new, old| {
        let mut errors = Errors::new();
        if !same(at(new, "subsets"), at(old, "subsets")) {
            subsets(&Node::root(new).field("subsets"), &mut errors);
        }
        errors.into_vec()
    },
    warnings: |new, _| {
        let labels = at(new, "metadata.labels");
        let manager = labels.get("endpoints.kubernetes.io/managed-by");
        if manager.and_then(Value::as_str) == Some("endpoint-controller") {
            return Vec::new();
        }
        let root = Node::root(new);
        let mut warnings = Vec::new();
        let subsets = root.field("subsets");
        for subset in subsets.items() {
            for name in ["addresses", "notReadyAddresses"] {
                let addresses = subset.field(name);
                warnings.extend(
                    addresses
                        .items()
                        .filter_map(|address| net::ip_warning(&address.field("ip"))),
                );
            }
        }
        warnings
    },
    columns: &[NAME, column("Endpoints"), AGE],
    row: |object, now| vec![row::name(object), json!(summary(object)), row::age(object, now)],
    allow_create_on_update: true,
    deprecation: Some("v1 Endpoints is deprecated in v1.33+; use discovery.k8s.io/v1 EndpointSlice"),
    ..BASE
};

fn subsets(subsets: &Node, errors: &mut Errors) {
    for subset in subsets.items() {
        let (ready, not_ready) = (subset.field("addresses"), subset.field("notReadyAddresses"));
        if ready.is_empty() && not_ready.is_empty() {
            errors.required(&subset, "must specify `addresses` or `notReadyAddresses`");
        }
        for address in ready.items().chain(not_ready.items()) {
            let ip = address.field("ip");
            net::ip(&ip, errors);
            let host = address.field("hostname");
            if !host.is_empty() {
                errors.rule(&host, names::dns1123_label(host.str()));
            }
            let node = address.field("nodeName");
            if node.is_set() {
                errors.rule(&node, names::dns1123_subdomain(node.str()));
            }
            endpoint_ip(&ip, errors);
        }
        let ports = subset.field("ports");
        for port in ports.items() {
            let name = port.field("name");
            if name.is_empty() {
                if ports.len() > 1 {
                    errors.required(&name, "");
                }
            } else {
                errors.rule(&name, names::dns1123_label(name.str()));
            }
            let number = port.field("port").int().unwrap_or(0);
            for complaint in names::port_number(number) {
                errors.invalid_value(&port.field("port"), number, complaint);
            }
            errors.required_one_of(&port.field("protocol"), &["SCTP", "TCP", "UDP"]);
            let app = port.field("appProtocol");
            if app.is_set() {
                errors.rule(&app, names::qualified_name(app.str()));
            }
        }
    }
}

/// Addresses that traffic must not be sent to.
pub fn endpoint_ip(at: &Node, errors: &mut Errors) {
    let Some(address) = net::sloppy_ip(at.str()) else {
        return errors.invalid(at, "must be a valid IP address");
    };
    // An IPv4 address in the clothes of IPv6 is what it is.
    let address = address.to_canonical();
    let (link_local, link_local_multicast) = match address {
        std::net::IpAddr::V4(v4) => (v4.is_link_local(), v4.octets()[..3] == [224, 0, 0]),
        std::net::IpAddr::V6(v6) => (v6.is_unicast_link_local(), v6.segments()[0] & 0xff0f == 0xff02),
    };
    if address.is_unspecified() {
        errors.invalid(at, format!("may not be unspecified ({})", at.str()));
    }
    if address.is_loopback() {
        errors.invalid(at, "may not be in the loopback range (127.0.0.0/8, ::1/128)");
    }
    if link_local {
        errors.invalid(
            at,
            "may not be in the link-local range (169.254.0.0/16, fe80::/10)",
        );
    }
    if link_local_multicast {
        errors.invalid(
            at,
            "may not be in the link-local multicast range (224.0.0.0/24, ff02::/10)",
        );
    }
}

/// The first three addresses, and how many more there are.
fn summary(endpoints: &Value) -> String {
    let mut shown: Vec<String> = Vec::new();
    let mut count = 0;
    for subset in list(endpoints, "subsets") {
        let addresses = list(subset, "addresses");
        let ports = list(subset, "ports");
        if ports.is_empty() {
            count += addresses.len();
            shown.extend(
                addresses
                    .iter()
                    .take(3usize.saturating_sub(shown.len()))
                    .map(|a| text(a, "ip").to_owned()),
            );
        }
        for port in ports {
            count += addresses.len();
            for address in addresses.iter().take(3usize.saturating_sub(shown.len())) {
                let ip = text(address, "ip");
                let host = if ip.contains(':') {
                    format!("[{ip}]")
                } else {
                    ip.to_owned()
                };
                shown.push(format!("{host}:{}", number(port, "port")));
            }
        }
    }
    match count - shown.len() {
        _ if list(endpoints, "subsets").is_empty() => row::NONE.to_owned(),
        0 => shown.join(","),
        more => format!("{} + {more} more...", shown.join(",")),
    }
}
