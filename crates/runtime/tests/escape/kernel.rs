//! What the kernel offers beside files: cgroups, devices, sysctls, seccomp.

use crate::environment::{Environment, Pod, sandbox_config, security};
use crate::support::{container, image, refused};
use skiff_cri::v1 as cri;
use tar::EntryType::{Block, Char};

pub async fn cgroups() {
    let environment = Environment::new().await;
    let mut pod = Pod::run(&environment, "cgroups").await;
    // Default capabilities and no filter: what holds are mounts and namespaces.
    let script = "{ for f in $(busybox find /sys/fs/cgroup -name release_agent -o -name cgroup.procs -o -name devices.allow); do \
        echo 1 > $f && echo wrote $f; done; \
        for d in $(busybox find /sys/fs/cgroup -type d); do mkdir $d/x && echo made $d/x; done; \
        for k in 'cgroup -o memory' 'cgroup -o rdma' 'cgroup -o none,name=x' cgroup2; do \
        mount -t $k x /tmp && echo mounted $k; \
        unshare -Urm sh -c \"mount -t $k x /tmp\" && echo mounted $k in a user namespace; done; } 2>/dev/null; \
        cat /proc/self/cgroup";
    let (_, log) = pod.script(container("main", "", script)).await;
    assert!(!log.is_empty());
    for line in log.lines() {
        let path = line.splitn(3, ':').nth(2);
        // A hierarchy that the runtime does not use shows the way up to it, and no names.
        let hidden = path.is_some_and(|path| path == "/" || path.starts_with("/.."));
        assert!(
            hidden && !line.contains(&environment.config.cgroup_parent),
            "{log}"
        );
    }
    pod.remove().await;
    environment.finish().await;
}

pub async fn devices() {
    let environment = Environment::new().await;
    let mut pod = Pod::run(&environment, "devices").await;
    let entries = [
        ("mem", Char, "1:1"),
        ("port", Char, "1:4"),
        ("kmsg", Char, "1:11"),
        ("tty0", Char, "4:0"),
        ("kvm", Char, "10:232"),
        ("loop", Char, "10:237"),
        ("disk", Block, "8:0"),
        ("loop0", Block, "7:0"),
        ("virtual", Block, "254:0"),
    ];
    let image = image(&environment, "devices", &entries);
    let script = entries
        .iter()
        .map(|(name, kind, numbers)| {
            let kind = if *kind == Char { "c" } else { "b" };
            let numbers = numbers.replace(':', " ");
            format!(
                "[ -{kind} /{name} ] || echo no node; true < /{name} && echo opened; true > /{name} && echo written; \
                 busybox mknod /tmp/{name} {kind} {numbers}; true < /tmp/{name} && echo opened own;"
            )
        })
        .collect::<String>();
    let (_, log) = pod.script(container("main", &image, &script)).await;
    for line in log.lines() {
        assert!(line.ends_with("Operation not permitted"), "{line}");
    }
    assert_eq!(log.lines().count(), 3 * entries.len(), "{log}");
    pod.remove().await;
    environment.finish().await;
}

pub async fn sysctls() {
    let environment = Environment::new().await;
    let pattern = || std::fs::read_to_string("/proc/sys/kernel/core_pattern").expect("core_pattern");
    let forward = || std::fs::read_to_string("/proc/sys/net/ipv4/ip_forward").expect("ip_forward");
    let before = (pattern(), forward());
    let evil = "|/tmp/evil";
    for (host_network, name, value) in [
        (false, "kernel.core_pattern", evil),
        (false, "kernel/core_pattern", evil),
        (
            false,
            "kernel.shm_rmid_forced",
            "1+kernel.core_pattern=|/tmp/evil",
        ),
        (false, "kernel.shm/../core_pattern", evil),
        (false, "net.ipv4/../../kernel/core_pattern", evil),
        (false, "net..ipv4.ip_forward", "1"),
        (false, "net.", "1"),
        (false, "vm.panic_on_oom", "1"),
        (false, "fs.file-max", "1000"),
        (false, "", evil),
        (true, "net.ipv4.ip_forward", "0"),
    ] {
        let mut config = sandbox_config(&environment, &format!("s{}", rand::random::<u32>()));
        let linux = config.linux.as_mut().expect("linux");
        linux.sysctls.insert(name.into(), value.into());
        if host_network {
            let security = linux.security_context.as_mut().expect("security");
            security.namespace_options.as_mut().expect("namespaces").network =
                cri::NamespaceMode::Node as i32;
        }
        let request = cri::RunPodSandboxRequest {
            config: Some(config),
            runtime_handler: String::new(),
        };
        let mut client = environment.client().await;
        client.run_pod_sandbox(request).await.expect_err(name);
        assert_eq!((pattern(), forward()), before, "{name}");
    }
    environment.finish().await;
}

/// Profiles that are no profile. A filter that was not loaded as asked would be none.
pub async fn seccomp_profiles() {
    let environment = Environment::new().await;
    let mut pod = Pod::run(&environment, "seccomp").await;
    let many = (0..70_000)
        .map(|number| {
            format!(
                r#"{{"names":["read"],"action":"SCMP_ACT_ERRNO","args":[{{"index":0,"value":{number},"op":"SCMP_CMP_EQ"}}]}}"#
            )
        })
        .collect::<Vec<_>>()
        .join(",");
    let file = environment.path("profile.json");
    for (at, body) in [
        String::new(),
        "{}".into(),
        "[".repeat(100_000),
        r#"{"defaultAction":"SCMP_ACT_WHATEVER"}"#.into(),
        r#"{"defaultAction":"SCMP_ACT_NOTIFY"}"#.into(),
        r#"{"defaultAction":"SCMP_ACT_ALLOW","syscalls":[{"names":["mkdir"],"action":"SCMP_ACT_NOTIFY"}]}"#.into(),
        r#"{"defaultAction":"SCMP_ACT_ALLOW","syscalls":[{"names":["mkdir"],"action":"SCMP_ACT_ERRNO","args":[{"index":9,"value":0,"op":"SCMP_CMP_EQ"}]}]}"#.into(),
        format!(r#"{{"defaultAction":"SCMP_ACT_ALLOW","syscalls":[{many}]}}"#),
        " ".repeat(5 << 20),
    ]
    .into_iter()
    .enumerate()
    {
        std::fs::write(&file, &body).expect("write");
        let mut config = container(&format!("profile{at}"), "", "echo started");
        security(&mut config).seccomp = Some(cri::SecurityProfile {
            profile_type: cri::security_profile::ProfileType::Localhost as i32,
            localhost_ref: file.to_string_lossy().into_owned(),
        });
        refused(&mut pod, config, "seccomp").await;
    }
    for path in ["/dev/zero", "/nothing", "/proc/self/mem", "/"] {
        let mut config = container(&format!("path{}", path.len()), "", "echo started");
        security(&mut config).seccomp = Some(cri::SecurityProfile {
            profile_type: cri::security_profile::ProfileType::Localhost as i32,
            localhost_ref: path.into(),
        });
        refused(&mut pod, config, "seccomp").await;
    }
    pod.remove().await;
    environment.finish().await;
}
