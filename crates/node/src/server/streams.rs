//! Exec, attach and port-forward: which container is meant, and the connection handed on to the runtime's
//! streaming server. Nothing here runs anything itself.

use std::time::Duration;

use http::{Request, Response, StatusCode};
use hyper::body::Incoming;
use skiff_cri::v1;
use skiff_streaming::Body;
use tokio::net::TcpStream;

use super::idle::IdleLimited;
use super::{find, text};
use crate::images::describe;
use crate::kubelet::Kubelet;
use crate::observed::ContainerState;
use crate::pod_state::PodState;
use crate::pods;

/// The running instance of the container.
fn running(state: &PodState, container: &str) -> Option<String> {
    state
        .observed()
        .container(container)
        .filter(|c| c.state == ContainerState::Running)
        .map(|c| c.id.clone())
}

/// The streams a client wants, by the kubelet's names or the API's.
struct Streams {
    stdin: bool,
    stdout: bool,
    stderr: bool,
    tty: bool,
}

impl Streams {
    fn from_query(query: &[(String, String)]) -> Result<Self, String> {
        let on = |names: [&str; 2]| {
            query
                .iter()
                .any(|(n, v)| names.contains(&n.as_str()) && matches!(v.as_str(), "1" | "true"))
        };
        let tty = on(["tty", "tty"]);
        let streams = Streams {
            stdin: on(["input", "stdin"]),
            stdout: on(["output", "stdout"]),
            // A terminal has one output.
            stderr: on(["error", "stderr"]) && !tty,
            tty,
        };
        if !(streams.stdin || streams.stdout || streams.stderr) {
            return Err("you must specify at least 1 of stdin, stdout, stderr".to_owned());
        }
        Ok(streams)
    }
}

pub async fn exec(
    kubelet: &Kubelet,
    request: Request<Incoming>,
    namespace: &str,
    pod: &str,
    uid: Option<&str>,
    container: &str,
    query: &[(String, String)],
) -> Response<Body> {
    let streams = match Streams::from_query(query) {
        Ok(streams) => streams,
        Err(error) => return text(StatusCode::BAD_REQUEST, error),
    };
    let Some(state) = find(kubelet, namespace, pod, uid) else {
        return text(StatusCode::NOT_FOUND, "pod does not exist\n");
    };
    let Some(id) = running(&state, container) else {
        return text(
            StatusCode::NOT_FOUND,
            format!("container not found ({container:?})\n"),
        );
    };
    let cmd: Vec<String> = query
        .iter()
        .filter(|(n, _)| n == "command")
        .map(|(_, v)| v.clone())
        .collect();
    let Streams {
        stdin,
        stdout,
        stderr,
        tty,
    } = streams;
    match kubelet
        .runtime
        .exec_url(v1::ExecRequest {
            container_id: id,
            cmd,
            tty,
            stdin,
            stdout,
            stderr,
        })
        .await
    {
        Ok(url) => proxy(kubelet, request, &url).await,
        Err(status) => text(StatusCode::INTERNAL_SERVER_ERROR, describe(&status)),
    }
}

pub async fn attach(
    kubelet: &Kubelet,
    request: Request<Incoming>,
    namespace: &str,
    pod: &str,
    uid: Option<&str>,
    container: &str,
    query: &[(String, String)],
) -> Response<Body> {
    let streams = match Streams::from_query(query) {
        Ok(streams) => streams,
        Err(error) => return text(StatusCode::BAD_REQUEST, error),
    };
    let Some(state) = find(kubelet, namespace, pod, uid) else {
        return text(StatusCode::NOT_FOUND, "pod does not exist\n");
    };
    let Some(id) = running(&state, container) else {
        return text(
            StatusCode::NOT_FOUND,
            format!("container {container} not found in pod {pod}_{namespace}\n"),
        );
    };
    // The container decides whether it has a terminal.
    let tty = pods::container(&state.pod(), container).and_then(|c| c.tty) == Some(true);
    let Streams {
        stdin,
        stdout,
        stderr,
        ..
    } = streams;
    match kubelet
        .runtime
        .attach_url(v1::AttachRequest {
            container_id: id,
            stdin,
            tty,
            stdout,
            stderr: stderr && !tty,
        })
        .await
    {
        Ok(url) => proxy(kubelet, request, &url).await,
        Err(status) => text(StatusCode::INTERNAL_SERVER_ERROR, describe(&status)),
    }
}

pub async fn port_forward(
    kubelet: &Kubelet,
    request: Request<Incoming>,
    namespace: &str,
    pod: &str,
    uid: Option<&str>,
    query: &[(String, String)],
) -> Response<Body> {
    let mut ports = Vec::new();
    for (_, value) in query.iter().filter(|(n, _)| n == "port") {
        for port in value.split(',') {
            match port.parse::<u16>() {
                Ok(port) if port > 0 => ports.push(i32::from(port)),
                _ => {
                    return text(
                        StatusCode::BAD_REQUEST,
                        format!("unable to parse {port:?} as a port"),
                    );
                }
            }
        }
    }
    let Some(state) = find(kubelet, namespace, pod, uid) else {
        return text(StatusCode::NOT_FOUND, "pod does not exist\n");
    };
    let Some(sandbox) = state
        .observed()
        .sandboxes
        .iter()
        .find(|s| s.ready)
        .map(|s| s.id.clone())
    else {
        return text(StatusCode::NOT_FOUND, "pod not found\n");
    };
    match kubelet.runtime.port_forward_url(&sandbox, ports).await {
        Ok(url) => proxy(kubelet, request, &url).await,
        Err(status) => text(StatusCode::INTERNAL_SERVER_ERROR, describe(&status)),
    }
}

/// Hands the connection to the runtime's streaming server at `url`.
async fn proxy(kubelet: &Kubelet, mut request: Request<Incoming>, url: &str) -> Response<Body> {
    let Ok(target) = url.parse::<http::Uri>() else {
        return text(
            StatusCode::INTERNAL_SERVER_ERROR,
            "the runtime answered with a broken URL",
        );
    };
    let (Some(host), port) = (target.host(), target.port_u16().unwrap_or(80)) else {
        return text(
            StatusCode::INTERNAL_SERVER_ERROR,
            "the runtime answered with a URL without a host",
        );
    };
    let address = (host.trim_matches(['[', ']']).to_owned(), port);
    let authority = target
        .authority()
        .map(|a| a.as_str().to_owned())
        .unwrap_or_default();
    let path = target.path_and_query().map_or("/", |p| p.as_str());
    match path.parse() {
        Ok(uri) => *request.uri_mut() = uri,
        Err(_) => {
            return text(
                StatusCode::INTERNAL_SERVER_ERROR,
                "the runtime answered with a broken URL",
            );
        }
    }
    if let Ok(value) = http::HeaderValue::from_str(&authority) {
        request.headers_mut().insert("host", value);
    }
    let limit = kubelet.config.streaming_idle_timeout.unwrap_or(Duration::MAX);
    let connect = || async move {
        let connection = TcpStream::connect(address).await?;
        Ok::<_, std::io::Error>(IdleLimited::new(connection, limit))
    };
    skiff_streaming::proxy_upgrade(request, connect).await
}

#[cfg(test)]
mod tests {
    use super::super::query::parse_query;
    use super::*;

    #[test]
    fn streams() {
        let check = |query: &str, expected: Option<(bool, bool, bool, bool)>| {
            let found = Streams::from_query(&parse_query(query))
                .ok()
                .map(|s| (s.stdin, s.stdout, s.stderr, s.tty));
            assert_eq!(found, expected, "{query}");
        };
        check("input=1&output=1&error=1", Some((true, true, true, false)));
        check(
            "stdin=true&stdout=true&stderr=true&tty=true",
            Some((true, true, false, true)),
        );
        check("tty=1", None);
    }
}
