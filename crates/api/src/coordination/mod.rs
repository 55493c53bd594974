//! The group `coordination.k8s.io`: Leases.

use serde_json::json;

use crate::errors::Errors;
use crate::kind::{Again, AGE, BASE, Kind, NAME, text as column};
use crate::node::{Node, text};
use crate::row;

pub static LEASE: Kind = Kind {
    group: "coordination.k8s.io",
    kind: "Lease",
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
        let holder = spec.field("holderIdentity");
        if holder.is_set() && holder.is_empty() {
            errors.invalid(&holder, "must not be empty");
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
