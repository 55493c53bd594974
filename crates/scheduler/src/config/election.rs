//! `leaderElection`: the lease that decides which of several schedulers works, and its times.

use super::{ConfigError, invalid};
use serde::Deserialize;
use skiff_client::LeaderElector;
use std::time::Duration;

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub(super) struct ElectionFile {
    leader_elect: Option<bool>,
    lease_duration: Option<String>,
    renew_deadline: Option<String>,
    retry_period: Option<String>,
    resource_lock: Option<String>,
    resource_name: Option<String>,
    resource_namespace: Option<String>,
}

/// With upstream's defaults where the file is silent.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Election {
    /// False: this scheduler works without asking anybody.
    pub(crate) elects: bool,
    namespace: String,
    name: String,
    lease_duration: Duration,
    renew_deadline: Duration,
    retry_period: Duration,
}

impl Default for Election {
    fn default() -> Self {
        let default = LeaderElector::new("kube-system", "kube-scheduler", "");
        Self {
            elects: true,
            namespace: default.namespace,
            name: default.name,
            lease_duration: default.lease_duration,
            renew_deadline: default.renew_deadline,
            retry_period: default.retry_period,
        }
    }
}

/// A duration as Go writes it.
pub(super) fn duration(
    field: &str,
    text: Option<&String>,
    default: Duration,
) -> Result<Duration, ConfigError> {
    let Some(text) = text else { return Ok(default) };
    match skiff_meta::duration::parse(text).map(u64::try_from) {
        Err(message) => invalid(field, message),
        Ok(Err(_)) => invalid(field, "must not be negative"),
        Ok(Ok(nanos)) => Ok(Duration::from_nanos(nanos)),
    }
}

impl ElectionFile {
    /// COMPAT: what is empty or zero is not set. Whoever does not elect may say anything.
    pub(super) fn check(&self) -> Result<Election, ConfigError> {
        let default = Election::default();
        let elects = self.leader_elect.unwrap_or(true);
        let time = |field: &str, text: &Option<String>, default: Duration| {
            let given = duration(&format!("leaderElection.{field}"), text.as_ref(), default)?;
            Ok(if given.is_zero() { default } else { given })
        };
        let name = |given: &Option<String>, default: String| match given.as_deref() {
            None | Some("") => default,
            Some(given) => given.to_owned(),
        };
        let election = Election {
            elects,
            namespace: name(&self.resource_namespace, default.namespace),
            name: name(&self.resource_name, default.name),
            lease_duration: time("leaseDuration", &self.lease_duration, default.lease_duration)?,
            renew_deadline: time("renewDeadline", &self.renew_deadline, default.renew_deadline)?,
            retry_period: time("retryPeriod", &self.retry_period, default.retry_period)?,
        };
        if elects {
            election.check_times()?;
            if name(&self.resource_lock, "leases".to_owned()) != "leases" {
                return invalid(
                    "leaderElection.resourceLock",
                    "resourceLock value must be \"leases\"",
                );
            }
        }
        Ok(election)
    }
}

impl Election {
    fn check_times(&self) -> Result<(), ConfigError> {
        // The lease itself holds whole seconds.
        if self.lease_duration.subsec_nanos() != 0 {
            return invalid(
                "leaderElection.leaseDuration",
                "must be a whole number of seconds",
            );
        }
        if self.lease_duration <= self.renew_deadline {
            return invalid(
                "leaderElection.leaseDuration",
                "LeaseDuration must be greater than RenewDeadline",
            );
        }
        if self.renew_deadline <= self.retry_period {
            return invalid(
                "leaderElection.renewDeadline",
                "RenewDeadline must be greater than RetryPeriod",
            );
        }
        Ok(())
    }
}

impl Election {
    pub(crate) fn elector(&self, identity: &str) -> LeaderElector {
        LeaderElector {
            lease_duration: self.lease_duration,
            renew_deadline: self.renew_deadline,
            retry_period: self.retry_period,
            ..LeaderElector::new(&self.namespace, &self.name, identity)
        }
    }
}
