//! The vocabulary every other crate speaks: group, version, kind and resource names, selectors, field paths
//! and field errors, name rules, networks, quantities, timestamps, and the one wire error type, [`Status`].
//!
//! Nothing here does I/O, reads a clock, or knows a kind.

pub mod duration;
pub mod field;
pub mod gvk;
pub mod names;
pub mod net;
pub mod quantity;
pub mod regexp;
pub mod selector;
pub mod status;
pub mod time;

pub use gvk::{GroupKind, GroupResource, GroupVersion, GroupVersionKind, GroupVersionResource};
pub use status::Status;
