//! The sockets: UDP and TCP on one address, a task a question, bounded in number. Pods are not trusted to be
//! moderate: each kind of work has its own bound, in all and for one peer, so that none can starve the others.
//!
//! Who is outside of the cluster gets no answer at all: an address of this machine can be reached through every
//! interface, and must be neither an open resolver nor an amplifier of forged questions. (Binding to interfaces
//! will not do: what this machine asks by the service's address comes from an address of another interface, and
//! the answer would not find back.)

use crate::cluster::Cluster;
use crate::forward::Upstream;
use crate::respond::Responder;
use crate::zone::{Records, Zone};
use k8s_openapi::api::core::v1::Node;
use skiff_client::{Client, Informer, InformerFactory};
use skiff_meta::net::Cidr;
use socket2::{Domain, Protocol, Socket, Type};
use std::collections::HashMap;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::atomic::AtomicUsize;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use thiserror::Error;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream, UdpSocket};
use tokio::sync::{Notify, Semaphore};
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;

/// Questions by UDP worked on at once; more wait in the socket's buffer. More than may wait for resolvers, so
/// that there is always room for questions about the cluster.
const MAX_IN_FLIGHT: usize = 1024;
/// Of one peer; more are dropped, as its own resolver asks again.
const MAX_IN_FLIGHT_OF_PEER: usize = 128;
/// Connections at once: in all, and of one peer.
const MAX_CONNECTIONS: usize = 256;
const MAX_CONNECTIONS_OF_PEER: usize = 16;
/// Of the gateways.
const PORT: u16 = 53;
const TCP_IDLE: Duration = Duration::from_secs(10);

#[derive(Debug, Clone)]
pub struct DnsConfig {
    pub listen: Listen,
    /// The pods' networks; besides pods, only this machine itself is answered.
    pub pods: Vec<Cidr>,
    /// The cluster domain, `cluster.local`.
    pub domain: String,
    /// Where foreign names go.
    pub resolvers: Vec<SocketAddr>,
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
}

struct Server<R> {
    responder: Responder<R>,
    in_flight: Arc<Semaphore>,
    connections: Arc<Semaphore>,
    /// Questions by UDP and connections of each peer.
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
    let factory = InformerFactory::new(client, shutdown.clone());
    let zone = Zone::new(&config.domain).ok_or(Error::Domain(config.domain))?;
    let responder = Responder {
        zone,
        records: Cluster::new(&factory),
        upstream: Upstream::new(config.resolvers),
        turn: AtomicUsize::new(0),
    };
    let server = Arc::new(Server::new(responder, config.pods));
    let (addresses, moved) = match config.listen {
        Listen::On(addresses) => (addresses, None),
        Listen::Gateways { node } => {
            let Some(gateways) = Gateways::follow(&factory, &node).known(&shutdown).await else {
                return Ok(());
            };
            (gateways.addresses.clone(), Some(gateways))
        }
    };
    let mut sockets = Vec::new();
    for address in addresses {
        let failed = |e| Error::Bind(address, e);
        let udp = listen_udp(address).map_err(failed)?;
        sockets.push((udp, listen_tcp(address).map_err(failed)?));
    }
    tokio::select! {
        () = shutdown.cancelled() => return Ok(()),
        () = server.responder.records.synced() => {}
    }
    let serving = sockets
        .into_iter()
        .map(|(udp, tcp)| serve(server.clone(), udp, tcp));
    tokio::select! {
        () = shutdown.cancelled() => Ok(()),
        _ = futures::future::join_all(serving) => Ok(()),
        () = Gateways::changed(moved) => Err(Error::Moved),
    }
}

/// The gateways of a node's pod networks, which its Node says.
struct Gateways {
    node: Informer<Node>,
    news: Arc<Notify>,
    addresses: Vec<SocketAddr>,
}

impl Gateways {
    fn follow(factory: &InformerFactory, name: &str) -> Gateways {
        let node = factory.filtered::<Node>(None, Some(&format!("metadata.name={name}")));
        let news = Arc::new(Notify::new());
        let tell = news.clone();
        node.subscribe(move |_| tell.notify_one());
        Gateways {
            node,
            news,
            addresses: Vec::new(),
        }
    }

    fn current(&self) -> Vec<SocketAddr> {
        let nodes = self.node.list();
        let cidrs = nodes.iter().flat_map(|node| {
            let spec = node.spec.as_ref();
            spec.and_then(|spec| spec.pod_cidrs.clone()).unwrap_or_default()
        });
        cidrs
            .filter_map(|cidr| Some(SocketAddr::new(cidr.parse::<Cidr>().ok()?.nth(1)?, PORT)))
            .collect()
    }

    /// Waits until the node has networks; `None` at shutdown.
    async fn known(mut self, shutdown: &CancellationToken) -> Option<Gateways> {
        loop {
            self.addresses = self.current();
            if !self.addresses.is_empty() {
                return Some(self);
            }
            tokio::select! {
                () = shutdown.cancelled() => return None,
                () = self.news.notified() => {}
            }
        }
    }

    /// Waits until the node has other networks, as one has that was deleted and registered again.
    async fn changed(gateways: Option<Gateways>) {
        let Some(gateways) = gateways else {
            return std::future::pending().await;
        };
        loop {
            gateways.news.notified().await;
            let now = gateways.current();
            if !now.is_empty() && now != gateways.addresses {
                return;
            }
        }
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
    let mut buffer = vec![0; 4096];
    loop {
        let (length, peer) = match socket.recv_from(&mut buffer).await {
            Ok(received) => received,
            Err(error) => {
                // A peer that is gone is reported on the next receive; it says nothing about the socket.
                tracing::debug!(%error, "receive failed");
                continue;
            }
        };
        if !server.is_inside(peer.ip()) {
            continue;
        }
        let Some(turn) = server.asking.take(peer.ip()) else {
            continue;
        };
        let Ok(permit) = Arc::clone(&server.in_flight).acquire_owned().await else {
            return;
        };
        let (server, socket, question) = (
            Arc::clone(&server),
            Arc::clone(&socket),
            buffer[..length].to_vec(),
        );
        tokio::spawn(async move {
            if let Some(answer) = server.responder.respond(&question, false).await {
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
                if !server.is_inside(peer.ip()) {
                    continue;
                }
                let Some(turn) = server.connected.take(peer.ip()) else {
                    continue;
                };
                let server = Arc::clone(&server);
                tokio::spawn(async move {
                    if let Err(error) = converse(&server.responder, stream).await {
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

/// How much each peer has of something that is limited.
#[derive(Clone)]
struct Peers {
    limit: usize,
    /// A leaf lock.
    counts: Arc<Mutex<HashMap<IpAddr, usize>>>,
}

impl Peers {
    fn new(limit: usize) -> Peers {
        Peers {
            limit,
            counts: Arc::default(),
        }
    }

    /// One more for a peer, if it may have it.
    fn take(&self, peer: IpAddr) -> Option<Turn> {
        let mut counts = self.counts.lock().unwrap_or_else(PoisonError::into_inner);
        let count = counts.entry(peer).or_default();
        if *count >= self.limit {
            return None;
        }
        *count += 1;
        Some(Turn {
            peers: self.clone(),
            peer,
        })
    }
}

/// One of what a peer may have, until it is dropped.
struct Turn {
    peers: Peers,
    peer: IpAddr,
}

impl Drop for Turn {
    fn drop(&mut self) {
        let mut counts = self.peers.counts.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(count) = counts.get_mut(&self.peer) {
            *count -= 1;
            if *count == 0 {
                counts.remove(&self.peer);
            }
        }
    }
}

impl<R> Server<R> {
    fn new(responder: Responder<R>, pods: Vec<Cidr>) -> Server<R> {
        Server {
            responder,
            pods,
            in_flight: Arc::new(Semaphore::new(MAX_IN_FLIGHT)),
            connections: Arc::new(Semaphore::new(MAX_CONNECTIONS)),
            asking: Peers::new(MAX_IN_FLIGHT_OF_PEER),
            connected: Peers::new(MAX_CONNECTIONS_OF_PEER),
        }
    }

    fn is_inside(&self, peer: IpAddr) -> bool {
        self.pods.iter().any(|pods| pods.contains(peer)) || is_own(peer)
    }
}

async fn converse<R: Records>(responder: &Responder<R>, mut stream: TcpStream) -> std::io::Result<()> {
    loop {
        let Ok(length) = timeout(TCP_IDLE, stream.read_u16()).await else {
            return Ok(());
        };
        let mut question = vec![0; usize::from(length?)];
        timeout(TCP_IDLE, stream.read_exact(&mut question)).await??;
        let Some(answer) = responder.respond(&question, true).await else {
            return Ok(());
        };
        let length = u16::try_from(answer.len()).map_err(std::io::Error::other)?;
        let mut framed = length.to_be_bytes().to_vec();
        framed.extend(answer);
        timeout(TCP_IDLE, stream.write_all(&framed)).await??;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::zone::{Endpoint, Service};
    use hickory_proto::op::{Message, Query};
    use hickory_proto::rr::{Name, RecordType};
    use std::io::{Read, Write};
    use std::net::Ipv4Addr;
    use std::sync::mpsc;

    const ADDRESS: Ipv4Addr = Ipv4Addr::new(10, 1, 0, 1);
    struct Nothing;

    impl Records for Nothing {
        fn namespace_exists(&self, _: &str) -> bool {
            false
        }

        fn service(&self, _: &str, _: &str) -> Option<Service> {
            None
        }

        fn endpoints(&self, _: &str, _: &str) -> Vec<Endpoint> {
            Vec::new()
        }

        fn names_of(&self, _: IpAddr) -> Vec<(String, String, Option<String>)> {
            Vec::new()
        }
    }

    fn server() -> Arc<Server<Nothing>> {
        let responder = Responder {
            zone: Zone::new("cluster.local").unwrap(),
            records: Nothing,
            upstream: Upstream::new(Vec::new()),
            turn: AtomicUsize::new(0),
        };
        Arc::new(Server::new(responder, vec!["10.1.0.0/24".parse().unwrap()]))
    }

    fn question() -> Vec<u8> {
        let mut question = Message::query();
        let name = Name::from_ascii("cluster.local.").unwrap();
        question.add_query(Query::query(name, RecordType::A));
        question.to_vec().unwrap()
    }

    fn answered() -> [bool; 2] {
        answered_from("0.0.0.0")
    }

    /// Whether there is an answer, by UDP and by TCP.
    fn answered_from(source: &str) -> [bool; 2] {
        let (question, limit) = (question(), Duration::from_secs(2));
        let by_udp = || -> std::io::Result<usize> {
            let socket = std::net::UdpSocket::bind((source, 0))?;
            socket.set_read_timeout(Some(limit))?;
            socket.connect((ADDRESS, PORT))?;
            socket.send(&question)?;
            socket.recv(&mut [0; 512])
        };
        let by_tcp = || -> std::io::Result<()> {
            let socket = Socket::new(Domain::IPV4, Type::STREAM, None)?;
            let source: IpAddr = source.parse().map_err(std::io::Error::other)?;
            socket.bind(&SocketAddr::new(source, 0).into())?;
            socket.connect_timeout(&SocketAddr::from((ADDRESS, PORT)).into(), limit)?;
            let mut stream = std::net::TcpStream::from(socket);
            stream.set_read_timeout(Some(limit))?;
            stream.write_all(&(question.len() as u16).to_be_bytes())?;
            stream.write_all(&question)?;
            stream.read_exact(&mut [0; 12])
        };
        [by_udp().is_ok(), by_tcp().is_ok()]
    }

    fn ip(args: &str) {
        let done = std::process::Command::new("ip")
            .args(args.split_whitespace())
            .output();
        let done = done.unwrap();
        assert!(
            done.status.success(),
            "ip {args}: {}",
            String::from_utf8_lossy(&done.stderr)
        );
    }

    /// Runs `job` in a network namespace of its own; its thread's number comes first.
    fn in_namespace<T: Send + 'static>(
        job: impl FnOnce() -> T + Send + 'static,
    ) -> (i32, std::thread::JoinHandle<T>) {
        let (tell, told) = mpsc::channel();
        let thread = std::thread::spawn(move || {
            // SAFETY: only the network namespace of this thread changes.
            unsafe { rustix::thread::unshare_unsafe(rustix::thread::UnshareFlags::NEWNET) }.unwrap();
            tell.send(rustix::thread::gettid().as_raw_nonzero().get())
                .unwrap();
            job()
        });
        (told.recv().unwrap(), thread)
    }

    #[test]
    fn only_the_cluster_is_answered() {
        if !rustix::process::geteuid().is_root() {
            println!("skipped, it needs root");
            return;
        }
        let (_, machine) = in_namespace(|| {
            ip("link set lo up");
            ip("link add bridge type bridge");
            ip("address add 10.1.0.1/24 dev bridge");
            ip("link set bridge up");
            // A pod, and somebody outside who takes this machine for a router.
            let (go, gone) = (mpsc::channel(), mpsc::channel());
            let neighbour = |address: &'static str, gateway: &'static str, go: mpsc::Receiver<()>| {
                in_namespace(move || {
                    go.recv().unwrap();
                    ip(&format!("address add {address}/24 dev eth0"));
                    ip("link set eth0 up");
                    if !gateway.is_empty() {
                        ip(&format!("route add 10.1.0.0/24 via {gateway}"));
                    }
                    answered()
                })
            };
            let (pod, in_pod) = neighbour("10.1.0.2", "", go.1);
            let (outside, is_outside) = neighbour("192.0.2.2", "192.0.2.1", gone.1);
            ip(&format!("link add port type veth peer name eth0 netns {pod}"));
            ip("link set port master bridge up");
            ip(&format!(
                "link add uplink type veth peer name eth0 netns {outside}"
            ));
            ip("address add 192.0.2.1/24 dev uplink");
            ip("link set uplink up");

            let runtime = tokio::runtime::Builder::new_current_thread()
                .enable_all()
                .build()
                .unwrap();
            runtime.block_on(async {
                let bind = SocketAddr::from((ADDRESS, PORT));
                let (udp, tcp) = (listen_udp(bind).unwrap(), listen_tcp(bind).unwrap());
                let asked = tokio::task::spawn_blocking(move || {
                    go.0.send(()).unwrap();
                    gone.0.send(()).unwrap();
                    (in_pod.join().unwrap(), is_outside.join().unwrap())
                });
                let ours = tokio::task::spawn_blocking(|| {
                    // By the bridge's address and by another one of this machine.
                    let from = ["0.0.0.0", "192.0.2.1", "127.0.0.1"];
                    from.map(answered_from)
                });
                tokio::select! {
                    () = serve(server(), udp, tcp) => panic!("it ended"),
                    (asked, ours) = async { (asked.await.unwrap(), ours.await.unwrap()) } => {
                        assert_eq!(asked.0, [true, true], "a pod");
                        assert_eq!(ours, [[true, true]; 3], "this machine");
                        assert_eq!(asked.1, [false, false], "somebody outside");
                    }
                }
            });
        });
        machine.join().unwrap();
    }

    #[test]
    fn one_peer_does_not_take_the_room_of_others() {
        let (peers, one, other) = (
            Peers::new(2),
            IpAddr::from([10, 0, 0, 1]),
            IpAddr::from([10, 0, 0, 2]),
        );
        let turns = [peers.take(one), peers.take(one)];
        assert!(turns.iter().all(Option::is_some));
        assert!(peers.take(one).is_none() && peers.take(other).is_some());
        drop(turns);
        assert!(peers.take(one).is_some());
        assert!(peers.counts.lock().unwrap().is_empty(), "peers are forgotten");
    }
}
