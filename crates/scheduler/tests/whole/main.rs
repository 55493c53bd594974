//! Whole schedulers over the real API server, in this process: they are killed, cut off from the server and refused by it,
//! and extenders have their say.

#![allow(
    clippy::unwrap_used,
    reason = "everything here is a test, though not every function is marked as one"
)]

mod cluster;
mod extended_resources;
mod extenders;
mod faults;
mod gangs;
mod restarts;
mod wire;
