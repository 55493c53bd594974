//! The paths that are no resource: discovery, version, health, metrics, OpenAPI, OpenID, the trace.

use std::sync::Arc;

use futures::FutureExt;
use http::{HeaderValue, Method, StatusCode, header};
use serde_json::{Value, json};
use skiff_meta::Status;

use crate::body::{self, Answer, Body, not_found};
use crate::chain::{Exchange, not_routed};
use crate::negotiate::Format;
use crate::server::Inner;
use crate::{
    aggregation, compress, debug_pages, discovery, health, negotiate, openapi, protobuf, respond,
    status_page, trace_report,
};

const KEY_SET: &str = "application/jwk-set+json";

pub async fn route(inner: &Arc<Inner>, exchange: &Exchange, request_body: Body) -> Result<Answer, Status> {
    let whole = exchange.info.path.as_str();
    let path = whole.trim_end_matches('/').to_string();
    // Only the paths of API groups may end in a slash, or in none.
    let routed = path.starts_with("/api")
        || matches!(
            path.as_str(),
            "/version" | "/.well-known/openid-configuration" | "/openid/v1/jwks"
        );
    if whole == "/openapi/v3/" {
        return Ok(body::empty(StatusCode::NOT_FOUND));
    }
    if whole.starts_with("/debug/pprof") || whole.starts_with("/debug/flags") {
        return Ok(debug_pages::route(&exchange.parts.method, whole));
    }
    let slash = whole.len() > 1 && whole.ends_with('/') && !routed;
    if slash || whole.starts_with("//") {
        return Ok(not_found());
    }
    let parts: Vec<&str> = path.trim_start_matches('/').split('/').collect();
    if let ["version", _, ..] = parts[..] {
        return Err(Status::resource_not_found());
    }
    if exchange.parts.method == Method::POST && parts[..] == ["debug", "skiff", "trace"] {
        return trace_report::record(inner, exchange, request_body).boxed().await;
    }
    if exchange.parts.method != Method::GET {
        if known(inner, &parts) {
            return Err(crate::resource_paths::method_not_allowed());
        }
        // A group's router knows its paths; what is no group has no router.
        if let ["api", _] | ["apis", _, _] = parts[..] {
            let group = if parts[0] == "api" { "" } else { parts[1] };
            let served = parts.get(1) != Some(&"") && inner.registry.resources.has_group(group);
            return if served {
                Err(Status::resource_not_found())
            } else {
                Ok(not_found())
            };
        }
        // COMPAT: what upstream serves without its router answers to any method.
        if !matches!(
            parts[..],
            ["" | "index.html" | "apis" | "metrics" | "statusz" | "flagz"]
                | ["apis", _]
                | ["metrics", "slis"]
                | ["healthz" | "livez" | "readyz", ..]
                | ["openapi", "v2" | "v3", ..]
        ) && exchange.parts.method != Method::HEAD
        {
            return Ok(not_found());
        }
    }
    let resources = &inner.registry.resources;
    // COMPAT: with a slash at its end, the older form only.
    let aggregate = match whole {
        "/apis/" => None,
        _ => discovery::wants_aggregated(exchange.header(header::ACCEPT)),
    };
    match parts[..] {
        [""] | ["index.html"] => {
            let bytes = serde_json::to_vec_pretty(&root(inner)).map_err(Status::internal)?;
            Ok(body::answer(StatusCode::OK, "application/json", bytes))
        }
        ["version"] => {
            // Not negotiated: JSON, whatever the parameters ask for.
            let accept = exchange.header(header::ACCEPT);
            negotiate::routed_to(accept, &["application/json"]).map_err(not_routed)?;
            Ok(body::answer(
                StatusCode::OK,
                "application/json",
                inner.version.to_text(),
            ))
        }
        ["healthz" | "livez" | "readyz", ..] => Ok(health::check(inner, exchange, &parts).await),
        ["metrics"] | ["metrics", "slis"] if exchange.parts.method == Method::DELETE => {
            if parts.len() == 1 {
                inner.metrics.reset();
            }
            let text = "metrics reset\n";
            Ok(body::answer(StatusCode::OK, "text/plain; charset=utf-8", text))
        }
        ["metrics"] => {
            let component = exchange.query.text("component");
            let Some(registry) = inner.component_metrics(component) else {
                return Ok(not_found());
            };
            let mut text = registry.text();
            if matches!(component, "" | "kube-apiserver") {
                text.push_str(&skiff_supervise::metrics());
                text.push_str(&unreadable(inner));
                text.push_str(&inner.flow.metrics());
            }
            Ok(metrics(inner, text))
        }
        ["metrics", "slis"] => Ok(metrics(inner, health::slis(inner).await)),
        ["statusz" | "flagz"] if !takes_text(exchange.header(header::ACCEPT)) => Err(Status::not_acceptable(
            "only the following media types are accepted: application/json, application/yaml, text/plain",
        )),
        ["statusz"] => Ok(status_page::statusz(inner)),
        ["flagz"] => Ok(status_page::flagz(inner)),
        ["api"] => match aggregate {
            Some(format) => {
                let accept = exchange.header(header::ACCEPT);
                negotiate::routed(accept, false).map_err(not_routed)?;
                aggregated(inner, exchange, format, true)
            }
            None => document(exchange, &discovery::api_versions(&inner.server_address)),
        },
        ["apis"] => match aggregate {
            Some(format) => aggregated(inner, exchange, format, false),
            None => document(exchange, &discovery::api_groups(resources, &inner.aggregator)),
        },
        ["apis", "", _] => Ok(not_found()),
        ["apis", group] => found(
            exchange,
            discovery::api_group(resources, &inner.aggregator, group),
        ),
        ["api", version] | ["apis", _, version] => {
            let group = if parts[0] == "api" { "" } else { parts[1] };
            match discovery::api_resources(resources, group, version) {
                Some(value) => document(exchange, &value),
                // A group's router knows its paths; what is no group has no router.
                None if resources.has_group(group) => Err(Status::resource_not_found()),
                None => Ok(not_found()),
            }
        }
        ["openapi", "v3", "apis", group, version] => match inner.aggregator.find(group, version) {
            Some(remote) => {
                let proxied = aggregation::proxy(inner, exchange, &remote, "", body::full(""));
                Ok(proxied.boxed().await)
            }
            None => openapi::route(inner, exchange, &parts),
        },
        ["openapi", ..] => openapi::route(inner, exchange, &parts),
        [".well-known", "openid-configuration"] => {
            let accept = exchange.header(header::ACCEPT);
            negotiate::routed_to(accept, &["application/json"]).map_err(not_routed)?;
            openid_configuration(inner)
        }
        ["openid", "v1", "jwks"] => match &inner.issuer {
            Some(issuer) => {
                let accept = exchange.header(header::ACCEPT);
                negotiate::routed_to(accept, &[KEY_SET]).map_err(not_routed)?;
                Ok(kept(body::answer(
                    StatusCode::OK,
                    KEY_SET,
                    issuer.jwks().to_string(),
                )))
            }
            None => Ok(not_found()),
        },
        ["debug", "skiff", "trace"] => {
            // Who only wants to know the clock should not wait for the rest.
            let clock_only = exchange.parts.uri.query() == Some("clock");
            let marks = skiff_trace::Marks {
                marks: match clock_only {
                    true => Vec::new(),
                    false => inner.recorder.marks(),
                },
                now_us: Some(skiff_trace::now_us()),
            };
            let marks = serde_json::to_value(marks).map_err(Status::internal)?;
            document(exchange, &marks)
        }
        _ => Ok(not_found()),
    }
}

/// COMPAT: pages for people come as text; their other forms have versions that are off by default.
fn takes_text(accept: &str) -> bool {
    let clauses = negotiate::parse_accept(accept);
    clauses.is_empty()
        || clauses
            .iter()
            .any(|clause| matches!((clause.main, clause.sub), ("text", "plain" | "*") | ("*", "*")))
}

/// The gauge of stored objects that cannot be read; there is none of those that can.
fn unreadable(inner: &Inner) -> String {
    let name = "skiff_unreadable_objects";
    let mut text = format!(
        "# HELP {name} Stored objects that cannot be decoded, decrypted or do not match their checksum.\n# TYPE {name} gauge\n"
    );
    for (prefix, count) in inner.registry.unreadable() {
        text.push_str(&format!("{name}{{prefix=\"{prefix}\"}} {count}\n"));
    }
    text
}

fn metrics(inner: &Inner, text: String) -> Answer {
    let kind = "text/plain; version=0.0.4; charset=utf-8; escaping=underscores";
    let mut answer = body::answer(StatusCode::OK, kind, text);
    let started = HeaderValue::from(inner.started.as_second());
    answer.headers_mut().insert("process-start-time-unix", started);
    answer
}

fn known(inner: &Inner, parts: &[&str]) -> bool {
    let resources = &inner.registry.resources;
    match parts {
        ["api" | "version"] | [".well-known", "openid-configuration"] | ["openid", "v1", "jwks"] => true,
        ["api", version] => resources.has_group_version("", version),
        ["apis", group, version] => !group.is_empty() && resources.has_group_version(group, version),
        _ => false,
    }
}

fn document(exchange: &Exchange, value: &Value) -> Result<Answer, Status> {
    let mut output = exchange.output(false)?;
    if value.get("kind").is_none() && output.format == Format::Protobuf {
        // What is no kind is JSON, whoever asks.
        output.format = Format::Json;
    }
    respond::raw(exchange, &output, StatusCode::OK, value)
}

fn found(exchange: &Exchange, value: Option<Value>) -> Result<Answer, Status> {
    match value {
        Some(value) => document(exchange, &value),
        None => Ok(not_found()),
    }
}

fn aggregated(inner: &Inner, exchange: &Exchange, format: Format, core: bool) -> Result<Answer, Status> {
    let value = discovery::aggregated(&inner.registry.resources, &inner.aggregator, core);
    let mut bytes = skiff_schema::declared_order(skiff_api::facts::schema(), &value);
    bytes.push(b'\n');
    let etag = openapi::etag(&bytes);
    let content_type = match format {
        Format::Json => "application/json;g=apidiscovery.k8s.io;v=v2;as=APIGroupDiscoveryList",
        Format::Yaml => {
            bytes = respond::yaml(&value)?.into_bytes();
            "application/yaml;g=apidiscovery.k8s.io;v=v2;as=APIGroupDiscoveryList"
        }
        Format::Protobuf => {
            bytes = protobuf::document(&value)?;
            "application/vnd.kubernetes.protobuf;g=apidiscovery.k8s.io;v=v2;as=APIGroupDiscoveryList"
        }
    };
    let mut answer = if exchange.header(header::IF_NONE_MATCH) == etag {
        body::empty(StatusCode::NOT_MODIFIED)
    } else {
        compress::answer(exchange, StatusCode::OK, content_type, bytes.into())
    };
    let headers = answer.headers_mut();
    headers.insert(header::VARY, HeaderValue::from_static("Accept"));
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("public"));
    if let Ok(value) = HeaderValue::from_str(&etag) {
        headers.insert(header::ETAG, value);
    }
    Ok(answer)
}

fn root(inner: &Inner) -> Value {
    let mut paths: Vec<String> = vec![
        "/.well-known/openid-configuration".into(),
        "/api".into(),
        "/api/v1".into(),
        "/apis".into(),
        "/apis/".into(),
    ];
    let customs = inner.registry.resources.customs();
    for resource in inner.registry.resources.all().iter().chain(&customs.all) {
        let facts = resource.facts;
        if !facts.group.is_empty() {
            paths.push(format!("/apis/{}", facts.group));
            paths.push(format!("/apis/{}/{}", facts.group, facts.version));
        }
    }
    for remote in inner
        .aggregator
        .remotes()
        .iter()
        .filter(|remote| !remote.group.is_empty())
    {
        paths.push(format!("/apis/{}", remote.group));
        paths.push(remote.path());
    }
    for path in [
        "/flagz",
        "/metrics",
        "/metrics/slis",
        "/openapi/v2",
        "/openapi/v3",
        "/openapi/v3/",
        "/openid/v1/jwks",
        "/statusz",
        "/version",
    ] {
        paths.push(path.to_string());
    }
    for which in ["healthz", "livez", "readyz"] {
        paths.push(format!("/{which}"));
        paths.extend(health::names(inner, which).map(|name| format!("/{which}/{name}")));
    }
    paths.sort();
    paths.dedup();
    json!({"paths": paths})
}

fn openid_configuration(inner: &Inner) -> Result<Answer, Status> {
    let Some(issuer) = &inner.issuer else {
        return Ok(not_found());
    };
    let value = json!({
        "issuer": issuer.issuer(),
        "jwks_uri": format!("https://{}/openid/v1/jwks", inner.server_address),
        "response_types_supported": ["id_token"],
        "subject_types_supported": ["public"],
        "id_token_signing_alg_values_supported": [issuer.algorithm()],
    });
    Ok(kept(body::answer(
        StatusCode::OK,
        "application/json",
        value.to_string(),
    )))
}

/// Keys change seldom: verifiers may keep them for an hour.
fn kept(mut answer: Answer) -> Answer {
    let value = HeaderValue::from_static("public, max-age=3600");
    answer.headers_mut().insert(header::CACHE_CONTROL, value);
    answer
}
