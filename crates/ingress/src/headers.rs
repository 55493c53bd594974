//! What is changed of the headers on their way: those of one hop stay behind, and those that tell of the client are ours
//! alone.

use std::net::IpAddr;

use http::header::{self, HeaderName};
use http::{HeaderMap, HeaderValue};

const PROXY_CONNECTION: HeaderName = HeaderName::from_static("proxy-connection");
const KEEP_ALIVE: HeaderName = HeaderName::from_static("keep-alive");
const HTTP2_SETTINGS: HeaderName = HeaderName::from_static("http2-settings");

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
    for name in named.iter().chain(&always) {
        headers.remove(name);
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

/// Says who the client is. What it said itself is removed, also with underscores, which many servers take for dashes.
pub fn set_forwarded(headers: &mut HeaderMap, client: Client, host: &HeaderValue) {
    let forged: Vec<HeaderName> = headers
        .keys()
        .filter(|name| OURS.contains(&name.as_str().replace('_', "-").as_str()))
        .cloned()
        .collect();
    for name in forged {
        headers.remove(name);
    }
    let proto = HeaderValue::from_static(if client.tls { "https" } else { "http" });
    let address = HeaderValue::try_from(client.address.to_canonical().to_string());
    let mut set = |name: &'static str, value: HeaderValue| {
        headers.insert(HeaderName::from_static(name), value);
    };
    if let Ok(address) = address {
        set("x-forwarded-for", address.clone());
        set("x-real-ip", address);
    }
    set("x-forwarded-host", host.clone());
    set("x-forwarded-port", client.port.into());
    set("x-forwarded-scheme", proto.clone());
    set("x-forwarded-proto", proto);
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
