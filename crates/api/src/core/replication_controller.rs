//! ReplicationControllers and PodTemplates.

use serde_json::{Map, Value, json};

use super::{pod_defaults, pod_spec, pod_warnings};
use crate::errors::Errors;
use crate::kind::{AGE, Again, BASE, Kind, NAME, Orphan, integer, text as column, unsupported_field, wide};
use crate::node::{Node, at, number, text};
use crate::{object_meta, row, strategy, walk};

pub static REPLICATION_CONTROLLER: Kind = Kind {
    kind: "ReplicationController",
    pod_spec: "spec.template.spec",
    default: |_, object| {
        let labels = at(object, "spec.template.metadata.labels")
            .as_object()
            .filter(|m| !m.is_empty())
            .cloned();
        if let Some(spec) = walk::object(object, "spec") {
            walk::pointer(spec, "replicas", 1);
            if let Some(labels) = &labels {
                fill(spec, "selector", labels);
            }
            walk::each(spec, "template", &mut |template| {
                walk::made(template, "spec", &mut pod_defaults::pod_spec);
            });
        }
        if let (Some(labels), Some(metadata)) = (labels, walk::object(object, "metadata")) {
            fill(metadata, "labels", &labels);
        }
    },
    prepare_create: strategy::create_with_generation,
    prepare_update: strategy::update_spec,
    validate: |object| {
        let mut errors = Errors::new();
        spec(&Node::root(object).field("spec"), &mut errors);
        errors.into_vec()
    },
    validate_update: |new, _| (REPLICATION_CONTROLLER.validate)(new),
    validate_status_update: |new, _| {
        let mut errors = Errors::new();
        replica_counts(&Node::root(new).field("status"), &mut errors);
        errors.into_vec()
    },
    selectable: |object| vec![("status.replicas", number(object, "status.replicas").to_string())],
    columns: &[
        NAME,
        integer("Desired"),
        integer("Current"),
        integer("Ready"),
        AGE,
        wide("Containers"),
        wide("Images"),
        wide("Selector"),
    ],
    row: |object, now| {
        let [names, images] = row::containers(object, "spec.template.spec");
        vec![
            row::name(object),
            json!(number(object, "spec.replicas")),
            json!(number(object, "status.replicas")),
            json!(number(object, "status.readyReplicas")),
            row::age(object, now),
            names,
            images,
            row::label_map(object, "spec.selector"),
        ]
    },
    has_status: true,
    name_rule: object_meta::declared_subdomain,
    warnings: |new, old| match old {
        None => pod_warnings::template(new, None, "spec.template"),
        // COMPAT: upstream takes the old one for the new one here.
        Some(old) => pod_warnings::template(old, Some(new), "spec.template"),
    },
    update_again: Again::Change,
    orphan: Orphan::ByDefault,
    unknown_field: unsupported_field,
    ..BASE
};

fn fill(object: &mut Value, name: &str, labels: &Map<String, Value>) {
    if at(object, name).as_object().is_none_or(Map::is_empty) {
        walk::put(object, name, Value::Object(labels.clone()));
    }
}

fn spec(spec: &Node, errors: &mut Errors) {
    errors.non_negative(&spec.field("minReadySeconds"));
    let selector = spec.field("selector");
    errors.require(&selector);
    errors.non_negative(&spec.field("replicas"));
    let template = spec.field("template");
    if !template.is_set() {
        return errors.required(&template, "");
    }
    pod_spec::selected_template(&template, &json!({ "matchLabels": selector.value }), errors);
    pod_spec::always_restart(&template, "ReplicationController", errors);
}

/// Status of what keeps replicas; also for ReplicaSets.
pub fn replica_counts(status: &Node, errors: &mut Errors) {
    const FIELDS: [&str; 6] = [
        "replicas",
        "fullyLabeledReplicas",
        "readyReplicas",
        "availableReplicas",
        "terminatingReplicas",
        "observedGeneration",
    ];
    for name in FIELDS {
        errors.non_negative(&status.field(name));
    }
    let count = |name| status.field(name).int().unwrap_or(0);
    for name in ["fullyLabeledReplicas", "readyReplicas", "availableReplicas"] {
        if count(name) > count("replicas") {
            let at = status.field(name);
            errors.invalid_value(&at, count(name), "cannot be greater than status.replicas");
        }
    }
    if count("availableReplicas") > count("readyReplicas") {
        errors.invalid_value(
            &status.field("availableReplicas"),
            count("availableReplicas"),
            "cannot be greater than readyReplicas",
        );
    }
}

pub static POD_TEMPLATE: Kind = Kind {
    kind: "PodTemplate",
    pod_spec: "template.spec",
    default: |_, object| walk::made(object, "template.spec", &mut pod_defaults::pod_spec),
    prepare_create: strategy::create_generation_only,
    prepare_update: |new, old| strategy::bump_generation_if(new, old, &["template"]),
    validate: |object| {
        let mut errors = Errors::new();
        pod_spec::template(&Node::root(object).field("template"), &mut errors);
        errors.into_vec()
    },
    validate_update: |new, _| (POD_TEMPLATE.validate)(new),
    columns: &[NAME, column("Containers"), column("Images"), column("Pod Labels")],
    row: |object, _| {
        let [names, images] = row::containers(object, "template.spec");
        let labels = row::label_map(object, "template.metadata.labels");
        vec![json!(text(object, "metadata.name")), names, images, labels]
    },
    warnings: |new, old| pod_warnings::template(new, old, "template"),
    update_again: Again::Change,
    ..BASE
};
