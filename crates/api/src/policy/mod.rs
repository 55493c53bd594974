//! The group `policy`: PodDisruptionBudgets.

use serde_json::{Value, json};

use crate::apps::rolling::{at_most_100_percent, int_or_percent};
use crate::errors::Errors;
use crate::kind::{AGE, Again, BASE, Kind, NAME, When, integer, text as column};
use crate::node::{Node, at, number};
use crate::object_meta::{conditions, label_selector};
use crate::{row, strategy};

pub static POD_DISRUPTION_BUDGET: Kind = Kind {
    group: "policy",
    kind: "PodDisruptionBudget",
    name_rule: crate::object_meta::path_segment,
    prepare_create: strategy::create_with_generation,
    prepare_update: strategy::update_spec,
    validate: |object| {
        let mut errors = Errors::new();
        spec(&Node::root(object).field("spec"), &mut errors);
        errors.into_vec()
    },
    validate_update: |new, _| (POD_DISRUPTION_BUDGET.validate)(new),
    validate_status_update: |new, _| {
        let mut errors = Errors::new();
        let root = Node::root(new);
        let status = root.field("status");
        conditions(&status.field("conditions"), &mut errors);
        for name in [
            "disruptionsAllowed",
            "currentHealthy",
            "desiredHealthy",
            "expectedPods",
        ] {
            errors.non_negative(&status.field(name));
        }
        errors.into_vec()
    },
    columns: &[
        NAME,
        column("Min Available"),
        column("Max Unavailable"),
        integer("Allowed Disruptions"),
        AGE,
    ],
    row: |object, now| {
        let show = |path: &str| match at(object, path) {
            Value::Null => json!("N/A"),
            Value::String(text) => json!(text),
            other => json!(other.to_string()),
        };
        vec![
            row::name(object),
            show("spec.minAvailable"),
            show("spec.maxUnavailable"),
            json!(number(object, "status.disruptionsAllowed")),
            row::age(object, now),
        ]
    },
    has_status: true,
    allow_unconditional_update: false,
    update_again: Again::None,
    status_again: Again::None,
    metadata: When::Otherwise,
    qualified_finalizers: false,
    ..BASE
};

fn spec(spec: &Node, errors: &mut Errors) {
    let (least, most) = (spec.field("minAvailable"), spec.field("maxUnavailable"));
    if least.is_set() && most.is_set() {
        let shown = spec.value.clone();
        errors.invalid_value(spec, shown, "minAvailable and maxUnavailable cannot be both set");
    }
    for at in [&least, &most] {
        if at.is_set() {
            int_or_percent(at, errors);
            at_most_100_percent(at, errors);
        }
    }
    label_selector(&spec.field("selector"), errors);
    errors.one_of_if_set(
        &spec.field("unhealthyPodEvictionPolicy"),
        &["AlwaysAllow", "IfHealthyBudget"],
    );
}
