//! Nodes that have the pod's images already score better, more so the more nodes have them: one node alone must not
//! attract all pods of an image.

use crate::cache::Cache;
use crate::framework::{CycleState, MAX_SCORE, Plugin, Scope};
use crate::node::NodeInfo;
use crate::pod::PodInfo;

const MIB: i64 = 1024 * 1024;
const MIN_THRESHOLD: i64 = 23 * MIB;
const MAX_CONTAINER_THRESHOLD: i64 = 1000 * MIB;
const NAME: &str = "ImageLocality";

pub(crate) struct ImageLocality;

/// The share of nodes that have each of the pod's images.
#[derive(Clone)]
struct Spreads(Vec<f64>);

impl Plugin for ImageLocality {
    fn name(&self) -> &'static str {
        NAME
    }

    fn scores(&self) -> bool {
        true
    }

    #[expect(clippy::cast_precision_loss, reason = "numbers of nodes")]
    fn pre_score(&self, state: &mut CycleState, pod: &PodInfo, _nodes: &[&NodeInfo], cache: &Cache) -> bool {
        let images = pod.shape.images.iter();
        let counts: Vec<usize> = images
            .map(|name| cache.image_nodes.get(name).copied().unwrap_or(0))
            .collect();
        if counts.iter().all(|count| *count == 0) {
            return false;
        }
        let nodes = cache.len().max(1) as f64;
        state.write(
            NAME,
            Spreads(counts.into_iter().map(|count| count as f64 / nodes).collect()),
        );
        true
    }

    #[expect(
        clippy::cast_precision_loss,
        clippy::cast_possible_truncation,
        reason = "sizes of images"
    )]
    fn score(&self, state: &CycleState, pod: &PodInfo, node: &NodeInfo) -> i64 {
        let Some(Spreads(spreads)) = state.read(NAME) else {
            return 0;
        };
        if node.meta.images.is_empty() {
            return 0;
        }
        let images = pod.shape.images.iter().zip(spreads);
        let sum: i64 = images
            .filter_map(|(name, spread)| Some((*node.meta.images.get(name)? as f64 * spread) as i64))
            .sum();
        let most = MAX_CONTAINER_THRESHOLD * i64::try_from(pod.shape.containers.max(1)).unwrap_or(1);
        MAX_SCORE * (sum.clamp(MIN_THRESHOLD, most) - MIN_THRESHOLD) / (most - MIN_THRESHOLD)
    }

    fn scope(&self, _pod: &PodInfo) -> Scope {
        Scope::Local
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixtures::{node_meta, pod};
    use serde_json::json;

    #[test]
    fn the_image_counts_by_size_and_spread() {
        let mut cache = Cache::default();
        let with = |name: &str, size: i64| {
            let status = json!({"images": [{"names": ["web:latest"], "sizeBytes": size}]});
            node_meta(name, json!({}), json!({}), status)
        };
        cache.set_node("a", with("a", 900 * MIB));
        cache.set_node("b", node_meta("b", json!({}), json!({}), json!({})));
        let pod = pod("p", json!({"containers": [{"name": "c", "image": "web"}]}));
        let mut state = CycleState::default();
        assert!(ImageLocality.pre_score(&mut state, &pod, &[], &cache));
        let score = |name: &str| ImageLocality.score(&state, &pod, cache.by_name(name).unwrap());
        // Half of the nodes have it, so half of its size counts.
        assert_eq!((score("a"), score("b")), (100 * (450 - 23) / (1000 - 23), 0));
        let other = crate::fixtures::pod("q", json!({"containers": [{"name": "c", "image": "other:1"}]}));
        assert!(!ImageLocality.pre_score(&mut state, &other, &[], &cache));
    }
}
