//! The pod network as the node sees it: the service proxy. Network policy and routes between nodes will
//! live here too.
//!
//! It is a client of the API and of the kernel, and calls no other component.

pub mod proxy;
