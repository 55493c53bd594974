//! What the front door checks specially for certain kinds, beside admission. Only this folder and
//! `subresources` name kinds.

pub mod allocation_events;
pub mod bootstrap_secrets;
pub mod claim_access;
pub mod endpoints;
pub mod escalation;
pub mod follow;
pub mod identity;
pub mod ip_addresses;
pub mod legacy_tokens;
pub mod loopback;
pub mod node_graph;
pub mod param_access;
pub mod rbac_source;
pub mod repair;
pub mod requester;
pub mod signer_access;
pub mod store_history;
