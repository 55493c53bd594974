//! The group `scheduling.k8s.io`: PriorityClasses, and of a version that is off by default Workloads and PodGroups.

mod pod_group;
mod policy;
mod workload;

pub use pod_group::POD_GROUP;
pub use workload::WORKLOAD;

use serde_json::json;

use crate::errors::Errors;
use crate::kind::{AGE, Again, BASE, Kind, NAME, boolean, integer, text as column};
use crate::node::{Node, at, number, text};
use crate::{row, strategy, walk};

/// Above this only the system's own classes.
const USER_MAX: i64 = 1_000_000_000;
const SYSTEM: [(&str, i64); 2] = [
    ("system-cluster-critical", 2_000_000_000),
    ("system-node-critical", 2_000_001_000),
];

/// What is wrong with a class that has the name of one of the system's.
fn unknown_to_system(class: &Node) -> Option<String> {
    let name = class.field("metadata.name").str();
    let Some((_, value)) = SYSTEM.iter().find(|(known, _)| *known == name) else {
        return Some(format!("{name} is not a known system priority class"));
    };
    if class.field("value").int() != Some(*value) {
        return Some(format!("value of {name} PriorityClass must be {value}"));
    }
    let default = class.field("globalDefault").bool();
    default.then(|| format!("globalDefault of {name} PriorityClass must be false"))
}

pub static PRIORITY_CLASS: Kind = Kind {
    group: "scheduling.k8s.io",
    kind: "PriorityClass",
    default: |_, object| walk::pointer(object, "preemptionPolicy", "PreemptLowerPriority"),
    prepare_create: strategy::create_generation_only,
    validate: |object| {
        let mut errors = Errors::new();
        let root = Node::root(object);
        let (name, value) = (root.field("metadata.name"), root.field("value"));
        if name.str().starts_with("system-") {
            if let Some(why) = unknown_to_system(&root) {
                errors.forbidden(
                    &name,
                    format!("priority class names with 'system-' prefix are reserved for system use only. error: {why}"),
                );
            }
        } else if value.int().is_some_and(|n| n > USER_MAX) {
            errors.forbidden(
                &value,
                format!("maximum allowed value of a user defined priority is {USER_MAX}"),
            );
        }
        let policy = root.field("preemptionPolicy");
        if policy.is_set() {
            errors.required_one_of(&policy, &["PreemptLowerPriority", "Never"]);
        }
        errors.into_vec()
    },
    validate_update: |new, old| {
        let mut errors = Errors::new();
        let root = Node::root(new);
        if number(new, "value") != number(old, "value") {
            errors.forbidden(&root.field("value"), "may not be changed in an update.");
        }
        errors.immutable(&root.field("preemptionPolicy"), at(old, "preemptionPolicy"));
        errors.into_vec()
    },
    columns: &[
        NAME,
        integer("Value"),
        boolean("Global-Default"),
        AGE,
        column("PreemptionPolicy"),
    ],
    row: |object, now| {
        vec![
            row::name(object),
            json!(number(object, "value")),
            json!(at(object, "globalDefault").as_bool().unwrap_or(false)),
            row::age(object, now),
            json!(text(object, "preemptionPolicy")),
        ]
    },
    update_again: Again::Change,
    ..BASE
};
