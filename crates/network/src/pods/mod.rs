//! The pod network of one node: it follows the Node objects, and makes this machine's kernel forward packets between
//! its own pods and those of all other nodes. `peers` reads Nodes, `plan` decides without I/O, `links`, `firewall` and
//! `wireguard` talk to the kernel; the loop here brings them together.
//!
//! What it made stays when it ends: pods keep their connections while skiff restarts. It never removes anything
//! before it has seen all Nodes.

mod conf;
mod connections;
mod firewall;
mod links;
mod peers;
mod plan;
mod wireguard;

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::Node;
use kube::Api;
use kube::api::{Patch, PatchParams};
use nlink::netlink::nftables::Family;
use parking_lot::Mutex;
use skiff_client::{Change, Client, InformerFactory};
use skiff_cni::BridgeConf;
use skiff_meta::net::Cidr;
use tokio::sync::Notify;
use tokio::time::{Instant, MissedTickBehavior};
use tokio_util::sync::CancellationToken;

use connections::Connections;
use firewall::Firewall;
use links::Links;
use peers::Peers;
use plan::{Plan, plan};

use crate::nft::{Touched, Watch};

/// The UDP port of VXLAN packets between nodes, Linux's own.
pub const VXLAN_PORT: u16 = 8472;

/// The annotation of a Node whose cluster DNS answers, with its addresses.
pub const DNS_ANNOTATION: &str = "skiff.io/cluster-dns";
/// The annotation of a Node with its WireGuard key and port.
pub const WIREGUARD_ANNOTATION: &str = "skiff.io/wireguard";

/// Changes that come together are applied together.
const SETTLE: Duration = Duration::from_millis(2);
/// How often the kernel is compared with what it should have: devices and routes, and all rules, not only those that others are
/// announced to have changed.
const VERIFY_PERIOD: Duration = Duration::from_secs(30);
/// The tables: rules of the pod network, limits of connections, guards of the pods' interfaces, host ports of both families.
const WATCHED: usize = 5;
const MAX_RETRY: Duration = Duration::from_secs(5);

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("{0}")]
    Config(String),
    #[error("{what}: {source}")]
    Netlink {
        what: String,
        #[source]
        source: nlink::Error,
    },
    #[error("the pod bridge: {0}")]
    Bridge(#[from] skiff_cni::Error),
    #[error("{what}: {source}")]
    Io {
        what: String,
        #[source]
        source: std::io::Error,
    },
    #[error("{0}")]
    Unsupported(String),
    #[error("the WireGuard key {0} is damaged; remove it to get a new one")]
    Key(PathBuf),
    #[error("annotate the Node: {0}")]
    Annotate(#[from] kube::Error),
}

impl Error {
    fn netlink(what: impl Into<String>) -> impl FnOnce(nlink::Error) -> Error {
        let what = what.into();
        move |source| Error::Netlink { what, source }
    }

    fn io(what: impl Into<String>) -> impl FnOnce(std::io::Error) -> Error {
        let what = what.into();
        move |source| Error::Io { what, source }
    }
}

/// How packets reach the pods of other nodes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Mode {
    /// By a route where the other node is on the same link, else by VXLAN.
    #[default]
    Auto,
    /// By routes alone: all nodes are on one link, and pods get its whole MTU.
    Direct,
    /// By VXLAN, also on the same link.
    Vxlan,
    /// By WireGuard, encrypted.
    WireGuard,
}

impl std::str::FromStr for Mode {
    type Err = String;

    fn from_str(text: &str) -> Result<Mode, String> {
        match text {
            "auto" => Ok(Mode::Auto),
            "direct" => Ok(Mode::Direct),
            "vxlan" => Ok(Mode::Vxlan),
            "wireguard" => Ok(Mode::WireGuard),
            other => Err(format!("{other:?} is not one of auto, direct, vxlan, wireguard")),
        }
    }
}

#[derive(Debug, Clone)]
pub struct PodNetworkConfig {
    pub node_name: String,
    /// The pod networks of the whole cluster, at most one of each family. A Node whose `podCIDRs` lie elsewhere gets
    /// no route.
    pub cluster_cidrs: Vec<Cidr>,
    /// The CNI network's name.
    pub network: String,
    /// The pods' bridge; the devices to other nodes are named after it.
    pub bridge: String,
    /// The nftables table.
    pub table: String,
    /// Where the CNI configuration goes: once it is there, the node can take pods.
    pub cni_conf_dir: PathBuf,
    /// Where it goes as well, for a runtime that looks elsewhere.
    pub published: Option<PathBuf>,
    /// Where the plugin keeps which pod has which address.
    pub addresses_dir: PathBuf,
    /// Where the WireGuard key is kept.
    pub state_dir: PathBuf,
    pub mode: Mode,
    /// The pods' MTU; found out if there is none.
    pub mtu: Option<u32>,
    pub wireguard_port: u16,
    /// Whether cluster DNS listens on the gateways.
    pub dns: bool,
    /// Connections in the kernel's tracking that one pod may have; 0: any number. If it is not given, an eighth of all that the
    /// kernel tracks.
    pub connection_limit: Option<u32>,
    /// Where the CNI plugin asks for a pod's network policies to be in force (see `policy`).
    pub policy_socket: Option<PathBuf>,
}

impl PodNetworkConfig {
    fn validate(&self) -> Result<(), Error> {
        let families: Vec<bool> = self.cluster_cidrs.iter().map(|cidr| cidr.is_ipv4()).collect();
        if !matches!(families.as_slice(), [_]) && !matches!(families.as_slice(), [a, b] if a != b) {
            return Err(Error::Config(format!(
                "the cluster's pod networks are {:?}: there must be one, or one of each family",
                self.cluster_cidrs
            )));
        }
        // "-vxlan" must fit behind it.
        if self.bridge.is_empty() || self.bridge.len() > 9 {
            return Err(Error::Config(format!(
                "bridge {:?}: the name must have 1 to 9 characters",
                self.bridge
            )));
        }
        Ok(())
    }

    /// Reports what others change of the tables.
    fn watch(&self) -> Result<Watch, Error> {
        let host_ports = skiff_cni::host_ports_table(&self.network);
        let limits = connections::table_of(&self.network);
        let tables: [(Family, &str); WATCHED] = [
            (firewall::FAMILY, &self.table),
            (connections::FAMILY, &limits),
            (Family::Netdev, &self.bridge),
            (Family::Ip, &host_ports),
            (Family::Ip6, &host_ports),
        ];
        Watch::open(tables).map_err(Error::netlink("open netlink"))
    }

    fn vxlan(&self) -> String {
        format!("{}-vxlan", self.bridge)
    }

    fn wireguard(&self) -> String {
        format!("{}-wg", self.bridge)
    }

    /// The same on all nodes, and another for each cluster that a machine is part of: their pod networks differ.
    fn vni(&self) -> u32 {
        let text = self
            .cluster_cidrs
            .first()
            .map(Cidr::to_string)
            .unwrap_or_default();
        let hash = text.bytes().fold(0x811c_9dc5u32, |hash, byte| {
            (hash ^ u32::from(byte)).wrapping_mul(0x0100_0193)
        });
        1 + hash % 0x00ff_fffe
    }
}

/// Runs until `shutdown`.
pub async fn run(config: PodNetworkConfig, client: Client, shutdown: CancellationToken) -> Result<(), Error> {
    config.validate()?;
    let factory = InformerFactory::new(client.clone(), shutdown.clone());
    let nodes = factory.informer::<Node>();
    let peers = Arc::new(Mutex::new(Peers::default()));
    let changed = Arc::new(Notify::new());
    let (seen, news) = (peers.clone(), changed.clone());
    nodes.subscribe(move |change| {
        let gone = matches!(change, Change::Deleted { .. });
        // Most changes of a Node are of its status alone.
        if seen.lock().note(change.object(), gone) {
            news.notify_one();
        }
    });
    let mut watch = config.watch()?;
    let mut network = Network::open(config, client)?;
    let mut verify = tokio::time::interval_at(Instant::now() + VERIFY_PERIOD, VERIFY_PERIOD);
    verify.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut synced = false;
    let mut retry = Duration::ZERO;
    // A point in time: rules that change meanwhile, as they do for every pod that comes, must not put it off.
    let mut retry_at: Option<Instant> = None;
    loop {
        tokio::select! {
            () = shutdown.cancelled() => return Ok(()),
            // Routes to nodes that are only not read yet must not be removed.
            () = nodes.synced(), if !synced => synced = true,
            () = changed.notified(), if synced => tokio::time::sleep(SETTLE).await,
            () = tokio::time::sleep_until(retry_at.unwrap_or_else(Instant::now)), if retry_at.is_some() => {}
            _ = verify.tick() => {
                network.verify();
                if let Err(error) = network.restore(None, &mut watch).await {
                    tracing::warn!(%error, "cannot look at the pod network's rules");
                }
            }
            () = watch.changed() => {
                match network.restore(Some(&watch.take()), &mut watch).await {
                    Ok(()) => continue,
                    Err(error) => tracing::warn!(%error, "cannot look at the pod network's rules"),
                }
            }
        }
        if !synced {
            continue;
        }
        let peers = peers.lock().clone();
        match network.sync(&peers, &mut watch).await {
            Ok(()) => (retry, retry_at) = (Duration::ZERO, None),
            Err(error) => {
                retry = (retry * 2).clamp(Duration::from_millis(100), MAX_RETRY);
                retry_at = Some(Instant::now() + retry);
                tracing::error!(%error, again_in = ?retry, "cannot set up the pod network");
            }
        }
    }
}

/// Removes all that the pod network made on this machine. Not having it is fine.
pub async fn remove(config: &PodNetworkConfig) -> Result<(), Error> {
    config.validate()?;
    let links = Links::open(config)?;
    links.remove_routes(&config.cluster_cidrs).await?;
    links.remove_device(&config.vxlan()).await?;
    links.remove_device(&config.wireguard()).await?;
    Firewall::open(&config.table)?.remove().await?;
    Connections::open(&config.network, &config.bridge, None)?
        .remove()
        .await?;
    let mut bridge = BridgeConf::new(&config.bridge, [], &config.addresses_dir);
    bridge.name.clone_from(&config.network);
    skiff_cni::remove_host_ports(&bridge).await?;
    skiff_cni::remove_bridge(&config.bridge).await?;
    Ok(())
}

/// Takes the CNI configuration away again, for another network in the place of this one.
pub fn remove_cni_configuration(config: &PodNetworkConfig) -> Result<(), Error> {
    conf::remove(config)
}

/// This node's pod network, and what is known to be in the kernel.
struct Network {
    config: PodNetworkConfig,
    client: Client,
    links: Links,
    firewall: Firewall,
    connections: Connections,
    /// The bridge as it was last made; at the start, as the CNI configuration on disk has it.
    bridge: Option<BridgeConf>,
    /// The bridge was made, or looked at, since the start.
    bridge_stands: bool,
    reach: links::ReachCache,
    told: Vec<String>,
}

impl Network {
    fn open(config: PodNetworkConfig, client: Client) -> Result<Network, Error> {
        Ok(Network {
            links: Links::open(&config)?,
            firewall: Firewall::open(&config.table)?,
            connections: Connections::open(&config.network, &config.bridge, config.connection_limit)?,
            bridge: conf::remembered(&config),
            bridge_stands: false,
            reach: links::ReachCache::default(),
            told: Vec::new(),
            config,
            client,
        })
    }

    /// Has everything compared with the kernel at the next round.
    fn verify(&mut self) {
        self.bridge_stands = false;
        self.reach.clear();
    }

    /// Restores what somebody else has changed of the rules: those that are `touched`, or any, if that is `None`. What cannot be
    /// looked at keeps nothing else from being restored: nobody says again that it was touched.
    async fn restore(&mut self, touched: Option<&[Touched]>, watch: &mut Watch) -> Result<(), Error> {
        let all = touched.is_none();
        let nothing: [Touched; WATCHED] = Default::default();
        let [firewall, limits, guards, host_ports @ ..] = touched.unwrap_or(&nothing) else {
            return Ok(());
        };
        if all || !guards.is_empty() {
            self.restore_guards().await;
        }
        if all || host_ports.iter().any(|touched| !touched.is_empty()) {
            self.restore_host_ports().await;
        }
        let mut restored = Ok(());
        if all || !firewall.is_empty() {
            restored = self.firewall.restore(firewall, watch).await;
        }
        if all {
            self.connections.report().await;
        }
        if all || !limits.is_empty() {
            restored = restored.and(self.connections.restore(limits, watch).await);
        }
        restored
    }

    /// Whoever reloads the host's firewall may flush the guards of the pods' interfaces, too.
    async fn restore_guards(&self) {
        let Some(conf) = &self.bridge else { return };
        match skiff_cni::restore_guards(conf).await {
            Ok(0) => {}
            Ok(restored) => {
                tracing::warn!(
                    restored,
                    "somebody changed the guards of pod interfaces; restored them"
                )
            }
            Err(error) => tracing::warn!(%error, "cannot look at the guards of the pod interfaces"),
        }
    }

    async fn restore_host_ports(&self) {
        let Some(conf) = &self.bridge else { return };
        match skiff_cni::restore_host_ports(conf).await {
            Ok(false) => {}
            Ok(true) => tracing::warn!("somebody changed the rules of host ports; restored them"),
            Err(error) => tracing::warn!(%error, "cannot look at the rules of host ports"),
        }
    }

    async fn sync(&mut self, peers: &Peers, watch: &mut Watch) -> Result<(), Error> {
        let Some(own) = peers.get(&self.config.node_name) else {
            return Ok(());
        };
        if own.cidrs.is_empty() {
            return Ok(());
        }
        let underlay = self.links.underlay(own).await?;
        let reach = self.reach.look_up(&self.links, peers, own).await?;
        let plan = plan(&self.config, peers, own, &underlay, &reach)?;
        if plan.warnings != self.told {
            for warning in &plan.warnings {
                tracing::warn!("{warning}");
            }
            self.told.clone_from(&plan.warnings);
        }
        let wanted = conf::bridge_conf(&self.config, &plan);
        if !self.bridge_stands || !conf::same(self.bridge.as_ref(), &wanted) {
            skiff_cni::ensure_bridge(&wanted).await?;
            self.bridge = Some(wanted);
            self.bridge_stands = true;
        }
        self.firewall.apply(&plan.firewall, watch).await?;
        self.connections.apply(watch).await?;
        // From now on the runtime can give pods a network: this is what the node's readiness waits for.
        conf::write(&self.config, &plan)?;
        // A tunnel that cannot be made must not keep packets from taking direct routes.
        let tunnel = self.tunnel(&plan).await;
        let device = tunnel.as_ref().ok().copied().flatten();
        self.links
            .routes(&self.config.cluster_cidrs, &plan.routes, device)
            .await?;
        self.publish(own, &plan).await?;
        tunnel.map(drop)
    }

    /// Makes the device to other nodes, if one is needed, and answers its index.
    async fn tunnel(&mut self, plan: &Plan) -> Result<Option<u32>, Error> {
        let config = &self.config;
        if plan.vxlan.is_none() {
            self.links.remove_device(&config.vxlan()).await?;
        }
        if plan.wireguard.is_none() {
            self.links.remove_device(&config.wireguard()).await?;
        }
        if let Some(vxlan) = &plan.vxlan {
            return self.links.vxlan(&config.vxlan(), vxlan).await.map(Some);
        }
        if let Some(wanted) = &plan.wireguard {
            let device =
                wireguard::apply(&self.links, &config.wireguard(), &config.state_dir, wanted).await?;
            return Ok(Some(device));
        }
        Ok(None)
    }

    /// Tells others by annotations of the Node what they need to know of it.
    async fn publish(&self, own: &peers::Peer, plan: &Plan) -> Result<(), Error> {
        let mut wanted: BTreeMap<&str, Option<String>> = BTreeMap::new();
        let gateways: Vec<String> = plan.gateways.iter().map(IpAddr::to_string).collect();
        wanted.insert(DNS_ANNOTATION, self.config.dns.then(|| gateways.join(",")));
        let key = match self.config.mode {
            Mode::WireGuard => Some(wireguard::announcement(&self.config)?),
            _ => None,
        };
        wanted.insert(WIREGUARD_ANNOTATION, key);
        wanted.retain(|name, value| own.annotations.get(*name) != value.as_ref());
        if wanted.is_empty() {
            return Ok(());
        }
        let patch = serde_json::json!({"metadata": {"annotations": wanted}});
        let nodes: Api<Node> = Api::all(self.client.clone());
        nodes
            .patch(
                &self.config.node_name,
                &PatchParams::default(),
                &Patch::Merge(patch),
            )
            .await?;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use nlink::netlink::nftables::NFT_TABLE_F_OWNER;
    use nlink::netlink::{Connection, Nftables};

    #[test]
    fn clusters_have_their_own_virtual_networks() {
        let vni = |cidr: &str| {
            let config = plan::tests::config(&[cidr], Mode::Auto);
            config.validate().unwrap();
            config.vni()
        };
        assert_eq!(vni("10.244.0.0/16"), vni("10.244.3.0/16"));
        assert_ne!(vni("10.244.0.0/16"), vni("10.161.0.0/16"));
        assert!((1..1 << 24).contains(&vni("10.244.0.0/16")));
    }

    #[test]
    fn what_cannot_work_is_refused() {
        for cidrs in [
            &[][..],
            &["10.0.0.0/16", "10.1.0.0/16"],
            &["10.0.0.0/16", "fd00::/48", "fd01::/48"],
        ] {
            assert!(
                plan::tests::config(cidrs, Mode::Auto).validate().is_err(),
                "{cidrs:?}"
            );
        }
        assert!("sideways".parse::<Mode>().is_err());
        assert_eq!("wireguard".parse(), Ok(Mode::WireGuard));
    }

    /// A table that cannot be restored does not keep another one from coming back.
    #[test]
    fn each_table_is_restored() {
        if !rustix::process::geteuid().is_root() {
            return;
        }
        let tried = std::thread::spawn(|| {
            // SAFETY: only the network namespace changes, and the thread ends with the test.
            unsafe { rustix::thread::unshare_unsafe(rustix::thread::UnshareFlags::NEWNET) }.unwrap();
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
            runtime.unwrap().block_on(in_a_kernel());
        });
        tried.join().unwrap();
    }

    async fn in_a_kernel() {
        let mut config = plan::tests::config(&["10.244.0.0/16"], Mode::Auto);
        config.connection_limit = Some(100);
        let (rules, limits) = (config.table.clone(), connections::table_of(&config.network));
        let api = tower::service_fn(|_: http::Request<kube::client::Body>| async {
            Ok::<_, std::convert::Infallible>(http::Response::new(String::new()))
        });
        let mut watch = config.watch().unwrap();
        let mut network = Network::open(config, skiff_client::in_process(api, "default")).unwrap();
        let wanted = firewall::Rules {
            bridge: "skiff0".into(),
            tunnels: Vec::new(),
            own: vec!["10.244.0.0/24".parse().unwrap()],
            cluster: vec!["10.244.0.0/16".parse().unwrap()],
            nodes: Default::default(),
            vni: 1,
            vxlan_port: VXLAN_PORT,
            wireguard_port: 51820,
        };
        network.firewall.apply(&wanted, &mut watch).await.unwrap();
        network.connections.apply(&mut watch).await.unwrap();
        let other = Connection::<Nftables>::new().unwrap();
        for table in [&rules, &limits] {
            other.del_table(table.as_str(), Family::Inet).await.unwrap();
        }
        // What is a socket's own can be changed by nobody else.
        let owned = other.add_table_with_flags(rules.as_str(), Family::Inet, NFT_TABLE_F_OWNER);
        owned.await.unwrap();
        watch.changed().await;
        let touched = watch.take();
        let restored = network.restore(Some(&touched), &mut watch).await;
        assert!(restored.is_err(), "the rules are somebody else's");
        let tables = other.list_tables_in(Family::Inet).await.unwrap();
        assert!(tables.iter().any(|table| table.name == limits), "{tables:?}");
    }
}
