//! What CSI drivers tell the cluster: CSIDrivers, CSINodes and CSIStorageCapacities.

use std::collections::BTreeSet;

use serde_json::{Value, json};
use skiff_meta::names;

use super::GROUP;
use crate::core::resources::quantity;
use crate::core::volume_sources::csi_driver_name;
use crate::errors::Errors;
use crate::kind::{AGE, Again, BASE, Kind, NAME, boolean, integer, text as column};
use crate::node::{Node, at, list, same, text};
use crate::object_meta::label_selector;
use crate::{row, strategy, walk};

const UNSAFE_TOKENS: &str = "spec.serviceAccountTokenInSecrets is unset; if supported by this CSI driver, set to true to prevent possible logging of tokens in volume attributes";
const NODE_ID_MAX: usize = 256;

/// The limits of volumes are not scaled by default, so nothing waits for a driver.
fn drop_scheduling_gate(spec: &mut Value) {
    walk::remove(spec, "preventPodSchedulingIfMissing");
}

pub static CSI_DRIVER: Kind = Kind {
    group: GROUP,
    kind: "CSIDriver",
    default: |_, object| {
        let Some(spec) = walk::object(object, "spec") else {
            return;
        };
        walk::pointer(spec, "attachRequired", true);
        for name in [
            "podInfoOnMount",
            "storageCapacity",
            "requiresRepublish",
            "seLinuxMount",
        ] {
            walk::pointer(spec, name, false);
        }
        walk::pointer(spec, "fsGroupPolicy", "ReadWriteOnceWithFSType");
        if list(spec, "volumeLifecycleModes").is_empty() {
            walk::put(spec, "volumeLifecycleModes", json!(["Persistent"]));
        }
    },
    validate: |object| {
        let mut errors = Errors::new();
        let root = Node::root(object);
        let spec = root.field("spec");
        errors.one_of_if_set(
            &spec.field("fsGroupPolicy"),
            &["File", "None", "ReadWriteOnceWithFSType"],
        );
        token_requests(&spec.field("tokenRequests"), &mut errors);
        let modes = spec.field("volumeLifecycleModes");
        for mode in modes.items() {
            errors.one_of(&modes.with(mode.value), &["Persistent", "Ephemeral"]);
        }
        let period = spec.field("nodeAllocatableUpdatePeriodSeconds");
        if period.int().is_some_and(|seconds| seconds < 10) {
            errors.invalid(&period, "must be greater than or equal to 10 seconds");
        }
        let secrets = spec.field("serviceAccountTokenInSecrets");
        if secrets.is_set() && spec.field("tokenRequests").is_empty() {
            errors.invalid(
                &secrets,
                "serviceAccountTokenInSecrets is set but no tokenRequests are specified",
            );
        }
        errors.into_vec()
    },
    validate_update: |new, old| {
        let mut errors = Errors::new();
        errors.extend((CSI_DRIVER.validate)(new));
        let root = Node::root(new);
        // COMPAT: upstream's path is not that of the field.
        let required = root.field("spec.attachedRequired");
        errors.immutable(
            &required.with(at(new, "spec.attachRequired")),
            at(old, "spec.attachRequired"),
        );
        let modes = root.field("spec.volumeLifecycleModes");
        errors.immutable(&modes, at(old, "spec.volumeLifecycleModes"));
        errors.into_vec()
    },
    update_again: Again::Change,
    prepare_create: |object| walk::each(object, "spec", &mut drop_scheduling_gate),
    prepare_update: |new, old| {
        if at(old, "spec.preventPodSchedulingIfMissing").is_null() {
            walk::each(new, "spec", &mut drop_scheduling_gate);
        }
        strategy::update_generation(new, old);
    },
    warnings: |new, old| {
        let tokens = at(new, "spec.tokenRequests");
        let changed = old.is_none_or(|old| !same(tokens, at(old, "spec.tokenRequests")));
        let unset = at(new, "spec.serviceAccountTokenInSecrets").is_null();
        if changed && unset && !list(new, "spec.tokenRequests").is_empty() {
            return vec![UNSAFE_TOKENS.to_owned()];
        }
        Vec::new()
    },
    columns: &[
        NAME,
        boolean("AttachRequired"),
        boolean("PodInfoOnMount"),
        boolean("StorageCapacity"),
        column("TokenRequests"),
        boolean("RequiresRepublish"),
        column("Modes"),
        AGE,
    ],
    row: |object, now| {
        let flag =
            |name: &str, default: bool| json!(at(at(object, "spec"), name).as_bool().unwrap_or(default));
        let join = |list: &[Value], field: &str| -> String {
            let texts: Vec<&str> = list
                .iter()
                .map(|v| {
                    if field.is_empty() {
                        v.as_str().unwrap_or("")
                    } else {
                        text(v, field)
                    }
                })
                .collect();
            texts.join(",")
        };
        let tokens = match at(object, "spec.tokenRequests") {
            Value::Null => "<unset>".to_owned(),
            _ => join(list(object, "spec.tokenRequests"), "audience"),
        };
        vec![
            row::name(object),
            flag("attachRequired", true),
            flag("podInfoOnMount", false),
            flag("storageCapacity", false),
            json!(tokens),
            flag("requiresRepublish", false),
            row::or_none(&join(list(object, "spec.volumeLifecycleModes"), "")),
            row::age(object, now),
        ]
    },
    allow_unconditional_update: false,
    ..BASE
};

fn token_requests(requests: &Node, errors: &mut Errors) {
    let mut audiences = BTreeSet::new();
    for request in requests.items() {
        let audience = request.field("audience");
        if !audiences.insert(audience.str()) {
            errors.duplicate(&audience);
            continue;
        }
        let seconds = request.field("expirationSeconds");
        let Some(value) = seconds.int() else { continue };
        if value < 600 {
            errors.invalid(&seconds, "may not specify a duration less than 10 minutes");
        }
        if value > 1 << 32 {
            errors.invalid(&seconds, "may not specify a duration larger than 2^32 seconds");
        }
    }
}

pub static CSI_NODE: Kind = Kind {
    group: GROUP,
    kind: "CSINode",
    validate: |object| {
        let mut errors = Errors::new();
        let root = Node::root(object);
        let drivers = root.field("spec.drivers");
        let mut seen = BTreeSet::new();
        for driver in drivers.items() {
            node_driver(&driver, &mut seen, &mut errors);
        }
        errors.into_vec()
    },
    validate_update: |new, old| {
        let mut errors = Errors::new();
        errors.extend((CSI_NODE.validate)(new));
        let root = Node::root(new);
        let drivers = root.field("spec.drivers");
        for before in list(old, "spec.drivers") {
            for driver in drivers
                .items()
                .filter(|d| d.field("name").str() == text(before, "name"))
            {
                let (mut after, mut before) = (driver.value.clone(), before.clone());
                walk::remove(&mut after, "allocatable");
                walk::remove(&mut before, "allocatable");
                if !same(&after, &before) {
                    errors.invalid_value(&drivers, go_driver(&after), crate::errors::IMMUTABLE);
                }
            }
        }
        errors.into_vec()
    },
    update_again: Again::Object,
    columns: &[NAME, integer("Drivers"), AGE],
    row: |object, now| {
        vec![
            row::name(object),
            json!(list(object, "spec.drivers").len()),
            row::age(object, now),
        ]
    },
    allow_unconditional_update: false,
    ..BASE
};

fn node_driver<'v>(driver: &Node<'_, 'v>, seen: &mut BTreeSet<&'v str>, errors: &mut Errors) {
    let name = driver.field("name");
    csi_driver_name(&name, errors);
    let id = driver.field("nodeID");
    if errors.require(&id) && id.len() > NODE_ID_MAX {
        errors.invalid(&id, format!("must be {NODE_ID_MAX} characters or less"));
    }
    errors.non_negative(&driver.field("allocatable.count"));
    if !seen.insert(name.str()) {
        errors.duplicate(&name);
    }
    let mut keys = BTreeSet::new();
    let topology = driver.field("topologyKeys");
    for key in topology.items() {
        // COMPAT: the path is that of the driver.
        if key.is_empty() {
            errors.required(driver, "");
        }
        if !keys.insert(key.str()) {
            errors.duplicate_value(driver, key.str());
        }
        for complaint in names::qualified_name(key.str()) {
            errors.invalid_value(driver, key.str(), complaint);
        }
    }
}

/// COMPAT: upstream prints its inner type.
fn go_driver(driver: &Value) -> Value {
    json!({
        "Name": text(driver, "name"),
        "NodeID": text(driver, "nodeID"),
        "TopologyKeys": at(driver, "topologyKeys"),
        "Allocatable": null,
    })
}

pub static CSI_STORAGE_CAPACITY: Kind = Kind {
    group: GROUP,
    kind: "CSIStorageCapacity",
    validate: |object| {
        let mut errors = Errors::new();
        let root = Node::root(object);
        label_selector(&root.field("nodeTopology"), &mut errors);
        let class = root.field("storageClassName");
        errors.rule(&class, names::dns1123_subdomain(class.str()));
        let capacity = root.field("capacity");
        if let Some(amount) = quantity(capacity.value).filter(|amount| amount.is_negative()) {
            errors.invalid_value(&capacity, amount.to_string(), crate::errors::NOT_NEGATIVE);
        }
        errors.into_vec()
    },
    validate_update: |new, old| {
        let mut errors = Errors::new();
        let root = Node::root(new);
        errors.extend((CSI_STORAGE_CAPACITY.validate)(new));
        for name in ["nodeTopology", "storageClassName"] {
            errors.immutable(&root.field(name), at(old, name));
        }
        errors.into_vec()
    },
    allow_unconditional_update: false,
    update_again: Again::ObjectFirst,
    ..BASE
};
