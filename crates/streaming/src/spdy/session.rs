//! One SPDY connection: a task that reads and gives data to the streams' pipes, a task that writes.

use std::collections::HashMap;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use parking_lot::Mutex;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, BufReader, DuplexStream};
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;
use tokio_util::task::AbortOnDropHandle;

use super::headers::{Headers, Packer, Unpacker};
use crate::pump::PIPE_SIZE;

const VERSION: u16 = 3;
const SYN_STREAM: u16 = 1;
const SYN_REPLY: u16 = 2;
const RST_STREAM: u16 = 3;
const PING: u16 = 6;
const GOAWAY: u16 = 7;
const HEADERS: u16 = 8;
const FLAG_FIN: u8 = 1;

const PROTOCOL_ERROR: u32 = 1;
pub(crate) const REFUSED_STREAM: u32 = 3;

/// Control frames carry a few headers; a longer one is an attack.
const MAX_CONTROL: usize = 64 * 1024;

/// Open streams on one connection; a port-forward uses two a TCP connection.
const MAX_STREAMS: usize = 1024;

/// How long the client may take to hang up after we said good-bye.
const FAREWELL: Duration = Duration::from_secs(5);

/// A stream the client opened. Nothing is answered until [`Outgoing::SynReply`] is sent.
#[derive(Debug)]
pub(crate) struct Incoming {
    pub id: u32,
    pub headers: Headers,
    /// What the client sends; ends when the client closes its half.
    pub data: DuplexStream,
    /// Cancelled when the client resets the stream or goes away.
    pub gone: CancellationToken,
}

#[derive(Debug)]
pub(crate) enum Outgoing {
    SynReply(u32),
    Data { id: u32, bytes: Bytes, fin: bool },
    Reset { id: u32, status: u32 },
    Ping(u32),
    Close,
}

impl Outgoing {
    pub fn data(id: u32) -> impl Fn(Bytes) -> Outgoing {
        move |bytes| Outgoing::Data {
            id,
            bytes,
            fin: false,
        }
    }

    pub fn fin(id: u32) -> Outgoing {
        Outgoing::Data {
            id,
            bytes: Bytes::new(),
            fin: true,
        }
    }
}

#[derive(Default)]
struct Halves {
    gone: CancellationToken,
    client_closed: bool,
    we_closed: bool,
}

/// Which streams are open. A stream is forgotten when both halves are closed, so a long port-forward
/// does not collect them.
type Open = Arc<Mutex<HashMap<u32, Halves>>>;

pub(crate) struct Session {
    pub incoming: mpsc::Receiver<Incoming>,
    pub out: mpsc::Sender<Outgoing>,
    /// Cancelled when the connection is gone.
    pub gone: CancellationToken,
    reader: AbortOnDropHandle<()>,
    writer: AbortOnDropHandle<()>,
}

impl Session {
    pub fn start<IO>(io: IO) -> Session
    where
        IO: AsyncRead + AsyncWrite + Send + 'static,
    {
        let (read, write) = tokio::io::split(io);
        let (accept, incoming) = mpsc::channel(16);
        let (out, frames) = mpsc::channel(16);
        let gone = CancellationToken::new();
        let open = Open::default();
        let reader = Reader {
            from: BufReader::with_capacity(PIPE_SIZE, read),
            unpacker: Unpacker::new(),
            accept,
            out: out.clone(),
            pipes: HashMap::new(),
            open: open.clone(),
            last_id: 0,
            gone: gone.clone(),
        };
        let writing = gone.clone();
        Session {
            incoming,
            out,
            gone: gone.clone(),
            reader: AbortOnDropHandle::new(tokio::spawn(async move {
                let cancel = gone.clone();
                let _guard = cancel.drop_guard();
                if let Err(error) = reader.run().await {
                    tracing::debug!(%error, "a SPDY connection ended");
                }
            })),
            writer: AbortOnDropHandle::new(tokio::spawn(async move {
                // A client that cannot be written to is gone, even if it still sends.
                if let Err(error) = write_frames(write, frames, open).await {
                    tracing::debug!(%error, "a SPDY connection cannot be written to");
                    writing.cancel();
                }
            })),
        }
    }

    /// Says good-bye, then waits a little for the client to hang up: closing a connection that has
    /// unread input makes the kernel reset it, and the client could lose the end of its output.
    pub async fn close(self) {
        drop(self.incoming);
        if self.out.send(Outgoing::Close).await.is_ok() {
            let _ = self.writer.await;
        }
        let _ = tokio::time::timeout(FAREWELL, self.reader).await;
    }
}

struct Reader<R> {
    from: BufReader<R>,
    unpacker: Unpacker,
    accept: mpsc::Sender<Incoming>,
    out: mpsc::Sender<Outgoing>,
    pipes: HashMap<u32, DuplexStream>,
    open: Open,
    last_id: u32,
    gone: CancellationToken,
}

fn malformed(what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what.to_string())
}

fn u32_at(payload: &[u8], at: usize) -> io::Result<u32> {
    payload
        .get(at..at + 4)
        .and_then(|bytes| Some(u32::from_be_bytes(bytes.try_into().ok()?)))
        .ok_or_else(|| malformed("frame is cut short"))
}

/// Stream ids have 31 bits; the first is reserved.
const ID_MASK: u32 = 0x7fff_ffff;

impl<R: AsyncRead + Unpin> Reader<R> {
    async fn run(mut self) -> io::Result<()> {
        let gone = self.gone.clone();
        let result = tokio::select! {
            result = self.read_frames() => result,
            () = gone.cancelled() => Ok(()),
        };
        for halves in self.open.lock().values() {
            halves.gone.cancel();
        }
        result
    }

    async fn read_frames(&mut self) -> io::Result<()> {
        let mut head = [0u8; 8];
        loop {
            match self.from.read_exact(&mut head).await {
                Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(()),
                read => read?,
            };
            let first = u32_at(&head, 0)?;
            let flags = head[4];
            let length = (u32_at(&head, 4)? & 0x00ff_ffff) as usize;
            if first & !ID_MASK == 0 {
                self.data(first, flags, length).await?;
                continue;
            }
            if (first >> 16) as u16 & 0x7fff != VERSION {
                return Err(malformed("not SPDY/3"));
            }
            if length > MAX_CONTROL {
                return Err(malformed("control frame is too large"));
            }
            let mut payload = vec![0; length];
            self.from.read_exact(&mut payload).await?;
            self.control(first as u16, flags, &payload).await?;
        }
    }

    async fn data(&mut self, id: u32, flags: u8, length: usize) -> io::Result<()> {
        let mut left = length;
        while left > 0 {
            use tokio::io::AsyncBufReadExt;
            let chunk = self.from.fill_buf().await?;
            if chunk.is_empty() {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            let count = chunk.len().min(left);
            if let Some(pipe) = self.pipes.get_mut(&id)
                && pipe.write_all(&chunk[..count]).await.is_err()
            {
                // Nobody reads this stream any more; the rest of it is dropped.
                self.pipes.remove(&id);
            }
            self.from.consume(count);
            left -= count;
        }
        if flags & FLAG_FIN != 0 {
            self.close_half(id);
        }
        Ok(())
    }

    fn close_half(&mut self, id: u32) {
        self.pipes.remove(&id);
        close_half(&self.open, id, |halves| halves.client_closed = true);
    }

    async fn control(&mut self, kind: u16, flags: u8, payload: &[u8]) -> io::Result<()> {
        match kind {
            SYN_STREAM => {
                let id = u32_at(payload, 0)? & ID_MASK;
                let block = payload.get(10..).ok_or_else(|| malformed("frame is cut short"))?;
                // Unpacked first: the blocks share one zlib stream, refused or not.
                let headers = self.unpacker.unpack(block)?;
                self.opened(id, flags, headers).await
            }
            SYN_REPLY | HEADERS => {
                let block = payload.get(4..).ok_or_else(|| malformed("frame is cut short"))?;
                self.unpacker.unpack(block).map(drop)
            }
            RST_STREAM => {
                let id = u32_at(payload, 0)? & ID_MASK;
                self.pipes.remove(&id);
                if let Some(halves) = self.open.lock().remove(&id) {
                    halves.gone.cancel();
                }
                Ok(())
            }
            PING => {
                let id = u32_at(payload, 0)?;
                // Even ones are answers to pings of ours, and we send none.
                if id % 2 == 1 {
                    self.send(Outgoing::Ping(id)).await;
                }
                Ok(())
            }
            GOAWAY => Ok(()),
            // SETTINGS, WINDOW_UPDATE and what may come: nothing here depends on them.
            _ => Ok(()),
        }
    }

    async fn opened(&mut self, id: u32, flags: u8, headers: Headers) -> io::Result<()> {
        // Ids of clients are odd and grow.
        if id.is_multiple_of(2) || id <= self.last_id {
            self.send(Outgoing::Reset {
                id,
                status: PROTOCOL_ERROR,
            })
            .await;
            return Ok(());
        }
        self.last_id = id;
        let (ours, data) = tokio::io::duplex(PIPE_SIZE);
        let gone = self.gone.child_token();
        let full = {
            let mut open = self.open.lock();
            let full = open.len() >= MAX_STREAMS;
            if !full {
                open.insert(
                    id,
                    Halves {
                        gone: gone.clone(),
                        ..Halves::default()
                    },
                );
            }
            full
        };
        if full
            || self
                .accept
                .send(Incoming {
                    id,
                    headers,
                    data,
                    gone,
                })
                .await
                .is_err()
        {
            self.open.lock().remove(&id);
            self.send(Outgoing::Reset {
                id,
                status: REFUSED_STREAM,
            })
            .await;
            return Ok(());
        }
        self.pipes.insert(id, ours);
        if flags & FLAG_FIN != 0 {
            self.close_half(id);
        }
        Ok(())
    }

    /// The writer's absence means that the connection ends; the reader will see that itself.
    async fn send(&mut self, frame: Outgoing) {
        let _ = self.out.send(frame).await;
    }
}

fn close_half(open: &Open, id: u32, close: impl FnOnce(&mut Halves)) {
    let mut open = open.lock();
    if let Some(halves) = open.get_mut(&id) {
        close(halves);
        if halves.client_closed && halves.we_closed {
            open.remove(&id);
        }
    }
}

async fn write_frames<W: AsyncWrite + Unpin>(
    mut to: W,
    mut frames: mpsc::Receiver<Outgoing>,
    open: Open,
) -> io::Result<()> {
    let mut packer = Packer::default();
    while let Some(frame) = frames.recv().await {
        match frame {
            Outgoing::SynReply(id) => {
                let block = packer.pack(&[]);
                to.write_all(&control(SYN_REPLY, &[&id.to_be_bytes(), &block]))
                    .await?;
            }
            Outgoing::Data { id, bytes, fin } => {
                let length = (bytes.len() as u32) & 0x00ff_ffff;
                let mut head = [0; 8];
                head[..4].copy_from_slice(&id.to_be_bytes());
                head[4..].copy_from_slice(&length.to_be_bytes());
                head[4] = if fin { FLAG_FIN } else { 0 };
                to.write_all(&head).await?;
                to.write_all(&bytes).await?;
                if fin {
                    close_half(&open, id, |halves| halves.we_closed = true);
                }
            }
            Outgoing::Reset { id, status } => {
                open.lock().remove(&id);
                to.write_all(&control(RST_STREAM, &[&id.to_be_bytes(), &status.to_be_bytes()]))
                    .await?;
            }
            Outgoing::Ping(id) => to.write_all(&control(PING, &[&id.to_be_bytes()])).await?,
            Outgoing::Close => {
                to.write_all(&control(GOAWAY, &[&[0; 8]])).await?;
                break;
            }
        }
        if frames.is_empty() {
            to.flush().await?;
        }
    }
    to.flush().await?;
    to.shutdown().await
}

fn control(kind: u16, parts: &[&[u8]]) -> Vec<u8> {
    let length: usize = parts.iter().map(|part| part.len()).sum();
    let mut frame = Vec::with_capacity(8 + length);
    frame.extend((0x8000 | VERSION).to_be_bytes());
    frame.extend(kind.to_be_bytes());
    frame.extend((length as u32).to_be_bytes());
    for part in parts {
        frame.extend_from_slice(part);
    }
    frame
}

/// A client for tests: what the other side of the wire does, written from its point of view.
#[cfg(test)]
pub(crate) mod client {
    use super::*;
    use crate::spdy::headers::client::ClientPacker;

    #[derive(Debug, PartialEq, Eq)]
    pub(crate) enum Frame {
        Reply(u32),
        Data(u32, Vec<u8>, bool),
        Reset(u32, u32),
        Ping(u32),
        GoAway,
    }

    pub(crate) struct Client<IO> {
        pub io: IO,
        packer: ClientPacker,
        next_id: u32,
    }

    impl<IO: AsyncRead + AsyncWrite + Unpin> Client<IO> {
        pub fn new(io: IO) -> Client<IO> {
            Client {
                io,
                packer: ClientPacker::new(),
                next_id: 1,
            }
        }

        pub async fn open(&mut self, headers: &[(&str, &str)]) -> u32 {
            let id = self.next_id;
            self.next_id += 2;
            let block = self.packer.pack(headers);
            let frame = control(SYN_STREAM, &[&id.to_be_bytes(), &[0; 6], &block]);
            self.io.write_all(&frame).await.unwrap();
            id
        }

        pub async fn data(&mut self, id: u32, bytes: &[u8], fin: bool) {
            let mut frame = id.to_be_bytes().to_vec();
            frame.extend((bytes.len() as u32).to_be_bytes());
            frame[4] = u8::from(fin);
            frame.extend_from_slice(bytes);
            self.io.write_all(&frame).await.unwrap();
        }

        pub async fn ping(&mut self, id: u32) {
            self.io
                .write_all(&control(PING, &[&id.to_be_bytes()]))
                .await
                .unwrap();
        }

        pub async fn reset(&mut self, id: u32) {
            self.io
                .write_all(&control(RST_STREAM, &[&id.to_be_bytes(), &5u32.to_be_bytes()]))
                .await
                .unwrap();
        }

        /// The next frame, or `None` at the end of the connection.
        pub async fn next(&mut self) -> Option<Frame> {
            let mut head = [0; 8];
            self.io.read_exact(&mut head).await.ok()?;
            let length = (u32_at(&head, 4).unwrap() & 0xff_ffff) as usize;
            let mut payload = vec![0; length];
            self.io.read_exact(&mut payload).await.ok()?;
            let first = u32_at(&head, 0).unwrap();
            if first & !ID_MASK == 0 {
                return Some(Frame::Data(first, payload, head[4] & FLAG_FIN != 0));
            }
            let at = |at| u32_at(&payload, at).unwrap();
            Some(match first as u16 {
                SYN_REPLY => Frame::Reply(at(0)),
                RST_STREAM => Frame::Reset(at(0), at(4)),
                PING => Frame::Ping(at(0)),
                GOAWAY => Frame::GoAway,
                other => panic!("frame type {other}"),
            })
        }

        /// Everything until the connection ends: the bytes of each stream and whether it was closed.
        pub async fn collect(&mut self) -> HashMap<u32, (Vec<u8>, bool)> {
            let mut streams = HashMap::<u32, (Vec<u8>, bool)>::new();
            while let Some(frame) = self.next().await {
                if let Frame::Data(id, bytes, fin) = frame {
                    let stream = streams.entry(id).or_default();
                    stream.0.extend(bytes);
                    stream.1 |= fin;
                }
            }
            streams
        }
    }
}

#[cfg(test)]
mod tests {
    use super::client::{Client, Frame};
    use super::*;

    fn session() -> (Client<DuplexStream>, Session) {
        let (client, server) = tokio::io::duplex(1 << 16);
        (Client::new(client), Session::start(server))
    }

    #[tokio::test]
    async fn streams_pings_and_the_end() {
        let (mut client, mut session) = session();
        let id = client.open(&[("streamtype", "stdin"), ("port", "80")]).await;
        client.ping(7).await;
        client.data(id, b"hello", true).await;
        let mut stream = session.incoming.recv().await.unwrap();
        assert_eq!((stream.id, stream.headers.get("port")), (1, Some("80")));
        let mut text = String::new();
        stream.data.read_to_string(&mut text).await.unwrap();
        assert_eq!(text, "hello");
        assert_eq!(client.next().await, Some(Frame::Ping(7)));
        session.out.send(Outgoing::SynReply(id)).await.unwrap();
        session
            .out
            .send(Outgoing::data(id)(Bytes::from_static(b"x")))
            .await
            .unwrap();
        session.out.send(Outgoing::fin(id)).await.unwrap();
        assert_eq!(client.next().await, Some(Frame::Reply(id)));
        assert_eq!(client.next().await, Some(Frame::Data(id, b"x".to_vec(), false)));
        assert_eq!(client.next().await, Some(Frame::Data(id, vec![], true)));
        // A reset tells the stream; the end of the connection tells all.
        let second = client.open(&[]).await;
        let stream = session.incoming.recv().await.unwrap();
        client.reset(second).await;
        stream.gone.cancelled().await;
        assert!(!session.gone.is_cancelled());
        client.open(&[]).await;
        let stream = session.incoming.recv().await.unwrap();
        drop(client);
        stream.gone.cancelled().await;
        session.gone.cancelled().await;
        session.close().await;
    }

    #[tokio::test]
    async fn a_stream_nobody_reads_does_not_stop_the_others() {
        let (mut client, mut session) = session();
        let dropped = client.open(&[]).await;
        drop(session.incoming.recv().await.unwrap());
        client.data(dropped, &vec![0; 3 * PIPE_SIZE], false).await;
        let other = client.open(&[]).await;
        client.data(other, b"here", true).await;
        let mut stream = session.incoming.recv().await.unwrap();
        let mut text = String::new();
        stream.data.read_to_string(&mut text).await.unwrap();
        assert_eq!(text, "here");
    }

    #[tokio::test]
    async fn too_many_streams_are_refused_and_closed_ones_forgotten() {
        let (mut client, mut session) = session();
        let mut streams = Vec::new();
        for _ in 0..MAX_STREAMS {
            client.open(&[]).await;
            streams.push(session.incoming.recv().await.unwrap());
        }
        let refused = client.open(&[]).await;
        assert_eq!(client.next().await, Some(Frame::Reset(refused, REFUSED_STREAM)));
        client.data(1, b"", true).await;
        session.out.send(Outgoing::fin(1)).await.unwrap();
        assert_eq!(client.next().await, Some(Frame::Data(1, vec![], true)));
        // The ping is answered after the FIN before it was handled.
        client.ping(1).await;
        assert_eq!(client.next().await, Some(Frame::Ping(1)));
        client.open(&[]).await;
        assert!(session.incoming.recv().await.is_some());
    }

    /// Whatever comes in, the reader ends or goes on; it never panics and never keeps more than it may.
    #[tokio::test]
    async fn garbage_never_panics() {
        let mut seed = 0x9e37_79b9_7f4a_7c15u64;
        let mut random = move || {
            seed ^= seed << 13;
            seed ^= seed >> 7;
            seed ^= seed << 17;
            seed
        };
        for round in 0..400 {
            let mut packer = crate::spdy::headers::client::ClientPacker::new();
            let mut wire = Vec::new();
            for frame in 0..4u32 {
                let block = packer.pack(&[("streamtype", "data"), ("port", "80")]);
                let id = (frame * 2 + 1).to_be_bytes();
                wire.extend(control(SYN_STREAM, &[&id, &[0; 6], &block]));
                wire.extend(control((random() % 12) as u16, &[&id, &random().to_be_bytes()]));
                wire.extend(id);
                wire.extend([0, 0, 0, 3, 1, 2, 3]);
            }
            if round % 4 == 0 {
                wire = (0..random() % 200).map(|_| random() as u8).collect();
            }
            for _ in 0..random() % 6 {
                if wire.is_empty() {
                    break;
                }
                let at = random() as usize % wire.len();
                wire[at] = random() as u8;
            }
            let (mut client, server) = tokio::io::duplex(1 << 20);
            let session = Session::start(server);
            client.write_all(&wire).await.unwrap();
            client.shutdown().await.unwrap();
            let Session {
                mut incoming, reader, ..
            } = session;
            let drain = async { while incoming.recv().await.is_some() {} };
            let (ended, ()) = tokio::join!(reader, drain);
            assert!(ended.is_ok(), "round {round}: the reader panicked on {wire:02x?}");
        }
    }
}
