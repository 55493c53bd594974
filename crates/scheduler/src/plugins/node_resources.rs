//! Resources: a pod fits if what is left covers its requests (`NodeResourcesFit`), emptier nodes score better,
//! and so do nodes that stay in balance (`NodeResourcesBalancedAllocation`).

use crate::framework::{ClusterEvent, MAX_SCORE, Plugin, Rejection};
use crate::snapshot::{NodeInfo, PodInfo};

pub struct Fit;

impl Plugin for Fit {
    fn name(&self) -> &'static str {
        "NodeResourcesFit"
    }

    fn events(&self) -> &'static [ClusterEvent] {
        &[
            ClusterEvent::NodeAdded,
            ClusterEvent::NodeChanged,
            ClusterEvent::PodRemoved,
            ClusterEvent::PodChanged,
        ]
    }

    fn filter(&self, pod: &PodInfo, node: &NodeInfo) -> Result<(), Rejection> {
        let mut reasons = Vec::new();
        if i64::try_from(node.pods.len()).unwrap_or(i64::MAX) >= node.max_pods {
            reasons.push("Too many pods".to_owned());
        }
        let (want, have, used) = (&pod.load.requests, &node.allocatable, &node.requested);
        let lacks = |want: i64, have: i64, used: i64| want > 0 && want > have - used;
        if lacks(want.milli_cpu, have.milli_cpu, used.milli_cpu) {
            reasons.push("Insufficient cpu".to_owned());
        }
        if lacks(want.memory, have.memory, used.memory) {
            reasons.push("Insufficient memory".to_owned());
        }
        if lacks(
            want.ephemeral_storage,
            have.ephemeral_storage,
            used.ephemeral_storage,
        ) {
            reasons.push("Insufficient ephemeral-storage".to_owned());
        }
        for (name, amount) in &want.others {
            let of = |from: &crate::resources::Resources| from.others.get(name).copied().unwrap_or(0);
            if lacks(*amount, of(have), of(used)) {
                reasons.push(format!("Insufficient {name}"));
            }
        }
        if reasons.is_empty() {
            Ok(())
        } else {
            Err(Rejection { reasons })
        }
    }

    fn weight(&self) -> i64 {
        1
    }

    /// LeastAllocated: the share of CPU and memory that stays free.
    fn score(&self, pod: &PodInfo, node: &NodeInfo) -> i64 {
        let free = |used: i64, wanted: i64, have: i64| {
            if have <= 0 || used + wanted > have {
                0
            } else {
                (have - used - wanted) * MAX_SCORE / have
            }
        };
        let cpu = free(node.scoring.0, pod.load.scoring.0, node.allocatable.milli_cpu);
        let memory = free(node.scoring.1, pod.load.scoring.1, node.allocatable.memory);
        (cpu + memory) / 2
    }
}

pub struct BalancedAllocation;

impl Plugin for BalancedAllocation {
    fn name(&self) -> &'static str {
        "NodeResourcesBalancedAllocation"
    }

    fn weight(&self) -> i64 {
        1
    }

    fn pre_score(&self, pod: &PodInfo) -> bool {
        pod.load.requests.milli_cpu > 0 || pod.load.requests.memory > 0
    }

    /// COMPAT: what counts is whether the pod brings the shares of CPU and memory in use closer together.
    fn score(&self, pod: &PodInfo, node: &NodeInfo) -> i64 {
        let (have, used, want) = (&node.allocatable, &node.requested, &pod.load.requests);
        let with = balance(
            (used.milli_cpu + want.milli_cpu, have.milli_cpu),
            (used.memory + want.memory, have.memory),
        );
        let without = balance((used.milli_cpu, have.milli_cpu), (used.memory, have.memory));
        MAX_SCORE / 2 + (MAX_SCORE / 2 + with - without) / 2
    }
}

/// How close the shares of two resources in use are, from half the score to all of it.
#[expect(
    clippy::cast_precision_loss,
    clippy::cast_possible_truncation,
    reason = "shares between 0 and 1"
)]
fn balance(cpu: (i64, i64), memory: (i64, i64)) -> i64 {
    let share = |(used, have): (i64, i64)| (have > 0).then(|| (used as f64 / have as f64).min(1.0));
    let deviation = match (share(cpu), share(memory)) {
        (Some(cpu), Some(memory)) => (cpu - memory).abs() / 2.0,
        // One alone is always in balance.
        _ => 0.0,
    };
    ((1.0 - deviation) * MAX_SCORE as f64) as i64
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::snapshot::fixtures::{plain_node, pod};
    use serde_json::json;
    use std::sync::Arc;

    fn asking(name: &str, cpu: &str, memory: &str) -> PodInfo {
        let requests = json!({"cpu": cpu, "memory": memory});
        pod(
            name,
            json!({"containers": [{"name": "c", "resources": {"requests": requests}}]}),
        )
    }

    #[test]
    fn what_is_left_must_cover_the_requests() {
        let mut node = plain_node("a");
        node.add_pod(asking("there", "1500m", "1Gi").load);
        assert!(Fit.filter(&asking("p", "500m", "3Gi"), &node).is_ok());
        let rejected = Fit.filter(&asking("p", "501m", "4Gi"), &node).unwrap_err();
        assert_eq!(rejected.reasons, ["Insufficient cpu", "Insufficient memory"]);
        let mut gpu = asking("p", "0", "0");
        Arc::make_mut(&mut gpu.load)
            .requests
            .others
            .insert("example.com/gpu".into(), 1);
        assert_eq!(
            Fit.filter(&gpu, &node).unwrap_err().reasons,
            ["Insufficient example.com/gpu"]
        );
        node.max_pods = 1;
        assert_eq!(
            Fit.filter(&asking("p", "0", "0"), &node).unwrap_err().reasons,
            ["Too many pods"]
        );
    }

    #[test]
    fn emptier_and_balanced_nodes_score_better() {
        let (empty, mut full) = (plain_node("a"), plain_node("b"));
        full.add_pod(asking("there", "1500m", "1Gi").load);
        let pod = asking("p", "100m", "100Mi");
        assert!(Fit.score(&pod, &empty) > Fit.score(&pod, &full));
        // The one is used 75% and 25%: memory brings it into balance, CPU out of it.
        assert_eq!(BalancedAllocation.score(&asking("p", "0", "2Gi"), &full), 87);
        assert_eq!(BalancedAllocation.score(&asking("p", "500m", "0"), &full), 68);
    }
}
