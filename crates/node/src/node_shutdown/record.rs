//! When the last graceful shutdown began and ended, kept for the metrics of the next boot. Upstream's file.

use std::io;
use std::path::Path;

use k8s_openapi::jiff::Timestamp;
use serde::{Deserialize, Serialize};

const FILE: &str = "graceful_node_shutdown_state";

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Record {
    pub start_time: Timestamp,
    /// [`zero`] until it ended.
    pub end_time: Timestamp,
}

/// Go's zero time: not yet.
pub fn zero() -> Timestamp {
    // 0001-01-01T00:00:00Z.
    Timestamp::from_second(-62_135_596_800).unwrap_or(Timestamp::UNIX_EPOCH)
}

impl Record {
    pub fn load(folder: &Path) -> Option<Self> {
        let path = folder.join(FILE);
        let read = std::fs::read(&path).and_then(|bytes| Ok(serde_json::from_slice(&bytes)?));
        match read {
            Ok(record) => Some(record),
            Err(error) if error.kind() == io::ErrorKind::NotFound => None,
            Err(error) => {
                tracing::warn!(%error, path = %path.display(), "cannot read when the last shutdown was");
                None
            }
        }
    }

    pub fn save(&self, folder: &Path) -> io::Result<()> {
        let text = serde_json::to_vec(self)?;
        skiff_fs::write_durably(&folder.join(FILE), &text, 0o644)
    }

    /// Start and end in seconds since 1970; zero for what has not happened.
    pub fn seconds(&self) -> (f64, f64) {
        let of = |time: Timestamp| time.as_second().max(0) as f64;
        (of(self.start_time), of(self.end_time))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn written_as_upstream_writes_it() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(Record::load(dir.path()), None);
        let mut record = Record {
            start_time: "2026-01-02T03:04:05.5Z".parse().unwrap(),
            end_time: zero(),
        };
        record.save(dir.path()).unwrap();
        let text = std::fs::read_to_string(dir.path().join(FILE)).unwrap();
        assert_eq!(
            text,
            r#"{"startTime":"2026-01-02T03:04:05.5Z","endTime":"0001-01-01T00:00:00Z"}"#
        );
        assert_eq!(record.seconds(), (1_767_323_045.0, 0.0));
        record.end_time = "2026-01-02T03:05:00+01:00".parse().unwrap();
        record.save(dir.path()).unwrap();
        assert_eq!(Record::load(dir.path()), Some(record));
        std::fs::write(dir.path().join(FILE), "{").unwrap();
        assert_eq!(Record::load(dir.path()), None);
    }
}
