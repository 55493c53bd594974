//! The machine's devices, the one on which an address is announced, and the addresses that the kernel answers for.
//!
//! An address of the pool is one of the device, with a lifetime that is renewed all the time: the kernel answers for it
//! while skiff is restarted, and stops by itself when skiff does not come back. A file remembers which ones are ours.

use std::collections::BTreeMap;
use std::io;
use std::net::{IpAddr, Ipv6Addr};
use std::path::{Path, PathBuf};
use std::time::Duration;

use nlink::netlink::addr::{Ipv4Address, Ipv6Address};
use nlink::netlink::types::addr::Scope;
use nlink::netlink::{Connection, Route};
use skiff_meta::net::Cidr;

use super::Error;
use super::wire::Hardware;

/// Less than it takes until a node whose skiff is dead counts as not ready, and others count on its silence.
pub(super) const LIFETIME: Duration = Duration::from_secs(40);
pub(super) const RENEW_PERIOD: Duration = Duration::from_secs(10);
const FOREVER: u32 = u32::MAX;

/// A device that addresses may be announced on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Device {
    pub(super) index: u32,
    pub(super) name: String,
    pub(super) hardware: Hardware,
    /// Its addresses with their networks, without those of the pool.
    pub(super) networks: Vec<(IpAddr, Cidr)>,
    pub(super) link_local: Option<Ipv6Addr>,
}

impl Device {
    pub(super) fn is_on_link(&self, address: IpAddr) -> bool {
        self.networks.iter().any(|(_, network)| network.contains(address))
    }
}

/// The device whose network the address is in, else the one with an address of this node.
pub(super) fn device_for<'a>(address: IpAddr, devices: &'a [Device], own: &[IpAddr]) -> Option<&'a Device> {
    let has_own = |device: &&Device| device.networks.iter().any(|(address, _)| own.contains(address));
    devices
        .iter()
        .find(|device| device.is_on_link(address))
        .or_else(|| devices.iter().find(has_own))
}

pub(super) struct Kernel {
    route: Connection<Route>,
    file: PathBuf,
    /// What this machine answers for, by the names of devices: numbers change with a restart of the machine.
    ours: BTreeMap<IpAddr, String>,
}

impl Kernel {
    pub(super) fn open(state_dir: &Path) -> Result<Kernel, Error> {
        let file = state_dir.join("announced.json");
        let ours = match std::fs::read(&file) {
            Ok(text) => serde_json::from_slice(&text).unwrap_or_default(),
            Err(error) if error.kind() == io::ErrorKind::NotFound => BTreeMap::new(),
            Err(source) => return Err(Error::File { path: file, source }),
        };
        Ok(Kernel {
            route: Connection::<Route>::new()?,
            file,
            ours,
        })
    }

    pub(super) fn ours(&self) -> Vec<IpAddr> {
        self.ours.keys().copied().collect()
    }

    fn save(&self) -> Result<(), Error> {
        let failed = |source| Error::File {
            path: self.file.clone(),
            source,
        };
        if let Some(folder) = self.file.parent() {
            std::fs::create_dir_all(folder).map_err(failed)?;
        }
        let text = serde_json::to_vec(&self.ours).unwrap_or_default();
        skiff_fs::write_atomically(&self.file, &text, 0o600).map_err(failed)
    }

    /// The devices of the machine towards others, and those of our addresses that the kernel has. `skipped` are the pod
    /// network's own.
    pub(super) async fn devices(&self, skipped: &[String]) -> Result<(Vec<Device>, Vec<IpAddr>), Error> {
        let links = self.route.get_links().await?;
        let mut devices: Vec<Device> = Vec::new();
        for link in links {
            let Some(name) = link.name() else { continue };
            let hardware = link.address().and_then(|bytes| Hardware::try_from(bytes).ok());
            let Some(hardware) = hardware.filter(|hardware| *hardware != [0; 6]) else {
                continue;
            };
            if link.is_up() && !link.is_loopback() && !skipped.iter().any(|skipped| skipped == name) {
                devices.push(Device {
                    index: link.ifindex(),
                    name: name.to_owned(),
                    hardware,
                    networks: Vec::new(),
                    link_local: None,
                });
            }
        }
        let mut present = Vec::new();
        for message in self.route.get_addresses().await? {
            let Some(address) = message.primary_address().copied() else {
                continue;
            };
            let Some(device) = devices
                .iter_mut()
                .find(|device| device.index == message.ifindex())
            else {
                continue;
            };
            if self.ours.contains_key(&address) {
                present.push(address);
                continue;
            }
            match address {
                IpAddr::V6(address) if address.is_unicast_link_local() => {
                    device.link_local.get_or_insert(address);
                }
                _ => device
                    .networks
                    .extend(Cidr::new(address, message.prefix_len()).map(|network| (address, network))),
            }
        }
        // Without addresses, it is a port of something.
        devices.retain(|device| !device.networks.is_empty() || device.link_local.is_some());
        Ok((devices, present))
    }

    /// Has the kernel answer for the address, or go on doing so. `lasting`: also if skiff does not come back, because no
    /// other machine could.
    pub(super) async fn hold(
        &mut self,
        address: IpAddr,
        device: &Device,
        lasting: bool,
    ) -> Result<(), Error> {
        if self.ours.get(&address) != Some(&device.name) {
            self.release(address).await?;
            // Before the address is there, so that no address is left that nobody knows.
            self.ours.insert(address, device.name.clone());
            self.save()?;
        }
        let valid = match lasting {
            true => FOREVER,
            false => u32::try_from(LIFETIME.as_secs()).unwrap_or(FOREVER),
        };
        // Not for connections of the machine's own: of link scope, deprecated.
        let held = match address {
            IpAddr::V4(address) => {
                let address = Ipv4Address::with_index(device.index, address, 32)
                    .scope(Scope::Link)
                    .preferred_lifetime(0)
                    .valid_lifetime(valid);
                self.route.replace_address(address).await
            }
            IpAddr::V6(address) => {
                let address = Ipv6Address::with_index(device.index, address, 128)
                    .nodad()
                    .preferred_lifetime(0)
                    .valid_lifetime(valid);
                self.route.replace_address(address).await
            }
        };
        Ok(held?)
    }

    pub(super) async fn release(&mut self, address: IpAddr) -> Result<(), Error> {
        let Some(name) = self.ours.get(&address) else {
            return Ok(());
        };
        let links = self.route.get_links().await?;
        if let Some(link) = links.iter().find(|link| link.name() == Some(name)) {
            let index = link.ifindex();
            let present = self.route.get_addresses_by_index(index).await?;
            let is_there = present
                .iter()
                .any(|message| message.primary_address() == Some(&address));
            if is_there {
                let length = if address.is_ipv4() { 32 } else { 128 };
                self.route.del_address_by_index(index, address, length).await?;
            }
        }
        self.ours.remove(&address);
        self.save()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_belongs_to_the_device_with_its_network() {
        let device = |index, networks: &[(&str, u8)]| Device {
            index,
            name: format!("eth{index}"),
            hardware: [2, 0, 0, 0, 0, index as u8],
            networks: networks
                .iter()
                .map(|(address, prefix)| {
                    let address = address.parse().unwrap();
                    (address, Cidr::new(address, *prefix).unwrap())
                })
                .collect(),
            link_local: None,
        };
        let devices = [
            device(1, &[("10.0.0.5", 24)]),
            device(2, &[("192.0.2.5", 24), ("2001:db8::5", 64)]),
        ];
        let own = ["10.0.0.5".parse().unwrap()];
        let chosen =
            |address: &str| device_for(address.parse().unwrap(), &devices, &own).map(|device| device.index);
        assert_eq!(chosen("192.0.2.200"), Some(2));
        assert_eq!(chosen("2001:db8::99"), Some(2));
        assert_eq!(chosen("10.0.0.77"), Some(1));
        assert_eq!(chosen("198.51.100.1"), Some(1), "routed to the node's link");
        assert_eq!(device_for("198.51.100.1".parse().unwrap(), &devices, &[]), None);
    }
}
