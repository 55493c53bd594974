//! From the replicas that the metrics ask for to those that the autoscaler sets: stabilization over time, the rates of
//! `spec.behavior`, the bounds. Without I/O; what was recommended and done before is a [`History`].

use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::autoscaling::v2::{HPAScalingPolicy, HPAScalingRules, HorizontalPodAutoscalerBehavior};

/// Without a behavior a workload grows to four replicas or to twice its size at a time.
const UP_FACTOR: i32 = 2;
const UP_MINIMUM: i32 = 4;

/// What an autoscaler recommended and did lately.
#[derive(Clone, Debug, Default)]
pub(super) struct History {
    recommendations: Vec<(i32, Timestamp)>,
    /// By how many replicas it scaled up, and down.
    ups: Vec<(i32, Timestamp)>,
    downs: Vec<(i32, Timestamp)>,
}

impl History {
    /// What was there before the first recommendation counts as one.
    pub(super) fn begin(&mut self, current: i32, now: Timestamp) {
        if self.recommendations.is_empty() {
            self.recommendations.push((current, now));
        }
    }

    /// Remembers a change, as far as a policy can ask for it.
    pub(super) fn record(
        &mut self,
        behavior: Option<&HorizontalPodAutoscalerBehavior>,
        from: i32,
        to: i32,
        now: Timestamp,
    ) {
        let Some(behavior) = behavior else { return };
        let (events, rules) = if to > from {
            (&mut self.ups, Rules::up(behavior.scale_up.as_ref()))
        } else {
            (&mut self.downs, Rules::down(behavior.scale_down.as_ref(), 0))
        };
        let longest = rules
            .policies
            .iter()
            .map(|policy| policy.period_seconds)
            .max()
            .unwrap_or(0);
        let cutoff = before(now, longest);
        events.retain(|(_, at)| *at >= cutoff);
        events.push(((to - from).abs(), now));
    }
}

fn before(now: Timestamp, seconds: i32) -> Timestamp {
    now.checked_sub(SignedDuration::from_secs(seconds.into()))
        .unwrap_or(Timestamp::MIN)
}

/// Rules of one direction with their defaults.
struct Rules {
    window_seconds: i32,
    select: String,
    policies: Vec<HPAScalingPolicy>,
}

fn policy(type_: &str, value: i32) -> HPAScalingPolicy {
    HPAScalingPolicy {
        type_: type_.into(),
        value,
        period_seconds: 15,
    }
}

impl Rules {
    fn new(rules: Option<&HPAScalingRules>, window: i32, policies: Vec<HPAScalingPolicy>) -> Rules {
        let given = rules
            .and_then(|rules| rules.policies.clone())
            .filter(|given| !given.is_empty());
        Rules {
            window_seconds: rules
                .and_then(|rules| rules.stabilization_window_seconds)
                .unwrap_or(window),
            select: rules
                .and_then(|rules| rules.select_policy.clone())
                .unwrap_or_else(|| "Max".into()),
            policies: given.unwrap_or(policies),
        }
    }

    fn up(rules: Option<&HPAScalingRules>) -> Rules {
        Rules::new(rules, 0, vec![policy("Pods", 4), policy("Percent", 100)])
    }

    fn down(rules: Option<&HPAScalingRules>, window: i32) -> Rules {
        Rules::new(rules, window, vec![policy("Percent", 100)])
    }

    /// How far the workload may go; `up` says in which direction.
    fn limit(&self, current: i32, history: &History, up: bool, now: Timestamp) -> i32 {
        if self.select == "Disabled" {
            return current;
        }
        let changed = |events: &[(i32, Timestamp)], seconds: i32| {
            let cutoff = before(now, seconds);
            let lately = events.iter().filter(|(_, at)| *at > cutoff);
            lately.fold(0i32, |sum, (change, _)| sum.saturating_add(*change))
        };
        let proposals = self.policies.iter().map(|policy| {
            let added = changed(&history.ups, policy.period_seconds);
            let removed = changed(&history.downs, policy.period_seconds);
            let start = current.saturating_sub(added).saturating_add(removed);
            let share = f64::from(policy.value) / 100.0;
            match (policy.type_.as_str(), up) {
                ("Percent", true) => (f64::from(start) * (1.0 + share)).ceil() as i32,
                ("Percent", false) => (f64::from(start) * (1.0 - share)) as i32,
                (_, true) => start.saturating_add(policy.value),
                (_, false) => start.saturating_sub(policy.value),
            }
        });
        // The largest change of a scale-down is the smallest number.
        let largest_number = (self.select == "Min") != up;
        let limit = if largest_number {
            proposals.max()
        } else {
            proposals.min()
        };
        limit.unwrap_or(current)
    }
}

/// The replicas to set, and the reasons and messages of two conditions.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Decision {
    pub(super) replicas: i32,
    /// Of AbleToScale.
    pub(super) able: (&'static str, &'static str),
    pub(super) limited: bool,
    /// Of ScalingLimited.
    pub(super) limit: (&'static str, &'static str),
}

const READY: (&str, &str) = ("ReadyForNewScale", "recommended size matches current size");
const DOWN_STABILIZED: (&str, &str) = (
    "ScaleDownStabilized",
    "recent recommendations were higher than current one, applying the highest recent recommendation",
);
const UP_STABILIZED: (&str, &str) = (
    "ScaleUpStabilized",
    "recent recommendations were lower than current one, applying the lowest recent recommendation",
);
const WITHIN: (&str, &str) = (
    "DesiredWithinRange",
    "the desired count is within the acceptable range",
);
const UP_LIMIT: (&str, &str) = (
    "ScaleUpLimit",
    "the desired replica count is increasing faster than the maximum scale rate",
);
const DOWN_LIMIT: (&str, &str) = (
    "ScaleDownLimit",
    "the desired replica count is decreasing faster than the maximum scale rate",
);
const TOO_MANY: (&str, &str) = (
    "TooManyReplicas",
    "the desired replica count is more than the maximum replica count",
);
const TOO_FEW: (&str, &str) = (
    "TooFewReplicas",
    "the desired replica count is less than the minimum replica count",
);

pub(super) struct Bounds {
    pub(super) min: i32,
    pub(super) max: i32,
}

/// What becomes of a recommendation. `window` is the time over which the highest one counts for scaling down.
pub(super) fn decide(
    behavior: Option<&HorizontalPodAutoscalerBehavior>,
    history: &mut History,
    current: i32,
    desired: i32,
    bounds: &Bounds,
    window: i32,
    now: Timestamp,
) -> Decision {
    let Some(behavior) = behavior else {
        return decide_plainly(history, current, desired, bounds, window, now);
    };
    let up = Rules::up(behavior.scale_up.as_ref());
    let down = Rules::down(behavior.scale_down.as_ref(), window);
    let stabilized = stabilize(history, current, desired, &up, &down, now);
    let able = match stabilized == desired {
        true => READY,
        false if desired >= current => UP_STABILIZED,
        false => DOWN_STABILIZED,
    };
    let (replicas, limit) = if stabilized > current {
        let rate = up.limit(current, history, true, now).max(current);
        let (most, why) = if bounds.max > rate {
            (rate, UP_LIMIT)
        } else {
            (bounds.max, TOO_MANY)
        };
        if stabilized > most {
            (most, why)
        } else {
            (stabilized, WITHIN)
        }
    } else if stabilized < current {
        let rate = down.limit(current, history, false, now).min(current);
        let (least, why) = if bounds.min < rate {
            (rate, DOWN_LIMIT)
        } else {
            (bounds.min, TOO_FEW)
        };
        if stabilized < least {
            (least, why)
        } else {
            (stabilized, WITHIN)
        }
    } else {
        (stabilized, WITHIN)
    };
    Decision {
        replicas,
        able,
        limited: replicas != stabilized,
        limit,
    }
}

fn stabilize(
    history: &mut History,
    current: i32,
    desired: i32,
    up: &Rules,
    down: &Rules,
    now: Timestamp,
) -> i32 {
    let (up_cutoff, down_cutoff) = (before(now, up.window_seconds), before(now, down.window_seconds));
    let (mut lowest, mut highest) = (desired, desired);
    for (recommended, at) in &history.recommendations {
        if *at > up_cutoff {
            lowest = lowest.min(*recommended);
        }
        if *at > down_cutoff {
            highest = highest.max(*recommended);
        }
    }
    let oldest = up_cutoff.min(down_cutoff);
    history.recommendations.retain(|(_, at)| *at >= oldest);
    history.recommendations.push((desired, now));
    current.max(lowest).min(highest)
}

fn decide_plainly(
    history: &mut History,
    current: i32,
    desired: i32,
    bounds: &Bounds,
    window: i32,
    now: Timestamp,
) -> Decision {
    let cutoff = before(now, window);
    history.recommendations.retain(|(_, at)| *at >= cutoff);
    let highest = history
        .recommendations
        .iter()
        .map(|(recommended, _)| *recommended)
        .max();
    let stabilized = highest.map_or(desired, |highest| highest.max(desired));
    history.recommendations.push((desired, now));
    let rate = current.saturating_mul(UP_FACTOR).max(UP_MINIMUM);
    let (most, why) = if bounds.max > rate {
        (rate, UP_LIMIT)
    } else {
        (bounds.max, TOO_MANY)
    };
    let (replicas, limit) = if stabilized < bounds.min {
        (bounds.min, TOO_FEW)
    } else if stabilized > most {
        (most, why)
    } else {
        (stabilized, WITHIN)
    };
    Decision {
        replicas,
        able: if stabilized == desired {
            READY
        } else {
            DOWN_STABILIZED
        },
        limited: replicas != stabilized,
        limit,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn at(seconds: i64) -> Timestamp {
        Timestamp::from_second(1_000_000 + seconds).unwrap()
    }

    const BOUNDS: Bounds = Bounds { min: 1, max: 100 };

    #[test]
    fn without_a_behavior() {
        let check = |before: &[(i32, i64)], current: i32, desired: i32, expected: (i32, &str, &str)| {
            let mut history = History {
                recommendations: before
                    .iter()
                    .map(|(replicas, second)| (*replicas, at(*second)))
                    .collect(),
                ..History::default()
            };
            let seen = decide(None, &mut history, current, desired, &BOUNDS, 300, at(0));
            assert_eq!(
                (seen.replicas, seen.able.0, seen.limit.0),
                expected,
                "{before:?} {desired}"
            );
        };
        check(&[], 3, 5, (5, "ReadyForNewScale", "DesiredWithinRange"));
        check(&[], 1, 9, (4, "ReadyForNewScale", "ScaleUpLimit"));
        check(&[], 30, 90, (60, "ReadyForNewScale", "ScaleUpLimit"));
        check(&[], 90, 120, (100, "ReadyForNewScale", "TooManyReplicas"));
        check(&[], 3, 0, (1, "ReadyForNewScale", "TooFewReplicas"));
        check(
            &[(8, -100)],
            8,
            3,
            (8, "ScaleDownStabilized", "DesiredWithinRange"),
        );
        check(&[(8, -400)], 8, 3, (3, "ReadyForNewScale", "DesiredWithinRange"));
    }

    fn behavior(value: Value) -> HorizontalPodAutoscalerBehavior {
        serde_json::from_value(value).unwrap()
    }

    #[test]
    fn with_a_behavior() {
        let check =
            |rules: Value, changes: (i32, i32), current: i32, desired: i32, expected: (i32, &str, &str)| {
                let behavior = behavior(rules.clone());
                let mut history = History::default();
                if changes.0 != 0 {
                    history.ups.push((changes.0, at(-10)));
                }
                if changes.1 != 0 {
                    history.downs.push((changes.1, at(-10)));
                }
                let seen = decide(
                    Some(&behavior),
                    &mut history,
                    current,
                    desired,
                    &BOUNDS,
                    300,
                    at(0),
                );
                assert_eq!(
                    (seen.replicas, seen.able.0, seen.limit.0),
                    expected,
                    "{rules} {changes:?}"
                );
            };
        let up = |select: &str| {
            json!({"scaleUp": {"selectPolicy": select, "policies": [
            {"type": "Pods", "value": 2, "periodSeconds": 60}, {"type": "Percent", "value": 50, "periodSeconds": 60}]}})
        };
        check(
            up("Max"),
            (0, 0),
            10,
            30,
            (15, "ReadyForNewScale", "ScaleUpLimit"),
        );
        check(
            up("Min"),
            (0, 0),
            10,
            30,
            (12, "ReadyForNewScale", "ScaleUpLimit"),
        );
        check(
            up("Disabled"),
            (0, 0),
            10,
            30,
            (10, "ReadyForNewScale", "ScaleUpLimit"),
        );
        // Five of the ten were added in this minute.
        check(
            up("Max"),
            (5, 0),
            10,
            30,
            (10, "ReadyForNewScale", "ScaleUpLimit"),
        );
        check(
            up("Max"),
            (0, 2),
            10,
            30,
            (18, "ReadyForNewScale", "ScaleUpLimit"),
        );
        check(
            up("Max"),
            (0, 0),
            10,
            14,
            (14, "ReadyForNewScale", "DesiredWithinRange"),
        );
        check(json!({}), (0, 0), 1, 30, (5, "ReadyForNewScale", "ScaleUpLimit"));
        check(
            json!({}),
            (0, 0),
            80,
            300,
            (100, "ReadyForNewScale", "TooManyReplicas"),
        );
        let down = |select: &str| {
            json!({"scaleDown": {"stabilizationWindowSeconds": 0, "selectPolicy": select, "policies": [
            {"type": "Pods", "value": 2, "periodSeconds": 60}, {"type": "Percent", "value": 50, "periodSeconds": 60}]}})
        };
        check(
            down("Max"),
            (0, 0),
            10,
            1,
            (5, "ReadyForNewScale", "ScaleDownLimit"),
        );
        check(
            down("Min"),
            (0, 0),
            10,
            1,
            (8, "ReadyForNewScale", "ScaleDownLimit"),
        );
        check(
            down("Disabled"),
            (0, 0),
            10,
            1,
            (10, "ReadyForNewScale", "ScaleDownLimit"),
        );
        check(
            down("Min"),
            (0, 2),
            10,
            1,
            (10, "ReadyForNewScale", "ScaleDownLimit"),
        );
        check(
            json!({"scaleDown": {"stabilizationWindowSeconds": 0}}),
            (0, 0),
            10,
            0,
            (1, "ReadyForNewScale", "TooFewReplicas"),
        );
    }

    #[test]
    fn windows_hold_changes_back() {
        let rules = behavior(
            json!({"scaleUp": {"stabilizationWindowSeconds": 60}, "scaleDown": {"stabilizationWindowSeconds": 120}}),
        );
        let check = |before: &[(i32, i64)], current: i32, desired: i32, expected: (i32, &str)| {
            let mut history = History {
                recommendations: before
                    .iter()
                    .map(|(replicas, second)| (*replicas, at(*second)))
                    .collect(),
                ..History::default()
            };
            let seen = decide(Some(&rules), &mut history, current, desired, &BOUNDS, 300, at(0));
            assert_eq!((seen.replicas, seen.able.0), expected, "{before:?}");
            let kept = history
                .recommendations
                .iter()
                .filter(|(_, at)| *at < self::at(-120))
                .count();
            assert_eq!(kept, 0);
        };
        check(&[(4, -30)], 4, 7, (4, "ScaleUpStabilized"));
        check(&[(4, -90)], 4, 7, (7, "ReadyForNewScale"));
        check(&[(5, -30), (6, -40)], 4, 7, (5, "ScaleUpStabilized"));
        check(&[(9, -100)], 9, 2, (9, "ScaleDownStabilized"));
        check(&[(9, -130), (5, -100)], 9, 2, (5, "ScaleDownStabilized"));
    }

    #[test]
    fn changes_are_remembered_as_long_as_a_policy_asks() {
        let rules =
            behavior(json!({"scaleUp": {"policies": [{"type": "Pods", "value": 1, "periodSeconds": 30}]}}));
        let mut history = History::default();
        history.begin(3, at(0));
        history.begin(5, at(1));
        assert_eq!(history.recommendations.len(), 1);
        history.record(Some(&rules), 1, 3, at(0));
        history.record(Some(&rules), 3, 4, at(20));
        assert_eq!(history.ups, [(2, at(0)), (1, at(20))]);
        history.record(Some(&rules), 4, 5, at(45));
        assert_eq!(history.ups, [(1, at(20)), (1, at(45))]);
        history.record(None, 5, 9, at(50));
        assert_eq!(history.ups.len(), 2);
    }
}
