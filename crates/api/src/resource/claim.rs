//! ResourceClaims, their templates, and DeviceClasses. Selectors' expressions are compiled by those who run them.

use std::collections::BTreeSet;

use serde_json::{Value, json};
use skiff_cel::device::Refusal;
use skiff_meta::{field, names};

use super::{GROUP, claim_status};
use crate::core::resources::is_extended;
use crate::core::volume_sources::csi_driver_name;
use crate::errors::Errors;
use crate::kind::{AGE, Again, BASE, Kind, NAME, STATUS_ALONE, text as column};
use crate::node::{Node, at, list, text};
use crate::{object_meta, row, strategy, walk};

const REQUESTS_MAX: usize = 32;
const CONSTRAINTS_MAX: usize = 32;
pub(super) const CONFIG_MAX: usize = 32;
const SELECTORS_MAX: usize = 32;
const FIRST_AVAILABLE_MAX: usize = 8;
const EXPRESSION_MAX: usize = 10 * 1024;
const PARAMETERS_MAX: usize = 10 * 1024;
const NO_REQUEST: &str =
    "must be the name of a request in the claim or the name of a request and a subrequest separated by '/'";
pub(super) const TAINT_EFFECTS: [&str; 3] = ["NoExecute", "NoSchedule", "None"];

pub static RESOURCE_CLAIM: Kind = Kind {
    group: GROUP,
    kind: "ResourceClaim",
    default: |_, object| {
        walk::each(object, "spec", &mut claim_defaults);
        walk::each(
            object,
            "status.allocation.devices.results[].tolerations[]",
            &mut |toleration| {
                walk::string(toleration, "operator", "Equal");
            },
        );
    },
    prepare_create: strategy::create_without_status,
    prepare_update: strategy::update_keep_status,
    prepare_status_update: |new, old| {
        strategy::status_only_keep_metadata(new, old);
        claim_status::forget_deallocated(new, old);
    },
    validate: |object| {
        let mut errors = Errors::new();
        device_claim(&Node::root(object).field("spec.devices"), &mut errors);
        errors.into_vec()
    },
    validate_update: |new, old| {
        let mut errors = Errors::new();
        let root = Node::root(new);
        errors.immutable_as("resource.ResourceClaimSpec", &root.field("spec"), at(old, "spec"));
        errors.into_vec()
    },
    validate_status_update: |new, old| {
        let mut errors = Errors::new();
        claim_status::update(new, old, &mut errors);
        errors.into_vec()
    },
    columns: &[NAME, column("State"), AGE],
    row: |object, now| {
        let mut states = Vec::new();
        let deleted = !at(object, "metadata.deletionTimestamp").is_null();
        if deleted {
            states.push("deleted");
        }
        if at(object, "status.allocation").is_null() {
            if !deleted {
                states.push("pending");
            }
        } else {
            states.push("allocated");
            if !list(object, "status.reservedFor").is_empty() {
                states.push("reserved");
            }
        }
        vec![row::name(object), json!(states.join(",")), row::age(object, now)]
    },
    has_status: true,
    update_again: Again::ObjectFirst,
    reset_fields: STATUS_ALONE,
    // COMPAT: upstream forgot it.
    status_table: false,
    ..BASE
};

pub static RESOURCE_CLAIM_TEMPLATE: Kind = Kind {
    group: GROUP,
    kind: "ResourceClaimTemplate",
    default: |_, object| walk::each(object, "spec.spec", &mut claim_defaults),
    validate: |object| {
        let mut errors = Errors::new();
        let root = Node::root(object);
        object_meta::template(&root.field("spec.metadata"), &mut errors);
        device_claim(&root.field("spec.spec.devices"), &mut errors);
        errors.into_vec()
    },
    validate_update: |new, old| {
        let mut errors = Errors::new();
        errors.extend((RESOURCE_CLAIM_TEMPLATE.validate)(new));
        let root = Node::root(new);
        let internal = "resource.ResourceClaimTemplateSpec";
        errors.immutable_as(internal, &root.field("spec"), at(old, "spec"));
        errors.into_vec()
    },
    columns: &[NAME, AGE],
    row: row::name_and_age,
    update_again: Again::ObjectFirst,
    ..BASE
};

pub static DEVICE_CLASS: Kind = Kind {
    group: GROUP,
    kind: "DeviceClass",
    name_rule: crate::object_meta::declared_subdomain,
    prepare_create: strategy::create_generation_only,
    prepare_update: strategy::update_generation,
    validate: |object| {
        let mut errors = Errors::new();
        let root = Node::root(object);
        let spec = root.field("spec");
        selectors(&spec.field("selectors"), &mut errors);
        let config = spec.field("config");
        if fits(&config, CONFIG_MAX, &mut errors) {
            for entry in config.items() {
                configuration(&entry, &mut errors);
            }
        }
        let name = spec.field("extendedResourceName");
        if name.is_set() && !is_extended(name.str()) {
            errors.invalid(&name, "must be a valid extended resource name");
        }
        errors.into_vec()
    },
    validate_update: |new, _| (DEVICE_CLASS.validate)(new),
    columns: &[NAME, AGE],
    row: row::name_and_age,
    update_again: Again::ObjectChange,
    ..BASE
};

fn request_defaults(request: &mut Value) {
    walk::string(request, "allocationMode", "ExactCount");
    if text(request, "allocationMode") == "ExactCount" {
        walk::number(request, "count", 1);
    }
    walk::each(request, "tolerations[]", &mut |toleration| {
        walk::string(toleration, "operator", "Equal")
    });
}

fn claim_defaults(spec: &mut Value) {
    walk::each(spec, "devices.requests[].exactly", &mut request_defaults);
    walk::each(spec, "devices.requests[].firstAvailable[]", &mut request_defaults);
}

/// Whether a list is short enough to be looked at.
pub(super) fn fits(list: &Node, most: usize, errors: &mut Errors) -> bool {
    let fits = list.len() <= most;
    if !fits {
        errors.too_many(list, most);
    }
    fits
}

/// Entries that have the same key as one before.
pub(super) fn unique(list: &Node, key: impl Fn(&Node) -> String, errors: &mut Errors) {
    let mut seen = BTreeSet::new();
    for entry in list.items() {
        let key = key(&entry);
        if seen.contains(&key) {
            errors.duplicate_value(&entry, key);
        } else {
            seen.insert(key);
        }
    }
}

pub(super) fn label(at: &Node, errors: &mut Errors) {
    errors.rule(at, names::dns1123_label(at.str()));
}

/// The names that the rest of a claim may refer to.
pub(super) fn request_names(devices: &Value) -> BTreeSet<String> {
    let mut out = BTreeSet::new();
    for request in list(devices, "requests") {
        let name = text(request, "name");
        out.insert(name.to_owned());
        for sub in list(request, "firstAvailable") {
            out.insert(format!("{name}/{}", text(sub, "name")));
        }
    }
    out
}

pub(super) fn request_ref(at: &Node, known: &BTreeSet<String>, errors: &mut Errors) {
    let segments: Vec<&str> = at.str().split('/').collect();
    if segments.len() > 2 {
        errors.invalid(at, NO_REQUEST);
        return;
    }
    for segment in segments {
        for complaint in names::dns1123_label(segment) {
            errors.invalid_value(at, segment, complaint);
        }
    }
    if !known.contains(at.str()) {
        errors.invalid_value(at, at.str(), NO_REQUEST);
    }
}

pub(super) fn request_refs(list: &Node, known: &BTreeSet<String>, errors: &mut Errors) {
    if fits(list, REQUESTS_MAX, errors) {
        for name in list.items() {
            request_ref(&name, known, errors);
        }
        unique(list, |name| name.str().to_owned(), errors);
    }
}

fn device_claim(devices: &Node, errors: &mut Errors) {
    let known = request_names(devices.value);
    let requests = devices.field("requests");
    if fits(&requests, REQUESTS_MAX, errors) {
        for one in requests.items() {
            request(&one, errors);
        }
        unique(
            &requests,
            |request| request.field("name").str().to_owned(),
            errors,
        );
    }
    let constraints = devices.field("constraints");
    if fits(&constraints, CONSTRAINTS_MAX, errors) {
        for constraint in constraints.items() {
            request_refs(&constraint.field("requests"), &known, errors);
            let (same, distinct) = (
                constraint.field("matchAttribute"),
                constraint.field("distinctAttribute"),
            );
            if same.is_set() {
                fully_qualified(&same, errors);
            } else if distinct.is_set() {
                fully_qualified(&distinct, errors);
            } else {
                errors.required(
                    &constraint,
                    "exactly one of \"matchAttribute\" or \"distinctAttribute\" is required, but multiple fields are set",
                );
            }
        }
    }
    let config = devices.field("config");
    if fits(&config, CONFIG_MAX, errors) {
        for entry in config.items() {
            request_refs(&entry.field("requests"), &known, errors);
            configuration(&entry, errors);
        }
    }
}

fn request(request: &Node, errors: &mut Errors) {
    label(&request.field("name"), errors);
    let (exactly, first) = (request.field("exactly"), request.field("firstAvailable"));
    match (exactly.is_set(), !first.is_empty()) {
        (false, false) => errors.required(
            request,
            "exactly one of `exactly` or `firstAvailable` is required",
        ),
        (true, true) => errors.push(
            field::ErrorType::Invalid,
            request,
            Some(Value::Null),
            "exactly one of `exactly` or `firstAvailable` is required, but multiple fields are set",
        ),
        (true, false) => devices_wanted(&exactly, errors),
        (false, true) => {
            if fits(&first, FIRST_AVAILABLE_MAX, errors) {
                for sub in first.items() {
                    label(&sub.field("name"), errors);
                    devices_wanted(&sub, errors);
                }
                unique(&first, |sub| sub.field("name").str().to_owned(), errors);
            }
        }
    }
}

/// Class, selectors, number and tolerations of a request.
fn devices_wanted(request: &Node, errors: &mut Errors) {
    let class = request.field("deviceClassName");
    if errors.require(&class) {
        errors.rule(&class, names::dns1123_subdomain(class.str()));
    }
    selectors(&request.field("selectors"), errors);
    let (mode, count) = (request.field("allocationMode"), request.field("count"));
    let number = count.int().unwrap_or(0);
    match mode.str() {
        "All" => {
            if number != 0 {
                errors.invalid(&count, "must not be specified when allocationMode is 'All'");
            }
        }
        "ExactCount" => {
            if number <= 0 {
                errors.invalid_value(&count, number, crate::errors::POSITIVE);
            }
        }
        _ => errors.not_supported(&mode, &["All", "ExactCount"]),
    }
    let tolerations = request.field("tolerations");
    for one in tolerations.items() {
        toleration(&one, errors);
    }
}

fn toleration(toleration: &Node, errors: &mut Errors) {
    let (key, operator, value) = (
        toleration.field("key"),
        toleration.field("operator"),
        toleration.field("value"),
    );
    if !key.is_empty() {
        errors.rule(&key, names::qualified_name(key.str()));
    }
    match operator.str() {
        "Exists" => {
            if !value.is_empty() {
                errors.invalid(&value, "must be empty for operator `Exists`");
            }
        }
        "Equal" => errors.rule(&value, names::label_value(value.str())),
        "" => errors.required(&operator, ""),
        _ => errors.not_supported(&operator, &["Equal", "Exists"]),
    }
    let effect = toleration.field("effect");
    if !effect.is_empty() {
        errors.one_of(&effect, &TAINT_EFFECTS);
    }
}

fn selectors(selectors: &Node, errors: &mut Errors) {
    if !fits(selectors, SELECTORS_MAX, errors) {
        return;
    }
    for selector in selectors.items() {
        let cel = selector.field("cel");
        let expression = cel.field("expression");
        if !cel.is_set() {
            errors.required(&cel, "");
        } else if expression.len() > EXPRESSION_MAX {
            errors.too_long(&expression, EXPRESSION_MAX);
        } else {
            match skiff_cel::device::compile(expression.str()) {
                Ok(()) => {}
                Err(Refusal::Invalid(complaint)) => {
                    errors.invalid_value(&expression, expression.str(), complaint);
                }
                Err(Refusal::TooComplex) => {
                    errors.forbidden(&expression, "too complex, exceeds cost limit");
                }
            }
        }
    }
}

pub(super) fn configuration(entry: &Node, errors: &mut Errors) {
    let opaque = entry.field("opaque");
    if !opaque.is_set() {
        errors.required(&opaque, "");
        return;
    }
    csi_driver_name(&opaque.field("driver"), errors);
    raw_object(&opaque.field("parameters"), PARAMETERS_MAX, errors);
}

/// A JSON object of somebody else's making.
pub(super) fn raw_object(at: &Node, most: usize, errors: &mut Errors) {
    if !at.is_set() {
        errors.required(at, "");
    } else if at.value.to_string().len() > most {
        errors.too_long(at, most);
    } else if !at.value.is_object() {
        errors.invalid_value(at, "<value omitted>", "must be a valid JSON object");
    }
}

/// A C identifier, or one with the domain of its owner.
pub(super) fn qualified(at: &Node, name: &str, errors: &mut Errors) {
    let identifier = |id: &str, errors: &mut Errors| {
        if id.len() > 32 {
            errors.too_long(at, 32);
        }
        let good = id.starts_with(|c: char| c.is_ascii_alphabetic() || c == '_')
            && id.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_');
        if !good {
            errors.invalid_value(at, id, "a valid C identifier must start with alphabetic character or '_', followed by a string of alphanumeric characters or '_' (e.g. 'my_name',  or 'MY_NAME',  or 'MyName', regex used for validation is '[A-Za-z_][A-Za-z0-9_]*')");
        }
    };
    match name.split('/').collect::<Vec<_>>()[..] {
        [id] => identifier(id, errors),
        [domain, id] => {
            if domain.is_empty() {
                errors.invalid_value(at, "", "the domain must not be empty");
            } else {
                csi_driver_name(&at.with(&json!(domain)), errors);
            }
            if id.is_empty() {
                errors.invalid_value(at, "", "the name must not be empty");
            } else {
                identifier(id, errors);
            }
        }
        _ => {}
    }
}

fn fully_qualified(at: &Node, errors: &mut Errors) {
    qualified(at, at.str(), errors);
    if !at.str().contains('/') {
        errors.invalid(
            at,
            "a fully qualified name must be a domain and a name separated by a slash",
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(devices: Value, expected: &[&str]) {
        let mut object = json!({"spec": {"devices": devices}});
        (RESOURCE_CLAIM.default)("v1", &mut object);
        let found: Vec<String> = (RESOURCE_CLAIM.validate)(&object)
            .iter()
            .map(ToString::to_string)
            .collect();
        assert_eq!(found, expected, "{object}");
    }

    #[test]
    fn claims() {
        let request = |exactly: Value| json!({"requests": [{"name": "r", "exactly": exactly}]});
        check(request(json!({"deviceClassName": "gpu"})), &[]);
        check(
            request(json!({"allocationMode": "All", "count": 2})),
            &[
                "spec.devices.requests[0].exactly.deviceClassName: Required value",
                "spec.devices.requests[0].exactly.count: Invalid value: 2: must not be specified when allocationMode is 'All'",
            ],
        );
        check(
            json!({"requests": [{"name": "r", "exactly": {"deviceClassName": "g"}}], "constraints": [{"requests": ["x"], "matchAttribute": "a"}], "config": [{}]}),
            &[
                "spec.devices.constraints[0].requests[0]: Invalid value: \"x\": must be the name of a request in the claim or the name of a request and a subrequest separated by '/'",
                "spec.devices.constraints[0].matchAttribute: Invalid value: \"a\": a fully qualified name must be a domain and a name separated by a slash",
                "spec.devices.config[0].opaque: Required value",
            ],
        );
    }
}
