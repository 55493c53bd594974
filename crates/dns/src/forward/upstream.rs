//! One resolver: how it is asked over UDP, TCP and TLS, whether it is well, and whether its questions come back to us.

use crate::corefile::ForwardConfig;
use crate::metrics::Metrics;
use crate::wire::{Forwarded, answers};
use hickory_proto::op::{Edns, Message, Query, ResponseCode};
use hickory_proto::rr::{Name, RecordType};
use rustls::pki_types::ServerName;
use std::io::{Error, ErrorKind, Result};
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpStream, UdpSocket};
use tokio::time::{Instant, timeout};
use tokio_rustls::TlsConnector;

/// How long one resolver has for an answer.
const PATIENCE: Duration = Duration::from_secs(2);
const PROBE_PATIENCE: Duration = Duration::from_secs(1);
/// What we take by UDP, as most resolvers: it fits into a frame. More comes by TCP.
pub(crate) const OWN_PAYLOAD: u16 = 1232;
/// An answer by UDP is no longer than this, whatever was asked for.
const MAX_UDP: usize = 4096;

trait Stream: AsyncRead + AsyncWrite + Send + Unpin {}
impl<T: AsyncRead + AsyncWrite + Send + Unpin> Stream for T {}

/// A connection that nobody uses, since when.
struct Idle {
    stream: Box<dyn Stream>,
    since: Instant,
}

pub(crate) struct Upstream {
    pub(crate) address: SocketAddr,
    /// As metrics name it.
    pub(crate) label: String,
    tls: Option<(TlsConnector, ServerName<'static>)>,
    /// Failures in a row.
    fails: AtomicU32,
    probing: AtomicBool,
    /// Our own questions come back to us from there.
    pub(crate) loops: AtomicBool,
    /// A leaf lock.
    idle: Mutex<Vec<Idle>>,
    config: Arc<ForwardConfig>,
    metrics: Arc<Metrics>,
}

/// A question for a resolver.
#[derive(Debug, Clone)]
pub(crate) struct Asked {
    pub(crate) name: Name,
    pub(crate) kind: RecordType,
    pub(crate) class: hickory_proto::rr::DNSClass,
    pub(crate) dnssec: bool,
    pub(crate) checking_disabled: bool,
    pub(crate) recursion: bool,
}

impl Asked {
    /// With an id that cannot be foreseen, and with EDNS if the resolver takes that.
    fn encode(&self, edns: bool) -> Result<Vec<u8>> {
        let mut message = Message::query();
        message.metadata.id = rand::random();
        message.metadata.recursion_desired = self.recursion;
        message.metadata.checking_disabled = self.checking_disabled;
        let mut query = Query::query(self.name.clone(), self.kind);
        query.set_query_class(self.class);
        message.add_query(query);
        if edns {
            let mut edns = Edns::new();
            edns.set_max_payload(OWN_PAYLOAD);
            edns.set_dnssec_ok(self.dnssec);
            message.edns = Some(edns);
        }
        message.to_vec().map_err(Error::other)
    }
}

impl Upstream {
    pub(crate) fn new(
        address: SocketAddr,
        tls: Option<(TlsConnector, ServerName<'static>)>,
        config: Arc<ForwardConfig>,
        metrics: Arc<Metrics>,
    ) -> Arc<Upstream> {
        Arc::new(Upstream {
            address,
            label: address.to_string(),
            tls,
            fails: AtomicU32::new(0),
            probing: AtomicBool::new(false),
            loops: AtomicBool::new(false),
            idle: Mutex::default(),
            config,
            metrics,
        })
    }

    pub(crate) fn is_down(&self) -> bool {
        let limit = self.config.max_fails;
        limit > 0 && self.fails.load(Ordering::Relaxed) > limit
    }

    pub(crate) fn loops(&self) -> bool {
        self.loops.load(Ordering::Relaxed)
    }

    /// One question and its answer. What does not fit into a datagram is asked for again by TCP.
    pub(crate) async fn exchange(self: &Arc<Self>, asked: &Asked) -> Result<Forwarded> {
        let began = Instant::now();
        let asking = self.ask_in_turn(asked);
        let found = match timeout(PATIENCE, asking).await {
            Ok(found) => found,
            Err(_) => Err(Error::new(ErrorKind::TimedOut, "i/o timeout")),
        };
        match &found {
            Ok(answer) => {
                self.fails.store(0, Ordering::Relaxed);
                let code = ResponseCode::from_low(answer.code);
                self.metrics.forwarded(&self.label, code, began.elapsed());
            }
            Err(_) => self.failed(),
        }
        found
    }

    async fn ask_in_turn(&self, asked: &Asked) -> Result<Forwarded> {
        const FORMERR: u8 = 1;
        const NOTIMP: u8 = 4;
        let first = self.ask(&asked.encode(true)?).await?;
        // Resolvers from before EDNS say that they do not understand.
        if matches!(first.code, FORMERR | NOTIMP) && !first.answered {
            return self.ask(&asked.encode(false)?).await;
        }
        Ok(first)
    }

    async fn ask(&self, question: &[u8]) -> Result<Forwarded> {
        let malformed = || Error::new(ErrorKind::InvalidData, "malformed answer");
        if self.tls.is_some() || self.config.force_tcp {
            let answer = self.ask_stream(question).await?;
            return Forwarded::read(&answer).ok_or_else(malformed);
        }
        let answer = ask_udp(question, self.address).await?;
        let read = Forwarded::read(&answer);
        match read {
            Some(read) if !read.truncated => Ok(read),
            // A truncated answer may end anywhere.
            read => match self.ask_stream(question).await {
                Ok(whole) => Forwarded::read(&whole).ok_or_else(malformed),
                // A part of it is better than nothing.
                Err(_) => read.ok_or_else(malformed),
            },
        }
    }

    fn protocol(&self) -> &'static str {
        if self.tls.is_some() { "tcp-tls" } else { "tcp" }
    }

    /// Over a connection that is open already, if there is one.
    async fn ask_stream(&self, question: &[u8]) -> Result<Vec<u8>> {
        while let Some(mut stream) = self.take_idle() {
            // The other side may have closed it meanwhile.
            if let Ok(answer) = ask_over(&mut *stream, question).await {
                self.metrics.connection(&self.label, self.protocol(), true);
                self.keep_idle(stream);
                return Ok(answer);
            }
        }
        self.metrics.connection(&self.label, self.protocol(), false);
        let plain = TcpStream::connect(self.address).await?;
        plain.set_nodelay(true)?;
        let mut stream: Box<dyn Stream> = match &self.tls {
            Some((connector, name)) => Box::new(connector.connect(name.clone(), plain).await?),
            None => Box::new(plain),
        };
        let answer = ask_over(&mut *stream, question).await?;
        self.keep_idle(stream);
        Ok(answer)
    }

    fn take_idle(&self) -> Option<Box<dyn Stream>> {
        let mut idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner);
        let expire = self.config.expire;
        idle.retain(|idle| idle.since.elapsed() < expire);
        idle.pop().map(|idle| idle.stream)
    }

    fn keep_idle(&self, stream: Box<dyn Stream>) {
        let mut idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner);
        if idle.len() < self.config.max_idle {
            let since = Instant::now();
            idle.push(Idle { stream, since });
        }
    }

    /// Counts a failure, and asks until it is well again.
    fn failed(self: &Arc<Self>) {
        self.fails.fetch_add(1, Ordering::Relaxed);
        if self.config.max_fails == 0 || self.probing.swap(true, Ordering::Relaxed) {
            return;
        }
        tokio::spawn(probe(Arc::downgrade(self), self.config.health_check));
    }

    async fn is_well(&self) -> bool {
        let asked = Asked {
            name: self.config.health_domain.clone(),
            kind: RecordType::NS,
            class: hickory_proto::rr::DNSClass::IN,
            dnssec: false,
            checking_disabled: false,
            recursion: self.config.health_recursion,
        };
        let asking = async { self.ask(&asked.encode(false)?).await };
        timeout(PROBE_PATIENCE, asking)
            .await
            .is_ok_and(|found| found.is_ok())
    }
}

/// Ends when the resolver answers, or is no longer in use.
async fn probe(upstream: Weak<Upstream>, interval: Duration) {
    loop {
        tokio::time::sleep(interval).await;
        let Some(upstream) = upstream.upgrade() else {
            return;
        };
        if upstream.is_well().await {
            upstream.fails.store(0, Ordering::Relaxed);
            upstream.probing.store(false, Ordering::Relaxed);
            return;
        }
        upstream.metrics.healthcheck_failed(&upstream.label);
        // It counts like a question; far above the limit it makes no difference.
        let _ = upstream
            .fails
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |fails| fails.checked_add(1));
    }
}

/// A socket of its own for each question: its random port guards against forged answers, as does the id.
async fn ask_udp(question: &[u8], resolver: SocketAddr) -> Result<Vec<u8>> {
    let any: SocketAddr = if resolver.is_ipv4() {
        ([0, 0, 0, 0], 0).into()
    } else {
        ([0u16; 8], 0).into()
    };
    let socket = UdpSocket::bind(any).await?;
    socket.connect(resolver).await?;
    socket.send(question).await?;
    let mut buffer = vec![0; MAX_UDP];
    loop {
        let length = socket.recv(&mut buffer).await?;
        if answers(question, &buffer[..length]) {
            buffer.truncate(length);
            return Ok(buffer);
        }
    }
}

async fn ask_over(stream: &mut dyn Stream, question: &[u8]) -> Result<Vec<u8>> {
    let length = u16::try_from(question.len()).map_err(Error::other)?;
    let mut framed = length.to_be_bytes().to_vec();
    framed.extend(question);
    stream.write_all(&framed).await?;
    stream.flush().await?;
    let mut answer = vec![0; usize::from(stream.read_u16().await?)];
    stream.read_exact(&mut answer).await?;
    match answers(question, &answer) {
        true => Ok(answer),
        false => Err(Error::new(
            ErrorKind::InvalidData,
            "an answer to another question",
        )),
    }
}
