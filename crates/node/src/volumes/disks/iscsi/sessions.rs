//! The sessions that the kernel has with a target, from `/sys`: by which portals, and which disks came by them. Reads only.

use std::net::SocketAddr;
use std::path::PathBuf;

use crate::volumes::disks::host::{Host, names_in, read_small};

/// A session with a target.
#[derive(Debug, PartialEq, Eq)]
pub struct Session {
    /// The number of its SCSI host.
    pub host: u32,
    /// The current portal and the configured one, which may be the same.
    portals: Vec<String>,
    folder: PathBuf,
}

impl Session {
    pub fn is_by(&self, portal: &str) -> bool {
        self.portals.iter().any(|one| same_portal(one, portal))
    }

    /// The disk with this number that came by the session.
    pub fn disk(&self, host: &Host, lun: u32) -> Option<PathBuf> {
        let number = self.host;
        // Channel and target are always 0 for iSCSI.
        let blocks = format!("target{number}:0:0/{number}:0:0:{lun}/block");
        let name = names_in(&self.folder.join(blocks)).into_iter().next()?;
        Some(host.dev.join(name))
    }

    /// All disks that came by the session.
    pub fn disks(&self, host: &Host) -> Vec<PathBuf> {
        let target = self.folder.join(format!("target{0}:0:0", self.host));
        let ours = format!("{}:0:0:", self.host);
        let mut disks = Vec::new();
        let luns = names_in(&target).into_iter();
        for lun in luns.filter(|name| name.starts_with(&ours)) {
            let names = names_in(&target.join(lun).join("block"));
            disks.extend(names.into_iter().map(|name| host.dev.join(name)));
        }
        disks
    }
}

/// The kernel may write an address otherwise than the volume does.
pub fn same_portal(a: &str, b: &str) -> bool {
    match (a.parse::<SocketAddr>(), b.parse::<SocketAddr>()) {
        (Ok(a), Ok(b)) => a == b,
        _ => a == b,
    }
}

/// Blocking, for a moment.
pub fn sessions_with(host: &Host, iqn: &str) -> Vec<Session> {
    let hosts = host.sys.join("class/iscsi_host");
    let mut found = Vec::new();
    for name in names_in(&hosts) {
        let Some(Ok(number)) = name.strip_prefix("host").map(str::parse::<u32>) else {
            continue;
        };
        let device = hosts.join(&name).join("device");
        for session in names_in(&device)
            .into_iter()
            .filter(|name| name.starts_with("session"))
        {
            let folder = device.join(&session);
            let target = read_small(&folder.join("iscsi_session").join(&session).join("targetname"));
            if target.as_deref() == Some(iqn) {
                found.push(Session {
                    host: number,
                    portals: portals_of(&folder),
                    folder,
                });
            }
        }
    }
    found
}

fn portals_of(session: &std::path::Path) -> Vec<String> {
    let mut portals = Vec::new();
    for name in names_in(session)
        .into_iter()
        .filter(|name| name.starts_with("connection"))
    {
        let connection = session.join(&name).join("iscsi_connection").join(&name);
        for prefix in ["", "persistent_"] {
            let part = |part: &str| read_small(&connection.join(format!("{prefix}{part}")));
            if let (Some(address), Some(port)) = (part("address"), part("port")) {
                portals.push(match address.contains(':') && !address.starts_with('[') {
                    true => format!("[{address}]:{port}"),
                    false => format!("{address}:{port}"),
                });
            }
        }
    }
    portals
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;

    fn write(path: &Path, text: &str) {
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, text).unwrap();
    }

    #[test]
    fn sessions_are_told_by_target_and_portal() {
        let dir = tempfile::tempdir().unwrap();
        let session = |host: u32, iqn: &str, address: &str| {
            let folder = dir
                .path()
                .join(format!("class/iscsi_host/host{host}/device/session{host}"));
            write(
                &folder.join(format!("iscsi_session/session{host}/targetname")),
                &format!("{iqn}\n"),
            );
            let connection = folder.join(format!("connection{host}:0/iscsi_connection/connection{host}:0"));
            write(&connection.join("address"), &format!("{address}\n"));
            write(&connection.join("port"), "3260\n");
            write(&connection.join("persistent_address"), "san.example\n");
            write(&connection.join("persistent_port"), "3261\n");
            folder
        };
        let first = session(3, "iqn.a", "fd00:0:0::1");
        session(12, "iqn.b", "10.0.0.1");
        write(&first.join("target3:0:0/3:0:0:7/block/sdq/size"), "1");
        write(&first.join("target3:0:0/3:0:0:12/block/sdr/size"), "1");
        write(&first.join("target3:0:0/power/control"), "auto");
        std::fs::create_dir_all(dir.path().join("class/iscsi_host/other")).unwrap();
        let host = Host {
            sys: dir.path().to_path_buf(),
            ..Host::default()
        };
        let found = sessions_with(&host, "iqn.a");
        assert_eq!(found.len(), 1);
        assert_eq!(found[0].host, 3);
        for (portal, expected) in [
            ("[fd00::1]:3260", true),
            ("san.example:3261", true),
            ("[fd00::1]:3261", false),
            ("10.0.0.1:3260", false),
        ] {
            assert_eq!(found[0].is_by(portal), expected, "{portal}");
        }
        assert_eq!(found[0].disk(&host, 7), Some(PathBuf::from("/dev/sdq")));
        assert_eq!(found[0].disk(&host, 8), None);
        let mut all = found[0].disks(&host);
        all.sort();
        assert_eq!(all, ["/dev/sdq", "/dev/sdr"].map(PathBuf::from));
        assert!(sessions_with(&host, "iqn.c").is_empty());
        assert!(sessions_with(&Host::default(), "iqn.c").is_empty());
    }
}
