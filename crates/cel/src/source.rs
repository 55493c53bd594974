//! Where things are in an expression, and how its mistakes are shown: a line with the message, the line of source,
//! and a line that points at the place.

use std::fmt;

/// The most messages that one compilation shows.
const MAX_SHOWN: usize = 100;
/// Lines longer than this are not shown.
const MAX_SNIPPET: usize = 16_384;

/// The text of an expression, by code point.
#[derive(Debug)]
pub(crate) struct Source {
    pub chars: Vec<char>,
    /// The offset at which each line starts.
    lines: Vec<u32>,
}

impl Source {
    pub fn new(text: &str) -> Self {
        let chars: Vec<char> = text.chars().collect();
        let mut lines = vec![0];
        let breaks = chars.iter().enumerate().filter(|(_, c)| **c == '\n');
        lines.extend(breaks.map(|(offset, _)| offset as u32 + 1));
        Self { chars, lines }
    }

    /// Line from 1 and column from 0 of an offset.
    fn place(&self, offset: u32) -> (usize, usize) {
        let line = self.lines.partition_point(|start| *start <= offset);
        (line, (offset - self.lines[line - 1]) as usize)
    }

    fn line(&self, line: usize) -> String {
        let start = self.lines[line - 1] as usize;
        let end = self
            .lines
            .get(line)
            .map_or(self.chars.len(), |next| *next as usize - 1);
        self.chars[start..end].iter().collect()
    }
}

/// One mistake in an expression.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Mistake {
    /// `None` where no place is to blame.
    pub offset: Option<u32>,
    pub message: String,
}

/// Why an expression does not compile, as the language's reference implementation words it.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub struct CompileErrors(String);

impl CompileErrors {
    pub(crate) fn new(source: &Source, mut mistakes: Vec<Mistake>) -> Self {
        let places = |mistake: &Mistake| mistake.offset.map_or((0, 0), |offset| source.place(offset));
        let more = mistakes.len().saturating_sub(MAX_SHOWN);
        mistakes.truncate(MAX_SHOWN);
        mistakes.sort_by_key(places);
        let mut shown: Vec<String> = mistakes.iter().map(|mistake| show(source, mistake)).collect();
        if more > 0 {
            shown.push(format!("{more} more errors were truncated"));
        }
        Self(shown.join("\n"))
    }

    pub(crate) fn plain(message: impl Into<String>) -> Self {
        Self(message.into())
    }
}

impl fmt::Display for CompileErrors {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

fn show(source: &Source, mistake: &Mistake) -> String {
    let Some(offset) = mistake.offset else {
        return format!("ERROR: <input>:-1:0: {}", mistake.message);
    };
    if source.chars.is_empty() {
        // COMPAT: an empty expression has no column.
        return format!("ERROR: <input>:1:0: {}", mistake.message);
    }
    let (line, column) = source.place(offset);
    let mut text = format!("ERROR: <input>:{line}:{}: {}", column + 1, mistake.message);
    let snippet = source.line(line).replace('\t', " ");
    if snippet.len() > MAX_SNIPPET {
        return text;
    }
    text.push_str("\n | ");
    text.push_str(&snippet);
    text.push_str("\n | ");
    let mut chars = snippet.chars();
    for c in chars.by_ref().take(column) {
        text.push(if c.len_utf8() > 1 { '\u{ff0e}' } else { '.' });
    }
    let wide = chars.next().is_some_and(|c| c.len_utf8() > 1);
    text.push(if wide { '\u{ff3e}' } else { '^' });
    text
}
