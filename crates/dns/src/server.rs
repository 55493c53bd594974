//! The sockets: UDP and TCP on one address, a task a question, bounded in number. Pods are not trusted to be
//! moderate: each kind of work has its own bound, so that none can starve the others.

use crate::cluster::Cluster;
use crate::forward::Upstream;
use crate::respond::Responder;
use crate::zone::{Records, Zone};
use skiff_client::{Client, InformerFactory};
use socket2::{Domain, Protocol, Socket, Type};
use std::collections::HashMap;
use std::net::{IpAddr, SocketAddr};
use std::sync::atomic::AtomicUsize;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use thiserror::Error;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream, UdpSocket};
use tokio::sync::Semaphore;
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;

/// Questions by UDP worked on at once; more wait in the socket's buffer. More than may wait for resolvers, so
/// that there is always room for questions about the cluster.
const MAX_IN_FLIGHT: usize = 1024;
/// Connections at once: in all, and of one peer.
const MAX_CONNECTIONS: usize = 256;
const MAX_CONNECTIONS_OF_PEER: usize = 16;
const TCP_IDLE: Duration = Duration::from_secs(10);

#[derive(Debug, Clone)]
pub struct DnsConfig {
    /// May be an address that the host does not have yet, such as the pod bridge's.
    pub bind: SocketAddr,
    /// The cluster domain, `cluster.local`.
    pub domain: String,
    /// Where foreign names go.
    pub resolvers: Vec<SocketAddr>,
}

#[derive(Debug, Error)]
pub enum Error {
    #[error("cluster DNS cannot listen on {0}: {1}")]
    Bind(SocketAddr, std::io::Error),
    #[error("{0:?} is not a DNS domain")]
    Domain(String),
}

struct Server {
    responder: Responder<Cluster>,
    in_flight: Arc<Semaphore>,
    connections: Arc<Semaphore>,
    /// A leaf lock.
    peers: Mutex<HashMap<IpAddr, usize>>,
}

/// Serves until `shutdown`. Answers begin once the informers have their first list.
pub async fn run(config: DnsConfig, client: Client, shutdown: CancellationToken) -> Result<(), Error> {
    let udp = Arc::new(listen_udp(config.bind).map_err(|e| Error::Bind(config.bind, e))?);
    let tcp = listen_tcp(config.bind).map_err(|e| Error::Bind(config.bind, e))?;
    let factory = InformerFactory::new(client, shutdown.clone());
    let server = Arc::new(Server {
        responder: Responder {
            zone: Zone::new(&config.domain).ok_or(Error::Domain(config.domain))?,
            records: Cluster::new(&factory),
            upstream: Upstream::new(config.resolvers),
            turn: AtomicUsize::new(0),
        },
        in_flight: Arc::new(Semaphore::new(MAX_IN_FLIGHT)),
        connections: Arc::new(Semaphore::new(MAX_CONNECTIONS)),
        peers: Mutex::default(),
    });
    tokio::select! {
        () = shutdown.cancelled() => return Ok(()),
        () = server.responder.records.synced() => {}
    }
    tokio::select! {
        () = shutdown.cancelled() => {}
        () = serve_udp(Arc::clone(&server), udp) => {}
        () = serve_tcp(server, tcp) => {}
    }
    Ok(())
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

async fn serve_udp(server: Arc<Server>, socket: Arc<UdpSocket>) {
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
            drop(permit);
        });
    }
}

async fn serve_tcp(server: Arc<Server>, listener: TcpListener) {
    loop {
        let Ok(permit) = Arc::clone(&server.connections).acquire_owned().await else {
            return;
        };
        match listener.accept().await {
            Ok((stream, peer)) => {
                let Some(place) = Place::take(&server, peer.ip()) else {
                    continue;
                };
                tokio::spawn(async move {
                    if let Err(error) = converse(&place.server.responder, stream).await {
                        tracing::debug!(%error, "connection ended");
                    }
                    drop((place, permit));
                });
            }
            Err(error) => {
                tracing::warn!(%error, "cannot accept");
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
        }
    }
}

/// One of the connections that a peer may have.
struct Place {
    server: Arc<Server>,
    peer: IpAddr,
}

impl Place {
    fn take(server: &Arc<Server>, peer: IpAddr) -> Option<Place> {
        let mut peers = server.peers.lock().unwrap_or_else(PoisonError::into_inner);
        let count = peers.entry(peer).or_default();
        if *count >= MAX_CONNECTIONS_OF_PEER {
            return None;
        }
        *count += 1;
        Some(Place {
            server: Arc::clone(server),
            peer,
        })
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut peers = self.server.peers.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(count) = peers.get_mut(&self.peer) {
            *count -= 1;
            if *count == 0 {
                peers.remove(&self.peer);
            }
        }
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
