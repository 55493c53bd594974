//! What allocators and drivers write into a claim's status.

use std::collections::BTreeSet;

use serde_json::{Value, json};
use skiff_meta::{field, names};

use super::claim::{
    CONFIG_MAX, configuration, fits, label, raw_object, request_names, request_ref, request_refs, unique,
};
use super::slice::binding_conditions;
use crate::core::scheduling::node_selector;
use crate::core::volume_sources::csi_driver_name;
use crate::errors::Errors;
use crate::node::{Node, at, list, text};
use crate::object_meta::conditions;
use crate::walk;

const RESERVED_MAX: usize = 256;
const RESULTS_MAX: usize = 32;
const DATA_MAX: usize = 10 * 1024;
const CONDITIONS_MAX: usize = 8;
const IPS_MAX: usize = 16;

pub fn pool_name(name: &Node, errors: &mut Errors) {
    if !errors.require(name) {
        return;
    }
    if name.len() > 253 {
        errors.too_long(name, 253);
    }
    for part in name.str().split('/') {
        for complaint in names::dns1123_subdomain(part) {
            errors.invalid_value(name, part, complaint);
        }
    }
}

fn device_id(device: &Value) -> String {
    format!(
        "{}/{}/{}",
        text(device, "driver"),
        text(device, "pool"),
        text(device, "device")
    )
}

/// A device and which share of it.
fn shared_id(device: &Value) -> String {
    match text(device, "shareID") {
        "" => device_id(device),
        share => format!("{}/{share}", device_id(device)),
    }
}

pub fn update(new: &Value, old: &Value, errors: &mut Errors) {
    let root = Node::root(new);
    let status = root.field("status");
    let known = request_names(at(new, "spec.devices"));
    let reserved = status.field("reservedFor");
    if fits(&reserved, RESERVED_MAX, errors) {
        for consumer in reserved.items() {
            for name in ["resource", "name", "uid"] {
                errors.require(&consumer.field(name));
            }
        }
        unique(
            &reserved,
            |consumer| consumer.field("uid").str().to_owned(),
            errors,
        );
    }
    let allocation = status.field("allocation");
    let allocated: BTreeSet<String> = list(allocation.value, "devices.results")
        .iter()
        .map(shared_id)
        .collect();
    let devices = status.field("devices");
    for device in devices.items() {
        device_status(&device, &allocated, errors);
    }
    let mut seen = BTreeSet::new();
    for device in devices.items() {
        if !seen.insert(shared_id(device.value)) {
            errors.duplicate_text(&device, &shown(device.value));
        }
    }
    if !reserved.is_empty() {
        if !allocation.is_set() {
            errors.forbidden(&reserved, "may not be specified when `allocated` is not set");
        } else if !at(new, "metadata.deletionTimestamp").is_null()
            && reserved
                .items()
                .any(|consumer| !list(old, "status.reservedFor").contains(consumer.value))
        {
            errors.forbidden(
                &reserved,
                "new entries may not be added while `deallocationRequested` or `deletionTimestamp` are set",
            );
        }
    }
    let before = at(old, "status.allocation");
    if allocation.is_set() && !before.is_null() {
        errors.immutable_as("resource.AllocationResult", &allocation, before);
    } else if allocation.is_set() {
        allocation_result(&allocation, &known, errors);
    }
}

/// What is known of a device goes with its allocation.
pub fn forget_deallocated(new: &mut Value, old: &Value) {
    let ids = |claim: &Value| -> BTreeSet<String> {
        list(claim, "status.allocation.devices.results")
            .iter()
            .map(shared_id)
            .collect()
    };
    let (now, before) = (ids(new), ids(old));
    if let Some(Value::Array(devices)) = new.pointer_mut("/status/devices") {
        devices.retain(|device| {
            let id = shared_id(device);
            now.contains(&id) || !before.contains(&id)
        });
        if devices.is_empty()
            && let Some(status) = new.get_mut("status")
        {
            walk::remove(status, "devices");
        }
    }
}

/// COMPAT: upstream prints its inner type.
fn shown(device: &Value) -> String {
    let [driver, pool, name, share] =
        ["driver", "pool", "device", "shareID"].map(|name| json!(text(device, name)));
    format!(r#"{{"Driver":{driver},"Pool":{pool},"Device":{name},"ShareID":{share}}}"#)
}

fn allocation_result(allocation: &Node, known: &BTreeSet<String>, errors: &mut Errors) {
    let results = allocation.field("devices.results");
    if fits(&results, RESULTS_MAX, errors) {
        for result in results.items() {
            request_ref(&result.field("request"), known, errors);
            csi_driver_name(&result.field("driver"), errors);
            pool_name(&result.field("pool"), errors);
            label(&result.field("device"), errors);
            binding_conditions(&result, errors);
            share(&result.field("shareID"), errors);
        }
    }
    let config = allocation.field("devices.config");
    if fits(&config, 2 * CONFIG_MAX, errors) {
        for entry in config.items() {
            errors.required_one_of(&entry.field("source"), &["FromClaim", "FromClass"]);
            request_refs(&entry.field("requests"), known, errors);
            configuration(&entry, errors);
        }
    }
    let selector = allocation.field("nodeSelector");
    if selector.is_set() {
        node_selector(&selector, errors);
    }
}

/// Which share of a device: a UUID in its usual form.
fn share(id: &Node, errors: &mut Errors) {
    if !id.is_set() {
        return;
    }
    let text = id.str();
    if let Err(complaint) = uuid(text) {
        errors.invalid(id, format!("error validating uid: {complaint}"));
    } else if text.len() != 36 || text.bytes().any(|b| b.is_ascii_uppercase()) {
        errors.invalid(
            id,
            "uid must be in RFC 4122 normalized form, `xxxxxxxx-xxxx-xxxx-xxxx-xxxxxxxxxxxx` with lowercase hexadecimal characters",
        );
    }
}

/// All forms that upstream's library reads.
fn uuid(text: &str) -> Result<(), String> {
    const FORMAT: &str = "invalid UUID format";
    let bytes = text.as_bytes();
    let inner = match bytes.len() {
        36 => bytes,
        45 if bytes[..9].eq_ignore_ascii_case(b"urn:uuid:") => &bytes[9..],
        45 => {
            let prefix = field::quote(&String::from_utf8_lossy(&bytes[..9]));
            return Err(format!("invalid urn prefix: {prefix}"));
        }
        38 if bytes[0] == b'{' && bytes[37] == b'}' => &bytes[1..37],
        38 => return Err("invalid bracketed UUID format".to_owned()),
        32 if bytes.iter().all(u8::is_ascii_hexdigit) => return Ok(()),
        32 => return Err(FORMAT.to_owned()),
        length => return Err(format!("invalid UUID length: {length}")),
    };
    let good = inner.iter().enumerate().all(|(i, byte)| match i {
        8 | 13 | 18 | 23 => *byte == b'-',
        _ => byte.is_ascii_hexdigit(),
    });
    good.then_some(()).ok_or_else(|| FORMAT.to_owned())
}

fn device_status(device: &Node, allocated: &BTreeSet<String>, errors: &mut Errors) {
    csi_driver_name(&device.field("driver"), errors);
    pool_name(&device.field("pool"), errors);
    label(&device.field("device"), errors);
    share(&device.field("shareID"), errors);
    if !allocated.contains(&shared_id(device.value)) {
        errors.invalid_text(
            device,
            &shown(device.value),
            "must be an allocated device in the claim",
        );
    }
    let found = device.field("conditions");
    if found.len() > CONDITIONS_MAX {
        errors.too_many(&found, CONDITIONS_MAX);
    }
    conditions(&found, errors);
    let data = device.field("data");
    if data.is_set() {
        raw_object(&data, DATA_MAX, errors);
    }
    let network = device.field("networkData");
    for (name, most) in [("interfaceName", 256), ("hardwareAddress", 128)] {
        let part = network.field(name);
        if part.len() > most {
            errors.too_long(&part, most);
        }
    }
    let addresses = network.field("ips");
    if fits(&addresses, IPS_MAX, errors) {
        for address in addresses.items() {
            crate::net::interface_address(&address, errors);
        }
        unique(&addresses, |address| address.str().to_owned(), errors);
    }
}
