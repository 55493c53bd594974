//! The cluster's revision, read consistently. Callers that come while a read is under way share the
//! next one, so that many consistent reads at once are few calls.

use std::sync::Arc;

use parking_lot::Mutex;
use tokio::sync::oneshot;
use tonic::Status;

use super::client::{Again, Client};
use super::history::History;
use super::proto::{RangeRequest, RangeResponse};
use super::{RANGE, range_of};

pub struct Current {
    client: Arc<Client>,
    history: Arc<History>,
    /// Any key will do.
    key: String,
    reads: Mutex<Reads>,
}

#[derive(Default)]
struct Reads {
    waiting: Vec<oneshot::Sender<Result<i64, Status>>>,
    running: bool,
}

impl Current {
    pub fn new(client: Arc<Client>, history: Arc<History>, key: String) -> Current {
        Current {
            client,
            history,
            key,
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
                ..range_of(&self.key)
            };
            let before = self.history.seen();
            let answer: Result<RangeResponse, _> = self.client.call(RANGE, request, Again::Yes).await;
            let revision = answer.and_then(|answer| {
                let header = answer.header.unwrap_or_default();
                let same = self.history.check(&before, &header);
                let place = &self.client.place;
                same.map_err(|why| Status::unavailable(format!("{place} was replaced: {why}")))?;
                Ok(header.revision)
            });
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
