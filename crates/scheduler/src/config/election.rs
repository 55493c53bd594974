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
    pub(super) fn check(&self) -> Result<Election, ConfigError> {
        let default = Election::default();
        let time = |field: &str, text: &Option<String>, default: Duration| {
            let field = format!("leaderElection.{field}");
            match duration(&field, text.as_ref(), default)? {
                Duration::ZERO => invalid(field, "must be greater than zero"),
                time => Ok(time),
            }
        };
        let lease_duration = time("leaseDuration", &self.lease_duration, default.lease_duration)?;
        let renew_deadline = time("renewDeadline", &self.renew_deadline, default.renew_deadline)?;
        let retry_period = time("retryPeriod", &self.retry_period, default.retry_period)?;
        // The lease itself holds whole seconds.
        if lease_duration.subsec_nanos() != 0 {
            return invalid(
                "leaderElection.leaseDuration",
                "must be a whole number of seconds",
            );
        }
        if lease_duration <= renew_deadline {
            return invalid(
                "leaderElection.leaseDuration",
                "LeaseDuration must be greater than RenewDeadline",
            );
        }
        if renew_deadline <= retry_period {
            return invalid(
                "leaderElection.renewDeadline",
                "RenewDeadline must be greater than RetryPeriod",
            );
        }
        if self.resource_lock.as_deref().is_some_and(|lock| lock != "leases") {
            return invalid(
                "leaderElection.resourceLock",
                "resourceLock value must be \"leases\"",
            );
        }
        let name = |field: &str, given: &Option<String>, default: String| match given.as_deref() {
            None => Ok(default),
            Some("") => invalid(format!("leaderElection.{field}"), format!("{field} is required")),
            Some(given) => Ok(given.to_owned()),
        };
        Ok(Election {
            elects: self.leader_elect.unwrap_or(true),
            namespace: name("resourceNamespace", &self.resource_namespace, default.namespace)?,
            name: name("resourceName", &self.resource_name, default.name)?,
            lease_duration,
            renew_deadline,
            retry_period,
        })
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
