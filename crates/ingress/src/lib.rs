//! The ingress proxy: HTTP, HTTPS and TLS from outside to Services, by the Ingresses of the cluster and by Gateway API.
//!
//! ```text
//! Ingress, IngressClass, Service, EndpointSlice, Secret ── compile ──► table, certificates   (run)
//!                                                                          │ swapped whole
//! client ── listen ── guard ── hyper ── forward ── table ── backend ── upstream ──► endpoint
//! ```
//!
//! All from `listen` to `upstream` of one client's connection happens on one thread (`workers`).
//!
//! Gateway API has a table of its own (`gateway`), which is asked first.
//!
//! The table is pure and knows no kind of object. Requests that are on their way keep the table, the backend and
//! the endpoint that they began with. It writes the status of Ingresses and of Gateway API's objects, and events, and nothing else of the API.

mod backend;
mod body;
mod compile;
mod compile_backends;
mod connections;
mod course;
mod dial;
mod doors;
mod endpoints;
mod features;
mod forward;
mod gateway;
mod guard;
mod headers;
mod hello;
mod http1;
mod listen;
mod metrics;
mod refusal;
mod run;
mod send;
mod stall;
mod status;
mod table;
mod target;
mod tcp;
mod tls;
mod tunnel;
mod upstream;
mod workers;

#[cfg(test)]
mod access_tests;
#[cfg(test)]
mod compile_tests;
#[cfg(test)]
mod features_tests;
#[cfg(test)]
mod gateway_tests;
#[cfg(test)]
mod http1_tests;
#[cfg(test)]
mod proxy_tests;

pub use compile::CONTROLLER;
pub use gateway::CONTROLLER as GATEWAY_CONTROLLER;
pub use gateway::definitions::{MANAGED_BY as DEFINITIONS_MANAGED_BY, definitions as gateway_definitions};
pub use run::{Error, IngressConfig, run};
