//! The ingress proxy: HTTP and HTTPS from outside to Services, by the Ingresses of the cluster.
//!
//! ```text
//! Ingress, IngressClass, Service, EndpointSlice, Secret ── compile ──► table, certificates   (run)
//!                                                                          │ swapped whole
//! client ── listen ── guard ── hyper ── forward ── table ── backend ── upstream ──► endpoint
//! ```
//!
//! The table is pure and knows no kind of object. Requests that are on their way keep the table, the backend and
//! the endpoint that they began with. It writes the status of Ingresses and events, and nothing else of the API.

mod annotations;
mod backend;
mod body;
mod compile;
mod connections;
mod endpoints;
mod forward;
mod guard;
mod headers;
mod listen;
mod metrics;
mod run;
mod stall;
mod status;
mod table;
mod tls;
mod tunnel;
mod upstream;

#[cfg(test)]
mod compile_tests;
#[cfg(test)]
mod proxy_tests;

pub use compile::CONTROLLER;
pub use run::{Error, IngressConfig, run};
