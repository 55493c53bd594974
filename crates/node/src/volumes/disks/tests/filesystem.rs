//! Filesystems on real devices: loop devices behind the made-up machine's names.

use super::*;
use std::os::unix::fs::MetadataExt;
use std::process::Command;

/// A loop device over a file of its own.
struct Loop {
    _file: tempfile::NamedTempFile,
    device: String,
}

impl Loop {
    /// `None` where there can be none.
    fn new() -> Option<Self> {
        if !rustix::process::geteuid().is_root() || !Path::new("/dev/loop-control").exists() {
            return None;
        }
        let file = tempfile::NamedTempFile::new().unwrap();
        file.as_file().set_len(32 << 20).unwrap();
        let made = Command::new("losetup")
            .args(["-f", "--show"])
            .arg(file.path())
            .output()
            .unwrap();
        assert!(made.status.success(), "{made:?}");
        let device = String::from_utf8(made.stdout).unwrap().trim().to_owned();
        Some(Loop { _file: file, device })
    }

    fn run(&self, tool: &str, arguments: &[&str]) {
        let ran = Command::new(tool)
            .args(arguments)
            .arg(&self.device)
            .output()
            .unwrap();
        assert!(ran.status.success(), "{ran:?}");
    }
}

impl Drop for Loop {
    fn drop(&mut self) {
        let _ = Command::new("losetup").args(["-d", &self.device]).status();
    }
}

impl Machine {
    /// The disk is a device.
    fn with(disk: &Loop) -> Self {
        let machine = Machine::new();
        std::fs::remove_file(machine.path("disk1")).unwrap();
        let copied = Command::new("cp")
            .args(["-a", &disk.device])
            .arg(machine.path("disk1"))
            .status();
        assert!(copied.unwrap().success());
        machine
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        let _ = skiff_fs::unmount_below(self.dir.path());
    }
}

fn iscsi(more: Value) -> Value {
    let mut source = json!({"iscsi": {"targetPortal": "10.0.0.7", "iqn": IQN, "lun": 1}});
    let fields = more.as_object().unwrap().clone();
    source["iscsi"].as_object_mut().unwrap().extend(fields);
    source
}

#[tokio::test]
async fn an_empty_disk_is_formatted_once() {
    let Some(disk) = Loop::new() else { return };
    let machine = Machine::with(&disk);
    let volumes = machine.volumes();
    // Nothing is written to a disk that is to be read.
    let error = set_up(&volumes, &pod("u0", iscsi(json!({"readOnly": true}))))
        .await
        .unwrap_err();
    assert!(
        error.contains("MountVolume.MountDevice failed for volume \"v\" : cannot mount unformatted disk"),
        "{error}"
    );
    tear_down(&volumes, "u0").await;
    let first = pod("u1", iscsi(json!({})));
    let path = set_up(&volumes, &first).await.unwrap();
    assert_eq!(path, machine.path("root/pods/u1/volumes/kubernetes.io~iscsi/v"));
    let global = machine.path(&format!(
        "root/plugins/kubernetes.io/iscsi/iface-default/10.0.0.7:3260-{IQN}-lun-1"
    ));
    std::fs::write(path.join("file"), "kept").unwrap();
    assert_eq!(std::fs::read_to_string(global.join("file")).unwrap(), "kept");
    assert_eq!(std::fs::metadata(&path).unwrap().gid(), 4321);
    // Another pod on it, read only; and another life of the node.
    let volumes = machine.volumes();
    set_up(&volumes, &first).await.unwrap();
    let second = set_up(&volumes, &pod("u2", iscsi(json!({"readOnly": true}))))
        .await
        .unwrap();
    let refused = std::fs::write(second.join("new"), "x").unwrap_err();
    assert_eq!(refused.kind(), std::io::ErrorKind::ReadOnlyFilesystem);
    assert_eq!(skiff_fs::mounts_below(machine.dir.path()).unwrap().len(), 3);
    tear_down(&volumes, "u1").await;
    assert_eq!(std::fs::read_to_string(second.join("file")).unwrap(), "kept");
    tear_down(&volumes, "u2").await;
    assert!(skiff_fs::mounts_below(machine.dir.path()).unwrap().is_empty());
    assert!(!global.exists());
    assert_eq!(machine.notes(), 0);
    // It comes back with what is on it.
    let path = set_up(&volumes, &first).await.unwrap();
    assert_eq!(std::fs::read_to_string(path.join("file")).unwrap(), "kept");
    tear_down(&volumes, "u1").await;
}

#[tokio::test]
async fn what_has_anything_on_it_is_not_formatted() {
    let Some(disk) = Loop::new() else { return };
    for (tool, arguments) in [("mkswap", &[][..]), ("mkfs.ext4", &["-q"][..])] {
        disk.run(tool, arguments);
        let before = Command::new("blkid")
            .args(["-p", &disk.device])
            .output()
            .unwrap()
            .stdout;
        let machine = Machine::with(&disk);
        let volumes = machine.volumes();
        // Another filesystem than the one that is there.
        machine.tool("mkfs.xfs", RECORDED);
        let error = set_up(&volumes, &pod("u1", iscsi(json!({"fsType": "xfs"}))))
            .await
            .unwrap_err();
        assert!(error.contains("mount failed: exit status 32"), "{error}");
        assert_eq!(calls(&machine.log(), "mkfs"), 0);
        tear_down(&volumes, "u1").await;
        let after = Command::new("blkid")
            .args(["-p", &disk.device])
            .output()
            .unwrap()
            .stdout;
        assert!(!before.is_empty() && before == after, "{before:?} {after:?}");
    }
}

/// A disk that somebody else has mounted is not taken away.
#[tokio::test]
async fn a_disk_in_use_stays() {
    let Some(disk) = Loop::new() else { return };
    let machine = Machine::with(&disk);
    let volumes = machine.volumes();
    set_up(&volumes, &pod("u1", iscsi(json!({})))).await.unwrap();
    let elsewhere = machine.path("elsewhere");
    std::fs::create_dir(&elsewhere).unwrap();
    let mounted = Command::new("mount")
        .args([machine.path("dev/sd7l1"), elsewhere.clone()])
        .status();
    assert!(mounted.unwrap().success());
    machine.log();
    tear_down(&volumes, "u1").await;
    assert_eq!((calls(&machine.log(), "--logout"), machine.notes()), (0, 1));
    unmount(&elsewhere, UnmountFlags::empty()).unwrap();
    let place = volumes.disks.notes.lock().keys().next().cloned().unwrap();
    volumes.disks.detach_if_unused(&place).await.unwrap();
    assert_eq!((calls(&machine.log(), "--logout"), machine.notes()), (1, 0));
}

/// Nor is the session ended by which it came, for whatever disk that was made.
#[tokio::test]
async fn a_session_with_a_disk_in_use_stays() {
    let Some(disk) = Loop::new() else { return };
    disk.run("mkfs.ext4", &["-q"]);
    let machine = Machine::with(&disk);
    std::fs::rename(machine.path("disk1"), machine.path("disk2")).unwrap();
    std::fs::write(machine.path("disk1"), "disk1").unwrap();
    let volumes = machine.volumes();
    let source = iscsi(json!({}));
    set_up(&volumes, &claiming("u1", "Block", source)).await.unwrap();
    let elsewhere = machine.path("elsewhere");
    std::fs::create_dir(&elsewhere).unwrap();
    let mounted = Command::new("mount")
        .args([machine.path("dev/sd7l2"), elsewhere.clone()])
        .status();
    assert!(mounted.unwrap().success());
    machine.log();
    tear_down(&volumes, "u1").await;
    let log = machine.log();
    assert_eq!(calls(&log, "--logout") + calls(&log, "-o delete"), 0, "{log:?}");
    assert_eq!(machine.notes(), 1);
    unmount(&elsewhere, UnmountFlags::empty()).unwrap();
    let place = Machine::place(&volumes);
    volumes.disks.detach_if_unused(&place).await.unwrap();
    assert_eq!((calls(&machine.log(), "--logout"), machine.notes()), (1, 0));
}

/// What pods have mounted goes with the node. A driver's device is let go of while its place, which tells of it, is mounted.
#[tokio::test]
async fn a_stopped_node_leaves_no_mounts() {
    let Some(disk) = Loop::new() else { return };
    let machine = Machine::with(&disk);
    set_up(&machine.volumes(), &pod("u1", iscsi(json!({}))))
        .await
        .unwrap();
    let published = "root/plugins/kubernetes.io/csi/volumeDevices/publish/pv/u2";
    let target = machine.path(published);
    std::fs::create_dir_all(target.parent().unwrap()).unwrap();
    std::fs::write(&target, "").unwrap();
    mount_bind(machine.path("disk2"), target).unwrap();
    machine.held_by("loop20", published);
    let looks = "grep -q publish/pv/u2 /proc/self/mountinfo && echo mounted >> \"$D/log\"";
    machine.tool("losetup", &format!("{looks}\n{LOSETUP}"));
    machine.log();
    machine.remove_all().await.unwrap();
    let log = machine.log();
    assert_eq!(log[0], "mounted", "{log:?}");
    assert_eq!(calls(&log, "losetup -d"), 1, "{log:?}");
    assert_eq!(calls(&log, "--logout"), 1, "{log:?}");
    assert!(skiff_fs::mounts_below(machine.dir.path()).unwrap().is_empty());
    assert_eq!(machine.notes(), 0);
}

#[tokio::test]
async fn local_devices_are_formatted_and_mounted() {
    let Some(disk) = Loop::new() else { return };
    let machine = Machine::new();
    let volumes = machine.volumes();
    let spec = json!({"local": {"path": disk.device, "fsType": "ext4"}, "mountOptions": ["noatime"]});
    let path = set_up(&volumes, &claiming("u1", "Filesystem", spec.clone()))
        .await
        .unwrap();
    assert_eq!(
        path,
        machine.path("root/pods/u1/volumes/kubernetes.io~local-volume/pv")
    );
    std::fs::write(path.join("file"), "kept").unwrap();
    assert_eq!(std::fs::metadata(&path).unwrap().gid(), 4321);
    let global = machine.path("root/plugins/kubernetes.io/local-volume/mounts/pv");
    assert!(global.join("file").exists());
    let mounts = std::fs::read_to_string("/proc/self/mountinfo").unwrap();
    let line = mounts
        .lines()
        .find(|line| line.contains(&*global.to_string_lossy()))
        .unwrap();
    assert!(line.contains("noatime") && line.contains(" - ext4 "), "{line}");
    tear_down(&volumes, "u1").await;
    assert!(!global.exists());
    assert_eq!(machine.notes(), 0);
    // The device itself, held as long as a pod has it.
    let link = set_up(&volumes, &claiming("u2", "Block", spec)).await.unwrap();
    assert_eq!(std::fs::read_link(link).unwrap(), Path::new(&disk.device));
    assert_eq!(machine.log(), [format!("losetup -f {}", disk.device)]);
    tear_down(&volumes, "u2").await;
    assert_eq!(calls(&machine.log(), "losetup -d"), 1);
    assert_eq!(machine.notes(), 0);
}

/// With the kernel's own loop devices.
#[tokio::test]
async fn devices_are_held_by_loop_devices() {
    let Some(disk) = Loop::new() else { return };
    let device = Path::new(&disk.device);
    let host = Host::default();
    let holders = || {
        let listed = Command::new("losetup")
            .args(["-n", "-O", "NAME", "-j", &disk.device])
            .output();
        String::from_utf8(listed.unwrap().stdout).unwrap().lines().count()
    };
    hold::take(&host, device, false).await.unwrap();
    hold::take(&host, device, true).await.unwrap();
    assert_eq!(holders(), 1);
    // That of somebody else is not enough.
    hold::take(&host, device, false).await.unwrap();
    assert_eq!(holders(), 2);
    hold::let_go(&host, device).await.unwrap();
    assert!(holders() == 1 && hold::is_held(&host, device));
    hold::let_go(&host, device).await.unwrap();
    hold::let_go(&host, device).await.unwrap();
    assert_eq!(holders(), 0);
}
