//! Kinds of the group `apps`.

pub mod controller_revision;
pub mod daemon_set;
pub mod deployment;
pub mod replica_set;
pub mod rolling;
pub mod stateful_set;

use serde_json::{Value, json};

use crate::walk;

/// COMPAT: the replicas of upstream's internal types are no pointers.
fn no_replicas(object: &mut Value) {
    if let Some(spec) = walk::object(object, "spec") {
        walk::put(spec, "replicas", json!(0));
    }
}
