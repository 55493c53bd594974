//! A request on its way to the endpoints of its backend: which is asked, for how long, and when another one is.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use http::request::Parts;
use http::{HeaderValue, Method, Request};

use crate::backend::Backend;
use crate::body::RequestBody;
use crate::metrics::Metrics;
use crate::refusal::{Refused, bad_gateway, too_late, unavailable};
use crate::table::RouteOptions;
use crate::upstream::{self, SendError, Sent};

/// Endpoints that one request is sent to, if those before were not reached.
const ATTEMPTS: usize = 3;
/// Before the first retry of a route that names no time.
const BACKOFF: Duration = Duration::from_millis(25);
/// What is sent to an endpoint.
pub struct Outgoing<'a> {
    pub backend: &'a Arc<Backend>,
    pub parts: &'a Parts,
    pub body: &'a RequestBody,
    pub host: &'a HeaderValue,
    pub options: &'a RouteOptions,
    /// The endpoint that the client is to stay with.
    pub wanted: Option<SocketAddr>,
}

/// Sends the request, to another endpoint if the first is not reached.
pub async fn send(
    outgoing: Outgoing<'_>,
    metrics: &Metrics,
    reached: &mut Option<SocketAddr>,
) -> Result<Sent, Refused> {
    let Outgoing {
        backend,
        parts,
        body,
        host,
        options,
        wanted,
    } = outgoing;
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
        let kept = wanted.filter(|address| !tried.contains(address));
        let kept = kept.and_then(|address| backend.get(address));
        let endpoint = kept.or_else(|| pick(&tried)).or_else(|| pick(&[]));
        let endpoint = endpoint.ok_or_else(unavailable)?;
        *reached = Some(endpoint.address);
        if attempt > 1 {
            metrics.retried();
        }
        let mut request = Request::new(body.lend());
        *request.method_mut() = parts.method.clone();
        *request.uri_mut() = parts.uri.clone();
        *request.headers_mut() = parts.headers.clone();
        let sending = upstream::send(
            &endpoint,
            backend.protocol,
            request,
            host,
            options.connect_timeout,
        );
        let sent = in_time(sending, body, options).await;
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

/// How long to wait before the `number`th retry: twice as long each time, up to ten times the first, less a random
/// part.
fn backoff(base: Option<Duration>, number: usize, chance: f64) -> Duration {
    let base = base.unwrap_or(BACKOFF);
    let factor = 1u32 << number.saturating_sub(1).min(4);
    base.saturating_mul(factor.min(10)).mul_f64(1.0 - chance / 2.0)
}

/// What `sending` answers, in the time that the route gives it since the last that was read of the client's body.
async fn in_time<F: Future>(sending: F, body: &RequestBody, options: &RouteOptions) -> Option<F::Output> {
    let mut sending = std::pin::pin!(sending);
    let Some(limit) = options.response_timeout else {
        return Some(sending.await);
    };
    let began = tokio::time::Instant::now();
    let limit = || match options.send_timeout {
        Some(limit) if body.is_sending() => limit,
        _ => limit,
    };
    let deadline = || body.last_read().unwrap_or(began).max(began) + limit();
    loop {
        let mut until = deadline();
        if let Some(limit) = options.send_timeout {
            // The endpoint may begin to read, or stop, at any time.
            until = until.min(tokio::time::Instant::now() + limit);
        }
        let sent = tokio::time::timeout_at(until, sending.as_mut()).await;
        match sent {
            Ok(sent) => return Some(sent),
            Err(_) if deadline() > tokio::time::Instant::now() => {}
            Err(_) => return None,
        }
    }
}

fn is_repeatable(method: &Method) -> bool {
    matches!(*method, Method::GET | Method::HEAD | Method::OPTIONS)
}
