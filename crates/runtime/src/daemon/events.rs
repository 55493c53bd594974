//! The event stream of CRI: every change of a container or sandbox, with the pod's status at that time.

use super::Daemon;
use super::record::now_nanos;
use skiff_cri::v1 as cri;

impl Daemon {
    /// Tells all listeners; without any it costs nothing. A listener that lags loses events and is
    /// told so by the end of its stream.
    pub(super) fn publish(&self, id: &str, kind: cri::ContainerEventType, sandbox_id: &str) {
        if self.events.receiver_count() == 0 {
            return;
        }
        let sandbox = self.sandbox(sandbox_id).ok();
        let containers_statuses = self
            .containers_of(sandbox_id)
            .iter()
            .map(|container| self.container_status(container))
            .collect();
        let _ = self.events.send(cri::ContainerEventResponse {
            container_id: id.to_owned(),
            container_event_type: kind as i32,
            created_at: now_nanos(),
            pod_sandbox_status: sandbox.map(|sandbox| self.sandbox_status(&sandbox)),
            containers_statuses,
        });
    }
}
