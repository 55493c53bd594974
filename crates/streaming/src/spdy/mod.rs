//! SPDY/3.1, the part of it that Kubernetes clients use: streams that the client opens, data both ways,
//! resets, pings and the farewell.
//!
//! COMPAT: flow-control windows are not kept. The one implementation on the other side neither sends
//! window updates nor takes them, so keeping windows would end every transfer at 64 KiB. The bounded
//! pipe of each stream and the connection below do the slowing down.

mod headers;
mod session;

pub(crate) use session::{Incoming, Outgoing, REFUSED_STREAM, Session};

#[cfg(test)]
pub(crate) use session::client;
