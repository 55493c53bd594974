//! Work that upstream's cost does not count. Comparing two large objects costs a few units there, however large they
//! are; a rule that does so in a loop would hold a processor for minutes. So the work of such operations is counted
//! here as well, in units of some 25 nanoseconds, and an evaluation that does too much is stopped as if it cost too
//! much. The count is the thread's, because equality has no evaluator at hand; evaluations may nest.

use std::cell::Cell;

use crate::error::EvalError;

/// About a second; less in tests, which are not optimised.
const LIMIT: u64 = if cfg!(test) { 1_000_000 } else { 40_000_000 };

thread_local! {
    /// Outside an evaluation nothing is limited.
    static LEFT: Cell<u64> = const { Cell::new(u64::MAX) };
}

/// One evaluation's share; what was left before is there again when it ends.
pub(crate) struct Scope {
    before: u64,
}

impl Scope {
    pub fn new() -> Self {
        Self {
            before: LEFT.replace(LIMIT),
        }
    }
}

impl Scope {
    /// Whether all was spent. Where errors are taken for a plain "no", the refusal can be lost on the way.
    pub fn is_exhausted(&self) -> bool {
        LEFT.get() == 0
    }
}

impl Drop for Scope {
    fn drop(&mut self) {
        LEFT.set(self.before);
    }
}

/// Counts work, and refuses to go on when it was too much.
pub(crate) fn spend(units: usize) -> Result<(), EvalError> {
    let left = LEFT.get();
    match left.checked_sub(units as u64) {
        Some(rest) => {
            LEFT.set(rest);
            Ok(())
        }
        None => {
            LEFT.set(0);
            Err(EvalError::CostLimit)
        }
    }
}
