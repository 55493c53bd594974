//! The extension points. A plugin implements those it needs; the rest pass.
//!
//! Order in a cycle: PreEnqueue (before the queue) · QueueSort · PreFilter · Filter · PostFilter (only when
//! nothing fits) · PreScore · Score · NormalizeScore · Reserve · Permit · PreBind · Bind · PostBind.

use crate::snapshot::{NodeInfo, PodInfo};
use async_trait::async_trait;
use std::cmp::Ordering;

/// Scores of a plugin after normalisation lie in `0..=MAX_SCORE`.
pub const MAX_SCORE: i64 = 100;

/// Why a node, or the whole cluster, is not for a pod.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rejection {
    pub reasons: Vec<String>,
}

impl Rejection {
    pub fn new(reason: impl Into<String>) -> Self {
        Self {
            reasons: vec![reason.into()],
        }
    }
}

/// Changes in the cluster that can make room for a pod.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ClusterEvent {
    NodeAdded,
    /// Allocatable, labels, taints, unschedulable or conditions changed.
    NodeChanged,
    /// A pod ended, was deleted or shrank.
    PodRemoved,
    /// The waiting pod itself changed.
    PodChanged,
}

#[async_trait]
pub trait Plugin: Send + Sync {
    /// Upstream's name of the plugin.
    fn name(&self) -> &'static str;

    /// Events after which a pod that this plugin turned away is worth another look.
    fn events(&self) -> &'static [ClusterEvent] {
        &[]
    }

    /// May the pod enter the queue at all?
    fn pre_enqueue(&self, _pod: &PodInfo) -> Result<(), Rejection> {
        Ok(())
    }

    /// Whether this is the plugin that orders the queue; exactly one does.
    fn sorts_queue(&self) -> bool {
        false
    }

    /// Which pod comes first.
    fn queue_sort(&self, _a: &PodInfo, _b: &PodInfo) -> Option<Ordering> {
        None
    }

    /// Turns the pod away before any node is looked at.
    fn pre_filter(&self, _pod: &PodInfo, _nodes: &[std::sync::Arc<NodeInfo>]) -> Result<(), Rejection> {
        Ok(())
    }

    fn filter(&self, _pod: &PodInfo, _node: &NodeInfo) -> Result<(), Rejection> {
        Ok(())
    }

    /// Called when nothing fits; a message goes into the event.
    fn post_filter(&self, _pod: &PodInfo, _nodes: &[std::sync::Arc<NodeInfo>]) -> Option<String> {
        None
    }

    /// The weight of this plugin's score; 0 means that it does not score.
    fn weight(&self) -> i64 {
        0
    }

    /// True if scoring this pod would tell nodes apart.
    fn pre_score(&self, _pod: &PodInfo) -> bool {
        true
    }

    fn score(&self, _pod: &PodInfo, _node: &NodeInfo) -> i64 {
        0
    }

    /// Brings raw scores into `0..=MAX_SCORE`.
    fn normalize_scores(&self, _scores: &mut [i64]) {}

    fn reserve(&self, _pod: &PodInfo, _node: &str) -> Result<(), Rejection> {
        Ok(())
    }

    fn unreserve(&self, _pod: &PodInfo, _node: &str) {}

    /// The last word before binding.
    fn permit(&self, _pod: &PodInfo, _node: &str) -> Result<(), Rejection> {
        Ok(())
    }

    async fn pre_bind(&self, _pod: &PodInfo, _node: &str) -> Result<(), Rejection> {
        Ok(())
    }

    /// `None`: not mine. The first plugin with an answer binds.
    async fn bind(&self, _pod: &PodInfo, _node: &str) -> Option<Result<(), kube::Error>> {
        None
    }

    fn post_bind(&self, _pod: &PodInfo, _node: &str) {}
}

/// Scales so that the best raw score becomes [`MAX_SCORE`]; `reverse` when fewer is better.
pub fn scale_to_max(scores: &mut [i64], reverse: bool) {
    let best = scores.iter().copied().max().unwrap_or(0);
    for score in scores {
        let scaled = if best == 0 { 0 } else { *score * MAX_SCORE / best };
        *score = if reverse { MAX_SCORE - scaled } else { scaled };
    }
}
