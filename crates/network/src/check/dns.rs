//! One DNS question and its answer, as a pod would ask it. The answer comes from elsewhere: nothing in it is trusted to be
//! whole.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};
use std::time::Duration;

const A: u16 = 1;
const AAAA: u16 = 28;
const NXDOMAIN: u8 = 3;
const HEADER: usize = 12;
const TIMEOUT: Duration = Duration::from_secs(2);
const ATTEMPTS: usize = 2;
/// Names point to other names in answers; more of them are a loop.
const MAX_LABELS: usize = 128;

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Answer {
    Addresses(Vec<IpAddr>),
    NoSuchName,
    Failed(u8),
}

/// Asks from the network namespace of the thread.
pub(super) fn ask(server: SocketAddr, name: &str, ipv4: bool) -> io::Result<Answer> {
    let id = std::process::id() as u16;
    let question = question(id, name, ipv4).ok_or_else(|| io::Error::other("not a DNS name"))?;
    let any: IpAddr = match server {
        SocketAddr::V4(_) => Ipv4Addr::UNSPECIFIED.into(),
        SocketAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
    };
    let socket = UdpSocket::bind((any, 0))?;
    socket.set_read_timeout(Some(TIMEOUT))?;
    socket.connect(server)?;
    let mut last = io::Error::from(io::ErrorKind::TimedOut);
    for _ in 0..ATTEMPTS {
        socket.send(&question)?;
        let mut buffer = [0; 4096];
        match socket.recv(&mut buffer) {
            Ok(length) => {
                let read = read(&buffer[..length], id, ipv4);
                return read.ok_or_else(|| io::Error::other("the answer cannot be read"));
            }
            Err(error) => last = error,
        }
    }
    Err(last)
}

fn question(id: u16, name: &str, ipv4: bool) -> Option<Vec<u8>> {
    let mut bytes = id.to_be_bytes().to_vec();
    // Recursion is desired; one question.
    bytes.extend([1, 0, 0, 1, 0, 0, 0, 0, 0, 0]);
    for label in name.trim_end_matches('.').split('.') {
        let length = u8::try_from(label.len())
            .ok()
            .filter(|length| (1..64).contains(length))?;
        bytes.push(length);
        bytes.extend(label.as_bytes());
    }
    bytes.push(0);
    bytes.extend((if ipv4 { A } else { AAAA }).to_be_bytes());
    bytes.extend([0, 1]);
    (bytes.len() <= 512).then_some(bytes)
}

fn read(bytes: &[u8], id: u16, ipv4: bool) -> Option<Answer> {
    let word = |at: usize| Some(u16::from_be_bytes(*bytes.get(at..)?.first_chunk()?));
    if word(0)? != id || bytes.get(2)? & 0x80 == 0 {
        return None;
    }
    match bytes.get(3)? & 0x0f {
        0 => {}
        NXDOMAIN => return Some(Answer::NoSuchName),
        code => return Some(Answer::Failed(code)),
    }
    let (questions, answers) = (word(4)?, word(6)?);
    let mut at = HEADER;
    for _ in 0..questions {
        at = after_name(bytes, at)? + 4;
    }
    let mut addresses = Vec::new();
    for _ in 0..answers {
        at = after_name(bytes, at)?;
        let (kind, length) = (word(at)?, usize::from(word(at + 8)?));
        let data = bytes.get(at + 10..at + 10 + length)?;
        match (kind, ipv4) {
            (A, true) => addresses.extend(data.first_chunk::<4>().map(|data| IpAddr::from(*data))),
            (AAAA, false) => addresses.extend(data.first_chunk::<16>().map(|data| IpAddr::from(*data))),
            _ => {}
        }
        at += 10 + length;
    }
    Some(Answer::Addresses(addresses))
}

/// Where the name that begins at `at` ends.
fn after_name(bytes: &[u8], mut at: usize) -> Option<usize> {
    for _ in 0..MAX_LABELS {
        match *bytes.get(at)? {
            0 => return Some(at + 1),
            length if length & 0xc0 == 0xc0 => return Some(at + 2),
            length => at += 1 + usize::from(length),
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_are_read_and_garbage_is_not() {
        let mut bytes = question(7, "web.default.svc.cluster.local", true).unwrap();
        bytes[2] |= 0x80;
        bytes[7] = 2;
        let pointer = [0xc0, 12];
        // A CNAME, then an address.
        bytes.extend(pointer);
        bytes.extend([0, 5, 0, 1, 0, 0, 0, 5, 0, 2]);
        bytes.extend(pointer);
        bytes.extend(pointer);
        bytes.extend([0, 1, 0, 1, 0, 0, 0, 5, 0, 4, 10, 96, 0, 7]);
        let expected = Answer::Addresses(vec![IpAddr::from([10, 96, 0, 7])]);
        assert_eq!(read(&bytes, 7, true), Some(expected));
        assert_eq!(read(&bytes, 8, true), None);
        for length in 0..bytes.len() {
            assert_eq!(read(&bytes[..length], 7, true), None, "{length}");
        }
        bytes[3] = NXDOMAIN;
        assert_eq!(read(&bytes, 7, true), Some(Answer::NoSuchName));
        assert_eq!(question(7, "a..b", true), None);
        assert_eq!(question(7, &"a".repeat(64), true), None);
    }
}
