//! Daemons that die, shims that die, and several runtimes at once.

use crate::environment::{Environment, Pod, container_config, eventually, log_text, shim_of};
use skiff_cri::v1 as cri;
use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};

pub fn spawn_daemon(environment: &Environment) -> Child {
    let config = &environment.config;
    let mut child = Command::new(std::env::current_exe().expect("exe"))
        .arg("serve")
        .args([&config.root, &config.run_dir])
        .arg(&config.cgroup_parent)
        .stdout(Stdio::piped())
        .spawn()
        .expect("spawns");
    let mut line = String::new();
    BufReader::new(child.stdout.take().expect("stdout"))
        .read_line(&mut line)
        .expect("reads");
    assert_eq!(line, "ready\n");
    child
}

pub async fn survives_a_killed_daemon() {
    let mut environment = Environment::new().await;
    environment.runtime.take().expect("runtime").stop().await;
    let mut daemon = spawn_daemon(&environment);
    let mut pod = Pod::run(&environment, "survivor").await;
    let script = "i=0; while true; do i=$((i+1)); echo line $i; busybox usleep 10000; done";
    let id = pod.start(container_config("main", script)).await;
    let ending = pod
        .start(container_config("ending", "busybox usleep 300000; exit 5"))
        .await;
    let before = pod.status(&id).await;
    daemon.kill().expect("SIGKILL");
    daemon.wait().expect("reaped");
    let lines = log_text(&before.log_path).lines().count();
    eventually("logs flow without a daemon", async || {
        log_text(&before.log_path).lines().count() > lines + 5
    })
    .await;
    let state = environment
        .config
        .root
        .join("containers")
        .join(&ending)
        .join("state.json");
    eventually("the end is recorded without a daemon", async || {
        std::fs::read_to_string(&state)
            .unwrap_or_default()
            .contains("\"exit_code\":5")
    })
    .await;

    environment.start().await;
    let mut pod = Pod {
        client: environment.client().await,
        id: pod.id,
        config: pod.config,
    };
    let after = pod.status(&id).await;
    assert_eq!((after.state, after.started_at), (before.state, before.started_at));
    let ended = pod.status(&ending).await;
    assert_eq!(
        (ended.state(), ended.exit_code),
        (cri::ContainerState::ContainerExited, 5)
    );
    assert_eq!(pod.exec_text(&id, &["hostname"]).await, "survivor\n");
    let request = cri::PodSandboxStatusRequest {
        pod_sandbox_id: pod.id.clone(),
        verbose: false,
    };
    let status = pod
        .client
        .pod_sandbox_status(request)
        .await
        .expect("status")
        .into_inner()
        .status
        .expect("status");
    assert_eq!(status.state(), cri::PodSandboxState::SandboxReady);

    // The kubelet rotates: the old file keeps what it has, the new one gets the rest.
    let rotated = format!("{}.1", before.log_path);
    std::fs::rename(&before.log_path, &rotated).expect("rename");
    let request = cri::ReopenContainerLogRequest {
        container_id: id.clone(),
    };
    pod.client.reopen_container_log(request).await.expect("reopens");
    eventually("the new log fills", async || {
        !log_text(&before.log_path).is_empty()
    })
    .await;
    let numbers: Vec<u32> = (log_text(&rotated) + &log_text(&before.log_path))
        .lines()
        .filter_map(|line| line.strip_prefix("line ")?.parse().ok())
        .collect();
    assert!(
        numbers.iter().zip(1..).all(|(have, want)| *have == want),
        "no line is lost"
    );
    pod.remove().await;
    environment.finish().await;
}

pub async fn a_lost_shim_ends_the_pod() {
    let environment = Environment::new().await;
    let mut pod = Pod::run(&environment, "orphan").await;
    let id = pod.start(container_config("main", "exec sleep 1000")).await;
    let pid = shim_of(&environment, &pod.id).expect("the shim runs");
    rustix::process::kill_process(pid, rustix::process::Signal::KILL).expect("kill");
    let status = pod.wait(&id).await;
    assert_eq!(status.exit_code, 137);
    eventually("the sandbox is not ready", async || {
        let list = pod
            .client
            .list_pod_sandbox(cri::ListPodSandboxRequest::default())
            .await
            .expect("list");
        list.into_inner().items[0].state() == cri::PodSandboxState::SandboxNotready
    })
    .await;
    pod.remove().await;
    environment.finish().await;
}

pub async fn events() {
    let environment = Environment::new().await;
    let mut client = environment.client().await;
    let mut stream = client
        .get_container_events(cri::GetEventsRequest {})
        .await
        .expect("events")
        .into_inner();
    let mut pod = Pod::run(&environment, "watched").await;
    let (code, _) = pod.script(container_config("main", "exit 4")).await;
    assert_eq!(code, 4);
    pod.remove().await;
    let mut seen = Vec::new();
    while seen.len() < 8 {
        let event = stream.message().await.expect("event").expect("event");
        let of_sandbox = event.container_id == pod.id;
        if event.container_event_type() == cri::ContainerEventType::ContainerStoppedEvent && !of_sandbox {
            assert_eq!(event.containers_statuses[0].exit_code, 4);
        }
        seen.push((of_sandbox, event.container_event_type));
    }
    assert_eq!(
        seen,
        [
            (true, 0),
            (true, 1),
            (false, 0),
            (false, 1),
            (false, 2),
            (true, 2),
            (false, 3),
            (true, 3)
        ],
        "created, started, stopped, deleted"
    );
    environment.finish().await;
}

/// Two runtimes, many pods at once: nothing of one is the other's.
pub async fn side_by_side() {
    let (one, two) = (Environment::new().await, Environment::new().await);
    let run = async |environment: &Environment, index: usize| {
        let mut pod = Pod::run(environment, &format!("pod-{index}")).await;
        let (code, log) = pod.script(container_config("main", "hostname")).await;
        assert_eq!((code, log), (0, format!("pod-{index}\n")));
    };
    let taken = skiff_runtime::Runtime::start(one.config.clone()).await;
    assert!(
        matches!(taken, Err(skiff_runtime::Error::Taken(_))),
        "one daemon for one directory"
    );
    let first = futures::future::join_all((0..8).map(|index| run(&one, index)));
    let second = futures::future::join_all((0..8).map(|index| run(&two, index)));
    tokio::join!(first, second);
    let list = one
        .client()
        .await
        .list_pod_sandbox(cri::ListPodSandboxRequest::default())
        .await
        .expect("list");
    assert_eq!(list.into_inner().items.len(), 8);
    one.finish().await;
    let list = two
        .client()
        .await
        .list_pod_sandbox(cri::ListPodSandboxRequest::default())
        .await
        .expect("list");
    assert_eq!(list.into_inner().items.len(), 8);
    two.finish().await;
}
