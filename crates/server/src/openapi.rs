//! `/openapi/v2` and `/openapi/v3`. The documents are the fact tables'; this file serves them.

use http::{HeaderValue, StatusCode, header};
use sha2::{Digest, Sha512};
use skiff_meta::Status;
use skiff_schema::openapi::{Document, v3_protobuf};

use crate::body::{self, Answer, not_found};
use crate::chain::Exchange;
use crate::content;
use crate::negotiate::parse_accept;
use crate::server::Inner;

/// The binary forms, by their older and their newer name.
const V2_PROTOBUF: [&str; 2] = [
    "application/com.github.proto-openapi.spec.v2@v1.0+protobuf",
    "application/com.github.proto-openapi.spec.v2.v1.0+protobuf",
];
const V3_PROTOBUF: [&str; 2] = [
    "application/com.github.proto-openapi.spec.v3@v1.0+protobuf",
    "application/com.github.proto-openapi.spec.v3.v1.0+protobuf",
];

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02X}")).collect()
}

/// A strong tag of the content, quoted.
pub fn etag(bytes: &[u8]) -> String {
    format!("\"{}\"", hex(&Sha512::digest(bytes)))
}

pub fn route(inner: &Inner, exchange: &Exchange, parts: &[&str]) -> Result<Answer, Status> {
    let documents = inner.documents;
    let customs = inner.custom_documents.of(&inner.registry.resources, documents);
    match parts {
        ["openapi", "v2"] => {
            let accept = exchange.header(header::ACCEPT);
            if let Some(content_type) = protobuf(accept, V2_PROTOBUF) {
                let ours = customs
                    .as_ref()
                    .map_or_else(|| documents.v2_json(), |c| c.v2_json());
                if let Some(merged) = inner.aggregator.v2(ours) {
                    return Ok(vary_encoding(document(
                        inner,
                        exchange,
                        merged.protobuf(),
                        content_type,
                    )));
                }
                let found = customs
                    .as_ref()
                    .map_or_else(|| documents.v2_protobuf(), |c| c.v2_protobuf());
                return Ok(vary_encoding(document(inner, exchange, found, content_type)));
            }
            if !takes_json(accept) {
                return Ok(vary_encoding(not_acceptable()));
            }
            let found = customs
                .as_ref()
                .map_or_else(|| documents.v2_json(), |c| c.v2_json());
            if let Some(merged) = inner.aggregator.v2(found) {
                return Ok(vary_encoding(document(
                    inner,
                    exchange,
                    merged.json(),
                    "application/json",
                )));
            }
            Ok(vary_encoding(document(
                inner,
                exchange,
                found,
                "application/json",
            )))
        }
        ["openapi", "v3"] => {
            let mut value = documents.v3_root();
            if let Some(customs) = &customs {
                customs.add_to_root(&mut value);
            }
            for remote in inner.aggregator.remotes() {
                if let Some(url) = &remote.documents.lock().v3_url {
                    let path = remote.path();
                    value["paths"][path.trim_start_matches('/')] =
                        serde_json::json!({"serverRelativeURL": url});
                }
            }
            // COMPAT: upstream forgets to say that this is JSON, and takes it for new each time.
            let (kind, now) = ("text/plain; charset=utf-8", jiff::Timestamp::now());
            Ok(content::serve(exchange, kind, value.to_string().into(), "", now))
        }
        ["openapi", "v3", path @ ..] => {
            let path = path.join("/");
            let custom = customs.as_ref().and_then(|customs| customs.v3(&path));
            let Some(found) = documents.v3_group_version(&path).or(custom) else {
                return Ok(body::empty(StatusCode::NOT_FOUND));
            };
            let accept = exchange.header(header::ACCEPT);
            let binary = protobuf(accept, V3_PROTOBUF);
            if binary.is_none() && !takes_json(accept) {
                return Ok(not_acceptable());
            }
            // A client that asks by hash may keep the answer: another content has another hash.
            let hash = exchange.query.text("hash");
            let current = match custom {
                Some(custom) => custom.etag.trim_matches('"').to_owned(),
                None => documents.hash(&path),
            };
            if !hash.is_empty() && hash != current {
                let kind = binary.unwrap_or("application/json");
                let mut answer = body::answer(StatusCode::MOVED_PERMANENTLY, kind, "");
                let headers = answer.headers_mut();
                headers.insert(header::VARY, HeaderValue::from_static("Accept"));
                if let Ok(tag) = HeaderValue::from_str(&found.etag) {
                    headers.insert(header::ETAG, tag);
                }
                if let Ok(location) = HeaderValue::from_str(&format!("/openapi/v3/{path}?hash={current}")) {
                    answer.headers_mut().insert(header::LOCATION, location);
                }
                return Ok(answer);
            }
            let mut answer = match binary {
                // Few clients ask for this form, and they keep it: it is made on demand.
                Some(content_type) => {
                    let value = serde_json::from_slice(&found.bytes).map_err(Status::internal)?;
                    let made = Document {
                        bytes: v3_protobuf(&value),
                        etag: found.etag.clone(),
                    };
                    document(inner, exchange, &made, content_type)
                }
                None => document(inner, exchange, found, "application/json"),
            };
            if !hash.is_empty() {
                let headers = answer.headers_mut();
                headers.insert(
                    header::CACHE_CONTROL,
                    HeaderValue::from_static("public, immutable"),
                );
            }
            Ok(answer)
        }
        _ => Ok(not_found()),
    }
}

fn protobuf(accept: &str, [older, newer]: [&'static str; 2]) -> Option<&'static str> {
    for clause in parse_accept(accept) {
        let wanted = format!("{}/{}", clause.main, clause.sub);
        // COMPAT: the older name is accepted, but Go's clients cannot parse it in an answer.
        if wanted == older || wanted == newer {
            return Some(newer);
        }
        if matches!(wanted.as_str(), "application/json" | "application/*" | "*/*") {
            return None;
        }
    }
    None
}

fn not_acceptable() -> Answer {
    let mut answer = body::empty(StatusCode::NOT_ACCEPTABLE);
    answer
        .headers_mut()
        .insert(header::VARY, HeaderValue::from_static("Accept"));
    answer
}

/// COMPAT: the older document also depends on the encoding asked for, and says so in a header of its own.
fn vary_encoding(mut answer: Answer) -> Answer {
    let headers = answer.headers_mut();
    headers.insert(header::VARY, HeaderValue::from_static("Accept-Encoding"));
    headers.append(header::VARY, HeaderValue::from_static("Accept"));
    answer
}

fn takes_json(accept: &str) -> bool {
    let clauses = parse_accept(accept);
    accept.trim().is_empty()
        || clauses.iter().any(|clause| {
            matches!(
                (clause.main, clause.sub),
                ("application", "json" | "*") | ("*", "*")
            )
        })
}

fn document(inner: &Inner, exchange: &Exchange, found: &Document, content_type: &'static str) -> Answer {
    let name = format!("{} {content_type}", exchange.info.path);
    let modified = inner.document_times.of(&name, &found.etag);
    let bytes = found.bytes.clone().into();
    let mut answer = content::serve(exchange, content_type, bytes, &found.etag, modified);
    answer
        .headers_mut()
        .insert(header::VARY, HeaderValue::from_static("Accept"));
    answer
}
