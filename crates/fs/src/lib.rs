//! File operations that several crates share: removing directory trees, taking mounts down, measuring what a
//! directory takes, and replacing files so that a crash leaves the old or the new content. It knows nothing of clusters, pods or containers.

mod mounts;
mod removal;
mod usage;
mod write;

pub use mounts::{mounts_below, unmount_below};
pub use removal::remove_tree;
pub use usage::{DiskUsage, disk_usage};
pub use write::{create_folders_durably, sync_folder, write_atomically, write_durably};
