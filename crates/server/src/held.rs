//! What all requests together may hold in memory: their heads and their bodies. A request that does not fit is
//! answered 429, so that clients come back later instead of taking the process down.
//!
//! Small requests are not counted: their number is bounded by connections, streams and seats, and leases, heartbeats
//! and status updates must get through while somebody else fills the budget.

use std::sync::atomic::{AtomicUsize, Ordering};

use bytes::Bytes;

/// What all large bodies together may take. Decoding one takes several times as much, but only while it is decoded.
const BODIES: usize = 128 << 20;
/// What all large heads together may take.
const HEADS: usize = 64 << 20;
/// Up to this size nothing is counted.
const SMALL_BODY: usize = 64 << 10;
const SMALL_HEAD: usize = 8 << 10;

/// The budgets of one process.
pub static BODY_BUDGET: Budget = Budget::new(BODIES, SMALL_BODY);
pub static HEAD_BUDGET: Budget = Budget::new(HEADS, SMALL_HEAD);

/// An amount of bytes that many share.
pub struct Budget {
    most: usize,
    small: usize,
    used: AtomicUsize,
}

impl Budget {
    pub const fn new(most: usize, small: usize) -> Budget {
        Budget {
            most,
            small,
            used: AtomicUsize::new(0),
        }
    }

    /// A share that holds nothing yet.
    pub fn share(&'static self) -> Share {
        Share {
            budget: self,
            held: 0,
        }
    }
}

/// What one request holds of a budget, given back when it is dropped.
pub struct Share {
    budget: &'static Budget,
    held: usize,
}

impl Share {
    /// Makes the share at least this large: false if the budget does not allow it.
    pub fn grow(&mut self, to: usize) -> bool {
        if to <= self.budget.small || to <= self.held {
            return true;
        }
        let more = to - self.held;
        let used = self.budget.used.fetch_add(more, Ordering::AcqRel);
        if used.saturating_add(more) > self.budget.most {
            self.budget.used.fetch_sub(more, Ordering::AcqRel);
            return false;
        }
        self.held = to;
        true
    }

    /// The bytes, which hold the share for as long as anybody has them.
    pub fn hold(self, bytes: Bytes) -> Bytes {
        if self.held == 0 {
            return bytes;
        }
        Bytes::from_owner(Held { bytes, _share: self })
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        self.budget.used.fetch_sub(self.held, Ordering::AcqRel);
    }
}

struct Held {
    bytes: Bytes,
    _share: Share,
}

impl AsRef<[u8]> for Held {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

/// The bytes of a request's head.
pub fn head_bytes(parts: &http::request::Parts) -> usize {
    let uri = parts.uri.path_and_query().map_or(0, |uri| uri.as_str().len());
    let headers = parts.headers.iter();
    uri + headers
        .map(|(name, value)| name.as_str().len() + value.len())
        .sum::<usize>()
}

#[cfg(test)]
mod tests {
    use super::*;

    static BUDGET: Budget = Budget::new(1000, 10);

    #[test]
    fn what_does_not_fit_is_refused_and_what_is_dropped_comes_back() {
        let mut first = BUDGET.share();
        assert!(first.grow(10), "small");
        assert_eq!(BUDGET.used.load(Ordering::Acquire), 0);
        assert!(first.grow(600) && first.grow(500) && first.grow(600));
        let mut second = BUDGET.share();
        assert!(!second.grow(401));
        assert!(second.grow(400) && second.grow(5));
        let bytes = first.hold(Bytes::from(vec![0; 600]));
        let part = bytes.slice(..10);
        drop(bytes);
        assert!(!second.grow(600), "a part is still held");
        drop(part);
        assert!(second.grow(600));
        drop(second);
        assert_eq!(BUDGET.used.load(Ordering::Acquire), 0);
    }
}
