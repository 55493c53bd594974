//! Network policies on one node: who may open connections to and from its pods. `objects` reads what the API has,
//! `compile` turns it into elements of sets, step by step and without I/O, `table` brings these into the kernel, and
//! `gate` lets the CNI plugin wait for it. Policies of administrators, where they are installed, come by `tiers`. The loop
//! here brings them together.
//!
//! The rules stay when it ends: policies are in force while skiff restarts. At a start nothing in the kernel is changed
//! before all policies, pods and namespaces have been seen.

mod blocks;
mod compare;
mod compile;
mod decisions;
mod gate;
mod judge;
mod lookup;
mod objects;
mod ports;
mod table;
mod tiers;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::{Namespace, Node};
use k8s_openapi::api::networking::v1::NetworkPolicy;
use skiff_client::{Change, Client, InformerFactory, Key};
use tokio::time::{Instant, MissedTickBehavior};
use tokio_util::sync::CancellationToken;

use gate::Shared;
pub use judge::{Judgement, Party, Rulebook, TierVerdict};
pub use lookup::{KernelVerdict, Packet, look_up};
use objects::{NodeFacts, PodFacts, Policy, PolicyPod};
use table::Table;
pub use tiers::{TIER_GROUP, TIER_RESOURCES, TierPolicy, list_tier_policies, run_status};

use crate::dns_endpoints;
use crate::nft::{Touched, Watch};

/// Changes that come together are applied together.
const SETTLE: Duration = Duration::from_millis(1);
/// How often the kernel's rules are compared if any nftables rules of the machine have changed, and not only what others are
/// announced to have changed.
const VERIFY_PERIOD: Duration = Duration::from_secs(60);
const MAX_RETRY: Duration = Duration::from_secs(5);

/// Pods that have ended have no address any more.
const LIVING_PODS: &str = "status.phase!=Succeeded,status.phase!=Failed";

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("netlink: {0}")]
    Netlink(#[from] nlink::Error),
    #[error("the socket {path}: {source}")]
    Socket {
        path: PathBuf,
        #[source]
        source: std::io::Error,
    },
}

/// The way of a connection, seen from the pod.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Direction {
    Ingress,
    Egress,
}

impl Direction {
    const BOTH: [Direction; 2] = [Direction::Ingress, Direction::Egress];

    fn name(self) -> &'static str {
        match self {
            Direction::Ingress => "ingress",
            Direction::Egress => "egress",
        }
    }
}

#[derive(Debug, Clone)]
pub struct PolicyConfig {
    pub node_name: String,
    /// The pods' bridge: whoever is behind it is a pod of this node.
    pub bridge: String,
    /// The nftables table; one a cluster and node.
    pub table: String,
    /// Where the CNI plugin asks whether a pod's policies are in force.
    pub socket: PathBuf,
}

/// Runs until `shutdown`.
pub async fn run(config: PolicyConfig, client: Client, shutdown: CancellationToken) -> Result<(), Error> {
    // Subscriptions end with this run.
    let ended = shutdown.child_token();
    let _end = ended.clone().drop_guard();
    let factory = InformerFactory::new(client.clone(), ended.clone());
    let shared = Arc::new(Shared::new(&config.node_name));
    let mut tiers = tiers::Watch::new(client.clone(), &factory, &ended);
    let all = async {
        let (policies, ()) = tokio::join!(tiers.known(), follow(&factory, &shared));
        shared.tell(|compiler| compiler.set_tier_policies(policies));
    };
    tokio::select! {
        () = all => {}
        () = shutdown.cancelled() => return Ok(()),
    }
    let mut table = Table::open(&config)?;
    let mut watch = Table::watch(&config)?;
    let mut gate = None;
    let mut verify = tokio::time::interval_at(Instant::now() + VERIFY_PERIOD, VERIFY_PERIOD);
    verify.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut retry = Duration::ZERO;
    loop {
        match sync(&shared, &mut table, &mut watch).await {
            Ok(()) => {
                retry = Duration::ZERO;
                if gate.is_none() {
                    let serving = gate::serve(gate::listen(&config)?, shared.clone(), client.clone());
                    gate = Some(AbortOnDrop(tokio::spawn(serving)));
                }
            }
            Err(error) => {
                retry = (retry * 2).clamp(Duration::from_millis(100), MAX_RETRY);
                tracing::error!(%error, again_in = ?retry, "cannot bring the network policies into the kernel");
            }
        }
        tokio::select! {
            () = shutdown.cancelled() => return Ok(()),
            () = shared.changed.notified() => tokio::time::sleep(SETTLE).await,
            () = tiers.changed() => {
                if let Some(policies) = tiers.policies() {
                    shared.tell(|compiler| compiler.set_tier_policies(policies));
                }
            }
            () = tokio::time::sleep(retry), if !retry.is_zero() => {}
            // What is not as it should be is made anew by the next round, at once.
            () = watch.changed() => {
                for touched in watch.take() {
                    compare(&shared, &mut table, &touched, None).await;
                }
            }
            _ = verify.tick() => compare(&shared, &mut table, &Touched::default(), Some(&mut watch)).await,
        }
    }
}

/// Compares the kernel's table with what the compiler last gave it. If that cannot be done, the table is made anew.
async fn compare(shared: &Shared, table: &mut Table, touched: &Touched, watch: Option<&mut Watch>) {
    let wanted = || shared.compiler.lock().elements().collect();
    if let Err(error) = table.is_as_wanted(touched, watch, wanted).await {
        tracing::warn!(%error, "cannot look at the network policies' table; making it anew");
    }
}

struct AbortOnDrop(tokio::task::JoinHandle<()>);

impl Drop for AbortOnDrop {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// Brings what has changed into the kernel.
async fn sync(shared: &Shared, table: &mut Table, watch: &mut Watch) -> Result<(), Error> {
    let start = Instant::now();
    let loads = !table.stands();
    let (delta, all, count, numbers) = {
        let mut compiler = shared.compiler.lock();
        let delta = compiler.compile();
        let all: Vec<_> = match loads {
            true => compiler.elements().collect(),
            false => Vec::new(),
        };
        (delta, all, *shared.told.borrow(), compiler.counts())
    };
    let compiled = start.elapsed();
    let (removed, added) = (delta.removed.len(), delta.added.len());
    table.apply(&delta, all.into_iter()).await?;
    shared.in_force.send_replace(count);
    if loads {
        table.prime(watch).await;
    }
    if removed + added > 0 {
        let (isolations, identities) = numbers;
        tracing::debug!(removed, added, isolations, identities, ?compiled, total = ?start.elapsed(), "policies applied");
    }
    Ok(())
}

/// Has the compiler told of all that policies depend on, and returns when it has been told of everything.
async fn follow(factory: &InformerFactory, shared: &Arc<Shared>) {
    let namespaces = factory.informer::<Namespace>();
    let told = shared.clone();
    namespaces.subscribe(move |change| {
        let namespace = change.object();
        let labels = present(change).map(|namespace| namespace.metadata.labels.clone().unwrap_or_default());
        let name = namespace.metadata.name.as_deref().unwrap_or_default();
        told.tell(|compiler| compiler.set_namespace(name, labels));
    });
    let policies = factory.informer::<NetworkPolicy>();
    let told = shared.clone();
    policies.subscribe(move |change| {
        let key = Key::of(&**change.object());
        let policy = present(change).map(Policy::of);
        told.tell(|compiler| compiler.set_policy(&key, policy));
    });
    let pods = factory.partial::<PolicyPod>(None, Some(LIVING_PODS));
    let told = shared.clone();
    pods.subscribe(move |change| {
        let key = Key::of(&**change.object());
        let facts = present(change).and_then(PodFacts::of);
        told.tell(|compiler| compiler.set_pod(&key, facts));
    });
    let nodes = factory.informer::<Node>();
    let told = shared.clone();
    nodes.subscribe(move |change| {
        let name = change.object().metadata.name.clone().unwrap_or_default();
        // No pod can have such a name.
        let key = Key::new(dns_endpoints::NAMESPACE, format!("node/{name}"));
        let facts = present(change).and_then(PodFacts::dns_of);
        told.tell(|compiler| compiler.set_pod(&key, facts));
        let facts = present(change).map(NodeFacts::of);
        told.tell(|compiler| compiler.set_node(&name, facts));
    });
    tokio::join!(
        namespaces.synced(),
        policies.synced(),
        pods.synced(),
        nodes.synced()
    );
}

/// The object of a change, unless it is gone.
fn present<K>(change: &Change<K>) -> Option<&K> {
    match change {
        Change::Applied { new, .. } => Some(new),
        Change::Deleted { .. } => None,
    }
}

/// Removes the table and with it all rules. Not having it is fine.
pub async fn remove(config: &PolicyConfig) -> Result<(), Error> {
    Table::open(config)?.remove().await
}
