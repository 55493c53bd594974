//! Clients whose writes carry the marks of the work that makes them (see `skiff_trace`).
//!
//! Marks are task-local. `kube::Client` hands requests to a buffer task, but it polls the answer's future
//! in the caller's task; therefore the trace layer is called inside that future and never in `call`, where
//! the caller's task-locals are out of reach.

use bytes::Bytes;
use http::{Request, Response};
use http_body_util::{BodyExt, Either, Full};
use kube::Client;
use kube::client::Body;
use skiff_trace::{Cause, TraceHeaders};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tower::{BoxError, Layer, Service, ServiceExt};

use crate::metrics::ComponentMetrics;
use crate::writes;

/// How often a request is sent to a server that has no seat for it, as upstream's clients do.
const MAX_TRIES: usize = 10;
/// The longest pause between two of these, whatever the server says.
const LONGEST_PAUSE: Duration = Duration::from_secs(5);

/// The cause that an observed object makes.
pub fn cause_of<K: kube::Resource<DynamicType = ()>>(object: &K) -> Cause {
    let meta = object.meta();
    let (plural, group) = (K::plural(&()), K::group(&()));
    Cause {
        resource: if group.is_empty() {
            plural.into_owned()
        } else {
            format!("{plural}.{group}")
        },
        namespace: meta.namespace.clone().unwrap_or_default(),
        name: meta.name.clone().unwrap_or_default(),
        version: meta.resource_version.clone().unwrap_or_default(),
    }
}

/// As [`in_process`], for a component that says who it is: what it writes is owned under that name.
pub fn in_process_as<S, B>(service: S, default_namespace: &str, agent: &'static str) -> Client
where
    S: Service<Request<Body>, Response = Response<B>> + Clone + Send + 'static,
    S::Future: Send + 'static,
    S::Error: Into<BoxError> + Send,
    B: http_body::Body<Data = bytes::Bytes> + Send + 'static,
    B::Error: Into<BoxError>,
{
    let named = tower::service_fn(move |mut request: Request<Body>| {
        request
            .headers_mut()
            .entry(http::header::USER_AGENT)
            .or_insert(http::HeaderValue::from_static(agent));
        service.clone().oneshot(request)
    });
    in_process(named, default_namespace)
}

/// As [`in_process_as`], with its requests counted.
pub fn in_process_measured<S, B>(
    service: S,
    default_namespace: &str,
    agent: &'static str,
    metrics: Arc<ComponentMetrics>,
) -> Client
where
    S: Service<Request<Body>, Response = Response<B>> + Clone + Send + 'static,
    S::Future: Send + 'static,
    S::Error: Into<BoxError> + Send,
    B: http_body::Body<Data = bytes::Bytes> + Send + 'static,
    B::Error: Into<BoxError>,
{
    let counted = tower::service_fn(move |request: Request<Body>| {
        let (service, metrics) = (service.clone(), metrics.clone());
        async move {
            let method = request.method().clone();
            let query = request.uri().query().unwrap_or_default();
            let watches = query.split('&').any(|part| part.starts_with("watch="));
            let began = Instant::now();
            let answered = service.oneshot(request).await;
            let code = answered.as_ref().ok().map(|answer| answer.status().as_u16());
            metrics.request(&method, code, (!watches).then(|| began.elapsed()));
            answered
        }
    });
    in_process_as(counted, default_namespace, agent)
}

/// A client over a service in this process: no socket and no TLS, but the whole request chain.
pub fn in_process<S, B>(service: S, default_namespace: &str) -> Client
where
    S: Service<Request<Body>, Response = Response<B>> + Clone + Send + 'static,
    S::Future: Send + 'static,
    S::Error: Into<BoxError> + Send,
    B: http_body::Body<Data = bytes::Bytes> + Send + 'static,
    B::Error: Into<BoxError>,
{
    let marked = TraceHeaders.layer(service);
    let in_callers_task = tower::service_fn(move |request: Request<Body>| {
        let marked = marked.clone();
        async move {
            let written = writes::wanted(request.method()).then(|| request.uri().path().to_owned());
            let mut request = request;
            let mut tries = 1;
            let answer = loop {
                let again = copy(&request);
                // On the heap: the whole chain of the server may be inside, and reconciles nest deep already.
                let answer = Box::pin(marked.clone().oneshot(request))
                    .await
                    .map_err(Into::<BoxError>::into)?;
                match (again, pause_before_retry(&answer)) {
                    (Some(again), Some(pause)) if tries < MAX_TRIES => {
                        tokio::time::sleep(pause).await;
                        request = again;
                        tries += 1;
                    }
                    _ => break answer,
                }
            };
            match written {
                Some(path) if answer.status().is_success() => note_write(&path, answer).await,
                _ => Ok(answer.map(Either::Left)),
            }
        }
    });
    Client::new(in_callers_task, default_namespace)
}

/// The same request once more, unless its body can be read only once.
fn copy(request: &Request<Body>) -> Option<Request<Body>> {
    let mut again = Request::new(request.body().try_clone()?);
    *again.method_mut() = request.method().clone();
    *again.uri_mut() = request.uri().clone();
    *again.headers_mut() = request.headers().clone();
    *again.extensions_mut() = request.extensions().clone();
    Some(again)
}

/// The pause that a server asks for which had no seat for the request and therefore did nothing with it.
fn pause_before_retry<B>(answer: &Response<B>) -> Option<Duration> {
    if answer.status() != http::StatusCode::TOO_MANY_REQUESTS {
        return None;
    }
    let header = answer.headers().get(http::header::RETRY_AFTER)?;
    let seconds: u64 = header.to_str().ok()?.parse().ok()?;
    (seconds > 0).then(|| Duration::from_secs(seconds).min(LONGEST_PAUSE))
}

/// Reads the answer to a write, notes what the write did, and answers it unchanged.
async fn note_write<B>(path: &str, answer: Response<B>) -> Result<Response<Either<B, Full<Bytes>>>, BoxError>
where
    B: http_body::Body<Data = bytes::Bytes> + Send + 'static,
    B::Error: Into<BoxError>,
{
    let (parts, body) = answer.into_parts();
    let bytes = body.collect().await.map_err(Into::into)?.to_bytes();
    writes::note(path, &bytes);
    Ok(Response::from_parts(parts, Either::Right(Full::new(bytes))))
}

/// Wraps a client so that its writes carry the marks of the work that makes them.
pub fn with_marks(client: Client, default_namespace: &str) -> Client {
    let service = tower::service_fn(move |request: Request<Body>| {
        let client = client.clone();
        async move { client.send(request).await }
    });
    in_process(service, default_namespace)
}

#[cfg(test)]
mod tests {
    use super::*;
    use http::Method;
    use skiff_trace::{CAUSE_HEADER, STAGES_HEADER, Work, scope, stage};

    #[tokio::test]
    async fn writes_carry_the_marks_of_the_calling_task() {
        let seen = Arc::new(parking_lot::Mutex::new(Vec::new()));
        let log = seen.clone();
        let client = in_process(
            tower::service_fn(move |request: Request<Body>| {
                let header = |name: http::HeaderName| {
                    request
                        .headers()
                        .get(name)
                        .map(|value| value.to_str().unwrap_or_default().to_owned())
                };
                log.lock()
                    .push((header(CAUSE_HEADER), header(STAGES_HEADER).is_some()));
                async { Ok::<_, std::convert::Infallible>(Response::new(Body::from(b"{}".to_vec()))) }
            }),
            "default",
        );
        let client = with_marks(client, "default");
        let send = async |method: Method| {
            let request = Request::builder()
                .method(method)
                .uri("/")
                .body(Body::empty())
                .unwrap();
            client.send(request).await.unwrap();
        };
        let text = "deployments.apps/default/web@7";
        scope(Work::new(text.parse().ok()), async {
            stage("plan", async {}).await;
            send(Method::GET).await;
            send(Method::POST).await;
            send(Method::PUT).await;
        })
        .await;
        send(Method::POST).await;
        let cause = Some(text.to_owned());
        assert_eq!(
            *seen.lock(),
            vec![
                (None, false),
                (cause.clone(), true),
                (cause, false),
                (None, false)
            ]
        );
    }

    #[tokio::test]
    async fn requests_are_counted_by_method_and_code() {
        let metrics = Arc::new(ComponentMetrics::default());
        let service = tower::service_fn(|request: Request<Body>| async move {
            let mut answer = Response::new(Body::from(b"{}".to_vec()));
            if request.method() == Method::POST {
                *answer.status_mut() = http::StatusCode::SERVICE_UNAVAILABLE;
            }
            Ok::<_, std::convert::Infallible>(answer)
        });
        let client = in_process_measured(service, "default", "test", metrics.clone());
        for (method, uri) in [
            (Method::GET, "/"),
            (Method::GET, "/?watch=true"),
            (Method::POST, "/"),
        ] {
            let request = Request::builder().method(method).uri(uri);
            let _ = client.send(request.body(Body::empty()).unwrap()).await;
        }
        let text = metrics.registry.text();
        for line in [
            "rest_client_requests_total{code=\"200\",host=\"in-process\",method=\"GET\"} 2",
            "rest_client_requests_total{code=\"503\",host=\"in-process\",method=\"POST\"} 1",
            "rest_client_request_duration_seconds_count{host=\"in-process\",verb=\"GET\"} 1",
        ] {
            assert!(text.lines().any(|shown| shown == line), "{line}\n{text}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_server_without_a_seat_is_asked_again_when_it_says() {
        let calls = Arc::new(std::sync::atomic::AtomicUsize::new(0));
        let counted = calls.clone();
        let service = tower::service_fn(move |request: Request<Body>| {
            let call = counted.fetch_add(1, std::sync::atomic::Ordering::SeqCst);
            async move {
                let sent = request.into_body().collect_bytes().await.unwrap();
                assert_eq!(sent, Bytes::from_static(b"body"));
                let answer = Response::builder();
                let answer = match call {
                    0 | 1 => answer.status(429).header("retry-after", "1"),
                    2 => answer.status(429).header("retry-after", "0"),
                    _ => answer.status(200),
                };
                Ok::<_, BoxError>(answer.body(Full::new(Bytes::new())).unwrap())
            }
        });
        let client = in_process(service, "default");
        let began = tokio::time::Instant::now();
        let request = Request::post("/x").body(Body::from(b"body".to_vec())).unwrap();
        let answer = client.send(request).await.unwrap();
        // The last says not to come again, as the answer to an eviction that a budget forbids.
        assert_eq!(answer.status(), 429);
        assert_eq!(calls.load(std::sync::atomic::Ordering::SeqCst), 3);
        assert_eq!(began.elapsed(), Duration::from_secs(2));
    }
}
