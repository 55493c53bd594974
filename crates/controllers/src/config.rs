//! What the wiring decides about the controllers, with upstream's defaults.

use std::sync::Arc;
use std::time::Duration;

use skiff_client::{Client, ComponentMetrics};

use crate::{CertificateSigner, Concurrency, ControllerSelection, EvictionRates, TokenSigner};

/// Tells whether a resource is served, by group, version and plural name.
pub type ServesApi = Arc<dyn Fn(&str, &str, &str) -> bool + Send + Sync>;

/// What the wiring gives. `client_for` gets a name out of [`crate::service_accounts`] or
/// [`crate::MANAGER`] and answers a client with that identity.
#[derive(Clone)]
pub struct ControllersConfig {
    pub client_for: Arc<dyn Fn(&str) -> Client + Send + Sync>,
    pub root_ca_pem: String,
    /// Pod networks are cut from these, one of each for a node. Empty: nodes get none.
    pub cluster_cidrs: Vec<String>,
    /// Nodes get nothing of these, should they overlap with the cluster's networks.
    pub service_cidrs: Vec<String>,
    pub node_cidr_mask_ipv4: u8,
    pub node_cidr_mask_ipv6: u8,
    pub node_monitor_period: Duration,
    pub node_monitor_grace_period: Duration,
    pub node_startup_grace_period: Duration,
    pub eviction_rates: EvictionRates,
    pub terminated_pod_gc_threshold: usize,
    /// Signs certificates; without it nobody does.
    pub certificate_signer: Option<Arc<dyn CertificateSigner>>,
    /// How long a signed certificate is valid at most.
    pub cluster_signing_duration: Duration,
    /// Signs the tokens of service-account token Secrets; without it they get none.
    pub token_signer: Option<TokenSigner>,
    /// A legacy token that was not used for this long is marked invalid, and deleted after as long again.
    pub legacy_token_clean_up_period: Duration,
    /// How often each autoscaler looks at its metrics.
    pub hpa_sync_period: Duration,
    /// The highest recommendation within this time counts for scaling down.
    pub hpa_downscale_stabilization: Duration,
    /// How far from its target a metric may be without any change.
    pub hpa_tolerance: f64,
    /// For so long after a pod's start its CPU metric counts only if the pod is ready.
    pub hpa_cpu_initialization_period: Duration,
    /// Changes of readiness within this time after a pod's start are its first.
    pub hpa_initial_readiness_delay: Duration,
    /// How often namespaces that are being deleted are looked at, whatever changes.
    pub namespace_sync_period: Duration,
    /// How often quotas are counted, whatever changes.
    pub resource_quota_sync_period: Duration,
    /// How often volumes and claims that are not settled are looked at, whatever changes.
    pub volume_binder_sync_period: Duration,
    /// PodCertificateRequests that are older than this are deleted.
    pub pod_certificate_request_threshold: Duration,
    /// How often PodCertificateRequests are looked at.
    pub pod_certificate_request_sync_period: Duration,
    /// How many keys controllers work on at a time.
    pub concurrency: Concurrency,
    /// Which controllers run.
    pub controllers: ControllerSelection,
    /// Whether a resource that is off by default is served. A controller that needs one runs where it is.
    pub serves_api: ServesApi,
    pub leader_elect: bool,
    /// Names this contender for the lease. It should stay the same over a restart: then the lease of the
    /// process that was killed is taken over at once.
    pub identity: String,
    /// What is measured of all controllers together.
    pub metrics: Arc<ComponentMetrics>,
}

impl ControllersConfig {
    /// Upstream's defaults.
    pub fn new(
        client_for: Arc<dyn Fn(&str) -> Client + Send + Sync>,
        root_ca_pem: String,
        identity: String,
    ) -> Self {
        ControllersConfig {
            client_for,
            root_ca_pem,
            cluster_cidrs: Vec::new(),
            service_cidrs: Vec::new(),
            node_cidr_mask_ipv4: 24,
            node_cidr_mask_ipv6: 64,
            node_monitor_period: Duration::from_secs(5),
            node_monitor_grace_period: Duration::from_secs(50),
            node_startup_grace_period: Duration::from_secs(60),
            eviction_rates: EvictionRates {
                primary: 0.1,
                secondary: 0.01,
                large_cluster_threshold: 50,
                unhealthy_zone_threshold: 0.55,
            },
            terminated_pod_gc_threshold: 12_500,
            certificate_signer: None,
            cluster_signing_duration: Duration::from_secs(365 * 24 * 3600),
            token_signer: None,
            legacy_token_clean_up_period: Duration::from_secs(365 * 24 * 3600),
            hpa_sync_period: Duration::from_secs(15),
            hpa_downscale_stabilization: Duration::from_secs(300),
            hpa_tolerance: 0.1,
            hpa_cpu_initialization_period: Duration::from_secs(300),
            hpa_initial_readiness_delay: Duration::from_secs(30),
            namespace_sync_period: Duration::from_secs(300),
            resource_quota_sync_period: Duration::from_secs(300),
            volume_binder_sync_period: Duration::from_secs(15),
            pod_certificate_request_threshold: Duration::from_secs(15 * 60),
            pod_certificate_request_sync_period: Duration::from_secs(5 * 60),
            concurrency: Concurrency::default(),
            controllers: ControllerSelection::default(),
            serves_api: Arc::new(|_, _, _| false),
            leader_elect: true,
            identity,
            metrics: Arc::default(),
        }
    }
}
