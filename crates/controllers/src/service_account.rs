//! The service account controller: every namespace has a service account `default`.

use std::sync::Arc;

use k8s_openapi::api::core::v1::{Namespace, ServiceAccount};
use kube::Api;
use kube::api::PostParams;
use skiff_client::{Action, Change, ErrorExt, Informer, Key, WorkQueue, cause_of, run_workers};

use crate::{Context, Error, is_namespace_terminating};

const NAME: &str = "default";

pub(crate) fn is_active(namespace: &Namespace) -> bool {
    let phase = namespace
        .status
        .as_ref()
        .and_then(|status| status.phase.as_deref());
    namespace.metadata.deletion_timestamp.is_none() && phase != Some("Terminating")
}

pub(crate) async fn run(context: Context) {
    let namespaces: Informer<Namespace> = context.informers.informer();
    let field = format!("metadata.name={NAME}");
    let accounts: Informer<ServiceAccount> = context.informers.filtered(None, Some(&field));
    let queue: Arc<WorkQueue> = context.queue("serviceaccount");
    let adder = queue.clone();
    namespaces.subscribe(move |change: &Change<Namespace>| {
        if let Change::Applied { new, .. } = change {
            adder.add(Key::of(&**new), Some(cause_of(&**new)));
        }
    });
    let adder = queue.clone();
    accounts.subscribe(move |change: &Change<ServiceAccount>| {
        if let Change::Deleted { last } = change {
            let namespace = last.metadata.namespace.clone().unwrap_or_default();
            adder.add(Key::new("", namespace), Some(cause_of(&**last)));
        }
    });
    namespaces.synced().await;
    accounts.synced().await;
    let client = context.client.clone();
    run_workers(
        context.name,
        1,
        queue,
        context.shutdown.clone(),
        move |key: Key| {
            let wanted = namespaces
                .get("", &key.name)
                .is_some_and(|namespace| is_active(&namespace))
                && accounts.get(&key.name, NAME).is_none();
            let client = client.clone();
            async move {
                if wanted {
                    create(&client, &key.name).await
                } else {
                    Ok(Action::Done)
                }
            }
        },
    )
    .await;
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
