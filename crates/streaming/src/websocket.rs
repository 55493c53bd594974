//! WebSocket as Kubernetes uses it: the first byte of a message is its channel. Base64 variants carry
//! the same in text, for browsers. A tunnel carries another protocol's bytes in messages.

use std::collections::HashMap;
use std::io;
use std::time::Duration;

use base64::Engine;
use base64::engine::general_purpose::STANDARD as BASE64;
use bytes::{Bytes, BytesMut};
use futures::stream::{SplitSink, SplitStream};
use futures::{SinkExt, StreamExt};
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt, DuplexStream};
use tokio::sync::mpsc;
use tokio_tungstenite::WebSocketStream;
use tokio_tungstenite::tungstenite::protocol::frame::coding::CloseCode;
use tokio_tungstenite::tungstenite::protocol::{CloseFrame, Role, WebSocketConfig};
use tokio_tungstenite::tungstenite::{Error, Message};
use tokio_util::sync::CancellationToken;
use tokio_util::task::AbortOnDropHandle;

use crate::pump::{PIPE_SIZE, pump};

/// Clients send 32 KiB at a time; more than this in one message ends the connection.
const MAX_MESSAGE: usize = 2 * 1024 * 1024;

/// The channel number that closes the channel in the byte after it, from v5 on.
const CLOSE_CHANNEL: u8 = 255;

const FAREWELL: Duration = Duration::from_secs(5);

/// How channels look on the wire.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Format {
    pub base64: bool,
    /// Whether the client can close single channels (v5).
    pub close: bool,
}

impl Format {
    pub fn message(self, channel: u8, data: &[u8]) -> Message {
        if self.base64 {
            let mut text = String::with_capacity(1 + data.len().div_ceil(3) * 4);
            text.push(char::from(b'0' + channel));
            BASE64.encode_string(data, &mut text);
            Message::text(text)
        } else {
            let mut bytes = BytesMut::with_capacity(1 + data.len());
            bytes.extend_from_slice(&[channel]);
            bytes.extend_from_slice(data);
            Message::binary(bytes.freeze())
        }
    }

    /// A message without a channel.
    pub fn whole(self, data: Bytes) -> Message {
        if self.base64 {
            Message::text(BASE64.encode(&data))
        } else {
            Message::binary(data)
        }
    }

    fn parse(self, message: &[u8]) -> Option<Parsed> {
        let (first, rest) = message.split_first()?;
        if self.base64 {
            let channel = first.checked_sub(b'0').filter(|channel| *channel < 10)?;
            return Some(Parsed::Data(channel, BASE64.decode(rest).ok()?.into()));
        }
        if self.close && *first == CLOSE_CHANNEL {
            return Some(Parsed::Close(*rest.first()?));
        }
        Some(Parsed::Data(*first, Bytes::copy_from_slice(rest)))
    }
}

#[derive(Debug, PartialEq, Eq)]
enum Parsed {
    Data(u8, Bytes),
    Close(u8),
}

async fn open<IO>(io: IO) -> WebSocketStream<IO>
where
    IO: AsyncRead + AsyncWrite + Unpin,
{
    let config = WebSocketConfig::default()
        .max_message_size(Some(MAX_MESSAGE))
        .max_frame_size(Some(MAX_MESSAGE));
    WebSocketStream::from_raw_socket(io, Role::Server, Some(config)).await
}

/// One connection with channels.
pub(crate) struct Session {
    pub out: mpsc::Sender<Message>,
    pub gone: CancellationToken,
    format: Format,
    reader: AbortOnDropHandle<()>,
    writer: AbortOnDropHandle<()>,
}

impl Session {
    /// Starts a connection and gives the reading ends of the channels that the client may write to.
    pub async fn start<IO>(io: IO, format: Format, readable: &[u8]) -> (Session, HashMap<u8, DuplexStream>)
    where
        IO: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    {
        let (sink, stream) = open(io).await.split();
        let (out, messages) = mpsc::channel(16);
        let gone = CancellationToken::new();
        let (mut ours, mut theirs) = (HashMap::new(), HashMap::new());
        for channel in readable {
            let (write, read) = tokio::io::duplex(PIPE_SIZE);
            ours.insert(*channel, write);
            theirs.insert(*channel, read);
        }
        let (reading, writing) = (gone.clone(), gone.clone());
        let session = Session {
            out,
            format,
            reader: AbortOnDropHandle::new(tokio::spawn(async move {
                let cancel = reading.clone();
                let _guard = cancel.drop_guard();
                tokio::select! {
                    () = read_messages(stream, format, ours) => {}
                    () = reading.cancelled() => {}
                }
            })),
            writer: AbortOnDropHandle::new(tokio::spawn(async move {
                if write_messages(sink, messages).await.is_err() {
                    writing.cancel();
                }
            })),
            gone,
        };
        (session, theirs)
    }

    /// A pipe whose bytes go out on a channel, and the task's body that moves them.
    pub fn pipe(&self, channel: u8) -> (DuplexStream, impl Future<Output = ()> + Send + 'static) {
        let (theirs, ours) = tokio::io::duplex(PIPE_SIZE);
        let format = self.format;
        let data = move |bytes: Bytes| format.message(channel, &bytes);
        (
            theirs,
            pump(ours, self.out.clone(), self.gone.clone(), data, None),
        )
    }

    pub async fn send(&self, channel: u8, data: &[u8]) {
        // A client that is gone misses nothing.
        let _ = self.out.send(self.format.message(channel, data)).await;
    }

    pub async fn close(self) {
        let farewell = Message::Close(Some(CloseFrame {
            code: CloseCode::Normal,
            reason: "".into(),
        }));
        if self.out.send(farewell).await.is_ok() {
            drop(self.out);
            let _ = self.writer.await;
        }
        let _ = tokio::time::timeout(FAREWELL, self.reader).await;
    }
}

async fn read_messages<IO>(
    mut stream: SplitStream<WebSocketStream<IO>>,
    format: Format,
    mut pipes: HashMap<u8, DuplexStream>,
) where
    IO: AsyncRead + AsyncWrite + Unpin,
{
    while let Some(Ok(message)) = stream.next().await {
        let bytes = match message {
            Message::Binary(bytes) => bytes,
            Message::Text(text) => Bytes::from(text),
            // Pings are answered by the library; after a close it ends the stream.
            _ => continue,
        };
        match format.parse(&bytes) {
            Some(Parsed::Data(channel, data)) => {
                if let Some(pipe) = pipes.get_mut(&channel)
                    && pipe.write_all(&data).await.is_err()
                {
                    pipes.remove(&channel);
                }
            }
            Some(Parsed::Close(channel)) => {
                pipes.remove(&channel);
            }
            None => tracing::debug!("a WebSocket client sent a message without a channel"),
        }
    }
}

async fn write_messages<IO>(
    mut sink: SplitSink<WebSocketStream<IO>, Message>,
    mut messages: mpsc::Receiver<Message>,
) -> Result<(), Error>
where
    IO: AsyncRead + AsyncWrite + Unpin,
{
    while let Some(message) = messages.recv().await {
        let last = message.is_close();
        sink.feed(message).await?;
        if last || messages.is_empty() {
            sink.flush().await?;
        }
        if last {
            break;
        }
    }
    Ok(())
}

/// Unwraps a protocol that is tunnelled in binary messages. The messages' borders mean nothing.
pub(crate) async fn tunnel<IO>(io: IO) -> DuplexStream
where
    IO: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let (sink, mut stream) = open(io).await.split();
    let (inner, outer) = tokio::io::duplex(PIPE_SIZE);
    let (from_inner, mut to_inner) = tokio::io::split(outer);
    let (out, messages) = mpsc::channel(16);
    tokio::spawn(async move {
        let reading = async {
            while let Some(Ok(message)) = stream.next().await {
                if let Message::Binary(bytes) = message {
                    to_inner.write_all(&bytes).await?;
                }
            }
            to_inner.shutdown().await?;
            io::Result::Ok(())
        };
        let writing = async {
            pump(
                from_inner,
                out.clone(),
                CancellationToken::new(),
                Message::binary,
                None,
            )
            .await;
            let farewell = CloseFrame {
                code: CloseCode::Normal,
                reason: "".into(),
            };
            let _ = out.send(Message::Close(Some(farewell))).await;
        };
        // Each direction ends by itself: the inner protocol's last words must still get out after
        // the client has closed, and the client's close must still be read after the last words.
        let _ = tokio::join!(reading, writing, write_messages(sink, messages));
    });
    inner
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn channels_on_the_wire() {
        let v5 = Format {
            base64: false,
            close: true,
        };
        let v4 = Format::default();
        let base64 = Format {
            base64: true,
            close: false,
        };
        assert_eq!(v4.message(1, b"hi"), Message::binary(&b"\x01hi"[..]));
        assert_eq!(base64.message(1, b"hi"), Message::text("1aGk="));
        let data = |channel, bytes: &'static [u8]| Some(Parsed::Data(channel, Bytes::from_static(bytes)));
        assert_eq!(v4.parse(b"\x00hi"), data(0, b"hi"));
        assert_eq!(v4.parse(b"\x00"), data(0, b""));
        assert_eq!(v4.parse(b""), None);
        assert_eq!(v4.parse(b"\xff\x00"), data(255, b"\x00"));
        assert_eq!(v5.parse(b"\xff\x00"), Some(Parsed::Close(0)));
        assert_eq!(v5.parse(b"\xff"), None);
        assert_eq!(base64.parse(b"0aGk="), data(0, b"hi"));
        assert_eq!(base64.parse(b"0!"), None);
        assert_eq!(base64.parse(b"xaGk="), None);
    }
}
