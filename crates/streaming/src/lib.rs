//! The protocols behind `kubectl exec`, `attach`, `port-forward` and `cp`, on the serving side:
//! SPDY/3.1 and WebSocket, and a proxy that passes an upgraded connection on without looking into it.
//!
//! This crate moves bytes. It starts no process and knows no pod: what the streams are connected to is
//! the caller's handler.

mod port_forward;
mod proxy;
mod pump;
mod reader;
mod remote_command;
mod spdy;
mod upgrade;
mod websocket;

#[cfg(test)]
use spdy::client as spdy_client;

use bytes::Bytes;
use http_body_util::combinators::UnsyncBoxBody;
use tokio::io::DuplexStream;
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

pub use port_forward::serve_port_forward;
pub use proxy::proxy_upgrade;
pub use reader::serve_reader;
pub use remote_command::serve_remote_command;
pub use upgrade::is_upgrade_request;

pub type BoxError = Box<dyn std::error::Error + Send + Sync>;

/// The body of every answer of this crate.
pub type Body = UnsyncBoxBody<Bytes, BoxError>;

/// Which streams a client wants.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Options {
    pub stdin: bool,
    pub stdout: bool,
    pub stderr: bool,
    pub tty: bool,
}

impl Options {
    /// Reads the query of an exec or attach request, in the API's names (`stdin`, `stdout`, `stderr`)
    /// or the kubelet's (`input`, `output`, `error`).
    pub fn from_query(query: &str) -> Result<Options, String> {
        let mut options = Options::default();
        for pair in query.split('&') {
            let (key, value) = pair.split_once('=').unwrap_or((pair, ""));
            let on = matches!(value, "1" | "true" | "True" | "TRUE" | "t" | "T");
            match key {
                "stdin" | "input" => options.stdin = on,
                "stdout" | "output" => options.stdout = on,
                "stderr" | "error" => options.stderr = on,
                "tty" => options.tty = on,
                _ => {}
            }
        }
        // COMPAT: a terminal has one output; clients that ask for both get the terminal.
        if options.tty {
            options.stderr = false;
        }
        if !(options.stdin || options.stdout || options.stderr) {
            return Err("you must specify at least 1 of stdin, stdout, stderr".into());
        }
        Ok(options)
    }
}

/// The size of a client's terminal, in characters.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Deserialize, serde::Serialize)]
pub struct TerminalSize {
    #[serde(rename = "Width", alias = "width", default)]
    pub width: u16,
    #[serde(rename = "Height", alias = "height", default)]
    pub height: u16,
}

/// The client's ends of the streams it asked for. Dropping `stdout` or `stderr` closes it for the
/// client; `stdin` ends when the client closes it or goes away.
#[derive(Debug)]
pub struct Streams {
    pub stdin: Option<DuplexStream>,
    pub stdout: Option<DuplexStream>,
    pub stderr: Option<DuplexStream>,
    /// Sizes as they arrive; when the handler is slow, only the latest.
    pub resize: mpsc::Receiver<TerminalSize>,
    /// Cancelled when the client is gone.
    pub gone: CancellationToken,
}

/// How a remote command ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ExitOutcome {
    /// The process ended with this code; zero is success. Attach ends with zero.
    Exited(i32),
    /// It could not be run, or the runtime lost it; the sentence reaches the client.
    Failed(String),
}

pub(crate) fn body_of(text: impl Into<Bytes>) -> Body {
    use http_body_util::BodyExt;
    http_body_util::Full::new(text.into())
        .map_err(|never| match never {})
        .boxed_unsync()
}

/// A plain answer, in the form upstream's streaming server gives its refusals.
pub(crate) fn refuse(status: http::StatusCode, message: impl Into<String>) -> http::Response<Body> {
    let mut response = http::Response::new(body_of(format!("{}\n", message.into())));
    *response.status_mut() = status;
    response.headers_mut().insert(
        http::header::CONTENT_TYPE,
        http::HeaderValue::from_static("text/plain; charset=utf-8"),
    );
    response
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_from_queries() {
        fn check(query: &str, expected: Result<(bool, bool, bool, bool), &str>) {
            let got = Options::from_query(query).map(|o| (o.stdin, o.stdout, o.stderr, o.tty));
            assert_eq!(got, expected.map_err(str::to_string), "{query}");
        }
        check(
            "command=sh&stdin=true&stdout=true&tty=true&stderr=true",
            Ok((true, true, false, true)),
        );
        check("input=1&output=1&error=1", Ok((true, true, true, false)));
        check("stdout=true&stderr=false", Ok((false, true, false, false)));
        check(
            "command=ls",
            Err("you must specify at least 1 of stdin, stdout, stderr"),
        );
        check("", Err("you must specify at least 1 of stdin, stdout, stderr"));
    }
}
