//! DaemonSets.

use serde_json::{Value, json};

use super::rolling::{amount, at_most_100_percent, int_or_percent, not_decremented};
use crate::core::{pod_defaults, pod_spec, pod_warnings};
use crate::errors::Errors;
use crate::internal;
use crate::kind::{AGE, Again, BASE, Kind, NAME, integer, text as column, wide};
use crate::node::{Node, at, number, text};
use crate::object_meta::{label_selector, selector_is_bad, selector_is_empty};
use crate::{row, strategy, walk};

/// COMPAT: an older API had this as a field; the newer one keeps it as an annotation.
const TEMPLATE_GENERATION: &str = "deprecated.daemonset.template.generation";

pub static DAEMON_SET: Kind = Kind {
    group: "apps",
    kind: "DaemonSet",
    pod_spec: "spec.template.spec",
    default: |_, object| {
        // COMPAT: who writes without it writes its zero, and the managed fields tell.
        set_template_generation(object, template_generation(object));
        let Some(spec) = walk::object(object, "spec") else {
            return;
        };
        if let Some(update) = walk::object(spec, "updateStrategy") {
            walk::string(update, "type", "RollingUpdate");
            if text(update, "type") == "RollingUpdate"
                && let Some(rolling) = walk::object(update, "rollingUpdate")
            {
                walk::pointer(rolling, "maxUnavailable", 1);
                walk::pointer(rolling, "maxSurge", 0);
            } else if !at(update, "rollingUpdate").is_null() {
                // COMPAT: upstream's own type has no way to leave them out.
                walk::each(update, "rollingUpdate", &mut |rolling| {
                    walk::pointer(rolling, "maxUnavailable", 0);
                    walk::pointer(rolling, "maxSurge", 0);
                });
            }
        }
        walk::pointer(spec, "revisionHistoryLimit", 10);
        walk::made(spec, "template.spec", &mut pod_defaults::pod_spec);
    },
    prepare_create: |object| {
        strategy::create_with_generation(object);
        if template_generation(object) < 1 {
            set_template_generation(object, 1);
        }
    },
    prepare_update: |new, old| {
        walk::copy(new, old, "status");
        let changed = !internal::equal(
            "core.PodTemplateSpec",
            at(new, "spec.template"),
            at(old, "spec.template"),
        );
        set_template_generation(new, template_generation(old) + i64::from(changed));
        strategy::bump_generation_if(new, old, &["spec"]);
    },
    prepare_status_update: |new, old| {
        strategy::status_only(new, old);
        set_template_generation(new, template_generation(old));
    },
    validate: |object| {
        let mut errors = Errors::new();
        spec(&Node::root(object).field("spec"), &mut errors);
        errors.into_vec()
    },
    validate_update: |new, old| {
        let mut errors = Errors::new();
        let root = Node::root(new);
        errors.immutable(&root.field("spec.selector"), at(old, "spec.selector"));
        spec(&root.field("spec"), &mut errors);
        errors.into_vec()
    },
    validate_status_update: |new, old| {
        let mut errors = Errors::new();
        let root = Node::root(new);
        let status = root.field("status");
        for name in [
            "currentNumberScheduled",
            "numberMisscheduled",
            "desiredNumberScheduled",
            "numberReady",
            "observedGeneration",
            "updatedNumberScheduled",
            "numberAvailable",
            "numberUnavailable",
            "collisionCount",
        ] {
            errors.non_negative(&status.field(name));
        }
        not_decremented(&status, old, "collisionCount", &mut errors);
        errors.into_vec()
    },
    columns: &[
        NAME,
        integer("Desired"),
        integer("Current"),
        integer("Ready"),
        integer("Up-to-date"),
        integer("Available"),
        column("Node Selector"),
        AGE,
        wide("Containers"),
        wide("Images"),
        wide("Selector"),
    ],
    row: |object, now| {
        let [names, images] = row::containers(object, "spec.template.spec");
        let count = |name: &str| json!(number(at(object, "status"), name));
        vec![
            row::name(object),
            count("desiredNumberScheduled"),
            count("currentNumberScheduled"),
            count("numberReady"),
            count("updatedNumberScheduled"),
            count("numberAvailable"),
            row::label_map(object, "spec.template.spec.nodeSelector"),
            row::age(object, now),
            names,
            images,
            row::selector(object, "spec.selector"),
        ]
    },
    has_status: true,
    warnings: |new, old| pod_warnings::changed_template(new, old, "spec.template"),
    update_again: Again::Change,
    served_annotation: Some(TEMPLATE_GENERATION),
    never_written: |object| {
        walk::object(object, "metadata");
        set_template_generation(object, 0);
    },
    ..BASE
};

fn template_generation(object: &Value) -> i64 {
    let annotations = at(object, "metadata.annotations");
    annotations
        .get(TEMPLATE_GENERATION)
        .and_then(Value::as_str)
        .and_then(|t| t.parse().ok())
        .unwrap_or(0)
}

fn set_template_generation(object: &mut Value, generation: i64) {
    if let Some(annotations) = object
        .get_mut("metadata")
        .and_then(|m| walk::object(m, "annotations"))
    {
        walk::put(annotations, TEMPLATE_GENERATION, json!(generation.to_string()));
    }
}

fn spec(spec: &Node, errors: &mut Errors) {
    let selector = spec.field("selector");
    label_selector(&selector, errors);
    let template = spec.field("template");
    let labels = template.field("metadata.labels");
    let parsed = skiff_meta::selector::LabelSelector::from_value(selector.value);
    if !selector_is_bad(selector.value) && parsed.is_ok_and(|s| !s.matches_value(labels.value)) {
        let shown = labels.value.clone();
        errors.invalid_value(&labels, shown, "`selector` does not match template `labels`");
    }
    if selector.is_set() && selector_is_empty(selector.value) {
        errors.invalid(&selector, "empty selector is invalid for daemonset");
    }
    pod_spec::template(&template, errors);
    pod_spec::always_restart(&template, "DaemonSet", errors);
    errors.non_negative(&spec.field("minReadySeconds"));
    let update = spec.field("updateStrategy");
    match update.field("type").str() {
        "OnDelete" => {}
        "RollingUpdate" => rolling_update(&update.field("rollingUpdate"), errors),
        _ => errors.not_supported(&update, &["RollingUpdate", "OnDelete"]),
    }
    errors.non_negative(&spec.field("revisionHistoryLimit"));
}

fn rolling_update(rolling: &Node, errors: &mut Errors) {
    if !rolling.is_set() {
        return errors.required(rolling, "");
    }
    let (unavailable, surge) = (rolling.field("maxUnavailable"), rolling.field("maxSurge"));
    int_or_percent(&unavailable, errors);
    int_or_percent(&surge, errors);
    at_most_100_percent(&unavailable, errors);
    at_most_100_percent(&surge, errors);
    match (amount(unavailable.value) != 0, amount(surge.value) != 0) {
        (true, true) => errors.invalid(&surge, "may not be set when maxUnavailable is non-zero"),
        (false, false) => errors.required(&unavailable, "cannot be 0 when maxSurge is 0"),
        _ => {}
    }
}
