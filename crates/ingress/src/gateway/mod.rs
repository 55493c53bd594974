//! Gateway API: Gateways, and the routes that attach to them, compiled into a route table of their own.
//!
//! ```text
//! GatewayClass, Gateway, HTTPRoute, GRPCRoute, TLSRoute, ReferenceGrant   (watch: while their definitions exist)
//!     ── plan: which listeners and routes are valid ──► table, ports, statuses   (pure)
//! ```
//!
//! The table knows no kind of object, and the plan reads no clock and writes nothing.

pub mod certificates;
pub mod cors;
pub mod definitions;
pub mod filters;
pub mod hosts;
pub mod listeners;
pub mod objects;
pub mod plan;
pub mod request;
pub mod routes;
pub mod rules;
pub mod status;
pub mod table;
pub mod watch;

#[cfg(test)]
mod plan_tests;

/// The API group of all kinds.
pub const GROUP: &str = "gateway.networking.k8s.io";
/// The controller that a GatewayClass names.
pub const CONTROLLER: &str = "skiff.io/gateway-controller";
