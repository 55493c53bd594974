//! The scheduler: finds a node for each pod that has none, and says why when there is none.
//!
//! The way of a pod: [`queue`] → a [`snapshot`] of the nodes → the plugins of the [`framework`] (filter, then
//! score) → assumed on the node → bound through the binding subresource. A pod that fits nowhere waits in the
//! queue until something changes that one of the plugins which turned it away cares about.
//!
//! It writes bindings, events and the pod's `PodScheduled` condition, and nothing else.

mod cycle;
mod framework;
mod metrics;
mod plugins;
mod queue;
mod resources;
mod run;
mod snapshot;

pub use run::{SchedulerConfig, run};
