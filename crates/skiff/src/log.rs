//! The server's log, on standard error. A log that cannot be written must harm nothing: lines are dropped and counted,
//! nobody waits, nobody panics. And the log must not fill the disk: a file that `skiff up` made is kept within bounds.

use std::fs::OpenOptions;
use std::os::unix::fs::OpenOptionsExt;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;
use tracing_subscriber::fmt::MakeWriter;

/// A file that is longer is put aside, in place of the one that was put aside before.
const LONGEST: u64 = 64 << 20;

pub struct Log {
    /// The file behind standard error, if it is ours to replace.
    file: Option<PathBuf>,
    longest: u64,
    length: AtomicU64,
    dropped: AtomicU64,
    /// Leaf lock: who puts the file aside.
    aside: Mutex<()>,
}

impl Log {
    pub fn new(file: Option<PathBuf>) -> Log {
        Log::within(file, LONGEST)
    }

    fn within(file: Option<PathBuf>, longest: u64) -> Log {
        let length = file.as_ref().and_then(|file| file.metadata().ok());
        Log {
            length: AtomicU64::new(length.map_or(0, |found| found.len())),
            file,
            longest,
            dropped: AtomicU64::new(0),
            aside: Mutex::default(),
        }
    }

    fn put(&self, line: &[u8]) {
        let dropped = self.dropped.swap(0, Ordering::Relaxed);
        let written = if dropped > 0 {
            write(format!("\n{dropped} lines of the log could not be written\n").as_bytes()) && write(line)
        } else {
            write(line)
        };
        if !written {
            self.dropped.fetch_add(dropped + 1, Ordering::Relaxed);
        } else if self.length.fetch_add(line.len() as u64, Ordering::Relaxed) > self.longest {
            self.put_aside();
        }
    }

    /// Goes on in a new file. What does not work is tried again when as much was written once more.
    fn put_aside(&self) {
        let Some(_aside) = self.aside.try_lock() else {
            return;
        };
        self.length.store(0, Ordering::Relaxed);
        let Some(file) = &self.file else { return };
        let mut old = file.clone().into_os_string();
        old.push(".1");
        if std::fs::rename(file, old).is_err() {
            return;
        }
        let new = OpenOptions::new()
            .create(true)
            .append(true)
            .mode(0o600)
            .open(file);
        if let Ok(new) = new {
            let _ = rustix::stdio::dup2_stderr(&new);
        }
    }
}

/// Whether all of it was written.
fn write(mut bytes: &[u8]) -> bool {
    while !bytes.is_empty() {
        match rustix::io::write(rustix::stdio::stderr(), bytes) {
            Ok(0) => return false,
            Ok(count) => bytes = bytes.get(count..).unwrap_or_default(),
            Err(rustix::io::Errno::INTR) => {}
            Err(_) => return false,
        }
    }
    true
}

/// One line. It takes everything, whatever becomes of it.
pub struct Line<'a>(&'a Log);

impl std::io::Write for Line<'_> {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.put(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

impl<'a> MakeWriter<'a> for Log {
    type Writer = Line<'a>;

    fn make_writer(&'a self) -> Line<'a> {
        Line(self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;
    use std::process::{Command, Stdio};

    const CHILD: &str = "SKIFF_TEST_LOG";

    /// What the children do; their standard error is what the test gave them.
    #[test]
    fn child() {
        let Ok(file) = std::env::var(CHILD) else { return };
        let file = Some(PathBuf::from(file)).filter(|file| !file.as_os_str().is_empty());
        let log = Log::within(file, 10_000);
        for number in 0..300 {
            // In one piece, as events are.
            let line = format!("line {number:03} {}\n", "x".repeat(90));
            log.make_writer().write_all(line.as_bytes()).unwrap();
        }
        std::process::exit(7);
    }

    fn run(file: &str, stderr: impl Into<Stdio>) {
        let ended = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "log::tests::child", "--nocapture"])
            .env(CHILD, file)
            .stdout(Stdio::null())
            .stderr(stderr)
            .status()
            .unwrap();
        assert_eq!(ended.code(), Some(7), "it went on to the end");
    }

    #[test]
    fn a_log_that_cannot_be_written_harms_nobody() {
        run("", OpenOptions::new().write(true).open("/dev/full").unwrap());
        // A pipe without a reader.
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        run("", writer);
    }

    #[test]
    fn a_long_log_is_put_aside() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("skiff.log");
        let log = OpenOptions::new().create(true).append(true).open(&path).unwrap();
        run(path.to_str().unwrap(), log);
        let now = std::fs::read_to_string(&path).unwrap();
        let before = std::fs::read_to_string(dir.path().join("skiff.log.1")).unwrap();
        assert!(
            now.len() < 12_000 && before.len() < 12_000,
            "{} {}",
            now.len(),
            before.len()
        );
        assert!(now.contains("line 299"), "{now}");
        let (last, first) = (before.lines().last().unwrap(), now.lines().next().unwrap());
        let number = |line: &str| line[5..8].parse::<u32>().unwrap();
        assert_eq!(number(last) + 1, number(first), "no line is lost in between");
    }
}
