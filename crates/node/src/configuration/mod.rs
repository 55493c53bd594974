//! The file of `--config`: a KubeletConfiguration of `kubelet.config.k8s.io/v1beta1`. Unknown fields are errors, as
//! upstream; known fields that this node does not act on ([`fixed`]) may only say what is so anyway.

mod effective;
mod files;
mod fixed;
mod settings;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use http::{HeaderMap, HeaderName, HeaderValue};
use k8s_openapi::api::core::v1::Taint;
use serde::Deserialize;
use serde_json::{Map, Value};
use skiff_meta::quantity::Quantity;

use crate::config::{NodeConfig, UNLIMITED_PULLS};
use crate::durations::{go_duration, parse_go_duration};
use crate::node_shutdown::{NodeShutdownConfig, ShutdownPeriod};
use crate::pressure::{ImageLimits, ThresholdFlags, Thresholds};
use crate::pull_records::VerificationPolicy;
use crate::sysctls::AllowedSysctls;
use crate::topology::ManagerFlags;

pub(crate) use effective::effective;

pub const API_VERSION: &str = "kubelet.config.k8s.io/v1beta1";
pub const KIND: &str = "KubeletConfiguration";
/// Larger files are none.
const MAX_FILE: u64 = 1 << 20;

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("cannot read {path}: {source}")]
    Read { path: PathBuf, source: std::io::Error },
    #[error("{path} has more than {MAX_FILE} bytes")]
    TooLarge { path: PathBuf },
    #[error("{path} has too many files")]
    TooMany { path: PathBuf },
    #[error("{path}: {why}")]
    In { path: PathBuf, why: Box<Error> },
    #[error("{0}")]
    Syntax(String),
    #[error(
        "no kind {kind:?} is registered for version {version:?}: a KubeletConfiguration of {API_VERSION} is expected"
    )]
    Kind { kind: String, version: String },
    #[error("strict decoding error: {0}")]
    Strict(String),
    #[error("{field}: {why}")]
    Field { field: String, why: String },
}

fn field(field: &str, why: impl ToString) -> Error {
    Error::Field {
        field: field.to_owned(),
        why: why.to_string(),
    }
}

/// The fields that this node acts on.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct KubeletConfiguration {
    pub static_pod_path: Option<PathBuf>,
    #[serde(rename = "staticPodURL")]
    pub static_pod_url: Option<String>,
    #[serde(rename = "staticPodURLHeader")]
    pub static_pod_url_header: BTreeMap<String, Vec<String>>,
    pub file_check_frequency: Option<String>,
    pub http_check_frequency: Option<String>,
    pub cluster_domain: Option<String>,
    #[serde(rename = "clusterDNS")]
    pub cluster_dns: Vec<std::net::IpAddr>,
    #[serde(rename = "imageMinimumGCAge")]
    pub image_minimum_gc_age: Option<String>,
    #[serde(rename = "imageMaximumGCAge")]
    pub image_maximum_gc_age: Option<String>,
    #[serde(rename = "imageGCHighThresholdPercent")]
    pub image_gc_high_threshold_percent: Option<u8>,
    #[serde(rename = "imageGCLowThresholdPercent")]
    pub image_gc_low_threshold_percent: Option<u8>,
    pub max_pods: Option<u32>,
    pub pod_pids_limit: Option<i64>,
    pub resolv_conf: Option<PathBuf>,
    pub serialize_image_pulls: Option<bool>,
    pub max_parallel_image_pulls: Option<usize>,
    pub eviction_hard: Option<BTreeMap<String, String>>,
    pub eviction_soft: Option<BTreeMap<String, String>>,
    pub eviction_soft_grace_period: Option<BTreeMap<String, String>>,
    pub eviction_minimum_reclaim: Option<BTreeMap<String, String>>,
    pub eviction_pressure_transition_period: Option<String>,
    pub eviction_max_pod_grace_period: i64,
    pub container_log_max_size: Option<String>,
    pub container_log_max_files: Option<usize>,
    pub container_log_monitor_interval: Option<String>,
    pub volume_stats_agg_period: Option<String>,
    pub kube_reserved: BTreeMap<String, String>,
    pub system_reserved: BTreeMap<String, String>,
    pub allowed_unsafe_sysctls: Vec<String>,
    pub register_with_taints: Vec<Taint>,
    pub crash_loop_back_off: CrashLoopBackOff,
    pub image_pull_credentials_verification_policy: Option<String>,
    pub preloaded_images_verification_allowlist: Vec<String>,
    pub shutdown_grace_period: Option<String>,
    pub shutdown_grace_period_critical_pods: Option<String>,
    pub shutdown_grace_period_by_pod_priority: Vec<ShutdownPeriod>,
    pub cpu_manager_policy: Option<String>,
    pub cpu_manager_policy_options: BTreeMap<String, String>,
    pub cpu_manager_reconcile_period: Option<String>,
    #[serde(rename = "reservedSystemCPUs")]
    pub reserved_system_cpus: Option<String>,
    pub memory_manager_policy: Option<String>,
    pub reserved_memory: Vec<MemoryReservation>,
    pub topology_manager_policy: Option<String>,
    pub topology_manager_scope: Option<String>,
    pub topology_manager_policy_options: BTreeMap<String, String>,
    pub fail_swap_on: Option<bool>,
    pub memory_swap: MemorySwap,
    pub seccomp_default: Option<bool>,
    #[serde(rename = "providerID")]
    pub provider_id: Option<String>,
    #[serde(rename = "cpuCFSQuota")]
    pub cpu_cfs_quota: Option<bool>,
    pub node_status_update_frequency: Option<String>,
    pub node_status_report_frequency: Option<String>,
    pub pods_per_core: Option<i32>,
    pub protect_kernel_defaults: Option<bool>,
    #[serde(rename = "registryPullQPS")]
    pub registry_pull_qps: Option<i32>,
    pub registry_burst: Option<i32>,
    pub runtime_request_timeout: Option<String>,
    pub streaming_connection_idle_timeout: Option<String>,
    /// `authentication.x509.clientCAFile`.
    #[serde(rename = "clientCAFile")]
    pub client_ca_file: Option<PathBuf>,
    pub healthz_bind_address: Option<std::net::IpAddr>,
    pub healthz_port: Option<u16>,
}

/// Of one NUMA node.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(rename_all = "camelCase", default, deny_unknown_fields)]
pub struct MemoryReservation {
    pub numa_node: u32,
    pub limits: BTreeMap<String, String>,
}

#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(rename_all = "camelCase", default, deny_unknown_fields)]
pub struct CrashLoopBackOff {
    pub max_container_restart_period: Option<String>,
}

#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(rename_all = "camelCase", default, deny_unknown_fields)]
pub struct MemorySwap {
    pub swap_behavior: Option<String>,
}

/// The same, by their names in the file.
const ACTED_ON: &[&str] = &[
    "staticPodPath",
    "staticPodURL",
    "staticPodURLHeader",
    "fileCheckFrequency",
    "httpCheckFrequency",
    "clusterDomain",
    "clusterDNS",
    "imageMinimumGCAge",
    "imageMaximumGCAge",
    "imageGCHighThresholdPercent",
    "imageGCLowThresholdPercent",
    "maxPods",
    "podPidsLimit",
    "resolvConf",
    "serializeImagePulls",
    "maxParallelImagePulls",
    "evictionHard",
    "evictionSoft",
    "evictionSoftGracePeriod",
    "evictionMinimumReclaim",
    "evictionPressureTransitionPeriod",
    "evictionMaxPodGracePeriod",
    "containerLogMaxSize",
    "containerLogMaxFiles",
    "containerLogMonitorInterval",
    "volumeStatsAggPeriod",
    "kubeReserved",
    "systemReserved",
    "allowedUnsafeSysctls",
    "registerWithTaints",
    "crashLoopBackOff",
    "imagePullCredentialsVerificationPolicy",
    "preloadedImagesVerificationAllowlist",
    "shutdownGracePeriod",
    "shutdownGracePeriodCriticalPods",
    "shutdownGracePeriodByPodPriority",
    "cpuManagerPolicy",
    "cpuManagerPolicyOptions",
    "cpuManagerReconcilePeriod",
    "reservedSystemCPUs",
    "memoryManagerPolicy",
    "reservedMemory",
    "topologyManagerPolicy",
    "topologyManagerScope",
    "topologyManagerPolicyOptions",
    "failSwapOn",
    "memorySwap",
    "seccompDefault",
    "providerID",
    "cpuCFSQuota",
    "nodeStatusUpdateFrequency",
    "nodeStatusReportFrequency",
    "podsPerCore",
    "protectKernelDefaults",
    "registryPullQPS",
    "registryBurst",
    "runtimeRequestTimeout",
    "streamingConnectionIdleTimeout",
    "healthzBindAddress",
    "healthzPort",
];

/// Of the authentication, what the node acts on; the rest is fixed.
const CLIENT_CA: &str = "clientCAFile";

fn take_client_ca(authentication: &mut Value) -> Option<Value> {
    authentication.get_mut("x509")?.as_object_mut()?.remove(CLIENT_CA)
}

impl KubeletConfiguration {
    /// The fields of all files, without their kinds.
    fn from_fields(all: Map<String, Value>) -> Result<Self, Error> {
        let mut strict = Vec::new();
        let mut acted_on = Map::new();
        for (name, mut value) in all {
            if name == "authentication"
                && let Some(path) = take_client_ca(&mut value)
            {
                acted_on.insert(CLIENT_CA.to_owned(), path);
            }
            if value.is_null() {
                continue;
            }
            if ACTED_ON.contains(&name.as_str()) {
                acted_on.insert(name, value);
            } else if !fixed::is_known(&name) {
                strict.push(format!("unknown field {name:?}"));
            } else if let Some(why) = fixed::refused(&name, &value) {
                return Err(field(&name, why));
            }
        }
        if !strict.is_empty() {
            return Err(Error::Strict(strict.join(", ")));
        }
        serde_json::from_value(Value::Object(acted_on)).map_err(|error| Error::Strict(error.to_string()))
    }

    /// Puts what the file says into the configuration of the node.
    pub fn apply(&self, config: &mut NodeConfig) -> Result<(), Error> {
        self.apply_static_pods(config)?;
        if let Some(domain) = &self.cluster_domain {
            config.cluster_domain.clone_from(domain);
        }
        if !self.cluster_dns.is_empty() {
            config.cluster_dns.clone_from(&self.cluster_dns);
        }
        config.max_pods = self.max_pods.unwrap_or(config.max_pods);
        if let Some(limit) = self.pod_pids_limit {
            config.pod_max_pids = Some(limit).filter(|limit| *limit > 0);
        }
        if let Some(path) = &self.resolv_conf {
            config.resolv_conf.clone_from(path);
        }
        match (self.serialize_image_pulls, self.max_parallel_image_pulls) {
            (_, Some(0)) => return Err(field("maxParallelImagePulls", "must be a positive number")),
            (Some(true), Some(limit)) if limit > 1 => {
                let why = "cannot be larger than 1 unless serializeImagePulls is set to false";
                return Err(field("maxParallelImagePulls", why));
            }
            (_, Some(limit)) => config.max_parallel_image_pulls = limit,
            (Some(true), None) => config.max_parallel_image_pulls = 1,
            (Some(false), None) => config.max_parallel_image_pulls = UNLIMITED_PULLS,
            (None, None) => {}
        }
        if let Some(size) = &self.container_log_max_size {
            let bytes = quantity("containerLogMaxSize", size)?;
            config.container_log_max_size = u64::try_from(bytes).unwrap_or(0);
        }
        if let Some(files) = self.container_log_max_files {
            if files < 2 {
                return Err(field("containerLogMaxFiles", "must be greater than 1"));
            }
            config.container_log_max_files = files;
        }
        if let Some(interval) = positive(
            "containerLogMonitorInterval",
            self.container_log_monitor_interval.as_ref(),
        )? {
            if interval < Duration::from_secs(3) {
                return Err(field("containerLogMonitorInterval", "must be at least 3s"));
            }
            config.container_log_monitor_interval = interval;
        }
        // COMPAT: 0 is the default, and a negative period turns measuring off.
        match &self.volume_stats_agg_period {
            Some(text) if text.starts_with('-') => {
                positive("volumeStatsAggPeriod", Some(&text[1..].to_owned()))?;
                config.volume_stats_agg_period = Duration::ZERO;
            }
            period => {
                if let Some(period) = positive("volumeStatsAggPeriod", period.as_ref())? {
                    config.volume_stats_agg_period = period;
                }
            }
        }
        let longest = &self.crash_loop_back_off.max_container_restart_period;
        if let Some(longest) = positive("crashLoopBackOff.maxContainerRestartPeriod", longest.as_ref())? {
            if longest < Duration::from_secs(1) || longest > Duration::from_secs(300) {
                let why = "must be between 1s and 300s";
                return Err(field("crashLoopBackOff.maxContainerRestartPeriod", why));
            }
            config.max_container_restart_period = longest;
        }
        if !self.allowed_unsafe_sysctls.is_empty() {
            config.allowed_sysctls = AllowedSysctls::with_unsafe(&self.allowed_unsafe_sysctls)
                .map_err(|why| field("allowedUnsafeSysctls", why))?;
        }
        if !self.register_with_taints.is_empty() {
            config.register_taints.clone_from(&self.register_with_taints);
        }
        for (name, list) in [
            ("kubeReserved", &self.kube_reserved),
            ("systemReserved", &self.system_reserved),
        ] {
            for (resource, amount) in list {
                config.reserved.add(name, resource, amount)?;
            }
        }
        self.apply_settings(config)?;
        self.apply_managers(config)?;
        self.apply_verification(config)?;
        self.apply_shutdown(config)?;
        self.apply_images(config)?;
        self.apply_thresholds(config)
    }

    fn apply_static_pods(&self, config: &mut NodeConfig) -> Result<(), Error> {
        let pods = &mut config.static_pods;
        pods.path = self
            .static_pod_path
            .clone()
            .filter(|path| !path.as_os_str().is_empty());
        pods.url = self.static_pod_url.clone().filter(|url| !url.is_empty());
        for (name, values) in &self.static_pod_url_header {
            for value in values {
                add_header(&mut pods.url_headers, name, value)
                    .map_err(|why| field("staticPodURLHeader", why))?;
            }
        }
        let frequency = positive("fileCheckFrequency", self.file_check_frequency.as_ref())?;
        pods.file_check_frequency = frequency.unwrap_or(pods.file_check_frequency);
        let frequency = positive("httpCheckFrequency", self.http_check_frequency.as_ref())?;
        pods.http_check_frequency = frequency.unwrap_or(pods.http_check_frequency);
        Ok(())
    }

    fn apply_managers(&self, config: &mut NodeConfig) -> Result<(), Error> {
        // An empty text is none, as upstream.
        let text = |text: &Option<String>| text.clone().filter(|text| !text.is_empty());
        let reserved = { self.reserved_memory.iter() }.flat_map(|one| {
            let limits = one.limits.iter();
            limits.map(|(resource, amount)| (one.numa_node, resource.clone(), amount.clone()))
        });
        let flags = ManagerFlags {
            cpu_policy: text(&self.cpu_manager_policy),
            cpu_options: self.cpu_manager_policy_options.clone(),
            reconcile_period: positive(
                "cpuManagerReconcilePeriod",
                self.cpu_manager_reconcile_period.as_ref(),
            )?,
            reserved_cpus: text(&self.reserved_system_cpus),
            memory_policy: text(&self.memory_manager_policy),
            reserved_memory: reserved.collect(),
            topology_policy: text(&self.topology_manager_policy),
            topology_scope: text(&self.topology_manager_scope),
            topology_options: self.topology_manager_policy_options.clone(),
        };
        let applied = flags.apply(&mut config.managers);
        applied.map_err(|(name, why)| field(name, why))
    }

    fn apply_verification(&self, config: &mut NodeConfig) -> Result<(), Error> {
        let list = &self.preloaded_images_verification_allowlist;
        let policy = self.image_pull_credentials_verification_policy.as_deref();
        config.image_verification = match policy.unwrap_or_default() {
            "NeverVerifyAllowlistedImages" => VerificationPolicy::AllBut(list.clone()),
            _ if !list.is_empty() => {
                let why = "can only be set with the policy NeverVerifyAllowlistedImages";
                return Err(field("preloadedImagesVerificationAllowlist", why));
            }
            "" | "NeverVerifyPreloadedImages" => VerificationPolicy::Pulled,
            "NeverVerify" => VerificationPolicy::Never,
            "AlwaysVerify" => VerificationPolicy::All,
            other => {
                let why = format!("unknown policy {other:?}");
                return Err(field("imagePullCredentialsVerificationPolicy", why));
            }
        };
        Ok(())
    }

    fn apply_shutdown(&self, config: &mut NodeConfig) -> Result<(), Error> {
        let of = |name: &str, text: Option<&String>| -> Result<Duration, Error> {
            let time = positive(name, text)?.unwrap_or_default();
            if !time.is_zero() && time < Duration::from_secs(1) {
                return Err(field(name, "must be either zero or otherwise >= 1 sec"));
            }
            Ok(time)
        };
        let whole = of("shutdownGracePeriod", self.shutdown_grace_period.as_ref())?;
        let critical = of(
            "shutdownGracePeriodCriticalPods",
            self.shutdown_grace_period_critical_pods.as_ref(),
        )?;
        if critical > whole {
            let why = format!(
                "{} must be <= shutdownGracePeriod {}",
                go_duration(critical),
                go_duration(whole)
            );
            return Err(field("shutdownGracePeriodCriticalPods", why));
        }
        let mut periods = self.shutdown_grace_period_by_pod_priority.clone();
        if periods.is_empty() {
            periods = NodeShutdownConfig::two_groups(whole, critical);
        } else if !whole.is_zero() {
            let why = "cannot be specified together with shutdownGracePeriod";
            return Err(field("shutdownGracePeriodByPodPriority", why));
        }
        if periods.iter().any(|one| one.shutdown_grace_period_seconds < 0) {
            let why = "shutdownGracePeriodSeconds must not be negative";
            return Err(field("shutdownGracePeriodByPodPriority", why));
        }
        periods.sort_by_key(|one| one.priority);
        config.node_shutdown.periods = periods;
        Ok(())
    }

    fn apply_images(&self, config: &mut NodeConfig) -> Result<(), Error> {
        let limits: &mut ImageLimits = &mut config.image_limits;
        limits.high = self.image_gc_high_threshold_percent.unwrap_or(limits.high);
        limits.low = self.image_gc_low_threshold_percent.unwrap_or(limits.low);
        if limits.high > 100 {
            return Err(field("imageGCHighThresholdPercent", "must be between 0 and 100"));
        }
        if limits.low >= limits.high {
            let why = "must be less than imageGCHighThresholdPercent";
            return Err(field("imageGCLowThresholdPercent", why));
        }
        let least = positive("imageMinimumGCAge", self.image_minimum_gc_age.as_ref())?;
        limits.least_age = least.unwrap_or(limits.least_age);
        if let Some(most) = positive("imageMaximumGCAge", self.image_maximum_gc_age.as_ref())? {
            if most <= limits.least_age {
                return Err(field(
                    "imageMaximumGCAge",
                    "must be greater than imageMinimumGCAge",
                ));
            }
            limits.most_age = Some(most);
        }
        Ok(())
    }

    fn apply_thresholds(&self, config: &mut NodeConfig) -> Result<(), Error> {
        let list = |map: &Option<BTreeMap<String, String>>, between: char| {
            let map = map.as_ref()?;
            let pairs: Vec<String> = map
                .iter()
                .map(|(signal, amount)| format!("{signal}{between}{amount}"))
                .collect();
            Some(pairs.join(","))
        };
        let flags = ThresholdFlags {
            hard: list(&self.eviction_hard, '<'),
            soft: list(&self.eviction_soft, '<'),
            soft_grace: list(&self.eviction_soft_grace_period, '='),
            minimum_reclaim: list(&self.eviction_minimum_reclaim, '='),
            transition: self.eviction_pressure_transition_period.clone(),
            max_pod_grace: self.eviction_max_pod_grace_period,
        };
        if flags != ThresholdFlags::default() {
            config.thresholds = Thresholds::parse(&flags).map_err(|why| field("eviction", why))?;
        }
        Ok(())
    }
}

/// A header of the requests for static pods.
pub fn add_header(headers: &mut HeaderMap, name: &str, value: &str) -> Result<(), String> {
    let wrong = |_| format!("{name:?} is no header of HTTP");
    let parsed = HeaderName::try_from(name).map_err(|error| wrong(error.to_string()))?;
    let value = HeaderValue::try_from(value).map_err(|error| wrong(error.to_string()))?;
    headers.append(parsed, value);
    Ok(())
}

/// A duration that says something: zero is the default.
fn positive(name: &str, text: Option<&String>) -> Result<Option<Duration>, Error> {
    let Some(text) = text else { return Ok(None) };
    let parsed = parse_go_duration(text).map_err(|why| field(name, why))?;
    Ok((!parsed.is_zero()).then_some(parsed))
}

fn quantity(name: &str, text: &str) -> Result<i64, Error> {
    let wrong = || field(name, format!("{text:?} is no quantity"));
    let parsed = Quantity::parse(text).map_err(|_| wrong())?;
    Ok(parsed.value())
}

/// What is kept back from pods.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Reserved {
    pub cpu_milli: i64,
    /// Bytes.
    pub memory: i64,
    pub ephemeral_storage: i64,
    pub pids: i64,
}

impl Reserved {
    /// Adds one entry of `--kube-reserved` or `--system-reserved`.
    pub fn add(&mut self, of: &str, resource: &str, amount: &str) -> Result<(), Error> {
        let wrong = |why: &str| field(of, format!("{resource}={amount}: {why}"));
        let parsed = Quantity::parse(amount).map_err(|_| wrong("no quantity"))?;
        if parsed.value() < 0 {
            return Err(wrong("must not be negative"));
        }
        let (sum, more) = match resource {
            "cpu" => (&mut self.cpu_milli, parsed.milli_value()),
            "memory" => (&mut self.memory, parsed.value()),
            "ephemeral-storage" => (&mut self.ephemeral_storage, parsed.value()),
            "pid" => (&mut self.pids, parsed.value()),
            _ => {
                return Err(wrong(
                    "only cpu, memory, ephemeral-storage and pid can be reserved",
                ));
            }
        };
        *sum = sum.saturating_add(more);
        Ok(())
    }
}

#[cfg(test)]
mod tests;
