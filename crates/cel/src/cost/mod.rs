//! What an expression costs: estimated before it is accepted, counted while it runs. The numbers are upstream's,
//! because they decide which rules a cluster accepts.

pub(crate) mod calls;
mod estimate;
mod range;
pub(crate) mod runtime;

pub(crate) use estimate::estimate;
pub use range::Range;
