//! The paths that are no resource: discovery, version, health, metrics, OpenAPI, OpenID, the trace.

use std::sync::Arc;

use http::{HeaderValue, Method, StatusCode, header};
use serde_json::{Value, json};
use skiff_meta::Status;

use crate::body::{self, Answer, not_found};
use crate::chain::Exchange;
use crate::server::Inner;
use crate::{compress, discovery, health, openapi, respond};

pub async fn route(inner: &Arc<Inner>, exchange: &Exchange) -> Result<Answer, Status> {
    let path = exchange.info.path.trim_end_matches('/').to_string();
    let parts: Vec<&str> = path.trim_start_matches('/').split('/').collect();
    if exchange.parts.method != Method::GET && exchange.parts.method != Method::HEAD {
        return if known(inner, &parts) {
            Err(crate::resource_paths::method_not_allowed())
        } else {
            Ok(not_found())
        };
    }
    let resources = &inner.registry.resources;
    match parts[..] {
        [""] => document(exchange, &root(inner)),
        ["version"] => document(exchange, &inner.version.to_value()),
        ["healthz" | "livez" | "readyz", ..] => Ok(health::check(inner, exchange, &parts).await),
        ["metrics"] => Ok(body::answer(
            StatusCode::OK,
            "text/plain; version=0.0.4; charset=utf-8",
            inner.metrics.text(),
        )),
        ["api"] => match discovery::aggregated_version(exchange.header(header::ACCEPT)) {
            Some(version) => aggregated(inner, exchange, true, version),
            None => document(exchange, &discovery::api_versions(&inner.server_address)),
        },
        ["apis"] => match discovery::aggregated_version(exchange.header(header::ACCEPT)) {
            Some(version) => aggregated(inner, exchange, false, version),
            None => document(exchange, &discovery::api_groups(resources)),
        },
        ["api", version] => found(exchange, discovery::api_resources(resources, "", version)),
        ["apis", group] => found(exchange, discovery::api_group(resources, group)),
        ["apis", group, version] => found(exchange, discovery::api_resources(resources, group, version)),
        ["openapi", ..] => openapi::route(exchange, &parts),
        [".well-known", "openid-configuration"] => openid_configuration(inner),
        ["openid", "v1", "jwks"] => match &inner.issuer {
            Some(issuer) => Ok(body::answer(
                StatusCode::OK,
                "application/jwk-set+json",
                issuer.jwks().to_string(),
            )),
            None => Ok(not_found()),
        },
        ["debug", "skiff", "trace"] => {
            let marks = serde_json::to_value(inner.recorder.marks()).map_err(Status::internal)?;
            document(exchange, &json!({"marks": marks}))
        }
        _ => Ok(not_found()),
    }
}

fn known(inner: &Inner, parts: &[&str]) -> bool {
    let resources = &inner.registry.resources;
    match parts {
        ["api" | "apis" | "version"] => true,
        ["api", version] => resources.has_group_version("", version),
        ["apis", group, version] => resources.has_group_version(group, version),
        _ => false,
    }
}

fn document(exchange: &Exchange, value: &Value) -> Result<Answer, Status> {
    respond::raw(exchange, &exchange.output(false)?, StatusCode::OK, value)
}

fn found(exchange: &Exchange, value: Option<Value>) -> Result<Answer, Status> {
    match value {
        Some(value) => document(exchange, &value),
        None => Ok(not_found()),
    }
}

fn aggregated(
    inner: &Inner,
    exchange: &Exchange,
    core: bool,
    version: &'static str,
) -> Result<Answer, Status> {
    let value = discovery::aggregated(&inner.registry.resources, core, version);
    let mut bytes = value.to_string().into_bytes();
    bytes.push(b'\n');
    let etag = openapi::etag(&bytes);
    let content_type = if version == "v2" {
        "application/json;g=apidiscovery.k8s.io;v=v2;as=APIGroupDiscoveryList"
    } else {
        "application/json;g=apidiscovery.k8s.io;v=v2beta1;as=APIGroupDiscoveryList"
    };
    let mut answer = if exchange.header(header::IF_NONE_MATCH) == etag {
        body::answer(StatusCode::NOT_MODIFIED, content_type, "")
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
    ];
    for resource in inner.registry.resources.all() {
        let facts = resource.facts;
        if !facts.group.is_empty() {
            paths.push(format!("/apis/{}", facts.group));
            paths.push(format!("/apis/{}/{}", facts.group, facts.version));
        }
    }
    for path in [
        "/healthz",
        "/livez",
        "/metrics",
        "/openapi/v2",
        "/openapi/v3",
        "/openid/v1/jwks",
        "/readyz",
        "/version",
    ] {
        paths.push(path.to_string());
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
        "id_token_signing_alg_values_supported": ["ES256"],
    });
    Ok(body::answer(
        StatusCode::OK,
        "application/json",
        value.to_string(),
    ))
}
