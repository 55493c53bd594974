//! The processes of a container and those of the runtime, and what one can get of the other.

use crate::environment::{Environment, Pod, security};
use crate::support::{container, directory, image, refused, volume};
use skiff_cri::v1 as cri;
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use tar::EntryType::Regular;

pub async fn descriptors() {
    let environment = Environment::new().await;
    let mut pod = Pod::run(&environment, "descriptors").await;
    let id = pod.start(container("main", "", "exec sleep 1000")).await;
    assert_eq!(pod.exec_text(&id, &["ls", "/proc/1/fd"]).await, "0\n1\n2\n");
    let exec = pod.exec_text(&id, &["sh", "-c", "ls /proc/$$/fd; true"]).await;
    assert_eq!(exec, "0\n1\n2\n");
    for process in ["1", "self"] {
        let status = pod
            .exec_text(&id, &["cat", &format!("/proc/{process}/status")])
            .await;
        assert!(status.contains("CapInh:\t0000000000000000\n"), "{status}");
        assert!(status.contains("CapAmb:\t0000000000000000\n"), "{status}");
    }
    pod.remove().await;
    environment.finish().await;
}

/// The working directory is chosen by the image. None of the descriptors that the helper has open while it
/// still sees the host may be one.
pub async fn working_directory() {
    let environment = Environment::new().await;
    let mut pod = Pod::run(&environment, "cwd").await;
    for number in 3..16 {
        let mut config = container(&format!("c{number}"), "", "echo escaped; ls ../../..");
        config.working_dir = format!("/proc/self/fd/{number}");
        refused(&mut pod, config, "").await;
    }
    // Nor is one of them a way to a program.
    for number in 3..12 {
        let mut config = container(&format!("p{number}"), "", "");
        config.command = vec![format!("/proc/self/fd/{number}/../../../../bin/sh")];
        refused(&mut pod, config, "").await;
    }
    let mut config = container("made", "", "busybox pwd; ls -a");
    config.working_dir = "/not/there/yet".into();
    assert_eq!(pod.script(config).await, (0, "/not/there/yet\n.\n..\n".into()));
    pod.remove().await;
    environment.finish().await;
}

/// A script whose interpreter is the helper that executes it: the host's binary runs in the container, and
/// is neither written to nor made writable.
pub async fn own_binary() {
    let environment = Environment::new().await;
    let mut pod = Pod::run(&environment, "binary").await;
    let entries = [("bin/evil", Regular, "#!/proc/self/exe stay\n")];
    let image = image(&environment, "binary", &entries);
    let own = std::env::current_exe().expect("exe");
    let identity = |path: &std::path::Path| {
        let metadata = std::fs::metadata(path).expect("metadata");
        (
            metadata.mode(),
            metadata.len(),
            metadata.mtime(),
            metadata.mtime_nsec(),
        )
    };
    let before = identity(&own);
    let id = pod.start(container("evil", &image, "exec sleep 1000")).await;
    let mut client = environment.client().await;
    let host_binary = client.exec_sync(cri::ExecSyncRequest {
        container_id: id.clone(),
        cmd: vec!["/bin/evil".into()],
        timeout: 30,
    });
    // A descriptor that is held until the binary runs no more can be opened again, for writing.
    let attack = "until [ -s /tmp/stays ]; do sleep 0.05; done; p=$(cat /tmp/stays); \
        chmod 777 /proc/$p/exe; exec 9< /proc/$p/exe; kill -9 $p; \
        while [ -e /proc/$p ]; do sleep 0.05; done; echo x >> /proc/self/fd/9; true";
    let command = ["sh", "-c", attack];
    let attack = pod.exec(&id, &command);
    let (ended, attack) = tokio::join!(host_binary, attack);
    assert_eq!(
        ended.expect("exec").into_inner().exit_code,
        137,
        "the binary was running"
    );
    let said = String::from_utf8_lossy(&attack.expect("exec").stderr).into_owned();
    // The file may be busy as well: this test and its shim run the same.
    assert!(
        said.contains("chmod: /proc/") && said.contains("Read-only file system"),
        "{said}"
    );
    assert!(said.contains("can't create /proc/self/fd/9"), "{said}");
    assert_eq!(identity(&own), before);
    pod.remove().await;
    environment.finish().await;
}

/// A container that waits for processes which join it, to look at what they have open.
pub async fn joining() {
    let environment = Environment::new().await;
    let mut pod = Pod::run(&environment, "joining").await;
    // Of a process that is the program by now, only the standard streams are open.
    let watch = "while [ ! -e /tmp/end ]; do for p in /proc/[0-9]*; do \
        read c < $p/comm && [ \"$c\" = skiff-init ] && for f in $p/fd/[3-9] $p/fd/[0-9][0-9]*; do \
        busybox readlink $f && echo LEAK; done; done 2>/dev/null; done; echo end";
    let id = pod.start(container("watch", "", watch)).await;
    for _ in 0..20 {
        pod.exec_text(&id, &["true"]).await;
    }
    pod.exec_text(&id, &["touch", "/tmp/end"]).await;
    let status = pod.wait(&id).await;
    let log = crate::environment::log_text(&status.log_path);
    assert!(log.ends_with("end\n") && !log.contains("LEAK"), "{log}");
    pod.remove().await;
    environment.finish().await;
}

/// A number that the kernel or an overflow takes for "as before" leaves the process root.
pub async fn user_numbers() {
    let environment = Environment::new().await;
    let mut pod = Pod::run(&environment, "users").await;
    for number in ["4294967295", "2147483648"] {
        let mut config = container(&format!("name{number}"), "", "id -u");
        security(&mut config).run_as_username = number.into();
        refused(&mut pod, config, "must be in range 0-2147483647").await;
        let mut config = container(&format!("group{number}"), "", "id -g");
        security(&mut config).run_as_user = Some(cri::Int64Value { value: 1 });
        let value = number.parse().expect("number");
        security(&mut config).run_as_group = Some(cri::Int64Value { value });
        refused(&mut pod, config, "must be in range 0-2147483647").await;
    }
    for number in ["4294967296", "-1", "0x0"] {
        let mut config = container(&format!("none{number}"), "", "id -u");
        security(&mut config).run_as_username = number.into();
        refused(&mut pod, config, "unable to find user").await;
    }
    // The image's own passwd may say so as well.
    let passwd = "root:x:0:0:root:/root:/bin/sh\nevil:x:4294967295:4294967295:e:/:/bin/sh\n";
    let image = image(&environment, "users", &[("etc/passwd", Regular, passwd)]);
    let mut config = container("passwd", &image, "id -u");
    security(&mut config).run_as_username = "evil".into();
    refused(&mut pod, config, "must be in range 0-2147483647").await;
    pod.remove().await;
    environment.finish().await;
}

/// Sockets that the host's network namespace would show to its containers, and directories with programs of
/// images that the host's users could run.
pub async fn runtime_files() {
    let environment = Environment::new().await;
    let mut pod = Pod::run(&environment, "files").await;
    pod.start(container("main", "", "exec sleep 1000")).await;
    for path in [&environment.config.root, &environment.config.run_dir] {
        let mode = std::fs::metadata(path).expect("metadata").permissions().mode();
        assert_eq!(mode & 0o077, 0, "{}: {mode:o}", path.display());
    }
    let own = environment.config.run_dir.to_string_lossy().into_owned();
    let sockets = std::fs::read_to_string("/proc/net/unix").expect("sockets");
    let names: Vec<&str> = sockets
        .lines()
        .filter_map(|line| line.split_whitespace().nth(7))
        .filter(|name| name.contains(&own))
        .collect();
    assert!(!names.is_empty(), "{sockets}");
    assert!(names.iter().all(|name| name.starts_with('/')), "{names:?}");
    pod.remove().await;
    environment.finish().await;
}

pub async fn endless_output() {
    let environment = Environment::new().await;
    let mut pod = Pod::run(&environment, "output").await;
    let id = pod.start(container("main", "", "exec sleep 1000")).await;
    let command = ["dd", "if=/dev/zero", "bs=1048576", "count=40"];
    let response = pod.exec(&id, &command).await.expect("exec");
    let length = response.stdout.len();
    assert!(length > 15 << 20 && length <= 16 << 20, "{length}");
    pod.remove().await;
    environment.finish().await;
}

/// The log of a container replaced by a link to a file of the host, as a container can that has the logs as
/// a volume.
pub async fn log_links() {
    let environment = Environment::new().await;
    let mut pod = Pod::run(&environment, "logs").await;
    let victim = environment.path("victim");
    std::fs::write(&victim, "untouched").expect("write");
    let id = pod
        .start(container(
            "main",
            "",
            "while :; do echo injected; sleep 0.05; done",
        ))
        .await;
    let log = pod.status(&id).await.log_path;
    std::fs::remove_file(&log).expect("remove");
    symlink(&victim, &log).expect("link");
    let reopened = pod
        .client
        .reopen_container_log(cri::ReopenContainerLogRequest {
            container_id: id.clone(),
        })
        .await;
    assert!(reopened.is_err(), "the log is a link");
    let config = container("second", "", "echo injected");
    let second = environment.path("logs/logs/second.log");
    symlink(&victim, &second).expect("link");
    refused(&mut pod, config, "open log").await;
    assert_eq!(std::fs::read_to_string(&victim).expect("read"), "untouched");
    pod.remove().await;
    environment.finish().await;
}

/// The terminal is that of the container's own devpts, whatever lies on its path.
pub async fn terminals() {
    let environment = Environment::new().await;
    let mut pod = Pod::run(&environment, "terminals").await;
    let fake = directory(&environment, "pts");
    symlink("/proc/sys/kernel/core_pattern", fake.join("ptmx")).expect("link");
    symlink("/proc/sys/kernel/core_pattern", fake.join("0")).expect("link");
    let script = "[ -t 0 ] && echo terminal; [ -c /dev/console ] && echo console; ls -1 /dev/pts";
    let mut config = container("fake", "", script);
    config.tty = true;
    config.mounts.push(volume("/dev/pts", &fake));
    let (_, log) = pod.script(config).await;
    let lines: Vec<&str> = log.lines().map(str::trim).collect();
    assert_eq!(lines, ["terminal", "console", "0", "ptmx"]);

    // A process that joins has the path only, so what it finds there must be a devpts.
    let mut config = container("joined", "", "exec sleep 1000");
    config.mounts.push(volume("/dev/pts", &fake));
    let request = cri::ExecRequest {
        container_id: pod.start(config).await,
        cmd: vec!["echo".into(), "escaped".into()],
        tty: true,
        stdin: true,
        stdout: true,
        stderr: false,
    };
    let url = pod.client.exec(request).await.expect("exec").into_inner().url;
    let frames = crate::websocket::websocket(&url, "v5.channel.k8s.io", &[]).await;
    let text: String = frames
        .iter()
        .map(|frame| String::from_utf8_lossy(frame))
        .collect();
    assert!(text.contains("/dev/pts is not of type devpts"), "{text}");
    assert!(!text.contains("escaped"), "{text}");
    pod.remove().await;
    environment.finish().await;
}
