//! A request for a group version that another server serves: sent on with the user's identity in headers, which
//! that server believes because of our certificate.

use std::sync::Arc;
use std::time::Duration;

use http::{HeaderMap, HeaderValue, StatusCode, header};

use super::{Remote, fetch};
use crate::body::{self, Answer, Body};
use crate::chain::Exchange;
use crate::proxy::{Forwarded, ProxyError, forward};
use crate::server::Inner;

/// Discovery of one server must not hold up clients that ask all of them.
const DISCOVERY_LIMIT: Duration = Duration::from_secs(5);

pub async fn proxy(
    inner: &Arc<Inner>,
    exchange: &Exchange,
    remote: &Remote,
    audit_id: &str,
    request_body: Body,
) -> Answer {
    let unavailable = || body::text(StatusCode::SERVICE_UNAVAILABLE, "service unavailable\n");
    if !remote.available {
        return unavailable();
    }
    if let Err(why) = &remote.tls
        && remote.local.is_none()
    {
        return body::text(StatusCode::INTERNAL_SERVER_ERROR, format!("{why}\n"));
    }
    let target = match fetch::target(inner, remote).await {
        Ok(target) => target,
        Err(error) => {
            tracing::error!(%error, name = remote.name, "an aggregated API server cannot be found");
            return unavailable();
        }
    };
    let mut headers = HeaderMap::new();
    skiff_auth::request_header::identify(&mut headers, &exchange.user);
    if let Ok(value) = HeaderValue::from_str(audit_id)
        && !audit_id.is_empty()
        && !exchange.parts.headers.contains_key("audit-id")
    {
        headers.insert("audit-id", value);
    }
    let path = exchange
        .parts
        .uri
        .path_and_query()
        .map_or("/", |path| path.as_str());
    let forwarded = Forwarded {
        target: &target,
        path,
        prefix: "",
        keep_host: false,
        headers,
    };
    let sent = forward(exchange, request_body, forwarded);
    let is_discovery = !exchange.info.is_resource && path.trim_matches('/').split('/').count() == 3;
    let result = if is_discovery {
        let limited = tokio::time::timeout(DISCOVERY_LIMIT, sent).await;
        limited.unwrap_or_else(|_| Err(ProxyError::Reach("context deadline exceeded".to_string())))
    } else {
        sent.await
    };
    match result {
        Ok(answer) if answer.status().is_redirection() && answer.headers().contains_key(header::LOCATION) => {
            // Following it would show our certificate, or the user's identity, to whoever is named there.
            let mut refused = body::empty(StatusCode::BAD_GATEWAY);
            *refused.body_mut() =
                body::full("the backend attempted to redirect this request, which is not permitted");
            refused
        }
        Ok(answer) => answer,
        Err(error) => body::text(StatusCode::SERVICE_UNAVAILABLE, format!("{error}\n")),
    }
}
