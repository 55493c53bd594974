//! One request: found a route, sent to an endpoint of its backend, and its response handed back. Only backends of the
//! table are ever dialled.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use arc_swap::ArcSwap;
use http::header::{self, HeaderName};
use http::request::Parts;
use http::{HeaderMap, HeaderValue, Request, Response, StatusCode, Version};
use hyper::body::Incoming;
use hyper::upgrade::OnUpgrade;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::backend::{Backend, Protocol};
use crate::body::{RequestBody, ResponseBody, Stall};
use crate::connections::Slot;
use crate::course::Course;
use crate::features;
use crate::features::course::{Asked, Begun, https_redirect};
use crate::gateway::cors::Cors;
use crate::gateway::filters::Redirected;
use crate::gateway::hosts::Host;
use crate::gateway::request::{Course as GatewayCourse, host_of};
use crate::gateway::table::{Entry, Found, GatewayTable, ListenAddress, RequestHead};
use crate::guard::{PendingUpgrade, Upgrade};
use crate::headers::{self, Client};
use crate::http1::BackendBody;
use crate::metrics::{Connected, Metrics, Refusal};
use crate::refusal::{Refused, bad_gateway, malformed, refused, text_response, too_late, unavailable};
use crate::send::{Outgoing, send};
use crate::table::{RouteOptions, RouteTable, compared};
use crate::target::{Target, target};
use crate::tunnel;
use crate::upstream::{self, CONNECT_TIMEOUT, Sent};

/// Of a request's path, in bytes: it may be compared with many expressions.
const MAX_PATH: usize = 4096;
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
        let mut course = course;
        if let Some(Course::Ingress(course)) = &mut course
            && course.is_pending()
        {
            let asked =
                Box::pin(course.authenticate(options.connect_timeout, options.response_timeout)).await;
            if let Err(denied) = asked {
                return Ok((*denied, Box::new(course.take_active())));
            }
        }
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
            for mirror in course.mirrors() {
                self.mirror(mirror, &parts, &body, &host);
            }
        }
        let deadline = options.request_timeout;
        let deadline = deadline.map(|limit| tokio::time::Instant::now() + limit);
        let outgoing = Outgoing {
            backend: &backend,
            parts: &parts,
            body: &body,
            host: &host,
            options: &options,
            wanted: course.as_ref().and_then(Course::wanted),
        };
        let sending = send(outgoing, &self.proxy.metrics, &mut seen.endpoint);
        let sent = match deadline {
            None => sending.await?,
            Some(deadline) => match tokio::time::timeout_at(deadline, sending).await {
                Ok(sent) => sent?,
                Err(_) => return Err(too_late()),
            },
        };
        let Sent { mut response, stream } = sent;
        let active = course.as_mut().and_then(Course::take_active);
        let held = Box::new((entered, stream, active));
        let status = response.status();
        if status == StatusCode::SWITCHING_PROTOCOLS {
            let (Some(protocol), Some(near), Some(pending)) = (protocol, near, pending) else {
                return Err(bad_gateway());
            };
            let far = hyper::upgrade::on(&mut response);
            let sides = Sides {
                near,
                far,
                silence: options.silence,
            };
            let mut response = self.switch(response, protocol, sides, pending, held);
            if let Some(course) = &course {
                course.edit_response(status, response.headers_mut(), seen.endpoint);
            }
            return Ok((response, Box::new(())));
        }
        headers::remove_hop_by_hop(response.headers_mut());
        if let Some(course) = &course {
            course.edit_response(status, response.headers_mut(), seen.endpoint);
        }
        *response.version_mut() = parts.version;
        let body = |incoming| {
            ResponseBody::backend(incoming)
                .silent_for(options.silence)
                .until(deadline)
        };
        Ok((response.map(body), held))
    }

    /// Finds the route, and the backend that it leads to.
    fn choose(&self, request: &Request<Incoming>, target: &Target) -> Result<Chosen, Refused> {
        if target.path.len() > MAX_PATH {
            return Err(refused(
                StatusCode::URI_TOO_LONG,
                "414 the path is too long\n",
                Refusal::Malformed,
            ));
        }
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
        let path = compared(&target.path).ok_or_else(|| malformed("400 malformed path\n"))?;
        let route = table.find(&target.name, &path).filter(|_| self.is_ingress);
        let Some(route) = route else {
            return Err(refused(
                StatusCode::NOT_FOUND,
                "404 page not found\n",
                Refusal::NoRoute,
            ));
        };
        let asked = Asked {
            method: request.method(),
            headers: request.headers(),
            uri: request.uri(),
            target,
            compared: &path,
            client: self.client,
            https_port: self.proxy.https_port,
        };
        if let Some(features) = &route.options.features {
            return Ok(match features::course::begin(features, route, &asked)? {
                Begun::Answer(response) => Chosen::Answer(*response),
                Begun::Go(course, backend) => Chosen::Send {
                    backend,
                    options: route.options.clone(),
                    course: Some(Course::Ingress(course)),
                },
            });
        }
        if route.options.redirect_to_https
            && let Some(response) = https_redirect(&asked)?
        {
            return Ok(Chosen::Answer(response));
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
        let Some((course, backend)) = GatewayCourse::new(entry, rand::random(), request.headers()) else {
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
            course: Some(Course::Gateway(course)),
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
            let sending = upstream::send(&endpoint, backend.protocol, request, &host, CONNECT_TIMEOUT);
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

    /// Joins the client with the endpoint in the protocol that both agreed on.
    fn switch(
        self: &Arc<Self>,
        mut response: Response<BackendBody>,
        protocol: HeaderValue,
        sides: Sides,
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
                ended = tunnel::join(sides.near, sides.far, sides.silence) => {
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

/// Of a tunnel.
struct Sides {
    near: OnUpgrade,
    far: OnUpgrade,
    silence: Option<Duration>,
}

/// How a request goes on.
enum Chosen {
    Answer(Response<ResponseBody>),
    Send {
        backend: Arc<Backend>,
        options: RouteOptions,
        course: Option<Course>,
    },
}

fn content_length(headers: &HeaderMap) -> Option<u64> {
    headers.get(header::CONTENT_LENGTH)?.to_str().ok()?.parse().ok()
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
    headers::join_cookies(headers);
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
