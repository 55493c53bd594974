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
    user.extra.insert(
        "authentication.kubernetes.io/credential-id".to_owned(),
        vec![credential_id(leaf)],
    );
    Ok(user)
}

/// The last second (of Unix time) in which a certificate is valid.
pub fn end(certificate: &CertificateDer<'_>) -> Option<i64> {
    let (_, certificate) = X509Certificate::from_der(certificate).ok()?;
    Some(certificate.validity().not_after.timestamp())
}

fn credential_id(leaf: &[u8]) -> String {
    const PREFIX: &str = "X509SHA256=";
    let digest = Sha256::digest(leaf);
    let mut id = String::with_capacity(PREFIX.len() + 2 * digest.len());
    id.push_str(PREFIX);
    for byte in digest {
        for nibble in [byte >> 4, byte & 15] {
            id.push(char::from(b"0123456789abcdef"[usize::from(nibble)]));
        }
    }
    id
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
        assert_eq!(end(&CertificateDer::from(vec![1, 2, 3])), None);
        assert_eq!(
            credential_id(b"abc"),
            "X509SHA256=ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
        );
    }
}
