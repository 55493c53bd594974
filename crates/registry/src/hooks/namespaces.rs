//! Namespaces: a delete only marks them, the namespace controller empties and finalizes them.

use async_trait::async_trait;
use serde_json::{Value, json};
use skiff_meta::Status;

use super::{Asked, Change, Hook, Marking};
use crate::object;

pub struct Namespaces;

#[async_trait]
impl Hook for Namespaces {
    async fn begin_create(&self, object: &mut Value, _: &Asked<'_>) -> Result<Change, Status> {
        let has = object::at(object, &["spec", "finalizers"])
            .and_then(Value::as_array)
            .is_some_and(|list| list.iter().any(|value| value == "kubernetes"));
        if !has {
            let mut list = object::at(object, &["spec", "finalizers"])
                .and_then(Value::as_array)
                .cloned()
                .unwrap_or_default();
            list.push(json!("kubernetes"));
            object::put(object, &["spec", "finalizers"], Value::Array(list));
        }
        object::put(object, &["status"], json!({"phase": "Active"}));
        Ok(Change::default())
    }

    fn mark_deleting(&self, object: &mut Value, now: &str) -> Marking {
        let empty = object::at(object, &["spec", "finalizers"])
            .and_then(Value::as_array)
            .is_none_or(Vec::is_empty);
        if object::deleting(object) && empty {
            return Marking::Usual;
        }
        if object::deleting(object) {
            // The first delete has decided what becomes of the dependents.
            return Marking::Alone;
        }
        object::set(object, "deletionTimestamp", now);
        object::put(object, &["status", "phase"], json!("Terminating"));
        Marking::WithFinalizers
    }

    fn may_delete_on_update(&self, new: &Value) -> bool {
        object::at(new, &["spec", "finalizers"])
            .and_then(Value::as_array)
            .is_none_or(Vec::is_empty)
    }
}
