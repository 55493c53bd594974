//! Who writes the status of a PodCertificateRequest must be allowed to sign for its signer, or for all of the signer's domain.

use serde_json::Value;
use skiff_api::node::{at, same, text};
use skiff_auth::{Attributes, UserInfo};
use skiff_meta::{GroupKind, Status, field};
use skiff_registry::{Resource, object};

use crate::server::Inner;

const GROUP: &str = "certificates.k8s.io";

/// Checks a write of the status `new` over `old`, which has passed validation. Other kinds pass.
///
/// COMPAT: upstream checks it as a part of validation, so the answer is one of validation, too.
pub async fn check(
    inner: &Inner,
    user: &UserInfo,
    resource: &Resource,
    new: &Value,
    old: &Value,
) -> Result<(), Status> {
    if resource.facts.group != GROUP
        || resource.facts.plural != "podcertificaterequests"
        || same(at(new, "status"), at(old, "status"))
    {
        return Ok(());
    }
    let signer = text(old, "spec.signerName");
    let domain = signer.split('/').next().unwrap_or_default();
    for name in [signer, &format!("{domain}/*")] {
        let attributes = Attributes {
            verb: "sign",
            is_resource: true,
            group: GROUP,
            version: "*",
            resource: "signers",
            name,
            ..Attributes::default()
        };
        if inner.authorizer.decide(user, &attributes, false).await.allowed {
            return Ok(());
        }
    }
    let why = format!(
        "User {} is not permitted to \"sign\" for signer {}",
        field::quote(&user.name),
        field::quote(signer)
    );
    let error = field::Error::forbidden(&field::Path::new("spec.signerName"), why);
    let kind = GroupKind::new(GROUP, resource.facts.kind);
    Err(Status::invalid(&kind, object::name(new), &[error]))
}
