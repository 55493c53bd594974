//! Documents that clients keep: their tag, their time, and the parts and conditions that a request may name. What a
//! document says is not known here.

use std::collections::HashMap;
use std::ops::Range;

use bytes::Bytes;
use http::{HeaderValue, Method, StatusCode, header};
use jiff::Timestamp;
use parking_lot::Mutex;

use crate::body::{self, Answer};
use crate::chain::Exchange;
use crate::compress;

/// Since when a document says what it says: the first time that it was asked for with its tag.
#[derive(Default)]
pub struct Times(Mutex<HashMap<String, (String, Timestamp)>>);

/// So many documents are remembered; then all are forgotten, and are as new as the question.
const MAX_TIMES: usize = 4096;

impl Times {
    pub fn of(&self, document: &str, etag: &str) -> Timestamp {
        let mut times = self.0.lock();
        // Definitions come and go, and each brings documents with names of its own.
        if times.len() >= MAX_TIMES {
            times.clear();
        }
        match times.get(document) {
            Some((tag, time)) if tag == etag => *time,
            _ => {
                let now = Timestamp::now();
                times.insert(document.to_owned(), (etag.to_owned(), now));
                now
            }
        }
    }
}

/// A document as a request asks for it: whole, in part, or not at all if the client has it. An empty tag is none.
pub fn serve(
    exchange: &Exchange,
    content_type: &'static str,
    bytes: Bytes,
    etag: &str,
    modified: Timestamp,
) -> Answer {
    let asked = |name| exchange.header(name);
    let reads = matches!(exchange.parts.method, Method::GET | Method::HEAD);
    let tag = HeaderValue::from_str(etag).ok().filter(|_| !etag.is_empty());
    let known = match asked(header::IF_NONE_MATCH) {
        "" => reads && unchanged_since(asked(header::IF_MODIFIED_SINCE), modified),
        tags => matches(tags, etag),
    };
    if known && !reads {
        return body::empty(StatusCode::PRECONDITION_FAILED);
    }
    let last = HeaderValue::from_str(&modified.strftime("%a, %d %b %Y %H:%M:%S GMT").to_string()).ok();
    if known {
        let mut answer = body::empty(StatusCode::NOT_MODIFIED);
        // Who has a tag needs no time.
        match (tag, last) {
            (Some(tag), _) => answer.headers_mut().insert(header::ETAG, tag),
            (None, Some(last)) => answer.headers_mut().insert(header::LAST_MODIFIED, last),
            (None, None) => None,
        };
        return answer;
    }
    let size = bytes.len();
    let mut answer = match part(asked(header::RANGE), size) {
        RequestedRange::All => compress::answer(exchange, StatusCode::OK, content_type, bytes),
        RequestedRange::Some(range) => {
            let told = format!("bytes {}-{}/{size}", range.start, range.end - 1);
            let mut answer = body::answer(StatusCode::PARTIAL_CONTENT, content_type, bytes.slice(range));
            if let Ok(told) = HeaderValue::from_str(&told) {
                answer.headers_mut().insert(header::CONTENT_RANGE, told);
            }
            answer
        }
        RequestedRange::Bad(why) => {
            let mut answer = body::text(StatusCode::RANGE_NOT_SATISFIABLE, format!("{why}\n"));
            if let (Ok(told), true) = (
                HeaderValue::from_str(&format!("bytes */{size}")),
                why == NO_OVERLAP,
            ) {
                answer.headers_mut().insert(header::CONTENT_RANGE, told);
            }
            return answer;
        }
    };
    let headers = answer.headers_mut();
    if let Some(tag) = tag {
        headers.insert(header::ETAG, tag);
    }
    if let Some(last) = last {
        headers.insert(header::LAST_MODIFIED, last);
    }
    headers.insert(header::ACCEPT_RANGES, HeaderValue::from_static("bytes"));
    answer
}

/// Whether a list of tags names this one.
fn matches(tags: &str, etag: &str) -> bool {
    let strong = |tag: &str| tag.trim().trim_start_matches("W/").to_owned();
    tags.trim() == "*" || (!etag.is_empty() && tags.split(',').any(|tag| strong(tag) == strong(etag)))
}

fn unchanged_since(asked: &str, modified: Timestamp) -> bool {
    jiff::fmt::rfc2822::DateTimeParser::new()
        .parse_timestamp(asked)
        .is_ok_and(|asked| modified.as_second() <= asked.as_second())
}

#[derive(Debug, PartialEq, Eq)]
enum RequestedRange {
    All,
    Some(Range<usize>),
    Bad(&'static str),
}

const NO_OVERLAP: &str = "invalid range: failed to overlap";

/// The part that a `Range` header names. Several parts at once are answered with the whole.
fn part(asked: &str, size: usize) -> RequestedRange {
    let bad = RequestedRange::Bad("invalid range");
    if asked.is_empty() {
        return RequestedRange::All;
    }
    let Some(ranges) = asked.strip_prefix("bytes=") else {
        return bad;
    };
    if ranges.contains(',') {
        return RequestedRange::All;
    }
    let Some((first, last)) = ranges.trim().split_once('-') else {
        return bad;
    };
    let number = |text: &str| text.trim().parse::<usize>();
    match (number(first), number(last)) {
        (Err(_), Ok(count)) if first.trim().is_empty() => RequestedRange::Some(size - count.min(size)..size),
        (Ok(first), _) if first >= size => RequestedRange::Bad(NO_OVERLAP),
        (Ok(first), Err(_)) if last.trim().is_empty() => RequestedRange::Some(first..size),
        (Ok(first), Ok(last)) if first <= last => {
            RequestedRange::Some(first..size.min(last.saturating_add(1)))
        }
        _ => bad,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts() {
        let check = |asked: &str, expected: RequestedRange| assert_eq!(part(asked, 100), expected, "{asked}");
        check("", RequestedRange::All);
        check("bytes=0-10", RequestedRange::Some(0..11));
        check("bytes=90-", RequestedRange::Some(90..100));
        check("bytes=-5", RequestedRange::Some(95..100));
        check("bytes=-500", RequestedRange::Some(0..100));
        check("bytes=90-18446744073709551615", RequestedRange::Some(90..100));
        check("bytes=100-", RequestedRange::Bad(NO_OVERLAP));
        check("bytes=0-1,5-6", RequestedRange::All);
        for asked in ["bytes=5-4", "bytes=x-4", "bytes=5", "lines=1-2", "bytes=-"] {
            check(asked, RequestedRange::Bad("invalid range"));
        }
    }

    #[test]
    fn conditions() {
        let check = |tags: &str, expected: bool| assert_eq!(matches(tags, "\"a\""), expected, "{tags}");
        check("\"a\"", true);
        check("\"b\", W/\"a\"", true);
        check("*", true);
        check("a", false);
        let time = Timestamp::from_second(1_700_000_000).unwrap();
        assert!(unchanged_since("Tue, 14 Nov 2023 22:13:20 GMT", time));
        assert!(!unchanged_since("Tue, 14 Nov 2023 22:13:19 GMT", time));
        assert!(!unchanged_since("yesterday", time));
    }
}
