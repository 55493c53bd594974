//! The chain of authenticators: client certificate, bearer token, anonymous. The first match wins.

use crate::{TokenVerifier, UserInfo, x509};
use http::header::AUTHORIZATION;
use http::request::Parts;
use rustls::pki_types::CertificateDer;
use thiserror::Error;

/// Why a credential was refused. The client hears only `Unauthorized`; this goes to the log.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum AuthError {
    #[error("client certificate: {0}")]
    Certificate(String),
    #[error("bearer token: {0}")]
    Token(String),
    #[error("anonymous requests are not allowed")]
    NoCredential,
}

pub struct Authenticator {
    pub tokens: Option<TokenVerifier>,
    pub anonymous: bool,
}

impl Authenticator {
    /// `peer_certificates` have been verified against the client CA by TLS.
    pub async fn authenticate(
        &self,
        parts: &Parts,
        peer_certificates: Option<&[CertificateDer<'_>]>,
    ) -> Result<UserInfo, AuthError> {
        if let Some(leaf) = peer_certificates.and_then(<[_]>::first) {
            return x509::user(leaf);
        }
        if let Some(token) = bearer(parts) {
            return match &self.tokens {
                Some(verifier) => verifier.verify(token, None).await,
                None => Err(AuthError::Token(
                    "no token authenticator is configured".to_owned(),
                )),
            };
        }
        if self.anonymous {
            Ok(UserInfo::anonymous())
        } else {
            Err(AuthError::NoCredential)
        }
    }
}

/// The token of an `Authorization: Bearer` header, or of the WebSocket subprotocol that browsers use instead.
fn bearer(parts: &Parts) -> Option<&str> {
    let value = parts.headers.get(AUTHORIZATION)?.to_str().ok()?;
    let (scheme, token) = value.split_once(' ')?;
    (scheme.eq_ignore_ascii_case("bearer") && !token.trim().is_empty()).then(|| token.trim())
}
