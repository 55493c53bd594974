//! Questions about the rest of the world go to the host's resolvers, bytes in, bytes out.

use std::net::{IpAddr, SocketAddr};
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpStream, UdpSocket};
use tokio::time::timeout;

const PATIENCE: Duration = Duration::from_secs(2);

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

/// Asks each resolver in turn; `None` when none answers.
pub async fn forward(question: &[u8], resolvers: &[SocketAddr], over_tcp: bool) -> Option<Vec<u8>> {
    for resolver in resolvers {
        let asked = async {
            if over_tcp {
                ask_tcp(question, *resolver).await
            } else {
                ask_udp(question, *resolver).await
            }
        };
        match timeout(PATIENCE, asked).await {
            Ok(Ok(answer)) => return Some(answer),
            Ok(Err(error)) => tracing::debug!(%resolver, %error, "resolver failed"),
            Err(_) => tracing::debug!(%resolver, "resolver did not answer"),
        }
    }
    None
}

/// A socket of its own a question: its random port guards against forged answers, as does the id.
async fn ask_udp(question: &[u8], resolver: SocketAddr) -> std::io::Result<Vec<u8>> {
    let any: SocketAddr = if resolver.is_ipv4() {
        ([0, 0, 0, 0], 0).into()
    } else {
        ([0u16; 8], 0).into()
    };
    let socket = UdpSocket::bind(any).await?;
    socket.connect(resolver).await?;
    socket.send(question).await?;
    let mut buffer = vec![0; 65_535];
    loop {
        let length = socket.recv(&mut buffer).await?;
        if buffer.get(..2) == question.get(..2) {
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
}
