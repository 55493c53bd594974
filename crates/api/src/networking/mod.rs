//! Kinds of the group `networking.k8s.io`.

pub mod address;
pub mod ingress;
pub mod network_policy;
