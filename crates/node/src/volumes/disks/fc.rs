//! Which disk of a Fibre Channel network a volume means, and how it is found: by its target ports and number, or by its own name.

use std::path::PathBuf;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::host::{Host, names_in};
use super::scsi;
use crate::volumes::blocking;

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum FibreChannel {
    #[serde(rename_all = "camelCase")]
    Ports {
        /// In hexadecimal digits.
        ports: Vec<String>,
        lun: u32,
    },
    /// World wide identifiers, as they are in `/dev/disk/by-id`.
    Names { names: Vec<String> },
}

impl FibreChannel {
    pub fn new(ports: Option<&[String]>, lun: Option<i32>, names: Option<&[String]>) -> Result<Self, String> {
        let (ports, names) = (ports.unwrap_or_default(), names.unwrap_or_default());
        match (ports, lun) {
            ([_, ..], Some(lun)) => {
                let hexadecimal = |port: &&String| {
                    (1..=32).contains(&port.len()) && port.bytes().all(|byte| byte.is_ascii_hexdigit())
                };
                if let Some(bad) = ports.iter().find(|port| !hexadecimal(port)) {
                    return Err(format!("fc: invalid target WWN {bad:?}: hexadecimal digits only"));
                }
                let lun = u32::try_from(lun).ok().filter(|lun| *lun <= 255);
                Ok(FibreChannel::Ports {
                    ports: ports.to_vec(),
                    lun: lun.ok_or("fc: invalid lun")?,
                })
            }
            _ if !names.is_empty() => {
                // Where they become names of files, blanks are underscores.
                let names: Vec<String> = names.iter().map(|name| name.replace(' ', "_")).collect();
                let plain = |byte: u8| {
                    byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'-' | b'.' | b':' | b'+' | b'=')
                };
                let good = |name: &&String| {
                    (1..=128).contains(&name.len())
                        && !name.starts_with(['-', '.'])
                        && name.bytes().all(plain)
                };
                match names.iter().find(|name| !good(name)) {
                    Some(bad) => Err(format!("fc: invalid wwid {bad:?}")),
                    None => Ok(FibreChannel::Names { names }),
                }
            }
            _ => Err("fc: no fc disk information found. failed to make a new mounter".to_owned()),
        }
    }

    /// Its folder, below that of its type.
    pub fn folder(&self) -> String {
        match self {
            FibreChannel::Ports { ports, lun } => format!("{}-lun-{lun}", ports.join("-")),
            FibreChannel::Names { names } => names.join("-"),
        }
    }

    /// The disks that are there: one for each way that leads to it. Blocking, for a moment.
    pub fn disks(&self, host: &Host) -> Vec<PathBuf> {
        let folder = host.dev.join("disk").join(match self {
            FibreChannel::Ports { .. } => "by-path",
            FibreChannel::Names { .. } => "by-id",
        });
        let mut disks = Vec::new();
        for name in names_in(&folder).into_iter().filter(|name| self.is_link(name)) {
            disks.extend(host.resolve(&folder.join(name)));
        }
        disks.sort();
        disks.dedup();
        disks
    }

    fn is_link(&self, link: &str) -> bool {
        match self {
            FibreChannel::Ports { ports, lun } => ports.iter().any(|port| {
                let Some(rest) = link
                    .to_lowercase()
                    .strip_suffix(&format!("-lun-{lun}"))
                    .map(str::to_owned)
                else {
                    return false;
                };
                let Some(adapter) = rest.strip_suffix(&format!("-0x{}", port.to_lowercase())) else {
                    return false;
                };
                adapter == "fc" || (adapter.starts_with("pci-") && adapter.ends_with("-fc"))
            }),
            FibreChannel::Names { names } => names
                .iter()
                .any(|name| link.strip_prefix("scsi-") == Some(name.as_str())),
        }
    }
}

/// Finds the device: the multipath one, if there is one. `present` are the disks that were there already; if they are none, or not all, all
/// hosts look for new ones.
pub async fn find(host: &Arc<Host>, disk: &FibreChannel, present: Vec<PathBuf>) -> Result<PathBuf, String> {
    let best = |disks: &[PathBuf]| disks.iter().find_map(|disk| scsi::multipath_of(host, disk));
    let ways = match disk {
        FibreChannel::Ports { ports, .. } => ports.len(),
        FibreChannel::Names { .. } => 1,
    };
    if let Some(device) = best(&present) {
        return Ok(device);
    }
    if ways == 1
        && let Some(only) = present.first()
    {
        return Ok(only.clone());
    }
    let scanned = host.clone();
    blocking(move || scsi::scan_all(&scanned)).await;
    let began = tokio::time::Instant::now();
    loop {
        let (searched, wanted) = (host.clone(), disk.clone());
        let disks = blocking(move || wanted.disks(&searched)).await;
        if let Some(device) = best(&disks) {
            return Ok(device);
        }
        // With several ways to it there should be a device that joins them, where the machine has multipath.
        let waited = began.elapsed();
        if let Some(device) = disks.first()
            && (ways == 1 || waited >= host.patience.multipath)
        {
            return Ok(device.clone());
        }
        if waited >= host.patience.device {
            break;
        }
        tokio::time::sleep(host.patience.poll).await;
    }
    let adapters = host.sys.join("class/fc_host");
    Err(match names_in(&adapters).is_empty() {
        true => format!(
            "no fc disk found: this node has no Fibre Channel adapter that its kernel drives ({} is empty)",
            adapters.display()
        ),
        false => "no fc disk found".to_owned(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ports(ports: &[&str], lun: i32) -> Result<FibreChannel, String> {
        let ports: Vec<String> = ports.iter().map(|port| (*port).to_owned()).collect();
        FibreChannel::new(Some(&ports), Some(lun), None)
    }

    fn names(names: &[&str]) -> Result<FibreChannel, String> {
        let names: Vec<String> = names.iter().map(|name| (*name).to_owned()).collect();
        FibreChannel::new(None, None, Some(&names))
    }

    #[test]
    fn hostile_names_are_refused() {
        for bad in [
            "",
            "../x",
            "..",
            "-1",
            "50060e80 ",
            "50060e80\n",
            "0x50060e80",
            "a/b",
            ".*",
            "g",
        ] {
            assert!(ports(&["50060e801049cfd1", bad], 0).is_err(), "{bad:?}");
        }
        assert!(ports(&["50060e801049cfd1"], 256).is_err());
        assert!(ports(&["50060e801049cfd1"], -1).is_err());
        for bad in ["", "..", ".", ".a", "-a", "a/b", "../a", "a\nb", "a\tb", "a*"] {
            assert!(
                names(&["3600508b400105e210000900000490000", bad]).is_err(),
                "{bad:?}"
            );
        }
        assert!(FibreChannel::new(None, None, None).is_err());
        assert!(FibreChannel::new(Some(&["50060e801049cfd1".to_owned()]), None, None).is_err());
    }

    #[test]
    fn links_are_told_apart() {
        let two = ports(&["50060E801049cfd1", "50060e801049cfd2"], 1).unwrap();
        assert_eq!(two.folder(), "50060E801049cfd1-50060e801049cfd2-lun-1");
        for (link, expected) in [
            ("fc-0x50060e801049cfd1-lun-1", true),
            ("pci-0000:41:00.0-fc-0x50060e801049cfd2-lun-1", true),
            ("pci-0000:41:00.0-fc-0x50060e801049cfd2-lun-1-part1", false),
            ("pci-0000:41:00.0-fc-0x50060e801049cfd2-lun-11", false),
            ("pci-0000:41:00.0-fc-0x50060e801049cfd3-lun-1", false),
            ("xfc-0x50060e801049cfd1-lun-1", false),
        ] {
            assert_eq!(two.is_link(link), expected, "{link}");
        }
        let named = names(&["VENDOR MODEL 1"]).unwrap();
        assert_eq!(named.folder(), "VENDOR_MODEL_1");
        assert!(named.is_link("scsi-VENDOR_MODEL_1"));
        assert!(!named.is_link("scsi-VENDOR_MODEL_1-part1"));
        assert!(!named.is_link("wwn-VENDOR_MODEL_1"));
    }
}
