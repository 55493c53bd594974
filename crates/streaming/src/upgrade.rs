//! The HTTP side of an upgrade: which transport a request asks for, which of the protocols on top of
//! it both sides know, and the 101 that says so.

use http::header::{CONNECTION, HeaderMap, HeaderName, HeaderValue, UPGRADE};
use http::{Request, Response, StatusCode};

use crate::{Body, body_of, refuse};

const STREAM_PROTOCOL: HeaderName = HeaderName::from_static("x-stream-protocol-version");
const ACCEPTED_STREAM_PROTOCOLS: HeaderName = HeaderName::from_static("x-accepted-stream-protocol-versions");
const WEBSOCKET_KEY: HeaderName = HeaderName::from_static("sec-websocket-key");
const WEBSOCKET_ACCEPT: HeaderName = HeaderName::from_static("sec-websocket-accept");
const WEBSOCKET_PROTOCOL: HeaderName = HeaderName::from_static("sec-websocket-protocol");
const WEBSOCKET_VERSION: HeaderName = HeaderName::from_static("sec-websocket-version");

/// What was agreed on; the protocol is empty for clients that name none.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Agreed {
    Spdy(String),
    WebSocket(String),
}

/// Whether a request asks to leave HTTP.
pub fn is_upgrade_request<B>(request: &Request<B>) -> bool {
    has_token(request.headers(), &CONNECTION, "upgrade") && request.headers().contains_key(UPGRADE)
}

fn has_token(headers: &HeaderMap, name: &HeaderName, token: &str) -> bool {
    tokens(headers, name).any(|have| have.eq_ignore_ascii_case(token))
}

fn tokens<'a>(headers: &'a HeaderMap, name: &HeaderName) -> impl Iterator<Item = &'a str> {
    headers
        .get_all(name)
        .into_iter()
        .filter_map(|value| value.to_str().ok())
        .flat_map(|value| value.split(','))
        .map(str::trim)
        .filter(|token| !token.is_empty())
}

/// Agrees on a transport and a protocol, or gives the answer that refuses. The client's order counts.
pub(crate) fn negotiate<B>(
    request: &Request<B>,
    spdy: &[&str],
    websocket: &[&str],
) -> Result<(Agreed, Response<Body>), Box<Response<Body>>> {
    let headers = request.headers();
    let bad = |message: String| Box::new(refuse(StatusCode::BAD_REQUEST, message));
    if !is_upgrade_request(request) {
        return Err(bad("unable to upgrade: missing upgrade headers in request".into()));
    }
    let mut response = Response::new(body_of(""));
    *response.status_mut() = StatusCode::SWITCHING_PROTOCOLS;
    response
        .headers_mut()
        .insert(CONNECTION, HeaderValue::from_static("Upgrade"));
    if has_token(headers, &UPGRADE, "websocket") {
        let key = headers
            .get(&WEBSOCKET_KEY)
            .ok_or_else(|| bad("missing Sec-WebSocket-Key".into()))?;
        if headers
            .get(&WEBSOCKET_VERSION)
            .is_none_or(|version| version != "13")
        {
            return Err(bad("unsupported Sec-WebSocket-Version".into()));
        }
        let asked: Vec<&str> = tokens(headers, &WEBSOCKET_PROTOCOL).collect();
        let protocol = match asked.iter().find(|protocol| websocket.contains(protocol)) {
            Some(protocol) => protocol.to_string(),
            None if asked.is_empty() => String::new(),
            None => {
                return Err(bad(format!(
                    "requested protocol(s) are not supported: {asked:?}; supports {websocket:?}"
                )));
            }
        };
        let accept = tokio_tungstenite::tungstenite::handshake::derive_accept_key(key.as_bytes());
        let out = response.headers_mut();
        out.insert(UPGRADE, HeaderValue::from_static("websocket"));
        out.insert(WEBSOCKET_ACCEPT, header_value(&accept));
        if !protocol.is_empty() {
            out.insert(WEBSOCKET_PROTOCOL, header_value(&protocol));
        }
        return Ok((Agreed::WebSocket(protocol), response));
    }
    if has_token(headers, &UPGRADE, "SPDY/3.1") {
        let asked: Vec<&str> = tokens(headers, &STREAM_PROTOCOL).collect();
        let protocol = match asked.iter().find(|protocol| spdy.contains(protocol)) {
            Some(protocol) => protocol.to_string(),
            // COMPAT: the first clients knew no negotiation.
            None if asked.is_empty() => String::new(),
            None => {
                let mut answer = refuse(
                    StatusCode::FORBIDDEN,
                    format!(
                        "unable to upgrade: unable to negotiate protocol: client supports {asked:?}, server accepts {spdy:?}"
                    ),
                );
                for protocol in spdy {
                    answer
                        .headers_mut()
                        .append(ACCEPTED_STREAM_PROTOCOLS, header_value(protocol));
                }
                return Err(Box::new(answer));
            }
        };
        let out = response.headers_mut();
        out.insert(UPGRADE, HeaderValue::from_static("SPDY/3.1"));
        if !protocol.is_empty() {
            out.insert(STREAM_PROTOCOL, header_value(&protocol));
        }
        return Ok((Agreed::Spdy(protocol), response));
    }
    Err(bad(
        "unable to upgrade: unknown protocol in the Upgrade header".into()
    ))
}

fn header_value(text: &str) -> HeaderValue {
    // Protocols come out of our own lists and accept keys are base64.
    HeaderValue::from_str(text).unwrap_or_else(|_| HeaderValue::from_static(""))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn transports_and_protocols() {
        fn check(headers: &[(&str, &str)], expected: Result<Agreed, (u16, &str)>) {
            let mut request = Request::builder();
            for (name, value) in headers {
                request = request.header(*name, *value);
            }
            let got = negotiate(
                &request.body(()).unwrap(),
                &["v4.channel.k8s.io", "v3"],
                &["v5.channel.k8s.io"],
            );
            match (got, expected) {
                (Ok((agreed, response)), Ok(wanted)) => {
                    assert_eq!(agreed, wanted);
                    assert_eq!(response.status(), 101);
                }
                (Err(response), Err((status, _))) => assert_eq!(response.status(), status, "{headers:?}"),
                (got, expected) => panic!("{headers:?}: {got:?}, expected {expected:?}"),
            }
        }
        let spdy = [("connection", "Upgrade"), ("upgrade", "SPDY/3.1")];
        check(&spdy, Ok(Agreed::Spdy("".into())));
        check(
            &[
                spdy[0],
                spdy[1],
                ("x-stream-protocol-version", "v5"),
                ("x-stream-protocol-version", "v3"),
            ],
            Ok(Agreed::Spdy("v3".into())),
        );
        check(
            &[spdy[0], spdy[1], ("x-stream-protocol-version", "v9")],
            Err((403, "")),
        );
        let ws = [
            ("connection", "keep-alive, upgrade"),
            ("upgrade", "WebSocket"),
            ("sec-websocket-key", "dGhlIHNhbXBsZSBub25jZQ=="),
            ("sec-websocket-version", "13"),
        ];
        check(&ws, Ok(Agreed::WebSocket("".into())));
        check(
            &[
                ws[0],
                ws[1],
                ws[2],
                ws[3],
                ("sec-websocket-protocol", "v9, v5.channel.k8s.io"),
            ],
            Ok(Agreed::WebSocket("v5.channel.k8s.io".into())),
        );
        check(
            &[ws[0], ws[1], ws[2], ws[3], ("sec-websocket-protocol", "v9")],
            Err((400, "")),
        );
        check(&[ws[0], ws[1], ws[3]], Err((400, "")));
        check(&[], Err((400, "")));
        check(&[("connection", "upgrade"), ("upgrade", "h2c")], Err((400, "")));
    }
}
