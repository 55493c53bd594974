//! ClusterTrustBundleAttest: who writes a trust bundle of a signer must be allowed to attest for it.

use async_trait::async_trait;
use serde_json::Value;
use skiff_api::node::{same, text};
use skiff_meta::Status;

use super::certificate_approval::{GROUP, may_for_signer};
use crate::{Attributes, Lister, Operation, Plugin};

pub struct ClusterTrustBundleAttest;

#[async_trait]
impl Plugin for ClusterTrustBundleAttest {
    fn name(&self) -> &'static str {
        "ClusterTrustBundleAttest"
    }

    fn handles(&self, operation: Operation) -> bool {
        matches!(operation, Operation::Create | Operation::Update)
    }

    fn concerns(&self, a: &Attributes<'_>) -> bool {
        a.group == GROUP && a.resource == "clustertrustbundles"
    }

    async fn validate(&self, a: &Attributes<'_>, _: &dyn Lister) -> Result<(), Status> {
        let new = a.object.as_deref().unwrap_or(&Value::Null);
        // A change of the signer is refused, but not by us.
        let signer = text(new, "spec.signerName");
        let collected = a.old_object.is_some_and(|old| is_garbage_collection(new, old));
        if signer.is_empty() || collected || may_for_signer(a, "attest", signer) {
            return Ok(());
        }
        Err(a.forbidden(format_args!(
            "user not permitted to attest for signerName {}",
            skiff_meta::field::quote(signer)
        )))
    }
}

/// Whether a write changes nothing but what the garbage collector and a storage migration do.
fn is_garbage_collection(new: &Value, old: &Value) -> bool {
    let rest = |object: &Value| {
        let mut object = object.clone();
        if let Some(metadata) = object.get_mut("metadata").and_then(Value::as_object_mut) {
            for field in ["ownerReferences", "finalizers", "selfLink", "managedFields"] {
                metadata.remove(field);
            }
        }
        object
    };
    same(&rest(new), &rest(old))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plugins::fake::{May, Objects, create};
    use serde_json::json;

    #[tokio::test]
    async fn a_signer_must_be_attested_for() {
        let bundle = |signer: &str| json!({"metadata": {"name": "b"}, "spec": {"signerName": signer, "trustBundle": "x"}});
        let mut finalized = bundle("example.com/a");
        finalized["metadata"]["finalizers"] = json!(["example.com/f"]);
        let mut changed = bundle("example.com/a");
        changed["spec"]["trustBundle"] = json!("y");
        for (allowed, mut new, old, passes) in [
            (
                "attest signers example.com/a",
                bundle("example.com/a"),
                None,
                true,
            ),
            (
                "attest signers example.com/*",
                bundle("example.com/a"),
                None,
                true,
            ),
            (
                "approve signers example.com/a",
                bundle("example.com/a"),
                None,
                false,
            ),
            (
                "attest signers example.com/b",
                bundle("example.com/a"),
                None,
                false,
            ),
            ("", bundle(""), None, true),
            ("", finalized, Some(bundle("example.com/a")), true),
            ("", changed, Some(bundle("example.com/a")), false),
        ] {
            let access = May(allowed);
            let mut a = create(GROUP, "clustertrustbundles", "ClusterTrustBundle", &mut new);
            (a.old_object, a.name, a.access) = (old.as_ref(), "b", &access);
            assert!(ClusterTrustBundleAttest.concerns(&a));
            let result = ClusterTrustBundleAttest.validate(&a, &Objects::default()).await;
            assert_eq!(result.is_ok(), passes, "{allowed} {old:?}");
            if let Err(status) = result {
                assert_eq!(
                    status.message,
                    "clustertrustbundles.certificates.k8s.io \"b\" is forbidden: user not permitted to attest for signerName \"example.com/a\""
                );
            }
        }
    }
}
