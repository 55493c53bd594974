//! The key pair of service accounts. The clusters that skiff makes have P-256; one that was taken over from kubeadm or
//! k3s goes on with its RSA key.

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use jsonwebtoken::{Algorithm, DecodingKey, EncodingKey};
use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use x509_parser::prelude::FromDer;
use x509_parser::public_key::PublicKey;
use x509_parser::x509::SubjectPublicKeyInfo;

use crate::AuthError;

fn unusable(why: impl std::fmt::Display) -> AuthError {
    AuthError::Token(format!("service-account key: {why}"))
}

/// What verifies tokens, and by which algorithm. The key is SPKI in PEM.
pub(crate) fn decoding_key(public_key: &str) -> Result<(DecodingKey, Algorithm), AuthError> {
    if let Ok(key) = DecodingKey::from_ec_pem(public_key.as_bytes()) {
        return Ok((key, Algorithm::ES256));
    }
    let key = DecodingKey::from_rsa_pem(public_key.as_bytes()).map_err(unusable)?;
    Ok((key, Algorithm::RS256))
}

/// What signs tokens, and by which algorithm. The key is PKCS#8, or PKCS#1 for RSA, in PEM.
pub(crate) fn encoding_key(private_key: &str) -> Result<(EncodingKey, Algorithm), AuthError> {
    if let Ok(key) = EncodingKey::from_ec_pem(private_key.as_bytes()) {
        return Ok((key, Algorithm::ES256));
    }
    let key = EncodingKey::from_rsa_pem(private_key.as_bytes()).map_err(unusable)?;
    Ok((key, Algorithm::RS256))
}

/// The public key as a JSON Web Key, with its id.
pub(crate) fn web_key(public_key: &str) -> Result<(String, Value), AuthError> {
    let (_, pem) = x509_parser::pem::parse_x509_pem(public_key.as_bytes()).map_err(unusable)?;
    let (_, info) = SubjectPublicKeyInfo::from_der(&pem.contents).map_err(unusable)?;
    let encode = |bytes: &[u8]| URL_SAFE_NO_PAD.encode(bytes);
    match info.parsed().map_err(unusable)? {
        PublicKey::EC(point) => match point.data() {
            // The uncompressed form of a point of P-256.
            [4, point @ ..] if point.len() == 64 => {
                let (x, y) = (encode(&point[..32]), encode(&point[32..]));
                let id = x.clone();
                let key = json!({"use": "sig", "kty": "EC", "kid": id, "crv": "P-256", "alg": "ES256", "x": x, "y": y});
                Ok((id, key))
            }
            _ => Err(unusable("the public key is not a P-256 point")),
        },
        PublicKey::RSA(key) => {
            // COMPAT: upstream's key id.
            let id = encode(&Sha256::digest(&pem.contents));
            let zeros = key.modulus.iter().take_while(|byte| **byte == 0).count();
            let (n, e) = (encode(&key.modulus[zeros..]), encode(key.exponent));
            let key = json!({"use": "sig", "kty": "RSA", "kid": id, "alg": "RS256", "n": n, "e": e});
            Ok((id, key))
        }
        _ => Err(unusable("it is neither a P-256 nor an RSA key")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use jsonwebtoken::{Header, Validation, decode, encode};

    #[test]
    fn p256_and_rsa_sign_and_verify() {
        for (algorithm, expected) in [
            (&rcgen::PKCS_ECDSA_P256_SHA256, Algorithm::ES256),
            (&rcgen::PKCS_RSA_SHA256, Algorithm::RS256),
        ] {
            let pair = rcgen::KeyPair::generate_for(algorithm).unwrap();
            let (private, found) = encoding_key(&pair.serialize_pem()).unwrap();
            let (public, again) = decoding_key(&pair.public_key_pem()).unwrap();
            assert_eq!((found, again), (expected, expected));
            let token = encode(&Header::new(found), &json!({"sub": "a"}), &private).unwrap();
            let mut validation = Validation::new(found);
            validation.set_required_spec_claims(&["sub"]);
            let claims = decode::<Value>(&token, &public, &validation).unwrap().claims;
            assert_eq!(claims["sub"], "a");
            let (id, key) = web_key(&pair.public_key_pem()).unwrap();
            assert_eq!((id.len(), key["kid"].as_str()), (43, Some(id.as_str())));
            let from_web: jsonwebtoken::jwk::Jwk = serde_json::from_value(key).unwrap();
            let public = DecodingKey::from_jwk(&from_web).unwrap();
            assert!(decode::<Value>(&token, &public, &validation).is_ok());
        }
        assert!(web_key("no key").is_err());
        assert!(decoding_key("no key").is_err());
    }
}
