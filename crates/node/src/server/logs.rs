//! `GET /containerLogs/…`: finds the log of the right instance of a container and streams it.

use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use k8s_openapi::api::core::v1::{ContainerStatus, PodStatus};
use rustix::fs::inotify;
use tokio::io::unix::AsyncFd;
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncSeekExt, BufReader};
use tokio::sync::mpsc;

use super::log_file::{Formatter, LogOptions, tail_offset};
use crate::observed::ContainerState;
use crate::pod_state::PodState;

/// Data is handed on in pieces of about this size.
const PIECE: usize = 32 * 1024;
/// The longest record that is kept together.
const MAX_RECORD: usize = 1 << 20;
/// A follower looks again after this long even if nothing told it to.
const LOOK_AGAIN: Duration = Duration::from_secs(2);

fn find<'a>(status: &'a PodStatus, name: &str) -> Option<&'a ContainerStatus> {
    [
        &status.container_statuses,
        &status.init_container_statuses,
        &status.ephemeral_container_statuses,
    ]
    .into_iter()
    .flatten()
    .flatten()
    .find(|s| s.name == name)
}

/// The id of the instance whose log is meant, or upstream's sentence why there is none.
pub fn container_id(
    pod_name: &str,
    status: &PodStatus,
    container: &str,
    previous: bool,
) -> Result<String, String> {
    let place = format!("container {container:?} in pod {pod_name:?}");
    let found = find(status, container).ok_or_else(|| format!("{place} is not available"))?;
    let last = found.last_state.as_ref().and_then(|s| s.terminated.as_ref());
    let last_id = last
        .and_then(|t| t.container_id.clone())
        .filter(|id| !id.is_empty());
    let state = found.state.clone().unwrap_or_default();
    let id = if previous {
        last_id.ok_or_else(|| format!("previous terminated {place} not found"))?
    } else if state.running.is_some() {
        found.container_id.clone().unwrap_or_default()
    } else if let Some(terminated) = state.terminated {
        terminated
            .container_id
            .filter(|id| !id.is_empty())
            .or(last_id)
            .ok_or_else(|| format!("{place} is terminated"))?
    } else if last.is_some() {
        last_id.ok_or_else(|| format!("{place} is terminated"))?
    } else if let Some(waiting) = state.waiting {
        let why = match waiting.reason.as_deref().unwrap_or_default() {
            "ErrImagePull" => "image can't be pulled".to_owned(),
            "ImagePullBackOff" => "trying and failing to pull image".to_owned(),
            reason => reason.to_owned(),
        };
        return Err(format!("{place} is waiting to start: {why}"));
    } else {
        return Err(format!("{place} is waiting to start - no logs yet"));
    };
    Ok(id.split_once("://").map_or(id.clone(), |(_, id)| id.to_owned()))
}

/// Sends the log to `output` until it ends, the limit is reached, or the reader is gone.
pub async fn stream(
    state: Arc<PodState>,
    container: String,
    id: String,
    path: PathBuf,
    options: LogOptions,
    output: mpsc::Sender<Bytes>,
) {
    if let Err(error) = copy(&state, &container, &id, &path, options, &output).await {
        tracing::debug!(%error, log = %path.display(), "reading a log ended early");
    }
}

async fn copy(
    state: &PodState,
    container: &str,
    id: &str,
    path: &Path,
    options: LogOptions,
    output: &mpsc::Sender<Bytes>,
) -> std::io::Result<()> {
    let watch = if options.follow {
        path.parent().and_then(|d| watch_directory(d).ok())
    } else {
        None
    };
    let mut changes = state.dirty.subscribe();
    let mut reader = open(path, options.tail_lines).await?;
    let follow = options.follow;
    let mut formatter = Formatter::new(options);
    let (mut record, mut piece) = (Vec::new(), Vec::new());
    loop {
        // A record that is still being written stays in `record` until its newline comes.
        let read = if record.ends_with(b"\n") {
            0
        } else {
            read_record(&mut reader, &mut record).await?
        };
        if record.ends_with(b"\n") || record.len() > MAX_RECORD {
            let more = formatter.push(&record, &mut piece);
            record.clear();
            let full = !more || piece.len() >= PIECE;
            if full
                && output
                    .send(Bytes::from(std::mem::take(&mut piece)))
                    .await
                    .is_err()
            {
                return Ok(());
            }
            if !more {
                return Ok(());
            }
            continue;
        }
        if read > 0 {
            continue;
        }
        if !piece.is_empty()
            && output
                .send(Bytes::from(std::mem::take(&mut piece)))
                .await
                .is_err()
        {
            return Ok(());
        }
        if !follow {
            if !record.is_empty() {
                formatter.push(&record, &mut piece);
                let _ = output.send(Bytes::from(piece)).await;
            }
            return Ok(());
        }
        if was_replaced(&reader, path).await {
            // The old file got its last lines before the new one was there, but maybe after our look.
            if read_record(&mut reader, &mut record).await? == 0 {
                reader = open(path, None).await?;
            }
            continue;
        }
        // Asked before the last look at the file: what was written before the end is not lost.
        if !is_running(state, container, id) {
            if read_record(&mut reader, &mut record).await? == 0 {
                return Ok(());
            }
            continue;
        }
        tokio::select! {
            () = output.closed() => return Ok(()),
            () = written(watch.as_ref()) => {}
            _ = changes.changed() => {}
            () = tokio::time::sleep(LOOK_AGAIN) => {}
        }
    }
}

/// Reads on to the end of the record, but no more of one than is kept together.
async fn read_record(
    reader: &mut BufReader<tokio::fs::File>,
    record: &mut Vec<u8>,
) -> std::io::Result<usize> {
    let room = (MAX_RECORD + 1).saturating_sub(record.len());
    let mut bounded = reader.take(u64::try_from(room).unwrap_or(u64::MAX));
    bounded.read_until(b'\n', record).await
}

async fn open(path: &Path, tail_lines: Option<u64>) -> std::io::Result<BufReader<tokio::fs::File>> {
    let path = path.to_owned();
    let opened = tokio::task::spawn_blocking(move || {
        let mut file = open_file(&path)?;
        let offset = tail_lines.map_or(Ok(0), |lines| tail_offset(&mut file, lines))?;
        Ok::<_, std::io::Error>((file, offset))
    });
    let (file, offset) = opened.await.map_err(std::io::Error::other)??;
    let mut reader = BufReader::with_capacity(PIECE, tokio::fs::File::from_std(file));
    reader.seek(std::io::SeekFrom::Start(offset)).await?;
    Ok(reader)
}

/// A container that has the folder of logs as a volume can put a link to any file of the host in the place of
/// a log, or a pipe that is never written to. A log is neither.
fn open_file(path: &Path) -> std::io::Result<std::fs::File> {
    use rustix::fs::{Mode, OFlags};
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let file = std::fs::File::from(rustix::fs::open(path, flags, Mode::empty())?);
    if file.metadata()?.is_file() {
        Ok(file)
    } else {
        Err(std::io::Error::other("the log is not a regular file"))
    }
}

/// Whether the file was rotated away: another one has its name, with nothing more to come in this one.
async fn was_replaced(reader: &BufReader<tokio::fs::File>, path: &Path) -> bool {
    use std::os::unix::fs::MetadataExt;
    match (reader.get_ref().metadata().await, tokio::fs::metadata(path).await) {
        (Ok(ours), Ok(theirs)) => ours.ino() != theirs.ino(),
        _ => false,
    }
}

fn is_running(state: &PodState, container: &str, id: &str) -> bool {
    state
        .observed()
        .containers
        .iter()
        .any(|c| c.name == container && c.id == id && c.state == ContainerState::Running)
}

fn watch_directory(directory: &Path) -> std::io::Result<AsyncFd<OwnedFd>> {
    let fd = inotify::init(inotify::CreateFlags::NONBLOCK | inotify::CreateFlags::CLOEXEC)?;
    inotify::add_watch(
        &fd,
        directory,
        inotify::WatchFlags::MODIFY | inotify::WatchFlags::CREATE | inotify::WatchFlags::MOVED_TO,
    )?;
    // SAFETY: an `OwnedFd` is open and its own, and it stays inside the `AsyncFd` until that is dropped.
    let watch = unsafe { AsyncFd::register_with_interest(fd, tokio::io::Interest::READABLE) };
    Ok(watch?)
}

/// Waits for the next write; without a watch, for ever.
async fn written(watch: Option<&AsyncFd<OwnedFd>>) {
    let Some(watch) = watch else {
        return std::future::pending().await;
    };
    if let Ok(mut guard) = watch.readable().await {
        let mut buffer = [0u8; 4096];
        while rustix::io::read(watch.get_ref(), &mut buffer).is_ok_and(|n| n > 0) {}
        guard.clear_ready();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::observed::{ObservedContainer, ObservedPod};
    use serde_json::json;
    use std::io::Write;

    #[test]
    fn which_instance() {
        let check = |status: serde_json::Value, previous: bool, expected: Result<&str, &str>| {
            let mut status = status;
            status["name"] = json!("c");
            status["image"] = json!("i");
            for (key, value) in [
                ("imageID", json!("")),
                ("ready", json!(false)),
                ("restartCount", json!(0)),
            ] {
                status[key] = value;
            }
            let status: PodStatus = serde_json::from_value(json!({"containerStatuses": [status]})).unwrap();
            assert_eq!(
                container_id("p", &status, "c", previous),
                expected.map(str::to_owned).map_err(str::to_owned)
            );
        };
        let running = json!({"containerID": "r://new", "state": {"running": {}}, "lastState": {"terminated": {"exitCode": 1, "containerID": "r://old"}}});
        check(running.clone(), false, Ok("new"));
        check(running, true, Ok("old"));
        check(
            json!({"state": {"running": {}}}),
            true,
            Err("previous terminated container \"c\" in pod \"p\" not found"),
        );
        check(
            json!({"state": {"waiting": {"reason": "ImagePullBackOff"}}}),
            false,
            Err("container \"c\" in pod \"p\" is waiting to start: trying and failing to pull image"),
        );
        check(
            json!({"state": {"waiting": {"reason": "CrashLoopBackOff"}}, "lastState": {"terminated": {"exitCode": 1, "containerID": "r://old"}}}),
            false,
            Ok("old"),
        );
        check(
            json!({"state": {"terminated": {"exitCode": 0, "containerID": "r://x"}}}),
            false,
            Ok("x"),
        );
        assert_eq!(
            container_id("p", &PodStatus::default(), "c", false),
            Err("container \"c\" in pod \"p\" is not available".to_owned())
        );
    }

    fn state_with(running: bool) -> Arc<PodState> {
        let state = PodState::new(Arc::default(), true, Default::default());
        set_running(&state, running);
        state
    }

    fn set_running(state: &PodState, running: bool) {
        let container = ObservedContainer {
            id: "id".into(),
            name: "c".into(),
            state: if running {
                ContainerState::Running
            } else {
                ContainerState::Exited
            },
            ..Default::default()
        };
        state.set_observed(ObservedPod {
            containers: vec![container],
            ..Default::default()
        });
        state.dirty.send_modify(|n| *n += 1);
    }

    async fn all(mut output: mpsc::Receiver<Bytes>) -> String {
        let mut text = Vec::new();
        while let Some(piece) = output.recv().await {
            text.extend_from_slice(&piece);
        }
        String::from_utf8(text).unwrap()
    }

    #[tokio::test]
    async fn links_and_pipes_are_no_logs() {
        let dir = tempfile::tempdir().unwrap();
        let secret = dir.path().join("secret");
        std::fs::write(&secret, "2026-01-01T00:00:01Z stdout F secret\n").unwrap();
        let (link, pipe) = (dir.path().join("0.log"), dir.path().join("1.log"));
        std::os::unix::fs::symlink(&secret, &link).unwrap();
        let mode = rustix::fs::Mode::from_raw_mode(0o600);
        rustix::fs::mknodat(rustix::fs::CWD, &pipe, rustix::fs::FileType::Fifo, mode, 0).unwrap();
        for path in [&link, &pipe, &dir.path().to_owned()] {
            assert!(open(path, None).await.is_err(), "{}", path.display());
        }
        assert!(open(&secret, None).await.is_ok());
    }

    #[tokio::test]
    async fn reads_to_the_end() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("0.log");
        std::fs::write(
            &path,
            "2026-01-01T00:00:01Z stdout F a\n2026-01-01T00:00:02Z stdout F b\n",
        )
        .unwrap();
        let (sender, receiver) = mpsc::channel(4);
        let options = LogOptions {
            tail_lines: Some(1),
            ..Default::default()
        };
        stream(state_with(false), "c".into(), "id".into(), path, options, sender).await;
        assert_eq!(all(receiver).await, "b\n");
    }

    #[tokio::test]
    async fn follows_over_a_rotation_until_the_container_ends() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("0.log");
        std::fs::write(&path, "2026-01-01T00:00:01Z stdout F a\n").unwrap();
        let state = state_with(true);
        let (sender, mut receiver) = mpsc::channel(4);
        let options = LogOptions {
            follow: true,
            ..Default::default()
        };
        let task = tokio::spawn(stream(
            state.clone(),
            "c".into(),
            "id".into(),
            path.clone(),
            options,
            sender,
        ));
        assert_eq!(receiver.recv().await.unwrap(), "a\n");
        std::fs::OpenOptions::new()
            .append(true)
            .open(&path)
            .unwrap()
            .write_all(b"2026-01-01T00:00:02Z stdout F b\n")
            .unwrap();
        assert_eq!(receiver.recv().await.unwrap(), "b\n");
        std::fs::rename(&path, dir.path().join("0.log.1")).unwrap();
        std::fs::write(&path, "2026-01-01T00:00:03Z stdout F c\n").unwrap();
        assert_eq!(receiver.recv().await.unwrap(), "c\n");
        set_running(&state, false);
        assert_eq!(receiver.recv().await, None);
        task.await.unwrap();
    }
}
