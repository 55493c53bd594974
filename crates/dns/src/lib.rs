//! Cluster DNS: names of services, their endpoints and pods, by the Kubernetes DNS specification 1.1.0.
//! Everything else is forwarded to the resolvers of the host.
//!
//! Answers are made from informers at the moment of the question, so there is nothing to go stale. It writes
//! nothing to the API.

mod cluster;
mod forward;
mod respond;
mod server;
mod zone;

pub use forward::host_resolvers;
pub use server::{DnsConfig, Error, Listen, run};
