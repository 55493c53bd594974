//! Asks the runtime whether it and its network can take pods, tells the node, and hands the node's pod addresses on to the
//! network. What the answers mean is in `runtime_health.rs`.

use std::sync::Arc;
use std::time::{Duration, Instant};

use k8s_openapi::api::core::v1::Pod;
use skiff_client::Change;

use crate::images::describe;
use crate::kubelet::{FIRST_RETRY, Kubelet, LAST_RETRY};
use crate::pods;
use crate::runtime_health::Trouble;

/// How often a healthy runtime is asked how it is.
const HEALTH_PERIOD: Duration = Duration::from_secs(5);
const NETWORK_PATIENCE: Duration = Duration::from_secs(30);

impl Kubelet {
    /// Waits a while for the runtime and the pod network; `false` if they are not ready by then.
    pub async fn wait_for_network(&self, pod: &Pod) -> bool {
        let mut troubles = self.troubles.subscribe();
        let missing = troubles.borrow_and_update().clone();
        if missing.is_empty() {
            return true;
        }
        for trouble in &missing {
            if let Trouble::Network(why) = trouble {
                let message = format!("network is not ready: {why}");
                self.recorder
                    .event(&pods::reference(pod), "Warning", "NetworkNotReady", message);
            }
        }
        tokio::time::timeout(NETWORK_PATIENCE, troubles.wait_for(Vec::is_empty))
            .await
            .is_ok_and(|r| r.is_ok())
    }

    pub fn follow_node(self: &Arc<Self>) {
        let kubelet = self.clone();
        self.node.subscribe(move |change| {
            let Change::Applied { new, .. } = change else {
                return;
            };
            // Mirrors of static pods are made for a node that is registered.
            kubelet.static_pods.changed.notify_one();
            let Some(spec) = &new.spec else { return };
            let cidrs = spec
                .pod_cidrs
                .clone()
                .or_else(|| spec.pod_cidr.clone().map(|c| vec![c]))
                .unwrap_or_default();
            let kubelet = kubelet.clone();
            tokio::spawn(async move { kubelet.configure_network(&cidrs).await });
        });
    }

    /// Writes the CNI configuration for the pod CIDRs and has the runtime looked at again.
    pub async fn configure_network(&self, cidrs: &[String]) {
        if cidrs.is_empty() {
            return;
        }
        {
            let mut written = self.cni_written.lock();
            if *written == cidrs {
                return;
            }
            *written = cidrs.to_vec();
        }
        if let (Some(directory), Some(make)) = (&self.config.cni_conf_dir, &self.config.cni_config) {
            let write = || -> std::io::Result<()> {
                std::fs::create_dir_all(directory)?;
                let temporary = directory.join(".10-skiff.conflist.tmp");
                std::fs::write(&temporary, make(cidrs))?;
                std::fs::rename(&temporary, directory.join("10-skiff.conflist"))
            };
            if let Err(error) = write() {
                tracing::error!(%error, "cannot write the CNI configuration");
                self.cni_written.lock().clear();
                return;
            }
        }
        if let Err(status) = self.runtime.set_pod_cidr(&cidrs.join(",")).await {
            // Runtimes that read the CNI configuration alone do not need it.
            tracing::debug!(
                error = describe(&status),
                "the runtime does not take the pod CIDR"
            );
        }
        self.health_check.notify_one();
    }

    /// Asks the runtime how it is: often while something is missing, seldom when all is well. A runtime that gives no
    /// answer is noticed meanwhile.
    pub async fn run_health(self: Arc<Self>) {
        let patience = self.config.runtime_patience;
        let period = HEALTH_PERIOD.min(patience.status / 6);
        let mut retry = FIRST_RETRY;
        loop {
            let mut asked = std::pin::pin!(self.runtime.status(patience.status_call()));
            let answer = loop {
                tokio::select! {
                    () = self.shutdown.cancelled() => return,
                    answer = &mut asked => break answer,
                    () = tokio::time::sleep(period) => {
                        self.tell_troubles();
                    }
                }
            };
            match answer {
                Ok(status) => {
                    let mut health = self.runtime_health.lock();
                    health.answered(status.status.as_ref(), Instant::now());
                    *self.runtime_status.lock() = Some(status);
                }
                Err(status) => {
                    tracing::debug!(error = describe(&status), "the runtime reports no status");
                }
            }
            let is_well = self.tell_troubles();
            let pause = if is_well { period } else { retry };
            retry = if is_well {
                FIRST_RETRY
            } else {
                (retry * 2).min(LAST_RETRY)
            };
            tokio::select! {
                () = self.shutdown.cancelled() => return,
                () = self.health_check.notified() => retry = FIRST_RETRY,
                () = tokio::time::sleep(pause) => {}
            }
        }
    }

    /// Returns whether there are none.
    fn tell_troubles(&self) -> bool {
        let health = self.runtime_health.lock();
        let troubles = health.troubles(&self.config.runtime_patience, Instant::now());
        let is_well = troubles.is_empty();
        self.troubles.send_if_modified(|current| {
            let news = *current != troubles;
            *current = troubles;
            news
        });
        is_well
    }

    /// Why the runtime keeps the node from being ready.
    pub fn trouble_messages(&self) -> Vec<String> {
        let (patience, now) = (&self.config.runtime_patience, Instant::now());
        let troubles = self.troubles.borrow();
        troubles.iter().map(|one| one.message(patience, now)).collect()
    }
}
