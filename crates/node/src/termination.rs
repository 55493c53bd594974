//! The message a container leaves when it ends: its termination-log file, or the end of its log if it asked
//! for that and failed.

use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use rustix::fs::OFlags;
use skiff_cri::v1::ContainerStatus;

use crate::observed::labels;
use crate::server::log_file::parse_line;

/// Upstream's bounds of one message.
const MAX_FILE: u64 = 4096;
const MAX_LOG_BYTES: u64 = 2048;
const MAX_LOG_LINES: usize = 80;

pub fn message(status: &ContainerStatus) -> String {
    let annotation = |name: &str| {
        status
            .annotations
            .get(name)
            .map(String::as_str)
            .unwrap_or_default()
    };
    let path = annotation(labels::TERMINATION_MESSAGE_PATH);
    let from_log = annotation(labels::TERMINATION_MESSAGE_POLICY) == "FallbackToLogsOnError"
        && status.exit_code != 0
        && status.reason != "ContainerCannotRun";
    let mount = status
        .mounts
        .iter()
        .find(|m| !path.is_empty() && m.container_path == path);
    let left = match mount {
        Some(mount) => match read_tail(Path::new(&mount.host_path), MAX_FILE) {
            Ok(bytes) => String::from_utf8_lossy(&bytes).into_owned(),
            Err(e) if e.kind() == io::ErrorKind::NotFound => String::new(),
            Err(e) => return format!("Error on reading termination log {}: {e}", mount.host_path),
        },
        None => String::new(),
    };
    if left.is_empty() && from_log {
        return log_tail(Path::new(&status.log_path))
            .unwrap_or_else(|e| format!("Error on reading termination message from logs: {e}"));
    }
    left
}

fn read_tail(path: &Path, limit: u64) -> io::Result<Vec<u8>> {
    // A volume may be mounted in the file's place, or be where the logs are: a pipe must not make us wait for
    // a writer, nor a link show a file of the host.
    let flags = OFlags::NONBLOCK | OFlags::NOFOLLOW;
    let mut file = File::options()
        .read(true)
        .custom_flags(flags.bits().cast_signed())
        .open(path)?;
    if !file.metadata()?.is_file() {
        return Err(io::Error::other("not a regular file"));
    }
    let length = file.metadata()?.len();
    file.seek(SeekFrom::Start(length.saturating_sub(limit)))?;
    let mut bytes = Vec::new();
    file.take(limit).read_to_end(&mut bytes)?;
    Ok(bytes)
}

fn log_tail(path: &Path) -> io::Result<String> {
    // Each line carries a time stamp and a stream, so more is read than is kept.
    let bytes = read_tail(path, MAX_LOG_BYTES * 4)?;
    let mut lines: Vec<Vec<u8>> = Vec::new();
    for line in bytes.split_inclusive(|b| *b == b'\n') {
        if let Some(parsed) = parse_line(line) {
            let mut content = parsed.content.to_vec();
            if !parsed.partial {
                content.push(b'\n');
            }
            lines.push(content);
        }
    }
    let skip = lines.len().saturating_sub(MAX_LOG_LINES);
    let text: Vec<u8> = lines[skip..].concat();
    let start = text
        .len()
        .saturating_sub(usize::try_from(MAX_LOG_BYTES).unwrap_or(2048));
    Ok(String::from_utf8_lossy(&text[start..]).into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use skiff_cri::v1::Mount;
    use std::collections::HashMap;

    #[test]
    fn links_are_not_read() {
        let dir = tempfile::tempdir().unwrap();
        let secret = dir.path().join("secret");
        std::fs::write(&secret, "2026-01-01T00:00:00.1Z stdout F secret\n").unwrap();
        let link = dir.path().join("link");
        std::os::unix::fs::symlink(&secret, &link).unwrap();
        assert!(read_tail(&secret, MAX_FILE).is_ok());
        assert!(read_tail(&link, MAX_FILE).is_err());
        assert!(log_tail(&link).is_err());
    }

    #[test]
    fn messages() {
        let dir = tempfile::tempdir().unwrap();
        let log = dir.path().join("0.log");
        std::fs::write(
            &log,
            "2026-01-01T00:00:00.1Z stdout F one\n2026-01-01T00:00:00.2Z stderr F two\n",
        )
        .unwrap();
        let file = dir.path().join("term");
        let status = |exit_code: i32, policy: &str| ContainerStatus {
            exit_code,
            log_path: log.to_string_lossy().into_owned(),
            mounts: vec![Mount {
                container_path: "/dev/termination-log".into(),
                host_path: file.to_string_lossy().into_owned(),
                ..Default::default()
            }],
            annotations: HashMap::from([
                (
                    labels::TERMINATION_MESSAGE_PATH.to_owned(),
                    "/dev/termination-log".to_owned(),
                ),
                (labels::TERMINATION_MESSAGE_POLICY.to_owned(), policy.to_owned()),
            ]),
            ..Default::default()
        };
        assert_eq!(message(&status(1, "File")), "");
        assert_eq!(message(&status(1, "FallbackToLogsOnError")), "one\ntwo\n");
        assert_eq!(message(&status(0, "FallbackToLogsOnError")), "");
        rustix::fs::mknodat(
            rustix::fs::CWD,
            &file,
            rustix::fs::FileType::Fifo,
            rustix::fs::Mode::from_raw_mode(0o600),
            0,
        )
        .unwrap();
        let refused = message(&status(0, "File"));
        assert!(refused.ends_with("not a regular file"), "{refused}");
        std::fs::remove_file(&file).unwrap();
        std::fs::write(&file, "DONE").unwrap();
        assert_eq!(message(&status(1, "FallbackToLogsOnError")), "DONE");
    }
}
