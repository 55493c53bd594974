//! What features do to one request and its response, in the order in which nginx' phases do it: redirects and preflights,
//! limits, addresses, who the client is, then the backend.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use http::header::{self, HeaderName};
use http::request::Parts;
use http::{HeaderMap, HeaderValue, Method, Request, Response, StatusCode, Uri};

use super::Features;
use super::basic::{Basic, Credentials};
use super::external::{External, Verdict};
use super::limits::Active;
use super::redirect::to_https;
use super::template::Scope;
use crate::backend::Backend;
use crate::body::{LentBody, ResponseBody};
use crate::headers::{self, Client};
use crate::metrics::Refusal;
use crate::refusal::{Refused, malformed, refused, text_response, unavailable};
use crate::table::Route;
use crate::target::Target;
use crate::upstream::{self, SendError};

const FORWARDED_PREFIX: HeaderName = HeaderName::from_static("x-forwarded-prefix");
/// Endpoints that are asked about a client, if those before were not reached.
const ATTEMPTS: usize = 3;

/// A request, as far as features look at it.
pub struct Asked<'a> {
    pub method: &'a Method,
    pub headers: &'a HeaderMap,
    pub uri: &'a Uri,
    pub target: &'a Target,
    /// The path that routes were compared with.
    pub compared: &'a str,
    pub client: Client,
    /// Where redirects to HTTPS lead; `None`: there are none.
    pub https_port: Option<u16>,
}

impl Asked<'_> {
    fn path_and_query(&self) -> &str {
        self.uri.path_and_query().map_or("/", |path| path.as_str())
    }

    fn scope(&self) -> Scope<'_> {
        Scope {
            tls: self.client.tls,
            host: &self.target.name,
            http_host: self.target.host.to_str().unwrap_or_default(),
            request_uri: self.path_and_query(),
        }
    }
}

pub enum Begun {
    Answer(Box<Response<ResponseBody>>),
    Go(Box<Course>, Arc<Backend>),
}

/// Of one request.
pub struct Course {
    features: Arc<Features>,
    tls: bool,
    /// The rewritten one.
    address: Option<Uri>,
    /// What CORS says of the origin, if that is allowed.
    origin: Option<HeaderValue>,
    /// The endpoint that the client's cookie names, if it is still there.
    pub wanted: Option<SocketAddr>,
    pending: Option<Box<Pending>>,
    /// Of the Service that was asked about the client.
    copied: Vec<(HeaderName, Option<HeaderValue>)>,
    cookie: Option<HeaderValue>,
    active: Option<Active>,
}

/// What is needed to find out who the client is.
struct Pending {
    credentials: Option<Credentials>,
    /// With the host.
    question: Option<(Request<()>, HeaderValue)>,
    host: String,
    http_host: String,
    request_uri: String,
}

/// A redirect to HTTPS.
pub fn https_redirect(asked: &Asked<'_>) -> Result<Option<Response<ResponseBody>>, Refused> {
    let Some(port) = asked.https_port.filter(|_| !asked.client.tls) else {
        return Ok(None);
    };
    let location = to_https(&asked.target.name, port, asked.path_and_query());
    let location = location.ok_or_else(|| malformed("400 malformed path\n"))?;
    let mut response = text_response(StatusCode::PERMANENT_REDIRECT, "308 permanent redirect\n");
    response.headers_mut().insert(header::LOCATION, location);
    Ok(Some(response))
}

/// Decides what can be decided at once.
pub fn begin(features: &Arc<Features>, route: &Route, asked: &Asked<'_>) -> Result<Begun, Refused> {
    if features.closed {
        return Err(refused(
            StatusCode::SERVICE_UNAVAILABLE,
            "503 the configuration of this address cannot be enforced\n",
            Refusal::Closed,
        ));
    }
    if let Some(redirect) = &features.redirect {
        let location = redirect.location(asked.scope());
        let location = location.ok_or_else(|| malformed("400 malformed path\n"))?;
        let mut response = text_response(redirect.status(), "redirected\n");
        response.headers_mut().insert(header::LOCATION, location);
        return Ok(Begun::Answer(Box::new(response)));
    }
    let allowed = features.cors.as_ref().and_then(|cors| cors.allow(asked.headers));
    if let Some(headers) = allowed
        .as_ref()
        .and_then(|allowed| allowed.preflight(asked.method))
    {
        let mut response = Response::new(ResponseBody::text(""));
        *response.status_mut() = StatusCode::NO_CONTENT;
        *response.headers_mut() = headers;
        return Ok(Begun::Answer(Box::new(response)));
    }
    let origin = allowed.map(|allowed| allowed.origin);
    if route.options.redirect_to_https
        && let Some(response) = https_redirect(asked)?
    {
        return Ok(Begun::Answer(Box::new(response)));
    }
    let address = asked.client.address;
    let active = match &features.limits {
        None => None,
        Some(limits) => limits.enter(address, Instant::now()).map_err(|_| {
            let text = "503 too many requests of one client\n";
            refused(StatusCode::SERVICE_UNAVAILABLE, text, Refusal::ClientRate)
        })?,
    };
    let mut course = Course {
        features: features.clone(),
        tls: asked.client.tls,
        address: None,
        origin,
        wanted: None,
        pending: None,
        copied: Vec::new(),
        cookie: None,
        active,
    };
    if features
        .ranges
        .as_ref()
        .is_some_and(|ranges| !ranges.allows(address))
    {
        let response = course.deny(StatusCode::FORBIDDEN, HeaderMap::new());
        return Ok(Begun::Answer(response));
    }
    if let (Some(rewrite), Some(regex)) = (&features.rewrite, route.path.regex()) {
        let apply = |path: &str| rewrite.apply(regex, path, asked.uri.query());
        let rewritten = match regex.is_match(&asked.target.path) {
            true => apply(&asked.target.path),
            // It is one without its slashes that are too many.
            false => apply(asked.compared),
        };
        let rewritten = rewritten.ok_or_else(|| malformed("400 malformed path\n"))?;
        course.address = Some(rewritten.into());
    }
    course.pending = course.pending(asked)?;
    let backend = course.choose(route, asked.headers).ok_or_else(unavailable)?;
    Ok(Begun::Go(Box::new(course), backend))
}

impl Course {
    /// The backend: the route's or its canary's.
    fn choose(&mut self, route: &Route, headers: &HeaderMap) -> Option<Arc<Backend>> {
        let Features { affinity, canary, .. } = &*self.features;
        let shown = affinity
            .as_ref()
            .and_then(|affinity| Some((affinity, affinity.shown(headers)?)));
        let wanted = |backend: &Option<Arc<Backend>>| {
            let (affinity, shown) = shown?;
            backend.as_ref()?.find(|address| affinity.token(address) == shown)
        };
        let of_route = wanted(&route.backend);
        let Some(canary) = canary else {
            self.wanted = of_route;
            return route.backend.clone();
        };
        let of_canary = wanted(&canary.backend);
        let keeps = affinity
            .as_ref()
            .is_some_and(|affinity| affinity.spec.keeps_canary);
        let takes = match (of_route, of_canary) {
            (Some(_), _) if keeps => false,
            (None, Some(_)) if keeps => true,
            _ => canary.takes(headers, rand::random()),
        };
        let (wanted, backend) = match takes {
            true => (of_canary, &canary.backend),
            false => (of_route, &route.backend),
        };
        self.wanted = wanted;
        backend.clone()
    }

    fn pending(&self, asked: &Asked<'_>) -> Result<Option<Box<Pending>>, Refused> {
        let Features { basic, external, .. } = &*self.features;
        if basic.is_none() && external.is_none() {
            return Ok(None);
        }
        let scope = asked.scope();
        let question = match external {
            None => None,
            Some(external) => {
                let question = external.question(asked.method, asked.headers, asked.client, scope);
                Some(question.ok_or_else(|| malformed("400 malformed request\n"))?)
            }
        };
        Ok(Some(Box::new(Pending {
            credentials: basic.as_ref().and_then(|_| Credentials::of(asked.headers)),
            question,
            host: scope.host.to_owned(),
            http_host: scope.http_host.to_owned(),
            request_uri: scope.request_uri.to_owned(),
        })))
    }

    /// Whether it is not yet known if the client may.
    pub fn is_pending(&self) -> bool {
        self.pending.is_some()
    }

    /// Finds out whether the client may. All that the Ingress asks for must be there.
    pub async fn authenticate(
        &mut self,
        connect: Duration,
        timeout: Option<Duration>,
    ) -> Result<(), Box<Response<ResponseBody>>> {
        let Some(pending) = self.pending.take() else {
            return Ok(());
        };
        let pending = *pending;
        let features = self.features.clone();
        if let Some(basic) = &features.basic {
            self.check(basic, pending.credentials).await?;
        }
        if let (Some(external), Some((question, host))) = (&features.external, pending.question) {
            let scope = Scope {
                tls: self.tls,
                host: &pending.host,
                http_host: &pending.http_host,
                request_uri: &pending.request_uri,
            };
            let asking = ask(external, question, &host, connect);
            let answer = match timeout {
                Some(timeout) => tokio::time::timeout(timeout, asking).await.ok().flatten(),
                None => asking.await,
            };
            let Some((status, headers)) = answer else {
                return Err(self.deny(StatusCode::INTERNAL_SERVER_ERROR, HeaderMap::new()));
            };
            match external.verdict(status, &headers, scope) {
                Verdict::Allowed { headers, cookie } => {
                    self.copied = headers;
                    self.cookie = cookie;
                }
                Verdict::Denied { status, headers } => return Err(self.deny(status, headers)),
            }
        }
        Ok(())
    }

    async fn check(
        &self,
        basic: &Basic,
        credentials: Option<Credentials>,
    ) -> Result<(), Box<Response<ResponseBody>>> {
        let right = match credentials {
            None => Some(false),
            Some(credentials) => basic.users.verify(credentials).await,
        };
        match right {
            Some(true) => Ok(()),
            Some(false) => {
                let challenge = (header::WWW_AUTHENTICATE, basic.challenge.clone());
                Err(self.deny(StatusCode::UNAUTHORIZED, HeaderMap::from_iter([challenge])))
            }
            None => Err(self.deny(StatusCode::SERVICE_UNAVAILABLE, HeaderMap::new())),
        }
    }

    pub fn take_active(&mut self) -> Option<Active> {
        self.active.take()
    }

    fn deny(&self, status: StatusCode, headers: HeaderMap) -> Box<Response<ResponseBody>> {
        let text = match status {
            StatusCode::UNAUTHORIZED => "401 authentication is required\n",
            StatusCode::FORBIDDEN => "403 access is denied\n",
            StatusCode::FOUND => "redirected\n",
            _ => "the client could not be authenticated\n",
        };
        let mut response = text_response(status, text);
        response.headers_mut().extend(headers);
        self.say_origin(response.headers_mut());
        Box::new(response)
    }

    fn say_origin(&self, headers: &mut HeaderMap) {
        if let (Some(cors), Some(origin)) = (&self.features.cors, &self.origin) {
            cors.respond(origin, headers);
        }
    }

    /// Changes what is sent on.
    pub fn edit_request(&self, parts: &mut Parts) {
        let Features {
            basic, host, prefix, ..
        } = &*self.features;
        if let Some(address) = &self.address {
            parts.uri = address.clone();
        }
        if basic.is_some() {
            parts.headers.remove(header::AUTHORIZATION);
        }
        for (name, value) in &self.copied {
            // Nobody but the Service says it.
            headers::remove_all(&mut parts.headers, name);
            if let Some(value) = value {
                parts.headers.insert(name, value.clone());
            }
        }
        for (name, value) in [(header::HOST, host), (FORWARDED_PREFIX, prefix)] {
            if let Some(value) = value {
                headers::remove_all(&mut parts.headers, &name);
                parts.headers.insert(name, value.clone());
            }
        }
    }

    /// Changes what the client gets. `endpoint` answered.
    pub fn edit_response(&self, status: StatusCode, headers: &mut HeaderMap, endpoint: Option<SocketAddr>) {
        if let (Some(affinity), Some(endpoint)) = (&self.features.affinity, endpoint) {
            let cookie = affinity.set_cookie(self.wanted, endpoint, self.tls, jiff::Timestamp::now());
            headers.extend(cookie.map(|cookie| (header::SET_COOKIE, cookie)));
        }
        if let (Some(external), Some(cookie)) = (&self.features.external, &self.cookie)
            && external.shows_cookie(status)
        {
            headers.append(header::SET_COOKIE, cookie.clone());
        }
        self.say_origin(headers);
    }
}

/// Asks the Service about a client; `None`: it cannot be asked.
async fn ask(
    external: &External,
    question: Request<()>,
    host: &HeaderValue,
    connect: Duration,
) -> Option<(StatusCode, HeaderMap)> {
    let backend = &external.backend;
    let _entered = backend.enter()?;
    let mut tried: Vec<SocketAddr> = Vec::new();
    while tried.len() < ATTEMPTS {
        let endpoint = backend.pick(&tried, rand::random(), Instant::now())?;
        let request = question.clone().map(|()| LentBody::empty());
        match upstream::send(&endpoint, backend.protocol, request, host, connect).await {
            Ok(sent) => {
                let (parts, _) = sent.response.into_parts();
                return Some((parts.status, parts.headers));
            }
            Err(error) => {
                tracing::debug!(%error, endpoint = %endpoint.address, "a client could not be asked about");
                if !matches!(error, SendError::Connect(_)) && tried.len() > 1 {
                    return None;
                }
            }
        }
        tried.push(endpoint.address);
    }
    None
}
