//! Service-account tokens: JWTs signed by this cluster, verified locally, bound to objects that must still exist.

use crate::{AuthError, TokenNote, UserInfo, account_key};
use async_trait::async_trait;
use jsonwebtoken::errors::ErrorKind;
use jsonwebtoken::{Algorithm, DecodingKey, EncodingKey, Header, Validation, decode, encode};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use std::sync::Arc;

/// What the verifier must ask the cluster.
#[async_trait]
pub trait Lookup: Send + Sync {
    /// The uid of a live object, `None` if there is none. `resource` is `serviceaccounts`, `pods`, `secrets` or
    /// `nodes` of the core group.
    async fn uid(&self, resource: &str, namespace: &str, name: &str) -> Option<String>;
}

/// The audiences of a token. Only for one that was verified: its signature is not looked at.
pub fn audiences_of(token: &str) -> Vec<String> {
    use base64::Engine as _;
    #[derive(Deserialize)]
    struct Audiences {
        aud: Vec<String>,
    }
    let claims = token.split('.').nth(1).unwrap_or("");
    let claims = base64::engine::general_purpose::URL_SAFE_NO_PAD.decode(claims);
    let found = claims
        .ok()
        .and_then(|claims| serde_json::from_slice::<Audiences>(&claims).ok());
    found.map(|found| found.aud).unwrap_or_default()
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Claims {
    aud: Vec<String>,
    exp: i64,
    iat: i64,
    nbf: i64,
    iss: String,
    sub: String,
    jti: String,
    #[serde(rename = "kubernetes.io")]
    kubernetes: Bound,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Bound {
    namespace: String,
    serviceaccount: BoundObject,
    #[serde(skip_serializing_if = "Option::is_none")]
    pod: Option<BoundObject>,
    #[serde(skip_serializing_if = "Option::is_none")]
    secret: Option<BoundObject>,
    #[serde(skip_serializing_if = "Option::is_none")]
    node: Option<BoundObject>,
    /// Its client should have a new one from this second on. Tokens that upstream made last longer than they say.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    warnafter: Option<i64>,
}

/// Name and uid of an object that a token is bound to.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct BoundObject {
    pub name: String,
    pub uid: String,
}

/// What a token shall say.
#[derive(Debug, Clone)]
pub struct TokenRequest {
    pub namespace: String,
    pub service_account: BoundObject,
    pub pod: Option<BoundObject>,
    pub secret: Option<BoundObject>,
    pub node: Option<BoundObject>,
    /// Empty means the API server's own audience.
    pub audiences: Vec<String>,
    pub issued_at: i64,
    pub expires_at: i64,
    /// A unique id.
    pub id: String,
}

/// A signed token.
#[derive(Debug, Clone)]
pub struct TokenSpec {
    pub token: String,
    pub audiences: Vec<String>,
}

pub struct TokenIssuer {
    key: EncodingKey,
    algorithm: Algorithm,
    key_id: String,
    issuer: String,
    audiences: Vec<String>,
    jwks: Value,
}

impl TokenIssuer {
    /// `private_key` and `public_key` are PEM, PKCS#8 and SPKI, of one pair, P-256 or RSA.
    pub fn new(
        private_key: &str,
        public_key: &str,
        issuer: String,
        audiences: Vec<String>,
    ) -> Result<Self, AuthError> {
        let (key, algorithm) = account_key::encoding_key(private_key)?;
        let (key_id, web_key) = account_key::web_key(public_key)?;
        let jwks = json!({"keys": [web_key]});
        Ok(Self {
            key,
            algorithm,
            key_id,
            issuer,
            audiences,
            jwks,
        })
    }

    /// The public keys as `/openid/v1/jwks` serves them.
    pub fn jwks(&self) -> &Value {
        &self.jwks
    }

    /// The algorithm that tokens are signed by, as discovery names it.
    pub fn algorithm(&self) -> &'static str {
        match self.algorithm {
            Algorithm::RS256 => "RS256",
            _ => "ES256",
        }
    }

    pub fn issuer(&self) -> &str {
        &self.issuer
    }

    pub fn issue(&self, request: TokenRequest) -> Result<TokenSpec, AuthError> {
        let audiences = if request.audiences.is_empty() {
            self.audiences.clone()
        } else {
            request.audiences
        };
        let claims = Claims {
            aud: audiences.clone(),
            exp: request.expires_at,
            iat: request.issued_at,
            nbf: request.issued_at,
            iss: self.issuer.clone(),
            sub: format!(
                "system:serviceaccount:{}:{}",
                request.namespace, request.service_account.name
            ),
            jti: request.id,
            kubernetes: Bound {
                namespace: request.namespace,
                serviceaccount: request.service_account,
                pod: request.pod,
                secret: request.secret,
                node: request.node,
                warnafter: None,
            },
        };
        let token = self.sign(&claims)?;
        Ok(TokenSpec { token, audiences })
    }

    /// A token that says what the caller wants it to.
    pub fn sign(&self, claims: &impl Serialize) -> Result<String, AuthError> {
        let mut header = Header::new(self.algorithm);
        header.typ = None;
        header.kid = Some(self.key_id.clone());
        encode(&header, claims, &self.key).map_err(|e| AuthError::Token(e.to_string()))
    }
}

/// Verifies tokens of this cluster.
pub struct TokenVerifier {
    key: DecodingKey,
    algorithm: Algorithm,
    issuer: String,
    audiences: Vec<String>,
    lookup: Arc<dyn Lookup>,
}

impl TokenVerifier {
    pub fn new(
        public_key: &str,
        issuer: String,
        audiences: Vec<String>,
        lookup: Arc<dyn Lookup>,
    ) -> Result<Self, AuthError> {
        let (key, algorithm) = account_key::decoding_key(public_key)?;
        Ok(Self {
            key,
            algorithm,
            issuer,
            audiences,
            lookup,
        })
    }

    /// Whether a token says that it was issued here, whoever signed it.
    fn claims_issuer(&self, token: &str) -> bool {
        use base64::Engine as _;
        let payload = token.split('.').nth(1).unwrap_or_default();
        base64::engine::general_purpose::URL_SAFE_NO_PAD
            .decode(payload)
            .ok()
            .and_then(|bytes| serde_json::from_slice::<Value>(&bytes).ok())
            .is_some_and(|claims| claims["iss"] == self.issuer.as_str())
    }

    /// `audiences` are those the asker accepts; `None` means the API server's own.
    pub async fn verify(
        &self,
        token: &str,
        audiences: Option<&[String]>,
        notes: &mut Vec<TokenNote>,
    ) -> Result<UserInfo, AuthError> {
        let mut validation = Validation::new(self.algorithm);
        validation.set_issuer(&[&self.issuer]);
        validation.set_required_spec_claims(&["exp", "iss", "sub", "aud"]);
        validation.validate_nbf = true;
        // The audiences are checked below: who asks hears which ones there were.
        validation.validate_aud = false;
        let claims = decode::<Claims>(token, &self.key, &validation)
            .map_err(|error| match error.kind() {
                ErrorKind::InvalidToken
                | ErrorKind::InvalidIssuer
                | ErrorKind::Base64(_)
                | ErrorKind::Json(_) => AuthError::NotOurs,
                // What others have issued is for others to judge.
                _ if !self.claims_issuer(token) => AuthError::NotOurs,
                ErrorKind::InvalidSignature => AuthError::Signature,
                _ => AuthError::Token(error.to_string()),
            })?
            .claims;
        let target = audiences.unwrap_or(&self.audiences);
        if !claims.aud.iter().any(|audience| target.contains(audience)) {
            return Err(AuthError::Audiences {
                token: claims.aud,
                target: target.to_vec(),
            });
        }
        let bound = &claims.kubernetes;
        let namespace = bound.namespace.as_str();
        self.must_live("serviceaccounts", namespace, &bound.serviceaccount)
            .await?;
        for (resource, object) in [("pods", &bound.pod), ("secrets", &bound.secret)] {
            if let Some(object) = object {
                self.must_live(resource, namespace, object).await?;
            }
        }
        // The node of a pod's token only tells where the pod runs.
        if let (None, Some(node)) = (&bound.pod, &bound.node) {
            self.must_live("nodes", "", node).await?;
        }
        if let Some(after) = bound.warnafter.filter(|after| *after != 0) {
            // The library's clock, by which the token has not expired.
            let now = i64::try_from(jsonwebtoken::get_current_timestamp()).unwrap_or(i64::MAX);
            notes.push(match now > after {
                true => TokenNote::Stale {
                    subject: claims.sub.clone(),
                    seconds: now - after,
                },
                false => TokenNote::Valid,
            });
        }
        let mut user = UserInfo::service_account(namespace, &bound.serviceaccount.name);
        user.uid.clone_from(&bound.serviceaccount.uid);
        let mut note = |key: &str, value: &str| {
            user.extra.insert(
                format!("authentication.kubernetes.io/{key}"),
                vec![value.to_owned()],
            );
        };
        note("credential-id", &format!("JTI={}", claims.jti));
        if let Some(pod) = &bound.pod {
            note("pod-name", &pod.name);
            note("pod-uid", &pod.uid);
        }
        if let Some(node) = &bound.node {
            note("node-name", &node.name);
            if !node.uid.is_empty() {
                note("node-uid", &node.uid);
            }
        }
        Ok(user)
    }

    async fn must_live(
        &self,
        resource: &str,
        namespace: &str,
        object: &BoundObject,
    ) -> Result<(), AuthError> {
        match self.lookup.uid(resource, namespace, &object.name).await {
            Some(uid) if uid == object.uid => Ok(()),
            Some(_) => Err(AuthError::Token(format!(
                "{resource} {namespace}/{} is another object now",
                object.name
            ))),
            None => Err(AuthError::Token(format!(
                "{resource} {namespace}/{} does not exist",
                object.name
            ))),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::{SystemTime, UNIX_EPOCH};

    struct Objects(Vec<(&'static str, &'static str)>);

    #[async_trait]
    impl Lookup for Objects {
        async fn uid(&self, resource: &str, _namespace: &str, _name: &str) -> Option<String> {
            self.0
                .iter()
                .find(|(r, _)| *r == resource)
                .map(|(_, uid)| (*uid).to_owned())
        }
    }

    fn now() -> i64 {
        i64::try_from(SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs()).unwrap()
    }

    fn request(expires_at: i64, audiences: &[&str]) -> TokenRequest {
        TokenRequest {
            namespace: "default".into(),
            service_account: BoundObject {
                name: "web".into(),
                uid: "u1".into(),
            },
            pod: Some(BoundObject {
                name: "p".into(),
                uid: "u2".into(),
            }),
            secret: None,
            node: None,
            audiences: audiences.iter().map(|a| (*a).to_owned()).collect(),
            issued_at: now(),
            expires_at,
            id: "id".into(),
        }
    }

    #[tokio::test]
    async fn tokens_hold_while_their_objects_live() {
        let pair = rcgen::KeyPair::generate().unwrap();
        let (private, public) = (pair.serialize_pem(), pair.public_key_pem());
        let audiences = vec!["api".to_owned()];
        let issuer = TokenIssuer::new(&private, &public, "iss".into(), audiences.clone()).unwrap();
        let verifier = |objects| {
            TokenVerifier::new(
                &public,
                "iss".into(),
                audiences.clone(),
                Arc::new(Objects(objects)),
            )
            .unwrap()
        };
        let alive = || vec![("serviceaccounts", "u1"), ("pods", "u2")];
        let token = issuer.issue(request(now() + 60, &[])).unwrap().token;
        let user = verifier(alive())
            .verify(&token, None, &mut Vec::new())
            .await
            .unwrap();
        assert_eq!(user.name, "system:serviceaccount:default:web");
        assert_eq!(user.extra["authentication.kubernetes.io/pod-name"], ["p"]);

        let refused = |objects, token: String| async move {
            verifier(objects)
                .verify(&token, None, &mut Vec::new())
                .await
                .is_err()
        };
        assert!(
            refused(vec![("serviceaccounts", "u1")], token.clone()).await,
            "pod gone"
        );
        assert!(
            refused(vec![("serviceaccounts", "other"), ("pods", "u2")], token.clone()).await,
            "another account"
        );
        assert!(
            refused(alive(), issuer.issue(request(now() - 3600, &[])).unwrap().token).await,
            "expired"
        );
        assert!(
            refused(
                alive(),
                issuer.issue(request(now() + 60, &["other"])).unwrap().token
            )
            .await,
            "audience"
        );
        let mut of_node = request(now() + 60, &[]);
        (of_node.pod, of_node.node) = (
            None,
            Some(BoundObject {
                name: "n".into(),
                uid: "u3".into(),
            }),
        );
        let of_node = issuer.issue(of_node).unwrap().token;
        assert!(refused(alive(), of_node.clone()).await, "node gone");
        let with_node = || vec![("serviceaccounts", "u1"), ("nodes", "u3")];
        assert!(!refused(with_node(), of_node).await, "node there");
        let mut forged = token;
        forged.replace_range(forged.len() - 4.., "AAAA");
        assert!(refused(alive(), forged).await, "signature");
    }

    #[tokio::test]
    async fn late_use_of_an_extended_token_is_noted() {
        let pair = rcgen::KeyPair::generate().unwrap();
        let (private, public) = (pair.serialize_pem(), pair.public_key_pem());
        let issuer = TokenIssuer::new(&private, &public, "iss".into(), vec!["api".into()]).unwrap();
        let lookup = Arc::new(Objects(vec![("serviceaccounts", "u1")]));
        let verifier = TokenVerifier::new(&public, "iss".into(), vec!["api".into()], lookup).unwrap();
        let noted = async |warnafter: Value| {
            let claims = json!({"aud": ["api"], "exp": now() + 3600, "iat": now(), "nbf": now(), "iss": "iss",
                "sub": "system:serviceaccount:default:web", "jti": "id", "kubernetes.io": {"namespace": "default",
                "serviceaccount": {"name": "web", "uid": "u1"}, "warnafter": warnafter}});
            let mut notes = Vec::new();
            let token = issuer.sign(&claims).unwrap();
            verifier.verify(&token, None, &mut notes).await.unwrap();
            notes
        };
        assert_eq!(noted(Value::Null).await, []);
        assert_eq!(noted(json!(now() + 60)).await, [TokenNote::Valid]);
        let late = noted(json!(now() - 100)).await;
        let [TokenNote::Stale { subject, seconds }] = late.as_slice() else {
            panic!("{late:?}")
        };
        assert_eq!(subject, "system:serviceaccount:default:web");
        assert!((100..110).contains(seconds), "{seconds}");
    }
}
