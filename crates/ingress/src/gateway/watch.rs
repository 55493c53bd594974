//! The objects of Gateway API, watched while their definitions exist: these come and go as users like.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use futures::FutureExt;
use k8s_openapi::api::core::v1::Namespace;
use kube::Resource;
use serde::de::DeserializeOwned;
use skiff_client::{Client, Informer, InformerFactory};
use tokio_util::sync::CancellationToken;

use super::GROUP;
use super::definitions::BUNDLE_VERSION;
use super::objects::{Definition, Gateway, GatewayClass, GrpcRoute, HttpRoute, ReferenceGrant, TlsRoute};
use super::plan::Snapshot;

/// Called at every change.
type Noted = Arc<dyn Fn() + Send + Sync>;

/// One kind, while it is defined.
struct Kind<K>(Option<(CancellationToken, Informer<K>)>);

impl<K> Default for Kind<K> {
    fn default() -> Self {
        Kind(None)
    }
}

impl<K> Kind<K>
where
    K: Resource<DynamicType = ()> + DeserializeOwned + Send + Sync + 'static,
{
    /// Begins or ends to watch.
    fn follow(&mut self, is_defined: bool, client: &Client, stop: &CancellationToken, noted: &Noted) {
        match (&self.0, is_defined) {
            (None, true) => {
                let stop = stop.child_token();
                let informer: Informer<K> = InformerFactory::new(client.clone(), stop.clone()).informer();
                let news = noted.clone();
                informer.subscribe(move |_| news());
                let (waiting, news, ended) = (informer.clone(), noted.clone(), stop.clone());
                tokio::spawn(async move {
                    tokio::select! {
                        () = waiting.synced() => news(),
                        () = ended.cancelled() => {}
                    }
                });
                self.0 = Some((stop, informer));
            }
            (Some((stop, _)), false) => {
                stop.cancel();
                self.0 = None;
            }
            _ => {}
        }
    }

    /// `None` until all are known.
    fn list(&self) -> Option<Vec<Arc<K>>> {
        match &self.0 {
            None => Some(Vec::new()),
            Some((_, informer)) => informer.synced().now_or_never().map(|()| informer.list()),
        }
    }
}

pub struct Watch {
    client: Client,
    stop: CancellationToken,
    noted: Noted,
    definitions: Informer<Definition>,
    namespaces: Informer<Namespace>,
    classes: Kind<GatewayClass>,
    gateways: Kind<Gateway>,
    http: Kind<HttpRoute>,
    grpc: Kind<GrpcRoute>,
    tls: Kind<TlsRoute>,
    grants: Kind<ReferenceGrant>,
}

impl Watch {
    pub fn new(client: Client, factory: &InformerFactory, stop: &CancellationToken, noted: Noted) -> Watch {
        let definitions: Informer<Definition> = factory.informer();
        let namespaces: Informer<Namespace> = factory.informer();
        let news = noted.clone();
        definitions.subscribe(move |change| {
            if change.object().spec.group == GROUP {
                news();
            }
        });
        let news = noted.clone();
        namespaces.subscribe(move |_| news());
        Watch {
            client,
            stop: stop.clone(),
            noted,
            definitions,
            namespaces,
            classes: Kind::default(),
            gateways: Kind::default(),
            http: Kind::default(),
            grpc: Kind::default(),
            tls: Kind::default(),
            grants: Kind::default(),
        }
    }

    pub async fn synced(&self) {
        tokio::join!(self.definitions.synced(), self.namespaces.synced());
    }

    /// All objects; `None` while some kind is not yet known.
    pub fn snapshot(&mut self) -> Option<Snapshot> {
        let definitions = self.definitions.list();
        let (client, stop, noted) = (&self.client, &self.stop, &self.noted);
        self.classes
            .follow(is_served::<GatewayClass>(&definitions), client, stop, noted);
        self.gateways
            .follow(is_served::<Gateway>(&definitions), client, stop, noted);
        self.http
            .follow(is_served::<HttpRoute>(&definitions), client, stop, noted);
        self.grpc
            .follow(is_served::<GrpcRoute>(&definitions), client, stop, noted);
        self.tls
            .follow(is_served::<TlsRoute>(&definitions), client, stop, noted);
        self.grants
            .follow(is_served::<ReferenceGrant>(&definitions), client, stop, noted);
        let gateways = self.gateways.list()?;
        let namespaces: HashMap<String, BTreeMap<String, String>> = match gateways.is_empty() {
            true => HashMap::new(),
            false => {
                let all = self.namespaces.list();
                all.iter()
                    .filter_map(|each| {
                        let meta = &each.metadata;
                        Some((meta.name.clone()?, meta.labels.clone().unwrap_or_default()))
                    })
                    .collect()
            }
        };
        Some(Snapshot {
            classes: self.classes.list()?,
            gateways,
            http: self.http.list()?,
            grpc: self.grpc.list()?,
            tls: self.tls.list()?,
            grants: self.grants.list()?,
            namespaces,
            is_known_version: is_known_version(&definitions),
        })
    }
}

/// Whether a kind can be listed in the version that is read here.
fn is_served<K: Resource<DynamicType = ()>>(definitions: &[Arc<Definition>]) -> bool {
    let name = format!("{}.{GROUP}", K::plural(&()));
    let mut named = definitions
        .iter()
        .filter(|each| each.metadata.name.as_deref() == Some(name.as_str()));
    named.any(|each| {
        let version = K::version(&());
        let mut versions = each.spec.versions.iter();
        let conditions = each.status.as_ref().map(|status| &status["conditions"]);
        let mut conditions = conditions.and_then(|list| list.as_array()).into_iter().flatten();
        versions.any(|each| each.served && each.name == version)
            && conditions.any(|each| each["type"] == "Established" && each["status"] == "True")
            && each.metadata.deletion_timestamp.is_none()
    })
}

fn is_known_version(definitions: &[Arc<Definition>]) -> bool {
    let mut ours = definitions.iter().filter(|each| each.spec.group == GROUP);
    ours.all(|each| {
        let annotations = each.metadata.annotations.as_ref();
        let version = annotations.and_then(|list| list.get(BUNDLE_VERSION));
        version.is_some_and(|version| version.starts_with("v1."))
    })
}
