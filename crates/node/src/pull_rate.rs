//! How often images are pulled: so many a second, and so many at once after a pause. Upstream's `registryPullQPS`.

use std::time::Instant;

use parking_lot::Mutex;

pub const EXCEEDED: &str = "pull QPS exceeded";

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PullRate {
    /// Zero: as many as there are.
    pub per_second: u32,
    pub burst: u32,
}

impl Default for PullRate {
    fn default() -> Self {
        PullRate {
            per_second: 5,
            burst: 10,
        }
    }
}

pub struct PullLimiter {
    rate: PullRate,
    /// What is left, and when that was so.
    left: Mutex<(f64, Instant)>,
}

impl PullLimiter {
    pub fn new(rate: PullRate) -> Self {
        PullLimiter {
            rate,
            left: Mutex::new((rate.burst.into(), Instant::now())),
        }
    }

    /// Whether an image may be pulled now.
    pub fn accepts(&self, now: Instant) -> bool {
        if self.rate.per_second == 0 {
            return true;
        }
        let mut left = self.left.lock();
        let (before, at) = *left;
        let more = now.saturating_duration_since(at).as_secs_f64() * f64::from(self.rate.per_second);
        let have = (before + more).min(self.rate.burst.into());
        let accepts = have >= 1.0;
        *left = (have - if accepts { 1.0 } else { 0.0 }, now.max(at));
        accepts
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn pulls_are_limited() {
        let limiter = |per_second, burst| PullLimiter::new(PullRate { per_second, burst });
        let accepted = |limiter: &PullLimiter, now| (0..100).filter(|_| limiter.accepts(now)).count();
        let (few, now) = (limiter(2, 3), Instant::now());
        assert_eq!(accepted(&few, now), 3);
        assert_eq!(accepted(&few, now + Duration::from_secs(1)), 2);
        assert_eq!(accepted(&few, now + Duration::from_secs(60)), 3);
        assert_eq!(accepted(&limiter(0, 0), now), 100);
        assert_eq!(accepted(&limiter(1, 0), now + Duration::from_secs(9)), 0);
    }
}
