//! Server-side apply: who owns which field of an object, and how an applied configuration is merged into it.
//! Works on plain values along a [`TypeRef`], which is a view of a type table or of a custom resource's schema.
//! Knows no kind, no request and no clock.

mod atomics;
mod compare;
mod custom;
mod element;
mod field_set;
mod go_print;
mod managers;
mod merge;
mod reconcile;
mod remove;
mod set;
mod text;
mod types;
mod updater;
mod validate;

pub use atomics::atomics;
pub use compare::{Comparison, compare};
pub use custom::Definition;
pub use element::{Path, PathElement};
pub use field_set::field_set;
pub use managers::{Managed, Manager, ManagerId, Operation};
pub use merge::merge;
pub use set::Set;
pub use text::write_fields;
pub use types::TypeRef;
pub use updater::{Applied, ApplyError, Conflict, Updater, Versions};
pub use validate::{Duplicates, validate};
