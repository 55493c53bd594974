//! A connection that ends when nothing has passed over it for a while, in either direction.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::{Instant, Sleep, sleep};

pub struct IdleLimited<S> {
    inner: S,
    limit: Duration,
    end: Pin<Box<Sleep>>,
}

impl<S> IdleLimited<S> {
    pub fn new(inner: S, limit: Duration) -> Self {
        IdleLimited {
            inner,
            limit,
            end: Box::pin(sleep(limit)),
        }
    }

    fn used(&mut self) {
        // Nothing to wait for as long as that is a time that cannot be told.
        if let Some(end) = Instant::now().checked_add(self.limit) {
            self.end.as_mut().reset(end);
        }
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for IdleLimited<S> {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        match Pin::new(&mut this.inner).poll_read(cx, buf) {
            Poll::Ready(result) => {
                this.used();
                Poll::Ready(result)
            }
            Poll::Pending => {
                ready!(this.end.as_mut().poll(cx));
                Poll::Ready(Err(io::Error::from(io::ErrorKind::TimedOut)))
            }
        }
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for IdleLimited<S> {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        let written = ready!(Pin::new(&mut this.inner).poll_write(cx, buf));
        this.used();
        Poll::Ready(written)
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().inner).poll_flush(cx)
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().inner).poll_shutdown(cx)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    #[tokio::test(start_paused = true)]
    async fn an_idle_connection_ends() {
        let (near, mut far) = tokio::io::duplex(64);
        let mut near = IdleLimited::new(near, Duration::from_secs(10));
        let began = Instant::now();
        // What is written counts, and what is read.
        for _ in 0..3 {
            tokio::time::sleep(Duration::from_secs(6)).await;
            near.write_all(b"a").await.unwrap();
            far.read_u8().await.unwrap();
            tokio::time::sleep(Duration::from_secs(6)).await;
            far.write_all(b"b").await.unwrap();
            assert_eq!(near.read_u8().await.unwrap(), b'b');
        }
        let error = near.read_u8().await.unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
        let took = began.elapsed();
        assert!((46..47).contains(&took.as_secs()), "{took:?}");
    }
}
