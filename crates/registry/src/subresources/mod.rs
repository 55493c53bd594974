//! What subresources do to their object, as pure functions: the server decodes, authorizes and admits,
//! the registry's update loop writes.

pub mod binding;
pub mod eviction;
pub mod scale;
