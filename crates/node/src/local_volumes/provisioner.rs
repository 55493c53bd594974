//! The provisioner: it answers claims with PersistentVolumes, and asks the node in question for the directory.
//!
//! Of several API servers one leads. It reaches nodes through the API server's proxy to kubelets.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use http::Method;
use k8s_openapi::api::core::v1::{Node, PersistentVolume, PersistentVolumeClaim};
use k8s_openapi::api::storage::v1::StorageClass;
use kube::api::{DeleteParams, PostParams, Preconditions};
use kube::{Api, Client, ResourceExt};
use skiff_client::{
    Action, Change, Controller, ErrorExt, EventRecorder, Informer, InformerFactory, Key, LeaderElector,
    Reconcile, WorkQueue, reference,
};
use tokio_util::sync::CancellationToken;

use super::plan::{self, ClaimPlan, FINALIZER, Place, VolumePlan};
use super::{Offer, PROVISIONER};
use crate::objects::error_message;

/// How often directories without a volume are looked for.
const SWEEP: Duration = Duration::from_secs(600);
/// If a node did not answer: this process and the node's server may have been started at the same time.
const SWEEP_AGAIN: Duration = Duration::from_secs(15);
const STILL_MOUNTED: Duration = Duration::from_secs(1);
/// A claim that cannot be served is looked at again: the class may have changed.
const REFUSED: Duration = Duration::from_secs(60);
/// How long a node may take for an answer.
const PATIENCE: Duration = Duration::from_secs(15);

#[derive(Clone, Debug)]
pub struct LocalVolumesConfig {
    /// Who this is among those that want to lead.
    pub identity: String,
}

#[derive(Debug, thiserror::Error)]
enum Error {
    #[error("{}", error_message(.0))]
    Api(#[from] kube::Error),
    #[error("node {node}: {}", error_message(.source))]
    Node { node: String, source: kube::Error },
    #[error("node {0} does not answer")]
    Silent(String),
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum Item {
    Claim(Key),
    Volume(String),
    Sweep,
}

struct Provisioner {
    client: Client,
    recorder: EventRecorder,
    claims: Informer<PersistentVolumeClaim>,
    volumes: Informer<PersistentVolume>,
    classes: Informer<StorageClass>,
    nodes: Informer<Node>,
}

/// Serves the claims and volumes of all nodes until `shutdown`.
pub async fn run_local_volumes(config: LocalVolumesConfig, client: Client, shutdown: CancellationToken) {
    let elector = LeaderElector::new("kube-system", "skiff-local-volumes", &config.identity);
    let work = client.clone();
    elector
        .run(client, move |stop| lead(config, work, stop), shutdown)
        .await;
}

async fn lead(config: LocalVolumesConfig, client: Client, shutdown: CancellationToken) {
    let informers = InformerFactory::new(client.clone(), shutdown.clone());
    let provisioner = Arc::new(Provisioner {
        recorder: EventRecorder::new(client.clone(), PROVISIONER, &config.identity),
        claims: informers.informer(),
        volumes: informers.informer(),
        classes: informers.informer(),
        nodes: informers.informer(),
        client,
    });
    provisioner.claims.add_index(BY_CLASS, by_class);
    provisioner
        .nodes
        .add_index(BY_HOST, |node| vec![plan::host_name(node)]);
    Controller::new("local-volumes", WorkQueue::new(), shutdown, provisioner)
        .workers(4)
        .watches(
            |provisioner| &provisioner.claims,
            |_, change| match change {
                // Its directory may have been made, and its volume not: this process ended in between.
                Change::Deleted { last } => plan::is_unbound(last).then_some(Item::Sweep),
                Change::Applied { new, .. } => plan::is_asked(new).then(|| Item::Claim(Key::of(&**new))),
            },
        )
        .watches(|provisioner| &provisioner.volumes, Provisioner::woken_by_volume)
        .watches(|provisioner| &provisioner.classes, Provisioner::woken_by_class)
        .reads(|provisioner| &provisioner.nodes)
        .every(SWEEP, |_| vec![Item::Sweep])
        .run()
        .await;
}

/// Claims that wait for a volume of this provisioner, by class.
const BY_CLASS: &str = "local-volumes/class";
/// Nodes by the label that volumes name them by.
const BY_HOST: &str = "local-volumes/host";

fn by_class(claim: &PersistentVolumeClaim) -> Vec<String> {
    plan::class_name(claim)
        .filter(|_| plan::is_asked(claim))
        .into_iter()
        .collect()
}

impl Provisioner {
    fn woken_by_volume(&self, change: &Change<PersistentVolume>) -> Option<Item> {
        match change {
            Change::Applied { new, .. } if new.spec.as_ref().is_some_and(|spec| spec.local.is_some()) => {
                Some(Item::Volume(new.name_any()))
            }
            _ => None,
        }
    }

    fn woken_by_class(&self, change: &Change<StorageClass>) -> Vec<Item> {
        let claims = self.claims.by_index(BY_CLASS, &change.object().name_any());
        let keys = claims.iter().map(|claim| Key::of(&**claim));
        keys.map(Item::Claim).collect()
    }

    fn claim_api(&self, namespace: &str) -> Api<PersistentVolumeClaim> {
        Api::namespaced(self.client.clone(), namespace)
    }

    fn volume_api(&self) -> Api<PersistentVolume> {
        Api::all(self.client.clone())
    }

    /// Asks a node's server about its volumes.
    async fn ask(&self, method: Method, node: &str, rest: &str) -> Result<String, Error> {
        let path = format!("/api/v1/nodes/{node}/proxy/skiff/volumes{rest}");
        let request = http::Request::builder().method(method).uri(path);
        let request = request.body(Vec::new()).map_err(kube::Error::HttpError)?;
        match tokio::time::timeout(PATIENCE, self.client.request_text(request)).await {
            Ok(answer) => answer.map_err(|source| Error::Node {
                node: node.to_owned(),
                source,
            }),
            Err(_) => Err(Error::Silent(node.to_owned())),
        }
    }

    /// `None` if the node makes no such volumes.
    async fn offer(&self, node: &str) -> Result<Option<Offer>, Error> {
        let answer = match self.ask(Method::GET, node, "").await {
            Err(Error::Node { source, .. }) if source.is_not_found() => return Ok(None),
            answer => answer?,
        };
        let offer = serde_json::from_str(&answer).map_err(|error| Error::Node {
            node: node.to_owned(),
            source: kube::Error::SerdeError(error),
        })?;
        Ok(Some(offer))
    }

    async fn sync_claim(&self, key: &Key) -> Result<Action, Error> {
        let Some(claim) = self.claims.get(&key.namespace, &key.name) else {
            return Ok(Action::Done);
        };
        let class = self
            .classes
            .get("", &plan::class_name(&claim).unwrap_or_default());
        let exists = self.volumes.get("", &plan::volume_name(&claim)).is_some();
        let Some(class) = class.filter(|class| !exists && plan::serves(class, &claim)) else {
            return Ok(Action::Done);
        };
        let Some(node_name) = plan::wanted_node(&claim, &class, || self.nodes.list()) else {
            return Ok(Action::Done);
        };
        let event = |type_: &str, reason: &str, message: String| {
            self.recorder.event(&reference(&*claim), type_, reason, message);
        };
        let planned = match self.nodes.get("", &node_name) {
            None => plan::elsewhere(&claim, &class, &format!("there is no node {node_name}")),
            Some(node) => match self.offer(&node_name).await {
                Ok(Some(offer)) => plan::plan_claim(&claim, &class, &Place::new(&node, &offer)),
                Ok(None) => {
                    let why = format!("node {node_name} has no volumes of this class");
                    plan::elsewhere(&claim, &class, &why)
                }
                Err(error) => {
                    let message = plan::failed(&class, &error.to_string());
                    event("Warning", "ProvisioningFailed", message);
                    return Err(error);
                }
            },
        };
        match planned {
            ClaimPlan::TakeNode(wanted) => {
                let api = self.claim_api(&key.namespace);
                match api.replace(&key.name, &PostParams::default(), &wanted).await {
                    // The claim changed: its event brings it back.
                    Err(error) if !error.is_conflict() && !error.is_not_found() => Err(error.into()),
                    _ => Ok(Action::Done),
                }
            }
            ClaimPlan::Refuse { message, reschedule } => {
                event("Warning", "ProvisioningFailed", message);
                if let Some(wanted) = reschedule {
                    let api = self.claim_api(&key.namespace);
                    api.replace(&key.name, &PostParams::default(), &wanted).await?;
                }
                Ok(Action::RequeueAfter(REFUSED))
            }
            ClaimPlan::Provision(volume) => {
                let message = format!(
                    "External provisioner is provisioning volume for claim {:?}",
                    key.to_string()
                );
                event("Normal", "Provisioning", message);
                let name = volume.name_any();
                if let Err(error) = self.provision(&node_name, &volume).await {
                    let message = plan::failed(&class, &error.to_string());
                    event("Warning", "ProvisioningFailed", message);
                    return Err(error);
                }
                event(
                    "Normal",
                    "ProvisioningSucceeded",
                    format!("Successfully provisioned volume {name}"),
                );
                Ok(Action::Done)
            }
        }
    }

    async fn provision(&self, node: &str, volume: &PersistentVolume) -> Result<(), Error> {
        self.ask(Method::PUT, node, &format!("/{}", volume.name_any()))
            .await?;
        match self.volume_api().create(&PostParams::default(), volume).await {
            Err(error) if !error.is_already_exists() => Err(error.into()),
            _ => Ok(()),
        }
    }

    async fn sync_volume(&self, name: &str) -> Result<Action, Error> {
        let Some(volume) = self.volumes.get("", name) else {
            return Ok(Action::Done);
        };
        match plan::plan_volume(&volume) {
            VolumePlan::Nothing => Ok(Action::Done),
            VolumePlan::SetFinalizer(wanted) => {
                self.volume_api()
                    .replace(name, &PostParams::default(), &wanted)
                    .await?;
                Ok(Action::Done)
            }
            VolumePlan::Remove { host } => {
                let removed = self.remove(&volume, &host).await;
                if let Err(error) = &removed {
                    let about = reference(&*volume);
                    self.recorder
                        .event(&about, "Warning", "VolumeFailedDelete", error.to_string());
                }
                removed
            }
        }
    }

    /// Removes the directory of a volume, then the object.
    async fn remove(&self, volume: &PersistentVolume, host: &str) -> Result<Action, Error> {
        // A node that is gone for good took the directory along: the administrator removes the finalizer.
        let Some(node) = self.nodes.by_index(BY_HOST, host).into_iter().next() else {
            return Ok(Action::RequeueAfter(SWEEP));
        };
        let node_name = node.name_any();
        let Some(offer) = self.offer(&node_name).await? else {
            return Ok(Action::RequeueAfter(SWEEP));
        };
        if !plan::is_own(volume, &Place::new(&node, &offer)) {
            return Ok(Action::Done);
        }
        let rest = format!("/{}", volume.name_any());
        match self.ask(Method::DELETE, &node_name, &rest).await {
            Err(Error::Node { source, .. }) if source.is_conflict() => {
                return Ok(Action::RequeueAfter(STILL_MOUNTED));
            }
            removed => removed?,
        };
        self.forget(volume).await?;
        Ok(Action::Done)
    }

    /// Deletes the object of a volume whose directory is gone.
    async fn forget(&self, volume: &PersistentVolume) -> Result<(), Error> {
        let api = self.volume_api();
        let name = volume.name_any();
        let mut volume = volume.clone();
        if volume.metadata.deletion_timestamp.is_none() {
            let parameters = DeleteParams {
                preconditions: Some(Preconditions {
                    uid: volume.uid(),
                    resource_version: None,
                }),
                ..Default::default()
            };
            match api.delete(&name, &parameters).await {
                // What is answered is the object as finalizers keep it, or that it is gone.
                Ok(answer) => match answer.left() {
                    Some(left) => volume = left,
                    None => return Ok(()),
                },
                Err(error) if error.is_not_found() => return Ok(()),
                Err(error) => return Err(error.into()),
            }
        }
        let finalizers = volume.metadata.finalizers.get_or_insert_default();
        finalizers.retain(|finalizer| finalizer != FINALIZER);
        match api.replace(&name, &PostParams::default(), &volume).await {
            Err(error) if !error.is_not_found() => Err(error.into()),
            _ => Ok(()),
        }
    }

    /// A directory whose volume was never made, because this process ended before, is empty and goes. One with
    /// files in it stays, whatever the API says. Whether all nodes answered that are ready.
    async fn sweep(&self) -> bool {
        let mut have_answered = true;
        for node in self.nodes.list() {
            let node_name = node.name_any();
            if !plan::is_ready(&node) {
                continue;
            }
            let offer = match self.offer(&node_name).await {
                Ok(Some(offer)) => offer,
                Ok(None) => continue,
                Err(_) => {
                    have_answered = false;
                    continue;
                }
            };
            let claims = self.claims.list();
            let awaited: HashSet<String> = claims.iter().map(|claim| plan::volume_name(claim)).collect();
            for name in offer.names {
                if !awaited.contains(&name) && self.volumes.get("", &name).is_none() {
                    let rest = format!("/{name}?empty=true");
                    if let Err(error) = self.ask(Method::DELETE, &node_name, &rest).await {
                        tracing::debug!(%error, volume = name, "an empty directory stays");
                    }
                }
            }
        }
        have_answered
    }
}

impl Reconcile for Provisioner {
    type Key = Item;
    type Error = Error;

    async fn reconcile(&self, item: Item) -> Result<Action, Error> {
        match item {
            Item::Claim(key) => self.sync_claim(&key).await,
            Item::Volume(name) => self.sync_volume(&name).await,
            Item::Sweep => Ok(match self.sweep().await {
                true => Action::Done,
                false => Action::RequeueAfter(SWEEP_AGAIN),
            }),
        }
    }
}
