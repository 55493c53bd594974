//! What a client that takes nothing may hold: its connection, or the stream of HTTP/2 that it left full, for a while.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use parking_lot::Mutex;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::{Instant, Sleep};

use crate::body::Stall;

/// A connection on which not one byte can be written for this long is dead.
const STUCK: Duration = Duration::from_secs(60);

/// A connection that fails when its other side takes nothing.
pub struct Impatient<T> {
    io: T,
    stuck: Option<Pin<Box<Sleep>>>,
}

impl<T> Impatient<T> {
    pub fn new(io: T) -> Impatient<T> {
        Impatient { io, stuck: None }
    }

    fn bounded<R>(&mut self, context: &mut Context<'_>, polled: Poll<io::Result<R>>) -> Poll<io::Result<R>> {
        if polled.is_ready() {
            self.stuck = None;
            return polled;
        }
        let stuck = self
            .stuck
            .get_or_insert_with(|| Box::pin(tokio::time::sleep(STUCK)));
        match stuck.as_mut().poll(context) {
            Poll::Ready(()) => Poll::Ready(Err(io::ErrorKind::TimedOut.into())),
            Poll::Pending => Poll::Pending,
        }
    }
}

impl<T: AsyncRead + Unpin> AsyncRead for Impatient<T> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_read(context, buffer)
    }
}

impl<T: AsyncWrite + Unpin> AsyncWrite for Impatient<T> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let polled = Pin::new(&mut self.io).poll_write(context, bytes);
        self.bounded(context, polled)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let polled = Pin::new(&mut self.io).poll_write_vectored(context, slices);
        self.bounded(context, polled)
    }

    fn is_write_vectored(&self) -> bool {
        self.io.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let polled = Pin::new(&mut self.io).poll_flush(context);
        self.bounded(context, polled)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let polled = Pin::new(&mut self.io).poll_shutdown(context);
        self.bounded(context, polled)
    }
}

/// Runs the streams of an HTTP/2 connection. hyper calls the service and hands over the stream right after: what
/// the service announces belongs to that stream.
#[derive(Clone, Default)]
pub struct Streams(Arc<Mutex<Option<Stall>>>);

impl Streams {
    pub fn announce(&self, stall: Stall) {
        *self.0.lock() = Some(stall);
    }
}

impl<F: Future<Output = ()> + Send + 'static> hyper::rt::Executor<F> for Streams {
    fn execute(&self, stream: F) {
        let stall = self.0.lock().take().unwrap_or_default();
        tokio::spawn(Bounded {
            stream: Box::pin(stream),
            stall,
            timer: None,
        });
    }
}

/// A stream that is reset, by being dropped, when its client does not take its response.
struct Bounded {
    stream: Pin<Box<dyn Future<Output = ()> + Send>>,
    stall: Stall,
    timer: Option<(Instant, Pin<Box<Sleep>>)>,
}

impl Future for Bounded {
    type Output = ();

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<()> {
        let this = self.get_mut();
        if this.stream.as_mut().poll(context).is_ready() {
            return Poll::Ready(());
        }
        let Some(deadline) = this.stall.deadline() else {
            this.timer = None;
            return Poll::Pending;
        };
        if this.timer.as_ref().is_none_or(|(at, _)| *at != deadline) {
            this.timer = Some((deadline, Box::pin(tokio::time::sleep_until(deadline))));
        }
        match &mut this.timer {
            Some((_, timer)) => timer.as_mut().poll(context),
            None => Poll::Pending,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::io::AsyncWriteExt;

    #[tokio::test(start_paused = true)]
    async fn a_connection_that_takes_nothing_fails() {
        let (near, _far) = tokio::io::duplex(16);
        let mut near = Impatient::new(near);
        near.write_all(&[0; 16]).await.expect("there is room");
        let error = near.write_all(&[0; 16]).await.expect_err("nobody reads");
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
    }
}
