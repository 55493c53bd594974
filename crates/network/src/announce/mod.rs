//! Announces addresses of the load balancer's pool on the node's link, by ARP and neighbour discovery: of the nodes that may,
//! exactly one answers for each address, and another one takes over within two seconds when it dies.
//!
//! `wanted` says which addresses and which nodes, `contest` who of them answers, `devices` brings that into the kernel, `wire`
//! and `socket` speak with the other machines on the link. Nothing of it needs an API server once the objects have been
//! read, and what it costs depends on the number of addresses, not on that of nodes.

mod contest;
mod devices;
mod socket;
mod wanted;
mod wire;

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::net::IpAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use k8s_openapi::api::core::v1::{Node, Service};
use k8s_openapi::api::discovery::v1::EndpointSlice;
use skiff_client::{Client, EventRecorder, Informer, InformerFactory};
use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;

use crate::load_balancer::{BalancerNode, index_by_service, local_nodes, pool_addresses, wake};
use contest::{Action, Contest};
use devices::{Device, Kernel, RENEW_PERIOD, device_for};
use socket::{PacketSocket, Received};
use wanted::{Wanted, rank, wanted};
use wire::{ETHERTYPE_ARP, ETHERTYPE_IPV6, Frame};

const COMPONENT: &str = "skiff-load-balancer";
/// Changes that come together are looked at together.
const SETTLE: Duration = Duration::from_millis(20);
/// How often the machine's devices are read again.
const DEVICES_PERIOD: Duration = Duration::from_secs(5);

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("netlink: {0}")]
    Netlink(#[from] nlink::Error),
    #[error("packet socket: {0}")]
    Socket(#[source] io::Error),
    #[error("{}: {source}", path.display())]
    File {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
}

#[derive(Debug, Clone)]
pub struct AnnounceConfig {
    pub node_name: String,
    /// Where it is remembered which addresses the kernel has from us.
    pub state_dir: PathBuf,
    /// The pod network's devices: nobody outside is reached by them.
    pub skipped_devices: Vec<String>,
}

/// Takes all addresses from the kernel.
pub async fn remove(config: &AnnounceConfig) -> Result<(), Error> {
    let mut kernel = Kernel::open(&config.state_dir)?;
    for address in kernel.ours() {
        kernel.release(address).await?;
    }
    Ok(())
}

/// Runs until `stop`. The kernel goes on answering for a while, so that skiff can be restarted.
pub async fn run(config: AnnounceConfig, client: Client, stop: CancellationToken) -> Result<(), Error> {
    // Informers end with this run.
    let ended = stop.child_token();
    let _end = ended.clone().drop_guard();
    let factory = InformerFactory::new(client.clone(), ended);
    let changed = Arc::new(Notify::new());
    let services = factory.informer::<Service>();
    wake(&services, &changed);
    tokio::select! {
        () = services.synced() => {}
        () = stop.cancelled() => return Ok(()),
    }
    // Most clusters have no pool: then nothing else is read, and no packet looked at.
    let kernel = Kernel::open(&config.state_dir)?;
    while kernel.ours().is_empty()
        && services
            .list()
            .iter()
            .all(|service| pool_addresses(service).is_empty())
    {
        tokio::select! {
            () = changed.notified() => {}
            () = stop.cancelled() => return Ok(()),
        }
    }
    let objects = Objects {
        services,
        nodes: factory.informer::<Node>(),
        slices: factory.informer::<EndpointSlice>(),
    };
    index_by_service(&objects.slices);
    wake(&objects.nodes, &changed);
    wake(&objects.slices, &changed);
    tokio::select! {
        // What is not read yet must not look like what is gone.
        () = async { tokio::join!(objects.nodes.synced(), objects.slices.synced()); } => {}
        () = stop.cancelled() => return Ok(()),
    }
    let speaker = Speaker {
        events: EventRecorder::new(client, COMPONENT, &config.node_name),
        arp: PacketSocket::open(ETHERTYPE_ARP).map_err(Error::Socket)?,
        ndp: PacketSocket::open(ETHERTYPE_IPV6).map_err(Error::Socket)?,
        config,
        kernel,
        devices: Vec::new(),
        turns: BTreeMap::new(),
        wanted: BTreeMap::new(),
        lasting: false,
        started: false,
    };
    tokio::select! {
        ended = speaker.run(&objects, &changed) => ended,
        () = stop.cancelled() => Ok(()),
    }
}

struct Objects {
    services: Informer<Service>,
    nodes: Informer<Node>,
    slices: Informer<EndpointSlice>,
}

/// The contest for one address, on the device where it takes place.
struct Turn {
    contest: Contest,
    device: Device,
    due: Option<Instant>,
}

struct Speaker {
    config: AnnounceConfig,
    events: EventRecorder,
    arp: PacketSocket,
    ndp: PacketSocket,
    kernel: Kernel,
    devices: Vec<Device>,
    turns: BTreeMap<IpAddr, Turn>,
    wanted: BTreeMap<IpAddr, Wanted>,
    /// This is the only machine.
    lasting: bool,
    started: bool,
}

impl Speaker {
    async fn run(mut self, objects: &Objects, changed: &Notify) -> Result<(), Error> {
        let mut renew = tokio::time::interval(RENEW_PERIOD);
        let mut look = tokio::time::interval(DEVICES_PERIOD);
        for timer in [&mut renew, &mut look] {
            timer.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        }
        self.plan(objects).await?;
        loop {
            let due = self.tick().await?;
            let wait = async {
                match due {
                    Some(due) => tokio::time::sleep_until(due.into()).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                // Answers that have arrived count before silence does.
                biased;
                received = self.arp.receive() => self.received(ETHERTYPE_ARP, received).await?,
                received = self.ndp.receive() => self.received(ETHERTYPE_IPV6, received).await?,
                () = changed.notified() => {
                    tokio::time::sleep(SETTLE).await;
                    self.plan(objects).await?;
                }
                _ = renew.tick() => self.renew().await,
                _ = look.tick() => self.plan(objects).await?,
                () = wait => {}
            }
        }
    }

    /// Looks at all objects and devices, and finds out what this machine may announce.
    async fn plan(&mut self, objects: &Objects) -> Result<(), Error> {
        let (devices, present) = self.kernel.devices(&self.config.skipped_devices).await?;
        self.devices = devices;
        let nodes = objects.nodes.list();
        self.lasting = nodes.len() == 1;
        let ready: Vec<BalancerNode> = nodes.iter().filter_map(|node| BalancerNode::of(node)).collect();
        let addresses: BTreeMap<String, Vec<IpAddr>> = nodes.iter().map(addresses_of).collect();
        let own = addresses.get(&self.config.node_name).cloned().unwrap_or_default();
        let services = objects.services.list();
        let wanted = wanted(services.iter().map(|service| &**service), &ready, |service| {
            local_nodes(service, &objects.slices)
        });
        let now = Instant::now();
        let gone: BTreeSet<IpAddr> = self.turns.keys().copied().chain(self.kernel.ours()).collect();
        for address in gone.into_iter().filter(|address| !wanted.contains_key(address)) {
            self.turns.remove(&address);
            self.release(address, "no Service has it any more").await;
        }
        for (address, entry) in &wanted {
            let is_machines = self
                .devices
                .iter()
                .any(|device| device.networks.iter().any(|(own, _)| own == address));
            let device = device_for(*address, &self.devices, &own).filter(|_| !is_machines);
            let Some(device) = device.cloned() else {
                if self.turns.remove(address).is_some() {
                    self.release(*address, "no device to announce it on").await;
                }
                continue;
            };
            // A machine on another link neither hears nor helps.
            let near = entry.nodes.iter().filter(|name| {
                **name == self.config.node_name
                    || addresses
                        .get(*name)
                        .is_some_and(|all| all.iter().any(|address| device.is_on_link(*address)))
            });
            let place = rank(*address, near, &self.config.node_name);
            let elsewhere = self.turns.get(address).is_some_and(|turn| {
                (turn.device.index, turn.device.hardware) != (device.index, device.hardware)
            });
            if elsewhere {
                self.turns.remove(address);
                self.release(*address, "its device has changed").await;
            }
            let turn = self.turns.entry(*address).or_insert_with(|| Turn {
                contest: Contest::new(
                    *address,
                    device.hardware,
                    !self.started && present.contains(address),
                    now,
                ),
                device: device.clone(),
                due: Some(now),
            });
            turn.device = device;
            turn.contest.set_rank(place, now);
            if self.wanted.get(address).map(|before| &before.nodes) != Some(&entry.nodes) {
                turn.contest.refresh(now);
            }
            turn.due = Some(now);
        }
        self.started = true;
        self.wanted = wanted;
        Ok(())
    }

    /// Does what is due; answers when to come back.
    async fn tick(&mut self) -> Result<Option<Instant>, Error> {
        let now = Instant::now();
        let due: Vec<IpAddr> = self
            .turns
            .iter()
            .filter(|(_, turn)| turn.due.is_some_and(|due| due <= now))
            .map(|(address, _)| *address)
            .collect();
        for address in due {
            let Some(turn) = self.turns.get_mut(&address) else {
                continue;
            };
            let (action, due) = turn.contest.tick(now);
            turn.due = due;
            if let Some(action) = action {
                self.act(address, action).await;
            }
        }
        Ok(self.turns.values().filter_map(|turn| turn.due).min())
    }

    async fn received(&mut self, ethertype: u16, received: io::Result<Received>) -> Result<(), Error> {
        let received = match received {
            Ok(received) => received,
            // A device that went down says so once.
            Err(error) if error.raw_os_error() == Some(libc::ENETDOWN) => return Ok(()),
            Err(error) => return Err(Error::Socket(error)),
        };
        let Some((address, by)) = wire::claim(ethertype, &received.payload, received.from) else {
            return Ok(());
        };
        let now = Instant::now();
        let Some(turn) = self.turns.get_mut(&address) else {
            return Ok(());
        };
        if turn.device.index != received.device {
            return Ok(());
        }
        let held = turn.contest.held();
        let action = turn.contest.heard(by, now);
        if held {
            turn.due = Some(now);
        }
        if let Some(action) = action {
            self.act(address, action).await;
        }
        Ok(())
    }

    async fn act(&mut self, address: IpAddr, action: Action) {
        let Some(turn) = self.turns.get(&address) else {
            return;
        };
        let (device, source) = (turn.device.clone(), turn.device.link_local);
        match action {
            Action::Ask(to) => self.send(&device, &wire::question(address, device.hardware, source, to)),
            Action::Announce => {
                for frame in wire::announcement(address, device.hardware, source) {
                    self.send(&device, &frame);
                }
            }
            Action::Release => self.release(address, "another node has it").await,
            Action::Take => {
                if let Err(error) = self.kernel.hold(address, &device, self.lasting).await {
                    tracing::warn!(%address, device = device.name, %error, "cannot take an address of the load balancer");
                    if let Some(turn) = self.turns.get_mut(&address) {
                        turn.contest.failed(Instant::now());
                    }
                    return;
                }
                for frame in wire::announcement(address, device.hardware, source) {
                    self.send(&device, &frame);
                }
                tracing::info!(%address, device = device.name, "announcing an address of the load balancer");
                if let Some(wanted) = self.wanted.get(&address) {
                    let message = format!("{address} is announced by node {:?}", self.config.node_name);
                    self.events.event(&wanted.service, "Normal", "Announced", message);
                }
            }
        }
    }

    fn send(&self, device: &Device, frame: &Frame) {
        let socket = match frame.ethertype {
            ETHERTYPE_ARP => &self.arp,
            _ => &self.ndp,
        };
        if let Err(error) = socket.send(device.index, frame) {
            tracing::debug!(device = device.name, %error, "cannot send on the link");
        }
    }

    async fn release(&mut self, address: IpAddr, why: &str) {
        if !self.kernel.ours().contains(&address) {
            return;
        }
        match self.kernel.release(address).await {
            Ok(()) => tracing::info!(%address, why, "gave up an address of the load balancer"),
            // Its lifetime ends all the same.
            Err(error) => tracing::warn!(%address, %error, "cannot give up an address of the load balancer"),
        }
    }

    /// Lets the kernel answer for another while.
    async fn renew(&mut self) {
        let held: Vec<(IpAddr, Device)> = self
            .turns
            .iter()
            .filter(|(_, turn)| turn.contest.held())
            .map(|(address, turn)| (*address, turn.device.clone()))
            .collect();
        for (address, device) in held {
            if let Err(error) = self.kernel.hold(address, &device, self.lasting).await {
                tracing::warn!(%address, device = device.name, %error, "cannot renew an address of the load balancer");
                if let Some(turn) = self.turns.get_mut(&address) {
                    turn.contest.failed(Instant::now());
                    turn.due = Some(Instant::now());
                }
            }
        }
    }
}

fn addresses_of(node: &Arc<Node>) -> (String, Vec<IpAddr>) {
    let status = node.status.as_ref();
    let all = status.and_then(|status| status.addresses.as_ref());
    let addresses = all
        .into_iter()
        .flatten()
        .filter_map(|entry| entry.address.parse().ok());
    (
        node.metadata.name.clone().unwrap_or_default(),
        addresses.collect(),
    )
}
