//! ResourceSlices: what devices a driver offers.

use std::collections::BTreeSet;

use serde_json::{Value, json};
use skiff_meta::{field, names};

use super::GROUP;
use super::claim::{TAINT_EFFECTS, fits, label, qualified, unique};
use super::claim_status::pool_name;
use crate::core::resources::{is_native, quantity};
use crate::core::scheduling::node_selector;
use crate::core::volume_sources::csi_driver_name;
use crate::errors::Errors;
use crate::kind::{AGE, Again, BASE, Kind, NAME, text as column};
use crate::node::{Node, at, list, same, text};
use crate::{row, strategy, walk};

const DEVICES_MAX: usize = 128;
const ADVANCED_DEVICES_MAX: usize = 64;
const COUNTER_SETS_MAX: usize = 8;
const COUNTERS_MAX: usize = 32;
const CONSUMPTIONS_MAX: usize = 2;
const ATTRIBUTES_MAX: usize = 32;
const ATTRIBUTE_VALUES_MAX: usize = 48;
const VALUE_MAX: usize = 64;
const TAINTS_MAX: usize = 16;
const OPTIONS_MAX: usize = 10;
const BINDING_MAX: usize = 4;

pub static RESOURCE_SLICE: Kind = Kind {
    group: GROUP,
    kind: "ResourceSlice",
    prepare_create: |object| {
        drop_disabled(object);
        let now = at(object, "metadata.creationTimestamp").clone();
        walk::each(object, "spec.devices[].taints[]", &mut |taint| {
            walk::pointer(taint, "timeAdded", now.clone())
        });
        strategy::create_generation_only(object);
    },
    prepare_update: |new, old| {
        strategy::update_generation(new, old);
        drop_disabled(new);
    },
    validate: |object| {
        let mut errors = Errors::new();
        spec(&Node::root(object).field("spec"), None, &mut errors);
        errors.into_vec()
    },
    validate_update: |new, old| {
        let mut errors = Errors::new();
        spec(&Node::root(new).field("spec"), Some(at(old, "spec")), &mut errors);
        errors.into_vec()
    },
    selectable: |object| {
        vec![
            ("spec.nodeName", text(object, "spec.nodeName").to_owned()),
            ("spec.driver", text(object, "spec.driver").to_owned()),
        ]
    },
    warnings: |new, _| {
        let driver = text(new, "spec.driver");
        if driver.chars().any(char::is_uppercase) {
            let quoted = field::quote(driver);
            return vec![format!(
                "spec.driver: driver names should be lowercase; {quoted} contains uppercase characters"
            )];
        }
        Vec::new()
    },
    columns: &[NAME, column("Node"), column("Driver"), column("Pool"), AGE],
    row: |object, now| {
        vec![
            row::name(object),
            json!(text(object, "spec.nodeName")),
            json!(text(object, "spec.driver")),
            json!(text(object, "spec.pool.name")),
            row::age(object, now),
        ]
    },
    update_again: Again::Change,
    hidden_fields: &["metadata.namespace"],
    unknown_field: |version, label| {
        format!("field label not supported for {GROUP}/{version}, Kind=ResourceSlice: {label}")
    },
    ..BASE
};

/// Attributes with many values, and devices that stand for a node's own resources, are off by default.
fn drop_disabled(object: &mut Value) {
    walk::each(object, "spec.devices[]", &mut |device| {
        walk::remove(device, "nodeAllocatableResourceMappings");
        if let Some(attributes) = device.get_mut("attributes").and_then(Value::as_object_mut) {
            for attribute in attributes.values_mut() {
                for name in ["bools", "ints", "strings", "versions"] {
                    walk::remove(attribute, name);
                }
            }
        }
    });
}

fn spec(spec: &Node, old: Option<&Value>, errors: &mut Errors) {
    csi_driver_name(&spec.field("driver"), errors);
    let pool = spec.field("pool");
    pool_name(&pool.field("name"), errors);
    let number = |name| pool.field(name).int().unwrap_or(0);
    if number("resourceSliceCount") <= 0 {
        let shown = number("resourceSliceCount");
        errors.invalid_value(&pool.field("resourceSliceCount"), shown, crate::errors::POSITIVE);
    }
    if number("generation") < 0 {
        errors.invalid(&pool.field("generation"), "must be greater than or equal to zero");
    }
    if let Some(old) = old {
        for name in ["pool.name", "driver"] {
            errors.immutable(&spec.field(name), at(old, name));
        }
        errors.immutable_as("", &spec.field("nodeName"), at(old, "nodeName"));
    }
    place(spec, errors);
    let (counters, devices) = (spec.field("sharedCounters"), spec.field("devices"));
    if counters.is_set() && devices.is_set() {
        errors.invalid_value(spec, "", "only one of `sharedCounters` or `devices` is allowed");
    }
    let advanced = list(spec.value, "devices").iter().any(is_advanced);
    let most = if advanced {
        ADVANCED_DEVICES_MAX
    } else {
        DEVICES_MAX
    };
    if fits(&devices, most, errors) {
        let own_place = spec.field("perDeviceNodeSelection").bool();
        for one in devices.items() {
            let before = old.and_then(|old| {
                list(old, "devices")
                    .iter()
                    .find(|d| text(d, "name") == one.field("name").str())
            });
            device(&one, before, own_place, errors);
        }
        unique(&devices, |device| device.field("name").str().to_owned(), errors);
    }
    if fits(&counters, COUNTER_SETS_MAX, errors) {
        for set in counters.items() {
            counter_set(&set, "name", errors);
        }
        unique(&counters, |set| set.field("name").str().to_owned(), errors);
    }
}

fn is_advanced(device: &Value) -> bool {
    let values = at(device, "attributes").as_object();
    !list(device, "taints").is_empty()
        || !list(device, "consumesCounters").is_empty()
        || values.into_iter().flatten().any(|(_, attribute)| {
            ["bools", "ints", "strings", "versions"]
                .iter()
                .any(|name| !at(attribute, name).is_null())
        })
}

/// Where the devices are: exactly one way of saying it.
fn place(spec: &Node, errors: &mut Errors) {
    let mut set = Vec::new();
    let node = spec.field("nodeName");
    if node.is_set() && node.is_empty() {
        errors.invalid(&node, "must be either unset or set to a non-empty string");
    } else if node.is_set() {
        set.push("`nodeName`");
        errors.rule(&node, names::dns1123_subdomain(node.str()));
    }
    let selector = spec.field("nodeSelector");
    if selector.is_set() {
        set.push("`nodeSelector`");
        node_selector(&selector, errors);
        let terms = selector.field("nodeSelectorTerms");
        if terms.len() != 1 {
            let shown = if terms.is_set() {
                terms.value.clone()
            } else {
                Value::Null
            };
            errors.push(
                field::ErrorType::Invalid,
                &terms,
                Some(shown),
                "must have exactly one node selector term",
            );
        }
    }
    for (name, quoted) in [
        ("allNodes", "`allNodes`"),
        ("perDeviceNodeSelection", "`perDeviceNodeSelection`"),
    ] {
        let flag = spec.field(name);
        if flag.bool() {
            set.push(quoted);
        } else if flag.is_set() {
            errors.invalid(&flag, "must be either unset or set to true");
        }
    }
    let all = "`nodeName`, `nodeSelector`, `allNodes`, `perDeviceNodeSelection`";
    match set.len() {
        0 => errors.required(spec, format!("exactly one of {all} is required")),
        1 => {}
        _ => errors.invalid_value(
            spec,
            format!("{{{}}}", set.join(", ")),
            format!("exactly one of {all} is required, but multiple fields are set"),
        ),
    }
}

fn counter_set(set: &Node, name: &str, errors: &mut Errors) {
    let name = set.field(name);
    if errors.require(&name) {
        label(&name, errors);
    }
    let counters = set.field("counters");
    if counters.is_empty() {
        errors.required(&counters, "");
    } else if fits(&counters, COUNTERS_MAX, errors) {
        for (key, _) in counters.entries() {
            for complaint in names::dns1123_label(key) {
                errors.invalid_value(&counters, key, complaint);
            }
        }
    }
}

fn device(device: &Node, old: Option<&Value>, own_place: bool, errors: &mut Errors) {
    label(&device.field("name"), errors);
    let (attributes, capacity) = (device.field("attributes"), device.field("capacity"));
    let total = attributes.len() + capacity.len();
    if total > ATTRIBUTES_MAX {
        let detail =
            format!("the total number of attributes and capacities must not exceed {ATTRIBUTES_MAX}");
        errors.invalid_value(device, total, detail);
    }
    let values: usize = attributes
        .entries()
        .map(|(_, attribute)| entries(&attribute))
        .sum();
    if values > ATTRIBUTE_VALUES_MAX {
        let detail = format!("the total number of attribute values must not exceed {ATTRIBUTE_VALUES_MAX}");
        errors.invalid_value(device, values, detail);
    }
    for (key, one) in attributes.entries() {
        qualified(&attributes, key, errors);
        attribute(&one, errors);
    }
    let shared = device.field("allowMultipleAllocations").bool();
    for (key, one) in capacity.entries() {
        qualified(&capacity, key, errors);
        let policy = one.field("requestPolicy");
        if policy.is_set() && shared {
            request_policy(&one.field("value"), &policy, errors);
        } else if policy.is_set() {
            errors.forbidden(&policy, "allowMultipleAllocations must be true");
        }
    }
    let taints = device.field("taints");
    if old.is_none_or(|old| !same(at(old, "taints"), taints.value)) && fits(&taints, TAINTS_MAX, errors) {
        for taint in taints.items() {
            let (key, value) = (taint.field("key"), taint.field("value"));
            errors.rule(&key, names::qualified_name(key.str()));
            if !value.is_empty() {
                errors.rule(&value, names::label_value(value.str()));
            }
            errors.required_one_of(&taint.field("effect"), &TAINT_EFFECTS);
        }
    }
    let consumed = device.field("consumesCounters");
    if fits(&consumed, CONSUMPTIONS_MAX, errors) {
        for set in consumed.items() {
            counter_set(&set, "counterSet", errors);
        }
        unique(&consumed, |set| set.field("counterSet").str().to_owned(), errors);
    }
    device_place(device, own_place, errors);
    binding_conditions(device, errors);
    mappings(device, errors);
}

/// Who waits for conditions must know when to give up, and by others.
pub(super) fn binding_conditions(device: &Node, errors: &mut Errors) {
    let (binding, failure) = (
        device.field("bindingConditions"),
        device.field("bindingFailureConditions"),
    );
    for conditions in [&binding, &failure] {
        if fits(conditions, BINDING_MAX, errors) {
            for condition in conditions.items() {
                errors.rule(&condition, names::qualified_name(condition.str()));
            }
        }
    }
    unique(&binding, |condition| condition.str().to_owned(), errors);
    let waited: BTreeSet<&str> = list(device.value, "bindingConditions")
        .iter()
        .filter_map(Value::as_str)
        .collect();
    let mut seen = BTreeSet::new();
    for condition in failure.items() {
        if !seen.insert(condition.str()) {
            errors.duplicate(&condition);
        }
        if waited.contains(condition.str()) {
            errors.invalid(
                &condition,
                "bindingFailureConditions must not overlap with bindingConditions",
            );
        }
    }
    for (missing, missed, given) in [
        (&binding, "bindingConditions", "bindingFailureConditions"),
        (&failure, "bindingFailureConditions", "bindingConditions"),
    ] {
        if missing.is_empty() && !device.field(given).is_empty() {
            errors.push(
                field::ErrorType::Invalid,
                missing,
                Some(missing.value.clone()),
                format!("{missed} are required to use {given}"),
            );
        }
    }
}

fn entries(attribute: &Node) -> usize {
    let many: usize = ["bools", "ints", "strings", "versions"]
        .iter()
        .map(|name| attribute.field(name).len())
        .sum();
    many.max(1)
}

fn device_place(device: &Node, own_place: bool, errors: &mut Errors) {
    let (node, selector, all) = (
        device.field("nodeName"),
        device.field("nodeSelector"),
        device.field("allNodes"),
    );
    if !own_place {
        if node.is_set() || selector.is_set() || all.is_set() {
            errors.push(
                field::ErrorType::Invalid,
                device,
                Some(Value::Null),
                "`nodeName`, `nodeSelector` and `allNodes` can only be set if `perDeviceNodeSelection` is set to true in the ResourceSlice spec",
            );
        }
        return;
    }
    let mut set = Vec::new();
    if node.is_set() && node.is_empty() {
        errors.invalid(&node, "must not be empty");
    } else if node.is_set() {
        set.push("`nodeName`");
        errors.rule(&node, names::dns1123_subdomain(node.str()));
    }
    if selector.is_set() {
        set.push("`nodeSelector`");
        node_selector(&selector, errors);
    }
    if all.bool() {
        set.push("`allNodes`");
    } else if all.is_set() {
        errors.invalid(&all, "must be either unset or set to true");
    }
    let detail = "exactly one of `nodeName`, `nodeSelector`, or `allNodes` is required when `perDeviceNodeSelection` is set to true in the ResourceSlice spec";
    match set.len() {
        0 => errors.required(device, detail),
        1 => {}
        _ => errors.invalid_value(device, format!("{{{}}}", set.join(", ")), detail),
    }
}

fn mappings(device: &Node, errors: &mut Errors) {
    let mappings = device.field("nodeAllocatableResourceMappings");
    for (name, mapping) in mappings.entries() {
        if !is_native(name) {
            errors.invalid_value(&mapping, name, "must be a node allocatable resource name");
        }
        let (multiplier, key) = (
            mapping.field("allocationMultiplier"),
            mapping.field("capacityKey"),
        );
        if !multiplier.is_set() && !key.is_set() {
            errors.invalid_value(
                &mapping,
                "",
                "at least one of allocationMultiplier or capacityKey must be set",
            );
        }
        if let Some(found) = quantity(multiplier.value).filter(|q| q.is_zero() || q.is_negative()) {
            errors.invalid_value(&multiplier, found.to_string(), "must be positive");
        }
        if key.is_set() && key.is_empty() {
            errors.invalid(&key, "capacityKey must not be an empty string");
        } else if key.is_set() && !device.field("capacity").key(key.str()).is_set() {
            errors.not_found(&key);
        }
    }
}

fn attribute(attribute: &Node, errors: &mut Errors) {
    let mut set = 0;
    for name in ["bool", "int", "string", "version"] {
        let value = attribute.field(name);
        if value.is_set() {
            set += 1;
            value_rule(name, &value, errors);
        }
    }
    for (name, one) in [
        ("bools", "bool"),
        ("ints", "int"),
        ("strings", "string"),
        ("versions", "version"),
    ] {
        let values = attribute.field(name);
        if values.is_set() {
            set += 1;
            if values.is_empty() {
                errors.invalid(&values, "must not be empty if specified");
            }
            for value in values.items() {
                value_rule(one, &value, errors);
            }
        }
    }
    match set {
        0 => errors.invalid_value(attribute, "", "exactly one value must be specified"),
        1 => {}
        _ => errors.invalid_value(
            attribute,
            attribute.value.clone(),
            "exactly one value must be specified",
        ),
    }
}

fn value_rule(kind: &str, value: &Node, errors: &mut Errors) {
    if kind == "version" && !is_semver(value.str()) {
        errors.invalid(value, "must be a string compatible with semver.org spec 2.0.0");
    }
    if ["string", "version"].contains(&kind) && value.len() > VALUE_MAX {
        errors.too_long(value, VALUE_MAX);
    }
}

fn is_semver(text: &str) -> bool {
    let numeric = |part: &str| {
        !part.is_empty()
            && part.bytes().all(|b| b.is_ascii_digit())
            && (part == "0" || !part.starts_with('0'))
    };
    let word = |part: &str| !part.is_empty() && part.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-');
    let (text, build) = text.split_once('+').map_or((text, None), |(t, b)| (t, Some(b)));
    let (core, before) = text.split_once('-').map_or((text, None), |(c, p)| (c, Some(p)));
    let parts: Vec<&str> = core.split('.').collect();
    parts.len() == 3
        && parts.iter().all(|part| numeric(part))
        && before.is_none_or(|pre| {
            pre.split('.')
                .all(|part| word(part) && (numeric(part) || !part.bytes().all(|b| b.is_ascii_digit())))
        })
        && build.is_none_or(|build| build.split('.').all(word))
}

fn request_policy(value: &Node, policy: &Node, errors: &mut Errors) {
    let (options, range, default) = (
        policy.field("validValues"),
        policy.field("validRange"),
        policy.field("default"),
    );
    if !options.is_empty() && range.is_set() {
        errors.forbidden(policy, "exactly one policy can be specified, cannot specify \"validValues\" and \"validRange\" at the same time");
        return;
    }
    let Some(capacity) = quantity(value.value).or_else(|| quantity(&json!("0"))) else {
        return;
    };
    let wanted = quantity(default.value);
    if !options.is_empty() {
        let Some(wanted) = wanted else {
            errors.required(&default, "required when validValues is defined");
            return;
        };
        let values: Vec<_> = options
            .items()
            .filter_map(|option| quantity(option.value))
            .collect();
        for (i, pair) in values.windows(2).enumerate() {
            if pair[0] > pair[1] {
                let shown = pair[1].to_string();
                errors.invalid_value(
                    &options.index(i + 1),
                    shown,
                    "values must be sorted in ascending order",
                );
            }
        }
        let mut found = false;
        if fits(&options, OPTIONS_MAX, errors) {
            for (option, value) in options.items().zip(&values) {
                if *value > capacity {
                    errors.invalid_value(
                        &option,
                        value.to_string(),
                        format!("option is larger than capacity value: {capacity}"),
                    );
                }
                found |= *value == wanted;
            }
            let key =
                |option: &Node| quantity(option.value).map_or_else(String::new, |q| q.value().to_string());
            unique(&options, key, errors);
        }
        if !found {
            errors.invalid_value(
                &options,
                wanted.to_string(),
                "default value is not valid according to the requestPolicy",
            );
        }
    } else if range.is_set() {
        let Some(wanted) = wanted else {
            errors.required(&default, "required when validRange is defined");
            return;
        };
        let (least, most, step) = (range.field("min"), range.field("max"), range.field("step"));
        let Some(min) = quantity(least.value) else {
            errors.required(&least, "required when validRange is defined");
            return;
        };
        if min > capacity {
            errors.invalid_value(
                &least,
                min.to_string(),
                format!("min is larger than capacity value: {capacity}"),
            );
        }
        if wanted < min {
            errors.invalid_value(
                &least,
                wanted.to_string(),
                format!("default is less than min: {min}"),
            );
        }
        let max = quantity(most.value);
        if let Some(max) = &max {
            if min > *max {
                errors.invalid_value(&most, min.to_string(), format!("min is larger than max: {max}"));
            }
            if *max > capacity {
                errors.invalid_value(
                    &most,
                    max.to_string(),
                    format!("max is larger than capacity value: {capacity}"),
                );
            }
            if wanted > *max {
                errors.invalid_value(
                    &most,
                    wanted.to_string(),
                    format!("default is more than max: {max}"),
                );
            }
        }
        if let Some(by) = quantity(step.value) {
            let once = min.plus(&by);
            if once > capacity {
                errors.invalid_value(
                    &step,
                    by.to_string(),
                    format!("one step {once} is larger than capacity value: {capacity}"),
                );
            }
            for value in std::iter::once(&wanted).chain(&max) {
                // A step of nothing divides nothing.
                let rest = (value.value() - min.value()).checked_rem(by.value());
                if rest != Some(0) {
                    errors.invalid_value(
                        &step,
                        value.to_string(),
                        format!("value is not a multiple of a given step ({by}) from ({min})"),
                    );
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(changes: Value, expected: &[&str]) {
        let mut object = json!({"driver": "d.example.com", "pool": {"name": "p", "resourceSliceCount": 1}, "nodeName": "n"});
        for (name, value) in changes.as_object().into_iter().flatten() {
            crate::walk::put(&mut object, name, value.clone());
        }
        let mut errors = Errors::new();
        spec(&Node::root(&object), None, &mut errors);
        let found: Vec<String> = errors.into_vec().iter().map(ToString::to_string).collect();
        assert_eq!(found, expected, "{changes}");
    }

    #[test]
    fn slices() {
        check(json!({}), &[]);
        check(
            json!({"pool": {"name": "p", "resourceSliceCount": 0}}),
            &["pool.resourceSliceCount: Invalid value: 0: must be greater than zero"],
        );
        check(
            json!({"devices": [{"name": "a", "attributes": {"x": {"version": "1"}}}, {"name": "a", "nodeName": "n"}]}),
            &[
                "devices[0].attributes[x].version: Invalid value: \"1\": must be a string compatible with semver.org spec 2.0.0",
                "devices[1]: Invalid value: null: `nodeName`, `nodeSelector` and `allNodes` can only be set if `perDeviceNodeSelection` is set to true in the ResourceSlice spec",
                "devices[1]: Duplicate value: \"a\"",
            ],
        );
        check(
            json!({"devices": [{"name": "a", "allowMultipleAllocations": true, "capacity": {"m": {"value": "4",
                "requestPolicy": {"default": "1", "validRange": {"min": "2", "step": "1"}}}}}]}),
            &[
                "devices[0].capacity[m].requestPolicy.validRange.min: Invalid value: \"1\": default is less than min: 2",
            ],
        );
    }

    #[test]
    fn versions() {
        for (text, good) in [
            ("1.2.3", true),
            ("1.2.3-a.1+b", true),
            ("01.2.3", false),
            ("1.2", false),
            ("1.2.3-01", false),
        ] {
            assert_eq!(is_semver(text), good, "{text}");
        }
    }
}
