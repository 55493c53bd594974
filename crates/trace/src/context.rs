//! The context of one piece of work: its cause, and the stages gone through since the last write.

use crate::{Cause, Stage};
use parking_lot::Mutex;
use std::future::Future;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// At most this many stages ride on one request; later ones are dropped.
pub(crate) const MAX_STAGES: usize = 32;

tokio::task_local! {
    static WORK: Arc<Work>;
}

/// Shared by everything that happens on behalf of one wake-up. Tasks spawned inside do not inherit it;
/// hand a clone to [`scope`] there.
#[derive(Debug)]
pub struct Work {
    cause: Option<Cause>,
    /// Taken by the next write. A leaf lock: nothing else is locked while it is held.
    stages: Mutex<Vec<Stage>>,
}

impl Work {
    pub fn new(cause: Option<Cause>) -> Arc<Self> {
        Arc::new(Self {
            cause,
            stages: Mutex::new(Vec::new()),
        })
    }

    /// The work around the caller, if any.
    pub fn current() -> Option<Arc<Self>> {
        WORK.try_with(Arc::clone).ok()
    }

    pub fn cause(&self) -> Option<&Cause> {
        self.cause.as_ref()
    }

    pub fn push(&self, name: &str, start_us: i64, dur_us: i64) {
        let mut stages = self.stages.lock();
        if stages.len() < MAX_STAGES {
            stages.push(Stage {
                name: name.to_owned(),
                start_us,
                dur_us,
            });
        }
    }

    pub fn take_stages(&self) -> Vec<Stage> {
        std::mem::take(&mut self.stages.lock())
    }
}

/// Microseconds since the Unix epoch.
pub fn now_us() -> i64 {
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .map_or(0, |d| i64::try_from(d.as_micros()).unwrap_or(i64::MAX))
}

/// Runs `future` as part of `work`.
pub async fn scope<F: Future>(work: Arc<Work>, future: F) -> F::Output {
    WORK.scope(work, future).await
}

/// The object version that woke the caller.
pub fn current_cause() -> Option<Cause> {
    WORK.try_with(|work| work.cause.clone()).ok().flatten()
}

/// Times `future` as a stage of the work around it.
pub async fn stage<F: Future>(name: &str, future: F) -> F::Output {
    let start = now_us();
    let output = future.await;
    record_stage(name, start);
    output
}

/// Records a stage that began at `start_us` and ends now. Outside any work it does nothing.
pub fn record_stage(name: &str, start_us: i64) {
    let _ = WORK.try_with(|work| work.push(name, start_us, (now_us() - start_us).max(0)));
}

/// Announces when a failed step of `container` is tried again (see [`crate::NEXT_TRY`]).
pub fn next_try(container: &str, delay: Duration) {
    let delay = i64::try_from(delay.as_micros()).unwrap_or(i64::MAX);
    let name = format!("{}{container}", crate::NEXT_TRY);
    let _ = WORK.try_with(|work| work.push(&name, now_us(), delay));
}

/// Tells something of the next write rather than of the time before it, such as [`crate::COMPLETE`].
pub fn note(name: &str) {
    let _ = WORK.try_with(|work| work.push(name, now_us(), 0));
}
