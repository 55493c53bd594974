//! One reconcile: runs inside its item's marks and decides when the item comes back. A panic ends one
//! reconcile, never the worker.

use std::fmt::{Debug, Display};
use std::hash::Hash;
use std::panic::AssertUnwindSafe;
use std::time::Duration;

use futures::FutureExt;
use skiff_trace::Work;

use crate::queue::{Taken, WorkQueue};
use crate::writes::{self, Write};

/// What a reconcile wants next for its item.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// Nothing until something changes.
    Done,
    /// Look again after this long, whatever changes.
    RequeueAfter(Duration),
}

/// What one reconcile left behind.
pub(crate) struct Worked {
    pub(crate) written: Vec<Write>,
    /// When it comes back, if it failed.
    pub(crate) retry_after: Option<Duration>,
}

/// One reconcile, and what it wrote.
pub(crate) async fn work<T, R, F, E>(
    name: &str,
    queue: &WorkQueue<T>,
    taken: &Taken<T>,
    reconcile: R,
) -> Worked
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
    let run = AssertUnwindSafe(skiff_trace::scope(
        marks,
        Box::pin(async { reconcile(item).await }),
    ));
    let (outcome, written) = writes::recorded(run.catch_unwind()).await;
    let mut retry_after = None;
    match outcome {
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
            retry_after = Some(queue.add_rate_limited(taken.item.clone(), taken.cause.clone()));
        }
        Err(panic) => {
            let message = skiff_supervise::panic_text(&*panic);
            tracing::error!(controller = name, item = ?taken.item, message, "reconcile panicked");
            skiff_supervise::failed(
                "reconcile",
                &format!("{name} {:?}: panicked: {message}", taken.item),
            );
            retry_after = Some(queue.add_rate_limited(taken.item.clone(), taken.cause.clone()));
        }
    }
    Worked { written, retry_after }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicU32, Ordering};

    #[tokio::test(start_paused = true)]
    async fn errors_and_panics_are_retried_and_end_nothing() {
        let queue = WorkQueue::<&'static str>::new();
        let tries = AtomicU32::new(0);
        queue.add("a", None);
        for _ in 0..4 {
            let taken = queue.next().await.unwrap();
            let outcome = |_item| async {
                match tries.fetch_add(1, Ordering::SeqCst) {
                    0 => Err("first".to_owned()),
                    1 => panic!("second"),
                    2 => Ok(Action::RequeueAfter(Duration::from_secs(3))),
                    _ => Ok(Action::Done),
                }
            };
            work("test", &queue, &taken, outcome).await;
        }
        assert_eq!(tries.load(Ordering::SeqCst), 4);
        assert_eq!(queue.requeues(&"a"), 0);
        assert!(queue.is_empty());
    }
}
