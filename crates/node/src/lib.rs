//! The kubelet: runs the pods that are bound to this node.
//!
//! It learns of pods through the API and reaches containers over CRI only. Per pod there is one worker
//! ([`pod_worker`]) that observes the runtime, plans ([`plan`]) and acts ([`sync`]), and one status writer.
//! It calls no other component, and a container outlives it: what runs when it starts is found again.

mod action_metrics;
mod admission;
mod backoff;
mod cgroup_stats;
mod cgroup_usage;
mod cgroups;
mod config;
mod configuration;
mod container_config;
mod container_gc;
mod credential_providers;
mod credentials;
mod device_health;
mod device_plugins;
mod disk_stats;
mod dns;
mod dra;
mod durations;
mod env;
mod env_file;
mod eviction;
mod expansion;
mod field_ref;
mod health;
mod hooks;
mod hosts;
mod housekeeping;
mod image_name;
mod images;
mod kernel_defaults;
mod kill;
mod kubelet;
mod lease;
mod local_volumes;
mod log_rotation;
mod machine;
mod marks;
mod metrics;
mod mounts;
mod node_shutdown;
mod node_status;
mod objects;
mod observed;
mod plan;
mod pleg;
mod plugin_registry;
mod pod_certificates;
#[cfg(test)]
mod pod_fields;
mod pod_resources;
mod pod_state;
mod pod_worker;
mod pods;
mod preemption;
mod pressure;
mod probes;
mod pull_rate;
mod pull_records;
mod resize;
mod resources;
mod restart_all;
mod runtime;
mod runtime_answers;
mod runtime_health;
mod sandbox_config;
mod security;
#[cfg(test)]
mod security_fields;
mod server;
mod start;
mod static_pods;
mod status;
mod status_writer;
mod swap;
mod sync;
mod sysctls;
mod termination;
mod topology;
mod trust_bundles;
mod user_namespaces;
mod volumes;
mod watched;

pub use config::{CniConfig, NodeConfig, UNLIMITED_PULLS};
pub use configuration::{
    Error as ConfigurationError, KubeletConfiguration, Reserved, add_header as add_manifest_header,
};
pub use container_gc::ContainerGcPolicy;
pub use credential_providers::CredentialProviders;
pub use durations::parse_go_duration;
pub use kubelet::{Error, run};
pub use local_volumes::{LocalVolumesConfig, PROVISIONER as LOCAL_PROVISIONER, run_local_volumes};
pub use node_shutdown::{NodeShutdownConfig, ShutdownPeriod};
pub use observed::labels::OWNER as OWNER_LABEL;
pub use pressure::{ImageLimits, ThresholdFlags, Thresholds};
pub use pull_rate::PullRate;
pub use pull_records::VerificationPolicy;
pub use runtime_health::RuntimePatience;
pub use static_pods::StaticPodConfig;
pub use swap::{SwapBehavior, SwapConfig, is_on as is_swap_on};
pub use sysctls::AllowedSysctls;
pub use topology::{ManagerFlags, ManagersConfig, parse_reserved_memory};
pub use volumes::remove_disks;
