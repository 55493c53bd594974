//! The filter chain of the API server, in order: authentication, audit, impersonation, priority and fairness,
//! authorization, and then the verb, which decodes, defaults, admits, prepares, validates and stores.
//! Each filter records its duration in the mark of the request.

use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures::FutureExt;
use http::{HeaderValue, Request, header, request::Parts};
use parking_lot::Mutex;
use serde_json::Value;
use skiff_auth::{Attributes, Decision, Impersonated, OwnedAttributes, Peer, TokenNote, UserInfo};
use skiff_meta::{GroupResource, Status};
use skiff_registry::fields::Tracking;
use skiff_registry::{Context, now_us, object};
use skiff_trace::{Mark, Stage, behind_us, read_headers};

use crate::audit::{self, Stage as AuditStage, Trail};
use crate::body::{self, Answer, Body};
use crate::connections::Deadline;
use crate::held::HEAD_BUDGET;
use crate::hooks::node_graph;
use crate::metrics::{RequestLabels, Served, Took};
use crate::negotiate::{self, Offer, Output};
use crate::query::{Query, WriteOptions};
use crate::request_info::RequestInfo;
use crate::server::Inner;
use crate::{aggregation, flow, held, paths, resource_paths, respond, warnings};

/// A request that is not a watch or a connection ends after this, as upstream's `--request-timeout`.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(60);

/// Who is at the other end.
pub enum Identity {
    /// A client in this process.
    Fixed(Arc<UserInfo>),
    /// A connection, and the certificates that it showed.
    Peer(Option<Arc<Peer>>),
}

/// One request on its way through the gates.
pub struct Exchange {
    pub parts: Parts,
    pub info: RequestInfo,
    pub query: Query,
    pub user: Arc<UserInfo>,
    pub context: Context,
    /// The kind is known at run time only: its objects have no protobuf form.
    pub untyped: bool,
    /// The resource and subresource that it was routed to: what the metrics name. None until it is known to exist
    /// and the user is known to be allowed to ask for it.
    pub served: Option<Served>,
    /// Another server answers it.
    pub proxied: bool,
    /// The object that a write made, for the mark.
    pub made: Option<Made>,
    /// What priority and fairness took the request for.
    pub classified: Option<flow::Classified>,
    /// What the audit log will know of it; none: nothing.
    pub trail: Option<Box<Trail>>,
}

/// What the mark says of a written object.
#[derive(Default)]
pub struct Made {
    pub namespace: String,
    pub name: String,
    pub uid: String,
    pub resource_version: String,
}

impl Exchange {
    pub fn header(&self, name: header::HeaderName) -> &str {
        self.parts
            .headers
            .get(name)
            .and_then(|value| value.to_str().ok())
            .unwrap_or("")
    }

    /// The form of the answer that the client wants.
    pub fn output(&self, stream: bool) -> Result<Output, Status> {
        let accept = self.header(header::ACCEPT);
        let listing = matches!(self.info.verb.as_str(), "list" | "watch");
        // The list of groups, and each group, is upstream's aggregator's, which has no router; nor have custom resources.
        let path = self.info.path.trim_end_matches('/');
        let group = path
            .strip_prefix("/apis")
            .is_some_and(|rest| rest.matches('/').count() < 2);
        if !group && !self.untyped {
            negotiate::routed(accept, self.info.is_resource && listing).map_err(not_routed)?;
        }
        let pretty = negotiate::pretty(self.query.get("pretty"), self.header(header::USER_AGENT));
        let mut offer = Offer::All;
        if !self.info.is_resource {
            offer = Offer::Whole;
        } else if self.untyped {
            offer = Offer::Untyped;
        }
        negotiate::output(accept, pretty, stream, offer).map_err(Status::not_acceptable)
    }

    /// The form of a `Status`. It is no object of the kind, so it can be had in every form, but not as a
    /// table or as metadata.
    pub fn status_output(&self) -> Option<Output> {
        let pretty = negotiate::pretty(self.query.get("pretty"), self.header(header::USER_AGENT));
        negotiate::output(self.header(header::ACCEPT), pretty, false, Offer::Whole).ok()
    }

    /// Takes over what the options of a write say about how it is done, and by whom.
    pub fn write_as(&mut self, options: &WriteOptions) {
        self.context.dry_run = options.dry_run;
        self.context.tracking = Tracking::Update {
            manager: self.manager(options),
            subresource: self.info.subresource.clone(),
        };
    }

    /// Who owns what a write sets: as the client says, or else what it calls itself.
    pub fn manager(&self, options: &WriteOptions) -> String {
        if !options.field_manager.is_empty() {
            return options.field_manager.clone();
        }
        manager_of_agent(self.header(header::USER_AGENT))
    }

    pub fn made(&mut self, object: &Value) {
        self.made = Some(Made {
            namespace: object::namespace(object).to_string(),
            name: object::name(object).to_string(),
            uid: object::uid(object).to_string(),
            resource_version: object::resource_version(object).to_string(),
        });
    }
}

impl Inner {
    /// Answers one request. Never fails and never panics: what goes wrong inside is a `Status`.
    pub async fn handle(self: &Arc<Self>, request: Request<Body>, identity: Identity) -> Answer {
        let (start_us, began) = (now_us(), Instant::now());
        let (parts, request_body) = request.into_parts();
        let mut head = HEAD_BUDGET.share();
        if !head.grow(held::head_bytes(&parts)) {
            return flow::come_back();
        }
        let uri_query = parts.uri.query().unwrap_or("");
        let info = RequestInfo::parse(&parts.method, parts.uri.path(), uri_query);
        let query = Query::parse(uri_query);
        let audit_id = audit_id(&parts);
        let (info, broken_path) = match info {
            Ok(info) => (info, None),
            Err(message) => (RequestInfo::default(), Some(message)),
        };
        let mut exchange = Exchange {
            parts,
            info,
            query,
            user: self.anonymous.clone(),
            context: Context::default(),
            untyped: false,
            served: None,
            proxied: false,
            made: None,
            classified: None,
            trail: None,
        };
        let mut panicked = None;
        let result = match broken_path {
            Some(message) => {
                // COMPAT: without request info no later filter can respond; upstream answers in plain text.
                let path = exchange.parts.uri.path();
                let text =
                    format!("Internal Server Error: {path:?}: failed to create RequestInfo: {message}\n");
                Ok(body::text(http::StatusCode::INTERNAL_SERVER_ERROR, text))
            }
            None => {
                let gates = self.gates(&mut exchange, request_body, identity, &audit_id, began);
                let gates = AssertUnwindSafe(gates);
                gates.catch_unwind().await.unwrap_or_else(|panic| {
                    let text = skiff_supervise::panic_text(panic.as_ref());
                    tracing::error!(panic = text, "a request panicked");
                    panicked = Some(text.to_owned());
                    self.metrics.terminated(&RequestLabels::of(&exchange), 500);
                    Err(Status::internal(
                        "this request caused apiserver to panic. Look in the logs for details",
                    ))
                })
            }
        };
        let (mut answer, failure) = match result {
            Ok(answer) => (answer, None),
            Err(status) => (respond::status(&exchange, &status), Some(status)),
        };
        if !exchange.info.long_running()
            && let Some(deadline) = exchange.parts.extensions.get::<Arc<Deadline>>()
        {
            deadline.start();
        }
        if exchange.parts.method == http::Method::HEAD {
            *answer.body_mut() = body::full("");
        }
        self.finish(&mut answer, &exchange, &audit_id, start_us, began);
        if let Some(trail) = exchange.trail.take() {
            audit::finish(
                trail,
                &exchange,
                &mut answer,
                failure.as_ref(),
                panicked.as_deref(),
            )
            .boxed()
            .await;
        }
        answer
    }

    async fn gates(
        self: &Arc<Self>,
        exchange: &mut Exchange,
        request_body: Body,
        identity: Identity,
        audit_id: &str,
        began: Instant,
    ) -> Result<Answer, Status> {
        let long_running = exchange.info.long_running();
        let mut timeout = REQUEST_TIMEOUT;
        if !long_running && let Some(wanted) = wanted_timeout(&exchange.query)? {
            timeout = timeout.min(wanted);
        }

        let _in_flight = (!long_running).then(|| self.metrics.in_flight(exchange.info.mutating()));

        // Authentication.
        let mut notes = Vec::new();
        let found = {
            let _stage = exchange.context.stage("authn");
            let (parts, authenticator) = (&exchange.parts, &self.authenticator);
            match identity {
                Identity::Fixed(user) => Ok(user),
                Identity::Peer(peer) => match authenticator.by_connection(parts, peer.as_deref()) {
                    Ok(Some(user)) => {
                        self.metrics.client_certificate(peer.as_deref());
                        Ok(user)
                    }
                    Ok(None) => {
                        if skiff_auth::space_before_token(&parts.headers) {
                            let why = "the provided Authorization header contains extra space before the bearer token, and is ignored";
                            exchange.context.warn(why.to_string());
                        }
                        authenticator.by_token(parts, None, &mut notes).boxed().await
                    }
                    Err(refused) => {
                        let by_token = authenticator.by_token(parts, Some(refused), &mut notes);
                        by_token.boxed().await
                    }
                },
            }
        };
        let user = match found {
            Ok(user) => user,
            Err(error) => {
                tracing::debug!(%error, path = exchange.info.path, "unauthenticated");
                let trail = self.audit.as_ref().and_then(|auditor| {
                    let nobody = Arc::new(UserInfo::default());
                    auditor.begin(exchange, &nobody, &attributes_of(&exchange.info), audit_id)
                });
                if trail.is_some() {
                    exchange.context.audit();
                }
                self.tell_of_token(&exchange.context, &notes);
                if let Some(trail) = trail {
                    trail.refused(&exchange.context, &Status::unauthorized()).await;
                }
                return Err(Status::unauthorized());
            }
        };

        // Audit: RequestReceived is recorded before anything else happens.
        let auditor = self.audit.as_ref();
        let trail = auditor
            .and_then(|auditor| auditor.begin(exchange, &user, &attributes_of(&exchange.info), audit_id));
        if trail.is_some() {
            exchange.context.audit();
        }
        self.tell_of_token(&exchange.context, &notes);
        if let Some(trail) = trail {
            if !trail.record(AuditStage::RequestReceived, &exchange.context).await {
                return Err(Status::internal("failed to store audit event"));
            }
            exchange.trail = Some(trail);
        }

        // Impersonation: the authenticated user must be allowed to impersonate each part of the requested identity.
        exchange.user = match self.impersonate(exchange, &user).await {
            Ok(None) => user,
            Ok(Some(Impersonated { user, constraint })) => {
                let user = Arc::new(user);
                if let Some(trail) = &exchange.trail {
                    trail.impersonated(&user, constraint);
                }
                user
            }
            Err(status) => return Ok(unsniffed(exchange, &status)),
        };

        // Priority and fairness: a bounded number of requests executes at a time, the others queue fairly. A watch
        // holds a seat until it is initialized.
        let _seat = if long_running && exchange.info.verb != "watch" {
            None
        } else {
            let _stage = exchange.context.stage("flow");
            let admitted = self
                .flow
                .admit(&exchange.user, &exchange.info, &mut exchange.classified);
            match admitted.await {
                Ok(seat) => seat,
                Err(answer) => return Ok(answer),
            }
        };

        // Authorization.
        {
            let _stage = exchange.context.stage("authz");
            let mut decided = self.decide(exchange).await;
            // The node authorizer's graph may not have a pod yet that was bound a moment ago.
            if !decided.allowed && node_graph::refresh(self, exchange).await {
                decided = self.decide(exchange).await;
            }
            self.annotate_decision(exchange, &decided);
            if !decided.allowed {
                if let Some(error) = decided.error {
                    let asked = exchange.parts.uri.path_and_query();
                    let asked = asked.map_or("/", http::uri::PathAndQuery::as_str);
                    let text = escaped(&format!("Internal Server Error: {asked:?}: {error}\n"));
                    return Ok(body::text(http::StatusCode::INTERNAL_SERVER_ERROR, text));
                }
                let status = forbidden(&exchange.user, &attributes_of(&exchange.info), &decided.reason);
                return Ok(unsniffed(exchange, &status));
            }
        }

        // The verb itself.
        let remote = self.aggregator.find_path(&exchange.info.path);
        exchange.proxied = remote.is_some();
        let routed = async {
            if let Some(remote) = remote {
                let proxied = aggregation::proxy(self, exchange, &remote, audit_id, request_body);
                Ok(proxied.boxed().await)
            } else if exchange.info.is_resource {
                resource_paths::route(self, exchange, request_body).await
            } else {
                paths::route(self, exchange, request_body).await
            }
        };
        if long_running {
            return routed.await;
        }
        match tokio::time::timeout_at((began + timeout).into(), routed).await {
            Ok(result) => result,
            Err(_) => {
                self.metrics.terminated(&RequestLabels::of(exchange), 504);
                Err(Status::timeout(
                    "request did not complete within the allotted timeout",
                    0,
                ))
            }
        }
    }

    async fn impersonate(
        &self,
        exchange: &Exchange,
        user: &UserInfo,
    ) -> Result<Option<Impersonated>, Status> {
        let wanted = match skiff_auth::requested_impersonation(&exchange.parts.headers) {
            Ok(None) => return Ok(None),
            Ok(Some(wanted)) => wanted,
            Err(message) => return Err(Status::bad_request(message)),
        };
        // Decisions that need a webhook are requested between two passes; the second pass finds them in `told`.
        let mut told: Vec<(OwnedAttributes, Decision)> = Vec::new();
        let until = tokio::time::Instant::now() + AUTHORIZATION_TIMEOUT;
        loop {
            let unknown: Mutex<Option<OwnedAttributes>> = Mutex::default();
            let check = |attributes: &Attributes<'_>, refused: Option<&str>| {
                if let Some(why) = refused {
                    return Err(forbidden(user, attributes, why));
                }
                let known = self.authorizer.known(user, attributes).or_else(|| {
                    let mut told = told.iter();
                    let same = told.find(|(asked, _)| asked.view() == *attributes);
                    same.map(|(_, decision)| decision.clone())
                });
                match known {
                    Some(decision) if decision.allowed => Ok(()),
                    Some(decision) => {
                        let failed = decision.error.as_deref().filter(|_| decision.reason.is_empty());
                        Err(forbidden(user, attributes, failed.unwrap_or(&decision.reason)))
                    }
                    None => {
                        unknown.lock().get_or_insert_with(|| attributes.to_owned());
                        Err(forbidden(user, attributes, ""))
                    }
                }
            };
            let found = wanted.authorize(user, &attributes_of(&exchange.info), &self.impersonations, check);
            let Some(asked) = unknown.into_inner() else {
                return found.map(Some);
            };
            let view = asked.view();
            let decision = self.authorizer.decide(user, &view, false);
            let decision = in_time(until, decision.boxed()).await;
            told.push((asked, decision));
        }
    }

    /// Tells of the use of a service account's token: in metrics, to the client, and to the audit log.
    pub fn tell_of_token(&self, context: &Context, notes: &[TokenNote]) {
        for note in notes {
            self.metrics.token(note);
            if let Some(text) = note.warning() {
                context.warn(text.to_owned());
            }
            if let Some((key, value)) = note.annotation() {
                context.annotate(key, value);
            }
        }
    }

    /// Adds the authorization decision and its reason to the audit event.
    fn annotate_decision(&self, exchange: &Exchange, decided: &Decision) {
        if !exchange.context.audited() {
            return;
        }
        let annotate = |key: &str, value: &str| {
            let key = format!("authorization.k8s.io/{key}");
            exchange.context.annotate(&key, value.to_owned());
        };
        if decided.error.is_some() && !decided.allowed {
            annotate("reason", "internal error");
            return;
        }
        annotate("decision", if decided.allowed { "allow" } else { "forbid" });
        annotate("reason", &decided.reason);
    }

    async fn decide(&self, exchange: &Exchange) -> Decision {
        self.decide_verb(exchange, &exchange.info.verb).await
    }

    /// The authorizers' decision on `verb` with the attributes of the request. It completes at once unless a webhook must
    /// be called; the reason is formatted only for an audited request.
    pub async fn decide_verb(&self, exchange: &Exchange, verb: &str) -> Decision {
        let attributes = Attributes {
            verb,
            ..attributes_of(&exchange.info)
        };
        let audited = exchange.context.audited();
        if !audited && let Some(decision) = self.authorizer.known(&exchange.user, &attributes) {
            return decision;
        }
        let decided = self.authorizer.decide(&exchange.user, &attributes, audited);
        in_time(
            tokio::time::Instant::now() + AUTHORIZATION_TIMEOUT,
            decided.boxed(),
        )
        .await
    }

    /// Authorizes `verb` in addition to the verb of the request, which is authorized already.
    // COMPAT: upstream's message is the shorter one here, without the attributes.
    pub async fn ensure_verb(&self, exchange: &Exchange, verb: &str) -> Result<(), Status> {
        if exchange.info.verb == verb {
            return Ok(());
        }
        let attributes = Attributes {
            verb,
            ..attributes_of(&exchange.info)
        };
        let asked = self.authorizer.decide(&exchange.user, &attributes, false);
        let decided = in_time(tokio::time::Instant::now() + AUTHORIZATION_TIMEOUT, asked.boxed()).await;
        if decided.allowed {
            return Ok(());
        }
        Err(Status::forbidden(
            &GroupResource::new(attributes.group, attributes.resource),
            attributes.name,
            decided.reason,
        ))
    }

    /// Whether the user may do `verb` with what the request names.
    pub fn authorize_verb(&self, exchange: &Exchange, verb: &str) -> Result<(), Status> {
        let attributes = Attributes {
            verb,
            ..attributes_of(&exchange.info)
        };
        let decision = self.authorizer.authorize(&exchange.user, &attributes);
        if decision.allowed {
            Ok(())
        } else {
            Err(forbidden(&exchange.user, &attributes, &decision.reason))
        }
    }

    /// The headers that every answer has, the metrics, and the mark of a write.
    fn finish(
        &self,
        answer: &mut Answer,
        exchange: &Exchange,
        audit_id: &str,
        start_us: u64,
        began: Instant,
    ) {
        let code = answer.status().as_u16();
        let headers = answer.headers_mut();
        if let Ok(value) = HeaderValue::from_str(audit_id) {
            headers.insert("audit-id", value);
        }
        // A path that nobody could read passed none of the filters.
        if !exchange.info.path.is_empty() {
            headers
                .entry(header::CACHE_CONTROL)
                .or_insert(HeaderValue::from_static("no-cache, private"));
        }
        warnings::write(exchange.context.warnings(), headers);
        if let Some(classified) = &exchange.classified {
            classified.mark(answer);
        }
        let elapsed = began.elapsed();
        let long_running = exchange.info.long_running();
        let took = (!long_running).then(|| Took::new(elapsed, exchange));
        self.metrics.request(&RequestLabels::of(exchange), code, took);
        if !exchange.info.is_resource || !exchange.info.mutating() || exchange.info.long_running() {
            return;
        }
        let (cause, client_stages) = read_headers(&exchange.parts.headers);
        let info = &exchange.info;
        let resource = GroupResource::new(info.group.as_str(), info.resource.as_str()).to_string();
        let made = exchange.made.as_ref();
        self.recorder.record(Mark {
            start_us: start_us as i64,
            dur_us: elapsed.as_micros() as i64,
            user: exchange.user.name.clone(),
            verb: info.verb.clone(),
            resource,
            subresource: info.subresource.clone(),
            namespace: made.map_or_else(|| info.namespace.clone(), |made| made.namespace.clone()),
            name: made.map_or_else(|| info.name.clone(), |made| made.name.clone()),
            uid: made.map(|made| made.uid.clone()).unwrap_or_default(),
            resource_version: made.map(|made| made.resource_version.clone()).unwrap_or_default(),
            code,
            cause,
            client_stages,
            behind_us: behind_us(&exchange.parts.headers, start_us as i64),
            server: String::new(),
            stages: exchange
                .context
                .stages()
                .into_iter()
                .map(|stage| Stage {
                    name: stage.name.to_string(),
                    start_us: stage.start_us as i64,
                    dur_us: stage.dur_us as i64,
                })
                .collect(),
        });
    }
}

fn attributes_of(info: &RequestInfo) -> Attributes<'_> {
    Attributes {
        verb: &info.verb,
        is_resource: info.is_resource,
        group: &info.group,
        version: &info.version,
        resource: &info.resource,
        subresource: &info.subresource,
        namespace: &info.namespace,
        name: &info.name,
        path: &info.path,
        field_selector: &info.field_selector,
        label_selector: &info.label_selector,
    }
}

/// How long the client wants to wait at most.
fn wanted_timeout(query: &Query) -> Result<Option<Duration>, Status> {
    let text = query.text("timeout");
    if text.is_empty() {
        return Ok(None);
    }
    let nanoseconds = skiff_meta::duration::parse(text).map_err(|error| {
        Status::bad_request(format!("invalid timeout specified in the request URL - {error}"))
    })?;
    let wanted = u64::try_from(nanoseconds).unwrap_or(0);
    Ok((wanted > 0).then(|| Duration::from_nanos(wanted)))
}

/// A response that quotes the client's input: no browser may take it for a page.
fn unsniffed(exchange: &Exchange, status: &Status) -> Answer {
    let mut answer = respond::status(exchange, status);
    answer
        .headers_mut()
        .insert("x-content-type-options", HeaderValue::from_static("nosniff"));
    answer
}

/// The longest name of a manager.
const MANAGER_MAX: usize = 128;

/// The part of a user agent before the first slash, as far as it can be printed.
fn manager_of_agent(agent: &str) -> String {
    let mut name = String::new();
    let first = agent.split('/').next().unwrap_or_default();
    for char in first.chars().filter(|char| !char.is_control()) {
        if name.len() + char.len_utf8() > MANAGER_MAX {
            break;
        }
        name.push(char);
    }
    name
}

/// The 406 of upstream's router.
pub fn not_routed(message: String) -> Status {
    let mut status = Status::not_acceptable(message);
    status.details = Some(Box::default());
    status
}

/// A client may bring an id of its own; otherwise one is drawn.
fn audit_id(parts: &Parts) -> String {
    let given = parts
        .headers
        .get("audit-id")
        .and_then(|value| value.to_str().ok());
    given
        .filter(|id| !id.is_empty() && id.len() <= 64)
        .map_or_else(|| uuid::Uuid::new_v4().to_string(), str::to_string)
}

/// How long the authorization webhooks may take for one request, all calls together.
const AUTHORIZATION_TIMEOUT: Duration = Duration::from_secs(60);

/// A decision that is not made in time is a denial.
async fn in_time(until: tokio::time::Instant, decision: impl Future<Output = Decision>) -> Decision {
    let decided = tokio::time::timeout_at(until, decision).await;
    decided.unwrap_or_else(|_| Decision {
        error: Some("context deadline exceeded".to_owned()),
        ..Decision::default()
    })
}

/// As upstream escapes what it quotes.
fn escaped(text: &str) -> String {
    text.replace('&', "&amp;")
        .replace('<', "&lt;")
        .replace('>', "&gt;")
}

pub fn forbidden(user: &UserInfo, attributes: &Attributes<'_>, reason: &str) -> Status {
    let mut why = escaped(&attributes.denied(user));
    if !reason.is_empty() {
        why.push_str(": ");
        why.push_str(reason);
    }
    Status::forbidden(
        &GroupResource::new(attributes.group, attributes.resource),
        attributes.name,
        why,
    )
}
