//! Users by the word of a front proxy: whoever shows a certificate of the front-proxy authority says in headers
//! whom it speaks for. The check of the certificate against that authority is the caller's.

use crate::{AuthError, UserInfo};
use http::HeaderMap;
use rustls::pki_types::CertificateDer;
use x509_parser::prelude::{FromDer, X509Certificate};

pub const USER_HEADER: &str = "x-remote-user";
pub const UID_HEADER: &str = "x-remote-uid";
pub const GROUP_HEADER: &str = "x-remote-group";
pub const EXTRA_PREFIX: &str = "x-remote-extra-";

/// Who may speak for others.
#[derive(Debug, Clone, Default)]
pub struct RequestHeader {
    /// Common names of front proxies; empty means any certificate of the authority.
    pub allowed_names: Vec<String>,
}

impl RequestHeader {
    /// The user that the headers name, `None` if they name none. `leaf` was signed by the front-proxy authority.
    pub fn user(
        &self,
        headers: &HeaderMap,
        leaf: &CertificateDer<'_>,
    ) -> Result<Option<UserInfo>, AuthError> {
        let (_, certificate) = X509Certificate::from_der(leaf)
            .map_err(|e| AuthError::Certificate(format!("cannot be read: {e}")))?;
        let common_name = certificate.subject().iter_common_name().next();
        let common_name = common_name.and_then(|cn| cn.as_str().ok()).unwrap_or("");
        if !self.allowed_names.is_empty() && !self.allowed_names.iter().any(|name| name == common_name) {
            return Err(AuthError::Certificate(format!(
                "subject with cn={common_name} is not allowed"
            )));
        }
        let trimmed = |value| text(value).trim().to_owned();
        let Some(name) = headers
            .get(USER_HEADER)
            .map(trimmed)
            .filter(|name| !name.is_empty())
        else {
            return Ok(None);
        };
        let groups = headers.get_all(GROUP_HEADER).iter().map(trimmed);
        let mut user = UserInfo::new(name, groups);
        user.uid = headers.get(UID_HEADER).map(trimmed).unwrap_or_default();
        for (header, value) in headers {
            if let Some(key) = header.as_str().strip_prefix(EXTRA_PREFIX) {
                user.extra.entry(unescape(key)).or_default().push(trimmed(value));
            }
        }
        Ok(Some(user))
    }
}

/// What a header says about an identity. A name that is not ASCII is a name all the same: who passed it over would take the
/// request for one of somebody else.
pub(crate) fn text(value: &http::HeaderValue) -> String {
    String::from_utf8_lossy(value.as_bytes()).into_owned()
}

/// The headers that say who a request is from, as an extension API server reads them.
pub fn identify(headers: &mut HeaderMap, user: &UserInfo) {
    remove(headers);
    let mut add = |name: &str, value: &str| {
        let (Ok(name), Ok(value)) = (
            http::HeaderName::from_bytes(name.as_bytes()),
            http::HeaderValue::from_bytes(value.as_bytes()),
        ) else {
            return tracing::warn!(name, "a user attribute cannot be sent as a header");
        };
        headers.append(name, value);
    };
    add(USER_HEADER, &user.name);
    if !user.uid.is_empty() {
        add(UID_HEADER, &user.uid);
    }
    for group in &user.groups {
        add(GROUP_HEADER, group);
    }
    for (key, values) in &user.extra {
        for value in values {
            add(&format!("{EXTRA_PREFIX}{}", escape(key)), value);
        }
    }
}

/// Nobody but the front proxy itself says who somebody is.
pub fn remove(headers: &mut HeaderMap) {
    let names: Vec<http::HeaderName> = headers
        .keys()
        .filter(|name| {
            matches!(name.as_str(), USER_HEADER | UID_HEADER | GROUP_HEADER)
                || name.as_str().starts_with(EXTRA_PREFIX)
        })
        .cloned()
        .collect();
    for name in names {
        headers.remove(name);
    }
}

/// Keys of extras may hold what header names may not.
fn escape(key: &str) -> String {
    let mut out = String::with_capacity(key.len());
    for byte in key.bytes() {
        let token = byte.is_ascii_alphanumeric()
            || matches!(
                byte,
                b'!' | b'#'
                    | b'$'
                    | b'&'
                    | b'\''
                    | b'*'
                    | b'+'
                    | b'-'
                    | b'.'
                    | b'^'
                    | b'_'
                    | b'`'
                    | b'|'
                    | b'~'
            );
        if token {
            out.push(byte as char);
        } else {
            out.push_str(&format!("%{byte:02X}"));
        }
    }
    out
}

/// The other way; what is not escaped well stays as it is.
pub(crate) fn unescape(key: &str) -> String {
    let mut out = Vec::with_capacity(key.len());
    let bytes = key.as_bytes();
    let mut at = 0;
    while at < bytes.len() {
        let hex = (bytes[at] == b'%').then(|| key.get(at + 1..at + 3)).flatten();
        match hex.and_then(|hex| u8::from_str_radix(hex, 16).ok()) {
            Some(byte) => {
                out.push(byte);
                at += 3;
            }
            None => {
                out.push(bytes[at]);
                at += 1;
            }
        }
    }
    String::from_utf8(out).unwrap_or_else(|_| key.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use rcgen::{CertificateParams, DnType, KeyPair};

    fn certificate(name: &str) -> CertificateDer<'static> {
        let mut params = CertificateParams::default();
        params.distinguished_name.push(DnType::CommonName, name);
        params
            .self_signed(&KeyPair::generate().unwrap())
            .unwrap()
            .der()
            .clone()
    }

    #[test]
    fn what_is_written_is_read() {
        let mut user = UserInfo::new("josé", ["devs"]);
        user.uid = "u-1".to_owned();
        user.extra.insert(
            "example.org/reason".to_owned(),
            vec!["a b".to_owned(), "c".to_owned()],
        );
        let mut headers = HeaderMap::new();
        headers.insert("x-remote-group", http::HeaderValue::from_static("system:masters"));
        identify(&mut headers, &user);
        assert_eq!(headers["x-remote-extra-example.org%2freason"], "a b");
        let reader = RequestHeader {
            allowed_names: vec!["front-proxy-client".to_owned()],
        };
        let found = reader.user(&headers, &certificate("front-proxy-client"));
        assert_eq!(found, Ok(Some(user)));
        assert!(reader.user(&headers, &certificate("somebody")).is_err());
        remove(&mut headers);
        assert!(headers.is_empty());
        assert_eq!(
            reader.user(&headers, &certificate("front-proxy-client")),
            Ok(None)
        );
    }
}
