//! One device plugin: the calls that the kubelet makes, and the stream by which the plugin tells of its devices.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use skiff_devices::deviceplugin::device_plugin_client::DevicePluginClient;
use skiff_devices::deviceplugin::{
    AllocateRequest, ContainerAllocateRequest, ContainerAllocateResponse,
    ContainerPreferredAllocationRequest, DevicePluginOptions, Empty, ListAndWatchResponse,
    PreStartContainerRequest, PreferredAllocationRequest,
};
use skiff_devices::{Channel, Status};
use tokio_util::sync::CancellationToken;

use super::DevicePlugins;
use super::choose::{Device, Devices};

/// A plugin that does not answer must not hold up the pods of others for ever.
const CALL_TIMEOUT: Duration = Duration::from_secs(60);
/// Upstream's limit for PreStartContainer.
const PRE_START_TIMEOUT: Duration = Duration::from_secs(30);
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);

#[derive(Clone)]
pub struct Plugin {
    client: DevicePluginClient<Channel>,
    pub generation: u64,
    pub pre_start_required: bool,
    prefers: bool,
    /// Ends its stream.
    pub stop: CancellationToken,
}

fn message(status: &Status) -> String {
    format!(
        "rpc error: code = {:?} desc = {}",
        status.code(),
        status.message()
    )
}

async fn within<T>(
    limit: Duration,
    call: impl Future<Output = Result<tonic::Response<T>, Status>>,
) -> Result<T, String> {
    match tokio::time::timeout(limit, call).await {
        Ok(answer) => answer
            .map(tonic::Response::into_inner)
            .map_err(|status| message(&status)),
        Err(_) => Err("rpc error: code = DeadlineExceeded desc = context deadline exceeded".to_owned()),
    }
}

impl Plugin {
    pub async fn allocate(&self, devices: &BTreeSet<String>) -> Result<ContainerAllocateResponse, String> {
        let request = AllocateRequest {
            container_requests: vec![ContainerAllocateRequest {
                devices_ids: devices.iter().cloned().collect(),
            }],
        };
        let answer = within(CALL_TIMEOUT, self.client.clone().allocate(request)).await?;
        let mut answers = answer.container_responses.into_iter();
        answers
            .next()
            .ok_or_else(|| "no containers return in allocation response".to_owned())
    }

    /// Which of the available devices the plugin would rather give away.
    pub async fn preferred(
        &self,
        available: &BTreeSet<String>,
        chosen: &BTreeSet<String>,
        amount: usize,
    ) -> Result<Vec<String>, String> {
        if !self.prefers {
            return Ok(Vec::new());
        }
        let request = PreferredAllocationRequest {
            container_requests: vec![ContainerPreferredAllocationRequest {
                available_device_i_ds: available.union(chosen).cloned().collect(),
                must_include_device_i_ds: chosen.iter().cloned().collect(),
                allocation_size: i32::try_from(amount).unwrap_or(i32::MAX),
            }],
        };
        let call = within(
            CALL_TIMEOUT,
            self.client.clone().get_preferred_allocation(request),
        )
        .await;
        let answer = call
            .map_err(|error| format!("device plugin GetPreferredAllocation rpc failed with err: {error}"))?;
        let first = answer.container_responses.into_iter().next();
        Ok(first.map(|one| one.device_i_ds).unwrap_or_default())
    }

    pub async fn pre_start(&self, devices: &BTreeSet<String>) -> Result<(), String> {
        let request = PreStartContainerRequest {
            devices_ids: devices.iter().cloned().collect(),
        };
        let call = within(
            PRE_START_TIMEOUT,
            self.client.clone().pre_start_container(request),
        )
        .await;
        call.map(|_| ())
            .map_err(|error| format!("device plugin PreStartContainer rpc failed with err: {error}"))
    }
}

/// Connects to a plugin that registered, and follows its devices in a task of its own until it is gone.
pub async fn connect(
    plugins: &Arc<DevicePlugins>,
    resource: &str,
    socket: &std::path::Path,
    shutdown: &CancellationToken,
) -> Result<(), String> {
    let channel = skiff_devices::channel(socket);
    let client = DevicePluginClient::new(channel).max_decoding_message_size(skiff_devices::MAX_MESSAGE_SIZE);
    let mut asking = client.clone();
    let asked = within(CONNECT_TIMEOUT, asking.get_device_plugin_options(Empty {})).await;
    let options: DevicePluginOptions =
        asked.map_err(|error| format!("failed to get device plugin options: {error}"))?;
    let stop = shutdown.child_token();
    let plugin = plugins.connected(resource, |generation| Plugin {
        client,
        generation,
        pre_start_required: options.pre_start_required,
        prefers: options.get_preferred_allocation_available,
        stop,
    })?;
    if let Some(metrics) = &plugins.metrics {
        metrics.actions.plugin_registered(resource);
    }
    let (plugins, resource) = (plugins.clone(), resource.to_owned());
    tracing::info!(resource, "a device plugin registered");
    tokio::spawn(async move {
        let generation = plugin.generation;
        let stop = plugin.stop.clone();
        tokio::select! {
            // Another has taken its place, or the kubelet ends: nothing is wrong with the devices.
            () = stop.cancelled() => {}
            () = follow(&plugins, &resource, plugin) => plugins.disconnected(&resource, generation),
        }
    });
    Ok(())
}

async fn follow(plugins: &DevicePlugins, resource: &str, plugin: Plugin) {
    let mut client = plugin.client.clone();
    let stream = match client.list_and_watch(Empty {}).await {
        Ok(stream) => stream,
        Err(status) => {
            let error = status.message();
            tracing::warn!(resource, error, "cannot list the devices of a device plugin");
            return;
        }
    };
    let mut stream = stream.into_inner();
    loop {
        match stream.message().await {
            Ok(Some(told)) => plugins.devices_told(resource, plugin.generation, devices(told)),
            Ok(None) => return tracing::info!(resource, "a device plugin has ended"),
            Err(status) => {
                let error = status.message();
                return tracing::info!(resource, error, "a device plugin is gone");
            }
        }
    }
}

fn devices(told: ListAndWatchResponse) -> Devices {
    let devices = told.devices.into_iter();
    devices
        .map(|device| {
            let numa = device.topology.into_iter().flat_map(|topology| topology.nodes);
            let known = Device {
                healthy: device.health == "Healthy",
                numa: numa.map(|node| node.id).collect(),
            };
            (device.id, known)
        })
        .collect()
}
