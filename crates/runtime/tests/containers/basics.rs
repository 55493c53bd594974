//! What one pod and its containers see.

use crate::environment::{
    Environment, Pod, container_config, eventually, log_text, sandbox_config, security,
};
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
    assert_eq!(pod.script(config).await.1.lines().last(), Some("refused"));
    pod.remove().await;
    environment.finish().await;
}

pub async fn resources() {
    let environment = Environment::new().await;
    let mut pod = Pod::run(&environment, "limited").await;
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
    let frames = websocket(&format!("{url}?port=7777"), "v4.channel.k8s.io", &[]).await;
    let text: String = frames
        .iter()
        .filter(|frame| frame.first() == Some(&0))
        .map(|frame| String::from_utf8_lossy(&frame[1..]).into_owned())
        .collect();
    assert!(text.ends_with("hello\n"), "{text:?}");
    pod.remove().await;
    environment.finish().await;
}

pub async fn failures() {
    let environment = Environment::new().await;
    let mut pod = Pod::run(&environment, "broken").await;
    let check = async |pod: &mut Pod, command: &[&str], expected: &str| {
        let mut config = container_config(&format!("c{}", rand::random::<u32>()), "");
        config.command = command.iter().map(|word| word.to_string()).collect();
        let id = pod.create(config).await.expect("created");
        let request = cri::StartContainerRequest {
            container_id: id.clone(),
        };
        let error = pod
            .client
            .start_container(request)
            .await
            .expect_err("does not start");
        assert!(
            error.message().contains(expected),
            "{} has {expected}",
            error.message()
        );
        let status = pod.status(&id).await;
        assert_eq!((status.exit_code, status.reason.as_str()), (128, "StartError"));
        assert!(status.message.contains(expected), "{}", status.message);
    };
    check(
        &mut pod,
        &["nothere"],
        "exec: \"nothere\": executable file not found in $PATH",
    )
    .await;
    check(
        &mut pod,
        &["/nothere"],
        "exec: \"/nothere\": stat /nothere: no such file or directory",
    )
    .await;
    check(&mut pod, &["/etc"], "exec: \"/etc\": is a directory").await;
    check(
        &mut pod,
        &["/etc/passwd"],
        "exec: \"/etc/passwd\": permission denied",
    )
    .await;

    let mut config = container_config("nouser", "true");
    security(&mut config).run_as_username = "ghost".into();
    let id = pod.create(config).await.expect("created");
    let error = pod
        .client
        .start_container(cri::StartContainerRequest { container_id: id })
        .await
        .expect_err("no user");
    assert!(
        error.message().contains("unable to find user ghost"),
        "{}",
        error.message()
    );

    let mut config = container_config("noimage", "true");
    config.image = Some(cri::ImageSpec {
        image: "no/such:image".into(),
        ..Default::default()
    });
    assert_eq!(
        pod.create(config).await.expect_err("no image").code(),
        tonic::Code::NotFound
    );
    let id = pod.start(container_config("twice", "exec sleep 1000")).await;
    let error = pod
        .create(container_config("twice", "true"))
        .await
        .expect_err("taken");
    assert!(error.message().contains("is reserved for"), "{}", error.message());
    let error = pod.exec(&id, &["nothere"]).await.expect_err("no such program");
    assert!(
        error.message().contains("executable file not found in $PATH"),
        "{}",
        error.message()
    );
    let error = pod
        .client
        .start_container(cri::StartContainerRequest { container_id: id })
        .await
        .expect_err("twice");
    assert_eq!(error.code(), tonic::Code::FailedPrecondition);

    let request = cri::RunPodSandboxRequest {
        config: Some(sandbox_config(&environment, "other")),
        runtime_handler: "kata".into(),
    };
    let error = pod.client.run_pod_sandbox(request).await.expect_err("no handler");
    assert!(
        error.message().contains("no runtime for \"kata\" is configured"),
        "{}",
        error.message()
    );

    // Without a network configuration a sandbox fails, leaves nothing, and the status says why.
    let conf = environment.config.cni_conf_dir.join("10-test.conflist");
    let kept = std::fs::read(&conf).expect("conf");
    std::fs::remove_file(&conf).expect("remove");
    let request = cri::RunPodSandboxRequest {
        config: Some(sandbox_config(&environment, "other")),
        runtime_handler: String::new(),
    };
    let error = pod
        .client
        .run_pod_sandbox(request.clone())
        .await
        .expect_err("no network");
    assert!(
        error.message().contains("cni plugin not initialized"),
        "{}",
        error.message()
    );
    let status = pod
        .client
        .status(cri::StatusRequest::default())
        .await
        .expect("status")
        .into_inner();
    let conditions = status.status.expect("status").conditions;
    assert!(
        conditions
            .iter()
            .any(|condition| condition.r#type == "NetworkReady" && !condition.status)
    );
    std::fs::write(&conf, kept).expect("conf");
    assert_eq!(
        std::fs::read_dir(environment.config.root.join("sandboxes"))
            .expect("list")
            .count(),
        1
    );
    pod.client
        .run_pod_sandbox(request)
        .await
        .expect("the name is free again");
    environment.finish().await;
}

pub async fn namespaces() {
    let environment = Environment::new().await;
    // A shared pid namespace: containers see each other, and the first process is neither.
    let mut config = sandbox_config(&environment, "shared");
    let options = cri::NamespaceOption {
        pid: cri::NamespaceMode::Pod as i32,
        ..Default::default()
    };
    config
        .linux
        .as_mut()
        .expect("linux")
        .security_context
        .as_mut()
        .expect("context")
        .namespace_options = Some(options.clone());
    config
        .linux
        .as_mut()
        .expect("linux")
        .sysctls
        .insert("net.ipv4.tcp_syncookies".into(), "0".into());
    let mut pod = Pod::run_with(&environment, config).await;
    let mut first = container_config("one", "echo shared > /dev/shm/x; exec sleep 1111");
    security(&mut first).namespace_options = Some(options.clone());
    pod.start(first).await;
    let mut second = container_config("two", "exec sleep 2222");
    security(&mut second).namespace_options = Some(options);
    let second = pod.start(second).await;
    let processes = pod.exec_text(&second, &["ps"]).await;
    assert!(
        processes.contains("sleep 1111") && processes.contains("sleep 2222"),
        "{processes}"
    );
    eventually("shm is shared", async || {
        pod.exec_text(&second, &["ls", "/dev/shm"]).await == "x\n"
    })
    .await;
    assert_eq!(
        pod.exec_text(&second, &["cat", "/proc/sys/net/ipv4/tcp_syncookies"])
            .await,
        "0\n"
    );
    // An ephemeral container joins its target.
    let mut debug = container_config("debug", "ps; true");
    security(&mut debug).namespace_options = Some(cri::NamespaceOption {
        pid: cri::NamespaceMode::Target as i32,
        target_id: second.clone(),
        ..Default::default()
    });
    let (_, log) = pod.script(debug).await;
    assert!(log.contains("sleep 2222"), "{log}");
    pod.remove().await;

    let mut config = sandbox_config(&environment, "host");
    let options = cri::NamespaceOption {
        network: cri::NamespaceMode::Node as i32,
        pid: cri::NamespaceMode::Node as i32,
        ipc: cri::NamespaceMode::Node as i32,
        ..Default::default()
    };
    config
        .linux
        .as_mut()
        .expect("linux")
        .security_context
        .as_mut()
        .expect("context")
        .namespace_options = Some(options.clone());
    let mut pod = Pod::run_with(&environment, config).await;
    let mut main = container_config("main", "exec sleep 1000");
    security(&mut main).namespace_options = Some(options);
    let id = pod.start(main).await;
    for namespace in ["net", "pid", "ipc", "uts"] {
        let host = std::fs::read_link(format!("/proc/self/ns/{namespace}")).expect("link");
        let own = pod
            .exec_text(
                &id,
                &["busybox", "readlink", &format!("/proc/self/ns/{namespace}")],
            )
            .await;
        assert_eq!(own.trim(), host.to_string_lossy(), "{namespace}");
    }
    pod.remove().await;
    environment.finish().await;
}

/// Prints what a pod costs; compared by eye, because a shared machine has no fixed times.
pub async fn figures() {
    let environment = Environment::new().await;
    let mut times: [Vec<u128>; 4] = Default::default();
    for index in 0..10 {
        let mut clock = std::time::Instant::now();
        let mut lap = |at: usize| {
            times[at].push(clock.elapsed().as_micros());
            clock = std::time::Instant::now();
        };
        let mut pod = Pod::run(&environment, &format!("timed-{index}")).await;
        lap(0);
        let id = pod
            .create(container_config("main", "exec sleep 1000"))
            .await
            .expect("created");
        lap(1);
        pod.client
            .start_container(cri::StartContainerRequest {
                container_id: id.clone(),
            })
            .await
            .expect("starts");
        lap(2);
        pod.exec_text(&id, &["true"]).await;
        lap(3);
    }
    for (name, mut times) in ["sandbox", "create", "start", "exec"].into_iter().zip(times) {
        times.sort_unstable();
        println!(
            "{name}: median {} us, worst {} us",
            times[times.len() / 2],
            times[times.len() - 1]
        );
    }
    environment.finish().await;
}

/// A WebSocket connection: as much of the protocol as these tests need.
struct Attached {
    stream: tokio::net::TcpStream,
    buffer: Vec<u8>,
}

impl Attached {
    async fn open(url: &str) -> Attached {
        Attached::open_with(url, "v5.channel.k8s.io")
            .await
            .expect("upgrades")
    }

    async fn open_with(url: &str, protocol: &str) -> Result<Attached, u16> {
        use tokio::io::{AsyncReadExt, AsyncWriteExt};
        let rest = url.strip_prefix("http://").expect("http");
        let (host, path) = rest.split_once('/').expect("path");
        let mut stream = tokio::net::TcpStream::connect(host).await.expect("connects");
        let request = format!(
            "GET /{path} HTTP/1.1\r\nHost: {host}\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\
             Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\
             Sec-WebSocket-Protocol: {protocol}\r\n\r\n"
        );
        stream.write_all(request.as_bytes()).await.expect("writes");
        let mut head = Vec::new();
        while !head.ends_with(b"\r\n\r\n") {
            head.push(stream.read_u8().await.expect("reads"));
        }
        let status = String::from_utf8_lossy(&head)
            .split(' ')
            .nth(1)
            .and_then(|code| code.parse().ok())
            .expect("status");
        if status == 101 {
            Ok(Attached {
                stream,
                buffer: Vec::new(),
            })
        } else {
            Err(status)
        }
    }

    async fn send(&mut self, data: &[u8]) {
        use tokio::io::AsyncWriteExt;
        // A mask of zeros is a mask.
        let mut frame = vec![0x82, 0x80 | data.len() as u8, 0, 0, 0, 0];
        frame.extend_from_slice(data);
        self.stream.write_all(&frame).await.expect("writes");
    }

    /// The next data frame; `None` at the end.
    async fn next(&mut self) -> Option<Vec<u8>> {
        use tokio::io::AsyncReadExt;
        loop {
            if self.buffer.len() >= 2 {
                let (opcode, short) = (self.buffer[0] & 15, usize::from(self.buffer[1] & 127));
                let (head, length) = match short {
                    126 if self.buffer.len() >= 4 => (
                        4,
                        usize::from(u16::from_be_bytes([self.buffer[2], self.buffer[3]])),
                    ),
                    126 => (4, usize::MAX / 2),
                    short => (2, short),
                };
                if self.buffer.len() >= head + length {
                    let data: Vec<u8> = self.buffer.drain(..head + length).skip(head).collect();
                    match opcode {
                        8 => return None,
                        1 | 2 => return Some(data),
                        _ => continue,
                    }
                }
            }
            let mut bytes = [0; 4096];
            let length = self.stream.read(&mut bytes).await.ok()?;
            if length == 0 {
                return None;
            }
            self.buffer.extend_from_slice(&bytes[..length]);
        }
    }

    async fn text(&mut self, channel: u8, length: usize) -> String {
        let mut text = String::new();
        while text.len() < length {
            let frame = self.next().await.expect("more");
            if frame.first() == Some(&channel) {
                text += &String::from_utf8_lossy(&frame[1..]);
            }
        }
        text
    }
}

async fn websocket(url: &str, protocol: &str, send: &[&[u8]]) -> Vec<Vec<u8>> {
    let mut connection = Attached::open_with(url, protocol).await.expect("upgrades");
    for data in send {
        connection.send(data).await;
    }
    let mut frames = Vec::new();
    while let Some(frame) = connection.next().await {
        // A forwarded connection stays open; its answer is all that is awaited.
        let done = protocol.starts_with("v4") && frame.first() == Some(&0) && frame.ends_with(b"\n");
        frames.push(frame);
        if done {
            break;
        }
    }
    frames
}

async fn websocket_status(url: &str) -> u16 {
    Attached::open_with(url, "v5.channel.k8s.io")
        .await
        .err()
        .unwrap_or(101)
}
