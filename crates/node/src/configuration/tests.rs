//! What files are taken, and what becomes of them.

use super::*;
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
         crashLoopBackOff: {maxContainerRestartPeriod: 20s}\nimagePullCredentialsVerificationPolicy: AlwaysVerify\nallowedUnsafeSysctls: [kernel.msg*]\n",
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
    let shown = effective(&config, 10250);
    assert_eq!(shown["evictionHard"], json!({"memory.available": "200Mi"}));
    assert_eq!(shown["staticPodURLHeader"], json!({"x-a": ["<masked>"]}));
    assert_eq!(shown["maxPods"], 7);
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
    check("shutdownGracePeriod: 30s\n", "shutdownGracePeriod: ");
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
    for name in ACTED_ON {
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
