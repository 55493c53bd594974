//! Disks of a made-up machine: folders in the place of `/dev` and `/sys`, and an `iscsiadm` that writes down what it is asked and has
//! sessions, links and disks appear there. Tests that mount need root and do nothing without.

mod fc;
mod filesystem;
mod iscsi;

use super::host::Patience;
use super::*;
use crate::field_ref::NodeFacts;
use crate::objects::Objects;
use crate::volumes::{Volumes, event_messages};
use async_trait::async_trait;
use k8s_openapi::api::authentication::v1::TokenRequest;
use k8s_openapi::api::core::v1::{ConfigMap, PersistentVolume, PersistentVolumeClaim, Pod, Secret};
use serde_json::{Value, json};
use std::os::unix::fs::PermissionsExt;

/// Portals are `10.0.0.<n>:3260`; the disk with number `l` that comes by one is `sd<n>l<l>`, a copy of the file `disk<l>`.
const ISCSIADM: &str = r#"
echo "$*" >> "$D/log"
mode= portal= iqn= op= iface=
while [ $# -gt 0 ]; do
  case "$1" in
    -m) mode=$2; shift;; -p) portal=$2; shift;; -T) iqn=$2; shift;; -I) iface=$2; shift;;
    -o) op=$2; shift;; -n|-v|-t) shift;; --login|--logout|--discover) op=$1;;
  esac
  shift
done
address=${portal%:*}; n=${address##*.}
host="$D/sys/class/iscsi_host/host$n"; session="$host/device/session$n"
case "$mode $op" in
  "iface show") printf 'iface.iscsi_ifacename = %s\niface.transport_name = tcp\niface.mtu = 0\n' "$iface";;
  "discoverydb --discover") if [ -e "$D/down$n" ]; then echo "no route" >&2; exit 4; fi;;
  "node --login")
    [ -d "$session" ] && exit 15
    cp -r "$D/root/disks" "$D/notes-at-login" 2>/dev/null
    connection="$session/connection$n:0/iscsi_connection/connection$n:0"
    mkdir -p "$session/iscsi_session/session$n" "$connection" "$D/sys/class/scsi_host/host$n" "$D/dev/disk/by-path"
    echo "$iqn" > "$session/iscsi_session/session$n/targetname"
    echo "$address" > "$connection/address"; echo 3260 > "$connection/port"
    : > "$D/sys/class/scsi_host/host$n/scan"
    for l in 1 2; do
      [ -e "$D/disk$l" ] || continue
      sd="sd${n}l$l"
      mkdir -p "$session/target$n:0:0/$n:0:0:$l/block/$sd" "$D/sys/block/$sd/device"
      : > "$D/sys/block/$sd/device/delete"
      cp -a "$D/disk$l" "$D/dev/$sd"
      (sleep 0.2; ln -sfn "../../$sd" "$D/dev/disk/by-path/ip-$portal-iscsi-$iqn-lun-$l") >/dev/null 2>&1 &
    done;;
  "node --logout")
    [ -d "$session" ] || exit 21
    rm -rf "$host" "$D/dev/disk/by-path/ip-$portal-"*;;
esac
exit 0"#;

const LOSETUP: &str = r#"
echo "losetup $*" >> "$D/log"
case "$1" in
  -f)
    n=9; while [ -d "$D/sys/block/loop$n" ]; do n=$((n+1)); done
    mkdir -p "$D/sys/block/loop$n/loop"; echo "$2" > "$D/sys/block/loop$n/loop/backing_file"; : > "$D/dev/loop$n";;
  -d) rm -r "$D/sys/block/${2##*/}";;
esac"#;

const RECORDED: &str = r#"echo "${0##*/} $*" >> "$D/log""#;

const IQN: &str = "iqn.2026-01.example:disks";

struct Machine {
    dir: tempfile::TempDir,
}

impl Machine {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let machine = Machine { dir };
        for folder in ["dev", "sys/block", "tools", "root/pods"] {
            std::fs::create_dir_all(machine.path(folder)).unwrap();
        }
        for disk in ["disk1", "disk2"] {
            std::fs::write(machine.path(disk), disk).unwrap();
        }
        std::fs::write(machine.path("dev/loop-control"), "").unwrap();
        machine.tool("iscsiadm", ISCSIADM);
        machine.tool("losetup", LOSETUP);
        machine.tool("multipath", RECORDED);
        machine.tool("blockdev", RECORDED);
        machine
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn tool(&self, name: &str, text: &str) {
        let path = self.path("tools").join(name);
        let text = format!("#!/bin/sh\nD='{}'\n{text}\n", self.dir.path().display());
        std::fs::write(&path, text).unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
    }

    fn host(&self) -> Host {
        let system = ["/usr/sbin", "/sbin", "/usr/bin", "/bin"].map(PathBuf::from);
        Host {
            dev: self.path("dev"),
            sys: self.path("sys"),
            folders: std::iter::once(self.path("tools")).chain(system).collect(),
            boot: "boot".to_owned(),
            patience: Patience {
                device: Duration::from_secs(5),
                multipath: Duration::from_millis(300),
                poll: Duration::from_millis(20),
            },
        }
    }

    fn disks(&self) -> Arc<Disks> {
        Disks::new(&self.path("root"), self.host())
    }

    fn volumes(&self) -> Volumes {
        let volumes = Volumes::new(&self.path("root"), Arc::new(OneSecret));
        Volumes {
            disks: self.disks(),
            ..volumes
        }
    }

    /// A cluster of its own on the same machine.
    fn other_cluster(&self) -> Volumes {
        Volumes {
            disks: Disks::new(&self.path("other"), self.host()),
            ..Volumes::new(&self.path("other"), Arc::new(OneSecret))
        }
    }

    /// What the tools were asked since the last time.
    fn log(&self) -> Vec<String> {
        let text = std::fs::read_to_string(self.path("log")).unwrap_or_default();
        let _ = std::fs::remove_file(self.path("log"));
        text.lines().map(str::to_owned).collect()
    }

    fn read(&self, name: &str) -> String {
        std::fs::read_to_string(self.path(name)).unwrap_or_default()
    }

    fn notes(&self) -> usize {
        std::fs::read_dir(self.path("root/disks")).map_or(0, Iterator::count)
    }

    /// Has a loop device on a file, which somebody else made. Returns the folder that the kernel shows it by.
    fn held_by(&self, name: &str, file: &str) -> PathBuf {
        let shown = self.path("sys/block").join(name);
        let file = self.path(file).canonicalize().unwrap();
        std::fs::create_dir_all(shown.join("loop")).unwrap();
        std::fs::write(shown.join("loop/backing_file"), format!("{}\n", file.display())).unwrap();
        std::fs::write(self.path("dev").join(name), "").unwrap();
        shown
    }

    /// The place of the only disk that is noted.
    fn place(volumes: &Volumes) -> String {
        let notes = volumes.disks.notes.lock();
        assert_eq!(notes.len(), 1);
        notes.keys().next().cloned().unwrap()
    }

    /// As when the cluster is deleted.
    async fn remove_all(&self) -> Result<(), String> {
        super::remove_all(&self.path("root"), self.host()).await
    }

    /// Runs the tool as somebody else would.
    fn by_hand(&self, arguments: &[&str]) {
        let ran = std::process::Command::new(self.path("tools/iscsiadm"))
            .args(arguments)
            .status();
        assert!(ran.unwrap().success());
    }
}

struct OneSecret;

#[async_trait]
impl Objects for OneSecret {
    async fn config_map(&self, _: &str, _: &str) -> Result<Option<Arc<ConfigMap>>, String> {
        Ok(None)
    }
    async fn secret(&self, namespace: &str, name: &str) -> Result<Option<Arc<Secret>>, String> {
        // me, hush
        let data = json!({"data": {"node.session.auth.username": "bWU=", "node.session.auth.password": "aHVzaA==",
            "discovery.sendtargets.auth.username": "bWU="}});
        let found = (namespace, name) == ("ns", "chap");
        Ok(found.then(|| Arc::new(serde_json::from_value(data).unwrap())))
    }
    async fn trust_bundles(&self) -> Result<crate::objects::TrustBundles, String> {
        Ok(Default::default())
    }
    async fn claim(&self, _: &str, name: &str) -> Result<PersistentVolumeClaim, String> {
        let claim = json!({"metadata": {"name": name, "namespace": "ns", "uid": "c"},
            "spec": {"volumeName": name}, "status": {"phase": "Bound"}});
        Ok(serde_json::from_value(claim).unwrap())
    }
    /// The volume is what the name of the claim says.
    async fn persistent_volume(&self, name: &str) -> Result<PersistentVolume, String> {
        let (mode, rest) = name.split_once(' ').unwrap();
        let mut spec: Value = serde_json::from_str(rest).unwrap();
        spec["volumeMode"] = json!(mode);
        spec["claimRef"] = json!({"uid": "c"});
        spec["accessModes"] = json!(["ReadWriteOnce"]);
        Ok(serde_json::from_value(json!({"metadata": {"name": "pv"}, "spec": spec})).unwrap())
    }
    async fn token(&self, _: &str, _: &str, _: TokenRequest) -> Result<TokenRequest, String> {
        Err("no tokens".to_owned())
    }
}

/// A pod with one volume, `v`.
fn pod(uid: &str, source: Value) -> Pod {
    let is_device = source["persistentVolumeClaim"]["claimName"]
        .as_str()
        .is_some_and(|name| name.starts_with("Block"));
    let container = match is_device {
        true => json!({"name": "c", "volumeDevices": [{"name": "v", "devicePath": "/dev/x"}]}),
        false => json!({"name": "c", "volumeMounts": [{"name": "v", "mountPath": "/x"}]}),
    };
    let mut volume = json!({"name": "v"});
    volume
        .as_object_mut()
        .unwrap()
        .extend(source.as_object().unwrap().clone());
    serde_json::from_value(json!({"metadata": {"name": "p", "namespace": "ns", "uid": uid},
        "spec": {"securityContext": {"fsGroup": 4321}, "containers": [container], "volumes": [volume]}}))
    .unwrap()
}

/// The same, as a claim for a PersistentVolume.
fn claiming(uid: &str, mode: &str, spec: Value) -> Pod {
    pod(
        uid,
        json!({"persistentVolumeClaim": {"claimName": format!("{mode} {spec}")}}),
    )
}

async fn set_up(volumes: &Volumes, pod: &Pod) -> Result<PathBuf, String> {
    let uid = crate::pods::uid(pod);
    std::fs::create_dir_all(volumes.pod_dir(uid)).unwrap();
    match volumes.set_up(pod, &NodeFacts::default()).await {
        Ok(mounted) => Ok(mounted["v"].path.clone()),
        Err(errors) => Err(event_messages(&errors).join("\n")),
    }
}

async fn tear_down(volumes: &Volumes, uid: &str) {
    volumes.tear_down(uid).await.unwrap();
    volumes.remove_pod_dir(uid).await.unwrap();
}

/// The parts of the calls that differ.
fn calls(log: &[String], with: &str) -> usize {
    log.iter().filter(|line| line.contains(with)).count()
}
