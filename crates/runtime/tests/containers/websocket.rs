//! A WebSocket client by hand, for the streaming URLs.

/// A WebSocket connection: as much of the protocol as these tests need.
pub struct Attached {
    stream: tokio::net::TcpStream,
    buffer: Vec<u8>,
}

impl Attached {
    pub async fn open(url: &str) -> Attached {
        Attached::open_with(url, "v5.channel.k8s.io")
            .await
            .expect("upgrades")
    }

    async fn open_with(url: &str, protocol: &str) -> Result<Attached, u16> {
        use tokio::io::{AsyncReadExt, AsyncWriteExt};
        let rest = url.strip_prefix("http://").expect("http");
        let (host, path) = rest.split_once('/').expect("path");
        let mut stream = tokio::net::TcpStream::connect(host).await.expect("connects");
        let request = format!(
            "GET /{path} HTTP/1.1\r\nHost: {host}\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\
             Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\
             Sec-WebSocket-Protocol: {protocol}\r\n\r\n"
        );
        stream.write_all(request.as_bytes()).await.expect("writes");
        let mut head = Vec::new();
        while !head.ends_with(b"\r\n\r\n") {
            head.push(stream.read_u8().await.expect("reads"));
        }
        let status = String::from_utf8_lossy(&head)
            .split(' ')
            .nth(1)
            .and_then(|code| code.parse().ok())
            .expect("status");
        if status == 101 {
            Ok(Attached {
                stream,
                buffer: Vec::new(),
            })
        } else {
            Err(status)
        }
    }

    pub async fn send(&mut self, data: &[u8]) {
        use tokio::io::AsyncWriteExt;
        // A mask of zeros is a mask.
        let mut frame = vec![0x82, 0x80 | data.len() as u8, 0, 0, 0, 0];
        frame.extend_from_slice(data);
        self.stream.write_all(&frame).await.expect("writes");
    }

    /// The next data frame; `None` at the end.
    async fn next(&mut self) -> Option<Vec<u8>> {
        use tokio::io::AsyncReadExt;
        loop {
            if self.buffer.len() >= 2 {
                let (opcode, short) = (self.buffer[0] & 15, usize::from(self.buffer[1] & 127));
                let (head, length) = match short {
                    126 if self.buffer.len() >= 4 => (
                        4,
                        usize::from(u16::from_be_bytes([self.buffer[2], self.buffer[3]])),
                    ),
                    126 => (4, usize::MAX / 2),
                    short => (2, short),
                };
                if self.buffer.len() >= head + length {
                    let data: Vec<u8> = self.buffer.drain(..head + length).skip(head).collect();
                    match opcode {
                        8 => return None,
                        1 | 2 => return Some(data),
                        _ => continue,
                    }
                }
            }
            let mut bytes = [0; 4096];
            let length = self.stream.read(&mut bytes).await.ok()?;
            if length == 0 {
                return None;
            }
            self.buffer.extend_from_slice(&bytes[..length]);
        }
    }

    pub async fn text(&mut self, channel: u8, length: usize) -> String {
        let mut text = String::new();
        while text.len() < length {
            let frame = self.next().await.expect("more");
            if frame.first() == Some(&channel) {
                text += &String::from_utf8_lossy(&frame[1..]);
            }
        }
        text
    }
}

pub async fn websocket(url: &str, protocol: &str, send: &[&[u8]]) -> Vec<Vec<u8>> {
    let mut connection = Attached::open_with(url, protocol).await.expect("upgrades");
    for data in send {
        connection.send(data).await;
    }
    let mut frames = Vec::new();
    while let Some(frame) = connection.next().await {
        // A forwarded connection stays open; its answer is all that is awaited.
        let done = protocol.starts_with("v4") && frame.first() == Some(&0) && frame.ends_with(b"\n");
        frames.push(frame);
        if done {
            break;
        }
    }
    frames
}

pub async fn websocket_status(url: &str) -> u16 {
    Attached::open_with(url, "v5.channel.k8s.io")
        .await
        .err()
        .unwrap_or(101)
}
