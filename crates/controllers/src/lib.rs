//! The controllers of kube-controller-manager: each is one entry of [`CONTROLLERS`], a loop over keys that
//! plans without I/O and then writes with its own identity.
//!
//! They read from informers they share and change the world only through the API. No controller calls
//! another.

mod admission_policy_status;
mod cluster_role_aggregation;
mod concurrency;
mod config;
mod cronjob;
mod csr;
mod daemonset;
mod deployment;
mod device_taint_eviction;
mod discovery;
mod disruption;
mod endpoints;
mod endpointslice;
mod endpointslice_mirroring;
mod garbage_collector;
mod history;
mod hpa;
mod job;
mod metrics;
mod namespace;
mod node;
mod ownership;
mod pod_certificate_cleaner;
mod pod_group_protection;
mod pods;
mod replicas;
mod resource_claim;
mod resource_quota;
mod root_ca;
mod scale;
mod selection;
mod selector;
mod service_account;
mod service_cidr;
mod statefulset;
mod storage_version_migrator;
mod tokens;
mod trust_bundle_publisher;
mod ttl_after_finished;
mod volume;
mod volume_protection;

use std::sync::Arc;
use std::time::Duration;

use futures::FutureExt;
use futures::future::BoxFuture;
use skiff_client::{
    Client, Controller, EventRecorder, InformerFactory, LeaderElector, Outcome, Reconcile, WorkQueue,
};
use skiff_prometheus::Registry;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

pub use concurrency::{CONCURRENCY_FLAGS, Concurrency, ConcurrencyFlag};
pub use config::{ControllersConfig, ServesApi};
pub use csr::{CertificateOrder, CertificateSigner, SignError};
pub use node::departure::LEAVING;
pub use node::lifecycle::EvictionRates;
pub use selection::{ControllerSelection, SelectionError, controller_names};
pub use tokens::TokenSigner;
pub use tokens::cluster_info::SERVER_ADDRESS;

/// The identity of the shared informers and of the leader's lease: the user
/// `system:kube-controller-manager`. All other names are service accounts of `kube-system`.
pub const MANAGER: &str = "system:kube-controller-manager";

/// One controller: its name, the service account of `kube-system` it writes as, the component its events
/// name, and its loop.
struct Spec {
    name: &'static str,
    service_account: &'static str,
    component: &'static str,
    /// The resource without which there is nothing to do, if that is off by default: group, version and plural name.
    api: Option<(&'static str, &'static str, &'static str)>,
    run: fn(Context) -> BoxFuture<'static, ()>,
}

macro_rules! controller {
    ($name:literal, $account:literal, $component:literal, $run:path) => {
        controller!($name, $account, $component, $run, None)
    };
    ($name:literal, $account:literal, $component:literal, $run:path, $api:expr) => {
        Spec {
            name: $name,
            service_account: $account,
            component: $component,
            api: $api,
            run: |context| $run(context).boxed(),
        }
    };
}

/// Every controller there is, by upstream's names. Adding one is a line here.
const CONTROLLERS: &[Spec] = &[
    controller!(
        "deployment-controller",
        "deployment-controller",
        "deployment-controller",
        deployment::run
    ),
    controller!(
        "replicaset-controller",
        "replicaset-controller",
        "replicaset-controller",
        replicas::run_replica_sets
    ),
    controller!(
        "replicationcontroller-controller",
        "replication-controller",
        "replication-controller",
        replicas::run_replication_controllers
    ),
    controller!("job-controller", "job-controller", "job-controller", job::run),
    controller!(
        "cronjob-controller",
        "cronjob-controller",
        "cronjob-controller",
        cronjob::run
    ),
    controller!(
        "ttl-after-finished-controller",
        "ttl-after-finished-controller",
        "ttl-after-finished-controller",
        ttl_after_finished::run
    ),
    controller!(
        "statefulset-controller",
        "statefulset-controller",
        "statefulset-controller",
        statefulset::run
    ),
    controller!(
        "daemonset-controller",
        "daemon-set-controller",
        "daemonset-controller",
        daemonset::run
    ),
    controller!(
        "endpointslice-controller",
        "endpointslice-controller",
        "endpoint-slice-controller",
        endpointslice::run
    ),
    controller!(
        "endpointslice-mirroring-controller",
        "endpointslicemirroring-controller",
        "endpoint-slice-mirroring-controller",
        endpointslice_mirroring::run
    ),
    controller!(
        "endpoints-controller",
        "endpoint-controller",
        "endpoint-controller",
        endpoints::run
    ),
    controller!(
        "namespace-controller",
        "namespace-controller",
        "namespace-controller",
        namespace::run
    ),
    controller!(
        "serviceaccount-controller",
        "service-account-controller",
        "service-account-controller",
        service_account::run
    ),
    controller!(
        "root-ca-certificate-publisher-controller",
        "root-ca-cert-publisher",
        "root-ca-cert-publisher",
        root_ca::run
    ),
    controller!(
        "garbage-collector-controller",
        "generic-garbage-collector",
        "garbage-collector-controller",
        garbage_collector::run
    ),
    controller!(
        "resourcequota-controller",
        "resourcequota-controller",
        "resourcequota-controller",
        resource_quota::run
    ),
    controller!(
        "node-lifecycle-controller",
        "node-controller",
        "node-controller",
        node::lifecycle::run
    ),
    controller!(
        "taint-eviction-controller",
        "node-controller",
        "taint-eviction-controller",
        node::taint_eviction::run
    ),
    controller!(
        "node-departure-controller",
        "node-controller",
        "node-controller",
        node::departure::run
    ),
    controller!(
        "node-ipam-controller",
        "node-controller",
        "cidrAllocator",
        node::ipam::run
    ),
    controller!(
        "pod-garbage-collector-controller",
        "pod-garbage-collector",
        "pod-garbage-collector",
        node::pod_gc::run
    ),
    controller!(
        "resourceclaim-controller",
        "resource-claim-controller",
        "resource_claim",
        resource_claim::run
    ),
    controller!(
        "device-taint-eviction-controller",
        "device-taint-eviction-controller",
        "device-taint-eviction-controller",
        device_taint_eviction::run
    ),
    controller!(
        "persistentvolume-binder-controller",
        "persistent-volume-binder",
        "persistentvolume-controller",
        volume::binder::run
    ),
    controller!(
        "persistentvolume-expander-controller",
        "expand-controller",
        "volume_expand",
        volume::expander::run
    ),
    controller!(
        "persistentvolume-attach-detach-controller",
        "attachdetach-controller",
        "attachdetach-controller",
        volume::attach_detach::run
    ),
    controller!(
        "ephemeral-volume-controller",
        "ephemeral-volume-controller",
        "ephemeral_volume",
        volume::ephemeral::run
    ),
    controller!(
        "persistentvolumeclaim-protection-controller",
        "pvc-protection-controller",
        "pvc-protection-controller",
        volume_protection::run_claims
    ),
    controller!(
        "persistentvolume-protection-controller",
        "pv-protection-controller",
        "pv-protection-controller",
        volume_protection::run_volumes
    ),
    controller!(
        "volumeattributesclass-protection-controller",
        "volumeattributesclass-protection-controller",
        "volumeattributesclass-protection-controller",
        volume_protection::run_classes
    ),
    controller!(
        "validatingadmissionpolicy-status-controller",
        "validatingadmissionpolicy-status-controller",
        "validatingadmissionpolicy-status-controller",
        admission_policy_status::run
    ),
    controller!(
        "disruption-controller",
        "disruption-controller",
        "controllermanager",
        disruption::run
    ),
    controller!(
        "clusterrole-aggregation-controller",
        "clusterrole-aggregation-controller",
        "clusterrole-aggregation-controller",
        cluster_role_aggregation::run
    ),
    controller!(
        "certificatesigningrequest-approving-controller",
        "certificate-controller",
        "certificate-controller",
        csr::run_approving
    ),
    controller!(
        "kubelet-serving-approving-controller",
        "kubelet-serving-approver",
        "kubelet-serving-approver",
        csr::run_serving_approver
    ),
    controller!(
        "certificatesigningrequest-signing-controller",
        "certificate-controller",
        "certificate-controller",
        csr::run_signing
    ),
    controller!(
        "certificatesigningrequest-cleaner-controller",
        "certificate-controller",
        "certificate-controller",
        csr::run_cleaner
    ),
    controller!(
        "serviceaccount-token-controller",
        "system:kube-controller-manager",
        "serviceaccount-token-controller",
        tokens::service_account::run
    ),
    controller!(
        "legacy-serviceaccount-token-cleaner-controller",
        "legacy-service-account-token-cleaner",
        "legacy-service-account-token-cleaner",
        tokens::legacy_cleaner::run
    ),
    controller!(
        "bootstrap-signer-controller",
        "bootstrap-signer",
        "bootstrap-signer",
        tokens::bootstrap_signer::run
    ),
    controller!(
        "cluster-info-controller",
        "cluster-info-controller",
        "cluster-info-controller",
        tokens::cluster_info::run
    ),
    controller!(
        "token-cleaner-controller",
        "token-cleaner",
        "token-cleaner",
        tokens::bootstrap::run_cleaner
    ),
    controller!(
        "horizontal-pod-autoscaler-controller",
        "horizontal-pod-autoscaler",
        "horizontal-pod-autoscaler",
        hpa::run
    ),
    controller!(
        "ttl-controller",
        "ttl-controller",
        "ttl-controller",
        node::ttl::run
    ),
    controller!(
        "service-cidr-controller",
        "service-cidrs-controller",
        "service-cidr-controller",
        service_cidr::run
    ),
    controller!(
        "podgroup-protection-controller",
        "podgroup-protection-controller",
        "podgroup-protection-controller",
        pod_group_protection::run,
        Some(("scheduling.k8s.io", "v1alpha2", "podgroups"))
    ),
    controller!(
        "storage-version-migrator-controller",
        "storage-version-migrator-controller",
        "storage-version-migrator-controller",
        storage_version_migrator::run,
        Some(("storagemigration.k8s.io", "v1beta1", "storageversionmigrations"))
    ),
    controller!(
        "kube-apiserver-serving-clustertrustbundle-publisher-controller",
        "kube-apiserver-serving-clustertrustbundle-publisher",
        "kube-apiserver-serving-clustertrustbundle-publisher",
        trust_bundle_publisher::run,
        Some(("certificates.k8s.io", "v1beta1", "clustertrustbundles"))
    ),
    controller!(
        "podcertificaterequest-cleaner-controller",
        "podcertificaterequestcleaner",
        "podcertificaterequestcleaner",
        pod_certificate_cleaner::run,
        Some(("certificates.k8s.io", "v1beta1", "podcertificaterequests"))
    ),
];

/// The controllers that need a resource which is off by default, with its group, version and plural name.
pub fn needed_apis() -> Vec<(&'static str, (&'static str, &'static str, &'static str))> {
    CONTROLLERS
        .iter()
        .filter_map(|spec| Some((spec.name, spec.api?)))
        .collect()
}

/// The names that [`ControllersConfig::client_for`] will be asked for, besides [`MANAGER`].
pub fn service_accounts() -> Vec<&'static str> {
    let mut names: Vec<&str> = CONTROLLERS.iter().map(|spec| spec.service_account).collect();
    names.retain(|name| *name != MANAGER);
    names.sort_unstable();
    names.dedup();
    names
}

/// How long reconciles may take to end after a shutdown.
const LAST_RECONCILES: Duration = Duration::from_secs(1);

/// What every controller gets.
#[derive(Clone)]
pub(crate) struct Context {
    pub name: &'static str,
    /// Writes, and reads that must be live, with the controller's own identity.
    pub client: Client,
    pub informers: InformerFactory,
    pub events: EventRecorder,
    pub config: Arc<ControllersConfig>,
    pub shutdown: CancellationToken,
}

impl Context {
    /// A queue under the name that upstream's has in metrics.
    pub(crate) fn queue<T>(&self, name: &'static str) -> Arc<WorkQueue<T>>
    where
        T: Clone + Eq + std::hash::Hash + Send + 'static,
    {
        WorkQueue::measured(name, &self.config.metrics)
    }

    /// What this component counts.
    pub(crate) fn metrics(&self) -> &Registry {
        &self.config.metrics.registry
    }

    /// A controller over a queue of that name; declare what wakes it, then run it.
    pub(crate) fn controller<R: Reconcile>(&self, queue: &'static str, reconciler: Arc<R>) -> Controller<R> {
        self.controller_over(self.queue(queue), reconciler)
    }

    /// For a reconciler that adds to its own queue.
    pub(crate) fn controller_over<R: Reconcile>(
        &self,
        queue: Arc<WorkQueue<R::Key>>,
        reconciler: Arc<R>,
    ) -> Controller<R> {
        Controller::new(self.name, queue, self.shutdown.clone(), reconciler)
    }
}

/// Why a reconcile failed. All failures are retried with back-off.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    #[error("{0}")]
    Api(#[from] kube::Error),
    #[error("{0}")]
    Other(String),
}

/// Runs all controllers until `shutdown`, behind the lease `kube-controller-manager` if `leader_elect`.
pub async fn run(config: ControllersConfig, shutdown: CancellationToken) {
    let config = Arc::new(config);
    let client = (config.client_for)(MANAGER);
    if !config.leader_elect {
        return run_all(config, client, shutdown).await;
    }
    while !shutdown.is_cancelled() {
        let elector = LeaderElector::new("kube-system", "kube-controller-manager", &config.identity)
            .measured(config.metrics.clone());
        let (config, manager) = (config.clone(), client.clone());
        let lead = |leading| run_all(config, manager, leading);
        if elector.run(client.clone(), lead, shutdown.clone()).await == Outcome::Shutdown {
            return;
        }
    }
}

async fn run_all(config: Arc<ControllersConfig>, client: Client, shutdown: CancellationToken) {
    let informers = InformerFactory::new(client, shutdown.clone()).measured(config.metrics.clone());
    let mut tasks = JoinSet::new();
    for spec in CONTROLLERS
        .iter()
        .filter(|spec| config.controllers.enables(spec.name))
        .filter(|spec| {
            spec.api
                .is_none_or(|(group, version, plural)| (config.serves_api)(group, version, plural))
        })
    {
        let own = (config.client_for)(spec.service_account);
        let context = Context {
            name: spec.name,
            events: EventRecorder::new(own.clone(), spec.component, ""),
            client: own,
            informers: informers.clone(),
            config: config.clone(),
            shutdown: shutdown.clone(),
        };
        let stop = shutdown.clone();
        tasks.spawn(async move {
            let start = || {
                // What a run subscribed to ends with it.
                let shutdown = context.shutdown.child_token();
                let end = shutdown.clone().drop_guard();
                let context = Context {
                    informers: context.informers.scoped(shutdown.clone()),
                    shutdown,
                    ..context.clone()
                };
                async move {
                    let _end = end;
                    (spec.run)(context).await;
                }
            };
            let work = skiff_supervise::kept(spec.name, stop.clone(), start);
            // Reconciles in progress may end; a controller that still waits for its first list never will.
            let too_long = async {
                stop.cancelled().await;
                tokio::time::sleep(LAST_RECONCILES).await;
            };
            tokio::select! {
                _ = too_long => {}
                () = work => {}
            }
        });
    }
    while tasks.join_next().await.is_some() {}
}

/// The server's own words where it answered, as upstream's events and conditions quote them.
pub(crate) fn error_message(error: &kube::Error) -> String {
    match error {
        kube::Error::Api(status) => status.message.clone(),
        other => other.to_string(),
    }
}

/// True if the write was refused because its namespace is going away: not worth an event or a retry.
pub(crate) fn is_namespace_terminating(error: &kube::Error) -> bool {
    matches!(error, kube::Error::Api(status) if status.details.as_ref().is_some_and(|details| {
        details.causes.iter().any(|cause| cause.reason == "NamespaceTerminating")
    }))
}

pub(crate) fn seconds_until(at: jiff::Timestamp, now: jiff::Timestamp) -> Duration {
    Duration::try_from(at.duration_since(now)).unwrap_or(Duration::ZERO)
}
