//! The bootstrap signer: the ConfigMap `cluster-info` carries a detached JWS of its kubeconfig for each bootstrap token
//! that may sign it, so that who knows a token knows that the cluster's CA in there is the right one.

use std::collections::BTreeMap;
use std::sync::Arc;

use aws_lc_rs::hmac;
use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use jiff::Timestamp;
use k8s_openapi::api::core::v1::{ConfigMap, Secret};
use kube::Api;
use kube::api::PostParams;
use serde_json::json;
use skiff_client::{Action, Change, ErrorExt, Informer, Key, Reconcile};

use super::bootstrap::{self, NAMESPACE};
use crate::{Context, Error};

pub(super) const MAP: &str = "cluster-info";
pub(super) const MAP_NAMESPACE: &str = "kube-public";
const SIGNATURE_PREFIX: &str = "jws-kubeconfig-";

/// HS256 over the content, without the content.
fn signature(content: &str, id: &str, secret: &str) -> String {
    let header = URL_SAFE_NO_PAD.encode(json!({"alg": "HS256", "kid": id}).to_string());
    let payload = URL_SAFE_NO_PAD.encode(content);
    let key = hmac::Key::new(hmac::HMAC_SHA256, secret.as_bytes());
    let tag = hmac::sign(&key, format!("{header}.{payload}").as_bytes());
    format!("{header}..{}", URL_SAFE_NO_PAD.encode(tag.as_ref()))
}

/// The data that the map should have; `None` if it has it, or there is nothing to sign.
fn plan(map: &ConfigMap, tokens: &[Arc<Secret>], now: Timestamp) -> Option<BTreeMap<String, String>> {
    let present = map.data.as_ref()?;
    let content = present.get("kubeconfig")?;
    let mut wanted = present.clone();
    wanted.retain(|key, _| !key.starts_with(SIGNATURE_PREFIX));
    for (id, secret) in tokens
        .iter()
        .filter_map(|token| bootstrap::signing_token(token, now))
    {
        let key = format!("{SIGNATURE_PREFIX}{id}");
        wanted
            .entry(key)
            .or_insert_with(|| signature(content, id, secret));
    }
    (wanted != *present).then_some(wanted)
}

struct Signer {
    context: Context,
    maps: Informer<ConfigMap>,
    secrets: Informer<Secret>,
}

pub(crate) async fn run(context: Context) {
    let reconciler = Arc::new(Signer {
        maps: context
            .informers
            .filtered(None, Some(&format!("metadata.name={MAP}"))),
        secrets: context
            .informers
            .filtered(None, Some(&format!("type={}", bootstrap::TYPE))),
        context: context.clone(),
    });
    let map = || Key::new(MAP_NAMESPACE, MAP);
    let in_namespace =
        |change: &Change<Secret>| change.object().metadata.namespace.as_deref() == Some(NAMESPACE);
    context
        .controller("bootstrap_signer_queue", reconciler)
        .watches(
            |r| &r.maps,
            move |_, change| {
                let ours = change.object().metadata.namespace.as_deref() == Some(MAP_NAMESPACE);
                ours.then(map)
            },
        )
        .watches(|r| &r.secrets, move |_, change| in_namespace(change).then(map))
        .run()
        .await;
}

impl Reconcile for Signer {
    type Key = Key;
    type Error = Error;

    async fn reconcile(&self, _: Key) -> Result<Action, Error> {
        let Some(map) = self.maps.get(MAP_NAMESPACE, MAP) else {
            return Ok(Action::Done);
        };
        let mut tokens = self.secrets.list_namespaced(NAMESPACE);
        tokens.sort_by(|left, right| left.metadata.name.cmp(&right.metadata.name));
        let Some(data) = plan(&map, &tokens, Timestamp::now()) else {
            return Ok(Action::Done);
        };
        let mut signed = (*map).clone();
        signed.data = Some(data);
        let api: Api<ConfigMap> = Api::namespaced(self.context.client.clone(), MAP_NAMESPACE);
        match api.replace(MAP, &PostParams::default(), &signed).await {
            Ok(_) => Ok(Action::Done),
            Err(error) if error.is_conflict() || error.is_not_found() => Ok(Action::Done),
            Err(error) => Err(error.into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use k8s_openapi::ByteString;

    fn token(id: &str) -> Arc<Secret> {
        let data = [
            ("token-id", id),
            ("token-secret", "my-secret"),
            ("usage-bootstrap-signing", "true"),
        ];
        let data = data.map(|(key, value)| (key.to_owned(), ByteString(value.as_bytes().to_vec())));
        let mut secret = Secret {
            data: Some(BTreeMap::from(data)),
            ..Default::default()
        };
        secret.metadata.name = Some(format!("bootstrap-token-{id}"));
        Arc::new(secret)
    }

    #[test]
    fn signatures_follow_the_tokens() {
        let now = Timestamp::now();
        let mut map = ConfigMap::default();
        assert_eq!(plan(&map, &[token("abcdef")], now), None);
        map.data = Some(BTreeMap::from([("kubeconfig".to_owned(), "content".to_owned())]));
        let signed = plan(&map, &[token("abcdef"), token("ghijkl")], now).unwrap();
        assert_eq!(signed.len(), 3);
        map.data = Some(signed);
        assert_eq!(plan(&map, &[token("abcdef"), token("ghijkl")], now), None);
        let fewer = plan(&map, &[token("abcdef")], now).unwrap();
        assert_eq!(
            fewer.keys().collect::<Vec<_>>(),
            ["jws-kubeconfig-abcdef", "kubeconfig"]
        );
    }

    /// The value of upstream's own test.
    #[test]
    fn a_known_signature() {
        assert_eq!(
            signature(
                "Hello from the other side. I must have called a thousand times.",
                "joshua",
                "my voice is my passcode"
            ),
            "eyJhbGciOiJIUzI1NiIsImtpZCI6Impvc2h1YSJ9..VShe2taLd-YTrmWuRkcL_8QTNDHYxQIEBsAYYiIj1_8"
        );
    }
}
