//! Continue tokens: the version of the snapshot and the last key given out. Clients must not look
//! inside, but the form is upstream's, so that a token survives a change of server.

use base64::alphabet::URL_SAFE;
use base64::engine::general_purpose::{GeneralPurpose, NO_PAD, URL_SAFE_NO_PAD};
use base64::{DecodeError, Engine};
use serde::{Deserialize, Serialize};

use crate::{Error, Result};

/// Trailing bits mean nothing to upstream's decoder.
const LENIENT: GeneralPurpose = GeneralPurpose::new(&URL_SAFE, NO_PAD.with_decode_allow_trailing_bits(true));

const VERSION: &str = "meta.k8s.io/v1";
/// In place of a version: continue in the newest state, whatever happened since the last page.
const INCONSISTENT: i64 = -1;

#[derive(Serialize, Deserialize)]
struct Wire {
    #[serde(rename = "v", default)]
    version: String,
    #[serde(rename = "rv", default)]
    revision: i64,
    #[serde(default)]
    start: String,
}

#[derive(Debug, PartialEq, Eq)]
pub struct Token {
    /// `None`: the newest state.
    pub revision: Option<i64>,
    /// The last key of the page before.
    pub start_after: String,
}

pub fn encode(last_key: &str, keys: &str, revision: Option<i64>) -> String {
    // COMPAT: upstream's prefix has no slash at its end, so its keys start with one.
    let start = format!("/{}\0", last_key.strip_prefix(keys).unwrap_or(last_key));
    let wire = Wire {
        version: VERSION.to_owned(),
        revision: revision.unwrap_or(INCONSISTENT),
        start,
    };
    let json = serde_json::to_vec(&wire).unwrap_or_default();
    URL_SAFE_NO_PAD.encode(json)
}

pub fn decode(token: &str, keys: &str) -> Result<Token> {
    let invalid = |why: &str| Error::InvalidContinue(format!("continue key is not valid: {why}"));
    let json = LENIENT.decode(token).map_err(|error| match error {
        DecodeError::InvalidByte(at, _) | DecodeError::InvalidLastSymbol(at, _) => {
            invalid(&format!("illegal base64 data at input byte {at}"))
        }
        // Padding is a character like any other that does not belong here.
        DecodeError::InvalidPadding => {
            let at = token.find('=').unwrap_or(0);
            invalid(&format!("illegal base64 data at input byte {at}"))
        }
        // Go points at the four characters that are not complete.
        DecodeError::InvalidLength(_) => {
            let at = token.len() / 4 * 4;
            invalid(&format!("illegal base64 data at input byte {at}"))
        }
    })?;
    let wire: Wire = serde_json::from_slice(&json).map_err(|error| match json.first() {
        Some(byte) if !b"{[\"tfn-0123456789 \t\r\n".contains(byte) => {
            let char = char::from(*byte);
            let shown = if char.is_ascii_graphic() {
                char.to_string()
            } else {
                format!("\\u{:04x}", u32::from(char))
            };
            invalid(&format!(
                "invalid character '{shown}' looking for beginning of value"
            ))
        }
        _ => invalid(&error.to_string()),
    })?;
    if wire.version != VERSION {
        let version = wire.version;
        return Err(invalid(&format!(
            "server does not recognize this encoded version {version}"
        )));
    }
    if wire.revision == 0 || wire.revision < INCONSISTENT {
        return Err(invalid(
            "incorrect encoded start resourceVersion (version meta.k8s.io/v1)",
        ));
    }
    let start = wire.start.strip_suffix('\0').unwrap_or(&wire.start);
    if start.is_empty() {
        return Err(invalid("encoded start key empty (version meta.k8s.io/v1)"));
    }
    // A key that steps out of the listed part was not made here.
    let inside = start.strip_prefix('/').unwrap_or(start);
    if inside
        .split('/')
        .any(|part| part.is_empty() || part == "." || part == "..")
    {
        return Err(invalid(start));
    }
    let revision = (wire.revision != INCONSISTENT).then_some(wire.revision);
    Ok(Token {
        revision,
        start_after: format!("{keys}{inside}"),
    })
}

/// What is wrong with a token, whatever it continues.
pub fn check(token: &str) -> Result<()> {
    decode(token, "/").map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_come_back() {
        let token = encode("/registry/pods/ns/a", "/registry/pods/", Some(7));
        assert_eq!(
            String::from_utf8(URL_SAFE_NO_PAD.decode(&token).unwrap()).unwrap(),
            r#"{"v":"meta.k8s.io/v1","rv":7,"start":"/ns/a\u0000"}"#
        );
        let expected = Token {
            revision: Some(7),
            start_after: "/registry/pods/ns/a".to_owned(),
        };
        assert_eq!(decode(&token, "/registry/pods/").unwrap(), expected);
        let token = encode("/registry/pods/ns/a", "/registry/pods/ns/", None);
        let expected = Token {
            revision: None,
            start_after: "/registry/pods/ns/a".to_owned(),
        };
        assert_eq!(decode(&token, "/registry/pods/ns/").unwrap(), expected);
    }

    #[test]
    fn bad_tokens_are_refused() {
        let check = |json: &str, expected: &str| {
            let error = decode(&URL_SAFE_NO_PAD.encode(json), "/p/")
                .unwrap_err()
                .to_string();
            assert!(
                error.starts_with("continue key is not valid: ") && error.contains(expected),
                "{error}"
            );
        };
        check("", "EOF");
        check("[]", "");
        check("{}", "encoded version ");
        check(r#"{"v":"v2","rv":1,"start":"a\u0000"}"#, "encoded version v2");
        check(
            r#"{"v":"meta.k8s.io/v1","start":"a\u0000"}"#,
            "incorrect encoded start resourceVersion",
        );
        check(
            r#"{"v":"meta.k8s.io/v1","rv":-2,"start":"a\u0000"}"#,
            "incorrect encoded start",
        );
        check(
            r#"{"v":"meta.k8s.io/v1","rv":1,"start":""}"#,
            "encoded start key empty",
        );
        check(r#"{"v":"meta.k8s.io/v1","rv":1,"start":"../x\u0000"}"#, "../x");
        check(r#"{"v":"meta.k8s.io/v1","rv":1,"start":"//x\u0000"}"#, "//x");
        assert!(decode("%%%", "/p/").is_err());
        // Tokens of before, and of clients that make their own, have no slash.
        let plain = URL_SAFE_NO_PAD.encode(r#"{"v":"meta.k8s.io/v1","rv":1,"start":"x\u0000"}"#);
        assert_eq!(decode(&plain, "/p/").unwrap().start_after, "/p/x");
    }
}
