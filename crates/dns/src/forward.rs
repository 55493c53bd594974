//! Questions about the rest of the world go to the host's resolvers, bytes in, bytes out.

use std::net::{IpAddr, SocketAddr};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpStream, UdpSocket};
use tokio::sync::Semaphore;
use tokio::time::timeout;

const PATIENCE: Duration = Duration::from_secs(2);
/// Questions that wait for a resolver at once; more are refused.
const MAX_FORWARDED: usize = 512;

/// The resolvers of a `resolv.conf`, without those in `own` (asking ourselves would never end).
pub fn host_resolvers(resolv_conf: &str, own: &[IpAddr]) -> Vec<SocketAddr> {
    resolv_conf
        .lines()
        .filter_map(|line| line.trim().strip_prefix("nameserver"))
        .filter_map(|rest| rest.trim().split('%').next()?.parse::<IpAddr>().ok())
        .filter(|ip| !own.contains(ip))
        .map(|ip| SocketAddr::new(ip, 53))
        .collect()
}

/// The resolvers of the host.
pub struct Upstream {
    resolvers: Vec<SocketAddr>,
    /// The one that answered last: a dead one at the head of the list must not slow down every question.
    preferred: AtomicUsize,
    /// Resolvers that are slow or away must not take the room of questions about the cluster.
    slots: Semaphore,
}

impl Upstream {
    pub fn new(resolvers: Vec<SocketAddr>) -> Self {
        Self {
            resolvers,
            preferred: AtomicUsize::new(0),
            slots: Semaphore::new(MAX_FORWARDED),
        }
    }

    /// Asks one resolver after the other; `None` when none answers, or too many questions wait already.
    /// `payload` is the longest answer that may come by UDP.
    pub async fn ask(&self, question: &[u8], payload: u16, over_tcp: bool) -> Option<Vec<u8>> {
        let _slot = self.slots.try_acquire().ok()?;
        let first = self.preferred.load(Ordering::Relaxed);
        for offset in 0..self.resolvers.len() {
            let place = (first + offset) % self.resolvers.len();
            let resolver = self.resolvers[place];
            let asked = async {
                if over_tcp {
                    ask_tcp(question, resolver).await
                } else {
                    ask_udp(question, resolver, payload).await
                }
            };
            match timeout(PATIENCE, asked).await {
                Ok(Ok(answer)) => {
                    self.preferred.store(place, Ordering::Relaxed);
                    return Some(answer);
                }
                Ok(Err(error)) => tracing::debug!(%resolver, %error, "resolver failed"),
                Err(_) => tracing::debug!(%resolver, "resolver did not answer"),
            }
        }
        None
    }
}

/// Whether `answer` is one to `question`: by its id and by the question it repeats.
fn answers(question: &[u8], answer: &[u8]) -> bool {
    const HEADER: usize = 12;
    const IS_RESPONSE: u8 = 0x80;
    let asked = question_length(question).and_then(|length| question.get(HEADER..HEADER + length));
    let Some(asked) = asked else { return false };
    let repeated = answer.get(HEADER..HEADER + asked.len());
    answer.get(..2) == question.get(..2)
        && answer.get(2).is_some_and(|flags| flags & IS_RESPONSE != 0)
        && repeated.is_some_and(|repeated| repeated.eq_ignore_ascii_case(asked))
}

/// The length of the first question of a message: labels, an empty one, type and class.
fn question_length(message: &[u8]) -> Option<usize> {
    let body = message.get(12..)?;
    let mut at = 0;
    while *body.get(at)? != 0 {
        at += 1 + usize::from(body[at]);
    }
    Some(at + 5)
}

/// A socket of its own a question: its random port guards against forged answers, as does the id.
async fn ask_udp(question: &[u8], resolver: SocketAddr, payload: u16) -> std::io::Result<Vec<u8>> {
    let any: SocketAddr = if resolver.is_ipv4() {
        ([0, 0, 0, 0], 0).into()
    } else {
        ([0u16; 8], 0).into()
    };
    let socket = UdpSocket::bind(any).await?;
    socket.connect(resolver).await?;
    socket.send(question).await?;
    // Longer than what was asked for is cut, and then not valid.
    let mut buffer = vec![0; usize::from(payload.max(4096))];
    loop {
        let length = socket.recv(&mut buffer).await?;
        if answers(question, &buffer[..length]) {
            buffer.truncate(length);
            return Ok(buffer);
        }
    }
}

async fn ask_tcp(question: &[u8], resolver: SocketAddr) -> std::io::Result<Vec<u8>> {
    let mut stream = TcpStream::connect(resolver).await?;
    let length = u16::try_from(question.len()).map_err(std::io::Error::other)?;
    stream.write_all(&length.to_be_bytes()).await?;
    stream.write_all(question).await?;
    let mut answer = vec![0; usize::from(stream.read_u16().await?)];
    stream.read_exact(&mut answer).await?;
    Ok(answer)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn resolvers_are_read() {
        let text = "# x\nsearch a.b\nnameserver 192.0.2.1\nnameserver fe80::1%eth0\n nameserver 10.96.0.10\nnameserver bad\n";
        let found = host_resolvers(text, &["10.96.0.10".parse().unwrap()]);
        assert_eq!(
            found,
            ["192.0.2.1:53".parse().unwrap(), "[fe80::1]:53".parse().unwrap()]
        );
    }

    #[test]
    fn forged_answers_are_told_apart() {
        let question = b"\x12\x34\x01\x00\0\x01\0\0\0\0\0\0\x01a\x03com\0\0\x01\0\x01".to_vec();
        let check = |change: fn(&mut Vec<u8>), expected: bool| {
            let mut answer = question.clone();
            answer[2] |= 0x80;
            change(&mut answer);
            assert_eq!(answers(&question, &answer), expected, "{answer:?}");
        };
        check(|_| {}, true);
        check(|answer| answer[13] = b'A', true);
        check(|answer| answer.extend([1, 2, 3]), true);
        check(|answer| answer[0] = 0, false);
        check(|answer| answer[2] = 0, false);
        check(|answer| answer[13] = b'b', false);
        check(|answer| answer.truncate(20), false);
        check(Vec::clear, false);
        assert!(!answers(&question[..14], &question), "a question that is cut");
    }

    #[tokio::test]
    async fn a_dead_resolver_is_asked_once() {
        let good = UdpSocket::bind("127.0.0.1:0").await.unwrap();
        // Nobody listens there: it is refused at once.
        let dead = UdpSocket::bind("127.0.0.1:0")
            .await
            .unwrap()
            .local_addr()
            .unwrap();
        let upstream = Upstream::new(vec![dead, good.local_addr().unwrap()]);
        tokio::spawn(async move {
            let mut buffer = [0; 512];
            while let Ok((length, peer)) = good.recv_from(&mut buffer).await {
                // A forged answer first.
                let mut answer = buffer[..length].to_vec();
                answer[2] |= 0x80;
                let mut forged = answer.clone();
                forged[1] ^= 1;
                let _ = good.send_to(&forged, peer).await;
                let _ = good.send_to(&answer, peer).await;
            }
        });
        let question = b"\x12\x34\x01\x00\0\x01\0\0\0\0\0\0\x01a\x03com\0\0\x01\0\x01";
        let answer = upstream.ask(question, 512, false).await.unwrap();
        assert_eq!(answer[..2], question[..2]);
        assert_eq!(upstream.preferred.load(Ordering::Relaxed), 1);
    }
}
