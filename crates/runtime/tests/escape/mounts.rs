//! Mounts that an image or a volume tries to lead astray.

use crate::environment::{Environment, Pod};
use crate::support::{MASKED, READONLY, container, directory, image, refused, volume};
use skiff_cri::v1 as cri;
use std::os::unix::fs::symlink;
use tar::EntryType::{Directory, Fifo, Regular, Symlink};

pub async fn linked_mount_points() {
    let environment = Environment::new().await;
    let mut pod = Pod::run(&environment, "links").await;
    let empty = directory(&environment, "empty");
    std::fs::create_dir(empty.join("p")).expect("make");
    let link = "must not be or lead through a symbolic link";
    for (name, entry, expected) in [
        ("proc-to-volume", ("proc", Symlink, "/m/p"), link),
        ("proc-relative", ("proc", Symlink, "m/p"), link),
        ("proc-to-itself", ("proc", Symlink, "proc"), link),
        ("proc-to-nothing", ("proc", Symlink, "/nothing"), link),
        (
            "proc-is-a-file",
            ("proc", Regular, "x"),
            "must be an ordinary directory",
        ),
        (
            "proc-is-a-pipe",
            ("proc", Fifo, ""),
            "must be an ordinary directory",
        ),
        ("sys-to-volume", ("sys", Symlink, "/m/p"), link),
        ("dev-to-volume", ("dev", Symlink, "/m/p"), link),
        (
            "etc-to-proc",
            ("etc", Symlink, "/proc/self"),
            "must not lead out of the image",
        ),
        (
            "etc-to-dev",
            ("etc", Symlink, "dev"),
            "must not lead out of the image",
        ),
    ] {
        // /etc of the image exists already, and is a directory.
        let mut entries = vec![("m", Directory, ""), entry];
        if entry.0 == "etc" {
            entries.insert(0, (".wh.etc", Regular, ""));
        }
        let image = image(&environment, name, &entries);
        let mut config = container(name, &image, "echo escaped");
        config.mounts.push(volume("/m", &empty));
        refused(&mut pod, config, expected).await;
        let left = std::fs::read_dir(empty.join("p")).expect("list").count();
        assert_eq!(left, 0, "{name}: nothing is made in the volume");
    }
    // Images that are made of links have /etc elsewhere: the runtime's files then go where it is.
    let entries = [
        (".wh.etc", Regular, ""),
        ("store/etc", Directory, ""),
        ("etc", Symlink, "/store/etc"),
    ];
    let image = image(&environment, "etc-in-image", &entries);
    let config = container("etc-in-image", &image, "cat /store/etc/hostname");
    assert_eq!(pod.script(config).await, (0, "links\n".into()));
    pod.remove().await;
    environment.finish().await;
}

pub async fn volumes_over_proc() {
    let environment = Environment::new().await;
    let mut pod = Pod::run(&environment, "over").await;
    let fake = directory(&environment, "fake");
    std::fs::write(fake.join("file"), "of the volume\n").expect("write");
    let entries = [
        ("sysctl", Symlink, "/proc/sys"),
        ("up", Symlink, "../../../../../proc/self/attr"),
        ("meminfo", Symlink, "/proc/meminfo"),
        ("top", Symlink, "/"),
    ];
    let image = image(&environment, "over", &entries);
    let inside = "cannot be mounted because it is inside /proc";
    for (at, source, expected) in [
        (
            "/proc",
            fake.as_path(),
            "cannot be mounted because it is not of type proc",
        ),
        (
            "/proc",
            "/proc/sys".as_ref(),
            "cannot be mounted because it is not of type proc",
        ),
        // Other processes than its own, and none of the masks would fit.
        (
            "/proc",
            "/proc".as_ref(),
            "/proc belongs to another pid namespace",
        ),
        ("/proc/self/attr", fake.as_path(), inside),
        ("/proc/sys", fake.as_path(), inside),
        ("/proc/sys/kernel", "/proc/sys/kernel".as_ref(), inside),
        ("/sysctl", fake.as_path(), inside),
        ("/sysctl/kernel", fake.as_path(), inside),
        ("/up", fake.as_path(), inside),
        ("/meminfo", &fake.join("file"), inside),
        ("/", fake.as_path(), "is the container's root"),
        ("/top", fake.as_path(), "is the container's root"),
        ("/tmp/../proc/sys", fake.as_path(), inside),
    ] {
        let mut config = container(&format!("c{}", rand::random::<u32>()), &image, "echo escaped");
        config.mounts.push(volume(at, source));
        refused(&mut pod, config, expected).await;
    }
    // As lxcfs does it.
    let mut config = container("lxcfs", &image, "cat /proc/meminfo");
    config.mounts.push(volume("/proc/meminfo", &fake.join("file")));
    assert_eq!(pod.script(config).await, (0, "of the volume\n".into()));
    pod.remove().await;
    environment.finish().await;
}

pub async fn linked_files() {
    let environment = Environment::new().await;
    let mut pod = Pod::run(&environment, "files").await;
    let entries = [
        ("victim", Regular, "untouched\n"),
        ("etc/resolv.conf", Symlink, "/victim"),
        ("etc/hosts", Symlink, "../../../../../../../victim"),
        ("etc/hostname", Symlink, "/proc/self/comm"),
    ];
    let image = image(&environment, "files", &entries);
    let script = "cat /victim /etc/resolv.conf /etc/hostname; grep -m 1 -o localhost /etc/hosts";
    let (code, log) = pod.script(container("own", &image, script)).await;
    assert_eq!(code, 0, "{log}");
    for line in ["untouched", "nameserver 10.96.0.10", "files", "localhost"] {
        assert!(log.lines().any(|have| have == line), "{line} in {log}");
    }

    // The kubelet's own files come as mounts of the pod: they stay inside the root, and off /proc.
    let file = environment.path("etc-hosts");
    std::fs::write(&file, "of the kubelet\n").expect("write");
    let mut config = container("given", &image, "cat /etc/hosts");
    config.mounts.push(volume("/etc/hosts", &file));
    assert_eq!(pod.script(config).await, (0, "of the kubelet\n".into()));
    let mut config = container("given-proc", &image, "echo escaped");
    config.mounts.push(volume("/etc/hostname", &file));
    refused(&mut pod, config, "inside /proc").await;

    // A source that became a link after the container was created.
    let source = directory(&environment, "source");
    let mut config = container("swapped", &image, "ls /v");
    config.mounts.push(volume("/v", &source));
    let container_id = pod.create(config).await.expect("created");
    std::fs::remove_dir(&source).expect("remove");
    symlink("/etc", &source).expect("link");
    let started = pod
        .client
        .start_container(cri::StartContainerRequest { container_id })
        .await;
    assert!(started.is_err(), "a volume that became a link");
    pod.remove().await;
    environment.finish().await;
}

pub async fn volume_over_dev() {
    let environment = Environment::new().await;
    let mut pod = Pod::run(&environment, "dev").await;
    let fake = directory(&environment, "fake");
    symlink("/proc/sysrq-trigger", fake.join("null")).expect("link");
    symlink("/proc/sys/kernel/core_pattern", fake.join("console")).expect("link");
    let before = names(&fake);
    // One stream, so that the order of the lines is that of the script.
    let script = "exec 2>&1; head -c 1 /proc/interrupts; head -c 1 /proc/keys; \
        echo x > /dev/console || echo refused; ls -1 /dev";
    for terminal in [false, true] {
        let mut config = container(&format!("dev-{terminal}"), "", script);
        config.tty = terminal;
        config.mounts.push(volume("/dev", &fake));
        let (_, log) = pod.script(config).await;
        let lines: Vec<&str> = log.lines().map(str::trim).collect();
        assert!(lines.contains(&"refused"), "{log}");
        assert_eq!(lines.last(), Some(&"null"), "{log}");
        assert_eq!(names(&fake), before, "nothing is made in the volume");
    }
    pod.remove().await;
    environment.finish().await;
}

fn names(directory: &std::path::Path) -> Vec<std::ffi::OsString> {
    let mut names: Vec<_> = std::fs::read_dir(directory)
        .expect("list")
        .map(|entry| entry.expect("entry").file_name())
        .collect();
    names.sort();
    names
}

pub async fn masks_hold() {
    let environment = Environment::new().await;
    let mut pod = Pod::run(&environment, "masks").await;
    let read = MASKED
        .iter()
        .map(|path| format!("[ -d {path} ] && ls {path} 2>/dev/null || head -c 1 {path} 2>/dev/null;"))
        .collect::<String>();
    let write = READONLY
        .iter()
        .map(|path| {
            format!("[ -e {path} ] && ( [ -d {path} ] && mkdir {path}/x || : > {path} ) && echo {path};")
        })
        .collect::<String>();
    // All capabilities but no filter: what holds must be the mounts.
    let script = format!(
        "{{ {read} {write} echo x > /proc/sys/kernel/core_pattern && echo core_pattern; \
         echo 1 > /proc/sys/kernel/sysrq && echo sysrq; \
         unshare -Um sh -c 'mount -t proc x /tmp && echo new proc in a user namespace'; \
         unshare -Ump sh -c 'mount -t proc x /tmp && echo new proc in new namespaces'; }} 2>/dev/null; echo end"
    );
    let (_, log) = pod.script(container("masked", "", &script)).await;
    assert_eq!(log, "end\n");

    // Nothing that is mounted inside reaches the host, and nothing of the host comes in.
    let own = directory(&environment, "own");
    for privileged in [false, true] {
        let script = "grep -E ' (shared|master):' /proc/self/mountinfo; echo end";
        let mut config = container(&format!("propagation-{privileged}"), "", script);
        crate::environment::security(&mut config).privileged = privileged;
        config.mounts.push(volume("/own", &own));
        assert_eq!(pod.script(config).await.1, "end\n");
    }

    // Where a path is masked twice, or below a masked one, the upper mask counts.
    let mut config = container("twice", "", "head -c 1 /proc/version; ls /proc/fs; echo end");
    let security = crate::environment::security(&mut config);
    for path in ["/proc/version", "/proc/version", "/proc/fs/nfsd", "/proc/fs"] {
        security.masked_paths.push(path.into());
    }
    assert_eq!(pod.script(config).await.1, "end\n");

    // A volume on /sys that answers for the kernel: no mask follows its links.
    let fake = directory(&environment, "sys");
    symlink("/tmp", fake.join("firmware")).expect("link");
    let mut config = container("fake-sys", "", "echo escaped");
    config.mounts.push(volume("/sys", &fake));
    refused(&mut pod, config, "symbolic link").await;
    pod.remove().await;
    environment.finish().await;
}

/// One container turns a directory of a shared volume into a link and back while others are started that
/// have a volume below it.
pub async fn shared_volume_race() {
    let environment = Environment::new().await;
    let mut pod = Pod::run(&environment, "race").await;
    let (shared, inner) = (
        directory(&environment, "shared"),
        directory(&environment, "inner"),
    );
    std::fs::write(inner.join("mark"), "inner").expect("write");
    let flip = "cd /v; mkdir -p a/b; while :; do mv a c; busybox ln -s ../../../../../../proc a; \
        busybox rm a; busybox ln -s / a; busybox rm a; mv c a; done 2>/dev/null";
    let mut attacker = container("attacker", "", &flip.replace("mv ", "busybox mv "));
    attacker.mounts.push(volume("/v", &shared));
    let attacker = pod.start(attacker).await;
    let mut started = 0;
    for round in 0..12 {
        let script = "cat /proc/self/mountinfo; echo end";
        let mut config = container(&format!("victim{round}"), "", script);
        config.mounts.push(volume("/v", &shared));
        config.mounts.push(volume("/v/a/b", &inner));
        let id = pod.create(config).await.expect("created");
        let request = cri::StartContainerRequest {
            container_id: id.clone(),
        };
        if pod.client.start_container(request).await.is_err() {
            continue;
        }
        started += 1;
        let status = pod.wait(&id).await;
        let log = crate::environment::log_text(&status.log_path);
        assert!(log.ends_with("end\n"), "{log}");
        // Below the volume, or where a link led within the root; never on the host's root or on /proc.
        for line in log.lines().filter(|line| line.contains("/inner ")) {
            let at = line.split(' ').nth(4).unwrap_or_default();
            assert!(at.starts_with("/v/") || at == "/b", "{line}");
        }
    }
    println!("{started} of 12 containers started in spite of the race");
    pod.client
        .stop_container(cri::StopContainerRequest {
            container_id: attacker,
            timeout: 0,
        })
        .await
        .expect("stops");
    pod.remove().await;
    environment.finish().await;
}
