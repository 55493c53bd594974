//! The cluster's revision, read consistently. Callers that come while a read is under way share the
//! next one, so that many consistent reads at once are few calls.

use std::sync::Arc;

use parking_lot::Mutex;
use tokio::sync::oneshot;
use tonic::Status;

use super::client::{Again, Client};
use super::proto::{RangeRequest, RangeResponse};
use super::{FORMAT_KEY, RANGE, range_of};

pub struct Current {
    client: Arc<Client>,
    reads: Mutex<Reads>,
}

#[derive(Default)]
struct Reads {
    waiting: Vec<oneshot::Sender<Result<i64, Status>>>,
    running: bool,
}

impl Current {
    pub fn new(client: Arc<Client>) -> Current {
        Current {
            client,
            reads: Mutex::default(),
        }
    }

    pub async fn read(self: &Arc<Self>) -> Result<i64, Status> {
        let (tell, answer) = oneshot::channel();
        {
            let mut reads = self.reads.lock();
            reads.waiting.push(tell);
            if !std::mem::replace(&mut reads.running, true) {
                // A task of its own: a caller that goes away must not take the others' answer along.
                tokio::spawn(Arc::clone(self).run());
            }
        }
        answer
            .await
            .unwrap_or_else(|_| Err(Status::unavailable("the read was given up")))
    }

    async fn run(self: Arc<Self>) {
        let _guard = OnPanic(&self);
        loop {
            let waiting = {
                let mut reads = self.reads.lock();
                if reads.waiting.is_empty() {
                    reads.running = false;
                    return;
                }
                std::mem::take(&mut reads.waiting)
            };
            // Any linearizable read will do; this one returns no data.
            let request = RangeRequest {
                count_only: true,
                ..range_of(FORMAT_KEY)
            };
            let answer: Result<RangeResponse, _> = self.client.call(RANGE, request, Again::Yes).await;
            let revision = answer.map(|answer| answer.header.unwrap_or_default().revision);
            for tell in waiting {
                let _ = tell.send(revision.clone());
            }
        }
    }
}

/// Lets the next caller start anew if the task dies.
struct OnPanic<'a>(&'a Current);

impl Drop for OnPanic<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            *self.0.reads.lock() = Reads::default();
        }
    }
}
