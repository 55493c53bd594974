//! Learns from the runtime when something about a pod changed: by its event stream where it has one, and by
//! listing. It only wakes workers; they look for themselves.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use skiff_cri::Code;

use crate::kubelet::Kubelet;
use crate::runtime::{PodOutline, changed};

/// Without events a change is seen within this time.
const RELIST: Duration = Duration::from_secs(1);
/// With events a listing only catches what a broken stream missed.
const SAFETY_RELIST: Duration = Duration::from_secs(30);
const REOPEN: Duration = Duration::from_millis(500);

impl Kubelet {
    pub async fn run_pleg(self: Arc<Self>, mut known: HashMap<String, PodOutline>) {
        let mut has_events = true;
        let mut last = None;
        loop {
            let mut events = match has_events {
                true => match self.runtime.events().await {
                    Ok(events) => Some(events),
                    Err(status) if status.code() == Code::Unimplemented => {
                        tracing::info!("the container runtime has no events; it is listed every second");
                        has_events = false;
                        None
                    }
                    Err(_) => None,
                },
                false => None,
            };
            // Whatever happened while there was no stream.
            self.relist(&mut known, &mut last).await;
            loop {
                let pause = match (&events, has_events) {
                    (Some(_), _) => SAFETY_RELIST,
                    (None, true) => REOPEN,
                    (None, false) => RELIST,
                };
                let next = async {
                    match &mut events {
                        Some(stream) => stream.message().await,
                        None => std::future::pending().await,
                    }
                };
                tokio::select! {
                    () = self.shutdown.cancelled() => return,
                    () = tokio::time::sleep(pause) => {
                        if events.is_none() && has_events {
                            break;
                        }
                        self.relist(&mut known, &mut last).await;
                    }
                    message = next => match message {
                        Ok(Some(event)) => {
                            if let Some(metadata) = event.pod_sandbox_status.and_then(|s| s.metadata) {
                                self.wake(&metadata.uid);
                            }
                        }
                        Ok(None) => break,
                        // Some runtimes only say so when the stream is read.
                        Err(status) => {
                            if status.code() == Code::Unimplemented {
                                has_events = false;
                            } else {
                                tracing::debug!(error = status.message(), "the runtime's event stream broke");
                                tokio::time::sleep(REOPEN).await;
                            }
                            break;
                        }
                    }
                }
            }
        }
    }

    async fn relist(&self, known: &mut HashMap<String, PodOutline>, last: &mut Option<Instant>) {
        let began = Instant::now();
        let found = self.runtime.outlines().await;
        self.metrics
            .relisted(began.elapsed(), last.replace(began).map(|last| began - last));
        match found {
            Ok(now) => {
                for uid in changed(known, &now) {
                    self.wake(&uid);
                }
                *known = now;
            }
            Err(status) => tracing::debug!(error = status.message(), "the runtime cannot be listed"),
        }
    }
}
