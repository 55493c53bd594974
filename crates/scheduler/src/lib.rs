//! The scheduler: finds a node for each pod that has none, and says why when there is none.
//!
//! The way of a pod: [`queue`] → one cycle over the [`cache`] of nodes and placed pods ([`class`] where pods of the same
//! shape were seen before, else the plain [`cycle`], with [`extended`] steps where extenders have a say; the pods of a PodGroup in one go, see [`pod_group`]) by the plugins of a [`framework`] profile → assumed on the node →
//! bound by a task of its own ([`binding`]). A pod that fits nowhere waits in the queue until something changes that one
//! of the plugins which turned it away takes for a chance; a preemption ([`preempt`]) may make room for it.
//!
//! It writes bindings, events, the pod's `PodScheduled` condition and nominated node, the conditions and deletions of
//! preempted pods, the condition of PodGroups, the choice of node or volume on claims that wait for their first consumer, and the allocation and
//! reservation of resource claims. Nothing else.

mod binding;
mod cache;
mod class;
mod config;
mod cycle;
mod events;
mod extended;
mod extender;
#[cfg(test)]
mod fixtures;
mod framework;
mod handlers;
mod listers;
mod metrics;
mod node;
mod plugins;
mod pod;
mod pod_group;
mod preempt;
mod queue;
mod run;

#[cfg(feature = "bench")]
pub mod bench;

pub use config::{ConfigError, Configuration};
pub use run::{SchedulerConfig, run};
