//! The fields of a KubeletConfiguration that this node does not act on, with upstream's defaults: what the file may
//! say of them, and what `/configz` shows.

use serde_json::{Value, json};

/// The field, its default, and why another value is refused where that helps.
type Fixed = (&'static str, Value, &'static str);

fn table() -> Vec<Fixed> {
    vec![
        ("enableServer", json!(true), ""),
        (
            "podLogsDir",
            json!("/var/log/pods"),
            "logs are below the data directory",
        ),
        ("syncFrequency", json!("1m0s"), ""),
        ("address", json!("0.0.0.0"), ""),
        ("port", json!(10250), "the port follows from --name"),
        (
            "readOnlyPort",
            json!(0),
            "there is no port without authentication",
        ),
        (
            "tlsCertFile",
            json!(""),
            "the cluster's authority issues the certificate",
        ),
        (
            "tlsPrivateKeyFile",
            json!(""),
            "the cluster's authority issues the certificate",
        ),
        ("tlsCipherSuites", json!([]), ""),
        ("tlsCurvePreferences", json!([]), ""),
        ("tlsMinVersion", json!(""), ""),
        ("serverTLSBootstrap", json!(false), ""),
        (
            "authentication",
            json!({"x509": {}, "webhook": {"enabled": true, "cacheTTL": "2m0s"}, "anonymous": {"enabled": false}}),
            "",
        ),
        (
            "authorization",
            json!({"mode": "Webhook", "webhook": {"cacheAuthorizedTTL": "5m0s", "cacheUnauthorizedTTL": "30s"}}),
            "",
        ),
        ("eventRecordQPS", json!(50), ""),
        ("eventBurst", json!(100), ""),
        ("enableDebuggingHandlers", json!(true), ""),
        ("enableContentionProfiling", json!(false), ""),
        ("oomScoreAdj", json!(-999), ""),
        ("nodeLeaseDurationSeconds", json!(40), ""),
        ("kubeletCgroups", json!(""), ""),
        ("systemCgroups", json!(""), ""),
        ("cgroupRoot", json!(""), "the cgroup follows from --name"),
        ("cgroupsPerQOS", json!(true), ""),
        (
            "cgroupDriver",
            json!("cgroupfs"),
            "cgroups are made in the hierarchy itself, not by systemd",
        ),
        ("singleProcessOOMKill", json!(false), ""),
        ("qosReserved", json!({}), ""),
        ("hairpinMode", json!("promiscuous-bridge"), ""),
        ("podCIDR", json!(""), "the controllers assign it"),
        ("runOnce", json!(false), ""),
        (
            "cpuCFSQuotaPeriod",
            json!("100ms"),
            "it requires the feature gate CustomCPUCFSQuotaPeriod, which is alpha",
        ),
        ("nodeStatusMaxImages", json!(50), ""),
        ("maxOpenFiles", json!(1_000_000), ""),
        ("contentType", json!("application/vnd.kubernetes.protobuf"), ""),
        ("kubeAPIQPS", json!(50), ""),
        ("kubeAPIBurst", json!(100), ""),
        ("mergeDefaultEvictionSettings", json!(false), ""),
        ("enableControllerAttachDetach", json!(true), ""),
        ("makeIPTablesUtilChains", json!(true), ""),
        ("iptablesMasqueradeBit", json!(14), ""),
        ("iptablesDropBit", json!(15), ""),
        (
            "featureGates",
            json!({}),
            "features are as upstream's defaults have them",
        ),
        ("containerLogMaxWorkers", json!(1), ""),
        ("configMapAndSecretChangeDetectionStrategy", json!("Watch"), ""),
        ("showHiddenMetricsForVersion", json!(""), ""),
        ("systemReservedCgroup", json!(""), ""),
        ("kubeReservedCgroup", json!(""), ""),
        (
            "enforceNodeAllocatable",
            json!(["pods"]),
            "only pods are confined",
        ),
        (
            "volumePluginDir",
            json!("/usr/libexec/kubernetes/kubelet-plugins/volume/exec/"),
            "",
        ),
        ("kernelMemcgNotification", json!(false), ""),
        (
            "logging",
            json!({"format": "text", "flushFrequency": "5s", "verbosity": 0, "options": {"text": {"infoBufferSize": "0"}, "json": {"infoBufferSize": "0"}}}),
            "see --log",
        ),
        ("enableSystemLogHandler", json!(true), ""),
        ("enableSystemLogQuery", json!(false), ""),
        ("enableProfilingHandler", json!(true), ""),
        ("enableDebugFlagsHandler", json!(true), ""),
        ("memoryThrottlingFactor", json!(0.9), ""),
        ("memoryReservationPolicy", json!("None"), ""),
        ("registerNode", json!(true), ""),
        ("tracing", json!({}), ""),
        ("localStorageCapacityIsolation", json!(true), ""),
        (
            "containerRuntimeEndpoint",
            json!(""),
            "use the flag --container-runtime-endpoint",
        ),
        ("imageServiceEndpoint", json!(""), "images are the runtime's"),
        ("failCgroupV1", json!(false), ""),
        ("userNamespaces", json!({}), ""),
        // Always on, whatever the file says.
        ("rotateCertificates", json!(true), ""),
    ]
}

pub(super) fn is_known(name: &str) -> bool {
    table().iter().any(|(field, ..)| *field == name)
}

/// Why the value cannot be had; `None` if it is what is so anyway.
pub(super) fn refused(name: &str, value: &Value) -> Option<String> {
    let (_, default, why) = table().into_iter().find(|(field, ..)| *field == name)?;
    if agrees(value, &default) || name == "rotateCertificates" {
        return None;
    }
    let why = if why.is_empty() {
        String::new()
    } else {
        format!(" ({why})")
    };
    Some(format!(
        "skiff does not act on this field{why}: leave it out, or set it to {default}"
    ))
}

/// Whether a value says nothing but the default. An empty one is none, as upstream.
fn agrees(value: &Value, default: &Value) -> bool {
    match (value, default) {
        (Value::Object(value), Value::Object(default)) => value
            .iter()
            .all(|(name, value)| agrees(value, default.get(name).unwrap_or(&Value::Null))),
        (Value::Null, _) => true,
        (Value::String(text), _) if text.is_empty() => true,
        (Value::Array(list), _) if list.is_empty() => true,
        (Value::Object(map), _) => map.values().all(|value| agrees(value, &Value::Null)),
        (Value::String(a), Value::String(b)) if a != b => {
            let time = |text: &str| crate::durations::parse_go_duration(text).ok();
            let (a, b) = (time(a), time(b));
            // Zero is how a duration is left out.
            a.is_some() && (a == b || a.is_some_and(|a| a.is_zero()) && b.is_some())
        }
        // A duration may be written as the number zero.
        (Value::Number(number), Value::Null | Value::String(_)) => number.as_f64() == Some(0.0),
        (Value::Bool(flag), Value::Null) => !flag,
        (value, default) => value == default,
    }
}

pub(super) fn defaults() -> impl Iterator<Item = (&'static str, Value)> {
    table().into_iter().map(|(field, default, _)| (field, default))
}
