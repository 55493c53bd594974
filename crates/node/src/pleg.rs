//! Learns from the runtime when something about a pod changed: by its event stream where it has one, and by
//! listing. It only wakes workers; they look for themselves.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use skiff_cri::{Code, Status};
use tokio::sync::watch;

use crate::kubelet::Kubelet;
use crate::runtime::{PodOutline, changed};

/// Without events a change is seen within this time.
const RELIST: Duration = Duration::from_secs(1);
const REOPEN: Duration = Duration::from_millis(500);

impl Kubelet {
    pub async fn run_pleg(self: Arc<Self>, mut known: HashMap<String, PodOutline>) {
        let (is_open, mut opened) = watch::channel(false);
        // With events a listing only catches what a broken stream missed.
        let safety_relist = self.config.runtime_patience.safety_relist();
        let mut last = None;
        let relists = async {
            loop {
                // Before the list: what happened while there was no stream is in a list that is made after it was opened.
                let has_events = *opened.borrow_and_update();
                self.relist(&mut known, &mut last).await;
                let pause = if has_events { safety_relist } else { RELIST };
                tokio::select! {
                    () = tokio::time::sleep(pause) => {}
                    Ok(()) = opened.changed() => {}
                }
            }
        };
        tokio::select! {
            () = self.shutdown.cancelled() => {}
            () = relists => {}
            () = self.follow_events(&is_open) => {}
        }
    }

    /// Some runtimes answer only when there is an event: nothing else may wait for the stream to open.
    async fn follow_events(&self, is_open: &watch::Sender<bool>) {
        loop {
            let ended = self.read_events(is_open).await;
            is_open.send_if_modified(|open| std::mem::replace(open, false));
            if let Err(status) = ended {
                if status.code() == Code::Unimplemented {
                    tracing::info!("the container runtime has no events; it is listed every second");
                    return std::future::pending().await;
                }
                tracing::debug!(error = status.message(), "the runtime's event stream broke");
            }
            tokio::time::sleep(REOPEN).await;
        }
    }

    async fn read_events(&self, is_open: &watch::Sender<bool>) -> Result<(), Status> {
        let mut events = self.runtime.events().await?;
        is_open.send_replace(true);
        while let Some(event) = events.message().await? {
            if let Some(metadata) = event.pod_sandbox_status.and_then(|s| s.metadata) {
                self.wake(&metadata.uid);
            }
        }
        Ok(())
    }

    async fn relist(&self, known: &mut HashMap<String, PodOutline>, last: &mut Option<Instant>) {
        let began = Instant::now();
        let found = self.runtime.outlines().await;
        self.metrics
            .relisted(began.elapsed(), last.replace(began).map(|last| began - last));
        match found {
            Ok(now) => {
                self.runtime_health.lock().relisted(began);
                for uid in changed(known, &now) {
                    self.wake(&uid);
                }
                *known = now;
            }
            Err(status) => tracing::debug!(error = status.message(), "the runtime cannot be listed"),
        }
    }
}
