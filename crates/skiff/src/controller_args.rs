//! The flags of single controllers, by the controller manager's names.

use crate::access::duration;
use crate::node_health_args::{positive_duration, rate};
use clap::{Arg, ArgMatches, Args, FromArgMatches};
use skiff_controllers::{CONCURRENCY_FLAGS, Concurrency, ControllersConfig};
use std::time::Duration;

#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Controllers")]
pub struct ControllerArgs {
    /// How often autoscalers look at their metrics
    #[arg(long, value_name = "DURATION", value_parser = positive_duration, default_value = "15s")]
    pub horizontal_pod_autoscaler_sync_period: Duration,
    /// How far autoscalers look back: they do not scale below any recommendation of that time
    #[arg(long, value_name = "DURATION", value_parser = duration, default_value = "5m")]
    pub horizontal_pod_autoscaler_downscale_stabilization: Duration,
    /// How long after a pod's start its CPU metric may be ignored
    #[arg(long, value_name = "DURATION", value_parser = duration, default_value = "5m")]
    pub horizontal_pod_autoscaler_cpu_initialization_period: Duration,
    /// How long after a pod's start changes of its readiness are its first
    #[arg(long, value_name = "DURATION", value_parser = duration, default_value = "30s")]
    pub horizontal_pod_autoscaler_initial_readiness_delay: Duration,
    /// How far from 1 the ratio of a metric to its target must be for autoscalers to scale
    #[arg(long, value_name = "PART", value_parser = rate, default_value = "0.1")]
    pub horizontal_pod_autoscaler_tolerance: f64,
    /// How long certificates are valid that the cluster signs; a request may ask for less
    #[arg(long, value_name = "DURATION", value_parser = positive_duration, default_value = "8760h")]
    pub cluster_signing_duration: Duration,
    /// How long a legacy token of a service account is kept after its last use, before it can be deleted
    #[arg(long, value_name = "DURATION", value_parser = positive_duration, default_value = "8760h")]
    pub legacy_service_account_token_clean_up_period: Duration,
    /// How many finished pods there may be before some are deleted; 0 or less: any number
    #[arg(
        long,
        value_name = "COUNT",
        allow_negative_numbers = true,
        default_value_t = 12_500
    )]
    pub terminated_pod_gc_threshold: i32,
    /// How often namespaces that are being deleted are looked at, whatever changes
    #[arg(long, value_name = "DURATION", value_parser = positive_duration, default_value = "5m")]
    pub namespace_sync_period: Duration,
    /// How often ResourceQuotas are counted, whatever changes
    #[arg(long, value_name = "DURATION", value_parser = positive_duration, default_value = "5m")]
    pub resource_quota_sync_period: Duration,
    /// How often volumes and claims that are not settled are looked at, whatever changes
    #[arg(long, value_name = "DURATION", value_parser = positive_duration, default_value = "15s")]
    pub pvclaimbinder_sync_period: Duration,
    #[command(flatten)]
    pub concurrency: ConcurrencyArgs,
}

impl ControllerArgs {
    pub fn set(&self, config: &mut ControllersConfig) {
        config.hpa_sync_period = self.horizontal_pod_autoscaler_sync_period;
        config.hpa_downscale_stabilization = self.horizontal_pod_autoscaler_downscale_stabilization;
        config.hpa_cpu_initialization_period = self.horizontal_pod_autoscaler_cpu_initialization_period;
        config.hpa_initial_readiness_delay = self.horizontal_pod_autoscaler_initial_readiness_delay;
        config.hpa_tolerance = self.horizontal_pod_autoscaler_tolerance;
        config.cluster_signing_duration = self.cluster_signing_duration;
        config.legacy_token_clean_up_period = self.legacy_service_account_token_clean_up_period;
        config.terminated_pod_gc_threshold = usize::try_from(self.terminated_pod_gc_threshold).unwrap_or(0);
        config.namespace_sync_period = self.namespace_sync_period;
        config.resource_quota_sync_period = self.resource_quota_sync_period;
        config.volume_binder_sync_period = self.pvclaimbinder_sync_period;
        config.concurrency = self.concurrency.0.clone();
    }
}

/// One flag for each row of [`CONCURRENCY_FLAGS`].
#[derive(Debug, Clone, Default)]
pub struct ConcurrencyArgs(Concurrency);

impl Args for ConcurrencyArgs {
    fn augment_args(command: clap::Command) -> clap::Command {
        CONCURRENCY_FLAGS.iter().fold(command, |command, flag| {
            let help = format!(
                "How many {} are worked on at a time [default: {}]",
                flag.objects, flag.default
            );
            let arg = Arg::new(flag.name).long(flag.name).value_name("COUNT");
            let count = clap::value_parser!(u16).range(1..);
            command.arg(arg.value_parser(count).help(help))
        })
    }

    fn augment_args_for_update(command: clap::Command) -> clap::Command {
        Self::augment_args(command)
    }
}

impl FromArgMatches for ConcurrencyArgs {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, clap::Error> {
        let mut args = Self::default();
        args.update_from_arg_matches(matches)?;
        Ok(args)
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        for flag in CONCURRENCY_FLAGS {
            if let Some(count) = matches.get_one::<u16>(flag.name) {
                self.0.set(flag, usize::from(*count));
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Debug, Parser)]
    struct Flags {
        #[command(flatten)]
        controllers: ControllerArgs,
    }

    fn default() -> ControllersConfig {
        let client_for = |_: &str| unreachable!("no client is made");
        ControllersConfig::new(std::sync::Arc::new(client_for), String::new(), String::new())
    }

    fn facts(config: &ControllersConfig) -> String {
        let periods = [
            config.hpa_sync_period,
            config.hpa_downscale_stabilization,
            config.hpa_cpu_initialization_period,
            config.hpa_initial_readiness_delay,
            config.cluster_signing_duration,
            config.legacy_token_clean_up_period,
            config.namespace_sync_period,
            config.resource_quota_sync_period,
            config.volume_binder_sync_period,
        ];
        let (tolerance, threshold) = (config.hpa_tolerance, config.terminated_pod_gc_threshold);
        format!("{periods:?} {tolerance} {threshold} {:?}", config.concurrency)
    }

    fn set(flags: &[&str]) -> Result<ControllersConfig, clap::Error> {
        let mut config = default();
        let parsed = Flags::try_parse_from([&["skiff"], flags].concat())?;
        parsed.controllers.set(&mut config);
        Ok(config)
    }

    #[test]
    fn defaults_are_those_of_the_controllers() {
        assert_eq!(facts(&set(&[]).unwrap()), facts(&default()));
    }

    #[test]
    fn every_flag_reaches_its_field() {
        let flags = [
            ("--horizontal-pod-autoscaler-sync-period", "1s"),
            ("--horizontal-pod-autoscaler-downscale-stabilization", "2s"),
            ("--horizontal-pod-autoscaler-cpu-initialization-period", "3s"),
            ("--horizontal-pod-autoscaler-initial-readiness-delay", "4s"),
            ("--cluster-signing-duration", "5s"),
            ("--legacy-service-account-token-clean-up-period", "6s"),
            ("--namespace-sync-period", "7s"),
            ("--resource-quota-sync-period", "8s"),
            ("--pvclaimbinder-sync-period", "9s"),
            ("--horizontal-pod-autoscaler-tolerance", "0.25"),
            ("--terminated-pod-gc-threshold", "-1"),
            ("--concurrent_rc_syncs", "11"),
            ("--concurrent-gc-syncs", "12"),
        ];
        let words: Vec<&str> = flags.iter().flat_map(|(flag, value)| [*flag, *value]).collect();
        let mut concurrency = Concurrency::default();
        for (name, workers) in [("concurrent_rc_syncs", 11), ("concurrent-gc-syncs", 12)] {
            let flag = CONCURRENCY_FLAGS.iter().find(|flag| flag.name == name);
            concurrency.set(flag.unwrap(), workers);
        }
        let expected = format!("[1s, 2s, 3s, 4s, 5s, 6s, 7s, 8s, 9s] 0.25 0 {concurrency:?}");
        assert_eq!(facts(&set(&words).unwrap()), expected);
    }

    #[test]
    fn wrong_values_are_refused() {
        for (flag, value) in [
            ("--horizontal-pod-autoscaler-sync-period", "0s"),
            ("--horizontal-pod-autoscaler-downscale-stabilization", "-1s"),
            ("--horizontal-pod-autoscaler-tolerance", "-0.1"),
            ("--cluster-signing-duration", "0s"),
            ("--namespace-sync-period", "0s"),
            ("--terminated-pod-gc-threshold", "many"),
            ("--concurrent-job-syncs", "0"),
            ("--concurrent-job-syncs", "70000"),
        ] {
            let word = format!("{flag}={value}");
            assert!(set(&[&word]).is_err(), "{word}");
        }
    }
}
