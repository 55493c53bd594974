//! What an expression costs: estimated before it is accepted, counted while it runs. The numbers are upstream's,
//! because they decide which rules a cluster accepts.

pub(crate) mod calls;
mod estimate;
mod range;
pub(crate) mod runtime;

pub(crate) use estimate::estimate;
pub use range::Range;

/// The calls that look at one small value: what they are estimated at is what they cost.
fn costs_one(name: &str) -> bool {
    matches!(
        name,
        "format.named"
            | "masked"
            | "prefixLength"
            | "family"
            | "isUnspecified"
            | "isLoopback"
            | "isLinkLocalMulticast"
            | "isLinkLocalUnicast"
            | "isGlobalUnicast"
            | "sign"
            | "asInteger"
            | "isInteger"
            | "asApproximateFloat"
            | "isGreaterThan"
            | "isLessThan"
            | "compareTo"
            | "add"
            | "sub"
            | "major"
            | "minor"
            | "patch"
            | "getScheme"
            | "getHostname"
            | "getHost"
            | "getPort"
            | "getEscapedPath"
            | "getQuery"
    )
}
