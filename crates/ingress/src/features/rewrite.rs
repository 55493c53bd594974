//! Paths that are expressions, and paths that are rewritten before a backend sees them. Pure.
//!
//! Expressions are Rust's `regex`: what a client sends costs time that grows with its length only. They are compared
//! without regard to case, as ingress-nginx does, and byte by byte.

use http::uri::PathAndQuery;
use regex::bytes::{Captures, Regex, RegexBuilder};

use super::values::is_plain;
use crate::table::{normalized, stays_escaped, unescaped};

/// Of an expression.
const MAX_PATTERN: usize = 1024;
/// That a compiled expression may take, and the least that one counts as.
const MAX_COMPILED: usize = 32 << 10;
const MIN_COST: usize = 1 << 10;
/// Of what is filled in for a rewritten path.
const MAX_REWRITTEN: usize = 32 << 10;

/// A path as an expression, from the beginning of a request's path on.
#[derive(Debug)]
pub struct PathRegex {
    pub text: String,
    /// What it takes compiled, in bytes and rounded up: the time of a comparison grows with it.
    pub cost: usize,
    regex: Regex,
}

impl PathRegex {
    pub fn new(text: &str) -> Result<PathRegex, String> {
        if text.len() > MAX_PATTERN {
            return Err(format!("it is longer than {MAX_PATTERN} bytes"));
        }
        let pattern = format!("^(?:{})", resolved_outside_sets(text));
        let build = |limit| {
            RegexBuilder::new(&pattern)
                .case_insensitive(true)
                .unicode(false)
                .size_limit(limit)
                .dfa_size_limit(MAX_COMPILED)
                .build()
        };
        // The size itself is not told, only whether it is within a limit.
        let mut cost = MIN_COST;
        let mut built = build(cost);
        while cost < MAX_COMPILED && matches!(built, Err(regex::Error::CompiledTooBig(_))) {
            cost *= 2;
            built = build(cost);
        }
        let regex = built.map_err(|error| match error {
            regex::Error::CompiledTooBig(limit) => format!("compiled it takes more than {limit} bytes"),
            error => error.to_string(),
        })?;
        Ok(PathRegex {
            text: text.to_owned(),
            cost,
            regex,
        })
    }

    pub fn is_match(&self, path: &str) -> bool {
        self.regex.is_match(path.as_bytes())
    }
}

/// The expression with its escapes resolved, as those of paths are where routes are compared. In a set of characters an
/// escape is none.
fn resolved_outside_sets(text: &str) -> String {
    let mut bytes = Vec::with_capacity(text.len());
    let (mut rest, mut in_set) = (text.as_bytes(), false);
    while let Some(first) = rest.first() {
        let escaped = unescaped(rest).filter(|byte| !in_set && !stays_escaped(*byte));
        let length = match (escaped, first) {
            (Some(byte), _) => {
                match byte.is_ascii() {
                    true => bytes.extend_from_slice(regex::escape(&char::from(byte).to_string()).as_bytes()),
                    false => bytes.push(byte),
                }
                rest = &rest[3..];
                continue;
            }
            // Whatever follows has no meaning of its own.
            (None, b'\\') => rest.len().min(2),
            (None, _) => 1,
        };
        match first {
            b'[' => in_set = true,
            b']' => in_set = false,
            _ => {}
        }
        bytes.extend_from_slice(&rest[..length]);
        rest = &rest[length..];
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

/// How all begins that an expression matches, for each of its alternatives, as far as it is plain text. The expression
/// need not be one that can be used.
pub fn beginnings(text: &str) -> Vec<String> {
    let text = resolved_outside_sets(text);
    let (mut all, mut beginning, mut is_plain, mut depth) = (Vec::new(), String::new(), true, 0_usize);
    let mut chars = text.chars().peekable();
    while let Some(char) = chars.next() {
        let plain = match char {
            '|' if depth == 0 => {
                all.push(std::mem::take(&mut beginning));
                is_plain = true;
                continue;
            }
            // Else it is a class of characters or a place.
            '\\' => chars
                .next()
                .filter(|next| next.is_ascii_punctuation() && !"<>".contains(*next)),
            '[' => {
                chars.next_if_eq(&'^');
                // The first one in a set is a character of it.
                chars.next_if_eq(&']');
                while let Some(inner) = chars.next().filter(|inner| *inner != ']') {
                    if inner == '\\' {
                        chars.next();
                    }
                }
                None
            }
            '(' => {
                depth += 1;
                None
            }
            ')' => {
                depth = depth.saturating_sub(1);
                None
            }
            // What is before it may be missing.
            '?' | '*' | '{' => {
                if is_plain {
                    beginning.pop();
                }
                None
            }
            '.' | '+' | '|' | '^' | '$' | ']' | '}' => None,
            plain => Some(plain),
        };
        match plain {
            Some(plain) if is_plain => beginning.push(plain),
            _ => is_plain = false,
        }
    }
    all.push(beginning);
    all
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Piece {
    Text(String),
    Group(usize),
}

/// The path, and maybe a query, that takes the place of the whole path of a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rewrite {
    path: Vec<Piece>,
    query: Option<Vec<Piece>>,
    /// A `?` at the end: the query of the request is dropped.
    drops_query: bool,
}

impl Rewrite {
    /// Of the annotation's value.
    pub fn parse(text: &str) -> Result<Rewrite, String> {
        if text.is_empty() || text.len() > MAX_PATTERN || !is_plain(text) || text.contains('#') {
            return Err("its value must be a path of printable ASCII".to_owned());
        }
        if !text.starts_with(['/', '$']) {
            return Err(
                "its value must be a path that begins with /; permanent-redirect leads to other hosts"
                    .to_owned(),
            );
        }
        let (text, drops_query) = match text.strip_suffix('?') {
            Some(text) => (text, true),
            None => (text, false),
        };
        let (path, query) = match text.split_once('?') {
            Some((path, query)) => (path, Some(query)),
            None => (text, None),
        };
        Ok(Rewrite {
            path: pieces(path)?,
            query: query.map(pieces).transpose()?,
            drops_query,
        })
    }

    /// What is sent on instead of `path` and its `query`. `None`: it would not be a path, or one that a backend might
    /// read as another.
    pub fn apply(&self, regex: &PathRegex, path: &str, query: Option<&str>) -> Option<PathAndQuery> {
        let captures = regex.regex.captures(path.as_bytes())?;
        let rewritten = fill(&self.path, &captures, false)?;
        // What was a part of a segment may be a whole one now.
        let mut address = normalized(&rewritten).filter(|path| !may_climb(path))?;
        let new = match &self.query {
            Some(pieces) => Some(fill(pieces, &captures, true)?),
            None => None,
        };
        let old = query.filter(|_| !self.drops_query);
        let parts: Vec<&str> = new.as_deref().into_iter().chain(old).collect();
        if !parts.is_empty() {
            address.push('?');
            address.push_str(&parts.join("&"));
        }
        PathAndQuery::try_from(address).ok()
    }
}

/// Whether a backend that resolves escaped slashes sees a dot segment.
fn may_climb(path: &str) -> bool {
    let plain = path.replace("%2F", "/").replace("%5C", "/").replace('\\', "/");
    plain.split('/').any(|segment| segment == "." || segment == "..")
}

fn pieces(text: &str) -> Result<Vec<Piece>, String> {
    let mut pieces = Vec::new();
    let mut rest = text;
    while let Some(at) = rest.find('$') {
        if at > 0 {
            pieces.push(Piece::Text(rest[..at].to_owned()));
        }
        let after = &rest[at + 1..];
        let (digit, tail) = match after.strip_prefix('{') {
            Some(inner) => inner.split_once('}').unwrap_or((inner, "")),
            None => after.split_at(after.len().min(1)),
        };
        let number = digit.parse::<usize>().ok().filter(|number| *number <= 9);
        pieces.push(Piece::Group(number.ok_or(
            "its value may name the groups $1 to $9 of the path, and no other variables",
        )?));
        rest = tail;
    }
    if !rest.is_empty() {
        pieces.push(Piece::Text(rest.to_owned()));
    }
    Ok(pieces)
}

fn fill(pieces: &[Piece], captures: &Captures<'_>, in_query: bool) -> Option<String> {
    let mut text: Vec<u8> = Vec::new();
    for piece in pieces {
        match piece {
            Piece::Text(piece) => text.extend_from_slice(piece.as_bytes()),
            Piece::Group(number) => {
                let group = captures.get(*number).map_or(&b""[..], |group| group.as_bytes());
                for byte in group {
                    match byte {
                        // They would begin another parameter.
                        b'&' if in_query => text.extend_from_slice(b"%26"),
                        b'+' if in_query => text.extend_from_slice(b"%2B"),
                        // Where the path was matched without its escapes.
                        0x80.. => text.extend_from_slice(format!("%{byte:02X}").as_bytes()),
                        byte => text.push(*byte),
                    }
                }
            }
        }
        if text.len() > MAX_REWRITTEN {
            return None;
        }
    }
    String::from_utf8(text).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_are_rewritten_with_groups() {
        for (pattern, target, path, expected) in [
            (
                "/something(/|$)(.*)",
                "/$2",
                "/something/new?q=1",
                Some("/new?q=1"),
            ),
            ("/something(/|$)(.*)", "/$2", "/something", Some("/")),
            ("/something(/|$)(.*)", "/$2", "/SOMETHING/New", Some("/New")),
            ("/foo", "/bar", "/foo/x/y", Some("/bar")),
            (
                "/api/(v[0-9]+)/(.*)",
                "/$2?version=$1",
                "/api/v2/x?q=1",
                Some("/x?version=v2&q=1"),
            ),
            ("/api/(.*)", "/$1?", "/api/x?q=1", Some("/x")),
            ("/a/(.*)", "/?p=${1}", "/a/b&c=d+e", Some("/?p=b%26c=d%2Be")),
            // What is escaped stays escaped: no new segments.
            ("/a/(.*)", "/b/$1", "/a/x%2Fy", Some("/b/x%2Fy")),
            ("/a/(.*)", "/b/$1", "/a/%2E%2E%2Fy", None),
            ("/a(.*)", "/b/.$1", "/a./c", None),
            ("/a(.*)", "/b/.$1", "/a/c", None),
            ("/a(.*)", "$1", "/a/c", Some("/c")),
            ("/a(.*)", "$1", "/ac", None),
            ("/a(x)?", "/b$1", "/a", Some("/b")),
            ("/a/(.*)", "/b/$1", "/a/é", Some("/b/%C3%A9")),
            ("/a/(.*)", "/?p=$1", "/a/é", Some("/?p=%C3%A9")),
        ] {
            let (path, query) = match path.split_once('?') {
                Some((path, query)) => (path, Some(query)),
                None => (path, None),
            };
            let regex = PathRegex::new(pattern).expect("an expression");
            let rewrite = Rewrite::parse(target).expect("a target");
            let path = normalized(path);
            let found = path.and_then(|path| rewrite.apply(&regex, &path, query));
            let found = found.as_ref().map(PathAndQuery::as_str);
            assert_eq!(found, expected, "{pattern} {target}");
        }
    }

    #[test]
    fn targets_that_are_no_paths_are_refused() {
        for text in [
            "",
            "x",
            "https://evil/$1",
            "/$host",
            "/$",
            "/a b",
            "/a\r\nX: y",
            "/\"",
            "/a#b",
            "/${10}",
        ] {
            assert!(Rewrite::parse(text).is_err(), "{text}");
        }
    }

    #[test]
    fn expressions_are_compared_without_escapes() {
        for (pattern, path, expected) in [
            ("/caf%C3%A9/(.*)", "/café/x", true),
            ("/café", "/CAFé", true),
            ("/a%3ab", "/a:b", true),
            ("/a%2Bb", "/a+b", true),
            ("/a%2Bb", "/aab", false),
            ("/a%20b", "/a%20b", true),
            ("/a%252Fb", "/a%252Fb", true),
            ("/[%41]x", "/4x", true),
            ("/[%41]x", "/Ax", false),
            ("/[a]%41", "/aA", true),
            // It would be the beginning of the text.
            (r"/a\%41", "/a%41", true),
        ] {
            let regex = PathRegex::new(pattern).expect("an expression");
            assert_eq!(regex.is_match(path), expected, "{pattern} {path}");
        }
    }

    #[test]
    fn expressions_begin_with_plain_text() {
        for (pattern, expected) in [
            ("/admin/(?!login).*", &["/admin/"][..]),
            ("/admin/?(?!login)", &["/admin"]),
            ("/admin/*(?!login)", &["/admin"]),
            ("/admin/{0,3}(?!login)", &["/admin"]),
            ("/admin/+(?!login)", &["/admin/"]),
            (r"/v1\.0\.?/(?!x)", &["/v1.0"]),
            (r"/v\d/(?!x)", &["/v"]),
            (r"/v\<x(?!x)", &["/v"]),
            ("/a(b", &["/a"]),
            ("/a)b", &["/a"]),
            ("/a[b", &["/a"]),
            ("/(?!x)", &["/"]),
            ("(?!x)/a", &[""]),
            ("/a/(b|c)(?!x)|/d(?=e)", &["/a/", "/d"]),
            ("/[(|]a|/b(?!c)", &["/", "/b"]),
            (r"/[^](\]|]a|/b(?!c)", &["/", "/b"]),
            (r"/a\|b(?!c)", &["/a|b"]),
            ("/caf%C3%A9?(?!x)", &["/caf"]),
            ("/a%3Ab%20(?!x)", &["/a:b%20"]),
        ] {
            assert_eq!(beginnings(pattern), expected, "{pattern}");
        }
    }

    #[test]
    fn expressions_have_limits() {
        assert!(PathRegex::new(&"/a".repeat(600)).is_err());
        assert!(PathRegex::new("/(a{1000}){1000}").is_err());
        assert!(PathRegex::new("/(?=a)").is_err());
        assert!(PathRegex::new("/(").is_err());
        let regex = PathRegex::new("/a|/b").expect("an expression");
        assert!(regex.is_match("/B/x") && !regex.is_match("/x/b"));
    }
}
