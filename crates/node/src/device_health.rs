//! The health of the devices that containers have, in the pods' statuses.

use std::sync::Arc;

use k8s_openapi::api::core::v1::{Container, Pod, PodStatus, ResourceHealth, ResourceStatus};

use crate::kubelet::Kubelet;
use crate::pods;

fn word(healthy: Option<bool>) -> String {
    match healthy {
        Some(true) => "Healthy",
        Some(false) => "Unhealthy",
        None => "Unknown",
    }
    .to_owned()
}

impl Kubelet {
    /// Makes the statuses of pods with devices anew when the health of devices changes. It also takes back at the start what
    /// drivers offered: none of them is here yet to prepare it.
    pub async fn run_device_health(self: Arc<Self>) {
        let follow = async {
            loop {
                tokio::select! {
                    () = self.device_plugins.health_changed.notified() => {}
                    () = self.dra.health().notified() => {}
                }
                for state in self.states() {
                    let pod = state.pod();
                    let has_devices =
                        |container: &Container| !self.device_statuses(&pod, container).is_empty();
                    if pod.spec.iter().flat_map(|spec| &spec.containers).any(has_devices) {
                        self.refresh_status(&state);
                    }
                }
            }
        };
        tokio::select! {
            () = self.shutdown.cancelled() => {}
            () = async { tokio::join!(self.dra.drivers.wipe(None), follow); } => {}
        }
    }

    fn device_statuses(&self, pod: &Pod, container: &Container) -> Vec<ResourceStatus> {
        let plugins = self
            .device_plugins
            .health(pods::uid(pod), &container.name)
            .into_iter();
        let mut statuses: Vec<ResourceStatus> = plugins
            .map(|(name, devices)| {
                let devices = devices.into_iter().map(|(id, healthy)| ResourceHealth {
                    resource_id: id,
                    health: Some(word(Some(healthy))),
                    ..ResourceHealth::default()
                });
                ResourceStatus {
                    name,
                    resources: Some(devices.collect()),
                }
            })
            .collect();
        let claims = container
            .resources
            .iter()
            .flat_map(|resources| resources.claims.iter().flatten());
        for claim in claims {
            let mut resources: Vec<ResourceHealth> = Vec::new();
            let request = claim.request.as_deref().unwrap_or_default();
            for (driver, device) in self.dra.devices_of(pod, &claim.name, request) {
                let (healthy, message) = self.dra.health_of(&driver, &device);
                let first = device.cdi.first().cloned();
                let resource_id =
                    first.unwrap_or_else(|| format!("{driver}/{}/{}", device.pool, device.device));
                if !resources.iter().any(|known| known.resource_id == resource_id) {
                    let health = Some(word(healthy));
                    resources.push(ResourceHealth {
                        resource_id,
                        health,
                        message,
                    });
                }
            }
            if !resources.is_empty() {
                let name = match request {
                    "" => format!("claim:{}", claim.name),
                    request => format!("claim:{}/{request}", claim.name),
                };
                let resources = Some(resources);
                statuses.push(ResourceStatus { name, resources });
            }
        }
        statuses
    }

    /// COMPAT: of containers, not of init containers.
    pub(crate) fn add_device_health(&self, pod: &Pod, status: &mut PodStatus) {
        let containers = pod.spec.iter().flat_map(|spec| &spec.containers);
        for container in containers {
            let mut statuses = status.container_statuses.iter_mut().flatten();
            if let Some(own) = statuses.find(|own| own.name == container.name) {
                let made = self.device_statuses(pod, container);
                own.allocated_resources_status = (!made.is_empty()).then_some(made);
            }
        }
    }
}
