//! The command line: one definition a flag. Flags that upstream has keep upstream's names.

use crate::access::{AccessArgs, duration};
use crate::api_args::ApiArgs;
use crate::backup::{BackupArgs, RestoreArgs};
use crate::bundle::CertificateKey;
use crate::cluster::{Cluster, DEFAULT_NAME};
use crate::controller_args::ControllerArgs;
use crate::encryption::EncryptionArgs;
use crate::etcd_args::EtcdArgs;
use crate::ingress_args::IngressArgs;
use crate::node_args::NodeArgs;
use crate::node_health_args::NodeHealthArgs;
use crate::server_state::ServerState;
use crate::stores::StoreArgs;
use crate::token::Token;
use clap::builder::TypedValueParser;
use clap::{Args, CommandFactory, Parser, Subcommand, ValueEnum};
use skiff_client::ServerAddress;
use std::net::{IpAddr, SocketAddr};
use std::ops::RangeInclusive;
use std::path::PathBuf;
use std::time::Duration;

/// Kubernetes in one binary: from `kubectl apply` to a running pod that serves traffic.
#[derive(Debug, Parser)]
#[command(name = "skiff", version = crate::VERSION)]
pub struct Cli {
    #[command(subcommand)]
    pub command: Command,
}

#[derive(Debug, Subcommand)]
pub enum Command {
    /// Start a cluster in the background and return when its node is Ready
    Up(Box<ServerArgs>),
    /// Run a cluster in the foreground
    Server(Box<ServerArgs>),
    /// Stop a cluster; its pods go on running until --delete
    Down(DownArgs),
    /// Restart the server of a cluster with its flags, such as after an upgrade; no connection to its ingress is refused
    Restart(ClusterArgs),
    /// Make this machine a node, or another server, of a cluster that runs elsewhere
    Join(Box<JoinArgs>),
    /// Take this machine out of its cluster: drain its node, delete it, and remove everything
    Leave(LeaveArgs),
    /// Create, list and delete the tokens that machines join with
    Token(TokenArgs),
    /// Print the roles that `skiff join` needs on a cluster whose API server is not skiff's: pipe it to kubectl apply -f -
    NodeRoles,
    /// Show components, memory and nodes
    Status(StatusArgs),
    /// List the clusters on this machine
    #[command(visible_alias = "ls")]
    List(ListArgs),
    /// Print the log of the cluster
    Logs(LogsArgs),
    /// Print the admin kubeconfig
    Kubeconfig(ClusterArgs),
    /// Show where the time of the last apply went
    Trace(TraceArgs),
    /// Find out what stops packets
    Net(NetArgs),
    /// Show when certificates expire, and renew them
    Certs(CertsArgs),
    /// Write all objects of a cluster, running or not, into one file
    Backup(BackupArgs),
    /// Make a cluster out of a backup
    Restore(RestoreArgs),
    /// Move a cluster to another store, or take one over from kubeadm or k3s
    Store(StoreArgs),
    /// Encrypt Secrets that are stored in plain text or with an old key
    Secrets(SecretsArgs),
    /// Simulate nodes whose pods run without a machine, to test at scale
    Sim(SimArgs),
    /// Import, pull, list and remove images of the embedded runtime
    Image(ImageArgs),
    /// Run the embedded runtime alone, for another kubelet or crictl
    Runtime(crate::runtime::RuntimeArgs),
    /// Serve HTTP and say which pod this is (the program of the demo image)
    Demo {
        #[arg(long, default_value_t = 8080)]
        port: u16,
    },
    /// Print the completion script of a shell, for example: source <(skiff completion bash)
    Completion { shell: clap_complete::Shell },
    /// Print the version
    Version,
}

#[derive(Debug, Clone, Args)]
pub struct ClusterArgs {
    /// Name of the cluster; clusters of different names run side by side
    #[arg(long, global = true, default_value = DEFAULT_NAME, env = "SKIFF_NAME")]
    pub name: String,
    /// Directory for all persistent state [default: /var/lib/skiff/NAME]
    #[arg(long, global = true)]
    pub data_dir: Option<PathBuf>,
}

#[derive(Debug, Clone, Args)]
pub struct ServerArgs {
    #[command(flatten)]
    pub cluster: ClusterArgs,
    /// Address of the API server [default: 0.0.0.0:6443]
    #[arg(long, value_name = "IP:PORT")]
    pub bind: Option<SocketAddr>,
    /// Address that pods and other machines reach the API server by [default: that of the default route]
    #[arg(long, value_name = "IP")]
    pub advertise_address: Option<IpAddr>,
    /// Address of the load balancer in front of several servers, which their certificates are for
    #[arg(long, value_name = "HOST:PORT")]
    pub control_plane_endpoint: Option<ServerAddress>,
    /// Components to run
    #[arg(long, value_enum, value_delimiter = ',', default_values_t = Component::ALL)]
    pub components: Vec<Component>,
    /// Controllers to run: '*' is all that are on by default, 'foo' adds one, '-foo' leaves one out
    #[arg(
        long,
        value_name = "LIST",
        value_delimiter = ',',
        allow_hyphen_values = true,
        default_values = ["*", "bootstrapsigner", "tokencleaner"],
        value_parser = controller
    )]
    pub controllers: Vec<String>,
    #[command(flatten)]
    pub apis: ApiArgs,
    /// Network of the pods, or one of each address family with a comma between [default: 10.244.0.0/16]
    #[arg(long, value_name = "CIDR")]
    pub cluster_cidr: Option<String>,
    /// How packets reach pods of other nodes: auto (routes on one link, else VXLAN), direct, vxlan, wireguard, or none
    /// for another CNI plugin
    #[arg(long, value_name = "MODE", value_parser = pod_network, default_value = "auto")]
    pub pod_network: PodNetworkMode,
    /// Prefix length of each node's part of the IPv4 pod network
    #[arg(long, value_name = "BITS", default_value_t = 24, value_parser = clap::value_parser!(u8).range(16..=28))]
    pub node_cidr_mask_size: u8,
    /// Network of the services, or one of each address family with a comma between [default: 10.96.0.0/12]
    #[arg(long, value_name = "CIDR")]
    pub service_cluster_ip_range: Option<String>,
    /// Ports of NodePort services
    #[arg(long, value_name = "FROM-TO", value_parser = port_range, default_value = "30000-32767")]
    pub service_node_port_range: RangeInclusive<u16>,
    /// Networks whose addresses of this machine node ports answer on [default: all addresses]
    #[arg(long, value_name = "CIDR,...", value_delimiter = ',')]
    pub nodeport_addresses: Vec<skiff_meta::net::Cidr>,
    /// Addresses for Services of type LoadBalancer, which nodes announce on their link: networks, or ranges such as
    /// 192.0.2.10-192.0.2.20 [default: the nodes' own addresses]
    #[arg(long, value_name = "CIDR|RANGE,...", value_delimiter = ',')]
    pub load_balancer_pool: Vec<skiff_network::load_balancer::Range>,
    /// Domain of the cluster's DNS names
    #[arg(long, value_name = "DOMAIN", value_parser = subdomain, default_value = "cluster.local")]
    pub cluster_domain: String,
    #[command(flatten)]
    pub etcd: EtcdArgs,
    /// KubeSchedulerConfiguration of the scheduler: profiles, plugins, back-off
    #[arg(long, value_name = "FILE", value_parser = file)]
    pub config: Option<PathBuf>,
    /// Audit policy file
    #[arg(long, value_name = "FILE", value_parser = file)]
    pub audit_policy_file: Option<PathBuf>,
    /// Audit log file; `-` is standard output
    #[arg(long, value_name = "FILE", value_parser = file, requires = "audit_policy_file")]
    pub audit_log_path: Option<PathBuf>,
    /// Days to keep old audit logs; 0: for ever
    #[arg(long, value_name = "DAYS", default_value_t = 366)]
    pub audit_log_maxage: u32,
    /// Old audit logs to keep; 0: all
    #[arg(long, value_name = "COUNT", default_value_t = 100)]
    pub audit_log_maxbackup: usize,
    /// Size at which the audit log is rotated, in megabytes; 0: never
    #[arg(long, value_name = "MEGABYTES", default_value_t = 100)]
    pub audit_log_maxsize: u64,
    /// Format of the audit log
    #[arg(long, value_name = "FORMAT", value_parser = ["json"], default_value = "json")]
    pub audit_log_format: String,
    /// Whether requests wait until their audit events are written
    #[arg(long, value_name = "MODE", value_parser = ["batch", "blocking", "blocking-strict"], default_value = "blocking")]
    pub audit_log_mode: String,
    /// Compress rotated audit logs
    #[arg(long)]
    pub audit_log_compress: bool,
    /// Kubeconfig of the webhook that audit events are sent to
    #[arg(long, value_name = "FILE", value_parser = file, requires = "audit_policy_file")]
    pub audit_webhook_config_file: Option<PathBuf>,
    /// Whether requests wait for the audit webhook
    #[arg(long, value_name = "MODE", value_parser = ["batch", "blocking", "blocking-strict"], default_value = "batch")]
    pub audit_webhook_mode: String,
    /// Time to wait before the first retry of a failed audit webhook call
    #[arg(long, value_name = "DURATION", value_parser = duration, default_value = "10s")]
    pub audit_webhook_initial_backoff: Duration,
    /// Number of events that are buffered for the audit webhook
    #[arg(long, value_name = "COUNT", default_value_t = 10_000)]
    pub audit_webhook_batch_buffer_size: usize,
    /// Maximum number of events in a batch to the audit webhook
    #[arg(long, value_name = "COUNT", default_value_t = 400)]
    pub audit_webhook_batch_max_size: usize,
    /// Maximum time to wait before a batch is sent
    #[arg(long, value_name = "DURATION", value_parser = duration, default_value = "30s")]
    pub audit_webhook_batch_max_wait: Duration,
    /// Throttle calls to the audit webhook
    #[arg(long, value_name = "BOOL", action = clap::ArgAction::Set, default_value_t = true, num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    pub audit_webhook_batch_throttle_enable: bool,
    /// Throttling: average calls per second to the audit webhook
    #[arg(long, value_name = "RATE", default_value_t = 10.0)]
    pub audit_webhook_batch_throttle_qps: f32,
    /// Throttling: calls allowed in a burst
    #[arg(long, value_name = "COUNT", default_value_t = 15)]
    pub audit_webhook_batch_throttle_burst: u32,
    #[command(flatten)]
    pub ingress: IngressArgs,
    #[command(flatten)]
    pub node: NodeArgs,
    #[command(flatten)]
    pub node_health: NodeHealthArgs,
    #[command(flatten)]
    pub controller_flags: ControllerArgs,
    #[command(flatten)]
    pub encryption: EncryptionArgs,
    #[command(flatten)]
    pub access: AccessArgs,
    /// Do not add a context to the user's kubeconfig
    #[arg(long)]
    pub no_kubeconfig_merge: bool,
    /// Report progress to a parent process on standard output
    #[arg(long, hide = true)]
    pub report_progress: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Component {
    Api,
    Controllers,
    Scheduler,
    Node,
    Proxy,
    Dns,
    Metrics,
    Ingress,
    LoadBalancer,
}

impl Component {
    pub const ALL: [Self; 9] = [
        Self::Api,
        Self::Controllers,
        Self::Scheduler,
        Self::Node,
        Self::Proxy,
        Self::Dns,
        Self::Metrics,
        Self::Ingress,
        Self::LoadBalancer,
    ];
}

impl std::fmt::Display for Component {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.to_possible_value().as_ref().map_or("", |v| v.get_name()))
    }
}

#[derive(Debug, Args)]
pub struct DownArgs {
    #[command(flatten)]
    pub cluster: ClusterArgs,
    /// Also remove pods, networks, mounts, cgroups and data
    #[arg(long)]
    pub delete: bool,
}

#[derive(Debug, Args)]
pub struct JoinArgs {
    /// Address of the API server, as `skiff token create` or `kubeadm token create --print-join-command` prints it
    #[arg(value_name = "URL")]
    pub server: ServerAddress,
    /// Bootstrap token
    #[arg(long, env = "SKIFF_TOKEN", hide_env_values = true)]
    pub token: Token,
    /// Hash of the public key of the cluster's certificate authority
    #[arg(long, visible_alias = "discovery-token-ca-cert-hash", value_name = "sha256:HEX", value_parser = ca_hash)]
    pub ca_hash: String,
    /// Join as another server: an API server with controllers and scheduler, and a node
    #[arg(long = "server", requires = "certificate_key")]
    pub as_server: bool,
    /// Key that opens the cluster's keys, as `skiff token create --server` prints it
    #[arg(
        long,
        value_name = "HEX",
        env = "SKIFF_CERTIFICATE_KEY",
        hide_env_values = true,
        requires = "as_server"
    )]
    pub certificate_key: Option<CertificateKey>,
    /// Address of the API server on this machine [default: 0.0.0.0 and the cluster's port]
    #[arg(long, value_name = "IP:PORT", requires = "as_server")]
    pub bind: Option<SocketAddr>,
    /// Address that pods and other machines reach this API server by [default: that of the default route]
    #[arg(long, value_name = "IP", requires = "as_server")]
    pub advertise_address: Option<IpAddr>,
    #[command(flatten)]
    pub cluster: ClusterArgs,
    #[command(flatten)]
    pub node: NodeArgs,
}

#[derive(Debug, Args)]
pub struct LeaveArgs {
    #[command(flatten)]
    pub cluster: ClusterArgs,
    /// Also evict pods that no controller makes again, and leave even if the cluster cannot be reached
    #[arg(long)]
    pub force: bool,
    /// How long evictions may take
    #[arg(long, value_name = "DURATION", value_parser = duration, default_value = "5m")]
    pub timeout: Duration,
}

#[derive(Debug, Args)]
pub struct TokenArgs {
    #[command(flatten)]
    pub cluster: ClusterArgs,
    #[command(subcommand)]
    pub command: TokenCommand,
}

#[derive(Debug, Subcommand)]
pub enum TokenCommand {
    /// Create a token and print the line to run on the machine that is to join
    Create {
        /// When the token expires; 0: never [default: 24h, with --server 2h]
        #[arg(long, value_name = "DURATION", value_parser = duration)]
        ttl: Option<Duration>,
        /// For another server: with it comes a key that opens the cluster's keys. Hand it out like a root password
        #[arg(long)]
        server: bool,
        /// Print the line of `kubeadm join`, for a machine with upstream's kubelet
        #[arg(long, conflicts_with = "server")]
        kubeadm: bool,
        /// What the token is for
        #[arg(long, default_value = "")]
        description: String,
    },
    /// List the tokens, without their secrets
    #[command(visible_alias = "ls")]
    List {
        #[arg(short, long, value_enum)]
        output: Option<Output>,
    },
    /// Delete tokens; machines that have joined stay
    Delete {
        #[arg(value_name = "ID", required = true)]
        tokens: Vec<String>,
    },
}

#[derive(Debug, Args)]
pub struct StatusArgs {
    #[command(flatten)]
    pub cluster: ClusterArgs,
    #[arg(short, long, value_enum)]
    pub output: Option<Output>,
}

#[derive(Debug, Args)]
pub struct ListArgs {
    #[arg(short, long, value_enum)]
    pub output: Option<Output>,
}

#[derive(Debug, Args)]
pub struct LogsArgs {
    #[command(flatten)]
    pub cluster: ClusterArgs,
    /// Follow the log
    #[arg(short, long)]
    pub follow: bool,
    /// Number of lines to show
    #[arg(short = 'n', long, visible_alias = "tail", default_value_t = 100)]
    pub lines: usize,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Output {
    Json,
}

#[derive(Debug, Args)]
pub struct TraceArgs {
    #[command(flatten)]
    pub cluster: ClusterArgs,
    /// For example deployment/web
    #[arg(value_name = "KIND/NAME")]
    pub object: String,
    #[arg(short, long, default_value = "default")]
    pub namespace: String,
    /// Which request about the object: 1 is the last, 2 the one before [default: the last one that had effects]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..).map(usize::from))]
    pub last: Option<usize>,
    #[arg(short, long, value_enum)]
    pub output: Option<Output>,
}

#[derive(Debug, Args)]
pub struct NetArgs {
    #[command(flatten)]
    pub cluster: ClusterArgs,
    #[command(subcommand)]
    pub command: NetCommand,
}

#[derive(Debug, Subcommand)]
pub enum NetCommand {
    /// Walk the way of a packet from a pod, and name what stops it. Exit code 0: nothing does, 3: something does, 4: some
    /// endpoints are not reached
    Check {
        /// pod/NAME or pod/NAMESPACE/NAME
        #[arg(value_name = "POD")]
        from: skiff_network::check::Source,
        /// service/NAME:PORT, pod/NAME:PORT, or a name or address outside of the cluster with a port
        #[arg(value_name = "TARGET")]
        to: skiff_network::check::Target,
        /// Namespace of what is named without one
        #[arg(short, long, default_value = "default")]
        namespace: String,
        #[arg(long, value_enum, default_value_t = NetProtocol::Tcp)]
        protocol: NetProtocol,
        #[arg(short, long, value_enum)]
        output: Option<Output>,
    },
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum NetProtocol {
    Tcp,
    Udp,
    Sctp,
}

impl From<NetProtocol> for skiff_network::proxy::Protocol {
    fn from(protocol: NetProtocol) -> Self {
        match protocol {
            NetProtocol::Tcp => Self::Tcp,
            NetProtocol::Udp => Self::Udp,
            NetProtocol::Sctp => Self::Sctp,
        }
    }
}

#[derive(Debug, Args)]
pub struct CertsArgs {
    #[command(flatten)]
    pub cluster: ClusterArgs,
    #[arg(short, long, value_enum)]
    pub output: Option<Output>,
    #[command(subcommand)]
    pub command: Option<CertsCommand>,
}

#[derive(Debug, Subcommand)]
pub enum CertsCommand {
    /// Renew certificates now; a running server reloads them without dropping connections
    Renew {
        /// Certificates to renew, such as admin or ca [default: all; CAs only if they are due]
        #[arg(value_name = "NAME")]
        names: Vec<String>,
    },
}

#[derive(Debug, Args)]
pub struct SecretsArgs {
    #[command(flatten)]
    pub cluster: ClusterArgs,
    #[command(subcommand)]
    pub command: SecretsCommand,
}

#[derive(Debug, Clone, Copy, Subcommand)]
pub enum SecretsCommand {
    /// Rewrite every Secret that is not encrypted with the current key
    Reencrypt,
}

#[derive(Debug, Args)]
pub struct SimArgs {
    #[command(flatten)]
    pub cluster: ClusterArgs,
    /// Another cluster than skiff's own: a kubeconfig file
    #[arg(long, global = true, value_name = "FILE")]
    pub kubeconfig: Option<PathBuf>,
    #[command(subcommand)]
    pub command: SimCommand,
}

#[derive(Debug, Clone, Subcommand)]
pub enum SimCommand {
    /// Create nodes and play their kubelets until interrupted
    Nodes {
        /// How many nodes of the usual shape
        #[arg(required_unless_present = "file", conflicts_with = "file")]
        count: Option<usize>,
        /// Shapes, zones and taints of nodes, and the stages of pods
        #[arg(short, long, value_name = "FILE")]
        file: Option<PathBuf>,
        /// How often a node renews its lease, in seconds
        #[arg(long, default_value_t = 10, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(1..=30))]
        lease_interval: u64,
    },
    /// Remove every simulated node, with the pods bound to it
    Remove,
}

#[derive(Debug, Args)]
pub struct ImageArgs {
    #[command(flatten)]
    pub cluster: ClusterArgs,
    #[command(subcommand)]
    pub command: ImageCommand,
}

#[derive(Debug, Subcommand)]
pub enum ImageCommand {
    /// Import an OCI or docker archive
    Import {
        archive: PathBuf,
        /// Of an image for several platforms, take this one [default: this machine's]
        #[arg(long, value_name = "OS/ARCH[/VARIANT]")]
        platform: Option<skiff_runtime::image::Platform>,
    },
    /// Take images out of a docker or podman on this machine
    Load {
        /// Names or ids that docker or podman knows
        #[arg(required = true)]
        images: Vec<String>,
        /// Its socket [default: where docker or podman listen usually]
        #[arg(long, value_name = "unix://PATH", value_parser = unix_socket)]
        host: Option<String>,
        /// Of an image for several platforms, take this one [default: this machine's]
        #[arg(long, value_name = "OS/ARCH[/VARIANT]")]
        platform: Option<skiff_runtime::image::Platform>,
    },
    /// Pull from a registry
    Pull {
        image: String,
        /// User and password for the registry
        #[arg(long, value_name = "USER:PASSWORD")]
        creds: Option<String>,
        /// Credentials in the form of docker's config.json: passwords, identity tokens, registry tokens
        #[arg(long, value_name = "FILE", conflicts_with = "creds")]
        authfile: Option<PathBuf>,
        /// Of an image for several platforms, take this one [default: this machine's]
        #[arg(long, value_name = "OS/ARCH[/VARIANT]")]
        platform: Option<skiff_runtime::image::Platform>,
        /// Folders with the configuration of registries, <host>/hosts.toml
        /// [default: /etc/containerd/certs.d:/etc/docker/certs.d]
        #[arg(long, value_name = "DIR:...", value_delimiter = ':')]
        registry_config_path: Vec<PathBuf>,
    },
    /// List images
    #[command(visible_alias = "ls")]
    List,
    /// Remove images
    Rm {
        #[arg(required = true)]
        images: Vec<String>,
    },
    /// Write the demo image as an OCI archive, for other runtimes
    SaveDemo { archive: PathBuf },
}

/// What a server that joined takes from its cluster, or from `skiff join`.
const SETTLED_BY_JOIN: [&str; 28] = [
    "advertise_address",
    "allowed_unsafe_sysctls",
    "cluster_domain",
    "cni_bin_dir",
    "cni_conf_dir",
    "container_runtime_endpoint",
    "etcd_prefix",
    "eviction_hard",
    "eviction_max_pod_grace_period",
    "eviction_minimum_reclaim",
    "eviction_pressure_transition_period",
    "eviction_soft",
    "eviction_soft_grace_period",
    "hostname_override",
    "image_gc_high_threshold",
    "image_gc_low_threshold",
    "maximum_dead_containers",
    "maximum_dead_containers_per_container",
    "minimum_container_ttl_duration",
    "node_cidr_mask_size",
    "node_ip",
    "node_labels",
    "pod_connection_limit",
    "pod_max_pids",
    "pod_network",
    "register_with_taints",
    "root_dir",
    "service_node_port_range",
];

/// A joined machine takes its settings from `skiff join`: flags of `up` and `server` about them would have no effect.
pub fn refuse_server_flags(
    cluster: &Cluster,
    arguments: impl IntoIterator<Item = std::ffi::OsString>,
) -> anyhow::Result<()> {
    if !cluster.agent && ServerState::joined(cluster)?.is_none() {
        return Ok(());
    }
    let matches = Cli::command().get_matches_from(arguments);
    let Some((command, flags)) = matches.subcommand() else {
        return Ok(());
    };
    let accepted = |id: &str| match cluster.agent {
        true => ["name", "data_dir", "report_progress"].contains(&id),
        false => !SETTLED_BY_JOIN.contains(&id),
    };
    let given = flags.ids().find(|id| {
        let by_user = flags.value_source(id.as_str()) == Some(clap::parser::ValueSource::CommandLine);
        // Groups have an id, too: the name of their type.
        let is_flag = id.as_str().starts_with(|first: char| first.is_ascii_lowercase());
        by_user && is_flag && !accepted(id.as_str())
    });
    if let Some(id) = given {
        let flag = id.as_str().replace('_', "-");
        if !cluster.agent {
            anyhow::bail!(
                "this server joined a cluster: `skiff {command}` takes no --{flag} here; it is the cluster's, or was given to `skiff join`"
            );
        }
        anyhow::bail!(
            "this machine is a node of another machine's cluster: `skiff {command}` takes no --{flag} here; flags of nodes are given to `skiff join`"
        );
    }
    Ok(())
}

/// The folder that `skiff up` was called in; its server has another.
pub const CALLED_IN: &str = "SKIFF_CALLED_IN";

/// A file of the caller's; `-` stays what it is.
pub fn file(text: &str) -> std::io::Result<PathBuf> {
    if text == "-" {
        return Ok(text.into());
    }
    let folder =
        std::env::var_os(CALLED_IN).map_or_else(std::env::current_dir, |folder| Ok(folder.into()))?;
    Ok(folder.join(text))
}

/// `None`: another CNI plugin makes the pod network.
pub type PodNetworkMode = Option<skiff_network::pods::Mode>;

/// The word for a mode, as the flag takes it.
pub fn pod_network_name(mode: PodNetworkMode) -> &'static str {
    use skiff_network::pods::Mode;
    match mode {
        None => "none",
        Some(Mode::Auto) => "auto",
        Some(Mode::Direct) => "direct",
        Some(Mode::Vxlan) => "vxlan",
        Some(Mode::WireGuard) => "wireguard",
    }
}

pub fn pod_network(text: &str) -> Result<PodNetworkMode, String> {
    match text {
        "none" => Ok(None),
        mode => mode.parse().map(Some),
    }
}

/// The kubelet takes a host name in lower case.
pub fn node_name(text: &str) -> Result<String, String> {
    subdomain(&text.trim().to_lowercase())
}

fn controller(text: &str) -> Result<String, String> {
    match skiff_controllers::ControllerSelection::parse(&[text]) {
        Ok(_) => Ok(text.to_owned()),
        Err(error) => Err(error.to_string()),
    }
}

fn ca_hash(text: &str) -> Result<String, &'static str> {
    let hex = text.strip_prefix("sha256:").unwrap_or_default();
    if hex.len() == 64 && hex.bytes().all(|byte| byte.is_ascii_hexdigit()) {
        return Ok(text.to_ascii_lowercase());
    }
    Err("write sha256: and 64 hexadecimal digits, as `skiff token create` prints them")
}

fn subdomain(text: &str) -> Result<String, String> {
    match skiff_meta::names::dns1123_subdomain(text).as_slice() {
        [] => Ok(text.to_owned()),
        [why, ..] => Err(why.clone()),
    }
}

fn port_range(text: &str) -> Result<RangeInclusive<u16>, &'static str> {
    let ports = text
        .split_once('-')
        .and_then(|(from, to)| Some(from.parse().ok()?..=to.parse().ok()?));
    ports
        .filter(|ports: &RangeInclusive<u16>| !ports.is_empty() && *ports.start() > 0)
        .ok_or("write FROM-TO, such as 30000-32767")
}

pub fn unix_socket(text: &str) -> Result<String, &'static str> {
    match text.strip_prefix("unix://") {
        Some(path) if path.starts_with('/') => Ok(text.to_owned()),
        _ => Err(
            "write unix:// and the absolute path of a socket, such as unix:///run/containerd/containerd.sock",
        ),
    }
}

/// A sysctl or a pattern of them that pods may be allowed to set.
pub fn sysctl(text: &str) -> Result<String, String> {
    let pattern = text.to_owned();
    match skiff_node::AllowedSysctls::with_unsafe(std::slice::from_ref(&pattern)) {
        Ok(_) => Ok(pattern),
        Err(error) => Err(error.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_definition_is_sound() {
        Cli::command().debug_assert();
    }

    #[test]
    fn controllers_are_a_list() {
        let parse = |list: &str| Cli::try_parse_from(["skiff", "server", "--controllers", list]);
        let Command::Server(args) = parse("*,-deployment,tokencleaner").unwrap().command else {
            panic!()
        };
        assert_eq!(args.controllers, ["*", "-deployment", "tokencleaner"]);
        let error = parse("*,foo").unwrap_err().to_string();
        assert!(
            error.contains("\"foo\" is not in the list of known controllers"),
            "{error}"
        );
    }

    #[test]
    fn components_are_a_list() {
        let cli = Cli::try_parse_from(["skiff", "server", "--components", "api,scheduler"]).unwrap();
        let Command::Server(args) = cli.command else {
            panic!("server")
        };
        assert_eq!(args.components, [Component::Api, Component::Scheduler]);
        assert!(Cli::try_parse_from(["skiff", "server", "--components", "nonsense"]).is_err());
        assert!(
            Cli::try_parse_from(["skiff", "up", "--etcd-certfile", "x"]).is_err(),
            "a certificate needs its key"
        );
        let sysctl = |name| Cli::try_parse_from(["skiff", "up", "--allowed-unsafe-sysctls", name]);
        assert!(sysctl("kernel.msg*,net.core.somaxconn").is_ok());
        assert!(
            sysctl("kernel.core_pattern").is_err(),
            "one for the whole machine"
        );
    }

    #[test]
    fn wrong_values_are_refused_before_anything_starts() {
        for (flag, value) in [
            ("--hostname-override", "no_such"),
            ("--hostname-override", ""),
            ("--cluster-domain", "a b"),
            ("--container-runtime-endpoint", "/run/x.sock"),
            ("--container-runtime-endpoint", "unix://relative"),
            ("--service-node-port-range", "2-1"),
        ] {
            let parsed = Cli::try_parse_from(["skiff", "up", flag, value]);
            assert!(parsed.is_err(), "{flag} {value:?}");
        }
        assert_eq!(node_name("Node-1.Example"), Ok("node-1.example".into()));
        assert_eq!(port_range("30000-32767"), Ok(30000..=32767));
        for bad in ["", "1", "2-1", "0-5", "a-b", "1-70000"] {
            assert!(port_range(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn modes_of_the_pod_network_are_found_again() {
        for word in ["auto", "direct", "vxlan", "wireguard", "none"] {
            assert_eq!(pod_network_name(pod_network(word).unwrap()), word);
        }
        assert!(pod_network("pigeons").is_err());
    }

    #[test]
    fn a_join_is_one_line() {
        let hash = format!("sha256:{}", "0a".repeat(32));
        let parse = |server: &str, token: &str, hash: &str| {
            Cli::try_parse_from(["skiff", "join", server, "--token", token, "--ca-hash", hash])
        };
        let good = ("https://192.0.2.1:6443", "abcdef.0123456789abcdef", hash.as_str());
        assert!(parse(good.0, good.1, good.2).is_ok());
        for (server, token, hash) in [
            ("http://192.0.2.1:6443", good.1, good.2),
            (good.0, "abcdef", good.2),
            (good.0, good.1, "sha256:00"),
            (good.0, good.1, "0a"),
        ] {
            assert!(parse(server, token, hash).is_err(), "{server} {token} {hash}");
        }
        let key = "0a".repeat(32);
        let server = |flags: &[&str]| {
            let line = ["skiff", "join", good.0, "--token", good.1, "--ca-hash", good.2];
            Cli::try_parse_from(line.iter().chain(flags)).is_ok()
        };
        assert!(server(&["--server", "--certificate-key", &key]));
        assert!(!server(&["--server"]), "a server needs the cluster's keys");
        assert!(!server(&["--certificate-key", &key]));
        assert!(!server(&["--server", "--certificate-key", "0a"]));
        assert!(!server(&["--bind", "0.0.0.0:6443"]), "a node has no API server");
        let line = ["skiff", "join", good.0, "--token", good.1];
        assert!(
            Cli::try_parse_from(line).is_err(),
            "an authority is not trusted unseen"
        );
    }

    #[test]
    fn an_agent_takes_no_flags_of_servers() {
        let root = tempfile::tempdir().unwrap();
        let wishes = crate::cluster::Wishes {
            agent: true,
            ..Default::default()
        };
        let agent = Cluster::find_or_make_in(root.path(), "skiff", &wishes).unwrap();
        let check = |cluster: &Cluster, line: &str, expected: Option<&str>| {
            let arguments = line.split(' ').map(std::ffi::OsString::from);
            let refused = refuse_server_flags(cluster, arguments).map_err(|error| error.to_string());
            match (refused, expected) {
                (Ok(()), None) => {}
                (Err(told), Some(expected)) => assert!(told.contains(expected), "{told}"),
                (told, _) => panic!("{line}: {told:?}"),
            }
        };
        check(&agent, "skiff up", None);
        check(&agent, "skiff up --name skiff", None);
        check(&agent, "skiff server --report-progress --name skiff", None);
        check(
            &agent,
            "skiff up --etcd-servers http://x",
            Some("no --etcd-servers here"),
        );
        check(
            &agent,
            "skiff server --node-labels a=b",
            Some("`skiff server` takes no --node-labels"),
        );
        let server = Cluster {
            agent: false,
            ..agent
        };
        check(&server, "skiff up --etcd-servers http://x", None);
    }

    #[test]
    fn files_are_the_callers() {
        let here = std::env::current_dir().unwrap();
        for (text, path) in [("a/b", here.join("a/b")), ("/a", "/a".into()), ("-", "-".into())] {
            assert_eq!(file(text).unwrap(), path);
        }
    }
}
