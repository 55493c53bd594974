//! What files are taken, and what becomes of them.

use super::*;
use crate::swap::SwapBehavior;
use serde_json::json;

fn parse(rest: &str) -> Result<KubeletConfiguration, Error> {
    let text = format!("apiVersion: kubelet.config.k8s.io/v1beta1\nkind: KubeletConfiguration\n{rest}");
    KubeletConfiguration::parse(text.as_bytes())
}

fn applied(rest: &str) -> Result<NodeConfig, Error> {
    let mut config = NodeConfig::new("n", "/data", "unix:///cri.sock");
    parse(rest)?.apply(&mut config)?;
    Ok(config)
}

#[test]
fn what_the_file_says_is_done() {
    let config = applied(
        "staticPodPath: /etc/kubernetes/manifests\nstaticPodURL: http://a/b\nstaticPodURLHeader: {X-A: [b]}\n\
         fileCheckFrequency: 1m30s\nmaxPods: 7\npodPidsLimit: 100\nimageMaximumGCAge: 24h\n\
         imageGCHighThresholdPercent: 70\nimageGCLowThresholdPercent: 60\ncontainerLogMaxSize: 1Mi\n\
         containerLogMaxFiles: 3\nkubeReserved: {cpu: 200m, memory: 1Gi}\nsystemReserved: {cpu: '1'}\n\
         clusterDNS: [10.0.0.10]\nevictionHard: {memory.available: 200Mi}\nserializeImagePulls: true\n\
         cpuManagerPolicy: static\ncpuManagerPolicyOptions: {full-pcpus-only: 'true'}\nreservedSystemCPUs: 0-1\n\
         memoryManagerPolicy: Static\nreservedMemory: [{numaNode: 0, limits: {memory: 1Gi}}]\n\
         topologyManagerPolicy: restricted\ntopologyManagerScope: pod\ncpuManagerReconcilePeriod: 5s\n\
         crashLoopBackOff: {maxContainerRestartPeriod: 20s}\nimagePullCredentialsVerificationPolicy: AlwaysVerify\nallowedUnsafeSysctls: [kernel.msg*]\n\
         failSwapOn: true\nmemorySwap: {swapBehavior: LimitedSwap}\n",
    )
    .unwrap();
    assert_eq!(config.static_pods.path, Some("/etc/kubernetes/manifests".into()));
    assert_eq!(config.static_pods.url.as_deref(), Some("http://a/b"));
    assert_eq!(config.static_pods.url_headers["x-a"], "b");
    assert_eq!(config.static_pods.file_check_frequency, Duration::from_secs(90));
    assert_eq!((config.max_pods, config.pod_max_pids), (7, Some(100)));
    assert_eq!(config.image_limits.most_age, Some(Duration::from_secs(86400)));
    assert_eq!((config.image_limits.high, config.image_limits.low), (70, 60));
    assert_eq!(
        (config.container_log_max_size, config.container_log_max_files),
        (1 << 20, 3)
    );
    assert_eq!(
        (config.reserved.cpu_milli, config.reserved.memory),
        (1200, 1 << 30)
    );
    assert_eq!(config.max_parallel_image_pulls, 1);
    assert_eq!(config.max_container_restart_period, Duration::from_secs(20));
    assert_eq!(config.thresholds.list.len(), 1);
    assert_eq!(config.image_verification, VerificationPolicy::All);
    assert_eq!(config.managers.reserved_cpus.len(), 2);
    assert!(config.swap.fail_on && config.swap.behavior == SwapBehavior::LimitedSwap);
    let shown = effective(&config, 10250);
    assert_eq!(shown["cpuManagerPolicy"], "static");
    assert_eq!(
        shown["cpuManagerPolicyOptions"],
        json!({"full-pcpus-only": "true"})
    );
    assert_eq!(shown["cpuManagerReconcilePeriod"], "5s");
    assert_eq!(shown["reservedSystemCPUs"], "0-1");
    assert_eq!(
        shown["reservedMemory"],
        json!([{"numaNode": 0, "limits": {"memory": "1073741824"}}])
    );
    assert_eq!(
        (&shown["topologyManagerPolicy"], &shown["topologyManagerScope"]),
        (&json!("restricted"), &json!("pod"))
    );
    assert_eq!(shown["evictionHard"], json!({"memory.available": "200Mi"}));
    assert_eq!(shown["staticPodURLHeader"], json!({"x-a": ["<masked>"]}));
    assert_eq!(shown["maxPods"], 7);
    assert_eq!(
        (&shown["failSwapOn"], &shown["memorySwap"]),
        (&json!(true), &json!({"swapBehavior": "LimitedSwap"}))
    );
    assert_eq!(shown["cgroupDriver"], "cgroupfs");
    assert_eq!(shown["featureGates"], Value::Null);
}

#[test]
fn what_is_refused() {
    let check = |rest: &str, expected: &str| {
        let error = applied(rest).err().unwrap().to_string();
        assert!(error.contains(expected), "{error} is not {expected}");
    };
    check("colour: red\n", "strict decoding error: unknown field \"colour\"");
    check("maxPods: 1\nmaxPods: 2\n", "maxPods");
    check("maxPods: many\n", "strict decoding error: ");
    check(
        "cgroupDriver: systemd\n",
        "cgroupDriver: skiff does not act on this field",
    );
    check(
        "authentication: {anonymous: {enabled: true}}\n",
        "authentication: skiff does not act",
    );
    check("featureGates: {Some: true}\n", "featureGates: ");
    check(
        "shutdownGracePeriod: 500ms\n",
        "shutdownGracePeriod: must be either zero or otherwise >= 1 sec",
    );
    check(
        "shutdownGracePeriod: 10s\nshutdownGracePeriodCriticalPods: 20s\n",
        "shutdownGracePeriodCriticalPods: 20s must be <= shutdownGracePeriod 10s",
    );
    check(
        "shutdownGracePeriodCriticalPods: 1s\n",
        "must be <= shutdownGracePeriod 0s",
    );
    check(
        "shutdownGracePeriod: 10s\nshutdownGracePeriodByPodPriority: [{priority: 1}]\n",
        "shutdownGracePeriodByPodPriority: cannot be specified together",
    );
    check(
        "shutdownGracePeriodByPodPriority: [{priority: 1, shutdownGracePeriodSeconds: -1}]\n",
        "must not be negative",
    );
    check("shutdownGracePeriodByPodPriority: [{prio: 1}]\n", "prio");
    check(
        "imageMaximumGCAge: 1s\n",
        "must be greater than imageMinimumGCAge",
    );
    check("containerLogMaxFiles: 1\n", "must be greater than 1");
    check("kubeReserved: {gpus: '1'}\n", "kubeReserved: gpus=1");
    check(
        "imagePullCredentialsVerificationPolicy: Sometimes\n",
        "unknown policy",
    );
    check(
        "preloadedImagesVerificationAllowlist: [a]\n",
        "NeverVerifyAllowlistedImages",
    );
    check("fileCheckFrequency: often\n", "fileCheckFrequency: ");
    check("podsPerCore: -1\n", "podsPerCore: must not be a negative number");
    check("cpuCFSQuotaPeriod: 10ms\n", "CustomCPUCFSQuotaPeriod");
    check("eventRecordQPS: 5\n", "eventRecordQPS: skiff does not act");
    check(
        "cpuManagerPolicy: dynamic\n",
        "cpuManagerPolicy: unknown policy: \"dynamic\"",
    );
    check(
        "reservedSystemCPUs: some\n",
        "reservedSystemCPUs: \"some\" is not the number of a CPU",
    );
    check(
        "topologyManagerScope: node\n",
        "topologyManagerScope: \"node\" must be one of: \"container\", or \"pod\"",
    );
    check(
        "reservedMemory: [{numaNode: 0, limit: {}}]\n",
        "strict decoding error: ",
    );
    check(
        "memorySwap: {swapBehavior: UnlimitedSwap}\n",
        "memorySwap.swapBehavior: \"UnlimitedSwap\" must be one of: \"\", \"LimitedSwap\" or \"NoSwap\"",
    );
    check(
        "crashLoopBackOff: {maxContainerRestartPeriod: 1h}\n",
        "between 1s and 300s",
    );
    let error = KubeletConfiguration::parse(b"kind: Pod\napiVersion: v1\n")
        .unwrap_err()
        .to_string();
    assert!(
        error.starts_with("no kind \"Pod\" is registered for version \"v1\""),
        "{error}"
    );
}

#[test]
fn periods_of_a_shutdown() {
    let periods = |text: &str| -> Vec<(i32, i64)> {
        let list = applied(text).unwrap().node_shutdown.periods;
        list.iter()
            .map(|one| (one.priority, one.shutdown_grace_period_seconds))
            .collect()
    };
    assert_eq!(periods("shutdownGracePeriod: 0s\n"), []);
    assert_eq!(
        periods("shutdownGracePeriod: 1m\nshutdownGracePeriodCriticalPods: 10s\n"),
        [(0, 50), (2_000_000_000, 10)]
    );
    let text = "shutdownGracePeriodByPodPriority:\n- {priority: 9, shutdownGracePeriodSeconds: 3}\n- {priority: -1, shutdownGracePeriodSeconds: 5}\n";
    assert_eq!(periods(text), [(-1, 5), (9, 3)]);
    let shown = effective(&applied(text).unwrap(), 10250);
    assert_eq!(
        shown["shutdownGracePeriodByPodPriority"][1],
        json!({"priority": 9, "shutdownGracePeriodSeconds": 3})
    );
}

#[test]
fn settings() {
    let mut config = applied(
        "seccompDefault: true\nproviderID: cloud://1\ncpuCFSQuota: false\nnodeStatusUpdateFrequency: 20s\npodsPerCore: 3\n\
         protectKernelDefaults: true\nregistryPullQPS: 0\nregistryBurst: 7\nruntimeRequestTimeout: 10m\n\
         streamingConnectionIdleTimeout: 5m\n",
    )
    .unwrap();
    assert!(config.seccomp_default && !config.cpu_cfs_quota && config.protect_kernel_defaults);
    assert_eq!(config.provider_id, "cloud://1");
    assert_eq!((config.pull_rate.per_second, config.pull_rate.burst), (0, 7));
    assert_eq!(config.runtime_request_timeout, Duration::from_secs(600));
    assert_eq!(config.streaming_idle_timeout, Some(Duration::from_secs(300)));
    // How often it is written follows from how often it is made.
    let twenty = Duration::from_secs(20);
    assert_eq!(
        (
            config.node_status_update_frequency,
            config.node_status_report_frequency
        ),
        (twenty, twenty)
    );
    let shown = effective(&config, 10250);
    assert_eq!(shown["nodeStatusReportFrequency"], "20s");
    assert_eq!(
        (&shown["seccompDefault"], &shown["podsPerCore"]),
        (&json!(true), &json!(3))
    );
    let healthz = |text: &str, port: u16| {
        let mut config = applied(text).unwrap();
        config.server_bind.set_port(port);
        config.healthz_address().map(|address| address.to_string())
    };
    assert_eq!(healthz("maxPods: 1\n", 10250).as_deref(), Some("127.0.0.1:10248"));
    assert_eq!(healthz("healthzPort: 0\n", 10250), None);
    assert_eq!(healthz("maxPods: 1\n", 20250), None);
    let own = healthz("healthzPort: 7\nhealthzBindAddress: '::1'\n", 20250);
    assert_eq!(own.as_deref(), Some("[::1]:7"));
    config.limit_pods_by_cpus(4);
    assert_eq!(config.max_pods, 12);
    config.limit_pods_by_cpus(400);
    assert_eq!(config.max_pods, 12);
    assert_eq!(
        applied("nodeStatusReportFrequency: 1m\n")
            .unwrap()
            .node_status_report_frequency,
        Duration::from_secs(60)
    );
}

#[test]
fn the_authority_of_clients() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("ca.crt");
    let text = format!("authentication: {{x509: {{clientCAFile: {}}}}}\n", path.display());
    let refused = |text: &str| applied(text).err().unwrap().to_string();
    assert!(refused(&text).starts_with("authentication.x509.clientCAFile: cannot read "));
    std::fs::write(&path, "nothing").unwrap();
    assert!(refused(&text).ends_with("ca.crt has no certificate"));
    let pki = skiff_pki::Pki::open(&dir.path().join("pki")).unwrap();
    std::fs::write(&path, pki.ca_certificate()).unwrap();
    let config = applied(&text).unwrap();
    assert_eq!(config.client_ca_pem, pki.ca_certificate().as_bytes());
    let shown = effective(&config, 10250);
    assert_eq!(shown["authentication"]["x509"]["clientCAFile"], json!(path));
    assert_eq!(shown["authentication"]["anonymous"]["enabled"], false);
    assert!(
        refused("authentication: {x509: {other: a}}\n").starts_with("authentication: skiff does not act")
    );
    assert!(refused("clientCAFile: /a\n").contains("unknown field \"clientCAFile\""));
}

/// What kubeadm writes says mostly what is so anyway.
#[test]
fn defaults_may_be_said() {
    applied(
        "syncFrequency: 0s\nauthentication: {anonymous: {enabled: false}, webhook: {cacheTTL: 0s, enabled: true}}\n\
         authorization: {mode: Webhook}\nrotateCertificates: true\nlogging: {flushFrequency: 0, verbosity: 0}\n\
         memorySwap: {}\ncgroupDriver: cgroupfs\nnodeStatusReportFrequency: 5m\nhealthzPort: 10248\n\
         featureGates: null\nresolvConf: /run/systemd/resolve/resolv.conf\n",
    )
    .unwrap();
}

#[test]
fn every_field_has_one_fate() {
    for &name in ACTED_ON {
        assert!(!fixed::is_known(name), "{name}");
        // The struct has it: a value of a wrong type is not ignored.
        let wrong = if name == "resolvConf" || name == "staticPodPath" {
            json!(1)
        } else {
            json!({"a": {"b": 1}})
        };
        let text = format!("{name}: {wrong}\n");
        assert!(parse(&text).is_err(), "{name} is not read");
    }
}
