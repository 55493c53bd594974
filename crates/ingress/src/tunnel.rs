//! Two connections that speak something else than HTTP, such as WebSocket.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use hyper::upgrade::OnUpgrade;
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use crate::body::BoxError;

/// A tunnel in which nobody says anything for this long is closed.
const SILENCE: Duration = Duration::from_secs(3600);
/// Both sides must have switched within this time.
const SWITCH: Duration = Duration::from_secs(10);

/// Copies both ways until both sides have ended.
/// `silence` is how long nobody may say anything, if the route says so.
pub async fn join(near: OnUpgrade, far: OnUpgrade, silence: Option<Duration>) -> Result<(), BoxError> {
    let (near, far) = tokio::time::timeout(SWITCH, async { tokio::try_join!(near, far) }).await??;
    copy_until(TokioIo::new(near), TokioIo::new(far), silence.unwrap_or(SILENCE))
        .await
        .map_err(Into::into)
}

/// Copies both ways until both sides have ended, or nobody says anything any more.
pub async fn copy<N, F>(near: N, far: F) -> io::Result<()>
where
    N: AsyncRead + AsyncWrite + Unpin,
    F: AsyncRead + AsyncWrite + Unpin,
{
    copy_until(near, far, SILENCE).await
}

async fn copy_until<N, F>(near: N, far: F, limit: Duration) -> io::Result<()>
where
    N: AsyncRead + AsyncWrite + Unpin,
    F: AsyncRead + AsyncWrite + Unpin,
{
    let heard: Arc<AtomicBool> = Arc::default();
    let mut near = Heard(near, heard.clone());
    let mut far = Heard(far, heard.clone());
    let silence = async {
        loop {
            tokio::time::sleep(limit).await;
            if !heard.swap(false, Ordering::Relaxed) {
                return;
            }
        }
    };
    tokio::select! {
        copied = tokio::io::copy_bidirectional(&mut near, &mut far) => {
            copied?;
        }
        () = silence => {}
    }
    Ok(())
}

/// Notes that something was read.
struct Heard<T>(T, Arc<AtomicBool>);

impl<T: AsyncRead + Unpin> AsyncRead for Heard<T> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let polled = Pin::new(&mut self.0).poll_read(context, buffer);
        if polled.is_ready() {
            self.1.store(true, Ordering::Relaxed);
        }
        polled
    }
}

impl<T: AsyncWrite + Unpin> AsyncWrite for Heard<T> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.0).poll_write(context, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_shutdown(context)
    }
}
