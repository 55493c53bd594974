//! Workers over a work queue: each takes an item, reconciles it inside the item's marks, and decides
//! when it comes back. A panic ends one reconcile, never the worker.

use std::fmt::{Debug, Display};
use std::hash::Hash;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::Duration;

use futures::FutureExt;
use skiff_trace::Work;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use crate::queue::{Taken, WorkQueue};

/// What a reconcile wants next for its item.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// Nothing until something changes.
    Done,
    /// Look again after this long, whatever changes.
    RequeueAfter(Duration),
}

/// Runs `workers` tasks over `queue` until `shutdown`, then lets the reconciles in progress end.
///
/// An `Err` brings the item back with exponential back-off.
pub async fn run_workers<T, R, F, E>(
    name: &str,
    workers: usize,
    queue: Arc<WorkQueue<T>>,
    shutdown: CancellationToken,
    reconcile: R,
) where
    T: Clone + Debug + Eq + Hash + Send + Sync + 'static,
    R: Fn(T) -> F + Send + Sync + 'static,
    F: Future<Output = Result<Action, E>> + Send + 'static,
    E: Display + Send + 'static,
{
    let reconcile = Arc::new(reconcile);
    let mut tasks = JoinSet::new();
    for _ in 0..workers {
        let (queue, shutdown, reconcile, name) = (
            queue.clone(),
            shutdown.clone(),
            reconcile.clone(),
            name.to_owned(),
        );
        tasks.spawn(async move {
            loop {
                let taken = tokio::select! {
                    biased;
                    _ = shutdown.cancelled() => return,
                    taken = queue.next() => taken,
                };
                let Some(taken) = taken else { return };
                work(&name, &queue, taken, &*reconcile).await;
            }
        });
    }
    while let Some(ended) = tasks.join_next().await {
        // A panic outside of a reconcile: whoever runs the controller starts it again.
        if let Err(error) = ended
            && let Ok(panic) = error.try_into_panic()
        {
            std::panic::resume_unwind(panic);
        }
    }
}

async fn work<T, R, F, E>(name: &str, queue: &WorkQueue<T>, taken: Taken<T>, reconcile: &R)
where
    T: Clone + Debug + Eq + Hash,
    R: Fn(T) -> F,
    F: Future<Output = Result<Action, E>>,
    E: Display,
{
    let waited_us = i64::try_from(taken.added_at.elapsed().as_micros()).unwrap_or(i64::MAX);
    let marks = Work::new(taken.cause.clone());
    marks.push(
        "queue",
        skiff_trace::now_us().saturating_sub(waited_us),
        waited_us,
    );
    let item = taken.item.clone();
    // The closure runs inside the guard as well: it may panic before it makes its future.
    let run = AssertUnwindSafe(skiff_trace::scope(marks, async { reconcile(item).await }));
    match run.catch_unwind().await {
        Ok(Ok(Action::Done)) => queue.forget(&taken.item),
        Ok(Ok(Action::RequeueAfter(delay))) => {
            queue.forget(&taken.item);
            // Its cause stays what it was: the work is not done.
            queue.add_after(taken.item.clone(), delay, taken.cause.clone());
        }
        Ok(Err(error)) => {
            // A conflict or a cache that lags is everyday; what keeps failing deserves a louder word.
            if queue.requeues(&taken.item) < 5 {
                tracing::debug!(controller = name, item = ?taken.item, %error, "reconcile failed, will retry");
            } else {
                tracing::warn!(controller = name, item = ?taken.item, %error, "reconcile keeps failing");
            }
            queue.add_rate_limited(taken.item.clone(), taken.cause.clone());
        }
        Err(panic) => {
            let message = skiff_supervise::panic_text(&*panic);
            tracing::error!(controller = name, item = ?taken.item, message, "reconcile panicked");
            skiff_supervise::failed(
                "reconcile",
                &format!("{name} {:?}: panicked: {message}", taken.item),
            );
            queue.add_rate_limited(taken.item.clone(), taken.cause.clone());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicU32, Ordering};

    #[tokio::test(start_paused = true)]
    async fn errors_and_panics_are_retried_and_end_nothing() {
        let queue = WorkQueue::<&'static str>::new();
        let shutdown = CancellationToken::new();
        let tries = Arc::new(AtomicU32::new(0));
        let (counter, stop) = (tries.clone(), shutdown.clone());
        queue.add("a", None);
        run_workers("test", 2, queue.clone(), shutdown, move |_item| {
            let (counter, stop) = (counter.clone(), stop.clone());
            async move {
                match counter.fetch_add(1, Ordering::SeqCst) {
                    0 => Err("first".to_owned()),
                    1 => panic!("second"),
                    2 => Ok(Action::RequeueAfter(Duration::from_secs(3))),
                    _ => {
                        stop.cancel();
                        Ok(Action::Done)
                    }
                }
            }
        })
        .await;
        assert_eq!(tries.load(Ordering::SeqCst), 4);
        assert_eq!(queue.requeues(&"a"), 0);
    }
}
