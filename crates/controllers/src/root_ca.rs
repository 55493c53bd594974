//! The root CA publisher: every namespace has a ConfigMap `kube-root-ca.crt` with the certificate by which
//! pods verify the API server.

use std::collections::BTreeMap;
use std::sync::Arc;

use k8s_openapi::api::core::v1::{ConfigMap, Namespace};
use kube::Api;
use kube::api::PostParams;
use skiff_client::{Action, Change, ErrorExt, Informer, Key, Reconcile};

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

struct RootCaPublisher {
    context: Context,
    namespaces: Informer<Namespace>,
    maps: Informer<ConfigMap>,
}

pub(crate) async fn run(context: Context) {
    let field = format!("metadata.name={NAME}");
    let reconciler = Arc::new(RootCaPublisher {
        namespaces: context.informers.informer(),
        maps: context.informers.filtered(None, Some(&field)),
        context: context.clone(),
    });
    let namespace_of = |_: &RootCaPublisher, change: &Change<ConfigMap>| {
        let namespace = change.object().metadata.namespace.clone();
        [Key::new("", namespace.unwrap_or_default())]
    };
    context
        .controller("root_ca_cert_publisher", reconciler)
        .owns(|r| &r.namespaces)
        .watches(|r| &r.maps, namespace_of)
        .run()
        .await;
}

impl Reconcile for RootCaPublisher {
    type Key = Key;
    type Error = Error;

    async fn reconcile(&self, key: Key) -> Result<Action, Error> {
        let namespace = self.namespaces.get("", &key.name);
        if !namespace.is_some_and(|namespace| is_active(&namespace)) {
            return Ok(Action::Done);
        }
        let present = self.maps.get(&key.name, NAME);
        let plan = plan(&key.name, present.as_deref(), &self.context.config.root_ca_pem);
        let api: Api<ConfigMap> = Api::namespaced(self.context.client.clone(), &key.name);
        write(&api, plan).await
    }
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
