//! The in-process door: a tower service that takes a request through the whole chain with a fixed
//! identity. What components in this process use instead of a socket.

use std::convert::Infallible;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use bytes::Bytes;
use http::Request;
use http_body_util::BodyExt;
use skiff_auth::UserInfo;

use crate::body::{Answer, BoxError};
use crate::chain::Identity;
use crate::server::Inner;

#[derive(Clone)]
pub struct InProcess {
    inner: Arc<Inner>,
    user: Arc<UserInfo>,
}

impl InProcess {
    pub(crate) fn new(inner: Arc<Inner>, user: Arc<UserInfo>) -> InProcess {
        InProcess { inner, user }
    }
}

impl<B> tower::Service<Request<B>> for InProcess
where
    B: http_body::Body<Data = Bytes> + Send + 'static,
    B::Error: Into<BoxError>,
{
    type Response = Answer;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Answer, Infallible>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<B>) -> Self::Future {
        let (inner, user) = (self.inner.clone(), self.user.clone());
        let request = request.map(|body| body.map_err(Into::into).boxed_unsync());
        Box::pin(async move { Ok(inner.handle(request, Identity::Fixed(user)).await) })
    }
}
