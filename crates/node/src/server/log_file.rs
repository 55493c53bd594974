//! Container log files in CRI's format: `<RFC 3339 time> <stdout|stderr> <tags> <content>`. Pure parsing and
//! the search for the last lines.

use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};

use k8s_openapi::jiff::Timestamp;

const BLOCK: u64 = 64 * 1024;

#[derive(Debug, PartialEq, Eq)]
pub struct Line<'a> {
    pub time: &'a str,
    pub stream: &'a str,
    /// The rest of the line comes with the next record.
    pub partial: bool,
    pub content: &'a [u8],
}

/// One record, with or without its newline; `None` if it is not one.
pub fn parse_line(record: &[u8]) -> Option<Line<'_>> {
    let record = record.strip_suffix(b"\n").unwrap_or(record);
    let mut parts = record.splitn(4, |b| *b == b' ');
    let time = std::str::from_utf8(parts.next()?).ok()?;
    let stream = std::str::from_utf8(parts.next()?).ok()?;
    let tags = std::str::from_utf8(parts.next()?).ok()?;
    if !matches!(stream, "stdout" | "stderr") || time.len() < 20 {
        return None;
    }
    Some(Line {
        time,
        stream,
        partial: tags.split(':').next() == Some("P"),
        content: parts.next().unwrap_or_default(),
    })
}

/// Where the last `lines` records of the file begin.
pub fn tail_offset(file: &mut File, lines: u64) -> io::Result<u64> {
    let end = file.seek(SeekFrom::End(0))?;
    if lines == 0 {
        return Ok(end);
    }
    let mut wanted = lines;
    let mut position = end;
    let mut buffer = Vec::new();
    while position > 0 {
        let start = position.saturating_sub(BLOCK);
        let length = position - start;
        file.seek(SeekFrom::Start(start))?;
        buffer.clear();
        file.take(length).read_to_end(&mut buffer)?;
        for (index, byte) in buffer.iter().enumerate().rev() {
            let at = start + u64::try_from(index).unwrap_or(0);
            // The newline at the very end closes the last record.
            if *byte == b'\n' && at + 1 != end {
                wanted -= 1;
                if wanted == 0 {
                    return Ok(at + 1);
                }
            }
        }
        position = start;
    }
    Ok(0)
}

/// What of a log is wanted, in the API's terms.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LogOptions {
    pub follow: bool,
    pub previous: bool,
    pub timestamps: bool,
    pub tail_lines: Option<u64>,
    pub limit_bytes: Option<u64>,
    pub since: Option<Timestamp>,
    /// `None`: both.
    pub stream: Option<&'static str>,
}

impl LogOptions {
    pub fn from_query(query: &[(String, String)], now: Timestamp) -> Result<Self, String> {
        let mut options = LogOptions::default();
        let flag = |value: &str| matches!(value, "1" | "t" | "T" | "true" | "TRUE" | "True" | "");
        for (name, value) in query {
            let number = || {
                value
                    .parse::<u64>()
                    .map_err(|_| format!("invalid value for {name}: {value:?}"))
            };
            match name.as_str() {
                "follow" => options.follow = flag(value),
                "previous" => options.previous = flag(value),
                "timestamps" => options.timestamps = flag(value),
                "tailLines" if value != "all" => options.tail_lines = Some(number()?),
                "limitBytes" => match number()? {
                    0 => return Err("limitBytes must be greater than 0".to_owned()),
                    limit => options.limit_bytes = Some(limit),
                },
                "sinceSeconds" => {
                    let seconds = i64::try_from(number()?).map_err(|e| e.to_string())?;
                    options.since = Timestamp::from_second(now.as_second() - seconds).ok();
                }
                "sinceTime" => {
                    options.since = Some(
                        value
                            .parse()
                            .map_err(|_| format!("invalid value for sinceTime: {value:?}"))?,
                    )
                }
                "stream" => {
                    options.stream = match value.as_str() {
                        "" | "All" => None,
                        "Stdout" | "stdout" => Some("stdout"),
                        "Stderr" | "stderr" => Some("stderr"),
                        other => return Err(format!("invalid stream type {other:?}")),
                    }
                }
                _ => {}
            }
        }
        Ok(options)
    }
}

/// Turns records into what a client reads. Keeps only what the options ask for, and stops at the limit.
pub struct Formatter {
    options: LogOptions,
    remaining: Option<u64>,
    in_line: bool,
}

impl Formatter {
    pub fn new(options: LogOptions) -> Self {
        Formatter {
            remaining: options.limit_bytes,
            options,
            in_line: false,
        }
    }

    /// Appends the record to `output`. Returns whether there is room for more.
    pub fn push(&mut self, record: &[u8], output: &mut Vec<u8>) -> bool {
        let Some(line) = parse_line(record) else {
            return true;
        };
        if self.options.stream.is_some_and(|stream| stream != line.stream) {
            return true;
        }
        if let Some(since) = self.options.since
            && line.time.parse::<Timestamp>().is_ok_and(|time| time < since)
        {
            return true;
        }
        let before = output.len();
        if self.options.timestamps && !self.in_line {
            output.extend_from_slice(line.time.as_bytes());
            output.push(b' ');
        }
        output.extend_from_slice(line.content);
        if !line.partial {
            output.push(b'\n');
        }
        self.in_line = line.partial;
        match &mut self.remaining {
            None => true,
            Some(remaining) => {
                let written = output.len() - before;
                let room = usize::try_from(*remaining).unwrap_or(usize::MAX);
                if written >= room {
                    output.truncate(before + room);
                    *remaining = 0;
                    return false;
                }
                *remaining -= u64::try_from(written).unwrap_or(0);
                true
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    #[test]
    fn records() {
        let line = parse_line(b"2026-01-01T00:00:00.000000001Z stdout F hello world\n").unwrap();
        assert_eq!(
            (line.stream, line.partial, line.content),
            ("stdout", false, &b"hello world"[..])
        );
        assert!(
            parse_line(b"2026-01-01T00:00:00.000000001Z stderr P x")
                .unwrap()
                .partial
        );
        assert_eq!(
            parse_line(b"2026-01-01T00:00:00.000000001Z stdout F ")
                .unwrap()
                .content,
            b""
        );
        for bad in [
            &b""[..],
            b"garbage",
            b"a b c d",
            b"2026-01-01T00:00:00Z other F x",
        ] {
            assert_eq!(parse_line(bad), None);
        }
    }

    #[test]
    fn tails() {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(b"a\nbb\nccc\n").unwrap();
        let mut check = |lines: u64, expected: u64| {
            assert_eq!(tail_offset(&mut file, lines).unwrap(), expected, "{lines}")
        };
        check(0, 9);
        check(1, 5);
        check(2, 2);
        check(3, 0);
        check(99, 0);
        let mut open = tempfile::tempfile().unwrap();
        open.write_all(b"a\nunfinished").unwrap();
        assert_eq!(tail_offset(&mut open, 1).unwrap(), 2);
        let mut large = tempfile::tempfile().unwrap();
        for _ in 0..50_000 {
            large.write_all(b"0123456789\n").unwrap();
        }
        assert_eq!(tail_offset(&mut large, 20_000).unwrap(), 30_000 * 11);
    }

    fn format(options: LogOptions) -> String {
        let records: [&[u8]; 4] = [
            b"2026-01-01T00:00:01Z stdout F one\n",
            b"2026-01-01T00:00:02Z stderr P tw\n",
            b"2026-01-01T00:00:03Z stderr F o\n",
            b"2026-01-01T00:00:04Z stdout F three\n",
        ];
        let mut formatter = Formatter::new(options);
        let mut output = Vec::new();
        for record in records {
            if !formatter.push(record, &mut output) {
                break;
            }
        }
        String::from_utf8(output).unwrap()
    }

    #[test]
    fn formats() {
        assert_eq!(format(LogOptions::default()), "one\ntwo\nthree\n");
        assert_eq!(
            format(LogOptions {
                timestamps: true,
                ..Default::default()
            }),
            "2026-01-01T00:00:01Z one\n2026-01-01T00:00:02Z two\n2026-01-01T00:00:04Z three\n"
        );
        assert_eq!(
            format(LogOptions {
                limit_bytes: Some(6),
                ..Default::default()
            }),
            "one\ntw"
        );
        assert_eq!(
            format(LogOptions {
                since: Some("2026-01-01T00:00:04Z".parse().unwrap()),
                ..Default::default()
            }),
            "three\n"
        );
        assert_eq!(
            format(LogOptions {
                stream: Some("stderr"),
                ..Default::default()
            }),
            "two\n"
        );
    }

    #[test]
    fn queries() {
        let query = |pairs: &[(&str, &str)]| -> Vec<(String, String)> {
            pairs
                .iter()
                .map(|(k, v)| ((*k).to_owned(), (*v).to_owned()))
                .collect()
        };
        let now = Timestamp::from_second(1000).unwrap();
        let options = LogOptions::from_query(
            &query(&[
                ("follow", "true"),
                ("tailLines", "5"),
                ("sinceSeconds", "10"),
                ("previous", "false"),
            ]),
            now,
        )
        .unwrap();
        assert_eq!(
            (
                options.follow,
                options.previous,
                options.tail_lines,
                options.since
            ),
            (true, false, Some(5), Timestamp::from_second(990).ok())
        );
        assert!(LogOptions::from_query(&query(&[("tailLines", "-1")]), now).is_err());
        assert!(LogOptions::from_query(&query(&[("limitBytes", "0")]), now).is_err());
    }
}
