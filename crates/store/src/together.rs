//! A hint from callers: one task makes many writes at a time.
//!
//! The embedded store lets a caller that is alone commit on its own thread (`embedded/queue.rs`). Futures that one task
//! polls in turn are never seen to meet: each would be committed by itself, with a sync of its own.

use std::future::Future;

tokio::task_local! {
    static TOGETHER: ();
}

/// Runs `future`, which makes many writes concurrently within this task: the embedded store commits them in groups.
pub async fn together<F: Future>(future: F) -> F::Output {
    TOGETHER.scope((), future).await
}

pub(crate) fn are_together() -> bool {
    TOGETHER.try_with(|()| ()).is_ok()
}
