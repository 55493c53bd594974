//! IPAddresses and ServiceCIDRs.

use serde_json::{Value, json};

use crate::errors::Errors;
use crate::kind::{Again, AGE, BASE, Kind, NAME, text as column};
use crate::net;
use crate::node::{Node, at, list, same, text};
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
        } else {
            errors.require(&parent.field("resource"));
            errors.require(&parent.field("name"));
        }
        errors.into_vec()
    },
    validate_update: |new, old| {
        let mut errors = Errors::new();
        let root = Node::root(new);
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
        let cidrs = root.field("spec.cidrs");
        if cidrs.is_empty() {
            errors.required(&cidrs, "at least one CIDR required");
            return errors.into_vec();
        }
        let mut families = Vec::new();
        if cidrs.len() > 2 {
            let shown = cidrs.value.clone();
            errors.invalid_value(&cidrs, shown, "may only hold up to 2 values");
        } else {
            for cidr in cidrs.items() {
                families.extend(net::cidr(&cidr, &mut errors).map(|(a, _)| a.is_ipv4()));
            }
            if families.len() == 2 && families[0] == families[1] {
                let shown = cidrs.value.clone();
                errors.invalid_value(&cidrs, shown, "may specify no more than one IP for each IP family, i.e 192.168.0.0/24 and 2001:db8::/96");
            }
        }
        errors.into_vec()
    },
    validate_update: |new, old| {
        let mut errors = Errors::new();
        let root = Node::root(new);
        let cidrs = root.field("spec.cidrs");
        if !same(cidrs.value, at(old, "spec.cidrs")) {
            let shown = cidrs.value.clone();
            errors.invalid_value(&cidrs, shown, crate::errors::IMMUTABLE);
        }
        errors.into_vec()
    },
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
    ..BASE
};
