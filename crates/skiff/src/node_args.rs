//! The flags of a machine that is to be a node, by the kubelet's names: of `up`, `server` and `join`.

mod values;

use anyhow::{Context, Result, anyhow, bail};
use clap::Args;
use k8s_openapi::api::core::v1::Taint;
use serde::{Deserialize, Serialize};
use skiff_node::{ImageLimits, KubeletConfiguration, NodeConfig, ThresholdFlags, Thresholds};
use std::net::IpAddr;
use std::path::PathBuf;
use std::time::Duration;
use values::{
    amount_of_time, duration, go_time, header, label, manifest_url, node_ip, option, reserved,
    reserved_memory, signed_time, size, taint,
};

#[derive(Debug, Clone, Default, PartialEq, Args, Serialize, Deserialize)]
#[command(next_help_heading = "Node")]
#[serde(rename_all = "camelCase")]
pub struct NodeArgs {
    /// Name of this node [default: the host name]
    #[arg(long, value_name = "NAME", value_parser = crate::cli::node_name)]
    pub hostname_override: Option<String>,
    /// Address that others reach this node by [default: that of the default route]
    #[arg(long, value_name = "IP", value_parser = node_ip)]
    pub node_ip: Option<IpAddr>,
    /// Labels of the node when it registers
    #[arg(long, value_name = "KEY=VALUE", value_delimiter = ',', value_parser = label)]
    pub node_labels: Vec<(String, String)>,
    /// Taints of the node when it registers
    #[arg(long, value_name = "KEY=VALUE:EFFECT", value_delimiter = ',', value_parser = taint)]
    pub register_with_taints: Vec<Taint>,
    /// Addresses of the DNS servers that pods ask [default: cluster DNS, the tenth address of the service network]
    #[arg(long, value_name = "IP,...", value_delimiter = ',')]
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub cluster_dns: Vec<IpAddr>,
    /// Run containers by this CRI runtime instead of the embedded one
    #[arg(long, value_name = "unix://PATH", value_parser = crate::cli::unix_socket)]
    pub container_runtime_endpoint: Option<String>,
    /// Where such a runtime looks for CNI configurations [default: what it says, or /etc/cni/net.d]
    #[arg(long, value_name = "DIR", requires = "container_runtime_endpoint")]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cni_conf_dir: Option<PathBuf>,
    /// Where such a runtime looks for CNI plugins [default: what it says, or /opt/cni/bin]
    #[arg(long, value_name = "DIR", requires = "container_runtime_endpoint")]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cni_bin_dir: Option<PathBuf>,
    /// Folders with the configuration of registries, <host>/hosts.toml, as containerd's config_path; of the embedded runtime
    /// [default: /etc/containerd/certs.d:/etc/docker/certs.d]
    #[arg(long, value_name = "DIR:...", value_delimiter = ':', value_parser = crate::cli::file, conflicts_with = "container_runtime_endpoint")]
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub registry_config_path: Vec<PathBuf>,
    /// The kubelet's files: volumes, plugins. Charts of storage drivers expect /var/lib/kubelet [default: kubelet in the data
    /// directory]
    #[arg(long, value_name = "DIR")]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub root_dir: Option<PathBuf>,
    /// Sysctls that pods may set besides the safe ones; a name may end in *
    #[arg(long, value_name = "SYSCTL", value_delimiter = ',', value_parser = crate::cli::sysctl)]
    pub allowed_unsafe_sysctls: Vec<String>,
    /// KubeletConfiguration of this node; flags go before it
    #[arg(long, value_name = "FILE", value_parser = crate::cli::file)]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kubelet_config: Option<PathBuf>,
    /// Folder with more of them, in files that end in .conf: merged over --kubelet-config in the order of their names
    #[arg(long, value_name = "DIR", value_parser = crate::cli::file)]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub config_dir: Option<PathBuf>,
    /// The host's resolver configuration, for pods with the DNS policy Default [default: /etc/resolv.conf]
    #[arg(long, value_name = "FILE")]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub resolv_conf: Option<PathBuf>,
    /// Give containers that name no seccomp profile that of the runtime
    #[arg(long, value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub seccomp_default: Option<bool>,
    /// Identifier of this machine at its cloud, for the Node when it registers
    #[arg(long, value_name = "ID")]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub provider_id: Option<String>,
    /// Pull one image at a time
    #[arg(long, value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub serialize_image_pulls: Option<bool>,
    /// How old an unused image must be before it is removed [default: 2m]
    #[arg(long, value_name = "TIME", value_parser = amount_of_time)]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub minimum_image_ttl_duration: Option<Duration>,
    /// How often the volumes of pods are measured; negative: never [default: 1m]
    #[arg(long, value_name = "TIME", value_parser = signed_time, allow_hyphen_values = true)]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub volume_stats_agg_period: Option<String>,
    /// How often the manifests of --pod-manifest-path are looked at [default: 20s]
    #[arg(long, value_name = "TIME", value_parser = duration)]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub file_check_frequency: Option<Duration>,
    /// How often --manifest-url is asked [default: 20s]
    #[arg(long, value_name = "TIME", value_parser = duration)]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub http_check_frequency: Option<Duration>,
    /// Folder with manifests of static pods, or one manifest
    #[arg(long, value_name = "PATH", value_parser = crate::cli::file)]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pod_manifest_path: Option<PathBuf>,
    /// URL of manifests of static pods
    #[arg(long, value_name = "URL", value_parser = manifest_url)]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub manifest_url: Option<String>,
    /// Headers of the requests to --manifest-url
    #[arg(long, value_name = "NAME:VALUE", value_delimiter = ',', value_parser = header)]
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub manifest_url_header: Vec<(String, String)>,
    /// CredentialProviderConfig: a file or a folder
    #[arg(long, value_name = "PATH", value_parser = crate::cli::file, requires = "image_credential_provider_bin_dir")]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub image_credential_provider_config: Option<PathBuf>,
    /// Folder with the programs of credential providers
    #[arg(long, value_name = "DIR", value_parser = crate::cli::file, requires = "image_credential_provider_config")]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub image_credential_provider_bin_dir: Option<PathBuf>,
    /// Pods that this node takes at most [default: 110]
    #[arg(long, value_name = "COUNT")]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_pods: Option<u32>,
    /// Resources kept back from pods for Kubernetes: cpu, memory, ephemeral-storage, pid
    #[arg(long, value_name = "RESOURCE=AMOUNT,...", value_delimiter = ',', value_parser = reserved)]
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub kube_reserved: Vec<(String, String)>,
    /// Resources kept back from pods for the system
    #[arg(long, value_name = "RESOURCE=AMOUNT,...", value_delimiter = ',', value_parser = reserved)]
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub system_reserved: Vec<(String, String)>,
    /// CPUs kept back from pods by their numbers, instead of an amount of cpu: 0-1,4
    #[arg(long, value_name = "CPUS")]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reserved_cpus: Option<String>,
    /// Whether containers of Guaranteed pods that ask for whole CPUs get some for themselves: none or static [default: none]
    #[arg(long, value_name = "POLICY")]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cpu_manager_policy: Option<String>,
    /// Options of the static policy: full-pcpus-only, distribute-cpus-across-numa, strict-cpu-reservation,
    /// prefer-align-cpus-by-uncorecache
    #[arg(long, value_name = "OPTION=VALUE,...", value_delimiter = ',', value_parser = option)]
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub cpu_manager_policy_options: Vec<(String, String)>,
    /// How often the CPUs of running containers are set again [default: 10s]
    #[arg(long, value_name = "DURATION", value_parser = duration)]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cpu_manager_reconcile_period: Option<Duration>,
    /// Whether containers of Guaranteed pods get their memory from certain NUMA nodes: None or Static [default: None]
    #[arg(long, value_name = "POLICY")]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_manager_policy: Option<String>,
    /// Where the memory is that is kept back from pods, for --memory-manager-policy Static: 0:memory=1Gi
    #[arg(long, value_name = "NODE:RESOURCE=AMOUNT,...", value_parser = reserved_memory)]
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub reserved_memory: Vec<String>,
    /// Whether CPUs, memory and devices must come from the same NUMA nodes: none, best-effort, restricted or single-numa-node
    /// [default: none]
    #[arg(long, value_name = "POLICY")]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub topology_manager_policy: Option<String>,
    /// Of one container or of all in a pod: container or pod [default: container]
    #[arg(long, value_name = "SCOPE")]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub topology_manager_scope: Option<String>,
    /// Options of that policy: prefer-closest-numa-nodes, max-allowable-numa-nodes
    #[arg(long, value_name = "OPTION=VALUE,...", value_delimiter = ',', value_parser = option)]
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub topology_manager_policy_options: Vec<(String, String)>,
    /// Refuse to run a node while swap is on. Without it the node runs, and containers may not swap
    #[arg(long, value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fail_swap_on: Option<bool>,
    /// Size at which the log of a container is rotated [default: 10Mi]
    #[arg(long, value_name = "AMOUNT", value_parser = size)]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub container_log_max_size: Option<u64>,
    /// Files that are kept of the log of a container [default: 5]
    #[arg(long, value_name = "COUNT", value_parser = clap::value_parser!(u8).range(2..))]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub container_log_max_files: Option<u8>,
    /// Processes and threads that one pod may have; -1: as many as the machine allows
    #[arg(long, value_name = "COUNT", default_value_t = -1, allow_negative_numbers = true)]
    #[serde(default)]
    pub pod_max_pids: i64,
    /// Connections in the kernel's tracking that one pod may have; 0: any number [default: an eighth of all]
    #[arg(long, value_name = "COUNT")]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pod_connection_limit: Option<u32>,
    /// What the node must have left, or pods are evicted at once [default:
    /// memory.available<100Mi,nodefs.available<5%,nodefs.inodesFree<5%,imagefs.available<5%,imagefs.inodesFree<5%]
    #[arg(long, value_name = "SIGNAL<AMOUNT,...")]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub eviction_hard: Option<String>,
    /// What the node must have left, or pods are evicted after a while
    #[arg(long, value_name = "SIGNAL<AMOUNT,...")]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub eviction_soft: Option<String>,
    /// How long each of --eviction-soft must last
    #[arg(long, value_name = "SIGNAL=TIME,...")]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub eviction_soft_grace_period: Option<String>,
    /// How much more than a threshold there must be before its shortage is over
    #[arg(long, value_name = "SIGNAL=AMOUNT,...")]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub eviction_minimum_reclaim: Option<String>,
    /// How long a pressure condition stays after its cause [default: 5m]
    #[arg(long, value_name = "TIME")]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub eviction_pressure_transition_period: Option<String>,
    /// Seconds that a pod has at most to end when a threshold of --eviction-soft is met
    #[arg(long, value_name = "SECONDS", default_value_t = 0)]
    #[serde(default)]
    pub eviction_max_pod_grace_period: u32,
    /// Percent of the disk above which unused images are removed; 100: never [default: 85]
    #[arg(long, value_name = "PERCENT", value_parser = clap::value_parser!(u8).range(0..=100))]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub image_gc_high_threshold: Option<u8>,
    /// Percent of the disk down to which unused images are removed [default: 80]
    #[arg(long, value_name = "PERCENT", value_parser = clap::value_parser!(u8).range(0..=100))]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub image_gc_low_threshold: Option<u8>,
    /// How old a container that has ended must be before it is removed [default: 0s]
    #[arg(long, value_name = "TIME", value_parser = go_time)]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub minimum_container_ttl_duration: Option<String>,
    /// Old instances of one container that are kept; negative: all [default: 1]
    #[arg(long, value_name = "COUNT", allow_negative_numbers = true)]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub maximum_dead_containers_per_container: Option<i32>,
    /// Containers that have ended which the node keeps; negative: as many as there are [default: -1]
    #[arg(long, value_name = "COUNT", allow_negative_numbers = true)]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub maximum_dead_containers: Option<i32>,
}

impl NodeArgs {
    /// Refuses what cannot work: an address that is not this machine's, where nobody would find the kubelet, and
    /// thresholds that cannot be read.
    pub fn check(&self) -> Result<()> {
        let mut config = NodeConfig::new("", "", "");
        self.apply(&mut config)?;
        if config.swap.fail_on && skiff_node::is_swap_on().context("cannot determine if swap is on")? {
            bail!(
                "running with swap on is not supported, please disable swap or set --fail-swap-on flag to false \
                 (`swapoff -a` turns it off; with --fail-swap-on=false containers are kept out of swap)"
            );
        }
        if let Some(address) = self.node_ip
            && let Err(error) = std::net::UdpSocket::bind((address, 0))
        {
            bail!("this machine does not have the address {address} ({error}); choose another --node-ip");
        }
        Ok(())
    }

    /// Puts what the file and the flags say into the configuration of the node. Flags win, as upstream.
    pub fn apply(&self, config: &mut NodeConfig) -> Result<()> {
        let (file, folder) = (self.kubelet_config.as_deref(), self.config_dir.as_deref());
        if file.is_some() || folder.is_some() {
            let read = KubeletConfiguration::read(file, folder);
            let applied = read.and_then(|read| read.apply(config));
            applied.with_context(|| {
                let flags = [("--kubelet-config", file), ("--config-dir", folder)];
                let given = flags.iter().filter_map(|(flag, path)| Some((flag, (*path)?)));
                let given: Vec<String> = given
                    .map(|(flag, path)| format!("{flag} {}", path.display()))
                    .collect();
                given.join(" ")
            })?;
        }
        if !self.node_labels.is_empty() {
            config.node_labels.clone_from(&self.node_labels);
        }
        if !self.register_with_taints.is_empty() {
            config.register_taints.clone_from(&self.register_with_taints);
        }
        if self.pod_max_pids > 0 {
            config.pod_max_pids = Some(self.pod_max_pids);
        }
        if !self.allowed_unsafe_sysctls.is_empty() {
            config.allowed_sysctls = skiff_node::AllowedSysctls::with_unsafe(&self.allowed_unsafe_sysctls)
                .context("--allowed-unsafe-sysctls")?;
        }
        if let Some(path) = &self.pod_manifest_path {
            config.static_pods.path = Some(path.clone());
        }
        if let Some(url) = &self.manifest_url {
            config.static_pods.url = Some(url.clone());
        }
        if !self.manifest_url_header.is_empty() {
            config.static_pods.url_headers.clear();
        }
        for (name, value) in &self.manifest_url_header {
            skiff_node::add_manifest_header(&mut config.static_pods.url_headers, name, value)
                .map_err(|why| anyhow!("--manifest-url-header: {why}"))?;
        }
        config.max_pods = self.max_pods.unwrap_or(config.max_pods);
        let lists = [
            ("--kube-reserved", &self.kube_reserved),
            ("--system-reserved", &self.system_reserved),
        ];
        if lists.iter().any(|(_, list)| !list.is_empty()) {
            config.reserved = skiff_node::Reserved::default();
        }
        for (flag, list) in lists {
            for (resource, amount) in list {
                config.reserved.add(flag, resource, amount)?;
            }
        }
        self.apply_settings(config)?;
        self.apply_managers(config)?;
        if let Some(size) = self.container_log_max_size {
            config.container_log_max_size = size;
        }
        if let Some(files) = self.container_log_max_files {
            config.container_log_max_files = files.into();
        }
        if let (Some(file), Some(programs)) = (
            &self.image_credential_provider_config,
            &self.image_credential_provider_bin_dir,
        ) {
            skiff_node::CredentialProviders::load(file, programs)
                .context("--image-credential-provider-config")?;
            config.credential_providers = Some((file.clone(), programs.clone()));
        }
        if let Some(thresholds) = self.thresholds()? {
            config.thresholds = thresholds;
        }
        config.image_limits = self.image_limits(config.image_limits)?;
        let dead = &mut config.container_gc;
        if let Some(least) = &self.minimum_container_ttl_duration {
            dead.min_age = skiff_node::parse_go_duration(least).map_err(anyhow::Error::msg)?;
        }
        dead.max_per_container = self
            .maximum_dead_containers_per_container
            .unwrap_or(dead.max_per_container);
        dead.max_containers = self.maximum_dead_containers.unwrap_or(dead.max_containers);
        Ok(())
    }

    fn apply_settings(&self, config: &mut NodeConfig) -> Result<()> {
        config.swap.fail_on = self.fail_swap_on.unwrap_or(config.swap.fail_on);
        config.seccomp_default = self.seccomp_default.unwrap_or(config.seccomp_default);
        if let Some(path) = &self.resolv_conf {
            config.resolv_conf.clone_from(path);
        }
        if let Some(id) = &self.provider_id {
            config.provider_id.clone_from(id);
        }
        match self.serialize_image_pulls {
            Some(true) => config.max_parallel_image_pulls = 1,
            // As many as the file allows, or as upstream without a limit.
            Some(false) if config.max_parallel_image_pulls == 1 => {
                config.max_parallel_image_pulls = skiff_node::UNLIMITED_PULLS;
            }
            _ => {}
        }
        if let Some(least) = self.minimum_image_ttl_duration {
            config.image_limits.least_age = least;
        }
        if let Some(period) = &self.volume_stats_agg_period {
            // COMPAT: 0 is the default, and a negative period turns measuring off.
            config.volume_stats_agg_period = match period.strip_prefix('-') {
                Some(_) => Duration::ZERO,
                None => match skiff_node::parse_go_duration(period).map_err(anyhow::Error::msg)? {
                    Duration::ZERO => config.volume_stats_agg_period,
                    period => period,
                },
            };
        }
        let pods = &mut config.static_pods;
        pods.file_check_frequency = self.file_check_frequency.unwrap_or(pods.file_check_frequency);
        pods.http_check_frequency = self.http_check_frequency.unwrap_or(pods.http_check_frequency);
        Ok(())
    }

    fn apply_managers(&self, config: &mut NodeConfig) -> Result<()> {
        let reserved = self.reserved_memory.iter();
        let reserved: Result<Vec<_>, _> = reserved
            .map(|one| skiff_node::parse_reserved_memory(one))
            .collect();
        let flags = skiff_node::ManagerFlags {
            cpu_policy: self.cpu_manager_policy.clone(),
            cpu_options: self.cpu_manager_policy_options.iter().cloned().collect(),
            reconcile_period: self.cpu_manager_reconcile_period,
            reserved_cpus: self.reserved_cpus.clone(),
            memory_policy: self.memory_manager_policy.clone(),
            reserved_memory: reserved.context("--reserved-memory")?.concat(),
            topology_policy: self.topology_manager_policy.clone(),
            topology_scope: self.topology_manager_scope.clone(),
            topology_options: self.topology_manager_policy_options.iter().cloned().collect(),
        };
        let applied = flags
            .apply(&mut config.managers)
            .and_then(|()| config.managers.check());
        applied.map_err(|(field, why)| anyhow!("{}: {why}", flag_of(field)))
    }

    /// When the node is short of something; `None` if no flag says that.
    fn thresholds(&self) -> Result<Option<Thresholds>> {
        let flags = ThresholdFlags {
            hard: self.eviction_hard.clone(),
            soft: self.eviction_soft.clone(),
            soft_grace: self.eviction_soft_grace_period.clone(),
            minimum_reclaim: self.eviction_minimum_reclaim.clone(),
            transition: self.eviction_pressure_transition_period.clone(),
            max_pod_grace: self.eviction_max_pod_grace_period.into(),
        };
        if flags == ThresholdFlags::default() {
            return Ok(None);
        }
        Thresholds::parse(&flags).map(Some).map_err(anyhow::Error::msg)
    }

    /// When unused images are removed.
    fn image_limits(&self, default: ImageLimits) -> Result<ImageLimits> {
        let high = self.image_gc_high_threshold.unwrap_or(default.high);
        let low = self.image_gc_low_threshold.unwrap_or(default.low.min(high));
        if low > high {
            bail!("--image-gc-low-threshold {low} is above --image-gc-high-threshold {high}");
        }
        Ok(ImageLimits { high, low, ..default })
    }

    /// The name of this node: the flag's, or the machine's.
    pub fn node_name(&self) -> Result<String> {
        if let Some(name) = &self.hostname_override {
            return Ok(name.clone());
        }
        let name = rustix::system::uname()
            .nodename()
            .to_string_lossy()
            .to_lowercase();
        if name.is_empty() || name == "(none)" {
            bail!(
                "this machine has no host name; set one, or choose a node name with --hostname-override NAME"
            );
        }
        match crate::cli::node_name(&name) {
            Ok(name) => Ok(name),
            Err(why) => bail!(
                "the host name {name:?} is no name of a node ({why}); choose one with --hostname-override NAME"
            ),
        }
    }
}

/// The flag of a field of the configuration that the managers read.
fn flag_of(field: &str) -> String {
    if field == "reservedSystemCPUs" {
        return "--reserved-cpus".to_owned();
    }
    let mut flag = "--".to_owned();
    for letter in field.chars() {
        if letter.is_ascii_uppercase() {
            flag.push('-');
        }
        flag.push(letter.to_ascii_lowercase());
    }
    flag
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flags_go_before_the_file() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("kubelet.yaml");
        let text = "apiVersion: kubelet.config.k8s.io/v1beta1\nkind: KubeletConfiguration\nmaxPods: 7\n\
            staticPodPath: /a\nkubeReserved: {cpu: 100m}\npodPidsLimit: 5\n";
        std::fs::write(&path, text).unwrap();
        let mut args = NodeArgs {
            kubelet_config: Some(path.clone()),
            ..NodeArgs::default()
        };
        let applied = |args: &NodeArgs| {
            let mut config = NodeConfig::new("n", "d", "e");
            args.apply(&mut config).map(|()| config)
        };
        let config = applied(&args).unwrap();
        assert_eq!((config.max_pods, config.reserved.cpu_milli), (7, 100));
        assert_eq!(config.static_pods.path, Some("/a".into()));
        assert_eq!(config.pod_max_pids, Some(5));
        args.max_pods = Some(9);
        args.kube_reserved = vec![reserved("cpu=300m").unwrap()];
        args.manifest_url_header = vec![header("Metadata-Flavor: Google").unwrap()];
        let config = applied(&args).unwrap();
        assert_eq!((config.max_pods, config.reserved.cpu_milli), (9, 300));
        assert_eq!(config.static_pods.url_headers["metadata-flavor"], "Google");
        std::fs::write(&path, text.replace("maxPods", "maxCats")).unwrap();
        let error = format!("{:#}", applied(&args).err().unwrap());
        assert!(
            error.ends_with("strict decoding error: unknown field \"maxCats\""),
            "{error}"
        );
    }

    #[test]
    fn what_the_file_can_say_flags_can() {
        let dir = tempfile::tempdir().unwrap();
        let head = "apiVersion: kubelet.config.k8s.io/v1beta1\nkind: KubeletConfiguration\n";
        let text = "maxPods: 5\nseccompDefault: true\nfailSwapOn: true\nmaxParallelImagePulls: 3\n";
        std::fs::write(dir.path().join("1.conf"), head.to_owned() + text).unwrap();
        std::fs::write(dir.path().join("2.conf"), head.to_owned() + "maxPods: 6\n").unwrap();
        let mut args = NodeArgs {
            config_dir: Some(dir.path().to_owned()),
            ..NodeArgs::default()
        };
        let applied = |args: &NodeArgs| {
            let mut config = NodeConfig::new("n", "d", "e");
            args.apply(&mut config).map(|()| config)
        };
        let config = applied(&args).unwrap();
        assert_eq!((config.max_pods, config.max_parallel_image_pulls), (6, 3));
        assert!(config.seccomp_default && config.swap.fail_on);
        args.seccomp_default = Some(false);
        args.fail_swap_on = Some(false);
        args.serialize_image_pulls = Some(true);
        args.resolv_conf = Some("/r".into());
        args.provider_id = Some("cloud://1".to_owned());
        args.minimum_image_ttl_duration = Some(Duration::from_secs(7));
        args.volume_stats_agg_period = Some("-1s".to_owned());
        args.file_check_frequency = Some(Duration::from_secs(8));
        args.http_check_frequency = Some(Duration::from_secs(9));
        let config = applied(&args).unwrap();
        assert!(!config.seccomp_default && !config.swap.fail_on);
        assert_eq!(
            (config.max_parallel_image_pulls, config.provider_id.as_str()),
            (1, "cloud://1")
        );
        assert_eq!(config.resolv_conf, PathBuf::from("/r"));
        assert_eq!(config.image_limits.least_age, Duration::from_secs(7));
        assert_eq!(config.volume_stats_agg_period, Duration::ZERO);
        let pods = &config.static_pods;
        assert_eq!(
            (pods.file_check_frequency, pods.http_check_frequency),
            (Duration::from_secs(8), Duration::from_secs(9))
        );
        std::fs::write(dir.path().join("3.conf"), "maxPods: 6\n").unwrap();
        let error = format!("{:#}", applied(&args).err().unwrap());
        assert!(
            error.starts_with("--config-dir ") && error.contains("3.conf: no kind"),
            "{error}"
        );
    }

    /// A machine with swap on runs, and containers do not swap.
    #[test]
    fn swap_by_default() {
        let mut config = NodeConfig::new("n", "d", "e");
        NodeArgs::default().apply(&mut config).unwrap();
        assert_eq!(config.swap, skiff_node::SwapConfig::default());
        assert_eq!(config.swap.behavior, skiff_node::SwapBehavior::NoSwap);
        assert!(!config.swap.fail_on);
    }

    #[test]
    fn policies_of_managers() {
        let applied = |args: &NodeArgs| {
            let mut config = NodeConfig::new("n", "d", "e");
            let applied = args.apply(&mut config);
            applied
                .map(|()| config.managers)
                .map_err(|error| error.to_string())
        };
        let text = |text: &str| Some(text.to_owned());
        let args = NodeArgs {
            cpu_manager_policy: text("static"),
            cpu_manager_policy_options: vec![option("strict-cpu-reservation=true").unwrap()],
            reserved_cpus: text("0,3"),
            reserved_memory: vec![reserved_memory("0:memory=1Gi;1:memory=2Gi").unwrap()],
            ..NodeArgs::default()
        };
        let managers = applied(&args).unwrap();
        assert_eq!(
            (managers.reserved_cpus.len(), managers.reserved_memory.len()),
            (2, 2)
        );
        let wrong = |change: fn(&mut NodeArgs)| {
            let mut args = args.clone();
            change(&mut args);
            applied(&args).unwrap_err()
        };
        assert_eq!(
            wrong(|args| args.cpu_manager_policy = Some("dynamic".to_owned())),
            "--cpu-manager-policy: unknown policy: \"dynamic\""
        );
        assert_eq!(
            wrong(|args| args.reserved_cpus = Some("3-1".to_owned())),
            "--reserved-cpus: invalid range \"3-1\""
        );
        assert_eq!(
            wrong(|args| args.cpu_manager_policy_options = vec![option("align-by-socket=true").unwrap()]),
            "--cpu-manager-policy-options: CPU Manager Policy Alpha-level Options not enabled, but option \"align-by-socket\" provided"
        );
        assert_eq!(
            wrong(|args| args.cpu_manager_policy = None),
            "--cpu-manager-policy-options: None policy: received unsupported options"
        );
        assert!(reserved_memory("0=1Gi").is_err() && duration("0s").is_err());
    }
}
