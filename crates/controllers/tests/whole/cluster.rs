//! All controllers over a real API server in this process, each with its own identity and RBAC role. There is
//! no node: [`Cluster::run_pods`] plays scheduler and kubelet.

use std::fmt::Debug;
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::NamespaceResourceScope;
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::{Event, Node, Pod};
use k8s_openapi::jiff::Timestamp;
use kube::api::{DeleteParams, ListParams, Patch, PatchParams, PostParams};
use kube::{Api, Client, Resource};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use skiff_auth::UserInfo;
use skiff_client::ComponentMetrics;
use skiff_controllers::ControllersConfig;
use skiff_testkit::ApiServer;
use tokio_util::sync::CancellationToken;

use crate::door::Door;

pub const PATIENCE: Duration = Duration::from_secs(30);

pub struct Cluster {
    /// An administrator, who is not disturbed by outages.
    pub client: Client,
    pub server: ApiServer,
    /// Between the controllers and the server.
    pub door: Arc<Door>,
    /// What the controllers count.
    pub metrics: Arc<ComponentMetrics>,
}

/// A controller manager that can be killed.
pub struct Manager {
    task: tokio::task::JoinHandle<()>,
    stop: CancellationToken,
}

impl Manager {
    /// Ends it at whatever it is doing: nothing is finished, and no lease is given back.
    pub async fn kill(&mut self) {
        self.task.abort();
        let _ = (&mut self.task).await;
        self.stop.cancel();
    }
}

impl Cluster {
    /// A server with one node and all controllers.
    pub async fn start() -> Cluster {
        let cluster = Cluster::start_idle().await;
        cluster.run_controllers(|_| {});
        cluster.furnished().await;
        cluster
    }

    /// A server with one node and no controllers yet.
    pub async fn start_idle() -> Cluster {
        let cluster = Cluster::without_controllers().await;
        cluster.add_node("n").await;
        cluster
    }

    /// Waits for the service account: pods are refused until their namespace has one.
    pub async fn furnished(&self) {
        let accounts = self.api::<k8s_openapi::api::core::v1::ServiceAccount>();
        self.until("service account", async || {
            check(accounts.get_opt("default").await.unwrap().is_some(), ())
        })
        .await;
    }

    /// One of several controller managers, which compete for the lease.
    pub fn start_manager(&self, identity: &str) -> Manager {
        self.start_manager_with(identity, |_| {})
    }

    pub fn start_manager_with(&self, identity: &str, change: impl FnOnce(&mut ControllersConfig)) -> Manager {
        let config = self.config(|config| {
            config.identity = identity.to_owned();
            change(config);
        });
        let stop = self.server.stop.child_token();
        Manager {
            task: tokio::spawn(skiff_controllers::run(config, stop.clone())),
            stop,
        }
    }

    pub async fn without_controllers() -> Cluster {
        Cluster::of(ApiServer::start().await.unwrap())
    }

    pub fn of(server: ApiServer) -> Cluster {
        Cluster {
            client: server.admin(),
            server,
            door: Arc::default(),
            metrics: Arc::default(),
        }
    }

    /// Starts the controllers; the answer ends them again. `change` adjusts upstream's defaults.
    pub fn run_controllers(&self, change: impl FnOnce(&mut ControllersConfig)) -> CancellationToken {
        let config = self.config(change);
        let stop = self.server.stop.child_token();
        tokio::spawn(skiff_controllers::run(config, stop.clone()));
        stop
    }

    fn config(&self, change: impl FnOnce(&mut ControllersConfig)) -> ControllersConfig {
        let (server, door) = (self.server.server.clone(), self.door.clone());
        let client_for = Arc::new(move |name: &str| door.client(&server, user_of(name)));
        let mut config = ControllersConfig::new(client_for, "PEM".into(), "test".into());
        config.cluster_cidrs = vec!["10.244.0.0/16".into()];
        config.metrics = self.metrics.clone();
        change(&mut config);
        config
    }

    /// A ready node. Its lease is fresh for as long as a test lasts.
    pub async fn add_node(&self, name: &str) {
        let now = Timestamp::now().to_string();
        let node = json!({"metadata": {"name": name, "labels": {"kubernetes.io/hostname": name}}, "status": {
            "capacity": {"cpu": "8", "memory": "16Gi", "pods": "110"},
            "allocatable": {"cpu": "8", "memory": "16Gi", "pods": "110"},
            "conditions": [{"type": "Ready", "status": "True", "reason": "KubeletReady", "message": "",
                "lastHeartbeatTime": now, "lastTransitionTime": now}]}});
        let node: Node = serde_json::from_value(node).unwrap();
        let nodes: Api<Node> = Api::all(self.client.clone());
        nodes.create(&PostParams::default(), &node).await.unwrap();
        let lease = json!({"metadata": {"name": name}, "spec": {"holderIdentity": name,
            "leaseDurationSeconds": 40, "renewTime": Timestamp::now().to_string()}});
        let lease: Lease = serde_json::from_value(lease).unwrap();
        let leases: Api<Lease> = Api::namespaced(self.client.clone(), "kube-node-lease");
        leases.create(&PostParams::default(), &lease).await.unwrap();
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
        self.api::<K>()
            .create(&PostParams::default(), &object)
            .await
            .unwrap()
    }

    pub async fn patch<K>(&self, name: &str, patch: Value) -> K
    where
        K: Resource<DynamicType = (), Scope = NamespaceResourceScope> + Clone + Debug + DeserializeOwned,
    {
        let params = PatchParams::default();
        self.api::<K>()
            .patch(name, &params, &Patch::Merge(patch))
            .await
            .unwrap()
    }

    pub async fn list<K>(&self) -> Vec<K>
    where
        K: Resource<DynamicType = (), Scope = NamespaceResourceScope> + Clone + Debug + DeserializeOwned,
    {
        self.api::<K>().list(&ListParams::default()).await.unwrap().items
    }

    /// Binds a pod that waits to the node it asks for, or to `n`.
    pub async fn bind(&self, pod: &Pod) {
        let name = pod.metadata.name.as_deref().unwrap();
        let node = wanted_node(pod).unwrap_or_else(|| "n".to_owned());
        let binding = json!({"apiVersion": "v1", "kind": "Binding", "metadata": {"name": name},
            "target": {"kind": "Node", "name": node}});

        // The pod may be deleted meanwhile.
        let _: Result<Value, _> = self
            .api::<Pod>()
            .create_subresource("binding", name, &PostParams::default(), &binding)
            .await;
    }

    /// Sets a pod's status; nothing if the pod is gone.
    pub async fn set_pod_status(&self, name: &str, status: Value) {
        let patch = Patch::Merge(json!({"status": status}));
        let _ = self
            .api::<Pod>()
            .patch_status(name, &PatchParams::default(), &patch)
            .await;
    }

    /// One pass of scheduler and kubelet: pods are bound, run and become ready; those being deleted go.
    pub async fn run_pods(&self) {
        for pod in self.list::<Pod>().await {
            let name = pod.metadata.name.clone().unwrap();
            let phase = pod
                .status
                .as_ref()
                .and_then(|status| status.phase.clone())
                .unwrap_or_default();
            if pod.metadata.deletion_timestamp.is_some() {
                let now = DeleteParams::default().grace_period(0);
                let _ = self.api::<Pod>().delete(&name, &now).await;
                continue;
            }
            if phase != "Pending" {
                continue;
            }
            if pod.spec.as_ref().is_some_and(|spec| spec.node_name.is_none()) {
                self.bind(&pod).await;
            }
            self.set_pod_status(&name, running(&pod)).await;
        }
    }

    /// Plays the kubelet until `done`; fails with what was seen last.
    pub async fn until<F: Future<Output = Result<(), String>>>(&self, what: &str, done: impl Fn() -> F) {
        self.wait(what, PATIENCE, true, done).await;
    }

    /// As [`Cluster::until`], but pods stay as they are.
    #[allow(dead_code)]
    pub async fn until_idle<F: Future<Output = Result<(), String>>>(&self, what: &str, done: impl Fn() -> F) {
        self.wait(what, PATIENCE, false, done).await;
    }

    /// As [`Cluster::until_idle`], for tests with thousands of objects.
    pub async fn until_slowly<F: Future<Output = Result<(), String>>>(
        &self,
        what: &str,
        done: impl Fn() -> F,
    ) {
        self.wait(what, 20 * PATIENCE, false, done).await;
    }

    async fn wait<F: Future<Output = Result<(), String>>>(
        &self,
        what: &str,
        patience: Duration,
        run_pods: bool,
        done: impl Fn() -> F,
    ) {
        let mut last = String::new();
        let work = async {
            loop {
                if run_pods {
                    self.run_pods().await;
                }
                match done().await {
                    Ok(()) => return,
                    Err(seen) => last = seen,
                }
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        };
        let in_time = tokio::time::timeout(patience, work).await.is_ok();
        assert!(in_time, "{what}: {last}");
    }

    /// Waits for an event with this reason whose message contains `text`.
    #[allow(dead_code)]
    /// Until `/metrics` of the controllers has this line.
    pub async fn until_measured(&self, line: &str) {
        let family = line.split(['{', ' ']).next().unwrap_or_default();
        self.until(line, async || {
            let text = self.metrics.registry.text();
            let shown: Vec<&str> = text.lines().filter(|shown| shown.starts_with(family)).collect();
            check(shown.contains(&line), shown)
        })
        .await;
    }

    pub async fn until_event(&self, reason: &str, text: &str) {
        self.until_idle(reason, async || {
            let events = self.list::<Event>().await;
            let told = events.iter().any(|event| {
                event.reason.as_deref() == Some(reason)
                    && event.message.as_deref().is_some_and(|m| m.contains(text))
            });
            let seen: Vec<_> = events
                .iter()
                .map(|event| (&event.reason, &event.message))
                .collect();
            check(told, seen)
        })
        .await;
    }
}

/// The identity of a controller, or of all together.
pub fn user_of(name: &str) -> UserInfo {
    if name == skiff_controllers::MANAGER {
        UserInfo::new(name, ["system:authenticated"])
    } else {
        UserInfo::service_account("kube-system", name)
    }
}

/// The status of a pod that runs and is ready.
pub fn running(pod: &Pod) -> Value {
    let now = Timestamp::now().to_string();
    let uid = pod.metadata.uid.clone().unwrap();
    let number = u16::from_str_radix(&uid[..4], 16).unwrap();
    let ip = format!("10.244.{}.{}", number / 256, number % 256);
    json!({"phase": "Running", "startTime": now, "podIP": ip, "podIPs": [{"ip": ip}], "conditions": [
        {"type": "PodScheduled", "status": "True", "lastTransitionTime": now},
        {"type": "Ready", "status": "True", "lastTransitionTime": now}]})
}

/// The node that a DaemonSet's pod asks for by its node affinity.
fn wanted_node(pod: &Pod) -> Option<String> {
    let affinity = pod.spec.as_ref()?.affinity.as_ref()?.node_affinity.as_ref()?;
    let terms = &affinity
        .required_during_scheduling_ignored_during_execution
        .as_ref()?
        .node_selector_terms;
    let field = terms.first()?.match_fields.as_ref()?.first()?;
    field.values.as_ref()?.first().cloned()
}

pub fn check(good: bool, seen: impl Debug) -> Result<(), String> {
    if good { Ok(()) } else { Err(format!("{seen:?}")) }
}
