//! CertificateApproval: who approves or denies a signing request must be allowed to do so for its signer.

use async_trait::async_trait;
use skiff_api::node::text;
use skiff_meta::Status;

use crate::{Attributes, Lister, Operation, Plugin};

pub struct CertificateApproval;

pub const GROUP: &str = "certificates.k8s.io";

/// Whether a user may do `verb` for a signer: for this one, or for all of its domain.
pub fn may_for_signer(a: &Attributes<'_>, verb: &str, signer: &str) -> bool {
    let domain = signer.split('/').next().unwrap_or_default();
    let may = |signer: &str| a.access.may(verb, GROUP, "signers", "", signer);
    may(signer) || may(&format!("{domain}/*"))
}

/// Refuses a user who may not do `verb` for a signer.
pub fn check_signer(a: &Attributes<'_>, verb: &str, signer: &str) -> Result<(), Status> {
    if may_for_signer(a, verb, signer) {
        return Ok(());
    }
    Err(a.forbidden(format_args!(
        "user not permitted to {verb} requests with signerName {}",
        skiff_meta::field::quote(signer)
    )))
}

#[async_trait]
impl Plugin for CertificateApproval {
    fn name(&self) -> &'static str {
        "CertificateApproval"
    }

    fn handles(&self, operation: Operation) -> bool {
        operation == Operation::Update
    }

    fn concerns(&self, a: &Attributes<'_>) -> bool {
        a.group == GROUP && a.resource == "certificatesigningrequests" && a.subresource == "approval"
    }

    async fn validate(&self, a: &Attributes<'_>, _: &dyn Lister) -> Result<(), Status> {
        // The signer of the stored request: a change of it is refused, but not by us.
        let signer = a.old_object.map_or("", |old| text(old, "spec.signerName"));
        check_signer(a, "approve", signer)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plugins::fake::{May, Objects, create};
    use serde_json::json;

    #[tokio::test]
    async fn a_signer_or_its_domain_must_be_allowed() {
        let old = json!({"spec": {"signerName": "example.com/a"}});
        for (allowed, passes) in [
            ("approve signers example.com/a", true),
            ("approve signers example.com/*", true),
            ("approve signers example.com/b", false),
            ("sign signers example.com/a", false),
        ] {
            let mut object = old.clone();
            let access = May(allowed);
            let mut a = create(
                GROUP,
                "certificatesigningrequests",
                "CertificateSigningRequest",
                &mut object,
            );
            (a.old_object, a.name, a.access) = (Some(&old), "r", &access);
            let result = CertificateApproval.validate(&a, &Objects::default()).await;
            assert_eq!(result.is_ok(), passes, "{allowed}");
            if let Err(status) = result {
                assert_eq!(
                    status.message,
                    "certificatesigningrequests.certificates.k8s.io \"r\" is forbidden: user not permitted to approve requests with signerName \"example.com/a\""
                );
            }
        }
    }
}
