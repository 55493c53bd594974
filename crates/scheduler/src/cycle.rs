//! One scheduling cycle as a pure function of a pod and the nodes.

use crate::framework::{MAX_SCORE, Plugin};
use crate::snapshot::{NodeInfo, PodInfo};
use rand::RngExt;
use std::collections::BTreeMap;
use std::sync::Arc;

/// Where a pod goes, or why nowhere.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Outcome {
    Node(String),
    Nowhere(Diagnosis),
}

#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Diagnosis {
    pub message: String,
    /// Plugins that turned the pod away somewhere.
    pub rejected_by: Vec<&'static str>,
}

/// COMPAT: upstream's shares: among many nodes a good one is as good as the best one.
const ALL_OF: usize = 100;
const LEAST_PERCENT: usize = 5;

/// How many fitting nodes are enough to choose from.
fn enough(nodes: usize) -> usize {
    let percent = 50_usize.saturating_sub(nodes / 125).max(LEAST_PERCENT);
    (nodes * percent / 100).max(ALL_OF)
}

/// `start` is where to begin with the nodes; it moves on, so that all get their turn.
pub fn schedule(
    pod: &PodInfo,
    nodes: &[Arc<NodeInfo>],
    plugins: &[Arc<dyn Plugin>],
    start: &mut usize,
) -> Outcome {
    if nodes.is_empty() {
        // COMPAT: upstream's words for a cluster without nodes; a new node is what would help.
        let message = "no nodes available to schedule pods".to_owned();
        return Outcome::Nowhere(Diagnosis {
            message,
            rejected_by: vec![],
        });
    }
    let mut rejected_by: Vec<&'static str> = Vec::new();
    let mut note = |name: &'static str| {
        if !rejected_by.contains(&name) {
            rejected_by.push(name);
        }
    };
    let available = format!("0/{} nodes are available:", nodes.len());
    for plugin in plugins {
        if let Err(rejection) = plugin.pre_filter(pod, nodes) {
            let message = format!("{available} {}.", rejection.reasons.join(", "));
            return Outcome::Nowhere(Diagnosis {
                message,
                rejected_by: vec![plugin.name()],
            });
        }
    }
    let mut fitting: Vec<&Arc<NodeInfo>> = Vec::new();
    let mut reasons: BTreeMap<String, usize> = BTreeMap::new();
    let (wanted, mut seen) = (enough(nodes.len()), 0);
    let first = *start % nodes.len();
    for node in nodes[first..].iter().chain(&nodes[..first]) {
        if fitting.len() >= wanted {
            break;
        }
        seen += 1;
        let rejection = plugins
            .iter()
            .find_map(|p| p.filter(pod, node).err().map(|r| (p.name(), r)));
        match rejection {
            None => fitting.push(node),
            Some((plugin, rejection)) => {
                note(plugin);
                for reason in rejection.reasons {
                    *reasons.entry(reason).or_default() += 1;
                }
            }
        }
    }
    *start = (first + seen) % nodes.len();
    if fitting.is_empty() {
        let mut counted: Vec<String> = reasons
            .iter()
            .map(|(reason, count)| format!("{count} {reason}"))
            .collect();
        counted.sort();
        let mut message = format!("{available} {}.", counted.join(", "));
        if let Some(more) = plugins.iter().find_map(|p| p.post_filter(pod, nodes)) {
            message = format!("{message} {more}");
        }
        return Outcome::Nowhere(Diagnosis { message, rejected_by });
    }
    Outcome::Node(best(pod, &fitting, plugins))
}

/// The node with the highest weighted score; a random one among equals.
fn best(pod: &PodInfo, fitting: &[&Arc<NodeInfo>], plugins: &[Arc<dyn Plugin>]) -> String {
    if let [only] = fitting {
        return only.name.to_string();
    }
    let mut totals = vec![0_i64; fitting.len()];
    for plugin in plugins.iter().filter(|p| p.weight() > 0 && p.pre_score(pod)) {
        let mut scores: Vec<i64> = fitting.iter().map(|node| plugin.score(pod, node)).collect();
        plugin.normalize_scores(&mut scores);
        for (total, score) in totals.iter_mut().zip(scores) {
            *total += score.clamp(0, MAX_SCORE) * plugin.weight();
        }
    }
    let top = totals.iter().copied().max().unwrap_or(0);
    let equals: Vec<&str> = fitting
        .iter()
        .zip(&totals)
        .filter(|(_, t)| **t == top)
        .map(|(n, _)| &*n.name)
        .collect();
    equals[rand::rng().random_range(0..equals.len())].to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plugins::default_profile;
    use crate::snapshot::fixtures::{node, plain_node, pod};
    use serde_json::json;

    fn profile() -> Vec<Arc<dyn Plugin>> {
        let config = kube::Config::new("http://127.0.0.1:1".parse().unwrap());
        default_profile(kube::Client::try_from(config).unwrap())
    }

    #[tokio::test]
    async fn reasons_are_counted_by_node() {
        let nodes: Vec<Arc<NodeInfo>> = [
            node(
                "a",
                json!({"unschedulable": true}),
                json!({}),
                json!({"cpu": "2", "memory": "1Gi", "pods": "10"}),
            ),
            node(
                "b",
                json!({}),
                json!({}),
                json!({"cpu": "1", "memory": "1Gi", "pods": "10"}),
            ),
            node(
                "c",
                json!({}),
                json!({}),
                json!({"cpu": "1", "memory": "1Gi", "pods": "10"}),
            ),
        ]
        .into_iter()
        .map(Arc::new)
        .collect();
        let wanting = |cpu: &str| {
            pod(
                "p",
                json!({"containers": [{"name": "c", "resources": {"requests": {"cpu": cpu}}}]}),
            )
        };
        let Outcome::Nowhere(diagnosis) = schedule(&wanting("1500m"), &nodes, &profile(), &mut 0) else {
            panic!("nothing fits");
        };
        assert_eq!(
            diagnosis.message,
            "0/3 nodes are available: 1 node(s) were unschedulable, 2 Insufficient cpu."
        );
        assert_eq!(diagnosis.rejected_by, ["NodeUnschedulable", "NodeResourcesFit"]);
        assert!(
            matches!(schedule(&wanting("500m"), &nodes, &profile(), &mut 0), Outcome::Node(name) if name != "a")
        );
        let Outcome::Nowhere(diagnosis) = schedule(&wanting("1"), &[], &profile(), &mut 0) else {
            panic!("no nodes")
        };
        assert_eq!(diagnosis.message, "no nodes available to schedule pods");
    }

    #[tokio::test]
    async fn the_emptier_node_wins() {
        let mut full = plain_node("full");
        let big =
            json!({"containers": [{"name": "c", "resources": {"requests": {"cpu": "1", "memory": "2Gi"}}}]});
        full.add_pod(pod("there", big).load);
        let nodes = vec![Arc::new(full), Arc::new(plain_node("empty"))];
        for _ in 0..10 {
            assert_eq!(
                schedule(&pod("p", json!({})), &nodes, &profile(), &mut 0),
                Outcome::Node("empty".into())
            );
        }
    }

    #[tokio::test]
    async fn among_many_nodes_some_are_enough_and_all_get_their_turn() {
        let check = |nodes, expected| assert_eq!(enough(nodes), expected, "{nodes}");
        check(3, 100);
        check(1000, 420);
        check(5000, 500);
        check(20_000, 1000);
        let nodes: Vec<Arc<NodeInfo>> = (0..250).map(|n| Arc::new(plain_node(&n.to_string()))).collect();
        let (mut start, profile) = (0, profile());
        let mut starts = Vec::new();
        for _ in 0..3 {
            schedule(&pod("p", json!({})), &nodes, &profile, &mut start);
            starts.push(start);
        }
        assert_eq!(starts, [120, 240, 110]);
        let big = json!({"containers": [{"name": "c", "resources": {"requests": {"cpu": "9"}}}]});
        let Outcome::Nowhere(diagnosis) = schedule(&pod("p", big), &nodes, &profile, &mut start) else {
            panic!("nothing fits");
        };
        assert_eq!(
            diagnosis.message,
            "0/250 nodes are available: 250 Insufficient cpu."
        );
        assert_eq!(start, 110);
    }
}
