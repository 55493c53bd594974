//! Device plugins: they register at `<root>/device-plugins/kubelet.sock`, tell which devices there are, and say what a
//! container needs to use them. What was allocated is on disk, and stays the pod's until the pod has ended.

mod choose;
mod hints;
mod plugin;
mod record;
mod server;

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use k8s_openapi::api::core::v1::{Container, Pod};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use parking_lot::Mutex;
use tokio::sync::Notify;

use crate::metrics::Metrics;
use crate::plugin_registry::PluginHandler;
use crate::pods;
use crate::resources::{ResourceList, value};
use crate::topology::{Mask, containers};
use choose::{Choice, Devices, Wanted, choose, complete, prefer_near};
use hints::mask_of;
use plugin::Plugin;
use record::{Allocation, Record};

pub use hints::Reusable;
pub use record::{DeviceNode, HostMount};

/// The type that device plugins register with.
pub const DEVICE_PLUGIN: &str = "DevicePlugin";

/// A resource whose plugin is away keeps its capacity this long.
const STOP_GRACE: Duration = Duration::from_secs(300);
/// More resources than this are not taken.
const MAX_RESOURCES: usize = 256;

struct Resource {
    devices: Devices,
    plugin: Option<Plugin>,
    /// Since when it has no plugin.
    stopped: Instant,
}

#[derive(Default)]
struct State {
    resources: BTreeMap<String, Resource>,
    record: Record,
    /// Counts the plugins that registered: an older one must not speak for a newer.
    generation: u64,
}

pub struct DevicePlugins {
    folder: PathBuf,
    file: PathBuf,
    /// A leaf lock.
    state: Mutex<State>,
    /// One pod after the other: two must not be given the same device. Taken before `state`.
    allocating: tokio::sync::Mutex<()>,
    /// Something changed that the Node's status shows.
    pub changed: Notify,
    /// Something changed that pods' statuses show.
    pub health_changed: Notify,
    metrics: Option<Arc<Metrics>>,
}

/// What a container gets of its devices.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct RunOptions {
    pub env: BTreeMap<String, String>,
    pub mounts: Vec<HostMount>,
    pub nodes: Vec<DeviceNode>,
    pub annotations: BTreeMap<String, String>,
    pub cdi: Vec<String>,
}

/// Devices of one resource with the NUMA nodes that they are at.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Holding {
    pub resource: String,
    pub devices: Vec<String>,
    pub numa: Vec<i64>,
}

impl DevicePlugins {
    /// With what an earlier process allocated.
    pub fn with_metrics(self, metrics: Arc<Metrics>) -> Self {
        DevicePlugins {
            metrics: Some(metrics),
            ..self
        }
    }

    pub fn restored(root: &std::path::Path) -> Self {
        let file = root.join("device_allocations.json");
        let record = Record::load(&file).unwrap_or_else(|error| {
            tracing::error!(%error, file = %file.display(), "cannot read which devices are allocated; devices may be given twice");
            Record::default()
        });
        let stopped = |name: &String| {
            let resource = Resource {
                devices: Devices::new(),
                plugin: None,
                stopped: Instant::now(),
            };
            (name.clone(), resource)
        };
        DevicePlugins {
            folder: root.join("device-plugins"),
            file,
            state: Mutex::new(State {
                resources: record.resources.iter().map(stopped).collect(),
                record,
                generation: 0,
            }),
            allocating: tokio::sync::Mutex::default(),
            changed: Notify::new(),
            health_changed: Notify::new(),
            metrics: None,
        }
    }

    /// Capacity and allocatable of the resources that have plugins, or had them until lately.
    pub fn capacity(&self) -> (ResourceList, ResourceList) {
        let state = self.state.lock();
        let (mut capacity, mut allocatable) = (ResourceList::new(), ResourceList::new());
        for (name, resource) in &state.resources {
            let healthy = resource.devices.values().filter(|device| device.healthy).count();
            let expired = resource.plugin.is_none() && resource.stopped.elapsed() >= STOP_GRACE;
            // COMPAT: what is gone for good is shown as zero, not left out.
            let all = if expired { 0 } else { resource.devices.len() };
            capacity.insert(name.clone(), Quantity(all.to_string()));
            allocatable.insert(name.clone(), Quantity(healthy.to_string()));
        }
        (capacity, allocatable)
    }

    fn is_plugin_resource(&self, name: &str) -> bool {
        let state = self.state.lock();
        state.resources.contains_key(name)
    }

    /// The devices that the containers ask of plugins: name of the resource and how many.
    fn wanted(&self, pod: &Pod, container: &Container) -> Vec<(String, usize)> {
        let limits = container
            .resources
            .iter()
            .flat_map(|all| all.limits.iter().flatten());
        let wanted = limits.filter(|(name, _)| {
            name.contains('/')
                && self.is_plugin_resource(name)
                && !is_backed_by_class(pod, &container.name, name)
        });
        wanted
            .map(|(name, amount)| (name.clone(), usize::try_from(value(amount)).unwrap_or(0)))
            .collect()
    }

    /// Gives the pod's containers their devices. What they have already stays as it is. The error is for the pod's status.
    pub async fn allocate(&self, pod: &Pod) -> Result<(), String> {
        let mut reusable = Reusable::new();
        for container in containers(pod) {
            self.allocate_container(pod, container, None, &mut reusable)
                .await?;
        }
        Ok(())
    }

    /// The same for one container, with whether it ends before the next one starts; devices at these NUMA nodes first.
    pub async fn allocate_container(
        &self,
        pod: &Pod,
        (container, ends_early): (&Container, bool),
        nodes: Option<Mask>,
        reusable: &mut Reusable,
    ) -> Result<(), String> {
        let wanted = self.wanted(pod, container);
        if wanted.is_empty() {
            return Ok(());
        }
        let _turn = self.allocating.lock().await;
        for (resource, amount) in wanted {
            let reuse = reusable.entry(resource.clone()).or_default();
            let (uid, name) = (pods::uid(pod), container.name.as_str());
            self.allocate_one((uid, name), (&resource, amount), nodes, reuse)
                .await?;
            let state = self.state.lock();
            let has = state.record.of_container(uid, name);
            let devices = has
                .and_then(|has| has.get(&resource))
                .map(|one| one.devices.clone());
            for device in devices.into_iter().flatten() {
                if ends_early {
                    reuse.insert(device);
                } else {
                    reuse.remove(&device);
                }
            }
        }
        Ok(())
    }

    async fn allocate_one(
        &self,
        (uid, container): (&str, &str),
        (resource, amount): (&str, usize),
        nodes: Option<Mask>,
        reusable: &BTreeSet<String>,
    ) -> Result<(), String> {
        let (choice, near, plugin) = {
            let state = self.state.lock();
            let known = state.resources.get(resource);
            let has = state.record.of_container(uid, container);
            let wanted = Wanted {
                uid,
                container,
                resource,
                amount,
                has: has.and_then(|has| has.get(resource)).map(|one| &one.devices),
                reusable,
            };
            let devices = known.map(|known| &known.devices);
            let choice = choose(&wanted, devices, &state.record.in_use(resource))?;
            let is_near = |id: &String| {
                let at = devices.and_then(|devices| mask_of(devices, id));
                nodes.zip(at).is_some_and(|(nodes, at)| nodes.intersects(at))
            };
            let near: BTreeSet<String> = match &choice {
                Choice::Among { available, .. } => {
                    available.iter().filter(|id| is_near(id)).cloned().collect()
                }
                _ => BTreeSet::new(),
            };
            (choice, near, known.and_then(|known| known.plugin.clone()))
        };
        let missing = || format!("unknown Device Plugin {resource}");
        let devices = match choice {
            Choice::Nothing => return Ok(()),
            Choice::Exactly(devices) => devices,
            Choice::Among {
                chosen,
                available,
                more,
            } => {
                let plugin = plugin.as_ref().ok_or_else(missing)?;
                let (chosen, available, more) = prefer_near(chosen, available, more, near);
                match more {
                    0 => chosen,
                    more => {
                        let preferred = plugin.preferred(&available, &chosen, amount).await?;
                        complete(chosen, &available, more, &preferred)
                    }
                }
            }
        };
        let plugin = plugin.ok_or_else(missing)?;
        let began = Instant::now();
        let answer = plugin.allocate(&devices).await?;
        if let Some(metrics) = &self.metrics {
            metrics.actions.devices_allocated(resource, began.elapsed());
        }
        let mut state = self.state.lock();
        let known = state.resources.get(resource).map(|known| &known.devices);
        let numa = devices.iter().filter_map(|id| {
            let device = known?.get(id)?;
            Some((id.clone(), device.numa.clone()))
        });
        let allocation = Allocation::new(devices.clone(), numa.collect(), answer);
        let of_pod = state.record.pods.entry(uid.to_owned()).or_default();
        let of_container = of_pod.entry(container.to_owned()).or_default();
        of_container.insert(resource.to_owned(), allocation);
        self.save(&state)
    }

    fn save(&self, state: &State) -> Result<(), String> {
        state
            .record
            .save(&self.file)
            .map_err(|error| format!("failed to write checkpoint file {:?}: {error}", self.file))
    }

    /// What the container is made with. Asks plugins that want to know of every start.
    pub async fn options(&self, pod: &Pod, container: &Container) -> Result<RunOptions, String> {
        let uid = pods::uid(pod);
        let wanted = self.wanted(pod, container);
        let has = |resource: &str| {
            let state = self.state.lock();
            let has = state.record.of_container(uid, &container.name);
            has.is_some_and(|has| has.contains_key(resource))
        };
        // The pod was taken by an earlier process, which ended before it wrote that down.
        if wanted
            .iter()
            .any(|(resource, amount)| *amount > 0 && !has(resource))
        {
            self.allocate(pod).await?;
        }
        for (resource, _) in wanted {
            let (plugin, devices) = {
                let state = self.state.lock();
                let has = state.record.of_container(uid, &container.name);
                let devices = has
                    .and_then(|has| has.get(&resource))
                    .map(|one| one.devices.clone());
                let plugin = state
                    .resources
                    .get(&resource)
                    .and_then(|known| known.plugin.clone());
                (plugin, devices)
            };
            if let (Some(plugin), Some(devices)) = (plugin, devices)
                && plugin.pre_start_required
            {
                plugin.pre_start(&devices).await?;
            }
        }
        let state = self.state.lock();
        let mut options = RunOptions::default();
        let allocations = state.record.of_container(uid, &container.name);
        for allocation in allocations.into_iter().flat_map(BTreeMap::values) {
            let Allocation {
                env,
                mounts,
                nodes,
                annotations,
                cdi,
                ..
            } = allocation.clone();
            options.env.extend(env);
            for mount in mounts {
                if !options
                    .mounts
                    .iter()
                    .any(|other| other.container_path == mount.container_path)
                {
                    options.mounts.push(mount);
                }
            }
            for node in nodes {
                if !options
                    .nodes
                    .iter()
                    .any(|other| other.container_path == node.container_path)
                {
                    options.nodes.push(node);
                }
            }
            options.annotations.extend(annotations);
            options.cdi.extend(
                cdi.into_iter()
                    .filter(|name| !options.cdi.contains(name))
                    .collect::<Vec<_>>(),
            );
        }
        Ok(options)
    }

    /// Frees the devices of a pod that has ended.
    pub fn release(&self, uid: &str) {
        self.retain(|known| known != uid);
    }

    /// Frees the devices of all pods but those.
    pub fn retain(&self, is_known: impl Fn(&str) -> bool) {
        let mut state = self.state.lock();
        let before = state.record.pods.len();
        state.record.pods.retain(|uid, _| is_known(uid));
        if state.record.pods.len() != before
            && let Err(error) = self.save(&state)
        {
            tracing::warn!(error, "cannot write that devices are free");
        }
    }

    /// The devices of a container, with their health, by resource.
    pub fn health(&self, uid: &str, container: &str) -> BTreeMap<String, Vec<(String, bool)>> {
        let state = self.state.lock();
        let has = state.record.of_container(uid, container);
        has.into_iter()
            .flatten()
            .map(|(resource, allocation)| {
                let known = state.resources.get(resource);
                // COMPAT: what is not known counts as healthy.
                let told = |id: &String| Some(known?.devices.get(id)?.healthy);
                let health = |id: &String| told(id).unwrap_or(true);
                let devices = allocation.devices.iter().map(|id| (id.clone(), health(id)));
                (resource.clone(), devices.collect())
            })
            .collect()
    }

    /// The devices of a container.
    pub fn holdings(&self, uid: &str, container: &str) -> Vec<Holding> {
        let state = self.state.lock();
        let has = state.record.of_container(uid, container).into_iter().flatten();
        has.flat_map(|(resource, allocation)| {
            by_numa(resource, allocation.devices.iter(), |id| {
                allocation.numa.get(id).cloned()
            })
        })
        .collect()
    }

    /// All healthy devices.
    pub fn healthy(&self) -> Vec<Holding> {
        let state = self.state.lock();
        let all = state.resources.iter();
        all.flat_map(|(resource, known)| {
            let healthy = known.devices.iter().filter(|(_, device)| device.healthy);
            by_numa(resource, healthy.map(|(id, _)| id), |id| {
                known.devices.get(id).map(|device| device.numa.clone())
            })
        })
        .collect()
    }

    /// A plugin told of its devices.
    fn devices_told(&self, resource: &str, generation: u64, devices: Devices) {
        let mut state = self.state.lock();
        let Some(known) = state.resources.get_mut(resource) else {
            return;
        };
        if known
            .plugin
            .as_ref()
            .is_none_or(|plugin| plugin.generation != generation)
        {
            return;
        }
        if known.devices != devices {
            known.devices = devices;
            drop(state);
            self.notify();
        }
    }

    fn notify(&self) {
        self.changed.notify_one();
        self.health_changed.notify_one();
    }

    /// A plugin registered for a resource, in place of any other.
    fn connected(&self, resource: &str, make: impl FnOnce(u64) -> Plugin) -> Result<Plugin, String> {
        let mut state = self.state.lock();
        if !state.resources.contains_key(resource) && state.resources.len() >= MAX_RESOURCES {
            return Err(format!("more than {MAX_RESOURCES} resources of device plugins"));
        }
        state.generation += 1;
        let plugin = make(state.generation);
        let entry = state
            .resources
            .entry(resource.to_owned())
            .or_insert_with(|| Resource {
                devices: Devices::new(),
                plugin: None,
                stopped: Instant::now(),
            });
        if let Some(old) = entry.plugin.replace(plugin.clone()) {
            old.stop.cancel();
        }
        if state.record.resources.insert(resource.to_owned()) {
            self.save(&state)?;
        }
        Ok(plugin)
    }

    /// A plugin is gone: its devices cannot be used until it is back.
    fn disconnected(&self, resource: &str, generation: u64) {
        let mut state = self.state.lock();
        if let Some(known) = state.resources.get_mut(resource)
            && known
                .plugin
                .as_ref()
                .is_some_and(|plugin| plugin.generation == generation)
        {
            known.plugin = None;
            known.stopped = Instant::now();
            for device in known.devices.values_mut() {
                device.healthy = false;
            }
            drop(state);
            self.notify();
        }
    }

    /// Takes plugins that register in `plugins_registry`.
    pub fn handler(
        self: &Arc<Self>,
        shutdown: tokio_util::sync::CancellationToken,
    ) -> Arc<dyn PluginHandler> {
        Arc::new(server::Handler {
            plugins: self.clone(),
            shutdown,
        })
    }

    /// A plugin that registered in `plugins_registry` took its socket away.
    fn removed(&self, resource: &str) {
        let generation = {
            let state = self.state.lock();
            let plugin = state
                .resources
                .get(resource)
                .and_then(|known| known.plugin.as_ref());
            plugin.map(|plugin| {
                plugin.stop.cancel();
                plugin.generation
            })
        };
        if let Some(generation) = generation {
            self.disconnected(resource, generation);
        }
    }

    pub async fn run(self: Arc<Self>, shutdown: tokio_util::sync::CancellationToken) {
        server::run(self, shutdown).await;
    }
}

/// Whether the scheduler has allocated it by a claim.
fn is_backed_by_class(pod: &Pod, container: &str, resource: &str) -> bool {
    let status = pod.status.as_ref();
    let extended = status.and_then(|status| status.extended_resource_claim_status.as_ref());
    let mut mappings = extended
        .into_iter()
        .flat_map(|extended| &extended.request_mappings);
    mappings.any(|mapping| mapping.container_name == container && mapping.resource_name == resource)
}

/// COMPAT: one entry for each NUMA node of a device.
fn by_numa<'a>(
    resource: &str,
    devices: impl Iterator<Item = &'a String>,
    numa_of: impl Fn(&str) -> Option<Vec<i64>>,
) -> Vec<Holding> {
    let mut groups: BTreeMap<Vec<i64>, Vec<String>> = BTreeMap::new();
    for id in devices {
        let nodes = numa_of(id).unwrap_or_default();
        groups.entry(nodes).or_default().push(id.clone());
    }
    let holdings = groups.into_iter().map(|(numa, devices)| Holding {
        resource: resource.to_owned(),
        devices,
        numa,
    });
    holdings.collect()
}
