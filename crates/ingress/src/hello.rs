//! The first message of a TLS connection, read before it is known who answers it.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};

use rustls::server::Acceptor;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, ReadBuf};

/// Bytes of the message.
const MAX_HELLO: usize = 64 * 1024;

/// The name that a client asks for, in lower case, and what was read to know it.
pub struct Hello {
    pub name: Option<String>,
    pub bytes: Vec<u8>,
}

pub async fn read<T: AsyncRead + Unpin>(stream: &mut T) -> io::Result<Hello> {
    let mut acceptor = Acceptor::default();
    let mut bytes = Vec::new();
    loop {
        let mut chunk = [0; 4096];
        let read = stream.read(&mut chunk).await?;
        if read == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        bytes.extend_from_slice(&chunk[..read]);
        if bytes.len() > MAX_HELLO {
            return Err(io::Error::other("the client's first message is too large"));
        }
        let mut rest = &chunk[..read];
        while !rest.is_empty() {
            acceptor.read_tls(&mut rest)?;
            match acceptor.accept() {
                Ok(None) => {}
                Ok(Some(accepted)) => {
                    let hello = accepted.client_hello();
                    let name = hello.server_name().map(str::to_ascii_lowercase);
                    return Ok(Hello { name, bytes });
                }
                Err((error, _)) => return Err(io::Error::new(io::ErrorKind::InvalidData, error)),
            }
        }
    }
}

/// A connection of which some was read before.
pub struct Prefixed<T> {
    prefix: Vec<u8>,
    taken: usize,
    io: T,
}

impl<T> Prefixed<T> {
    pub fn new(prefix: Vec<u8>, io: T) -> Prefixed<T> {
        Prefixed { prefix, taken: 0, io }
    }
}

impl<T: AsyncRead + Unpin> AsyncRead for Prefixed<T> {
    fn poll_read(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        let left = &this.prefix[this.taken..];
        if left.is_empty() {
            this.prefix = Vec::new();
            this.taken = 0;
            return Pin::new(&mut this.io).poll_read(context, buffer);
        }
        let part = left.len().min(buffer.remaining());
        buffer.put_slice(&left[..part]);
        this.taken += part;
        Poll::Ready(Ok(()))
    }
}

impl<T: AsyncWrite + Unpin> AsyncWrite for Prefixed<T> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.io).poll_write(context, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_shutdown(context)
    }
}
