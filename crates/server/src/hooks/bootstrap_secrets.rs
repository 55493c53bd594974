//! The Secrets that bootstrap tokens are, as the cache has them.

use std::sync::Arc;

use async_trait::async_trait;
use serde_json::Value;
use skiff_auth::SystemSecrets;
use skiff_registry::{ReadAt, Registry, encode};

pub struct Cached(pub Arc<Registry>);

#[async_trait]
impl SystemSecrets for Cached {
    async fn secret(&self, name: &str) -> Option<Value> {
        let secrets = self.0.resources.get("", "v1", "secrets")?.clone();
        let found = self.0.get_entry(&secrets, "kube-system", name, ReadAt::Any).await;
        encode::decode(&found.ok()??.bytes).ok()
    }

    fn now(&self) -> i64 {
        self.0.now().as_second()
    }
}
