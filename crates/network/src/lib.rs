//! The network as the node sees it: `pods` connects this node's pods with those of all others, `proxy` sends
//! packets for services to their endpoints, `policy` drops what network policies do not allow. Beside API servers,
//! `dns_endpoints` and `load_balancer` write where cluster DNS and Services from outside are reached; `announce` makes the
//! latter's own addresses known on the node's link. `check` walks the way of a packet and names what stops it.
//!
//! It is a client of the API and of the kernel, and calls no other component.

pub mod announce;
pub mod check;
pub mod dns_endpoints;
pub mod load_balancer;
mod nft;
pub mod pods;
pub mod policy;
pub mod proxy;
