//! One pod a row: what it violates of the strictest policy, and when that began.

use super::policy::Version;
use super::*;
use serde_json::json;

const OLDEST: Version = Version::Minor(0);

fn violated(level: Level, version: Version, object: &Value) -> String {
    let found = violations(LevelVersion { level, version }, Pod::of(object));
    details(&found)
}

/// A pod that nobody can complain about, with something changed in it.
fn pod(change: impl FnOnce(&mut Value)) -> Value {
    let mut pod = json!({"metadata": {}, "spec": {
        "securityContext": {"runAsNonRoot": true, "seccompProfile": {"type": "RuntimeDefault"}},
        "containers": [{"name": "a", "image": "i", "securityContext": {
            "allowPrivilegeEscalation": false, "capabilities": {"drop": ["ALL"]}}}],
    }});
    change(&mut pod);
    pod
}

fn merged(into: &mut Value, from: &Value) {
    match (into, from) {
        (Value::Object(into), Value::Object(from)) => {
            for (key, value) in from {
                merged(into.entry(key.clone()).or_insert(Value::Null), value);
            }
        }
        (into, from) => *into = from.clone(),
    }
}

fn of_spec(spec: Value) -> Value {
    pod(|pod| merged(&mut pod["spec"], &spec))
}

fn of_container(container: Value) -> Value {
    pod(|pod| merged(&mut pod["spec"]["containers"][0], &container))
}

fn of_context(context: Value) -> Value {
    of_container(json!({ "securityContext": context }))
}

/// A violation that `baseline` has too.
fn at_baseline(pod: &Value, expected: &str) {
    assert_eq!(violated(Level::Baseline, Version::Latest, pod), expected);
    assert_eq!(violated(Level::Privileged, Version::Latest, pod), "");
}

/// A violation of `restricted`; `since` is the minor version that brought it.
fn at_restricted(pod: &Value, since: u64, expected: &str) {
    assert_eq!(violated(Level::Restricted, Version::Latest, pod), expected);
    assert_eq!(violated(Level::Restricted, Version::Minor(since), pod), expected);
    if since > 0 {
        let before = violated(Level::Restricted, Version::Minor(since - 1), pod);
        assert!(!before.contains(expected), "{before}");
    }
    assert_eq!(violated(Level::Baseline, Version::Latest, pod), "");
}

#[test]
fn a_pod_that_asks_for_little_is_welcome_everywhere() {
    let good = pod(|_| ());
    for version in [Version::Latest, OLDEST, Version::Minor(23), Version::Minor(99)] {
        assert_eq!(violated(Level::Restricted, version, &good), "");
    }
}

#[test]
fn what_reaches_the_host_is_not_baseline() {
    at_baseline(
        &of_spec(json!({"hostNetwork": true, "hostPID": true, "hostIPC": true})),
        "host namespaces (hostNetwork=true, hostPID=true, hostIPC=true)",
    );
    at_baseline(
        &of_spec(
            json!({"volumes": [{"name": "v", "hostPath": {"path": "/"}}, {"name": "w", "emptyDir": {}}]}),
        ),
        "hostPath volumes (volume \"v\")",
    );
    at_baseline(
        &of_container(json!({"ports": [{"hostPort": 9}, {"hostPort": 80}, {"containerPort": 1}]})),
        "hostPort (container \"a\" uses hostPorts 80, 9)",
    );
    at_baseline(
        &of_context(json!({"privileged": true})),
        "privileged (container \"a\" must not set securityContext.privileged=true)",
    );
    at_baseline(
        &of_spec(json!({"securityContext": {"windowsOptions": {"hostProcess": true}}})),
        "hostProcess (pod must not set securityContext.windowsOptions.hostProcess=true)",
    );
    let probes = of_container(
        json!({"livenessProbe": {"httpGet": {"host": "h"}}, "lifecycle": {"preStop": {"tcpSocket": {"host": "g"}}}}),
    );
    at_baseline(
        &probes,
        "probe or lifecycle host (container \"a\" uses probe or lifecycle hosts \"g\", \"h\")",
    );
    assert_eq!(violated(Level::Baseline, Version::Minor(33), &probes), "");
}

#[test]
fn profiles_that_let_go_are_not_baseline() {
    at_baseline(
        &of_context(json!({"seccompProfile": {"type": "Unconfined"}})),
        "seccompProfile (container \"a\" must not set securityContext.seccompProfile.type to \"Unconfined\")",
    );
    let annotated = pod(|pod| {
        pod["metadata"]["annotations"] = json!({
            "container.apparmor.security.beta.kubernetes.io/a": "unconfined",
            "container.seccomp.security.alpha.kubernetes.io/a": "unconfined",
        });
    });
    let app_armor = "forbidden AppArmor profile (annotation must not set AppArmor profile type to \
                     \"container.apparmor.security.beta.kubernetes.io/a=\"unconfined\"\")";
    at_baseline(&annotated, app_armor);
    let seccomp = "seccompProfile (forbidden annotation container.seccomp.security.alpha.kubernetes.io/a=\"unconfined\")";
    assert_eq!(
        violated(Level::Baseline, Version::Minor(18), &annotated),
        format!("{app_armor}, {seccomp}")
    );
    at_baseline(
        &of_spec(json!({"securityContext": {"seLinuxOptions": {"user": "u", "type": "t"}}})),
        "seLinuxOptions (pod set forbidden securityContext.seLinuxOptions: type \"t\"; user may not be set)",
    );
    let engine = of_context(json!({"seLinuxOptions": {"type": "container_engine_t"}}));
    at_baseline(&engine, "");
    assert_eq!(
        violated(Level::Baseline, Version::Minor(30), &engine),
        "seLinuxOptions (container \"a\" set forbidden securityContext.seLinuxOptions: type \"container_engine_t\")"
    );
    let sysctls =
        of_spec(json!({"securityContext": {"sysctls": [{"name": "net.ipv4.tcp_rmem"}, {"name": "x"}]}}));
    at_baseline(&sysctls, "forbidden sysctls (x)");
    assert_eq!(
        violated(Level::Baseline, Version::Minor(31), &sysctls),
        "forbidden sysctls (net.ipv4.tcp_rmem, x)"
    );
}

#[test]
fn capabilities_beyond_the_usual_are_not_baseline() {
    let raw = of_context(json!({"capabilities": {"drop": ["ALL"], "add": ["NET_RAW", "CHOWN"]}}));
    at_baseline(
        &raw,
        "non-default capabilities (container \"a\" must not include \"NET_RAW\" in securityContext.capabilities.add)",
    );
    // The stricter check speaks for the weaker one as soon as there is one.
    assert_eq!(
        violated(Level::Restricted, Version::Latest, &raw),
        "unrestricted capabilities (container \"a\" must not include \"CHOWN\", \"NET_RAW\" in securityContext.capabilities.add)"
    );
    assert_eq!(
        violated(Level::Restricted, Version::Minor(21), &raw),
        "non-default capabilities (container \"a\" must not include \"NET_RAW\" in securityContext.capabilities.add)"
    );
}

#[test]
fn restricted_asks_for_what_baseline_only_allows() {
    at_restricted(
        &of_context(json!({"allowPrivilegeEscalation": null})),
        8,
        "allowPrivilegeEscalation != false (container \"a\" must set securityContext.allowPrivilegeEscalation=false)",
    );
    at_restricted(
        &of_context(json!({"capabilities": null})),
        22,
        "unrestricted capabilities (container \"a\" must set securityContext.capabilities.drop=[\"ALL\"])",
    );
    at_restricted(
        &of_spec(json!({"volumes": [{"name": "v", "nfs": {}}, {"name": "w", "new": {}}]})),
        0,
        "restricted volume types (volumes \"v\", \"w\" use restricted volume types \"nfs\", \"unknown\")",
    );
    at_restricted(
        &of_spec(json!({"securityContext": {"runAsNonRoot": null}})),
        0,
        "runAsNonRoot != true (pod or container \"a\" must set securityContext.runAsNonRoot=true)",
    );
    at_restricted(
        &of_context(json!({"runAsNonRoot": false})),
        0,
        "runAsNonRoot != true (container \"a\" must not set securityContext.runAsNonRoot=false)",
    );
    at_restricted(
        &of_spec(json!({"securityContext": {"runAsUser": 0}})),
        23,
        "runAsUser=0 (pod must not set runAsUser=0)",
    );
    at_restricted(
        &of_spec(json!({"securityContext": {"seccompProfile": null}})),
        19,
        "seccompProfile (pod or container \"a\" must set securityContext.seccompProfile.type to \"RuntimeDefault\" or \"Localhost\")",
    );
}

#[test]
fn users_of_ones_own_and_windows_are_let_off() {
    let own = of_spec(json!({"hostUsers": false, "securityContext": {"runAsNonRoot": null, "runAsUser": 0}}));
    assert_eq!(violated(Level::Restricted, Version::Latest, &own), "");
    assert_eq!(
        violated(Level::Restricted, Version::Minor(34), &own),
        "runAsNonRoot != true (pod or container \"a\" must set securityContext.runAsNonRoot=true), runAsUser=0 (pod must not set runAsUser=0)"
    );
    let mut mount = of_context(json!({"procMount": "Unmasked"}));
    let found = "procMount (container \"a\" must not set securityContext.procMount to \"Unmasked\")";
    at_baseline(&mount, found);
    mount["spec"]["hostUsers"] = json!(false);
    at_baseline(&mount, "");
    assert_eq!(violated(Level::Restricted, Version::Latest, &mount), found);
    let windows = json!({"spec": {"os": {"name": "windows"}, "securityContext": {"runAsNonRoot": true},
        "containers": [{"name": "a"}]}});
    assert_eq!(violated(Level::Restricted, Version::Latest, &windows), "");
    assert_ne!(violated(Level::Restricted, Version::Minor(24), &windows), "");
}

#[test]
fn every_sort_of_container_is_looked_at() {
    let many = json!({"spec": {"hostPID": true,
        "initContainers": [{"name": "i", "securityContext": {"privileged": true}}],
        "containers": [{"name": "c", "securityContext": {"privileged": true}}],
        "ephemeralContainers": [{"name": "e", "securityContext": {"privileged": true}}]}});
    at_baseline(
        &many,
        "host namespaces (hostPID=true), privileged (containers \"i\", \"c\", \"e\" must not set securityContext.privileged=true)",
    );
    let found = violations(
        LevelVersion {
            level: Level::Baseline,
            version: Version::Latest,
        },
        Pod::of(&many),
    );
    assert_eq!(reasons(&found), "host namespaces, privileged");
}

#[test]
fn labels_are_read_with_care() {
    let check = |labels: &[(&str, &str)], expected: [&str; 3], complaints: usize| {
        let (policy, errors) = Policy::of_labels(Policy::PRIVILEGED, |key| {
            let key = key.strip_prefix(LABEL_PREFIX)?;
            labels
                .iter()
                .find(|(known, _)| *known == key)
                .map(|(_, value)| *value)
        });
        let read = [policy.enforce, policy.audit, policy.warn].map(|mode| mode.to_string());
        assert_eq!(read, expected, "{labels:?}");
        assert_eq!(errors.len(), complaints, "{labels:?}");
    };
    let privileged = "privileged:latest";
    check(&[], [privileged; 3], 0);
    check(
        &[("enforce", "baseline"), ("enforce-version", "v1.20")],
        ["baseline:v1.20", privileged, "baseline:v1.20"],
        0,
    );
    check(
        &[
            ("enforce", "restricted"),
            ("warn", "baseline"),
            ("warn-version", "v1.9"),
        ],
        ["restricted:latest", privileged, "baseline:v1.9"],
        0,
    );
    check(
        &[
            ("enforce", "x"),
            ("audit", "x"),
            ("warn", "x"),
            ("warn-version", "1.2"),
        ],
        ["restricted:latest", privileged, privileged],
        4,
    );
    for wrong in ["v1.01", "v2.1", "v1.", "v1.-1", "v1.99999999999999999999", ""] {
        check(&[("enforce-version", wrong)], [privileged; 3], 1);
    }
}
