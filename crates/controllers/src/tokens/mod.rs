//! Controllers of tokens that Secrets hold: those of service accounts, and those by which new nodes join.

pub(crate) mod bootstrap;
pub(crate) mod bootstrap_signer;
pub(crate) mod cluster_info;
pub(crate) mod legacy_cleaner;
pub(crate) mod service_account;

use std::sync::Arc;

use k8s_openapi::api::core::v1::Secret;

use crate::csr::SignError;

/// Signs the claims of a service-account token.
pub type TokenSigner = Arc<dyn Fn(&serde_json::Value) -> Result<String, SignError> + Send + Sync>;

const ACCOUNT_TOKEN: &str = "kubernetes.io/service-account-token";
const ACCOUNT_NAME: &str = "kubernetes.io/service-account.name";
const ACCOUNT_UID: &str = "kubernetes.io/service-account.uid";

fn annotation<'a>(secret: &'a Secret, key: &str) -> &'a str {
    let annotations = secret.metadata.annotations.as_ref();
    annotations
        .and_then(|all| all.get(key))
        .map_or("", String::as_str)
}

fn data<'a>(secret: &'a Secret, key: &str) -> &'a [u8] {
    let data = secret.data.as_ref().and_then(|data| data.get(key));
    data.map_or(&[], |value| value.0.as_slice())
}

fn text<'a>(secret: &'a Secret, key: &str) -> &'a str {
    std::str::from_utf8(data(secret, key)).unwrap_or_default()
}
