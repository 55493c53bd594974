//! The chain of authenticators: front proxy, client certificate, bearer token, anonymous. The first that
//! recognises its credential wins; when none does and one of them refused, the request is refused.

use crate::request_header::RequestHeader;
use crate::{Anonymous, TokenNote, Tokens, UserInfo, x509};
use http::header::AUTHORIZATION;
use http::request::Parts;
use rustls::pki_types::CertificateDer;
use std::sync::Arc;
use thiserror::Error;

/// Why a credential was refused. The client hears only `Unauthorized`; this goes to the log.
#[derive(Debug, Clone, Error, PartialEq, Eq)]
pub enum AuthError {
    #[error("client certificate: {0}")]
    Certificate(String),
    #[error("bearer token: {0}")]
    Token(String),
    #[error("bearer token: audiences {token:?} are not among {target:?}")]
    Audiences { token: Vec<String>, target: Vec<String> },
    #[error("bearer token: not issued here")]
    NotOurs,
    #[error("bearer token: not signed here")]
    Signature,
    /// In the words of whoever refused it.
    #[error("bearer token: {0}")]
    Told(String),
    #[error("bearer token: {0:?}")]
    Several(Vec<AuthError>),
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
    /// Who the leaf says it is: read once, not with every request.
    user: Result<Arc<UserInfo>, AuthError>,
    /// From this second on (of Unix time) the certificates have to be looked at anew: one of them has expired.
    pub until: i64,
    /// The last second (of Unix time) in which the leaf is valid.
    pub leaf_ends: Option<i64>,
}

impl Peer {
    /// `now` is when the authorities were asked, in seconds of Unix time.
    pub fn new(
        certificates: Vec<CertificateDer<'static>>,
        of_client_ca: Result<(), String>,
        of_front_proxy_ca: bool,
        now: i64,
    ) -> Peer {
        let user = match (&of_client_ca, certificates.first()) {
            (Ok(()), Some(leaf)) => x509::user(leaf).map(Arc::new),
            (Ok(()), None) => Err(AuthError::Certificate("is missing".to_owned())),
            (Err(why), _) => Err(AuthError::Certificate(why.clone())),
        };
        let ends = certificates
            .iter()
            .filter_map(|certificate| x509::end(certificate));
        // One that was over before did not count then and does not now.
        let until = ends
            .filter(|end| *end >= now)
            .min()
            .map_or(i64::MAX, |end| end + 1);
        Peer {
            leaf_ends: certificates.first().and_then(x509::end),
            certificates,
            of_client_ca,
            of_front_proxy_ca,
            user,
            until,
        }
    }
}

pub struct Authenticator {
    pub tokens: Tokens,
    pub request_header: Option<RequestHeader>,
    pub anonymous: Anonymous,
}

impl Authenticator {
    /// Who asks, by what the connection has shown; nobody if it has shown nothing.
    pub fn by_connection(
        &self,
        parts: &Parts,
        peer: Option<&Peer>,
    ) -> Result<Option<Arc<UserInfo>>, AuthError> {
        let Some(peer) = peer else { return Ok(None) };
        if let (Some(leaf), Some(proxies)) = (peer.certificates.first(), &self.request_header)
            && peer.of_front_proxy_ca
            // What the proxy's own certificate says is the better answer to a proxy that must not speak for others.
            && let Ok(Some(user)) = proxies.user(&parts.headers, leaf)
        {
            return Ok(Some(Arc::new(user)));
        }
        peer.user.clone().map(Some)
    }

    /// Who asks, by the token of the request. `refused` is why the connection did not tell; `notes` gets what is to be
    /// told of the token.
    pub async fn by_token(
        &self,
        parts: &Parts,
        mut refused: Option<AuthError>,
        notes: &mut Vec<TokenNote>,
    ) -> Result<Arc<UserInfo>, AuthError> {
        if let Some(token) = bearer(parts) {
            match self.tokens.authenticate(token, None, notes).await {
                Ok((user, _)) => return Ok(Arc::new(user)),
                Err(error) => refused = Some(error),
            }
        }
        match refused {
            Some(error) => Err(error),
            None if self.anonymous.on(parts.uri.path()) => Ok(Arc::new(UserInfo::anonymous())),
            None => Err(AuthError::NoCredential),
        }
    }
}

/// Whether a space too many stands before the token of a request, so that it is not taken for one.
pub fn space_before_token(headers: &http::HeaderMap) -> bool {
    let value = headers.get(AUTHORIZATION).and_then(|value| value.to_str().ok());
    let mut words = value.unwrap_or("").trim().splitn(3, ' ');
    words
        .next()
        .is_some_and(|scheme| scheme.eq_ignore_ascii_case("bearer"))
        && words.next() == Some("")
        && words.next().is_some()
}

/// The token of an `Authorization: Bearer` header.
fn bearer(parts: &Parts) -> Option<&str> {
    let value = parts.headers.get(AUTHORIZATION)?.to_str().ok()?;
    // COMPAT: what follows a second space is left out, and a space before the token leaves it out.
    let mut words = value.trim().split(' ');
    let (scheme, token) = (words.next()?, words.next()?);
    (scheme.eq_ignore_ascii_case("bearer") && !token.is_empty()).then_some(token)
}

#[cfg(test)]
mod tests {
    use super::*;
    use rcgen::{CertificateParams, DnType, KeyPair};

    fn certificate(last_year: i32) -> CertificateDer<'static> {
        let mut params = CertificateParams::default();
        params.distinguished_name.push(DnType::CommonName, "jane");
        params.not_after = rcgen::date_time_ymd(last_year, 1, 1);
        let signed = params.self_signed(&KeyPair::generate().unwrap()).unwrap();
        signed.der().clone()
    }

    #[test]
    fn a_token_is_the_second_word() {
        let check = |header: &str, expected: Option<&str>| {
            let request = http::Request::builder()
                .header(AUTHORIZATION, header)
                .body(())
                .unwrap();
            assert_eq!(bearer(&request.into_parts().0), expected, "{header:?}");
        };
        check("Bearer a", Some("a"));
        check("bearer a b", Some("a"));
        check("Bearer  a", None);
        check("Bearer", None);
        check("Basic a", None);
    }

    #[test]
    fn a_space_too_many_is_noticed() {
        let check = |header: &'static str, expected: bool| {
            let headers = [(AUTHORIZATION, http::HeaderValue::from_static(header))];
            let headers = headers.into_iter().collect();
            assert_eq!(space_before_token(&headers), expected, "{header:?}");
        };
        check("Bearer  a", true);
        check("bearer  a b", true);
        check("Bearer a", false);
        check("Bearer ", false);
        check("Basic  a", false);
    }

    #[test]
    fn a_certificate_is_read_once() {
        let (parts, ()) = http::Request::new(()).into_parts();
        let authenticator = Authenticator {
            tokens: Tokens::default(),
            request_header: None,
            anonymous: Anonymous::everywhere(true),
        };
        let peer = Peer::new(vec![certificate(2100)], Ok(()), false, 0);
        let first = authenticator.by_connection(&parts, Some(&peer)).unwrap().unwrap();
        let second = authenticator.by_connection(&parts, Some(&peer)).unwrap().unwrap();
        assert_eq!(first.name, "jane");
        assert!(Arc::ptr_eq(&first, &second));
        let refused = Peer::new(vec![certificate(2100)], Err("unknown".to_owned()), false, 0);
        assert_eq!(
            authenticator.by_connection(&parts, Some(&refused)),
            Err(AuthError::Certificate("unknown".to_owned()))
        );
        assert_eq!(authenticator.by_connection(&parts, None), Ok(None));
    }

    #[test]
    fn certificates_are_looked_at_again_when_one_has_expired() {
        let (in_2030, in_2050) = (1_893_456_000, 2_524_608_000);
        let check = |now: i64, expected: i64| {
            let shown = vec![certificate(2050), certificate(2030)];
            assert_eq!(Peer::new(shown, Ok(()), false, now).until, expected);
        };
        check(0, in_2030 + 1);
        check(in_2030, in_2030 + 1);
        check(in_2030 + 1, in_2050 + 1);
        check(in_2050 + 1, i64::MAX);
    }
}
