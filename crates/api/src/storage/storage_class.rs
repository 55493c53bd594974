//! StorageClasses and VolumeAttributesClasses: who makes volumes, and how.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::{Value, json};
use skiff_meta::names;

use super::GROUP;
use crate::errors::Errors;
use crate::kind::{AGE, Again, BASE, Kind, NAME, text as column};
use crate::node::{Node, at, same, text};
use crate::{row, walk};

const PARAMETERS_MAX: usize = 512;
const PARAMETERS_SIZE_MAX: usize = 256 * 1024;

pub static STORAGE_CLASS: Kind = Kind {
    group: GROUP,
    kind: "StorageClass",
    default: |_, object| {
        walk::pointer(object, "reclaimPolicy", "Delete");
        walk::pointer(object, "volumeBindingMode", "Immediate");
    },
    validate: |object| {
        let mut errors = Errors::new();
        let root = Node::root(object);
        provisioner(&root.field("provisioner"), &mut errors);
        parameters(&root.field("parameters"), true, &mut errors);
        let policy = root.field("reclaimPolicy");
        if !policy.is_empty() {
            errors.one_of(&policy, &["Delete", "Retain"]);
        }
        let mode = root.field("volumeBindingMode");
        if mode.is_set() {
            errors.one_of(&mode, &["Immediate", "WaitForFirstConsumer"]);
        } else {
            errors.required(&mode, "");
        }
        topologies(&root.field("allowedTopologies"), &mut errors);
        errors.into_vec()
    },
    validate_update: |new, old| {
        let mut errors = Errors::new();
        let root = Node::root(new);
        errors.extend((STORAGE_CLASS.validate)(new));
        for name in ["parameters", "provisioner", "reclaimPolicy", "volumeBindingMode"] {
            errors.immutable(&root.field(name), at(old, name));
        }
        errors.into_vec()
    },
    columns: &[
        NAME,
        column("Provisioner"),
        column("ReclaimPolicy"),
        column("VolumeBindingMode"),
        column("AllowVolumeExpansion"),
        AGE,
    ],
    row: |object, now| {
        let mut name = text(object, "metadata.name").to_owned();
        let annotations = at(object, "metadata.annotations");
        let marks = [
            "storageclass.kubernetes.io/is-default-class",
            "storageclass.beta.kubernetes.io/is-default-class",
        ];
        if marks
            .iter()
            .any(|m| annotations.get(m).and_then(Value::as_str) == Some("true"))
        {
            name.push_str(" (default)");
        }
        let or = |path: &str, default: &str| match text(object, path) {
            "" => json!(default),
            value => json!(value),
        };
        vec![
            json!(name),
            json!(text(object, "provisioner")),
            or("reclaimPolicy", "Delete"),
            or("volumeBindingMode", "Immediate"),
            json!(at(object, "allowVolumeExpansion").as_bool().unwrap_or(false)),
            row::age(object, now),
        ]
    },
    update_again: Again::ObjectFirst,
    ..BASE
};

pub static VOLUME_ATTRIBUTES_CLASS: Kind = Kind {
    group: GROUP,
    kind: "VolumeAttributesClass",
    validate: |object| {
        let mut errors = Errors::new();
        let root = Node::root(object);
        provisioner(&root.field("driverName"), &mut errors);
        parameters(&root.field("parameters"), false, &mut errors);
        errors.into_vec()
    },
    validate_update: |new, old| {
        let mut errors = Errors::new();
        let root = Node::root(new);
        for name in ["driverName", "parameters"] {
            if !same(at(new, name), at(old, name)) {
                errors.forbidden(&root.field(name), format!("updates to {name} are forbidden."));
            }
        }
        errors.extend((VOLUME_ATTRIBUTES_CLASS.validate)(new));
        errors.into_vec()
    },
    columns: &[NAME, column("DriverName"), AGE],
    row: |object, now| {
        vec![
            row::name(object),
            json!(text(object, "driverName")),
            row::age(object, now),
        ]
    },
    ..BASE
};

fn provisioner(name: &Node, errors: &mut Errors) {
    if errors.require(name) {
        let lower = name.str().to_lowercase();
        for complaint in names::qualified_name(&lower) {
            errors.invalid_value(name, lower.as_str(), complaint);
        }
    }
}

fn parameters(parameters: &Node, may_be_empty: bool, errors: &mut Errors) {
    if parameters.len() > PARAMETERS_MAX {
        errors.too_long(parameters, PARAMETERS_MAX);
        return;
    }
    let mut size = 0;
    for (key, value) in parameters.entries() {
        if key.is_empty() {
            errors.invalid_value(parameters, key, "field can not be empty.");
        }
        size += key.len() + value.len();
    }
    if size > PARAMETERS_SIZE_MAX {
        errors.too_long(parameters, PARAMETERS_SIZE_MAX);
    }
    if !may_be_empty && parameters.is_empty() {
        errors.required(parameters, "must contain at least one key/value pair");
    }
}

fn topologies(topologies: &Node, errors: &mut Errors) {
    // COMPAT: upstream starts from as many empty terms, so a term without expressions is always a double.
    let mut seen: BTreeMap<BTreeMap<&str, BTreeSet<&str>>, usize> =
        BTreeMap::from([(BTreeMap::new(), topologies.len())]);
    for term in topologies.items() {
        let mut wanted: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
        let expressions = term.field("matchLabelExpressions");
        for expression in expressions.items() {
            let values = expression.field("values");
            if values.is_empty() {
                errors.required(&values, "");
            }
            let mut set = BTreeSet::new();
            for value in values.items() {
                if !set.insert(value.str()) {
                    errors.duplicate(&value);
                }
            }
            let key = expression.field("key");
            errors.rule(&key, names::qualified_name(key.str()));
            if wanted.insert(key.str(), set).is_some() {
                errors.duplicate(&key);
            }
        }
        let doubles = seen.entry(wanted).or_default();
        for _ in 0..*doubles {
            if errors.is_full() {
                return;
            }
            errors.duplicate_value(&expressions, "");
        }
        *doubles += 1;
    }
}
