//! A pod with scheduling gates does not enter the queue.

use crate::framework::{Plugin, Rejection, Scope, Verdict};
use crate::pod::PodInfo;

pub(crate) struct SchedulingGates;

impl Plugin for SchedulingGates {
    fn name(&self) -> &'static str {
        "SchedulingGates"
    }

    fn pre_enqueue(&self, pod: &PodInfo) -> Verdict {
        let gates = &pod.shape.gates;
        if gates.is_empty() {
            return Ok(());
        }
        Err(Rejection::unresolvable(format!(
            "waiting for scheduling gates: [{}]",
            gates.join(" ")
        )))
    }

    fn scope(&self, _pod: &PodInfo) -> Scope {
        Scope::None
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixtures::pod;
    use serde_json::json;

    #[test]
    fn gates_are_named() {
        assert_eq!(SchedulingGates.pre_enqueue(&pod("p", json!({}))), Ok(()));
        let gated = pod(
            "p",
            json!({"schedulingGates": [{"name": "a.io/x"}, {"name": "b"}]}),
        );
        let rejection = SchedulingGates.pre_enqueue(&gated).unwrap_err();
        assert_eq!(rejection.message(), "waiting for scheduling gates: [a.io/x b]");
    }
}
