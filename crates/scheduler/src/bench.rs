//! The shapes of upstream's scheduler_perf without an API server: pods go through queue, cycle and cache, and are
//! confirmed at once. For `benches/scheduler.rs` only.

use crate::config::Configuration;
use crate::cycle::{Outcome, schedule};
use crate::events::ClusterEvent;
use crate::framework::Profile;
use crate::listers::Listers;
use crate::node::NodeMeta;
use crate::plugins::testing::handle;
use crate::pod::PodInfo;
use crate::queue::SchedulingQueue;
use crate::run::Core;
use k8s_openapi::api::core::v1::{Node, Pod};
use serde_json::{Value, json};
use skiff_client::Key;
use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

const ZONE: &str = "topology.kubernetes.io/zone";
const HOST: &str = "kubernetes.io/hostname";

/// One shape: what is there before, what is measured.
pub struct Shape {
    pub name: &'static str,
    before: fn(&mut World),
    pods: fn(usize) -> Value,
    /// Called before each measured pod.
    churn: fn(&mut World, usize),
}

struct World {
    core: Core,
    queue: SchedulingQueue,
    profile: Arc<Profile>,
    listers: Arc<Listers>,
    nodes: usize,
    plain: bool,
    scheduled: usize,
    failed: usize,
}

fn node(index: usize) -> NodeMeta {
    let name = format!("node-{index}");
    let labels = json!({HOST: name, ZONE: format!("zone-{}", index % 10), "kubernetes.io/os": "linux"});
    let allocatable = json!({"cpu": "4", "memory": "32Gi", "pods": "110"});
    let object =
        json!({"metadata": {"name": name, "labels": labels}, "status": {"allocatable": allocatable}});
    let node: Node = serde_json::from_value(object).unwrap_or_default();
    NodeMeta::new(&node)
}

fn pod(name: &str, mut spec: Value, labels: Value) -> Value {
    if spec["containers"].is_null() {
        let requests = json!({"cpu": "100m", "memory": "500Mi"});
        spec["containers"] =
            json!([{"name": "pause", "image": "pause:3", "resources": {"requests": requests}}]);
    }
    json!({"metadata": {"name": name, "namespace": "bench", "uid": name, "labels": labels}, "spec": spec})
}

impl World {
    fn new(nodes: usize, plain: bool) -> Self {
        let listers = Arc::new(Listers::default());
        let profile = Configuration::default().profiles(&handle(Arc::clone(&listers)));
        #[allow(clippy::unwrap_used, reason = "the default configuration is valid")]
        let profile = Arc::new(profile.unwrap().remove(0));
        let profiles = HashMap::from([(profile.scheduler_name.clone(), Arc::clone(&profile))]);
        let mut world = Self {
            core: Core::default(),
            queue: SchedulingQueue::new(Arc::new(profiles), Default::default()),
            profile,
            listers,
            nodes,
            plain,
            scheduled: 0,
            failed: 0,
        };
        for index in 0..nodes {
            world.core.cache.set_node(&format!("node-{index}"), node(index));
        }
        world
    }

    fn read(&mut self, value: Value) -> Arc<PodInfo> {
        let pod: Pod = serde_json::from_value(value).unwrap_or_default();
        self.core.cache.read(&pod)
    }

    fn place(&mut self, value: Value, node: usize) {
        let pod = self.read(value);
        self.core.cache.place(pod, &format!("node-{node}"));
    }

    /// Tries everything that is active.
    fn drain(&mut self) {
        while let Some(queued) = self.queue.try_next() {
            let pod = queued.pod;
            let Core { cache, classes } = &mut self.core;
            let chosen = if self.plain {
                None
            } else {
                classes.schedule(&self.profile, cache, &pod)
            };
            let outcome = chosen.unwrap_or_else(|| {
                let mut start = cache.next_start;
                let outcome = schedule(&self.profile, cache, &pod, &mut start);
                cache.next_start = start;
                outcome
            });
            match outcome {
                Outcome::Node { id, .. } => {
                    let Some(name) = cache.get(id).map(|node| Arc::clone(&node.name)) else {
                        continue;
                    };
                    cache.assume(Arc::clone(&pod), &name);
                    // What the informer would do when it shows the bound pod.
                    self.queue.remove(&pod.uid);
                    cache.place(Arc::clone(&pod), &name);
                    self.queue.on_event(ClusterEvent::PodPlaced(pod));
                    self.scheduled += 1;
                }
                Outcome::Nowhere(diagnosis) => {
                    self.failed += 1;
                    let found = diagnosis.post_filter;
                    if let Some(node) = &found.nominate {
                        cache.nominate(&pod, node);
                    }
                    self.queue.park(&pod.uid, diagnosis.rejected_by);
                    for victim in found.victims {
                        if let Some(removed) = cache.remove_pod(&victim.uid) {
                            self.queue.on_event(ClusterEvent::PodRemoved(removed));
                        }
                    }
                }
            }
        }
    }
}

fn nothing(_: &mut World) {}
fn no_churn(_: &mut World, _: usize) {}

fn term(key: &str, color: &str) -> Value {
    json!([{"topologyKey": key, "labelSelector": {"matchLabels": {"color": color}}}])
}

/// All shapes.
pub const SHAPES: &[Shape] = &[
    Shape {
        name: "basic",
        before: nothing,
        pods: |n| pod(&format!("p{n}"), json!({}), json!({"app": "basic"})),
        churn: no_churn,
    },
    Shape {
        name: "service default spread",
        before: |world| {
            let labels = [("app".to_owned(), "web".to_owned())].into_iter().collect();
            world.listers.set_service(&Key::new("bench", "web"), Some(labels));
        },
        pods: |n| pod(&format!("p{n}"), json!({}), json!({"app": "web"})),
        churn: no_churn,
    },
    Shape {
        name: "node affinity",
        before: nothing,
        pods: |n| {
            let terms = json!([{"matchExpressions": [{"key": ZONE, "operator": "In", "values": ["zone-1", "zone-2"]}]}]);
            let affinity = json!({"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}});
            pod(&format!("p{n}"), json!({"affinity": affinity}), json!({}))
        },
        churn: no_churn,
    },
    Shape {
        name: "pod affinity",
        before: nothing,
        pods: |n| {
            let affinity = json!({"podAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": term(ZONE, "blue")}});
            pod(
                &format!("p{n}"),
                json!({"affinity": affinity}),
                json!({"color": "blue"}),
            )
        },
        churn: no_churn,
    },
    Shape {
        name: "pod anti-affinity",
        before: nothing,
        pods: |n| {
            let affinity = json!({"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": term(HOST, "green")}});
            pod(
                &format!("p{n}"),
                json!({"affinity": affinity}),
                json!({"color": "green"}),
            )
        },
        churn: no_churn,
    },
    Shape {
        name: "preferred pod affinity",
        before: nothing,
        pods: |n| {
            let preferred = json!([{"weight": 1, "podAffinityTerm": term(HOST, "red")[0]}]);
            let affinity =
                json!({"podAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": preferred}});
            pod(
                &format!("p{n}"),
                json!({"affinity": affinity}),
                json!({"color": "red"}),
            )
        },
        churn: no_churn,
    },
    Shape {
        name: "topology spread",
        before: nothing,
        pods: |n| {
            let constraint = json!({"topologyKey": ZONE, "maxSkew": 5, "whenUnsatisfiable": "DoNotSchedule",
                "labelSelector": {"matchLabels": {"color": "blue"}}});
            pod(
                &format!("p{n}"),
                json!({"topologySpreadConstraints": [constraint]}),
                json!({"color": "blue"}),
            )
        },
        churn: no_churn,
    },
    Shape {
        name: "preemption",
        before: |world| {
            for n in 0..world.nodes * 4 {
                let requests = json!({"cpu": "900m", "memory": "500Mi"});
                let containers = json!([{"name": "c", "resources": {"requests": requests}}]);
                let value = pod(
                    &format!("low{n}"),
                    json!({"containers": containers, "priority": 1}),
                    json!({}),
                );
                let node = n % world.nodes;
                world.place(value, node);
            }
        },
        pods: |n| {
            let containers =
                json!([{"name": "c", "resources": {"requests": {"cpu": "3000m", "memory": "500Mi"}}}]);
            pod(
                &format!("p{n}"),
                json!({"containers": containers, "priority": 10}),
                json!({}),
            )
        },
        churn: no_churn,
    },
    Shape {
        name: "volumes",
        before: |world| {
            for n in 0..MEASURED {
                let annotations = json!({"pv.kubernetes.io/bind-completed": "true"});
                let claim = json!({"metadata": {"name": format!("c{n}"), "namespace": "bench", "annotations": annotations},
                    "spec": {"accessModes": ["ReadWriteOnce"], "volumeName": format!("v{n}")}});
                let volume = json!({"metadata": {"name": format!("v{n}")},
                    "spec": {"accessModes": ["ReadWriteOnce"], "csi": {"driver": "ebs", "volumeHandle": format!("h{n}")}}});
                if let (Ok(claim), Ok(volume)) =
                    (serde_json::from_value(claim), serde_json::from_value(volume))
                {
                    world
                        .listers
                        .claims
                        .set(Key::new("bench", format!("c{n}")), Arc::new(claim));
                    world
                        .listers
                        .volumes
                        .set(Key::new("", format!("v{n}")), Arc::new(volume));
                }
            }
            for n in 0..world.nodes {
                let drivers = json!([{"name": "ebs", "nodeID": "x", "allocatable": {"count": 39}}]);
                let node = json!({"metadata": {"name": format!("node-{n}")}, "spec": {"drivers": drivers}});
                if let Ok(node) = serde_json::from_value(node) {
                    world
                        .listers
                        .csi_nodes
                        .set(Key::new("", format!("node-{n}")), Arc::new(node));
                }
            }
        },
        pods: |n| {
            let volume = json!({"name": "v", "persistentVolumeClaim": {"claimName": format!("c{n}")}});
            pod(&format!("p{n}"), json!({"volumes": [volume]}), json!({}))
        },
        churn: no_churn,
    },
    Shape {
        name: "churn of nodes and pods",
        before: nothing,
        pods: |n| pod(&format!("p{n}"), json!({}), json!({"app": "basic"})),
        churn: |world, n| {
            if n % 10 == 0 {
                let index = world.nodes + n;
                world.core.cache.set_node(&format!("node-{index}"), node(index));
                let meta = Arc::new(node(index));
                world.queue.on_event(ClusterEvent::NodeAdded(meta));
                if n >= 20 {
                    world.core.cache.remove_node(&format!("node-{}", index - 20));
                }
            }
            if n % 5 == 0
                && n > 100
                && let Some(removed) = world.core.cache.remove_pod(&format!("p{}", n - 100))
            {
                world.queue.on_event(ClusterEvent::PodRemoved(removed));
            }
        },
    },
    Shape {
        name: "backlog of unschedulable pods",
        before: |world| {
            for n in 0..2000 {
                let containers = json!([{"name": "c", "resources": {"requests": {"cpu": "9"}}}]);
                let pod = world.read(pod(
                    &format!("big{n}"),
                    json!({"containers": containers}),
                    json!({"app": "big"}),
                ));
                world.queue.add(pod);
            }
            world.drain();
        },
        pods: |n| pod(&format!("p{n}"), json!({}), json!({"app": "basic"})),
        churn: |world, n| {
            // Each removed pod may have made room: the backlog is looked at again.
            if n % 100 == 0
                && n > 100
                && let Some(removed) = world.core.cache.remove_pod(&format!("p{}", n - 100))
            {
                world.queue.on_event(ClusterEvent::PodRemoved(removed));
            }
        },
    },
];

const MEASURED: usize = 5000;

/// Pods a second, how many found a node, and how many tries found none.
pub struct Measured {
    pub pods_per_second: f64,
    pub scheduled: usize,
    pub failed: usize,
    pub took: Duration,
}

/// `plain` measures the plain algorithm instead of the class cache, over fewer pods.
#[must_use]
pub fn measure(shape: &Shape, nodes: usize, plain: bool) -> Measured {
    let mut world = World::new(nodes, plain);
    (shape.before)(&mut world);
    let count = if plain { 200 } else { MEASURED };
    let values: Vec<Pod> = (0..count)
        .map(|n| serde_json::from_value((shape.pods)(n)).unwrap_or_default())
        .collect();
    (world.scheduled, world.failed) = (0, 0);
    let began = Instant::now();
    for (n, object) in values.iter().enumerate() {
        (shape.churn)(&mut world, n);
        let pod = world.core.cache.read(object);
        world.queue.add(pod);
        world.drain();
    }
    let took = began.elapsed();
    #[allow(clippy::cast_precision_loss, reason = "a rate")]
    Measured {
        pods_per_second: world.scheduled as f64 / took.as_secs_f64(),
        scheduled: world.scheduled,
        failed: world.failed,
        took,
    }
}
