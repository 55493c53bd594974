//! Users by client certificate: the common name is the user, the organisations are the groups.

use crate::{AuthError, UserInfo};
use rustls::pki_types::CertificateDer;
use sha2::{Digest, Sha256};
use x509_parser::prelude::{FromDer, X509Certificate};

pub fn user(leaf: &CertificateDer<'_>) -> Result<UserInfo, AuthError> {
    let (_, certificate) = X509Certificate::from_der(leaf)
        .map_err(|e| AuthError::Certificate(format!("cannot be read: {e}")))?;
    let subject = certificate.subject();
    let name = subject
        .iter_common_name()
        .next()
        .and_then(|cn| cn.as_str().ok())
        .filter(|cn| !cn.is_empty())
        .ok_or_else(|| AuthError::Certificate("has no common name".to_owned()))?;
    let groups = subject.iter_organization().filter_map(|o| o.as_str().ok());
    let mut user = UserInfo::new(name, groups);
    let digest: String = Sha256::digest(leaf)
        .iter()
        .map(|byte| format!("{byte:02x}"))
        .collect();
    user.extra.insert(
        "authentication.kubernetes.io/credential-id".to_owned(),
        vec![format!("X509SHA256={digest}")],
    );
    Ok(user)
}

#[cfg(test)]
mod tests {
    use super::*;
    use rcgen::{CertificateParams, DnType, KeyPair};

    #[test]
    fn the_subject_is_the_user() {
        let mut params = CertificateParams::default();
        params
            .distinguished_name
            .push(DnType::CommonName, "kubernetes-admin");
        params
            .distinguished_name
            .push(DnType::OrganizationName, "system:masters");
        let certificate = params.self_signed(&KeyPair::generate().unwrap()).unwrap();
        let user = user(certificate.der()).unwrap();
        assert_eq!(user.name, "kubernetes-admin");
        assert_eq!(user.groups, ["system:masters", "system:authenticated"]);
        assert!(user.extra["authentication.kubernetes.io/credential-id"][0].starts_with("X509SHA256="));
        assert!(super::user(&CertificateDer::from(vec![1, 2, 3])).is_err());
    }
}
