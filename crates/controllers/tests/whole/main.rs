//! All controllers together over a server in a hash map: an apply goes down to pods and endpoints, and a
//! delete takes everything with it.

#![allow(
    clippy::unwrap_used,
    reason = "everything here is a test, though not every function is marked as one"
)]

mod cluster;
mod cluster_loops;
mod daemonset;
mod devices;
mod fake;
mod jobs;
mod replicas;
mod restarts;
mod statefulset;
mod volumes;

use std::fmt::Debug;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use fake::Fake;
use k8s_openapi::NamespaceResourceScope;
use k8s_openapi::api::apps::v1::{Deployment, ReplicaSet};
use k8s_openapi::api::core::v1::{
    ConfigMap, Endpoints, Event, Namespace, Node, PersistentVolume, PersistentVolumeClaim, Pod, Service,
    ServiceAccount,
};
use k8s_openapi::api::discovery::v1::EndpointSlice;
use k8s_openapi::api::storage::v1::VolumeAttributesClass;
use kube::api::{DeleteParams, ListParams, Patch, PatchParams, PostParams};
use kube::{Api, Client, Resource};
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use skiff_controllers::ControllersConfig;
use tokio_util::sync::CancellationToken;

struct World {
    fake: Fake,
    client: Client,
    stop: CancellationToken,
}

impl Drop for World {
    fn drop(&mut self) {
        self.stop.cancel();
    }
}

impl World {
    async fn start() -> World {
        let fake = Fake::new();
        let client = fake.client();
        let given = client.clone();
        let mut config =
            ControllersConfig::new(Arc::new(move |_| given.clone()), "PEM".into(), "test".into());
        config.cluster_cidrs = vec!["10.244.0.0/16".into()];
        let stop = CancellationToken::new();
        tokio::spawn(skiff_controllers::run(config, stop.clone()));
        let world = World { fake, client, stop };
        let node: Node = serde_json::from_value(json!({"metadata": {"name": "n"}, "status": {"conditions": [
            {"type": "Ready", "status": "True", "lastHeartbeatTime": "2026-01-01T00:00:00Z"}]}}))
        .unwrap();
        Api::all(world.client.clone())
            .create(&PostParams::default(), &node)
            .await
            .unwrap();
        let namespace: Namespace = serde_json::from_value(json!({"metadata": {"name": "default"}})).unwrap();
        Api::all(world.client.clone())
            .create(&PostParams::default(), &namespace)
            .await
            .unwrap();
        world
    }

    fn api<K>(&self) -> Api<K>
    where
        K: Resource<DynamicType = (), Scope = NamespaceResourceScope>,
    {
        Api::namespaced(self.client.clone(), "default")
    }

    async fn create<K>(&self, object: Value)
    where
        K: Resource<DynamicType = (), Scope = NamespaceResourceScope>
            + Clone
            + Debug
            + serde::Serialize
            + DeserializeOwned,
    {
        let object: K = serde_json::from_value(object).unwrap();
        self.api::<K>()
            .create(&PostParams::default(), &object)
            .await
            .unwrap();
    }

    async fn list<K>(&self) -> Vec<K>
    where
        K: Resource<DynamicType = (), Scope = NamespaceResourceScope> + Clone + Debug + DeserializeOwned,
    {
        self.api::<K>().list(&ListParams::default()).await.unwrap().items
    }

    /// Plays the kubelet: pods get a node, an address and readiness.
    async fn run_pods(&self) {
        for pod in self.list::<Pod>().await {
            let number: String = pod
                .metadata
                .uid
                .clone()
                .unwrap()
                .chars()
                .filter(char::is_ascii_digit)
                .collect();
            let number: u32 = number.parse().unwrap();
            let running = pod
                .status
                .as_ref()
                .is_some_and(|status| status.phase.as_deref() == Some("Running"));
            if running || pod.metadata.deletion_timestamp.is_some() {
                continue;
            }
            let name = pod.metadata.name.unwrap();
            let ip = format!("10.244.{}.{}", number / 250, number % 250);
            let bind = json!({"spec": {"nodeName": "n"}});
            let status = json!({"status": {"phase": "Running", "podIP": ip, "podIPs": [{"ip": ip}],
                "conditions": [{"type": "Ready", "status": "True", "lastTransitionTime": "2026-01-01T00:00:00Z"}]}});
            let params = PatchParams::default();
            // The pod may be deleted meanwhile.
            let _ = self.api::<Pod>().patch(&name, &params, &Patch::Merge(bind)).await;
            let _ = self
                .api::<Pod>()
                .patch_status(&name, &params, &Patch::Merge(status))
                .await;
        }
    }

    /// Plays the kubelet until `done`; fails with what was seen last.
    async fn until<F: Future<Output = Result<(), String>>>(&self, done: impl Fn() -> F) {
        let mut last = String::new();
        let work = async {
            loop {
                self.run_pods().await;
                match done().await {
                    Ok(()) => return,
                    Err(seen) => last = seen,
                }
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        let in_time = tokio::time::timeout(Duration::from_secs(20), work).await.is_ok();
        assert!(in_time, "{last}");
    }

    async fn addresses(&self) -> usize {
        let slices = self.list::<EndpointSlice>().await;
        let endpoints = slices.iter().flat_map(|slice| slice.endpoints.iter().flatten());
        endpoints
            .filter(|one| one.conditions.as_ref().is_some_and(|c| c.ready == Some(true)))
            .count()
    }
}

fn deployment(image: &str, replicas: i32) -> Value {
    json!({"metadata": {"name": "web"}, "spec": {"replicas": replicas, "progressDeadlineSeconds": 600,
        "revisionHistoryLimit": 10, "selector": {"matchLabels": {"app": "web"}},
        "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": "25%", "maxUnavailable": "25%"}},
        "template": {"metadata": {"labels": {"app": "web"}}, "spec": {"containers": [
            {"name": "c", "image": image, "ports": [{"name": "http", "containerPort": 8080}]}]}}}})
}

fn check(good: bool, seen: impl Debug) -> Result<(), String> {
    if good { Ok(()) } else { Err(format!("{seen:?}")) }
}

async fn rolled_out(world: &World, replicas: i32, image: &str) -> Result<(), String> {
    let deployment = world.api::<Deployment>().get("web").await.unwrap();
    let status = deployment.status.clone().unwrap_or_default();
    let pods = world.list::<Pod>().await;
    let right = pods
        .iter()
        .all(|pod| pod.spec.as_ref().unwrap().containers[0].image.as_deref() == Some(image));
    let counts = [
        status.replicas,
        status.updated_replicas,
        status.available_replicas,
    ];
    let observed = status.observed_generation == deployment.metadata.generation;
    check(
        observed && right && counts == [Some(replicas); 3] && pods.len() == replicas as usize,
        status,
    )
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn from_apply_to_endpoints_and_away_again() {
    let world = World::start().await;
    world
        .create::<Service>(
            json!({"metadata": {"name": "web"}, "spec": {"clusterIP": "10.96.0.5",
        "ipFamilies": ["IPv4"], "selector": {"app": "web"}, "ports": [{"port": 80, "targetPort": "http"}]}}),
        )
        .await;
    world.create::<Deployment>(deployment("v1", 3)).await;
    world.until(async || rolled_out(&world, 3, "v1").await).await;
    world
        .until(async || check(world.addresses().await == 3, world.list::<EndpointSlice>().await))
        .await;
    let endpoints = world.api::<Endpoints>();
    world
        .until(async || {
            let subsets = endpoints
                .get_opt("web")
                .await
                .unwrap()
                .and_then(|one| one.subsets)
                .unwrap_or_default();
            let count = subsets
                .iter()
                .flat_map(|subset| subset.addresses.iter().flatten())
                .count();
            check(count == 3, subsets)
        })
        .await;

    // A pod that is deleted comes back.
    let victim = world.list::<Pod>().await[0].metadata.name.clone().unwrap();
    world
        .api::<Pod>()
        .delete(&victim, &DeleteParams::default())
        .await
        .unwrap();
    world
        .until(async || {
            rolled_out(&world, 3, "v1").await?;
            check(
                world.api::<Pod>().get_opt(&victim).await.unwrap().is_none(),
                "victim",
            )
        })
        .await;

    // A new image rolls, a changed number scales.
    let patch = json!({"spec": deployment("v2", 5)["spec"]});
    world
        .api::<Deployment>()
        .patch("web", &PatchParams::default(), &Patch::Merge(patch))
        .await
        .unwrap();
    world.until(async || rolled_out(&world, 5, "v2").await).await;
    world
        .until(async || check(world.addresses().await == 5, "addresses"))
        .await;
    let mut revisions: Vec<String> = world
        .list::<ReplicaSet>()
        .await
        .iter()
        .map(|set| set.metadata.annotations.as_ref().unwrap()["deployment.kubernetes.io/revision"].clone())
        .collect();
    revisions.sort();
    assert_eq!(revisions, vec!["1", "2"]);
    let live = world.api::<Deployment>().get("web").await.unwrap();
    assert_eq!(
        live.metadata.annotations.unwrap()["deployment.kubernetes.io/revision"],
        "2"
    );

    // The events tell the story.
    world
        .until(async || {
            let events = world.list::<Event>().await;
            let told = |reason: &str, text: &str| {
                events.iter().any(|event| {
                    event.reason.as_deref() == Some(reason)
                        && event
                            .message
                            .as_deref()
                            .is_some_and(|message| message.contains(text))
                })
            };
            check(
                told("ScalingReplicaSet", "from 0 to 3") && told("SuccessfulCreate", "Created pod: web-"),
                events.len(),
            )
        })
        .await;

    // Deleting the Deployment takes its sets and pods along.
    world
        .api::<Deployment>()
        .delete("web", &DeleteParams::background())
        .await
        .unwrap();
    world
        .until(async || {
            let left = (
                world.list::<ReplicaSet>().await.len(),
                world.list::<Pod>().await.len(),
            );
            check(left == (0, 0), left)
        })
        .await;
    world
        .until(async || check(world.addresses().await == 0, "addresses"))
        .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn foreground_waits_and_orphans_stay() {
    let world = World::start().await;
    world.create::<Deployment>(deployment("v1", 2)).await;
    world.until(async || rolled_out(&world, 2, "v1").await).await;
    world
        .api::<Deployment>()
        .delete("web", &DeleteParams::orphan())
        .await
        .unwrap();
    world
        .until(async || {
            let gone = world.api::<Deployment>().get_opt("web").await.unwrap().is_none();
            let sets = world.list::<ReplicaSet>().await;
            let free = sets
                .iter()
                .all(|set| set.metadata.owner_references.as_ref().is_none_or(Vec::is_empty));
            check(gone && free && sets.len() == 1, sets)
        })
        .await;
    assert_eq!(world.list::<Pod>().await.len(), 2);
    // A new Deployment of the same template adopts what was left.
    world.create::<Deployment>(deployment("v1", 2)).await;
    world.until(async || rolled_out(&world, 2, "v1").await).await;
    assert_eq!(world.list::<ReplicaSet>().await.len(), 1);
    world
        .api::<Deployment>()
        .delete("web", &DeleteParams::foreground())
        .await
        .unwrap();
    world
        .until(async || {
            let gone = world.api::<Deployment>().get_opt("web").await.unwrap().is_none();
            let left = (
                gone,
                world.list::<ReplicaSet>().await.len(),
                world.list::<Pod>().await.len(),
            );
            check(left == (true, 0, 0), left)
        })
        .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_namespace_is_furnished_and_emptied() {
    let world = World::start().await;
    world
        .until(async || {
            let account = world
                .api::<ServiceAccount>()
                .get_opt("default")
                .await
                .unwrap()
                .is_some();
            let map = world
                .api::<ConfigMap>()
                .get_opt("kube-root-ca.crt")
                .await
                .unwrap();
            let pem = map
                .and_then(|map| map.data)
                .and_then(|data| data.get("ca.crt").cloned());
            check(account && pem.as_deref() == Some("PEM"), (account, pem))
        })
        .await;
    let nodes: Api<Node> = Api::all(world.client.clone());
    world
        .until(async || {
            let spec = nodes.get("n").await.unwrap().spec.unwrap_or_default();
            check(
                spec.pod_cidr.as_deref() == Some("10.244.0.0/24") && spec.taints.is_none(),
                spec,
            )
        })
        .await;
    world.create::<Deployment>(deployment("v1", 2)).await;
    world.until(async || rolled_out(&world, 2, "v1").await).await;
    let namespaces: Api<Namespace> = Api::all(world.client.clone());
    namespaces
        .delete("default", &DeleteParams::default())
        .await
        .unwrap();
    world
        .until(async || {
            let left = namespaces.get_opt("default").await.unwrap();
            check(left.is_none(), left)
        })
        .await;
}

/// One group cannot be discovered: all others are emptied, but the namespace stays until it can.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_dead_group_holds_the_namespace_but_not_its_content() {
    let world = World::start().await;
    world.create::<Deployment>(deployment("v1", 1)).await;
    world.until(async || rolled_out(&world, 1, "v1").await).await;
    world
        .create::<ConfigMap>(json!({"metadata": {"name": "m", "namespace": "default"}}))
        .await;
    world.fake.dead_group.store(true, Ordering::Relaxed);
    let namespaces: Api<Namespace> = Api::all(world.client.clone());
    namespaces
        .delete("default", &DeleteParams::default())
        .await
        .unwrap();
    world
        .until(async || {
            let namespace = namespaces.get("default").await.unwrap();
            let conditions = namespace.status.unwrap_or_default().conditions.unwrap_or_default();
            let told = |type_: &str| {
                let found = conditions.iter().find(|condition| condition.type_ == type_);
                found.map(|found| (found.status.clone(), found.message.clone().unwrap_or_default()))
            };
            let expected = "Discovery failed for some groups, 1 failing: unable to retrieve the complete list of server APIs: dead.example/v1: ServiceUnavailable";
            let discovery = told("NamespaceDeletionDiscoveryFailure");
            let content = told("NamespaceContentRemaining").map(|(status, _)| status);
            let left = world.list::<ConfigMap>().await.len() + world.list::<Deployment>().await.len();
            check(
                left == 0
                    && discovery == Some(("True".to_owned(), expected.to_owned()))
                    && content.as_deref() == Some("False"),
                (left, conditions.clone()),
            )
        })
        .await;
    let held = namespaces.get("default").await.unwrap().spec.unwrap().finalizers;
    assert_eq!(held, Some(vec!["kubernetes".to_owned()]));
    world.fake.dead_group.store(false, Ordering::Relaxed);
    world
        .until(async || {
            let left = namespaces.get_opt("default").await.unwrap();
            check(left.is_none(), left)
        })
        .await;
}

/// Every controller, and what feeds it, panics once: all come back and nothing is missed.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn controllers_that_panic_come_back() {
    let world = World::start().await;
    world.create::<Deployment>(deployment("v1", 1)).await;
    world.until(async || rolled_out(&world, 1, "v1").await).await;
    let before = skiff_supervise::tasks();
    for name in before.keys() {
        skiff_supervise::panic_in(name);
    }
    world
        .until(async || {
            let now = skiff_supervise::tasks();
            let down: Vec<_> = before
                .iter()
                .filter(|(name, before)| {
                    before.running > 0 && (now[*name].failures == before.failures || now[*name].waiting > 0)
                })
                .collect();
            check(down.is_empty(), down)
        })
        .await;
    for name in ["deployment-controller", "informer", "events"] {
        assert!(skiff_supervise::tasks().contains_key(name), "{:?}", before.keys());
    }
    let change = json!({"spec": {"replicas": 3}});
    world
        .api::<Deployment>()
        .patch("web", &PatchParams::default(), &Patch::Merge(change))
        .await
        .unwrap();
    world.until(async || rolled_out(&world, 3, "v1").await).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_forged_reference_costs_nobody_else() {
    let world = World::start().await;
    world.create::<Deployment>(deployment("v1", 1)).await;
    world.until(async || rolled_out(&world, 1, "v1").await).await;
    let owner = world.api::<Deployment>().get("web").await.unwrap();
    let uid = owner.metadata.uid.unwrap();
    let map = |name: &str, references: &[(&str, &str, &str, &str)]| {
        let references: Vec<Value> = references
            .iter()
            .map(|(api_version, kind, name, uid)| {
                json!({"apiVersion": api_version, "kind": kind, "name": name, "uid": uid})
            })
            .collect();
        json!({"metadata": {"name": name, "namespace": "default", "ownerReferences": references}})
    };
    // The uid of a living object under a name that nobody has. The second reference makes it looked at.
    let forged = [
        ("v1", "Pod", "nobody", uid.as_str()),
        ("v1", "Pod", "x", "gone-1"),
    ];
    world.create::<ConfigMap>(map("forged", &forged)).await;
    world
        .until(async || {
            let left = world.api::<ConfigMap>().get_opt("forged").await.unwrap();
            check(left.is_none(), left)
        })
        .await;
    let honest = [
        ("apps/v1", "Deployment", "web", uid.as_str()),
        ("v1", "Pod", "x", "gone-2"),
    ];
    world.create::<ConfigMap>(map("honest", &honest)).await;
    world
        .until(async || {
            let left = world.api::<ConfigMap>().get_opt("honest").await.unwrap();
            let owners = left
                .as_ref()
                .and_then(|left| left.metadata.owner_references.clone())
                .unwrap_or_default();
            assert!(left.is_some(), "it was deleted though its owner lives");
            check(owners.len() == 1 && owners[0].uid == uid, owners)
        })
        .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_owner_that_cannot_be_read_is_not_gone() {
    let world = World::start().await;
    let map = |name: &str, owner: &str| {
        json!({"metadata": {"name": name, "namespace": "default", "ownerReferences": [
            {"apiVersion": "v1", "kind": "Pod", "name": owner, "uid": format!("uid-of-{owner}")}]}})
    };
    world.create::<ConfigMap>(map("kept", "unreadable")).await;
    // The collector looks at both, and is done with what came later.
    for name in ["orphan-1", "orphan-2"] {
        world.create::<ConfigMap>(map(name, "gone")).await;
        world
            .until(async || {
                let left = world.api::<ConfigMap>().get_opt(name).await.unwrap();
                check(left.is_none(), left)
            })
            .await;
    }
    let left = world.api::<ConfigMap>().get_opt("kept").await.unwrap();
    assert!(left.is_some(), "it was deleted though its owner may live");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_ring_of_owners_can_be_deleted_in_the_foreground() {
    let world = World::start().await;
    let map = |name: &str| json!({"metadata": {"name": name, "namespace": "default"}});
    world.create::<ConfigMap>(map("a")).await;
    world.create::<ConfigMap>(map("b")).await;
    let maps = world.api::<ConfigMap>();
    for (name, owner) in [("a", "b"), ("b", "a")] {
        let uid = maps.get(owner).await.unwrap().metadata.uid;
        let patch = json!({"metadata": {"ownerReferences": [
            {"apiVersion": "v1", "kind": "ConfigMap", "name": owner, "uid": uid, "blockOwnerDeletion": true}]}});
        let patch = Patch::Merge(patch);
        maps.patch(name, &PatchParams::default(), &patch).await.unwrap();
    }
    maps.delete("a", &DeleteParams::foreground()).await.unwrap();
    world
        .until(async || {
            let left = (maps.get_opt("a").await.unwrap(), maps.get_opt("b").await.unwrap());
            check(left == (None, None), left)
        })
        .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn storage_in_use_is_not_deleted() {
    let world = World::start().await;
    let classes: Api<VolumeAttributesClass> = Api::all(world.client.clone());
    let volumes: Api<PersistentVolume> = Api::all(world.client.clone());
    let claims = world.api::<PersistentVolumeClaim>();
    let (post, delete) = (PostParams::default(), DeleteParams::default());
    let class = json!({"metadata": {"name": "class"}, "driverName": "d", "parameters": {"a": "b"}});
    let class: VolumeAttributesClass = serde_json::from_value(class).unwrap();
    classes.create(&post, &class).await.unwrap();
    let volume = json!({"metadata": {"name": "volume"}, "spec": {}, "status": {"phase": "Bound"}});
    let volume: PersistentVolume = serde_json::from_value(volume).unwrap();
    volumes.create(&post, &volume).await.unwrap();
    let claim = json!({"metadata": {"name": "claim"}, "spec": {"volumeAttributesClassName": "class"}});
    world.create::<PersistentVolumeClaim>(claim).await;
    let pod = json!({"metadata": {"name": "user"}, "spec": {"nodeName": "n", "containers": [], "volumes": [
        {"name": "v", "persistentVolumeClaim": {"claimName": "claim"}}]}});
    world.create::<Pod>(pod).await;

    // Each gets its finalizer, and waits with it.
    let finalizers = async || {
        let of = |finalizers: Option<Vec<String>>| finalizers.unwrap_or_default().join("+");
        [
            of(classes.get("class").await.unwrap().metadata.finalizers),
            of(volumes.get("volume").await.unwrap().metadata.finalizers),
            of(claims.get("claim").await.unwrap().metadata.finalizers),
        ]
    };
    let all = ["vac", "pv", "pvc"].map(|name| format!("kubernetes.io/{name}-protection"));
    world
        .until(async || check(finalizers().await == all, finalizers().await))
        .await;
    classes.delete("class", &delete).await.unwrap();
    volumes.delete("volume", &delete).await.unwrap();
    claims.delete("claim", &delete).await.unwrap();
    // A class that nobody uses goes at once; by then the others were looked at, too, or will be.
    let mut unused = class.clone();
    unused.metadata.name = Some("unused".into());
    classes.create(&post, &unused).await.unwrap();
    world
        .until(async || {
            let seen = classes.get("unused").await.unwrap().metadata.finalizers;
            check(seen.is_some(), seen)
        })
        .await;
    classes.delete("unused", &delete).await.unwrap();
    world
        .until(async || check(classes.get_opt("unused").await.unwrap().is_none(), "unused"))
        .await;
    assert_eq!(finalizers().await, all);

    // The pod goes, then the claim, then the class; the volume when it is no longer bound.
    world.api::<Pod>().delete("user", &delete).await.unwrap();
    world
        .until(async || check(claims.get_opt("claim").await.unwrap().is_none(), "claim"))
        .await;
    world
        .until(async || check(classes.get_opt("class").await.unwrap().is_none(), "class"))
        .await;
    assert!(volumes.get_opt("volume").await.unwrap().is_some());
    let released = Patch::Merge(json!({"status": {"phase": "Released"}}));
    volumes
        .patch_status("volume", &PatchParams::default(), &released)
        .await
        .unwrap();
    world
        .until(async || check(volumes.get_opt("volume").await.unwrap().is_none(), "volume"))
        .await;
}
