//! Kinds of the group `apps`.

pub mod controller_revision;
pub mod daemon_set;
pub mod deployment;
pub mod replica_set;
pub mod rolling;
pub mod stateful_set;
