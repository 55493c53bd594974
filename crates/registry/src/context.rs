//! What one request carries through the registry: options, warnings for the client, and the time
//! that each gate took.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use async_trait::async_trait;
use parking_lot::Mutex;
use serde_json::Value;
use skiff_meta::Status;

use crate::fields::Tracking;

/// More than an answer has room for.
const MOST_WARNINGS: usize = 4200;

/// One gate's share of a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StageTime {
    pub name: &'static str,
    /// Unix microseconds.
    pub start_us: u64,
    pub dur_us: u64,
}

/// The context of one request.
#[derive(Default)]
pub struct Context {
    pub dry_run: bool,
    /// A uid in the object must be that of the stored one (of a patch it is a change like others).
    pub uid_is_precondition: bool,
    /// Whose fields a write makes of what it changes.
    pub tracking: Tracking,
    /// Leaf lock: held for a push only.
    warnings: Mutex<Vec<String>>,
    /// Leaf lock: held for a push only.
    stages: Mutex<Vec<StageTime>>,
    /// Microseconds that the webhooks of users took.
    webhooks_us: AtomicU64,
    /// What the audit log should know; absent if it is not to know anything. Leaf lock: held for an insert only.
    annotations: Option<Mutex<BTreeMap<String, String>>>,
}

/// Unix microseconds.
pub fn now_us() -> u64 {
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .map_or(0, |since| since.as_micros() as u64)
}

impl Context {
    pub fn new(dry_run: bool) -> Self {
        Context {
            dry_run,
            ..Context::default()
        }
    }

    /// The context of a write that the server makes for itself.
    pub fn of_server() -> Self {
        Context {
            tracking: Tracking::server(),
            ..Context::default()
        }
    }

    /// The context of a status that the server keeps by itself.
    pub fn of_server_status() -> Self {
        Context {
            tracking: Tracking::server_status(),
            ..Context::default()
        }
    }

    /// Adds a warning for the client; the same text is sent once.
    pub fn warn(&self, text: String) {
        let mut warnings = self.warnings.lock();
        if warnings.len() < MOST_WARNINGS && !warnings.contains(&text) {
            warnings.push(text);
        }
    }

    /// Notes how long a webhook, or several that were asked at once, took to answer.
    pub fn add_webhook_time(&self, took: Duration) {
        let us = u64::try_from(took.as_micros()).unwrap_or(u64::MAX);
        self.webhooks_us.fetch_add(us, Ordering::Relaxed);
    }

    pub fn webhooks_took(&self) -> Duration {
        Duration::from_micros(self.webhooks_us.load(Ordering::Relaxed))
    }

    /// From now on annotations are kept.
    pub fn audit(&mut self) {
        self.annotations.get_or_insert_default();
    }

    pub fn audited(&self) -> bool {
        self.annotations.is_some()
    }

    /// Adds an annotation for the audit log. The first value of a key stays.
    pub fn annotate(&self, key: &str, value: String) {
        if let Some(annotations) = &self.annotations {
            annotations.lock().entry(key.to_owned()).or_insert(value);
        }
    }

    pub fn annotations(&self) -> BTreeMap<String, String> {
        let annotations = self.annotations.as_ref();
        annotations.map_or_else(BTreeMap::new, |all| all.lock().clone())
    }

    pub fn warnings(&self) -> Vec<String> {
        self.warnings.lock().clone()
    }

    /// Starts to measure a gate; it ends when the returned guard is dropped.
    pub fn stage(&self, name: &'static str) -> StageGuard<'_> {
        StageGuard {
            context: self,
            name,
            start_us: now_us(),
            began: Instant::now(),
        }
    }

    pub fn stages(&self) -> Vec<StageTime> {
        self.stages.lock().clone()
    }
}

/// Measures one gate while it lives.
pub struct StageGuard<'a> {
    context: &'a Context,
    name: &'static str,
    start_us: u64,
    began: Instant,
}

impl Drop for StageGuard<'_> {
    fn drop(&mut self) {
        let dur_us = self.began.elapsed().as_micros() as u64;
        let mut stages = self.context.stages.lock();
        // A write that is tried again passes the same gates again: one mark, with the sum.
        if let Some(stage) = stages.iter_mut().find(|stage| stage.name == self.name) {
            stage.dur_us += dur_us;
        } else {
            stages.push(StageTime {
                name: self.name,
                start_us: self.start_us,
                dur_us,
            });
        }
    }
}

/// The admission chain as the registry sees it. `old` absent is a create, `object` absent a delete.
#[async_trait]
pub trait Gate: Send + Sync {
    async fn admit(&self, object: Option<&mut Value>, old: Option<&Value>) -> Result<(), Status>;
    async fn validate(&self, object: Option<&mut Value>, old: Option<&Value>) -> Result<(), Status>;
}

/// The gate of writes that the server makes for itself (bootstrap objects).
pub struct Open;

#[async_trait]
impl Gate for Open {
    async fn admit(&self, _: Option<&mut Value>, _: Option<&Value>) -> Result<(), Status> {
        Ok(())
    }

    async fn validate(&self, _: Option<&mut Value>, _: Option<&Value>) -> Result<(), Status> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn warnings_are_told_once_and_are_bounded() {
        let context = Context::default();
        context.warn("a".to_owned());
        context.warn("a".to_owned());
        assert_eq!(context.warnings.lock().len(), 1);
        for number in 0..2 * MOST_WARNINGS {
            context.warn(number.to_string());
        }
        assert_eq!(context.warnings.lock().len(), MOST_WARNINGS);
    }
}
