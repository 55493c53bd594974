//! The root CA publisher: every namespace has a ConfigMap `kube-root-ca.crt` with the certificate by which
//! pods verify the API server.

use std::collections::BTreeMap;
use std::sync::Arc;

use k8s_openapi::api::core::v1::{ConfigMap, Namespace};
use kube::Api;
use kube::api::PostParams;
use skiff_client::{Action, Change, ErrorExt, Informer, Key, WorkQueue, cause_of, run_workers};

use crate::service_account::is_active;
use crate::{Context, Error, is_namespace_terminating};

const NAME: &str = "kube-root-ca.crt";
const DESCRIPTION: &str = "kubernetes.io/description";
const DESCRIPTION_TEXT: &str = "Contains a CA bundle that can be used to verify the kube-apiserver when using internal endpoints such as the internal service IP or kubernetes.default.svc. No other usage is guaranteed across distributions of Kubernetes clusters.";

#[derive(Debug, PartialEq)]
enum Plan {
    Nothing,
    Create(Box<ConfigMap>),
    Update(Box<ConfigMap>),
}

fn plan(namespace: &str, present: Option<&ConfigMap>, root_ca: &str) -> Plan {
    let data = BTreeMap::from([("ca.crt".to_owned(), root_ca.to_owned())]);
    let annotations = BTreeMap::from([(DESCRIPTION.to_owned(), DESCRIPTION_TEXT.to_owned())]);
    let Some(present) = present else {
        let mut wanted = ConfigMap {
            data: Some(data),
            ..Default::default()
        };
        wanted.metadata.name = Some(NAME.into());
        wanted.metadata.namespace = Some(namespace.into());
        wanted.metadata.annotations = Some(annotations);
        return Plan::Create(Box::new(wanted));
    };
    let described = present
        .metadata
        .annotations
        .as_ref()
        .and_then(|all| all.get(DESCRIPTION));
    if present.data.as_ref() == Some(&data) && described.map(String::as_str) == Some(DESCRIPTION_TEXT) {
        return Plan::Nothing;
    }
    let mut wanted = present.clone();
    wanted.data = Some(data);
    wanted
        .metadata
        .annotations
        .get_or_insert_default()
        .extend(annotations);
    Plan::Update(Box::new(wanted))
}

pub(crate) async fn run(context: Context) {
    let namespaces: Informer<Namespace> = context.informers.informer();
    let field = format!("metadata.name={NAME}");
    let maps: Informer<ConfigMap> = context.informers.filtered(None, Some(&field));
    let queue: Arc<WorkQueue> = context.queue("root_ca_cert_publisher");
    let adder = queue.clone();
    namespaces.subscribe(move |change: &Change<Namespace>| {
        if let Change::Applied { new, .. } = change {
            adder.add(Key::of(&**new), Some(cause_of(&**new)));
        }
    });
    let adder = queue.clone();
    maps.subscribe(move |change: &Change<ConfigMap>| {
        let map = change.object();
        let namespace = map.metadata.namespace.clone().unwrap_or_default();
        adder.add(Key::new("", namespace), Some(cause_of(&**map)));
    });
    namespaces.synced().await;
    maps.synced().await;
    let (client, config) = (context.client.clone(), context.config.clone());
    run_workers(
        context.name,
        1,
        queue,
        context.shutdown.clone(),
        move |key: Key| {
            let active = namespaces
                .get("", &key.name)
                .is_some_and(|namespace| is_active(&namespace));
            let plan = if active {
                plan(
                    &key.name,
                    maps.get(&key.name, NAME).as_deref(),
                    &config.root_ca_pem,
                )
            } else {
                Plan::Nothing
            };
            let api: Api<ConfigMap> = Api::namespaced(client.clone(), &key.name);
            async move { write(&api, plan).await }
        },
    )
    .await;
}

async fn write(api: &Api<ConfigMap>, plan: Plan) -> Result<Action, Error> {
    let outcome = match plan {
        Plan::Nothing => return Ok(Action::Done),
        Plan::Create(map) => api.create(&PostParams::default(), &map).await,
        Plan::Update(map) => api.replace(NAME, &PostParams::default(), &map).await,
    };
    match outcome {
        Ok(_) => Ok(Action::Done),
        // It exists: its own event brings us back if it is wrong.
        Err(error) if error.is_already_exists() || error.is_not_found() => Ok(Action::Done),
        Err(error) if is_namespace_terminating(&error) => Ok(Action::Done),
        Err(error) => Err(error.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_map_is_made_and_kept() {
        let Plan::Create(made) = plan("default", None, "PEM") else {
            panic!()
        };
        assert_eq!(made.data.as_ref().unwrap()["ca.crt"], "PEM");
        assert_eq!(plan("default", Some(&made), "PEM"), Plan::Nothing);
        let Plan::Update(renewed) = plan("default", Some(&made), "NEW") else {
            panic!()
        };
        assert_eq!(renewed.data.as_ref().unwrap()["ca.crt"], "NEW");
    }
}
