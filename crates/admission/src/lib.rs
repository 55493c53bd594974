//! Admission: the ordered chain of plugins between authorization and the store. Plugins read other
//! objects through [`Lister`] only, and write nothing but the charge to a quota: a write is the registry's business.

mod attributes;
mod chain;
pub mod plugins;
mod pod_security;

pub use attributes::{Access, Attributes, Operation, Reinvocation, Told, User};
pub use chain::{Chain, Lister, Plugin};
