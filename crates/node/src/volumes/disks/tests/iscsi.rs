//! iSCSI: what `iscsiadm` is asked, which sessions are ended, and what a new life of the node finds.

use super::*;

fn source(portal: &str, lun: u32) -> Value {
    json!({"iscsi": {"targetPortal": portal, "iqn": IQN, "lun": lun}})
}

#[tokio::test]
async fn a_device_comes_and_goes() {
    let machine = Machine::new();
    let volumes = machine.volumes();
    let pod = claiming("u1", "Block", source("10.0.0.7", 1));
    let link = set_up(&volumes, &pod).await.unwrap();
    assert_eq!(
        link,
        machine.path("root/pods/u1/volumeDevices/kubernetes.io~iscsi/pv")
    );
    assert_eq!(std::fs::read_to_string(&link).unwrap(), "disk1");
    let discovery = "-m discoverydb -t sendtargets -p 10.0.0.7:3260 -I default";
    let node = format!("-m node -p 10.0.0.7:3260 -T {IQN} -I default");
    let device = machine.path("dev/sd7l1").canonicalize().unwrap();
    assert_eq!(
        machine.log(),
        [
            "-m iface -I default -o show".to_owned(),
            format!("{discovery} -o new"),
            format!("{discovery} --discover"),
            format!("{node} -o update -n node.session.scan -v manual"),
            format!("{node} --login"),
            format!("-m node -p 10.0.0.7:3260 -T {IQN} -o update -n node.startup -v manual"),
            format!("losetup -f {}", device.display()),
        ]
    );
    assert_eq!(machine.read("sys/class/scsi_host/host7/scan"), "0 0 1");
    // It was noted before.
    let notes = std::fs::read_dir(machine.path("notes-at-login")).unwrap();
    let noted: Vec<String> = notes
        .map(|note| std::fs::read_to_string(note.unwrap().path()).unwrap())
        .collect();
    assert!(
        noted.len() == 1 && noted[0].contains(r#""made":[{"portal":"10.0.0.7:3260""#),
        "{noted:?}"
    );
    // A second pass asks nothing new.
    set_up(&volumes, &pod).await.unwrap();
    assert!(machine.log().is_empty());
    tear_down(&volumes, "u1").await;
    assert_eq!(
        machine.log(),
        [
            format!("losetup -d {}", machine.path("dev/loop9").display()),
            format!("blockdev --flushbufs {}", machine.path("dev/sd7l1").display()),
            format!("{node} --logout"),
            format!("{node} -o delete"),
        ]
    );
    assert_eq!(machine.read("sys/block/sd7l1/device/delete"), "1");
    assert_eq!(machine.notes(), 0);
}

#[tokio::test]
async fn sessions_of_others_stay() {
    let machine = Machine::new();
    machine.by_hand(&["-m", "node", "-p", "10.0.0.7:3260", "-T", IQN, "--login"]);
    machine.log();
    let volumes = machine.volumes();
    let pod = claiming("u1", "Block", source("10.0.0.7", 1));
    set_up(&volumes, &pod).await.unwrap();
    let log = machine.log();
    assert_eq!(calls(&log, "--login"), 0, "{log:?}");
    tear_down(&volumes, "u1").await;
    let log = machine.log();
    assert_eq!(log.len(), 1, "{log:?}");
    assert!(log[0].starts_with("losetup -d "), "{log:?}");
    assert_eq!(machine.read("sys/block/sd7l1/device/delete"), "");
    assert_eq!(machine.notes(), 0);
}

/// The session is made for one disk, and ended with the other.
#[tokio::test]
async fn the_last_user_ends_the_session() {
    let machine = Machine::new();
    let volumes = machine.volumes();
    let first = claiming("u1", "Block", source("10.0.0.7", 1));
    let again = claiming("u2", "Block", source("10.0.0.7", 1));
    let other = claiming("u3", "Block", source("10.0.0.7", 2));
    for pod in [&first, &again, &other] {
        set_up(&volumes, pod).await.unwrap();
    }
    assert_eq!(calls(&machine.log(), "--login"), 1);
    tear_down(&volumes, "u1").await;
    assert!(machine.log().is_empty());
    tear_down(&volumes, "u2").await;
    assert_eq!(calls(&machine.log(), "--logout"), 0);
    assert_eq!(machine.read("sys/block/sd7l1/device/delete"), "1");
    assert_eq!(machine.read("sys/block/sd7l2/device/delete"), "");
    tear_down(&volumes, "u3").await;
    assert_eq!(calls(&machine.log(), "--logout"), 1);
    assert_eq!(machine.notes(), 0);
}

#[tokio::test]
async fn another_life_of_the_node_goes_on() {
    let machine = Machine::new();
    let pod = claiming("u1", "Block", source("10.0.0.7", 1));
    set_up(&machine.volumes(), &pod).await.unwrap();
    machine.log();
    let volumes = machine.volumes();
    set_up(&volumes, &pod).await.unwrap();
    assert_eq!(calls(&machine.log(), "--login"), 0);
    tear_down(&volumes, "u1").await;
    assert_eq!(calls(&machine.log(), "--logout"), 1);
    // The pod went while there was no node.
    set_up(&machine.volumes(), &pod).await.unwrap();
    std::fs::remove_dir_all(machine.path("root/pods/u1")).unwrap();
    machine.log();
    let disks = machine.disks();
    let places: Vec<String> = disks.notes.lock().keys().cloned().collect();
    assert_eq!(places.len(), 1);
    assert!(disks.retrying.load(Ordering::SeqCst), "nobody looks after it");
    disks.detach_if_unused(&places[0]).await.unwrap();
    assert_eq!(calls(&machine.log(), "--logout"), 1);
    assert_eq!(machine.notes(), 0);
    // After a boot the session is not the one that was made.
    set_up(&machine.volumes(), &pod).await.unwrap();
    machine.log();
    let host = Host {
        boot: "another".to_owned(),
        ..machine.host()
    };
    let disks = Disks::new(&machine.path("root"), host);
    disks.pod_is_gone("u1").await;
    assert_eq!(calls(&machine.log(), "--logout"), 0);
    assert_eq!(machine.notes(), 0);
}

#[tokio::test]
async fn several_portals_and_multipath() {
    let machine = Machine::new();
    let volumes = machine.volumes();
    for path in ["sd7l1", "sd8l1"] {
        std::fs::create_dir_all(machine.path("sys/block/dm-3/slaves").join(path)).unwrap();
    }
    std::fs::write(machine.path("dev/dm-3"), "joined").unwrap();
    std::fs::write(machine.path("down9"), "").unwrap();
    let mut several = source("10.0.0.9", 1);
    several["iscsi"]["portals"] = json!(["10.0.0.7", "10.0.0.8"]);
    let pod = claiming("u1", "Block", several);
    let link = set_up(&volumes, &pod).await.unwrap();
    assert_eq!(std::fs::read_to_string(link).unwrap(), "joined");
    let log = machine.log();
    assert_eq!(calls(&log, "--login"), 2, "{log:?}");
    assert_eq!(
        calls(&log, "-p 10.0.0.9:3260 -I default --discover"),
        2,
        "{log:?}"
    );
    assert_eq!(calls(&log, "-p 10.0.0.9:3260 -I default -o delete"), 2, "{log:?}");
    tear_down(&volumes, "u1").await;
    let log = machine.log();
    let device = machine.path("dev/dm-3").canonicalize().unwrap();
    assert_eq!(
        calls(&log, &format!("multipath -f {}", device.display())),
        1,
        "{log:?}"
    );
    assert_eq!(calls(&log, "--logout"), 2, "{log:?}");
    assert_eq!(calls(&log, "10.0.0.9"), 0, "{log:?}");
    for path in ["sd7l1", "sd8l1"] {
        assert_eq!(machine.read(&format!("sys/block/{path}/device/delete")), "1");
    }
}

#[tokio::test]
async fn secrets_and_names_of_initiators() {
    let machine = Machine::new();
    let volumes = machine.volumes();
    let mut named = source("10.0.0.7", 1);
    let fields = named["iscsi"].as_object_mut().unwrap();
    fields.insert("initiatorName".to_owned(), json!("iqn.2026-01.example:me"));
    fields.insert("chapAuthDiscovery".to_owned(), json!(true));
    fields.insert("chapAuthSession".to_owned(), json!(true));
    fields.insert("secretRef".to_owned(), json!({"name": "chap"}));
    let pod = claiming("u1", "Block", named.clone());
    set_up(&volumes, &pod).await.unwrap();
    let iface = "10.0.0.7:3260:pv";
    let discovery = format!("-m discoverydb -t sendtargets -p 10.0.0.7:3260 -I {iface}");
    let node = format!("-m node -p 10.0.0.7:3260 -T {IQN} -I {iface}");
    let log = machine.log();
    assert_eq!(
        log[..15],
        [
            "-m iface -I default -o show".to_owned(),
            format!("-m iface -I {iface} -o new"),
            format!("-m iface -I {iface} -o update -n iface.initiatorname -v iqn.2026-01.example:me"),
            format!("-m iface -I {iface} -o update -n iface.mtu -v 0"),
            format!("-m iface -I {iface} -o update -n iface.transport_name -v tcp"),
            format!("{discovery} -o new"),
            format!("{discovery} -o update -n discovery.sendtargets.auth.authmethod -v CHAP"),
            format!("{discovery} -o update -n discovery.sendtargets.auth.username -v me"),
            format!("{discovery} --discover"),
            format!("{node} -o update -n node.session.scan -v manual"),
            format!("{node} -o update -n node.session.auth.authmethod -v CHAP"),
            format!("{node} -o update -n node.session.auth.username -v me"),
            format!("{node} -o update -n node.session.auth.password -v hush"),
            format!("{node} --login"),
            format!("-m node -p 10.0.0.7:3260 -T {IQN} -o update -n node.startup -v manual"),
        ]
    );
    let notes = std::fs::read_dir(machine.path("root/disks")).unwrap();
    for note in notes {
        let text = std::fs::read_to_string(note.unwrap().path()).unwrap();
        assert!(!text.contains("hush"), "{text}");
    }
    tear_down(&volumes, "u1").await;
    let log = machine.log();
    assert_eq!(
        log.last(),
        Some(&format!("-m iface -I {iface} -o delete")),
        "{log:?}"
    );
    named["iscsi"]["secretRef"] = json!({"name": "none"});
    let error = set_up(&volumes, &claiming("u2", "Block", named))
        .await
        .unwrap_err();
    assert!(
        error.contains("couldn't get secret ns/none error: secrets \"none\" not found"),
        "{error}"
    );
    assert!(machine.log().is_empty());
}

#[tokio::test]
async fn hostile_values_reach_no_tool() {
    let machine = Machine::new();
    let volumes = machine.volumes();
    let check = async |field: &str, value: Value| {
        let mut hostile = source("10.0.0.7", 1);
        hostile["iscsi"][field] = value.clone();
        let error = set_up(&volumes, &pod("u1", hostile)).await.unwrap_err();
        assert!(
            error.starts_with("MountVolume.SetUp failed for volume \"v\" : "),
            "{field} {value}: {error}"
        );
        assert!(machine.log().is_empty(), "{field} {value}");
        assert_eq!(machine.notes(), 0, "{field} {value}");
    };
    for value in ["../../etc", "-p", "a b", "a\nb", "..", "10.0.0.7:3260,1"] {
        check("targetPortal", json!(value)).await;
        check("portals", json!([value])).await;
    }
    for value in ["iqn.2026-01.example:../../x", "--logoutall=all", "iqn.a\nb", "x"] {
        check("iqn", json!(value)).await;
        check("initiatorName", json!(value)).await;
    }
    for value in ["../x", "-I", "."] {
        check("iscsiInterface", json!(value)).await;
    }
    for value in ["../../bin/sh", "-t", "ext4 x"] {
        check("fsType", json!(value)).await;
    }
}

#[tokio::test]
async fn what_is_missing_is_named() {
    let machine = Machine::new();
    let volumes = machine.volumes();
    std::fs::write(machine.path("down7"), "").unwrap();
    let error = set_up(&volumes, &pod("u1", source("10.0.0.7", 1)))
        .await
        .unwrap_err();
    assert!(
        error.starts_with(
            "MountVolume.WaitForAttach failed for volume \"v\" : failed to get any path for iscsi disk, last err seen:\n\
             iscsi: failed to sendtargets to portal 10.0.0.7:3260: exit status 4, output: no route"
        ),
        "{error}"
    );
    assert!(error.contains("load the module iscsi_tcp"), "{error}");
    tear_down(&volumes, "u1").await;
    assert_eq!((calls(&machine.log(), "--logout"), machine.notes()), (0, 0));
    let host = Host {
        folders: vec![machine.path("dev")],
        ..machine.host()
    };
    let volumes = Volumes {
        disks: Disks::new(&machine.path("root"), host),
        ..machine.volumes()
    };
    let error = set_up(&volumes, &pod("u1", source("10.0.0.7", 1)))
        .await
        .unwrap_err();
    assert!(
        error.contains("iscsi: this node has no iscsiadm: install open-iscsi (Debian)"),
        "{error}"
    );
}

/// The pod is deleted while its disk is waited for: the session is ended all the same.
#[tokio::test]
async fn a_caller_may_give_up() {
    let machine = Machine::new();
    std::fs::remove_file(machine.path("disk1")).unwrap();
    let volumes = machine.volumes();
    let pod = claiming("u1", "Block", source("10.0.0.7", 1));
    let given_up = tokio::time::timeout(Duration::from_secs(2), set_up(&volumes, &pod)).await;
    assert!(given_up.is_err(), "{given_up:?}");
    assert_eq!(calls(&machine.log(), "--login"), 1);
    tear_down(&volumes, "u1").await;
    assert_eq!(calls(&machine.log(), "--logout"), 1);
    assert_eq!(machine.notes(), 0);
}

/// What cannot be taken away stays noted, and is tried again.
#[tokio::test]
async fn a_failed_logout_is_remembered() {
    let machine = Machine::new();
    let volumes = machine.volumes();
    let pod = claiming("u1", "Block", source("10.0.0.7", 1));
    set_up(&volumes, &pod).await.unwrap();
    machine.tool("iscsiadm", "exit 8");
    tear_down(&volumes, "u1").await;
    assert_eq!(machine.notes(), 1);
    assert!(volumes.disks.retrying.load(Ordering::SeqCst));
    machine.tool("iscsiadm", ISCSIADM);
    machine.log();
    let place = volumes.disks.notes.lock().keys().next().cloned().unwrap();
    volumes.disks.detach_if_unused(&place).await.unwrap();
    assert_eq!((calls(&machine.log(), "--logout"), machine.notes()), (1, 0));
}

/// Another cluster of the machine has the target's other disk by the session that was made for this one. It has the device for a pod, which only
/// the loop device tells.
#[tokio::test]
async fn a_session_stays_while_somebody_has_a_disk_of_it() {
    let machine = Machine::new();
    let volumes = machine.volumes();
    let pod = claiming("u1", "Block", source("10.0.0.7", 1));
    set_up(&volumes, &pod).await.unwrap();
    let other = machine.other_cluster();
    let theirs = claiming("u2", "Block", source("10.0.0.7", 2));
    set_up(&other, &theirs).await.unwrap();
    assert_eq!(calls(&machine.log(), "--login"), 1);
    tear_down(&volumes, "u1").await;
    let left = |log: &[String]| calls(log, "--logout") == 0 && calls(log, "-o delete") == 0;
    let log = machine.log();
    assert!(left(&log), "{log:?}");
    assert_eq!(machine.read("sys/block/sd7l1/device/delete"), "1");
    assert_eq!(machine.read("sys/block/sd7l2/device/delete"), "");
    assert_eq!(machine.notes(), 1);
    assert!(volumes.disks.retrying.load(Ordering::SeqCst));
    let in_use = format!(
        "device {} of the session is still in use",
        machine.path("dev/sd7l2").display()
    );
    let place = Machine::place(&volumes);
    let again = volumes.disks.detach_if_unused(&place).await;
    assert_eq!(again, Err(in_use.clone()));
    let deleted = machine.remove_all().await.unwrap_err();
    assert_eq!(deleted, format!("{place}: {in_use}"));
    let log = machine.log();
    assert!(left(&log), "{log:?}");
    assert_eq!(machine.notes(), 1);
    tear_down(&other, "u2").await;
    assert_eq!(calls(&machine.log(), "--logout"), 0);
    volumes.disks.detach_if_unused(&place).await.unwrap();
    assert_eq!((calls(&machine.log(), "--logout"), machine.notes()), (1, 0));
}

/// Nor is a device taken away that another cluster has for a pod, or somebody by a loop device on a partition.
#[tokio::test]
async fn a_device_below_a_loop_device_stays() {
    let machine = Machine::new();
    let volumes = machine.volumes();
    let pod = claiming("u1", "Block", source("10.0.0.7", 1));
    set_up(&volumes, &pod).await.unwrap();
    let other = machine.other_cluster();
    let theirs = claiming("u2", "Block", source("10.0.0.7", 1));
    set_up(&other, &theirs).await.unwrap();
    assert_eq!(calls(&machine.log(), "losetup -f"), 2);
    tear_down(&volumes, "u1").await;
    let log = machine.log();
    assert!(log.len() == 1 && log[0].starts_with("losetup -d "), "{log:?}");
    let in_use = format!("device {} is still in use", machine.path("dev/sd7l1").display());
    let place = Machine::place(&volumes);
    // The loop device that is left is not taken for that of the pod.
    let again = volumes.disks.detach_if_unused(&place).await;
    assert_eq!(again, Err(in_use.clone()));
    assert!(machine.log().is_empty());
    tear_down(&other, "u2").await;
    std::fs::create_dir_all(machine.path("sys/block/sd7l1/sd7l1p1")).unwrap();
    std::fs::write(machine.path("sys/block/sd7l1/sd7l1p1/partition"), "1").unwrap();
    std::fs::write(machine.path("dev/sd7l1p1"), "").unwrap();
    let part = machine.held_by("loop20", "dev/sd7l1p1");
    machine.log();
    let again = volumes.disks.detach_if_unused(&place).await;
    assert_eq!(again, Err(in_use));
    assert!(machine.log().is_empty());
    assert_eq!(machine.read("sys/block/sd7l1/device/delete"), "");
    std::fs::remove_dir_all(part).unwrap();
    volumes.disks.detach_if_unused(&place).await.unwrap();
    assert_eq!((calls(&machine.log(), "--logout"), machine.notes()), (1, 0));
}

/// A logical volume on a disk is no multipath device: whoever has it has the disk.
#[tokio::test]
async fn only_multipath_devices_stand_for_their_disks() {
    let machine = Machine::new();
    let device = machine.path("dev/sd7l1");
    std::fs::write(&device, "").unwrap();
    for (above, uuid) in [("dm-1", "LVM-abc\n"), ("dm-2", "mpath-3600508b4\n")] {
        let shown = machine.path("sys/block").join(above);
        std::fs::create_dir_all(shown.join("slaves/sd7l1")).unwrap();
        std::fs::create_dir_all(shown.join("dm")).unwrap();
        std::fs::write(shown.join("dm/uuid"), uuid).unwrap();
    }
    let above = || scsi::multipath_of(&machine.host(), &device);
    assert!(above().unwrap().ends_with("dm-2"));
    std::fs::remove_dir_all(machine.path("sys/block/dm-2")).unwrap();
    assert_eq!(above(), None);
}

/// Pods that the node has noted are gone with their containers.
#[tokio::test]
async fn a_stopped_node_leaves_no_disks() {
    let machine = Machine::new();
    let mut named = source("10.0.0.7", 1);
    named["iscsi"]["initiatorName"] = json!("iqn.2026-01.example:me");
    set_up(&machine.volumes(), &claiming("u1", "Block", named.clone()))
        .await
        .unwrap();
    // A driver's device, which another pod has.
    let published = "root/plugins/kubernetes.io/csi/volumeDevices/publish/pv/u2";
    std::fs::create_dir_all(machine.path(published).parent().unwrap()).unwrap();
    std::fs::write(machine.path(published), "").unwrap();
    machine.held_by("loop20", published);
    // A pod's own, and that of somebody else.
    std::fs::write(machine.path("root/pods/file"), "").unwrap();
    let theirs = machine.held_by("loop21", "root/pods/file");
    machine.log();
    machine.remove_all().await.unwrap();
    let node = format!("-m node -p 10.0.0.7:3260 -T {IQN} -I 10.0.0.7:3260:pv");
    assert_eq!(
        machine.log(),
        [
            format!("losetup -d {}", machine.path("dev/loop20").display()),
            format!("losetup -d {}", machine.path("dev/loop9").display()),
            format!("blockdev --flushbufs {}", machine.path("dev/sd7l1").display()),
            format!("{node} --logout"),
            format!("{node} -o delete"),
            "-m iface -I 10.0.0.7:3260:pv -o delete".to_owned(),
        ]
    );
    assert_eq!(machine.read("sys/block/sd7l1/device/delete"), "1");
    assert!(theirs.exists());
    assert_eq!(machine.notes(), 0);
    machine.remove_all().await.unwrap();
    // After a boot there is nothing that tools could take away.
    set_up(
        &machine.volumes(),
        &claiming("u1", "Block", source("10.0.0.7", 1)),
    )
    .await
    .unwrap();
    machine.log();
    let host = Host {
        boot: "another".to_owned(),
        ..machine.host()
    };
    remove_all(&machine.path("root"), host).await.unwrap();
    assert!(machine.log().is_empty());
    assert_eq!(machine.notes(), 0);
    // Nor is there on a machine without the tool.
    let without = || Host {
        folders: vec![machine.path("dev")],
        ..machine.host()
    };
    let volumes = Volumes {
        disks: Disks::new(&machine.path("root"), without()),
        ..machine.volumes()
    };
    let failed = set_up(&volumes, &claiming("u1", "Block", named)).await;
    assert!(failed.unwrap_err().contains("this node has no iscsiadm"));
    assert_eq!(machine.notes(), 1);
    remove_all(&machine.path("root"), without()).await.unwrap();
    assert_eq!(machine.notes(), 0);
}
