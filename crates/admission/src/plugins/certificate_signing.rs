//! CertificateSigning: who writes a certificate into a signing request must be allowed to sign for its signer.

use async_trait::async_trait;
use serde_json::Value;
use skiff_api::node::{at, same, text};
use skiff_meta::Status;

use super::certificate_approval::{GROUP, check_signer};
use crate::{Attributes, Lister, Operation, Plugin};

pub struct CertificateSigning;

#[async_trait]
impl Plugin for CertificateSigning {
    fn name(&self) -> &'static str {
        "CertificateSigning"
    }

    fn handles(&self, operation: Operation) -> bool {
        operation == Operation::Update
    }

    fn concerns(&self, a: &Attributes<'_>) -> bool {
        a.group == GROUP && a.resource == "certificatesigningrequests" && a.subresource == "status"
    }

    async fn validate(&self, a: &Attributes<'_>, _: &dyn Lister) -> Result<(), Status> {
        let (new, old) = (
            a.object.as_deref().unwrap_or(&Value::Null),
            a.old_object.unwrap_or(&Value::Null),
        );
        let unchanged = ["status.certificate", "status.conditions"]
            .iter()
            .all(|path| same(at(new, path), at(old, path)));
        let signer = text(old, "spec.signerName");
        if unchanged {
            return Ok(());
        }
        check_signer(a, "sign", signer)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plugins::fake::{May, Objects, create};
    use serde_json::json;

    #[tokio::test]
    async fn only_what_is_signed_is_asked_about() {
        let old = json!({"spec": {"signerName": "example.com/a"}});
        for (allowed, certificate, passes) in [
            ("sign signers example.com/*", "YQ==", true),
            ("approve signers example.com/a", "YQ==", false),
            ("", "", true),
        ] {
            let mut object = old.clone();
            if !certificate.is_empty() {
                object["status"] = json!({"certificate": certificate});
            }
            let access = May(allowed);
            let mut a = create(
                GROUP,
                "certificatesigningrequests",
                "CertificateSigningRequest",
                &mut object,
            );
            (a.old_object, a.name, a.access) = (Some(&old), "r", &access);
            let result = CertificateSigning.validate(&a, &Objects::default()).await;
            assert_eq!(result.is_ok(), passes, "{allowed}");
        }
    }
}
