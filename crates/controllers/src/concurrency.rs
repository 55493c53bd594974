//! How many keys a controller reconciles at a time: upstream's flags and defaults.

use std::collections::BTreeMap;

use crate::Context;

/// A controller whose number of workers has a flag.
#[derive(Debug)]
pub struct ConcurrencyFlag {
    /// Upstream's name of the flag.
    pub name: &'static str,
    /// What the workers reconcile, in the plural.
    pub objects: &'static str,
    pub default: usize,
    controller: &'static str,
}

const fn flag(
    name: &'static str,
    objects: &'static str,
    default: usize,
    controller: &'static str,
) -> ConcurrencyFlag {
    ConcurrencyFlag {
        name,
        objects,
        default,
        controller,
    }
}

pub const CONCURRENCY_FLAGS: &[ConcurrencyFlag] = &[
    flag("concurrent-cron-job-syncs", "CronJobs", 5, "cronjob-controller"),
    flag(
        "concurrent-daemonset-syncs",
        "DaemonSets",
        2,
        "daemonset-controller",
    ),
    flag(
        "concurrent-deployment-syncs",
        "Deployments",
        5,
        "deployment-controller",
    ),
    flag(
        "concurrent-device-taint-eviction-syncs",
        "pods to evict from tainted devices",
        8,
        "device-taint-eviction-controller",
    ),
    flag(
        "concurrent-endpoint-syncs",
        "Services for their Endpoints",
        5,
        "endpoints-controller",
    ),
    flag(
        "concurrent-ephemeralvolume-syncs",
        "pods for their ephemeral volumes",
        5,
        "ephemeral-volume-controller",
    ),
    flag(
        "concurrent-gc-syncs",
        "objects of the garbage collector",
        20,
        "garbage-collector-controller",
    ),
    flag(
        "concurrent-horizontal-pod-autoscaler-syncs",
        "HorizontalPodAutoscalers",
        5,
        "horizontal-pod-autoscaler-controller",
    ),
    flag("concurrent-job-syncs", "Jobs", 5, "job-controller"),
    flag(
        "concurrent-namespace-syncs",
        "Namespaces being deleted",
        10,
        "namespace-controller",
    ),
    flag(
        "concurrent-replicaset-syncs",
        "ReplicaSets",
        5,
        "replicaset-controller",
    ),
    flag(
        "concurrent-resource-quota-syncs",
        "ResourceQuotas",
        5,
        "resourcequota-controller",
    ),
    flag(
        "concurrent-resourceclaim-syncs",
        "pods and claims for their devices",
        50,
        "resourceclaim-controller",
    ),
    flag(
        "concurrent-service-endpoint-syncs",
        "Services for their EndpointSlices",
        5,
        "endpointslice-controller",
    ),
    flag(
        "concurrent-serviceaccount-token-syncs",
        "Secrets for tokens of service accounts",
        5,
        "serviceaccount-token-controller",
    ),
    flag(
        "concurrent-statefulset-syncs",
        "StatefulSets",
        5,
        "statefulset-controller",
    ),
    flag(
        "concurrent-ttl-after-finished-syncs",
        "finished Jobs with a time to live",
        5,
        "ttl-after-finished-controller",
    ),
    flag(
        "concurrent-validating-admission-policy-status-syncs",
        "ValidatingAdmissionPolicies for their status",
        5,
        "validatingadmissionpolicy-status-controller",
    ),
    // Upstream has underscores in this one.
    flag(
        "concurrent_rc_syncs",
        "ReplicationControllers",
        5,
        "replicationcontroller-controller",
    ),
    flag(
        "mirroring-concurrent-service-endpoint-syncs",
        "Endpoints that are mirrored to EndpointSlices",
        5,
        "endpointslice-mirroring-controller",
    ),
];

/// Numbers of workers that were set.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Concurrency(BTreeMap<&'static str, usize>);

impl Concurrency {
    pub fn set(&mut self, flag: &ConcurrencyFlag, workers: usize) {
        self.0.insert(flag.controller, workers);
    }

    fn of(&self, controller: &str) -> usize {
        let default = || {
            let flag = CONCURRENCY_FLAGS
                .iter()
                .find(|flag| flag.controller == controller);
            flag.map_or(1, |flag| flag.default)
        };
        self.0.get(controller).copied().unwrap_or_else(default)
    }
}

impl Context {
    /// How many keys this controller reconciles at a time.
    pub(crate) fn workers(&self) -> usize {
        self.config.concurrency.of(self.name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flags_are_for_controllers_that_exist() {
        for flag in CONCURRENCY_FLAGS {
            let known = crate::CONTROLLERS.iter().any(|spec| spec.name == flag.controller);
            assert!(known, "{}: no controller {}", flag.name, flag.controller);
        }
        let mut set = Concurrency::default();
        let jobs = CONCURRENCY_FLAGS
            .iter()
            .find(|flag| flag.name == "concurrent-job-syncs");
        set.set(jobs.unwrap(), 7);
        assert_eq!(
            [
                set.of("job-controller"),
                set.of("daemonset-controller"),
                set.of("ttl-controller")
            ],
            [7, 2, 1]
        );
    }
}
