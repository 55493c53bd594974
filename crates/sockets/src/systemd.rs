//! systemd's file descriptor store: a service hands its sockets over and has them again after a restart or a crash, but not
//! after a stop. The protocol is that of `sd_notify(3)` and `sd_listen_fds(3)`; systemd 254 or newer says by `FDSTORE`
//! that the unit has a store.

use std::ffi::OsStr;
use std::io::{self, IoSlice};
use std::mem::MaybeUninit;
use std::os::fd::{BorrowedFd, FromRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::sync::Once;

use parking_lot::Mutex;
use rustix::io::FdFlags;
use rustix::net::{
    AddressFamily, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags,
    SocketType,
};

/// The first descriptor that systemd passes.
const FIRST: i32 = 3;
const NAME: &str = "port-";

static INHERITED: Mutex<Vec<(u16, OwnedFd)>> = Mutex::new(Vec::new());
static ONCE: Once = Once::new();

pub struct Systemd {
    address: SocketAddrUnix,
}

/// Takes the sockets that systemd passed, so that no process that is executed later inherits them.
pub fn inherit() {
    ONCE.call_once(|| {
        let number = |name: &str| std::env::var(name).ok()?.parse::<u32>().ok();
        if number("LISTEN_PID") != Some(std::process::id()) {
            return;
        }
        let count = number("LISTEN_FDS").and_then(|count| i32::try_from(count).ok());
        let names = std::env::var("LISTEN_FDNAMES").unwrap_or_default();
        let ports = ports(&names, count.unwrap_or(0));
        let mut inherited = INHERITED.lock();
        for (index, port) in ports.into_iter().enumerate() {
            let Ok(index) = i32::try_from(index) else { return };
            // SAFETY: systemd opened these descriptors for this process, says so by its id, and nothing else in it
            // knows them: this code runs once.
            let socket = unsafe { OwnedFd::from_raw_fd(FIRST + index) };
            let flags = rustix::io::fcntl_getfd(&socket);
            if flags.is_err() || rustix::io::fcntl_setfd(&socket, FdFlags::CLOEXEC).is_err() {
                // It is not open.
                std::mem::forget(socket);
                continue;
            }
            // What is not ours is closed.
            inherited.extend(port.map(|port| (port, socket)));
        }
    });
}

/// What was inherited, once.
pub fn inherited() -> Vec<(u16, OwnedFd)> {
    std::mem::take(&mut *INHERITED.lock())
}

/// The port of each descriptor, as their names tell.
fn ports(names: &str, count: i32) -> Vec<Option<u16>> {
    let mut names = names.split(':');
    let port = |_| names.next()?.strip_prefix(NAME)?.parse().ok();
    (0..count).map(port).collect()
}

impl Systemd {
    /// If this process is a service that has a store.
    pub fn find() -> Option<Systemd> {
        let size = std::env::var("FDSTORE").ok()?.parse::<u32>().ok()?;
        let socket = std::env::var_os("NOTIFY_SOCKET").filter(|_| size > 0)?;
        let address = address(&socket)?;
        Some(Systemd { address })
    }

    pub fn keep(&self, port: u16, socket: BorrowedFd<'_>) -> io::Result<()> {
        self.notify(&format!("FDSTORE=1\nFDNAME={NAME}{port}"), Some(socket))
    }

    pub fn forget(&self, port: u16) -> io::Result<()> {
        self.notify(&format!("FDSTOREREMOVE=1\nFDNAME={NAME}{port}"), None)
    }

    fn notify(&self, text: &str, socket: Option<BorrowedFd<'_>>) -> io::Result<()> {
        let flags = SocketFlags::CLOEXEC;
        let datagrams = rustix::net::socket_with(AddressFamily::UNIX, SocketType::DGRAM, flags, None)?;
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut ancillary = SendAncillaryBuffer::new(&mut space);
        let sockets: Vec<BorrowedFd<'_>> = socket.into_iter().collect();
        if !sockets.is_empty() && !ancillary.push(SendAncillaryMessage::ScmRights(&sockets)) {
            return Err(io::Error::other("no room for a socket"));
        }
        let text = [IoSlice::new(text.as_bytes())];
        rustix::net::sendmsg_addr(
            &datagrams,
            &self.address,
            &text,
            &mut ancillary,
            SendFlags::NOSIGNAL,
        )?;
        Ok(())
    }
}

/// A path, or a name behind `@`.
fn address(socket: &OsStr) -> Option<SocketAddrUnix> {
    match socket.as_bytes().strip_prefix(b"@") {
        Some(name) => SocketAddrUnix::new_abstract_name(name).ok(),
        None => SocketAddrUnix::new(socket).ok(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire;
    use std::net::TcpListener;
    use std::os::fd::AsFd;
    use std::os::unix::net::UnixDatagram;

    #[test]
    fn names_tell_the_ports() {
        assert_eq!(ports("port-80:port-443", 2), [Some(80), Some(443)]);
        assert_eq!(ports("stored:port-x:port-443", 4), [None, None, Some(443), None]);
        assert_eq!(ports("", 0), []);
    }

    #[test]
    fn the_manager_is_sent_a_socket_and_its_name() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("notify");
        let manager = UnixDatagram::bind(&path).unwrap();
        let systemd = Systemd {
            address: address(path.as_os_str()).unwrap(),
        };
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        systemd.keep(port, listener.as_fd()).unwrap();
        drop(listener);
        let (text, mut sockets) = wire::receive(&manager).unwrap();
        assert_eq!(text, format!("FDSTORE=1\nFDNAME=port-{port}").into_bytes());
        assert!(crate::usable(port, sockets.pop().unwrap()).is_ok());
        systemd.forget(port).unwrap();
        let (text, sockets) = wire::receive(&manager).unwrap();
        assert_eq!(text, format!("FDSTOREREMOVE=1\nFDNAME=port-{port}").into_bytes());
        assert!(sockets.is_empty());
    }
}
