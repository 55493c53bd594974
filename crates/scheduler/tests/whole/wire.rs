//! What is between one scheduler and the API server. A request that was sent is carried out, whatever becomes of its
//! sender; requests are counted and can be answered with errors; watches can be cut. Every binding is checked: only who
//! holds the lease may send one.

use std::collections::HashMap;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll};

use bytes::Bytes;
use http::{Method, Request, Response};
use http_body::Frame;
use http_body_util::{BodyExt, Full};
use kube::Client;
use kube::client::Body;
use parking_lot::Mutex;
use serde_json::json;
use tokio::runtime::Handle;
use tokio_util::sync::{CancellationToken, WaitForCancellationFutureOwned};
use tower::{BoxError, ServiceExt};

type AnyBody = http_body_util::combinators::UnsyncBoxBody<Bytes, BoxError>;

/// What goes wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// Answers this code.
    Code(u16),
    /// No answer: the connection breaks.
    Broken,
}

/// Which requests it hits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Hits {
    All,
    Writes,
    Leases,
}

/// The bindings of all schedulers of a cluster, as the server answered them.
#[derive(Default)]
pub struct Bindings {
    /// How often each pod was bound, by its path.
    pub bound: Mutex<HashMap<String, usize>>,
    /// Who sent a binding without holding the lease.
    pub violations: Mutex<Vec<String>>,
    /// Who wrote the lease last.
    holder: Mutex<String>,
}

pub struct Wire {
    identity: String,
    server: Handle,
    /// Its scheduler must hold the lease to act.
    elects: bool,
    bindings: Arc<Bindings>,
    fault: Mutex<Option<(Fault, Hits)>>,
    cut: Mutex<CancellationToken>,
    requests: AtomicUsize,
    under_way: AtomicUsize,
}

/// One request that the server is busy with.
struct UnderWay(Arc<Wire>);

impl Drop for UnderWay {
    fn drop(&mut self) {
        self.0.under_way.fetch_sub(1, Ordering::SeqCst);
    }
}

impl Wire {
    /// Made in the runtime of the server.
    pub fn new(identity: &str, elects: bool, bindings: Arc<Bindings>) -> Arc<Wire> {
        Arc::new(Wire {
            identity: identity.to_owned(),
            server: Handle::current(),
            elects,
            bindings,
            fault: Mutex::default(),
            cut: Mutex::default(),
            requests: AtomicUsize::new(0),
            under_way: AtomicUsize::new(0),
        })
    }

    /// From now on these requests fail; watches that are open end.
    pub fn fail(&self, fault: Fault, hits: Hits) {
        *self.fault.lock() = Some((fault, hits));
        if hits == Hits::All {
            std::mem::take(&mut *self.cut.lock()).cancel();
        }
    }

    pub fn heal(&self) {
        *self.fault.lock() = None;
    }

    pub fn requests(&self) -> usize {
        self.requests.load(Ordering::SeqCst)
    }

    pub fn is_quiet(&self) -> bool {
        self.under_way.load(Ordering::SeqCst) == 0
    }

    fn fault(&self, request: &Request<Body>) -> Option<Fault> {
        let (fault, hits) = (*self.fault.lock())?;
        let hit = match hits {
            Hits::All => true,
            Hits::Writes => request.method() != Method::GET && !is_lease(request),
            Hits::Leases => is_lease(request),
        };
        hit.then_some(fault)
    }

    /// A client whose requests go this way; made in the runtime of its user.
    pub fn client(self: &Arc<Self>, service: skiff_server::InProcess) -> Client {
        let wire = Arc::clone(self);
        let service = tower::service_fn(move |request: Request<Body>| {
            let (wire, service) = (Arc::clone(&wire), service.clone());
            async move { wire.pass(request, service).await }
        });
        skiff_client::in_process(service, "default")
    }

    async fn pass(
        self: Arc<Self>,
        request: Request<Body>,
        service: skiff_server::InProcess,
    ) -> Result<Response<AnyBody>, BoxError> {
        self.requests.fetch_add(1, Ordering::SeqCst);
        match self.fault(&request) {
            Some(Fault::Broken) => return Err("connection reset by peer".into()),
            Some(Fault::Code(code)) => return Ok(refusal(code)),
            None => {}
        }
        let path = request.uri().path();
        let binding = path.ends_with("/binding").then(|| path.to_owned());
        if binding.is_some() && self.elects {
            self.check_leader();
        }
        let takes_lease = is_lease(&request) && request.method() != Method::GET;
        self.under_way.fetch_add(1, Ordering::SeqCst);
        let under_way = UnderWay(Arc::clone(&self));
        let cut = self.cut.lock().clone();
        let answer = self.server.clone().spawn(async move {
            let wire = Arc::clone(&under_way.0);
            let answer = service.oneshot(request).await?;
            if let Some(path) = binding.filter(|_| answer.status().is_success()) {
                *wire.bindings.bound.lock().entry(path).or_default() += 1;
            }
            if takes_lease && answer.status().is_success() {
                wire.bindings.holder.lock().clone_from(&wire.identity);
            }
            Ok::<_, BoxError>(answer)
        });
        let answer = answer.await??;
        Ok(answer.map(|body| {
            let body = Box::pin(body.map_err(Into::<BoxError>::into));
            Cut {
                body,
                cut: Box::pin(cut.cancelled_owned()),
            }
            .boxed_unsync()
        }))
    }

    fn check_leader(&self) {
        let holder = self.bindings.holder.lock().clone();
        if holder != self.identity {
            let text = format!("{} binds while {holder:?} holds the lease", self.identity);
            self.bindings.violations.lock().push(text);
        }
    }
}

fn is_lease(request: &Request<Body>) -> bool {
    request.uri().path().contains("/leases")
}

fn refusal(code: u16) -> Response<AnyBody> {
    let reason = match code {
        409 => "Conflict",
        410 => "Expired",
        429 => "TooManyRequests",
        503 => "ServiceUnavailable",
        _ => "InternalError",
    };
    let status = json!({"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure", "code": code,
        "reason": reason, "message": reason});
    let body = Full::new(Bytes::from(status.to_string())).map_err(Into::<BoxError>::into);
    let mut answer = Response::builder()
        .status(code)
        .header("content-type", "application/json");
    if code == 429 {
        answer = answer.header("retry-after", "1");
    }
    answer.body(body.boxed_unsync()).unwrap()
}

/// A body that ends when it is cut.
struct Cut<B> {
    body: Pin<Box<B>>,
    cut: Pin<Box<WaitForCancellationFutureOwned>>,
}

impl<B: http_body::Body<Data = Bytes, Error = BoxError>> http_body::Body for Cut<B> {
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        if self.cut.as_mut().poll(context).is_ready() {
            return Poll::Ready(Some(Err("connection reset by peer".into())));
        }
        self.body.as_mut().poll_frame(context)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }
}
