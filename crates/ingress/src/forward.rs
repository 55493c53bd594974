//! One request: found a route, sent to an endpoint of its backend, and its response handed back. Only backends of the
//! table are ever dialled.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use arc_swap::ArcSwap;
use http::header::{self, HeaderName};
use http::request::Parts;
use http::uri::Authority;
use http::{HeaderMap, HeaderValue, Method, Request, Response, StatusCode, Version};
use hyper::body::Incoming;
use hyper::upgrade::OnUpgrade;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::backend::{Backend, Protocol};
use crate::body::{RequestBody, ResponseBody, Stall};
use crate::connections::Slot;
use crate::gateway::cors::Cors;
use crate::gateway::filters::Redirected;
use crate::gateway::hosts::Host;
use crate::gateway::request::{Course, host_of};
use crate::gateway::table::{Entry, Found, GatewayTable, ListenAddress, RequestHead};
use crate::guard::{PendingUpgrade, Upgrade};
use crate::headers::{self, Client};
use crate::http1::BackendBody;
use crate::metrics::{Connected, Metrics, Refusal};
use crate::table::{RouteOptions, RouteTable, normalized};
use crate::tunnel;
use crate::upstream::{self, SendError, Sent};

/// Endpoints that one request is sent to, if those before were not reached.
const ATTEMPTS: usize = 3;
/// Before the first retry of a route that names no time.
const BACKOFF: Duration = Duration::from_millis(25);
/// For the whole of a mirrored request.
const MIRROR_TIMEOUT: Duration = Duration::from_secs(60);
const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");

/// What all connections share.
pub struct Proxy {
    pub table: ArcSwap<RouteTable>,
    /// Asked first.
    pub gateways: ArcSwap<GatewayTable>,
    pub metrics: Metrics,
    /// Where redirects lead; `None`: there are none.
    pub https_port: Option<u16>,
    pub access_log: bool,
    /// Connections that were handed to another protocol.
    pub tunnels: TaskTracker,
    /// Ends them.
    pub abort: CancellationToken,
}

/// A connection of a client.
pub struct Connection {
    pub proxy: Arc<Proxy>,
    pub client: Client,
    /// Which listeners of Gateways it meets.
    pub socket: ListenAddress,
    /// The one that TLS ended at.
    pub listener: Option<Host>,
    /// Whether Ingresses are served too.
    pub is_ingress: bool,
    pub slot: Slot,
    /// HTTP/1.1 only.
    pub upgrade: Option<Arc<Upgrade>>,
    /// HTTP/1.1 only: the next response is the last.
    pub closing: AtomicBool,
    /// Held for its count.
    pub _counted: Connected,
}

/// An answer that no backend gave.
struct Refused {
    status: StatusCode,
    text: &'static str,
    why: Option<Refusal>,
}

fn refused(status: StatusCode, text: &'static str, why: Refusal) -> Refused {
    Refused {
        status,
        text,
        why: Some(why),
    }
}

fn malformed(text: &'static str) -> Refused {
    refused(StatusCode::BAD_REQUEST, text, Refusal::Malformed)
}

/// Where a request wants to go.
struct Target {
    /// As it is sent on; empty for HTTP/1.0 without one.
    host: HeaderValue,
    /// Lower case, without a port.
    name: String,
    path: String,
}

/// For the access log.
#[derive(Default)]
struct Seen {
    host: String,
    path: String,
    backend: Option<Arc<Backend>>,
    endpoint: Option<SocketAddr>,
}

impl Connection {
    pub async fn answer(
        self: Arc<Self>,
        request: Request<Incoming>,
        stall: Option<Stall>,
    ) -> Response<ResponseBody> {
        let began = Instant::now();
        let in_use = self.slot.usage.request();
        let (method, version) = (request.method().clone(), request.version());
        let mut seen = Seen::default();
        if self.proxy.access_log {
            seen.path = request.uri().path().to_owned();
        }
        // The guard waits for the answer, whatever it is.
        let asks = version == Version::HTTP_11 && request.headers().contains_key(header::UPGRADE);
        let pending = self.upgrade.as_ref().filter(|_| asks).map(Upgrade::pending);
        let (mut response, held) = match self.forward(request, pending, &mut seen).await {
            Ok((response, held)) => (response, Some(held)),
            Err(refused) => {
                if let Some(why) = refused.why {
                    self.proxy.metrics.refused(why);
                }
                (text_response(refused.status, refused.text), None)
            }
        };
        let status = response.status();
        if self.closing.load(Ordering::Relaxed) && status != StatusCode::SWITCHING_PROTOCOLS {
            let close = HeaderValue::from_static("close");
            response.headers_mut().insert(header::CONNECTION, close);
        }
        let at_end = Box::new(move |sent: u64| {
            let elapsed = began.elapsed();
            let metrics = &self.proxy.metrics;
            metrics.answered(&method, version, status, elapsed.as_secs_f64());
            if self.proxy.access_log {
                let backend = seen.backend.as_ref().map(|backend| &backend.key);
                let service = backend.map(|key| format!("{}/{}:{}", key.namespace, key.service, key.port));
                tracing::info!(
                    target: "skiff_ingress::access",
                    client = %self.client.address.to_canonical(),
                    tls = self.client.tls,
                    %method,
                    host = seen.host,
                    path = seen.path,
                    status = status.as_u16(),
                    bytes = sent,
                    milliseconds = elapsed.as_millis(),
                    service = service.unwrap_or_default(),
                    endpoint = seen.endpoint.map(|address| address.to_string()).unwrap_or_default(),
                    "request"
                );
            }
            drop((in_use, held));
        });
        response.map(|body| body.watched(stall, at_end))
    }

    async fn forward(
        self: &Arc<Self>,
        mut request: Request<Incoming>,
        pending: Option<PendingUpgrade>,
        seen: &mut Seen,
    ) -> Result<(Response<ResponseBody>, Box<dyn Send + Sync>), Refused> {
        let target = target(&request)?;
        if self.proxy.access_log {
            seen.host.clone_from(&target.name);
        }
        let (backend, options, course) = match self.choose(&request, &target)? {
            Chosen::Answer(response) => return Ok((response, Box::new(()))),
            Chosen::Send {
                backend,
                options,
                course,
            } => (backend, options, course),
        };
        seen.backend = Some(backend.clone());
        let Some(entered) = backend.enter() else {
            return Err(refused(
                StatusCode::SERVICE_UNAVAILABLE,
                "503 the service has too many requests\n",
                Refusal::BackendFull,
            ));
        };
        let too_large = |limit: u64| content_length(request.headers()).is_some_and(|length| length > limit);
        if options.max_body.is_some_and(too_large) {
            return Err(Refused {
                status: StatusCode::PAYLOAD_TOO_LARGE,
                text: "413 the body is too large\n",
                why: None,
            });
        }
        let protocol = upgrade_protocol(&request).filter(|_| backend.protocol == Protocol::Http1);
        let near = pending.is_some().then(|| hyper::upgrade::on(&mut request));
        let (mut parts, body) = request.into_parts();
        let te = headers::has_token(&parts.headers, &header::TE, "trailers");
        prepare(&mut parts, self.client, &target, protocol.as_ref());
        if te && backend.protocol == Protocol::Http2 {
            parts
                .headers
                .insert(header::TE, HeaderValue::from_static("trailers"));
        }
        let body = RequestBody::new(body, options.max_body);
        let mut host = target.host.clone();
        if let Some(course) = &course {
            course.edit_request(&mut parts, &target.path);
            host = host_of(&parts);
            for mirror in course.mirrors(rand::random) {
                self.mirror(mirror, &parts, &body, &host);
            }
        }
        let deadline = options.request_timeout;
        let deadline = deadline.map(|limit| tokio::time::Instant::now() + limit);
        let sending = self.send(&backend, &parts, &body, &host, &options, seen);
        let sent = match deadline {
            None => sending.await?,
            Some(deadline) => match tokio::time::timeout_at(deadline, sending).await {
                Ok(sent) => sent?,
                Err(_) => return Err(too_late()),
            },
        };
        let Sent { mut response, stream } = sent;
        let held = Box::new((entered, stream));
        if response.status() == StatusCode::SWITCHING_PROTOCOLS {
            let (Some(protocol), Some(near), Some(pending)) = (protocol, near, pending) else {
                return Err(bad_gateway());
            };
            let far = hyper::upgrade::on(&mut response);
            return Ok((
                self.switch(response, protocol, near, far, pending, held),
                Box::new(()),
            ));
        }
        headers::remove_hop_by_hop(response.headers_mut());
        if let Some(course) = &course {
            course.edit_response(response.headers_mut());
        }
        *response.version_mut() = parts.version;
        let body = |incoming| ResponseBody::backend(incoming).until(deadline);
        Ok((response.map(body), held))
    }

    /// Finds the route, and the backend that it leads to.
    fn choose(&self, request: &Request<Incoming>, target: &Target) -> Result<Chosen, Refused> {
        let head = RequestHead {
            host: &target.name,
            path: &target.path,
            query: request.uri().query().unwrap_or_default(),
            method: request.method(),
            headers: request.headers(),
        };
        let gateways = self.proxy.gateways.load();
        match gateways.find(self.socket, self.listener.as_ref(), &head) {
            Found::Route(entry) => return self.follow(entry, request, target),
            Found::Misdirected => {
                return Err(refused(
                    StatusCode::MISDIRECTED_REQUEST,
                    "421 the connection was made for another host\n",
                    Refusal::NoRoute,
                ));
            }
            Found::Nothing => {}
        }
        let table = self.proxy.table.load();
        let route = table.find(&target.name, &target.path).filter(|_| self.is_ingress);
        let Some(route) = route else {
            return Err(refused(
                StatusCode::NOT_FOUND,
                "404 page not found\n",
                Refusal::NoRoute,
            ));
        };
        if let Some(port) = self
            .proxy
            .https_port
            .filter(|_| route.options.redirect_to_https && !self.client.tls)
        {
            return redirect(request, &target.name, port).map(Chosen::Answer);
        }
        let Some(backend) = route.backend.clone() else {
            return Err(unavailable());
        };
        Ok(Chosen::Send {
            backend,
            options: route.options.clone(),
            course: None,
        })
    }

    /// Follows a rule of Gateway API.
    fn follow(
        &self,
        entry: Arc<Entry>,
        request: &Request<Incoming>,
        target: &Target,
    ) -> Result<Chosen, Refused> {
        let filters = &entry.rule.filters;
        if let Some(cors) = &filters.cors
            && Cors::is_preflight(request.method(), request.headers())
        {
            let mut response = Response::new(ResponseBody::text(""));
            *response.status_mut() = StatusCode::NO_CONTENT;
            *response.headers_mut() = cors.preflight(request.headers());
            return Ok(Chosen::Answer(response));
        }
        if let Some(redirect) = &filters.redirect {
            let location = redirect.location(&Redirected {
                tls: self.client.tls,
                host: &target.name,
                port: self.socket.port,
                path: &target.path,
                prefix: entry.prefix(),
                query: request.uri().query(),
            });
            let location = HeaderValue::try_from(location).map_err(|_| malformed("400 malformed path\n"))?;
            let mut response = text_response(redirect.status, "redirected\n");
            response.headers_mut().insert(header::LOCATION, location);
            filters.response.apply(response.headers_mut());
            return Ok(Chosen::Answer(response));
        }
        let is_grpc = entry.rule.is_grpc;
        let Some((course, backend)) = Course::new(entry, rand::random(), request.headers()) else {
            // Clients of gRPC take the one for UNAVAILABLE.
            return Err(match is_grpc {
                true => unavailable(),
                false => refused(
                    StatusCode::INTERNAL_SERVER_ERROR,
                    "500 the route has no valid backend\n",
                    Refusal::NoEndpoint,
                ),
            });
        };
        Ok(Chosen::Send {
            backend,
            options: course.options(),
            course: Some(course),
        })
    }

    /// Sends a copy of a request, whose response nobody reads.
    fn mirror(&self, backend: Arc<Backend>, parts: &Parts, body: &RequestBody, host: &HeaderValue) {
        let Some(entered) = backend.enter() else { return };
        let Some(endpoint) = backend.pick(&[], rand::random(), Instant::now()) else {
            return;
        };
        let mut request = Request::new(body.copy());
        *request.method_mut() = parts.method.clone();
        *request.uri_mut() = parts.uri.clone();
        *request.headers_mut() = parts.headers.clone();
        // A copy asks for no other protocol.
        for name in [header::CONNECTION, header::UPGRADE] {
            request.headers_mut().remove(name);
        }
        let (host, abort) = (host.clone(), self.proxy.abort.clone());
        self.proxy.tunnels.spawn(async move {
            let sending = upstream::send(&endpoint, backend.protocol, request, &host);
            tokio::select! {
                sent = tokio::time::timeout(MIRROR_TIMEOUT, sending) => {
                    if let Ok(Err(error)) = sent {
                        tracing::debug!(%error, endpoint = %endpoint.address, "a mirrored request failed");
                    }
                }
                () = abort.cancelled() => {}
            }
            drop(entered);
        });
    }

    /// Sends the request, to another endpoint if the first is not reached.
    async fn send(
        &self,
        backend: &Arc<Backend>,
        parts: &Parts,
        body: &RequestBody,
        host: &HeaderValue,
        options: &RouteOptions,
        seen: &mut Seen,
    ) -> Result<Sent, Refused> {
        let mut tried: Vec<SocketAddr> = Vec::new();
        let retry = options.retry.as_ref();
        let attempts = retry.map_or(ATTEMPTS, |retry| retry.attempts + 1);
        let mut late = false;
        for attempt in 1..=attempts {
            let is_last = attempt == attempts;
            if let Some(retry) = retry.filter(|_| attempt > 1) {
                Box::pin(tokio::time::sleep(backoff(
                    retry.backoff,
                    attempt - 1,
                    rand::random(),
                )))
                .await;
            }
            let pick = |tried: &[SocketAddr]| backend.pick(tried, rand::random(), Instant::now());
            // All failed: the first may have been a connection that was just closing.
            let endpoint = pick(&tried).or_else(|| pick(&[])).ok_or_else(unavailable)?;
            seen.endpoint = Some(endpoint.address);
            if attempt > 1 {
                self.proxy.metrics.retried();
            }
            let mut request = Request::new(body.lend());
            *request.method_mut() = parts.method.clone();
            *request.uri_mut() = parts.uri.clone();
            *request.headers_mut() = parts.headers.clone();
            let sending = upstream::send(&endpoint, backend.protocol, request, host);
            let sent = in_time(sending, body, options.response_timeout).await;
            late = sent.is_none();
            let error = match sent {
                None if retry.is_some() && !is_last && body.is_untouched() => continue,
                None => break,
                Some(Ok(sent)) => {
                    let code = sent.response.status().as_u16();
                    let again = retry.is_some_and(|retry| retry.codes.contains(&code));
                    if again && !is_last && body.is_untouched() {
                        continue;
                    }
                    return Ok(sent);
                }
                Some(Err(error)) => error,
            };
            tracing::debug!(%error, endpoint = %endpoint.address, "a request failed");
            if let Some(status) = body.failed() {
                return Err(Refused {
                    status,
                    text: "the body of the request cannot be read\n",
                    why: None,
                });
            }
            let again = match error {
                SendError::Connect(_) => true,
                // It may have been seen, so it must do no harm to be seen twice.
                SendError::Broken(_) => is_repeatable(&parts.method),
            };
            if !again || !body.is_untouched() {
                break;
            }
            tried.push(endpoint.address);
        }
        Err(if late { too_late() } else { bad_gateway() })
    }

    /// Joins the client with the endpoint in the protocol that both agreed on.
    fn switch(
        self: &Arc<Self>,
        mut response: Response<BackendBody>,
        protocol: HeaderValue,
        near: OnUpgrade,
        far: OnUpgrade,
        pending: PendingUpgrade,
        held: Box<dyn Send + Sync>,
    ) -> Response<ResponseBody> {
        let named = response.headers().get(header::UPGRADE).cloned();
        let headers = response.headers_mut();
        headers::remove_hop_by_hop(headers);
        headers.insert(header::CONNECTION, HeaderValue::from_static("upgrade"));
        headers.insert(header::UPGRADE, named.unwrap_or(protocol));
        pending.accept();
        let (abort, in_use) = (self.proxy.abort.clone(), self.slot.usage.request());
        // The connection counts for as long as there is the tunnel.
        let connection = self.clone();
        self.proxy.tunnels.spawn(async move {
            let _held = (held, in_use, connection);
            tokio::select! {
                ended = tunnel::join(near, far) => {
                    if let Err(error) = ended {
                        tracing::debug!(%error, "a tunnel ended");
                    }
                }
                () = abort.cancelled() => {}
            }
        });
        let (parts, _) = response.into_parts();
        Response::from_parts(parts, ResponseBody::text(""))
    }
}

/// How a request goes on.
enum Chosen {
    Answer(Response<ResponseBody>),
    Send {
        backend: Arc<Backend>,
        options: RouteOptions,
        /// Of Gateway API.
        course: Option<Course>,
    },
}

/// How long to wait before the `number`th retry: twice as long each time, up to ten times the first, less a random
/// part.
fn backoff(base: Option<Duration>, number: usize, chance: f64) -> Duration {
    let base = base.unwrap_or(BACKOFF);
    let factor = 1u32 << number.saturating_sub(1).min(4);
    base.saturating_mul(factor.min(10)).mul_f64(1.0 - chance / 2.0)
}

fn too_late() -> Refused {
    Refused {
        status: StatusCode::GATEWAY_TIMEOUT,
        text: "504 the service does not respond\n",
        why: None,
    }
}

/// What `sending` answers, within `limit` of the last that was read of the client's body.
async fn in_time<F: Future>(sending: F, body: &RequestBody, limit: Option<Duration>) -> Option<F::Output> {
    let mut sending = std::pin::pin!(sending);
    let Some(limit) = limit else {
        return Some(sending.await);
    };
    let began = tokio::time::Instant::now();
    let deadline = || body.last_read().unwrap_or(began).max(began) + limit;
    loop {
        let sent = tokio::time::timeout_at(deadline(), sending.as_mut()).await;
        match sent {
            Ok(sent) => return Some(sent),
            Err(_) if deadline() > tokio::time::Instant::now() => {}
            Err(_) => return None,
        }
    }
}

fn unavailable() -> Refused {
    refused(
        StatusCode::SERVICE_UNAVAILABLE,
        "503 no endpoint of the service is ready\n",
        Refusal::NoEndpoint,
    )
}

fn bad_gateway() -> Refused {
    Refused {
        status: StatusCode::BAD_GATEWAY,
        text: "502 the service gave no response\n",
        why: None,
    }
}

fn text_response(status: StatusCode, text: &'static str) -> Response<ResponseBody> {
    let mut response = Response::new(ResponseBody::text(text));
    *response.status_mut() = status;
    let plain = HeaderValue::from_static("text/plain; charset=utf-8");
    response.headers_mut().insert(header::CONTENT_TYPE, plain);
    response
}

/// Checks what the guard cannot see, and what HTTP/2 says.
fn target(request: &Request<Incoming>) -> Result<Target, Refused> {
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

fn content_length(headers: &HeaderMap) -> Option<u64> {
    headers.get(header::CONTENT_LENGTH)?.to_str().ok()?.parse().ok()
}

fn is_repeatable(method: &Method) -> bool {
    matches!(*method, Method::GET | Method::HEAD | Method::OPTIONS)
}

/// The protocol that a client of HTTP/1.1 wants to go on with. HTTP/2 is not one of them: backends that speak it are
/// spoken to in it.
fn upgrade_protocol(request: &Request<Incoming>) -> Option<HeaderValue> {
    let headers = request.headers();
    let protocol = headers.get(header::UPGRADE)?;
    let wanted = request.version() == Version::HTTP_11
        && headers::has_token(headers, &header::CONNECTION, "upgrade")
        && !headers::has_token(headers, &header::UPGRADE, "h2c");
    wanted.then(|| protocol.clone())
}

/// Makes the client's headers those that the endpoint gets.
fn prepare(parts: &mut Parts, client: Client, target: &Target, protocol: Option<&HeaderValue>) {
    let headers = &mut parts.headers;
    headers::remove_hop_by_hop(headers);
    // The proxy answers it itself.
    headers.remove(header::EXPECT);
    headers::set_forwarded(headers, client, &target.host);
    headers.insert(header::HOST, target.host.clone());
    if !headers.contains_key(&REQUEST_ID) {
        let id = format!("{:032x}", rand::random::<u128>());
        if let Ok(id) = HeaderValue::try_from(id) {
            headers.insert(REQUEST_ID, id);
        }
    }
    if let Some(protocol) = protocol {
        headers.insert(header::CONNECTION, HeaderValue::from_static("upgrade"));
        headers.insert(header::UPGRADE, protocol.clone());
    }
}

fn redirect(request: &Request<Incoming>, name: &str, port: u16) -> Result<Response<ResponseBody>, Refused> {
    let path = request.uri().path_and_query().map_or("/", |path| path.as_str());
    let name = if name.contains(':') {
        format!("[{name}]")
    } else {
        name.to_owned()
    };
    let location = match port {
        443 => format!("https://{name}{path}"),
        port => format!("https://{name}:{port}{path}"),
    };
    let location = HeaderValue::try_from(location).map_err(|_| malformed("400 malformed path\n"))?;
    let mut response = text_response(StatusCode::PERMANENT_REDIRECT, "308 permanent redirect\n");
    response.headers_mut().insert(header::LOCATION, location);
    Ok(response)
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
