//! What goes wrong, what is shared, and what a pod costs.

use crate::environment::{Environment, Pod, container_config, eventually, sandbox_config, security};
use skiff_cri::v1 as cri;

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

    // A volume put in the way of what the helper itself reads.
    let volume = |at: &str, source: &std::path::Path| cri::Mount {
        container_path: at.into(),
        host_path: source.to_string_lossy().into_owned(),
        ..Default::default()
    };
    let pipe = environment.path("pipe");
    rustix::fs::mknodat(
        rustix::fs::CWD,
        &pipe,
        rustix::fs::FileType::Fifo,
        rustix::fs::Mode::from_raw_mode(0o666),
        0,
    )
    .expect("pipe");
    let mut config = container_config("fakepasswd", "echo started");
    config.mounts.push(volume("/etc/passwd", &pipe));
    assert_eq!(pod.script(config).await.1, "started\n");

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
