//! gzip for large answers, where the client accepts it.

use std::io::Write;

use bytes::Bytes;
use flate2::Compression;
use flate2::write::GzEncoder;
use http::{HeaderValue, StatusCode, header};

use crate::body::{self, Answer};
use crate::chain::Exchange;

/// Smaller answers cost more to compress than to send: upstream's threshold.
pub const THRESHOLD: usize = 128 * 1024;

pub fn accepted(exchange: &Exchange) -> bool {
    exchange
        .header(header::ACCEPT_ENCODING)
        .split(',')
        .any(|coding| matches!(coding.split(';').next().unwrap_or("").trim(), "gzip" | "*"))
}

pub fn encoder() -> GzEncoder<Vec<u8>> {
    GzEncoder::new(Vec::new(), Compression::fast())
}

pub fn answer(exchange: &Exchange, code: StatusCode, content_type: &'static str, bytes: Bytes) -> Answer {
    if bytes.len() < THRESHOLD || !accepted(exchange) {
        return body::answer(code, content_type, bytes);
    }
    let mut gzip = encoder();
    let compressed = gzip.write_all(&bytes).and_then(|()| gzip.finish());
    match compressed {
        Ok(compressed) => mark(body::answer(code, content_type, compressed)),
        Err(_) => body::answer(code, content_type, bytes),
    }
}

pub fn mark(mut answer: Answer) -> Answer {
    let headers = answer.headers_mut();
    headers.insert(header::CONTENT_ENCODING, HeaderValue::from_static("gzip"));
    headers.append(header::VARY, HeaderValue::from_static("Accept-Encoding"));
    answer
}
