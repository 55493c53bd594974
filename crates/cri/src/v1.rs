//! @generated from `proto/v1.proto` (message, field and call names, types and numbers of CRI v1 as of
//! Kubernetes 1.36) by protox and tonic-prost-build, and committed so that building needs neither.
//! To change it, change the `.proto`, run `tonic_prost_build::configure().compile_fds(protox::compile(..))`
//! over it, and put the result here. Do not edit by hand.
#[derive(Clone, PartialEq, Eq, Hash, ::prost::Message)]
pub struct VersionRequest {
    #[prost(string, tag = "1")]
    pub version: ::prost::alloc::string::String,
}
#[derive(Clone, PartialEq, Eq, Hash, ::prost::Message)]
pub struct VersionResponse {
    #[prost(string, tag = "1")]
    pub version: ::prost::alloc::string::String,
    #[prost(string, tag = "2")]
    pub runtime_name: ::prost::alloc::string::String,
    #[prost(string, tag = "3")]
    pub runtime_version: ::prost::alloc::string::String,
    #[prost(string, tag = "4")]
    pub runtime_api_version: ::prost::alloc::string::String,
}
#[derive(Clone, PartialEq, Eq, Hash, ::prost::Message)]
pub struct DnsConfig {
    #[prost(string, repeated, tag = "1")]
    pub servers: ::prost::alloc::vec::Vec<::prost::alloc::string::String>,
    #[prost(string, repeated, tag = "2")]
    pub searches: ::prost::alloc::vec::Vec<::prost::alloc::string::String>,
    #[prost(string, repeated, tag = "3")]
    pub options: ::prost::alloc::vec::Vec<::prost::alloc::string::String>,
}
#[derive(Clone, PartialEq, Eq, Hash, ::prost::Message)]
pub struct PortMapping {
    #[prost(enumeration = "Protocol", tag = "1")]
    pub protocol: i32,
    #[prost(int32, tag = "2")]
    pub container_port: i32,
    #[prost(int32, tag = "3")]
    pub host_port: i32,
    #[prost(string, tag = "4")]
    pub host_ip: ::prost::alloc::string::String,
}
#[derive(Clone, PartialEq, ::prost::Message)]
pub struct Mount {
    #[prost(string, tag = "1")]
    pub container_path: ::prost::alloc::string::String,
    #[prost(string, tag = "2")]
    pub host_path: ::prost::alloc::string::String,
    #[prost(bool, tag = "3")]
    pub readonly: bool,
    #[prost(bool, tag = "4")]
    pub selinux_relabel: bool,
    #[prost(enumeration = "MountPropagation", tag = "5")]
    pub propagation: i32,
    #[prost(message, repeated, tag = "6")]
    pub uid_mappings: ::prost::alloc::vec::Vec<IdMapping>,
    #[prost(message, repeated, tag = "7")]
    pub gid_mappings: ::prost::alloc::vec::Vec<IdMapping>,
    #[prost(bool, tag = "8")]
    pub recursive_read_only: bool,
    #[prost(message, optional, tag = "9")]
    pub image: ::core::option::Option<ImageSpec>,
    #[prost(string, tag = "10")]
    pub image_sub_path: ::prost::alloc::string::String,
}
#[derive(Clone, Copy, PartialEq, Eq, Hash, ::prost::Message)]
pub struct IdMapping {
    #[prost(uint32, tag = "1")]
    pub host_id: u32,
    #[prost(uint32, tag = "2")]
    pub container_id: u32,
    #[prost(uint32, tag = "3")]
    pub length: u32,
}
#[derive(Clone, PartialEq, ::prost::Message)]
pub struct UserNamespace {
    #[prost(enumeration = "NamespaceMode", tag = "1")]
    pub mode: i32,
    #[prost(message, repeated, tag = "2")]
    pub uids: ::prost::alloc::vec::Vec<IdMapping>,
    #[prost(message, repeated, tag = "3")]
    pub gids: ::prost::alloc::vec::Vec<IdMapping>,
}
#[derive(Clone, PartialEq, ::prost::Message)]
pub struct NamespaceOption {
    #[prost(enumeration = "NamespaceMode", tag = "1")]
    pub network: i32,
    #[prost(enumeration = "NamespaceMode", tag = "2")]
    pub pid: i32,
    #[prost(enumeration = "NamespaceMode", tag = "3")]
    pub ipc: i32,
    #[prost(string, tag = "4")]
    pub target_id: ::prost::alloc::string::String,
    #[prost(message, optional, tag = "5")]
    pub userns_options: ::core::option::Option<UserNamespace>,
}
#[derive(Clone, Copy, PartialEq, Eq, Hash, ::prost::Message)]
pub struct Int64Value {
    #[prost(int64, tag = "1")]
    pub value: i64,
}
#[derive(Clone, PartialEq, ::prost::Message)]
pub struct LinuxSandboxSecurityContext {
    #[prost(message, optional, tag = "1")]
    pub namespace_options: ::core::option::Option<NamespaceOption>,
    #[prost(message, optional, tag = "2")]
    pub selinux_options: ::core::option::Option<SeLinuxOption>,
    #[prost(message, optional, tag = "3")]
    pub run_as_user: ::core::option::Option<Int64Value>,
    #[prost(message, optional, tag = "8")]
    pub run_as_group: ::core::option::Option<Int64Value>,
    #[prost(bool, tag = "4")]
    pub readonly_rootfs: bool,
    #[prost(int64, repeated, tag = "5")]
    pub supplemental_groups: ::prost::alloc::vec::Vec<i64>,
    #[prost(enumeration = "SupplementalGroupsPolicy", tag = "11")]
    pub supplemental_groups_policy: i32,
    #[prost(bool, tag = "6")]
    pub privileged: bool,
    #[prost(message, optional, tag = "9")]
    pub seccomp: ::core::option::Option<SecurityProfile>,
    #[prost(message, optional, tag = "10")]
    pub apparmor: ::core::option::Option<SecurityProfile>,
    #[deprecated]
    #[prost(string, tag = "7")]
    pub seccomp_profile_path: ::prost::alloc::string::String,
}
#[derive(Clone, PartialEq, Eq, Hash, ::prost::Message)]
pub struct SecurityProfile {
    #[prost(enumeration = "security_profile::ProfileType", tag = "1")]
    pub profile_type: i32,
    #[prost(string, tag = "2")]
    pub localhost_ref: ::prost::alloc::string::String,
}
/// Nested message and enum types in `SecurityProfile`.
pub mod security_profile {
    #[derive(
        Clone,
        Copy,
        Debug,
        PartialEq,
        Eq,
        Hash,
        PartialOrd,
        Ord,
        ::prost::Enumeration
    )]
    #[repr(i32)]
    pub enum ProfileType {
        RuntimeDefault = 0,
        Unconfined = 1,
        Localhost = 2,
    }
    impl ProfileType {
        /// String value of the enum field names used in the ProtoBuf definition.
        ///
        /// The values are not transformed in any way and thus are considered stable
        /// (if the ProtoBuf definition does not change) and safe for programmatic use.
        pub fn as_str_name(&self) -> &'static str {
            match self {
                Self::RuntimeDefault => "RuntimeDefault",
                Self::Unconfined => "Unconfined",
                Self::Localhost => "Localhost",
            }
        }
        /// Creates an enum from field names used in the ProtoBuf definition.
        pub fn from_str_name(value: &str) -> ::core::option::Option<Self> {
            match value {
                "RuntimeDefault" => Some(Self::RuntimeDefault),
                "Unconfined" => Some(Self::Unconfined),
                "Localhost" => Some(Self::Localhost),
                _ => None,
            }
        }
    }
}
#[derive(Clone, PartialEq, ::prost::Message)]
pub struct LinuxPodSandboxConfig {
    #[prost(string, tag = "1")]
    pub cgroup_parent: ::prost::alloc::string::String,
    #[prost(message, optional, tag = "2")]
    pub security_context: ::core::option::Option<LinuxSandboxSecurityContext>,
    #[prost(map = "string, string", tag = "3")]
    pub sysctls: ::std::collections::HashMap<
        ::prost::alloc::string::String,
        ::prost::alloc::string::String,
    >,
    #[prost(message, optional, tag = "4")]
    pub overhead: ::core::option::Option<LinuxContainerResources>,
    #[prost(message, optional, tag = "5")]
    pub resources: ::core::option::Option<LinuxContainerResources>,
}
#[derive(Clone, PartialEq, Eq, Hash, ::prost::Message)]
pub struct PodSandboxMetadata {
    #[prost(string, tag = "1")]
    pub name: ::prost::alloc::string::String,
    #[prost(string, tag = "2")]
    pub uid: ::prost::alloc::string::String,
    #[prost(string, tag = "3")]
    pub namespace: ::prost::alloc::string::String,
    #[prost(uint32, tag = "4")]
    pub attempt: u32,
}
#[derive(Clone, PartialEq, ::prost::Message)]
pub struct PodSandboxConfig {
    #[prost(message, optional, tag = "1")]
    pub metadata: ::core::option::Option<PodSandboxMetadata>,
    #[prost(string, tag = "2")]
    pub hostname: ::prost::alloc::string::String,
    #[prost(string, tag = "3")]
    pub log_directory: ::prost::alloc::string::String,
    #[prost(message, optional, tag = "4")]
    pub dns_config: ::core::option::Option<DnsConfig>,
    #[prost(message, repeated, tag = "5")]
    pub port_mappings: ::prost::alloc::vec::Vec<PortMapping>,
    #[prost(map = "string, string", tag = "6")]
    pub labels: ::std::collections::HashMap<
        ::prost::alloc::string::String,
        ::prost::alloc::string::String,
    >,
    #[prost(map = "string, string", tag = "7")]
    pub annotations: ::std::collections::HashMap<
        ::prost::alloc::string::String,
        ::prost::alloc::string::String,
    >,
    #[prost(message, optional, tag = "8")]
    pub linux: ::core::option::Option<LinuxPodSandboxConfig>,
    #[prost(message, optional, tag = "9")]
    pub windows: ::core::option::Option<WindowsPodSandboxConfig>,
}
#[derive(Clone, PartialEq, ::prost::Message)]
pub struct RunPodSandboxRequest {
    #[prost(message, optional, tag = "1")]
    pub config: ::core::option::Option<PodSandboxConfig>,
    #[prost(string, tag = "2")]
    pub runtime_handler: ::prost::alloc::string::String,
}
#[derive(Clone, PartialEq, Eq, Hash, ::prost::Message)]
pub struct RunPodSandboxResponse {
    #[prost(string, tag = "1")]
    pub pod_sandbox_id: ::prost::alloc::string::String,
}
#[derive(Clone, PartialEq, Eq, Hash, ::prost::Message)]
pub struct StopPodSandboxRequest {
    #[prost(string, tag = "1")]
    pub pod_sandbox_id: ::prost::alloc::string::String,
}
#[derive(Clone, Copy, PartialEq, Eq, Hash, ::prost::Message)]
pub struct StopPodSandboxResponse {}
#[derive(Clone, PartialEq, Eq, Hash, ::prost::Message)]
pub struct RemovePodSandboxRequest {
    #[prost(string, tag = "1")]
    pub pod_sandbox_id: ::prost::alloc::string::String,
}
#[derive(Clone, Copy, PartialEq, Eq, Hash, ::prost::Message)]
pub struct RemovePodSandboxResponse {}
#[derive(Clone, PartialEq, Eq, Hash, ::prost::Message)]
pub struct PodSandboxStatusRequest {
    #[prost(string, tag = "1")]
    pub pod_sandbox_id: ::prost::alloc::string::String,
    #[prost(bool, tag = "2")]
    pub verbose: bool,
}
#[derive(Clone, PartialEq, Eq, Hash, ::prost::Message)]
pub struct PodIp {
    #[prost(string, tag = "1")]
    pub ip: ::prost::alloc::string::String,
}
#[derive(Clone, PartialEq, ::prost::Message)]
pub struct PodSandboxNetworkStatus {
    #[prost(string, tag = "1")]
    pub ip: ::prost::alloc::string::String,
    #[prost(message, repeated, tag = "2")]
    pub additional_ips: ::prost::alloc::vec::Vec<PodIp>,
}
#[derive(Clone, PartialEq, ::prost::Message)]
pub struct Namespace {
    #[prost(message, optional, tag = "2")]
    pub options: ::core::option::Option<NamespaceOption>,
}
#[derive(Clone, PartialEq, ::prost::Message)]
pub struct LinuxPodSandboxStatus {
    #[prost(message, optional, tag = "1")]
    pub namespaces: ::core::option::Option<Namespace>,
}
#[derive(Clone, PartialEq, ::prost::Message)]
pub struct PodSandboxStatus {
    #[prost(string, tag = "1")]
    pub id: ::prost::alloc::string::String,
    #[prost(message, optional, tag = "2")]
    pub metadata: ::core::option::Option<PodSandboxMetadata>,
    #[prost(enumeration = "PodSandboxState", tag = "3")]
    pub state: i32,
    #[prost(int64, tag = "4")]
    pub created_at: i64,
    #[prost(message, optional, tag = "5")]
    pub network: ::core::option::Option<PodSandboxNetworkStatus>,
    #[prost(message, optional, tag = "6")]
    pub linux: ::core::option::Option<LinuxPodSandboxStatus>,
    #[prost(map = "string, string", tag = "7")]
    pub labels: ::std::collections::HashMap<
        ::prost::alloc::string::String,
        ::prost::alloc::string::String,
    >,
    #[prost(map = "string, string", tag = "8")]
    pub annotations: ::std::collections::HashMap<
        ::prost::alloc::string::String,
        ::prost::alloc::string::String,
    >,
    #[prost(string, tag = "9")]
    pub runtime_handler: ::prost::alloc::string::String,
}
#[derive(Clone, PartialEq, ::prost::Message)]
pub struct PodSandboxStatusResponse {
    #[prost(message, optional, tag = "1")]
    pub status: ::core::option::Option<PodSandboxStatus>,
    #[prost(map = "string, string", tag = "2")]
    pub info: ::std::collections::HashMap<
        ::prost::alloc::string::String,
        ::prost::alloc::string::String,
    >,
    #[prost(message, repeated, tag = "3")]
    pub containers_statuses: ::prost::alloc::vec::Vec<ContainerStatus>,
    #[prost(int64, tag = "4")]
    pub timestamp: i64,
}
#[derive(Clone, Copy, PartialEq, Eq, Hash, ::prost::Message)]
pub struct PodSandboxStateValue {
    #[prost(enumeration = "PodSandboxState", tag = "1")]
    pub state: i32,
}
#[derive(Clone, PartialEq, ::prost::Message)]
pub struct PodSandboxFilter {
    #[prost(string, tag = "1")]
    pub id: ::prost::alloc::string::String,
    #[prost(message, optional, tag = "2")]
    pub state: ::core::option::Option<PodSandboxStateValue>,
    #[prost(map = "string, string", tag = "3")]
    pub label_selector: ::std::collections::HashMap<
        ::prost::alloc::string::String,
        ::prost::alloc::string::String,
    >,
}
#[derive(Clone, PartialEq, ::prost::Message)]
pub struct ListPodSandboxRequest {
    #[prost(message, optional, tag = "1")]
    pub filter: ::core::option::Option<PodSandboxFilter>,
}
#[derive(Clone, PartialEq, ::prost::Message)]
pub struct PodSandbox {
    #[prost(string, tag = "1")]
    pub id: ::prost::alloc::string::String,
    #[prost(message, optional, tag = "2")]
    pub metadata: ::core::option::Option<PodSandboxMetadata>,
    #[prost(enumeration = "PodSandboxState", tag = "3")]
    pub state: i32,
    #[prost(int64, tag = "4")]
    pub created_at: i64,
    #[prost(map = "string, string", tag = "5")]
    pub labels: ::std::collections::HashMap<
        ::prost::alloc::string::String,
        ::prost::alloc::string::String,
    >,
    #[prost(map = "string, string", tag = "6")]
    pub annotations: ::std::collections::HashMap<
        ::prost::alloc::string::String,
        ::prost::alloc::string::String,
    >,
    #[prost(string, tag = "7")]
    pub runtime_handler: ::prost::alloc::string::String,
}
#[derive(Clone, PartialEq, ::prost::Message)]
pub struct ListPodSandboxResponse {
    #[prost(message, repeated, tag = "1")]
    pub items: ::prost::alloc::vec::Vec<PodSandbox>,
}
#[derive(Clone, PartialEq, ::prost::Message)]
pub struct StreamPodSandboxesRequest {
    #[prost(message, optional, tag = "1")]
    pub filter: ::core::option::Option<PodSandboxFilter>,
}
#[derive(Clone, PartialEq, ::prost::Message)]
pub struct StreamPodSandboxesResponse {
    #[prost(message, repeated, tag = "1")]
    pub pod_sandboxes: ::prost::alloc::vec::Vec<PodSandbox>,
}
#[derive(Clone, PartialEq, Eq, Hash, ::prost::Message)]
pub struct PodSandboxStatsRequest {
    #[prost(string, tag = "1")]
    pub pod_sandbox_id: ::prost::alloc::string::String,
}
#[derive(Clone, PartialEq, ::prost::Message)]
pub struct PodSandboxStatsResponse {
    #[prost(message, optional, tag = "1")]
    pub stats: ::core::option::Option<PodSandboxStats>,
}
#[derive(Clone, PartialEq, ::prost::Message)]
pub struct PodSandboxStatsFilter {
    #[prost(string, tag = "1")]
    pub id: ::prost::alloc::string::String,
    #[prost(map = "string, string", tag = "2")]
    pub label_selector: ::std::collections::HashMap<
        ::prost::alloc::string::String,
        ::prost::alloc::string::String,
    >,
}
#[derive(Clone, PartialEq, ::prost::Message)]
pub struct ListPodSandboxStatsRequest {
    #[prost(message, optional, tag = "1")]
    pub filter: ::core::option::Option<PodSandboxStatsFilter>,
}
#[derive(Clone, PartialEq, ::prost::Message)]
pub struct ListPodSandboxStatsResponse {
    #[prost(message, repeated, tag = "1")]
    pub stats: ::prost::alloc::vec::Vec<PodSandboxStats>,
}
#[derive(Clone, PartialEq, ::prost::Message)]
pub struct StreamPodSandboxStatsRequest {
    #[prost(message, optional, tag = "1")]
    pub filter: ::core::option::Option<PodSandboxStatsFilter>,
}
#[derive(Clone, PartialEq, ::prost::Message)]
pub struct StreamPodSandboxStatsResponse {
    #[prost(message, repeated, tag = "1")]
    pub pod_sandbox_stats: ::prost::alloc::vec::Vec<PodSandboxStats>,
}
#[derive(Clone, PartialEq, ::prost::Message)]
pub struct PodSandboxAttributes {
    #[prost(string, tag = "1")]
    pub id: ::prost::alloc::string::String,
    #[prost(message, optional, tag = "2")]
    pub metadata: ::core::option::Option<PodSandboxMetadata>,
    #[prost(map = "string, string", tag = "3")]
    pub labels: ::std::collections::HashMap<
        ::prost::alloc::string::String,
        ::prost::alloc::string::String,
    >,
    #[prost(map = "string, string", tag = "4")]
    pub annotations: ::std::collections::HashMap<
        ::prost::alloc::string::String,
        ::prost::alloc::string::String,
    >,
}
#[derive(Clone, PartialEq, ::prost::Message)]
pub struct PodSandboxStats {
    #[prost(message, optional, tag = "1")]
    pub attributes: ::core::option::Option<PodSandboxAttributes>,
    #[prost(message, optional, tag = "2")]
    pub linux: ::core::option::Option<LinuxPodSandboxStats>,
    #[prost(message, optional, tag = "3")]
    pub windows: ::core::option::Option<WindowsPodSandboxStats>,
}
#[derive(Clone, PartialEq, ::prost::Message)]
pub struct LinuxPodSandboxStats {
    #[prost(message, optional, tag = "1")]
    pub cpu: ::core::option::Option<CpuUsage>,
    #[prost(message, optional, tag = "2")]
    pub memory: ::core::option::Option<MemoryUsage>,
    #[prost(message, optional, tag = "3")]
    pub network: ::core::option::Option<NetworkUsage>,
    #[prost(message, optional, tag = "4")]
    pub process: ::core::option::Option<ProcessUsage>,
    #[prost(message, repeated, tag = "5")]
    pub containers: ::prost::alloc::vec::Vec<ContainerStats>,
    #[prost(message, optional, tag = "6")]
    pub io: ::core::option::Option<IoUsage>,
}
#[derive(Clone, PartialEq, ::prost::Message)]
pub struct WindowsPodSandboxStats {
    #[prost(message, optional, tag = "1")]
    pub cpu: ::core::option::Option<WindowsCpuUsage>,
    #[prost(message, optional, tag = "2")]
    pub memory: ::core::option::Option<WindowsMemoryUsage>,
    #[prost(message, optional, tag = "3")]
    pub network: ::core::option::Option<WindowsNetworkUsage>,
    #[prost(message, optional, tag = "4")]
    pub process: ::core::option::Option<WindowsProcessUsage>,
    #[prost(message, repeated, tag = "5")]
    pub containers: ::prost::alloc::vec::Vec<WindowsContainerStats>,
}
#[derive(Clone, PartialEq, ::prost::Message)]
pub struct NetworkUsage {
    #[prost(int64, tag = "1")]
    pub timestamp: i64,
    #[prost(message, optional, tag = "2")]
    pub default_interface: ::core::option::Option<NetworkInterfaceUsage>,
    #[prost(message, repeated, tag = "3")]
    pub interfaces: ::prost::alloc::vec::Vec<NetworkInterfaceUsage>,
}
#[derive(Clone, PartialEq, ::prost::Message)]
pub struct WindowsNetworkUsage {
    #[prost(int64, tag = "1")]
    pub timestamp: i64,
    #[prost(message, optional, tag = "2")]
    pub default_interface: ::core::option::Option<WindowsNetworkInterfaceUsage>,
    #[prost(message, repeated, tag = "3")]
    pub interfaces: ::prost::alloc::vec::Vec<WindowsNetworkInterfaceUsage>,
}
#[derive(Clone, PartialEq, Eq, Hash, ::prost::Message)]
pub struct NetworkInterfaceUsage {
    #[prost(string, tag = "1")]
    pub name: ::prost::alloc::string::String,
    #[prost(message, optional, tag = "2")]
    pub rx_bytes: ::core::option::Option<UInt64Value>,
    #[prost(message, optional, tag = "3")]
    pub rx_errors: ::core::option::Option<UInt64Value>,
    #[prost(message, optional, tag = "4")]
    pub tx_bytes: ::core::option::Option<UInt64Value>,
    #[prost(message, optional, tag = "5")]
    pub tx_errors: ::core::option::Option<UInt64Value>,
}
#[derive(Clone, PartialEq, Eq, Hash, ::prost::Message)]
pub struct WindowsNetworkInterfaceUsage {
    #[prost(string, tag = "1")]
    pub name: ::prost::alloc::string::String,
    #[prost(message, optional, tag = "2")]
    pub rx_bytes: ::core::option::Option<UInt64Value>,
    #[prost(message, optional, tag = "3")]
    pub rx_packets_dropped: ::core::option::Option<UInt64Value>,
    #[prost(message, optional, tag = "4")]
    pub tx_bytes: ::core::option::Option<UInt64Value>,
    #[prost(message, optional, tag = "5")]
    pub tx_packets_dropped: ::core::option::Option<UInt64Value>,
}
#[derive(Clone, Copy, PartialEq, Eq, Hash, ::prost::Message)]
pub struct ProcessUsage {
    #[prost(int64, tag = "1")]
    pub timestamp: i64,
    #[prost(message, optional, tag = "2")]
    pub process_count: ::core::option::Option<UInt64Value>,
}
#[derive(Clone, Copy, PartialEq, Eq, Hash, ::prost::Message)]
pub struct WindowsProcessUsage {
    #[prost(int64, tag = "1")]
    pub timestamp: i64,
    #[prost(message, optional, tag = "2")]
    pub process_count: ::core::option::Option<UInt64Value>,
}
#[derive(Clone, PartialEq, ::prost::Message)]
pub struct ImageSpec {
    #[prost(string, tag = "1")]
    pub image: ::prost::alloc::string::String,
    #[prost(map = "string, string", tag = "2")]
    pub annotations: ::std::collections::HashMap<
        ::prost::alloc::string::String,
        ::prost::alloc::string::String,
    >,
    #[prost(string, tag = "18")]
    pub user_specified_image: ::prost::alloc::string::String,
    #[prost(string, tag = "19")]
    pub runtime_handler: ::prost::alloc::string::String,
    #[prost(string, tag = "20")]
    pub image_ref: ::prost::alloc::string::String,
}
#[derive(Clone, PartialEq, Eq, Hash, ::prost::Message)]
pub struct KeyValue {
    #[prost(string, tag = "1")]
    pub key: ::prost::alloc::string::String,
    #[prost(bytes = "vec", tag = "2")]
    pub value: ::prost::alloc::vec::Vec<u8>,
}
#[derive(Clone, PartialEq, ::prost::Message)]
pub struct LinuxContainerResources {
    #[prost(int64, tag = "1")]
    pub cpu_period: i64,
    #[prost(int64, tag = "2")]
    pub cpu_quota: i64,
    #[prost(int64, tag = "3")]
    pub cpu_shares: i64,
    #[prost(int64, tag = "4")]
    pub memory_limit_in_bytes: i64,
    #[prost(int64, tag = "5")]
    pub oom_score_adj: i64,
    #[prost(string, tag = "6")]
    pub cpuset_cpus: ::prost::alloc::string::String,
    #[prost(string, tag = "7")]
    pub cpuset_mems: ::prost::alloc::string::String,
    #[prost(message, repeated, tag = "8")]
    pub hugepage_limits: ::prost::alloc::vec::Vec<HugepageLimit>,
    #[prost(map = "string, string", tag = "9")]
    pub unified: ::std::collections::HashMap<
        ::prost::alloc::string::String,
        ::prost::alloc::string::String,
    >,
    #[prost(int64, tag = "10")]
    pub memory_swap_limit_in_bytes: i64,
}
#[derive(Clone, PartialEq, Eq, Hash, ::prost::Message)]
pub struct HugepageLimit {
    #[prost(string, tag = "1")]
    pub page_size: ::prost::alloc::string::String,
    #[prost(uint64, tag = "2")]
    pub limit: u64,
}
#[derive(Clone, PartialEq, Eq, Hash, ::prost::Message)]
pub struct SeLinuxOption {
    #[prost(string, tag = "1")]
    pub user: ::prost::alloc::string::String,
    #[prost(string, tag = "2")]
    pub role: ::prost::alloc::string::String,
    #[prost(string, tag = "3")]
    pub r#type: ::prost::alloc::string::String,
    #[prost(string, tag = "4")]
    pub level: ::prost::alloc::string::String,
}
#[derive(Clone, PartialEq, Eq, Hash, ::prost::Message)]
pub struct Capability {
    #[prost(string, repeated, tag = "1")]
    pub add_capabilities: ::prost::alloc::vec::Vec<::prost::alloc::string::String>,
    #[prost(string, repeated, tag = "2")]
    pub drop_capabilities: ::prost::alloc::vec::Vec<::prost::alloc::string::String>,
    #[prost(string, repeated, tag = "3")]
    pub add_ambient_capabilities: ::prost::alloc::vec::Vec<
        ::prost::alloc::string::String,
    >,
}
#[derive(Clone, PartialEq, ::prost::Message)]
pub struct LinuxContainerSecurityContext {
    #[prost(message, optional, tag = "1")]
    pub capabilities: ::core::option::Option<Capability>,
    #[prost(bool, tag = "2")]
    pub privileged: bool,
    #[prost(message, optional, tag = "3")]
    pub namespace_options: ::core::option::Option<NamespaceOption>,
    #[prost(message, optional, tag = "4")]
    pub selinux_options: ::core::option::Option<SeLinuxOption>,
    #[prost(message, optional, tag = "5")]
    pub run_as_user: ::core::option::Option<Int64Value>,
    #[prost(message, optional, tag = "12")]
    pub run_as_group: ::core::option::Option<Int64Value>,
    #[prost(string, tag = "6")]
    pub run_as_username: ::prost::alloc::string::String,
    #[prost(bool, tag = "7")]
    pub readonly_rootfs: bool,
    #[prost(int64, repeated, tag = "8")]
    pub supplemental_groups: ::prost::alloc::vec::Vec<i64>,
    #[prost(enumeration = "SupplementalGroupsPolicy", tag = "17")]
    pub supplemental_groups_policy: i32,
    #[prost(bool, tag = "11")]
    pub no_new_privs: bool,
    #[prost(string, repeated, tag = "13")]
    pub masked_paths: ::prost::alloc::vec::Vec<::prost::alloc::string::String>,
    #[prost(string, repeated, tag = "14")]
    pub readonly_paths: ::prost::alloc::vec::Vec<::prost::alloc::string::String>,
    #[prost(message, optional, tag = "15")]
    pub seccomp: ::core::option::Option<SecurityProfile>,
    #[prost(message, optional, tag = "16")]
    pub apparmor: ::core::option::Option<SecurityProfile>,
    #[deprecated]
    #[prost(string, tag = "9")]
    pub apparmor_profile: ::prost::alloc::string::String,
    #[deprecated]
    #[prost(string, tag = "10")]
    pub seccomp_profile_path: ::prost::alloc::string::String,
}
#[derive(Clone, PartialEq, ::prost::Message)]
pub struct LinuxContainerConfig {
    #[prost(message, optional, tag = "1")]
    pub resources: ::core::option::Option<LinuxContainerResources>,
    #[prost(message, optional, tag = "2")]
    pub security_context: ::core::option::Option<LinuxContainerSecurityContext>,
}
#[derive(Clone, PartialEq, Eq, Hash, ::prost::Message)]
pub struct LinuxContainerUser {
    #[prost(int64, tag = "1")]
    pub uid: i64,
    #[prost(int64, tag = "2")]
    pub gid: i64,
    #[prost(int64, repeated, tag = "3")]
    pub supplemental_groups: ::prost::alloc::vec::Vec<i64>,
}
#[derive(Clone, Copy, PartialEq, Eq, Hash, ::prost::Message)]
pub struct WindowsNamespaceOption {
    #[prost(enumeration = "NamespaceMode", tag = "1")]
    pub network: i32,
}
#[derive(Clone, PartialEq, Eq, Hash, ::prost::Message)]
pub struct WindowsSandboxSecurityContext {
    #[prost(string, tag = "1")]
    pub run_as_username: ::prost::alloc::string::String,
    #[prost(string, tag = "2")]
    pub credential_spec: ::prost::alloc::string::String,
    #[prost(bool, tag = "3")]
    pub host_process: bool,
    #[prost(message, optional, tag = "4")]
    pub namespace_options: ::core::option::Option<WindowsNamespaceOption>,
}
#[derive(Clone, PartialEq, Eq, Hash, ::prost::Message)]
pub struct WindowsPodSandboxConfig {
    #[prost(message, optional, tag = "1")]
    pub security_context: ::core::option::Option<WindowsSandboxSecurityContext>,
}
#[derive(Clone, PartialEq, Eq, Hash, ::prost::Message)]
pub struct WindowsContainerSecurityContext {
    #[prost(string, tag = "1")]
    pub run_as_username: ::prost::alloc::string::String,
    #[prost(string, tag = "2")]
    pub credential_spec: ::prost::alloc::string::String,
    #[prost(bool, tag = "3")]
    pub host_process: bool,
}
#[derive(Clone, PartialEq, ::prost::Message)]
pub struct WindowsContainerConfig {
    #[prost(message, optional, tag = "1")]
    pub resources: ::core::option::Option<WindowsContainerResources>,
    #[prost(message, optional, tag = "2")]
    pub security_context: ::core::option::Option<WindowsContainerSecurityContext>,
}
#[derive(Clone, PartialEq, ::prost::Message)]
pub struct WindowsContainerResources {
    #[prost(int64, tag = "1")]
    pub cpu_shares: i64,
    #[prost(int64, tag = "2")]
    pub cpu_count: i64,
    #[prost(int64, tag = "3")]
    pub cpu_maximum: i64,
    #[prost(int64, tag = "4")]
    pub memory_limit_in_bytes: i64,
    #[prost(int64, tag = "5")]
    pub rootfs_size_in_bytes: i64,
    #[prost(message, repeated, tag = "6")]
    pub affinity_cpus: ::prost::alloc::vec::Vec<WindowsCpuGroupAffinity>,
}
#[derive(Clone, Copy, PartialEq, Eq, Hash, ::prost::Message)]
pub struct WindowsCpuGroupAffinity {
    #[prost(uint64, tag = "1")]
    pub cpu_mask: u64,
    #[prost(uint32, tag = "2")]
    pub cpu_group: u32,
}
#[derive(Clone, PartialEq, Eq, Hash, ::prost::Message)]
pub struct ContainerMetadata {
    #[prost(string, tag = "1")]
    pub name: ::prost::alloc::string::String,
    #[prost(uint32, tag = "2")]
    pub attempt: u32,
}
#[derive(Clone, PartialEq, Eq, Hash, ::prost::Message)]
pub struct Device {
    #[prost(string, tag = "1")]
    pub container_path: ::prost::alloc::string::String,
    #[prost(string, tag = "2")]
    pub host_path: ::prost::alloc::string::String,
    #[prost(string, tag = "3")]
    pub permissions: ::prost::alloc::string::String,
}
#[derive(Clone, PartialEq, Eq, Hash, ::prost::Message)]
pub struct CdiDevice {
    #[prost(string, tag = "1")]
    pub name: ::prost::alloc::string::String,
}
#[derive(Clone, PartialEq, ::prost::Message)]
pub struct ContainerConfig {
    #[prost(message, optional, tag = "1")]
    pub metadata: ::core::option::Option<ContainerMetadata>,
    #[prost(message, optional, tag = "2")]
    pub image: ::core::option::Option<ImageSpec>,
    #[prost(string, repeated, tag = "3")]
    pub command: ::prost::alloc::vec::Vec<::prost::alloc::string::String>,
    #[prost(string, repeated, tag = "4")]
    pub args: ::prost::alloc::vec::Vec<::prost::alloc::string::String>,
    #[prost(string, tag = "5")]
    pub working_dir: ::prost::alloc::string::String,
    #[prost(message, repeated, tag = "6")]
    pub envs: ::prost::alloc::vec::Vec<KeyValue>,
    #[prost(message, repeated, tag = "7")]
    pub mounts: ::prost::alloc::vec::Vec<Mount>,
    #[prost(message, repeated, tag = "8")]
    pub devices: ::prost::alloc::vec::Vec<Device>,
    #[prost(map = "string, string", tag = "9")]
    pub labels: ::std::collections::HashMap<
        ::prost::alloc::string::String,
        ::prost::alloc::string::String,
    >,
    #[prost(map = "string, string", tag = "10")]
    pub annotations: ::std::collections::HashMap<
        ::prost::alloc::string::String,
        ::prost::alloc::string::String,
    >,
    #[prost(string, tag = "11")]
    pub log_path: ::prost::alloc::string::String,
    #[prost(bool, tag = "12")]
    pub stdin: bool,
    #[prost(bool, tag = "13")]
    pub stdin_once: bool,
    #[prost(bool, tag = "14")]
    pub tty: bool,
    #[prost(message, optional, tag = "15")]
    pub linux: ::core::option::Option<LinuxContainerConfig>,
    #[prost(message, optional, tag = "16")]
    pub windows: ::core::option::Option<WindowsContainerConfig>,
    #[prost(message, repeated, tag = "17")]
    pub cdi_devices: ::prost::alloc::vec::Vec<CdiDevice>,
    #[prost(enumeration = "Signal", tag = "18")]
    pub stop_signal: i32,
}
#[derive(Clone, PartialEq, ::prost::Message)]
pub struct CreateContainerRequest {
    #[prost(string, tag = "1")]
    pub pod_sandbox_id: ::prost::alloc::string::String,
    #[prost(message, optional, tag = "2")]
    pub config: ::core::option::Option<ContainerConfig>,
    #[prost(message, optional, tag = "3")]
    pub sandbox_config: ::core::option::Option<PodSandboxConfig>,
}
#[derive(Clone, PartialEq, Eq, Hash, ::prost::Message)]
pub struct CreateContainerResponse {
    #[prost(string, tag = "1")]
    pub container_id: ::prost::alloc::string::String,
}
#[derive(Clone, PartialEq, Eq, Hash, ::prost::Message)]
pub struct StartContainerRequest {
    #[prost(string, tag = "1")]
    pub container_id: ::prost::alloc::string::String,
}
#[derive(Clone, Copy, PartialEq, Eq, Hash, ::prost::Message)]
pub struct StartContainerResponse {}
#[derive(Clone, PartialEq, Eq, Hash, ::prost::Message)]
pub struct StopContainerRequest {
    #[prost(string, tag = "1")]
    pub container_id: ::prost::alloc::string::String,
    #[prost(int64, tag = "2")]
    pub timeout: i64,
}
#[derive(Clone, Copy, PartialEq, Eq, Hash, ::prost::Message)]
pub struct StopContainerResponse {}
#[derive(Clone, PartialEq, Eq, Hash, ::prost::Message)]
pub struct RemoveContainerRequest {
    #[prost(string, tag = "1")]
    pub container_id: ::prost::alloc::string::String,
}
#[derive(Clone, Copy, PartialEq, Eq, Hash, ::prost::Message)]
pub struct RemoveContainerResponse {}
#[derive(Clone, Copy, PartialEq, Eq, Hash, ::prost::Message)]
pub struct ContainerStateValue {
    #[prost(enumeration = "ContainerState", tag = "1")]
    pub state: i32,
}
#[derive(Clone, PartialEq, ::prost::Message)]
pub struct ContainerFilter {
    #[prost(string, tag = "1")]
    pub id: ::prost::alloc::string::String,
    #[prost(message, optional, tag = "2")]
    pub state: ::core::option::Option<ContainerStateValue>,
    #[prost(string, tag = "3")]
    pub pod_sandbox_id: ::prost::alloc::string::String,
    #[prost(map = "string, string", tag = "4")]
    pub label_selector: ::std::collections::HashMap<
        ::prost::alloc::string::String,
        ::prost::alloc::string::String,
    >,
}
#[derive(Clone, PartialEq, ::prost::Message)]
pub struct ListContainersRequest {
    #[prost(message, optional, tag = "1")]
    pub filter: ::core::option::Option<ContainerFilter>,
}
#[derive(Clone, PartialEq, ::prost::Message)]
pub struct Container {
    #[prost(string, tag = "1")]
    pub id: ::prost::alloc::string::String,
    #[prost(string, tag = "2")]
    pub pod_sandbox_id: ::prost::alloc::string::String,
    #[prost(message, optional, tag = "3")]
    pub metadata: ::core::option::Option<ContainerMetadata>,
    #[prost(message, optional, tag = "4")]
    pub image: ::core::option::Option<ImageSpec>,
    #[prost(string, tag = "5")]
    pub image_ref: ::prost::alloc::string::String,
    #[prost(enumeration = "ContainerState", tag = "6")]
    pub state: i32,
    #[prost(int64, tag = "7")]
    pub created_at: i64,
    #[prost(map = "string, string", tag = "8")]
    pub labels: ::std::collections::HashMap<
        ::prost::alloc::string::String,
        ::prost::alloc::string::String,
    >,
    #[prost(map = "string, string", tag = "9")]
    pub annotations: ::std::collections::HashMap<
        ::prost::alloc::string::String,
        ::prost::alloc::string::String,
    >,
    #[prost(string, tag = "10")]
    pub image_id: ::prost::alloc::string::String,
}
#[derive(Clone, PartialEq, ::prost::Message)]
pub struct ListContainersResponse {
    #[prost(message, repeated, tag = "1")]
    pub containers: ::prost::alloc::vec::Vec<Container>,
}
#[derive(Clone, PartialEq, ::prost::Message)]
pub struct StreamContainersRequest {
    #[prost(message, optional, tag = "1")]
    pub filter: ::core::option::Option<ContainerFilter>,
}
#[derive(Clone, PartialEq, ::prost::Message)]
pub struct StreamContainersResponse {
    #[prost(message, repeated, tag = "1")]
    pub containers: ::prost::alloc::vec::Vec<Container>,
}
#[derive(Clone, PartialEq, Eq, Hash, ::prost::Message)]
pub struct ContainerStatusRequest {
    #[prost(string, tag = "1")]
    pub container_id: ::prost::alloc::string::String,
    #[prost(bool, tag = "2")]
    pub verbose: bool,
}
#[derive(Clone, PartialEq, ::prost::Message)]
pub struct ContainerStatus {
    #[prost(string, tag = "1")]
    pub id: ::prost::alloc::string::String,
    #[prost(message, optional, tag = "2")]
    pub metadata: ::core::option::Option<ContainerMetadata>,
    #[prost(enumeration = "ContainerState", tag = "3")]
    pub state: i32,
    #[prost(int64, tag = "4")]
    pub created_at: i64,
    #[prost(int64, tag = "5")]
    pub started_at: i64,
    #[prost(int64, tag = "6")]
    pub finished_at: i64,
    #[prost(int32, tag = "7")]
    pub exit_code: i32,
    #[prost(message, optional, tag = "8")]
    pub image: ::core::option::Option<ImageSpec>,
    #[prost(string, tag = "9")]
    pub image_ref: ::prost::alloc::string::String,
    #[prost(string, tag = "10")]
    pub reason: ::prost::alloc::string::String,
    #[prost(string, tag = "11")]
    pub message: ::prost::alloc::string::String,
    #[prost(map = "string, string", tag = "12")]
    pub labels: ::std::collections::HashMap<
        ::prost::alloc::string::String,
        ::prost::alloc::string::String,
    >,
    #[prost(map = "string, string", tag = "13")]
    pub annotations: ::std::collections::HashMap<
        ::prost::alloc::string::String,
        ::prost::alloc::string::String,
    >,
    #[prost(message, repeated, tag = "14")]
    pub mounts: ::prost::alloc::vec::Vec<Mount>,
    #[prost(string, tag = "15")]
    pub log_path: ::prost::alloc::string::String,
    #[prost(message, optional, tag = "16")]
    pub resources: ::core::option::Option<ContainerResources>,
    #[prost(string, tag = "17")]
    pub image_id: ::prost::alloc::string::String,
    #[prost(message, optional, tag = "18")]
    pub user: ::core::option::Option<ContainerUser>,
    #[prost(enumeration = "Signal", tag = "19")]
    pub stop_signal: i32,
}
#[derive(Clone, PartialEq, ::prost::Message)]
pub struct ContainerStatusResponse {
    #[prost(message, optional, tag = "1")]
    pub status: ::core::option::Option<ContainerStatus>,
    #[prost(map = "string, string", tag = "2")]
    pub info: ::std::collections::HashMap<
        ::prost::alloc::string::String,
        ::prost::alloc::string::String,
    >,
}
#[derive(Clone, PartialEq, ::prost::Message)]
pub struct ContainerResources {
    #[prost(message, optional, tag = "1")]
    pub linux: ::core::option::Option<LinuxContainerResources>,
    #[prost(message, optional, tag = "2")]
    pub windows: ::core::option::Option<WindowsContainerResources>,
}
#[derive(Clone, PartialEq, Eq, Hash, ::prost::Message)]
pub struct ContainerUser {
    #[prost(message, optional, tag = "1")]
    pub linux: ::core::option::Option<LinuxContainerUser>,
}
#[derive(Clone, PartialEq, ::prost::Message)]
pub struct UpdateContainerResourcesRequest {
    #[prost(string, tag = "1")]
    pub container_id: ::prost::alloc::string::String,
    #[prost(message, optional, tag = "2")]
    pub linux: ::core::option::Option<LinuxContainerResources>,
    #[prost(message, optional, tag = "3")]
    pub windows: ::core::option::Option<WindowsContainerResources>,
    #[prost(map = "string, string", tag = "4")]
    pub annotations: ::std::collections::HashMap<
        ::prost::alloc::string::String,
        ::prost::alloc::string::String,
    >,
}
#[derive(Clone, Copy, PartialEq, Eq, Hash, ::prost::Message)]
pub struct UpdateContainerResourcesResponse {}
#[derive(Clone, PartialEq, Eq, Hash, ::prost::Message)]
pub struct ExecSyncRequest {
    #[prost(string, tag = "1")]
    pub container_id: ::prost::alloc::string::String,
    #[prost(string, repeated, tag = "2")]
    pub cmd: ::prost::alloc::vec::Vec<::prost::alloc::string::String>,
    #[prost(int64, tag = "3")]
    pub timeout: i64,
}
#[derive(Clone, PartialEq, Eq, Hash, ::prost::Message)]
pub struct ExecSyncResponse {
    #[prost(bytes = "vec", tag = "1")]
    pub stdout: ::prost::alloc::vec::Vec<u8>,
    #[prost(bytes = "vec", tag = "2")]
    pub stderr: ::prost::alloc::vec::Vec<u8>,
    #[prost(int32, tag = "3")]
    pub exit_code: i32,
}
#[derive(Clone, PartialEq, Eq, Hash, ::prost::Message)]
pub struct ExecRequest {
    #[prost(string, tag = "1")]
    pub container_id: ::prost::alloc::string::String,
    #[prost(string, repeated, tag = "2")]
    pub cmd: ::prost::alloc::vec::Vec<::prost::alloc::string::String>,
    #[prost(bool, tag = "3")]
    pub tty: bool,
    #[prost(bool, tag = "4")]
    pub stdin: bool,
    #[prost(bool, tag = "5")]
    pub stdout: bool,
    #[prost(bool, tag = "6")]
    pub stderr: bool,
}
#[derive(Clone, PartialEq, Eq, Hash, ::prost::Message)]
pub struct ExecResponse {
    #[prost(string, tag = "1")]
    pub url: ::prost::alloc::string::String,
}
#[derive(Clone, PartialEq, Eq, Hash, ::prost::Message)]
pub struct AttachRequest {
    #[prost(string, tag = "1")]
    pub container_id: ::prost::alloc::string::String,
    #[prost(bool, tag = "2")]
    pub stdin: bool,
    #[prost(bool, tag = "3")]
    pub tty: bool,
    #[prost(bool, tag = "4")]
    pub stdout: bool,
    #[prost(bool, tag = "5")]
    pub stderr: bool,
}
#[derive(Clone, PartialEq, Eq, Hash, ::prost::Message)]
pub struct AttachResponse {
    #[prost(string, tag = "1")]
    pub url: ::prost::alloc::string::String,
}
#[derive(Clone, PartialEq, Eq, Hash, ::prost::Message)]
pub struct PortForwardRequest {
    #[prost(string, tag = "1")]
    pub pod_sandbox_id: ::prost::alloc::string::String,
    #[prost(int32, repeated, tag = "2")]
    pub port: ::prost::alloc::vec::Vec<i32>,
}
#[derive(Clone, PartialEq, Eq, Hash, ::prost::Message)]
pub struct PortForwardResponse {
    #[prost(string, tag = "1")]
    pub url: ::prost::alloc::string::String,
}
#[derive(Clone, PartialEq, ::prost::Message)]
pub struct ImageFilter {
    #[prost(message, optional, tag = "1")]
    pub image: ::core::option::Option<ImageSpec>,
}
#[derive(Clone, PartialEq, ::prost::Message)]
pub struct ListImagesRequest {
    #[prost(message, optional, tag = "1")]
    pub filter: ::core::option::Option<ImageFilter>,
}
#[derive(Clone, PartialEq, ::prost::Message)]
pub struct Image {
    #[prost(string, tag = "1")]
    pub id: ::prost::alloc::string::String,
    #[prost(string, repeated, tag = "2")]
    pub repo_tags: ::prost::alloc::vec::Vec<::prost::alloc::string::String>,
    #[prost(string, repeated, tag = "3")]
    pub repo_digests: ::prost::alloc::vec::Vec<::prost::alloc::string::String>,
    #[prost(uint64, tag = "4")]
    pub size: u64,
    #[prost(message, optional, tag = "5")]
    pub uid: ::core::option::Option<Int64Value>,
    #[prost(string, tag = "6")]
    pub username: ::prost::alloc::string::String,
    #[prost(message, optional, tag = "7")]
    pub spec: ::core::option::Option<ImageSpec>,
    #[prost(bool, tag = "8")]
    pub pinned: bool,
}
#[derive(Clone, PartialEq, ::prost::Message)]
pub struct ListImagesResponse {
    #[prost(message, repeated, tag = "1")]
    pub images: ::prost::alloc::vec::Vec<Image>,
}
#[derive(Clone, PartialEq, ::prost::Message)]
pub struct StreamImagesRequest {
    #[prost(message, optional, tag = "1")]
    pub filter: ::core::option::Option<ImageFilter>,
}
#[derive(Clone, PartialEq, ::prost::Message)]
pub struct StreamImagesResponse {
    #[prost(message, repeated, tag = "1")]
    pub images: ::prost::alloc::vec::Vec<Image>,
}
#[derive(Clone, PartialEq, ::prost::Message)]
pub struct ImageStatusRequest {
    #[prost(message, optional, tag = "1")]
    pub image: ::core::option::Option<ImageSpec>,
    #[prost(bool, tag = "2")]
    pub verbose: bool,
}
#[derive(Clone, PartialEq, ::prost::Message)]
pub struct ImageStatusResponse {
    #[prost(message, optional, tag = "1")]
    pub image: ::core::option::Option<Image>,
    #[prost(map = "string, string", tag = "2")]
    pub info: ::std::collections::HashMap<
        ::prost::alloc::string::String,
        ::prost::alloc::string::String,
    >,
}
#[derive(Clone, PartialEq, Eq, Hash, ::prost::Message)]
pub struct AuthConfig {
    #[prost(string, tag = "1")]
    pub username: ::prost::alloc::string::String,
    #[prost(string, tag = "2")]
    pub password: ::prost::alloc::string::String,
    #[prost(string, tag = "3")]
    pub auth: ::prost::alloc::string::String,
    #[prost(string, tag = "4")]
    pub server_address: ::prost::alloc::string::String,
    #[prost(string, tag = "5")]
    pub identity_token: ::prost::alloc::string::String,
    #[prost(string, tag = "6")]
    pub registry_token: ::prost::alloc::string::String,
}
#[derive(Clone, PartialEq, ::prost::Message)]
pub struct PullImageRequest {
    #[prost(message, optional, tag = "1")]
    pub image: ::core::option::Option<ImageSpec>,
    #[prost(message, optional, tag = "2")]
    pub auth: ::core::option::Option<AuthConfig>,
    #[prost(message, optional, tag = "3")]
    pub sandbox_config: ::core::option::Option<PodSandboxConfig>,
}
#[derive(Clone, PartialEq, Eq, Hash, ::prost::Message)]
pub struct PullImageResponse {
    #[prost(string, tag = "1")]
    pub image_ref: ::prost::alloc::string::String,
}
#[derive(Clone, PartialEq, ::prost::Message)]
pub struct RemoveImageRequest {
    #[prost(message, optional, tag = "1")]
    pub image: ::core::option::Option<ImageSpec>,
}
#[derive(Clone, Copy, PartialEq, Eq, Hash, ::prost::Message)]
pub struct RemoveImageResponse {}
#[derive(Clone, PartialEq, Eq, Hash, ::prost::Message)]
pub struct NetworkConfig {
    #[prost(string, tag = "1")]
    pub pod_cidr: ::prost::alloc::string::String,
}
#[derive(Clone, PartialEq, Eq, Hash, ::prost::Message)]
pub struct RuntimeConfig {
    #[prost(message, optional, tag = "1")]
    pub network_config: ::core::option::Option<NetworkConfig>,
}
#[derive(Clone, PartialEq, Eq, Hash, ::prost::Message)]
pub struct UpdateRuntimeConfigRequest {
    #[prost(message, optional, tag = "1")]
    pub runtime_config: ::core::option::Option<RuntimeConfig>,
}
#[derive(Clone, Copy, PartialEq, Eq, Hash, ::prost::Message)]
pub struct UpdateRuntimeConfigResponse {}
#[derive(Clone, PartialEq, Eq, Hash, ::prost::Message)]
pub struct RuntimeCondition {
    #[prost(string, tag = "1")]
    pub r#type: ::prost::alloc::string::String,
    #[prost(bool, tag = "2")]
    pub status: bool,
    #[prost(string, tag = "3")]
    pub reason: ::prost::alloc::string::String,
    #[prost(string, tag = "4")]
    pub message: ::prost::alloc::string::String,
}
#[derive(Clone, PartialEq, ::prost::Message)]
pub struct RuntimeStatus {
    #[prost(message, repeated, tag = "1")]
    pub conditions: ::prost::alloc::vec::Vec<RuntimeCondition>,
}
#[derive(Clone, Copy, PartialEq, Eq, Hash, ::prost::Message)]
pub struct StatusRequest {
    #[prost(bool, tag = "1")]
    pub verbose: bool,
}
#[derive(Clone, Copy, PartialEq, Eq, Hash, ::prost::Message)]
pub struct RuntimeHandlerFeatures {
    #[prost(bool, tag = "1")]
    pub recursive_read_only_mounts: bool,
    #[prost(bool, tag = "2")]
    pub user_namespaces: bool,
}
#[derive(Clone, PartialEq, Eq, Hash, ::prost::Message)]
pub struct RuntimeHandler {
    #[prost(string, tag = "1")]
    pub name: ::prost::alloc::string::String,
    #[prost(message, optional, tag = "2")]
    pub features: ::core::option::Option<RuntimeHandlerFeatures>,
}
#[derive(Clone, Copy, PartialEq, Eq, Hash, ::prost::Message)]
pub struct RuntimeFeatures {
    #[prost(bool, tag = "1")]
    pub supplemental_groups_policy: bool,
    #[prost(bool, tag = "2")]
    pub user_namespaces_host_network: bool,
}
#[derive(Clone, PartialEq, ::prost::Message)]
pub struct StatusResponse {
    #[prost(message, optional, tag = "1")]
    pub status: ::core::option::Option<RuntimeStatus>,
    #[prost(map = "string, string", tag = "2")]
    pub info: ::std::collections::HashMap<
        ::prost::alloc::string::String,
        ::prost::alloc::string::String,
    >,
    #[prost(message, repeated, tag = "3")]
    pub runtime_handlers: ::prost::alloc::vec::Vec<RuntimeHandler>,
    #[prost(message, optional, tag = "4")]
    pub features: ::core::option::Option<RuntimeFeatures>,
}
#[derive(Clone, Copy, PartialEq, Eq, Hash, ::prost::Message)]
pub struct ImageFsInfoRequest {}
#[derive(Clone, Copy, PartialEq, Eq, Hash, ::prost::Message)]
pub struct UInt64Value {
    #[prost(uint64, tag = "1")]
    pub value: u64,
}
#[derive(Clone, PartialEq, Eq, Hash, ::prost::Message)]
pub struct FilesystemIdentifier {
    #[prost(string, tag = "1")]
    pub mountpoint: ::prost::alloc::string::String,
}
#[derive(Clone, PartialEq, Eq, Hash, ::prost::Message)]
pub struct FilesystemUsage {
    #[prost(int64, tag = "1")]
    pub timestamp: i64,
    #[prost(message, optional, tag = "2")]
    pub fs_id: ::core::option::Option<FilesystemIdentifier>,
    #[prost(message, optional, tag = "3")]
    pub used_bytes: ::core::option::Option<UInt64Value>,
    #[prost(message, optional, tag = "4")]
    pub inodes_used: ::core::option::Option<UInt64Value>,
}
#[derive(Clone, PartialEq, Eq, Hash, ::prost::Message)]
pub struct WindowsFilesystemUsage {
    #[prost(int64, tag = "1")]
    pub timestamp: i64,
    #[prost(message, optional, tag = "2")]
    pub fs_id: ::core::option::Option<FilesystemIdentifier>,
    #[prost(message, optional, tag = "3")]
    pub used_bytes: ::core::option::Option<UInt64Value>,
}
#[derive(Clone, PartialEq, ::prost::Message)]
pub struct ImageFsInfoResponse {
    #[prost(message, repeated, tag = "1")]
    pub image_filesystems: ::prost::alloc::vec::Vec<FilesystemUsage>,
    #[prost(message, repeated, tag = "2")]
    pub container_filesystems: ::prost::alloc::vec::Vec<FilesystemUsage>,
}
#[derive(Clone, PartialEq, Eq, Hash, ::prost::Message)]
pub struct ContainerStatsRequest {
    #[prost(string, tag = "1")]
    pub container_id: ::prost::alloc::string::String,
}
#[derive(Clone, PartialEq, ::prost::Message)]
pub struct ContainerStatsResponse {
    #[prost(message, optional, tag = "1")]
    pub stats: ::core::option::Option<ContainerStats>,
}
#[derive(Clone, PartialEq, ::prost::Message)]
pub struct ListContainerStatsRequest {
    #[prost(message, optional, tag = "1")]
    pub filter: ::core::option::Option<ContainerStatsFilter>,
}
#[derive(Clone, PartialEq, ::prost::Message)]
pub struct ContainerStatsFilter {
    #[prost(string, tag = "1")]
    pub id: ::prost::alloc::string::String,
    #[prost(string, tag = "2")]
    pub pod_sandbox_id: ::prost::alloc::string::String,
    #[prost(map = "string, string", tag = "3")]
    pub label_selector: ::std::collections::HashMap<
        ::prost::alloc::string::String,
        ::prost::alloc::string::String,
    >,
}
#[derive(Clone, PartialEq, ::prost::Message)]
pub struct ListContainerStatsResponse {
    #[prost(message, repeated, tag = "1")]
    pub stats: ::prost::alloc::vec::Vec<ContainerStats>,
}
#[derive(Clone, PartialEq, ::prost::Message)]
pub struct StreamContainerStatsRequest {
    #[prost(message, optional, tag = "1")]
    pub filter: ::core::option::Option<ContainerStatsFilter>,
}
#[derive(Clone, PartialEq, ::prost::Message)]
pub struct StreamContainerStatsResponse {
    #[prost(message, repeated, tag = "1")]
    pub container_stats: ::prost::alloc::vec::Vec<ContainerStats>,
}
#[derive(Clone, PartialEq, ::prost::Message)]
pub struct ContainerAttributes {
    #[prost(string, tag = "1")]
    pub id: ::prost::alloc::string::String,
    #[prost(message, optional, tag = "2")]
    pub metadata: ::core::option::Option<ContainerMetadata>,
    #[prost(map = "string, string", tag = "3")]
    pub labels: ::std::collections::HashMap<
        ::prost::alloc::string::String,
        ::prost::alloc::string::String,
    >,
    #[prost(map = "string, string", tag = "4")]
    pub annotations: ::std::collections::HashMap<
        ::prost::alloc::string::String,
        ::prost::alloc::string::String,
    >,
}
#[derive(Clone, PartialEq, ::prost::Message)]
pub struct ContainerStats {
    #[prost(message, optional, tag = "1")]
    pub attributes: ::core::option::Option<ContainerAttributes>,
    #[prost(message, optional, tag = "2")]
    pub cpu: ::core::option::Option<CpuUsage>,
    #[prost(message, optional, tag = "3")]
    pub memory: ::core::option::Option<MemoryUsage>,
    #[prost(message, optional, tag = "4")]
    pub writable_layer: ::core::option::Option<FilesystemUsage>,
    #[prost(message, optional, tag = "5")]
    pub swap: ::core::option::Option<SwapUsage>,
    #[prost(message, optional, tag = "6")]
    pub io: ::core::option::Option<IoUsage>,
}
#[derive(Clone, PartialEq, ::prost::Message)]
pub struct WindowsContainerStats {
    #[prost(message, optional, tag = "1")]
    pub attributes: ::core::option::Option<ContainerAttributes>,
    #[prost(message, optional, tag = "2")]
    pub cpu: ::core::option::Option<WindowsCpuUsage>,
    #[prost(message, optional, tag = "3")]
    pub memory: ::core::option::Option<WindowsMemoryUsage>,
    #[prost(message, optional, tag = "4")]
    pub writable_layer: ::core::option::Option<WindowsFilesystemUsage>,
}
#[derive(Clone, Copy, PartialEq, ::prost::Message)]
pub struct PsiStats {
    #[prost(message, optional, tag = "1")]
    pub full: ::core::option::Option<PsiData>,
    #[prost(message, optional, tag = "2")]
    pub some: ::core::option::Option<PsiData>,
}
#[derive(Clone, Copy, PartialEq, ::prost::Message)]
pub struct PsiData {
    #[prost(uint64, tag = "1")]
    pub total: u64,
    #[prost(double, tag = "2")]
    pub avg10: f64,
    #[prost(double, tag = "3")]
    pub avg60: f64,
    #[prost(double, tag = "4")]
    pub avg300: f64,
}
#[derive(Clone, Copy, PartialEq, ::prost::Message)]
pub struct CpuUsage {
    #[prost(int64, tag = "1")]
    pub timestamp: i64,
    #[prost(message, optional, tag = "2")]
    pub usage_core_nano_seconds: ::core::option::Option<UInt64Value>,
    #[prost(message, optional, tag = "3")]
    pub usage_nano_cores: ::core::option::Option<UInt64Value>,
    #[prost(message, optional, tag = "4")]
    pub psi: ::core::option::Option<PsiStats>,
}
#[derive(Clone, Copy, PartialEq, Eq, Hash, ::prost::Message)]
pub struct WindowsCpuUsage {
    #[prost(int64, tag = "1")]
    pub timestamp: i64,
    #[prost(message, optional, tag = "2")]
    pub usage_core_nano_seconds: ::core::option::Option<UInt64Value>,
    #[prost(message, optional, tag = "3")]
    pub usage_nano_cores: ::core::option::Option<UInt64Value>,
}
#[derive(Clone, Copy, PartialEq, ::prost::Message)]
pub struct MemoryUsage {
    #[prost(int64, tag = "1")]
    pub timestamp: i64,
    #[prost(message, optional, tag = "2")]
    pub working_set_bytes: ::core::option::Option<UInt64Value>,
    #[prost(message, optional, tag = "3")]
    pub available_bytes: ::core::option::Option<UInt64Value>,
    #[prost(message, optional, tag = "4")]
    pub usage_bytes: ::core::option::Option<UInt64Value>,
    #[prost(message, optional, tag = "5")]
    pub rss_bytes: ::core::option::Option<UInt64Value>,
    #[prost(message, optional, tag = "6")]
    pub page_faults: ::core::option::Option<UInt64Value>,
    #[prost(message, optional, tag = "7")]
    pub major_page_faults: ::core::option::Option<UInt64Value>,
    #[prost(message, optional, tag = "8")]
    pub psi: ::core::option::Option<PsiStats>,
}
#[derive(Clone, Copy, PartialEq, ::prost::Message)]
pub struct IoUsage {
    #[prost(int64, tag = "1")]
    pub timestamp: i64,
    #[prost(message, optional, tag = "2")]
    pub psi: ::core::option::Option<PsiStats>,
}
#[derive(Clone, Copy, PartialEq, Eq, Hash, ::prost::Message)]
pub struct SwapUsage {
    #[prost(int64, tag = "1")]
    pub timestamp: i64,
    #[prost(message, optional, tag = "2")]
    pub swap_available_bytes: ::core::option::Option<UInt64Value>,
    #[prost(message, optional, tag = "3")]
    pub swap_usage_bytes: ::core::option::Option<UInt64Value>,
}
#[derive(Clone, Copy, PartialEq, Eq, Hash, ::prost::Message)]
pub struct WindowsMemoryUsage {
    #[prost(int64, tag = "1")]
    pub timestamp: i64,
    #[prost(message, optional, tag = "2")]
    pub working_set_bytes: ::core::option::Option<UInt64Value>,
    #[prost(message, optional, tag = "3")]
    pub available_bytes: ::core::option::Option<UInt64Value>,
    #[prost(message, optional, tag = "4")]
    pub page_faults: ::core::option::Option<UInt64Value>,
    #[prost(message, optional, tag = "5")]
    pub commit_memory_bytes: ::core::option::Option<UInt64Value>,
}
#[derive(Clone, PartialEq, Eq, Hash, ::prost::Message)]
pub struct ReopenContainerLogRequest {
    #[prost(string, tag = "1")]
    pub container_id: ::prost::alloc::string::String,
}
#[derive(Clone, Copy, PartialEq, Eq, Hash, ::prost::Message)]
pub struct ReopenContainerLogResponse {}
#[derive(Clone, PartialEq, Eq, Hash, ::prost::Message)]
pub struct CheckpointContainerRequest {
    #[prost(string, tag = "1")]
    pub container_id: ::prost::alloc::string::String,
    #[prost(string, tag = "2")]
    pub location: ::prost::alloc::string::String,
    #[prost(int64, tag = "3")]
    pub timeout: i64,
}
#[derive(Clone, Copy, PartialEq, Eq, Hash, ::prost::Message)]
pub struct CheckpointContainerResponse {}
#[derive(Clone, Copy, PartialEq, Eq, Hash, ::prost::Message)]
pub struct GetEventsRequest {}
#[derive(Clone, PartialEq, ::prost::Message)]
pub struct ContainerEventResponse {
    #[prost(string, tag = "1")]
    pub container_id: ::prost::alloc::string::String,
    #[prost(enumeration = "ContainerEventType", tag = "2")]
    pub container_event_type: i32,
    #[prost(int64, tag = "3")]
    pub created_at: i64,
    #[prost(message, optional, tag = "4")]
    pub pod_sandbox_status: ::core::option::Option<PodSandboxStatus>,
    #[prost(message, repeated, tag = "5")]
    pub containers_statuses: ::prost::alloc::vec::Vec<ContainerStatus>,
}
#[derive(Clone, Copy, PartialEq, Eq, Hash, ::prost::Message)]
pub struct ListMetricDescriptorsRequest {}
#[derive(Clone, PartialEq, ::prost::Message)]
pub struct ListMetricDescriptorsResponse {
    #[prost(message, repeated, tag = "1")]
    pub descriptors: ::prost::alloc::vec::Vec<MetricDescriptor>,
}
#[derive(Clone, PartialEq, Eq, Hash, ::prost::Message)]
pub struct MetricDescriptor {
    #[prost(string, tag = "1")]
    pub name: ::prost::alloc::string::String,
    #[prost(string, tag = "2")]
    pub help: ::prost::alloc::string::String,
    #[prost(string, repeated, tag = "3")]
    pub label_keys: ::prost::alloc::vec::Vec<::prost::alloc::string::String>,
}
#[derive(Clone, Copy, PartialEq, Eq, Hash, ::prost::Message)]
pub struct ListPodSandboxMetricsRequest {}
#[derive(Clone, PartialEq, ::prost::Message)]
pub struct ListPodSandboxMetricsResponse {
    #[prost(message, repeated, tag = "1")]
    pub pod_metrics: ::prost::alloc::vec::Vec<PodSandboxMetrics>,
}
#[derive(Clone, Copy, PartialEq, Eq, Hash, ::prost::Message)]
pub struct StreamPodSandboxMetricsRequest {}
#[derive(Clone, PartialEq, ::prost::Message)]
pub struct StreamPodSandboxMetricsResponse {
    #[prost(message, repeated, tag = "1")]
    pub pod_sandbox_metrics: ::prost::alloc::vec::Vec<PodSandboxMetrics>,
}
#[derive(Clone, PartialEq, ::prost::Message)]
pub struct PodSandboxMetrics {
    #[prost(string, tag = "1")]
    pub pod_sandbox_id: ::prost::alloc::string::String,
    #[prost(message, repeated, tag = "2")]
    pub metrics: ::prost::alloc::vec::Vec<Metric>,
    #[prost(message, repeated, tag = "3")]
    pub container_metrics: ::prost::alloc::vec::Vec<ContainerMetrics>,
}
#[derive(Clone, PartialEq, ::prost::Message)]
pub struct ContainerMetrics {
    #[prost(string, tag = "1")]
    pub container_id: ::prost::alloc::string::String,
    #[prost(message, repeated, tag = "2")]
    pub metrics: ::prost::alloc::vec::Vec<Metric>,
}
#[derive(Clone, PartialEq, Eq, Hash, ::prost::Message)]
pub struct Metric {
    #[prost(string, tag = "1")]
    pub name: ::prost::alloc::string::String,
    #[prost(int64, tag = "2")]
    pub timestamp: i64,
    #[prost(enumeration = "MetricType", tag = "3")]
    pub metric_type: i32,
    #[prost(string, repeated, tag = "4")]
    pub label_values: ::prost::alloc::vec::Vec<::prost::alloc::string::String>,
    #[prost(message, optional, tag = "5")]
    pub value: ::core::option::Option<UInt64Value>,
}
#[derive(Clone, Copy, PartialEq, Eq, Hash, ::prost::Message)]
pub struct RuntimeConfigRequest {}
#[derive(Clone, Copy, PartialEq, Eq, Hash, ::prost::Message)]
pub struct RuntimeConfigResponse {
    #[prost(message, optional, tag = "1")]
    pub linux: ::core::option::Option<LinuxRuntimeConfiguration>,
}
#[derive(Clone, Copy, PartialEq, Eq, Hash, ::prost::Message)]
pub struct LinuxRuntimeConfiguration {
    #[prost(enumeration = "CgroupDriver", tag = "1")]
    pub cgroup_driver: i32,
}
#[derive(Clone, PartialEq, ::prost::Message)]
pub struct UpdatePodSandboxResourcesRequest {
    #[prost(string, tag = "1")]
    pub pod_sandbox_id: ::prost::alloc::string::String,
    #[prost(message, optional, tag = "2")]
    pub overhead: ::core::option::Option<LinuxContainerResources>,
    #[prost(message, optional, tag = "3")]
    pub resources: ::core::option::Option<LinuxContainerResources>,
}
#[derive(Clone, Copy, PartialEq, Eq, Hash, ::prost::Message)]
pub struct UpdatePodSandboxResourcesResponse {}
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, ::prost::Enumeration)]
#[repr(i32)]
pub enum Protocol {
    Tcp = 0,
    Udp = 1,
    Sctp = 2,
}
impl Protocol {
    /// String value of the enum field names used in the ProtoBuf definition.
    ///
    /// The values are not transformed in any way and thus are considered stable
    /// (if the ProtoBuf definition does not change) and safe for programmatic use.
    pub fn as_str_name(&self) -> &'static str {
        match self {
            Self::Tcp => "TCP",
            Self::Udp => "UDP",
            Self::Sctp => "SCTP",
        }
    }
    /// Creates an enum from field names used in the ProtoBuf definition.
    pub fn from_str_name(value: &str) -> ::core::option::Option<Self> {
        match value {
            "TCP" => Some(Self::Tcp),
            "UDP" => Some(Self::Udp),
            "SCTP" => Some(Self::Sctp),
            _ => None,
        }
    }
}
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, ::prost::Enumeration)]
#[repr(i32)]
pub enum MountPropagation {
    PropagationPrivate = 0,
    PropagationHostToContainer = 1,
    PropagationBidirectional = 2,
}
impl MountPropagation {
    /// String value of the enum field names used in the ProtoBuf definition.
    ///
    /// The values are not transformed in any way and thus are considered stable
    /// (if the ProtoBuf definition does not change) and safe for programmatic use.
    pub fn as_str_name(&self) -> &'static str {
        match self {
            Self::PropagationPrivate => "PROPAGATION_PRIVATE",
            Self::PropagationHostToContainer => "PROPAGATION_HOST_TO_CONTAINER",
            Self::PropagationBidirectional => "PROPAGATION_BIDIRECTIONAL",
        }
    }
    /// Creates an enum from field names used in the ProtoBuf definition.
    pub fn from_str_name(value: &str) -> ::core::option::Option<Self> {
        match value {
            "PROPAGATION_PRIVATE" => Some(Self::PropagationPrivate),
            "PROPAGATION_HOST_TO_CONTAINER" => Some(Self::PropagationHostToContainer),
            "PROPAGATION_BIDIRECTIONAL" => Some(Self::PropagationBidirectional),
            _ => None,
        }
    }
}
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, ::prost::Enumeration)]
#[repr(i32)]
pub enum NamespaceMode {
    Pod = 0,
    Container = 1,
    Node = 2,
    Target = 3,
}
impl NamespaceMode {
    /// String value of the enum field names used in the ProtoBuf definition.
    ///
    /// The values are not transformed in any way and thus are considered stable
    /// (if the ProtoBuf definition does not change) and safe for programmatic use.
    pub fn as_str_name(&self) -> &'static str {
        match self {
            Self::Pod => "POD",
            Self::Container => "CONTAINER",
            Self::Node => "NODE",
            Self::Target => "TARGET",
        }
    }
    /// Creates an enum from field names used in the ProtoBuf definition.
    pub fn from_str_name(value: &str) -> ::core::option::Option<Self> {
        match value {
            "POD" => Some(Self::Pod),
            "CONTAINER" => Some(Self::Container),
            "NODE" => Some(Self::Node),
            "TARGET" => Some(Self::Target),
            _ => None,
        }
    }
}
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, ::prost::Enumeration)]
#[repr(i32)]
pub enum SupplementalGroupsPolicy {
    Merge = 0,
    Strict = 1,
}
impl SupplementalGroupsPolicy {
    /// String value of the enum field names used in the ProtoBuf definition.
    ///
    /// The values are not transformed in any way and thus are considered stable
    /// (if the ProtoBuf definition does not change) and safe for programmatic use.
    pub fn as_str_name(&self) -> &'static str {
        match self {
            Self::Merge => "Merge",
            Self::Strict => "Strict",
        }
    }
    /// Creates an enum from field names used in the ProtoBuf definition.
    pub fn from_str_name(value: &str) -> ::core::option::Option<Self> {
        match value {
            "Merge" => Some(Self::Merge),
            "Strict" => Some(Self::Strict),
            _ => None,
        }
    }
}
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, ::prost::Enumeration)]
#[repr(i32)]
pub enum PodSandboxState {
    SandboxReady = 0,
    SandboxNotready = 1,
}
impl PodSandboxState {
    /// String value of the enum field names used in the ProtoBuf definition.
    ///
    /// The values are not transformed in any way and thus are considered stable
    /// (if the ProtoBuf definition does not change) and safe for programmatic use.
    pub fn as_str_name(&self) -> &'static str {
        match self {
            Self::SandboxReady => "SANDBOX_READY",
            Self::SandboxNotready => "SANDBOX_NOTREADY",
        }
    }
    /// Creates an enum from field names used in the ProtoBuf definition.
    pub fn from_str_name(value: &str) -> ::core::option::Option<Self> {
        match value {
            "SANDBOX_READY" => Some(Self::SandboxReady),
            "SANDBOX_NOTREADY" => Some(Self::SandboxNotready),
            _ => None,
        }
    }
}
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, ::prost::Enumeration)]
#[repr(i32)]
pub enum Signal {
    RuntimeDefault = 0,
    Sigabrt = 1,
    Sigalrm = 2,
    Sigbus = 3,
    Sigchld = 4,
    Sigcld = 5,
    Sigcont = 6,
    Sigfpe = 7,
    Sighup = 8,
    Sigill = 9,
    Sigint = 10,
    Sigio = 11,
    Sigiot = 12,
    Sigkill = 13,
    Sigpipe = 14,
    Sigpoll = 15,
    Sigprof = 16,
    Sigpwr = 17,
    Sigquit = 18,
    Sigsegv = 19,
    Sigstkflt = 20,
    Sigstop = 21,
    Sigsys = 22,
    Sigterm = 23,
    Sigtrap = 24,
    Sigtstp = 25,
    Sigttin = 26,
    Sigttou = 27,
    Sigurg = 28,
    Sigusr1 = 29,
    Sigusr2 = 30,
    Sigvtalrm = 31,
    Sigwinch = 32,
    Sigxcpu = 33,
    Sigxfsz = 34,
    Sigrtmin = 35,
    Sigrtminplus1 = 36,
    Sigrtminplus2 = 37,
    Sigrtminplus3 = 38,
    Sigrtminplus4 = 39,
    Sigrtminplus5 = 40,
    Sigrtminplus6 = 41,
    Sigrtminplus7 = 42,
    Sigrtminplus8 = 43,
    Sigrtminplus9 = 44,
    Sigrtminplus10 = 45,
    Sigrtminplus11 = 46,
    Sigrtminplus12 = 47,
    Sigrtminplus13 = 48,
    Sigrtminplus14 = 49,
    Sigrtminplus15 = 50,
    Sigrtmaxminus14 = 51,
    Sigrtmaxminus13 = 52,
    Sigrtmaxminus12 = 53,
    Sigrtmaxminus11 = 54,
    Sigrtmaxminus10 = 55,
    Sigrtmaxminus9 = 56,
    Sigrtmaxminus8 = 57,
    Sigrtmaxminus7 = 58,
    Sigrtmaxminus6 = 59,
    Sigrtmaxminus5 = 60,
    Sigrtmaxminus4 = 61,
    Sigrtmaxminus3 = 62,
    Sigrtmaxminus2 = 63,
    Sigrtmaxminus1 = 64,
    Sigrtmax = 65,
}
impl Signal {
    /// String value of the enum field names used in the ProtoBuf definition.
    ///
    /// The values are not transformed in any way and thus are considered stable
    /// (if the ProtoBuf definition does not change) and safe for programmatic use.
    pub fn as_str_name(&self) -> &'static str {
        match self {
            Self::RuntimeDefault => "RUNTIME_DEFAULT",
            Self::Sigabrt => "SIGABRT",
            Self::Sigalrm => "SIGALRM",
            Self::Sigbus => "SIGBUS",
            Self::Sigchld => "SIGCHLD",
            Self::Sigcld => "SIGCLD",
            Self::Sigcont => "SIGCONT",
            Self::Sigfpe => "SIGFPE",
            Self::Sighup => "SIGHUP",
            Self::Sigill => "SIGILL",
            Self::Sigint => "SIGINT",
            Self::Sigio => "SIGIO",
            Self::Sigiot => "SIGIOT",
            Self::Sigkill => "SIGKILL",
            Self::Sigpipe => "SIGPIPE",
            Self::Sigpoll => "SIGPOLL",
            Self::Sigprof => "SIGPROF",
            Self::Sigpwr => "SIGPWR",
            Self::Sigquit => "SIGQUIT",
            Self::Sigsegv => "SIGSEGV",
            Self::Sigstkflt => "SIGSTKFLT",
            Self::Sigstop => "SIGSTOP",
            Self::Sigsys => "SIGSYS",
            Self::Sigterm => "SIGTERM",
            Self::Sigtrap => "SIGTRAP",
            Self::Sigtstp => "SIGTSTP",
            Self::Sigttin => "SIGTTIN",
            Self::Sigttou => "SIGTTOU",
            Self::Sigurg => "SIGURG",
            Self::Sigusr1 => "SIGUSR1",
            Self::Sigusr2 => "SIGUSR2",
            Self::Sigvtalrm => "SIGVTALRM",
            Self::Sigwinch => "SIGWINCH",
            Self::Sigxcpu => "SIGXCPU",
            Self::Sigxfsz => "SIGXFSZ",
            Self::Sigrtmin => "SIGRTMIN",
            Self::Sigrtminplus1 => "SIGRTMINPLUS1",
            Self::Sigrtminplus2 => "SIGRTMINPLUS2",
            Self::Sigrtminplus3 => "SIGRTMINPLUS3",
            Self::Sigrtminplus4 => "SIGRTMINPLUS4",
            Self::Sigrtminplus5 => "SIGRTMINPLUS5",
            Self::Sigrtminplus6 => "SIGRTMINPLUS6",
            Self::Sigrtminplus7 => "SIGRTMINPLUS7",
            Self::Sigrtminplus8 => "SIGRTMINPLUS8",
            Self::Sigrtminplus9 => "SIGRTMINPLUS9",
            Self::Sigrtminplus10 => "SIGRTMINPLUS10",
            Self::Sigrtminplus11 => "SIGRTMINPLUS11",
            Self::Sigrtminplus12 => "SIGRTMINPLUS12",
            Self::Sigrtminplus13 => "SIGRTMINPLUS13",
            Self::Sigrtminplus14 => "SIGRTMINPLUS14",
            Self::Sigrtminplus15 => "SIGRTMINPLUS15",
            Self::Sigrtmaxminus14 => "SIGRTMAXMINUS14",
            Self::Sigrtmaxminus13 => "SIGRTMAXMINUS13",
            Self::Sigrtmaxminus12 => "SIGRTMAXMINUS12",
            Self::Sigrtmaxminus11 => "SIGRTMAXMINUS11",
            Self::Sigrtmaxminus10 => "SIGRTMAXMINUS10",
            Self::Sigrtmaxminus9 => "SIGRTMAXMINUS9",
            Self::Sigrtmaxminus8 => "SIGRTMAXMINUS8",
            Self::Sigrtmaxminus7 => "SIGRTMAXMINUS7",
            Self::Sigrtmaxminus6 => "SIGRTMAXMINUS6",
            Self::Sigrtmaxminus5 => "SIGRTMAXMINUS5",
            Self::Sigrtmaxminus4 => "SIGRTMAXMINUS4",
            Self::Sigrtmaxminus3 => "SIGRTMAXMINUS3",
            Self::Sigrtmaxminus2 => "SIGRTMAXMINUS2",
            Self::Sigrtmaxminus1 => "SIGRTMAXMINUS1",
            Self::Sigrtmax => "SIGRTMAX",
        }
    }
    /// Creates an enum from field names used in the ProtoBuf definition.
    pub fn from_str_name(value: &str) -> ::core::option::Option<Self> {
        match value {
            "RUNTIME_DEFAULT" => Some(Self::RuntimeDefault),
            "SIGABRT" => Some(Self::Sigabrt),
            "SIGALRM" => Some(Self::Sigalrm),
            "SIGBUS" => Some(Self::Sigbus),
            "SIGCHLD" => Some(Self::Sigchld),
            "SIGCLD" => Some(Self::Sigcld),
            "SIGCONT" => Some(Self::Sigcont),
            "SIGFPE" => Some(Self::Sigfpe),
            "SIGHUP" => Some(Self::Sighup),
            "SIGILL" => Some(Self::Sigill),
            "SIGINT" => Some(Self::Sigint),
            "SIGIO" => Some(Self::Sigio),
            "SIGIOT" => Some(Self::Sigiot),
            "SIGKILL" => Some(Self::Sigkill),
            "SIGPIPE" => Some(Self::Sigpipe),
            "SIGPOLL" => Some(Self::Sigpoll),
            "SIGPROF" => Some(Self::Sigprof),
            "SIGPWR" => Some(Self::Sigpwr),
            "SIGQUIT" => Some(Self::Sigquit),
            "SIGSEGV" => Some(Self::Sigsegv),
            "SIGSTKFLT" => Some(Self::Sigstkflt),
            "SIGSTOP" => Some(Self::Sigstop),
            "SIGSYS" => Some(Self::Sigsys),
            "SIGTERM" => Some(Self::Sigterm),
            "SIGTRAP" => Some(Self::Sigtrap),
            "SIGTSTP" => Some(Self::Sigtstp),
            "SIGTTIN" => Some(Self::Sigttin),
            "SIGTTOU" => Some(Self::Sigttou),
            "SIGURG" => Some(Self::Sigurg),
            "SIGUSR1" => Some(Self::Sigusr1),
            "SIGUSR2" => Some(Self::Sigusr2),
            "SIGVTALRM" => Some(Self::Sigvtalrm),
            "SIGWINCH" => Some(Self::Sigwinch),
            "SIGXCPU" => Some(Self::Sigxcpu),
            "SIGXFSZ" => Some(Self::Sigxfsz),
            "SIGRTMIN" => Some(Self::Sigrtmin),
            "SIGRTMINPLUS1" => Some(Self::Sigrtminplus1),
            "SIGRTMINPLUS2" => Some(Self::Sigrtminplus2),
            "SIGRTMINPLUS3" => Some(Self::Sigrtminplus3),
            "SIGRTMINPLUS4" => Some(Self::Sigrtminplus4),
            "SIGRTMINPLUS5" => Some(Self::Sigrtminplus5),
            "SIGRTMINPLUS6" => Some(Self::Sigrtminplus6),
            "SIGRTMINPLUS7" => Some(Self::Sigrtminplus7),
            "SIGRTMINPLUS8" => Some(Self::Sigrtminplus8),
            "SIGRTMINPLUS9" => Some(Self::Sigrtminplus9),
            "SIGRTMINPLUS10" => Some(Self::Sigrtminplus10),
            "SIGRTMINPLUS11" => Some(Self::Sigrtminplus11),
            "SIGRTMINPLUS12" => Some(Self::Sigrtminplus12),
            "SIGRTMINPLUS13" => Some(Self::Sigrtminplus13),
            "SIGRTMINPLUS14" => Some(Self::Sigrtminplus14),
            "SIGRTMINPLUS15" => Some(Self::Sigrtminplus15),
            "SIGRTMAXMINUS14" => Some(Self::Sigrtmaxminus14),
            "SIGRTMAXMINUS13" => Some(Self::Sigrtmaxminus13),
            "SIGRTMAXMINUS12" => Some(Self::Sigrtmaxminus12),
            "SIGRTMAXMINUS11" => Some(Self::Sigrtmaxminus11),
            "SIGRTMAXMINUS10" => Some(Self::Sigrtmaxminus10),
            "SIGRTMAXMINUS9" => Some(Self::Sigrtmaxminus9),
            "SIGRTMAXMINUS8" => Some(Self::Sigrtmaxminus8),
            "SIGRTMAXMINUS7" => Some(Self::Sigrtmaxminus7),
            "SIGRTMAXMINUS6" => Some(Self::Sigrtmaxminus6),
            "SIGRTMAXMINUS5" => Some(Self::Sigrtmaxminus5),
            "SIGRTMAXMINUS4" => Some(Self::Sigrtmaxminus4),
            "SIGRTMAXMINUS3" => Some(Self::Sigrtmaxminus3),
            "SIGRTMAXMINUS2" => Some(Self::Sigrtmaxminus2),
            "SIGRTMAXMINUS1" => Some(Self::Sigrtmaxminus1),
            "SIGRTMAX" => Some(Self::Sigrtmax),
            _ => None,
        }
    }
}
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, ::prost::Enumeration)]
#[repr(i32)]
pub enum ContainerState {
    ContainerCreated = 0,
    ContainerRunning = 1,
    ContainerExited = 2,
    ContainerUnknown = 3,
}
impl ContainerState {
    /// String value of the enum field names used in the ProtoBuf definition.
    ///
    /// The values are not transformed in any way and thus are considered stable
    /// (if the ProtoBuf definition does not change) and safe for programmatic use.
    pub fn as_str_name(&self) -> &'static str {
        match self {
            Self::ContainerCreated => "CONTAINER_CREATED",
            Self::ContainerRunning => "CONTAINER_RUNNING",
            Self::ContainerExited => "CONTAINER_EXITED",
            Self::ContainerUnknown => "CONTAINER_UNKNOWN",
        }
    }
    /// Creates an enum from field names used in the ProtoBuf definition.
    pub fn from_str_name(value: &str) -> ::core::option::Option<Self> {
        match value {
            "CONTAINER_CREATED" => Some(Self::ContainerCreated),
            "CONTAINER_RUNNING" => Some(Self::ContainerRunning),
            "CONTAINER_EXITED" => Some(Self::ContainerExited),
            "CONTAINER_UNKNOWN" => Some(Self::ContainerUnknown),
            _ => None,
        }
    }
}
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, ::prost::Enumeration)]
#[repr(i32)]
pub enum ContainerEventType {
    ContainerCreatedEvent = 0,
    ContainerStartedEvent = 1,
    ContainerStoppedEvent = 2,
    ContainerDeletedEvent = 3,
}
impl ContainerEventType {
    /// String value of the enum field names used in the ProtoBuf definition.
    ///
    /// The values are not transformed in any way and thus are considered stable
    /// (if the ProtoBuf definition does not change) and safe for programmatic use.
    pub fn as_str_name(&self) -> &'static str {
        match self {
            Self::ContainerCreatedEvent => "CONTAINER_CREATED_EVENT",
            Self::ContainerStartedEvent => "CONTAINER_STARTED_EVENT",
            Self::ContainerStoppedEvent => "CONTAINER_STOPPED_EVENT",
            Self::ContainerDeletedEvent => "CONTAINER_DELETED_EVENT",
        }
    }
    /// Creates an enum from field names used in the ProtoBuf definition.
    pub fn from_str_name(value: &str) -> ::core::option::Option<Self> {
        match value {
            "CONTAINER_CREATED_EVENT" => Some(Self::ContainerCreatedEvent),
            "CONTAINER_STARTED_EVENT" => Some(Self::ContainerStartedEvent),
            "CONTAINER_STOPPED_EVENT" => Some(Self::ContainerStoppedEvent),
            "CONTAINER_DELETED_EVENT" => Some(Self::ContainerDeletedEvent),
            _ => None,
        }
    }
}
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, ::prost::Enumeration)]
#[repr(i32)]
pub enum MetricType {
    Counter = 0,
    Gauge = 1,
}
impl MetricType {
    /// String value of the enum field names used in the ProtoBuf definition.
    ///
    /// The values are not transformed in any way and thus are considered stable
    /// (if the ProtoBuf definition does not change) and safe for programmatic use.
    pub fn as_str_name(&self) -> &'static str {
        match self {
            Self::Counter => "COUNTER",
            Self::Gauge => "GAUGE",
        }
    }
    /// Creates an enum from field names used in the ProtoBuf definition.
    pub fn from_str_name(value: &str) -> ::core::option::Option<Self> {
        match value {
            "COUNTER" => Some(Self::Counter),
            "GAUGE" => Some(Self::Gauge),
            _ => None,
        }
    }
}
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, ::prost::Enumeration)]
#[repr(i32)]
pub enum CgroupDriver {
    Systemd = 0,
    Cgroupfs = 1,
}
impl CgroupDriver {
    /// String value of the enum field names used in the ProtoBuf definition.
    ///
    /// The values are not transformed in any way and thus are considered stable
    /// (if the ProtoBuf definition does not change) and safe for programmatic use.
    pub fn as_str_name(&self) -> &'static str {
        match self {
            Self::Systemd => "SYSTEMD",
            Self::Cgroupfs => "CGROUPFS",
        }
    }
    /// Creates an enum from field names used in the ProtoBuf definition.
    pub fn from_str_name(value: &str) -> ::core::option::Option<Self> {
        match value {
            "SYSTEMD" => Some(Self::Systemd),
            "CGROUPFS" => Some(Self::Cgroupfs),
            _ => None,
        }
    }
}
/// Generated client implementations.
pub mod runtime_service_client {
    #![allow(
        unused_variables,
        dead_code,
        missing_docs,
        clippy::wildcard_imports,
        clippy::let_unit_value,
    )]
    use tonic::codegen::*;
    use tonic::codegen::http::Uri;
    #[derive(Debug, Clone)]
    pub struct RuntimeServiceClient<T> {
        inner: tonic::client::Grpc<T>,
    }
    impl<T> RuntimeServiceClient<T>
    where
        T: tonic::client::GrpcService<tonic::body::Body>,
        T::Error: Into<StdError>,
        T::ResponseBody: Body<Data = Bytes> + std::marker::Send + 'static,
        <T::ResponseBody as Body>::Error: Into<StdError> + std::marker::Send,
    {
        pub fn new(inner: T) -> Self {
            let inner = tonic::client::Grpc::new(inner);
            Self { inner }
        }
        pub fn with_origin(inner: T, origin: Uri) -> Self {
            let inner = tonic::client::Grpc::with_origin(inner, origin);
            Self { inner }
        }
        pub fn with_interceptor<F>(
            inner: T,
            interceptor: F,
        ) -> RuntimeServiceClient<InterceptedService<T, F>>
        where
            F: tonic::service::Interceptor,
            T::ResponseBody: Default,
            T: tonic::codegen::Service<
                http::Request<tonic::body::Body>,
                Response = http::Response<
                    <T as tonic::client::GrpcService<tonic::body::Body>>::ResponseBody,
                >,
            >,
            <T as tonic::codegen::Service<
                http::Request<tonic::body::Body>,
            >>::Error: Into<StdError> + std::marker::Send + std::marker::Sync,
        {
            RuntimeServiceClient::new(InterceptedService::new(inner, interceptor))
        }
        /// Compress requests with the given encoding.
        ///
        /// This requires the server to support it otherwise it might respond with an
        /// error.
        #[must_use]
        pub fn send_compressed(mut self, encoding: CompressionEncoding) -> Self {
            self.inner = self.inner.send_compressed(encoding);
            self
        }
        /// Enable decompressing responses.
        #[must_use]
        pub fn accept_compressed(mut self, encoding: CompressionEncoding) -> Self {
            self.inner = self.inner.accept_compressed(encoding);
            self
        }
        /// Limits the maximum size of a decoded message.
        ///
        /// Default: `4MB`
        #[must_use]
        pub fn max_decoding_message_size(mut self, limit: usize) -> Self {
            self.inner = self.inner.max_decoding_message_size(limit);
            self
        }
        /// Limits the maximum size of an encoded message.
        ///
        /// Default: `usize::MAX`
        #[must_use]
        pub fn max_encoding_message_size(mut self, limit: usize) -> Self {
            self.inner = self.inner.max_encoding_message_size(limit);
            self
        }
        pub async fn version(
            &mut self,
            request: impl tonic::IntoRequest<super::VersionRequest>,
        ) -> std::result::Result<
            tonic::Response<super::VersionResponse>,
            tonic::Status,
        > {
            self.inner
                .ready()
                .await
                .map_err(|e| {
                    tonic::Status::unknown(
                        format!("Service was not ready: {}", e.into()),
                    )
                })?;
            let codec = tonic_prost::ProstCodec::default();
            let path = http::uri::PathAndQuery::from_static(
                "/runtime.v1.RuntimeService/Version",
            );
            let mut req = request.into_request();
            req.extensions_mut()
                .insert(GrpcMethod::new("runtime.v1.RuntimeService", "Version"));
            self.inner.unary(req, path, codec).await
        }
        pub async fn run_pod_sandbox(
            &mut self,
            request: impl tonic::IntoRequest<super::RunPodSandboxRequest>,
        ) -> std::result::Result<
            tonic::Response<super::RunPodSandboxResponse>,
            tonic::Status,
        > {
            self.inner
                .ready()
                .await
                .map_err(|e| {
                    tonic::Status::unknown(
                        format!("Service was not ready: {}", e.into()),
                    )
                })?;
            let codec = tonic_prost::ProstCodec::default();
            let path = http::uri::PathAndQuery::from_static(
                "/runtime.v1.RuntimeService/RunPodSandbox",
            );
            let mut req = request.into_request();
            req.extensions_mut()
                .insert(GrpcMethod::new("runtime.v1.RuntimeService", "RunPodSandbox"));
            self.inner.unary(req, path, codec).await
        }
        pub async fn stop_pod_sandbox(
            &mut self,
            request: impl tonic::IntoRequest<super::StopPodSandboxRequest>,
        ) -> std::result::Result<
            tonic::Response<super::StopPodSandboxResponse>,
            tonic::Status,
        > {
            self.inner
                .ready()
                .await
                .map_err(|e| {
                    tonic::Status::unknown(
                        format!("Service was not ready: {}", e.into()),
                    )
                })?;
            let codec = tonic_prost::ProstCodec::default();
            let path = http::uri::PathAndQuery::from_static(
                "/runtime.v1.RuntimeService/StopPodSandbox",
            );
            let mut req = request.into_request();
            req.extensions_mut()
                .insert(GrpcMethod::new("runtime.v1.RuntimeService", "StopPodSandbox"));
            self.inner.unary(req, path, codec).await
        }
        pub async fn remove_pod_sandbox(
            &mut self,
            request: impl tonic::IntoRequest<super::RemovePodSandboxRequest>,
        ) -> std::result::Result<
            tonic::Response<super::RemovePodSandboxResponse>,
            tonic::Status,
        > {
            self.inner
                .ready()
                .await
                .map_err(|e| {
                    tonic::Status::unknown(
                        format!("Service was not ready: {}", e.into()),
                    )
                })?;
            let codec = tonic_prost::ProstCodec::default();
            let path = http::uri::PathAndQuery::from_static(
                "/runtime.v1.RuntimeService/RemovePodSandbox",
            );
            let mut req = request.into_request();
            req.extensions_mut()
                .insert(
                    GrpcMethod::new("runtime.v1.RuntimeService", "RemovePodSandbox"),
                );
            self.inner.unary(req, path, codec).await
        }
        pub async fn pod_sandbox_status(
            &mut self,
            request: impl tonic::IntoRequest<super::PodSandboxStatusRequest>,
        ) -> std::result::Result<
            tonic::Response<super::PodSandboxStatusResponse>,
            tonic::Status,
        > {
            self.inner
                .ready()
                .await
                .map_err(|e| {
                    tonic::Status::unknown(
                        format!("Service was not ready: {}", e.into()),
                    )
                })?;
            let codec = tonic_prost::ProstCodec::default();
            let path = http::uri::PathAndQuery::from_static(
                "/runtime.v1.RuntimeService/PodSandboxStatus",
            );
            let mut req = request.into_request();
            req.extensions_mut()
                .insert(
                    GrpcMethod::new("runtime.v1.RuntimeService", "PodSandboxStatus"),
                );
            self.inner.unary(req, path, codec).await
        }
        pub async fn list_pod_sandbox(
            &mut self,
            request: impl tonic::IntoRequest<super::ListPodSandboxRequest>,
        ) -> std::result::Result<
            tonic::Response<super::ListPodSandboxResponse>,
            tonic::Status,
        > {
            self.inner
                .ready()
                .await
                .map_err(|e| {
                    tonic::Status::unknown(
                        format!("Service was not ready: {}", e.into()),
                    )
                })?;
            let codec = tonic_prost::ProstCodec::default();
            let path = http::uri::PathAndQuery::from_static(
                "/runtime.v1.RuntimeService/ListPodSandbox",
            );
            let mut req = request.into_request();
            req.extensions_mut()
                .insert(GrpcMethod::new("runtime.v1.RuntimeService", "ListPodSandbox"));
            self.inner.unary(req, path, codec).await
        }
        pub async fn stream_pod_sandboxes(
            &mut self,
            request: impl tonic::IntoRequest<super::StreamPodSandboxesRequest>,
        ) -> std::result::Result<
            tonic::Response<tonic::codec::Streaming<super::StreamPodSandboxesResponse>>,
            tonic::Status,
        > {
            self.inner
                .ready()
                .await
                .map_err(|e| {
                    tonic::Status::unknown(
                        format!("Service was not ready: {}", e.into()),
                    )
                })?;
            let codec = tonic_prost::ProstCodec::default();
            let path = http::uri::PathAndQuery::from_static(
                "/runtime.v1.RuntimeService/StreamPodSandboxes",
            );
            let mut req = request.into_request();
            req.extensions_mut()
                .insert(
                    GrpcMethod::new("runtime.v1.RuntimeService", "StreamPodSandboxes"),
                );
            self.inner.server_streaming(req, path, codec).await
        }
        pub async fn create_container(
            &mut self,
            request: impl tonic::IntoRequest<super::CreateContainerRequest>,
        ) -> std::result::Result<
            tonic::Response<super::CreateContainerResponse>,
            tonic::Status,
        > {
            self.inner
                .ready()
                .await
                .map_err(|e| {
                    tonic::Status::unknown(
                        format!("Service was not ready: {}", e.into()),
                    )
                })?;
            let codec = tonic_prost::ProstCodec::default();
            let path = http::uri::PathAndQuery::from_static(
                "/runtime.v1.RuntimeService/CreateContainer",
            );
            let mut req = request.into_request();
            req.extensions_mut()
                .insert(GrpcMethod::new("runtime.v1.RuntimeService", "CreateContainer"));
            self.inner.unary(req, path, codec).await
        }
        pub async fn start_container(
            &mut self,
            request: impl tonic::IntoRequest<super::StartContainerRequest>,
        ) -> std::result::Result<
            tonic::Response<super::StartContainerResponse>,
            tonic::Status,
        > {
            self.inner
                .ready()
                .await
                .map_err(|e| {
                    tonic::Status::unknown(
                        format!("Service was not ready: {}", e.into()),
                    )
                })?;
            let codec = tonic_prost::ProstCodec::default();
            let path = http::uri::PathAndQuery::from_static(
                "/runtime.v1.RuntimeService/StartContainer",
            );
            let mut req = request.into_request();
            req.extensions_mut()
                .insert(GrpcMethod::new("runtime.v1.RuntimeService", "StartContainer"));
            self.inner.unary(req, path, codec).await
        }
        pub async fn stop_container(
            &mut self,
            request: impl tonic::IntoRequest<super::StopContainerRequest>,
        ) -> std::result::Result<
            tonic::Response<super::StopContainerResponse>,
            tonic::Status,
        > {
            self.inner
                .ready()
                .await
                .map_err(|e| {
                    tonic::Status::unknown(
                        format!("Service was not ready: {}", e.into()),
                    )
                })?;
            let codec = tonic_prost::ProstCodec::default();
            let path = http::uri::PathAndQuery::from_static(
                "/runtime.v1.RuntimeService/StopContainer",
            );
            let mut req = request.into_request();
            req.extensions_mut()
                .insert(GrpcMethod::new("runtime.v1.RuntimeService", "StopContainer"));
            self.inner.unary(req, path, codec).await
        }
        pub async fn remove_container(
            &mut self,
            request: impl tonic::IntoRequest<super::RemoveContainerRequest>,
        ) -> std::result::Result<
            tonic::Response<super::RemoveContainerResponse>,
            tonic::Status,
        > {
            self.inner
                .ready()
                .await
                .map_err(|e| {
                    tonic::Status::unknown(
                        format!("Service was not ready: {}", e.into()),
                    )
                })?;
            let codec = tonic_prost::ProstCodec::default();
            let path = http::uri::PathAndQuery::from_static(
                "/runtime.v1.RuntimeService/RemoveContainer",
            );
            let mut req = request.into_request();
            req.extensions_mut()
                .insert(GrpcMethod::new("runtime.v1.RuntimeService", "RemoveContainer"));
            self.inner.unary(req, path, codec).await
        }
        pub async fn list_containers(
            &mut self,
            request: impl tonic::IntoRequest<super::ListContainersRequest>,
        ) -> std::result::Result<
            tonic::Response<super::ListContainersResponse>,
            tonic::Status,
        > {
            self.inner
                .ready()
                .await
                .map_err(|e| {
                    tonic::Status::unknown(
                        format!("Service was not ready: {}", e.into()),
                    )
                })?;
            let codec = tonic_prost::ProstCodec::default();
            let path = http::uri::PathAndQuery::from_static(
                "/runtime.v1.RuntimeService/ListContainers",
            );
            let mut req = request.into_request();
            req.extensions_mut()
                .insert(GrpcMethod::new("runtime.v1.RuntimeService", "ListContainers"));
            self.inner.unary(req, path, codec).await
        }
        pub async fn stream_containers(
            &mut self,
            request: impl tonic::IntoRequest<super::StreamContainersRequest>,
        ) -> std::result::Result<
            tonic::Response<tonic::codec::Streaming<super::StreamContainersResponse>>,
            tonic::Status,
        > {
            self.inner
                .ready()
                .await
                .map_err(|e| {
                    tonic::Status::unknown(
                        format!("Service was not ready: {}", e.into()),
                    )
                })?;
            let codec = tonic_prost::ProstCodec::default();
            let path = http::uri::PathAndQuery::from_static(
                "/runtime.v1.RuntimeService/StreamContainers",
            );
            let mut req = request.into_request();
            req.extensions_mut()
                .insert(
                    GrpcMethod::new("runtime.v1.RuntimeService", "StreamContainers"),
                );
            self.inner.server_streaming(req, path, codec).await
        }
        pub async fn container_status(
            &mut self,
            request: impl tonic::IntoRequest<super::ContainerStatusRequest>,
        ) -> std::result::Result<
            tonic::Response<super::ContainerStatusResponse>,
            tonic::Status,
        > {
            self.inner
                .ready()
                .await
                .map_err(|e| {
                    tonic::Status::unknown(
                        format!("Service was not ready: {}", e.into()),
                    )
                })?;
            let codec = tonic_prost::ProstCodec::default();
            let path = http::uri::PathAndQuery::from_static(
                "/runtime.v1.RuntimeService/ContainerStatus",
            );
            let mut req = request.into_request();
            req.extensions_mut()
                .insert(GrpcMethod::new("runtime.v1.RuntimeService", "ContainerStatus"));
            self.inner.unary(req, path, codec).await
        }
        pub async fn update_container_resources(
            &mut self,
            request: impl tonic::IntoRequest<super::UpdateContainerResourcesRequest>,
        ) -> std::result::Result<
            tonic::Response<super::UpdateContainerResourcesResponse>,
            tonic::Status,
        > {
            self.inner
                .ready()
                .await
                .map_err(|e| {
                    tonic::Status::unknown(
                        format!("Service was not ready: {}", e.into()),
                    )
                })?;
            let codec = tonic_prost::ProstCodec::default();
            let path = http::uri::PathAndQuery::from_static(
                "/runtime.v1.RuntimeService/UpdateContainerResources",
            );
            let mut req = request.into_request();
            req.extensions_mut()
                .insert(
                    GrpcMethod::new(
                        "runtime.v1.RuntimeService",
                        "UpdateContainerResources",
                    ),
                );
            self.inner.unary(req, path, codec).await
        }
        pub async fn reopen_container_log(
            &mut self,
            request: impl tonic::IntoRequest<super::ReopenContainerLogRequest>,
        ) -> std::result::Result<
            tonic::Response<super::ReopenContainerLogResponse>,
            tonic::Status,
        > {
            self.inner
                .ready()
                .await
                .map_err(|e| {
                    tonic::Status::unknown(
                        format!("Service was not ready: {}", e.into()),
                    )
                })?;
            let codec = tonic_prost::ProstCodec::default();
            let path = http::uri::PathAndQuery::from_static(
                "/runtime.v1.RuntimeService/ReopenContainerLog",
            );
            let mut req = request.into_request();
            req.extensions_mut()
                .insert(
                    GrpcMethod::new("runtime.v1.RuntimeService", "ReopenContainerLog"),
                );
            self.inner.unary(req, path, codec).await
        }
        pub async fn exec_sync(
            &mut self,
            request: impl tonic::IntoRequest<super::ExecSyncRequest>,
        ) -> std::result::Result<
            tonic::Response<super::ExecSyncResponse>,
            tonic::Status,
        > {
            self.inner
                .ready()
                .await
                .map_err(|e| {
                    tonic::Status::unknown(
                        format!("Service was not ready: {}", e.into()),
                    )
                })?;
            let codec = tonic_prost::ProstCodec::default();
            let path = http::uri::PathAndQuery::from_static(
                "/runtime.v1.RuntimeService/ExecSync",
            );
            let mut req = request.into_request();
            req.extensions_mut()
                .insert(GrpcMethod::new("runtime.v1.RuntimeService", "ExecSync"));
            self.inner.unary(req, path, codec).await
        }
        pub async fn exec(
            &mut self,
            request: impl tonic::IntoRequest<super::ExecRequest>,
        ) -> std::result::Result<tonic::Response<super::ExecResponse>, tonic::Status> {
            self.inner
                .ready()
                .await
                .map_err(|e| {
                    tonic::Status::unknown(
                        format!("Service was not ready: {}", e.into()),
                    )
                })?;
            let codec = tonic_prost::ProstCodec::default();
            let path = http::uri::PathAndQuery::from_static(
                "/runtime.v1.RuntimeService/Exec",
            );
            let mut req = request.into_request();
            req.extensions_mut()
                .insert(GrpcMethod::new("runtime.v1.RuntimeService", "Exec"));
            self.inner.unary(req, path, codec).await
        }
        pub async fn attach(
            &mut self,
            request: impl tonic::IntoRequest<super::AttachRequest>,
        ) -> std::result::Result<tonic::Response<super::AttachResponse>, tonic::Status> {
            self.inner
                .ready()
                .await
                .map_err(|e| {
                    tonic::Status::unknown(
                        format!("Service was not ready: {}", e.into()),
                    )
                })?;
            let codec = tonic_prost::ProstCodec::default();
            let path = http::uri::PathAndQuery::from_static(
                "/runtime.v1.RuntimeService/Attach",
            );
            let mut req = request.into_request();
            req.extensions_mut()
                .insert(GrpcMethod::new("runtime.v1.RuntimeService", "Attach"));
            self.inner.unary(req, path, codec).await
        }
        pub async fn port_forward(
            &mut self,
            request: impl tonic::IntoRequest<super::PortForwardRequest>,
        ) -> std::result::Result<
            tonic::Response<super::PortForwardResponse>,
            tonic::Status,
        > {
            self.inner
                .ready()
                .await
                .map_err(|e| {
                    tonic::Status::unknown(
                        format!("Service was not ready: {}", e.into()),
                    )
                })?;
            let codec = tonic_prost::ProstCodec::default();
            let path = http::uri::PathAndQuery::from_static(
                "/runtime.v1.RuntimeService/PortForward",
            );
            let mut req = request.into_request();
            req.extensions_mut()
                .insert(GrpcMethod::new("runtime.v1.RuntimeService", "PortForward"));
            self.inner.unary(req, path, codec).await
        }
        pub async fn container_stats(
            &mut self,
            request: impl tonic::IntoRequest<super::ContainerStatsRequest>,
        ) -> std::result::Result<
            tonic::Response<super::ContainerStatsResponse>,
            tonic::Status,
        > {
            self.inner
                .ready()
                .await
                .map_err(|e| {
                    tonic::Status::unknown(
                        format!("Service was not ready: {}", e.into()),
                    )
                })?;
            let codec = tonic_prost::ProstCodec::default();
            let path = http::uri::PathAndQuery::from_static(
                "/runtime.v1.RuntimeService/ContainerStats",
            );
            let mut req = request.into_request();
            req.extensions_mut()
                .insert(GrpcMethod::new("runtime.v1.RuntimeService", "ContainerStats"));
            self.inner.unary(req, path, codec).await
        }
        pub async fn list_container_stats(
            &mut self,
            request: impl tonic::IntoRequest<super::ListContainerStatsRequest>,
        ) -> std::result::Result<
            tonic::Response<super::ListContainerStatsResponse>,
            tonic::Status,
        > {
            self.inner
                .ready()
                .await
                .map_err(|e| {
                    tonic::Status::unknown(
                        format!("Service was not ready: {}", e.into()),
                    )
                })?;
            let codec = tonic_prost::ProstCodec::default();
            let path = http::uri::PathAndQuery::from_static(
                "/runtime.v1.RuntimeService/ListContainerStats",
            );
            let mut req = request.into_request();
            req.extensions_mut()
                .insert(
                    GrpcMethod::new("runtime.v1.RuntimeService", "ListContainerStats"),
                );
            self.inner.unary(req, path, codec).await
        }
        pub async fn stream_container_stats(
            &mut self,
            request: impl tonic::IntoRequest<super::StreamContainerStatsRequest>,
        ) -> std::result::Result<
            tonic::Response<
                tonic::codec::Streaming<super::StreamContainerStatsResponse>,
            >,
            tonic::Status,
        > {
            self.inner
                .ready()
                .await
                .map_err(|e| {
                    tonic::Status::unknown(
                        format!("Service was not ready: {}", e.into()),
                    )
                })?;
            let codec = tonic_prost::ProstCodec::default();
            let path = http::uri::PathAndQuery::from_static(
                "/runtime.v1.RuntimeService/StreamContainerStats",
            );
            let mut req = request.into_request();
            req.extensions_mut()
                .insert(
                    GrpcMethod::new("runtime.v1.RuntimeService", "StreamContainerStats"),
                );
            self.inner.server_streaming(req, path, codec).await
        }
        pub async fn pod_sandbox_stats(
            &mut self,
            request: impl tonic::IntoRequest<super::PodSandboxStatsRequest>,
        ) -> std::result::Result<
            tonic::Response<super::PodSandboxStatsResponse>,
            tonic::Status,
        > {
            self.inner
                .ready()
                .await
                .map_err(|e| {
                    tonic::Status::unknown(
                        format!("Service was not ready: {}", e.into()),
                    )
                })?;
            let codec = tonic_prost::ProstCodec::default();
            let path = http::uri::PathAndQuery::from_static(
                "/runtime.v1.RuntimeService/PodSandboxStats",
            );
            let mut req = request.into_request();
            req.extensions_mut()
                .insert(GrpcMethod::new("runtime.v1.RuntimeService", "PodSandboxStats"));
            self.inner.unary(req, path, codec).await
        }
        pub async fn list_pod_sandbox_stats(
            &mut self,
            request: impl tonic::IntoRequest<super::ListPodSandboxStatsRequest>,
        ) -> std::result::Result<
            tonic::Response<super::ListPodSandboxStatsResponse>,
            tonic::Status,
        > {
            self.inner
                .ready()
                .await
                .map_err(|e| {
                    tonic::Status::unknown(
                        format!("Service was not ready: {}", e.into()),
                    )
                })?;
            let codec = tonic_prost::ProstCodec::default();
            let path = http::uri::PathAndQuery::from_static(
                "/runtime.v1.RuntimeService/ListPodSandboxStats",
            );
            let mut req = request.into_request();
            req.extensions_mut()
                .insert(
                    GrpcMethod::new("runtime.v1.RuntimeService", "ListPodSandboxStats"),
                );
            self.inner.unary(req, path, codec).await
        }
        pub async fn stream_pod_sandbox_stats(
            &mut self,
            request: impl tonic::IntoRequest<super::StreamPodSandboxStatsRequest>,
        ) -> std::result::Result<
            tonic::Response<
                tonic::codec::Streaming<super::StreamPodSandboxStatsResponse>,
            >,
            tonic::Status,
        > {
            self.inner
                .ready()
                .await
                .map_err(|e| {
                    tonic::Status::unknown(
                        format!("Service was not ready: {}", e.into()),
                    )
                })?;
            let codec = tonic_prost::ProstCodec::default();
            let path = http::uri::PathAndQuery::from_static(
                "/runtime.v1.RuntimeService/StreamPodSandboxStats",
            );
            let mut req = request.into_request();
            req.extensions_mut()
                .insert(
                    GrpcMethod::new("runtime.v1.RuntimeService", "StreamPodSandboxStats"),
                );
            self.inner.server_streaming(req, path, codec).await
        }
        pub async fn update_runtime_config(
            &mut self,
            request: impl tonic::IntoRequest<super::UpdateRuntimeConfigRequest>,
        ) -> std::result::Result<
            tonic::Response<super::UpdateRuntimeConfigResponse>,
            tonic::Status,
        > {
            self.inner
                .ready()
                .await
                .map_err(|e| {
                    tonic::Status::unknown(
                        format!("Service was not ready: {}", e.into()),
                    )
                })?;
            let codec = tonic_prost::ProstCodec::default();
            let path = http::uri::PathAndQuery::from_static(
                "/runtime.v1.RuntimeService/UpdateRuntimeConfig",
            );
            let mut req = request.into_request();
            req.extensions_mut()
                .insert(
                    GrpcMethod::new("runtime.v1.RuntimeService", "UpdateRuntimeConfig"),
                );
            self.inner.unary(req, path, codec).await
        }
        pub async fn status(
            &mut self,
            request: impl tonic::IntoRequest<super::StatusRequest>,
        ) -> std::result::Result<tonic::Response<super::StatusResponse>, tonic::Status> {
            self.inner
                .ready()
                .await
                .map_err(|e| {
                    tonic::Status::unknown(
                        format!("Service was not ready: {}", e.into()),
                    )
                })?;
            let codec = tonic_prost::ProstCodec::default();
            let path = http::uri::PathAndQuery::from_static(
                "/runtime.v1.RuntimeService/Status",
            );
            let mut req = request.into_request();
            req.extensions_mut()
                .insert(GrpcMethod::new("runtime.v1.RuntimeService", "Status"));
            self.inner.unary(req, path, codec).await
        }
        pub async fn checkpoint_container(
            &mut self,
            request: impl tonic::IntoRequest<super::CheckpointContainerRequest>,
        ) -> std::result::Result<
            tonic::Response<super::CheckpointContainerResponse>,
            tonic::Status,
        > {
            self.inner
                .ready()
                .await
                .map_err(|e| {
                    tonic::Status::unknown(
                        format!("Service was not ready: {}", e.into()),
                    )
                })?;
            let codec = tonic_prost::ProstCodec::default();
            let path = http::uri::PathAndQuery::from_static(
                "/runtime.v1.RuntimeService/CheckpointContainer",
            );
            let mut req = request.into_request();
            req.extensions_mut()
                .insert(
                    GrpcMethod::new("runtime.v1.RuntimeService", "CheckpointContainer"),
                );
            self.inner.unary(req, path, codec).await
        }
        pub async fn get_container_events(
            &mut self,
            request: impl tonic::IntoRequest<super::GetEventsRequest>,
        ) -> std::result::Result<
            tonic::Response<tonic::codec::Streaming<super::ContainerEventResponse>>,
            tonic::Status,
        > {
            self.inner
                .ready()
                .await
                .map_err(|e| {
                    tonic::Status::unknown(
                        format!("Service was not ready: {}", e.into()),
                    )
                })?;
            let codec = tonic_prost::ProstCodec::default();
            let path = http::uri::PathAndQuery::from_static(
                "/runtime.v1.RuntimeService/GetContainerEvents",
            );
            let mut req = request.into_request();
            req.extensions_mut()
                .insert(
                    GrpcMethod::new("runtime.v1.RuntimeService", "GetContainerEvents"),
                );
            self.inner.server_streaming(req, path, codec).await
        }
        pub async fn list_metric_descriptors(
            &mut self,
            request: impl tonic::IntoRequest<super::ListMetricDescriptorsRequest>,
        ) -> std::result::Result<
            tonic::Response<super::ListMetricDescriptorsResponse>,
            tonic::Status,
        > {
            self.inner
                .ready()
                .await
                .map_err(|e| {
                    tonic::Status::unknown(
                        format!("Service was not ready: {}", e.into()),
                    )
                })?;
            let codec = tonic_prost::ProstCodec::default();
            let path = http::uri::PathAndQuery::from_static(
                "/runtime.v1.RuntimeService/ListMetricDescriptors",
            );
            let mut req = request.into_request();
            req.extensions_mut()
                .insert(
                    GrpcMethod::new("runtime.v1.RuntimeService", "ListMetricDescriptors"),
                );
            self.inner.unary(req, path, codec).await
        }
        pub async fn list_pod_sandbox_metrics(
            &mut self,
            request: impl tonic::IntoRequest<super::ListPodSandboxMetricsRequest>,
        ) -> std::result::Result<
            tonic::Response<super::ListPodSandboxMetricsResponse>,
            tonic::Status,
        > {
            self.inner
                .ready()
                .await
                .map_err(|e| {
                    tonic::Status::unknown(
                        format!("Service was not ready: {}", e.into()),
                    )
                })?;
            let codec = tonic_prost::ProstCodec::default();
            let path = http::uri::PathAndQuery::from_static(
                "/runtime.v1.RuntimeService/ListPodSandboxMetrics",
            );
            let mut req = request.into_request();
            req.extensions_mut()
                .insert(
                    GrpcMethod::new("runtime.v1.RuntimeService", "ListPodSandboxMetrics"),
                );
            self.inner.unary(req, path, codec).await
        }
        pub async fn stream_pod_sandbox_metrics(
            &mut self,
            request: impl tonic::IntoRequest<super::StreamPodSandboxMetricsRequest>,
        ) -> std::result::Result<
            tonic::Response<
                tonic::codec::Streaming<super::StreamPodSandboxMetricsResponse>,
            >,
            tonic::Status,
        > {
            self.inner
                .ready()
                .await
                .map_err(|e| {
                    tonic::Status::unknown(
                        format!("Service was not ready: {}", e.into()),
                    )
                })?;
            let codec = tonic_prost::ProstCodec::default();
            let path = http::uri::PathAndQuery::from_static(
                "/runtime.v1.RuntimeService/StreamPodSandboxMetrics",
            );
            let mut req = request.into_request();
            req.extensions_mut()
                .insert(
                    GrpcMethod::new(
                        "runtime.v1.RuntimeService",
                        "StreamPodSandboxMetrics",
                    ),
                );
            self.inner.server_streaming(req, path, codec).await
        }
        pub async fn runtime_config(
            &mut self,
            request: impl tonic::IntoRequest<super::RuntimeConfigRequest>,
        ) -> std::result::Result<
            tonic::Response<super::RuntimeConfigResponse>,
            tonic::Status,
        > {
            self.inner
                .ready()
                .await
                .map_err(|e| {
                    tonic::Status::unknown(
                        format!("Service was not ready: {}", e.into()),
                    )
                })?;
            let codec = tonic_prost::ProstCodec::default();
            let path = http::uri::PathAndQuery::from_static(
                "/runtime.v1.RuntimeService/RuntimeConfig",
            );
            let mut req = request.into_request();
            req.extensions_mut()
                .insert(GrpcMethod::new("runtime.v1.RuntimeService", "RuntimeConfig"));
            self.inner.unary(req, path, codec).await
        }
        pub async fn update_pod_sandbox_resources(
            &mut self,
            request: impl tonic::IntoRequest<super::UpdatePodSandboxResourcesRequest>,
        ) -> std::result::Result<
            tonic::Response<super::UpdatePodSandboxResourcesResponse>,
            tonic::Status,
        > {
            self.inner
                .ready()
                .await
                .map_err(|e| {
                    tonic::Status::unknown(
                        format!("Service was not ready: {}", e.into()),
                    )
                })?;
            let codec = tonic_prost::ProstCodec::default();
            let path = http::uri::PathAndQuery::from_static(
                "/runtime.v1.RuntimeService/UpdatePodSandboxResources",
            );
            let mut req = request.into_request();
            req.extensions_mut()
                .insert(
                    GrpcMethod::new(
                        "runtime.v1.RuntimeService",
                        "UpdatePodSandboxResources",
                    ),
                );
            self.inner.unary(req, path, codec).await
        }
    }
}
/// Generated server implementations.
pub mod runtime_service_server {
    #![allow(
        unused_variables,
        dead_code,
        missing_docs,
        clippy::wildcard_imports,
        clippy::let_unit_value,
    )]
    use tonic::codegen::*;
    /// Generated trait containing gRPC methods that should be implemented for use with RuntimeServiceServer.
    #[async_trait]
    pub trait RuntimeService: std::marker::Send + std::marker::Sync + 'static {
        async fn version(
            &self,
            request: tonic::Request<super::VersionRequest>,
        ) -> std::result::Result<tonic::Response<super::VersionResponse>, tonic::Status>;
        async fn run_pod_sandbox(
            &self,
            request: tonic::Request<super::RunPodSandboxRequest>,
        ) -> std::result::Result<
            tonic::Response<super::RunPodSandboxResponse>,
            tonic::Status,
        >;
        async fn stop_pod_sandbox(
            &self,
            request: tonic::Request<super::StopPodSandboxRequest>,
        ) -> std::result::Result<
            tonic::Response<super::StopPodSandboxResponse>,
            tonic::Status,
        >;
        async fn remove_pod_sandbox(
            &self,
            request: tonic::Request<super::RemovePodSandboxRequest>,
        ) -> std::result::Result<
            tonic::Response<super::RemovePodSandboxResponse>,
            tonic::Status,
        >;
        async fn pod_sandbox_status(
            &self,
            request: tonic::Request<super::PodSandboxStatusRequest>,
        ) -> std::result::Result<
            tonic::Response<super::PodSandboxStatusResponse>,
            tonic::Status,
        >;
        async fn list_pod_sandbox(
            &self,
            request: tonic::Request<super::ListPodSandboxRequest>,
        ) -> std::result::Result<
            tonic::Response<super::ListPodSandboxResponse>,
            tonic::Status,
        >;
        /// Server streaming response type for the StreamPodSandboxes method.
        type StreamPodSandboxesStream: tonic::codegen::tokio_stream::Stream<
                Item = std::result::Result<
                    super::StreamPodSandboxesResponse,
                    tonic::Status,
                >,
            >
            + std::marker::Send
            + 'static;
        async fn stream_pod_sandboxes(
            &self,
            request: tonic::Request<super::StreamPodSandboxesRequest>,
        ) -> std::result::Result<
            tonic::Response<Self::StreamPodSandboxesStream>,
            tonic::Status,
        >;
        async fn create_container(
            &self,
            request: tonic::Request<super::CreateContainerRequest>,
        ) -> std::result::Result<
            tonic::Response<super::CreateContainerResponse>,
            tonic::Status,
        >;
        async fn start_container(
            &self,
            request: tonic::Request<super::StartContainerRequest>,
        ) -> std::result::Result<
            tonic::Response<super::StartContainerResponse>,
            tonic::Status,
        >;
        async fn stop_container(
            &self,
            request: tonic::Request<super::StopContainerRequest>,
        ) -> std::result::Result<
            tonic::Response<super::StopContainerResponse>,
            tonic::Status,
        >;
        async fn remove_container(
            &self,
            request: tonic::Request<super::RemoveContainerRequest>,
        ) -> std::result::Result<
            tonic::Response<super::RemoveContainerResponse>,
            tonic::Status,
        >;
        async fn list_containers(
            &self,
            request: tonic::Request<super::ListContainersRequest>,
        ) -> std::result::Result<
            tonic::Response<super::ListContainersResponse>,
            tonic::Status,
        >;
        /// Server streaming response type for the StreamContainers method.
        type StreamContainersStream: tonic::codegen::tokio_stream::Stream<
                Item = std::result::Result<
                    super::StreamContainersResponse,
                    tonic::Status,
                >,
            >
            + std::marker::Send
            + 'static;
        async fn stream_containers(
            &self,
            request: tonic::Request<super::StreamContainersRequest>,
        ) -> std::result::Result<
            tonic::Response<Self::StreamContainersStream>,
            tonic::Status,
        >;
        async fn container_status(
            &self,
            request: tonic::Request<super::ContainerStatusRequest>,
        ) -> std::result::Result<
            tonic::Response<super::ContainerStatusResponse>,
            tonic::Status,
        >;
        async fn update_container_resources(
            &self,
            request: tonic::Request<super::UpdateContainerResourcesRequest>,
        ) -> std::result::Result<
            tonic::Response<super::UpdateContainerResourcesResponse>,
            tonic::Status,
        >;
        async fn reopen_container_log(
            &self,
            request: tonic::Request<super::ReopenContainerLogRequest>,
        ) -> std::result::Result<
            tonic::Response<super::ReopenContainerLogResponse>,
            tonic::Status,
        >;
        async fn exec_sync(
            &self,
            request: tonic::Request<super::ExecSyncRequest>,
        ) -> std::result::Result<
            tonic::Response<super::ExecSyncResponse>,
            tonic::Status,
        >;
        async fn exec(
            &self,
            request: tonic::Request<super::ExecRequest>,
        ) -> std::result::Result<tonic::Response<super::ExecResponse>, tonic::Status>;
        async fn attach(
            &self,
            request: tonic::Request<super::AttachRequest>,
        ) -> std::result::Result<tonic::Response<super::AttachResponse>, tonic::Status>;
        async fn port_forward(
            &self,
            request: tonic::Request<super::PortForwardRequest>,
        ) -> std::result::Result<
            tonic::Response<super::PortForwardResponse>,
            tonic::Status,
        >;
        async fn container_stats(
            &self,
            request: tonic::Request<super::ContainerStatsRequest>,
        ) -> std::result::Result<
            tonic::Response<super::ContainerStatsResponse>,
            tonic::Status,
        >;
        async fn list_container_stats(
            &self,
            request: tonic::Request<super::ListContainerStatsRequest>,
        ) -> std::result::Result<
            tonic::Response<super::ListContainerStatsResponse>,
            tonic::Status,
        >;
        /// Server streaming response type for the StreamContainerStats method.
        type StreamContainerStatsStream: tonic::codegen::tokio_stream::Stream<
                Item = std::result::Result<
                    super::StreamContainerStatsResponse,
                    tonic::Status,
                >,
            >
            + std::marker::Send
            + 'static;
        async fn stream_container_stats(
            &self,
            request: tonic::Request<super::StreamContainerStatsRequest>,
        ) -> std::result::Result<
            tonic::Response<Self::StreamContainerStatsStream>,
            tonic::Status,
        >;
        async fn pod_sandbox_stats(
            &self,
            request: tonic::Request<super::PodSandboxStatsRequest>,
        ) -> std::result::Result<
            tonic::Response<super::PodSandboxStatsResponse>,
            tonic::Status,
        >;
        async fn list_pod_sandbox_stats(
            &self,
            request: tonic::Request<super::ListPodSandboxStatsRequest>,
        ) -> std::result::Result<
            tonic::Response<super::ListPodSandboxStatsResponse>,
            tonic::Status,
        >;
        /// Server streaming response type for the StreamPodSandboxStats method.
        type StreamPodSandboxStatsStream: tonic::codegen::tokio_stream::Stream<
                Item = std::result::Result<
                    super::StreamPodSandboxStatsResponse,
                    tonic::Status,
                >,
            >
            + std::marker::Send
            + 'static;
        async fn stream_pod_sandbox_stats(
            &self,
            request: tonic::Request<super::StreamPodSandboxStatsRequest>,
        ) -> std::result::Result<
            tonic::Response<Self::StreamPodSandboxStatsStream>,
            tonic::Status,
        >;
        async fn update_runtime_config(
            &self,
            request: tonic::Request<super::UpdateRuntimeConfigRequest>,
        ) -> std::result::Result<
            tonic::Response<super::UpdateRuntimeConfigResponse>,
            tonic::Status,
        >;
        async fn status(
            &self,
            request: tonic::Request<super::StatusRequest>,
        ) -> std::result::Result<tonic::Response<super::StatusResponse>, tonic::Status>;
        async fn checkpoint_container(
            &self,
            request: tonic::Request<super::CheckpointContainerRequest>,
        ) -> std::result::Result<
            tonic::Response<super::CheckpointContainerResponse>,
            tonic::Status,
        >;
        /// Server streaming response type for the GetContainerEvents method.
        type GetContainerEventsStream: tonic::codegen::tokio_stream::Stream<
                Item = std::result::Result<super::ContainerEventResponse, tonic::Status>,
            >
            + std::marker::Send
            + 'static;
        async fn get_container_events(
            &self,
            request: tonic::Request<super::GetEventsRequest>,
        ) -> std::result::Result<
            tonic::Response<Self::GetContainerEventsStream>,
            tonic::Status,
        >;
        async fn list_metric_descriptors(
            &self,
            request: tonic::Request<super::ListMetricDescriptorsRequest>,
        ) -> std::result::Result<
            tonic::Response<super::ListMetricDescriptorsResponse>,
            tonic::Status,
        >;
        async fn list_pod_sandbox_metrics(
            &self,
            request: tonic::Request<super::ListPodSandboxMetricsRequest>,
        ) -> std::result::Result<
            tonic::Response<super::ListPodSandboxMetricsResponse>,
            tonic::Status,
        >;
        /// Server streaming response type for the StreamPodSandboxMetrics method.
        type StreamPodSandboxMetricsStream: tonic::codegen::tokio_stream::Stream<
                Item = std::result::Result<
                    super::StreamPodSandboxMetricsResponse,
                    tonic::Status,
                >,
            >
            + std::marker::Send
            + 'static;
        async fn stream_pod_sandbox_metrics(
            &self,
            request: tonic::Request<super::StreamPodSandboxMetricsRequest>,
        ) -> std::result::Result<
            tonic::Response<Self::StreamPodSandboxMetricsStream>,
            tonic::Status,
        >;
        async fn runtime_config(
            &self,
            request: tonic::Request<super::RuntimeConfigRequest>,
        ) -> std::result::Result<
            tonic::Response<super::RuntimeConfigResponse>,
            tonic::Status,
        >;
        async fn update_pod_sandbox_resources(
            &self,
            request: tonic::Request<super::UpdatePodSandboxResourcesRequest>,
        ) -> std::result::Result<
            tonic::Response<super::UpdatePodSandboxResourcesResponse>,
            tonic::Status,
        >;
    }
    #[derive(Debug)]
    pub struct RuntimeServiceServer<T> {
        inner: Arc<T>,
        accept_compression_encodings: EnabledCompressionEncodings,
        send_compression_encodings: EnabledCompressionEncodings,
        max_decoding_message_size: Option<usize>,
        max_encoding_message_size: Option<usize>,
    }
    impl<T> RuntimeServiceServer<T> {
        pub fn new(inner: T) -> Self {
            Self::from_arc(Arc::new(inner))
        }
        pub fn from_arc(inner: Arc<T>) -> Self {
            Self {
                inner,
                accept_compression_encodings: Default::default(),
                send_compression_encodings: Default::default(),
                max_decoding_message_size: None,
                max_encoding_message_size: None,
            }
        }
        pub fn with_interceptor<F>(
            inner: T,
            interceptor: F,
        ) -> InterceptedService<Self, F>
        where
            F: tonic::service::Interceptor,
        {
            InterceptedService::new(Self::new(inner), interceptor)
        }
        /// Enable decompressing requests with the given encoding.
        #[must_use]
        pub fn accept_compressed(mut self, encoding: CompressionEncoding) -> Self {
            self.accept_compression_encodings.enable(encoding);
            self
        }
        /// Compress responses with the given encoding, if the client supports it.
        #[must_use]
        pub fn send_compressed(mut self, encoding: CompressionEncoding) -> Self {
            self.send_compression_encodings.enable(encoding);
            self
        }
        /// Limits the maximum size of a decoded message.
        ///
        /// Default: `4MB`
        #[must_use]
        pub fn max_decoding_message_size(mut self, limit: usize) -> Self {
            self.max_decoding_message_size = Some(limit);
            self
        }
        /// Limits the maximum size of an encoded message.
        ///
        /// Default: `usize::MAX`
        #[must_use]
        pub fn max_encoding_message_size(mut self, limit: usize) -> Self {
            self.max_encoding_message_size = Some(limit);
            self
        }
    }
    impl<T, B> tonic::codegen::Service<http::Request<B>> for RuntimeServiceServer<T>
    where
        T: RuntimeService,
        B: Body + std::marker::Send + 'static,
        B::Error: Into<StdError> + std::marker::Send + 'static,
    {
        type Response = http::Response<tonic::body::Body>;
        type Error = std::convert::Infallible;
        type Future = BoxFuture<Self::Response, Self::Error>;
        fn poll_ready(
            &mut self,
            _cx: &mut Context<'_>,
        ) -> Poll<std::result::Result<(), Self::Error>> {
            Poll::Ready(Ok(()))
        }
        fn call(&mut self, req: http::Request<B>) -> Self::Future {
            match req.uri().path() {
                "/runtime.v1.RuntimeService/Version" => {
                    #[allow(non_camel_case_types)]
                    struct VersionSvc<T: RuntimeService>(pub Arc<T>);
                    impl<
                        T: RuntimeService,
                    > tonic::server::UnaryService<super::VersionRequest>
                    for VersionSvc<T> {
                        type Response = super::VersionResponse;
                        type Future = BoxFuture<
                            tonic::Response<Self::Response>,
                            tonic::Status,
                        >;
                        fn call(
                            &mut self,
                            request: tonic::Request<super::VersionRequest>,
                        ) -> Self::Future {
                            let inner = Arc::clone(&self.0);
                            let fut = async move {
                                <T as RuntimeService>::version(&inner, request).await
                            };
                            Box::pin(fut)
                        }
                    }
                    let accept_compression_encodings = self.accept_compression_encodings;
                    let send_compression_encodings = self.send_compression_encodings;
                    let max_decoding_message_size = self.max_decoding_message_size;
                    let max_encoding_message_size = self.max_encoding_message_size;
                    let inner = self.inner.clone();
                    let fut = async move {
                        let method = VersionSvc(inner);
                        let codec = tonic_prost::ProstCodec::default();
                        let mut grpc = tonic::server::Grpc::new(codec)
                            .apply_compression_config(
                                accept_compression_encodings,
                                send_compression_encodings,
                            )
                            .apply_max_message_size_config(
                                max_decoding_message_size,
                                max_encoding_message_size,
                            );
                        let res = grpc.unary(method, req).await;
                        Ok(res)
                    };
                    Box::pin(fut)
                }
                "/runtime.v1.RuntimeService/RunPodSandbox" => {
                    #[allow(non_camel_case_types)]
                    struct RunPodSandboxSvc<T: RuntimeService>(pub Arc<T>);
                    impl<
                        T: RuntimeService,
                    > tonic::server::UnaryService<super::RunPodSandboxRequest>
                    for RunPodSandboxSvc<T> {
                        type Response = super::RunPodSandboxResponse;
                        type Future = BoxFuture<
                            tonic::Response<Self::Response>,
                            tonic::Status,
                        >;
                        fn call(
                            &mut self,
                            request: tonic::Request<super::RunPodSandboxRequest>,
                        ) -> Self::Future {
                            let inner = Arc::clone(&self.0);
                            let fut = async move {
                                <T as RuntimeService>::run_pod_sandbox(&inner, request)
                                    .await
                            };
                            Box::pin(fut)
                        }
                    }
                    let accept_compression_encodings = self.accept_compression_encodings;
                    let send_compression_encodings = self.send_compression_encodings;
                    let max_decoding_message_size = self.max_decoding_message_size;
                    let max_encoding_message_size = self.max_encoding_message_size;
                    let inner = self.inner.clone();
                    let fut = async move {
                        let method = RunPodSandboxSvc(inner);
                        let codec = tonic_prost::ProstCodec::default();
                        let mut grpc = tonic::server::Grpc::new(codec)
                            .apply_compression_config(
                                accept_compression_encodings,
                                send_compression_encodings,
                            )
                            .apply_max_message_size_config(
                                max_decoding_message_size,
                                max_encoding_message_size,
                            );
                        let res = grpc.unary(method, req).await;
                        Ok(res)
                    };
                    Box::pin(fut)
                }
                "/runtime.v1.RuntimeService/StopPodSandbox" => {
                    #[allow(non_camel_case_types)]
                    struct StopPodSandboxSvc<T: RuntimeService>(pub Arc<T>);
                    impl<
                        T: RuntimeService,
                    > tonic::server::UnaryService<super::StopPodSandboxRequest>
                    for StopPodSandboxSvc<T> {
                        type Response = super::StopPodSandboxResponse;
                        type Future = BoxFuture<
                            tonic::Response<Self::Response>,
                            tonic::Status,
                        >;
                        fn call(
                            &mut self,
                            request: tonic::Request<super::StopPodSandboxRequest>,
                        ) -> Self::Future {
                            let inner = Arc::clone(&self.0);
                            let fut = async move {
                                <T as RuntimeService>::stop_pod_sandbox(&inner, request)
                                    .await
                            };
                            Box::pin(fut)
                        }
                    }
                    let accept_compression_encodings = self.accept_compression_encodings;
                    let send_compression_encodings = self.send_compression_encodings;
                    let max_decoding_message_size = self.max_decoding_message_size;
                    let max_encoding_message_size = self.max_encoding_message_size;
                    let inner = self.inner.clone();
                    let fut = async move {
                        let method = StopPodSandboxSvc(inner);
                        let codec = tonic_prost::ProstCodec::default();
                        let mut grpc = tonic::server::Grpc::new(codec)
                            .apply_compression_config(
                                accept_compression_encodings,
                                send_compression_encodings,
                            )
                            .apply_max_message_size_config(
                                max_decoding_message_size,
                                max_encoding_message_size,
                            );
                        let res = grpc.unary(method, req).await;
                        Ok(res)
                    };
                    Box::pin(fut)
                }
                "/runtime.v1.RuntimeService/RemovePodSandbox" => {
                    #[allow(non_camel_case_types)]
                    struct RemovePodSandboxSvc<T: RuntimeService>(pub Arc<T>);
                    impl<
                        T: RuntimeService,
                    > tonic::server::UnaryService<super::RemovePodSandboxRequest>
                    for RemovePodSandboxSvc<T> {
                        type Response = super::RemovePodSandboxResponse;
                        type Future = BoxFuture<
                            tonic::Response<Self::Response>,
                            tonic::Status,
                        >;
                        fn call(
                            &mut self,
                            request: tonic::Request<super::RemovePodSandboxRequest>,
                        ) -> Self::Future {
                            let inner = Arc::clone(&self.0);
                            let fut = async move {
                                <T as RuntimeService>::remove_pod_sandbox(&inner, request)
                                    .await
                            };
                            Box::pin(fut)
                        }
                    }
                    let accept_compression_encodings = self.accept_compression_encodings;
                    let send_compression_encodings = self.send_compression_encodings;
                    let max_decoding_message_size = self.max_decoding_message_size;
                    let max_encoding_message_size = self.max_encoding_message_size;
                    let inner = self.inner.clone();
                    let fut = async move {
                        let method = RemovePodSandboxSvc(inner);
                        let codec = tonic_prost::ProstCodec::default();
                        let mut grpc = tonic::server::Grpc::new(codec)
                            .apply_compression_config(
                                accept_compression_encodings,
                                send_compression_encodings,
                            )
                            .apply_max_message_size_config(
                                max_decoding_message_size,
                                max_encoding_message_size,
                            );
                        let res = grpc.unary(method, req).await;
                        Ok(res)
                    };
                    Box::pin(fut)
                }
                "/runtime.v1.RuntimeService/PodSandboxStatus" => {
                    #[allow(non_camel_case_types)]
                    struct PodSandboxStatusSvc<T: RuntimeService>(pub Arc<T>);
                    impl<
                        T: RuntimeService,
                    > tonic::server::UnaryService<super::PodSandboxStatusRequest>
                    for PodSandboxStatusSvc<T> {
                        type Response = super::PodSandboxStatusResponse;
                        type Future = BoxFuture<
                            tonic::Response<Self::Response>,
                            tonic::Status,
                        >;
                        fn call(
                            &mut self,
                            request: tonic::Request<super::PodSandboxStatusRequest>,
                        ) -> Self::Future {
                            let inner = Arc::clone(&self.0);
                            let fut = async move {
                                <T as RuntimeService>::pod_sandbox_status(&inner, request)
                                    .await
                            };
                            Box::pin(fut)
                        }
                    }
                    let accept_compression_encodings = self.accept_compression_encodings;
                    let send_compression_encodings = self.send_compression_encodings;
                    let max_decoding_message_size = self.max_decoding_message_size;
                    let max_encoding_message_size = self.max_encoding_message_size;
                    let inner = self.inner.clone();
                    let fut = async move {
                        let method = PodSandboxStatusSvc(inner);
                        let codec = tonic_prost::ProstCodec::default();
                        let mut grpc = tonic::server::Grpc::new(codec)
                            .apply_compression_config(
                                accept_compression_encodings,
                                send_compression_encodings,
                            )
                            .apply_max_message_size_config(
                                max_decoding_message_size,
                                max_encoding_message_size,
                            );
                        let res = grpc.unary(method, req).await;
                        Ok(res)
                    };
                    Box::pin(fut)
                }
                "/runtime.v1.RuntimeService/ListPodSandbox" => {
                    #[allow(non_camel_case_types)]
                    struct ListPodSandboxSvc<T: RuntimeService>(pub Arc<T>);
                    impl<
                        T: RuntimeService,
                    > tonic::server::UnaryService<super::ListPodSandboxRequest>
                    for ListPodSandboxSvc<T> {
                        type Response = super::ListPodSandboxResponse;
                        type Future = BoxFuture<
                            tonic::Response<Self::Response>,
                            tonic::Status,
                        >;
                        fn call(
                            &mut self,
                            request: tonic::Request<super::ListPodSandboxRequest>,
                        ) -> Self::Future {
                            let inner = Arc::clone(&self.0);
                            let fut = async move {
                                <T as RuntimeService>::list_pod_sandbox(&inner, request)
                                    .await
                            };
                            Box::pin(fut)
                        }
                    }
                    let accept_compression_encodings = self.accept_compression_encodings;
                    let send_compression_encodings = self.send_compression_encodings;
                    let max_decoding_message_size = self.max_decoding_message_size;
                    let max_encoding_message_size = self.max_encoding_message_size;
                    let inner = self.inner.clone();
                    let fut = async move {
                        let method = ListPodSandboxSvc(inner);
                        let codec = tonic_prost::ProstCodec::default();
                        let mut grpc = tonic::server::Grpc::new(codec)
                            .apply_compression_config(
                                accept_compression_encodings,
                                send_compression_encodings,
                            )
                            .apply_max_message_size_config(
                                max_decoding_message_size,
                                max_encoding_message_size,
                            );
                        let res = grpc.unary(method, req).await;
                        Ok(res)
                    };
                    Box::pin(fut)
                }
                "/runtime.v1.RuntimeService/StreamPodSandboxes" => {
                    #[allow(non_camel_case_types)]
                    struct StreamPodSandboxesSvc<T: RuntimeService>(pub Arc<T>);
                    impl<
                        T: RuntimeService,
                    > tonic::server::ServerStreamingService<
                        super::StreamPodSandboxesRequest,
                    > for StreamPodSandboxesSvc<T> {
                        type Response = super::StreamPodSandboxesResponse;
                        type ResponseStream = T::StreamPodSandboxesStream;
                        type Future = BoxFuture<
                            tonic::Response<Self::ResponseStream>,
                            tonic::Status,
                        >;
                        fn call(
                            &mut self,
                            request: tonic::Request<super::StreamPodSandboxesRequest>,
                        ) -> Self::Future {
                            let inner = Arc::clone(&self.0);
                            let fut = async move {
                                <T as RuntimeService>::stream_pod_sandboxes(&inner, request)
                                    .await
                            };
                            Box::pin(fut)
                        }
                    }
                    let accept_compression_encodings = self.accept_compression_encodings;
                    let send_compression_encodings = self.send_compression_encodings;
                    let max_decoding_message_size = self.max_decoding_message_size;
                    let max_encoding_message_size = self.max_encoding_message_size;
                    let inner = self.inner.clone();
                    let fut = async move {
                        let method = StreamPodSandboxesSvc(inner);
                        let codec = tonic_prost::ProstCodec::default();
                        let mut grpc = tonic::server::Grpc::new(codec)
                            .apply_compression_config(
                                accept_compression_encodings,
                                send_compression_encodings,
                            )
                            .apply_max_message_size_config(
                                max_decoding_message_size,
                                max_encoding_message_size,
                            );
                        let res = grpc.server_streaming(method, req).await;
                        Ok(res)
                    };
                    Box::pin(fut)
                }
                "/runtime.v1.RuntimeService/CreateContainer" => {
                    #[allow(non_camel_case_types)]
                    struct CreateContainerSvc<T: RuntimeService>(pub Arc<T>);
                    impl<
                        T: RuntimeService,
                    > tonic::server::UnaryService<super::CreateContainerRequest>
                    for CreateContainerSvc<T> {
                        type Response = super::CreateContainerResponse;
                        type Future = BoxFuture<
                            tonic::Response<Self::Response>,
                            tonic::Status,
                        >;
                        fn call(
                            &mut self,
                            request: tonic::Request<super::CreateContainerRequest>,
                        ) -> Self::Future {
                            let inner = Arc::clone(&self.0);
                            let fut = async move {
                                <T as RuntimeService>::create_container(&inner, request)
                                    .await
                            };
                            Box::pin(fut)
                        }
                    }
                    let accept_compression_encodings = self.accept_compression_encodings;
                    let send_compression_encodings = self.send_compression_encodings;
                    let max_decoding_message_size = self.max_decoding_message_size;
                    let max_encoding_message_size = self.max_encoding_message_size;
                    let inner = self.inner.clone();
                    let fut = async move {
                        let method = CreateContainerSvc(inner);
                        let codec = tonic_prost::ProstCodec::default();
                        let mut grpc = tonic::server::Grpc::new(codec)
                            .apply_compression_config(
                                accept_compression_encodings,
                                send_compression_encodings,
                            )
                            .apply_max_message_size_config(
                                max_decoding_message_size,
                                max_encoding_message_size,
                            );
                        let res = grpc.unary(method, req).await;
                        Ok(res)
                    };
                    Box::pin(fut)
                }
                "/runtime.v1.RuntimeService/StartContainer" => {
                    #[allow(non_camel_case_types)]
                    struct StartContainerSvc<T: RuntimeService>(pub Arc<T>);
                    impl<
                        T: RuntimeService,
                    > tonic::server::UnaryService<super::StartContainerRequest>
                    for StartContainerSvc<T> {
                        type Response = super::StartContainerResponse;
                        type Future = BoxFuture<
                            tonic::Response<Self::Response>,
                            tonic::Status,
                        >;
                        fn call(
                            &mut self,
                            request: tonic::Request<super::StartContainerRequest>,
                        ) -> Self::Future {
                            let inner = Arc::clone(&self.0);
                            let fut = async move {
                                <T as RuntimeService>::start_container(&inner, request)
                                    .await
                            };
                            Box::pin(fut)
                        }
                    }
                    let accept_compression_encodings = self.accept_compression_encodings;
                    let send_compression_encodings = self.send_compression_encodings;
                    let max_decoding_message_size = self.max_decoding_message_size;
                    let max_encoding_message_size = self.max_encoding_message_size;
                    let inner = self.inner.clone();
                    let fut = async move {
                        let method = StartContainerSvc(inner);
                        let codec = tonic_prost::ProstCodec::default();
                        let mut grpc = tonic::server::Grpc::new(codec)
                            .apply_compression_config(
                                accept_compression_encodings,
                                send_compression_encodings,
                            )
                            .apply_max_message_size_config(
                                max_decoding_message_size,
                                max_encoding_message_size,
                            );
                        let res = grpc.unary(method, req).await;
                        Ok(res)
                    };
                    Box::pin(fut)
                }
                "/runtime.v1.RuntimeService/StopContainer" => {
                    #[allow(non_camel_case_types)]
                    struct StopContainerSvc<T: RuntimeService>(pub Arc<T>);
                    impl<
                        T: RuntimeService,
                    > tonic::server::UnaryService<super::StopContainerRequest>
                    for StopContainerSvc<T> {
                        type Response = super::StopContainerResponse;
                        type Future = BoxFuture<
                            tonic::Response<Self::Response>,
                            tonic::Status,
                        >;
                        fn call(
                            &mut self,
                            request: tonic::Request<super::StopContainerRequest>,
                        ) -> Self::Future {
                            let inner = Arc::clone(&self.0);
                            let fut = async move {
                                <T as RuntimeService>::stop_container(&inner, request).await
                            };
                            Box::pin(fut)
                        }
                    }
                    let accept_compression_encodings = self.accept_compression_encodings;
                    let send_compression_encodings = self.send_compression_encodings;
                    let max_decoding_message_size = self.max_decoding_message_size;
                    let max_encoding_message_size = self.max_encoding_message_size;
                    let inner = self.inner.clone();
                    let fut = async move {
                        let method = StopContainerSvc(inner);
                        let codec = tonic_prost::ProstCodec::default();
                        let mut grpc = tonic::server::Grpc::new(codec)
                            .apply_compression_config(
                                accept_compression_encodings,
                                send_compression_encodings,
                            )
                            .apply_max_message_size_config(
                                max_decoding_message_size,
                                max_encoding_message_size,
                            );
                        let res = grpc.unary(method, req).await;
                        Ok(res)
                    };
                    Box::pin(fut)
                }
                "/runtime.v1.RuntimeService/RemoveContainer" => {
                    #[allow(non_camel_case_types)]
                    struct RemoveContainerSvc<T: RuntimeService>(pub Arc<T>);
                    impl<
                        T: RuntimeService,
                    > tonic::server::UnaryService<super::RemoveContainerRequest>
                    for RemoveContainerSvc<T> {
                        type Response = super::RemoveContainerResponse;
                        type Future = BoxFuture<
                            tonic::Response<Self::Response>,
                            tonic::Status,
                        >;
                        fn call(
                            &mut self,
                            request: tonic::Request<super::RemoveContainerRequest>,
                        ) -> Self::Future {
                            let inner = Arc::clone(&self.0);
                            let fut = async move {
                                <T as RuntimeService>::remove_container(&inner, request)
                                    .await
                            };
                            Box::pin(fut)
                        }
                    }
                    let accept_compression_encodings = self.accept_compression_encodings;
                    let send_compression_encodings = self.send_compression_encodings;
                    let max_decoding_message_size = self.max_decoding_message_size;
                    let max_encoding_message_size = self.max_encoding_message_size;
                    let inner = self.inner.clone();
                    let fut = async move {
                        let method = RemoveContainerSvc(inner);
                        let codec = tonic_prost::ProstCodec::default();
                        let mut grpc = tonic::server::Grpc::new(codec)
                            .apply_compression_config(
                                accept_compression_encodings,
                                send_compression_encodings,
                            )
                            .apply_max_message_size_config(
                                max_decoding_message_size,
                                max_encoding_message_size,
                            );
                        let res = grpc.unary(method, req).await;
                        Ok(res)
                    };
                    Box::pin(fut)
                }
                "/runtime.v1.RuntimeService/ListContainers" => {
                    #[allow(non_camel_case_types)]
                    struct ListContainersSvc<T: RuntimeService>(pub Arc<T>);
                    impl<
                        T: RuntimeService,
                    > tonic::server::UnaryService<super::ListContainersRequest>
                    for ListContainersSvc<T> {
                        type Response = super::ListContainersResponse;
                        type Future = BoxFuture<
                            tonic::Response<Self::Response>,
                            tonic::Status,
                        >;
                        fn call(
                            &mut self,
                            request: tonic::Request<super::ListContainersRequest>,
                        ) -> Self::Future {
                            let inner = Arc::clone(&self.0);
                            let fut = async move {
                                <T as RuntimeService>::list_containers(&inner, request)
                                    .await
                            };
                            Box::pin(fut)
                        }
                    }
                    let accept_compression_encodings = self.accept_compression_encodings;
                    let send_compression_encodings = self.send_compression_encodings;
                    let max_decoding_message_size = self.max_decoding_message_size;
                    let max_encoding_message_size = self.max_encoding_message_size;
                    let inner = self.inner.clone();
                    let fut = async move {
                        let method = ListContainersSvc(inner);
                        let codec = tonic_prost::ProstCodec::default();
                        let mut grpc = tonic::server::Grpc::new(codec)
                            .apply_compression_config(
                                accept_compression_encodings,
                                send_compression_encodings,
                            )
                            .apply_max_message_size_config(
                                max_decoding_message_size,
                                max_encoding_message_size,
                            );
                        let res = grpc.unary(method, req).await;
                        Ok(res)
                    };
                    Box::pin(fut)
                }
                "/runtime.v1.RuntimeService/StreamContainers" => {
                    #[allow(non_camel_case_types)]
                    struct StreamContainersSvc<T: RuntimeService>(pub Arc<T>);
                    impl<
                        T: RuntimeService,
                    > tonic::server::ServerStreamingService<
                        super::StreamContainersRequest,
                    > for StreamContainersSvc<T> {
                        type Response = super::StreamContainersResponse;
                        type ResponseStream = T::StreamContainersStream;
                        type Future = BoxFuture<
                            tonic::Response<Self::ResponseStream>,
                            tonic::Status,
                        >;
                        fn call(
                            &mut self,
                            request: tonic::Request<super::StreamContainersRequest>,
                        ) -> Self::Future {
                            let inner = Arc::clone(&self.0);
                            let fut = async move {
                                <T as RuntimeService>::stream_containers(&inner, request)
                                    .await
                            };
                            Box::pin(fut)
                        }
                    }
                    let accept_compression_encodings = self.accept_compression_encodings;
                    let send_compression_encodings = self.send_compression_encodings;
                    let max_decoding_message_size = self.max_decoding_message_size;
                    let max_encoding_message_size = self.max_encoding_message_size;
                    let inner = self.inner.clone();
                    let fut = async move {
                        let method = StreamContainersSvc(inner);
                        let codec = tonic_prost::ProstCodec::default();
                        let mut grpc = tonic::server::Grpc::new(codec)
                            .apply_compression_config(
                                accept_compression_encodings,
                                send_compression_encodings,
                            )
                            .apply_max_message_size_config(
                                max_decoding_message_size,
                                max_encoding_message_size,
                            );
                        let res = grpc.server_streaming(method, req).await;
                        Ok(res)
                    };
                    Box::pin(fut)
                }
                "/runtime.v1.RuntimeService/ContainerStatus" => {
                    #[allow(non_camel_case_types)]
                    struct ContainerStatusSvc<T: RuntimeService>(pub Arc<T>);
                    impl<
                        T: RuntimeService,
                    > tonic::server::UnaryService<super::ContainerStatusRequest>
                    for ContainerStatusSvc<T> {
                        type Response = super::ContainerStatusResponse;
                        type Future = BoxFuture<
                            tonic::Response<Self::Response>,
                            tonic::Status,
                        >;
                        fn call(
                            &mut self,
                            request: tonic::Request<super::ContainerStatusRequest>,
                        ) -> Self::Future {
                            let inner = Arc::clone(&self.0);
                            let fut = async move {
                                <T as RuntimeService>::container_status(&inner, request)
                                    .await
                            };
                            Box::pin(fut)
                        }
                    }
                    let accept_compression_encodings = self.accept_compression_encodings;
                    let send_compression_encodings = self.send_compression_encodings;
                    let max_decoding_message_size = self.max_decoding_message_size;
                    let max_encoding_message_size = self.max_encoding_message_size;
                    let inner = self.inner.clone();
                    let fut = async move {
                        let method = ContainerStatusSvc(inner);
                        let codec = tonic_prost::ProstCodec::default();
                        let mut grpc = tonic::server::Grpc::new(codec)
                            .apply_compression_config(
                                accept_compression_encodings,
                                send_compression_encodings,
                            )
                            .apply_max_message_size_config(
                                max_decoding_message_size,
                                max_encoding_message_size,
                            );
                        let res = grpc.unary(method, req).await;
                        Ok(res)
                    };
                    Box::pin(fut)
                }
                "/runtime.v1.RuntimeService/UpdateContainerResources" => {
                    #[allow(non_camel_case_types)]
                    struct UpdateContainerResourcesSvc<T: RuntimeService>(pub Arc<T>);
                    impl<
                        T: RuntimeService,
                    > tonic::server::UnaryService<super::UpdateContainerResourcesRequest>
                    for UpdateContainerResourcesSvc<T> {
                        type Response = super::UpdateContainerResourcesResponse;
                        type Future = BoxFuture<
                            tonic::Response<Self::Response>,
                            tonic::Status,
                        >;
                        fn call(
                            &mut self,
                            request: tonic::Request<
                                super::UpdateContainerResourcesRequest,
                            >,
                        ) -> Self::Future {
                            let inner = Arc::clone(&self.0);
                            let fut = async move {
                                <T as RuntimeService>::update_container_resources(
                                        &inner,
                                        request,
                                    )
                                    .await
                            };
                            Box::pin(fut)
                        }
                    }
                    let accept_compression_encodings = self.accept_compression_encodings;
                    let send_compression_encodings = self.send_compression_encodings;
                    let max_decoding_message_size = self.max_decoding_message_size;
                    let max_encoding_message_size = self.max_encoding_message_size;
                    let inner = self.inner.clone();
                    let fut = async move {
                        let method = UpdateContainerResourcesSvc(inner);
                        let codec = tonic_prost::ProstCodec::default();
                        let mut grpc = tonic::server::Grpc::new(codec)
                            .apply_compression_config(
                                accept_compression_encodings,
                                send_compression_encodings,
                            )
                            .apply_max_message_size_config(
                                max_decoding_message_size,
                                max_encoding_message_size,
                            );
                        let res = grpc.unary(method, req).await;
                        Ok(res)
                    };
                    Box::pin(fut)
                }
                "/runtime.v1.RuntimeService/ReopenContainerLog" => {
                    #[allow(non_camel_case_types)]
                    struct ReopenContainerLogSvc<T: RuntimeService>(pub Arc<T>);
                    impl<
                        T: RuntimeService,
                    > tonic::server::UnaryService<super::ReopenContainerLogRequest>
                    for ReopenContainerLogSvc<T> {
                        type Response = super::ReopenContainerLogResponse;
                        type Future = BoxFuture<
                            tonic::Response<Self::Response>,
                            tonic::Status,
                        >;
                        fn call(
                            &mut self,
                            request: tonic::Request<super::ReopenContainerLogRequest>,
                        ) -> Self::Future {
                            let inner = Arc::clone(&self.0);
                            let fut = async move {
                                <T as RuntimeService>::reopen_container_log(&inner, request)
                                    .await
                            };
                            Box::pin(fut)
                        }
                    }
                    let accept_compression_encodings = self.accept_compression_encodings;
                    let send_compression_encodings = self.send_compression_encodings;
                    let max_decoding_message_size = self.max_decoding_message_size;
                    let max_encoding_message_size = self.max_encoding_message_size;
                    let inner = self.inner.clone();
                    let fut = async move {
                        let method = ReopenContainerLogSvc(inner);
                        let codec = tonic_prost::ProstCodec::default();
                        let mut grpc = tonic::server::Grpc::new(codec)
                            .apply_compression_config(
                                accept_compression_encodings,
                                send_compression_encodings,
                            )
                            .apply_max_message_size_config(
                                max_decoding_message_size,
                                max_encoding_message_size,
                            );
                        let res = grpc.unary(method, req).await;
                        Ok(res)
                    };
                    Box::pin(fut)
                }
                "/runtime.v1.RuntimeService/ExecSync" => {
                    #[allow(non_camel_case_types)]
                    struct ExecSyncSvc<T: RuntimeService>(pub Arc<T>);
                    impl<
                        T: RuntimeService,
                    > tonic::server::UnaryService<super::ExecSyncRequest>
                    for ExecSyncSvc<T> {
                        type Response = super::ExecSyncResponse;
                        type Future = BoxFuture<
                            tonic::Response<Self::Response>,
                            tonic::Status,
                        >;
                        fn call(
                            &mut self,
                            request: tonic::Request<super::ExecSyncRequest>,
                        ) -> Self::Future {
                            let inner = Arc::clone(&self.0);
                            let fut = async move {
                                <T as RuntimeService>::exec_sync(&inner, request).await
                            };
                            Box::pin(fut)
                        }
                    }
                    let accept_compression_encodings = self.accept_compression_encodings;
                    let send_compression_encodings = self.send_compression_encodings;
                    let max_decoding_message_size = self.max_decoding_message_size;
                    let max_encoding_message_size = self.max_encoding_message_size;
                    let inner = self.inner.clone();
                    let fut = async move {
                        let method = ExecSyncSvc(inner);
                        let codec = tonic_prost::ProstCodec::default();
                        let mut grpc = tonic::server::Grpc::new(codec)
                            .apply_compression_config(
                                accept_compression_encodings,
                                send_compression_encodings,
                            )
                            .apply_max_message_size_config(
                                max_decoding_message_size,
                                max_encoding_message_size,
                            );
                        let res = grpc.unary(method, req).await;
                        Ok(res)
                    };
                    Box::pin(fut)
                }
                "/runtime.v1.RuntimeService/Exec" => {
                    #[allow(non_camel_case_types)]
                    struct ExecSvc<T: RuntimeService>(pub Arc<T>);
                    impl<
                        T: RuntimeService,
                    > tonic::server::UnaryService<super::ExecRequest> for ExecSvc<T> {
                        type Response = super::ExecResponse;
                        type Future = BoxFuture<
                            tonic::Response<Self::Response>,
                            tonic::Status,
                        >;
                        fn call(
                            &mut self,
                            request: tonic::Request<super::ExecRequest>,
                        ) -> Self::Future {
                            let inner = Arc::clone(&self.0);
                            let fut = async move {
                                <T as RuntimeService>::exec(&inner, request).await
                            };
                            Box::pin(fut)
                        }
                    }
                    let accept_compression_encodings = self.accept_compression_encodings;
                    let send_compression_encodings = self.send_compression_encodings;
                    let max_decoding_message_size = self.max_decoding_message_size;
                    let max_encoding_message_size = self.max_encoding_message_size;
                    let inner = self.inner.clone();
                    let fut = async move {
                        let method = ExecSvc(inner);
                        let codec = tonic_prost::ProstCodec::default();
                        let mut grpc = tonic::server::Grpc::new(codec)
                            .apply_compression_config(
                                accept_compression_encodings,
                                send_compression_encodings,
                            )
                            .apply_max_message_size_config(
                                max_decoding_message_size,
                                max_encoding_message_size,
                            );
                        let res = grpc.unary(method, req).await;
                        Ok(res)
                    };
                    Box::pin(fut)
                }
                "/runtime.v1.RuntimeService/Attach" => {
                    #[allow(non_camel_case_types)]
                    struct AttachSvc<T: RuntimeService>(pub Arc<T>);
                    impl<
                        T: RuntimeService,
                    > tonic::server::UnaryService<super::AttachRequest>
                    for AttachSvc<T> {
                        type Response = super::AttachResponse;
                        type Future = BoxFuture<
                            tonic::Response<Self::Response>,
                            tonic::Status,
                        >;
                        fn call(
                            &mut self,
                            request: tonic::Request<super::AttachRequest>,
                        ) -> Self::Future {
                            let inner = Arc::clone(&self.0);
                            let fut = async move {
                                <T as RuntimeService>::attach(&inner, request).await
                            };
                            Box::pin(fut)
                        }
                    }
                    let accept_compression_encodings = self.accept_compression_encodings;
                    let send_compression_encodings = self.send_compression_encodings;
                    let max_decoding_message_size = self.max_decoding_message_size;
                    let max_encoding_message_size = self.max_encoding_message_size;
                    let inner = self.inner.clone();
                    let fut = async move {
                        let method = AttachSvc(inner);
                        let codec = tonic_prost::ProstCodec::default();
                        let mut grpc = tonic::server::Grpc::new(codec)
                            .apply_compression_config(
                                accept_compression_encodings,
                                send_compression_encodings,
                            )
                            .apply_max_message_size_config(
                                max_decoding_message_size,
                                max_encoding_message_size,
                            );
                        let res = grpc.unary(method, req).await;
                        Ok(res)
                    };
                    Box::pin(fut)
                }
                "/runtime.v1.RuntimeService/PortForward" => {
                    #[allow(non_camel_case_types)]
                    struct PortForwardSvc<T: RuntimeService>(pub Arc<T>);
                    impl<
                        T: RuntimeService,
                    > tonic::server::UnaryService<super::PortForwardRequest>
                    for PortForwardSvc<T> {
                        type Response = super::PortForwardResponse;
                        type Future = BoxFuture<
                            tonic::Response<Self::Response>,
                            tonic::Status,
                        >;
                        fn call(
                            &mut self,
                            request: tonic::Request<super::PortForwardRequest>,
                        ) -> Self::Future {
                            let inner = Arc::clone(&self.0);
                            let fut = async move {
                                <T as RuntimeService>::port_forward(&inner, request).await
                            };
                            Box::pin(fut)
                        }
                    }
                    let accept_compression_encodings = self.accept_compression_encodings;
                    let send_compression_encodings = self.send_compression_encodings;
                    let max_decoding_message_size = self.max_decoding_message_size;
                    let max_encoding_message_size = self.max_encoding_message_size;
                    let inner = self.inner.clone();
                    let fut = async move {
                        let method = PortForwardSvc(inner);
                        let codec = tonic_prost::ProstCodec::default();
                        let mut grpc = tonic::server::Grpc::new(codec)
                            .apply_compression_config(
                                accept_compression_encodings,
                                send_compression_encodings,
                            )
                            .apply_max_message_size_config(
                                max_decoding_message_size,
                                max_encoding_message_size,
                            );
                        let res = grpc.unary(method, req).await;
                        Ok(res)
                    };
                    Box::pin(fut)
                }
                "/runtime.v1.RuntimeService/ContainerStats" => {
                    #[allow(non_camel_case_types)]
                    struct ContainerStatsSvc<T: RuntimeService>(pub Arc<T>);
                    impl<
                        T: RuntimeService,
                    > tonic::server::UnaryService<super::ContainerStatsRequest>
                    for ContainerStatsSvc<T> {
                        type Response = super::ContainerStatsResponse;
                        type Future = BoxFuture<
                            tonic::Response<Self::Response>,
                            tonic::Status,
                        >;
                        fn call(
                            &mut self,
                            request: tonic::Request<super::ContainerStatsRequest>,
                        ) -> Self::Future {
                            let inner = Arc::clone(&self.0);
                            let fut = async move {
                                <T as RuntimeService>::container_stats(&inner, request)
                                    .await
                            };
                            Box::pin(fut)
                        }
                    }
                    let accept_compression_encodings = self.accept_compression_encodings;
                    let send_compression_encodings = self.send_compression_encodings;
                    let max_decoding_message_size = self.max_decoding_message_size;
                    let max_encoding_message_size = self.max_encoding_message_size;
                    let inner = self.inner.clone();
                    let fut = async move {
                        let method = ContainerStatsSvc(inner);
                        let codec = tonic_prost::ProstCodec::default();
                        let mut grpc = tonic::server::Grpc::new(codec)
                            .apply_compression_config(
                                accept_compression_encodings,
                                send_compression_encodings,
                            )
                            .apply_max_message_size_config(
                                max_decoding_message_size,
                                max_encoding_message_size,
                            );
                        let res = grpc.unary(method, req).await;
                        Ok(res)
                    };
                    Box::pin(fut)
                }
                "/runtime.v1.RuntimeService/ListContainerStats" => {
                    #[allow(non_camel_case_types)]
                    struct ListContainerStatsSvc<T: RuntimeService>(pub Arc<T>);
                    impl<
                        T: RuntimeService,
                    > tonic::server::UnaryService<super::ListContainerStatsRequest>
                    for ListContainerStatsSvc<T> {
                        type Response = super::ListContainerStatsResponse;
                        type Future = BoxFuture<
                            tonic::Response<Self::Response>,
                            tonic::Status,
                        >;
                        fn call(
                            &mut self,
                            request: tonic::Request<super::ListContainerStatsRequest>,
                        ) -> Self::Future {
                            let inner = Arc::clone(&self.0);
                            let fut = async move {
                                <T as RuntimeService>::list_container_stats(&inner, request)
                                    .await
                            };
                            Box::pin(fut)
                        }
                    }
                    let accept_compression_encodings = self.accept_compression_encodings;
                    let send_compression_encodings = self.send_compression_encodings;
                    let max_decoding_message_size = self.max_decoding_message_size;
                    let max_encoding_message_size = self.max_encoding_message_size;
                    let inner = self.inner.clone();
                    let fut = async move {
                        let method = ListContainerStatsSvc(inner);
                        let codec = tonic_prost::ProstCodec::default();
                        let mut grpc = tonic::server::Grpc::new(codec)
                            .apply_compression_config(
                                accept_compression_encodings,
                                send_compression_encodings,
                            )
                            .apply_max_message_size_config(
                                max_decoding_message_size,
                                max_encoding_message_size,
                            );
                        let res = grpc.unary(method, req).await;
                        Ok(res)
                    };
                    Box::pin(fut)
                }
                "/runtime.v1.RuntimeService/StreamContainerStats" => {
                    #[allow(non_camel_case_types)]
                    struct StreamContainerStatsSvc<T: RuntimeService>(pub Arc<T>);
                    impl<
                        T: RuntimeService,
                    > tonic::server::ServerStreamingService<
                        super::StreamContainerStatsRequest,
                    > for StreamContainerStatsSvc<T> {
                        type Response = super::StreamContainerStatsResponse;
                        type ResponseStream = T::StreamContainerStatsStream;
                        type Future = BoxFuture<
                            tonic::Response<Self::ResponseStream>,
                            tonic::Status,
                        >;
                        fn call(
                            &mut self,
                            request: tonic::Request<super::StreamContainerStatsRequest>,
                        ) -> Self::Future {
                            let inner = Arc::clone(&self.0);
                            let fut = async move {
                                <T as RuntimeService>::stream_container_stats(
                                        &inner,
                                        request,
                                    )
                                    .await
                            };
                            Box::pin(fut)
                        }
                    }
                    let accept_compression_encodings = self.accept_compression_encodings;
                    let send_compression_encodings = self.send_compression_encodings;
                    let max_decoding_message_size = self.max_decoding_message_size;
                    let max_encoding_message_size = self.max_encoding_message_size;
                    let inner = self.inner.clone();
                    let fut = async move {
                        let method = StreamContainerStatsSvc(inner);
                        let codec = tonic_prost::ProstCodec::default();
                        let mut grpc = tonic::server::Grpc::new(codec)
                            .apply_compression_config(
                                accept_compression_encodings,
                                send_compression_encodings,
                            )
                            .apply_max_message_size_config(
                                max_decoding_message_size,
                                max_encoding_message_size,
                            );
                        let res = grpc.server_streaming(method, req).await;
                        Ok(res)
                    };
                    Box::pin(fut)
                }
                "/runtime.v1.RuntimeService/PodSandboxStats" => {
                    #[allow(non_camel_case_types)]
                    struct PodSandboxStatsSvc<T: RuntimeService>(pub Arc<T>);
                    impl<
                        T: RuntimeService,
                    > tonic::server::UnaryService<super::PodSandboxStatsRequest>
                    for PodSandboxStatsSvc<T> {
                        type Response = super::PodSandboxStatsResponse;
                        type Future = BoxFuture<
                            tonic::Response<Self::Response>,
                            tonic::Status,
                        >;
                        fn call(
                            &mut self,
                            request: tonic::Request<super::PodSandboxStatsRequest>,
                        ) -> Self::Future {
                            let inner = Arc::clone(&self.0);
                            let fut = async move {
                                <T as RuntimeService>::pod_sandbox_stats(&inner, request)
                                    .await
                            };
                            Box::pin(fut)
                        }
                    }
                    let accept_compression_encodings = self.accept_compression_encodings;
                    let send_compression_encodings = self.send_compression_encodings;
                    let max_decoding_message_size = self.max_decoding_message_size;
                    let max_encoding_message_size = self.max_encoding_message_size;
                    let inner = self.inner.clone();
                    let fut = async move {
                        let method = PodSandboxStatsSvc(inner);
                        let codec = tonic_prost::ProstCodec::default();
                        let mut grpc = tonic::server::Grpc::new(codec)
                            .apply_compression_config(
                                accept_compression_encodings,
                                send_compression_encodings,
                            )
                            .apply_max_message_size_config(
                                max_decoding_message_size,
                                max_encoding_message_size,
                            );
                        let res = grpc.unary(method, req).await;
                        Ok(res)
                    };
                    Box::pin(fut)
                }
                "/runtime.v1.RuntimeService/ListPodSandboxStats" => {
                    #[allow(non_camel_case_types)]
                    struct ListPodSandboxStatsSvc<T: RuntimeService>(pub Arc<T>);
                    impl<
                        T: RuntimeService,
                    > tonic::server::UnaryService<super::ListPodSandboxStatsRequest>
                    for ListPodSandboxStatsSvc<T> {
                        type Response = super::ListPodSandboxStatsResponse;
                        type Future = BoxFuture<
                            tonic::Response<Self::Response>,
                            tonic::Status,
                        >;
                        fn call(
                            &mut self,
                            request: tonic::Request<super::ListPodSandboxStatsRequest>,
                        ) -> Self::Future {
                            let inner = Arc::clone(&self.0);
                            let fut = async move {
                                <T as RuntimeService>::list_pod_sandbox_stats(
                                        &inner,
                                        request,
                                    )
                                    .await
                            };
                            Box::pin(fut)
                        }
                    }
                    let accept_compression_encodings = self.accept_compression_encodings;
                    let send_compression_encodings = self.send_compression_encodings;
                    let max_decoding_message_size = self.max_decoding_message_size;
                    let max_encoding_message_size = self.max_encoding_message_size;
                    let inner = self.inner.clone();
                    let fut = async move {
                        let method = ListPodSandboxStatsSvc(inner);
                        let codec = tonic_prost::ProstCodec::default();
                        let mut grpc = tonic::server::Grpc::new(codec)
                            .apply_compression_config(
                                accept_compression_encodings,
                                send_compression_encodings,
                            )
                            .apply_max_message_size_config(
                                max_decoding_message_size,
                                max_encoding_message_size,
                            );
                        let res = grpc.unary(method, req).await;
                        Ok(res)
                    };
                    Box::pin(fut)
                }
                "/runtime.v1.RuntimeService/StreamPodSandboxStats" => {
                    #[allow(non_camel_case_types)]
                    struct StreamPodSandboxStatsSvc<T: RuntimeService>(pub Arc<T>);
                    impl<
                        T: RuntimeService,
                    > tonic::server::ServerStreamingService<
                        super::StreamPodSandboxStatsRequest,
                    > for StreamPodSandboxStatsSvc<T> {
                        type Response = super::StreamPodSandboxStatsResponse;
                        type ResponseStream = T::StreamPodSandboxStatsStream;
                        type Future = BoxFuture<
                            tonic::Response<Self::ResponseStream>,
                            tonic::Status,
                        >;
                        fn call(
                            &mut self,
                            request: tonic::Request<super::StreamPodSandboxStatsRequest>,
                        ) -> Self::Future {
                            let inner = Arc::clone(&self.0);
                            let fut = async move {
                                <T as RuntimeService>::stream_pod_sandbox_stats(
                                        &inner,
                                        request,
                                    )
                                    .await
                            };
                            Box::pin(fut)
                        }
                    }
                    let accept_compression_encodings = self.accept_compression_encodings;
                    let send_compression_encodings = self.send_compression_encodings;
                    let max_decoding_message_size = self.max_decoding_message_size;
                    let max_encoding_message_size = self.max_encoding_message_size;
                    let inner = self.inner.clone();
                    let fut = async move {
                        let method = StreamPodSandboxStatsSvc(inner);
                        let codec = tonic_prost::ProstCodec::default();
                        let mut grpc = tonic::server::Grpc::new(codec)
                            .apply_compression_config(
                                accept_compression_encodings,
                                send_compression_encodings,
                            )
                            .apply_max_message_size_config(
                                max_decoding_message_size,
                                max_encoding_message_size,
                            );
                        let res = grpc.server_streaming(method, req).await;
                        Ok(res)
                    };
                    Box::pin(fut)
                }
                "/runtime.v1.RuntimeService/UpdateRuntimeConfig" => {
                    #[allow(non_camel_case_types)]
                    struct UpdateRuntimeConfigSvc<T: RuntimeService>(pub Arc<T>);
                    impl<
                        T: RuntimeService,
                    > tonic::server::UnaryService<super::UpdateRuntimeConfigRequest>
                    for UpdateRuntimeConfigSvc<T> {
                        type Response = super::UpdateRuntimeConfigResponse;
                        type Future = BoxFuture<
                            tonic::Response<Self::Response>,
                            tonic::Status,
                        >;
                        fn call(
                            &mut self,
                            request: tonic::Request<super::UpdateRuntimeConfigRequest>,
                        ) -> Self::Future {
                            let inner = Arc::clone(&self.0);
                            let fut = async move {
                                <T as RuntimeService>::update_runtime_config(
                                        &inner,
                                        request,
                                    )
                                    .await
                            };
                            Box::pin(fut)
                        }
                    }
                    let accept_compression_encodings = self.accept_compression_encodings;
                    let send_compression_encodings = self.send_compression_encodings;
                    let max_decoding_message_size = self.max_decoding_message_size;
                    let max_encoding_message_size = self.max_encoding_message_size;
                    let inner = self.inner.clone();
                    let fut = async move {
                        let method = UpdateRuntimeConfigSvc(inner);
                        let codec = tonic_prost::ProstCodec::default();
                        let mut grpc = tonic::server::Grpc::new(codec)
                            .apply_compression_config(
                                accept_compression_encodings,
                                send_compression_encodings,
                            )
                            .apply_max_message_size_config(
                                max_decoding_message_size,
                                max_encoding_message_size,
                            );
                        let res = grpc.unary(method, req).await;
                        Ok(res)
                    };
                    Box::pin(fut)
                }
                "/runtime.v1.RuntimeService/Status" => {
                    #[allow(non_camel_case_types)]
                    struct StatusSvc<T: RuntimeService>(pub Arc<T>);
                    impl<
                        T: RuntimeService,
                    > tonic::server::UnaryService<super::StatusRequest>
                    for StatusSvc<T> {
                        type Response = super::StatusResponse;
                        type Future = BoxFuture<
                            tonic::Response<Self::Response>,
                            tonic::Status,
                        >;
                        fn call(
                            &mut self,
                            request: tonic::Request<super::StatusRequest>,
                        ) -> Self::Future {
                            let inner = Arc::clone(&self.0);
                            let fut = async move {
                                <T as RuntimeService>::status(&inner, request).await
                            };
                            Box::pin(fut)
                        }
                    }
                    let accept_compression_encodings = self.accept_compression_encodings;
                    let send_compression_encodings = self.send_compression_encodings;
                    let max_decoding_message_size = self.max_decoding_message_size;
                    let max_encoding_message_size = self.max_encoding_message_size;
                    let inner = self.inner.clone();
                    let fut = async move {
                        let method = StatusSvc(inner);
                        let codec = tonic_prost::ProstCodec::default();
                        let mut grpc = tonic::server::Grpc::new(codec)
                            .apply_compression_config(
                                accept_compression_encodings,
                                send_compression_encodings,
                            )
                            .apply_max_message_size_config(
                                max_decoding_message_size,
                                max_encoding_message_size,
                            );
                        let res = grpc.unary(method, req).await;
                        Ok(res)
                    };
                    Box::pin(fut)
                }
                "/runtime.v1.RuntimeService/CheckpointContainer" => {
                    #[allow(non_camel_case_types)]
                    struct CheckpointContainerSvc<T: RuntimeService>(pub Arc<T>);
                    impl<
                        T: RuntimeService,
                    > tonic::server::UnaryService<super::CheckpointContainerRequest>
                    for CheckpointContainerSvc<T> {
                        type Response = super::CheckpointContainerResponse;
                        type Future = BoxFuture<
                            tonic::Response<Self::Response>,
                            tonic::Status,
                        >;
                        fn call(
                            &mut self,
                            request: tonic::Request<super::CheckpointContainerRequest>,
                        ) -> Self::Future {
                            let inner = Arc::clone(&self.0);
                            let fut = async move {
                                <T as RuntimeService>::checkpoint_container(&inner, request)
                                    .await
                            };
                            Box::pin(fut)
                        }
                    }
                    let accept_compression_encodings = self.accept_compression_encodings;
                    let send_compression_encodings = self.send_compression_encodings;
                    let max_decoding_message_size = self.max_decoding_message_size;
                    let max_encoding_message_size = self.max_encoding_message_size;
                    let inner = self.inner.clone();
                    let fut = async move {
                        let method = CheckpointContainerSvc(inner);
                        let codec = tonic_prost::ProstCodec::default();
                        let mut grpc = tonic::server::Grpc::new(codec)
                            .apply_compression_config(
                                accept_compression_encodings,
                                send_compression_encodings,
                            )
                            .apply_max_message_size_config(
                                max_decoding_message_size,
                                max_encoding_message_size,
                            );
                        let res = grpc.unary(method, req).await;
                        Ok(res)
                    };
                    Box::pin(fut)
                }
                "/runtime.v1.RuntimeService/GetContainerEvents" => {
                    #[allow(non_camel_case_types)]
                    struct GetContainerEventsSvc<T: RuntimeService>(pub Arc<T>);
                    impl<
                        T: RuntimeService,
                    > tonic::server::ServerStreamingService<super::GetEventsRequest>
                    for GetContainerEventsSvc<T> {
                        type Response = super::ContainerEventResponse;
                        type ResponseStream = T::GetContainerEventsStream;
                        type Future = BoxFuture<
                            tonic::Response<Self::ResponseStream>,
                            tonic::Status,
                        >;
                        fn call(
                            &mut self,
                            request: tonic::Request<super::GetEventsRequest>,
                        ) -> Self::Future {
                            let inner = Arc::clone(&self.0);
                            let fut = async move {
                                <T as RuntimeService>::get_container_events(&inner, request)
                                    .await
                            };
                            Box::pin(fut)
                        }
                    }
                    let accept_compression_encodings = self.accept_compression_encodings;
                    let send_compression_encodings = self.send_compression_encodings;
                    let max_decoding_message_size = self.max_decoding_message_size;
                    let max_encoding_message_size = self.max_encoding_message_size;
                    let inner = self.inner.clone();
                    let fut = async move {
                        let method = GetContainerEventsSvc(inner);
                        let codec = tonic_prost::ProstCodec::default();
                        let mut grpc = tonic::server::Grpc::new(codec)
                            .apply_compression_config(
                                accept_compression_encodings,
                                send_compression_encodings,
                            )
                            .apply_max_message_size_config(
                                max_decoding_message_size,
                                max_encoding_message_size,
                            );
                        let res = grpc.server_streaming(method, req).await;
                        Ok(res)
                    };
                    Box::pin(fut)
                }
                "/runtime.v1.RuntimeService/ListMetricDescriptors" => {
                    #[allow(non_camel_case_types)]
                    struct ListMetricDescriptorsSvc<T: RuntimeService>(pub Arc<T>);
                    impl<
                        T: RuntimeService,
                    > tonic::server::UnaryService<super::ListMetricDescriptorsRequest>
                    for ListMetricDescriptorsSvc<T> {
                        type Response = super::ListMetricDescriptorsResponse;
                        type Future = BoxFuture<
                            tonic::Response<Self::Response>,
                            tonic::Status,
                        >;
                        fn call(
                            &mut self,
                            request: tonic::Request<super::ListMetricDescriptorsRequest>,
                        ) -> Self::Future {
                            let inner = Arc::clone(&self.0);
                            let fut = async move {
                                <T as RuntimeService>::list_metric_descriptors(
                                        &inner,
                                        request,
                                    )
                                    .await
                            };
                            Box::pin(fut)
                        }
                    }
                    let accept_compression_encodings = self.accept_compression_encodings;
                    let send_compression_encodings = self.send_compression_encodings;
                    let max_decoding_message_size = self.max_decoding_message_size;
                    let max_encoding_message_size = self.max_encoding_message_size;
                    let inner = self.inner.clone();
                    let fut = async move {
                        let method = ListMetricDescriptorsSvc(inner);
                        let codec = tonic_prost::ProstCodec::default();
                        let mut grpc = tonic::server::Grpc::new(codec)
                            .apply_compression_config(
                                accept_compression_encodings,
                                send_compression_encodings,
                            )
                            .apply_max_message_size_config(
                                max_decoding_message_size,
                                max_encoding_message_size,
                            );
                        let res = grpc.unary(method, req).await;
                        Ok(res)
                    };
                    Box::pin(fut)
                }
                "/runtime.v1.RuntimeService/ListPodSandboxMetrics" => {
                    #[allow(non_camel_case_types)]
                    struct ListPodSandboxMetricsSvc<T: RuntimeService>(pub Arc<T>);
                    impl<
                        T: RuntimeService,
                    > tonic::server::UnaryService<super::ListPodSandboxMetricsRequest>
                    for ListPodSandboxMetricsSvc<T> {
                        type Response = super::ListPodSandboxMetricsResponse;
                        type Future = BoxFuture<
                            tonic::Response<Self::Response>,
                            tonic::Status,
                        >;
                        fn call(
                            &mut self,
                            request: tonic::Request<super::ListPodSandboxMetricsRequest>,
                        ) -> Self::Future {
                            let inner = Arc::clone(&self.0);
                            let fut = async move {
                                <T as RuntimeService>::list_pod_sandbox_metrics(
                                        &inner,
                                        request,
                                    )
                                    .await
                            };
                            Box::pin(fut)
                        }
                    }
                    let accept_compression_encodings = self.accept_compression_encodings;
                    let send_compression_encodings = self.send_compression_encodings;
                    let max_decoding_message_size = self.max_decoding_message_size;
                    let max_encoding_message_size = self.max_encoding_message_size;
                    let inner = self.inner.clone();
                    let fut = async move {
                        let method = ListPodSandboxMetricsSvc(inner);
                        let codec = tonic_prost::ProstCodec::default();
                        let mut grpc = tonic::server::Grpc::new(codec)
                            .apply_compression_config(
                                accept_compression_encodings,
                                send_compression_encodings,
                            )
                            .apply_max_message_size_config(
                                max_decoding_message_size,
                                max_encoding_message_size,
                            );
                        let res = grpc.unary(method, req).await;
                        Ok(res)
                    };
                    Box::pin(fut)
                }
                "/runtime.v1.RuntimeService/StreamPodSandboxMetrics" => {
                    #[allow(non_camel_case_types)]
                    struct StreamPodSandboxMetricsSvc<T: RuntimeService>(pub Arc<T>);
                    impl<
                        T: RuntimeService,
                    > tonic::server::ServerStreamingService<
                        super::StreamPodSandboxMetricsRequest,
                    > for StreamPodSandboxMetricsSvc<T> {
                        type Response = super::StreamPodSandboxMetricsResponse;
                        type ResponseStream = T::StreamPodSandboxMetricsStream;
                        type Future = BoxFuture<
                            tonic::Response<Self::ResponseStream>,
                            tonic::Status,
                        >;
                        fn call(
                            &mut self,
                            request: tonic::Request<
                                super::StreamPodSandboxMetricsRequest,
                            >,
                        ) -> Self::Future {
                            let inner = Arc::clone(&self.0);
                            let fut = async move {
                                <T as RuntimeService>::stream_pod_sandbox_metrics(
                                        &inner,
                                        request,
                                    )
                                    .await
                            };
                            Box::pin(fut)
                        }
                    }
                    let accept_compression_encodings = self.accept_compression_encodings;
                    let send_compression_encodings = self.send_compression_encodings;
                    let max_decoding_message_size = self.max_decoding_message_size;
                    let max_encoding_message_size = self.max_encoding_message_size;
                    let inner = self.inner.clone();
                    let fut = async move {
                        let method = StreamPodSandboxMetricsSvc(inner);
                        let codec = tonic_prost::ProstCodec::default();
                        let mut grpc = tonic::server::Grpc::new(codec)
                            .apply_compression_config(
                                accept_compression_encodings,
                                send_compression_encodings,
                            )
                            .apply_max_message_size_config(
                                max_decoding_message_size,
                                max_encoding_message_size,
                            );
                        let res = grpc.server_streaming(method, req).await;
                        Ok(res)
                    };
                    Box::pin(fut)
                }
                "/runtime.v1.RuntimeService/RuntimeConfig" => {
                    #[allow(non_camel_case_types)]
                    struct RuntimeConfigSvc<T: RuntimeService>(pub Arc<T>);
                    impl<
                        T: RuntimeService,
                    > tonic::server::UnaryService<super::RuntimeConfigRequest>
                    for RuntimeConfigSvc<T> {
                        type Response = super::RuntimeConfigResponse;
                        type Future = BoxFuture<
                            tonic::Response<Self::Response>,
                            tonic::Status,
                        >;
                        fn call(
                            &mut self,
                            request: tonic::Request<super::RuntimeConfigRequest>,
                        ) -> Self::Future {
                            let inner = Arc::clone(&self.0);
                            let fut = async move {
                                <T as RuntimeService>::runtime_config(&inner, request).await
                            };
                            Box::pin(fut)
                        }
                    }
                    let accept_compression_encodings = self.accept_compression_encodings;
                    let send_compression_encodings = self.send_compression_encodings;
                    let max_decoding_message_size = self.max_decoding_message_size;
                    let max_encoding_message_size = self.max_encoding_message_size;
                    let inner = self.inner.clone();
                    let fut = async move {
                        let method = RuntimeConfigSvc(inner);
                        let codec = tonic_prost::ProstCodec::default();
                        let mut grpc = tonic::server::Grpc::new(codec)
                            .apply_compression_config(
                                accept_compression_encodings,
                                send_compression_encodings,
                            )
                            .apply_max_message_size_config(
                                max_decoding_message_size,
                                max_encoding_message_size,
                            );
                        let res = grpc.unary(method, req).await;
                        Ok(res)
                    };
                    Box::pin(fut)
                }
                "/runtime.v1.RuntimeService/UpdatePodSandboxResources" => {
                    #[allow(non_camel_case_types)]
                    struct UpdatePodSandboxResourcesSvc<T: RuntimeService>(pub Arc<T>);
                    impl<
                        T: RuntimeService,
                    > tonic::server::UnaryService<
                        super::UpdatePodSandboxResourcesRequest,
                    > for UpdatePodSandboxResourcesSvc<T> {
                        type Response = super::UpdatePodSandboxResourcesResponse;
                        type Future = BoxFuture<
                            tonic::Response<Self::Response>,
                            tonic::Status,
                        >;
                        fn call(
                            &mut self,
                            request: tonic::Request<
                                super::UpdatePodSandboxResourcesRequest,
                            >,
                        ) -> Self::Future {
                            let inner = Arc::clone(&self.0);
                            let fut = async move {
                                <T as RuntimeService>::update_pod_sandbox_resources(
                                        &inner,
                                        request,
                                    )
                                    .await
                            };
                            Box::pin(fut)
                        }
                    }
                    let accept_compression_encodings = self.accept_compression_encodings;
                    let send_compression_encodings = self.send_compression_encodings;
                    let max_decoding_message_size = self.max_decoding_message_size;
                    let max_encoding_message_size = self.max_encoding_message_size;
                    let inner = self.inner.clone();
                    let fut = async move {
                        let method = UpdatePodSandboxResourcesSvc(inner);
                        let codec = tonic_prost::ProstCodec::default();
                        let mut grpc = tonic::server::Grpc::new(codec)
                            .apply_compression_config(
                                accept_compression_encodings,
                                send_compression_encodings,
                            )
                            .apply_max_message_size_config(
                                max_decoding_message_size,
                                max_encoding_message_size,
                            );
                        let res = grpc.unary(method, req).await;
                        Ok(res)
                    };
                    Box::pin(fut)
                }
                _ => {
                    Box::pin(async move {
                        let mut response = http::Response::new(
                            tonic::body::Body::default(),
                        );
                        let headers = response.headers_mut();
                        headers
                            .insert(
                                tonic::Status::GRPC_STATUS,
                                (tonic::Code::Unimplemented as i32).into(),
                            );
                        headers
                            .insert(
                                http::header::CONTENT_TYPE,
                                tonic::metadata::GRPC_CONTENT_TYPE,
                            );
                        Ok(response)
                    })
                }
            }
        }
    }
    impl<T> Clone for RuntimeServiceServer<T> {
        fn clone(&self) -> Self {
            let inner = self.inner.clone();
            Self {
                inner,
                accept_compression_encodings: self.accept_compression_encodings,
                send_compression_encodings: self.send_compression_encodings,
                max_decoding_message_size: self.max_decoding_message_size,
                max_encoding_message_size: self.max_encoding_message_size,
            }
        }
    }
    /// Generated gRPC service name
    pub const SERVICE_NAME: &str = "runtime.v1.RuntimeService";
    impl<T> tonic::server::NamedService for RuntimeServiceServer<T> {
        const NAME: &'static str = SERVICE_NAME;
    }
}
/// Generated client implementations.
pub mod image_service_client {
    #![allow(
        unused_variables,
        dead_code,
        missing_docs,
        clippy::wildcard_imports,
        clippy::let_unit_value,
    )]
    use tonic::codegen::*;
    use tonic::codegen::http::Uri;
    #[derive(Debug, Clone)]
    pub struct ImageServiceClient<T> {
        inner: tonic::client::Grpc<T>,
    }
    impl<T> ImageServiceClient<T>
    where
        T: tonic::client::GrpcService<tonic::body::Body>,
        T::Error: Into<StdError>,
        T::ResponseBody: Body<Data = Bytes> + std::marker::Send + 'static,
        <T::ResponseBody as Body>::Error: Into<StdError> + std::marker::Send,
    {
        pub fn new(inner: T) -> Self {
            let inner = tonic::client::Grpc::new(inner);
            Self { inner }
        }
        pub fn with_origin(inner: T, origin: Uri) -> Self {
            let inner = tonic::client::Grpc::with_origin(inner, origin);
            Self { inner }
        }
        pub fn with_interceptor<F>(
            inner: T,
            interceptor: F,
        ) -> ImageServiceClient<InterceptedService<T, F>>
        where
            F: tonic::service::Interceptor,
            T::ResponseBody: Default,
            T: tonic::codegen::Service<
                http::Request<tonic::body::Body>,
                Response = http::Response<
                    <T as tonic::client::GrpcService<tonic::body::Body>>::ResponseBody,
                >,
            >,
            <T as tonic::codegen::Service<
                http::Request<tonic::body::Body>,
            >>::Error: Into<StdError> + std::marker::Send + std::marker::Sync,
        {
            ImageServiceClient::new(InterceptedService::new(inner, interceptor))
        }
        /// Compress requests with the given encoding.
        ///
        /// This requires the server to support it otherwise it might respond with an
        /// error.
        #[must_use]
        pub fn send_compressed(mut self, encoding: CompressionEncoding) -> Self {
            self.inner = self.inner.send_compressed(encoding);
            self
        }
        /// Enable decompressing responses.
        #[must_use]
        pub fn accept_compressed(mut self, encoding: CompressionEncoding) -> Self {
            self.inner = self.inner.accept_compressed(encoding);
            self
        }
        /// Limits the maximum size of a decoded message.
        ///
        /// Default: `4MB`
        #[must_use]
        pub fn max_decoding_message_size(mut self, limit: usize) -> Self {
            self.inner = self.inner.max_decoding_message_size(limit);
            self
        }
        /// Limits the maximum size of an encoded message.
        ///
        /// Default: `usize::MAX`
        #[must_use]
        pub fn max_encoding_message_size(mut self, limit: usize) -> Self {
            self.inner = self.inner.max_encoding_message_size(limit);
            self
        }
        pub async fn list_images(
            &mut self,
            request: impl tonic::IntoRequest<super::ListImagesRequest>,
        ) -> std::result::Result<
            tonic::Response<super::ListImagesResponse>,
            tonic::Status,
        > {
            self.inner
                .ready()
                .await
                .map_err(|e| {
                    tonic::Status::unknown(
                        format!("Service was not ready: {}", e.into()),
                    )
                })?;
            let codec = tonic_prost::ProstCodec::default();
            let path = http::uri::PathAndQuery::from_static(
                "/runtime.v1.ImageService/ListImages",
            );
            let mut req = request.into_request();
            req.extensions_mut()
                .insert(GrpcMethod::new("runtime.v1.ImageService", "ListImages"));
            self.inner.unary(req, path, codec).await
        }
        pub async fn stream_images(
            &mut self,
            request: impl tonic::IntoRequest<super::StreamImagesRequest>,
        ) -> std::result::Result<
            tonic::Response<tonic::codec::Streaming<super::StreamImagesResponse>>,
            tonic::Status,
        > {
            self.inner
                .ready()
                .await
                .map_err(|e| {
                    tonic::Status::unknown(
                        format!("Service was not ready: {}", e.into()),
                    )
                })?;
            let codec = tonic_prost::ProstCodec::default();
            let path = http::uri::PathAndQuery::from_static(
                "/runtime.v1.ImageService/StreamImages",
            );
            let mut req = request.into_request();
            req.extensions_mut()
                .insert(GrpcMethod::new("runtime.v1.ImageService", "StreamImages"));
            self.inner.server_streaming(req, path, codec).await
        }
        pub async fn image_status(
            &mut self,
            request: impl tonic::IntoRequest<super::ImageStatusRequest>,
        ) -> std::result::Result<
            tonic::Response<super::ImageStatusResponse>,
            tonic::Status,
        > {
            self.inner
                .ready()
                .await
                .map_err(|e| {
                    tonic::Status::unknown(
                        format!("Service was not ready: {}", e.into()),
                    )
                })?;
            let codec = tonic_prost::ProstCodec::default();
            let path = http::uri::PathAndQuery::from_static(
                "/runtime.v1.ImageService/ImageStatus",
            );
            let mut req = request.into_request();
            req.extensions_mut()
                .insert(GrpcMethod::new("runtime.v1.ImageService", "ImageStatus"));
            self.inner.unary(req, path, codec).await
        }
        pub async fn pull_image(
            &mut self,
            request: impl tonic::IntoRequest<super::PullImageRequest>,
        ) -> std::result::Result<
            tonic::Response<super::PullImageResponse>,
            tonic::Status,
        > {
            self.inner
                .ready()
                .await
                .map_err(|e| {
                    tonic::Status::unknown(
                        format!("Service was not ready: {}", e.into()),
                    )
                })?;
            let codec = tonic_prost::ProstCodec::default();
            let path = http::uri::PathAndQuery::from_static(
                "/runtime.v1.ImageService/PullImage",
            );
            let mut req = request.into_request();
            req.extensions_mut()
                .insert(GrpcMethod::new("runtime.v1.ImageService", "PullImage"));
            self.inner.unary(req, path, codec).await
        }
        pub async fn remove_image(
            &mut self,
            request: impl tonic::IntoRequest<super::RemoveImageRequest>,
        ) -> std::result::Result<
            tonic::Response<super::RemoveImageResponse>,
            tonic::Status,
        > {
            self.inner
                .ready()
                .await
                .map_err(|e| {
                    tonic::Status::unknown(
                        format!("Service was not ready: {}", e.into()),
                    )
                })?;
            let codec = tonic_prost::ProstCodec::default();
            let path = http::uri::PathAndQuery::from_static(
                "/runtime.v1.ImageService/RemoveImage",
            );
            let mut req = request.into_request();
            req.extensions_mut()
                .insert(GrpcMethod::new("runtime.v1.ImageService", "RemoveImage"));
            self.inner.unary(req, path, codec).await
        }
        pub async fn image_fs_info(
            &mut self,
            request: impl tonic::IntoRequest<super::ImageFsInfoRequest>,
        ) -> std::result::Result<
            tonic::Response<super::ImageFsInfoResponse>,
            tonic::Status,
        > {
            self.inner
                .ready()
                .await
                .map_err(|e| {
                    tonic::Status::unknown(
                        format!("Service was not ready: {}", e.into()),
                    )
                })?;
            let codec = tonic_prost::ProstCodec::default();
            let path = http::uri::PathAndQuery::from_static(
                "/runtime.v1.ImageService/ImageFsInfo",
            );
            let mut req = request.into_request();
            req.extensions_mut()
                .insert(GrpcMethod::new("runtime.v1.ImageService", "ImageFsInfo"));
            self.inner.unary(req, path, codec).await
        }
    }
}
/// Generated server implementations.
pub mod image_service_server {
    #![allow(
        unused_variables,
        dead_code,
        missing_docs,
        clippy::wildcard_imports,
        clippy::let_unit_value,
    )]
    use tonic::codegen::*;
    /// Generated trait containing gRPC methods that should be implemented for use with ImageServiceServer.
    #[async_trait]
    pub trait ImageService: std::marker::Send + std::marker::Sync + 'static {
        async fn list_images(
            &self,
            request: tonic::Request<super::ListImagesRequest>,
        ) -> std::result::Result<
            tonic::Response<super::ListImagesResponse>,
            tonic::Status,
        >;
        /// Server streaming response type for the StreamImages method.
        type StreamImagesStream: tonic::codegen::tokio_stream::Stream<
                Item = std::result::Result<super::StreamImagesResponse, tonic::Status>,
            >
            + std::marker::Send
            + 'static;
        async fn stream_images(
            &self,
            request: tonic::Request<super::StreamImagesRequest>,
        ) -> std::result::Result<
            tonic::Response<Self::StreamImagesStream>,
            tonic::Status,
        >;
        async fn image_status(
            &self,
            request: tonic::Request<super::ImageStatusRequest>,
        ) -> std::result::Result<
            tonic::Response<super::ImageStatusResponse>,
            tonic::Status,
        >;
        async fn pull_image(
            &self,
            request: tonic::Request<super::PullImageRequest>,
        ) -> std::result::Result<
            tonic::Response<super::PullImageResponse>,
            tonic::Status,
        >;
        async fn remove_image(
            &self,
            request: tonic::Request<super::RemoveImageRequest>,
        ) -> std::result::Result<
            tonic::Response<super::RemoveImageResponse>,
            tonic::Status,
        >;
        async fn image_fs_info(
            &self,
            request: tonic::Request<super::ImageFsInfoRequest>,
        ) -> std::result::Result<
            tonic::Response<super::ImageFsInfoResponse>,
            tonic::Status,
        >;
    }
    #[derive(Debug)]
    pub struct ImageServiceServer<T> {
        inner: Arc<T>,
        accept_compression_encodings: EnabledCompressionEncodings,
        send_compression_encodings: EnabledCompressionEncodings,
        max_decoding_message_size: Option<usize>,
        max_encoding_message_size: Option<usize>,
    }
    impl<T> ImageServiceServer<T> {
        pub fn new(inner: T) -> Self {
            Self::from_arc(Arc::new(inner))
        }
        pub fn from_arc(inner: Arc<T>) -> Self {
            Self {
                inner,
                accept_compression_encodings: Default::default(),
                send_compression_encodings: Default::default(),
                max_decoding_message_size: None,
                max_encoding_message_size: None,
            }
        }
        pub fn with_interceptor<F>(
            inner: T,
            interceptor: F,
        ) -> InterceptedService<Self, F>
        where
            F: tonic::service::Interceptor,
        {
            InterceptedService::new(Self::new(inner), interceptor)
        }
        /// Enable decompressing requests with the given encoding.
        #[must_use]
        pub fn accept_compressed(mut self, encoding: CompressionEncoding) -> Self {
            self.accept_compression_encodings.enable(encoding);
            self
        }
        /// Compress responses with the given encoding, if the client supports it.
        #[must_use]
        pub fn send_compressed(mut self, encoding: CompressionEncoding) -> Self {
            self.send_compression_encodings.enable(encoding);
            self
        }
        /// Limits the maximum size of a decoded message.
        ///
        /// Default: `4MB`
        #[must_use]
        pub fn max_decoding_message_size(mut self, limit: usize) -> Self {
            self.max_decoding_message_size = Some(limit);
            self
        }
        /// Limits the maximum size of an encoded message.
        ///
        /// Default: `usize::MAX`
        #[must_use]
        pub fn max_encoding_message_size(mut self, limit: usize) -> Self {
            self.max_encoding_message_size = Some(limit);
            self
        }
    }
    impl<T, B> tonic::codegen::Service<http::Request<B>> for ImageServiceServer<T>
    where
        T: ImageService,
        B: Body + std::marker::Send + 'static,
        B::Error: Into<StdError> + std::marker::Send + 'static,
    {
        type Response = http::Response<tonic::body::Body>;
        type Error = std::convert::Infallible;
        type Future = BoxFuture<Self::Response, Self::Error>;
        fn poll_ready(
            &mut self,
            _cx: &mut Context<'_>,
        ) -> Poll<std::result::Result<(), Self::Error>> {
            Poll::Ready(Ok(()))
        }
        fn call(&mut self, req: http::Request<B>) -> Self::Future {
            match req.uri().path() {
                "/runtime.v1.ImageService/ListImages" => {
                    #[allow(non_camel_case_types)]
                    struct ListImagesSvc<T: ImageService>(pub Arc<T>);
                    impl<
                        T: ImageService,
                    > tonic::server::UnaryService<super::ListImagesRequest>
                    for ListImagesSvc<T> {
                        type Response = super::ListImagesResponse;
                        type Future = BoxFuture<
                            tonic::Response<Self::Response>,
                            tonic::Status,
                        >;
                        fn call(
                            &mut self,
                            request: tonic::Request<super::ListImagesRequest>,
                        ) -> Self::Future {
                            let inner = Arc::clone(&self.0);
                            let fut = async move {
                                <T as ImageService>::list_images(&inner, request).await
                            };
                            Box::pin(fut)
                        }
                    }
                    let accept_compression_encodings = self.accept_compression_encodings;
                    let send_compression_encodings = self.send_compression_encodings;
                    let max_decoding_message_size = self.max_decoding_message_size;
                    let max_encoding_message_size = self.max_encoding_message_size;
                    let inner = self.inner.clone();
                    let fut = async move {
                        let method = ListImagesSvc(inner);
                        let codec = tonic_prost::ProstCodec::default();
                        let mut grpc = tonic::server::Grpc::new(codec)
                            .apply_compression_config(
                                accept_compression_encodings,
                                send_compression_encodings,
                            )
                            .apply_max_message_size_config(
                                max_decoding_message_size,
                                max_encoding_message_size,
                            );
                        let res = grpc.unary(method, req).await;
                        Ok(res)
                    };
                    Box::pin(fut)
                }
                "/runtime.v1.ImageService/StreamImages" => {
                    #[allow(non_camel_case_types)]
                    struct StreamImagesSvc<T: ImageService>(pub Arc<T>);
                    impl<
                        T: ImageService,
                    > tonic::server::ServerStreamingService<super::StreamImagesRequest>
                    for StreamImagesSvc<T> {
                        type Response = super::StreamImagesResponse;
                        type ResponseStream = T::StreamImagesStream;
                        type Future = BoxFuture<
                            tonic::Response<Self::ResponseStream>,
                            tonic::Status,
                        >;
                        fn call(
                            &mut self,
                            request: tonic::Request<super::StreamImagesRequest>,
                        ) -> Self::Future {
                            let inner = Arc::clone(&self.0);
                            let fut = async move {
                                <T as ImageService>::stream_images(&inner, request).await
                            };
                            Box::pin(fut)
                        }
                    }
                    let accept_compression_encodings = self.accept_compression_encodings;
                    let send_compression_encodings = self.send_compression_encodings;
                    let max_decoding_message_size = self.max_decoding_message_size;
                    let max_encoding_message_size = self.max_encoding_message_size;
                    let inner = self.inner.clone();
                    let fut = async move {
                        let method = StreamImagesSvc(inner);
                        let codec = tonic_prost::ProstCodec::default();
                        let mut grpc = tonic::server::Grpc::new(codec)
                            .apply_compression_config(
                                accept_compression_encodings,
                                send_compression_encodings,
                            )
                            .apply_max_message_size_config(
                                max_decoding_message_size,
                                max_encoding_message_size,
                            );
                        let res = grpc.server_streaming(method, req).await;
                        Ok(res)
                    };
                    Box::pin(fut)
                }
                "/runtime.v1.ImageService/ImageStatus" => {
                    #[allow(non_camel_case_types)]
                    struct ImageStatusSvc<T: ImageService>(pub Arc<T>);
                    impl<
                        T: ImageService,
                    > tonic::server::UnaryService<super::ImageStatusRequest>
                    for ImageStatusSvc<T> {
                        type Response = super::ImageStatusResponse;
                        type Future = BoxFuture<
                            tonic::Response<Self::Response>,
                            tonic::Status,
                        >;
                        fn call(
                            &mut self,
                            request: tonic::Request<super::ImageStatusRequest>,
                        ) -> Self::Future {
                            let inner = Arc::clone(&self.0);
                            let fut = async move {
                                <T as ImageService>::image_status(&inner, request).await
                            };
                            Box::pin(fut)
                        }
                    }
                    let accept_compression_encodings = self.accept_compression_encodings;
                    let send_compression_encodings = self.send_compression_encodings;
                    let max_decoding_message_size = self.max_decoding_message_size;
                    let max_encoding_message_size = self.max_encoding_message_size;
                    let inner = self.inner.clone();
                    let fut = async move {
                        let method = ImageStatusSvc(inner);
                        let codec = tonic_prost::ProstCodec::default();
                        let mut grpc = tonic::server::Grpc::new(codec)
                            .apply_compression_config(
                                accept_compression_encodings,
                                send_compression_encodings,
                            )
                            .apply_max_message_size_config(
                                max_decoding_message_size,
                                max_encoding_message_size,
                            );
                        let res = grpc.unary(method, req).await;
                        Ok(res)
                    };
                    Box::pin(fut)
                }
                "/runtime.v1.ImageService/PullImage" => {
                    #[allow(non_camel_case_types)]
                    struct PullImageSvc<T: ImageService>(pub Arc<T>);
                    impl<
                        T: ImageService,
                    > tonic::server::UnaryService<super::PullImageRequest>
                    for PullImageSvc<T> {
                        type Response = super::PullImageResponse;
                        type Future = BoxFuture<
                            tonic::Response<Self::Response>,
                            tonic::Status,
                        >;
                        fn call(
                            &mut self,
                            request: tonic::Request<super::PullImageRequest>,
                        ) -> Self::Future {
                            let inner = Arc::clone(&self.0);
                            let fut = async move {
                                <T as ImageService>::pull_image(&inner, request).await
                            };
                            Box::pin(fut)
                        }
                    }
                    let accept_compression_encodings = self.accept_compression_encodings;
                    let send_compression_encodings = self.send_compression_encodings;
                    let max_decoding_message_size = self.max_decoding_message_size;
                    let max_encoding_message_size = self.max_encoding_message_size;
                    let inner = self.inner.clone();
                    let fut = async move {
                        let method = PullImageSvc(inner);
                        let codec = tonic_prost::ProstCodec::default();
                        let mut grpc = tonic::server::Grpc::new(codec)
                            .apply_compression_config(
                                accept_compression_encodings,
                                send_compression_encodings,
                            )
                            .apply_max_message_size_config(
                                max_decoding_message_size,
                                max_encoding_message_size,
                            );
                        let res = grpc.unary(method, req).await;
                        Ok(res)
                    };
                    Box::pin(fut)
                }
                "/runtime.v1.ImageService/RemoveImage" => {
                    #[allow(non_camel_case_types)]
                    struct RemoveImageSvc<T: ImageService>(pub Arc<T>);
                    impl<
                        T: ImageService,
                    > tonic::server::UnaryService<super::RemoveImageRequest>
                    for RemoveImageSvc<T> {
                        type Response = super::RemoveImageResponse;
                        type Future = BoxFuture<
                            tonic::Response<Self::Response>,
                            tonic::Status,
                        >;
                        fn call(
                            &mut self,
                            request: tonic::Request<super::RemoveImageRequest>,
                        ) -> Self::Future {
                            let inner = Arc::clone(&self.0);
                            let fut = async move {
                                <T as ImageService>::remove_image(&inner, request).await
                            };
                            Box::pin(fut)
                        }
                    }
                    let accept_compression_encodings = self.accept_compression_encodings;
                    let send_compression_encodings = self.send_compression_encodings;
                    let max_decoding_message_size = self.max_decoding_message_size;
                    let max_encoding_message_size = self.max_encoding_message_size;
                    let inner = self.inner.clone();
                    let fut = async move {
                        let method = RemoveImageSvc(inner);
                        let codec = tonic_prost::ProstCodec::default();
                        let mut grpc = tonic::server::Grpc::new(codec)
                            .apply_compression_config(
                                accept_compression_encodings,
                                send_compression_encodings,
                            )
                            .apply_max_message_size_config(
                                max_decoding_message_size,
                                max_encoding_message_size,
                            );
                        let res = grpc.unary(method, req).await;
                        Ok(res)
                    };
                    Box::pin(fut)
                }
                "/runtime.v1.ImageService/ImageFsInfo" => {
                    #[allow(non_camel_case_types)]
                    struct ImageFsInfoSvc<T: ImageService>(pub Arc<T>);
                    impl<
                        T: ImageService,
                    > tonic::server::UnaryService<super::ImageFsInfoRequest>
                    for ImageFsInfoSvc<T> {
                        type Response = super::ImageFsInfoResponse;
                        type Future = BoxFuture<
                            tonic::Response<Self::Response>,
                            tonic::Status,
                        >;
                        fn call(
                            &mut self,
                            request: tonic::Request<super::ImageFsInfoRequest>,
                        ) -> Self::Future {
                            let inner = Arc::clone(&self.0);
                            let fut = async move {
                                <T as ImageService>::image_fs_info(&inner, request).await
                            };
                            Box::pin(fut)
                        }
                    }
                    let accept_compression_encodings = self.accept_compression_encodings;
                    let send_compression_encodings = self.send_compression_encodings;
                    let max_decoding_message_size = self.max_decoding_message_size;
                    let max_encoding_message_size = self.max_encoding_message_size;
                    let inner = self.inner.clone();
                    let fut = async move {
                        let method = ImageFsInfoSvc(inner);
                        let codec = tonic_prost::ProstCodec::default();
                        let mut grpc = tonic::server::Grpc::new(codec)
                            .apply_compression_config(
                                accept_compression_encodings,
                                send_compression_encodings,
                            )
                            .apply_max_message_size_config(
                                max_decoding_message_size,
                                max_encoding_message_size,
                            );
                        let res = grpc.unary(method, req).await;
                        Ok(res)
                    };
                    Box::pin(fut)
                }
                _ => {
                    Box::pin(async move {
                        let mut response = http::Response::new(
                            tonic::body::Body::default(),
                        );
                        let headers = response.headers_mut();
                        headers
                            .insert(
                                tonic::Status::GRPC_STATUS,
                                (tonic::Code::Unimplemented as i32).into(),
                            );
                        headers
                            .insert(
                                http::header::CONTENT_TYPE,
                                tonic::metadata::GRPC_CONTENT_TYPE,
                            );
                        Ok(response)
                    })
                }
            }
        }
    }
    impl<T> Clone for ImageServiceServer<T> {
        fn clone(&self) -> Self {
            let inner = self.inner.clone();
            Self {
                inner,
                accept_compression_encodings: self.accept_compression_encodings,
                send_compression_encodings: self.send_compression_encodings,
                max_decoding_message_size: self.max_decoding_message_size,
                max_encoding_message_size: self.max_encoding_message_size,
            }
        }
    }
    /// Generated gRPC service name
    pub const SERVICE_NAME: &str = "runtime.v1.ImageService";
    impl<T> tonic::server::NamedService for ImageServiceServer<T> {
        const NAME: &'static str = SERVICE_NAME;
    }
}
