//! The audit trail: what was asked, by whom, and how it ended. Without a policy nothing here runs.
//!
//! ```text
//! policy   which requests are recorded, and how much of them
//! event    what is recorded, as JSON
//! log      where it goes: a file
//! webhook  where it goes: another server
//! body     answers that take long: their end is an event too
//! ```

mod body;
mod event;
mod log;
mod policy;
mod webhook;

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::Arc;

use bytes::Bytes;
use futures::FutureExt;
use http::{HeaderMap, header};
use http_body_util::BodyExt;
use jiff::Timestamp;
use parking_lot::Mutex;
use serde_json::Value;
use serde_json::value::{RawValue, to_raw_value};
use skiff_auth::{Attributes, UserInfo};
use skiff_meta::Status;
use skiff_registry::{Context, object};
use skiff_schema::decode;

pub use log::{LogOptions, Mode};
pub use policy::{Level, Policy, Stage};
pub use webhook::WebhookOptions;

use crate::body::{Answer, full};
use crate::chain::Exchange;
use crate::proxy::ClientAddress;
use event::{AuthenticationMetadata, Event, ObjectReference, ResponseStatus, User};
use policy::Decided;

/// Longer names of clients are cut off.
const USER_AGENT_MAX: usize = 1024;
/// An answer that is not recorded itself is looked into for its `Status` up to this size.
const STATUS_MAX: u64 = 64 * 1024;

/// What is to be recorded, and where.
pub struct AuditConfig {
    pub policy: Policy,
    pub log: Option<LogOptions>,
    pub webhook: Option<WebhookOptions>,
}

/// Why there can be no trail.
#[derive(Debug, thiserror::Error)]
pub enum AuditError {
    #[error("audit log: {0}")]
    Log(#[from] std::io::Error),
    #[error("audit webhook: {0}")]
    Webhook(#[from] skiff_https::BadKubeconfig),
}

pub struct Auditor {
    policy: Policy,
    log: Option<log::Log>,
    webhook: Option<webhook::Webhook>,
}

impl Auditor {
    pub fn open(config: AuditConfig) -> Result<Arc<Auditor>, AuditError> {
        Ok(Arc::new(Auditor {
            policy: config.policy,
            log: config.log.map(log::Log::open).transpose()?,
            webhook: config.webhook.map(webhook::Webhook::open).transpose()?,
        }))
    }

    /// Waits until what was handed over is written, or the log is given up.
    pub async fn flush(&self) {
        if let Some(log) = &self.log {
            log.flush().await;
        }
        if let Some(webhook) = &self.webhook {
            webhook.flush().await;
        }
    }

    /// Events that were lost: for the metrics.
    pub fn failed(&self) -> u64 {
        let of_log = self.log.as_ref().map_or(0, log::Log::failed);
        of_log + self.webhook.as_ref().map_or(0, webhook::Webhook::failed)
    }

    /// Hands a line to all who want it, and waits as they say: whether the request may go on.
    async fn write(&self, line: Vec<u8>) -> bool {
        let mut may = true;
        if let Some(webhook) = &self.webhook {
            let copy = Bytes::copy_from_slice(&line);
            let arrived = webhook.write(copy).boxed().await;
            may = arrived || webhook.mode != Mode::BlockingStrict;
        }
        if let Some(log) = &self.log {
            let written = log.write(line).await;
            may &= written || log.mode != Mode::BlockingStrict;
        }
        may
    }

    fn send(&self, line: Vec<u8>) {
        if let Some(webhook) = &self.webhook {
            webhook.send(Bytes::copy_from_slice(&line));
        }
        if let Some(log) = &self.log {
            log.send(line);
        }
    }

    /// The trail of a request, if the policy wants one.
    pub fn begin(
        self: &Arc<Self>,
        exchange: &Exchange,
        user: &Arc<UserInfo>,
        attributes: &Attributes<'_>,
        id: &str,
    ) -> Option<Box<Trail>> {
        let decided = self.policy.decide(user, attributes)?.clone();
        let (parts, info) = (&exchange.parts, &exchange.info);
        let uri = parts
            .uri
            .path_and_query()
            .map_or("/", http::uri::PathAndQuery::as_str);
        let object = info.is_resource.then(|| ObjectReference {
            resource: info.resource.clone(),
            namespace: info.namespace.clone(),
            name: info.name.clone(),
            api_group: info.group.clone(),
            api_version: info.version.clone(),
            subresource: info.subresource.clone(),
            ..ObjectReference::default()
        });
        let address = parts.extensions.get::<ClientAddress>().map(|address| address.0);
        Some(Box::new(Trail {
            auditor: self.clone(),
            decided,
            id: id.to_owned(),
            uri: uri.to_owned(),
            verb: info.verb.clone(),
            user: user.clone(),
            source_ips: source_ips(&parts.headers, address),
            user_agent: user_agent(exchange.header(header::USER_AGENT)),
            received: Timestamp::now(),
            found: Mutex::new(Found {
                object,
                ..Found::default()
            }),
        }))
    }
}

/// What is known of one request.
pub struct Trail {
    auditor: Arc<Auditor>,
    decided: Decided,
    id: String,
    uri: String,
    verb: String,
    user: Arc<UserInfo>,
    source_ips: Vec<String>,
    user_agent: String,
    received: Timestamp,
    /// Leaf lock: held while something is put in, or an event is made.
    found: Mutex<Found>,
}

/// What becomes known on the way.
#[derive(Default)]
struct Found {
    impersonated: Option<Arc<UserInfo>>,
    constraint: Option<&'static str>,
    object: Option<ObjectReference>,
    request: Option<Box<RawValue>>,
    response: Option<Box<RawValue>>,
    status: Option<ResponseStatus>,
}

impl Trail {
    pub fn level(&self) -> Level {
        self.decided.level
    }

    /// Whether what is asked is recorded, not only that it was.
    pub fn records_requests(&self) -> bool {
        self.decided.level >= Level::Request
    }

    pub fn impersonated(&self, user: &Arc<UserInfo>, constraint: Option<&'static str>) {
        let mut found = self.found.lock();
        found.impersonated = Some(user.clone());
        found.constraint = constraint;
    }

    /// The object of a request, in the version that the client speaks.
    pub fn request_object(&self, value: &Value) {
        let mut found = self.found.lock();
        if let Some(reference) = &mut found.object {
            let fill = |place: &mut String, text: &str| {
                if place.is_empty() {
                    text.clone_into(place);
                }
            };
            fill(&mut reference.namespace, object::namespace(value));
            fill(&mut reference.name, object::name(value));
            fill(&mut reference.uid, object::uid(value));
            fill(&mut reference.resource_version, object::resource_version(value));
        }
        if self.records_requests() {
            found.request = self.raw(value);
        }
    }

    /// A patch as it was sent; one in YAML is recorded as the JSON that it means.
    pub fn request_patch(&self, bytes: &[u8]) {
        if !self.records_requests() {
            return;
        }
        let text = std::str::from_utf8(bytes).unwrap_or_default();
        let raw = serde_json::from_str::<Box<RawValue>>(text).ok();
        let raw = raw.or_else(|| {
            let value = serde_saphyr::from_str::<Value>(text).ok()?;
            to_raw_value(&value).ok()
        });
        self.found.lock().request = raw;
    }

    fn raw(&self, value: &Value) -> Option<Box<RawValue>> {
        if !self.decided.omit_managed_fields {
            return to_raw_value(value).ok();
        }
        let mut value = value.clone();
        without_managed_fields(&mut value);
        to_raw_value(&value).ok()
    }

    fn line(&self, stage: Stage, annotations: &BTreeMap<String, String>) -> Option<Vec<u8>> {
        if self.decided.omit_stages.contains(&stage) {
            return None;
        }
        let found = self.found.lock();
        let now = match stage {
            Stage::RequestReceived => self.received,
            _ => Timestamp::now(),
        };
        let event = Event {
            kind: "Event",
            api_version: "audit.k8s.io/v1",
            level: self.decided.level.as_str(),
            audit_id: &self.id,
            stage: stage.as_str(),
            request_uri: &self.uri,
            verb: &self.verb,
            user: User::of(&self.user),
            impersonated_user: found.impersonated.as_deref().map(User::of),
            authentication_metadata: found.constraint.map(|constraint| AuthenticationMetadata {
                impersonation_constraint: constraint,
            }),
            source_ips: &self.source_ips,
            user_agent: &self.user_agent,
            object_ref: found.object.as_ref(),
            response_status: found.status.as_ref(),
            request_object: found.request.as_deref(),
            response_object: found.response.as_deref(),
            request_received_timestamp: micros(self.received),
            stage_timestamp: micros(now),
            annotations,
        };
        let mut line = serde_json::to_vec(&event).ok()?;
        line.push(b'\n');
        Some(line)
    }

    /// Records a stage: whether the request may go on.
    pub async fn record(&self, stage: Stage, context: &Context) -> bool {
        let Some(line) = self.line(stage, &context.annotations()) else {
            return true;
        };
        self.auditor.write(line).await
    }

    /// Records a stage without waiting: for ends that nobody waits for.
    fn record_later(&self, stage: Stage, annotations: &BTreeMap<String, String>) {
        if let Some(line) = self.line(stage, annotations) {
            self.auditor.send(line);
        }
    }

    /// Records that nobody could be recognised.
    pub async fn refused(&self, context: &Context, status: &Status) {
        self.failed(status);
        self.record(Stage::ResponseStarted, context).await;
    }

    /// Notes the refusal that an answer is.
    fn failed(&self, status: &Status) {
        let mut found = self.found.lock();
        found.status = Some(ResponseStatus::failure(status));
        if self.decided.level >= Level::RequestResponse {
            found.response = to_raw_value(&status.to_value()).ok();
        }
    }
}

/// Records how a request ended. An answer that goes on for long is recorded when it starts, and when it ends.
pub async fn finish(
    trail: Box<Trail>,
    exchange: &Exchange,
    answer: &mut Answer,
    failure: Option<&Status>,
    panic: Option<&str>,
) {
    let context = &exchange.context;
    if let Some(text) = panic {
        let mut status = Status::internal("");
        status.message = format!("APIServer panic'd: {text}");
        trail.found.lock().status = Some(ResponseStatus::failure(&status));
        trail.record(Stage::Panic, context).await;
        return;
    }
    let code = answer.status().as_u16();
    let long_running = exchange.info.long_running();
    trail.found.lock().status = Some(ResponseStatus::code(code));
    if !long_running {
        look_into(&trail, exchange, answer, failure).await;
        trail.record(Stage::ResponseComplete, context).await;
        return;
    }
    if let Some(status) = failure {
        trail.failed(status);
    }
    trail.record(Stage::ResponseStarted, context).await;
    let body = std::mem::replace(answer.body_mut(), full(""));
    *answer.body_mut() = body::Ending::new(body, trail, context.annotations()).boxed_unsync();
}

/// Finds the `Status` that an answer is, and the whole answer where that is to be recorded. What another server answered
/// passes through unread.
async fn look_into(trail: &Trail, exchange: &Exchange, answer: &mut Answer, failure: Option<&Status>) {
    let code = answer.status().as_u16();
    if let Some(status) = failure {
        trail.found.lock().status = Some(ResponseStatus::failure(status));
    }
    if exchange.proxied {
        return;
    }
    let whole = trail.decided.level >= Level::RequestResponse && exchange.info.path.starts_with("/api");
    let maybe_status = failure.is_none() && (code >= 400 || exchange.info.verb.starts_with("delete"));
    let size = http_body::Body::size_hint(answer.body()).upper();
    let small = size.is_some_and(|size| size <= STATUS_MAX);
    if !(whole || maybe_status && small) {
        return;
    }
    let body = std::mem::replace(answer.body_mut(), full(""));
    let Ok(collected) = body.collect().await else {
        return;
    };
    let bytes = collected.to_bytes();
    *answer.body_mut() = full(bytes.clone());
    let Some(value) = read_answer(answer.headers(), &bytes) else {
        return;
    };
    if failure.is_none() && value["kind"] == "Status" {
        trail.found.lock().status = Some(ResponseStatus::of(&value, code));
    }
    if whole {
        trail.found.lock().response = trail.raw(&value);
    }
}

/// An answer as JSON, whatever form it was sent in.
fn read_answer(headers: &HeaderMap, bytes: &Bytes) -> Option<Value> {
    let text = |name| {
        headers
            .get(name)
            .and_then(|value| value.to_str().ok())
            .unwrap_or("")
    };
    let mut plain = Vec::new();
    let bytes: &[u8] = if text(header::CONTENT_ENCODING) == "gzip" {
        let mut gzip = flate2::read::GzDecoder::new(&bytes[..]);
        std::io::Read::read_to_end(&mut gzip, &mut plain).ok()?;
        &plain
    } else {
        bytes
    };
    let kind = text(header::CONTENT_TYPE);
    match kind.split(';').next().unwrap_or("").trim() {
        "application/json" => serde_json::from_slice(bytes).ok(),
        "application/yaml" => serde_saphyr::from_str(std::str::from_utf8(bytes).ok()?).ok(),
        "application/vnd.kubernetes.protobuf" => {
            let envelope = skiff_schema::protobuf::envelope(bytes).ok()?;
            let (group, version) = envelope
                .api_version
                .split_once('/')
                .unwrap_or(("", envelope.api_version));
            let expected = skiff_meta::GroupVersionKind::new(group, version, envelope.kind);
            let decoded =
                decode::decode_protobuf_object(skiff_api::facts::schema(), bytes, &expected).ok()?;
            let mut value = decoded.checked.value;
            object::put(&mut value, &["kind"], Value::from(envelope.kind));
            object::put(&mut value, &["apiVersion"], Value::from(envelope.api_version));
            Some(value)
        }
        _ => None,
    }
}

/// Of an object, of a list's items, and of the objects of a table's rows.
fn without_managed_fields(value: &mut Value) {
    if let Some(metadata) = value.get_mut("metadata").and_then(Value::as_object_mut) {
        metadata.remove("managedFields");
    }
    for item in value
        .get_mut("items")
        .and_then(Value::as_array_mut)
        .into_iter()
        .flatten()
    {
        if let Some(metadata) = item.get_mut("metadata").and_then(Value::as_object_mut) {
            metadata.remove("managedFields");
        }
    }
    for row in value
        .get_mut("rows")
        .and_then(Value::as_array_mut)
        .into_iter()
        .flatten()
    {
        if let Some(metadata) = row.pointer_mut("/object/metadata").and_then(Value::as_object_mut) {
            metadata.remove("managedFields");
        }
    }
}

/// Upstream's `MicroTime`.
fn micros(time: Timestamp) -> String {
    time.strftime("%Y-%m-%dT%H:%M:%S%.6fZ").to_string()
}

fn user_agent(text: &str) -> String {
    if text.len() <= USER_AGENT_MAX {
        return text.to_owned();
    }
    let mut end = USER_AGENT_MAX;
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    format!("{}...TRUNCATED", &text[..end])
}

/// The addresses that a request came by: those that proxies name first, and the peer last. Who asks inside the process
/// asks from this machine.
fn source_ips(headers: &HeaderMap, peer: Option<SocketAddr>) -> Vec<String> {
    let text = |name: &str| {
        headers
            .get(name)
            .and_then(|value| value.to_str().ok())
            .unwrap_or("")
    };
    let mut ips: Vec<String> = text("x-forwarded-for")
        .split(',')
        .filter_map(|part| part.trim().parse::<std::net::IpAddr>().ok())
        .map(|ip| ip.to_string())
        .collect();
    if let Ok(real) = text("x-real-ip").parse::<std::net::IpAddr>() {
        let real = real.to_string();
        if !ips.contains(&real) {
            ips.push(real);
        }
    }
    let peer = peer.map_or_else(
        || "127.0.0.1".to_owned(),
        |peer| peer.ip().to_canonical().to_string(),
    );
    if ips.last() != Some(&peer) {
        ips.push(peer);
    }
    ips
}

#[cfg(test)]
mod tests {
    use super::*;
    use http::HeaderValue;
    use serde_json::json;

    #[test]
    fn managed_fields_are_left_out_everywhere() {
        let managed = || json!({"name": "a", "managedFields": [{}]});
        let mut value = json!({"metadata": managed(), "items": [{"metadata": managed()}], "rows": [{"object": {"metadata": managed()}}]});
        without_managed_fields(&mut value);
        assert!(!value.to_string().contains("managedFields"), "{value}");
    }

    #[test]
    fn addresses_are_those_of_proxies_and_the_peer() {
        let mut headers = HeaderMap::new();
        let peer = Some("[::ffff:10.0.0.9]:1".parse().unwrap());
        assert_eq!(source_ips(&headers, peer), ["10.0.0.9"]);
        headers.insert("x-forwarded-for", HeaderValue::from_static("1.2.3.4, x, 5.6.7.8"));
        headers.insert("x-real-ip", HeaderValue::from_static("9.9.9.9"));
        assert_eq!(
            source_ips(&headers, peer),
            ["1.2.3.4", "5.6.7.8", "9.9.9.9", "10.0.0.9"]
        );
        assert_eq!(source_ips(&HeaderMap::new(), None), ["127.0.0.1"]);
    }

    #[test]
    fn times_have_microseconds() {
        let time: Timestamp = "2026-01-02T03:04:05.6Z".parse().unwrap();
        assert_eq!(micros(time), "2026-01-02T03:04:05.600000Z");
    }
}
