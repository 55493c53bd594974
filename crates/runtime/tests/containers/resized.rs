//! What changes of a container while it runs, and images as volumes.

use crate::environment::{BUSYBOX, Environment, Pod, container_config, eventually};
use skiff_cri::v1 as cri;

const LIMIT: &str =
    "cat /sys/fs/cgroup/memory/memory.limit_in_bytes 2>/dev/null || cat /sys/fs/cgroup/memory.max";

fn has_swap() -> bool {
    let swaps = std::fs::read_to_string("/proc/swaps").unwrap_or_default();
    swaps.lines().count() > 1
}

async fn limit(pod: &mut Pod, id: &str, bytes: i64) -> Result<(), tonic::Status> {
    let request = cri::UpdateContainerResourcesRequest {
        container_id: id.to_owned(),
        linux: Some(cri::LinuxContainerResources {
            cpu_period: 100_000,
            cpu_quota: 30_000,
            memory_limit_in_bytes: bytes,
            ..Default::default()
        }),
        ..Default::default()
    };
    pod.client.update_container_resources(request).await.map(drop)
}

pub async fn a_limit_below_what_is_used_is_refused() {
    let environment = Environment::new().await;
    let mut pod = Pod::run(&environment, "holder").await;
    let script = "dd if=/dev/zero of=/dev/shm/held bs=1M count=24 && touch /tmp/ready && exec sleep 1000";
    let mut config = container_config("main", script);
    config.linux.as_mut().expect("linux").resources = Some(cri::LinuxContainerResources {
        memory_limit_in_bytes: 64 << 20,
        ..Default::default()
    });
    let id = pod.start(config).await;
    eventually("the container holds memory", async || {
        let there = pod.exec(&id, &["ls", "/tmp/ready"]).await;
        there.is_ok_and(|answer| answer.exit_code == 0)
    })
    .await;
    if !has_swap() {
        let refused = limit(&mut pod, &id, 8 << 20).await;
        assert!(refused.is_err(), "24 MiB are in use");
        assert_eq!(pod.exec_text(&id, &["sh", "-c", LIMIT]).await, "67108864\n");
        // Nothing of it was taken, the quota neither.
        let resources = pod
            .status(&id)
            .await
            .resources
            .and_then(|r| r.linux)
            .expect("resources");
        assert_eq!(
            (resources.memory_limit_in_bytes, resources.cpu_quota),
            (64 << 20, 0)
        );
        let quota = "cat /sys/fs/cgroup/cpu/cpu.cfs_quota_us 2>/dev/null || cat /sys/fs/cgroup/cpu.max";
        let quota = pod.exec_text(&id, &["sh", "-c", quota]).await;
        assert!(quota.starts_with("-1") || quota.starts_with("max"), "{quota}");
    }
    limit(&mut pod, &id, 128 << 20).await.expect("grows");
    assert_eq!(pod.exec_text(&id, &["sh", "-c", LIMIT]).await, "134217728\n");
    let resources = pod
        .status(&id)
        .await
        .resources
        .and_then(|r| r.linux)
        .expect("resources");
    assert_eq!(
        (resources.memory_limit_in_bytes, resources.cpu_quota),
        (128 << 20, 30_000)
    );
    limit(&mut pod, &id, 64 << 20)
        .await
        .expect("shrinks to what is still enough");
    pod.remove().await;
    environment.finish().await;
}

fn image_mount(image: &str, at: &str, sub_path: &str) -> cri::Mount {
    cri::Mount {
        container_path: at.into(),
        image: Some(cri::ImageSpec {
            image: image.into(),
            ..Default::default()
        }),
        image_sub_path: sub_path.into(),
        readonly: true,
        ..Default::default()
    }
}

pub async fn images_are_mounted() {
    let environment = Environment::new().await;
    let mut pod = Pod::run(&environment, "volumes").await;
    let script = "cat /whole/etc/group; cat /file; ls /part; touch /whole/new || echo read-only; \
        /whole/bin/busybox true || echo not run; grep ' /whole ' /proc/mounts; exec sleep 1000";
    let mut config = container_config("main", script);
    config.mounts = vec![
        image_mount(BUSYBOX, "/whole", ""),
        image_mount(BUSYBOX, "/file", "etc/passwd"),
        image_mount(BUSYBOX, "/part", "etc"),
        // A link of the image is followed inside of the image.
        image_mount(BUSYBOX, "/linked", "bin/sh"),
    ];
    let id = pod.start(config.clone()).await;
    let path = pod.status(&id).await.log_path;
    let mut log = String::new();
    eventually("the container has looked", async || {
        log = crate::environment::log_text(&path);
        log.contains(" /whole ")
    })
    .await;
    for expected in ["log:x:1003:web", "web:x:1001", "group", "read-only", "not run"] {
        assert!(
            log.lines().any(|line| line.contains(expected)),
            "{expected}: {log}"
        );
    }
    let flags = log.lines().find(|line| line.contains(" /whole ")).expect("mount");
    for flag in ["ro,", "noexec", "nosuid", "nodev"] {
        assert!(flags.contains(flag), "{flag}: {flags}");
    }
    let linked = pod.exec_text(&id, &["sh", "-c", "head -c 4 /linked"]).await;
    assert_eq!(&linked.as_bytes()[1..4], b"ELF");
    // Nothing of it is to be seen on the node.
    let mounts = std::fs::read_to_string("/proc/self/mountinfo").expect("mounts");
    assert!(!mounts.contains(&format!("{id}/images")), "{mounts}");
    assert_eq!(pod.status(&id).await.mounts[1].image_sub_path, "etc/passwd");

    let mut refused = async |mount: cri::Mount, why: &str| {
        let mut config = container_config("refused", "true");
        config.mounts = vec![mount];
        let error = pod.create(config).await.expect_err(why);
        assert!(
            error.message().contains("ImageVolumeMountFailed") && error.message().contains(why),
            "{error}"
        );
    };
    refused(image_mount(BUSYBOX, "/x", "etc/none"), "does not exist").await;
    refused(image_mount(BUSYBOX, "/x", "../etc"), "leaves the image").await;
    refused(image_mount("example.com/none:1", "/x", ""), "not found").await;
    pod.remove().await;
    environment.finish().await;
}
