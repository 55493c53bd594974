//! Calling again after a failure that may pass, a little later each time: as upstream's webhooks are called.

use std::time::Duration;

use crate::{Answer, Failure};

#[derive(Debug, Clone, Copy)]
pub struct Backoff {
    pub first: Duration,
    pub factor: f64,
    /// How often it is tried at most.
    pub steps: u32,
    /// Every failure may pass.
    pub every_failure: bool,
}

impl Default for Backoff {
    fn default() -> Backoff {
        Backoff {
            first: Duration::from_millis(500),
            factor: 1.5,
            steps: 5,
            every_failure: false,
        }
    }
}

impl Backoff {
    /// Tries until it is answered, or fails in a way that stays, or has been tried often enough.
    pub async fn run<F, Fut>(&self, mut call: F) -> Result<Answer, Failure>
    where
        F: FnMut() -> Fut,
        Fut: Future<Output = Result<Answer, Failure>>,
    {
        let mut wait = self.first;
        let mut left = self.steps.max(1);
        loop {
            let result = call().await;
            left -= 1;
            let again = match &result {
                Ok(answer) if self.every_failure => !answer.is_success(),
                Err(_) if self.every_failure => true,
                Ok(answer) => answer.retry_after || matches!(answer.code, 429 | 500 | 504),
                Err(failure) => matches!(failure, Failure::Reset(_)),
            };
            if !again || left == 0 {
                return result;
            }
            tokio::time::sleep(wait).await;
            wait = wait.mul_f64(self.factor);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicU32, Ordering};

    #[tokio::test]
    async fn what_may_pass_is_tried_again() {
        let check = async |result: Result<u16, Failure>, tries: u32| {
            let made = AtomicU32::new(0);
            let backoff = Backoff {
                first: Duration::from_micros(1),
                ..Backoff::default()
            };
            let _ = backoff
                .run(|| {
                    made.fetch_add(1, Ordering::Relaxed);
                    let result = result.clone();
                    async {
                        result.map(|code| Answer {
                            code,
                            content_type: String::new(),
                            location: None,
                            retry_after: false,
                            body: Default::default(),
                        })
                    }
                })
                .await;
            assert_eq!(made.into_inner(), tries, "{result:?}");
        };
        check(Ok(200), 1).await;
        check(Ok(403), 1).await;
        check(Ok(500), 5).await;
        check(Ok(429), 5).await;
        check(Err(Failure::Reset("EOF".to_owned())), 5).await;
        check(Err(Failure::Other("no".to_owned())), 1).await;
        check(Err(Failure::Timeout), 1).await;
        let any = Backoff {
            every_failure: true,
            first: Duration::from_micros(1),
            ..Backoff::default()
        };
        let made = AtomicU32::new(0);
        let refused = any
            .run(|| {
                made.fetch_add(1, Ordering::Relaxed);
                async { Err(Failure::Timeout) }
            })
            .await;
        assert!(refused.is_err());
        assert_eq!(made.into_inner(), 5);
    }
}
