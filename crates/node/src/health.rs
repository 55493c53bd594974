//! Whether the runtime and its network can take pods: asks, tells in upstream's words, and hands the node's pod
//! addresses on to the network.

use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::Pod;
use skiff_client::Change;
use skiff_cri::v1;

use crate::images::describe;
use crate::kubelet::{FIRST_RETRY, Kubelet, LAST_RETRY};
use crate::pods;

/// How often a healthy runtime is asked how it is.
const HEALTH_PERIOD: Duration = Duration::from_secs(5);
const NETWORK_PATIENCE: Duration = Duration::from_secs(30);

impl Kubelet {
    /// Waits a while for the pod network; `false` if it does not come.
    pub async fn wait_for_network(&self, pod: &Pod) -> bool {
        let mut network = self.network.subscribe();
        let Some(why) = network.borrow_and_update().clone() else {
            return true;
        };
        self.recorder.event(
            &pods::reference(pod),
            "Warning",
            "NetworkNotReady",
            format!("network is not ready: {why}"),
        );
        tokio::time::timeout(NETWORK_PATIENCE, network.wait_for(Option::is_none))
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

    /// Asks the runtime how it is: often while something is missing, seldom when all is well.
    pub async fn run_health(self: Arc<Self>) {
        let mut retry = FIRST_RETRY;
        loop {
            let trouble = match self.runtime.status().await {
                Ok(status) => {
                    let trouble = runtime_trouble(status.status.as_ref());
                    *self.runtime_status.lock() = Some(status);
                    trouble
                }
                Err(_) => Some("container runtime is down".to_owned()),
            };
            let pause = if trouble.is_none() { HEALTH_PERIOD } else { retry };
            retry = if trouble.is_none() {
                FIRST_RETRY
            } else {
                (retry * 2).min(LAST_RETRY)
            };
            self.network.send_if_modified(|current| {
                let news = *current != trouble;
                *current = trouble;
                news
            });
            tokio::select! {
                () = self.shutdown.cancelled() => return,
                () = self.health_check.notified() => retry = FIRST_RETRY,
                () = tokio::time::sleep(pause) => {}
            }
        }
    }
}

/// What of the runtime keeps the node from being ready, in upstream's words.
fn runtime_trouble(status: Option<&v1::RuntimeStatus>) -> Option<String> {
    let condition = |name: &str| {
        status
            .into_iter()
            .flat_map(|s| &s.conditions)
            .find(|c| c.r#type == name)
    };
    for (name, subject) in [
        ("RuntimeReady", "container runtime not ready"),
        ("NetworkReady", "container runtime network not ready"),
    ] {
        match condition(name) {
            Some(c) if c.status => {}
            Some(c) => {
                return Some(format!(
                    "{subject}: {name}=false reason:{} message:{}",
                    c.reason, c.message
                ));
            }
            None => return Some(format!("{subject}: {name} condition is not reported")),
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn troubles() {
        let condition = |name: &str, status: bool| v1::RuntimeCondition {
            r#type: name.into(),
            status,
            reason: "NetworkPluginNotReady".into(),
            message: "cni plugin not initialized".into(),
        };
        let status = |network: bool| v1::RuntimeStatus {
            conditions: vec![
                condition("RuntimeReady", true),
                condition("NetworkReady", network),
            ],
        };
        assert_eq!(runtime_trouble(Some(&status(true))), None);
        assert_eq!(
            runtime_trouble(Some(&status(false))).as_deref(),
            Some(
                "container runtime network not ready: NetworkReady=false reason:NetworkPluginNotReady message:cni plugin not initialized"
            )
        );
    }
}
