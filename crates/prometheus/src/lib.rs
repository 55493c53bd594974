//! Metrics of one component, in the Prometheus text format: counters, gauges and histograms with labels.
//!
//! A family never holds more than its limit of series. Label values that come after that are counted in one
//! series in which every label is [`OVERFLOW`], so a client that invents names cannot make the process grow.
//!
//! This crate measures nothing by itself and knows no component. Components that share a process have a
//! [`Registry`] each, as upstream's have an endpoint each.

mod cells;
mod family;
pub mod process;
mod registry;

pub use cells::{Counter, Gauge, Histogram};
pub use family::{Family, OVERFLOW};
pub use process::build_info;
pub use registry::Registry;

/// `count` bucket bounds, from `start`, each `factor` times the one before.
pub fn exponential_buckets(start: f64, factor: f64, count: usize) -> Vec<f64> {
    std::iter::successors(Some(start), |bound| Some(bound * factor))
        .take(count)
        .collect()
}
