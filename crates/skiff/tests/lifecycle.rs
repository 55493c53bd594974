//! `up`, `status`, `down`: what they say, and that nothing is left behind.

use anyhow::{Context, Result, ensure};
use skiff_testkit::{Cluster, free_port};
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
    for component in ["api", "controllers", "scheduler", "node", "proxy", "dns"] {
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
