//! The keys of pod certificates, and the requests that they sign. A request says nothing but the key: what the certificate is to
//! say is for the signer to decide, by the pod.

use rcgen::{CertificateParams, DistinguishedName, KeyPair, RsaKeySize};
use skiff_api::certificates::pem;

#[derive(Debug, thiserror::Error)]
pub(super) enum KeyError {
    #[error("unknown key type {0:?}")]
    Unknown(String),
    #[error("while generating keypair: {0}")]
    Generate(#[from] rcgen::Error),
}

/// A new key.
pub(super) struct NewKey {
    /// PKCS#8, as PEM.
    pub(super) pem: Vec<u8>,
    /// PKCS#10, as DER.
    pub(super) request: Vec<u8>,
}

/// Makes a key of a type, by the name that pods have for it. Takes up to seconds of CPU for RSA.
pub(super) fn generate(key_type: &str) -> Result<NewKey, KeyError> {
    let key = match key_type {
        "ED25519" => KeyPair::generate_for(&rcgen::PKCS_ED25519)?,
        "ECDSAP256" => KeyPair::generate_for(&rcgen::PKCS_ECDSA_P256_SHA256)?,
        "ECDSAP384" => KeyPair::generate_for(&rcgen::PKCS_ECDSA_P384_SHA384)?,
        "ECDSAP521" => KeyPair::generate_for(&rcgen::PKCS_ECDSA_P521_SHA512)?,
        "RSA3072" => KeyPair::generate_rsa_for(&rcgen::PKCS_RSA_SHA256, RsaKeySize::_3072)?,
        "RSA4096" => KeyPair::generate_rsa_for(&rcgen::PKCS_RSA_SHA256, RsaKeySize::_4096)?,
        other => return Err(KeyError::Unknown(other.to_owned())),
    };
    let mut parameters = CertificateParams::default();
    parameters.distinguished_name = DistinguishedName::new();
    let request = parameters.serialize_request(&key)?.der().to_vec();
    let private = first_version(key.serialize_der());
    Ok(NewKey {
        pem: pem::encode("PRIVATE KEY", &private).into_bytes(),
        request,
    })
}

/// An Ed25519 key comes with its public half, in the second version of PKCS#8, which many programs cannot read. The first version
/// has the private half alone; the public one is computed from it.
fn first_version(der: Vec<u8>) -> Vec<u8> {
    const HEAD: [u8; 14] = [
        0x02, 0x01, 0x01, 0x30, 0x05, 0x06, 0x03, 0x2b, 0x65, 0x70, 0x04, 0x22, 0x04, 0x20,
    ];
    const SEED: usize = 32;
    match der.get(2..2 + HEAD.len() + SEED) {
        Some(content) if content.starts_with(&HEAD) => {
            let mut first = vec![0x30, 0x2e];
            first.extend(content);
            // The version is counted from zero.
            first[4] = 0;
            first
        }
        _ => der,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use x509_parser::certification_request::X509CertificationRequest;
    use x509_parser::prelude::FromDer;

    #[test]
    fn keys_of_every_type() {
        for (key_type, algorithm) in [
            ("ED25519", "1.3.101.112"),
            ("ECDSAP256", "1.2.840.10045.2.1"),
            ("ECDSAP384", "1.2.840.10045.2.1"),
            ("ECDSAP521", "1.2.840.10045.2.1"),
            ("RSA3072", "1.2.840.113549.1.1.1"),
        ] {
            let key = generate(key_type).unwrap();
            let text = String::from_utf8(key.pem).unwrap();
            let blocks = pem::blocks(&text);
            assert_eq!((blocks.len(), blocks[0].kind.as_str()), (1, "PRIVATE KEY"));
            // The first version of PKCS#8, by whose content the key can be read again.
            let der = &blocks[0].bytes;
            let versions: Vec<&[u8]> = der.windows(3).filter(|part| part.starts_with(&[2, 1])).collect();
            assert_eq!(versions[0], [2, 1, 0], "{key_type}");
            let again = KeyPair::try_from(der.as_slice()).unwrap();
            let (rest, request) = X509CertificationRequest::from_der(&key.request).unwrap();
            assert!(rest.is_empty());
            let info = request.certification_request_info;
            assert_eq!(
                info.subject_pki.algorithm.algorithm.to_id_string(),
                algorithm,
                "{key_type}"
            );
            assert_eq!(info.subject.iter().count(), 0);
            assert_eq!(info.attributes().len(), 0);
            use rcgen::PublicKeyData;
            assert_eq!(
                again.subject_public_key_info(),
                info.subject_pki.raw,
                "{key_type}"
            );
        }
        assert_eq!(
            generate("DSA").err().unwrap().to_string(),
            "unknown key type \"DSA\""
        );
    }
}
