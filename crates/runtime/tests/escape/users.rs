//! Containers in a user namespace: root inside is nobody outside, whatever capabilities it has.

use crate::environment::{Environment, Pod, sandbox_config, security};
use crate::support::{container, directory, refused, volume};
use skiff_cri::v1 as cri;
use std::os::unix::fs::{MetadataExt, PermissionsExt};

const HOST: u32 = 655_360;
const LENGTH: u32 = 65536;

fn mappings() -> Vec<cri::IdMapping> {
    vec![cri::IdMapping {
        host_id: HOST,
        container_id: 0,
        length: LENGTH,
    }]
}

fn namespace() -> cri::UserNamespace {
    cri::UserNamespace {
        mode: cri::NamespaceMode::Pod as i32,
        uids: mappings(),
        gids: mappings(),
    }
}

fn pod_config(environment: &Environment, name: &str) -> cri::PodSandboxConfig {
    let mut config = sandbox_config(environment, name);
    options(&mut config).userns_options = Some(namespace());
    config
}

fn options(config: &mut cri::PodSandboxConfig) -> &mut cri::NamespaceOption {
    let linux = config.linux.as_mut().expect("linux");
    let security = linux.security_context.as_mut().expect("security");
    security.namespace_options.as_mut().expect("namespaces")
}

/// As the kubelet asks for it; `unmasked` is `procMount: Unmasked`.
fn config(name: &str, script: &str, unmasked: bool) -> cri::ContainerConfig {
    let mut config = container(name, "", script);
    let security = security(&mut config);
    security
        .namespace_options
        .as_mut()
        .expect("namespaces")
        .userns_options = Some(namespace());
    if unmasked {
        security.masked_paths.clear();
        security.readonly_paths.clear();
    }
    config
}

fn mapped(at: &str, source: &std::path::Path) -> cri::Mount {
    cri::Mount {
        uid_mappings: mappings(),
        gid_mappings: mappings(),
        ..volume(at, source)
    }
}

fn add_capability(config: &mut cri::ContainerConfig, name: &str) {
    security(config)
        .capabilities
        .get_or_insert_default()
        .add_capabilities
        .push(name.into());
}

/// Every line that the script prints is a fault.
async fn silent(pod: &mut Pod, config: cri::ContainerConfig) {
    let name = config.metadata.as_ref().expect("metadata").name.clone();
    let (code, log) = pod.script(config).await;
    assert_eq!((code, log.as_str()), (0, ""), "{name}");
}

pub async fn root_inside() {
    let environment = Environment::new().await;
    let mut pod = Pod::run_with(&environment, pod_config(&environment, "root")).await;
    let files = directory(&environment, "files");
    std::fs::write(files.join("secret"), "for uid 0 of the volume").expect("write");
    std::fs::set_permissions(files.join("secret"), PermissionsExt::from_mode(0o600)).expect("mode");
    let host = directory(&environment, "host");
    std::fs::write(host.join("secret"), "for the host's root").expect("write");
    std::fs::set_permissions(host.join("secret"), PermissionsExt::from_mode(0o600)).expect("mode");

    // What a program expects of root in a container.
    let script = format!(
        "is() {{ [ \"$2\" = \"$3\" ] || echo \"$1 is $2, not $3\"; }}\n\
         is map \"$(echo $(cat /proc/self/uid_map))\" '0 {HOST} {LENGTH}'\n\
         is id \"$(id -u)-$(id -g)\" 0-0\n\
         owner() {{ busybox stat -c %u:%g $1; }}\n\
         for f in / /bin/busybox /etc/hosts /etc/resolv.conf /dev /dev/shm /proc/self/ /image /image/etc/passwd; do is $f $(owner $f) 0:0; done\n\
         touch /new /tmp/new /dev/shm/new && is /new $(owner /new) 0:0\n\
         busybox chown 1001:1002 /bin/busybox || echo cannot chown\n\
         is hostname $(hostname) root\n\
         cat /files/secret >/dev/null && touch /files/made && busybox chown 7:8 /files/made || echo cannot use the volume\n\
         echo x >/dev/null; head -c 1 /dev/urandom >/dev/null\n\
         cat /host/secret 2>/dev/null && echo read the file of the host\n\
         touch /host/made 2>/dev/null && echo made a file of the host\n\
         exit 0"
    );
    let mut main = config("main", &script, false);
    let mut image = mapped("/image", "".as_ref());
    image.image.clone_from(&main.image);
    main.mounts = vec![mapped("/files", &files), volume("/host", &host), image];
    silent(&mut pod, main).await;
    // On the host's disk: the volume's owners are the container's numbers, the layer's are the host's.
    let made = std::fs::metadata(files.join("made")).expect("made");
    assert_eq!((made.uid(), made.gid()), (7, 8));

    // The processes, as the host sees them; and what execs make of it.
    let sleeper = pod
        .start(config("sleeper", "touch /own; sleep 1000", false))
        .await;
    let pid = pod.pid(&sleeper).await;
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).expect("status");
    assert!(
        status.contains(&format!("Uid:\t{HOST}\t{HOST}\t{HOST}\t{HOST}")),
        "{status}"
    );
    let upper = environment
        .config
        .root
        .join("containers")
        .join(&sleeper)
        .join("upper");
    crate::environment::eventually("a file of the layer", async || {
        std::fs::metadata(upper.join("own")).is_ok_and(|made| made.uid() == HOST && made.gid() == HOST)
    })
    .await;
    let script = "cat /proc/self/uid_map; id -u; touch /by-exec; busybox stat -c %u /by-exec; cat /proc/1/comm; echo x >/dev/stderr";
    let text = pod.exec_text(&sleeper, &["sh", "-c", script]).await;
    let words: Vec<&str> = text.split_whitespace().collect();
    assert_eq!(words, ["0", "655360", "65536", "0", "0", "sleep"], "{text}");
    let namespace_of =
        |pid: &str, kind: &str| std::fs::read_link(format!("/proc/{pid}/ns/{kind}")).expect("namespace");
    for kind in ["user", "mnt", "pid", "net", "ipc", "uts", "cgroup"] {
        assert_ne!(
            namespace_of(&pid.to_string(), kind),
            namespace_of("self", kind),
            "{kind}"
        );
    }

    // Another user, a terminal, and a read-only root.
    let mut user = config(
        "user",
        "tty; id -u; echo x >$(tty); touch /x 2>/dev/null && echo wrote; true",
        false,
    );
    user.tty = true;
    security(&mut user).run_as_user = Some(cri::Int64Value { value: 1001 });
    security(&mut user).readonly_rootfs = true;
    let (code, log) = pod.script(user).await;
    let words: Vec<&str> = log.split_whitespace().collect();
    assert_eq!((code, words), (0, vec!["/dev/pts/0", "1001", "x"]));
    pod.remove().await;
    environment.finish().await;
}

/// With all that Pod Security allows such a pod, and more: `procMount: Unmasked`, root, capabilities of its namespace.
pub async fn root_stays_inside() {
    let environment = Environment::new().await;
    let kept = [
        "kernel/core_pattern",
        "kernel/modprobe",
        "vm/overcommit_memory",
        "fs/file-max",
    ];
    let read = || kept.map(|name| std::fs::read_to_string(format!("/proc/sys/{name}")).unwrap_or_default());
    let before = read();
    let mut pod = Pod::run_with(&environment, pod_config(&environment, "inside")).await;
    let files = directory(&environment, "files");
    std::fs::write(files.join("file"), "kept").expect("write");

    let script = "for f in kernel/core_pattern kernel/modprobe vm/overcommit_memory fs/file-max; do \
        [ -e /proc/sys/$f ] && { echo '|/tmp/evil' >/proc/sys/$f; } 2>/dev/null && echo wrote $f; done\n\
        { echo b >/proc/sysrq-trigger; } 2>/dev/null && echo wrote sysrq\n\
        { cat /proc/kcore; } >/dev/null 2>&1 && echo read kcore\n\
        for d in $(busybox find /sys/fs/cgroup -type d 2>/dev/null); do mkdir $d/x 2>/dev/null && echo made $d/x; done\n\
        busybox mknod /tmp/disk b 8 0 2>/dev/null && true </tmp/disk && echo opened a disk\n\
        busybox dmesg >/dev/null 2>&1 && echo read the log of the kernel\n\
        busybox hwclock -w 2>/dev/null && echo set the clock\n\
        busybox insmod /bin/busybox 2>/dev/null && echo loaded a module\n\
        exit 0";
    let all = |name: &str, script: &str| {
        let mut made = config(name, script, true);
        add_capability(&mut made, "ALL");
        made
    };
    silent(&mut pod, config("unmasked", script, true)).await;
    silent(&mut pod, all("all", script)).await;
    let script = "mkdir /own; mount -t proc x /own || echo cannot mount its own proc\n\
        { echo 1 >/own/sys/net/ipv4/ip_forward; } || echo cannot set a sysctl of its own network\n\
        hostname other || echo cannot set its own host name\n\
        exit 0";
    silent(&mut pod, all("own", script)).await;

    // Its own mounts are its own; those that the runtime has made hold.
    let script = "mount -t tmpfs x /tmp || echo cannot mount\n\
        mkdir /own; mount -t proc x /own 2>/dev/null && echo mounted a proc without masks\n\
        busybox umount /proc/kcore 2>/dev/null && echo unmasked a file\n\
        busybox umount /proc 2>/dev/null && echo took proc away\n\
        mount -o remount,bind,rw /proc/sys 2>/dev/null && echo made /proc/sys writable\n\
        mount -o remount,bind,rw /files 2>/dev/null && echo made the volume writable\n\
        { echo changed >/files/file; } 2>/dev/null && echo wrote to the volume\n\
        unshare -Um sh -c 'mount -o remount,bind,rw /files' 2>/dev/null && echo made the volume writable below\n\
        exit 0";
    let mut mounts = config("mounts", script, false);
    add_capability(&mut mounts, "SYS_ADMIN");
    let mut readonly = mapped("/files", &files);
    readonly.readonly = true;
    mounts.mounts = vec![readonly];
    silent(&mut pod, mounts).await;
    assert_eq!(std::fs::read_to_string(files.join("file")).expect("kept"), "kept");

    // A privileged container has the host's device nodes, and none of their owners' rights.
    let script = "for d in /dev/*; do if [ -b $d ]; then { head -c 1 $d >/dev/null; } 2>/dev/null && echo read $d; fi; done\n\
        { echo '|/tmp/evil' >/proc/sys/kernel/core_pattern; } 2>/dev/null && echo wrote core_pattern\n\
        { echo x >/dev/kmsg; } 2>/dev/null && echo wrote to the log of the kernel\n\
        exit 0";
    let mut privileged = config("privileged", script, true);
    security(&mut privileged).privileged = true;
    silent(&mut pod, privileged).await;
    assert_eq!(read(), before);
    pod.remove().await;
    environment.finish().await;
}

/// A shared pid namespace, sysctls of the pod, and a runtime that starts again.
pub async fn namespaces_of_the_pod() {
    let mut environment = Environment::new().await;
    let mut wanted = pod_config(&environment, "shared");
    options(&mut wanted).pid = cri::NamespaceMode::Pod as i32;
    let linux = wanted.linux.as_mut().expect("linux");
    for (name, value) in [("kernel.shm_rmid_forced", "1"), ("net.ipv4.tcp_syncookies", "0")] {
        linux.sysctls.insert(name.into(), value.into());
    }
    let mut pod = Pod::run_with(&environment, wanted).await;
    let mut one = config("one", "busybox printf SL > /proc/self/comm; sleep 1000", false);
    let shared = |config: &mut cri::ContainerConfig| {
        let options = security(config).namespace_options.as_mut().expect("namespaces");
        options.pid = cri::NamespaceMode::Pod as i32;
    };
    shared(&mut one);
    let one = pod.start(one).await;
    let runtime = environment.runtime.take().expect("started");
    runtime.stop().await;
    environment.start().await;
    pod.client = environment.client().await;
    let script = "[ $(cat /proc/sys/kernel/shm_rmid_forced) = 1 ] || echo no sysctl of ipc\n\
        [ $(cat /proc/sys/net/ipv4/tcp_syncookies) = 0 ] || echo no sysctl of the network\n\
        n=$(ps | grep -c 'sleep 1000'); [ $n -ge 2 ] || echo sees $n\n\
        kill -9 $(busybox pidof sleep) || echo cannot kill its neighbour\n\
        exit 0";
    let mut two = config("two", script, false);
    shared(&mut two);
    silent(&mut pod, two).await;
    assert_eq!(pod.wait(&one).await.exit_code, 137);
    pod.remove().await;
    environment.finish().await;
}

pub async fn what_cannot_be_mapped() {
    let environment = Environment::new().await;
    let mut client = environment.client().await;
    for change in [
        |options: &mut cri::NamespaceOption| options.network = cri::NamespaceMode::Node as i32,
        |options: &mut cri::NamespaceOption| options.pid = cri::NamespaceMode::Node as i32,
        |options: &mut cri::NamespaceOption| options.ipc = cri::NamespaceMode::Node as i32,
    ] {
        let mut wanted = pod_config(&environment, &format!("h{}", rand::random::<u32>()));
        change(options(&mut wanted));
        let request = cri::RunPodSandboxRequest {
            config: Some(wanted),
            runtime_handler: String::new(),
        };
        let error = client.run_pod_sandbox(request).await.expect_err("refused");
        assert!(error.message().contains("host's network, pid or ipc"), "{error}");
    }
    let mut pod = Pod::run_with(&environment, pod_config(&environment, "unmapped")).await;
    // A file system that the kernel does not map.
    let mut proc = config("proc", "true", false);
    proc.mounts = vec![mapped("/mnt", "/proc/sys".as_ref())];
    refused(&mut pod, proc, "failed to set MOUNT_ATTR_IDMAP on /proc/sys").await;
    let files = directory(&environment, "files");
    let mut other = config("other", "true", false);
    other.mounts = vec![mapped("/mnt", &files)];
    other.mounts[0].uid_mappings[0].host_id += 1;
    refused(&mut pod, other, "must be those of the pod's user namespace").await;
    let mut out = config("out", "true", false);
    security(&mut out)
        .namespace_options
        .as_mut()
        .expect("namespaces")
        .userns_options = Some(cri::UserNamespace {
        mode: cri::NamespaceMode::Node as i32,
        ..Default::default()
    });
    refused(&mut pod, out, "user namespace config for sandbox is different").await;
    let mut far = config("far", "true", false);
    security(&mut far).run_as_user = Some(cri::Int64Value { value: 70_000 });
    refused(&mut pod, far, "set uid").await;
    pod.remove().await;
    environment.finish().await;
}
