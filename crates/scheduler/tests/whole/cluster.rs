//! An API server in this process, and schedulers that can be killed like processes: each has a runtime of its own. There
//! are no controllers: the test makes the service account and plays the binder of volumes.

use std::collections::{BTreeMap, HashMap};
use std::fmt::Debug;
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::NamespaceResourceScope;
use k8s_openapi::api::core::v1::{Node, PersistentVolume, PersistentVolumeClaim, Pod, ServiceAccount};
use k8s_openapi::api::resource::v1::ResourceClaim;
use kube::api::{DeleteParams, ListParams, Patch, PatchParams, PostParams};
use kube::{Api, Client, Resource, ResourceExt};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use skiff_auth::UserInfo;
use skiff_scheduler::{Configuration, SchedulerConfig};
use tokio::runtime::Runtime;
use tokio_util::sync::CancellationToken;

use crate::wire::{Bindings, Wire};

/// Long, because the machine may be busy; nothing waits that long unless it fails.
pub const PATIENCE: Duration = Duration::from_secs(60);
/// Of a node, in units of a pod.
pub const SLOTS: usize = 8;

pub struct Cluster {
    /// An administrator.
    pub client: Client,
    pub bindings: Arc<Bindings>,
    server: skiff_server::Server,
    pod_groups: bool,
    stop: CancellationToken,
    _dir: tempfile::TempDir,
}

impl Drop for Cluster {
    fn drop(&mut self) {
        self.stop.cancel();
    }
}

/// A scheduler that runs as if it were a process of its own.
pub struct Process {
    runtime: Option<Runtime>,
    pub wire: Arc<Wire>,
}

impl Process {
    /// Ends it at whatever it is doing: nothing is finished, and no lease is given back. What it has sent arrives.
    pub async fn kill(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            tokio::task::spawn_blocking(move || runtime.shutdown_timeout(PATIENCE))
                .await
                .unwrap();
        }
        while !self.wire.is_quiet() {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}

pub fn configuration(rest: &str) -> Configuration {
    let head = "apiVersion: kubescheduler.config.k8s.io/v1\nkind: KubeSchedulerConfiguration\n";
    Configuration::parse(&format!("{head}{rest}")).unwrap()
}

impl Cluster {
    pub async fn start() -> Cluster {
        Cluster::serving(&[]).await
    }

    /// Also APIs that are off by default.
    pub async fn serving(runtime_config: &[&str]) -> Cluster {
        let runtime_config = skiff_api::facts::RuntimeConfig::parse(runtime_config).unwrap();
        let pod_groups = runtime_config.pod_features().pod_groups;
        let dir = tempfile::tempdir().unwrap();
        let store = skiff_store::Embedded::open(dir.path().join("store")).unwrap();
        let pki = skiff_pki::Pki::open(&dir.path().join("pki")).unwrap();
        let (private_key, public_key) = pki.service_account_keys().unwrap();
        let identity = pki
            .serving("apiserver", "kube-apiserver", &["localhost".to_owned()])
            .unwrap();
        let stop = CancellationToken::new();
        let server = skiff_server::Server::start(skiff_server::ServerConfig {
            store: Arc::new(store),
            service_cidr: "10.96.0.0/16".into(),
            node_ports: 30000..=32767,
            runtime_config,
            advertise_address: "192.0.2.1".parse().unwrap(),
            advertise_port: 6443,
            tls: Arc::new(skiff_pki::asking_server_config(&identity, &[]).unwrap()),
            client_certificates: None,
            service_account: Some(skiff_server::ServiceAccountKey {
                private_key,
                public_key,
                issuer: "https://kubernetes.default.svc.cluster.local".into(),
                audiences: Vec::new(),
            }),
            authentication: Default::default(),
            authorization: vec![skiff_auth::Mode::Node, skiff_auth::Mode::Rbac],
            admission: skiff_admission::Chain::recommended(),
            kubelet: None,
            recorder: Arc::default(),
            audit: None,
            instance: String::new(),
            kms_health: None,
            version: Default::default(),
            shutdown: stop.clone(),
        })
        .await
        .unwrap();
        let admin = UserInfo::new("admin", ["system:masters", "system:authenticated"]);
        let cluster = Cluster {
            client: skiff_client::in_process(server.service(admin), "default"),
            bindings: Arc::default(),
            server,
            pod_groups,
            stop,
            _dir: dir,
        };
        let account = json!({"metadata": {"name": "default"}});
        // Until its namespace is there.
        cluster
            .until("the service account", async || {
                let account: ServiceAccount = serde_json::from_value(account.clone()).unwrap();
                let accounts = cluster.api::<ServiceAccount>();
                let made = accounts.create(&PostParams::default(), &account).await;
                check(made.is_ok(), made)
            })
            .await;
        let client = cluster.client.clone();
        tokio::spawn(cluster.stop.clone().run_until_cancelled_owned(async move {
            loop {
                // What it writes may change under it; then it looks again.
                let _ = bind_volumes(&client).await;
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        }));
        cluster
    }

    /// Starts a scheduler. `elects`: it acts only while it holds the lease.
    pub fn start_scheduler(&self, identity: &str, elects: bool, configuration: &Configuration) -> Process {
        let wire = Wire::new(identity, elects, Arc::clone(&self.bindings));
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .enable_all()
            .build()
            .unwrap();
        let user = UserInfo::new("system:kube-scheduler", ["system:authenticated"]);
        let (service, own) = (self.server.service(user), Arc::clone(&wire));
        let config = SchedulerConfig {
            configuration: configuration.clone(),
            leader_elect: elects.then(|| identity.to_owned()),
            pod_groups: self.pod_groups,
            ..SchedulerConfig::default()
        };
        runtime.spawn(async move {
            let client = own.client(service);
            // As its supervisor does: who has lost the lease runs for it again.
            loop {
                skiff_scheduler::run(config.clone(), client.clone(), CancellationToken::new()).await;
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
        });
        Process {
            runtime: Some(runtime),
            wire,
        }
    }

    /// With room for [`SLOTS`] pods of [`pod`].
    pub async fn add_node(&self, name: &str) {
        let room = json!({"cpu": format!("{}m", SLOTS * 500), "memory": format!("{}Mi", SLOTS * 100), "pods": "110"});
        let node = json!({"metadata": {"name": name, "labels": {"kubernetes.io/hostname": name}},
            "status": {"capacity": room, "allocatable": room}});
        let node: Node = serde_json::from_value(node).unwrap();
        let nodes: Api<Node> = Api::all(self.client.clone());
        nodes.create(&PostParams::default(), &node).await.unwrap();
        // A new node is tainted until it is ready, and there is nobody to find that it is.
        let patch = Patch::Merge(json!({"spec": {"taints": null}}));
        nodes.patch(name, &PatchParams::default(), &patch).await.unwrap();
    }

    /// Objects of the namespace `default`.
    pub fn api<K>(&self) -> Api<K>
    where
        K: Resource<DynamicType = (), Scope = NamespaceResourceScope>,
    {
        Api::namespaced(self.client.clone(), "default")
    }

    pub async fn create<K>(&self, object: Value) -> K
    where
        K: Resource<DynamicType = (), Scope = NamespaceResourceScope>
            + Clone
            + Debug
            + Serialize
            + DeserializeOwned,
    {
        let object: K = serde_json::from_value(object).unwrap();
        let made = self.api::<K>().create(&PostParams::default(), &object).await;
        made.unwrap()
    }

    pub async fn pods(&self) -> Vec<Pod> {
        let all = self.api::<Pod>().list(&ListParams::default()).await;
        all.unwrap().items
    }

    /// Without grace: there is no kubelet to wait for.
    pub async fn delete_pod(&self, name: &str) {
        let now = DeleteParams::default().grace_period(0);
        let _ = self.api::<Pod>().delete(name, &now).await;
    }

    pub async fn until<F: Future<Output = Result<(), String>>>(&self, what: &str, done: impl Fn() -> F) {
        let mut last = String::new();
        let work = async {
            loop {
                match done().await {
                    Ok(()) => return,
                    Err(seen) => last = seen,
                }
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        };
        let in_time = tokio::time::timeout(PATIENCE, work).await.is_ok();
        assert!(in_time, "{what}: {last}");
    }

    /// Waits until all these pods have a node.
    pub async fn until_bound(&self, what: &str, wanted: impl Fn(&str) -> bool) {
        self.until(what, async || {
            let pods = self.pods().await;
            let waiting = pods.iter().filter(|pod| node_of(pod).is_none());
            let waiting: Vec<_> = waiting
                .filter(|pod| wanted(&pod.name_any()))
                .map(|pod| (pod.name_any(), condition(pod)))
                .collect();
            check(waiting.is_empty(), waiting)
        })
        .await;
    }

    /// What must be true at any moment: nothing is promised twice, no node has more than it can take.
    pub async fn check_consistency(&self, known: &mut HashMap<String, String>) {
        let violations = self.bindings.violations.lock().clone();
        assert!(violations.is_empty(), "{violations:?}");
        let twice: Vec<_> = self
            .bindings
            .bound
            .lock()
            .iter()
            .filter(|(_, count)| **count > 1)
            .map(|(path, _)| path.clone())
            .collect();
        assert!(twice.is_empty(), "bound twice: {twice:?}");
        let mut per_node: BTreeMap<String, (usize, Vec<i32>)> = BTreeMap::new();
        for pod in self.pods().await {
            let Some(node) = node_of(&pod) else { continue };
            let before = known.insert(pod.uid().unwrap(), node.clone());
            assert!(
                before.is_none_or(|before| before == node),
                "{} has moved",
                pod.name_any()
            );
            let (count, ports) = per_node.entry(node).or_default();
            *count += 1;
            let containers = pod.spec.iter().flat_map(|spec| &spec.containers);
            let own = containers.flat_map(|container| container.ports.iter().flatten());
            ports.extend(own.filter_map(|port| port.host_port));
        }
        for (node, (count, ports)) in &mut per_node {
            assert!(*count <= SLOTS, "{node} has {count} pods");
            ports.sort_unstable();
            assert!(
                ports.windows(2).all(|pair| pair[0] != pair[1]),
                "{node}: {ports:?}"
            );
        }
        self.check_claims().await;
    }

    async fn check_claims(&self) {
        let claims = self
            .api::<PersistentVolumeClaim>()
            .list(&ListParams::default())
            .await
            .unwrap();
        let mut owners: HashMap<String, String> = HashMap::new();
        for claim in claims {
            let volume = claim.spec.as_ref().and_then(|spec| spec.volume_name.clone());
            if let Some(volume) = volume.filter(|name| !name.is_empty()) {
                let other = owners.insert(volume.clone(), claim.name_any());
                assert_eq!(other, None, "{volume} is bound by {} too", claim.name_any());
            }
        }
        let volumes: Api<PersistentVolume> = Api::all(self.client.clone());
        for volume in volumes.list(&ListParams::default()).await.unwrap() {
            let reference = volume.spec.as_ref().and_then(|spec| spec.claim_ref.clone());
            let (claim, owner) = (reference.and_then(|one| one.name), owners.get(&volume.name_any()));
            assert!(
                owner.is_none() || owner == claim.as_ref(),
                "{}: {owner:?}, {claim:?}",
                volume.name_any()
            );
        }
        let mut devices: HashMap<String, String> = HashMap::new();
        for claim in self
            .api::<ResourceClaim>()
            .list(&ListParams::default())
            .await
            .unwrap()
        {
            let allocation = claim
                .status
                .as_ref()
                .and_then(|status| status.allocation.as_ref());
            let results = allocation
                .and_then(|one| one.devices.as_ref())
                .and_then(|one| one.results.clone());
            for result in results.into_iter().flatten() {
                let device = format!("{}/{}/{}", result.driver, result.pool, result.device);
                let other = devices.insert(device.clone(), claim.name_any());
                assert_eq!(other, None, "{device} is allocated to {} too", claim.name_any());
            }
        }
    }
}

/// One pass of the controller that binds claims to the volumes which a scheduler has reserved for them.
async fn bind_volumes(client: &Client) -> Result<(), kube::Error> {
    let volumes: Api<PersistentVolume> = Api::all(client.clone());
    let (list, parameters) = (ListParams::default(), PatchParams::default());
    for volume in volumes.list(&list).await? {
        let name = volume.name_any();
        let phase = volume.status.as_ref().and_then(|status| status.phase.clone());
        let reference = volume.spec.as_ref().and_then(|spec| spec.claim_ref.clone());
        let wanted = if reference.is_some() { "Bound" } else { "Available" };
        if phase.as_deref() != Some(wanted) {
            let patch = json!({"status": {"phase": wanted}});
            volumes
                .patch_status(&name, &parameters, &Patch::Merge(patch))
                .await?;
        }
        let Some(claim) = reference.and_then(|one| one.name) else {
            continue;
        };
        let claims: Api<PersistentVolumeClaim> = Api::namespaced(client.clone(), "default");
        let now = claims.get(&claim).await?;
        if now
            .spec
            .as_ref()
            .and_then(|spec| spec.volume_name.clone())
            .is_none()
        {
            let annotations = json!({"pv.kubernetes.io/bind-completed": "yes"});
            let patch = json!({"metadata": {"annotations": annotations, "resourceVersion": now.resource_version()},
                "spec": {"volumeName": name}});
            claims.patch(&claim, &parameters, &Patch::Merge(patch)).await?;
            let patch = json!({"status": {"phase": "Bound"}});
            claims
                .patch_status(&claim, &parameters, &Patch::Merge(patch))
                .await?;
        }
    }
    Ok(())
}

/// Takes one of a node's slots.
pub fn pod(name: &str, more: Value) -> Value {
    let mut container =
        json!({"name": "c", "image": "i", "resources": {"requests": {"cpu": "500m", "memory": "100Mi"}}});
    if let Some(ports) = more.get("ports") {
        container["ports"] = ports.clone();
    }
    let mut spec = json!({"containers": [container]});
    for (field, value) in more
        .as_object()
        .unwrap()
        .iter()
        .filter(|(field, _)| *field != "ports")
    {
        spec[field] = value.clone();
    }
    let kind = name.split('-').next().unwrap();
    json!({"metadata": {"name": name, "labels": {"kind": kind}}, "spec": spec})
}

pub fn node_of(pod: &Pod) -> Option<String> {
    let node = pod.spec.as_ref()?.node_name.clone()?;
    (!node.is_empty()).then_some(node)
}

/// Message of the condition `PodScheduled`.
pub fn condition(pod: &Pod) -> String {
    let conditions = pod
        .status
        .iter()
        .flat_map(|status| status.conditions.iter().flatten());
    let mut conditions = conditions.filter(|one| one.type_ == "PodScheduled" && one.status == "False");
    conditions
        .next()
        .and_then(|one| one.message.clone())
        .unwrap_or_default()
}

pub fn check(good: bool, seen: impl Debug) -> Result<(), String> {
    if good { Ok(()) } else { Err(format!("{seen:?}")) }
}
