//! The chain of authenticators: front proxy, client certificate, bearer token, anonymous. The first that
//! recognises its credential wins; when none does and one of them refused, the request is refused.

use crate::request_header::RequestHeader;
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
    #[error("bearer token: audiences {token:?} are not among {target:?}")]
    Audiences { token: Vec<String>, target: Vec<String> },
    #[error("bearer token: not issued here")]
    NotOurs,
    #[error("anonymous requests are not allowed")]
    NoCredential,
}

/// The certificates that a connection showed, and whose they are: checked once a connection.
#[derive(Debug)]
pub struct Peer {
    /// Leaf first, not empty.
    pub certificates: Vec<CertificateDer<'static>>,
    /// Signed by the authority of clients; otherwise why not.
    pub of_client_ca: Result<(), String>,
    /// Signed by the authority of front proxies.
    pub of_front_proxy_ca: bool,
}

pub struct Authenticator {
    pub tokens: Option<TokenVerifier>,
    pub request_header: Option<RequestHeader>,
    pub anonymous: bool,
}

impl Authenticator {
    pub async fn authenticate(&self, parts: &Parts, peer: Option<&Peer>) -> Result<UserInfo, AuthError> {
        let mut refused = None;
        let leaf = peer.and_then(|peer| peer.certificates.first());
        if let (Some(peer), Some(leaf), Some(proxies)) = (peer, leaf, &self.request_header)
            && peer.of_front_proxy_ca
        {
            match proxies.user(&parts.headers, leaf) {
                Ok(Some(user)) => return Ok(user),
                Ok(None) => {}
                Err(error) => refused = Some(error),
            }
        }
        if let (Some(peer), Some(leaf)) = (peer, leaf) {
            let user = match &peer.of_client_ca {
                Ok(()) => x509::user(leaf),
                Err(why) => Err(AuthError::Certificate(why.clone())),
            };
            match user {
                Ok(user) => return Ok(user),
                Err(error) => refused = Some(error),
            }
        }
        if let Some(token) = bearer(parts) {
            let verified = match &self.tokens {
                Some(verifier) => verifier.verify(token, None).await,
                None => Err(AuthError::Token(
                    "no token authenticator is configured".to_owned(),
                )),
            };
            match verified {
                Ok(user) => return Ok(user),
                Err(error) => refused = Some(error),
            }
        }
        match refused {
            Some(error) => Err(error),
            None if self.anonymous => Ok(UserInfo::anonymous()),
            None => Err(AuthError::NoCredential),
        }
    }
}

/// The token of an `Authorization: Bearer` header.
fn bearer(parts: &Parts) -> Option<&str> {
    let value = parts.headers.get(AUTHORIZATION)?.to_str().ok()?;
    let (scheme, token) = value.split_once(' ')?;
    (scheme.eq_ignore_ascii_case("bearer") && !token.trim().is_empty()).then(|| token.trim())
}
