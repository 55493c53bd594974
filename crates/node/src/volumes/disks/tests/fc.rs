//! Fibre Channel: disks that are there, and disks that appear when the machine looks for them.

use super::*;

const PORT: &str = "50060e801049cfd1";

impl Machine {
    fn fc_disk(&self, name: &str, folder: &str, link: &str) {
        let links = self.path("dev/disk").join(folder);
        std::fs::create_dir_all(&links).unwrap();
        std::fs::create_dir_all(self.path(&format!("sys/block/{name}/device"))).unwrap();
        std::fs::write(self.path(&format!("sys/block/{name}/device/delete")), "").unwrap();
        std::fs::write(self.path("dev").join(name), name).unwrap();
        std::os::unix::fs::symlink(format!("../../{name}"), links.join(link)).unwrap();
    }

    fn scsi_host(&self) -> PathBuf {
        let scan = self.path("sys/class/scsi_host/host2/scan");
        std::fs::create_dir_all(scan.parent().unwrap()).unwrap();
        std::fs::write(&scan, "").unwrap();
        scan
    }
}

fn by_port() -> Value {
    json!({"fc": {"targetWWNs": [PORT], "lun": 3}})
}

#[tokio::test]
async fn a_disk_that_was_there_stays() {
    let machine = Machine::new();
    let scan = machine.scsi_host();
    machine.fc_disk("sdb", "by-path", &format!("pci-0000:41:00.0-fc-0x{PORT}-lun-3"));
    machine.fc_disk("sdc", "by-path", &format!("pci-0000:41:00.0-fc-0x{PORT}-lun-30"));
    let volumes = machine.volumes();
    let link = set_up(&volumes, &claiming("u1", "Block", by_port()))
        .await
        .unwrap();
    assert_eq!(std::fs::read_to_string(link).unwrap(), "sdb");
    tear_down(&volumes, "u1").await;
    assert_eq!(std::fs::read_to_string(scan).unwrap(), "");
    assert_eq!(machine.read("sys/block/sdb/device/delete"), "");
    assert_eq!(machine.notes(), 0);
}

#[tokio::test]
async fn a_disk_that_appeared_is_removed() {
    let machine = Arc::new(Machine::new());
    let scan = machine.scsi_host();
    let volumes = machine.volumes();
    let kernel = {
        let (machine, scan) = (machine.clone(), scan.clone());
        tokio::spawn(async move {
            while std::fs::read_to_string(&scan).unwrap() != "- - -" {
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
            machine.fc_disk("sdb", "by-path", &format!("fc-0x{PORT}-lun-3"));
        })
    };
    let pod = claiming("u1", "Block", by_port());
    let link = set_up(&volumes, &pod).await.unwrap();
    kernel.await.unwrap();
    assert_eq!(std::fs::read_to_string(link).unwrap(), "sdb");
    // Another life of the node knows that it was not there.
    let volumes = machine.volumes();
    set_up(&volumes, &pod).await.unwrap();
    tear_down(&volumes, "u1").await;
    assert_eq!(machine.read("sys/block/sdb/device/delete"), "1");
    assert_eq!(machine.notes(), 0);
}

#[tokio::test]
async fn a_stopped_node_leaves_no_disks() {
    let machine = Machine::new();
    machine.fc_disk("sdb", "by-path", &format!("fc-0x{PORT}-lun-3"));
    machine.held_by("loop9", "dev/sdb");
    let disk = FibreChannel::new(Some(&[PORT.to_owned()]), Some(3), None).unwrap();
    let note = Note {
        source: Source::Fc(disk),
        block: true,
        users: BTreeSet::from(["u1".to_owned()]),
        made: Vec::new(),
        appeared: true,
        held: Some(machine.path("dev/sdb")),
        boot: machine.host().boot,
    };
    let place = note.source.place(true);
    note::store(&machine.path("root/disks"), &place, Some(&note)).unwrap();
    machine.remove_all().await.unwrap();
    assert_eq!(calls(&machine.log(), "losetup -d"), 1);
    assert_eq!(machine.read("sys/block/sdb/device/delete"), "1");
    assert_eq!(machine.notes(), 0);
}

#[tokio::test]
async fn names_lead_to_a_multipath_device() {
    let machine = Machine::new();
    machine.fc_disk("sdb", "by-id", "scsi-VENDOR_1");
    std::fs::create_dir_all(machine.path("sys/block/dm-0/slaves/sdb")).unwrap();
    std::fs::write(machine.path("dev/dm-0"), "joined").unwrap();
    let volumes = machine.volumes();
    let pod = claiming("u1", "Block", json!({"fc": {"wwids": ["VENDOR 1"]}}));
    let link = set_up(&volumes, &pod).await.unwrap();
    assert_eq!(std::fs::read_to_string(link).unwrap(), "joined");
    tear_down(&volumes, "u1").await;
}

#[tokio::test]
async fn what_is_missing_is_named() {
    let machine = Machine::new();
    let host = Host {
        patience: Patience {
            device: Duration::from_millis(50),
            ..machine.host().patience
        },
        ..machine.host()
    };
    let volumes = Volumes {
        disks: Disks::new(&machine.path("root"), host),
        ..machine.volumes()
    };
    let error = set_up(&volumes, &pod("u1", by_port())).await.unwrap_err();
    assert_eq!(
        error,
        format!(
            "MountVolume.WaitForAttach failed for volume \"v\" : no fc disk found: this node has no Fibre Channel adapter \
             that its kernel drives ({} is empty)",
            machine.path("sys/class/fc_host").display()
        )
    );
    tear_down(&volumes, "u1").await;
    let hostile = json!({"fc": {"targetWWNs": ["../../x"], "lun": 0}});
    let error = set_up(&volumes, &pod("u1", hostile)).await.unwrap_err();
    assert!(error.contains("fc: invalid target WWN"), "{error}");
    assert_eq!(machine.notes(), 0);
}
