//! What is seen and done inside of a pod's network namespace, in a thread of its own that enters it.

use std::io;
use std::net::{IpAddr, SocketAddr, TcpStream};
use std::os::fd::AsFd;
use std::path::Path;
use std::time::Duration;

use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};

use crate::proxy::Protocol;

const LISTENING: &str = "0A";
const CONNECT_TIMEOUT: Duration = Duration::from_secs(2);

/// Runs `job` in the namespace, or here.
pub(super) async fn run<T: Send + 'static>(
    netns: Option<&Path>,
    job: impl FnOnce() -> io::Result<T> + Send + 'static,
) -> io::Result<T> {
    let namespace = netns.map(std::fs::File::open).transpose()?;
    let (tell, told) = tokio::sync::oneshot::channel();
    // Not one of the runtime's threads: it stays in the namespace and ends there.
    std::thread::Builder::new().spawn(move || {
        let entered = namespace.map_or(Ok(()), |namespace| {
            move_into_link_name_space(namespace.as_fd(), Some(LinkNameSpaceType::Network))
        });
        let _ = tell.send(entered.map_err(io::Error::from).and_then(|()| job()));
    })?;
    told.await.map_err(io::Error::other)?
}

pub(super) fn connect(to: SocketAddr) -> io::Result<()> {
    TcpStream::connect_timeout(&to, CONNECT_TIMEOUT).map(drop)
}

/// Who listens on a port.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Listener {
    Nobody,
    /// Somebody who is not reached from outside of the pod.
    Loopback,
    Reachable,
}

/// Looks at the sockets of this namespace.
pub(super) fn listener(protocol: Protocol, port: u16) -> io::Result<Option<Listener>> {
    let name = match protocol {
        Protocol::Tcp => "tcp",
        Protocol::Udp => "udp",
        Protocol::Sctp => return Ok(None),
    };
    let mut found = Listener::Nobody;
    for file in [name.to_owned(), format!("{name}6")] {
        let text = match std::fs::read_to_string(format!("/proc/thread-self/net/{file}")) {
            // There is no IPv6.
            Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
            text => text?,
        };
        for (address, number, state) in text.lines().skip(1).filter_map(socket) {
            if number != port || (protocol == Protocol::Tcp && state != LISTENING) {
                continue;
            }
            if !address.is_loopback() {
                return Ok(Some(Listener::Reachable));
            }
            found = Listener::Loopback;
        }
    }
    Ok(Some(found))
}

/// The local address, port and state of a line of `/proc/net/tcp`.
fn socket(line: &str) -> Option<(IpAddr, u16, &str)> {
    let mut fields = line.split_whitespace();
    let (address, port) = fields.nth(1)?.split_once(':')?;
    let state = fields.nth(1)?;
    let word = |text: &str| u32::from_str_radix(text, 16).ok().map(u32::to_ne_bytes);
    let address: IpAddr = match address.len() {
        8 => IpAddr::from(word(address)?),
        32 => {
            let mut octets = [0; 16];
            for (place, octets) in octets.chunks_exact_mut(4).enumerate() {
                octets.copy_from_slice(&word(address.get(place * 8..place * 8 + 8)?)?);
            }
            IpAddr::from(octets).to_canonical()
        }
        _ => return None,
    };
    Some((address, u16::from_str_radix(port, 16).ok()?, state))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sockets_are_read() {
        let line = "   0: 0100007F:1F90 00000000:0000 0A 00000000:00000000 00:00000000 00000000";
        assert_eq!(socket(line), Some((IpAddr::from([127, 0, 0, 1]), 8080, "0A")));
        let line = "   0: 00000000000000000000000000000000:0050 00000000000000000000000000000000:0000 0A 0";
        let (address, port, _) = socket(line).unwrap();
        assert!(address.is_unspecified() && port == 80);
        let line = "   0: 00000000000000000000000001000000:0050 00000000000000000000000000000000:0000 0A 0";
        assert!(socket(line).unwrap().0.is_loopback());
        assert_eq!(socket("sl local_address"), None);
    }
}
