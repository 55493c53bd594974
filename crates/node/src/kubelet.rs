//! The node as a whole: what its parts share, how it starts, and how a change finds the worker of its pod.

use std::collections::{HashMap, HashSet};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use k8s_openapi::api::core::v1::{ContainerImage, Node, Pod, Service};
use k8s_openapi::api::node::v1::RuntimeClass;
use k8s_openapi::jiff::Timestamp;
use kube::{Api, Client};
use parking_lot::Mutex;
use skiff_client::{Change, EventRecorder, Informer, InformerFactory};
use skiff_cri::v1;
use tokio::sync::{Notify, watch};
use tokio_util::sync::CancellationToken;

use crate::action_metrics;
use crate::admission::{self, Confinement, Refusal};
use crate::backoff::Backoff;
use crate::cgroups::Cgroups;
use crate::config::NodeConfig;
use crate::credential_providers::{self, CredentialProviders};
use crate::device_plugins::{self, DevicePlugins};
use crate::disk_stats::DiskStats;
use crate::dns::parse_resolv_conf;
use crate::dra::{DRA_PLUGIN, Dra};
use crate::field_ref::NodeFacts;
use crate::images::Images;
use crate::kernel_defaults;
use crate::machine::Machine;
use crate::marks;
use crate::metrics::Metrics;
use crate::node_shutdown;
use crate::node_status::node_reference;
use crate::objects::{Objects, error_message};
use crate::plugin_registry::{CSI_PLUGIN, PluginRegistry};
use crate::pod_certificates::{self, PodCertificates};
use crate::pod_state::PodState;
use crate::pod_worker::PodWorker;
use crate::pods;
use crate::preemption::is_critical;
use crate::pressure::{self, Condition, ImageHistory, Signal};
use crate::probes::{ProbeKind, Probes};
use crate::pull_records::PullRecords;
use crate::resize::{Record, Resize};
use crate::resources::{milli_value, value};
use crate::runtime::Runtime;
use crate::runtime_health::{RuntimeHealth, Trouble, joined};
use crate::server;
use crate::static_pods::{StaticPods, from_api, is_mirror};
use crate::status::{StatusInput, generate, statuses_equal};
use crate::swap::{self, SwapControl};
use crate::topology::{self, Managers};
use crate::user_namespaces::UserNamespaces;
use crate::volumes::Volumes;
use crate::volumes::csi::Csi;
use crate::watched::Watched;

pub const FIRST_RETRY: Duration = Duration::from_millis(5);
pub const LAST_RETRY: Duration = Duration::from_secs(1);
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error(transparent)]
    Runtime(#[from] skiff_cri::ConnectError),
    #[error("cannot set up cgroups below {root:?}: {source}")]
    Cgroups { root: String, source: std::io::Error },
    #[error("cannot make the directory {path}: {source}")]
    Directory { path: String, source: std::io::Error },
    #[error(transparent)]
    CredentialProviders(#[from] credential_providers::Error),
    #[error(transparent)]
    Managers(#[from] topology::Error),
    #[error(
        "static policies of the CPU and memory managers need the cpuset controller, which this machine's cgroups lack"
    )]
    NoCpuset,
    #[error("{0}")]
    KernelDefaults(String),
    #[error("failed to determine if swap is on: {0}")]
    UnknownSwap(std::io::Error),
    #[error("running with swap on is not supported, please disable swap or set --fail-swap-on flag to false")]
    SwapOn,
    #[error("the node's server: {0}")]
    Server(#[from] server::Error),
}

pub struct Kubelet {
    pub config: NodeConfig,
    pub client: Client,
    pub metrics: Arc<Metrics>,
    pub shutdown: CancellationToken,
    pub started: Instant,
    pub recorder: EventRecorder,
    pub runtime: Runtime,
    pub runtime_name: String,
    /// `name://version`.
    pub runtime_version: String,
    pub runtime_status: Mutex<Option<v1::StatusResponse>>,
    pub images: Images,
    pub probes: Probes,
    pub volumes: Volumes,
    pub(crate) disk_stats: DiskStats,
    pub user_namespaces: UserNamespaces,
    pub device_plugins: Arc<DevicePlugins>,
    pub managers: Arc<Managers>,
    pub dra: Dra,
    pub csi: Arc<Csi>,
    pub cgroups: Cgroups,
    pub swap: SwapControl,
    pub objects: Arc<dyn Objects>,
    pub machine: Machine,
    pub server_port: u16,
    pub pods: Informer<Pod>,
    pub services: Informer<Service>,
    /// This node alone.
    pub node: Informer<Node>,
    /// Taken before `states`.
    pub(crate) admission: Mutex<()>,
    /// All pods of this node are known.
    pub pods_listed: AtomicBool,
    /// A resize waits for room.
    pub resizes_wait: AtomicBool,
    pub crash_backoff: Mutex<Backoff>,
    /// A leaf lock.
    pub(crate) runtime_health: Mutex<RuntimeHealth>,
    /// What keeps the runtime from running pods.
    pub(crate) troubles: watch::Sender<Vec<Trouble>>,
    /// `None` before they have been listed.
    pub(crate) node_images: watch::Sender<Option<Vec<ContainerImage>>>,
    /// The machine is about to shut down.
    pub(crate) node_shutdown: watch::Sender<bool>,
    /// What the node is short of.
    pub(crate) pressure: watch::Sender<Vec<Condition>>,
    /// A leaf lock.
    pub(crate) image_history: Mutex<ImageHistory>,
    /// Asks the runtime at once how it is.
    pub health_check: Notify,
    /// By uid. A leaf lock.
    states: Mutex<HashMap<String, Arc<PodState>>>,
    /// Pods the runtime had when this process started.
    found_at_start: HashSet<String>,
    pub cni_written: Mutex<Vec<String>>,
    pub(crate) static_pods: StaticPods,
}

/// Runs the node until `shutdown`. Containers stay as they are when it ends.
pub async fn run(mut config: NodeConfig, client: Client, shutdown: CancellationToken) -> Result<(), Error> {
    let swap_is_on = swap::is_on().map_err(Error::UnknownSwap)?;
    if swap_is_on && config.swap.fail_on {
        return Err(Error::SwapOn);
    }
    if config.protect_kernel_defaults
        && let Some(why) = joined(kernel_defaults::different(Path::new("/proc/sys")))
    {
        return Err(Error::KernelDefaults(why));
    }
    make_directories(&config)?;
    config.reserve_named_cpus();
    let factory = InformerFactory::new(client.clone(), shutdown.clone());
    let selector = format!("spec.nodeName={}", config.node_name);
    let pods: Informer<Pod> = factory.filtered(None, Some(&selector));
    let services: Informer<Service> = factory.informer();
    let node_selector = format!("metadata.name={}", config.node_name);
    let node: Informer<Node> = factory.filtered(None, Some(&node_selector));
    let listener = server::bind(config.server_bind).await?;
    let server_port = listener.local_addr().map_err(server::Error::from)?.port();
    let tls = server::tls_config(&config)?;
    let metrics = Metrics::new(&config.kubelet_version, &config.node_name);
    let timeout = config.runtime_request_timeout;
    let runtime = Runtime::connect(&config.runtime_endpoint, metrics.clone(), timeout).await?;
    let machine = Machine::detect(&config.data_dir);
    config.limit_pods_by_cpus(machine.cpus);
    let managers = Managers::restored(
        (&config.data_dir, Path::new(topology::SYSTEM)),
        &config.managers,
        config.reserved.cpu_milli,
        config.reserved.memory + config.thresholds.kept_back(Signal::Memory, machine.memory),
        &metrics.registry,
    )?;
    let managers = Arc::new(managers);
    topology::register_gauges(&managers, &metrics.registry);
    let cgroups = Cgroups::new(&config.cgroup_root, config.cgroups_per_qos)
        .map(|cgroups| cgroups.with_limits(config.pod_max_pids, machine.page_sizes()))
        .map(|cgroups| cgroups.with_managers(managers.clone()))
        .map(|cgroups| cgroups.with_quota(config.cpu_cfs_quota))
        .and_then(|cgroups| cgroups.set_up().map(|()| cgroups))
        .map_err(|source| Error::Cgroups {
            root: config.cgroup_root.clone(),
            source,
        })?;
    if managers.pins() && !cgroups.has_cpuset() {
        return Err(Error::NoCpuset);
    }
    let swap = SwapControl {
        accounting: cgroups.swap_accounting(),
        behavior: config.swap.behavior,
        memory: machine.memory,
        capacity: machine.swap,
    };
    let Some(version) = until_answered(&shutdown, || runtime.version()).await else {
        return Ok(());
    };
    // Before any pod is looked at: a pod that is not in this list has nothing in the runtime.
    let Some(outlines) = until_answered(&shutdown, || runtime.outlines()).await else {
        return Ok(());
    };
    let providers = match &config.credential_providers {
        Some((file, programs)) => CredentialProviders::load(file, programs)?,
        None => CredentialProviders::default(),
    };
    let recorder = EventRecorder::new(client.clone(), "kubelet", &config.node_name);
    let watched = Arc::new(Watched::new(
        client.clone(),
        config.max_watched_objects,
        shutdown.clone(),
    ));
    let objects: Arc<dyn Objects> = watched.clone();
    let csi = Arc::new(Csi::new(
        &config.data_dir,
        &config.node_name,
        client.clone(),
        factory.informer(),
        node.clone(),
    ));
    let certificates = PodCertificates::new();
    certificates.count(&metrics.registry);
    let volumes = Volumes::new(&config.data_dir, objects.clone())
        .with_recorder(recorder.clone())
        .with_certificates(certificates.clone())
        .with_csi(csi.clone())
        .with_metrics(&metrics.registry);
    let on_disk = volumes.pods_on_disk().into_iter();
    let user_namespaces = UserNamespaces::restore(
        config.max_pods,
        on_disk.map(|uid| {
            let directory = volumes.pod_dir(&uid);
            (uid, directory)
        }),
    );
    let kubelet = Arc::new(Kubelet {
        machine,
        user_namespaces,
        images: Images::new(
            runtime.clone(),
            recorder.clone(),
            config.max_parallel_image_pulls,
            PullRecords::new(config.data_dir.join("image_manager")),
            (providers, config.image_verification.clone()),
        )
        .with_rate(config.pull_rate),
        volumes,
        disk_stats: DiskStats::default(),
        dra: Dra::restored(
            &config.data_dir,
            client.clone(),
            &config.node_name,
            shutdown.clone(),
        ),
        device_plugins: Arc::new(DevicePlugins::restored(&config.data_dir).with_metrics(metrics.clone())),
        managers,
        csi: csi.clone(),
        runtime_version: format!("{}://{}", version.runtime_name, version.runtime_version),
        runtime_name: version.runtime_name,
        runtime_status: Mutex::default(),
        found_at_start: outlines.keys().cloned().collect(),
        crash_backoff: Mutex::new(Backoff::new(
            Duration::from_secs(10).min(config.max_container_restart_period),
            config.max_container_restart_period,
        )),
        runtime_health: Mutex::new(RuntimeHealth::new(Instant::now())),
        troubles: watch::Sender::new(vec![Trouble::Unchecked]),
        node_images: watch::Sender::new(None),
        started: Instant::now(),
        probes: Probes::default(),
        node_shutdown: watch::Sender::new(false),
        pressure: watch::Sender::new(Vec::new()),
        image_history: Mutex::new(ImageHistory::restored(config.data_dir.join("image_history"))),
        health_check: Notify::new(),
        states: Mutex::default(),
        cni_written: Mutex::default(),
        static_pods: StaticPods::new(&config.static_pods),
        config,
        client,
        metrics,
        shutdown: shutdown.clone(),
        recorder,
        runtime,
        cgroups,
        swap,
        objects,
        server_port,
        pods,
        services,
        node,
        admission: Mutex::default(),
        pods_listed: AtomicBool::new(false),
        resizes_wait: AtomicBool::new(false),
    });
    kubelet.metrics.count_running(&kubelet);
    action_metrics::count_pods(&kubelet);
    kubelet.recorder.event(
        &node_reference(&kubelet.config.node_name),
        "Normal",
        "Starting",
        "Starting kubelet.".to_owned(),
    );
    if swap_is_on {
        kubelet.tell_of_swap();
    }
    kubelet.confine_pods();
    kubelet.configure_network(&kubelet.config.pod_cidrs.clone()).await;
    kubelet.follow_node();
    kubelet.follow_pods();
    let mut tasks = tokio::task::JoinSet::new();
    kubelet.start_static_pods(&mut tasks);
    tasks.spawn(kubelet.clone().run_health());
    tasks.spawn(kubelet.clone().run_node_images());
    tasks.spawn(kubelet.clone().run_node_status());
    tasks.spawn(kubelet.clone().run_lease());
    tasks.spawn(kubelet.clone().run_pleg(outlines));
    tasks.spawn(kubelet.clone().run_housekeeping());
    tasks.spawn(kubelet.clone().run_pressure());
    tasks.spawn(kubelet.clone().run_disk_stats());
    tasks.spawn(kubelet.clone().run_node_shutdown());
    let plugins = PluginRegistry::new(kubelet.config.data_dir.join("plugins_registry"))
        .handle(CSI_PLUGIN, csi.clone())
        .handle(DRA_PLUGIN, kubelet.dra.drivers.clone())
        .handle(
            device_plugins::DEVICE_PLUGIN,
            kubelet.device_plugins.handler(shutdown.clone()),
        );
    tasks.spawn(plugins.run(shutdown.clone()));
    tasks.spawn(kubelet.clone().run_device_health());
    tasks.spawn(kubelet.clone().run_cpu_reconcile());
    tasks.spawn(kubelet.clone().run_pod_resources());
    tasks.spawn(kubelet.device_plugins.clone().run(shutdown.clone()));
    tasks.spawn(csi.run(shutdown.clone()));
    let access = pod_certificates::Access {
        client: kubelet.client.clone(),
        informers: factory.clone(),
        node: kubelet.node.clone(),
        node_name: kubelet.config.node_name.clone(),
        recorder: kubelet.recorder.clone(),
    };
    tasks.spawn(certificates.clone().run(access, shutdown.clone()));
    tasks.spawn(kubelet.clone().run_object_changes(watched, certificates));
    tasks.spawn(server::serve(kubelet.clone(), listener, tls));
    if let Some(address) = kubelet.config.healthz_address() {
        tasks.spawn(server::serve_healthz(address, shutdown.clone()));
    }
    while let Some(result) = tasks.join_next().await {
        if let Err(error) = result
            && error.is_panic()
        {
            // One part is broken; better to be restarted whole than to limp.
            tracing::error!(%error, "a kubelet task panicked");
            shutdown.cancel();
        }
    }
    Ok(())
}

fn make_directories(config: &NodeConfig) -> Result<(), Error> {
    let pods = config.data_dir.join("pods");
    // Where plugins put their sockets, and where they say that they are there.
    let (plugins, registry) = (
        config.data_dir.join("plugins"),
        config.data_dir.join("plugins_registry"),
    );
    for directory in [&pods, &plugins, &registry, &config.log_dir] {
        std::fs::create_dir_all(directory)
            .and_then(|()| {
                // Secrets and service account tokens are in there, some of them readable to all that get so
                // far; containers do not come this way.
                let private = std::fs::Permissions::from_mode(0o750);
                if *directory == pods {
                    std::fs::set_permissions(directory, private)
                } else {
                    Ok(())
                }
            })
            .map_err(|source| Error::Directory {
                path: directory.display().to_string(),
                source,
            })?;
    }
    Ok(())
}

/// Asks until the runtime answers: it may start at the same moment as we do.
async fn until_answered<T, F>(shutdown: &CancellationToken, ask: impl Fn() -> F) -> Option<T>
where
    F: Future<Output = Result<T, skiff_cri::Status>>,
{
    let mut retry = FIRST_RETRY;
    loop {
        match ask().await {
            Ok(answer) => return Some(answer),
            Err(status) => tracing::debug!(
                error = status.message(),
                "the container runtime does not answer yet"
            ),
        }
        tokio::select! {
            () = shutdown.cancelled() => return None,
            () = tokio::time::sleep(retry) => {}
        }
        retry = (retry * 2).min(LAST_RETRY);
    }
}

impl Kubelet {
    /// Has pods looked at when a ConfigMap or Secret in their volumes changed, a certificate was issued or refused, or a driver
    /// came that they may wait for.
    async fn run_object_changes(self: Arc<Self>, watched: Arc<Watched>, certificates: Arc<PodCertificates>) {
        loop {
            tokio::select! {
                () = self.shutdown.cancelled() => return,
                uids = watched.changed() => uids.iter().for_each(|uid| self.wake(uid)),
                uids = certificates.changed() => uids.iter().for_each(|uid| self.wake(uid)),
                () = self.csi.driver_registered() => {
                    self.states().iter().for_each(|state| state.wake.notify_one());
                }
            }
        }
    }

    /// Keeps all pods together to what is not reserved. A limit that is below what they have now cannot be set.
    fn confine_pods(&self) {
        let node = node_reference(&self.config.node_name);
        match self.cgroups.confine(&self.config.reserved, &self.machine) {
            Ok(()) => self.recorder.event(
                &node,
                "Normal",
                "NodeAllocatableEnforced",
                "Updated Node Allocatable limit across pods".to_owned(),
            ),
            Err(error) => {
                tracing::warn!(%error, "cannot limit the pods to what is allocatable");
                let message = format!("Failed to update Node Allocatable Limits: {error}");
                self.recorder
                    .event(&node, "Warning", "FailedNodeAllocatableEnforcement", message);
            }
        }
    }

    fn follow_pods(self: &Arc<Self>) {
        let kubelet = self.clone();
        self.pods.subscribe(move |change| match change {
            Change::Applied { new, .. } if is_mirror(new) => kubelet.mirror_applied(new),
            Change::Deleted { last } if is_mirror(last) => kubelet.mirror_gone(last),
            Change::Applied { new, .. } => kubelet.pod_applied(&from_api(new)),
            Change::Deleted { last } => kubelet.pod_gone(last),
        });
    }

    pub(crate) fn pod_applied(self: &Arc<Self>, pod: &Arc<Pod>) {
        let uid = pods::uid(pod);
        let state = {
            let mut states = self.states.lock();
            if let Some(state) = states.get(uid).cloned() {
                drop(states);
                let before = state.pod();
                state.update(pod.clone());
                self.consider_resize(&before, pod);
                return;
            }
            let resize = Resize::restored(pod, Record::load(&self.volumes.pod_dir(uid)));
            let state = PodState::new(pod.clone(), self.found_at_start.contains(uid), resize);
            states.insert(uid.to_owned(), state.clone());
            state
        };
        tokio::spawn(PodWorker::new(self.clone(), state).run());
    }

    fn pod_gone(&self, last: &Arc<Pod>) {
        if let Some(state) = self.states.lock().get(pods::uid(last)) {
            state.set_gone(last.clone());
        }
    }

    /// Takes the pod, if the node can have it beside those it has taken.
    pub async fn admit(&self, state: &PodState) -> Result<(), Refusal> {
        match self.try_admit(state).await {
            Err(refusal) if !refusal.missing.is_empty() && is_critical(&state.pod()) => {
                self.make_room(state, &refusal.missing).await?;
                self.try_admit(state).await?;
            }
            admitted => admitted?,
        }
        let (pod, devices) = (state.allocated_pod(), Some(&*self.device_plugins));
        self.managers.admit(&pod, devices).await
    }

    /// Takes the pod again that an earlier kubelet had taken: what it has of CPUs and memory stays its own.
    pub async fn admit_again(&self, state: &PodState) -> Result<(), Refusal> {
        self.managers.admit(&state.allocated_pod(), None).await
    }

    async fn try_admit(&self, state: &PodState) -> Result<(), Refusal> {
        let refused = match self.node.list().first() {
            Some(node) => match self.admit_on(state, Some(node)) {
                Err(refused) if refused.reason == admission::NODE_AFFINITY => Some(refused),
                result => return result,
            },
            // It runs without the API.
            None if state.is_static() => return self.admit_on(state, None),
            None => None,
        };
        // There may be newer labels than what we have of them, or a node we have not heard of yet.
        let api: Api<Node> = Api::all(self.client.clone());
        match (api.get_opt(&self.config.node_name).await, refused) {
            (Ok(Some(node)), _) => self.admit_on(state, Some(&node)),
            (_, Some(refused)) => Err(refused),
            (_, None) => self.admit_on(state, None),
        }
    }

    fn admit_on(&self, state: &PodState, node: Option<&Node>) -> Result<(), Refusal> {
        // One after the other: two pods must not both be given the last room.
        let _turn = self.admission.lock();
        pressure::admit(&self.pressure.borrow(), &state.pod())?;
        node_shutdown::admit(*self.node_shutdown.borrow())?;
        self.admit_beside_others(state, &state.allocated_pod(), node)?;
        self.record_allocation(state);
        state.set_admitted();
        Ok(())
    }

    /// Whether the pod can be had beside the others. Under `admission`.
    pub(crate) fn admit_beside_others(
        &self,
        state: &PodState,
        pod: &Pod,
        node: Option<&Node>,
    ) -> Result<(), Refusal> {
        // What ran when this process started was taken before.
        let is_taken = |other: &PodState| other.is_admitted() || other.may_be_in_runtime();
        let others: Vec<Arc<Pod>> = self
            .states()
            .into_iter()
            .filter(|other| other.uid != state.uid && is_taken(other) && !other.is_terminal())
            .map(|other| other.allocated_pod())
            .collect();
        let confinement = Confinement {
            sysctls: &self.config.allowed_sysctls,
            app_armor: self.machine.app_armor,
        };
        admission::admit(pod, &others, &self.allocatable(), node, &confinement)
    }

    /// Nothing of the pod is left.
    pub fn forget_pod(&self, uid: &str) {
        self.states.lock().remove(uid);
        // Another version of it may wait for its end.
        self.static_pods.changed.notify_one();
        self.retry_waiting_resizes();
        self.images.forget(uid);
        self.crash_backoff.lock().forget(&format!("{uid}_"));
        self.probes.remove_pod(uid);
    }

    pub fn wake(&self, uid: &str) {
        if let Some(state) = self.states.lock().get(uid) {
            state.wake.notify_one();
        }
    }

    pub fn states(&self) -> Vec<Arc<PodState>> {
        self.states.lock().values().cloned().collect()
    }

    pub fn state_by_name(&self, namespace: &str, name: &str) -> Option<Arc<PodState>> {
        let states = self.states.lock();
        let mut found = states.values().filter(|state| {
            let pod = state.pod();
            pods::namespace(&pod) == namespace && pods::name(&pod) == name
        });
        // An older one of the same name may still be on its way out.
        let first = found.next()?;
        Some(found.find(|state| !state.is_gone()).unwrap_or(first).clone())
    }

    pub fn state_by_uid(&self, uid: &str) -> Option<Arc<PodState>> {
        self.states.lock().get(uid).cloned()
    }

    /// Whether a pod is anybody's business: the API's or a worker's.
    pub fn is_known(&self, uid: &str) -> bool {
        self.states.lock().contains_key(uid) || self.pods.list().iter().any(|pod| pods::uid(pod) == uid)
    }

    /// Reads what the runtime has of the pod.
    pub async fn observe(&self, state: &PodState) -> Result<(), skiff_cri::Status> {
        if !state.may_be_in_runtime() {
            return Ok(());
        }
        let observed = self.runtime.observe(&state.uid).await?;
        let before = state.observed();
        self.runtime.check_gone(&state.uid, &before, &observed).await?;
        if state.set_observed(observed) {
            self.probes.wake_pod(&state.uid);
        }
        Ok(())
    }

    /// Makes the pod's status anew and, if it changed, has it written.
    pub fn refresh_status(&self, state: &PodState) {
        let host_ips = self.config.host_ips();
        let mut current = state.status.lock();
        // Read under the lock, so that an older view cannot overwrite what a newer one made.
        let pod = state.pod();
        let resize = state.resize.lock().clone();
        let allocated = match &resize.record {
            Some(record) if resize.is_wanted(&pod) => Arc::new(record.allocated.applied(&pod)),
            _ => pod.clone(),
        };
        let pod_config = self.cgroups.pod_config(&allocated).ok().flatten();
        let observed = state.observed();
        let reasons = state.reasons();
        let failed = state.failed();
        let mut made = generate(&StatusInput {
            pod: &allocated,
            resize: &resize,
            is_considered: resize.is_considered(&pod),
            pod_config: pod_config.as_ref(),
            previous: &current,
            observed: &observed,
            runtime_name: &self.runtime_name,
            reasons: &reasons,
            readiness: &self.probes,
            host_ips: &host_ips,
            terminal: state.is_terminal(),
            failed: failed.as_ref(),
            now: Timestamp::now(),
        });
        self.add_device_health(&pod, &mut made);
        let news = !statuses_equal(&current, &made);
        // The API may have something else than what was last made; the writer finds out.
        let api_differs = state.api_pod().is_some_and(|pod| {
            let status = pod.status.as_ref();
            status.is_none_or(|status| !statuses_equal(status, &made))
        });
        if news {
            *current = Arc::new(made);
            if let Some(work) = marks::current() {
                state.write_for(work);
            }
        }
        drop(current);
        if news || api_differs {
            state.dirty.send_modify(|generation| *generation += 1);
        }
    }

    /// A probe changed its mind.
    /// `waits` are the stretches of time that led to the result, with their names and beginnings, the last one up
    /// to now.
    pub fn probe_result_changed(&self, state: &Arc<PodState>, kind: ProbeKind, waits: &[(String, i64)]) {
        if kind == ProbeKind::Readiness {
            let work = marks::work_of(&state.pod());
            let now = skiff_trace::now_us();
            for (place, (name, start_us)) in waits.iter().enumerate() {
                let end_us = waits.get(place + 1).map_or(now, |(_, next)| *next);
                work.push(name, *start_us, (end_us - start_us).max(0));
            }
            state.write_for(work);
        }
        self.refresh_status(state);
        if kind != ProbeKind::Readiness {
            self.probes.wake_pod(&state.uid);
            state.wake.notify_one();
        }
    }

    pub fn allocatable(&self) -> crate::resources::ResourceList {
        let mut allocatable = self.machine.allocatable(
            self.config.max_pods,
            &self.config.reserved,
            &self.config.thresholds,
        );
        allocatable.extend(self.device_plugins.capacity().1);
        allocatable
    }

    pub fn node_facts(&self, pod_ips: &[String]) -> NodeFacts {
        let allocatable = self.allocatable();
        NodeFacts {
            host_ips: self.config.host_ips(),
            pod_ips: pod_ips.to_vec(),
            allocatable_cpu_milli: allocatable.get("cpu").map_or(0, milli_value),
            allocatable_memory: allocatable.get("memory").map_or(0, value),
            allocatable_ephemeral_storage: allocatable.get("ephemeral-storage").map_or(0, value),
            labels: self
                .node
                .list()
                .first()
                .map(|node| node.metadata.labels.clone().unwrap_or_default()),
        }
    }

    pub fn host_dns(&self) -> v1::DnsConfig {
        parse_resolv_conf(&std::fs::read_to_string(&self.config.resolv_conf).unwrap_or_default())
    }

    pub async fn runtime_handler(&self, pod: &Pod) -> Result<String, String> {
        let class = pod
            .spec
            .as_ref()
            .and_then(|s| s.runtime_class_name.as_deref())
            .unwrap_or_default();
        if class.is_empty() {
            return Ok(String::new());
        }
        let api: Api<RuntimeClass> = Api::all(self.client.clone());
        match api.get_opt(class).await {
            Ok(Some(found)) => Ok(found.handler),
            Ok(None) => Err(format!("RuntimeClass {class:?} not found")),
            Err(error) => Err(format!(
                "failed to get RuntimeClass {class:?}: {}",
                error_message(&error)
            )),
        }
    }
}
