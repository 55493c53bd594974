//! PEM blocks as Go's `encoding/pem` finds them: text between blocks is skipped, and so is a block that is cut off, ends with
//! another type than it began with, or is no base64.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;

/// One block.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Block {
    /// `CERTIFICATE`, …
    pub kind: String,
    pub has_headers: bool,
    pub bytes: Vec<u8>,
}

/// A block whose end was not seen yet.
struct Open<'a> {
    kind: &'a str,
    has_headers: bool,
    base64: String,
}

/// All blocks of a text, in their order.
pub fn blocks(text: &str) -> Vec<Block> {
    const DASHES: &str = "-----";
    let mut found = Vec::new();
    let mut open: Option<Open<'_>> = None;
    for line in text.lines() {
        let line = line.trim_end_matches([' ', '\t', '\r']);
        if let Some(kind) = line.strip_prefix("-----BEGIN ") {
            open = kind.strip_suffix(DASHES).map(|kind| Open {
                kind,
                has_headers: false,
                base64: String::new(),
            });
        } else if let Some(kind) = line.strip_prefix("-----END ") {
            let ended = open
                .take()
                .filter(|open| kind.strip_suffix(DASHES) == Some(open.kind));
            if let Some(open) = ended
                && let Ok(bytes) = STANDARD.decode(&open.base64)
            {
                found.push(Block {
                    kind: open.kind.to_owned(),
                    has_headers: open.has_headers,
                    bytes,
                });
            }
        } else if let Some(open) = &mut open {
            if open.base64.is_empty() && line.contains(':') {
                open.has_headers = true;
            } else {
                open.base64
                    .extend(line.chars().filter(|c| !matches!(c, ' ' | '\t')));
            }
        }
    }
    found
}

/// A block of one certificate.
pub fn certificate(bytes: &[u8]) -> String {
    encode("CERTIFICATE", bytes)
}

/// A block of this type, in lines of 64 characters.
pub fn encode(kind: &str, bytes: &[u8]) -> String {
    let base64 = STANDARD.encode(bytes);
    let mut out = format!("-----BEGIN {kind}-----\n");
    let mut rest = base64.as_str();
    while !rest.is_empty() {
        let (line, more) = rest.split_at(rest.len().min(64));
        out.extend([line, "\n"]);
        rest = more;
    }
    out.extend(["-----END ", kind, "-----\n"]);
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_whole_blocks_count() {
        let check = |text: &str, expected: &[(&str, bool, &[u8])]| {
            let found = blocks(text);
            let found: Vec<(&str, bool, &[u8])> = found
                .iter()
                .map(|b| (b.kind.as_str(), b.has_headers, b.bytes.as_slice()))
                .collect();
            assert_eq!(found, expected, "{text}");
        };
        check("", &[]);
        check("-----BEGIN A-----\nYQ==\n-----END A-----", &[("A", false, b"a")]);
        check(
            "words\n-----BEGIN A-----\r\nY Q\n==\r\n-----END A-----  \nwords\n-----BEGIN B C-----\nk: v\n\nYg==\n-----END B C-----\n",
            &[("A", false, b"a"), ("B C", true, b"b")],
        );
        check("-----BEGIN A-----\n-----END A-----\n", &[("A", false, b"")]);
        for skipped in [
            "-----BEGIN A-----\nYQ==\n",
            "-----BEGIN A-----\nYQ==\n-----END B-----\n",
            "-----BEGIN A-----\n!\n-----END A-----\n",
            "-----BEGIN A\nYQ==\n-----END A-----\n",
            " -----BEGIN A-----\nYQ==\n-----END A-----\n",
        ] {
            check(skipped, &[]);
            check(
                &format!("{skipped}-----BEGIN C-----\nYw==\n-----END C-----"),
                &[("C", false, b"c")],
            );
        }
    }

    #[test]
    fn a_block_that_is_written_is_read() {
        let bytes: Vec<u8> = (0..100).collect();
        let text = certificate(&bytes);
        assert!(text.lines().all(|line| line.len() <= 64), "{text}");
        let read = blocks(&text);
        assert_eq!((read[0].kind.as_str(), &read[0].bytes), ("CERTIFICATE", &bytes));
        assert_eq!(read.len(), 1);
    }
}
