//! What Go's HTTP server refuses before any handler sees it, and hyper lets through: an address or a host that cannot
//! be read, an expectation that nobody can meet. In Go's plain words; it knows nothing of the API.

use http::uri::Uri;
use http::{HeaderMap, HeaderValue, Method, StatusCode, Version, header};

use crate::body::{self, Answer};

/// The answer to a request that goes no further.
pub fn refused(method: &Method, uri: &Uri, version: Version, headers: &HeaderMap) -> Option<Answer> {
    if version > Version::HTTP_11 {
        return None;
    }
    if method == Method::OPTIONS && uri.path() == "*" {
        return Some(ended(body::empty(StatusCode::OK)));
    }
    if let Some(why) = bad_request(method, uri, version, headers) {
        let colon = if why.is_empty() { "" } else { ": " };
        let text = format!("400 Bad Request{colon}{why}");
        let reason = hyper::ext::ReasonPhrase::try_from(&text.as_bytes()[4..]);
        let kind = "text/plain; charset=utf-8";
        let mut answer = ended(body::answer(StatusCode::BAD_REQUEST, kind, text));
        // COMPAT: the first line tells it, too.
        if let Ok(reason) = reason {
            answer.extensions_mut().insert(reason);
        }
        return Some(answer);
    }
    let expected = headers.get(header::EXPECT).map(HeaderValue::as_bytes);
    if expected.is_some_and(|text| !text.is_empty() && !text.eq_ignore_ascii_case(b"100-continue")) {
        return Some(ended(body::empty(StatusCode::EXPECTATION_FAILED)));
    }
    None
}

fn ended(mut answer: Answer) -> Answer {
    let close = HeaderValue::from_static("close");
    answer.headers_mut().insert(header::CONNECTION, close);
    answer
}

/// Why a request is rejected; for some reasons the response says nothing more.
fn bad_request(method: &Method, uri: &Uri, version: Version, headers: &HeaderMap) -> Option<&'static str> {
    // `GET version` names a host, not a path.
    let host_only = uri.scheme().is_none() && uri.authority().is_some();
    if (host_only && method != Method::CONNECT) || !escapes_well(uri.path()) {
        return Some("");
    }
    let mut hosts = headers.get_all(header::HOST).iter();
    match (hosts.next(), hosts.next()) {
        (None, _) if version == Version::HTTP_11 => Some("missing required Host header"),
        (_, Some(_)) => Some(""),
        (Some(host), None) if !host.as_bytes().iter().all(|byte| of_host(*byte)) => {
            Some("malformed Host header")
        }
        _ => None,
    }
}

/// Whether two hexadecimal digits follow every percent sign.
fn escapes_well(path: &str) -> bool {
    path.split('%').skip(1).all(|rest| {
        let digits = rest.as_bytes().get(..2);
        digits.is_some_and(|digits| digits.iter().all(u8::is_ascii_hexdigit))
    })
}

fn of_host(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || b"!$%&'()*+,-.:;=[]_~".contains(&byte)
}

#[cfg(test)]
mod tests {
    use super::*;
    use http_body_util::BodyExt;

    async fn check(line: &str, headers: &[(&str, &str)], expected: &str) {
        let (method, uri) = line.split_once(' ').expect("a method and an address");
        let mut builder = http::Request::builder().method(method).uri(uri);
        for (name, value) in headers {
            builder = builder.header(*name, *value);
        }
        let (parts, ()) = builder.body(()).expect("a request").into_parts();
        let got = match refused(&parts.method, &parts.uri, parts.version, &parts.headers) {
            None => String::new(),
            Some(answer) => {
                assert_eq!(answer.headers()[header::CONNECTION], "close");
                let code = answer.status().as_u16();
                let bytes = answer.into_body().collect().await.expect("a body").to_bytes();
                format!("{code} {}", String::from_utf8_lossy(&bytes))
            }
        };
        assert_eq!(got, expected, "{line} {headers:?}");
    }

    #[tokio::test]
    async fn requests_are_refused_as_by_go() {
        let host = ("host", "x:6443");
        check("GET /api", &[host], "").await;
        check("GET https://y/api", &[host], "").await;
        check("GET /a%2Fb", &[host], "").await;
        check(
            "GET /a",
            &[("host", "[::1]:6443"), ("expect", "100-continue")],
            "",
        )
        .await;
        check("GET /a?b=%zz", &[host], "").await;
        check("GET /a", &[], "400 400 Bad Request: missing required Host header").await;
        check(
            "GET /a",
            &[("host", "a b")],
            "400 400 Bad Request: malformed Host header",
        )
        .await;
        check("GET /a", &[host, host], "400 400 Bad Request").await;
        check("GET /%zz", &[host], "400 400 Bad Request").await;
        check("GET /%4", &[host], "400 400 Bad Request").await;
        check("GET version", &[host], "400 400 Bad Request").await;
        check("OPTIONS *", &[host], "200 ").await;
        check("GET /a", &[host, ("expect", "more")], "417 ").await;
    }
}
