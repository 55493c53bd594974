//! What stands between the controllers and the API server: counts their requests, and in an outage answers for the server
//! and cuts watches.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::Mutex;

use bytes::Bytes;
use http::{Request, Response};
use http_body::Frame;
use http_body_util::{BodyExt, Full};
use kube::client::Body;
use serde_json::json;
use skiff_auth::UserInfo;
use tokio_util::sync::CancellationToken;
use tower::{BoxError, ServiceExt};

/// Who asked, how and for which path.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Asked {
    pub user: String,
    pub method: String,
    pub path: String,
}

#[derive(Default)]
pub struct Door {
    asked: Mutex<BTreeMap<Asked, usize>>,
    /// The code that every request is answered with.
    fault: Mutex<Option<u16>>,
    cut: Mutex<CancellationToken>,
}

/// Ends when it is cut.
struct Cuttable {
    body: skiff_server::Body,
    cut: std::pin::Pin<Box<tokio_util::sync::WaitForCancellationFutureOwned>>,
}

impl http_body::Body for Cuttable {
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(
        mut self: std::pin::Pin<&mut Self>,
        context: &mut std::task::Context<'_>,
    ) -> std::task::Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        if self.cut.as_mut().poll(context).is_ready() {
            return std::task::Poll::Ready(Some(Err("the connection was cut by a test".into())));
        }
        std::pin::Pin::new(&mut self.body).poll_frame(context)
    }
}

impl Door {
    pub fn client(self: &Arc<Self>, server: &skiff_server::Server, user: UserInfo) -> kube::Client {
        let (door, name, inner) = (self.clone(), user.name.clone(), server.service(user));
        let service = tower::service_fn(move |request: Request<Body>| {
            let (door, name, inner) = (door.clone(), name.clone(), inner.clone());
            async move {
                door.count(&name, &request);
                if let Some(code) = *door.fault.lock().unwrap() {
                    return Ok(answer(code));
                }
                let cut = door.cut.lock().unwrap().clone();
                let answered = inner.oneshot(request).await.map_err(BoxError::from)?;
                let cuttable = |body| Cuttable {
                    body,
                    cut: Box::pin(cut.cancelled_owned()),
                };
                Ok::<_, BoxError>(answered.map(|body| cuttable(body).boxed_unsync()))
            }
        });
        skiff_client::in_process(service, "default")
    }

    fn count(&self, user: &str, request: &Request<Body>) {
        let asked = Asked {
            user: user.to_owned(),
            method: request.method().to_string(),
            path: request.uri().path().to_owned(),
        };
        *self.asked.lock().unwrap().entry(asked).or_default() += 1;
    }

    /// From now on every request is answered with this code, and all watches are cut.
    pub fn fail(&self, code: u16) {
        *self.fault.lock().unwrap() = Some(code);
        self.cut();
    }

    pub fn heal(&self) {
        *self.fault.lock().unwrap() = None;
    }

    /// Cuts every watch that is open.
    pub fn cut(&self) {
        std::mem::take(&mut *self.cut.lock().unwrap()).cancel();
    }

    /// Forgets what was counted.
    pub fn clear(&self) {
        self.asked.lock().unwrap().clear();
    }

    pub fn count_of(&self, wanted: impl Fn(&Asked) -> bool) -> usize {
        let asked = self.asked.lock().unwrap();
        asked
            .iter()
            .filter(|(asked, _)| wanted(asked))
            .map(|(_, count)| count)
            .sum()
    }

    /// What was asked for most often, and by whom.
    pub fn most_of_one(&self, wanted: impl Fn(&Asked) -> bool) -> (usize, Option<Asked>) {
        let asked = self.asked.lock().unwrap();
        let counted = asked.iter().filter(|(asked, _)| wanted(asked));
        let most = counted.max_by_key(|(_, count)| **count);
        most.map_or((0, None), |(asked, count)| (*count, Some(asked.clone())))
    }

    /// Those who asked most, for messages.
    pub fn most(&self) -> Vec<(usize, String)> {
        let asked = self.asked.lock().unwrap();
        let mut all: Vec<(usize, String)> = asked
            .iter()
            .map(|(asked, count)| (*count, format!("{} {} {}", asked.user, asked.method, asked.path)))
            .collect();
        all.sort_by(|left, right| right.cmp(left));
        all.truncate(12);
        all
    }
}

impl Asked {
    pub fn is_write(&self) -> bool {
        self.method != "GET"
    }

    /// Events are not what a controller works on.
    pub fn is_about_events(&self) -> bool {
        self.path.contains("/events")
    }
}

fn answer(code: u16) -> Response<skiff_server::Body> {
    let reason = match code {
        410 => "Expired",
        429 => "TooManyRequests",
        503 => "ServiceUnavailable",
        _ => "InternalError",
    };
    let status = json!({"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure", "code": code,
        "reason": reason, "message": "an outage that a test makes", "details": {"retryAfterSeconds": 1}});
    let body = Full::new(Bytes::from(status.to_string())).map_err(|never| match never {});
    let mut response = Response::new(body.boxed_unsync());
    *response.status_mut() = http::StatusCode::from_u16(code).unwrap();
    response
}
