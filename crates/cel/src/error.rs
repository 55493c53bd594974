//! Why an evaluation gave no value.

use std::borrow::Cow;

/// The end of an evaluation without a value.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum EvalError {
    /// A mistake in the data or the expression; `&&`, `||` and the like may absorb it.
    #[error("{0}")]
    Failed(Cow<'static, str>),
    /// The expression cost more than it may.
    #[error("operation cancelled: actual cost limit exceeded")]
    CostLimit,
    /// The caller asked to stop.
    #[error("operation interrupted")]
    Interrupted,
}

impl EvalError {
    pub(crate) fn new(message: impl Into<Cow<'static, str>>) -> Self {
        Self::Failed(message.into())
    }

    pub(crate) fn no_such_overload() -> Self {
        Self::Failed(Cow::Borrowed("no such overload"))
    }

    /// Whether evaluation must stop at once.
    pub(crate) fn is_final(&self) -> bool {
        !matches!(self, Self::Failed(_))
    }
}
