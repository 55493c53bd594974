//! A connection's writes, gathered. The HTTP/2 layer flushes after each frame, and through TLS each
//! flush is a record and a system call of its own; a connection with fifty watches would pay that fifty
//! times for one event. Here a flush only marks the end of a frame, and what came together is sent when
//! the connection has nothing more to say. It knows nothing of HTTP.
//!
//! ```text
//! HTTP/2 ── write, flush, write, flush ──► Cork (buffer) ── one write, one flush ──► TLS ──► socket
//! ```

use std::future::poll_fn;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, ready};

use parking_lot::Mutex;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

/// More than this is not kept back: four records of TLS.
const FULL: usize = 64 * 1024;
/// A buffer larger than this is given back once it is sent: idle connections are many.
const KEEP: usize = 4 * 1024;
/// A write of this size is a part of something large: the first of them is sent at once, so that the peer has
/// something to do while the rest is made ready.
const LARGE: usize = 12 * 1024;
/// Nothing longer is copied at once, neither here nor by TLS. From 2,112 bytes on the C library copies by `rep movsb`,
/// which is several times slower on some processors (AMD's Zen 3 and 4) when source and target lie alike within
/// their pages, as they do in a stream.
const BLOCK: usize = 2 * 1024;
/// Blocks that are handed on at once: all that is kept back, and the write that came on top of it.
const BLOCKS: usize = 48;
/// What TLS should take at once, so that the end of something is not sent in a small write of its own.
pub const AT_ONCE: usize = BLOCK * BLOCKS;

/// Who was sent this much has something to do.
const MUCH: usize = 4 * 1024;

/// Lets the receiver run. If it is on this machine, the kernel has just woken it on the core of this very thread,
/// because a thread that sends usually sleeps next; one with events for twenty connections does not, and the first
/// receiver would wait for the last. One thread at a time, so that the others go on sending meanwhile.
fn step_aside() {
    static ASIDE: AtomicBool = AtomicBool::new(false);
    if !ASIDE.swap(true, Ordering::Relaxed) {
        std::thread::yield_now();
        ASIDE.store(false, Ordering::Relaxed);
    }
}

/// Appends `bytes` in blocks.
pub fn append(buffer: &mut Vec<u8>, bytes: &[u8]) {
    buffer.reserve(bytes.len());
    for block in bytes.chunks(BLOCK) {
        buffer.extend_from_slice(block);
    }
}

/// A stream whose flushes wait for [`Cork::run`], as long as that runs. Its clones are the same stream.
pub struct Cork<S>(Arc<Mutex<Inner<S>>>);

impl<S> Clone for Cork<S> {
    fn clone(&self) -> Cork<S> {
        Cork(self.0.clone())
    }
}

struct Inner<S> {
    stream: S,
    buffer: Vec<u8>,
    /// How much of `buffer` the stream has taken.
    sent: usize,
    /// Whether somebody sees to what flushes leave here.
    corked: bool,
    /// Whether the stream was written to since it was last flushed.
    dirty: bool,
    /// Whether something large is on its way.
    large: bool,
    /// How much was sent the last time: room for as much is made at once, instead of bit by bit.
    usual: usize,
    /// Told whether the stream takes what is sent.
    tell: Option<Tell>,
}

type Tell = Box<dyn Fn(bool) + Send>;

impl<S: AsyncWrite + Unpin> Inner<S> {
    fn drain(&mut self, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        while self.sent < self.buffer.len() {
            let mut blocks = [io::IoSlice::new(&[]); BLOCKS];
            let mut used = 0;
            for (place, block) in blocks.iter_mut().zip(self.buffer[self.sent..].chunks(BLOCK)) {
                *place = io::IoSlice::new(block);
                used += 1;
            }
            let written = Pin::new(&mut self.stream).poll_write_vectored(context, &blocks[..used]);
            if let Some(tell) = &self.tell {
                tell(written.is_pending());
            }
            let count = ready!(written)?;
            if count == 0 {
                return Poll::Ready(Err(io::ErrorKind::WriteZero.into()));
            }
            self.sent += count;
            self.dirty = true;
        }
        if self.sent > 0 {
            self.usual = self.sent;
        }
        self.sent = 0;
        self.buffer.clear();
        Poll::Ready(Ok(()))
    }

    fn send(&mut self, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.large = false;
        ready!(self.drain(context))?;
        if self.buffer.capacity() > KEEP {
            self.buffer = Vec::new();
        }
        if self.dirty {
            ready!(Pin::new(&mut self.stream).poll_flush(context))?;
            self.dirty = false;
        }
        Poll::Ready(Ok(()))
    }

    /// Makes room for another write.
    fn room(&mut self, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        if self.buffer.len() >= FULL {
            ready!(self.drain(context))?;
        }
        if self.buffer.is_empty() {
            self.buffer.reserve(self.usual);
        }
        Poll::Ready(Ok(()))
    }
}

impl<S: AsyncRead + AsyncWrite + Unpin> Cork<S> {
    pub fn new(stream: S) -> Cork<S> {
        Cork(Arc::new(Mutex::new(Inner {
            stream,
            buffer: Vec::new(),
            sent: 0,
            corked: false,
            dirty: false,
            large: false,
            usual: 0,
            tell: None,
        })))
    }

    /// Has `tell` called with each write: true when the stream takes nothing for now.
    pub fn telling(self, tell: impl Fn(bool) + Send + 'static) -> Cork<S> {
        self.0.lock().tell = Some(Box::new(tell));
        self
    }

    /// Drives `connection`, which writes to this stream, and sends what it wrote each time it has come
    /// to rest.
    pub async fn run<F, T, E>(&self, connection: F) -> Result<T, E>
    where
        F: Future<Output = Result<T, E>>,
        E: From<io::Error>,
    {
        let mut connection = std::pin::pin!(connection);
        self.0.lock().corked = true;
        let result = poll_fn(|context| {
            if let Poll::Ready(result) = connection.as_mut().poll(context) {
                return Poll::Ready(result);
            }
            let (sent, much) = {
                let mut inner = self.0.lock();
                let much = inner.buffer.len() - inner.sent >= MUCH;
                (inner.send(context), much)
            };
            if much {
                step_aside();
            }
            match sent {
                Poll::Ready(Err(error)) => Poll::Ready(Err(error.into())),
                _ => Poll::Pending,
            }
        })
        .await;
        // Whoever has the stream now (an upgraded connection) flushes for itself.
        self.0.lock().corked = false;
        if result.is_ok() {
            poll_fn(|context| self.0.lock().send(context)).await?;
        }
        result
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Cork<S> {
    fn poll_read(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0.lock().stream).poll_read(context, buffer)
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Cork<S> {
    fn poll_write(self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let mut inner = self.0.lock();
        ready!(inner.room(context))?;
        append(&mut inner.buffer, bytes);
        Poll::Ready(Ok(bytes.len()))
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let mut inner = self.0.lock();
        ready!(inner.room(context))?;
        let before = inner.buffer.len();
        for slice in slices {
            append(&mut inner.buffer, slice);
        }
        let count = inner.buffer.len() - before;
        if count >= LARGE && !inner.large {
            inner.large = true;
            if let Poll::Ready(Err(error)) = inner.drain(context) {
                return Poll::Ready(Err(error));
            }
        }
        Poll::Ready(Ok(count))
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    fn poll_flush(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let mut inner = self.0.lock();
        if inner.corked {
            return Poll::Ready(Ok(()));
        }
        inner.send(context)
    }

    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let mut inner = self.0.lock();
        ready!(inner.drain(context))?;
        Pin::new(&mut inner.stream).poll_shutdown(context)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    /// Counts the writes that reach it.
    struct Counted(tokio::io::DuplexStream, Arc<Mutex<Vec<usize>>>);

    impl AsyncRead for Counted {
        fn poll_read(
            mut self: Pin<&mut Self>,
            context: &mut Context<'_>,
            buffer: &mut ReadBuf<'_>,
        ) -> Poll<io::Result<()>> {
            Pin::new(&mut self.0).poll_read(context, buffer)
        }
    }

    impl AsyncWrite for Counted {
        fn poll_write(
            mut self: Pin<&mut Self>,
            context: &mut Context<'_>,
            bytes: &[u8],
        ) -> Poll<io::Result<usize>> {
            let count = ready!(Pin::new(&mut self.0).poll_write(context, bytes))?;
            self.1.lock().push(count);
            Poll::Ready(Ok(count))
        }

        fn poll_write_vectored(
            mut self: Pin<&mut Self>,
            context: &mut Context<'_>,
            slices: &[io::IoSlice<'_>],
        ) -> Poll<io::Result<usize>> {
            let count = ready!(Pin::new(&mut self.0).poll_write_vectored(context, slices))?;
            self.1.lock().push(count);
            Poll::Ready(Ok(count))
        }

        fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
            Pin::new(&mut self.0).poll_flush(context)
        }

        fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
            Pin::new(&mut self.0).poll_shutdown(context)
        }
    }

    fn pair(room: usize) -> (Cork<Counted>, tokio::io::DuplexStream, Arc<Mutex<Vec<usize>>>) {
        let (near, far) = tokio::io::duplex(room);
        let writes = Arc::new(Mutex::new(Vec::new()));
        (Cork::new(Counted(near, writes.clone())), far, writes)
    }

    #[tokio::test]
    async fn what_is_written_together_is_sent_together() {
        let (cork, mut far, writes) = pair(1 << 20);
        let mut stream = cork.clone();
        let talk = async move {
            for _ in 0..10 {
                stream.write_all(b"frame").await?;
                stream.flush().await?;
            }
            // Answered only if it was sent although nothing was written after it.
            stream.read_u8().await?;
            stream.write_all(b"end").await?;
            Ok::<_, io::Error>(())
        };
        let peer = async move {
            let mut frames = [0; 50];
            far.read_exact(&mut frames).await.expect("the frames");
            far.write_u8(1).await.expect("an answer");
            let mut end = [0; 3];
            far.read_exact(&mut end).await.expect("the end");
        };
        let (talked, ()) = tokio::join!(cork.run(talk), peer);
        talked.expect("no error");
        assert_eq!(*writes.lock(), [50, 3]);
    }

    #[tokio::test]
    async fn a_slow_peer_holds_the_writer_back() {
        let (cork, mut far, _) = pair(1000);
        let mut stream = cork.clone();
        let talk = async move {
            for n in 0..300_u32 {
                stream.write_all(&n.to_be_bytes().repeat(256)).await?;
                stream.flush().await?;
            }
            stream.shutdown().await
        };
        let held = cork.clone();
        let peer = async move {
            let mut all = Vec::new();
            let mut piece = [0; 4096];
            loop {
                assert!(held.0.lock().buffer.len() <= FULL + 1024);
                match far.read(&mut piece).await.expect("reads") {
                    0 => break all,
                    count => all.extend_from_slice(&piece[..count]),
                }
            }
        };
        let (talked, all) = tokio::join!(cork.run(talk), peer);
        talked.expect("no error");
        let expected: Vec<u8> = (0..300_u32).flat_map(|n| n.to_be_bytes().repeat(256)).collect();
        assert_eq!(all, expected);
    }

    #[tokio::test]
    async fn once_uncorked_a_flush_sends() {
        let (cork, mut far, _) = pair(1 << 20);
        cork.run(async { Ok::<_, io::Error>(()) })
            .await
            .expect("no error");
        let mut stream = cork;
        stream.write_all(b"x").await.expect("writes");
        stream.flush().await.expect("flushes");
        assert_eq!(far.read_u8().await.expect("reads"), b'x');
    }
}
