//! CertificateSubjectRestriction: nobody asks for a client certificate of the group that may do everything.

use async_trait::async_trait;
use base64::Engine;
use skiff_meta::Status;
use x509_parser::certification_request::X509CertificationRequest;
use x509_parser::prelude::FromDer;
use x509_parser::x509::X509Name;

use super::certificate_approval::GROUP;
use crate::{Attributes, Lister, Operation, Plugin};

const SIGNER: &str = "kubernetes.io/kube-apiserver-client";
const MASTERS: &str = "system:masters";

pub struct CertificateSubjectRestriction;

/// The subject of a request, as the API has it (base64 of PEM), by what `read` takes of it.
fn subject<T>(request: &str, read: impl FnOnce(&X509Name<'_>) -> T) -> Result<T, String> {
    let bytes = base64::engine::general_purpose::STANDARD
        .decode(request)
        .map_err(|error| error.to_string())?;
    let (_, pem) = x509_parser::pem::parse_x509_pem(&bytes).map_err(|error| error.to_string())?;
    let (_, parsed) = X509CertificationRequest::from_der(&pem.contents).map_err(|error| error.to_string())?;
    Ok(read(&parsed.certification_request_info.subject))
}

fn organizations(request: &str) -> Result<Vec<String>, String> {
    // A name in letters that cannot be read may be the one that is looked for.
    subject(request, |subject| {
        let names = subject.iter_organization().map(|name| name.as_str());
        let names: Result<Vec<&str>, _> = names.collect();
        names
            .map(|names| names.into_iter().map(str::to_owned).collect())
            .map_err(|error| format!("organization: {error}"))
    })?
}

/// The common name in a request; the last one counts, as upstream reads it.
pub fn common_name(request: &str) -> Result<String, String> {
    subject(request, |subject| {
        let name = subject
            .iter_common_name()
            .filter_map(|name| name.as_str().ok())
            .last();
        name.unwrap_or_default().to_owned()
    })
}

#[async_trait]
impl Plugin for CertificateSubjectRestriction {
    fn name(&self) -> &'static str {
        "CertificateSubjectRestriction"
    }

    fn handles(&self, operation: Operation) -> bool {
        operation == Operation::Create
    }

    fn concerns(&self, a: &Attributes<'_>) -> bool {
        a.is(GROUP, "certificatesigningrequests")
    }

    async fn validate(&self, a: &Attributes<'_>, _: &dyn Lister) -> Result<(), Status> {
        if a.text("spec.signerName") != SIGNER {
            return Ok(());
        }
        match organizations(a.text("spec.request")) {
            Err(why) => Err(a.forbidden(format_args!("failed to parse CSR: {why}"))),
            Ok(names) if names.iter().any(|name| name == MASTERS) => Err(a.forbidden(format_args!(
                "use of {SIGNER} signer with {MASTERS} group is not allowed"
            ))),
            Ok(_) => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plugins::fake::{Objects, create};
    use rcgen::{CertificateParams, DnType, KeyPair};
    use serde_json::json;

    #[tokio::test]
    async fn masters_are_not_made_by_request() {
        for (group, signer, refused) in [
            (MASTERS, SIGNER, true),
            (MASTERS, "example.com/x", false),
            ("others", SIGNER, false),
        ] {
            let mut params = CertificateParams::default();
            params.distinguished_name.push(DnType::OrganizationName, group);
            let key = KeyPair::generate().unwrap();
            let pem = params.serialize_request(&key).unwrap().pem().unwrap();
            let request = base64::engine::general_purpose::STANDARD.encode(pem);
            let mut object =
                json!({"metadata": {"name": "r"}, "spec": {"signerName": signer, "request": request}});
            let a = create(
                GROUP,
                "certificatesigningrequests",
                "CertificateSigningRequest",
                &mut object,
            );
            let result = CertificateSubjectRestriction
                .validate(&a, &Objects::default())
                .await;
            let expected = "certificatesigningrequests.certificates.k8s.io \"r\" is forbidden: use of kubernetes.io/kube-apiserver-client signer with system:masters group is not allowed";
            assert_eq!(
                result.err().map(|s| s.message).as_deref(),
                refused.then_some(expected)
            );
        }
    }
}
