//! Where images come from, by the command line and by pods: a registry that is found by its `hosts.toml` alone, and a
//! container engine's socket.

use anyhow::{Context, Result, ensure};
use serde_json::json;
use skiff_testkit::{Cluster, Registry, busybox_archive};
use std::io::{Read, Write};
use std::os::unix::net::UnixListener;
use std::path::Path;

const SKIFF: &str = env!("CARGO_BIN_EXE_skiff");
/// Nobody has this name.
const IMAGE: &str = "reg.example:5000/team/web:1";

/// Answers one request as docker does.
fn answer_once(socket: &Path, body: Vec<u8>) -> Result<()> {
    let listener = UnixListener::bind(socket)?;
    std::thread::spawn(move || -> Result<()> {
        let (mut stream, _) = listener.accept()?;
        let mut head = Vec::new();
        while !head.ends_with(b"\r\n\r\n") {
            let mut byte = [0];
            stream.read_exact(&mut byte)?;
            head.extend(byte);
        }
        ensure!(head.starts_with(b"GET /images/team/web:1/get HTTP/1.1\r\n"));
        write!(
            stream,
            "HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n",
            body.len()
        )?;
        Ok(stream.write_all(&body)?)
    });
    Ok(())
}

#[test]
fn images_come_from_where_they_are_configured() -> Result<()> {
    let dir = tempfile::tempdir()?;
    let archive = busybox_archive(dir.path())?;
    let registry = Registry::start()?;
    registry.push(&archive, "team/web:1")?;
    let certs = dir.path().join("certs.d");
    let hosts = certs.join("reg.example_5000_/hosts.toml");
    std::fs::create_dir_all(hosts.parent().context("a folder")?)?;
    std::fs::write(&hosts, format!("server = \"http://{}\"\n", registry.address()))?;
    let certs = certs.display().to_string();
    let cluster = Cluster::start(SKIFF, &["--registry-config-path", &certs])?;

    let kubectl = cluster.kubectl();
    kubectl.apply(
        &json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "web"}, "spec": {"containers": [
            {"name": "c", "image": IMAGE, "command": ["sleep", "3600"]}]}})
        .to_string(),
    )?;
    kubectl.run(&["wait", "--for=condition=Ready", "pod/web", "--timeout=90s"])?;
    let by_the_pod = cluster.skiff(&["image", "list"])?;
    ensure!(by_the_pod.contains(IMAGE), "{by_the_pod}");

    // By hand, with and without the configuration.
    let pull = |flags: &[&str]| cluster.skiff(&[&["image", "pull", IMAGE], flags].concat());
    let pulled = pull(&["--registry-config-path", &certs])?;
    ensure!(
        pulled.starts_with("pulled reg.example:5000/team/web:1 (sha256:"),
        "{pulled}"
    );
    let error = pull(&[]).err().context("nobody has that name")?.to_string();
    ensure!(error.contains("failed to resolve reference"), "{error}");
    let error = pull(&["--platform", "windows/amd64"])
        .err()
        .context("not a platform")?;
    ensure!(
        format!("{error:#}").contains("is not a platform of linux"),
        "{error:#}"
    );
    // The file is read anew.
    std::fs::write(&hosts, "server = 1")?;
    let error = pull(&["--registry-config-path", &certs])
        .err()
        .context("a bad file")?;
    let error = error.to_string();
    ensure!(
        error.contains(&hosts.display().to_string()) && error.contains("server is not a string"),
        "{error}"
    );

    let socket = dir.path().join("docker.sock");
    answer_once(&socket, std::fs::read(&archive)?)?;
    let host = format!("unix://{}", socket.display());
    let loaded = cluster.skiff(&["image", "load", "team/web:1", "--host", &host])?;
    ensure!(loaded.starts_with("loaded test.local/busybox:1"), "{loaded}");
    std::fs::remove_file(&socket)?;
    let error = cluster.skiff(&["image", "load", "team/web:1", "--host", &host]);
    let error = error.err().context("nobody listens")?.to_string();
    ensure!(
        error.contains("no docker or podman answers on this machine"),
        "{error}"
    );
    Ok(())
}
