//! Simulated nodes: Node objects with leases and statuses, whose pods become Running, complete, fail and end as a
//! file says, with no kubelet and no container behind them. For tests of operators, schedulers and of skiff itself at a
//! scale that no machine at hand can run.
//!
//! A client of the API like any other: it works against every Kubernetes. It touches only nodes that it made (label
//! [`LABEL`]) and the pods bound to them.

mod nodes;
mod pods;
mod profile;

pub use profile::{NodeShape, Profile, ProfileError, Stage};

use std::sync::Arc;
use std::time::Duration;

use kube::Client;
use tokio_util::sync::CancellationToken;

/// Marks a simulated node.
pub const LABEL: &str = "sim.skiff.io/node";

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("cannot create the simulated nodes: {0}")]
    Nodes(kube::Error),
    #[error("cannot remove the simulated nodes: {0}")]
    Removal(kube::Error),
}

/// What is simulated, and how.
#[derive(Clone)]
pub struct SimConfig {
    pub profile: Profile,
    /// How often a node renews its lease; a kubelet does every ten seconds.
    pub lease_interval: Duration,
    /// How many pods are worked on at a time.
    pub workers: usize,
}

impl SimConfig {
    pub fn new(profile: Profile) -> Self {
        SimConfig {
            profile,
            lease_interval: Duration::from_secs(10),
            workers: 32,
        }
    }
}

/// Creates the nodes of the profile, then plays their kubelets until `stop`. `created` is told how many nodes there are.
pub async fn run(
    config: SimConfig,
    client: Client,
    stop: CancellationToken,
    created: impl FnOnce(usize),
) -> Result<(), Error> {
    let config = Arc::new(config);
    let names = nodes::create(&client, &config).await?;
    created(names.len());
    let names = Arc::new(names);
    let own = names.iter().cloned().collect();
    let leases = nodes::keep_alive(client.clone(), config.clone(), names, stop.clone());
    let pods = pods::run(client, config, own, stop);
    tokio::join!(leases, pods);
    Ok(())
}

/// Removes every simulated node of the cluster, with its lease and the pods that are bound to it.
pub async fn remove(client: &Client) -> Result<usize, Error> {
    nodes::remove(client).await
}
