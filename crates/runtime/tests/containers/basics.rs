//! What one pod and its containers see.

use crate::environment::{
    Environment, Pod, container_config, eventually, log_text, sandbox_config, security,
};
use crate::websocket::{Attached, websocket, websocket_status};
use skiff_cri::v1 as cri;

pub async fn runs_a_container() {
    let environment = Environment::new().await;
    let mut pod = Pod::run(&environment, "first").await;
    let request = cri::PodSandboxStatusRequest {
        pod_sandbox_id: pod.id.clone(),
        verbose: true,
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
    let ip = status.network.expect("network").ip;
    assert!(ip.starts_with("10."), "{ip}");

    let script = "echo out; echo err >&2; echo -n partial; exec sleep 1000";
    let id = pod.start(container_config("main", script)).await;
    let status = pod.status(&id).await;
    assert_eq!(status.state(), cri::ContainerState::ContainerRunning);
    assert!(
        status.image_ref.starts_with("docker.io/library/busybox@sha256:"),
        "{}",
        status.image_ref
    );
    eventually("the log has both lines", async || {
        log_text(&status.log_path).lines().count() >= 2
    })
    .await;

    assert!(
        pod.exec_text(&id, &["ip", "addr", "show", "eth0"])
            .await
            .contains(&ip)
    );
    assert!(
        pod.exec_text(&id, &["ip", "addr", "show", "lo"])
            .await
            .contains("127.0.0.1")
    );
    assert_eq!(pod.exec_text(&id, &["hostname"]).await, "first\n");
    assert_eq!(
        pod.exec_text(&id, &["cat", "/etc/resolv.conf"]).await,
        "nameserver 10.96.0.10\n"
    );
    assert_eq!(
        pod.exec_text(&id, &["sh", "-c", "echo $$PPID; cat /proc/1/comm"])
            .await
            .lines()
            .last(),
        Some("sleep")
    );
    // In its own pid namespace, the only other process is this one's.
    let processes = pod
        .exec_text(&id, &["sh", "-c", "ls /proc | grep -c '^[0-9]'"])
        .await;
    assert!(
        processes.trim().parse::<u32>().expect("number") <= 5,
        "{processes}"
    );
    let mounts = pod.exec_text(&id, &["cat", "/proc/self/mounts"]).await;
    assert!(
        mounts.contains("overlay / overlay") && mounts.contains("proc /proc proc"),
        "{mounts}"
    );
    assert!(
        mounts.lines().count() < 30,
        "the host's mounts are not seen: {mounts}"
    );

    let response = pod
        .exec(&id, &["sh", "-c", "echo a; echo b >&2; exit 3"])
        .await
        .expect("exec");
    assert_eq!(
        (
            response.stdout.as_slice(),
            response.stderr.as_slice(),
            response.exit_code
        ),
        (&b"a\n"[..], &b"b\n"[..], 3)
    );
    let request = cri::ExecSyncRequest {
        container_id: id.clone(),
        cmd: vec!["sleep".into(), "100".into()],
        timeout: 1,
    };
    let error = pod.client.exec_sync(request).await.expect_err("times out");
    assert_eq!(error.code(), tonic::Code::DeadlineExceeded);
    eventually("the timed-out process is gone", async || {
        !pod.exec_text(&id, &["ps"]).await.contains("sleep 100\n")
    })
    .await;

    let request = cri::StopContainerRequest {
        container_id: id.clone(),
        timeout: 0,
    };
    pod.client.stop_container(request).await.expect("stops");
    let status = pod.status(&id).await;
    assert_eq!((status.exit_code, status.reason.as_str()), (137, "Error"));
    assert!(status.finished_at >= status.started_at && status.started_at >= status.created_at);
    let log = std::fs::read_to_string(&status.log_path).expect("log");
    for (stream, tag, line) in [
        ("stdout", "F", "out"),
        ("stderr", "F", "err"),
        ("stdout", "P", "partial"),
    ] {
        assert!(
            log.lines()
                .any(|entry| entry.ends_with(&format!(" {stream} {tag} {line}"))),
            "{line} in {log}"
        );
    }
    let time = log.split(' ').next().expect("time");
    assert!(
        time.len() == 30 && time.ends_with('Z') && time.contains('T'),
        "{time}"
    );

    pod.client
        .remove_container(cri::RemoveContainerRequest {
            container_id: id.clone(),
        })
        .await
        .expect("removes");
    let request = cri::ContainerStatusRequest {
        container_id: id,
        verbose: false,
    };
    assert_eq!(
        pod.client
            .container_status(request)
            .await
            .expect_err("gone")
            .code(),
        tonic::Code::NotFound
    );
    pod.remove().await;
    assert!(
        pod.client
            .list_pod_sandbox(cri::ListPodSandboxRequest::default())
            .await
            .expect("list")
            .into_inner()
            .items
            .is_empty()
    );
    environment.finish().await;
}

pub async fn confinement() {
    let environment = Environment::new().await;
    let mut pod = Pod::run(&environment, "secure").await;
    let id = pod.start(container_config("default", "exec sleep 1000")).await;
    for status in [
        pod.exec_text(&id, &["cat", "/proc/1/status"]).await,
        // An exec'd process is held as tightly as the first one.
        pod.exec_text(&id, &["cat", "/proc/self/status"]).await,
    ] {
        assert!(status.contains("Seccomp:\t2\n"), "{status}");
        assert!(status.contains("CapBnd:\t00000000a80425fb\n"), "{status}");
        assert!(status.contains("CapEff:\t00000000a80425fb\n"), "{status}");
        assert!(status.contains("NoNewPrivs:\t0\n"), "{status}");
    }
    let refused = pod.exec(&id, &["unshare", "-U", "true"]).await.expect("exec");
    assert_ne!(
        refused.exit_code, 0,
        "no user namespaces under the default profile"
    );
    let refused = pod
        .exec(&id, &["mount", "-t", "tmpfs", "x", "/tmp"])
        .await
        .expect("exec");
    assert_ne!(refused.exit_code, 0, "no mounts");
    let refused = pod
        .exec(&id, &["sh", "-c", "echo 1 > /proc/sys/kernel/sysrq"])
        .await
        .expect("exec");
    assert_ne!(refused.exit_code, 0, "/proc/sys is read-only");
    assert_eq!(
        pod.exec_text(&id, &["head", "-c", "1", "/proc/version"]).await,
        "",
        "a masked file is empty"
    );
    let refused = pod
        .exec(
            &id,
            &[
                "sh",
                "-c",
                "mkdir /sys/fs/cgroup/x || mkdir /sys/fs/cgroup/memory/x",
            ],
        )
        .await
        .expect("exec");
    assert_ne!(refused.exit_code, 0, "cgroups are read-only");
    let device =
        "busybox mknod /tmp/d b 8 0; busybox mknod /tmp/k c 1 2; ! dd if=/tmp/k of=/dev/null bs=1 count=1";
    let response = pod.exec(&id, &["sh", "-c", device]).await.expect("exec");
    assert_eq!(response.exit_code, 0, "other devices cannot be opened");

    // The helper's own binary, which is the host's, executed in the container: it stays out of reach.
    let mut client = environment.client().await;
    let host_binary = client.exec_sync(cri::ExecSyncRequest {
        container_id: id.clone(),
        cmd: ["/proc/self/exe", "stay"].map(String::from).to_vec(),
        timeout: 10,
    });
    let attack = async {
        let find = "until [ -s /tmp/stays ]; do sleep 0.05; done; p=$(cat /tmp/stays); \
            chmod 700 /proc/$p/exe; kill -9 $p";
        pod.exec(&id, &["sh", "-c", find]).await.expect("exec")
    };
    let (ended, attack) = tokio::join!(host_binary, attack);
    let ended = ended.expect("exec").into_inner();
    assert_eq!(ended.exit_code, 137, "the binary was running");
    let said = String::from_utf8_lossy(&attack.stderr).into_owned();
    assert!(said.contains("Read-only file system"), "{said}");

    let mut config = container_config(
        "tight",
        "cat /proc/self/status; echo $HOME; touch /x || echo read-only",
    );
    let context = security(&mut config);
    context.no_new_privs = true;
    context.readonly_rootfs = true;
    context.run_as_user = Some(cri::Int64Value { value: 1001 });
    context.capabilities = Some(cri::Capability {
        drop_capabilities: vec!["ALL".into()],
        ..Default::default()
    });
    let (code, log) = pod.script(config).await;
    assert_eq!(code, 0);
    for line in [
        "Seccomp:\t2",
        "NoNewPrivs:\t1",
        "CapBnd:\t0000000000000000",
        "Uid:\t1001\t1001\t1001\t1001",
        "/home",
        "read-only",
    ] {
        assert!(log.lines().any(|have| have == line), "{line} in {log}");
    }

    let mut config = container_config(
        "open",
        "cat /proc/self/status; mount -t tmpfs x /tmp && echo mounted; ls /dev",
    );
    let context = security(&mut config);
    context.privileged = true;
    context.seccomp = Some(cri::SecurityProfile {
        profile_type: 1,
        localhost_ref: String::new(),
    });
    let (_, log) = pod.script(config).await;
    assert!(
        log.contains("Seccomp:\t0\n") && log.contains("mounted\n"),
        "{log}"
    );

    let profile = environment.path("profile.json");
    let body = r#"{"defaultAction":"SCMP_ACT_ALLOW","syscalls":[{"names":["mkdir","mkdirat"],"action":"SCMP_ACT_ERRNO","errnoRet":1}]}"#;
    std::fs::write(&profile, body).expect("profile");
    let mut config = container_config("own", "mkdir /tmp/x || echo refused");
    security(&mut config).seccomp = Some(cri::SecurityProfile {
        profile_type: 2,
        localhost_ref: profile.to_string_lossy().into_owned(),
    });
    let (_, log) = pod.script(config).await;
    // Not the last line for sure: the complaint comes by the other stream.
    assert!(log.lines().any(|line| line == "refused"), "{log}");
    pod.remove().await;
    environment.finish().await;
}

pub async fn resources() {
    let environment = Environment::new().await;
    let mut config = sandbox_config(&environment, "limited");
    // As the kubelet names it: below the pods of this cluster.
    let parent = format!("/{}/kubepods/burstable/poduid", environment.config.cgroup_parent);
    config
        .linux
        .as_mut()
        .expect("linux")
        .cgroup_parent
        .clone_from(&parent);
    let mut pod = Pod::run_with(&environment, config).await;
    let mut config = container_config("main", "exec sleep 1000");
    config.linux.as_mut().expect("linux").resources = Some(cri::LinuxContainerResources {
        memory_limit_in_bytes: 64 << 20,
        cpu_shares: 512,
        cpu_quota: 50_000,
        cpu_period: 100_000,
        oom_score_adj: 500,
        ..Default::default()
    });
    let id = pod.start(config).await;
    let own = std::fs::read_to_string(format!("/proc/{}/cgroup", pod.pid(&id).await)).expect("cgroup");
    assert!(own.contains(&format!("{parent}/{id}")), "{own}");
    let files: [(&[&str], &str); 3] = [
        (&["memory/memory.limit_in_bytes", "memory.max"], "67108864"),
        (&["cpu/cpu.shares", "cpu.weight"], "512 20"),
        (&["cpu/cpu.cfs_quota_us", "cpu.max"], "50000 50000 100000"),
    ];
    for (paths, expected) in files {
        let script = paths
            .iter()
            .map(|path| format!("cat /sys/fs/cgroup/{path} 2>/dev/null"))
            .collect::<Vec<_>>();
        let value = pod.exec_text(&id, &["sh", "-c", &script.join(" || ")]).await;
        assert!(expected.split_once(value.trim()).is_some(), "{paths:?}: {value}");
    }
    assert_eq!(
        pod.exec_text(&id, &["cat", "/proc/1/oom_score_adj"]).await,
        "500\n"
    );
    assert_eq!(
        pod.exec_text(&id, &["cat", "/proc/self/oom_score_adj"]).await,
        "500\n"
    );

    let linux = cri::LinuxContainerResources {
        memory_limit_in_bytes: 32 << 20,
        ..Default::default()
    };
    let request = cri::UpdateContainerResourcesRequest {
        container_id: id.clone(),
        linux: Some(linux),
        ..Default::default()
    };
    pod.client
        .update_container_resources(request)
        .await
        .expect("updates");
    let script =
        "cat /sys/fs/cgroup/memory/memory.limit_in_bytes 2>/dev/null || cat /sys/fs/cgroup/memory.max";
    assert_eq!(pod.exec_text(&id, &["sh", "-c", script]).await, "33554432\n");
    let resources = pod
        .status(&id)
        .await
        .resources
        .and_then(|resources| resources.linux)
        .expect("resources");
    assert_eq!(
        (resources.memory_limit_in_bytes, resources.cpu_shares),
        (32 << 20, 512)
    );

    let stats = pod
        .client
        .container_stats(cri::ContainerStatsRequest {
            container_id: id.clone(),
        })
        .await;
    let stats = stats.expect("stats").into_inner().stats.expect("stats");
    assert!(stats.memory.expect("memory").usage_bytes.expect("usage").value > 0);
    assert!(
        stats
            .cpu
            .expect("cpu")
            .usage_core_nano_seconds
            .expect("usage")
            .value
            > 0
    );
    let stats = pod
        .client
        .pod_sandbox_stats(cri::PodSandboxStatsRequest {
            pod_sandbox_id: pod.id.clone(),
        })
        .await;
    let linux = stats
        .expect("stats")
        .into_inner()
        .stats
        .expect("stats")
        .linux
        .expect("linux");
    assert_eq!(linux.containers.len(), 1);
    assert_eq!(
        linux
            .network
            .expect("network")
            .default_interface
            .expect("interface")
            .name,
        "eth0"
    );

    let mut config = container_config("greedy", "head -c 200000000 /dev/zero | tail");
    config.linux.as_mut().expect("linux").resources = Some(cri::LinuxContainerResources {
        memory_limit_in_bytes: 16 << 20,
        ..Default::default()
    });
    // The first process must be the one that is killed.
    config.command = vec!["/bin/tail".into(), "/dev/zero".into()];
    let id = pod.start(config).await;
    let status = pod.wait(&id).await;
    assert_eq!((status.exit_code, status.reason.as_str()), (137, "OOMKilled"));
    pod.remove().await;
    environment.finish().await;
}

pub async fn users_and_mounts() {
    let environment = Environment::new().await;
    let mut pod = Pod::run(&environment, "mounts").await;
    let data = environment.path("data");
    std::fs::create_dir_all(data.join("inner")).expect("dir");
    std::fs::write(data.join("file"), "content").expect("file");
    let mount = |target: &str, source: &std::path::Path, readonly: bool| cri::Mount {
        container_path: target.into(),
        host_path: source.to_string_lossy().into_owned(),
        readonly,
        ..Default::default()
    };
    let mut config = container_config(
        "main",
        "cat /data/file; echo; touch /data/new || echo ro; touch /data/inner/ok && echo rw; cat /etc/hosts; id; pwd",
    );
    let hosts = environment.path("hosts");
    std::fs::write(&hosts, "127.0.0.1 mine\n").expect("hosts");
    config.mounts = vec![
        mount("/data/inner", &data.join("inner"), false),
        mount("/data", &data, true),
        mount("/etc/hosts", &hosts, false),
    ];
    std::os::unix::fs::chown(data.join("inner"), Some(1001), None).expect("chown");
    config.working_dir = "/made/by/runtime".into();
    security(&mut config).run_as_username = "web".into();
    security(&mut config).supplemental_groups = vec![4242];
    let id = pod.start(config).await;
    let status = pod.wait(&id).await;
    let log = log_text(&status.log_path);
    for line in ["content", "ro", "rw", "127.0.0.1 mine", "/made/by/runtime"] {
        assert!(log.lines().any(|have| have == line), "{line} in {log}");
    }
    assert!(
        log.contains("uid=1001(web) gid=1002(web) groups=1002(web),1003(log),4242"),
        "{log}"
    );
    let user = status.user.and_then(|user| user.linux).expect("user");
    assert_eq!(
        (user.uid, user.gid, user.supplemental_groups),
        (1001, 1002, vec![1002, 1003, 4242])
    );

    // A mount the container makes below a bidirectional volume shows on the host.
    let shared = environment.path("shared");
    std::fs::create_dir_all(&shared).expect("dir");
    rustix::mount::mount_bind(&shared, &shared).expect("bind");
    rustix::mount::mount_change(&shared, rustix::mount::MountPropagationFlags::SHARED).expect("share");
    let mut config = container_config(
        "sharer",
        "mkdir -p /s/m && mount -t tmpfs x /s/m && touch /s/m/seen && exec sleep 1000",
    );
    security(&mut config).privileged = true;
    config.mounts = vec![cri::Mount {
        propagation: 2,
        ..mount("/s", &shared, false)
    }];
    let id = pod.start(config).await;
    eventually("the mount shows", async || shared.join("m/seen").exists()).await;
    let stop = cri::StopContainerRequest {
        container_id: id,
        timeout: 0,
    };
    pod.client.stop_container(stop).await.expect("stops");
    let _ = rustix::mount::unmount(shared.join("m"), rustix::mount::UnmountFlags::DETACH);
    rustix::mount::unmount(&shared, rustix::mount::UnmountFlags::DETACH).expect("unmount");
    pod.remove().await;
    environment.finish().await;
}

pub async fn terminal() {
    let environment = Environment::new().await;
    let mut pod = Pod::run(&environment, "tty").await;
    let mut config = container_config("main", "tty; test -t 0 && echo terminal; echo $TERM");
    config.tty = true;
    config.stdin = true;
    let (code, log) = pod.script(config).await;
    assert_eq!(code, 0, "{log}");
    for line in ["/dev/pts/0", "terminal", "xterm"] {
        assert!(log.lines().any(|have| have.trim_end() == line), "{line} in {log}");
    }
    let id = pod.start(container_config("plain", "exec sleep 1000")).await;
    let request = cri::ExecRequest {
        container_id: id,
        cmd: vec![
            "sh".into(),
            "-c".into(),
            "read size; stty size; tty; echo $TERM; exit 2".into(),
        ],
        tty: true,
        stdin: true,
        stdout: true,
        stderr: false,
    };
    let url = pod.client.exec(request).await.expect("exec").into_inner().url;
    // The size first, then the line the script waits for.
    let frames = websocket(
        &url,
        "v5.channel.k8s.io",
        &[br#"{"Width":80,"Height":25}"#, b"\0go\r"],
    )
    .await;
    let text: String = frames
        .iter()
        .filter(|frame| frame.first() == Some(&1))
        .map(|frame| String::from_utf8_lossy(&frame[1..]).into_owned())
        .collect();
    for line in ["25 80", "/dev/pts/0", "xterm"] {
        assert!(
            text.lines().any(|have| have.trim_end() == line),
            "{line} in {text:?}"
        );
    }
    pod.remove().await;
    environment.finish().await;
}

/// Exec over the URL, with a small WebSocket client by hand.
pub async fn streaming() {
    let environment = Environment::new().await;
    let mut pod = Pod::run(&environment, "stream").await;
    let mut config = container_config(
        "main",
        "while read line; do echo got $line; done; exec nc -ll -p 7777 -e /bin/echo hello",
    );
    config.stdin = true;
    config.stdin_once = true;
    let id = pod.start(config).await;

    let request = cri::ExecRequest {
        container_id: id.clone(),
        cmd: vec![
            "sh".into(),
            "-c".into(),
            "read x; echo out $x; echo err >&2; exit 7".into(),
        ],
        stdin: true,
        stdout: true,
        stderr: true,
        tty: false,
    };
    let url = pod
        .client
        .exec(request.clone())
        .await
        .expect("exec")
        .into_inner()
        .url;
    let frames = websocket(&url, "v5.channel.k8s.io", &[b"\0input\n"]).await;
    let channel = |number: u8| -> String {
        frames
            .iter()
            .filter(|frame| frame.first() == Some(&number))
            .map(|frame| String::from_utf8_lossy(&frame[1..]).into_owned())
            .collect()
    };
    assert_eq!(channel(1), "out input\n");
    assert_eq!(channel(2), "err\n");
    assert!(channel(3).contains("\"message\":\"7\""), "{}", channel(3));
    // A URL works once.
    let again = websocket_status(&url).await;
    assert_eq!(again, 404);

    let request = cri::AttachRequest {
        container_id: id.clone(),
        stdin: true,
        stdout: true,
        stderr: true,
        tty: false,
    };
    let url = pod.client.attach(request).await.expect("attach").into_inner().url;
    let mut attached = Attached::open(&url).await;
    attached.send(b"\0one\n").await;
    assert_eq!(attached.text(1, "got one\n".len()).await, "got one\n");
    // stdin_once: when the only client that ever attaches leaves, the program's input ends.
    drop(attached);
    eventually("the program goes on", async || {
        pod.exec_text(&id, &["ps"]).await.contains("nc -ll")
    })
    .await;

    // Without stdin_once the program's input stays open, and a client that has closed its own is done, twice.
    let mut open = container_config("open", "while read line; do echo got $line; done");
    open.stdin = true;
    let open = pod.start(open).await;
    for _ in 0..2 {
        let request = cri::AttachRequest {
            container_id: open.clone(),
            stdin: true,
            stdout: true,
            stderr: true,
            tty: false,
        };
        let url = pod.client.attach(request).await.expect("attach").into_inner().url;
        let session = websocket(&url, "v5.channel.k8s.io", &[b"\0one\n", &[255, 0]]);
        let frames = tokio::time::timeout(std::time::Duration::from_secs(30), session)
            .await
            .expect("the session ends when the client closes its stdin");
        let status = frames.iter().find(|frame| frame.first() == Some(&3));
        let status = String::from_utf8_lossy(status.expect("a status")).into_owned();
        assert!(status.contains("Success"), "{status}");
    }

    let request = cri::PortForwardRequest {
        pod_sandbox_id: pod.id.clone(),
        port: vec![7777],
    };
    let url = pod
        .client
        .port_forward(request)
        .await
        .expect("port-forward")
        .into_inner()
        .url;
    let frames = websocket(&url, "v4.channel.k8s.io", &[]).await;
    let text: String = frames
        .iter()
        .filter(|frame| frame.first() == Some(&0))
        .map(|frame| String::from_utf8_lossy(&frame[1..]).into_owned())
        .collect();
    assert!(text.ends_with("hello\n"), "{text:?}");
    pod.remove().await;
    environment.finish().await;
}
