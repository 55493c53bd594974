//! The node's marks for the trace: each wake-up of a pod worker is one piece of work, whose stages ride on
//! the next status write. The only file that names the trace crate.

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::Pod;
use skiff_trace::{Cause, Work};

pub use skiff_trace::{now_us, stage};

/// Work that this version of the pod woke.
pub fn work_of(pod: &Pod) -> Arc<Work> {
    Work::new(Some(Cause {
        resource: "pods".to_owned(),
        namespace: pod.metadata.namespace.clone().unwrap_or_default(),
        name: pod.metadata.name.clone().unwrap_or_default(),
        version: pod.metadata.resource_version.clone().unwrap_or_default(),
    }))
}

pub async fn scope<F: Future>(work: Arc<Work>, future: F) -> F::Output {
    skiff_trace::scope(work, future).await
}

/// The work around the caller, whose status write another task makes.
pub fn current() -> Option<Arc<Work>> {
    Work::current()
}

/// Records a wait that ends now and took this long, such as a back-off.
pub fn waited(name: &str, wait: Duration) {
    let micros = i64::try_from(wait.as_micros()).unwrap_or(i64::MAX);
    skiff_trace::record_stage(name, skiff_trace::now_us().saturating_sub(micros));
}

/// Announces when the container's failed step is tried again.
pub fn next_try(container: &str, delay: Duration) {
    skiff_trace::next_try(container, delay);
}

/// Says that the next status write makes the pod all that was asked for.
pub fn complete() {
    skiff_trace::note(skiff_trace::COMPLETE);
}
