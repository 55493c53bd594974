//! Higher priority first. Equal ones come in the order in which they entered the queue.

use crate::framework::{Plugin, Scope};
use crate::pod::PodInfo;

pub(crate) struct PrioritySort;

impl Plugin for PrioritySort {
    fn name(&self) -> &'static str {
        "PrioritySort"
    }

    fn queue_sort(&self, pod: &PodInfo) -> Option<i64> {
        Some(-i64::from(pod.priority()))
    }

    fn scope(&self, _pod: &PodInfo) -> Scope {
        Scope::None
    }
}
