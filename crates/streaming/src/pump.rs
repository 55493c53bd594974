//! Between byte pipes and frames. Every pipe is bounded, so a slow end slows the other one down instead
//! of filling memory.

use bytes::{Bytes, BytesMut};
use tokio::io::{AsyncRead, AsyncReadExt, DuplexStream};
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

use crate::TerminalSize;

/// What one pipe holds before its writer waits.
pub(crate) const PIPE_SIZE: usize = 64 * 1024;

/// The largest payload of one frame we write.
pub(crate) const CHUNK: usize = 32 * 1024;

/// Turns what comes out of `pipe` into frames, and its end into `fin`. Returns early if the stream is
/// gone, which drops the pipe and so tells its writer.
pub(crate) async fn pump<T>(
    mut pipe: impl AsyncRead + Unpin,
    out: mpsc::Sender<T>,
    gone: CancellationToken,
    data: impl Fn(Bytes) -> T,
    fin: Option<T>,
) {
    let copy = async {
        loop {
            let mut chunk = BytesMut::with_capacity(CHUNK);
            match pipe.read_buf(&mut chunk).await {
                Ok(0) | Err(_) => break,
                Ok(_) => out.send(data(chunk.freeze())).await.ok()?,
            }
        }
        if let Some(fin) = fin {
            out.send(fin).await.ok()?;
        }
        Some(())
    };
    tokio::select! {
        _ = copy => {}
        () = gone.cancelled() => {}
    }
}

/// Reads terminal sizes, JSON objects one after the other. Only the latest waits for a slow reader.
pub(crate) async fn read_sizes(mut pipe: DuplexStream, sizes: mpsc::Sender<TerminalSize>) {
    /// No size is longer; more without an object in it is not a size.
    const MAX_PENDING: usize = 4096;
    let mut pending = BytesMut::with_capacity(256);
    let mut latest: Option<TerminalSize> = None;
    loop {
        tokio::select! {
            permit = sizes.reserve(), if latest.is_some() => match (permit, latest.take()) {
                (Ok(permit), Some(size)) => permit.send(size),
                _ => return,
            },
            read = pipe.read_buf(&mut pending) => {
                if !matches!(read, Ok(1..)) {
                    break;
                }
                let mut objects = serde_json::Deserializer::from_slice(&pending).into_iter::<TerminalSize>();
                let mut malformed = false;
                for object in objects.by_ref() {
                    match object {
                        Ok(size) => latest = Some(size),
                        Err(error) => malformed = !error.is_eof(),
                    }
                }
                let used = objects.byte_offset();
                if malformed || pending.len() - used > MAX_PENDING {
                    tracing::debug!("a client sent something that is not a terminal size");
                    break;
                }
                bytes::Buf::advance(&mut pending, used);
            }
        }
    }
    if let Some(size) = latest {
        let _ = sizes.send(size).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::io::AsyncWriteExt;

    #[tokio::test]
    async fn sizes_arrive_in_pieces_and_the_latest_wins() {
        async fn check(pieces: &[&str], expected: &[(u16, u16)]) {
            let (mut ours, theirs) = tokio::io::duplex(PIPE_SIZE);
            let (tx, mut rx) = mpsc::channel(1);
            let task = tokio::spawn(read_sizes(theirs, tx));
            for piece in pieces {
                ours.write_all(piece.as_bytes()).await.unwrap();
            }
            drop(ours);
            let mut got = Vec::new();
            while let Some(size) = rx.recv().await {
                got.push((size.width, size.height));
            }
            task.await.unwrap();
            assert_eq!(got.last(), expected.last(), "{pieces:?}");
        }
        check(&[r#"{"Width":80,"Height":24}"#], &[(80, 24)]).await;
        check(
            &[
                r#"{"Width":80,"#,
                r#""Height":24}"#,
                "\n",
                r#"{"Width":1,"Height":2}"#,
            ],
            &[(80, 24), (1, 2)],
        )
        .await;
        check(&["garbage"], &[]).await;
        check(&[r#"{"Width":80,"Height":24}{"Width":-1}"#], &[(80, 24)]).await;
        check(&[], &[]).await;
    }
}
