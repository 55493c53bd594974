//! DefaultStorageClass: a claim that names no class gets the cluster's default.

use async_trait::async_trait;
use serde_json::{Value, json};
use skiff_api::node::{at, text};
use skiff_api::walk;
use skiff_meta::Status;

use crate::{Attributes, Lister, Operation, Plugin};

const MARKS: [&str; 2] = [
    "storageclass.kubernetes.io/is-default-class",
    "storageclass.beta.kubernetes.io/is-default-class",
];

pub struct DefaultStorageClass;

#[async_trait]
impl Plugin for DefaultStorageClass {
    fn name(&self) -> &'static str {
        "DefaultStorageClass"
    }

    fn handles(&self, operation: Operation) -> bool {
        operation == Operation::Create
    }

    async fn admit(&self, a: &mut Attributes<'_>, lister: &dyn Lister) -> Result<(), Status> {
        if !a.is("", "persistentvolumeclaims") {
            return Ok(());
        }
        let Some(claim) = a.object.as_deref_mut() else {
            return Ok(());
        };
        let annotated = at(claim, "metadata.annotations").get("volume.beta.kubernetes.io/storage-class");
        // COMPAT: an empty name is a choice too: no class at all.
        if annotated.is_some() || !at(claim, "spec.storageClassName").is_null() {
            return Ok(());
        }
        let marked = |class: &Value| {
            MARKS
                .iter()
                .any(|m| at(class, "metadata.annotations").get(m).and_then(Value::as_str) == Some("true"))
        };
        let mut defaults: Vec<Value> = lister
            .list("storage.k8s.io", "storageclasses", "")
            .await?
            .into_iter()
            .filter(marked)
            .collect();
        // The newest wins, and of the same age the first by name.
        defaults.sort_by(|x, y| {
            let born = |c: &Value| text(c, "metadata.creationTimestamp").to_owned();
            born(y)
                .cmp(&born(x))
                .then_with(|| text(x, "metadata.name").cmp(text(y, "metadata.name")))
        });
        if let (Some(class), Some(spec)) = (defaults.first(), walk::object(claim, "spec")) {
            walk::put(spec, "storageClassName", json!(text(class, "metadata.name")));
        }
        Ok(())
    }
}
