//! Higher priority first. Equal ones come in the order in which they entered the queue.

use crate::framework::Plugin;
use crate::snapshot::PodInfo;
use std::cmp::Ordering;

pub struct PrioritySort;

impl Plugin for PrioritySort {
    fn name(&self) -> &'static str {
        "PrioritySort"
    }

    fn sorts_queue(&self) -> bool {
        true
    }

    fn queue_sort(&self, a: &PodInfo, b: &PodInfo) -> Option<Ordering> {
        Some(b.priority.cmp(&a.priority))
    }
}
