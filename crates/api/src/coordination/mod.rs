//! The group `coordination.k8s.io`: Leases.

use serde_json::json;
use skiff_meta::names;

use crate::errors::Errors;
use crate::kind::{AGE, Again, BASE, Kind, NAME, text as column};
use crate::node::{Node, at, text};
use crate::{row, walk};

pub static LEASE: Kind = Kind {
    group: "coordination.k8s.io",
    kind: "Lease",
    // The coordinated election of leaders is off by default, and so are its fields.
    prepare_create: |object| {
        if let Some(spec) = object.get_mut("spec") {
            walk::remove(spec, "strategy");
            walk::remove(spec, "preferredHolder");
        }
    },
    prepare_update: |new, old| {
        for name in ["strategy", "preferredHolder"] {
            if at(at(old, "spec"), name).is_null()
                && let Some(spec) = new.get_mut("spec")
            {
                walk::remove(spec, name);
            }
        }
    },
    validate: |object| {
        let mut errors = Errors::new();
        let root = Node::root(object);
        let spec = root.field("spec");
        let seconds = spec.field("leaseDurationSeconds");
        if seconds.int().is_some_and(|n| n <= 0) {
            errors.invalid(&seconds, "must be greater than 0");
        }
        let transitions = spec.field("leaseTransitions");
        if transitions.int().is_some_and(|n| n < 0) {
            errors.invalid(&transitions, "must be greater than or equal to 0");
        }
        let (strategy, holder) = (spec.field("strategy"), spec.field("preferredHolder"));
        if strategy.is_set() {
            strategy_name(&strategy, &mut errors);
        }
        if !holder.is_empty() && strategy.is_empty() {
            errors.forbidden(&holder, "may only be specified when `strategy` is defined");
        }
        errors.into_vec()
    },
    validate_update: |new, _| (LEASE.validate)(new),
    columns: &[NAME, column("Holder"), AGE],
    row: |object, now| {
        vec![
            row::name(object),
            json!(text(object, "spec.holderIdentity")),
            row::age(object, now),
        ]
    },
    allow_create_on_update: true,
    allow_unconditional_update: false,
    update_again: Again::Change,
    qualified_finalizers: false,
    ..BASE
};

/// One of upstream's strategies, or one with the domain of its owner.
fn strategy_name(strategy: &Node, errors: &mut Errors) {
    let name = strategy.str();
    match name.split_once('/') {
        None if name != "OldestEmulationVersion" => {
            let detail = "must be fully qualified";
            errors.invalid(strategy, detail);
        }
        None => {}
        Some(_) => errors.rule(strategy, names::qualified_name(name)),
    }
}
