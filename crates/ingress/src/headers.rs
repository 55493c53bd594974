//! What is changed of the headers on their way: those of one hop stay behind, and those that tell of the client are ours
//! alone.

use std::net::IpAddr;

use http::header::{self, HeaderName};
use http::{HeaderMap, HeaderValue};

const PROXY_CONNECTION: HeaderName = HeaderName::from_static("proxy-connection");
const KEEP_ALIVE: HeaderName = HeaderName::from_static("keep-alive");
const HTTP2_SETTINGS: HeaderName = HeaderName::from_static("http2-settings");

const X_FORWARDED_FOR: HeaderName = HeaderName::from_static("x-forwarded-for");
const X_FORWARDED_HOST: HeaderName = HeaderName::from_static("x-forwarded-host");
const X_FORWARDED_PORT: HeaderName = HeaderName::from_static("x-forwarded-port");
const X_FORWARDED_PROTO: HeaderName = HeaderName::from_static("x-forwarded-proto");
const X_FORWARDED_SCHEME: HeaderName = HeaderName::from_static("x-forwarded-scheme");
const X_REAL_IP: HeaderName = HeaderName::from_static("x-real-ip");

/// What a backend believes of its client, so no client may say it.
const OURS: [&str; 11] = [
    "x-forwarded-for",
    "x-forwarded-host",
    "x-forwarded-port",
    "x-forwarded-proto",
    "x-forwarded-scheme",
    "x-forwarded-server",
    "x-forwarded-ssl",
    "x-real-ip",
    "x-scheme",
    "forwarded",
    // CGI programs would take it for their own proxy.
    "proxy",
];

/// Removes the headers of one hop, also those that the message names itself.
pub fn remove_hop_by_hop(headers: &mut HeaderMap) {
    let named: Vec<HeaderName> = headers
        .get_all(header::CONNECTION)
        .iter()
        .filter_map(|value| value.to_str().ok())
        .flat_map(|value| value.split(','))
        .filter_map(|name| name.trim().parse().ok())
        // What a backend needs to read a request is not taken from it.
        .filter(|name| *name != header::HOST && *name != header::CONTENT_LENGTH)
        .collect();
    let always = [
        header::CONNECTION,
        PROXY_CONNECTION,
        KEEP_ALIVE,
        HTTP2_SETTINGS,
        header::TE,
        header::TRANSFER_ENCODING,
        header::UPGRADE,
        header::PROXY_AUTHENTICATE,
        header::PROXY_AUTHORIZATION,
    ];
    for name in &named {
        headers.remove(name);
    }
    // Most messages have one or none: looking each of them up is more work.
    let present: Vec<HeaderName> = headers
        .keys()
        .filter(|name| always.contains(name))
        .cloned()
        .collect();
    for name in &present {
        headers.remove(name);
    }
}

/// Puts a `Cookie` together that a client of HTTP/2 has sent in parts (RFC 9113, 8.2.3): servers of HTTP/1.1 expect one.
pub fn join_cookies(headers: &mut HeaderMap) {
    let all = headers.get_all(header::COOKIE).iter();
    let parts: Vec<&[u8]> = all.map(HeaderValue::as_bytes).collect();
    if parts.len() < 2 {
        return;
    }
    if let Ok(whole) = HeaderValue::from_bytes(&parts.join(&b"; "[..])) {
        headers.insert(header::COOKIE, whole);
    }
}

/// Whether a header lists a token.
pub fn has_token(headers: &HeaderMap, name: &HeaderName, token: &str) -> bool {
    let mut values = headers
        .get_all(name)
        .iter()
        .filter_map(|value| value.to_str().ok());
    values.any(|value| {
        value
            .split(',')
            .any(|word| word.trim().eq_ignore_ascii_case(token))
    })
}

/// Of one client's connection.
#[derive(Clone, Copy, Debug)]
pub struct Client {
    pub address: IpAddr,
    pub tls: bool,
    pub port: u16,
}

/// Whether a name is ours when its underscores are read as dashes.
fn is_same(name: &str, ours: &str) -> bool {
    let dashed = |byte| if byte == b'_' { b'-' } else { byte };
    name.len() == ours.len() && name.bytes().map(dashed).eq(ours.bytes())
}

/// Removes a header, also under names with underscores, which many servers take for dashes.
pub fn remove_all(headers: &mut HeaderMap, name: &HeaderName) {
    headers.remove(name);
    let forged: Vec<HeaderName> = headers
        .keys()
        .filter(|key| is_same(key.as_str(), name.as_str()))
        .cloned()
        .collect();
    for name in forged {
        headers.remove(name);
    }
}

/// Says who the client is. What it said itself is removed, also with underscores, which many servers take for dashes.
pub fn set_forwarded(headers: &mut HeaderMap, client: Client, host: &HeaderValue) {
    let forged: Vec<HeaderName> = headers
        .keys()
        .filter(|name| OURS.iter().any(|ours| is_same(name.as_str(), ours)))
        .cloned()
        .collect();
    for name in forged {
        headers.remove(name);
    }
    let proto = HeaderValue::from_static(if client.tls { "https" } else { "http" });
    let address = HeaderValue::try_from(client.address.to_canonical().to_string());
    if let Ok(address) = address {
        headers.insert(X_FORWARDED_FOR, address.clone());
        headers.insert(X_REAL_IP, address);
    }
    headers.insert(X_FORWARDED_HOST, host.clone());
    headers.insert(X_FORWARDED_PORT, client.port.into());
    headers.insert(X_FORWARDED_SCHEME, proto.clone());
    headers.insert(X_FORWARDED_PROTO, proto);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(lines: &[(&str, &str)]) -> HeaderMap {
        let mut headers = HeaderMap::new();
        for (name, value) in lines {
            let name: HeaderName = name.parse().expect("a name");
            headers.append(name, HeaderValue::from_str(value).expect("a value"));
        }
        headers
    }

    #[test]
    fn cookies_are_one_line() {
        for (sent, expected) in [
            (&[][..], &[][..]),
            (&["a=1; b=2"], &["a=1; b=2"]),
            (&["a=1", "b=2", "c=3"], &["a=1; b=2; c=3"]),
        ] {
            let sent: Vec<(&str, &str)> = sent.iter().map(|cookie| ("cookie", *cookie)).collect();
            let mut headers = headers(&sent);
            join_cookies(&mut headers);
            let joined: Vec<_> = headers.get_all(header::COOKIE).iter().collect();
            assert_eq!(joined, expected);
        }
    }

    #[test]
    fn headers_of_one_hop_stay_behind() {
        let mut map = headers(&[
            ("connection", "close, X-Private"),
            ("connection", "host, content-length"),
            ("x-private", "1"),
            ("host", "a"),
            ("content-length", "0"),
            ("keep-alive", "1"),
            ("te", "trailers"),
            ("transfer-encoding", "chunked"),
            ("upgrade", "h2c"),
            ("accept", "*/*"),
        ]);
        remove_hop_by_hop(&mut map);
        assert_eq!(
            map,
            headers(&[("host", "a"), ("content-length", "0"), ("accept", "*/*")])
        );
    }

    #[test]
    fn a_client_cannot_say_who_it_is() {
        let mut map = headers(&[
            ("x-forwarded-for", "1.2.3.4"),
            ("x_forwarded_for", "1.2.3.4"),
            ("X-Real_IP", "1.2.3.4"),
            ("forwarded", "for=1.2.3.4"),
            ("x-forwarded-proto", "https"),
            ("proxy", "http://evil"),
            ("x-mine", "1"),
        ]);
        let client = Client {
            address: "::ffff:10.0.0.9".parse().expect("an address"),
            tls: false,
            port: 80,
        };
        set_forwarded(&mut map, client, &HeaderValue::from_static("a.example:80"));
        let expected = headers(&[
            ("x-forwarded-for", "10.0.0.9"),
            ("x-real-ip", "10.0.0.9"),
            ("x-forwarded-host", "a.example:80"),
            ("x-forwarded-port", "80"),
            ("x-forwarded-scheme", "http"),
            ("x-forwarded-proto", "http"),
            ("x-mine", "1"),
        ]);
        assert_eq!(map, expected);
    }

    #[test]
    fn tokens_are_found_in_lists() {
        let map = headers(&[("connection", "keep-alive, Upgrade")]);
        assert!(has_token(&map, &header::CONNECTION, "upgrade"));
        assert!(!has_token(&map, &header::CONNECTION, "close"));
    }
}
