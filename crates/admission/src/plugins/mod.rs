//! The plugins, one file each, and the order in which they run.

use crate::Plugin;

/// Upstream's recommended plugins in upstream's order; what is not built yet is not listed.
pub fn recommended() -> Vec<Box<dyn Plugin>> {
    vec![]
}
