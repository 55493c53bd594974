//! Where a request wants to go: its host and path, checked.

use http::header;
use http::uri::Authority;
use http::{HeaderValue, Method, Request, StatusCode};
use hyper::body::Incoming;

use crate::metrics::Refusal;
use crate::refusal::{Refused, malformed};
use crate::table::normalized;

/// Where a request wants to go.
pub struct Target {
    /// As it is sent on; empty for HTTP/1.0 without one.
    pub host: HeaderValue,
    /// Lower case, without a port.
    pub name: String,
    pub path: String,
}

/// Checks what the guard cannot see, and what HTTP/2 says.
pub fn target(request: &Request<Incoming>) -> Result<Target, Refused> {
    let (uri, headers) = (request.uri(), request.headers());
    if matches!(*request.method(), Method::CONNECT | Method::TRACE) {
        return Err(Refused {
            status: StatusCode::METHOD_NOT_ALLOWED,
            text: "405 method not allowed\n",
            why: Some(Refusal::Malformed),
        });
    }
    if headers.get_all(header::CONTENT_LENGTH).iter().count() > 1 {
        return Err(malformed("400 more than one Content-Length\n"));
    }
    let mut hosts = headers.get_all(header::HOST).iter();
    let (host, second) = (hosts.next(), hosts.next());
    let authority = uri.authority().map(Authority::as_str);
    let same = |host: &HeaderValue| {
        authority.is_none_or(|name| host.as_bytes().eq_ignore_ascii_case(name.as_bytes()))
    };
    if second.is_some() || !host.is_none_or(same) {
        return Err(malformed("400 the request names two hosts\n"));
    }
    let host = match (host, authority) {
        (Some(host), _) => host.clone(),
        (None, Some(authority)) => {
            HeaderValue::try_from(authority).map_err(|_| malformed("400 malformed host\n"))?
        }
        (None, None) => HeaderValue::from_static(""),
    };
    let name = host_name(&host).ok_or_else(|| malformed("400 malformed host\n"))?;
    let path = normalized(uri.path()).ok_or_else(|| malformed("400 malformed path\n"))?;
    Ok(Target { host, name, path })
}

/// The host in lower case, without its port and the dot at its end.
fn host_name(host: &HeaderValue) -> Option<String> {
    let text = host.to_str().ok()?;
    let name = match text.strip_prefix('[') {
        Some(rest) => {
            let (address, port) = rest.split_once(']')?;
            address.parse::<std::net::Ipv6Addr>().ok()?;
            is_port(port).then_some(address)?
        }
        None => match text.split_once(':') {
            Some((name, port)) => (!port.contains(':') && is_port(&format!(":{port}"))).then_some(name)?,
            None => text,
        },
    };
    let sound = |byte: u8| byte.is_ascii_alphanumeric() || b"-._:".contains(&byte);
    let name = name.strip_suffix('.').unwrap_or(name);
    name.bytes().all(sound).then(|| name.to_ascii_lowercase())
}

/// Nothing, or a colon and a port.
fn is_port(text: &str) -> bool {
    text.is_empty()
        || text
            .strip_prefix(':')
            .is_some_and(|port| port.len() <= 5 && port.bytes().all(|byte| byte.is_ascii_digit()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hosts_are_names_without_ports() {
        for (host, expected) in [
            ("A.Example", Some("a.example")),
            ("a.example.:8080", Some("a.example")),
            ("10.0.0.1:80", Some("10.0.0.1")),
            ("[fd00::1]:80", Some("fd00::1")),
            ("[fd00::1]", Some("fd00::1")),
            ("", Some("")),
            ("a:b", None),
            ("a:1:2", None),
            ("a:123456", None),
            ("[a]", None),
            ("[::1", None),
            ("[::1]x", None),
            ("a b", None),
            ("a/b", None),
            ("a@b", None),
            ("*.example", None),
        ] {
            let value = HeaderValue::from_str(host).expect("a value");
            assert_eq!(host_name(&value).as_deref(), expected, "{host}");
        }
    }
}
