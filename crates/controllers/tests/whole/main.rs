//! All controllers together over the real API server, in this process: an apply goes down to pods and endpoints, and
//! a delete takes everything with it.

#![allow(
    clippy::unwrap_used,
    reason = "everything here is a test, though not every function is marked as one"
)]

mod bad_input;
mod cluster;
mod cluster_loops;
mod collector;
mod daemonset;
mod devices;
mod door;
mod endpoints;
mod jobs;
mod migrations;
mod namespaces;
mod nodes;
mod outages;
mod pod_certificates;
mod pod_groups;
mod protection;
mod replicas;
mod restarts;
mod rollout;
mod scale;
mod statefulset;
mod trust_bundles;
mod volumes;
