//! In which order pods end when the machine shuts down, and how long each has. Pure.

use std::path::PathBuf;
use std::time::Duration;

use k8s_openapi::api::core::v1::Pod;

use crate::preemption::SYSTEM_CRITICAL;

/// Pods of this priority and above, up to the next group's, have this long to end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Deserialize, serde::Serialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct ShutdownPeriod {
    #[serde(default)]
    pub priority: i32,
    #[serde(default)]
    pub shutdown_grace_period_seconds: i64,
}

impl ShutdownPeriod {
    pub fn time(&self) -> Duration {
        Duration::from_secs(u64::try_from(self.shutdown_grace_period_seconds).unwrap_or(0))
    }
}

/// What the node does when the machine shuts down.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NodeShutdownConfig {
    /// By priority, the lowest first. Empty: shutdowns are not waited for.
    pub periods: Vec<ShutdownPeriod>,
    /// The bus on which logind is.
    pub system_bus: String,
    /// Where logind reads its configuration from.
    pub logind_conf_dir: PathBuf,
}

impl Default for NodeShutdownConfig {
    fn default() -> Self {
        let address = std::env::var("DBUS_SYSTEM_BUS_ADDRESS").ok();
        NodeShutdownConfig {
            periods: Vec::new(),
            system_bus: address
                .filter(|address| !address.is_empty())
                .unwrap_or_else(|| "unix:path=/var/run/dbus/system_bus_socket".to_owned()),
            logind_conf_dir: PathBuf::from("/etc/systemd/logind.conf.d"),
        }
    }
}

impl NodeShutdownConfig {
    /// The two groups of `shutdownGracePeriod`: critical pods, and those that end before them.
    pub fn two_groups(whole: Duration, critical: Duration) -> Vec<ShutdownPeriod> {
        if whole.is_zero() {
            return Vec::new();
        }
        let seconds = |time: Duration| i64::try_from(time.as_secs()).unwrap_or(i64::MAX);
        vec![
            ShutdownPeriod {
                priority: 0,
                shutdown_grace_period_seconds: seconds(whole.saturating_sub(critical)),
            },
            ShutdownPeriod {
                priority: SYSTEM_CRITICAL,
                shutdown_grace_period_seconds: seconds(critical),
            },
        ]
    }

    /// How long the shutdown is held up at most.
    pub fn total(&self) -> Duration {
        let sum = |sum: Duration, one: &ShutdownPeriod| sum.saturating_add(one.time());
        self.periods.iter().fold(Duration::ZERO, sum)
    }
}

/// The group of each pod. Pods below the first group are in it, too. `periods` are in order and not empty.
pub(super) fn group(periods: &[ShutdownPeriod], pod: &Pod) -> usize {
    let priority = pod.spec.as_ref().and_then(|spec| spec.priority).unwrap_or(0);
    let above = periods.partition_point(|period| period.priority <= priority);
    above.saturating_sub(1)
}

/// What the pod is given: what its group has, or what it asks for if that is less.
pub(super) fn grace(period: &ShutdownPeriod, pod: &Pod) -> i64 {
    let own = pod
        .spec
        .as_ref()
        .and_then(|spec| spec.termination_grace_period_seconds);
    own.map_or(period.shutdown_grace_period_seconds, |own| {
        own.min(period.shutdown_grace_period_seconds)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn pod(priority: Option<i32>, grace: Option<i64>) -> Pod {
        let spec = json!({"containers": [], "priority": priority, "terminationGracePeriodSeconds": grace});
        serde_json::from_value(json!({ "spec": spec })).unwrap()
    }

    #[test]
    fn pods_end_by_priority() {
        let periods =
            [(-10, 1), (0, 5), (1000, 10), (2_000_000_000, 20)].map(|(priority, seconds)| ShutdownPeriod {
                priority,
                shutdown_grace_period_seconds: seconds,
            });
        for (priority, expected) in [
            (Some(-11), 0),
            (Some(-10), 0),
            (Some(-1), 0),
            (None, 1),
            (Some(0), 1),
            (Some(999), 1),
            (Some(1000), 2),
            (Some(2_000_000_000), 3),
            (Some(2_000_001_000), 3),
        ] {
            assert_eq!(group(&periods, &pod(priority, None)), expected, "{priority:?}");
        }
        assert_eq!(grace(&periods[2], &pod(None, Some(30))), 10);
        assert_eq!(grace(&periods[2], &pod(None, Some(3))), 3);
        assert_eq!(grace(&periods[2], &pod(None, None)), 10);
    }

    #[test]
    fn critical_pods_have_the_end_of_the_period() {
        let seconds = Duration::from_secs;
        assert_eq!(NodeShutdownConfig::two_groups(seconds(0), seconds(0)), []);
        let config = NodeShutdownConfig {
            periods: NodeShutdownConfig::two_groups(seconds(30), seconds(10)),
            ..NodeShutdownConfig::default()
        };
        let list: Vec<(i32, i64)> = config
            .periods
            .iter()
            .map(|one| (one.priority, one.shutdown_grace_period_seconds))
            .collect();
        assert_eq!(list, [(0, 20), (2_000_000_000, 10)]);
        assert_eq!(config.total(), seconds(30));
    }
}
