//! How components reach the API: clients in one process or across the network, informers, the reconcile
//! runtime with its work queue, leader election, the event recorder and kubeconfig files.
//!
//! Nothing here knows a controller's business, and nothing here reaches state by any way other than
//! the API: an in-process client goes through the same chain as a remote one.

mod controller;
mod definitions;
mod events;
mod informer;
pub mod kubeconfig;
mod leader;
mod marks;
mod metrics;
mod pace;
mod queue;
mod remote;
mod workers;
mod writes;

#[cfg(test)]
mod fake;

pub use controller::{Controller, Reconcile};
pub use definitions::{DefinedKind, Definition, Noted};
pub use events::{EventRecorder, reference};
pub use informer::{Change, Informer, InformerFactory, Old, PartialObject, Parts};
pub use kube::Client;
pub use leader::{LeaderElector, Outcome};
pub use marks::{cause_of, in_process, in_process_as, in_process_measured, with_marks};
pub use metrics::ComponentMetrics;
pub use queue::{Taken, WorkQueue};
pub use remote::{BadServerAddress, ConnectError, Remote, ServerAddress};
pub use skiff_trace::{COMPLETE, Cause, note, stage};
pub use workers::Action;

use std::path::Path;

/// Names an object within its kind. `namespace` is empty for cluster-scoped kinds.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, Ord, PartialOrd)]
pub struct Key {
    pub namespace: String,
    pub name: String,
}

impl Key {
    pub fn new(namespace: impl Into<String>, name: impl Into<String>) -> Self {
        Key {
            namespace: namespace.into(),
            name: name.into(),
        }
    }

    pub fn of<K: kube::Resource>(object: &K) -> Self {
        let meta = object.meta();
        Key::new(
            meta.namespace.clone().unwrap_or_default(),
            meta.name.clone().unwrap_or_default(),
        )
    }
}

impl std::fmt::Display for Key {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        if self.namespace.is_empty() {
            f.write_str(&self.name)
        } else {
            write!(f, "{}/{}", self.namespace, self.name)
        }
    }
}

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error(transparent)]
    Kube(#[from] kube::Error),
    #[error(transparent)]
    Kubeconfig(#[from] kubeconfig::Error),
    #[error("{0}")]
    Other(String),
}

impl Error {
    /// The API's own answer, where the error is one.
    pub fn status(&self) -> Option<&kube::core::Status> {
        match self {
            Error::Kube(kube::Error::Api(status)) => Some(status),
            _ => None,
        }
    }
}

/// A client of a cluster that a kubeconfig file describes; `context` defaults to the file's current one.
pub async fn remote(path: &Path, context: Option<&str>) -> Result<Client, Error> {
    let kubeconfig = kube::config::Kubeconfig::read_from(path).map_err(kubeconfig::Error::from)?;
    let options = kube::config::KubeConfigOptions {
        context: context.map(str::to_owned),
        ..Default::default()
    };
    let mut config = kube::Config::from_custom_kubeconfig(kubeconfig, &options)
        .await
        .map_err(kubeconfig::Error::from)?;
    // Watches are quiet for minutes; the server ends them by their timeoutSeconds.
    config.read_timeout = None;
    let client = Client::try_from(config)?;
    let default_namespace = client.default_namespace().to_owned();
    Ok(with_marks(client, &default_namespace))
}

/// Status checks that read well at call sites.
pub trait ErrorExt {
    fn is_not_found(&self) -> bool;
    fn is_conflict(&self) -> bool;
    fn is_already_exists(&self) -> bool;
}

impl ErrorExt for kube::Error {
    fn is_not_found(&self) -> bool {
        matches!(self, kube::Error::Api(status) if status.is_not_found())
    }
    fn is_conflict(&self) -> bool {
        // AlreadyExists is a 409 too, but a different reason.
        matches!(self, kube::Error::Api(status) if status.is_conflict() && !status.is_already_exists())
    }
    fn is_already_exists(&self) -> bool {
        matches!(self, kube::Error::Api(status) if status.is_already_exists())
    }
}
