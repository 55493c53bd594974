//! The sockets: UDP and TCP on one address. What is known is answered at once; a question that has to wait becomes a task,
//! bounded in number, in all and for one peer, so that none can starve the others.
//!
//! Who is outside of the cluster gets no answer at all: an address of this machine can be reached through every
//! interface, and must be neither an open resolver nor an amplifier of forged questions. (Binding to interfaces
//! will not do: what this machine asks by the service's address comes from an address of another interface, and
//! the answer would not find back.)

use crate::clients::{Peers, Rate};
use crate::cluster::Cluster;
use crate::follow::{Follower, Settings};
use crate::gateways::Gateways;
use crate::metrics::{Drop, Metrics};
use crate::names::absolute;
use crate::respond::{self, Responder};
use crate::zone::Records;
use futures::FutureExt;
use skiff_client::{Client, EventRecorder, InformerFactory};
use skiff_meta::net::Cidr;
use socket2::{Domain, Protocol, Socket, Type};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::panic::AssertUnwindSafe;
use std::path::PathBuf;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;
use thiserror::Error;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream, UdpSocket};
use tokio::sync::Semaphore;
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;

/// Questions by UDP that wait for a resolver at once; more are dropped. Those about the cluster never wait.
const MAX_IN_FLIGHT: usize = 1024;
/// Of one peer; more are dropped, as its own resolver asks again.
const MAX_IN_FLIGHT_OF_PEER: usize = 128;
/// Questions by UDP of one pod in `RATE_INTERVAL`: 10,000 a second.
const RATE_OF_PEER: u32 = 1000;
const RATE_INTERVAL: Duration = Duration::from_millis(100);
/// Connections at once: in all, and of one peer.
const MAX_CONNECTIONS: usize = 256;
const MAX_CONNECTIONS_OF_PEER: usize = 16;
const TCP_IDLE: Duration = Duration::from_secs(10);
/// A question by UDP is far shorter.
const MAX_QUESTION: usize = 4096;

#[derive(Clone)]
pub struct DnsConfig {
    pub listen: Listen,
    /// The pods' networks; besides pods, only this machine itself is answered.
    pub pods: Vec<Cidr>,
    /// The cluster domain, `cluster.local`.
    pub domain: String,
    /// Whose resolvers are asked for foreign names, where the Corefile says `/etc/resolv.conf`.
    pub resolv_conf: PathBuf,
    /// Addresses of cluster DNS, which are never asked for foreign names.
    pub own: Vec<IpAddr>,
    /// As Events name this machine.
    pub node_name: String,
    pub metrics: Arc<Metrics>,
}

/// Where questions come to.
#[derive(Debug, Clone)]
pub enum Listen {
    /// Addresses that the host may not have yet.
    On(Vec<SocketAddr>),
    /// Port 53 of the gateways of this Node's pod networks, once it has them.
    Gateways { node: String },
}

#[derive(Debug, Error)]
pub enum Error {
    #[error("cluster DNS cannot listen on {0}: {1}")]
    Bind(SocketAddr, std::io::Error),
    #[error("the node's pod networks changed; cluster DNS starts again on their gateways")]
    Moved,
    #[error("{0:?} is not a DNS domain")]
    Domain(String),
    #[error("cluster DNS cannot start: {0}")]
    Start(String),
}

struct Server<R> {
    responder: Arc<Responder<R>>,
    in_flight: Arc<Semaphore>,
    connections: Arc<Semaphore>,
    /// Questions by UDP that wait, and connections, of each peer.
    asking: Peers,
    connected: Peers,
    pods: Vec<Cidr>,
}

/// Whether an address is one of this machine's: what goes to such an address leaves from it. No packet is sent.
fn is_own(address: IpAddr) -> bool {
    let any: IpAddr = match address {
        IpAddr::V4(_) => Ipv4Addr::UNSPECIFIED.into(),
        IpAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
    };
    let source = || -> std::io::Result<IpAddr> {
        let socket = std::net::UdpSocket::bind((any, 0))?;
        socket.connect((address, 9))?;
        Ok(socket.local_addr()?.ip())
    };
    address.is_loopback() || source().is_ok_and(|source| source == address)
}

/// Serves until `shutdown`. Answers begin once the informers have their first list.
pub async fn run(config: DnsConfig, client: Client, shutdown: CancellationToken) -> Result<(), Error> {
    // What was started for this run ends with it, also if that is before the shutdown.
    let ended = shutdown.child_token();
    let _ends = ended.clone().drop_guard();
    let factory = InformerFactory::new(client.clone(), ended);
    absolute(&config.domain).ok_or_else(|| Error::Domain(config.domain.clone()))?;
    let (mut own, mut moved) = (config.own, None);
    let addresses = match config.listen {
        Listen::On(addresses) => addresses,
        Listen::Gateways { node } => {
            let Some(gateways) = Gateways::follow(&factory, &node).known(&shutdown).await else {
                return Ok(());
            };
            moved = Some(gateways);
            moved
                .iter()
                .flat_map(|gateways| gateways.addresses.clone())
                .collect()
        }
    };
    let listening = addresses.iter().map(|address: &SocketAddr| address.ip());
    // Other programs of this machine share its loopback addresses.
    own.extend(listening.filter(|ip| !ip.is_loopback()));
    let settings = Settings {
        domain: config.domain,
        resolv_conf: config.resolv_conf,
        own,
        metrics: config.metrics.clone(),
    };
    let active = settings.first().await.map_err(Error::Start)?;
    let responder = Responder::new(Cluster::new(&factory), active, config.metrics);
    let server = Arc::new(Server::new(responder, config.pods));
    let mut sockets = Vec::new();
    for address in addresses {
        let failed = |e| Error::Bind(address, e);
        let udp = listen_udp(address).map_err(failed)?;
        sockets.push((udp, listen_tcp(address).map_err(failed)?));
    }
    let recorder = EventRecorder::new(client, "coredns", &config.node_name);
    let mut follower = Follower::new(&factory, server.responder.clone(), settings, recorder);
    let ready = async {
        server.responder.records.synced().await;
        follower.start().await;
    };
    tokio::select! {
        () = shutdown.cancelled() => return Ok(()),
        () = ready => {}
    }
    let serving = sockets
        .into_iter()
        .map(|(udp, tcp)| serve(server.clone(), udp, tcp));
    tokio::select! {
        () = shutdown.cancelled() => Ok(()),
        _ = futures::future::join_all(serving) => Ok(()),
        () = follower.run() => Ok(()),
        () = Gateways::changed(moved) => Err(Error::Moved),
    }
}

async fn serve<R: Records + Send + Sync + 'static>(server: Arc<Server<R>>, udp: UdpSocket, tcp: TcpListener) {
    tokio::join!(
        serve_udp(Arc::clone(&server), Arc::new(udp)),
        serve_tcp(server, tcp)
    );
}

fn listen(bind: SocketAddr, kind: Type, protocol: Protocol) -> std::io::Result<Socket> {
    let socket = Socket::new(Domain::for_address(bind), kind, Some(protocol))?;
    socket.set_nonblocking(true)?;
    match bind {
        SocketAddr::V4(_) => socket.set_freebind_v4(true)?,
        SocketAddr::V6(_) => socket.set_freebind_v6(true)?,
    }
    if kind == Type::STREAM {
        socket.set_reuse_address(true)?;
    }
    socket.bind(&bind.into())?;
    Ok(socket)
}

fn listen_udp(bind: SocketAddr) -> std::io::Result<UdpSocket> {
    UdpSocket::from_std(listen(bind, Type::DGRAM, Protocol::UDP)?.into())
}

fn listen_tcp(bind: SocketAddr) -> std::io::Result<TcpListener> {
    let socket = listen(bind, Type::STREAM, Protocol::TCP)?;
    socket.listen(128)?;
    TcpListener::from_std(socket.into())
}

async fn serve_udp<R: Records + Send + Sync + 'static>(server: Arc<Server<R>>, socket: Arc<UdpSocket>) {
    let mut buffer = vec![0; MAX_QUESTION];
    let mut rate = Rate::new(RATE_OF_PEER, RATE_INTERVAL);
    let local = socket.local_addr().ok().map(|address| address.ip());
    loop {
        let (length, peer) = match socket.recv_from(&mut buffer).await {
            Ok(received) => received,
            Err(error) => {
                // A peer that is gone is reported on the next receive; it says nothing about the socket.
                tracing::debug!(%error, "receive failed");
                continue;
            }
        };
        let metrics = &server.responder.metrics;
        match server.is_pod(peer.ip()) {
            true if !rate.allows(peer.ip()) => {
                metrics.dropped(Drop::ClientRate);
                continue;
            }
            false if !is_own(peer.ip()) => {
                metrics.dropped(Drop::Outside);
                continue;
            }
            _ => {}
        }
        let client = respond::Client {
            peer,
            local,
            over_tcp: false,
        };
        let mut answering = Box::pin(server.answer(buffer[..length].to_vec(), client));
        // Most answers are known: no task is made for them.
        if let Poll::Ready(answer) = futures::poll!(&mut answering) {
            if let Some(answer) = answer {
                let _ = socket.send_to(&answer, peer).await;
            }
            continue;
        }
        let Some(turn) = server.asking.take(peer.ip()) else {
            metrics.dropped(Drop::ClientQuestions);
            continue;
        };
        let Ok(permit) = Arc::clone(&server.in_flight).try_acquire_owned() else {
            metrics.dropped(Drop::Questions);
            continue;
        };
        let socket = Arc::clone(&socket);
        tokio::spawn(async move {
            if let Some(answer) = answering.await {
                let _ = socket.send_to(&answer, peer).await;
            }
            drop((permit, turn));
        });
    }
}

async fn serve_tcp<R: Records + Send + Sync + 'static>(server: Arc<Server<R>>, listener: TcpListener) {
    loop {
        let Ok(permit) = Arc::clone(&server.connections).acquire_owned().await else {
            return;
        };
        match listener.accept().await {
            Ok((stream, peer)) => {
                if !server.is_pod(peer.ip()) && !is_own(peer.ip()) {
                    server.responder.metrics.dropped(Drop::Outside);
                    continue;
                }
                let Some(turn) = server.connected.take(peer.ip()) else {
                    server.responder.metrics.dropped(Drop::ClientConnections);
                    continue;
                };
                let server = Arc::clone(&server);
                tokio::spawn(async move {
                    if let Err(error) = server.converse(stream, peer).await {
                        tracing::debug!(%error, "connection ended");
                    }
                    drop((turn, permit));
                });
            }
            Err(error) => {
                tracing::warn!(%error, "cannot accept");
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
        }
    }
}

impl<R: Records + Send + Sync + 'static> Server<R> {
    fn new(responder: Responder<R>, pods: Vec<Cidr>) -> Server<R> {
        Server {
            responder: Arc::new(responder),
            pods,
            in_flight: Arc::new(Semaphore::new(MAX_IN_FLIGHT)),
            connections: Arc::new(Semaphore::new(MAX_CONNECTIONS)),
            asking: Peers::new(MAX_IN_FLIGHT_OF_PEER),
            connected: Peers::new(MAX_CONNECTIONS_OF_PEER),
        }
    }

    fn is_pod(&self, peer: IpAddr) -> bool {
        self.pods.iter().any(|pods| pods.contains(peer))
    }

    /// The answer to a question. A panic ends that question.
    fn answer(
        &self,
        question: Vec<u8>,
        client: respond::Client,
    ) -> impl Future<Output = Option<Vec<u8>>> + Send + 'static {
        let metrics = self.responder.metrics.clone();
        let answering = self.responder.clone().respond(question, client);
        AssertUnwindSafe(answering).catch_unwind().map(move |answer| {
            answer.unwrap_or_else(|panic| {
                metrics.panicked();
                skiff_supervise::failed("dns", skiff_supervise::panic_text(&*panic));
                None
            })
        })
    }

    async fn converse(&self, mut stream: TcpStream, peer: SocketAddr) -> std::io::Result<()> {
        let client = respond::Client {
            peer,
            local: stream.local_addr().ok().map(|address| address.ip()),
            over_tcp: true,
        };
        loop {
            let Ok(length) = timeout(TCP_IDLE, stream.read_u16()).await else {
                return Ok(());
            };
            let mut question = vec![0; usize::from(length?)];
            timeout(TCP_IDLE, stream.read_exact(&mut question)).await??;
            let Some(answer) = self.answer(question, client).await else {
                return Ok(());
            };
            let length = u16::try_from(answer.len()).map_err(std::io::Error::other)?;
            let mut framed = length.to_be_bytes().to_vec();
            framed.extend(answer);
            timeout(TCP_IDLE, stream.write_all(&framed)).await??;
        }
    }
}

#[cfg(test)]
#[path = "server_tests.rs"]
mod tests;
