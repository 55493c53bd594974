//! Tokens that Secrets of type `kubernetes.io/service-account-token` hold: they have no end and no audience, and are
//! good for as long as the Secret with exactly this token and its service account are there.

use std::sync::Arc;

use async_trait::async_trait;
use base64::Engine as _;
use base64::engine::general_purpose::{STANDARD, URL_SAFE_NO_PAD};
use jsonwebtoken::errors::ErrorKind;
use jsonwebtoken::{Algorithm, DecodingKey, Validation, decode};
use serde::Deserialize;
use serde_json::Value;
use sha2::{Digest, Sha256};

use crate::{AuthError, Lookup, TokenNote, UserInfo, account_key};

const ISSUER: &str = "kubernetes/serviceaccount";
/// Set by the cleaner of legacy tokens; whoever trusts the token again removes it.
const INVALID_SINCE: &str = "kubernetes.io/legacy-token-invalid-since";
const LAST_USED: &str = "kubernetes.io/legacy-token-last-used";

/// The Secrets of such tokens.
#[async_trait]
pub trait LegacySecrets: Send + Sync {
    /// The object as it is now; `None` if there is none.
    async fn secret(&self, namespace: &str, name: &str) -> Option<Value>;

    /// Sets a label of a Secret.
    async fn label(&self, namespace: &str, name: &str, uid: &str, key: &str, value: &str);

    /// Whether the service account lists the Secret among its own: whoever made the account made the Secret.
    async fn lists(&self, namespace: &str, account: &str, secret: &str) -> bool;

    /// Unix seconds.
    fn now(&self) -> i64;
}

#[derive(Debug, Deserialize)]
struct Claims {
    sub: String,
    #[serde(rename = "kubernetes.io/serviceaccount/namespace")]
    namespace: String,
    #[serde(rename = "kubernetes.io/serviceaccount/secret.name")]
    secret: String,
    #[serde(rename = "kubernetes.io/serviceaccount/service-account.name")]
    account: String,
    #[serde(rename = "kubernetes.io/serviceaccount/service-account.uid")]
    account_uid: String,
}

pub struct LegacyTokens {
    key: DecodingKey,
    algorithm: Algorithm,
    secrets: Arc<dyn LegacySecrets>,
    lookup: Arc<dyn Lookup>,
}

impl LegacyTokens {
    pub fn new(
        public_key: &str,
        secrets: Arc<dyn LegacySecrets>,
        lookup: Arc<dyn Lookup>,
    ) -> Result<Self, AuthError> {
        let (key, algorithm) = account_key::decoding_key(public_key)?;
        Ok(LegacyTokens {
            key,
            algorithm,
            secrets,
            lookup,
        })
    }

    /// Whose token it is; none: it is no legacy token. It is for this server and nobody else.
    pub async fn user(&self, token: &str, notes: &mut Vec<TokenNote>) -> Result<Option<UserInfo>, AuthError> {
        let Some(claims) = self.claims(token)? else {
            return Ok(None);
        };
        notes.push(TokenNote::Legacy {
            subject: claims.sub.clone(),
        });
        self.check(token, &claims, notes).await?;
        let mut user = UserInfo::service_account(&claims.namespace, &claims.account);
        user.uid = claims.account_uid;
        Ok(Some(user))
    }

    fn claims(&self, token: &str) -> Result<Option<Claims>, AuthError> {
        let issuer = token
            .split('.')
            .nth(1)
            .and_then(|part| URL_SAFE_NO_PAD.decode(part).ok());
        let issuer = issuer.and_then(|bytes| serde_json::from_slice::<Value>(&bytes).ok());
        if issuer.is_none_or(|claims| claims["iss"] != ISSUER) {
            return Ok(None);
        }
        let mut validation = Validation::new(self.algorithm);
        validation.set_issuer(&[ISSUER]);
        validation.set_required_spec_claims(&["iss", "sub"]);
        validation.validate_exp = false;
        validation.validate_aud = false;
        let decoded = decode::<Claims>(token, &self.key, &validation);
        decoded
            .map(|decoded| Some(decoded.claims))
            .map_err(|error| match error.kind() {
                ErrorKind::InvalidSignature => AuthError::Signature,
                _ => AuthError::Token(error.to_string()),
            })
    }

    async fn check(&self, token: &str, claims: &Claims, notes: &mut Vec<TokenNote>) -> Result<(), AuthError> {
        let told = |text: &str| AuthError::Told(text.to_owned());
        let (namespace, name) = (claims.namespace.as_str(), claims.secret.as_str());
        if claims.sub != format!("system:serviceaccount:{namespace}:{}", claims.account) {
            return Err(told("sub claim is invalid"));
        }
        let secret = self.secrets.secret(namespace, name).await;
        let secret = secret
            .filter(|secret| secret["metadata"]["deletionTimestamp"].is_null())
            .ok_or_else(|| told("Token has been invalidated"))?;
        let kept = STANDARD.decode(secret["data"]["token"].as_str().unwrap_or_default());
        // Digests take the same time to compare wherever they differ.
        if Sha256::digest(kept.unwrap_or_default()) != Sha256::digest(token) {
            return Err(told("Token does not match server's copy"));
        }
        match self
            .lookup
            .uid("serviceaccounts", namespace, &claims.account)
            .await
        {
            Some(uid) if uid == claims.account_uid => {}
            Some(uid) => {
                let asked = &claims.account_uid;
                return Err(AuthError::Told(format!(
                    "ServiceAccount UID ({uid}) does not match claim ({asked})"
                )));
            }
            None => {
                let account = &claims.account;
                return Err(AuthError::Told(format!("serviceaccounts {account:?} not found")));
            }
        }
        self.note_use(namespace, name, &secret).await;
        let invalid = secret["metadata"]["labels"][INVALID_SINCE]
            .as_str()
            .unwrap_or_default();
        if !invalid.is_empty() {
            notes.push(TokenNote::Invalidated {
                namespace: namespace.to_owned(),
                secret: name.to_owned(),
            });
            let account = &claims.account;
            return Err(AuthError::Told(format!(
                "the token in secret {namespace}/{name} for service account {namespace}/{account} has been marked invalid. Use tokens from the TokenRequest API or manually created secret-based tokens, or remove the '{INVALID_SINCE}' label from the secret to temporarily allow use of this token"
            )));
        }
        let secret = name.to_owned();
        notes.push(match self.secrets.lists(namespace, &claims.account, name).await {
            true => TokenNote::AutoGenerated { secret },
            false => TokenNote::Manual { secret },
        });
        Ok(())
    }

    /// Says in the Secret on which day its token was last used, at most once a day.
    async fn note_use(&self, namespace: &str, name: &str, secret: &Value) {
        let (today, tomorrow) = (day(self.secrets.now()), day(self.secrets.now() + 24 * 3600));
        let last = secret["metadata"]["labels"][LAST_USED]
            .as_str()
            .unwrap_or_default();
        if last != today && last != tomorrow {
            let uid = secret["metadata"]["uid"].as_str().unwrap_or_default();
            self.secrets.label(namespace, name, uid, LAST_USED, &today).await;
        }
    }
}

/// The date of a moment, in UTC.
fn day(seconds: i64) -> String {
    let time = jiff::Timestamp::from_second(seconds).unwrap_or_default();
    time.strftime("%Y-%m-%d").to_string()
}

#[cfg(test)]
mod tests {
    use super::*;
    use parking_lot::Mutex;
    use serde_json::json;

    struct Cluster {
        secret: Mutex<Value>,
        labels: Mutex<Vec<(String, String)>>,
        account: &'static str,
    }

    #[async_trait]
    impl LegacySecrets for Cluster {
        async fn secret(&self, _namespace: &str, name: &str) -> Option<Value> {
            (name == "s").then(|| self.secret.lock().clone())
        }

        async fn label(&self, _namespace: &str, _name: &str, _uid: &str, key: &str, value: &str) {
            self.labels.lock().push((key.to_owned(), value.to_owned()));
        }

        async fn lists(&self, _namespace: &str, _account: &str, _secret: &str) -> bool {
            self.secret.lock()["listed"] == true
        }

        fn now(&self) -> i64 {
            1_767_225_600
        }
    }

    #[async_trait]
    impl Lookup for Cluster {
        async fn uid(&self, _resource: &str, _namespace: &str, _name: &str) -> Option<String> {
            Some(self.account.to_owned())
        }
    }

    #[tokio::test]
    async fn a_token_is_as_good_as_its_secret() {
        let pair = rcgen::KeyPair::generate().unwrap();
        let (private, public) = (pair.serialize_pem(), pair.public_key_pem());
        let issuer = crate::TokenIssuer::new(&private, &public, "iss".into(), Vec::new()).unwrap();
        let claims = |secret: &str, sub: &str| {
            json!({"iss": ISSUER, "sub": sub,
                "kubernetes.io/serviceaccount/namespace": "ns",
                "kubernetes.io/serviceaccount/secret.name": secret,
                "kubernetes.io/serviceaccount/service-account.name": "web",
                "kubernetes.io/serviceaccount/service-account.uid": "u1"})
        };
        let subject = "system:serviceaccount:ns:web";
        let token = issuer.sign(&claims("s", subject)).unwrap();
        let check = async |token: &str, secret: Value, account: &'static str| {
            let cluster = Arc::new(Cluster {
                secret: Mutex::new(secret),
                labels: Mutex::default(),
                account,
            });
            let tokens = LegacyTokens::new(&public, cluster.clone(), cluster.clone()).unwrap();
            let mut notes = Vec::new();
            let answer = tokens.user(token, &mut notes).await;
            let labels = cluster.labels.lock().len();
            let notes: Vec<&str> = notes.iter().map(TokenNote::counter).collect();
            (
                answer
                    .map(|found| found.map(|user| user.name))
                    .map_err(|error| error.told()),
                labels,
                notes.join(" ").replace("serviceaccount_", ""),
            )
        };
        let noted = |also: &str| format!("legacy_tokens_total {also}").trim_end().to_owned();
        let secret = |token: &str, labels: Value| json!({"metadata": {"uid": "s1", "labels": labels}, "data": {"token": STANDARD.encode(token)}});
        let good = check(&token, secret(&token, json!({})), "u1").await;
        let manual = noted("legacy_manual_token_uses_total");
        assert_eq!(good, (Ok(Some(subject.to_owned())), 1, manual.clone()));
        let mut listed = secret(&token, json!({}));
        listed["listed"] = json!(true);
        let auto = check(&token, listed, "u1").await;
        assert_eq!(auto.2, noted("legacy_auto_token_uses_total"));
        let used = check(&token, secret(&token, json!({LAST_USED: "2026-01-01"})), "u1").await;
        assert_eq!(used, (Ok(Some(subject.to_owned())), 0, manual));
        let told = |answer: (Result<Option<String>, String>, usize, String)| answer.0.unwrap_err();
        let other = check(&token, secret("other", json!({})), "u1").await;
        assert_eq!(other.2, noted(""), "also a token that is refused is counted");
        assert!(told(other).contains("server's copy"));
        assert!(told(check(&token, secret(&token, json!({})), "u2").await).contains("does not match claim"));
        let invalid = secret(&token, json!({INVALID_SINCE: "2025-01-01"}));
        let invalid = check(&token, invalid, "u1").await;
        assert_eq!(invalid.2, noted("invalid_legacy_auto_token_uses_total"));
        assert!(told(invalid).contains("marked invalid"));
        let gone = issuer.sign(&claims("gone", subject)).unwrap();
        assert!(told(check(&gone, secret(&gone, json!({})), "u1").await).contains("invalidated"));
        let other = issuer
            .sign(&claims("s", "system:serviceaccount:ns:admin"))
            .unwrap();
        assert!(told(check(&other, secret(&other, json!({})), "u1").await).contains("sub claim"));
        let mut forged = token.clone();
        forged.replace_range(forged.len() - 4.., "AAAA");
        assert!(check(&forged, secret(&forged, json!({})), "u1").await.0.is_err());
        let foreign = issuer.sign(&json!({"iss": "other", "sub": "x"})).unwrap();
        let foreign = check(&foreign, secret(&foreign, json!({})), "u1").await;
        assert_eq!(foreign, (Ok(None), 0, String::new()));
    }
}
