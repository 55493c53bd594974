//! What the spec of a PodGroup and the templates of a Workload have in common: the policy, and the fields of features that
//! are off (topology constraints, shared resource claims, preemption of whole groups), which are dropped unless the object
//! had them before.

use serde_json::Value;

use crate::errors::{Errors, IMMUTABLE};
use crate::node::{Node, at, is_empty, same};
use crate::walk;

/// Fields of features that are off.
pub(super) const OFF: [&str; 5] = [
    "schedulingConstraints",
    "resourceClaims",
    "disruptionMode",
    "priorityClassName",
    "priority",
];

/// Drops what is off and was not there before.
pub(super) fn drop_disabled(spec: &mut Value, old: &Value) {
    for name in OFF {
        if is_empty(at(old, name)) {
            walk::remove(spec, name);
        }
    }
}

/// Exactly one of the policies; a gang needs a size.
pub(super) fn scheduling_policy(policy: &Node, errors: &mut Errors) {
    let (basic, gang) = (policy.field("basic"), policy.field("gang"));
    match (basic.is_set(), gang.is_set()) {
        (true, true) => errors.invalid_value(
            policy,
            "{basic, gang}",
            "must specify exactly one of: `basic`, `gang`",
        ),
        (false, false) => errors.invalid_value(policy, "", "must specify one of: `basic`, `gang`"),
        _ => {}
    }
    if gang.is_set() {
        let count = gang.field("minCount");
        match count.int() {
            None | Some(0) => errors.required(&count, ""),
            Some(count_given) if count_given < 1 => {
                errors.invalid(&count, "must be greater than or equal to 1");
            }
            Some(_) => {}
        }
    }
}

/// A field that does not change after creation. COMPAT: upstream does not show the value.
pub(super) fn unchanged(new: &Node, old: &Value, errors: &mut Errors) -> bool {
    // A policy without fields is not the same as none.
    let basic = |value: &Value| !at(value, "basic").is_null();
    let unchanged = same(new.value, old) && basic(new.value) == basic(old);
    if !unchanged {
        errors.invalid_value(new, Value::Null, IMMUTABLE);
    }
    unchanged
}
