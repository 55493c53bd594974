//! Host-local addresses of both families: one file an address, named after it and holding its owner, in a
//! directory a network. A lock file orders processes. Addresses are given out round robin, so that one that was
//! just freed rests as long as possible.
//!
//! Next to the address files, `owners/` maps each owner back to its addresses, because ADD and DEL must
//! not read every file of the directory. The address files are the truth; the map may be missing.

use std::collections::BTreeMap;
use std::fs::{File, OpenOptions};
use std::io::{ErrorKind, Write};
use std::net::IpAddr;
use std::path::PathBuf;

use super::BridgeConf;
use super::subnet::{Subnet, Subnets};
use crate::result::CniError;

pub(super) struct Addresses {
    dir: PathBuf,
    subnets: Subnets,
}

/// What one interface of a sandbox has, IPv4 first.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Held {
    pub(super) container_id: String,
    pub(super) ifname: String,
    pub(super) addresses: Vec<IpAddr>,
}

/// Held while files are changed; the kernel lets go of it if the process dies.
struct Lock(#[expect(dead_code, reason = "its drop unlocks")] File);

fn failed(what: impl std::fmt::Display) -> impl FnOnce(std::io::Error) -> CniError {
    move |error| CniError::new(CniError::IO_FAILURE, format!("{what}: {error}"))
}

impl Addresses {
    pub fn new(conf: &BridgeConf, subnets: Subnets) -> Addresses {
        Addresses {
            dir: conf.data_dir.join(&conf.name),
            subnets,
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

    /// The addresses of an owner who has none yet, one of each network, or those it already has.
    pub fn allocate(&self, container_id: &str, ifname: &str) -> Result<Vec<IpAddr>, CniError> {
        let _lock = self.lock()?;
        if let Some(addresses) = self.mapped(container_id, ifname) {
            return Ok(addresses);
        }
        self.free_former(container_id, ifname);
        let owner = owner_text(container_id, ifname);
        let mut addresses = Vec::new();
        let mut reserve = || -> Result<(), CniError> {
            for (number, subnet) in self.subnets.iter().enumerate() {
                addresses.push(self.reserve(number, subnet, &owner)?);
            }
            let text: Vec<String> = addresses.iter().map(IpAddr::to_string).collect();
            let path = self.owner_path(container_id, ifname);
            std::fs::write(&path, text.join("\n")).map_err(failed(path.display()))
        };
        if let Err(error) = reserve() {
            // A full disk, or a full network of the other family, must not cost an address.
            for address in addresses {
                let _ = std::fs::remove_file(self.dir.join(address.to_string()));
            }
            let _ = std::fs::remove_file(self.owner_path(container_id, ifname));
            return Err(error);
        }
        Ok(addresses)
    }

    /// Frees what the owner has of networks that the node no longer has.
    fn free_former(&self, container_id: &str, ifname: &str) {
        let text = std::fs::read_to_string(self.owner_path(container_id, ifname)).unwrap_or_default();
        for address in text.lines().filter_map(|line| line.trim().parse::<IpAddr>().ok()) {
            let path = self.dir.join(address.to_string());
            if std::fs::read_to_string(&path).is_ok_and(|owner| owner == owner_text(container_id, ifname)) {
                let _ = std::fs::remove_file(path);
            }
        }
    }

    /// Takes the next free address of a network.
    fn reserve(&self, number: usize, subnet: Subnet, owner: &str) -> Result<IpAddr, CniError> {
        let last_reserved = self.dir.join(format!("last_reserved_ip.{number}"));
        let last = std::fs::read_to_string(&last_reserved)
            .ok()
            .and_then(|text| subnet.index(text.trim().parse().ok()?));
        let count = subnet.len();
        let start = last.map_or(0, |last| (last + 1) % count);
        for step in 0..count {
            let address = subnet.pod((start + step) % count);
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
            let written = file
                .write_all(owner.as_bytes())
                .and_then(|()| std::fs::write(&last_reserved, address.to_string()));
            if let Err(error) = written {
                let _ = std::fs::remove_file(&path);
                return Err(failed(path.display())(error));
            }
            return Ok(address);
        }
        Err(CniError::new(
            CniError::TRY_AGAIN_LATER,
            format!(
                "no IP addresses available in range set: {}-{}",
                subnet.pod(0),
                subnet.pod(count - 1)
            ),
        ))
    }

    pub fn find(&self, container_id: &str, ifname: &str) -> Result<Option<Vec<IpAddr>>, CniError> {
        let _lock = self.lock()?;
        Ok(self.mapped(container_id, ifname))
    }

    /// Frees what the owner has; having nothing is fine.
    pub fn release(&self, container_id: &str, ifname: &str) -> Result<(), CniError> {
        let _lock = self.lock()?;
        let owner_path = self.owner_path(container_id, ifname);
        let owner = owner_text(container_id, ifname);
        let addresses: Vec<PathBuf> = match self.mapped(container_id, ifname) {
            Some(addresses) => addresses
                .iter()
                .map(|address| self.dir.join(address.to_string()))
                .collect(),
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

    /// Everything that is held, by owner.
    pub fn held(&self) -> Result<Vec<Held>, CniError> {
        let _lock = self.lock()?;
        let mut owners: BTreeMap<(String, String), Vec<IpAddr>> = BTreeMap::new();
        for (path, text) in self.files()? {
            let address = path.file_name().and_then(|name| name.to_str()?.parse().ok());
            if let (Some(address), Some((id, ifname))) = (address, text.split_once("\r\n")) {
                let owner = (id.to_string(), ifname.to_string());
                owners.entry(owner).or_default().push(address);
            }
        }
        let held = owners.into_iter().map(|((container_id, ifname), mut addresses)| {
            addresses.sort();
            Held {
                container_id,
                ifname,
                addresses,
            }
        });
        Ok(held.collect())
    }

    /// The addresses the map names, if the address files agree and the networks still are the same.
    fn mapped(&self, container_id: &str, ifname: &str) -> Option<Vec<IpAddr>> {
        let text = std::fs::read_to_string(self.owner_path(container_id, ifname)).ok()?;
        let addresses: Vec<IpAddr> = text
            .lines()
            .map(|line| line.trim().parse().ok())
            .collect::<Option<_>>()?;
        let mut subnets = self.subnets.iter();
        for address in &addresses {
            subnets.next()?.index(*address)?;
            let owner = std::fs::read_to_string(self.dir.join(address.to_string())).ok()?;
            if owner != owner_text(container_id, ifname) {
                return None;
            }
        }
        subnets.next().is_none().then_some(addresses)
    }

    fn files(&self) -> Result<Vec<(PathBuf, String)>, CniError> {
        let entries = std::fs::read_dir(&self.dir).map_err(failed(self.dir.display()))?;
        Ok(entries
            .filter_map(|entry| {
                let entry = entry.ok()?;
                entry.file_name().to_str()?.parse::<IpAddr>().ok()?;
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
    use skiff_meta::net::parse_list;

    fn addresses(dir: &tempfile::TempDir, subnets: &str) -> Addresses {
        let mut conf = BridgeConf::new("br0", parse_list(subnets).unwrap(), dir.path());
        conf.name = "net".into();
        Addresses::new(&conf, conf.validate().unwrap())
    }

    fn text(addresses: &[IpAddr]) -> String {
        let texts: Vec<String> = addresses.iter().map(IpAddr::to_string).collect();
        texts.join(" ")
    }

    #[test]
    fn round_robin_idempotent_and_exhausted() {
        let dir = tempfile::tempdir().unwrap();
        let a = addresses(&dir, "10.0.0.0/29");
        let got: Vec<String> = ["a", "b", "a", "c"]
            .iter()
            .map(|id| text(&a.allocate(id, "eth0").unwrap()))
            .collect();
        assert_eq!(got, ["10.0.0.2", "10.0.0.3", "10.0.0.2", "10.0.0.4"]);
        a.release("a", "eth0").unwrap();
        a.release("a", "eth0").unwrap();
        assert_eq!(a.find("a", "eth0").unwrap(), None);
        // The freed one rests until the others are used.
        let next: Vec<String> = ["d", "e", "f"]
            .iter()
            .map(|id| text(&a.allocate(id, "eth0").unwrap()))
            .collect();
        assert_eq!(next, ["10.0.0.5", "10.0.0.6", "10.0.0.2"]);
        let full = a.allocate("g", "eth0").unwrap_err();
        assert_eq!(full.code, CniError::TRY_AGAIN_LATER);
        let mut owners: Vec<String> = a
            .held()
            .unwrap()
            .into_iter()
            .map(|held| held.container_id)
            .collect();
        owners.sort();
        assert_eq!(owners, ["b", "c", "d", "e", "f"]);
    }

    #[test]
    fn a_network_that_somebody_else_has_only_begun() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir(dir.path().join("net")).unwrap();
        let a = addresses(&dir, "10.0.0.0/29");
        assert_eq!(text(&a.allocate("a", "eth0").unwrap()), "10.0.0.2");
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
        assert_eq!(text(&moved.allocate("b", "eth0").unwrap()), "10.9.0.2");
        assert!(
            !dir.path().join("net/10.0.0.2").exists(),
            "the former address is free"
        );
        // Killed between making the file and writing the owner.
        std::fs::write(dir.path().join("net/10.9.0.3"), "").unwrap();
        assert_eq!(text(&moved.allocate("c", "eth0").unwrap()), "10.9.0.3");
    }

    #[test]
    fn one_address_of_each_family() {
        let dir = tempfile::tempdir().unwrap();
        let both = addresses(&dir, "10.0.0.0/29,fd00::/126");
        assert_eq!(text(&both.allocate("a", "eth0").unwrap()), "10.0.0.2 fd00::2");
        assert_eq!(text(&both.allocate("b", "eth0").unwrap()), "10.0.0.3 fd00::3");
        assert_eq!(
            text(&both.find("b", "eth0").unwrap().unwrap()),
            "10.0.0.3 fd00::3"
        );
        // One family has no more: the address of the other one is not lost.
        both.allocate("c", "eth0").unwrap_err();
        assert_eq!(both.held().unwrap().len(), 2);
        both.release("a", "eth0").unwrap();
        assert_eq!(text(&both.allocate("c", "eth0").unwrap()), "10.0.0.5 fd00::2");
        assert_eq!(both.held().unwrap()[1].addresses.len(), 2);
        // From one family to both, with sandboxes that outlive the change.
        let dir = tempfile::tempdir().unwrap();
        addresses(&dir, "10.0.0.0/29").allocate("a", "eth0").unwrap();
        let both = addresses(&dir, "10.0.0.0/29,fd00::/126");
        assert_eq!(text(&both.held().unwrap()[0].addresses), "10.0.0.2");
        both.release("a", "eth0").unwrap();
        assert!(both.held().unwrap().is_empty());
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
                .flatten()
                .collect::<std::collections::HashSet<_>>()
        });
        assert_eq!(all.len(), 160);
    }
}
