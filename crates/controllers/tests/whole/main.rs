//! All controllers together over the real API server, in this process: an apply goes down to pods and endpoints, and
//! a delete takes everything with it.

#![allow(
    clippy::unwrap_used,
    reason = "everything here is a test, though not every function is marked as one"
)]

mod cluster;
mod collector;
mod endpoints;
mod namespaces;
mod nodes;
mod replicas;
mod rollout;
mod volumes;
