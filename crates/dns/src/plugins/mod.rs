//! The plugins of a Corefile that answer, or change a question, by themselves: one file each, with its options and what it
//! does. They are pure: no I/O, no clock.

pub mod hosts;
pub mod log;
pub mod rewrite;
pub mod template;
mod text;
