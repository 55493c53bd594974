//! A container's log file in the CRI's format: `<RFC 3339 with nanoseconds> <stream> <F|P> <line>`. It
//! must not fail the container: a full disk loses lines, not processes.

use std::fs::File;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

/// A longer line is written in parts, all but the last marked `P`.
pub const MAX_LINE: usize = 16 * 1024;

pub struct LogFile {
    path: PathBuf,
    file: File,
}

impl LogFile {
    pub fn open(path: &Path) -> io::Result<LogFile> {
        if let Some(parent) = path.parent() {
            std::fs::create_dir_all(parent)?;
        }
        Ok(LogFile {
            path: path.to_owned(),
            file: open_append(path)?,
        })
    }

    /// After the kubelet renamed the file.
    pub fn reopen(&mut self) -> io::Result<()> {
        self.file = open_append(&self.path)?;
        Ok(())
    }

    pub fn write(&mut self, entries: &[u8]) {
        let _ = self.file.write_all(entries);
    }
}

/// A container that has the folder of logs as a volume can put a link to a file of the host there, or a pipe
/// that nobody reads: neither is written to.
fn open_append(path: &Path) -> io::Result<File> {
    use std::os::unix::fs::OpenOptionsExt;
    let file = File::options()
        .append(true)
        .create(true)
        .mode(0o640)
        .custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK)
        .open(path)?;
    if file.metadata()?.is_file() {
        Ok(file)
    } else {
        Err(io::Error::other("the log is not a regular file"))
    }
}

/// Cuts a stream into log entries. What follows the last line end is kept for the next chunk.
pub struct LineCutter {
    stream: &'static str,
    rest: Vec<u8>,
}

impl LineCutter {
    pub fn new(stream: &'static str) -> LineCutter {
        LineCutter {
            stream,
            rest: Vec::new(),
        }
    }

    /// The entries that `chunk` completes.
    pub fn push(&mut self, chunk: &[u8], now: &str) -> Vec<u8> {
        let mut out = Vec::with_capacity(chunk.len() + 64);
        let mut chunk = chunk;
        while let Some(end) = chunk.iter().position(|byte| *byte == b'\n') {
            self.rest.extend_from_slice(&chunk[..end]);
            chunk = &chunk[end + 1..];
            self.cut_full(&mut out, now);
            self.entry(&mut out, now, b'F', self.rest.len());
        }
        self.rest.extend_from_slice(chunk);
        self.cut_full(&mut out, now);
        out
    }

    /// The last entry: a line that was never ended is written as a part.
    pub fn finish(&mut self, now: &str) -> Vec<u8> {
        let mut out = Vec::new();
        if !self.rest.is_empty() {
            self.entry(&mut out, now, b'P', self.rest.len());
        }
        out
    }

    fn cut_full(&mut self, out: &mut Vec<u8>, now: &str) {
        while self.rest.len() > MAX_LINE {
            self.entry(out, now, b'P', MAX_LINE);
        }
    }

    fn entry(&mut self, out: &mut Vec<u8>, now: &str, tag: u8, length: usize) {
        out.extend_from_slice(now.as_bytes());
        out.push(b' ');
        out.extend_from_slice(self.stream.as_bytes());
        out.extend_from_slice(&[b' ', tag, b' ']);
        out.extend(self.rest.drain(..length));
        out.push(b'\n');
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cuts_lines() {
        let check = |chunks: &[&str], expected: &str| {
            let mut cutter = LineCutter::new("stdout");
            let mut out = Vec::new();
            for chunk in chunks {
                out.extend(cutter.push(chunk.as_bytes(), "T"));
            }
            out.extend(cutter.finish("T"));
            assert_eq!(String::from_utf8_lossy(&out), expected, "{chunks:?}");
        };
        check(&["a\nb\n"], "T stdout F a\nT stdout F b\n");
        check(&["a", "b\n"], "T stdout F ab\n");
        check(&["\n"], "T stdout F \n");
        check(&["ab"], "T stdout P ab\n");
        check(&[], "");
        let long = "x".repeat(MAX_LINE + 1);
        check(
            &[&long, "\n"],
            &format!("T stdout P {}\nT stdout F x\n", "x".repeat(MAX_LINE)),
        );
        let exact = "x".repeat(MAX_LINE);
        check(&[&exact, "\n"], &format!("T stdout F {exact}\n"));
    }
}
