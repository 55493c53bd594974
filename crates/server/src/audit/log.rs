//! The audit log: lines of JSON in a file that is rotated. One thread writes; requests hand their lines over, and wait as
//! the mode says. A log that cannot be written, or not fast enough, costs events, never requests.

use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc;
use std::thread::JoinHandle;
use std::time::Duration;

use jiff::Timestamp;
use tokio::sync::oneshot;

/// How much may wait for the writer; what comes on top is lost.
const WAITING_MAX: usize = 64 * 1024 * 1024;
/// How much is written at a time.
const BATCH: usize = 1024 * 1024;
/// How long a request waits for a log that is slow, in mode `blocking`.
const PATIENCE: Duration = Duration::from_secs(1);
/// How long the end of the process waits for the log.
const LAST_PATIENCE: Duration = Duration::from_secs(5);
/// Between two complaints about a log that cannot be written.
const COMPLAIN_EVERY: i64 = 10;
const DAY: i64 = 24 * 60 * 60;

/// Whether a request waits for its events.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Mode {
    /// Never.
    Batch,
    /// Until they are written, or cannot be.
    #[default]
    Blocking,
    /// Until they are written; a request whose first event cannot be is refused.
    BlockingStrict,
}

/// Where the log goes, and how much of it is kept. A zero means without limit.
#[derive(Debug, Clone)]
pub struct LogOptions {
    /// `-` is standard output.
    pub path: PathBuf,
    pub max_size_megabytes: u64,
    pub max_backups: usize,
    pub max_age_days: u32,
    pub compress: bool,
    pub mode: Mode,
}

struct Line {
    bytes: Vec<u8>,
    written: Option<oneshot::Sender<bool>>,
}

#[derive(Default)]
struct Shared {
    /// Bytes that wait for the writer.
    waiting: AtomicUsize,
    /// Somebody has waited in vain, and nothing was written since.
    stuck: AtomicBool,
    failed: AtomicU64,
}

pub struct Log {
    lines: mpsc::Sender<Line>,
    shared: Arc<Shared>,
    pub mode: Mode,
}

impl Log {
    pub fn open(options: LogOptions) -> io::Result<Log> {
        let (lines, queue) = mpsc::channel();
        let shared = Arc::new(Shared::default());
        let mode = options.mode;
        let mut target = Target::open(options)?;
        let writer = shared.clone();
        std::thread::Builder::new()
            .name("audit-log".to_owned())
            .spawn(move || {
                // A panic costs the lines of one batch, not the log.
                while let Err(panic) =
                    catch_unwind(AssertUnwindSafe(|| write_all(&mut target, &queue, &writer)))
                {
                    let why = skiff_supervise::panic_text(&*panic);
                    tracing::error!(panic = why, "writing the audit log panicked");
                    skiff_supervise::failed("audit-log", &format!("panicked: {why}"));
                }
            })?;
        Ok(Log { lines, shared, mode })
    }

    /// Events that were lost.
    pub fn failed(&self) -> u64 {
        self.shared.failed.load(Ordering::Relaxed)
    }

    /// Hands a line over without waiting: whether there was room.
    pub fn send(&self, bytes: Vec<u8>) -> bool {
        self.hand_over(Line { bytes, written: None })
    }

    /// Waits until what was handed over is written, but not for ever.
    pub async fn flush(&self) {
        let (sender, written) = oneshot::channel();
        let last = Line {
            bytes: Vec::new(),
            written: Some(sender),
        };
        if self.lines.send(last).is_ok() && tokio::time::timeout(LAST_PATIENCE, written).await.is_err() {
            tracing::error!("the audit log is too slow: its last events are lost");
        }
    }

    fn hand_over(&self, line: Line) -> bool {
        let length = line.bytes.len();
        if self.shared.waiting.fetch_add(length, Ordering::AcqRel) + length > WAITING_MAX
            || self.lines.send(line).is_err()
        {
            self.shared.waiting.fetch_sub(length, Ordering::AcqRel);
            self.shared.failed.fetch_add(1, Ordering::Relaxed);
            return false;
        }
        true
    }

    /// Hands a line over and waits as the mode says: whether it was written, as far as that was waited for.
    pub async fn write(&self, bytes: Vec<u8>) -> bool {
        if self.mode == Mode::Batch
            || (self.mode == Mode::Blocking && self.shared.stuck.load(Ordering::Acquire))
        {
            return self.send(bytes);
        }
        let (sender, written) = oneshot::channel();
        let handed = self.hand_over(Line {
            bytes,
            written: Some(sender),
        });
        if !handed {
            return false;
        }
        if self.mode == Mode::BlockingStrict {
            return written.await.unwrap_or(false);
        }
        match tokio::time::timeout(PATIENCE, written).await {
            Ok(written) => written.unwrap_or(false),
            Err(_) => {
                tracing::error!("the audit log is too slow: requests no longer wait for it");
                self.shared.stuck.store(true, Ordering::Release);
                false
            }
        }
    }
}

/// The writer's loop: takes what waits, writes it at once, and says so.
fn write_all(target: &mut Target, queue: &mpsc::Receiver<Line>, shared: &Shared) {
    let mut complained = i64::MIN;
    while let Ok(first) = queue.recv() {
        let mut count = u64::from(!first.bytes.is_empty());
        let (mut bytes, mut told) = (first.bytes, Vec::new());
        told.extend(first.written);
        while bytes.len() < BATCH
            && let Ok(next) = queue.try_recv()
        {
            bytes.extend_from_slice(&next.bytes);
            told.extend(next.written);
            count += u64::from(!next.bytes.is_empty());
        }
        let result = target.write(&bytes);
        shared.waiting.fetch_sub(bytes.len(), Ordering::AcqRel);
        if let Err(error) = &result {
            shared.failed.fetch_add(count, Ordering::Relaxed);
            let now = Timestamp::now().as_second();
            if now >= complained.saturating_add(COMPLAIN_EVERY) {
                complained = now;
                tracing::error!(%error, "the audit log cannot be written");
            }
        }
        shared.stuck.store(false, Ordering::Release);
        for waiter in told {
            // Who no longer waits need not know.
            let _ = waiter.send(result.is_ok());
        }
    }
}

/// The file that is written, or standard output.
struct Target {
    options: LogOptions,
    file: Option<File>,
    size: u64,
    /// The last write ended in the middle of a line.
    torn: bool,
    /// Compresses and removes files that were set aside: with a large file that takes seconds.
    tidying: Option<JoinHandle<()>>,
}

impl Target {
    fn open(options: LogOptions) -> io::Result<Target> {
        let mut target = Target {
            options,
            file: None,
            size: 0,
            torn: false,
            tidying: None,
        };
        if !target.is_standard_output() {
            target.reopen()?;
        }
        Ok(target)
    }

    fn is_standard_output(&self) -> bool {
        self.options.path == Path::new("-")
    }

    fn reopen(&mut self) -> io::Result<()> {
        if let Some(folder) = self.options.path.parent() {
            std::fs::create_dir_all(folder)?;
        }
        let file = OpenOptions::new()
            .create(true)
            .append(true)
            .mode(0o600)
            .open(&self.options.path)?;
        self.size = file.metadata()?.len();
        self.file = Some(file);
        Ok(())
    }

    fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        if self.is_standard_output() {
            return io::stdout().lock().write_all(bytes);
        }
        let limit = self.options.max_size_megabytes.saturating_mul(1024 * 1024);
        if limit > 0 && self.size > 0 && self.size + bytes.len() as u64 > limit {
            self.rotate()?;
        }
        if self.file.is_none() {
            self.reopen()?;
        }
        let Some(file) = self.file.as_mut() else {
            return Err(io::Error::other("the log is closed"));
        };
        if self.torn {
            file.write_all(b"\n")?;
            self.size += 1;
            self.torn = false;
        }
        let result = file.write_all(bytes);
        match &result {
            Ok(()) => self.size += bytes.len() as u64,
            Err(_) => {
                let length = file.metadata().map_or(self.size, |metadata| metadata.len());
                self.torn = length != self.size;
                self.size = length;
            }
        }
        result
    }

    /// Sets the file aside under the time of day, and starts another.
    fn rotate(&mut self) -> io::Result<()> {
        self.file = None;
        let path = &self.options.path;
        let now = Timestamp::now().strftime("%Y-%m-%dT%H-%M-%S%.3f").to_string();
        let aside = path.with_file_name(aside_name(path, &now));
        match std::fs::rename(path, &aside) {
            // Somebody has taken the file away: there is nothing to set aside.
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            result => result?,
        }
        self.torn = false;
        self.reopen()?;
        // One at a time: the next looks at all files anyway.
        if self.tidying.as_ref().is_none_or(JoinHandle::is_finished) {
            let options = self.options.clone();
            let tidy = move || {
                if let Err(error) = tidy(&options) {
                    tracing::warn!(%error, "old audit logs cannot be compressed or removed");
                }
            };
            let thread = std::thread::Builder::new().name("audit-log-tidy".to_owned());
            self.tidying = Some(thread.spawn(tidy)?);
        }
        Ok(())
    }
}

/// Removes files that were set aside and are too old or too many, and compresses the others.
fn tidy(options: &LogOptions) -> io::Result<()> {
    let folder = options
        .path
        .parent()
        .filter(|folder| !folder.as_os_str().is_empty())
        .unwrap_or(Path::new("."));
    let mut aside: Vec<(i64, PathBuf)> = Vec::new();
    for entry in std::fs::read_dir(folder)? {
        let path = entry?.path();
        if let Some(time) = time_aside(&options.path, &path) {
            aside.push((time, path));
        }
    }
    aside.sort();
    let oldest = match options.max_age_days {
        0 => i64::MIN,
        days => Timestamp::now().as_second() - i64::from(days) * DAY,
    };
    let beyond = match options.max_backups {
        0 => 0,
        most => aside.len().saturating_sub(most),
    };
    for (index, (time, path)) in aside.iter().enumerate() {
        if index < beyond || *time < oldest {
            std::fs::remove_file(path)?;
        } else if options.compress && path.extension().is_none_or(|extension| extension != "gz") {
            compress(path)?;
        }
    }
    Ok(())
}

/// `audit.log` set aside: `audit-2026-01-31T12-00-00.000.log`.
fn aside_name(path: &Path, time: &str) -> String {
    let stem = path.file_stem().unwrap_or_default().to_string_lossy();
    match path.extension() {
        Some(extension) => format!("{stem}-{time}.{}", extension.to_string_lossy()),
        None => format!("{stem}-{time}"),
    }
}

/// When a file was set aside (seconds of Unix time), if it is one of this log's.
fn time_aside(log: &Path, path: &Path) -> Option<i64> {
    let name = path.file_name()?.to_str()?;
    let name = name.strip_suffix(".gz").unwrap_or(name);
    let stem = log.file_stem()?.to_str()?;
    let mut time = name.strip_prefix(stem)?.strip_prefix('-')?;
    if let Some(extension) = log.extension() {
        time = time.strip_suffix(extension.to_str()?)?.strip_suffix('.')?;
    }
    let seconds = time.split('.').next()?;
    let civil = jiff::civil::DateTime::strptime("%Y-%m-%dT%H-%M-%S", seconds).ok()?;
    let zoned = civil.to_zoned(jiff::tz::TimeZone::UTC).ok()?;
    Some(zoned.timestamp().as_second())
}

fn compress(path: &Path) -> io::Result<()> {
    let mut from = File::open(path)?;
    let mut name = path.as_os_str().to_owned();
    name.push(".gz");
    let to = OpenOptions::new()
        .create(true)
        .write(true)
        .truncate(true)
        .mode(0o600)
        .open(&name)?;
    let mut gzip = flate2::write::GzEncoder::new(to, flate2::Compression::default());
    io::copy(&mut from, &mut gzip)?;
    gzip.finish()?;
    std::fs::remove_file(path)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn options(path: PathBuf) -> LogOptions {
        LogOptions {
            path,
            max_size_megabytes: 1,
            max_backups: 2,
            max_age_days: 0,
            compress: false,
            mode: Mode::Blocking,
        }
    }

    #[tokio::test]
    async fn what_was_waited_for_is_in_the_file() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("deep/audit.log");
        let log = Log::open(options(path.clone())).unwrap();
        assert!(log.write(b"one\n".to_vec()).await);
        assert!(log.write(b"two\n".to_vec()).await);
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "one\ntwo\n");
        drop(log);
        // An old file is continued.
        let log = Log::open(options(path.clone())).unwrap();
        assert!(log.write(b"three\n".to_vec()).await);
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "one\ntwo\nthree\n");
    }

    #[test]
    fn a_full_file_is_set_aside_and_few_are_kept() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("audit.log");
        for old in ["2020-01-01T00-00-00.000", "2021-01-01T00-00-00.000"] {
            std::fs::write(folder.path().join(aside_name(&path, old)), "").unwrap();
        }
        std::fs::write(folder.path().join("audit-other.log"), "").unwrap();
        let mut target = Target::open(options(path.clone())).unwrap();
        let half = vec![b'x'; 600 * 1024];
        target.write(&half).unwrap();
        target.write(&half).unwrap();
        target.tidying.take().unwrap().join().unwrap();
        assert_eq!(std::fs::metadata(&path).unwrap().len(), half.len() as u64);
        let mut names: Vec<String> = std::fs::read_dir(folder.path())
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort();
        assert_eq!(names.len(), 4, "{names:?}");
        assert_eq!(names[0], "audit-2021-01-01T00-00-00.000.log");
        assert!(names[1].starts_with("audit-20") && time_aside(&path, Path::new(&names[1])).is_some());
        assert_eq!(names[2..], ["audit-other.log", "audit.log"]);
    }

    #[test]
    fn a_file_that_was_taken_away_is_made_again() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("audit.log");
        let mut target = Target::open(options(path.clone())).unwrap();
        target.write(&vec![b'x'; 900 * 1024]).unwrap();
        std::fs::remove_file(&path).unwrap();
        let half = vec![b'y'; 600 * 1024];
        target.write(&half).unwrap();
        assert_eq!(std::fs::read(&path).unwrap(), half);
    }

    #[test]
    fn files_that_are_old_go_and_the_others_are_compressed() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("audit.log");
        let yesterday = Timestamp::now() - jiff::SignedDuration::from_hours(24);
        let yesterday = yesterday.strftime("%Y-%m-%dT%H-%M-%S.000").to_string();
        for time in ["2020-01-01T00-00-00.000", &yesterday] {
            std::fs::write(folder.path().join(aside_name(&path, time)), "text").unwrap();
        }
        std::fs::write(&path, "").unwrap();
        let wanted = LogOptions {
            max_backups: 0,
            max_age_days: 3,
            compress: true,
            ..options(path)
        };
        // The second time, what is compressed is left alone.
        for _ in 0..2 {
            tidy(&wanted).unwrap();
            let mut names: Vec<String> = std::fs::read_dir(folder.path())
                .unwrap()
                .map(|entry| entry.unwrap().file_name().into_string().unwrap())
                .collect();
            names.sort();
            assert_eq!(
                names,
                [format!("audit-{yesterday}.log.gz"), "audit.log".to_owned()]
            );
        }
    }

    #[tokio::test]
    async fn what_mode_batch_holds_is_written_by_a_flush() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("audit.log");
        let wanted = LogOptions {
            mode: Mode::Batch,
            ..options(path.clone())
        };
        let log = Log::open(wanted).unwrap();
        let expected: String = (0..1000).map(|number| format!("{number}\n")).collect();
        for line in expected.lines() {
            assert!(log.write(format!("{line}\n").into_bytes()).await);
        }
        log.flush().await;
        assert_eq!(std::fs::read_to_string(&path).unwrap(), expected);
        assert_eq!(log.failed(), 0);
    }

    #[test]
    fn an_old_file_can_be_compressed() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.log");
        std::fs::write(&path, "text").unwrap();
        compress(&path).unwrap();
        assert!(!path.exists());
        let mut text = String::new();
        let file = File::open(folder.path().join("a.log.gz")).unwrap();
        io::Read::read_to_string(&mut flate2::read::GzDecoder::new(file), &mut text).unwrap();
        assert_eq!(text, "text");
    }

    #[tokio::test]
    async fn a_full_disk_costs_events_only() {
        // Writing to this device fails as on a full disk.
        for (mode, expected) in [(Mode::Blocking, false), (Mode::Batch, true)] {
            let mut options = options(PathBuf::from("/dev/full"));
            options.mode = mode;
            let log = Log::open(options).unwrap();
            assert_eq!(log.write(b"lost\n".to_vec()).await, expected);
            while log.failed() == 0 {
                tokio::task::yield_now().await;
            }
        }
    }

    #[test]
    fn a_line_after_a_torn_one_begins_anew() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("audit.log");
        let mut target = Target::open(options(path.clone())).unwrap();
        target.write(b"whole\nha").unwrap();
        target.torn = true;
        target.write(b"next\n").unwrap();
        target.write(b"last\n").unwrap();
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "whole\nha\nnext\nlast\n");
    }

    #[test]
    fn what_is_too_much_is_lost_and_takes_no_room() {
        // Nobody writes.
        let (lines, _queue) = mpsc::channel();
        let log = Log {
            lines,
            shared: Arc::default(),
            mode: Mode::Batch,
        };
        let large = || vec![0; WAITING_MAX / 2 + 1];
        assert!(log.send(large()));
        for lost in 1..4 {
            assert!(!log.send(large()));
            assert_eq!(log.failed(), lost);
        }
        assert!(log.send(b"small\n".to_vec()));
    }
}
