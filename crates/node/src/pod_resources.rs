//! The PodResources API at `<root>/pod-resources/kubelet.sock`: which devices, CPUs and memory the containers of
//! this node have for themselves, for whoever monitors them or places by them.

use std::os::unix::fs::PermissionsExt;
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::{Container, Pod};
use skiff_devices::podresources::pod_resources_lister_server::{
    PodResourcesLister, PodResourcesListerServer,
};
use skiff_devices::podresources::*;
use skiff_devices::{Request, Response, Status};

use crate::device_plugins::Holding;
use crate::kubelet::Kubelet;
use crate::pods;
use crate::resources::is_sidecar;
use crate::topology::{Block, CpuSet};

const RETRY: Duration = Duration::from_secs(5);
/// Requests of one connection that are answered at a time.
const AT_ONCE: usize = 16;

struct Lister(Arc<Kubelet>);

fn devices(holdings: Vec<Holding>) -> Vec<ContainerDevices> {
    let one = |holding: Holding| ContainerDevices {
        resource_name: holding.resource,
        device_ids: holding.devices,
        topology: (!holding.numa.is_empty()).then(|| TopologyInfo {
            nodes: holding.numa.into_iter().map(|id| NumaNode { id }).collect(),
        }),
    };
    holdings.into_iter().map(one).collect()
}

fn cpu_ids(cpus: &CpuSet) -> Vec<i64> {
    cpus.iter().map(i64::from).collect()
}

fn memory(blocks: Vec<Block>) -> Vec<ContainerMemory> {
    let one = |block: Block| ContainerMemory {
        memory_type: block.resource,
        size: block.size,
        topology: Some(TopologyInfo {
            nodes: { block.numa_affinity.into_iter() }
                .map(|id| NumaNode { id: id.into() })
                .collect(),
        }),
    };
    blocks.into_iter().map(one).collect()
}

impl Lister {
    fn container(&self, pod: &Pod, container: &Container) -> ContainerResources {
        let (uid, managers) = (pods::uid(pod), &self.0.managers);
        let mut dynamic_resources: Vec<DynamicResource> = Vec::new();
        for (claim, driver_name, device) in self.0.dra.devices(pod, container) {
            let resource = ClaimResource {
                cdi_devices: device.cdi.into_iter().map(|name| CdiDevice { name }).collect(),
                driver_name,
                pool_name: device.pool,
                device_name: device.device,
                share_id: device.share,
            };
            match dynamic_resources
                .iter_mut()
                .find(|known| known.claim_name == claim)
            {
                Some(known) => known.claim_resources.push(resource),
                None => dynamic_resources.push(DynamicResource {
                    claim_name: claim,
                    claim_namespace: pods::namespace(pod).to_owned(),
                    claim_resources: vec![resource],
                }),
            }
        }
        ContainerResources {
            name: container.name.clone(),
            devices: devices(self.0.device_plugins.holdings(uid, &container.name)),
            cpu_ids: cpu_ids(&managers.cpus.exclusive(uid, &container.name).unwrap_or_default()),
            memory: memory(managers.memory.blocks(uid, &container.name)),
            dynamic_resources,
        }
    }

    fn pod(&self, pod: &Pod) -> PodResources {
        let spec = pod.spec.iter();
        let containers = spec.flat_map(|spec| {
            let init = spec.init_containers.iter().flatten();
            init.filter(|container| is_sidecar(container))
                .chain(&spec.containers)
        });
        PodResources {
            name: pods::name(pod).to_owned(),
            namespace: pods::namespace(pod).to_owned(),
            containers: containers
                .map(|container| self.container(pod, container))
                .collect(),
        }
    }

    /// The pods that may run.
    fn active(&self) -> Vec<Arc<Pod>> {
        let states = self.0.states().into_iter();
        let active = states.filter(|state| !state.is_terminal() && state.failed().is_none());
        active.map(|state| state.pod()).collect()
    }
}

#[tonic::async_trait]
impl PodResourcesLister for Lister {
    async fn list(
        &self,
        _: Request<ListPodResourcesRequest>,
    ) -> Result<Response<ListPodResourcesResponse>, Status> {
        let pods = self.active();
        let pod_resources = pods.iter().map(|pod| self.pod(pod)).collect();
        Ok(Response::new(ListPodResourcesResponse { pod_resources }))
    }

    /// COMPAT: without a static policy the lists of CPUs and memory are empty.
    async fn get_allocatable_resources(
        &self,
        _: Request<AllocatableResourcesRequest>,
    ) -> Result<Response<AllocatableResourcesResponse>, Status> {
        Ok(Response::new(AllocatableResourcesResponse {
            devices: devices(self.0.device_plugins.healthy()),
            cpu_ids: cpu_ids(&self.0.managers.cpus.allocatable()),
            memory: memory(self.0.managers.memory.allocatable()),
        }))
    }

    async fn get(
        &self,
        request: Request<GetPodResourcesRequest>,
    ) -> Result<Response<GetPodResourcesResponse>, Status> {
        let GetPodResourcesRequest {
            pod_name,
            pod_namespace,
        } = request.into_inner();
        let pods = self.active();
        let mut pods = pods.iter();
        let found = pods.find(|pod| pods::name(pod) == pod_name && pods::namespace(pod) == pod_namespace);
        let Some(pod) = found else {
            return Err(Status::unknown(format!(
                "pod {pod_name} in namespace {pod_namespace} not found"
            )));
        };
        let pod_resources = Some(self.pod(pod));
        Ok(Response::new(GetPodResourcesResponse { pod_resources }))
    }
}

impl Kubelet {
    pub async fn run_pod_resources(self: Arc<Self>) {
        while !self.shutdown.is_cancelled() {
            if let Err(error) = self.serve_pod_resources().await {
                tracing::error!(error, "the PodResources API is not served");
            }
            tokio::select! {
                () = self.shutdown.cancelled() => {}
                () = tokio::time::sleep(RETRY) => {}
            }
        }
    }

    async fn serve_pod_resources(self: &Arc<Self>) -> Result<(), String> {
        let folder = self.config.data_dir.join("pod-resources");
        let socket = folder.join("kubelet.sock");
        let at = |error: std::io::Error| format!("{}: {error}", socket.display());
        std::fs::create_dir_all(&folder).map_err(at)?;
        std::fs::set_permissions(&folder, std::fs::Permissions::from_mode(0o750)).map_err(at)?;
        match std::fs::remove_file(&socket) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => return Err(at(error)),
            _ => {}
        }
        let listener = tokio::net::UnixListener::bind(&socket).map_err(at)?;
        let incoming = futures::stream::unfold(listener, async |listener| {
            let accepted = listener.accept().await;
            let accepted = accepted.map(|(stream, _)| skiff_devices::Connection::new(stream));
            Some((accepted, listener))
        });
        tonic::transport::Server::builder()
            .concurrency_limit_per_connection(AT_ONCE)
            .add_service(PodResourcesListerServer::new(Lister(self.clone())))
            .serve_with_incoming_shutdown(incoming, self.shutdown.cancelled())
            .await
            .map_err(|error| error.to_string())
    }
}
