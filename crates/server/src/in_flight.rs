//! Priority and fairness, thin: a bounded number of requests at a time, reads and writes apart.
//! Whoever does not fit is told to come back in a second.

use std::sync::Arc;

use skiff_meta::Status;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// Upstream's `--max-requests-inflight` and `--max-mutating-requests-inflight`.
const READS: usize = 400;
const WRITES: usize = 200;

pub struct InFlight {
    reads: Arc<Semaphore>,
    writes: Arc<Semaphore>,
}

impl Default for InFlight {
    fn default() -> Self {
        InFlight {
            reads: Arc::new(Semaphore::new(READS)),
            writes: Arc::new(Semaphore::new(WRITES)),
        }
    }
}

impl InFlight {
    pub fn admit(&self, mutating: bool) -> Result<OwnedSemaphorePermit, Status> {
        let semaphore = if mutating { &self.writes } else { &self.reads };
        Arc::clone(semaphore)
            .try_acquire_owned()
            .map_err(|_| Status::too_many_requests("Too many requests, please try again later.", 1))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whoever_does_not_fit_is_told_when_to_come_back() {
        let limit = InFlight::default();
        let held: Vec<_> = (0..WRITES).map(|_| limit.admit(true).expect("room")).collect();
        let refused = limit.admit(true).expect_err("full");
        assert_eq!(
            (refused.code, refused.details.map(|d| d.retry_after_seconds)),
            (429, Some(1))
        );
        drop(limit.admit(false).expect("reads are counted apart"));
        drop(held);
        drop(limit.admit(true).expect("room again"));
    }
}
