//! The token controller: a Secret of type `kubernetes.io/service-account-token` gets a token, the CA and the namespace;
//! it goes with its service account, and the account's reference goes with it.

use std::sync::Arc;

use k8s_openapi::ByteString;
use k8s_openapi::api::core::v1::{Secret, ServiceAccount};
use kube::Api;
use kube::api::{DeleteParams, PostParams, Preconditions};
use serde_json::{Value, json};
use skiff_client::{Action, Change, ErrorExt, Informer, Reconcile};

use super::{ACCOUNT_NAME, ACCOUNT_TOKEN, ACCOUNT_UID, TokenSigner, annotation, data};
use crate::{Context, Error};

/// A Secret at one time of its life, and the account that it names. The name alone would not do: what is removed must be
/// the Secret that was seen.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct SecretKey {
    namespace: String,
    name: String,
    uid: String,
    account: String,
    account_uid: String,
}

impl SecretKey {
    fn of(secret: &Secret) -> SecretKey {
        SecretKey {
            namespace: secret.metadata.namespace.clone().unwrap_or_default(),
            name: secret.metadata.name.clone().unwrap_or_default(),
            uid: secret.metadata.uid.clone().unwrap_or_default(),
            account: annotation(secret, ACCOUNT_NAME).to_owned(),
            account_uid: annotation(secret, ACCOUNT_UID).to_owned(),
        }
    }
}

/// Which of its data a Secret lacks.
#[derive(Debug, PartialEq, Eq)]
struct Lacks {
    ca: bool,
    namespace: bool,
    token: bool,
}

fn lacks(secret: &Secret, root_ca: &str) -> Option<Lacks> {
    let lacks = Lacks {
        ca: !root_ca.is_empty() && data(secret, "ca.crt") != root_ca.as_bytes(),
        namespace: data(secret, "namespace").is_empty(),
        token: data(secret, "token").is_empty(),
    };
    (lacks.ca || lacks.namespace || lacks.token).then_some(lacks)
}

fn claims(account: &ServiceAccount, secret: &Secret) -> Value {
    let namespace = account.metadata.namespace.as_deref().unwrap_or_default();
    let name = account.metadata.name.as_deref().unwrap_or_default();
    json!({
        "iss": "kubernetes/serviceaccount",
        "sub": format!("system:serviceaccount:{namespace}:{name}"),
        "kubernetes.io/serviceaccount/namespace": namespace,
        "kubernetes.io/serviceaccount/secret.name": secret.metadata.name,
        "kubernetes.io/serviceaccount/service-account.name": name,
        "kubernetes.io/serviceaccount/service-account.uid": account.metadata.uid,
    })
}

/// The Secret with all that it should hold; `token` is called if it has none.
fn filled(
    secret: &Secret,
    account: &ServiceAccount,
    lacks: &Lacks,
    root_ca: &str,
    token: impl FnOnce(&Value) -> Result<String, Error>,
) -> Result<Secret, Error> {
    let mut filled = secret.clone();
    let data = filled.data.get_or_insert_default();
    let mut put = |key: &str, value: &str| data.insert(key.to_owned(), ByteString(value.as_bytes().to_vec()));
    if lacks.ca {
        put("ca.crt", root_ca);
    }
    if lacks.namespace {
        put(
            "namespace",
            secret.metadata.namespace.as_deref().unwrap_or_default(),
        );
    }
    if lacks.token {
        put("token", &token(&claims(account, secret))?);
    }
    let annotations = filled.metadata.annotations.get_or_insert_default();
    annotations.insert(
        ACCOUNT_NAME.into(),
        account.metadata.name.clone().unwrap_or_default(),
    );
    annotations.insert(
        ACCOUNT_UID.into(),
        account.metadata.uid.clone().unwrap_or_default(),
    );
    Ok(filled)
}

fn is_same(uid: &str, account: &ServiceAccount) -> bool {
    uid.is_empty() || account.metadata.uid.as_deref() == Some(uid)
}

struct Tokens {
    context: Context,
    signer: TokenSigner,
    secrets: Informer<Secret>,
    accounts: Informer<ServiceAccount>,
}

/// The index of token Secrets by namespace and service account.
const BY_ACCOUNT: &str = "service-account-token/account";

fn by_account(secret: &Secret) -> Vec<String> {
    let namespace = secret.metadata.namespace.as_deref().unwrap_or_default();
    let name = annotation(secret, ACCOUNT_NAME);
    let is_token = secret.type_.as_deref() == Some(ACCOUNT_TOKEN) && !name.is_empty();
    is_token
        .then(|| format!("{namespace}/{name}"))
        .into_iter()
        .collect()
}

pub(crate) async fn run(context: Context) {
    let Some(signer) = context.config.token_signer.clone() else {
        tracing::warn!("\"serviceaccount-token-controller\" is disabled because there is no private key");
        context.shutdown.cancelled().await;
        return;
    };
    let field = format!("type={ACCOUNT_TOKEN}");
    let reconciler = Arc::new(Tokens {
        signer,
        secrets: context.informers.filtered(None, Some(&field)),
        accounts: context.informers.informer(),
        context: context.clone(),
    });
    reconciler.secrets.add_index(BY_ACCOUNT, by_account);
    context
        .controller("serviceaccount_tokens_service", reconciler)
        .workers(context.workers())
        .watches(
            |r| &r.secrets,
            |_, change| {
                let key = SecretKey::of(change.object());
                (!key.account.is_empty()).then_some(key)
            },
        )
        .watches(|r| &r.accounts, Tokens::woken_by_account)
        .run()
        .await;
}

impl Tokens {
    /// The tokens of an account that is gone.
    fn woken_by_account(&self, change: &Change<ServiceAccount>) -> Vec<SecretKey> {
        let Change::Deleted { last } = change else {
            return Vec::new();
        };
        let namespace = last.metadata.namespace.as_deref().unwrap_or_default();
        let name = last.metadata.name.as_deref().unwrap_or_default();
        let secrets = self.secrets.by_index(BY_ACCOUNT, &format!("{namespace}/{name}"));
        secrets.iter().map(|secret| SecretKey::of(secret)).collect()
    }

    async fn account(&self, key: &SecretKey, live: bool) -> Result<Option<Arc<ServiceAccount>>, Error> {
        let known = self.accounts.get(&key.namespace, &key.account);
        if let Some(known) = known.filter(|known| is_same(&key.account_uid, known)) {
            return Ok(Some(known));
        }
        if !live {
            return Ok(None);
        }
        let api: Api<ServiceAccount> = Api::namespaced(self.context.client.clone(), &key.namespace);
        let found = api.get_opt(&key.account).await?;
        Ok(found
            .filter(|found| is_same(&key.account_uid, found))
            .map(Arc::new))
    }

    async fn fill(&self, secret: &Secret, account: &ServiceAccount) -> Result<Action, Error> {
        let root_ca = &self.context.config.root_ca_pem;
        let Some(lacks) = lacks(secret, root_ca) else {
            return Ok(Action::Done);
        };
        let sign = |claims: &Value| (self.signer)(claims).map_err(|error| Error::Other(error.to_string()));
        let filled = filled(secret, account, &lacks, root_ca, sign)?;
        let namespace = secret.metadata.namespace.as_deref().unwrap_or_default();
        let api: Api<Secret> = Api::namespaced(self.context.client.clone(), namespace);
        let name = secret.metadata.name.as_deref().unwrap_or_default();
        match api.replace(name, &PostParams::default(), &filled).await {
            Ok(_) => Ok(Action::Done),
            // Its change is on the way, and brings it back.
            Err(error) if error.is_conflict() || error.is_not_found() => Ok(Action::Done),
            Err(error) => Err(error.into()),
        }
    }

    async fn delete(&self, key: &SecretKey) -> Result<Action, Error> {
        let api: Api<Secret> = Api::namespaced(self.context.client.clone(), &key.namespace);
        let preconditions = Preconditions {
            uid: Some(key.uid.clone()),
            resource_version: None,
        };
        let params = DeleteParams::default().preconditions(preconditions);
        match api.delete(&key.name, &params).await {
            Ok(_) => Ok(Action::Done),
            Err(error) if error.is_conflict() || error.is_not_found() => Ok(Action::Done),
            Err(error) => Err(error.into()),
        }
    }

    /// Takes the name of a Secret that is gone out of its account.
    /// By the API, not by a copy: the reference may have been written just before the Secret went, and nothing wakes
    /// this key again.
    async fn remove_reference(&self, key: &SecretKey) -> Result<Action, Error> {
        let names = |account: &ServiceAccount| {
            let mut secrets = account.secrets.iter().flatten();
            secrets.any(|secret| secret.name.as_deref() == Some(key.name.as_str()))
        };
        let api: Api<ServiceAccount> = Api::namespaced(self.context.client.clone(), &key.namespace);
        let Some(mut wanted) = api.get_opt(&key.account).await?.filter(names) else {
            return Ok(Action::Done);
        };
        if let Some(secrets) = &mut wanted.secrets {
            secrets.retain(|secret| secret.name.as_deref() != Some(key.name.as_str()));
        }
        match api.replace(&key.account, &PostParams::default(), &wanted).await {
            Ok(_) => Ok(Action::Done),
            Err(error) if error.is_not_found() => Ok(Action::Done),
            Err(error) => Err(error.into()),
        }
    }
}

impl Reconcile for Tokens {
    type Key = SecretKey;
    type Error = Error;

    async fn reconcile(&self, key: SecretKey) -> Result<Action, Error> {
        let secret = self.secrets.get(&key.namespace, &key.name);
        let secret = secret.filter(|secret| secret.metadata.uid.as_deref() == Some(key.uid.as_str()));
        match secret {
            None => match self.account(&key, false).await? {
                Some(_) => self.remove_reference(&key).await,
                None => Ok(Action::Done),
            },
            Some(secret) => match self.account(&key, true).await? {
                Some(account) => self.fill(&secret, &account).await,
                None => self.delete(&key).await,
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn secret(data: Value) -> Secret {
        let value = json!({"metadata": {"name": "s", "namespace": "ns", "annotations": {ACCOUNT_NAME: "web"}},
            "type": ACCOUNT_TOKEN, "data": data});
        serde_json::from_value(value).unwrap()
    }

    #[test]
    fn what_is_missing_is_filled_in() {
        let account: ServiceAccount =
            serde_json::from_value(json!({"metadata": {"name": "web", "namespace": "ns", "uid": "u1"}}))
                .unwrap();
        let check = |present: Value, expected: Option<(bool, bool, bool)>| {
            let lacking = lacks(&secret(present), "CA");
            assert_eq!(
                lacking.map(|lacks| (lacks.ca, lacks.namespace, lacks.token)),
                expected
            );
        };
        // "CA", "ns" and "T".
        check(json!({}), Some((true, true, true)));
        check(
            json!({"ca.crt": "Q0E=", "namespace": "bnM=", "token": "VA=="}),
            None,
        );
        check(
            json!({"ca.crt": "VA==", "namespace": "bnM=", "token": "VA=="}),
            Some((true, false, false)),
        );
        check(
            json!({"ca.crt": "Q0E=", "namespace": "bnM="}),
            Some((false, false, true)),
        );
        let empty = secret(json!({"kept": "VA=="}));
        let made = filled(&empty, &account, &lacks(&empty, "CA").unwrap(), "CA", |claims| {
            assert_eq!(claims["sub"], "system:serviceaccount:ns:web");
            assert_eq!(claims["kubernetes.io/serviceaccount/secret.name"], "s");
            Ok("T".into())
        })
        .unwrap();
        assert_eq!(lacks(&made, "CA"), None);
        assert_eq!(data(&made, "kept"), b"T");
        assert_eq!(annotation(&made, ACCOUNT_UID), "u1");
        assert_eq!(by_account(&made), ["ns/web"]);
    }
}
