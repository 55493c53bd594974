//! `hostUsers: false`: a pod with users of its own, over kills of skiff; root in it is nobody on the machine.

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use skiff_testkit::whole_path::PATIENCE;
use skiff_testkit::{BUSYBOX, Cluster, busybox_archive, eventually, expect_eq};
use std::process::Command;

const SKIFF: &str = env!("CARGO_BIN_EXE_skiff");

/// All volumes that are files of the node, probes, and what Pod Security relaxes.
fn pod(name: &str) -> Value {
    let script = "set -e; cat /v/config/word /v/secret/word /v/projected/name >/dev/null; \
        cat /var/run/secrets/kubernetes.io/serviceaccount/token >/dev/null; \
        echo x >/v/empty/file; echo x >/v/memory/file; echo x >/dev/termination-log; \
        if echo '|/tmp/evil' >/proc/sys/kernel/core_pattern; then echo wrote core_pattern; fi 2>/dev/null; \
        echo ids $(id -u) $(cat /proc/self/uid_map); exec sleep 10000";
    let mount = |name: &str| json!({"name": name, "mountPath": format!("/v/{name}")});
    json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": {
        "hostUsers": false,
        "terminationGracePeriodSeconds": 0,
        "volumes": [
            {"name": "config", "configMap": {"name": "words"}},
            {"name": "secret", "secret": {"secretName": "words", "defaultMode": 0o400}},
            {"name": "projected", "projected": {"sources": [
                {"downwardAPI": {"items": [{"path": "name", "fieldRef": {"fieldPath": "metadata.name"}}]}}]}},
            {"name": "empty", "emptyDir": {}},
            {"name": "memory", "emptyDir": {"medium": "Memory"}}],
        "containers": [{"name": "c", "image": BUSYBOX, "command": ["sh", "-c", script],
            "securityContext": {"procMount": "Unmasked", "runAsUser": 0},
            "readinessProbe": {"exec": {"command": ["sh", "-c", "test -e /v/memory/file"]}, "periodSeconds": 1},
            "volumeMounts": [mount("config"), mount("secret"), mount("projected"), mount("empty"), mount("memory")]}]}})
}

#[test]
fn a_pod_has_users_of_its_own() -> Result<()> {
    let cluster = Cluster::start(SKIFF, &[])?;
    let dir = tempfile::tempdir()?;
    cluster.import(&busybox_archive(dir.path())?)?;
    let kubectl = cluster.kubectl();
    eventually("the node says that it has user namespaces", PATIENCE, || {
        let nodes = kubectl.json(&["get", "nodes"])?;
        let features = &nodes["items"][0]["status"]["runtimeHandlers"][0]["features"];
        expect_eq(&features["userNamespaces"], &json!(true))
    })?;
    kubectl.run(&["create", "configmap", "words", "--from-literal=word=hello"])?;
    kubectl.run(&[
        "create",
        "secret",
        "generic",
        "words",
        "--from-literal=word=hello",
    ])?;
    // Only root of a namespace of its own may be root here.
    kubectl.run(&[
        "label",
        "namespace",
        "default",
        "pod-security.kubernetes.io/enforce=baseline",
    ])?;
    let core_pattern = std::fs::read_to_string("/proc/sys/kernel/core_pattern")?;
    for name in ["one", "two"] {
        kubectl.create(&pod(name).to_string())?;
    }
    let ids = |name: &str| -> Result<String> {
        kubectl.run(&["wait", "--for=condition=Ready", "pod", name, "--timeout=90s"])?;
        let log = kubectl.run(&["logs", name])?;
        let words: Vec<&str> = log.split_whitespace().collect();
        let ["ids", "0", "0", first, "65536"] = words[..] else {
            anyhow::bail!("{name} says {log:?}");
        };
        Ok(first.to_owned())
    };
    let (one, two) = (ids("one")?, ids("two")?);
    ensure!(one != two && one != "0" && two != "0", "{one} {two}");
    let listed = kubectl.run(&["exec", "one", "--", "ls", "-ld", "/v/empty", "/v/memory"])?;
    let modes: Vec<&str> = listed.lines().filter_map(|line| line.get(..10)).collect();
    expect_eq(modes, vec!["drwxrwxrwx", "drwxrwxrwt"])?;
    expect_eq(
        std::fs::read_to_string("/proc/sys/kernel/core_pattern")?,
        core_pattern,
    )?;

    // Killed, the node finds the pods with their ids, and gives a third pod other ones.
    let killed = Command::new("kill")
        .args(["-9", &cluster.pid()?.to_string()])
        .status()?;
    ensure!(killed.success());
    cluster.up()?;
    kubectl.create(&pod("three").to_string())?;
    let three = ids("three")?;
    ensure!(three != one && three != two, "{one} {two} {three}");
    for (name, first) in [("one", &one), ("two", &two)] {
        let map = kubectl.run(&["exec", name, "--", "cat", "/proc/self/uid_map"])?;
        let found = map.split_whitespace().nth(1).context("a map")?;
        expect_eq(found, first.as_str())?;
        let restarts = kubectl.json(&["get", "pod", name])?;
        expect_eq(
            &restarts["status"]["containerStatuses"][0]["restartCount"],
            &json!(0),
        )?;
    }

    // Ids are free again with the end of the pod.
    kubectl.run(&["delete", "pod", "one", "--timeout=60s"])?;
    eventually(
        "the ids of a pod that is gone are given to another",
        PATIENCE,
        || {
            kubectl.create(&pod("four").to_string())?;
            let four = ids("four")?;
            kubectl.run(&["delete", "pod", "four", "--timeout=60s"])?;
            expect_eq(&four, &one)
        },
    )
}
