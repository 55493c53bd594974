//! StorageObjectInUseProtection: claims and volumes get a finalizer, so that they outlive their users.

use async_trait::async_trait;
use serde_json::{Value, json};
use skiff_api::node::list;
use skiff_api::walk;
use skiff_meta::Status;

use crate::{Attributes, Lister, Operation, Plugin};

const PROTECTED: [(&str, &str, &str); 3] = [
    ("", "persistentvolumes", "kubernetes.io/pv-protection"),
    ("", "persistentvolumeclaims", "kubernetes.io/pvc-protection"),
    (
        "storage.k8s.io",
        "volumeattributesclasses",
        "kubernetes.io/vac-protection",
    ),
];

pub struct StorageObjectInUseProtection;

#[async_trait]
impl Plugin for StorageObjectInUseProtection {
    fn name(&self) -> &'static str {
        "StorageObjectInUseProtection"
    }

    fn handles(&self, operation: Operation) -> bool {
        operation == Operation::Create
    }

    async fn admit(&self, a: &mut Attributes<'_>, _: &dyn Lister) -> Result<(), Status> {
        let Some((_, _, finalizer)) = PROTECTED
            .iter()
            .find(|(group, resource, _)| a.is(group, resource))
        else {
            return Ok(());
        };
        let Some(metadata) = a.object.as_deref_mut().and_then(|o| walk::object(o, "metadata")) else {
            return Ok(());
        };
        let mut finalizers = list(metadata, "finalizers").to_vec();
        if !finalizers.contains(&json!(finalizer)) {
            finalizers.push(json!(finalizer));
            walk::put(metadata, "finalizers", Value::Array(finalizers));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plugins::fake::{Objects, create};
    #[tokio::test]
    async fn a_finalizer_is_set_once_on_what_is_protected() {
        for (group, resource, finalizer) in PROTECTED {
            for given in [json!([]), json!(["mine"]), json!([finalizer, "mine"])] {
                let mut object = json!({"metadata": {"finalizers": given}});
                let mut a = create(group, resource, "", &mut object);
                StorageObjectInUseProtection
                    .admit(&mut a, &Objects::default())
                    .await
                    .unwrap();
                let found = list(&object, "metadata.finalizers");
                assert_eq!(found.iter().filter(|f| *f == finalizer).count(), 1, "{object}");
            }
        }
        let mut other = json!({"metadata": {}});
        let mut a = create("storage.k8s.io", "storageclasses", "", &mut other);
        StorageObjectInUseProtection
            .admit(&mut a, &Objects::default())
            .await
            .unwrap();
        assert_eq!(other, json!({"metadata": {}}));
    }
}
