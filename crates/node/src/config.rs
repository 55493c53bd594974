//! What the wiring tells the node. Nothing here is a global name: several clusters share a machine.

use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::Taint;

use crate::configuration::Reserved;
use crate::container_gc::ContainerGcPolicy;
use crate::local_volumes::Folder;
use crate::node_shutdown::NodeShutdownConfig;
use crate::pressure::{ImageLimits, Thresholds};
use crate::pull_rate::PullRate;
use crate::pull_records::VerificationPolicy;
use crate::runtime_health::RuntimePatience;
use crate::static_pods::StaticPodConfig;
use crate::swap::SwapConfig;
use crate::sysctls::AllowedSysctls;
use crate::topology::ManagersConfig;

/// As many images at once as are wanted.
pub const UNLIMITED_PULLS: usize = tokio::sync::Semaphore::MAX_PERMITS;

/// Makes the CNI configuration list (JSON) for the node's pod CIDRs.
pub type CniConfig = Arc<dyn Fn(&[String]) -> String + Send + Sync>;

#[derive(Clone)]
pub struct NodeConfig {
    pub node_name: String,
    /// The first one is the primary address.
    pub node_ips: Vec<IpAddr>,
    /// The kubelet's root: `pods/<uid>/volumes/…`.
    pub data_dir: PathBuf,
    /// Pods' logs: `<log_dir>/<namespace>_<pod>_<uid>/<container>/<n>.log`.
    pub log_dir: PathBuf,
    /// `unix:///path`.
    pub runtime_endpoint: String,
    /// Of a call to it that should be quick.
    pub runtime_request_timeout: Duration,
    pub runtime_patience: RuntimePatience,
    /// The kubelet's HTTPS server; port 0 takes a free one, which the node then announces.
    pub server_bind: SocketAddr,
    /// Where `/healthz` is without TLS: the address, and the port, zero for none. Without one it is 10248 beside 10250, the
    /// port of the cluster of the default name, and none elsewhere.
    pub healthz_bind_address: IpAddr,
    pub healthz_port: Option<u16>,
    pub tls_cert_pem: Vec<u8>,
    pub tls_key_pem: Vec<u8>,
    /// Shown instead of these: a certificate that is renewed while the server runs. Until there is one, handshakes fail.
    pub tls_resolver: Option<Arc<dyn rustls::server::ResolvesServerCert>>,
    /// Client certificates of the HTTPS server are of this authority; clients without one bring a token.
    pub client_ca_pem: Vec<u8>,
    pub cluster_dns: Vec<IpAddr>,
    pub cluster_domain: String,
    /// The host's resolver file for pods with `dnsPolicy: Default`.
    pub resolv_conf: PathBuf,
    /// The cgroup all pods live below, as a path from the root of the hierarchy: `skiff-<name>`.
    pub cgroup_root: String,
    /// Off: pods get no cgroups of their own, and the runtime decides where they go.
    pub cgroups_per_qos: bool,
    /// Where the CNI configuration goes once the pod CIDR is known; `None` leaves that to others.
    pub cni_conf_dir: Option<PathBuf>,
    pub cni_config: Option<CniConfig>,
    /// Known before the API assigns one (a single node); else the node waits for `spec.podCIDR`.
    pub pod_cidrs: Vec<String>,
    /// How often the node's status is made anew, and how often it is written though nothing has changed.
    pub node_status_update_frequency: Duration,
    pub node_status_report_frequency: Duration,
    pub max_pods: u32,
    /// Not more pods than this for each CPU; zero: as many as `max_pods`.
    pub pods_per_core: u32,
    /// Processes and threads of one pod; `None` is as many as the machine allows.
    pub pod_max_pids: Option<i64>,
    /// How many images are pulled at once.
    pub max_parallel_image_pulls: usize,
    pub node_labels: Vec<(String, String)>,
    pub register_taints: Vec<Taint>,
    /// Reported as `kubeletVersion`.
    pub kubelet_version: String,
    /// Kept back from pods.
    pub reserved: Reserved,
    pub allowed_sysctls: AllowedSysctls,
    /// A container's log is rotated at this size, and this many files of it are kept.
    pub container_log_max_size: u64,
    pub container_log_max_files: usize,
    /// How often logs are looked at for that.
    pub container_log_monitor_interval: Duration,
    /// How often the volumes of a pod are measured; zero: never.
    pub volume_stats_agg_period: Duration,
    /// The longest pause before a container that keeps failing is started again.
    pub max_container_restart_period: Duration,
    /// When the node is short of memory, disk or processes.
    pub thresholds: Thresholds,
    /// When images that nobody uses are removed.
    pub image_limits: ImageLimits,
    /// How many containers that have ended are kept.
    pub container_gc: ContainerGcPolicy,
    /// How many ConfigMaps and Secrets are watched; more are fetched every minute. A connection to an API server elsewhere
    /// carries a hundred requests at a time, and other watches need it, too.
    pub max_watched_objects: usize,
    /// Where the directories of local volumes are; `None` has none.
    pub local_volumes: Option<PathBuf>,
    /// Which images pods must show credentials for.
    pub image_verification: VerificationPolicy,
    /// The configuration of credential providers, and the folder with their programs.
    pub credential_providers: Option<(PathBuf, PathBuf)>,
    /// Pods of manifests on this machine or behind a URL.
    pub static_pods: StaticPodConfig,
    /// How pods end when the machine shuts down.
    pub node_shutdown: NodeShutdownConfig,
    /// The policies of the CPU, memory and topology managers.
    pub managers: ManagersConfig,
    /// Containers that name no seccomp profile get the runtime's.
    pub seccomp_default: bool,
    /// Of the machine at its cloud, told when the node registers.
    pub provider_id: String,
    /// Whether limits of CPU are enforced.
    pub cpu_cfs_quota: bool,
    /// The node does not start if the kernel's settings are not those it counts on.
    pub protect_kernel_defaults: bool,
    pub pull_rate: PullRate,
    /// Exec, attach and port-forward end when nothing has passed for this long.
    pub streaming_idle_timeout: Option<Duration>,
    /// Where `client_ca_pem` was read, if not from the cluster.
    pub client_ca_file: Option<PathBuf>,
    /// Upstream's default is not to start with swap on. Here it is to start, as k3s does, and to keep containers out of swap.
    pub swap: SwapConfig,
}

impl NodeConfig {
    /// Upstream's defaults for everything that need not be said.
    pub fn new(
        node_name: impl Into<String>,
        data_dir: impl Into<PathBuf>,
        runtime_endpoint: impl Into<String>,
    ) -> Self {
        let data_dir = data_dir.into();
        NodeConfig {
            node_name: node_name.into(),
            node_ips: Vec::new(),
            log_dir: data_dir.join("logs"),
            data_dir,
            runtime_endpoint: runtime_endpoint.into(),
            runtime_request_timeout: Duration::from_secs(120),
            runtime_patience: RuntimePatience::default(),
            server_bind: SocketAddr::from(([0, 0, 0, 0], 0)),
            healthz_bind_address: IpAddr::from([127, 0, 0, 1]),
            healthz_port: None,
            tls_cert_pem: Vec::new(),
            tls_key_pem: Vec::new(),
            tls_resolver: None,
            client_ca_pem: Vec::new(),
            cluster_dns: Vec::new(),
            cluster_domain: "cluster.local".to_owned(),
            resolv_conf: PathBuf::from("/etc/resolv.conf"),
            cgroup_root: "skiff".to_owned(),
            cgroups_per_qos: true,
            cni_conf_dir: None,
            cni_config: None,
            pod_cidrs: Vec::new(),
            node_status_update_frequency: Duration::from_secs(10),
            node_status_report_frequency: Duration::from_secs(300),
            max_pods: 110,
            pods_per_core: 0,
            pod_max_pids: None,
            max_parallel_image_pulls: 4,
            node_labels: Vec::new(),
            register_taints: Vec::new(),
            kubelet_version: "v1.36.0".to_owned(),
            reserved: Reserved::default(),
            allowed_sysctls: AllowedSysctls::default(),
            container_log_max_size: 10 << 20,
            container_log_max_files: 5,
            container_log_monitor_interval: Duration::from_secs(10),
            volume_stats_agg_period: Duration::from_secs(60),
            max_container_restart_period: Duration::from_secs(300),
            thresholds: Thresholds::default(),
            image_limits: ImageLimits::default(),
            container_gc: ContainerGcPolicy::default(),
            max_watched_objects: 64,
            local_volumes: None,
            image_verification: VerificationPolicy::default(),
            credential_providers: None,
            static_pods: StaticPodConfig::default(),
            node_shutdown: NodeShutdownConfig::default(),
            managers: ManagersConfig::default(),
            seccomp_default: false,
            provider_id: String::new(),
            cpu_cfs_quota: true,
            protect_kernel_defaults: false,
            pull_rate: PullRate::default(),
            streaming_idle_timeout: Some(Duration::from_secs(4 * 3600)),
            client_ca_file: None,
            swap: SwapConfig::default(),
        }
    }

    /// COMPAT: a limit for each CPU only lowers how many pods the node takes.
    pub(crate) fn limit_pods_by_cpus(&mut self, cpus: i64) {
        let by_cpus = u32::try_from(cpus)
            .unwrap_or(u32::MAX)
            .saturating_mul(self.pods_per_core);
        if self.pods_per_core > 0 {
            self.max_pods = self.max_pods.min(by_cpus);
        }
    }

    pub(crate) fn healthz_address(&self) -> Option<SocketAddr> {
        let beside = if self.server_bind.port() == 10250 {
            10248
        } else {
            0
        };
        let port = self.healthz_port.unwrap_or(beside);
        (port != 0).then(|| SocketAddr::new(self.healthz_bind_address, port))
    }

    /// CPUs that are reserved by name replace the amount that is reserved.
    pub(crate) fn reserve_named_cpus(&mut self) {
        let named = self.managers.reserved_cpus.len();
        if named > 0 {
            self.reserved.cpu_milli = i64::try_from(named).unwrap_or(i64::MAX).saturating_mul(1000);
        }
    }

    pub(crate) fn volume_folder(&self) -> Option<Folder> {
        Some(Folder {
            root: self.local_volumes.clone()?,
            pods: self.data_dir.join("pods"),
        })
    }

    pub fn host_ips(&self) -> Vec<String> {
        self.node_ips.iter().map(IpAddr::to_string).collect()
    }
}
