//! Checkpoints by the real CRIU. One that is too old for the kernel (Debian 12's knows none after 6.12) must fail with a clear
//! error and leave the container as it is; put a newer one first in PATH to see the rest.

use crate::environment::{Environment, Pod, container_config, eventually, log_text, sandbox_config};
use skiff_cri::v1 as cri;
use std::collections::HashMap;
use std::io::Read;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use tonic::{Code, Status};

const COUNT: &str =
    "i=0; while true; do i=$((i+1)); echo line $i; echo $i > /count; busybox usleep 10000; done";

async fn checkpoint(pod: &mut Pod, id: &str, location: &Path, timeout: i64) -> Result<(), Status> {
    let request = cri::CheckpointContainerRequest {
        container_id: id.into(),
        location: location.to_string_lossy().into_owned(),
        timeout,
    };
    pod.client.checkpoint_container(request).await.map(|_| ())
}

/// Whether the CRIU in PATH can work with this kernel.
fn criu_works() -> bool {
    let check = std::process::Command::new("criu").arg("check").output();
    check.expect("criu is installed").status.success()
}

/// CRIU behind a script, to make it stop where a test wants: with all processes seized, and after all is written.
fn write_wrapper(environment: &Environment) -> PathBuf {
    let script = |name: &str, body: String| {
        let path = environment.path(name);
        std::fs::write(&path, body).expect("script");
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).expect("script");
        path
    };
    let hang = environment.path("hang");
    let reached = environment.path("reached");
    let action = script(
        "action",
        format!(
            "#!/bin/sh\n[ \"$CRTOOLS_SCRIPT_ACTION\" = post-dump ] || exit 0\ntouch {}\nexec sleep 1000\n",
            reached.display()
        ),
    );
    script(
        "criu",
        format!(
            "#!/bin/sh\n[ -e {} ] && exec criu \"$@\" --action-script {}\nexec criu \"$@\"\n",
            hang.display(),
            action.display()
        ),
    )
}

async fn goes_on(pod: &mut Pod, id: &str, pid: i32) {
    let status = pod.status(id).await;
    assert_eq!(status.state(), cri::ContainerState::ContainerRunning);
    assert_eq!(pod.pid(id).await, pid);
    let before = log_text(&status.log_path).lines().count();
    eventually("the container counts on", async || {
        log_text(&status.log_path).lines().count() > before + 3
    })
    .await;
}

fn read_archive(reader: impl Read) -> HashMap<String, Vec<u8>> {
    let mut files = HashMap::new();
    for entry in tar::Archive::new(reader).entries().expect("entries") {
        let mut entry = entry.expect("entry");
        let mut content = Vec::new();
        entry.read_to_end(&mut content).expect("reads");
        files.insert(entry.path().expect("path").display().to_string(), content);
    }
    files
}

fn names(folder: &Path) -> Vec<std::ffi::OsString> {
    let entries = std::fs::read_dir(folder).expect("folder").flatten();
    entries.map(|entry| entry.file_name()).collect()
}

pub async fn archives() {
    let mut environment = Environment::new().await;
    environment.runtime.take().expect("runtime").stop().await;
    let works = criu_works();
    environment.config.criu = write_wrapper(&environment);
    environment.start().await;
    let folder = environment.path("checkpoints");
    std::fs::create_dir(&folder).expect("folder");
    let volume = environment.path("volume");
    std::fs::create_dir(&volume).expect("volume");

    let mut pod = Pod::run(&environment, "counter").await;
    let script = format!("rm /etc/group; touch /data/in-volume; sleep 1000 & {COUNT}");
    let mut config = container_config("main", &script);
    config.envs.push(cri::KeyValue {
        key: "MARK".into(),
        value: "mark-in-memory".into(),
    });
    config.mounts.push(cri::Mount {
        container_path: "/data".into(),
        host_path: volume.to_string_lossy().into_owned(),
        ..Default::default()
    });
    let id = pod.start(config).await;
    let pid = pod.pid(&id).await;
    goes_on(&mut pod, &id, pid).await;

    let first = folder.join("first.tar");
    let taken = checkpoint(&mut pod, &id, &first, 0).await;
    goes_on(&mut pod, &id, pid).await;
    if works {
        taken.expect("a checkpoint");
        check_archive(&first, &id);
        let again = checkpoint(&mut pod, &id, &first, 0)
            .await
            .expect_err("is there already");
        assert_eq!(again.code(), Code::InvalidArgument, "{again}");
        timeouts(&environment, &mut pod, &id, pid, &folder).await;
        connections(&mut pod, &folder).await;
        pods(&environment, &folder).await;
    } else {
        let refused = taken.expect_err("this criu cannot");
        assert!(refused.message().contains("this criu is too old"), "{refused}");
        assert!(names(&folder).is_empty());
        println!("checkpoints were only refused: `criu check` fails");
    }
    pod.remove().await;
    environment.finish().await;
}

fn check_archive(path: &Path, id: &str) {
    let file = std::fs::File::open(path).expect("the archive");
    let mode = file.metadata().expect("metadata").permissions().mode();
    assert_eq!(mode & 0o7777, 0o600);
    let files = read_archive(file);
    for image in [
        "inventory.img",
        "pstree.img",
        "core-1.img",
        "mm-1.img",
        "files.img",
    ] {
        assert!(
            files.contains_key(&format!("checkpoint/{image}")),
            "{image}: {:?}",
            files.keys()
        );
    }
    let holds = |content: &[u8], text: &str| content.windows(text.len()).any(|part| part == text.as_bytes());
    let mut pages = files
        .iter()
        .filter(|(name, _)| name.starts_with("checkpoint/pages-"));
    assert!(
        pages.any(|(_, content)| holds(content, "mark-in-memory")),
        "the memory is in it"
    );
    assert!(holds(&files["dump.log"], "Dumping finished successfully"));
    assert!(files.contains_key("stats-dump"));
    let config: serde_json::Value = serde_json::from_slice(&files["config.dump"]).expect("json");
    assert_eq!((&config["id"], &config["name"]), (&id.into(), &"main".into()));
    let spec: serde_json::Value = serde_json::from_slice(&files["spec.dump"]).expect("json");
    assert_eq!(spec["annotations"]["io.kubernetes.cri.sandbox-name"], "counter");
    let changes = read_archive(files["rootfs-diff.tar"].as_slice());
    assert!(changes.contains_key("count") && changes.contains_key("etc/.wh.group"));
    assert!(!changes.keys().any(|name| name.contains("in-volume")));
}

/// CRIU is killed while it holds all processes.
async fn timeouts(environment: &Environment, pod: &mut Pod, id: &str, pid: i32, folder: &Path) {
    std::fs::write(environment.path("hang"), "").expect("switch");
    let late = checkpoint(pod, id, &folder.join("late.tar"), 3)
        .await
        .expect_err("hangs");
    assert_eq!(late.code(), Code::DeadlineExceeded, "{late}");
    assert!(environment.path("reached").exists(), "it was not seized");
    std::fs::remove_file(environment.path("hang")).expect("switch");
    goes_on(pod, id, pid).await;
    assert_eq!(names(folder), ["first.tar"]);
    assert!(names(&environment.config.root.join("checkpoints")).is_empty());
    checkpoint(pod, id, &folder.join("second.tar"), 60)
        .await
        .expect("works again");
    goes_on(pod, id, pid).await;
    std::fs::remove_file(folder.join("second.tar")).expect("removes");
}

/// Of an established connection CRIU takes no checkpoint, unless it is told to.
async fn connections(pod: &mut Pod, folder: &Path) {
    let script = format!(
        "sleep 1000 | nc -l -p 9000 & busybox usleep 500000; sleep 1000 | nc 127.0.0.1 9000 & {COUNT}"
    );
    let id = pod.start(container_config("connected", &script)).await;
    let pid = pod.pid(&id).await;
    eventually("the connection is there", async || {
        let text = std::fs::read_to_string(format!("/proc/{pid}/net/tcp")).unwrap_or_default();
        // State 01 is established.
        text.lines()
            .any(|line| line.contains(":2328 ") && line.contains(" 01 "))
    })
    .await;
    let refused = checkpoint(pod, &id, &folder.join("connected.tar"), 0)
        .await
        .expect_err("a connection");
    assert!(
        refused
            .message()
            .contains("/etc/criu/default.conf: tcp-established"),
        "{refused}"
    );
    goes_on(pod, &id, pid).await;
    assert_eq!(names(folder), ["first.tar"]);
}

/// Containers of pods that share their pid namespace, and containers with a terminal.
async fn pods(environment: &Environment, folder: &Path) {
    let mut config = sandbox_config(environment, "shared");
    let options = |pid: cri::NamespaceMode| {
        Some(cri::NamespaceOption {
            pid: pid as i32,
            ..Default::default()
        })
    };
    let linux = config.linux.as_mut().expect("linux");
    linux
        .security_context
        .as_mut()
        .expect("security")
        .namespace_options = options(cri::NamespaceMode::Pod);
    let mut pod = Pod::run_with(environment, config).await;
    let mut config = container_config("main", COUNT);
    crate::environment::security(&mut config).namespace_options = options(cri::NamespaceMode::Pod);
    let id = pod.start(config.clone()).await;
    let pid = pod.pid(&id).await;
    let shared = folder.join("shared.tar");
    checkpoint(&mut pod, &id, &shared, 0).await.expect("a checkpoint");
    goes_on(&mut pod, &id, pid).await;

    config.metadata.as_mut().expect("metadata").name = "terminal".into();
    config.log_path = "terminal.log".into();
    config.tty = true;
    config.stdin = true;
    let id = pod.start(config).await;
    let pid = pod.pid(&id).await;
    let refused = checkpoint(&mut pod, &id, &folder.join("terminal.tar"), 0)
        .await
        .expect_err("a terminal");
    assert_eq!(refused.code(), Code::FailedPrecondition, "{refused}");
    goes_on(&mut pod, &id, pid).await;
    pod.remove().await;
}

pub async fn refusals() {
    let mut environment = Environment::new().await;
    environment.runtime.take().expect("runtime").stop().await;
    environment.config.criu = "/no/such/criu".into();
    environment.start().await;
    let folder = environment.path("checkpoints");
    std::fs::create_dir(&folder).expect("folder");
    let mut pod = Pod::run(&environment, "refused").await;
    let id = pod.start(container_config("main", COUNT)).await;
    let pid = pod.pid(&id).await;

    let file = folder.join("a.tar");
    let missing = checkpoint(&mut pod, &id, &file, 0).await.expect_err("no criu");
    assert_eq!(missing.code(), Code::FailedPrecondition);
    assert!(
        missing.message().contains("install the package criu"),
        "{missing}"
    );
    let unknown = checkpoint(&mut pod, "unknown", &file, 0)
        .await
        .expect_err("unknown");
    assert_eq!(unknown.code(), Code::NotFound);
    std::os::unix::fs::symlink(&folder, environment.path("link")).expect("link");
    for (location, timeout) in [
        (file.as_path(), -1),
        (Path::new("relative.tar"), 0),
        (Path::new("/"), 0),
        (&environment.path("link/a.tar"), 0),
        (&environment.path("nowhere/a.tar"), 0),
    ] {
        let refused = checkpoint(&mut pod, &id, location, timeout)
            .await
            .expect_err("refused");
        assert_eq!(refused.code(), Code::InvalidArgument, "{refused}");
    }
    goes_on(&mut pod, &id, pid).await;
    assert!(names(&folder).is_empty());

    // What does not run has no memory.
    environment.runtime.take().expect("runtime").stop().await;
    environment.config.criu = "true".into();
    environment.start().await;
    pod.client = environment.client().await;
    let ended = pod.start(container_config("ended", "exit 0")).await;
    pod.wait(&ended).await;
    let refused = checkpoint(&mut pod, &ended, &file, 0).await.expect_err("ended");
    assert_eq!(refused.code(), Code::FailedPrecondition, "{refused}");
    pod.remove().await;
    environment.finish().await;
}
