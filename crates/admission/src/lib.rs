//! Admission: the ordered chain of plugins between authorization and the store. Plugins read other
//! objects through [`Lister`] only, and write nothing but the charge to a quota: a write is the registry's business.

mod attributes;
mod chain;
pub mod plugins;

pub use attributes::{Attributes, Operation, Reinvocation, User, Warnings};
pub use chain::{Chain, Lister, Plugin};
