//! Public keys that certificates are asked for, and the proofs that whoever asks holds the private one.

use aws_lc_rs::rsa::RsaPssSaltLength;
use aws_lc_rs::signature::{
    ECDSA_P256_SHA256_ASN1, ECDSA_P256_SHA384_ASN1, ECDSA_P256_SHA512_ASN1, ECDSA_P384_SHA256_ASN1,
    ECDSA_P384_SHA384_ASN1, ECDSA_P384_SHA512_ASN1, ECDSA_P521_SHA256_ASN1, ECDSA_P521_SHA384_ASN1,
    ECDSA_P521_SHA512_ASN1, ED25519, RSA_PKCS1_2048_8192_SHA256, RSA_PKCS1_2048_8192_SHA384,
    RSA_PKCS1_2048_8192_SHA512, RSA_PSS_2048_8192_SHA256, RSA_PSS_2048_8192_SHA384, RSA_PSS_2048_8192_SHA512,
    RsaParameters, UnparsedPublicKey, VerificationAlgorithm,
};
use x509_parser::certification_request::X509CertificationRequest;
use x509_parser::prelude::FromDer;
use x509_parser::public_key::PublicKey as ParsedKey;
use x509_parser::signature_algorithm::RsaSsaPssParams;
use x509_parser::x509::{AlgorithmIdentifier, SubjectPublicKeyInfo};

const EC: &str = "1.2.840.10045.2.1";
const RSA: &str = "1.2.840.113549.1.1.1";
const ED25519_KEY: &str = "1.3.101.112";

/// What sort of key it is, as far as the rules tell them apart.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Sort {
    Ed25519,
    P256,
    P384,
    P521,
    /// A curve that nobody may use.
    P224,
    /// With the size of the modulus in bits.
    Rsa(usize),
    Other,
}

/// A public key: its sort, and its bits without what says the sort.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct PublicKey {
    pub(super) sort: Sort,
    pub(super) bits: Vec<u8>,
}

impl PublicKey {
    /// Reads a SubjectPublicKeyInfo that has nothing behind it.
    pub(super) fn from_der(der: &[u8]) -> Option<PublicKey> {
        let (rest, info) = SubjectPublicKeyInfo::from_der(der).ok()?;
        rest.is_empty().then(|| PublicKey::of(&info))?
    }

    /// `None` for a key that is broken, or on a curve that nobody knows.
    pub(super) fn of(info: &SubjectPublicKeyInfo<'_>) -> Option<PublicKey> {
        let bits = info.subject_public_key.data.to_vec();
        let sort = match info.algorithm.algorithm.to_id_string().as_str() {
            ED25519_KEY if bits.len() == 32 => Sort::Ed25519,
            ED25519_KEY => return None,
            EC => {
                let curve = info.algorithm.parameters.as_ref()?.as_oid().ok()?;
                // A point is not compressed: both coordinates in whole bytes.
                let (sort, length) = match curve.to_id_string().as_str() {
                    "1.2.840.10045.3.1.7" => (Sort::P256, 32),
                    "1.3.132.0.34" => (Sort::P384, 48),
                    "1.3.132.0.35" => (Sort::P521, 66),
                    "1.3.132.0.33" => (Sort::P224, 28),
                    _ => return None,
                };
                if bits.first() != Some(&4) || bits.len() != 1 + 2 * length {
                    return None;
                }
                sort
            }
            RSA => match info.parsed().ok()? {
                ParsedKey::RSA(key) => {
                    let modulus = key.modulus.iter().skip_while(|byte| **byte == 0).count();
                    Sort::Rsa(modulus * 8)
                }
                _ => return None,
            },
            _ => Sort::Other,
        };
        Some(PublicKey { sort, bits })
    }

    /// Why the key cannot be used; the first is what to show of it.
    pub(super) fn refused(&self) -> Option<(Option<String>, Refused)> {
        match self.sort {
            Sort::P224 => Some((Some("curve P-224".to_owned()), Refused::Curve)),
            Sort::Rsa(3072 | 4096) | Sort::Ed25519 | Sort::P256 | Sort::P384 | Sort::P521 => None,
            Sort::Rsa(size) => Some((Some(format!("{size}-bit modulus")), Refused::Modulus)),
            Sort::Other => Some((None, Refused::Sort)),
        }
    }

    /// Whether the key made this signature of a text, in the way of a proof of possession: the text is hashed with SHA-256
    /// whatever the curve, and RSA signs with PSS.
    pub(super) fn proves(&self, text: &[u8], signature: &[u8]) -> bool {
        /// COMPAT: upstream's kubelets before v1.36 sign with the longest salt that fits.
        const LONG_SALT: RsaParameters = RSA_PSS_2048_8192_SHA256.with_pss_salt_length(RsaPssSaltLength::Max);
        let by = |algorithm: &'static dyn VerificationAlgorithm| self.signed(algorithm, text, signature);
        match self.sort {
            Sort::Ed25519 => by(&ED25519),
            Sort::P256 => by(&ECDSA_P256_SHA256_ASN1),
            Sort::P384 => by(&ECDSA_P384_SHA256_ASN1),
            Sort::P521 => by(&ECDSA_P521_SHA256_ASN1),
            Sort::Rsa(_) => by(&RSA_PSS_2048_8192_SHA256) || by(&LONG_SALT),
            Sort::P224 | Sort::Other => false,
        }
    }

    fn signed(
        &self,
        algorithm: &'static dyn VerificationAlgorithm,
        message: &[u8],
        signature: &[u8],
    ) -> bool {
        let key = UnparsedPublicKey::new(algorithm, &self.bits);
        key.verify(message, signature).is_ok()
    }
}

/// What is wrong with a key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Refused {
    Curve,
    Modulus,
    Sort,
}

/// A PKCS#10 request: the key that it is for, and whether that key signed it.
pub(super) struct Request {
    pub(super) key: PublicKey,
    pub(super) is_signed: bool,
}

impl Request {
    pub(super) fn from_der(der: &[u8]) -> Option<Request> {
        let (rest, request) = X509CertificationRequest::from_der(der).ok()?;
        if !rest.is_empty() {
            return None;
        }
        let info = &request.certification_request_info;
        let key = PublicKey::of(&info.subject_pki)?;
        let signature = &request.signature_value.data;
        let is_signed = algorithm_of(key.sort, &request.signature_algorithm)
            .is_some_and(|algorithm| key.signed(algorithm, info.raw, signature));
        Some(Request { key, is_signed })
    }
}

/// How a key of this sort signs by the algorithm that is named. SHA-1 is not among them.
fn algorithm_of(sort: Sort, named: &AlgorithmIdentifier<'_>) -> Option<&'static dyn VerificationAlgorithm> {
    let name = named.algorithm.to_id_string();
    Some(match (sort, name.as_str()) {
        (Sort::Ed25519, ED25519_KEY) => &ED25519,
        (Sort::P256, "1.2.840.10045.4.3.2") => &ECDSA_P256_SHA256_ASN1,
        (Sort::P256, "1.2.840.10045.4.3.3") => &ECDSA_P256_SHA384_ASN1,
        (Sort::P256, "1.2.840.10045.4.3.4") => &ECDSA_P256_SHA512_ASN1,
        (Sort::P384, "1.2.840.10045.4.3.2") => &ECDSA_P384_SHA256_ASN1,
        (Sort::P384, "1.2.840.10045.4.3.3") => &ECDSA_P384_SHA384_ASN1,
        (Sort::P384, "1.2.840.10045.4.3.4") => &ECDSA_P384_SHA512_ASN1,
        (Sort::P521, "1.2.840.10045.4.3.2") => &ECDSA_P521_SHA256_ASN1,
        (Sort::P521, "1.2.840.10045.4.3.3") => &ECDSA_P521_SHA384_ASN1,
        (Sort::P521, "1.2.840.10045.4.3.4") => &ECDSA_P521_SHA512_ASN1,
        (Sort::Rsa(_), "1.2.840.113549.1.1.11") => &RSA_PKCS1_2048_8192_SHA256,
        (Sort::Rsa(_), "1.2.840.113549.1.1.12") => &RSA_PKCS1_2048_8192_SHA384,
        (Sort::Rsa(_), "1.2.840.113549.1.1.13") => &RSA_PKCS1_2048_8192_SHA512,
        (Sort::Rsa(_), "1.2.840.113549.1.1.10") => {
            let parameters = RsaSsaPssParams::try_from(named.parameters.as_ref()?).ok()?;
            match parameters.hash_algorithm_oid().to_id_string().as_str() {
                "2.16.840.1.101.3.4.2.1" => &RSA_PSS_2048_8192_SHA256,
                "2.16.840.1.101.3.4.2.2" => &RSA_PSS_2048_8192_SHA384,
                "2.16.840.1.101.3.4.2.3" => &RSA_PSS_2048_8192_SHA512,
                _ => return None,
            }
        }
        _ => return None,
    })
}
