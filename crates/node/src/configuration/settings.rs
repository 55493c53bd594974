//! Fields of a KubeletConfiguration that are one setting of the node each.

use std::path::Path;
use std::time::Duration;

use super::{Error, KubeletConfiguration, field, positive};
use crate::config::NodeConfig;
use crate::swap::SwapBehavior;

impl KubeletConfiguration {
    pub(super) fn apply_settings(&self, config: &mut NodeConfig) -> Result<(), Error> {
        self.apply_swap(config)?;
        self.apply_status(config)?;
        config.seccomp_default = self.seccomp_default.unwrap_or(config.seccomp_default);
        if let Some(id) = &self.provider_id {
            config.provider_id.clone_from(id);
        }
        config.cpu_cfs_quota = self.cpu_cfs_quota.unwrap_or(config.cpu_cfs_quota);
        config.pods_per_core = count("podsPerCore", self.pods_per_core)?.unwrap_or(config.pods_per_core);
        if let Some(protect) = self.protect_kernel_defaults {
            config.protect_kernel_defaults = protect;
        }
        config.healthz_bind_address = self.healthz_bind_address.unwrap_or(config.healthz_bind_address);
        config.healthz_port = self.healthz_port.or(config.healthz_port);
        let pulls = &mut config.pull_rate;
        pulls.per_second = count("registryPullQPS", self.registry_pull_qps)?.unwrap_or(pulls.per_second);
        pulls.burst = count("registryBurst", self.registry_burst)?.unwrap_or(pulls.burst);
        if let Some(timeout) = positive("runtimeRequestTimeout", self.runtime_request_timeout.as_ref())? {
            config.runtime_request_timeout = timeout;
        }
        // COMPAT: zero is the default here; only the flag can say that there is no limit.
        let idle = self.streaming_connection_idle_timeout.as_ref();
        if let Some(idle) = positive("streamingConnectionIdleTimeout", idle)? {
            config.streaming_idle_timeout = Some(idle);
        }
        if let Some(path) = self
            .client_ca_file
            .as_ref()
            .filter(|path| !path.as_os_str().is_empty())
        {
            config.client_ca_pem =
                read_authority(path).map_err(|why| field("authentication.x509.clientCAFile", why))?;
            config.client_ca_file = Some(path.clone());
        }
        Ok(())
    }

    fn apply_swap(&self, config: &mut NodeConfig) -> Result<(), Error> {
        config.swap.fail_on = self.fail_swap_on.unwrap_or(config.swap.fail_on);
        if let Some(behavior) = &self.memory_swap.swap_behavior {
            config.swap.behavior = SwapBehavior::parse(behavior).ok_or_else(|| {
                let why = format!("{behavior:?} must be one of: \"\", \"LimitedSwap\" or \"NoSwap\"");
                field("memorySwap.swapBehavior", why)
            })?;
        }
        Ok(())
    }

    /// COMPAT: who says how often the status is made but not how often it is written has it written as often.
    fn apply_status(&self, config: &mut NodeConfig) -> Result<(), Error> {
        let update = self.node_status_update_frequency.as_ref();
        let update = positive("nodeStatusUpdateFrequency", update)?;
        let report = self.node_status_report_frequency.as_ref();
        let report = positive("nodeStatusReportFrequency", report)?;
        let least = Duration::from_secs(1);
        if update.is_some_and(|update| update < least) {
            return Err(field("nodeStatusUpdateFrequency", "must be at least 1s"));
        }
        config.node_status_report_frequency =
            report.or(update).unwrap_or(config.node_status_report_frequency);
        config.node_status_update_frequency = update.unwrap_or(config.node_status_update_frequency);
        Ok(())
    }
}

fn count(name: &str, number: Option<i32>) -> Result<Option<u32>, Error> {
    let parsed = number.map(u32::try_from).transpose();
    parsed.map_err(|_| field(name, "must not be a negative number"))
}

/// Certificates in PEM, one at least.
fn read_authority(path: &Path) -> Result<Vec<u8>, String> {
    use std::io::Read;
    let told = |error: std::io::Error| format!("cannot read {}: {error}", path.display());
    let mut pem = Vec::new();
    let file = std::fs::File::open(path).map_err(told)?;
    file.take(super::MAX_FILE).read_to_end(&mut pem).map_err(told)?;
    let first = rustls_pemfile::certs(&mut pem.as_slice()).next();
    match first {
        Some(Ok(_)) => Ok(pem),
        _ => Err(format!("{} has no certificate", path.display())),
    }
}
