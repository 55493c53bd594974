//! The token cleaner: bootstrap tokens are deleted when they expire. Also what the signer of `cluster-info` must know of
//! such tokens.

use std::sync::Arc;

use jiff::Timestamp;
use k8s_openapi::api::core::v1::Secret;
use kube::Api;
use kube::api::{DeleteParams, Preconditions};
use skiff_client::{Action, ErrorExt, Informer, Key, Reconcile};

use super::text;
use crate::{Context, Error, seconds_until};

pub(super) const TYPE: &str = "bootstrap.kubernetes.io/token";
pub(super) const NAMESPACE: &str = "kube-system";

/// When a token ends; one that cannot be read has ended. `None`: it never does.
fn expiration(secret: &Secret) -> Option<Timestamp> {
    match text(secret, "expiration") {
        "" => None,
        at => Some(at.parse().unwrap_or(Timestamp::MIN)),
    }
}

/// Id and secret of a token that may sign `cluster-info` now.
pub(super) fn signing_token(secret: &Secret, now: Timestamp) -> Option<(&str, &str)> {
    let name = secret
        .metadata
        .name
        .as_deref()?
        .strip_prefix("bootstrap-token-")?;
    let well_formed = |text: &str, length: usize| {
        text.len() == length
            && text
                .bytes()
                .all(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit())
    };
    let (id, key) = (text(secret, "token-id"), text(secret, "token-secret"));
    let good = well_formed(name, 6)
        && id == name
        && !key.is_empty()
        && expiration(secret).is_none_or(|at| at > now)
        && text(secret, "usage-bootstrap-signing") == "true";
    good.then_some((id, key))
}

struct Cleaner {
    context: Context,
    secrets: Informer<Secret>,
}

pub(crate) async fn run_cleaner(context: Context) {
    let reconciler = Arc::new(Cleaner {
        secrets: context.informers.filtered(None, Some(&format!("type={TYPE}"))),
        context: context.clone(),
    });
    context
        .controller("token_cleaner", reconciler)
        .watches(
            |r| &r.secrets,
            |_, change| {
                let key = Key::of(&**change.object());
                (key.namespace == NAMESPACE).then_some(key)
            },
        )
        .run()
        .await;
}

impl Reconcile for Cleaner {
    type Key = Key;
    type Error = Error;

    async fn reconcile(&self, key: Key) -> Result<Action, Error> {
        let Some(secret) = self.secrets.get(&key.namespace, &key.name) else {
            return Ok(Action::Done);
        };
        let now = Timestamp::now();
        let Some(at) = expiration(&secret) else {
            return Ok(Action::Done);
        };
        if at > now {
            return Ok(Action::RequeueAfter(seconds_until(at, now)));
        }
        let api: Api<Secret> = Api::namespaced(self.context.client.clone(), &key.namespace);
        let preconditions = Preconditions {
            uid: secret.metadata.uid.clone(),
            resource_version: None,
        };
        match api
            .delete(&key.name, &DeleteParams::default().preconditions(preconditions))
            .await
        {
            Ok(_) => Ok(Action::Done),
            Err(error) if error.is_conflict() || error.is_not_found() => Ok(Action::Done),
            Err(error) => Err(error.into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    #[test]
    fn tokens_that_sign() {
        let now: Timestamp = "2026-01-01T00:00:00Z".parse().unwrap();
        let check = |name: &str, patch: Value, expected: bool| {
            let mut data = json!({"token-id": "abcdef", "token-secret": "0123456789abcdef", "usage-bootstrap-signing": "true"});
            data.as_object_mut()
                .unwrap()
                .extend(patch.as_object().unwrap().clone());
            let encoded: serde_json::Map<String, Value> = data
                .as_object()
                .unwrap()
                .iter()
                .map(|(key, value)| {
                    let bytes = k8s_openapi::ByteString(value.as_str().unwrap().as_bytes().to_vec());
                    (key.clone(), json!(bytes))
                })
                .collect();
            let secret: Secret =
                serde_json::from_value(json!({"metadata": {"name": name}, "data": encoded})).unwrap();
            assert_eq!(signing_token(&secret, now).is_some(), expected, "{name} {patch}");
        };
        check("bootstrap-token-abcdef", json!({}), true);
        check(
            "bootstrap-token-abcdef",
            json!({"expiration": "2026-02-01T00:00:00Z"}),
            true,
        );
        check(
            "bootstrap-token-abcdef",
            json!({"expiration": "2025-02-01T00:00:00Z"}),
            false,
        );
        check("bootstrap-token-abcdef", json!({"expiration": "never"}), false);
        check(
            "bootstrap-token-abcdef",
            json!({"usage-bootstrap-signing": "false"}),
            false,
        );
        check("bootstrap-token-abcdef", json!({"token-secret": ""}), false);
        check("bootstrap-token-fedcba", json!({}), false);
        check("other", json!({}), false);
    }
}
