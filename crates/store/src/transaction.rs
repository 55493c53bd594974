//! Several writes that happen together, and writes whose value depends on the present one.

use std::fmt;
use std::sync::Arc;

use bytes::Bytes;

use crate::{Expect, KeyValue, Op, Outcome};

/// One write of one key.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Write {
    pub key: Arc<str>,
    pub expect: Expect,
    pub op: Op,
    pub lease_seconds: Option<i64>,
}

impl Write {
    pub fn new(key: impl Into<Arc<str>>, expect: Expect, op: Op) -> Write {
        Write {
            key: key.into(),
            expect,
            op,
            lease_seconds: None,
        }
    }
}

/// What a [`Merge`] makes of the present value.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Merged {
    Put(Bytes),
    /// The value is as it should be.
    Keep,
    /// The present value does not allow it: the transaction conflicts at this write.
    Refuse,
}

type MergeFn = dyn Fn(Option<&[u8]>) -> Merged + Send + Sync;

/// Makes the new value of a key out of the present one (`None`: absent). A store may call it several times, also for
/// transactions that do not happen, and while it holds its locks: it must be quick and do nothing else.
#[derive(Clone)]
pub struct Merge(Arc<MergeFn>);

impl Merge {
    pub fn new(merge: impl Fn(Option<&[u8]>) -> Merged + Send + Sync + 'static) -> Merge {
        Merge(Arc::new(merge))
    }

    pub fn apply(&self, current: Option<&[u8]>) -> Merged {
        (self.0)(current)
    }
}

impl fmt::Debug for Merge {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Merge")
    }
}

impl PartialEq for Merge {
    fn eq(&self, other: &Merge) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl Eq for Merge {}

/// A write that is on disk.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Written {
    /// As in [`Outcome::Done`].
    pub revision: i64,
    pub previous: Option<KeyValue>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Transacted {
    /// All writes are on disk; one each, in their order.
    Done(Vec<Written>),
    /// The expectation of the write `at` did not hold, or it was refused; nothing changed. `revision` is the store's.
    Conflict {
        at: usize,
        current: Option<KeyValue>,
        revision: i64,
    },
}

impl Transacted {
    /// The outcome of a transaction of one write.
    pub(crate) fn single(self) -> Option<Outcome> {
        match self {
            Transacted::Done(written) => {
                let Written { revision, previous } = written.into_iter().next()?;
                Some(Outcome::Done { revision, previous })
            }
            Transacted::Conflict {
                current, revision, ..
            } => Some(Outcome::Conflict { current, revision }),
        }
    }
}
