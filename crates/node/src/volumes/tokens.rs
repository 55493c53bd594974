//! Service account tokens for projected volumes: requested for one pod, kept until they grow old, and
//! renewed well before they expire.

use std::collections::HashMap;

use k8s_openapi::api::authentication::v1::{BoundObjectReference, TokenRequest, TokenRequestSpec};
use k8s_openapi::api::core::v1::{Pod, ServiceAccountTokenProjection};
use k8s_openapi::jiff::Timestamp;
use parking_lot::Mutex;

use crate::objects::Objects;
use crate::pods;

/// A token is renewed after this much of its life, and at least daily.
const RENEW_AFTER_PERCENT: i64 = 80;
const MAX_AGE_SECONDS: i64 = 24 * 3600;

#[derive(PartialEq, Eq, Hash, Clone)]
struct TokenKey {
    pod_uid: String,
    audience: String,
    expiration_seconds: i64,
}

struct Held {
    made: Token,
    renew_at: Timestamp,
}

#[derive(Clone)]
pub struct Token {
    pub token: String,
    pub expires: Timestamp,
}

/// Bounded by the pods of the node: a pod's tokens go with it.
#[derive(Default)]
pub struct Tokens {
    /// Not held over a request.
    held: Mutex<HashMap<TokenKey, Held>>,
}

impl Tokens {
    pub async fn get(
        &self,
        objects: &dyn Objects,
        pod: &Pod,
        source: &ServiceAccountTokenProjection,
    ) -> Result<Token, String> {
        let audience = source.audience.clone().unwrap_or_default();
        let expiration_seconds = source.expiration_seconds.unwrap_or(3600);
        let key = TokenKey {
            pod_uid: pods::uid(pod).to_owned(),
            audience: audience.clone(),
            expiration_seconds,
        };
        let now = Timestamp::now();
        if let Some(held) = self.held.lock().get(&key)
            && now < held.renew_at
        {
            return Ok(held.made.clone());
        }
        let request = TokenRequest {
            spec: Some(TokenRequestSpec {
                audiences: (!audience.is_empty()).then(|| vec![audience]),
                expiration_seconds: Some(expiration_seconds),
                bound_object_ref: Some(BoundObjectReference {
                    api_version: Some("v1".to_owned()),
                    kind: Some("Pod".to_owned()),
                    name: pod.metadata.name.clone(),
                    uid: pod.metadata.uid.clone(),
                }),
            }),
            ..Default::default()
        };
        let service_account = pod
            .spec
            .as_ref()
            .and_then(|s| s.service_account_name.as_deref())
            .unwrap_or("default");
        match objects
            .token(pods::namespace(pod), service_account, request)
            .await
        {
            Ok(answer) => {
                let status = answer.status.unwrap_or_default();
                let (Some(token), Some(expires)) = (status.token, status.expiration_timestamp) else {
                    return Err("the token request was answered without a token".to_owned());
                };
                let expires = expires.0;
                let life = expires.as_second() - now.as_second();
                let renew_at = now.as_second() + (life * RENEW_AFTER_PERCENT / 100).min(MAX_AGE_SECONDS);
                let renew_at = Timestamp::from_second(renew_at).unwrap_or(now);
                let made = Token { token, expires };
                let held = Held {
                    made: made.clone(),
                    renew_at,
                };
                self.held.lock().insert(key, held);
                Ok(made)
            }
            // A token that still works beats none.
            Err(error) => match self.held.lock().get(&key) {
                Some(held) if now < held.made.expires => Ok(held.made.clone()),
                _ => Err(format!("failed to fetch token: {error}")),
            },
        }
    }

    pub fn forget(&self, pod_uid: &str) {
        self.held.lock().retain(|key, _| key.pod_uid != pod_uid);
    }
}
