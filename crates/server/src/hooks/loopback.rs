//! How the server's own loops write: through the same chain as every client, as the user `system:apiserver`.
//! Their writes are authorized, admitted, audited and marked like everybody's.
//!
//! The exceptions are the objects that must exist before the first request, which the registry makes by itself.

use std::sync::Arc;

use bytes::Bytes;
use futures::future::BoxFuture;
use http::{Method, Request, header};
use http_body_util::{BodyExt, Full};
use serde_json::Value;
use skiff_auth::UserInfo;
use skiff_meta::Status;
use skiff_registry::object;
use skiff_trace::{TraceHeaders, TraceHeadersService};
use tower::{Layer, ServiceExt};

use crate::server::Inner;
use crate::service::InProcess;

/// COMPAT: upstream's name and group of the server as its own client.
const USER: &str = "system:apiserver";
const GROUPS: [&str; 2] = ["system:masters", "system:authenticated"];
/// What the server's writes are owned as.
const AGENT: &str = "kube-apiserver";
/// How often a write is tried again with the newest object.
const ATTEMPTS: usize = 5;

const JSON: &str = "application/json";
const APPLY: &str = "application/apply-patch+yaml";

/// A client of this server itself.
#[derive(Clone)]
pub struct Loopback {
    service: TraceHeadersService<InProcess>,
}

impl Loopback {
    pub fn new(inner: &Arc<Inner>) -> Loopback {
        let user = Arc::new(UserInfo::new(USER, GROUPS));
        Loopback {
            service: TraceHeaders.layer(InProcess::new(inner.clone(), user)),
        }
    }

    /// The object; `None` if there is none.
    pub async fn get(&self, path: &str) -> Result<Option<Value>, Status> {
        match self.send(Method::GET, path, "", None).await {
            Err(status) if status.code == 404 => Ok(None),
            result => result.map(Some),
        }
    }

    pub async fn create(&self, collection: &str, object: &Value) -> Result<Value, Status> {
        self.send(Method::POST, collection, JSON, Some(object)).await
    }

    /// Creates the object unless one of its name is there.
    pub async fn ensure(&self, collection: &str, object: &Value) -> Result<(), Status> {
        let name = object::name(object);
        if self.get(&format!("{collection}/{name}")).await?.is_some() {
            return Ok(());
        }
        match self.create(collection, object).await {
            Err(status) if status.code == 409 => Ok(()),
            result => result.map(drop),
        }
    }

    /// Deletes the object with this uid; one that is gone is no error.
    pub async fn delete(&self, path: &str, uid: &str) -> Result<(), Status> {
        let options =
            serde_json::json!({"kind": "DeleteOptions", "apiVersion": "v1", "preconditions": {"uid": uid}});
        match self.send(Method::DELETE, path, JSON, Some(&options)).await {
            Err(status) if matches!(status.code, 404 | 409) => Ok(()),
            result => result.map(drop),
        }
    }

    /// Server-side apply, with force.
    pub async fn apply(&self, path: &str, manager: &str, object: &Value) -> Result<Value, Status> {
        let path = format!("{path}?fieldManager={manager}&force=true");
        self.send(Method::PATCH, &path, APPLY, Some(object)).await
    }

    /// Writes what `change` makes of the object at `path` to `path` and `subresource` (empty: the object itself).
    /// `None` from `change` leaves it as it is. Another's write in between makes it start over.
    pub async fn update(
        &self,
        path: &str,
        subresource: &str,
        mut change: impl FnMut(Value) -> Result<Option<Value>, Status>,
    ) -> Result<Value, Status> {
        let target = match subresource {
            "" => path.to_owned(),
            subresource => format!("{path}/{subresource}"),
        };
        let mut attempts = 0;
        loop {
            let present = self.send(Method::GET, path, "", None).await?;
            let Some(wanted) = change(present.clone())? else {
                return Ok(present);
            };
            attempts += 1;
            match self.send(Method::PUT, &target, JSON, Some(&wanted)).await {
                Err(status) if status.code == 409 && attempts < ATTEMPTS => {}
                result => return result,
            }
        }
    }

    /// Boxed, and without a borrow in it: callers are tasks that are kept for as long as the server runs.
    fn send(
        &self,
        method: Method,
        path: &str,
        content_type: &'static str,
        content: Option<&Value>,
    ) -> BoxFuture<'static, Result<Value, Status>> {
        let mut request = Request::builder()
            .method(method)
            .uri(path)
            .header(header::USER_AGENT, AGENT)
            .header(header::ACCEPT, JSON);
        if content.is_some() {
            request = request.header(header::CONTENT_TYPE, content_type);
        }
        let bytes = Bytes::from(content.map(Value::to_string).unwrap_or_default());
        let request = request.body(Full::new(bytes));
        let service = self.service.clone();
        Box::pin(async move {
            let request = request.map_err(Status::internal)?;
            let answer = match service.oneshot(request).await {
                Ok(answer) => answer,
                Err(never) => match never {},
            };
            let code = answer.status();
            let bytes = answer.into_body().collect().await.map_err(Status::internal)?;
            let value: Value = serde_json::from_slice(&bytes.to_bytes()).map_err(Status::internal)?;
            if code.is_success() {
                Ok(value)
            } else {
                Err(Status::from_value(&value))
            }
        })
    }
}
