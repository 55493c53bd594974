//! The sockets: UDP and TCP on one address, a task a question, bounded in number.

use crate::cluster::Cluster;
use crate::forward::forward;
use crate::zone::{Answer, Zone};
use hickory_proto::op::{Edns, Message, MessageType, OpCode, ResponseCode};
use skiff_client::{Client, InformerFactory};
use socket2::{Domain, Protocol, Socket, Type};
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;
use thiserror::Error;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream, UdpSocket};
use tokio::sync::Semaphore;
use tokio_util::sync::CancellationToken;

/// Questions worked on at once; more wait in the socket's buffer.
const MAX_IN_FLIGHT: usize = 1024;
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
    zone: Zone,
    cluster: Cluster,
    resolvers: Vec<SocketAddr>,
    in_flight: Arc<Semaphore>,
}

/// Serves until `shutdown`. Answers begin once the informers have their first list.
pub async fn run(config: DnsConfig, client: Client, shutdown: CancellationToken) -> Result<(), Error> {
    let udp = Arc::new(listen_udp(config.bind).map_err(|e| Error::Bind(config.bind, e))?);
    let tcp = listen_tcp(config.bind).map_err(|e| Error::Bind(config.bind, e))?;
    let factory = InformerFactory::new(client, shutdown.clone());
    let server = Arc::new(Server {
        zone: Zone::new(&config.domain).ok_or(Error::Domain(config.domain))?,
        cluster: Cluster::new(&factory),
        resolvers: config.resolvers,
        in_flight: Arc::new(Semaphore::new(MAX_IN_FLIGHT)),
    });
    tokio::select! {
        () = shutdown.cancelled() => return Ok(()),
        () = server.cluster.synced() => {}
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
            if let Some(answer) = server.respond(&question, false).await {
                let _ = socket.send_to(&answer, peer).await;
            }
            drop(permit);
        });
    }
}

async fn serve_tcp(server: Arc<Server>, listener: TcpListener) {
    loop {
        let Ok(permit) = Arc::clone(&server.in_flight).acquire_owned().await else {
            return;
        };
        match listener.accept().await {
            Ok((stream, _)) => {
                let server = Arc::clone(&server);
                tokio::spawn(async move {
                    if let Err(error) = server.converse(stream).await {
                        tracing::debug!(%error, "connection ended");
                    }
                    drop(permit);
                });
            }
            Err(error) => {
                tracing::warn!(%error, "cannot accept");
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
        }
    }
}

impl Server {
    async fn converse(&self, mut stream: TcpStream) -> std::io::Result<()> {
        loop {
            let Ok(length) = tokio::time::timeout(TCP_IDLE, stream.read_u16()).await else {
                return Ok(());
            };
            let mut question = vec![0; usize::from(length?)];
            tokio::time::timeout(TCP_IDLE, stream.read_exact(&mut question)).await??;
            let Some(answer) = self.respond(&question, true).await else {
                return Ok(());
            };
            let length = u16::try_from(answer.len()).map_err(std::io::Error::other)?;
            stream.write_all(&length.to_be_bytes()).await?;
            stream.write_all(&answer).await?;
        }
    }

    /// The answer to a message; `None` for what is not a question at all.
    async fn respond(&self, bytes: &[u8], over_tcp: bool) -> Option<Vec<u8>> {
        let question = Message::from_vec(bytes).ok()?;
        if question.metadata.message_type != MessageType::Query {
            return None;
        }
        let mut answer = reply_to(&question);
        if question.metadata.op_code != OpCode::Query {
            answer.metadata.response_code = ResponseCode::NotImp;
        } else if let [query] = question.queries.as_slice() {
            match self.zone.answer(query.name(), query.query_type(), &self.cluster) {
                Some(found) => fill(&mut answer, found),
                None => match forward(bytes, &self.resolvers, over_tcp).await {
                    Some(forwarded) => return Some(forwarded),
                    None => answer.metadata.response_code = ResponseCode::ServFail,
                },
            }
        } else {
            answer.metadata.response_code = ResponseCode::FormErr;
        }
        let limit = if over_tcp {
            usize::from(u16::MAX)
        } else {
            usize::from(question.max_payload())
        };
        let encoded = answer.to_vec().ok()?;
        if encoded.len() <= limit {
            Some(encoded)
        } else {
            answer.truncate().to_vec().ok()
        }
    }
}

fn reply_to(question: &Message) -> Message {
    let mut answer = Message::response(question.metadata.id, question.metadata.op_code);
    answer.metadata.recursion_desired = question.metadata.recursion_desired;
    answer.metadata.recursion_available = true;
    answer.queries.clone_from(&question.queries);
    if question.edns.is_some() {
        let mut edns = Edns::new();
        edns.set_max_payload(4096);
        answer.edns = Some(edns);
    }
    answer
}

fn fill(answer: &mut Message, found: Answer) {
    answer.metadata.authoritative = true;
    answer.metadata.response_code = found.code;
    answer.answers = found.records;
    answer.additionals = found.additionals;
    answer.authorities = found.authority.into_iter().collect();
}
