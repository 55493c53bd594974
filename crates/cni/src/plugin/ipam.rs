//! Host-local addresses: one file an address, named after it and holding its owner, in a directory a
//! network. A lock file orders processes. Addresses are given out round robin, so that one that was
//! just freed rests as long as possible.
//!
//! Next to the address files, `owners/` maps each owner back to its address, because ADD and DEL must
//! not read every file of the directory. The address files are the truth; the map may be missing.

use std::fs::{File, OpenOptions};
use std::io::{ErrorKind, Write};
use std::net::Ipv4Addr;
use std::path::PathBuf;

use super::{BridgeConf, Subnet};
use crate::result::CniError;

const LAST_RESERVED: &str = "last_reserved_ip.0";

pub(super) struct Addresses {
    dir: PathBuf,
    subnet: Subnet,
}

/// Held while files are changed; the kernel lets go of it if the process dies.
struct Lock(#[expect(dead_code, reason = "its drop unlocks")] File);

fn failed(what: impl std::fmt::Display) -> impl FnOnce(std::io::Error) -> CniError {
    move |error| CniError::new(CniError::IO_FAILURE, format!("{what}: {error}"))
}

impl Addresses {
    pub fn new(conf: &BridgeConf, subnet: Subnet) -> Addresses {
        Addresses {
            dir: conf.data_dir.join(&conf.name),
            subnet,
        }
    }

    fn lock(&self) -> Result<Lock, CniError> {
        let path = self.dir.join("lock");
        let open = || {
            OpenOptions::new()
                .write(true)
                .create(true)
                .truncate(false)
                .open(&path)
        };
        let file = match open() {
            Err(error) if error.kind() == ErrorKind::NotFound => {
                std::fs::create_dir_all(&self.dir).and_then(|()| open())
            }
            opened => opened,
        }
        .map_err(failed(path.display()))?;
        file.lock().map_err(failed("lock the address files"))?;
        // Only now: whoever made the first of the two directories may not have come to the second.
        let owners = self.dir.join("owners");
        std::fs::create_dir_all(&owners).map_err(failed(owners.display()))?;
        Ok(Lock(file))
    }

    fn owner_path(&self, container_id: &str, ifname: &str) -> PathBuf {
        self.dir.join("owners").join(format!("{container_id}-{ifname}"))
    }

    /// The address of an owner who has none yet, or the one it already has.
    pub fn allocate(&self, container_id: &str, ifname: &str) -> Result<Ipv4Addr, CniError> {
        let _lock = self.lock()?;
        if let Some(address) = self.mapped(container_id, ifname) {
            return Ok(address);
        }
        let last = std::fs::read_to_string(self.dir.join(LAST_RESERVED))
            .ok()
            .and_then(|text| self.subnet.index(text.trim().parse().ok()?));
        let count = self.subnet.len();
        let start = last.map_or(0, |last| (last + 1) % count);
        for step in 0..count {
            let address = self.subnet.pod((start + step) % count);
            let path = self.dir.join(address.to_string());
            let mut file = match OpenOptions::new().write(true).create_new(true).open(&path) {
                Ok(file) => file,
                // Without an owner: whoever made it was killed before it wrote one. The lock is ours, so
                // nobody is about to.
                Err(error) if error.kind() == ErrorKind::AlreadyExists => {
                    if std::fs::metadata(&path).map_or(0, |metadata| metadata.len()) > 0 {
                        continue;
                    }
                    let open = OpenOptions::new()
                        .write(true)
                        .create(true)
                        .truncate(true)
                        .open(&path);
                    open.map_err(failed(path.display()))?
                }
                Err(error) => return Err(failed(path.display())(error)),
            };
            let mut reserve = || {
                file.write_all(owner_text(container_id, ifname).as_bytes())?;
                std::fs::write(self.owner_path(container_id, ifname), address.to_string())?;
                std::fs::write(self.dir.join(LAST_RESERVED), address.to_string())
            };
            if let Err(error) = reserve() {
                // A full disk must not cost an address.
                let _ = std::fs::remove_file(&path);
                let _ = std::fs::remove_file(self.owner_path(container_id, ifname));
                return Err(failed(path.display())(error));
            }
            return Ok(address);
        }
        Err(CniError::new(
            CniError::TRY_AGAIN_LATER,
            format!(
                "no IP addresses available in range set: {}-{}",
                self.subnet.pod(0),
                self.subnet.pod(count - 1)
            ),
        ))
    }

    pub fn find(&self, container_id: &str, ifname: &str) -> Result<Option<Ipv4Addr>, CniError> {
        let _lock = self.lock()?;
        Ok(self.mapped(container_id, ifname))
    }

    /// Frees what the owner has; having nothing is fine.
    pub fn release(&self, container_id: &str, ifname: &str) -> Result<(), CniError> {
        let _lock = self.lock()?;
        let owner_path = self.owner_path(container_id, ifname);
        let owner = owner_text(container_id, ifname);
        let addresses = match self.mapped(container_id, ifname) {
            Some(address) => vec![self.dir.join(address.to_string())],
            // ADD was cut off between its two files, or never happened.
            None => self
                .files()?
                .into_iter()
                .filter(|(_, text)| *text == owner)
                .map(|(path, _)| path)
                .collect(),
        };
        for path in addresses.into_iter().chain([owner_path]) {
            match std::fs::remove_file(&path) {
                Err(error) if error.kind() != ErrorKind::NotFound => {
                    return Err(failed(path.display())(error));
                }
                _ => {}
            }
        }
        Ok(())
    }

    /// Every address that is held, with its owner: container id, interface name, address.
    pub fn held(&self) -> Result<Vec<(String, String, Ipv4Addr)>, CniError> {
        let _lock = self.lock()?;
        Ok(self
            .files()?
            .into_iter()
            .filter_map(|(path, text)| {
                let address = path.file_name()?.to_str()?.parse().ok()?;
                let (id, ifname) = text.split_once("\r\n")?;
                Some((id.to_string(), ifname.to_string(), address))
            })
            .collect())
    }

    /// The address the map names, if the address file agrees and the subnet still is the same.
    fn mapped(&self, container_id: &str, ifname: &str) -> Option<Ipv4Addr> {
        let address: Ipv4Addr = std::fs::read_to_string(self.owner_path(container_id, ifname))
            .ok()?
            .trim()
            .parse()
            .ok()?;
        self.subnet.index(address)?;
        let owner = std::fs::read_to_string(self.dir.join(address.to_string())).ok()?;
        (owner == owner_text(container_id, ifname)).then_some(address)
    }

    fn files(&self) -> Result<Vec<(PathBuf, String)>, CniError> {
        let entries = std::fs::read_dir(&self.dir).map_err(failed(self.dir.display()))?;
        Ok(entries
            .filter_map(|entry| {
                let entry = entry.ok()?;
                entry.file_name().to_str()?.parse::<Ipv4Addr>().ok()?;
                Some((entry.path(), std::fs::read_to_string(entry.path()).ok()?))
            })
            .collect())
    }
}

fn owner_text(container_id: &str, ifname: &str) -> String {
    format!("{container_id}\r\n{ifname}")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn addresses(dir: &tempfile::TempDir, subnet: &str) -> Addresses {
        let mut conf = BridgeConf::new("br0", subnet, dir.path());
        conf.name = "net".into();
        Addresses::new(&conf, conf.parse_subnet().unwrap())
    }

    #[test]
    fn round_robin_idempotent_and_exhausted() {
        let dir = tempfile::tempdir().unwrap();
        let a = addresses(&dir, "10.0.0.0/29");
        let got: Vec<String> = ["a", "b", "a", "c"]
            .iter()
            .map(|id| a.allocate(id, "eth0").unwrap().to_string())
            .collect();
        assert_eq!(got, ["10.0.0.2", "10.0.0.3", "10.0.0.2", "10.0.0.4"]);
        a.release("a", "eth0").unwrap();
        a.release("a", "eth0").unwrap();
        assert_eq!(a.find("a", "eth0").unwrap(), None);
        // The freed one rests until the others are used.
        let next: Vec<String> = ["d", "e", "f"]
            .iter()
            .map(|id| a.allocate(id, "eth0").unwrap().to_string())
            .collect();
        assert_eq!(next, ["10.0.0.5", "10.0.0.6", "10.0.0.2"]);
        let full = a.allocate("g", "eth0").unwrap_err();
        assert_eq!(full.code, CniError::TRY_AGAIN_LATER);
        let mut owners: Vec<String> = a.held().unwrap().into_iter().map(|(id, _, _)| id).collect();
        owners.sort();
        assert_eq!(owners, ["b", "c", "d", "e", "f"]);
    }

    #[test]
    fn a_network_that_somebody_else_has_only_begun() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir(dir.path().join("net")).unwrap();
        let a = addresses(&dir, "10.0.0.0/29");
        assert_eq!(a.allocate("a", "eth0").unwrap().to_string(), "10.0.0.2");
    }

    #[test]
    fn survives_a_lost_map_and_a_new_subnet() {
        let dir = tempfile::tempdir().unwrap();
        let a = addresses(&dir, "10.0.0.0/24");
        a.allocate("a", "eth0").unwrap();
        std::fs::remove_file(dir.path().join("net/owners/a-eth0")).unwrap();
        a.release("a", "eth0").unwrap();
        assert!(a.held().unwrap().is_empty());
        a.allocate("b", "eth0").unwrap();
        let moved = addresses(&dir, "10.9.0.0/24");
        assert_eq!(moved.allocate("b", "eth0").unwrap().to_string(), "10.9.0.2");
        // Killed between making the file and writing the owner.
        std::fs::write(dir.path().join("net/10.9.0.3"), "").unwrap();
        assert_eq!(moved.allocate("c", "eth0").unwrap().to_string(), "10.9.0.3");
    }

    #[test]
    fn no_address_twice() {
        let dir = tempfile::tempdir().unwrap();
        let all = std::thread::scope(|scope| {
            let workers: Vec<_> = (0..8)
                .map(|worker| {
                    let a = addresses(&dir, "10.0.0.0/24");
                    scope.spawn(move || {
                        (0..20)
                            .map(|n| a.allocate(&format!("{worker}-{n}"), "eth0").unwrap())
                            .collect::<Vec<_>>()
                    })
                })
                .collect();
            workers
                .into_iter()
                .flat_map(|worker| worker.join().unwrap())
                .collect::<std::collections::HashSet<_>>()
        });
        assert_eq!(all.len(), 160);
    }
}
