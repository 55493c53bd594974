//! A full disk: what clients are told, that deletes pass, that the cluster can be started on it, and that everything
//! goes on by itself when there is room again.

use anyhow::{Result, ensure};
use skiff_testkit::whole_path::PATIENCE;
use skiff_testkit::{Cluster, Kubectl, eventually};
use std::fs::File;
use std::io::Write;
use std::path::Path;
use std::process::Command;

const SKIFF: &str = env!("CARGO_BIN_EXE_skiff");

/// A small file system. It goes with the test, whatever becomes of that.
struct Small {
    dir: tempfile::TempDir,
}

impl Small {
    fn mount(size: &str) -> Result<Small> {
        let dir = tempfile::tempdir()?;
        let mounted = Command::new("mount")
            .args(["-t", "tmpfs", "-o", &format!("size={size}"), "none"])
            .arg(dir.path())
            .status()?;
        ensure!(mounted.success(), "cannot mount a tmpfs");
        Ok(Small { dir })
    }

    fn path(&self) -> &Path {
        self.dir.path()
    }

    /// A file that takes all the room there is.
    fn fill(&self) -> Result<()> {
        let mut file = File::create(self.path().join("ballast"))?;
        while file.write(&[7; 65536]).is_ok_and(|count| count > 0) {}
        while file.write(&[7; 512]).is_ok_and(|count| count > 0) {}
        Ok(())
    }
}

impl Drop for Small {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(self.path()).status();
    }
}

fn config_map(kubectl: &Kubectl, name: &str, size: usize) -> Result<String> {
    let value = "x".repeat(size);
    kubectl.create(&format!(
        r#"{{"apiVersion":"v1","kind":"ConfigMap","metadata":{{"name":"{name}","finalizers":["example.com/held"]}},"data":{{"k":"{value}"}}}}"#
    ))
}

#[test]
fn a_full_disk_refuses_what_grows_and_nothing_else() -> Result<()> {
    let small = Small::mount("192m")?;
    let data = small.path().join("data");
    let flags = [
        "--components",
        "api",
        "--data-dir",
        data.to_str().unwrap_or_default(),
    ];
    let cluster = Cluster::start(SKIFF, &flags)?;
    let kubectl = cluster.kubectl();
    for n in 0..5 {
        config_map(&kubectl, &format!("small-{n}"), 1000)?;
    }
    ensure!(kubectl.run(&["get", "--raw", "/readyz"])? == "ok");
    small.fill()?;
    // Where no large object fits, smaller ones still may: the last room goes to those.
    let fill = |round: &str, size: usize| -> Result<()> {
        let refused =
            (0..200).find_map(|n| config_map(&kubectl, &format!("fill-{round}-{size}-{n}"), size).err());
        let refused = refused.map(|error| error.to_string()).unwrap_or_default();
        ensure!(
            refused.contains("the store's disk is full"),
            "{round}, {size}: {refused}"
        );
        Ok(())
    };
    for size in [500_000, 100_000, 20_000] {
        fill("first", size)?;
    }
    for path in ["/readyz", "/livez", "/readyz/etcd"] {
        let (code, text) = kubectl.try_run(&["get", "--raw", path])?;
        ensure!(code != 0, "{path}: {text}");
    }
    let verbose = kubectl.try_run(&["get", "--raw", "/readyz?verbose"])?.1;
    ensure!(verbose.contains("[-]etcd failed"), "{verbose}");

    // Reads, deletes, and the updates that lead to them; also by a server that starts on the full disk.
    let delete = |name: &str| -> Result<()> {
        kubectl.run(&["delete", "configmap", name, "--wait=false"])?;
        let free = r#"{"metadata":{"finalizers":null}}"#;
        kubectl.run(&["patch", "configmap", name, "--type", "merge", "-p", free])?;
        Ok(())
    };
    delete("small-0")?;
    delete("small-1")?;
    // What was deleted, and a log that begins anew, may have made room for a few.
    fill("deleted", 100_000)?;
    cluster.skiff(&["down"])?;
    cluster.up()?;
    delete("small-2")?;
    fill("restarted", 100_000)?;
    let left = kubectl.run(&["get", "configmaps", "-o", "name"])?;
    ensure!(left.contains("small-3") && !left.contains("small-1"), "{left}");

    // Room again: no restart, and readiness comes back by itself.
    let pid = cluster.pid()?;
    std::fs::remove_file(small.path().join("ballast"))?;
    eventually("the server is ready again", PATIENCE, || {
        ensure!(kubectl.run(&["get", "--raw", "/readyz"])? == "ok");
        Ok(())
    })?;
    config_map(&kubectl, "new", 100_000)?;
    ensure!(cluster.pid()? == pid);
    drop(cluster);
    drop(small);
    Ok(())
}
