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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plugins::fake::{Objects, create};
    async fn check(mut claim: Value, expected: Value) {
        let class = |name: &str, born: &str, mark: &str| json!({"metadata": {"name": name, "creationTimestamp": born, "annotations": {mark: "true"}}});
        let lister = Objects(vec![
            ("storageclasses", class("old", "2025-01-01T00:00:00Z", MARKS[1])),
            ("storageclasses", class("new-b", "2026-01-01T00:00:00Z", MARKS[0])),
            ("storageclasses", class("new-a", "2026-01-01T00:00:00Z", MARKS[1])),
            ("storageclasses", class("newest", "2027-01-01T00:00:00Z", "other")),
        ]);
        let mut a = create("", "persistentvolumeclaims", "PersistentVolumeClaim", &mut claim);
        DefaultStorageClass.admit(&mut a, &lister).await.unwrap();
        assert_eq!(at(&claim, "spec.storageClassName"), &expected);
    }

    #[tokio::test]
    async fn the_newest_default_is_taken_where_none_is_named() {
        check(json!({"spec": {}}), json!("new-a")).await;
        check(json!({"spec": {"storageClassName": ""}}), json!("")).await;
        let annotations = json!({"volume.beta.kubernetes.io/storage-class": ""});
        check(
            json!({"metadata": {"annotations": annotations}, "spec": {}}),
            Value::Null,
        )
        .await;
    }
}
