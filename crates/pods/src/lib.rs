//! What several components must agree on about a pod: which taints it tolerates, which nodes its affinity selects,
//! what it requests, its QoS class, whether it is ready, active or ended.
//!
//! Pure functions over the typed objects: no I/O, no clock. Time comes from the caller.

pub mod affinity;
pub mod labels;
pub mod qos;
pub mod requests;
pub mod state;
pub mod taints;
