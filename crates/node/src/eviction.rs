//! Ends pods that use more disk than they said they would: the size limits of their emptyDir volumes. Limits
//! of volumes in memory are the kernel's business.

use std::sync::Arc;

use k8s_openapi::api::core::v1::Pod;

use crate::kubelet::Kubelet;
use crate::pods;
use crate::resources::value;

/// The reason of a pod that was ended for what it used.
pub const REASON: &str = "Evicted";
/// Such a pod is not given the time it asked for: it would go on using.
pub const GRACE: i64 = 1;

/// The volumes with a limit on the disk: name, limit in bytes, and the limit as it was written.
fn limits(pod: &Pod) -> Vec<(String, u64, String)> {
    let volumes = pod.spec.iter().flat_map(|spec| spec.volumes.iter().flatten());
    volumes
        .filter_map(|volume| {
            let source = volume.empty_dir.as_ref()?;
            let limit = source.size_limit.as_ref()?;
            let bytes = u64::try_from(value(limit)).ok().filter(|bytes| *bytes > 0)?;
            let on_disk = source.medium.as_deref().unwrap_or_default().is_empty();
            on_disk.then(|| (volume.name.clone(), bytes, limit.0.clone()))
        })
        .collect()
}

/// COMPAT: the blank at the end is upstream's.
fn message(volume: &str, limit: &str) -> String {
    format!("Usage of EmptyDir volume {volume:?} exceeds the limit {limit:?}. ")
}

impl Kubelet {
    pub async fn evict_over_limits(self: &Arc<Self>) {
        for state in self.states() {
            if state.is_deleted() || state.failed().is_some() || state.is_terminal() {
                continue;
            }
            let pod = state.pod();
            for (volume, limit, written) in limits(&pod) {
                let (kubelet, uid, name) = (self.clone(), state.uid.clone(), volume.clone());
                let measured =
                    tokio::task::spawn_blocking(move || kubelet.volumes.empty_dir_usage(&uid, &name)).await;
                if measured.is_ok_and(|used| used > limit) {
                    let message = message(&volume, &written);
                    self.recorder
                        .event(&pods::reference(&pod), "Warning", REASON, message.clone());
                    state.fail(REASON, message);
                    state.terminate.cancel();
                    state.wake.notify_one();
                    break;
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn which_limits_count() {
        let pod: Pod = serde_json::from_value(json!({"spec": {"containers": [], "volumes": [
            {"name": "a", "emptyDir": {"sizeLimit": "1Mi"}},
            {"name": "b", "emptyDir": {"sizeLimit": "1Mi", "medium": "Memory"}},
            {"name": "c", "emptyDir": {}},
            {"name": "d", "emptyDir": {"sizeLimit": "0"}}]}}))
        .unwrap();
        assert_eq!(limits(&pod), [("a".to_owned(), 1 << 20, "1Mi".to_owned())]);
        assert_eq!(
            message("a", "1Mi"),
            "Usage of EmptyDir volume \"a\" exceeds the limit \"1Mi\". "
        );
    }
}
