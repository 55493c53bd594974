//! The configuration in effect, as `/configz` shows it.

use serde_json::{Map, Value, json};

use super::fixed;
use crate::config::NodeConfig;
use crate::durations::go_duration;
use crate::pressure::Thresholds;
use crate::pull_records::VerificationPolicy;
use crate::topology::{ManagersConfig, Pinning, Scope};

/// A KubeletConfiguration with every field that has a value.
pub(crate) fn effective(config: &NodeConfig, server_port: u16) -> Value {
    let mut all: Map<String, Value> = fixed::defaults()
        .filter(|(_, value)| !is_empty(value))
        .map(|(name, value)| (name.to_owned(), value))
        .collect();
    let pods = &config.static_pods;
    let mut header: Map<String, Value> = Map::new();
    for name in pods.url_headers.keys() {
        // COMPAT: upstream masks them, they may be secrets.
        header.insert(name.to_string(), json!(["<masked>"]));
    }
    let limits = &config.image_limits;
    let (hard, soft, grace, reclaim) = thresholds(&config.thresholds);
    let reserved = &config.reserved;
    let mut kept = Map::new();
    for (name, amount) in [
        ("cpu", format!("{}m", reserved.cpu_milli)),
        ("memory", reserved.memory.to_string()),
        ("ephemeral-storage", reserved.ephemeral_storage.to_string()),
        ("pid", reserved.pids.to_string()),
    ] {
        if amount != "0" && amount != "0m" {
            kept.insert(name.to_owned(), json!(amount));
        }
    }
    let (policy, allowed) = match &config.image_verification {
        VerificationPolicy::Never => ("NeverVerify", Vec::new()),
        VerificationPolicy::Pulled => ("NeverVerifyPreloadedImages", Vec::new()),
        VerificationPolicy::AllBut(list) => ("NeverVerifyAllowlistedImages", list.clone()),
        VerificationPolicy::All => ("AlwaysVerify", Vec::new()),
    };
    let own = json!({
        "imagePullCredentialsVerificationPolicy": policy,
        "preloadedImagesVerificationAllowlist": allowed,
        "staticPodPath": pods.path,
        "staticPodURL": pods.url,
        "staticPodURLHeader": header,
        "fileCheckFrequency": go_duration(pods.file_check_frequency),
        "httpCheckFrequency": go_duration(pods.http_check_frequency),
        "address": config.server_bind.ip().to_string(),
        "port": server_port,
        "clusterDomain": config.cluster_domain,
        "clusterDNS": config.cluster_dns,
        "cgroupRoot": format!("/{}", config.cgroup_root),
        "cgroupsPerQOS": config.cgroups_per_qos,
        "podLogsDir": config.log_dir,
        "containerRuntimeEndpoint": config.runtime_endpoint,
        "imageMinimumGCAge": go_duration(limits.least_age),
        "imageMaximumGCAge": go_duration(limits.most_age.unwrap_or_default()),
        "imageGCHighThresholdPercent": limits.high,
        "imageGCLowThresholdPercent": limits.low,
        "maxPods": config.max_pods,
        "podPidsLimit": config.pod_max_pids.unwrap_or(-1),
        "resolvConf": config.resolv_conf,
        "serializeImagePulls": config.max_parallel_image_pulls == 1,
        "maxParallelImagePulls": config.max_parallel_image_pulls,
        "evictionHard": hard,
        "evictionSoft": soft,
        "evictionSoftGracePeriod": grace,
        "evictionMinimumReclaim": reclaim,
        "evictionPressureTransitionPeriod": go_duration(config.thresholds.transition),
        "evictionMaxPodGracePeriod": config.thresholds.max_pod_grace,
        "containerLogMaxSize": config.container_log_max_size.to_string(),
        "containerLogMaxFiles": config.container_log_max_files,
        "containerLogMonitorInterval": go_duration(config.container_log_monitor_interval),
        "volumeStatsAggPeriod": match config.volume_stats_agg_period.is_zero() {
            true => "-1s".to_owned(),
            false => go_duration(config.volume_stats_agg_period),
        },
        "kubeReserved": kept,
        "registerWithTaints": config.register_taints,
        // The two times are two of these periods.
        "shutdownGracePeriod": "0s",
        "shutdownGracePeriodCriticalPods": "0s",
        "shutdownGracePeriodByPodPriority": config.node_shutdown.periods,
        "crashLoopBackOff": {"maxContainerRestartPeriod": go_duration(config.max_container_restart_period)},
    });
    let managers = managers(&config.managers);
    if let (Some(path), Some(authentication)) = (&config.client_ca_file, all.get_mut("authentication")) {
        authentication["x509"]["clientCAFile"] = json!(path);
    }
    for own in [own, settings(config), managers] {
        let Value::Object(own) = own else { continue };
        all.extend(own.into_iter().filter(|(_, value)| !is_empty(value)));
    }
    Value::Object(all)
}

fn settings(config: &NodeConfig) -> Value {
    json!({
        "failSwapOn": config.swap.fail_on,
        "memorySwap": {"swapBehavior": config.swap.behavior.as_str()},
        "healthzBindAddress": config.healthz_bind_address,
        "healthzPort": config.healthz_address().map_or(0, |address| address.port()),
        "seccompDefault": config.seccomp_default,
        "providerID": config.provider_id,
        "cpuCFSQuota": config.cpu_cfs_quota,
        "nodeStatusUpdateFrequency": go_duration(config.node_status_update_frequency),
        "nodeStatusReportFrequency": go_duration(config.node_status_report_frequency),
        "podsPerCore": config.pods_per_core,
        "protectKernelDefaults": config.protect_kernel_defaults,
        "registryPullQPS": config.pull_rate.per_second,
        "registryBurst": config.pull_rate.burst,
        "runtimeRequestTimeout": go_duration(config.runtime_request_timeout),
        "streamingConnectionIdleTimeout": go_duration(config.streaming_idle_timeout.unwrap_or_default()),
    })
}

fn is_empty(value: &Value) -> bool {
    match value {
        Value::Null => true,
        Value::String(text) => text.is_empty(),
        Value::Array(list) => list.is_empty(),
        Value::Object(map) => map.is_empty(),
        _ => false,
    }
}

fn managers(config: &ManagersConfig) -> Value {
    let pinning = |policy: Pinning, none: &'static str, pinned: &'static str| match policy {
        Pinning::None => none,
        Pinning::Static => pinned,
    };
    let reserved = config.reserved_memory.iter().map(|(node, limits)| {
        let limits: Map<String, Value> = limits
            .iter()
            .map(|(resource, bytes)| (resource.clone(), json!(bytes.to_string())))
            .collect();
        json!({"numaNode": node, "limits": limits})
    });
    json!({
        "cpuManagerPolicy": pinning(config.cpu_policy, "none", "static"),
        "cpuManagerPolicyOptions": config.cpu_options.to_map(),
        "cpuManagerReconcilePeriod": go_duration(config.reconcile_period),
        "reservedSystemCPUs": config.reserved_cpus.to_string(),
        "memoryManagerPolicy": pinning(config.memory_policy, "None", "Static"),
        "reservedMemory": reserved.collect::<Vec<_>>(),
        "topologyManagerPolicy": config.topology_policy.as_str(),
        "topologyManagerScope": match config.scope {
            Scope::Container => "container",
            Scope::Pod => "pod",
        },
        "topologyManagerPolicyOptions": config.topology_options.to_map(),
    })
}

type Amounts = Map<String, Value>;

fn thresholds(all: &Thresholds) -> (Amounts, Amounts, Amounts, Amounts) {
    let mut lists = (Map::new(), Map::new(), Map::new(), Map::new());
    for threshold in &all.list {
        let name = threshold.signal.as_str().to_owned();
        let amount = json!(threshold.amount.to_string());
        match threshold.grace {
            None => lists.0.insert(name.clone(), amount),
            Some(grace) => {
                lists.2.insert(name.clone(), json!(go_duration(grace)));
                lists.1.insert(name.clone(), amount)
            }
        };
        if let Some(reclaim) = &threshold.reclaim {
            lists.3.insert(name, json!(reclaim.to_string()));
        }
    }
    lists
}
