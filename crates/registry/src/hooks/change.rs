//! What is written beside an object, in the same transaction: what a service holds, and what it gives back.

use std::any::Any;

use skiff_store::Write;

/// Writes that depend on the write of an object: all of them happen, or none.
///
/// A transaction has one key of a resource at most (`Store::transact`). Further ones are written before it, and taken back
/// if the object is not written, or after it. If the process ends in between, they are left for the repair loops.
#[must_use = "what is dropped is not written"]
#[derive(Default)]
pub struct Change {
    pub(crate) before: Vec<Write>,
    pub(crate) with: Vec<Write>,
    pub(crate) after: Vec<Write>,
    /// Dropped when the outcome of the write is known.
    pub(crate) held: Option<Box<dyn Any + Send + Sync>>,
}

impl Change {
    /// Adds a write that takes something.
    pub(crate) fn take(&mut self, write: Write) {
        if self.has_neighbour(&write) {
            self.before.push(write);
        } else {
            self.with.push(write);
        }
    }

    /// Adds a write that gives something back.
    pub(crate) fn free(&mut self, write: Write) {
        if self.has_neighbour(&write) {
            self.after.push(write);
        } else {
            self.with.push(write);
        }
    }

    /// Whether the transaction has a key of the same resource.
    fn has_neighbour(&self, write: &Write) -> bool {
        let folder = |key: &str| key.rfind('/').map_or(0, |slash| slash);
        let own = &write.key[..folder(&write.key)];
        self.with
            .iter()
            .any(|other| &other.key[..folder(&other.key)] == own)
    }
}
