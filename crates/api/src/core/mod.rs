//! Kinds of the core group.

pub mod claim;
pub mod config;
pub mod container;
pub mod endpoints;
pub mod env;
pub mod event;
pub mod mounts;
pub mod namespace;
pub mod node;
pub mod persistent_volume;
pub mod pod;
pub mod pod_defaults;
pub mod pod_row;
pub mod pod_spec;
pub mod pod_warnings;
pub mod probe;
pub mod qos;
pub mod quota;
pub mod replication_controller;
pub mod resources;
pub mod scheduling;
pub mod security;
pub mod service;
pub mod service_account;
pub mod service_rules;
pub mod volume;
