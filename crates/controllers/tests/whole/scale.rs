//! Many objects: what one change costs must not grow with their number. Counted in objects that informers decode, which
//! no slow machine changes.

use std::collections::BTreeMap;
use std::sync::Arc;

use futures::StreamExt;
use k8s_openapi::api::apps::v1::DaemonSet;
use k8s_openapi::api::core::v1::{Endpoints, Pod, Service};
use k8s_openapi::api::discovery::v1::EndpointSlice;
use serde_json::json;
use skiff_client::ComponentMetrics;
use skiff_controllers::ControllerSelection;

use crate::cluster::{Cluster, check, running};

const NODES: usize = 1000;
/// Of one change: itself, what was before, the set, the slices, and what the reconcile wrote; never the thousand others.
const MOST_DECODES: usize = 60;

struct Measured {
    cluster: Cluster,
    metrics: Arc<ComponentMetrics>,
}

impl Measured {
    async fn start(controllers: &[&str]) -> Measured {
        let cluster = Cluster::without_controllers().await;
        let metrics: Arc<ComponentMetrics> = Arc::default();
        cluster.run_controllers(|config| {
            config.metrics = metrics.clone();
            // Room for all: nodes without a range are tried again and again.
            config.cluster_cidrs = vec!["10.240.0.0/12".into()];
            // Nobody renews the leases of these nodes.
            config.node_monitor_grace_period = std::time::Duration::from_secs(3600);
            config.controllers = ControllerSelection::parse(controllers).unwrap();
        });
        cluster.furnished().await;
        let nodes: Vec<String> = (0..NODES).map(|n| format!("n{n}")).collect();
        let made = futures::stream::iter(&nodes).map(|name| cluster.add_node(name));
        made.buffer_unordered(16).collect::<()>().await;
        Measured { cluster, metrics }
    }

    /// How many objects were decoded so far, by informer.
    fn by_informer(&self) -> BTreeMap<String, usize> {
        let text = self.metrics.registry.text();
        let lines = text
            .lines()
            .filter_map(|line| line.strip_prefix("skiff_informer_decodes_total{"));
        lines
            .filter_map(|line| line.rsplit_once(' '))
            .map(|(labels, count)| (labels.to_owned(), count.parse().unwrap()))
            .collect()
    }

    fn decodes(&self) -> usize {
        self.by_informer().values().sum()
    }

    /// Waits until nothing is decoded any more, for longer than a controller pauses between two writes, also on a machine
    /// that is busy with something else.
    async fn rest(&self) {
        let (mut before, mut quiet) = (self.decodes(), 0);
        while quiet < 4 {
            tokio::time::sleep(std::time::Duration::from_secs(1)).await;
            let now = self.decodes();
            quiet = if now == before { quiet + 1 } else { 0 };
            before = now;
        }
    }

    /// Few objects were decoded since then.
    fn check(&self, before: &BTreeMap<String, usize>) {
        let mut since = self.by_informer();
        for (informer, count) in &mut since {
            *count -= before.get(informer).copied().unwrap_or_default();
        }
        let decoded: usize = since.values().sum();
        assert!(
            decoded <= MOST_DECODES,
            "{decoded} objects were decoded for one change: {since:#?}"
        );
    }

    /// Binds and runs all pods.
    async fn run_all(&self) {
        let pods = self.cluster.list::<Pod>().await;
        let run = async |pod: &Pod| {
            if pod.spec.as_ref().is_some_and(|spec| spec.node_name.is_none()) {
                self.cluster.bind(pod).await;
            }
            let name = pod.metadata.name.as_deref().unwrap();
            self.cluster.set_pod_status(name, running(pod)).await;
        };
        let run = futures::stream::iter(&pods).map(run);
        run.buffer_unordered(16).collect::<()>().await;
    }

    /// A pod stops to be ready.
    async fn break_one(&self) {
        let pod = self.cluster.list::<Pod>().await.pop().unwrap();
        let mut status = running(&pod);
        status["conditions"][1]["status"] = json!("False");
        let name = pod.metadata.name.as_deref().unwrap();
        self.cluster.set_pod_status(name, status).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_daemon_set_does_not_decode_all_nodes_and_pods_for_one() {
    let measured = Measured::start(&[
        "daemonset-controller",
        "serviceaccount-controller",
        // A new node is tainted until this one finds it ready.
        "node-lifecycle-controller",
    ])
    .await;
    let cluster = &measured.cluster;
    let set = json!({"metadata": {"name": "agent"}, "spec": {"selector": {"matchLabels": {"app": "agent"}},
        "template": {"metadata": {"labels": {"app": "agent"}}, "spec": {"containers": [{"name": "c", "image": "i"}]}}}});
    cluster.create::<DaemonSet>(set).await;
    let sets = cluster.api::<DaemonSet>();
    let status = async || sets.get("agent").await.unwrap().status.unwrap_or_default();
    cluster
        .until_slowly("a pod a node", async || {
            let scheduled = status().await.current_number_scheduled;
            check(scheduled == NODES as i32, scheduled)
        })
        .await;
    measured.run_all().await;
    let ready = async |count: usize| {
        let ready = status().await.number_ready;
        check(ready == count as i32, ready)
    };
    cluster
        .until_slowly("all ready", async || ready(NODES).await)
        .await;
    measured.rest().await;
    let before = measured.by_informer();
    measured.break_one().await;
    cluster
        .until_slowly("one less", async || ready(NODES - 1).await)
        .await;
    measured.rest().await;
    measured.check(&before);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn endpoints_do_not_decode_all_pods_for_one() {
    let measured = Measured::start(&[
        "endpoints-controller",
        "endpointslice-controller",
        "serviceaccount-controller",
        "node-ipam-controller",
    ])
    .await;
    let cluster = &measured.cluster;
    cluster
        .create::<Service>(json!({"metadata": {"name": "web"},
            "spec": {"selector": {"app": "web"}, "ports": [{"port": 80}]}}))
        .await;
    let create = |n: usize| {
        let pod = json!({"metadata": {"name": format!("p{n}"), "labels": {"app": "web"}},
            "spec": {"nodeName": format!("n{n}"), "containers": [{"name": "c", "image": "i"}]}});
        async move {
            cluster.create::<Pod>(pod).await;
        }
    };
    let made = futures::stream::iter(0..NODES).map(create);
    made.buffer_unordered(16).collect::<()>().await;
    measured.run_all().await;
    // Two controllers write, each at its own time.
    let ready = async |wanted: usize| {
        let endpoints = cluster.api::<Endpoints>().get_opt("web").await.unwrap();
        let subsets = endpoints
            .into_iter()
            .flat_map(|one| one.subsets.unwrap_or_default());
        let count = subsets
            .flat_map(|subset| subset.addresses.unwrap_or_default())
            .count();
        check(count == wanted, format!("{count} in Endpoints"))?;
        let slices = cluster.list::<EndpointSlice>().await;
        let ours = slices.iter().filter(|slice| {
            let labels = slice.metadata.labels.as_ref();
            let service = labels.and_then(|labels| labels.get("kubernetes.io/service-name"));
            service.is_some_and(|name| name == "web")
        });
        let endpoints = ours.flat_map(|slice| slice.endpoints.iter().flatten());
        let ready = endpoints.filter(|one| one.conditions.as_ref().and_then(|c| c.ready) == Some(true));
        let count = ready.count();
        check(count == wanted, count)
    };
    cluster
        .until_slowly("all ready", async || ready(NODES).await)
        .await;
    measured.rest().await;
    let before = measured.by_informer();
    measured.break_one().await;
    cluster
        .until_slowly("one less", async || ready(NODES - 1).await)
        .await;
    measured.rest().await;
    measured.check(&before);
}
