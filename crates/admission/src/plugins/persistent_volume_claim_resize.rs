//! PersistentVolumeClaimResize: a claim may grow if it is bound and its storage class allows it.

use async_trait::async_trait;
use serde_json::Value;
use skiff_api::core::resources::quantity;
use skiff_api::node::{at, text};
use skiff_meta::Status;
use skiff_meta::quantity::Quantity;

use crate::{Attributes, Lister, Operation, Plugin};

pub struct PersistentVolumeClaimResize;

fn class(claim: &Value) -> &str {
    match at(claim, "metadata.annotations").get("volume.beta.kubernetes.io/storage-class") {
        Some(class) => class.as_str().unwrap_or_default(),
        None => text(claim, "spec.storageClassName"),
    }
}

#[async_trait]
impl Plugin for PersistentVolumeClaimResize {
    fn name(&self) -> &'static str {
        "PersistentVolumeClaimResize"
    }

    fn handles(&self, operation: Operation) -> bool {
        operation == Operation::Update
    }

    fn concerns(&self, a: &Attributes<'_>) -> bool {
        a.is("", "persistentvolumeclaims")
    }

    async fn validate(&self, a: &Attributes<'_>, lister: &dyn Lister) -> Result<(), Status> {
        let (Some(new), Some(old)) = (a.object.as_deref(), a.old_object) else {
            return Ok(());
        };
        let size = |claim: &Value| {
            quantity(at(claim, "spec.resources.requests.storage")).unwrap_or(Quantity::from_units(0))
        };
        if size(new) <= size(old) {
            return Ok(());
        }
        if text(old, "status.phase") != "Bound" {
            return Err(a.forbidden("Only bound persistent volume claims can be expanded"));
        }
        let name = class(new);
        if !name.is_empty() && name == class(old) {
            let found = lister.get("storage.k8s.io", "storageclasses", "", name).await?;
            if found.is_some_and(|class| at(&class, "allowVolumeExpansion") == true) {
                return Ok(());
            }
        }
        Err(a.forbidden(
            "only dynamically provisioned pvc can be resized and the storageclass that provisions the pvc must support resize",
        ))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plugins::fake::{Objects, create};
    use serde_json::json;

    async fn check(size: &str, phase: &str, allowed: bool, expected: Option<&str>) {
        let lister = Objects(vec![(
            "storageclasses",
            json!({"metadata": {"name": "fast"}, "allowVolumeExpansion": allowed}),
        )]);
        let claim = |size: &str| {
            json!({"metadata": {"name": "c"}, "status": {"phase": phase},
                "spec": {"storageClassName": "fast", "resources": {"requests": {"storage": size}}}})
        };
        let (old, mut new) = (claim("1Gi"), claim(size));
        let mut a = create("", "persistentvolumeclaims", "PersistentVolumeClaim", &mut new);
        a.old_object = Some(&old);
        let result = PersistentVolumeClaimResize.validate(&a, &lister).await;
        let expected = expected.map(|why| format!("persistentvolumeclaims \"c\" is forbidden: {why}"));
        assert_eq!(result.err().map(|s| s.message), expected);
    }

    #[tokio::test]
    async fn a_claim_grows_where_its_class_lets_it() {
        check("2Gi", "Bound", true, None).await;
        check("1024Mi", "Pending", false, None).await;
        check(
            "2Gi",
            "Pending",
            true,
            Some("Only bound persistent volume claims can be expanded"),
        )
        .await;
        check(
            "2Gi",
            "Bound",
            false,
            Some("only dynamically provisioned pvc can be resized and the storageclass that provisions the pvc must support resize"),
        )
        .await;
    }

    #[tokio::test]
    async fn a_claim_that_changes_its_class_does_not_grow() {
        let lister = Objects(vec![(
            "storageclasses",
            json!({"metadata": {"name": "fast"}, "allowVolumeExpansion": true}),
        )]);
        let claim = |class: &str, size: &str| {
            json!({"metadata": {"name": "c"}, "status": {"phase": "Bound"},
                "spec": {"storageClassName": class, "resources": {"requests": {"storage": size}}}})
        };
        for (before, after, passes) in [("fast", "fast", true), ("slow", "fast", false), ("", "", false)] {
            let (old, mut new) = (claim(before, "1Gi"), claim(after, "2Gi"));
            let mut a = create("", "persistentvolumeclaims", "PersistentVolumeClaim", &mut new);
            a.old_object = Some(&old);
            let result = PersistentVolumeClaimResize.validate(&a, &lister).await;
            assert_eq!(result.is_ok(), passes, "{before} {after}");
        }
    }
}
