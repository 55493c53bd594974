//! The process that keeps copies of listening sockets, and how skiff speaks to it.
//!
//! It is started with the first socket and ended with the last. It does nothing but wait: it accepts no connection, reads
//! no file and opens none. When skiff has been gone for [`ABANDONED`], it ends, and the ports with it.

use std::collections::BTreeMap;
use std::io;
use std::net::TcpListener;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

use crate::INTERNAL_SOCKETS;
use crate::wire::{self, MAX_SOCKETS, Message};

/// How long sockets are kept for a skiff that is gone: longer than a start may take.
const ABANDONED: Duration = Duration::from_secs(90);
/// An answer of the holder takes microseconds.
const ANSWER: Duration = Duration::from_secs(5);
/// Between attempts to start one.
pub const START_AGAIN: Duration = Duration::from_secs(5);
/// skiff, and a command about it.
const MAX_CLIENTS: usize = 8;

/// skiff's side.
pub struct Holder {
    path: PathBuf,
    connection: Option<OwnedFd>,
    /// If this process started it.
    child: Option<Child>,
}

impl Holder {
    /// The holder that an earlier process left, if there is one, and what it has.
    pub fn find(path: &Path) -> (Holder, Vec<(u16, OwnedFd)>) {
        let mut holder = Holder {
            path: path.to_owned(),
            connection: None,
            child: None,
        };
        let found = connect(path).and_then(|connection| {
            let kept = list(&connection)?;
            Ok((connection, kept))
        });
        match found {
            Ok((connection, kept)) => {
                holder.connection = Some(connection);
                (holder, kept)
            }
            Err(_) => (holder, Vec::new()),
        }
    }

    /// Keeps the socket of `port`; if there is no holder, starts one for `all`.
    pub fn keep(&mut self, port: u16, all: &BTreeMap<u16, TcpListener>) -> io::Result<()> {
        if let (Some(connection), Some(listener)) = (&self.connection, all.get(&port))
            && keep(connection, port, listener).is_ok()
        {
            return Ok(());
        }
        self.start(all)
    }

    pub fn forget(&mut self, port: u16, is_last: bool) -> io::Result<()> {
        let Some(connection) = &self.connection else {
            return Ok(());
        };
        if !is_last {
            return wire::send(connection, &Message::Forget(port).encode(), &[]);
        }
        self.connection = None;
        let ended = end(&self.path);
        self.reap();
        ended
    }

    /// A second handle of the connection, to wait for its end.
    pub fn connection(&self) -> Option<OwnedFd> {
        self.connection.as_ref()?.try_clone().ok()
    }

    pub fn replace_if_ended(&mut self, all: &BTreeMap<u16, TcpListener>) -> io::Result<()> {
        if all.is_empty() || self.connection.as_ref().is_some_and(|it| !is_closed(it)) {
            return Ok(());
        }
        tracing::warn!("the process that keeps listening sockets has ended; starting another");
        self.start(all)
    }

    fn start(&mut self, all: &BTreeMap<u16, TcpListener>) -> io::Result<()> {
        self.connection = None;
        self.reap();
        // What is left of one that was killed; one that lives has nothing that this process lacks.
        end(&self.path)?;
        let listener = packet_socket()?;
        rustix::net::bind(&listener, &SocketAddrUnix::new(&self.path)?)?;
        rustix::net::listen(&listener, 16)?;
        let connection = connect(&self.path)?;
        // The same program, also after its file was replaced.
        let child = Command::new("/proc/self/exe")
            .arg0("skiff")
            .arg(INTERNAL_SOCKETS)
            .arg(&self.path)
            .current_dir("/")
            .stdin(Stdio::from(listener))
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn();
        self.child = Some(child.inspect_err(|_| drop(std::fs::remove_file(&self.path)))?);
        for (port, listener) in all {
            keep(&connection, *port, listener)?;
        }
        self.connection = Some(connection);
        Ok(())
    }

    /// Of a child that has ended or is about to, nothing stays in the table of processes.
    fn reap(&mut self) {
        if let Some(mut child) = self.child.take() {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// Ends the holder and waits until its sockets are closed. None is fine, too.
pub fn end(path: &Path) -> io::Result<()> {
    match connect(path) {
        Ok(connection) => {
            wire::send(&connection, &Message::End.encode(), &[])?;
            // Its answer, or its end.
            wire::receive(&connection)?;
        }
        Err(error) if is_absent(&error) => {}
        Err(error) => return Err(error),
    }
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

/// Waits until the holder has ended. It says nothing that it was not asked, so that whatever can be read is the end.
pub async fn ended(connection: OwnedFd) {
    // SAFETY: an `OwnedFd` is open and its own, and it stays inside the `AsyncFd` until that is dropped.
    let connection = unsafe { AsyncFd::register_with_interest(connection, Interest::READABLE) };
    if let Ok(connection) = connection {
        let _ = connection.readable().await;
    }
}

fn is_closed(connection: &OwnedFd) -> bool {
    let mut state = [PollFd::new(connection, PollFlags::IN)];
    !matches!(poll(&mut state, Some(&Timespec::default())), Ok(0))
}

fn is_absent(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused
    )
}

fn packet_socket() -> io::Result<OwnedFd> {
    let flags = SocketFlags::CLOEXEC;
    Ok(rustix::net::socket_with(
        AddressFamily::UNIX,
        SocketType::SEQPACKET,
        flags,
        None,
    )?)
}

fn connect(path: &Path) -> io::Result<OwnedFd> {
    let connection = packet_socket()?;
    let limit = Some(ANSWER);
    for timeout in [
        rustix::net::sockopt::Timeout::Recv,
        rustix::net::sockopt::Timeout::Send,
    ] {
        rustix::net::sockopt::set_socket_timeout(&connection, timeout, limit)?;
    }
    rustix::net::connect(&connection, &SocketAddrUnix::new(path)?)?;
    Ok(connection)
}

fn keep(connection: &OwnedFd, port: u16, listener: &TcpListener) -> io::Result<()> {
    wire::send(connection, &Message::Keep(port).encode(), &[listener.as_fd()])
}

fn list(connection: &OwnedFd) -> io::Result<Vec<(u16, OwnedFd)>> {
    wire::send(connection, &Message::List.encode(), &[])?;
    let (bytes, sockets) = wire::receive(connection)?;
    let ports = bytes
        .chunks_exact(2)
        .map(|port| u16::from_be_bytes([port[0], port[1]]));
    Ok(ports.zip(sockets).collect())
}

/// The holder's side: `internal-sockets PATH`, with the socket that listens at the path as standard input. The path is
/// there for whoever looks at the list of processes.
pub fn main() -> i32 {
    // What ends skiff's session is not for us.
    let _ = rustix::process::setsid();
    match rustix::io::dup(rustix::stdio::stdin()).map(|listener| serve(&listener, ABANDONED)) {
        Ok(Ok(())) => 0,
        _ => 1,
    }
}

/// Keeps sockets until it is told to end, or no client was there for `abandoned`.
fn serve(listener: &OwnedFd, abandoned: Duration) -> io::Result<()> {
    let mut clients: Vec<OwnedFd> = Vec::new();
    let mut held: BTreeMap<u16, OwnedFd> = BTreeMap::new();
    let mut alone_since = Instant::now();
    loop {
        let left = abandoned.saturating_sub(alone_since.elapsed());
        if clients.is_empty() && left.is_zero() {
            return Ok(());
        }
        let timeout = Timespec::try_from(left).map_err(io::Error::other)?;
        let mut states: Vec<PollFd<'_>> = [listener]
            .into_iter()
            .chain(&clients)
            .map(|socket| PollFd::new(socket, PollFlags::IN))
            .collect();
        match poll(&mut states, clients.is_empty().then_some(&timeout)) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
        let ready: Vec<bool> = states.iter().map(|state| !state.revents().is_empty()).collect();
        let (is_new, ready) = ready.split_first().unwrap_or((&false, &[]));
        let mut gone = Vec::new();
        for (index, client) in clients.iter().enumerate() {
            if ready.get(index) != Some(&true) {
                continue;
            }
            match answer(client, &mut held) {
                Ok(true) => {}
                Ok(false) => return Ok(()),
                Err(_) => gone.push(index),
            }
        }
        for index in gone.into_iter().rev() {
            clients.swap_remove(index);
            alone_since = Instant::now();
        }
        if *is_new
            && let Ok(client) = rustix::net::accept_with(listener, SocketFlags::CLOEXEC)
            && clients.len() < MAX_CLIENTS
            && is_allowed(client.as_fd())
        {
            clients.push(client);
        }
    }
}

/// The folder of the path is closed to others already.
fn is_allowed(client: BorrowedFd<'_>) -> bool {
    let peer = rustix::net::sockopt::socket_peercred(client);
    peer.is_ok_and(|peer| peer.uid == rustix::process::geteuid())
}

/// Does what one message asks for. False: it is the end.
fn answer(client: &OwnedFd, held: &mut BTreeMap<u16, OwnedFd>) -> io::Result<bool> {
    let (bytes, sockets) = wire::receive(client)?;
    match Message::decode(&bytes) {
        Some(Message::Keep(port)) => {
            let socket = sockets.into_iter().next();
            let socket = socket.filter(|_| held.len() < MAX_SOCKETS || held.contains_key(&port));
            held.extend(socket.map(|socket| (port, socket)));
        }
        Some(Message::Forget(port)) => {
            held.remove(&port);
        }
        Some(Message::List) => {
            let ports: Vec<u8> = held.keys().flat_map(|port| port.to_be_bytes()).collect();
            let sockets: Vec<BorrowedFd<'_>> = held.values().map(AsFd::as_fd).collect();
            // A packet without a byte would look like the end.
            let ports = if ports.is_empty() { vec![0] } else { ports };
            wire::send(client, &ports, &sockets)?;
        }
        Some(Message::End) => {
            held.clear();
            let _ = wire::send(client, &Message::End.encode(), &[]);
            return Ok(false);
        }
        None => return Err(io::ErrorKind::InvalidData.into()),
    }
    Ok(true)
}

#[cfg(test)]
#[path = "holder_tests.rs"]
mod tests;
