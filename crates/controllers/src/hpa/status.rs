//! The status of an autoscaler while it is made: conditions are set one by one, and it is written once.

use jiff::Timestamp;
use k8s_openapi::api::autoscaling::v2::{
    HorizontalPodAutoscalerCondition, HorizontalPodAutoscalerStatus, MetricStatus,
};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;

pub(super) const ABLE_TO_SCALE: &str = "AbleToScale";
pub(super) const SCALING_ACTIVE: &str = "ScalingActive";
pub(super) const SCALING_LIMITED: &str = "ScalingLimited";
/// Of a feature that is off: what is left of it is removed.
pub(super) const SCALED_TO_ZERO: &str = "ScaledToZero";

pub(super) struct Draft {
    pub(super) status: HorizontalPodAutoscalerStatus,
    now: Timestamp,
}

impl Draft {
    pub(super) fn new(present: Option<&HorizontalPodAutoscalerStatus>, now: Timestamp) -> Draft {
        Draft {
            status: present.cloned().unwrap_or_default(),
            now,
        }
    }

    pub(super) fn set(&mut self, type_: &str, value: bool, reason: &str, message: &str) {
        let status = if value { "True" } else { "False" };
        let conditions = self.status.conditions.get_or_insert_default();
        let index = conditions
            .iter()
            .position(|one| one.type_ == type_)
            .unwrap_or_else(|| {
                conditions.push(HorizontalPodAutoscalerCondition {
                    type_: type_.into(),
                    ..Default::default()
                });
                conditions.len() - 1
            });
        let condition = &mut conditions[index];
        if condition.status != status {
            condition.last_transition_time = Some(Time(self.now));
        }
        condition.status = status.into();
        condition.reason = Some(reason.into());
        condition.message = Some(message.into());
    }

    pub(super) fn remove(&mut self, type_: &str) {
        if let Some(conditions) = &mut self.status.conditions {
            conditions.retain(|one| one.type_ != type_);
        }
    }

    /// Metrics that could not be had leave an empty entry, because clients compare by position.
    pub(super) fn set_counts(
        &mut self,
        current: i32,
        desired: i32,
        metrics: Vec<MetricStatus>,
        scaled: bool,
    ) {
        self.status.current_replicas = Some(current);
        self.status.desired_replicas = desired;
        self.status.current_metrics = (!metrics.is_empty()).then_some(metrics);
        self.status.observed_generation = None;
        if scaled {
            self.status.last_scale_time = Some(Time(self.now));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_condition_keeps_its_time() {
        let at = |seconds: i64| Timestamp::from_second(seconds).unwrap();
        let mut draft = Draft::new(None, at(1));
        draft.set(ABLE_TO_SCALE, true, "A", "a");
        let mut draft = Draft::new(Some(&draft.status), at(2));
        draft.set(ABLE_TO_SCALE, true, "B", "b");
        let condition = draft.status.conditions.as_ref().unwrap()[0].clone();
        assert_eq!(condition.last_transition_time, Some(Time(at(1))));
        assert_eq!(condition.reason.as_deref(), Some("B"));
        draft.set(ABLE_TO_SCALE, false, "C", "c");
        let condition = draft.status.conditions.as_ref().unwrap()[0].clone();
        assert_eq!(condition.last_transition_time, Some(Time(at(2))));
        draft.remove(ABLE_TO_SCALE);
        assert_eq!(draft.status.conditions, Some(Vec::new()));
    }
}
