//! The service account controller: every namespace has a service account `default`.

use std::sync::Arc;

use k8s_openapi::api::core::v1::{Namespace, ServiceAccount};
use kube::Api;
use kube::api::PostParams;
use skiff_client::{Action, Change, ErrorExt, Informer, Key, Reconcile};

use crate::{Context, Error, is_namespace_terminating};

const NAME: &str = "default";

pub(crate) fn is_active(namespace: &Namespace) -> bool {
    let phase = namespace
        .status
        .as_ref()
        .and_then(|status| status.phase.as_deref());
    namespace.metadata.deletion_timestamp.is_none() && phase != Some("Terminating")
}

struct ServiceAccounts {
    client: kube::Client,
    namespaces: Informer<Namespace>,
    accounts: Informer<ServiceAccount>,
}

pub(crate) async fn run(context: Context) {
    let field = format!("metadata.name={NAME}");
    let reconciler = Arc::new(ServiceAccounts {
        client: context.client.clone(),
        namespaces: context.informers.informer(),
        accounts: context.informers.filtered(None, Some(&field)),
    });
    context
        .controller("serviceaccount", reconciler)
        .owns(|r| &r.namespaces)
        .watches(|r| &r.accounts, |_, change| deleted_from(change))
        .run()
        .await;
}

/// The namespace that has lost an object: it gets another one.
pub(crate) fn deleted_from<K: kube::Resource>(change: &Change<K>) -> Option<Key> {
    let Change::Deleted { last } = change else {
        return None;
    };
    Some(Key::new("", last.meta().namespace.clone().unwrap_or_default()))
}

impl Reconcile for ServiceAccounts {
    type Key = Key;
    type Error = Error;

    async fn reconcile(&self, key: Key) -> Result<Action, Error> {
        let namespace = self.namespaces.get("", &key.name);
        let wanted = namespace.is_some_and(|namespace| is_active(&namespace))
            && self.accounts.get(&key.name, NAME).is_none();
        if wanted {
            create(&self.client, &key.name).await
        } else {
            Ok(Action::Done)
        }
    }
}

async fn create(client: &kube::Client, namespace: &str) -> Result<Action, Error> {
    let api: Api<ServiceAccount> = Api::namespaced(client.clone(), namespace);
    let mut account = ServiceAccount::default();
    account.metadata.name = Some(NAME.into());
    match api.create(&PostParams::default(), &account).await {
        Ok(_) => Ok(Action::Done),
        Err(error) if error.is_already_exists() || error.is_not_found() => Ok(Action::Done),
        Err(error) if is_namespace_terminating(&error) => Ok(Action::Done),
        Err(error) => Err(error.into()),
    }
}
