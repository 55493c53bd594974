//! `up`, `status`, `down`: what they say, and that nothing is left behind.

use anyhow::{Context, Result, ensure};
use skiff_testkit::whole_path::PATIENCE;
use skiff_testkit::{Cluster, eventually, expect_eq, free_port};
use std::path::Path;
use std::process::Command;

const SKIFF: &str = env!("CARGO_BIN_EXE_skiff");

fn output(program: &str, args: &[&str]) -> Result<String> {
    let output = Command::new(program)
        .args(args)
        .output()
        .with_context(|| program.to_owned())?;
    Ok(format!(
        "{}{}",
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    ))
}

/// Everything on this machine that could carry a cluster's name or bridge.
fn traces_of(name: &str, bridge: &str) -> Result<Vec<String>> {
    let mut found = Vec::new();
    let mut look = |what: &str, text: String, needle: &str| {
        found.extend(
            text.lines()
                .filter(|l| l.contains(needle))
                .map(|l| format!("{what}: {l}")),
        );
    };
    look(
        "process",
        output("ps", &["-eo", "pid,args"])?,
        &format!("--name {name}"),
    );
    look(
        "process",
        output("ps", &["-eo", "pid,args"])?,
        &format!("/{name}/"),
    );
    look(
        "mount",
        std::fs::read_to_string("/proc/self/mounts")?,
        &format!("/{name}/"),
    );
    look(
        "interface",
        output("ip", &["-o", "link"])?,
        &format!(" {bridge}:"),
    );
    look("nftables", output("nft", &["list", "tables"])?, name);
    look(
        "cgroup",
        output(
            "find",
            &[
                "/sys/fs/cgroup",
                "-maxdepth",
                "3",
                "-name",
                &format!("skiff-{name}*"),
            ],
        )?,
        name,
    );
    for path in [
        format!("/var/lib/skiff/{name}"),
        format!("/run/skiff/{name}"),
        format!("/var/lib/skiff/clusters/{name}.json"),
    ] {
        if Path::new(&path).exists() {
            found.push(format!("file: {path}"));
        }
    }
    Ok(found)
}

#[test]
fn a_deleted_cluster_leaves_nothing() -> Result<()> {
    let cluster = Cluster::start(SKIFF, &[])?;
    let name = cluster.name().to_owned();
    let kubectl = cluster.kubectl();
    kubectl.run(&[
        "apply",
        "-f",
        concat!(env!("CARGO_MANIFEST_DIR"), "/../../examples/web.yaml"),
    ])?;
    kubectl.run(&["rollout", "status", "deployment/web", "--timeout=90s"])?;
    let record: serde_json::Value =
        serde_json::from_slice(&std::fs::read(format!("/var/lib/skiff/clusters/{name}.json"))?)?;
    let bridge = format!("skiff{}", record["slot"]);
    ensure!(
        !traces_of(&name, &bridge)?.is_empty(),
        "the search finds nothing, so it proves nothing"
    );

    let again = cluster.up()?;
    ensure!(again.contains("already running"), "{again}");
    let shown = cluster.skiff(&["status"])?;
    ensure!(shown.contains("is running") && shown.contains("Ready"), "{shown}");
    let status = cluster.status()?;
    for component in [
        "api",
        "controllers",
        "scheduler",
        "node",
        "proxy",
        "dns",
        "metrics",
    ] {
        let found = status["components"]
            .as_array()
            .into_iter()
            .flatten()
            .find(|c| c["name"] == component);
        ensure!(
            found.is_some_and(|c| c["state"] == "running"),
            "{component}: {status:#}"
        );
    }
    for file in ["pki/ca.key", "pki/sa.key", "admin.kubeconfig"] {
        let mode = output("stat", &["-c", "%a", &format!("/var/lib/skiff/{name}/{file}")])?;
        ensure!(mode.trim() == "600", "{file} has mode {mode}");
    }

    let stopped = cluster.skiff(&["down"])?;
    ensure!(stopped.contains("is stopped"), "{stopped}");
    ensure!(cluster.skiff(&["down"])?.contains("is not running"));
    cluster.up()?;
    kubectl.run(&["rollout", "status", "deployment/web", "--timeout=90s"])?;

    drop(cluster);
    let left = traces_of(&name, &bridge)?;
    ensure!(left.is_empty(), "left behind:\n{}", left.join("\n"));
    Ok(())
}

#[test]
fn a_taken_port_is_explained() -> Result<()> {
    let port = free_port()?;
    let _taken = std::net::TcpListener::bind(("127.0.0.1", port))?;
    let name = Cluster::new_name();
    let shown = output(
        SKIFF,
        &[
            "up",
            "--name",
            &name,
            "--no-kubeconfig-merge",
            "--bind",
            &format!("127.0.0.1:{port}"),
        ],
    )?;
    let deleted = output(SKIFF, &["down", "--delete", "--name", &name])?;
    ensure!(
        shown.contains(&format!("port {port} is taken")) && shown.contains("--bind"),
        "{shown}"
    );
    ensure!(deleted.contains("is deleted"), "{deleted}");
    Ok(())
}

#[test]
fn commands_about_no_cluster_say_how_to_make_one() -> Result<()> {
    for command in ["status", "down", "kubeconfig"] {
        let shown = output(SKIFF, &[command, "--name", "no-such-cluster"])?;
        ensure!(
            shown.contains("skiff up --name no-such-cluster"),
            "{command}: {shown}"
        );
    }
    Ok(())
}

/// What `up` prints when it is called like this and refuses.
fn refused_up(name: &str, flags: &[&str]) -> Result<String> {
    let args = [&["up", "--no-kubeconfig-merge", "--name", name], flags].concat();
    let output = Command::new(SKIFF).args(args).output()?;
    ensure!(!output.status.success(), "{flags:?} is accepted");
    Ok(String::from_utf8_lossy(&output.stderr).into_owned())
}

#[test]
fn what_cannot_work_makes_no_cluster() -> Result<()> {
    let name = Cluster::new_name();
    let file = tempfile::NamedTempFile::new()?;
    let file = file.path().to_string_lossy();
    for (flags, why) in [
        (&["--cluster-cidr", "10.1.0.0/30"][..], "too small"),
        (
            &[
                "--cluster-cidr",
                "10.1.0.0/16",
                "--service-cluster-ip-range",
                "10.1.0.0/20",
            ],
            "overlap",
        ),
        (&["--data-dir", &file], "is not a folder"),
        (&["--hostname-override", "a_b"], "RFC 1123 subdomain"),
    ] {
        let shown = refused_up(&name, flags)?;
        ensure!(shown.contains(why), "{shown}");
        let listed = output(SKIFF, &["list"])?;
        ensure!(!listed.contains(&name), "{listed}");
    }
    Ok(())
}

/// Pods reach an API server that listens on loopback, and what runs is not changed by an `up` with other flags.
#[test]
fn a_cluster_on_loopback_serves_its_pods() -> Result<()> {
    let bind = format!("127.0.0.1:{}", free_port()?);
    let cluster = Cluster::start(SKIFF, &["--bind", &bind])?;
    let name = cluster.name().to_owned();
    let shown = refused_up(&name, &["--bind", "127.0.0.1:1"])?;
    ensure!(shown.contains(&format!("skiff down --name {name}")), "{shown}");
    expect_eq(
        cluster.status()?["endpoint"].as_str(),
        Some(format!("https://{bind}").as_str()),
    )?;

    let kubectl = cluster.kubectl();
    kubectl.run(&[
        "apply",
        "-f",
        concat!(env!("CARGO_MANIFEST_DIR"), "/../../examples/web.yaml"),
    ])?;
    kubectl.run(&["rollout", "status", "deployment/web", "--timeout=90s"])?;
    let path = "/api/v1/namespaces/default/services/web:80/proxy/whoami";
    eventually("a pod reaches the API server", PATIENCE, || {
        let said = kubectl.run(&["get", "--raw", path])?;
        ensure!(said.contains("system:serviceaccount:default:default"), "{said}");
        Ok(())
    })?;

    let error = kubectl
        .run(&["logs", "--previous", "deployment/web"])
        .unwrap_err();
    let error = format!("{error:#}");
    ensure!(error.contains("previous terminated container \"web\""), "{error}");
    Ok(())
}

#[test]
fn commands_tell_what_is_wrong() -> Result<()> {
    let cluster = Cluster::start(SKIFF, &["--components", "api"])?;
    let name = cluster.name().to_owned();
    let shown = output(SKIFF, &["image", "rm", "nope", "--name", &name])?;
    ensure!(shown.contains("there is no image \"nope\""), "{shown}");
    let shown = cluster.skiff(&["logs", "--lines", "1"])?;
    ensure!(shown.lines().count() == 1, "{shown}");
    let shown = cluster.skiff(&["logs", "--lines", "100"])?;
    ensure!(shown.contains("skiff::progress: ready"), "{shown}");
    let listed = output(SKIFF, &["list"])?;
    ensure!(listed.contains(&name) && listed.contains("running"), "{listed}");
    let full = std::fs::OpenOptions::new().write(true).open("/dev/full")?;
    let output = Command::new(SKIFF).args(["list"]).stdout(full).output()?;
    let shown = String::from_utf8_lossy(&output.stderr);
    ensure!(
        output.status.code() == Some(1) && shown.contains("cannot write to standard output"),
        "{:?} {shown}",
        output.status
    );
    Ok(())
}
