//! Listening sockets that outlive the process. While skiff is restarted, or after it was killed, somebody else has a copy
//! of each: connections then wait in the kernel's queue and are not refused.
//!
//! Who has the copies: systemd, if the service has a file descriptor store (`systemd`), else a process of ours
//! (`holder`), which ends when nobody has come back for a while. Nothing here accepts a connection.

mod holder;
mod systemd;
mod wire;

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsString;
use std::io;
use std::net::TcpListener;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;

use parking_lot::Mutex;
use tokio::sync::Notify;

use holder::Holder;
use systemd::Systemd;

const INTERNAL_SOCKETS: &str = "internal-sockets";

/// Becomes the holder if the arguments (without the program's name) say so, and returns its exit code. Called before
/// there is a thread.
pub fn internal_main(arguments: &[OsString]) -> Option<i32> {
    (arguments.first()? == INTERNAL_SOCKETS).then(holder::main)
}

/// Takes what systemd has kept for this process. Called once, before anything is executed: containers must not inherit
/// these sockets.
pub fn inherit() {
    systemd::inherit();
}

/// Closes the sockets that were kept for the cluster whose holder listens at `path`, and ends that holder. For a
/// cluster that does not run, or has no use for them.
pub fn close(path: &Path) -> io::Result<()> {
    if let Some(systemd) = Systemd::find() {
        for (port, _) in systemd::inherited() {
            systemd.forget(port)?;
        }
    }
    holder::end(path)
}

/// The listening sockets of a process, by port.
pub struct Sockets {
    open: Mutex<Open>,
    /// Another port is open.
    opened: Notify,
}

struct Open {
    listeners: BTreeMap<u16, TcpListener>,
    store: Store,
}

/// Who has the copies.
enum Store {
    /// Nobody: for tests.
    None,
    Systemd(Systemd),
    Holder(Holder),
}

impl Sockets {
    /// Nothing outlives the process.
    pub fn alone() -> Sockets {
        Sockets::new(BTreeMap::new(), Store::None)
    }

    /// Takes over what an earlier process left. The holder, if one is needed, listens at `path`, in a folder that nobody
    /// else may enter.
    pub fn open(path: &Path) -> Sockets {
        let (store, kept) = match Systemd::find() {
            Some(systemd) => (Store::Systemd(systemd), systemd::inherited()),
            None => {
                let (holder, kept) = Holder::find(path);
                (Store::Holder(holder), kept)
            }
        };
        let mut listeners = BTreeMap::new();
        for (port, socket) in kept {
            match usable(port, socket) {
                Ok(listener) => {
                    listeners.insert(port, listener);
                }
                Err(error) => tracing::warn!(port, %error, "cannot use the socket that was kept"),
            }
        }
        if !listeners.is_empty() {
            let ports: Vec<u16> = listeners.keys().copied().collect();
            tracing::info!(?ports, "took over the listening sockets of the process before");
        }
        Sockets::new(listeners, store)
    }

    fn new(listeners: BTreeMap<u16, TcpListener>, store: Store) -> Sockets {
        Sockets {
            open: Mutex::new(Open { listeners, store }),
            opened: Notify::new(),
        }
    }

    /// The socket of a port: the one that is there, or what `bind` makes, which is kept from then on.
    pub fn listener(
        &self,
        port: u16,
        bind: impl FnOnce() -> io::Result<TcpListener>,
    ) -> io::Result<TcpListener> {
        let mut open = self.open.lock();
        let open = &mut *open;
        if let Some(listener) = open.listeners.get(&port) {
            return listener.try_clone();
        }
        let listener = bind()?;
        let kept = listener.try_clone()?;
        open.listeners.insert(port, kept);
        if let Err(error) = open.store.keep(port, &open.listeners) {
            // It serves all the same.
            tracing::warn!(port, %error, "the port will refuse connections while skiff is restarted");
        }
        self.opened.notify_one();
        Ok(listener)
    }

    /// Closes the sockets of all other ports.
    pub fn retain(&self, ports: &BTreeSet<u16>) {
        let mut open = self.open.lock();
        let open = &mut *open;
        let unused: Vec<u16> = open
            .listeners
            .keys()
            .filter(|port| !ports.contains(port))
            .copied()
            .collect();
        for port in unused {
            open.listeners.remove(&port);
            if let Err(error) = open.store.forget(port, &open.listeners) {
                tracing::warn!(port, %error, "cannot close the copy of a socket");
            }
        }
    }

    /// Starts another holder when the one that there is ends. Never returns.
    pub async fn watch_holder(&self) {
        loop {
            let watched = match &self.open.lock().store {
                Store::Holder(holder) => holder.connection(),
                Store::None | Store::Systemd(_) => None,
            };
            match watched {
                Some(connection) => holder::ended(connection).await,
                // There is nothing to keep yet.
                None => self.opened.notified().await,
            }
            while let Err(error) = self.replace_holder() {
                tracing::warn!(%error, "cannot start the process that keeps listening sockets");
                tokio::time::sleep(holder::START_AGAIN).await;
            }
        }
    }

    fn replace_holder(&self) -> io::Result<()> {
        let mut open = self.open.lock();
        let open = &mut *open;
        match &mut open.store {
            Store::Holder(holder) => holder.replace_if_ended(&open.listeners),
            Store::None | Store::Systemd(_) => Ok(()),
        }
    }
}

impl Store {
    /// Keeps the socket of `port`, which is one of `all`.
    fn keep(&mut self, port: u16, all: &BTreeMap<u16, TcpListener>) -> io::Result<()> {
        match self {
            Store::None => Ok(()),
            Store::Systemd(systemd) => match all.get(&port) {
                Some(listener) => systemd.keep(port, listener.as_fd()),
                None => Ok(()),
            },
            Store::Holder(holder) => holder.keep(port, all),
        }
    }

    /// Closes the copy of `port`; `left` are the others.
    fn forget(&mut self, port: u16, left: &BTreeMap<u16, TcpListener>) -> io::Result<()> {
        match self {
            Store::None => Ok(()),
            Store::Systemd(systemd) => systemd.forget(port),
            Store::Holder(holder) => holder.forget(port, left.is_empty()),
        }
    }
}

/// Whether it is what its name says: a socket that listens on that port.
fn usable(port: u16, socket: OwnedFd) -> io::Result<TcpListener> {
    if !rustix::net::sockopt::socket_acceptconn(&socket)? {
        return Err(io::Error::other("it does not listen"));
    }
    let listener = TcpListener::from(socket);
    let bound = listener.local_addr()?.port();
    if bound != port {
        return Err(io::Error::other(format!("it is bound to port {bound}")));
    }
    listener.set_nonblocking(true)?;
    Ok(listener)
}
