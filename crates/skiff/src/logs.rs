//! `skiff logs`: the server's own log, its last lines and what is added to it.

use crate::cli::LogsArgs;
use crate::cluster::needs_root;
use crate::daemon::existing;
use anyhow::{Context, Result};
use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::time::Duration;

/// How often a followed log is looked at.
const INTERVAL: Duration = Duration::from_millis(200);
const CHUNK: usize = 64 << 10;

pub fn show(args: &LogsArgs) -> Result<()> {
    let path = existing(&args.cluster)?.log_file();
    let mut file = File::open(&path).with_context(|| needs_root(&path))?;
    let start = start_of_last_lines(&mut file, args.lines)?;
    file.seek(SeekFrom::Start(start))?;
    let mut chunk = vec![0; CHUNK];
    loop {
        let length = file.read(&mut chunk)?;
        if length > 0 {
            say_raw!("{}", String::from_utf8_lossy(&chunk[..length]));
        } else if args.follow {
            std::thread::sleep(INTERVAL);
        } else {
            return Ok(());
        }
    }
}

/// Where the last `lines` lines begin, found from the end: a log may be large.
fn start_of_last_lines(file: &mut File, lines: usize) -> Result<u64> {
    let mut end = file.seek(SeekFrom::End(0))?;
    let mut found = 0;
    let mut chunk = vec![0; CHUNK];
    let mut last = true;
    while end > 0 {
        let start = end.saturating_sub(CHUNK as u64);
        let length = usize::try_from(end - start)?;
        file.seek(SeekFrom::Start(start))?;
        file.read_exact(&mut chunk[..length])?;
        for (at, byte) in chunk[..length].iter().enumerate().rev() {
            // The newline at the very end ends the last line, it begins no other.
            if *byte == b'\n' && !std::mem::take(&mut last) {
                found += 1;
                if found == lines {
                    return Ok(start + at as u64 + 1);
                }
            }
            last = false;
        }
        end = start;
    }
    Ok(0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    #[test]
    fn the_last_lines_are_found() {
        let check = |text: &str, lines: usize, expected: &str| {
            let mut file = tempfile::tempfile().unwrap();
            file.write_all(text.as_bytes()).unwrap();
            let start = usize::try_from(start_of_last_lines(&mut file, lines).unwrap()).unwrap();
            assert_eq!(&text[start..], expected);
        };
        check("", 3, "");
        check("a\nb\nc\n", 2, "b\nc\n");
        check("a\nb\nc", 2, "b\nc");
        check("a\n\n\n", 2, "\n\n");
        check("a\nb\n", 9, "a\nb\n");
        let long = "x".repeat(CHUNK);
        check(&format!("{long}\n{long}\nz\n"), 2, &format!("{long}\nz\n"));
    }
}
