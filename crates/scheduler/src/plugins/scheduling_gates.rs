//! A pod with scheduling gates does not enter the queue.

use crate::framework::{Plugin, Rejection};
use crate::snapshot::PodInfo;

pub struct SchedulingGates;

impl Plugin for SchedulingGates {
    fn name(&self) -> &'static str {
        "SchedulingGates"
    }

    fn pre_enqueue(&self, pod: &PodInfo) -> Result<(), Rejection> {
        let gates: Vec<&str> = pod
            .pod
            .spec
            .iter()
            .flat_map(|s| s.scheduling_gates.iter().flatten())
            .map(|gate| gate.name.as_str())
            .collect();
        if gates.is_empty() {
            return Ok(());
        }
        Err(Rejection::new(format!(
            "waiting for scheduling gates: [{}]",
            gates.join(" ")
        )))
    }
}
