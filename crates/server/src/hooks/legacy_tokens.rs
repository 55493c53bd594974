//! The Secrets that hold legacy service-account tokens, for the authenticator of those, and the ConfigMap that says
//! since when their use is recorded.

use std::sync::Arc;

use async_trait::async_trait;
use serde_json::{Value, json};
use skiff_auth::LegacySecrets;
use skiff_meta::Status;
use skiff_registry::{Context, Open, ReadAt, Registry, Write, WriteScope, encode, object};

pub struct TokenSecrets(pub Arc<Registry>);

#[async_trait]
impl LegacySecrets for TokenSecrets {
    async fn secret(&self, namespace: &str, name: &str) -> Option<Value> {
        let secrets = self.0.resources.get("", "v1", "secrets")?.clone();
        // A token is often used the moment it was made: the cache may be a little behind.
        for at in [ReadAt::Any, ReadAt::Latest] {
            if let Ok(Some(entry)) = self.0.get_entry(&secrets, namespace, name, at).await {
                return encode::decode(&entry.bytes).ok();
            }
        }
        None
    }

    async fn label(&self, namespace: &str, name: &str, uid: &str, key: &str, value: &str) {
        let Some(secrets) = self.0.resources.get("", "v1", "secrets").cloned() else {
            return;
        };
        let mut set = |current: Option<&Value>| {
            let current = current.filter(|current| object::uid(current) == uid);
            let Some(current) = current else {
                return Err(Status::not_found(&secrets.group_resource, name));
            };
            let mut secret = current.clone();
            object::put(&mut secret, &["metadata", "labels", key], json!(value));
            Ok(secret)
        };
        let context = Context::of_server();
        let written = self
            .0
            .update(
                &Write {
                    context: &context,
                    resource: &secrets,
                    namespace,
                    gate: &Open,
                },
                name,
                WriteScope::Main,
                false,
                &mut set,
            )
            .await;
        if let Err(status) = written {
            tracing::warn!(%status, namespace, name, "cannot label the token's Secret with the day of its use");
        }
    }

    async fn lists(&self, namespace: &str, account: &str, secret: &str) -> bool {
        let Some(accounts) = self.0.resources.get("", "v1", "serviceaccounts").cloned() else {
            return false;
        };
        let entry = self.0.get_entry(&accounts, namespace, account, ReadAt::Any).await;
        let account: Option<Value> = entry
            .ok()
            .flatten()
            .and_then(|entry| encode::decode(&entry.bytes).ok());
        let listed = account.as_ref().and_then(|account| account["secrets"].as_array());
        listed.is_some_and(|listed| listed.iter().any(|reference| reference["name"] == secret))
    }

    fn now(&self) -> i64 {
        self.0.now().as_second()
    }
}

/// Says since when the use of legacy tokens is recorded, unless that is known.
pub async fn start_tracking(registry: &Registry) -> Result<(), Status> {
    let today = registry.now().strftime("%Y-%m-%d").to_string();
    let map = json!({"kind": "ConfigMap", "apiVersion": "v1", "data": {"since": today}, "metadata": {
        "name": "kube-apiserver-legacy-service-account-token-tracking", "namespace": "kube-system"}});
    registry.ensure(map).await
}
