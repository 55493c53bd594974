//! The kernel tells when processes wait for memory (PSI), so that a shortage is seen before the next look. Where it cannot,
//! the looks by the clock remain.

use std::fs::File;
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::time::Duration;

use rustix::fs::OFlags;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

const MEMORY: &str = "/proc/pressure/memory";
/// Some task waited for a fifth of a second within two seconds: the shortest window that needs no capability.
const TRIGGER: &[u8] = b"some 200000 2000000\0";
/// A shortage that lasts is looked at so often.
const PAUSE: Duration = Duration::from_secs(1);

pub(super) struct MemoryPressure(Option<AsyncFd<File>>);

impl MemoryPressure {
    pub(super) fn watch() -> Self {
        match open(Path::new(MEMORY)) {
            Ok(file) => MemoryPressure(Some(file)),
            Err(error) => {
                tracing::debug!(%error, "the kernel does not tell of memory pressure");
                MemoryPressure(None)
            }
        }
    }

    /// Waits until processes have waited for memory.
    pub(super) async fn rises(&mut self) {
        let Some(file) = &self.0 else {
            return std::future::pending().await;
        };
        tokio::time::sleep(PAUSE).await;
        let told = file.ready(Interest::PRIORITY).await;
        match told {
            Ok(mut ready) if !ready.ready().is_error() => ready.clear_ready(),
            // The trigger is gone: it would be ready for ever.
            _ => {
                self.0 = None;
                std::future::pending().await
            }
        }
    }
}

fn open(path: &Path) -> io::Result<AsyncFd<File>> {
    let mut file = File::options()
        .read(true)
        .write(true)
        .custom_flags(OFlags::NONBLOCK.bits().cast_signed())
        .open(path)?;
    // One write is one trigger; it lasts as long as the file is open.
    file.write_all(TRIGGER)?;
    // SAFETY: the file is owned by what is made here, and is the same as long as that lives.
    let watched = unsafe { AsyncFd::register_with_interest(file, Interest::PRIORITY) };
    watched.map_err(|error| error.into_parts().1)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Where the kernel has PSI, it takes the trigger; where not, nothing is ever told.
    #[tokio::test]
    async fn a_trigger() {
        if Path::new(MEMORY).exists() {
            let opened = open(Path::new(MEMORY));
            assert!(opened.is_ok(), "{:?}", opened.err());
        }
        let mut none = MemoryPressure(None);
        let soon = tokio::time::timeout(Duration::from_millis(20), none.rises());
        assert!(soon.await.is_err());
    }
}
