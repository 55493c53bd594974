//! Kinds of the group `batch`.

pub mod cron;
pub mod cron_job;
pub mod job;
mod job_status;
mod job_update;
