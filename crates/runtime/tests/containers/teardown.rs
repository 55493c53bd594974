//! The end of sandboxes: with starts under way, with daemons, shims and pause processes that were killed.

use crate::environment::{Environment, Pod, container_config, eventually, sandbox_config, security, shim_of};
use crate::lifecycle::spawn_daemon;
use rustix::process::{Pid, Signal, kill_process};
use skiff_cri::v1 as cri;
use std::time::Duration;

/// A pod whose containers share a pid namespace.
fn shared_pid(environment: &Environment, name: &str) -> cri::PodSandboxConfig {
    let mut config = sandbox_config(environment, name);
    let linux = config.linux.as_mut().expect("linux");
    let security = linux.security_context.as_mut().expect("security context");
    let options = security.namespace_options.as_mut().expect("options");
    options.pid = cri::NamespaceMode::Pod as i32;
    config
}

fn in_shared_pid(name: &str, script: &str) -> cri::ContainerConfig {
    let mut config = container_config(name, script);
    let options = security(&mut config).namespace_options.as_mut().expect("options");
    options.pid = cri::NamespaceMode::Pod as i32;
    config
}

async fn is_ready(pod: &mut Pod) -> bool {
    let request = cri::PodSandboxStatusRequest {
        pod_sandbox_id: pod.id.clone(),
        verbose: false,
    };
    let status = pod.client.pod_sandbox_status(request).await.expect("status");
    status.into_inner().status.expect("status").state() == cri::PodSandboxState::SandboxReady
}

/// The process that holds the pod's pid namespace: the shim's only child that executed nothing.
fn pause_of(shim: Pid) -> Pid {
    let pid = shim.as_raw_nonzero();
    let children = std::fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).expect("children");
    children
        .split_whitespace()
        .find(|pid| {
            let cmdline = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
            String::from_utf8_lossy(&cmdline).contains("internal-init")
        })
        .and_then(|pid| Pid::from_raw(pid.parse().ok()?))
        .expect("the pause process runs")
}

/// Nothing of the sandbox is left but its record.
async fn is_torn_down(environment: &Environment, id: &str) {
    let run = &environment.config.run_dir;
    let (socket, namespaces) = (
        run.join(format!("shim/{}.sock", &id[..13])),
        run.join("ns").join(id),
    );
    eventually("the sandbox is torn down", async || {
        shim_of(environment, id).is_none() && !socket.exists() && !namespaces.exists()
    })
    .await;
    let results = environment.config.root.join("cni/results");
    let left: Vec<_> = std::fs::read_dir(results)
        .into_iter()
        .flatten()
        .flatten()
        .filter(|entry| entry.file_name().to_string_lossy().contains(id))
        .collect();
    assert!(left.is_empty(), "{left:?}");
}

/// A sandbox is stopped while a container of it starts: the start comes to its end, and what it started is killed.
pub async fn a_stop_waits_for_a_start() {
    let environment = Environment::new().await;
    let mut pod = Pod::run(&environment, "race").await;
    let container_id = pod
        .create(container_config("main", "exec sleep 1000"))
        .await
        .expect("created");
    // A start takes as long as the shim is stopped.
    let shim = shim_of(&environment, &pod.id).expect("the shim runs");
    kill_process(shim, Signal::STOP).expect("stop");
    let pause = || tokio::time::sleep(Duration::from_millis(300));
    let mut client = pod.client.clone();
    let request = cri::StartContainerRequest {
        container_id: container_id.clone(),
    };
    let start = tokio::spawn(async move { client.start_container(request).await });
    pause().await;
    // As a kubelet does whose pod is deleted.
    start.abort();
    let mut client = pod.client.clone();
    let request = cri::StopPodSandboxRequest {
        pod_sandbox_id: pod.id.clone(),
    };
    let stop = tokio::spawn(async move { client.stop_pod_sandbox(request).await });
    pause().await;
    kill_process(shim, Signal::CONT).expect("continue");
    stop.await.expect("no panic").expect("stops");
    let status = pod.status(&container_id).await;
    assert_eq!(
        (status.state(), status.exit_code),
        (cri::ContainerState::ContainerExited, 137),
        "{status:?}"
    );
    is_torn_down(&environment, &pod.id).await;
    pod.remove().await;
    environment.finish().await;
}

/// A daemon is killed after it recorded a sandbox as not ready and before it tore it down: the next one does.
pub async fn a_tear_down_is_finished_by_the_next_daemon() {
    let mut environment = Environment::new().await;
    environment.runtime.take().expect("runtime").stop().await;
    let mut daemon = spawn_daemon(&environment);
    let config = shared_pid(&environment, "unfinished");
    let mut pod = Pod::run_with(&environment, config).await;
    let id = pod.start(in_shared_pid("main", "exec sleep 1000")).await;
    daemon.kill().expect("SIGKILL");
    daemon.wait().expect("reaped");
    let record = environment
        .config
        .root
        .join("sandboxes")
        .join(&pod.id)
        .join("record.json");
    let text = std::fs::read_to_string(&record).expect("record");
    std::fs::write(&record, text.replace("\"ready\":true", "\"ready\":false")).expect("record");
    environment.start().await;
    is_torn_down(&environment, &pod.id).await;
    pod.client = environment.client().await;
    assert_eq!(
        pod.status(&id).await.state(),
        cri::ContainerState::ContainerExited
    );
    pod.remove().await;
    environment.finish().await;
}

/// Looks like a shim, with a socket of the same path: but in a mount namespace where that is another folder.
fn shim_of_another_machine(environment: &Environment) -> std::process::Child {
    let folder = environment.config.run_dir.join("shim");
    std::fs::write(environment.path("internal-shim"), "echo ready; read end").expect("script");
    let script = "mount -t tmpfs machine \"$1\" && exec sh internal-shim \"$1/0123456789abc.sock\"";
    let mut child = std::process::Command::new("unshare")
        .args(["--mount", "sh", "-c", script, "machine"])
        .arg(&folder)
        .current_dir(environment.path(""))
        .stdin(std::process::Stdio::piped())
        .stdout(std::process::Stdio::piped())
        .spawn()
        .expect("unshare");
    let mut ready = [0; 1];
    std::io::Read::read_exact(child.stdout.as_mut().expect("stdout"), &mut ready).expect("ready");
    child
}

/// A shim whose sandbox is not on disk, because the daemon was killed while it made or removed it.
pub async fn a_shim_without_a_sandbox_ends() {
    let mut environment = Environment::new().await;
    environment.runtime.take().expect("runtime").stop().await;
    let mut daemon = spawn_daemon(&environment);
    let pod = Pod::run(&environment, "stranger").await;
    daemon.kill().expect("SIGKILL");
    daemon.wait().expect("reaped");
    assert!(shim_of(&environment, &pod.id).is_some());
    let directory = environment.config.root.join("sandboxes").join(&pod.id);
    std::fs::remove_file(directory.join("record.json")).expect("record");
    let mut neighbour = shim_of_another_machine(&environment);
    environment.start().await;
    is_torn_down(&environment, &pod.id).await;
    assert!(!directory.exists());
    assert!(
        neighbour.try_wait().expect("waits").is_none(),
        "the other machine's shim was killed"
    );
    neighbour.kill().expect("kill");
    neighbour.wait().expect("reaped");
    environment.finish().await;
}

/// The death of the pause process takes the pid namespace, and so the containers, along: the sandbox is over.
pub async fn a_lost_pause_process_ends_the_pod() {
    let environment = Environment::new().await;
    let config = shared_pid(&environment, "pauseless");
    let mut pod = Pod::run_with(&environment, config).await;
    let id = pod.start(in_shared_pid("main", "exec sleep 1000")).await;
    let shim = shim_of(&environment, &pod.id).expect("the shim runs");
    kill_process(pause_of(shim), Signal::KILL).expect("kill");
    assert_eq!(pod.wait(&id).await.exit_code, 137);
    eventually("the sandbox is not ready", async || !is_ready(&mut pod).await).await;
    is_torn_down(&environment, &pod.id).await;
    pod.remove().await;
    environment.finish().await;
}

/// The kubelet makes a new sandbox of a pod in the same cgroup and then removes the old one.
pub async fn a_successor_is_left_alone() {
    let environment = Environment::new().await;
    let mut config = shared_pid(&environment, "twice");
    config.linux.as_mut().expect("linux").cgroup_parent =
        format!("/{}/kubepods/podtwice", environment.config.cgroup_parent);
    let mut old = Pod::run_with(&environment, config.clone()).await;
    config.metadata.as_mut().expect("metadata").attempt = 1;
    let mut new = Pod::run_with(&environment, config).await;
    let id = new.start(in_shared_pid("main", "exec sleep 1000")).await;
    old.remove().await;
    assert_eq!(new.exec_text(&id, &["echo", "alive"]).await, "alive\n");
    assert!(is_ready(&mut new).await);
    new.remove().await;
    environment.finish().await;
}
