//! The objects of Gateway API, watched while their definitions exist: these come and go as users like.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use k8s_openapi::api::core::v1::Namespace;
use skiff_client::{Client, DefinedKind, Definition, Informer, InformerFactory, Noted};
use tokio_util::sync::CancellationToken;

use super::GROUP;
use super::definitions::BUNDLE_VERSION;
use super::objects::{Gateway, GatewayClass, GrpcRoute, HttpRoute, ReferenceGrant, TlsRoute};
use super::plan::Snapshot;

pub struct Watch {
    client: Client,
    stop: CancellationToken,
    noted: Noted,
    definitions: Informer<Definition>,
    namespaces: Informer<Namespace>,
    classes: DefinedKind<GatewayClass>,
    gateways: DefinedKind<Gateway>,
    http: DefinedKind<HttpRoute>,
    grpc: DefinedKind<GrpcRoute>,
    tls: DefinedKind<TlsRoute>,
    grants: DefinedKind<ReferenceGrant>,
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
            classes: DefinedKind::default(),
            gateways: DefinedKind::default(),
            http: DefinedKind::default(),
            grpc: DefinedKind::default(),
            tls: DefinedKind::default(),
            grants: DefinedKind::default(),
        }
    }

    pub async fn synced(&self) {
        tokio::join!(self.definitions.synced(), self.namespaces.synced());
    }

    /// All objects; `None` while some kind is not yet known.
    pub fn snapshot(&mut self) -> Option<Snapshot> {
        let definitions = self.definitions.list();
        let (client, stop, noted) = (&self.client, &self.stop, &self.noted);
        self.classes.follow(&definitions, client, stop, noted);
        self.gateways.follow(&definitions, client, stop, noted);
        self.http.follow(&definitions, client, stop, noted);
        self.grpc.follow(&definitions, client, stop, noted);
        self.tls.follow(&definitions, client, stop, noted);
        self.grants.follow(&definitions, client, stop, noted);
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

fn is_known_version(definitions: &[Arc<Definition>]) -> bool {
    let mut ours = definitions.iter().filter(|each| each.spec.group == GROUP);
    ours.all(|each| {
        let annotations = each.metadata.annotations.as_ref();
        let version = annotations.and_then(|list| list.get(BUNDLE_VERSION));
        version.is_some_and(|version| version.starts_with("v1."))
    })
}
