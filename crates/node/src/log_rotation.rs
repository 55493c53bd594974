//! Rotates the logs of containers: a full one gets a date, the earlier ones are compressed, the oldest go. The runtime
//! opens a new file; `kubectl logs` reads that one.

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};

use flate2::Compression;
use flate2::write::GzEncoder;
use k8s_openapi::jiff::Timestamp;

use crate::images::describe;
use crate::kubelet::Kubelet;
use crate::observed::ContainerState;

const COMPRESSED: &str = ".gz";
/// Of a file that is being compressed; what is found of an earlier life is of no use.
const UNFINISHED: &str = ".tmp";

impl Kubelet {
    pub async fn rotate_logs(&self) {
        for state in self.states() {
            let observed = state.observed();
            let running = observed
                .containers
                .iter()
                .filter(|c| c.state == ContainerState::Running);
            for container in running {
                let path = PathBuf::from(&container.log_path);
                let size = std::fs::metadata(&path).map_or(0, |found| found.len());
                if size <= self.config.container_log_max_size {
                    continue;
                }
                let log = container.log_path.as_str();
                let (earlier, keep) = (path.clone(), self.config.container_log_max_files);
                // Compressing takes its time; nobody waits for it but the next log.
                let tidied = tokio::task::spawn_blocking(move || tidy(&earlier, keep)).await;
                if let Ok(Err(error)) = tidied {
                    tracing::warn!(%error, log, "cannot compress or remove the earlier files of a log");
                }
                let stamp = Timestamp::now().strftime("%Y%m%d-%H%M%S");
                let rotated = format!("{log}.{stamp}");
                if let Err(error) = std::fs::rename(&path, &rotated) {
                    tracing::warn!(%error, log, "cannot rotate a log");
                    continue;
                }
                if let Err(status) = self.runtime.reopen_log(&container.id).await {
                    // Without a new file the container would write into the old one unseen.
                    let _ = std::fs::rename(&rotated, &path);
                    tracing::warn!(error = describe(&status), log, "cannot rotate a log");
                }
            }
        }
    }
}

/// Makes room for one more rotated file beside the current one, and compresses those that stay.
fn tidy(log: &Path, keep: usize) -> io::Result<()> {
    let mut rotated = rotated(log)?;
    rotated.retain(|file| {
        let unfinished = file.to_string_lossy().ends_with(UNFINISHED);
        if unfinished {
            let _ = std::fs::remove_file(file);
        }
        !unfinished
    });
    let excess = rotated.len().saturating_sub(keep.saturating_sub(2));
    for (index, file) in rotated.iter().enumerate() {
        if index < excess {
            std::fs::remove_file(file)?;
        } else if !file.to_string_lossy().ends_with(COMPRESSED) {
            compress(file)?;
        }
    }
    Ok(())
}

/// The earlier files of a log, the oldest first.
fn rotated(log: &Path) -> io::Result<Vec<PathBuf>> {
    let (Some(directory), Some(name)) = (log.parent(), log.file_name().and_then(|n| n.to_str())) else {
        return Ok(Vec::new());
    };
    let prefix = format!("{name}.");
    let mut found: Vec<PathBuf> = std::fs::read_dir(directory)?
        .filter_map(|entry| Some(entry.ok()?.path()))
        .filter(|path| {
            let name = path.file_name().and_then(|name| name.to_str());
            name.is_some_and(|name| name.starts_with(&prefix))
        })
        .collect();
    found.sort();
    Ok(found)
}

fn compress(file: &Path) -> io::Result<()> {
    let with = |suffix: &str| PathBuf::from(format!("{}{suffix}", file.display()));
    let (unfinished, finished) = (with(UNFINISHED), with(COMPRESSED));
    let done = (|| {
        let mut from = File::open(file)?;
        let mut to = GzEncoder::new(File::create(&unfinished)?, Compression::default());
        io::copy(&mut from, &mut to)?;
        to.finish()?.sync_all()?;
        std::fs::rename(&unfinished, &finished)
    })();
    match done {
        Ok(()) => std::fs::remove_file(file),
        Err(error) => {
            let _ = std::fs::remove_file(&unfinished);
            Err(error)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Read;

    #[test]
    fn old_logs_are_compressed_and_go() {
        let dir = tempfile::tempdir().unwrap();
        for name in [
            "0.log",
            "0.log.1.gz",
            "0.log.2",
            "0.log.3",
            "0.log.3.tmp",
            "1.log.1",
        ] {
            std::fs::write(dir.path().join(name), name).unwrap();
        }
        tidy(&dir.path().join("0.log"), 4).unwrap();
        let mut left: Vec<String> = std::fs::read_dir(dir.path())
            .unwrap()
            .map(|e| e.unwrap().file_name().into_string().unwrap())
            .collect();
        left.sort();
        // With the current one, and the one that is about to be rotated, four.
        assert_eq!(left, ["0.log", "0.log.2.gz", "0.log.3.gz", "1.log.1"]);
        let mut text = String::new();
        let file = File::open(dir.path().join("0.log.2.gz")).unwrap();
        flate2::read::GzDecoder::new(file)
            .read_to_string(&mut text)
            .unwrap();
        assert_eq!(text, "0.log.2");
    }
}
