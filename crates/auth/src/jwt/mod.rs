//! Tokens of identity providers: JWTs whose issuer is configured, verified by the keys that it publishes, mapped to a
//! user by its claims. Claims that are kept elsewhere (distributed claims) are not fetched.

mod claims;
mod config;
mod keys;

pub use config::{Anonymous, AuthenticationConfiguration, OidcFlags};

use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use arc_swap::ArcSwap;
use async_trait::async_trait;
use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use serde_json::{Map, Value};

use crate::{AuthError, Authenticated, TokenAuthenticator, UserInfo};
use claims::Mapper;
use keys::Keys;

/// A token may be used so many seconds before it says.
const LEEWAY: f64 = 60.0;
/// No identity provider makes longer ones.
const LONGEST: usize = 128 * 1024;

/// One issuer.
pub struct JwtAuthenticator {
    issuer: String,
    audiences: Vec<String>,
    algorithms: Vec<String>,
    mapper: Mapper,
    keys: Arc<Keys>,
}

/// All issuers, which may change while the server runs.
#[derive(Default)]
pub struct JwtAuthenticators(ArcSwap<Vec<JwtAuthenticator>>);

impl JwtAuthenticators {
    pub fn new(list: Vec<JwtAuthenticator>) -> JwtAuthenticators {
        JwtAuthenticators(ArcSwap::from_pointee(list))
    }

    pub fn replace(&self, list: Vec<JwtAuthenticator>) {
        self.0.store(Arc::new(list));
    }
}

#[async_trait]
impl TokenAuthenticator for Arc<JwtAuthenticators> {
    async fn authenticate(
        &self,
        token: &str,
        _audiences: &[String],
    ) -> Result<Option<Authenticated>, AuthError> {
        let Some(issuer) = untrusted_issuer(token) else {
            return Ok(None);
        };
        let list = self.0.load_full();
        let Some(of) = list.iter().find(|of| of.issuer == issuer) else {
            return Ok(None);
        };
        let user = of.user(token).await;
        user.map(|user| Some(Authenticated::anywhere(user)))
            .map_err(|why| AuthError::Told(format!("oidc: {why}")))
    }
}

/// What a token says of its issuer, before anything is verified.
fn untrusted_issuer(token: &str) -> Option<String> {
    if token.len() > LONGEST {
        return None;
    }
    let mut parts = token.split('.');
    let (_, payload, _) = (parts.next()?, parts.next()?, parts.next()?);
    if parts.next().is_some() {
        return None;
    }
    #[derive(serde::Deserialize)]
    struct Issuer {
        iss: String,
    }
    let issuer: Issuer = serde_json::from_slice(&URL_SAFE_NO_PAD.decode(payload).ok()?).ok()?;
    // COMPAT: one provider leaves out the scheme now and then.
    Some(match issuer.iss.as_str() {
        "accounts.google.com" => "https://accounts.google.com".to_owned(),
        _ => issuer.iss,
    })
}

fn quoted(list: &[String]) -> String {
    let list: Vec<String> = list.iter().map(|text| skiff_meta::field::quote(text)).collect();
    format!("[{}]", list.join(" "))
}

impl JwtAuthenticator {
    async fn user(&self, token: &str) -> Result<UserInfo, String> {
        if !self.keys.ready() {
            return Err("authenticator not initialized".to_owned());
        }
        let claims = self
            .verify(token)
            .await
            .map_err(|why| format!("verify token: {why}"))?;
        self.mapper.user(&claims)
    }

    async fn verify(&self, token: &str) -> Result<Map<String, Value>, String> {
        let header = token.split('.').next().unwrap_or("");
        let header: Option<Value> = URL_SAFE_NO_PAD
            .decode(header)
            .ok()
            .and_then(|bytes| serde_json::from_slice(&bytes).ok());
        let Some(header) = header.filter(Value::is_object) else {
            return Err("oidc: malformed jwt: illegal base64 data at input byte 0".to_owned());
        };
        let algorithm = header["alg"].as_str().unwrap_or("");
        if !self.algorithms.iter().any(|known| known == algorithm) {
            return Err(format!(
                "oidc: id token signed with unsupported algorithm, expected {} got {}",
                quoted(&self.algorithms),
                skiff_meta::field::quote(algorithm)
            ));
        }
        // What must be understood and is not makes the token void.
        if !header["crit"].is_null() {
            return Err("failed to verify signature: failed to verify id token signature".to_owned());
        }
        let claims = self
            .keys
            .verify(token, algorithm, header["kid"].as_str().unwrap_or(""))
            .await
            .map_err(|why| format!("failed to verify signature: {why}"))?;
        self.check(&claims, now())?;
        Ok(claims)
    }

    fn check(&self, claims: &Map<String, Value>, now: f64) -> Result<(), String> {
        for (name, kind) in [("sub", "string"), ("aud", "[]string")] {
            let found = match claims.get(name) {
                None | Some(Value::Null | Value::String(_)) => continue,
                Some(Value::Array(_)) if name == "aud" => continue,
                Some(Value::Array(_)) => "array",
                Some(Value::Object(_)) => "object",
                Some(Value::Bool(_)) => "bool",
                Some(Value::Number(_)) => "number",
            };
            return Err(format!(
                "oidc: failed to unmarshal claims: json: cannot unmarshal {found} into Go struct field idToken.{name} of type {kind}"
            ));
        }
        let found: Vec<String> = match claims.get("aud") {
            Some(Value::String(one)) => vec![one.clone()],
            Some(Value::Array(several)) => {
                let several = several.iter().filter_map(Value::as_str);
                several.map(str::to_owned).collect()
            }
            _ => Vec::new(),
        };
        let shown = quoted(&found);
        if !found.iter().any(|audience| self.audiences.contains(audience)) {
            return Err(match self.audiences.as_slice() {
                [one] => format!(
                    "oidc: expected audience {} got {shown}",
                    skiff_meta::field::quote(one)
                ),
                several => {
                    let mut several = several.to_vec();
                    several.sort();
                    format!("oidc: expected audience in {} got {shown}", quoted(&several))
                }
            });
        }
        let time = |name: &str| claims.get(name).and_then(Value::as_f64);
        match time("exp") {
            Some(end) if end >= now => {}
            end => {
                return Err(format!(
                    "oidc: token is expired (Token Expiry: {})",
                    shown_time(end)
                ));
            }
        }
        if time("nbf").is_some_and(|start| now + LEEWAY < start) {
            return Err(format!(
                "oidc: current time {} before the nbf (not before) time: {}",
                shown_time(Some(now)),
                shown_time(time("nbf"))
            ));
        }
        Ok(())
    }
}

fn now() -> f64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    since.map(|since| since.as_secs_f64()).unwrap_or_default()
}

/// As Go prints a time.
fn shown_time(seconds: Option<f64>) -> String {
    let at = seconds.and_then(|seconds| jiff::Timestamp::from_second(seconds as i64).ok());
    match at {
        Some(at) => at.strftime("%Y-%m-%d %H:%M:%S +0000 UTC").to_string(),
        None => "0001-01-01 00:00:00 +0000 UTC".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn only_three_parts_have_an_issuer() {
        let token = |payload: Value| format!("e30.{}.x", URL_SAFE_NO_PAD.encode(payload.to_string()));
        let good = token(json!({"iss": "https://a"}));
        assert_eq!(untrusted_issuer(&good).as_deref(), Some("https://a"));
        let google = token(json!({"iss": "accounts.google.com"}));
        assert_eq!(
            untrusted_issuer(&google).as_deref(),
            Some("https://accounts.google.com")
        );
        let long = token(json!({"iss": "https://a", "x": "y".repeat(LONGEST)}));
        for other in [
            "",
            "a.b",
            "a.b.c",
            &format!("{good}.d"),
            &token(json!({"iss": 1})),
            &token(json!([])),
            &long,
        ] {
            assert_eq!(untrusted_issuer(other), None);
        }
        // A document that nests for ever ends in an error, not in a full stack.
        let deep = format!("e30.{}.x", URL_SAFE_NO_PAD.encode("[".repeat(50_000)));
        assert_eq!(untrusted_issuer(&deep), None);
    }

    #[test]
    fn audience_and_time_are_checked() {
        let of = |audiences: &[&str]| JwtAuthenticator {
            issuer: "https://a".to_owned(),
            audiences: audiences.iter().map(|name| (*name).to_owned()).collect(),
            algorithms: vec!["RS256".to_owned()],
            mapper: Mapper::default(),
            keys: Keys::unready(),
        };
        let check = |audiences: &[&str], claims: Value, expected: Result<(), &str>| {
            let claims = claims.as_object().cloned().unwrap_or_default();
            let found = of(audiences).check(&claims, 1_577_836_800.0);
            assert_eq!(found, expected.map_err(str::to_owned), "{claims:?}");
        };
        check(&["a"], json!({"aud": "a", "exp": 1_577_836_800}), Ok(()));
        check(
            &["a", "b"],
            json!({"aud": ["c", "b"], "exp": 1_577_836_800.5}),
            Ok(()),
        );
        check(
            &["a"],
            json!({"sub": 1}),
            Err(
                "oidc: failed to unmarshal claims: json: cannot unmarshal number into Go struct field idToken.sub of type string",
            ),
        );
        check(
            &["a"],
            json!({"exp": 2e9}),
            Err("oidc: expected audience \"a\" got []"),
        );
        check(
            &["b", "a"],
            json!({"aud": "c", "exp": 2e9}),
            Err("oidc: expected audience in [\"a\" \"b\"] got [\"c\"]"),
        );
        check(
            &["a"],
            json!({"aud": "a", "exp": 1_577_836_799}),
            Err("oidc: token is expired (Token Expiry: 2019-12-31 23:59:59 +0000 UTC)"),
        );
        check(
            &["a"],
            json!({"aud": "a"}),
            Err("oidc: token is expired (Token Expiry: 0001-01-01 00:00:00 +0000 UTC)"),
        );
        check(
            &["a"],
            json!({"aud": "a", "exp": 2e9, "nbf": 1_577_836_860}),
            Ok(()),
        );
        check(
            &["a"],
            json!({"aud": "a", "exp": 2e9, "nbf": 1_577_836_861}),
            Err(
                "oidc: current time 2020-01-01 00:00:00 +0000 UTC before the nbf (not before) time: 2020-01-01 00:01:01 +0000 UTC",
            ),
        );
    }
}
