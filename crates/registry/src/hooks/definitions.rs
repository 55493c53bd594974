//! CustomResourceDefinitions: a delete only marks them; their objects go first.

use serde_json::{Value, json};

use super::{Hook, Marking};
use crate::object;

const CLEANUP_FINALIZER: &str = "customresourcecleanup.apiextensions.k8s.io";

pub struct Definitions;

impl Hook for Definitions {
    fn mark_deleting(&self, object: &mut Value, now: &str) -> Marking {
        if object::deleting(object) {
            return Marking::Usual;
        }
        object::set(object, "deletionTimestamp", now);
        let mut finalizers = object::finalizers(object);
        if !finalizers.iter().any(|finalizer| finalizer == CLEANUP_FINALIZER) {
            finalizers.push(CLEANUP_FINALIZER.to_string());
        }
        object::set(object, "finalizers", finalizers);
        let mut conditions = object::at(object, &["status", "conditions"])
            .and_then(Value::as_array)
            .cloned()
            .unwrap_or_default();
        conditions.retain(|condition| condition["type"] != "Terminating");
        conditions.push(json!({"type": "Terminating", "status": "True", "lastTransitionTime": now,
            "reason": "InstanceDeletionPending",
            "message": "CustomResourceDefinition marked for deletion; CustomResource deletion will begin soon"}));
        object::put(object, &["status", "conditions"], Value::Array(conditions));
        Marking::Alone
    }
}
