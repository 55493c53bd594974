//! The flags that say when a node counts as lost and how fast its pods are moved, by the controller manager's names.

use crate::access::duration;
use clap::Args;
use skiff_controllers::{ControllersConfig, EvictionRates};
use std::time::Duration;

#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Lost nodes")]
pub struct NodeHealthArgs {
    /// How long a node may be silent before it counts as unhealthy
    #[arg(long, value_name = "DURATION", value_parser = positive_duration, default_value = "50s")]
    pub node_monitor_grace_period: Duration,
    /// How long a node that has not yet reported may be silent
    #[arg(long, value_name = "DURATION", value_parser = positive_duration, default_value = "1m")]
    pub node_startup_grace_period: Duration,
    /// How often nodes are looked at
    #[arg(long, value_name = "DURATION", value_parser = positive_duration, default_value = "5s")]
    pub node_monitor_period: Duration,
    /// Nodes per second whose pods are evicted while their zone is healthy
    #[arg(long, value_name = "RATE", value_parser = rate, default_value = "0.1")]
    pub node_eviction_rate: f64,
    /// The same for an unhealthy zone of a large cluster; in a small one nothing is evicted then
    #[arg(long, value_name = "RATE", value_parser = rate, default_value = "0.01")]
    pub secondary_node_eviction_rate: f64,
    /// A zone with more nodes than this is large
    #[arg(long, value_name = "COUNT", default_value_t = 50)]
    pub large_cluster_size_threshold: usize,
    /// A zone is unhealthy if this part of its nodes, and at least three of them, are not ready
    #[arg(long, value_name = "PART", value_parser = part, default_value = "0.55")]
    pub unhealthy_zone_threshold: f64,
}

impl NodeHealthArgs {
    pub fn set(&self, config: &mut ControllersConfig) {
        config.node_monitor_grace_period = self.node_monitor_grace_period;
        config.node_startup_grace_period = self.node_startup_grace_period;
        config.node_monitor_period = self.node_monitor_period;
        config.eviction_rates = EvictionRates {
            primary: self.node_eviction_rate,
            secondary: self.secondary_node_eviction_rate,
            large_cluster_threshold: self.large_cluster_size_threshold,
            unhealthy_zone_threshold: self.unhealthy_zone_threshold,
        };
    }
}

pub fn positive_duration(text: &str) -> Result<Duration, String> {
    match duration(text)? {
        Duration::ZERO => Err("it must be longer than 0s".to_owned()),
        duration => Ok(duration),
    }
}

pub fn rate(text: &str) -> Result<f64, String> {
    let rate: f64 = text.parse().map_err(|_| "not a number".to_owned())?;
    match rate.is_finite() && rate >= 0.0 {
        true => Ok(rate),
        false => Err("a rate is 0 or more".to_owned()),
    }
}

fn part(text: &str) -> Result<f64, String> {
    match rate(text)? {
        part if part <= 1.0 => Ok(part),
        _ => Err("it is a part of all nodes, from 0 to 1".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values() {
        assert_eq!(rate("0.5"), Ok(0.5));
        assert_eq!(part("1"), Ok(1.0));
        assert_eq!(positive_duration("50s"), Ok(Duration::from_secs(50)));
        for text in ["-1", "NaN", "inf", "x", ""] {
            assert!(rate(text).is_err(), "{text}");
        }
        assert!(part("1.1").is_err());
        for text in ["0s", "-1s", "5"] {
            assert!(positive_duration(text).is_err(), "{text}");
        }
    }

    #[test]
    fn defaults_are_those_of_the_controllers() {
        use clap::Parser;
        #[derive(Parser)]
        struct Flags {
            #[command(flatten)]
            health: NodeHealthArgs,
        }
        let client_for = |_: &str| unreachable!("no client is made");
        let default = ControllersConfig::new(std::sync::Arc::new(client_for), String::new(), String::new());
        let mut set = default.clone();
        Flags::parse_from(["skiff"]).health.set(&mut set);
        let facts = |config: &ControllersConfig| {
            let periods = [
                config.node_monitor_grace_period,
                config.node_startup_grace_period,
                config.node_monitor_period,
            ];
            format!("{periods:?} {:?}", config.eviction_rates)
        };
        assert_eq!(facts(&set), facts(&default));
    }
}
