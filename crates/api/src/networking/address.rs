//! IPAddresses and ServiceCIDRs.

use serde_json::{Value, json};
use skiff_meta::field::ErrorType;
use skiff_meta::names;

use crate::errors::Errors;
use crate::kind::{AGE, Again, BASE, Kind, NAME, STATUS_ALONE, text as column};
use crate::net;
use crate::node::{Node, at, list, text};
use crate::{row, strategy};

pub static IP_ADDRESS: Kind = Kind {
    group: "networking.k8s.io",
    kind: "IPAddress",
    validate: |object| {
        let mut errors = Errors::new();
        let root = Node::root(object);
        let parent = root.field("spec.parentRef");
        if !parent.is_set() {
            errors.required(&parent, "");
            return errors.into_vec();
        }
        let group = parent.field("group");
        if !group.is_empty() {
            errors.rule(&group, names::dns1123_subdomain(group.str()));
        }
        for name in ["resource", "name"] {
            let part = parent.field(name);
            if errors.require(&part) {
                errors.rule(&part, names::path_segment(part.str(), false));
            }
        }
        let namespace = parent.field("namespace");
        if !namespace.is_empty() {
            errors.rule(&namespace, names::path_segment(namespace.str(), false));
        }
        errors.into_vec()
    },
    validate_update: |new, old| {
        let mut errors = Errors::new();
        let root = Node::root(new);
        errors.extend((IP_ADDRESS.validate)(new));
        errors.immutable(&root.field("spec.parentRef"), at(old, "spec.parentRef"));
        errors.into_vec()
    },
    selectable: |_| Vec::new(),
    // COMPAT: upstream forgot the column of the last cell.
    columns: &[NAME, column("ParentRef")],
    row: |object, now| {
        let parent = match at(object, "spec.parentRef") {
            Value::Null => row::NONE.to_owned(),
            p => {
                let mut name = text(p, "resource").to_lowercase();
                if !text(p, "group").is_empty() {
                    name = format!("{name}.{}", text(p, "group"));
                }
                if !text(p, "namespace").is_empty() {
                    name = format!("{name}/{}", text(p, "namespace"));
                }
                format!("{name}/{}", text(p, "name"))
            }
        };
        vec![row::name(object), json!(parent), row::age(object, now)]
    },
    name_rule: |name, _| match name.parse::<std::net::IpAddr>() {
        Ok(address) if address.to_string() == name => Vec::new(),
        Ok(address) => vec![format!("must be in canonical form (\"{address}\")")],
        Err(_) => vec!["must be a valid IP address, (e.g. 10.9.8.7 or 2001:db8::ffff)".to_owned()],
    },
    update_again: Again::ObjectFirst,
    ..BASE
};

pub static SERVICE_CIDR: Kind = Kind {
    group: "networking.k8s.io",
    kind: "ServiceCIDR",
    prepare_create: strategy::create_without_status,
    prepare_update: strategy::update_keep_status,
    prepare_status_update: strategy::status_only_keep_metadata,
    validate: |object| {
        let mut errors = Errors::new();
        let root = Node::root(object);
        cidr_list(&root.field("spec.cidrs"), &mut errors);
        errors.into_vec()
    },
    validate_update: |new, old| {
        let mut errors = Errors::new();
        let root = Node::root(new);
        let cidrs = root.field("spec.cidrs");
        let before = list(old, "spec.cidrs");
        let first = |count| {
            cidrs
                .items()
                .zip(before)
                .take(count)
                .filter(|(now, then)| now.value != *then)
        };
        match (before.len(), cidrs.len()) {
            (then, now) if then == now => {
                for (cidr, _) in first(now) {
                    errors.invalid(&cidr, crate::errors::IMMUTABLE);
                }
            }
            (1, 2) => {
                for (cidr, _) in first(1) {
                    errors.invalid(&cidr, crate::errors::IMMUTABLE);
                }
                cidr_list(&cidrs, &mut errors);
            }
            _ => errors.push(
                ErrorType::Invalid,
                &cidrs,
                Some(cidrs.value.clone()),
                crate::errors::IMMUTABLE,
            ),
        }
        errors.into_vec()
    },
    status_again: Again::None,
    columns: &[NAME, column("CIDRs"), AGE],
    row: |object, now| {
        let cidrs: Vec<&str> = list(object, "spec.cidrs")
            .iter()
            .filter_map(Value::as_str)
            .collect();
        vec![row::name(object), json!(cidrs.join(",")), row::age(object, now)]
    },
    has_status: true,
    update_again: Again::Change,
    reset_fields: STATUS_ALONE,
    ..BASE
};

fn cidr_list(cidrs: &Node, errors: &mut Errors) {
    if cidrs.is_empty() {
        errors.required(cidrs, "at least one CIDR required");
        return;
    }
    if cidrs.len() > 2 {
        // COMPAT: upstream shows the whole spec.
        errors.invalid_value(
            cidrs,
            json!({"CIDRs": cidrs.value}),
            "may only hold up to 2 values",
        );
        return;
    }
    let mut families = Vec::new();
    for cidr in cidrs.items() {
        let family = net::parse_cidr(cidr.str()).map(|(address, _)| address.is_ipv4());
        net::canonical_cidr(&cidr, errors);
        families.extend(family);
    }
    if families.len() == 2 && families[0] == families[1] {
        errors.invalid(
            cidrs,
            "may specify no more than one IP for each IP family, i.e 192.168.0.0/24 and 2001:db8::/64",
        );
    }
}
