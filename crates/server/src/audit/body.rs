//! The body of an answer that takes long (a watch, a log): its end, however it comes, is the last event of the trail.

use std::collections::BTreeMap;
use std::pin::Pin;
use std::task::{Context, Poll};

use bytes::Bytes;
use http_body::{Frame, SizeHint};

use super::{Stage, Trail};
use crate::body::{Body, BoxError};

pub struct Ending {
    body: Body,
    trail: Box<Trail>,
    annotations: BTreeMap<String, String>,
}

impl Ending {
    pub fn new(body: Body, trail: Box<Trail>, annotations: BTreeMap<String, String>) -> Ending {
        Ending {
            body,
            trail,
            annotations,
        }
    }
}

impl Drop for Ending {
    fn drop(&mut self) {
        self.trail
            .record_later(Stage::ResponseComplete, &self.annotations);
    }
}

impl http_body::Body for Ending {
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        Pin::new(&mut self.body).poll_frame(context)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}
