//! Brings a layer into a file: not one byte more than its manifest says, and not for ever. A download that breaks off goes
//! on where it was; whether all of it is what it should be, is for whoever unpacks it to check.

use super::config::Descriptor;
use super::limits::Limits;
use super::pull::{ATTEMPTS, FIRST_PAUSE};
use super::registry::{Error, Registry};
use super::{Progress, ProgressFn};
use std::io::SeekFrom;
use std::path::Path;
use tokio::fs::File;
use tokio::io::{AsyncSeekExt, AsyncWriteExt};
use tokio::time::Instant;

pub(super) async fn download(
    registry: &Registry,
    layer: &Descriptor,
    path: &Path,
    limits: &Limits,
    progress: &ProgressFn,
) -> Result<(), Error> {
    let mut download = Download {
        layer,
        limits,
        progress,
        file: File::create(path).await?,
        done: 0,
        furthest: 0,
        restarted: false,
        window: Instant::now(),
        arrived: 0,
    };
    let (mut failures, mut pause) = (0, FIRST_PAUSE);
    loop {
        let before = download.furthest;
        let error = match download.attempt(registry).await {
            Ok(()) => return Ok(()),
            Err(error) => error,
        };
        // However often it breaks off: as long as it gets ahead, and not too slowly, it will end.
        if download.furthest > before && !download.restarted {
            (failures, pause) = (0, FIRST_PAUSE);
        }
        failures += 1;
        if failures >= ATTEMPTS || !error.is_transient() {
            return Err(error);
        }
        tracing::warn!(%error, layer = layer.digest, bytes = download.done, "download broke off, going on");
        tokio::time::sleep(pause).await;
        pause *= 3;
    }
}

struct Download<'a> {
    layer: &'a Descriptor,
    limits: &'a Limits,
    progress: &'a ProgressFn,
    file: File,
    /// Bytes in the file.
    done: u64,
    /// What `done` has been at most.
    furthest: u64,
    /// A server without ranges begins anew each time: it does not get ahead.
    restarted: bool,
    /// Since when `arrived` bytes have come. It goes on when an attempt ends.
    window: Instant,
    arrived: u64,
}

impl Download<'_> {
    async fn attempt(&mut self, registry: &Registry) -> Result<(), Error> {
        let (mut response, start) = registry.blob(&self.layer.digest, self.done).await?;
        if self.furthest == 0 {
            self.window = Instant::now();
        }
        if start != self.done {
            self.file.set_len(start).await?;
            (self.done, self.restarted) = (start, true);
        }
        self.file.seek(SeekFrom::Start(start)).await?;
        let copied = self.copy(&mut response).await;
        // What has come is kept, whatever comes next.
        self.file.flush().await?;
        copied?;
        if self.done < self.layer.size {
            return Err(Error::TooShort {
                what: self.what(),
                length: self.done,
            });
        }
        Ok(())
    }

    async fn copy(&mut self, response: &mut reqwest::Response) -> Result<(), Error> {
        loop {
            let chunk = tokio::time::timeout_at(self.window + self.limits.slow_window, response.chunk());
            let chunk = chunk.await.map_err(|_| self.too_slow())??;
            let Some(chunk) = chunk else { return Ok(()) };
            let length = chunk.len() as u64;
            if self.done + length > self.layer.size {
                return Err(Error::TooLarge {
                    what: self.what(),
                    limit: self.layer.size,
                });
            }
            self.file.write_all(&chunk).await?;
            self.done += length;
            self.furthest = self.furthest.max(self.done);
            self.arrived += length;
            if self.arrived >= self.limits.slow_bytes {
                (self.window, self.arrived) = (Instant::now(), 0);
            }
            (self.progress)(Progress::Downloading {
                digest: self.layer.digest.clone(),
                done: self.done,
                total: self.layer.size,
            });
        }
    }

    fn what(&self) -> String {
        format!("layer {}", self.layer.digest)
    }

    fn too_slow(&self) -> Error {
        Error::TooSlow {
            what: self.what(),
            limit: self.limits.slow_window,
        }
    }
}
