//! Mounts that are made after a container was started, and who sees them.

use crate::environment::{Environment, Pod, container_config, security};
use skiff_cri::v1 as cri;
use std::path::{Path, PathBuf};

/// A directory that is a shared mount, whatever the machine's root is.
struct Shared(PathBuf);

impl Shared {
    fn new(path: PathBuf, propagation: rustix::mount::MountPropagationFlags) -> Shared {
        std::fs::create_dir(&path).expect("make");
        rustix::mount::mount_bind(&path, &path).expect("bind");
        rustix::mount::mount_change(&path, propagation).expect("propagation");
        Shared(path)
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        let _ = rustix::mount::unmount(&self.0, rustix::mount::UnmountFlags::DETACH);
    }
}

fn config(name: &str, directory: &Path, propagation: cri::MountPropagation) -> cri::ContainerConfig {
    let mut config = container_config(name, &format!("mkdir -p /mnt/{name}; exec sleep 1000"));
    let security = security(&mut config);
    security.privileged = true;
    security.seccomp = None;
    config.mounts.push(cri::Mount {
        container_path: "/mnt".into(),
        host_path: directory.to_string_lossy().into_owned(),
        propagation: propagation as i32,
        ..Default::default()
    });
    config
}

pub async fn scopes() {
    use cri::MountPropagation::{
        PropagationBidirectional as Bidirectional, PropagationHostToContainer as HostToContainer,
        PropagationPrivate as Private,
    };
    let environment = Environment::new().await;
    let shared = Shared::new(
        environment.path("shared"),
        rustix::mount::MountPropagationFlags::SHARED,
    );
    let mut pod = Pod::run(&environment, "propagation").await;
    let containers = [
        ("both", Bidirectional, &["both", "host"][..]),
        ("down", HostToContainer, &["both", "down", "host"]),
        ("none", Private, &["none"]),
    ];
    let mut ids = Vec::new();
    for (name, propagation, _) in containers {
        let id = pod.start(config(name, &shared.0, propagation)).await;
        crate::environment::eventually("its directory is there", async || shared.0.join(name).exists()).await;
        ids.push(id);
    }
    for ((name, _, _), id) in containers.iter().zip(&ids) {
        let script = format!("mount -t tmpfs x /mnt/{name} && echo {name} > /mnt/{name}/file");
        pod.exec_text(id, &["sh", "-c", &script]).await;
    }
    let host = shared.0.join("host");
    std::fs::create_dir(&host).expect("make");
    rustix::mount::mount("x", &host, "tmpfs", rustix::mount::MountFlags::empty(), None).expect("mount");
    std::fs::write(host.join("file"), "host\n").expect("write");

    for ((name, _, expected), id) in containers.iter().zip(&ids) {
        let seen = pod
            .exec_text(id, &["sh", "-c", "cat /mnt/*/file 2>/dev/null; true"])
            .await;
        assert_eq!(seen.lines().collect::<Vec<_>>(), *expected, "{name}");
    }
    assert!(shared.0.join("both/file").exists(), "the host sees it");
    assert!(!shared.0.join("down/file").exists() && !shared.0.join("none/file").exists());

    // What the container unmounts is unmounted on the host as well.
    pod.exec_text(&ids[0], &["busybox", "umount", "/mnt/both"]).await;
    assert!(!shared.0.join("both/file").exists());
    let _ = rustix::mount::unmount(&host, rustix::mount::UnmountFlags::DETACH);

    // A source that could not propagate is refused, as with containerd.
    let private = Shared::new(
        environment.path("private"),
        rustix::mount::MountPropagationFlags::PRIVATE,
    );
    for (name, propagation, expected) in [
        ("both", Bidirectional, "but it is not a shared mount"),
        ("down", HostToContainer, "but it is not a shared or slave mount"),
    ] {
        let name = format!("{name}-refused");
        let error = pod
            .create(config(&name, &private.0, propagation))
            .await
            .expect_err(&name);
        assert!(error.message().contains(expected), "{}", error.message());
    }
    pod.start(config("none-private", &private.0, Private)).await;
    pod.remove().await;
    drop((shared, private));
    environment.finish().await;
}
