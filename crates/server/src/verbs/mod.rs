//! The verbs of the main resources and of `status`: what happens between authorization and the answer.

pub mod apply;
pub mod delete;
pub mod open_watches;
pub mod patch;
pub mod read;
pub mod watch;
pub mod write;
